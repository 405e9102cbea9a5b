// Experts that share a tensor: transposed plain ones, and 4-bit floats with powers of two, as gpt-oss has them. Every value comes
// out where it belongs, as it is widened and as its blocks are stored, and what makes no sense is refused by tensor and file.
#include "engine/model/mxfp4_matrix.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/model/model_config.h"
#include "engine/model/weight_storage.h"
#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/dtype.h"
#include "kernels/host_matrix.h"
#include "tests/unit/engine/sequence_runner.h"
#include "tests/unit/engine/tensor_files.h"
#include "tests/unit/test_paths.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

enum class Form { kMxfp4, kBF16, kF16, kF32 };

constexpr int64_t kExperts = 3, kHidden = 64, kInner = 32;
constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

// A model directory of one layer; tests spoil single tensors of it.
struct StackedModel {
  json config = TinyConfig();
  TensorBytes tensors;
  // Values by tensor: [experts][outputs][inputs]; of biases [experts][outputs].
  std::map<std::string, std::vector<double>> values;

  StackedModel(std::mt19937_64& random, Form form) {
    config.update({{"architectures", {"GptOssForCausalLM"}},
                   {"model_type", "gpt_oss"},
                   {"hidden_size", kHidden},
                   {"intermediate_size", kInner},
                   {"num_hidden_layers", 1},
                   {"num_local_experts", kExperts},
                   {"num_experts_per_tok", 2},
                   {"sliding_window", 16}});
    if (form == Form::kMxfp4) config["quantization_config"] = {{"quant_method", "mxfp4"}};
    const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    for (const TensorSpec& spec : FileTensors(*parsed)) {
      if (!spec.stack.has_value()) {
        AddPlainTensor(random, spec, tensors);
      } else if (spec.role == TensorSpec::Role::kBias) {
        AddBias(random, spec);
      } else if (form == Form::kMxfp4) {
        AddMxfp4(random, spec);
      } else {
        AddTransposed(random, form, spec);
      }
    }
  }

  absl::StatusOr<Weights> Load(const TempDir& dir) const {
    return WriteAndLoad(dir, config, tensors);
  }

 private:
  void AddBias(std::mt19937_64& random, const TensorSpec& spec) {
    std::vector<uint16_t> bits;
    for (int64_t i = 0; i < kExperts * spec.stack->outputs; ++i) {
      bits.push_back(static_cast<uint16_t>(0x3c00 | (random() & 0x80ff)));
      values[spec.name].push_back(kernels::ToFloat(kernels::BF16{bits.back()}));
    }
    tensors[spec.name] = TensorOf("BF16", {kExperts, spec.stack->outputs}, bits);
  }
  void AddMxfp4(std::mt19937_64& random, const TensorSpec& spec) {
    const int64_t groups = spec.cols / 32, outputs = spec.stack->outputs;
    std::vector<uint8_t> blocks, scales;
    for (int64_t group = 0; group < kExperts * outputs * groups; ++group) {
      scales.push_back(static_cast<uint8_t>(100 + random() % 40));
      for (int64_t i = 0; i < 16; ++i) {
        blocks.push_back(static_cast<uint8_t>(random()));
        for (const int code : {blocks.back() & 15, blocks.back() >> 4}) {
          const double value = std::ldexp(kMagnitudes[code & 7], scales.back() - 127);
          values[spec.name].push_back(code < 8 ? value : -value);
        }
      }
    }
    tensors[spec.name + "_blocks"] = TensorOf("U8", {kExperts, outputs, groups, 16}, blocks);
    tensors[spec.name + "_scales"] = TensorOf("U8", {kExperts, outputs, groups}, scales);
  }
  void AddTransposed(std::mt19937_64& random, Form form, const TensorSpec& spec) {
    const int64_t outputs = spec.stack->outputs, inputs = spec.cols;
    std::vector<double>& of = values[spec.name];
    of.resize(kExperts * outputs * inputs);
    std::vector<float> wide(of.size());
    std::vector<uint16_t> bits(of.size());
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t c = 0; c < inputs; ++c) {
        for (int64_t r = 0; r < outputs; ++r) {
          const int64_t at = (e * inputs + c) * outputs + r;
          // Eight significant bits, which each type has.
          wide[at] = static_cast<float>(static_cast<int64_t>(random() % 511) - 255) / 1024;
          bits[at] =
              form == Form::kF16 ? kernels::ToF16(wide[at]).bits : kernels::ToBF16(wide[at]).bits;
          of[(e * outputs + r) * inputs + c] = wide[at];
        }
      }
    }
    tensors[spec.name] = form == Form::kF32 ? TensorOf("F32", {kExperts, inputs, outputs}, wide)
                                            : TensorOf(form == Form::kF16 ? "F16" : "BF16",
                                                       {kExperts, inputs, outputs}, bits);
  }
};

class StackedExpertsTest : public ::testing::TestWithParam<Form> {
 protected:
  std::mt19937_64 random_{TestSeed()};
};

