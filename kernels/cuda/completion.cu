// Mapping. One launch: blocks of at most 32 splits map the chosen rows (completion_map.cuh), and add their terms in registers
// with the matrix instruction, features by channels; weights go in as three bfloat16, so that nothing of them is lost that
// float32 would have kept. One more block per query and KV head maps the queries. A second launch: a block per eight
// features subtracts the splits' sums from the summary; the last of a query and head to come merges one more state
// into each head's.
//
// What was tried and lost (H200, 8 heads, d 128, F 64; us for 655 and 2048 chosen tokens a head; as it is: 33, 40):
//   float32 units, 32 vectors a block                        216, 287: a latency for each weight
//   a quarter of CompleteKernel's threads, <<<>>>             37,  45
//   16 warps a block, each for half of the 64 vectors         29,  48: one block on a multiprocessor
//   the same with 64 registers, two blocks                    36,  44: spills
#include <algorithm>

#include "kernels/attention_state.h"
#include "kernels/completion.h"
#include "kernels/cuda/completion.h"
#include "kernels/cuda/completion_map.cuh"
#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {
namespace {

using namespace completion;

constexpr int kMaxSplits = 32;
constexpr int kGroupFeatures = 8;  // of a block of CompleteKernel
constexpr int kCompleteThreads = 512;

// The chosen rows of a query and KV head, on the device.
struct Rows {
  const RowList* lists;
  Selection chosen;
  Pool pool;

  __device__ int32_t Count(int32_t list) const {
    return lists != nullptr ? lists[list].chosen_last - lists[list].chosen_first
                            : chosen.counts[list];
  }
  __device__ const uint8_t* Row(const DeviceQuery& query, int32_t list, int32_t head,
                                int32_t i) const {
    if (lists != nullptr) {
      return reinterpret_cast<const uint8_t*>(lists[list].rows[lists[list].chosen_first + i]);
    }
    return pool.Row(query.block_table, head, chosen.tokens[int64_t{list} * chosen.capacity + i]);
  }
};

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  Rows rows;
  const float* const* summaries;
  int32_t kv_heads, group, d, features;
  float* parts;         // [lists][kMaxSplits]: Z [F][d], then S [F]
  float* log_features;  // [lists][G][F] of the queries
  float* partial;       // [lists][groups of features][G][d] of the new state
  uint32_t* tickets;    // [lists], zero between calls
  float* states;

  __host__ __device__ int64_t PartFloats() const { return int64_t{features} * (d + 1); }
  __device__ float* Part(int32_t list, int32_t split) const {
    return parts + (int64_t{list} * kMaxSplits + split) * PartFloats();
  }
};

__host__ __device__ constexpr int32_t RowsPerSplit(int32_t count) {
  constexpr int32_t kMost = kTile * kMaxSplits;
  return kTile * (count > kMost ? (count + kMost - 1) / kMost : 1);
}

// Nothing to estimate: no mid, or all of it chosen.
__device__ __forceinline__ bool IsIdle(const DeviceQuery& query, int32_t count) {
  return query.mid.size() <= 0 || count >= query.mid.size();
}

