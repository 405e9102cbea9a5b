#include "engine/text/jinja/format.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "engine/base/concat.h"
#include "engine/text/jinja/arguments.h"
#include "engine/text/jinja/strings.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine::jinja {
namespace {

// Widths and precisions beyond this would only fill memory.
constexpr int64_t kWidthMax = 100'000;

// ---- what both ways to format share ----

struct Spec {
  std::string fill = " ";
  char align = '\0';  // '<', '>', '=', '^'
  char sign = '-';
  bool alternate = false;
  bool zero = false;
  char grouping = '\0';
  int64_t width = 0;
  int64_t precision = -1;
  char type = '\0';
};

std::string Group(std::string digits, char separator, size_t every) {
  for (size_t at = digits.size(); at > every; at -= every) digits.insert(at - every, 1, separator);
  return digits;
}

std::string InBase(uint64_t value, unsigned base, bool upper) {
  const std::string_view alphabet = upper ? "0123456789ABCDEF" : "0123456789abcdef";
  std::string digits;
  do {
    digits.insert(digits.begin(), alphabet[value % base]);
    value /= base;
  } while (value != 0);
  return digits;
}

// Sign, prefix and digits with padding between or around them.
std::string PadNumber(const std::string& sign, const std::string& prefix, std::string digits,
                      const Spec& spec, char default_align) {
  const auto width = static_cast<size_t>(spec.width);
  const size_t length = sign.size() + prefix.size() + Length(digits);
  const size_t missing = width > length ? width - length : 0;
  char align = spec.align != '\0' ? spec.align : spec.zero ? '=' : default_align;
  std::string fill;
  for (size_t i = 0; i < missing; ++i) fill += spec.align == '\0' && spec.zero ? "0" : spec.fill;
  switch (align) {
    case '<':
      return sign + prefix + digits + fill;
    case '=':
      return sign + prefix + fill + digits;
    case '^': {
      const size_t left = missing / 2 * (missing == 0 ? 0 : fill.size() / missing);
      return fill.substr(0, left) + sign + prefix + digits + fill.substr(left);
    }
    default:
      return fill + sign + prefix + digits;
  }
}

std::string SignOf(bool negative, const Spec& spec) {
  if (negative) return "-";
  return spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
}

// Digits of a finite or infinite number without its sign, as printf's conversion `type` has them.
std::string FloatDigits(double value, char type, int64_t precision, bool alternate) {
  const bool upper = type == 'E' || type == 'F' || type == 'G';
  if (std::isnan(value)) return upper ? "NAN" : "nan";
  if (std::isinf(value)) return upper ? "INF" : "inf";
  const int digits = static_cast<int>(precision < 0 ? 6 : precision);
  const double positive = std::fabs(value);
  switch (type) {
    case 'e':
      return alternate ? absl::StrFormat("%#.*e", digits, positive)
                       : absl::StrFormat("%.*e", digits, positive);
    case 'E':
      return alternate ? absl::StrFormat("%#.*E", digits, positive)
                       : absl::StrFormat("%.*E", digits, positive);
    case 'f':
    case 'F':
      return alternate ? absl::StrFormat("%#.*f", digits, positive)
                       : absl::StrFormat("%.*f", digits, positive);
    case 'G':
      return alternate ? absl::StrFormat("%#.*G", digits, positive)
                       : absl::StrFormat("%.*G", digits, positive);
    default:
      return alternate ? absl::StrFormat("%#.*g", digits, positive)
                       : absl::StrFormat("%.*g", digits, positive);
  }
}

uint64_t Magnitude(int64_t value) {
  return value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
}

// ---- format % values ----

class PercentFormatter {
 public:
  PercentFormatter(Interpreter& in, const Value& format, const Value& values)
      : in_(in),
        format_(*format.text),
        text_(format_.bytes()),
        values_(values),
        is_tuple_(values.Is(Kind::kTuple)) {}

