#include "engine/retrieval/artifact.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/model_fingerprint.h"
#include "engine/model/weights.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/artifact_files.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

using kernels::AffineStage;
using kernels::EncoderWeights;
using kernels::FeatureMapWeights;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing::TestArtifact;
using testing::TestTensor;
using Json = nlohmann::json;
using Kind = AttentionPolicy::Kind;
using Side = Artifact::Side;

constexpr Side kSides[] = {Side::kKey, Side::kQuery};
constexpr Kind kKinds[] = {Kind::kHata, Kind::kSpotlight, Kind::kHashAttention};

std::string SideText(Side side) { return side == Side::kKey ? "key" : "query"; }

class ArtifactTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<const Artifact>> Parse(std::string_view bytes) {
    return Artifact::Parse(std::as_bytes(std::span(bytes)), "file", config_, testing::kFingerprint);
  }

  const uint64_t seed_ = testing::TestSeed();
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, "WINNOW_TEST_SEED=" + std::to_string(seed_)};
  std::mt19937_64 random_{seed_};
  const ModelConfig config_ = testing::ArtifactModel();
  TestArtifact good_ = testing::GoodArtifact(config_, random_);
};

void ExpectStage(const AffineStage& stage, TestArtifact& file, const std::string& prefix) {
  const TestTensor& weight = file.Tensor(prefix + ".weight");
  const TestTensor& bias = file.Tensor(prefix + ".bias");
  EXPECT_EQ(stage.out, weight.shape[1]) << prefix;
  EXPECT_EQ(stage.in, weight.shape[2]) << prefix;
  ASSERT_EQ(stage.weight.size_bytes(), weight.bytes.size()) << prefix;
  EXPECT_EQ(std::memcmp(stage.weight.data(), weight.bytes.data(), weight.bytes.size()), 0)
      << prefix;
  ASSERT_EQ(stage.bias.size_bytes(), bias.bytes.size()) << prefix;
  EXPECT_EQ(std::memcmp(stage.bias.data(), bias.bytes.data(), bias.bytes.size()), 0) << prefix;
  EXPECT_EQ(reinterpret_cast<uintptr_t>(stage.weight.data()) % alignof(uint16_t), 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(stage.bias.data()) % alignof(float), 0u);
}

// All that `file` holds is what `artifact` gives.
void ExpectHolds(const Artifact& artifact, TestArtifact& file, const ModelConfig& config) {
  size_t stages_seen = 0;
  for (const Kind kind : kKinds) {
    const std::string name(KindName(kind));
    const auto kind_json = file.header["kinds"].find(name);
    ASSERT_EQ(artifact.HasKind(kind), kind_json != file.header["kinds"].end()) << name;
    if (!artifact.HasKind(kind)) continue;
    EXPECT_EQ(artifact.bits(kind), kind_json->at("bits"));
    EXPECT_EQ(Json(artifact.layers(kind)), kind_json->at("layers"));
    for (int32_t layer = -1; layer <= config.num_layers(); ++layer) {
      const auto& layers = artifact.layers(kind);
      const bool has = std::find(layers.begin(), layers.end(), layer) != layers.end();
      ASSERT_EQ(artifact.HasLayer(kind, layer), has) << name << " " << layer;
      if (!has) continue;
      for (const Side side : kSides) {
        const EncoderWeights encoder = artifact.Encoder(kind, layer, side);
        EXPECT_EQ(encoder.kv_heads, config.num_kv_heads);
        const bool group = side == Side::kQuery && kind_json->at("query") == "group";
        EXPECT_EQ(encoder.queries_per_input, group ? 3 : 1) << name;
        ASSERT_EQ(encoder.stages.size(), kind_json->at("stages").get<size_t>());
        for (size_t i = 0; i < encoder.stages.size(); ++i) {
          ExpectStage(encoder.stages[i], file,
                      "layers." + std::to_string(layer) + "." + name + "." + SideText(side) + "." +
                          std::to_string(i));
          ++stages_seen;
        }
      }
    }
  }
  ASSERT_EQ(artifact.has_features(), file.header.contains("features"));
  for (int32_t layer = -1; layer <= config.num_layers(); ++layer) {
    if (!artifact.HasFeatures(layer)) continue;
    for (const Side side : kSides) {
      const FeatureMapWeights map = artifact.FeatureMap(layer, side);
      EXPECT_EQ(map.kv_heads, config.num_kv_heads);
      const std::string prefix =
          "layers." + std::to_string(layer) + ".features." + SideText(side) + ".";
      ExpectStage(map.stem, file, prefix + "stem");
      ExpectStage(map.gate, file, prefix + "gate");
      ExpectStage(map.up, file, prefix + "up");
      ExpectStage(map.down, file, prefix + "down");
      ExpectStage(map.out, file, prefix + "out");
      stages_seen += 5;
    }
  }
  EXPECT_EQ(2 * stages_seen, file.tensors.size());
}

