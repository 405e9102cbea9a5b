#include "server/validate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/grammar/grammar_check.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "server/harmony_chat.h"
#include "server/ordered_json.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/utf8.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// As many digits as tell the value from its neighbours: 100.00001 is not 100.
template <typename T>
std::string Digits(T value) {
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  WINNOW_CHECK(error == std::errc());
  return std::string(text, end);
}

// NaN compares false with everything, so the test is for being inside, not outside.
template <typename T>
void CheckRange(Violations& violations, std::string_view field, T value, T low, T high) {
  if (!(value >= low && value <= high)) {
    violations.Add(field, Concat("must be in [", low, ", ", high, "], is ", Digits(value)));
  }
}

void CheckUtf8(Violations& violations, std::string_view field, std::string_view text) {
  if (const auto offset = InvalidUtf8At(text)) {
    violations.Add(field, Concat("is not UTF-8 at byte ", *offset));
  }
}

// Reports the first id that is out of range: the rest are probably wrong in the same way.
template <typename Ids>
void CheckIds(Violations& violations, std::string_view field, const Ids& ids, int32_t vocab_size) {
  for (int i = 0; i < ids.size(); ++i) {
    if (ids.Get(i) < 0 || ids.Get(i) >= vocab_size) {
      violations.Add(Concat(field, "[", i, "]"),
                     Concat("token id ", ids.Get(i), " is not in [0, ", vocab_size, ")"));
      return;
    }
  }
}

// Routers and agents know these words, read the numbers, and make room.
std::string TooManyTokens(int64_t tokens, int32_t max_context) {
  return Concat("prompt is too long: ", tokens, " tokens > ", max_context - 1,
                " maximum (the model's maximum context length is ", max_context,
                " tokens, one of them the answer's)");
}

// So many bytes are more tokens than the context holds, whatever they say.
void AddTooManyBytes(Violations& violations, std::string_view field, int64_t bytes,
                     const RequestLimits& limits) {
  violations.Add(
      field,
      Concat("prompt is too long: ", bytes, " bytes > ", limits.max_prompt_bytes, " maximum"),
      kContextLengthExceeded);
}

void CheckText(Violations& violations, const v1::TextPrompt& text, const RequestLimits& limits) {
  const auto size = static_cast<int64_t>(text.text().size());
  if (size == 0) {
    violations.Add("text.text", "must not be empty");
  } else if (size > limits.max_prompt_bytes) {
    AddTooManyBytes(violations, "text.text", size, limits);
  } else {
    CheckUtf8(violations, "text.text", text.text());
  }
}

void CheckTokens(Violations& violations, const v1::TokenPrompt& tokens,
                 const RequestLimits& limits) {
  if (tokens.ids_size() == 0) {
    violations.Add("tokens.ids", "must not be empty");
  } else if (tokens.ids_size() >= limits.max_context) {
    violations.Add("tokens.ids", TooManyTokens(tokens.ids_size(), limits.max_context),
                   kContextLengthExceeded);
  } else {
    CheckIds(violations, "tokens.ids", tokens.ids(), limits.vocab_size);
  }
}

// A function's or a call's; it may be absent.
void CheckName(Violations& violations, std::string_view field, std::string_view name) {
  if (name.size() > kMaxNameBytes) {
    violations.Add(field, Concat("has ", name.size(), " bytes, may have at most ", kMaxNameBytes));
  } else {
    CheckUtf8(violations, field, name);
  }
}

void CheckToolCalls(Violations& violations, const std::string& path,
                    const v1::ChatMessage& message) {
  if (message.tool_calls_size() > kMaxTools) {
    violations.Add(path + ".tool_calls", Concat("has ", message.tool_calls_size(),
                                                " calls, may have at most ", kMaxTools));
    return;
  }
  for (int i = 0; i < message.tool_calls_size(); ++i) {
    const v1::ToolCall& call = message.tool_calls(i);
    const std::string call_path = Concat(path, ".tool_calls[", i, "]");
    if (call.name().empty()) violations.Add(call_path + ".name", "must not be empty");
    CheckName(violations, call_path + ".name", call.name());
    CheckName(violations, call_path + ".id", call.id());
    CheckUtf8(violations, call_path + ".arguments", call.arguments());
  }
}

