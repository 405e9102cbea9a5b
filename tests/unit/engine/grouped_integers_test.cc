// Integers in groups of safetensors files. The writer below follows the documentation of the formats: what shifts go where is
// written down once more here, the other way round.
#include "engine/model/grouped_integers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine/model/weight_storage.h"
#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/model_logits.h"
#include "tests/unit/engine/tensor_files.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;
using Layout = IntegerScheme::Layout;
using nlohmann::json;

// How a model's matrices are quantised.
struct Form {
  Layout layout;
  int32_t bits;
  int64_t group;  // 0: all of an output
  bool symmetric;
  bool one_scale = false;  // of a matrix
};

// A matrix as a quantiser sees it.
struct Matrix {
  int64_t rows, cols, group;
  int32_t bits;
  std::vector<int> integers, zeros;  // [rows][groups()], unsigned
  std::vector<float> scales;         // [rows][groups()]

  Matrix(std::mt19937_64& random, int64_t rows, int64_t cols, const Form& form, int32_t least_zero)
      : rows(rows), cols(cols), group(form.group == 0 ? cols : form.group), bits(form.bits) {
    const int steps = 1 << bits;
    for (int64_t i = 0; i < rows * cols; ++i) {
      integers.push_back(static_cast<int>(random() % static_cast<uint64_t>(steps)));
    }
    for (int64_t i = 0; i < rows * groups(); ++i) {
      zeros.push_back(form.symmetric
                          ? 1 << (bits - 1)
                          : least_zero + static_cast<int>(random() % static_cast<uint64_t>(steps)));
      // Every bit of a bfloat16, in the range of weights' scales.
      const float scale = (0.016f + static_cast<float>(random() % 1000) / 1000) / steps;
      scales.push_back(form.one_scale && i > 0 ? scales[0]
                                               : kernels::ToFloat(kernels::ToBF16(scale)));
    }
  }
  int64_t groups() const { return cols / group; }
  float Value(int64_t row, int64_t col) const {
    const int64_t at = row * groups() + col / group;
    return scales[at] * static_cast<float>(integers[row * cols + col] - zeros[at]);
  }
  std::vector<uint16_t> ScaleBits(bool transposed, bool half) const {
    std::vector<uint16_t> bits(scales.size());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups(); ++g) {
        const float scale = scales[r * groups() + g];
        bits[transposed ? g * rows + r : r * groups() + g] =
            half ? kernels::ToF16(scale).bits : kernels::ToBF16(scale).bits;
      }
    }
    return bits;
  }
};

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

void WritePlain(const Matrix& m, bool one_scale, const std::string& base, TensorBytes& into) {
  std::vector<int8_t> values, zeros;
  for (const int integer : m.integers) values.push_back(static_cast<int8_t>(integer - 128));
  for (const int zero : m.zeros) zeros.push_back(static_cast<int8_t>(zero - 128));
  std::vector<uint16_t> scales = m.ScaleBits(false, false);
  std::vector<int64_t> shape = {m.rows, m.groups()};
  if (one_scale) {
    shape = {1};
    scales.resize(1);
    zeros.resize(1);
  }
  into[base + ".weight"] = TensorOf("I8", {m.rows, m.cols}, values);
  into[base + ".weight_scale"] = TensorOf("BF16", shape, scales);
  into[base + ".weight_zero_point"] = TensorOf("I8", shape, zeros);
  into[base + ".input_scale"] = TensorOf("BF16", {1}, std::vector<uint16_t>{0x3c00});
  into[base + ".input_zero_point"] = TensorOf("I8", {1}, std::vector<int8_t>{0});
}

void WritePacked(const Matrix& m, const std::string& base, TensorBytes& into) {
  const int64_t groups = m.groups(), n = 32 / m.bits, words = (m.rows + n - 1) / n;
  std::vector<uint32_t> packed(m.rows * m.cols / n), zeros(words * groups);
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.cols; ++c) {
      packed[r * m.cols / n + c / n] |= static_cast<uint32_t>(m.integers[r * m.cols + c])
                                        << (c % n * m.bits);
    }
    for (int64_t g = 0; g < groups; ++g) {
      zeros[r / n * groups + g] |= static_cast<uint32_t>(m.zeros[r * groups + g])
                                   << (r % n * m.bits);
    }
  }
  into[base + ".weight_packed"] = TensorOf("I32", {m.rows, m.cols / n}, packed);
  into[base + ".weight_scale"] = TensorOf("BF16", {m.rows, groups}, m.ScaleBits(false, false));
  into[base + ".weight_zero_point"] = TensorOf("I32", {words, groups}, zeros);
  into[base + ".weight_shape"] = TensorOf("I64", {2}, std::vector<int64_t>{m.rows, m.cols});
}

