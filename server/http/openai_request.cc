#include "server/http/openai_request.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/numbers.h"
#include "engine/base/status_macros.h"
#include "server/http/harmony_request.h"
#include "server/http/structured_request.h"
#include "server/http/tools_request.h"
#include "server/strings.h"
#include "server/suggest.h"
#include "server/utf8.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxRenderPrompts = 1024;
constexpr size_t kMaxPrompts = 128;  // of a request that generates

// What would change the answer and is not done here.
constexpr std::array<std::pair<std::string_view, std::string_view>, 14> kRefused = {{
    {"chat_template", "is not taken from requests: the model's own is used"},
    {"documents", "is not served"},
    {"continue_final_message", "is not served"},
    {"functions", "is not served"},
    {"function_call", "is not served"},
    {"suffix", "is not served"},
    {"bad_words", "is not served"},
    {"allowed_token_ids", "is not served"},
    {"truncate_prompt_tokens", "is not served: a prompt that is too long is refused"},
    {"use_beam_search", "is not served"},
    {"return_tokens_as_token_ids", "is not served"},
    {"thinking_token_budget", "is not served: max_tokens bounds thoughts and answer together"},
    {"logprob_token_ids", "is not served"},
    {"kv_transfer_params", "is not served: KV stays with the server that computed it"},
}};

std::string Quoted(std::string_view text) {
  return Concat("\"", CleanUtf8(text, kMaxShownBytes), "\"");
}

void TakeStop(JsonFields& fields, v1::StoppingOptions& out) {
  Json* const stop = fields.Find("stop");
  if (stop == nullptr) return;
  if (stop->is_string()) {
    out.add_stop_strings(std::move(stop->get_ref<std::string&>()));
    return;
  }
  if (!stop->is_array()) {
    fields.Add("stop", "must be a string or a list of strings");
    return;
  }
  // One more than may be: the validator says how many that is.
  for (size_t i = 0; i < stop->size() && i <= kMaxStopStrings; ++i) {
    Json& text = (*stop)[i];
    if (text.is_string()) {
      out.add_stop_strings(std::move(text.get_ref<std::string&>()));
    } else {
      fields.Add(Concat("stop[", i, "]"), "must be a string");
    }
  }
}

void TakeStopTokens(JsonFields& fields, v1::StoppingOptions& out) {
  Json* const ids = fields.Array("stop_token_ids");
  if (ids == nullptr) return;
  for (size_t i = 0; i < ids->size() && i <= kMaxStopTokenIds; ++i) {
    const std::optional<int32_t> id = ToInt32((*ids)[i]);
    if (id.has_value()) {
      out.add_stop_token_ids(*id);
    } else {
      fields.Add(Concat("stop_token_ids[", i, "]"), "must be a token id");
    }
  }
}

void TakeStopping(JsonFields& fields, v1::StoppingOptions& out) {
  // The newer name wins, as at OpenAI.
  const std::optional<int32_t> max_tokens = fields.Int32("max_tokens");
  const std::optional<int32_t> newer = fields.Int32("max_completion_tokens");
  if (newer.has_value()) {
    out.set_max_tokens(*newer);
  } else if (max_tokens.has_value()) {
    out.set_max_tokens(*max_tokens);
  }
  if (const auto min_tokens = fields.Int32("min_tokens")) out.set_min_tokens(*min_tokens);
  if (const auto ignore = fields.Bool("ignore_eos")) out.set_ignore_eos(*ignore);
  if (const auto include = fields.Bool("include_stop_str_in_output")) {
    out.set_include_stop(*include);
  }
  TakeStop(fields, out);
  TakeStopTokens(fields, out);
}

void RefuseModalities(JsonFields& fields) {
  if (const Json* const modalities = fields.Array("modalities")) {
    if (*modalities != Json::array({"text"}) && !modalities->empty()) {
      fields.Add("modalities", "text is all there is");
    }
  }
}

