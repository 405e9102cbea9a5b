// What the files of the CUDA backend share; no one else includes it.
//
//   cuda_backend.cc         the device, its memory, descriptors on their way to it
//   cuda_backend_layer.cc   weights, products, what lies around attention, dense attention
//   cuda_backend_experts.cc layers of experts
//   cuda_backend_select.cc  indexes, and choosing from them
//   cuda_backend_rows.cc    attention over what was chosen, completion
//   cuda_backend_transform.cc  transform codes: selection by mass, tails
//   cuda_backend_sample.cc  the next tokens
//   cuda_backend_host_kv.cc KV in pinned host memory: row cache, dense attention from there
#ifndef WINNOW_KERNELS_CUDA_CUDA_BACKEND_IMPL_H_
#define WINNOW_KERNELS_CUDA_CUDA_BACKEND_IMPL_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device_types.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul.h"

namespace winnow::kernels::cuda {

// Workspaces of calls that could be one: more queries than fit come in several launches.
inline constexpr size_t kWorkspaceBytes = size_t{256} << 20;

// Of `count` queries, how many a launch takes: all, a half, a quarter, as long as bytes_of(queries) is too
// much; at least one. `count` may be 0.
template <typename BytesOf>
size_t QueriesAtOnce(size_t count, BytesOf bytes_of) {
  size_t at_once = std::max<size_t>(count, 1);
  while (at_once > 1 && bytes_of(static_cast<int32_t>(at_once)) > kWorkspaceBytes) {
    at_once = (at_once + 1) / 2;
  }
  return at_once;
}

// For StageQueries: 0 tokens to a block, as the kernel reads no tables.
inline constexpr int32_t kNoTables = 0;
inline int64_t BlocksOf(int64_t tokens, int32_t block_tokens) {
  return block_tokens == kNoTables ? 0 : CeilDiv(tokens, block_tokens);
}

// Outputs of one kind, one behind the other.
struct PackedPart {
  int64_t first_output = 0;
  DeviceWeights weights;
  Buffer memory;
};

class CudaPackedMatrix final : public PackedMatrix {
 public:
  explicit CudaPackedMatrix(std::vector<PackedPart> parts) : parts_(std::move(parts)) {}
  int64_t out_features() const override {
    return parts_.back().first_output + parts_.back().weights.out;
  }
  int64_t in_features() const override { return parts_[0].weights.in; }
  size_t size_bytes() const override {
    size_t bytes = 0;
    for (const PackedPart& part : parts_) bytes += part.memory.size_bytes();
    return bytes;
  }
  std::span<const PackedPart> parts() const { return parts_; }
  // One part, then.
  bool is_exact() const { return parts_[0].weights.way == DeviceWeights::Way::kExact; }
  bool is_int8() const { return parts_[0].weights.way == DeviceWeights::Way::kInt8; }

 private:
  std::vector<PackedPart> parts_;
};

inline const CudaPackedMatrix& PackedOf(const PackedMatrix& w) {
  return static_cast<const CudaPackedMatrix&>(w);
}

inline DeviceMatrix MatrixOf(const Tensor& tensor) {
  return {static_cast<float*>(tensor.data), tensor.rows, tensor.cols, tensor.stride};
}

// Shapes that follow a sequence's length grow in steps, so that its next token does not make a new one.
inline int32_t RoundUp(int32_t value, int32_t unit) {
  return static_cast<int32_t>(std::min<int64_t>(CeilDiv(value, unit) * unit, INT32_MAX));
}

// What one of the backend's interfaces hides: `Device` as the kernels take it, and the memory that it
// points into.
template <typename Interface, typename Device>
class Packed : public Interface {
 public:
  Packed(const Device& device, Buffer memory) : device_(device), memory_(std::move(memory)) {}
  size_t size_bytes() const override { return memory_.size_bytes(); }
  const Device& device() const { return device_; }

 private:
  Device device_;
  Buffer memory_;
};

class CudaPackedTransformCode final : public Packed<PackedTransformCode, DeviceTransform> {
 public:
  using Packed::Packed;
  int32_t bits() const override { return device().bits; }
};
inline const DeviceTransform& TransformOf(const PackedTransformCode& transform) {
  return static_cast<const CudaPackedTransformCode&>(transform).device();
}

inline int32_t GroupOf(const Tensor& q, const KvLayout& layout) {
  const int64_t heads = q.cols / layout.head_dim;
  WINNOW_CHECK(heads * layout.head_dim == q.cols && heads % layout.kv_heads == 0);
  return static_cast<int32_t>(heads / layout.kv_heads);
}

// Of any query: what it sees outside mid.
inline int32_t MostAnchors(std::span<const RetrievalQuery> queries) {
  int32_t most = 0;
  for (const RetrievalQuery& query : queries) {
    const int32_t seen = query.position + 1;
    const int32_t before = std::min(query.mid.first, seen);
    most = std::max(most, before + seen - std::clamp(query.mid.last, before, seen));
  }
  return most;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_CUDA_BACKEND_IMPL_H_
