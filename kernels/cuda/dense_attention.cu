// Mapping. The queries of a chunk that share a KV head are rows, token by token and of a token head by
// head, 16 to an instruction. kInTurn: a block is 8 warps with 16 rows each over the same keys, which
// are copied unit by unit into shared memory, the next while one is used. kSideBySide: a block is 16
// rows and one split, or several in turn where there are more than run at once, so that copies do not
// cease between them; of a unit each of its 4 warps scores 16 tokens, all hear of all scores through
// shared memory and weigh them alike, and each adds up its own channels.
//
// The two must agree to the bit, so everything that rounds is written with the rounding in its name
// where the compiler could choose (a * b + c), and both weigh a unit by the same function.
//
// Lost (H100, d 128, G 4, 128K tokens of 8 KV heads): a single warp for a split's 16 rows. It waits for
// each of its instructions in turn, and three of them on a multiprocessor read 0.9 TB/s.
// Also lost (H200, the same shape): one stage in place of two and five blocks on a multiprocessor in
// place of three, 189 us instead of 172 more for 128K tokens than for 8K; three stages and two blocks, 190 us
// instead of 191, and 1031 instead of 864 for 24 sequences of 32K; merging splits with every
// share worked out in turn, 23 us of a layer of 128K tokens.
#include <algorithm>

#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/dense_attention_parts.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"

namespace winnow::kernels::cuda {
namespace {

using namespace dense;  // NOLINT(google-build-using-namespace): the parts of this very file

template <int kHeadDim>
constexpr int PaddedRowBytes() {
  return 4 * kHeadDim + 16;
}
template <int kHeadDim>
constexpr size_t SharedBytes() {
  return size_t{2} * kDenseUnitTokens * PaddedRowBytes<kHeadDim>();
}
// Scores of a unit, by row: 8 floats more than there are, so that rows lie in different banks.
constexpr int kScoreStride = kDenseUnitTokens + 8;

// Starts copying them; those that are not there become zeros.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void CopyRows(const UnitRows<kHeadDim, kWarps>& rows, int32_t visible,
                                         uint32_t shared) {
  constexpr int kRows = UnitRows<kHeadDim, kWarps>::kRows;
  constexpr int kPieces = kHeadDim / 4;  // of 16 bytes in a row
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kLanes; ++i) {
    const int index = i * kLanes + lane;
    const int row = index / kPieces, piece = index % kPieces;
    const uint64_t from =
        __shfl_sync(kFullMask, rows.held[rows.kHeld == 1 ? 0 : i / kPieces], row % kLanes);
    CopyAsync16(shared + (warp * kRows + row) * PaddedRowBytes<kHeadDim>() + piece * 16,
                reinterpret_cast<const uint8_t*>(from) + piece * 16, rows.first + row < visible);
  }
}
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void StartUnit(const Args& args, const int32_t* table,
                                          const uint8_t* head, int32_t unit, int32_t visible,
                                          uint32_t shared) {
  CopyRows(UnitRows<kHeadDim, kWarps>(args, table, head, unit, visible), visible, shared);
}

// Scores of 16 tokens from `keys_at` on, one chain over the channels each.
template <int kHeadDim>
__device__ __forceinline__ void ScoreTile(const uint32_t (&q)[kHeadDim / 16][4], uint32_t keys_at,
                                          float (&first)[4], float (&second)[4]) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t keys[4];
    LoadMatrix4(keys_at + step * 32, keys);
    MultiplyAdd16x8x16(first, q[step], keys[0], keys[1]);
    MultiplyAdd16x8x16(second, q[step], keys[2], keys[3]);
  }
}

// o [16 channels as two tiles] = o * keep + weights * values, from `values_at` on.
__device__ __forceinline__ void AddValues(const uint32_t (&weights)[kUnitTiles][4],
                                          const float (&keep)[2], uint32_t values_at, int row_bytes,
                                          float (&first)[4], float (&second)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    first[e] = __fmul_rn(first[e], keep[e / 2]);
    second[e] = __fmul_rn(second[e], keep[e / 2]);
  }
