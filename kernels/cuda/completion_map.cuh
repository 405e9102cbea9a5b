// What both halves of completion share: log-features of vectors, and where a sequence's rows lie.
//
// MapTile is a block's work, eight warps: up to 64 vectors in shared memory, bfloat16, a row each. A warp takes every
// eighth tile of 8 outputs for all vectors; weights come from L2 in the order in which lanes use them (completion.h), and
// what is done with log-features the caller says, while they are in registers. Each row of the matrix instruction is one
// vector's own, so its bits do not depend on what else is in the tile.
#ifndef WINNOW_KERNELS_CUDA_COMPLETION_MAP_CUH_
#define WINNOW_KERNELS_CUDA_COMPLETION_MAP_CUH_

#include "kernels/cuda/completion.h"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"

namespace winnow::kernels::cuda::completion {

inline constexpr int kThreads = 128;     // where a thread is a channel
inline constexpr int kMapThreads = 256;  // where MapTile is called
inline constexpr int kMapWarps = kMapThreads / 32;
inline constexpr int kLanes = 32;
inline constexpr int kTile = 64;             // tokens
inline constexpr int kMostGroup = 32;        // queries of a KV head
inline constexpr int kFeaturesPerBlock = 4;  // F is a multiple of it
// Values between the rows of a tile: eight rows of a fragment lie in different banks.
inline constexpr int kPadding = 8;

__device__ __forceinline__ float Gelu(float x) { return 0.5f * x * erfcf(-x * 0.70710678f); }

// Asks for a head's matrices to come as near as L2.
__device__ __forceinline__ void PrefetchMap(const DeviceFeatureMap& map, int32_t head) {
  constexpr int kLine = 8;  // pieces of 16 bytes
  const int32_t gate_up = map.GateUpFragments() * kLanes, out = map.OutFragments() * kLanes;
  for (int32_t i = threadIdx.x * kLine; i < gate_up; i += kMapThreads * kLine) {
    PrefetchLine(map.gate_up + int64_t{head} * gate_up + i);
  }
  for (int32_t i = threadIdx.x * kLine; i < out; i += kMapThreads * kLine) {
    PrefetchLine(map.out + int64_t{head} * out + i);
  }
}

// Where a lane's row of a fragment of 16 x 16 begins; rows lie `stride` bytes apart.
__device__ __forceinline__ uint32_t FragmentRow(uint32_t tile, int32_t stride, int lane) {
  return tile + lane % 16 * stride + lane / 16 * 16;
}

// Log-features of the vectors x [16 * kRowTiles][d + kPadding]. z [2][16 * kRowTiles][16 * InnerSteps + kPadding] is scratch.
// consume(f, a) gets those of the features f and f + 1 that this lane has: a[i][0] and a[i][1] of vector i * 16 + lane / 4,
// a[i][2] and a[i][3] of the vector 8 further; f may be past the last. Needs a barrier before x was written and before
// either is written again.
template <int kRowTiles, typename Consume>
__device__ __forceinline__ void MapTile(const DeviceFeatureMap& map, int32_t head,
                                        const uint16_t* x, uint16_t* z, Consume consume) {
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int32_t d_steps = map.InputSteps(), u_steps = map.InnerSteps(), tiles = map.InnerTiles();
  const int32_t x_stride = (map.head_dim + kPadding) * 2, z_stride = (u_steps * 16 + kPadding) * 2;
  const int32_t z_bytes = kRowTiles * 16 * z_stride;
  const uint32_t x_row = FragmentRow(SharedAddress(x), x_stride, lane);
  const uint32_t z_row = FragmentRow(SharedAddress(z), z_stride, lane);
  const int column = lane % 4 * 2;

  for (int32_t tile = warp; tile < tiles; tile += kMapWarps) {
    float gate[kRowTiles][4] = {}, up[kRowTiles][4] = {};
    const uint4* of_gate =
        map.gate_up + (int64_t{head} * tiles + tile) * 2 * d_steps * kLanes + lane;
    const uint4* of_up = of_gate + d_steps * kLanes;
#pragma unroll 4
    for (int32_t step = 0; step < d_steps; ++step) {
      const uint4 g = __ldg(of_gate + step * kLanes), p = __ldg(of_up + step * kLanes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
        LoadMatrix4(x_row + i * 16 * x_stride + step * 32, a);
        MultiplyAdd16x8x16(gate[i], a, g.x, g.y);
        MultiplyAdd16x8x16(gate[i], a, g.z, g.w);
        MultiplyAdd16x8x16(up[i], a, p.x, p.y);
        MultiplyAdd16x8x16(up[i], a, p.z, p.w);
      }
    }
    const float* bias = map.gate_up_bias + int64_t{head} * 2 * tiles * 8 + tile * 8 + column;
    const float2 gate_bias = *reinterpret_cast<const float2*>(bias);
    const float2 up_bias = *reinterpret_cast<const float2*>(bias + tiles * 8);
    char* to = reinterpret_cast<char*>(z) + lane / 4 * z_stride + (tile * 8 + column) * 2;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = Gelu(gate[i][2 * half] + gate_bias.x) * (up[i][2 * half] + up_bias.x);
        const float high =
            Gelu(gate[i][2 * half + 1] + gate_bias.y) * (up[i][2 * half + 1] + up_bias.y);
        const uint32_t pair = PackBf16(low, high);
        char* row = to + (i * 16 + half * 8) * z_stride;
        *reinterpret_cast<uint32_t*>(row) = pair;
        *reinterpret_cast<uint32_t*>(row + z_bytes) = PackBf16Rest(low, high, pair);
      }
    }
  }
  __syncthreads();
  for (int32_t tile = warp; tile < map.FeatureTiles(); tile += kMapWarps) {
    float sums[kRowTiles][4] = {};
    const uint4* weights =
        map.out + (int64_t{head} * map.FeatureTiles() + tile) * (d_steps + u_steps) * kLanes + lane;
#pragma unroll 4
    for (int32_t step = 0; step < d_steps; ++step) {
      const uint4 w = __ldg(weights + step * kLanes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
        LoadMatrix4(x_row + i * 16 * x_stride + step * 32, a);
        MultiplyAdd16x8x16(sums[i], a, w.x, w.y);
        MultiplyAdd16x8x16(sums[i], a, w.z, w.w);
      }
    }
    weights += d_steps * kLanes;
#pragma unroll 4
    for (int32_t step = 0; step < u_steps; ++step) {
      const uint4 w = __ldg(weights + step * kLanes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4], rest[4];
        LoadMatrix4(z_row + i * 16 * z_stride + step * 32, a);
        LoadMatrix4(z_row + z_bytes + i * 16 * z_stride + step * 32, rest);
        MultiplyAdd16x8x16(sums[i], a, w.x, w.y);
        MultiplyAdd16x8x16(sums[i], a, w.z, w.w);
        MultiplyAdd16x8x16(sums[i], rest, w.x, w.y);
      }
    }
    const int32_t f = tile * 8 + column;
    const float2 bias =
        *reinterpret_cast<const float2*>(map.out_bias + int64_t{head} * map.FeatureTiles() * 8 + f);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      sums[i][0] += bias.x;
      sums[i][1] += bias.y;
      sums[i][2] += bias.x;
      sums[i][3] += bias.y;
    }
    consume(f, sums);
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

