// clang-format off
#include "kernels/cpu/vec_avx512.h"
#undef WINNOW_ISA
#define WINNOW_ISA amx
// clang-format on
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/attention_impl.h"

namespace winnow::kernels::amx {
namespace {

struct AmxPanels : BF16Panels {
  using Tiles = AmxTiles;
};

}  // namespace

// KV of float32 is AVX-512's.
void AttendSplits(const AttentionCall& call, const AttentionTile& tile, int32_t first_split,
                  int32_t last_split, bool merge, float* states, std::byte* scratch) {
  ForKvType(call.layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    if constexpr (kKv == DType::kF32) {
      return avx512::AttendSplits(call, tile, first_split, last_split, merge, states, scratch);
    } else {
      Attend<AmxPanels, kKv>(call, tile, first_split, last_split, merge, states, scratch);
      AmxTiles::Release();
    }
  });
}

}  // namespace winnow::kernels::amx
