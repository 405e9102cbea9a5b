#include "engine/model/weights.h"

#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <set>
#include <string>

#include "engine/model/random_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

absl::StatusOr<Weights> Load(const std::string& dir) {
  const auto config = LoadModelConfig(dir);
  EXPECT_TRUE(config.ok()) << config.status();
  return LoadWeights(dir, *config);
}

// A random model of `config` in a folder of its own.
class TinyModel {
 public:
  explicit TinyModel(const json& config = TinyConfig(), int64_t shard_bytes = 1 << 30) {
    WriteText(source_.File("config.json"), config.dump());
    RandomModelOptions options;
    options.config_path = source_.File("config.json");
    options.out_dir = dir();
    options.seed = 5;
    options.shard_bytes = shard_bytes;
    const auto report = WriteRandomModel(options);
    EXPECT_TRUE(report.ok()) << report.status();
  }
  std::string dir() const { return source_.File("model"); }
  std::string File(std::string_view name) const { return dir() + "/" + std::string(name); }

  // Rewrites a weight file's header and, if told, its data.
  void Edit(std::string_view name, const std::function<void(json&, std::string&)>& edit) const {
    const std::string bytes = ReadText(File(name));
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    json header = json::parse(bytes.substr(8, length));
    std::string data = bytes.substr(8 + length);
    edit(header, data);
    WriteText(File(name), SafetensorsBytes(header.dump(), 0) + data);
  }
  void EditIndex(const std::function<void(json&)>& edit) const {
    json index = json::parse(ReadText(File("model.safetensors.index.json")));
    edit(index);
    WriteText(File("model.safetensors.index.json"), index.dump());
  }

 private:
  TempDir source_;
};

std::string LoadError(const TinyModel& model,
                      absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  const auto weights = Load(model.dir());
  EXPECT_EQ(weights.status().code(), code) << weights.status();
  return std::string(weights.status().message());
}

// Appends a tensor of `bytes` U8 values to a file.
void Append(json& header, std::string& data, const std::string& name, size_t bytes) {
  header[name] = {
      {"dtype", "U8"}, {"shape", {bytes}}, {"data_offsets", {data.size(), data.size() + bytes}}};
  data += std::string(bytes, 'x');
}

TEST(WeightsTest, TensorsOfATrainedModelHaveTheirShapes) {
  const auto weights = Load(SourcePath("models/needle-5m"));
  ASSERT_TRUE(weights.ok()) << weights.status();
  const auto expect = [](const WeightMatrix& matrix, int64_t rows, int64_t cols) {
    EXPECT_NE(matrix.data, nullptr);
    EXPECT_EQ(matrix.rows, rows);
    EXPECT_EQ(matrix.cols, cols);
    EXPECT_EQ(matrix.type, kernels::WeightType::kBF16);
  };
  expect(weights->embedding, 4096, 256);
  EXPECT_EQ(weights->lm_head.data, weights->embedding.data);  // tied
  expect(weights->final_norm, 1, 256);
  ASSERT_EQ(weights->layers.size(), 6u);
  for (const LayerWeights& layer : weights->layers) {
    expect(layer.attention_norm, 1, 256);
    expect(layer.q, 256, 256);
    expect(layer.k, 128, 256);
    expect(layer.v, 128, 256);
    expect(layer.o, 256, 256);
    expect(layer.mlp_norm, 1, 256);
    expect(layer.gate, 704, 256);
    expect(layer.up, 704, 256);
    expect(layer.down, 256, 704);
    for (const WeightMatrix* absent :
         {&layer.q_bias, &layer.k_bias, &layer.v_bias, &layer.o_bias, &layer.gate_bias,
          &layer.up_bias, &layer.down_bias, &layer.q_norm, &layer.k_norm}) {
      EXPECT_EQ(absent->data, nullptr);
    }
  }
}

TEST(WeightsTest, ShardsOfATrainedModelLoad) {
  if (SharedDir().empty()) GTEST_SKIP() << "no shared models here (WINNOW_SHARED)";
  const auto weights = Load(SharedDir() + "/models/needle-26m");
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->files.size(), 4u);
  EXPECT_EQ(weights->layers.size(), 8u);
}

