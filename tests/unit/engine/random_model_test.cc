#include "engine/model/random_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/text/tokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/file_size_limit.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RandomModelTest : public ::testing::Test {
 protected:
  RandomModelTest() { WriteText(ConfigPath(), TinyConfig().dump()); }

  std::string ConfigPath() const { return dir_.File("config.json"); }
  std::string Out(std::string_view name) const { return dir_.File(name); }
  RandomModelOptions Options(std::string_view out) const {
    RandomModelOptions options;
    options.config_path = ConfigPath();
    options.out_dir = Out(out);
    options.seed = 1;
    return options;
  }

  TempDir dir_;
};

// Every tensor's values, by name, whatever the shards.
std::map<std::string, std::string> TensorBytes(const std::string& dir) {
  const auto config = LoadModelConfig(dir);
  const auto weights = LoadWeights(dir, *config);
  EXPECT_TRUE(weights.ok()) << weights.status();
  std::map<std::string, std::string> bytes;
  for (const auto& file : weights->files) {
    for (size_t i = 0; i < file->header().num_tensors(); ++i) {
      const SafetensorsEntry entry = file->header().tensor(i);
      const auto data = file->Data(entry);
      bytes[std::string(entry.name)] =
          std::string(reinterpret_cast<const char*>(data.data()), data.size());
    }
  }
  return bytes;
}

TEST_F(RandomModelTest, TheModelLoadsAndItsFilesAgree) {
  const auto report = WriteRandomModel(Options("m"));
  ASSERT_TRUE(report.ok()) << report.status();
  // 2 x 40x32 embeddings; per layer 2 norms, q, k, v, o, gate, up, down; the final norm.
  const uint64_t layer = 2 * 32 + 128 * 32 + 2 * 64 * 32 + 32 * 128 + 3 * 48 * 32;
  EXPECT_EQ(report->num_parameters, 2 * 40 * 32 + 2 * layer + 32);
  EXPECT_EQ(report->weight_bytes, 2 * report->num_parameters);
  EXPECT_EQ(report->num_files, 1);
  const auto config = LoadModelConfig(Out("m"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->hidden_size, 32);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(2));
  EXPECT_EQ(config->bos_token_id, 1);
  const json generation = json::parse(ReadText(Out("m/generation_config.json")));
  EXPECT_EQ(generation["bos_token_id"], 1);
  EXPECT_TRUE(LoadWeights(Out("m"), *config).ok());
}

TEST_F(RandomModelTest, TheSeedDecidesTheValuesAndShardsDoNot) {
  RandomModelOptions sharded = Options("sharded"), other = Options("other");
  sharded.shard_bytes = 9000;
  other.seed = 2;
  ASSERT_TRUE(WriteRandomModel(Options("a")).ok());
  ASSERT_TRUE(WriteRandomModel(Options("b")).ok());
  const auto report = WriteRandomModel(sharded);
  ASSERT_TRUE(report.ok());
  ASSERT_TRUE(WriteRandomModel(other).ok());
  EXPECT_GT(report->num_files, 3);
  const auto values = TensorBytes(Out("a"));
  EXPECT_EQ(ReadText(Out("a/model.safetensors")), ReadText(Out("b/model.safetensors")));
  EXPECT_EQ(values, TensorBytes(Out("sharded")));
  for (const auto& [name, bytes] : TensorBytes(Out("other")))
    EXPECT_NE(bytes, values.at(name)) << name;
  EXPECT_NE(values.at("model.layers.0.mlp.up_proj.weight"),
            values.at("model.layers.0.mlp.gate_proj.weight"));
}

TEST_F(RandomModelTest, EachTypeIsWrittenAndSaidInTheConfig) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    RandomModelOptions options = Options(kernels::DTypeName(dtype));
    options.dtype = dtype;
    ASSERT_TRUE(WriteRandomModel(options).ok());
    const auto config = LoadModelConfig(options.out_dir);
    ASSERT_TRUE(config.ok());
    EXPECT_EQ(config->dtype, dtype);
    const auto weights = LoadWeights(options.out_dir, *config);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_EQ(weights->embedding.type, kernels::WeightTypeOf(dtype));
  }
}

