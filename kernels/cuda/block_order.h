// Order of a matrix of quantised blocks (kernels/quantized.h) in the device's memory, and the bfloat16 weights that a lane
// makes of it for the matrix instruction m16n8k16. Host code compiles it as well: tests compare it with DequantizeRow where
// there is no GPU.
//
// A tile is 16 outputs by 32 inner values, as that of plain weights (matmul_order.cuh), and tiles of 16 outputs lie one
// behind the other. Inside they are cut as products are cut (matmul.h): into segments, and each segment into records of
// kStageBytes of integers, which are what one bulk copy brings:
//
//   matrix   [ceil(out / 16)][segments] records
//   record   values [slices][lanes], then fine scales [slices][outputs], then coarse scales [blocks][outputs]
//   values   of a lane: of output lane / 4, then of output lane / 4 + 8, the columns 2c, 2c + 1 of every eight (c = lane % 4),
//            ascending: eight integers of 8 bits, or 8-bit floats; eight of 4 bits lie as pairs, pair p in bits 4p to 4p + 3
//            of a word's lower and its upper half
//   scales   of outputs 0, 8, 1, 9, ...: two of a lane are neighbours
//
// A fine scale belongs to a slice of 32 values, a coarse one to a block of 128 or 256 of the file. A record has all coarse
// scales that its slices need: where blocks are not cut by records, those of the blocks, else one more. The last record of a
// segment has only the slices that are left. A record's parts are multiples of 16 bytes.
//
// A value is s · (q - bias) + o in float32, rounded as DequantizeRow rounds, then rounded to bfloat16: the bits of the
// matrix that is widened while it is loaded. One fused multiply-add gives them: s · (q - bias) is exact, or o is -0.
// Integers of 4 bits less a bias or a zero point, without another offset, are made two at a time in bfloat16: s is the sum
// of two bfloat16 numbers, of 8 and 3 bits, and only the last sum is rounded (MakePairs). So are those of L4x32, whose s
// and o are bfloat16 numbers (MakeLinePairs).
//
// Bytes a weight: Q4_0 0.56, Q4_1 and L4x32 0.63, Q4_K 0.58, Q5_0 and Q8_0 1.06, Q5_1 1.13, Q5_K 1.08, Q6_K 1.07, I4x32 0.63, I4x128
// 0.53, F8x32 1.13, F8x128 1.03. Integers of 5 and 6 bits take 8.
#ifndef WINNOW_KERNELS_CUDA_BLOCK_ORDER_H_
#define WINNOW_KERNELS_CUDA_BLOCK_ORDER_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/float8.h"
#include "kernels/quantized.h"

#ifdef __CUDACC__
#define WINNOW_BOTH __host__ __device__ __forceinline__
#else
#define WINNOW_BOTH inline
#endif
#ifdef __CUDA_ARCH__
#define WINNOW_UNROLL _Pragma("unroll")
#else
#define WINNOW_UNROLL
#endif

namespace winnow::kernels::cuda {

inline constexpr int32_t kBlockSegments = 8;  // kMatmulSegments
inline constexpr int32_t kSliceValues = 32;
inline constexpr int32_t kTileOutputs = 16;
inline constexpr int32_t kStageBytes = 2048;  // of integers in a full record

enum class BlockScales : uint8_t {
  kHalf,       // scale f16
  kHalfPair,   // scale f16, offset f16
  kHalfZero,   // scale f16, zero point as f16: the offset is -scale · zero
  kBrainPair,  // 64 times the scale bf16, offset bf16
  kFloat,      // scale f32
  kCodes,  // fine: scale code, offset code, 8 bits each; coarse: scale f16, offset f16, the offset is taken away
  kSignedCodes,  // fine: scale codes of the first and the last 16 values, with signs; coarse: scale f16
};

struct BlockFormat {
  int32_t value_bytes = 0;   // of a lane and slice: 8 (4 bits) or 16
  bool floats = false;       // values are 8-bit floats
  int32_t bias = 0;          // of the integers as they lie here
  int32_t rebias = 0;        // added to the file's integers for that
  int32_t block_slices = 1;  // of a block of the file
  BlockScales scales = BlockScales::kHalf;
  int32_t fine_bytes = 0, coarse_bytes = 0;  // of an output and slice; of an output and block

