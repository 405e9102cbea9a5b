// QuantizeKeys (backend.h) on the device: the same bits as kernels/int4_keys.h says, because each
// step is one float32 operation.
//
// Reads d values of K and writes d/2 + 4 bytes per token and head.
#ifndef WINNOW_KERNELS_CUDA_INT4_KEYS_H_
#define WINNOW_KERNELS_CUDA_INT4_KEYS_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

// d a multiple of 8 up to 128; `int4_keys` is one layer's pool (retrieval.h), 4-byte aligned.
[[nodiscard]] cudaError_t QuantizeKeys(const DeviceKeySpan* spans, int32_t num_spans,
                                       int32_t max_span_tokens, const void* pool,
                                       const KvLayout& layout, void* int4_keys, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_INT4_KEYS_H_
