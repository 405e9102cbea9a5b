// What HTTP clients send: bodies to messages, and keys to names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <fstream>
#include <sstream>

#include "server/api_keys.h"
#include "server/http/anthropic.h"
#include "server/http/openai_request.h"
#include "server/http/prefix_request.h"
#include "server/http/responses.h"
#include "server/strings.h"
#include "tests/unit/server/movable_clock.h"
#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::vector<std::pair<std::string, std::string>> Turns(const v1::ChatPrompt& chat) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const v1::ChatMessage& message : chat.messages()) {
    out.emplace_back(message.role(), message.content());
  }
  return out;
}

TEST(HttpRequestTest, NumbersAreWholeWhereTheyMustBe) {
  EXPECT_EQ(ToInt32(3), 3);
  EXPECT_EQ(ToInt32(3.0), 3);
  EXPECT_EQ(ToInt32(-2147483648.0), -2147483648);
  for (const nlohmann::json& bad :
       {nlohmann::json(3.5), nlohmann::json(2147483648), nlohmann::json("3"), nlohmann::json(1e300),
        nlohmann::json(true), nlohmann::json(nullptr)}) {
    EXPECT_EQ(ToInt32(bad), std::nullopt) << bad;
  }
}

TEST(HttpRequestTest, NewerNamesWinAndNullIsAbsent) {
  const auto request = ParseChatRequest(
      R"({"messages":[{"role":"developer","content":"d"},{"role":"user","content":[
          {"type":"text","text":"a"},{"type":"text","text":"b"}]}],
          "max_tokens":1,"max_completion_tokens":7,"stop":null,"seed":-1,"top_k":-1,"n":null,
          "logprobs":true,"stream":true,"stream_options":{"include_usage":true}})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(Turns(request->generate.chat()),
              ElementsAre(Pair("system", "d"), Pair("user", "a\nb")));
  EXPECT_EQ(request->generate.stopping().max_tokens(), 7);
  EXPECT_EQ(request->generate.sampling().seed(), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(request->generate.sampling().top_k(), 0);
  EXPECT_FALSE(request->generate.has_n());
  EXPECT_EQ(request->generate.top_logprobs(), 0);
  EXPECT_TRUE(request->stream);
  EXPECT_TRUE(request->include_usage);
}

TEST(HttpRequestTest, SeveralPromptsHaveTheSameOptions) {
  const auto request = ParseCompletionRequest(
      R"({"prompt":["a",[1,2],"c"],"max_tokens":3,"seed":5,"add_special_tokens":false,"logprobs":2})");
  ASSERT_TRUE(request.ok()) << request.status();
  ASSERT_EQ(request->more_prompts.size(), 2);
  EXPECT_EQ(request->generate.text().text(), "a");
  EXPECT_THAT(request->more_prompts[0].tokens().ids(), ElementsAre(1, 2));
  EXPECT_EQ(request->more_prompts[1].text().text(), "c");
  EXPECT_FALSE(request->more_prompts[1].text().add_special_tokens());
  for (const v1::GenerateRequest& more : request->more_prompts) {
    EXPECT_EQ(more.stopping().max_tokens(), 3);
    EXPECT_EQ(more.sampling().seed(), 5);
    EXPECT_EQ(more.top_logprobs(), 2);
  }
  EXPECT_TRUE(ParseCompletionRequest(R"({"prompt":["a"]})")->more_prompts.empty());
  EXPECT_TRUE(ParseCompletionRequest(R"({"prompt":[1,2]})")->more_prompts.empty());
  // Together they are bounded, too.
  const std::string many = R"("max_tokens":30000,"logprobs":20)";
  EXPECT_TRUE(ParseCompletionRequest(R"({"prompt":["a"],)" + many + "}").ok());
  EXPECT_FALSE(ParseCompletionRequest(R"({"prompt":["a","b"],)" + many + "}").ok());
}

