// Matrices of 4-bit or 8-bit integers in groups, as safetensors files of compressed-tensors, GPTQ and AWQ have them: several
// tensors a matrix, each in an order of its own. The value of output o for input i is
//     scale[o][g] · (integer[o][i] - zero[o][g]),  g = i / group
// with integers and zero points as they are unsigned, from 0 to 15 or 255 (a zero point of GPTQ's may be one more).
//
//            integers                           zero points                     scales
//   kPlain   weight [out][in]                   weight_zero_point, as scales    weight_scale [], [1] or [out][groups]
//   kPacked  weight_packed [out][in / n]        weight_zero_point               weight_scale [out][groups]
//                                                 [out / n][groups]
//   kGptq    qweight [in / n][out]              qzeros [groups][out / n]        scales [groups][out]
//   kAwq     qweight [in][out / n]              qzeros [groups][out / n]        scales [groups][out]
// kPlain has a signed byte for each integer. Elsewhere n of them, eight of 4 bits or four of 8, share an int32, the lowest bits
// first; AWQ, which has 4 bits, has them in the order 0, 2, 4, 6, 1, 3, 5, 7. compressed-tensors has no zero points where all of them
// are the middle, 8 or 128. GPTQ's first format holds zero points less one. With act-order a tensor of its own, g_idx or weight_g_idx
// [in], says the g of each input.
#ifndef WINNOW_ENGINE_MODEL_GROUPED_INTEGERS_H_
#define WINNOW_ENGINE_MODEL_GROUPED_INTEGERS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "engine/model/block_source.h"
#include "engine/model/weight_scheme.h"
#include "kernels/dtype.h"
#include "kernels/quantized.h"

namespace winnow::engine {

// One matrix; views into a file.
struct GroupedIntegers final : BlockSource {
  IntegerScheme scheme;
  int64_t rows = 0, cols = 0;  // outputs, inputs
  const std::byte* integers = nullptr;
  const std::byte* zeros = nullptr;  // null: all are the middle
  const std::byte* scales = nullptr;
  kernels::DType scale_type = kernels::DType::kBF16;
  const std::byte* order =
      nullptr;             // int32 [in]: the group of each input; null: groups lie in order
  bool one_scale = false;  // for the whole matrix

  // Inputs of one scale, and how many such groups a row has.
  int64_t group() const { return scheme.group == 0 ? cols : scheme.group; }
  int64_t groups() const { return cols / group(); }
  int64_t GroupOf(int64_t col) const;  // REQUIRES: order
  int32_t middle() const { return 1 << (scheme.bits - 1); }
  // Integers of inputs [first, first + count) of a row, one after the other.
  void ReadIntegers(int64_t row, int64_t first, int64_t count, uint8_t* out) const;
  int32_t Zero(int64_t row, int64_t group) const;
  float Scale(int64_t row, int64_t group) const;

  // InvalidArgument says which row and group: a scale that is not finite, not positive or that float16 cannot hold, of those in
  // float32 to within half a thousandth. Reads all of them.
  absl::Status CheckScales() const;

  // kQ8_0 for 8 bits; for 4 bits kQ4_0 where every zero point is 8, else kI4x32 or kI4x128. Blocks hold scales as float16, so
  // that values are the file's own, but for scales in float32, which are rounded. REQUIRES: of 8 bits, no zero points.
  kernels::WeightType block_type() const override;
  // REQUIRES: CheckScales is OK.
  void WriteValues(int64_t row, float* out) const override;
  bool has_blocks() const override { return order == nullptr; }
  // REQUIRES: CheckScales is OK.
  void WriteBlocks(int64_t row, std::byte* out) const override;
  int32_t bits_as_i8x128() const override;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GROUPED_INTEGERS_H_
