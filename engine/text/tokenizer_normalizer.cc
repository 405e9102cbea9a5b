#include "engine/text/tokenizer_normalizer.h"

#include <algorithm>
#include <array>
#include <vector>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

constexpr char kTrusted = '\1';
constexpr size_t kOutputBytesMax = size_t{1} << 30;

// '\1' only if every byte of the range is trusted.
char TrustOf(std::string_view trusted, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    if (trusted[i] != kTrusted) return '\0';
  }
  return kTrusted;
}

class UnicodeNormalizer : public Normalizer {
 public:
  explicit UnicodeNormalizer(UnicodeForm form) : form_(form) {}

  absl::Status Apply(NormalizedText* text, RegexScratch*) const override {
    const bool has_origin = text->origin_bytes > 0;
    if (text->trusted.empty()) {
      text->bytes = NormalizeUnicode(text->bytes, form_);
    } else {
      ApplyInBlocks(text);
    }
    text->origin_bytes = has_origin && !text->bytes.empty()
                             ? CodePointLength(static_cast<unsigned char>(text->bytes[0]))
                             : 0;
    return absl::OkStatus();
  }

 private:
  // An ASCII character neither combines with what is before it nor is reordered, so the text may be
  // cut there: each block is as trusted as its least trusted byte.
  void ApplyInBlocks(NormalizedText* text) const {
    std::string bytes;
    std::string trusted;
    const std::string& in = text->bytes;
    for (size_t begin = 0; begin < in.size();) {
      size_t end = begin + 1;
      while (end < in.size() && static_cast<unsigned char>(in[end]) >= 0x80) ++end;
      bytes += NormalizeUnicode(std::string_view(in).substr(begin, end - begin), form_);
      trusted.resize(bytes.size(), TrustOf(text->trusted, begin, end));
      begin = end;
    }
    text->bytes = std::move(bytes);
    text->trusted = std::move(trusted);
  }

  UnicodeForm form_;
};

class SequenceNormalizer : public Normalizer {
 public:
  explicit SequenceNormalizer(std::vector<std::unique_ptr<Normalizer>> steps)
      : steps_(std::move(steps)) {}
  absl::Status Apply(NormalizedText* text, RegexScratch* scratch) const override {
    for (const auto& step : steps_) WINNOW_RETURN_IF_ERROR(step->Apply(text, scratch));
    return absl::OkStatus();
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> steps_;
};

class PrependNormalizer : public Normalizer {
 public:
  explicit PrependNormalizer(std::string prefix) : prefix_(std::move(prefix)) {}
  absl::Status Apply(NormalizedText* text, RegexScratch*) const override {
    if (text->bytes.empty()) return absl::OkStatus();
    text->bytes.insert(0, prefix_);
    if (!text->trusted.empty()) text->trusted.insert(0, prefix_.size(), text->trusted[0]);
    if (text->origin_bytes > 0) text->origin_bytes += prefix_.size();
    return absl::OkStatus();
  }

 private:
  std::string prefix_;
};

class ReplaceNormalizer : public Normalizer {
 public:
  ReplaceNormalizer(SplitPattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}

  absl::Status Apply(NormalizedText* text, RegexScratch* scratch) const override {
    std::vector<TextPart> parts;
    WINNOW_RETURN_IF_ERROR(pattern_.FindParts(text->bytes, scratch, &parts));
    NormalizedText out;
    out.bytes.reserve(text->bytes.size());
    for (const TextPart& part : parts) {
      if (!part.is_match) {
        out.bytes.append(text->bytes, part.begin, part.end - part.begin);
        if (!text->trusted.empty()) {
          out.trusted.append(text->trusted, part.begin, part.end - part.begin);
        }
      } else {
        out.bytes += content_;
        if (!text->trusted.empty()) {
          out.trusted.append(content_.size(), TrustOf(text->trusted, part.begin, part.end));
        }
        if (out.bytes.size() > kOutputBytesMax) {
          return absl::ResourceExhaustedError("the normalised text is too large");
        }
      }
      // New text stands where the last character that it replaces stood.
      if (part.end <= text->origin_bytes) {
        out.origin_bytes = out.bytes.size();
      } else if (part.begin < text->origin_bytes && !part.is_match) {
        out.origin_bytes = out.bytes.size() - (part.end - text->origin_bytes);
      }
    }
    *text = std::move(out);
    return absl::OkStatus();
  }