#pragma unroll
  for (int tile = 0; tile < kUnitTiles; ++tile) {
    uint32_t values[4];
    LoadMatrix4Transposed(values_at + tile * 16 * row_bytes, values);
    MultiplyAdd16x8x16(first, weights[tile], values[0], values[1]);
    MultiplyAdd16x8x16(second, weights[tile], values[2], values[3]);
  }
}

// Where a lane reads keys and values of a unit at `shared`, from token 0 and channel 0 on.
template <int kHeadDim>
__device__ __forceinline__ uint32_t KeysAt(uint32_t shared, int lane) {
  return shared + (lane % 8 + lane / 16 * 8) * PaddedRowBytes<kHeadDim>() + lane / 8 % 2 * 16;
}
template <int kHeadDim>
__device__ __forceinline__ uint32_t ValuesAt(uint32_t shared, int lane) {
  return shared + (lane % 16) * PaddedRowBytes<kHeadDim>() + kHeadDim * 2 + lane / 16 * 16;
}

template <int kHeadDim>
__global__ void __launch_bounds__(kInTurnWarps* kLanes)
    InTurnKernel(const __grid_constant__ Args args) {
  extern __shared__ uint4 shared4[];
  const uint32_t shared = SharedAddress(shared4);
  constexpr uint32_t kStageBytes = kDenseUnitTokens * PaddedRowBytes<kHeadDim>();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const auto tile = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);  // those with most keys first
  const DeviceChunk chunk = args.chunks[blockIdx.z];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t first_row = tile * kInTurnWarps * kWarpRows;
  if (first_row >= num_rows) return;
  const int32_t last_row = min(first_row + kInTurnWarps * kWarpRows, num_rows) - 1;
  const int32_t visible = chunk.position + args.group.Divide(last_row) + 1;
  const int32_t units = (visible + kDenseUnitTokens - 1) / kDenseUnitTokens;
  const uint8_t* head = args.pool + kv_head * args.head_bytes;
  StartUnit<kHeadDim, kInTurnWarps>(args, chunk.block_table, head, 0, visible, shared);
  CommitCopies();
  int32_t sees[2];
  int64_t at[2];
  uint32_t q[kHeadDim / 16][4];
  LoadRows<kHeadDim>(args, chunk, kv_head, first_row + warp * kWarpRows, sees, at, q);

  float o[kHeadDim / 8][4], total[kHeadDim / 8][4];  // of the split, and of those before it
  RowSums sums, totals;
  Clear(o);
  Clear(total);
  for (int32_t unit = 0; unit < units; ++unit) {
    const uint32_t here = shared + unit % 2 * kStageBytes;
    if (unit + 1 < units) {
      StartUnit<kHeadDim, kInTurnWarps>(args, chunk.block_table, head, unit + 1, visible,
                                        shared + (unit + 1) % 2 * kStageBytes);
    }
    CommitCopies();
    WaitForCopies<1>();
    __syncthreads();
    float scores[2 * kUnitTiles][4] = {}, keep[2];
    uint32_t weights[kUnitTiles][4];
    const uint32_t keys_at = KeysAt<kHeadDim>(here, lane);
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
      ScoreTile<kHeadDim>(q, keys_at + t * 16 * PaddedRowBytes<kHeadDim>(), scores[2 * t],
                          scores[2 * t + 1]);
    }
    Weigh(scores, unit * kDenseUnitTokens, sees, sums, weights, keep);
    const uint32_t values_at = ValuesAt<kHeadDim>(here, lane);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      AddValues(weights, keep, values_at + n * 16, PaddedRowBytes<kHeadDim>(), o[n], o[n + 1]);
    }
    if (unit + 1 == units || (unit + 1) % kUnitsPerSplit == 0) {
      AddSplit<kHeadDim>(sums, o, totals, total);
      sums = RowSums();
      Clear(o);
    }
    __syncthreads();
  }
  WriteRows<kHeadDim>(args, sees, at, totals, total);
}

