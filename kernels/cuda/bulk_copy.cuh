// Bulk copies into shared memory and the barriers that they complete: Hopper and later. A barrier's phases
// have parities 0, 1, 0, ...; who waits for the parity of the phase before the first one does not wait.
#ifndef WINNOW_KERNELS_CUDA_BULK_COPY_CUH_
#define WINNOW_KERNELS_CUDA_BULK_COPY_CUH_

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace winnow::kernels::cuda {

// A phase is complete when `arrivals` have arrived and all bytes that they announced.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last InitBarrier(), and before others know of it.
__device__ __forceinline__ void FenceBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void WaitForPhase(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Eight bytes to the same place in block `rank` of the cluster, and its barrier.
__device__ __forceinline__ void StoreAt(uint32_t to, uint2 value, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, of_barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 of_barrier, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [there], {%1, %2}, "
      "[of_barrier];\n"
      "}" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(barrier), "r"(rank)
      : "memory");
}

// A multiple of 16 bytes, both ends aligned so; `barrier` hears of them.
__device__ __forceinline__ void BulkCopy(uint32_t to, const void* from, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// To the same place in every block of the cluster that has a bit in `ranks`, and its barrier.
__device__ __forceinline__ void BulkCopyToAll(uint32_t to, const void* from, uint32_t bytes,
                                              uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(ranks)
      : "memory");
}
// With an L2 policy of createpolicy.
__device__ __forceinline__ void BulkCopy(uint32_t to, const void* from, uint32_t bytes,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The tile from value x of row y on of a matrix (tensor_map.h; the map is an argument of the kernel).
__device__ __forceinline__ void BulkCopyTile(uint32_t to, const void* map, int32_t x, int32_t y,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// With an L2 policy of createpolicy.
__device__ __forceinline__ void BulkCopyTile(uint32_t to, const void* map, int32_t x, int32_t y,
                                             uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

// The box of tiles from tile y of slice z on (MakeTilesMap() of tensor_map.h); the same to every block of the cluster
// that has a bit in `ranks`.
__device__ __forceinline__ void BulkCopyTiles(uint32_t to, const void* map, int32_t y, int32_t z,
                                              uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(0), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void BulkCopyTilesToAll(uint32_t to, const void* map, int32_t y,
                                                   int32_t z, uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(y), "r"(z), "r"(barrier), "h"(ranks)
      : "memory");
}

// The same of gates and ups by turns (MakeGatedTilesMap()), from tile `tile` of the gates on.
__device__ __forceinline__ void BulkCopyGatedTiles(uint32_t to, const void* map, int32_t tile,
                                                   int32_t slice, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %2, %2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(0), "r"(tile), "r"(slice), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void BulkCopyGatedTilesToAll(uint32_t to, const void* map, int32_t tile,
                                                        int32_t slice, uint32_t barrier,
                                                        uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(tile), "r"(slice), "r"(barrier), "h"(ranks)
      : "memory");
}
// Before this thread's first copy by a map that lies in memory.
__device__ __forceinline__ void FenceTensorMap(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// Matrix instructions of a warpgroup can read, and bulk copies overwrite, what this thread wrote to shared memory, copies
// among it that it has waited for, where they are asked for by whoever is told of it after.
__device__ __forceinline__ void FenceSharedWrites() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// All threads of a cluster; what they wrote before is seen after.
__device__ __forceinline__ void SynchronizeCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// Whether this thread is the one of its warp that the device chooses, always the same. REQUIRES: the whole warp calls it. The
// compiler knows that what follows is done by one thread.
__device__ __forceinline__ bool IsElected() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}
__device__ __forceinline__ uint32_t RankInCluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace winnow::kernels::cuda

#endif  // __CUDA_ARCH__ >= 900

#endif  // WINNOW_KERNELS_CUDA_BULK_COPY_CUH_
