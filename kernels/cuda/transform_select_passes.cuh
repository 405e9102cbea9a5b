// Selection by estimated mass in four launches, for rows of any length (transform_select.cu says when).
//
// Scan: a block of 128 threads a piece of 512 tokens, four tokens a thread, 128 apart, so that 16 lanes read 64 bytes of
// a word's plane; the fields and the group's coefficients lie in shared memory and are read once for four tokens. Mass,
// Count and Compact: a block of 256 threads a chunk of 1024 tokens, a thread four neighbours, so that what it reads is
// asked for at once. Cells are made by the scan, where the words lie in registers.
//
// The last block of a row to finish does what needs the whole row (a ticket, as in hamming_select.cu): no launch of its
// own, and no block waits for another.
#ifndef WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PASSES_CUH_
#define WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PASSES_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transform_select_parts.cuh"

namespace winnow::kernels::cuda::masses {

constexpr int kScanThreads = 128;
constexpr int kScanTokens = kMassPieceTokens / kScanThreads;
constexpr int kTokens = 4;  // of a thread
constexpr int32_t kChunkTokens = kThreads * kTokens;

// ---- scan ----

// R and inv of the row's heads, from its pieces: a warp a head.
template <int kGroup>
__device__ void FinishRow(const Args& args, int32_t row, const DeviceQuery& query) {
  const int32_t first = FirstPiece(query);
  const int32_t count = (query.mid.last - 1) / kMassPieceTokens - first + 1;
  const int32_t heads = args.kv_heads * args.group, kv_head = row % args.kv_heads;
  const int32_t lane = threadIdx.x % 32;
  for (int32_t g = threadIdx.x / 32; g < args.group; g += kScanThreads / 32) {
    PreparedQuery& prepared = args.prepared[int64_t{row} * args.group + g];
    const int64_t at = int64_t{row / args.kv_heads} * heads + kv_head * args.group + g;
    const float e = AnchorsOf(args, at);
    const int64_t of_row = int64_t{row} * args.pieces * kGroup + g;
    float reference = e;
#pragma unroll 8
    for (int32_t p = lane; p < count; p += 32) {
      reference =
          fmaxf(reference, Logit(prepared, __ldcg(&args.peaks[of_row + int64_t{p} * kGroup])));
    }
    reference = WarpMax(reference);
    long long sum = 0;
#pragma unroll 4
    for (int32_t p = lane; p < count; p += 32) {
      const int64_t piece = of_row + int64_t{p} * kGroup;
      const float share = Exp2(__fsub_rn(Logit(prepared, __ldcg(&args.peaks[piece])), reference));
      sum += __double2ll_rz(
          __dmul_rn(__ll2double_rn(__ldcg(reinterpret_cast<const long long*>(&args.sums[piece]))),
                    static_cast<double>(share)));
    }
    sum = WarpSum(sum);
    if (lane != 0) continue;
    sum += __float2ll_rz(__fmul_rn(Exp2(__fsub_rn(e, reference)), 0x1p26f));
    prepared.reference = reference;
    prepared.inverse = __fdiv_rn(0x1p26f, __ll2float_rn(sum));
    if (args.tail_masses != nullptr) args.tail_references[at] = reference;
  }
}

template <int kWords, int kGroup>
__global__ void __launch_bounds__(kScanThreads) ScanKernel(const __grid_constant__ Args args) {
  __shared__ uint2 fields[kTransformFieldsMax];  // rotate, mask
  __shared__ uint32_t coefs[kTransformFieldsMax][kGroup];
  __shared__ int32_t word_fields[kTransformWordsMax + 1];
  __shared__ uint32_t tiles[kMassPieceTokens / kCodeTileTokens];  // in tiles' words / kWords
  __shared__ int32_t warp_peaks[kScanThreads / 32][kGroup];
  __shared__ uint32_t warp_sums[kScanThreads / 32][2][kGroup];
  __shared__ uint32_t is_last;
  __shared__ float scales[kGroup];
  __shared__ int2 cell_bits[8];  // of the code, and of the cell
  __shared__ int32_t word_cell_bits[kWords + 1];
  LetNextStart();
  WaitForEarlier();
  const int32_t row = blockIdx.y, kv_head = row % args.kv_heads;
  const DeviceQuery query = args.queries[row / args.kv_heads];
  const int32_t base = BaseOf(query);
  const int32_t begin = base + static_cast<int32_t>(blockIdx.x) * kMassPieceTokens;
  if (begin >= query.mid.last || query.mid.first >= query.mid.last) return;
  const DeviceTransformHead& of_head = args.transform.heads[kv_head];
  const PreparedQuery* prepared = args.prepared + int64_t{row} * args.group;
  const int32_t num_fields = of_head.word_fields[kWords];
  for (int32_t f = threadIdx.x; f < num_fields; f += kScanThreads) {
    const DeviceTransformHead::Field field = of_head.fields[f];
    fields[f] = make_uint2(field.rotate, field.mask);
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      coefs[f][g] = g < args.group ? prepared[g].coef[field.quad] : 0;
    }
  }
  if (threadIdx.x <= kWords) word_fields[threadIdx.x] = of_head.word_fields[threadIdx.x];
  if (threadIdx.x < kGroup) {
    scales[threadIdx.x] = threadIdx.x < args.group ? prepared[threadIdx.x].a : 0;
  }
  if (threadIdx.x == kScanThreads - 1) {  // by word, so that words stay in registers
    int32_t count = 0;
    for (int32_t w = 0; w < kWords; ++w) {
      word_cell_bits[w] = count;
      for (int32_t i = 0; i < of_head.num_cell_bits; ++i) {
        if (of_head.cell_bits[i] / 32 != w) continue;
        cell_bits[count++] = make_int2(of_head.cell_bits[i] % 32, of_head.num_cell_bits - 1 - i);
      }
    }
    word_cell_bits[kWords] = count;
  }
  for (int32_t t = threadIdx.x; t < kMassPieceTokens / kCodeTileTokens; t += kScanThreads) {
    const int32_t token = begin + t * kCodeTileTokens;
    if (token >= query.mid.last) break;
    const int32_t block = args.block_tokens.Divide(token);
    tiles[t] =
        static_cast<uint32_t>((query.block_table[block] * args.block_words +
                               int64_t{token - block * args.block_tokens.divisor()} * kWords) /
                              (kCodeTileTokens * kWords));
  }
  __syncthreads();
  const uint32_t* head_codes = args.codes + kv_head * args.head_words;
  int32_t dots[kScanTokens][kGroup] = {};
  uint32_t words[kScanTokens][kWords];
#pragma unroll
  for (int i = 0; i < kScanTokens; ++i) {
    const int32_t at = i * kScanThreads + static_cast<int32_t>(threadIdx.x);
    const bool inside = begin + at < query.mid.last;
    const uint32_t* code =
        head_codes +
        uint64_t{tiles[inside ? at / kCodeTileTokens : 0]} * uint64_t{kCodeTileTokens * kWords} +
        at % kCodeTileTokens;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[i][w] = inside ? __ldg(code + w * kCodeTileTokens) : 0;
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    for (int32_t f = word_fields[w]; f < word_fields[w + 1]; ++f) {
      const uint2 field = fields[f];
      uint32_t of_group[kGroup];
#pragma unroll
      for (int g = 0; g < kGroup; ++g) of_group[g] = coefs[f][g];
#pragma unroll
      for (int i = 0; i < kScanTokens; ++i) {
        const uint32_t bytes = __funnelshift_r(words[i][w], words[i][w], field.x) & field.y;
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          // Bytes without signs times bytes with signs.
          asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(dots[i][g]) : "r"(bytes), "r"(of_group[g]));
        }
      }
    }
  }
  if (args.tail_masses != nullptr) {
    uint32_t cells[kScanTokens] = {};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      for (int32_t b = word_cell_bits[w]; b < word_cell_bits[w + 1]; ++b) {
        const int2 bit = cell_bits[b];
#pragma unroll
        for (int i = 0; i < kScanTokens; ++i) cells[i] |= (words[i][w] >> bit.x & 1) << bit.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kScanTokens; ++i) {
      const int32_t at = begin - base + i * kScanThreads + static_cast<int32_t>(threadIdx.x);
      args.cells[row * args.row_tokens + at] = static_cast<uint8_t>(cells[i]);
    }
  }
  // Dots leave, and the piece's peak and sum.
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool inside[kScanTokens];
#pragma unroll
  for (int i = 0; i < kScanTokens; ++i) {
    const int32_t token = begin + i * kScanThreads + static_cast<int32_t>(threadIdx.x);
    inside[i] = token >= query.mid.first && token < query.mid.last;
    int32_t* to = args.dots + (row * args.row_tokens + (token - base)) * kGroup;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if constexpr (kGroup % 4 == 0) {
        if (g % 4 == 0) {
          *reinterpret_cast<int4*>(to + g) =
              make_int4(dots[i][g], dots[i][g + 1], dots[i][g + 2], dots[i][g + 3]);
        }
      } else {
        to[g] = dots[i][g];
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    int32_t peak = INT32_MIN;
#pragma unroll
    for (int i = 0; i < kScanTokens; ++i) {
      if (inside[i]) peak = max(peak, dots[i][g]);
    }
    peak = __reduce_max_sync(kFullMask, peak);
    if (lane == 0) warp_peaks[warp][g] = peak;
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    int32_t peak = INT32_MIN;
#pragma unroll
    for (int w = 0; w < kScanThreads / 32; ++w) peak = max(peak, warp_peaks[w][g]);
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kScanTokens; ++i) {
      if (!inside[i]) continue;
      sum += __float2uint_rz(__fmul_rn(
          Exp2(__fmul_rn(scales[g], FloatOf(dots[i][g] - peak + kIntegerBits))), 0x1p26f));
    }
    // At most 2^28 a thread: two halves, which 32 threads cannot overflow.
    const uint32_t low = __reduce_add_sync(kFullMask, sum & 0xffffu);
    const uint32_t high = __reduce_add_sync(kFullMask, sum >> 16);
    if (lane == 0) {
      warp_sums[warp][0][g] = low;
      warp_sums[warp][1][g] = high;
    }
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    const int32_t g = threadIdx.x;
    int32_t peak = INT32_MIN;
    int64_t sum = 0;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      peak = max(peak, warp_peaks[w][g]);
      sum += int64_t{warp_sums[w][0][g]} + (int64_t{warp_sums[w][1][g]} << 16);
    }
    const int64_t piece = (int64_t{row} * args.pieces + blockIdx.x) * kGroup + g;
    args.peaks[piece] = peak;
    args.sums[piece] = sum;
  }
  const int32_t blocks = (query.mid.last - 1) / kMassPieceTokens - FirstPiece(query) + 1;
  if (IsLast(&args.tickets[4 * row], static_cast<uint32_t>(blocks), &is_last)) {
    FinishRow<kGroup>(args, row, query);
  }
}

