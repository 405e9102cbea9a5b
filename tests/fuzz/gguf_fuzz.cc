// Any bytes as a GGUF file: refused, or what it says lies within the file; and its configuration, its tokenizer as
// tokenizer.json and its chat template are refused, or well-formed.
//
// Sources: engine/model/gguf.cc engine/model/gguf_keys.cc engine/model/gguf_config.cc engine/model/model_family.cc engine/model/rope.cc
// Sources: engine/gguf_tokenizer.cc engine/base/json_file.cc engine/text/pre_tokenizer_kinds.cc engine/text/unicode/unicode_text.cc
// Sources: engine/text/unicode/unicode_tables.cc kernels/check.cc kernels/quantized.cc
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/gguf_tokenizer.h"
#include "engine/model/gguf.h"
#include "engine/model/gguf_config.h"
#include "kernels/check.h"
#include "kernels/quantized.h"
#include "nlohmann/json.hpp"

using namespace winnow::engine;  // NOLINT(google-build-using-namespace): a main file

namespace {

void CheckCode(const absl::Status& status) {
  WINNOW_CHECK(status.code() == absl::StatusCode::kInvalidArgument ||
               status.code() == absl::StatusCode::kUnimplemented ||
               status.code() == absl::StatusCode::kNotFound);
}

// Reads every byte that the contents promise.
uint64_t ReadAll(const GgufContents& contents, size_t size) {
  uint64_t sum = 0;
  for (const GgufValue& value : contents.values()) {
    WINNOW_CHECK(contents.Find(value.key) == &value);
    sum += value.Integer().value_or(0) + (value.Float().has_value() ? 1 : 0);
    if (const auto text = value.String()) {
      for (const char c : *text) sum += static_cast<unsigned char>(c);
    }
    if (value.type != GgufValueType::kArray) continue;
    if (value.element == GgufValueType::kString) {
      for (const std::string_view text : value.Strings()) {
        for (const char c : text) sum += static_cast<unsigned char>(c);
      }
    } else {
      for (uint64_t i = 0; i < value.count; ++i)
        sum += value.IntegerAt(i).value_or(0) + (value.FloatAt(i).has_value() ? 1 : 0);
    }
  }
  for (const GgufTensor& tensor : contents.tensors()) {
    WINNOW_CHECK(contents.data_offset() <= tensor.begin && tensor.begin < tensor.end &&
                 tensor.end <= size);
    WINNOW_CHECK(contents.FindTensor(tensor.name) == &tensor);
    const auto type = WeightTypeOfGguf(tensor.type);
    if (!type) continue;
    std::vector<float> row(tensor.dims[0]);
    const int64_t row_bytes =
        winnow::kernels::WeightRowBytes(*type, static_cast<int64_t>(tensor.dims[0]));
    for (uint64_t at = tensor.begin; at < tensor.end; at += row_bytes) {
      winnow::kernels::DequantizeRow(*type, contents.Data(tensor).data() + (at - tensor.begin),
                                     static_cast<int64_t>(tensor.dims[0]), row.data());
    }
  }
  return sum;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto contents = GgufContents::Parse(std::as_bytes(std::span(data, size)));
  if (!contents.ok()) {
    CheckCode(contents.status());
    return 0;
  }
  const volatile uint64_t sum = ReadAll(*contents, size);
  (void)sum;
  const auto config = GgufModelConfig(*contents, "fuzz.gguf");
  if (config.ok()) {
    for (const int32_t id : config->eos_token_ids) WINNOW_CHECK(id >= 0 && id < config->vocab_size);
    WINNOW_CHECK(ComputeRope(config->head_dim, config->ropes[0].theta, config->ropes[0].scaling)
                     .inv_freq.size() == static_cast<size_t>(config->head_dim / 2));
  } else {
    CheckCode(config.status());
  }
  const auto json = GgufTokenizerJson(*contents, "fuzz.gguf");
  if (json.ok()) {
    WINNOW_CHECK(nlohmann::json::accept(*json));
  } else {
    CheckCode(json.status());
  }
  const auto chat = ReadGgufChatTemplate(*contents, "fuzz.gguf");
  if (!chat.ok()) CheckCode(chat.status());
  return 0;
}
