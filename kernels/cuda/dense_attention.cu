// Mapping. The queries of a chunk that share a KV head are rows, token by token and of a token head by
// head; a warp takes 16 of them. kInTurn: a block is 8 warps over the same keys, which are copied unit
// by unit into shared memory, the next while one is used. kSideBySide: a block is one warp and one
// split; three of them fit on a multiprocessor, which is enough memory on its way.
//
// The two must agree to the bit, so everything that rounds is written with the rounding in its name
// where the compiler could choose (a * b + c), and both run the same function over a unit.
#include <algorithm>

#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarpRows = 16;
constexpr int kInTurnWarps = 8;
constexpr int kUnitsPerSplit = kDenseSplitTokens / kDenseUnitTokens;

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceChunk* chunks;
  const uint8_t* pool;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes;
  int32_t kv_heads;
  FastDivider group;
  float scale_log2;
  float* out;
  int64_t out_stride;
  float* parts;  // [chunks][tiles][Hkv][splits][16][d + 2]
  int32_t tiles, splits;
};

template <int kHeadDim>
constexpr int PaddedRowBytes() {
  return 4 * kHeadDim + 16;
}
template <int kHeadDim>
constexpr size_t SharedBytes() {
  return size_t{2} * kDenseUnitTokens * PaddedRowBytes<kHeadDim>();
}

// Copies a unit's rows; those from `visible` on become zeros. Each warp takes its share.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void StartUnit(const Args& args, const int32_t* table,
                                          const uint8_t* head, int32_t unit, int32_t visible,
                                          uint32_t shared) {
  constexpr int kPieces = kHeadDim / 4;  // of 16 bytes in a row
  constexpr int kRows = kDenseUnitTokens / kWarps;
  constexpr int kHeld = (kRows + kLanes - 1) / kLanes;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int32_t first = unit * kDenseUnitTokens + warp * kRows;
  uint64_t held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int32_t token = min(first + (i * kLanes + lane) % kRows, visible - 1);
    const int32_t block = args.block_tokens.Divide(token);
    held[i] = reinterpret_cast<uint64_t>(head + table[block] * args.block_bytes +
                                         int64_t{token - block * args.block_tokens.divisor()} *
                                             (4 * kHeadDim));
  }
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kLanes; ++i) {
    const int index = i * kLanes + lane;
    const int row = index / kPieces, piece = index % kPieces;
    const uint64_t from = __shfl_sync(kFullMask, held[kHeld == 1 ? 0 : i / kPieces], row % kLanes);
    CopyAsync16(shared + (warp * kRows + row) * PaddedRowBytes<kHeadDim>() + piece * 16,
                reinterpret_cast<const uint8_t*>(from) + piece * 16, first + row < visible);
  }
}

// A warp's 16 rows over a part of the keys; a thread has its share of rows lane / 4 and 8 more.
template <int kHeadDim>
struct State {
  float o[kHeadDim / 8][4];
  float max[2], sum[2];

  __device__ __forceinline__ void Reset() {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = -INFINITY, sum[r] = 0.0f;
  }
};

// What two parts count for in their sum.
struct Shares {
  float max, left, right;
};
__device__ __forceinline__ Shares ShareOut(float left_max, float left_sum, float right_max) {
  if (left_sum == 0.0f) return {right_max, 0.0f, 1.0f};
  const float max = fmaxf(left_max, right_max);
  return {max, exp2f(left_max - max), exp2f(right_max - max)};
}
__device__ __forceinline__ float Mix(float left, float right, const Shares& shares) {
  return __fmaf_rn(left, shares.left, __fmul_rn(right, shares.right));
}

