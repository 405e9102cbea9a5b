// Codes of keys, cell tables and the tail. Selection is in transform_select.cu.
//
// EncodeTransformKeys: a block takes up to 16 tokens of one span and KV head; thread i makes dimension i of all of
// them, each a chain in one register, with the keys in shared memory. Then a thread makes one word of one token.
//
// ExtendCellTables: a block has one KV head and up to 32 dimensions. Tokens enter a cell one after the other, because
// sums are the reference's to the bit; but cells do not wait for each other: sixteen groups of threads take every
// sixteenth cell each, and one more the sum of all. Which of 64 tokens are a group's is a mask of bits, and the next 64
// fly meanwhile. From 512 tokens on the slice of the table lies in shared memory (33 KB). Tried and lost, for 8192 tokens
// of 8 heads on an H100: one group for all cells, 3.3 ms; eight groups that look at every token's cell, without loads
// ahead, 64 dimensions a block, 1.0 ms.
//
// EndStates: a block has up to four heads of a group, whose tails need the same means of cells, and 32 dimensions where it
// leaves attention; of states, whose ends it changes, all. Of a tail kTailParts groups of threads take a slice of the cells
// each, a thread a dimension of V, and the slices' sums are added in ascending order. One group for all cells waits for each
// cell's row in turn: 126 us for the 32 heads of a layer on an H100. A block for each head, which read what it needs bit by
// bit, took 12.4 us on an H200 where 7.7 are left, and with 24 sequences, most of it divisions, 32 for 17. Tables are
// parameters of the launch and not descriptors in memory, so that no copy stands between a layer's kernels, and a step's
// kernels remain the same and go as graphs.
#include "kernels/cuda/transform_code.h"

#include <algorithm>
#include <cstring>

#include "kernels/attention_state.h"
#include "kernels/cuda/ask_into_l2.cuh"
#include "kernels/cuda/attention_states.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/transform_code.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kEncodeTokens = 16;
constexpr int kEncodeThreads = 256;  // the most dimensions
constexpr int kEncodeAhead = 128;    // of a column, in registers
constexpr int kTableDims = 32;
constexpr int kTableParts = 16;  // a power of two
constexpr int kTableThreads = kTableDims * (kTableParts + 1);
constexpr int32_t kSharedTableTokens = 512;
constexpr int64_t kTableRows = kTransformCells + 1;

// ---- packing ----

struct Offsets {
  size_t heads, key_weight, key_bias, query_weight, mean, delta_weight, first_dims, first_steps,
      size_bytes;
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
  const bool is_residual = !weights.heads[0].first_dims.empty();
  at.first_dims = take(is_residual ? heads * n * 4 : 0);
  at.first_steps = take(is_residual ? heads * n * 4 : 0);
  at.size_bytes = end;
  return at;
}

// A word's bits of the cell: those at the same place of their bytes are one field. `steps`: the most of the slot so far.
void AddCellFields(int32_t word, const DeviceTransformHead& from, DeviceTransformHead::Class& to,
                   int32_t& steps) {
  DeviceTransformHead::CellField of_places[8];
  for (int32_t i = 0; i < from.num_cell_bits; ++i) {
    if (from.cell_bits[i] / 32 != word) continue;
    const int32_t byte = from.cell_bits[i] % 32 / 8, place = from.cell_bits[i] % 8;
    DeviceTransformHead::CellField& field = of_places[place];
    field.rotate = static_cast<uint32_t>(place);
    field.mask |= 1u << 8 * byte;
    field.weights |= 1u << (from.num_cell_bits - 1 - i) << 8 * byte;
  }
  int32_t count = 0;
  for (const DeviceTransformHead::CellField& field : of_places) {
    if (field.mask == 0) continue;
    to.cell_fields[count / 2][count % 2] = field;
    ++count;
  }
  steps = std::max(steps, (count + 1) / 2);
}

