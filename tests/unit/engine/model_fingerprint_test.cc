#include "engine/model/model_fingerprint.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/weights.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

std::string FingerprintOf(const std::string& dir) {
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(dir);
  EXPECT_TRUE(config.ok()) << config.status();
  const absl::StatusOr<Weights> weights = LoadWeights(dir, *config);
  EXPECT_TRUE(weights.ok()) << weights.status();
  const absl::StatusOr<std::string> fingerprint = ModelFingerprint(*config, weights->files);
  EXPECT_TRUE(fingerprint.ok()) << fingerprint.status();
  return fingerprint.value_or("");
}

// What `calibrate.artifact.fingerprint` gave for these folders.
TEST(ModelFingerprint, IsThatOfCalibrate) {
  const std::vector<std::pair<std::string, std::string>> goldens = {
      {"models/needle-5m", "8df786287a5eb97a325e059a620e132610db5461bf8a1a61706980bed570d2b5"},
      {"llama2_mha", "de2a1439cda0d4e1484ffc4b86a60fe4d887561843da52e7746963f305b3df16"},
      {"llama3_rope", "bfbae995f42cf1336c219e2f3e4c25b25208b0c5b68f7b03fd72b269eb390f3f"},
      {"llama3_rope_v5", "d73a6b88a718908ebf0d9f662409b85b0eed98f0d85aff6d5ad5b07850257f69"},
      {"llama_linear", "6cd25a45de725aeecd9edb5fd9c360b38eb1bff404721c00b05ae661b726a1d8"},
      {"llama_sharded", "382bd69787563aee05066a4fd52a02e1d5ce7dc763afd6afa949f2fff738426c"},
      {"llama_yarn", "0f9bb6257d901b3051209e74e229d1a4fa9fbdc651bc8f93093c4616122c9453"},
      {"llama_yarn_mscale", "13b5ffc664770f5649896a0c4cd34bc2307e98206862d3ec2b4e5325c41909f0"},
      {"mistral", "c9edc028b3311698cff91b95766cfb4f0625fbb800a421954a00269a6968b35c"},
      {"mistral_yarn", "91ace745f5fefd91696c428c609c8e9bbb0395cd072db7029668ed30dc99b6d9"},
      {"qwen2_5_yarn", "fd363e4401551ff3f3f84485f93b0205467bf0c987f7e1676a01f3aa530e2d04"},
      {"qwen2_tied", "71a142dfdb07202f56996a4d093c0e91ae0209f478b45230dc82bfd2d5c33f21"},
      {"qwen3_bias", "9bd5ec2caaacccf355c9cc5f5a0c8b12ea4f88f8851b7fefa1a54888ce0f3e76"},
  };
  for (const auto& [folder, golden] : goldens) {
    const bool is_family = folder.find('/') == std::string::npos;
    EXPECT_EQ(FingerprintOf(SourcePath(is_family ? "tests/golden/families/" + folder : folder)),
              golden)
        << folder;
  }
}

// calibrate/tests/test_artifact.py holds calibrate to the same file.
TEST(ModelFingerprint, ResolvesConfigurationsAsCalibrateDoes) {
  const nlohmann::json golden =
      nlohmann::json::parse(ReadText(SourcePath("tests/golden/fingerprint.json")));
  const TempDir dir;
  const std::string path = dir.File("model.safetensors");
  WriteText(path,
            SafetensorsBytes(golden.at("header").get<std::string>(), golden.at("data").size()));
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  files.push_back(*SafetensorsFile::Open(path));
  ASSERT_GE(golden.at("cases").size(), 19u);
  for (const nlohmann::json& item : golden.at("cases")) {
    const auto config = ParseModelConfig(item.at("config").dump(), "config.json", "", "");
    ASSERT_TRUE(config.ok()) << item.at("what") << ": " << config.status();
    EXPECT_EQ(*ModelFingerprint(*config, files), item.at("fingerprint")) << item.at("what");
  }
}

// Files of made-up tensors: the fingerprint does not ask what they are for.
class ModelFingerprintOf : public ::testing::Test {
 protected:
  std::unique_ptr<SafetensorsFile> File(const std::string& header, const std::string& data) {
    const std::string path = dir_.File(std::to_string(++files_) + ".safetensors");
    WriteText(path, SafetensorsBytes(header, 0) + data);
    auto file = SafetensorsFile::Open(path);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  std::string Of(const ModelConfig& config, auto... files) {
    std::vector<std::unique_ptr<SafetensorsFile>> all;
    (all.push_back(std::move(files)), ...);
    return *ModelFingerprint(config, all);
  }
  // 70,000 bytes: a is longer than what is read of it, b follows.
  std::string OneFile(const ModelConfig& config, size_t changed_byte = SIZE_MAX,
                      const std::string& b = "b", const std::string& type = "U8",
                      const std::string& shape = "[4000]") {
    std::string data(70000, '\1');
    if (changed_byte != SIZE_MAX) data[changed_byte] = '\2';
    return Of(config, File(R"({"a":{"dtype":"U8","shape":[66000],"data_offsets":[0,66000]},")" + b +
                               R"(":{"dtype":")" + type + R"(","shape":)" + shape +
                               R"(,"data_offsets":[66000,70000]}})",
                           data));
  }

