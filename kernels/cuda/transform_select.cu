// Selection by estimated mass. The header of transform_code.h has the launches; the arithmetic is that of
// kernels/transform_code.h, rounding by rounding.
//
// A row is one query and KV head. Prepare: a block a query head, a thread a dimension. Then, where the blocks of all rows
// run at once, one launch whose blocks meet (transform_select_fused.cuh); else four (transform_select_passes.cuh).
//
// Keys are counted in two levels, 512 bins and then 128, because 65,536 counts do not fit into shared memory and few of
// the 512 are not zero. Ties cost nothing: additions to one address are merged within a warp.
#include <algorithm>

#include "kernels/cuda/ask_into_l2.cuh"
#include "kernels/cuda/attention_states.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transform_select_fused.cuh"
#include "kernels/cuda/transform_select_parts.cuh"
#include "kernels/cuda/transform_select_passes.cuh"

namespace winnow::kernels::cuda {
namespace {

using namespace masses;  // NOLINT(google-build-using-namespace): its own headers

constexpr int kPrepareThreads = 288;  // 256 dimensions, and one for the mean
constexpr int kPrepareAhead = 128;    // of a column, in registers
constexpr int32_t kFusedTiles[] = {4, 8, 16, 32};
constexpr int kTakeThreads = 128;
constexpr int64_t kTakeTokensMax = 1 << 15;  // of a block: sums of 15 bits each fit

// ---- prepare ----

// kAhead: of each column, in registers before the query is there. Then a multiprocessor has room for one block only.
// Beside the kernel that attends to the anchors, where that is right ahead: only their masses need it to have ended. (On an
// H200 one after the other took 12.5 us of a layer at 128K.)
template <int kAhead>
__global__ void __launch_bounds__(kPrepareThreads)
    PrepareKernel(const __grid_constant__ Args args) {
  __shared__ float q[256], deltas[256];
  __shared__ int32_t half_steps, not_finite;
  __shared__ float warp_peaks[kPrepareThreads / 32];
  __shared__ float centre;
  LetNextStart();
  const int32_t heads = args.kv_heads * args.group;
  const int32_t head = blockIdx.x, kv_head = head / args.group, g = head % args.group;
  const DeviceQuery query = args.queries[blockIdx.y];
  const int32_t d = args.transform.head_dim, n = 4 * args.transform.quads;
  const DeviceTransformHead& of_head = args.transform.heads[kv_head];
  const int32_t own = 4 * of_head.quads, i = threadIdx.x;
  // The thread's column of the transform, or the mean; most of it is here before the query is.
  const bool is_mean = i == kPrepareThreads - 1;
  const float* column = is_mean ? args.transform.mean + int64_t{kv_head} * d
                                : args.transform.query_weight + int64_t{kv_head} * d * n + i;
  const int64_t stride = is_mean ? 1 : n;
  const bool has_column = i < own || is_mean;
  const int32_t width = i < own ? of_head.widths[i / 4] : 0;
  float ahead[kAhead > 0 ? kAhead : 1];
#pragma unroll
  for (int c = 0; c < kAhead; ++c) ahead[c] = has_column && c < d ? column[c * stride] : 0;
  const float* const of_delta =
      args.transform.delta_weight + int64_t{kv_head} * args.transform.delta_rows * d;
  if (args.tail_masses != nullptr) AskIntoL2(of_delta, of_head.delta_rows * d);
  if (args.q_is_there == 0) WaitForEarlier();
  for (int32_t c = i; c < d; c += kPrepareThreads) {
    // Not from L1, which may have the last step's.
    q[c] = __ldcg(&args.q[query.row * args.q_stride + int64_t{head} * d + c]);
  }
  if (i == 0) half_steps = not_finite = 0;
  const int64_t at = int64_t{blockIdx.y} * heads + head;
  __syncthreads();
  float y = 0;
  if (has_column) {
#pragma unroll
    for (int c = 0; c < kAhead; ++c) {
      if (c < d) y = __fmaf_rn(q[c], ahead[c], y);
    }
#pragma unroll 32
    for (int32_t c = kAhead; c < d; ++c) y = __fmaf_rn(q[c], column[c * stride], y);
  }
  if (is_mean) {
    centre = y;
  } else if (i < own && !isfinite(y)) {
    not_finite = 1;
  }
  if (args.tail_masses != nullptr && i < of_head.delta_rows) {
    const float* weight = of_delta + int64_t{i} * d;
    float acc = 0;
#pragma unroll 32
    for (int32_t c = 0; c < d; ++c) acc = __fmaf_rn(q[c], weight[c], acc);
    deltas[i] = acc;
  }
  const float warp_peak = WarpMax(i < own ? fabsf(y) : 0);
  if (i % 32 == 0) warp_peaks[i / 32] = warp_peak;
  __syncthreads();
  float peak = 0;
#pragma unroll
  for (int w = 0; w < kPrepareThreads / 32; ++w) peak = fmaxf(peak, warp_peaks[w]);
  int32_t coef = 0;
  if (i < own && not_finite == 0 && peak >= kTransformPeakLeast) {
    coef = __float2int_rn(__fmul_rn(y, __fdiv_rn(127.0f, peak)));
  }
  if (coef != 0) atomicAdd(&half_steps, coef * ((1 << width) - 1));
  __syncthreads();
  const float a = __fmul_rn(__fdiv_rn(peak, 127.0f), args.scale2);
  const float middle = __fmul_rn(-0.5f, __int2float_rn(half_steps));
  const float b = __fmaf_rn(a, middle, __fmul_rn(args.scale2, centre));
  const float step = __fmul_rn(a, float{kMassSteps}), origin = rintf(__fmul_rn(step, middle));
  const float offset = __fmaf_rn(origin, -1.0f / kMassSteps, b);
  const bool usable = not_finite == 0 && isfinite(a) && isfinite(b) &&
                      fabsf(origin) <= kMassOriginMost && fabsf(offset) <= kMassOffsetMost;
  float delta = 0;
  if (i == 0 && args.tail_masses != nullptr && usable) {
#pragma unroll 16
    for (int32_t row = 0; row < of_head.delta_rows; ++row) {
      delta = __fmaf_rn(deltas[row], deltas[row], delta);
    }
  }
  // Masses of anchors need the kernels ahead, and so does all that is written.
  WaitForEarlier();
  if (args.tail_masses != nullptr && i < kTransformCells) {
    args.tail_masses[at * kTransformCells + i] = 0;
  }
  PreparedQuery& to =
      args.prepared[(int64_t{blockIdx.y} * args.kv_heads + kv_head) * args.group + g];
  if (i < 4 * kTransformQuadsMax) {
    reinterpret_cast<int8_t*>(to.coef)[i] = static_cast<int8_t>(usable ? coef : 0);
  }
  if (i != 0) return;
  const AnchorMasses& anchors = args.anchors;
  to.a = usable ? a : 0;
  to.b = usable ? b : 0;
  to.step = usable ? step : 0;
  to.origin = usable ? origin : 0;
  to.offset = usable ? offset : 0;
  if (anchors.masses != nullptr) {
    const float mass =
        anchors.states != nullptr ? MassOf(anchors.states, at, d) : anchors.masses[at];
    if (anchors.states != nullptr) anchors.made[at] = mass;
    to.anchors = AnchorsOf(mass, to.offset);
  }
  if (args.tail_masses != nullptr) args.tail_deltas[at] = delta;
  if (query.mid.first < query.mid.last || args.chosen_counts == nullptr) return;
  // No block scans: what the last of them would leave.
  if (args.tail_masses != nullptr) args.tail_references[at] = 0;
  if (g == 0) args.chosen_counts[int64_t{blockIdx.y} * args.kv_heads + kv_head] = 0;
}

// Some blocks a row, a thread a token that was read. Masses are added up in shared memory first: what was read lies in few
// cells, and additions to one address of global memory wait for each other (24 x 32K, 512 tokens a row, on an H200: 34 us
// for 38 of a layer). Fields of the code come from shared memory, one latency for all of them.
__global__ void __launch_bounds__(kTakeThreads)
    TakeFromTailKernel(const __grid_constant__ Args args, const Selection read) {
  __shared__ uint4 fields[kTransformFieldsMax];  // rotate, mask, quad
  __shared__ int32_t word_fields[kTransformWordsMax + 1], cell_bits[8];
  __shared__ uint32_t coefs[kTransformQuadsMax][kTransformGroupMax];
  __shared__ Weighing heads[kTransformGroupMax];
  // [group][kTransformCells]: as in FusedShared, the lower 15 bits of masses, then what is above them
  extern __shared__ uint32_t sums[];
  LetNextStart();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t kv_head = row % args.kv_heads, group = args.group;
  const DeviceTransformHead& of_head = args.transform.heads[kv_head];
  const int32_t words = args.transform.bits / 32, num_cell_bits = of_head.num_cell_bits;
  uint32_t* const lower = sums;
  uint32_t* const upper = sums + group * kTransformCells;
  for (int32_t i = threadIdx.x; i < 2 * group * kTransformCells; i += kTakeThreads) sums[i] = 0;
  if (threadIdx.x < kTransformFieldsMax) {
    const DeviceTransformHead::Field& field = of_head.fields[threadIdx.x];
    fields[threadIdx.x] = make_uint4(field.rotate, field.mask, field.quad, 0);
  }
  if (threadIdx.x <= kTransformWordsMax)
    word_fields[threadIdx.x] = of_head.word_fields[threadIdx.x];
  if (threadIdx.x < 8) cell_bits[threadIdx.x] = of_head.cell_bits[threadIdx.x];
  WaitForEarlier();
  const DeviceQuery query = args.queries[row / args.kv_heads];
  const int32_t count = read.counts[row];
  const int32_t step = static_cast<int32_t>(gridDim.y) * kTakeThreads;
  int32_t j = static_cast<int32_t>(blockIdx.y) * kTakeThreads + threadIdx.x;
  const uint32_t* code = nullptr;  // the token's
  uint32_t ahead[kTransformWordsMax] = {};
  const auto load = [&](int32_t index) {
    const int32_t token = read.tokens[row * read.capacity + index];
    const int32_t block = args.block_tokens.Divide(token);
    const int32_t at = token - block * args.block_tokens.divisor();
    code = args.codes + query.block_table[block] * args.block_words + kv_head * args.head_words +
           int64_t{at / kCodeTileTokens} * kCodeTileTokens * words + at % kCodeTileTokens;
#pragma unroll
    for (int w = 0; w < kTransformWordsMax; ++w) {
      if (w < words) ahead[w] = __ldg(code + w * kCodeTileTokens);
    }
  };
  if (j < count) load(j);
  const PreparedQuery* prepared = args.prepared + int64_t{row} * group;
  const int64_t first_head = int64_t{row} / args.kv_heads * args.kv_heads * group + kv_head * group;
  for (int32_t i = threadIdx.x; i < of_head.quads * group; i += kTakeThreads) {
    coefs[i / group][i % group] = prepared[i % group].coef[i / group];
  }
  if (threadIdx.x < group) {
    const PreparedQuery& of_query = prepared[threadIdx.x];
    const float reference = args.tail_references[first_head + threadIdx.x];
    heads[threadIdx.x] = {of_query.step, __fadd_rn(of_query.origin, kIntegerFloat), 0,
                          StepsOfReference(reference, of_query.offset), 0};
  }
  __syncthreads();
  for (; j < count; j += step) {
    int32_t dots[kTransformGroupMax] = {};
#pragma unroll
    for (int w = 0; w < kTransformWordsMax; ++w) {
      if (w >= words) break;
      for (int32_t f = word_fields[w]; f < word_fields[w + 1]; ++f) {
        const uint4 field = fields[f];
        const uint32_t bytes = __funnelshift_r(ahead[w], ahead[w], field.x) & field.y;
#pragma unroll
        for (int g = 0; g < kTransformGroupMax; ++g) {
          if (g >= group) break;
          asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(dots[g]) : "r"(bytes), "r"(coefs[field.z][g]));
        }
      }
    }
    uint32_t cell = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= num_cell_bits) break;
      const int32_t bit = cell_bits[i];
      cell = cell << 1 | (__ldg(code + bit / 32 * kCodeTileTokens) >> bit % 32 & 1);
    }
#pragma unroll
    for (int g = 0; g < kTransformGroupMax; ++g) {
      if (g >= group) break;
      const auto steps = static_cast<int32_t>(StepBitsOf(FloatOf(dots[g] + kIntegerBits),
                                                         heads[g].step, heads[g].origin)) -
                         kIntegerBits;
      // The reference is the caller's: no larger than steps only if they agree.
      const int32_t below = min(steps - heads[g].reference, 0);
      const float power =
          __uint_as_float(static_cast<uint32_t>(max(below + kMassPowerTop, kMassPowerLeast)) << 16);
      const uint32_t mass = __float2uint_rz(__fmul_rn(power, 0x1p30f));
      AddUnlessZero(&lower[g * kTransformCells + cell], mass & 0x7fffu);
      AddUnlessZero(&upper[g * kTransformCells + cell], mass >> 15);
    }
    if (j + step < count) load(j + step);
  }
  __syncthreads();
  auto* masses =
      reinterpret_cast<unsigned long long*>(args.tail_masses) + first_head * kTransformCells;
  for (int32_t i = threadIdx.x; i < group * kTransformCells; i += kTakeThreads) {
    const unsigned long long mass = lower[i] + (static_cast<unsigned long long>(upper[i]) << 15);
    // Two's complement: adding the negative subtracts.
    if (mass != 0) atomicAdd(&masses[i], 0ull - mass);
  }
}

