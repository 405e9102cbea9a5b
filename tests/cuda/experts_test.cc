#include "kernels/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/quantized.h"
#include "tests/cuda/backend_testing.h"
#include "tests/unit/kernels/random_blocks.h"
#include "tests/unit/kernels/routing_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaExpertsTest : public CudaBackendFixture {
 protected:
  // A layer as the engine has it (engine/expert_mlp.h): what each expert gives lies where its rows were. In these forms, whose
  // products round differently.
  struct Layer {
    std::unique_ptr<PackedMatrix> router;
    std::vector<std::unique_ptr<PackedMatrix>> gate_up, down;
    // [experts][2*width] and [experts][hidden] in the device's memory, or empty: the gate is then clamped, too.
    Buffer gate_up_bias, down_bias;
    const float* GateUpBias(size_t expert) const {
      return gate_up_bias.data() == nullptr ? nullptr
                                            : static_cast<const float*>(gate_up_bias.data()) +
                                                  expert * gate_up[0]->out_features();
    }
    const float* DownBias(size_t expert) const {
      return down_bias.data() == nullptr
                 ? nullptr
                 : static_cast<const float*>(down_bias.data()) + expert * down[0]->out_features();
    }
  };
  static constexpr ClampedSwiglu kClamp = {.alpha = 1.3f, .limit = 0.9f};
  void AddBiases(Layer& layer) {
    const auto upload = [&](int64_t values) {
      std::vector<float> biases(values);
      for (float& value : biases) value = random_.Normal();
      Buffer buffer = backend_->Allocate(biases.size() * sizeof(float));
      Matrix host(1, values, 0);
      std::copy(biases.begin(), biases.end(), host.row(0));
      EXPECT_EQ(cudaMemcpy(buffer.data(), host.row(0), biases.size() * sizeof(float),
                           cudaMemcpyHostToDevice),
                cudaSuccess);
      return buffer;
    };
    const auto experts = static_cast<int64_t>(layer.down.size());
    layer.gate_up_bias = upload(experts * layer.gate_up[0]->out_features());
    layer.down_bias = upload(experts * layer.down[0]->out_features());
  }
  Layer AnyLayer(int64_t experts, int64_t hidden, int64_t width, WeightType type,
                 int32_t integer_bits = 8) {
    Layer layer;
    const FileMatrix router(random_, experts, hidden, DType::kF32, 0.1f);
    layer.router = backend_->Pack({{router.host()}}, DType::kF32);
    for (int64_t e = 0; e < experts; ++e) {
      if (type == WeightType::kBF16) {
        const FileMatrix gate_up(random_, 2 * width, hidden, DType::kBF16, 0.1f);
        const FileMatrix down(random_, hidden, width, DType::kBF16, 0.1f);
        layer.gate_up.push_back(backend_->Pack({{gate_up.host()}}, DType::kBF16));
        layer.down.push_back(backend_->Pack({{down.host()}}, DType::kBF16));
      } else {
        const BlockMatrix gate_up(random_, 2 * width, hidden, type, {}, integer_bits);
        const BlockMatrix down(random_, hidden, width, type, {}, integer_bits);
        layer.gate_up.push_back(backend_->PackStored({{gate_up.stored()}}, DType::kBF16));
        layer.down.push_back(backend_->PackStored({{down.stored()}}, DType::kBF16));
      }
    }
    return layer;
  }
  // Rows [first, first + m) of `states`, with the layer added; normed is what experts read.
  Matrix Add(const Layer& layer, Matrix& normed, const Matrix& states, int64_t first, int64_t m,
             int64_t per_token) {
    const auto experts = static_cast<int64_t>(layer.down.size());
    const int64_t hidden = normed.cols(), width = layer.down[0]->in_features();
    Matrix result(m, hidden), logits(m, experts, 0), weights(m, per_token, 0);
    for (int64_t i = 0; i < m; ++i) std::copy_n(states.row(first + i), hidden, result.row(i));
    Matrix rows(m * per_token, hidden, 0), gate_rows(m, 2 * width, 4), activated(m, width, 4);
    auto of_normed = Put(normed), of_result = Put(result), of_logits = Put(logits);
    auto of_weights = Put(weights), of_rows = Put(rows), of_gate_rows = Put(gate_rows);
    auto of_activated = Put(activated);
    const Buffer shared = backend_->AllocateShared(m * per_token * sizeof(int32_t));
    auto* const ids = static_cast<int32_t*>(shared.data());
    const Tensor x = of_normed.tensor.RowRange(first, m);
    backend_->Matmul(x, *layer.router, of_logits.tensor, {});
    backend_->RouteExperts(of_logits.tensor, {.normalized = true}, ids, of_weights.tensor);
    EXPECT_TRUE(backend_->Synchronize());
    std::vector<int32_t> gathered, places(m * per_token);
    std::vector<int64_t> begins;
    for (int64_t e = 0; e < experts; ++e) {
      begins.push_back(static_cast<int64_t>(gathered.size()));
      for (int64_t slot = 0; slot < m * per_token; ++slot) {
        if (ids[slot] != e) continue;
        places[slot] = static_cast<int32_t>(gathered.size());
        gathered.push_back(static_cast<int32_t>(slot / per_token));
      }
    }
    begins.push_back(static_cast<int64_t>(gathered.size()));
    backend_->GatherExpertRows(x, gathered, of_rows.tensor);
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = begins[e + 1] - begins[e];
      if (count == 0) continue;
      const Tensor of_expert = of_rows.tensor.RowRange(begins[e], count);
      const Tensor gated = of_gate_rows.tensor.RowRange(0, count);
      const Tensor activated_rows = of_activated.tensor.RowRange(0, count);
      backend_->Matmul(of_expert, *layer.gate_up[e], gated, {.bias = layer.GateUpBias(e)});
      if (layer.GateUpBias(e) == nullptr) {
        backend_->SiluMatmul(gated, *layer.down[e], activated_rows, of_expert, {});
      } else {
        backend_->ClampedSwigluMul(gated, kClamp, activated_rows);
        backend_->Matmul(activated_rows, *layer.down[e], of_expert, {.bias = layer.DownBias(e)});
      }
    }
    backend_->AddExpertRows(of_rows.tensor, places, of_weights.tensor, of_result.tensor);
    of_result.Fetch();
    return result;
  }

  std::vector<ExpertMatrices> MatricesOf(const Layer& layer) {
    std::vector<ExpertMatrices> matrices;
    for (size_t e = 0; e < layer.down.size(); ++e) {
      matrices.push_back(
          {layer.gate_up[e].get(), layer.down[e].get(), layer.GateUpBias(e), layer.DownBias(e)});
    }
    return matrices;
  }
  // Add() without the host; whether it was done.
  bool AddOnDevice(const Layer& layer, const ExpertSet& set, Matrix& normed, const Matrix& states,
                   int64_t m, int64_t per_token, Matrix& result) {
    result = Matrix(m, normed.cols());
    Matrix logits(m, static_cast<int64_t>(layer.down.size()), 0);
    for (int64_t i = 0; i < m; ++i) std::copy_n(states.row(i), normed.cols(), result.row(i));
    auto of_normed = Put(normed), of_result = Put(result), of_logits = Put(logits);
    Matrix scratch(backend_->RoutedExpertRows(m * per_token, logits.cols()), normed.cols(), 0);
    auto of_scratch = Put(scratch);
    const Tensor x = of_normed.tensor.RowRange(0, m);
    backend_->Matmul(x, *layer.router, of_logits.tensor, {});
    std::optional<ClampedSwiglu> clamped;
    if (layer.GateUpBias(0) != nullptr) clamped = kClamp;
    const bool done = backend_->AddRoutedExperts({.experts = set,
                                                  .per_token = static_cast<int32_t>(per_token),
                                                  .routing = {.normalized = true},
                                                  .clamped = clamped,
                                                  .logits = of_logits.tensor,
                                                  .normed = x,
                                                  .hidden = of_result.tensor,
                                                  .rows = of_scratch.tensor});
    of_result.Fetch();
    return done;
  }

  struct Routed {
    std::vector<int32_t> ids;
    Matrix weights;
  };
  // The correction of `routing` lies on the host.
  Routed Route(Matrix& logits, int64_t per_token, ExpertRouting routing, int64_t first,
               int64_t rows) {
    Routed routed = {{}, Matrix(rows, per_token)};
    Matrix correction(1, logits.cols(), 0);
    if (routing.correction != nullptr) {
      std::copy_n(routing.correction, logits.cols(), correction.row(0));
    }
    auto of_correction = Put(correction);
    if (routing.correction != nullptr) routing.correction = of_correction.tensor.f32(0);
    auto on_device = Put(logits), of_weights = Put(routed.weights);
    const Buffer ids = backend_->AllocateShared(rows * per_token * sizeof(int32_t));
    auto* const made = static_cast<int32_t*>(ids.data());
    backend_->RouteExperts(on_device.tensor.RowRange(first, rows), routing, made,
                           of_weights.tensor);
    of_weights.Fetch();  // waits
    routed.ids.assign(made, made + rows * per_token);
    return routed;
  }

  // Says whether rounding may exchange two of a row's first experts: they are chosen by sums in float32.
  static bool IsInDoubt(const float* logits, int64_t experts, int64_t per_token,
                        const ExpertRouting& routing) {
    if (routing.correction == nullptr) return false;
    const bool sigmoid = routing.scores == ExpertRouting::Scores::kSigmoid;
    const double largest = *std::max_element(logits, logits + experts);
    std::vector<double> keys(experts);
    double all = 0;
    for (int64_t e = 0; e < experts; ++e) {
      keys[e] = sigmoid ? 1 / (1 + std::exp(-double{logits[e]})) : std::exp(logits[e] - largest);
      all += keys[e];
    }
    for (int64_t e = 0; e < experts; ++e) {
      keys[e] = (sigmoid ? keys[e] : keys[e] / all) + routing.correction[e];
    }
    std::sort(keys.begin(), keys.end(), std::greater<>());
    for (int64_t i = 0; i < std::min(per_token, experts - 1); ++i) {
      // Equal logits with equal corrections have equal sums on every device.
      const double gap = keys[i] - keys[i + 1];
      if (gap > 0 && gap < 1e-6 * std::max(1e-2, std::abs(keys[i]))) return true;
    }
    return false;
  }

  std::vector<float> correction_;
};