// What both routes have.
void TakeCommon(std::string_view body, JsonFields& fields, OpenAiRequest& out) {
  for (const auto& [name, why] : kRefused) fields.Refuse(name, why);
  RefuseModalities(fields);
  out.structured_field = TakeStructuredOutput(body, fields, out.generate);
  if (auto model = fields.String("model")) out.model = *std::move(model);
  TakeSampling(fields, *out.generate.mutable_sampling());
  TakeStopping(fields, *out.generate.mutable_stopping());
  if (const auto n = fields.Int32("n")) out.generate.set_n(*n);
  if (const auto best_of = fields.Int32("best_of")) {
    if (*best_of != (out.generate.has_n() ? out.generate.n() : 1)) {
      fields.Add("best_of", "is not served: it may only repeat n");
    }
  }
  if (const auto skip = fields.Bool("skip_special_tokens")) {
    out.generate.set_show_special_tokens(!*skip);
  }
  if (fields.Bool("return_token_ids").value_or(false)) {
    fields.Add("return_token_ids", "is not served");
  }
  out.stream = fields.Bool("stream").value_or(false);
  if (Json* const options = fields.Object("stream_options")) {
    JsonFields stream(*options, fields.violations(), "stream_options.");
    out.include_usage = stream.Bool("include_usage").value_or(false);
    out.continuous_usage = stream.Bool("continuous_usage_stats").value_or(false);
    if (!out.stream && (out.include_usage || out.continuous_usage)) {
      fields.Add("stream_options", "is for stream: true");
    }
  }
  TakeWinnowOptions(fields, out.generate);
  out.prompt_logprobs = fields.Int32("prompt_logprobs");
  if (out.prompt_logprobs.has_value()) {
    out.generate.set_prompt_logprobs(*out.prompt_logprobs);
    if (out.stream) fields.Add("prompt_logprobs", "is not served beside stream");
    if (*out.prompt_logprobs < 0) fields.Add("prompt_logprobs", "must not be negative");
  }
}

// An answer with log-probabilities is held whole unless it is streamed.
void BoundWhole(JsonFields& fields, const OpenAiRequest& request) {
  const v1::GenerateRequest& generate = request.generate;
  if (request.stream || !generate.has_top_logprobs()) return;
  const int64_t n = generate.has_n() ? generate.n() : 1;
  const int64_t tokens = generate.stopping().max_tokens();
  const auto prompts = static_cast<int64_t>(1 + request.more_prompts.size());
  const int64_t all = prompts * n * tokens * (1 + generate.top_logprobs());
  if (n > 0 && tokens > 0 && all > kMaxWholeLogprobs) {
    fields.Add("top_logprobs",
               Concat("asks for ", all, " log-probabilities in one answer, at most ",
                      kMaxWholeLogprobs, " are given: use stream"));
  }
}

// Calls of an earlier turn.
void TakeToolCalls(JsonFields& fields, v1::ChatMessage& out) {
  Json* const calls = fields.Array("tool_calls");
  for (size_t i = 0; calls != nullptr && i < calls->size() && i <= kMaxTools; ++i) {
    const std::string path = Concat("tool_calls[", i, "]");
    Json& call = (*calls)[i];
    const auto function = call.is_object() ? call.find("function") : call.end();
    if (!call.is_object() || function == call.end() || !function->is_object()) {
      fields.Add(path, "must be {\"id\", \"type\": \"function\", \"function\": {...}}");
      continue;
    }
    v1::ToolCall& taken = *out.add_tool_calls();
    JsonFields own(*function, fields.violations(), Concat(fields.Path(path), ".function."));
    taken.set_id(
        JsonFields(call, fields.violations(), fields.Path(path) + ".").String("id").value_or(""));
    taken.set_name(own.String("name").value_or(""));
    taken.set_arguments(own.String("arguments").value_or(""));
  }
}

