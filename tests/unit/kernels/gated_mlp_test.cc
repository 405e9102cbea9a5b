#include <cmath>

#include "kernels/matmul.h"
#include "kernels/rmsnorm.h"
#include "kernels/silu_mul.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class GatedMlpTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(GatedMlpTest);

TEST_P(GatedMlpTest, IsItsPartsToTheBitAndNearTheReference) {
  SCOPED_TRACE(Seed());
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const int64_t m : {int64_t{1}, random_.Int(2, 20), random_.Int(130, 150)}) {
      const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
      const int64_t hidden = random_.Int(1, 90), width = random_.Int(1, 120);
      SCOPED_TRACE(testing::Message() << DTypeName(compute) << " m " << m << " hidden " << hidden
                                      << " width " << width);
      const auto deviation = [](int64_t in) { return 1.0f / std::sqrt(static_cast<float>(in)); };
      const FileMatrix gate(random_, width, hidden, DType::kF32, deviation(hidden)),
          up(random_, width, hidden, DType::kF32, deviation(hidden)),
          down(random_, hidden, width, DType::kF32, deviation(width));
      const std::vector<HostMatrix> gate_up = {gate.host(), up.host()}, downs = {down.host()};
      const auto of_gate_up = backend->Pack(gate_up, compute);
      const auto of_down = backend->Pack(downs, compute);
      Matrix norm = Matrix::Normal(random_, 1, hidden);
      Matrix gate_up_bias = Matrix::Normal(random_, 1, 2 * width);
      Matrix down_bias = Matrix::Normal(random_, 1, hidden);
      const bool biased = random_.Int(0, 1) == 1;
      const float* const biases[2] = {biased ? gate_up_bias.row(0) : nullptr,
                                      biased ? down_bias.row(0) : nullptr};
      Matrix actual = Matrix::Normal(random_, m, hidden), parts = actual, expected = actual;
      Matrix normed(m, hidden), gate_rows(m, 2 * width), activated(m, width);
      backend->GatedMlp({.hidden = actual.tensor(),
                         .norm_weight = norm.row(0),
                         .eps = 1e-5f,
                         .gate_up = *of_gate_up,
                         .gate_up_bias = biases[0],
                         .down = *of_down,
                         .down_bias = biases[1],
                         .normed = normed.tensor(),
                         .gate_rows = gate_rows.tensor(),
                         .activated = activated.tensor()});
      EXPECT_TRUE(gate_rows.GuardsIntact());
      backend->RmsNorm(parts.tensor(), norm.row(0), 1e-5f, normed.tensor());
      backend->Matmul(normed.tensor(), *of_gate_up, gate_rows.tensor(), {.bias = biases[0]});
      backend->SiluMul(gate_rows.tensor(), activated.tensor());
      backend->Matmul(activated.tensor(), *of_down, parts.tensor(),
                      {.bias = biases[1], .accumulate = true});
      ASSERT_TRUE(SameBits(actual, parts));
      if (compute != DType::kF32) continue;  // a rounding that goes the other way is no error
      RmsNormRef(expected.tensor(), norm.row(0), 1e-5f, normed.tensor());
      MatmulRef(normed.tensor(), gate_up, compute, gate_rows.tensor(), {.bias = biases[0]});
      SiluMulRef(gate_rows.tensor(), activated.tensor());
      MatmulRef(activated.tensor(), downs, compute, expected.tensor(),
                {.bias = biases[1], .accumulate = true});
      ExpectNear(actual, expected, 1e-4, 1e-5);
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
