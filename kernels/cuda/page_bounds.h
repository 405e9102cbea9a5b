// BoundKeys and SelectByBounds (backend.h, kernels/page_bounds.h) on the device: Quest, a baseline.
//
//   bounds  one layer's pool (retrieval.h): pages of min[d], max[d], bf16
//
// Bounds are stored values, so they are the CPU's to the bit. A page's score is one sum per lane and
// a fixed tree over lanes; two pages whose scores differ by less than rounding may come in another
// order than on the CPU.
//
// BoundKeys reads the K half of the pages' rows and writes 2*d values a page. SelectByBounds reads
// 2*d values a page; then top_k.h.
#ifndef WINNOW_KERNELS_CUDA_PAGE_BOUNDS_H_
#define WINNOW_KERNELS_CUDA_PAGE_BOUNDS_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

// `layout` bf16, block_tokens a multiple of kBoundPageTokens, d even and up to 1024.
[[nodiscard]] cudaError_t BoundKeys(const DeviceKeySpan* spans, int32_t num_spans,
                                    int32_t max_span_tokens, const void* pool,
                                    const KvLayout& layout, void* bounds, Stream stream);

struct BoundSelectShape {
  int32_t num_queries = 0;
  int32_t group = 0;
  KvLayout layout;
  int32_t max_mid_last = 0;  // no query's mid ends later
};

// Scores of all pages. Need not be zeroed.
size_t BoundSelectWorkspaceBytes(const BoundSelectShape& shape);

[[nodiscard]] cudaError_t SelectByBounds(const BoundSelectShape& shape, const float* q,
                                         int64_t q_stride, const DeviceQuery* queries,
                                         const void* bounds, const Selection& chosen,
                                         void* workspace, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_PAGE_BOUNDS_H_
