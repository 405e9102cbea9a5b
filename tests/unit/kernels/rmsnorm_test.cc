#include "kernels/rmsnorm.h"

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class RmsNormTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(RmsNormTest);

TEST_P(RmsNormTest, EqualsTheReferenceForAnyWidth) {
  SCOPED_TRACE(Seed());
  const auto backend = Make(2);
  for (const int64_t n : {int64_t{1}, int64_t{7}, int64_t{16}, int64_t{63}, int64_t{64},
                          random_.Int(65, 400), int64_t{2048}}) {
    SCOPED_TRACE(n);
    const int64_t m = random_.Int(1, 9);
    Matrix x = Matrix::Normal(random_, m, n, 3.0f), weight = Matrix::Normal(random_, 1, n);
    Matrix out(m, n), expected(m, n);
    backend->RmsNorm(x.tensor(), weight.row(0), 1e-5f, out.tensor());
    RmsNormRef(x.tensor(), weight.row(0), 1e-5f, expected.tensor());
    ExpectNear(out, expected, 1e-6, 3e-6);
    backend->RmsNorm(x.tensor(), weight.row(0), 1e-5f, x.tensor());  // in place
    EXPECT_TRUE(SameBits(x, out));
  }
}

TEST_P(RmsNormTest, NormsEachHeadOnItsOwn) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 96, 128, 256}) {
    Matrix x = Matrix::Normal(random_, 5, 3 * d), weight = Matrix::Normal(random_, 1, d);
    for (int64_t i = 0; i < 5; ++i)
      x.row(i)[d] = 100.0f;  // head 1 has another scale than its neighbours
    Matrix expected = x;
    Make(2)->RmsNormHeads(x.tensor(), d, weight.row(0), 1e-6f);
    RmsNormHeadsRef(expected.tensor(), d, weight.row(0), 1e-6f);
    ExpectNear(x, expected, 1e-6, 3e-6);
  }
}

TEST_P(RmsNormTest, IsAddedToWhatIsThere) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {int64_t{1}, int64_t{33}, random_.Int(65, 3000)}) {
    const int64_t m = random_.Int(1, 40);
    Matrix x = Matrix::Normal(random_, m, n, 3.0f), weight = Matrix::Normal(random_, 1, n);
    Matrix sum = Matrix::Normal(random_, m, n), expected = sum, of_x = x, normed(m, n);
    const auto backend = Make(3);
    backend->RmsNorm(x.tensor(), weight.row(0), 1e-5f, normed.tensor());
    Matrix apart = sum;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) apart.row(i)[j] += normed.row(i)[j];
    }
    AddRmsNormRef(of_x.tensor(), weight.row(0), 1e-5f, expected.tensor());
    backend->AddRmsNorm(x.tensor(), weight.row(0), 1e-5f, sum.tensor());
    ExpectNear(sum, expected, 1e-6, 3e-6);
    EXPECT_TRUE(SameBits(sum, apart));
  }
}

TEST_P(RmsNormTest, EpsilonKeepsZerosZero) {
  Matrix x(1, 33), weight = Matrix::Normal(random_, 1, 33), out(1, 33);
  Make(1)->RmsNorm(x.tensor(), weight.row(0), 1e-5f, out.tensor());
  for (int64_t j = 0; j < 33; ++j) EXPECT_EQ(out.row(0)[j], 0.0f);
}

TEST_P(RmsNormTest, ARowIsTheSameBitsAloneAndInABatch) {
  SCOPED_TRACE(Seed());
  const int64_t n = random_.Int(100, 3000);
  Matrix x = Matrix::Normal(random_, 40, n), weight = Matrix::Normal(random_, 1, n);
  Matrix alone(40, n), batch(40, n);
  Make(3)->RmsNorm(x.tensor(), weight.row(0), 1e-5f, batch.tensor());
  const auto one = Make(1);
  for (int64_t i = 0; i < 40; ++i) {
    one->RmsNorm(x.tensor().RowRange(i, 1), weight.row(0), 1e-5f, alone.tensor().RowRange(i, 1));
  }
  EXPECT_TRUE(SameBits(alone, batch));
}

}  // namespace
}  // namespace winnow::kernels
