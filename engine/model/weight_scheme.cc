#include "engine/model/weight_scheme.h"

#include <charconv>
#include <initializer_list>
#include <string>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"

namespace winnow::engine {
namespace {

using Json = nlohmann::json;
using Layout = IntegerScheme::Layout;

constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr int64_t kBlockValues = 32;  // the smallest blocks of kernels/quantized.h

// Reads the keys of a quantisation's object; the first that asks for a lacking feature is reported.
class SchemeReader {
 public:
  SchemeReader(JsonKeys& keys, std::string_view key, const Json& json)
      : outer_(keys), key_(key), json_(json) {}

  std::optional<WeightScheme> Read() {
    const std::string method = Text(json_, "quant_method");
    WeightScheme scheme;
    if (method == "gptq") {
      scheme = ReadGptq();
    } else if (method == "awq") {
      scheme = ReadAwq();
    } else if (method == "fp8") {
      scheme = ReadFloat8();
    } else if (method == "mxfp4") {
      scheme = Mxfp4Scheme{};
    } else if (method == "compressed-tensors") {
      scheme = ReadCompressedTensors();
    } else {
      Lack("quant_method",
           Concat("quantised weights (", ShortDump(method),
                  ") are not supported; winnow reads compressed-tensors, gptq, awq, "
                  "fp8 and mxfp4"));
    }
    if (failed_) return std::nullopt;
    return scheme;
  }

 private:
  static std::string Text(const Json& json, std::string_view name) {
    const auto found = json.find(name);
    return found != json.end() && found->is_string() ? found->get<std::string>() : "";
  }
  static int64_t Whole(const Json& json, std::string_view name) {
    const auto found = json.find(name);
    return found != json.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
  }
  // Whether it is absent, null, false or empty.
  static bool IsNothing(const Json& json, std::string_view name) {
    const auto found = json.find(name);
    return found == json.end() || found->is_null() ||
           (found->is_boolean() && !found->get<bool>()) ||
           (found->is_structured() && found->empty());
  }

  void Lack(std::string_view name, std::string_view what) {
    if (!failed_) outer_.Fail(kUnimplemented, Concat(key_, ".", name), what);
    failed_ = true;
  }
  void RefuseUnlessNothing(const Json& json, std::string_view name) {
    if (!IsNothing(json, name)) Lack(name, "is not supported; it must be absent or null");
  }
  // One of `known`.
  int32_t Bits(int64_t bits, std::initializer_list<int32_t> known, std::string_view name) {
    std::string list;
    for (const int32_t wanted : known) {
      if (bits == wanted) return wanted;
      list += Concat(list.empty() ? "" : " and ", wanted);
    }
    Lack(name, Concat(bits, " is not supported; winnow has ", list));
    return 4;
  }
  // A word of `known`; an absent one counts as the first.
  void RequireWord(std::string_view name, std::initializer_list<std::string_view> known) {
    if (IsNothing(json_, name)) return;
    const std::string text = Text(json_, name);
    for (const std::string_view word : known) {
      if (text == word) return;
    }
    Lack(name, Concat(ShortDump(json_.at(name)), " is not supported"));
  }
  int64_t Group(int64_t group) {
    if (group < kBlockValues || group % kBlockValues != 0) {
      Lack("group_size", Concat(group, " is not supported; winnow has multiples of 32"));
    }
    return group;
  }

  IntegerScheme ReadGptq() {
    IntegerScheme scheme{.layout = Layout::kGptq};
    scheme.bits = Bits(Whole(json_, "bits"), {4, 8}, "bits");
    RequireWord("checkpoint_format", {"gptq", "gptq_v2"});
    scheme.zero_less = Text(json_, "checkpoint_format") == "gptq_v2" ? 0 : 1;
    for (const std::string_view name : {"dynamic", "is_marlin_format"}) {
      RefuseUnlessNothing(json_, name);
    }
    const int64_t group = Whole(json_, "group_size");
    scheme.group = group == -1 ? 0 : Group(group);
    return scheme;
  }

  IntegerScheme ReadAwq() {
    IntegerScheme scheme{.layout = Layout::kAwq};
    scheme.bits = Bits(Whole(json_, "bits"), {4}, "bits");
    const std::string version = Text(json_, "version");
    if (version != "gemm" && version != "GEMM") {
      Lack("version", Concat(ShortDump(version), " is not supported; winnow has gemm"));
    }
    if (IsNothing(json_, "zero_point")) Lack("zero_point", "must be true");
    scheme.group = Group(Whole(json_, "group_size"));
    return scheme;
  }

  // Activations are not rounded here, by either of its schemes.
  Float8Scheme ReadFloat8() {
    RequireWord("activation_scheme", {"dynamic", "static"});
    RequireWord("fmt", {"e4m3"});
    RequireWord("scale_fmt", {"float", "ue8m0"});
    if (IsNothing(json_, "weight_block_size")) return {};
    return ReadBlocks(json_, "weight_block_size", "weight_block_size");
  }