// Fields and bits of cells by slot and class. Class c has word c and word 4 + c; where a slot has two words (of 64 bits, and
// the last two of 192), classes c and c + 2 share one, and take every second field.
void AddClasses(int32_t words, DeviceTransformHead& to) {
  for (int32_t slot = 0; slot < kTransformWordsMax / 4; ++slot) {
    const bool is_shared = words - 4 * slot == 2;
    for (int32_t c = 0; c < 4; ++c) {
      DeviceTransformHead::Class& of_class = to.classes[slot][c];
      const int32_t word = 4 * slot + (is_shared ? c % 2 : c);
      if (word >= words) continue;
      const bool is_second = is_shared && c >= 2;
      int32_t count = 0;
      for (int32_t f = to.word_fields[word] + (is_second ? 1 : 0); f < to.word_fields[word + 1];
           f += is_shared ? 2 : 1) {
        of_class.fields[count / 2][count % 2] = to.fields[f];
        ++count;
      }
      to.steps[slot] = std::max(to.steps[slot], (count + 1) / 2);
      if (!is_second) AddCellFields(word, to, of_class, to.cell_steps[slot]);
    }
  }
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
  AddClasses(words, to);
  return to;
}

// KvLayout without padding.
struct KvRows {
  explicit KvRows(const KvLayout& layout)
      : block_bytes(static_cast<int64_t>(layout.BlockBytes())),
        head_bytes(static_cast<int64_t>(layout.HeadBytes())),
        head_dim(layout.head_dim),
        block_tokens(layout.block_tokens) {}
  template <DType kKv>
  __device__ __forceinline__ const uint8_t* Row(const uint8_t* pool, const int32_t* table,
                                                int32_t head, int32_t token) const {
    return pool + table[token / block_tokens] * block_bytes + head * head_bytes +
           int64_t{token % block_tokens} * KvRowBytes<kKv>(head_dim);
  }
  int64_t block_bytes, head_bytes;
  int32_t head_dim, block_tokens;
};

// ---- codes of keys ----

struct EncodeArgs {
  DeviceTransform transform;
  const DeviceKeySpan* spans;
  const uint8_t* pool;
  KvRows rows;
  uint32_t* codes;
  CodeLayout code_layout;
  int32_t unused = 0;
  FirstCodes first = {};  // of residual codes
};

// Indexes of the first codes of `count` tokens from `first` on. Fields of one quad are in several threads' hands.
__device__ __forceinline__ void UnpackFirst(const EncodeArgs& args, const DeviceKeySpan& span,
                                            int32_t head, int32_t first, int32_t count,
                                            uint32_t (*indexes)[kTransformQuadsMax]) {
  for (int32_t at = threadIdx.x; at < count * kTransformQuadsMax; at += blockDim.x) {
    indexes[at / kTransformQuadsMax][at % kTransformQuadsMax] = 0;
  }
  __syncthreads();
  const DeviceTransformHead& of_head = args.first.heads[head];
  const int32_t words = args.first.layout.bits / 32, bt = args.first.layout.block_tokens;
  const auto* const codes = static_cast<const uint32_t*>(args.first.codes);
  for (int32_t at = threadIdx.x; at < count * words; at += blockDim.x) {
    const int32_t t = at / words, word = at % words, token = first + t;
    const int32_t block = span.index_table[token / bt];
    const uint32_t* of_codes =
        codes + (block * args.first.layout.BlockBytes() + head * args.first.layout.HeadBytes()) / 4;
    const uint32_t value = of_codes[TransformWordOffset(words, token % bt, word)];
    for (int32_t f = of_head.word_fields[word]; f < of_head.word_fields[word + 1]; ++f) {
      const DeviceTransformHead::Field field = of_head.fields[f];
      atomicOr(&indexes[t][field.quad], __funnelshift_r(value, value, field.rotate) & field.mask);
    }
  }
}

