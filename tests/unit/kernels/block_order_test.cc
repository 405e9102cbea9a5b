#include "kernels/cuda/block_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/quantized.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/random_blocks.h"

namespace winnow::kernels::cuda {
namespace {

// Rows of blocks in the device's order, in memory as aligned as the device's.
class Packed {
 public:
  Packed(std::span<const std::byte* const> rows, WeightType type, int64_t in)
      : memory_(BlockBytes(type, static_cast<int64_t>(rows.size()), in) + kAlignment) {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = memory_.data() + (kAlignment - at % kAlignment);
    const BlockOrder order = BlockOrderOf(BlockFormatOf(type), in);
    for (size_t output = 0; output < rows.size(); ++output) {
      for (int32_t slice = 0; slice < order.slices; ++slice) {
        PutSlice(type, order, reinterpret_cast<const uint8_t*>(rows[output]),
                 BlockSizeOf(type).bytes, static_cast<int64_t>(output), slice,
                 reinterpret_cast<uint8_t*>(data_));
      }
    }
  }
  const std::byte* data() const { return data_; }

 private:
  static constexpr size_t kAlignment = 256;
  std::vector<std::byte> memory_;
  std::byte* data_;
};

// The walk of a product's kernel: warps are segments, which read record after record, and lanes make fragments of each
// slice. Calls take(output, column, bits) for every value.
template <WeightType kType, typename Take>
void WalkAs(const std::byte* packed, int64_t out, int64_t in, Take take) {
  constexpr BlockFormat kFormat = BlockFormatOf(kType);
  const BlockOrder order = BlockOrderOf(kFormat, in);
  const int32_t stage_slices = kFormat.stage_slices();
  for (int64_t tile = 0; tile < (out + 15) / 16; ++tile) {
    for (int32_t warp = 0; warp < kBlockSegments; ++warp) {
      const int32_t first = std::min(warp * order.segment_slices, order.slices);
      const int32_t last = std::min(first + order.segment_slices, order.slices);
      const std::byte* record =
          packed + tile * order.tile_bytes + int64_t{warp} * order.segment_bytes;
      for (int32_t slice = first; slice < last; slice += stage_slices) {
        const int32_t count = std::min(stage_slices, last - slice);
        const int32_t bytes = RecordBytes(kFormat, order.coarse, count);
        EXPECT_LE(bytes, kFormat.most_record_bytes());
        EXPECT_EQ(bytes % 16, 0);
        for (int32_t k = 0; k < count; ++k) {
          const int32_t block = (slice + k) / kFormat.block_slices - slice / kFormat.block_slices;
          EXPECT_TRUE(kFormat.coarse_bytes == 0 || block < order.coarse);
          for (int lane = 0; lane < 32; ++lane) {
            uint32_t of[2][4];
            const auto scales = ScalesOfLane<kType>(
                record + count * 32 * kFormat.value_bytes + k * kTileOutputs * kFormat.fine_bytes,
                record + count * kFormat.slice_bytes() +
                    block * kTileOutputs * kFormat.coarse_bytes,
                lane);
            MakeFragments<kType>(record + k * 32 * kFormat.value_bytes, scales, lane, of);
            for (int half = 0; half < 2; ++half) {
              for (int j = 0; j < 4; ++j) {
                for (int e = 0; e < 2; ++e) {
                  take(tile * 16 + lane / 4 + j % 2 * 8,
                       int64_t{slice + k} * 32 + half * 16 + j / 2 * 8 + lane % 4 * 2 + e,
                       static_cast<uint16_t>(of[half][j] >> (16 * e)));
                }
              }
            }
          }
        }
        record += bytes;
      }
    }
  }
}
template <typename Take>
void Walk(WeightType type, const std::byte* packed, int64_t out, int64_t in, Take take) {
  switch (type) {
    case WeightType::kQ4_0:
      return WalkAs<WeightType::kQ4_0>(packed, out, in, take);
    case WeightType::kQ4_1:
      return WalkAs<WeightType::kQ4_1>(packed, out, in, take);
    case WeightType::kQ5_1:
      return WalkAs<WeightType::kQ5_1>(packed, out, in, take);
    case WeightType::kQ5_0:  // lies as Q8_0
    case WeightType::kQ8_0:
      return WalkAs<WeightType::kQ8_0>(packed, out, in, take);
    case WeightType::kQ4K:
      return WalkAs<WeightType::kQ4K>(packed, out, in, take);
    case WeightType::kQ5K:
      return WalkAs<WeightType::kQ5K>(packed, out, in, take);
    case WeightType::kQ6K:
      return WalkAs<WeightType::kQ6K>(packed, out, in, take);
    case WeightType::kI4x32:
      return WalkAs<WeightType::kI4x32>(packed, out, in, take);
    case WeightType::kI4x128:
      return WalkAs<WeightType::kI4x128>(packed, out, in, take);
    case WeightType::kL4x32:
      return WalkAs<WeightType::kL4x32>(packed, out, in, take);
    case WeightType::kF8x32:
      return WalkAs<WeightType::kF8x32>(packed, out, in, take);
    case WeightType::kF8x128:
      return WalkAs<WeightType::kF8x128>(packed, out, in, take);
    default:
      FAIL();
  }
}

class BlockOrderTest : public testing::TestWithParam<WeightType> {
 protected:
  std::string Seed() const { return "WINNOW_TEST_SEED=" + std::to_string(random_.seed()); }
  Random random_;
};
INSTANTIATE_TEST_SUITE_P(Types, BlockOrderTest, testing::ValuesIn(kBlockTypes),
                         [](const auto& type) { return std::string(WeightTypeName(type.param)); });

// Every value exactly once, with the bits of the widened one.
TEST_P(BlockOrderTest, FragmentsAreTheWidenedValuesInBfloat16) {
  SCOPED_TRACE(Seed());
  const WeightType type = GetParam();
  const int64_t values = BlockSizeOf(type).values;
  // Fewer slices than segments; segments of one, of an odd number, of less than a record, of several records, with a
  // last one that is short; blocks that records cut, and blocks that they do not.
  for (const int64_t in :
       {values, 3 * values, int64_t{512}, int64_t{768}, int64_t{1024}, int64_t{1280}, int64_t{2048},
        int64_t{2304}, int64_t{5888}, int64_t{8192}, values * random_.Int(1, 2000 / values + 20)}) {
    const int64_t out = random_.Int(1, 40);
    SCOPED_TRACE(testing::Message() << "in " << in << " out " << out);
    const BlockMatrix matrix(random_, out, in, type);
    const Packed packed(matrix.stored().rows, type, in);
    std::vector<float> expected(out * in);
    for (int64_t i = 0; i < out; ++i) {
      DequantizeRow(type, matrix.row(i), in, expected.data() + i * in);
    }
    std::vector<int> seen(out * in);
    int64_t wrong = 0;
    Walk(type, packed.data(), out, in, [&](int64_t output, int64_t column, uint16_t bits) {
      if (output >= out) return;
      const int64_t at = output * in + column;
      ++seen[at];
      if (bits != ToBF16(expected[at]).bits && ++wrong < 5) {
        ADD_FAILURE() << "output " << output << " column " << column << ": " << std::hex << bits
                      << " in place of " << ToBF16(expected[at]).bits;
      }
    });
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), out * in);
  }
}

