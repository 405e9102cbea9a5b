// SelectByLogits and MeasureSelection (backend.h, kernels/logit_select.h) on the device: the oracle,
// and what a selection covers of the attention mass. A baseline and a measurement: both read every
// key twice.
//
//   q       [rows][H*d] f32, rows `q_stride` floats apart
//   pool    one layer's blocks, bf16
//   chosen  counts and tokens in device memory
//
// Order, fixed by position alone: a logit is one sum per lane and a fixed tree over lanes; sums of
// weights over splits of kLogitSplitTokens tokens are merged from left to right. float32 but for the
// coverage, which is added in double. Two tokens whose masses differ by less than rounding may come
// in another order than on the CPU; tokens with the same key have the same mass.
#ifndef WINNOW_KERNELS_CUDA_LOGIT_SELECT_H_
#define WINNOW_KERNELS_CUDA_LOGIT_SELECT_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

inline constexpr int32_t kMaxLogitGroup = 16;

struct LogitSelectShape {
  int32_t num_queries = 0;
  int32_t group = 0;     // up to kMaxLogitGroup
  KvLayout layout;       // d a multiple of 2
  int32_t max_keys = 0;  // no query sees more
};

// Masses of all tokens: 4 bytes for each, KV head and query. Need not be zeroed.
size_t LogitSelectWorkspaceBytes(const LogitSelectShape& shape);

[[nodiscard]] cudaError_t SelectByLogits(const LogitSelectShape& shape, const float* q,
                                         int64_t q_stride, const DeviceQuery* queries,
                                         const void* pool, float scale, const Selection& chosen,
                                         void* workspace, Stream stream);

// quality [num_queries][Hkv] in device memory. `max_chosen`: no list is longer.
size_t MeasureSelectionWorkspaceBytes(const LogitSelectShape& shape, int32_t max_chosen);
[[nodiscard]] cudaError_t MeasureSelection(const LogitSelectShape& shape, int32_t max_chosen,
                                           const float* q, int64_t q_stride,
                                           const DeviceQuery* queries, const void* pool,
                                           float scale, const Selection& chosen,
                                           SelectionQuality* quality, void* workspace,
                                           Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_LOGIT_SELECT_H_