// kAhead: of each column, in registers before the keys are there, for blocks of one token: a layer's weights come from HBM,
// and a chain that waits for them a few at a time takes longer than the step's rotation and KV.
template <DType kKv, int kAhead, bool kResidual>
__global__ void __launch_bounds__(kEncodeThreads)
    EncodeKernel(const __grid_constant__ EncodeArgs args) {
  __shared__ float keys[kEncodeTokens * 256];
  __shared__ uint8_t indexes[kEncodeTokens][256];
  __shared__ uint32_t refined[kResidual ? kEncodeTokens : 1][kTransformQuadsMax];
  const int32_t head = blockIdx.y, d = args.transform.head_dim, n = 4 * args.transform.quads;
  const DeviceTransformHead& of_head = args.transform.heads[head];
  const int32_t i = threadIdx.x;
  const bool has_column = i < 4 * of_head.quads;  // blocks have a thread for each
  const float* const weight = args.transform.key_weight + int64_t{head} * d * n + i;
  float ahead[kAhead > 0 ? kAhead : 1];
#pragma unroll
  for (int c = 0; c < kAhead; ++c) ahead[c] = has_column && c < d ? weight[int64_t{c} * n] : 0;
  LetNextStart();
  WaitForEarlier();
  const DeviceKeySpan span = args.spans[blockIdx.z];
  const int32_t first = span.tokens.first + static_cast<int32_t>(blockIdx.x) * kEncodeTokens;
  const int32_t count = min(kEncodeTokens, span.tokens.last - first);
  if (count <= 0) return;
  for (int32_t at = threadIdx.x; at < count * d; at += blockDim.x) {
    keys[at] = KeyAt<kKv>(args.rows.Row<kKv>(args.pool, span.block_table, head, first + at / d), d,
                          at % d);
  }
  if constexpr (kResidual) UnpackFirst(args, span, head, first, count, refined);
  __syncthreads();
  if (has_column) {
    const float bias = args.transform.key_bias[head * n + i];
    const auto most = static_cast<float>((1 << of_head.widths[i / 4]) - 1);
    float acc[kEncodeTokens];
#pragma unroll
    for (int t = 0; t < kEncodeTokens; ++t) acc[t] = bias;
    if (count == 1) {
#pragma unroll
      for (int c = 0; c < kAhead; ++c) {
        if (c < d) acc[0] = __fmaf_rn(keys[c], ahead[c], acc[0]);
      }
#pragma unroll 32
      for (int32_t c = kAhead; c < d; ++c) {
        acc[0] = __fmaf_rn(keys[c], weight[int64_t{c} * n], acc[0]);
      }
    } else {
      for (int32_t c = 0; c < d; ++c) {
        const float w = weight[int64_t{c} * n];
#pragma unroll
        for (int t = 0; t < kEncodeTokens; ++t) {
          if (t < count) acc[t] = __fmaf_rn(keys[t * d + c], w, acc[t]);
        }
      }
    }
    if constexpr (kResidual) {
      const int32_t dim = args.transform.first_dims[head * n + i];
      const float step = -args.transform.first_steps[head * n + i];
#pragma unroll
      for (int t = 0; t < kEncodeTokens; ++t) {
        if (t >= count || dim < 0) break;
        const uint32_t index = refined[t][dim / 4] >> dim % 4 * 8 & 0xffu;
        acc[t] = __fmaf_rn(step, static_cast<float>(index), acc[t]);
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
  const uint8_t* pool;
  KvRows rows;
  const uint32_t* codes;
  CodeLayout code_layout;
  int32_t words;
};

// Up to 64 tokens on their way: of each thread some pairs of values, and of the first 64 threads a token's cell.
struct TokensAhead {
  static constexpr int kPairs = kTableDims / 2;
  static constexpr int kMine = (kCellRefreshTokens * kPairs + kTableThreads - 1) / kTableThreads;
  uint32_t values[kMine];  // PairAhead
  uint32_t cell;
};

// Channels c and c + 1 of a row's V in a register: two of bfloat16, or two codes and the scale.
template <DType kKv>
__device__ __forceinline__ uint32_t PairAhead(const uint8_t* row, int32_t d, int32_t c) {
  if constexpr (kKv == DType::kBF16) {
    return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint16_t*>(row) + d + c);
  } else {
    const uint32_t codes = *reinterpret_cast<const uint16_t*>(row + d + c);
    return __byte_perm(codes, ScalesOf<kKv>(row, d), 0x7610);
  }
}
template <DType kKv>
__device__ __forceinline__ float2 WidenAhead(uint32_t pair) {
  if constexpr (kKv == DType::kBF16) {
    return make_float2(WidenLow(pair), WidenHigh(pair));
  } else {
    const float scale = WidenHigh(pair);
    return make_float2(__fmul_rn(CodeOf<kKv>(pair & 0xffu), scale),
                       __fmul_rn(CodeOf<kKv>(pair >> 8 & 0xffu), scale));
  }
}

template <DType kKv>
__device__ __forceinline__ void LoadAhead(const ExtendArgs& args,
                                          const DeviceTableExtension& extension, int32_t head,
                                          int32_t first_dim, int32_t begin, int32_t count,
                                          TokensAhead& ahead) {
  constexpr int kPairs = TokensAhead::kPairs;
  const int32_t d = args.rows.head_dim, thread = threadIdx.x;
#pragma unroll
  for (int n = 0; n < TokensAhead::kMine; ++n) {
    const int32_t i = (thread + n * kTableThreads) / kPairs;
    const int32_t pair = (thread + n * kTableThreads) % kPairs;
    ahead.values[n] = 0;
    if (i < count && first_dim + 2 * pair < d) {
      const uint8_t* row = args.rows.Row<kKv>(args.pool, extension.block_table, head, begin + i);
      ahead.values[n] = PairAhead<kKv>(row, d, first_dim + 2 * pair);
    }
  }
  if (thread >= count) return;
  const DeviceTransformHead& of_head = args.heads[head];
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
  ahead.cell = cell;
}

template <DType kKv>
__global__ void __launch_bounds__(kTableThreads)
    ExtendKernel(const __grid_constant__ ExtendArgs args) {
  extern __shared__ float slice[];  // [kTableRows][dims], where the table comes here
  __shared__ float values[kCellRefreshTokens][kTableDims];
  __shared__ uint16_t cells[kCellRefreshTokens];
  __shared__ unsigned long long of_part[2][kTableParts];  // bits of tokens; two, which take turns
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
  const auto end_of = [&](int32_t begin) {
    return min(extension.tokens.last, (begin / kCellRefreshTokens + 1) * kCellRefreshTokens);
  };
  TokensAhead ahead;
  int32_t begin = extension.tokens.first;
  if (begin < extension.tokens.last) {
    LoadAhead<kKv>(args, extension, head, first_dim, begin, end_of(begin) - begin, ahead);
  }
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
  if (thread < 2 * kTableParts) of_part[thread / kTableParts][thread % kTableParts] = 0;
  for (int turn = 0; begin < extension.tokens.last; turn = 1 - turn) {
    const int32_t end = end_of(begin), count = end - begin;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TokensAhead::kMine; ++n) {
      const int32_t at = thread + n * kTableThreads;
      if (at >= kCellRefreshTokens * TokensAhead::kPairs) break;
      float* to = &values[at / TokensAhead::kPairs][at % TokensAhead::kPairs * 2];
      const float2 pair = WidenAhead<kKv>(ahead.values[n]);
      to[0] = pair.x;
      to[1] = pair.y;
    }
    if (thread < count) {
      cells[thread] = static_cast<uint16_t>(ahead.cell);
      atomicOr(&of_part[turn][ahead.cell % kTableParts], 1ull << thread);
    }
    if (thread >= kTableThreads - kTableParts) of_part[1 - turn][thread % kTableParts] = 0;
    __syncthreads();
    if (end < extension.tokens.last) {
      LoadAhead<kKv>(args, extension, head, first_dim, end, end_of(end) - end, ahead);
    }
    if (part < kTableParts) {
      for (unsigned long long left = of_part[turn][part]; left != 0; left &= left - 1) {
        const int i = __ffsll(static_cast<long long>(left)) - 1;
        const int32_t cell = cells[i];
        if (dim < dims) sums[cell * stride + dim] += values[i][dim];
        if (dim == 0) counts[cell] += 1;
      }
    } else if (end % kCellRefreshTokens == 0) {
      float block_sum = 0;
#pragma unroll 8
      for (int32_t i = 0; i < count; ++i) block_sum += values[i][dim];
      if (dim < dims) sums[kTransformCells * stride + dim] += block_sum;
      if (dim == 0) counts[kTransformCells] += static_cast<float>(count);
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

constexpr int kTailParts = 4;
constexpr int kTailHeads = kTailParts;  // of a block: each slice ends one
constexpr int kTailDims = 32;           // of a block that leaves attention
constexpr int kPartCells = kTransformCells / kTailParts;
constexpr int kTailQueries = 32;  // of a launch

struct EndArgs {
  const float* tables[kTailQueries];
  const DeviceTransformHead* heads;  // null: no tails
  const int64_t* masses;
  const float* references;
  const float* deltas;
  float* states;
  const float* parts;          // null: none
  const DeviceQuery* queries;  // where there is `out`
  float* out;                  // null: states
  int64_t out_stride;
  const float* sinks;
  int32_t query_heads, kv_heads, head_dim;
  int32_t dims;  // of a block, a multiple of 32: a thread of each slice has one
};

// The tail's sums of a block's heads: of its dimensions in slices of cells, and masses.
struct TailSums {
  float4 masses[kTransformCells];    // of each head, 0 for one that the block lacks
  float2 divisors[kTransformCells];  // and their reciprocals
  float slices[kTailParts][kTailHeads][256];
  long long totals[kTailHeads];
};

// a / divisor.x, rounded once (Markstein: the reciprocal is the nearest float, the remainder exact), without the branch that
// __fdiv_rn has for quotients that are hardly numbers, and behind which nothing is computed ahead.
__device__ __forceinline__ float Quotient(float a, const float2& divisor) {
  const float q = __fmul_rn(a, divisor.y);
  return __fmaf_rn(__fmaf_rn(-divisor.x, q, a), divisor.y, q);
}

// Leaves the sums of the thread's slice for its dimension `c`, the block's `at`. `table`: of the block's KV head, `counts` too.
// kAtOnce: rows of the table in flight, the first of which wait for nothing.
template <int kAtOnce>
__device__ __forceinline__ void AddUpCells(const EndArgs& args, const float* table,
                                           const float* counts, int64_t first_head,
                                           int32_t num_heads, int32_t slice, int32_t c, int32_t at,
                                           TailSums& sums) {
  const int32_t d = args.head_dim;
  const float* const from = table + int64_t{slice} * kPartCells * d + min(c, d - 1);
  float rows[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) rows[i] = from[int64_t{i} * d];
  const float all = table[int64_t{kTransformCells} * d + min(c, d - 1)],
              all_count = counts[kTransformCells];
  const auto* of_cells =
      reinterpret_cast<const long long*>(args.masses) + first_head * kTransformCells;
  long long mine[kTailHeads] = {};
#pragma unroll 2
  for (int32_t cell = threadIdx.x; cell < kTransformCells; cell += blockDim.x) {
    float masses[kTailHeads];
#pragma unroll
    for (int g = 0; g < kTailHeads; ++g) {
      const long long mass = g < num_heads ? of_cells[g * kTransformCells + cell] : 0;
      mine[g] += mass;
      masses[g] = __fmul_rn(__ll2float_rn(mass), 0x1p-30f);
    }
    sums.masses[cell] = make_float4(masses[0], masses[1], masses[2], masses[3]);
    const float divisor = counts[cell] + 1;
    sums.divisors[cell] = make_float2(divisor, __frcp_rn(divisor));
  }
#pragma unroll
  for (int g = 0; g < kTailHeads; ++g) {
    mine[g] = WarpSum(mine[g]);
    if (threadIdx.x % 32 == 0 && mine[g] != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&sums.totals[g]),
                static_cast<unsigned long long>(mine[g]));
    }
  }
  const float common = __fdiv_rn(all, fmaxf(1.0f, all_count));
  __syncthreads();
  float parts[kTailHeads] = {};
#pragma unroll 1
  for (int first = 0; first < kPartCells; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t cell = slice * kPartCells + first + i;
      const float mean = Quotient(__fadd_rn(rows[i], common), sums.divisors[cell]);
      const float4 masses = sums.masses[cell];
      if (masses.x != 0) parts[0] = __fmaf_rn(masses.x, mean, parts[0]);
      if (masses.y != 0) parts[1] = __fmaf_rn(masses.y, mean, parts[1]);
      if (masses.z != 0) parts[2] = __fmaf_rn(masses.z, mean, parts[2]);
      if (masses.w != 0) parts[3] = __fmaf_rn(masses.w, mean, parts[3]);
    }
    if (first + kAtOnce == kPartCells) break;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) rows[i] = from[int64_t{first + kAtOnce + i} * d];
  }
#pragma unroll
  for (int g = 0; g < kTailHeads; ++g) sums.slices[slice][g][at] = parts[g];
}