TEST_F(CudaExpertsTest, RoutesAsTheReferenceAndARowAloneHasTheSameBits) {
  SCOPED_TRACE(Seed());
  for (const int64_t experts :
       {int64_t{1}, int64_t{8}, int64_t{33}, int64_t{128}, int64_t{1024}, random_.Int(2, 1024)}) {
    for (const ExpertRouting& routing : AnyRoutings(random_, experts, correction_)) {
      const int64_t m = random_.Int(1, 70);
      const int64_t per_token = random_.Int(1, std::min<int64_t>(experts, 40));
      Matrix logits = Matrix::Normal(random_, m, experts, 3.0f);
      for (int64_t i = 0; i < m * experts / 4; ++i) {
        float& value = logits.row(random_.Int(0, m - 1))[random_.Int(0, experts - 1)];
        value = std::round(value);  // some are equal
      }
      const Routed routed = Route(logits, per_token, routing, 0, m);
      Matrix expected(m, per_token);
      std::vector<int32_t> ids(m * per_token);
      RouteExpertsRef(logits.tensor(), routing, ids.data(), expected.tensor());
      int64_t in_doubt = 0;
      for (int64_t i = 0; i < m; ++i) {
        if (IsInDoubt(logits.row(i), experts, per_token, routing)) {
          ++in_doubt;
          continue;
        }
        for (int64_t s = 0; s < per_token; ++s) {
          EXPECT_EQ(routed.ids[i * per_token + s], ids[i * per_token + s])
              << experts << " experts, slot " << s << " of " << per_token;
          const float weight = expected.row(i)[s];
          EXPECT_NEAR(routed.weights.row(i)[s], weight, 1e-9 + 1e-5 * weight);
        }
      }
      EXPECT_LE(in_doubt, m / 4);
      const int64_t row = random_.Int(0, m - 1);
      const Routed alone = Route(logits, per_token, routing, row, 1);
      EXPECT_TRUE(SameBits(alone.weights, 0, routed.weights, row));
      EXPECT_TRUE(
          std::equal(alone.ids.begin(), alone.ids.end(), routed.ids.begin() + row * per_token));
    }
  }
}

