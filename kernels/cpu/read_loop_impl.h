// A plain read loop, as fast as loads go: the baseline of kernels/bench.h. Compiled by
// read_loop_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {

uint64_t ReadLoop(const void* data, size_t size_bytes) {
  // The widest loads that the flags allow; the compiler cuts the type into its registers.
  using Line = uint64_t __attribute__((vector_size(64)));
  const Line* lines = static_cast<const Line*>(data);
  const size_t count = size_bytes / sizeof(Line);
  Line sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int j = 0; j < 4; ++j) sums[j] ^= lines[i + j];
  }
  for (; i < count; ++i) sums[0] ^= lines[i];
  const Line sum = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
  uint64_t folded = 0;
  for (int j = 0; j < 8; ++j) folded ^= sum[j];
  return folded;
}

}  // namespace winnow::kernels::WINNOW_ISA
