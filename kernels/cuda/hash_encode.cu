// Mapping. A block takes one KV head and a tile of vectors (keys of a span, or the queries of a
// group) through all stages; its 128 threads each own outputs o, o + 128, ... and keep one sum per
// vector of the tile in registers. Inputs lie in shared memory as [input][vector], so that a
// 16-byte read, the same for the whole warp, feeds four multiply-adds; weights come 8 inputs at a
// time, 16 bytes per thread, adjacent threads adjacent outputs.
//
// EncodeTokens, for the one new token of each sequence, is the same with what comes before it: half of its
// blocks rotate and write a key and its value and encode the key, half rotate a group's queries and
// encode them.
//
// Bits of the last stage: 32 adjacent outputs are a warp's lanes, so a vote makes a word of a code.
//
// Not done: tensor cores. They would be some ten times faster for a prompt's keys and add in their
// own order, so a sum near zero could have the other sign; codes must be the same everywhere.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/hash_encode.h"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_cache_slots.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kLeastLargeTiles = 4;  // of a multiprocessor

// docs/artifact-format.md; no operation may be fused with another.
__device__ uint16_t Silu(float sum) {
  float a = WidenBf16(RoundBf16(sum));
  if (a != a) return 0x7fc0;
  a = fmaxf(a, -87.0f);
  const float z = fmaxf(-a, -87.0f);
  const float n = rintf(__fmul_rn(z, 1.44269502162933349609375f));
  const float f = __fsub_rn(__fmul_rn(z, 1.44269502162933349609375f), n);
  float p = 0.000154035297f;
  p = __fadd_rn(__fmul_rn(p, f), 0.00133335591f);
  p = __fadd_rn(__fmul_rn(p, f), 0.0096181293f);
  p = __fadd_rn(__fmul_rn(p, f), 0.0555041097104549407959f);
  p = __fadd_rn(__fmul_rn(p, f), 0.2402265071868896484375f);
  p = __fadd_rn(__fmul_rn(p, f), 0.693147182464599609375f);
  p = __fadd_rn(__fmul_rn(p, f), 1.0f);
  // |n| <= 126: the power of two is a normal number, and one multiplication rounds as ldexp does.
  const float e = __fmul_rn(p, __int_as_float((static_cast<int>(n) + 127) << 23));
  return RoundBf16(__fdiv_rn(a, __fadd_rn(1.0f, e)));
}

// Asks for the weights, so that they are in L2 when their turn comes.
__device__ __forceinline__ void PrefetchStages(const DeviceEncoder& encoder, int32_t head) {
  for (int s = 0; s < encoder.num_stages; ++s) {
    const DeviceEncoder::Stage stage = encoder.stages[s];
    const int64_t bytes = int64_t{16} * ((stage.in + 7) / 8) * stage.out;
    const char* weight = reinterpret_cast<const char*>(stage.weight) + head * bytes;
    for (int64_t at = threadIdx.x * 128; at < bytes; at += kThreads * 128) {
      PrefetchLine(weight + at);
    }
  }
}

// A key's value as the first stage takes it: rounded to bfloat16 (docs/artifact-format.md). scale * code has more bits.
template <DType kKv>
__device__ __forceinline__ float InputOf(float value) {
  return HasScales(kKv) ? WidenBf16(RoundBf16(value)) : value;
}

struct KeySource {
  const DeviceKeySpan* spans;
  const uint8_t* pool;
  uint8_t* codes;
  FastDivider block_tokens, code_block_tokens;
  int64_t block_bytes, head_bytes, row_bytes;             // of the KV pool
  int64_t code_block_bytes, code_head_bytes, code_bytes;  // of the code pool
};

struct QuerySource {
  const DeviceQuery* queries;
  const float* q;
  uint8_t* codes;
  int64_t q_stride;
  int32_t group, head_dim;
};

// What a thread has of a stage in registers: weights of outputs o0, o0 + kThreads, ... and of the 8 * kAhead inputs
// that come next, and the outputs' biases.
template <int kTile, int kOuts>
struct StageWeights {
  // Few vectors wait for weights, many for arithmetic.
  static constexpr int kAhead = kTile <= 8 ? 16 : 2;
  uint4 w[kAhead][kOuts];
  float bias[kOuts];

