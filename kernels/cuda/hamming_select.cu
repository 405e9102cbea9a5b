// The plan, the scan and the launches. What a scan does to a code is in hamming_distance.cuh, what becomes
// of the distances in hamming_compact.cuh.
//
// Mapping. A row is one query and KV head; its mid tokens, from the last multiple of 16 before
// them, are cut into chunks of `chunk_tokens`. Block (x, y) is chunk x of row y, with 256 threads;
// blocks past the row's last chunk leave at once, so the grid follows from the capacity and not
// from the lengths.
//
// Scan: a thread reads units of 16 bytes (4 to 1 tokens; longer codes are several units), eight of
// them before it uses the first. Where each 16 tokens of the chunk begin is worked out first and
// kept in shared memory, or each code would wait for its block number, and find its address with a
// division; the group's pattern is made while the first codes
// fly, and later codes fly in halves, so that memory never waits for arithmetic. Popcounts are the
// scarce unit (16 a clock): words of equal weight go through full adders first, 5 popcounts instead
// of 8 for G = 4 and 128 bits. Distances are counted in shared memory: adding one is a single
// instruction that also merges equal addresses of a warp, so heavy ties cost nothing. The counts
// leave the block twice: added to the row's histogram, and as running sums of this chunk (how many
// lie below each distance).
//
// Compact: from the row's histogram T, the k-th distance, and the number of tokens at T that are
// too many, which are the earliest. Every block computes them for itself. The chunks before it are
// two differences of running sums each.
//
// Where all blocks fit on the GPU at once (up to 16384 tokens for each of four blocks on a
// multiprocessor: 1 M tokens times 8 heads on an H200) both are one launch: distances
// stay in shared memory, and the blocks of a row wait for each other in between. Otherwise they
// are two launches and distances go through L2.
//
// In a decode step the first codes (at 128K: all) are asked for before the kernel that makes the
// queries' has ended, where no kernel of the pass writes them.
//
// What was tried and lost:
//   two launches, chunks of 2048 tokens, no more than three blocks on a multiprocessor: 16.9 us at
//   128K, 44 us at 512K, 65 us at 1M (H200, 8 heads, G = 4, 128 bits);
//   a division and bounds for each code: 130 instructions per 32 codes, which bind at 1.9 TB/s;
//   one launch, all eight units read and then all used: all warps wait, then all compute; 3.1 TB/s;
//   compaction by warps, which need one barrier in all instead of two per 2048 tokens, and the cut
//   found by each warp for itself: 14.3 instead of 14.0 us at 128K, 160 instead of 152 for 24 rows;
//   all of a chunk's codes asked into L2 before the kernel ahead has ended: 14.7 instead of 13.5 us at
//   128K, 58 instead of 46 at 1M.
// Where the time goes (8K, 128K, 512K), found by leaving out what follows: to the end of the scan
// 3.6, 8.3, 19.5 us, of which 3.6 are launch, query, block table and codes, each a latency; counts
// 0.5, 0.8, 1.0; meeting 1.3, 1.5, 1.3; the cut 1.3, 1.4, 1.9; compaction 1.2, 1.9, 4.6. Counting
// in shared memory costs nothing: without it the scan takes as long.
#include <algorithm>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/hamming_compact.cuh"
#include "kernels/cuda/hamming_distance.cuh"
#include "kernels/cuda/hamming_select.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/hamming_select.h"