TEST(HttpRequestTest, AnEchoScoresThePromptWhereLogprobsAreAskedFor) {
  const auto scored =
      ParseCompletionRequest(R"({"prompt":"a","echo":true,"logprobs":1,"max_tokens":0})");
  ASSERT_TRUE(scored.ok()) << scored.status();
  EXPECT_TRUE(scored->echo && scored->drops_answer);
  EXPECT_EQ(scored->echo_logprobs, 1);
  EXPECT_FALSE(scored->prompt_logprobs.has_value());
  EXPECT_EQ(scored->generate.prompt_logprobs(), 1);
  EXPECT_EQ(scored->generate.stopping().max_tokens(), 1);
  const auto with_answer = ParseCompletionRequest(
      R"({"prompt":["a","b"],"echo":true,"logprobs":0,"max_tokens":9,"stop":"x"})");
  ASSERT_TRUE(with_answer.ok()) << with_answer.status();
  EXPECT_TRUE(with_answer->echo_logprobs == 0 && !with_answer->drops_answer);
  EXPECT_TRUE(with_answer->generate.has_prompt_logprobs());
  EXPECT_TRUE(with_answer->more_prompts[0].has_prompt_logprobs());
  const auto repeated =
      ParseCompletionRequest(R"({"prompt":"a","echo":true,"stream":true,"stop":"x"})");
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->echo && !repeated->drops_answer);
  EXPECT_FALSE(repeated->echo_logprobs || repeated->generate.has_prompt_logprobs());
  const auto without = ParseCompletionRequest(R"({"prompt":"a","logprobs":1,"max_tokens":0})");
  ASSERT_TRUE(without.ok()) << without.status();  // the validator refuses max_tokens
  EXPECT_FALSE(without->echo || without->echo_logprobs || without->drops_answer);
  EXPECT_EQ(without->generate.stopping().max_tokens(), 0);
  EXPECT_FALSE(
      ParseChatRequest(R"({"messages":[{"role":"user","content":"a"}],"echo":true})").ok());
}

TEST(HttpRequestTest, PromptLogprobsScoreThePromptByThemselvesOrBesideAnEcho) {
  const auto alone = ParseCompletionRequest(R"({"prompt":"a","prompt_logprobs":0})");
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->prompt_logprobs, 0);
  EXPECT_TRUE(alone->generate.has_prompt_logprobs() && !alone->echo_logprobs);
  const auto chat =
      ParseChatRequest(R"({"messages":[{"role":"user","content":"a"}],"prompt_logprobs":3})");
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ(chat->generate.prompt_logprobs(), 3);
  // The engine is asked for what both need.
  for (const auto& [echoed, own] : {std::pair(1, 5), std::pair(5, 1)}) {
    const auto both =
        ParseCompletionRequest(R"({"prompt":"a","echo":true,"logprobs":)" + std::to_string(echoed) +
                               R"(,"prompt_logprobs":)" + std::to_string(own) + "}");
    ASSERT_TRUE(both.ok()) << both.status();
    EXPECT_TRUE(both->echo_logprobs == echoed && both->prompt_logprobs == own);
    EXPECT_EQ(both->generate.prompt_logprobs(), 5);
  }
  for (const char* const refused :
       {R"({"prompt":"a","prompt_logprobs":1,"stream":true})",
        R"({"prompt":"a","prompt_logprobs":-1,"echo":true,"logprobs":2})",
        R"({"prompt":"a","prompt_logprobs":true})", R"({"prompt":"a","prompt_logprobs":1.5})"}) {
    const auto status = ParseCompletionRequest(refused).status();
    EXPECT_NE(status.message().find("prompt_logprobs"), status.message().npos) << status;
  }
}

TEST(HttpRequestTest, PrefixesTakeATextIdsOrAChat) {
  const auto text = ParsePutPrefixBody(
      R"({"prompt":"a","add_special_tokens":false,"pinned":true,"ttl_seconds":5,"model":"m"})");
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->model, "m");
  EXPECT_EQ(text->request.text().text(), "a");
  EXPECT_FALSE(text->request.text().add_special_tokens());
  EXPECT_TRUE(text->request.pinned());
  EXPECT_EQ(text->request.ttl_seconds(), 5);
  const auto ids = ParsePutPrefixBody(R"({"prompt":[1,2]})");
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_THAT(ids->request.tokens().ids(), ElementsAre(1, 2));
  EXPECT_FALSE(ids->request.pinned());
  const auto chat = ParsePutPrefixBody(R"({"messages":[{"role":"developer","content":"d"}]})");
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_THAT(Turns(chat->request.chat()), ElementsAre(Pair("system", "d")));
  EXPECT_FALSE(chat->request.chat().has_add_generation_prompt());
  for (const char* const bad :
       {R"({"prompt":"a","ttl":5})", R"({"prompt":"a","messages":[]})", R"({"prompt":["a","b"]})",
        R"({"pinned":true})", R"({"prompt":"a","pinned":1})", "[]", ""}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParsePutPrefixBody(bad).status())) << bad;
  }
}