  // From the eighth input `eighth` on.
  __device__ __forceinline__ void Load(const DeviceEncoder& encoder, int s, int32_t head,
                                       int32_t o0, int32_t eighth) {
    const DeviceEncoder::Stage stage = encoder.stages[s];
    const int32_t eighths = (stage.in + 7) / 8;
    const uint4* weight =
        reinterpret_cast<const uint4*>(stage.weight) + int64_t{head} * eighths * stage.out;
#pragma unroll
    for (int i = 0; i < kOuts; ++i) {
      const int32_t o = o0 + i * kThreads;
      bias[i] = o < stage.out ? __ldg(stage.bias + int64_t{head} * stage.out + o) : 0.0f;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        w[k][i] = o < stage.out && eighth + k < eighths
                      ? __ldg(weight + int64_t{eighth + k} * stage.out + o)
                      : make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ __forceinline__ void LoadFirst(const DeviceEncoder& encoder, int32_t head) {
    Load(encoder, 0, head, static_cast<int32_t>(threadIdx.x), 0);
  }
};

// The stages of a tile whose inputs lie in `x` [in][kTile]. `weights` has been given its first ones; the
// later ones are asked for as soon as those before are used. `store(vector, word, bits)` takes the last
// stage's bits.
template <int kTile, int kOuts, typename Store>
__device__ __forceinline__ void RunStages(const DeviceEncoder& encoder, int32_t head, float* x,
                                          float* y, StageWeights<kTile, kOuts>& weights,
                                          Store store) {
  constexpr int kAhead = StageWeights<kTile, kOuts>::kAhead;
  const auto mine = static_cast<int32_t>(threadIdx.x);
  for (int s = 0; s < encoder.num_stages; ++s) {
    const DeviceEncoder::Stage stage = encoder.stages[s];
    const int32_t eighths = (stage.in + 7) / 8;
    const auto load_next_stage = [&] {
      if (s + 1 < encoder.num_stages) weights.Load(encoder, s + 1, head, mine, 0);
    };
    if (mine >= stage.out) load_next_stage();
    for (int32_t o0 = mine; o0 < stage.out; o0 += kThreads * kOuts) {
      float sums[kOuts][kTile];
#pragma unroll
      for (int i = 0; i < kOuts; ++i) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) sums[i][t] = weights.bias[i];
      }
      const auto& w = weights.w;
      for (int32_t ahead = 0; ahead < eighths; ahead += kAhead) {
        if (ahead > 0) weights.Load(encoder, s, head, o0, ahead);
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (ahead + k >= eighths) break;
          const float* inputs = x + (ahead + k) * 8 * kTile;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int t = 0; t < kTile; t += 4) {
              const float4 of_tile = *reinterpret_cast<const float4*>(inputs + j * kTile + t);
#pragma unroll
              for (int i = 0; i < kOuts; ++i) {
                const uint32_t pairs[4] = {w[k][i].x, w[k][i].y, w[k][i].z, w[k][i].w};
                const float value = j % 2 == 0 ? WidenLow(pairs[j / 2]) : WidenHigh(pairs[j / 2]);
                sums[i][t] = __fmaf_rn(of_tile.x, value, sums[i][t]);
                sums[i][t + 1] = __fmaf_rn(of_tile.y, value, sums[i][t + 1]);
                sums[i][t + 2] = __fmaf_rn(of_tile.z, value, sums[i][t + 2]);
                sums[i][t + 3] = __fmaf_rn(of_tile.w, value, sums[i][t + 3]);
              }
            }
          }
        }
      }
      if (o0 + kThreads * kOuts < stage.out) {
        weights.Load(encoder, s, head, o0 + kThreads * kOuts, 0);
      } else {
        load_next_stage();
      }
