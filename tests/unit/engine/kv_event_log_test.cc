// The log of KV events, and what the engine tells it: a reader of the events must know,
// before a request runs, how much of its prompt is here.
#include "engine/kv/kv_event_log.h"

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "gtest/gtest.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine {
namespace {

using Kind = KvEvent::Kind;

BlockName Name(int32_t index, uint8_t text = 1) {
  BlockName name;
  name.chain.fill(static_cast<uint8_t>(16 * text + index));
  name.index = index;
  return name;
}
std::optional<Digest> ParentOf(const BlockName& name, uint8_t text = 1) {
  return name.index == 0 ? std::nullopt : std::optional(Name(name.index - 1, text).chain);
}
const std::vector<int32_t> kTokens = {5, 6, 7, 8};

KvEventLog::Options Small(size_t batches = 100, size_t events = 1000) {
  return {.max_batches = batches, .max_events = events, .unix_seconds = [] { return 12.5; }};
}

void Store(KvEventLog& log, KvTier tier, int32_t index) {
  log.Stored(tier, Name(index), ParentOf(Name(index)), kTokens);
}

TEST(KvEventLog, BeginsWithAClear) {
  KvEventLog log(Small());
  EXPECT_EQ(log.range().first, 0u);
  EXPECT_EQ(log.range().next, 1u);
  const auto batches = log.Read(0, 10);
  ASSERT_TRUE(batches.has_value());
  ASSERT_EQ(batches->size(), 1u);
  EXPECT_EQ((*batches)[0]->sequence, 0u);
  EXPECT_EQ((*batches)[0]->unix_seconds, 12.5);
  ASSERT_EQ((*batches)[0]->events.size(), 1u);
  EXPECT_EQ((*batches)[0]->events[0].kind, Kind::kCleared);
}

TEST(KvEventLog, TellsChangesOnceAndInOrder) {
  KvEventLog log(Small());
  log.Commit();  // nothing: no batch
  EXPECT_EQ(log.range().next, 1u);
  Store(log, KvTier::kFast, 0);
  Store(log, KvTier::kFast, 1);
  Store(log, KvTier::kFast, 0);  // is there
  log.Copied(KvTier::kDisk, Name(1).chain);
  log.Copied(KvTier::kDisk, Name(1).chain);   // is there
  log.Copied(KvTier::kDisk, Name(2).chain);   // nothing is known of it
  log.Removed(KvTier::kHost, Name(1).chain);  // is not there
  log.Removed(KvTier::kFast, Name(1).chain);
  log.Removed(KvTier::kFast, Name(1).chain);
  log.Commit();
  const auto batch = log.Read(1, 1)->at(0);
  ASSERT_EQ(batch->events.size(), 4u);
  const std::pair<Kind, KvTier> expected[] = {{Kind::kStored, KvTier::kFast},
                                              {Kind::kStored, KvTier::kFast},
                                              {Kind::kStored, KvTier::kDisk},
                                              {Kind::kRemoved, KvTier::kFast}};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(batch->events[i].kind, expected[i].first) << i;
    EXPECT_EQ(batch->events[i].tier, expected[i].second) << i;
  }
  EXPECT_EQ(batch->events[2].block->name.chain, Name(1).chain);
  EXPECT_EQ(batch->events[2].block->tokens, kTokens);
  EXPECT_EQ(batch->events[2].block->parent, Name(0).chain);
  EXPECT_EQ(log.size(KvTier::kFast), 1u);
  EXPECT_EQ(log.size(KvTier::kDisk), 1u);
  // Gone from every tier: unknown.
  log.Removed(KvTier::kDisk, Name(1).chain);
  log.Copied(KvTier::kDisk, Name(1).chain);
  EXPECT_EQ(log.size(KvTier::kDisk), 0u);
}

