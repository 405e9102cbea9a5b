// Matrices of 4-bit integers in groups, as safetensors files of compressed-tensors ("pack-quantized"), GPTQ and AWQ have
// them: several tensors a matrix, each in an order of its own. The value of output o for input i is
//     scale[o][i / group] · (integer[o][i] - zero[o][i / group])
// with integers and zero points as they are unsigned, from 0 to 15 (a zero point of GPTQ's may be 16).
//
//                 integers                        zero points                    scales
//   kPacked       weight_packed [out][in / 8]     weight_zero_point              weight_scale [out][in / group]
//                                                   [out / 8][in / group]
//   kGptq         qweight [in / 8][out]           qzeros [in / group][out / 8]   scales [in / group][out]
//   kAwq          qweight [in][out / 8]           qzeros [in / group][out / 8]   scales [in / group][out]
// Eight integers share an int32, the lowest bits first; AWQ has them in the order 0, 2, 4, 6, 1, 3, 5, 7. kPacked has no
// zero points where they are all 8. GPTQ's first format holds zero points less one.
#ifndef WINNOW_ENGINE_MODEL_GROUPED_INT4_H_
#define WINNOW_ENGINE_MODEL_GROUPED_INT4_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "engine/model/block_source.h"
#include "engine/model/weight_scheme.h"
#include "kernels/dtype.h"
#include "kernels/quantized.h"

namespace winnow::engine {

// One matrix; views into a file.
struct GroupedInt4 final : BlockSource {
  Int4Scheme scheme;
  int64_t rows = 0, cols = 0;  // outputs, inputs
  const std::byte* integers = nullptr;
  const std::byte* zeros = nullptr;  // null: all are 8
  const std::byte* scales = nullptr;
  kernels::DType scale_type = kernels::DType::kBF16;  // or kF16

  int64_t groups() const { return cols / scheme.group; }
  uint8_t Integer(int64_t row, int64_t col) const;
  uint8_t Zero(int64_t row, int64_t group) const;
  float Scale(int64_t row, int64_t group) const;

  // InvalidArgument says which row and group: a scale that is not finite, not positive or no float16. Reads all of them.
  absl::Status CheckScales() const;

  // kQ4_0 where every zero point is 8, else kI4x32 or kI4x128. Blocks hold scales as float16, so that values are the
  // file's own.
  kernels::WeightType block_type() const override;
  // REQUIRES: CheckScales is OK.
  void WriteBlocks(int64_t row, std::byte* out) const override;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GROUPED_INT4_H_