#pragma unroll
      for (int i = 0; i < kOuts; ++i) {
        const int32_t o = o0 + i * kThreads;
        if (s + 1 == encoder.num_stages) {
          // Outputs come in multiples of 32, so a warp is inside or outside as a whole.
          if (o >= stage.out) continue;
          uint32_t mine = 0;
#pragma unroll
          for (int t = 0; t < kTile; ++t) {
            const uint32_t bits = __ballot_sync(kFullMask, sums[i][t] >= 0.0f);
            if (static_cast<int>(threadIdx.x % 32) == t) mine = bits;
          }
          if (threadIdx.x % 32 < kTile) store(threadIdx.x % 32, o / 32, mine);
        } else if (o < stage.out) {
#pragma unroll
          for (int t = 0; t < kTile; ++t) y[o * kTile + t] = WidenBf16(Silu(sums[i][t]));
        }
      }
    }
    if (s + 1 < encoder.num_stages) {
      for (int32_t i = stage.out * kTile + threadIdx.x; i < (stage.out + 7) / 8 * 8 * kTile;
           i += kThreads) {
        y[i] = 0.0f;
      }
      __syncthreads();
      float* swap = x;
      x = y;
      y = swap;
    }
  }
}

template <DType kKv, int kTile, int kOuts>
__global__ void __launch_bounds__(kThreads)
    EncodeKeysKernel(const __grid_constant__ DeviceEncoder encoder,
                     const __grid_constant__ KeySource keys, int32_t buffer_floats) {
  extern __shared__ float4 shared4[];
  float* shared = reinterpret_cast<float*>(shared4);
  const DeviceKeySpan span = keys.spans[blockIdx.z];
  const int32_t head = blockIdx.y;
  const int32_t first = span.tokens.first + static_cast<int32_t>(blockIdx.x) * kTile;
  LetNextStart();
  StageWeights<kTile, kOuts> weights;
  if (first < span.tokens.last) {
    if (kTile <= 8) PrefetchStages(encoder, head);
    weights.LoadFirst(encoder, head);
  }
  WaitForEarlier();
  if (first >= span.tokens.last) return;
  const int32_t in = encoder.stages[0].in, chunks = (in + 7) / 8;
  for (int32_t i = threadIdx.x; i < kTile * chunks; i += kThreads) {
    const int32_t t = i / chunks, chunk = i % chunks;
    float values[8] = {};
    if (first + t < span.tokens.last) {
      const int32_t block = keys.block_tokens.Divide(first + t);
      LoadKeys8<kKv>(keys.pool + span.block_table[block] * keys.block_bytes +
                         head * keys.head_bytes +
                         (first + t - block * keys.block_tokens.divisor()) * keys.row_bytes,
                     in, chunk * 8, values);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) shared[(chunk * 8 + c) * kTile + t] = InputOf<kKv>(values[c]);
  }
  __syncthreads();
  RunStages<kTile, kOuts>(
      encoder, head, shared, shared + buffer_floats, weights,
      [&](int32_t t, int32_t word, uint32_t bits) {
        if (first + t >= span.tokens.last) return;
        const int32_t block = keys.code_block_tokens.Divide(first + t);
        uint8_t* code = keys.codes + span.index_table[block] * keys.code_block_bytes +
                        head * keys.code_head_bytes +
                        (first + t - block * keys.code_block_tokens.divisor()) * keys.code_bytes;
        reinterpret_cast<uint32_t*>(code)[word] = bits;
      });
}

// A tile's vectors are inputs of one KV head: G / queries_per_input of them per query.
template <int kTile>
__global__ void __launch_bounds__(kThreads)
    EncodeQueriesKernel(const __grid_constant__ DeviceEncoder encoder,
                        const __grid_constant__ QuerySource source, int32_t buffer_floats) {
  extern __shared__ float4 shared4[];
  float* shared = reinterpret_cast<float*>(shared4);
  const int32_t head = blockIdx.y, query = blockIdx.z;
  LetNextStart();
  PrefetchStages(encoder, head);
  StageWeights<kTile, 1> weights;
  weights.LoadFirst(encoder, head);
  WaitForEarlier();
  const int32_t vectors = source.group / encoder.queries_per_input;
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kTile;
  const int32_t in = encoder.stages[0].in, padded = (in + 7) / 8 * 8;
  const float* q = source.q + source.queries[query].row * source.q_stride +
                   int64_t{head} * source.group * source.head_dim;
  for (int32_t i = threadIdx.x; i < kTile * padded; i += kThreads) {
    const int32_t t = i / padded, j = i % padded;
    const bool inside = first + t < vectors && j < in;
    shared[j * kTile + t] = inside ? WidenBf16(RoundBf16(q[int64_t{first + t} * in + j])) : 0.0f;
  }
  __syncthreads();
  const int64_t words = encoder.stages[encoder.num_stages - 1].out / 32;
  uint32_t* codes = reinterpret_cast<uint32_t*>(source.codes) +
                    (int64_t{query} * encoder.kv_heads + head) * vectors * words;
  RunStages<kTile, 1>(encoder, head, shared, shared + buffer_floats, weights,
                      [&](int32_t t, int32_t word, uint32_t bits) {
                        if (first + t < vectors) codes[(first + t) * words + word] = bits;
                      });
}