TEST_F(RandomModelTest, TypesRoundTheSameValues) {
  const auto config = ParseModelConfig(TinyConfig().dump(), "c", "", "");
  const TensorSpec spec{.name = "model.layers.0.mlp.up_proj.weight",
                        .rows = 1,
                        .cols = 32,
                        .role = TensorSpec::Role::kMatrix};
  constexpr size_t kCount = 50'000;
  std::vector<float> exact(kCount);
  std::vector<uint16_t> half(kCount), brain(kCount);
  FillRandomTensor(spec, *config, 3, DType::kF32, 0, std::as_writable_bytes(std::span(exact)));
  FillRandomTensor(spec, *config, 3, DType::kF16, 0, std::as_writable_bytes(std::span(half)));
  FillRandomTensor(spec, *config, 3, DType::kBF16, 0, std::as_writable_bytes(std::span(brain)));
  for (size_t i = 0; i < kCount; ++i) {
    // Half a unit of the last place: 2^-11 and 2^-8 of the value, or half of float16's smallest
    // step.
    ASSERT_LE(std::abs(kernels::ToFloat(kernels::F16{half[i]}) - exact[i]),
              std::max(std::abs(exact[i]) * 0x1p-11f, 0x1p-25f));
    ASSERT_LE(std::abs(kernels::ToFloat(kernels::BF16{brain[i]}) - exact[i]),
              std::abs(exact[i]) * 0x1p-8f);
  }
}

TEST_F(RandomModelTest, ValuesAreBellShapedWithTheDeviationOfTheirRole) {
  const auto config = ParseModelConfig(TinyConfig().dump(), "c", "", "");
  const auto moments = [&](const TensorSpec& spec) {
    std::vector<float> values(200'000);
    FillRandomTensor(spec, *config, 4, DType::kF32, 0, std::as_writable_bytes(std::span(values)));
    double sum = 0, squares = 0, fourth = 0;
    for (const float value : values) sum += value;
    const double mean = sum / values.size();
    for (const float value : values) {
      squares += std::pow(value - mean, 2);
      fourth += std::pow(value - mean, 4);
    }
    const double variance = squares / values.size();
    return std::array{mean, std::sqrt(variance), fourth / values.size() / (variance * variance)};
  };
  const auto [mean, deviation, kurtosis] = moments({.name = "model.layers.0.mlp.up_proj.weight",
                                                    .rows = 48,
                                                    .cols = 64,
                                                    .role = TensorSpec::Role::kMatrix});
  EXPECT_NEAR(mean, 0, 0.002);
  EXPECT_NEAR(deviation, 0.125, 0.002);  // 1/sqrt(64)
  EXPECT_NEAR(kurtosis, 2.7, 0.1);       // of four uniforms; a normal has 3
  EXPECT_NEAR(moments({.name = "model.layers.0.mlp.down_proj.weight",
                       .rows = 64,
                       .cols = 64,
                       .role = TensorSpec::Role::kMatrix})[1],
              0.0625, 0.002);  // a further 1/sqrt(2 * 2 layers)
  EXPECT_NEAR(
      moments(
          {.name = "model.norm.weight", .rows = 0, .cols = 32, .role = TensorSpec::Role::kNorm})[0],
      1.0, 0.002);
}

TEST_F(RandomModelTest, AFillMayBeginAnywhere) {
  const auto config = ParseModelConfig(TinyConfig().dump(), "c", "", "");
  const TensorSpec spec{
      .name = "lm_head.weight", .rows = 40, .cols = 32, .role = TensorSpec::Role::kEmbedding};
  std::vector<float> whole(100), part(40);
  FillRandomTensor(spec, *config, 9, DType::kF32, 0, std::as_writable_bytes(std::span(whole)));
  FillRandomTensor(spec, *config, 9, DType::kF32, 60, std::as_writable_bytes(std::span(part)));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 60));
}