// ---- masses, and the cut ----

__device__ __forceinline__ uint32_t ChunksOf(const DeviceQuery& query) {
  return static_cast<uint32_t>((query.mid.last - BaseOf(query) + kChunkTokens - 1) / kChunkTokens);
}

template <int kGroup>
__device__ __forceinline__ void TakeWeighing(const Args& args, int32_t row,
                                             Weighing (&heads)[kGroup]) {
  if (threadIdx.x >= kGroup) return;
  if (threadIdx.x >= args.group) {
    heads[threadIdx.x] = {};
    return;
  }
  const PreparedQuery& from = args.prepared[int64_t{row} * args.group + threadIdx.x];
  heads[threadIdx.x] = {from.a, from.b, from.reference, from.inverse};
}

// Each head's weights relative to R, of the thread's tokens, whose first lies `at` in the workspace. Tokens outside mid
// have any.
template <int kGroup>
__device__ __forceinline__ void WeightsOf(const Args& args, int64_t at,
                                          const Weighing (&heads)[kGroup],
                                          float (&weights)[kTokens][kGroup]) {
  const int32_t* from = args.dots + at * kGroup;
  int32_t dots[kTokens * kGroup];
#pragma unroll
  for (int i = 0; i < kTokens * kGroup; i += 4) {
    const int4 four = *reinterpret_cast<const int4*>(from + i);
    dots[i] = four.x;
    dots[i + 1] = four.y;
    dots[i + 2] = four.z;
    dots[i + 3] = four.w;
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const float logit =
          __fmaf_rn(heads[g].a, FloatOf(dots[i * kGroup + g] + kIntegerBits), heads[g].b);
      weights[i][g] = Exp2(__fsub_rn(logit, heads[g].reference));
    }
  }
}

