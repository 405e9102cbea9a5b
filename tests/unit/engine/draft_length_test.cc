#include "engine/schedule/draft_length.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

// Steps take these seconds, and a little more or less; drafted tokens are right with a probability.
struct World {
  double dense = 0.01, draft = 0.004, row = 0.0003;
  double acceptance = 0.85;
  double noise = 0.05;
};

class Simulation {
 public:
  Simulation(const World& world, uint32_t seed) : world_(world), random_(seed) {}

  // Seconds for `tokens` with lengths as they pay; `length` is told what it would measure.
  double Run(DraftLength* length, DraftSource source, int32_t tokens, int32_t most = 64) {
    double seconds = 0;
    for (int32_t made = 0; made < tokens;) {
      const int32_t drafted = length->Next(source, std::min(most, tokens - made - 1));
      EXPECT_GE(drafted, 0);
      EXPECT_LE(drafted, std::max(0, std::min(most, tokens - made - 1)));
      if (drafted == 0) {
        const double step = Noisy(world_.dense);
        length->OnDense(step);
        seconds += step;
        ++made;
        continue;
      }
      for (int32_t i = 0; source == DraftSource::kPolicy && i < drafted; ++i) {
        const double step = Noisy(world_.draft);
        length->OnDraftStep(step);
        seconds += step;
      }
      int32_t accepted = 0;
      while (accepted < drafted && unit_(random_) < world_.acceptance) ++accepted;
      const double step = Noisy(world_.dense + drafted * world_.row);
      length->OnVerification(source, drafted, accepted, step);
      seconds += step;
      made += accepted + 1;
      drafted_ += drafted;
    }
    return seconds;
  }

  // Expected, with always so many.
  double Fixed(int32_t drafted, DraftSource source, int32_t tokens) const {
    double expected = 1;
    for (int32_t i = 1; i <= drafted; ++i) expected += std::pow(world_.acceptance, i);
    const double draft = source == DraftSource::kPolicy ? world_.draft : 0;
    return tokens / expected * (world_.dense + drafted * (draft + world_.row));
  }

  double BestFixed(DraftSource source, int32_t tokens) const {
    double best = Fixed(0, source, tokens);
    for (int32_t n = 1; n <= 64; ++n) best = std::min(best, Fixed(n, source, tokens));
    return best;
  }

  World& world() { return world_; }
  int64_t drafted() const { return drafted_; }

 private:
  double Noisy(double seconds) { return seconds * (1 + world_.noise * (2 * unit_(random_) - 1)); }

  World world_;
  std::mt19937 random_;
  std::uniform_real_distribution<double> unit_{0, 1};
  int64_t drafted_ = 0;
};

TEST(DraftLengthTest, IsAboutAsFastAsTheBestFixedLength) {
  constexpr int32_t kTokens = 4000;
  for (const double acceptance : {0.5, 0.7, 0.85, 0.95, 0.99}) {
    for (const double draft : {0.001, 0.003, 0.006}) {
      for (const DraftSource source : {DraftSource::kPolicy, DraftSource::kLookup}) {
        SCOPED_TRACE(testing::Message() << acceptance << ", " << draft);
        Simulation simulation({.draft = draft, .acceptance = acceptance}, 7);
        DraftLength length;
        const double seconds = simulation.Run(&length, source, kTokens);
        EXPECT_LT(seconds, 1.12 * simulation.BestFixed(source, kTokens));
      }
    }
  }
}

TEST(DraftLengthTest, DraftsThatAllFailCostTwoPercentAtMost) {
  for (const double draft : {0.002, 0.006, 0.0099, 0.02}) {
    for (const DraftSource source : {DraftSource::kPolicy, DraftSource::kLookup}) {
      for (const int32_t tokens : {100, 200, 1000}) {
        SCOPED_TRACE(testing::Message() << draft << ", " << tokens);
        double seconds = 0;
        double dense = 0;
        for (uint32_t seed = 0; seed < 20; ++seed) {
          Simulation simulation({.draft = draft, .acceptance = 0, .noise = 0.02}, seed);
          DraftLength length;
          seconds += simulation.Run(&length, source, tokens);
          dense += simulation.Fixed(0, source, tokens);
          EXPECT_GT(simulation.drafted(), 0) << "it is never tried";
        }
        EXPECT_LT(seconds, 1.021 * dense);
      }
    }
  }
}

// Drafting is as slow as decoding: even drafts that are always right win nothing.
TEST(DraftLengthTest, DraftsThatDoNotPayCostTwoPercentAtMost) {
  for (const double acceptance : {0.0, 0.5, 1.0}) {
    Simulation simulation({.draft = 0.0105, .acceptance = acceptance}, 3);
    DraftLength length;
    EXPECT_LT(simulation.Run(&length, DraftSource::kPolicy, 2000),
              1.02 * simulation.Fixed(0, DraftSource::kPolicy, 2000));
  }
}