TEST_P(StackedExpertsTest, EveryValueIsWhereItBelongs) {
  const StackedModel model(random_, GetParam());
  const TempDir dir;
  const auto weights = model.Load(dir);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const LayerWeights& layer = weights->layers[0];
  ASSERT_EQ(layer.experts.size(), static_cast<size_t>(kExperts));
  const std::string prefix = "model.layers.0.mlp.experts.";
  const auto expect = [&](const WeightMatrix& matrix, const std::string& name, int64_t expert,
                          int64_t outputs, int64_t first, int64_t step) {
    SCOPED_TRACE(name + ", expert " + std::to_string(expert));
    const std::vector<double>& values = model.values.at(prefix + name);
    const auto value = [&](int64_t row, int64_t col) {
      return values[(expert * outputs + first + row * step) * matrix.cols + col];
    };
    std::vector<float> row(matrix.cols), again(matrix.cols);
    const auto stored = StoredPartsOf(WeightStorage::kStored, {{matrix}}, false);
    ASSERT_TRUE(stored.ok()) << stored.status();
    std::unique_ptr<std::byte[]> copy;
    const auto host = HostMatrixOf(matrix, kernels::DType::kF32, &copy);
    ASSERT_TRUE(host.ok()) << host.status();
    for (int64_t r = 0; r < matrix.rows; ++r) {
      matrix.WidenRow(r, row.data());
      kernels::DequantizeRow(stored->parts[0].type, stored->parts[0].rows[r], matrix.cols,
                             again.data());
      for (int64_t c = 0; c < matrix.cols; ++c) {
        ASSERT_EQ(row[c], value(r, c)) << "output " << r << ", input " << c;
        ASSERT_EQ(again[c], row[c]);
        ASSERT_EQ(kernels::ElementOf(*host, r, c), row[c]);
      }
    }
  };
  for (int64_t e = 0; e < kExperts; ++e) {
    const ExpertWeights& expert = layer.experts[e];
    EXPECT_EQ(expert.gate.rows, kInner);
    EXPECT_EQ(expert.down.rows, kHidden);
    expect(expert.gate, "gate_up_proj", e, 2 * kInner, 0, 2);
    expect(expert.up, "gate_up_proj", e, 2 * kInner, 1, 2);
    expect(expert.down, "down_proj", e, kHidden, 0, 1);
    expect(expert.gate_bias, "gate_up_proj_bias", e, 2 * kInner, 0, 2);
    expect(expert.up_bias, "gate_up_proj_bias", e, 2 * kInner, 1, 2);
    expect(expert.down_bias, "down_proj_bias", e, kHidden, 0, 1);
  }
  EXPECT_EQ(layer.sinks.cols, 2);
  EXPECT_EQ(layer.router_bias.cols, kExperts);
}

