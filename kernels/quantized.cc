#include "kernels/quantized.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "kernels/check.h"
#include "kernels/float8.h"
#include "kernels/host_matrix.h"
#include "kernels/int8_matmul.h"

namespace winnow::kernels {
namespace {

struct Traits {
  const char* name;
  BlockSize block;
};
constexpr std::array<Traits, kNumWeightTypes> kTraits = {{
    {"F32", {1, 4}},
    {"F16", {1, 2}},
    {"BF16", {1, 2}},
    {"Q4_0", {32, 18}},
    {"Q4_1", {32, 20}},
    {"Q5_0", {32, 22}},
    {"Q5_1", {32, 24}},
    {"Q8_0", {32, 34}},
    {"Q4_K", {256, 144}},
    {"Q5_K", {256, 176}},
    {"Q6_K", {256, 210}},
    {"MXFP4", {32, 17}},
    {"I4x32", {32, 20}},
    {"I4x128", {128, 68}},
    {"L4x32", {32, 20}},
    {"F8x32", {32, 36}},
    {"F8x128", {128, 132}},
    {"I8x128", {32, 34}},
}};

uint8_t U8(const std::byte* at) { return std::to_integer<uint8_t>(*at); }
int8_t I8(const std::byte* at) { return static_cast<int8_t>(U8(at)); }
float Half(const std::byte* at) { return ElementAt(at, DType::kF16, 0); }

// In the types with blocks of 32, byte i of the packed integers holds value i in its low half and value i + 16 in
// its high half. Bit i of `high` is the fifth bit of value i.
int Nibble(const std::byte* packed, int i) {
  return i < 16 ? U8(packed + i) & 15 : U8(packed + i - 16) >> 4;
}
int FiveBits(const std::byte* packed, const std::byte* high, int i) {
  return Nibble(packed, i) | ((U8(high + i / 8) >> (i % 8)) & 1) << 4;
}

// Q4_0 := scale[2] packed[16]
void BlockQ4_0(const std::byte* block, float* out) {
  const float scale = Half(block);
  for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(Nibble(block + 2, i) - 8);
}

// Q4_1 := scale[2] offset[2] packed[16]
void BlockQ4_1(const std::byte* block, float* out) {
  const float scale = Half(block), offset = Half(block + 2);
  for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(Nibble(block + 4, i)) + offset;
}

constexpr int kL4Bias = 8;  // of kL4x32's integers

// L4 := scale[2] offset[2] packed[16]
void BlockL4(const std::byte* block, float* out) {
  const float scale = Half(block), offset = Half(block + 2);
  for (int i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(Nibble(block + 4, i) - kL4Bias) + offset;
  }
}

// Q5_0 := scale[2] high[4] packed[16]
void BlockQ5_0(const std::byte* block, float* out) {
  const float scale = Half(block);
  for (int i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(FiveBits(block + 6, block + 2, i) - 16);
  }
}

// Q5_1 := scale[2] offset[2] high[4] packed[16]
void BlockQ5_1(const std::byte* block, float* out) {
  const float scale = Half(block), offset = Half(block + 2);
  for (int i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(FiveBits(block + 8, block + 4, i)) + offset;
  }
}

// Q8_0 := scale[2] values[32]
void BlockQ8_0(const std::byte* block, float* out) {
  const float scale = Half(block);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(I8(block + 2 + i)) * scale;
}

// Scale and offset of group `g` of Q4_K and Q5_K, from 12 bytes that pack 8 of each, of 6 bits. The first four of
// each have a byte of their own; the others have their low bits in the last four bytes and their high bits above
// those of the first four.
struct GroupScale {
  float scale, offset;
};
GroupScale ScaleOfGroup(const std::byte* packed, int g) {
  if (g < 4) {
    return {static_cast<float>(U8(packed + g) & 63), static_cast<float>(U8(packed + 4 + g) & 63)};
  }
  const int low = U8(packed + 4 + g);
  return {static_cast<float>((low & 15) | (U8(packed + g - 4) >> 6) << 4),
          static_cast<float>((low >> 4) | (U8(packed + g) >> 6) << 4)};
}

// Q4_K := scale[2] offset[2] groups[12] packed[128]
// Each 32 bytes of `packed` hold two groups: one in the low halves, the next in the high halves.
void BlockQ4K(const std::byte* block, float* out) {
  const float scale = Half(block), offset = Half(block + 2);
  for (int g = 0; g < 8; ++g) {
    const GroupScale group = ScaleOfGroup(block + 4, g);
    const float d = scale * group.scale, m = offset * group.offset;
    const std::byte* packed = block + 16 + g / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int q = (U8(packed + i) >> (g % 2 * 4)) & 15;
      *out++ = d * static_cast<float>(q) - m;
    }
  }
}

// Q5_K := scale[2] offset[2] groups[12] high[32] packed[128]
// Bit g of byte i of `high` is the fifth bit of value i of group g.
void BlockQ5K(const std::byte* block, float* out) {
  const float scale = Half(block), offset = Half(block + 2);
  for (int g = 0; g < 8; ++g) {
    const GroupScale group = ScaleOfGroup(block + 4, g);
    const float d = scale * group.scale, m = offset * group.offset;
    const std::byte* high = block + 16;
    const std::byte* packed = block + 48 + g / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int q = ((U8(packed + i) >> (g % 2 * 4)) & 15) | ((U8(high + i) >> g) & 1) << 4;
      *out++ = d * static_cast<float>(q) - m;
    }
  }
}

