#include "engine/model/gguf_keys.h"

#include "engine/base/concat.h"
#include "engine/base/json_file.h"

namespace winnow::engine {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

GgufKeys::GgufKeys(const GgufContents& contents, std::string_view name)
    : contents_(contents), name_(name) {}

void GgufKeys::Fail(absl::StatusCode code, std::string_view key, std::string_view what) {
  if (!status_.ok()) return;
  const GgufValue* value = Find(key);
  status_ = absl::Status(
      code, Concat(name_, ": key ", ShortDump(std::string(key)),
                   value == nullptr ? "" : Concat(" at byte ", value->offset), ": ", what));
}

void GgufKeys::WrongType(const GgufValue& value, std::string_view wanted) {
  Fail(kInvalid, value.key, Concat("must be ", wanted, ", is of type ", GgufTypeName(value.type)));
}

std::optional<int64_t> GgufKeys::OptionalInt(std::string_view key, int64_t min, int64_t max) {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  const std::string wanted = Concat("an integer from ", min, " to ", max);
  const std::optional<int64_t> integer = value->Integer();
  if (!integer) {
    WrongType(*value, wanted);
    return std::nullopt;
  }
  if (*integer < min || *integer > max) {
    Fail(kInvalid, key, Concat("must be ", wanted, ", is ", *integer));
    return std::nullopt;
  }
  return integer;
}

int64_t GgufKeys::Int(std::string_view key, std::optional<int64_t> absent, int64_t min,
                      int64_t max) {
  if (Find(key) == nullptr && !absent) Fail(kInvalid, key, "missing");
  return OptionalInt(key, min, max).value_or(absent.value_or(0));
}

int64_t GgufKeys::IntOfLayers(std::string_view key, std::optional<int64_t> absent, int64_t min,
                              int64_t max) {
  const GgufValue* value = Find(key);
  if (value == nullptr || value->type != GgufValueType::kArray) return Int(key, absent, min, max);
  std::optional<int64_t> all;
  for (uint64_t i = 0; i < value->count; ++i) {
    if (value->element == GgufValueType::kString) break;
    const std::optional<int64_t> one = value->IntegerAt(i);
    if (!one) break;
    if (all && *one != *all) {
      Fail(absl::StatusCode::kUnimplemented, key,
           Concat("differs between layers (", *all, " and ", *one, "), which is not supported"));
      return absent.value_or(0);
    }
    all = one;
  }
  if (!all || *all < min || *all > max) {
    Fail(kInvalid, key, Concat("must be integers from ", min, " to ", max));
    return absent.value_or(0);
  }
  return *all;
}

std::optional<double> GgufKeys::OptionalNumber(std::string_view key, double min, double max) {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  std::optional<double> number = value->Float();
  if (!number) {
    if (const std::optional<int64_t> integer = value->Integer()) {
      number = static_cast<double>(*integer);
    }
  }
  const std::string wanted = Concat("a number from ", min, " to ", max);
  if (!number) {
    WrongType(*value, wanted);
    return std::nullopt;
  }
  if (!(*number >= min && *number <= max)) {  // NaN is neither
    Fail(kInvalid, key, Concat("must be ", wanted, ", is ", *number));
    return std::nullopt;
  }
  return number;
}

double GgufKeys::Number(std::string_view key, std::optional<double> absent, double min,
                        double max) {
  if (Find(key) == nullptr && !absent) Fail(kInvalid, key, "missing");
  return OptionalNumber(key, min, max).value_or(absent.value_or(0));
}

std::optional<bool> GgufKeys::OptionalBool(std::string_view key) {
  const GgufValue* value = Find(key);
  if (value == nullptr) return std::nullopt;
  const std::optional<bool> flag = value->Bool();
  if (!flag) WrongType(*value, "a bool");
  return flag;
}

std::string GgufKeys::String(std::string_view key, std::optional<std::string_view> absent) {
  const GgufValue* value = Find(key);
  if (value == nullptr) {
    if (!absent) Fail(kInvalid, key, "missing");
    return std::string(absent.value_or(""));
  }
  const std::optional<std::string_view> text = value->String();
  if (!text) WrongType(*value, "a string");
  return std::string(text.value_or(absent.value_or("")));
}

}  // namespace winnow::engine
