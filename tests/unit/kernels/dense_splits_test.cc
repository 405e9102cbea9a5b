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

TEST(DenseSplitsTest, TheNextSplitBeginsAtOrBehindAUnit) {
  for (int32_t unit = 0; unit < 3000; ++unit) {
    const int32_t next = NextDenseSplit(unit);
    ASSERT_GE(next, unit);
    ASSERT_TRUE(BeginsDenseSplit(next)) << unit;
    for (int32_t i = unit; i < next; ++i) ASSERT_FALSE(BeginsDenseSplit(i)) << unit;
  }
}

TEST(DenseSplitsTest, SharesOfContextsOfOneLengthAreWholeHeadsWhereThatCostsFewBlocks) {
  EXPECT_EQ(DenseSharers(512, 8, 528), 512);   // 64 sequences of 8 heads: one each
  EXPECT_EQ(DenseSharers(2048, 8, 528), 512);  // 256: four each
  EXPECT_EQ(DenseSharers(8, 176, 528), 528);   // one sequence: 66 a head
  EXPECT_EQ(DenseSharers(192, 80, 528), 528);  // 24: two a head would leave a quarter idle
  EXPECT_EQ(DenseSharers(8, 4, 528), 32);      // no more than there are splits
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 2000; ++round) {
    const int64_t heads = random.Int(1, 5000), splits = random.Int(1, 300);
    const int64_t slots = 132 * random.Int(1, 16), blocks = DenseSharers(heads, splits, slots);
    ASSERT_LE(blocks, std::min(slots, heads * splits));
    ASSERT_GE(blocks, std::min(slots - slots / 10, heads * splits));
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