void WriteByOutputs(const Matrix& m, Layout layout, int32_t zero_less, const std::string& base,
                    TensorBytes& into) {
  const int64_t groups = m.groups(), n = 32 / m.bits, words = m.rows / n;
  const auto place = [&](int64_t i) { return layout == Layout::kAwq ? kAwqOrder[i] : i; };
  std::vector<uint32_t> packed(m.rows * m.cols / n), zeros(groups * words);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t word = 0; word < words; ++word) {
      for (int64_t i = 0; i < n; ++i) {
        zeros[g * words + word] |=
            static_cast<uint32_t>(m.zeros[(word * n + place(i)) * groups + g] - zero_less)
            << (m.bits * i);
      }
    }
  }
  if (layout == Layout::kGptq) {
    for (int64_t c = 0; c < m.cols; ++c) {
      for (int64_t r = 0; r < m.rows; ++r) {
        packed[c / n * m.rows + r] |= static_cast<uint32_t>(m.integers[r * m.cols + c])
                                      << (c % n * m.bits);
      }
    }
    into[base + ".qweight"] = TensorOf("I32", {m.cols / n, m.rows}, packed);
    std::vector<int32_t> order(m.cols);
    for (int64_t c = 0; c < m.cols; ++c) order[c] = static_cast<int32_t>(c / m.group);
    into[base + ".g_idx"] = TensorOf("I32", {m.cols}, order);
  } else {
    for (int64_t c = 0; c < m.cols; ++c) {
      for (int64_t word = 0; word < words; ++word) {
        for (int64_t i = 0; i < n; ++i) {
          packed[c * words + word] |=
              static_cast<uint32_t>(m.integers[(word * n + place(i)) * m.cols + c]) << (m.bits * i);
        }
      }
    }
    into[base + ".qweight"] = TensorOf("I32", {m.cols, words}, packed);
  }
  into[base + ".qzeros"] = TensorOf("I32", {groups, words}, zeros);
  into[base + ".scales"] = TensorOf("F16", {groups, m.rows}, m.ScaleBits(true, true));
}

json SchemeJson(const Form& form) {
  if (form.layout == Layout::kGptq) {
    return {{"quant_method", "gptq"},
            {"bits", form.bits},
            {"group_size", form.group == 0 ? -1 : form.group},
            {"desc_act", false}};
  }
  if (form.layout == Layout::kAwq) {
    return {{"quant_method", "awq"},
            {"bits", form.bits},
            {"group_size", form.group},
            {"version", "gemm"},
            {"zero_point", true}};
  }
  const bool plain = form.layout == Layout::kPlain;
  json inputs = nullptr;
  if (plain) {
    inputs = {{"num_bits", 8}, {"type", "int"}, {"strategy", "token"}, {"dynamic", true}};
  }
  return {{"quant_method", "compressed-tensors"},
          {"format", plain ? "int-quantized" : "pack-quantized"},
          {"kv_cache_scheme", nullptr},
          {"sparsity_config", {{"format", "dense"}, {"sparsity_structure", "unstructured"}}},
          {"ignore", {"lm_head"}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"input_activations", inputs},
              {"output_activations", nullptr},
              {"weights",
               {{"num_bits", form.bits},
                {"type", "int"},
                {"strategy", form.one_scale    ? "tensor"
                             : form.group == 0 ? "channel"
                                               : "group"},
                {"group_size", form.group == 0 ? json() : json(form.group)},
                {"symmetric", form.symmetric},
                {"actorder", nullptr}}}}}}}};
}

