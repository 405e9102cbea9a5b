// Mapping, kSideBySide on Hopper, of up to eight rows: decoding. A block is one warp, so nobody waits for another. Keys
// are the left side of the first product and queries the right one, values the left side of the second: so of a matrix
// instruction's 16 by 8 sums all are wanted that have a row, where rows as the left side leave most of 16 empty, and no
// weight is made twice. Weights go from one product to the other by a transposition of 8 by 8 in registers.
//
// As many blocks as run at once share out the units of all chunks and KV heads, as they follow one another, in equal parts
// that begin where splits do. Copies do not cease where one head ends and another begins. Splits that a block has from a
// head's first on it adds up itself, from left to right as they are merged, and writes one state for them: writing
// states costs ten times what reading as many bytes of keys does.
//
// 8-bit types: their rows become left sides in registers, where dense_attention.cu's kernel writes them to shared memory as
// bfloat16. That takes instructions, so more warps with less on its way to each.
//
// H200, d 128, G 4, us of a layer (a read loop's: 118 for 64 sequences of 2K and for 128K, 472 for 256, 709 for 24 of 32K), by
// dense_attention.cu's kernel; as it is; and on the way here:
//   64 of 2K; 256 of 2K; 24 of 32K; 128K    175; 614; 810; 143 to 155; now 126; 502; 766; 135 to 145
//   the same of int8, 24 of 32K; 128K       1,023; 182; now 542; 136,
//     and since then, with fewer instructions to a code (kv_rows.cuh), 450; 86. fp8 at 128K 118, now 102
//   64 of 2K, 256 of 2K: blocks of a few splits each, with keys and values of two units on their way to three blocks of a
//     multiprocessor 149, 548; shares of all units 144, 553; matrices loaded ahead 142, 542; three halves of units for four
//     blocks, and the place of the next block not waited for, 142, 528; keys and values first to leave L2 136, 526; splits
//     added up here -, 503; without states at all 129, 479. One row of a state after the other in whole lines: the same
//   int8, 24 of 32K; 128K: two units on their way to six blocks 850; 197, one to twelve as it is; codes of the next 16 tokens
//     loaded ahead: the same
//   the first 256 tokens of each block brought to L2 before the queries are there, in place of 64: more than L2 holds,
//     128K 149 in place of 145
//
// Sides exchanged, an instruction gives the same bits (wgmma.cuh), and units, splits and roundings are those of
// dense_attention.cu; so the same bits. The sum of a row's weights is of four parts, as there: transposed, a
// lane has of its row, lane / 4, the tokens that it has there.
#include <type_traits>

#include "kernels/cuda/dense_attention_splits.cuh"
#include "kernels/cuda/dense_attention_warp_units.cuh"

namespace winnow::kernels::cuda::dense {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A unit's scores, [16 tokens][8 rows] each, become weights as the second product's right side wants them. A lane's
// scores are of rows lane % 4 * 2 + {0, 1}, as `sees` and `max`; its weights of row lane / 4, as `sum`.
// Whether the sums so far are to be multiplied by `keep`, of the former rows, which is else 1.
__device__ __forceinline__ bool WeighTransposed(float (&scores)[kUnitTiles][4], int32_t first_token,
                                                const int32_t (&sees)[2], float (&max)[2],
                                                float& sum, uint32_t (&weights)[kUnitTiles][2],
                                                float (&keep)[2]) {
  const int lane = threadIdx.x % kLanes;
  if (first_token + kDenseUnitTokens > min(sees[0], sees[1])) {
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first_token + t * 16 + e / 2 * 8 + lane / 4 >= sees[e % 2]) scores[t][e] = -INFINITY;
      }
    }
  }
  float base[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float unit_max = -INFINITY;
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
      unit_max = fmaxf(unit_max, fmaxf(scores[t][r], scores[t][2 + r]));
    }
#pragma unroll
    for (int offset = 4; offset < kLanes; offset *= 2) {
      unit_max = fmaxf(unit_max, __shfl_xor_sync(kFullMask, unit_max, offset));
    }
    const float now = unit_max > max[r] + kSlack ? unit_max : max[r];
    base[r] = now == -INFINITY ? 0.0f : now;
    keep[r] = now == max[r] ? 1.0f : PowerOfTwo(max[r] - base[r]);
    max[r] = now;
  }
  const bool is_raised = __any_sync(kFullMask, keep[0] != 1.0f || keep[1] != 1.0f) != 0;
  if (is_raised) {
    const float even = __shfl_sync(kFullMask, keep[0], lane / 8);
    const float odd = __shfl_sync(kFullMask, keep[1], lane / 8);
    sum = __fmul_rn(sum, lane / 4 % 2 == 0 ? even : odd);
  }
