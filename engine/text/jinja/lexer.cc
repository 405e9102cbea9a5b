#include "engine/text/jinja/lexer.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/str_format.h"
#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/jinja/unicode.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine::jinja {
namespace {

// Every kind of line break becomes \n, and one at the end is dropped.
std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
      continue;
    }
    out += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  absl::StatusOr<std::vector<Token>> Run() {
    while (at_ < source_.size()) WINNOW_RETURN_IF_ERROR(Data());
    Add(TokenType::kEnd, "");
    return std::move(tokens_);
  }

 private:
  absl::Status Error(std::string_view message) const {
    return absl::InvalidArgumentError(Concat("line ", line_, ": ", message));
  }

  std::string_view Rest() const { return std::string_view(source_).substr(at_); }
  bool At(std::string_view text) const { return Rest().starts_with(text); }
  char Peek(size_t ahead = 0) const {
    return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0';
  }
  void Advance(size_t bytes) {
    line_ +=
        static_cast<int>(std::count(source_.begin() + at_, source_.begin() + at_ + bytes, '\n'));
    at_ += bytes;
  }
  void Add(TokenType type, std::string text) { tokens_.push_back({type, line_, std::move(text)}); }
  size_t SpaceAt(size_t at) const { return LeadingSpace(std::string_view(source_).substr(at)); }

  // Text up to the next tag, and the tag.
  absl::Status Data() {
    size_t tag = at_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == source_.npos || tag + 1 >= source_.size()) {
        const std::string rest(Rest());
        Add(TokenType::kData, rest);
        Advance(rest.size());
        return absl::OkStatus();
      }
      const char kind = source_[tag + 1];
      if (kind == '%' || kind == '{' || kind == '#') break;
    }
    const char kind = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    AddText(std::string_view(source_).substr(at_, tag - at_), sign, kind != '{');
    Advance(tag - at_);
    if (kind == '%') {
      size_t raw_begin = 0;
      if (MatchRaw("raw", at_, /*begins=*/true, &raw_begin)) return Raw(raw_begin);
    }
    const size_t signs = sign == '-' || sign == '+' ? 1 : 0;
    if (kind == '#') return Comment(2 + signs);
    Add(kind == '%' ? TokenType::kBlockBegin : TokenType::kVariableBegin, "");
    Advance(2 + signs);
    line_starting_ = false;
    return Tag(kind == '%' ? '%' : '}');
  }

  // The text before a tag, less the white space that the tag's sign or lstrip_blocks takes.
  void AddText(std::string_view text, char sign, bool lstrip) {
    if (sign == '-') {
      text.remove_suffix(TrailingSpace(text));
    } else if (sign != '+' && lstrip) {
      const size_t newline = text.rfind('\n');
      const size_t begin = newline == text.npos ? 0 : newline + 1;
      const std::string_view last_line = text.substr(begin);
      if ((begin > 0 || line_starting_) && !last_line.empty() &&
          LeadingSpace(last_line) == last_line.size()) {
        text = text.substr(0, begin);
      }
    }
    if (!text.empty()) Add(TokenType::kData, std::string(text));
  }

  // Whether "{% word %}" stands at `at`; `*end` becomes its end.
  bool MatchRaw(std::string_view word, size_t at, bool begins, size_t* end) const {
    const std::string_view all(source_);
    at += 2;
    if (at < all.size() && (all[at] == '-' || all[at] == '+')) ++at;
    at += SpaceAt(at);
    if (!all.substr(at).starts_with(word)) return false;
    at += word.size();
    at += SpaceAt(at);
    const std::string_view rest = all.substr(at);
    if (rest.starts_with("-%}")) {
      *end = at + 3 + SpaceAt(at + 3);
    } else if (!begins && rest.starts_with("+%}")) {
      *end = at + 3;
    } else if (rest.starts_with("%}")) {
      *end = at + 2;
      if (!begins && *end < all.size() && all[*end] == '\n') ++*end;
    } else {
      return false;
    }
    return true;
  }

  absl::Status Raw(size_t begin) {
    Advance(begin - at_);
    line_starting_ = source_[begin - 1] == '\n';
    for (size_t tag = source_.find("{%", at_); tag != source_.npos;
         tag = source_.find("{%", tag + 1)) {
      size_t end = 0;
      if (!MatchRaw("endraw", tag, /*begins=*/false, &end)) continue;
      AddText(std::string_view(source_).substr(at_, tag - at_), source_[tag + 2], true);
      Advance(end - at_);
      line_starting_ = source_[end - 1] == '\n';
      return absl::OkStatus();
    }
    return Error("Missing end of raw directive");
  }

  absl::Status Comment(size_t opening) {
    size_t end = source_.find("#}", at_ + opening);
    if (end == source_.npos) return Error("Missing end of comment tag");
    const char sign = end > at_ + opening ? source_[end - 1] : '\0';
    end += 2;
    if (sign == '-') {
      end += SpaceAt(end);
    } else if (sign != '+' && end < source_.size() && source_[end] == '\n') {
      ++end;
    }
    Advance(end - at_);
    line_starting_ = source_[end - 1] == '\n';
    return absl::OkStatus();
  }

  // Whether the tag ends here; takes the end.
  bool TagEnd(char kind) {
    const std::string end = {kind, '}'};
    size_t length = 0;
    if (At("-" + end)) {
      length = 3 + SpaceAt(at_ + 3);
    } else if (kind == '%' && At("+" + end)) {
      length = 3;
    } else if (At(end)) {
      length = 2;
      if (kind == '%' && Peek(2) == '\n') ++length;
    } else {
      return false;
    }
    Add(kind == '%' ? TokenType::kBlockEnd : TokenType::kVariableEnd, "");
    Advance(length);
    line_starting_ = source_[at_ - 1] == '\n';
    return true;
  }

  absl::Status Tag(char kind) {
    std::string open;  // brackets that wait for their end
    while (at_ < source_.size()) {
      if (open.empty() && TagEnd(kind)) return absl::OkStatus();
      if (const size_t space = SpaceAt(at_); space > 0) {
        Advance(space);
        continue;
      }
      if (Number()) continue;
      if (Name()) continue;
      if (Peek() == '\'' || Peek() == '"') {
        WINNOW_RETURN_IF_ERROR(StringLiteral());
        continue;
      }
      WINNOW_RETURN_IF_ERROR(Operator(&open));
    }
    return absl::OkStatus();  // the parser says what is missing
  }

  // Length of (\d+_)*\d+ at `at`; 0: none.
  size_t Digits(size_t at) const {
    size_t end = at;
    while (end < source_.size() &&
           (IsDigit(source_[end]) || (source_[end] == '_' && end > at && source_[end - 1] != '_' &&
                                      end + 1 < source_.size() && IsDigit(source_[end + 1])))) {
      ++end;
    }
    return end - at;
  }

  size_t FloatLength() const {
    if (at_ > 0 && source_[at_ - 1] == '.') return 0;
    const size_t whole = Digits(at_);
    if (whole == 0) return 0;
    size_t end = at_ + whole;
    size_t fraction = 0;
    if (end < source_.size() && source_[end] == '.') fraction = Digits(end + 1);
    if (fraction > 0) end += 1 + fraction;
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const size_t sign =
          end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-') ? 1 : 0;
      const size_t exponent = Digits(end + 1 + sign);
      if (exponent > 0) return end + 1 + sign + exponent - at_;
    }
    return fraction > 0 ? end - at_ : 0;
  }

  // Length of digits with single underscores between or before them.
  size_t BaseDigits(size_t at, const char* digits) const {
    const auto is_digit = [&](size_t i) {
      return i < source_.size() &&
             std::string_view(digits).find(static_cast<char>(
                 std::tolower(static_cast<unsigned char>(source_[i])))) != std::string_view::npos;
    };
    size_t end = at;
    while (is_digit(end) || (end < source_.size() && source_[end] == '_' && is_digit(end + 1))) {
      end += source_[end] == '_' ? 2 : 1;
    }
    return end - at;
  }

  size_t IntegerLength() const {
    if (!IsDigit(Peek())) return 0;
    if (Peek() != '0') return BaseDigits(at_, "0123456789");
    const char base = static_cast<char>(std::tolower(static_cast<unsigned char>(Peek(1))));
    const char* digits = base == 'b'   ? "01"
                         : base == 'o' ? "01234567"
                         : base == 'x' ? "0123456789abcdef"
                                       : nullptr;
    if (digits != nullptr) {
      const size_t length = BaseDigits(at_ + 2, digits);
      if (length > 0) return 2 + length;
    }
    return BaseDigits(at_, "0");
  }

  bool Number() {
    const size_t real = FloatLength();
    const size_t length = real > 0 ? real : IntegerLength();
    if (length == 0) return false;
    std::string text = source_.substr(at_, length);
    std::erase(text, '_');
    Add(real > 0 ? TokenType::kFloat : TokenType::kInteger, std::move(text));
    Advance(length);
    return true;
  }

  bool Name() {
    size_t end = at_;
    while (end < source_.size()) {
      int length = 0;
      if (!IsWord(DecodeCodePoint(source_, end, &length))) break;
      end += static_cast<size_t>(length);
    }
    if (end == at_) return false;
    Add(TokenType::kName, source_.substr(at_, end - at_));
    Advance(end - at_);
    return true;
  }

  absl::Status Operator(std::string* open) {
    static constexpr std::string_view kTwo[] = {"**", "//", "==", "!=", ">=", "<="};
    static constexpr std::string_view kOne = "+-/*%~[](){}><=.:|,;";
    for (std::string_view two : kTwo) {
      if (!At(two)) continue;
      Add(TokenType::kOperator, std::string(two));
      Advance(2);
      return absl::OkStatus();
    }
    const char c = Peek();
    if (kOne.find(c) == kOne.npos) {
      int length = 0;
      DecodeCodePoint(source_, at_, &length);
      return Error(Concat("unexpected char '", Rest().substr(0, length), "'"));
    }
    if (c == '(') open->push_back(')');
    if (c == '[') open->push_back(']');
    if (c == '{') open->push_back('}');
    if (c == ')' || c == ']' || c == '}') {
      if (open->empty()) return Error(Concat("unexpected '", std::string(1, c), "'"));
      if (open->back() != c) {
        return Error(Concat("unexpected '", std::string(1, c), "', expected '",
                            std::string(1, open->back()), "'"));
      }
      open->pop_back();
    }
    Add(TokenType::kOperator, std::string(1, c));
    Advance(1);
    return absl::OkStatus();
  }

  absl::Status StringLiteral() {
    const char quote = Peek();
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size())
      return Error(Concat("unexpected char '", std::string(1, quote), "'"));
    std::string text;
    WINNOW_RETURN_IF_ERROR(
        Unescape(std::string_view(source_).substr(at_ + 1, end - at_ - 1), &text));
    Add(TokenType::kString, std::move(text));
    Advance(end + 1 - at_);
    return absl::OkStatus();
  }

  // Python's unicode-escape.
  absl::Status Unescape(std::string_view raw, std::string* out) const {
    static constexpr std::string_view kFrom = "abfnrtv\\'\"";
    static constexpr std::string_view kTo = "\a\b\f\n\r\t\v\\'\"";
    for (size_t i = 0; i < raw.size(); ++i) {
      if (raw[i] != '\\') {
        *out += raw[i];
        continue;
      }
      const char c = raw[++i];
      if (const size_t known = kFrom.find(c); known != kFrom.npos) {
        *out += kTo[known];
      } else if (c == '\n') {
        // A line that goes on.
      } else if (c >= '0' && c <= '7') {
        char32_t value = 0;
        size_t digits = 0;
        while (digits < 3 && i + digits < raw.size() && raw[i + digits] >= '0' &&
               raw[i + digits] <= '7') {
          value = value * 8 + static_cast<char32_t>(raw[i + digits++] - '0');
        }
        i += digits - 1;
        AppendCodePoint(value, out);
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        WINNOW_RETURN_IF_ERROR(Hex(raw.substr(i + 1), digits, out));
        i += digits;
      } else if (c == 'N') {
        return Error("\\N{...} in a string is not supported");
      } else if (static_cast<unsigned char>(c) >= 0x80) {
        // Jinja escapes such a character first, and the escape then loses its backslash to this one.
        int length = 0;
        const char32_t code = DecodeCodePoint(raw, i, &length);
        const auto value = static_cast<unsigned>(code);
        *out += code < 0x100     ? absl::StrFormat("\\x%02x", value)
                : code < 0x10000 ? absl::StrFormat("\\u%04x", value)
                                 : absl::StrFormat("\\U%08x", value);
        i += static_cast<size_t>(length) - 1;
      } else {
        *out += '\\';
        *out += c;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Hex(std::string_view text, size_t digits, std::string* out) const {
    char32_t value = 0;
    for (size_t i = 0; i < digits; ++i) {
      if (i >= text.size() || !std::isxdigit(static_cast<unsigned char>(text[i]))) {
        return Error("truncated escape in a string");
      }
      const char c = static_cast<char>(std::tolower(static_cast<unsigned char>(text[i])));
      value = value * 16 + static_cast<char32_t>(IsDigit(c) ? c - '0' : c - 'a' + 10);
    }
    if (value > 0x10FFFF) return Error("illegal Unicode character in a string");
    if (value >= 0xD800 && value < 0xE000) return Error("a surrogate in a string is not supported");
    AppendCodePoint(value, out);
    return absl::OkStatus();
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source) {
  return Lexer(NormalizeNewlines(source)).Run();
}

}  // namespace winnow::engine::jinja