// A token of each of several sequences: what Rope, WriteKv, EncodeKeys and EncodeQueries do to it. Of
// the two blocks of a token and KV head one has the key and the value, one the group's queries. With a row
// cache a third one writes them: to find a slot takes as long as to make a code.
struct TokenSource {
  float* q;
  const float *k, *v, *q_cos_sin, *cos_sin;
  int64_t q_stride, k_stride, v_stride, q_table_stride, table_stride;
  const DeviceChunk* chunks;
  uint8_t* pool;
  uint8_t *codes, *query_codes;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes, code_block_bytes, code_head_bytes, code_bytes;
  int32_t group, head_dim;
  DeviceRowCache cache;
};

// The block's key, rotated, and its value into the pool and the row cache, by way of `row`, shared memory for both.
// `pool_row`: which one of the pool it is.
template <DType kKv>
__device__ void WriteTokenThrough(const TokenSource& source, int32_t pool_row, const float* of_k,
                                  const float* of_v, const float* table, uint4* row) {
  // Rows of 8 bits are no multiple of 16 bytes, nor do they begin at one.
  using Piece = std::conditional_t<HasScales(kKv), uint32_t, uint4>;
  __shared__ int32_t slot;
  const int32_t d = source.head_dim, half = d / 2;
  const auto pieces = static_cast<int32_t>(KvRowBytes<kKv>(d) / sizeof(Piece));
  if (threadIdx.x == 0) {
    int32_t found = -1;
    const Found where =
        FindSlot(source.cache, source.cache.state->call, source.cache.state->hand_begin, pool_row,
                 /*may_take=*/true, &found);
    slot = where == Found::kNowhere ? -1 : found;
  } else if constexpr (!HasScales(kKv)) {
    auto* values = reinterpret_cast<uint16_t*>(row);
    for (int32_t j = threadIdx.x - 1; j < half; j += kThreads - 1) {
      const float2 rotated = Rotated(of_k[j], of_k[j + half], table[j], table[half + j]);
      values[j] = RoundBf16(rotated.x);
      values[j + half] = RoundBf16(rotated.y);
    }
    for (int32_t j = threadIdx.x - 1; j < d; j += kThreads - 1) values[d + j] = RoundBf16(of_v[j]);
  }
  if constexpr (HasScales(kKv)) {
    // Whole warps, beside the one that finds a slot.
    static_assert(kThreads >= 96);
    auto* codes = reinterpret_cast<uint8_t*>(row);
    if (threadIdx.x / 32 == 1) {
      WriteCodes<kKv>(codes, d, 0, [&](int32_t c) { return RotatedAt(of_k, table, half, c); });
    } else if (threadIdx.x / 32 == 2) {
      WriteCodes<kKv>(codes, d, 1, [&](int32_t c) { return of_v[c]; });
    }
  }
  __syncthreads();
  const auto* from = reinterpret_cast<const Piece*>(row);
  for (int32_t i = threadIdx.x; i < 2 * pieces; i += kThreads) {
    std::byte* to = RowInPool(source.cache, pool_row);
    if (i >= pieces) {
      if (slot < 0) break;
      to = RowInSlot(source.cache, slot, pool_row);
    }
    reinterpret_cast<Piece*>(to)[i % pieces] = from[i % pieces];
  }
  __syncthreads();
  EndCall(source.cache, gridDim.x * gridDim.y);
}

