// Mapping. A cluster of blocks is a row, each block of 1024 threads a part of it, each warp a run of
// ascending ids. A part is copied once from L2, where the product before has just left it, into shared
// memory; everything after works there. What the parts must agree about goes through distributed shared
// memory: each leaves its value in its own, the cluster's barrier follows, each reads all (Exchange).
//
// Cut, sums and weights: sample_row.cuh.
#include <algorithm>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sample.h"
#include "kernels/cuda/sample_row.cuh"
#include "kernels/token_noise.h"

namespace winnow::kernels::cuda {
namespace {

using namespace sample;  // NOLINT(google-build-using-namespace): one kernel in two files

constexpr int kMostParts = 8;                   // of a cluster, everywhere
constexpr size_t kOtherSharedBytes = 18 << 10;  // of a block, at most: its variables
static_assert(sizeof(Variables) <= kOtherSharedBytes);

struct Args {
  const float* logits;
  int64_t stride;
  const DeviceSampleRow* rows;
  SampledToken* results;
  float* workspace;  // [rows][kParts][part], where parts do not fit in shared memory
  int32_t vocab;
  int32_t part;  // ids of a block, a multiple of kThreads
};

__device__ __forceinline__ SampleStatus StatusOf(uint64_t largest) {
  const auto key = static_cast<uint32_t>(largest >> 32);
  if (key == kNanKey) return SampleStatus::kNan;
  if (key == kInfinityKey) return SampleStatus::kInfinity;
  return key == kLeastKey ? SampleStatus::kNothing : SampleStatus::kOk;
}

__device__ __forceinline__ float Edited(float logit, const LogitEdit& edit,
                                        const DeviceSampleRow& row) {
  logit = __fadd_rn(logit, edit.bias);
  if (edit.generated < 0) return logit;
  logit = logit < 0 ? __fmul_rn(logit, row.repetition_penalty)
                    : __fdiv_rn(logit, row.repetition_penalty);
  if (edit.generated == 0) return logit;
  return __fsub_rn(logit,
                   __fadd_rn(row.presence_penalty,
                             __fmul_rn(row.frequency_penalty, static_cast<float>(edit.generated))));
}

template <int kParts, bool kInShared>
__global__ void __launch_bounds__(kThreads, 1) SampleKernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (kParts > 1) return;  // never launched
#endif
  __shared__ Variables v;
  extern __shared__ float4 part_memory[];
  const int32_t row_index = static_cast<int32_t>(blockIdx.x) / kParts;
  const auto part = static_cast<int32_t>(PartIndex<kParts>());
  const int32_t first = min(part * args.part, args.vocab);
  const int32_t count = min(args.part, args.vocab - first);
  float* values = kInShared ? reinterpret_cast<float*>(part_memory)
                            : args.workspace + int64_t{blockIdx.x} * args.part;
  if (threadIdx.x == 0) v.num_top = 0;
  LetNextStart();
  WaitForEarlier();