  MarkedText Run() {
    while (at_ < text_.size() && in_.Reserve(1, out_.size())) {
      const size_t percent = text_.find('%', at_);
      if (percent == text_.npos) break;
      out_.Append(format_, at_, percent);
      at_ = percent + 1;
      Conversion(percent);
    }
    if (in_.failed()) return {};
    out_.Append(format_, at_, text_.size());
    const bool used_all =
        is_tuple_ ? next_ >= Items(values_).size()
                  : next_ > 0 || mapped_ || values_.Is(Kind::kDict) || values_.Is(Kind::kList);
    if (!used_all) in_.Fail("not all arguments converted during string formatting");
    return std::move(out_);
  }

 private:
  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  Value NextArgument() {
    if (is_tuple_) {
      if (next_ < Items(values_).size()) return Items(values_)[next_++];
    } else if (next_++ == 0) {
      return values_;
    }
    return in_.Fail("not enough arguments for format string");
  }

  Value Mapped() {
    int depth = 1;
    const size_t begin = ++at_;
    while (at_ < text_.size() && depth > 0) {
      if (text_[at_] == '(') ++depth;
      if (text_[at_] == ')') --depth;
      ++at_;
    }
    if (depth > 0) return in_.Fail("incomplete format key");
    if (!values_.Is(Kind::kDict)) return in_.Fail("format requires a mapping");
    mapped_ = true;
    const std::string_view key = text_.substr(begin, at_ - 1 - begin);
    const Value* found = AsDict(values_).Find(key);
    return found != nullptr ? *found : in_.Fail(Concat("the format's key '", key, "' is missing"));
  }

  int64_t Number() {
    if (Peek() == '*') {
      ++at_;
      return IntOr(in_, NextArgument(), 0);
    }
    int64_t value = 0;
    while (Peek() >= '0' && Peek() <= '9') {
      value = std::min<int64_t>(value * 10 + (text_[at_++] - '0'), kWidthMax + 1);
    }
    return value;
  }

  void Conversion(size_t percent) {
    Spec spec;
    Value value;
    if (Peek() == '(') value = Mapped();
    bool left = false;
    for (bool flags = true; flags && at_ < text_.size();) {
      switch (Peek()) {
        case '-':
          left = true;
          break;
        case '+':
          spec.sign = '+';
          break;
        case ' ':
          if (spec.sign != '+') spec.sign = ' ';
          break;
        case '#':
          spec.alternate = true;
          break;
        case '0':
          spec.zero = true;
          break;
        default:
          flags = false;
      }
      if (flags) ++at_;
    }
    spec.width = Number();
    if (spec.width < 0) {
      left = true;
      spec.width = -spec.width;
    }
    if (Peek() == '.') {
      ++at_;
      spec.precision = std::max<int64_t>(Number(), 0);
    }
    if (spec.width > kWidthMax || spec.precision > kWidthMax) {
      in_.Fail(Concat("a width beyond ", kWidthMax, " is not supported"));
    }
    in_.Work(static_cast<size_t>(spec.width + std::max<int64_t>(spec.precision, 0)));
    while (Peek() == 'h' || Peek() == 'l' || Peek() == 'L') ++at_;
    if (at_ >= text_.size()) in_.Fail("incomplete format");
    if (in_.failed()) return;
    spec.type = text_[at_++];
    spec.align = left ? '<' : '\0';
    if (spec.type == '%') {
      out_.Append(format_, percent, percent + 1);
      return;
    }
    if (value.IsMissing()) value = NextArgument();
    if (!in_.failed()) Convert(value, spec);
  }