// ---- launches ----

int32_t PaddedGroup(int32_t group) {
  int32_t padded = 1;
  while (padded < group) padded *= 2;
  return padded;
}
// Steps of a block of the fused kernel, which lie in shared memory: 64 sums of a lane at most.
constexpr int32_t MostTiles(int32_t group) { return group <= 4 ? 32 : 128 / group; }

struct Plan {
  int32_t rows, pieces, chunks, group;
  int32_t tiles;  // of a warp of the fused kernel; 0: in passes
  int64_t row_tokens;
  size_t zeroed_bytes;  // from the beginning
  size_t coarse, fine, tickets, prepared, records, counts, places, cuts, steps, keys, cells,
      size_bytes;
};

// Calls `call` with a code's slots, heads and tiles as template arguments.
template <int kSlots, int kGroup, typename Call>
auto ForTiles(int32_t tiles, const Call& call) {
  constexpr int kMost = MostTiles(kGroup);
  switch (tiles) {
    case 4:
      return call.template operator()<kSlots, kGroup, 4>();
    case 8:
      return call.template operator()<kSlots, kGroup, 8>();
    case 16:
      return call.template operator()<kSlots, kGroup, std::min(16, kMost)>();
    default:
      return call.template operator()<kSlots, kGroup, std::min(32, kMost)>();
  }
}
template <int kGroup, typename Call>
auto ForSlots(int32_t bits, int32_t tiles, const Call& call) {
  return bits <= 128 ? ForTiles<1, kGroup>(tiles, call) : ForTiles<2, kGroup>(tiles, call);
}
template <typename Call>
auto ForFused(int32_t bits, int32_t group, int32_t tiles, const Call& call) {
  switch (group) {
    case 2:
      return ForSlots<2>(bits, tiles, call);
    case 4:
      return ForSlots<4>(bits, tiles, call);
    case 8:
      return ForSlots<8>(bits, tiles, call);
    default:
      return ForSlots<16>(bits, tiles, call);
  }
}

