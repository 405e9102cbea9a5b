#include "server/line_sampler.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/engine/engine_testing.h"

namespace winnow::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(LineSamplerTest, AFloodHasItsFirstLinesAndThenSoManyASecond) {
  engine::FakeClock clock;
  LineSampler sampler(/*at_once=*/3, /*per_second=*/2, clock);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(sampler.Take(), std::optional<uint64_t>(0)) << i;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(sampler.Take(), std::nullopt) << i;
  clock.Advance(milliseconds(499));
  EXPECT_EQ(sampler.Take(), std::nullopt);
  clock.Advance(milliseconds(1));
  // Says how many were left out, once.
  EXPECT_EQ(sampler.Take(), std::optional<uint64_t>(6));
  EXPECT_EQ(sampler.Take(), std::nullopt);
  clock.Advance(seconds(1));
  EXPECT_EQ(sampler.Take(), std::optional<uint64_t>(1));
  EXPECT_EQ(sampler.Take(), std::optional<uint64_t>(0));
  EXPECT_EQ(sampler.Take(), std::nullopt);
}

TEST(LineSamplerTest, ALongPauseSavesUpNoMoreThanAtFirst) {
  engine::FakeClock clock;
  LineSampler sampler(/*at_once=*/3, /*per_second=*/2, clock);
  clock.Advance(std::chrono::hours(24));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(sampler.Take().has_value()) << i;
  EXPECT_EQ(sampler.Take(), std::nullopt);
}

TEST(LineSamplerTest, EveryLineIsLoggedOrCountedWhateverThreadItComesFrom) {
  engine::FakeClock clock;
  LineSampler sampler(/*at_once=*/100, /*per_second=*/1, clock);
  constexpr int kThreads = 4, kLines = 500;
  std::atomic<uint64_t> logged = 0, told = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int line = 0; line < kLines; ++line) {
        const std::optional<uint64_t> not_logged = sampler.Take();
        if (!not_logged.has_value()) continue;
        ++logged;
        told += *not_logged;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(logged, 100u);
  clock.Advance(seconds(1));
  told += sampler.Take().value();
  EXPECT_EQ(logged + told, static_cast<uint64_t>(kThreads * kLines));
}

}  // namespace
}  // namespace winnow::server
