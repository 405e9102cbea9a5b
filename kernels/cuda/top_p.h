// PruneSelection (backend.h) on the device: of the candidates, those that the group's heads need to
// reach p of the weight, estimated from four-bit keys (kernels/top_p.h says what is kept).
//
//   q           [rows][H*d] f32, rows `q_stride` floats apart
//   int4_keys   one layer's pool (retrieval.h), 4-byte aligned
//   candidates  counts and tokens in device memory, ascending; `kept` may be the same memory
//
// Weights are float32; the cut adds them as multiples of 2^-31 of the largest, so its sums do not
// depend on an order. They may round otherwise than another backend's: a candidate whose weight
// decides about the last 1e-6 of p may be kept by one and not by the other.
//
// Two launches. `estimate` reads d/2 + 4 bytes and does 2*G*d FLOPs per anchor and candidate and
// writes 4*G bytes; `cut` reads those once into shared memory and bisects there.
#ifndef WINNOW_KERNELS_CUDA_TOP_P_H_
#define WINNOW_KERNELS_CUDA_TOP_P_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

struct TopPShape {
  int32_t num_queries = 0;
  int32_t group = 0;
  KvLayout layout;             // d a multiple of 8 up to 128
  int32_t max_anchors = 0;     // no query sees more tokens outside mid
  int32_t max_candidates = 0;  // no selection is longer
};

size_t TopPWorkspaceBytes(const TopPShape& shape);
ZeroedPart TopPZeroedPart(const TopPShape& shape);

[[nodiscard]] cudaError_t PruneSelection(const TopPShape& shape, const float* q, int64_t q_stride,
                                         const DeviceQuery* queries, const void* int4_keys,
                                         float scale, float p, const Selection& candidates,
                                         const Selection& kept, void* workspace,
                                         cudaStream_t stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_TOP_P_H_
