#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One call of the sampler with what a test does not care about left out.
struct Call {
  SamplingOptions options;
  std::vector<int32_t> prompt;
  std::vector<int32_t> generated;
  std::vector<int32_t> masked;
  uint64_t index = 0;
  int32_t top_logprobs = -1;

  absl::StatusOr<OutputToken> operator()(Sampler& sampler, std::vector<float> logits) const {
    TokenHistory history(options, prompt);
    for (const int32_t token : generated) history.AddGenerated(token);
    SampleInput input;
    input.options = &options;
    input.history = &history;
    input.masked_tokens = masked;
    input.index = index;
    input.top_logprobs = top_logprobs;
    return sampler.Sample(input, std::span(logits));
  }
  absl::StatusOr<OutputToken> operator()(std::vector<float> logits) const {
    Sampler sampler(static_cast<int32_t>(logits.size()));
    return (*this)(sampler, std::move(logits));
  }
};

std::map<int32_t, double> Candidates(const Sampler& sampler) {
  std::map<int32_t, double> all;
  for (const Sampler::Candidate& c : sampler.last_candidates()) all[c.token] = c.probability;
  return all;
}

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

TEST(SamplerTest, ABrokenRowLeavesTheSamplerWhole) {
  Sampler sampler(3);
  EXPECT_FALSE(Call()(sampler, {0, kNan, 0}).ok());
  EXPECT_EQ(Call()(sampler, {0, 1, 0})->token, 1);
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

TEST(SamplerTest, TopKKeepsExactlyKAndTheLowestIdsAmongEquals) {
  Sampler sampler(6);
  Call call;
  call.options.temperature = 1;
  call.options.top_k = 3;
  ASSERT_TRUE(call(sampler, {1, 2, 1, 1, 2, 1}).ok());
  std::vector<int32_t> kept;
  for (const Sampler::Candidate& c : sampler.last_candidates()) kept.push_back(c.token);
  EXPECT_EQ(kept, (std::vector<int32_t>{1, 4, 0}));
}

TEST(SamplerTest, TopPKeepsTheSmallestSetThatReachesP) {
  // Probabilities 0.5, 0.25, 0.125, 0.125.
  const float ln2 = std::log(2.0f);
  Sampler sampler(4);
  Call call;
  call.options.temperature = 1;
  call.options.top_p = 0.7f;
  ASSERT_TRUE(call(sampler, {-3 * ln2, -ln2, -2 * ln2, -3 * ln2}).ok());
  const auto candidates = Candidates(sampler);
  ASSERT_EQ(candidates.size(), 2u);
  EXPECT_NEAR(candidates.at(1), 2.0 / 3, 1e-6);
  EXPECT_NEAR(candidates.at(2), 1.0 / 3, 1e-6);
}

TEST(SamplerTest, ATinyPKeepsTheMostLikely) {
  Call call;
  call.options.temperature = 5;
  call.options.top_p = 1e-6f;
  for (call.index = 0; call.index < 50; ++call.index) EXPECT_EQ(call({1, 1.5f, 1})->token, 1);
}

TEST(SamplerTest, MinPIsRelativeToTheMostLikely) {
  Sampler sampler(3);
  Call call;
  call.options.temperature = 1;
  call.options.min_p = 0.3f;
  ASSERT_TRUE(call(sampler, {std::log(0.6f), std::log(0.25f), std::log(0.15f)}).ok());
  EXPECT_EQ(Candidates(sampler).size(), 2u);
}

TEST(SamplerTest, AVanishingTemperatureIsGreedy) {
  std::mt19937 random(3);
  const std::vector<float> logits = RandomLogits(random, 300);
  Call call;
  const int32_t greedy = call(logits)->token;
  call.options.temperature = 1e-30f;
  EXPECT_EQ(call(logits)->token, greedy);
}

TEST(SamplerTest, TheDrawDependsOnSeedAndIndexOnly) {
  std::mt19937 random(4);
  Sampler shared(200);
  for (uint64_t index = 0; index < 50; ++index) {
    const std::vector<float> logits = RandomLogits(random, 200);
    Call call;
    call.options.temperature = 1;
    call.options.seed = 99;
    call.index = index;
    const int32_t alone = call(logits)->token;
    Call other;  // another sequence in between
    other.options.temperature = 2;
    other.options.top_k = 5;
    ASSERT_TRUE(other(shared, RandomLogits(random, 200)).ok());
    EXPECT_EQ(call(shared, logits)->token, alone);
  }
}

TEST(SamplerTest, DrawsFollowTheProbabilities) {
  const std::vector<double> expected = {0.5, 0.3, 0.15, 0.05};
  std::vector<float> logits;
  for (const double p : expected) logits.push_back(static_cast<float>(std::log(p)));
  constexpr int kDraws = 20'000;
  for (const float top_p : {1.0f, 0.9999999f}) {  // in order of ids, and sorted
    std::vector<int> counts(4, 0);
    Sampler sampler(4);
    Call call;
    call.options.temperature = 1;
    call.options.top_p = top_p;
    call.options.seed = 7;
    for (call.index = 0; call.index < kDraws; ++call.index) ++counts[call(sampler, logits)->token];
    for (size_t i = 0; i < expected.size(); ++i) {
      const double sigma = std::sqrt(kDraws * expected[i] * (1 - expected[i]));
      EXPECT_NEAR(counts[i], kDraws * expected[i], 4 * sigma) << i;
    }
  }
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

TEST(SamplerTest, LogprobsOfLargeLogitsAreStable) {
  Call call;
  call.top_logprobs = 9;  // more than there are
  const absl::StatusOr<OutputToken> token = call({1e30f, 1e30f});
  ASSERT_TRUE(token.ok());
  EXPECT_NEAR(token->logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(token->top.size(), 2u);
}

// The definition: sort everything, filter one step after the other.
std::map<int32_t, double> DrawnFrom(const SamplingOptions& options, std::vector<float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const auto weight = [&](int32_t token) -> double {
    return std::exp((logits[token] - max) / options.temperature);
  };
  if (options.top_k > 0) order.resize(std::min<size_t>(order.size(), options.top_k));
  double sum = 0;
  for (const int32_t token : order) sum += weight(token);
  std::map<int32_t, double> kept;
  double reached = 0;
  for (const int32_t token : order) {
    if (options.top_p < 1 && !kept.empty() && reached >= options.top_p * sum) break;
    reached += weight(token);
    // What has vanished in float32 is not drawn.
    if (weight(token) > 0 && weight(token) >= options.min_p) kept[token] = weight(token);
  }
  double total = 0;
  for (const auto& [token, w] : kept) total += w;
  for (auto& [token, w] : kept) w /= total;
  return kept;
}

TEST(SamplerTest, PartialSelectionEqualsSortingEverything) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&random](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    std::vector<float> logits = RandomLogits(random, seed % 40 == 0 ? 30'000 : pick(1, 700));
    if (pick(0, 3) == 0) {
      for (float& logit : logits) logit = std::round(logit);  // many ties
    }
    Call call;
    call.options.temperature = pick(1, 30) / 10.0f;
    call.options.top_k = pick(0, 1) * pick(1, 3000);
    call.options.top_p = pick(0, 1) ? 1.0f : pick(1, 999) / 1000.0f;
    call.options.min_p = pick(0, 2) ? 0.0f : pick(1, 100) / 200.0f;
    call.options.seed = seed;
    Sampler sampler(static_cast<int32_t>(logits.size()));
    const absl::StatusOr<OutputToken> token = call(sampler, logits);
    ASSERT_TRUE(token.ok());
    const auto expected = DrawnFrom(call.options, logits);
    const auto got = Candidates(sampler);
    ASSERT_EQ(got.size(), expected.size());
    for (const auto& [id, probability] : expected) {
      ASSERT_TRUE(got.contains(id)) << id;
      ASSERT_NEAR(got.at(id), probability, 1e-9 + 1e-6 * probability);
    }
    EXPECT_TRUE(expected.contains(token->token));
  }
}

TEST(SamplerTest, DrawsFromWhatTheReferenceLibraryDrawsFrom) {
  std::ifstream file(std::string(WINNOW_SOURCE_DIR) + "/tests/golden/sampler_golden.json");
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
    Sampler sampler(golden["vocab_size"]);
    ASSERT_TRUE(call(sampler, c["logits"].get<std::vector<float>>()).ok());
    const auto got = Candidates(sampler);
    ASSERT_EQ(got.size(), c["expected"].size());
    for (const auto& expected : c["expected"]) {
      ASSERT_TRUE(got.contains(expected[0]));
      EXPECT_NEAR(got.at(expected[0]), double{expected[1]}, 1e-5);
    }
  }
  EXPECT_GE(number, 50);
}

}  // namespace
}  // namespace winnow::engine
