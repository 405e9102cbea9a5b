#include "kernels/silu_mul.h"

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class SiluMulTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(SiluMulTest);

TEST_P(SiluMulTest, EqualsTheReferenceForAnyWidth) {
  SCOPED_TRACE(Seed());
  for (const int64_t n :
       {int64_t{1}, int64_t{15}, int64_t{16}, random_.Int(17, 500), int64_t{8192}}) {
    const int64_t m = random_.Int(1, 7);
    Matrix gate_up = Matrix::Normal(random_, m, 2 * n, 5.0f);
    Matrix out(m, n), expected(m, n);
    Make(3)->SiluMul(gate_up.tensor(), out.tensor());
    SiluMulRef(gate_up.tensor(), expected.tensor());
    ExpectNear(out, expected, 1e-6, 2e-6);
  }
}

TEST_P(SiluMulTest, GeluEqualsTheReferenceForAnyWidth) {
  SCOPED_TRACE(Seed());
  for (const int64_t n :
       {int64_t{1}, int64_t{15}, int64_t{16}, random_.Int(17, 500), int64_t{8192}}) {
    const int64_t m = random_.Int(1, 7);
    Matrix gate_up = Matrix::Normal(random_, m, 2 * n, 3.0f);
    Matrix out(m, n), expected(m, n);
    Make(3)->GeluTanhMul(gate_up.tensor(), out.tensor());
    GeluTanhMulRef(gate_up.tensor(), expected.tensor());
    ExpectNear(out, expected, 1e-6, 4e-6);
  }
  // Gates whose cubes overflow: zeros below, and themselves above.
  Matrix gate_up(1, 8), out(1, 4);
  const float gates[] = {-1e30f, -50.0f, 50.0f, 1e30f};
  for (int j = 0; j < 4; ++j) {
    gate_up.row(0)[j] = gates[j];
    gate_up.row(0)[4 + j] = 2.0f;
  }
  Make(1)->GeluTanhMul(gate_up.tensor(), out.tensor());
  EXPECT_NEAR(out.row(0)[0], 0.0f, 2e-2);  // as with silu's
  EXPECT_NEAR(out.row(0)[1], 0.0f, 1e-30);
  EXPECT_EQ(out.row(0)[2], 100.0f);
  EXPECT_EQ(out.row(0)[3], 2e30f);
}

TEST_P(SiluMulTest, LargeGatesNeitherOverflowNorLoseTheirSign) {
  const std::vector<float> gates = {-1e30f, -1e4f, -200.0f, -90.0f, -88.0f, -20.0f,
                                    -0.0f,  0.0f,  20.0f,   1e4f,   1e30f};
  const int64_t n = static_cast<int64_t>(gates.size());
  Matrix gate_up(1, 2 * n), out(1, n), expected(1, n);
  for (int64_t j = 0; j < n; ++j) {
    gate_up.row(0)[j] = gates[j];
    gate_up.row(0)[n + j] = 2.0f;
  }
  Make(1)->SiluMul(gate_up.tensor(), out.tensor());
  SiluMulRef(gate_up.tensor(), expected.tensor());
  // 2^127 stands for larger exponentials: -1e30 then yields -0.01 where the reference yields 0.
  ExpectNear(out, expected, 2e-2, 1e-6);
  for (int64_t j = 0; j < n; ++j) EXPECT_FALSE(std::isnan(out.row(0)[j])) << gates[j];
  for (int64_t j = 1; j < n; ++j)
    EXPECT_NEAR(out.row(0)[j], expected.row(0)[j], 1e-6 * std::abs(expected.row(0)[j]) + 1e-30);
}

TEST_P(SiluMulTest, ClampedSwigluEqualsTheReferenceForAnyWidth) {
  SCOPED_TRACE(Seed());
  for (const int64_t n :
       {int64_t{1}, int64_t{15}, int64_t{16}, random_.Int(17, 500), int64_t{2880}}) {
    const int64_t m = random_.Int(1, 7);
    const ClampedSwiglu by =
        random_.Int(0, 1) == 0 ? ClampedSwiglu() : ClampedSwiglu{.alpha = 0.7f, .limit = 2.5f};
    Matrix gate_up = Matrix::Normal(random_, m, 2 * n, 5.0f);
    Matrix out(m, n), expected(m, n);
    Make(3)->ClampedSwigluMul(gate_up.tensor(), by, out.tensor());
    ClampedSwigluMulRef(gate_up.tensor(), by, expected.tensor());
    EXPECT_TRUE(out.GuardsIntact());
    ExpectNear(out, expected, 1e-6, 4e-6);
  }
}

// Gates have no bound below, and ups have one on either side.
TEST_P(SiluMulTest, ClampedSwigluBoundsGatesAboveAndUpsOnBothSides) {
  const float gates[] = {-1e30f, -60.0f, 1e30f, 7.0f, 3.0f, 3.0f};
  const float ups[] = {2.0f, 2.0f, 1e30f, 7.0f, -1e30f, -7.0f};
  Matrix gate_up(1, 12), out(1, 6);
  for (int j = 0; j < 6; ++j) {
    gate_up.row(0)[j] = gates[j];
    gate_up.row(0)[6 + j] = ups[j];
  }
  Make(1)->ClampedSwigluMul(gate_up.tensor(), {}, out.tensor());
  EXPECT_NEAR(out.row(0)[0], 0.0f, 2e-2);  // as with silu's
  EXPECT_NEAR(out.row(0)[1], 0.0f, 1e-30);
  EXPECT_EQ(out.row(0)[2], out.row(0)[3]);
  EXPECT_NEAR(out.row(0)[3], 8 * 7 / (1 + std::exp(-1.702 * 7)), 1e-4);
  EXPECT_EQ(out.row(0)[4], out.row(0)[5]);
  EXPECT_NEAR(out.row(0)[5], -6 * 3 / (1 + std::exp(-1.702 * 3)), 1e-4);
}

TEST_P(SiluMulTest, ClampedSwigluPassesNotANumberOn) {
  Matrix gate_up(1, 34), out(1, 17);
  gate_up.row(0)[3] = NAN;
  gate_up.row(0)[17 + 16] = NAN;
  Make(1)->ClampedSwigluMul(gate_up.tensor(), {}, out.tensor());
  EXPECT_TRUE(std::isnan(out.row(0)[3]));
  EXPECT_TRUE(std::isnan(out.row(0)[16]));
  EXPECT_EQ(out.row(0)[4], 0.0f);
}

TEST_P(SiluMulTest, NotANumberIsPassedOn) {
  Matrix gate_up(1, 34), out(1, 17);
  gate_up.row(0)[3] = NAN;
  Make(1)->SiluMul(gate_up.tensor(), out.tensor());
  EXPECT_TRUE(std::isnan(out.row(0)[3]));
  EXPECT_EQ(out.row(0)[4], 0.0f);
}

}  // namespace
}  // namespace winnow::kernels