// Blocks along x: of each KV head its heads, kTailHeads at a time, and of those their dimensions; along y queries.
template <int kMostThreads, int kAtOnce>
__global__ void __launch_bounds__(kMostThreads) EndKernel(const __grid_constant__ EndArgs args) {
  __shared__ TailSums sums;
  const int32_t d = args.head_dim, group = args.query_heads / args.kv_heads;
  const auto turns = static_cast<int32_t>(CeilDiv(group, kTailHeads)),
             dim_blocks = static_cast<int32_t>(CeilDiv(d, args.dims));
  const int32_t block = static_cast<int32_t>(blockIdx.x) / dim_blocks, kv_head = block / turns;
  const int32_t first_of_group = block % turns * kTailHeads;
  const int32_t num_heads = min(kTailHeads, group - first_of_group);
  const bool has_tail = args.heads != nullptr && args.heads[kv_head].tail != 0;
  const float* const tables = args.tables[blockIdx.y];
  const float* const table = tables + kv_head * kTableRows * d;
  if (has_tail) {
    // The KV head's blocks ask for their table while the rows are attended: from HBM it takes longer than all else here.
    const int32_t blocks = turns * dim_blocks;
    const int64_t share = CeilDiv(kTableRows * d, blocks),
                  first = static_cast<int32_t>(blockIdx.x) % blocks * share;
    AskIntoL2(table + first, min(share, kTableRows * d - first));
  }
  if (threadIdx.x < kTailHeads) sums.totals[threadIdx.x] = 0;
  __syncthreads();
  const int32_t slice = static_cast<int32_t>(threadIdx.x) / args.dims,
                at = static_cast<int32_t>(threadIdx.x) % args.dims;
  const int32_t c = static_cast<int32_t>(blockIdx.x) % dim_blocks * args.dims + at;
  const int64_t first_head =
      int64_t{blockIdx.y} * args.query_heads + kv_head * group + first_of_group;
  // Each slice's threads have a head's state, too.
  const int64_t head = first_head + slice;
  const bool has_head = slice < num_heads;
  WaitForEarlier();
  // All that is read is asked for at once, and waited for afterwards.
  const auto load = [&](const float* states) {
    if (!has_head || states == nullptr) return StateValue{};
    const float* from = states + head * AttentionStateFloats(d);
    return StateValue{c < d ? from[c] : 0, from[d], from[d + 1]};
  };
  StateValue state = load(args.states);
  const StateValue of_parts = load(args.parts);
  const bool ends_tail = has_tail && has_head;
  const float reference = ends_tail ? args.references[head] : 0,
              delta = ends_tail ? args.deltas[head] : 0;
  const int64_t out_row = args.out != nullptr ? args.queries[blockIdx.y].row : 0;
  if (has_tail) {
    const float* counts = tables + args.kv_heads * kTableRows * d + kv_head * kTableRows;
    AddUpCells<kAtOnce>(args, table, counts, first_head, num_heads, slice, c, at, sums);
  }
  // Not earlier: the next product's weights come after what is read here.
  LetNextStart();
  __syncthreads();  // all have read the states' ends, too
  if (!has_head || c >= d) return;
  if (args.parts != nullptr) state = MergeValues(state, of_parts);
  const long long total = has_tail ? sums.totals[slice] : 0;
  if (total != 0) {
    float part = 0;
#pragma unroll
    for (int i = 0; i < kTailParts; ++i) part = __fadd_rn(part, sums.slices[i][slice][at]);
    float max = reference + delta;
    if (state.sum > 0) max = fminf(max, state.max + log2f(state.sum) + kTailClampLog2);
    state = MergeValues(state, {part, max, __fmul_rn(__ll2float_rn(total), 0x1p-30f)});
  }
  if (args.out != nullptr) {
    const auto of_query = static_cast<int32_t>(head - int64_t{blockIdx.y} * args.query_heads);
    args.out[out_row * args.out_stride + int64_t{of_query} * d + c] =
        AttentionOf(state, args.sinks, of_query);
    return;
  }
  float* to = args.states + head * AttentionStateFloats(d);
  to[c] = state.o;
  if (c == 0) {
    to[d] = state.max;
    to[d + 1] = state.sum;
  }
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
    std::copy(head.first_dims.begin(), head.first_dims.end(),
              reinterpret_cast<int32_t*>(to + at.first_dims) + h * n);
    std::copy(head.first_steps.begin(), head.first_steps.end(), floats(at.first_steps) + h * n);
  }
  const auto floats = [&](size_t offset) { return reinterpret_cast<const float*>(there + offset); };
  DeviceTransform transform;
  transform.heads = reinterpret_cast<const DeviceTransformHead*>(there + at.heads);
  transform.key_weight = floats(at.key_weight);
  transform.key_bias = floats(at.key_bias);
  transform.query_weight = floats(at.query_weight);
  transform.mean = floats(at.mean);
  transform.delta_weight = floats(at.delta_weight);
  transform.first_dims = reinterpret_cast<const int32_t*>(there + at.first_dims);
  transform.first_steps = floats(at.first_steps);
  transform.kv_heads = static_cast<int32_t>(weights.heads.size());
  transform.head_dim = d;
  transform.bits = weights.bits;
  transform.quads = at.quads;
  transform.delta_rows = at.delta_rows;
  return transform;
}