#pragma unroll
  for (int t = 0; t < kUnitTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair =
          Transposed8x8(PackBf16(PowerOfTwo(__fsub_rn(scores[t][2 * half], base[0])),
                                 PowerOfTwo(__fsub_rn(scores[t][2 * half + 1], base[1]))));
      weights[t][half] = pair;
      sum = __fadd_rn(sum, __fadd_rn(WidenLow(pair), WidenHigh(pair)));
    }
  }
  return is_raised;
}

// A state of up to eight rows: sums of values, [16 channels][8 rows] each, and of the weights of a lane's two rows,
// lane % 4 * 2 + {0, 1}.
template <int kHeadDim>
struct WarpState {
  float o[kHeadDim / 16][4];
  float max[2], sum[2];

  __device__ __forceinline__ void Reset() {
    Clear(o);
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
  // A split's state joins those of the splits before it.
  __device__ __forceinline__ void Add(const WarpState& split) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (split.sum[r] == 0.0f) continue;
      const Shares shares = ShareOut(max[r], sum[r], split.max[r]);
#pragma unroll
      for (int n = 0; n < kHeadDim / 16; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& value = o[n][2 * half + r];
          value = Mix(value, split.o[n][2 * half + r], shares);
        }
      }
      sum[r] = Mix(sum[r], split.sum[r], shares);
      max[r] = shares.max;
    }
  }
};

#endif

template <typename Units>
__global__ void __launch_bounds__(kLanes)
    SplitWarpKernel(const __grid_constant__ Args args,
                    const __grid_constant__ typename Units::Source source) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kHeadDim = Units::kHeadDim, kSteps = Units::kSteps;
  extern __shared__ uint4 shared4[];
  const int lane = threadIdx.x;
  LetNextStart();
  const UnitShare share = ShareOfBlock(args);
  if (share.count == 0) return WaitForEarlier();
  UnitCursor at = share.first;
  PrefetchTokens<kLanes, kDenseUnitTokens>(args, at.chunk, at.kv_head, at.unit, at.visible(),
                                           Units::kParts * Units::kPartBytes / kDenseUnitTokens);
  UnitRing<Units> ring(args, source, share, SharedAddress(shared4));
  WaitForEarlier();
  ring.Begin();

  const int32_t group = args.group.divisor();
  int32_t num_rows = 0, sees[2] = {};
  uint32_t q[kSteps][2];
  const auto load_rows = [&] {
    num_rows = at.chunk.num_tokens * group;
    // Rows that are not there see what the last one sees, so that nothing need be hidden from them, and are not written.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sees[r] = VisibleTo(args, at.chunk, min(lane % 4 * 2 + r, num_rows - 1));
    }
    const int32_t row = min(lane / 4, num_rows - 1), token = args.group.Divide(row);
    const float* from = args.q + (at.chunk.first_row + token) * args.q_stride +
                        int64_t{at.kv_head * group + row - token * group} * kHeadDim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = Units::QueryChannel(step, half, lane);
        q[step][half] =
            PackBf16(__fmul_rn(from[c], args.scale_log2), __fmul_rn(from[c + 1], args.scale_log2));
      }
    }
  };
  // `total`: of the splits so far, where the block has a head from its first one on.
  WarpState<kHeadDim> split, total;
  float sum = 0.0f;  // a quarter of row lane / 4's, of the split
  split.Reset();
  bool adds_up = false;
  for (int32_t done = 0; done < share.count; ++done) {
    if (done == 0 || at.unit == 0) {
      load_rows();
      total.Reset();
      adds_up = at.unit == 0;
    }
    float scores[kUnitTiles][4] = {};
    const uint32_t keys = ring.Part();
    Units::Score(keys, q, scores);
    if constexpr (Units::kParts == 2) ring.PartIsRead();
    uint32_t weights[kUnitTiles][2];
    float keep[2];
    if (WeighTransposed(scores, at.unit * kDenseUnitTokens, sees, split.max, sum, weights, keep)) {
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) split.o[n][e] = __fmul_rn(split.o[n][e], keep[e % 2]);
      }
    }
    Units::AddValues(Units::kParts == 2 ? ring.Part() : keys,
                     at.visible() - at.unit * kDenseUnitTokens, weights, split.o);
    ring.PartIsRead();
    const bool ends_head = at.unit + 1 == at.units;
    if (ends_head || BeginsDenseSplit(at.unit + 1)) {
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        split.sum[r] = __shfl_sync(kFullMask, sum, (lane % 4 * 2 + r) * 4);
      }
      const bool is_last = ends_head || done + 1 == share.count;
      if (adds_up) {
        total.Add(split);
        split = total;
      }
      // The sum so far is there once, at the last of its splits; the others weigh nothing.
      const bool is_written = !adds_up || is_last;
      const int64_t place = (int64_t{at.index} * args.kv_heads + at.kv_head) * kWarpRows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t row = lane % 4 * 2 + r;
        if (row >= num_rows) continue;
        const int64_t part = (place + row) * args.splits + DenseSplitOf(at.unit);
        if (lane < 4) {
          args.part_ends[part] = make_float2(split.max[r], is_written ? split.sum[r] : 0.0f);
        }
        if (!is_written) continue;
        float* to = args.parts + part * kHeadDim;
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            to[Units::SumChannel(n, half, lane)] = split.o[n][2 * half + r];
          }
        }
      }
      split.Reset();
      sum = 0.0f;
    }
    if (done + 1 < share.count) at.Advance(args);
  }
