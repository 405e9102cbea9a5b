// The blocks of selection by estimated mass, and selection in one launch whose blocks meet (transform_select.cu says when):
// steps and keys stay in shared memory, of which a block takes 38 KiB (G = 2) to 77 (G = 16).
//
// Loops over steps stay loops. Unrolled, with dots in registers, one launch was 12,300 instructions (197 KB at 192 bits and
// 32 tiles), which each block went through once. A layer's other kernels and its weights drive them out of all caches
// meanwhile: beside each other on an H200, 128K, they took 45 us, in a decode step 57 to 74. As loops they were 5,000, and a
// step of 30 such layers took 0.4 to 0.6 ms less. Alone they were 3 us slower. Tried and lost: loops unrolled twice
// and four times; blocks of half the tokens, four to a multiprocessor (45 in place of 42 us alone); all tokens' masses added
// up while others come to a meeting, and those of the selected subtracted in the end (+ 2.5 us).
//
// Mapping. A block of 256 threads has a chunk of a row, a warp 16 * kTiles tokens of it, which lie in one piece. Dots are
// int8 matrix products: A is 16 tokens by 32 unpacked dimensions, B those dimensions' coefficients by 8 query heads. What
// stands at which place of the sum is free, so a *class* of lanes (lane % 4, whose registers of A hold the same columns)
// unpacks the fields of its own word, and reads no other: word `class`, and word 4 + class of codes of more than 128 bits;
// of two words of a slot, two classes share one and take every second field. A's rows r and r + 8 are tokens 2r and 2r + 1,
// so that a lane's two words lie side by side. Cells are products of the same kind. Tried and lost: every second rotation by a
// multiplication, which spares the unit of shifts (256 bits at 128K on an H200 54 us for 48).
//
// A product has 8 columns. With fewer heads (kGroup) it takes 8 / kGroup tiles: the coefficients stand at the columns of
// the tile's *part* and zeros elsewhere. A lane then has for each product two tokens and two heads; with 16 heads a tile
// takes two products. Accumulators begin with the bits of kIntegerFloat, so that they are floats at once.
//
// The row's blocks meet three times: when every piece has its peak and sum (each block then makes R and inv for itself),
// when the row's keys are counted by their upper 9 bits, and when those in the cut's bin are, by their lower 7. All blocks
// run at once, so none waits for one that has not begun.
#ifndef WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_FUSED_CUH_
#define WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_FUSED_CUH_

#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/read_once.cuh"
#include "kernels/cuda/transform_select_parts.cuh"

namespace winnow::kernels::cuda::masses {

inline constexpr int kFusedBlocksPerMultiprocessor = 2;
inline constexpr int kTilesAtOnce = 4;  // of a warp, unpacked for one reading of the fields
inline constexpr int kMeetings = 3;

template <int kSlots, int kGroup, int kTiles>
struct FusedShape {
  static constexpr int kColumnHalves = kGroup > 8 ? 2 : 1;    // products of a tile
  static constexpr int kParts = kGroup > 8 ? 1 : 8 / kGroup;  // tiles of a product
  static constexpr int kHolders =
      kGroup > 8 ? 4 : kGroup / 2;                // lanes that hold the heads of a token
  static constexpr int kUnits = kTiles / kParts;  // a lane has two tokens of each
  static constexpr int kProducts = kUnits * kColumnHalves;
  static constexpr int32_t kWarpTokens = 16 * kTiles;
  static constexpr int32_t kChunkTokens = kWarps * kWarpTokens;
  static constexpr int32_t kPieces = kChunkTokens / kMassPieceTokens;
  static constexpr int32_t kPieceWarps = kMassPieceTokens / kWarpTokens;
  static constexpr int kMine =
      kChunkTokens / kThreads;  // tokens of a thread, side by side, once keys are made
  static_assert(kTiles % kParts == 0 && kTiles % kTilesAtOnce == 0 && kTilesAtOnce % kParts == 0);
  static_assert(kWarpTokens <= kMassPieceTokens && 2 * kUnits <= 32);
};

template <int kSlots, int kGroup, int kTiles>
struct PiecesShared {
  using Shape = FusedShape<kSlots, kGroup, kTiles>;
  uint4 fields[kSlots][kTransformFusedSteps][4];  // by class: rotate and mask of two fields
  uint2 coefs[kSlots][kTransformFusedSteps][Shape::kColumnHalves][4][8];
  int32_t steps[kSlots];
  uint4 cell_fields[kSlots][kTransformCellSteps][4];
  uint2 cell_weights[kSlots][kTransformCellSteps][4];
  int32_t cell_steps[kSlots];
  int32_t warp_peaks[kWarps][kGroup];
  long long warp_sums[kWarps][kGroup];
  int32_t warp_references[kWarps][kGroup];
  Weighing heads[kGroup];
  alignas(16) uint16_t cells[Shape::kChunkTokens / 2];  // two tokens each
  uint32_t is_last;
  uint2 steps_of[Shape::kProducts][kThreads];  // each thread's own
};

// Shared memory of a block that has all of the selection.
template <int kSlots, int kGroup, int kTiles>
struct FusedShared : PiecesShared<kSlots, kGroup, kTiles> {
  using Shape = FusedShape<kSlots, kGroup, kTiles>;
  alignas(16) uint32_t keys[Shape::kChunkTokens / 2];
  uint16_t is_left[kThreads];    // bits: of a thread's tokens those inside mid and not selected
  uint32_t counts[kCoarseBins];  // of the chunk, then of the row
  // 2^30 times the mass: its lower 15 bits, and what is above them. Cells side by side and in an order of the head's own
  // (PlaceOf), because a warp adds to 16 tokens' cells at a time.
  uint32_t masses[kGroup][2][kTransformCells];
  uint32_t scan[kWarps];
  uint32_t places[kWarps][2];
  uint32_t above;
  uint2 found;
};

// All `blocks` of a row come here; what they wrote before can then be read.
__device__ __forceinline__ void Meet(uint32_t* meeting, uint32_t blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(meeting, 1u);
    uint32_t seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(meeting) : "memory");
    } while (seen < blocks);
    __threadfence();
  }
  __syncthreads();
}