void TakeMessage(Json& message, const std::string& path, Violations& violations,
                 v1::ChatMessage& out) {
  if (!message.is_object()) {
    violations.Add(path, "must be an object");
    return;
  }
  JsonFields fields(message, violations, path + ".");
  std::string role = fields.String("role").value_or("");
  if (role == "developer") role = "system";  // OpenAI's newer name for it
  out.set_role(std::move(role));
  fields.Refuse("function_call", "is not served: tool_calls is its newer form");
  TakeToolCalls(fields, out);
  if (auto id = fields.String("tool_call_id")) out.set_tool_call_id(*std::move(id));
  if (auto name = fields.String("name"); name && out.role() == "tool")
    out.set_name(*std::move(name));
  for (const char* const name : {"reasoning_content", "reasoning"}) {
    if (auto reasoning = fields.String(name); reasoning && out.role() == "assistant") {
      out.set_reasoning(*std::move(reasoning));
    }
  }
  Json* const content = fields.Find("content");
  if (content != nullptr) {
    out.set_content(TakeContent(*content, fields.Path("content"), violations));
  } else if (out.tool_calls_size() == 0) {
    fields.Add("content", "must be set");
  }
}

void TakeTokens(JsonFields& fields, const Json& ids, v1::TokenPrompt& out) {
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::optional<int32_t> id = ToInt32(ids[i]);
    if (!id.has_value()) {
      fields.Add(Concat("prompt[", i, "]"), "must be a token id");
      return;
    }
    out.add_ids(*id);
  }
}

// A text or token ids.
void TakeOnePrompt(JsonFields& fields, Json& prompt, std::optional<bool> special,
                   v1::GenerateRequest& out) {
  if (prompt.is_string()) {
    out.mutable_text()->set_text(std::move(prompt.get_ref<std::string&>()));
    if (special.has_value()) out.mutable_text()->set_add_special_tokens(*special);
  } else if (prompt.is_array()) {
    TakeTokens(fields, prompt, *out.mutable_tokens());
  } else {
    fields.Add("prompt", "must be a string or a list of token ids");
  }
}

// The prompt before the answer, and its log-probabilities before the answer's.
void TakeEcho(JsonFields& fields, OpenAiRequest& out) {
  if (!fields.Bool("echo").value_or(false)) return;
  out.echo = true;
  v1::StoppingOptions& stopping = *out.generate.mutable_stopping();
  if (stopping.has_max_tokens() && stopping.max_tokens() == 0) {
    out.drops_answer = true;
    stopping.set_max_tokens(1);
  }
  if (!out.generate.has_top_logprobs()) return;
  if (out.stream) {
    fields.Add("stream", "is not served beside echo and logprobs, which score a prompt");
  }
  const int32_t count = out.generate.top_logprobs();
  out.echo_logprobs = count;
  // The validator refuses a count that is out of range, as the answer's.
  if (count < 0 || count > kMaxTopLogprobs) return;
  out.generate.set_prompt_logprobs(std::max(count, out.prompt_logprobs.value_or(0)));
}

bool IsListOfPrompts(const Json& prompt) {
  return prompt.is_array() && !prompt.empty() && !prompt.front().is_number();
}

// A text, token ids, or a list of one of them.
void TakePrompt(JsonFields& fields, v1::GenerateRequest& out) {
  Json* prompt = fields.Find("prompt");
  const std::optional<bool> special = fields.Bool("add_special_tokens");
  if (prompt == nullptr) {
    fields.Add("prompt", "must be set");
    return;
  }
  if (IsListOfPrompts(*prompt)) {
    if (prompt->size() > 1) {
      fields.Add("prompt", Concat("has ", prompt->size(), " prompts; a request takes one"));
      return;
    }
    prompt = &prompt->front();
  }
  TakeOnePrompt(fields, *prompt, special, out);
}