// Blocks of the one launch that run at once on a multiprocessor of this device. 0: it has no room for one.
int64_t FusedBlocksAtOnce(int32_t bits, int32_t group, int32_t tiles) {
  const size_t most_bytes = CurrentDevice().block_shared_bytes;
  return ForFused(bits, group, tiles, [&]<int kSlots, int kGroup, int kTiles>() -> int64_t {
    constexpr size_t kBytes = sizeof(typename WholeFused<kSlots, kGroup, kTiles>::Shared);
    int blocks = 0;
    if (kBytes > most_bytes || BlocksPerMultiprocessor(FusedKernel<kSlots, kGroup, kTiles>,
                                                       kThreads, kBytes, &blocks) != cudaSuccess) {
      return 0;
    }
    return std::min(blocks, kFusedBlocksPerMultiprocessor);
  });
}

// Chunks, in one launch where there is room for the blocks of all rows; the shortest with which they have it.
void PlanChunks(const MassSelectShape& shape, int64_t tokens, Plan& plan) {
  plan.group = std::max(2, PaddedGroup(shape.group));
  for (const int32_t tiles : kFusedTiles) {
    if (!shape.fused || tiles > MostTiles(plan.group)) break;
    const int64_t chunks = CeilDiv(tokens, int64_t{kWarps} * kCodeTileTokens * tiles);
    const int64_t at_once = FusedBlocksAtOnce(shape.layout.bits, plan.group, tiles);
    // Blocks of rows of one block meet nobody: there may be any number of them.
    if (at_once == 0 ||
        (chunks > 1 && chunks * plan.rows > CurrentDevice().multiprocessors * at_once)) {
      continue;
    }
    plan.tiles = tiles;
    plan.chunks = static_cast<int32_t>(chunks);
    return;
  }
  plan.tiles = 0;
  plan.chunks = static_cast<int32_t>(CeilDiv(tokens, kChunkTokens));
  plan.row_tokens = int64_t{plan.chunks} * kChunkTokens;
}