// kAll: the block has all of the selection of one chunk. Else it has peaks and sums of as many chunks as there are for it,
// one after the other.
template <int kSlots, int kGroup, int kTiles, bool kAll>
class Fused {
 public:
  using Shape = FusedShape<kSlots, kGroup, kTiles>;
  using Shared = std::conditional_t<kAll, FusedShared<kSlots, kGroup, kTiles>,
                                    PiecesShared<kSlots, kGroup, kTiles>>;

  __device__ Fused(const Args& args, Shared& shared)
      : args_(args),
        shared_(shared),
        row_(static_cast<int32_t>(blockIdx.y)),
        kv_head_(row_ % args.kv_heads),
        query_(args.queries[row_ / args.kv_heads]),
        base_(BaseOf(query_)),
        begin_(base_ + static_cast<int32_t>(blockIdx.x) * Shape::kChunkTokens),
        blocks_(min(gridDim.x,
                    static_cast<uint32_t>((query_.mid.last - base_ + Shape::kChunkTokens - 1) /
                                          Shape::kChunkTokens))),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        class_(lane_ % 4),
        part_(2 * class_ / kGroup % Shape::kParts),
        tile_bytes_(static_cast<uint32_t>(args.transform.bits / 32 * kCodeTileTokens * 4)) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      words_[s] = args.codes + kv_head_ * args.head_words + WordOf(s, class_) * kCodeTileTokens +
                  lane_ / 4 * 2;
  }

  // All of it, in one launch.
  __device__ __forceinline__ void Run() {
    if (!Begin()) return;
    Words words;
    const uint32_t tiles = TilesAt(begin_);
    LoadWords(tiles, 0, words);
    MakeSteps(args_.tail_masses != nullptr, words, tiles, /*more=*/false, 0);
    LeavePieces<false>();  // code for both would take its registers
    Meet(&Meetings()[0], blocks_);
    FinishRow();
    if (blockIdx.x == 0) LeaveReferences();
    MakeKeys();
    __syncthreads();
    CountCoarse();
    Meet(&Meetings()[1], blocks_);
    const uint32_t k = FindCoarse();
    CountFine();
    Meet(&Meetings()[2], blocks_);
    if (k > 0) FindFine(k);
    Select();
    if (args_.tail_masses != nullptr) LeaveTail();
    if (IsLast(&args_.tickets[4 * row_ + 3], blocks_, &shared_.is_last)) MakeReadyForNextCall();
  }

  // The first of the passes: steps and cells of tokens, peaks and sums of pieces; the row's last block leaves R and inv.
  __device__ __forceinline__ void RunPieces() {
    if (!Begin()) return;
    const bool tail = args_.tail_masses != nullptr;
    const int32_t stride = static_cast<int32_t>(gridDim.x) * Shape::kChunkTokens;
    Words words;
    uint32_t tiles = TilesAt(begin_);
    LoadWords(tiles, 0, words);
#pragma unroll 1
    for (;; begin_ += stride) {
      const bool more = begin_ + stride < query_.mid.last;
      const uint32_t next_tiles = more ? TilesAt(begin_ + stride) : 0;
      MakeSteps(tail, words, tiles, more, next_tiles);
      LeaveSteps();
      if (IsWhole()) {
        LeavePieces<true>();
      } else {
        LeavePieces<false>();
      }
      if (tail) LeaveCells();
      if (!more) break;
      tiles = next_tiles;
    }
    if (!IsLast(&args_.tickets[4 * row_], blocks_, &shared_.is_last)) return;
    FinishRow();
    LeaveReferences();
    if (threadIdx.x < args_.group) {
      PreparedQuery& to = args_.prepared[int64_t{row_} * args_.group + threadIdx.x];
      to.reference = shared_.heads[threadIdx.x].reference;
      to.inverse = shared_.heads[threadIdx.x].inverse;
    }
  }

 private:
  // False: the block has no tokens.
  __device__ __forceinline__ bool Begin() {
    const bool has_tokens = begin_ < query_.mid.last && query_.mid.first < query_.mid.last;
    uint2 quads[kCoefsOfThread];
    if (has_tokens) PrepareTables(quads);
    WaitForEarlier();
    if (!has_tokens) return false;
    PrepareQueries(quads);
    __syncthreads();
    return true;
  }

  // Which coefficient a thread brings to shared memory.
  static constexpr int32_t kCoefs = kSlots * kTransformFusedSteps * Shape::kColumnHalves * 4 * 8;
  static constexpr int kCoefsOfThread = (kCoefs + kThreads - 1) / kThreads;
  struct CoefPlace {
    __device__ __forceinline__ explicit CoefPlace(int32_t i)
        : column(i % 8),
          of_class(i / 8 % 4),
          columns(i / 32 % Shape::kColumnHalves),
          step(i / 32 / Shape::kColumnHalves % kTransformFusedSteps),
          slot(i / 32 / Shape::kColumnHalves / kTransformFusedSteps),
          g(8 * columns + column % (kGroup > 8 ? 8 : kGroup)) {}
    int32_t column, of_class, columns, step, slot, g;
  };

  // Meetings take turns with the tickets of the other way: both are zero between calls.
  __device__ uint32_t* Meetings() const { return &args_.tickets[4 * row_]; }

  __device__ int32_t WordOf(int32_t slot, int32_t of_class) const {
    const bool is_shared = args_.transform.bits / 32 - 4 * slot == 2;
    return 4 * slot + (is_shared ? of_class % 2 : of_class);
  }
  __device__ bool IsWhole() const {
    return begin_ >= query_.mid.first && begin_ + Shape::kChunkTokens <= query_.mid.last;
  }
  // The lane's token `half` of a unit.
  __device__ int32_t TokenOf(int unit, int half) const {
    return begin_ + warp_ * Shape::kWarpTokens + (unit * Shape::kParts + part_) * kCodeTileTokens +
           lane_ / 4 * 2 + half;
  }
  __device__ int32_t HeadOf(int columns, int j) const {
    return 8 * columns + (2 * class_ + j) % (kGroup > 8 ? 8 : kGroup);
  }

  // Prepares all that no kernel writes: fields, bits of cells. Leaves the thread's quads in `quads`.
  __device__ __forceinline__ void PrepareTables(uint2 (&quads)[kCoefsOfThread]) {
    const DeviceTransformHead& of_head = args_.transform.heads[kv_head_];
    const bool tail = args_.tail_masses != nullptr;
    for (int32_t i = threadIdx.x; i < kSlots * kTransformFusedSteps * 4; i += kThreads) {
      const int32_t of_class = i % 4, step = i / 4 % kTransformFusedSteps,
                    slot = i / 4 / kTransformFusedSteps;
      const DeviceTransformHead::Field(&pair)[2] = of_head.classes[slot][of_class].fields[step];
      shared_.fields[slot][step][of_class] =
          make_uint4(pair[0].rotate, pair[0].mask, pair[1].rotate, pair[1].mask);
    }
#pragma unroll
    for (int n = 0; n < kCoefsOfThread; ++n) {
      const CoefPlace place(static_cast<int32_t>(threadIdx.x) + n * kThreads);
      if (place.slot >= kSlots) break;
      const DeviceTransformHead::Field(&pair)[2] =
          of_head.classes[place.slot][place.of_class].fields[place.step];
      quads[n] = make_uint2(pair[0].quad, pair[1].quad);
    }
    if (threadIdx.x < kSlots) {
      shared_.steps[threadIdx.x] = of_head.steps[threadIdx.x];
      shared_.cell_steps[threadIdx.x] = of_head.cell_steps[threadIdx.x];
    }
    if (threadIdx.x >= 32 && threadIdx.x < 32 + kSlots * kTransformCellSteps * 4) {
      const int32_t i = threadIdx.x - 32, of_class = i % 4, step = i / 4 % kTransformCellSteps,
                    slot = i / 4 / kTransformCellSteps;
      const DeviceTransformHead::CellField(&pair)[2] =
          of_head.classes[slot][of_class].cell_fields[step];
      shared_.cell_fields[slot][step][of_class] =
          make_uint4(pair[0].rotate, pair[0].mask, pair[1].rotate, pair[1].mask);
      shared_.cell_weights[slot][step][of_class] = make_uint2(pair[0].weights, pair[1].weights);
    }
    if constexpr (kAll) {
      for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) shared_.counts[bin] = 0;
      if (threadIdx.x == 0) shared_.above = 0;
      for (int32_t i = threadIdx.x; i < kGroup * kTransformCells * 2 && tail; i += kThreads)
        (&shared_.masses[0][0][0])[i] = 0;
    }
  }
  // Takes the queries' coefficients, which the kernel before made.
  __device__ __forceinline__ void PrepareQueries(const uint2 (&quads)[kCoefsOfThread]) {
    const PreparedQuery* prepared = args_.prepared + int64_t{row_} * args_.group;
#pragma unroll
    for (int n = 0; n < kCoefsOfThread; ++n) {
      const CoefPlace place(static_cast<int32_t>(threadIdx.x) + n * kThreads);
      if (place.slot >= kSlots) break;
      uint2 both = {};
      if (place.g < args_.group)
        both = make_uint2(prepared[place.g].coef[quads[n].x], prepared[place.g].coef[quads[n].y]);
      shared_.coefs[place.slot][place.step][place.columns][place.of_class][place.column] = both;
    }
    if (threadIdx.x >= kThreads - kGroup) {
      const int32_t g = threadIdx.x - (kThreads - kGroup);
      shared_.heads[g] = {};
      if (g < args_.group) {
        shared_.heads[g] = {prepared[g].step, prepared[g].origin, prepared[g].offset,
                            prepared[g].anchors, 0};
      }
    }
  }

  // Places of the warp's tiles, in tiles: lane t has that of tile t of the chunk at `begin`.
  __device__ __forceinline__ uint32_t TilesAt(int32_t begin) const {
    const int32_t words = args_.transform.bits / 32;
    const int32_t at = begin + warp_ * Shape::kWarpTokens + lane_ % kTiles * kCodeTileTokens;
    // Tiles past mid stand for the chunk's first, whose codes are read again and not used.
    const int32_t token = at < query_.mid.last ? at : begin;
    const int32_t block = args_.block_tokens.Divide(token);
    return static_cast<uint32_t>((query_.block_table[block] * args_.block_words +
                                  int64_t{token - block * args_.block_tokens.divisor()} * words) /
                                 (kCodeTileTokens * words));
  }
  // The lane's words of kTilesAtOnce tiles: two tokens each.
  struct Words {
    uint2 of[kTilesAtOnce][kSlots];
  };
  __device__ __forceinline__ void LoadWords(uint32_t tiles, int first_tile, Words& words) const {
#pragma unroll
    for (int t = 0; t < kTilesAtOnce; ++t) {
      const uint32_t tile = __shfl_sync(kFullMask, tiles, first_tile + t);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const auto* const from =
            reinterpret_cast<const uint8_t*>(words_[s]) + uint64_t{tile} * tile_bytes_;
        // Relaxed: a plain load the compiler moves to where the words are used, so that nothing flies ahead.
        asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                     : "=r"(words.of[t][s].x), "=r"(words.of[t][s].y)
                     : "l"(from), "l"(ReadOnce()));
      }
    }
  }

  // Adds to `sums` the products of two fields of the tiles' words, A, and `numbers` of each, B.
  __device__ __forceinline__ void MultiplyFields(const Words& words, int s, uint4 fields,
                                                 uint2 numbers, int32_t (*sums)[4],
                                                 int stride) const {
#pragma unroll
    for (int t = 0; t < kTilesAtOnce; ++t) {
      const uint2 pair = words.of[t][s];
      const uint32_t a[4] = {__funnelshift_r(pair.x, pair.x, fields.x) & fields.y,
                             __funnelshift_r(pair.y, pair.y, fields.x) & fields.y,
                             __funnelshift_r(pair.x, pair.x, fields.z) & fields.w,
                             __funnelshift_r(pair.y, pair.y, fields.z) & fields.w};
      // The tile's part of the columns.
      const bool mine = lane_ / 4 / (kGroup > 8 ? 8 : kGroup) == t % Shape::kParts;
      MultiplyAddUnsigned16x8x32(sums[t / Shape::kParts * stride], a, mine ? numbers.x : 0,
                                 mine ? numbers.y : 0);
    }
  }

  // Steps of product `p`: of row r, columns 2c and 2c + 1; of row r + 8, the same.
  __device__ __forceinline__ uint2 Steps(int p) const { return shared_.steps_of[p][threadIdx.x]; }
  __device__ __forceinline__ void KeepSteps(int p, uint2 steps) {
    shared_.steps_of[p][threadIdx.x] = steps;
  }
  static constexpr int kProductsAtOnce = kTilesAtOnce / Shape::kParts * Shape::kColumnHalves;

  // Makes those of a chunk whose first words are here; and leaves the first ones of the chunk of `next_tiles`, where there is more.
  __device__ __forceinline__ void MakeSteps(bool cells, Words& next, uint32_t tiles, bool more,
                                            uint32_t next_tiles) {
    float of_step[Shape::kColumnHalves][2], origins[Shape::kColumnHalves][2];
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        of_step[c][j] = shared_.heads[HeadOf(c, j)].step;
        origins[c][j] = __fadd_rn(shared_.heads[HeadOf(c, j)].origin, kIntegerFloat);
      }
    }
