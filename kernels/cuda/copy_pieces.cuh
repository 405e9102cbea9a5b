// A copy in pieces of 16 bytes that lie anywhere, with several of a thread's loads in flight: over the
// bus it is latency that has to be covered (row_gather.cu has the numbers).
#ifndef WINNOW_KERNELS_CUDA_COPY_PIECES_CUH_
#define WINNOW_KERNELS_CUDA_COPY_PIECES_CUH_

#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {

struct PieceMove {
  const std::byte* from;
  std::byte* to;
};

// Pieces first, first + stride, ... below `pieces`; move_of(piece) says from where to where.
template <int kInFlight, typename MoveOf>
__device__ __forceinline__ void CopyPieces(int64_t first, int64_t stride, int64_t pieces,
                                           MoveOf move_of) {
  for (int64_t round = first; round < pieces; round += stride * kInFlight) {
    uint4 values[kInFlight];
    std::byte* to[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t piece = round + i * stride;
      if (piece >= pieces) continue;
      const PieceMove move = move_of(piece);
      to[i] = move.to;
      values[i] = LoadStreamed(move.from);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (round + i * stride < pieces) *reinterpret_cast<uint4*>(to[i]) = values[i];
    }
  }
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_COPY_PIECES_CUH_
