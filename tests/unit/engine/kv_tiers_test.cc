// What the engine gives when its KV is in tiers: the tokens that it gives when all KV is in memory.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/model_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::kFewer;
using kv_tiers::kNeedle;
using kv_tiers::kRunning;
using kv_tiers::kStepTokens;
using kv_tiers::KvTiersTest;
using kv_tiers::Load;
using kv_tiers::Options;

using ::testing::HasSubstr;

uint64_t Ended(const Engine& engine) {
  const EngineStats stats = engine.stats();
  return std::accumulate(stats.finished.begin(), stats.finished.end(), uint64_t{0});
}

TEST_F(KvTiersTest, TokensAreThoseOfKvInMemory) {
  struct Case {
    const char* name;
    int64_t host_bytes, disk_bytes;
    const char* io;
    int64_t row_cache_bytes;
    bool prefetch;
  };
  for (const Case& c : {Case{"host", 64 << 20, 0, "auto", 1 << 16, true},
                        Case{"disk, threads", 0, 64 << 20, "threads", 1 << 18, false},
                        Case{"disk, auto, without row cache", 0, 64 << 20, "auto", 0, true},
                        Case{"host over disk", 1 << 20, 64 << 20, "auto", 1 << 16, true}}) {
    SCOPED_TRACE(c.name);
    ModelOptions options = Tiered();
    options.tiers.host_bytes = c.host_bytes;
    options.tiers.disk_bytes = c.disk_bytes;
    if (c.disk_bytes > 0) options.tiers.store_dir = directory_.File(c.name);
    options.tiers.io = c.io;
    options.tiers.row_cache_bytes = c.row_cache_bytes;
    options.tiers.prefetch = c.prefetch;
    const auto model = Load(options);
    ASSERT_NE(model, nullptr);
    const std::vector<Reply> replies = Answers(*model);
    ExpectNoLosses(*model);
    ExpectEqual(replies);
    ExpectAllWaysTaken(*model, c.row_cache_bytes > 0, c.prefetch);
    const RowFetcherStats& rows = model->decoder->row_fetcher().stats();
    EXPECT_EQ(rows.payload_bytes, (rows.store_rows + rows.asked_rows) *
                                      model->decoder->kv_memory()->places().layout().RowBytes());
    // Nothing of requests that have ended is left behind.
    std::vector<storage::Completion> done;
    while (model->store.store->in_flight() > 0) {
      model->store.store->Poll(std::chrono::milliseconds(10), &done);
    }
    EXPECT_EQ(model->store.store->stats().blocks, 0u);
  }
}

// Each block that may be taken has a place: a sequence that fills them all loses none, whatever is kept
// beside them.
TEST_F(KvTiersTest, HostMemoryHoldsAllTheBlocksThatItIsCountedFor) {
  for (const bool prefix_cache : {false, true}) {
    SCOPED_TRACE(prefix_cache);
    ModelOptions options = Tiered();
    options.tiers.host_bytes = prefix_cache ? 3 << 19 : 5 << 18;
    const auto model = Load(options);
    const int32_t tokens = std::min(kContext, model->decoder->num_blocks() * kBlockTokens);
    requests_.clear();
    for (const char* policy : {"hata:k=6,window=9,suffix=30", "quest:k=16,window=9", "dense"}) {
      std::vector<int32_t> prompt(tokens - 4);
      for (int32_t& token : prompt) token = static_cast<int32_t>(random_() % config_.vocab_size);
      Request request = MakeRequest(requests_.size() + 1, std::move(prompt), 4);
      request.policy = *ParseAttentionPolicy(policy);
      requests_.push_back(std::move(request));
    }
    expected_.clear();
    const std::vector<Reply> replies = Answers(*model, prefix_cache);
    EXPECT_EQ(losses_, 0u);
    ExpectEqual(replies);
  }
}

// So does a disk, however small, whatever else is kept on it.
TEST_F(KvTiersTest, ADiskHoldsAllTheBlocksThatItIsCountedFor) {
  constexpr int32_t kLongContext = 1024;
  for (const int64_t disk_bytes : {4 << 20, 5 << 20}) {
    for (const bool prefix_cache : {false, true}) {
      SCOPED_TRACE(::testing::Message() << disk_bytes << " " << prefix_cache);
      ModelOptions options = Tiered();
      options.max_context = kLongContext;
      options.kv_bytes = FrameBytes(config_) * LeastFrames(config_.num_layers(), kBlockTokens,
                                                           kLongContext, kStepTokens, kRunning);
      options.tiers.disk_bytes = disk_bytes;
      options.tiers.store_dir =
          directory_.File(std::to_string(disk_bytes) + (prefix_cache ? " kept" : ""));
      const auto model = Load(options);
      const int32_t tokens = std::min(kLongContext, model->decoder->num_blocks() * kBlockTokens);
      requests_.clear();
      for (const char* policy : {"hata:k=6,window=9,suffix=30", "dense"}) {
        std::vector<int32_t> prompt(tokens - 8);
        for (int32_t& token : prompt) token = static_cast<int32_t>(random_() % config_.vocab_size);
        Request request = MakeRequest(requests_.size() + 1, std::move(prompt), 8);
        request.policy = *ParseAttentionPolicy(policy);
        requests_.push_back(std::move(request));
      }
      ModelOptions in_memory = Options();
      in_memory.max_context = kLongContext;
      in_memory.kv_dtype = "bf16";
      expected_[false] = Answers(*Load(in_memory));
      const std::vector<Reply> replies = Answers(*model, prefix_cache);
      ExpectNoLosses(*model);
      ExpectEqual(replies);
    }
  }
}

