#include "kernels/feature_map.h"

#include "kernels/cpu/feature_map.h"
#include "tests/unit/kernels/feature_map_testing.h"

namespace winnow::kernels {
namespace {

// Log-features [rows][F] of x by the packed map of one head.
Matrix Map(const std::string& isa, const PackedFeatureMap& packed, int32_t head, const Matrix& x) {
  const auto& map = static_cast<const CpuFeatureMap&>(packed);
  const int32_t rows = static_cast<int32_t>(x.rows());
  std::vector<float> inputs(rows * map.InputStride()), scratch(map.ScratchFloats());
  for (int32_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < x.cols(); ++c) {
      inputs[i * map.InputStride() + c] = ToFloat(ToBF16(x.row(i)[c]));
    }
  }
  Matrix out(rows, map.features());
  map.Apply(*FindCpuOps(isa.c_str()), head, rows, inputs.data(), scratch.data(), out.row(0),
            out.tensor().stride);
  return out;
}

Matrix MapRef(const FeatureMapWeights& weights, int32_t head, const Matrix& x) {
  Matrix out(x.rows(), weights.out.out);
  std::vector<double> log_features(weights.out.out);
  for (int64_t i = 0; i < x.rows(); ++i) {
    FeatureMapRef(weights, head, x.row(i), log_features.data());
    std::copy(log_features.begin(), log_features.end(), out.row(i));
  }
  return out;
}

class FeatureMapTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(FeatureMapTest);

TEST_P(FeatureMapTest, EqualsTheReferenceForEveryHeadAndShape) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 96, 128, 256}) {
    const FeatureMapShape shape{2, d, static_cast<int32_t>(random_.Int(1, 150)),
                                static_cast<int32_t>(random_.Int(1, 150)),
                                static_cast<int32_t>(random_.Int(16, 256))};
    const RandomFeatureMap map(random_, shape, 5.0f);
    const auto packed = Make(2)->PackFeatureMap(map.weights());
    ASSERT_NE(packed, nullptr);
    EXPECT_EQ(packed->features(), shape.features);
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      const Matrix x = Matrix::Normal(random_, random_.Int(1, CpuFeatureMap::kTileRows), d);
      ExpectNear(Map(GetParam(), *packed, head, x), MapRef(map.weights(), head, x), 1e-4, 1e-5);
    }
  }
}

TEST_P(FeatureMapTest, EqualsWhatCalibrateComputes) {
  RecordedCompletion recorded;
  for (const std::string side : {"key", "query"}) {
    const FeatureMapWeights map = recorded.Map(side);
    const auto packed = Make(1)->PackFeatureMap(map);
    const int32_t d = map.stem.in, features = map.out.out;
    std::vector<float> vectors;
    if (side == "key") {
      for (const uint16_t bits : recorded.values<uint16_t>("keys")) {
        vectors.push_back(ToFloat(BF16{bits}));
      }
    } else {
      vectors = recorded.values<float>("queries");
    }
    const auto expected = recorded.values<float>(side + "_features");
    const int64_t of_head = static_cast<int64_t>(vectors.size()) / d / map.kv_heads;
    for (int32_t head = 0; head < map.kv_heads; ++head) {
      for (int64_t i = 0; i < of_head; ++i) {
        Matrix x(1, d), log_features(1, features);
        const int64_t row = head * of_head + i;
        std::copy(&vectors[row * d], &vectors[row * d] + d, x.row(0));
        std::copy(&expected[row * features], &expected[row * features] + features,
                  log_features.row(0));
        ExpectNear(Map(GetParam(), *packed, head, x), log_features, 2e-4, 1e-5);
        ExpectNear(MapRef(map, head, x), log_features, 2e-4, 1e-5);
      }
    }
  }
}

TEST_P(FeatureMapTest, GeluIsThatOfTheErrorFunctionEverywhere) {
  const CpuOps& ops = *FindCpuOps(GetParam().c_str());
  std::vector<float> gates = {0.0f, -0.0f, 1e-30f, -1e-30f, 40.0f, -40.0f, 1e10f, -1e10f, 1e30f};
  for (int i = -2000; i <= 2000; ++i) gates.push_back(static_cast<float>(i) / 250.0f);
  const int64_t n = static_cast<int64_t>(gates.size());  // not a whole number of registers
  std::vector<float> gate_up = gates, out(n + 1, 7.0f);
  for (int64_t i = 0; i < n; ++i) gate_up.push_back(i % 2 == 0 ? 1.0f : -3.0f);
  ops.gelu_mul_row(gate_up.data(), n, out.data());
  for (int64_t i = 0; i < n; ++i) {
    const double x = gates[i], up = gate_up[n + i];
    EXPECT_NEAR(out[i], x * 0.5 * std::erfc(-x * std::sqrt(0.5)) * up,
                1e-6 + 1e-6 * std::abs(x * up))
        << x;
  }
  EXPECT_EQ(out[n], 7.0f);
}

TEST_P(FeatureMapTest, InputsAreRoundedToBFloat16) {
  SCOPED_TRACE(Seed());
  const RandomFeatureMap map(random_, {1, 64, 64, 64, 32}, 5.0f);
  const auto packed = Make(1)->PackFeatureMap(map.weights());
  Matrix x = Matrix::Normal(random_, 1, 64), rounded = x;
  for (int64_t c = 0; c < 64; ++c) rounded.row(0)[c] = ToFloat(ToBF16(x.row(0)[c]));
  EXPECT_TRUE(SameBits(MapRef(map.weights(), 0, x), MapRef(map.weights(), 0, rounded)));
  EXPECT_TRUE(SameBits(Map(GetParam(), *packed, 0, x), Map(GetParam(), *packed, 0, rounded)));
}

TEST_P(FeatureMapTest, AVectorsFeaturesDoNotDependOnItsNeighbours) {
  SCOPED_TRACE(Seed());
  const RandomFeatureMap map(random_, {1, 96, 96, 40, 50}, 5.0f);
  const auto packed = Make(1)->PackFeatureMap(map.weights());
  const Matrix x = Matrix::Normal(random_, CpuFeatureMap::kTileRows, 96);
  const Matrix all = Map(GetParam(), *packed, 0, x);
  for (int64_t i = 0; i < x.rows(); i += random_.Int(1, 7)) {
    Matrix alone(1, 96);
    std::copy(x.row(i), x.row(i) + 96, alone.row(0));
    EXPECT_TRUE(SameBits(Map(GetParam(), *packed, 0, alone), 0, all, i));
  }
}

}  // namespace
}  // namespace winnow::kernels
