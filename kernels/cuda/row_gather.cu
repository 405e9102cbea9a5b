// GatherRows: a round of a block is 512 threads times four pieces of 16 bytes. Addresses of a round
// are loaded first, then all its pieces, then all are stored: four loads per thread are on the bus
// at a time, 512 KiB in all with 16 blocks, and a bus of 55 GB/s and 2 us of latency needs 110.
#include "kernels/cuda/copy_pieces.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_gather.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kGatherThreads = 512;
constexpr int kPiecesInFlight = 4;

__global__ void __launch_bounds__(kGatherThreads)
    GatherKernel(const std::byte* const* sources, std::byte* const* targets, const int32_t* count,
                 int32_t row_pieces) {
  const int64_t pieces = int64_t{*count} * row_pieces;
  CopyPieces<kPiecesInFlight>(int64_t{blockIdx.x} * kGatherThreads + threadIdx.x,
                              int64_t{gridDim.x} * kGatherThreads, pieces, [&](int64_t piece) {
                                const int64_t row = piece / row_pieces,
                                              in_row = piece % row_pieces * 16;
                                return PieceMove{sources[row] + in_row, targets[row] + in_row};
                              });
}

}  // namespace

cudaError_t GatherRows(const std::byte* const* sources, std::byte* const* targets,
                       const int32_t* count, int32_t row_bytes, int32_t num_blocks, Stream stream) {
  if (row_bytes <= 0 || row_bytes % 16 != 0 || num_blocks < 1) return cudaErrorInvalidValue;
  return LaunchBehind(GatherKernel, dim3(static_cast<unsigned>(num_blocks)), kGatherThreads, 0,
                      stream, sources, targets, count, row_bytes / 16);
}

}  // namespace winnow::kernels::cuda