  const float* logits = args.logits + row_index * args.stride;
  const DeviceSampleRow row = args.rows[row_index];
  SampledToken& result = args.results[row_index];
  const float* from = logits + first;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll 4
    for (int32_t i = 4 * static_cast<int32_t>(threadIdx.x); i + 4 <= count; i += 4 * kThreads) {
      *reinterpret_cast<float4*>(values + i) = __ldcg(reinterpret_cast<const float4*>(from + i));
    }
    for (int32_t i = count / 4 * 4 + static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
      values[i] = __ldcg(from + i);
    }
  } else {
#pragma unroll 4
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
      values[i] = __ldcg(from + i);
    }
  }
  __syncthreads();

  Row<kParts> r(v, values, first, count);
  uint64_t largest = r.Largest();
  SampleStatus status = StatusOf(largest);
  const float raw_max = FloatOfKey(static_cast<uint32_t>(largest >> 32));
  double log_sum = 0;
  int32_t num_top = 0;
  const Edge everything;
  if (status == SampleStatus::kOk && row.top_logprobs >= 0) {
    const Weigher weigh(raw_max, 1.0f);
    uint64_t sum = 0;
    r.Each([&](bool inside, int32_t, float logit) { sum += inside ? weigh(logit) : 0; });
    log_sum = log(static_cast<double>(r.Sum(sum)) * 0x1p-40);
    num_top = min(min(row.top_logprobs, kMaxTopLogprobs), args.vocab);
    if (num_top > 0) {
      const auto wanted = static_cast<uint64_t>(num_top);
      r.Gather(num_top == args.vocab
                   ? everything
                   : r.template Cut<true>(
                         raw_max, kBucketsPerUnit, everything, [](float) { return uint64_t{1}; },
                         [wanted](uint64_t) { return wanted; }));
    }
  }

  int32_t rank = 0;
  if (status == SampleStatus::kOk && row.given >= 0) {
    const Edge before{KeyOf(__ldcg(logits + row.given)), row.given};
    uint64_t kept = 0;
    r.Each([&](bool inside, int32_t i, float logit) {
      kept += inside && before.Keeps(KeyOf(logit), first + i) ? 1 : 0;
    });
    rank = static_cast<int32_t>(r.Sum(kept));
  } else if (status == SampleStatus::kOk &&
             (row.num_edits + row.num_masked > 0 || row.allowed != nullptr)) {
    __syncthreads();
    for (int32_t e = static_cast<int32_t>(threadIdx.x); e < row.num_edits; e += kThreads) {
      const LogitEdit edit = row.edits[e];
      const int32_t i = edit.token - first;
      if (i >= 0 && i < count) values[i] = Edited(values[i], edit, row);
    }
    __syncthreads();
    for (int32_t e = static_cast<int32_t>(threadIdx.x); e < row.num_masked; e += kThreads) {
      const int32_t i = row.masked[e] - first;
      if (i >= 0 && i < count) values[i] = -INFINITY;
    }
    if (row.allowed != nullptr) {
      for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
        const int32_t token = first + i;
        if ((row.allowed[token / 32] >> (token % 32) & 1) == 0) values[i] = -INFINITY;
      }
    }
    __syncthreads();
    largest = r.Largest();
    status = StatusOf(largest);
  }

  int32_t token =
      row.given >= 0 ? row.given : static_cast<int32_t>(~static_cast<uint32_t>(largest));
  if (status == SampleStatus::kOk && row.given < 0 && row.temperature > 0) {
    const float max = FloatOfKey(static_cast<uint32_t>(largest >> 32));
    const Weigher weigh(max, row.temperature);
    const float scale = fminf(kBucketsPerUnit / row.temperature, FLT_MAX);
    Edge edge;
    if (row.top_k > 0 && row.top_k < args.vocab) {
      const auto wanted = static_cast<uint64_t>(row.top_k);
      edge = r.template Cut<true>(
          max, scale, edge, [](float) { return uint64_t{1}; },
          [wanted](uint64_t) { return wanted; });
    }
    if (row.top_p < 1.0f) {
      const double p = row.top_p;
      edge = r.template Cut<false>(max, scale, edge, weigh, [p](uint64_t sum) {
        const auto target = static_cast<uint64_t>(ceil(p * static_cast<double>(sum)));
        return target < 1 ? 1 : target > sum ? sum : target;
      });
    }
    const auto least = static_cast<uint64_t>(ceil(static_cast<double>(row.min_p) * 0x1p40));
    uint64_t lead = 0;
    r.Each([&](bool inside, int32_t i, float logit) {
      const int32_t id = first + i;
      if (!inside || !edge.Keeps(KeyOf(logit), id)) return;
      const uint64_t weight = weigh(logit);
      if (weight == 0 || weight < least) return;
      const float v =
          (static_cast<float>(TokenNoise(row.noise, static_cast<uint32_t>(id))) + 0.5f) * 0x1p-32f;
      const float speed = static_cast<float>(weight) / -log1pf(-v);
      const uint64_t mine = r.Pack(__float_as_uint(speed), id);
      lead = mine > lead ? mine : lead;
    });
    token = static_cast<int32_t>(~static_cast<uint32_t>(r.Max(lead)));
  }

  if (part == 0 && threadIdx.x < 32) {
    const auto logprob = [&](float logit) {
      return static_cast<float>(static_cast<double>(logit) - static_cast<double>(raw_max) -
                                log_sum);
    };
    const bool good = status == SampleStatus::kOk;
    if (threadIdx.x == 0) {
      result.status = status;
      result.token = good ? token : 0;
      result.logprob = good && row.top_logprobs >= 0 ? logprob(__ldcg(logits + token)) : 0.0f;
      result.rank = good ? rank : 0;
      result.num_top = good ? num_top : 0;
    }
    if (good && static_cast<int32_t>(threadIdx.x) < num_top) {
      const uint64_t mine = v.top[threadIdx.x];
      int place = 0;
      for (int32_t i = 0; i < num_top; ++i) place += v.top[i] > mine ? 1 : 0;
      result.top[place] = {static_cast<int32_t>(~static_cast<uint32_t>(mine)),
                           logprob(FloatOfKey(static_cast<uint32_t>(mine >> 32)))};
    }
  }
  MeetParts<kParts>();  // no part goes while another may still read from it
}