// A model directory whose matrices are of one form; tests spoil single tensors of it.
struct QuantizedModel {
  json config = TinyConfig();
  TensorBytes tensors;
  std::map<std::string, Matrix> matrices;  // by base name

  QuantizedModel(std::mt19937_64& random, const Form& form, const json& keys = json::object()) {
    config.update({{"hidden_size", 256}, {"intermediate_size", 384}, {"num_hidden_layers", 1}});
    config["quantization_config"] = SchemeJson(form);
    config.update(keys);
    ModelConfig plain_config;
    const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    plain_config = *parsed;
    const int32_t less = std::get<IntegerScheme>(*plain_config.weight_scheme).zero_less;
    for (const TensorSpec& spec : FileTensors(plain_config)) {
      const std::string base = spec.name.substr(0, spec.name.rfind('.'));
      if (spec.role == TensorSpec::Role::kMatrix) {
        const Matrix& made =
            matrices.emplace(base, Matrix(random, spec.rows, spec.cols, form, less)).first->second;
        if (form.layout == Layout::kPlain) {
          WritePlain(made, form.one_scale, base, tensors);
        } else if (form.layout == Layout::kPacked) {
          WritePacked(made, base, tensors);
        } else {
          WriteByOutputs(made, form.layout, less, base, tensors);
        }
        continue;
      }
      AddPlainTensor(random, spec, tensors);
    }
  }

  absl::StatusOr<Weights> Load(const TempDir& dir) const {
    return WriteAndLoad(dir, config, tensors);
  }
};

std::vector<Form> AllForms() {
  std::vector<Form> forms;
  for (const int64_t group : {32, 64, 128}) {
    for (const Layout layout : {Layout::kPacked, Layout::kGptq, Layout::kAwq}) {
      for (const bool symmetric : {false, true}) forms.push_back({layout, 4, group, symmetric});
    }
    for (const Layout layout : {Layout::kPlain, Layout::kPacked, Layout::kGptq}) {
      forms.push_back({layout, 8, group, true});
    }
  }
  for (const Layout layout : {Layout::kPacked, Layout::kGptq}) {
    for (const bool symmetric : {false, true}) forms.push_back({layout, 4, 0, symmetric});
    forms.push_back({layout, 8, 0, true});
  }
  forms.push_back({Layout::kPlain, 8, 0, true});
  forms.push_back({Layout::kPlain, 8, 0, true, true});
  return forms;
}

std::string Name(const Form& form) {
  return "layout " + std::to_string(static_cast<int>(form.layout)) + ", " +
         std::to_string(form.bits) + " bits, group " + std::to_string(form.group) +
         (form.symmetric ? ", symmetric" : "") + (form.one_scale ? ", one scale" : "");
}