  WeightScheme ReadCompressedTensors() {
    const std::string format = Text(json_, "format");
    const bool packed = format == "pack-quantized", naive = format == "naive-quantized";
    if (!packed && !naive && format != "int-quantized" && format != "float-quantized") {
      Lack("format", Concat(ShortDump(format),
                            " is not supported; winnow has int-quantized, pack-quantized and "
                            "float-quantized"));
    }
    for (const std::string_view name : {"kv_cache_scheme", "transform_config"}) {
      RefuseUnlessNothing(json_, name);
    }
    if (!IsNothing(json_, "sparsity_config") &&
        Text(json_.at("sparsity_config"), "format") != "dense") {
      Lack("sparsity_config", "is not supported unless its format is dense");
    }
    const auto groups = json_.find("config_groups");
    if (groups == json_.end() || !groups->is_object() || groups->size() != 1) {
      Lack("config_groups", "must be one group: mixed formats are not supported");
      return {};
    }
    const Json& group = groups->begin().value();
    if (!group.is_object() || !group.contains("weights") || !group.at("weights").is_object()) {
      Lack("config_groups", "has no weights");
      return {};
    }
    if (!IsNothing(group, "format") && Text(group, "format") != format) {
      Lack("config_groups.format", "is another than format");
    }
    RefuseUnlessNothing(group, "output_activations");
    RequireActivations(group);
    const Json& weights = group.at("weights");
    if (packed) return ReadIntegers(weights, Layout::kPacked);
    if (format == "int-quantized" || (naive && Text(weights, "type") == "int")) {
      return ReadIntegers(weights, Layout::kPlain);
    }
    return ReadFloatQuantized(weights);
  }

  // Activations of 8 bits, or plain ones: loading does not round them (docs/models.md).
  void RequireActivations(const Json& group) {
    if (IsNothing(group, "input_activations")) return;
    const Json& inputs = group.at("input_activations");
    const std::string type = Text(inputs, "type");
    if (Whole(inputs, "num_bits") == 8 && (type == "int" || type == "float")) return;
    Lack("input_activations", "is not supported unless it is of 8-bit integers or floats, or null");
  }

  IntegerScheme ReadIntegers(const Json& weights, Layout layout) {
    const bool packed = layout == Layout::kPacked;
    IntegerScheme scheme{.layout = layout, .group = 0};
    const std::string_view bits = "config_groups.weights.num_bits";
    scheme.bits = packed ? Bits(Whole(weights, "num_bits"), {4, 8}, bits)
                         : Bits(Whole(weights, "num_bits"), {8}, bits);
    RequireOfWeights(weights, "type", {"int"});
    if (packed) {
      RequireOfWeights(weights, "strategy", {"group", "channel"});
    } else {
      RequireOfWeights(weights, "strategy", {"tensor", "channel", "group"});
    }
    if (Text(weights, "strategy") == "group") scheme.group = Group(Whole(weights, "group_size"));
    return scheme;
  }

  Float8Scheme ReadFloatQuantized(const Json& weights) {
    Bits(Whole(weights, "num_bits"), {8}, "config_groups.weights.num_bits");
    RequireOfWeights(weights, "type", {"float"});
    RequireOfWeights(weights, "strategy", {"tensor", "channel", "block"});
    if (Text(weights, "strategy") != "block") return {};
    return ReadBlocks(weights, "block_structure", "config_groups.weights.block_structure");
  }

  void RequireOfWeights(const Json& weights, std::string_view name,
                        std::initializer_list<std::string_view> known) {
    const std::string text = Text(weights, name);
    for (const std::string_view word : known) {
      if (text == word) return;
    }
    Lack(Concat("config_groups.weights.", name),
         Concat(ShortDump(text), " is not supported; winnow has ", Listed(known)));
  }
  static std::string Listed(std::initializer_list<std::string_view> words) {
    std::string list;
    for (const std::string_view word : words) list += Concat(list.empty() ? "" : ", ", word);
    return list;
  }

  // Outputs and inputs of one scale: [128, 128], or "128x128".
  Float8Scheme ReadBlocks(const Json& json, std::string_view name, std::string_view full_name) {
    Float8Scheme scheme;
    const auto found = json.find(name);
    if (found != json.end() && found->is_array() && found->size() == 2 &&
        found->at(0).is_number_integer() && found->at(1).is_number_integer()) {
      scheme = {found->at(0).get<int64_t>(), found->at(1).get<int64_t>()};
    } else if (found != json.end() && found->is_string()) {
      const std::string text = found->get<std::string>();
      const char* const end = text.data() + text.size();
      const auto [by, error] = std::from_chars(text.data(), end, scheme.scale_rows);
      if (error == std::errc() && by != end && *by == 'x' &&
          std::from_chars(by + 1, end, scheme.scale_cols).ptr != end) {
        scheme = {};
      }
    }
    constexpr int64_t kMost = 1 << 20;
    if (scheme.scale_rows < 1 || scheme.scale_rows > kMost || scheme.scale_cols < kBlockValues ||
        scheme.scale_cols > kMost || scheme.scale_cols % kBlockValues != 0) {
      Lack(full_name, "must be outputs and inputs of one scale, the latter a multiple of 32");
    }
    return scheme;
  }

  JsonKeys& outer_;
  const std::string key_;
  const Json& json_;
  bool failed_ = false;
};

}  // namespace

std::optional<WeightScheme> ReadWeightScheme(JsonKeys& keys, std::string_view key) {
  const Json* json = keys.Find(key);
  if (json == nullptr) return std::nullopt;
  if (!json->is_object()) {
    keys.Fail(absl::StatusCode::kInvalidArgument, key, "must be an object");
    return std::nullopt;
  }
  return SchemeReader(keys, key, *json).Read();
}

}  // namespace winnow::engine