namespace {

template <bool kResidual>
cudaError_t LaunchEncode(const EncodeArgs& args, const KvLayout& layout, int32_t num_spans,
                         int32_t max_span_tokens, Stream stream) {
  if (num_spans <= 0 || max_span_tokens <= 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(CeilDiv(max_span_tokens, kEncodeTokens)),
                  static_cast<unsigned>(args.transform.kv_heads), static_cast<unsigned>(num_spans));
  const unsigned threads = ThreadsFor(4 * args.transform.quads);
  // Reading ahead takes registers, which leave a multiprocessor room for few blocks.
  const bool one_each =
      max_span_tokens == 1 && int64_t{grid.y} * grid.z <= CurrentDevice().multiprocessors;
  if (!HasKvRows(layout)) return cudaErrorInvalidValue;
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return one_each
               ? Launch(EncodeKernel<kKv, kEncodeAhead, kResidual>, grid, threads, 0, stream, false,
                        args)
               : Launch(EncodeKernel<kKv, 0, kResidual>, grid, threads, 0, stream, false, args);
  });
}

}  // namespace

cudaError_t EncodeTransformKeys(const DeviceTransform& transform, const DeviceKeySpan* spans,
                                int32_t num_spans, int32_t max_span_tokens, const void* pool,
                                const KvLayout& layout, void* codes, const CodeLayout& code_layout,
                                Stream stream) {
  const EncodeArgs args{transform,
                        spans,
                        static_cast<const uint8_t*>(pool),
                        KvRows(layout),
                        static_cast<uint32_t*>(codes),
                        code_layout};
  return LaunchEncode<false>(args, layout, num_spans, max_span_tokens, stream);
}