// The same, or several of them.
void TakePrompts(JsonFields& fields, OpenAiRequest& out) {
  Json* const prompt = fields.Find("prompt");
  if (prompt == nullptr || !IsListOfPrompts(*prompt)) return TakePrompt(fields, out.generate);
  if (prompt->size() > kMaxPrompts) {
    fields.Add("prompt",
               Concat("has ", prompt->size(), " prompts, may have at most ", kMaxPrompts));
    return;
  }
  const std::optional<bool> special = fields.Bool("add_special_tokens");
  for (size_t i = 0; i < prompt->size(); ++i) {
    TakeOnePrompt(fields, (*prompt)[i], special,
                  i == 0 ? out.generate : out.more_prompts.emplace_back());
  }
}

void TakeMessages(JsonFields& fields, v1::ChatPrompt& chat) {
  if (Json* const messages = fields.Array("messages")) {
    for (size_t i = 0; i < messages->size() && i <= kMaxMessages; ++i) {
      TakeMessage((*messages)[i], Concat("messages[", i, "]"), fields.violations(),
                  *chat.add_messages());
    }
  }
  if (const auto open = fields.Bool("add_generation_prompt")) {
    chat.set_add_generation_prompt(*open);
  }
}

}  // namespace

std::string TakeContent(Json& content, const std::string& path, Violations& violations) {
  if (content.is_string()) return std::move(content.get_ref<std::string&>());
  if (!content.is_array()) {
    violations.Add(path, "must be a string or a list of parts");
    return "";
  }
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string part_path = Concat(path, "[", i, "]");
    if (!content[i].is_object()) {
      violations.Add(part_path, "must be an object");
      return "";
    }
    JsonFields part(content[i], violations, part_path + ".");
    const std::string type = part.String("type").value_or("");
    if (type != "text" && type != "input_text" && type != "output_text") {
      part.Add("type", Concat("is ", Quoted(type), "; only \"text\" is served"));
      return "";
    }
    const std::optional<std::string> piece = part.String("text");
    if (!piece.has_value()) {
      part.Add("text", "must be a string");
      return "";
    }
    if (i > 0) text += "\n";
    text += *piece;
  }
  return text;
}

void TakeSampling(JsonFields& fields, v1::SamplingOptions& out) {
  if (const auto value = fields.Number("temperature")) out.set_temperature(*value);
  if (const auto value = fields.Number("top_p")) out.set_top_p(*value);
  if (const auto value = fields.Number("min_p")) out.set_min_p(*value);
  // -1 is how other servers say off.
  if (const auto value = fields.Int32("top_k")) out.set_top_k(*value == -1 ? 0 : *value);
  if (const auto value = fields.Number("repetition_penalty")) out.set_repetition_penalty(*value);
  if (const auto value = fields.Number("presence_penalty")) out.set_presence_penalty(*value);
  if (const auto value = fields.Number("frequency_penalty")) out.set_frequency_penalty(*value);
  if (const auto value = fields.Seed("seed")) out.set_seed(*value);
  Json* const bias = fields.Object("logit_bias");
  if (bias == nullptr) return;
  for (const auto& [key, value] : bias->items()) {
    int32_t id = 0;
    const std::string name = Concat("logit_bias[", CleanUtf8(key, kMaxShownBytes), "]");
    if (!absl::SimpleAtoi(key, &id)) {
      fields.Add(name, "the key must be a token id");
    } else if (!value.is_number()) {
      fields.Add(name, "must be a number");
    } else {
      (*out.mutable_logit_bias())[id] = value.get<float>();
    }
    // One more than may be: the validator says how many that is.
    if (out.logit_bias_size() > kMaxLogitBias) return;
  }
}

