#include "engine/text/pre_tokenizer.h"

#include <algorithm>
#include <optional>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

using Piece = PieceList::Piece;

// Written by a step that changes the text: pieces are copied over in order.
class Rewriter {
 public:
  explicit Rewriter(const PieceList& in) {
    out_.text.reserve(in.text.size() + in.text.size() / 2 + 16);
    out_.pieces.reserve(in.pieces.size());
  }
  std::string* text() { return &out_.text; }
  uint32_t size() const { return static_cast<uint32_t>(out_.text.size()); }
  void Add(uint32_t begin, int32_t token, uint32_t origin_bytes) {
    out_.pieces.push_back({begin, size(), token, origin_bytes});
  }
  void Keep(const PieceList& in, const Piece& piece) {
    const uint32_t begin = size();
    out_.text += in.TextOf(piece);
    Add(begin, piece.token, piece.origin_bytes);
  }
  PieceList Take() { return std::move(out_); }

 private:
  PieceList out_;
};

enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

absl::StatusOr<Behavior> ReadBehavior(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const std::string name, json.String());
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return json.Error(Concat("unknown behavior \"", name, "\""));
}

// What becomes of the matches among `parts`; afterwards each part is a piece.
void ApplyBehavior(Behavior behavior, std::vector<TextPart>* parts) {
  std::vector<TextPart>& p = *parts;
  size_t kept = 0;
  bool previous = false;
  switch (behavior) {
    case Behavior::kIsolated:
      return;
    case Behavior::kRemoved:
      std::erase_if(p, [](const TextPart& part) { return part.is_match; });
      return;
    case Behavior::kContiguous:
    case Behavior::kMergedWithPrevious:
      for (const TextPart& part : p) {
        const bool joins = behavior == Behavior::kContiguous ? part.is_match == previous
                                                             : part.is_match && !previous;
        previous = part.is_match;
        if (joins && kept > 0) {
          p[kept - 1].end = part.end;
        } else {
          p[kept++] = part;
        }
      }
      p.resize(kept);
      return;
    case Behavior::kMergedWithNext:
      // From the right: the parts kept so far fill the end of the vector.
      kept = p.size();
      for (size_t i = p.size(); i-- > 0;) {
        const TextPart part = p[i];
        const bool joins = part.is_match && !previous;
        previous = part.is_match;
        if (joins && kept < p.size()) {
          p[kept].begin = part.begin;
        } else {
          p[--kept] = part;
        }
      }
      p.erase(p.begin(), p.begin() + static_cast<ptrdiff_t>(kept));
      return;
  }
}

// Replaces each text piece by its parts; empty ones fall away.
template <typename FindParts>
absl::Status SplitPieces(PieceList* list, Behavior behavior, FindParts find_parts) {
  std::vector<Piece> pieces;
  pieces.reserve(list->pieces.size() + list->text.size() / 4);
  std::vector<TextPart> parts;
  for (const Piece& piece : list->pieces) {
    if (piece.token != kNoToken) {
      pieces.push_back(piece);
      continue;
    }
    WINNOW_RETURN_IF_ERROR(find_parts(list->TextOf(piece), &parts));
    ApplyBehavior(behavior, &parts);
    for (const TextPart& part : parts) {
      if (part.begin == part.end) continue;
      const uint32_t origin = std::min(piece.origin_bytes, part.end);
      pieces.push_back({piece.begin + part.begin, piece.begin + part.end, kNoToken,
                        origin > part.begin ? origin - part.begin : 0});
    }
  }
  list->pieces = std::move(pieces);
  return absl::OkStatus();
}

// Parts by a property of single characters: each matching character is a match of its own.
template <typename Matches>
absl::Status CharacterParts(std::string_view text, Matches matches, std::vector<TextPart>* parts) {
  parts->clear();
  uint32_t covered = 0;
  for (uint32_t at = 0; at < text.size();) {
    int length = 0;
    const bool is_match = matches(DecodeCodePoint(text, at, &length));
    if (is_match) {
      if (covered < at) parts->push_back({covered, at, false});
      covered = at + static_cast<uint32_t>(length);
      parts->push_back({at, covered, true});
    }
    at += static_cast<uint32_t>(length);
  }
  const uint32_t size = static_cast<uint32_t>(text.size());
  if (covered < size) parts->push_back({covered, size, false});
  return absl::OkStatus();
}