// A long answer under a policy that asks for few of its rows, beside many requests whose prefixes are
// kept: those are newer than what it has stored, and leave before it all the same.
TEST_F(KvTiersTest, WhatRunsIsNotPushedOutByPrefixesThatAreKept) {
  for (const bool disk : {false, true}) {
    SCOPED_TRACE(disk ? "disk" : "host");
    ModelOptions options = Tiered();
    if (disk) {
      options.tiers.disk_bytes = 6 << 20;
      options.tiers.store_dir = directory_.File("small");
    } else {
      options.tiers.host_bytes = 2 << 20;
    }
    const auto model = Load(options);
    requests_.clear();
    for (int i = 0; i < (disk ? 60 : 150); ++i) {
      const bool runs = i == 0;
      std::vector<int32_t> prompt(runs ? 300 : (disk ? 100 : 34) + random_() % 32);
      for (int32_t& token : prompt) token = static_cast<int32_t>(random_() % config_.vocab_size);
      Request request = MakeRequest(i + 1, std::move(prompt), runs ? 200 : 2);
      request.policy = *ParseAttentionPolicy(runs ? "quest:k=16,window=9,suffix=30" : "dense");
      requests_.push_back(std::move(request));
    }
    expected_.clear();
    const std::vector<Reply> replies = Answers(*model, /*prefix_cache=*/true);
    EXPECT_GT(model->store.store->stats().evicted_blocks, 0u);  // else the test shows nothing
    if (disk) {
      ExpectNoLosses(*model);
    } else {
      EXPECT_EQ(losses_, 0u);
    }
    ExpectEqual(replies);
  }
}

// Fast memory finds a prefix by its name while the frames are others' and the store has evicted its KV: it is computed like
// one that was never seen, and nothing counts as lost.
TEST_F(KvTiersTest, APrefixThatTheStoreHasEvictedIsComputedAndNotLost) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 8 << 20;
  options.tiers.store_dir = directory_.File("small");
  const auto model = Load(options);
  std::vector<std::vector<int32_t>> texts(16);  // together more than the disk takes
  for (std::vector<int32_t>& text : texts) {
    text.resize(90 + random_() % 60);
    for (int32_t& token : text) token = static_cast<int32_t>(random_() % config_.vocab_size);
  }
  requests_.clear();
  for (int i = 0; i < 200 / kFewer; ++i) {
    std::vector<int32_t> prompt = texts[random_() % texts.size()];
    prompt.push_back(static_cast<int32_t>(random_() % config_.vocab_size));
    Request request = MakeRequest(i + 1, std::move(prompt), 2);
    request.policy = *ParseAttentionPolicy(i % 3 == 0 ? "lsh:k=5,window=9,suffix=30" : "dense");
    requests_.push_back(std::move(request));
  }
  const std::vector<Reply> replies = Answers(*model, /*prefix_cache=*/true);
  EXPECT_GT(model->store.store->stats().evicted_blocks, 0u);  // else the test shows nothing
  EXPECT_GT(cached_tokens_, 0u);
  ExpectNoLosses(*model);
  ExpectEqual(replies);
}

// A floor looks at what the prompt's own questions cover, however the prompt is cut: a sequence that is
// computed again, or beside others, gives the same tokens.
// A prompt's passes go through all its KV again and again. What frames hold stays there: only the rest is
// read, and not all of it each time.
TEST_F(KvTiersTest, APromptThatFramesAreTooFewForReadsTheRest) {
  requests_.resize(1);
  requests_[0].prompt.resize(kContext - 2 * kBlockTokens);
  for (int32_t& token : requests_[0].prompt) {
    token = static_cast<int32_t>(random_() % config_.vocab_size);
  }
  requests_[0].policy = *ParseAttentionPolicy("dense");
  requests_[0].stopping.max_tokens = 1;
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  const int64_t blocks = kContext / kBlockTokens - 2, pieces = blocks * config_.num_layers();
  const int64_t frames = pieces * 3 / 4;
  options.kv_bytes = FrameBytes(config_) * frames;
  const auto model = Load(options);
  ExpectEqual(Answers(*model));
  // What each pass has and frames have not. What it writes needs no reading.
  int64_t rest = 0;
  for (int64_t end = kStepTokens; end - kStepTokens < blocks * kBlockTokens; end += kStepTokens) {
    const int64_t of_pass =
        std::min(end / kBlockTokens, blocks) * static_cast<int64_t>(config_.num_layers());
    rest += std::max<int64_t>(0, of_pass - frames);
  }
  const auto loaded = static_cast<int64_t>(model->decoder->kv_memory()->stats().loaded_pieces);
  EXPECT_GT(loaded, rest / 2);
  EXPECT_LE(loaded, rest);
}