void SetEffort(JsonFields& fields, std::string_view field, const std::string& effort,
               const ModelHabits& habits, v1::ChatPrompt& chat) {
  constexpr const char* kVariable = "reasoning_effort";
  if (effort.empty()) return;
  if (habits.harmony.has_value() && effort != "low" && effort != "medium" && effort != "high") {
    fields.Add(field,
               Concat("is ", Quoted(effort), "; low, medium and high are served with this model"));
    return;
  }
  Json options = Json::object();
  if (chat.template_options().empty()) {
    if (effort == "none") options["enable_thinking"] = false;
  } else {
    // It was dumped here, or is refused by the validator.
    options = Json::parse(chat.template_options(), nullptr, /*allow_exceptions=*/false);
    if (!options.is_object()) return;
  }
  if (habits.has_effort) {
    const auto set = options.find(kVariable);
    if (set != options.end() && *set != effort) {
      fields.Add(field, "contradicts chat_template_kwargs.reasoning_effort");
      return;
    }
    options[kVariable] = effort;
  }
  if (!options.empty()) {
    chat.set_template_options(options.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
}

void TakeTemplateOptions(JsonFields& fields, const ModelHabits& habits, v1::ChatPrompt& chat) {
  if (const Json* const options = fields.Object("chat_template_kwargs");
      options && !options->empty()) {
    chat.set_template_options(options->dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  SetEffort(fields, "reasoning_effort", fields.String("reasoning_effort").value_or(""), habits,
            chat);
}

namespace {

void RefuseUnknown(JsonFields& fields, const Json& object, const std::vector<std::string>& known) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      fields.Add(CleanUtf8(key, kMaxShownBytes), Concat("is not known", DidYouMean(key, known)));
    }
  }
}

void TakeCache(JsonFields& options, v1::GenerateRequest& out) {
  Json* const object = options.Object("cache");
  if (object == nullptr) return;
  JsonFields fields(*object, options.violations(), options.Path("cache."));
  RefuseUnknown(fields, *object, {"use", "store", "priority", "ttl_seconds", "salt"});
  v1::CacheOptions& cache = *out.mutable_cache();
  if (const auto use = fields.Bool("use")) cache.set_use(*use);
  if (const auto store = fields.Bool("store")) cache.set_store(*store);
  if (const auto priority = fields.Int32("priority")) cache.set_priority(*priority);
  if (const auto seconds = fields.Int32("ttl_seconds")) cache.set_ttl_seconds(*seconds);
  if (auto salt = fields.String("salt")) cache.set_salt(*std::move(salt));
}

// Takes an option under a second name, or refuses it if it differs from `first`, the value under the first name.
template <typename T, typename Set>
void TakeAgain(JsonFields& fields, std::string_view name, std::optional<T> value,
               std::string_view first_name, const std::optional<T>& first, Set set) {
  if (!value.has_value()) return;
  if (first.has_value() && *first != *value) {
    fields.Add(name, Concat("contradicts ", first_name));
  } else {
    set(*std::move(value));
  }
}

std::optional<std::string> UnlessEmpty(std::optional<std::string> text) {
  return text.has_value() && text->empty() ? std::nullopt : std::move(text);
}

void TakeSalt(JsonFields& fields, std::string_view name, v1::GenerateRequest& out) {
  TakeAgain(fields, name, UnlessEmpty(fields.String(name)), "winnow.cache.salt",
            UnlessEmpty(out.cache().salt()),
            [&](std::string salt) { out.mutable_cache()->set_salt(std::move(salt)); });
}

// Takes the options from vLLM's object for arguments of its extensions, which is flat. For clients that can send nothing
// else; other arguments would change the answer in vLLM, so they are refused.
void TakeFlatOptions(JsonFields& fields, const Json& object, v1::GenerateRequest& out) {
  RefuseUnknown(fields, object,
                {"winnow_policy", "winnow_exactness", "winnow_cache_use", "winnow_cache_store",
                 "winnow_cache_priority", "winnow_cache_ttl_seconds", "winnow_cache_salt"});
  TakeAgain(fields, "winnow_policy", fields.String("winnow_policy"), "winnow.policy",
            UnlessEmpty(out.policy()), [&](std::string text) { out.set_policy(std::move(text)); });
  TakeAgain(fields, "winnow_exactness", fields.String("winnow_exactness"), "winnow.exactness",
            UnlessEmpty(out.exactness()),
            [&](std::string text) { out.set_exactness(std::move(text)); });
  const v1::CacheOptions first = out.cache();
  const auto if_set = [](bool set, auto value) {
    return set ? std::optional(value) : std::nullopt;
  };
  TakeAgain(fields, "winnow_cache_use", fields.Bool("winnow_cache_use"), "winnow.cache.use",
            if_set(first.has_use(), first.use()),
            [&](bool use) { out.mutable_cache()->set_use(use); });
  TakeAgain(fields, "winnow_cache_store", fields.Bool("winnow_cache_store"), "winnow.cache.store",
            if_set(first.has_store(), first.store()),
            [&](bool store) { out.mutable_cache()->set_store(store); });
  TakeAgain(fields, "winnow_cache_priority", fields.Int32("winnow_cache_priority"),
            "winnow.cache.priority", if_set(first.has_priority(), first.priority()),
            [&](int32_t priority) { out.mutable_cache()->set_priority(priority); });
  TakeAgain(fields, "winnow_cache_ttl_seconds", fields.Int32("winnow_cache_ttl_seconds"),
            "winnow.cache.ttl_seconds",
            if_set(first.has_ttl_seconds(), static_cast<int32_t>(first.ttl_seconds())),
            [&](int32_t seconds) { out.mutable_cache()->set_ttl_seconds(seconds); });
  TakeSalt(fields, "winnow_cache_salt", out);
}

}  // namespace

void TakeWinnowOptions(JsonFields& fields, v1::GenerateRequest& out) {
  if (Json* const own = fields.Object("winnow")) {
    JsonFields options(*own, fields.violations(), "winnow.");
    RefuseUnknown(options, *own, {"policy", "exactness", "cache"});
    if (auto policy = options.String("policy")) out.set_policy(*std::move(policy));
    if (auto exactness = options.String("exactness")) out.set_exactness(*std::move(exactness));
    TakeCache(options, out);
  }
  TakeSalt(fields, "cache_salt", out);  // vLLM's name for it
  if (Json* const extra = fields.Object("vllm_xargs")) {
    JsonFields options(*extra, fields.violations(), "vllm_xargs.");
    TakeFlatOptions(options, *extra, out);
  }
}

void TakeTextOrChat(std::string_view body, JsonFields& fields, const ModelHabits& habits,
                    v1::GenerateRequest& out) {
  if (fields.Find("messages") == nullptr) return TakePrompt(fields, out);
  TakeMessages(fields, *out.mutable_chat());
  TakeTemplateOptions(fields, habits, *out.mutable_chat());
  ApplyTools(TakeChatTools(body, fields), habits, fields, out);
  out.clear_structured_output();
}

absl::StatusOr<OpenAiRequest> ParseChatRequest(std::string_view body, const ModelHabits& habits) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  OpenAiRequest out;
  TakeCommon(body, fields, out);
  TakeMessages(fields, *out.generate.mutable_chat());
  TakeTemplateOptions(fields, habits, *out.generate.mutable_chat());
  const RequestedTools tools = TakeChatTools(body, fields);
  out.parser = ApplyTools(tools, habits, fields, out.generate);
  ApplyReasoning(habits, out.structured_field, fields, out.generate, out.parser);
  if (out.structured_field.empty() && out.generate.has_structured_output()) {
    out.structured_field = "tools";
  }
  fields.Refuse("echo", "is not served: it is for /v1/completions");
  if (fields.Bool("add_special_tokens").value_or(false)) {
    fields.Add("add_special_tokens", "the chat template writes those that the model expects");
  }
  const bool logprobs = fields.Bool("logprobs").value_or(false);
  const std::optional<int32_t> top = fields.Int32("top_logprobs");
  if (logprobs) {
    out.generate.set_top_logprobs(top.value_or(0));
  } else if (top.value_or(0) != 0) {
    fields.Add("top_logprobs", "needs logprobs: true");
  }
  BoundWhole(fields, out);
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

absl::StatusOr<OpenAiRequest> ParseCompletionRequest(std::string_view body) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  OpenAiRequest out;
  TakeCommon(body, fields, out);
  fields.Refuse("tools", "is not served: they are for chats");
  TakePrompts(fields, out);
  // A number here, where chat has a switch and a number.
  if (const auto top = fields.Int32("logprobs")) out.generate.set_top_logprobs(*top);
  TakeEcho(fields, out);
  BoundWhole(fields, out);
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  v1::GenerateRequest common = out.generate;
  common.clear_prompt();
  for (v1::GenerateRequest& more : out.more_prompts) more.MergeFrom(common);
  return out;
}

