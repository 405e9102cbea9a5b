#include "server/http/tools_request.h"

#include <memory>

#include "engine/grammar/grammar.h"
#include "engine/grammar/grammar_check.h"
#include "gtest/gtest.h"
#include "kernels/sample.h"
#include "server/http/openai_request.h"
#include "server/ordered_json.h"

namespace winnow::server {
namespace {

using Kind = AnswerPiece::Kind;

constexpr int32_t kCallsToken = 256, kArgumentsToken = 257, kEnd = 258;

constexpr char kTools[] = R"([{"type":"function","function":{"name":"f","parameters":
    {"type":"object","properties":{"z":{"enum":["a}","b"]},"a":{"type":"integer"}},"required":["z"]}}},
    {"type":"function","function":{"name":"g"}}])";

absl::StatusOr<OpenAiRequest> Chat(const std::string& fields, const ModelHabits& habits) {
  return ParseChatRequest(R"({"messages":[{"role":"user","content":"x"}],"tools":)" +
                              std::string(kTools) + (fields.empty() ? "" : "," + fields) + "}",
                          habits);
}

ModelHabits Habits(ToolFormat format) {
  ModelHabits habits;
  habits.tools = format;
  if (format == ToolFormat::kMistral) habits.calls_token = kCallsToken;
  return habits;
}

TEST(OrderedJsonTest, MembersAreFoundWhereverTheyAreAndKeepTheirOrder) {
  constexpr std::string_view kBody =
      " {\"a\" : \"}\\\"{\", \"b\":[1,{\"tools\":2}] ,\"too\\u006cs\":{\"z\":1,\"a\":[]}, "
      "\"n\":-1.5e3,\"tools\" : {\"z\":2, \"a\":3} }";
  EXPECT_EQ(TextOfMember(kBody, "tools"), "{\"z\":2, \"a\":3}") << "of several the last";
  EXPECT_EQ(TextOfMember(kBody, "n"), "-1.5e3");
  EXPECT_EQ(TextOfMember(kBody, "b"), "[1,{\"tools\":2}]");
  EXPECT_EQ(TextOfMember(kBody, "a"), "\"}\\\"{\"");
  EXPECT_EQ(TextOfMember(kBody, "c"), "");
  EXPECT_EQ(TextOfMember("{}", "c"), "");
  EXPECT_EQ(TextOfMember("{\"c\":true}", "c"), "true");
  EXPECT_EQ(ParseOrdered("{\"z\":1,\"a\":2}")->dump(), "{\"z\":1,\"a\":2}");
  std::string many = "{\"k\":{", other = "[";
  for (int i = 0; i <= kMaxOrderedMembers; ++i)
    many += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
  EXPECT_FALSE(ParseOrdered(many + "}}").ok());
  // So many are of one object, not of all.
  for (int i = 0; i <= kMaxOrderedMembers; ++i) other += (i > 0 ? ",{\"a\":0}" : "{\"a\":0}");
  EXPECT_TRUE(ParseOrdered(other + "]").ok());
  EXPECT_FALSE(ParseOrdered(std::string(100, '[') + std::string(100, ']')).ok());
  EXPECT_FALSE(ParseOrdered("{\"a\":").ok());
}

TEST(ToolsRequestTest, ToolsAreShownAsTheyCameUnlessNoneMayBeCalled) {
  const auto chat = Chat("", Habits(ToolFormat::kHermes));
  ASSERT_TRUE(chat.ok()) << chat.status();
  ASSERT_EQ(chat->generate.chat().tools_size(), 2);
  EXPECT_LT(chat->generate.chat().tools(0).find("\"z\""),
            chat->generate.chat().tools(0).find("\"a\":{"));
  EXPECT_EQ(chat->parser.names, (std::vector<std::string>{"f", "g"}));
  EXPECT_FALSE(chat->generate.has_structured_output());
  EXPECT_FALSE(chat->generate.show_special_tokens());
  EXPECT_TRUE(Chat("", Habits(ToolFormat::kMistral))->generate.show_special_tokens())
      << "its marks are control tokens";
  EXPECT_EQ(
      Chat(R"("tool_choice":"none")", Habits(ToolFormat::kHermes))->generate.chat().tools_size(),
      0);
  for (const auto& [fields, habits] : std::vector<std::pair<std::string, ModelHabits>>{
           {"", {}},
           {R"("tool_choice":"sometimes")", Habits(ToolFormat::kHermes)},
           {R"("tool_choice":{"type":"function","function":{"name":"h"}})",
            Habits(ToolFormat::kHermes)},
           {R"("tool_choice":"required","guided_regex":"a")", Habits(ToolFormat::kHermes)}}) {
    EXPECT_FALSE(Chat(fields, habits).ok()) << fields;
  }
  ModelHabits no_token = Habits(ToolFormat::kMistral);
  no_token.calls_token.reset();
  EXPECT_FALSE(Chat(R"("tool_choice":"required")", no_token).ok());
}

#ifdef WINNOW_HAS_XGRAMMAR

// Bytes, the control tokens of calls, and an end.
const engine::GrammarLibrary& ByteLibrary() {
  static const engine::GrammarLibrary& library = *[] {
    engine::GrammarVocabulary vocabulary;
    for (int byte = 0; byte < 256; ++byte)
      vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
    vocabulary.tokens.insert(vocabulary.tokens.end(), {"\xff[TOOL_CALLS]", "\xff[ARGS]", ""});
    vocabulary.end_tokens = {kEnd};
    return engine::GrammarLibrary::Make(vocabulary)->release();
  }();
  return library;
}