// `sees[r]`: the keys that row r sees.
template <int kHeadDim>
__device__ __forceinline__ void AddUnit(const uint32_t (&q)[kHeadDim / 16][4], uint32_t shared,
                                        int32_t first_token, const int32_t (&sees)[2],
                                        State<kHeadDim>& state) {
  constexpr int kRowBytes = PaddedRowBytes<kHeadDim>();
  constexpr int kTiles = kDenseUnitTokens / 16;
  const int lane = threadIdx.x % kLanes, pair = lane % 4 * 2;
  const uint32_t keys_at = shared + (lane % 8 + lane / 16 * 8) * kRowBytes + lane / 8 % 2 * 16;
  const uint32_t values_at = shared + (lane % 16) * kRowBytes + kHeadDim * 2 + lane / 16 * 16;
  float scores[2 * kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t keys[4];
      LoadMatrix4(keys_at + tile * 16 * kRowBytes + step * 32, keys);
      MultiplyAdd16x8x16(scores[2 * tile], q[step], keys[0], keys[1]);
      MultiplyAdd16x8x16(scores[2 * tile + 1], q[step], keys[2], keys[3]);
    }
  }
  float base[2], keep[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float unit_max = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[n][2 * r + i];
        if (first_token + n * 8 + pair + i >= sees[r]) score = -INFINITY;
        unit_max = fmaxf(unit_max, score);
      }
    }
    unit_max = fmaxf(unit_max, __shfl_xor_sync(kFullMask, unit_max, 1));
    unit_max = fmaxf(unit_max, __shfl_xor_sync(kFullMask, unit_max, 2));
    const float max = fmaxf(state.max[r], unit_max);
    // A row that has seen nothing so far: its weights are zero, not 2^(-inf + inf).
    base[r] = max == -INFINITY ? 0.0f : max;
    keep[r] = max == state.max[r] ? 1.0f : exp2f(state.max[r] - base[r]);
    state.max[r] = max;
    state.sum[r] = __fmul_rn(state.sum[r], keep[r]);
  }
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) state.o[n][e] = __fmul_rn(state.o[n][e], keep[e / 2]);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // (row, tokens), (row + 8, tokens), and eight tokens on
      const int n = 2 * tile + i / 2, r = i % 2;
      weights[i] = PackBf16(exp2f(__fsub_rn(scores[n][2 * r], base[r])),
                            exp2f(__fsub_rn(scores[n][2 * r + 1], base[r])));
      state.sum[r] =
          __fadd_rn(state.sum[r], __fadd_rn(WidenLow(weights[i]), WidenHigh(weights[i])));
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      uint32_t values[4];
      LoadMatrix4Transposed(values_at + tile * 16 * kRowBytes + n * 16, values);
      MultiplyAdd16x8x16(state.o[n], weights, values[0], values[1]);
      MultiplyAdd16x8x16(state.o[n + 1], weights, values[2], values[3]);
    }
  }
}