TEST_F(CudaExpertsTest, BrokenLogitsGiveTheReferencesExpertsAndWeightsThatAreNoNumbers) {
  for (const ExpertRouting& routing : AnyRoutings(random_, 4, correction_)) {
    for (const std::vector<float>& values :
         {std::vector<float>{0, NAN, 1, 2}, {NAN, NAN, NAN, NAN}, {INFINITY, 0, 1, 2}}) {
      Matrix logits(1, 4), weights(1, 3);
      std::copy(values.begin(), values.end(), logits.row(0));
      std::vector<int32_t> ids(3);
      RouteExpertsRef(logits.tensor(), routing, ids.data(), weights.tensor());
      const Routed routed = Route(logits, 3, routing, 0, 1);
      EXPECT_EQ(routed.ids, ids);
      for (int s = 0; s < 3; ++s) EXPECT_TRUE(std::isnan(routed.weights.row(0)[s]));
    }
  }
}

TEST_F(CudaExpertsTest, GathersAnyRows) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {int64_t{1}, int64_t{2048}, random_.Int(2, 3000)}) {
    for (const int64_t padding : {0, 3, 4}) {
      const int64_t m = random_.Int(1, 20), count = random_.Int(1, 900);
      Matrix x = Matrix::Normal(random_, m, n, 1.0f, padding), out(count, n, padding);
      Matrix expected = out;
      std::vector<int32_t> rows;
      for (int64_t i = 0; i < count; ++i) {
        rows.push_back(static_cast<int32_t>(random_.Int(0, m - 1)));
      }
      auto of_x = Put(x), of_out = Put(out);
      backend_->GatherExpertRows(of_x.tensor, rows, of_out.tensor);
      of_out.Fetch();
      GatherExpertRowsRef(x.tensor(), rows, expected.tensor());
      EXPECT_TRUE(SameBits(out, expected));
      EXPECT_TRUE(out.GuardsIntact());
    }
  }
}

