// Mapping. Blocks of at most 16 splits map the chosen rows (completion_map.cuh) and add their terms to sums in shared
// memory, which become parts; then a block per query and KV head subtracts them from the summary and merges one more
// state into each head's.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/attention_state.h"
#include "kernels/completion.h"
#include "kernels/cuda/completion.h"
#include "kernels/cuda/completion_map.cuh"
#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {
namespace {

using namespace completion;

constexpr int kMaxSplits = 16;

struct CompleteArgs {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  const RowList* lists;
  const float* const* summaries;
  int32_t kv_heads, group, d, features;
  float* parts;  // [lists][kMaxSplits][F][d + 1]: Z, then S
  float* states;
};

__host__ __device__ constexpr int32_t RowsPerSplit(int32_t count) {
  constexpr int32_t kMost = kTile * kMaxSplits;
  return kTile * (count > kMost ? (count + kMost - 1) / kMost : 1);
}

// Nothing to estimate: no mid, or all of it chosen.
__device__ __forceinline__ bool IsIdle(const DeviceQuery& query, const RowList& list) {
  return query.mid.size() <= 0 || list.chosen_last - list.chosen_first >= query.mid.size();
}

__global__ void __launch_bounds__(kThreads)
    SumChosenKernel(const __grid_constant__ CompleteArgs args,
                    const __grid_constant__ DeviceFeatureMap map) {
  const int32_t list_index = blockIdx.y, query_index = list_index / args.kv_heads;
  const int32_t head = list_index % args.kv_heads, d = args.d, features = args.features;
  const RowList list = args.lists[list_index];
  if (IsIdle(args.queries[query_index], list)) return;
  const int32_t count = list.chosen_last - list.chosen_first, per_split = RowsPerSplit(count);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * per_split;
  if (first >= count) return;
  const int32_t last = min(first + per_split, count);
  const float* m = args.summaries[query_index] + int64_t{head} * SummaryFloats(features, d);

  extern __shared__ float4 shared4[];
  float* x = reinterpret_cast<float*>(shared4);
  float* z = x + d * kTile;
  float* a = z + map.inner * kTile;
  float* sums = a + features * kTile;  // [F][d + 1]
  for (int32_t i = threadIdx.x; i < features * (d + 1); i += kThreads) sums[i] = 0.0f;
  for (int32_t tile = first; tile < last; tile += kTile) {
    __syncthreads();
    LoadTile(d, x, [&](int t) {
      return tile + t < last ? list.rows[list.chosen_first + tile + t] : nullptr;
    });
    __syncthreads();
    MapTile(map, head, x, z, a);
    for (int32_t i = threadIdx.x; i < features * kTile; i += kThreads) {
      const int32_t f = i / kTile, t = i % kTile;
      // A chosen token entered before, with the same log-features: none is above m.
      a[i] = tile + t < last ? expf(fminf(a[i] - m[f], 0.0f)) : 0.0f;
    }
    __syncthreads();
    const auto c = static_cast<int32_t>(threadIdx.x);
    if (c < d) {
      float values[kTile];
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        values[t] = tile + t < last ? WidenBf16(reinterpret_cast<const uint16_t*>(
                                          list.rows[list.chosen_first + tile + t])[d + c])
                                    : 0.0f;
      }
      for (int32_t f = 0; f < features; ++f) {
        float sum = sums[f * (d + 1) + c];
#pragma unroll
        for (int t = 0; t < kTile; t += 4) {
          const float4 w = *reinterpret_cast<const float4*>(a + f * kTile + t);
          sum = __fmaf_rn(w.x, values[t], sum);
          sum = __fmaf_rn(w.y, values[t + 1], sum);
          sum = __fmaf_rn(w.z, values[t + 2], sum);
          sum = __fmaf_rn(w.w, values[t + 3], sum);
        }
        sums[f * (d + 1) + c] = sum;
      }
    }
    for (int32_t f = threadIdx.x; f < features; f += kThreads) {
      float sum = sums[f * (d + 1) + d];
      for (int t = 0; t < kTile; ++t) sum += a[f * kTile + t];
      sums[f * (d + 1) + d] = sum;
    }
  }
  __syncthreads();
  float* part = args.parts + (int64_t{list_index} * kMaxSplits + blockIdx.x) * features * (d + 1);
  for (int32_t i = threadIdx.x; i < features * (d + 1); i += kThreads) part[i] = sums[i];
}

