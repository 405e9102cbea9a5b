// clang-format off
#include "kernels/cpu/vec_avx512.h"
// clang-format on
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/quantized_matmul_amx_impl.h"

namespace winnow::kernels::amx {

void QuantizedMatmulTiles(const QuantizedMatmulCall& call, int64_t first_row, int64_t last_row,
                          int64_t first_panel, int64_t last_panel) {
  TiledQuantizedMatmul<AmxTiles>::Run(call, first_row, last_row, first_panel, last_panel,
                                      avx512::QuantizedMatmulTiles);
}

}  // namespace winnow::kernels::amx
