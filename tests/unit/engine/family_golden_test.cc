// Every folder of tests/golden/families against what the reference implementation computed from it.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/sequence_runner.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using nlohmann::json;

const std::string kFamilies = SourcePath("tests/golden/families");

json ReadJson(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return json::parse(file);
}

std::vector<std::string> Cases() {
  std::vector<std::string> cases;
  for (const auto& entry : std::filesystem::directory_iterator(kFamilies)) {
    if (entry.is_directory()) cases.push_back(entry.path().filename());
  }
  std::sort(cases.begin(), cases.end());
  return cases;
}

TEST(FamilyGoldens, EveryCaseOfTheListIsThere) {
  std::vector<std::string> listed = ReadJson(kFamilies + "/cases.json").at("cases");
  std::sort(listed.begin(), listed.end());
  EXPECT_EQ(Cases(), listed);
}

class FamilyGolden : public ::testing::TestWithParam<std::string> {};

TEST_P(FamilyGolden, LogitsLossAndGreedyTokensEqualTheReference) {
  const std::string dir = kFamilies + "/" + GetParam();
  const json golden = ReadJson(dir + "/golden.json");
  const uint64_t seed = testing::TestSeed();
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);

  const absl::StatusOr<ModelConfig> config = LoadModelConfig(dir);
  ASSERT_TRUE(config.ok()) << config.status();
  const absl::StatusOr<Weights> weights = LoadWeights(dir, *config);
  ASSERT_TRUE(weights.ok()) << weights.status();

  for (const std::string& isa : testing::Isas()) {
    SCOPED_TRACE(isa);
    const auto backend = kernels::MakeCpuBackend(isa, 2);
    absl::StatusOr<std::unique_ptr<Decoder>> decoder =
        Decoder::Create(*config, *weights, *backend,
                        {.compute = kernels::DType::kF32,
                         .kv_dtype = kernels::DType::kF32,
                         .block_tokens = 16,
                         .kv_bytes = 16 << 20,
                         .max_batch_tokens = 64,
                         .max_batch_logits = 64,
                         .max_context = golden.value("max_context", 0)});
    ASSERT_TRUE(decoder.ok()) << decoder.status();
    for (const json& sequence : golden.at("sequences")) {
      const std::vector<int32_t> ids = sequence.at("input_ids");
      const std::vector<float> expected = sequence.at("last_logits");
      const std::vector<int32_t> greedy = sequence.at("greedy_ids");
      const std::vector<int32_t> blocks = testing::ShuffledBlocks(**decoder, random);
      const int32_t chunk_tokens = std::uniform_int_distribution<int32_t>(1, 64)(random);
      const int32_t vocab_size = config->vocab_size;
      const int32_t length = static_cast<int32_t>(ids.size());

      const std::vector<float> logits =
          testing::Run(**decoder, ids, 0, blocks, length, chunk_tokens);
      const std::span<const float> last = std::span(logits).last(vocab_size);
      ASSERT_EQ(expected.size(), last.size());
      float worst = 0;
      for (int32_t i = 0; i < vocab_size; ++i)
        worst = std::max(worst, std::abs(last[i] - expected[i]));
      EXPECT_LE(worst, 1e-3f) << length << " tokens";
      EXPECT_NEAR(testing::MeanNll(logits, ids, vocab_size), sequence.at("mean_nll").get<double>(),
                  1e-4);
      EXPECT_EQ(testing::Greedy(**decoder, testing::ArgMax(last), length, blocks, greedy.size()),
                greedy);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyGolden, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace winnow::engine
