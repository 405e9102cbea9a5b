// Retention of a request's KV: whether it uses the prefix cache, what it leaves there, how dear that is and for how long.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_event_log.h"
#include "engine/kv/kv_memory.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/prefix_engine_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::Load;
using std::chrono::seconds;

constexpr int32_t kWholeBlocks = 10;
constexpr int32_t kCached = kWholeBlocks * kBlockTokens;
constexpr int32_t kTokens = kCached + 3;

class WorthKeepingTest : public kv_tiers::PrefixEngineTest {
 protected:
  Reply Answer(std::vector<int32_t> prompt, const CacheOptions& cache, const char* policy = "dense",
               int32_t max_tokens = 1) {
    Request request = MakeRequest(++id_, std::move(prompt), max_tokens);
    request.tenant = "a";
    request.cache = cache;
    request.policy = *ParseAttentionPolicy(policy);
    return Send(std::move(request));
  }
  // Prompt tokens that were found.
  int32_t Ask(std::vector<int32_t> prompt, const CacheOptions& cache = {}) {
    return Answer(std::move(prompt), cache).last.usage.cached_tokens;
  }
  // Steps until what is to be saved is saved.
  void Save() { memory_->Flush(seconds(60)); }
  // Retentions of all that the store has, and how many there are.
  std::pair<int, std::vector<storage::BlockInfo>> InStore() const {
    std::vector<storage::BlockInfo> all;
    store_->ForEach(
        [&](const storage::BlockKey&, const storage::BlockInfo& info) { all.push_back(info); });
    return {static_cast<int>(all.size()), all};
  }
  uint64_t BytesOfTenant() const { return store_->TenantBytes(TenantSalt("a")); }
  // Makes everything that no request holds leave fast memory.
  void FillFastMemory() {
    for (int32_t i = 0; i < 6; ++i) Ask(Prompt(kContext - 20, 1000 + i));
  }
};

TEST_F(WorthKeepingTest, WithoutUseAllIsComputedAndTheTokensAreTheSame) {
  const auto model = Load(OnDisk());
  const auto end = Run(*model);
  const Reply first = Answer(Prompt(kTokens), {}, "dense", 20);
  EXPECT_EQ(first.last.usage.cached_tokens, 0);
  Save();
  const Reply again = Answer(Prompt(kTokens), {.use = false}, "dense", 20);
  EXPECT_EQ(again.last.usage.cached_tokens, 0);
  EXPECT_EQ(again.tokens, first.tokens);
  const EngineStats stats = engine_->stats();
  EXPECT_EQ(stats.prefix_tokens_pool + stats.prefix_tokens_store, 0u);
  EXPECT_EQ(Ask(Prompt(kTokens)), kCached);
  EXPECT_EQ(Ask(Prompt(kTokens, 1), {.use = false}), 0);
  EXPECT_EQ(Ask(Prompt(kTokens, 1)), kCached) << "it is found by others all the same";
}

TEST_F(WorthKeepingTest, WithoutStoreNothingOfItIsFound) {
  KvEventLog events({.unix_seconds = [] { return 0.0; }});
  kv_events_ = &events;
  {
    const auto model = Load(OnDisk());
    const auto end = Run(*model);
    for (const char* policy : {"dense", "lsh:k=5,window=9,suffix=30"}) {
      Answer(Prompt(kTokens), {.store = false}, policy, 20);
    }
    Save();
    EXPECT_EQ(events.size(KvTier::kFast), 0u);
    EXPECT_EQ(BytesOfTenant(), 0u);
    EXPECT_EQ(InStore().first, 0);
    EXPECT_EQ(Ask(Prompt(kTokens)), 0);
    // Blocks that others left are used, and those behind them stay out.
    std::vector<int32_t> longer = Prompt(kTokens + 4 * kBlockTokens);
    EXPECT_EQ(Ask(longer, {.store = false}), kCached);
    EXPECT_EQ(Ask(longer), kCached);
    EXPECT_EQ(Ask(longer), kCached + 4 * kBlockTokens);
    Save();
  }
  const auto model = Load(OnDisk());
  const auto end = Run(*model);
  EXPECT_EQ(Ask(Prompt(kTokens, 7), {.store = false}), 0);
  EXPECT_EQ(Ask(Prompt(kTokens, 7)), 0);
  EXPECT_EQ(Ask(Prompt(kTokens)), kCached) << "others' KV is in the store";
}