#pragma unroll 1
    for (int first = 0; first < kTiles; first += kTilesAtOnce) {
      const Words now = next;
      if (first + kTilesAtOnce < kTiles) {
        LoadWords(tiles, first + kTilesAtOnce, next);
      } else if (more) {
        LoadWords(next_tiles, 0, next);
      }
      if (cells) MakeCells(first, now);
      int32_t sums[kProductsAtOnce][4];
#pragma unroll
      for (int p = 0; p < kProductsAtOnce; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[p][i] = kIntegerBits;
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int32_t steps = shared_.steps[s];
        for (int32_t step = 0; step < steps; ++step) {
          const uint4 fields = shared_.fields[s][step][class_];
#pragma unroll
          for (int c = 0; c < Shape::kColumnHalves; ++c) {
            MultiplyFields(now, s, fields, shared_.coefs[s][step][c][class_][lane_ / 4], &sums[c],
                           Shape::kColumnHalves);
          }
        }
      }
#pragma unroll
      for (int p = 0; p < kProductsAtOnce; ++p) {
        const int c = p % Shape::kColumnHalves;
        uint32_t bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          bits[i] = StepBitsOf(FloatOf(sums[p][i]), of_step[c][i % 2], origins[c][i % 2]);
        KeepSteps(first / Shape::kParts * Shape::kColumnHalves + p,
                  make_uint2(Pack(bits[0], bits[1]), Pack(bits[2], bits[3])));
      }
    }
  }
  // A cell is a dot, too: of its bits and powers of two. All columns of the tile's part have it.
  __device__ __forceinline__ void MakeCells(int first, const Words& words) {
    int32_t cells[kTilesAtOnce / Shape::kParts][4] = {};
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int32_t steps = shared_.cell_steps[s];
      for (int32_t step = 0; step < steps; ++step) {
        MultiplyFields(words, s, shared_.cell_fields[s][step][class_],
                       shared_.cell_weights[s][step][class_], cells, 1);
      }
    }