// The beginning of Mass and Compact: whether the block has tokens, and which are its thread's.
struct Chunk {
  DeviceQuery query;
  int32_t row, base, mine;  // `mine`: the thread's first token
  bool has_tokens;
};
__device__ __forceinline__ Chunk ChunkOf(const Args& args) {
  Chunk chunk;
  chunk.row = blockIdx.y;
  chunk.query = args.queries[chunk.row / args.kv_heads];
  chunk.base = BaseOf(chunk.query);
  const int32_t begin = chunk.base + static_cast<int32_t>(blockIdx.x) * kChunkTokens;
  chunk.mine = begin + static_cast<int32_t>(threadIdx.x) * kTokens;
  chunk.has_tokens = begin < chunk.query.mid.last && chunk.query.mid.first < chunk.query.mid.last;
  return chunk;
}

template <int kGroup>
__global__ void __launch_bounds__(kThreads) MassKernel(const __grid_constant__ Args args) {
  __shared__ uint32_t counts[kCoarseBins];
  __shared__ Weighing heads[kGroup];
  __shared__ uint32_t warp_sums[kWarps];
  __shared__ uint32_t is_last;
  __shared__ uint2 found;
  LetNextStart();
  WaitForEarlier();
  const Chunk chunk = ChunkOf(args);
  if (!chunk.has_tokens) return;
  const DeviceQuery& query = chunk.query;
  for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) counts[bin] = 0;
  TakeWeighing<kGroup>(args, chunk.row, heads);
  __syncthreads();
  const int64_t at = chunk.row * args.row_tokens + (chunk.mine - chunk.base);
  float weights[kTokens][kGroup];
  WeightsOf<kGroup>(args, at, heads, weights);
  uint32_t keys[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float mass = 0;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (g < args.group) mass = __fmaf_rn(weights[i][g], heads[g].inverse, mass);
    }
    const int32_t key =
        min(max(static_cast<int32_t>(__float_as_uint(mass) >> kMassKeyShift) - kMassKeyBase, 0),
            kMassKeyBins - 1);
    keys[i] = static_cast<uint32_t>(key);
    if (IsInside(query, chunk.mine + i)) atomicAdd(&counts[key >> kFineBits], 1u);
  }
  *reinterpret_cast<uint2*>(&args.keys[at]) =
      make_uint2(keys[0] | keys[1] << 16, keys[2] | keys[3] << 16);
  __syncthreads();
  uint32_t* coarse = args.coarse + int64_t{chunk.row} * kCoarseBins;
  for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) {
    if (counts[bin] != 0) atomicAdd(&coarse[bin], counts[bin]);
  }
  if (!IsLast(&args.tickets[4 * chunk.row + 1], ChunksOf(query), &is_last)) return;
  for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) {
    counts[bin] = __ldcg(&coarse[bin]);
    coarse[bin] = 0;
  }
  __syncthreads();
  uint2 cut = make_uint2(kNoBin, 0);
  const uint32_t selected = SelectedOf(query, counts, warp_sums);
  if (selected > 0) cut = FindFromTop<kCoarseBins>(counts, selected, warp_sums, &found);
  if (threadIdx.x == 0) {
    args.cuts[chunk.row].coarse = cut.x;
    args.cuts[chunk.row].above = cut.y;
    args.chosen_counts[chunk.row] = static_cast<int32_t>(selected);
  }
}

