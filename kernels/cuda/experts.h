// A layer of experts beside its products: the contract of kernels/experts.h. Routing computes in float32, with sums in an
// order that the number of experts alone decides; what is gathered and added has the CPU's bits.
#ifndef WINNOW_KERNELS_CUDA_EXPERTS_H_
#define WINNOW_KERNELS_CUDA_EXPERTS_H_

#include "kernels/cuda/device_types.h"
#include "kernels/cuda/layer_ops.h"

namespace winnow::kernels::cuda {

// ids [m][weights.cols] in device memory or pinned host memory.
[[nodiscard]] cudaError_t RouteExperts(const DeviceMatrix& logits, bool normalize, int32_t* ids,
                                       const DeviceMatrix& weights, Stream stream);
// rows [out.rows] and places [m * weights.cols]: in device memory.
[[nodiscard]] cudaError_t GatherExpertRows(const DeviceMatrix& x, const int32_t* rows,
                                           const DeviceMatrix& out, Stream stream);
[[nodiscard]] cudaError_t AddExpertRows(const DeviceMatrix& x, const int32_t* places,
                                        const DeviceMatrix& weights, const DeviceMatrix& y,
                                        Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_EXPERTS_H_
