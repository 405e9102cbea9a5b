#include "engine/schedule/sampler.h"
#include "engine/base/counter_random.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "nlohmann/json.hpp"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One token of a request, with what a test does not care about left out: as the engine asks for it, from the
// CPU backend.
struct Call {
  SamplingOptions options;
  std::vector<int32_t> prompt;
  std::vector<int32_t> generated;
  std::vector<int32_t> masked;
  int32_t index = 0;
  int32_t top_logprobs = -1;

  // use(logits, row) of what the engine makes of it.
  template <typename Use>
  auto With(std::vector<float> logits, Use use) const {
    TokenHistory history(options, prompt);
    for (const int32_t token : generated) history.AddGenerated(token);
    Request request;
    request.sampling = options;
    request.top_logprobs = top_logprobs;
    request.stopping.stop_token_ids = masked;
    request.stopping.min_tokens = masked.empty() ? 0 : index + 1;
    return use(std::span<float>(logits), MakeSampleRow(request, history, index));
  }
  absl::StatusOr<OutputToken> operator()(std::vector<float> logits) const {
    return With(std::move(logits), [](std::span<float> row_logits, const kernels::SampleRow& row) {
      static const auto backend = kernels::MakeCpuBackend("auto", 1);
      const auto size = static_cast<int64_t>(row_logits.size());
      kernels::SampledToken sampled;
      backend->Sample({row_logits.data(), kernels::DType::kF32, 1, size, size}, std::span(&row, 1),
                      &sampled);
      return ToOutputToken(sampled);
    });
  }
  // What it is drawn from.
  std::map<int32_t, double> Candidates(std::vector<float> logits) const {
    return With(std::move(logits), [](std::span<float> row_logits, const kernels::SampleRow& row) {
      std::map<int32_t, double> all;
      for (const kernels::SampleCandidate& c : kernels::SampleCandidatesRef(row_logits, row)) {
        all[c.token] = c.probability;
      }
      return all;
    });
  }
};

