#include "storage/tier_health.h"

#include <gtest/gtest.h>

#include "tests/unit/storage/store_client.h"

namespace winnow::storage {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

TEST(TierHealth, FewErrorsInALongTimeAreBorne) {
  TierHealth health({.errors_max = 3});
  for (int i = 0; i < 100; ++i) {
    health.ReadError(i * 30 * kSecond);
    health.WriteError(i * 30 * kSecond);
    EXPECT_EQ(health.Update(i * 30 * kSecond), TierState::kOk);
  }
}

TEST(TierHealth, ManyWriteErrorsLeaveReadsManyReadErrorsLeaveNothing) {
  TierHealth health({.errors_max = 3});
  for (int i = 0; i < 4; ++i) health.WriteError(i);
  EXPECT_EQ(health.Update(10), TierState::kDegraded);
  for (int i = 0; i < 4; ++i) health.ReadError(i);
  EXPECT_EQ(health.Update(10), TierState::kOff);
  health.WriteError(11);
  EXPECT_EQ(health.Update(12), TierState::kOff) << "a write error does not bring reads back";
}

TEST(TierHealth, ComesBackByItselfAndIsOnProbation) {
  TierHealth health({.errors_max = 3, .pause_ns = 5 * kSecond, .probation_successes = 2});
  health.NoSpace(0);
  EXPECT_EQ(health.Update(4 * kSecond), TierState::kDegraded);
  EXPECT_EQ(health.Update(5 * kSecond), TierState::kOk);
  health.WriteError(5 * kSecond);  // one is enough now, and the pause doubles
  EXPECT_EQ(health.Update(14 * kSecond), TierState::kDegraded);
  EXPECT_EQ(health.Update(15 * kSecond), TierState::kOk);
  health.Success();
  health.Success();
  health.WriteError(16 * kSecond);
  EXPECT_EQ(health.Update(16 * kSecond), TierState::kOk) << "probation is over";
}

TEST(TierHealth, PausesStopGrowing) {
  TierHealth health({.pause_ns = kSecond, .pause_ns_max = 4 * kSecond});
  int64_t now_ns = 0;
  health.NoSpace(now_ns);
  for (int i = 0; i < 10; ++i) {
    now_ns += 4 * kSecond;
    ASSERT_EQ(health.Update(now_ns), TierState::kOk);
    health.WriteError(now_ns);
  }
  EXPECT_EQ(health.Update(now_ns + 4 * kSecond - 1), TierState::kDegraded);
  EXPECT_EQ(health.Update(now_ns + 4 * kSecond), TierState::kOk);
}

}  // namespace
}  // namespace winnow::storage
