// Codes of keys, cell tables and the tail. Selection is in transform_select.cu.
//
// EncodeTransformKeys: a block takes up to 16 tokens of one span and KV head; thread i makes dimension i of all of
// them, each a chain in one register, with the keys in shared memory. Then a thread makes one word of one token.
//
// ExtendCellTables: a block has one KV head and up to 64 dimensions. Tokens enter a cell one after the other, because
// sums are the reference's to the bit; but cells do not wait for each other: eight groups of threads take every eighth
// cell each, and a ninth the sum of all. From 512 tokens on the slice of the table lies in shared memory meanwhile
// (66 KB). Tried and lost: one group for all cells, 3.3 ms for 8192 tokens of 8 heads on an H100.
//
// MergeTails: a block a query head, a thread a dimension of V; cells in ascending order.
#include "kernels/cuda/transform_code.h"

#include <algorithm>
#include <cstring>

#include "kernels/attention_state.h"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/transform_code.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kEncodeTokens = 16;
constexpr int kEncodeThreads = 256;  // the most dimensions
constexpr int kTableDims = 64;
constexpr int kTableParts = 8;
constexpr int kTableThreads = kTableDims * (kTableParts + 1);
constexpr int32_t kSharedTableTokens = 512;
constexpr int64_t kTableRows = kTransformCells + 1;

// ---- packing ----

struct Offsets {
  size_t heads, key_weight, key_bias, query_weight, mean, delta_weight, size_bytes;
  int32_t quads, delta_rows;
};

Offsets OffsetsOf(const TransformCodeWeights& weights) {
  Offsets at{};
  const auto heads = weights.heads.size(), d = static_cast<size_t>(weights.head_dim);
  for (const TransformCodeHead& head : weights.heads) {
    at.quads = std::max(at.quads, head.quads);
    at.delta_rows = std::max(at.delta_rows, static_cast<int32_t>(head.delta_weight.size() / d));
  }
  const auto n = static_cast<size_t>(4 * at.quads);
  size_t end = 0;
  const auto take = [&end](size_t bytes) {
    const size_t begin = end;
    end = AlignUp(end + bytes, 256);
    return begin;
  };
  at.heads = take(heads * sizeof(DeviceTransformHead));
  at.key_weight = take(heads * d * n * 4);
  at.key_bias = take(heads * n * 4);
  at.query_weight = take(heads * d * n * 4);
  at.mean = take(heads * d * 4);
  at.delta_weight = take(heads * at.delta_rows * d * 4);
  at.size_bytes = end;
  return at;
}

DeviceTransformHead HeadOf(const TransformCodeHead& head, int32_t words, int32_t d) {
  DeviceTransformHead to;
  to.quads = head.quads;
  std::copy(head.widths.begin(), head.widths.end(), to.widths);
  int32_t count = 0;
  for (int32_t word = 0; word < words; ++word) {
    to.word_fields[word] = count;
    for (const CodeField& field : head.fields) {
      if (field.word != word) continue;
      const uint32_t in_byte = ((1u << field.width) - 1) << field.low;
      to.fields[count] = {static_cast<uint32_t>(field.shift - field.low) & 31,
                          in_byte * 0x01010101u, field.quad};
      to.field_shift[count] = field.shift;
      to.field_low[count] = field.low;
      to.field_width[count] = field.width;
      ++count;
    }
  }
  for (int32_t word = words; word <= kTransformWordsMax; ++word) to.word_fields[word] = count;
  to.num_cell_bits = static_cast<int32_t>(head.cell_bits.size());
  std::copy(head.cell_bits.begin(), head.cell_bits.end(), to.cell_bits);
  to.tail = head.tail ? 1 : 0;
  to.delta_rows = static_cast<int32_t>(head.delta_weight.size() / d);
  return to;
}

// KvLayout of bfloat16, without padding.
struct KvRows {
  explicit KvRows(const KvLayout& layout)
      : block_values(static_cast<int64_t>(layout.BlockBytes() / 2)),
        head_values(static_cast<int64_t>(layout.HeadBytes() / 2)),
        head_dim(layout.head_dim),
        block_tokens(layout.block_tokens) {}
  __device__ __forceinline__ const uint16_t* Row(const uint16_t* pool, const int32_t* table,
                                                 int32_t head, int32_t token) const {
    return pool + table[token / block_tokens] * block_values + head * head_values +
           int64_t{token % block_tokens} * 2 * head_dim;
  }
  int64_t block_values, head_values;
  int32_t head_dim, block_tokens;
};

