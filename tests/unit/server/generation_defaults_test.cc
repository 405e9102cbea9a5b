#include "server/generation_defaults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

engine::SamplingOptions Parse(const std::string& json) {
  const auto sampling = ParseGenerationDefaults(json, "generation_config.json");
  EXPECT_TRUE(sampling.ok()) << sampling.status();
  return sampling.value_or(engine::SamplingOptions{});
}

TEST(GenerationDefaults, GreedyUnlessTheFileAsksForSampling) {
  EXPECT_EQ(Parse("{}").temperature, 0);
  EXPECT_EQ(Parse(R"({"temperature": 0.7, "top_k": 20})").temperature, 0);
  EXPECT_EQ(Parse(R"({"temperature": 0.7, "top_k": 20})").top_k, 0);
  EXPECT_EQ(Parse(R"({"do_sample": false, "temperature": 0.7})").temperature, 0);
}

TEST(GenerationDefaults, SamplingTakesTheFilesValuesAndTransformersDefaults) {
  const auto some = Parse(R"({"do_sample": true, "temperature": 0.7, "top_p": 0.8})");
  EXPECT_EQ(some.temperature, 0.7f);
  EXPECT_EQ(some.top_p, 0.8f);
  EXPECT_EQ(some.top_k, 50);
  EXPECT_EQ(some.min_p, 0);
  EXPECT_EQ(Parse(R"({"do_sample": true})").temperature, 1);
}

TEST(GenerationDefaults, RepetitionPenaltyHoldsForGreedyToo) {
  EXPECT_EQ(Parse(R"({"repetition_penalty": 1.05})").repetition_penalty, 1.05f);
}

TEST(GenerationDefaults, WrongValuesNameFileAndKey) {
  for (const char* json :
       {R"({"do_sample": true, "top_p": 0})", R"({"do_sample": true, "top_p": 1.5})",
        R"({"do_sample": true, "top_k": -1})", R"({"do_sample": true, "temperature": "hot"})",
        R"({"repetition_penalty": 0})", R"([1])", R"({"a": )"}) {
    const auto sampling = ParseGenerationDefaults(json, "generation_config.json");
    EXPECT_EQ(sampling.status().code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_THAT(std::string(sampling.status().message()), HasSubstr("generation_config.json"));
  }
}

TEST(GenerationDefaults, NoFileIsGreedy) {
  const auto sampling = LoadGenerationDefaults(TempDir().path());
  ASSERT_TRUE(sampling.ok()) << sampling.status();
  EXPECT_EQ(sampling->temperature, 0);
}

}  // namespace
}  // namespace winnow::server
