// How a model directory's files hold quantised matrices: quantization_config (or compression_config) of config.json.
#ifndef WINNOW_ENGINE_MODEL_WEIGHT_SCHEME_H_
#define WINNOW_ENGINE_MODEL_WEIGHT_SCHEME_H_

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

#include "engine/base/json_keys.h"

namespace winnow::engine {

// 4-bit or 8-bit integers in groups (grouped_integers.h). Plain data.
struct IntegerScheme {
  enum class Layout { kPlain, kPacked, kGptq, kAwq };
  Layout layout = Layout::kPacked;
  int32_t bits = 4;
  // Values of one scale, a multiple of 32; 0: all of an output, of kPlain also all of a matrix.
  int64_t group = 128;
  // Difference between the real zero points and the file's: 1 in GPTQ's first format.
  int32_t zero_less = 0;
  int64_t in_word() const { return 32 / bits; }
  bool operator==(const IntegerScheme&) const = default;
};

// 8-bit floats (float8_matrix.h). Plain data.
struct Float8Scheme {
  // Outputs and inputs of one scale; 0: one for a matrix, or one for each output.
  int64_t scale_rows = 0, scale_cols = 0;
  bool has_blocks() const { return scale_rows != 0; }
  bool operator==(const Float8Scheme&) const = default;
};

// 4-bit floats of experts (mxfp4_matrix.h). Which tensors they are the file's own names say.
struct Mxfp4Scheme {
  bool operator==(const Mxfp4Scheme&) const = default;
};

using WeightScheme = std::variant<IntegerScheme, Float8Scheme, Mxfp4Scheme>;

// The scheme of config.json's object `key`, absent if there is none. Unimplemented, through `keys`, names the key that asks
// for a lacking feature. Read are compressed-tensors (int-quantized, pack-quantized, float-quantized), gptq, awq, fp8 and mxfp4.
std::optional<WeightScheme> ReadWeightScheme(JsonKeys& keys, std::string_view key);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_WEIGHT_SCHEME_H_