__global__ void __launch_bounds__(kThreads) CountKernel(const __grid_constant__ Args args) {
  __shared__ uint32_t counts[kFineBins];  // in the cut's bin
  __shared__ uint32_t above_shared;
  __shared__ uint32_t warp_sums[kWarps];
  __shared__ uint32_t is_last;
  __shared__ uint2 found;
  LetNextStart();
  WaitForEarlier();
  const Chunk chunk = ChunkOf(args);
  if (!chunk.has_tokens) return;
  const DeviceQuery& query = chunk.query;
  const int32_t row = chunk.row;
  if (threadIdx.x < kFineBins) counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) above_shared = 0;
  __syncthreads();
  const uint32_t coarse = args.cuts[row].coarse;
  const uint2 packed = *reinterpret_cast<const uint2*>(
      &args.keys[row * args.row_tokens + (chunk.mine - chunk.base)]);
  uint32_t above = 0;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const uint32_t key = (i < 2 ? packed.x : packed.y) >> i % 2 * 16 & 0xffffu;
    if (!IsInside(query, chunk.mine + i)) continue;
    above += key >> kFineBits > coarse ? 1 : 0;
    if (key >> kFineBits == coarse) atomicAdd(&counts[key & (kFineBins - 1)], 1u);
  }
  above = __reduce_add_sync(kFullMask, above);
  if (threadIdx.x % 32 == 0 && above != 0) atomicAdd(&above_shared, above);
  __syncthreads();
  uint32_t* of_row = args.counts + int64_t{row} * args.chunks * kFineBins;
  const bool has_bin = threadIdx.x < kFineBins;
  const int32_t bin = kFineBins - 1 - static_cast<int32_t>(threadIdx.x);  // from the top
  const uint32_t count = has_bin ? counts[bin] : 0;
  uint32_t total;
  const uint32_t higher = BlockExclusiveScan<kWarps>(count, warp_sums, &total);
  if (has_bin) {
    of_row[int64_t{blockIdx.x} * kFineBins + bin] = (above_shared + higher) << 16 | count;
    if (count != 0) atomicAdd(&args.fine[row * kFineBins + bin], count);
  }
  const uint32_t chunks = ChunksOf(query);
  if (!IsLast(&args.tickets[4 * row + 2], chunks, &is_last)) return;
  if (has_bin) {
    counts[bin] = __ldcg(&args.fine[row * kFineBins + bin]);
    args.fine[row * kFineBins + bin] = 0;
  }
  __syncthreads();
  const auto k = static_cast<uint32_t>(__ldcg(&args.chosen_counts[row]));
  uint32_t threshold = kMassKeyBins, skip = 0, least = 0;
  if (k > 0) {
    const uint32_t left = k - args.cuts[row].above;  // of the cut's bin
    const uint2 cut = FindFromTop<kFineBins>(counts, left, warp_sums, &found);
    least = cut.x;
    threshold = coarse << kFineBits | least;
    skip = counts[least] - (left - cut.y);
  }
  // Where each chunk's selected tokens go: 256 chunks at a time.
  uint32_t higher_before = 0, ties_before = 0;
  for (uint32_t first = 0; first < chunks; first += kThreads) {
    const uint32_t other = first + threadIdx.x;
    const uint32_t record =
        other < chunks && k > 0 ? __ldcg(&of_row[int64_t{other} * kFineBins + least]) : 0;
    uint32_t all_higher, all_ties;
    const uint32_t higher_here =
        higher_before + BlockExclusiveScan<kWarps>(record >> 16, warp_sums, &all_higher);
    const uint32_t ties_here =
        ties_before + BlockExclusiveScan<kWarps>(record & 0xffffu, warp_sums, &all_ties);
    if (other < chunks) {
      uint32_t* to = &args.places[(int64_t{row} * args.chunks + other) * 2];
      to[0] = higher_here;
      to[1] = ties_here;
    }
    higher_before += all_higher;
    ties_before += all_ties;
  }
  if (threadIdx.x == 0) {
    args.cuts[row].threshold = threshold;
    args.cuts[row].skip = skip;
  }
}