  ModelConfig config_;
  TempDir dir_;
  int files_ = 0;
};

TEST_F(ModelFingerprintOf, HoldsTheFirst64KiBOfEachTensor) {
  const std::string base = OneFile(config_);
  EXPECT_EQ(base.size(), 64u);
  EXPECT_EQ(base.find_first_not_of("0123456789abcdef"), std::string::npos);
  for (const size_t byte : {size_t{0}, size_t{65535}, size_t{66000}, size_t{69999}})
    EXPECT_NE(OneFile(config_, byte), base) << byte;
  EXPECT_EQ(OneFile(config_, 65536), base);
  EXPECT_EQ(OneFile(config_, 65999), base);
}

// Stored KV is of these weights and no others.
TEST_F(ModelFingerprintOf, KvHoldsEveryByteAndEveryNumberThatKvDependsOn) {
  config_.head_dim = 64;
  config_.layers.resize(2);
  config_.ropes = {{.theta = 10000, .scaling = {}}, {.theta = 500, .scaling = {}}};
  config_.rms_norm_eps = 1e-5f;
  config_.ropes[0].scaling.kind = RopeScaling::Kind::kLlama3;
  config_.ropes[0].scaling.factor = 8;
  config_.ropes[0].scaling.original_max_position_embeddings = 8192;
  const auto of = [&](const ModelConfig& config, size_t changed_byte = SIZE_MAX,
                      const std::string& b = "b") {
    std::string data(70000, '\1');
    if (changed_byte != SIZE_MAX) data[changed_byte] = '\2';
    std::vector<std::unique_ptr<SafetensorsFile>> files;
    files.push_back(File(R"({"a":{"dtype":"U8","shape":[66000],"data_offsets":[0,66000]},")" + b +
                             R"(":{"dtype":"U8","shape":[4000],"data_offsets":[66000,70000]}})",
                         data));
    return *KvFingerprint(config, files);
  };
  const std::string base = of(config_);
  EXPECT_EQ(of(config_), base);
  for (const size_t byte : {size_t{0}, size_t{65536}, size_t{65999}, size_t{69999}})
    EXPECT_NE(of(config_, byte), base) << byte;
  EXPECT_NE(of(config_, SIZE_MAX, "c"), base);
  const auto differs = [&](auto change) {
    ModelConfig config = config_;
    change(config);
    EXPECT_NE(of(config), base);
  };
  differs([](ModelConfig& c) { c.rms_norm_eps = 1e-6f; });
  differs([](ModelConfig& c) { c.num_heads = 3; });
  for (const int layer : {0, 1}) {
    differs([&](ModelConfig& c) { c.layers[layer].qk_norm = true; });
    differs([&](ModelConfig& c) { c.layers[layer].window = 128; });
    differs([&](ModelConfig& c) { c.layers[layer].rope = 1; });
    differs([&](ModelConfig& c) { c.layers[layer].rope = LayerSpec::kNoRope; });
    differs([&](ModelConfig& c) { c.layers[layer].norms = LayerSpec::Norms::kAfter; });
    differs([&](ModelConfig& c) { c.layers[layer].norms = LayerSpec::Norms::kAround; });
    differs([&](ModelConfig& c) { c.layers[layer].mlp = LayerSpec::Mlp::kExperts; });
    differs([&](ModelConfig& c) { c.layers[layer].mlp = LayerSpec::Mlp::kGatedGelu; });
    differs([&](ModelConfig& c) { c.layers[layer].qk_norm_whole = true; });
  }
  differs([](ModelConfig& c) { c.norms_add_one = true; });
  differs([](ModelConfig& c) { c.ropes[0].theta = 20000; });
  differs([](ModelConfig& c) { c.ropes[0].scaling.low_freq_factor = 2; });
  differs([](ModelConfig& c) { c.ropes[0].scaling.high_freq_factor = 8; });
  differs([](ModelConfig& c) { c.ropes[0].scaling.original_max_position_embeddings = 4096; });
  differs([](ModelConfig& c) { c.ropes[0].scaling.kind = RopeScaling::Kind::kYarn; });
  differs([](ModelConfig& c) { c.rotary_dim = 48; });
  differs([](ModelConfig& c) { c.embedding_multiplier = 12; });
  differs([](ModelConfig& c) { c.residual_multiplier = 0.22; });
  differs([](ModelConfig& c) { c.attention_multiplier = 0.0078125; });
  differs([](ModelConfig& c) { c.ropes[0].query_scaling = {.beta = 0.1, .length = 8192}; });
  for (const ExpertsConfig& experts :
       {ExpertsConfig{.count = 8, .per_token = 2}, ExpertsConfig{.count = 8, .per_token = 3},
        ExpertsConfig{.count = 8, .per_token = 2, .normalized = true},
        ExpertsConfig{.count = 8, .per_token = 2, .clamped = kernels::ClampedSwiglu()},
        ExpertsConfig{.count = 8, .per_token = 2, .clamped = kernels::ClampedSwiglu{1.5f, 7.0f}},
        ExpertsConfig{.count = 8, .per_token = 2, .clamped = kernels::ClampedSwiglu{1.702f, 5}}}) {
    differs([&](ModelConfig& c) { c.experts = experts; });
    ModelConfig two = config_;
    two.experts = {.count = 8, .per_token = 2};
    ModelConfig other = config_;
    other.experts = experts;
    EXPECT_EQ(of(two) == of(other), two.experts == experts);
  }
  // Keys and values do not depend on what becomes of the last layer's output.
  ModelConfig scaled = config_;
  scaled.logits_scaling = 16;
  EXPECT_EQ(of(scaled), base);
}

