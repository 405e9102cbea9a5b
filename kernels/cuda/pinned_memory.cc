#include "kernels/cuda/pinned_memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/cuda/stream.h"

namespace winnow::kernels::cuda {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr int kThreadsMax = 16;
constexpr size_t kPageBytes = 4096;

// A mapping and its pieces; unmapped when it goes.
class PinnedMapping {
 public:
  PinnedMapping(int device, size_t size_bytes, size_t piece_bytes, int threads)
      : device_(device),
        size_bytes_((size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes),
        piece_bytes_(piece_bytes),
        registered_((size_bytes_ + piece_bytes - 1) / piece_bytes, 0),
        threads_(static_cast<int>(std::min<size_t>(threads, registered_.size()))) {}
  PinnedMapping(const PinnedMapping&) = delete;
  PinnedMapping& operator=(const PinnedMapping&) = delete;
  ~PinnedMapping() {
    if (base_ == MAP_FAILED) return;
    ForPieces([this](size_t piece) {
      if (registered_[piece] != 0) cudaHostUnregister(data_ + piece * piece_bytes_);
      return true;
    });
    munmap(base_, size_bytes_ + kHugePageBytes);
  }

  bool Make() {
    base_ = mmap(nullptr, size_bytes_ + kHugePageBytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) return false;
    const size_t past = reinterpret_cast<uintptr_t>(base_) % kHugePageBytes;
    data_ = static_cast<std::byte*>(base_) + (past == 0 ? 0 : kHugePageBytes - past);
    // Advice: without huge pages everything works, at the speed of a device that misses its TLB.
    madvise(data_, size_bytes_, MADV_HUGEPAGE);
    return ForPieces([this](size_t piece) {
      std::byte* first = data_ + piece * piece_bytes_;
      const size_t bytes = std::min(piece_bytes_, size_bytes_ - piece * piece_bytes_);
      for (size_t at = 0; at < bytes; at += kPageBytes) {
        reinterpret_cast<volatile std::byte*>(first)[at] = std::byte{0};
      }
      if (cudaHostRegister(first, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) !=
          cudaSuccess) {
        cudaGetLastError();  // no memory is an answer, not a failure
        return false;
      }
      registered_[piece] = 1;
      void* on_device = nullptr;
      if (cudaHostGetDevicePointer(&on_device, first, 0) != cudaSuccess) cudaGetLastError();
      return on_device == first;
    });
  }
  std::byte* data() const { return data_; }

 private:
  // Calls do(piece) on the threads; stops at the first that is false, and says so.
  bool ForPieces(const std::function<bool(size_t)>& call) {
    std::atomic<size_t> next = 0;
    std::atomic<bool> good = true;
    const auto work = [&] {
      if (UseDevice(device_) != cudaSuccess) good = false;
      for (size_t piece = next++; piece < registered_.size() && good; piece = next++) {
        if (!call(piece)) good = false;
      }
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < threads_; ++i) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    return good;
  }

  const int device_;
  const size_t size_bytes_, piece_bytes_;
  std::vector<uint8_t> registered_;  // [pieces]
  const int threads_;
  void* base_ = MAP_FAILED;
  std::byte* data_ = nullptr;
};

int ThreadsOfHost() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kThreadsMax);
}

}  // namespace

void CopyInParallel(void* to, const void* from, size_t size_bytes) {
  constexpr size_t kLeast = size_t{4} << 20;  // for each thread
  const size_t parts = std::clamp<size_t>(size_bytes / kLeast, 1, ThreadsOfHost());
  const size_t each = (size_bytes + parts - 1) / parts;
  const auto copy = [&](size_t part) {
    const size_t first = std::min(part * each, size_bytes);
    std::memcpy(static_cast<std::byte*>(to) + first, static_cast<const std::byte*>(from) + first,
                std::min(each, size_bytes - first));
  };
  std::vector<std::thread> threads;
  for (size_t part = 1; part < parts; ++part) threads.emplace_back(copy, part);
  copy(0);
  for (std::thread& thread : threads) thread.join();
}

Buffer AllocatePinned(int device, size_t size_bytes, int threads, size_t piece_bytes) {
  // Pages that are not there would be found missing one by one, and the process ended for it.
  const auto pages = static_cast<size_t>(std::max(0L, sysconf(_SC_PHYS_PAGES)));
  if (size_bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)) >= pages) return {};
  if (threads <= 0) threads = ThreadsOfHost();
  auto mapping = std::make_shared<PinnedMapping>(device, size_bytes, piece_bytes, threads);
  if (!mapping->Make()) return {};
  std::byte* data = mapping->data();
  return Buffer(data, size_bytes, [mapping = std::move(mapping)](void*) {});
}

}  // namespace winnow::kernels::cuda