absl::StatusOr<engine::GrammarSource> GrammarSourceOf(const v1::StructuredOutput& in) {
  using engine::GrammarKind;
  switch (in.kind_case()) {
    case v1::StructuredOutput::kJsonSchema:
      return engine::GrammarSource{GrammarKind::kJsonSchema, in.json_schema(), !in.open()};
    case v1::StructuredOutput::kJsonObject:
      if (!in.json_object()) break;
      return engine::GrammarSource{GrammarKind::kJsonSchema, R"({"type":"object"})", false};
    case v1::StructuredOutput::kRegex:
      return engine::GrammarSource{GrammarKind::kRegex, in.regex()};
    case v1::StructuredOutput::kChoice: {
      if (in.choice().texts_size() < 1 || in.choice().texts_size() > kMaxGrammarChoices) {
        return absl::InvalidArgumentError(engine::Concat("choice: must have 1 to ",
                                                         kMaxGrammarChoices, " texts, has ",
                                                         in.choice().texts_size()));
      }
      OrderedJson elements = OrderedJson::array();
      for (const std::string& text : in.choice().texts()) {
        if (text.empty()) return absl::InvalidArgumentError("choice: a text is empty");
        if (InvalidUtf8At(text).has_value()) {
          return absl::InvalidArgumentError("choice: a text is not UTF-8");
        }
        elements.push_back({{"type", "const_string"}, {"value", text}});
      }
      const OrderedJson tag = {{"type", "structural_tag"},
                               {"format", {{"type", "or"}, {"elements", std::move(elements)}}}};
      return engine::GrammarSource{GrammarKind::kStructuralTag, tag.dump()};
    }
    case v1::StructuredOutput::kGrammar:
      return engine::GrammarSource{GrammarKind::kEbnf, in.grammar()};
    case v1::StructuredOutput::kStructuralTag:
      return engine::GrammarSource{GrammarKind::kStructuralTag, in.structural_tag()};
    case v1::StructuredOutput::KIND_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "one of json_schema, json_object, regex, choice, grammar and structural_tag must be set");
}

void CheckChat(Violations& violations, const v1::ChatPrompt& chat, const RequestLimits& limits) {
  if (chat.messages_size() == 0) {
    violations.Add("chat.messages", "must not be empty");
    return;
  }
  if (chat.messages_size() > kMaxMessages) {
    violations.Add("chat.messages", Concat("has ", chat.messages_size(),
                                           " messages, may have at most ", kMaxMessages));
    return;
  }
  int64_t bytes = 0;
  for (const v1::ChatMessage& message : chat.messages()) {
    bytes += static_cast<int64_t>(message.content().size() + message.reasoning().size());
    for (const v1::ToolCall& call : message.tool_calls()) {
      bytes += static_cast<int64_t>(call.arguments().size());
    }
  }
  for (const std::string& tool : chat.tools()) bytes += static_cast<int64_t>(tool.size());
  if (bytes > limits.max_prompt_bytes) {
    AddTooManyBytes(violations, "chat.messages", bytes, limits);
    return;
  }
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    const std::string path = Concat("chat.messages[", i, "]");
    const std::string& role = message.role();
    if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
      violations.Add(path + ".role", Concat("must be system, user, assistant or tool, is \"",
                                            CleanUtf8(role, kMaxRoleBytes), "\""));
    }
    CheckUtf8(violations, path + ".content", message.content());
    CheckUtf8(violations, path + ".reasoning", message.reasoning());
    CheckName(violations, path + ".tool_call_id", message.tool_call_id());
    CheckName(violations, path + ".name", message.name());
    if (role != "assistant" && (message.tool_calls_size() > 0 || !message.reasoning().empty())) {
      violations.Add(path + ".tool_calls", "and reasoning are of the assistant alone");
    }
    CheckToolCalls(violations, path, message);
  }
  if (chat.tools_size() > kMaxTools) {
    violations.Add("chat.tools",
                   Concat("has ", chat.tools_size(), " tools, may have at most ", kMaxTools));
    return;
  }
  for (int i = 0; i < chat.tools_size(); ++i) {
    CheckUtf8(violations, Concat("chat.tools[", i, "]"), chat.tools(i));
  }
  if (chat.template_options().size() > kMaxTemplateOptionsBytes) {
    violations.Add("chat.template_options",
                   Concat("has ", chat.template_options().size(), " bytes, may have at most ",
                          kMaxTemplateOptionsBytes));
  }
}

