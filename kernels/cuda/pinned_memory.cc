#include "kernels/cuda/pinned_memory.h"

#include <cuda.h>
#include <cudaTypedefs.h>
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

namespace winnow::kernels::cuda {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kPieceBytes = size_t{256} << 20;
constexpr int kThreadsMax = 16;
constexpr size_t kPageBytes = 4096;

int ThreadsOfHost() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kThreadsMax);
}

// Memory in pieces, made by several threads.
class PinnedPieces {
 public:
  PinnedPieces(int device, size_t size_bytes, size_t piece_bytes, int threads)
      : device_(device),
        size_bytes_((size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes),
        piece_bytes_(piece_bytes),
        made_((size_bytes_ + piece_bytes - 1) / piece_bytes, 0),
        threads_(static_cast<int>(std::min<size_t>(threads, made_.size()))) {}
  PinnedPieces(const PinnedPieces&) = delete;
  PinnedPieces& operator=(const PinnedPieces&) = delete;
  virtual ~PinnedPieces() = default;
  virtual bool Make() = 0;
  std::byte* data() const { return data_; }

 protected:
  // Calls call(piece) on the threads; stops at the first that is false, and says so.
  bool ForPieces(const std::function<bool(size_t)>& call) {
    std::atomic<size_t> next = 0;
    std::atomic<bool> good = true;
    const auto work = [&] {
      if (cudaSetDevice(device_) != cudaSuccess) good = false;
      for (size_t piece = next++; piece < made_.size() && good; piece = next++) {
        if (!call(piece)) good = false;
      }
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < threads_; ++i) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    return good;
  }
  std::byte* Piece(size_t piece) const { return data_ + piece * piece_bytes_; }
  size_t PieceBytes(size_t piece) const {
    return std::min(piece_bytes_, size_bytes_ - piece * piece_bytes_);
  }

  const int device_;
  const size_t size_bytes_, piece_bytes_;
  std::vector<uint8_t> made_;  // [pieces]
  const int threads_;
  std::byte* data_ = nullptr;
};

// Pages of this process.
class RegisteredPieces final : public PinnedPieces {
 public:
  using PinnedPieces::PinnedPieces;
  ~RegisteredPieces() override {
    if (base_ == MAP_FAILED) return;
    ForPieces([this](size_t piece) {
      if (made_[piece] != 0) cudaHostUnregister(Piece(piece));
      return true;
    });
    munmap(base_, size_bytes_ + kHugePageBytes);
  }
  bool Make() override {
    base_ = mmap(nullptr, size_bytes_ + kHugePageBytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) return false;
    const size_t past = reinterpret_cast<uintptr_t>(base_) % kHugePageBytes;
    data_ = static_cast<std::byte*>(base_) + (past == 0 ? 0 : kHugePageBytes - past);
    madvise(data_, size_bytes_, MADV_HUGEPAGE);  // advice: fewer pages are sooner there
    return ForPieces([this](size_t piece) {
      std::byte* first = Piece(piece);
      for (size_t at = 0; at < PieceBytes(piece); at += kPageBytes) {
        reinterpret_cast<volatile std::byte*>(first)[at] = std::byte{0};
      }
      if (cudaHostRegister(first, PieceBytes(piece),
                           cudaHostRegisterMapped | cudaHostRegisterPortable) != cudaSuccess) {
        cudaGetLastError();  // no memory is an answer, not a failure
        return false;
      }
      made_[piece] = 1;
      void* on_device = nullptr;
      return cudaHostGetDevicePointer(&on_device, first, 0) == cudaSuccess && on_device == first;
    });
  }

 private:
  void* base_ = MAP_FAILED;
};

// The driver's functions, as the program is not linked with it.
struct Driver {
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;
  PFN_cuMemAddressReserve_v10020 address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 address_free = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;