absl::StatusOr<TokenizeBody> ParseTokenizeBody(std::string_view body, const ModelHabits& habits) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  TokenizeBody out;
  fields.Refuse("chat_template", "is not taken from requests: the model's own is used");
  fields.Refuse("continue_final_message", "is not served");
  if (auto model = fields.String("model")) out.model = *std::move(model);
  out.token_strs = fields.Bool("return_token_strs").value_or(false);
  TakeTextOrChat(body, fields, habits, out.prompt);
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

absl::StatusOr<DetokenizeBody> ParseDetokenizeBody(std::string_view body) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  DetokenizeBody out;
  if (auto model = fields.String("model")) out.model = *std::move(model);
  Json* const tokens = fields.Array("tokens");
  if (tokens == nullptr) fields.Add("tokens", "must be a list of token ids");
  for (size_t i = 0; tokens != nullptr && i < tokens->size() && violations.empty(); ++i) {
    const std::optional<int32_t> id = ToInt32((*tokens)[i]);
    if (!id.has_value()) fields.Add(Concat("tokens[", i, "]"), "must be a token id");
    out.request.add_ids(id.value_or(0));
  }
  // As other servers answer: what a prompt's ids stand for, control tokens included.
  out.request.set_show_special_tokens(!fields.Bool("skip_special_tokens").value_or(false));
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

