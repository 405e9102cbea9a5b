// Matrices of random quantised blocks, for tests of what reads them.
#ifndef WINNOW_TESTS_UNIT_KERNELS_RANDOM_BLOCKS_H_
#define WINNOW_TESTS_UNIT_KERNELS_RANDOM_BLOCKS_H_

#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "kernels/model_ops.h"
#include "kernels/quantized.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {

// Types of quantised blocks that a GPU widens; the first ones hold integers, the others 8-bit floats.
inline constexpr WeightType kBlockTypes[] = {
    WeightType::kQ4_0,  WeightType::kQ4_1,   WeightType::kQ5_0,  WeightType::kQ5_1,
    WeightType::kQ8_0,  WeightType::kQ4K,    WeightType::kQ5K,   WeightType::kQ6K,
    WeightType::kI4x32, WeightType::kI4x128, WeightType::kL4x32, WeightType::kF8x32,
    WeightType::kF8x128};
// Types that products on a CPU compute with as integers.
inline constexpr WeightType kIntegerBlocks[] = {
    WeightType::kQ4_0,  WeightType::kQ4_1,   WeightType::kQ5_0,  WeightType::kQ5_1,
    WeightType::kQ8_0,  WeightType::kQ4K,    WeightType::kQ5K,   WeightType::kQ6K,
    WeightType::kI4x32, WeightType::kI4x128, WeightType::kL4x32, WeightType::kMxfp4};
inline constexpr std::span<const WeightType> kFloatBlocks = std::span(kBlockTypes).last<2>();

// Random blocks, at odd addresses, whose scales are those of weights; or bfloat16 values.
class BlockMatrix {
 public:
  // `fill`: of every byte but a block's scales, in place of random ones. `integer_bits`: StoredMatrix's.
  BlockMatrix(Random& random, int64_t rows, int64_t cols, WeightType type,
              std::optional<uint8_t> fill = {}, int32_t integer_bits = 8)
      : type_(type),
        cols_(cols),
        row_bytes_(WeightRowBytes(type, cols)),
        integer_bits_(integer_bits) {
    bytes_.resize(1 + rows * row_bytes_);
    for (std::byte& byte : bytes_) {
      do {
        byte = static_cast<std::byte>(fill ? *fill : random.Int(0, 255));
      } while (IsFloat8(type) && (byte & std::byte{0x7f}) == std::byte{0x7f});  // NaN
    }
    if (PlainType(type)) {
      for (int64_t i = 0; i < rows * cols; ++i) {
        const BF16 value = ToBF16(random.Normal());
        std::memcpy(bytes_.data() + 1 + 2 * i, &value, 2);
      }
    } else {
      const BlockSize size = BlockSizeOf(type);
      for (int64_t at = 1; at < static_cast<int64_t>(bytes_.size()); at += size.bytes) {
        PutScales(random, bytes_.data() + at);
      }
      if (type == WeightType::kI8x128) {
        for (int64_t i = 0; i < rows * cols / 32; ++i) {
          const int64_t group = i % (cols / 32) / 4 * 4 + i / (cols / 32) * (cols / 32);
          std::memcpy(bytes_.data() + 1 + i * size.bytes, bytes_.data() + 1 + group * size.bytes,
                      2);
          if (integer_bits == 8) continue;
          for (int64_t j = 2; j < size.bytes; ++j) {
            std::byte& byte = bytes_[1 + i * size.bytes + j];
            byte = static_cast<std::byte>(static_cast<int8_t>(byte) >> 4);
          }
        }
      }
    }
    for (int64_t i = 0; i < rows; ++i) rows_.push_back(bytes_.data() + 1 + i * row_bytes_);
    random.Shuffle(rows_);  // rows may lie in any order
  }
  StoredMatrix stored() const { return {type_, cols_, rows_, integer_bits_}; }
  const std::byte* row(int64_t i) const { return rows_[i]; }

 private:
  void PutScales(Random& random, std::byte* block) {
    if (IsFloat8(type_)) {
      const float scale = 0.01f * std::exp(random.Normal());
      std::memcpy(block, &scale, sizeof scale);
      return;
    }
    const auto put = [&](int64_t where, float deviation) {
      const F16 value = ToF16(random.Normal(deviation));
      std::memcpy(block + where, &value, 2);
    };
    if (type_ == WeightType::kL4x32) {
      const auto put_short = [&](int64_t where, float x) {
        const F16 value = ToF16(ToFloat(ToBF16(x)));
        std::memcpy(block + where, &value, 2);
      };
      // Neither more than 1,024 times the other.
      const float scale = random.Normal(0.1f);
      put_short(0, scale);
      put_short(2, (random.Int(0, 1) == 0 ? scale : -scale) * 0.9f *
                       std::exp2(static_cast<float>(random.Int(-90, 90)) / 10));
      return;
    }
    if (type_ == WeightType::kI8x128) return put(0, 0.1f);
    if (type_ == WeightType::kMxfp4) {
      *block = static_cast<std::byte>(random.Int(121, 128));  // 2^-7 to 1
      return;
    }
    const BlockShape shape = BlockShapeOf(type_);
    put(type_ == WeightType::kQ6K ? 208 : 0, shape.has_codes ? 0.002f : 0.1f);
    if (type_ == WeightType::kI4x32 || type_ == WeightType::kI4x128) {
      put(0, 0.1f);
      block[2] = static_cast<std::byte>(random.Int(0, 16));  // a zero point
    } else if (shape.has_offset) {
      put(2, shape.has_codes ? 0.03f : 1.0f);
    }
  }

  WeightType type_;
  int64_t cols_, row_bytes_;
  int32_t integer_bits_;
  std::vector<std::byte> bytes_;
  std::vector<const std::byte*> rows_;
};

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_RANDOM_BLOCKS_H_
