// The k mid tokens of the largest score, of equals the later (TopKRef of kernels/logit_select.h), for
// the baselines that score every token or page. SelectByCodes has its own, faster way.
//
//   scores  [num_queries][Hkv][stride] f32, no NaN; -0 and 0 are equal. A token t has the score at
//           t / tokens_per_score
//   counts  [num_queries][Hkv] how many to choose; null: each query's k
//   chosen  counts and tokens in device memory; tokens ascend
//
// One block a list: a radix selection of four passes over the scores, then one in order. Exact, so
// no order of anything shows. Reads 4 bytes of score per mid token five times.
#ifndef WINNOW_KERNELS_CUDA_TOP_K_H_
#define WINNOW_KERNELS_CUDA_TOP_K_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

struct TopKScores {
  const float* scores = nullptr;
  int64_t stride = 0;
  int32_t tokens_per_score = 1;  // a power of two
  int32_t unused = 0;
};

[[nodiscard]] cudaError_t SelectTopK(const DeviceQuery* queries, int32_t num_queries,
                                     const TopKScores& scores, const int32_t* counts,
                                     const Selection& chosen, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_TOP_K_H_
