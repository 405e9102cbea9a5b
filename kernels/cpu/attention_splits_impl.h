// AttendSplits by the products of tile_impl.h. Compiled by attention_{scalar,avx2,avx512}.cc.
#include <type_traits>

#include "kernels/cpu/attention_impl.h"

namespace winnow::kernels::WINNOW_ISA {

void AttendSplits(const AttentionCall& call, const AttentionTile& tile, int32_t first_split,
                  int32_t last_split, bool merge, float* states, std::byte* scratch) {
  ForKvType(call.layout.dtype, [&]<DType kKv>(KvType<kKv>) {
#if defined(__AVX512BF16__)
    using Panels = std::conditional_t<kKv == DType::kF32, F32Panels, BF16Panels>;
#else
    using Panels = F32Panels;
#endif
    Attend<Panels, kKv>(call, tile, first_split, last_split, merge, states, scratch);
  });
}

}  // namespace winnow::kernels::WINNOW_ISA