template <DType kKv, int kTile, bool kThrough>
__global__ void __launch_bounds__(kThreads)
    EncodeTokenKernel(const __grid_constant__ DeviceEncoder key_encoder,
                      const __grid_constant__ DeviceEncoder query_encoder,
                      const __grid_constant__ TokenSource source, int32_t buffer_floats) {
  extern __shared__ float4 shared4[];
  float* shared = reinterpret_cast<float*>(shared4);
  LetNextStart();
  const bool is_key = blockIdx.z == 0;
  const DeviceEncoder& encoder = is_key ? key_encoder : query_encoder;
  const auto head = static_cast<int32_t>(blockIdx.x), index = static_cast<int32_t>(blockIdx.y);
  const DeviceChunk chunk = source.chunks[index];
  const int32_t block = source.block_tokens.Divide(chunk.position);
  const int32_t in_block = chunk.position - block * source.block_tokens.divisor();
  const int64_t pool_block = chunk.block_table[block];
  const int32_t d = source.head_dim, half = d / 2;
  const int64_t row = chunk.first_row;
  const float* table = blockIdx.z == 1 ? source.q_cos_sin + row * source.q_table_stride
                                       : source.cos_sin + row * source.table_stride;
  const float* of_k = source.k + row * source.k_stride + int64_t{head} * d;
  const float* of_v = source.v + row * source.v_stride + int64_t{head} * d;
  if constexpr (kThrough) {
    if (blockIdx.z == 2) {
      WaitForEarlier();
      const auto pool_row = static_cast<int32_t>(
          (pool_block * gridDim.x + head) * source.block_tokens.divisor() + in_block);
      return WriteTokenThrough<kKv>(source, pool_row, of_k, of_v, table,
                                    reinterpret_cast<uint4*>(shared4));
    }
  }
  PrefetchStages(encoder, head);
  StageWeights<kTile, 1> weights;
  weights.LoadFirst(encoder, head);
  const int32_t per_input = is_key ? 1 : encoder.queries_per_input;
  const int32_t vectors = is_key ? 1 : source.group / per_input;
  const int32_t padded = (encoder.stages[0].in + 7) / 8 * 8;
  for (int32_t i = threadIdx.x; i < kTile * padded; i += kThreads) shared[i] = 0.0f;
  __syncthreads();
  WaitForEarlier();
  // Pairs of heads, rotated, and where they go: to memory, and rounded to the encoder's input.
  const int32_t pairs = !is_key ? source.group * half : HasScales(kKv) ? 0 : half;
  float* of_q = source.q + row * source.q_stride + int64_t{head} * source.group * d;
  uint8_t* of_pool = source.pool + pool_block * source.block_bytes + head * source.head_bytes +
                     int64_t{in_block} * KvRowBytes<kKv>(d);
  auto* const to = reinterpret_cast<uint16_t*>(of_pool);
  for (int32_t i = threadIdx.x; i < pairs; i += kThreads) {
    const int32_t of_group = i / half, j = i - of_group * half;
    const float* from = is_key ? of_k : of_q + of_group * d;
    const float2 rotated = Rotated(from[j], from[j + half], table[j], table[half + j]);
    const uint16_t low = RoundBf16(rotated.x), high = RoundBf16(rotated.y);
    if (is_key) {
      if constexpr (!kThrough) {
        to[j] = low;
        to[j + half] = high;
      }
    } else {
      of_q[of_group * d + j] = rotated.x;
      of_q[of_group * d + j + half] = rotated.y;
    }
    const int32_t at = of_group % per_input * d + j, t = of_group / per_input;
    shared[at * kTile + t] = WidenBf16(low);
    shared[(at + half) * kTile + t] = WidenBf16(high);
  }
  if constexpr (HasScales(kKv)) {
    const auto warp = static_cast<int>(threadIdx.x) / 32;
    if (is_key && warp == 0) {
      const FourCodes four =
          ToCodesOf<kKv>(d, [&](int32_t c) { return RotatedAt(of_k, table, half, c); });
      if constexpr (!kThrough) PutCodes(of_pool, d, 0, four);
      const auto c = static_cast<int32_t>(threadIdx.x) * 4;
      if (c < d) {
        const float4 values = FloatsOf<kKv>(four.codes, WidenBf16(four.scale));
        shared[c * kTile] = InputOf<kKv>(values.x);
        shared[(c + 1) * kTile] = InputOf<kKv>(values.y);
        shared[(c + 2) * kTile] = InputOf<kKv>(values.z);
        shared[(c + 3) * kTile] = InputOf<kKv>(values.w);
      }
    } else if (!kThrough && is_key && warp == 1) {
      WriteCodes<kKv>(of_pool, d, 1, [&](int32_t c) { return of_v[c]; });
    }
  } else if (!kThrough && is_key) {
    for (int32_t j = threadIdx.x; j < d; j += kThreads) to[d + j] = RoundBf16(of_v[j]);
  }
  __syncthreads();
  const int64_t words = encoder.stages[encoder.num_stages - 1].out / 32;
  uint8_t* code = is_key ? source.codes + pool_block * source.code_block_bytes +
                               head * source.code_head_bytes + in_block * source.code_bytes
                         : source.query_codes +
                               (int64_t{index} * encoder.kv_heads + head) * vectors * words * 4;
  RunStages<kTile, 1>(encoder, head, shared, shared + buffer_floats, weights,
                      [&](int32_t t, int32_t word, uint32_t bits) {
                        if (t < vectors) reinterpret_cast<uint32_t*>(code)[t * words + word] = bits;
                      });
  WINNOW_TIMELINE_MARK("its codes are made");
}