void CheckStructuredOutput(Violations& violations, const v1::GenerateRequest& message,
                           const RequestLimits& limits, std::optional<engine::GrammarSource>& out) {
  constexpr std::string_view kField = "structured_output";
  const v1::StructuredOutput& in = message.structured_output();
  if (!limits.structured_output) {
    violations.Add(kField, "is not served: this server was built without xgrammar");
    return;
  }
  if (limits.eos_token_ids.empty()) {
    violations.Add(kField, "is not served: the model has no end token");
    return;
  }
  if (message.stopping().ignore_eos()) {
    violations.Add("stopping.ignore_eos", "contradicts structured_output, which says where to end");
  }
  if (message.stopping().min_tokens() > 0) {
    violations.Add("stopping.min_tokens", "contradicts structured_output, which says where to end");
  }
  absl::StatusOr<engine::GrammarSource> source = GrammarSourceOf(in);
  absl::Status status = source.status();
  if (status.ok()) status = engine::CheckGrammarSource(*source);
  if (status.ok()) {
    out = *std::move(source);
  } else {
    violations.Add(kField, ToStd(status.message()));
  }
}

void CheckSampling(Violations& violations, const v1::SamplingOptions& in,
                   const RequestLimits& limits, engine::SamplingOptions& out) {
  if (in.has_temperature()) out.temperature = in.temperature();
  if (in.has_top_k()) out.top_k = in.top_k();
  if (in.has_top_p()) out.top_p = in.top_p();
  if (in.has_min_p()) out.min_p = in.min_p();
  if (in.has_repetition_penalty()) out.repetition_penalty = in.repetition_penalty();
  if (in.has_presence_penalty()) out.presence_penalty = in.presence_penalty();
  if (in.has_frequency_penalty()) out.frequency_penalty = in.frequency_penalty();
  CheckRange(violations, "sampling.temperature", out.temperature, 0.0f, kMaxTemperature);
  CheckRange(violations, "sampling.top_k", out.top_k, 0, kMaxTopK);
  if (!(out.top_p > 0 && out.top_p <= 1)) {
    violations.Add("sampling.top_p", Concat("must be in (0, 1], is ", out.top_p));
  }
  CheckRange(violations, "sampling.min_p", out.min_p, 0.0f, 1.0f);
  CheckRange(violations, "sampling.repetition_penalty", out.repetition_penalty,
             kMinRepetitionPenalty, kMaxRepetitionPenalty);
  CheckRange(violations, "sampling.presence_penalty", out.presence_penalty, -kMaxPenalty,
             kMaxPenalty);
  CheckRange(violations, "sampling.frequency_penalty", out.frequency_penalty, -kMaxPenalty,
             kMaxPenalty);
  if (in.logit_bias_size() > kMaxLogitBias) {
    violations.Add("sampling.logit_bias", Concat("has ", in.logit_bias_size(),
                                                 " entries, may have at most ", kMaxLogitBias));
    return;
  }
  for (const auto& [id, bias] : in.logit_bias()) {
    const std::string path = Concat("sampling.logit_bias[", id, "]");
    if (id < 0 || id >= limits.vocab_size) {
      violations.Add(path, Concat("token id is not in [0, ", limits.vocab_size, ")"));
    }
    CheckRange(violations, path, bias, -kMaxLogitBiasValue, kMaxLogitBiasValue);
    out.logit_bias.emplace_back(id, bias);
  }
  // A map's order is not defined; the engine's sums should be.
  std::sort(out.logit_bias.begin(), out.logit_bias.end());
  out.seed = in.seed();
}

