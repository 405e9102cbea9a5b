// The next token of each row of logits (kernels/sample.h): penalties, masks, temperature, truncation and draw in one
// operation, so that logits need not leave the device.
#ifndef WINNOW_KERNELS_SAMPLING_OPS_H_
#define WINNOW_KERNELS_SAMPLING_OPS_H_

#include <span>

#include "kernels/sample.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

class SamplingOps {
 public:
  // sampled [rows.size()], in shared memory: the next token of each row of logits [rows][vocab]
  // (sample.h), there after Synchronize. REQUIRES: ids within the vocabulary; logits are not changed.
  virtual void Sample(const Tensor& logits, std::span<const SampleRow> rows,
                      SampledToken* sampled) = 0;

 protected:
  ~SamplingOps() = default;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_SAMPLING_OPS_H_
