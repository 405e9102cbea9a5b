// 4-bit groups of safetensors files. The writer below follows the documentation of the formats: what shifts go where is
// written down once more here, the other way round.
#include "engine/model/grouped_int4.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/tensor_files.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;
using Layout = Int4Scheme::Layout;
using nlohmann::json;

// A matrix as a quantiser sees it.
struct Matrix {
  int64_t rows, cols, group;
  std::vector<int> integers, zeros;  // [rows][cols], [rows][cols / group]
  std::vector<float> scales;

  Matrix(std::mt19937_64& random, int64_t rows, int64_t cols, int64_t group, bool symmetric,
         int32_t least_zero = 0)
      : rows(rows), cols(cols), group(group) {
    for (int64_t i = 0; i < rows * cols; ++i) integers.push_back(static_cast<int>(random() % 16));
    for (int64_t i = 0; i < rows * cols / group; ++i) {
      zeros.push_back(symmetric ? 8 : least_zero + static_cast<int>(random() % 16));
      // Every bit of a bfloat16, in the range of weights' scales.
      scales.push_back(kernels::ToFloat(
          kernels::ToBF16(0.001f + 0.05f * static_cast<float>(random() % 1000) / 1000)));
    }
  }
  float Value(int64_t row, int64_t col) const {
    const int64_t at = row * (cols / group) + col / group;
    return scales[at] * static_cast<float>(integers[row * cols + col] - zeros[at]);
  }
  std::vector<uint16_t> ScaleBits(bool transposed, bool half) const {
    std::vector<uint16_t> bits(scales.size());
    const int64_t groups = cols / group;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = scales[r * groups + g];
        bits[transposed ? g * rows + r : r * groups + g] =
            half ? kernels::ToF16(scale).bits : kernels::ToBF16(scale).bits;
      }
    }
    return bits;
  }
};

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

void Write(const Matrix& m, Layout layout, int32_t zero_less, const std::string& base,
           TensorBytes& into) {
  const int64_t groups = m.cols / m.group, words = (m.rows + 7) / 8;
  if (layout == Layout::kPacked) {
    std::vector<uint32_t> packed(m.rows * m.cols / 8), zeros(words * groups);
    for (int64_t r = 0; r < m.rows; ++r) {
      for (int64_t c = 0; c < m.cols; ++c) {
        packed[r * m.cols / 8 + c / 8] |= static_cast<uint32_t>(m.integers[r * m.cols + c])
                                          << (c % 8 * 4);
      }
      for (int64_t g = 0; g < groups; ++g) {
        zeros[r / 8 * groups + g] |= static_cast<uint32_t>(m.zeros[r * groups + g]) << (r % 8 * 4);
      }
    }
    into[base + ".weight_packed"] = TensorOf("I32", {m.rows, m.cols / 8}, packed);
    into[base + ".weight_scale"] = TensorOf("BF16", {m.rows, groups}, m.ScaleBits(false, false));
    into[base + ".weight_zero_point"] = TensorOf("I32", {words, groups}, zeros);
    into[base + ".weight_shape"] = TensorOf("I64", {2}, std::vector<int64_t>{m.rows, m.cols});
    return;
  }
  std::vector<uint32_t> packed(m.rows * m.cols / 8), zeros(groups * words);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t word = 0; word < words; ++word) {
      for (int i = 0; i < 8; ++i) {
        const int64_t row = word * 8 + (layout == Layout::kAwq ? kAwqOrder[i] : i);
        zeros[g * words + word] |= static_cast<uint32_t>(m.zeros[row * groups + g] - zero_less)
                                   << (4 * i);
      }
    }
  }
  if (layout == Layout::kGptq) {
    for (int64_t c = 0; c < m.cols; ++c) {
      for (int64_t r = 0; r < m.rows; ++r) {
        packed[c / 8 * m.rows + r] |= static_cast<uint32_t>(m.integers[r * m.cols + c])
                                      << (c % 8 * 4);
      }
    }
    into[base + ".qweight"] = TensorOf("I32", {m.cols / 8, m.rows}, packed);
    std::vector<int32_t> order(m.cols);
    for (int64_t c = 0; c < m.cols; ++c) order[c] = static_cast<int32_t>(c / m.group);
    into[base + ".g_idx"] = TensorOf("I32", {m.cols}, order);
  } else {
    for (int64_t c = 0; c < m.cols; ++c) {
      for (int64_t word = 0; word < words; ++word) {
        for (int i = 0; i < 8; ++i) {
          packed[c * words + word] |=
              static_cast<uint32_t>(m.integers[(word * 8 + kAwqOrder[i]) * m.cols + c]) << (4 * i);
        }
      }
    }
    into[base + ".qweight"] = TensorOf("I32", {m.cols, words}, packed);
  }
  into[base + ".qzeros"] = TensorOf("I32", {groups, words}, zeros);
  into[base + ".scales"] = TensorOf("F16", {groups, m.rows}, m.ScaleBits(true, true));
}