// What nobody uses any more makes room for a request that comes, and not the one that runs beside it.
TEST_F(KvTiersTest, FramesOfAnIdlePrefixGoBeforeThoseOfWhatRuns) {
  requests_.resize(3);
  for (Request& request : requests_) {
    request.prompt.resize(&request == &requests_[0] ? 480 : 560);
    for (int32_t& token : request.prompt) {
      token = static_cast<int32_t>(random_() % config_.vocab_size);
    }
    request.policy = *ParseAttentionPolicy("dense");
    request.stopping.max_tokens = &request == &requests_[0] ? 100 : 2;
  }
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  // Of two of them, and what a pass writes.
  options.kv_bytes = FrameBytes(config_) * config_.num_layers() * (2 * kContext / kBlockTokens);
  const auto model = Load(options);
  const auto started = Start(*model, /*prefix_cache=*/true, /*max_running=*/2);
  StepUntilIdle(*started->engine);
  std::vector<Reply> replies;
  for (Client& client : started->clients) replies.push_back(client.Read());
  ExpectEqual(replies);
  EXPECT_GT(model->decoder->kv_memory()->stats().evicted_frames, 100u);
  EXPECT_EQ(model->decoder->kv_memory()->stats().loaded_pieces, 0u);
}

TEST_F(KvTiersTest, WhatAFloorDoesIsTheSameHoweverAPromptIsCut) {
  requests_.resize(5);
  for (Request& request : requests_) {
    request.policy = *ParseAttentionPolicy("lsh:k=3,window=9,suffix=90,from=0,floor=0.9");
  }
  for (const int32_t step_tokens : {kStepTokens / 2, 5}) {
    ModelOptions options = Options();
    options.kv_dtype = "bf16";
    options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
    step_tokens_ = step_tokens;
    const std::vector<Reply> replies = Answers(*Load(options));
    step_tokens_ = kStepTokens;
    ExpectEqual(replies);
  }
}

TEST_F(KvTiersTest, FaultsOfTheStoreCostTimeAndNoToken) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  // Faults are drawn: once in a hundred times none of them costs anything.
  uint64_t losses = 0, lost_pieces = 0;
  for (int attempt = 0; attempt < 20 && losses * lost_pieces == 0; ++attempt) {
    storage::FaultyStore* faulty = nullptr;
    const auto model = LoadOver(&faulty, options);
    faulty->faults = {.miss_share = 0.0001, .lose_share = 0.002, .polls_max = 3, .reorder = true};
    ASSERT_NO_FATAL_FAILURE(ExpectEqual(Answers(*model)));
    losses += losses_;
    lost_pieces += model->decoder->kv_memory()->stats().lost_pieces;
  }
  EXPECT_GT(losses, 0u);
  EXPECT_GT(lost_pieces, 0u);
}

// What could not be read may be there all the same: it must not stay when nobody needs it any more.
TEST_F(KvTiersTest, NothingIsLeftOfWhatWasLost) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  uint64_t lost_pieces = 0;
  for (int attempt = 0; attempt < 20 && lost_pieces == 0; ++attempt) {
    storage::FaultyStore* faulty = nullptr;
    const auto model = LoadOver(&faulty, options);
    faulty->faults = {.miss_share = 0.0005};
    Answers(*model);
    lost_pieces = model->decoder->kv_memory()->stats().lost_pieces;
    std::vector<storage::Completion> done;
    while (faulty->in_flight() > 0) faulty->Poll(std::chrono::milliseconds(10), &done);
    EXPECT_EQ(faulty->stats().blocks, 0u);
  }
  EXPECT_GT(lost_pieces, 0u);
}

TEST_F(KvTiersTest, AStoreThatTakesNothingLeavesWhatFastMemoryHolds) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  faulty->faults = {.miss_share = 1};
  for (size_t i = 0; const Reply& reply : Answers(*model)) {
    // Whoever fits is answered, and rightly; who does not is told so.
    if (reply.last.finish == FinishReason::kError) {
      EXPECT_EQ(reply.last.error_code, absl::StatusCode::kUnavailable);
    } else {
      EXPECT_EQ(reply.tokens, Expected()[i].tokens)
          << ToString(requests_[i].policy) << ", prompt " << requests_[i].prompt.size() << ", seed "
          << seed_;
    }
    ++i;
  }
}

