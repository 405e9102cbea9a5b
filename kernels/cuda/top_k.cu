// Mapping. A block of 1024 threads is a list. Scores become unsigned numbers of the same order; each
// pass counts one digit of those that agree with the digits found so far. The last pass goes over the
// tokens in order, a tile of 1024 at a time, and passes over as many equals of the threshold as are
// not needed: the later ones are chosen.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/top_k.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// The number of set flags of the block's threads before this one, and of all.
__device__ __forceinline__ uint32_t CountBefore(bool flag, uint32_t* warp_counts, uint32_t* all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ballot = __ballot_sync(kFullMask, flag);
  __syncthreads();  // the counts of the call before have been read
  if (lane == 0) warp_counts[warp] = __popc(ballot);
  __syncthreads();
  const uint32_t mine = warp_counts[lane];
  const uint32_t inclusive = WarpInclusiveScan(mine, lane);
  *all = __shfl_sync(kFullMask, inclusive, 31);
  const uint32_t before = __shfl_sync(kFullMask, inclusive - mine, warp);
  return before + __popc(ballot & ((1u << lane) - 1));
}

__global__ void __launch_bounds__(kThreads)
    TopKKernel(const DeviceQuery* queries, TopKScores scores, int shift, const int32_t* counts,
               const Selection chosen) {
  __shared__ uint32_t digits[256];
  __shared__ uint32_t warp_counts[kWarps];
  __shared__ uint32_t found[2];  // digit, and how many of it are wanted
  const int32_t list = static_cast<int32_t>(blockIdx.x);
  const DeviceQuery query = queries[list / chosen.kv_heads];
  const int32_t n = max(query.mid.size(), 0);
  const int32_t k = min(counts == nullptr ? query.k : counts[list], n);
  const float* of_list = scores.scores + int64_t{list} * scores.stride;
  const auto key_of = [&](int32_t i) { return KeyOf(of_list[(query.mid.first + i) >> shift]); };
  if (threadIdx.x == 0) chosen.counts[list] = k;
  if (k <= 0) return;

  uint32_t threshold = 0, known = 0, wanted = k;
  for (int place = 24; place >= 0; place -= 8) {
    for (int i = threadIdx.x; i < 256; i += kThreads) digits[i] = 0;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < n; i += kThreads) {
      const uint32_t key = key_of(i);
      if ((key & known) == threshold) atomicAdd(&digits[key >> place & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t above = 0;
      int digit = 255;
      while (above + digits[digit] < wanted) above += digits[digit--];
      found[0] = digit;
      found[1] = wanted - above;
    }
    __syncthreads();
    threshold |= found[0] << place;
    known |= 255u << place;
    wanted = found[1];
  }
  // Of the last digit's tokens, which are those at the threshold, all but `wanted` are passed over.
  const uint32_t passed = digits[threshold & 255] - wanted;
  uint32_t equals_before = 0, chosen_before = 0;
  int32_t* tokens = chosen.tokens + int64_t{list} * chosen.capacity;
  for (int32_t first = 0; first < n; first += kThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t key = i < n ? key_of(i) : 0;
    const bool equal = i < n && key == threshold;
    uint32_t equals, taken;
    const uint32_t rank = equals_before + CountBefore(equal, warp_counts, &equals);
    const bool take = i < n && (key > threshold || (equal && rank >= passed));
    const uint32_t at = chosen_before + CountBefore(take, warp_counts, &taken);
    if (take) tokens[at] = query.mid.first + i;
    equals_before += equals;
    chosen_before += taken;
  }
}

}  // namespace

cudaError_t SelectTopK(const DeviceQuery* queries, int32_t num_queries, const TopKScores& scores,
                       const int32_t* counts, const Selection& chosen, Stream stream) {
  int shift = 0;
  while (1 << shift < scores.tokens_per_score) ++shift;
  if (1 << shift != scores.tokens_per_score || num_queries < 0 || chosen.kv_heads < 1) {
    return cudaErrorInvalidValue;
  }
  if (num_queries == 0) return cudaSuccess;
  return LaunchBehind(TopKKernel, dim3(static_cast<unsigned>(num_queries * chosen.kv_heads)),
                      kThreads, 0, stream, queries, scores, shift, counts, chosen);
}

}  // namespace winnow::kernels::cuda
