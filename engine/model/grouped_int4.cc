#include "engine/model/grouped_int4.h"

#include <array>
#include <cmath>
#include <cstring>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "kernels/host_matrix.h"

namespace winnow::engine {
namespace {

using Json = nlohmann::json;
using kernels::WeightType;
using Layout = Int4Scheme::Layout;

constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr int64_t kPerWord = 8;  // integers in an int32
constexpr int64_t kBlockValues = 32;

// Number `which` of the eight integers in word `word` of `words`, as winnow counts them.
uint8_t InWord(const std::byte* words, int64_t word, int64_t which) {
  uint32_t bits;
  std::memcpy(&bits, words + 4 * word, sizeof bits);
  return static_cast<uint8_t>(bits >> (4 * which) & 15);
}

// The place of integer i of eight in AWQ's words.
int64_t AwqPlace(int64_t i) {
  constexpr std::array<int64_t, kPerWord> kPlaces = {0, 4, 1, 5, 2, 6, 3, 7};
  return kPlaces[i];
}

// Reads the keys of a quantisation's object; the first that asks for what is lacking is reported.
class SchemeReader {
 public:
  SchemeReader(JsonKeys& keys, std::string_view key, const Json& json)
      : outer_(keys), key_(key), json_(json) {}

  std::optional<Int4Scheme> Read() {
    const std::string method = Text(json_, "quant_method");
    Int4Scheme scheme;
    if (method == "gptq") {
      ReadGptq(scheme);
    } else if (method == "awq") {
      ReadAwq(scheme);
    } else if (method == "compressed-tensors") {
      ReadPacked(scheme);
    } else {
      Lack("quant_method", Concat("quantised weights (", ShortDump(method),
                                  ") are not supported; winnow reads 4-bit compressed-tensors, "
                                  "gptq and awq"));
    }
    if (failed_) return std::nullopt;
    if (scheme.group < kBlockValues || scheme.group % kBlockValues != 0) {
      Lack("group_size", Concat(scheme.group, " is not supported; winnow has multiples of 32"));
      return std::nullopt;
    }
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
  void RequireFour(int64_t bits, std::string_view name) {
    if (bits != 4) Lack(name, Concat(bits, " is not supported; winnow has 4"));
  }

  void ReadGptq(Int4Scheme& scheme) {
    scheme.layout = Layout::kGptq;
    RequireFour(Whole(json_, "bits"), "bits");
    scheme.group = Whole(json_, "group_size");
    const std::string format = Text(json_, "checkpoint_format");
    if (!format.empty() && format != "gptq" && format != "gptq_v2") {
      Lack("checkpoint_format", Concat(ShortDump(format), " is not supported"));
    }
    scheme.zero_less = format == "gptq_v2" ? 0 : 1;
    for (const std::string_view name : {"dynamic", "is_marlin_format"}) {
      RefuseUnlessNothing(json_, name);
    }
  }

  void ReadAwq(Int4Scheme& scheme) {
    scheme.layout = Layout::kAwq;
    RequireFour(Whole(json_, "bits"), "bits");
    scheme.group = Whole(json_, "group_size");
    const std::string version = Text(json_, "version");
    if (version != "gemm" && version != "GEMM") {
      Lack("version", Concat(ShortDump(version), " is not supported; winnow has gemm"));
    }
    if (IsNothing(json_, "zero_point")) Lack("zero_point", "must be true");
  }

  void ReadPacked(Int4Scheme& scheme) {
    scheme.layout = Layout::kPacked;
    if (const std::string format = Text(json_, "format"); format != "pack-quantized") {
      Lack("format", Concat(ShortDump(format), " is not supported; winnow has pack-quantized"));
    }
    for (const std::string_view name : {"kv_cache_scheme", "sparsity_config", "transform_config"}) {
      RefuseUnlessNothing(json_, name);
    }
    const auto groups = json_.find("config_groups");
    if (groups == json_.end() || !groups->is_object() || groups->size() != 1) {
      return Lack("config_groups", "must be one group: mixed formats are not supported");
    }
    const Json& group = groups->begin().value();
    if (!group.is_object() || !group.contains("weights") || !group.at("weights").is_object()) {
      return Lack("config_groups", "has no weights");
    }
    for (const std::string_view name : {"input_activations", "output_activations"}) {
      RefuseUnlessNothing(group, name);
    }
    const Json& weights = group.at("weights");
    RequireFour(Whole(weights, "num_bits"), "config_groups.weights.num_bits");
    if (const std::string type = Text(weights, "type"); type != "int") {
      Lack("config_groups.weights.type",
           Concat(ShortDump(type), " is not supported; winnow has int"));
    }
    if (const std::string strategy = Text(weights, "strategy"); strategy != "group") {
      Lack("config_groups.weights.strategy",
           Concat(ShortDump(strategy), " is not supported; winnow has group"));
    }
    scheme.group = Whole(weights, "group_size");
  }

  JsonKeys& outer_;
  const std::string key_;
  const Json& json_;
  bool failed_ = false;
};

}  // namespace

std::optional<Int4Scheme> ReadInt4Scheme(JsonKeys& keys, std::string_view key) {
  const Json* json = keys.Find(key);
  if (json == nullptr) return std::nullopt;
  if (!json->is_object()) {
    keys.Fail(absl::StatusCode::kInvalidArgument, key, "must be an object");
    return std::nullopt;
  }
  return SchemeReader(keys, key, *json).Read();
}

uint8_t GroupedInt4::Integer(int64_t row, int64_t col) const {
  switch (scheme.layout) {
    case Layout::kPacked:
      return InWord(integers, (row * cols + col) / kPerWord, col % kPerWord);
    case Layout::kGptq:
      return InWord(integers, col / kPerWord * rows + row, col % kPerWord);
    case Layout::kAwq:
      return InWord(integers, (col * rows + row) / kPerWord, AwqPlace(row % kPerWord));
  }
  return 0;
}

uint8_t GroupedInt4::Zero(int64_t row, int64_t group) const {
  if (zeros == nullptr) return 8;
  uint8_t zero = 0;
  switch (scheme.layout) {
    case Layout::kPacked:
      zero = InWord(zeros, row / kPerWord * groups() + group, row % kPerWord);
      break;
    case Layout::kGptq:
      zero = InWord(zeros, (group * rows + row) / kPerWord, row % kPerWord);
      break;
    case Layout::kAwq:
      zero = InWord(zeros, (group * rows + row) / kPerWord, AwqPlace(row % kPerWord));
      break;
  }
  return static_cast<uint8_t>(zero + scheme.zero_less);
}

float GroupedInt4::Scale(int64_t row, int64_t group) const {
  const int64_t place =
      scheme.layout == Layout::kPacked ? row * groups() + group : group * rows + row;
  return kernels::ElementAt(scales, scale_type, place);
}

absl::Status GroupedInt4::CheckScales() const {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups(); ++group) {
      const float scale = Scale(row, group);
      const bool good = scale > 0 && std::isfinite(scale);
      if (good && kernels::ToFloat(kernels::ToF16(scale)) == scale) continue;
      return absl::InvalidArgumentError(
          Concat("the scale of output ", row, ", group ", group, " is ", scale,
                 good ? ", which float16 cannot hold" : "; it must be finite and above 0"));
    }
  }
  return absl::OkStatus();
}

WeightType GroupedInt4::block_type() const {
  if (zeros == nullptr) return WeightType::kQ4_0;
  return scheme.group % 128 == 0 ? WeightType::kI4x128 : WeightType::kI4x32;
}

void GroupedInt4::WriteBlocks(int64_t row, std::byte* out) const {
  const WeightType type = block_type();
  const kernels::BlockSize block = kernels::BlockSizeOf(type);
  for (int64_t at = 0; at < cols; at += block.values, out += block.bytes) {
    const int64_t group = at / scheme.group;
    const kernels::F16 scale = kernels::ToF16(Scale(row, group));
    std::memcpy(out, &scale.bits, 2);
    std::byte* packed = out + 2;
    if (type != WeightType::kQ4_0) {
      out[2] = std::byte{Zero(row, group)};
      out[3] = std::byte{0};
      packed = out + 4;
    }
    for (int64_t first = 0; first < block.values; first += kBlockValues, packed += 16) {
      for (int64_t i = 0; i < 16; ++i) {
        const int low = Integer(row, at + first + i), high = Integer(row, at + first + i + 16);
        packed[i] = static_cast<std::byte>(low | high << 4);
      }
    }
  }
}

}  // namespace winnow::engine
