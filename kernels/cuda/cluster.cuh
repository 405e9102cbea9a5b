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
// A barrier in two steps, of all threads of all parts both: what was written before the first, any of them
// sees after the second, and what lies between need not wait.
template <int kParts>
__device__ __forceinline__ void ArriveAtParts() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kParts > 1) asm volatile("barrier.cluster.arrive;" ::: "memory");
#endif
}
template <int kParts>
__device__ __forceinline__ void WaitForParts() {
  if constexpr (kParts == 1) {
    __syncthreads();
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
  }
}
// Both.
template <int kParts>
__device__ __forceinline__ void MeetParts() {
  ArriveAtParts<kParts>();
  WaitForParts<kParts>();
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
// Of 8 bytes. Part `part` has begun, and ends after a barrier that follows.
template <int kParts, typename Value>
__device__ __forceinline__ void StoreTo(Value* shared, uint32_t part, Value value) {
  static_assert(sizeof(Value) == 8);
  if constexpr (kParts == 1) {
    *shared = value;
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(AddressIn<kParts>(shared, part)),
                 "l"(*reinterpret_cast<const uint64_t*>(&value))
                 : "memory");
#endif
  }
}
}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_CLUSTER_CUH_