// Floats of one buffer of [width][tile] that holds every stage's input.
int32_t BufferFloats(const DeviceEncoder& encoder, int32_t tile) {
  int32_t widest = 0;
  for (int s = 0; s < encoder.num_stages; ++s) {
    const int32_t in = (encoder.stages[s].in + 7) / 8 * 8;
    widest = in > widest ? in : widest;
  }
  return widest * tile;
}

// Of a block: what sm_80 has, less some, or this device.
size_t MostSharedBytes() {
  return std::min<size_t>(160 * 1024, CurrentDevice().block_shared_bytes);
}

}  // namespace

size_t PackedEncoderBytes(const EncoderWeights& weights) {
  size_t bytes = 0;
  for (const AffineStage& stage : weights.stages) {
    bytes += AlignUp(size_t{2} * weights.kv_heads * CeilDiv(stage.in, 8) * 8 * stage.out, 256);
    bytes += AlignUp(size_t{4} * weights.kv_heads * stage.out, 256);
  }
  return bytes;
}

DeviceEncoder PackEncoder(const EncoderWeights& weights, void* host, void* device) {
  DeviceEncoder encoder;
  const auto num_stages = static_cast<int32_t>(weights.stages.size());
  if (num_stages < 1 || num_stages > kMaxEncoderStages ||
      weights.stages.back().out % (32 * weights.queries_per_input) != 0) {
    return encoder;
  }
  // Two buffers of the widest input of 8 vectors: more a launch never needs.
  for (const AffineStage& stage : weights.stages) {
    if (AlignUp(static_cast<size_t>(stage.in), 8) * 8 * 8 > MostSharedBytes()) return encoder;
  }
  encoder.num_stages = num_stages;
  encoder.kv_heads = weights.kv_heads;
  encoder.queries_per_input = weights.queries_per_input;
  size_t at = 0;
  for (int32_t s = 0; s < num_stages; ++s) {
    const AffineStage& from = weights.stages[s];
    DeviceEncoder::Stage& to = encoder.stages[s];
    to.in = from.in;
    to.out = from.out;
    const int64_t eighths = CeilDiv(from.in, 8);
    auto* packed = reinterpret_cast<uint16_t*>(static_cast<std::byte*>(host) + at);
    to.weight = reinterpret_cast<const uint16_t*>(static_cast<std::byte*>(device) + at);
    for (int64_t head = 0; head < weights.kv_heads; ++head) {
      for (int64_t o = 0; o < from.out; ++o) {
        for (int64_t j = 0; j < eighths * 8; ++j) {
          packed[((head * eighths + j / 8) * from.out + o) * 8 + j % 8] =
              j < from.in ? from.weight[(head * from.out + o) * from.in + j] : 0;
        }
      }
    }
    at += AlignUp(size_t{2} * weights.kv_heads * eighths * 8 * from.out, 256);
    std::memcpy(static_cast<std::byte*>(host) + at, from.bias.data(),
                size_t{4} * weights.kv_heads * from.out);
    to.bias = reinterpret_cast<const float*>(static_cast<std::byte*>(device) + at);
    at += AlignUp(size_t{4} * weights.kv_heads * from.out, 256);
  }
  return encoder;
}