// The bits that experts.h promises, which are those of the CPU.
TEST_F(CudaExpertsTest, AddsSlotsInTheirOrderWhereverTheirRowsLie) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {int64_t{1}, int64_t{256}, int64_t{2048}, random_.Int(2, 3000)}) {
    const int64_t m = random_.Int(1, 30), per_token = random_.Int(1, 9);
    Matrix x = Matrix::Normal(random_, m * per_token, n), y = Matrix::Normal(random_, m, n);
    Matrix weights = Matrix::Normal(random_, m, per_token), expected = y, near = y;
    std::vector<int32_t> places(m * per_token);
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int32_t>(i);
    random_.Shuffle(places);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float sum = weights.row(i)[0] * x.row(places[i * per_token])[j];
        for (int64_t s = 1; s < per_token; ++s) {
          const float product = weights.row(i)[s] * x.row(places[i * per_token + s])[j];
          sum += product;
        }
        expected.row(i)[j] += sum;
      }
    }
    AddExpertRowsRef(x.tensor(), places, weights.tensor(), near.tensor());
    auto of_x = Put(x), of_y = Put(y), of_weights = Put(weights);
    backend_->AddExpertRows(of_x.tensor, places, of_weights.tensor, of_y.tensor);
    of_y.Fetch();
    EXPECT_TRUE(SameBits(y, expected));
    ExpectNear(y, near, 2e-6, 1e-6);
  }
}