TEST(WeightsTest, EveryFamilyGoldenLoadsWithItsOptionalTensors) {
  const json cases = json::parse(ReadText(SourcePath("tests/golden/families/cases.json")));
  for (const std::string name : cases["cases"]) {
    SCOPED_TRACE(name);
    const std::string dir = SourcePath("tests/golden/families/" + name);
    const auto config = LoadModelConfig(dir);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto weights = LoadWeights(dir, *config);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const LayerWeights& layer = weights->layers[1];
    EXPECT_EQ(layer.q_bias.data != nullptr, config->layers[0].qkv_bias);
    EXPECT_EQ(layer.v_bias.data != nullptr, config->layers[0].qkv_bias);
    EXPECT_EQ(layer.o_bias.data != nullptr, config->layers[0].o_bias);
    const bool has_experts = !layer.experts.empty();
    const WeightMatrix& down_bias = has_experts ? layer.experts[1].down_bias : layer.down_bias;
    EXPECT_EQ(down_bias.data != nullptr, config->layers[0].mlp_bias);
    EXPECT_EQ(layer.router_bias.data != nullptr, has_experts && config->layers[0].mlp_bias);
    EXPECT_EQ(layer.sinks.data != nullptr, config->layers[0].sinks);
    EXPECT_EQ(layer.k_norm.data != nullptr, config->layers[0].qk_norm);
    EXPECT_EQ(layer.q.type, kernels::WeightTypeOf(config->dtype));
    EXPECT_EQ(weights->lm_head.data == weights->embedding.data, config->tie_word_embeddings);
  }
}