#pragma unroll
    for (int i = 0; i < kTilesAtOnce / Shape::kParts; ++i) {
      // 2^7 is -128 as a signed byte.
      const uint32_t both = (static_cast<uint32_t>(cells[i][0]) & 0xffu) |
                            (static_cast<uint32_t>(cells[i][2]) & 0xffu) << 8;
      const int unit = first / Shape::kParts + i;
      if (HasKeys()) shared_.cells[(TokenOf(unit, 0) - begin_) / 2] = static_cast<uint16_t>(both);
    }
  }

  // Whether the lane's token `half` of a unit lies in mid.
  template <bool kWhole>
  __device__ __forceinline__ bool Has(int unit, int half) const {
    return kWhole || (inside_ >> (2 * unit + half) & 1) != 0;
  }
  // Picks one of two tokens' steps.
  static __device__ __forceinline__ uint32_t OfToken(const uint2& steps, int half) {
    return half == 0 ? steps.x : steps.y;
  }

  // Waits for the warps that have parts of the warp's piece: others may be far behind or ahead.
  __device__ __forceinline__ void MeetInPiece() const {
    if constexpr (Shape::kPieceWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + warp_ / Shape::kPieceWarps),
                   "n"(32 * Shape::kPieceWarps)
                   : "memory");
    }
  }

  // Peaks and sums of the chunk's pieces. kWhole: all its tokens lie in mid.
  template <bool kWhole>
  __device__ __forceinline__ void LeavePieces() {
    if constexpr (!kWhole) {
      inside_ = ~0u;
      if (!IsWhole()) {
        inside_ = 0;
#pragma unroll 1
        for (int u = 0; u < Shape::kUnits; ++u) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            inside_ |= (IsInside(query_, TokenOf(u, h)) ? 1u : 0u) << (2 * u + h);
        }
      }
    }
    // Lanes with the same heads differ in these bits.
    constexpr int kSameHeads = kGroup >= 8 ? 4 : kGroup / 2;
    constexpr uint32_t kNone = 0x80008000u;  // below all steps
    uint32_t peaks[Shape::kColumnHalves];
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) peaks[c] = kNone;
#pragma unroll 1
    for (int u = 0; u < Shape::kUnits; ++u) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnHalves; ++c) {
        const uint2 steps = Steps(u * Shape::kColumnHalves + c);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          peaks[c] = __vmaxs2(peaks[c], Has<kWhole>(u, h) ? OfToken(steps, h) : kNone);
      }
    }
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
#pragma unroll
      for (int offset = 16; offset >= kSameHeads; offset /= 2)
        peaks[c] = __vmaxs2(peaks[c], __shfl_xor_sync(kFullMask, peaks[c], offset));
      if (lane_ < kSameHeads) {
        shared_.warp_peaks[warp_][HeadOf(c, 0)] = static_cast<int16_t>(peaks[c] & 0xffffu);
        shared_.warp_peaks[warp_][HeadOf(c, 1)] = static_cast<int16_t>(peaks[c] >> 16);
      }
    }
    MeetInPiece();
    // A lane of the piece's first warp leaves a head's record. It takes the peak now: the next chunk's may come soon.
    const int32_t piece = warp_ / Shape::kPieceWarps;
    const int32_t peak = lane_ < kGroup ? PiecePeak(piece, lane_) : 0;
    uint32_t ups[Shape::kColumnHalves];
    uint32_t sums[Shape::kColumnHalves][2] = {};
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
      ups[c] = PowersUp(PiecePeak(piece, HeadOf(c, 0)), PiecePeak(piece, HeadOf(c, 1)));
    }