  void Convert(const Value& value, const Spec& spec) {
    switch (spec.type) {
      case 's':
      case 'r':
      case 'a': {
        MarkedText text;
        if (spec.type == 's') {
          in_.AppendText(value, &text);
        } else {
          in_.AppendRepr(value, &text);
        }
        if (spec.precision >= 0)
          text = text.Slice(0, OffsetOf(text.bytes(), static_cast<size_t>(spec.precision)));
        const size_t length = Length(text.bytes());
        const auto width = static_cast<size_t>(spec.width);
        const size_t missing = width > length ? width - length : 0;
        const bool left = spec.align == '<';
        out_.Append(Pad(text, " ", false, left ? 0 : missing, left ? missing : 0));
        return;
      }
      case 'c':
        ConvertCharacter(value);
        return;
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o':
        ConvertInteger(value, spec);
        return;
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
        if (!value.IsNumber()) {
          in_.Fail(Concat("must be real number, not ", TypeName(value)));
          return;
        }
        out_.Append(
            PadNumber(SignOf(std::signbit(value.AsDouble()) && !std::isnan(value.AsDouble()), spec),
                      "", FloatDigits(value.AsDouble(), spec.type, spec.precision, spec.alternate),
                      spec, '>'),
            false);
        return;
      default:
        in_.Fail(Concat("unsupported format character '", std::string(1, spec.type), "'"));
    }
  }

  void ConvertCharacter(const Value& value) {
    if (value.IsString() && Length(value.bytes()) == 1) {
      out_.Append(*value.text);
      return;
    }
    if (!value.IsIntLike() || value.AsInt() < 0 || value.AsInt() > 0x10FFFF ||
        (value.AsInt() >= 0xD800 && value.AsInt() < 0xE000)) {
      in_.Fail("%c requires int or char");
      return;
    }
    std::string character;
    AppendCodePoint(static_cast<char32_t>(value.AsInt()), &character);
    // A number has no mark: it may come from the request, so what it makes is not the template's.
    out_.Append(character, true);
  }

  void ConvertInteger(const Value& value, const Spec& spec) {
    const bool is_decimal = spec.type == 'd' || spec.type == 'i' || spec.type == 'u';
    int64_t number = 0;
    if (value.IsIntLike()) {
      number = value.AsInt();
    } else if (value.Is(Kind::kFloat) && is_decimal && std::fabs(value.real) < 9.2e18) {
      number = static_cast<int64_t>(value.real);
    } else {
      if (value.IsUndefined()) in_.Fail(value.bytes());
      in_.Fail(Concat("%", std::string(1, spec.type), " format: a number is required, not ",
                      TypeName(value)));
      return;
    }
    const unsigned base = is_decimal ? 10 : spec.type == 'o' ? 8 : 16;
    std::string digits = InBase(Magnitude(number), base, spec.type == 'X');
    if (spec.precision > static_cast<int64_t>(digits.size())) {
      digits.insert(0, static_cast<size_t>(spec.precision) - digits.size(), '0');
    }
    const std::string prefix = !spec.alternate || is_decimal ? ""
                               : base == 8                   ? "0o"
                               : spec.type == 'X'            ? "0X"
                                                             : "0x";
    out_.Append(PadNumber(SignOf(number < 0, spec), prefix, std::move(digits), spec, '>'), false);
  }

  Interpreter& in_;
  const MarkedText& format_;
  std::string_view text_;
  const Value& values_;
  bool is_tuple_;
  size_t at_ = 0;
  size_t next_ = 0;
  bool mapped_ = false;
  MarkedText out_;
};

// ---- str.format ----

class BraceFormatter {
 public:
  BraceFormatter(Interpreter& in, const Arguments& arguments) : in_(in), arguments_(arguments) {}

  void Run(const MarkedText& format, int depth, MarkedText* out) {
    const std::string_view text = format.bytes();
    for (size_t at = 0; at < text.size() && in_.Reserve(1, out->size());) {
      const size_t brace = text.find_first_of("{}", at);
      if (brace == text.npos) {
        out->Append(format, at, text.size());
        return;
      }
      out->Append(format, at, brace);
      at = brace + 1;
      if (at < text.size() && text[at] == text[brace]) {
        out->Append(format, brace, at);
        ++at;
        continue;
      }
      if (text[brace] == '}') {
        in_.Fail("Single '}' encountered in format string");
        return;
      }
      int nested = 1;
      const size_t begin = at;
      while (at < text.size() && nested > 0) {
        if (text[at] == '{') ++nested;
        if (text[at] == '}') --nested;
        ++at;
      }
      if (nested > 0) {
        in_.Fail(begin == text.size() ? "Single '{' encountered in format string"
                                      : "expected '}' before end of string");
        return;
      }
      Field(format.Slice(begin, at - 1), depth, out);
    }
  }