void CheckStopping(Violations& violations, const v1::StoppingOptions& in,
                   const RequestLimits& limits, bool max_tokens_yields,
                   engine::StoppingOptions& out) {
  if (in.has_max_tokens()) {
    // The prompt takes at least one token of the context.
    const int32_t most =
        max_tokens_yields ? std::numeric_limits<int32_t>::max() : limits.max_context - 1;
    CheckRange(violations, "stopping.max_tokens", in.max_tokens(), 1, most);
    out.max_tokens = in.max_tokens();
  }
  if (in.has_min_tokens()) {
    const int32_t most = in.has_max_tokens() ? in.max_tokens() : limits.max_context - 1;
    CheckRange(violations, "stopping.min_tokens", in.min_tokens(), 0, std::max(most, 0));
    out.min_tokens = in.min_tokens();
  }
  if (in.stop_strings_size() > kMaxStopStrings) {
    violations.Add("stopping.stop_strings", Concat("has ", in.stop_strings_size(),
                                                   " strings, may have at most ", kMaxStopStrings));
  } else {
    for (int i = 0; i < in.stop_strings_size(); ++i) {
      const std::string path = Concat("stopping.stop_strings[", i, "]");
      const std::string& text = in.stop_strings(i);
      if (text.empty() || text.size() > kMaxStopStringBytes) {
        violations.Add(path,
                       Concat("must have 1 to ", kMaxStopStringBytes, " bytes, has ", text.size()));
      } else {
        CheckUtf8(violations, path, text);
      }
      out.stop_strings.push_back(text);
    }
  }
  if (in.stop_token_ids_size() > kMaxStopTokenIds) {
    violations.Add("stopping.stop_token_ids", Concat("has ", in.stop_token_ids_size(),
                                                     " ids, may have at most ", kMaxStopTokenIds));
  } else {
    CheckIds(violations, "stopping.stop_token_ids", in.stop_token_ids(), limits.vocab_size);
    out.stop_token_ids.assign(in.stop_token_ids().begin(), in.stop_token_ids().end());
  }
  if (!in.ignore_eos()) {
    out.stop_token_ids.insert(out.stop_token_ids.end(), limits.eos_token_ids.begin(),
                              limits.eos_token_ids.end());
  }
  out.include_stop = in.include_stop();
}

// The message's choice, and the server's where it says nothing. Errors go to the field that the client can change.
void CheckPolicy(Violations& violations, const v1::GenerateRequest& message,
                 const RequestLimits& limits, engine::AttentionPolicy& out) {
  absl::StatusOr<engine::AttentionPolicy> policy = limits.default_policy;
  std::optional<engine::Exactness> exactness = limits.default_exactness;
  const bool names_policy = !message.policy().empty();
  const bool names_exactness = !message.exactness().empty();
  if (names_exactness) {
    absl::StatusOr<engine::Exactness> named = engine::ParseExactness(message.exactness());
    if (!named.ok()) violations.Add("exactness", ToStd(named.status().message()));
    exactness = named.ok() ? std::make_optional(*named) : std::nullopt;
  }
  if (message.policy().size() > kMaxPolicyBytes) {
    violations.Add("policy", Concat("has ", message.policy().size(), " bytes, may have at most ",
                                    kMaxPolicyBytes));
    return;
  }
  absl::Status status;
  if (names_policy) {
    policy = engine::ParseAttentionPolicy(message.policy());
    status = policy.status();
    if (status.ok()) status = limits.check_policy(*policy);
    if (!status.ok()) {
      violations.Add("policy", ToStd(status.message()));
      return;
    }
  }
  if (exactness.has_value()) {
    policy = engine::WithExactness(*policy, *exactness, /*policy_yields=*/!names_policy);
    status = policy.status();
    if (status.ok()) status = limits.check_policy(*policy);
  }
  if (status.ok()) {
    out = *policy;
  } else if (names_exactness) {
    violations.Add("exactness", ToStd(status.message()));
  } else {
    violations.Add("policy", Concat(ToStd(status.message()),
                                    "; the exactness is the server's, a request may name its own"));
  }
}