absl::StatusOr<RenderBody> ParseRenderBody(std::string_view body) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  RenderBody out;
  if (auto model = fields.String("model")) out.model = *std::move(model);
  const std::optional<bool> special = fields.Bool("add_special_tokens");
  Json* const prompt = fields.Find("prompt");
  if (prompt == nullptr) {
    fields.Add("prompt", "must be set");
  } else if (!IsListOfPrompts(*prompt)) {
    TakeOnePrompt(fields, *prompt, special, out.prompts.emplace_back());
  } else if (prompt->size() > kMaxRenderPrompts) {
    fields.Add("prompt",
               Concat("has ", prompt->size(), " prompts, may have at most ", kMaxRenderPrompts));
  } else {
    for (Json& one : *prompt) TakeOnePrompt(fields, one, special, out.prompts.emplace_back());
  }
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

std::string OpenAiField(std::string_view field, bool chat, std::string_view structured_field) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 12> kNames = {{
      {"chat.template_options", "chat_template_kwargs"},
      {"chat.tools", "tools"},
      {"stopping.stop_strings", "stop"},
      {"stopping.", ""},
      {"sampling.", ""},
      {"chat.messages", "messages"},
      {"text.text", "prompt"},
      {"tokens.ids", "prompt"},
      {"ids", "prompt"},
      {"policy", "winnow.policy"},
      {"exactness", "winnow.exactness"},
      {"cache.", "winnow.cache."},
  }};
  if (field == "structured_output") {
    return structured_field.empty() ? "response_format" : std::string(structured_field);
  }
  if (field == "top_logprobs") return chat ? "top_logprobs" : "logprobs";
  for (const auto& [ours, theirs] : kNames) {
    if (field.starts_with(ours)) return Concat(theirs, field.substr(ours.size()));
  }
  if (field == "prompt") return chat ? "messages" : "prompt";
  return std::string(field);
}

}  // namespace winnow::server
