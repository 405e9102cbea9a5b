// FP8 checkpoints: 8-bit floats with scales in tensors of their own, in each of the forms that files have.
#include "engine/model/float8_matrix.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/float8.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/model_logits.h"
#include "tests/unit/engine/tensor_files.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using kernels::WeightType;
using nlohmann::json;
using ::testing::HasSubstr;

enum class Form { kScalar, kOneScale, kOutputs, kBlocks, kBlocksAsText, kSmallBlocks };
constexpr Form kForms[] = {Form::kScalar, Form::kOneScale,     Form::kOutputs,
                           Form::kBlocks, Form::kBlocksAsText, Form::kSmallBlocks};

json SchemeOf(Form form) {
  const auto compressed = [](const json& weights) -> json {
    json group = {{"targets", {"Linear"}},
                  {"input_activations", {{"num_bits", 8}, {"type", "float"}, {"dynamic", true}}},
                  {"output_activations", nullptr},
                  {"weights", {{"num_bits", 8}, {"type", "float"}, {"symmetric", true}}}};
    group["weights"].update(weights);
    return {{"quant_method", "compressed-tensors"},
            {"format", "float-quantized"},
            {"kv_cache_scheme", nullptr},
            {"ignore", {"lm_head"}},
            {"config_groups", {{"group_0", group}}}};
  };
  switch (form) {
    case Form::kScalar:
      return {{"quant_method", "fp8"}, {"activation_scheme", "static"}};
    case Form::kOneScale:
      return compressed({{"strategy", "tensor"}});
    case Form::kOutputs:
      return compressed({{"strategy", "channel"}});
    case Form::kBlocks:
      return {{"quant_method", "fp8"},
              {"activation_scheme", "dynamic"},
              {"fmt", "e4m3"},
              {"weight_block_size", {128, 128}}};
    case Form::kBlocksAsText:
      return compressed({{"strategy", "block"}, {"block_structure", "128x128"}});
    case Form::kSmallBlocks:
      return compressed({{"strategy", "block"}, {"block_structure", {16, 32}}});
  }
  return {};
}

// A matrix as its quantiser sees it.
struct Matrix {
  int64_t rows, cols, scale_rows, scale_cols;
  std::vector<uint8_t> values;
  std::vector<float> scales;

  int64_t scales_in_a_row() const { return (cols + scale_cols - 1) / scale_cols; }
  float Value(int64_t row, int64_t col) const {
    const float scale = scales[row / scale_rows * scales_in_a_row() + col / scale_cols];
    return scale * kernels::ToFloat(kernels::F8E4M3{values[row * cols + col]});
  }
};

// A model directory of one form; tests spoil single tensors of it.
struct Float8Model {
  json config = TinyConfig();
  TensorBytes tensors;
  std::map<std::string, Matrix> matrices;  // by base name

  Float8Model(std::mt19937_64& random, Form form, const json& keys = json::object()) {
    // Intermediate rows end inside a block of scales; hidden ones are a multiple of 128.
    config.update({{"hidden_size", 256}, {"intermediate_size", 352}, {"num_hidden_layers", 1}});
    config["quantization_config"] = SchemeOf(form);
    config.update(keys);
    const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    for (const TensorSpec& spec : FileTensors(*parsed)) {
      if (spec.role == TensorSpec::Role::kMatrix) {
        Add(random, form, spec);
        continue;
      }
      AddPlainTensor(random, spec, tensors);
    }
  }

  absl::StatusOr<Weights> Load(const TempDir& dir) const {
    return WriteAndLoad(dir, config, tensors);
  }

