// The regular expressions of tokenizer.json, matched as the reference matches them.
//
// The reference uses Oniguruma with Ruby syntax and Unicode 16; here PCRE2 does the work. A pattern
// is translated first (tokenizer_regex_syntax.h), so that character classes, anchors and
// quantifiers mean the same on every string; what cannot be translated is refused when the
// tokenizer is loaded.
#ifndef WINNOW_ENGINE_TEXT_TOKENIZER_REGEX_H_
#define WINNOW_ENGINE_TEXT_TOKENIZER_REGEX_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace winnow::engine {

// A part of a text. The parts of one text lie side by side and cover it.
struct TextPart {
  uint32_t begin;
  uint32_t end;
  bool is_match;
};

// Working memory of matching. One per thread at a time; reused between calls.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class SplitPattern;
  struct Data;
  std::unique_ptr<Data> data_;
};

// A literal or a regular expression that cuts a text into matches and what lies between them.
// Immutable; any thread, each with its own scratch.
class SplitPattern {
 public:
  static SplitPattern Literal(std::string literal);
  // InvalidArgument: not a regular expression. Unimplemented: one that cannot be translated.
  static absl::StatusOr<SplitPattern> Regex(std::string_view pattern);

  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  // Leftmost matches, from left to right; an empty match right after a match does not count.
  // `text` is valid UTF-8 below 2 GiB. ResourceExhausted: a limit of steps or memory was reached.
  absl::Status FindParts(std::string_view text, RegexScratch* scratch,
                         std::vector<TextPart>* parts) const;

  // The literal, or nullptr for a regular expression.
  const std::string* literal() const { return compiled_ == nullptr ? &literal_ : nullptr; }

 private:
  struct Compiled;
  SplitPattern();
  // The next match at or after `from`: 1, none: 0.
  absl::StatusOr<bool> Search(std::string_view text, size_t from, RegexScratch* scratch,
                              size_t* begin, size_t* end) const;

  std::string literal_;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_TOKENIZER_REGEX_H_
