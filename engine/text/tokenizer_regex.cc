#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/text/tokenizer_regex.h"

#include <pcre2.h>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/tokenizer_regex_syntax.h"
#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

constexpr size_t kPatternBytesMax = 64 << 10;
// Per search. An honest pattern needs a few steps per byte of a word; a run of a million spaces
// needs a few million. What needs more is a pattern that backtracks exponentially.
constexpr uint32_t kMatchStepsMax = 20'000'000;
constexpr uint32_t kMatchDepthMax = 20'000'000;
constexpr uint32_t kMatchHeapKibMax = 256 << 10;

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

struct FreeCode {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeMatchData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeMatchContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

}  // namespace

struct RegexScratch::Data {
  std::unique_ptr<pcre2_match_data, FreeMatchData> match;
  std::unique_ptr<pcre2_match_context, FreeMatchContext> context;
};

RegexScratch::RegexScratch() : data_(std::make_unique<Data>()) {
  // One pair: only the whole match is of interest.
  data_->match.reset(pcre2_match_data_create(1, nullptr));
  data_->context.reset(pcre2_match_context_create(nullptr));
  WINNOW_CHECK(data_->match != nullptr && data_->context != nullptr);
  pcre2_set_match_limit(data_->context.get(), kMatchStepsMax);
  pcre2_set_depth_limit(data_->context.get(), kMatchDepthMax);
  pcre2_set_heap_limit(data_->context.get(), kMatchHeapKibMax);
}

RegexScratch::~RegexScratch() = default;

struct SplitPattern::Compiled {
  std::unique_ptr<pcre2_code, FreeCode> code;
};

SplitPattern::SplitPattern() = default;
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

SplitPattern SplitPattern::Literal(std::string literal) {
  SplitPattern pattern;
  pattern.literal_ = std::move(literal);
  return pattern;
}

absl::StatusOr<SplitPattern> SplitPattern::Regex(std::string_view pattern) {
  if (pattern.size() > kPatternBytesMax) {
    return absl::InvalidArgumentError(
        Concat("a regular expression of ", pattern.size(), " bytes is too long"));
  }
  WINNOW_ASSIGN_OR_RETURN(const std::string translated, TranslateRegex(pattern));
  int error = 0;
  PCRE2_SIZE offset = 0;
  SplitPattern result;
  result.compiled_ = std::make_unique<Compiled>();
  result.compiled_->code.reset(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr));
  if (result.compiled_->code == nullptr) {
    return absl::InvalidArgumentError(Concat("not a regular expression: ", ErrorText(error)));
  }
  // Without the just-in-time compiler (a hardened kernel refuses its memory) the interpreter
  // matches the same, slower.
  pcre2_jit_compile(result.compiled_->code.get(), PCRE2_JIT_COMPLETE);
  return result;
}

absl::StatusOr<bool> SplitPattern::Search(std::string_view text, size_t from, RegexScratch* scratch,
                                          size_t* begin, size_t* end) const {
  if (compiled_ == nullptr) {
    *begin = text.find(literal_, from);
    if (*begin == std::string_view::npos) return false;
    *end = *begin + literal_.size();
    return true;
  }
  RegexScratch::Data& data = *scratch->data_;
  const auto match = [&](uint32_t options) {
    return pcre2_match(compiled_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                       text.size(), from, PCRE2_NO_UTF_CHECK | options, data.match.get(),
                       data.context.get());
  };
  int rc = match(0);
  // The compiled code works on a small fixed stack, the interpreter on the bounded heap.
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) rc = match(PCRE2_NO_JIT);
  if (rc == PCRE2_ERROR_NOMATCH) return false;
  if (rc < 0) {
    return absl::ResourceExhaustedError(Concat("splitting the text into words: ", ErrorText(rc)));
  }
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.match.get());
  *begin = bounds[0];
  *end = bounds[1];
  return true;
}

absl::Status SplitPattern::FindParts(std::string_view text, RegexScratch* scratch,
                                     std::vector<TextPart>* parts) const {
  parts->clear();
  const uint32_t size = static_cast<uint32_t>(text.size());
  if (text.empty()) {
    parts->push_back({0, 0, false});
    return absl::OkStatus();
  }
  size_t from = 0;
  size_t covered = 0;
  bool matched_before = false;
  while (from <= text.size()) {
    size_t begin = 0;
    size_t end = 0;
    WINNOW_ASSIGN_OR_RETURN(const bool found, Search(text, from, scratch, &begin, &end));
    if (!found) break;
    if (begin == end && matched_before && covered == end) {
      // An empty match at the end of the match before: step over one character.
      if (from >= text.size()) break;
      from += CodePointLength(static_cast<unsigned char>(text[from]));
      continue;
    }
    if (covered != begin) {
      parts->push_back({static_cast<uint32_t>(covered), static_cast<uint32_t>(begin), false});
    }
    parts->push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(end), true});
    matched_before = true;
    covered = end;
    from = end;
  }
  if (covered != text.size()) parts->push_back({static_cast<uint32_t>(covered), size, false});
  return absl::OkStatus();
}

}  // namespace winnow::engine
