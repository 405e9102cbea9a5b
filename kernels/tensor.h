// Memory that operations read and write: Tensors are views, Buffers own. Memory comes from a backend (device_ops.h), because
// only it knows the device.
#ifndef WINNOW_KERNELS_TENSOR_H_
#define WINNOW_KERNELS_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "kernels/dtype.h"

namespace winnow::kernels {

// A row-major matrix that somebody else owns. `stride` is the distance of rows in elements.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  float* f32(int64_t row = 0) const { return static_cast<float*>(data) + row * stride; }
  Tensor RowRange(int64_t first, int64_t count) const {
    return {static_cast<std::byte*>(data) + first * stride * DTypeBytes(dtype), dtype, count, cols,
            stride};
  }
  Tensor ColRange(int64_t first, int64_t count) const {
    return {static_cast<std::byte*>(data) + first * DTypeBytes(dtype), dtype, rows, count, stride};
  }
};

// Owns memory of a backend; move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, size_t size_bytes, std::function<void(void*)> release)
      : data_(data, std::move(release)), size_bytes_(size_bytes) {}
  void* data() const { return data_.get(); }
  size_t size_bytes() const { return size_bytes_; }

 private:
  std::unique_ptr<void, std::function<void(void*)>> data_{nullptr, [](void*) {}};
  size_t size_bytes_ = 0;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_TENSOR_H_