  constexpr int32_t stage_slices() const { return kStageBytes / (32 * value_bytes); }
  constexpr int32_t slice_bytes() const { return 32 * value_bytes + kTileOutputs * fine_bytes; }
  constexpr int32_t most_coarse() const {
    return coarse_bytes == 0 ? 0 : std::max(1, stage_slices() / block_slices) + 1;
  }
  constexpr int32_t most_record_bytes() const {
    return stage_slices() * slice_bytes() + most_coarse() * kTileOutputs * coarse_bytes;
  }
};

// REQUIRES: a quantised type.
WINNOW_BOTH constexpr BlockFormat BlockFormatOf(WeightType type) {
  switch (type) {
    case WeightType::kQ4_0:
      return {8, false, 8, 0, 1, BlockScales::kHalf, 2, 0};
    case WeightType::kQ4_1:
      return {8, false, 0, 0, 1, BlockScales::kHalfPair, 4, 0};
    case WeightType::kQ5_0:
      return {16, false, 128, 112, 1, BlockScales::kHalf, 2, 0};
    case WeightType::kQ5_1:
      return {16, false, 0, 0, 1, BlockScales::kHalfPair, 4, 0};
    case WeightType::kQ4K:
      return {8, false, 0, 0, 8, BlockScales::kCodes, 2, 4};
    case WeightType::kQ5K:
      return {16, false, 0, 0, 8, BlockScales::kCodes, 2, 4};
    case WeightType::kQ6K:
      return {16, false, 128, 96, 8, BlockScales::kSignedCodes, 2, 2};
    case WeightType::kI4x32:
      return {8, false, 0, 0, 1, BlockScales::kHalfZero, 4, 0};
    case WeightType::kI4x128:
      return {8, false, 0, 0, 4, BlockScales::kHalfZero, 0, 4};
    case WeightType::kL4x32:
      return {8, false, 8, 0, 1, BlockScales::kBrainPair, 4, 0};
    case WeightType::kF8x32:
      return {16, true, 0, 0, 1, BlockScales::kFloat, 4, 0};
    case WeightType::kF8x128:
      return {16, true, 0, 0, 4, BlockScales::kFloat, 0, 4};
    case WeightType::kQ8_0:
    default:
      return {16, false, 128, 0, 1, BlockScales::kHalf, 2, 0};
  }
}

// The places of a matrix's records.
struct BlockOrder {
  int32_t slices = 0, segment_slices = 0;
  int32_t coarse = 0;         // coarse scales of a record, of an output
  int32_t segment_bytes = 0;  // of a whole segment
  int64_t tile_bytes = 0;     // of 16 outputs
};
WINNOW_BOTH constexpr int32_t RecordBytes(const BlockFormat& format, int32_t coarse,
                                          int32_t slices) {
  return slices * format.slice_bytes() + coarse * kTileOutputs * format.coarse_bytes;
}
WINNOW_BOTH constexpr int32_t SegmentBytes(const BlockFormat& format, int32_t coarse,
                                           int32_t slices) {
  const int32_t whole = slices / format.stage_slices(), left = slices % format.stage_slices();
  return whole * RecordBytes(format, coarse, format.stage_slices()) +
         (left > 0 ? RecordBytes(format, coarse, left) : 0);
}
// REQUIRES: `in` a multiple of the block's values.
WINNOW_BOTH constexpr BlockOrder BlockOrderOf(const BlockFormat& format, int64_t in) {
  BlockOrder order;
  order.slices = static_cast<int32_t>(in / kSliceValues);
  order.segment_slices = (order.slices + kBlockSegments - 1) / kBlockSegments;
  if (format.coarse_bytes > 0) {
    const int32_t stage = format.stage_slices();
    const int32_t unit = stage < format.block_slices ? stage : format.block_slices;
    order.coarse = stage < format.block_slices ? 1 : stage / format.block_slices;
    if (order.segment_slices % unit != 0) ++order.coarse;
  }
  order.segment_bytes = SegmentBytes(format, order.coarse, order.segment_slices);
  const int32_t whole = order.slices / order.segment_slices;
  order.tile_bytes = int64_t{whole} * order.segment_bytes +
                     SegmentBytes(format, order.coarse, order.slices % order.segment_slices);
  return order;
}

// A slice's place in its record.
struct BlockPlace {
  int64_t record = 0;              // from the matrix's beginning
  int32_t first = 0;               // slice of the record
  int32_t slices = 0;              // of the record
  int32_t slice = 0;               // in the record
  int32_t coarse = 0;              // of its block, in the record
  bool is_first_of_block = false;  // in the record
};
WINNOW_BOTH constexpr BlockPlace PlaceOf(const BlockFormat& format, const BlockOrder& order,
                                         int64_t tile, int32_t slice) {
  const int32_t stage = format.stage_slices();
  const int32_t segment = slice / order.segment_slices;
  const int32_t begin = segment * order.segment_slices;
  const int32_t left_to_end = order.slices - begin;
  const int32_t count = left_to_end < order.segment_slices ? left_to_end : order.segment_slices;
  const int32_t number = (slice - begin) / stage;
  BlockPlace place;
  place.record = tile * order.tile_bytes + int64_t{segment} * order.segment_bytes +
                 int64_t{number} * RecordBytes(format, order.coarse, stage);
  place.first = begin + number * stage;
  place.slice = slice - place.first;
  place.slices = count - number * stage < stage ? count - number * stage : stage;
  place.coarse = slice / format.block_slices - place.first / format.block_slices;
  place.is_first_of_block = place.slice == 0 || slice % format.block_slices == 0;
  return place;
}

inline size_t BlockBytes(WeightType type, int64_t out, int64_t in) {
  const int64_t tiles = (out + kTileOutputs - 1) / kTileOutputs;
  return static_cast<size_t>(tiles * BlockOrderOf(BlockFormatOf(type), in).tile_bytes);
}

// ---- arithmetic, the same on both sides ----

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float BlockFma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float BlockMul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float BlockHalf(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
  return x;
}
__device__ __forceinline__ float BlockFloat(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t BlockPair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// a · b + c of pairs of bfloat16, rounded once.
__device__ __forceinline__ uint32_t BlockPairFma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
// The upper half of a float32 twice.
__device__ __forceinline__ uint32_t UpperTwice(float x) {
  return __byte_perm(__float_as_uint(x), 0, 0x3232);
}
// The lower half of a word twice.
__device__ __forceinline__ uint32_t LowerTwice(uint32_t x) { return __byte_perm(x, 0, 0x1010); }
__device__ __forceinline__ uint32_t FloatBits(float x) { return __float_as_uint(x); }
#else
inline float BlockFma(float a, float b, float c) { return std::fma(a, b, c); }
inline float BlockMul(float a, float b) { return a * b; }
inline float BlockHalf(uint32_t bits) { return ToFloat(F16{static_cast<uint16_t>(bits)}); }
inline float BlockFloat(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t BlockPair(float low, float high) {
  return ToBF16(low).bits | static_cast<uint32_t>(ToBF16(high).bits) << 16;
}
// For sums that are exact in float32.
inline uint32_t BlockPairFma(uint32_t a, uint32_t b, uint32_t c) {
  const auto high = [](uint32_t x) { return BlockFloat(x & 0xffff0000u); };
  return BlockPair(std::fma(high(a << 16), high(b << 16), high(c << 16)),
                   std::fma(high(a), high(b), high(c)));
}
inline uint32_t FloatBits(float x) { return std::bit_cast<uint32_t>(x); }
inline uint32_t LowerTwice(uint32_t x) { return (x & 0xffffu) | x << 16; }
inline uint32_t UpperTwice(float x) { return FloatBits(x) >> 16 | (FloatBits(x) & 0xffff0000u); }
#endif

// ---- the parts of a file's block (the types' layouts: quantized.cc) ----

WINNOW_BOTH uint32_t ByteAt(const uint8_t* at, int i) { return at[i]; }
// `i` of 32 values in 16 bytes.
WINNOW_BOTH uint32_t NibbleAt(const uint8_t* packed, int i) {
  return i < 16 ? packed[i] & 15u : packed[i - 16] >> 4;
}
// Value `i` of a block, as DequantizeRow has it before scales; Q8_0's with 128 added, an 8-bit float's bits.
WINNOW_BOTH uint32_t BlockInteger(WeightType type, const uint8_t* block, int i) {
  switch (type) {
    case WeightType::kQ4_0:
      return NibbleAt(block + 2, i);
    case WeightType::kQ4_1:
    case WeightType::kL4x32:
      return NibbleAt(block + 4, i);
    case WeightType::kQ5_0:
      return NibbleAt(block + 6, i) | ((block[2 + i / 8] >> (i % 8)) & 1u) << 4;
    case WeightType::kQ5_1:
      return NibbleAt(block + 8, i) | ((block[4 + i / 8] >> (i % 8)) & 1u) << 4;
    case WeightType::kQ8_0:
      return block[2 + i] ^ 0x80u;
    case WeightType::kQ4K:
      return (block[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15u;
    case WeightType::kQ5K:
      return ((block[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15u) |
             ((block[16 + i % 32] >> (i / 32)) & 1u) << 4;
    case WeightType::kQ6K: {
      const int half = i / 128, r = i % 128 / 32, column = i % 32;
      return ((block[half * 64 + r % 2 * 32 + column] >> (r / 2 * 4)) & 15u) |
             ((block[128 + half * 32 + column] >> (r * 2)) & 3u) << 4;
    }
    case WeightType::kI4x32:
    case WeightType::kI4x128:
      return NibbleAt(block + 4 + i / 32 * 16, i % 32);
    case WeightType::kF8x32:
    case WeightType::kF8x128:
    default:
      return block[4 + i];
  }
}
WINNOW_BOTH uint16_t HalfBits(const uint8_t* at) {
  return static_cast<uint16_t>(at[0] | at[1] << 8);
}

// 6-bit scale and offset of group `g` of Q4_K and Q5_K, in the low and the high byte.
WINNOW_BOTH uint16_t GroupCodes(const uint8_t* packed, int g) {
  if (g < 4) return static_cast<uint16_t>((packed[g] & 63) | (packed[4 + g] & 63) << 8);
  const int low = packed[4 + g];
  return static_cast<uint16_t>(((low & 15) | (packed[g - 4] >> 6) << 4) |
                               ((low >> 4) | (packed[g] >> 6) << 4) << 8);
}

// Puts the fine scale of slice `slice` of the block at `fine`, and the block's coarse one at `coarse`.
WINNOW_BOTH void PutScales(WeightType type, const uint8_t* block, int slice, uint8_t* fine,
                           uint8_t* coarse) {
  const auto put16 = [](uint8_t* to, uint32_t bits) {
    to[0] = static_cast<uint8_t>(bits);
    to[1] = static_cast<uint8_t>(bits >> 8);
  };
  switch (BlockFormatOf(type).scales) {
    case BlockScales::kHalf:
      return put16(fine, HalfBits(block));
    case BlockScales::kHalfPair:
      put16(fine, HalfBits(block));
      return put16(fine + 2, HalfBits(block + 2));
    case BlockScales::kHalfZero: {
      uint8_t* to = type == WeightType::kI4x32 ? fine : coarse;
      put16(to, HalfBits(block));
      // An integer of 8 bits as a float16.
      const uint32_t zero = block[2];
      uint32_t bits = 0;
      if (zero > 0) {
        int exponent = 7;
        while ((zero >> exponent) == 0) --exponent;
        bits = static_cast<uint32_t>(15 + exponent) << 10 | ((zero << (10 - exponent)) & 0x3ffu);
      }
      return put16(to + 2, bits);
    }
    case BlockScales::kBrainPair:
      put16(fine, FloatBits(BlockMul(BlockHalf(HalfBits(block)), 64.0f)) >> 16);
      return put16(fine + 2, FloatBits(BlockHalf(HalfBits(block + 2))) >> 16);
    case BlockScales::kFloat: {
      uint8_t* to = type == WeightType::kF8x32 ? fine : coarse;
      put16(to, HalfBits(block));
      return put16(to + 2, HalfBits(block + 2));
    }
    case BlockScales::kCodes:
      put16(fine, GroupCodes(block + 4, slice));
      put16(coarse, HalfBits(block));
      return put16(coarse + 2, HalfBits(block + 2));
    case BlockScales::kSignedCodes:
      put16(fine, HalfBits(block + 192 + 2 * slice));
      return put16(coarse, HalfBits(block + 208));
  }
}

// Puts slice `slice` of output `output` into the matrix at `to`; `row` is that output's row of the file.
WINNOW_BOTH void PutSlice(WeightType type, const BlockOrder& order, const uint8_t* row,
                          int64_t block_bytes, int64_t output, int32_t slice, uint8_t* to) {
  const BlockFormat format = BlockFormatOf(type);
  const BlockPlace place = PlaceOf(format, order, output / kTileOutputs, slice);
  const uint8_t* block = row + slice / format.block_slices * block_bytes;
  const int of_tile = static_cast<int>(output % kTileOutputs);
  const int in_block = slice % format.block_slices;
  uint8_t* record = to + place.record;
  const int side = of_tile / 8, lane_row = of_tile % 8;
  for (int c = 0; c < 4; ++c) {
    uint8_t* values = record + (place.slice * 32 + lane_row * 4 + c) * format.value_bytes +
                      side * format.value_bytes / 2;
    uint32_t low[2] = {};
    for (int i = 0; i < 8; ++i) {
      const int column = i / 2 * 8 + 2 * c + i % 2;
      const uint32_t q = BlockInteger(type, block, in_block * kSliceValues + column) +
                         static_cast<uint32_t>(format.rebias);
      if (format.value_bytes == 16) {
        values[i] = static_cast<uint8_t>(q);
      } else if (i / 2 % 2 == 0) {
        low[i % 2] = q;
      } else {
        values[i % 2 * 2 + i / 4] = static_cast<uint8_t>(low[i % 2] | q << 4);
      }
    }
  }
  const int slot = lane_row * 2 + side;
  uint8_t* fine = record + place.slices * 32 * format.value_bytes +
                  (place.slice * kTileOutputs + slot) * format.fine_bytes;
  uint8_t* coarse = record + place.slices * format.slice_bytes() +
                    (place.coarse * kTileOutputs + slot) * format.coarse_bytes;
  uint8_t unused[4];
  PutScales(type, block, in_block, fine, place.is_first_of_block ? coarse : unused);
}

// ---- a lane's weights of a tile ----

// Words of memory that is aligned for all of them.
template <int kCount>
struct alignas(4 * kCount) Words {
  uint32_t of[kCount];
};
template <int kCount>
WINNOW_BOTH Words<kCount> WordsAt(const std::byte* at) {
  return *reinterpret_cast<const Words<kCount>*>(at);
}

// Scale and offset of the two outputs of a lane; of the first 16 inner values of a slice and of the last.
struct LaneScales {
  float scale[2][2];
  float offset[2];
};
template <BlockScales kScales>
WINNOW_BOTH LaneScales LoadScales(const std::byte* fine, const std::byte* coarse) {
  LaneScales lane;
  if constexpr (kScales == BlockScales::kHalf) {
    const uint32_t pair = WordsAt<1>(fine).of[0];
    WINNOW_UNROLL
    for (int i = 0; i < 2; ++i) {
      lane.scale[i][0] = lane.scale[i][1] = BlockHalf(pair >> (16 * i));
      lane.offset[i] = -0.0f;
    }
  } else if constexpr (kScales == BlockScales::kSignedCodes) {
    const uint32_t codes = WordsAt<1>(fine).of[0], pair = WordsAt<1>(coarse).of[0];
    WINNOW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float scale = BlockHalf(pair >> (16 * i));
      WINNOW_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto code = static_cast<int8_t>(codes >> (16 * i + 8 * half));
        lane.scale[i][half] = BlockMul(scale, static_cast<float>(code));
      }
      lane.offset[i] = -0.0f;
    }
  } else if constexpr (kScales == BlockScales::kCodes) {
    const uint32_t codes = WordsAt<1>(fine).of[0];
    const Words<2> pairs = WordsAt<2>(coarse);
    WINNOW_UNROLL
    for (int i = 0; i < 2; ++i) {
      const auto of_scale = static_cast<uint8_t>(codes >> (16 * i));
      const auto of_offset = static_cast<uint8_t>(codes >> (16 * i + 8));
      lane.scale[i][0] = lane.scale[i][1] =
          BlockMul(BlockHalf(pairs.of[i]), static_cast<float>(of_scale));
      lane.offset[i] = -BlockMul(BlockHalf(pairs.of[i] >> 16), static_cast<float>(of_offset));
    }
  } else {
    const Words<2> words = WordsAt<2>(fine != nullptr ? fine : coarse);
    WINNOW_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (kScales == BlockScales::kFloat) {
        lane.scale[i][0] = lane.scale[i][1] = BlockFloat(words.of[i]);
        lane.offset[i] = -0.0f;
      } else {
        const float scale = BlockHalf(words.of[i]), second = BlockHalf(words.of[i] >> 16);
        lane.scale[i][0] = lane.scale[i][1] = scale;
        lane.offset[i] = kScales == BlockScales::kHalfZero ? -BlockMul(scale, second) : second;
      }
    }
  }
  return lane;
}

// Integers of 4 bits less a bias, of a word.
template <int kBias>
WINNOW_BOTH void WidenNibbles(uint32_t word, float (&to)[8]) {
  // A float of 2^23 + q · 16^k has the integer's bits as its own.
  WINNOW_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = ((i % 2 == 0 ? word : word >> 16) & (15u << (i / 2 * 4))) | 0x4b000000u;
    const float unit = 1.0f / static_cast<float>(1 << (i / 2 * 4));
    to[i] = BlockFma(BlockFloat(bits), unit, -8388608.0f * unit - static_cast<float>(kBias));
  }
}
template <int kBias>
WINNOW_BOTH void WidenBytes(uint32_t word, float* to) {
  WINNOW_UNROLL
  for (int i = 0; i < 4; ++i) {
#ifdef __CUDA_ARCH__
    const uint32_t bits = __byte_perm(word, 0x4b000000u, 0x7540 + i);
    to[i] = __fadd_rn(__uint_as_float(bits), -8388608.0f - static_cast<float>(kBias));
#else
    to[i] = static_cast<float>(static_cast<int>((word >> (8 * i)) & 255u) - kBias);
#endif
  }
}
WINNOW_BOTH void WidenFloats(uint32_t word, float* to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  WINNOW_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
        : "=r"(halves)
        : "h"(static_cast<uint16_t>(word >> (16 * i))));
    to[2 * i] = BlockHalf(halves & 0xffffu);
    to[2 * i + 1] = BlockHalf(halves >> 16);
  }
#elif defined(__CUDA_ARCH__)
  WINNOW_UNROLL
  for (int i = 0; i < 4; ++i) {
    // Exponents of float32 begin 120 lower.
    const auto high = static_cast<int32_t>(word << (24 - 8 * i));
    const uint32_t bits = static_cast<uint32_t>(high >> 4) & 0x87f00000u;
    to[i] = __fmul_rn(__uint_as_float(bits), 0x1p120f);
  }
#else
  for (int i = 0; i < 4; ++i) to[i] = ToFloat(F8E4M3{static_cast<uint8_t>(word >> (8 * i))});
#endif
}

// Types whose values are s · (q - z), q of 4 bits.
constexpr bool MadeInPairs(const BlockFormat& format) {
  return format.value_bytes == 8 &&
         (format.scales == BlockScales::kHalf || format.scales == BlockScales::kHalfZero);
}

// Pair `i` of a word's eight integers of 4 bits, where they can be multiplied: as q · 2^-133 where i is even, else as
// q · 2^-129. A bfloat16's lowest eight bits are such numbers, because those are evenly spaced.
WINNOW_BOTH uint32_t NibblePair(uint32_t word, int i) {
  return (i < 2 ? word : word >> 8) & (i % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
}
// The same as numbers of 1/64, with c added. The sum must be exact.
WINNOW_BOTH uint32_t NibblePairPlus(uint32_t word, int i, uint32_t c) {
  constexpr uint32_t kTwo127 = 0x7f007f00u, kTwo123 = 0x7d007d00u;
  return BlockPairFma(NibblePair(word, i), i % 2 == 0 ? kTwo127 : kTwo123, c);
}

// Scales of the two outputs of a lane for MakePairs; every word is a number twice.
struct PairScales {
  uint32_t high[2],
      low[2];        // 64 s = high + low: bfloat16 numbers of 8 and 3 bits with the sign of s
  uint32_t zero[2];  // -z / 64
};
template <BlockScales kScales, int kBias>
WINNOW_BOTH PairScales LoadPairScales(const std::byte* at) {
  constexpr bool kHasZero = kScales == BlockScales::kHalfZero;
  PairScales lane;
  const Words<kHasZero ? 2 : 1> words = WordsAt < kHasZero ? 2 : 1 > (at);
  WINNOW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = kHasZero ? words.of[kHasZero ? i : 0] : words.of[0] >> (16 * i);
    const float scale = BlockMul(BlockHalf(word), 64.0f);
    const uint32_t bits = FloatBits(scale);
    const float rest = scale - BlockFloat(bits & 0xffff0000u);
    lane.high[i] = UpperTwice(scale);
    lane.low[i] = UpperTwice(BlockFloat(FloatBits(rest) | (bits & 0x80000000u)));
    lane.zero[i] = UpperTwice(kHasZero ? BlockMul(BlockHalf(word >> 16), -1.0f / 64)
                                       : static_cast<float>(-kBias) / 64);
  }
  return lane;
}

// Eight integers of a word as four pairs of s · (q - z). (q - z) / 64 and its product with the scale's low part, of 5 bits
// and 3 at most, are exact.
// REQUIRES: z up to 16, as files have it.
template <bool kHasZero>
WINNOW_BOTH void MakePairs(uint32_t word, uint32_t high, uint32_t low, uint32_t zero,
                           uint32_t (&pairs)[4]) {
  // Zeros have the sign of s · 0, those of types with a zero point none.
  constexpr uint32_t kNothing = kHasZero ? 0 : 0x80008000u;
  WINNOW_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t q = NibblePairPlus(word, i, zero);
    pairs[i] = BlockPairFma(high, q, BlockPairFma(low, q, kNothing));
  }
}