#pragma unroll 1
    for (int u = 0; u < Shape::kUnits; ++u) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnHalves; ++c) {
        const uint2 steps = Steps(u * Shape::kColumnHalves + c);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t powers = PowersOf(OfToken(steps, h), ups[c]);
          const uint32_t low = TermBits(LowPower(powers)), high = TermBits(HighPower(powers));
          if (!Has<kWhole>(u, h)) continue;
          sums[c][0] += low - kIntegerBits;
          sums[c][1] += high - kIntegerBits;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // A warp has a piece at most, whose sum is below 2^31.
        uint32_t all = sums[c][j];
#pragma unroll
        for (int offset = 16; offset >= kSameHeads; offset /= 2)
          all += __shfl_xor_sync(kFullMask, all, offset);
        if (lane_ < kSameHeads) shared_.warp_sums[warp_][HeadOf(c, j)] = all;
      }
    }
    MeetInPiece();
    if (warp_ % Shape::kPieceWarps != 0 || lane_ >= kGroup) return;
    if (begin_ + piece * kMassPieceTokens >= query_.mid.last) return;
    long long sum = 0;
#pragma unroll
    for (int w = 0; w < Shape::kPieceWarps; ++w)
      sum += shared_.warp_sums[piece * Shape::kPieceWarps + w][lane_];
    const int32_t of_row = (begin_ - base_) / kMassPieceTokens + piece;
    args_.records[(int64_t{row_} * args_.pieces + of_row) * kGroup + lane_] = {
        peak, static_cast<uint32_t>(sum)};
  }
  __device__ __forceinline__ int32_t PiecePeak(int32_t piece, int32_t g) const {
    int32_t peak = INT16_MIN;
#pragma unroll
    for (int w = 0; w < Shape::kPieceWarps; ++w)
      peak = max(peak, shared_.warp_peaks[piece * Shape::kPieceWarps + w][g]);
    return peak;
  }

  // R and inv of the row's heads, from all its pieces.
  __device__ __forceinline__ void FinishRow() {
    const int32_t pieces = (query_.mid.last - 1) / kMassPieceTokens - FirstPiece(query_) + 1;
    const int32_t g = threadIdx.x % kGroup;
    const auto* const records =
        reinterpret_cast<const int2*>(args_.records + int64_t{row_} * args_.pieces * kGroup);
    const int32_t anchors = shared_.heads[g].reference;
    int32_t reference = anchors;
#pragma unroll 8
    for (int32_t i = threadIdx.x; i < pieces * kGroup; i += kThreads)
      reference = max(reference, __ldcg(&records[i]).x);
#pragma unroll
    for (int offset = 16; offset >= kGroup; offset /= 2) {
      reference = max(reference, __shfl_xor_sync(kFullMask, reference, offset));
    }
    if (lane_ < kGroup) shared_.warp_references[warp_][g] = reference;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) reference = max(reference, shared_.warp_references[w][g]);
    long long sum = 0;
#pragma unroll 8
    for (int32_t i = threadIdx.x; i < pieces * kGroup; i += kThreads) {
      const int2 record = __ldcg(&records[i]);
      sum += __double2ll_rz(__dmul_rn(__uint2double_rn(static_cast<uint32_t>(record.y)),
                                      static_cast<double>(ShareOf(record.x - reference))));
    }
