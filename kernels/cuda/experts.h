// A layer of experts beside its products: the contract of kernels/experts.h. Routing computes in float32, with sums in an
// order that the number of experts alone decides; what is gathered and added has the CPU's bits.
#ifndef WINNOW_KERNELS_CUDA_EXPERTS_H_
#define WINNOW_KERNELS_CUDA_EXPERTS_H_

#include <cstdint>

#include "kernels/cuda/device_types.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/experts.h"
#include "kernels/silu_mul.h"

namespace winnow::kernels::cuda {

// ids [m][weights.cols] in device memory or pinned host memory.
[[nodiscard]] cudaError_t RouteExperts(const DeviceMatrix& logits, const ExpertRouting& routing,
                                       int32_t* ids, const DeviceMatrix& weights, Stream stream);
// rows [out.rows] and places [m * weights.cols]: in device memory.
[[nodiscard]] cudaError_t GatherExpertRows(const DeviceMatrix& x, const int32_t* rows,
                                           const DeviceMatrix& out, Stream stream);
[[nodiscard]] cudaError_t AddExpertRows(const DeviceMatrix& x, const int32_t* places,
                                        const DeviceMatrix& weights, const DeviceMatrix& y,
                                        Stream stream);

// ---- the same without the host ----
//
// Slots of rows are put into tiles of rows that go to one expert: a tile's product reads the expert's W once (MatmulTiles of
// matmul.h). A row has a place, the tile's first and then its number in it; places that no row has are zeros. Which place a row
// has is not the same in every run, and nothing depends on it.

// Slots that one block routes and places; of more ids lie in memory.
inline constexpr int64_t kRoutedTogether = 1024;

// Tiles that so many slots take at most.
constexpr int64_t MostExpertTiles(int64_t slots, int64_t experts, int32_t tile_rows) {
  const int64_t some = slots < experts ? slots : experts;  // experts that have a tile, at most
  return some + (slots - some) / tile_rows;
}

// In device memory; `most` is MostExpertTiles of the call's slots. The count is 0 but between RouteToTiles and AddTiles: so the
// products, which begin before their rows are there, know when W can be found (RowTiles of matmul_parts.cuh). REQUIRES: it was
// zeroed once, and the three calls and products between are launched in their order, one layer after the other.
struct ExpertTiles {
  int32_t* count = nullptr;          // [1] how many there are
  int32_t* expert = nullptr;         // [most] of each tile
  const void** gate_up = nullptr;    // [most] what finds W of a tile's expert
  const void** down = nullptr;       // [most]
  int32_t* row_of_place = nullptr;   // [most * tile_rows] or -1
  int32_t* place_of_slot = nullptr;  // [m * per_token]
  int64_t most = 0;
  int32_t tile_rows = 0;
  int32_t unused = 0;
};

// Steps between the two products of an expert.
struct ExpertGates {
  const float* const* bias =
      nullptr;         // [experts] of gates and ups, [2n], each in device memory; or null
  int32_t clamps = 0;  // the clamped gate, in place of silu
  ClampedSwiglu clamped;
  int32_t unused = 0;
};

// RouteExperts, and the tiles. gate_up and down: what finds the matrices of all experts [logits.cols], in device memory. ids:
// [m * per_token], scratch where that is more than kRoutedTogether.
[[nodiscard]] cudaError_t RouteToTiles(const DeviceMatrix& logits, const ExpertRouting& routing,
                                       const void* const* gate_up, const void* const* down,
                                       int32_t* ids, const ExpertTiles& tiles,
                                       const DeviceMatrix& weights, Stream stream);
// The rows of tiles as MatmulTiles reads them (OrderedTilesBytes of `to`): x by row_of_place, and silu(gate) * up, or what else
// `gates` says, by place of gate_up [places][2n]. `rounded`: for kInt8.
[[nodiscard]] cudaError_t OrderTiles(const DeviceMatrix& x, const ExpertTiles& tiles, bool rounded,
                                     void* to, Stream stream);
[[nodiscard]] cudaError_t GateTiles(const DeviceMatrix& gate_up, const ExpertTiles& tiles,
                                    const ExpertGates& gates, bool rounded, void* to,
                                    Stream stream);
// AddExpertRows of what tiles give, x [places][n], with the experts' `bias` [experts] of [n], or null; and the count is 0 again.
[[nodiscard]] cudaError_t AddTiles(const DeviceMatrix& x, const ExpertTiles& tiles,
                                   const float* const* bias, const DeviceMatrix& weights,
                                   const DeviceMatrix& y, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_EXPERTS_H_
