// The real model that scripts/real_model.sh fetches, against what transformers computes from the same file
// (tests/golden/gguf/make_smollm2.py). WINNOW_REAL_MODEL is the file, or else it is looked for in the cache.
#include <cstdlib>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/model_loader.h"
#include "engine/model_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/sequence_runner.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using nlohmann::json;
using ::testing::ElementsAre;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// "" if there is none.
std::string RealModel() {
  const std::string said = Environment("WINNOW_REAL_MODEL");
  if (!said.empty()) return said;
  const std::string cache = Environment("XDG_CACHE_HOME");
  const std::string path = (cache.empty() ? Environment("HOME") + "/.cache" : cache) +
                           "/winnow/SmolLM2-135M-Instruct.Q4_1.gguf";
  return std::ifstream(path).good() ? path : "";
}

class RealModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = RealModel();
    if (path_.empty()) GTEST_SKIP() << "no real model: scripts/real_model.sh fetches one";
    std::ifstream file(SourcePath("tests/golden/gguf/smollm2.json"));
    golden_ = json::parse(file);
  }
  std::unique_ptr<LoadedModel> Load(const std::string& dtype) const {
    ModelOptions options;
    options.dtype = dtype;
    options.max_context = 1024;
    options.retrieval.index = "none";
    auto model = LoadModel(path_, options);
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? *std::move(model) : nullptr;
  }
  // The largest and the mean difference of logits after each prompt.
  struct Difference {
    double worst = 0, mean = 0;
  };
  Difference LogitsDifference(Decoder& decoder) const {
    Difference difference;
    int64_t count = 0;
    const int64_t step = golden_.at("step");
    for (const json& prompt : golden_.at("prompts")) {
      const std::vector<float> logits = After(decoder, prompt.at("ids"));
      const std::vector<float> expected = prompt.at("logits");
      const auto add = [&](int64_t id, float value) {
        const double apart = std::abs(logits[id] - value);
        difference.worst = std::max(difference.worst, apart);
        difference.mean += apart;
        ++count;
      };
      for (size_t i = 0; i < expected.size(); ++i) add(static_cast<int64_t>(i) * step, expected[i]);
      for (const json& best : prompt.at("best")) add(best[0], best[1]);
    }
    difference.mean /= static_cast<double>(count);
    return difference;
  }
  static std::vector<float> After(Decoder& decoder, const std::vector<int32_t>& ids) {
    return testing::Run(decoder, ids, 0, Blocks(decoder), 1, 64);
  }
  static std::vector<int32_t> Blocks(const Decoder& decoder) {
    std::vector<int32_t> blocks(decoder.num_blocks());
    std::iota(blocks.begin(), blocks.end(), 0);
    return blocks;
  }

  std::string path_;
  json golden_;
};

TEST_F(RealModelTest, SaysWhatItIs) {
  const auto config = LoadModelConfig(path_);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->num_layers(), 30);
  EXPECT_EQ(config->vocab_size, 49152);
  EXPECT_EQ(config->max_position_embeddings, 8192);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_EQ(config->dtype, DType::kBF16);
  EXPECT_EQ(config->bos_token_id, 1);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(0, 2));  // "<|endoftext|>" and "<|im_end|>"
}

TEST_F(RealModelTest, TextBecomesTheModelsTokensAndBack) {
  const auto tokenizer = LoadTokenizer(path_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), 49152);
  for (const json& prompt : golden_.at("prompts")) {
    const std::string text = prompt.at("text");
    const auto ids = (*tokenizer)->Encode(text, true, true);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, prompt.at("ids").get<std::vector<int32_t>>()) << text;
    EXPECT_EQ((*tokenizer)->Decode(*ids, false), text);
    const std::vector<int32_t> greedy = prompt.at("greedy");
    EXPECT_EQ((*tokenizer)->Decode(greedy, false), prompt.at("continuation"));
  }
  // What a user writes is text, whatever it spells.
  const auto spelled = (*tokenizer)->Encode("<|im_start|>", true, false);
  ASSERT_TRUE(spelled.ok());
  EXPECT_GT(spelled->size(), 1u);
  EXPECT_EQ(*(*tokenizer)->Encode("<|im_start|>", true, true), std::vector<int32_t>{1});
}

TEST_F(RealModelTest, GreedyTokensAndLogitsInFloat32AreThoseOfTransformers) {
  const std::unique_ptr<LoadedModel> model = Load("f32");
  ASSERT_NE(model, nullptr);
  for (const json& prompt : golden_.at("prompts")) {
    const std::vector<int32_t> ids = prompt.at("ids"), expected = prompt.at("greedy");
    const int32_t first = testing::ArgMax(After(*model->decoder, ids));
    EXPECT_EQ(testing::Greedy(*model->decoder, first, static_cast<int32_t>(ids.size()),
                              Blocks(*model->decoder), expected.size()),
              expected)
        << prompt.at("text");
  }
  EXPECT_LT(LogitsDifference(*model->decoder).worst, 2e-3);
}

TEST_F(RealModelTest, LogitsInBfloat16DifferByItsRounding) {
  const std::unique_ptr<LoadedModel> model = Load("auto");
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->decoder_options.compute, DType::kBF16);
  const Difference difference = LogitsDifference(*model->decoder);
  RecordProperty("worst", std::to_string(difference.worst));
  RecordProperty("mean", std::to_string(difference.mean));
  EXPECT_LT(difference.worst, 0.4);  // 0.18 was measured
  EXPECT_LT(difference.mean, 0.1);   // 0.053
}

}  // namespace
}  // namespace winnow::engine
