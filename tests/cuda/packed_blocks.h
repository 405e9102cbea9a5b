// Matrices of stored blocks as kernels read them, for tests of the kernels below the backend.
#ifndef WINNOW_TESTS_CUDA_PACKED_BLOCKS_H_
#define WINNOW_TESTS_CUDA_PACKED_BLOCKS_H_

#include <vector>

#include "kernels/cuda/matmul.h"
#include "kernels/cuda/matmul_int8.h"
#include "kernels/model_ops.h"
#include "kernels/quantized.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {

// Packs `w` at `packed`, which has BlockBytes() or, of kI8x128, Int8WeightBytes().
inline DeviceWeights PackOnDevice(const StoredMatrix& w, DeviceArray<std::byte>& packed) {
  std::vector<std::byte> rows;
  for (const std::byte* row : w.rows) {
    rows.insert(rows.end(), row, row + WeightRowBytes(w.type, w.cols));
  }
  packed.Zero();
  const bool int8 = w.type == WeightType::kI8x128;
  DeviceWeights weights;
  weights.data = packed.data();
  weights.out = static_cast<int64_t>(w.rows.size());
  weights.in = w.cols;
  weights.way = int8 ? DeviceWeights::Way::kInt8 : DeviceWeights::Way::kBlocks;
  weights.type = w.type;
  weights.integer_bits = w.integer_bits;
  const DeviceArray<std::byte> source(rows);
  const auto pack = int8 ? PackInt8 : PackBlocks;
  EXPECT_EQ(pack(source.data(), 0, weights.out, weights, nullptr), cudaSuccess);
  return weights;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_TESTS_CUDA_PACKED_BLOCKS_H_