TEST_P(StackedExpertsTest, EachFormOfWeightsIsTakenOrRefusedByName) {
  const StackedModel model(random_, GetParam());
  const TempDir dir;
  const auto weights = model.Load(dir);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const bool quantised = GetParam() == Form::kMxfp4;
  EXPECT_TRUE(CheckWeightStorage(WeightStorage::kWide, *weights).ok());
  EXPECT_EQ(CheckWeightStorage(WeightStorage::kStored, *weights).ok(), quantised);
  const absl::Status rounded = CheckWeightStorage(WeightStorage::kInt8, *weights);
  EXPECT_EQ(rounded.ok(), !quantised) << rounded;
  if (quantised) {
    EXPECT_THAT(std::string(rounded.message()), HasSubstr("MXFP4"));
    // 4 bits and a bfloat16 for each 32 values; biases in float32.
    // Packed as 8-bit floats: 32 of them and a float32.
    for (const auto& [bfloat16_blocks, bytes] : {std::pair(false, 18), std::pair(true, 36)}) {
      EXPECT_EQ(ExpertStorageBytes(WeightStorage::kStored, *weights, kernels::DType::kBF16,
                                   bfloat16_blocks),
                kExperts * (3 * kHidden * kInner / 32 * bytes + (2 * kInner + kHidden) * 4));
    }
    return;
  }
  // Rounded from the values where they lie.
  const WeightMatrix& up = weights->layers[0].experts[1].up;
  const auto parts = StoredPartsOf(WeightStorage::kInt8, {{up}}, false);
  ASSERT_TRUE(parts.ok()) << parts.status();
  std::vector<float> exact(up.cols), of_blocks(up.cols);
  for (int64_t row = 0; row < up.rows; ++row) {
    up.WidenRow(row, exact.data());
    kernels::DequantizeRow(kernels::WeightType::kQ8_0, parts->parts[0].rows[row], up.cols,
                           of_blocks.data());
    for (int64_t c = 0; c < up.cols; ++c) ASSERT_NEAR(of_blocks[c], exact[c], 1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, StackedExpertsTest,
                         ::testing::Values(Form::kMxfp4, Form::kBF16, Form::kF16, Form::kF32));

TEST(Mxfp4MatrixTest, WhatMakesNoSenseIsRefusedByTensor) {
  std::mt19937_64 random(TestSeed());
  const std::string up = "model.layers.0.mlp.experts.gate_up_proj",
                    down = "model.layers.0.mlp.experts.down_proj";
  const auto set_scale = [](const std::string& name, size_t at, int code) {
    return [=](StackedModel& model) {
      model.tensors[name + "_scales"].bytes[at] = static_cast<char>(code);
    };
  };
  const auto reshape = [](const std::string& name, std::vector<int64_t> shape) {
    return [=](StackedModel& model) { model.tensors[name].shape = shape; };
  };
  struct Case {
    Form form;
    std::string tensor;
    std::function<void(StackedModel&)> spoil;
    std::string says;
  };
  const std::vector<Case> cases = {
      {Form::kMxfp4, up + "_scales", set_scale(up, 2 * 64 * 2 + 3 * 2 + 1, 255),
       "the scale of expert 2, output 3, inputs from 32 on is 2^128 (255: no number)"},
      {Form::kMxfp4, down + "_scales", set_scale(down, 5, 253), "2^125 is the largest"},
      {Form::kMxfp4, up + "_blocks", reshape(up + "_blocks", {3, 64, 16, 2}),
       "expected [3, 64, 2, 16]"},
      {Form::kMxfp4, up + "_scales", reshape(up + "_scales", {3, 2, 64}), "expected [3, 64, 2]"},
      {Form::kMxfp4, down + "_scales",
       [=](StackedModel& model) { model.tensors.erase(down + "_scales"); }, "is missing"},
      {Form::kMxfp4, down + "_blocks",
       [=](StackedModel& model) { model.tensors.erase(down + "_blocks"); }, "is missing"},
      {Form::kMxfp4, up + "_blocks",
       [=](StackedModel& model) { model.tensors[up + "_blocks"].dtype = "I8"; }, "U8"},
      {Form::kMxfp4, up + "_bias", [=](StackedModel& model) { model.tensors.erase(up + "_bias"); },
       "is missing"},
      {Form::kBF16, up, reshape(up, {3, 64, 64, 1}), "expected [3, 64, 64] by config.json"},
      {Form::kBF16, down, [=](StackedModel& model) { model.tensors.erase(down); }, "is missing"},
      {Form::kBF16, down + "_bias", reshape(down + "_bias", {64, 3}), "expected [3, 64]"},
      {Form::kBF16, "model.layers.0.self_attn.sinks",
       reshape("model.layers.0.self_attn.sinks", {1, 2}), "expected [2]"},
  };
  ExpectEachRefusedByName<StackedModel>(random, cases);
}

// Products with the blocks as they are round the other side to 8 bits, and nothing else: logits are near those of widened blocks,
// and a token has the same bits decoded or in a prompt.
TEST(Mxfp4MatrixTest, StoredBlocksGiveNearlyTheLogitsOfWidenedOnes) {
  std::mt19937_64 random(TestSeed());
  const std::string dir = SourcePath("tests/golden/families/gpt_oss_mxfp4");
  const auto config = LoadModelConfig(dir);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto weights = LoadWeights(dir, *config);
  ASSERT_TRUE(weights.ok()) << weights.status();
  constexpr int32_t kTokens = 120;
  std::vector<int32_t> tokens(kTokens);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % config->vocab_size);
  const auto backend = kernels::MakeCpuBackend("auto", 2);
  const auto logits_of = [&](WeightStorage storage, int32_t chunk) {
    const auto decoder = Decoder::Create(*config, *weights, *backend,
                                         {.compute = kernels::DType::kBF16,
                                          .weights = storage,
                                          .kv_dtype = kernels::DType::kBF16,
                                          .block_tokens = 16,
                                          .kv_bytes = 8 << 20,
                                          .max_batch_tokens = 128,
                                          .max_batch_logits = 128});
    EXPECT_TRUE(decoder.ok()) << decoder.status();
    const auto blocks = testing::ShuffledBlocks(**decoder, random);
    return testing::Run(**decoder, tokens, 0, blocks, kTokens, chunk);
  };
  const std::vector<float> wide = logits_of(WeightStorage::kWide, kTokens);
  const std::vector<float> stored = logits_of(WeightStorage::kStored, kTokens);
  EXPECT_EQ(stored, logits_of(WeightStorage::kStored, 1));
  double error = 0, size = 0;
  for (size_t i = 0; i < wide.size(); ++i) {
    error += std::abs(stored[i] - wide[i]);
    size += std::abs(wide[i]);
  }
  EXPECT_GT(error, 0);
  EXPECT_LT(error, 0.1 * size);
}

// Blocks without a quantization_config, which says what they are.
TEST(Mxfp4MatrixTest, BlocksWithoutASchemeAreRefused) {
  std::mt19937_64 random(TestSeed());
  StackedModel model(random, Form::kMxfp4);
  model.config.erase("quantization_config");
  const TempDir dir;
  const absl::Status status = model.Load(dir).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("tensor \"model.layers.0.mlp.experts.gate_up_proj\" is missing"));
}

}  // namespace
}  // namespace winnow::engine