template <int kHeadDim>
__global__ void __launch_bounds__(kSplitWarps* kLanes)
    SplitKernel(const __grid_constant__ Args args) {
  static_assert(kSplitWarps == kUnitTiles);
  constexpr int kPairs = kHeadDim / 16;  // of channel tiles
  constexpr int kMine = (kPairs + kSplitWarps - 1) / kSplitWarps;
  extern __shared__ uint4 shared4[];
  __shared__ float exchanged[kWarpRows * kScoreStride];
  const uint32_t shared = SharedAddress(shared4);
  constexpr uint32_t kStageBytes = kDenseUnitTokens * PaddedRowBytes<kHeadDim>();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, pair = lane % 4 * 2;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const int32_t tile = static_cast<int32_t>(blockIdx.z) % args.tiles;
  const DeviceChunk chunk = args.chunks[static_cast<int32_t>(blockIdx.z) / args.tiles];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t first_row = tile * kWarpRows;
  LetNextStart();
  if (first_row >= num_rows) return WaitForEarlier();
  const int32_t last_row = min(first_row + kWarpRows, num_rows) - 1;
  const int32_t visible = chunk.position + args.group.Divide(last_row) + 1;
  const int32_t block_units = args.splits_per_block * kUnitsPerSplit;
  const int32_t first_unit = static_cast<int32_t>(blockIdx.x) * block_units;
  const int32_t units =
      min((visible + kDenseUnitTokens - 1) / kDenseUnitTokens, first_unit + block_units);
  if (first_unit >= units) return WaitForEarlier();
  const uint8_t* head = args.pool + kv_head * args.head_bytes;
  // Rows come nearer while the queries are still being made. They are not read yet: this step's are
  // among them.
  constexpr int kLines = (4 * kHeadDim + 127) / 128;  // of a row
  const int32_t last_token = min(visible, first_unit * kDenseUnitTokens + kDenseSplitTokens);
  for (int32_t i = threadIdx.x; i < kDenseSplitTokens * kLines; i += kSplitWarps * kLanes) {
    const int32_t token = first_unit * kDenseUnitTokens + i / kLines;
    if (token >= last_token) break;
    const int32_t block = args.block_tokens.Divide(token);
    const uint8_t* row = head + chunk.block_table[block] * args.block_bytes +
                         int64_t{token - block * args.block_tokens.divisor()} * (4 * kHeadDim);
    PrefetchLine(row + i % kLines * 128);
  }
  WaitForEarlier();
  using Rows = UnitRows<kHeadDim, kSplitWarps>;
  CopyRows(Rows(args, chunk.block_table, head, first_unit, visible), visible, shared);
  CommitCopies();
  Rows next(args, chunk.block_table, head, first_unit + 1, visible);
  int32_t sees[2];
  int64_t at[2];
  uint32_t q[kHeadDim / 16][4];
  LoadRows<kHeadDim>(args, chunk, kv_head, first_row, sees, at, q);

  float o[2 * kMine][4];
  RowSums sums;
  Clear(o);
  const auto end_split = [&](int32_t split) {
    sums.Join();
    const int64_t place = (int64_t{blockIdx.z} * args.kv_heads + kv_head) * args.splits + split;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sees[r] == 0) continue;
      float* part = args.parts + (place * kWarpRows + lane / 4 + 8 * r) * (kHeadDim + 2);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int channels = warp + kSplitWarps * i;
        if (channels >= kPairs) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          part[channels * 16 + n * 8 + pair] = o[2 * i + n][2 * r];
          part[channels * 16 + n * 8 + pair + 1] = o[2 * i + n][2 * r + 1];
        }
      }
      if (warp == 0 && pair == 0) {
        part[kHeadDim] = sums.max[r];
        part[kHeadDim + 1] = sums.sum[r];
      }
    }
    sums = RowSums();
    Clear(o);
  };
  for (int32_t unit = first_unit; unit < units; ++unit) {
    const uint32_t here = shared + (unit - first_unit) % 2 * kStageBytes;
    if (unit + 1 < units) {
      CopyRows(next, visible, shared + (unit + 1 - first_unit) % 2 * kStageBytes);
      // Of the unit after, so that its copy need not wait for the table.
      next = Rows(args, chunk.block_table, head, unit + 2, visible);
    }
    CommitCopies();
    WaitForCopies<1>();
    __syncthreads();
    {
      float mine[2][4] = {};
      ScoreTile<kHeadDim>(q, KeysAt<kHeadDim>(here, lane) + warp * 16 * PaddedRowBytes<kHeadDim>(),
                          mine[0], mine[1]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          *reinterpret_cast<float2*>(exchanged + (lane / 4 + 8 * r) * kScoreStride + warp * 16 +
                                     n * 8 + pair) =
              make_float2(mine[n][2 * r], mine[n][2 * r + 1]);
        }
      }
    }
    __syncthreads();
    float scores[2 * kUnitTiles][4], keep[2];
    uint32_t weights[kUnitTiles][4];