cudaError_t EncodeResiduals(const DeviceTransform& residual, const FirstCodes& first,
                            const DeviceKeySpan* spans, int32_t num_spans, int32_t max_span_tokens,
                            const void* pool, const KvLayout& layout, void* codes,
                            const CodeLayout& code_layout, Stream stream) {
  EncodeArgs args{residual,
                  spans,
                  static_cast<const uint8_t*>(pool),
                  KvRows(layout),
                  static_cast<uint32_t*>(codes),
                  code_layout};
  args.first = first;
  return LaunchEncode<true>(args, layout, num_spans, max_span_tokens, stream);
}

cudaError_t ExtendCellTables(const DeviceTransform& transform,
                             const DeviceTableExtension* extensions, int32_t num_extensions,
                             int32_t max_tokens, const void* pool, const KvLayout& layout,
                             const void* codes, const CodeLayout& code_layout, Stream stream) {
  if (num_extensions <= 0) return cudaSuccess;
  const ExtendArgs args{transform.heads,
                        extensions,
                        static_cast<const uint8_t*>(pool),
                        KvRows(layout),
                        static_cast<const uint32_t*>(codes),
                        code_layout,
                        transform.bits / 32};
  const int32_t dims = std::min(kTableDims, layout.head_dim);
  const size_t shared_bytes =
      max_tokens >= kSharedTableTokens ? static_cast<size_t>(kTableRows) * dims * 4 : 0;
  const dim3 grid(static_cast<unsigned>(CeilDiv(layout.head_dim, kTableDims)),
                  static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(num_extensions));
  if (!HasKvRows(layout)) return cudaErrorInvalidValue;
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return Launch(ExtendKernel<kKv>, grid, kTableThreads, shared_bytes, stream, false, args);
  });
}

