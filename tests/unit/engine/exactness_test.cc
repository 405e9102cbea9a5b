#include "engine/retrieval/exactness.h"

#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;

AttentionPolicy Policy(std::string_view text) {
  const auto policy = ParseAttentionPolicy(text);
  EXPECT_TRUE(policy.ok()) << text << ": " << policy.status();
  return policy.value_or(AttentionPolicy());
}

Exactness Named(std::string_view text) {
  const auto exactness = ParseExactness(text);
  EXPECT_TRUE(exactness.ok()) << text << ": " << exactness.status();
  return exactness.value_or(Exactness());
}

TEST(Exactness, HasOneText) {
  for (const char* text : {"exact", "fast", "floor:0.9", "floor:1", "floor:0.000001"}) {
    EXPECT_EQ(ToString(Named(text)), text);
  }
  EXPECT_EQ(ToString(Named("floor:.50")), "floor:0.5");
  for (const char* text : {"", "Exact", "exact ", "floor", "floor:", "floor:0", "floor:1.5",
                           "floor:-1", "floor:1e-1", "floor:nan", "floor:0.5,k=3", "fast:1"}) {
    const absl::Status status = ParseExactness(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("exact, fast, or floor:C"));
  }
}

TEST(Exactness, IsReadOffAPolicy) {
  for (const auto& [policy, exactness] : {std::pair{"dense", "exact"},
                                          {"dense:lookup=on", "exact"},
                                          {"lsh:k=2%,verify=8", "exact"},
                                          {"pca:k=2%,lookup=on", "exact"},
                                          {"lsh:k=2%,floor=0.75", "floor:0.75"},
                                          {"lsh:k=2%", "fast"},
                                          {"window:completion=on", "fast"}}) {
    EXPECT_EQ(ToString(ExactnessOf(Policy(policy))), exactness) << policy;
  }
}

TEST(Exactness, ChangesWhatThePolicyLeavesOpen) {
  for (const auto& [policy, exactness, applied] :
       {std::tuple{"lsh:k=5%", "exact", "lsh:k=5%,verify=auto"},
        {"lsh:k=5%,verify=8", "exact", "lsh:k=5%,verify=8"},
        {"pca:k=2%,lookup=on", "exact", "pca:k=2%,lookup=on,verify=auto"},
        {"lsh:k=5%", "floor:0.9", "lsh:k=5%,floor=0.9"},
        {"lsh:k=5%,floor=0.9", "floor:0.90", "lsh:k=5%,floor=0.9"},
        {"window:completion=on", "floor:0.9", "window:completion=on,floor=0.9"},
        {"lsh:k=5%", "fast", "lsh:k=5%"},
        {"lsh:k=5%,floor=0.5", "fast", "lsh:k=5%,floor=0.5"},
        {"window:completion=on,suffix=8", "fast", "window:completion=on,suffix=8"},
        {"dense", "exact", "dense"},
        {"dense", "floor:0.9", "dense"},
        {"dense", "fast", "dense"},
        {"dense:lookup=on", "exact", "dense:lookup=on,verify=auto"},
        {"dense:lookup=on", "fast", "dense:lookup=on,verify=auto"}}) {
    for (const bool yields : {false, true}) {
      const auto result = WithExactness(Policy(policy), Named(exactness), yields);
      ASSERT_TRUE(result.ok()) << policy << " " << exactness << ": " << result.status();
      EXPECT_EQ(ToString(*result), applied) << policy << " " << exactness;
    }
  }
}

TEST(Exactness, ContradictionsNameBothOrYield) {
  for (const auto& [policy, exactness, option, yielded] :
       {std::tuple{"lsh:k=5%,floor=0.9", "exact", "floor", "lsh:k=5%,verify=auto"},
        {"lsh:k=5%,suffix=9", "exact", "suffix", "lsh:k=5%,verify=auto"},
        {"window:completion=on", "exact", "completion", "window:verify=auto"},
        {"lsh:k=5%,completion=on,suffix=9,floor=0.1", "exact", "completion",
         "lsh:k=5%,verify=auto"},
        {"lsh:k=5%,verify=8", "floor:0.9", "verify", "lsh:k=5%,floor=0.9"},
        {"lsh:k=5%,lookup=on", "floor:0.9", "lookup", "lsh:k=5%,floor=0.9"},
        {"lsh:k=5%,floor=0.8", "floor:0.9", "floor", "lsh:k=5%,floor=0.9"},
        {"lsh:k=5%,verify=auto", "fast", "verify", "lsh:k=5%"},
        {"lsh:k=5%,lookup=on", "fast", "lookup", "lsh:k=5%"}}) {
    const absl::Status refused = WithExactness(Policy(policy), Named(exactness), false).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << policy;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("'" + std::string(exactness) + "'"));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("'" + std::string(option) + "'"));
    const auto result = WithExactness(Policy(policy), Named(exactness), true);
    ASSERT_TRUE(result.ok()) << policy << ": " << result.status();
    EXPECT_EQ(ToString(*result), yielded) << policy;
  }
}

// Every policy can take every exactness if it yields, and what comes out says so of itself, is a policy that has a
// text, and takes the same again.
TEST(Exactness, WhatIsAppliedIsWhatItSays) {
  TestRandom random;
  const auto pick = [&](std::initializer_list<const char*> of) {
    return std::string(of.begin()[random() % of.size()]);
  };
  for (int i = 0; i < 2000; ++i) {
    const std::string name = pick({"dense", "window", "lsh", "pca", "quest"});
    std::string text = name == "dense" ? pick({"dense", "dense:lookup=on"})
                                       : name + pick({":sink=3", ":window=9", ":from=0"}) +
                                             pick({"", ",verify=4", ",verify=auto", ",lookup=on",
                                                   ",floor=0.5", ",floor=0.7,suffix=4", ",suffix=4",
                                                   ",completion=on", ",completion=on,floor=0.5"});
    const Exactness exactness = Named(pick({"exact", "fast", "floor:0.5", "floor:0.6"}));
    const auto applied = WithExactness(Policy(text), exactness, true);
    ASSERT_TRUE(applied.ok()) << text << ": " << applied.status();
    EXPECT_EQ(Policy(ToString(*applied)), *applied) << text;
    const Exactness has = ExactnessOf(*applied);
    if (name == "dense") {
      EXPECT_EQ(has.kind, Exactness::Kind::kExact) << text;
    } else if (exactness.kind != Exactness::Kind::kFast) {
      EXPECT_EQ(has, exactness) << text;
    } else {
      EXPECT_NE(has.kind, Exactness::Kind::kExact) << text;
    }
    const auto again = WithExactness(*applied, exactness, false);
    ASSERT_TRUE(again.ok()) << text << ": " << again.status();
    EXPECT_EQ(*again, *applied) << text;
  }
}

}  // namespace
}  // namespace winnow::engine