TEST(WeightsTest, ViewsShowTheBytesOfTheirOwnTensor) {
  json config_json = TinyConfig();
  config_json.update({{"attention_bias", true}, {"mlp_bias", true}, {"torch_dtype", "float32"}});
  const TinyModel model(config_json, 20'000);
  const auto config = LoadModelConfig(model.dir());
  auto weights = LoadWeights(model.dir(), *config);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_GT(weights->files.size(), 1u);
  Weights where;  // only to learn which view belongs to which name
  const std::vector<TensorSpec> specs = ModelTensors(*config, &where);
  const std::vector<TensorSpec> loaded = ModelTensors(*config, &*weights);
  ASSERT_EQ(specs.size(), loaded.size());
  std::set<const void*> seen;
  for (const TensorSpec& spec : loaded) {
    const WeightMatrix& matrix = *spec.matrix;
    std::vector<std::byte> expected(matrix.rows * matrix.cols * sizeof(float));
    FillRandomTensor(spec, *config, 5, DType::kF32, 0, expected);
    EXPECT_EQ(std::memcmp(matrix.data, expected.data(), expected.size()), 0) << spec.name;
    EXPECT_TRUE(seen.insert(matrix.data).second) << spec.name;
  }
}

json Phi3Config() {
  json config = TinyConfig();
  config.update({{"architectures", {"Phi3ForCausalLM"}},
                 {"model_type", "phi3"},
                 {"partial_rotary_factor", 0.75},
                 {"torch_dtype", "float32"}});
  return config;
}

// Matrices that share a tensor are parts of it, and the rows of a head that rotate in pairs lie half a head apart.
TEST(WeightsTest, FusedTensorsAreTakenApart) {
  const TinyModel model(Phi3Config());
  const auto config = LoadModelConfig(model.dir());
  ASSERT_TRUE(config.ok()) << config.status();
  const auto weights = LoadWeights(model.dir(), *config);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const LayerWeights& layer = weights->layers[1];
  EXPECT_EQ(layer.q.rows, 128);
  EXPECT_EQ(layer.k.rows, 64);
  EXPECT_EQ(layer.v.rows, 64);
  EXPECT_TRUE(layer.v.IsPlain() && layer.up.IsPlain());
  EXPECT_FALSE(layer.q.IsPlain() || layer.k.IsPlain());
  const float* qkv = static_cast<const float*>(layer.q.data);
  const float* gate_up = static_cast<const float*>(layer.gate.data);
  std::vector<float> row(32);
  const auto expect_row = [&](const WeightMatrix& matrix, int64_t at, const float* tensor,
                              int64_t file_row) {
    EXPECT_EQ(matrix.FileRow(at), file_row);
    matrix.WidenRow(at, row.data());
    EXPECT_EQ(std::memcmp(row.data(), tensor + file_row * 32, 32 * sizeof(float)), 0)
        << at << " of " << file_row;
  };
  // Rows that rotate together, 48 of 64: 0 with 24, 1 with 25, ...; here 0 with 32. The last 16 fill up the two halves.
  for (const int64_t head : {0, 1, 2}) {
    const WeightMatrix& matrix = head < 2 ? layer.q : layer.k;
    const int64_t begin = head < 2 ? 64 * head : 0;
    for (int64_t j = 0; j < 32; ++j) {
      const int64_t first = j < 24 ? j : 48 + j - 24, second = j < 24 ? 24 + j : 56 + j - 24;
      expect_row(matrix, begin + j, qkv, 64 * head + first);
      expect_row(matrix, begin + 32 + j, qkv, 64 * head + second);
    }
  }
  for (int64_t i = 0; i < 64; ++i) expect_row(layer.v, i, qkv, 192 + i);
  EXPECT_EQ(std::memcmp(layer.v.host().data, qkv + 192 * 32, 64 * 32 * sizeof(float)), 0);
  for (int64_t i = 0; i < 48; ++i) {
    expect_row(layer.gate, i, gate_up, i);
    expect_row(layer.up, i, gate_up, 48 + i);
  }
  // All rows of the tensors are somebody's.
  EXPECT_EQ(Summarize(*config, *weights).bytes,
            static_cast<int64_t>(std::filesystem::file_size(model.File("model.safetensors"))) -
                static_cast<int64_t>(weights->files[0]->header().data_offset()));
}

// Biases of such a family have the order of the rows that they belong to.
TEST(WeightsTest, NeighboursThatRotateTogetherLieHalfAHeadApart) {
  for (const double share : {0.75, 1.0}) {
    json config_json = TinyConfig();
    config_json.update({{"architectures", {"GlmForCausalLM"}},
                        {"model_type", "glm"},
                        {"partial_rotary_factor", share},
                        {"torch_dtype", "float32"}});
    const TinyModel model(config_json);
    const auto config = LoadModelConfig(model.dir());
    ASSERT_TRUE(config.ok()) << config.status();
    const auto weights = LoadWeights(model.dir(), *config);
    ASSERT_TRUE(weights.ok()) << weights.status();
    const LayerWeights& layer = weights->layers[1];
    EXPECT_TRUE(layer.v.IsPlain() && layer.gate.IsPlain());
    const auto pairs = static_cast<int64_t>(64 * share) / 2;
    for (const auto& [matrix, bias, heads] :
         {std::tuple(&layer.q, &layer.q_bias, 2), std::tuple(&layer.k, &layer.k_bias, 1)}) {
      ASSERT_EQ(matrix->rows, 64 * heads);
      const auto* tensor = static_cast<const float*>(matrix->data);
      const auto* of_bias = static_cast<const float*>(bias->data);
      std::vector<float> row(matrix->cols);
      for (int64_t i = 0; i < matrix->rows; ++i) {
        const int64_t half = i % 64 / 32, j = i % 32;
        const int64_t in_file =
            i / 64 * 64 + (j < pairs ? 2 * j + half : 2 * pairs + half * (32 - pairs) + j - pairs);
        EXPECT_EQ(matrix->FileRow(i), in_file) << i;
        matrix->WidenRow(i, row.data());
        EXPECT_EQ(
            std::memcmp(row.data(), tensor + in_file * matrix->cols, row.size() * sizeof(float)), 0)
            << i;
        float value = 0;
        bias->WidenRow(i, &value);
        EXPECT_EQ(value, of_bias[in_file]) << i;
      }
    }
  }
}

TEST(WeightsTest, FusedTensorsOfAnotherShapeAreRefusedByName) {
  for (const auto& [name, rows] :
       {std::pair("self_attn.qkv_proj", 256), std::pair("mlp.gate_up_proj", 96)}) {
    const std::string tensor = std::string("model.layers.1.") + name + ".weight";
    const TinyModel model(Phi3Config());
    const int64_t half = rows / 2;
    model.Edit("model.safetensors", [&](json& header, std::string&) {
      header[tensor]["shape"] = {half, 64};
    });
    EXPECT_THAT(LoadError(model),
                AllOf(HasSubstr(tensor), HasSubstr("expected [" + std::to_string(rows) + ", 32]")));
    const TinyModel lacking(Phi3Config());
    lacking.Edit("model.safetensors", [&](json& header, std::string&) {
      header["other"] = header[tensor];
      header.erase(tensor);
    });
    EXPECT_THAT(LoadError(lacking, absl::StatusCode::kNotFound),
                HasSubstr("tensor \"" + tensor + "\" is missing"));
  }
}

TEST(WeightsTest, WeightsMayBeMoved) {
  const TinyModel model;
  auto weights = Load(model.dir());
  ASSERT_TRUE(weights.ok());
  const void* data = weights->layers[0].q.data;
  const Weights moved = *std::move(weights);
  EXPECT_EQ(moved.layers[0].q.data, data);
  EXPECT_EQ(static_cast<const char*>(moved.lm_head.data)[0],
            static_cast<const char*>(moved.lm_head.data)[0]);
}

TEST(WeightsTest, LeftoversOfOldCheckpointsAreIgnored) {
  const TinyModel model;
  model.Edit("model.safetensors", [](json& header, std::string& data) {
    Append(header, data, "model.layers.0.self_attn.rotary_emb.inv_freq", 32);
  });
  EXPECT_TRUE(Load(model.dir()).ok());

  json tied = TinyConfig();
  tied["tie_word_embeddings"] = true;
  const TinyModel tied_model(tied);
  tied_model.Edit("model.safetensors", [](json& header, std::string& data) {
    Append(header, data, "lm_head.weight", 3);
  });
  const auto weights = Load(tied_model.dir());
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->lm_head.data, weights->embedding.data);
}