class SplitPreTokenizer : public PreTokenizer {
 public:
  SplitPreTokenizer(SplitPattern pattern, Behavior behavior, bool invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}
  absl::Status Apply(PieceList* list, RegexScratch* scratch) const override {
    return SplitPieces(list, behavior_, [&](std::string_view text, std::vector<TextPart>* parts) {
      WINNOW_RETURN_IF_ERROR(pattern_.FindParts(text, scratch, parts));
      if (invert_) {
        for (TextPart& part : *parts) part.is_match = !part.is_match;
      }
      return absl::OkStatus();
    });
  }

 private:
  SplitPattern pattern_;
  Behavior behavior_;
  bool invert_;
};

class ByteLevelPreTokenizer : public PreTokenizer {
 public:
  ByteLevelPreTokenizer(bool add_prefix_space, std::optional<SplitPattern> pattern)
      : add_prefix_space_(add_prefix_space), pattern_(std::move(pattern)) {}

  absl::Status Apply(PieceList* list, RegexScratch* scratch) const override {
    if (add_prefix_space_) AddPrefixSpaces(list);
    if (pattern_) {
      WINNOW_RETURN_IF_ERROR(SplitPieces(list, Behavior::kIsolated,
                                         [&](std::string_view text, std::vector<TextPart>* parts) {
                                           return pattern_->FindParts(text, scratch, parts);
                                         }));
    }
    Rewriter out(*list);
    for (const Piece& piece : list->pieces) {
      if (piece.token != kNoToken) {
        out.Keep(*list, piece);
        continue;
      }
      const uint32_t begin = out.size();
      uint32_t origin = 0;
      const std::string_view text = list->TextOf(piece);
      for (size_t i = 0; i < text.size(); ++i) {
        AppendCodePoint(ByteLevelCharacter(static_cast<unsigned char>(text[i])), out.text());
        if (i < piece.origin_bytes) origin = out.size() - begin;
      }
      out.Add(begin, kNoToken, origin);
    }
    *list = out.Take();
    return absl::OkStatus();
  }

 private:
  static void AddPrefixSpaces(PieceList* list) {
    Rewriter out(*list);
    for (const Piece& piece : list->pieces) {
      const std::string_view text = list->TextOf(piece);
      if (piece.token != kNoToken || text.empty() || text[0] == ' ') {
        out.Keep(*list, piece);
        continue;
      }
      const uint32_t begin = out.size();
      *out.text() += ' ';
      *out.text() += text;
      out.Add(begin, kNoToken, piece.origin_bytes > 0 ? piece.origin_bytes + 1 : 0);
    }
    *list = out.Take();
  }

  bool add_prefix_space_;
  std::optional<SplitPattern> pattern_;
};

class MetaspacePreTokenizer : public PreTokenizer {
 public:
  enum class Prepend { kAlways, kFirst, kNever };
  MetaspacePreTokenizer(char32_t replacement, Prepend prepend, bool split)
      : prepend_(prepend), split_(split) {
    AppendCodePoint(replacement, &replacement_);
    pattern_ = std::make_unique<SplitPattern>(SplitPattern::Literal(replacement_));
  }

  absl::Status Apply(PieceList* list, RegexScratch* scratch) const override {
    Rewriter out(*list);
    for (const Piece& piece : list->pieces) {
      if (piece.token != kNoToken) {
        out.Keep(*list, piece);
        continue;
      }
      const uint32_t begin = out.size();
      const std::string_view text = list->TextOf(piece);
      const bool starts_with_it = text.substr(0, 1) == " " || text.starts_with(replacement_);
      const bool may_prepend =
          prepend_ == Prepend::kAlways || (prepend_ == Prepend::kFirst && piece.origin_bytes > 0);
      if (may_prepend && !starts_with_it) *out.text() += replacement_;
      uint32_t origin = 0;
      for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] == ' ') {
          *out.text() += replacement_;
        } else {
          *out.text() += text[i];
        }
        if (i < piece.origin_bytes) origin = out.size() - begin;
      }
      out.Add(begin, kNoToken, origin);
    }
    *list = out.Take();
    if (!split_) return absl::OkStatus();
    return SplitPieces(list, Behavior::kMergedWithNext,
                       [&](std::string_view text, std::vector<TextPart>* parts) {
                         return pattern_->FindParts(text, scratch, parts);
                       });
  }

 private:
  std::string replacement_;
  Prepend prepend_;
  bool split_;
  std::unique_ptr<SplitPattern> pattern_;
};

