#include "server/http/json_fields.h"

#include <cmath>
#include <limits>

#include "engine/base/json_file.h"
#include "kernels/check.h"
#include "server/strings.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

using Json = nlohmann::json;

// The parser's message quotes what it read last, which may be a prompt.
constexpr size_t kMaxProblemBytes = 200;

}  // namespace

absl::StatusOr<Json> ParseBody(std::string_view body) {
  absl::StatusOr<Json> json = engine::ParseJsonObject(body, "the request's body");
  if (json.ok()) return json;
  return ErrorWithReason(absl::StatusCode::kInvalidArgument, "INVALID_ENCODING",
                         CleanUtf8(ToStd(json.status().message()), kMaxProblemBytes));
}

std::optional<int32_t> ToInt32(const Json& value) {
  if (!value.is_number()) return std::nullopt;
  const auto number = value.get<double>();
  if (!(number >= std::numeric_limits<int32_t>::min() &&
        number <= std::numeric_limits<int32_t>::max()) ||
      std::trunc(number) != number) {
    return std::nullopt;
  }
  return static_cast<int32_t>(number);
}

JsonFields::JsonFields(Json& object, Violations& violations, std::string prefix)
    : object_(object), violations_(violations), prefix_(std::move(prefix)) {
  WINNOW_CHECK(object_.is_object());
}

std::string JsonFields::Path(std::string_view name) const { return Concat(prefix_, name); }

void JsonFields::Add(std::string_view name, std::string_view what) {
  violations_.Add(Path(name), what);
}

Json* JsonFields::Find(std::string_view name) {
  const auto it = object_.find(std::string(name));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::optional<bool> JsonFields::Bool(std::string_view name) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  Add(name, "must be true or false");
  return std::nullopt;
}

std::optional<int32_t> JsonFields::Int32(std::string_view name) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  const std::optional<int32_t> number = ToInt32(*value);
  if (!number.has_value()) Add(name, "must be a whole number below 2^31");
  return number;
}

std::optional<uint64_t> JsonFields::Seed(std::string_view name) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number_unsigned()) return value->get<uint64_t>();
  if (value->is_number_integer()) return static_cast<uint64_t>(value->get<int64_t>());
  Add(name, "must be a whole number of at most 64 bits");
  return std::nullopt;
}

std::optional<float> JsonFields::Number(std::string_view name) {
  const Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) return value->get<float>();
  Add(name, "must be a number");
  return std::nullopt;
}

std::optional<std::string> JsonFields::String(std::string_view name) {
  Json* const value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return std::move(value->get_ref<std::string&>());
  Add(name, "must be a string");
  return std::nullopt;
}

Json* JsonFields::Object(std::string_view name) {
  Json* const value = Find(name);
  if (value == nullptr || value->is_object()) return value;
  Add(name, "must be an object");
  return nullptr;
}

Json* JsonFields::Array(std::string_view name) {
  Json* const value = Find(name);
  if (value == nullptr || value->is_array()) return value;
  Add(name, "must be a list");
  return nullptr;
}

void JsonFields::Refuse(std::string_view name, std::string_view why) {
  const Json* const value = Find(name);
  if (value == nullptr) return;
  const bool nothing = (value->is_boolean() && !value->get<bool>()) ||
                       (value->is_number() && value->get<double>() == 0) ||
                       (value->is_string() && value->get_ref<const std::string&>().empty()) ||
                       (value->is_structured() && value->empty());
  if (!nothing) Add(name, why);
}

}  // namespace winnow::server
