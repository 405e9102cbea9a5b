// Tokens that enter a summary. One launch maps them to log-features. Where few enter, as in a decode step, a second one takes
// them in, token by token: a block per four features and KV head, a thread per channel.
//
// Where many enter, as in a prompt, the summary's blocks of 64 tokens go side by side, and the bits stay those of
// one token after the other: what a token does to the sums depends on the largest log-feature so far, and that is a
// maximum, which needs no order. So a launch finds each block's maxima; a second one adds up each block from nothing,
// knowing the maxima before it, and notes by what factor each token rescaled; a third one, over the blocks in order,
// rescales the sums of closed blocks by those factors and adds the next block's.
//
// One after the other, 8192 tokens took 5.0 ms (H200, 8 heads, d 128, F 64).
#include <algorithm>

#include "kernels/cuda/completion_map.cuh"

namespace winnow::kernels::cuda {
namespace {

using namespace completion;

constexpr int kAhead = 16;                 // tokens that are loaded together before they enter
constexpr int32_t kLeastSideBySide = 128;  // tokens
constexpr int kBlockFeatures = 16;         // of a block of threads, where blocks go side by side
constexpr int kBlocksAhead = 8;

// Where a summary's parts lie (kernels/retrieval.h: m[F], S[F], Z[F][d], then S and Z of the open block).
struct SummaryParts {
  float *m, *sum, *z, *open_sum, *open_z;
  __device__ SummaryParts(float* summary, int32_t head, int32_t features, int32_t d)
      : m(summary + int64_t{head} * SummaryFloats(features, d)),
        sum(m + features),
        z(sum + features),
        open_sum(z + int64_t{features} * d),
        open_z(open_sum + features) {}
};

struct Args {
  const DeviceExtension* extensions;
  int32_t max_tokens, max_blocks;  // of an extension
  Pool pool;
  int32_t kv_heads, d, features, unused;
  float*
      log_features;  // [extensions][Hkv][max_tokens][F]; where blocks go side by side, then factors
  // Of the blocks that an extension's tokens lie in, [extensions][Hkv][max_blocks]:
  float* maxima;    // [F]
  float* sums;      // [F]
  float* z;         // [F][d]
  uint64_t* grown;  // [groups of kBlockFeatures]: a bit per token that is larger than all before
  float* last_m;    // [extensions][Hkv][F]

