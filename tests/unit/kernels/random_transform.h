// Transform codes of random widths and weights, whose indexes of normal keys fill their ranges.
#ifndef WINNOW_TESTS_UNIT_KERNELS_RANDOM_TRANSFORM_H_
#define WINNOW_TESTS_UNIT_KERNELS_RANDOM_TRANSFORM_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/transform_code.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {

inline TransformCodeHead RandomTransformHead(Random& random, int32_t d, int32_t bits, bool delta) {
  TransformCodeHead head;
  int32_t left = bits / 4;
  while (left > 0) {
    // What is left must fit into the quads that are left.
    const int32_t quads_left = d / 4 - static_cast<int32_t>(head.widths.size());
    const int32_t least = std::max(1, left - 8 * (quads_left - 1));
    const auto width = static_cast<int32_t>(
        random.Int(least, std::max<int64_t>(least, std::min<int64_t>(left, 8))));
    head.widths.push_back(static_cast<uint8_t>(width));
    left -= width;
  }
  head.quads = static_cast<int32_t>(head.widths.size());
  head.fields = LayCodeFields(head.widths, bits / 32);
  const int32_t n = 4 * head.quads;
  for (int32_t c = 0; c < d; ++c) {
    for (int32_t i = 0; i < n; ++i) {
      const float levels = static_cast<float>(1 << head.widths[i / 4]);
      head.key_weight.push_back(random.Normal(levels / 4 / std::sqrt(static_cast<float>(d))));
      head.query_weight.push_back(random.Normal(0.5f / levels));
    }
    head.mean.push_back(random.Normal(0.3f));
  }
  for (int32_t i = 0; i < n; ++i) {
    head.key_bias.push_back(static_cast<float>(1 << head.widths[i / 4]) / 2 + random.Normal(0.3f));
  }
  if (delta) {
    for (int32_t i = 0; i < 3 * d; ++i) head.delta_weight.push_back(random.Normal(0.05f));
  }
  const auto cell_bits = random.Int(0, 8);
  for (int64_t i = 0; i < cell_bits; ++i) {
    head.cell_bits.push_back(static_cast<uint8_t>(random.Int(0, bits - 1)));
  }
  head.tail = true;
  return head;
}

inline TransformCodeWeights RandomTransform(Random& random, int32_t d, int32_t kv_heads,
                                            int32_t bits, bool delta = false) {
  TransformCodeWeights weights;
  weights.head_dim = d;
  weights.bits = bits;
  for (int32_t head = 0; head < kv_heads; ++head) {
    weights.heads.push_back(RandomTransformHead(random, d, bits, delta));
  }
  return weights;
}

// A residual code of random widths, which refines random dimensions of the first; some it refines none.
inline TransformCodeWeights RandomResidual(Random& random, const TransformCodeWeights& first,
                                           int32_t bits) {
  TransformCodeWeights residual =
      RandomTransform(random, first.head_dim, static_cast<int32_t>(first.heads.size()), bits);
  for (size_t h = 0; h < first.heads.size(); ++h) {
    TransformCodeHead& head = residual.heads[h];
    head.mean.assign(first.head_dim, 0);
    head.cell_bits.clear();
    head.tail = false;
    for (int32_t i = 0; i < 4 * head.quads; ++i) {
      const int32_t of_first = 4 * first.heads[h].quads;
      const auto dim = static_cast<int16_t>(random.Int(-1, of_first - 1));
      head.first_dims.push_back(dim);
      head.first_steps.push_back(dim < 0 ? 0 : random.Normal(1));
    }
  }
  return residual;
}

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_RANDOM_TRANSFORM_H_
