// See kernels/write_kv.h. Compiled by write_kv_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"
#include "kernels/cpu/row_pairs_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

template <DType kKv>
inline void Narrow(const float* values, int64_t d, std::byte* to) {
  if constexpr (kKv == DType::kF32) {
    __builtin_memcpy(to, values, static_cast<size_t>(4 * d));
  } else {
    for (int64_t i = 0; i < d; i += Vec::kLanes) {
      Vec::StoreBF16(reinterpret_cast<uint16_t*>(to) + i, Vec::Load(values + i));
    }
  }
}

template <DType kKv>
inline void Widen(const std::byte* from, int64_t d, float* values) {
  for (int64_t i = 0; i < d; i += Vec::kLanes) {
    Vec::Store(values + i, LoadOne<kKv>(from + i * static_cast<int64_t>(DTypeBytes(kKv))));
  }
}

}  // namespace

void WriteKvRow(const float* key, const float* value, int64_t d, DType dtype, std::byte* row) {
  ForKvType(dtype, [&]<DType kKv>(KvType<kKv>) {
    Narrow<kKv>(key, d, row);
    Narrow<kKv>(value, d, row + d * static_cast<int64_t>(DTypeBytes(kKv)));
  });
}

void ReadKvRow(const std::byte* row, int64_t d, DType dtype, float* key, float* value) {
  ForKvType(dtype, [&]<DType kKv>(KvType<kKv>) {
    if (key != nullptr) Widen<kKv>(row, d, key);
    if (value != nullptr) {
      Widen<kKv>(row + d * static_cast<int64_t>(DTypeBytes(kKv)), d, value);
    }
  });
}

}  // namespace winnow::kernels::WINNOW_ISA
