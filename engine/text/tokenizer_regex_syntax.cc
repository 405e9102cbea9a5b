#include "engine/text/tokenizer_regex_syntax.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_format.h"
#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/unicode/unicode_tables.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

// PCRE2's \s under UCP takes U+180E along, the reference's does not.
constexpr std::string_view kSpaceItems =
    R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kNotSpaceItems =
    R"(\x{00}-\x{08}\x{0E}-\x{1F}\x{21}-\x{84}\x{86}-\x{9F}\x{A1}-\x{167F}\x{1681}-\x{1FFF})"
    R"(\x{200B}-\x{2027}\x{202A}-\x{202E}\x{2030}-\x{205E}\x{2060}-\x{2FFF}\x{3001}-\x{10FFFF})";

constexpr std::array<std::string_view, 30> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mc", "Me", "N",  "Nd", "Nl", "No", "P",  "Pc",
    "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp"};
// Not in the list, because a code point has left them between the versions of Unicode and a class
// can only be added to: C, Cn, Mn. Cc, Cf, Co and Cs are in no tokenizer's pattern.

// Pairs of ASCII letters to which one other character folds (U+00DF, U+FB00...U+FB06): under
// ignore-case the reference matches that character too, PCRE2 does not.
constexpr std::array<std::string_view, 5> kFoldedPairs = {"ss", "ff", "fi", "fl", "st"};

constexpr int kGroupDepthMax = 100;

bool IsHexDigit(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}
bool IsAsciiLetter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
char32_t AsciiLower(char32_t c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }

// One pass over the pattern, writing as it reads.
class Translator {
 public:
  explicit Translator(std::string_view in) : in_(in) {}

  absl::StatusOr<std::string> Run() {
    while (!AtEnd()) WINNOW_RETURN_IF_ERROR(Item());
    if (!groups_.empty()) return Malformed("a group is not closed");
    return out_;
  }

 private:
  struct Group {
    bool ignore_case_outside;
    bool quantifiable;
  };

