// What the files of winnow_cuda_bench share; no one else includes it.
//
//   bench.cu         what is measured against, random content, the program
//   bench_select.cc  choosing tokens: codes, encoding, top-p; completion; the next token
//   bench_rows.cc    attention over rows, and rows of pinned host memory
#ifndef WINNOW_KERNELS_CUDA_BENCH_H_
#define WINNOW_KERNELS_CUDA_BENCH_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/device_types.h"
#include "kernels/kv_layout.h"

namespace winnow::kernels::cuda {

// Ends the program if the call failed.
void Check(cudaError_t error, const char* what);
#define CHECK_CUDA(call) Check((call), #call)

// Memory of the device, zeroed.
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

// Random content, other in each call. Nearly normal, of deviation 1.15 * deviation.
Memory<std::byte> RandomBytes(int64_t bytes);
Memory<std::byte> RandomBf16(int64_t bytes, float deviation);
Memory<float> RandomFloats(int64_t count, float deviation = 1.0f);
uint64_t HostRandom();
std::vector<int32_t> ShuffledBlocks(int32_t count);
// `count` of the tokens [first, last), ascending.
std::vector<int32_t> SomeTokens(int32_t first, int32_t last, int32_t count);

// Calls are call(i, stream), i the copy to use.
using Call = std::function<cudaError_t(int, cudaStream_t)>;

class Bench {
 public:
  // Measures the limits, and says them.
  Bench(std::string filter, std::string shape);

  bool Wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }
  bool WantsShape(const std::string& shape) const {
    return shape.find(shape_) != std::string::npos;
  }
  // Enough copies of `bytes` that four times the L2 lies between two uses of one.
  static int Copies(double bytes, int most = 64) {
    return std::clamp(static_cast<int>(256e6 / std::max(bytes, 1.0)) + 1, 2, most);
  }

  // Seconds of one call.
  double Seconds(int copies, int calls, const Call& call);
  void Report(const std::string& kernel, const std::string& shape, double seconds, double bytes,
              bool over_bus = false, double flops = 0) const;

 private:
  std::string filter_, shape_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
  double read_ = 1, bus_ = 1;
};

// Behind a shape: the type of KV that is not bfloat16.
inline const char* KvText(DType dtype) {
  return dtype == DType::kI8 ? ", int8" : dtype == DType::kF8 ? ", fp8" : "";
}
inline std::string Text(const char* format, auto... values) {
  char text[200];
  std::snprintf(text, sizeof(text), format, values...);
  return text;
}

inline constexpr int32_t kKvHeads = 8, kGroup = 4, kBlock = 64;

// Queries of `batch` sequences of n tokens in one pool of shuffled blocks, their own or the same.
struct Sequences {
  Sequences(int32_t batch, int32_t n, int32_t k, bool shared = false)
      : blocks_each((n + kBlock - 1) / kBlock),
        num_blocks(shared ? blocks_each : batch * blocks_each),
        table_host(ShuffledBlocks(num_blocks)),
        table(table_host),
        queries(batch) {
    std::vector<DeviceQuery> host;
    for (int32_t i = 0; i < batch; ++i) {
      const TokenRange mid{16, n - 128};
      host.push_back({table.data() + (shared ? 0 : int64_t{i} * blocks_each), i, n - 1, mid,
                      std::min(k, mid.size()), 1});
    }
    CHECK_CUDA(cudaMemcpy(queries.data(), host.data(), host.size() * sizeof(DeviceQuery),
                          cudaMemcpyDefault));
  }
  int32_t blocks_each, num_blocks;
  std::vector<int32_t> table_host;
  Memory<int32_t> table;
  Memory<DeviceQuery> queries;
};

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

// Each does nothing if its name is not asked for.
void BenchCodes(Bench& bench);       // codes
void BenchMasses(Bench& bench);      // masses
void BenchEncode(Bench& bench);      // encode
void BenchAttention(Bench& bench);   // attend
void BenchGather(Bench& bench);      // gather
void BenchFetch(Bench& bench);       // fetch
void BenchFar(Bench& bench);         // far
void BenchPin(Bench& bench);         // pin
void BenchTopP(Bench& bench);        // top-p
void BenchCompletion(Bench& bench);  // completion
void BenchSample(Bench& bench);      // sample
void BenchProducts(Bench& bench);    // products
void BenchGated(Bench& bench);       // gated
void BenchBlocks(Bench& bench);      // blocks
void BenchInt8(Bench& bench);        // int8
void BenchInt8Layer(Bench& bench);   // layer
void BenchPrompt(Bench& bench);      // prompt

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_BENCH_H_
