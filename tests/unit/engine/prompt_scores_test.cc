// Prompts that are scored: what a prompt's rows of logits say of its own tokens, whatever happens while it is computed.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sample.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/prefix_engine_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::KvTiersTest;
using kv_tiers::Load;
using kv_tiers::Policies;
using kv_tiers::PrefixEngineTest;
using ::testing::HasSubstr;

// The scores of all tokens of the prompt but the first, each from a step of its own that decodes the token before it.
std::vector<ScoredToken> ForcedScores(Model& model, std::span<const int32_t> prompt,
                                      int32_t top_logprobs) {
  std::vector<int32_t> blocks(model.num_blocks());
  std::iota(blocks.begin(), blocks.end(), 0);
  std::vector<ScoredToken> scores;
  for (size_t i = 0; i + 1 < prompt.size(); ++i) {
    const Batch batch{{{.tokens = prompt.subspan(i, 1),
                        .position = static_cast<int32_t>(i),
                        .block_table = blocks,
                        .num_logits = 1}}};
    kernels::SampleRow row;
    row.top_logprobs = top_logprobs;
    row.given = prompt[i + 1];
    kernels::SampledToken rated;
    const absl::Status status = model.Sample(batch, {&row, 1}, {&rated, 1});
    EXPECT_TRUE(status.ok()) << status;
    scores.push_back({.token = *ToOutputToken(rated), .rank = rated.rank});
  }
  return scores;
}

void ExpectSameScores(const std::vector<ScoredToken>& got, const std::vector<ScoredToken>& want) {
  ASSERT_EQ(got.size(), want.size());
  const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
  for (size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "token " << i + 1);
    ASSERT_EQ(got[i].token.token, want[i].token.token);
    ASSERT_EQ(got[i].rank, want[i].rank);
    ASSERT_EQ(bits(got[i].token.logprob), bits(want[i].token.logprob));
    ASSERT_EQ(got[i].token.top.size(), want[i].token.top.size());
    for (size_t j = 0; j < got[i].token.top.size(); ++j) {
      ASSERT_EQ(got[i].token.top[j].token, want[i].token.top[j].token);
      ASSERT_EQ(bits(got[i].token.top[j].logprob), bits(want[i].token.top[j].logprob));
    }
  }
}

class ScoreTest : public ::testing::Test {
 protected:
  void Make(const EngineOptions& options = {}, const FakeModelShape& shape = {}) {
    engine_.reset();  // before its model
    model_ = std::make_unique<FakeModel>(shape);
    engine_ = MakeEngine(options, *model_, clock_);
  }
  void Make(int32_t max_running, int32_t step_tokens) {
    EngineOptions options;
    options.max_running = max_running;
    options.step_tokens = step_tokens;
    Make(options);
  }
  void Submit(Request request, Client& client) {
    const absl::Status status = engine_->Submit(std::move(request), client.output);
    ASSERT_TRUE(status.ok()) << status;
  }
  // One request in steps of so many tokens.
  Reply Run(const Request& request, int32_t step_tokens) {
    Make(1, step_tokens);
    Client client;
    Submit(request, client);
    StepUntilIdle(*engine_);
    return client.Read();
  }
  // Beside an older one that takes its blocks away, and gives them back when it has ended.
  void ExpectSameThroughPreemption(const EngineOptions& options, const Request& first,
                                   const Request& request) {
    FakeModelShape shape;
    shape.num_blocks = 20;
    Make(options, shape);
    Client older, younger;
    Submit(first, older);
    Submit(request, younger);
    StepUntilIdle(*engine_);
    EXPECT_GE(younger.Read().last.usage.preemptions, 1);
    ExpectSameScores(younger.reply.scores, Forced(request));
    EXPECT_EQ(younger.reply.tokens, RunAlone(request).tokens);
  }
  static Request Scored(RequestId id, std::vector<int32_t> prompt, int32_t max_tokens) {
    Request request = MakeRequest(id, std::move(prompt), max_tokens);
    request.prompt_logprobs = 3;
    return request;
  }
  static std::vector<ScoredToken> Forced(const Request& request) {
    FakeModel model;
    return ForcedScores(model, request.prompt, request.prompt_logprobs);
  }

