// A sequence whose KV is on a slow disk waits for it alone: others step, and every token is the same.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/block_fetcher.h"
#include "engine/kv/kv_memory.h"
#include "engine/model_loader.h"
#include "gtest/gtest.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::KvTiersTest;
using kv_tiers::Load;

constexpr int32_t kLong = 400, kTiny = 5, kAnswer = 12;

// A store on disk has the prefixes of two long prompts, nothing of which is in memory. No read begins before the test says so.
class FetchTest : public KvTiersTest {
 protected:
  FetchTest() {
    options_ = Tiered();
    // Half of the frames are for what is fetched: more than a prompt.
    options_.kv_bytes =
        LayerBlockBytes() * config_.num_layers() * frames_of_contexts_ * (kContext / kBlockTokens);
    options_.tiers.disk_bytes = 256 << 20;
    options_.tiers.store_dir = directory_.File("store");
    options_.tiers.io = "threads";
  }
  ~FetchTest() override { Stop(); }

  Request Question(int text, int32_t max_tokens = kAnswer) {
    Request request = MakeRequest(++id_, Prompt(kLong, text), max_tokens);
    request.policy = policy_;
    return request;
  }
  Request Tiny(int32_t max_tokens = kAnswer) {
    return MakeRequest(++id_, Prompt(kTiny, 77), max_tokens);
  }
  Reply Answer(Engine& engine, Request request) {
    Client client;
    EXPECT_TRUE(engine.Submit(std::move(request), client.output).ok());
    StepUntilIdle(engine);
    return client.Read();
  }
  std::unique_ptr<Engine> Make(LoadedModel& model) {
    EngineOptions options;
    options.max_running = max_running_;
    options.step_tokens = step_tokens_;
    options.pause_grace = kGrace;
    options.eager_share = eager_share_;
    options.flush_time = kv_tiers::kPatience;
    options.slow_wait = slow_wait_;
    return MakeEngine(options, *model.decoder, clock_);
  }
  // Answers without a store's help, then a process that begins with the store alone.
  void StoreAndRestart() {
    Stop();
    {
      const auto model = Load(options_);
      const auto engine = Make(*model);
      for (int text = 0; text < 2; ++text) {
        expected_[text] = Answer(*engine, Question(text)).tokens;
      }
      expected_tiny_ = Answer(*engine, Tiny()).tokens;
    }
    model_ = LoadOver(&faulty_, options_);
    engine_ = Make(*model_);
    // A step that waits for reads would end the hold before its answer: it asks for nothing but answers.
    faulty_->faults = {.hold = true, .hold_polls = 20'000};
  }
  void Stop() {
    if (faulty_ != nullptr) Release();  // who waits for an answer gets it
    engine_.reset();
    model_.reset();
    faulty_ = nullptr;
  }
  bool Held() const { return faulty_->faults.hold; }
  void Release() { faulty_->faults = {}; }
  void Submit(Request request, const Client& client) {
    ASSERT_TRUE(engine_->Submit(std::move(request), client.output).ok());
  }
  void Step(int steps) {
    for (int i = 0; i < steps; ++i) engine_->Step();
  }
  void ExpectTinyAnswers(int requests) {
    for (int i = 0; i < requests; ++i) {
      Client tiny;
      Submit(Tiny(), tiny);
      for (int step = 0; step < 2 * kAnswer && !tiny.Read().ended(); ++step) engine_->Step();
      EXPECT_EQ(tiny.reply.tokens, expected_tiny_);
    }
  }

  static constexpr int64_t frames_of_contexts_ = 3;
  static constexpr Duration kGrace = std::chrono::seconds(1);
  Duration slow_wait_ = kv_tiers::kPatience;  // EngineOptions::slow_wait
  int32_t max_running_ = kv_tiers::kRunning;
  FakeClock clock_;
  ModelOptions options_;
  AttentionPolicy policy_;
  std::vector<int32_t> expected_[2], expected_tiny_;
  RequestId id_ = 0;
  storage::FaultyStore* faulty_ = nullptr;
  std::unique_ptr<LoadedModel> model_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(FetchTest, OthersStepWhileAPrefixIsReadSlowly) {
  for (const double eager : {0, 1}) {
    SCOPED_TRACE(eager);
    eager_share_ = eager;
    StoreAndRestart();
    Client slow;
    Submit(Question(0), slow);
    Step(5);
    ExpectTinyAnswers(5);
    EXPECT_TRUE(Held()) << "the engine has waited for a read";
    EXPECT_TRUE(slow.Read().tokens.empty());
    EXPECT_EQ(engine_->stats().running, 1);
    Release();
    StepUntilIdle(*engine_);
    EXPECT_EQ(slow.Read().tokens, expected_[0]);
    const EngineStats stats = engine_->stats();
    EXPECT_EQ(stats.kv_losses, 0u);
    const auto blocks = static_cast<uint64_t>((kLong - 1) / kBlockTokens);
    EXPECT_EQ(stats.cached_tokens, blocks * kBlockTokens);
    EXPECT_EQ(stats.kv.loaded_pieces, blocks * config_.num_layers());
    const uint64_t bytes = stats.kv.loaded_pieces * LayerBlockBytes();
    EXPECT_EQ(stats.kv.loaded_bytes, bytes);
    EXPECT_EQ(stats.resume_bytes, eager == 1 ? bytes : 0);
    EXPECT_EQ(stats.blocks_used, 0);
  }
}

TEST_F(FetchTest, PrefixesOfSeveralAreReadTogether) {
  StoreAndRestart();
  std::vector<Client> slow(3);
  for (int i = 0; i < 3; ++i) Submit(Question(i % 2), slow[i]);
  Step(5);
  ExpectTinyAnswers(2);
  EXPECT_TRUE(Held());
  Release();
  StepUntilIdle(*engine_);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(slow[i].Read().tokens, expected_[i % 2]);
    EXPECT_EQ(slow[i].reply.last.usage.kv_read_bytes_disk, 0u);
  }
  EXPECT_EQ(engine_->stats().kv_losses, 0u);
  // The first and the third share what is read once.
  const auto blocks = static_cast<uint64_t>((kLong - 1) / kBlockTokens);
  EXPECT_EQ(engine_->stats().kv.loaded_pieces, 2 * blocks * config_.num_layers());
}

// Bytes that were fetched for a sequence that decodes are read for its answer as much as what its step reads.
TEST_F(FetchTest, FetchedBytesAreCountedForTheSequence) {
  policy_ = *ParseAttentionPolicy("window:sink=2,window=20,suffix=30,dense_layers=2,from=0");
  StoreAndRestart();
  Client client;
  Submit(Question(0), client);
  Step(5);
  // Layers that retrieve read what they select.
  EXPECT_EQ(faulty_->started, 2u * ((kLong - 30) / kBlockTokens));
  EXPECT_TRUE(Held());
  Release();
  StepUntilIdle(*engine_);
  const Reply& reply = client.Read();
  EXPECT_EQ(reply.tokens, expected_[0]);
  const EngineStats stats = engine_->stats();
  const uint64_t entries = stats.retrieval.rows_stored * LayerBlockBytes() /
                           (kBlockTokens * static_cast<uint64_t>(config_.num_kv_heads));
  EXPECT_EQ(reply.last.usage.kv_read_bytes_disk, stats.kv.loaded_bytes + entries);
}

TEST_F(FetchTest, WhatCannotBeReadIsComputedWhileOthersStep) {
  StoreAndRestart();
  Client slow;
  Submit(Question(0), slow);
  Step(5);
  ExpectTinyAnswers(1);
  EXPECT_TRUE(Held());
  std::vector<storage::BlockKey> keys;
  faulty_->inner().ForEach(
      [&](const storage::BlockKey& key, const storage::BlockInfo&) { keys.push_back(key); });
  for (const storage::BlockKey& key : keys) faulty_->inner().Erase(0, key);
  Release();
  StepUntilIdle(*engine_);
  EXPECT_EQ(slow.Read().tokens, expected_[0]);
  EXPECT_GT(engine_->stats().kv_losses, 0u);
}

// Nothing comes, and the store has not given its reads up.
TEST_F(FetchTest, WhatDoesNotComeInTimeIsComputed) {
  StoreAndRestart();
  Client slow;
  Submit(Question(0), slow);
  Step(5);
  clock_.Advance(std::chrono::seconds(1));
  Step(5);
  EXPECT_EQ(engine_->stats().kv_losses, 0u);
  clock_.Advance(std::chrono::seconds(60));
  for (int step = 0; step < 200 && !slow.Read().ended(); ++step) engine_->Step();
  EXPECT_TRUE(Held());
  EXPECT_EQ(slow.reply.tokens, expected_[0]);
  EXPECT_EQ(engine_->stats().kv_losses, 1u);
}

TEST_F(FetchTest, AFetchEndsWithItsRequest) {
  StoreAndRestart();
  Client cancelled, overdue;
  Submit(Question(0), cancelled);
  const RequestId id = id_;
  Request request = Question(1);
  request.deadline = clock_.Now() + std::chrono::seconds(1);
  Submit(std::move(request), overdue);
  Step(5);
  engine_->Cancel(id);
  clock_.Advance(std::chrono::seconds(2));
  Step(1);
  EXPECT_EQ(cancelled.Read().last.finish, FinishReason::kCancelled);
  EXPECT_EQ(overdue.Read().last.finish, FinishReason::kDeadline);
  EXPECT_EQ(engine_->stats().blocks_used, 0);
  EXPECT_FALSE(engine_->Step()) << "nothing is left to do";
  EXPECT_TRUE(Held());
  // Answers that come late change nothing of what others have made of the memory since.
  Client again;
  Submit(Question(0), again);
  Step(3);
  Release();
  StepUntilIdle(*engine_);
  EXPECT_EQ(again.Read().tokens, expected_[0]);
  EXPECT_EQ(engine_->stats().kv_losses, 0u);
}

// A policy's selection is known within the step alone. Who makes steps wait for it takes half of the time.
TEST_F(FetchTest, WhoseStepsWaitForReadsRestsWhileOthersStep) {
  options_.kv_bytes = Tiered().kv_bytes;
  options_.tiers.row_cache_bytes = 0;
  policy_ = *ParseAttentionPolicy("quest:k=16,window=9,dense_layers=0,from=0");
  slow_wait_ = EngineOptions().slow_wait;
  StoreAndRestart();
  Release();
  Client slow, tiny;
  Submit(Question(0, 4 * kAnswer), slow);
  for (int i = 0; i < 1000 && slow.Read().tokens.empty(); ++i) engine_->Step();
  // The next step's reads come after so many calls that ask for them: longer than the time from which on reads are slow.
  faulty_->faults = {.hold = true, .hold_polls = 3'000'000};
  Submit(Tiny(), tiny);
  const size_t before = slow.reply.tokens.size();
  for (int i = 0; i < 1000 && !tiny.Read().ended(); ++i) engine_->Step();
  EXPECT_EQ(tiny.reply.tokens, expected_tiny_);
  // No time has passed for the engine, so it rests until nobody else has anything to do.
  EXPECT_LE(slow.Read().tokens.size(), before + 2);
  EXPECT_FALSE(Held());
  StepUntilIdle(*engine_);
  std::vector<int32_t> tokens = slow.Read().tokens;
  tokens.resize(std::min(tokens.size(), expected_[0].size()));
  EXPECT_EQ(tokens, expected_[0]);
}

// Two that wait for the memory of a third's fetch are given every token of the plans, again and again: the third has to
// step before they can.
TEST_F(FetchTest, WhoHasFetchedStepsBeforeThoseThatWaitForItsMemory) {
  max_running_ = 3;
  step_tokens_ = 3;
  options_.kv_bytes = LayerBlockBytes() * config_.num_layers() * 60;  // fetches may hold half
  StoreAndRestart();
  Release();
  // The oldest is paused, and its blocks make room for another's.
  Client oldest(1), large, other, third, last;
  Submit(MakeRequest(++id_, Prompt(kLong + 5), kAnswer), oldest);
  for (int i = 0; i < 1000 && engine_->stats().paused == 0; ++i) engine_->Step();
  Submit(MakeRequest(++id_, Prompt(620, 5), 1), large);
  StepUntilIdle(*engine_);
  ASSERT_TRUE(large.Read().ended());
  Client one;
  for (Client* const client : {&one, &other}) Submit(Tiny(500), *client);
  Step(10);
  // It gives its place to one that fetches, and gets another back.
  faulty_->faults = {.hold = true};
  clock_.Advance(2 * kGrace);
  std::vector<int32_t> prompt = Prompt(kLong, 1);
  for (int32_t i = 0; i < 30; ++i) prompt.push_back(10 + i);
  Submit(MakeRequest(++id_, prompt, kAnswer), third);
  Step(5);
  EXPECT_EQ(engine_->stats().preemptions, 1u);
  for (const RequestId id : {id_ - 2, id_ - 1}) engine_->Cancel(id);
  Step(1);
  oldest.Read();
  Submit(MakeRequest(++id_, Prompt(kLong + 10), kAnswer), last);
  Step(5);
  EXPECT_EQ(engine_->stats().running, 3);
  EXPECT_TRUE(Held());
  Release();
  for (int i = 0; i < 10'000 && !oldest.Read().ended(); ++i) engine_->Step();
  StepUntilIdle(*engine_);
  EXPECT_EQ(engine_->stats().kv_losses, 0u);
  for (Client* const client : {&oldest, &third, &last}) {
    EXPECT_TRUE(client->Read().ended());
    EXPECT_EQ(client->reply.tokens.size(), kAnswer);
  }
  EXPECT_EQ(oldest.reply.tokens,
            Answer(*engine_, MakeRequest(++id_, Prompt(kLong + 5), kAnswer)).tokens);
  EXPECT_EQ(third.reply.tokens, Answer(*engine_, MakeRequest(++id_, prompt, kAnswer)).tokens);
}

// One that has fetched lacks a block to step with, an older one waits for the memory that it holds, and the store takes
// nothing, so that no memory comes: neither may wait for the other for ever.
TEST_F(FetchTest, WhoHasFetchedAndCannotStepGivesTheMemoryBack) {
  max_running_ = 2;
  options_.kv_bytes = LayerBlockBytes() * config_.num_layers() * 60;  // fetches may hold half
  StoreAndRestart();
  Release();
  // An older one, paused, that has lost some of its frames to another, which is gone. Only two of its layers are fetched.
  Client older(1), large, younger;
  const auto older_request = [&] {
    Request request = MakeRequest(++id_, Prompt(39 * kBlockTokens - 4, 5), kAnswer);
    request.policy = *ParseAttentionPolicy("window:sink=2,window=20,dense_layers=2,from=0");
    return request;
  };
  Submit(older_request(), older);
  for (int i = 0; i < 1000 && engine_->stats().paused == 0; ++i) engine_->Step();
  Request private_request = MakeRequest(++id_, Prompt(23 * kBlockTokens - 2, 6), 1);
  private_request.cache.store = false;  // its frames are free when it has ended
  Submit(std::move(private_request), large);
  for (int i = 0; i < 1000 && !large.Read().ended(); ++i) engine_->Step();
  ASSERT_GT(engine_->stats().kv.evicted_frames, 0u);
  // The younger one's prefix comes slowly, so that the older one fetches before it goes on, and both are too much.
  faulty_->faults = {.hold = true};
  Submit(Question(1), younger);
  Step(3);
  clock_.Advance(std::chrono::milliseconds(100));
  Step(1);
  older.Read();
  Step(1);
  EXPECT_EQ(engine_->stats().fetches.open, 1);
  EXPECT_EQ(engine_->stats().fetches.room_waits, 1u);
  // All frames are theirs when it has come, and the store gives back what it has.
  faulty_->faults = {.state = storage::TierState::kOff};
  for (int i = 0; i < 2000 && !(older.Read().ended() && younger.Read().ended()); ++i) {
    ASSERT_TRUE(engine_->Step()) << "the engine would sleep";
  }
  EXPECT_EQ(older.Read().last.finish, FinishReason::kMaxTokens);
  EXPECT_EQ(younger.Read().tokens, expected_[1]);
  Release();
  EXPECT_EQ(older.reply.tokens, Answer(*engine_, older_request()).tokens);
}

// More than fetches may hold is read within the step, as ever.
TEST_F(FetchTest, WhatFitsNotBesideOthersIsReadByTheStep) {
  options_.kv_bytes = Tiered().kv_bytes;
  StoreAndRestart();
  Release();
  EXPECT_EQ(Answer(*engine_, Question(0)).tokens, expected_[0]);
  EXPECT_EQ(engine_->stats().kv_losses, 0u);
  EXPECT_GT(engine_->stats().kv.loaded_pieces, 0u);
}

}  // namespace
}  // namespace winnow::engine
