// Types of weights as files have them: plain values, and the quantised blocks of GGUF files. Four further types hold the
// 4-bit groups and the 8-bit floats of safetensors files, which lie in several tensors there and are put into blocks while
// they are loaded.
//
// A quantised row is a sequence of blocks of 32, 128 or 256 values. A block holds small integers or small floats, the
// scales that turn them into values, and for some types an offset. Numbers are little-endian; blocks lie at any address.
// Dequantisation is plain arithmetic in float32, one rounding per operation, in the order that the PyPI package
// `gguf` has: results are equal bit for bit (NaN payloads aside).
#ifndef WINNOW_KERNELS_QUANTIZED_H_
#define WINNOW_KERNELS_QUANTIZED_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/dtype.h"

namespace winnow::kernels {

enum class WeightType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,    // scale · (4 bits - 8)
  kQ4_1,    // scale · 4 bits + offset
  kQ5_0,    // scale · (5 bits - 16)
  kQ5_1,    // scale · 5 bits + offset
  kQ8_0,    // scale · 8 bits, signed
  kQ4K,     // blocks of 256: 8 groups of 32, each with a 6-bit scale and a 6-bit offset; 4 bits
  kQ5K,     // the same with 5 bits
  kQ6K,     // blocks of 256: 16 groups of 16, each with an 8-bit signed scale; 6 bits - 32
  kMxfp4,   // power of two · 4-bit float (E2M1), blocks of 32
  kI4x32,   // scale · (4 bits - zero point), blocks of 32; in no file
  kI4x128,  // the same, blocks of 128
  kL4x32,   // scale · (4 bits - 8) + offset, of 8 significant bits each, blocks of 32; in no file
  kF8x32,   // scale (float32) · 8-bit float (float8.h), blocks of 32; in no file
  kF8x128,  // the same, blocks of 128
  kI8x128,  // as Q8_0, with one scale for each 128 values; in no file. For W8A8 (int8_matmul.h)
};
inline constexpr int kNumWeightTypes = 18;
inline constexpr int kNumGgufTypes = 12;  // the first ones

// Size of one block: how many values it holds, in how many bytes. A plain type has blocks of one value.
struct BlockSize {
  int64_t values = 1;
  int64_t bytes = 0;
};
BlockSize BlockSizeOf(WeightType type);

const char* WeightTypeName(WeightType type);  // as GGUF spells it: "Q4_K"

// Whether its blocks hold 8-bit floats, and no integers.
bool IsFloat8(WeightType type);

// The plain type; absent for a quantised one.
std::optional<DType> PlainType(WeightType type);
WeightType WeightTypeOf(DType dtype);

// Size of a row of `cols` values. REQUIRES: cols is a multiple of the block's values.
int64_t WeightRowBytes(WeightType type, int64_t cols);

// out[i] = value i of the row, i < cols. REQUIRES: as WeightRowBytes.
void DequantizeRow(WeightType type, const std::byte* row, int64_t cols, float* out);

// Twice the value of each E2M1 number, which is an integer: sign, two bits of exponent, one of mantissa.
inline constexpr int8_t kDoubledE2M1[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};
// A block of kMxfp4 multiplies them by this, half of its E8M0 scale: 2^(code - 128). NaN for 255. bfloat16 has all of them.
BF16 Mxfp4Scale(uint8_t code);
// A row of kMxfp4 as kF8x32, which has all of its values. REQUIRES: no scale is NaN.
void Mxfp4ToFloat8(const std::byte* row, int64_t cols, std::byte* out);

// A row of kQ4_0 as kQ8_0, or as kI8x128 where four blocks each have one scale: the same values, integers from -8 to 7.
void Q4_0ToQ8_0(const std::byte* row, int64_t cols, std::byte* out);

// ---- the parts of a block, for products that compute with the integers ----
//
// Value i of a block is s·(q[i] - bias) + o, with the scale s and the offset o of its group of values.
struct BlockShape {
  int64_t values = 0;  // of a block: 32 or 256
  int64_t group = 0;   // values of one scale: 32, of Q6_K 16
  int32_t bits = 0;    // of an integer as it is packed for products: 4, or 8 for more than 4
  int32_t bias = 0;    // what is taken from an integer
  // Packed integers are places in kDoubledE2M1, to whose numbers `bias` is added, and scales are bfloat16.
  bool has_table = false;
  bool has_offset = false;  // else o = 0
  bool has_codes =
      false;  // s = scale · scale_code[group], o = -offset · offset_code[group]; else s = scale, o = offset
  constexpr int64_t groups() const { return values / group; }
};
// REQUIRES: a quantised type, not IsFloat8 and not kI8x128.
BlockShape BlockShapeOf(WeightType type);

struct BlockParts {
  uint8_t integers[256];
  uint16_t scale = 0, offset = 0;  // f16; bfloat16 with has_table
  int8_t scale_codes[16];          // with has_codes: of each group
  uint8_t offset_codes[16];
};
// REQUIRES: as BlockShapeOf.
void SplitBlock(WeightType type, const std::byte* block, BlockParts* parts);

// The type of 8-bit floats with the largest blocks that rows of `cols` values consist of. REQUIRES: a multiple of 32.
WeightType Float8TypeFor(int64_t cols);

// Rounds a row to Q8_0, I8x128, L4x32 or a type of 8-bit floats, each block by itself, of I8x128 four blocks, or what is left of a row.
// The scale of Q8_0 and I8x128 is max |x| / 127. L4x32 begins with
// the line from the block's smallest value to its largest in 15 steps, refits scale and offset to its integers three times
// (least squares), and keeps the line of the smallest squared error. Scales and offsets are rounded before integers
// are chosen, so that each integer is the nearest (ties to even): to f16, those of L4x32 as below. The scale of 8-bit floats
// is max |x| / 448, a float32. Values must be finite, and such that f16 has the scale and
// the offset. REQUIRES: cols is a multiple of the block's values.
//
// Scale and offset of L4x32 are bfloat16 as well as f16, and neither is more than 1,024 times the other unless one is 0:
// the smaller one is left out then. So scale · integer + offset has 23 significant bits at most, float32 has it
// exactly, and one fused multiply-add in bfloat16 rounds it as float32 rounded to bfloat16 does.
void QuantizeRow(WeightType type, const float* row, int64_t cols, std::byte* out);

// Rounds a row to I8x128 whose integers lie from -8 to 7. A group begins with the scale by which its value of largest magnitude is
// -8, refits it to the integers three times (least squares), and keeps the one of the smallest squared error. REQUIRES: as
// QuantizeRow.
void QuantizeRowToFourBits(const float* row, int64_t cols, std::byte* out);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_QUANTIZED_H_
