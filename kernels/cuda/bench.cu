// winnow_cuda_bench: every CUDA kernel at model shapes, beside what this GPU reads and what its bus
// carries, both measured in the same run.
//
//   winnow_cuda_bench [--filter TEXT] [--shape TEXT]     only kernels, only shapes that contain
//   TEXT
//
// How: a graph of many calls is replayed, so the time of a call includes what lies between kernels
// of a captured step and nothing of the host; the median of replays is shown. Calls go round over
// so many copies of what they read that it is not in L2 when its turn comes again, as in a model,
// where a layer's codes are read once per step. Bytes are what the kernel has to read and write
// once (XBytes of the headers), so the share is of what is possible.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/completion.h"
#include "kernels/cuda/completion.h"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/hamming_select.h"
#include "kernels/cuda/hash_encode.h"
#include "kernels/cuda/int4_keys.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/cuda/row_cache.h"
#include "kernels/cuda/row_gather.h"
#include "kernels/cuda/top_p.h"
#include "kernels/dtype.h"
#include "kernels/hamming_select.h"
#include "kernels/hash_encode.h"
#include "kernels/int4_keys.h"
#include "kernels/row_attention.h"
#include "kernels/top_p.h"

namespace winnow::kernels::cuda {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK_CUDA(call) Check((call), #call)

__device__ uint32_t Mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ull;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dull;
  return static_cast<uint32_t>(x >> 32);
}
__global__ void FillBits(uint32_t* to, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = Mix(seed + i);
  }
}
// Sums of four uniform values: nearly normal, of deviation 1.15 * deviation.
__device__ float NearlyNormal(uint64_t i) {
  const uint32_t bits = Mix(i);
  float sum = -2.0f;
  for (int byte = 0; byte < 4; ++byte)
    sum += static_cast<float>(bits >> (8 * byte) & 255) / 127.5f / 2;
  return 2 * sum;
}
__global__ void FillBf16(uint16_t* to, int64_t count, uint64_t seed, float deviation) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = RoundBf16(NearlyNormal(seed + i) * deviation);
  }
}
__global__ void FillFloats(float* to, int64_t count, uint64_t seed, float deviation) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = NearlyNormal(seed + i) * deviation;
  }
}
__global__ void __launch_bounds__(512) ReadLoop(const uint4* from, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      v[u] = i + u * stride < count ? LoadStreamed(from + i + u * stride) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < 8; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x12345678) *sink = sum;
}

template <typename T>
class Memory {
 public:
  explicit Memory(int64_t count) : count_(count) {
    CHECK_CUDA(
        cudaMalloc(reinterpret_cast<void**>(&data_), std::max<size_t>(count * sizeof(T), 1)));
    CHECK_CUDA(cudaMemset(data_, 0, count * sizeof(T)));
  }
  explicit Memory(const std::vector<T>& values) : Memory(static_cast<int64_t>(values.size())) {
    CHECK_CUDA(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
  }
  Memory(Memory&& other) noexcept : count_(other.count_), data_(other.data_) {
    other.data_ = nullptr;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }
  T* data() const { return data_; }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
  T* data_ = nullptr;
};

uint64_t next_seed = 1;
Memory<std::byte> RandomBytes(int64_t bytes) {
  Memory<std::byte> memory(bytes);
  FillBits<<<2048, 256>>>(reinterpret_cast<uint32_t*>(memory.data()), bytes / 4, next_seed);
  next_seed += 1ull << 36;
  CHECK_CUDA(cudaGetLastError());
  return memory;
}
Memory<std::byte> RandomBf16(int64_t bytes, float deviation) {
  Memory<std::byte> memory(bytes);
  FillBf16<<<2048, 256>>>(reinterpret_cast<uint16_t*>(memory.data()), bytes / 2, next_seed,
                          deviation);
  next_seed += 1ull << 36;
  CHECK_CUDA(cudaGetLastError());
  return memory;
}
Memory<float> RandomFloats(int64_t count, float deviation = 1.0f) {
  Memory<float> memory(count);
  FillFloats<<<2048, 256>>>(memory.data(), count, next_seed, deviation);
  next_seed += 1ull << 36;
  CHECK_CUDA(cudaGetLastError());
  return memory;
}
uint64_t host_state = 88172645463325252ull;
uint64_t HostRandom() {
  host_state ^= host_state << 13;
  host_state ^= host_state >> 7;
  host_state ^= host_state << 17;
  return host_state;
}
std::vector<int32_t> ShuffledBlocks(int32_t count) {
  std::vector<int32_t> blocks(count);
  for (int32_t i = 0; i < count; ++i) blocks[i] = i;
  for (int32_t i = count - 1; i > 0; --i) {
    std::swap(blocks[i], blocks[HostRandom() % (i + 1)]);
  }
  return blocks;
}
// `count` of the tokens [first, last), ascending.
std::vector<int32_t> SomeTokens(int32_t first, int32_t last, int32_t count) {
  std::vector<int32_t> tokens;
  int32_t left = count;
  for (int32_t t = first; t < last && left > 0; ++t) {
    if (static_cast<int64_t>(HostRandom() % (last - t)) < left) {
      tokens.push_back(t);
      --left;
    }
  }
  return tokens;
}

// Calls are call(i, stream), i the copy to use.
using Call = std::function<cudaError_t(int, cudaStream_t)>;

class Bench {
 public:
  Bench(std::string filter, std::string shape)
      : filter_(std::move(filter)), shape_(std::move(shape)) {
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
    cudaDeviceProp properties;
    CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
    std::printf("%s, %d multiprocessors, L2 %d MB\n", properties.name,
                properties.multiProcessorCount, properties.l2CacheSize >> 20);
    {
      Memory<std::byte> memory = RandomBytes(int64_t{4} << 30);
      Memory<uint32_t> sink(1);
      const double seconds = Seconds(1, 4, [&](int, cudaStream_t stream) {
        ReadLoop<<<132 * 4, 512, 0, stream>>>(reinterpret_cast<const uint4*>(memory.data()),
                                              memory.count() / 16, sink.data());
        return cudaGetLastError();
      });
      read_ = static_cast<double>(memory.count()) / seconds;
    }
    {
      void* host = nullptr;
      const size_t bytes = size_t{256} << 20;
      CHECK_CUDA(cudaMallocHost(&host, bytes));
      std::memset(host, 1, bytes);
      Memory<std::byte> memory(static_cast<int64_t>(bytes));
      const double seconds = Seconds(1, 2, [&](int, cudaStream_t stream) {
        return cudaMemcpyAsync(memory.data(), host, bytes, cudaMemcpyHostToDevice, stream);
      });
      bus_ = static_cast<double>(bytes) / seconds;
      CHECK_CUDA(cudaFreeHost(host));
    }
    std::printf("limits measured: HBM read %.0f GB/s (4 GiB), host to device copy %.1f GB/s\n\n",
                read_ / 1e9, bus_ / 1e9);
    std::printf("%-16s %-46s %10s %10s %9s %7s\n", "kernel", "shape", "us", "MB", "GB/s", "share");
  }

  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }
  bool WantsShape(const std::string& shape) const {
    return shape.find(shape_) != std::string::npos;
  }
  // Enough copies of `bytes` that four times the L2 lies between two uses of one.
  static int Copies(double bytes, int most = 64) {
    return std::clamp(static_cast<int>(256e6 / std::max(bytes, 1.0)) + 1, 2, most);
  }