// Splits where single characters match.
class CharacterPreTokenizer : public PreTokenizer {
 public:
  using Predicate = bool (*)(char32_t);
  CharacterPreTokenizer(Predicate matches, Behavior behavior)
      : matches_(matches), behavior_(behavior) {}
  absl::Status Apply(PieceList* list, RegexScratch*) const override {
    return SplitPieces(list, behavior_, [&](std::string_view text, std::vector<TextPart>* parts) {
      return CharacterParts(text, matches_, parts);
    });
  }

 private:
  Predicate matches_;
  Behavior behavior_;
};

// Runs of word characters and runs of what is neither word nor space; spaces are dropped.
class WhitespacePreTokenizer : public PreTokenizer {
 public:
  absl::Status Apply(PieceList* list, RegexScratch*) const override {
    return SplitPieces(list, Behavior::kIsolated,
                       [](std::string_view text, std::vector<TextPart>* parts) {
                         FindRuns(text, parts);
                         return absl::OkStatus();
                       });
  }

 private:
  enum class Kind { kSpace, kWord, kOther };
  static Kind KindOf(char32_t c) {
    return IsWord(c) ? Kind::kWord : IsWhiteSpace(c) ? Kind::kSpace : Kind::kOther;
  }
  static void FindRuns(std::string_view text, std::vector<TextPart>* parts) {
    parts->clear();
    uint32_t begin = 0;
    Kind run = Kind::kSpace;
    for (uint32_t at = 0; at <= text.size();) {
      int length = 1;
      const Kind kind =
          at < text.size() ? KindOf(DecodeCodePoint(text, at, &length)) : Kind::kSpace;
      if (kind != run) {
        if (run != Kind::kSpace) parts->push_back({begin, at, false});
        begin = at;
        run = kind;
      }
      at += static_cast<uint32_t>(length);
    }
  }
};

class SequencePreTokenizer : public PreTokenizer {
 public:
  explicit SequencePreTokenizer(std::vector<std::unique_ptr<PreTokenizer>> steps)
      : steps_(std::move(steps)) {}
  absl::Status Apply(PieceList* list, RegexScratch* scratch) const override {
    for (const auto& step : steps_) WINNOW_RETURN_IF_ERROR(step->Apply(list, scratch));
    return absl::OkStatus();
  }

 private:
  std::vector<std::unique_ptr<PreTokenizer>> steps_;
};

// GPT-2's words: contractions, letters, numbers and other characters, each with the space before
// them.
constexpr std::string_view kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

using Made = absl::StatusOr<std::unique_ptr<PreTokenizer>>;

Made MakeByteLevel(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode prefix, json.Member("add_prefix_space"));
  WINNOW_ASSIGN_OR_RETURN(const bool add_prefix_space, prefix.Bool());
  WINNOW_ASSIGN_OR_RETURN(const bool use_regex, json.BoolOr("use_regex", true));
  std::optional<SplitPattern> pattern;
  if (use_regex) {
    WINNOW_ASSIGN_OR_RETURN(pattern, SplitPattern::Regex(kGpt2Words));
  }
  return std::make_unique<ByteLevelPreTokenizer>(add_prefix_space, std::move(pattern));
}

Made MakeSplit(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(SplitPattern pattern, ReadPattern(json));
  WINNOW_ASSIGN_OR_RETURN(const JsonNode behavior_node, json.Member("behavior"));
  WINNOW_ASSIGN_OR_RETURN(const Behavior behavior, ReadBehavior(behavior_node));
  WINNOW_ASSIGN_OR_RETURN(const JsonNode invert_node, json.Member("invert"));
  WINNOW_ASSIGN_OR_RETURN(const bool invert, invert_node.Bool());
  return std::make_unique<SplitPreTokenizer>(std::move(pattern), behavior, invert);
}