TEST_F(CudaExpertsTest, ARowOfALayerHasTheSameBitsAloneAndAmongOthers) {
  SCOPED_TRACE(Seed());
  for (const WeightType type :
       {WeightType::kBF16, WeightType::kQ8_0, WeightType::kL4x32, WeightType::kI8x128}) {
    const int64_t experts = random_.Int(2, 9), per_token = random_.Int(1, 2);
    const int64_t hidden = 256, width = 128 * random_.Int(1, 3);
    const Layer layer = AnyLayer(experts, hidden, width, type);
    for (const int64_t m : {int64_t{3}, int64_t{40}, random_.Int(100, 700)}) {
      SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", " << m << " rows to "
                                      << per_token << " of " << experts);
      Matrix normed = Matrix::Normal(random_, m, hidden, 1.0f, 4);
      const Matrix states = Matrix::Normal(random_, m, hidden);
      const Matrix together = Add(layer, normed, states, 0, m, per_token);
      for (int i = 0; i < 5; ++i) {
        const int64_t row = random_.Int(0, m - 1);
        EXPECT_TRUE(SameBits(Add(layer, normed, states, row, 1, per_token), 0, together, row));
        for (int64_t j = 0; j < hidden; ++j) ASSERT_TRUE(std::isfinite(together.row(row)[j]));
      }
    }
  }
}

// Few rows, whose tiles the device makes: the bits of the products that the host asks for, in every form.
TEST_F(CudaExpertsTest, RowsThatTheDeviceRoutesHaveTheBitsOfThoseOfTheHost) {
  SCOPED_TRACE(Seed());
  for (const WeightType type :
       {WeightType::kBF16, WeightType::kQ4_0, WeightType::kQ8_0, WeightType::kQ4K, WeightType::kQ6K,
        WeightType::kI4x32, WeightType::kI4x128, WeightType::kL4x32, WeightType::kF8x128,
        WeightType::kI8x128}) {
    for (int round = 0; round < 4; ++round) {
      // Few experts have several tiles each, many one or none. A product's last outputs and inner values may be part of a tile.
      const int64_t experts = round == 0 ? random_.Int(1, 8) : random_.Int(20, 140);
      const int64_t per_token = random_.Int(1, std::min<int64_t>(experts, 8));
      const int64_t step = BlockSizeOf(type).values > 32 ? 256 : 32;
      const int64_t hidden = step * random_.Int(1, 1024 / step);
      const int64_t width = step * random_.Int(1, 512 / step);
      const Layer layer = AnyLayer(experts, hidden, width, type);
      const auto set = backend_->MakeExpertSet(MatricesOf(layer));
      ASSERT_NE(set, nullptr);
      // Up to so many rows tiles are small ones.
      const int64_t few = std::min<int64_t>(1024, experts * 8) / per_token;
      for (const int64_t m : {int64_t{1}, std::min<int64_t>(random_.Int(2, 9), few), few,
                              few + random_.Int(1, 40), random_.Int(300, 1200)}) {
        SCOPED_TRACE(testing::Message()
                     << WeightTypeName(type) << ", " << m << " rows to " << per_token << " of "
                     << experts << ", " << hidden << " by " << width);
        Matrix normed = Matrix::Normal(random_, m, hidden, 1.0f, 4);
        // Rows that all go to the same experts, whose tiles are full then.
        if (round % 2 == 0) {
          for (int64_t i = 1; i < m; ++i) {
            for (int64_t j = 0; j < hidden; ++j) {
              normed.row(i)[j] = normed.row(0)[j] * static_cast<float>(1 + i);
            }
          }
        }
        const Matrix states = Matrix::Normal(random_, m, hidden);
        Matrix actual(m, hidden);
        ASSERT_TRUE(AddOnDevice(layer, *set, normed, states, m, per_token, actual));
        const Matrix expected = Add(layer, normed, states, 0, m, per_token);
        for (int64_t i = 0; i < m; ++i) {
          ASSERT_TRUE(SameBits(actual, i, expected, i)) << "row " << i;
        }
        EXPECT_TRUE(actual.GuardsIntact());
      }
    }
  }
}

