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

#include <cstdlib>
#include <cstring>

#include "kernels/cuda/bench.h"
#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {
namespace {

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

uint64_t next_seed = 1;
uint64_t host_state = 88172645463325252ull;

}  // namespace

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

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
Memory<float> RandomFloats(int64_t count, float deviation) {
  Memory<float> memory(count);
  FillFloats<<<2048, 256>>>(memory.data(), count, next_seed, deviation);
  next_seed += 1ull << 36;
  CHECK_CUDA(cudaGetLastError());
  return memory;
}
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

Bench::Bench(std::string filter, std::string shape)
    : filter_(std::move(filter)), shape_(std::move(shape)) {
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  CHECK_CUDA(cudaEventCreate(&begin_));
  CHECK_CUDA(cudaEventCreate(&end_));
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d multiprocessors, L2 %d MB\n", properties.name, properties.multiProcessorCount,
              properties.l2CacheSize >> 20);
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

double Bench::Seconds(int copies, int calls, const Call& call) {
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

void Bench::Report(const std::string& kernel, const std::string& shape, double seconds,
                   double bytes, bool over_bus, double flops) const {
  std::printf("%-16s %-46s %10.2f %10.2f %9.1f %6.1f%%", kernel.c_str(), shape.c_str(),
              seconds * 1e6, bytes / 1e6, bytes / seconds / 1e9,
              100 * bytes / seconds / (over_bus ? bus_ : read_));
  if (flops > 0) std::printf("  %.1f TFLOP/s", flops / seconds / 1e12);
  std::printf("\n");
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  std::string filter, shape;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--filter") == 0 && i + 1 < argc) {
      filter = argv[++i];
    } else if (std::strcmp(argv[i], "--shape") == 0 && i + 1 < argc) {
      shape = argv[++i];
    } else {
      std::fprintf(
          stderr,
          "usage: %s [--filter codes|masses|encode|attend|gather|fetch|far|pin|top-p|completion|"
          "sample|products|gated|blocks|int8|layer|prompt] [--shape TEXT]\n",
          argv[0]);
      return 2;
    }
  }
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  Bench bench(filter, shape);
  BenchCodes(bench);
  BenchMasses(bench);
  BenchEncode(bench);
  BenchAttention(bench);
  BenchGather(bench);
  BenchFetch(bench);
  BenchFar(bench);
  BenchPin(bench);
  BenchTopP(bench);
  BenchCompletion(bench);
  BenchSample(bench);
  BenchProducts(bench);
  BenchGated(bench);
  BenchBlocks(bench);
  BenchInt8(bench);
  BenchInt8Layer(bench);
  BenchPrompt(bench);
  return 0;
}

}  // namespace winnow::kernels::cuda

int main(int argc, char** argv) { return winnow::kernels::cuda::Main(argc, argv); }
