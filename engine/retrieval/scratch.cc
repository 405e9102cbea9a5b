#include "engine/retrieval/scratch.h"

#include <algorithm>

#include "engine/base/status_macros.h"
#include "fmt/format.h"

namespace winnow::engine {

using kernels::Buffer;

absl::StatusOr<Buffer> AllocatePool(kernels::DeviceOps& backend, size_t size_bytes,
                                    const std::string& what, bool shared) {
  Buffer buffer = shared ? backend.AllocateShared(size_bytes) : backend.Allocate(size_bytes);
  if (buffer.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for {}: {} bytes", what, size_bytes));
  }
  return buffer;
}

absl::Status ScratchAllocator::Allocate(size_t size_bytes, const char* what, bool shared,
                                        Buffer* out) {
  WINNOW_ASSIGN_OR_RETURN(*out,
                          AllocatePool(backend_, std::max<size_t>(size_bytes, 64), what, shared));
  size_bytes_ += size_bytes;
  return absl::OkStatus();
}

}  // namespace winnow::engine