json SchemeJson(Layout layout, int64_t group) {
  if (layout == Layout::kGptq) {
    return {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", group}, {"desc_act", false}};
  }
  if (layout == Layout::kAwq) {
    return {{"quant_method", "awq"},
            {"bits", 4},
            {"group_size", group},
            {"version", "gemm"},
            {"zero_point", true}};
  }
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"kv_cache_scheme", nullptr},
          {"ignore", {"lm_head"}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"input_activations", nullptr},
              {"weights",
               {{"num_bits", 4},
                {"type", "int"},
                {"strategy", "group"},
                {"group_size", group},
                {"symmetric", false},
                {"actorder", nullptr}}}}}}}};
}

// A model directory whose matrices are of one layout; tests spoil single tensors of it.
struct Int4Model {
  json config = TinyConfig();
  TensorBytes tensors;
  std::map<std::string, Matrix> matrices;  // by base name

  Int4Model(std::mt19937_64& random, Layout layout, int64_t group, bool symmetric) {
    config.update({{"hidden_size", 256}, {"intermediate_size", 384}, {"num_hidden_layers", 1}});
    config["quantization_config"] = SchemeJson(layout, group);
    ModelConfig plain_config;
    const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    plain_config = *parsed;
    const int32_t less = std::get<Int4Scheme>(*plain_config.weight_scheme).zero_less;
    for (const TensorSpec& spec : ModelTensors(plain_config, nullptr)) {
      const std::string base = spec.name.substr(0, spec.name.rfind('.'));
      if (spec.role == TensorSpec::Role::kMatrix) {
        const auto made =
            matrices.emplace(base, Matrix(random, spec.rows, spec.cols, group, symmetric, less));
        Write(made.first->second, layout, less, base, tensors);
        continue;
      }
      std::vector<int64_t> shape = {spec.cols};
      if (spec.rows != 0) shape.insert(shape.begin(), spec.rows);
      const std::vector<uint16_t> ones(std::max<int64_t>(spec.rows, 1) * spec.cols, 0x3f80);
      tensors[spec.name] = TensorOf("BF16", shape, ones);
    }
  }

  absl::StatusOr<Weights> Load(const TempDir& dir) const {
    return WriteAndLoad(dir, config, tensors);
  }
};

constexpr Layout kLayouts[] = {Layout::kPacked, Layout::kGptq, Layout::kAwq};

TEST(GroupedInt4Test, ValuesOfEveryLayoutAreThoseOfTheFile) {
  TestRandom random;
  for (const Layout layout : kLayouts) {
    for (const int64_t group : {32, 64, 128}) {
      for (const bool symmetric : {false, true}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(layout) << ", group " << group
                                        << (symmetric ? ", symmetric" : ""));
        const TempDir dir;
        const Int4Model model(random, layout, group, symmetric);
        const auto weights = model.Load(dir);
        ASSERT_TRUE(weights.ok()) << weights.status();
        const LayerWeights& layer = weights->layers[0];
        for (const auto& [name, matrix] : {std::pair{"self_attn.q_proj", &layer.q},
                                           {"self_attn.k_proj", &layer.k},
                                           {"self_attn.v_proj", &layer.v},
                                           {"self_attn.o_proj", &layer.o},
                                           {"mlp.gate_proj", &layer.gate},
                                           {"mlp.up_proj", &layer.up},
                                           {"mlp.down_proj", &layer.down}}) {
          const Matrix& written = model.matrices.at(std::string("model.layers.0.") + name);
          ASSERT_EQ(matrix->rows, written.rows);
          ASSERT_EQ(matrix->cols, written.cols);
          EXPECT_EQ(matrix->type, symmetric      ? kernels::WeightType::kQ4_0
                                  : group == 128 ? kernels::WeightType::kI4x128
                                                 : kernels::WeightType::kI4x32);
          std::vector<float> row(written.cols);
          for (int64_t r = 0; r < written.rows; ++r) {
            matrix->WidenRow(r, row.data());
            for (int64_t c = 0; c < written.cols; ++c) {
              ASSERT_EQ(row[c], written.Value(r, c)) << name << " " << r << " " << c;
            }
          }
        }
        EXPECT_TRUE(weights->lm_head.IsPlain());
      }
    }
  }
}