void CheckCache(Violations& violations, const v1::CacheOptions& in, engine::CacheOptions& out) {
  if (in.has_use()) out.use = in.use();
  if (in.has_store()) out.store = in.store();
  if (in.has_priority()) {
    CheckRange(violations, "cache.priority", in.priority(), 0, int32_t{engine::kPriorityMax});
    out.priority =
        static_cast<uint8_t>(std::clamp<int32_t>(in.priority(), 0, engine::kPriorityMax));
  }
  CheckRange(violations, "cache.ttl_seconds", in.ttl_seconds(), int64_t{0}, kMaxTtlSeconds);
  out.ttl = std::chrono::seconds(std::clamp<int64_t>(in.ttl_seconds(), 0, kMaxTtlSeconds));
  if (!out.store && (in.has_priority() || in.ttl_seconds() != 0)) {
    violations.Add("cache.store",
                   "is false: then nothing is kept that could have a priority or a time");
  }
  if (in.salt().size() > kMaxCacheSaltBytes) {
    violations.Add("cache.salt", Concat("has ", in.salt().size(), " bytes, may have at most ",
                                        kMaxCacheSaltBytes));
  }
  out.salt = in.salt();
}

// A conversation as templates read it. Arguments of calls are objects there, not texts of them.
absl::StatusOr<OrderedJson> MessagesOf(const v1::ChatPrompt& chat) {
  OrderedJson messages = OrderedJson::array();
  absl::flat_hash_map<std::string, std::string> names;  // of functions, by call
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    OrderedJson out = {{"role", message.role()}, {"content", message.content()}};
    if (!message.reasoning().empty()) out["reasoning_content"] = message.reasoning();
    if (!message.tool_call_id().empty()) out["tool_call_id"] = message.tool_call_id();
    // Some templates want the function's name beside its result, which clients leave out.
    if (!message.name().empty()) {
      out["name"] = message.name();
    } else if (const auto call = names.find(message.tool_call_id());
               message.role() == "tool" && call != names.end()) {
      out["name"] = call->second;
    }
    for (int j = 0; j < message.tool_calls_size(); ++j) {
      const v1::ToolCall& call = message.tool_calls(j);
      absl::StatusOr<OrderedJson> arguments =
          call.arguments().empty() ? OrderedJson::object() : ParseOrdered(call.arguments());
      if (!arguments.ok() || !arguments->is_object()) {
        return InvalidField(Concat("chat.messages[", i, "].tool_calls[", j, "].arguments"),
                            "must be a JSON object");
      }
      names[call.id()] = call.name();
      out["tool_calls"].push_back(
          {{"id", call.id()},
           {"type", "function"},
           {"function", {{"name", call.name()}, {"arguments", *std::move(arguments)}}}});
    }
    messages.push_back(std::move(out));
  }
  return messages;
}

absl::StatusOr<OrderedJson> ToolsOf(const v1::ChatPrompt& chat) {
  OrderedJson tools = OrderedJson::array();
  for (int i = 0; i < chat.tools_size(); ++i) {
    absl::StatusOr<OrderedJson> tool = ParseOrdered(chat.tools(i));
    if (!tool.ok() || !tool->is_object()) {
      return InvalidField(Concat("chat.tools[", i, "]"),
                          tool.ok() ? "must be a JSON object" : ToStd(tool.status().message()));
    }
    tools.push_back(*std::move(tool));
  }
  return tools;
}

}  // namespace

