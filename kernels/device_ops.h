// The device of a backend: its memory, copies to it and from it, and the order of work on it. The first group to learn; the
// others (backend.h) need it.
//
// Two kinds of memory. The device's (Allocate) is what operations read and write; the host must not
// look at it, but for CopyToHost. Shared memory (AllocateShared) is the host's, and what operations
// write there the host may read after Synchronize: a selection's counts and tokens, rows' addresses,
// masses. What a later operation writes to the same place may be all that is ever seen there. On the
// CPU both are the same and Synchronize does nothing.
//
// A device that fails stays failed: operations do nothing from then on, Synchronize says false, and
// failure() says why. The caller ends the process, as nothing that the device holds can be trusted.
#ifndef WINNOW_KERNELS_DEVICE_OPS_H_
#define WINNOW_KERNELS_DEVICE_OPS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/tensor.h"

namespace winnow::kernels {

// Kernels that a device was told to run since the backend was made.
struct LaunchCounts {
  int64_t alone = 0, in_graphs = 0;
};

// A part of the device's memory, and its likeness in the host's.
struct CopyPart {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  size_t size_bytes = 0;
};

class DeviceOps {
 public:
  virtual std::string name() const = 0;  // "cpu (avx512_bf16, 2 threads)"
  // Backends of one arithmetic version (arithmetic_version.h) that say the same give the same bits for the same operands.
  virtual std::string arithmetic() const = 0;  // "cpu avx512_bf16"

  // ---- memory ----

  // Bytes that Allocate can still give, less a reserve for calls; 0: the reserve is short; -1: no limit but the host's.
  virtual int64_t AvailableBytes() const = 0;
  // Zeroed memory, aligned to 64 bytes at least; null data() if it cannot be had.
  virtual Buffer Allocate(size_t size_bytes) = 0;
  virtual Buffer AllocateShared(size_t size_bytes) = 0;

  // Both wait for what was asked for before, and are done when they return.
  virtual void CopyToHost(const void* device, void* host, size_t size_bytes) = 0;
  virtual void CopyToDevice(const void* host, void* device, size_t size_bytes) = 0;
  // The same of many parts, which may cost little more than one. Fast where `host` is shared memory.
  virtual void CopyAllToHost(std::span<const CopyPart> parts) {
    for (const CopyPart& part : parts) CopyToHost(part.device, part.host, part.size_bytes);
  }
  virtual void CopyAllToDevice(std::span<const CopyPart> parts) {
    for (const CopyPart& part : parts) CopyToDevice(part.host, part.device, part.size_bytes);
  }

  // ---- order ----

  // A forward pass begins. Block tables keep their contents from the first operation that is given
  // them until the next pass begins, or until ForgetTables.
  virtual void BeginPass() = 0;
  virtual void ForgetTables() = 0;
  // Waits until everything so far is done. False: the device has failed.
  [[nodiscard]] virtual bool Synchronize() = 0;
  // Empty while the device works.
  virtual std::string failure() const = 0;
  virtual LaunchCounts launches() const { return {}; }

 protected:
  ~DeviceOps() = default;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_DEVICE_OPS_H_