  FakeClock clock_;
  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(ScoreTest, WhereverThePromptIsCutTheScoresAreThoseOfForcedDecoding) {
  const Request request = Scored(1, Prompt(50), 5);
  Request plain = request;
  plain.prompt_logprobs = -1;
  const Reply alone = RunAlone(plain);
  EXPECT_TRUE(alone.scores.empty());
  const std::vector<ScoredToken> forced = Forced(request);
  for (const int32_t budget : {1, 2, 3, 7, 16, 49, 50, 51}) {
    SCOPED_TRACE(budget);
    const Reply reply = Run(request, budget);
    ExpectSameScores(reply.scores, forced);
    EXPECT_EQ(reply.tokens, alone.tokens);
    EXPECT_EQ(model_->num_forwards, (50 + budget - 1) / budget + 4)
        << "no step more than a prefill has";
  }
}

TEST_F(ScoreTest, ThePromptsFirstTokenHasNoScore) {
  const Reply reply = RunAlone(Scored(1, Prompt(1), 3));
  EXPECT_TRUE(reply.scores.empty());
  EXPECT_EQ(reply.tokens, RunAlone(MakeRequest(1, Prompt(1), 3)).tokens);
  const Request two = Scored(1, Prompt(2), 1);
  ExpectSameScores(RunAlone(two).scores, Forced(two));
}

TEST_F(ScoreTest, TheChosenTokensAreRatedAloneWhereNoOthersAreAskedFor) {
  Request request = Scored(1, Prompt(20), 1);
  const std::vector<ScoredToken> with_others = RunAlone(request).scores;
  request.prompt_logprobs = 0;
  const std::vector<ScoredToken> alone = RunAlone(request).scores;
  ASSERT_EQ(alone.size(), 19u);
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(alone[i].token.top.empty());
    EXPECT_EQ(alone[i].token.logprob, with_others[i].token.logprob);
    EXPECT_EQ(alone[i].rank, with_others[i].rank);
  }
}

// Options for the answer, and a grammar's mask, are no business of the prompt.
TEST_F(ScoreTest, OptionsOfTheAnswerDoNotChangeScores) {
  Request request = Scored(1, Prompt(30), 4);
  const std::vector<ScoredToken> forced = Forced(request);
  request.sampling = {.temperature = 2,
                      .top_k = 2,
                      .repetition_penalty = 3,
                      .logit_bias = {{request.prompt[7], 100}},
                      .seed = 3};
  request.stopping.stop_token_ids = {request.prompt[5]};
  request.stopping.min_tokens = 4;
  ExpectSameScores(RunAlone(request).scores, forced);
}

TEST_F(ScoreTest, OnesBesideOthers) {
  Make(6, 13);
  std::vector<Request> requests;
  std::vector<Client> clients(8);
  for (int32_t i = 0; i < 8; ++i) {
    requests.push_back(Scored(i + 1, Prompt(1 + 9 * i, i), 3 + i));
    if (i % 3 == 1) requests.back().prompt_logprobs = -1;
    Submit(requests.back(), clients[i]);
  }
  StepUntilIdle(*engine_);
  for (size_t i = 0; i < clients.size(); ++i) {
    SCOPED_TRACE(i);
    const Reply& reply = clients[i].Read();
    EXPECT_EQ(reply.tokens, RunAlone(requests[i]).tokens);
    if (i % 3 == 1) {
      EXPECT_TRUE(reply.scores.empty());
    } else {
      ExpectSameScores(reply.scores, Forced(requests[i]));
    }
  }
}

TEST_F(ScoreTest, OneThatIsPreemptedInsideItsPromptTellsEachScoreOnce) {
  EngineOptions options;
  options.max_running = 2;
  options.step_tokens = 2;  // a token of the prompt beside each of the older one's
  ExpectSameThroughPreemption(options, MakeRequest(1, Prompt(2), 75), Scored(2, Prompt(50, 1), 3));
}

TEST_F(ScoreTest, OneThatIsPreemptedInItsAnswerIsNotScoredAgain) {
  ExpectSameThroughPreemption({}, MakeRequest(1, Prompt(30), 40), Scored(2, Prompt(30, 1), 40));
}

TEST_F(ScoreTest, ASlowReaderGetsAllOfThem) {
  Make(1, 7);
  const Request request = Scored(1, Prompt(50), 2);
  Client client(1);
  Submit(request, client);
  while (!client.reply.ended()) {
    StepUntilIdle(*engine_);
    client.Read(1);
  }
  ExpectSameScores(client.reply.scores, Forced(request));
  EXPECT_EQ(client.reply.events, 8 + 1)
      << "of each step, as it was computed, and of the second token";
}