TEST(WeightsTest, UnalignedTensorsLoad) {
  json config = TinyConfig();
  config["torch_dtype"] = "float32";
  const TinyModel model(config);
  const std::string aligned = ReadText(model.File("model.safetensors"));
  uint64_t length = 0;
  std::memcpy(&length, aligned.data(), sizeof(length));
  WriteText(model.File("model.safetensors"),
            SafetensorsBytes(aligned.substr(8, length) + " ", 0) + aligned.substr(8 + length));
  const auto weights = Load(model.dir());
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(weights->embedding.data) % 2, 1u);
  float first = 0, expected = 0;
  std::memcpy(&first, weights->embedding.data, sizeof(first));
  std::memcpy(&expected, aligned.data() + 8 + length, sizeof(expected));
  EXPECT_EQ(first, expected);
}

TEST(WeightsTest, AMissingTensorIsNamed) {
  const TinyModel model;
  model.Edit("model.safetensors", [](json& header, std::string& data) {
    header["model.layers.1.self_attn.rotary_emb.inv_freq"] =
        header["model.layers.1.mlp.up_proj.weight"];  // same bytes
    header.erase("model.layers.1.mlp.up_proj.weight");
  });
  EXPECT_THAT(LoadError(model, absl::StatusCode::kNotFound),
              AllOf(HasSubstr(
                  "model.safetensors: tensor \"model.layers.1.mlp.up_proj.weight\" is missing")));
}

TEST(WeightsTest, AWrongShapeIsPrintedBesideTheExpectedOne) {
  const TinyModel model;
  model.Edit("model.safetensors", [](json& header, std::string& data) {
    header["model.layers.0.self_attn.k_proj.weight"]["shape"] = {32, 64};
  });
  EXPECT_THAT(
      LoadError(model),
      AllOf(HasSubstr(
                "model.safetensors: tensor \"model.layers.0.self_attn.k_proj.weight\" at byte "),
            HasSubstr("shape [32, 64], expected [64, 32]")));
  // A vector is no matrix of one row.
  const TinyModel other;
  other.Edit("model.safetensors", [](json& header, std::string& data) {
    header["model.norm.weight"]["shape"] = {1, 32};
  });
  EXPECT_THAT(LoadError(other), HasSubstr("shape [1, 32], expected [32]"));
}

json ExpertsConfigJson() {
  json config = TinyConfig();
  config.update({{"architectures", {"Qwen3MoeForCausalLM"}},
                 {"model_type", "qwen3_moe"},
                 {"num_experts", 3},
                 {"num_experts_per_tok", 2},
                 {"moe_intermediate_size", 24},
                 {"mlp_only_layers", {0}}});
  return config;
}