 private:
  void Field(const MarkedText& field, int depth, MarkedText* out) {
    const std::string_view text = field.bytes();
    if (depth > 1) {
      in_.Fail("Max string recursion exceeded");
      return;
    }
    // name!conversion:spec; brackets in the name hide both marks.
    size_t end = 0;
    for (bool bracket = false; end < text.size(); ++end) {
      if (text[end] == '[') bracket = true;
      if (text[end] == ']') bracket = false;
      if (!bracket && (text[end] == '!' || text[end] == ':')) break;
    }
    Value value = Lookup(text.substr(0, end));
    if (end < text.size() && text[end] == '!') {
      if (end + 1 >= text.size() || (end + 2 < text.size() && text[end + 2] != ':')) {
        in_.Fail("expected ':' after conversion specifier");
        return;
      }
      value = Converted(value, text[end + 1]);
      end += 2;
    }
    MarkedText spec;
    if (end < text.size()) Run(field.Slice(end + 1, text.size()), depth + 1, &spec);
    if (!in_.failed()) Append(value, spec.bytes(), out);
  }

  Value Converted(const Value& value, char conversion) {
    MarkedText text;
    if (conversion == 's') {
      in_.AppendText(value, &text);
    } else if (conversion == 'r') {
      in_.AppendRepr(value, &text);
    } else {
      return in_.Fail(Concat("Unknown conversion specifier ", std::string(1, conversion)));
    }
    return in_.String(std::move(text));
  }

  Value First(std::string_view name) {
    const bool is_number =
        !name.empty() && name.size() < 10 &&
        std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!name.empty() && !is_number) {
      for (const auto& [key, value] : arguments_.keyword) {
        if (key == name) return value;
      }
      return in_.Fail(Concat("format() has no argument '", name, "'"));
    }
    const bool automatic = name.empty();
    if (numbering_ != Numbering::kNone && (numbering_ == Numbering::kAutomatic) != automatic) {
      return in_.Fail("cannot switch between automatic and manual field numbering");
    }
    numbering_ = automatic ? Numbering::kAutomatic : Numbering::kManual;
    const size_t index = automatic ? next_++ : static_cast<size_t>(std::stoi(std::string(name)));
    if (index >= arguments_.positional.size()) {
      return in_.Fail(
          Concat("Replacement index ", index, " out of range for positional args tuple"));
    }
    return arguments_.positional[index];
  }

  Value Lookup(std::string_view name) {
    size_t at = std::min(name.find_first_of(".["), name.size());
    Value value = First(name.substr(0, at));
    while (at < name.size() && in_.Step()) {
      if (name[at] == '.') {
        const size_t end = std::min(name.find_first_of(".[", at + 1), name.size());
        if (end == at + 1) return in_.Fail("Empty attribute in format string");
        value = in_.GetAttribute(value, name.substr(at + 1, end - at - 1));
        at = end;
        continue;
      }
      const size_t end = name.find(']', at);
      if (name[at] != '[' || end == name.npos) return in_.Fail("Missing ']' in format string");
      const std::string key(name.substr(at + 1, end - at - 1));
      if (key.empty()) return in_.Fail("Empty attribute in format string");
      const bool is_number = key.size() < 10 && std::all_of(key.begin(), key.end(), [](char c) {
                               return c >= '0' && c <= '9';
                             });
      value = in_.GetItem(value, is_number ? Value::Int(std::stoi(key)) : Value::String(key));
      at = end + 1;
      if (at < name.size() && name[at] != '.' && name[at] != '[') {
        return in_.Fail("Only '.' or '[' may follow ']' in format field specifier");
      }
    }
    return value;
  }

