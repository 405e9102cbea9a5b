#include "kernels/rope.h"

namespace winnow::kernels {

void RopeRef(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) {
  const int32_t half = head_dim / 2;
  for (int64_t i = 0; i < x.rows; ++i) {
    for (float* head = x.f32(i); head < x.f32(i) + x.cols; head += head_dim) {
      for (int32_t j = 0; j < half; ++j) {
        const double cosine = cos_sin.f32(i)[j];
        const double sine = cos_sin.f32(i)[half + j];
        const double a = head[j];
        const double b = head[half + j];
        head[j] = static_cast<float>(a * cosine - b * sine);
        head[half + j] = static_cast<float>(b * cosine + a * sine);
      }
    }
  }
}

}  // namespace winnow::kernels
