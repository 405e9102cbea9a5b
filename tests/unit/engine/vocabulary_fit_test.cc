#include "engine/model/vocabulary_fit.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;

TEST(VocabularyFit, PaddingOfPublishedModelsFits) {
  struct Case {
    const char* model;
    int32_t id_end, rows;
  };
  for (const Case& c : {Case{"Llama 3.1", 128256, 128256}, Case{"Qwen2.5 7B", 151665, 152064},
                        Case{"Qwen3", 151669, 151936}, Case{"Phi-2", 50295, 51200},
                        Case{"DeepSeek LLM", 100015, 102400}, Case{"Phi-3", 32011, 32064},
                        Case{"Pythia 12B", 50277, 50688}, Case{"SmolLM2", 49152, 49152},
                        Case{"DeepSeek Coder", 32022, 32256}, Case{"a toy", 300, 512}}) {
    EXPECT_TRUE(CheckVocabularyFits(c.id_end, c.rows, "t").ok()) << c.model;
  }
}

TEST(VocabularyFit, AnotherModelsTokenizerIsNamedWithBothSizes) {
  const absl::Status small = CheckVocabularyFits(4096, 49152, "dir/tokenizer.json");
  EXPECT_EQ(small.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(small.message()),
              AllOf(HasSubstr("dir/tokenizer.json"), HasSubstr("4095"), HasSubstr("49152")));
  const absl::Status large = CheckVocabularyFits(49153, 49152, "dir/tokenizer.json");
  EXPECT_EQ(large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(large.message()), AllOf(HasSubstr("49152"), HasSubstr("rows")));
}

TEST(VocabularyFit, TheBoundIsASixteenthOrAThousand) {
  EXPECT_TRUE(CheckVocabularyFits(150000, 160000, "t").ok());
  EXPECT_FALSE(CheckVocabularyFits(149999, 160000, "t").ok());
  EXPECT_TRUE(CheckVocabularyFits(1, 1025, "t").ok());
  EXPECT_FALSE(CheckVocabularyFits(1, 1026, "t").ok());
}

}  // namespace
}  // namespace winnow::engine