TEST_F(ScoreTest, WhatWasRatedBeforeACancellationIsTold) {
  Make(1, 7);
  const Request request = Scored(1, Prompt(50), 2);
  Client client;
  Submit(request, client);
  engine_->Step();
  engine_->Step();
  engine_->Cancel(1);
  engine_->Step();
  EXPECT_EQ(client.Read().last.finish, FinishReason::kCancelled);
  std::vector<ScoredToken> forced = Forced(request);
  forced.resize(14);
  ExpectSameScores(client.reply.scores, forced);
}

TEST_F(ScoreTest, ARowThatHoldsNanEndsItsRequestAlone) {
  Make(2, 60);
  const Request broken = Scored(1, Prompt(20), 2);
  const Request other = Scored(2, {101, 102, 103, 104, 105}, 2);
  model_->nan_after_token = broken.prompt[3];
  Client first, second;
  Submit(broken, first);
  Submit(other, second);
  StepUntilIdle(*engine_);
  EXPECT_EQ(first.Read().last.finish, FinishReason::kError);
  EXPECT_THAT(first.reply.last.error, HasSubstr("NaN"));
  EXPECT_EQ(first.reply.scores.size(), 3u);
  EXPECT_TRUE(first.reply.tokens.empty());
  ExpectSameScores(second.Read().scores, Forced(other));
  EXPECT_EQ(second.reply.tokens, RunAlone(other).tokens);
}

TEST_F(ScoreTest, MoreOthersThanThereMayBeAreRefused) {
  Make();
  Request request = Scored(1, Prompt(5), 2);
  request.prompt_logprobs = kernels::kMaxTopLogprobs + 1;
  Client client;
  const absl::Status status = engine_->Submit(request, client.output);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("prompt_logprobs is 33, at most 32"));
}

// ---- of a model ----

class ScoreTiersTest : public KvTiersTest {
 protected:
  ScoreTiersTest() {
    for (Request& request : requests_) {
      request.prompt_logprobs = static_cast<int32_t>(random_() % 4) - (random_() % 5 == 0 ? 1 : 0);
    }
  }

  void ExpectSame(const std::vector<Reply>& replies) {
    ExpectEqual(replies);
    const std::vector<Reply>& expected = Expected(answered_on_device_);
    for (size_t i = 0; i < replies.size(); ++i) {
      SCOPED_TRACE(ToString(requests_[i].policy) + ", prompt " +
                   std::to_string(requests_[i].prompt.size()) + ", seed " + std::to_string(seed_));
      ExpectSameScores(replies[i].scores, expected[i].scores);
    }
  }
};

// The promise of engine/decoder.h, to which a prompt that is scored owes everything. Its rows need more groups than one:
// as many rows of logits fit as sequences run.
TEST_F(ScoreTiersTest, DenseScoresAreThoseOfForcedDecodingBitForBit) {
  for (Request& request : requests_) {
    if (!request.policy.IsDense() && random_() % 2 == 0) {
      request.policy = *ParseAttentionPolicy("window:window=20,verify=4");
    } else {
      request.policy = {};
    }
    request.prompt.resize(std::min<size_t>(request.prompt.size(), 200));
    request.stopping.max_tokens = std::min(request.stopping.max_tokens, 6);
  }
  ModelOptions options = kv_tiers::Options();
  options.kv_dtype = "bf16";
  options.max_sequences = kv_tiers::kRunning;
  options.max_batch_logits = kv_tiers::kRunning + 1;  // a row to verify with
  options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
  const auto model = Load(options);
  const std::vector<Reply> replies = Answers(*model);
  const auto forced = Load(options);
  for (size_t i = 0; i < replies.size(); ++i) {
    SCOPED_TRACE(::testing::Message()
                 << "prompt " << requests_[i].prompt.size() << ", seed " << seed_);
    EXPECT_EQ(replies[i].last.finish, FinishReason::kMaxTokens) << replies[i].last.error;
    if (requests_[i].prompt_logprobs < 0) {
      EXPECT_TRUE(replies[i].scores.empty());
      continue;
    }
    ExpectSameScores(replies[i].scores, ForcedScores(*forced->decoder, requests_[i].prompt,
                                                     requests_[i].prompt_logprobs));
  }
}

