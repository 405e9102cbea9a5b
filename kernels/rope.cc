#include "kernels/rope.h"

#include <cmath>

namespace winnow::kernels {

void RopeTableRow(int32_t position, std::span<const float> inv_freq, float scale, float factor,
                  float* cos_sin) {
  const size_t half = inv_freq.size();
  for (size_t j = 0; j < half; ++j) {
    const float angle = static_cast<float>(position) * inv_freq[j];
    const float by = inv_freq[j] == 0 ? 1 : scale;
    cos_sin[j] = static_cast<float>(std::cos(static_cast<double>(angle))) * by * factor;
    cos_sin[half + j] = static_cast<float>(std::sin(static_cast<double>(angle))) * by * factor;
  }
}

}  // namespace winnow::kernels
