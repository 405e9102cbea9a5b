// How kernels of this folder are launched where one follows another at once, as in a decode step.
//
// Programmatic dependent launch (Hopper and later): a kernel may be put on the device while the one
// before it still runs, so that its blocks stand ready, with what needs nobody's results already read.
// For that it was launched by Launch() here, and calls, in this order:
//
//   LetNextStart()      from here on the next kernel may take what this one leaves free of the device
//   (reads of weights and descriptors, which no kernel writes)
//   WaitForEarlier()    the kernels before have ended, and what they wrote can be read
//
// WaitForEarlier is called on every path through a kernel and before anything is written: the next
// kernel waits for this one alone, and takes it that all before it have ended too.
// (One exception: products of tiles read before WaitForEarlier() what an earlier kernel writes, and wait for it by a word that
// it writes last; matmul_parts.cuh, RowTiles.)
// A kernel that is launched by LaunchBehind() waits as a whole, and may stand between; if it calls both, the next one
// stands ready behind it all the same.
#ifndef WINNOW_KERNELS_CUDA_LAUNCH_CUH_
#define WINNOW_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/device_types.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/timeline.cuh"

namespace winnow::kernels::cuda {

__device__ __forceinline__ void LetNextStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#ifdef WINNOW_CUDA_TIMELINE
__device__ __forceinline__ void WaitForEarlier(uint32_t line = __builtin_LINE()) {
  timeline::Mark(line, /*waits=*/true);
#else
__device__ __forceinline__ void WaitForEarlier() {
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#ifdef WINNOW_CUDA_TIMELINE
  timeline::Mark(line);
#endif
}

template <typename = void>
__global__ void ProbeKernel() {}

// Of the thread's device. Asked of the driver once per thread and device.
struct DeviceTraits {
  int device = -1;
  int multiprocessors = 1;
  // Shared memory of a multiprocessor, and what a block may take of it: 164 and 163 KiB on compute
  // capability 8.0, 228 and 227 on 9.0, but 100 and 99 on 8.6, 8.9 and 12.0.
  size_t shared_bytes = 0;
  size_t block_shared_bytes = 0;
  // The code that runs there was compiled for compute capability 9.0 or newer. The device alone does
  // not say so: code for 8.0 runs on it too, and has neither the waits above nor bulk copies.
  bool hopper = false;
};
inline const DeviceTraits& CurrentDevice() {
  thread_local DeviceTraits traits;
  const int device = DeviceOfThread();
  if (device == traits.device) return traits;
  int count = 0, shared = 0, of_block = 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) !=
          cudaSuccess ||
      cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return traits;
  }
  cudaFuncAttributes probe = {};
  const bool probed = cudaFuncGetAttributes(&probe, ProbeKernel<>) == cudaSuccess;
  traits = {device, count, static_cast<size_t>(shared), static_cast<size_t>(of_block),
            probed && probe.ptxVersion >= 90};
  return traits;
}

// Whether a kernel of Hopper's own instructions (wgmma.cuh) can run where this thread launches. Its code for
// other architectures is empty, and so without barriers in shared memory. Asked of the driver once per device.
class CodeHere {
 public:
  template <typename Kernel>
  bool Has(Kernel* kernel, size_t dynamic_shared_bytes) {
    const DeviceTraits& traits = CurrentDevice();
    if (traits.device == device_) return has_;
    device_ = traits.device;
    cudaFuncAttributes attributes = {};
    has_ = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
           attributes.sharedSizeBytes > 0 &&
           dynamic_shared_bytes + attributes.sharedSizeBytes <= traits.block_shared_bytes;
    return has_;
  }

 private:
  int device_ = -1;
  bool has_ = false;
};

// Of a kernel that is launched so: blocks that run at once on a multiprocessor.
template <typename... Params>
cudaError_t BlocksPerMultiprocessor(void (*kernel)(Params...), unsigned threads,
                                    size_t shared_bytes, int* blocks) {
  return BlocksPerMultiprocessor(reinterpret_cast<const void*>(kernel), threads, shared_bytes,
                                 blocks);
}

