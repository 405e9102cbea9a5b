#include "kernels/matmul.h"

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class MatmulTest : public EachIsa {
 protected:
  // The error of a sum of `in` products of unit normal values, in f32 and generously.
  static double Tolerance(int64_t in) { return 2e-6 * static_cast<double>(in) + 1e-5; }
};
WINNOW_FOR_EACH_ISA(MatmulTest);

TEST_P(MatmulTest, EqualsTheReferenceForOddShapesAndEveryDType) {
  SCOPED_TRACE(Seed());
  const struct {
    DType file, compute;
  } kinds[] = {{DType::kBF16, DType::kBF16}, {DType::kF32, DType::kBF16},
               {DType::kF16, DType::kBF16},  {DType::kF32, DType::kF32},
               {DType::kBF16, DType::kF32},  {DType::kF16, DType::kF32},
               {DType::kF16, DType::kF16}};
  for (int round = 0; round < 12; ++round) {
    const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
    for (const auto& kind : kinds) {
      const int64_t m = random_.Int(1, 20), in = random_.Int(1, 90);
      const int64_t out_a = random_.Int(1, 150), out_b = random_.Int(0, 70);
      SCOPED_TRACE(testing::Message()
                   << DTypeName(kind.file) << " as " << DTypeName(kind.compute) << ", m " << m
                   << ", in " << in << ", out " << out_a << "+" << out_b);
      const FileMatrix a(random_, out_a, in, kind.file), b(random_, out_b, in, kind.file);
      std::vector<HostMatrix> parts = {a.host()};
      if (out_b > 0) parts.push_back(b.host());
      Matrix x = Matrix::Normal(random_, m, in);
      Matrix bias = Matrix::Normal(random_, 1, out_a + out_b);
      Matrix y = Matrix::Normal(random_, m, out_a + out_b);
      Matrix expected = y;
      MatmulEpilogue epilogue;
      if (random_.Int(0, 1) == 1) epilogue.bias = bias.row(0);
      epilogue.accumulate = random_.Int(0, 1) == 1;

      const auto w = backend->Pack(parts, kind.compute);
      EXPECT_EQ(w->out_features(), out_a + out_b);
      EXPECT_EQ(w->in_features(), in);
      EXPECT_GE(w->size_bytes(),
                static_cast<size_t>((out_a + out_b) * in) * DTypeBytes(kind.compute));
      backend->Matmul(x.tensor(), *w, y.tensor(), epilogue);
      MatmulRef(x.tensor(), parts, kind.compute, expected.tensor(), epilogue);
      ExpectNear(y, expected, Tolerance(in), 1e-5);
    }
  }
}

TEST_P(MatmulTest, ARowIsTheSameBitsAloneAndInABatchOfAnySize) {
  SCOPED_TRACE(Seed());
  for (const DType compute : {DType::kBF16, DType::kF32, DType::kF16}) {
    // More panels than one row takes at once, a tail of outputs, and more steps than one cache
    // line.
    const int64_t in = random_.Int(100, 300), out = random_.Int(150, 300);
    const FileMatrix w(random_, out, in, compute == DType::kF16 ? DType::kF16 : DType::kBF16);
    const std::vector<HostMatrix> parts = {w.host()};
    const auto backend = Make(1);
    const auto packed = backend->Pack(parts, compute);
    Matrix x = Matrix::Normal(random_, 64, in);
    Matrix alone(64, out);
    for (int64_t i = 0; i < 64; ++i) {
      backend->Matmul(x.tensor().RowRange(i, 1), *packed, alone.tensor().RowRange(i, 1), {});
    }
    for (int threads = 1; threads <= 3; ++threads) {
      const auto other = Make(threads);
      const auto repacked = other->Pack(parts, compute);
      for (int64_t m : {2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 33, 64}) {
        const int64_t first = random_.Int(0, 64 - m);
        Matrix y(m, out);
        other->Matmul(x.tensor().RowRange(first, m), *repacked, y.tensor(), {});
        for (int64_t i = 0; i < m; ++i) {
          ASSERT_TRUE(SameBits(y, i, alone, first + i))
              << DTypeName(compute) << ", m " << m << ", " << threads << " threads";
        }
      }
    }
  }
}

