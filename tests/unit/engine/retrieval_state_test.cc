#include "engine/retrieval/retrieval_state.h"

#include <gtest/gtest.h>

#include <cmath>

namespace winnow::engine {
namespace {

AttentionPolicy Policy(const char* text) {
  const auto policy = ParseAttentionPolicy(text);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return *policy;
}

TEST(PlanQuery, MidIsWhatSinkAndWindowLeave) {
  // Sees 1000 tokens: 16 first, 128 last with its own.
  const QueryPlan plan = PlanQuery(Policy("oracle:k=20"), 999, 0);
  EXPECT_FALSE(plan.dense);
  EXPECT_EQ(plan.mid, (kernels::TokenRange{16, 872}));
  EXPECT_EQ(plan.k, 20);
  EXPECT_EQ(plan.candidates, 20);
}

TEST(PlanQuery, ContextsWithoutAnythingToLeaveOutAreDense) {
  // 16 + 128 anchors and 20 to choose: the first context with a token to spare has 165.
  const AttentionPolicy policy = Policy("oracle:k=20");
  EXPECT_TRUE(PlanQuery(policy, 163, 0).dense);
  EXPECT_FALSE(PlanQuery(policy, 164, 0).dense);
  EXPECT_TRUE(PlanQuery(Policy("window"), 143, 0).dense);
  EXPECT_FALSE(PlanQuery(Policy("window"), 144, 0).dense);
  EXPECT_TRUE(PlanQuery(Policy("dense"), 100000, 0).dense);
  EXPECT_TRUE(PlanQuery(Policy("oracle:k=100%"), 100000, 0).dense);
}

TEST(PlanQuery, ShareIsOfAllThatIsSeen) {
  EXPECT_EQ(PlanQuery(Policy("oracle:k=2%"), 9999, 0).k, 200);
  EXPECT_EQ(PlanQuery(Policy("oracle:k=2%"), 10024, 0).k, 201);  // 200.5 rounds up
}

TEST(PlanQuery, PruningSelectsMoreFirst) {
  const QueryPlan plan = PlanQuery(Policy("oracle:k=100,p=0.9"), 9999, 0);
  EXPECT_EQ(plan.k, 100);
  EXPECT_EQ(plan.candidates, 400);
  EXPECT_EQ(PlanQuery(Policy("oracle:k=100,p=0.9"), 499, 0).candidates, 500 - 144);
}

TEST(PlanQuery, ALeastMassFallsAsKGrows) {
  const AttentionPolicy policy = Policy("pca:k=100,min_mass=0.002");
  EXPECT_EQ(PlanQuery(policy, 9999, 0).min_mass, 0.002);
  const QueryPlan widened = PlanQuery(policy, 9999, 0, /*widen=*/4);
  EXPECT_EQ(widened.k, 400);
  EXPECT_EQ(widened.min_mass, 0.0005);
  EXPECT_EQ(PlanQuery(Policy("pca:k=100"), 9999, 0).min_mass, 0);
}

TEST(PlanQuery, QuestTakesWholePages) {
  const QueryPlan plan = PlanQuery(Policy("quest:k=20,sink=4,window=100"), 999, 0);
  EXPECT_EQ(plan.mid, (kernels::TokenRange{16, 896}));  // 4 and 900, rounded inwards
  EXPECT_EQ(plan.k, 32);
}

TEST(PlanQuery, ShortestContextComesFromThePolicyOrTheDevice) {
  EXPECT_TRUE(PlanQuery(Policy("window"), 998, 1000).dense);
  EXPECT_FALSE(PlanQuery(Policy("window"), 999, 1000).dense);
  EXPECT_FALSE(PlanQuery(Policy("window:from=0"), 998, 1000).dense);
  EXPECT_TRUE(PlanQuery(Policy("window:from=2000"), 1998, 1000).dense);
}

TEST(PlanQuery, WhatRetrievesGoesOnRetrieving) {
  for (const char* text : {"window", "oracle", "oracle:k=300", "quest:k=7%", "lsh:k=50%,p=0.9",
                           "oracle:sink=0,window=1,k=99%"}) {
    const AttentionPolicy policy = Policy(text);
    bool before = false;
    for (int32_t position = 0; position < 5000; ++position) {
      const bool retrieves = !PlanQuery(policy, position, 0).dense;
      ASSERT_TRUE(retrieves || !before) << text << " at " << position;
      before = retrieves;
    }
    EXPECT_TRUE(before) << text;
  }
}

// Layers whose number shares a factor with the interval were never measured once.
TEST(RetrievalState, TheLayerWhoseIndexLacksMostCountsIfItRetrieves) {
  RetrievalState state(Policy("pca:k=2%,dense_layers=1"), std::vector<bool>(4, true));
  state.layer(1).indexed = state.layer(2).indexed = 500;
  state.layer(3).indexed = 448;
  EXPECT_EQ(state.NotIndexed(500), 52);
  EXPECT_EQ(state.NotIndexed(448), 0);
  EXPECT_EQ(state.NotIndexed(100), 0);
}

TEST(IsProbed, MeasuresOneInTheIntervalOfEveryLayer) {
  constexpr int32_t kPositions = 64 * 400;
  for (const int32_t layers : {6, 16, 28, 30, 32}) {
    for (const int32_t interval : {1, 7, 64}) {
      for (int32_t layer = 0; layer < layers; ++layer) {
        int32_t measured = 0;
        for (int32_t position = 0; position < kPositions; ++position) {
          measured += IsProbed(position, layer, interval) ? 1 : 0;
        }
        const double expected = static_cast<double>(kPositions) / interval;
        // Six times the spread of a binomial draw.
        EXPECT_NEAR(measured, expected, interval == 1 ? 0 : 6 * std::sqrt(expected))
            << layers << " " << layer << " " << interval;
      }
    }
  }
}

TEST(PlanQuery, WidensUpToAllCandidates) {
  const AttentionPolicy policy = Policy("oracle:k=100,sink=16,window=128");
  EXPECT_EQ(PlanQuery(policy, 999, 0, 2).k, 200);
  EXPECT_EQ(PlanQuery(policy, 999, 0, 4).k, 400);
  EXPECT_EQ(PlanQuery(policy, 399, 0, 4).k, 400 - 144);
  EXPECT_FALSE(PlanQuery(policy, 399, 0, 4).dense);
  const QueryPlan pruned = PlanQuery(Policy("oracle:k=100,p=0.9"), 9999, 0, 2);
  EXPECT_EQ(pruned.k, 200);
  EXPECT_EQ(pruned.candidates, 800);
  const QueryPlan pages = PlanQuery(Policy("quest:k=20,sink=4,window=100"), 999, 0, 4);
  EXPECT_EQ(pages.k, 4 * 32);
}

TEST(FloorSteps, EachStepNeedsAProbeThatFellInSpiteOfTheOneBefore) {
  FloorSteps steps;
  EXPECT_EQ(steps.Widen(1 << 30), 1);
  steps.Fell(0, 11, true);
  steps.Fell(0, 11, true);  // another layer of the same query
  EXPECT_EQ(steps.Widen(10), 1);
  EXPECT_EQ(steps.Widen(11), 2);
  EXPECT_EQ(steps.Widen(1000), 2);
  steps.Fell(0, 10, true);  // an earlier query of the same pass, in a later layer
  EXPECT_EQ(steps.Widen(10), 2);
  steps.Fell(0, 16, true);  // a later one of the same pass, which read no more than k
  EXPECT_EQ(steps.Taken(10), 1);
  EXPECT_EQ(steps.Taken(1000), 1);
  steps.Fell(1, 21, true);
  EXPECT_EQ(steps.Widen(21), 4);
  EXPECT_EQ(steps.dense_from(), FloorSteps::kNever);
  steps.Fell(2, 31, true);
  EXPECT_EQ(steps.dense_from(), 31);
  EXPECT_EQ(steps.Taken(31), 3);
  steps.Rewind(25);
  EXPECT_EQ(steps.dense_from(), FloorSteps::kNever);
  EXPECT_EQ(steps.Widen(25), 4);
}

TEST(FloorSteps, APolicyWithoutABudgetGoesDenseAtOnce) {
  FloorSteps steps;
  steps.Fell(0, 64, false);
  EXPECT_EQ(steps.dense_from(), 64);
  EXPECT_EQ(steps.Taken(63), 0);
}

}  // namespace
}  // namespace winnow::engine