TEST(KvEventLog, KeepsAsManyBatchesAndEventsAsItMay) {
  KvEventLog log(Small(4));
  for (int i = 0; i < 10; ++i) {
    Store(log, KvTier::kFast, i);
    log.Commit();
  }
  EXPECT_EQ(log.range().next, 11u);
  EXPECT_EQ(log.range().first, 7u);
  EXPECT_FALSE(log.Read(6, 1).has_value());
  EXPECT_EQ(log.Read(7, 100)->size(), 4u);
  EXPECT_EQ(log.Read(7, 2)->back()->sequence, 8u);
  EXPECT_TRUE(log.Read(11, 1)->empty());
  EXPECT_FALSE(log.Read(12, 1).has_value());  // of another process's life

  KvEventLog by_events(Small(100, 5));
  for (int batch = 0; batch < 4; ++batch) {
    for (int i = 0; i < 3; ++i) Store(by_events, KvTier::kFast, 3 * batch + i);
    by_events.Commit();
  }
  EXPECT_EQ(by_events.range().first, 4u);  // two would be six events
}

TEST(KvEventLog, ASnapshotIsWhatIsStoredParentsFirst) {
  KvEventLog log(Small(2));
  for (const int index : {3, 2, 1, 0}) {
    Store(log, KvTier::kFast, index);
    log.Commit();
  }
  log.Copied(KvTier::kHost, Name(2).chain);
  log.Removed(KvTier::kFast, Name(3).chain);
  log.Commit();
  Store(log, KvTier::kFast, 4);  // no batch yet, so it is in none
  const KvEventLog::Snapshot snapshot = log.Take();
  EXPECT_EQ(snapshot.next, 6u);
  std::vector<std::pair<int32_t, KvTier>> stored;
  for (const KvEvent& event : snapshot.stored) {
    EXPECT_EQ(event.kind, Kind::kStored);
    stored.emplace_back(event.block->name.index, event.tier);
  }
  const std::vector<std::pair<int32_t, KvTier>> expected = {
      {0, KvTier::kFast}, {1, KvTier::kFast}, {2, KvTier::kFast}, {2, KvTier::kHost}};
  EXPECT_EQ(stored, expected);
  log.Cleared();
  log.Commit();
  EXPECT_TRUE(log.Take().stored.empty());
  EXPECT_EQ(log.size(KvTier::kFast), 0u);
}

TEST(KvEventLog, LooksAtEveryBlockOfATierInTurn) {
  KvEventLog log(Small());
  EXPECT_EQ(log.NextOf(KvTier::kDisk), nullptr);
  for (int i = 0; i < 5; ++i) Store(log, KvTier::kDisk, i);
  std::vector<int32_t> seen;
  for (int i = 0; i < 10; ++i) seen.push_back(log.NextOf(KvTier::kDisk)->name.index);
  EXPECT_EQ(seen, (std::vector<int32_t>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4}));
  log.Removed(KvTier::kDisk, Name(1).chain);
  EXPECT_EQ(log.NextOf(KvTier::kDisk)->name.index, 0);
  EXPECT_EQ(log.NextOf(KvTier::kDisk)->name.index, 2);
}

TEST(KvEventLog, AWaitEndsWithTheBatchOrTheWake) {
  KvEventLog log(Small());
  std::thread writer([&] {
    Store(log, KvTier::kFast, 0);
    log.Commit();
  });
  while (log.range().next == 1) log.WaitFor(1, std::chrono::hours(1));
  writer.join();
  std::atomic<bool> over = false;
  std::thread waiter([&] {
    log.WaitFor(2, std::chrono::hours(1));
    over = true;
  });
  while (!over) log.Wake();
  waiter.join();
}

// ---- what the engine tells ----

// A router's view of the events: blocks by their tokens, and no idea of names.
class Mirror {
 public:
  void Follow(const KvEventLog& log) {
    const auto batches = log.Read(next_, 1'000'000);
    ASSERT_TRUE(batches.has_value());
    for (const auto& batch : *batches) {
      EXPECT_EQ(batch->sequence, next_++);
      for (const KvEvent& event : batch->events) Apply(event);
    }
  }