// Offsets far from scales, scales below float16's normal numbers and negative ones, zeros of either sign.
TEST_P(BlockOrderTest, ScalesOfAnySizeRoundAsDequantizationDoes) {
  SCOPED_TRACE(Seed());
  const WeightType type = GetParam();
  const int64_t in = 2048, out = 16;
  const BlockSize size = BlockSizeOf(type);
  const int64_t row_bytes = WeightRowBytes(type, in);
  for (int round = 0; round < 8; ++round) {
    std::vector<std::byte> rows(out * row_bytes);
    for (std::byte& byte : rows) {
      byte = static_cast<std::byte>(random_.Int(0, 255) & (IsFloat8(type) ? 0xfb : 0xff));
    }
    for (size_t at = 0; at < rows.size(); at += size.bytes) {
      const auto any_half = [&] {
        // Any float16 but infinity and NaN.
        const auto sign = static_cast<int>(random_.Int(0, 1)) << 15;
        const int magnitude = random_.Int(0, 9) == 0 ? 0 : static_cast<int>(random_.Int(0, 0x7bff));
        return static_cast<uint16_t>(sign | magnitude);
      };
      uint16_t first = any_half(), second = any_half();
      if (type == WeightType::kL4x32) {
        first &= 0xfff8;  // eight significant bits
        second &= 0xfff8;
        const float scale = std::abs(ToFloat(F16{first})), offset = std::abs(ToFloat(F16{second}));
        if (scale > 1024 * offset || offset > 1024 * scale) second &= 0x8000;
      }
      if (IsFloat8(type)) {
        const float scale =
            std::ldexp(1 + std::abs(random_.Normal()), static_cast<int>(random_.Int(-140, 100)));
        std::memcpy(rows.data() + at, &scale, 4);
        continue;
      }
      std::memcpy(rows.data() + at + (type == WeightType::kQ6K ? 208 : 0), &first, 2);
      if (type == WeightType::kI4x32 || type == WeightType::kI4x128) {
        rows[at + 2] = static_cast<std::byte>(random_.Int(0, 16));  // no file's is larger
      } else if (BlockShapeOf(type).has_offset) {
        std::memcpy(rows.data() + at + 2, &second, 2);
      }
    }
    std::vector<const std::byte*> starts;
    for (int64_t i = 0; i < out; ++i) starts.push_back(rows.data() + i * row_bytes);
    const Packed packed(starts, type, in);
    std::vector<float> expected(in);
    int64_t row = -1, wrong = 0;
    std::vector<std::vector<uint16_t>> actual(out, std::vector<uint16_t>(in));
    Walk(type, packed.data(), out, in,
         [&](int64_t output, int64_t column, uint16_t bits) { actual[output][column] = bits; });
    while (++row < out) {
      DequantizeRow(type, rows.data() + row * row_bytes, in, expected.data());
      for (int64_t i = 0; i < in; ++i) {
        if (actual[row][i] == ToBF16(expected[i]).bits || ++wrong > 5) continue;
        ADD_FAILURE() << row << ", " << i << ": " << expected[i] << " as " << std::hex
                      << actual[row][i];
      }
    }
    EXPECT_EQ(wrong, 0);
  }
}

