#include "engine/schedule/prompt_lookup.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int32_t> Propose(const std::vector<int32_t>& tokens, int32_t most) {
  PromptLookup lookup;
  return lookup.Propose(tokens, most);
}

TEST(PromptLookupTest, ProposesWhatFollowedTheLastTokens) {
  EXPECT_THAT(Propose({1, 2, 3, 4, 5, 6, 9, 1, 2, 3}, 3), ElementsAre(4, 5, 6));
  EXPECT_THAT(Propose({1, 2, 3, 4, 5, 6, 9, 1, 2, 3}, 1), ElementsAre(4));
}

TEST(PromptLookupTest, NewTokensProposeNothing) {
  EXPECT_THAT(Propose({}, 4), IsEmpty());
  EXPECT_THAT(Propose({1, 2, 3}, 4), IsEmpty());
  EXPECT_THAT(Propose({1, 2, 3, 4, 0, 2, 3}, 4), IsEmpty());  // two of three agree
  EXPECT_THAT(Propose({1, 2, 3, 4, 1, 2, 3}, 0), IsEmpty());
}

TEST(PromptLookupTest, ALongerAgreementWinsAndThenTheLater) {
  EXPECT_THAT(Propose({7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 7, 1, 2, 3}, 1), ElementsAre(40));
  EXPECT_THAT(Propose({8, 1, 2, 3, 40, 8, 1, 2, 3, 50, 8, 1, 2, 3}, 1), ElementsAre(50));
}

TEST(PromptLookupTest, ALoopGoesOn) {
  EXPECT_THAT(Propose({9, 1, 2, 1, 2, 1, 2}, 5), ElementsAre(1, 2, 1, 2, 1));
  EXPECT_THAT(Propose({5, 5, 5, 5}, 3), ElementsAre(5, 5, 5));
}

// Against a search through all places.
TEST(PromptLookupTest, IsTheSameHoweverOftenItWasAsked) {
  std::mt19937 random(11);
  for (int round = 0; round < 50; ++round) {
    PromptLookup growing;
    std::vector<int32_t> tokens;
    for (int step = 0; step < 60; ++step) {
      for (uint32_t n = random() % 4; n > 0; --n)
        tokens.push_back(static_cast<int32_t>(random() % 3));
      const int32_t most = 1 + static_cast<int32_t>(random() % 6);
      const std::vector<int32_t> proposal = growing.Propose(tokens, most);
      ASSERT_EQ(proposal, Propose(tokens, most));
      const auto size = static_cast<int32_t>(tokens.size());
      int32_t best = 0;
      int32_t best_length = PromptLookup::kGram - 1;
      int32_t candidates = 0;
      for (int32_t end = size - 1; end > 0 && candidates < PromptLookup::kCandidates; --end) {
        int32_t length = 0;
        while (length < std::min(end, PromptLookup::kLongest) &&
               tokens[end - 1 - length] == tokens[size - 1 - length]) {
          ++length;
        }
        candidates += length >= PromptLookup::kGram;
        if (length > best_length) {
          best = end;
          best_length = length;
        }
      }
      ASSERT_EQ(proposal.empty(), best == 0);
      for (int32_t i = 0; i < std::min<int32_t>(size - best, static_cast<int32_t>(proposal.size()));
           ++i) {
        ASSERT_EQ(proposal[i], tokens[best + i]);
      }
    }
  }
}

}  // namespace
}  // namespace winnow::engine