  bool AtEnd() const { return at_ >= in_.size(); }
  char Peek(size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  bool Skip(std::string_view text) {
    if (in_.substr(at_, text.size()) != text) return false;
    at_ += text.size();
    return true;
  }

  absl::Status Malformed(std::string_view what) const {
    return absl::InvalidArgumentError(
        Concat("not a regular expression: ", what, " (byte ", at_, ")"));
  }
  absl::Status Refused(std::string_view what) const {
    return absl::UnimplementedError(
        Concat("regular expression with ", what, " (byte ", at_, ") is not supported"));
  }

  void EmitCodePoint(char32_t c) { out_ += Concat(absl::StrFormat("\\x{%X}", uint32_t{c})); }

  // After each item: whether a quantifier may follow.
  void Atom() {
    quantifiable_ = true;
    previous_literal_ = 0;
  }

  absl::Status Literal(char32_t c) {
    if (ignore_case_) {
      if (c >= 0x80) return Refused("a character beyond ASCII in (?i:...)");
      const char pair[] = {static_cast<char>(previous_literal_), static_cast<char>(AsciiLower(c))};
      for (std::string_view folded : kFoldedPairs) {
        if (folded == std::string_view(pair, 2)) return Refused("a multi-character case fold");
      }
    }
    EmitCodePoint(c);
    quantifiable_ = true;
    previous_literal_ = IsAsciiLetter(c) ? AsciiLower(c) : 0;
    return absl::OkStatus();
  }

  absl::Status Item() {
    const char c = Peek();
    switch (c) {
      case '\\':
        return Escape();
      case '[':
        return Class();
      case '(':
        return OpenGroup();
      case ')':
        if (groups_.empty()) return Malformed("an unmatched )");
        ++at_;
        out_ += ')';
        ignore_case_ = groups_.back().ignore_case_outside;
        quantifiable_ = groups_.back().quantifiable;
        previous_literal_ = 0;
        groups_.pop_back();
        return absl::OkStatus();
      case '|':
        ++at_;
        out_ += '|';
        quantifiable_ = false;
        previous_literal_ = 0;
        return absl::OkStatus();
      case '.':
        ++at_;
        out_ += "[^\\x{0A}]";
        Atom();
        return absl::OkStatus();
      case '^':
      case '$':  // Ruby's anchors are those of lines, always.
        ++at_;
        out_ += Concat("(?m:", std::string(1, c), ")");
        quantifiable_ = false;
        previous_literal_ = 0;
        return absl::OkStatus();
      case '*':
      case '+':
      case '?':
        return Quantifier();
      case '{':
        if (IsInterval()) return Interval();
        ++at_;
        return Literal('{');
      default: {
        int length = 0;
        const char32_t code_point = DecodeCodePoint(in_, at_, &length);
        at_ += length;
        return Literal(code_point);
      }
    }
  }

  absl::Status Quantifier() {
    if (!quantifiable_) return Malformed("a quantifier with nothing to repeat");
    out_ += in_[at_++];
    if (Peek() == '?' || Peek() == '+') out_ += in_[at_++];
    quantifiable_ = false;
    previous_literal_ = 0;
    if (Peek() == '*' || Peek() == '+' || Peek() == '?' || (Peek() == '{' && IsInterval())) {
      return Refused("a quantifier upon a quantifier");
    }
    return absl::OkStatus();
  }

  // {n}, {n,}, {n,m}, {,m}; anything else after { is text.
  bool IsInterval() const {
    size_t i = at_ + 1;
    size_t digits = 0;
    bool comma = false;
    for (; i < in_.size() && in_[i] != '}'; ++i) {
      if (in_[i] >= '0' && in_[i] <= '9') {
        ++digits;
      } else if (in_[i] == ',' && !comma) {
        comma = true;
      } else {
        return false;
      }
    }
    return i < in_.size() && digits > 0;
  }

  absl::Status Interval() {
    if (!quantifiable_) return Malformed("a quantifier with nothing to repeat");
    const size_t close = in_.find('}', at_);
    const std::string_view inside = in_.substr(at_ + 1, close - at_ - 1);
    at_ = close + 1;
    out_ += Concat("{", inside.front() == ',' ? "0" : "", inside, "}");
    quantifiable_ = false;
    previous_literal_ = 0;
    if (Peek() == '?' && inside.find(',') != std::string_view::npos && inside.front() != ',') {
      out_ += in_[at_++];
    }
    if (Peek() == '*' || Peek() == '+' || Peek() == '?' || (Peek() == '{' && IsInterval())) {
      return Refused("a quantifier upon an interval");
    }
    return absl::OkStatus();
  }

  absl::Status OpenGroup() {
    static constexpr struct {
      std::string_view open;
      bool quantifiable;
    } kKinds[] = {{"(?:", true},   {"(?=", false},  {"(?!", false},
                  {"(?<=", false}, {"(?<!", false}, {"(?>", true}};
    if (static_cast<int>(groups_.size()) >= kGroupDepthMax) return Refused("groups nested so deep");
    const Group outside = {ignore_case_, true};
    for (const auto& kind : kKinds) {
      if (Skip(kind.open)) {
        out_ += kind.open;
        groups_.push_back({outside.ignore_case_outside, kind.quantifiable});
        quantifiable_ = false;
        previous_literal_ = 0;
        return absl::OkStatus();
      }
    }
    if (Skip("(?i:")) {
      out_ += "(?i:";
      ignore_case_ = true;
    } else if (Peek(1) == '?' || Peek(1) == '*') {
      return Refused("a group that begins with (? and is none of : = ! <= <! > i:");
    } else {
      ++at_;
      out_ += "(?:";  // captures are of no use to a tokenizer
    }
    groups_.push_back(outside);
    quantifiable_ = false;
    previous_literal_ = 0;
    return absl::OkStatus();
  }

  // Reads \p{...} after the backslash; `items` becomes what goes inside a class.
  absl::Status Property(std::string* items, bool* negated) {
    *negated = Peek() == 'P';
    ++at_;
    const size_t close = in_.find('}', at_);
    if (Peek() != '{' || close == std::string_view::npos) return Refused("\\p without braces");
    std::string_view name = in_.substr(at_ + 1, close - at_ - 1);
    if (!name.empty() && name.front() == '^') {
      *negated = !*negated;
      name.remove_prefix(1);
    }
    if (std::find(kCategories.begin(), kCategories.end(), name) == kCategories.end()) {
      return Refused(Concat("\\p{", name, "}"));
    }
    at_ = close + 1;
    *items = CategoryItems(name);
    return absl::OkStatus();
  }

  // PCRE2's category and the code points that joined it in later versions of Unicode.
  static std::string CategoryItems(std::string_view name) {
    std::string items = Concat("\\p{", name, "}");
    for (const CategoryRange& range : CategoryChanges()) {
      if (range.category[0] != name[0] || (name.size() == 2 && range.category[1] != name[1]))
        continue;
      absl::StrAppend(
          &items, absl::StrFormat("\\x{%X}-\\x{%X}", uint32_t{range.first}, uint32_t{range.last}));
    }
    return items;
  }

  // An escape that stands for one character; false if it is none. Past the backslash.
  absl::StatusOr<bool> CharacterEscape(char32_t* c) {
    const char e = Peek();
    static constexpr std::string_view kNames = "nrtfvae";
    static constexpr char32_t kValues[] = {'\n', '\r', '\t', '\f', 0x0B, 0x07, 0x1B};
    if (e == '\0' && AtEnd()) return Malformed("a backslash at the end");
    if (const size_t i = kNames.find(e); i != std::string_view::npos) {
      *c = kValues[i];
      ++at_;
      return true;
    }
    if (e == 'x' || e == 'u') return HexEscape(c);
    const bool punctuation = e > 0x20 && e < 0x7F && !IsAsciiLetter(e) && !(e >= '0' && e <= '9');
    if (punctuation || e == ' ') {
      *c = static_cast<char32_t>(e);
      ++at_;
      return true;
    }
    return false;
  }

  absl::StatusOr<bool> HexEscape(char32_t* c) {
    const bool braces = Peek() == 'x' && Peek(1) == '{';
    const size_t digits_max = braces ? 8 : Peek() == 'x' ? 2 : 4;
    at_ += braces ? 2 : 1;
    char32_t value = 0;
    size_t digits = 0;
    while (digits < digits_max && IsHexDigit(Peek())) {
      const char d = in_[at_++];
      value = value * 16 + static_cast<char32_t>(d <= '9' ? d - '0' : (d | 0x20) - 'a' + 10);
      ++digits;
    }
    if (digits == 0 || (braces && !Skip("}"))) return Malformed("a bad hexadecimal escape");
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
      return Malformed("a code point that does not exist");
    }
    // \x80 and above without braces are raw bytes to the reference.
    if (!braces && digits_max == 2 && value >= 0x80) return Refused("a raw byte");
    *c = value;
    return true;
  }