TEST(GroupedIntegersTest, ValuesOfEveryFormAreThoseOfTheFile) {
  using kernels::WeightType;
  TestRandom random;
  for (const json& keys : {json(json::object()), kExpertKeys}) {
    for (const Form& form : AllForms()) {
      SCOPED_TRACE(Name(form));
      const TempDir dir;
      const QuantizedModel model(random, form, keys);
      const auto weights = model.Load(dir);
      ASSERT_TRUE(weights.ok()) << weights.status();
      for (const auto& [name, matrix] : MatricesOf(weights->layers[0])) {
        const Matrix& written = model.matrices.at("model.layers.0." + name);
        ASSERT_EQ(matrix->rows, written.rows);
        ASSERT_EQ(matrix->cols, written.cols);
        EXPECT_EQ(matrix->type, form.bits == 8             ? WeightType::kQ8_0
                                : form.symmetric           ? WeightType::kQ4_0
                                : written.group % 128 == 0 ? WeightType::kI4x128
                                                           : WeightType::kI4x32);
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

// Phi-3's matrices share tensors, and the rows of Q and K have an order of their own there.
TEST(GroupedIntegersTest, MatricesThatShareATensorAreItsParts) {
  TestRandom random;
  for (const Form& form : AllForms()) {
    SCOPED_TRACE(Name(form));
    const TempDir dir;
    const QuantizedModel model(random, form, kPhi3Keys);
    auto weights = model.Load(dir);
    ASSERT_TRUE(weights.ok()) << weights.status();
    ExpectParts(model.config, &*weights, [&](const std::string& base, int64_t row, int64_t col) {
      return model.matrices.at(base).Value(row, col);
    });
    const std::vector<float> exact = Logits(dir.path(), kernels::DType::kF32);
    EXPECT_LT(
        RelativeError(Logits(dir.path(), kernels::DType::kF32, WeightStorage::kStored), exact),
        0.2);  // what rounding the other side costs
  }
}

// Integers of W8A8 and W4A8 are the file's own where 128 values have one scale and no zero point; others are refused, not rounded
// once more.
void ExpectTheFilesIntegers(WeightStorage storage, int32_t bits) {
  TestRandom random;
  int taken = 0;
  for (const Form& form : AllForms()) {
    SCOPED_TRACE(Name(form));
    const TempDir dir;
    const QuantizedModel model(random, form);
    const auto weights = model.Load(dir);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const absl::Status may = CheckWeightStorage(storage, *weights);
    if (form.bits != bits || !form.symmetric || (form.group != 0 && form.group != 128)) {
      EXPECT_EQ(may.code(), absl::StatusCode::kInvalidArgument) << may;
      continue;
    }
    ASSERT_TRUE(may.ok()) << may;
    ++taken;
    for (const auto& [name, matrix] : MatricesOf(weights->layers[0])) {
      const Matrix& written = model.matrices.at("model.layers.0." + name);
      const auto stored = StoredPartsOf(storage, {{*matrix}}, false);
      ASSERT_TRUE(stored.ok()) << stored.status();
      const kernels::StoredMatrix& part = stored->parts[0];
      ASSERT_EQ(part.type, kernels::WeightType::kI8x128);
      ASSERT_EQ(part.integer_bits, bits);
      SCOPED_TRACE(name);
      ExpectValues(written, [&](int64_t row, float* out) {
        kernels::DequantizeRow(part.type, part.rows[row], written.cols, out);
      });
    }
    const WeightMatrix& output = weights->lm_head;
    const auto stored = StoredPartsOf(storage, {{output}}, true);
    EXPECT_EQ(stored->parts[0].type, kernels::WeightType::kQ8_0);
    EXPECT_EQ(stored->parts[0].integer_bits, 8);
  }
  EXPECT_GT(taken, 3);
}
TEST(GroupedIntegersTest, W8A8TakesTheIntegersOfTheFile) {
  ExpectTheFilesIntegers(WeightStorage::kW8A8, 8);
}
TEST(GroupedIntegersTest, W4A8TakesTheIntegersOfTheFile) {
  ExpectTheFilesIntegers(WeightStorage::kW4A8, 4);
}

TEST(GroupedIntegersTest, ProductsOfIntegersAreThoseOfWideValues) {
  TestRandom random;
  // One small model's errors lie a sixth apart from another's: what is expected is of the mean of several.
  constexpr int kModels = 16;
  for (const Layout layout : {Layout::kPlain, Layout::kPacked, Layout::kGptq}) {
    const Form form{layout, 8, 0, true};
    SCOPED_TRACE(Name(form));
    double stored = 0, w8a8 = 0;
    for (int i = 0; i < kModels; ++i) {
      const TempDir dir;
      ASSERT_TRUE(QuantizedModel(random, form).Load(dir).ok());
      const auto logits = [&](WeightStorage storage) {
        return Logits(dir.path(), kernels::DType::kF32, storage);
      };
      const std::vector<float> exact = logits(WeightStorage::kWide);
      ASSERT_FALSE(exact.empty());
      stored += RelativeError(logits(WeightStorage::kStored), exact) / kModels;
      w8a8 += RelativeError(logits(WeightStorage::kW8A8), exact) / kModels;
    }
    // The other side is rounded, 32 values at a time or 128.
    EXPECT_LT(stored, 0.03);
    EXPECT_LT(w8a8, 0.05);
    EXPECT_GT(w8a8, stored);
  }
}

// Act-order: a group's inputs are anywhere.
TEST(GroupedIntegersTest, GroupsOutOfOrderAreWidened) {
  TestRandom random;
  for (const int32_t bits : {4, 8}) {
    for (const Layout layout : {Layout::kGptq, Layout::kPacked}) {
      const Form form{layout, bits, 32, bits == 8};
      SCOPED_TRACE(Name(form));
      QuantizedModel model(random, form);
      const std::string base = "model.layers.0.mlp.down_proj";
      const Matrix& written = model.matrices.at(base);
      std::vector<int32_t> order(written.cols);
      for (int64_t c = 0; c < written.cols; ++c) order[c] = static_cast<int32_t>(c / 32);
      std::shuffle(order.begin(), order.end(), random);
      model.tensors[base + (layout == Layout::kGptq ? ".g_idx" : ".weight_g_idx")] =
          TensorOf("I32", {written.cols}, order);
      const TempDir dir;
      const auto weights = model.Load(dir);
      ASSERT_TRUE(weights.ok()) << weights.status();
      std::vector<float> row(written.cols);
      for (int64_t r = 0; r < written.rows; ++r) {
        weights->layers[0].down.WidenRow(r, row.data());
        for (int64_t c = 0; c < written.cols; ++c) {
          const int64_t at = r * written.groups() + order[c];
          const int integer = written.integers[r * written.cols + c] - written.zeros[at];
          ASSERT_EQ(row[c], written.scales[at] * static_cast<float>(integer)) << r << " " << c;
        }
      }
      EXPECT_TRUE(CheckWeightStorage(WeightStorage::kWide, *weights).ok());
      for (const WeightStorage storage :
           {WeightStorage::kStored, WeightStorage::kW8A8, WeightStorage::kW4A8}) {
        const absl::Status status = CheckWeightStorage(storage, *weights);
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()), HasSubstr("say wide"));
      }
    }
  }
}

// Writers of GPTQ gave matrices without a bias one of zeros.
TEST(GroupedIntegersTest, BiasesOfZerosInGptqFilesAreNone) {
  TestRandom random;
  for (const Layout layout : {Layout::kGptq, Layout::kPacked}) {
    for (const uint16_t value : {0, 1}) {
      QuantizedModel model(random, {layout, 4, 128, true});
      for (const auto& [name, matrix] : model.matrices) {
        std::vector<uint16_t> bias(matrix.rows, 0);
        bias.back() = value;
        model.tensors[name + ".bias"] = TensorOf("F16", {matrix.rows}, bias);
      }
      const TempDir dir;
      const auto weights = model.Load(dir);
      if (layout == Layout::kGptq && value == 0) {
        ASSERT_TRUE(weights.ok()) << weights.status();
        EXPECT_EQ(weights->layers[0].up_bias.data, nullptr);
      } else {
        EXPECT_THAT(std::string(weights.status().message()), HasSubstr(".bias"));
        EXPECT_THAT(std::string(weights.status().message()), HasSubstr("no part"));
      }
    }
  }
}

// Scales in float32 are rounded to float16, unless that loses more than its last bit.
TEST(GroupedIntegersTest, ScalesInFloat32AreRounded) {
  TestRandom random;
  const Form form{Layout::kPlain, 8, 0, true};
  const std::string name = "model.layers.0.mlp.up_proj.weight_scale";
  for (const float scale : {0.0123456789f, 1.0f / 3, 3e-7f, 70000.0f}) {
    QuantizedModel model(random, form);
    const auto rows = model.tensors[name].shape[0];
    model.tensors[name] = TensorOf("F32", {rows, 1}, std::vector<float>(rows, scale));
    const TempDir dir;
    const auto weights = model.Load(dir);
    if (scale < 1e-6f || scale > 65504) {
      EXPECT_THAT(std::string(weights.status().message()), HasSubstr("float16 cannot hold"));
      continue;
    }
    ASSERT_TRUE(weights.ok()) << weights.status();
    const WeightMatrix& up = weights->layers[0].up;
    const Matrix& written = model.matrices.at("model.layers.0.mlp.up_proj");
    std::vector<float> row(up.cols);
    up.WidenRow(5, row.data());
    const float rounded = kernels::ToFloat(kernels::ToF16(scale));
    for (int64_t c = 0; c < up.cols; ++c) {
      EXPECT_EQ(row[c], rounded * static_cast<float>(written.integers[5 * up.cols + c] - 128));
    }
  }
}

// Every one names the tensor and the file.
TEST(GroupedIntegersTest, DamagedTensorsAreRefusedByName) {
  TestRandom random;
  const std::string base = "model.layers.0.mlp.up_proj.";
  struct Case {
    Form form;
    std::string tensor;
    std::function<void(QuantizedModel&)> spoil;
    std::string says;
  };
  const Form packed{Layout::kPacked, 4, 128, false}, gptq{Layout::kGptq, 4, 128, false};
  const Form awq{Layout::kAwq, 4, 128, false}, plain{Layout::kPlain, 8, 0, true};
  const Form gptq8{Layout::kGptq, 8, 128, true}, packed8{Layout::kPacked, 8, 0, true};
  const auto scale = [&](const Form& form, uint16_t bits) {
    const bool by_outputs = form.layout == Layout::kGptq || form.layout == Layout::kAwq;
    return [=, name = base + (by_outputs ? "scales" : "weight_scale")](QuantizedModel& m) {
      std::memcpy(m.tensors[name].bytes.data() + 2 * 7, &bits, 2);
    };
  };
  const std::vector<Case> cases = {
      {packed, "weight_scale", scale(packed, 0), "above 0"},
      {packed, "weight_scale", scale(packed, 0xbf80), "is -1"},
      {packed, "weight_scale", scale(packed, 0x7f80), "finite"},
      {packed, "weight_scale", scale(packed, 0x7fc0), "finite"},
      {packed, "weight_scale", scale(packed, 0x3081), "float16 cannot hold"},
      {gptq, "scales", scale(gptq, 0x7c00), "finite"},
      {awq, "scales", scale(awq, 0x8001), "above 0"},
      {gptq, "g_idx", [&](QuantizedModel& m) { m.tensors[base + "g_idx"].bytes[4 * 5] = 2; },
       "input 5 is of group 2 of 2 groups"},
      {gptq, "g_idx",
       [&](QuantizedModel& m) { m.tensors[base + "g_idx"].bytes[4 * 5 + 3] = '\xff'; },
       "input 5 is of group -"},
      {gptq, "qzeros", [&](QuantizedModel& m) { m.tensors.erase(base + "qzeros"); }, "missing"},
      {awq, "scales", [&](QuantizedModel& m) { m.tensors.erase(base + "scales"); }, "missing"},
      {awq, "qweight",
       [&](QuantizedModel& m) {
         std::swap(m.tensors[base + "qweight"].shape[0], m.tensors[base + "qweight"].shape[1]);
       },
       "expected [256, 48]"},
      {packed, "weight_packed",
       [&](QuantizedModel& m) { m.tensors[base + "weight_packed"].dtype = "F32"; }, "expected I32"},
      {packed, "weight_zero_point",
       [&](QuantizedModel& m) {
         m.tensors[base + "weight_zero_point"].shape = {2, 48};
       },
       "expected [48, 2]"},
      {packed, "weight_shape",
       [&](QuantizedModel& m) { m.tensors[base + "weight_shape"].bytes[0] ^= 1; },
       "expected 384 x 256"},
      {packed, "weight_packed",
       [&](QuantizedModel& m) {
         m.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 96;
       },
       "group_size 96 does not divide its 256 inputs"},
      {packed, "up_proj.weight",
       [&](QuantizedModel& m) { m.tensors.erase(base + "weight_packed"); }, "missing"},
      {packed, "up_proj.bias",
       [&](QuantizedModel& m) {
         m.tensors[base + "bias"] = TensorOf("BF16", {1}, std::vector<uint16_t>{0});
       },
       "no part"},
      {plain, "weight_scale", scale(plain, 0xbf80), "is -1"},
      {plain, "weight_scale", [&](QuantizedModel& m) { m.tensors.erase(base + "weight_scale"); },
       "missing"},
      {plain, "weight_scale",
       [&](QuantizedModel& m) {
         m.tensors[base + "weight_scale"].shape = {1, 384};
       },
       "expected [384, 1]"},
      {plain, "up_proj.weight", [&](QuantizedModel& m) { m.tensors[base + "weight"].dtype = "U8"; },
       "dtype U8"},
      {plain, "weight_zero_point",
       [&](QuantizedModel& m) { m.tensors[base + "weight_zero_point"].bytes[7] ^= 1; },
       "output 7, group 0 is 129"},
      {packed8, "weight_zero_point",
       [&](QuantizedModel& m) { m.tensors[base + "weight_zero_point"].bytes[9] ^= 2; },
       "output 9, group 0 is 130"},
      {packed8, "weight_packed",
       [&](QuantizedModel& m) {
         m.tensors[base + "weight_packed"].shape = {192, 128};
       },
       "expected [384, 64]"},
      {gptq8, "qzeros", [&](QuantizedModel& m) { m.tensors[base + "qzeros"].bytes[384 + 3] ^= 4; },
       "output 3, group 1 is 124"},
      {plain, "q_proj.weight",
       [&](QuantizedModel& m) {
         json& weights = m.config["quantization_config"]["config_groups"]["group_0"]["weights"];
         weights["strategy"] = "group";
         weights["group_size"] = 96;
       },
       "group_size 96 does not divide its 256 inputs"},
  };
  ExpectEachRefusedByName<QuantizedModel>(random, cases);
}

TEST(GroupedIntegersTest, ConfigurationsThatAskForMoreAreRefusedByKey) {
  const auto with = [](Layout layout, const std::string& pointer, const json& value) {
    const bool plain = layout == Layout::kPlain;
    json scheme = SchemeJson({layout, plain ? 8 : 4, plain ? 0 : 128, plain});
    scheme[json::json_pointer(pointer)] = value;
    return scheme;
  };
  const std::string weights = "/config_groups/group_0/weights/";
  for (const auto& [scheme, key] : std::vector<std::pair<json, std::string>>{
           {with(Layout::kGptq, "/bits", 3), "quantization_config.bits"},
           {with(Layout::kGptq, "/group_size", -2), "quantization_config.group_size"},
           {with(Layout::kGptq, "/group_size", 40), "quantization_config.group_size"},
           {with(Layout::kGptq, "/checkpoint_format", "marlin"), "checkpoint_format"},
           {with(Layout::kGptq, "/is_marlin_format", true), "is_marlin_format"},
           {with(Layout::kGptq, "/dynamic", {{"-:.*", {}}}), "dynamic"},
           {with(Layout::kAwq, "/bits", 3), "quantization_config.bits"},
           {with(Layout::kAwq, "/version", "gemv"), "version"},
           {with(Layout::kAwq, "/zero_point", false), "zero_point"},
           {with(Layout::kAwq, "/bits", 8), "quantization_config.bits"},
           {with(Layout::kAwq, "/group_size", -1), "quantization_config.group_size"},
           {with(Layout::kPacked, "/format", "int-quantized"), "num_bits"},
           {with(Layout::kPacked, "/format", "marlin-24"), "format"},
           {with(Layout::kPacked, "/sparsity_config", {{"format", "sparse-bitmask"}}),
            "sparsity_config"},
           {with(Layout::kPacked, "/kv_cache_scheme", {{"num_bits", 8}}), "kv_cache_scheme"},
           {with(Layout::kPacked, "/config_groups/group_1", json::object()), "config_groups"},
           {with(Layout::kPacked, "/config_groups/group_0/input_activations", {{"num_bits", 8}}),
            "input_activations"},
           {with(Layout::kPacked, weights + "num_bits", 2), "num_bits"},
           {with(Layout::kPlain, weights + "num_bits", 4), "num_bits"},
           {with(Layout::kPlain, weights + "strategy", "block"), "strategy"},
           {with(Layout::kPlain, weights + "type", "float"), "type"},
           {with(Layout::kPlain, "/config_groups/group_0/input_activations",
                 {{"num_bits", 4}, {"type", "int"}}),
            "input_activations"},
           {with(Layout::kPlain, "/config_groups/group_0/output_activations", {{"num_bits", 8}}),
            "output_activations"},
           {with(Layout::kPacked, weights + "type", "float"), "type"},
           {with(Layout::kPacked, weights + "strategy", "tensor"), "strategy"},
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
  EXPECT_EQ(std::get<IntegerScheme>(*parsed->weight_scheme).zero_less, 0);
}

}  // namespace
}  // namespace winnow::engine