TEST(HttpRequestTest, APinSaysWhatItChanges) {
  const auto pin = ParsePinPrefixBody(R"({"pinned":false})");
  ASSERT_TRUE(pin.ok()) << pin.status();
  EXPECT_TRUE(pin->has_pinned() && !pin->pinned() && !pin->has_ttl_seconds());
  const auto ttl = ParsePinPrefixBody(R"({"ttl_seconds":0})");
  ASSERT_TRUE(ttl.ok()) << ttl.status();
  EXPECT_TRUE(ttl->has_ttl_seconds() && !ttl->has_pinned());
  for (const char* const bad : {"{}", R"({"pinned":null})", R"({"pinnd":true})", "3"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParsePinPrefixBody(bad).status())) << bad;
  }
}

TEST(HttpRequestTest, ErrorsDoNotRepeatThePrompt) {
  const auto request = ParseChatRequest("{\"messages\": \"" + std::string(100000, 's') + "\n\"}");
  ASSERT_FALSE(request.ok());
  EXPECT_LT(request.status().message().size(), 300);
}

TEST(HttpRequestTest, TheValidatorsFieldsHaveTheClientsNames) {
  EXPECT_EQ(OpenAiField("sampling.top_p", true), "top_p");
  EXPECT_EQ(OpenAiField("stopping.stop_strings[3]", true), "stop[3]");
  EXPECT_EQ(OpenAiField("stopping.max_tokens", false), "max_tokens");
  EXPECT_EQ(OpenAiField("chat.messages[1].role", true), "messages[1].role");
  EXPECT_EQ(OpenAiField("tokens.ids[1]", false), "prompt[1]");
  EXPECT_EQ(OpenAiField("policy", true), "winnow.policy");
  EXPECT_EQ(OpenAiField("top_logprobs", false), "logprobs");
}

TEST(HttpRequestTest, CacheOptionsOfEveryApi) {
  const std::string own =
      R"("winnow":{"cache":{"use":false,"store":true,"priority":5,"ttl_seconds":60,"salt":"x"}})";
  const std::string messages = R"("messages":[{"role":"user","content":"a"}],)";
  const auto chat = ParseChatRequest("{" + messages + own + "}");
  const auto anthropic = ParseAnthropicRequest("{\"max_tokens\":4," + messages + own + "}", false);
  const auto responses = ParseResponsesRequest("{\"input\":\"a\"," + own + "}");
  ASSERT_TRUE(chat.ok() && anthropic.ok() && responses.ok());
  for (const v1::GenerateRequest& request :
       {chat.value().generate, anthropic.value().generate, responses.value().generate}) {
    const v1::CacheOptions& cache = request.cache();
    EXPECT_FALSE(cache.use());
    EXPECT_TRUE(cache.has_store() && cache.store());
    EXPECT_EQ(cache.priority(), 5);
    EXPECT_EQ(cache.ttl_seconds(), 60);
    EXPECT_EQ(cache.salt(), "x");
  }
  EXPECT_FALSE(ParseChatRequest("{" + messages + R"("n":1})")->generate.has_cache());
  // vLLM's name for the salt.
  EXPECT_EQ(ParseChatRequest("{" + messages + R"("cache_salt":"y"})")->generate.cache().salt(),
            "y");
  EXPECT_FALSE(ParseChatRequest("{" + messages + R"("cache_salt":""})")->generate.has_cache());
  EXPECT_TRUE(ParseChatRequest("{" + messages + R"("cache_salt":"x",)" + own + "}").ok());
  const auto refused = ParseChatRequest("{" + messages + R"("cache_salt":"y",)" + own + "}");
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("cache_salt"));
  EXPECT_THAT(std::string(ParseChatRequest("{" + messages + R"("winnow":{"cache":{"prio":1}}})")
                              .status()
                              .message()),
              HasSubstr("winnow.cache.prio"));
}