// ---- codes of keys ----

struct EncodeArgs {
  DeviceTransform transform;
  const DeviceKeySpan* spans;
  const uint16_t* pool;
  KvRows rows;
  uint32_t* codes;
  CodeLayout code_layout;
  int32_t unused = 0;
};

__global__ void __launch_bounds__(kEncodeThreads)
    EncodeKernel(const __grid_constant__ EncodeArgs args) {
  __shared__ float keys[kEncodeTokens * 256];
  __shared__ uint8_t indexes[kEncodeTokens][256];
  LetNextStart();
  WaitForEarlier();
  const DeviceKeySpan span = args.spans[blockIdx.z];
  const int32_t first = span.tokens.first + static_cast<int32_t>(blockIdx.x) * kEncodeTokens;
  const int32_t count = min(kEncodeTokens, span.tokens.last - first);
  if (count <= 0) return;
  const int32_t head = blockIdx.y, d = args.transform.head_dim, n = 4 * args.transform.quads;
  for (int32_t at = threadIdx.x; at < count * d; at += blockDim.x) {
    keys[at] = WidenBf16(args.rows.Row(args.pool, span.block_table, head, first + at / d)[at % d]);
  }
  __syncthreads();
  const DeviceTransformHead& of_head = args.transform.heads[head];
  for (int32_t i = threadIdx.x; i < 4 * of_head.quads; i += blockDim.x) {
    const float* weight = args.transform.key_weight + int64_t{head} * d * n + i;
    const float bias = args.transform.key_bias[head * n + i];
    const auto most = static_cast<float>((1 << of_head.widths[i / 4]) - 1);
    float acc[kEncodeTokens];
#pragma unroll
    for (int t = 0; t < kEncodeTokens; ++t) acc[t] = bias;
    if (count == 1) {
      for (int32_t c = 0; c < d; ++c) acc[0] = __fmaf_rn(keys[c], weight[int64_t{c} * n], acc[0]);
    } else {
      for (int32_t c = 0; c < d; ++c) {
        const float w = weight[int64_t{c} * n];
#pragma unroll
        for (int t = 0; t < kEncodeTokens; ++t) {
          if (t < count) acc[t] = __fmaf_rn(keys[t * d + c], w, acc[t]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kEncodeTokens; ++t) {
      if (t >= count) break;
      indexes[t][i] = acc[t] > 0 ? static_cast<uint8_t>(fminf(acc[t], most)) : 0;
    }
  }
  __syncthreads();
  const int32_t words = args.transform.bits / 32;
  for (int32_t at = threadIdx.x; at < count * words; at += blockDim.x) {
    const int32_t t = at / words, word = at % words, token = first + t;
    uint32_t value = 0;
    for (int32_t f = of_head.word_fields[word]; f < of_head.word_fields[word + 1]; ++f) {
      const uint32_t mask = (1u << of_head.field_width[f]) - 1;
#pragma unroll
      for (uint32_t b = 0; b < 4; ++b) {
        const uint32_t index = indexes[t][4 * of_head.fields[f].quad + b];
        value |= (index >> of_head.field_low[f] & mask) << (8 * b + of_head.field_shift[f]);
      }
    }
    const int32_t block = span.index_table[token / args.code_layout.block_tokens];
    uint32_t* of_codes =
        args.codes +
        (block * args.code_layout.BlockBytes() + head * args.code_layout.HeadBytes()) / 4;
    of_codes[TransformWordOffset(words, token % args.code_layout.block_tokens, word)] = value;
  }
}

// ---- cell tables ----

struct ExtendArgs {
  const DeviceTransformHead* heads;
  const DeviceTableExtension* extensions;
  const uint16_t* pool;
  KvRows rows;
  const uint32_t* codes;
  CodeLayout code_layout;
  int32_t words;
};

__global__ void __launch_bounds__(kTableThreads)
    ExtendKernel(const __grid_constant__ ExtendArgs args) {
  extern __shared__ float slice[];  // [kTableRows][dims], where the table comes here
  __shared__ float values[kCellRefreshTokens][kTableDims];
  __shared__ uint16_t cells[kCellRefreshTokens];
  __shared__ float counts[kTableRows];
  LetNextStart();
  WaitForEarlier();
  const DeviceTableExtension extension = args.extensions[blockIdx.z];
  const int32_t head = blockIdx.y, d = args.rows.head_dim;
  const int32_t first_dim = static_cast<int32_t>(blockIdx.x) * kTableDims;
  const int32_t dims = min(kTableDims, d - first_dim);
  const int32_t thread = threadIdx.x;
  const int32_t dim = thread % kTableDims, part = thread / kTableDims;
  float* const table = extension.table + head * kTableRows * d + first_dim;
  float* const of_counts =
      extension.table + args.code_layout.kv_heads * kTableRows * d + head * kTableRows;
  const bool in_shared = extension.tokens.size() >= kSharedTableTokens;
  float* const sums = in_shared ? slice : table;
  const int32_t stride = in_shared ? dims : d;
  if (in_shared || extension.clear != 0) {
#pragma unroll 8
    for (int32_t row = part; row < kTableRows; row += kTableThreads / kTableDims) {
      if (dim < dims) {
        sums[row * stride + dim] = extension.clear != 0 ? 0 : table[int64_t{row} * d + dim];
      }
    }
  }
  for (int32_t row = thread; row < kTableRows; row += kTableThreads) {
    counts[row] = extension.clear != 0 ? 0 : of_counts[row];
  }
  const DeviceTransformHead& of_head = args.heads[head];
  for (int32_t begin = extension.tokens.first; begin < extension.tokens.last;) {
    const int32_t end =
        min(extension.tokens.last, (begin / kCellRefreshTokens + 1) * kCellRefreshTokens);
    __syncthreads();
    for (int32_t i = part; i < end - begin; i += kTableThreads / kTableDims) {
      if (dim < dims) {
        values[i][dim] = WidenBf16(
            args.rows.Row(args.pool, extension.block_table, head, begin + i)[d + first_dim + dim]);
      }
    }
    if (thread < end - begin) {
      const int32_t token = begin + thread, ct = args.code_layout.block_tokens;
      const uint32_t* of_codes =
          args.codes + (extension.index_table[token / ct] * args.code_layout.BlockBytes() +
                        head * args.code_layout.HeadBytes()) /
                           4;
      uint32_t cell = 0;
      for (int32_t i = 0; i < of_head.num_cell_bits; ++i) {
        const int32_t bit = of_head.cell_bits[i];
        cell = cell << 1 |
               (of_codes[TransformWordOffset(args.words, token % ct, bit / 32)] >> bit % 32 & 1);
      }
      cells[thread] = static_cast<uint16_t>(cell);
    }
    __syncthreads();
    if (part < kTableParts) {
      for (int32_t i = 0; i < end - begin; ++i) {
        const int32_t cell = cells[i];
        if (cell % kTableParts != part) continue;
        if (dim < dims) sums[cell * stride + dim] += values[i][dim];
        if (dim == 0) counts[cell] += 1;
      }
    } else if (end % kCellRefreshTokens == 0) {
      float block_sum = 0;
#pragma unroll 8
      for (int32_t i = 0; i < end - begin; ++i) block_sum += values[i][dim];
      if (dim < dims) sums[kTransformCells * stride + dim] += block_sum;
      if (dim == 0) counts[kTransformCells] += static_cast<float>(end - begin);
    }
    begin = end;
  }
  __syncthreads();
  if (in_shared) {
#pragma unroll 8
    for (int32_t row = part; row < kTableRows; row += kTableThreads / kTableDims) {
      if (dim < dims) table[int64_t{row} * d + dim] = slice[row * dims + dim];
    }
  }
  // Only the block of the first dimensions uses the counts.
  if (first_dim == 0) {
    for (int32_t row = thread; row < kTableRows; row += kTableThreads) of_counts[row] = counts[row];
  }
}

// ---- tail ----

// state becomes that of both; one thread a dimension, all threads of the block call it.
__device__ __forceinline__ void MergeState(float* state, float part, float part_max, float part_sum,
                                           int32_t d) {
  const float max = state[d], sum = state[d + 1];
  __syncthreads();
  if (part_sum == 0) return;
  const int32_t c = threadIdx.x;
  const float new_max = sum == 0 ? part_max : fmaxf(max, part_max);
  const float keep = sum == 0 ? 0.0f : exp2f(max - new_max);
  const float add = sum == 0 ? 1.0f : exp2f(part_max - new_max);
  if (c < d) state[c] = sum == 0 ? part : state[c] * keep + part * add;
  if (c == 0) {
    state[d] = new_max;
    state[d + 1] = sum == 0 ? part_sum : sum * keep + part_sum * add;
  }
}

struct TailArgs {
  const DeviceTransformHead* heads;
  const float* const* tables;
  const int64_t* masses;
  const float* references;
  const float* deltas;
  float* states;
  int32_t query_heads, kv_heads, head_dim, unused;
};

__global__ void TailKernel(const __grid_constant__ TailArgs args) {
  __shared__ float masses[kTransformCells], divisors[kTransformCells];
  __shared__ long long total_shared;
  LetNextStart();
  WaitForEarlier();
  const int32_t head = blockIdx.x, d = args.head_dim;
  const int32_t kv_head = head / (args.query_heads / args.kv_heads);
  if (args.heads[kv_head].tail == 0) return;
  const int64_t at = int64_t{blockIdx.y} * args.query_heads + head;
  const auto* of_cells = reinterpret_cast<const long long*>(args.masses) + at * kTransformCells;
  const float* sums = args.tables[blockIdx.y] + kv_head * kTableRows * d;
  const float* counts =
      args.tables[blockIdx.y] + args.kv_heads * kTableRows * d + kv_head * kTableRows;
  if (threadIdx.x == 0) total_shared = 0;
  __syncthreads();
  long long mine = 0;
  for (int32_t cell = threadIdx.x; cell < kTransformCells; cell += blockDim.x) {
    const long long mass = of_cells[cell];
    mine += mass;
    masses[cell] = __fmul_rn(__ll2float_rn(mass), 0x1p-30f);
    divisors[cell] = counts[cell] + 1;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(&total_shared),
            static_cast<unsigned long long>(mine));
  __syncthreads();
  const long long total = total_shared;
  if (total == 0) return;
  const int32_t c = threadIdx.x;
  float part = 0;
  if (c < d) {
    const float common =
        __fdiv_rn(sums[int64_t{kTransformCells} * d + c], fmaxf(1.0f, counts[kTransformCells]));
    for (int32_t cell = 0; cell < kTransformCells; ++cell) {
      if (masses[cell] == 0) continue;
      const float mean = __fdiv_rn(__fadd_rn(sums[int64_t{cell} * d + c], common), divisors[cell]);
      part = __fmaf_rn(masses[cell], mean, part);
    }
  }
  float* state = args.states + at * AttentionStateFloats(d);
  float part_max = args.references[at] + args.deltas[at];
  if (state[d + 1] > 0) {
    part_max = fminf(part_max, state[d] + log2f(state[d + 1]) + kTailClampLog2);
  }
  MergeState(state, part, part_max, __fmul_rn(__ll2float_rn(total), 0x1p-30f), d);
}

__global__ void MergeKernel(const float* parts, float* states, int32_t d) {
  LetNextStart();
  WaitForEarlier();
  const int64_t at = int64_t{blockIdx.x} * AttentionStateFloats(d);
  const int32_t c = threadIdx.x;
  MergeState(states + at, c < d ? parts[at + c] : 0, parts[at + d], parts[at + d + 1], d);
}

unsigned ThreadsFor(int32_t d) { return static_cast<unsigned>((d + 31) / 32 * 32); }

}  // namespace

size_t PackedTransformBytes(const TransformCodeWeights& weights) {
  return OffsetsOf(weights).size_bytes;
}

DeviceTransform PackTransform(const TransformCodeWeights& weights, void* host, void* device) {
  const Offsets at = OffsetsOf(weights);
  auto* const to = static_cast<std::byte*>(host);
  auto* const there = static_cast<std::byte*>(device);
  std::memset(to, 0, at.size_bytes);
  const int32_t d = weights.head_dim, n = 4 * at.quads;
  for (size_t h = 0; h < weights.heads.size(); ++h) {
    const TransformCodeHead& head = weights.heads[h];
    const int32_t own = 4 * head.quads;
    const DeviceTransformHead of_head = HeadOf(head, weights.bits / 32, d);
    std::memcpy(to + at.heads + h * sizeof of_head, &of_head, sizeof of_head);
    const auto floats = [&](size_t offset) { return reinterpret_cast<float*>(to + offset); };
    for (int32_t c = 0; c < d; ++c) {
      const size_t row = (h * d + c) * n;
      std::copy_n(&head.key_weight[int64_t{c} * own], own, floats(at.key_weight) + row);
      std::copy_n(&head.query_weight[int64_t{c} * own], own, floats(at.query_weight) + row);
    }
    std::copy_n(head.key_bias.data(), own, floats(at.key_bias) + h * n);
    std::copy_n(head.mean.data(), d, floats(at.mean) + h * d);
    std::copy(head.delta_weight.begin(), head.delta_weight.end(),
              floats(at.delta_weight) + h * at.delta_rows * d);
  }
  const auto floats = [&](size_t offset) { return reinterpret_cast<const float*>(there + offset); };
  DeviceTransform transform;
  transform.heads = reinterpret_cast<const DeviceTransformHead*>(there + at.heads);
  transform.key_weight = floats(at.key_weight);
  transform.key_bias = floats(at.key_bias);
  transform.query_weight = floats(at.query_weight);
  transform.mean = floats(at.mean);
  transform.delta_weight = floats(at.delta_weight);
  transform.kv_heads = static_cast<int32_t>(weights.heads.size());
  transform.head_dim = d;
  transform.bits = weights.bits;
  transform.quads = at.quads;
  transform.delta_rows = at.delta_rows;
  return transform;
}

cudaError_t EncodeTransformKeys(const DeviceTransform& transform, const DeviceKeySpan* spans,
                                int32_t num_spans, int32_t max_span_tokens, const void* pool,
                                const KvLayout& layout, void* codes, const CodeLayout& code_layout,
                                Stream stream) {
  if (num_spans <= 0 || max_span_tokens <= 0) return cudaSuccess;
  const EncodeArgs args{transform,
                        spans,
                        static_cast<const uint16_t*>(pool),
                        KvRows(layout),
                        static_cast<uint32_t*>(codes),
                        code_layout};
  const dim3 grid(static_cast<unsigned>(CeilDiv(max_span_tokens, kEncodeTokens)),
                  static_cast<unsigned>(transform.kv_heads), static_cast<unsigned>(num_spans));
  return Launch(EncodeKernel, grid, ThreadsFor(4 * transform.quads), 0, stream, false, args);
}

cudaError_t ExtendCellTables(const DeviceTransform& transform,
                             const DeviceTableExtension* extensions, int32_t num_extensions,
                             int32_t max_tokens, const void* pool, const KvLayout& layout,
                             const void* codes, const CodeLayout& code_layout, Stream stream) {
  if (num_extensions <= 0) return cudaSuccess;
  const ExtendArgs args{transform.heads,
                        extensions,
                        static_cast<const uint16_t*>(pool),
                        KvRows(layout),
                        static_cast<const uint32_t*>(codes),
                        code_layout,
                        transform.bits / 32};
  const int32_t dims = std::min(kTableDims, layout.head_dim);
  const size_t shared_bytes =
      max_tokens >= kSharedTableTokens ? static_cast<size_t>(kTableRows) * dims * 4 : 0;
  const dim3 grid(static_cast<unsigned>(CeilDiv(layout.head_dim, kTableDims)),
                  static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(num_extensions));
  return Launch(ExtendKernel, grid, kTableThreads, shared_bytes, stream, false, args);
}

cudaError_t MergeTails(const DeviceTransform& transform, int32_t num_queries,
                       const float* const* tables, const TailMasses& tail, float* states,
                       Stream stream) {
  if (num_queries <= 0) return cudaSuccess;
  const TailArgs args{transform.heads,    tables, tail.masses, tail.references,
                      tail.deltas,        states, tail.heads,  transform.kv_heads,
                      transform.head_dim, 0};
  return Launch(TailKernel,
                dim3(static_cast<unsigned>(tail.heads), static_cast<unsigned>(num_queries)),
                ThreadsFor(transform.head_dim), 0, stream, false, args);
}

cudaError_t MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states,
                        Stream stream) {
  if (count <= 0) return cudaSuccess;
  return Launch(MergeKernel, dim3(static_cast<unsigned>(count)), ThreadsFor(head_dim), 0, stream,
                false, parts, states, head_dim);
}

}  // namespace winnow::kernels::cuda