TEST(WeightsTest, ExpertsAreViewsOfTheirOwnTensors) {
  const TinyModel model(ExpertsConfigJson());
  const auto config = LoadModelConfig(model.dir());
  const auto weights = Load(model.dir());
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_THAT(weights->layers[0].experts, ::testing::IsEmpty());
  EXPECT_EQ(weights->layers[0].router.data, nullptr);
  EXPECT_EQ(weights->layers[0].gate.rows, 48);
  const LayerWeights& layer = weights->layers[1];
  EXPECT_EQ(layer.gate.data, nullptr);
  EXPECT_EQ(layer.router.rows, 3);
  EXPECT_EQ(layer.router.cols, 32);
  ASSERT_EQ(layer.experts.size(), 3);
  const SafetensorsFile& file = *weights->files[0];
  for (size_t e = 0; e < 3; ++e) {
    const std::string prefix = "model.layers.1.mlp.experts." + std::to_string(e) + ".";
    for (const auto& [name, matrix, rows, cols] :
         {std::tuple("gate_proj", &layer.experts[e].gate, 24, 32),
          {"up_proj", &layer.experts[e].up, 24, 32},
          {"down_proj", &layer.experts[e].down, 32, 24}}) {
      const auto entry = file.header().Find(prefix + name + ".weight");
      ASSERT_TRUE(entry) << prefix << name;
      EXPECT_EQ(matrix->data, file.Data(*entry).data());
      EXPECT_EQ(matrix->rows, rows);
      EXPECT_EQ(matrix->cols, cols);
    }
  }
  int64_t values = 0;
  for (const TensorSpec& spec : FileTensors(*config)) {
    values += std::max<int64_t>(spec.rows, 1) * spec.cols;
  }
  EXPECT_EQ(Summarize(*config, *weights).parameters, values);
}

TEST(WeightsTest, ExpertsThatAreMissingOrOfAnotherShapeAreNamed) {
  const std::string up = "model.layers.1.mlp.experts.1.up_proj.weight";
  const TinyModel missing(ExpertsConfigJson());
  missing.Edit("model.safetensors", [&](json& header, std::string& data) {
    header["model.layers.1.self_attn.rotary_emb.inv_freq"] = header[up];  // same bytes
    header.erase(up);
  });
  EXPECT_THAT(LoadError(missing, absl::StatusCode::kNotFound),
              HasSubstr("model.safetensors: tensor \"" + up + "\" is missing"));
  const TinyModel other(ExpertsConfigJson());
  other.Edit("model.safetensors", [&](json& header, std::string& data) {
    header[up]["shape"] = {32, 24};
  });
  EXPECT_THAT(LoadError(other),
              AllOf(HasSubstr("model.safetensors: tensor \"" + up + "\" at byte "),
                    HasSubstr("shape [32, 24], expected [24, 32]")));
  const TinyModel router(ExpertsConfigJson());
  router.Edit("model.safetensors", [&](json& header, std::string& data) {
    header["model.layers.1.mlp.gate.weight"]["shape"] = {32, 3};
  });
  EXPECT_THAT(LoadError(router), AllOf(HasSubstr("\"model.layers.1.mlp.gate.weight\" at byte "),
                                       HasSubstr("shape [32, 3], expected [3, 32]")));
  // One more than there are.
  const TinyModel more(ExpertsConfigJson());
  more.Edit("model.safetensors", [&](json& header, std::string& data) {
    Append(header, data, "model.layers.1.mlp.experts.3.up_proj.weight", 64);
  });
  EXPECT_THAT(LoadError(more),
              HasSubstr("\"model.layers.1.mlp.experts.3.up_proj.weight\" at byte"));
}

TEST(WeightsTest, AWrongTypeIsPrintedBesideTheExpectedOnes) {
  const TinyModel model;
  model.Edit("model.safetensors",
             [](json& header, std::string& data) { header["model.norm.weight"]["dtype"] = "I16"; });
  EXPECT_THAT(LoadError(model, absl::StatusCode::kUnimplemented),
              AllOf(HasSubstr("tensor \"model.norm.weight\" at byte "),
                    HasSubstr("dtype I16, expected BF16, F16 or F32")));
}

TEST(WeightsTest, TypesMayBeMixed) {
  const TinyModel model;
  model.Edit("model.safetensors",
             [](json& header, std::string& data) { header["model.norm.weight"]["dtype"] = "F16"; });
  const auto weights = Load(model.dir());
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->final_norm.type, kernels::WeightType::kF16);
  EXPECT_EQ(weights->embedding.type, kernels::WeightType::kBF16);
}