// All 63488 scales, all integers, all zero points.
TEST(BlockPairsTest, EveryScaleAndIntegerRoundsOnce) {
  int64_t wrong = 0;
  for (int bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00) == 0x7c00) continue;  // infinity, NaN
    const float scale = ToFloat(F16{static_cast<uint16_t>(bits)});
    const auto check = [&](auto has_zero, const PairScales& scales, int zero) {
      for (uint32_t q = 0; q < 16; ++q) {
        uint32_t pairs[4];
        MakePairs<decltype(has_zero)::value>(q * 0x11111111u, scales.high[1], scales.low[1],
                                             scales.zero[1], pairs);
        const float number = static_cast<float>(q) - static_cast<float>(zero);
        const float product =
            has_zero ? scale * static_cast<float>(q) - scale * zero : scale * number;
        const uint32_t expected = ToBF16(product).bits * 0x10001u;
        wrong += std::count_if(pairs, pairs + 4, [&](uint32_t x) { return x != expected; });
      }
    };
    const uint16_t pair[2] = {0x3c00, static_cast<uint16_t>(bits)};
    alignas(8) std::byte memory[8];
    std::memcpy(memory, pair, 4);
    check(std::false_type(), LoadPairScales<BlockScales::kHalf, 8>(memory), 8);
    for (int zero = 0; zero <= 16; ++zero) {
      const uint16_t words[4] = {0x3c00, 0, static_cast<uint16_t>(bits),
                                 ToF16(static_cast<float>(zero)).bits};
      std::memcpy(memory, words, 8);
      check(std::true_type(), LoadPairScales<BlockScales::kHalfZero, 0>(memory), zero);
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(BlockOrderTest, BytesAreWhatTheHeaderSays) {
  const WeightType type = GetParam();
  const BlockFormat format = BlockFormatOf(type);
  // Rows whose segments are whole records.
  const double bytes = static_cast<double>(BlockBytes(type, 64, 4096)) / 64 / 4096;
  const double expected = format.value_bytes / 16.0 + format.fine_bytes / 32.0 +
                          format.coarse_bytes / 32.0 / format.block_slices;
  EXPECT_DOUBLE_EQ(bytes, type == WeightType::kQ5K || type == WeightType::kQ6K ? bytes : expected);
  EXPECT_LE(bytes, expected * 1.02);
  // Places past the last output of a tile take memory, too.
  EXPECT_EQ(BlockBytes(type, 49, 4096), BlockBytes(type, 64, 4096));
}

}  // namespace
}  // namespace winnow::kernels::cuda
