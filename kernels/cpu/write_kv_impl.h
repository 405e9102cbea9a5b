// See kernels/write_kv.h. Compiled by write_kv_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {

void NarrowRow(const float* values, int64_t n, DType dtype, void* out) {
  if (dtype == DType::kF32) {
    __builtin_memcpy(out, values, static_cast<size_t>(4 * n));
    return;
  }
  constexpr int kLanes = Vec::kLanes;
  uint16_t* to = static_cast<uint16_t*>(out);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Vec::StoreBF16(to + i, Vec::Load(values + i));
  if (i < n) {
    uint16_t rest[kLanes];
    Vec::StoreBF16(rest, Vec::LoadFirst(values + i, static_cast<int>(n - i)));
    __builtin_memcpy(to + i, rest, static_cast<size_t>(2 * (n - i)));
  }
}

}  // namespace winnow::kernels::WINNOW_ISA
