// Mapping. A block is a row (RmsNorm: of a head where heads are normed), its threads go over the
// row; each value is read once, or a second time from L1.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/layer_ops.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const float* x, int64_t x_stride, const float* weight, float eps, float* out,
                  int64_t out_stride, int32_t cols) {
  __shared__ float sums[kThreads / 32];
  x += blockIdx.x * x_stride + int64_t{blockIdx.y} * cols;
  out += blockIdx.x * out_stride + int64_t{blockIdx.y} * cols;
  float squares = 0.0f;
  for (int32_t i = threadIdx.x; i < cols; i += kThreads) squares = fmaf(x[i], x[i], squares);
  squares = WarpSum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) squares += sums[w];
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(cols) + eps);
  for (int32_t i = threadIdx.x; i < cols; i += kThreads) out[i] = x[i] * scale * weight[i];
}

__global__ void RopeTableKernel(const int32_t* positions, const float* inv_freq, int32_t half,
                                float scale, float* cos_sin, int64_t stride) {
  const auto position = static_cast<float>(positions[blockIdx.x]);
  float* row = cos_sin + blockIdx.x * stride;
  for (int32_t j = threadIdx.x; j < half; j += blockDim.x) {
    const float angle = __fmul_rn(position, inv_freq[j]);
    row[j] = static_cast<float>(cos(static_cast<double>(angle))) * scale;
    row[half + j] = static_cast<float>(sin(static_cast<double>(angle))) * scale;
  }
}

__global__ void __launch_bounds__(kThreads)
    RopeKernel(float* x, int64_t x_stride, int32_t cols, int32_t head_dim, const float* cos_sin,
               int64_t table_stride) {
  const int32_t half = head_dim / 2;
  const float* table = cos_sin + blockIdx.x * table_stride;
  float* row = x + blockIdx.x * x_stride;
  for (int32_t i = threadIdx.x; i < cols / 2; i += kThreads) {
    const int32_t j = i % half;
    float* pair = row + i / half * head_dim + j;
    const float a = pair[0], b = pair[half], cosine = table[j], sine = table[half + j];
    pair[0] = a * cosine - b * sine;
    pair[half] = b * cosine + a * sine;
  }
}

__global__ void __launch_bounds__(kThreads)
    SiluMulKernel(const float* gate_up, int64_t from_stride, float* out, int64_t out_stride,
                  int32_t cols) {
  const float* gate = gate_up + blockIdx.y * from_stride;
  for (int32_t i = blockIdx.x * kThreads + threadIdx.x; i < cols; i += gridDim.x * kThreads) {
    const float g = gate[i];
    out[blockIdx.y * out_stride + i] = g / (1.0f + expf(-g)) * gate[cols + i];
  }
}