 private:
  void Add(std::mt19937_64& random, Form form, const TensorSpec& spec) {
    const std::string base = spec.name.substr(0, spec.name.rfind('.'));
    Matrix m{spec.rows, spec.cols, spec.rows, spec.cols, {}, {}};
    if (form == Form::kOutputs) m.scale_rows = 1;
    if (form == Form::kBlocks || form == Form::kBlocksAsText) m.scale_rows = m.scale_cols = 128;
    if (form == Form::kSmallBlocks) {
      m.scale_rows = 16;
      m.scale_cols = 32;
    }
    for (int64_t i = 0; i < m.rows * m.cols; ++i) {
      do {
        m.values.push_back(static_cast<uint8_t>(random()));
        if ((m.values.back() & 0x7f) != 0x7f) break;
        m.values.pop_back();
      } while (true);
    }
    const int64_t down = (m.rows + m.scale_rows - 1) / m.scale_rows;
    for (int64_t i = 0; i < down * m.scales_in_a_row(); ++i) {
      // Values that a bfloat16 has.
      m.scales.push_back(
          kernels::ToFloat(kernels::BF16{static_cast<uint16_t>(0x3900 | (random() & 0xff))}));
    }
    tensors[base + ".weight"] = TensorOf("F8_E4M3", {m.rows, m.cols}, m.values);
    std::vector<int64_t> shape = {down, m.scales_in_a_row()};
    if (form == Form::kScalar) shape = {};
    if (form == Form::kOneScale) shape = {1};
    if (form == Form::kOutputs) {
      std::vector<uint16_t> bits;
      for (const float scale : m.scales) bits.push_back(kernels::ToBF16(scale).bits);
      tensors[base + ".weight_scale"] = TensorOf("BF16", shape, bits);
    } else {
      const std::string name = form == Form::kBlocks ? ".weight_scale_inv" : ".weight_scale";
      tensors[base + name] = TensorOf("F32", shape, m.scales);
    }
    if (form == Form::kScalar) {
      tensors[base + ".input_scale"] = TensorOf("F32", {}, std::vector<float>{0.5f});
    }
    matrices.emplace(base, std::move(m));
  }
};

TEST(Float8MatrixTest, ValuesOfEveryFormAreThoseOfTheFile) {
  TestRandom random;
  for (const json& keys : {json(json::object()), kExpertKeys}) {
    for (const Form form : kForms) {
      SCOPED_TRACE(static_cast<int>(form));
      const TempDir dir;
      const Float8Model model(random, form, keys);
      const auto weights = model.Load(dir);
      ASSERT_TRUE(weights.ok()) << weights.status();
      for (const auto& [name, matrix] : MatricesOf(weights->layers[0])) {
        const Matrix& written = model.matrices.at("model.layers.0." + name);
        ASSERT_EQ(matrix->rows, written.rows);
        ASSERT_EQ(matrix->cols, written.cols);
        EXPECT_EQ(matrix->type, written.cols % 128 == 0 && form != Form::kSmallBlocks
                                    ? WeightType::kF8x128
                                    : WeightType::kF8x32);
        SCOPED_TRACE(name);
        ExpectValues(written,
                     [&, matrix = matrix](int64_t row, float* out) { matrix->WidenRow(row, out); });
      }
      EXPECT_TRUE(weights->lm_head.IsPlain());
      if (!keys.empty()) {
        EXPECT_TRUE(weights->layers[0].router.IsPlain());
      }
    }
  }
}

// Phi-3's matrices share tensors, and with them their scales.
TEST(Float8MatrixTest, MatricesThatShareATensorAreItsParts) {
  TestRandom random;
  for (const Form form : kForms) {
    SCOPED_TRACE(static_cast<int>(form));
    const TempDir dir;
    const Float8Model model(random, form, kPhi3Keys);
    auto weights = model.Load(dir);
    ASSERT_TRUE(weights.ok()) << weights.status();
    ExpectParts(model.config, &*weights, [&](const std::string& base, int64_t row, int64_t col) {
      return model.matrices.at(base).Value(row, col);
    });
    const std::vector<float> wide = Logits(dir.path(), DType::kF32);
    EXPECT_LT(RelativeError(Logits(dir.path(), DType::kF32, WeightStorage::kStored), wide), 1e-4);
  }
}