#pragma unroll
    for (int n = 0; n < 2 * kUnitTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 two = *reinterpret_cast<const float2*>(
            exchanged + (lane / 4 + 8 * r) * kScoreStride + n * 8 + pair);
        scores[n][2 * r] = two.x;
        scores[n][2 * r + 1] = two.y;
      }
    }
    Weigh(scores, unit * kDenseUnitTokens, sees, sums, weights, keep);
    const uint32_t values_at = ValuesAt<kHeadDim>(here, lane);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int channels = warp + kSplitWarps * i;
      if (channels >= kPairs) break;
      AddValues(weights, keep, values_at + channels * 32, PaddedRowBytes<kHeadDim>(), o[2 * i],
                o[2 * i + 1]);
    }
    if (unit + 1 == units || (unit + 1) % kUnitsPerSplit == 0) end_split(unit / kUnitsPerSplit);
    __syncthreads();
  }
}

// A block merges the splits of one row, from left to right; a thread is a channel. What a split and
// those before it count for follows from the largest score so far, which is found for all splits side by
// side: only multiply-adds are left to do one after the other. A split that weighs nothing is left out.
constexpr int kMergeThreads = 128;
constexpr int kMergeSplits = 4 * kMergeThreads;  // at a time
constexpr float kLeftOut = -1.0f;