cudaError_t EncodeKeys(const DeviceEncoder& encoder, const DeviceKeySpan* spans, int32_t num_spans,
                       int32_t max_span_tokens, const void* pool, const KvLayout& layout,
                       void* codes, const CodeLayout& code_layout, Stream stream) {
  if (encoder.num_stages < 1 || encoder.queries_per_input != 1 || !HasKvRows(layout) ||
      encoder.stages[0].in != layout.head_dim || layout.head_dim % 8 != 0 ||
      encoder.kv_heads != layout.kv_heads || code_layout.kv_heads != layout.kv_heads ||
      encoder.bits() != code_layout.bits || num_spans < 0 || num_spans > 65535) {
    return cudaErrorInvalidValue;
  }
  if (num_spans == 0 || max_span_tokens <= 0) return cudaSuccess;
  const KeySource keys{spans,
                       static_cast<const uint8_t*>(pool),
                       static_cast<uint8_t*>(codes),
                       FastDivider(layout.block_tokens),
                       FastDivider(code_layout.block_tokens),
                       static_cast<int64_t>(layout.BlockBytes()),
                       static_cast<int64_t>(layout.HeadBytes()),
                       static_cast<int64_t>(layout.RowBytes()),
                       static_cast<int64_t>(code_layout.BlockBytes()),
                       static_cast<int64_t>(code_layout.HeadBytes()),
                       static_cast<int64_t>(code_layout.CodeBytes())};
  const auto launch = [&](auto kernel, int32_t tile) {
    const int32_t floats = BufferFloats(encoder, tile);
    const size_t shared_bytes = size_t{8} * floats;
    if (shared_bytes > MostSharedBytes()) return cudaErrorInvalidValue;
    const dim3 grid(static_cast<unsigned>(CeilDiv(max_span_tokens, tile)), layout.kv_heads,
                    num_spans);
    return Launch(kernel, grid, kThreads, shared_bytes, stream, false, encoder, keys, floats);
  };
  // Tiles of 32 vectors read weights less often; where few of them leave multiprocessors with a warp or two
  // each, as a chunk of 512 tokens does, small ones are faster.
  const int64_t large = CeilDiv(max_span_tokens, 32) * layout.kv_heads * num_spans;
  const bool small = large < kLeastLargeTiles * int64_t{CurrentDevice().multiprocessors} ||
                     BufferFloats(encoder, 32) * size_t{8} > 64 * 1024;
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return small ? launch(EncodeKeysKernel<kKv, 8, 1>, 8)
                 : launch(EncodeKeysKernel<kKv, 32, 1>, 32);
  });
}

cudaError_t EncodeQueries(const DeviceEncoder& encoder, const DeviceQuery* queries,
                          int32_t num_queries, int32_t group, const float* q, int64_t q_stride,
                          int32_t head_dim, void* query_codes, Stream stream) {
  if (encoder.num_stages < 1 || group % encoder.queries_per_input != 0 ||
      encoder.stages[0].in != encoder.queries_per_input * head_dim || num_queries < 0 ||
      num_queries > 65535) {
    return cudaErrorInvalidValue;
  }
  if (num_queries == 0) return cudaSuccess;
  const QuerySource source{queries,  q,     static_cast<uint8_t*>(query_codes),
                           q_stride, group, head_dim};
  const int32_t vectors = group / encoder.queries_per_input;
  const auto launch = [&](auto kernel, int32_t tile) {
    const int32_t floats = BufferFloats(encoder, tile);
    const size_t shared_bytes = size_t{8} * floats;
    if (shared_bytes > MostSharedBytes()) return cudaErrorInvalidValue;
    const dim3 grid(static_cast<unsigned>(CeilDiv(vectors, tile)), encoder.kv_heads, num_queries);
    return Launch(kernel, grid, kThreads, shared_bytes, stream, false, encoder, source, floats);
  };
  return vectors <= 4 ? launch(EncodeQueriesKernel<4>, 4) : launch(EncodeQueriesKernel<8>, 8);
}