TEST(WeightsTest, TensorsThatTheConfigurationDoesNotKnowAreRefused) {
  const TinyModel model;
  model.Edit("model.safetensors", [](json& header, std::string& data) {
    Append(header, data, "model.layers.0.self_attn.q_proj.bias", 256);
  });
  EXPECT_THAT(LoadError(model),
              AllOf(HasSubstr("tensor \"model.layers.0.self_attn.q_proj.bias\" at byte "),
                    HasSubstr("no part of a LlamaForCausalLM with 2 layers")));
}

// A model that reads images: its text part is found by either kind of names, and the rest is nobody's.
TEST(WeightsTest, TheTextPartOfAWholeIsFoundByEitherKindOfNames) {
  const json part = TinyConfig();
  json whole = {{"architectures", {"Mistral3ForConditionalGeneration"}},
                {"model_type", "mistral3"},
                {"torch_dtype", "bfloat16"},
                {"text_config", part}};
  for (const bool older : {true, false}) {
    SCOPED_TRACE(older);
    const TinyModel model(part);
    const auto down_of = [&model] {
      const auto weights = Load(model.dir());
      EXPECT_TRUE(weights.ok()) << weights.status();
      if (!weights.ok()) return std::string();
      EXPECT_NE(weights->lm_head.data, weights->embedding.data);
      const WeightMatrix& down = weights->layers[1].down;
      return std::string(static_cast<const char*>(down.data), down.rows * down.cols * 2);
    };
    const std::string expected = down_of();
    WriteText(model.File("config.json"), whole.dump());
    const auto rename = [&](const std::string& name) {
      if (older) return "language_model." + name;
      return name == "lm_head.weight" ? name : "model.language_model." + name.substr(6);
    };
    model.Edit("model.safetensors", [&](json& header, std::string& data) {
      json renamed;
      for (const auto& [name, tensor] : header.items()) {
        renamed[name == "__metadata__" ? name : rename(name)] = tensor;
      }
      header = renamed;
      for (const char* other : {"vision_tower.patch_conv.weight", "multi_modal_projector.norm",
                                "visual.merger.norm.weight"}) {
        Append(header, data, older ? other : std::string("model.") + other, 4);
      }
    });
    EXPECT_TRUE(down_of() == expected);

    model.Edit("model.safetensors", [&](json& header, std::string& data) {
      Append(header, data, "language_model.model.layers.0.self_attn.q_norm.weight", 4);
    });
    EXPECT_THAT(LoadError(model),
                HasSubstr("tensor \"language_model.model.layers.0.self_attn.q_norm.weight\""));
    model.Edit("model.safetensors", [&](json& header, std::string& data) {
      Append(header, data, "model.norm.weight", 4);
    });
    EXPECT_THAT(LoadError(model), HasSubstr("is the same as"));
  }
}

TEST(WeightsTest, AFileTruncatedAnywhereIsRefusedByName) {
  const TinyModel model;
  const std::string bytes = ReadText(model.File("model.safetensors"));
  const auto config = LoadModelConfig(model.dir());
  TestRandom random;
  for (int i = 0; i < 1000; ++i) {
    const size_t size = random() % bytes.size();
    std::filesystem::resize_file(model.File("model.safetensors"), 0);
    WriteText(model.File("model.safetensors"), std::string_view(bytes).substr(0, size));
    const auto weights = LoadWeights(model.dir(), *config);
    ASSERT_EQ(weights.status().code(), absl::StatusCode::kInvalidArgument) << size;
    ASSERT_THAT(std::string(weights.status().message()),
                StartsWith(model.File("model.safetensors") + ": "))
        << size;
  }
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  WriteText(model.File("model.safetensors"), std::string_view(bytes).substr(0, 8 + length + 100));
  EXPECT_THAT(LoadError(model),
              AllOf(HasSubstr("tensor \"model.embed_tokens.weight\": truncated"),
                    HasSubstr("ends at byte " + std::to_string(8 + length + 100))));
}

TEST(WeightsTest, NoWeightsAndPicklesAreNotFound) {
  const TinyModel model;
  std::filesystem::remove(model.File("model.safetensors"));
  EXPECT_THAT(LoadError(model, absl::StatusCode::kNotFound),
              HasSubstr("no model.safetensors and no model.safetensors.index.json"));
  WriteText(model.File("pytorch_model.bin"), "x");
  EXPECT_THAT(LoadError(model, absl::StatusCode::kNotFound), HasSubstr("pickle"));
}