 private:
  SplitPattern pattern_;
  std::string content_;
};

class StripNormalizer : public Normalizer {
 public:
  StripNormalizer(bool left, bool right) : left_(left), right_(right) {}
  absl::Status Apply(NormalizedText* text, RegexScratch*) const override {
    size_t begin = 0;
    size_t end = text->bytes.size();
    while (left_ && begin < end) {
      int length = 0;
      if (!IsWhiteSpace(DecodeCodePoint(text->bytes, begin, &length))) break;
      begin += length;
    }
    while (right_ && end > begin) {
      size_t last = end - 1;
      while ((static_cast<unsigned char>(text->bytes[last]) & 0xC0) == 0x80) --last;
      int length = 0;
      if (!IsWhiteSpace(DecodeCodePoint(text->bytes, last, &length))) break;
      end = last;
    }
    text->bytes = text->bytes.substr(begin, end - begin);
    if (!text->trusted.empty()) text->trusted = text->trusted.substr(begin, end - begin);
    text->origin_bytes = text->origin_bytes > begin ? text->origin_bytes - begin : 0;
    return absl::OkStatus();
  }

 private:
  bool left_;
  bool right_;
};

// Maps each character to a string; `Map` appends it.
template <typename Map>
void MapCharacters(NormalizedText* text, Map map) {
  NormalizedText out;
  out.bytes.reserve(text->bytes.size() * 2);
  for (size_t at = 0; at < text->bytes.size();) {
    int length = 0;
    const char32_t c = DecodeCodePoint(text->bytes, at, &length);
    map(c, std::string_view(text->bytes).substr(at, length), &out.bytes);
    if (!text->trusted.empty()) out.trusted.resize(out.bytes.size(), text->trusted[at]);
    at += length;
    if (at <= text->origin_bytes) out.origin_bytes = out.bytes.size();
  }
  *text = std::move(out);
}

// SentencePiece's "nmt" rules: control characters go, odd spaces become spaces.
class NmtNormalizer : public Normalizer {
 public:
  absl::Status Apply(NormalizedText* text, RegexScratch*) const override {
    MapCharacters(text, [](char32_t c, std::string_view character, std::string* out) {
      const bool dropped = (c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) ||
                           c == 0x7F || c == 0x8F || c == 0x9F;
      const bool space = c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
                         (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 ||
                         c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
      if (!dropped) out->append(space ? std::string_view(" ") : character);
    });
    return absl::OkStatus();
  }
};

class ByteLevelNormalizer : public Normalizer {
 public:
  absl::Status Apply(NormalizedText* text, RegexScratch*) const override {
    MapCharacters(text, [](char32_t, std::string_view character, std::string* out) {
      for (char byte : character) {
        AppendCodePoint(ByteLevelCharacter(static_cast<unsigned char>(byte)), out);
      }
    });
    return absl::OkStatus();
  }
};

// The bytes that are printable in Latin-1 stand for themselves; the others take the characters from
// U+0100 on, in order.
struct ByteAlphabet {
  std::array<char32_t, 256> character{};
  std::array<int16_t, 0x144> byte{};
  constexpr ByteAlphabet() {
    for (auto& b : byte) b = -1;
    char32_t next = 0x100;
    for (char32_t b = 0; b < 256; ++b) {
      const bool printable =
          (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      character[b] = printable ? b : next++;
      byte[character[b]] = static_cast<int16_t>(b);
    }
  }
};
constexpr ByteAlphabet kByteAlphabet;

}  // namespace

char32_t ByteLevelCharacter(unsigned char byte) { return kByteAlphabet.character[byte]; }

int ByteLevelByte(char32_t character) {
  return character < kByteAlphabet.byte.size() ? kByteAlphabet.byte[character] : -1;
}

absl::StatusOr<SplitPattern> ReadPattern(const JsonNode& owner) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode pattern, owner.Member("pattern"));
  WINNOW_RETURN_IF_ERROR(pattern.RequireObject());
  if (pattern.size() != 1) return pattern.Error("must have one member, \"String\" or \"Regex\"");
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> literal, pattern.Optional("String"));
  if (literal) {
    WINNOW_ASSIGN_OR_RETURN(std::string text, literal->String());
    return SplitPattern::Literal(std::move(text));
  }
  WINNOW_ASSIGN_OR_RETURN(const JsonNode regex, pattern.Member("Regex"));
  WINNOW_ASSIGN_OR_RETURN(const std::string text, regex.String());
  absl::StatusOr<SplitPattern> compiled = SplitPattern::Regex(text);
  if (compiled.ok()) return compiled;
  if (compiled.status().code() == absl::StatusCode::kUnimplemented) {
    return regex.Unsupported(Concat(compiled.status().message()));
  }
  return regex.Error(Concat(compiled.status().message()));
}