cudaError_t EncodeTokens(const TokenArgs& args, const DeviceEncoder& keys,
                         const DeviceEncoder& queries, Stream stream) {
  const KvLayout& layout = args.layout;
  const CodeLayout& code_layout = args.code_layout;
  const int32_t d = layout.head_dim;
  const int64_t kv_width = int64_t{layout.kv_heads} * d;
  if (!HasKvRows(layout) || layout.kv_heads < 1 || d % 8 != 0 || args.num_tokens < 0 ||
      args.num_tokens > 65535 || args.k.cols != kv_width || args.v.cols != kv_width ||
      args.q.cols % kv_width != 0 || args.q_cos_sin.cols != d || args.cos_sin.cols != d ||
      code_layout.kv_heads != layout.kv_heads || code_layout.block_tokens != layout.block_tokens) {
    return cudaErrorInvalidValue;
  }
  const auto group = static_cast<int32_t>(args.q.cols / kv_width);
  if (keys.num_stages < 1 || keys.queries_per_input != 1 || keys.stages[0].in != d ||
      keys.kv_heads != layout.kv_heads || keys.bits() != code_layout.bits ||
      queries.num_stages < 1 || group % queries.queries_per_input != 0 ||
      queries.stages[0].in != queries.queries_per_input * d ||
      queries.kv_heads != layout.kv_heads || group / queries.queries_per_input > kTokenInputs ||
      (args.cache != nullptr &&
       (args.cache->pool != args.pool ||
        args.cache->row_bytes != static_cast<int32_t>(layout.RowBytes())))) {
    return cudaErrorInvalidValue;
  }
  if (args.num_tokens == 0) return cudaSuccess;
  const TokenSource source{args.q.data,
                           args.k.data,
                           args.v.data,
                           args.q_cos_sin.data,
                           args.cos_sin.data,
                           args.q.stride,
                           args.k.stride,
                           args.v.stride,
                           args.q_cos_sin.stride,
                           args.cos_sin.stride,
                           args.chunks,
                           static_cast<uint8_t*>(args.pool),
                           static_cast<uint8_t*>(args.codes),
                           static_cast<uint8_t*>(args.query_codes),
                           FastDivider(layout.block_tokens),
                           static_cast<int64_t>(layout.BlockBytes()),
                           static_cast<int64_t>(layout.HeadBytes()),
                           static_cast<int64_t>(code_layout.BlockBytes()),
                           static_cast<int64_t>(code_layout.HeadBytes()),
                           static_cast<int64_t>(code_layout.CodeBytes()),
                           group,
                           d,
                           args.cache == nullptr ? DeviceRowCache{} : *args.cache};
  const auto launch = [&](auto kernel, int32_t tile) {
    const int32_t floats = std::max(BufferFloats(keys, tile), BufferFloats(queries, tile));
    const size_t shared_bytes = size_t{8} * floats;
    if (shared_bytes > MostSharedBytes()) return cudaErrorInvalidValue;
    const dim3 grid(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(args.num_tokens),
                    args.cache == nullptr ? 2 : 3);
    return Launch(kernel, grid, kThreads, shared_bytes, stream, false, keys, queries, source,
                  floats);
  };
  const bool few = group / queries.queries_per_input <= 4;
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    if (args.cache != nullptr) {
      return few ? launch(EncodeTokenKernel<kKv, 4, true>, 4)
                 : launch(EncodeTokenKernel<kKv, 8, true>, 8);
    }
    return few ? launch(EncodeTokenKernel<kKv, 4, false>, 4)
               : launch(EncodeTokenKernel<kKv, 8, false>, 8);
  });
}

}  // namespace winnow::kernels::cuda