  // Tokens of the prompt whose blocks are in a tier from the first one on; its last token is
  // computed in any case.
  int32_t Known(const Request& request) const {
    const Digest tenant = Sha256(request.tenant);
    std::optional<Digest> parent;
    int32_t known = 0;
    const auto size = static_cast<int32_t>(request.prompt.size());
    while (known + kv_tiers::kBlockTokens < size) {
      const std::vector<int32_t> tokens(request.prompt.begin() + known,
                                        request.prompt.begin() + known + kv_tiers::kBlockTokens);
      const auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& entry) {
        const KvBlockContent& block = *entry.second.first;
        return block.tokens == tokens && block.parent == parent && block.name.tenant == tenant;
      });
      if (found == blocks_.end()) break;
      parent = found->first;
      known += kv_tiers::kBlockTokens;
    }
    return known;
  }

  std::vector<BlockName> In(KvTier tier) const {
    std::vector<BlockName> names;
    for (const auto& [name, block] : blocks_) {
      if (block.second.contains(tier)) names.push_back(block.first->name);
    }
    return names;
  }
  int clears() const { return clears_; }
  int removals() const { return removals_; }

 private:
  void Apply(const KvEvent& event) {
    if (event.kind == Kind::kCleared) {
      blocks_.clear();
      ++clears_;
      return;
    }
    auto& [block, tiers] = blocks_[event.block->name.chain];
    block = event.block;
    if (event.kind == Kind::kStored) {
      EXPECT_TRUE(tiers.insert(event.tier).second) << "stored twice";
      EXPECT_EQ(block->tokens.size(), static_cast<size_t>(kv_tiers::kBlockTokens));
    } else {
      EXPECT_EQ(tiers.erase(event.tier), 1u) << "removed what was not stored";
      ++removals_;
      if (tiers.empty()) blocks_.erase(event.block->name.chain);
    }
  }

  uint64_t next_ = 0;
  std::map<Digest, std::pair<std::shared_ptr<const KvBlockContent>, std::set<KvTier>>> blocks_;
  int clears_ = 0, removals_ = 0;
};

class KvEventsTest : public kv_tiers::PrefixTest {
 protected:
  KvEventsTest() {
    kv_events_ = &log_;
    for (Request& request : requests_) request.policy = {};  // dense
  }

  // Runs the requests one after the other in one engine. Before each the events must have told what
  // it will find.
  void ExpectPredicted(LoadedModel& model) {
    std::vector<Request> requests;
    requests.swap(requests_);
    const auto started = Start(model, /*prefix_cache=*/true);
    int32_t found = 0;
    for (const Request& request : requests) {
      StepUntilIdle(*started->engine);
      mirror_.Follow(log_);
      const int32_t known = mirror_.Known(request);
      Client client;
      ASSERT_TRUE(started->engine->Submit(request, client.output).ok());
      StepUntilIdle(*started->engine);
      ASSERT_TRUE(client.Read().ended());
      EXPECT_EQ(client.reply.last.usage.cached_tokens, known)
          << "prompt " << request.prompt.size() << ", seed " << seed_;
      found += known;
    }
    EXPECT_GT(found, 0);
    mirror_.Follow(log_);
    EXPECT_EQ(mirror_.clears(), 1);
  }

  KvEventLog log_{Small(1'000'000, 10'000'000)};
  Mirror mirror_;
};

TEST_F(KvEventsTest, SayWhatTheNextRequestWillFind) {
  ModelOptions options = kv_tiers::Options();
  options.kv_dtype = "bf16";
  // Room for one sequence and a half: idle blocks are forgotten all the time.
  options.kv_bytes = kv_tiers::FrameBytes(config_) * config_.num_layers() *
                     (kv_tiers::kContext / kv_tiers::kBlockTokens) * 3 / 2;
  // In one run of a hundred the random prompts all fit; two as long as the context, of nothing in common, never do.
  for (const int32_t token : {30, 31}) {
    Request request = requests_.front();
    request.id = requests_.back().id + 1;
    request.prompt.assign(kv_tiers::kContext - 8, token);
    request.stopping.max_tokens = 1;
    requests_.push_back(request);
  }
  ExpectPredicted(*kv_tiers::Load(options));
  EXPECT_GT(mirror_.removals(), 0);
  EXPECT_TRUE(mirror_.In(KvTier::kDisk).empty());
}

TEST_F(KvEventsTest, SayWhatADiskHasAfterMemoryForgotIt) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  const auto model = kv_tiers::Load(options);
  ExpectPredicted(*model);
  const std::vector<BlockName> copies = mirror_.In(KvTier::kDisk);
  EXPECT_FALSE(copies.empty());
  for (const BlockName& name : copies) {
    EXPECT_TRUE(model->decoder->kv_memory()->store().Stored(name));
  }
}

