// clang-format off
#include "kernels/cpu/vec_avx512.h"
// clang-format on
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/matmul_amx_impl.h"

namespace winnow::kernels::amx {

void MatmulTiles(const MatmulCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                 int64_t last_panel) {
  if (call.compute != DType::kBF16) {
    return avx512::MatmulTiles(call, first_row, last_row, first_panel, last_panel);
  }
  TiledMatmul<AmxTiles>::Run(call, first_row, last_row, first_panel, last_panel);
}

}  // namespace winnow::kernels::amx
