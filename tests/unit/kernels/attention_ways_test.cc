// Which chunks of dense attention a device takes side by side: sums of tiles, and what stands beside what.
#include "kernels/cuda/attention_ways.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace winnow::kernels::cuda {
namespace {

constexpr int32_t kGroup = 4, kKvHeads = 8;

AttentionWays WaysOf(const std::vector<int32_t>& tokens, int32_t position = 1000,
                     DType dtype = DType::kBF16) {
  std::vector<AttentionChunk> chunks;
  int32_t row = 0;
  for (const int32_t count : tokens) {
    chunks.push_back({row, count, position, {}});
    row += count;
  }
  AttentionWays ways;
  ways.many.push_back({});  // what is there before goes
  ways.widened.push_back({});
  ChooseWays(chunks, kGroup, {kKvHeads, 128, 64, dtype}, ways);
  return ways;
}

std::vector<int32_t> Rows(const std::vector<AttentionChunk>& chunks) {
  std::vector<int32_t> rows;
  for (const AttentionChunk& chunk : chunks) rows.push_back(chunk.first_row);
  return rows;
}

using RowList = std::vector<int32_t>;

TEST(AttentionWaysTest, TilesAreOfSixteenRowsAndSetsOfFourTilesOfAHead) {
  EXPECT_EQ(AttentionTiles(1, 4), 1);
  EXPECT_EQ(AttentionTiles(4, 4), 1);
  EXPECT_EQ(AttentionTiles(5, 4), 2);
  EXPECT_EQ(AttentionTiles(65, 16), 65);
  EXPECT_EQ(AttentionSets(1, 4, 8), 8);
  EXPECT_EQ(AttentionSets(16, 4, 8), 8);
  EXPECT_EQ(AttentionSets(17, 4, 8), 16);
  EXPECT_EQ(AttentionSets(65, 16, 1), 17);
}

// One block for each KV head would verify it in turn, and the rest of the device would wait.
TEST(AttentionWaysTest, AVerificationAloneIsSplit) {
  for (const int32_t tokens : {5, 9, 16, 33, 65}) {
    const AttentionWays ways = WaysOf({tokens});
    EXPECT_EQ(Rows(ways.several), RowList{0}) << tokens;
    EXPECT_TRUE(ways.few.empty() && ways.many.empty()) << tokens;
  }
}

TEST(AttentionWaysTest, OneTileIsSplitInACallOfItsOwn) {
  const AttentionWays ways = WaysOf({1, 9, 4, 8, 5});
  EXPECT_EQ(Rows(ways.few), (RowList{0, 10}));
  EXPECT_EQ(Rows(ways.several), (RowList{1, 14, 22}));
  EXPECT_TRUE(ways.many.empty());
}

TEST(AttentionWaysTest, PromptsGoInTurnAndDoNotTakeAVerificationAlong) {
  const AttentionWays ways = WaysOf({512, 9, 129, 1});
  EXPECT_EQ(Rows(ways.many), (RowList{0, 521}));  // 129 tokens: 72 sets
  EXPECT_EQ(Rows(ways.several), RowList{512});
  EXPECT_EQ(Rows(ways.few), RowList{650});
}

// Blocks in turn that fill the device read the keys no more often. Short drafts are split all the same.
TEST(AttentionWaysTest, ManyVerificationsGoInTurn) {
  EXPECT_EQ(WaysOf(std::vector<int32_t>(8, 9)).several.size(), 8u);
  std::vector<int32_t> tokens(9, 9);
  tokens.insert(tokens.end(), {1, 5});
  const AttentionWays ways = WaysOf(tokens);
  EXPECT_EQ(ways.many.size(), 9u);
  EXPECT_EQ(Rows(ways.few), RowList{81});
  EXPECT_EQ(Rows(ways.several), RowList{82});
}

// Those of long contexts are split as long as their tiles are a set.
TEST(AttentionWaysTest, ManyVerificationsOfLongContextsOrCodesAreSplit) {
  std::vector<int32_t> tokens(24, 9);
  tokens.insert(tokens.end(), {16, 17, 17, 17, 17, 17});
  const AttentionWays ways = WaysOf(tokens, kLongContext);
  EXPECT_EQ(ways.several.size(), 25u);
  EXPECT_EQ(ways.many.size(), 5u);
  EXPECT_EQ(WaysOf(tokens, kLongContext - 1).many.size(), 30u);
  // In turn each block would widen its codes for itself.
  EXPECT_EQ(WaysOf(tokens, 0, DType::kI8).several.size(), 25u);
}

// A copy in bfloat16 pays where many rows read it.
TEST(AttentionWaysTest, LongChunksOverCodesAreWidenedFirst) {
  const std::vector<int32_t> tokens = {512, 9, 1, 127, 128, 17, 17, 17};
  for (const DType dtype : {DType::kI8, DType::kF8}) {
    const AttentionWays ways = WaysOf(tokens, 1000, dtype);
    EXPECT_EQ(Rows(ways.widened), (RowList{0, 649}));
    EXPECT_EQ(Rows(ways.many), (RowList{522, 777, 794, 811}));
    EXPECT_EQ(Rows(ways.several), RowList{512});
    EXPECT_EQ(Rows(ways.few), RowList{521});
  }
  const AttentionWays plain = WaysOf(tokens);
  EXPECT_TRUE(plain.widened.empty());
  EXPECT_EQ(plain.many.size(), 7u);
}

// A million tokens of one head are 512 MiB in bfloat16. Some heads at a time, as long as they fill the device.
TEST(AttentionWaysTest, WhatIsWidenedAtOnceIsBounded) {
  const auto is_widened = [](int32_t tokens, int32_t position) {
    return !WaysOf({tokens}, position, DType::kI8).widened.empty();
  };
  EXPECT_TRUE(is_widened(2048, 65536 - 2048));   // eight heads at once
  EXPECT_TRUE(is_widened(2048, 131072 - 2048));  // four: 256 blocks
  EXPECT_TRUE(is_widened(512, 65536 - 512));
  EXPECT_FALSE(is_widened(512, 65536));  // four: 64 blocks
  EXPECT_TRUE(is_widened(2048, 262144 - 2048));
  EXPECT_FALSE(is_widened(2048, 262144));  // one
  EXPECT_TRUE(is_widened(3072, 524288 - 3072));
  EXPECT_FALSE(is_widened(8192, 524288));  // more than there is room for
  const KvLayout layout{kKvHeads, 128, 64, DType::kI8};
  for (const int32_t chunks : {1, 3}) {
    for (const int32_t keys : {1, 64, 65, 100000, 131072, 500000, 1000000}) {
      const WidenedShape shape = ShapeOfWidened(layout, chunks, keys);
      EXPECT_EQ(shape.tokens, (keys + 63) / 64 * 64);
      EXPECT_EQ(shape.bytes, size_t{512} * chunks * shape.heads * shape.tokens);
      EXPECT_TRUE(shape.heads >= 1 && shape.heads <= kKvHeads);
      EXPECT_TRUE(shape.bytes <= kWidenedKvBytes || shape.heads == 1) << chunks << ' ' << keys;
    }
  }
  // As many times as must be, and alike: seven fit, four and four are taken.
  EXPECT_EQ(ShapeOfWidened(layout, 1, 64, size_t{7} * 512 * 64).heads, 4);
}

TEST(AttentionWaysTest, NothingIsNothing) {
  const AttentionWays ways = WaysOf({});
  EXPECT_TRUE(ways.few.empty() && ways.several.empty() && ways.many.empty() &&
              ways.widened.empty());
}

}  // namespace
}  // namespace winnow::kernels::cuda