// The keys, and where `values` is not null the values, of `count` rows whose addresses are in shared memory (null: zeros),
// each [count][d + kPadding] of bfloat16. Ends with what was asked for on its way: WaitForCopies and a barrier make it readable.
template <DType kKv>
__device__ __forceinline__ void StartRows(const uint8_t* const* rows, int32_t count, int32_t d,
                                          uint16_t* keys, uint16_t* values) {
  if constexpr (kKv == DType::kBF16) {
    const int32_t of_half = d / 8, pieces = values != nullptr ? 2 * of_half : of_half;
    for (int32_t i = threadIdx.x; i < count * pieces; i += kMapThreads) {
      const int32_t t = i / pieces, piece = i - t * pieces;
      const bool is_key = piece < of_half;
      uint16_t* to =
          (is_key ? keys : values) + t * (d + kPadding) + (is_key ? piece : piece - of_half) * 8;
      const uint8_t* row = rows[t];
      CopyAsync16(SharedAddress(to), row == nullptr ? rows[0] : row + piece * 16, row != nullptr);
    }
  } else {
    const int32_t of_half = d / 4, words = values != nullptr ? 2 * of_half : of_half;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < count * words; i += kMapThreads) {
      const int32_t t = i / words, word = i - t * words;
      const bool is_key = word < of_half;
      uint16_t* to =
          (is_key ? keys : values) + t * (d + kPadding) + (is_key ? word : word - of_half) * 4;
      const uint8_t* row = rows[t];
      uint2 pairs = make_uint2(0, 0);
      if (row != nullptr) {
        const uint32_t scales = ScalesOf<kKv>(row, d);
        pairs = PairsOf<kKv>(reinterpret_cast<const uint32_t*>(row)[word],
                             TwiceScale<kKv>(scales, !is_key));
      }
      *reinterpret_cast<uint2*>(to) = pairs;
    }
  }
  CommitCopies();
}

inline int32_t PaddedFeatures(const DeviceFeatureMap& map) { return (map.features + 15) / 16 * 16; }
// Of x and z, for `vectors` of them.
inline size_t TileBytes(const DeviceFeatureMap& map, int32_t vectors) {
  return size_t{2} * vectors * (map.head_dim + kPadding + 2 * (map.InnerSteps() * 16 + kPadding));
}
// Of SumChosenKernel, which takes the most: values, and weights in three parts.
inline size_t SharedBytes(const DeviceFeatureMap& map) {
  return TileBytes(map, kTile) +
         size_t{2} * kTile * (map.head_dim + kPadding + 3 * (PaddedFeatures(map) + kPadding));
}

inline bool IsRefused(const DeviceFeatureMap& map) {
  // Of variables beside what is asked for, and of the system.
  constexpr size_t kOtherSharedBytes = 2 * 1024;
  return map.features < kFeaturesPerBlock || map.features > kThreads ||
         map.features % kFeaturesPerBlock != 0 || map.inner < 1 || map.inner > kThreads ||
         map.head_dim < 16 || map.head_dim > kThreads || map.head_dim % 16 != 0 ||
         SharedBytes(map) + kOtherSharedBytes > CurrentDevice().block_shared_bytes;
}
inline bool IsRefused(const DeviceFeatureMap& map, const KvLayout& layout) {
  return IsRefused(map) || map.head_dim != layout.head_dim || map.kv_heads != layout.kv_heads ||
         !HasKvRows(layout);
}

inline Pool MakePool(const void* pool, const KvLayout& layout) {
  return {static_cast<const uint8_t*>(pool), FastDivider(layout.block_tokens),
          static_cast<int64_t>(layout.BlockBytes()), static_cast<int64_t>(layout.HeadBytes()),
          static_cast<int64_t>(layout.RowBytes())};
}

}  // namespace winnow::kernels::cuda::completion

#endif  // WINNOW_KERNELS_CUDA_COMPLETION_MAP_CUH_
