#include "server/http/prefix_request.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/base/status_macros.h"
#include "server/http/json_fields.h"
#include "server/http/openai_request.h"
#include "server/strings.h"
#include "server/suggest.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

using Json = nlohmann::json;

void RefuseUnknown(const Json& json, const std::vector<std::string>& known, JsonFields& fields) {
  for (const auto& [key, value] : json.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    fields.Add(CleanUtf8(key, kMaxShownBytes), Concat("is not known", DidYouMean(key, known)));
    return;
  }
}

}  // namespace

absl::StatusOr<PutPrefixBody> ParsePutPrefixBody(std::string_view body, const ModelHabits& habits) {
  static const std::vector<std::string>& known =
      *new std::vector<std::string>{"model",
                                    "prompt",
                                    "messages",
                                    "tools",
                                    "tool_choice",
                                    "parallel_tool_calls",
                                    "pinned",
                                    "ttl_seconds",
                                    "chat_template_kwargs",
                                    "reasoning_effort",
                                    "add_special_tokens",
                                    "add_generation_prompt"};
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  RefuseUnknown(json, known, fields);
  PutPrefixBody out;
  if (auto model = fields.String("model")) out.model = *std::move(model);
  v1::GenerateRequest prompt;
  TakeTextOrChat(body, fields, habits, prompt);
  if (prompt.has_text()) out.request.mutable_text()->Swap(prompt.mutable_text());
  if (prompt.has_tokens()) out.request.mutable_tokens()->Swap(prompt.mutable_tokens());
  if (prompt.has_chat()) out.request.mutable_chat()->Swap(prompt.mutable_chat());
  if (prompt.has_chat() && fields.Find("prompt") != nullptr) {
    fields.Add("prompt", "contradicts messages");
  }
  out.request.set_pinned(fields.Bool("pinned").value_or(false));
  out.request.set_ttl_seconds(fields.Int32("ttl_seconds").value_or(0));
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

absl::StatusOr<v1::PinPrefixRequest> ParsePinPrefixBody(std::string_view body) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  RefuseUnknown(json, {"pinned", "ttl_seconds"}, fields);
  v1::PinPrefixRequest out;
  if (const auto pinned = fields.Bool("pinned")) out.set_pinned(*pinned);
  if (const auto ttl = fields.Int32("ttl_seconds")) out.set_ttl_seconds(*ttl);
  if (violations.empty() && !out.has_pinned() && !out.has_ttl_seconds()) {
    fields.Add("pinned", "must be set, or ttl_seconds");
  }
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

nlohmann::ordered_json PrefixJson(const v1::Prefix& prefix) {
  nlohmann::ordered_json json;
  json["object"] = "prefix";
  json["name"] = prefix.name();
  json["tokens"] = prefix.tokens();
  json["blocks"] = prefix.blocks();
  json["fast_blocks"] = nullptr;
  json["stored_blocks"] = nullptr;
  json["pinned_blocks"] = nullptr;
  if (prefix.has_fast_blocks()) json["fast_blocks"] = prefix.fast_blocks();
  if (prefix.has_stored_blocks()) json["stored_blocks"] = prefix.stored_blocks();
  if (prefix.has_pinned_blocks()) json["pinned_blocks"] = prefix.pinned_blocks();
  json["pinned"] = prefix.pinned();
  json["expires_in_seconds"] = nullptr;
  if (prefix.has_expires_in_seconds()) json["expires_in_seconds"] = prefix.expires_in_seconds();
  return json;
}

nlohmann::ordered_json PutPrefixJson(const v1::PutPrefixResponse& response) {
  nlohmann::ordered_json json = PrefixJson(response.prefix());
  json["usage"]["prompt_tokens"] = response.usage().prompt_tokens();
  json["usage"]["prompt_tokens_details"]["cached_tokens"] = response.usage().cached_tokens();
  return json;
}

}  // namespace winnow::server