Plan MakePlan(const MassSelectShape& shape) {
  Plan plan{};
  plan.rows = shape.num_queries * shape.layout.kv_heads;
  // A mid may begin inside a piece.
  const int64_t tokens = int64_t{shape.max_mid_tokens} + kMassPieceTokens - 1;
  plan.pieces = static_cast<int32_t>(CeilDiv(tokens, kMassPieceTokens));
  PlanChunks(shape, tokens, plan);
  const auto rows = static_cast<size_t>(plan.rows);
  const auto group = static_cast<size_t>(plan.group);
  size_t end = 0;
  const auto take = [&end](size_t bytes) {
    const size_t begin = end;
    end = AlignUp(end + bytes, 256);
    return begin;
  };
  plan.coarse = take(rows * kCoarseBins * 4);
  plan.fine = take(rows * kFineBins * 4);
  plan.tickets = take(rows * 4 * 4);
  plan.zeroed_bytes = end;
  plan.prepared = take(rows * shape.group * sizeof(PreparedQuery));
  plan.records = take(rows * plan.pieces * group * sizeof(PieceRecord));
  plan.counts = take(rows * plan.chunks * kFineBins * 4);
  if (plan.tiles == 0) {
    plan.places = take(rows * plan.chunks * 2 * 4);
    plan.cuts = take(rows * sizeof(MassCut));
    plan.steps = take(rows * plan.row_tokens * group * 2);
    plan.keys = take(rows * plan.row_tokens * 2);
    plan.cells = take(rows * plan.row_tokens);
  }
  plan.size_bytes = end;
  return plan;
}

