// Conversations as clients send them, for a template that takes less.
#include "server/harmony_chat.h"

#include "gtest/gtest.h"

namespace winnow::server {
namespace {

using Json = nlohmann::ordered_json;

Json Call(const std::string& id, const std::string& name) {
  return {{"id", id},
          {"type", "function"},
          {"function", {{"name", name}, {"arguments", Json::object()}}}};
}
Json Said(const std::string& role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}
Json Result(const std::string& id, const std::string& content) {
  return {{"role", "tool"}, {"content", content}, {"tool_call_id", id}};
}
Json Called(const std::string& thought, const Json& call) {
  Json message = Said("assistant", "");
  if (!thought.empty()) message["reasoning_content"] = thought;
  message["tool_calls"] = Json::array({call});
  return message;
}
Json Turn(const std::string& thought, const std::string& content, const Json& calls) {
  return {{"role", "assistant"},
          {"content", content},
          {"reasoning_content", thought},
          {"tool_calls", calls}};
}

TEST(HarmonyChatTest, WhatTheTemplateTakesStaysAsItIs) {
  const Json messages =
      Json::array({Said("system", "s"),
                   Said("user", "u"),
                   {{"role", "assistant"}, {"content", "a"}, {"reasoning_content", "t"}},
                   Said("user", "v"),
                   Called("t", Call("1", "f")),
                   Result("1", "r"),
                   Said("assistant", "b")});
  EXPECT_EQ(FitHarmonyMessages(messages), messages);
  EXPECT_EQ(FitHarmonyMessages(Json::array()), Json::array());
}

TEST(HarmonyChatTest, SystemMessagesAreOneAtTheBeginningAndAUsersLater) {
  EXPECT_EQ(FitHarmonyMessages(
                Json::array({Said("system", "a"), Said("developer", "b"), Said("system", ""),
                             Said("user", "u"), Said("system", "c"), Said("user", "v")})),
            Json::array({Said("system", "a\n\nb"), Said("user", "u"), Said("user", "c"),
                         Said("user", "v")}));
  EXPECT_EQ(FitHarmonyMessages(Json::array({Said("user", "u"), Said("developer", "b")})),
            Json::array({Said("user", "u"), Said("user", "b")}));
}

TEST(HarmonyChatTest, EachCallHasAMessageAndItsResultBehindIt) {
  const Json first = Call("1", "f"), second = Call("2", "g"), third = Call("3", "h");
  EXPECT_EQ(
      FitHarmonyMessages(
          Json::array({Turn("t", "I look.", Json::array({first, second, third})), Result("3", "rh"),
                       Result("1", "rf"), Result("2", "rg"), Said("user", "u")})),
      Json::array({Called("t\n\nI look.", first), Result("1", "rf"), Called("", second),
                   Result("2", "rg"), Called("", third), Result("3", "rh"), Said("user", "u")}));
  // Results that name no call go with the calls that have none, in order; more of them stay behind the last.
  EXPECT_EQ(
      FitHarmonyMessages(Json::array({Turn("", "", Json::array({first, second})), Result("", "x"),
                                      Result("2", "rg"), Result("2", "again"), Result("9", "y")})),
      Json::array({Called("", first), Result("", "x"), Called("", second), Result("2", "rg"),
                   Result("2", "again"), Result("9", "y")}));
  // Calls without results: the conversation ends there.
  EXPECT_EQ(FitHarmonyMessages(Json::array({Turn("", "c", Json::array({first, second}))})),
            Json::array({Called("c", first), Called("", second)}));
}

TEST(HarmonyChatTest, EveryToolHasADescription) {
  const auto tool = [](Json function) {
    return Json{{"type", "function"}, {"function", std::move(function)}};
  };
  EXPECT_EQ(FitHarmonyTools(
                Json::array({tool({{"name", "f"}}), tool({{"name", "g"}, {"description", nullptr}}),
                             tool({{"name", "h"}, {"description", "d"}}), 7})),
            Json::array({tool({{"name", "f"}, {"description", ""}}),
                         tool({{"name", "g"}, {"description", ""}}),
                         tool({{"name", "h"}, {"description", "d"}}), 7}));
}

TEST(HarmonyChatTest, DefaultsBesideChoicesAreTexts) {
  const auto tool = [](const Json& first, const Json& second, const Json& third) {
    return Json::array({{{"type", "function"},
                         {"function",
                          {{"name", "f"},
                           {"description", "d"},
                           {"parameters",
                            {{"type", "object"},
                             {"properties",
                              {{"a", {{"enum", {1, 2}}, {"default", first}}},
                               {"b", {{"oneOf", Json::array()}, {"default", second}}},
                               {"c", {{"type", "integer"}, {"default", third}}},
                               {"d", true}}}}}}}}});
  };
  EXPECT_EQ(FitHarmonyTools(tool(1, nullptr, 3)), tool("1", "null", 3));
  EXPECT_EQ(FitHarmonyTools(tool("x", "y", "z")), tool("x", "y", "z"));
}

TEST(HarmonyChatTest, ATemplateOfHarmonyNamesItsMarkers) {
  const auto writes = [](const char* text) {
    return WritesHarmony(engine::ChatTemplate::FromText(text, "", ""));
  };
  EXPECT_TRUE(writes("<|start|>assistant<|channel|>final<|message|>"));
  EXPECT_FALSE(writes("<|start|>assistant<|message|>"));
  EXPECT_FALSE(writes("{{ messages }}"));
}

}  // namespace
}  // namespace winnow::server
