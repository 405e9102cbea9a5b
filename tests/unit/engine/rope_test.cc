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
  const auto& expected = row["inv_freq"];
  ASSERT_EQ(rope.inv_freq.size(), expected.size());
  for (size_t j = 0; j < expected.size(); ++j) {
    EXPECT_LE(Ulps(rope.inv_freq[j], expected[j].get<float>()), 1)
        << "pair " << j << ": " << rope.inv_freq[j] << ", reference " << expected[j];
  }
  EXPECT_EQ(rope.attention_factor, row["attention_factor"].get<float>());
}

TEST(RopeTest, EveryKindEqualsTheReferenceWithinOneUlp) {
  const json table = json::parse(ReadText(SourcePath("tests/golden/families/rope.json")));
  ASSERT_GE(table.size(), 19u);
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
    ExpectEqualsReference(ComputeRope(*config),
                          json::parse(ReadText(dir + "/golden.json"))["rope"]);
  }
}

TEST(RopeTest, FirstPairTurnsOneRadianPerPosition) {
  const RopeParameters rope = ComputeRope(64, 10000.0, RopeScaling{});
  EXPECT_EQ(rope.inv_freq[0], 1.0f);
  EXPECT_NEAR(rope.inv_freq[31], std::pow(10000.0, -62.0 / 64), 1e-9);
}

}  // namespace
}  // namespace winnow::engine