// Q6_K := low[128] high[64] groups[16] scale[2]
// Each half of a block has 128 values, 64 bytes of `low` and 32 of `high`: value 32·r + i of a half has its low four
// bits in byte i + 32·(r mod 2) of `low`, in the half that r / 2 says, and its high two bits in byte i of `high`.
int SixBits(const std::byte* block, int i) {
  const int half = i / 128, r = i % 128 / 32, column = i % 32;
  const int low = (U8(block + half * 64 + r % 2 * 32 + column) >> (r / 2 * 4)) & 15;
  const int high = (U8(block + 128 + half * 32 + column) >> (r * 2)) & 3;
  return low | high << 4;
}
void BlockQ6K(const std::byte* block, float* out) {
  const std::byte* groups = block + 192;
  const float scale = Half(block + 208);
  for (int i = 0; i < 256; ++i) {
    const float d = scale * static_cast<float>(I8(groups + i / 16));
    out[i] = d * static_cast<float>(SixBits(block, i) - 32);
  }
}

// MXFP4 := scale[1] packed[16]
void BlockMxfp4(const std::byte* block, float* out) {
  const float scale = ToFloat(Mxfp4Scale(U8(block)));
  for (int i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(kDoubledE2M1[Nibble(block + 1, i)]);
  }
}

// I4 := scale[2] zero[1] unused[1] packed[values / 2], 16 bytes for each 32 values as in Q4_0
template <int kValues>
void BlockI4(const std::byte* block, float* out) {
  const float scale = Half(block), zero = scale * static_cast<float>(U8(block + 2));
  for (int i = 0; i < kValues; ++i) {
    const int q = Nibble(block + 4 + i / 32 * 16, i % 32);
    out[i] = scale * static_cast<float>(q) - zero;  // both products and the difference are exact
  }
}

// F8 := scale[4] values
template <int kValues>
void BlockF8(const std::byte* block, float* out) {
  const float scale = ElementAt(block, DType::kF32, 0);
  for (int i = 0; i < kValues; ++i) out[i] = scale * ToFloat(F8E4M3{U8(block + 4 + i)});
}

using DequantizeBlock = void (*)(const std::byte* block, float* out);
DequantizeBlock DequantizerOf(WeightType type) {
  switch (type) {
    case WeightType::kQ4_0:
      return BlockQ4_0;
    case WeightType::kQ4_1:
      return BlockQ4_1;
    case WeightType::kL4x32:
      return BlockL4;
    case WeightType::kQ5_0:
      return BlockQ5_0;
    case WeightType::kQ5_1:
      return BlockQ5_1;
    case WeightType::kQ8_0:
    case WeightType::kI8x128:
      return BlockQ8_0;
    case WeightType::kQ4K:
      return BlockQ4K;
    case WeightType::kQ5K:
      return BlockQ5K;
    case WeightType::kQ6K:
      return BlockQ6K;
    case WeightType::kMxfp4:
      return BlockMxfp4;
    case WeightType::kI4x32:
      return BlockI4<32>;
    case WeightType::kI4x128:
      return BlockI4<128>;
    case WeightType::kF8x32:
      return BlockF8<32>;
    case WeightType::kF8x128:
      return BlockF8<128>;
    case WeightType::kF32:
    case WeightType::kF16:
    case WeightType::kBF16:
      break;
  }
  return nullptr;
}

}  // namespace

