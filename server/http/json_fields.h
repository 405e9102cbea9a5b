// Typed access to the fields of a request's JSON. What has the wrong type is noted among the
// violations, with its path; a field that is absent or null is absent.
//
// Strings are moved out: a prompt of megabytes is not copied. For one thread.
#ifndef WINNOW_SERVER_HTTP_JSON_FIELDS_H_
#define WINNOW_SERVER_HTTP_JSON_FIELDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "server/status.h"

namespace winnow::server {

// Bytes of a client's own text that an error repeats.
inline constexpr size_t kMaxShownBytes = 40;

// The body of a request as a JSON object. InvalidArgument (INVALID_ENCODING): it is none, is nested
// too deep, or is not UTF-8.
absl::StatusOr<nlohmann::json> ParseBody(std::string_view body);

class JsonFields {
 public:
  // `object` and `violations` must outlive this. `prefix` is put before names: "winnow.".
  // REQUIRES: object.is_object().
  JsonFields(nlohmann::json& object, Violations& violations, std::string prefix = "");

  nlohmann::json* Find(std::string_view name);  // nullptr: absent or null
  std::optional<bool> Bool(std::string_view name);
  std::optional<int32_t> Int32(std::string_view name);
  // Negative numbers count from 2^64 down, as seeds of other APIs may be negative.
  std::optional<uint64_t> Seed(std::string_view name);
  std::optional<float> Number(std::string_view name);
  std::optional<std::string> String(std::string_view name);
  // An object, or nullptr.
  nlohmann::json* Object(std::string_view name);
  // An array, or nullptr.
  nlohmann::json* Array(std::string_view name);

  // Notes that `name` is not served, unless it is absent, null, false, 0, "" or empty.
  void Refuse(std::string_view name, std::string_view why);
  void Add(std::string_view name, std::string_view what);

  std::string Path(std::string_view name) const;
  Violations& violations() { return violations_; }

 private:
  nlohmann::json& object_;
  Violations& violations_;
  const std::string prefix_;
};

// A whole number that fits; nothing if `value` is something else. 3.0 is a whole number.
std::optional<int32_t> ToInt32(const nlohmann::json& value);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_JSON_FIELDS_H_