template <typename Load>
__device__ __forceinline__ void Embed(Load load, const int32_t* ids, float* out, int64_t stride,
                                      int32_t cols) {
  const int64_t from = int64_t{ids[blockIdx.x]} * cols;
  for (int32_t i = threadIdx.x; i < cols; i += kThreads) {
    out[blockIdx.x * stride + i] = load(from + i);
  }
}
__device__ float WidenF16(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__global__ void __launch_bounds__(kThreads)
    EmbedKernel(const void* table, DType dtype, const int32_t* ids, float* out, int64_t stride,
                int32_t cols) {
  if (dtype == DType::kF32) {
    Embed([&](int64_t i) { return static_cast<const float*>(table)[i]; }, ids, out, stride, cols);
  } else if (dtype == DType::kBF16) {
    Embed([&](int64_t i) { return WidenBf16(static_cast<const uint16_t*>(table)[i]); }, ids, out,
          stride, cols);
  } else {
    Embed([&](int64_t i) { return WidenF16(static_cast<const uint16_t*>(table)[i]); }, ids, out,
          stride, cols);
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteKvKernel(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                  const DeviceChunk* chunks, uint16_t* pool, const FastDivider block_tokens,
                  int64_t block_values, int64_t head_values, int32_t kv_heads, int32_t head_dim) {
  const DeviceChunk chunk = chunks[blockIdx.y];
  const auto i = static_cast<int32_t>(blockIdx.x);
  if (i >= chunk.num_tokens) return;
  const int32_t position = chunk.position + i, block = block_tokens.Divide(position);
  uint16_t* token = pool + chunk.block_table[block] * block_values +
                    int64_t{position - block * block_tokens.divisor()} * 2 * head_dim;
  const float* from_k = k + (chunk.first_row + i) * k_stride;
  const float* from_v = v + (chunk.first_row + i) * v_stride;
  for (int32_t j = threadIdx.x; j < kv_heads * head_dim; j += kThreads) {
    uint16_t* row = token + j / head_dim * head_values;
    row[j % head_dim] = RoundBf16(from_k[j]);
    row[head_dim + j % head_dim] = RoundBf16(from_v[j]);
  }
}

bool TooMany(int64_t blocks) { return blocks > 0x7fffffff; }

}  // namespace

cudaError_t RmsNorm(const DeviceMatrix& x, const float* weight, float eps, const DeviceMatrix& out,
                    cudaStream_t stream) {
  if (TooMany(x.rows) || out.rows != x.rows || out.cols != x.cols) return cudaErrorInvalidValue;
  if (x.rows == 0) return cudaSuccess;
  RmsNormKernel<<<static_cast<unsigned>(x.rows), kThreads, 0, stream>>>(
      x.data, x.stride, weight, eps, out.data, out.stride, static_cast<int32_t>(x.cols));
  return cudaGetLastError();
}

cudaError_t RmsNormHeads(const DeviceMatrix& x, int32_t head_dim, const float* weight, float eps,
                         cudaStream_t stream) {
  if (TooMany(x.rows) || head_dim < 1 || x.cols % head_dim != 0 || x.cols / head_dim > 65535) {
    return cudaErrorInvalidValue;
  }
  if (x.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(x.rows), static_cast<unsigned>(x.cols / head_dim));
  RmsNormKernel<<<grid, kThreads, 0, stream>>>(x.data, x.stride, weight, eps, x.data, x.stride,
                                               head_dim);
  return cudaGetLastError();
}

cudaError_t RopeTable(const int32_t* positions, const float* inv_freq, int32_t half, float scale,
                      const DeviceMatrix& cos_sin, cudaStream_t stream) {
  if (TooMany(cos_sin.rows) || cos_sin.cols != 2 * half) return cudaErrorInvalidValue;
  if (cos_sin.rows == 0) return cudaSuccess;
  RopeTableKernel<<<static_cast<unsigned>(cos_sin.rows), 64, 0, stream>>>(
      positions, inv_freq, half, scale, cos_sin.data, cos_sin.stride);
  return cudaGetLastError();
}

cudaError_t Rope(const DeviceMatrix& x, int32_t head_dim, const DeviceMatrix& cos_sin,
                 cudaStream_t stream) {
  if (TooMany(x.rows) || head_dim < 2 || head_dim % 2 != 0 || x.cols % head_dim != 0 ||
      cos_sin.cols != head_dim || cos_sin.rows < x.rows) {
    return cudaErrorInvalidValue;
  }
  if (x.rows == 0) return cudaSuccess;
  RopeKernel<<<static_cast<unsigned>(x.rows), kThreads, 0, stream>>>(
      x.data, x.stride, static_cast<int32_t>(x.cols), head_dim, cos_sin.data, cos_sin.stride);
  return cudaGetLastError();
}

cudaError_t SiluMul(const DeviceMatrix& gate_up, const DeviceMatrix& out, cudaStream_t stream) {
  if (gate_up.cols != 2 * out.cols || gate_up.rows != out.rows || out.rows > 65535) {
    return cudaErrorInvalidValue;
  }
  if (out.rows == 0 || out.cols == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(CeilDiv(out.cols, kThreads * 4)),
                  static_cast<unsigned>(out.rows));
  SiluMulKernel<<<grid, kThreads, 0, stream>>>(gate_up.data, gate_up.stride, out.data, out.stride,
                                               static_cast<int32_t>(out.cols));
  return cudaGetLastError();
}

cudaError_t EmbedRows(const void* table, DType dtype, const int32_t* ids, const DeviceMatrix& out,
                      cudaStream_t stream) {
  if (TooMany(out.rows)) return cudaErrorInvalidValue;
  if (out.rows == 0) return cudaSuccess;
  EmbedKernel<<<static_cast<unsigned>(out.rows), kThreads, 0, stream>>>(
      table, dtype, ids, out.data, out.stride, static_cast<int32_t>(out.cols));
  return cudaGetLastError();
}

cudaError_t WriteKv(const DeviceMatrix& k, const DeviceMatrix& v, const DeviceChunk* chunks,
                    int32_t num_chunks, int32_t max_chunk_tokens, void* pool,
                    const KvLayout& layout, cudaStream_t stream) {
  if (layout.dtype != DType::kBF16 || num_chunks < 0 || num_chunks > 65535 ||
      k.cols != int64_t{layout.kv_heads} * layout.head_dim || v.cols != k.cols) {
    return cudaErrorInvalidValue;
  }
  if (num_chunks == 0 || max_chunk_tokens <= 0) return cudaSuccess;
  WriteKvKernel<<<dim3(max_chunk_tokens, num_chunks), kThreads, 0, stream>>>(
      k.data, k.stride, v.data, v.stride, chunks, static_cast<uint16_t*>(pool),
      FastDivider(layout.block_tokens), static_cast<int64_t>(layout.BlockBytes() / 2),
      static_cast<int64_t>(layout.HeadBytes() / 2), layout.kv_heads, layout.head_dim);
  return cudaGetLastError();
}

}  // namespace winnow::kernels::cuda