// How a kernel is launched, beside its grid and arguments.
struct LaunchWay {
  bool starts_early = false;    // as above, where the device can
  bool cooperative = false;     // all blocks run at once, or the launch is an error
  unsigned cluster_blocks = 1;  // along x
};

// A launch in bytes (stream.h). Padding within an argument is copied as it is: where it differs, launches that are
// equal look different and no graph is found, so arguments have none: that is what their `unused` is. (GCC 12's
// __builtin_clear_padding clears values where a struct has an array of structs.)
template <typename... Params>
class PackedLaunch {
 public:
  template <typename... Args>
  PackedLaunch(const KernelLaunch& launch, const Args&... args) {
    std::memcpy(bytes_, &launch, sizeof launch);
    size_t i = 0;
    (Put<Params>(i++, Params(args)), ...);
  }
  LaunchBytes bytes() const { return {bytes_, kBytes}; }

 private:
  static constexpr size_t kAlignment = 16;
  static constexpr size_t kFirst =
      AlignUp(sizeof(KernelLaunch) + sizeof...(Params) * sizeof(uint32_t), kAlignment);
  static constexpr size_t kBytes = kFirst + (size_t{0} + ... + AlignUp(sizeof(Params), kAlignment));

  template <typename Param>
  void Put(size_t i, Param param) {
    static_assert(std::is_trivially_copyable_v<Param>);  // the driver copies it from any address
    const auto offset = static_cast<uint32_t>(end_);
    std::memcpy(bytes_ + sizeof(KernelLaunch) + i * sizeof offset, &offset, sizeof offset);
    std::memcpy(bytes_ + end_, &param, sizeof param);
    end_ += AlignUp(sizeof param, kAlignment);
  }

  alignas(kAlignment) std::byte bytes_[kBytes] = {};
  size_t end_ = kFirst;
};

template <typename... Params, typename... Args>
cudaError_t LaunchAs(const LaunchWay& way, void (*kernel)(Params...), dim3 grid, unsigned threads,
                     size_t shared_bytes, const Stream& stream, const Args&... args) {
  KernelLaunch launch;
  launch.kernel = reinterpret_cast<const void*>(kernel);
  if (const cudaError_t error = AllowShared(launch.kernel, shared_bytes); error != cudaSuccess) {
    return error;
  }
  launch.grid[0] = grid.x;
  launch.grid[1] = grid.y;
  launch.grid[2] = grid.z;
  launch.threads = threads;
  launch.shared_bytes = static_cast<uint32_t>(shared_bytes);
  launch.cluster_blocks = way.cluster_blocks;
  if (way.starts_early && kernels_start_early && CurrentDevice().hopper) {
    launch.flags |= KernelLaunch::kStartsEarly;
  }
  if (way.cooperative) launch.flags |= KernelLaunch::kCooperative;
  launch.num_params = sizeof...(Params);
  return stream.Launch(PackedLaunch<Params...>(launch, args...).bytes());
}

// Of a kernel that calls LetNextStart and WaitForEarlier.
template <typename... Params, typename... Args>
cudaError_t Launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes,
                   const Stream& stream, bool cooperative, const Args&... args) {
  return LaunchAs({.starts_early = true, .cooperative = cooperative}, kernel, grid, threads,
                  shared_bytes, stream, args...);
}

// The same in `clusters` of `blocks` each, along x. REQUIRES: CurrentDevice().hopper, or clusters of one block.
template <typename... Params, typename... Args>
cudaError_t LaunchClusters(void (*kernel)(Params...), unsigned clusters, unsigned blocks,
                           unsigned threads, size_t shared_bytes, const Stream& stream,
                           const Args&... args) {
  return LaunchAs({.starts_early = true, .cluster_blocks = blocks}, kernel, dim3(clusters * blocks),
                  threads, shared_bytes, stream, args...);
}

// Of any kernel: it waits as a whole for the one before it.
template <typename... Params, typename... Args>
cudaError_t LaunchBehind(void (*kernel)(Params...), dim3 grid, unsigned threads,
                         size_t shared_bytes, const Stream& stream, const Args&... args) {
  return LaunchAs({}, kernel, grid, threads, shared_bytes, stream, args...);
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_LAUNCH_CUH_