Made MakeMetaspace(const JsonNode& json) {
  using Prepend = MetaspacePreTokenizer::Prepend;
  WINNOW_ASSIGN_OR_RETURN(const JsonNode replacement_node, json.Member("replacement"));
  WINNOW_ASSIGN_OR_RETURN(const char32_t replacement, replacement_node.Character());
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> scheme, json.Optional("prepend_scheme"));
  Prepend prepend = Prepend::kAlways;
  if (scheme) {
    WINNOW_ASSIGN_OR_RETURN(const std::string name, scheme->String());
    if (name == "first") {
      prepend = Prepend::kFirst;
    } else if (name == "never") {
      prepend = Prepend::kNever;
    } else if (name != "always") {
      return scheme->Error(Concat("unknown prepend_scheme \"", name, "\""));
    }
  }
  // The older form of the same option.
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> legacy, json.Optional("add_prefix_space"));
  if (legacy) {
    WINNOW_ASSIGN_OR_RETURN(const bool add_prefix_space, legacy->Bool());
    if (!add_prefix_space) {
      if (scheme && prepend != Prepend::kNever) {
        return legacy->Error("does not agree with prepend_scheme");
      }
      prepend = Prepend::kNever;
    }
  }
  WINNOW_ASSIGN_OR_RETURN(const bool split, json.BoolOr("split", true));
  return std::make_unique<MetaspacePreTokenizer>(replacement, prepend, split);
}

}  // namespace

Made MakePreTokenizer(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode type_node, json.Member("type"));
  WINNOW_ASSIGN_OR_RETURN(const std::string type, type_node.String());
  if (type == "ByteLevel") return MakeByteLevel(json);
  if (type == "Split") return MakeSplit(json);
  if (type == "Metaspace") return MakeMetaspace(json);
  if (type == "Digits") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode each, json.Member("individual_digits"));
    WINNOW_ASSIGN_OR_RETURN(const bool individual, each.Bool());
    return std::make_unique<CharacterPreTokenizer>(
        IsNumeric, individual ? Behavior::kIsolated : Behavior::kContiguous);
  }
  if (type == "Whitespace") return std::make_unique<WhitespacePreTokenizer>();
  if (type == "WhitespaceSplit") {
    return std::make_unique<CharacterPreTokenizer>(IsWhiteSpace, Behavior::kRemoved);
  }
  if (type == "CharDelimiterSplit") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode delimiter_node, json.Member("delimiter"));
    WINNOW_ASSIGN_OR_RETURN(const char32_t delimiter, delimiter_node.Character());
    std::string literal;
    AppendCodePoint(delimiter, &literal);
    return std::make_unique<SplitPreTokenizer>(SplitPattern::Literal(literal), Behavior::kRemoved,
                                               /*invert=*/false);
  }
  if (type == "Sequence") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode list, json.Member("pretokenizers"));
    WINNOW_RETURN_IF_ERROR(list.RequireArray());
    std::vector<std::unique_ptr<PreTokenizer>> steps;
    for (size_t i = 0; i < list.size(); ++i) {
      WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<PreTokenizer> step, MakePreTokenizer(list.At(i)));
      steps.push_back(std::move(step));
    }
    return std::make_unique<SequencePreTokenizer>(std::move(steps));
  }
  return type_node.Unsupported(
      Concat("pre_tokenizer \"", type,
             "\" is not supported (ByteLevel, Split, Sequence, Digits, Metaspace, "
             "Whitespace, WhitespaceSplit, CharDelimiterSplit are)"));
}

bool UsesByteLevelPreTokenizer(const JsonNode& json) {
  const nlohmann::json& value = json.value();
  if (!value.is_object()) return false;
  if (value.value("type", nlohmann::json()) == "ByteLevel") return true;
  auto list = value.find("pretokenizers");
  if (list == value.end() || !list->is_array()) return false;
  for (const nlohmann::json& step : *list) {
    if (UsesByteLevelPreTokenizer(JsonNode(&step, ""))) return true;
  }
  return false;
}

}  // namespace winnow::engine
