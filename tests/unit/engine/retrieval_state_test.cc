#include "engine/retrieval_state.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace winnow::engine
