// Sample (backend.h, kernels/sample.h) on the device: rows of logits to tokens.
//
//   logits   [rows][vocab] f32, rows `stride` floats apart
//   results  [rows], device memory or pinned host memory
//
// One launch: the blocks of a row are a cluster on compute capability 9.0, one block elsewhere. Sums are of
// integers, so their number never shows. Each block holds its part of the row in shared memory where that
// fits, else in the workspace.
#ifndef WINNOW_KERNELS_CUDA_SAMPLE_H_
#define WINNOW_KERNELS_CUDA_SAMPLE_H_

#include "kernels/cuda/device_types.h"
#include "kernels/sample.h"

namespace winnow::kernels::cuda {

struct SampleShape {
  int32_t num_rows = 0;
  int32_t vocab_size = 0;
};

// kernels/sample.h's SampleRow.
struct DeviceSampleRow {
  const LogitEdit* edits = nullptr;
  const int32_t* masked = nullptr;
  const uint32_t* allowed = nullptr;  // null: every token
  int32_t num_edits = 0, num_masked = 0;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1, min_p = 0;
  int32_t top_logprobs = -1;
  uint64_t noise = 0;
  int32_t given = -1;
};

// May be 0. Need not be zeroed.
size_t SampleWorkspaceBytes(const SampleShape& shape);

[[nodiscard]] cudaError_t Sample(const SampleShape& shape, const float* logits, int64_t stride,
                                 const DeviceSampleRow* rows, SampledToken* results,
                                 void* workspace, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_SAMPLE_H_