TEST(HttpRequestTest, FlatOptionsOfEveryApi) {
  const std::string flat =
      R"("vllm_xargs":{"winnow_policy":"dense","winnow_exactness":"exact","winnow_cache_use":false,
         "winnow_cache_store":true,"winnow_cache_priority":5,"winnow_cache_ttl_seconds":60,"winnow_cache_salt":"x"})";
  const std::string nested = R"("winnow":{"policy":"dense","exactness":"exact",
      "cache":{"use":false,"store":true,"priority":5,"ttl_seconds":60,"salt":"x"}})";
  const std::string messages = R"("messages":[{"role":"user","content":"a"}])";
  const auto parsed = [&](const std::string& options) {
    const auto chat = ParseChatRequest("{" + messages + options + "}");
    const auto completion = ParseCompletionRequest("{\"prompt\":\"a\"" + options + "}");
    const auto anthropic =
        ParseAnthropicRequest("{\"max_tokens\":4," + messages + options + "}", false);
    const auto responses = ParseResponsesRequest("{\"input\":\"a\"" + options + "}");
    std::vector<std::string> requests;
    for (const absl::Status& status :
         {chat.status(), completion.status(), anthropic.status(), responses.status()}) {
      EXPECT_TRUE(status.ok()) << options << status;
    }
    if (chat.ok()) requests.push_back(chat->generate.DebugString());
    if (completion.ok()) requests.push_back(completion->generate.DebugString());
    if (anthropic.ok()) requests.push_back(anthropic->generate.DebugString());
    if (responses.ok()) requests.push_back(responses->generate.DebugString());
    return requests;
  };
  const auto expected = parsed("," + nested);
  EXPECT_EQ(parsed("," + flat), expected);
  EXPECT_EQ(parsed("," + flat + "," + nested + R"(,"cache_salt":"x")"), expected);
  EXPECT_EQ(parsed(R"(,"vllm_xargs":{})"), parsed(""));
  EXPECT_EQ(parsed(R"(,"vllm_xargs":null)"), parsed(""));
}

TEST(HttpRequestTest, FlatOptionsThatAreUnknownOrContradictAreRefusedByName) {
  const std::string begin = R"({"messages":[{"role":"user","content":"a"}],)";
  const std::string nested = R"("winnow":{"policy":"dense","exactness":"exact",
      "cache":{"use":false,"store":true,"priority":5,"ttl_seconds":60,"salt":"x"}},)";
  for (const auto& [extra, named] : std::vector<std::pair<std::string, std::string>>{
           {R"({"logits_processor":"x"})", "vllm_xargs.logits_processor"},
           {R"({"winnow_polcy":"dense"})", "vllm_xargs.winnow_polcy"},
           {R"({"winnow_policy":7})", "vllm_xargs.winnow_policy"},
           {R"({"winnow_cache_use":"no"})", "vllm_xargs.winnow_cache_use"},
           {R"({"winnow_cache_priority":1.5})", "vllm_xargs.winnow_cache_priority"},
           {R"(["winnow_policy"])", "vllm_xargs"},
           {R"({"winnow_policy":"window"})", "vllm_xargs.winnow_policy"},
           {R"({"winnow_exactness":"fast"})", "vllm_xargs.winnow_exactness"},
           {R"({"winnow_cache_use":true})", "vllm_xargs.winnow_cache_use"},
           {R"({"winnow_cache_store":false})", "vllm_xargs.winnow_cache_store"},
           {R"({"winnow_cache_priority":4})", "vllm_xargs.winnow_cache_priority"},
           {R"({"winnow_cache_ttl_seconds":61})", "vllm_xargs.winnow_cache_ttl_seconds"},
           {R"({"winnow_cache_salt":"y"})", "vllm_xargs.winnow_cache_salt"}}) {
    const auto request = ParseChatRequest(begin + nested + "\"vllm_xargs\":" + extra + "}");
    ASSERT_FALSE(request.ok()) << extra;
    const std::string message(request.status().message());
    EXPECT_THAT(message, HasSubstr(named + ": ")) << extra;
  }
  const auto salts =
      ParseChatRequest(begin + R"("cache_salt":"x","vllm_xargs":{"winnow_cache_salt":"y"}})");
  EXPECT_THAT(std::string(salts.status().message()), HasSubstr("vllm_xargs.winnow_cache_salt"));
  const auto close = ParseChatRequest(begin + R"("vllm_xargs":{"winnow_polcy":"dense"}})");
  EXPECT_THAT(std::string(close.status().message()), HasSubstr("winnow_policy"));
}

