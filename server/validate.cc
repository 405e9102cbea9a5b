#include "server/validate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/status_macros.h"
#include "kernels/check.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/utf8.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {
namespace {

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

void CheckText(Violations& violations, const v1::TextPrompt& text, const RequestLimits& limits) {
  const auto size = static_cast<int64_t>(text.text().size());
  if (size == 0) {
    violations.Add("text.text", "must not be empty");
  } else if (size > limits.max_prompt_bytes) {
    violations.Add("text.text",
                   Concat("has ", size, " bytes, may have at most ", limits.max_prompt_bytes));
  } else {
    CheckUtf8(violations, "text.text", text.text());
  }
}

void CheckTokens(Violations& violations, const v1::TokenPrompt& tokens,
                 const RequestLimits& limits) {
  if (tokens.ids_size() == 0) {
    violations.Add("tokens.ids", "must not be empty");
  } else if (tokens.ids_size() >= limits.max_context) {
    violations.Add("tokens.ids", Concat("has ", tokens.ids_size(), " tokens; the context holds ",
                                        limits.max_context, " with at least one of the answer"));
  } else {
    CheckIds(violations, "tokens.ids", tokens.ids(), limits.vocab_size);
  }
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
    bytes += static_cast<int64_t>(message.content().size());
  }
  if (bytes > limits.max_prompt_bytes) {
    violations.Add("chat.messages",
                   Concat("have ", bytes, " bytes, may have at most ", limits.max_prompt_bytes));
    return;
  }
  for (int i = 0; i < chat.messages_size(); ++i) {
    const v1::ChatMessage& message = chat.messages(i);
    const std::string path = Concat("chat.messages[", i, "]");
    if (message.role() != "system" && message.role() != "user" && message.role() != "assistant") {
      violations.Add(path + ".role", Concat("must be system, user or assistant, is \"",
                                            CleanUtf8(message.role(), kMaxRoleBytes), "\""));
    }
    CheckUtf8(violations, path + ".content", message.content());
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
                   const RequestLimits& limits, engine::StoppingOptions& out) {
  if (in.has_max_tokens()) {
    // The prompt takes at least one token of the context.
    CheckRange(violations, "stopping.max_tokens", in.max_tokens(), 1, limits.max_context - 1);
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

}  // namespace

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
    : limits_(std::move(limits)), tokenizer_(tokenizer), chat_template_(chat_template) {
  WINNOW_CHECK(limits_.vocab_size > 0);
  WINNOW_CHECK(limits_.max_context > 1);
  WINNOW_CHECK(limits_.max_prompt_bytes > 0);
  WINNOW_CHECK(limits_.default_max_tokens > 0);
  WINNOW_CHECK(limits_.check_policy != nullptr);
}

absl::StatusOr<CheckedGenerate> Validator::CheckGenerate(const v1::GenerateRequest& message) const {
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
  CheckStopping(violations, message.stopping(), limits_, checked.request.stopping);
  checked.seed_unset = !message.sampling().has_seed();
  checked.max_tokens_unset = !message.stopping().has_max_tokens();
  if (message.has_n()) {
    CheckRange(violations, "n", message.n(), 1, kMaxChoices);
    checked.n = message.n();
  }
  if (message.has_top_logprobs()) {
    CheckRange(violations, "top_logprobs", message.top_logprobs(), 0,
               std::min<int32_t>(kMaxTopLogprobs, limits_.vocab_size));
    checked.request.top_logprobs = message.top_logprobs();
  }
  checked.request.policy = limits_.default_policy;
  if (message.policy().size() > kMaxPolicyBytes) {
    violations.Add("policy", Concat("has ", message.policy().size(), " bytes, may have at most ",
                                    kMaxPolicyBytes));
  } else if (!message.policy().empty()) {
    absl::StatusOr<engine::AttentionPolicy> policy = engine::ParseAttentionPolicy(message.policy());
    absl::Status status = policy.status();
    if (status.ok()) status = limits_.check_policy(*policy);
    if (status.ok()) {
      checked.request.policy = *policy;
    } else {
      violations.Add("policy", ToStd(status.message()));
    }
  }
  checked.request.skip_special_tokens = !message.show_special_tokens();
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
    return InvalidField(field, Concat("makes ", tokens, " tokens; the context holds ",
                                      limits_.max_context, " with at least one of the answer"));
  }
  engine::StoppingOptions& stopping = checked.request.stopping;
  if (checked.max_tokens_unset) {
    stopping.max_tokens = static_cast<int32_t>(std::min<int64_t>(limits_.default_max_tokens, room));
    // The default gives way to what the client did say.
    stopping.max_tokens = std::max(
        stopping.max_tokens, static_cast<int32_t>(std::min<int64_t>(stopping.min_tokens, room)));
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
  std::vector<engine::ChatMessage> messages;
  messages.reserve(chat.messages_size());
  for (const v1::ChatMessage& message : chat.messages()) {
    messages.push_back({message.role(), message.content()});
  }
  const bool open_turn = !chat.has_add_generation_prompt() || chat.add_generation_prompt();
  const absl::CivilSecond now = absl::ToCivilSecond(absl::Now(), absl::UTCTimeZone());
  auto rendered = chat_template_.Render(messages, open_turn, now);
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