// Items that shrink towards the end meet every panel once: what is added twice, or not at all, shows.
TEST_P(MatmulTest, AnyNumberOfThreadsAddsEveryOutputOnce) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    // Panels of some hundred bytes, of which an item has hundreds, to such that are items by themselves.
    const int64_t in = round % 2 == 0 ? random_.Int(1, 40) : random_.Int(500, 3000);
    const int64_t out = round % 2 == 0 ? random_.Int(1, 20000) : random_.Int(1, 1500);
    const FileMatrix w(random_, out, in, DType::kBF16);
    const std::vector<HostMatrix> parts = {w.host()};
    Matrix x = Matrix::Normal(random_, 40, in);
    const Matrix before = Matrix::Normal(random_, 40, out);
    std::vector<Matrix> alone;
    for (const int threads : {1, 2, 3, 7, 16}) {
      const auto backend = Make(threads);
      const auto packed = backend->Pack(parts, DType::kBF16);
      size_t at = 0;
      for (const int64_t m : {1, 2, 9, 40}) {
        Matrix y = before;
        backend->Matmul(x.tensor().RowRange(0, m), *packed, y.tensor().RowRange(0, m),
                        {.accumulate = true});
        if (threads == 1) alone.push_back(y);
        for (int64_t i = 0; i < 40; ++i) {
          ASSERT_TRUE(SameBits(y, i, alone[at], i))
              << "row " << i << " of " << m << ", in " << in << ", out " << out << ", " << threads
              << " threads";
        }
        ++at;
      }
    }
  }
}

TEST_P(MatmulTest, LongInnerDimensionsKeepOneOrder) {
  SCOPED_TRACE(Seed());
  const int64_t in = random_.Int(9000, 11000), out = 70, m = 100;
  const FileMatrix w(random_, out, in, DType::kBF16, 0.1f);
  const std::vector<HostMatrix> parts = {w.host()};
  const auto backend = Make(2);
  const auto packed = backend->Pack(parts, DType::kBF16);
  Matrix x = Matrix::Normal(random_, m, in);
  Matrix y(m, out), alone(1, out), expected(1, out);
  backend->Matmul(x.tensor(), *packed, y.tensor(), {});
  for (int64_t i : {int64_t{0}, random_.Int(1, m - 2), m - 1}) {
    backend->Matmul(x.tensor().RowRange(i, 1), *packed, alone.tensor(), {});
    ASSERT_TRUE(SameBits(y, i, alone, 0));
    MatmulRef(x.tensor().RowRange(i, 1), parts, DType::kBF16, expected.tensor(), {});
    ExpectNear(alone, expected, 2e-3, 1e-4);
  }
}

TEST_P(MatmulTest, NotANumberStaysInItsRow) {
  const auto backend = Make(2);
  const FileMatrix w(random_, 40, 32, DType::kBF16);
  const std::vector<HostMatrix> parts = {w.host()};
  const auto packed = backend->Pack(parts, DType::kBF16);
  Matrix x = Matrix::Normal(random_, 9, 32);
  Matrix clean(9, 40), dirty(9, 40);
  backend->Matmul(x.tensor(), *packed, clean.tensor(), {});
  x.row(4)[7] = NAN;
  backend->Matmul(x.tensor(), *packed, dirty.tensor(), {});
  for (int64_t i = 0; i < 9; ++i) {
    if (i == 4) {
      EXPECT_TRUE(std::isnan(dirty.row(i)[0]));
    } else {
      EXPECT_TRUE(SameBits(dirty, i, clean, i));
    }
  }
}

TEST_P(MatmulTest, NoRowsIsNoWork) {
  const auto backend = Make(2);
  const FileMatrix w(random_, 16, 8, DType::kF32);
  const std::vector<HostMatrix> parts = {w.host()};
  const auto packed = backend->Pack(parts, DType::kF32);
  Matrix x(1, 8), y(1, 16);
  backend->Matmul(x.tensor().RowRange(0, 0), *packed, y.tensor(), {});
  EXPECT_EQ(y.row(0)[0], 0.0f);
}

}  // namespace
}  // namespace winnow::kernels