TEST(HttpRequestTest, WhatChangesWithEveryRequestIsDropped) {
  const auto request = ParseAnthropicRequest(
      R"({"max_tokens":4,"system":[{"type":"text","text":"x-anthropic-billing-header: v=1; id=9"},
          {"type":"text","text":"Be brief."}],
          "messages":[{"role":"user","content":[
            {"type":"text","text":"<total_tokens>1234 tokens left</total_tokens>\n"},
            {"type":"text","text":"What is <total_tokens>5 tokens left</total_tokens>?"}]}]})",
      false);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(Turns(request->generate.chat()),
              ElementsAre(Pair("system", "Be brief."),
                          Pair("user", "What is <total_tokens>5 tokens left</total_tokens>?")));
  // A header alone leaves nothing; one that is not the first block is the user's own.
  const auto alone = ParseAnthropicRequest(
      R"({"max_tokens":4,"system":"x-anthropic-billing-header: v=1",
          "messages":[{"role":"user","content":"x-anthropic-billing-header: mine"}]})",
      false);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_THAT(Turns(alone->generate.chat()),
              ElementsAre(Pair("user", "x-anthropic-billing-header: mine")));
  EXPECT_FALSE(ParseAnthropicRequest(R"({"messages":[]})", false).ok());  // no max_tokens
  EXPECT_TRUE(ParseAnthropicRequest(R"({"messages":[]})", true).ok());
}

// A request with two tools that are held back, and what the search for them gave.
absl::StatusOr<AnthropicRequest> Searched(const std::string& found,
                                          const std::string& more = R"("max_tokens":4)") {
  ModelHabits habits;
  habits.tools = ToolFormat::kHermes;
  return ParseAnthropicRequest(
      R"({"tools":[{"name":"search","input_schema":{"type":"object"}},
          {"name":"fetch","description":"Reads.","defer_loading":true,"input_schema":{"type":"object"}},
          {"name":"spare","defer_loading":true,"strict":true,"input_schema":{"type":"object"}}],
          "messages":[{"role":"user","content":"u"},
          {"role":"assistant","content":[{"type":"tool_use","id":"1","name":"search","input":{}}]},
          {"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":)" +
          found + "}]}]," + more + "}",
      false, habits);
}

TEST(HttpRequestTest, ToolsThatAreHeldBackAreShownWhereTheyWereFound) {
  const auto none = Searched(R"("Nothing.")");
  ASSERT_TRUE(none.ok()) << none.status();
  ASSERT_EQ(none->generate.chat().tools_size(), 1);
  EXPECT_EQ(none->parser.names, std::vector<std::string>{"search"});
  EXPECT_FALSE(none->generate.has_structured_output()) << "a strict tool that is not there";

  const std::string reference = R"({"type":"tool_reference","tool_name":"fetch"})";
  const auto found =
      Searched(R"([{"type":"text","text":"See:"},)" + reference + "," + reference + "]");
  ASSERT_TRUE(found.ok()) << found.status();
  // The head of the prompt stays as it was.
  ASSERT_EQ(found->generate.chat().tools_size(), 1);
  EXPECT_EQ(found->generate.chat().tools(0), none->generate.chat().tools(0));
  EXPECT_EQ(found->parser.names, (std::vector<std::string>{"search", "fetch"}));
  const std::string shown =
      R"({"type":"function","function":{"name":"fetch","description":"Reads.","parameters":{"type":"object"}}})";
  // The definition once: as many references as a body holds must not make a prompt of many times its size.
  EXPECT_THAT(Turns(found->generate.chat()),
              ElementsAre(Pair("user", "u"), Pair("assistant", ""),
                          Pair("tool", "See:\n" + shown + "\nfetch")));
  // One that is shown anyway has only its name.
  const auto known = Searched(R"([{"type":"tool_reference","tool_name":"search"}])");
  ASSERT_TRUE(known.ok()) << known.status();
  EXPECT_EQ(known->generate.chat().messages(2).content(), "search");

  for (const char* bad : {R"([{"type":"tool_reference","tool_name":"other"}])",
                          R"([{"type":"tool_reference","tool_name":7}])",
                          R"([{"type":"tool_reference"}])", R"([{"type":"image"}])"}) {
    EXPECT_FALSE(Searched(bad).ok()) << bad;
  }
}

TEST(HttpRequestTest, WhatMustBeCalledIsNotHeldBack) {
  const std::string found = R"([{"type":"tool_reference","tool_name":"fetch"}])";
  const auto any = Searched(found, R"("max_tokens":4,"tool_choice":{"type":"any"})");
  ASSERT_TRUE(any.ok()) << any.status();
  const std::string& grammar = any->generate.structured_output().structural_tag();
  EXPECT_THAT(grammar, HasSubstr("search"));
  EXPECT_THAT(grammar, HasSubstr("fetch"));
  EXPECT_EQ(grammar.find("spare"), grammar.npos);
  const auto named =
      Searched(found, R"("max_tokens":4,"tool_choice":{"type":"tool","name":"spare"})");
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->parser.names, (std::vector<std::string>{"search", "fetch", "spare"}));
  EXPECT_THAT(named->generate.structured_output().structural_tag(), HasSubstr("spare"));
  ModelHabits habits;
  habits.tools = ToolFormat::kHermes;
  EXPECT_FALSE(
      ParseAnthropicRequest(
          R"({"tools":[{"name":"spare","defer_loading":true,"input_schema":{"type":"object"}}],
                       "messages":[{"role":"user","content":"u"}],"max_tokens":4,"tool_choice":{"type":"any"}})",
          false, habits)
          .ok());
}

