#include "engine/base/json_keys.h"

#include "engine/base/concat.h"
#include "engine/base/json_file.h"

namespace winnow::engine {
namespace {

// Integers that fit; a JSON float is not an integer even if it is whole, as in the reference.
std::optional<int64_t> AsInt(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const auto wide = value.get<uint64_t>();
    if (wide > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(wide);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  return std::nullopt;
}

}  // namespace

JsonKeys::JsonKeys(const nlohmann::json& json, std::string_view name, std::string_view prefix)
    : json_(json), name_(name), prefix_(prefix) {}

void JsonKeys::Fail(absl::StatusCode code, std::string_view key, std::string_view what) {
  if (!status_.ok()) return;
  status_ = absl::Status(code, Concat(name_, ": ", prefix_, key, ": ", what));
}

void JsonKeys::Adopt(const absl::Status& status) { status_.Update(status); }

const nlohmann::json* JsonKeys::Find(std::string_view key) const {
  asked_.emplace(key);
  const auto found = json_.find(std::string(key));
  if (found == json_.end() || found->is_null()) return nullptr;
  return &*found;
}

bool JsonKeys::IsNull(std::string_view key) const {
  asked_.emplace(key);
  const auto found = json_.find(std::string(key));
  return found != json_.end() && found->is_null();
}

std::vector<std::string> JsonKeys::UnaskedKeys() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : json_.items()) {
    if (!asked_.contains(key)) keys.push_back(key);
  }
  return keys;
}

int64_t JsonKeys::Int(std::string_view key, std::optional<int64_t> absent, int64_t min,
                      int64_t max) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) {
    if (!absent) Fail(absl::StatusCode::kInvalidArgument, key, "missing");
    return absent.value_or(0);
  }
  const std::optional<int64_t> integer = AsInt(*value);
  if (!integer || *integer < min || *integer > max) {
    Fail(absl::StatusCode::kInvalidArgument, key,
         Concat("must be an integer from ", min, " to ", max, ", is ", ShortDump(*value)));
    return absent.value_or(0);
  }
  return *integer;
}

double JsonKeys::Number(std::string_view key, std::optional<double> absent, double min,
                        double max) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) {
    if (!absent) Fail(absl::StatusCode::kInvalidArgument, key, "missing");
    return absent.value_or(0);
  }
  // Written so that a NaN fails.
  if (!value->is_number() || !(value->get<double>() >= min && value->get<double>() <= max)) {
    Fail(absl::StatusCode::kInvalidArgument, key,
         Concat("must be a number from ", min, " to ", max, ", is ", ShortDump(*value)));
    return absent.value_or(0);
  }
  return value->get<double>();
}

std::optional<double> JsonKeys::OptionalNumber(std::string_view key, double min, double max) {
  if (Find(key) == nullptr) return std::nullopt;
  return Number(key, 0.0, min, max);
}

bool JsonKeys::Bool(std::string_view key, bool absent) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return absent;
  if (!value->is_boolean()) {
    Fail(absl::StatusCode::kInvalidArgument, key,
         Concat("must be true or false, is ", ShortDump(*value)));
    return absent;
  }
  return value->get<bool>();
}

std::string JsonKeys::String(std::string_view key, std::string_view absent) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return std::string(absent);
  if (!value->is_string()) {
    Fail(absl::StatusCode::kInvalidArgument, key,
         Concat("must be a string, is ", ShortDump(*value)));
    return std::string(absent);
  }
  return value->get<std::string>();
}

std::vector<int64_t> JsonKeys::Ints(std::string_view key, int64_t min, int64_t max,
                                    size_t count_max) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return {};
  std::vector<int64_t> integers;
  const auto add = [&](const nlohmann::json& item) {
    const std::optional<int64_t> integer = AsInt(item);
    if (!integer || *integer < min || *integer > max) return false;
    integers.push_back(*integer);
    return true;
  };
  bool good = true;
  if (value->is_array()) {
    good = value->size() <= count_max;
    for (size_t i = 0; good && i < value->size(); ++i) good = add((*value)[i]);
  } else {
    good = add(*value);
  }
  if (!good) {
    Fail(absl::StatusCode::kInvalidArgument, key,
         Concat("must be an integer from ", min, " to ", max, " or a list of at most ", count_max,
                ", is ", ShortDump(*value)));
    return {};
  }
  return integers;
}

std::vector<double> JsonKeys::Numbers(std::string_view key, double min, double max, size_t count) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) {
    Fail(absl::StatusCode::kInvalidArgument, key, "missing");
    return {};
  }
  std::vector<double> numbers;
  bool good = value->is_array() && value->size() == count;
  for (size_t i = 0; good && i < count; ++i) {
    const nlohmann::json& item = (*value)[i];
    good = item.is_number() && item.get<double>() >= min && item.get<double>() <= max;
    if (good) numbers.push_back(item.get<double>());
  }
  if (!good) {
    Fail(absl::StatusCode::kInvalidArgument, key,
         Concat("must be a list of ", count, " numbers from ", min, " to ", max, ", is ",
                ShortDump(*value)));
    return {};
  }
  return numbers;
}

}  // namespace winnow::engine