  std::optional<Spec> ParseSpec(std::string_view text) {
    Spec spec;
    const auto is_align = [](char c) { return c == '<' || c == '>' || c == '=' || c == '^'; };
    if (!text.empty()) {
      const size_t first = OffsetOf(text, 1);
      if (first < text.size() && is_align(text[first])) {
        spec.fill = text.substr(0, first);
        spec.align = text[first];
        text.remove_prefix(first + 1);
      } else if (is_align(text[0])) {
        spec.align = text[0];
        text.remove_prefix(1);
      }
    }
    const auto take = [&](char c) {
      if (text.empty() || text[0] != c) return false;
      text.remove_prefix(1);
      return true;
    };
    const auto number = [&]() {
      int64_t value = 0;
      while (!text.empty() && text[0] >= '0' && text[0] <= '9') {
        value = std::min<int64_t>(value * 10 + (text[0] - '0'), kWidthMax + 1);
        text.remove_prefix(1);
      }
      return value;
    };
    for (const char sign : {'+', '-', ' '}) {
      if (take(sign)) {
        spec.sign = sign;
        break;
      }
    }
    spec.alternate = take('#');
    if (take('0')) {
      spec.zero = true;
      if (spec.align == '\0') spec.fill = "0";
    }
    spec.width = number();
    if (take(',')) spec.grouping = ',';
    if (take('_')) spec.grouping = '_';
    if (take('.')) spec.precision = number();
    if (!text.empty()) {
      spec.type = text[0];
      text.remove_prefix(1);
    }
    if (!text.empty()) in_.Fail("Invalid format specifier");
    if (spec.width > kWidthMax || spec.precision > kWidthMax) {
      in_.Fail(Concat("a width beyond ", kWidthMax, " is not supported"));
    }
    in_.Work(static_cast<size_t>(spec.width + std::max<int64_t>(spec.precision, 0)));
    if (in_.failed()) return std::nullopt;
    return spec;
  }

  void Append(const Value& value, std::string_view spec_text, MarkedText* out) {
    if (spec_text.empty()) {
      in_.AppendText(value, out);
      return;
    }
    const std::optional<Spec> spec = ParseSpec(spec_text);
    if (!spec) return;
    if (value.IsString()) {
      AppendString(*value.text, *spec, out);
    } else if (value.Is(Kind::kFloat) ||
               (value.IsIntLike() && spec->type != '\0' &&
                std::string_view("eEfFgG%").find(spec->type) != std::string_view::npos)) {
      AppendFloat(value.AsDouble(), *spec, out);
    } else if (value.Is(Kind::kInt) || (value.Is(Kind::kBool) && spec->type != '\0')) {
      AppendInteger(value.AsInt(), *spec, out);
    } else if (value.Is(Kind::kBool)) {
      // Python formats a bool without a type as a number, too.
      AppendInteger(value.AsInt(), *spec, out);
    } else {
      in_.Fail(Concat("unsupported format string passed to ", TypeName(value), ".__format__"));
    }
  }

  void AppendString(const MarkedText& text, const Spec& spec, MarkedText* out) {
    if ((spec.type != '\0' && spec.type != 's') || spec.sign != '-' || spec.alternate ||
        spec.grouping != '\0' || spec.align == '=') {
      in_.Fail("Unknown format code for object of type 'str'");
      return;
    }
    MarkedText cut =
        spec.precision >= 0
            ? text.Slice(0, OffsetOf(text.bytes(), static_cast<size_t>(spec.precision)))
            : text;
    const size_t length = Length(cut.bytes());
    const auto width = static_cast<size_t>(spec.width);
    const size_t missing = width > length ? width - length : 0;
    const size_t before = spec.align == '>' ? missing : spec.align == '^' ? missing / 2 : 0;
    out->Append(Pad(cut, spec.fill, false, before, missing - before));
  }

