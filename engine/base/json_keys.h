// Typed access to the keys of a JSON object, for configuration files: the first error sticks, so
// that a reader lists its keys and checks once.
//
//   JsonKeys keys(json, "config.json");
//   config.hidden_size = keys.Int("hidden_size", {}, 1, 1 << 17);
//   WINNOW_RETURN_IF_ERROR(keys.status());
#ifndef WINNOW_ENGINE_BASE_JSON_KEYS_H_
#define WINNOW_ENGINE_BASE_JSON_KEYS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {

// A null value counts as absent except for IsNull. `json` must
// outlive this. Not for several threads.
class JsonKeys {
 public:
  // Errors read "<name>: <prefix><key>: ...".
  JsonKeys(const nlohmann::json& json, std::string_view name, std::string_view prefix = "");

  const absl::Status& status() const { return status_; }
  void Fail(absl::StatusCode code, std::string_view key, std::string_view what);
  void Adopt(const absl::Status& status);  // the error of a nested object's keys

  const nlohmann::json* Find(std::string_view key) const;  // nullptr if absent or null
  bool IsNull(std::string_view key) const;                 // there, and null
  // Keys of the object that nobody has asked for, by any method, in ascending order.
  std::vector<std::string> UnaskedKeys() const;

  // `absent`: the value of an absent key; without it the key is required. A wrong value gives
  // `absent` or zero, and the error.
  int64_t Int(std::string_view key, std::optional<int64_t> absent, int64_t min, int64_t max);
  double Number(std::string_view key, std::optional<double> absent, double min, double max);
  std::optional<double> OptionalNumber(std::string_view key, double min, double max);
  bool Bool(std::string_view key, bool absent);
  std::string String(std::string_view key, std::string_view absent);
  // One integer or a list of at most `count_max`; empty if absent.
  std::vector<int64_t> Ints(std::string_view key, int64_t min, int64_t max, size_t count_max);
  // A list of `count` numbers, which must be there; empty after an error.
  std::vector<double> Numbers(std::string_view key, double min, double max, size_t count);

 private:
  const nlohmann::json& json_;
  std::string name_, prefix_;
  mutable std::set<std::string, std::less<>> asked_;
  absl::Status status_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_JSON_KEYS_H_