absl::StatusOr<std::unique_ptr<Normalizer>> MakeNormalizer(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode type_node, json.Member("type"));
  WINNOW_ASSIGN_OR_RETURN(const std::string type, type_node.String());
  std::unique_ptr<Normalizer> made;
  if (type == "NFC") {
    made = std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfc);
  } else if (type == "NFD") {
    made = std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfd);
  } else if (type == "NFKC") {
    made = std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfkc);
  } else if (type == "NFKD") {
    made = std::make_unique<UnicodeNormalizer>(UnicodeForm::kNfkd);
  } else if (type == "Nmt") {
    made = std::make_unique<NmtNormalizer>();
  } else if (type == "ByteLevel") {
    made = std::make_unique<ByteLevelNormalizer>();
  } else if (type == "Prepend") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode prefix, json.Member("prepend"));
    WINNOW_ASSIGN_OR_RETURN(std::string text, prefix.String());
    made = std::make_unique<PrependNormalizer>(std::move(text));
  } else if (type == "Replace") {
    WINNOW_ASSIGN_OR_RETURN(SplitPattern pattern, ReadPattern(json));
    WINNOW_ASSIGN_OR_RETURN(const JsonNode content, json.Member("content"));
    WINNOW_ASSIGN_OR_RETURN(std::string text, content.String());
    made = std::make_unique<ReplaceNormalizer>(std::move(pattern), std::move(text));
  } else if (type == "Strip") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode left, json.Member("strip_left"));
    WINNOW_ASSIGN_OR_RETURN(const JsonNode right, json.Member("strip_right"));
    WINNOW_ASSIGN_OR_RETURN(const bool strip_left, left.Bool());
    WINNOW_ASSIGN_OR_RETURN(const bool strip_right, right.Bool());
    made = std::make_unique<StripNormalizer>(strip_left, strip_right);
  } else if (type == "Sequence") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode list, json.Member("normalizers"));
    WINNOW_RETURN_IF_ERROR(list.RequireArray());
    std::vector<std::unique_ptr<Normalizer>> steps;
    for (size_t i = 0; i < list.size(); ++i) {
      WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Normalizer> step, MakeNormalizer(list.At(i)));
      steps.push_back(std::move(step));
    }
    made = std::make_unique<SequenceNormalizer>(std::move(steps));
  } else {
    return type_node.Unsupported(
        Concat("normalizer \"", type,
               "\" is not supported (NFC, NFD, NFKC, NFKD, Sequence, Prepend, Replace, "
               "Strip, Nmt, ByteLevel are)"));
  }
  return made;
}

bool UsesByteLevelNormalizer(const JsonNode& json) {
  const nlohmann::json& value = json.value();
  if (!value.is_object()) return false;
  if (value.value("type", nlohmann::json()) == "ByteLevel") return true;
  auto list = value.find("normalizers");
  if (list == value.end() || !list->is_array()) return false;
  for (const nlohmann::json& step : *list) {
    if (UsesByteLevelNormalizer(JsonNode(&step, ""))) return true;
  }
  return false;
}

}  // namespace winnow::engine