// As gpt-oss has them.
TEST_F(CudaExpertsTest, ExpertsWithBiasesAndAClampedGateHaveTheBitsOfThoseOfTheHost) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : {WeightType::kBF16, WeightType::kQ8_0, WeightType::kMxfp4,
                                WeightType::kL4x32, WeightType::kI8x128}) {
    for (int round = 0; round < 3; ++round) {
      const int64_t experts = random_.Int(3, 60), per_token = random_.Int(1, 3);
      const int64_t step = BlockSizeOf(type).values > 32 ? 128 : 32;
      const int64_t hidden = step * random_.Int(1, 512 / step);
      const int64_t width = step * random_.Int(1, 256 / step);
      Layer layer = AnyLayer(experts, hidden, width, type);
      AddBiases(layer);
      const auto set = backend_->MakeExpertSet(MatricesOf(layer));
      ASSERT_NE(set, nullptr);
      for (const int64_t m : {int64_t{1}, random_.Int(2, 9), random_.Int(300, 2000)}) {
        SCOPED_TRACE(testing::Message()
                     << WeightTypeName(type) << ", " << m << " rows to " << per_token << " of "
                     << experts << ", " << hidden << " by " << width);
        Matrix normed = Matrix::Normal(random_, m, hidden, 1.0f, 4);
        const Matrix states = Matrix::Normal(random_, m, hidden);
        Matrix actual(m, hidden);
        ASSERT_TRUE(AddOnDevice(layer, *set, normed, states, m, per_token, actual));
        EXPECT_TRUE(SameBits(actual, Add(layer, normed, states, 0, m, per_token)));
      }
    }
  }
}

// Experts with integers of 4 bits, whose larger tiles have 64 rows.
TEST_F(CudaExpertsTest, ExpertsOfFourBitsHaveTheBitsOfThoseOfTheHost) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 3; ++round) {
    const int64_t experts = random_.Int(4, 60), per_token = random_.Int(1, 4);
    const int64_t hidden = 128 * random_.Int(1, 6), width = 128 * random_.Int(1, 4);
    const Layer layer = AnyLayer(experts, hidden, width, WeightType::kI8x128, 4);
    const auto set = backend_->MakeExpertSet(MatricesOf(layer));
    for (const int64_t m : {int64_t{1}, random_.Int(2, 9), random_.Int(300, 2000)}) {
      SCOPED_TRACE(testing::Message() << m << " rows to " << per_token << " of " << experts << ", "
                                      << hidden << " by " << width);
      Matrix normed = Matrix::Normal(random_, m, hidden, 1.0f, 4);
      const Matrix states = Matrix::Normal(random_, m, hidden);
      const Matrix expected = Add(layer, normed, states, 0, m, per_token);
      Matrix actual(m, hidden);
      if (set == nullptr) continue;
      ASSERT_TRUE(AddOnDevice(layer, *set, normed, states, m, per_token, actual));
      EXPECT_TRUE(SameBits(actual, expected));
    }
  }
}

