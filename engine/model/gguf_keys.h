// Typed access to the keys of a GGUF file: the first error sticks, so that a reader lists its keys and checks once
// (json_keys.h is the same for JSON).
#ifndef WINNOW_ENGINE_MODEL_GGUF_KEYS_H_
#define WINNOW_ENGINE_MODEL_GGUF_KEYS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/gguf.h"

namespace winnow::engine {

// `contents` must outlive this. Not for several threads.
class GgufKeys {
 public:
  // Errors read "<name>: key "<key>" at byte <offset>: ...".
  GgufKeys(const GgufContents& contents, std::string_view name);

  const absl::Status& status() const { return status_; }
  void Fail(absl::StatusCode code, std::string_view key, std::string_view what);

  const GgufValue* Find(std::string_view key) const { return contents_.Find(key); }

  // `absent`: the value where the key is not there; without it the key is required. A wrong value gives `absent` or
  // zero, and the error.
  int64_t Int(std::string_view key, std::optional<int64_t> absent, int64_t min, int64_t max);
  // The same, of a key that may have one number or one for each layer, which must all be the same.
  int64_t IntOfLayers(std::string_view key, std::optional<int64_t> absent, int64_t min,
                      int64_t max);
  double Number(std::string_view key, std::optional<double> absent, double min,
                double max);  // float or integer
  std::optional<double> OptionalNumber(std::string_view key, double min, double max);
  std::optional<int64_t> OptionalInt(std::string_view key, int64_t min, int64_t max);
  std::optional<bool> OptionalBool(std::string_view key);
  std::string String(std::string_view key, std::optional<std::string_view> absent);

 private:
  void WrongType(const GgufValue& value, std::string_view wanted);

  const GgufContents& contents_;
  std::string name_;
  absl::Status status_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GGUF_KEYS_H_