TEST(DraftLengthTest, FollowsAWorldThatChanges) {
  Simulation simulation({.acceptance = 0.1}, 5);
  DraftLength length;
  simulation.Run(&length, DraftSource::kPolicy, 1000);
  simulation.world().acceptance = 0.95;
  simulation.Run(&length, DraftSource::kPolicy, 3000);  // notices
  EXPECT_LT(simulation.Run(&length, DraftSource::kPolicy, 2000),
            1.15 * simulation.BestFixed(DraftSource::kPolicy, 2000));
  simulation.world().acceptance = 0;
  EXPECT_LT(simulation.Run(&length, DraftSource::kPolicy, 2000),
            1.02 * simulation.Fixed(0, DraftSource::kPolicy, 2000));
}

// A source that wins much does not pay for one that never does.
TEST(DraftLengthTest, ASourceThatFailsIsTriedSeldomBesideOneThatPays) {
  DraftLength length;
  length.OnDense(1);
  length.OnDense(1);
  int32_t tried = 0;
  for (int i = 0; i < 200; ++i) {
    for (int j = 0; j < 8; ++j) length.OnDraftStep(0.1);
    length.OnVerification(DraftSource::kPolicy, 8, 8, 1.2);
    if (length.Next(DraftSource::kLookup, 8) > 0) {
      length.OnVerification(DraftSource::kLookup, 1, 0, 1.3);
      ++tried;
    }
  }
  EXPECT_GT(tried, 5);
  EXPECT_LT(tried, 80);
}

TEST(DraftLengthTest, SourcesAreToldApart) {
  DraftLength length;
  length.OnDense(1);
  for (int i = 0; i < 50; ++i) {
    length.OnVerification(DraftSource::kLookup, 4, 0, 1.1);
    for (int j = 0; j < 4; ++j) length.OnDraftStep(0.1);
    length.OnVerification(DraftSource::kPolicy, 4, 4, 1.1);
  }
  EXPECT_LT(length.acceptance(DraftSource::kLookup), 0.1);
  EXPECT_GT(length.acceptance(DraftSource::kPolicy), 0.9);
}

// Answers too short to find out for themselves: the first ones try, the others know.
TEST(DraftLengthTest, ShortAnswersKnowWhatDraftsCostOthers) {
  const auto costs = std::make_shared<DraftCosts>();
  int64_t drafted = 0;
  for (uint32_t answer = 0; answer < 40; ++answer) {
    Simulation simulation({.draft = 0.025, .acceptance = 1}, answer);
    DraftLength length;
    length.Share(costs);
    const double seconds = simulation.Run(&length, DraftSource::kPolicy, 100);
    if (answer < 2 * DraftCosts::kEnough) {
      drafted += simulation.drafted();
      continue;
    }
    EXPECT_EQ(simulation.drafted(), 0);
    EXPECT_LT(seconds, 1.01 * simulation.Fixed(0, DraftSource::kPolicy, 100));
  }
  EXPECT_GE(drafted, static_cast<int64_t>(DraftCosts::kEnough));
}

// And where drafts pay, the first of an answer is as long as that of one that has drafted.
TEST(DraftLengthTest, TheFirstDraftIsAsLongAsPaysWhereCostsAreKnown) {
  const auto costs = std::make_shared<DraftCosts>();
  for (size_t i = 0; i < DraftCosts::kEnough; ++i) costs->Add(0.2);
  DraftLength alone, knows;
  knows.Share(costs);
  for (DraftLength* length : {&alone, &knows}) {
    length->OnDense(1);
    length->OnDense(1);
  }
  EXPECT_EQ(alone.Next(DraftSource::kPolicy, 64), 1);
  EXPECT_GT(knows.Next(DraftSource::kPolicy, 64), 1);
}

TEST(DraftLengthTest, OneSlowDraftOfOthersOrOfItsOwnDoesNotEndDrafting) {
  const auto costs = std::make_shared<DraftCosts>();
  costs->Add(30);
  EXPECT_FALSE(costs->median().has_value());
  costs->Add(0.2);
  costs->Add(0.25);
  EXPECT_EQ(costs->median(), 0.25);
  DraftLength length;
  length.Share(costs);
  length.OnDense(1);
  length.OnDense(1);
  EXPECT_GT(length.Next(DraftSource::kPolicy, 64), 1);
  // The sequence's own first draft weighs as one of four.
  length.OnDraftStep(1);
  EXPECT_GT(length.Next(DraftSource::kPolicy, 64), 0);
}

// On a GPU the first step of a kind makes the graph that the next ones launch: by its time alone drafts seemed to pay where
// they took twice a dense token's.
TEST(DraftLengthTest, ASlowFirstTokenDoesNotMakeDraftsLookCheap) {
  for (const double first : {1.0, 3.0, 20.0}) {
    DraftLength length;
    length.OnDense(first);
    length.OnDense(1);
    int32_t drafted = 0;
    for (int i = 0; i < 100; ++i) {
      const int32_t next = length.Next(DraftSource::kPolicy, 8);
      drafted += next;
      for (int32_t j = 0; j < next; ++j) length.OnDraftStep(2);
      if (next == 0) {
        length.OnDense(1);
      } else {
        length.OnVerification(DraftSource::kPolicy, next, next, 1 + 0.05 * next);
      }
    }
    EXPECT_LE(drafted, 2) << first;
  }
}

