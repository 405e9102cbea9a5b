#include "engine/model/rope.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "engine/model/model_config.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using nlohmann::json;

// Distance in units of the last place; both positive.
int64_t Ulps(float a, float b) {
  return std::abs(static_cast<int64_t>(std::bit_cast<uint32_t>(a)) -
                  static_cast<int64_t>(std::bit_cast<uint32_t>(b)));
}

ModelConfig ConfigOf(const json& row, bool old_keys) {
  json config = TinyConfig();
  config["head_dim"] = row["head_dim"];
  config["max_position_embeddings"] = row["max_position_embeddings"];
  json rope = row["rope_parameters"];
  config.erase("rope_theta");
  if (old_keys) {
    config["rope_theta"] = rope["rope_theta"];
    rope.erase("rope_theta");
    rope["type"] = rope["rope_type"];
    rope.erase("rope_type");
    config["rope_scaling"] = rope["type"] == "default" ? json() : rope;
  } else {
    config["rope_parameters"] = rope;
  }
  const auto parsed = ParseModelConfig(config.dump(), "config.json", "", "");
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.value_or(ModelConfig());
}

void ExpectEqualsReference(const RopeParameters& rope, const json& row) {
  const auto& expected = row["inv_freq"];  // of the pairs that rotate
  ASSERT_GE(rope.inv_freq.size(), expected.size());
  for (size_t j = expected.size(); j < rope.inv_freq.size(); ++j) EXPECT_EQ(rope.inv_freq[j], 0);
  for (size_t j = 0; j < expected.size(); ++j) {
    EXPECT_LE(Ulps(rope.inv_freq[j], expected[j].get<float>()), 1)
        << "pair " << j << ": " << rope.inv_freq[j] << ", reference " << expected[j];
  }
  EXPECT_EQ(rope.attention_factor, row["attention_factor"].get<float>());
}

TEST(RopeTest, EveryKindEqualsTheReferenceWithinOneUlp) {
  const json table = json::parse(ReadText(SourcePath("tests/golden/families/rope.json")));
  ASSERT_GE(table.size(), 22u);
  for (const json& row : table) {
    for (const bool old_keys : {false, true}) {
      SCOPED_TRACE(row["rope_parameters"].dump() + (old_keys ? " (old keys)" : ""));
      ExpectEqualsReference(ComputeRope(ConfigOf(row, old_keys)), row);
    }
  }
}

TEST(RopeTest, FamilyGoldensHaveTheReferencesFrequencies) {
  const json cases = json::parse(ReadText(SourcePath("tests/golden/families/cases.json")));
  for (const std::string name : cases["cases"]) {
    SCOPED_TRACE(name);
    const std::string dir = SourcePath("tests/golden/families/" + name);
    const auto config = LoadModelConfig(dir);
    ASSERT_TRUE(config.ok()) << config.status();
    const json golden = json::parse(ReadText(dir + "/golden.json"));
    const int32_t context = golden.value("max_context", config->max_position_embeddings);
    const RopeParameters rope = ComputeRope(WithServedContext(*config, context));
    ExpectEqualsReference(rope, golden["rope"]);
    EXPECT_EQ(rope.inv_freq.size(), static_cast<size_t>(config->head_dim / 2));
  }
}

// A server has one set of factors for all sequences: that of the longest context that it serves.
TEST(RopeTest, TheServedContextChoosesLongRopesFactors) {
  json keys = TinyConfig();
  keys["max_position_embeddings"] = 8192;
  keys["rope_scaling"] = {{"type", "longrope"},
                          {"original_max_position_embeddings", 4096},
                          {"short_factor", std::vector<double>(32, 1.0)},
                          {"long_factor", std::vector<double>(32, 4.0)}};
  const auto config = ParseModelConfig(keys.dump(), "config.json", "", "");
  ASSERT_TRUE(config.ok()) << config.status();
  const auto first = [&](int32_t context) {
    return ComputeRope(WithServedContext(*config, context)).inv_freq[0];
  };
  EXPECT_EQ(first(4096), 1.0f);
  EXPECT_EQ(first(4097), 0.25f);
  EXPECT_EQ(ComputeRope(*config).inv_freq[0], 0.25f);  // of the model's longest
  // A choice stays.
  const ModelConfig chosen = WithServedContext(*config, 8192);
  EXPECT_EQ(ComputeRope(WithServedContext(chosen, 512)).inv_freq[0], 0.25f);
  // Attention's factor does not depend on it.
  for (const int32_t context : {512, 8192}) {
    EXPECT_NEAR(ComputeRope(WithServedContext(*config, context)).attention_factor,
                std::sqrt(1 + std::log(2.0) / std::log(4096.0)), 1e-7);
  }
}

TEST(RopeTest, ALayerWithoutRopeTurnsNothing) {
  const auto config = ParseModelConfig(TinyConfig().dump(), "config.json", "", "");
  ASSERT_TRUE(config.ok()) << config.status();
  const RopeParameters rope = ComputeRope(*config, LayerSpec::kNoRope);
  EXPECT_EQ(rope.inv_freq, std::vector<float>(32, 0.0f));
  EXPECT_EQ(rope.attention_factor, 1.0f);
}

TEST(RopeTest, QueriesAreScaledByTheLengthsThatLieBeforeThem) {
  const QueryScaling scaling{.beta = 0.1, .length = 16384};
  EXPECT_EQ(scaling.Factor(0), 1.0f);
  EXPECT_EQ(scaling.Factor(16383), 1.0f);
  EXPECT_FLOAT_EQ(scaling.Factor(16384), 1 + 0.1f * std::log(2.0f));
  EXPECT_EQ(scaling.Factor(32767), scaling.Factor(16384));
  EXPECT_FLOAT_EQ(scaling.Factor(262143), 1 + 0.1f * std::log(16.0f));
  EXPECT_EQ(QueryScaling().Factor(1 << 20), 1.0f);
}

TEST(RopeTest, FirstPairTurnsOneRadianPerPosition) {
  const RopeParameters rope = ComputeRope(64, 10000.0, RopeScaling{});
  EXPECT_EQ(rope.inv_freq[0], 1.0f);
  EXPECT_NEAR(rope.inv_freq[31], std::pow(10000.0, -62.0 / 64), 1e-9);
}

}  // namespace
}  // namespace winnow::engine