TEST(HttpRequestTest, MessagesHaveAForm) {
  const std::string schema =
      R"({"type":"object","properties":{"z":{"type":"null"},"a":{"type":"null"}}})";
  for (const std::string field :
       {R"("output_config":{"effort":"low","format":)", R"("output_format":)"}) {
    const std::string end = field.find("config") == field.npos ? "" : "}";
    const auto request = ParseAnthropicRequest(
        R"({"max_tokens":4,"messages":[{"role":"user","content":"u"}],)" + field +
            R"({"type":"json_schema","schema":)" + schema + "}" + end + "}",
        false);
    ASSERT_TRUE(request.ok()) << request.status();
    EXPECT_EQ(request->generate.structured_output().json_schema(), schema);
    EXPECT_EQ(AnthropicField("structured_output", {}, request->structured_field),
              end.empty() ? "output_format.schema" : "output_config.format.schema");
    const auto bad =
        ParseAnthropicRequest(R"({"max_tokens":4,"messages":[{"role":"user","content":"u"}],)" +
                                  field + R"({"type":"yaml"})" + end + "}",
                              false);
    EXPECT_THAT(std::string(bad.status().message()), HasSubstr("yaml"));
  }
  const auto without = ParseAnthropicRequest(
      R"({"max_tokens":4,"messages":[{"role":"user","content":"u"}],"output_config":{"effort":"high"}})",
      false);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_FALSE(without->generate.has_structured_output());
}

TEST(HttpRequestTest, ResponsesTakeAConversationAndNoState) {
  const auto request = ParseResponsesRequest(
      R"({"instructions":"Be brief.","input":[
          {"type":"message","role":"developer","content":[{"type":"input_text","text":"d"}]},
          {"role":"user","content":"u"},{"type":"reasoning","summary":[]},
          {"role":"assistant","content":[{"type":"output_text","text":"a"}]}],
          "tools":[{"type":"web_search"},{"type":"namespace"}],"store":true,"max_output_tokens":3})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(Turns(request->generate.chat()),
              ElementsAre(Pair("system", "Be brief."), Pair("system", "d"), Pair("user", "u"),
                          Pair("assistant", "a")));
  EXPECT_EQ(request->generate.stopping().max_tokens(), 3);
  for (const char* bad : {R"({"input":"x","previous_response_id":"resp_1"})",
                          R"({"input":"x","tools":[{"type":"function","name":"f"}]})",
                          R"({"input":"x","text":{"format":{"type":"json_schema"}}})",
                          R"({"input":"x","text":{"format":{"type":7}}})",
                          R"({"input":[{"type":"function_call_output"}]})", R"({})"}) {
    EXPECT_FALSE(ParseResponsesRequest(bad).ok()) << bad;
  }
}

ModelHabits Harmony() {
  ModelHabits habits;
  habits.tools = ToolFormat::kHarmony;
  habits.reasoning = ReasoningFormat::kHarmony;
  habits.has_effort = true;
  habits.harmony = HarmonyTokens{
      .start = 1, .channel = 2, .message = 3, .end = 4, .constrain = {}, .ends_turn = {}};
  return habits;
}