TEST(Float8MatrixTest, ProductsOfStoredValuesAreThoseOfWideOnes) {
  TestRandom random;
  for (const Form form : kForms) {
    SCOPED_TRACE(static_cast<int>(form));
    const TempDir dir;
    const Float8Model model(random, form);
    WriteModel(dir, model.config, model.tensors);
    const std::vector<float> wide = Logits(dir.path(), DType::kF32);
    const std::vector<float> stored = Logits(dir.path(), DType::kF32, WeightStorage::kStored);
    ASSERT_EQ(stored.size(), wide.size());
    ASSERT_FALSE(wide.empty());
    double difference = 0, size = 0;
    for (size_t i = 0; i < wide.size(); ++i) {
      difference += std::pow(stored[i] - wide[i], 2);
      size += std::pow(wide[i], 2);
    }
    EXPECT_GT(size, 0);
    EXPECT_LT(std::sqrt(difference / size), 1e-4);  // float32's, through a layer
  }
}

// Each names the tensor and the file.
TEST(Float8MatrixTest, DamagedTensorsAreRefusedByName) {
  TestRandom random;
  const std::string base = "model.layers.0.mlp.up_proj.";
  struct Case {
    Form form;
    std::string tensor;
    std::function<void(Float8Model&)> spoil;
    std::string says;
  };
  const auto scale = [&](float value, int64_t at) {
    return [=, name = base + "weight_scale"](Float8Model& m) {
      std::memcpy(m.tensors[name].bytes.data() + 4 * at, &value, sizeof value);
    };
  };
  const std::vector<Case> cases = {
      {Form::kOneScale, "weight_scale", scale(0, 0), "above 0"},
      {Form::kSmallBlocks, "weight_scale", scale(-1, 175), "output 336, input 224 is -1"},
      {Form::kSmallBlocks, "weight_scale", scale(NAN, 7), "output 0, input 224 is nan"},
      {Form::kScalar, "weight_scale", scale(INFINITY, 0), "finite"},
      {Form::kScalar, "weight_scale", scale(1e36f, 0), "448 times it finite"},
      {Form::kOutputs, "weight_scale",
       [&](Float8Model& m) { m.tensors.erase(base + "weight_scale"); }, "missing"},
      {Form::kOutputs, "weight_scale",
       [&](Float8Model& m) {
         m.tensors[base + "weight_scale"].shape = {1, 352};
       },
       "expected [352, 1]"},
      {Form::kBlocks, "weight_scale_inv",
       [&](Float8Model& m) {
         m.tensors[base + "weight_scale_inv"].shape = {2, 3};
       },
       "expected [3, 2]"},
      {Form::kOneScale, "weight_scale",
       [&](Float8Model& m) { m.tensors[base + "weight_scale"].dtype = "I32"; },
       "expected F32 or BF16 or F16"},
      {Form::kOneScale, "up_proj.weight",
       [&](Float8Model& m) {
         m.tensors[base + "weight"].shape = {256, 352};
       },
       "expected [352, 256]"},
      {Form::kOneScale, "up_proj.weight",
       [&](Float8Model& m) { m.tensors[base + "weight"].dtype = "F8_E5M2"; }, "dtype F8_E5M2"},
      {Form::kOneScale, "q_proj.weight",
       [&](Float8Model& m) { m.config.erase("quantization_config"); }, "quantization_config"},
      {Form::kOneScale, "up_proj.weight", [&](Float8Model& m) { m.tensors.erase(base + "weight"); },
       "missing"},
      {Form::kOneScale, "up_proj.bias",
       [&](Float8Model& m) {
         m.tensors[base + "bias"] = TensorOf("BF16", {1}, std::vector<uint16_t>{0});
       },
       "no part"},
  };
  ExpectEachRefusedByName<Float8Model>(random, cases);
}

TEST(Float8MatrixTest, RowsThatAreNoMultipleOf32AreRefused) {
  TestRandom random;
  const TempDir dir;
  Float8Model model(random, Form::kOneScale);
  model.config["intermediate_size"] = 350;
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    Tensor& tensor = model.tensors[std::string("model.layers.0.mlp.") + name + ".weight"];
    for (int64_t& size : tensor.shape) size = size == 352 ? 350 : size;
    tensor.bytes.resize(350 * 256);
  }
  EXPECT_THAT(std::string(model.Load(dir).status().message()),
              HasSubstr("down_proj.weight\" at byte"));
  EXPECT_THAT(std::string(model.Load(dir).status().message()), HasSubstr("no multiple of 32"));
}