__device__ void MapQueries(const Args& args, const DeviceFeatureMap& map, const DeviceQuery& query,
                           int32_t list, int32_t head, uint16_t* x) {
  const int32_t d = args.d, group = args.group, stride = d + kPadding;
  const float* q = args.q + query.row * args.q_stride + int64_t{head} * group * d;
  for (int32_t i = threadIdx.x; i < kMostGroup * d; i += kMapThreads) {
    const int32_t g = i / d, c = i - g * d;
    x[g * stride + c] = g < group ? RoundBf16(q[int64_t{g} * d + c]) : 0;
  }
  __syncthreads();
  float* to = args.log_features + int64_t{list} * group * args.features;
  const int row = threadIdx.x % kLanes / 4;
  MapTile<kMostGroup / 16>(map, head, x, x + kMostGroup * stride,
                           [&](int32_t f, const float(&a)[kMostGroup / 16][4]) {
                             if (f >= args.features) return;
#pragma unroll
                             for (int i = 0; i < kMostGroup / 8; ++i) {
                               const int g = i * 8 + row;
                               if (g >= group) continue;
                               *reinterpret_cast<float2*>(to + int64_t{g} * args.features + f) =
                                   make_float2(a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
                             }
                           });
}

// kPairs: of 16 features and 16 channels that a warp sums, at most.
template <DType kKv, int kPairs>
__global__ void __launch_bounds__(kMapThreads, kPairs > 4 ? 1 : 2)
    SumChosenKernel(const __grid_constant__ Args args,
                    const __grid_constant__ DeviceFeatureMap key_map,
                    const __grid_constant__ DeviceFeatureMap query_map) {
  const int32_t list = blockIdx.y, query_index = list / args.kv_heads;
  const int32_t head = list % args.kv_heads, d = args.d, features = args.features;
  const DeviceQuery query = args.queries[query_index];
  extern __shared__ uint4 shared[];
  auto* const x = reinterpret_cast<uint16_t*>(shared);
  LetNextStart();
  const bool maps_queries = blockIdx.x + 1 == gridDim.x;
  // Weights, which a step's other weights have pushed out of L2 since it last came here.
  if (maps_queries) {
    PrefetchMap(query_map, head);
  } else if (blockIdx.x == 0) {
    PrefetchMap(key_map, head);
  }
  WaitForEarlier();
  const int32_t count = args.rows.Count(list);
  if (IsIdle(query, count)) return;
  if (maps_queries) {
    MapQueries(args, query_map, query, list, head, x);
    return;
  }
  const int32_t per_split = RowsPerSplit(count);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * per_split;
  if (first >= count) return;
  const int32_t last = min(first + per_split, count);
  const float* m = args.summaries[query_index] + int64_t{head} * SummaryFloats(features, d);

  const int32_t stride = d + kPadding, padded = (features + 15) / 16 * 16;
  const int32_t weight_stride = padded + kPadding;
  uint16_t* const values = x + kTile * stride;
  uint16_t* const z = values + kTile * stride;
  // [3][kTile][weight_stride]: each the rounded rest of what the ones before leave.
  uint16_t* const weights = z + 2 * kTile * (key_map.InnerSteps() * 16 + kPadding);
  const int32_t weights_bytes = kTile * weight_stride * 2;
  __shared__ const uint8_t* rows[kTile];

  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int32_t feature_tiles = padded / 16, pairs = feature_tiles * (d / 16);
  const uint32_t my_weights =
      SharedAddress(weights) + (lane % 8 + lane / 16 * 8) * weight_stride * 2 + lane / 8 % 2 * 16;
  const uint32_t my_values = FragmentRow(SharedAddress(values), stride * 2, lane);
  float sums[kPairs][2][4] = {};  // Z
  float totals[2][2] = {};  // S, of this lane's tokens: of the warp's first tile, and its second
  for (int32_t tile = first; tile < last; tile += kTile) {
    __syncthreads();  // all have read what the tile before left
    const auto t = static_cast<int32_t>(threadIdx.x);
    if (t < kTile) {
      rows[t] = tile + t < last ? args.rows.Row(query, list, head, tile + t) : nullptr;
    }
    __syncthreads();
    StartRows<kKv>(rows, kTile, d, x, values);
    WaitForCopies<0>();
    __syncthreads();
    MapTile<kTile / 16>(key_map, head, x, z, [&](int32_t f, const float(&a)[kTile / 16][4]) {
      const bool exists = f < features;
      const float m0 = exists ? m[f] : INFINITY, m1 = exists ? m[f + 1] : INFINITY;
      float total0 = 0.0f, total1 = 0.0f;
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
        const int row = i * 8 + lane / 4;
        const bool chosen = tile + row < last;
        // A chosen token entered before, with the same log-features: none is above m.
        const float w0 = chosen ? expf(fminf(a[i / 2][i % 2 * 2] - m0, 0.0f)) : 0.0f;
        const float w1 = chosen ? expf(fminf(a[i / 2][i % 2 * 2 + 1] - m1, 0.0f)) : 0.0f;
        total0 += w0;
        total1 += w1;
        const uint32_t high = PackBf16(w0, w1);
        const float rest0 = w0 - WidenLow(high), rest1 = w1 - WidenHigh(high);
        const uint32_t middle = PackBf16(rest0, rest1);
        char* to = reinterpret_cast<char*>(weights + row * weight_stride + f);
        *reinterpret_cast<uint32_t*>(to) = high;
        *reinterpret_cast<uint32_t*>(to + weights_bytes) = middle;
        *reinterpret_cast<uint32_t*>(to + 2 * weights_bytes) = PackBf16Rest(rest0, rest1, middle);
      }
      if (f < kMapWarps * 8) {
        totals[0][0] += total0;
        totals[0][1] += total1;
      } else {
        totals[1][0] += total0;
        totals[1][1] += total1;
      }
    });
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int32_t pair = warp + j * kMapWarps;
      if (pair >= pairs) break;
      const uint32_t of_weights = my_weights + pair % feature_tiles * 32;
      const uint32_t of_values = my_values + pair / feature_tiles * 32;
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) {
        uint32_t v[4];
        LoadMatrix4Transposed(of_values + step * 16 * stride * 2, v);
#pragma unroll
        for (int part = 0; part < 3; ++part) {
          uint32_t w[4];
          LoadMatrix4Transposed(of_weights + part * weights_bytes + step * 16 * weight_stride * 2,
                                w);
          MultiplyAdd16x8x16(sums[j][0], w, v[0], v[1]);
          MultiplyAdd16x8x16(sums[j][1], w, v[2], v[3]);
        }
      }
    }
  }
  float* const part = args.Part(list, static_cast<int32_t>(blockIdx.x));
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int32_t pair = warp + j * kMapWarps;
    if (pair >= pairs) break;
    const int32_t f = pair % feature_tiles * 16 + lane / 4;
    const int32_t c = pair / feature_tiles * 16 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (f + i / 2 * 8 >= features) continue;
      *reinterpret_cast<float2*>(part + int64_t{f + i / 2 * 8} * d + c + i % 2 * 8) =
          make_float2(sums[j][i % 2][i / 2 * 2], sums[j][i % 2][i / 2 * 2 + 1]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int32_t f = (warp + j * kMapWarps) * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = totals[j][i];
      for (int offset = 4; offset < kLanes; offset *= 2) {
        total += __shfl_xor_sync(kFullMask, total, offset);
      }
      if (lane < 4 && f < features) part[int64_t{features} * d + f + i] = total;
    }
  }
}

