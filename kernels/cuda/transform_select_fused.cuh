// The blocks of selection by estimated mass, and selection in one launch whose blocks meet (transform_select.cu says when):
// dots and keys stay in shared memory, of which a block takes 54 KiB (G = 2) to 110 (G = 16).
//
// In passes dots are in registers, and loops over them are unrolled as a whole. In one launch they would be 12,300
// instructions (197 KB at 192 bits and 32 tiles), which each block goes through once. A layer's other kernels and its weights
// drive them out of all caches meanwhile: beside each other on an H200, 128K, they took 45 us, in a decode step 57 to 74. As
// loops they are 5,000, and a step of 30 such layers takes 0.4 to 0.6 ms less. Alone they are 3 us slower. Tried and lost: loops unrolled twice
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

// kChunks: that a block has one after the other. kRolled: dots lie in shared memory, and loops over them stay loops.
template <int kSlots, int kGroup, int kTiles, int kChunks, bool kRolled>
struct FusedShared {
  using Shape = FusedShape<kSlots, kGroup, kTiles>;
  int4 dots[kRolled ? Shape::kProducts : 1][kRolled ? kThreads : 1];  // each thread's own
  uint4 fields[kSlots][kTransformFusedSteps][4];  // by class: rotate and mask of two fields
  uint2 coefs[kSlots][kTransformFusedSteps][Shape::kColumnHalves][4][8];
  int32_t steps[kSlots];
  uint4 cell_fields[kSlots][kTransformCellSteps][4];
  uint2 cell_weights[kSlots][kTransformCellSteps][4];
  int32_t cell_steps[kSlots];
  uint32_t tiles[kChunks * Shape::kChunkTokens / kCodeTileTokens];  // where they begin, in tiles
  int32_t warp_peaks[kWarps][kGroup];
  long long warp_sums[kWarps][kGroup];
  float warp_references[kWarps][kGroup];
  Weighing heads[kGroup];
  alignas(16) uint32_t keys[Shape::kChunkTokens / 2];
  uint16_t cells[Shape::kChunkTokens / 2];  // two tokens each
  uint16_t is_left[kThreads];    // bits: of a thread's tokens those inside mid and not selected
  uint32_t counts[kCoarseBins];  // of the chunk, then of the row
  // 2^30 times the mass: its lower 15 bits, and what is above them. Cells side by side and in an order of the head's own
  // (PlaceOf), because a warp adds to 16 tokens' cells at a time.
  uint32_t masses[kGroup][2][kTransformCells];
  uint32_t scan[kWarps];
  uint32_t places[kWarps][2];
  uint32_t above, is_last;
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

template <int kSlots, int kGroup, int kTiles, int kChunks = 1, bool kRolled = false>
class Fused {
 public:
  using Shape = FusedShape<kSlots, kGroup, kTiles>;
  using Shared = FusedShared<kSlots, kGroup, kTiles, kChunks, kRolled>;

  __device__ Fused(const Args& args, Shared& shared)
      : args_(args),
        shared_(shared),
        row_(static_cast<int32_t>(blockIdx.y)),
        kv_head_(row_ % args.kv_heads),
        query_(args.queries[row_ / args.kv_heads]),
        base_(BaseOf(query_)),
        begin_(base_ + static_cast<int32_t>(blockIdx.x) * kBlockTokens),
        blocks_(static_cast<uint32_t>((query_.mid.last - base_ + kBlockTokens - 1) / kBlockTokens)),
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
    MakeDots(args_.tail_masses != nullptr);
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