Args MakeArgs(const MassSelectShape& shape, const Plan& plan, const DeviceTransform& transform,
              const float* q, int64_t q_stride, const DeviceQuery* queries,
              const AnchorMasses& anchors, float scale, const void* codes, const Selection& chosen,
              const TailMasses& tail, const MassScales& scales, void* workspace) {
  auto* const memory = static_cast<std::byte*>(workspace);
  return {transform,
          q,
          q_stride,
          queries,
          anchors,
          static_cast<const uint32_t*>(codes),
          static_cast<int64_t>(shape.layout.BlockBytes() / 4),
          static_cast<int64_t>(shape.layout.HeadBytes() / 4),
          FastDivider(shape.layout.block_tokens),
          plan.row_tokens,
          plan.pieces,
          plan.chunks,
          shape.layout.kv_heads,
          shape.group,
          scale * kTransformLog2E,
          tail.of_all ? 1 : 0,
          anchors.just_attended ? 1 : 0,
          reinterpret_cast<PreparedQuery*>(memory + plan.prepared),
          reinterpret_cast<PieceRecord*>(memory + plan.records),
          reinterpret_cast<uint32_t*>(memory + plan.steps),
          reinterpret_cast<uint16_t*>(memory + plan.keys),
          reinterpret_cast<uint8_t*>(memory + plan.cells),
          reinterpret_cast<uint32_t*>(memory + plan.coarse),
          reinterpret_cast<uint32_t*>(memory + plan.fine),
          reinterpret_cast<uint32_t*>(memory + plan.counts),
          reinterpret_cast<uint32_t*>(memory + plan.places),
          reinterpret_cast<MassCut*>(memory + plan.cuts),
          reinterpret_cast<uint32_t*>(memory + plan.tickets),
          tail.masses,
          tail.references,
          tail.deltas,
          scales,
          chosen.counts,
          chosen.tokens,
          chosen.capacity};
}