// kGroup: at most so many queries of a KV head.
template <int kGroup>
__global__ void __launch_bounds__(kCompleteThreads)
    CompleteKernel(const __grid_constant__ Args args) {
  // Threads are channels, four times: each time of other features, and then of other query heads.
  constexpr int kQuarters = kCompleteThreads / kThreads;
  constexpr int kMine = kGroupFeatures / kQuarters;
  static_assert(kGroup % kQuarters == 0 && kGroupFeatures % kQuarters == 0);
  LetNextStart();
  const int32_t list = blockIdx.y, query_index = list / args.kv_heads;
  const int32_t head = list % args.kv_heads, d = args.d, features = args.features;
  const DeviceQuery query = args.queries[query_index];
  const float* m = args.summaries[query_index] + int64_t{head} * SummaryFloats(features, d);
  WaitForEarlier();
  const int32_t count = args.rows.Count(list), group = args.group;
  if (IsIdle(query, count)) return;
  const int32_t per_split = RowsPerSplit(count), splits = (count + per_split - 1) / per_split;
  const auto groups = static_cast<int32_t>(gridDim.x);
  const int32_t first_feature = static_cast<int32_t>(blockIdx.x) * kGroupFeatures;
  const float *sum = m + features, *sum_z = sum + features,
              *open_sum = sum_z + int64_t{features} * d, *open_z = open_sum + features;
  const int64_t part_floats = args.PartFloats();
  const float* parts = args.Part(list, 0);
  __shared__ float rest[kThreads];  // [F] of S, 0 where nothing is left
  __shared__ float weights[kGroup][kGroupFeatures], maxima[kGroup], totals[kGroup];
  __shared__ float values[kQuarters][kQuarters][kThreads];  // of features and of heads
  __shared__ bool is_last;
  const int c = threadIdx.x % kThreads, quarter = threadIdx.x / kThreads;
  if (quarter == 0 && c < features) {
    float chosen = 0.0f;
#pragma unroll 16
    for (int s = 0; s < splits; ++s) chosen += parts[s * part_floats + int64_t{features} * d + c];
    const float all = sum[c] + open_sum[c], left = all - chosen;
    rest[c] = left > kCompletionFloor * all ? left : 0.0f;
  }
  // What is left of Z.
  float left[kMine] = {};
  if (c < d) {
    float chosen[kMine] = {};
#pragma unroll 8
    for (int s = 0; s < splits; ++s) {
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        const int32_t f = first_feature + quarter + j * kQuarters;
        if (f < features) chosen[j] += parts[s * part_floats + int64_t{f} * d + c];
      }
    }
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int32_t f = first_feature + quarter + j * kQuarters;
      if (f >= features) continue;
      left[j] = sum_z[int64_t{f} * d + c] + open_z[int64_t{f} * d + c] - chosen[j];
    }
  }
  __syncthreads();
  for (int g = threadIdx.x / kLanes; g < group; g += kCompleteThreads / kLanes) {
    const int lane = threadIdx.x % kLanes;
    const float* b = args.log_features + (int64_t{list} * group + g) * features;
    float max = -INFINITY;
    for (int32_t f = lane; f < features; f += kLanes) {
      if (rest[f] > 0) max = fmaxf(max, b[f] + m[f] + logf(rest[f]));
    }
    max = WarpMax(max);
    float total = 0.0f;
    for (int32_t f = lane; f < features; f += kLanes) {
      const float weight = rest[f] > 0 ? expf(b[f] + m[f] - max) : 0.0f;
      if (f / kGroupFeatures == static_cast<int32_t>(blockIdx.x)) {
        weights[g][f - first_feature] = weight;
      }
      total += weight * rest[f];
    }
    total = WarpSum(total);
    if (lane == 0) {
      maxima[g] = max * kLog2E;
      totals[g] = total;
    }
  }
  __syncthreads();
  // One more state for each head: o_c = sum over features of weight * what is left of Z.
  float* partial = args.partial + (int64_t{list} * groups + blockIdx.x) * group * d;
  for (int first = 0; first < group; first += kQuarters) {
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      float value = 0.0f;
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        const int of_block = quarter + j * kQuarters;
        // What a feature keeps of Z without anything of S is rounding.
        if (first + i < group && first_feature + of_block < features &&
            rest[first_feature + of_block] > 0) {
          value = __fmaf_rn(weights[first + i][of_block], left[j], value);
        }
      }
      values[quarter][i][c] = value;
    }
    __syncthreads();
    const int g = first + quarter;
    if (g < group && c < d) {
      float value = values[0][quarter][c];
#pragma unroll
      for (int i = 1; i < kQuarters; ++i) value += values[i][quarter][c];
      partial[int64_t{g} * d + c] = value;
    }
    __syncthreads();
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&args.tickets[list], 1) == static_cast<uint32_t>(groups) - 1;
  }
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) args.tickets[list] = 0;
  __threadfence();
  for (int first = 0; first < group; first += kQuarters) {
    const int g = first + quarter;
    const bool adds = g < group && totals[g] != 0.0f;
    float* state =
        args.states + ((int64_t{query_index} * args.kv_heads + head) * group + g) * (d + 2);
    const float old_max = adds ? state[d] : 0.0f, old_sum = adds ? state[d + 1] : 0.0f;
    __syncthreads();  // maximum and sum were read by all
    if (!adds) continue;
    const float new_max = old_sum == 0.0f ? maxima[g] : fmaxf(old_max, maxima[g]);
    const float keep = old_sum == 0.0f ? 0.0f : exp2f(old_max - new_max);
    const float add = exp2f(maxima[g] - new_max);
    if (c < d) {
      const float* of_groups = args.partial + (int64_t{list} * groups * group + g) * d + c;
      float value = 0.0f;
#pragma unroll 8
      for (int i = 0; i < groups; ++i) value += __ldcg(of_groups + int64_t{i} * group * d);
      state[c] = (old_sum == 0.0f ? 0.0f : state[c] * keep) + value * add;
    }
    if (c == 0) {
      state[d] = new_max;
      state[d + 1] = old_sum * keep + totals[g] * add;
    }
  }
}

