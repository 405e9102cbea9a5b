// Shared by products of many rows on Hopper, of plain weights (matmul_wgmma.cu) and of quantised ones
// (matmul_blocks_wgmma.cu): a block's warpgroups, the order of tiles, and how kernels are launched. No one else includes it.
//
// A block is two warpgroups that multiply, of 64 outputs each by the rows of a tile, and a third that fills stages of shared
// memory for them, over the borders of the tiles. As many clusters as run at once take the tiles of the product one after the other.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_WGMMA_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_WGMMA_PARTS_CUH_

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_parts.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace winnow::kernels::cuda {

inline constexpr int kGroupThreads = 128;
inline constexpr int kGroups = 2;  // that multiply
inline constexpr int kGroupsThreads = (kGroups + 1) * kGroupThreads;
inline constexpr int kGroupsOutputs = kGroups * 64;    // of a block
inline constexpr int kGroupsSharedBytes = 226 * 1024;  // of a block, but for its barriers
inline constexpr int kGroupsWarps = kGroups * kGroupThreads / kLanes;  // that multiply
// A kernel of so many threads is launched with 168 registers each, which those who multiply (TakeRegisters) and those who fill
// (GiveUpRegisters) share out anew: whoever asks for more waits for ever.
constexpr bool SharesRegisters(int multiply, int fill) {
  return kGroups * multiply + fill <= (kGroups + 1) * 168;
}

// Tiles of clusters: `band` of the rows side by side, then the next outputs, so that what runs at once reads little of either
// operand.
struct Raster {
  int32_t row_tiles, output_tiles, band;

  __host__ __device__ int64_t count() const { return int64_t{row_tiles} * output_tiles; }
  __device__ void Place(int32_t tile, int32_t& row_tile, int32_t& output_tile) const {
    const int32_t of_band = tile / (band * output_tiles);
    const int32_t in_band = tile - of_band * band * output_tiles;
    const int32_t rows = min(band, row_tiles - of_band * band);
    row_tile = of_band * band + in_band % rows;
    output_tile = in_band / rows;
  }
};
// The tiles of clusters, of so many rows and outputs.
inline Raster RasterOf(const Operands& operands, int64_t rows, int64_t outputs, int32_t band) {
  return {static_cast<int32_t>(CeilDiv(operands.m, rows)),
          static_cast<int32_t>(CeilDiv(operands.out, outputs)), band};
}

// Time of a product in tiles of pairs of blocks, each of `block_rows` rows, in no unit. A tile's is that of its rows and a share
// that all have; pairs of multiprocessors take one after the other.
inline int64_t PairsCost(const Raster& raster, int64_t block_rows) {
  constexpr int64_t kTileRows = 24;
  const int64_t at_once = std::max(CurrentDevice().multiprocessors / 2, 1);
  return CeilDiv(raster.count(), at_once) * (block_rows + kTileRows);
}

// A thread's values of a tile. What is added up begins with -0, which changes no sum, not even one of -0.
template <int kRowTiles>
__device__ __forceinline__ void SetTile(float (&values)[kRowTiles][4], float to) {
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[j][e] = to;
  }
}
template <int kRowTiles>
__device__ __forceinline__ void AddToTile(float (&totals)[kRowTiles][4],
                                          const float (&sums)[kRowTiles][4]) {
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) totals[j][e] = __fadd_rn(totals[j][e], sums[j][e]);
  }
}
template <int kRowTiles>
__device__ __forceinline__ void AddEmptySegments(const Operands& args,
                                                 float (&totals)[kRowTiles][4]) {
  if (!args.HasEmptySegments()) return;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) totals[j][e] = __fadd_rn(totals[j][e], 0.0f);
  }
}

#ifdef WINNOW_WGMMA
// A barrier for all threads of a block that multiply.
__device__ __forceinline__ void MeetMultipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kGroups * kGroupThreads) : "memory");
}

// One of kCount stages or slots after the other, and the parity of its phase.
template <int kCount>
struct InTurn {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ int before() const { return index == 0 ? kCount - 1 : index - 1; }
};

// A lane's share of the rows of a tile's panels: those of one panel, or none. Of panels that do not exist the last that does, so
// that all stages have the same size.
template <int kBlockRows>
struct RowsOfLane {
  static constexpr int kRowPieces = kPanelBytes / kPanelRows / 16;
  const uint4* from;
  uint32_t offset;  // in a stage
  int32_t bytes;

  __device__ __forceinline__ RowsOfLane(const Operands& args, int32_t first_row, int lane) {
    static_assert(kBlockRows / kPanelRows + 2 <= kLanes);
    const int32_t panels = (args.m + kPanelRows - 1) / kPanelRows;
    const int32_t panel = first_row / kPanelRows + lane;
    const int32_t row = max(first_row, panel * kPanelRows);
    const int32_t end = min(first_row + kBlockRows, (panel + 1) * kPanelRows);
    bytes = max(end - row, 0) * kRowPieces * 16;
    from = args.x + int64_t{min(panel, panels - 1)} * ((args.slices + 1) / 2) * (kPanelBytes / 16) +
           (row - panel * kPanelRows) * kRowPieces;
    offset = (row - first_row) * kRowPieces * 16;
  }
  __device__ __forceinline__ void Copy(uint32_t to, int32_t slice, uint32_t barrier) const {
    if (bytes > 0) BulkCopy(to + offset, from + slice / 2 * (kPanelBytes / 16), bytes, barrier);
  }
  __device__ __forceinline__ void CopyToAll(uint32_t to, int32_t slice, uint32_t barrier,
                                            uint16_t ranks) const {
    if (bytes > 0) {
      BulkCopyToAll(to + offset, from + slice / 2 * (kPanelBytes / 16), bytes, barrier, ranks);
    }
  }
};

#endif

// Clusters of a kernel that run at once; a thread's own, asked of the driver once per device.
struct ClustersAtOnce {
  int device = -1, count = 0;
};
// Launches `kernel` with args..., the last of which is the raster.
template <int kClusterBlocks, typename... Params, typename... Args>
cudaError_t LaunchRaster(void (*kernel)(Params...), size_t shared_bytes, const Raster& raster,
                         ClustersAtOnce& at_once, const Stream& stream, const Args&... args) {
  if (raster.count() > 0x7fffffff / 64) return cudaErrorInvalidValue;
  if (const int current = CurrentDevice().device; current != at_once.device || at_once.count == 0) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {kClusterBlocks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kClusterBlocks);
    config.blockDim = dim3(kGroupsThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (const cudaError_t error = AllowShared(reinterpret_cast<const void*>(kernel), shared_bytes);
        error != cudaSuccess) {
      return error;
    }
    if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&at_once.count, kernel, &config);
        error != cudaSuccess) {
      return error;
    }
    if (at_once.count < 1) return cudaErrorLaunchOutOfResources;
    at_once.device = current;
  }
  const auto clusters = static_cast<unsigned>(std::min<int64_t>(raster.count(), at_once.count));
  return LaunchAs({.cluster_blocks = kClusterBlocks}, kernel, dim3(clusters * kClusterBlocks),
                  kGroupsThreads, shared_bytes, stream, args..., raster);
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_WGMMA_PARTS_CUH_