// A block for each chunk of a row.
template <typename Kernel>
cudaError_t LaunchOver(Kernel kernel, const Plan& plan, const Args& args, Stream stream) {
  const dim3 grid(static_cast<unsigned>(plan.chunks), static_cast<unsigned>(plan.rows));
  return Launch(kernel, grid, kThreads, 0, stream, false, args);
}

// As many blocks as run at once share out the chunks of all rows.
template <int kSlots, int kGroup>
cudaError_t LaunchPieces(const Plan& plan, const Args& args, Stream stream) {
  using Pieces = FusedShape<kSlots, kGroup, kPieceTiles<kGroup>>;
  static_assert(kChunkTokens % Pieces::kChunkTokens == 0);
  int at_once = 0;
  if (const cudaError_t error =
          BlocksPerMultiprocessor(PiecesKernel<kSlots, kGroup>, kThreads, 0, &at_once);
      error != cudaSuccess) {
    return error;
  }
  const int64_t blocks = int64_t{at_once} * CurrentDevice().multiprocessors / plan.rows;
  const int64_t chunks = plan.row_tokens / Pieces::kChunkTokens;
  const auto of_row = static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, chunks));
  return Launch(PiecesKernel<kSlots, kGroup>, dim3(of_row, static_cast<unsigned>(plan.rows)),
                kThreads, 0, stream, false, args);
}

// Takes the selection's tokens; few rows have more blocks each.
cudaError_t LaunchTake(int32_t rows, const Args& args, const Selection& read, Stream stream) {
  const int64_t capacity = std::max(read.capacity, 1);
  const int64_t spare = std::max(CeilDiv(2 * int64_t{CurrentDevice().multiprocessors}, rows),
                                 CeilDiv(capacity, kTakeTokensMax));
  const auto blocks = static_cast<unsigned>(std::min(spare, CeilDiv(capacity, kTakeThreads)));
  const size_t shared_bytes = size_t{2} * args.group * kTransformCells * sizeof(uint32_t);
  return Launch(TakeFromTailKernel, dim3(static_cast<unsigned>(rows), blocks), kTakeThreads,
                shared_bytes, stream, false, args, read);
}

template <int kGroup>
cudaError_t LaunchPasses(const Plan& plan, const Args& args, Stream stream) {
  const bool one_slot = args.transform.bits <= 128, tail = args.tail_masses != nullptr;
  // None after one that failed: it would go by what the last call left.
  cudaError_t error = one_slot ? LaunchPieces<1, kGroup>(plan, args, stream)
                               : LaunchPieces<2, kGroup>(plan, args, stream);
  if (error == cudaSuccess) error = LaunchOver(MassesKernel<kGroup>, plan, args, stream);
  if (error == cudaSuccess) error = LaunchOver(CountKernel, plan, args, stream);
  if (error != cudaSuccess) return error;
  return tail ? LaunchOver(CompactKernel<kGroup>, plan, args, stream)
              : LaunchOver(CompactKernel<0>, plan, args, stream);
}

cudaError_t LaunchFused(const Plan& plan, const Args& args, Stream stream) {
  const dim3 grid(static_cast<unsigned>(plan.chunks), static_cast<unsigned>(plan.rows));
  return ForFused(args.transform.bits, plan.group, plan.tiles,
                  [&]<int kSlots, int kGroup, int kTiles>() {
                    return Launch(FusedKernel<kSlots, kGroup, kTiles>, grid, kThreads,
                                  sizeof(typename WholeFused<kSlots, kGroup, kTiles>::Shared),
                                  stream, /*cooperative=*/plan.chunks > 1, args);
                  });
}

bool IsRefused(const MassSelectShape& shape, const DeviceTransform& transform) {
  return shape.num_queries < 0 || shape.group < 1 || shape.group > kTransformGroupMax ||
         shape.layout.kv_heads != transform.kv_heads || shape.layout.bits != transform.bits ||
         shape.layout.block_tokens < kCodeTileTokens ||
         shape.layout.block_tokens % kCodeTileTokens != 0 || shape.max_mid_tokens < 0 ||
         int64_t{shape.num_queries} * shape.layout.kv_heads > 65535;
}