  // Seconds of one call.
  double Seconds(int copies, int calls, const Call& call) {
    calls = std::max(calls, copies);
    CHECK_CUDA(cudaDeviceSynchronize());  // memory was filled on the default stream
    for (int i = 0; i < copies; ++i) CHECK_CUDA(call(i, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) CHECK_CUDA(call(i % copies, stream_));
    CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CHECK_CUDA(cudaGraphLaunch(executable, stream_));
    std::vector<float> times;
    for (int i = 0; i < 11; ++i) {
      CHECK_CUDA(cudaEventRecord(begin_, stream_));
      CHECK_CUDA(cudaGraphLaunch(executable, stream_));
      CHECK_CUDA(cudaEventRecord(end_, stream_));
      CHECK_CUDA(cudaStreamSynchronize(stream_));
      float milliseconds;
      CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
      times.push_back(milliseconds);
    }
    CHECK_CUDA(cudaGraphExecDestroy(executable));
    CHECK_CUDA(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e-3 / calls;
  }

  void Report(const std::string& kernel, const std::string& shape, double seconds, double bytes,
              bool over_bus = false, double flops = 0) const {
    std::printf("%-16s %-46s %10.2f %10.2f %9.1f %6.1f%%", kernel.c_str(), shape.c_str(),
                seconds * 1e6, bytes / 1e6, bytes / seconds / 1e9,
                100 * bytes / seconds / (over_bus ? bus_ : read_));
    if (flops > 0) std::printf("  %.1f TFLOP/s", flops / seconds / 1e12);
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  std::string filter_, shape_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
  double read_ = 1, bus_ = 1;
};

std::string Text(const char* format, auto... values) {
  char text[200];
  std::snprintf(text, sizeof(text), format, values...);
  return text;
}

constexpr int32_t kKvHeads = 8, kGroup = 4, kBlock = 64;

// Queries of `batch` sequences of n tokens in one pool of shuffled blocks.
struct Sequences {
  Sequences(int32_t batch, int32_t n, int32_t k)
      : blocks_each((n + kBlock - 1) / kBlock),
        num_blocks(batch * blocks_each),
        table_host(ShuffledBlocks(num_blocks)),
        table(table_host),
        queries(batch) {
    std::vector<DeviceQuery> host;
    for (int32_t i = 0; i < batch; ++i) {
      const TokenRange mid{16, n - 128};
      host.push_back(
          {table.data() + int64_t{i} * blocks_each, i, n - 1, mid, std::min(k, mid.size()), 1});
    }
    CHECK_CUDA(cudaMemcpy(queries.data(), host.data(), host.size() * sizeof(DeviceQuery),
                          cudaMemcpyDefault));
  }
  int32_t blocks_each, num_blocks;
  std::vector<int32_t> table_host;
  Memory<int32_t> table;
  Memory<DeviceQuery> queries;
};

void BenchCodes(Bench& bench) {
  if (!bench.Wants("codes")) return;
  struct Case {
    int32_t batch, n, k, bits;
  };
  for (const Case c : {Case{1, 8192, 512, 128},
                       {1, 32768, 512, 128},
                       {1, 131072, 2048, 128},
                       {1, 524288, 2048, 128},
                       {1, 1 << 20, 2048, 128},
                       {1, 1 << 20, 16384, 128},
                       {1, 131072, 2048, 32},
                       {1, 131072, 2048, 256},
                       {8, 32768, 512, 128},
                       {24, 122880, 2048, 128}}) {
    const std::string text =
        Text("batch %d, n %dK, k %d, %d bits", c.batch, c.n >> 10, c.k, c.bits);
    if (!bench.WantsShape(text)) continue;
    const Sequences sequences(c.batch, c.n, c.k);
    const CodeLayout layout{kKvHeads, kBlock, c.bits};
    const HammingSelectShape shape{c.batch, kGroup, layout, c.n};
    const double bytes = static_cast<double>(sequences.num_blocks) * layout.BlockBytes();
    const int copies = Bench::Copies(bytes);
    std::vector<Memory<std::byte>> codes;
    for (int i = 0; i < copies; ++i) codes.push_back(RandomBytes(static_cast<int64_t>(bytes)));
    const auto query_codes = RandomBytes(int64_t{c.batch} * kKvHeads * kGroup * c.bits / 8);
    Memory<std::byte> workspace(static_cast<int64_t>(HammingSelectWorkspaceBytes(shape)));
    Memory<int32_t> counts(c.batch * kKvHeads), tokens(int64_t{c.batch} * kKvHeads * c.k);
    const Selection chosen{kKvHeads, c.k, counts.data(), tokens.data()};
    const double seconds = bench.Seconds(copies, 20, [&](int i, cudaStream_t stream) {
      return SelectByCodes(shape, sequences.queries.data(), query_codes.data(), codes[i].data(),
                           chosen, workspace.data(), stream);
    });
    bench.Report("codes: select", text, seconds, bytes);
  }
}

void BenchEncode(Bench& bench) {
  if (!bench.Wants("encode")) return;
  constexpr int32_t d = 128;
  struct Kind {
    const char* name;
    std::vector<int32_t> widths;
  };
  for (const Kind& kind : {Kind{"hata", {d, 128}}, Kind{"spotlight", {d, 128, 128}},
                           Kind{"hashattention", {d, 128, 128, 32}}}) {
    EncoderWeights weights;
    weights.kv_heads = kKvHeads;
    std::vector<std::vector<uint16_t>> values;
    std::vector<std::vector<float>> biases;
    for (size_t i = 0; i + 1 < kind.widths.size(); ++i) {
      values.emplace_back(int64_t{kKvHeads} * kind.widths[i] * kind.widths[i + 1]);
      for (uint16_t& value : values.back()) {
        value = ToBF16(static_cast<float>(HostRandom() % 2001) / 1000.0f - 1.0f).bits;
      }
      biases.emplace_back(int64_t{kKvHeads} * kind.widths[i + 1], 0.1f);
    }
    for (size_t i = 0; i + 1 < kind.widths.size(); ++i) {
      weights.stages.push_back({values[i], biases[i], kind.widths[i], kind.widths[i + 1]});
    }
    std::vector<std::byte> packed(PackedEncoderBytes(weights));
    constexpr int kCopies = 64;  // layers: their weights come from HBM in their turn
    std::vector<Memory<std::byte>> memory;
    std::vector<DeviceEncoder> encoders;
    for (int i = 0; i < kCopies; ++i) {
      memory.emplace_back(static_cast<int64_t>(packed.size()));
      encoders.push_back(PackEncoder(weights, packed.data(), memory.back().data()));
      CHECK_CUDA(cudaMemcpy(memory.back().data(), packed.data(), packed.size(), cudaMemcpyDefault));
    }
    const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
    const CodeLayout layout{kKvHeads, kBlock, kind.widths.back()};
    const auto flush = RandomBytes(256 << 20);
    for (const int32_t batch : {1, 24}) {
      const Sequences sequences(batch, 1024, 0);
      const auto q = RandomFloats(int64_t{batch} * kKvHeads * kGroup * d);
      Memory<std::byte> codes(int64_t{batch} * kKvHeads * kGroup * kind.widths.back() / 8);
      const double seconds = bench.Seconds(kCopies, kCopies, [&](int i, cudaStream_t stream) {
        return EncodeQueries(encoders[i], sequences.queries.data(), batch, kGroup, q.data(),
                             kKvHeads * kGroup * d, d, codes.data(), stream);
      });
      bench.Report("encode: queries", Text("%s, batch %d", kind.name, batch), seconds,
                   EncodeBytes(int64_t{batch} * kGroup, 4.0 * d, weights), false,
                   EncodeFlops(int64_t{batch} * kGroup, weights));
    }
    for (const int32_t tokens : {1, 8192}) {
      const Sequences sequences(1, std::max(tokens, 1024), 0);
      const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
      Memory<std::byte> codes(static_cast<int64_t>(sequences.num_blocks * layout.BlockBytes()));
      const Memory<DeviceKeySpan> spans(
          std::vector<DeviceKeySpan>{{sequences.table.data(), {0, tokens}}});
      const double seconds = bench.Seconds(kCopies, kCopies, [&](int i, cudaStream_t stream) {
        return EncodeKeys(encoders[i], spans.data(), 1, tokens, pool.data(), kv, codes.data(),
                          layout, stream);
      });
      bench.Report("encode: keys", Text("%s, %d tokens", kind.name, tokens), seconds,
                   EncodeBytes(tokens, 2.0 * d, weights), false, EncodeFlops(tokens, weights));
    }
  }
}

// Addresses of `rows` tokens of each sequence and head in pools of which copy i begins at pools[i].
struct Lists {
  Lists(const Sequences& sequences, int32_t batch, int32_t n, int32_t chosen, const KvLayout& kv,
        const std::vector<std::byte*>& pools) {
    for (std::byte* pool : pools) {
      std::vector<const std::byte*> of_copy;
      for (int32_t i = 0; i < batch; ++i) {
        for (int32_t head = 0; head < kv.kv_heads; ++head) {
          for (const int32_t t : SomeTokens(0, n, chosen)) {
            of_copy.push_back(
                pool + kv.RowOffset(sequences.table_host[i * sequences.blocks_each + t / kBlock],
                                    head, t % kBlock));
          }
        }
      }
      addresses.emplace_back(of_copy);
      std::vector<RowList> of_lists;
      for (int32_t l = 0; l < batch * kv.kv_heads; ++l) {
        of_lists.push_back({addresses.back().data() + int64_t{l} * chosen, chosen, 0, 0});
      }
      lists.emplace_back(of_lists);
    }
  }
  std::vector<Memory<const std::byte*>> addresses;
  std::vector<Memory<RowList>> lists;
};

void BenchAttention(Bench& bench) {
  if (!bench.Wants("attend")) return;
  struct Case {
    int32_t batch, n, rows, d;
  };
  for (const Case c : {Case{1, 131072, 656, 128},
                       {1, 131072, 2192, 128},
                       {1, 131072, 16528, 128},
                       {1, 131072, 2192, 64},
                       {1, 131072, 2192, 96},
                       {24, 32768, 656, 128},
                       {24, 32768, 2192, 128}}) {
    const std::string text =
        Text("batch %d, %d rows a head of %dK, d %d", c.batch, c.rows, c.n >> 10, c.d);
    if (!bench.WantsShape(text)) continue;
    const KvLayout kv{kKvHeads, c.d, kBlock, DType::kBF16};
    const Sequences sequences(c.batch, c.n, 0);
    const double bytes =
        AttendRowsBytes(int64_t{c.batch} * kKvHeads * c.rows, c.batch * kKvHeads * kGroup, kv);
    const int copies = Bench::Copies(bytes, 4);
    // The pool is far larger than L2; copies choose other rows of it.
    const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
    const std::vector<std::byte*> pools(std::max(copies, Bench::Copies(bytes, 32)), pool.data());
    const Lists lists(sequences, c.batch, c.n, c.rows, kv, pools);
    const auto q = RandomFloats(int64_t{c.batch} * kKvHeads * kGroup * c.d);
    const RowAttentionShape shape{c.batch, kGroup, kv, c.rows};
    Memory<std::byte> workspace(static_cast<int64_t>(RowAttentionWorkspaceBytes(shape)));
    Memory<float> states(int64_t{c.batch} * kKvHeads * kGroup * (c.d + 2));
    const double seconds =
        bench.Seconds(static_cast<int>(pools.size()), 20, [&](int i, cudaStream_t stream) {
          return AttendRows(shape, q.data(), kKvHeads * kGroup * c.d, sequences.queries.data(),
                            lists.lists[i].data(), 0.1f, {.states = states.data()},
                            workspace.data(), stream);
        });
    bench.Report("attend: rows", text, seconds, bytes, false,
                 AttendRowsFlops(int64_t{c.batch} * kKvHeads * c.rows, kGroup, c.d));
  }
  for (const Case c : {Case{1, 8192, 0, 128},
                       {1, 32768, 0, 128},
                       {1, 131072, 0, 128},
                       {1, 1 << 20, 0, 128},
                       {1, 131072, 0, 64},
                       {24, 32768, 0, 128}}) {
    const std::string text = Text("batch %d, n %dK, d %d", c.batch, c.n >> 10, c.d);
    if (!bench.WantsShape(text)) continue;
    const KvLayout kv{kKvHeads, c.d, kBlock, DType::kBF16};
    const Sequences sequences(c.batch, c.n, 0);
    const double bytes = static_cast<double>(sequences.num_blocks) * kv.BlockBytes();
    const int copies = Bench::Copies(bytes, 16);
    std::vector<Memory<std::byte>> pools;
    for (int i = 0; i < copies; ++i) pools.push_back(RandomBf16(static_cast<int64_t>(bytes), 1));
    const auto q = RandomFloats(int64_t{c.batch} * kKvHeads * kGroup * c.d);
    const RowAttentionShape shape{c.batch, kGroup, kv, c.n};
    Memory<std::byte> workspace(static_cast<int64_t>(RowAttentionWorkspaceBytes(shape)));
    Memory<float> out(int64_t{c.batch} * kKvHeads * kGroup * c.d);
    const AttentionOutput output{nullptr, out.data(), kKvHeads * kGroup * c.d};
    const double seconds = bench.Seconds(copies, 10, [&](int i, cudaStream_t stream) {
      return AttendPaged(shape, q.data(), kKvHeads * kGroup * c.d, sequences.queries.data(),
                         pools[i].data(), 0.1f, output, workspace.data(), stream);
    });
    bench.Report("attend: dense", text, seconds, bytes, false,
                 AttendRowsFlops(int64_t{c.batch} * kKvHeads * c.n, kGroup, c.d));
  }
}

void BenchGather(Bench& bench) {
  if (!bench.Wants("gather")) return;
  constexpr int32_t n = 131072, d = 128;
  const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
  const Sequences sequences(1, n, 0);
  const size_t pool_bytes = sequences.num_blocks * kv.BlockBytes();  // 512 MiB
  std::byte* host = nullptr;
  CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(&host), pool_bytes));
  const auto pool = RandomBf16(static_cast<int64_t>(pool_bytes), 1);
  CHECK_CUDA(cudaMemcpy(host, pool.data(), pool_bytes, cudaMemcpyDefault));
  const auto q = RandomFloats(kKvHeads * kGroup * d);
  Memory<float> states(kKvHeads * kGroup * (d + 2));
  const int copies = 8;
  for (const int32_t each : {64, 256, 2048}) {  // rows of each of 8 heads: 512 to 16384 in all
    const Lists lists(sequences, 1, n, each, kv, std::vector<std::byte*>(copies, host));
    const Lists resident(sequences, 1, n, 2192, kv, std::vector<std::byte*>(copies, pool.data()));
    const int32_t rows = each * kKvHeads;
    Memory<std::byte> cache(int64_t{rows} * static_cast<int64_t>(kv.RowBytes()));
    std::vector<std::byte*> targets_host;
    for (int32_t i = 0; i < rows; ++i) {
      targets_host.push_back(cache.data() + i * static_cast<int64_t>(kv.RowBytes()));
    }
    const Memory<std::byte*> targets(targets_host);
    const Memory<int32_t> count(std::vector<int32_t>{rows});
    const double bytes = static_cast<double>(rows) * static_cast<double>(kv.RowBytes());
    const auto gather = [&](int blocks) {
      return [&, blocks](int i, cudaStream_t stream) {
        return GatherRows(lists.addresses[i].data(), targets.data(), count.data(),
                          static_cast<int32_t>(kv.RowBytes()), blocks, stream);
      };
    };
    double alone = 0;
    for (const int blocks : {4, 8, 16, 32, 132}) {
      const double seconds = bench.Seconds(copies, 16, gather(blocks));
      if (blocks == kGatherBlocks) alone = seconds;
      bench.Report("gather: copy", Text("%d rows of 512 B, %d blocks", rows, blocks), seconds,
                   bytes, true);
    }
    const RowAttentionShape shape{1, kGroup, kv, 2192};
    Memory<std::byte> workspace(static_cast<int64_t>(RowAttentionWorkspaceBytes(shape)));
    const double in_place = bench.Seconds(copies, 16, [&](int i, cudaStream_t stream) {
      return AttendRows(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                        lists.lists[i].data(), 0.1f, {.states = states.data()}, workspace.data(),
                        stream);
    });
    bench.Report("gather: attend", Text("%d rows of 512 B read from the host in place", rows),
                 in_place, bytes, true);
    // Attention over 2192 resident rows a head beside the gather, ten times to be as long.
    const int times = std::max(1, static_cast<int>(alone / 8e-6));
    const auto attend_many = [&](int i, cudaStream_t stream) {
      for (int t = 0; t < times; ++t) {
        const cudaError_t error =
            AttendRows(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                       resident.lists[(i + t) % copies].data(), 0.1f, {.states = states.data()},
                       workspace.data(), stream);
        if (error != cudaSuccess) return error;
      }
      return cudaSuccess;
    };
    const double attend = bench.Seconds(copies, 16, attend_many);
    cudaStream_t second;
    cudaEvent_t fork, join;
    CHECK_CUDA(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    const double together = bench.Seconds(copies, 16, [&](int i, cudaStream_t stream) {
      cudaEventRecord(fork, stream);
      cudaStreamWaitEvent(second, fork, 0);
      if (const auto error = gather(kGatherBlocks)(i, second); error != cudaSuccess) return error;
      cudaEventRecord(join, second);
      if (const auto error = attend_many(i, stream); error != cudaSuccess) return error;
      return cudaStreamWaitEvent(stream, join, 0);
    });
    std::printf(
        "                 gather alone %.1f us, %d attentions alone %.1f us, together %.1f us\n",
        alone * 1e6, times, attend * 1e6, together * 1e6);
    CHECK_CUDA(cudaEventDestroy(fork));
    CHECK_CUDA(cudaEventDestroy(join));
    CHECK_CUDA(cudaStreamDestroy(second));
  }
  CHECK_CUDA(cudaFreeHost(host));
}

// FetchRows at several shares of hits: lists of 8 copies have so many rows in common, and the cache holds
// three lists, so the other rows are gone when their copy's turn comes again.
void BenchFetch(Bench& bench) {
  if (!bench.Wants("fetch")) return;
  constexpr int32_t n = 524288, d = 128, kCopies = 8;
  const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
  const Sequences sequences(1, n, 0);
  const size_t pool_bytes = sequences.num_blocks * kv.BlockBytes();  // 2 GiB
  const Buffer host = AllocatePinned(0, pool_bytes);
  if (host.data() == nullptr) {
    std::printf("fetch: %zu bytes cannot be pinned\n", pool_bytes);
    return;
  }
  const int64_t pool_rows = int64_t{sequences.num_blocks} * kKvHeads * kBlock;
  for (const int32_t each : {64, 256, 2048}) {  // rows of each of 8 heads
    for (const int32_t hits : {0, 50, 90, 100}) {
      const int32_t common = each * hits / 100, slots = 3 * each * kKvHeads;
      std::vector<std::vector<int32_t>> shared_tokens;
      for (int head = 0; head < kKvHeads; ++head) {
        shared_tokens.push_back(SomeTokens(0, n, common));
      }
      std::vector<Memory<int32_t>> tokens;
      for (int copy = 0; copy < kCopies; ++copy) {
        std::vector<int32_t> of_copy;
        for (int head = 0; head < kKvHeads; ++head) {
          std::vector<int32_t> list = shared_tokens[head];
          const auto more = SomeTokens(0, n, each - common);
          list.insert(list.end(), more.begin(), more.end());
          std::sort(list.begin(), list.end());
          of_copy.insert(of_copy.end(), list.begin(), list.end());
        }
        tokens.emplace_back(of_copy);
      }
      const Memory<int32_t> counts(std::vector<int32_t>(kKvHeads, each));
      const Memory<DeviceQuery> query(
          std::vector<DeviceQuery>{{sequences.table.data(), 0, n - 1, {0, n}, each, 0}});
      Memory<std::byte> cached(slots * static_cast<int64_t>(kv.RowBytes()));
      Memory<int32_t> map(pool_rows);
      CHECK_CUDA(cudaMemset(map.data(), 0xff, pool_rows * 4));
      const Memory<RowCacheSlot> of_slots(std::vector<RowCacheSlot>(slots, kFreeSlot));
      const Memory<RowCacheState> state(std::vector<RowCacheState>(1));
      Memory<SharedKvReads> reads(1);
      Memory<const std::byte*> rows(int64_t{each} * kKvHeads);
      Memory<RowList> lists(kKvHeads);
      const DeviceRowCache cache{static_cast<std::byte*>(host.data()),
                                 cached.data(),
                                 map.data(),
                                 of_slots.data(),
                                 state.data(),
                                 slots,
                                 static_cast<int32_t>(kv.RowBytes())};
      const double seconds = bench.Seconds(kCopies, 16, [&](int i, cudaStream_t stream) {
        const Selection chosen{kKvHeads, each, counts.data(), tokens[i].data()};
        return FetchRows(query.data(), 1, chosen, cache, kv, each, rows.data(), lists.data(),
                         reads.data(), stream);
      });
      SharedKvReads read;
      CHECK_CUDA(cudaMemcpy(&read, reads.data(), sizeof read, cudaMemcpyDefault));
      const double all = static_cast<double>(read.cached) + read.fetched + read.in_place;
      const double missing = (read.fetched + read.in_place) / all;
      bench.Report("fetch: rows",
                   Text("%d rows of 512 B, %.0f%% cached", each * kKvHeads, 100 * (1 - missing)),
                   seconds, missing * each * kKvHeads * static_cast<double>(kv.RowBytes()), true);
    }
  }
}

// Rows anywhere in an arena: beyond some GiB, looking up addresses costs more than the bus.
void BenchFar(Bench& bench) {
  if (!bench.Wants("far")) return;
  constexpr int32_t kCopies = 16, kRowBytes = 512;
  for (const size_t gib : {2, 48}) {
    const size_t bytes = gib << 30;
    const Buffer host = AllocatePinned(0, bytes);
    if (host.data() == nullptr) {
      std::printf("far: %zu GiB cannot be pinned\n", gib);
      continue;
    }
    for (const int32_t rows : {2048, 16384, 131072}) {
      std::vector<Memory<const std::byte*>> sources;
      for (int copy = 0; copy < kCopies; ++copy) {
        std::vector<const std::byte*> of_copy(rows);
        for (const std::byte*& row : of_copy) {
          row = static_cast<const std::byte*>(host.data()) +
                HostRandom() % (bytes / kRowBytes) * kRowBytes;
        }
        std::sort(of_copy.begin(), of_copy.end());
        sources.emplace_back(of_copy);
      }
      Memory<std::byte> target(int64_t{rows} * kRowBytes);
      std::vector<std::byte*> targets_host(rows);
      for (int32_t i = 0; i < rows; ++i) targets_host[i] = target.data() + int64_t{i} * kRowBytes;
      const Memory<std::byte*> targets(targets_host);
      const Memory<int32_t> count(std::vector<int32_t>{rows});
      const double seconds = bench.Seconds(kCopies, kCopies, [&](int i, cudaStream_t stream) {
        return GatherRows(sources[i].data(), targets.data(), count.data(), kRowBytes, kGatherBlocks,
                          stream);
      });
      bench.Report("far: gather", Text("%d rows of %zu GiB", rows, gib), seconds,
                   static_cast<double>(rows) * kRowBytes, true);
    }
  }
}

// What pinning host memory takes, by threads and pieces.
void BenchPin(Bench& bench) {
  if (!bench.Wants("pin")) return;
  const size_t bytes = size_t{8} << 30;
  const auto report = [&](const std::string& shape, auto make) {
    const auto begin = std::chrono::steady_clock::now();
    const bool made = make();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    bench.Report(made ? "pin" : "pin: refused", shape, seconds.count(), static_cast<double>(bytes),
                 true);
  };
  Buffer memory;
  // The first one also takes the pages from the system.
  for (const int threads : {16, 1, 4, 16}) {
    for (const size_t piece : {size_t{64} << 20, size_t{256} << 20, size_t{1} << 30}) {
      if (threads < 16 && piece != size_t{256} << 20) continue;
      report(Text("8 GiB, %d threads, pieces of %zu MiB", threads, piece >> 20), [&] {
        memory = AllocatePinned(0, bytes, threads, piece);
        return memory.data() != nullptr;
      });
      report(Text("8 GiB, %d threads, pieces of %zu MiB, undone", threads, piece >> 20), [&] {
        memory = Buffer();
        return true;
      });
    }
  }
  void* host = nullptr;
  report("8 GiB, cudaHostAlloc",
         [&] { return cudaHostAlloc(&host, bytes, cudaHostAllocDefault) == cudaSuccess; });
  CHECK_CUDA(cudaFreeHost(host));
}

void BenchTopP(Bench& bench) {
  if (!bench.Wants("top-p")) return;
  constexpr int32_t n = 131072;
  for (const int32_t d : {64, 128}) {
    const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
    const Sequences sequences(1, n, 0);
    const int64_t key_bytes = static_cast<int64_t>(sequences.num_blocks * Int4BlockBytes(kv));
    const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
    constexpr int kCopies = 6;
    std::vector<Memory<std::byte>> keys;
    for (int i = 0; i < kCopies; ++i) keys.emplace_back(key_bytes);
    const Memory<DeviceKeySpan> spans(std::vector<DeviceKeySpan>{{sequences.table.data(), {0, n}}});
    const double quantize = bench.Seconds(kCopies, kCopies, [&](int i, cudaStream_t stream) {
      return QuantizeKeys(spans.data(), 1, n, pool.data(), kv, keys[i].data(), stream);
    });
    bench.Report("top-p: quantize", Text("%dK tokens, d %d", n >> 10, d), quantize,
                 QuantizeKeysBytes(n, kv), false);
    for (const int32_t candidates : {2048, 8192}) {
      std::vector<int32_t> counts_host(kKvHeads, candidates), tokens_host;
      for (int head = 0; head < kKvHeads; ++head) {
        const auto some = SomeTokens(16, n - 128, candidates);
        tokens_host.insert(tokens_host.end(), some.begin(), some.end());
      }
      const Memory<int32_t> counts(counts_host), tokens(tokens_host);
      Memory<int32_t> kept_counts(kKvHeads), kept_tokens(int64_t{kKvHeads} * candidates);
      const Selection from{kKvHeads, candidates, counts.data(), tokens.data()};
      const Selection kept{kKvHeads, candidates, kept_counts.data(), kept_tokens.data()};
      const auto q = RandomFloats(kKvHeads * kGroup * d, 4.0f);
      const TopPShape shape{1, kGroup, kv, 144, candidates};
      Memory<std::byte> workspace(static_cast<int64_t>(TopPWorkspaceBytes(shape)));
      const double seconds = bench.Seconds(kCopies, 18, [&](int i, cudaStream_t stream) {
        return PruneSelection(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                              keys[i].data(), 1.0f / 11, 0.9f, from, kept, workspace.data(),
                              stream);
      });
      std::vector<int32_t> left(kKvHeads);
      CHECK_CUDA(cudaMemcpy(left.data(), kept_counts.data(), 4 * kKvHeads, cudaMemcpyDefault));
      bench.Report("top-p: prune",
                   Text("%d candidates a head, d %d; head 0 keeps %d", candidates, d, left[0]),
                   seconds, PruneSelectionBytes(int64_t{kKvHeads} * (candidates + 144), kv));
    }
  }
}

void BenchCompletion(Bench& bench) {
  if (!bench.Wants("completion")) return;
  constexpr int32_t n = 131072, d = 128, kInner = 128, kFeatures = 64;
  const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
  const Sequences sequences(1, n, 0);
  const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
  const auto gate_up = RandomFloats(int64_t{kKvHeads} * d * 2 * kInner, 0.05f);
  const auto out = RandomFloats(int64_t{kKvHeads} * (d + kInner) * kFeatures, 0.05f);
  const auto bias = RandomFloats(kKvHeads * 2 * kInner, 0.1f);
  const DeviceFeatureMap map{gate_up.data(), bias.data(), out.data(), bias.data(),
                             kKvHeads,       d,           kInner,     kFeatures};
  Memory<float> summary(kKvHeads * SummaryFloats(kFeatures, d));
  for (const int32_t tokens : {1, 8192}) {
    const Memory<DeviceExtension> extension(std::vector<DeviceExtension>{
        {sequences.table.data(), summary.data(), {16, 16 + tokens}, 1, 0}});
    Memory<std::byte> workspace(
        static_cast<int64_t>(ExtendSummariesWorkspaceBytes(1, tokens, map)));
    const double seconds = bench.Seconds(1, 4, [&](int, cudaStream_t stream) {
      return ExtendSummaries(extension.data(), 1, tokens, pool.data(), kv, map, workspace.data(),
                             stream);
    });
    bench.Report("completion: enter", Text("%d tokens, d %d, F %d", tokens, d, kFeatures), seconds,
                 kKvHeads * CompletionBytes(tokens, kv, kInner, kFeatures), false,
                 kKvHeads * CompletionFlops(tokens, 0, d, kInner, kFeatures));
  }
  for (const int32_t chosen : {655, 2048}) {
    const Lists lists(sequences, 1, n, chosen, kv, {pool.data()});
    std::vector<RowList> host(kKvHeads);
    CHECK_CUDA(cudaMemcpy(host.data(), lists.lists[0].data(), kKvHeads * sizeof(RowList),
                          cudaMemcpyDefault));
    for (RowList& list : host) list.chosen_last = list.count;
    const Memory<RowList> all_chosen(host);
    const auto q = RandomFloats(kKvHeads * kGroup * d);
    const Memory<const float*> summaries(std::vector<const float*>{summary.data()});
    const CompletionShape shape{1, kGroup, kv, chosen};
    Memory<std::byte> workspace(static_cast<int64_t>(CompleteStatesWorkspaceBytes(shape, map)));
    auto states = RandomFloats(kKvHeads * kGroup * (d + 2));
    const double seconds = bench.Seconds(1, 8, [&](int, cudaStream_t stream) {
      return CompleteStates(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                            all_chosen.data(), summaries.data(), map, map, states.data(),
                            workspace.data(), stream);
    });
    bench.Report("completion: step", Text("%d chosen a head, d %d, F %d", chosen, d, kFeatures),
                 seconds, kKvHeads * CompletionBytes(chosen, kv, kInner, kFeatures), false,
                 kKvHeads * CompletionFlops(chosen, kGroup, d, kInner, kFeatures));
  }
}

}  // namespace

int Main(int argc, char** argv) {
  std::string filter, shape;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--filter") == 0 && i + 1 < argc) {
      filter = argv[++i];
    } else if (std::strcmp(argv[i], "--shape") == 0 && i + 1 < argc) {
      shape = argv[++i];
    } else {
      std::fprintf(stderr,
                   "usage: %s [--filter codes|encode|attend|gather|fetch|far|pin|top-p|completion] "
                   "[--shape TEXT]\n",
                   argv[0]);
      return 2;
    }
  }
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  Bench bench(filter, shape);
  BenchCodes(bench);
  BenchEncode(bench);
  BenchAttention(bench);
  BenchGather(bench);
  BenchFetch(bench);
  BenchFar(bench);
  BenchPin(bench);
  BenchTopP(bench);
  BenchCompletion(bench);
  return 0;
}

}  // namespace winnow::kernels::cuda

int main(int argc, char** argv) { return winnow::kernels::cuda::Main(argc, argv); }