TEST(HttpRequestTest, EffortsReachTheTemplateThatKnowsThem) {
  ModelHabits any = Harmony();
  any.harmony.reset();
  const auto chat = [](const std::string& fields, const ModelHabits& habits) {
    const auto request =
        ParseChatRequest(R"({"messages":[{"role":"user","content":"x"}],)" + fields + "}", habits);
    return request.ok() ? request->generate.chat().template_options()
                        : std::string(request.status().message());
  };
  EXPECT_EQ(chat(R"("reasoning_effort":"high")", Harmony()), R"({"reasoning_effort":"high"})");
  EXPECT_EQ(chat(R"("reasoning_effort":null)", Harmony()), "");
  EXPECT_EQ(chat(R"("reasoning_effort":"low","chat_template_kwargs":{"a":1})", Harmony()),
            R"({"a":1,"reasoning_effort":"low"})");
  EXPECT_EQ(chat(R"("reasoning_effort":"low","chat_template_kwargs":{"reasoning_effort":"low"})",
                 Harmony()),
            R"({"reasoning_effort":"low"})");
  EXPECT_EQ(chat(R"("chat_template_kwargs":{"reasoning_effort":"extreme"})", Harmony()),
            R"({"reasoning_effort":"extreme"})");
  EXPECT_THAT(chat(R"("reasoning_effort":"low","chat_template_kwargs":{"reasoning_effort":"high"})",
                   Harmony()),
              HasSubstr("reasoning_effort: contradicts chat_template_kwargs"));
  for (const char* const effort : {"none", "minimal", "xhigh"}) {
    EXPECT_THAT(chat(Concat(R"("reasoning_effort":")", effort, "\""), Harmony()),
                HasSubstr("low, medium and high"));
  }
  // Another template's words are its own; one that has none is not asked.
  EXPECT_EQ(chat(R"("reasoning_effort":"minimal")", any), R"({"reasoning_effort":"minimal"})");
  EXPECT_EQ(chat(R"("reasoning_effort":"none")", any),
            R"({"enable_thinking":false,"reasoning_effort":"none"})");
  EXPECT_EQ(chat(R"("reasoning_effort":"high")", {}), "");
  EXPECT_EQ(chat(R"("reasoning_effort":"none")", {}), R"({"enable_thinking":false})");
  EXPECT_EQ(chat(R"("reasoning_effort":"none","chat_template_kwargs":{"a":1})", {}), R"({"a":1})");

  const auto options = [](const auto& request) {
    return request.ok() ? request->generate.chat().template_options()
                        : std::string(request.status().message());
  };
  EXPECT_EQ(options(ParseResponsesRequest(
                R"({"input":"x","reasoning":{"effort":"high","summary":"auto"}})", Harmony())),
            R"({"reasoning_effort":"high"})");
  ModelHabits unparsed;  // as with --reasoning-parser none
  unparsed.has_effort = true;
  EXPECT_EQ(
      options(ParseResponsesRequest(R"({"input":"x","reasoning":{"effort":"low"}})", unparsed)),
      R"({"reasoning_effort":"low"})");
  EXPECT_THAT(
      options(ParseResponsesRequest(R"({"input":"x","reasoning":{"effort":"none"}})", Harmony())),
      HasSubstr("reasoning.effort"));
  const auto messages = [&](const std::string& config, const ModelHabits& habits) {
    return options(ParseAnthropicRequest(
        R"({"max_tokens":1,"messages":[{"role":"user","content":"x"}],"output_config":)" + config +
            "}",
        false, habits));
  };
  EXPECT_EQ(messages(R"({"effort":"low"})", Harmony()), R"({"reasoning_effort":"low"})");
  EXPECT_EQ(messages(R"({"effort":"max"})", Harmony()), R"({"reasoning_effort":"high"})");
  EXPECT_EQ(messages("{}", Harmony()), "");
  EXPECT_THAT(messages(R"({"effort":"some"})", Harmony()), HasSubstr("output_config.effort"));
  EXPECT_EQ(messages(R"({"effort":"max"})", {}), "");
}

TEST(HttpRequestTest, AnAnswerInHarmonyIsReadAsOneWhateverIsOffered) {
  const auto parser = [](const std::string& fields) {
    const auto request = ParseChatRequest(
        R"({"messages":[{"role":"user","content":"x"}])" + fields + "}", Harmony());
    EXPECT_TRUE(request.ok()) << request.status();
    EXPECT_EQ(request->parser.reasoning, ReasoningFormat::kHarmony);
    return request->parser;
  };
  EXPECT_EQ(parser("").tools, ToolFormat::kNone)
      << "a call would be told to a client that offers none";
  constexpr char kTool[] = R"(,"tools":[{"type":"function","function":{"name":"f"}}])";
  EXPECT_EQ(parser(kTool).tools, ToolFormat::kHarmony);
  EXPECT_THAT(parser(kTool).names, ElementsAre("f"));
  EXPECT_EQ(parser(std::string(kTool) + R"(,"tool_choice":"none")").tools, ToolFormat::kNone);
  EXPECT_FALSE(parser(kTool).shows_control_tokens);
  EXPECT_TRUE(parser(R"(,"skip_special_tokens":false)").shows_control_tokens);
  // Tools of the template's own, which a client has it show.
  const AnswerParserOptions own =
      parser(R"(,"chat_template_kwargs":{"builtin_tools":["python","browser"]})");
  EXPECT_EQ(own.tools, ToolFormat::kHarmony);
  EXPECT_THAT(own.names, ElementsAre("python", "browser.search", "browser.open", "browser.find"));
  EXPECT_EQ(parser(R"(,"chat_template_kwargs":{"builtin_tools":"x"})").tools, ToolFormat::kNone);
}

