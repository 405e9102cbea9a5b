// Promises of products with weights in stored blocks on a CPU, whatever the blocks are.
#ifndef WINNOW_TESTS_UNIT_KERNELS_STORED_MATMUL_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_STORED_MATMUL_TESTING_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "kernels/model_ops.h"
#include "kernels/quantized.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/random_blocks.h"

namespace winnow::kernels {

class StoredMatmul : public EachIsa {
 protected:
  // A row has the same bits alone and among others, with any number of threads.
  void ExpectRowsToBeAsAlone(WeightType type, int64_t out, int64_t in, int32_t integer_bits = 8) {
    constexpr int64_t kMost = 150;
    const BlockMatrix w(random_, out, in, type, {}, integer_bits);
    const auto backend = Make(1);
    const auto packed = backend->PackStored({{w.stored()}}, DType::kF32);
    Matrix x = Matrix::Normal(random_, kMost, in), alone(kMost, out);
    for (int64_t i = 0; i < kMost; ++i) {
      backend->Matmul(x.tensor().RowRange(i, 1), *packed, alone.tensor().RowRange(i, 1), {});
    }
    for (int threads = 1; threads <= 3; ++threads) {
      const auto other = Make(threads);
      const auto repacked = other->PackStored({{w.stored()}}, DType::kBF16);
      for (const int64_t m :
           {2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 31, 33, 64, 127, 129, 150}) {
        const int64_t first = random_.Int(0, kMost - m);
        Matrix y(m, out);
        other->Matmul(x.tensor().RowRange(first, m), *repacked, y.tensor(), {});
        for (int64_t i = 0; i < m; ++i) {
          ASSERT_TRUE(SameBits(y, i, alone, first + i))
              << WeightTypeName(type) << ", m " << m << ", " << threads << " threads";
        }
      }
    }
  }

  void ExpectNotANumberToStayInItsRow(WeightType type, int64_t in, int32_t integer_bits = 8) {
    const auto backend = Make(2);
    const BlockMatrix w(random_, 40, in, type, {}, integer_bits);
    const auto packed = backend->PackStored({{w.stored()}}, DType::kBF16);
    Matrix x = Matrix::Normal(random_, 9, in), clean(9, 40), dirty(9, 40);
    backend->Matmul(x.tensor(), *packed, clean.tensor(), {});
    x.row(4)[random_.Int(0, in - 1)] = NAN;
    backend->Matmul(x.tensor(), *packed, dirty.tensor(), {});
    for (int64_t i = 0; i < 9; ++i) {
      if (i == 4) {
        for (int64_t j = 0; j < 40; ++j) EXPECT_TRUE(std::isnan(dirty.row(i)[j]));
      } else {
        EXPECT_TRUE(SameBits(dirty, i, clean, i));
      }
    }
  }
};

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_STORED_MATMUL_TESTING_H_