// ---- shards ----

constexpr int64_t kShardBytes = 20'000;

std::string FirstShard(const TinyModel& model) {
  const json index = json::parse(ReadText(model.File("model.safetensors.index.json")));
  return index["weight_map"]["model.embed_tokens.weight"];
}

TEST(WeightsTest, AMissingShardIsNamedWithWhatItHeld) {
  const TinyModel model(TinyConfig(), kShardBytes);
  std::filesystem::remove(model.File(FirstShard(model)));
  EXPECT_THAT(
      LoadError(model, absl::StatusCode::kNotFound),
      AllOf(HasSubstr(model.File(FirstShard(model))), HasSubstr("\"model.embed_tokens.weight\"")));
}

TEST(WeightsTest, AnIndexMayHaveTheTensorsOfAHundredLayersOfExperts) {
  const TinyModel model(TinyConfig(), 20000);
  const std::string shard = FirstShard(model);
  model.EditIndex([&](json& index) {
    json& map = index["weight_map"];
    for (int i = 0; i < 94 * 128 * 3 * 3; ++i) {
      map["model.layers.93.mlp.experts.127.gate_proj.weight_packed." + std::to_string(i)] = shard;
    }
  });
  ASSERT_GT(ReadText(model.File("model.safetensors.index.json")).size(), 8u << 20);
  EXPECT_THAT(LoadError(model, absl::StatusCode::kNotFound), HasSubstr("is missing, which "));
}

TEST(WeightsTest, ATensorThatTheIndexPlacesWhereItIsNotIsNamed) {
  const TinyModel model(TinyConfig(), kShardBytes);
  model.EditIndex(
      [&model](json& index) { index["weight_map"]["model.norm.weight"] = FirstShard(model); });
  EXPECT_THAT(LoadError(model, absl::StatusCode::kNotFound),
              AllOf(StartsWith(model.File(FirstShard(model))),
                    HasSubstr("tensor \"model.norm.weight\" is missing")));
}

TEST(WeightsTest, ATensorInTwoShardsIsRefused) {
  const TinyModel model(TinyConfig(), kShardBytes);
  model.Edit(FirstShard(model), [](json& header, std::string& data) {
    Append(header, data, "model.norm.weight", 64);
  });
  EXPECT_THAT(LoadError(model), AllOf(StartsWith(model.File(FirstShard(model))),
                                      HasSubstr("tensor \"model.norm.weight\" at byte "),
                                      HasSubstr("is not placed here")));
}

TEST(WeightsTest, ATruncatedShardIsNamed) {
  const TinyModel model(TinyConfig(), kShardBytes);
  const std::string path = model.File(FirstShard(model));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_THAT(LoadError(model),
              AllOf(StartsWith(path), HasSubstr("tensor \""), HasSubstr("truncated")));
}

TEST(WeightsTest, AnIndexMayOnlyNameFilesBesideIt) {
  const TinyModel model(TinyConfig(), kShardBytes);
  const json shards[] = {"../x.safetensors",
                         "/etc/passwd",
                         "a/b.safetensors",
                         "..safetensors",
                         "",
                         ".safetensors",
                         "x.bin",
                         std::string("x\0.safetensors", 14),
                         "a..b.safetensors",
                         7,
                         nullptr,
                         json::array()};
  for (const json& shard : shards) {
    model.EditIndex([&shard](json& index) { index["weight_map"]["model.norm.weight"] = shard; });
    EXPECT_THAT(
        LoadError(model),
        AllOf(HasSubstr("model.safetensors.index.json: weight_map: tensor \"model.norm.weight\""),
              HasSubstr("not the name of a .safetensors file")))
        << shard;
  }
}

TEST(WeightsTest, AnIndexWithoutAMapIsRefused) {
  const TinyModel model(TinyConfig(), kShardBytes);
  for (const char* text : {"{}", R"({"weight_map": {}})", R"({"weight_map": []})", "[", ""}) {
    WriteText(model.File("model.safetensors.index.json"), text);
    EXPECT_THAT(LoadError(model), HasSubstr("model.safetensors.index.json: ")) << text;
  }
}

}  // namespace
}  // namespace winnow::engine