// The context that a server serves decides between LongRoPE's factors.
TEST_F(ModelFingerprintOf, KvOfLongRopesFactorsIsToldApart) {
  config_.head_dim = 64;
  config_.max_position_embeddings = 8192;
  config_.ropes[0].theta = 10000;
  config_.ropes[0].scaling = {.kind = RopeScaling::Kind::kLongRope,
                              .original_max_position_embeddings = 4096,
                              .short_factors = std::vector<float>(32, 1.0f),
                              .long_factors = std::vector<float>(32, 2.0f)};
  const auto of = [&](int32_t context) {
    std::vector<std::unique_ptr<SafetensorsFile>> files;
    files.push_back(
        File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", std::string("abcd")));
    return *KvFingerprint(WithServedContext(config_, context), files);
  };
  EXPECT_EQ(of(4096), of(100));
  EXPECT_NE(of(4096), of(4097));
  EXPECT_EQ(of(8192), of(4097));
}

TEST_F(ModelFingerprintOf, HoldsNamesTypesAndShapes) {
  const std::string base = OneFile(config_);
  EXPECT_NE(OneFile(config_, SIZE_MAX, "c"), base);
  EXPECT_NE(OneFile(config_, SIZE_MAX, "b", "I8"), base);
  EXPECT_NE(OneFile(config_, SIZE_MAX, "b", "U8", "[40,100]"), base);
}

TEST_F(ModelFingerprintOf, DoesNotDependOnHowTensorsAreSpread) {
  const std::string a = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  const std::string b = R"("b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  const std::string both = Of(
      config_, File("{" + a + R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", "aabb"));
  EXPECT_EQ(Of(config_, File(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                             R"("a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                             "bbaa")),
            both);
  EXPECT_EQ(Of(config_, File("{" + b + "}", "bb"), File("{" + a + "}", "aa")), both);
}

TEST_F(ModelFingerprintOf, HoldsShapeAndRotaryEmbeddingAndNothingElseOfTheConfiguration) {
  const std::string base = OneFile(config_);
  const auto with = [&](auto change) {
    ModelConfig config;
    change(config);
    return OneFile(config);
  };
  EXPECT_NE(with([](ModelConfig& c) { c.layers.resize(7); }), base);
  EXPECT_NE(with([](ModelConfig& c) { c.num_heads = 7; }), base);
  EXPECT_NE(with([](ModelConfig& c) { c.num_kv_heads = 7; }), base);
  EXPECT_NE(with([](ModelConfig& c) { c.head_dim = 7; }), base);
  EXPECT_NE(with([](ModelConfig& c) { c.ropes[0].theta = 7; }), base);
  EXPECT_NE(with([](ModelConfig& c) { c.ropes[0].scaling.kind = RopeScaling::Kind::kLinear; }),
            base);
  EXPECT_NE(with([](ModelConfig& c) { c.ropes[0].scaling.factor = 7; }), base);
  EXPECT_EQ(with([](ModelConfig& c) {
              c.max_position_embeddings = 7;
              c.eos_token_ids = {7};
              c.rms_norm_eps = 7;
            }),
            base);
}

}  // namespace
}  // namespace winnow::engine