cudaError_t LaunchPrepare(const MassSelectShape& shape, const Args& args, Stream stream) {
  const dim3 grid(static_cast<unsigned>(shape.layout.kv_heads * shape.group),
                  static_cast<unsigned>(shape.num_queries));
  const bool one_each = int64_t{grid.x} * grid.y <= CurrentDevice().multiprocessors;
  return one_each
             ? Launch(PrepareKernel<kPrepareAhead>, grid, kPrepareThreads, 0, stream, false, args)
             : Launch(PrepareKernel<0>, grid, kPrepareThreads, 0, stream, false, args);
}

}  // namespace

namespace masses {

cudaError_t PrepareQueries(const MassSelectShape& shape, const DeviceTransform& transform,
                           const float* q, int64_t q_stride, const DeviceQuery* queries,
                           float scale, PreparedQuery* prepared, Stream stream) {
  if (IsRefused(shape, transform)) return cudaErrorInvalidValue;
  Args args = MakeArgs(shape, Plan{}, transform, q, q_stride, queries, {}, scale, nullptr, {}, {},
                       {}, nullptr);
  args.prepared = prepared;
  return LaunchPrepare(shape, args, stream);
}

}  // namespace masses

size_t TakeFromTailWorkspaceBytes(const MassSelectShape& shape) {
  return size_t{1} * shape.num_queries * shape.layout.kv_heads * shape.group *
         sizeof(PreparedQuery);
}

cudaError_t TakeFromTail(const MassSelectShape& shape, const DeviceTransform& transform,
                         const float* q, int64_t q_stride, const DeviceQuery* queries, float scale,
                         const void* codes, const Selection& read, const TailMasses& tail,
                         void* workspace, Stream stream) {
  if (IsRefused(shape, transform) || tail.masses == nullptr) return cudaErrorInvalidValue;
  const int32_t rows = shape.num_queries * shape.layout.kv_heads;
  if (rows == 0) return cudaSuccess;
  // Prepare makes nothing but coefficients: the tail is there, and what was selected.
  Args args = MakeArgs(shape, Plan{}, transform, q, q_stride, queries, {}, scale, codes, {}, {}, {},
                       workspace);
  args.prepared = static_cast<PreparedQuery*>(workspace);
  if (const cudaError_t error = LaunchPrepare(shape, args, stream); error != cudaSuccess) {
    return error;
  }
  args.tail_masses = tail.masses;
  args.tail_references = tail.references;
  return LaunchTake(rows, args, read, stream);
}

size_t MassSelectWorkspaceBytes(const MassSelectShape& shape) { return MakePlan(shape).size_bytes; }
ZeroedPart MassSelectZeroedPart(const MassSelectShape& shape) {
  return {0, MakePlan(shape).zeroed_bytes};
}

cudaError_t SelectByMass(const MassSelectShape& shape, const DeviceTransform& transform,
                         const float* q, int64_t q_stride, const DeviceQuery* queries,
                         const AnchorMasses& anchors, float scale, const void* codes,
                         const Selection& chosen, const TailMasses& tail, void* workspace,
                         Stream stream, const MassScales& scales) {
  if (IsRefused(shape, transform)) return cudaErrorInvalidValue;
  const Plan plan = MakePlan(shape);
  if (plan.rows == 0) return cudaSuccess;
  const Args args = MakeArgs(shape, plan, transform, q, q_stride, queries, anchors, scale, codes,
                             chosen, tail, scales, workspace);
  if (const cudaError_t error = LaunchPrepare(shape, args, stream); error != cudaSuccess) {
    return error;
  }
  if (plan.tiles != 0) return LaunchFused(plan, args, stream);
  switch (plan.group) {
    case 2:
      return LaunchPasses<2>(plan, args, stream);
    case 4:
      return LaunchPasses<4>(plan, args, stream);
    case 8:
      return LaunchPasses<8>(plan, args, stream);
    default:
      return LaunchPasses<16>(plan, args, stream);
  }
}

}  // namespace winnow::kernels::cuda
