#include "engine/schedule/draft_length.h"

#include <algorithm>
#include <cmath>
#include <random>
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
