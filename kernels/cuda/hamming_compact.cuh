// Selection by codes: from a row's histogram and the distances of a chunk to the chosen tokens of it.
// hamming_select.cu includes it, and no one else.
#ifndef WINNOW_KERNELS_CUDA_HAMMING_COMPACT_CUH_
#define WINNOW_KERNELS_CUDA_HAMMING_COMPACT_CUH_

#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/hamming_select.h"

namespace winnow::kernels::cuda::hamming {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int32_t kTokensPerPass = 2048;  // of the compaction: 8 per thread
inline constexpr int kBaseAlignment = 16;

// Of the scan, too.
struct Args {
  const DeviceQuery* queries;
  const uint8_t* query_codes;
  const uint8_t* codes;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes;
  int32_t kv_heads, group, bins, chunks, chunk_tokens, unused;
  int64_t row_tokens;
  int64_t histogram_stride;  // from the first histogram to the second
  uint32_t* histogram;       // [2][rows][bins]
  uint32_t* tickets;         // [rows]: of two launches, blocks that have read the histogram
  uint32_t* barriers;        // [rows]: the top bit changes whenever the row's blocks have met
  uint16_t* running;         // [rows][chunks][bins + 1]: tokens of the chunk at smaller distances
  uint16_t* distances;       // [rows][row_tokens]
  Selection chosen;
};

__device__ __forceinline__ int32_t BaseOf(const DeviceQuery& query) {
  return query.mid.first & ~(kBaseAlignment - 1);
}
// Nothing to compare where none or all are chosen.
__device__ __forceinline__ bool NeedsScan(const DeviceQuery& query) {
  return query.k > 0 && query.k < query.mid.last - query.mid.first;
}

// Where the k-th distance lies in a row's histogram.
struct Cut {
  uint32_t threshold;  // T
  uint32_t skip;       // of those at T the earliest are too many
};

// The chosen tokens of one chunk, whose distances are distances[token - first].
__device__ __forceinline__ void CompactChunk(const Args& args, int32_t row,
                                             const DeviceQuery& query, int32_t first, int32_t last,
                                             const uint16_t* distances, const Cut& cut,
                                             uint32_t* warp_sums) {
  const uint16_t* running =
      args.running + int64_t{row} * args.chunks * (args.bins + 1) + cut.threshold;
  uint32_t less_before = 0, equal_before = 0;
  for (int32_t chunk = threadIdx.x; chunk < static_cast<int32_t>(blockIdx.x); chunk += kThreads) {
    const uint16_t* of_chunk = running + int64_t{chunk} * (args.bins + 1);
    const uint32_t less = __ldcg(of_chunk);
    less_before += less;
    equal_before += __ldcg(of_chunk + 1) - less;
  }
  uint32_t all_less, all_equal;
  BlockExclusiveScan<kWarps>(less_before, warp_sums, &all_less);
  BlockExclusiveScan<kWarps>(equal_before, warp_sums, &all_equal);
  less_before = all_less;
  equal_before = all_equal;
  int32_t* tokens = args.chosen.tokens + int64_t{row} * args.chosen.capacity;
  for (int32_t pass = first; pass < last; pass += kTokensPerPass) {
    const int32_t mine = pass + static_cast<int32_t>(threadIdx.x) * 8;
    uint32_t packed[4] = {};
    if (mine < last) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(distances + (mine - first));
      packed[0] = loaded.x;
      packed[1] = loaded.y;
      packed[2] = loaded.z;
      packed[3] = loaded.w;
    }
    uint32_t less = 0, equal = 0;  // bit i is token mine + i
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t distance = packed[i / 2] >> (i % 2 * 16) & 0xffffu;
      const bool inside = mine + i >= query.mid.first && mine + i < last;
      less |= static_cast<uint32_t>(inside && distance < cut.threshold) << i;
      equal |= static_cast<uint32_t>(inside && distance == cut.threshold) << i;
    }
    uint32_t all;
    const uint32_t before =
        BlockExclusiveScan<kWarps>(__popc(less) | __popc(equal) << 16, warp_sums, &all);
    const uint32_t my_less = less_before + (before & 0xffffu);
    uint32_t my_equal = equal_before + (before >> 16);
    uint32_t at = my_less + (my_equal > cut.skip ? my_equal - cut.skip : 0);
    for (uint32_t left = less | equal; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      if ((equal >> i & 1) != 0 && my_equal++ < cut.skip) continue;
      tokens[at++] = mine + i;
    }
    less_before += all & 0xffffu;
    equal_before += all >> 16;
  }
}

// Every thread gets the row's cut. Begins and ends with a barrier; `counts` [bins] is scratch.
__device__ __forceinline__ Cut FindCut(const uint32_t* histogram, int32_t bins, uint32_t k,
                                       uint32_t* counts, uint32_t* warp_sums, uint32_t* found) {
  __syncthreads();
  for (int32_t bin = threadIdx.x; bin < bins; bin += kThreads)
    counts[bin] = __ldcg(&histogram[bin]);
  __syncthreads();
  const int32_t per_thread = (bins + kThreads - 1) / kThreads;
  const int32_t bin_first = min(static_cast<int32_t>(threadIdx.x) * per_thread, bins);
  const int32_t bin_last = min(bin_first + per_thread, bins);
  uint32_t sum = 0, total;
  for (int32_t bin = bin_first; bin < bin_last; ++bin) sum += counts[bin];
  uint32_t below = BlockExclusiveScan<kWarps>(sum, warp_sums, &total);
  if (below < k && k <= below + sum) {
    for (int32_t bin = bin_first; bin < bin_last; ++bin) {
      if (k <= below + counts[bin]) {
        found[0] = static_cast<uint32_t>(bin);
        found[1] = counts[bin] - (k - below);
        break;
      }
      below += counts[bin];
    }
  }
  __syncthreads();
  return {found[0], found[1]};
}

__device__ __forceinline__ void ChooseAll(const Args& args, int32_t row, const DeviceQuery& query,
                                          int32_t first, int32_t last) {
  int32_t* tokens = args.chosen.tokens + int64_t{row} * args.chosen.capacity;
  for (int32_t t = max(first, query.mid.first) + static_cast<int32_t>(threadIdx.x); t < last;
       t += kThreads) {
    tokens[t - query.mid.first] = t;
  }
}

}  // namespace winnow::kernels::cuda::hamming

#endif  // WINNOW_KERNELS_CUDA_HAMMING_COMPACT_CUH_
