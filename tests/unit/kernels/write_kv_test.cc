#include "kernels/write_kv.h"

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class WriteKvTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(WriteKvTest);

TEST_P(WriteKvTest, EqualsTheReferenceByteForByteAndTouchesNothingElse) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int32_t d : {64, 80, 96, 128}) {
      const KvLayout layout{3, d, static_cast<int32_t>(16 * random_.Int(1, 6)), dtype};
      std::vector<std::byte> pool(12 * layout.BlockBytes(), std::byte{0xa5}), expected = pool;
      std::vector<int32_t> blocks = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
      random_.Shuffle(blocks);
      const std::vector<int32_t> first(blocks.begin(), blocks.begin() + 6),
          second(blocks.begin() + 6, blocks.end());
      Matrix k = Matrix::Normal(random_, 60, 3 * d), v = Matrix::Normal(random_, 60, 3 * d);
      const std::vector<AttentionChunk> chunks = {
          {0, 1, static_cast<int32_t>(random_.Int(0, 6 * layout.block_tokens - 1)), first},
          {1, 59, static_cast<int32_t>(random_.Int(0, 6 * layout.block_tokens - 59)), second}};
      Make(3)->WriteKv(k.tensor(), v.tensor(), chunks, pool.data(), layout);
      WriteKvRef(k.tensor(), v.tensor(), chunks, expected.data(), layout);
      EXPECT_EQ(pool, expected) << DTypeName(dtype) << " d " << d;
    }
  }
}

TEST_P(WriteKvTest, RoundsToNearestEven) {
  const KvLayout layout{1, 64, 16, DType::kBF16};
  std::vector<std::byte> pool(layout.BlockBytes());
  const std::vector<int32_t> table = {0};
  Matrix k(1, 64), v(1, 64);
  k.row(0)[0] = std::bit_cast<float>(0x3f808000u);  // halfway: to the even 0x3f80
  k.row(0)[1] = std::bit_cast<float>(0x3f818000u);  // halfway: to the even 0x3f82
  k.row(0)[2] = std::bit_cast<float>(0x3f808001u);
  k.row(0)[3] = std::bit_cast<float>(0xff7fffffu);  // rounds to minus infinity
  v.row(0)[0] = INFINITY;
  v.row(0)[1] = NAN;
  const std::vector<AttentionChunk> chunks = {{0, 1, 0, table}};
  Make(1)->WriteKv(k.tensor(), v.tensor(), chunks, pool.data(), layout);
  const uint16_t* written = reinterpret_cast<const uint16_t*>(pool.data());
  EXPECT_EQ(written[0], 0x3f80);
  EXPECT_EQ(written[1], 0x3f82);
  EXPECT_EQ(written[2], 0x3f81);
  EXPECT_EQ(written[3], 0xff80);
  EXPECT_EQ(written[64], 0x7f80);
  EXPECT_TRUE(std::isnan(ToFloat(BF16{written[65]})));
}

}  // namespace
}  // namespace winnow::kernels