// The same tokens as what the store has: its copy is not this request's to erase.
TEST_F(WorthKeepingTest, WithoutUseAndStoreOthersKeepWhatTheyHave) {
  ModelOptions options = Tiered();
  options.retrieval.index = "lsh";
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("paged");
  {
    const auto model = Load(options);
    const auto end = Run(*model);
    Ask(Prompt(kTokens));
    Save();
  }
  const auto model = Load(options);
  const auto end = Run(*model);
  const auto before = InStore().first;
  EXPECT_GT(before, 0);
  const Reply reply = Answer(Prompt(kTokens), {.use = false, .store = false}, "dense", 30);
  EXPECT_EQ(reply.last.usage.cached_tokens, 0);
  FillFastMemory();
  EXPECT_GT(memory_->stats().evicted_frames, 0u) << "nothing was swapped";
  EXPECT_EQ(Ask(Prompt(kTokens)), kCached);
}

TEST_F(WorthKeepingTest, LowerPrioritiesLeaveFastMemoryFirst) {
  // Room for four prompts.
  const auto model = Load(InMemory(4 * (kWholeBlocks + 1)));
  const auto end = Run(*model);
  for (const auto& [salt, priority] : {std::pair{1, 6}, {2, 3}, {3, 0}}) {
    Ask(Prompt(kTokens, salt), {.priority = static_cast<uint8_t>(priority)});
  }
  // Three more of the usual priority: the oldest, which is the dearest, is what stays.
  for (int salt = 4; salt < 7; ++salt) Ask(Prompt(kTokens, salt));
  EXPECT_EQ(Ask(Prompt(kTokens, 1), {.priority = 6}), kCached);
  EXPECT_EQ(Ask(Prompt(kTokens, 3)), 0);
  EXPECT_EQ(Ask(Prompt(kTokens, 2)), 0);
  // Found by somebody to whom it is dear, it is so from then on.
  Ask(Prompt(kTokens, 8), {.priority = 0});
  EXPECT_EQ(Ask(Prompt(kTokens, 8), {.priority = 6}), kCached);
  for (int salt = 10; salt < 14; ++salt) Ask(Prompt(kTokens, salt));
  EXPECT_EQ(Ask(Prompt(kTokens, 8)), kCached);
}

TEST_F(WorthKeepingTest, TheStoreHasPriorityAndTimeOfEverything) {
  const auto model = Load(OnDisk());
  const auto end = Run(*model);
  const auto answer = [this](const CacheOptions& cache) {
    Answer(Prompt(kTokens), cache, "lsh:k=5,window=9,suffix=30");
  };
  answer({.priority = 5, .ttl = seconds(1000)});
  Save();
  const auto [count, all] = InStore();
  // KV of the blocks before the suffix, and codes beside it.
  EXPECT_EQ(count, (kWholeBlocks - 2) * (config_.num_layers() + 1));
  for (const storage::BlockInfo& info : all) {
    EXPECT_EQ(info.priority, 5);
    EXPECT_GT(info.ttl_s, 900u);
    EXPECT_LE(info.ttl_s, 1000u);
  }
  // A request that uses it for longer keeps it longer, with what lies beside it.
  answer({.priority = 2, .ttl = seconds(2000)});
  for (const storage::BlockInfo& info : InStore().second) {
    EXPECT_EQ(info.priority, 5);
    EXPECT_GT(info.ttl_s, 1900u);
  }
  answer({.use = true, .store = false});
  EXPECT_GT(InStore().second.at(0).ttl_s, 1900u) << "a request that leaves nothing keeps nothing";
  answer({});
  for (const storage::BlockInfo& info : InStore().second) EXPECT_EQ(info.ttl_s, 0u);
  // And nobody shortens that.
  answer({.ttl = seconds(5)});
  answer({.use = false, .ttl = seconds(5)});
  Save();
  for (const storage::BlockInfo& info : InStore().second) EXPECT_EQ(info.ttl_s, 0u);
}