cudaError_t EndStates(const StateEnd& end, Stream stream) {
  const int64_t heads = end.heads;
  const bool tails = !end.tables.empty();
  if (tails && static_cast<int64_t>(end.tables.size()) != end.num_queries) {
    return cudaErrorInvalidValue;
  }
  for (int64_t first = 0; first < end.num_queries; first += kTailQueries) {
    const int64_t count = std::min<int64_t>(kTailQueries, end.num_queries - first),
                  before = first * heads,
                  floats_before = before * AttentionStateFloats(end.head_dim);
    EndArgs args{};
    args.states = end.states + floats_before;
    if (end.parts != nullptr) args.parts = end.parts + floats_before;
    if (tails) {
      std::copy_n(end.tables.begin() + first, count, args.tables);
      args.heads = end.transform->heads;
      args.masses = end.tail.masses + before * kTransformCells;
      args.references = end.tail.references + before;
      args.deltas = end.tail.deltas + before;
    }
    if (end.out != nullptr) args.queries = end.queries + first;
    args.out = end.out;
    args.out_stride = end.out_stride;
    args.sinks = end.sinks;
    args.query_heads = end.heads;
    args.kv_heads = tails ? end.transform->kv_heads : end.heads;
    args.head_dim = end.head_dim;
    args.dims = end.out != nullptr ? kTailDims : static_cast<int32_t>(ThreadsFor(end.head_dim));
    const int64_t blocks = args.kv_heads * CeilDiv(heads / args.kv_heads, kTailHeads) *
                           CeilDiv(end.head_dim, args.dims);
    const unsigned threads = static_cast<unsigned>((tails ? kTailParts : 1) * args.dims);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
    const cudaError_t error =
        end.out != nullptr ? Launch(EndKernel<kTailParts * kTailDims, kPartCells>, grid, threads, 0,
                                    stream, false, args)
                           : Launch(EndKernel<1024, 16>, grid, threads, 0, stream, false, args);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t MergeTails(const DeviceTransform& transform, std::span<const float* const> tables,
                       const TailMasses& tail, float* states, Stream stream) {
  if (tables.empty()) return cudaSuccess;
  return EndStates({.states = states,
                    .num_queries = static_cast<int32_t>(tables.size()),
                    .heads = tail.heads,
                    .head_dim = transform.head_dim,
                    .transform = &transform,
                    .tables = tables,
                    .tail = tail},
                   stream);
}

cudaError_t MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states,
                        Stream stream) {
  if (count > INT32_MAX) return cudaErrorInvalidValue;
  // As of one query: a launch has all of them.
  return EndStates({.states = states,
                    .num_queries = count > 0 ? 1 : 0,
                    .heads = static_cast<int32_t>(count),
                    .head_dim = head_dim,
                    .parts = parts},
                   stream);
}

}  // namespace winnow::kernels::cuda