TEST_F(ArtifactTest, AGoodFileGivesWhatItHolds) {
  const TempDir dir;
  const std::string path = dir.File("good.safetensors"), bytes = good_.Bytes();
  WriteText(path, bytes);
  const auto artifact = Artifact::Load(path, config_, testing::kFingerprint);
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  ExpectHolds(**artifact, good_, config_);
  EXPECT_THAT((*artifact)->layers(Kind::kHata), ElementsAre(1, 2, 4));
  EXPECT_EQ((*artifact)->bits(Kind::kSpotlight), 64);
  EXPECT_TRUE((*artifact)->HasFeatures(3));
  EXPECT_FALSE((*artifact)->HasFeatures(4));
  EXPECT_FALSE((*artifact)->HasKind(Kind::kLsh));
  EXPECT_FALSE((*artifact)->HasLayer(Kind::kLsh, 2));
  EXPECT_EQ((*artifact)->header().dense_layers, 2);
  EXPECT_EQ((*artifact)->size_bytes(), bytes.size());
  EXPECT_EQ((*artifact)->Description(),
            "hata:32 in layers 1-2, 4 (recipe winnow); spotlight:64 in layers 2 (recipe winnow); "
            "hashattention:32 in layers 0, 4 (recipe winnow); feature maps:5 in layers 2-3 (recipe "
            "paper) at 6 of 6 heads; " +
                std::to_string(bytes.size()) + " bytes");
}

TEST_F(ArtifactTest, FeatureMapsWithoutAVerdictAreNotUsed) {
  TestArtifact file = good_;
  file.header["features"].erase("helps");
  const auto artifact = Parse(file.Bytes());
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  EXPECT_FALSE((*artifact)->has_features());
  EXPECT_FALSE((*artifact)->HasFeatures(3));
  EXPECT_TRUE((*artifact)->HasKind(Kind::kHata));
  EXPECT_THAT((*artifact)->Description(), HasSubstr("without a verdict: not used"));
}

TEST_F(ArtifactTest, HeadsThatCompletionHarmsHaveNoMass) {
  TestArtifact file = good_;
  const int32_t heads = config_.num_kv_heads;
  std::vector<bool> helps(2 * heads, true);  // layers 2 and 3
  helps[heads + 1] = false;                  // layer 3, head 1
  file.header["features"]["helps"] = helps;
  const std::string all_bytes = good_.Bytes(), some_bytes = file.Bytes();
  const auto all = Parse(all_bytes), some = Parse(some_bytes);
  ASSERT_TRUE(some.ok()) << some.status();
  for (const int32_t layer : {2, 3}) {
    const auto whole = (*all)->FeatureMap(layer, Side::kQuery).out.bias;
    const auto bias = (*some)->FeatureMap(layer, Side::kQuery).out.bias;
    ASSERT_EQ(bias.size(), whole.size());
    for (size_t i = 0; i < bias.size(); ++i) {
      const bool refused = layer == 3 && i / (bias.size() / heads) == 1;
      EXPECT_EQ(bias[i], refused ? -Artifact::kRefusedFeature : whole[i]) << layer << " " << i;
    }
    const auto key = (*some)->FeatureMap(layer, Side::kKey).out.bias;
    EXPECT_TRUE(
        std::equal(key.begin(), key.end(), (*all)->FeatureMap(layer, Side::kKey).out.bias.begin()));
  }
  // Another verdict completes otherwise: what is stored of one is not of the other.
  EXPECT_NE((*all)->ContentId(), (*some)->ContentId());
}