#pragma unroll
    for (int offset = 16; offset >= kGroup; offset /= 2)
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    if (lane_ < kGroup) shared_.warp_sums[warp_][g] = sum;
    __syncthreads();
    if (threadIdx.x < args_.group) {
      sum = anchors == kNoAnchors ? 0
                                  : __float2ll_rz(__fmul_rn(ShareOf(anchors - reference), 0x1p22f));
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared_.warp_sums[w][g];
      shared_.heads[g].reference = reference;
      shared_.heads[g].inverse = __fdiv_rn(0x1p22f, __ll2float_rn(sum));
    }
    __syncthreads();
  }
  __device__ __forceinline__ void LeaveReferences() {
    if (threadIdx.x >= args_.group) return;
    const int64_t at = int64_t{row_} * args_.group + threadIdx.x;
    const Weighing& head = shared_.heads[threadIdx.x];
    if (args_.tail_masses != nullptr) args_.tail_references[at] = ReferenceOf(head);
    if (args_.scales.references != nullptr) {
      args_.scales.references[at] = ReferenceOf(head);
      args_.scales.inverses[at] = head.inverse;
    }
  }

  // Weighs the steps of the lane's heads.
  struct Heads {
    uint32_t ups[Shape::kColumnHalves];
    float inverses[Shape::kColumnHalves][2];
  };
  __device__ __forceinline__ Heads TakeHeads() const {
    Heads heads;
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
      heads.ups[c] =
          PowersUp(shared_.heads[HeadOf(c, 0)].reference, shared_.heads[HeadOf(c, 1)].reference);
#pragma unroll
      for (int j = 0; j < 2; ++j) heads.inverses[c][j] = shared_.heads[HeadOf(c, j)].inverse;
    }
    return heads;
  }
  // Keys of the lane's two tokens of the unit, where it is the last of their holders.
  __device__ __forceinline__ void Weigh(int u, const Heads& heads, uint32_t (&keys)[2]) {
    // The sum over the heads goes from one holder of a token to the next: heads ascend.
    const int32_t before = (lane_ & ~(Shape::kHolders - 1)) | ((lane_ - 1) & (Shape::kHolders - 1));
    float masses[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
      const uint2 steps = Steps(u * Shape::kColumnHalves + c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t powers = PowersOf(OfToken(steps, h), heads.ups[c]);
#pragma unroll
        for (int holder = 0; holder < Shape::kHolders; ++holder) {
          if (holder > 0 || c > 0) masses[h] = __shfl_sync(kFullMask, masses[h], before);
          masses[h] = __fmaf_rn(LowPower(powers), heads.inverses[c][0], masses[h]);
          masses[h] = __fmaf_rn(HighPower(powers), heads.inverses[c][1], masses[h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) keys[h] = MassKeyOf(masses[h]);
  }
  __device__ __forceinline__ bool HasKeys() const {
    return class_ % Shape::kHolders == Shape::kHolders - 1;
  }
  // To shared memory.
  __device__ __forceinline__ void MakeKeys() {
    const Heads heads = TakeHeads();
#pragma unroll 1
    for (int u = 0; u < Shape::kUnits; ++u) {
      uint32_t keys[2];
      Weigh(u, heads, keys);
      if (HasKeys()) shared_.keys[(TokenOf(u, 0) - begin_) / 2] = keys[0] | keys[1] << 16;
    }
  }
  // To the workspace. Of four heads and more two lanes side by side have two tokens each, of two heads: each gets four heads
  // of one, so that what a warp writes lies side by side.
  __device__ __forceinline__ void LeaveSteps() const {
    constexpr int kWords = kGroup / 2;  // of a token
    uint32_t* const of_row = args_.steps + row_ * args_.row_tokens * kWords;
#pragma unroll 2
    for (int u = 0; u < Shape::kUnits; ++u) {
      const int64_t token = TokenOf(u, 0) - base_;
#pragma unroll
      for (int c = 0; c < Shape::kColumnHalves; ++c) {
        uint2 steps = Steps(u * Shape::kColumnHalves + c);
        int64_t at = token * kWords;
        if constexpr (Shape::kHolders > 1) {
          const int holder = class_ % Shape::kHolders;
          const bool second = holder % 2 != 0;
          const uint32_t got = __shfl_xor_sync(kFullMask, second ? steps.x : steps.y, 1);
          steps = second ? make_uint2(got, steps.y) : make_uint2(steps.x, got);
          at += (second ? kWords : 0) + 4 * c + holder / 2 * 2;
        }
        *reinterpret_cast<uint2*>(of_row + at) = steps;
      }
    }
  }
  // Leaves those of the warp's tokens.
  __device__ __forceinline__ void LeaveCells() const {
    constexpr int kWords = Shape::kWarpTokens / 4;
    __syncwarp();
    const auto* const from = reinterpret_cast<const uint32_t*>(shared_.cells) + warp_ * kWords;
    auto* const to =
        reinterpret_cast<uint32_t*>(args_.cells + row_ * args_.row_tokens + (begin_ - base_)) +
        warp_ * kWords;
#pragma unroll
    for (int i = lane_; i < kWords; i += 32) to[i] = from[i];
    __syncwarp();
  }
  // The heads of a token, which lanes side by side add at once, take different banks.
  static __device__ __forceinline__ int32_t PlaceOf(int32_t g, uint32_t cell) {
    return static_cast<int32_t>(cell) ^ (g >> 1 & 3) << 3;
  }
  // Adds the masses of the lane's tokens of a unit, of the first and of the second, to their cells.
  __device__ __forceinline__ void AddToCells(int u, const Heads& heads, bool first, bool second) {
    const uint32_t both = shared_.cells[(TokenOf(u, 0) - begin_) / 2];
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
      const uint2 steps = Steps(u * Shape::kColumnHalves + c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t powers = PowersOf(OfToken(steps, h), heads.ups[c]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int32_t g = HeadOf(c, j), at = PlaceOf(g, both >> 8 * h & 0xffu);
          // A head past the group's has none.
          const bool counts = g < args_.group && (h == 0 ? first : second);
          const uint32_t mass = __float2uint_rz(
              __fmul_rn(j == 0 ? LowPower(powers) : HighPower(powers), counts ? 0x1p30f : 0.0f));
          AddUnlessZero(&shared_.masses[g][0][at], mass & 0x7fffu);
          AddUnlessZero(&shared_.masses[g][1][at], mass >> 15);
        }
      }
    }
  }
  __device__ __forceinline__ void LeaveMasses() {
    auto* masses = reinterpret_cast<unsigned long long*>(args_.tail_masses) +
                   int64_t{row_} * args_.group * kTransformCells;
    for (int32_t i = threadIdx.x; i < args_.group * kTransformCells; i += kThreads) {
      const int32_t g = i / kTransformCells, at = PlaceOf(g, i % kTransformCells);
      const unsigned long long mass =
          shared_.masses[g][0][at] +
          (static_cast<unsigned long long>(shared_.masses[g][1][at]) << 15);
      if (mass != 0) atomicAdd(&masses[i], mass);
    }
  }
  // ---- from here on a thread has kMine tokens, side by side ----

  // The thread's keys, two a word.
  __device__ __forceinline__ void TakeKeys(uint32_t (&keys)[Shape::kMine / 2]) const {
    const uint32_t* from = &shared_.keys[static_cast<int32_t>(threadIdx.x) * (Shape::kMine / 2)];
    if constexpr (Shape::kMine >= 8) {
#pragma unroll
      for (int i = 0; i < Shape::kMine / 2; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + i);
        keys[i] = four.x;
        keys[i + 1] = four.y;
        keys[i + 2] = four.z;
        keys[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kMine / 2; ++i) keys[i] = from[i];
    }
  }
  static __device__ __forceinline__ uint32_t KeyOf(const uint32_t (&keys)[Shape::kMine / 2],
                                                   int i) {
    return keys[i / 2] >> i % 2 * 16 & 0xffffu;
  }
  __device__ __forceinline__ int32_t MineOf(int i) const {
    return begin_ + static_cast<int32_t>(threadIdx.x) * Shape::kMine + i;
  }

  // The chunk's keys by their upper 9 bits go to the row's counts.
  __device__ __forceinline__ void CountCoarse() {
    const bool whole = IsWhole();
    uint32_t keys[Shape::kMine / 2];
    TakeKeys(keys);
#pragma unroll
    for (int i = 0; i < Shape::kMine; ++i) {
      if (whole || IsInside(query_, MineOf(i)))
        atomicAdd(&shared_.counts[KeyOf(keys, i) >> kFineBits], 1u);
    }
    __syncthreads();
    uint32_t* coarse = args_.coarse + int64_t{row_} * kCoarseBins;
    for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) {
      if (shared_.counts[bin] != 0) atomicAdd(&coarse[bin], shared_.counts[bin]);
    }
  }
  // How many tokens are selected; the cut's bin.
  __device__ __forceinline__ uint32_t FindCoarse() {
    const uint32_t* coarse = args_.coarse + int64_t{row_} * kCoarseBins;
    for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads)
      shared_.counts[bin] = __ldcg(&coarse[bin]);
    __syncthreads();
    const uint32_t k = SelectedOf(query_, shared_.counts, shared_.scan);
    if (blockIdx.x == 0 && threadIdx.x == 0) args_.chosen_counts[row_] = static_cast<int32_t>(k);
    if (k > 0) {
      const uint2 found = FindFromTop<kCoarseBins>(shared_.counts, k, shared_.scan, &shared_.found);
      cut_.coarse = found.x;
      cut_.above = found.y;
    }
    __syncthreads();
    return k;
  }

  // The chunk's keys of the cut's bin by their lower 7 bits go to the row's counts.
  __device__ __forceinline__ void CountFine() {
    if (threadIdx.x < kFineBins) shared_.counts[threadIdx.x] = 0;
    __syncthreads();
    uint32_t above = 0, keys[Shape::kMine / 2];
    const bool whole = IsWhole();
    TakeKeys(keys);
#pragma unroll
    for (int i = 0; i < Shape::kMine; ++i) {
      const uint32_t key = KeyOf(keys, i);
      if (!whole && !IsInside(query_, MineOf(i))) continue;
      above += key >> kFineBits > cut_.coarse ? 1 : 0;
      if (key >> kFineBits == cut_.coarse) atomicAdd(&shared_.counts[key & (kFineBins - 1)], 1u);
    }
    above = __reduce_add_sync(kFullMask, above);
    if (lane_ == 0 && above != 0) atomicAdd(&shared_.above, above);
    __syncthreads();
    const int32_t bin = FineBin();
    const bool has_bin = bin >= 0;
    const uint32_t count = has_bin ? shared_.counts[bin] : 0;
    uint32_t total;
    const uint32_t higher = BlockExclusiveScan<kWarps>(count, shared_.scan, &total);
    if (!has_bin) return;
    FineRecords()[int64_t{blockIdx.x} * kFineBins + bin] = (shared_.above + higher) << 16 | count;
    if (count != 0) atomicAdd(&args_.fine[int64_t{row_} * kFineBins + bin], count);
  }
  // The least key of the k selected, how many tokens at it are too many, and what is selected before this chunk.
  __device__ __forceinline__ void FindFine(uint32_t k) {
    const int32_t bin = FineBin();
    if (bin >= 0) shared_.counts[bin] = __ldcg(&args_.fine[int64_t{row_} * kFineBins + bin]);
    __syncthreads();
    const uint32_t left = k - cut_.above;  // of the cut's bin
    const uint2 found = FindFromTop<kFineBins>(shared_.counts, left, shared_.scan, &shared_.found);
    cut_.threshold = cut_.coarse << kFineBits | found.x;
    cut_.skip = shared_.counts[found.x] - (left - found.y);
    uint32_t higher_before = 0, ties_before = 0;
    for (uint32_t other = threadIdx.x; other < blockIdx.x; other += kThreads) {
      const uint32_t record = __ldcg(&FineRecords()[int64_t{other} * kFineBins + found.x]);
      higher_before += record >> 16;
      ties_before += record & 0xffffu;
    }
    higher_before = __reduce_add_sync(kFullMask, higher_before);
    ties_before = __reduce_add_sync(kFullMask, ties_before);
    if (lane_ == 0) {
      shared_.places[warp_][0] = higher_before;
      shared_.places[warp_][1] = ties_before;
    }
    __syncthreads();
  }
  // The thread's bin of the lower bits, from the top; negative: it has none.
  static __device__ __forceinline__ int32_t FineBin() {
    return kFineBins - 1 - static_cast<int32_t>(threadIdx.x);
  }
  __device__ __forceinline__ uint32_t* FineRecords() const {
    return args_.counts + int64_t{row_} * args_.chunks * kFineBins;
  }

  __device__ __forceinline__ void Select() {
    uint32_t inside = 0, higher = 0, ties = 0;  // bit i is the thread's token i
    uint32_t keys[Shape::kMine / 2];
    TakeKeys(keys);
#pragma unroll
    for (int i = 0; i < Shape::kMine; ++i) {
      const uint32_t key = KeyOf(keys, i);
      if (!IsInside(query_, MineOf(i))) continue;
      inside |= 1u << i;
      higher |= (key > cut_.threshold ? 1u : 0u) << i;
      ties |= (key == cut_.threshold ? 1u : 0u) << i;
    }
    uint32_t selected = higher;
    if (cut_.threshold < kMassKeyBins) {
      uint32_t higher_before = 0, my_ties = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        higher_before += shared_.places[w][0];
        my_ties += shared_.places[w][1];
      }
      uint32_t all;
      const uint32_t before =
          BlockExclusiveScan<kWarps>(__popc(higher) | __popc(ties) << 16, shared_.scan, &all);
      my_ties += before >> 16;
      uint32_t to =
          higher_before + (before & 0xffffu) + (my_ties > cut_.skip ? my_ties - cut_.skip : 0);
      int32_t* tokens = args_.chosen_tokens + row_ * args_.capacity;
#pragma unroll
      for (int i = 0; i < Shape::kMine; ++i) {
        if ((ties >> i & 1) != 0 && my_ties++ >= cut_.skip) selected |= 1u << i;
        if ((selected >> i & 1) != 0) tokens[to++] = MineOf(i);
      }
    }
    shared_.is_left[threadIdx.x] =
        static_cast<uint16_t>(args_.tail_of_all != 0 ? inside : inside & ~selected);
  }

  // Adds the masses of tokens that are not selected to their cells.
  __device__ __forceinline__ void LeaveTail() {
    __syncthreads();
    const Heads heads = TakeHeads();
#pragma unroll 1
    for (int u = 0; u < Shape::kUnits; ++u) {
      const int32_t at = TokenOf(u, 0) - begin_;
      const uint32_t left = shared_.is_left[at / Shape::kMine] >> at % Shape::kMine;
      AddToCells(u, heads, (left & 1) != 0, (left & 2) != 0);
    }
    __syncthreads();
    LeaveMasses();
  }

  // By the last of the row's blocks: nobody reads these any more.
  __device__ __forceinline__ void MakeReadyForNextCall() {
    for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads)
      args_.coarse[int64_t{row_} * kCoarseBins + bin] = 0;
    if (threadIdx.x < kFineBins) args_.fine[int64_t{row_} * kFineBins + threadIdx.x] = 0;
    if (threadIdx.x < kMeetings) Meetings()[threadIdx.x] = 0;
  }

  const Args& args_;
  Shared& shared_;
  const int32_t row_, kv_head_;
  const DeviceQuery query_;
  const int32_t base_;  // of the row
  int32_t begin_;       // of the chunk
  const uint32_t blocks_;
  const int32_t lane_, warp_, class_, part_;
  const uint32_t* words_[kSlots];  // the lane's words of a tile, as if it was the pool's first
  const uint32_t tile_bytes_;
  uint32_t inside_;
  MassCut cut_ = {kNoBin, 0, kMassKeyBins, 0};
};

template <int kSlots, int kGroup, int kTiles>
using WholeFused = Fused<kSlots, kGroup, kTiles, /*kAll=*/true>;

template <int kSlots, int kGroup, int kTiles>
__global__ void __launch_bounds__(kThreads, kFusedBlocksPerMultiprocessor)
    FusedKernel(const __grid_constant__ Args args) {
  using Blocks = WholeFused<kSlots, kGroup, kTiles>;
  extern __shared__ uint4 dynamic[];
  LetNextStart();
  Blocks(args, *reinterpret_cast<typename Blocks::Shared*>(dynamic)).Run();
}

}  // namespace winnow::kernels::cuda::masses

#endif  // WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_FUSED_CUH_
