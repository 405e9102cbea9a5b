#include "engine/grammar/grammar_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxShownBytes = 200;  // of a path

template <size_t n>
bool IsOneOf(std::string_view name, const std::array<std::string_view, n>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// They say something about a value, and xgrammar does not know them, or passes over them.
constexpr std::array<std::string_view, 13> kUnknown = {"not",
                                                       "if",
                                                       "then",
                                                       "else",
                                                       "dependentRequired",
                                                       "dependentSchemas",
                                                       "contains",
                                                       "dependencies",
                                                       "additionalItems",
                                                       "$dynamicRef",
                                                       "$recursiveRef",
                                                       "contentSchema",
                                                       "disallow"};
// The first of these that a schema has decides alone; what stands beside it is passed over.
constexpr std::array<std::string_view, 6> kDeciding = {"$ref",  "const", "enum",
                                                       "anyOf", "oneOf", "allOf"};
// Keywords that are about values of one type.
constexpr std::array<std::string_view, 24> kOfTypes = {"minimum",
                                                       "maximum",
                                                       "exclusiveMinimum",
                                                       "exclusiveMaximum",
                                                       "multipleOf",
                                                       "minLength",
                                                       "maxLength",
                                                       "pattern",
                                                       "format",
                                                       "items",
                                                       "prefixItems",
                                                       "unevaluatedItems",
                                                       "minItems",
                                                       "maxItems",
                                                       "uniqueItems",
                                                       "properties",
                                                       "required",
                                                       "patternProperties",
                                                       "propertyNames",
                                                       "additionalProperties",
                                                       "unevaluatedProperties",
                                                       "minProperties",
                                                       "maxProperties",
                                                       "minContains"};
// By these alone a schema without a type is taken for an object's or a list's.
constexpr std::array<std::string_view, 6> kTypesOfTheirOwn = {
    "properties", "additionalProperties", "unevaluatedProperties",
    "items",      "prefixItems",          "unevaluatedItems"};
constexpr std::array<std::string_view, 5> kFormats = {"idn-email", "idn-hostname", "iri",
                                                      "iri-reference", "regex"};

absl::Status Wrong(std::string_view path, std::string_view what) {
  return absl::InvalidArgumentError(Concat(path.substr(0, kMaxShownBytes), ": ", what));
}

bool IsOfType(const Json& value, const std::string& type) {
  if (type == "integer") {
    return value.is_number_integer() ||
           (value.is_number_float() && value.get<double>() == std::floor(value.get<double>()));
  }
  return (type == "string" && value.is_string()) || (type == "number" && value.is_number()) ||
         (type == "boolean" && value.is_boolean()) || (type == "null" && value.is_null()) ||
         (type == "array" && value.is_array()) || (type == "object" && value.is_object());
}

class SchemaCheck {
 public:
  absl::Status Check(const Json& schema, const std::string& path) {
    if (schema.is_boolean()) return absl::OkStatus();
    if (!schema.is_object()) return Wrong(path, "a schema is an object, true or false");
    for (const std::string_view name : kUnknown) {
      if (schema.contains(name)) return Wrong(path, Concat(name, " is not supported"));
    }
    if (schema.value("uniqueItems", Json()) == true) {
      return Wrong(path, "uniqueItems is not supported");
    }
    WINNOW_RETURN_IF_ERROR(CheckBeside(schema, path));
    WINNOW_RETURN_IF_ERROR(CheckValues(schema, path));
    if (const auto format = schema.find("format");
        format != schema.end() && format->is_string() &&
        IsOneOf(format->get_ref<const std::string&>(), kFormats)) {
      return Wrong(
          path, Concat("the format ", format->get_ref<const std::string&>(), " is not supported"));
    }
    // xgrammar takes the type for granted where these stand.
    for (const std::string_view name : {"format", "pattern"}) {
      if (schema.contains(name) && !schema[std::string(name)].is_string()) {
        return Wrong(path, Concat(name, " must be a string"));
      }
    }
    if (const auto required = schema.find("required"); required != schema.end()) {
      const bool good =
          required->is_array() && std::all_of(required->begin(), required->end(),
                                              [](const Json& name) { return name.is_string(); });
      if (!good) return Wrong(path, "required must be a list of strings");
    }
    return CheckParts(schema, path);
  }

 private:
  static absl::Status CheckBeside(const Json& schema, const std::string& path) {
    const auto deciding = std::find_if(kDeciding.begin(), kDeciding.end(),
                                       [&](auto name) { return schema.contains(name); });
    const bool typed = schema.contains("type");
    for (const auto& [name, value] : schema.items()) {
      const bool of_types = IsOneOf(name, kOfTypes);
      if (deciding != kDeciding.end()) {
        const bool counts = of_types || IsOneOf(name, kDeciding) || name == "type";
        // A type beside values is checked against them.
        const bool values = *deciding == "const" || *deciding == "enum";
        if (counts && name != *deciding && !(values && name == "type")) {
          return Wrong(path, Concat(name, " beside ", *deciding, " is not supported"));
        }
      } else if (!typed && of_types && !IsOneOf(name, kTypesOfTheirOwn)) {
        const bool has_own = std::any_of(kTypesOfTheirOwn.begin(), kTypesOfTheirOwn.end(),
                                         [&](auto own) { return schema.contains(own); });
        if (!has_own) return Wrong(path, Concat(name, " needs a type beside it"));
      }
    }
    return absl::OkStatus();
  }

  static absl::Status CheckValues(const Json& schema, const std::string& path) {
    const auto type = schema.find("type");
    if (type == schema.end()) return absl::OkStatus();
    std::vector<std::string> types;
    for (const Json& one : type->is_array() ? *type : Json::array({*type})) {
      if (!one.is_string()) return Wrong(path, "type must be a string or a list of strings");
      types.push_back(one.get<std::string>());
    }
    const auto fits = [&](const Json& value) {
      return std::any_of(types.begin(), types.end(),
                         [&](const std::string& one) { return IsOfType(value, one); });
    };
    if (const auto value = schema.find("const"); value != schema.end() && !fits(*value)) {
      return Wrong(path, "const is not of the type");
    }
    if (const auto values = schema.find("enum"); values != schema.end() && values->is_array()) {
      if (!std::all_of(values->begin(), values->end(), fits)) {
        return Wrong(path, "enum has a value that is not of the type");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckParts(const Json& schema, const std::string& path) {
    for (const char* const name : {"items", "unevaluatedItems", "additionalProperties",
                                   "unevaluatedProperties", "propertyNames"}) {
      if (const auto part = schema.find(name); part != schema.end()) {
        WINNOW_RETURN_IF_ERROR(Check(*part, Concat(path, "/", name)));
      }
    }
    for (const char* const name : {"properties", "patternProperties", "$defs", "definitions"}) {
      const auto parts = schema.find(name);
      if (parts == schema.end()) continue;
      if (!parts->is_object()) return Wrong(path, Concat(name, " must be an object"));
      for (const auto& [key, part] : parts->items()) {
        WINNOW_RETURN_IF_ERROR(Check(part, Concat(path, "/", name, "/", key)));
      }
    }
    for (const char* const name : {"prefixItems", "anyOf", "oneOf", "allOf"}) {
      const auto parts = schema.find(name);
      if (parts == schema.end()) continue;
      if (!parts->is_array()) return Wrong(path, Concat(name, " must be a list"));
      for (size_t i = 0; i < parts->size(); ++i) {
        WINNOW_RETURN_IF_ERROR(Check((*parts)[i], Concat(path, "/", name, "/", i)));
      }
    }
    return absl::OkStatus();
  }
};

// Nothing: not JSON, or nested too deep.
Json ParseBounded(const std::string& text, absl::Status* status) {
  bool deep = false;
  Json json = Json::parse(
      text,
      [&deep](int depth, Json::parse_event_t, Json&) {
        deep = deep || depth > kMaxSchemaDepth;
        return !deep;
      },
      /*allow_exceptions=*/false);
  if (deep) {
    *status = absl::InvalidArgumentError(Concat("is nested deeper than ", kMaxSchemaDepth));
  } else if (json.is_discarded()) {
    *status = absl::InvalidArgumentError("is not JSON");
  }
  return json;
}

// Schemas inside a structural tag.
absl::Status CheckTag(const Json& json, const std::string& path) {
  if (json.is_object() && json.contains("json_schema") &&
      json.value("type", Json()) == "json_schema") {
    return SchemaCheck().Check(json["json_schema"], path + "/json_schema");
  }
  if (json.is_structured()) {
    for (const auto& [key, part] : json.items()) {
      WINNOW_RETURN_IF_ERROR(CheckTag(part, Concat(path, "/", key)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckGrammarSource(const GrammarSource& source) {
  const size_t most = source.kind == GrammarKind::kRegex ? kMaxRegexBytes : kMaxGrammarBytes;
  if (source.text.size() > most) {
    return absl::InvalidArgumentError(
        Concat("has ", source.text.size(), " bytes, may have at most ", most));
  }
  if (source.text.empty()) return absl::InvalidArgumentError("must not be empty");
  if (FindInvalidUtf8(source.text) != std::string::npos) {
    return absl::InvalidArgumentError("is not UTF-8");
  }
  if (source.kind == GrammarKind::kRegex || source.kind == GrammarKind::kEbnf) {
    return absl::OkStatus();
  }
  absl::Status status;
  const Json json = ParseBounded(source.text, &status);
  WINNOW_RETURN_IF_ERROR(status);
  if (source.kind == GrammarKind::kStructuralTag) return CheckTag(json, "#");
  return SchemaCheck().Check(json, "#");
}

}  // namespace winnow::engine