TEST_F(CudaExpertsTest, ABrokenRowHarmsNoOther) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : {WeightType::kBF16, WeightType::kL4x32, WeightType::kI8x128}) {
    const int64_t m = 16, hidden = 256;
    const Layer layer = AnyLayer(8, hidden, 128, type);
    const auto set = backend_->MakeExpertSet(MatricesOf(layer));
    ASSERT_NE(set, nullptr);
    Matrix normed = Matrix::Normal(random_, m, hidden);
    const Matrix states = Matrix::Normal(random_, m, hidden);
    Matrix whole(m, hidden), broken(m, hidden);
    ASSERT_TRUE(AddOnDevice(layer, *set, normed, states, m, 4, whole));
    const int64_t row = random_.Int(0, m - 1);
    normed.row(row)[random_.Int(0, hidden - 1)] = NAN;
    ASSERT_TRUE(AddOnDevice(layer, *set, normed, states, m, 4, broken));
    for (int64_t i = 0; i < m; ++i) {
      if (i != row) {
        EXPECT_TRUE(SameBits(broken, i, whole, i)) << "row " << i << " beside " << row;
      }
    }
    EXPECT_TRUE(std::isnan(broken.row(row)[0]));
  }
}

TEST_F(CudaExpertsTest, RowsThatFindNoRoomAtOnceGoOneAfterTheOther) {
  SCOPED_TRACE(Seed());
  // 32,000 slots make more between their products than the workspace is meant for.
  const int64_t m = 4000, per_token = 8, hidden = 512;
  const Layer layer = AnyLayer(32, hidden, 1024, WeightType::kI8x128);
  const auto set = backend_->MakeExpertSet(MatricesOf(layer));
  ASSERT_NE(set, nullptr);
  Matrix normed = Matrix::Normal(random_, m, hidden);
  const Matrix states = Matrix::Normal(random_, m, hidden);
  Matrix actual(m, hidden);
  ASSERT_TRUE(AddOnDevice(layer, *set, normed, states, m, per_token, actual));
  EXPECT_TRUE(SameBits(actual, Add(layer, normed, states, 0, m, per_token)));
}

TEST_F(CudaExpertsTest, TheHostRoutesWhatTheDeviceDoesNot) {
  SCOPED_TRACE(Seed());
  // Experts of so many outputs that each keeps the device busy.
  const Layer wide = AnyLayer(4, 64, 12800, WeightType::kBF16);
  const auto of_wide = backend_->MakeExpertSet(MatricesOf(wide));
  ASSERT_NE(of_wide, nullptr);
  Matrix normed = Matrix::Normal(random_, 17, 64), result(17, 64);
  const Matrix states = Matrix::Normal(random_, 17, 64);
  EXPECT_TRUE(AddOnDevice(wide, *of_wide, normed, states, 16, 2, result));
  EXPECT_FALSE(AddOnDevice(wide, *of_wide, normed, states, 17, 2, result));
  EXPECT_TRUE(SameBits(result, states));  // nothing is done

  // Matrices that are not of one kind, or of several parts, or exact.
  const Layer other = AnyLayer(1, 256, 128, WeightType::kQ8_0);
  const Layer layer = AnyLayer(8, 256, 128, WeightType::kBF16);
  std::vector<ExpertMatrices> matrices = MatricesOf(layer);
  matrices[3].down = other.down[0].get();
  EXPECT_EQ(backend_->MakeExpertSet(matrices), nullptr);
  const BlockMatrix gate(random_, 128, 256, WeightType::kQ8_0),
      up(random_, 128, 256, WeightType::kQ4_0);
  const auto mixed = backend_->PackStored({{gate.stored(), up.stored()}}, DType::kBF16);
  EXPECT_EQ(
      backend_->MakeExpertSet(std::vector<ExpertMatrices>{{mixed.get(), other.down[0].get()}}),
      nullptr);
  const FileMatrix gate_up(random_, 256, 256, DType::kF32, 0.1f),
      down(random_, 256, 128, DType::kF32, 0.1f);
  const auto exact = backend_->Pack({{gate_up.host()}}, DType::kF32);
  const auto exact_down = backend_->Pack({{down.host()}}, DType::kF32);
  EXPECT_EQ(backend_->MakeExpertSet(std::vector<ExpertMatrices>{{exact.get(), exact_down.get()}}),
            nullptr);
}

}  // namespace
}  // namespace winnow::kernels::cuda