template <int kHeadDim, int kWarps, DenseWay kWay>
__global__ void __launch_bounds__(kWarps* kLanes) DenseKernel(const __grid_constant__ Args args) {
  extern __shared__ uint4 shared4[];
  const uint32_t shared = SharedAddress(shared4);
  constexpr uint32_t kStageBytes = kDenseUnitTokens * PaddedRowBytes<kHeadDim>();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  int32_t chunk_index, tile, split = 0;
  if constexpr (kWay == DenseWay::kInTurn) {
    chunk_index = static_cast<int32_t>(blockIdx.z);
    tile = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);  // those with most keys first
  } else {
    chunk_index = static_cast<int32_t>(blockIdx.z) / args.tiles;
    tile = static_cast<int32_t>(blockIdx.z) % args.tiles;
    split = static_cast<int32_t>(blockIdx.x);
  }
  const DeviceChunk chunk = args.chunks[chunk_index];
  const int32_t group = args.group.divisor();
  const int32_t num_rows = chunk.num_tokens * group;
  const int32_t first_row = tile * kWarps * kWarpRows;
  if (first_row >= num_rows) return;
  const int32_t last_row = min(first_row + kWarps * kWarpRows, num_rows) - 1;
  const int32_t visible = chunk.position + args.group.Divide(last_row) + 1;
  const int32_t first_unit = split * kUnitsPerSplit;
  int32_t units = (visible + kDenseUnitTokens - 1) / kDenseUnitTokens;
  if constexpr (kWay == DenseWay::kSideBySide) units = min(units, first_unit + kUnitsPerSplit);
  if (first_unit >= units) return;

  const uint8_t* head = args.pool + kv_head * args.head_bytes;
  StartUnit<kHeadDim, kWarps>(args, chunk.block_table, head, first_unit, visible, shared);
  CommitCopies();

  int32_t sees[2];
  int64_t at[2];  // of the row in q and out
  uint32_t q[kHeadDim / 16][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t row = first_row + warp * kWarpRows + lane / 4 + 8 * r;
    const bool exists = row < num_rows;
    const int32_t token = args.group.Divide(exists ? row : 0);
    const int32_t query_head = kv_head * group + (exists ? row - token * group : 0);
    sees[r] = exists ? chunk.position + token + 1 : 0;
    const int64_t token_row = chunk.first_row + token;
    at[r] = token_row * args.out_stride + int64_t{query_head} * kHeadDim;
    const float* from = args.q + token_row * args.q_stride + int64_t{query_head} * kHeadDim;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = step * 16 + half * 8 + lane % 4 * 2;
        q[step][half * 2 + r] = exists ? PackBf16(__fmul_rn(from[c], args.scale_log2),
                                                  __fmul_rn(from[c + 1], args.scale_log2))
                                       : 0;
      }
    }
  }

  State<kHeadDim> state;
  state.Reset();
  State<kHeadDim> total;  // kInTurn only
  if constexpr (kWay == DenseWay::kInTurn) total.Reset();
  for (int32_t unit = first_unit; unit < units; ++unit) {
    const uint32_t here = shared + (unit - first_unit) % 2 * kStageBytes;
    if (unit + 1 < units) {
      StartUnit<kHeadDim, kWarps>(args, chunk.block_table, head, unit + 1, visible,
                                  shared + (unit + 1 - first_unit) % 2 * kStageBytes);
    }
    CommitCopies();
    WaitForCopies<1>();
    __syncthreads();
    AddUnit<kHeadDim>(q, here, unit * kDenseUnitTokens, sees, state);
    if (unit + 1 == units || (unit + 1) % kUnitsPerSplit == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        state.sum[r] = __fadd_rn(state.sum[r], __shfl_xor_sync(kFullMask, state.sum[r], 1));
        state.sum[r] = __fadd_rn(state.sum[r], __shfl_xor_sync(kFullMask, state.sum[r], 2));
      }
      if constexpr (kWay == DenseWay::kInTurn) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (state.sum[r] == 0.0f) continue;
          const Shares shares = ShareOut(total.max[r], total.sum[r], state.max[r]);
#pragma unroll
          for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& value = total.o[n][2 * r + i];
              value = Mix(value, state.o[n][2 * r + i], shares);
            }
          }
          total.sum[r] = Mix(total.sum[r], state.sum[r], shares);
          total.max[r] = shares.max;
        }
        state.Reset();
      }
    }
    __syncthreads();
  }

  const int pair = lane % 4 * 2;
  if constexpr (kWay == DenseWay::kInTurn) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sees[r] == 0) continue;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          args.out[at[r] + n * 8 + pair + i] = __fdiv_rn(total.o[n][2 * r + i], total.sum[r]);
        }
      }
    }
  } else {
    const int64_t place = (int64_t{blockIdx.z} * args.kv_heads + kv_head) * args.splits + split;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* part = args.parts + (place * kWarpRows + lane / 4 + 8 * r) * (kHeadDim + 2);
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) part[n * 8 + pair + i] = state.o[n][2 * r + i];
      }
      if (pair == 0) {
        part[kHeadDim] = state.max[r];
        part[kHeadDim + 1] = state.sum[r];
      }
    }
  }
}

// A block merges the splits of one row; a thread is a channel.
__global__ void MergeSplitsKernel(const __grid_constant__ Args args, int32_t head_dim) {
  const int32_t chunk_index = static_cast<int32_t>(blockIdx.z) / args.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.z) % args.tiles;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const DeviceChunk chunk = args.chunks[chunk_index];
  const int32_t group = args.group.divisor();
  const int32_t row = tile * kWarpRows + static_cast<int32_t>(blockIdx.x);
  if (row >= chunk.num_tokens * group) return;
  const int32_t token = args.group.Divide(row);
  const int32_t splits = (chunk.position + token + 1 + kDenseSplitTokens - 1) / kDenseSplitTokens;
  const int32_t c = static_cast<int32_t>(threadIdx.x);
  if (c >= head_dim) return;
  const int64_t place = (int64_t{blockIdx.z} * args.kv_heads + kv_head) * args.splits;
  const int64_t next = int64_t{kWarpRows} * (head_dim + 2);
  const float* part = args.parts + place * next + int64_t{blockIdx.x} * (head_dim + 2);
  float value = 0.0f, max = -INFINITY, sum = 0.0f;
  // Loads do not wait for each other, only the sums do.