  void AppendInteger(int64_t value, const Spec& spec, MarkedText* out) {
    if (spec.type == 'c') {
      if (value < 0 || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
        in_.Fail("%c arg not in range(0x110000)");
        return;
      }
      std::string character;
      AppendCodePoint(static_cast<char32_t>(value), &character);
      out->Append(character, true);
      return;
    }
    const char type = spec.type == '\0' || spec.type == 'n' ? 'd' : spec.type;
    if (std::string_view("dxXob").find(type) == std::string_view::npos || spec.precision >= 0) {
      in_.Fail(spec.precision >= 0 ? "Precision not allowed in integer format specifier"
                                   : "Unknown format code for object of type 'int'");
      return;
    }
    const unsigned base = type == 'd' ? 10 : type == 'o' ? 8 : type == 'b' ? 2 : 16;
    std::string digits = InBase(Magnitude(value), base, type == 'X');
    if (spec.grouping != '\0') digits = Group(std::move(digits), spec.grouping, base == 10 ? 3 : 4);
    const std::string prefix = spec.alternate && type != 'd' ? std::string("0") + type : "";
    if (spec.zero && spec.grouping != '\0' && spec.width > static_cast<int64_t>(digits.size())) {
      in_.Fail("zero padding with grouping is not supported");
      return;
    }
    out->Append(PadNumber(SignOf(value < 0, spec), prefix, std::move(digits), spec, '>'), false);
  }

  void AppendFloat(double value, const Spec& spec, MarkedText* out) {
    std::string digits;
    const bool percent = spec.type == '%';
    if (spec.type == '\0' && spec.precision < 0) {
      AppendFloatRepr(std::fabs(value), &digits);
    } else if (spec.type == '\0') {
      in_.Fail("a precision without a type is not supported");
      return;
    } else if (std::string_view("eEfFgG%").find(spec.type) != std::string_view::npos) {
      digits = FloatDigits(percent ? value * 100 : value, percent ? 'f' : spec.type, spec.precision,
                           spec.alternate);
    } else {
      in_.Fail("Unknown format code for object of type 'float'");
      return;
    }
    if (spec.grouping != '\0') {
      const size_t whole = std::min(digits.find_first_not_of("0123456789"), digits.size());
      digits = Group(digits.substr(0, whole), spec.grouping, 3) + digits.substr(whole);
    }
    if (percent) digits += "%";
    out->Append(PadNumber(SignOf(std::signbit(value) && !std::isnan(value), spec), "",
                          std::move(digits), spec, '>'),
                false);
  }

  enum class Numbering { kNone, kAutomatic, kManual };
  Interpreter& in_;
  const Arguments& arguments_;
  Numbering numbering_ = Numbering::kNone;
  size_t next_ = 0;
};

// ---- JSON ----

class JsonWriter {
 public:
  struct Style {
    bool ascii = false;
    bool sort_keys = false;
    std::optional<std::string> indent;
    MarkedText item_separator;
    MarkedText key_separator;
  };
  JsonWriter(Interpreter& in, Style style) : in_(in), style_(std::move(style)) {}

  void Write(const Value& value, int level, MarkedText* out) {
    const Interpreter::Depth depth(&in_);
    if (!depth.ok() || !in_.Reserve(1, out->size())) return;
    switch (value.kind) {
      case Kind::kNone:
        out->Append("null", false);
        return;
      case Kind::kBool:
        out->Append(value.boolean ? "true" : "false", false);
        return;
      case Kind::kInt:
        out->Append(Concat(value.integer), false);
        return;
      case Kind::kFloat:
        out->Append(Number(value.real), false);
        return;
      case Kind::kString:
        WriteString(*value.text, out);
        return;
      case Kind::kList:
      case Kind::kTuple:
        WriteList(Items(value), level, out);
        return;
      case Kind::kDict:
        WriteDict(AsDict(value), level, out);
        return;
      default:
        in_.Fail(Concat("Object of type ", TypeName(value), " is not JSON serializable"));
    }
  }