  // The first of the passes: peaks and sums of pieces; the row's last block leaves R and inv.
  __device__ __forceinline__ void RunPieces() {
    if (!Begin()) return;
    MakeDots(/*cells=*/false);
    if (IsWhole()) {
      LeavePieces<true>();
    } else {
      LeavePieces<false>();
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

  // The second: keys go to the workspace, and are counted by their upper 9 bits; all masses are added to their cells,
  // those of the tokens that will be selected, too. The row's last block finds the cut's bin.
  __device__ __forceinline__ void RunMasses() {
    if (!Begin()) return;
    if (threadIdx.x < args_.group) {
      const PreparedQuery& from = args_.prepared[int64_t{row_} * args_.group + threadIdx.x];
      shared_.heads[threadIdx.x].reference = from.reference;
      shared_.heads[threadIdx.x].inverse = from.inverse;
    }
    __syncthreads();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks && begin_ < query_.mid.last; ++chunk) {
      first_tile_ = chunk * (Shape::kChunkTokens / kCodeTileTokens);
      MakeDots(args_.tail_masses != nullptr);
      if (IsWhole()) {
        LeaveKeys<true>();
        if (args_.tail_masses != nullptr) AddMasses<true>();
      } else {
        LeaveKeys<false>();
        if (args_.tail_masses != nullptr) AddMasses<false>();
      }
      begin_ += Shape::kChunkTokens;
    }
    __syncthreads();
    if (args_.tail_masses != nullptr) LeaveMasses();
    uint32_t* coarse = args_.coarse + int64_t{row_} * kCoarseBins;
    for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) {
      if (shared_.counts[bin] != 0) atomicAdd(&coarse[bin], shared_.counts[bin]);
    }
    if (IsLast(&args_.tickets[4 * row_ + 1], blocks_, &shared_.is_last)) LeaveCut();
  }

 private:
  static constexpr int32_t kBlockTokens = kChunks * Shape::kChunkTokens;

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