// The graph of dense steps goes for a draft's, and is made again while the next ones wait.
TEST(DraftLengthTest, SlowStepsAfterADraftAreItsLoss) {
  for (const double draft : {0.5, 2.0}) {
    for (const double acceptance : {0.0, 0.3}) {
      double seconds = 0;
      constexpr int kTokens = 1000;
      std::mt19937 random(11);
      DraftLength length;
      int drafts = 0, slow = 0;
      for (int made = 0; made < kTokens; ++made) {
        const int32_t next = length.Next(DraftSource::kPolicy, 8);
        if (next == 0) {
          const double step = slow == 2 ? 1.6 : slow == 1 ? 3.3 : 1;
          slow = std::max(0, slow - 1);
          length.OnDense(step);
          seconds += step;
          continue;
        }
        ++drafts;
        slow = 2;
        for (int32_t i = 0; i < next; ++i) length.OnDraftStep(draft);
        const bool accepted = std::bernoulli_distribution(acceptance)(random);
        made += accepted;
        length.OnVerification(DraftSource::kPolicy, next, accepted, 1 + 0.05 * next);
        seconds += next * (draft + 0.05) + 1;
      }
      EXPECT_GT(drafts, 1);
      EXPECT_LT(seconds, 1.02 * kTokens) << "draft " << draft << ", acceptance " << acceptance;
    }
  }
}

TEST(DraftLengthTest, SlowStepsAfterALookupDoNotEndLookups) {
  DraftLength length;
  for (int i = 0; i < 3; ++i) length.OnDense(1);
  length.OnVerification(DraftSource::kLookup, 2, 0, 1.2);
  for (int i = 0; i < 3; ++i) length.OnDense(3);
  EXPECT_GT(length.Next(DraftSource::kLookup, 8), 0);
}

// An index takes in many dense tokens with the next draft's first one.
TEST(DraftLengthTest, WhatTheIndexTakesInIsTheDraftsLoss) {
  double seconds = 0;
  constexpr int kTokens = 1500;
  DraftLength length;
  int drafts = 0;
  for (int made = 0; made < kTokens; ++made) {
    const int32_t next = length.Next(DraftSource::kPolicy, 8);
    if (next == 0) {
      length.OnDense(1);
      seconds += 1;
      continue;
    }
    ++drafts;
    length.OnCatchUp(4);
    for (int32_t i = 1; i < next; ++i) length.OnDraftStep(0.5);
    length.OnVerification(DraftSource::kPolicy, next, 0, 1 + 0.05 * next);
    seconds += 4 + 0.5 * (next - 1) + 1 + 0.05 * next;
  }
  EXPECT_GT(drafts, 1);
  EXPECT_LT(seconds, 1.02 * kTokens);
}

// A long answer's findings of a world that has changed reach those after it.
TEST(DraftLengthTest, SharedCostsFollowAWorldThatChanges) {
  const auto costs = std::make_shared<DraftCosts>();
  for (int i = 0; i < 20; ++i) costs->Add(3);
  Simulation simulation({.draft = 0.002, .acceptance = 0.95}, 9);
  DraftLength length;
  length.Share(costs);
  simulation.Run(&length, DraftSource::kPolicy, 4000);
  EXPECT_GT(simulation.drafted(), 100);
  EXPECT_NEAR(costs->median().value(), 0.2, 0.05);
}

TEST(DraftCostTableTest, PoliciesContextsAndBatchesAreToldApart) {
  DraftCostTable table;
  const auto of = [&](const char* policy, int32_t context, int32_t sequences) {
    return table.Of(policy, DraftCostTable::PlaceOf(context, sequences));
  };
  const std::shared_ptr<DraftCosts> costs = of("pca", 5000, 1);
  EXPECT_EQ(of("pca", 8000, 1), costs);
  EXPECT_NE(of("lsh", 5000, 1), costs);
  EXPECT_NE(of("pca", 9000, 1), costs);
  EXPECT_NE(of("pca", 5000, 2), costs);
  // The table is bounded, whatever clients send, and a sequence keeps the costs that it has.
  for (size_t i = 0; i < 3 * DraftCostTable::kMostEntries; ++i) {
    of(std::to_string(i).c_str(), 5000, 1)->Add(1);
  }
  costs->Add(2);
  EXPECT_NE(of("pca", 5000, 1), costs);
}

TEST(DraftLengthTest, WhereTimeStandsStillItDraftsAllTheSame) {
  DraftLength length;
  EXPECT_EQ(length.Next(DraftSource::kPolicy, 64), 0);  // one token, to be measured
  length.OnDense(0);
  EXPECT_EQ(length.Next(DraftSource::kPolicy, 64), DraftLength::kUnmeasured);
  EXPECT_EQ(length.Next(DraftSource::kPolicy, 2), 2);
  EXPECT_EQ(length.Next(DraftSource::kPolicy, 0), 0);
}

}  // namespace
}  // namespace winnow::engine