// Where the parts of the workspace lie.
struct Plan {
  size_t log_features, partial, tickets, tickets_bytes, size_bytes;
  int32_t groups;
  Plan(const CompletionShape& shape, const DeviceFeatureMap& map) {
    const size_t lists = size_t{1} * shape.num_queries * shape.layout.kv_heads;
    const size_t f = map.features, d = shape.layout.head_dim, group = shape.group;
    groups = static_cast<int32_t>(CeilDiv(map.features, kGroupFeatures));
    log_features = AlignUp(4 * lists * kMaxSplits * f * (d + 1), 256);
    partial = log_features + AlignUp(4 * lists * group * f, 256);
    tickets = partial + AlignUp(4 * lists * groups * group * d, 256);
    tickets_bytes = AlignUp(4 * lists, 256);
    size_bytes = tickets + tickets_bytes;
  }
};

template <DType kKv, int kPairs>
cudaError_t SumChosen(const Args& args, const DeviceFeatureMap& key_map,
                      const DeviceFeatureMap& query_map, dim3 grid, Stream stream) {
  const size_t bytes = std::max(SharedBytes(key_map), TileBytes(query_map, kMostGroup));
  return Launch(SumChosenKernel<kKv, kPairs>, grid, kMapThreads, bytes, stream, false, args,
                key_map, query_map);
}

}  // namespace