// The same for s · (q - 8) + o of bfloat16 numbers s and o: every word is a number twice.
struct LineScales {
  uint32_t scale[2];  // 64 s
  uint32_t offset[2];
};
WINNOW_BOTH LineScales LoadLineScales(const std::byte* at) {
  LineScales lane;
  const Words<2> words = WordsAt<2>(at);
  WINNOW_UNROLL
  for (int i = 0; i < 2; ++i) {
    lane.scale[i] = LowerTwice(words.of[i]);
    lane.offset[i] = UpperTwice(BlockFloat(words.of[i]));
  }
  return lane;
}
// REQUIRES: float32 has s · (q - 8) + o exactly, as of what QuantizeRow makes.
WINNOW_BOTH void MakeLinePairs(uint32_t word, uint32_t scale, uint32_t offset,
                               uint32_t (&pairs)[4]) {
  constexpr uint32_t kMinusEighth = 0xbe00be00u;  // -8 / 64
  WINNOW_UNROLL
  for (int i = 0; i < 4; ++i) {
    pairs[i] = BlockPairFma(scale, NibblePairPlus(word, i, kMinusEighth), offset);
  }
}

// A lane's scales of a slice, for MakeFragments. `fine`, `coarse`: the slice's and its block's scales, where the format
// has such.
template <WeightType kType>
WINNOW_BOTH auto ScalesOfLane(const std::byte* fine, const std::byte* coarse, int lane) {
  constexpr BlockFormat kFormat = BlockFormatOf(kType);
  const int pair = lane / 4;
  const std::byte* const of_slice =
      kFormat.fine_bytes == 0 ? nullptr : fine + pair * 2 * kFormat.fine_bytes;
  const std::byte* const of_block = coarse + pair * 2 * kFormat.coarse_bytes;
  if constexpr (MadeInPairs(kFormat)) {
    return LoadPairScales<kFormat.scales, kFormat.bias>(kFormat.fine_bytes == 0 ? of_block
                                                                                : of_slice);
  } else if constexpr (kFormat.scales == BlockScales::kBrainPair) {
    return LoadLineScales(of_slice);
  } else {
    return LoadScales<kFormat.scales>(of_slice, of_block);
  }
}