absl::StatusOr<engine::AttentionPolicy> DefaultPolicy(const RequestLimits& limits) {
  if (!limits.default_exactness.has_value()) return limits.default_policy;
  return engine::WithExactness(limits.default_policy, *limits.default_exactness,
                               /*policy_yields=*/false);
}

int64_t DefaultMaxPromptBytes(int32_t max_context) {
  return std::max<int64_t>(int64_t{16} * max_context, 64 << 10);
}

int64_t DefaultMaxMessageBytes(const RequestLimits& limits) {
  // A token id takes at most 3 bytes as a varint below 2^21 and never more than 5; Detokenize takes
  // four contexts of them.
  // gRPC counts a message's bytes in an int.
  return std::min<int64_t>(
      std::max(limits.max_prompt_bytes, int64_t{5} * 4 * limits.max_context) + (1 << 20),
      std::numeric_limits<int32_t>::max());
}

Validator::Validator(RequestLimits limits, const engine::Tokenizer& tokenizer,
                     const engine::ChatTemplate& chat_template)
    : limits_(std::move(limits)),
      tokenizer_(tokenizer),
      chat_template_(chat_template),
      writes_harmony_(WritesHarmony(chat_template)) {
  WINNOW_CHECK(limits_.vocab_size > 0);
  WINNOW_CHECK(limits_.max_context > 1);
  WINNOW_CHECK(limits_.max_prompt_bytes > 0);
  WINNOW_CHECK(limits_.default_max_tokens > 0);
  WINNOW_CHECK(limits_.check_policy != nullptr);
}

absl::StatusOr<CheckedGenerate> Validator::CheckGenerate(const v1::GenerateRequest& message,
                                                         bool max_tokens_yields) const {
  Violations violations;
  CheckedGenerate checked;
  switch (message.prompt_case()) {
    case v1::GenerateRequest::kText:
      CheckText(violations, message.text(), limits_);
      break;
    case v1::GenerateRequest::kTokens:
      CheckTokens(violations, message.tokens(), limits_);
      break;
    case v1::GenerateRequest::kChat:
      CheckChat(violations, message.chat(), limits_);
      break;
    case v1::GenerateRequest::PROMPT_NOT_SET:
      violations.Add("prompt", "one of text, tokens and chat must be set");
      break;
  }
  checked.request.sampling = limits_.default_sampling;
  CheckSampling(violations, message.sampling(), limits_, checked.request.sampling);
  CheckStopping(violations, message.stopping(), limits_, max_tokens_yields,
                checked.request.stopping);
  checked.max_tokens_yields = max_tokens_yields;
  checked.seed_unset = !message.sampling().has_seed();
  checked.max_tokens_unset = !message.stopping().has_max_tokens();
  if (message.has_n()) {
    CheckRange(violations, "n", message.n(), 1, kMaxChoices);
    checked.n = message.n();
  }
  const int32_t most_logprobs = std::min<int32_t>(kMaxTopLogprobs, limits_.vocab_size);
  if (message.has_top_logprobs()) {
    CheckRange(violations, "top_logprobs", message.top_logprobs(), 0, most_logprobs);
    checked.request.top_logprobs = message.top_logprobs();
  }
  if (message.has_prompt_logprobs()) {
    CheckRange(violations, "prompt_logprobs", message.prompt_logprobs(), 0, most_logprobs);
    checked.request.prompt_logprobs = message.prompt_logprobs();
  }
  CheckPolicy(violations, message, limits_, checked.request.policy);
  CheckCache(violations, message.cache(), checked.request.cache);
  checked.request.skip_special_tokens = !message.show_special_tokens();
  if (message.has_structured_output()) {
    CheckStructuredOutput(violations, message, limits_, checked.grammar);
  }
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return checked;
}