BlockSize BlockSizeOf(WeightType type) { return kTraits[static_cast<size_t>(type)].block; }
const char* WeightTypeName(WeightType type) { return kTraits[static_cast<size_t>(type)].name; }

BF16 Mxfp4Scale(uint8_t code) {
  if (code == 255) return {.bits = 0x7fc0};
  // Below 2^-126 numbers are subnormal: 2^-127 and 2^-128.
  return {.bits = static_cast<uint16_t>(code < 2 ? 0x20 << code : (code - 1) << 7)};
}

bool IsFloat8(WeightType type) { return type == WeightType::kF8x32 || type == WeightType::kF8x128; }

WeightType Float8TypeFor(int64_t cols) {
  WINNOW_CHECK(cols % 32 == 0);
  return cols % 128 == 0 ? WeightType::kF8x128 : WeightType::kF8x32;
}

std::optional<DType> PlainType(WeightType type) {
  switch (type) {
    case WeightType::kF32:
      return DType::kF32;
    case WeightType::kF16:
      return DType::kF16;
    case WeightType::kBF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

WeightType WeightTypeOf(DType dtype) {
  return dtype == DType::kF32   ? WeightType::kF32
         : dtype == DType::kF16 ? WeightType::kF16
                                : WeightType::kBF16;
}

BlockShape BlockShapeOf(WeightType type) {
  switch (type) {
    case WeightType::kQ4_0:
      return {.values = 32, .group = 32, .bits = 4, .bias = 8};
    case WeightType::kQ4_1:
      return {.values = 32, .group = 32, .bits = 4, .has_offset = true};
    case WeightType::kL4x32:
      return {.values = 32, .group = 32, .bits = 4, .bias = kL4Bias, .has_offset = true};
    case WeightType::kQ5_0:
      return {.values = 32, .group = 32, .bits = 8, .bias = 16};
    case WeightType::kQ5_1:
      return {.values = 32, .group = 32, .bits = 8, .has_offset = true};
    case WeightType::kQ8_0:
      return {.values = 32, .group = 32, .bits = 8, .bias = 128};
    case WeightType::kQ4K:
      return {.values = 256, .group = 32, .bits = 4, .has_offset = true, .has_codes = true};
    case WeightType::kQ5K:
      return {.values = 256, .group = 32, .bits = 8, .has_offset = true, .has_codes = true};
    case WeightType::kQ6K:
      return {.values = 256, .group = 16, .bits = 8, .bias = 32, .has_codes = true};
    case WeightType::kMxfp4:
      return {.values = 32, .group = 32, .bits = 4, .bias = 12, .has_table = true};
    // Codes, because the product of scale and zero point is no float16.
    case WeightType::kI4x32:
      return {.values = 32, .group = 32, .bits = 4, .has_offset = true, .has_codes = true};
    case WeightType::kI4x128:
      return {.values = 128, .group = 32, .bits = 4, .has_offset = true, .has_codes = true};
    case WeightType::kI8x128:
    case WeightType::kF8x32:
    case WeightType::kF8x128:
    case WeightType::kF32:
    case WeightType::kF16:
    case WeightType::kBF16:
      break;
  }
  WINNOW_CHECK(false);
}

void SplitBlock(WeightType type, const std::byte* block, BlockParts* parts) {
  uint8_t* q = parts->integers;
  const auto half = [block](int64_t at) {
    return static_cast<uint16_t>(U8(block + at) | U8(block + at + 1) << 8);
  };
  switch (type) {
    case WeightType::kQ4_0:
    case WeightType::kQ4_1:
    case WeightType::kL4x32: {
      const bool offset = type != WeightType::kQ4_0;
      parts->scale = half(0);
      if (offset) parts->offset = half(2);
      for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(Nibble(block + (offset ? 4 : 2), i));
      return;
    }
    case WeightType::kQ5_0:
    case WeightType::kQ5_1: {
      const bool offset = type == WeightType::kQ5_1;
      parts->scale = half(0);
      if (offset) parts->offset = half(2);
      const std::byte* high = block + (offset ? 4 : 2);
      for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(FiveBits(high + 4, high, i));
      return;
    }
    case WeightType::kQ8_0:
      parts->scale = half(0);
      for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(I8(block + 2 + i) + 128);
      return;
    case WeightType::kQ4K:
    case WeightType::kQ5K: {
      parts->scale = half(0);
      parts->offset = half(2);
      const bool five = type == WeightType::kQ5K;
      const std::byte *high = block + 16, *packed = block + (five ? 48 : 16);
      for (int g = 0; g < 8; ++g) {
        const GroupScale group = ScaleOfGroup(block + 4, g);
        parts->scale_codes[g] = static_cast<int8_t>(group.scale);
        parts->offset_codes[g] = static_cast<uint8_t>(group.offset);
        for (int i = 0; i < 32; ++i) {
          const int low = (U8(packed + g / 2 * 32 + i) >> (g % 2 * 4)) & 15;
          q[32 * g + i] = static_cast<uint8_t>(low | (five ? ((U8(high + i) >> g) & 1) << 4 : 0));
        }
      }
      return;
    }
    case WeightType::kQ6K:
      parts->scale = half(208);
      for (int g = 0; g < 16; ++g) parts->scale_codes[g] = I8(block + 192 + g);
      for (int i = 0; i < 256; ++i) q[i] = static_cast<uint8_t>(SixBits(block, i));
      return;
    case WeightType::kMxfp4:
      parts->scale = Mxfp4Scale(U8(block)).bits;
      for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(Nibble(block + 1, i));
      return;
    case WeightType::kI4x32:
    case WeightType::kI4x128:
      parts->scale = parts->offset = half(0);
      for (int64_t i = 0; i < BlockSizeOf(type).values; ++i) {
        q[i] = static_cast<uint8_t>(Nibble(block + 4 + i / 32 * 16, static_cast<int>(i % 32)));
        parts->scale_codes[i / 32] = 1;
        parts->offset_codes[i / 32] = U8(block + 2);
      }
      return;
    case WeightType::kI8x128:
    case WeightType::kF8x32:
    case WeightType::kF8x128:
    case WeightType::kF32:
    case WeightType::kF16:
    case WeightType::kBF16:
      break;
  }
  WINNOW_CHECK(false);
}

namespace {

void RoundToFloat8(BlockSize block, const float* row, int64_t cols, std::byte* out) {
  for (int64_t at = 0; at < cols; at += block.values, out += block.bytes) {
    float largest = 0;
    for (int64_t i = 0; i < block.values; ++i) largest = std::max(largest, std::abs(row[at + i]));
    const float scale = largest / kLargestF8;
    std::memcpy(out, &scale, sizeof scale);
    for (int64_t i = 0; i < block.values; ++i) {
      out[4 + i] = std::byte{scale == 0 ? uint8_t{0} : ToF8E4M3(row[at + i] / scale).bits};
    }
  }
}

void PutHalf(std::byte* to, F16 value) { std::memcpy(to, &value.bits, 2); }

// Four values side by side, which every processor adds at once.
using Lanes = float __attribute__((vector_size(16)));

Lanes Load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}
float Sum(Lanes x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// The nearest integer to x, of equals the even one, for x in [0, 2^22).
template <typename Value>
Value Nearest(Value x) {
  constexpr float kOnes = 0x1p23f;  // floats from here on are whole numbers
  return (x + kOnes) - kOnes;
}

// `blocks` of 32 values with one scale.
void RoundToQ8_0(const float* x, int64_t blocks, std::byte* out) {
  float largest = 0;
  for (int64_t i = 0; i < 32 * blocks; ++i) largest = std::max(largest, std::abs(x[i]));
  const F16 scale = ToF16(largest / 127);
  const float s = ToFloat(scale), inverse = s == 0 ? 0 : 1 / s;
  for (int64_t block = 0; block < blocks; ++block, x += 32, out += 34) {
    PutHalf(out, scale);
    for (int i = 0; i < 32; ++i) {
      const float magnitude = Nearest(std::min(std::abs(x[i]) * inverse, 127.0f));
      out[2 + i] = static_cast<std::byte>(static_cast<int8_t>(x[i] < 0 ? -magnitude : magnitude));
    }
  }
}

// A block of 32 values as the nearest integers on a line, x_i about offset + scale · (q_i - 8): what that loses, and the sums that
// fit a line to those integers.
class Line {
 public:
  Line(const float* x, float scale, float offset) : scale_(Short(scale)), offset_(Short(offset)) {
    if (std::abs(offset_) * kMostTimes < std::abs(scale_)) offset_ = 0;
    if (std::abs(scale_) * kMostTimes < std::abs(offset_)) scale_ = 0;
    Lanes errors{}, xs{}, qs{}, qqs{}, xqs{};
    for (int i = 0; i < 32; i += 4) {
      const Lanes value = Load(x + i), q = Integers(value) - kL4Bias;
      const Lanes difference = q * scale_ + offset_ - value;
      errors += difference * difference;
      xs += value;
      qs += q;
      qqs += q * q;
      xqs += value * q;
    }
    error_ = Sum(errors);
    x_ = Sum(xs);
    q_ = Sum(qs);
    qq_ = Sum(qqs);
    xq_ = Sum(xqs);
  }

  float error() const { return error_; }  // the sum of squares

  // The line nearest to the values, by least squares, if they keep their integers. Nothing where those are all the same.
  std::optional<Line> Refitted(const float* x) const {
    const float spread = 32 * qq_ - q_ * q_;  // exact
    if (spread == 0) return std::nullopt;
    const float s = (32 * xq_ - q_ * x_) / spread;
    return Line(x, s, (x_ - s * q_) / 32);
  }

  void Write(const float* x, std::byte* out) const {
    PutHalf(out, ToF16(scale_));
    PutHalf(out + 2, ToF16(offset_));
    for (int i = 0; i < 16; i += 4) {
      const Lanes low = Integers(Load(x + i)), high = Integers(Load(x + i + 16));
      for (int lane = 0; lane < 4; ++lane) {
        out[4 + i + lane] =
            static_cast<std::byte>(static_cast<int>(low[lane]) | static_cast<int>(high[lane]) << 4);
      }
    }
  }

 private:
  static constexpr float kMostTimes = 1024;

  // As bfloat16 has it, and f16.
  static float Short(float x) { return ToFloat(ToF16(ToFloat(ToBF16(x)))); }

  Lanes Integers(Lanes values) const {
    const float inverse = scale_ == 0 ? 0 : 1 / scale_;
    Lanes q = (values - offset_) * inverse + kL4Bias;
    q = q < 0.0f ? Lanes{} : q;
    q = q > 15.0f ? Lanes{} + 15.0f : q;
    return Nearest(q);
  }

  float scale_, offset_;
  float error_, x_, q_, qq_, xq_;
};

// `count` values, at most 128, as scale · integer from -8 to 7.
class FourBitGroup {
 public:
  FourBitGroup(const float* x, int64_t count, float scale)
      : half_(ToF16(scale)), scale_(ToFloat(half_)) {
    Lanes errors{}, qqs{}, xqs{};
    for (int64_t i = 0; i < count; i += 4) {
      const Lanes value = Load(x + i), q = Integers(value);
      const Lanes difference = q * scale_ - value;
      errors += difference * difference;
      qqs += q * q;
      xqs += value * q;
    }
    error_ = Sum(errors);
    const float qq = Sum(qqs);
    best_scale_ = qq == 0 ? scale_ : Sum(xqs) / qq;
  }
  float error() const { return error_; }  // the sum of squares
  // The nearest to the values, by least squares, if they keep their integers.
  float best_scale() const { return best_scale_; }
  // Writes blocks of kI8x128.
  void Write(const float* x, int64_t count, std::byte* out) const {
    for (int64_t at = 0; at < count; at += 32, out += 34) {
      PutHalf(out, half_);
      for (int i = 0; i < 32; i += 4) {
        const Lanes q = Integers(Load(x + at + i));
        for (int lane = 0; lane < 4; ++lane) {
          out[2 + i + lane] = static_cast<std::byte>(static_cast<int8_t>(q[lane]));
        }
      }
    }
  }

 private:
  static constexpr float kLeast = -8, kMost = 7;
  Lanes Integers(Lanes values) const {
    const float inverse = scale_ == 0 ? 0 : 1 / scale_;
    Lanes q = values * inverse;
    q = q < kLeast ? Lanes{} + kLeast : q;
    q = q > kMost ? Lanes{} + kMost : q;
    return Nearest(q - kLeast) + kLeast;
  }

  F16 half_;
  float scale_, error_, best_scale_;
};

void RoundToFourBits(const float* x, int64_t count, std::byte* out) {
  constexpr int kRounds = 3;
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::abs(x[i]) > std::abs(largest)) largest = x[i];
  }
  FourBitGroup best(x, count, largest / -8), next = best;
  for (int round = 0; round < kRounds; ++round) {
    next = FourBitGroup(x, count, next.best_scale());
    if (next.error() < best.error()) best = next;
  }
  best.Write(x, count, out);
}

// From the line through the smallest and the largest value: its integers' best line, that one's nearest integers, and so
// on, as Lloyd's method does. Three rounds take 13 % from the squared error of normal values, six 15 %.
void RoundToL4x32(const float* x, std::byte* out) {
  constexpr int kRounds = 3;
  Lanes low = Load(x), high = low;
  for (int i = 4; i < 32; i += 4) {
    const Lanes values = Load(x + i);
    low = values < low ? values : low;
    high = values > high ? values : high;
  }
  const float least = std::min({low[0], low[1], low[2], low[3]});
  const float most = std::max({high[0], high[1], high[2], high[3]});
  const float scale = (most - least) / 15;
  Line best(x, scale, least + kL4Bias * scale);
  std::optional<Line> next = best.Refitted(x);
  for (int round = 1; next.has_value(); ++round) {
    if (next->error() < best.error()) best = *next;
    if (round == kRounds) break;
    next = next->Refitted(x);
  }
  best.Write(x, out);
}

}  // namespace

