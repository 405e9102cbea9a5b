// What the blocks of a cluster, the parts of one piece of work, share: a barrier and each other's shared
// memory. With one part, where there are no clusters (before Hopper), that is the block itself.
// launch.cuh's LaunchClusters puts parts along x.
#ifndef WINNOW_KERNELS_CUDA_CLUSTER_CUH_
#define WINNOW_KERNELS_CUDA_CLUSTER_CUH_

#include <cstdint>

#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {

template <int kParts>
__device__ __forceinline__ uint32_t PartIndex() {
  return blockIdx.x % kParts;
}
// Of all threads of all parts: what was written before, any of them sees after.
template <int kParts>
__device__ __forceinline__ void MeetParts() {
  if constexpr (kParts == 1) {
    __syncthreads();
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory");
#endif
  }
}
// The address of `shared` in part `part`'s memory.
template <int kParts>
__device__ __forceinline__ uint32_t AddressIn(const void* shared, uint32_t part) {
  uint32_t address = SharedAddress(shared);
  if constexpr (kParts > 1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(part));
#endif
  }
  return address;
}
// Of 4 or 8 bytes.
template <int kParts, typename Number>
__device__ __forceinline__ Number LoadFrom(const Number* shared, uint32_t part) {
  if constexpr (kParts == 1) return *shared;
  Number value = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = AddressIn<kParts>(shared, part);
  if constexpr (sizeof(Number) == 8) {
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  }
#endif
  return value;
}
}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_CLUSTER_CUH_