size_t CompleteStatesWorkspaceBytes(const CompletionShape& shape, const DeviceFeatureMap& key_map) {
  return Plan(shape, key_map).size_bytes;
}
ZeroedPart CompleteStatesZeroedPart(const CompletionShape& shape, const DeviceFeatureMap& key_map) {
  const Plan plan(shape, key_map);
  return {plan.tickets, plan.tickets_bytes};
}

cudaError_t CompleteStates(const CompletionShape& shape, const float* q, int64_t q_stride,
                           const DeviceQuery* queries, const ChosenRows& rows,
                           const float* const* summaries, const DeviceFeatureMap& key_map,
                           const DeviceFeatureMap& query_map, float* states, void* workspace,
                           Stream stream) {
  const KvLayout& layout = shape.layout;
  const int64_t num_lists = int64_t{shape.num_queries} * layout.kv_heads;
  if (IsRefused(key_map, layout) || IsRefused(query_map, layout) ||
      key_map.features != query_map.features || shape.group < 1 || shape.group > kMostGroup ||
      num_lists > 65535 || shape.max_chosen < 0) {
    return cudaErrorInvalidValue;
  }
  if (num_lists == 0) return cudaSuccess;
  const Plan plan(shape, key_map);
  auto* const memory = static_cast<std::byte*>(workspace);
  const Args args{q,
                  q_stride,
                  queries,
                  {rows.lists, rows.chosen, MakePool(rows.pool, layout)},
                  summaries,
                  layout.kv_heads,
                  shape.group,
                  layout.head_dim,
                  key_map.features,
                  reinterpret_cast<float*>(memory),
                  reinterpret_cast<float*>(memory + plan.log_features),
                  reinterpret_cast<float*>(memory + plan.partial),
                  reinterpret_cast<uint32_t*>(memory + plan.tickets),
                  states};
  const auto lists = static_cast<unsigned>(num_lists);
  const auto splits =
      static_cast<unsigned>(std::min<int64_t>(CeilDiv(shape.max_chosen, kTile), kMaxSplits));
  const int32_t pairs = PaddedFeatures(key_map) / 16 * (layout.head_dim / 16);
  const dim3 sum_grid(splits + 1, lists);
  const auto sum = [&]<DType kKv>(KvType<kKv>) {
    const auto of_type = pairs > 4 * kMapWarps ? SumChosen<kKv, 8> : SumChosen<kKv, 4>;
    return of_type(args, key_map, query_map, sum_grid, stream);
  };
  if (const cudaError_t error = ForKvType(layout.dtype, sum); error != cudaSuccess) {
    return error;
  }
  const auto complete = shape.group > 8 ? CompleteKernel<kMostGroup> : CompleteKernel<8>;
  return Launch(complete, dim3(static_cast<unsigned>(plan.groups), lists), kCompleteThreads, 0,
                stream, false, args);
}

}  // namespace winnow::kernels::cuda
