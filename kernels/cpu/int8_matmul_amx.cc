// clang-format off
#include "kernels/cpu/vec_avx512.h"
// clang-format on
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/int8_matmul_amx_impl.h"

namespace winnow::kernels::amx {

void Int8MatmulTiles(const Int8MatmulCall& call, int64_t first_row, int64_t last_row,
                     int64_t first_panel, int64_t last_panel) {
  constexpr int64_t kLeastRows = 4;  // that tiles are worth it for
  if (last_row - first_row >= kLeastRows) {
    return TiledInt8Matmul<AmxTiles>::Run(call, first_row, last_row, first_panel, last_panel);
  }
  Int8MatmulCall asking = call;
  asking.ahead_bytes = 1024;
  avx512::Int8MatmulTiles(asking, first_row, last_row, first_panel, last_panel);
}

}  // namespace winnow::kernels::amx