#pragma unroll 8
  for (int32_t split = 0; split < splits; ++split, part += next) {
    const float of_part = part[c], part_max = part[head_dim], part_sum = part[head_dim + 1];
    if (part_sum == 0.0f) continue;
    const Shares shares = ShareOut(max, sum, part_max);
    value = Mix(value, of_part, shares);
    sum = Mix(sum, part_sum, shares);
    max = shares.max;
  }
  const int64_t head = int64_t{kv_head} * group + row - token * group;
  args.out[(chunk.first_row + token) * args.out_stride + head * head_dim + c] =
      __fdiv_rn(value, sum);
}

int32_t TilesOf(const DenseAttentionShape& shape) {
  return static_cast<int32_t>(CeilDiv(int64_t{shape.max_chunk_tokens} * shape.group, kWarpRows));
}
int32_t SplitsOf(const DenseAttentionShape& shape) {
  return static_cast<int32_t>(CeilDiv(shape.max_keys, kDenseSplitTokens));
}

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

template <int kHeadDim>
cudaError_t Launch(const DenseAttentionShape& shape, const Args& args, cudaStream_t stream) {
  constexpr size_t kBytes = SharedBytes<kHeadDim>();
  if (shape.way == DenseWay::kInTurn) {
    const auto kernel = DenseKernel<kHeadDim, kInTurnWarps, DenseWay::kInTurn>;
    if (const cudaError_t error = AllowShared(kernel, kBytes); error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>(CeilDiv(int64_t{shape.max_chunk_tokens} * shape.group,
                                                  kInTurnWarps * kWarpRows)),
                    shape.layout.kv_heads, shape.num_chunks);
    kernel<<<grid, kInTurnWarps * kLanes, kBytes, stream>>>(args);
    return cudaGetLastError();
  }
  const auto kernel = DenseKernel<kHeadDim, 1, DenseWay::kSideBySide>;
  if (const cudaError_t error = AllowShared(kernel, kBytes); error != cudaSuccess) return error;
  const dim3 grid(args.splits, shape.layout.kv_heads, shape.num_chunks * args.tiles);
  kernel<<<grid, kLanes, kBytes, stream>>>(args);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  MergeSplitsKernel<<<dim3(kWarpRows, grid.y, grid.z), 128, 0, stream>>>(args, kHeadDim);
  return cudaGetLastError();
}

}  // namespace

size_t DenseAttentionWorkspaceBytes(const DenseAttentionShape& shape) {
  if (shape.way == DenseWay::kInTurn) return 0;
  return size_t{4} * shape.num_chunks * TilesOf(shape) * shape.layout.kv_heads * SplitsOf(shape) *
         kWarpRows * (shape.layout.head_dim + 2);
}

cudaError_t AttendDense(const DenseAttentionShape& shape, const float* q, int64_t q_stride,
                        const DeviceChunk* chunks, const void* pool, float scale, float* out,
                        int64_t out_stride, void* workspace, cudaStream_t stream) {
  const KvLayout& layout = shape.layout;
  if (layout.dtype != DType::kBF16 || shape.group < 1 || layout.kv_heads < 1 ||
      layout.kv_heads > 65535 || shape.num_chunks < 0 || layout.block_tokens < 1 ||
      int64_t{shape.max_chunk_tokens} * shape.group > 0x7fffffff ||
      int64_t{shape.num_chunks} *
              (shape.way == DenseWay::kInTurn ? 1 : std::max(TilesOf(shape), 1)) >
          65535) {
    return cudaErrorInvalidValue;
  }
  if (shape.num_chunks == 0 || shape.max_chunk_tokens <= 0) return cudaSuccess;
  const Args args{q,
                  q_stride,
                  chunks,
                  static_cast<const uint8_t*>(pool),
                  FastDivider(layout.block_tokens),
                  static_cast<int64_t>(layout.BlockBytes()),
                  static_cast<int64_t>(layout.HeadBytes()),
                  layout.kv_heads,
                  FastDivider(shape.group),
                  scale * kLog2E,
                  out,
                  out_stride,
                  static_cast<float*>(workspace),
                  TilesOf(shape),
                  SplitsOf(shape)};
  switch (layout.head_dim) {
    case 64:
      return Launch<64>(shape, args, stream);
    case 80:
      return Launch<80>(shape, args, stream);
    case 96:
      return Launch<96>(shape, args, stream);
    case 128:
      return Launch<128>(shape, args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace winnow::kernels::cuda