TEST_F(ArtifactTest, PartsMayBeAbsent) {
  TestArtifact file = good_;
  file.header.erase("features");
  std::erase_if(file.tensors,
                [](const TestTensor& t) { return t.name.find(".features.") != t.name.npos; });
  auto artifact = Parse(file.Bytes());
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  EXPECT_FALSE((*artifact)->has_features());

  file.header["kinds"] = Json::object();
  file.tensors.clear();
  artifact = Parse(file.Bytes());
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  ExpectHolds(**artifact, file, config_);

  file.header["kinds"]["hata"] = good_.header["kinds"]["hata"];
  file.header["kinds"]["hata"]["layers"] = Json::array();
  artifact = Parse(file.Bytes());
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  EXPECT_TRUE((*artifact)->HasKind(Kind::kHata));
  EXPECT_FALSE((*artifact)->HasLayer(Kind::kHata, 1));
}

TEST_F(ArtifactTest, WhatIsForPeopleIsNotInterpreted) {
  for (const Json& anything :
       std::vector<Json>{nullptr, 1, "text", Json::array(), Json::object(), {{"recipe", 7}}}) {
    TestArtifact file = good_;
    for (const char* key : {"training", "measured"}) {
      file.header["kinds"]["hata"][key] = anything;
      file.header["features"][key] = anything;
    }
    file.header["provenance"] = anything;
    file.header["one more key"] = anything;
    const auto artifact = Parse(file.Bytes());
    ASSERT_TRUE(artifact.ok()) << artifact.status();
    EXPECT_EQ((*artifact)->header().kinds.at(Kind::kHata).recipe, "");
  }
  TestArtifact file = good_;
  file.header["features"].erase("training");
  for (const std::string& recipe : {std::string("two words"), std::string("line\nbreak"),
                                    std::string(33, 'x'), std::string("\xc3\xa9")}) {
    file.header["kinds"]["hata"]["training"]["recipe"] = recipe;
    EXPECT_EQ((*Parse(file.Bytes()))->header().kinds.at(Kind::kHata).recipe, "") << recipe;
  }
}

TEST_F(ArtifactTest, MisalignedTensorsAreCopied) {
  for (size_t padding = 0; padding < 8; ++padding) {
    good_.header_padding = padding;
    const std::string bytes = good_.Bytes();
    // As a mapping is: the file begins on a page.
    std::vector<uint64_t> aligned(bytes.size() / 8 + 1);
    std::memcpy(aligned.data(), bytes.data(), bytes.size());
    const auto artifact = Artifact::Parse(std::as_bytes(std::span(aligned)).first(bytes.size()),
                                          "file", config_, testing::kFingerprint);
    ASSERT_TRUE(artifact.ok()) << artifact.status();
    ExpectHolds(**artifact, good_, config_);
  }
}

TEST_F(ArtifactTest, AFileThatIsNotThereOrNotSafetensorsIsRefusedByItsPath) {
  const TempDir dir;
  const std::string path = dir.File("file");
  const auto load = [&] { return Artifact::Load(path, config_, testing::kFingerprint).status(); };
  EXPECT_EQ(load().code(), absl::StatusCode::kNotFound);
  for (const std::string text : {"", "not safetensors"}) {
    WriteText(path, text);
    EXPECT_EQ(load().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(load().message()), StartsWith(path));
  }
  EXPECT_THAT(std::string(Parse("not safetensors").status().message()), StartsWith("file: "));
}

