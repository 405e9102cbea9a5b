#include "server/vllm/load_meter.h"

#include <gtest/gtest.h>

#include <chrono>

#include "tests/unit/engine/engine_testing.h"

namespace winnow::server {
namespace {

using std::chrono::milliseconds;

class LoadMeterTest : public ::testing::Test {
 protected:
  engine::FakeClock clock_;
  engine::EngineStats stats_;
  LoadMeter meter_{[this] { return stats_; }, clock_, /*block_tokens=*/64, /*max_running=*/8};
};

TEST_F(LoadMeterTest, NothingIsZero) {
  const Load load = meter_.Now();
  EXPECT_EQ(load.usage, 0);
  EXPECT_EQ(load.hit_rate, 0);
  EXPECT_EQ(load.tokens_per_second, 0);
  EXPECT_FALSE(load.silence.has_value());
}

TEST_F(LoadMeterTest, LevelsAreTheEngines) {
  stats_.running = 2;
  stats_.waiting = 3;
  stats_.waiting_tokens = 700;
  stats_.blocks_used = 5;
  stats_.blocks_total = 20;
  stats_.prompt_tokens = 1000;
  stats_.cached_tokens = 250;
  const Load load = meter_.Now();
  EXPECT_EQ(load.running, 2);
  EXPECT_EQ(load.waiting, 3);
  EXPECT_EQ(load.max_running, 8);
  EXPECT_EQ(load.waiting_tokens, 700);
  EXPECT_EQ(load.used_tokens, 320);
  EXPECT_EQ(load.total_tokens, 1280);
  EXPECT_EQ(load.usage, 0.25);
  EXPECT_EQ(load.utilization, 0.25);
  EXPECT_EQ(load.hit_rate, 0.25);
}

TEST_F(LoadMeterTest, TheRateIsOfASecondOrMore) {
  stats_.generated_tokens = 100;
  clock_.Advance(milliseconds(500));
  EXPECT_EQ(meter_.Now().tokens_per_second, 0);  // too early to say
  clock_.Advance(milliseconds(1500));
  EXPECT_EQ(meter_.Now().tokens_per_second, 50);
  stats_.generated_tokens = 400;
  clock_.Advance(milliseconds(999));
  EXPECT_EQ(meter_.Now().tokens_per_second, 50);  // still of the interval before
  clock_.Advance(milliseconds(1));
  EXPECT_EQ(meter_.Now().tokens_per_second, 300);
  clock_.Advance(milliseconds(1000));
  EXPECT_EQ(meter_.Now().tokens_per_second, 0);
}

TEST_F(LoadMeterTest, SilenceIsOfAnEngineThatHasWork) {
  stats_.heartbeat = clock_.Now();
  clock_.Advance(milliseconds(300));
  EXPECT_FALSE(meter_.Now().silence.has_value());
  stats_.running = 1;
  ASSERT_TRUE(meter_.Now().silence.has_value());
  EXPECT_EQ(*meter_.Now().silence, engine::Duration(milliseconds(300)));
}

}  // namespace
}  // namespace winnow::server