  __device__ int64_t ListOf(int32_t head) const { return int64_t{blockIdx.z} * kv_heads + head; }
  __device__ int32_t groups() const { return (features + kBlockFeatures - 1) / kBlockFeatures; }
};

// Tokens of an extension that are of one block.
struct BlockTokens {
  int32_t first, last;
  bool closes;
  __device__ BlockTokens(const TokenRange& tokens, int32_t block) {
    const int32_t begin = (tokens.first / kSummaryBlockTokens + block) * kSummaryBlockTokens;
    first = max(tokens.first, begin);
    last = min(tokens.last, begin + kSummaryBlockTokens);
    closes = begin + kSummaryBlockTokens <= tokens.last;
  }
};

// kRowTiles: of 16 tokens, of a block.
template <DType kKv, int kRowTiles>
__global__ void __launch_bounds__(kMapThreads, 2)
    MapKeysKernel(const __grid_constant__ Args args, const __grid_constant__ DeviceFeatureMap map) {
  constexpr int kTokens = kRowTiles * 16;
  LetNextStart();
  // Weights, which a step's other weights have pushed out of L2 since it last came here.
  if (blockIdx.x == 0) PrefetchMap(map, static_cast<int32_t>(blockIdx.y));
  WaitForEarlier();
  const DeviceExtension extension = args.extensions[blockIdx.z];
  const int32_t head = blockIdx.y, from = static_cast<int32_t>(blockIdx.x) * kTokens;
  const int32_t first = extension.tokens.first + from, last = extension.tokens.last;
  if (first >= last) return;
  extern __shared__ uint4 shared[];
  auto* const x = reinterpret_cast<uint16_t*>(shared);
  __shared__ const uint8_t* rows[kTokens];
  const auto t = static_cast<int32_t>(threadIdx.x);
  if (t < kTokens) {
    rows[t] = first + t < last ? args.pool.Row(extension.block_table, head, first + t) : nullptr;
  }
  __syncthreads();
  StartRows<kKv>(rows, kTokens, map.head_dim, x, nullptr);
  WaitForCopies<0>();
  __syncthreads();
  float* to = args.log_features + (args.ListOf(head) * args.max_tokens + from) * map.features;
  const int row = t % kLanes / 4;
  MapTile<kRowTiles>(map, head, x, x + kTokens * (map.head_dim + kPadding),
                     [&](int32_t f, const float(&a)[kRowTiles][4]) {
                       if (f >= map.features) return;
#pragma unroll
                       for (int i = 0; i < 2 * kRowTiles; ++i) {
                         if (first + i * 8 + row >= last) continue;
                         *reinterpret_cast<float2*>(to + int64_t{i * 8 + row} * map.features + f) =
                             make_float2(a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
                       }
                     });
}

// A few tokens. A thread is a channel of four features; all threads keep the same m and sums.
template <DType kKv>
__global__ void __launch_bounds__(kThreads) EnterKernel(const __grid_constant__ Args args) {
  LetNextStart();
  WaitForEarlier();
  const DeviceExtension extension = args.extensions[blockIdx.z];
  const int32_t head = blockIdx.y, first_feature = blockIdx.x * kFeaturesPerBlock;
  const int32_t d = args.d, features = args.features;
  const auto c = static_cast<int32_t>(threadIdx.x);
  const auto [m, sum, z, open_sum, open_z] = SummaryParts(extension.summary, head, features, d);
  float my_m[kFeaturesPerBlock], my_sum[kFeaturesPerBlock], my_open_sum[kFeaturesPerBlock];
  float my_z[kFeaturesPerBlock], my_open_z[kFeaturesPerBlock];
#pragma unroll
  for (int j = 0; j < kFeaturesPerBlock; ++j) {
    const int32_t f = first_feature + j;
    const bool keep = extension.clear == 0;
    my_m[j] = keep ? m[f] : -INFINITY;
    my_sum[j] = keep ? sum[f] : 0.0f;
    my_open_sum[j] = keep ? open_sum[f] : 0.0f;
    my_z[j] = keep && c < d ? z[int64_t{f} * d + c] : 0.0f;
    my_open_z[j] = keep && c < d ? open_z[int64_t{f} * d + c] : 0.0f;
  }
  const float* a =
      args.log_features + args.ListOf(head) * args.max_tokens * features + first_feature;
  // What several tokens bring is loaded before the first of them enters: loads do not wait for each
  // other, only sums do.
  for (int32_t first = extension.tokens.first; first < extension.tokens.last; first += kAhead) {
    float4 loaded[kAhead];
    float values[kAhead];
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      const bool inside = first + t < extension.tokens.last;
      loaded[t] = inside ? *reinterpret_cast<const float4*>(a + int64_t{t} * features)
                         : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      values[t] = inside && c < d ? RoundedValueAt<kKv>(
                                        args.pool.Row(extension.block_table, head, first + t), d, c)
                                  : 0.0f;
    }
    a += int64_t{kAhead} * features;
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      if (first + t >= extension.tokens.last) break;
      const float of_token[kFeaturesPerBlock] = {loaded[t].x, loaded[t].y, loaded[t].z,
                                                 loaded[t].w};
#pragma unroll
      for (int j = 0; j < kFeaturesPerBlock; ++j) {
        if (of_token[j] > my_m[j]) {
          const float factor = expf(my_m[j] - of_token[j]);
          my_m[j] = of_token[j];
          my_sum[j] = __fmul_rn(my_sum[j], factor);
          my_open_sum[j] = __fmul_rn(my_open_sum[j], factor);
          my_z[j] *= factor;
          my_open_z[j] *= factor;
        }
        const float weight = expf(of_token[j] - my_m[j]);
        my_open_sum[j] = __fadd_rn(my_open_sum[j], weight);
        my_open_z[j] = __fmaf_rn(weight, values[t], my_open_z[j]);
      }
      if ((first + t + 1) % kSummaryBlockTokens == 0) {
#pragma unroll
        for (int j = 0; j < kFeaturesPerBlock; ++j) {
          my_sum[j] = __fadd_rn(my_sum[j], my_open_sum[j]);
          my_z[j] = __fadd_rn(my_z[j], my_open_z[j]);
          my_open_sum[j] = my_open_z[j] = 0.0f;
        }
      }
    }
  }
  __syncthreads();  // all have read what is now written
#pragma unroll
  for (int j = 0; j < kFeaturesPerBlock; ++j) {
    const int32_t f = first_feature + j;
    if (c == 0) {
      m[f] = my_m[j];
      sum[f] = my_sum[j];
      open_sum[f] = my_open_sum[j];
    }
    if (c < d) {
      z[int64_t{f} * d + c] = my_z[j];
      open_z[int64_t{f} * d + c] = my_open_z[j];
    }
  }
}

// Each block's largest log-features. A thread is a feature.
__global__ void __launch_bounds__(kThreads) MaximaKernel(const __grid_constant__ Args args) {
  LetNextStart();
  WaitForEarlier();
  const DeviceExtension extension = args.extensions[blockIdx.z];
  const int32_t head = blockIdx.y, features = args.features;
  const BlockTokens tokens(extension.tokens, static_cast<int32_t>(blockIdx.x));
  const auto f = static_cast<int32_t>(threadIdx.x);
  if (tokens.first >= tokens.last || f >= features) return;
  const float* a =
      args.log_features + (args.ListOf(head) * args.max_tokens - extension.tokens.first) * features;
  float max = -INFINITY;
#pragma unroll 8
  for (int32_t token = tokens.first; token < tokens.last; ++token) {
    max = fmaxf(max, a[int64_t{token} * features + f]);
  }
  args.maxima[(args.ListOf(head) * args.max_blocks + blockIdx.x) * features + f] = max;
}

// Each block's sums. A thread is a channel of 16 features.
template <DType kKv>
__global__ void __launch_bounds__(kThreads) BlockKernel(const __grid_constant__ Args args) {
  static_assert(kThreads / 32 * 4 == kBlockFeatures && kSummaryBlockTokens == 64);
  LetNextStart();
  WaitForEarlier();
  const DeviceExtension extension = args.extensions[blockIdx.z];
  const int32_t groups = args.groups(), group = static_cast<int32_t>(blockIdx.y) % groups;
  const int32_t head = static_cast<int32_t>(blockIdx.y) / groups;
  const int32_t first_feature = group * kBlockFeatures, d = args.d, features = args.features;
  const auto block = static_cast<int32_t>(blockIdx.x);
  const BlockTokens tokens(extension.tokens, block);
  if (tokens.first >= tokens.last) return;
  const int32_t count = tokens.last - tokens.first;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t list = args.ListOf(head), of_block = list * args.max_blocks + block;
  const auto [m, sum, z, open_sum, open_z] = SummaryParts(extension.summary, head, features, d);
  const bool keep = extension.clear == 0;

  __shared__ float before[kBlockFeatures];  // the largest before this block
  __shared__ float parts[kThreads / kBlockFeatures][kBlockFeatures];
  __shared__ float logs[kBlockFeatures][kSummaryBlockTokens + 1];
  __shared__ float4 weights4[kSummaryBlockTokens][kBlockFeatures / 4];
  __shared__ float4 factors4[kSummaryBlockTokens][kBlockFeatures / 4];
  __shared__ unsigned grown[2];  // bits of tokens
  float(*weights)[kBlockFeatures] = reinterpret_cast<float(*)[kBlockFeatures]>(weights4);
  float(*factors)[kBlockFeatures] = reinterpret_cast<float(*)[kBlockFeatures]>(factors4);
  {
    const int j = threadIdx.x % kBlockFeatures, f = first_feature + j;
    float max = -INFINITY;
    if (f < features) {
      const float* maxima = args.maxima + list * args.max_blocks * features + f;
      for (int32_t b = threadIdx.x / kBlockFeatures; b < block; b += kThreads / kBlockFeatures) {
        max = fmaxf(max, maxima[int64_t{b} * features]);
      }
    }
    parts[threadIdx.x / kBlockFeatures][j] = max;
  }
  float* log_features =
      args.log_features +
      (list * args.max_tokens + tokens.first - extension.tokens.first) * features + first_feature;
  for (int32_t i = threadIdx.x; i < kSummaryBlockTokens * kBlockFeatures; i += kThreads) {
    const int32_t t = i / kBlockFeatures, j = i % kBlockFeatures;
    logs[j][t] = t < count && first_feature + j < features ? log_features[int64_t{t} * features + j]
                                                           : -INFINITY;
  }
  if (threadIdx.x < 2) grown[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < kBlockFeatures) {
    const int32_t f = first_feature + static_cast<int32_t>(threadIdx.x);
    float max = keep && f < features ? m[f] : -INFINITY;
    for (int i = 0; i < kThreads / kBlockFeatures; ++i) max = fmaxf(max, parts[i][threadIdx.x]);
    before[threadIdx.x] = max;
  }
  __syncthreads();
  // A warp is four features, a lane a token of each half.
  for (int j = warp * 4; j < warp * 4 + 4; ++j) {
    float largest = before[j];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = half * 32 + lane;
      const float log = logs[j][t];
      float with = log;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(kFullMask, with, offset);
        if (lane >= offset) with = fmaxf(with, other);
      }
      with = fmaxf(with, largest);
      float without = __shfl_up_sync(kFullMask, with, 1);
      if (lane == 0) without = largest;
      const bool grows = log > without;
      weights[t][j] = expf(log - with);
      factors[t][j] = grows ? expf(without - log) : 1.0f;
      const unsigned bits = __ballot_sync(kFullMask, grows);
      if (lane == 0 && bits != 0) atomicOr(&grown[half], bits);
      largest = __shfl_sync(kFullMask, with, 31);
    }
    const bool is_last = tokens.last == extension.tokens.last;
    if (lane == 0 && is_last && first_feature + j < features) {
      args.last_m[list * features + first_feature + j] = largest;
    }
  }
  __syncthreads();

  const auto c = static_cast<int32_t>(threadIdx.x);
  // Of a block that was begun before, what it has.
  const bool goes_on = keep && block == 0;
  float my_z[kBlockFeatures];
