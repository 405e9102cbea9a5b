// Single elements of weights as they lie in a file, which may be at any address.
#ifndef WINNOW_KERNELS_HOST_MATRIX_H_
#define WINNOW_KERNELS_HOST_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/model_ops.h"

namespace winnow::kernels {

inline const std::byte* RowOf(const HostMatrix& matrix, int64_t row) {
  return static_cast<const std::byte*>(matrix.data) +
         row * matrix.cols * static_cast<int64_t>(DTypeBytes(matrix.dtype));
}

// Value `i` of values of type `dtype`, widened.
inline float ElementAt(const void* values, DType dtype, int64_t i) {
  const std::byte* address =
      static_cast<const std::byte*>(values) + i * static_cast<int64_t>(DTypeBytes(dtype));
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, address, sizeof(x));
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, address, sizeof(bits));
  return dtype == DType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
}

inline float ElementOf(const HostMatrix& matrix, int64_t row, int64_t col) {
  return ElementAt(RowOf(matrix, row), matrix.dtype, col);
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_HOST_MATRIX_H_
