// See kernels/embed_rows.h. Compiled by embed_rows_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// The last values go through a buffer: a table may end with the last page of a file.
template <Vec::Reg (*kLoad)(const uint16_t*)>
inline void Widen(const std::byte* from, int64_t n, float* out) {
  constexpr int kLanes = Vec::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    uint16_t values[kLanes];  // the table may lie at an odd address
    __builtin_memcpy(values, from + 2 * i, sizeof(values));
    Vec::Store(out + i, kLoad(values));
  }
  if (i < n) {
    uint16_t values[kLanes] = {};
    __builtin_memcpy(values, from + 2 * i, static_cast<size_t>(2 * (n - i)));
    Vec::StoreFirst(out + i, static_cast<int>(n - i), kLoad(values));
  }
}

}  // namespace

void WidenRow(const void* values, DType dtype, int64_t n, float* out) {
  const std::byte* from = static_cast<const std::byte*>(values);
  switch (dtype) {
    case DType::kF32:
      __builtin_memcpy(out, from, static_cast<size_t>(4 * n));
      return;
    case DType::kF16:
      return Widen<Vec::LoadF16>(from, n, out);
    case DType::kBF16:
      return Widen<Vec::LoadBF16>(from, n, out);
    case DType::kI8:
    case DType::kF8:
      break;  // types of KV alone
  }
}

}  // namespace winnow::kernels::WINNOW_ISA