namespace winnow::kernels::cuda {
namespace {

using namespace hamming;

constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kUnitsInFlight = 8;  // in two halves: one flies while the other is used
constexpr int32_t kLeastChunkTokens = 1024;
constexpr int32_t kMaxChunkTokens = 32768;
constexpr int32_t kMaxFusedChunkTokens = 16384;
constexpr size_t kMaxFusedSharedBytes = 38 * 1024;  // four times, on sm_80 too
// What a block takes of a multiprocessor's shared memory beside that: its variables, and the system's.
constexpr size_t kOtherSharedBytes = 2 * 1024;

struct Plan {
  bool fused;  // one launch
  bool alone;  // HammingSelectShape's
  int32_t chunk_tokens, chunks, bins, rows;
  int64_t row_tokens;
  size_t shared_bytes;
  size_t histogram, tickets, barriers, running, distances, size_bytes;  // offsets
};

Plan MakePlan(const HammingSelectShape& shape) {
  Plan plan{};
  plan.alone = shape.alone;
  plan.rows = shape.num_queries * shape.layout.kv_heads;
  plan.bins = MaxCodeDistance(shape.group, shape.layout.bits) + 1;
  const int64_t tokens = int64_t{shape.max_mid_tokens} + kBaseAlignment - 1;
  const int64_t slots = int64_t{CurrentDevice().multiprocessors} * kBlocksPerMultiprocessor;
  // The shortest chunks with which all blocks run at once, if there are such, and no more counts
  // than distances.
  int32_t chunk = kLeastChunkTokens;
  while (chunk < kMaxChunkTokens &&
         (CeilDiv(tokens, chunk) * plan.rows > slots || chunk < plan.bins)) {
    chunk *= 2;
  }
  plan.chunk_tokens = chunk;
  plan.chunks = static_cast<int32_t>(CeilDiv(tokens, chunk));
  plan.row_tokens = int64_t{plan.chunks} * chunk;
  plan.shared_bytes = size_t{4} * (plan.bins + chunk / kBaseAlignment);
  const size_t fused_bytes = AlignUp(plan.shared_bytes, 16) + size_t{2} * chunk;
  // All blocks run at once.
  plan.fused =
      int64_t{plan.chunks} * plan.rows <= slots && chunk <= kMaxFusedChunkTokens &&
      fused_bytes <= kMaxFusedSharedBytes &&
      kBlocksPerMultiprocessor * (fused_bytes + kOtherSharedBytes) <= CurrentDevice().shared_bytes;
  if (plan.fused) plan.shared_bytes = fused_bytes;
  const auto rows = static_cast<size_t>(plan.rows);
  size_t at = 0;
  plan.histogram = at;  // two, which take turns
  at += AlignUp(rows * plan.bins * 4 * 2, 256);
  plan.tickets = at;
  at += AlignUp(rows * 4, 256);
  plan.barriers = at;
  at += AlignUp(rows * 4, 256);
  plan.running = at;
  at += AlignUp(rows * plan.chunks * (plan.bins + 1) * 2, 256);
  plan.distances = at;
  if (!plan.fused) at += AlignUp(rows * plan.row_tokens * 2, 256);
  plan.size_bytes = at;
  return plan;
}

constexpr uint32_t kMetBit = 0x80000000u;

template <int kCodeBytes, int kPlanes, bool kFused>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    ScanKernel(const __grid_constant__ Args args) {
  constexpr int kUnitTokens = kCodeBytes < 16 ? 16 / kCodeBytes : 1;
  constexpr int kUnitsPerCode = kCodeBytes < 16 ? 1 : kCodeBytes / 16;
  constexpr int kUnroll =  // codes, or units of several, in one half of what flies
      kUnitsInFlight / 2 / kUnitsPerCode > 0 ? kUnitsInFlight / 2 / kUnitsPerCode : 1;
  constexpr int kWords = kCodeBytes < 16 ? 4 : kCodeBytes / 4;
  constexpr bool kPatternInRegisters = kWords <= 4;

  LetNextStart();
  const int32_t row = blockIdx.y, head = row % args.kv_heads;
  const DeviceQuery query = args.queries[row / args.kv_heads];
  const int32_t base = BaseOf(query);
  const int32_t first = base + static_cast<int32_t>(blockIdx.x) * args.chunk_tokens;
  const int32_t last = min(first + args.chunk_tokens, query.mid.last);
  const auto put_count = [&] {
    if (kFused && blockIdx.x == 0 && threadIdx.x == 0) args.chosen.counts[row] = max(query.k, 0);
  };
  if (first >= query.mid.last || !NeedsScan(query)) {
    WaitForEarlier();
    put_count();
    if (kFused && query.k > 0) ChooseAll(args, row, query, first, last);
    return;
  }

  extern __shared__ uint4 shared4[];
  __shared__ uint32_t warp_sums[kWarps];
  __shared__ uint32_t found[2];
  __shared__ uint32_t pattern[(1 + kPlanes) * kWords];  // S, then the planes
  uint32_t* shared = reinterpret_cast<uint32_t*>(shared4);
  uint16_t* distances;  // of this chunk's tokens
  if constexpr (kFused) {
    distances = reinterpret_cast<uint16_t*>(shared);
    shared += args.chunk_tokens / 2;
  } else {
    distances = args.distances + row * args.row_tokens + (first - base);
  }
  uint32_t* counts = shared;                // [bins]
  uint32_t* segments = shared + args.bins;  // where 16 tokens' codes begin, in 16 bytes
  const uint8_t* head_codes = args.codes + head * args.head_bytes;
  for (int i = threadIdx.x; i * kBaseAlignment < last - first; i += kThreads) {
    const int32_t token = first + i * kBaseAlignment;
    const int32_t block = args.block_tokens.Divide(token);
    segments[i] =
        static_cast<uint32_t>((query.block_table[block] * args.block_bytes +
                               (token - block * args.block_tokens.divisor()) * kCodeBytes) /
                              16);
  }
  for (int i = threadIdx.x; i < args.bins; i += kThreads) counts[i] = 0;
  __syncthreads();

  constexpr int32_t kPass = kThreads * kUnitTokens * kUnroll;
  const int32_t my_token = static_cast<int32_t>(threadIdx.x) * kUnitTokens;  // of each 256 units
  const uint8_t* my_codes = head_codes + my_token % kBaseAlignment * kCodeBytes;
  const uint32_t* my_segments = segments + my_token / kBaseAlignment;
  uint4 units[2][kUnroll][kUnitsPerCode];
  // A pass that lies wholly inside the chunk needs no conditions.
  const auto load = [&](uint4(&to)[kUnroll][kUnitsPerCode], int32_t pass) {
    const uint32_t* of_pass = my_segments + (pass - first) / kBaseAlignment;
    if (pass + kPass <= last) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint8_t* code =
            my_codes +
            uint64_t{of_pass[u * (kThreads * kUnitTokens / kBaseAlignment)]} * uint64_t{16};
#pragma unroll
        for (int i = 0; i < kUnitsPerCode; ++i) to[u][i] = LoadStreamed(code + 16 * i);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (pass + u * (kThreads * kUnitTokens) + my_token >= last) continue;
        const uint8_t* code =
            my_codes +
            uint64_t{of_pass[u * (kThreads * kUnitTokens / kBaseAlignment)]} * uint64_t{16};
#pragma unroll
        for (int i = 0; i < kUnitsPerCode; ++i) to[u][i] = LoadStreamed(code + 16 * i);
      }
    }
  };
  // At 128K tokens and 8 heads this is all that a block scans, and is there before the queries' codes.
  if (query.settled != 0) {
    load(units[0], first);
    load(units[1], first + kPass);
  }
  WaitForEarlier();
  put_count();
  const uint32_t met = kFused ? __ldcg(&args.barriers[row]) & kMetBit : 0;
  if (query.settled == 0) {
    load(units[0], first);
    load(units[1], first + kPass);
  }
  if (threadIdx.x < kWords) {
    uint32_t majority, planes[kPlanes];
    MakePatternWord<kPlanes>(args.query_codes + int64_t{row} * args.group * kCodeBytes, args.group,
                             kCodeBytes, static_cast<int32_t>(threadIdx.x) * 4 % kCodeBytes,
                             &majority, planes);
    pattern[threadIdx.x] = majority;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) pattern[(1 + p) * kWords + threadIdx.x] = planes[p];
  }
  __syncthreads();
  uint32_t mine[kPatternInRegisters ? (1 + kPlanes) * kWords : 1];
  if constexpr (kPatternInRegisters) {
#pragma unroll
    for (int i = 0; i < (1 + kPlanes) * kWords; ++i) mine[i] = pattern[i];
  }
  const uint32_t* of_codes = kPatternInRegisters ? mine : pattern;

  const auto use = [&](const uint4(&from)[kUnroll][kUnitsPerCode], int32_t pass) {
    const int32_t token = pass - first + my_token;
    if (pass >= query.mid.first && pass + kPass <= last) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int32_t here = token + u * (kThreads * kUnitTokens);
        UseUnit<kCodeBytes, kPlanes, true>(from[u], of_codes, counts, distances + here, 0, 0);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int32_t here = token + u * (kThreads * kUnitTokens);
        if (first + here >= last) continue;
        UseUnit<kCodeBytes, kPlanes, false>(from[u], of_codes, counts, distances + here,
                                            query.mid.first - first - here, last - first - here);
      }
    }
  };
  for (int32_t pass = first; pass < last; pass += 2 * kPass) {
    use(units[0], pass);
    load(units[0], pass + 2 * kPass);
    use(units[1], pass + kPass);
    load(units[1], pass + 3 * kPass);
  }
  WINNOW_TIMELINE_MARK("its codes are scanned");
  // Which of the two histograms is in use; the other one is made ready for the next call.
  uint32_t* histogram = args.histogram + int64_t{row} * args.bins;
  if constexpr (kFused) {
    if (blockIdx.x == 0) {
      uint32_t* next = histogram + (met != 0 ? 0 : args.histogram_stride);
      for (int32_t bin = threadIdx.x; bin < args.bins; bin += kThreads) next[bin] = 0;
    }
    if (met != 0) histogram += args.histogram_stride;
  }
  __syncthreads();

  // Counts leave the block.
  uint16_t* running = args.running + (int64_t{row} * args.chunks + blockIdx.x) * (args.bins + 1);
  const int32_t per_thread = (args.bins + kThreads - 1) / kThreads;
  const int32_t bin_first = min(static_cast<int32_t>(threadIdx.x) * per_thread, args.bins);
  const int32_t bin_last = min(bin_first + per_thread, args.bins);
  uint32_t sum = 0, total;
  for (int32_t bin = bin_first; bin < bin_last; ++bin) sum += counts[bin];
  uint32_t below = BlockExclusiveScan<kWarps>(sum, warp_sums, &total);
  for (int32_t bin = bin_first; bin < bin_last; ++bin) {
    const uint32_t count = counts[bin];
    running[bin] = static_cast<uint16_t>(below);
    below += count;
    if (count != 0) atomicAdd(&histogram[bin], count);
  }
  if (threadIdx.x == 0) running[args.bins] = static_cast<uint16_t>(total);

  if constexpr (kFused) {
    // The row's blocks meet. All run at once, so none waits for one that has not begun. What they
    // add makes the top bit in all, whatever their number. One thread's fence stands for all that the block wrote
    // before the barrier.
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      const auto others = static_cast<uint32_t>(
          (query.mid.last - base + args.chunk_tokens - 1) / args.chunk_tokens - 1);
      atomicAdd(&args.barriers[row], blockIdx.x == 0 ? kMetBit - others : 1u);
      uint32_t seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(seen)
                     : "l"(&args.barriers[row])
                     : "memory");
      } while ((seen & kMetBit) == met);
      __threadfence();
    }
    __syncthreads();
    WINNOW_TIMELINE_MARK("all blocks of a head have counted");
    const Cut cut =
        FindCut(histogram, args.bins, static_cast<uint32_t>(query.k), counts, warp_sums, found);
    CompactChunk(args, row, query, first, last, distances, cut, warp_sums);
    WINNOW_TIMELINE_MARK("chosen");
  }
}

