// clang-format off
#include "kernels/cpu/vec_avx512.h"
// clang-format on
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/quantized_matmul_amx_impl.h"

namespace winnow::kernels::amx {

void QuantizedMatmulTiles(const QuantizedMatmulCall& call, int64_t first_row, int64_t last_row,
                          int64_t first_panel, int64_t last_panel) {
  // 16 threads of a Xeon, a step of 1.3 GB (8 bits) and 0.7 GB (4 bits) in ms: 11.3 to 12.0 and 8.5 to 9.6, so 10.5 to 11.7 and
  // 7.8 to 9.1; 2 KiB ahead 11.9 to 12.9 and 7.8 to 9.4. A Zen 4, with AVX-512 alone, is 5 to 20 % slower when it asks.
  QuantizedMatmulCall asking = call;
  asking.ahead_bytes = 1024;
  TiledQuantizedMatmul<AmxTiles>::Run(asking, first_row, last_row, first_panel, last_panel,
                                      avx512::QuantizedMatmulTiles);
}

}  // namespace winnow::kernels::amx