__global__ void __launch_bounds__(kMergeThreads)
    MergeSplitsKernel(const __grid_constant__ Args args, int32_t head_dim) {
  LetNextStart();
  __shared__ float lefts[kMergeSplits], rights[kMergeSplits], right_sums[kMergeSplits];
  __shared__ float warp_max[kMergeThreads / kLanes];
  const int32_t chunk_index = static_cast<int32_t>(blockIdx.z) / args.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.z) % args.tiles;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const DeviceChunk chunk = args.chunks[chunk_index];
  const int32_t group = args.group.divisor();
  const int32_t row = tile * kWarpRows + static_cast<int32_t>(blockIdx.x);
  WaitForEarlier();
  if (row >= chunk.num_tokens * group) return;
  const int32_t token = args.group.Divide(row);
  const int32_t splits = (chunk.position + token + 1 + kDenseSplitTokens - 1) / kDenseSplitTokens;
  const auto c = static_cast<int32_t>(threadIdx.x);
  const int warp = c / kLanes, lane = c % kLanes;
  const int64_t place = (int64_t{blockIdx.z} * args.kv_heads + kv_head) * args.splits;
  const int64_t next = int64_t{kWarpRows} * (head_dim + 2);
  const float* part = args.parts + place * next + int64_t{blockIdx.x} * (head_dim + 2);
  float value = 0.0f, sum = 0.0f, max_before = -INFINITY;
  for (int32_t first = 0; first < splits; first += kMergeSplits) {
    const int32_t count = min(kMergeSplits, splits - first);
    float maxima[4], sums[4], mine = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool exists = 4 * c + i < count;
      const float* of_split = part + (first + (exists ? 4 * c + i : 0)) * next + head_dim;
      sums[i] = exists ? of_split[1] : 0.0f;
      maxima[i] = sums[i] == 0.0f ? -INFINITY : of_split[0];
      mine = fmaxf(mine, maxima[i]);
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      const float below = __shfl_up_sync(kFullMask, mine, offset);
      if (lane >= offset) mine = fmaxf(mine, below);
    }
    if (lane == kLanes - 1) warp_max[warp] = mine;
    float before = __shfl_up_sync(kFullMask, mine, 1);
    before = fmaxf(max_before, lane == 0 ? -INFINITY : before);
    __syncthreads();
    for (int w = 0; w < kMergeThreads / kLanes; ++w) {
      if (w < warp) before = fmaxf(before, warp_max[w]);
      max_before = fmaxf(max_before, warp_max[w]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float max = fmaxf(before, maxima[i]);
      const float right = exp2f(maxima[i] - max);
      lefts[4 * c + i] = before == -INFINITY ? 0.0f : exp2f(before - max);
      rights[4 * c + i] = sums[i] == 0.0f ? kLeftOut : right;
      right_sums[4 * c + i] = __fmul_rn(sums[i], right);
      before = max;
    }
    __syncthreads();
    if (c < head_dim) {
      // Loads do not wait for each other, only the sums do.
      constexpr int kAhead = 32;  // 64: 17 us more of a layer of 128K tokens
      const float* of_channel = part + first * next + c;
      for (int32_t ahead = 0; ahead < count; ahead += kAhead) {
        float values[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) values[i] = of_channel[min(ahead + i, count - 1) * next];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (ahead + i >= count || rights[ahead + i] == kLeftOut) continue;
          value = __fmaf_rn(value, lefts[ahead + i], __fmul_rn(values[i], rights[ahead + i]));
          sum = __fmaf_rn(sum, lefts[ahead + i], right_sums[ahead + i]);
        }
      }
    }
    __syncthreads();
  }
  if (c >= head_dim) return;
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
cudaError_t LaunchOf(const DenseAttentionShape& shape, Args& args, cudaStream_t stream) {
  constexpr size_t kBytes = SharedBytes<kHeadDim>();
  if (shape.way == DenseWay::kInTurn) {
    if (!shape.portable && HasGroupAttention(kHeadDim)) {
      return AttendInTurnByGroups(shape, args, stream);
    }
    const auto kernel = InTurnKernel<kHeadDim>;
    if (const cudaError_t error = AllowShared(kernel, kBytes); error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>(CeilDiv(int64_t{shape.max_chunk_tokens} * shape.group,
                                                  kInTurnWarps * kWarpRows)),
                    shape.layout.kv_heads, shape.num_chunks);
    kernel<<<grid, kInTurnWarps * kLanes, kBytes, stream>>>(args);
    return cudaGetLastError();
  }
  const auto kernel = SplitKernel<kHeadDim>;
  if (const cudaError_t error = AllowShared(kernel, kBytes); error != cudaSuccess) return error;
  const dim3 grid(args.splits, shape.layout.kv_heads, shape.num_chunks * args.tiles);
  // As many blocks as run at once, if there are more splits.
  int at_once = 0;
  if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &at_once, kernel, kSplitWarps * kLanes, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const int64_t rows = int64_t{grid.y} * grid.z;
  const int64_t slots = int64_t{at_once} * CurrentDevice().multiprocessors;
  args.splits_per_block =
      static_cast<int32_t>(CeilDiv(args.splits, std::max<int64_t>(slots / rows, 1)));
  const dim3 block_grid(static_cast<unsigned>(CeilDiv(args.splits, args.splits_per_block)), grid.y,
                        grid.z);
  if (const cudaError_t error =
          Launch(kernel, block_grid, kSplitWarps * kLanes, kBytes, stream, false, args);
      error != cudaSuccess) {
    return error;
  }
  return Launch(MergeSplitsKernel, dim3(kWarpRows, grid.y, grid.z), kMergeThreads, 0, stream, false,
                args, kHeadDim);
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
  Args args{q,
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
            SplitsOf(shape),
            1};
  switch (layout.head_dim) {
    case 64:
      return LaunchOf<64>(shape, args, stream);
    case 80:
      return LaunchOf<80>(shape, args, stream);
    case 96:
      return LaunchOf<96>(shape, args, stream);
    case 128:
      return LaunchOf<128>(shape, args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace winnow::kernels::cuda
