// The next tokens: rows of logits sampled where they are.
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/sample.h"

namespace winnow::kernels::cuda {

void CudaBackend::Sample(const Tensor& logits, std::span<const SampleRow> rows,
                         SampledToken* sampled) {
  WINNOW_CHECK(logits.dtype == DType::kF32 && logits.rows == static_cast<int64_t>(rows.size()));
  size_t bytes = rows.size() * sizeof(DeviceSampleRow) + 256;
  for (const SampleRow& row : rows) {
    CheckSampleRow(row, logits.cols);
    bytes += row.edits.size_bytes() + row.masked.size_bytes() + row.allowed.size_bytes() + 3 * 16;
  }
  if (!BeginStaging(bytes)) return;
  sample_rows_.clear();
  for (const SampleRow& row : rows) {
    sample_rows_.push_back(
        {Stage(row.edits), Stage(row.masked), row.allowed.empty() ? nullptr : Stage(row.allowed),
         static_cast<int32_t>(row.edits.size()), static_cast<int32_t>(row.masked.size()),
         row.repetition_penalty, row.presence_penalty, row.frequency_penalty, row.temperature,
         row.top_k, row.top_p, row.min_p, row.top_logprobs, row.noise, row.given});
  }
  const DeviceSampleRow* on_device = Stage(std::span<const DeviceSampleRow>(sample_rows_));
  const SampleShape shape{static_cast<int32_t>(rows.size()), static_cast<int32_t>(logits.cols)};
  if (!EndStaging() || !Grow(sample_, SampleWorkspaceBytes(shape), "sampling")) return;
  Good(cuda::Sample(shape, logits.f32(), logits.stride, on_device, sampled, sample_.data(),
                    stream()),
       "sampling");
}

}  // namespace winnow::kernels::cuda