// ---- launch ----

struct Plan {
  int parts = 1;
  int32_t part = 0;
  bool in_shared = false;
  size_t shared_bytes = 0;
};
Plan MakePlan(const SampleShape& shape) {
  const DeviceTraits& traits = CurrentDevice();
  const auto with = [&](int parts) {
    Plan plan;
    plan.parts = parts;
    plan.part = static_cast<int32_t>(AlignUp(CeilDiv(shape.vocab_size, parts), kThreads));
    plan.shared_bytes = size_t{4} * plan.part;
    plan.in_shared = plan.shared_bytes + kOtherSharedBytes <= traits.block_shared_bytes;
    if (!plan.in_shared) plan.shared_bytes = 0;
    return plan;
  };
  if (!traits.hopper) return with(1);
  // As many parts as the rows leave room for, side by side.
  const Plan half = with(kMostParts / 2);
  return shape.num_rows * kMostParts > traits.multiprocessors && half.in_shared ? half
                                                                                : with(kMostParts);
}

template <int kParts, bool kInShared>
cudaError_t LaunchRows(const Plan& plan, const Args& args, int32_t num_rows, Stream stream) {
  return LaunchClusters(SampleKernel<kParts, kInShared>, num_rows, kParts, kThreads,
                        plan.shared_bytes, stream, args);
}

}  // namespace

size_t SampleWorkspaceBytes(const SampleShape& shape) {
  const Plan plan = MakePlan(shape);
  return plan.in_shared ? 0 : size_t{4} * shape.num_rows * plan.parts * plan.part;
}

cudaError_t Sample(const SampleShape& shape, const float* logits, int64_t stride,
                   const DeviceSampleRow* rows, SampledToken* results, void* workspace,
                   Stream stream) {
  // Counts of a row and its runs of ids stay below 2^31, sums of weights below 2^63.
  if (shape.num_rows < 0 || shape.num_rows > 65535 || shape.vocab_size < 1 ||
      shape.vocab_size > 1 << 22 || stride < shape.vocab_size) {
    return cudaErrorInvalidValue;
  }
  if (shape.num_rows == 0) return cudaSuccess;
  const Plan plan = MakePlan(shape);
  const Args args{logits,           stride,   rows, results, static_cast<float*>(workspace),
                  shape.vocab_size, plan.part};
  if (plan.parts == kMostParts) {
    return plan.in_shared ? LaunchRows<kMostParts, true>(plan, args, shape.num_rows, stream)
                          : LaunchRows<kMostParts, false>(plan, args, shape.num_rows, stream);
  }
  if (plan.parts == kMostParts / 2) {
    return LaunchRows<kMostParts / 2, true>(plan, args, shape.num_rows, stream);
  }
  return plan.in_shared ? LaunchRows<1, true>(plan, args, shape.num_rows, stream)
                        : LaunchRows<1, false>(plan, args, shape.num_rows, stream);
}

}  // namespace winnow::kernels::cuda