template <int kGroup>
__global__ void __launch_bounds__(kThreads) CompactKernel(const __grid_constant__ Args args) {
  // 2^30 times the mass of each head and cell: its lower 15 bits, and what is above them.
  __shared__ uint32_t cells[kGroup][kTransformCells][2];
  __shared__ Weighing heads[kGroup];
  __shared__ uint32_t warp_sums[kWarps];
  LetNextStart();
  WaitForEarlier();
  const Chunk chunk = ChunkOf(args);
  if (!chunk.has_tokens) return;
  const DeviceQuery& query = chunk.query;
  const int32_t row = chunk.row, kv_head = row % args.kv_heads;
  const bool tail = args.tail_masses != nullptr;
  if (tail) {
    for (int32_t i = threadIdx.x; i < kGroup * kTransformCells * 2; i += kThreads) {
      (&cells[0][0][0])[i] = 0;
    }
    TakeWeighing<kGroup>(args, row, heads);
  }
  const MassCut cut = args.cuts[row];
  const int64_t place = int64_t{row} * args.chunks + blockIdx.x;
  const uint32_t higher_before = args.places[2 * place], ties_before = args.places[2 * place + 1];
  const int64_t at = row * args.row_tokens + (chunk.mine - chunk.base);
  const uint2 packed = *reinterpret_cast<const uint2*>(&args.keys[at]);
  uint32_t inside = 0, higher = 0, ties = 0;  // bit i is the thread's token i
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const uint32_t key = (i < 2 ? packed.x : packed.y) >> i % 2 * 16 & 0xffffu;
    if (!IsInside(query, chunk.mine + i)) continue;
    inside |= 1u << i;
    higher |= (key > cut.threshold ? 1u : 0u) << i;
    ties |= (key == cut.threshold ? 1u : 0u) << i;
  }
  uint32_t all;
  const uint32_t before =
      BlockExclusiveScan<kWarps>(__popc(higher) | __popc(ties) << 16, warp_sums, &all);
  uint32_t my_ties = ties_before + (before >> 16);
  uint32_t to = higher_before + (before & 0xffffu) + (my_ties > cut.skip ? my_ties - cut.skip : 0);
  uint32_t selected = higher;
  int32_t* tokens = args.chosen_tokens + row * args.capacity;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if ((ties >> i & 1) != 0 && my_ties++ >= cut.skip) selected |= 1u << i;
    if ((selected >> i & 1) != 0) tokens[to++] = chunk.mine + i;
  }
  if (!tail) return;
  float weights[kTokens][kGroup];
  WeightsOf<kGroup>(args, at, heads, weights);
  const uint32_t of_cells = *reinterpret_cast<const uint32_t*>(&args.cells[at]);
  const uint32_t left = args.tail_of_all ? inside : inside & ~selected;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if ((left >> i & 1) == 0) continue;
    const uint32_t cell = of_cells >> 8 * i & 0xffu;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (g >= args.group) continue;
      const uint32_t mass = __float2uint_rz(__fmul_rn(weights[i][g], 0x1p30f));
      if ((mass & 0x7fffu) != 0) atomicAdd(&cells[g][cell][0], mass & 0x7fffu);
      if (mass >> 15 != 0) atomicAdd(&cells[g][cell][1], mass >> 15);
    }
  }
  __syncthreads();
  const int64_t query_heads = int64_t{args.kv_heads} * args.group;
  auto* masses = reinterpret_cast<unsigned long long*>(args.tail_masses) +
                 (row / args.kv_heads * query_heads + kv_head * args.group) * kTransformCells;
  for (int32_t i = threadIdx.x; i < args.group * kTransformCells; i += kThreads) {
    const uint32_t* of_cell = cells[i / kTransformCells][i % kTransformCells];
    const unsigned long long mass =
        of_cell[0] + (static_cast<unsigned long long>(of_cell[1]) << 15);
    if (mass != 0) atomicAdd(&masses[i], mass);
  }
}

}  // namespace winnow::kernels::cuda::masses

#endif  // WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PASSES_CUH_