TEST_F(RandomModelTest, TheTokenizersFilesAreCopied) {
  RandomModelOptions options = Options("m");
  options.tokenizer_dir = SourcePath("models/needle-5m");
  ASSERT_TRUE(WriteRandomModel(options).ok());
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    EXPECT_EQ(ReadText(Out("m") + "/" + name), ReadText(options.tokenizer_dir + "/" + name));
  }
}

TEST_F(RandomModelTest, ASmallTokenizerIsFilledUpToTheShapesVocabulary) {
  json config = TinyConfig();
  config["vocab_size"] = 9000;
  WriteText(ConfigPath(), config.dump());
  RandomModelOptions options = Options("m");
  options.tokenizer_dir = SourcePath("models/needle-5m");
  ASSERT_TRUE(WriteRandomModel(options).ok());
  const auto before = Tokenizer::Load(options.tokenizer_dir);
  const auto after = Tokenizer::Load(Out("m"));
  ASSERT_TRUE(before.ok() && after.ok()) << after.status();
  EXPECT_LT((*before)->vocab_size(), 9000);
  EXPECT_EQ((*after)->vocab_size(), 9000);
  for (const char* text : {"The quick brown fox.", "<|user|> [unused8999] \n\n", ""}) {
    EXPECT_EQ((*after)->Encode(text, true, true).value(),
              (*before)->Encode(text, true, true).value());
  }
}

TEST_F(RandomModelTest, AFolderWithFilesInItIsLeftAlone) {
  std::filesystem::create_directory(Out("m"));
  ASSERT_TRUE(WriteRandomModel(Options("m")).ok());  // empty: fine
  const std::string before = ReadText(Out("m/model.safetensors"));
  RandomModelOptions options = Options("m");
  options.seed = 2;
  const absl::Status status = WriteRandomModel(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("not empty"));
  EXPECT_EQ(ReadText(Out("m/model.safetensors")), before);
}

TEST_F(RandomModelTest, AnErrorLeavesNothingBehind) {
  RandomModelOptions options = Options("m");
  options.tokenizer_dir = Out("nowhere");
  EXPECT_EQ(WriteRandomModel(options).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(Out("m")));

  json huge = TinyConfig();  // some 10 TB of weights
  huge.update({{"hidden_size", 1 << 17},
               {"intermediate_size", 1 << 20},
               {"num_hidden_layers", 16},
               {"vocab_size", 1 << 22}});
  WriteText(ConfigPath(), huge.dump());
  const absl::Status status = WriteRandomModel(Options("m")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("bytes, "));
  EXPECT_FALSE(std::filesystem::exists(Out("m")));
}

TEST_F(RandomModelTest, AFullDiskIsReportedAndTheFilesSoFarAreRemoved) {
  RandomModelOptions options = Options("m");
  options.shard_bytes = 4000;  // one tensor per file; the largest takes 8192
  const absl::Status status = [&] {
    const FileSizeLimit full(8000);  // the third shard or so passes it
    return WriteRandomModel(options).status();
  }();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(Out("m") + "/model-"));
  EXPECT_FALSE(std::filesystem::exists(Out("m")));
}

TEST_F(RandomModelTest, BadOptionsAreRefused) {
  RandomModelOptions options = Options("m");
  options.shard_bytes = 0;
  EXPECT_EQ(WriteRandomModel(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options("m");
  options.config_path = Out("nowhere.json");
  EXPECT_EQ(WriteRandomModel(options).status().code(), absl::StatusCode::kNotFound);
  WriteText(Out("file"), "x");
  EXPECT_FALSE(WriteRandomModel(Options("file")).ok());
  EXPECT_EQ(ReadText(Out("file")), "x");
}

}  // namespace
}  // namespace winnow::engine