// Each breaks a good file in one place; the message must name it.
struct Break {
  std::string message;
  std::function<void(TestArtifact&)> change;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

TEST_F(ArtifactTest, EveryCheckOfTheHeader) {
  const auto set = [](const std::string& pointer, const Json& value) {
    return [=](TestArtifact& file) { file.header[Json::json_pointer(pointer)] = value; };
  };
  const auto erase = [](const std::string& pointer, const std::string& key) {
    return [=](TestArtifact& file) { file.header[Json::json_pointer(pointer)].erase(key); };
  };
  const std::string other(64, 'f');
  const std::vector<Break> breaks = {
      {"no \"winnow_artifact\" in its metadata", [](TestArtifact& f) { f.header = nullptr; }},
      {"more entries than", [](TestArtifact& f) { f.metadata["format"] = "pt"; }},
      {"winnow_artifact: ", [](TestArtifact& f) { f.text = "{"; }},
      {"winnow_artifact: not a JSON object", [](TestArtifact& f) { f.text = "[1]"; }},
      {"nested deeper than 64",
       [](TestArtifact& f) { f.text = std::string(100, '[') + std::string(100, ']'); }},
      {"format: missing", erase("", "format")},
      {"format: is 2, this version reads format 1", set("/format", 2)},
      {"format: must be an integer", set("/format", "1")},
      {"format: must be an integer", set("/format", 1.0)},
      {"model: missing", erase("", "model")},
      {"model: must be an object", set("/model", 5)},
      {"model.fingerprint: missing", erase("/model", "fingerprint")},
      {"model.fingerprint: must be a string", set("/model/fingerprint", 5)},
      {"model.fingerprint: must be 64 lower-case hex digits", set("/model/fingerprint", "abc")},
      {"model.fingerprint: must be 64 lower-case hex digits",
       set("/model/fingerprint", std::string(64, 'F'))},
      {"model.fingerprint: made for another model of the same shape (ffffffffffff..., this one is "
       "0123456789ab...)",
       set("/model/fingerprint", other)},
      {"model.layers: missing", erase("/model", "layers")},
      {"model.layers: made for a model with 6, this one has 5", set("/model/layers", 6)},
      {"model.query_heads: made for a model with 6, this one has 9", set("/model/query_heads", 6)},
      {"model.kv_heads: made for a model with 9, this one has 3", set("/model/kv_heads", 9)},
      {"model.head_dim: made for a model with 8, this one has 6", set("/model/head_dim", 8)},
      {"model.head_dim: must be an integer", set("/model/head_dim", -6)},
      {"dense_layers: missing", erase("", "dense_layers")},
      {"dense_layers: must be an integer", set("/dense_layers", -1)},
      {"kinds: missing", erase("", "kinds")},
      {"kinds: must be an object", set("/kinds", Json::array())},
      {"kinds.\"lsh\": unknown; there are hata, spotlight, hashattention",
       set("/kinds/lsh", Json::object())},
      {"kinds.hata: must be an object", set("/kinds/hata", 1)},
      {"kinds.hata.bits: missing", erase("/kinds/hata", "bits")},
      {"kinds.hata.bits: must be 32, 64, 128 or 256, is 48", set("/kinds/hata/bits", 48)},
      {"kinds.hata.bits: must be 32, 64, 128 or 256, is 512", set("/kinds/hata/bits", 512)},
      {"kinds.hata.query: missing", erase("/kinds/hata", "query")},
      {"kinds.hata.query: must be \"head\" or \"group\", is \"heads\"",
       set("/kinds/hata/query", "heads")},
      {"kinds.hata.query: must be \"head\" or \"group\", is 1", set("/kinds/hata/query", 1)},
      {"kinds.hata.stages: missing", erase("/kinds/hata", "stages")},
      {"kinds.hata.stages: must be 1, is 2", set("/kinds/hata/stages", 2)},
      {"kinds.spotlight.stages: must be 2, is 1", set("/kinds/spotlight/stages", 1)},
      {"kinds.hashattention.stages: must be 3, is 2", set("/kinds/hashattention/stages", 2)},
      {"kinds.hata.layers: missing", erase("/kinds/hata", "layers")},
      {"kinds.hata.layers: must be a list, is 1", set("/kinds/hata/layers", 1)},
      {"kinds.hata.layers: must ascend, but 1 follows 2", set("/kinds/hata/layers", {2, 1, 4})},
      {"kinds.hata.layers: must ascend, but 2 follows 2", set("/kinds/hata/layers", {1, 2, 2})},
      {"kinds.hata.layers: must be an integer from 0 to 4", set("/kinds/hata/layers", {1, 2, 5})},
      {"kinds.hata.layers: must be an integer from 0 to 4", set("/kinds/hata/layers", {-1, 2, 4})},
      {"kinds.hata.layers: must be an integer from 0 to 4", set("/kinds/hata/layers", {1, "2"})},
      {"features: missing", set("/features", nullptr)},
      {"features: must be an object", set("/features", 64)},
      {"features.features: missing", erase("/features", "features")},
      {"features.features: must be an integer from 1", set("/features/features", 0)},
      {"features.layers: missing", erase("/features", "layers")},
      {"features.layers: must ascend", set("/features/layers", {3, 2})},
      {"features.helps: must be a list of 6 truth values", set("/features/helps", {true, false})},
      {"features.helps: must be a list of 6", set("/features/helps", {1, 1, 1, 1})},
      {"features.helps: must be a list of 6", set("/features/helps", true)},
  };
  for (const Break& change : breaks) {
    TestArtifact file = good_;
    change.change(file);
    const absl::Status status = Parse(file.Bytes()).status();
    EXPECT_EQ(status.code(), change.code) << change.message;
    EXPECT_THAT(std::string(status.message()), StartsWith("file: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(change.message));
  }
}

TEST_F(ArtifactTest, EveryCheckOfTheTensors) {
  const auto reshape = [](const std::string& name, std::vector<int64_t> shape) {
    return [=](TestArtifact& file) {
      TestTensor& tensor = file.Tensor(name);
      size_t size = tensor.dtype == "F32" ? 4 : 2;
      for (const int64_t dim : shape) size *= dim;
      tensor.shape = shape;
      tensor.bytes.resize(size);
    };
  };
  const auto retype = [](const std::string& name, const std::string& dtype) {
    return [=](TestArtifact& file) { file.Tensor(name).dtype = dtype; };
  };
  const auto put = [](const std::string& name, size_t value, const std::string& bytes) {
    return [=](TestArtifact& file) {
      file.Tensor(name).bytes.replace(value * bytes.size(), bytes.size(), bytes);
    };
  };
  const auto wider = [&](const std::string& stage, const std::string& next) {
    return [=](TestArtifact& file) {  // this stage alone, not the next one's input
      const auto& shape = file.Tensor(stage + ".weight").shape;
      const int64_t out = shape[1] + 1, in = shape[2];
      reshape(stage + ".weight", {3, out, in})(file);
      reshape(stage + ".bias", {3, out})(file);
    };
  };
  const std::string infinity16("\x80\x7f", 2), nan16("\xc0\xff", 2);
  const std::string infinity32("\0\0\x80\xff", 4), nan32("\1\0\x80\x7f", 4);
  const std::string hata = "layers.2.hata.key.0", spotlight = "layers.2.spotlight.query.",
                    hash = "layers.4.hashattention.key.", features = "layers.3.features.query.";
  constexpr auto kDataLoss = absl::StatusCode::kDataLoss;
  std::vector<Break> breaks = {
      {"tensor \"layers.3.hata.key.0.weight\": missing",
       [](TestArtifact& f) {
         f.header["kinds"]["hata"]["layers"] = {1, 2, 3, 4};
       }},
      {"tensor \"layers.4.hata.key.0.weight\": nothing in the header asks for it",
       [](TestArtifact& f) {
         f.header["kinds"]["hata"]["layers"] = {1, 2};
       }},
      {"tensor \"layers.2.features.key.stem.weight\": nothing in the header asks for it",
       [](TestArtifact& f) { f.header.erase("features"); }},
      {"tensor \"extra\": nothing in the header asks for it",
       [](TestArtifact& f) {
         f.tensors.push_back({"extra", "U8", {0}, ""});
       }},
      {"\"layers.1.hata.key.0.weight\": shape [3, 32, 6], expected [3, 64, 6]",
       [](TestArtifact& f) { f.header["kinds"]["hata"]["bits"] = 64; }},
      // Keys are encoded one by one whatever the queries are.
      {"\"layers.1.hata.query.0.weight\": shape [3, 32, 6], expected [3, 96, 18]",
       [](TestArtifact& f) { f.header["kinds"]["hata"]["query"] = "group"; }},
      {"\"" + spotlight + "0.weight\": shape",
       [](TestArtifact& f) { f.header["kinds"]["spotlight"]["query"] = "head"; }},
      {"\"" + hata + ".weight\": shape [3, 31, 6], expected [3, 32, 6]",
       reshape(hata + ".weight", {3, 31, 6})},
      {"\"" + hata + ".weight\": shape [2, 32, 6], expected [3, 32, 6]",
       reshape(hata + ".weight", {2, 32, 6})},
      {"\"" + hata + ".weight\": shape [3, 32, 7], expected [3, 32, 6]",
       reshape(hata + ".weight", {3, 32, 7})},
      {"\"" + hata + ".weight\": shape [3, 192], expected [3, 32, 6]",
       reshape(hata + ".weight", {3, 192})},
      {"\"" + hata + ".weight\": shape [3, 32, 6, 1], expected [3, 32, 6]",
       reshape(hata + ".weight", {3, 32, 6, 1})},
      {"\"" + hata + ".bias\": shape [3, 33], expected [3, 32]", reshape(hata + ".bias", {3, 33})},
      {"\"" + hata + ".bias\": shape [96], expected [3, 32]", reshape(hata + ".bias", {96})},
      {"\"" + hata + ".weight\": type F16, expected BF16", retype(hata + ".weight", "F16")},
      {"\"" + hata + ".bias\": type I32, expected F32", retype(hata + ".bias", "I32")},
      {"\"" + hash + "0.weight\": shape [3, 0, 6], expected [3, 1 to 65536, ...]",
       reshape(hash + "0.weight", {3, 0, 6})},
      {"\"" + hash + "0.weight\": shape [3, 65537, 0], expected [3, 1 to 65536, ...]",
       reshape(hash + "0.weight", {3, 65537, 0})},
      {"\"" + hash + "0.weight\": shape [18], expected", reshape(hash + "0.weight", {18})},
      {"\"" + hash + "1.weight\": shape", wider(hash + "0", hash + "1")},
      {"\"" + hash + "2.weight\": shape", wider(hash + "1", hash + "2")},
      {"\"" + features + "gate.weight\": shape", wider(features + "stem", "")},
      {"\"" + features + "up.weight\": shape", wider(features + "gate", "")},
      {"\"" + features + "up.weight\": shape", wider(features + "up", "")},
      {"\"" + features + "down.weight\": shape", wider(features + "down", "")},
      {"\"" + features + "out.weight\": shape", wider(features + "out", "")},
      {"\"layers.2.features.key.out.weight\": shape",
       [](TestArtifact& f) { f.header["features"]["features"] = 6; }},
      {"\"" + hata + ".weight\": values that are not finite", put(hata + ".weight", 0, infinity16),
       kDataLoss},
      {"\"" + hata + ".weight\": values that are not finite",
       put(hata + ".weight", 3 * 32 * 6 - 1, nan16), kDataLoss},
      {"\"" + hata + ".bias\": values that are not finite", put(hata + ".bias", 0, infinity32),
       kDataLoss},
      {"\"" + hata + ".bias\": values that are not finite", put(hata + ".bias", 95, nan32),
       kDataLoss},
  };
  for (const TestTensor& tensor : good_.tensors) {
    const std::string& name = tensor.name;
    breaks.push_back({"\"" + name + "\": missing", [=](TestArtifact& f) { f.Erase(name); }});
    breaks.push_back(
        {"\"" + name + "\": type", retype(name, tensor.dtype == "F32" ? "U32" : "U16")});
    breaks.push_back({"\"" + name + "\": values that are not finite",
                      put(name, 0, tensor.dtype == "F32" ? nan32 : infinity16), kDataLoss});
  }
  for (const Break& change : breaks) {
    TestArtifact file = good_;
    change.change(file);
    const absl::Status status = Parse(file.Bytes()).status();
    EXPECT_EQ(status.code(), change.code) << change.message << "\n" << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(change.message));
  }
}

// Reads all of it, so that a sanitizer sees a view that leaves the file.
uint64_t Sum(const Artifact& artifact, const ModelConfig& config) {
  uint64_t sum = 0;
  const auto add = [&sum](const AffineStage& stage) {
    EXPECT_EQ(stage.weight.size(), size_t{3} * stage.out * stage.in);
    EXPECT_EQ(stage.bias.size(), size_t{3} * stage.out);
    for (const uint16_t bits : stage.weight) sum += bits;
    for (const float value : stage.bias) sum += std::isfinite(value) ? 1 : 1000000;
  };
  for (int32_t layer = 0; layer < config.num_layers(); ++layer) {
    for (const Side side : kSides) {
      for (const Kind kind : kKinds) {
        if (!artifact.HasLayer(kind, layer)) continue;
        for (const AffineStage& stage : artifact.Encoder(kind, layer, side).stages) add(stage);
      }
      if (!artifact.HasFeatures(layer)) continue;
      const FeatureMapWeights map = artifact.FeatureMap(layer, side);
      for (const AffineStage& stage : {map.stem, map.gate, map.up, map.down, map.out}) add(stage);
    }
  }
  return sum;
}

TEST_F(ArtifactTest, ATruncatedFileIsRefused) {
  const std::string bytes = good_.Bytes();
  ASSERT_TRUE(Parse(bytes).ok());
  for (size_t size = 0; size < bytes.size(); size += 1 + random_() % 61) {
    // Copied, so that a sanitizer knows where it ends.
    const std::string part = bytes.substr(0, size);
    EXPECT_EQ(Parse(part).status().code(), absl::StatusCode::kInvalidArgument) << size;
  }
  EXPECT_FALSE(Parse(bytes.substr(0, bytes.size() - 1)).ok());
  EXPECT_FALSE(Parse(bytes + '\0').ok());
}

TEST_F(ArtifactTest, AFileWithAFlippedBitIsRefusedOrWholeAllTheSame) {
  const std::string bytes = good_.Bytes();
  const size_t header_bytes = bytes.size() - [&] {
    size_t data = 0;
    for (const TestTensor& tensor : good_.tensors) data += tensor.bytes.size();
    return data;
  }();
  int refused = 0, taken = 0;
  for (int i = 0; i < 1500; ++i) {
    // Two thirds in the header, which is the smaller part.
    const size_t byte = random_() % (i % 3 == 0 ? bytes.size() : header_bytes);
    std::string damaged = bytes;
    damaged[byte] = static_cast<char>(damaged[byte] ^ 1 << random_() % 8);
    const auto artifact = Parse(damaged);
    if (artifact.ok()) {
      ++taken;
      EXPECT_GT(Sum(**artifact, config_), 0u);
    } else {
      ++refused;
      EXPECT_THAT(std::string(artifact.status().message()), StartsWith("file: "));
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(taken, 100);  // weights, training, measured
}

TEST(ArtifactCorpus, ParsesOrIsRefused) {
  ModelConfig config;
  config.layers.resize(1);
  config.num_heads = config.num_kv_heads = config.head_dim = 1;
  int files = 0, good = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(SourcePath("tests/fuzz/corpus/artifact"))) {
    const std::string bytes = ReadText(entry.path());
    good +=
        Artifact::Parse(std::as_bytes(std::span(bytes)), "file", config, std::string(64, '0')).ok();
    ++files;
  }
  EXPECT_GE(files, 7);
  EXPECT_GE(good, 7);  // each kind, both sorts of queries, feature maps
}

}  // namespace
}  // namespace winnow::engine