 private:
  static std::string Number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    std::string text;
    AppendFloatRepr(value, &text);
    return text;
  }

  void WriteString(const MarkedText& text, MarkedText* out) {
    const std::string_view bytes = text.bytes();
    if (!in_.Reserve(bytes.size() * 6, out->size())) return;
    out->Append("\"", false);
    size_t plain = 0;
    for (size_t at = 0; at < bytes.size();) {
      int length = 0;
      const char32_t c = DecodeCodePoint(bytes, at, &length);
      const std::string escaped = Escaped(c);
      if (!escaped.empty()) {
        out->Append(text, plain, at);
        out->Append(escaped, text.IsUser(at));
        plain = at + static_cast<size_t>(length);
      }
      at += static_cast<size_t>(length);
    }
    out->Append(text, plain, bytes.size());
    out->Append("\"", false);
  }

  // Empty: the character stands for itself.
  std::string Escaped(char32_t c) const {
    switch (c) {
      case '"':
        return "\\\"";
      case '\\':
        return "\\\\";
      case '\n':
        return "\\n";
      case '\r':
        return "\\r";
      case '\t':
        return "\\t";
      case '\f':
        return "\\f";
      case '\b':
        return "\\b";
      default:
        break;
    }
    const auto code = static_cast<unsigned>(c);
    if (c < 0x20) return absl::StrFormat("\\u%04x", code);
    if (!style_.ascii || c < 0x7F) return "";
    if (c == 0x7F) return "";
    if (c < 0x10000) return absl::StrFormat("\\u%04x", code);
    return absl::StrFormat("\\u%04x\\u%04x", 0xD800 + ((code - 0x10000) >> 10),
                           0xDC00 + ((code - 0x10000) & 0x3FF));
  }

  void NewLine(int level, MarkedText* out) {
    if (!style_.indent) return;
    const size_t bytes = style_.indent->size() * static_cast<size_t>(level);
    if (!in_.Reserve(bytes, out->size())) return;
    out->Append("\n", false);
    for (int i = 0; i < level; ++i) out->Append(*style_.indent, false);
  }

  void WriteList(const std::vector<Value>& items, int level, MarkedText* out) {
    if (items.empty()) {
      out->Append("[]", false);
      return;
    }
    out->Append("[", false);
    for (size_t i = 0; i < items.size() && !in_.failed(); ++i) {
      if (i > 0) out->Append(style_.item_separator);
      NewLine(level + 1, out);
      Write(items[i], level + 1, out);
    }
    NewLine(level, out);
    out->Append("]", false);
  }

  void WriteKey(const Value& key, MarkedText* out) {
    switch (key.kind) {
      case Kind::kString:
        WriteString(*key.text, out);
        return;
      case Kind::kBool:
        out->Append(key.boolean ? "\"true\"" : "\"false\"", false);
        return;
      case Kind::kNone:
        out->Append("\"null\"", false);
        return;
      case Kind::kInt:
        out->Append(Concat("\"", key.integer, "\""), false);
        return;
      case Kind::kFloat:
        out->Append(Concat("\"", Number(key.real), "\""), false);
        return;
      default:
        in_.Fail(Concat("keys must be str, int, float, bool or None, not ", TypeName(key)));
    }
  }

  void WriteDict(const Dict& dict, int level, MarkedText* out) {
    if (dict.entries().empty()) {
      out->Append("{}", false);
      return;
    }
    std::vector<std::pair<Value, Value>> entries;
    if (!in_.Reserve(dict.entries().size() * 2 * sizeof(Value))) return;
    entries = dict.entries();
    if (style_.sort_keys && !in_.Sort(&entries, false)) return;
    out->Append("{", false);
    bool first = true;
    for (const auto& [key, value] : entries) {
      if (in_.failed()) return;
      if (!first) out->Append(style_.item_separator);
      first = false;
      NewLine(level + 1, out);
      WriteKey(key, out);
      out->Append(style_.key_separator);
      Write(value, level + 1, out);
    }
    NewLine(level, out);
    out->Append("}", false);
  }

  Interpreter& in_;
  Style style_;
};

}  // namespace

Value FormatPercent(Interpreter& interpreter, const Value& format, const Value& values) {
  if (format.markup) return interpreter.Fail("% on safe text is not supported");
  return interpreter.String(PercentFormatter(interpreter, format, values).Run());
}