__global__ void __launch_bounds__(kThreads) CompactKernel(const __grid_constant__ Args args) {
  LetNextStart();
  WaitForEarlier();
  const int32_t row = blockIdx.y;
  const DeviceQuery query = args.queries[row / args.kv_heads];
  if (blockIdx.x == 0 && threadIdx.x == 0) args.chosen.counts[row] = max(query.k, 0);
  const int32_t base = BaseOf(query);
  const int32_t first = base + static_cast<int32_t>(blockIdx.x) * args.chunk_tokens;
  if (first >= query.mid.last || query.k <= 0) return;
  const int32_t last = min(first + args.chunk_tokens, query.mid.last);
  if (!NeedsScan(query)) return ChooseAll(args, row, query, first, last);

  __shared__ uint32_t warp_sums[kWarps];
  __shared__ uint32_t found[2];
  __shared__ bool is_last;
  uint32_t* histogram = args.histogram + int64_t{row} * args.bins;
  extern __shared__ uint4 shared4[];
  const Cut cut = FindCut(histogram, args.bins, static_cast<uint32_t>(query.k),
                          reinterpret_cast<uint32_t*>(shared4), warp_sums, found);
  // The last block that has read the histogram makes it ready for the next call.
  if (threadIdx.x == 0) {
    const auto final = static_cast<uint32_t>(
        (query.mid.last - base + args.chunk_tokens - 1) / args.chunk_tokens - 1);
    is_last = atomicInc(&args.tickets[row], final) == final;
  }
  __syncthreads();
  if (is_last) {
    for (int32_t bin = threadIdx.x; bin < args.bins; bin += kThreads) histogram[bin] = 0;
  }
  // Nothing to choose here?
  const uint16_t* running =
      args.running + (int64_t{row} * args.chunks + blockIdx.x) * (args.bins + 1);
  if (running[cut.threshold + 1] == 0) return;
  CompactChunk(args, row, query, first, last,
               args.distances + row * args.row_tokens + (first - base), cut, warp_sums);
}