TEST_F(KvEventsTest, ACopyIsToldWhenAllOfItIsThere) {
  requests_.resize(8);
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  const auto model = kv_tiers::Load(options);
  const auto started = Start(*model, /*prefix_cache=*/true);
  size_t told = 0;
  for (bool computes = true; computes;) {
    computes = started->engine->Step();
    mirror_.Follow(log_);
    const std::vector<BlockName> copies = mirror_.In(KvTier::kDisk);
    told = std::max(told, copies.size());
    for (const BlockName& name : copies) {
      ASSERT_TRUE(model->decoder->kv_memory()->store().Stored(name)) << "seed " << seed_;
    }
  }
  EXPECT_GT(told, 0u);
}

TEST_F(KvEventsTest, AfterARestartCopiesAreToldWhenTheyAreFound) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  requests_.resize(1);
  Answers(*kv_tiers::Load(options), /*prefix_cache=*/true);
  KvEventLog log(Small());
  kv_events_ = &log;
  const auto model = kv_tiers::Load(options);
  const auto started = Start(*model, /*prefix_cache=*/true);
  StepUntilIdle(*started->engine);
  const int32_t cached = started->clients[0].Read().last.usage.cached_tokens;
  ASSERT_GT(cached, 0);
  Mirror mirror;
  mirror.Follow(log);
  EXPECT_GE(mirror.In(KvTier::kDisk).size(), static_cast<size_t>(cached / kv_tiers::kBlockTokens));
  EXPECT_GE(mirror.Known(requests_[0]), cached);
}

TEST_F(KvEventsTest, TellWhatTheStoreEvicted) {
  requests_.resize(8);
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  const auto model = kv_tiers::Load(options);
  const auto started = Start(*model, /*prefix_cache=*/true);
  StepUntilIdle(*started->engine);
  // Saves go on behind the steps.
  KvMemory& memory = *model->decoder->kv_memory();
  memory.Flush(std::chrono::seconds(30));
  started->engine->Step();
  mirror_.Follow(log_);
  const std::vector<BlockName> copies = mirror_.In(KvTier::kDisk);
  ASSERT_GT(copies.size(), 4u);
  // The disk gives wrong bytes from here on: reading them takes blocks out of the store, one by
  // one.
  const int damaged = kv_tiers::DamageAllOver(directory_.File("store"));
  ASSERT_GT(damaged, 0);
  std::vector<std::byte> bytes(memory.places().layout().BlockBytes());
  for (const BlockName& name : copies) {
    memory.store().GetSide(memory.store().names().Id(name, 0, 0), bytes);
  }
  size_t left = 0;
  for (const BlockName& name : copies) left += memory.store().Stored(name);
  ASSERT_LT(left, copies.size());
  for (size_t i = 0; i < copies.size(); ++i) started->engine->Step();
  mirror_.Follow(log_);
  EXPECT_EQ(mirror_.In(KvTier::kDisk).size(), left);
  for (const BlockName& name : mirror_.In(KvTier::kDisk)) EXPECT_TRUE(memory.store().Stored(name));
}

TEST_F(KvEventsTest, NothingIsThereAfterTheEngineStopped) {
  requests_.resize(8);
  ModelOptions options = kv_tiers::Options();
  const auto model = kv_tiers::Load(options);
  {
    const auto started = Start(*model, /*prefix_cache=*/true);
    StepUntilIdle(*started->engine);
    mirror_.Follow(log_);
    EXPECT_FALSE(mirror_.In(KvTier::kFast).empty());
  }
  mirror_.Follow(log_);
  EXPECT_TRUE(mirror_.In(KvTier::kFast).empty());
  EXPECT_EQ(mirror_.clears(), 2);
}

TEST_F(KvEventsTest, KvMadeUnderAPolicyIsNotTold) {
  const auto policy = ParseAttentionPolicy("window:sink=2,window=20,from=0");
  ASSERT_TRUE(policy.ok());
  requests_.resize(1);
  requests_[0].policy = *policy;
  requests_[0].policy.suffix = 1000;  // the whole prompt is made under it
  requests_[0].stopping.max_tokens = 40;
  const auto model = kv_tiers::Load(kv_tiers::Options());
  const auto started = Start(*model, /*prefix_cache=*/true);
  StepUntilIdle(*started->engine);
  mirror_.Follow(log_);
  EXPECT_TRUE(mirror_.In(KvTier::kFast).empty());
}

}  // namespace
}  // namespace winnow::engine