TEST_F(WorthKeepingTest, TimeIsOverInFastMemory) {
  const auto model = Load(InMemory(4 * (kContext / kBlockTokens)));
  const auto end = Run(*model);
  Ask(Prompt(kTokens), {.ttl = seconds(10)});
  Ask(Prompt(kTokens, 1));
  clock_.Advance(seconds(9));
  EXPECT_EQ(Ask(Prompt(kTokens), {.ttl = seconds(10)}), kCached);  // ten seconds more
  clock_.Advance(seconds(9));
  EXPECT_EQ(Ask(Prompt(kTokens), {.store = false}), kCached);
  clock_.Advance(seconds(2));
  const int32_t idle = engine_->stats().blocks_idle;
  engine_->Step();  // which looks at all blocks, as there are few
  EXPECT_EQ(engine_->stats().blocks_idle, idle - kWholeBlocks) << "their memory is free";
  EXPECT_EQ(Ask(Prompt(kTokens)), 0);
  EXPECT_EQ(Ask(Prompt(kTokens, 1)), kCached);
  clock_.Advance(seconds(1000));
  EXPECT_EQ(Ask(Prompt(kTokens)), kCached) << "kept for good since";
}

// Between two looks of the sweep, too.
TEST_F(WorthKeepingTest, WhatHasExpiredIsNotFoundHoweverMuchThereIs) {
  const auto model = Load(InMemory(40 * (kContext / kBlockTokens)));
  const auto end = Run(*model);
  for (int salt = 1; salt < 30; ++salt) Ask(Prompt(kContext - 20, salt));
  Ask(Prompt(kTokens), {.ttl = seconds(10)});
  clock_.Advance(seconds(10));
  EXPECT_EQ(Ask(Prompt(kTokens)), 0);
}

TEST_F(WorthKeepingTest, WhatExpiresUnderARequestLeavesTheRequestAlone) {
  const auto model = Load(OnDisk());
  const auto end = Run(*model);
  const Reply alone = Answer(Prompt(kTokens), {.store = false}, "dense", 60);
  Client client;
  Request request = MakeRequest(++id_, Prompt(kTokens), 60);
  request.tenant = "a";
  request.cache.ttl = seconds(5);
  ASSERT_TRUE(engine_->Submit(std::move(request), client.output).ok());
  for (int i = 0; i < 20; ++i) {
    clock_.Advance(seconds(2));
    engine_->Step();
  }
  StepUntilIdle(*engine_);
  EXPECT_EQ(client.Read().tokens, alone.tokens);
  clock_.Advance(seconds(10));
  engine_->Step();
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_EQ(Ask(Prompt(kTokens)), 0);
  EXPECT_EQ(Ask(Prompt(kTokens)), kCached);
}

TEST_F(WorthKeepingTest, ASaltIsSharedWithItselfAlone) {
  KvEventLog events({.unix_seconds = [] { return 0.0; }});
  kv_events_ = &events;
  const auto model = Load(OnDisk());
  const auto end = Run(*model);
  EXPECT_EQ(Ask(Prompt(kTokens), {.salt = "x"}), 0);
  EXPECT_EQ(events.size(KvTier::kFast), 0u) << "a router would send others here for it";
  EXPECT_EQ(Ask(Prompt(kTokens)), 0);
  EXPECT_EQ(Ask(Prompt(kTokens), {.salt = "y"}), 0);
  EXPECT_EQ(Ask(Prompt(kTokens), {.salt = "x"}), kCached);
  EXPECT_EQ(Ask(Prompt(kTokens)), kCached);
  Save();
  // The bytes are the tenant's, whatever the salts.
  EXPECT_GE(BytesOfTenant(), 3 * kWholeBlocks * memory_->store().StoredBlockBytes());
}

}  // namespace
}  // namespace winnow::engine