Value FormatBraces(Interpreter& interpreter, const Value& format, Arguments arguments) {
  if (format.markup) return interpreter.Fail("format() of safe text is not supported");
  MarkedText out;
  BraceFormatter(interpreter, arguments).Run(*format.text, 0, &out);
  return interpreter.String(std::move(out));
}

Value ToJson(Interpreter& in, const Value& value, Arguments arguments) {
  const std::vector<Value> given = Bind(in, "tojson", std::move(arguments),
                                        {"ensure_ascii", "indent", "separators", "sort_keys"}, 0);
  if (in.failed()) return value;
  JsonWriter::Style style;
  style.ascii = !given[0].IsMissing() && in.Truth(given[0]);
  style.sort_keys = !given[3].IsMissing() && in.Truth(given[3]);
  const Value& indent = given[1];
  if (indent.IsString()) {
    style.indent = std::string(indent.bytes());
  } else if (!indent.IsMissing() && !indent.Is(Kind::kNone)) {
    const int64_t width = IntOr(in, indent, 0);
    if (width > 1000) return in.Fail("an indent beyond 1000 is not supported");
    style.indent = std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  }
  style.item_separator = MarkedText(style.indent ? "," : ", ");
  style.key_separator = MarkedText(": ");
  if (!given[2].IsMissing() && !given[2].Is(Kind::kNone)) {
    const std::vector<Value> separators = in.Collect(given[2]);
    if (in.failed()) return value;
    if (separators.size() != 2 || !separators[0].IsString() || !separators[1].IsString()) {
      return in.Fail("separators must be two strings");
    }
    style.item_separator = *separators[0].text;
    style.key_separator = *separators[1].text;
  }
  MarkedText out;
  JsonWriter(in, std::move(style)).Write(value, 0, &out);
  return in.String(std::move(out));
}

Value Escape(Interpreter& in, const Value& value) {
  if (value.IsString() && value.markup) return value;
  const Text text = in.ToText(value);
  if (!in.Reserve(text->size() * 5)) return value;
  MarkedText out;
  const std::string_view bytes = text->bytes();
  for (size_t at = 0; at < bytes.size(); ++at) {
    const std::string_view escaped = bytes[at] == '&'    ? "&amp;"
                                     : bytes[at] == '<'  ? "&lt;"
                                     : bytes[at] == '>'  ? "&gt;"
                                     : bytes[at] == '"'  ? "&#34;"
                                     : bytes[at] == '\'' ? "&#39;"
                                                         : "";
    if (escaped.empty()) {
      out.Append(*text, at, at + 1);
    } else {
      out.Append(escaped, text->IsUser(at));
    }
  }
  return in.String(std::move(out), /*markup=*/true);
}

Value ReplaceIn(Interpreter& in, const Value& self, const Value& from, const Value& to,
                int64_t count) {
  for (const Value* value : {&from, &to}) {
    if (value->IsString()) continue;
    if (value->IsUndefined()) in.Fail(value->bytes());
    return in.Fail(Concat("replace() argument must be str, not ", TypeName(*value)));
  }
  if (!in.Work(self.text->size())) return self;
  auto times = static_cast<size_t>(CountOf(self.bytes(), from.bytes()));
  if (count >= 0) times = std::min(times, static_cast<size_t>(count));
  const size_t size = to.text->size();
  if (size > 0 && times > in.heap().bytes_max() / size)
    return in.FailLimit(Concat(in.heap().bytes_max(), " bytes of memory"));
  if (!in.Reserve(self.text->size() + times * (size + sizeof(MarkedText::Range)))) return self;
  const Value replacement = self.markup ? Escape(in, to) : to;
  return in.String(Replace(*self.text, from.bytes(), *replacement.text, count), self.markup);
}

bool IsCaseOf(std::string_view text, bool upper) {
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    int length = 0;
    const char32_t c = DecodeCodePoint(text, at, &length);
    at += static_cast<size_t>(length);
    if (IsTitle(c) || (upper ? IsLower(c) : IsUpper(c))) return false;
    any = any || (upper ? IsUpper(c) : IsLower(c));
  }
  return any;
}

}  // namespace winnow::engine::jinja
