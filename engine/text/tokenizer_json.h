// Checked access to a JSON document from a model directory: every wrong type, missing member or
// number out of range is an InvalidArgument status that names the file and the JSON path.
//
// The document is untrusted: size and depth are bounded before a tree is built.
#ifndef WINNOW_ENGINE_TEXT_TOKENIZER_JSON_H_
#define WINNOW_ENGINE_TEXT_TOKENIZER_JSON_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace winnow::engine {

// One value of a document. A view: the JsonDocument must outlive it.
class JsonNode {
 public:
  JsonNode(const nlohmann::json* value, std::string path) : value_(value), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& path() const { return path_; }

  // InvalidArgument (or Unimplemented) with the path in front.
  absl::Status Error(std::string_view message) const;
  absl::Status Unsupported(std::string_view message) const;

  // A member that must be there / that may be absent or null. InvalidArgument if this is no object.
  absl::StatusOr<JsonNode> Member(const std::string& name) const;
  absl::StatusOr<std::optional<JsonNode>> Optional(const std::string& name) const;

  absl::StatusOr<std::string> String() const;
  absl::StatusOr<bool> Bool() const;
  absl::StatusOr<int64_t> Integer(int64_t min, int64_t max) const;
  absl::StatusOr<char32_t> Character() const;  // a string of one code point

  absl::Status RequireArray() const;
  absl::Status RequireObject() const;
  size_t size() const { return value_->size(); }
  JsonNode At(size_t index) const;  // REQUIRES: an array, index < size()

  // A boolean member that may be absent.
  absl::StatusOr<bool> BoolOr(const std::string& name, bool fallback) const;

 private:
  const nlohmann::json* value_;
  std::string path_;
};

class JsonDocument {
 public:
  // `name` is put before each path in errors. InvalidArgument; from ReadFile also ReadSmallFile's.
  static absl::StatusOr<JsonDocument> Parse(std::string_view text, const std::string& name);
  static absl::StatusOr<JsonDocument> ReadFile(const std::string& path);

  JsonNode root() const { return JsonNode(root_.get(), name_ + ": $"); }

 private:
  std::unique_ptr<nlohmann::json> root_;
  std::string name_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_TOKENIZER_JSON_H_