// A lane's fragments of both halves of a tile, as LoadWFragments gives them of plain weights, of the slice's values.
template <WeightType kType, typename Scales>
WINNOW_BOTH void MakeFragments(const std::byte* values, const Scales& scales, int lane,
                               uint32_t (&of)[2][4]) {
  constexpr BlockFormat kFormat = BlockFormatOf(kType);
  constexpr int kWords = kFormat.value_bytes / 4;  // of both outputs
  const Words<kWords> words = WordsAt<kWords>(values + lane * kFormat.value_bytes);
  WINNOW_UNROLL
  for (int output = 0; output < 2; ++output) {
    if constexpr (MadeInPairs(kFormat) || kFormat.scales == BlockScales::kBrainPair) {
      uint32_t pairs[4];
      if constexpr (kFormat.scales == BlockScales::kBrainPair) {
        MakeLinePairs(words.of[output], scales.scale[output], scales.offset[output], pairs);
      } else {
        MakePairs<kFormat.scales == BlockScales::kHalfZero>(
            words.of[output], scales.high[output], scales.low[output], scales.zero[output], pairs);
      }
      WINNOW_UNROLL
      for (int i = 0; i < 4; ++i) of[i / 2][i % 2 * 2 + output] = pairs[i];
    } else {
      float q[8];
      if constexpr (kWords == 2) {
        WidenNibbles<kFormat.bias>(words.of[output], q);
      } else {
        WINNOW_UNROLL
        for (int i = 0; i < 2; ++i) {
          if constexpr (kFormat.floats) {
            WidenFloats(words.of[2 * output + i], q + 4 * i);
          } else {
            WidenBytes<kFormat.bias>(words.of[2 * output + i], q + 4 * i);
          }
        }
      }
      WINNOW_UNROLL
      for (int i = 0; i < 8; i += 2) {
        const float scale = scales.scale[output][i / 4], offset = scales.offset[output];
        of[i / 4][i / 2 % 2 * 2 + output] =
            BlockPair(BlockFma(q[i], scale, offset), BlockFma(q[i + 1], scale, offset));
      }
    }
  }
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_BLOCK_ORDER_H_