  // Prepares all that no kernel writes: fields, where tiles begin, bits of cells. Leaves the thread's quads in `quads`.
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
    const int32_t words = args_.transform.bits / 32;
    for (int32_t t = threadIdx.x; t < kBlockTokens / kCodeTileTokens; t += kThreads) {
      // Tiles past mid stand for the block's first, whose codes are read again and not used.
      const int32_t token =
          begin_ + t * kCodeTileTokens < query_.mid.last ? begin_ + t * kCodeTileTokens : begin_;
      const int32_t block = args_.block_tokens.Divide(token);
      shared_.tiles[t] =
          static_cast<uint32_t>((query_.block_table[block] * args_.block_words +
                                 int64_t{token - block * args_.block_tokens.divisor()} * words) /
                                (kCodeTileTokens * words));
    }
    for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) shared_.counts[bin] = 0;
    if (threadIdx.x == 0) shared_.above = 0;
    if (tail) {
      for (int32_t i = threadIdx.x; i < kGroup * kTransformCells * 2; i += kThreads)
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
      // R takes the place of e.
      if (g < args_.group)
        shared_.heads[g] = {prepared[g].a, prepared[g].b, prepared[g].anchors, 0};
    }
  }

  // The lane's words of kTilesAtOnce tiles: two tokens each.
  __device__ __forceinline__ void LoadWords(int first_tile,
                                            uint2 (&words)[kTilesAtOnce][kSlots]) const {
#pragma unroll
    for (int t = 0; t < kTilesAtOnce; ++t) {
      const uint32_t tile = shared_.tiles[first_tile_ + warp_ * kTiles + first_tile + t];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const auto* const from =
            reinterpret_cast<const uint8_t*>(words_[s]) + uint64_t{tile} * tile_bytes_;
        // Relaxed: a plain load the compiler moves to where the words are used, so that nothing flies ahead.
        asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                     : "=r"(words[t][s].x), "=r"(words[t][s].y)
                     : "l"(from), "l"(ReadOnce()));
      }
    }
  }

  // Adds to `sums` the products of two fields of the tiles' words, A, and `numbers` of each, B.
  __device__ __forceinline__ void MultiplyFields(const uint2 (&words)[kTilesAtOnce][kSlots], int s,
                                                 uint4 fields, uint2 numbers, int32_t (*sums)[4],
                                                 int stride) const {
#pragma unroll
    for (int t = 0; t < kTilesAtOnce; ++t) {
      const uint2 pair = words[t][s];
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

  // The sums of product `p`: rows r, columns 2c and 2c + 1; rows r + 8, the same. Dots, and weights in their place.
  __device__ __forceinline__ int4 Sums(int p) const {
    if constexpr (kRolled) return shared_.dots[p][threadIdx.x];
    return dots_[p];
  }
  __device__ __forceinline__ void KeepSums(int p, int4 sums) {
    if constexpr (kRolled) {
      shared_.dots[p][threadIdx.x] = sums;
    } else {
      dots_[p] = sums;
    }
  }
  static constexpr int kProductsAtOnce = kTilesAtOnce / Shape::kParts * Shape::kColumnHalves;
  // Times that loops over units, and over tiles, are unrolled.
  static constexpr int kUnrolledUnits = kRolled ? 1 : Shape::kUnits;
  static constexpr int kUnrolledTiles = kRolled ? 1 : kTiles / kTilesAtOnce;

  __device__ __forceinline__ void MakeDots(bool cells) {
    uint2 next[kTilesAtOnce][kSlots];
    LoadWords(0, next);
#pragma unroll(kUnrolledTiles)
    for (int first = 0; first < kTiles; first += kTilesAtOnce) {
      uint2 now[kTilesAtOnce][kSlots];
#pragma unroll
      for (int t = 0; t < kTilesAtOnce; ++t) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) now[t][s] = next[t][s];
      }
      if (first + kTilesAtOnce < kTiles) LoadWords(first + kTilesAtOnce, next);
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
        KeepSums(first / Shape::kParts * Shape::kColumnHalves + p,
                 make_int4(sums[p][0], sums[p][1], sums[p][2], sums[p][3]));
      }
    }
  }
  // A cell is a dot, too: of its bits and powers of two. All columns of the tile's part have it.
  __device__ __forceinline__ void MakeCells(int first, const uint2 (&words)[kTilesAtOnce][kSlots]) {
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
      if constexpr (kChunks > 1) {
        cells_[unit] = both;
      } else if (HasKeys()) {
        shared_.cells[(TokenOf(unit, 0) - begin_) / 2] = static_cast<uint16_t>(both);
      }
    }
  }

  // Whether the lane's token `half` of a unit lies in mid.
  template <bool kWhole>
  __device__ __forceinline__ bool Has(int unit, int half) const {
    return kWhole || (inside_ >> (2 * unit + half) & 1) != 0;
  }
  // Calls use(h, j, sum) for the sums of product `p`: of token h, of head j of two.
  template <typename Use>
  static __device__ __forceinline__ void ForSums(const int4& sums, Use use) {
    use(0, 0, sums.x);
    use(0, 1, sums.y);
    use(1, 0, sums.z);
    use(1, 1, sums.w);
  }

  // Peaks and sums of the chunk's pieces. kWhole: all its tokens lie in mid.
  template <bool kWhole>
  __device__ __forceinline__ void LeavePieces() {
    if constexpr (!kWhole) {
      inside_ = ~0u;
      if (!IsWhole()) {
        inside_ = 0;
#pragma unroll(kUnrolledUnits)
        for (int u = 0; u < Shape::kUnits; ++u) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            inside_ |= (IsInside(query_, TokenOf(u, h)) ? 1u : 0u) << (2 * u + h);
        }
      }
    }
    // Lanes with the same heads differ in these bits.
    constexpr int kSameHeads = kGroup >= 8 ? 4 : kGroup / 2;
    int32_t peaks[Shape::kColumnHalves][2];
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) peaks[c][0] = peaks[c][1] = INT32_MIN;
#pragma unroll(kUnrolledUnits)
    for (int u = 0; u < Shape::kUnits; ++u) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnHalves; ++c) {
        ForSums(Sums(u * Shape::kColumnHalves + c), [&](int h, int j, int32_t dot) {
          if (Has<kWhole>(u, h)) peaks[c][j] = max(peaks[c][j], dot);
        });
      }
    }
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int32_t peak = peaks[c][j];
#pragma unroll
        for (int offset = 16; offset >= kSameHeads; offset /= 2) {
          peak = max(peak, __shfl_xor_sync(kFullMask, peak, offset));
        }
        if (lane_ < kSameHeads) shared_.warp_peaks[warp_][HeadOf(c, j)] = peak;
      }
    }
    __syncthreads();
    float of_piece[Shape::kColumnHalves][2], scales[Shape::kColumnHalves][2];
    uint32_t sums[Shape::kColumnHalves][2] = {};
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        of_piece[c][j] = __int_as_float(PiecePeak(warp_ / Shape::kPieceWarps, HeadOf(c, j)));
        scales[c][j] = shared_.heads[HeadOf(c, j)].a;
      }
    }