#pragma unroll
  for (int j = 0; j < kBlockFeatures; ++j) {
    const int32_t f = first_feature + j;
    my_z[j] = goes_on && c < d && f < features ? open_z[int64_t{f} * d + c] : 0.0f;
  }
  for (int32_t first = 0; first < count; first += kAhead) {
    float values[kAhead];
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      values[t] =
          first + t < count && c < d
              ? RoundedValueAt<kKv>(
                    args.pool.Row(extension.block_table, head, tokens.first + first + t), d, c)
              : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      const int32_t token = first + t;
      if (token >= count) break;
      if ((grown[token / 32] >> token % 32 & 1) != 0) {
#pragma unroll
        for (int j = 0; j < kBlockFeatures; ++j) my_z[j] *= factors[token][j];
      }
#pragma unroll
      for (int j = 0; j < kBlockFeatures; j += 4) {
        const float4 weight = weights4[token][j / 4];
        my_z[j] = __fmaf_rn(weight.x, values[t], my_z[j]);
        my_z[j + 1] = __fmaf_rn(weight.y, values[t], my_z[j + 1]);
        my_z[j + 2] = __fmaf_rn(weight.z, values[t], my_z[j + 2]);
        my_z[j + 3] = __fmaf_rn(weight.w, values[t], my_z[j + 3]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kBlockFeatures; ++j) {
    const int32_t f = first_feature + j;
    if (c < d && f < features) args.z[(of_block * features + f) * d + c] = my_z[j];
  }
  if (c < kBlockFeatures && first_feature + c < features) {
    float my_sum = goes_on ? open_sum[first_feature + c] : 0.0f;
    for (int32_t t = 0; t < count; ++t) {
      // A factor is 1 where nothing grew. Never one operation, which would round once.
      my_sum = __fadd_rn(__fmul_rn(my_sum, factors[t][c]), weights[t][c]);
    }
    args.sums[of_block * features + first_feature + c] = my_sum;
  }
  // Log-features have been read, by this block alone.
  for (int32_t i = threadIdx.x; i < count * kBlockFeatures; i += kThreads) {
    const int32_t t = i / kBlockFeatures, j = i % kBlockFeatures;
    if (first_feature + j < features) log_features[int64_t{t} * features + j] = factors[t][j];
  }
  if (threadIdx.x == 0) {
    args.grown[of_block * groups + group] = uint64_t{grown[1]} << 32 | grown[0];
  }
}

// Blocks in order. A thread is a channel of four features.
__global__ void __launch_bounds__(kThreads) CloseKernel(const __grid_constant__ Args args) {
  LetNextStart();
  WaitForEarlier();
  const DeviceExtension extension = args.extensions[blockIdx.z];
  const int32_t head = blockIdx.y, first_feature = blockIdx.x * kFeaturesPerBlock;
  const int32_t d = args.d, features = args.features;
  const auto c = static_cast<int32_t>(threadIdx.x);
  const int64_t list = args.ListOf(head);
  const auto [m, sum, z, open_sum, open_z] = SummaryParts(extension.summary, head, features, d);
  float my_sum[kFeaturesPerBlock], my_z[kFeaturesPerBlock];
  float my_open_sum[kFeaturesPerBlock], my_open_z[kFeaturesPerBlock];
#pragma unroll
  for (int j = 0; j < kFeaturesPerBlock; ++j) {
    const int32_t f = first_feature + j;
    const bool keep = extension.clear == 0;
    my_sum[j] = keep ? sum[f] : 0.0f;
    my_z[j] = keep && c < d ? z[int64_t{f} * d + c] : 0.0f;
    my_open_sum[j] = keep ? open_sum[f] : 0.0f;
    my_open_z[j] = keep && c < d ? open_z[int64_t{f} * d + c] : 0.0f;
  }
  const TokenRange all = extension.tokens;
  const int32_t blocks =
      all.size() <= 0 ? 0
                      : (all.last - 1) / kSummaryBlockTokens - all.first / kSummaryBlockTokens + 1;
  for (int32_t first = 0; first < blocks; first += kBlocksAhead) {
    float sums[kBlocksAhead][kFeaturesPerBlock], zs[kBlocksAhead][kFeaturesPerBlock];
    uint64_t grown[kBlocksAhead];
#pragma unroll
    for (int b = 0; b < kBlocksAhead; ++b) {
      const int64_t of_block = list * args.max_blocks + first + b;
      const bool inside = first + b < blocks;
      grown[b] = inside ? args.grown[of_block * args.groups() + first_feature / kBlockFeatures] : 0;
#pragma unroll
      for (int j = 0; j < kFeaturesPerBlock; ++j) {
        const int64_t of_feature = of_block * features + first_feature + j;
        sums[b][j] = inside ? args.sums[of_feature] : 0.0f;
        zs[b][j] = inside && c < d ? args.z[of_feature * d + c] : 0.0f;
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocksAhead; ++b) {
      if (first + b >= blocks) break;
      const BlockTokens tokens(all, first + b);
      const float* factors = args.log_features +
                             (list * args.max_tokens + tokens.first - all.first) * features +
                             first_feature;
      for (uint64_t left = grown[b]; left != 0; left &= left - 1) {
        const int32_t t = __ffsll(static_cast<long long>(left)) - 1;
        const float4 loaded = *reinterpret_cast<const float4*>(factors + int64_t{t} * features);
        const float factor[kFeaturesPerBlock] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int j = 0; j < kFeaturesPerBlock; ++j) {
          my_sum[j] = __fmul_rn(my_sum[j], factor[j]);
          my_z[j] = __fmul_rn(my_z[j], factor[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kFeaturesPerBlock; ++j) {
        my_open_sum[j] = tokens.closes ? 0.0f : sums[b][j];
        my_open_z[j] = tokens.closes ? 0.0f : zs[b][j];
        if (tokens.closes) {
          my_sum[j] = __fadd_rn(my_sum[j], sums[b][j]);
          my_z[j] = __fadd_rn(my_z[j], zs[b][j]);
        }
      }
    }
  }
  __syncthreads();  // all have read what is now written
#pragma unroll
  for (int j = 0; j < kFeaturesPerBlock; ++j) {
    const int32_t f = first_feature + j;
    if (c == 0) {
      if (blocks > 0) {
        m[f] = args.last_m[list * features + f];
      } else if (extension.clear != 0) {
        m[f] = -INFINITY;
      }
      sum[f] = my_sum[j];
      open_sum[f] = my_open_sum[j];
    }
    if (c < d) {
      z[int64_t{f} * d + c] = my_z[j];
      open_z[int64_t{f} * d + c] = my_open_z[j];
    }
  }
}

// Where the parts of the workspace lie.
struct Plan {
  Plan(int32_t num_extensions, int32_t max_tokens, const DeviceFeatureMap& map) {
    const size_t lists = size_t{1} * num_extensions * map.kv_heads, f = map.features;
    size_bytes = AlignUp(4 * lists * max_tokens * f, 256);
    if (max_tokens < kLeastSideBySide) return;
    // Tokens may begin and end anywhere in a block.
    max_blocks = static_cast<int32_t>(CeilDiv(max_tokens - 1, kSummaryBlockTokens)) + 1;
    const size_t groups = CeilDiv(map.features, kBlockFeatures);
    const auto take = [this](size_t bytes) {
      const size_t at = size_bytes;
      size_bytes += AlignUp(bytes, 256);
      return at;
    };
    maxima = take(4 * lists * max_blocks * f);
    sums = take(4 * lists * max_blocks * f);
    z = take(4 * lists * max_blocks * f * map.head_dim);
    grown = take(8 * lists * max_blocks * groups);
    last_m = take(4 * lists * f);
  }
  int32_t max_blocks = 0;  // 0: tokens enter one after the other
  size_t maxima = 0, sums = 0, z = 0, grown = 0, last_m = 0, size_bytes = 0;
};

}  // namespace

size_t ExtendSummariesWorkspaceBytes(int32_t num_extensions, int32_t max_tokens,
                                     const DeviceFeatureMap& key_map) {
  return Plan(num_extensions, max_tokens, key_map).size_bytes;
}

cudaError_t ExtendSummaries(const DeviceExtension* extensions, int32_t num_extensions,
                            int32_t max_tokens, const void* pool, const KvLayout& layout,
                            const DeviceFeatureMap& key_map, void* workspace, Stream stream) {
  if (IsRefused(key_map, layout) || num_extensions < 0 || num_extensions > 65535 ||
      max_tokens < 0) {
    return cudaErrorInvalidValue;
  }
  if (num_extensions == 0) return cudaSuccess;
  const Plan plan(num_extensions, max_tokens, key_map);
  auto* memory = static_cast<std::byte*>(workspace);
  const Args args{extensions,
                  max_tokens,
                  plan.max_blocks,
                  MakePool(pool, layout),
                  layout.kv_heads,
                  layout.head_dim,
                  key_map.features,
                  0,
                  reinterpret_cast<float*>(memory),
                  reinterpret_cast<float*>(memory + plan.maxima),
                  reinterpret_cast<float*>(memory + plan.sums),
                  reinterpret_cast<float*>(memory + plan.z),
                  reinterpret_cast<uint64_t*>(memory + plan.grown),
                  reinterpret_cast<float*>(memory + plan.last_m)};
  const auto heads = static_cast<unsigned>(layout.kv_heads);
  const auto count = static_cast<unsigned>(num_extensions);
  if (max_tokens > 0) {
    // A decode step has one token of each sequence; few blocks are done the sooner the smaller they are.
    const int64_t blocks = CeilDiv(max_tokens, kTile) * heads * count;
    const int32_t tokens = max_tokens <= 16                           ? 16
                           : blocks < CurrentDevice().multiprocessors ? kTile / 2
                                                                      : kTile;
    const size_t bytes = TileBytes(key_map, tokens);
    const dim3 grid(static_cast<unsigned>(CeilDiv(max_tokens, tokens)), heads, count);
    const auto launch = [&]<DType kKv>(KvType<kKv>) {
      const auto kernel = tokens == 16      ? MapKeysKernel<kKv, 1>
                          : tokens == kTile ? MapKeysKernel<kKv, kTile / 16>
                                            : MapKeysKernel<kKv, kTile / 32>;
      return Launch(kernel, grid, kMapThreads, bytes, stream, false, args, key_map);
    };
    if (const cudaError_t error = ForKvType(layout.dtype, launch); error != cudaSuccess) {
      return error;
    }
  }
  const dim3 by_features(key_map.features / kFeaturesPerBlock, heads, count);
  const auto launch = [&](auto kernel, dim3 grid) {
    return Launch(kernel, grid, kThreads, 0, stream, false, args);
  };
  if (plan.max_blocks == 0) {
    return ForKvType(layout.dtype,
                     [&]<DType kKv>(KvType<kKv>) { return launch(EnterKernel<kKv>, by_features); });
  }
  const auto blocks = static_cast<unsigned>(plan.max_blocks);
  const auto groups = static_cast<unsigned>(CeilDiv(key_map.features, kBlockFeatures));
  cudaError_t error = launch(MaximaKernel, dim3(blocks, heads, count));
  if (error == cudaSuccess) {
    error = ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
      return launch(BlockKernel<kKv>, dim3(blocks, heads * groups, count));
    });
  }
  if (error == cudaSuccess) error = launch(CloseKernel, by_features);
  return error;
}

}  // namespace winnow::kernels::cuda