// Whether the request's grammar takes an answer as a whole; [TOOL_CALLS] and [ARGS] stand for their tokens.
bool Takes(const OpenAiRequest& request, const std::string& answer) {
  const engine::GrammarSource source{engine::GrammarKind::kStructuralTag,
                                     request.generate.structured_output().structural_tag()};
  EXPECT_TRUE(engine::CheckGrammarSource(source).ok());
  const auto compiled = ByteLibrary().Compile(source);
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  const auto state = (*ByteLibrary().Load(*compiled))->NewState();
  for (size_t at = 0; at < answer.size();) {
    int32_t token = static_cast<unsigned char>(answer[at]);
    size_t size = 1;
    for (const auto& [text, id] : {std::pair{std::string("[TOOL_CALLS]"), kCallsToken},
                                   {std::string("[ARGS]"), kArgumentsToken}}) {
      if (answer.compare(at, text.size(), text) == 0) token = id, size = text.size();
    }
    if (!kernels::IsAllowed(state->AllowedTokens(), token) || !state->Accept(token)) return false;
    at += size;
  }
  return kernels::IsAllowed(state->AllowedTokens(), kEnd);
}

// The names that an answer calls, as its parser reads it.
std::vector<std::string> Called(const OpenAiRequest& request, const std::string& answer) {
  const auto parser = MakeAnswerParser(request.parser);
  std::vector<AnswerPiece> pieces;
  parser->Add(answer, pieces);
  parser->Finish(pieces);
  std::vector<std::string> names;
  for (const AnswerPiece& piece : pieces) {
    if (piece.kind == Kind::kCallBegin) names.push_back(piece.text);
    EXPECT_NE(piece.kind, Kind::kContent) << piece.text;
  }
  return names;
}

TEST(ToolsRequestTest, WhatMustBeCalledIsCalledInTheModelsOwnWay) {
  ModelHabits named = Habits(ToolFormat::kMistral);
  named.arguments_token = kArgumentsToken;
  struct Case {
    ModelHabits habits;
    std::string one, two;
  };
  for (
      const Case& c :
      {Case{
           Habits(ToolFormat::kHermes),
           "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": \"a}\"}}\n</tool_call>",
           "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>\n"
           "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": \"b\", \"a\": 3}}\n</tool_call>"},
       Case{Habits(ToolFormat::kLlama3), R"({"name": "f", "parameters": {"z": "a}"}})", ""},
       Case{
           Habits(ToolFormat::kMistral), R"([TOOL_CALLS][{"name": "f", "arguments": {"z": "a}"}}])",
           R"([TOOL_CALLS][{"name": "g", "arguments": {}}, {"name": "f", "arguments": {"z": "b"}}])"},
       Case{named, R"([TOOL_CALLS]f[ARGS]{"z": "a}"})",
            R"([TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{"z": "b"})"}}) {
    const auto required = Chat(R"("tool_choice":"required")", c.habits);
    ASSERT_TRUE(required.ok()) << required.status();
    EXPECT_TRUE(Takes(*required, c.one)) << c.one;
    EXPECT_EQ(Called(*required, c.one), (std::vector<std::string>{"f"}));
    EXPECT_FALSE(Takes(*required, "Well, " + c.one));
    EXPECT_FALSE(Takes(*required, ""));
    EXPECT_EQ(Takes(*required, c.two), !c.two.empty()) << c.two;
    const auto alone = Chat(R"("tool_choice":"required","parallel_tool_calls":false)", c.habits);
    EXPECT_TRUE(Takes(*alone, c.one));
    EXPECT_FALSE(Takes(*alone, c.two));
    if (!c.two.empty()) {
      EXPECT_EQ(Called(*required, c.two), (std::vector<std::string>{"g", "f"}));
      EXPECT_EQ(Called(*alone, c.two), (std::vector<std::string>{"g"}));
    }
    const auto one = Chat(R"("tool_choice":{"type":"function","function":{"name":"g"}})", c.habits);
    EXPECT_FALSE(Takes(*one, c.one));
  }
}

TEST(ToolsRequestTest, StrictArgumentsAreKeptWhereTheModelMayCallOrNot) {
  const std::string body =
      R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",
      "strict":true,"parameters":{"type":"object","properties":{"z":{"type":"boolean"}},"required":["z"]}}},
      {"type":"function","function":{"name":"g","parameters":{"type":"object"}}}]})";
  const auto chat = ParseChatRequest(body, Habits(ToolFormat::kHermes));
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_TRUE(Takes(*chat, "I need no tool."));
  EXPECT_TRUE(
      Takes(*chat, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": true}}\n</tool_call>"));
  EXPECT_FALSE(
      Takes(*chat, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": 1}}\n</tool_call>"));
  EXPECT_TRUE(Takes(
      *chat, "Look: <tool_call>\n{\"name\": \"g\", \"arguments\": {\"any\": [1]}}\n</tool_call>"));
  const auto llama = ParseChatRequest(body, Habits(ToolFormat::kLlama3));
  EXPECT_NE(std::string(llama.status().message()).find("strict"), std::string::npos)
      << llama.status();
}

#endif  // WINNOW_HAS_XGRAMMAR

}  // namespace
}  // namespace winnow::server
