#include "kernels/cpu/top_k.h"

#include <cstddef>

namespace winnow::kernels {

void SelectTopK(std::span<const float> scores, int64_t k, int32_t first, int32_t* chosen) {
  if (k <= 0) return;
  const auto [threshold, of_equal] = FindTop(scores, k, [](size_t) { return 1; });
  int64_t equal = of_equal;
  int32_t* to = chosen + k;  // from the end, so that the later of equals come first
  for (size_t i = scores.size(); to != chosen; --i) {
    const uint32_t bits = OrderedBits(scores[i - 1]);
    if (bits < threshold || (bits == threshold && equal-- <= 0)) continue;
    *--to = first + static_cast<int32_t>(i - 1);
  }
}

}  // namespace winnow::kernels