TEST_F(ScoreTiersTest, APolicyThatRetrievesChangesTheScoresOfItsSuffixAtMost) {
  const std::vector<Reply> retrieving = Expected();
  std::vector<int32_t> suffixes;
  for (Request& request : requests_) {
    suffixes.push_back(std::exchange(request.policy, {}).suffix);
    request.stopping.max_tokens = 1;
  }
  expected_.clear();
  const std::vector<Reply>& dense = Expected();
  for (size_t i = 0; i < dense.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "suffix " << suffixes[i] << ", seed " << seed_);
    ASSERT_EQ(retrieving[i].scores.size(), dense[i].scores.size());
    const auto size = static_cast<int32_t>(requests_[i].prompt.size());
    // They retrieve from the first token of a block on.
    const int32_t dense_tokens =
        suffixes[i] == 0 ? size : std::max(0, size - suffixes[i]) / kBlockTokens * kBlockTokens;
    const auto before = [&](std::vector<ScoredToken> scores) {
      scores.resize(std::min<size_t>(scores.size(), dense_tokens));
      return scores;
    };
    ExpectSameScores(before(retrieving[i].scores), before(dense[i].scores));
  }
}

TEST_F(ScoreTiersTest, TheSameWhereverKvLiesUnderEveryPolicy) {
  ModelOptions tiered = Tiered();
  tiered.tiers.host_bytes = 64 << 20;
  ExpectSame(Answers(*Load(tiered), /*prefix_cache=*/true));
  ModelOptions few = kv_tiers::Options();
  few.kv_dtype = "bf16";
  few.kv_bytes = FrameBytes(config_) * config_.num_layers() * 3 * (kContext / kBlockTokens);
  ExpectSame(Answers(*Load(few), /*prefix_cache=*/true));
}

TEST_F(ScoreTiersTest, TheSameOverAStoreThatLosesKv) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  // Faults are drawn: now and then none of them costs anything.
  uint64_t losses = 0;
  for (int attempt = 0; attempt < 20 && losses == 0; ++attempt) {
    storage::FaultyStore* faulty = nullptr;
    const auto model = LoadOver(&faulty, options);
    faulty->faults = {.miss_share = 0.0003, .lose_share = 0.002, .polls_max = 3, .reorder = true};
    ASSERT_NO_FATAL_FAILURE(ExpectSame(Answers(*model)));
    losses += losses_;
  }
  EXPECT_GT(losses, 0u);
}

class ScorePrefixTest : public PrefixEngineTest {
 protected:
  Request Ask(int32_t prompt_logprobs) {
    Request request = MakeRequest(++id_, prompt_, 3);
    request.prompt_logprobs = prompt_logprobs;
    return request;
  }
  const std::vector<int32_t> prompt_ = Prompt(100);
};

TEST_F(ScorePrefixTest, NothingThatIsRatedComesFromTheCache) {
  const auto model = Load(InMemory(2 * (kContext / kBlockTokens)));
  const auto ends = Run(*model);
  const Reply first = Send(Ask(-1));
  EXPECT_EQ(Send(Ask(-1)).last.usage.cached_tokens, 96);
  const Reply scored = Send(Ask(2));
  EXPECT_EQ(scored.last.usage.cached_tokens, 0);
  EXPECT_EQ(scored.scores.size(), 99u);
  EXPECT_EQ(scored.tokens, first.tokens);
  ExpectSameScores(Send(Ask(2)).scores, scored.scores);
  const auto forced = Load(InMemory(2 * (kContext / kBlockTokens)));
  ExpectSameScores(scored.scores, ForcedScores(*forced->decoder, prompt_, 2));
}

TEST_F(ScorePrefixTest, WhatWasScoredIsCachedForOthers) {
  const auto model = Load(InMemory(2 * (kContext / kBlockTokens)));
  const auto ends = Run(*model);
  const Reply scored = Send(Ask(0));
  const Reply after = Send(Ask(-1));
  EXPECT_EQ(after.last.usage.cached_tokens, 96);
  EXPECT_EQ(after.tokens, scored.tokens);
}

// It finds its own blocks again, as far as their tokens' scores are known.
TEST_F(ScorePrefixTest, APreemptedOneComputesNothingAgainThatIsRated) {
  const ModelOptions options = InMemory(kContext / kBlockTokens);
  const auto model = Load(options);
  const auto ends = Run(*model);
  Request older = MakeRequest(++id_, Prompt(300, 1), 300);
  Request younger = Ask(1);
  younger.stopping.max_tokens = 250;
  Client first, second;
  ASSERT_TRUE(engine_->Submit(older, first.output).ok());
  ASSERT_TRUE(engine_->Submit(younger, second.output).ok());
  StepUntilIdle(*engine_);
  EXPECT_GE(second.Read().last.usage.preemptions, 1);
  EXPECT_EQ(first.Read().last.finish, FinishReason::kMaxTokens);
  const auto forced = Load(options);
  ExpectSameScores(second.reply.scores, ForcedScores(*forced->decoder, prompt_, 1));
}

}  // namespace
}  // namespace winnow::engine