std::vector<float> RandomLogits(std::mt19937& random, size_t count) {
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

TEST(CounterRandomTest, IsPhilox) {
  // The first is the known answer of the authors' distribution; the others come from a second
  // implementation.
  EXPECT_EQ(CounterRandom(0, 0), 0x1.c2d38b1acc4fdp-1);
  EXPECT_EQ(CounterRandom(1, 0), 0x1.ca141d79c7d00p-1);
  EXPECT_EQ(CounterRandom(0, 1), 0x1.72c8036fe3932p-2);
  EXPECT_EQ(CounterRandom(0xdeadbeefcafebabe, 123456789012), 0x1.dc3a51f5e0cfcp-2);
  EXPECT_EQ(CounterBits(0, 0) >> 11, uint64_t{0x1c2d38b1acc4fd});
}

TEST(SamplerTest, GreedyTakesTheLargest) { EXPECT_EQ(Call()({0.5f, 3.0f, -1.0f, 2.9f})->token, 1); }

TEST(SamplerTest, GreedyTakesTheLowestIdAmongEquals) {
  for (const size_t size : {3u, 16u, 17u, 100u}) {
    std::vector<float> logits(size, 1.0f);
    EXPECT_EQ(Call()(logits)->token, 0);
    logits[0] = 0;
    EXPECT_EQ(Call()(logits)->token, 1);
  }
}

TEST(SamplerTest, BrokenRowsAreErrorsWhereverTheyAreBroken) {
  for (const float bad : {kNan, kInfinity}) {
    for (size_t at = 0; at < 40; ++at) {
      std::vector<float> logits(40, 0.0f);
      logits[at] = bad;
      Call call;
      call.top_logprobs = 5;
      EXPECT_EQ(call(logits).status().code(), absl::StatusCode::kInternal) << at;
      call.options.temperature = 1;
      call.options.top_p = 0.9f;
      EXPECT_EQ(call(logits).status().code(), absl::StatusCode::kInternal) << at;
    }
  }
  EXPECT_FALSE(Call()(std::vector<float>(40, -kInfinity)).ok());
}

TEST(SamplerTest, MinTokensMasksStopTokens) {
  Call call;
  call.masked = {1, 2};
  EXPECT_EQ(call({0, 5, 4, 1})->token, 3);
  call.masked = {0, 1, 2, 3};
  EXPECT_EQ(call({0, 5, 4, 1}).status().message(), "no token may be chosen");
}

TEST(SamplerTest, AMaskedTokenIsNeverDrawn) {
  Call call;
  call.options.temperature = 1;
  call.masked = {1};
  for (call.index = 0; call.index < 200; ++call.index) EXPECT_NE(call({0, 5, 0})->token, 1);
}

TEST(SamplerTest, BiasIsAddedAndAddsUp) {
  Call call;
  call.options.logit_bias = {{2, 1.0f}, {2, 1.5f}};
  EXPECT_EQ(call({0, 2.4f, 0})->token, 2);
  EXPECT_EQ(call({0, 2.6f, 0})->token, 1);
}

TEST(SamplerTest, RepetitionPenaltyCountsThePromptToo) {
  Call call;
  call.options.repetition_penalty = 2.0f;
  call.prompt = {0};
  EXPECT_EQ(call({3, 2, -1})->token, 1);       // 3 / 2
  EXPECT_EQ(call({-1, -1.9f, -3})->token, 1);  // -1 * 2
}

TEST(SamplerTest, PresenceAndFrequencyCountOnlyWhatWasGenerated) {
  Call call;
  call.prompt = {0, 0, 0};
  call.generated = {1, 1, 2};
  call.options.presence_penalty = 1.0f;
  EXPECT_EQ(call({2.5f, 3.0f, 3.2f})->token, 0);
  call.options.presence_penalty = 0.0f;
  call.options.frequency_penalty = 0.4f;  // 1 loses 0.8, 2 loses 0.4
  EXPECT_EQ(call({2.0f, 3.0f, 2.7f})->token, 2);
}

TEST(TokenHistoryTest, EditsATokenOnceWhateverConcernsIt) {
  SamplingOptions options;
  options.logit_bias = {{7, 1.0f}, {5, 2.0f}, {7, 0.5f}};
  options.repetition_penalty = 2;
  TokenHistory history(options, std::vector<int32_t>{3, 7, 3});
  history.AddGenerated(3);
  history.AddGenerated(9);
  history.AddGenerated(9);
  std::map<int32_t, std::pair<int32_t, float>> edits;
  for (const kernels::LogitEdit& edit : history.edits()) {
    EXPECT_TRUE(edits.emplace(edit.token, std::pair(edit.generated, edit.bias)).second);
  }
  EXPECT_EQ(edits, (std::map<int32_t, std::pair<int32_t, float>>{
                       {3, {1, 0.0f}}, {5, {-1, 2.0f}}, {7, {0, 1.5f}}, {9, {2, 0.0f}}}));
}

TEST(TokenHistoryTest, KeepsNothingThatNoOptionAsksFor) {
  TokenHistory none({}, std::vector<int32_t>{1, 2});
  none.AddGenerated(3);
  EXPECT_TRUE(none.edits().empty());
  SamplingOptions presence;
  presence.presence_penalty = 1;
  TokenHistory generated(presence, std::vector<int32_t>{1, 2});
  generated.AddGenerated(3);
  ASSERT_EQ(generated.edits().size(), 1u);
  EXPECT_EQ(generated.edits()[0].token, 3);
}

TEST(SamplerTest, OptionsReachTheDraw) {
  const float ln2 = std::log(2.0f);  // probabilities 1/2, 1/4, 1/8, 1/8
  const std::vector<float> logits = {-3 * ln2, -ln2, -2 * ln2, -3 * ln2};
  Call call;
  call.options.temperature = 1;
  EXPECT_EQ(call.Candidates(logits).size(), 4u);
  call.options.temperature = 0.5f;
  EXPECT_NEAR(call.Candidates(logits).at(1), 16.0 / 22, 1e-6);
  call.options.top_k = 3;
  EXPECT_EQ(call.Candidates(logits).size(), 3u);
  call.options.top_p = 0.9f;
  EXPECT_EQ(call.Candidates(logits).size(), 2u);
  call.options.top_k = 0;
  call.options.top_p = 1;
  call.options.temperature = 1;
  call.options.min_p = 0.4f;
  EXPECT_EQ(call.Candidates(logits).size(), 2u);
}

TEST(SamplerTest, ATinyPKeepsTheMostLikely) {
  Call call;
  call.options.temperature = 5;
  call.options.top_p = 1e-6f;
  for (call.index = 0; call.index < 50; ++call.index) EXPECT_EQ(call({1, 1.5f, 1})->token, 1);
}

TEST(SamplerTest, AVanishingTemperatureIsGreedy) {
  std::mt19937 random(3);
  const std::vector<float> logits = RandomLogits(random, 300);
  Call call;
  const int32_t greedy = call(logits)->token;
  call.options.temperature = 1e-30f;
  EXPECT_EQ(call(logits)->token, greedy);
}

TEST(SamplerTest, TheDrawDependsOnSeedAndIndex) {
  const std::vector<float> flat(1000, 0.0f);
  std::set<int32_t> drawn;
  Call call;
  call.options.temperature = 1;
  for (call.options.seed = 0; call.options.seed < 8; ++call.options.seed) {
    for (call.index = 0; call.index < 8; ++call.index) {
      const int32_t token = call(flat)->token;
      EXPECT_EQ(token, call(flat)->token);
      drawn.insert(token);
    }
  }
  EXPECT_GT(drawn.size(), 50u);
}

TEST(SamplerTest, LogprobsAreThoseOfTheUnmodifiedRow) {
  Call call;
  call.top_logprobs = 2;
  call.options.temperature = 0.5f;
  call.options.top_k = 1;
  call.options.logit_bias = {{2, 10.0f}, {2, 10.0f}};
  call.options.repetition_penalty = 1.5f;
  call.prompt = {2};
  const absl::StatusOr<OutputToken> token =
      call({std::log(0.5f), std::log(0.375f), std::log(0.125f)});
  ASSERT_TRUE(token.ok());
  EXPECT_EQ(token->token, 2);
  EXPECT_NEAR(token->logprob, std::log(0.125), 1e-6);
  ASSERT_EQ(token->top.size(), 2u);
  EXPECT_EQ(token->top[0].token, 0);
  EXPECT_NEAR(token->top[0].logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(token->top[1].token, 1);
}

TEST(SamplerTest, DrawsFromWhatTheReferenceLibraryDrawsFrom) {
  std::ifstream file(SourcePath("tests/golden/sampler_golden.json"));
  const nlohmann::json golden = nlohmann::json::parse(file);
  int number = 0;
  for (const nlohmann::json& c : golden["cases"]) {
    SCOPED_TRACE(number++);
    Call call;
    call.options.temperature = c["temperature"];
    call.options.top_k = c["top_k"];
    call.options.top_p = c["top_p"];
    call.options.min_p = c["min_p"];
    call.options.repetition_penalty = c["repetition_penalty"];
    for (const auto& bias : c["logit_bias"]) call.options.logit_bias.emplace_back(bias[0], bias[1]);
    call.prompt = c["prompt"].get<std::vector<int32_t>>();
    call.generated = c["generated"].get<std::vector<int32_t>>();
    if (static_cast<int>(call.generated.size()) < c["min_tokens"]) {
      call.masked = c["stop_token_ids"].get<std::vector<int32_t>>();
    }
    const auto logits = c["logits"].get<std::vector<float>>();
    const auto got = call.Candidates(logits);
    ASSERT_EQ(got.size(), c["expected"].size());
    for (const auto& expected : c["expected"]) {
      ASSERT_TRUE(got.contains(expected[0]));
      EXPECT_NEAR(got.at(expected[0]), double{expected[1]}, 1e-5);
    }
    EXPECT_TRUE(got.contains(call(logits)->token));
  }
  EXPECT_GE(number, 50);
}

}  // namespace
}  // namespace winnow::engine
