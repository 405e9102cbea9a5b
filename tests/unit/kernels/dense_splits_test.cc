#include "kernels/cuda/dense_splits.h"

#include <gtest/gtest.h>

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels::cuda {
namespace {

TEST(DenseSplitsTest, SplitsFollowEachOtherAndAreAsLongAsTheySay) {
  int32_t first = 0, split = 0;
  for (int32_t unit = 1; unit <= 1 << 15; ++unit) {
    if (BeginsDenseSplit(unit)) {
      ASSERT_EQ(unit - first, DenseSplitUnits(first)) << unit;
      first = unit;
      ++split;
    }
    ASSERT_EQ(DenseSplitOf(unit), split) << unit;
    ASSERT_EQ(DenseSplits(unit * kDenseUnitTokens + 1), split + 1) << unit;
  }
  EXPECT_EQ(DenseSplits(0), 1);
  EXPECT_EQ(DenseSplits(1), 1);
}

TEST(DenseSplitsTest, BlocksBeginWhereSplitsDo) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 2000; ++round) {
    const auto units = static_cast<int32_t>(random.Int(1, round % 2 == 0 ? 700 : 20000));
    const int64_t rows = random.Int(1, 3000), slots = 132 * random.Int(1, 4);
    const int32_t each = DenseBlockUnits(units, rows, slots);
    ASSERT_GT(each, 0);
    for (int32_t unit = 0; unit < units; unit += each) {
      ASSERT_TRUE(BeginsDenseSplit(unit)) << units << " units, " << each << " a block";
    }
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