TEST(HttpRequestTest, ThoughtsOfResponsesBelongToWhatFollowsThem) {
  const auto request = ParseResponsesRequest(
      R"({"input":[{"role":"user","content":"u"},
          {"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"a"},{"type":"reasoning_text","text":"b"}]},
          {"type":"function_call","call_id":"1","name":"f","arguments":"{}"},
          {"type":"function_call_output","call_id":"1","output":"r"},
          {"type":"reasoning","summary":[],"content":null,"encrypted_content":"x"},
          {"type":"reasoning","content":[{"type":"reasoning_text","text":"c"}]},
          {"role":"assistant","content":[{"type":"output_text","text":"said"}]},
          {"type":"reasoning","content":[{"type":"reasoning_text","text":"d"}]},
          {"role":"user","content":"v"}, {"role":"assistant","content":"w"}]})",
      Harmony());
  ASSERT_TRUE(request.ok()) << request.status();
  const v1::ChatPrompt& chat = request->generate.chat();
  ASSERT_EQ(chat.messages_size(), 6);
  EXPECT_EQ(chat.messages(1).reasoning(), "a\n\nb");
  EXPECT_EQ(chat.messages(1).tool_calls_size(), 1);
  EXPECT_EQ(chat.messages(3).reasoning(), "c");
  EXPECT_EQ(chat.messages(3).content(), "said");
  EXPECT_EQ(chat.messages(5).reasoning(), "");
  EXPECT_FALSE(
      ParseResponsesRequest(
          R"({"input":[{"type":"reasoning","content":[{"type":"reasoning_text"}]}]})", Harmony())
          .ok());
}

class ApiKeysTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) { std::ofstream(path_, std::ios::trunc) << text; }
  absl::StatusOr<std::unique_ptr<ApiKeys>> Load() { return ApiKeys::Load(path_, log_, clock_); }

  // Of "secret" and of "other".
  static constexpr char kSecret[] =
      "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
  static constexpr char kOther[] =
      "D9298A10D1B0735837DC4BD85DAC641B0F3CEF27A47E5D53A54F2F3F5B2FCFFA";

  TempDir directory_;
  const std::string path_ = directory_.path() + "/keys";
  MovableClock clock_;
  std::ostringstream text_;
  Log log_{"debug", "json", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)};
};

TEST_F(ApiKeysTest, AKeyHasItsName) {
  Write(std::string("# who may ask\n\nalice ") + kSecret + "\r\n  bob\t" + kOther + "\n");
  const auto keys = Load();
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_EQ((*keys)->NameOf("secret"), "alice");
  EXPECT_EQ((*keys)->NameOf("other"), "bob");
  for (const char* bad : {"", "Secret", "secret ", "secre", kSecret}) {
    EXPECT_EQ((*keys)->NameOf(bad), std::nullopt) << bad;
  }
}

TEST_F(ApiKeysTest, AFileThatIsNotGoodNamesItsLine) {
  for (const std::string& bad :
       {std::string("alice\n"), std::string("alice 12\n"), std::string("al/ice ") + kSecret,
        std::string("a b ") + kSecret, std::string("alice ") + std::string(64, 'g')}) {
    Write("# first\n" + bad);
    EXPECT_THAT(Load().status().message(), HasSubstr("keys:2: ")) << bad;
  }
  Write("# none\n");
  EXPECT_THAT(Load().status().message(), HasSubstr("holds no key"));
}

TEST_F(ApiKeysTest, AFileThatChangesIsReadAgainIfItIsGood) {
  Write(std::string("alice ") + kSecret + "\n");
  const auto keys = Load();
  ASSERT_TRUE(keys.ok()) << keys.status();
  Write(std::string("bobby ") + kOther + "\nalice " + kSecret);
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_EQ((*keys)->NameOf("other"), "bobby");
  Write("nonsense");
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_EQ((*keys)->NameOf("other"), "bobby");
  EXPECT_THAT(text_.str(), HasSubstr("must be a name and a SHA-256 hash"));
  EXPECT_THAT(text_.str(), ::testing::Not(HasSubstr(kOther)));
}

}  // namespace
}  // namespace winnow::server
