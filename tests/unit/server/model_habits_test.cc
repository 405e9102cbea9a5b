#include "server/http/model_habits.h"

#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "tests/unit/temp_dir.h"
#include "tests/unit/test_paths.h"

namespace winnow::server {
namespace {

const engine::Tokenizer& AnyTokenizer() {
  static const engine::Tokenizer& tokenizer =
      *engine::Tokenizer::Load(SourcePath("models/needle-5m"))->release();
  return tokenizer;
}

absl::StatusOr<ModelHabits> Find(const std::string& text, std::string_view tools = "auto",
                                 std::string_view reasoning = "auto") {
  return FindModelHabits(engine::ChatTemplate::FromText(text, "<s>", "</s>"), AnyTokenizer(), tools,
                         reasoning);
}

constexpr char kMessages[] = "{% for m in messages %}{{ m.content }}{% endfor %}";
constexpr char kTools[] = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}";

TEST(ModelHabitsTest, TheTemplateSaysHowToolsAreCalled) {
  const auto with = [](const std::string& mark) { return Find(kTools + mark + kMessages); };
  EXPECT_EQ(with("<tool_call>")->tools, ToolFormat::kHermes);
  EXPECT_EQ(with("<|python_tag|>")->tools, ToolFormat::kLlama3);
  EXPECT_EQ(with("[TOOL_CALLS]")->tools, ToolFormat::kMistral);
  EXPECT_EQ(with("<tool_call>{{ strftime_now('%Y') }}")->tools, ToolFormat::kHermes)
      << "it tells the date";
  EXPECT_EQ(with("")->tools, ToolFormat::kNone) << "shown, but who knows how they are called";
  // A mark alone does not show a tool to the model.
  EXPECT_EQ(Find(std::string("<tool_call>") + kMessages)->tools, ToolFormat::kNone);
  EXPECT_EQ(Find("{{ broken")->tools, ToolFormat::kNone);
  // The operator may know better.
  EXPECT_EQ(Find(kMessages, "llama3_json")->tools, ToolFormat::kLlama3);
  EXPECT_EQ(Find(std::string(kTools) + "<tool_call>" + kMessages, "none")->tools,
            ToolFormat::kNone);
  EXPECT_FALSE(Find(kMessages, "pythonic").ok());
}

TEST(ModelHabitsTest, TheVocabularySaysWhetherThereIsReasoning) {
  EXPECT_EQ(Find(kMessages)->reasoning, ReasoningFormat::kNone) << "this one has no <think>";
  EXPECT_EQ(Find(kMessages, "auto", "think")->reasoning, ReasoningFormat::kThink);
  EXPECT_EQ(Find(kMessages, "auto", "none")->reasoning, ReasoningFormat::kNone);
  EXPECT_FALSE(Find(kMessages, "auto", "deepseek").ok());
}

// The vocabulary of needle-5m, in which other control tokens have Harmony's names.
const engine::Tokenizer& HarmonyTokenizer() {
  static const engine::Tokenizer& tokenizer = *[] {
    std::ifstream file(SourcePath("models/needle-5m/tokenizer.json"));
    std::string text{std::istreambuf_iterator<char>(file), {}};
    for (const auto& [from, to] : {std::pair<std::string, std::string>{"<|system|>", "<|start|>"},
                                   {"<|user|>", "<|channel|>"},
                                   {"<|assistant|>", "<|message|>"},
                                   {"<|pad|>", "<|constrain|>"},
                                   {"<|reserved_0|>", "<|call|>"}}) {
      for (size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) {
        text.replace(at, from.size(), to);
      }
    }
    const TempDir directory;
    std::ofstream(directory.File("tokenizer.json")) << text;
    return engine::Tokenizer::Load(directory.path())->release();
  }();
  return tokenizer;
}

constexpr char kChannels[] = "<|start|>assistant<|channel|>final<|message|>";

TEST(ModelHabitsTest, HarmonyIsOneFormatOfCallsAndReasoning) {
  const auto find = [](const std::string& text, std::string_view tools = "auto",
                       std::string_view reasoning = "auto") {
    return FindModelHabits(engine::ChatTemplate::FromText(text, "<s>", "</s>"), HarmonyTokenizer(),
                           tools, reasoning);
  };
  const std::string whole = std::string(kTools) + kChannels + kMessages;
  const auto habits = find(whole);
  ASSERT_TRUE(habits.ok()) << habits.status();
  EXPECT_EQ(habits->tools, ToolFormat::kHarmony);
  EXPECT_EQ(habits->reasoning, ReasoningFormat::kHarmony);
  ASSERT_TRUE(habits->harmony.has_value());
  EXPECT_EQ(habits->harmony->start, 3);
  EXPECT_EQ(habits->harmony->constrain, 6);
  EXPECT_EQ(habits->harmony->ends_turn, std::vector<int32_t>{7}) << "it has no <|return|>";
  ASSERT_NE(habits->message_format, nullptr);
  EXPECT_EQ(habits->message_format->header_begins, (std::vector<int32_t>{3, 4, 2, 7}));
  EXPECT_EQ(habits->message_format->header_ends, std::vector<int32_t>{5});
  std::vector<int32_t> ends = {1, 9};
  AddEndsOfTurn(*habits, ends);
  AddEndsOfTurn(*habits, ends);
  EXPECT_EQ(ends, (std::vector<int32_t>{1, 7, 9}));
  // A template without tools has channels, too.
  EXPECT_EQ(find(std::string(kChannels) + kMessages)->tools, ToolFormat::kNone);
  EXPECT_EQ(find(std::string(kChannels) + kMessages)->reasoning, ReasoningFormat::kHarmony);
  EXPECT_FALSE(find(whole)->has_effort);
  EXPECT_TRUE(find(whole + "{{ reasoning_effort }}")->has_effort);
  // The operator may know better, of both together.
  EXPECT_EQ(find(kMessages, "harmony")->reasoning, ReasoningFormat::kHarmony);
  EXPECT_EQ(find(whole, "none")->reasoning, ReasoningFormat::kHarmony);
  EXPECT_EQ(find(whole, "none", "none")->message_format, nullptr);
  for (const auto& [tools, reasoning] : {std::pair{"harmony", "none"},
                                         {"harmony", "think"},
                                         {"auto", "none"},
                                         {"hermes", "harmony"}}) {
    EXPECT_FALSE(find(whole, tools, reasoning).ok()) << tools << " " << reasoning;
  }
}

TEST(ModelHabitsTest, HarmonyNeedsItsControlTokens) {
  const std::string whole = std::string(kTools) + kChannels + kMessages;
  EXPECT_EQ(Find(whole)->tools, ToolFormat::kNone);
  EXPECT_EQ(Find(whole)->reasoning, ReasoningFormat::kNone);
  const absl::Status status = Find(whole, "harmony").status();
  EXPECT_NE(std::string(status.message()).find("<|start|>"), std::string::npos) << status;
  std::vector<int32_t> ends = {1};
  AddEndsOfTurn(*Find(whole), ends);
  EXPECT_EQ(ends, std::vector<int32_t>{1});
}

}  // namespace
}  // namespace winnow::server
