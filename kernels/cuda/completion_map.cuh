// What both halves of completion share: log-features of vectors, and where a sequence's rows lie.
//
// MapTile is a block's work: 32 vectors in shared memory as [channel][vector]; a thread owns an output of a gated pair, or
// an output of some of the vectors, with a sum for each vector, reads weights coalesced (from L2) and inputs as 16-byte
// broadcasts. Not done: tensor cores (tf32 would keep the 1e-3 that log-features need).
#ifndef WINNOW_KERNELS_CUDA_COMPLETION_MAP_CUH_
#define WINNOW_KERNELS_CUDA_COMPLETION_MAP_CUH_

#include "kernels/cuda/completion.h"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"

namespace winnow::kernels::cuda::completion {

inline constexpr int kThreads = 128;
inline constexpr int kTile = 32;
inline constexpr int kFeaturesPerBlock = 4;  // F is a multiple of it

__device__ __forceinline__ float Gelu(float x) { return 0.5f * x * erfcf(-x * 0.70710678f); }

// Adds, to the sums of kOutputs outputs for kVectors vectors, `count` inputs, ascending. `weights` is the
// first output's column; the others lie `apart` floats further.
template <int kOutputs, int kVectors>
__device__ __forceinline__ void AddInputs(const float* weights, int64_t stride, int64_t apart,
                                          const float* x, int32_t count,
                                          float (&sums)[kOutputs][kVectors]) {
#pragma unroll 4
  for (int32_t j = 0; j < count; ++j) {
    float w[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) w[o] = __ldg(weights + j * stride + o * apart);
#pragma unroll
    for (int t = 0; t < kVectors; t += 4) {
      const float4 of_tile = *reinterpret_cast<const float4*>(x + j * kTile + t);
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        sums[o][t] = __fmaf_rn(of_tile.x, w[o], sums[o][t]);
        sums[o][t + 1] = __fmaf_rn(of_tile.y, w[o], sums[o][t + 1]);
        sums[o][t + 2] = __fmaf_rn(of_tile.z, w[o], sums[o][t + 2]);
        sums[o][t + 3] = __fmaf_rn(of_tile.w, w[o], sums[o][t + 3]);
      }
    }
  }
}

// The last stage: outputs side by side, and kTile / kVectors threads for each.
template <int kVectors>
__device__ __forceinline__ void MapOutputs(const DeviceFeatureMap& map, int32_t head,
                                           const float* x, const float* z, float* a) {
  const int32_t d = map.head_dim, u = map.inner, features = map.features;
  const float* out = map.out + int64_t{head} * (d + u) * features;
  for (int32_t i = threadIdx.x; i < features * (kTile / kVectors); i += kThreads) {
    const int32_t o = i % features, first = i / features * kVectors;
    float sums[1][kVectors] = {};
    AddInputs(out + o, features, 0, x + first, d, sums);
    AddInputs(out + int64_t{d} * features + o, features, 0, z + first, u, sums);
    const float bias = map.out_bias[int64_t{head} * features + o];
#pragma unroll
    for (int t = 0; t < kVectors; ++t) a[o * kTile + first + t] = sums[0][t] + bias;
  }
}

// Log-features of the vectors in x [d][kTile] to a [F][kTile]; z [u][kTile] is scratch. Needs a
// barrier before, and ends with one.
__device__ __forceinline__ void MapTile(const DeviceFeatureMap& map, int32_t head, const float* x,
                                        float* z, float* a) {
  const int32_t d = map.head_dim, u = map.inner;
  const float* gate_up = map.gate_up + int64_t{head} * d * 2 * u;
  const float* gate_up_bias = map.gate_up_bias + int64_t{head} * 2 * u;
  for (int32_t o = threadIdx.x; o < u; o += kThreads) {
    float sums[2][kTile] = {};  // gate, up
    AddInputs(gate_up + o, 2 * u, u, x, d, sums);
    const float gate_bias = gate_up_bias[o], up_bias = gate_up_bias[u + o];
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      z[o * kTile + t] = Gelu(sums[0][t] + gate_bias) * (sums[1][t] + up_bias);
    }
  }
  __syncthreads();
  if (2 * map.features > kThreads) {
    MapOutputs<kTile>(map, head, x, z, a);
  } else if (4 * map.features > kThreads) {
    MapOutputs<kTile / 2>(map, head, x, z, a);
  } else {
    MapOutputs<kTile / 4>(map, head, x, z, a);
  }
  __syncthreads();
}

// The d first values of kTile bf16 rows into the columns of x [d][kTile]; zeros where row_of(t) is null. A lane is a
// row, so that what is written to shared memory side by side lies side by side.
template <typename RowOf>
__device__ __forceinline__ void LoadTile(int32_t d, float* x, RowOf row_of) {
  const int t = threadIdx.x % kTile;
  const auto* row = reinterpret_cast<const uint4*>(row_of(t));
  for (int32_t piece = threadIdx.x / kTile; piece < d / 8; piece += kThreads / kTile) {
    const uint4 loaded = row == nullptr ? make_uint4(0, 0, 0, 0) : row[piece];
    const uint32_t pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[(piece * 8 + 2 * i) * kTile + t] = WidenLow(pairs[i]);
      x[(piece * 8 + 2 * i + 1) * kTile + t] = WidenHigh(pairs[i]);
    }
  }
}

struct Pool {
  const uint8_t* data;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes, row_bytes;
  __device__ const uint8_t* Row(const int32_t* table, int32_t head, int32_t token) const {
    const int32_t block = block_tokens.Divide(token);
    return data + table[block] * block_bytes + head * head_bytes +
           (token - block * block_tokens.divisor()) * row_bytes;
  }
};

inline size_t TileBytes(const DeviceFeatureMap& map) {
  return size_t{4} * kTile * (map.head_dim + map.inner + map.features);
}
// Of SumChosenKernel, which takes the most.
inline size_t SharedBytes(const DeviceFeatureMap& map) {
  return TileBytes(map) + size_t{4} * map.features * (map.head_dim + 1);
}

inline bool IsRefused(const DeviceFeatureMap& map) {
  return map.features < kFeaturesPerBlock || map.features > kThreads ||
         map.features % kFeaturesPerBlock != 0 || map.inner < 1 || map.inner > kThreads ||
         map.head_dim < 16 || map.head_dim > kThreads || map.head_dim % 16 != 0 ||
         SharedBytes(map) > CurrentDevice().block_shared_bytes;
}
inline bool IsRefused(const DeviceFeatureMap& map, const KvLayout& layout) {
  return IsRefused(map) || map.head_dim != layout.head_dim || map.kv_heads != layout.kv_heads ||
         layout.dtype != DType::kBF16;
}

inline Pool MakePool(const void* pool, const KvLayout& layout) {
  return {static_cast<const uint8_t*>(pool), FastDivider(layout.block_tokens),
          static_cast<int64_t>(layout.BlockBytes()), static_cast<int64_t>(layout.HeadBytes()),
          static_cast<int64_t>(layout.RowBytes())};
}

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace winnow::kernels::cuda::completion

#endif  // WINNOW_KERNELS_CUDA_COMPLETION_MAP_CUH_