absl::Status Validator::CheckTokenize(const v1::TokenizeRequest& message) const {
  Violations violations;
  switch (message.prompt_case()) {
    case v1::TokenizeRequest::kText:
      CheckText(violations, message.text(), limits_);
      break;
    case v1::TokenizeRequest::kChat:
      CheckChat(violations, message.chat(), limits_);
      break;
    case v1::TokenizeRequest::PROMPT_NOT_SET:
      violations.Add("prompt", "one of text and chat must be set");
      break;
  }
  return violations.ToStatus();
}

absl::Status Validator::CheckDetokenize(const v1::DetokenizeRequest& message) const {
  Violations violations;
  const int64_t most = int64_t{4} * limits_.max_context;
  if (message.ids_size() > most) {
    violations.Add("ids", Concat("has ", message.ids_size(), " ids, may have at most ", most));
  } else {
    CheckIds(violations, "ids", message.ids(), limits_.vocab_size);
  }
  return violations.ToStatus();
}

absl::Status Validator::TokenizePrompt(const v1::GenerateRequest& message,
                                       CheckedGenerate& checked) const {
  std::vector<int32_t>& prompt = checked.request.prompt;
  std::string field;
  switch (message.prompt_case()) {
    case v1::GenerateRequest::kText: {
      field = "text.text";
      WINNOW_ASSIGN_OR_RETURN(prompt, TokenizeText(message.text()));
      break;
    }
    case v1::GenerateRequest::kChat: {
      field = "chat.messages";
      WINNOW_ASSIGN_OR_RETURN(prompt, TokenizeChat(message.chat()));
      break;
    }
    default:
      field = "tokens.ids";
      prompt.assign(message.tokens().ids().begin(), message.tokens().ids().end());
  }
  const auto tokens = static_cast<int64_t>(prompt.size());
  if (tokens == 0) return InvalidField(field, "makes no tokens");
  // A tokenizer may know tokens that the model has no row for.
  for (const int32_t id : prompt) {
    if (id < 0 || id >= limits_.vocab_size) {
      return InvalidField(field, Concat("makes token ", id, ", which the model does not have"));
    }
  }
  const int64_t room = limits_.max_context - tokens;
  if (room < 1) {
    return InvalidField(field, TooManyTokens(tokens, limits_.max_context), kContextLengthExceeded);
  }
  engine::StoppingOptions& stopping = checked.request.stopping;
  if (checked.max_tokens_unset) {
    stopping.max_tokens = static_cast<int32_t>(std::min<int64_t>(limits_.default_max_tokens, room));
    // The default gives way to what the client did say.
    stopping.max_tokens = std::max(
        stopping.max_tokens, static_cast<int32_t>(std::min<int64_t>(stopping.min_tokens, room)));
  }
  if (checked.max_tokens_yields) {
    stopping.max_tokens = static_cast<int32_t>(std::min<int64_t>(stopping.max_tokens, room));
  }
  if (stopping.max_tokens > room) {
    return InvalidField(
        "stopping.max_tokens",
        Concat("is ", stopping.max_tokens, "; the prompt has ", tokens, " tokens and leaves ", room,
               " of the context's ", limits_.max_context));
  }
  if (stopping.min_tokens > stopping.max_tokens) {
    return InvalidField("stopping.min_tokens",
                        Concat("is ", stopping.min_tokens, "; at most ", stopping.max_tokens,
                               " tokens will be generated"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> Validator::TokenizePrompt(
    const v1::TokenizeRequest& message) const {
  return message.has_chat() ? TokenizeChat(message.chat()) : TokenizeText(message.text());
}

absl::StatusOr<std::vector<int32_t>> Validator::TokenizeText(const v1::TextPrompt& text) const {
  const bool add_special = !text.has_add_special_tokens() || text.add_special_tokens();
  auto ids = tokenizer_.Encode(text.text(), add_special, /*parse_special=*/false);
  if (!ids.ok()) return InvalidField("text.text", ToStd(ids.status().message()));
  return ids;
}

absl::StatusOr<std::vector<int32_t>> Validator::TokenizeChat(const v1::ChatPrompt& chat) const {
  WINNOW_ASSIGN_OR_RETURN(OrderedJson messages, MessagesOf(chat));
  WINNOW_ASSIGN_OR_RETURN(OrderedJson tools, ToolsOf(chat));
  if (writes_harmony_) {
    messages = FitHarmonyMessages(std::move(messages));
    tools = FitHarmonyTools(std::move(tools));
  }
  engine::ChatRequest request;
  request.messages = &messages;
  if (!tools.empty()) request.tools = &tools;
  OrderedJson options;
  if (!chat.template_options().empty()) {
    absl::StatusOr<OrderedJson> parsed = ParseOrdered(chat.template_options());
    if (!parsed.ok() || !parsed->is_object()) {
      return InvalidField("chat.template_options", "must be a JSON object");
    }
    options = *std::move(parsed);
    request.kwargs = &options;
  }
  request.add_generation_prompt = !chat.has_add_generation_prompt() || chat.add_generation_prompt();
  request.now = absl::ToCivilSecond(absl::Now(), absl::UTCTimeZone());
  auto rendered = chat_template_.Render(request);
  if (absl::IsInvalidArgument(rendered.status())) {
    return InvalidField("chat.messages", ToStd(rendered.status().message()));
  }
  // Of a template that runs into its limits, too: another try would be no better.
  if (absl::IsFailedPrecondition(rendered.status()) ||
      absl::IsResourceExhausted(rendered.status())) {
    return ErrorWithReason(absl::StatusCode::kFailedPrecondition, "NO_CHAT_TEMPLATE",
                           ToStd(rendered.status().message()));
  }
  WINNOW_RETURN_IF_ERROR(rendered.status());
  const std::vector<engine::TextSegment> segments = rendered->Segments();
  // The template has written the beginning-of-sequence token itself, if it wants one.
  auto ids = tokenizer_.Encode(segments, /*add_special_tokens=*/false);
  if (!ids.ok()) return InvalidField("chat.messages", ToStd(ids.status().message()));
  return ids;
}

bool Validator::OpensReasoning(const v1::ChatPrompt& chat) const {
  const OrderedJson messages = OrderedJson::array({{{"role", "user"}, {"content", "x"}}});
  engine::ChatRequest request;
  request.messages = &messages;
  const absl::StatusOr<OrderedJson> options = ParseOrdered(chat.template_options());
  if (options.ok() && options->is_object()) request.kwargs = &*options;
  request.add_generation_prompt = !chat.has_add_generation_prompt() || chat.add_generation_prompt();
  request.now = absl::CivilSecond(2026, 1, 1);
  const auto rendered = chat_template_.Render(request);
  if (!rendered.ok()) return false;  // the prompt itself will say why
  std::string_view text = rendered->text;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  return text.ends_with("<think>");
}

absl::Status Validator::CheckTenant(std::string_view tenant) {
  const bool good = !tenant.empty() && tenant.size() <= kMaxTenantBytes &&
                    tenant.find_first_not_of(
                        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                        "0123456789._-") == tenant.npos;
  if (good) return absl::OkStatus();
  return ErrorWithReason(
      absl::StatusCode::kInvalidArgument, "INVALID_METADATA",
      Concat("x-winnow-tenant must be 1 to ", kMaxTenantBytes, " of [A-Za-z0-9._-]"));
}

uint64_t SeedOfChoice(uint64_t seed, int32_t choice) {
  if (choice == 0) return seed;
  // SplitMix64 of the pair: neighbouring seeds must not share choices.
  uint64_t z = seed + static_cast<uint64_t>(choice) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace winnow::server
