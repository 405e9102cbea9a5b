// Rotary position embedding: its table, made once per forward pass, and its use, once per layer.
//
//   cos_sin [m][d]: d/2 cosines, then d/2 sines, times `scale`; 1 and 0 where the inverse frequency is 0, so that such a
//                   pair is neither turned nor scaled. All of a row are then multiplied by the row's factor
//   x [m][heads*d] f32, in place: (x[j], x[j+d/2]) is a pair of each head
//
// The angle is position * inv_freq rounded to f32; its cosine and sine are computed in double.
// Each value has one fixed expression; nothing is summed.
// Rope: reads and writes x, reads the table; 6 FLOPs per pair. Bound by memory.
#ifndef WINNOW_KERNELS_ROPE_H_
#define WINNOW_KERNELS_ROPE_H_

#include <cstdint>
#include <span>

#include "kernels/tensor.h"

namespace winnow::kernels {

constexpr double RopeFlops(int64_t m, int64_t heads, int64_t d) {
  return 3.0 * static_cast<double>(m) * static_cast<double>(heads) * static_cast<double>(d);
}
constexpr double RopeBytes(int64_t m, int64_t heads, int64_t d) {
  return 4.0 * static_cast<double>(m) * static_cast<double>(d) *
         (2.0 * static_cast<double>(heads) + 1.0);
}

// One row of the table; every backend on the host uses it, so that there is one rounding.
void RopeTableRow(int32_t position, std::span<const float> inv_freq, float scale, float factor,
                  float* cos_sin);

void RopeRef(const Tensor& x, int32_t head_dim, const Tensor& cos_sin);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_ROPE_H_