void Q4_0ToQ8_0(const std::byte* row, int64_t cols, std::byte* out) {
  const BlockSize from = BlockSizeOf(WeightType::kQ4_0), to = BlockSizeOf(WeightType::kQ8_0);
  for (int64_t at = 0; at < cols; at += from.values, row += from.bytes, out += to.bytes) {
    std::memcpy(out, row, 2);
    for (int i = 0; i < from.values; ++i) {
      out[2 + i] = static_cast<std::byte>(static_cast<int8_t>(Nibble(row + 2, i) - 8));
    }
  }
}

void Mxfp4ToFloat8(const std::byte* row, int64_t cols, std::byte* out) {
  const BlockSize from = BlockSizeOf(WeightType::kMxfp4), to = BlockSizeOf(WeightType::kF8x32);
  for (int64_t at = 0; at < cols; at += from.values, row += from.bytes, out += to.bytes) {
    // Numbers are halves of whole ones, so that the scale is twice of what those are multiplied by.
    const float scale = 2 * ToFloat(Mxfp4Scale(U8(row)));
    std::memcpy(out, &scale, sizeof scale);
    for (int i = 0; i < from.values; ++i) {
      const float number = 0.5f * static_cast<float>(kDoubledE2M1[Nibble(row + 1, i)]);
      out[4 + i] = std::byte{ToF8E4M3(number).bits};
    }
  }
}

