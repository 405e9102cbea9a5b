// out[i] = table[ids[i]] widened to f32, times `scale`: exact where that is 1, else one rounding.
//
//   table [vocab][n] of any dtype, in host memory, at any address; out [m][n] f32.
//
// Reads m*n values of the table, writes 4*m*n bytes; m*n FLOPs.
#ifndef WINNOW_KERNELS_EMBED_ROWS_H_
#define WINNOW_KERNELS_EMBED_ROWS_H_

#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/model_ops.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

constexpr double EmbedRowsFlops(int64_t m, int64_t n) {
  return static_cast<double>(m) * static_cast<double>(n);
}
constexpr double EmbedRowsBytes(int64_t m, int64_t n, DType table) {
  return static_cast<double>(m) * static_cast<double>(n) *
         (4.0 + static_cast<double>(DTypeBytes(table)));
}

void EmbedRowsRef(const HostMatrix& table, std::span<const int32_t> ids, float scale,
                  const Tensor& out);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_EMBED_ROWS_H_
