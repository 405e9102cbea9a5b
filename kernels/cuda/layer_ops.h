// The small operations around attention (backend.h), all bound by memory. Each has the contract of
// its own header in kernels/: rmsnorm.h, rope.h, silu_mul.h, embed_rows.h, write_kv.h. Matrices are
// row-major f32 with a stride in floats.
#ifndef WINNOW_KERNELS_CUDA_LAYER_OPS_H_
#define WINNOW_KERNELS_CUDA_LAYER_OPS_H_

#include "kernels/cuda/device_types.h"
#include "kernels/silu_mul.h"

namespace winnow::kernels::cuda {

struct DeviceMatrix {
  float* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
};

// out may be x. A row's squares are added per thread, then in a fixed tree: the same for every m.
[[nodiscard]] cudaError_t RmsNorm(const DeviceMatrix& x, const float* weight, float eps,
                                  const DeviceMatrix& out, Stream stream);
// The same, rounded and in the order of a product's left operand (matmul.h's OrderedBytes).
// y += the norm of x.
[[nodiscard]] cudaError_t AddRmsNorm(const DeviceMatrix& x, const float* weight, float eps,
                                     const DeviceMatrix& y, Stream stream);
[[nodiscard]] cudaError_t RmsNormOrdered(const DeviceMatrix& x, const float* weight, float eps,
                                         void* ordered, Stream stream);
// The same, as rounded rows (matmul_int8.h).
[[nodiscard]] cudaError_t RmsNormRounded(const DeviceMatrix& x, const float* weight, float eps,
                                         void* rounded, Stream stream);
[[nodiscard]] cudaError_t RmsNormHeads(const DeviceMatrix& x, int32_t head_dim, const float* weight,
                                       float eps, Stream stream);

// Cosines and sines in double of the angle rounded to f32, as rope.cc; `half` inverse frequencies, of which those that
// are 0 give 1 and 0. Rows are multiplied by `factors`, unless it is null.
[[nodiscard]] cudaError_t RopeTable(const int32_t* positions, const float* inv_freq, int32_t half,
                                    float scale, const float* factors, const DeviceMatrix& cos_sin,
                                    Stream stream);
[[nodiscard]] cudaError_t Rope(const DeviceMatrix& x, int32_t head_dim, const DeviceMatrix& cos_sin,
                               Stream stream);

[[nodiscard]] cudaError_t SiluMul(const DeviceMatrix& gate_up, const DeviceMatrix& out,
                                  Stream stream);
[[nodiscard]] cudaError_t GeluTanhMul(const DeviceMatrix& gate_up, const DeviceMatrix& out,
                                      Stream stream);
[[nodiscard]] cudaError_t ClampedSwigluMul(const DeviceMatrix& gate_up, const ClampedSwiglu& by,
                                           const DeviceMatrix& out, Stream stream);

// The same, as RmsNormOrdered.
[[nodiscard]] cudaError_t SiluMulOrdered(const DeviceMatrix& gate_up, void* ordered, Stream stream);

// `table` [vocab][out.cols] of `dtype`, in device memory or pinned host memory. Values are multiplied by `scale`.
[[nodiscard]] cudaError_t EmbedRows(const void* table, DType dtype, const int32_t* ids, float scale,
                                    const DeviceMatrix& out, Stream stream);

// Rows of k and v [m][Hkv*d] into the chunks' blocks, rounded to bf16; `max_chunk_tokens` bounds
// every chunk's num_tokens.
[[nodiscard]] cudaError_t WriteKv(const DeviceMatrix& k, const DeviceMatrix& v,
                                  const DeviceChunk* chunks, int32_t num_chunks,
                                  int32_t max_chunk_tokens, void* pool, const KvLayout& layout,
                                  Stream stream);

// Rope of the chunks' rows of q [m][H*d], in place and by q_cos_sin, and WriteKv of their rows of k, rotated by cos_sin, and
// of v. k itself stays as it is.
[[nodiscard]] cudaError_t RopeAndWriteKv(const DeviceMatrix& q, const DeviceMatrix& k,
                                         const DeviceMatrix& v, const DeviceMatrix& q_cos_sin,
                                         const DeviceMatrix& cos_sin, const DeviceChunk* chunks,
                                         int32_t num_chunks, int32_t max_chunk_tokens, void* pool,
                                         const KvLayout& layout, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_LAYER_OPS_H_