TEST(Float8MatrixTest, NotANumberIsRefusedByNameHoweverWeightsAreKept) {
  TestRandom random;
  const TempDir dir;
  Float8Model model(random, Form::kOutputs);
  model.tensors["model.layers.0.mlp.up_proj.weight"].bytes[5 * 256 + 9] = static_cast<char>(0xff);
  const auto weights = model.Load(dir);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const auto config = LoadModelConfig(dir.path());
  ASSERT_TRUE(config.ok()) << config.status();
  for (const WeightStorage storage : {WeightStorage::kWide, WeightStorage::kStored}) {
    const auto backend = kernels::MakeCpuBackend("auto", 1);
    DecoderOptions options;
    options.weights = storage;
    options.kv_bytes = 1 << 20;
    const absl::Status status = Decoder::Create(*config, *weights, *backend, options).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("up_proj.weight"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("has NaN at [5, 9]"));
  }
}

TEST(Float8MatrixTest, ConfigurationsThatAskForMoreAreRefusedByKey) {
  const auto with = [](Form form, const std::string& pointer, const json& value) {
    json scheme = SchemeOf(form);
    scheme[json::json_pointer(pointer)] = value;
    return scheme;
  };
  const std::string group = "/config_groups/group_0/", weights = group + "weights/";
  for (const auto& [scheme, key] : std::vector<std::pair<json, std::string>>{
           {with(Form::kScalar, "/fmt", "e5m2"), "quantization_config.fmt"},
           {with(Form::kScalar, "/scale_fmt", "e8m0"), "quantization_config.scale_fmt"},
           {with(Form::kScalar, "/activation_scheme", "rotated"), "activation_scheme"},
           {with(Form::kBlocks, "/weight_block_size", {128}), "weight_block_size"},
           {with(Form::kBlocks, "/weight_block_size", {128, 100}), "weight_block_size"},
           {with(Form::kBlocks, "/weight_block_size", {0, 128}), "weight_block_size"},
           {with(Form::kBlocksAsText, weights + "block_structure", "128"), "block_structure"},
           {with(Form::kBlocksAsText, weights + "block_structure", "128x"), "block_structure"},
           {with(Form::kBlocksAsText, weights + "block_structure", "128x128x2"), "block_structure"},
           {with(Form::kBlocksAsText, weights + "block_structure", nullptr), "block_structure"},
           {with(Form::kOutputs, weights + "num_bits", 4), "num_bits"},
           {with(Form::kOutputs, weights + "type", "int"), "type"},
           {with(Form::kOutputs, weights + "strategy", "group"), "strategy"},
           {with(Form::kOutputs, group + "format", "pack-quantized"), "config_groups.format"},
           {with(Form::kOutputs, group + "input_activations/num_bits", 4), "input_activations"},
           {with(Form::kOutputs, group + "output_activations", {{"num_bits", 8}}),
            "output_activations"},
           {with(Form::kOutputs, "/kv_cache_scheme", {{"num_bits", 8}}), "kv_cache_scheme"},
           {with(Form::kOutputs, "/quant_method", "modelopt"), "quant_method"}}) {
    json config = TinyConfig();
    config["quantization_config"] = scheme;
    const absl::Status status = ParseModelConfig(config.dump(), "config.json", "", "").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << scheme;
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json: quantization_config."));
    EXPECT_THAT(std::string(status.message()), HasSubstr(key));
  }
  for (const Form form : kForms) {
    json config = TinyConfig();
    config["quantization_config"] = SchemeOf(form);
    const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const Float8Scheme expected = form == Form::kBlocks || form == Form::kBlocksAsText
                                      ? Float8Scheme{128, 128}
                                  : form == Form::kSmallBlocks ? Float8Scheme{16, 32}
                                                               : Float8Scheme{};
    EXPECT_EQ(std::get<Float8Scheme>(*parsed->weight_scheme), expected);
    EXPECT_EQ(parsed->dtype, DType::kBF16);
  }
}

}  // namespace
}  // namespace winnow::engine
