// Binary codes of keys and queries (HATA, Spotlight Attention, HashAttention, LSH: docs/retrieval.md),
// exactly as docs/artifact-format.md says: any two implementations give the same bits.
//
//   input   [in] f32 or bfloat16; f32 is rounded to bfloat16
//   stage   sum_o = bias_o + x_0 w_o0 + x_1 w_o1 + ... in this order, float32 throughout
//   between x_o = silu(bfloat16(sum_o)), a bfloat16 from a table
//   last    bit o is sum_o >= 0
//
// Products of two bfloat16 are exact in float32, so a fused multiply-add rounds as a product and a
// sum do. Lanes of a vector are outputs; nothing is added across lanes.
//
// Cost of a row: 2 * in * out FLOPs per stage. Weights (2 * in * out bytes) are read once for the
// rows that are encoded together, up to kEncodeTileRows of them.
#ifndef WINNOW_KERNELS_HASH_ENCODE_H_
#define WINNOW_KERNELS_HASH_ENCODE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/retrieval.h"

namespace winnow::kernels {

inline double EncodeFlops(int64_t rows, const EncoderWeights& weights) {
  double flops = 0;
  for (const AffineStage& stage : weights.stages) flops += 2.0 * stage.in * stage.out;
  return flops * static_cast<double>(rows) * weights.kv_heads;
}
// `input_bytes` of one row of one head. Weights count once.
inline double EncodeBytes(int64_t rows, double input_bytes, const EncoderWeights& weights) {
  double weight_bytes = 0;
  for (const AffineStage& stage : weights.stages) weight_bytes += 2.0 * stage.in * stage.out;
  const double row_bytes = input_bytes + weights.stages.back().out / 8.0;
  return weights.kv_heads * (weight_bytes + row_bytes * static_cast<double>(rows));
}

// silu of every bfloat16, by the input's bits: 65536 bfloat16. Made when first asked for; what it
// holds for NaN is a NaN.
const uint16_t* SiluTable();

// The code of one input x[stages[0].in] of `head`: stages.back().out / 8 bytes.
void HashEncodeRef(const EncoderWeights& weights, int32_t head, const float* x, uint8_t* code);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_HASH_ENCODE_H_
