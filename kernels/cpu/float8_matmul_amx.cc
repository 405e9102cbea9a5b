// clang-format off
#include "kernels/cpu/vec_avx512.h"
// clang-format on
#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/float8_matmul_amx_impl.h"

namespace winnow::kernels::amx {

void Float8MatmulTiles(const Float8MatmulCall& call, int64_t first_row, int64_t last_row,
                       int64_t first_panel, int64_t last_panel) {
  // Denormals are zero, going in and coming out, as tiles have it by themselves.
  constexpr unsigned kDenormalsAreZero = 0x8040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kDenormalsAreZero);
  TiledFloat8Matmul<AmxTiles>::Run(call, first_row, last_row, first_panel, last_panel);
  _mm_setcsr(before);
}

}  // namespace winnow::kernels::amx