// Every one names the tensor and the file.
TEST(GroupedInt4Test, DamagedTensorsAreRefusedByName) {
  TestRandom random;
  const std::string base = "model.layers.0.mlp.up_proj.";
  struct Case {
    Layout layout;
    std::string tensor;
    std::function<void(Int4Model&)> spoil;
    std::string says;
  };
  const auto scale = [&](Layout layout, uint16_t bits) {
    return [=, name = base + (layout == Layout::kPacked ? "weight_scale" : "scales")](
               Int4Model& m) { std::memcpy(m.tensors[name].bytes.data() + 2 * 7, &bits, 2); };
  };
  const std::vector<Case> cases = {
      {Layout::kPacked, "weight_scale", scale(Layout::kPacked, 0), "above 0"},
      {Layout::kPacked, "weight_scale", scale(Layout::kPacked, 0xbf80), "is -1"},
      {Layout::kPacked, "weight_scale", scale(Layout::kPacked, 0x7f80), "finite"},
      {Layout::kPacked, "weight_scale", scale(Layout::kPacked, 0x7fc0), "finite"},
      {Layout::kPacked, "weight_scale", scale(Layout::kPacked, 0x3081), "float16 cannot hold"},
      {Layout::kGptq, "scales", scale(Layout::kGptq, 0x7c00), "finite"},
      {Layout::kAwq, "scales", scale(Layout::kAwq, 0x8001), "above 0"},
      {Layout::kGptq, "g_idx",
       [&](Int4Model& m) {
         std::swap(m.tensors[base + "g_idx"].bytes[0], m.tensors[base + "g_idx"].bytes[4 * 128]);
       },
       "out of order"},
      {Layout::kGptq, "qzeros", [&](Int4Model& m) { m.tensors.erase(base + "qzeros"); }, "missing"},
      {Layout::kAwq, "scales", [&](Int4Model& m) { m.tensors.erase(base + "scales"); }, "missing"},
      {Layout::kAwq, "qweight",
       [&](Int4Model& m) {
         std::swap(m.tensors[base + "qweight"].shape[0], m.tensors[base + "qweight"].shape[1]);
       },
       "expected [256, 48]"},
      {Layout::kPacked, "weight_packed",
       [&](Int4Model& m) { m.tensors[base + "weight_packed"].dtype = "F32"; }, "expected I32"},
      {Layout::kPacked, "weight_zero_point",
       [&](Int4Model& m) {
         m.tensors[base + "weight_zero_point"].shape = {2, 48};
       },
       "expected [48, 2]"},
      {Layout::kPacked, "weight_shape",
       [&](Int4Model& m) { m.tensors[base + "weight_shape"].bytes[0] ^= 1; }, "expected 384 x 256"},
      {Layout::kPacked, "weight_packed",
       [&](Int4Model& m) {
         m.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 96;
       },
       "group_size 96 does not divide its 256 inputs"},
      {Layout::kPacked, "up_proj.weight",
       [&](Int4Model& m) { m.tensors.erase(base + "weight_packed"); }, "missing"},
      {Layout::kPacked, "up_proj.bias",
       [&](Int4Model& m) {
         m.tensors[base + "bias"] = TensorOf("BF16", {1}, std::vector<uint16_t>{0});
       },
       "no part"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.tensor + ": " + c.says);
    const TempDir dir;
    Int4Model model(random, c.layout, 128, false);
    c.spoil(model);
    const absl::Status status = model.Load(dir).status();
    ASSERT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.tensor));
    EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
  }
}

TEST(GroupedInt4Test, ConfigurationsThatAskForMoreAreRefusedByKey) {
  const auto with = [](Layout layout, const std::string& pointer, const json& value) {
    json scheme = SchemeJson(layout, 128);
    scheme[json::json_pointer(pointer)] = value;
    return scheme;
  };
  const std::string weights = "/config_groups/group_0/weights/";
  for (const auto& [scheme, key] : std::vector<std::pair<json, std::string>>{
           {with(Layout::kGptq, "/bits", 8), "quantization_config.bits"},
           {with(Layout::kGptq, "/group_size", -1), "quantization_config.group_size"},
           {with(Layout::kGptq, "/group_size", 40), "quantization_config.group_size"},
           {with(Layout::kGptq, "/checkpoint_format", "marlin"), "checkpoint_format"},
           {with(Layout::kGptq, "/is_marlin_format", true), "is_marlin_format"},
           {with(Layout::kGptq, "/dynamic", {{"-:.*", {}}}), "dynamic"},
           {with(Layout::kAwq, "/bits", 3), "quantization_config.bits"},
           {with(Layout::kAwq, "/version", "gemv"), "version"},
           {with(Layout::kAwq, "/zero_point", false), "zero_point"},
           {with(Layout::kPacked, "/format", "int-quantized"), "format"},
           {with(Layout::kPacked, "/kv_cache_scheme", {{"num_bits", 8}}), "kv_cache_scheme"},
           {with(Layout::kPacked, "/config_groups/group_1", json::object()), "config_groups"},
           {with(Layout::kPacked, "/config_groups/group_0/input_activations", {{"num_bits", 8}}),
            "input_activations"},
           {with(Layout::kPacked, weights + "num_bits", 8), "num_bits"},
           {with(Layout::kPacked, weights + "type", "float"), "type"},
           {with(Layout::kPacked, weights + "strategy", "channel"), "strategy"},
           {with(Layout::kPacked, weights + "group_size", 16), "group_size"}}) {
    json config = TinyConfig();
    config["quantization_config"] = scheme;
    const absl::Status status = ParseModelConfig(config.dump(), "config.json", "", "").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << scheme;
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json: quantization_config."));
    EXPECT_THAT(std::string(status.message()), HasSubstr(key));
  }
  json config = TinyConfig();
  config["quantization_config"] = with(Layout::kGptq, "/checkpoint_format", "gptq_v2");
  const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
  EXPECT_EQ(std::get<Int4Scheme>(*parsed->weight_scheme).zero_less, 0);
}

}  // namespace
}  // namespace winnow::engine
