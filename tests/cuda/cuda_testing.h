// What tests of the CUDA kernels share: memory on the device that owns itself and starts as NaN,
// sequences in the device's memory, queries as the kernels take them.
#ifndef WINNOW_TESTS_CUDA_CUDA_TESTING_H_
#define WINNOW_TESTS_CUDA_CUDA_TESTING_H_

#include <cuda_runtime_api.h>

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/device_types.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/paged_kv.h"
#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels::cuda {

#define WINNOW_CUDA_OK(call)                                                       \
  do {                                                                             \
    const cudaError_t error = (call);                                              \
    if (error != cudaSuccess) {                                                    \
      ADD_FAILURE() << #call << ": " << cudaGetErrorString(error);                 \
      throw std::runtime_error("CUDA"); /* nothing after it would mean anything */ \
    }                                                                              \
  } while (false)

// `count` values on the device; bytes 0xff (NaN, -1) until something is written.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    WINNOW_CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<size_t>(bytes(), 1)));
    Poison();
  }
  template <typename Values>
  explicit DeviceArray(const Values& values) requires requires {
    values.data();
  } : DeviceArray(values.size()) {
    Set(values);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  DeviceArray(DeviceArray&& other) noexcept : count_(other.count_), data_(other.data_) {
    other.data_ = nullptr;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  template <typename Values>
  void Set(const Values& values) {
    WINNOW_CUDA_OK(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
    WINNOW_CUDA_OK(cudaDeviceSynchronize());
  }
  void Zero() { Fill(0); }
  void Poison() { Fill(0xff); }
  std::vector<T> Get() const {
    std::vector<T> values(count_);
    WINNOW_CUDA_OK(cudaDeviceSynchronize());
    WINNOW_CUDA_OK(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  // Waits, as do copies to the device: a stream of the backend's own does not wait for the default
  // one, on which a copy may still be on its way when cudaMemcpy returns.
  void Fill(int byte) {
    WINNOW_CUDA_OK(cudaMemset(data_, byte, bytes()));
    WINNOW_CUDA_OK(cudaDeviceSynchronize());
  }

  size_t count_ = 0;
  T* data_ = nullptr;
};

// A kernel's workspace, zeroed as the kernels want it.
class Workspace : public DeviceArray<std::byte> {
 public:
  explicit Workspace(size_t size_bytes) : DeviceArray<std::byte>(size_bytes) { Zero(); }
};

// Queries and their block tables on the device.
class DeviceQueries {
 public:
  explicit DeviceQueries(const std::vector<RetrievalQuery>& queries) : queries_(queries.size()) {
    std::vector<DeviceQuery> on_device;
    for (const RetrievalQuery& query : queries) {
      tables_.emplace_back(query.block_table);
      on_device.push_back({tables_.back().data(), query.row, query.position, query.mid, query.k,
                           query.least_key, 0});
    }
    queries_.Set(on_device);
  }
  const DeviceQuery* data() const { return queries_.data(); }
  int32_t size() const { return static_cast<int32_t>(queries_.size()); }

 private:
  std::vector<DeviceArray<int32_t>> tables_;
  DeviceArray<DeviceQuery> queries_;
};

class DeviceSpans {
 public:
  explicit DeviceSpans(const std::vector<KeySpan>& spans) : spans_(spans.size()) {
    std::vector<DeviceKeySpan> on_device;
    for (const KeySpan& span : spans) {
      const int32_t* const table = tables_.emplace_back(span.block_table).data();
      const int32_t* const index_table =
          span.index_table.empty() ? table : tables_.emplace_back(span.index_table).data();
      on_device.push_back({table, span.tokens, index_table});
      max_tokens_ = std::max(max_tokens_, span.tokens.size());
    }
    spans_.Set(on_device);
  }
  const DeviceKeySpan* data() const { return spans_.data(); }
  int32_t size() const { return static_cast<int32_t>(spans_.size()); }
  int32_t max_tokens() const { return max_tokens_; }

 private:
  std::vector<DeviceArray<int32_t>> tables_;
  DeviceArray<DeviceKeySpan> spans_;
  int32_t max_tokens_ = 0;
};

// A selection in device memory; what is not written keeps -1.
class DeviceSelection {
 public:
  DeviceSelection(size_t queries, int32_t kv_heads, int32_t capacity)
      : kv_heads_(kv_heads),
        capacity_(capacity),
        counts_(queries * kv_heads),
        tokens_(queries * kv_heads * capacity) {}
  Selection view() const { return {kv_heads_, capacity_, counts_.data(), tokens_.data()}; }
  std::vector<int32_t> Counts() const { return counts_.Get(); }
  // Of each query and head; checks that nothing was written past what was chosen.
  std::vector<std::vector<int32_t>> Chosen() const {
    const std::vector<int32_t> counts = counts_.Get(), tokens = tokens_.Get();
    std::vector<std::vector<int32_t>> chosen;
    for (size_t i = 0; i < counts.size(); ++i) {
      const auto first = tokens.begin() + static_cast<int64_t>(i) * capacity_;
      if (counts[i] < 0 || counts[i] > capacity_) {
        ADD_FAILURE() << "count " << counts[i] << " of list " << i;
        return chosen;
      }
      chosen.emplace_back(first, first + counts[i]);
      for (int32_t j = counts[i]; j < capacity_; ++j) {
        if (first[j] == -1) continue;
        ADD_FAILURE() << "list " << i << " was written past its end";
        break;
      }
    }
    return chosen;
  }
  void Set(const std::vector<std::vector<int32_t>>& chosen) {
    std::vector<int32_t> counts, tokens(tokens_.size(), -1);
    for (size_t i = 0; i < chosen.size(); ++i) {
      counts.push_back(static_cast<int32_t>(chosen[i].size()));
      std::copy(chosen[i].begin(), chosen[i].end(),
                tokens.begin() + static_cast<int64_t>(i) * capacity_);
    }
    counts_.Set(counts);
    tokens_.Set(tokens);
  }
  void Poison() {
    counts_.Poison();
    tokens_.Poison();
  }

 private:
  int32_t kv_heads_, capacity_;
  DeviceArray<int32_t> counts_, tokens_;
};

// Types that KV may have on a device.
inline constexpr DType kCudaKvTypes[] = {DType::kBF16, DType::kI8, DType::kF8};
inline DType AnyCudaKvType(Random& random) { return kCudaKvTypes[random.Int(0, 2)]; }
// Head dimensions that kernels have; of 256 KV lies in bfloat16.
inline constexpr int32_t kCudaHeadDims[] = {64, 80, 96, 128, 256};
inline DType CudaKvTypeOf(int32_t head_dim, DType type) {
  return head_dim > 128 ? DType::kBF16 : type;
}

// The pool of such a type with its values rounded to bfloat16, as a pool of that: same blocks, NaN where rows were never
// written.
inline DeviceArray<std::byte> UploadRounded(const PagedKv& kv, KvLayout* rounded_layout) {
  const KvLayout& layout = kv.layout();
  KvLayout rounded = layout;
  rounded.dtype = DType::kBF16;
  std::vector<std::byte> pool(kv.num_blocks() * rounded.BlockBytes());
  std::vector<float> key(layout.head_dim), value(layout.head_dim);
  for (int32_t block = 0; block < kv.num_blocks(); ++block) {
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      for (int32_t token = 0; token < layout.block_tokens; ++token) {
        const std::byte* row =
            static_cast<const std::byte*>(kv.pool()) + layout.RowOffset(block, head, token);
        for (int32_t c = 0; c < layout.head_dim; ++c) {
          key[c] = KeyAt(row, layout, c);
          value[c] = ValueAt(row, layout, c);
        }
        PutKvRow(key.data(), value.data(), rounded, &pool[rounded.RowOffset(block, head, token)]);
      }
    }
  }
  *rounded_layout = rounded;
  return DeviceArray<std::byte>(pool);
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    ASSERT_EQ(error, cudaSuccess) << "no CUDA device: " << cudaGetErrorString(error);
    ASSERT_GT(devices, 0) << "no CUDA device";
    RecordProperty("seed", std::to_string(random_.seed()));
  }
  void TearDown() override { EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess); }
  std::string Seed() const { return "WINNOW_TEST_SEED=" + std::to_string(random_.seed()); }
  // Whether the device must have the kernels of its matrix instructions.
  static bool IsHopper() {
    int major = 0;
    EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    return major == 9;
  }

  Random random_;
};

// Bytes of a paged pool on the device.
inline DeviceArray<std::byte> UploadPool(const PagedKv& kv) {
  return DeviceArray<std::byte>(std::span<const std::byte>(
      static_cast<const std::byte*>(kv.pool()), kv.num_blocks() * kv.layout().BlockBytes()));
}

// A matrix with the gaps between its rows; behind the last there is none.
inline DeviceArray<float> Upload(Matrix& matrix) {
  const Tensor tensor = matrix.tensor();
  const int64_t size = tensor.rows > 0 ? (tensor.rows - 1) * tensor.stride + tensor.cols : 0;
  return DeviceArray<float>(std::span<const float>(tensor.f32(), size));
}
inline void Download(const DeviceArray<float>& from, Matrix& to) {
  const std::vector<float> values = from.Get();
  std::memcpy(to.tensor().f32(), values.data(), 4 * values.size());
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_TESTS_CUDA_CUDA_TESTING_H_
