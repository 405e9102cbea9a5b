// Memory of the backend, taken when a model is made.
#ifndef WINNOW_ENGINE_RETRIEVAL_SCRATCH_H_
#define WINNOW_ENGINE_RETRIEVAL_SCRATCH_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device_ops.h"
#include "kernels/tensor.h"

namespace winnow::engine {

// ResourceExhausted names the bytes and what they were for.
absl::StatusOr<kernels::Buffer> AllocatePool(kernels::DeviceOps& backend, size_t size_bytes,
                                             const std::string& what, bool shared = false);

// Allocates scratch memory and adds up the bytes.
class ScratchAllocator {
 public:
  explicit ScratchAllocator(kernels::DeviceOps& backend) : backend_(backend) {}
  // At least a cache line, so that nothing has a null address. `shared`: the host reads or writes it.
  absl::Status Allocate(size_t size_bytes, const char* what, bool shared, kernels::Buffer* out);
  size_t size_bytes() const { return size_bytes_; }

 private:
  kernels::DeviceOps& backend_;
  size_t size_bytes_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_SCRATCH_H_