template <typename Kernel>
bool HasRoom(Kernel* kernel, const Plan& plan) {
  int blocks = 0;  // of a multiprocessor
  if (BlocksPerMultiprocessor(kernel, kThreads, plan.shared_bytes, &blocks) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return int64_t{plan.chunks} * plan.rows <= int64_t{blocks} * CurrentDevice().multiprocessors;
}

template <int kCodeBytes, int kPlanes>
cudaError_t LaunchScan(const Plan& plan, bool fused, const Args& args, Stream stream) {
  const auto kernel =
      fused ? ScanKernel<kCodeBytes, kPlanes, true> : ScanKernel<kCodeBytes, kPlanes, false>;
  // All blocks run at once, or those that do would wait for others for ever. A cooperative launch sees to
  // it, but does not begin before the kernel ahead has ended: 4 us of each layer of a step at 128K. Alone
  // on the device it is so if there is room for all: kernels ahead end by themselves, and none that comes
  // after begins while a block is not there (launch.cuh).
  const bool cooperative = fused && !(plan.alone && HasRoom(kernel, plan));
  return Launch(kernel, dim3(plan.chunks, plan.rows), kThreads, plan.shared_bytes, stream,
                cooperative, args);
}

template <int kCodeBytes>
cudaError_t LaunchScanOfWidth(int32_t planes, const Plan& plan, bool fused, const Args& args,
                              Stream stream) {
  switch (planes) {
    case 1:
      return LaunchScan<kCodeBytes, 1>(plan, fused, args, stream);
    case 2:
      return LaunchScan<kCodeBytes, 2>(plan, fused, args, stream);
    case 3:
      return LaunchScan<kCodeBytes, 3>(plan, fused, args, stream);
    default:
      return LaunchScan<kCodeBytes, 4>(plan, fused, args, stream);
  }
}

bool IsRefused(const HammingSelectShape& shape) {
  return shape.num_queries < 0 || shape.group < 1 || shape.group > kMaxCodeGroup ||
         shape.layout.kv_heads < 1 || shape.layout.block_tokens < 16 ||
         shape.layout.block_tokens % 16 != 0 || shape.max_mid_tokens < 0 ||
         int64_t{shape.num_queries} * shape.layout.kv_heads > 65535;
}

Args MakeArgs(const HammingSelectShape& shape, const Plan& plan, const DeviceQuery* queries,
              const void* query_codes, const void* codes, const Selection& chosen,
              void* workspace) {
  auto* memory = static_cast<std::byte*>(workspace);
  return {queries,
          static_cast<const uint8_t*>(query_codes),
          static_cast<const uint8_t*>(codes),
          FastDivider(shape.layout.block_tokens),
          static_cast<int64_t>(shape.layout.BlockBytes()),
          static_cast<int64_t>(shape.layout.HeadBytes()),
          shape.layout.kv_heads,
          shape.group,
          plan.bins,
          plan.chunks,
          plan.chunk_tokens,
          0,
          plan.row_tokens,
          int64_t{plan.rows} * plan.bins,
          reinterpret_cast<uint32_t*>(memory + plan.histogram),
          reinterpret_cast<uint32_t*>(memory + plan.tickets),
          reinterpret_cast<uint32_t*>(memory + plan.barriers),
          reinterpret_cast<uint16_t*>(memory + plan.running),
          reinterpret_cast<uint16_t*>(memory + plan.distances),
          chosen};
}

cudaError_t Scan(const HammingSelectShape& shape, const Plan& plan, bool fused, const Args& args,
                 Stream stream) {
  const int32_t planes = CodePlanes(shape.group);
  switch (shape.layout.bits) {
    case 32:
      return LaunchScanOfWidth<4>(planes, plan, fused, args, stream);
    case 64:
      return LaunchScanOfWidth<8>(planes, plan, fused, args, stream);
    case 128:
      return LaunchScanOfWidth<16>(planes, plan, fused, args, stream);
    case 256:
      return LaunchScanOfWidth<32>(planes, plan, fused, args, stream);
    case 512:
      return LaunchScanOfWidth<64>(planes, plan, fused, args, stream);
    case 1024:
      return LaunchScanOfWidth<128>(planes, plan, fused, args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

size_t HammingSelectWorkspaceBytes(const HammingSelectShape& shape) {
  return MakePlan(shape).size_bytes;
}
ZeroedPart HammingSelectZeroedPart(const HammingSelectShape& shape) {
  return {0, MakePlan(shape).running};
}

cudaError_t SelectByCodes(const HammingSelectShape& shape, const DeviceQuery* queries,
                          const void* query_codes, const void* codes, const Selection& chosen,
                          void* workspace, Stream stream) {
  if (IsRefused(shape)) return cudaErrorInvalidValue;
  const Plan plan = MakePlan(shape);
  if (plan.rows == 0) return cudaSuccess;
  const Args args = MakeArgs(shape, plan, queries, query_codes, codes, chosen, workspace);
  if (const cudaError_t error = Scan(shape, plan, plan.fused, args, stream);
      error != cudaSuccess || plan.fused) {
    return error;
  }
  const size_t shared_bytes = size_t{4} * plan.bins;
  return Launch(CompactKernel, dim3(plan.chunks, plan.rows), kThreads, shared_bytes, stream, false,
                args);
}

}  // namespace winnow::kernels::cuda
