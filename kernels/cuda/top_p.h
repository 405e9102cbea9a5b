// PruneSelection (backend.h) on the device: of the candidates, those that the group's heads need to
// reach p of the weight, estimated from four-bit keys (kernels/top_p.h says what is kept).
//
//   q           [rows][H*d] f32, rows `q_stride` floats apart
//   int4_keys   one layer's pool (retrieval.h), 4-byte aligned
//   candidates  counts and tokens in device memory, ascending; `kept` may be the same memory
//
// Weights are float32. The cut adds those that may be kept exactly, and anchors and the lighter ones as
// multiples of 2^-40 of the largest, so that its sums depend neither on an order nor on a split. They may
// round otherwise than another backend's: a candidate whose weight decides about the last 1e-6 of p may
// be kept by one and not by the other.
//
// One launch. It reads d/2 + 4 bytes and does 2*G*d FLOPs per anchor and candidate, once for every four
// heads of the group. The workspace is for selections that do not fit in shared memory; it holds 16
// bytes an anchor and candidate.
#ifndef WINNOW_KERNELS_CUDA_TOP_P_H_
#define WINNOW_KERNELS_CUDA_TOP_P_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

struct TopPShape {
  int32_t num_queries = 0;
  int32_t group = 0;
  KvLayout layout;             // d a multiple of 8 up to 128
  int32_t max_anchors = 0;     // no query sees more tokens outside mid; 2^22 at most
  int32_t max_candidates = 0;  // no selection is longer; 2^22 at most
};

size_t TopPWorkspaceBytes(const TopPShape& shape);

[[nodiscard]] cudaError_t PruneSelection(const TopPShape& shape, const float* q, int64_t q_stride,
                                         const DeviceQuery* queries, const void* int4_keys,
                                         float scale, float p, const Selection& candidates,
                                         const Selection& kept, void* workspace, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_TOP_P_H_