#pragma unroll(kUnrolledUnits)
    for (int u = 0; u < Shape::kUnits; ++u) {
#pragma unroll
      for (int c = 0; c < Shape::kColumnHalves; ++c) {
        ForSums(Sums(u * Shape::kColumnHalves + c), [&](int h, int j, int32_t dot) {
          // Both are kIntegerFloat and an integer, and so is the difference exact.
          const float below = __fsub_rn(__int_as_float(dot), of_piece[c][j]);
          const uint32_t share =
              __float2uint_rz(__fmul_rn(Exp2(__fmul_rn(scales[c][j], below)), 0x1p26f));
          if (Has<kWhole>(u, h)) sums[c][j] += share;
        });
      }
    }
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        long long all = sums[c][j];
#pragma unroll
        for (int offset = 16; offset >= kSameHeads; offset /= 2)
          all += __shfl_xor_sync(kFullMask, all, offset);
        if (lane_ < kSameHeads) shared_.warp_sums[warp_][HeadOf(c, j)] = all;
      }
    }
    __syncthreads();
    if (threadIdx.x >= Shape::kPieces * kGroup) return;
    const int32_t piece = threadIdx.x / kGroup, g = threadIdx.x % kGroup;
    if (begin_ + piece * kMassPieceTokens >= query_.mid.last) return;
    long long sum = 0;
#pragma unroll
    for (int w = 0; w < Shape::kPieceWarps; ++w)
      sum += shared_.warp_sums[piece * Shape::kPieceWarps + w][g];
    const int64_t at =
        (int64_t{row_} * args_.pieces + blockIdx.x * Shape::kPieces + piece) * kGroup + g;
    args_.peaks[at] = PiecePeak(piece, g) - kIntegerBits;
    args_.sums[at] = sum;
  }
  __device__ __forceinline__ int32_t PiecePeak(int32_t piece, int32_t g) const {
    int32_t peak = INT32_MIN;
#pragma unroll
    for (int w = 0; w < Shape::kPieceWarps; ++w)
      peak = max(peak, shared_.warp_peaks[piece * Shape::kPieceWarps + w][g]);
    return peak;
  }

  // R and inv of the row's heads, from all its pieces.
  __device__ __forceinline__ void FinishRow() {
    const int32_t pieces = (query_.mid.last - 1) / kMassPieceTokens - FirstPiece(query_) + 1;
    const int32_t g = threadIdx.x % kGroup;
    const int64_t of_row = int64_t{row_} * args_.pieces * kGroup;
    const float a = shared_.heads[g].a, b = shared_.heads[g].b;
    const auto logit = [&](int32_t i) {
      return __fmaf_rn(a, FloatOf(__ldcg(&args_.peaks[of_row + i]) + kIntegerBits), b);
    };
    const float e = shared_.heads[g].reference;
    float reference = e;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < pieces * kGroup; i += kThreads)
      reference = fmaxf(reference, logit(i));
#pragma unroll
    for (int offset = 16; offset >= kGroup; offset /= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(kFullMask, reference, offset));
    }
    if (lane_ < kGroup) shared_.warp_references[warp_][g] = reference;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) reference = fmaxf(reference, shared_.warp_references[w][g]);
    long long sum = 0;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < pieces * kGroup; i += kThreads) {
      const float share = Exp2(__fsub_rn(logit(i), reference));
      sum += __double2ll_rz(__dmul_rn(
          __ll2double_rn(__ldcg(reinterpret_cast<const long long*>(&args_.sums[of_row + i]))),
          static_cast<double>(share)));
    }