  absl::Status Escape() {
    ++at_;
    const char e = Peek();
    std::string items;
    bool negated = false;
    switch (e) {
      case 's':
      case 'S':
        ++at_;
        out_ += Concat(e == 's' ? "[" : "[^", kSpaceItems, "]");
        Atom();
        return absl::OkStatus();
      case 'd':
      case 'D':
        ++at_;
        out_ += Concat(e == 'd' ? "[" : "[^", CategoryItems("Nd"), "]");
        Atom();
        return absl::OkStatus();
      case 'p':
      case 'P':
        if (ignore_case_) return Refused("\\p in (?i:...)");
        WINNOW_RETURN_IF_ERROR(Property(&items, &negated));
        out_ += Concat(negated ? "[^" : "[", items, "]");
        Atom();
        return absl::OkStatus();
      case 'A':
      case 'z':
        ++at_;
        out_ += '\\';
        out_ += e;
        quantifiable_ = false;
        previous_literal_ = 0;
        return absl::OkStatus();
      default:
        break;
    }
    char32_t c = 0;
    WINNOW_ASSIGN_OR_RETURN(const bool is_character, CharacterEscape(&c));
    if (is_character) return Literal(c);
    return Refused(Concat("\\", std::string(1, e)));
  }

  // One end of a range or a single character of a class; false if it was a class escape (written).
  absl::StatusOr<bool> ClassMember(char32_t* c) {
    if (Peek() == '[') return Refused("a class inside a class");
    if (Peek() == '&' && Peek(1) == '&') return Refused("an intersection of classes");
    if (Peek() != '\\') {
      int length = 0;
      *c = DecodeCodePoint(in_, at_, &length);
      at_ += length;
      return true;
    }
    ++at_;
    std::string items;
    bool negated = false;
    switch (Peek()) {
      case 's':
      case 'S':
        out_ += Concat(Peek() == 's' ? kSpaceItems : kNotSpaceItems);
        ++at_;
        return false;
      case 'd':
        ++at_;
        out_ += Concat(CategoryItems("Nd"));
        return false;
      case 'p':
      case 'P':
        if (ignore_case_) return Refused("\\p in (?i:...)");
        WINNOW_RETURN_IF_ERROR(Property(&items, &negated));
        if (negated) return Refused("\\P in a class");
        out_ += items;
        return false;
      default:
        break;
    }
    const char e = Peek();
    WINNOW_ASSIGN_OR_RETURN(const bool is_character, CharacterEscape(c));
    if (is_character) return true;
    return Refused(Concat("\\", std::string(1, e), " in a class"));
  }

  absl::Status Class() {
    ++at_;
    out_ += '[';
    if (Skip("^")) {
      if (ignore_case_) return Refused("a negated class in (?i:...)");
      out_ += '^';
    }
    bool empty = true;
    while (true) {
      if (AtEnd()) return Malformed("a class is not closed");
      if (Peek() == ']') {
        // Where a class begins with ], the two syntaxes disagree.
        if (empty) return Refused("an empty class");
        ++at_;
        break;
      }
      empty = false;
      char32_t first = 0;
      WINNOW_ASSIGN_OR_RETURN(const bool is_character, ClassMember(&first));
      if (!is_character) {
        if (Peek() == '-' && Peek(1) != ']') return Refused("a range that begins with a class");
        continue;
      }
      if (ignore_case_ && first >= 0x80) return Refused("a character beyond ASCII in (?i:...)");
      EmitCodePoint(first);
      if (Peek() == '-' && Peek(1) != ']' && Peek(1) != '\0') {
        ++at_;
        char32_t last = 0;
        WINNOW_ASSIGN_OR_RETURN(const bool is_end, ClassMember(&last));
        if (!is_end) return Refused("a range that ends with a class");
        if (ignore_case_ && last >= 0x80) return Refused("a character beyond ASCII in (?i:...)");
        if (last < first) return Malformed("a range that runs backwards");
        out_ += '-';
        EmitCodePoint(last);
      }
    }
    out_ += ']';
    Atom();
    return absl::OkStatus();
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
  std::vector<Group> groups_;
  bool ignore_case_ = false;
  bool quantifiable_ = false;
  char32_t previous_literal_ = 0;  // in lower case; 0 if what comes before is not a letter
};

}  // namespace

absl::StatusOr<std::string> TranslateRegex(std::string_view pattern) {
  return Translator(pattern).Run();
}

}  // namespace winnow::engine