void QuantizeRow(WeightType type, const float* row, int64_t cols, std::byte* out) {
  const BlockSize block = BlockSizeOf(type);
  WINNOW_CHECK(cols % block.values == 0);
  if (IsFloat8(type)) return RoundToFloat8(block, row, cols, out);
  if (type == WeightType::kL4x32) {
    for (int64_t at = 0; at < cols; at += 32, out += block.bytes) RoundToL4x32(row + at, out);
    return;
  }
  WINNOW_CHECK(type == WeightType::kQ8_0 || type == WeightType::kI8x128);
  const int64_t together = type == WeightType::kI8x128 ? kInt8GroupValues / 32 : 1;
  for (int64_t at = 0; at < cols; at += 32 * together, out += block.bytes * together) {
    RoundToQ8_0(row + at, std::min(together, (cols - at) / 32), out);
  }
}

void QuantizeRowToFourBits(const float* row, int64_t cols, std::byte* out) {
  const BlockSize block = BlockSizeOf(WeightType::kI8x128);
  WINNOW_CHECK(cols % block.values == 0);
  for (int64_t at = 0; at < cols; at += kInt8GroupValues) {
    RoundToFourBits(row + at, std::min(kInt8GroupValues, cols - at),
                    out + at / block.values * block.bytes);
  }
}

int64_t WeightRowBytes(WeightType type, int64_t cols) {
  const BlockSize block = BlockSizeOf(type);
  WINNOW_CHECK(cols % block.values == 0);
  return cols / block.values * block.bytes;
}

void DequantizeRow(WeightType type, const std::byte* row, int64_t cols, float* out) {
  if (const std::optional<DType> plain = PlainType(type)) {
    for (int64_t i = 0; i < cols; ++i) out[i] = ElementAt(row, *plain, i);
    return;
  }
  const BlockSize block = BlockSizeOf(type);
  WINNOW_CHECK(cols % block.values == 0);
  const DequantizeBlock dequantize = DequantizerOf(type);
  for (int64_t i = 0; i < cols; i += block.values) {
    dequantize(row, out + i);
    row += block.bytes;
  }
}

}  // namespace winnow::kernels
