#include "engine/text/tokenizer_json.h"

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

using nlohmann::json;

// The largest tokenizers in use (256K tokens, 500K merges) take 35 MB.
constexpr size_t kFileBytesMax = size_t{256} << 20;
constexpr size_t kDepthMax = 64;
// A number takes two bytes of text and 16 of tree, an empty array even 40: what 256 MB of hostile
// text can grow to is bounded by the number of values.
constexpr size_t kValuesMax = size_t{16} << 20;

// Walks the text once without keeping anything, to bound what the tree will cost.
class BoundsCheck : public nlohmann::json_sax<json> {
 public:
  bool null() override { return Count(); }
  bool boolean(bool) override { return Count(); }
  bool number_integer(json::number_integer_t) override { return Count(); }
  bool number_unsigned(json::number_unsigned_t) override { return Count(); }
  bool number_float(json::number_float_t, const json::string_t&) override { return Count(); }
  bool string(json::string_t&) override { return Count(); }
  bool binary(json::binary_t&) override { return Count(); }
  bool key(json::string_t&) override { return true; }
  bool start_object(size_t) override { return Open(); }
  bool start_array(size_t) override { return Open(); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    // The exception's text quotes the input; its position is enough and safe to print.
    problem_ = Concat("malformed JSON or UTF-8 at byte ", position, " (error ", error.id, ")");
    return false;
  }
  const std::string& problem() const { return problem_; }

 private:
  bool Count() {
    if (++values_ <= kValuesMax) return true;
    problem_ = Concat("more than ", kValuesMax, " values");
    return false;
  }
  bool Open() {
    if (++depth_ <= kDepthMax) return Count();
    problem_ = Concat("nested deeper than ", kDepthMax);
    return false;
  }
  bool Close() {
    --depth_;
    return true;
  }

  size_t depth_ = 0;
  size_t values_ = 0;
  std::string problem_;
};

}  // namespace

absl::Status JsonNode::Error(std::string_view message) const {
  return absl::InvalidArgumentError(Concat(path_, ": ", message));
}

absl::Status JsonNode::Unsupported(std::string_view message) const {
  return absl::UnimplementedError(Concat(path_, ": ", message));
}

absl::Status JsonNode::RequireArray() const {
  if (value_->is_array()) return absl::OkStatus();
  return Error(Concat("must be an array, is ", value_->type_name()));
}

absl::Status JsonNode::RequireObject() const {
  if (value_->is_object()) return absl::OkStatus();
  return Error(Concat("must be an object, is ", value_->type_name()));
}

absl::StatusOr<JsonNode> JsonNode::Member(const std::string& name) const {
  WINNOW_RETURN_IF_ERROR(RequireObject());
  auto it = value_->find(name);
  if (it == value_->end()) return Error(Concat("\"", name, "\" is missing"));
  return JsonNode(&*it, Concat(path_, ".", name));
}

absl::StatusOr<std::optional<JsonNode>> JsonNode::Optional(const std::string& name) const {
  WINNOW_RETURN_IF_ERROR(RequireObject());
  auto it = value_->find(name);
  if (it == value_->end() || it->is_null()) return std::optional<JsonNode>();
  return std::optional<JsonNode>(JsonNode(&*it, Concat(path_, ".", name)));
}

absl::StatusOr<std::string> JsonNode::String() const {
  if (const auto* text = value_->get_ptr<const json::string_t*>()) return *text;
  return Error(Concat("must be a string, is ", value_->type_name()));
}

absl::StatusOr<bool> JsonNode::Bool() const {
  if (const auto* flag = value_->get_ptr<const json::boolean_t*>()) return *flag;
  return Error(Concat("must be true or false, is ", value_->type_name()));
}

absl::StatusOr<int64_t> JsonNode::Integer(int64_t min, int64_t max) const {
  if (!value_->is_number_integer()) {
    return Error(Concat("must be an integer, is ", value_->type_name()));
  }
  // An unsigned number above INT64_MAX would wrap in get<int64_t>.
  const bool huge =
      value_->is_number_unsigned() && value_->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  const int64_t number = huge ? INT64_MAX : value_->get<int64_t>();
  if (huge || number < min || number > max) {
    return Error(Concat("must be in ", min, "..", max));
  }
  return number;
}

absl::StatusOr<char32_t> JsonNode::Character() const {
  WINNOW_ASSIGN_OR_RETURN(const std::string text, String());
  int length = 0;
  const char32_t code_point = text.empty() ? 0 : DecodeCodePoint(text, 0, &length);
  if (text.empty() || text.size() != static_cast<size_t>(length)) {
    return Error("must be a string of one character");
  }
  return code_point;
}

JsonNode JsonNode::At(size_t index) const {
  return JsonNode(&(*value_)[index], Concat(path_, "[", index, "]"));
}

absl::StatusOr<bool> JsonNode::BoolOr(const std::string& name, bool fallback) const {
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> node, Optional(name));
  if (!node) return fallback;
  return node->Bool();
}

absl::StatusOr<JsonDocument> JsonDocument::Parse(std::string_view text, const std::string& name) {
  // The parser takes a NUL for the end of the text and would ignore what follows.
  if (const size_t nul = text.find('\0'); nul != text.npos) {
    return absl::InvalidArgumentError(Concat(name, ": a NUL byte at byte ", nul));
  }
  BoundsCheck bounds;
  if (!json::sax_parse(text.begin(), text.end(), &bounds)) {
    return absl::InvalidArgumentError(Concat(name, ": ", bounds.problem()));
  }
  JsonDocument document;
  document.name_ = name;
  document.root_ = std::make_unique<json>(
      json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false));
  if (document.root_->is_discarded()) {
    return absl::InvalidArgumentError(Concat(name, ": malformed JSON"));
  }
  return document;
}

absl::StatusOr<JsonDocument> JsonDocument::ReadFile(const std::string& path) {
  WINNOW_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, kFileBytesMax));
  return Parse(text, path);
}

}  // namespace winnow::engine