#endif
}

template <typename Units>
size_t SharedBytesOf() {
  return Units::kStages * size_t{Units::kPartBytes} + (Units::kAlignment - 16);
}

// Blocks that run at once, 0 where that cannot be told.
template <typename Units>
int64_t SlotsOf() {
  int at_once = 0;
  if (BlocksPerMultiprocessor(SplitWarpKernel<Units>, kLanes, SharedBytesOf<Units>(), &at_once) !=
      cudaSuccess) {
    return 0;
  }
  return int64_t{at_once} * CurrentDevice().multiprocessors;
}

template <typename Units>
cudaError_t LaunchOf(const DenseAttentionShape& shape, const Args& args,
                     const typename Units::Source& source, Stream stream) {
  const int64_t heads = int64_t{shape.num_chunks} * shape.layout.kv_heads;
  const int64_t blocks = DenseSharers(heads, args.splits, SlotsOf<Units>());
  return Launch(SplitWarpKernel<Units>, dim3(static_cast<unsigned>(blocks)), kLanes,
                SharedBytesOf<Units>(), stream, false, args, source);
}

// call(kind), where Kind::Type is the kind of units of a KV type and head dimension.
template <typename Units>
struct UnitsKind {
  using Type = Units;
};
template <typename Call>
cudaError_t ForUnits(const KvLayout& layout, const Call& call) {
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    if constexpr (HasScales(kKv)) {
      return layout.head_dim == 64 ? call(UnitsKind<CodeUnits<kKv, 64>>{})
                                   : call(UnitsKind<CodeUnits<kKv, 128>>{});
    } else {
      return layout.head_dim == 64 ? call(UnitsKind<PlainUnits<64>>{})
                                   : call(UnitsKind<PlainUnits<128>>{});
    }
  });
}

}  // namespace

bool HasWarpSplits(const DenseAttentionShape& shape) {
  const KvLayout& layout = shape.layout;
  if ((layout.head_dim != 64 && layout.head_dim != 128) ||
      int64_t{shape.max_chunk_tokens} * shape.group > kSplitWarpRows) {
    return false;
  }
  const int64_t units = int64_t{shape.num_chunks} * layout.kv_heads * DenseUnits(shape.max_keys);
  int64_t slots = 0;
  const cudaError_t error = ForUnits(layout, [&]<typename Kind>(Kind) {
    slots = SlotsOf<typename Kind::Type>();
    return cudaSuccess;
  });
  return error == cudaSuccess && slots > 0 && units >= shape.least_share * slots;
}

cudaError_t SplitByWarps(const DenseAttentionShape& shape, const Args& args, const CUtensorMap* map,
                         Stream stream) {
  return ForUnits(shape.layout, [&]<typename Kind>(Kind) {
    using Units = typename Kind::Type;
    if constexpr (std::is_same_v<typename Units::Source, CUtensorMap>) {
      if (map == nullptr) return cudaErrorInvalidValue;
      return LaunchOf<Units>(shape, args, *map, stream);
    } else {
      return LaunchOf<Units>(shape, args, {}, stream);
    }
  });
}

}  // namespace winnow::kernels::cuda::dense