  bool Load() {
    return Get("cuDeviceGetAttribute", 2000, &device_get_attribute) &&
           Get("cuMemAddressReserve", 10020, &address_reserve) &&
           Get("cuMemAddressFree", 10020, &address_free) && Get("cuMemCreate", 10020, &create) &&
           Get("cuMemMap", 10020, &map) && Get("cuMemUnmap", 10020, &unmap) &&
           Get("cuMemRelease", 10020, &release) && Get("cuMemSetAccess", 10020, &set_access);
  }

 private:
  template <typename Function>
  static bool Get(const char* name, unsigned version, Function* function) {
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    return cudaGetDriverEntryPointByVersion(name, reinterpret_cast<void**>(function), version,
                                            cudaEnableDefault, &result) == cudaSuccess &&
           result == cudaDriverEntryPointSuccess;
  }
};

// Pages that the driver makes on the host (CUDA 12.2), as large as it has them.
class DriverPieces final : public PinnedPieces {
 public:
  using PinnedPieces::PinnedPieces;
  ~DriverPieces() override {
    if (data_ == nullptr) return;
    ForPieces([this](size_t piece) {
      if (made_[piece] != 0) driver_.unmap(AddressOf(piece), PieceBytes(piece));
      return true;
    });
    driver_.address_free(reinterpret_cast<CUdeviceptr>(data_), size_bytes_);
  }
  bool Make() override {
    int node = 0, supported = 0;
    if (!driver_.Load() ||
        driver_.device_get_attribute(
            &supported, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            device_) != CUDA_SUCCESS ||
        supported == 0 ||
        driver_.device_get_attribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device_) !=
            CUDA_SUCCESS) {
      return false;
    }
    CUdeviceptr address = 0;
    if (driver_.address_reserve(&address, size_bytes_, kHugePageBytes, 0, 0) != CUDA_SUCCESS) {
      return false;
    }
    data_ = reinterpret_cast<std::byte*>(address);
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, std::max(node, 0)};
    CUmemAccessDesc access[2] = {};
    access[0].location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
    access[1].location = properties.location;
    access[0].flags = access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return ForPieces([&](size_t piece) {
      CUmemGenericAllocationHandle handle = 0;
      const size_t bytes = PieceBytes(piece);
      if (driver_.create(&handle, bytes, &properties, 0) != CUDA_SUCCESS) return false;
      if (driver_.map(AddressOf(piece), bytes, 0, handle, 0) == CUDA_SUCCESS) made_[piece] = 1;
      driver_.release(handle);  // mapped, it stays
      if (made_[piece] == 0 ||
          driver_.set_access(AddressOf(piece), bytes, access, 2) != CUDA_SUCCESS) {
        return false;
      }
      std::memset(Piece(piece), 0, bytes);
      return true;
    });
  }

 private:
  CUdeviceptr AddressOf(size_t piece) const { return reinterpret_cast<CUdeviceptr>(Piece(piece)); }
  Driver driver_;
};

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

Buffer AllocatePinned(int device, size_t size_bytes, PinWay way, int threads, size_t piece_bytes) {
  // Pages that are not there would be found missing one by one, and the process ended for it.
  const auto pages = static_cast<size_t>(std::max(0L, sysconf(_SC_PHYS_PAGES)));
  if (size_bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)) >= pages) return {};
  if (threads <= 0) threads = ThreadsOfHost();
  if (piece_bytes == 0) piece_bytes = kPieceBytes;
  std::shared_ptr<PinnedPieces> pieces;
  if (way != PinWay::kRegistered) {
    pieces = std::make_shared<DriverPieces>(device, size_bytes, piece_bytes, threads);
    if (!pieces->Make()) pieces = nullptr;
  }
  if (pieces == nullptr && way != PinWay::kDriver) {
    pieces = std::make_shared<RegisteredPieces>(device, size_bytes, piece_bytes, threads);
    if (!pieces->Make()) pieces = nullptr;
  }
  if (pieces == nullptr) return {};
  std::byte* data = pieces->data();
  return Buffer(data, size_bytes, [pieces = std::move(pieces)](void*) {});
}

}  // namespace winnow::kernels::cuda
