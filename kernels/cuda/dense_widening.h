// How much KV of 8 bits dense attention makes bfloat16 at a time (DenseWay::kWidened, dense_attention.h). Host code without CUDA,
// so that tests run anywhere.
#ifndef WINNOW_KERNELS_CUDA_DENSE_WIDENING_H_
#define WINNOW_KERNELS_CUDA_DENSE_WIDENING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/dense_splits.h"
#include "kernels/kv_layout.h"

namespace winnow::kernels::cuda {

// Rows of bfloat16 at once, unless a head of each chunk takes more: as much as any call's workspace may have
// (cuda_backend_impl.h).
inline constexpr size_t kWidenedKvBytes = size_t{256} << 20;

// The copy: [chunks][heads][tokens] rows, all heads or some at a time.
struct WidenedShape {
  int32_t heads = 0;   // at a time; the last time fewer
  int32_t tokens = 0;  // whole units, enough for any chunk
  size_t bytes = 0;
};
// The copy for `num_chunks` chunks that see at most `max_keys` keys; at least one of either.
constexpr WidenedShape ShapeOfWidened(const KvLayout& layout, int32_t num_chunks, int32_t max_keys,
                                      size_t most_bytes = kWidenedKvBytes) {
  const int32_t tokens = DenseUnits(max_keys) * kDenseUnitTokens;
  const size_t head_bytes = size_t{4} * layout.head_dim * tokens * num_chunks;
  const auto most =
      static_cast<int32_t>(std::clamp<size_t>(most_bytes / head_bytes, 1, layout.kv_heads));
  const int32_t times = (layout.kv_heads + most - 1) / most;
  const int32_t heads = (layout.kv_heads + times - 1) / times;
  return {heads, tokens, heads * head_bytes};
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_DENSE_WIDENING_H_