__global__ void __launch_bounds__(kThreads)
    CompleteKernel(const __grid_constant__ CompleteArgs args,
                   const __grid_constant__ DeviceFeatureMap map) {
  const int32_t list_index = blockIdx.x, query_index = list_index / args.kv_heads;
  const int32_t head = list_index % args.kv_heads, d = args.d, features = args.features;
  const DeviceQuery query = args.queries[query_index];
  const RowList list = args.lists[list_index];
  if (IsIdle(query, list)) return;
  const int32_t count = list.chosen_last - list.chosen_first, per_split = RowsPerSplit(count);
  const int32_t splits = (count + per_split - 1) / per_split;
  extern __shared__ float4 shared4[];
  float* x = reinterpret_cast<float*>(shared4);
  float* z = x + d * kTile;
  float* b = z + map.inner * kTile;    // [F][kTile]: log-features, then weights
  float* rest = b + features * kTile;  // [F]
  __shared__ float maxima[kTile], totals[kTile];
  const float* q = args.q + query.row * args.q_stride + int64_t{head} * args.group * d;
  for (int32_t i = threadIdx.x; i < d * kTile; i += kThreads) {
    const int32_t c = i / kTile, g = i % kTile;
    x[i] = g < args.group ? WidenBf16(RoundBf16(q[int64_t{g} * d + c])) : 0.0f;
  }
  __syncthreads();
  MapTile(map, head, x, z, b);
  const float* m = args.summaries[query_index] + int64_t{head} * SummaryFloats(features, d);
  const float *sum = m + features, *sum_z = sum + features,
              *open_sum = sum_z + int64_t{features} * d, *open_z = open_sum + features;
  const int64_t part_floats = int64_t{features} * (d + 1);
  const float* parts = args.parts + int64_t{list_index} * kMaxSplits * part_floats;
  for (int32_t f = threadIdx.x; f < features; f += kThreads) {
    float chosen = 0.0f;
    for (int s = 0; s < splits; ++s) chosen += parts[s * part_floats + f * (d + 1) + d];
    const float all = sum[f] + open_sum[f], left = all - chosen;
    rest[f] = left > kCompletionFloor * all ? left : 0.0f;
  }
  __syncthreads();
  if (static_cast<int32_t>(threadIdx.x) < args.group) {
    const int g = static_cast<int>(threadIdx.x);
    float max = -INFINITY, total = 0.0f;
    for (int32_t f = 0; f < features; ++f) {
      if (rest[f] > 0) max = fmaxf(max, b[f * kTile + g] + m[f] + logf(rest[f]));
    }
    for (int32_t f = 0; f < features; ++f) {
      const float weight = rest[f] > 0 ? expf(b[f * kTile + g] + m[f] - max) : 0.0f;
      b[f * kTile + g] = weight;
      total += weight * rest[f];
    }
    maxima[g] = max * kLog2E;
    totals[g] = total;
  }
  __syncthreads();
  // One more state for each head: o_c = sum over features of weight * what is left of Z.
  const auto c = static_cast<int32_t>(threadIdx.x);
  float values[kTile] = {};
  if (c < d) {
    for (int32_t f = 0; f < features; ++f) {
      if (!(rest[f] > 0)) continue;
      float chosen = 0.0f;
#pragma unroll 8
      for (int s = 0; s < splits; ++s) chosen += parts[s * part_floats + f * (d + 1) + c];
      const float left = sum_z[int64_t{f} * d + c] + open_z[int64_t{f} * d + c] - chosen;
#pragma unroll
      for (int g = 0; g < kTile; g += 4) {
        const float4 w = *reinterpret_cast<const float4*>(b + f * kTile + g);
        values[g] = __fmaf_rn(w.x, left, values[g]);
        values[g + 1] = __fmaf_rn(w.y, left, values[g + 1]);
        values[g + 2] = __fmaf_rn(w.z, left, values[g + 2]);
        values[g + 3] = __fmaf_rn(w.w, left, values[g + 3]);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kTile; ++g) {
    if (g >= args.group || totals[g] == 0.0f) continue;
    float* state =
        args.states + ((int64_t{query_index} * args.kv_heads + head) * args.group + g) * (d + 2);
    const float old_max = state[d], old_sum = state[d + 1];
    const float new_max = old_sum == 0.0f ? maxima[g] : fmaxf(old_max, maxima[g]);
    const float keep = old_sum == 0.0f ? 0.0f : exp2f(old_max - new_max);
    const float add = exp2f(maxima[g] - new_max);
    __syncthreads();  // maximum and sum were read by all
    if (c < d) state[c] = (old_sum == 0.0f ? 0.0f : state[c] * keep) + values[g] * add;
    if (c == 0) {
      state[d] = new_max;
      state[d + 1] = old_sum * keep + totals[g] * add;
    }
  }
}

// y [out] of an affine stage, in double: columns of what is folded.
struct Affine {
  std::vector<double> weight;  // [out][in]
  std::vector<double> bias;    // [out]
  int32_t in, out;
};
Affine StageOf(const AffineStage& stage, int32_t head) {
  Affine affine{{}, {}, stage.in, stage.out};
  for (int64_t i = 0; i < int64_t{stage.in} * stage.out; ++i) {
    affine.weight.push_back(ToFloat(BF16{stage.weight[int64_t{head} * stage.in * stage.out + i]}));
  }
  for (int32_t o = 0; o < stage.out; ++o) {
    affine.bias.push_back(stage.bias[int64_t{head} * stage.out + o]);
  }
  return affine;
}
// second(first(x)).
Affine Compose(const Affine& second, const Affine& first) {
  Affine both{std::vector<double>(int64_t{second.out} * first.in), second.bias, first.in,
              second.out};
  for (int32_t o = 0; o < second.out; ++o) {
    for (int32_t k = 0; k < second.in; ++k) {
      const double w = second.weight[int64_t{o} * second.in + k];
      for (int32_t i = 0; i < first.in; ++i) {
        both.weight[int64_t{o} * first.in + i] += w * first.weight[int64_t{k} * first.in + i];
      }
      both.bias[o] += w * first.bias[k];
    }
  }
  return both;
}

}  // namespace

size_t PackedFeatureMapBytes(const FeatureMapWeights& weights) {
  const size_t d = weights.stem.in, u = weights.gate.out, f = weights.out.out;
  return size_t{4} * weights.kv_heads * (d * 2 * u + 2 * u + (d + u) * f + f) + 4 * 256;
}

DeviceFeatureMap PackFeatureMap(const FeatureMapWeights& weights, void* host, void* device) {
  const int32_t d = weights.stem.in, u = weights.gate.out, f = weights.out.out;
  DeviceFeatureMap map{nullptr, nullptr, nullptr, nullptr, weights.kv_heads, d, u, f};
  if (IsRefused(map)) return {};
  size_t at = 0;
  const auto take = [&](size_t floats, const float** on_device) {
    float* on_host = reinterpret_cast<float*>(static_cast<std::byte*>(host) + at);
    *on_device = reinterpret_cast<const float*>(static_cast<std::byte*>(device) + at);
    at += AlignUp(floats * 4, 256);
    return on_host;
  };
  const size_t heads = weights.kv_heads;
  float* gate_up = take(heads * d * 2 * u, &map.gate_up);
  float* gate_up_bias = take(heads * 2 * u, &map.gate_up_bias);
  float* out = take(heads * (d + u) * f, &map.out);
  float* out_bias = take(heads * f, &map.out_bias);
  for (int32_t head = 0; head < weights.kv_heads; ++head) {
    const Affine stem = StageOf(weights.stem, head), last = StageOf(weights.out, head);
    const Affine gate = Compose(StageOf(weights.gate, head), stem);
    const Affine up = Compose(StageOf(weights.up, head), stem);
    const Affine of_x = Compose(last, stem);
    Affine of_z = Compose(last, StageOf(weights.down, head));
    for (int32_t o = 0; o < u; ++o) {
      for (int32_t i = 0; i < d; ++i) {
        float* row = gate_up + (size_t{1} * head * d + i) * 2 * u;
        row[o] = static_cast<float>(gate.weight[int64_t{o} * d + i]);
        row[u + o] = static_cast<float>(up.weight[int64_t{o} * d + i]);
      }
      gate_up_bias[size_t{2} * head * u + o] = static_cast<float>(gate.bias[o]);
      gate_up_bias[size_t{2} * head * u + u + o] = static_cast<float>(up.bias[o]);
    }
    for (int32_t o = 0; o < f; ++o) {
      float* column = out + size_t{1} * head * (d + u) * f + o;
      for (int32_t i = 0; i < d; ++i) {
        column[size_t{1} * i * f] = static_cast<float>(of_x.weight[int64_t{o} * d + i]);
      }
      for (int32_t i = 0; i < u; ++i) {
        column[size_t{1} * (d + i) * f] = static_cast<float>(of_z.weight[int64_t{o} * u + i]);
      }
      // Both compositions have the last stage's bias.
      out_bias[size_t{1} * head * f + o] =
          static_cast<float>(of_x.bias[o] + of_z.bias[o] - last.bias[o]);
    }
  }
  return map;
}

size_t CompleteStatesWorkspaceBytes(const CompletionShape& shape, const DeviceFeatureMap& key_map) {
  return size_t{4} * shape.num_queries * shape.layout.kv_heads * kMaxSplits * key_map.features *
         (shape.layout.head_dim + 1);
}

cudaError_t CompleteStates(const CompletionShape& shape, const float* q, int64_t q_stride,
                           const DeviceQuery* queries, const RowList* lists,
                           const float* const* summaries, const DeviceFeatureMap& key_map,
                           const DeviceFeatureMap& query_map, float* states, void* workspace,
                           cudaStream_t stream) {
  const KvLayout& layout = shape.layout;
  const int64_t num_lists = int64_t{shape.num_queries} * layout.kv_heads;
  if (IsRefused(key_map, layout) || IsRefused(query_map, layout) ||
      key_map.features != query_map.features || shape.group < 1 || shape.group > kTile ||
      num_lists > 65535 || shape.max_chosen < 0) {
    return cudaErrorInvalidValue;
  }
  if (num_lists == 0) return cudaSuccess;
  const CompleteArgs args{q,
                          q_stride,
                          queries,
                          lists,
                          summaries,
                          layout.kv_heads,
                          shape.group,
                          layout.head_dim,
                          key_map.features,
                          static_cast<float*>(workspace),
                          states};
  if (shape.max_chosen > 0) {
    const size_t bytes = SharedBytes(key_map);
    if (const cudaError_t error = AllowShared(SumChosenKernel, bytes); error != cudaSuccess) {
      return error;
    }
    const auto splits =
        static_cast<unsigned>(std::min<int64_t>(CeilDiv(shape.max_chosen, kTile), kMaxSplits));
    SumChosenKernel<<<dim3(splits, static_cast<unsigned>(num_lists)), kThreads, bytes, stream>>>(
        args, key_map);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  const size_t bytes = TileBytes(query_map) + size_t{4} * query_map.features;
  if (const cudaError_t error = AllowShared(CompleteKernel, bytes); error != cudaSuccess) {
    return error;
  }
  CompleteKernel<<<static_cast<unsigned>(num_lists), kThreads, bytes, stream>>>(args, query_map);
  return cudaGetLastError();
}

}  // namespace winnow::kernels::cuda