#pragma unroll
    for (int offset = 16; offset >= kGroup; offset /= 2)
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    if (lane_ < kGroup) shared_.warp_sums[warp_][g] = sum;
    __syncthreads();
    if (threadIdx.x < args_.group) {
      sum = __float2ll_rz(__fmul_rn(Exp2(__fsub_rn(e, reference)), 0x1p26f));
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += shared_.warp_sums[w][g];
      shared_.heads[g].reference = reference;
      shared_.heads[g].inverse = __fdiv_rn(0x1p26f, __ll2float_rn(sum));
    }
    __syncthreads();
  }
  __device__ __forceinline__ void LeaveReferences() {
    if (threadIdx.x >= args_.group) return;
    const int64_t at = int64_t{row_} * args_.group + threadIdx.x;
    if (args_.tail_masses != nullptr) {
      args_.tail_references[at] = shared_.heads[threadIdx.x].reference;
    }
    if (args_.scales.references != nullptr) {
      args_.scales.references[at] = shared_.heads[threadIdx.x].reference;
      args_.scales.inverses[at] = shared_.heads[threadIdx.x].inverse;
    }
  }

  // The lane's heads, and what weighs their dots.
  struct Heads {
    Weighing of[Shape::kColumnHalves][2];
  };
  __device__ __forceinline__ Heads TakeHeads() const {
    Heads heads;
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) heads.of[c][j] = shared_.heads[HeadOf(c, j)];
    }
    return heads;
  }
  // Weights relative to R take the dots' place; keys of the lane's two tokens of the unit, where it is the last of their holders.
  __device__ __forceinline__ void Weigh(int u, const Heads& heads, uint32_t (&keys)[2]) {
    // The sum over the heads goes from one holder of a token to the next: heads ascend.
    const int32_t before = (lane_ & ~(Shape::kHolders - 1)) | ((lane_ - 1) & (Shape::kHolders - 1));
    float masses[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
      const int p = u * Shape::kColumnHalves + c;
      float weights[2][2];
      ForSums(Sums(p), [&](int h, int j, int32_t dot) {
        const Weighing& head = heads.of[c][j];
        weights[h][j] = Exp2(__fsub_rn(__fmaf_rn(head.a, FloatOf(dot), head.b), head.reference));
      });
      KeepSums(p, make_int4(__float_as_int(weights[0][0]), __float_as_int(weights[0][1]),
                            __float_as_int(weights[1][0]), __float_as_int(weights[1][1])));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int holder = 0; holder < Shape::kHolders; ++holder) {
          if (holder > 0 || c > 0) masses[h] = __shfl_sync(kFullMask, masses[h], before);
          masses[h] = __fmaf_rn(weights[h][0], heads.of[c][0].inverse, masses[h]);
          masses[h] = __fmaf_rn(weights[h][1], heads.of[c][1].inverse, masses[h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t key =
          static_cast<int32_t>(__float_as_uint(masses[h]) >> kMassKeyShift) - kMassKeyBase;
      keys[h] = static_cast<uint32_t>(min(max(key, 0), kMassKeyBins - 1));
    }
  }
  __device__ __forceinline__ bool HasKeys() const {
    return class_ % Shape::kHolders == Shape::kHolders - 1;
  }
  // To shared memory.
  __device__ __forceinline__ void MakeKeys() {
    const Heads heads = TakeHeads();
#pragma unroll(kUnrolledUnits)
    for (int u = 0; u < Shape::kUnits; ++u) {
      uint32_t keys[2];
      Weigh(u, heads, keys);
      if (HasKeys()) shared_.keys[(TokenOf(u, 0) - begin_) / 2] = keys[0] | keys[1] << 16;
    }
  }
  // To the workspace, and into the counts.
  template <bool kWhole>
  __device__ __forceinline__ void LeaveKeys() {
    const Heads heads = TakeHeads();
#pragma unroll(kUnrolledUnits)
    for (int u = 0; u < Shape::kUnits; ++u) {
      uint32_t keys[2];
      Weigh(u, heads, keys);
      if (!HasKeys()) continue;
      const int32_t token = TokenOf(u, 0);
      *reinterpret_cast<uint32_t*>(&args_.keys[row_ * args_.row_tokens + (token - base_)]) =
          keys[0] | keys[1] << 16;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (kWhole || IsInside(query_, token + h))
          atomicAdd(&shared_.counts[keys[h] >> kFineBits], 1u);
      }
    }
  }
  // The cells of the lane's two tokens of a unit, one behind the other.
  __device__ __forceinline__ uint32_t CellsOf(int u) const {
    if constexpr (kChunks > 1) return cells_[u];
    return shared_.cells[(TokenOf(u, 0) - begin_) / 2];
  }
  // Adds the masses of the chunk's tokens to their cells.
  template <bool kWhole>
  __device__ __forceinline__ void AddMasses() {
#pragma unroll(kUnrolledUnits)
    for (int u = 0; u < Shape::kUnits; ++u) {
      const int32_t token = TokenOf(u, 0);
      AddToCells(u, kWhole || IsInside(query_, token), kWhole || IsInside(query_, token + 1));
    }
  }
  // The heads of a token, which lanes side by side add at once, take different banks.
  static __device__ __forceinline__ int32_t PlaceOf(int32_t g, uint32_t cell) {
    return static_cast<int32_t>(cell) ^ (g >> 1 & 3) << 3;
  }
  // Adds the lane's weights of its tokens of a unit, of the first and of the second.
  __device__ __forceinline__ void AddToCells(int u, bool first, bool second) {
    const uint32_t both = CellsOf(u);
#pragma unroll
    for (int c = 0; c < Shape::kColumnHalves; ++c) {
      ForSums(Sums(u * Shape::kColumnHalves + c), [&](int h, int j, int32_t weight) {
        const int32_t g = HeadOf(c, j), at = PlaceOf(g, both >> 8 * h & 0xffu);
        // A head past the group's has none.
        const bool counts = g < args_.group && (h == 0 ? first : second);
        const uint32_t mass =
            __float2uint_rz(__fmul_rn(__int_as_float(weight), counts ? 0x1p30f : 0.0f));
        AddUnlessZero(&shared_.masses[g][0][at], mass & 0x7fffu);
        AddUnlessZero(&shared_.masses[g][1][at], mass >> 15);
      });
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
  // By the row's last block: the cut's bin.
  __device__ __forceinline__ void LeaveCut() {
    uint32_t* coarse = args_.coarse + int64_t{row_} * kCoarseBins;
    for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) {
      shared_.counts[bin] = __ldcg(&coarse[bin]);
      coarse[bin] = 0;
    }
    __syncthreads();
    uint2 cut = make_uint2(kNoBin, 0);
    const uint32_t selected = SelectedOf(query_, shared_.counts, shared_.scan);
    if (selected > 0)
      cut = FindFromTop<kCoarseBins>(shared_.counts, selected, shared_.scan, &shared_.found);
    if (threadIdx.x != 0) return;
    args_.cuts[row_].coarse = cut.x;
    args_.cuts[row_].above = cut.y;
    args_.chosen_counts[row_] = static_cast<int32_t>(selected);
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
#pragma unroll(kUnrolledUnits)
    for (int u = 0; u < Shape::kUnits; ++u) {
      const int32_t at = TokenOf(u, 0) - begin_;
      const uint32_t left = shared_.is_left[at / Shape::kMine] >> at % Shape::kMine;
      AddToCells(u, (left & 1) != 0, (left & 2) != 0);
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
  const int32_t base_;
  int32_t begin_;  // of the chunk
  const uint32_t blocks_;
  const int32_t lane_, warp_, class_, part_;
  const uint32_t* words_[kSlots];  // the lane's words of a tile, as if it was the pool's first
  const uint32_t tile_bytes_;
  int32_t first_tile_ = 0;  // of the chunk, in the block's
  uint32_t inside_;
  MassCut cut_ = {kNoBin, 0, kMassKeyBins, 0};
  uint32_t cells_[kChunks > 1 ? Shape::kUnits : 1];  // of the lane's tokens, two each
  int4 dots_[kRolled ? 1 : Shape::kProducts];        // Sums()
};

template <int kSlots, int kGroup, int kTiles>
using RolledFused = Fused<kSlots, kGroup, kTiles, 1, /*kRolled=*/true>;

template <int kSlots, int kGroup, int kTiles>
__global__ void __launch_bounds__(kThreads, kFusedBlocksPerMultiprocessor)
    FusedKernel(const __grid_constant__ Args args) {
  using Blocks = RolledFused<kSlots, kGroup, kTiles>;
  extern __shared__ uint4 dynamic[];
  LetNextStart();
  Blocks(args, *reinterpret_cast<typename Blocks::Shared*>(dynamic)).Run();
}

}  // namespace winnow::kernels::cuda::masses

#endif  // WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_FUSED_CUH_