TEST_F(KvTiersTest, WhileTheStoreIsFullRequestsWaitAndAreToldInTheEnd) {
  for (const bool recovers : {true, false}) {
    for (const bool prefix_cache : {true, false}) {
      SCOPED_TRACE(recovers);
      ModelOptions options = Tiered();
      options.tiers.host_bytes = 64 << 20;
      storage::FaultyStore* faulty = nullptr;
      const auto model = LoadOver(&faulty, options);
      FakeClock clock;
      EngineOptions engine_options;
      engine_options.max_running = kRunning;
      engine_options.step_tokens = kStepTokens;
      engine_options.prefix_cache = prefix_cache;
      const auto engine = MakeEngine(engine_options, *model->decoder, clock);
      std::vector<Client> clients(requests_.size());
      for (size_t i = 0; i < requests_.size(); ++i) {
        ASSERT_TRUE(engine->Submit(requests_[i], clients[i].output).ok());
      }
      for (int i = 0; i < 20; ++i) engine->Step();
      faulty->faults.state = storage::TierState::kDegraded;
      StepUntilIdle(*engine);
      if (recovers) {
        faulty->faults.state.reset();
        StepUntilIdle(*engine);
      }
      // Everybody has an end: who is first in line is told after a while without progress, and what that
      // one held lets others go on for another while.
      for (uint64_t ended = Ended(*engine); ended < requests_.size(); ended = Ended(*engine)) {
        for (int i = 0; i < 2; ++i) {
          clock.Advance(std::chrono::seconds(31));
          StepUntilIdle(*engine);
        }
        ASSERT_GT(Ended(*engine), ended) << "seed " << seed_ << ", prefixes kept: " << prefix_cache;
      }
      EXPECT_EQ(engine->stats().blocks_used, 0);
      int told = 0;
      for (size_t i = 0; i < requests_.size(); ++i) {
        const Reply& reply = clients[i].Read();
        if (reply.last.finish == FinishReason::kError) {
          EXPECT_EQ(reply.last.error_code, absl::StatusCode::kUnavailable);
          ++told;
        } else {
          EXPECT_EQ(reply.last.finish, Expected()[i].last.finish);
          EXPECT_EQ(reply.tokens, Expected()[i].tokens) << ToString(requests_[i].policy);
        }
      }
      EXPECT_EQ(told > 0, !recovers);
    }
  }
}

TEST_F(KvTiersTest, AnEngineThatEndsLeavesAnIdleStore) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 16 << 20;
  options.tiers.store_dir = directory_.File("store");
  const auto model = Load(options);
  const auto started = Start(*model, /*prefix_cache=*/true);
  started->engine->BeginDrain();
  // On a thread of its own, as in the server: what it leaves in flight nobody can get back.
  std::thread([&] { started->engine->Run({}); }).join();
  EXPECT_TRUE(model->store.store->idle());
}

TEST_F(KvTiersTest, FramesThatCannotWorkAreRefusedWithTheBytes) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  const int64_t least = options.kv_bytes;
  options.kv_bytes = least - 1;
  const absl::Status status = LoadModel(kNeedle, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv_bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(least)));
  // Nor is host memory that would hold no block more than the frames.
  ModelOptions host = options;
  host.kv_bytes = least;
  host.tiers.host_bytes = 1 << 20;
  EXPECT_THAT(std::string(LoadModel(kNeedle, host).status().message()),
              HasSubstr("host_bytes is 1048576"));
  // Also where not even a block would fit: who follows the message must not be refused again.
  options.kv_bytes = 1;
  EXPECT_THAT(std::string(LoadModel(kNeedle, options).status().message()),
              HasSubstr(std::to_string(least)));
}

TEST(TierFlagsTest, WhatCannotBeHonouredIsRefusedByName) {
  const auto message = [](const TierFlags& flags) {
    const absl::Status status = CheckTierFlags(flags);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message({.disk_bytes = 1 << 30}), HasSubstr("store_dir"));
  EXPECT_THAT(message({.store_dir = "x"}), HasSubstr("disk_bytes"));
  EXPECT_THAT(message({.disk_bytes = 1000, .store_dir = "x"}), HasSubstr("disk_bytes"));
  EXPECT_THAT(message({.host_bytes = 5}), HasSubstr("host_bytes"));
  EXPECT_THAT(message({.host_bytes = 1 << 20, .io = "aio"}), HasSubstr("io"));
  EXPECT_TRUE(CheckTierFlags({}).ok());
}

}  // namespace
}  // namespace winnow::engine
