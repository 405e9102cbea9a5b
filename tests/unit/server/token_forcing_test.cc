// An answer that is forced: which tokens may come, and when.
#include "server/token_forcing.h"
#include "tests/unit/test_seed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace winnow::server {
namespace {

std::vector<int32_t> Allowed(engine::GrammarState& state, int32_t vocab_size) {
  std::vector<int32_t> out;
  const std::span<const uint32_t> words = state.AllowedTokens();
  for (int32_t id = 0; id < vocab_size; ++id) {
    if (words.empty() || (words[id / 32] >> (id % 32) & 1) != 0) out.push_back(id);
  }
  return out;
}

TEST(TokenForcingTest, EachTokenIsTheOnlyOneAtItsPlaceAndThenAllAre) {
  TestRandom random;
  for (const int32_t vocab_size : {1, 31, 32, 33, 1000}) {
    std::vector<int32_t> tokens(20);
    for (int32_t& token : tokens) {
      token = std::uniform_int_distribution<int32_t>(0, vocab_size - 1)(random);
    }
    tokens[7] = tokens[6];
    tokens[0] = vocab_size - 1;
    const auto grammar = ForceTokens(tokens, vocab_size);
    const auto state = grammar->NewState();
    for (size_t i = 0; i < tokens.size(); ++i) {
      SCOPED_TRACE(testing::Message() << vocab_size << ", " << i);
      // Asked twice, as a step that is computed again does.
      EXPECT_THAT(Allowed(*state, vocab_size), testing::ElementsAre(tokens[i]));
      EXPECT_THAT(Allowed(*state, vocab_size), testing::ElementsAre(tokens[i]));
      EXPECT_FALSE(state->Accept(tokens[i] + 1));
      EXPECT_TRUE(state->Accept(tokens[i]));
    }
    EXPECT_EQ(Allowed(*state, vocab_size).size(), static_cast<size_t>(vocab_size));
    EXPECT_TRUE(state->Accept(0));
    EXPECT_TRUE(state->Accept(vocab_size - 1));
  }
}

TEST(TokenForcingTest, ACloneGoesItsOwnWay) {
  const auto state = ForceTokens({3, 40, 5}, 64)->NewState();  // the state keeps the tokens
  ASSERT_TRUE(state->Accept(3));
  ASSERT_THAT(Allowed(*state, 64), testing::ElementsAre(40));
  const auto clone = state->Clone();
  ASSERT_TRUE(clone->Accept(40));
  EXPECT_THAT(Allowed(*clone, 64), testing::ElementsAre(5));
  EXPECT_THAT(Allowed(*state, 64), testing::ElementsAre(40));
}

}  // namespace
}  // namespace winnow::server
