#include "engine/text/jinja/filters.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_format.h"
#include "engine/base/concat.h"
#include "engine/text/jinja/arguments.h"
#include "engine/text/jinja/format.h"
#include "engine/text/jinja/interpreter.h"
#include "engine/text/jinja/strings.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine::jinja {
namespace {

using Filter = Value (*)(Interpreter&, const Value& input, Arguments);

bool Given(const Value& value) { return !value.IsMissing() && !value.Is(Kind::kNone); }

Value TextOf(Interpreter& in, const Value& value) {
  if (value.IsString()) return value;
  Value out(Kind::kString);
  out.text = in.ToText(value);
  return out;
}

// A function that looks up a path like "a.b.0"; an absent path gives the value itself.
std::function<Value(const Value&)> PathGetter(Interpreter& in, const Value& path,
                                              const Value& fallback = Value()) {
  std::vector<Value> parts;
  if (path.IsString()) {
    const std::string_view separator = ".";
    for (const MarkedText& part : Split(*path.text, &separator, -1, false)) {
      const bool number =
          part.size() < 10 && AllOf(part.bytes(), [](char32_t c) { return c >= '0' && c <= '9'; });
      parts.push_back(number ? Value::Int(std::atoi(std::string(part.bytes()).c_str()))
                             : in.String(part));
    }
  } else if (Given(path)) {
    parts.push_back(path);
  }
  return [&in, parts, fallback](const Value& value) {
    Value item = value;
    for (const Value& part : parts) {
      item = in.GetItem(item, part);
      if (Given(fallback) && item.IsUndefined()) item = fallback;
    }
    return item;
  };
}

Value IgnoreCase(Interpreter& in, const Value& value) {
  if (!value.IsString() || !in.Reserve(value.text->size())) return value;
  return in.String(ToCase(*value.text, Case::kLower));
}

// ---- strings ----

Value CallMethod(Interpreter& in, const Value& input, const char* name, Arguments arguments) {
  return in.Call(in.GetItem(TextOf(in, input), Value::String(name)), std::move(arguments));
}

template <Case to>
Value CaseFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "a case filter", std::move(arguments), {}, 0);
  return CallMethod(in, input, to == Case::kUpper ? "upper" : "lower", {});
}

Value CapitalizeFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "capitalize", std::move(arguments), {}, 0);
  return CallMethod(in, input, "capitalize", {});
}

// Words begin after white space and after - ( { [ <, unlike str.title's.
Value TitleFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "title", std::move(arguments), {}, 0);
  const Text text = in.ToText(input);
  if (in.failed() || !in.Reserve(text->size() * 3)) return input;
  const std::string_view bytes = text->bytes();
  MarkedText out;
  for (size_t at = 0; at < bytes.size();) {
    size_t end = at;
    bool separator = false;
    while (end < bytes.size()) {
      int length = 0;
      const char32_t c = DecodeCodePoint(bytes, end, &length);
      const bool splits =
          IsPythonSpace(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
      if (end == at) separator = splits;
      if (splits != separator) break;
      end += static_cast<size_t>(length);
    }
    const MarkedText word = text->Slice(at, end);
    const size_t first = OffsetOf(word.bytes(), 1);
    out.Append(ToCase(word.Slice(0, first), Case::kUpper));
    out.Append(ToCase(word.Slice(first, word.size()), Case::kLower));
    at = end;
  }
  return in.String(std::move(out));
}

Value TrimFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const Value characters = Bind(in, "trim", std::move(arguments), {"chars"}, 0)[0];
  Arguments given;
  if (!characters.IsMissing()) given.positional.push_back(characters);
  return CallMethod(in, input, "strip", std::move(given));
}

Value ReplaceFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "replace", std::move(arguments), {"old", "new", "count"}, 2);
  if (in.failed()) return input;
  // str() of everything: an undefined value replaces like an empty string.
  Value self = TextOf(in, input);
  self.markup = false;
  return ReplaceIn(in, self, TextOf(in, given[0]), TextOf(in, given[1]), IntOr(in, given[2], -1));
}

Value StringFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "string", std::move(arguments), {}, 0);
  return TextOf(in, input);
}

Value SafeFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "safe", std::move(arguments), {}, 0);
  Value out = TextOf(in, input);
  out.markup = true;
  return out;
}

Value EscapeFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "escape", std::move(arguments), {}, 0);
  return Escape(in, input);
}

Value ForceEscapeFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "forceescape", std::move(arguments), {}, 0);
  Value text = TextOf(in, input);
  text.markup = false;
  return Escape(in, text);
}

Value CenterFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const Value width = Bind(in, "center", std::move(arguments), {"width"}, 0)[0];
  Arguments given;
  given.positional.push_back(width.IsMissing() ? Value::Int(80) : width);
  return CallMethod(in, input, "center", std::move(given));
}

Value IndentFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "indent", std::move(arguments), {"width", "first", "blank"}, 0);
  MarkedText indent(given[0].IsString() ? ""
                                        : std::string(static_cast<size_t>(std::clamp<int64_t>(
                                                          IntOr(in, given[0], 4), 0, 1000)),
                                                      ' '));
  if (given[0].IsString()) indent = *given[0].text;
  const bool first = !given[1].IsMissing() && in.Truth(given[1]);
  const bool blank = !given[2].IsMissing() && in.Truth(given[2]);
  // "s + newline": what is not a string cannot be added to one.
  if (!input.IsString()) {
    if (input.IsUndefined()) return in.Fail(input.bytes());
    return in.Fail(Concat("indent needs a str, not ", TypeName(input)));
  }
  MarkedText text = *input.text;
  text.Append("\n", false);
  const size_t breaks = text.size();
  if (in.failed() || !in.Reserve(breaks)) return input;
  std::vector<MarkedText> lines = SplitLines(text, false);
  if (!in.Reserve(text.size() + lines.size() * (indent.size() + sizeof(MarkedText)))) return input;
  MarkedText out;
  if (first) out.Append(indent);
  if (blank) {
    for (size_t i = 0; i < lines.size(); ++i) {
      if (i > 0) {
        out.Append("\n", false);
        out.Append(indent);
      }
      out.Append(lines[i]);
    }
    return in.String(std::move(out), input.markup);
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out.Append("\n", false);
    if (i > 0 && !lines[i].empty()) out.Append(indent);
    out.Append(lines[i]);
  }
  return in.String(std::move(out), input.markup);
}

Value TruncateFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "truncate", std::move(arguments), {"length", "killwords", "end", "leeway"}, 0);
  const int64_t length = IntOr(in, given[0], 255);
  const bool kill_words = !given[1].IsMissing() && in.Truth(given[1]);
  const Value end = given[2].IsMissing() ? Value::String("...") : given[2];
  const int64_t leeway = IntOr(in, given[3], 5);
  if (!input.IsString() || !end.IsString()) return in.Fail("truncate needs a str");
  const auto end_length = static_cast<int64_t>(Length(end.bytes()));
  if (length < end_length)
    return in.Fail(Concat("expected length >= ", end_length, ", got ", length));
  if (leeway < 0) return in.Fail(Concat("expected leeway >= 0, got ", leeway));
  if (in.failed() || !in.Reserve(input.text->size())) return input;
  if (static_cast<int64_t>(Length(input.bytes())) <= length + leeway) return input;
  MarkedText cut =
      input.text->Slice(0, OffsetOf(input.bytes(), static_cast<size_t>(length - end_length)));
  if (!kill_words) {
    const size_t space = cut.bytes().rfind(' ');
    if (space != std::string_view::npos) cut = cut.Slice(0, space);
  }
  cut.Append(*end.text);
  return in.String(std::move(cut), input.markup);
}

Value WordCountFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "wordcount", std::move(arguments), {}, 0);
  const Text text = in.ToText(input);
  if (in.failed() || !in.Work(text->size())) return input;
  int64_t count = 0;
  bool in_word = false;
  for (size_t at = 0; at < text->size();) {
    int length = 0;
    const bool word = IsWord(DecodeCodePoint(text->bytes(), at, &length));
    count += word && !in_word ? 1 : 0;
    in_word = word;
    at += static_cast<size_t>(length);
  }
  return Value::Int(count);
}

Value UrlEncodeFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "urlencode", std::move(arguments), {}, 0);
  if (!input.IsString() && Interpreter::IsIterable(input) && !input.IsUndefined()) {
    return in.Fail("urlencode of a mapping or a list is not supported");
  }
  const Text text = in.ToText(input);
  if (in.failed() || !in.Reserve(text->size() * 3)) return input;
  MarkedText out;
  for (size_t at = 0; at < text->size(); ++at) {
    const auto c = static_cast<unsigned char>(text->bytes()[at]);
    const bool plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
                       c == '_' || c == '.' || c == '-' || c == '~' || c == '/';
    out.Append(plain ? std::string(1, static_cast<char>(c)) : absl::StrFormat("%%%02X", c),
               text->IsUser(at));
  }
  return in.String(std::move(out));
}

Value FormatFilter(Interpreter& in, const Value& input, Arguments arguments) {
  if (!arguments.positional.empty() && !arguments.keyword.empty()) {
    return in.Fail("can't handle positional and keyword arguments at the same time");
  }
  Value values;
  if (arguments.keyword.empty()) {
    values = in.List(std::move(arguments.positional), Kind::kTuple);
  } else {
    values = in.NewDict();
    for (auto& [key, value] : arguments.keyword)
      in.DictSet(&AsDict(values), Value::String(key), value);
  }
  return FormatPercent(in, TextOf(in, input), values);
}

Value JoinFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given = Bind(in, "join", std::move(arguments), {"d", "attribute"}, 0);
  const auto get = PathGetter(in, given[1]);
  const Text separator = given[0].IsMissing() ? Value::String("").text : in.ToText(given[0]);
  MarkedText out;
  bool first = true;
  const Next next = in.Iterate(input);
  for (Value item; !in.failed() && next(&item);) {
    if (!first && in.Reserve(separator->size(), out.size())) out.Append(*separator);
    first = false;
    in.AppendText(get(item), &out);
  }
  return in.String(std::move(out));
}

// ---- numbers ----

Value AbsFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "abs", std::move(arguments), {}, 0);
  if (input.Is(Kind::kFloat)) return Value::Float(std::fabs(input.real));
  if (input.IsIntLike())
    return input.AsInt() < 0 ? in.Arithmetic("-", Value::Int(0), input) : Value::Int(input.AsInt());
  if (input.IsUndefined()) return in.Fail(input.bytes());
  return in.Fail(Concat("bad operand type for abs(): '", TypeName(input), "'"));
}

// The text of a number as Python's int() and float() read it; empty: it is none.
std::string NumberText(std::string_view text) {
  text.remove_suffix(TrailingSpace(text));
  text.remove_prefix(LeadingSpace(text));
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      out += text[i];
      continue;
    }
    const auto digit = [&](size_t at) {
      return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at])) != 0;
    };
    if (i == 0 || !digit(i - 1) || !digit(i + 1)) return "";
  }
  return out;
}

bool ParseFloat(std::string_view text, double* out) {
  const std::string number = NumberText(text);
  if (number.empty() || number.find_first_of("xXpP(") != number.npos) return false;
  char* end = nullptr;
  *out = std::strtod(number.c_str(), &end);
  return end == number.c_str() + number.size();
}

bool ParseInt(std::string_view text, int base, int64_t* out, bool* too_large) {
  std::string number = NumberText(text);
  if (number.empty()) return false;
  const size_t sign = number[0] == '-' || number[0] == '+' ? 1 : 0;
  if (number.size() > sign + 2 && number[sign] == '0') {
    const char kind = static_cast<char>(std::tolower(static_cast<unsigned char>(number[sign + 1])));
    if ((base == 16 && kind == 'x') || (base == 8 && kind == 'o') || (base == 2 && kind == 'b'))
      number.erase(sign, 2);
  }
  if (sign >= number.size() || std::isalnum(static_cast<unsigned char>(number[sign])) == 0)
    return false;
  errno = 0;
  char* end = nullptr;
  *out = std::strtoll(number.c_str(), &end, base);
  *too_large = errno == ERANGE;
  return end == number.c_str() + number.size();
}

Value IntFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given = Bind(in, "int", std::move(arguments), {"default", "base"}, 0);
  const Value fallback = given[0].IsMissing() ? Value::Int(0) : given[0];
  const int64_t base = IntOr(in, given[1], 10);
  if (base != 10 && base != 16 && base != 8 && base != 2)
    return in.Fail("int of this base is not supported");
  if (input.IsIntLike()) return Value::Int(input.AsInt());
  double real = 0;
  if (input.IsString()) {
    int64_t value = 0;
    bool too_large = false;
    if (ParseInt(input.bytes(), static_cast<int>(base), &value, &too_large)) {
      return too_large ? in.Fail("integers beyond 64 bits are not supported") : Value::Int(value);
    }
    if (!ParseFloat(input.bytes(), &real)) return fallback;
  } else if (input.Is(Kind::kFloat)) {
    real = input.real;
  } else if (input.IsUndefined()) {
    return in.Fail(input.bytes());
  } else {
    return fallback;
  }
  if (std::isnan(real)) return fallback;
  if (std::isinf(real))
    return input.IsString() ? fallback : in.Fail("cannot convert float infinity to integer");
  if (std::fabs(real) >= 9.2e18) return in.Fail("integers beyond 64 bits are not supported");
  return Value::Int(static_cast<int64_t>(real));
}

Value FloatFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given = Bind(in, "float", std::move(arguments), {"default"}, 0);
  if (input.IsNumber()) return Value::Float(input.AsDouble());
  double real = 0;
  if (input.IsString() && ParseFloat(input.bytes(), &real)) return Value::Float(real);
  if (input.IsUndefined()) return in.Fail(input.bytes());
  return given[0].IsMissing() ? Value::Float(0) : given[0];
}

// Half to even at the decimal digits that are really there, as Python rounds.
double RoundTo(double value, int64_t digits) {
  if (!std::isfinite(value) || digits > 300) return value;
  if (digits >= 0)
    return std::strtod(absl::StrFormat("%.*f", static_cast<int>(digits), value).c_str(), nullptr);
  if (digits < -308) return std::copysign(0.0, value);
  const double unit = std::pow(10.0, static_cast<double>(-digits));
  return std::nearbyint(value / unit) * unit;
}

Value RoundFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "round", std::move(arguments), {"precision", "method"}, 0);
  const int64_t precision = IntOr(in, given[0], 0);
  const std::string_view method = given[1].IsString()    ? given[1].bytes()
                                  : given[1].IsMissing() ? "common"
                                                         : "";
  if (method != "common" && method != "ceil" && method != "floor")
    return in.Fail("method must be common, ceil or floor");
  if (!input.IsNumber()) {
    if (input.IsUndefined()) return in.Fail(input.bytes());
    return in.Fail(Concat("type ", TypeName(input), " doesn't define __round__ method"));
  }
  if (method == "common") {
    if (input.IsIntLike()) {
      if (precision < 0) return in.Fail("rounding an int to tens is not supported");
      return Value::Int(input.AsInt());
    }
    return Value::Float(RoundTo(input.real, precision));
  }
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = input.AsDouble() * scale;
  return Value::Float((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

Value SumFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given = Bind(in, "sum", std::move(arguments), {"attribute", "start"}, 0);
  const auto get = PathGetter(in, given[0]);
  Value sum = given[1].IsMissing() ? Value::Int(0) : given[1];
  if (sum.IsString()) return in.Fail("sum() can't sum strings");
  const Next next = in.Iterate(input);
  for (Value item; !in.failed() && next(&item);) sum = in.Arithmetic("+", sum, get(item));
  return sum;
}

// ---- sequences ----

Value LengthFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "length", std::move(arguments), {}, 0);
  const int64_t length = in.LengthOf(input);
  if (length < 0) return in.Fail(Concat("object of type '", TypeName(input), "' has no len()"));
  return Value::Int(length);
}

Value ListFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "list", std::move(arguments), {}, 0);
  return in.List(in.Collect(input));
}

Value FirstFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "first", std::move(arguments), {}, 0);
  Value item;
  const Next next = in.Iterate(input);
  if (!in.failed() && next(&item)) return item;
  return in.Undefined("No first item, sequence was empty.");
}

bool IsReversible(const Value& value) {
  return value.Is(Kind::kList) || value.Is(Kind::kTuple) || value.IsString() ||
         value.Is(Kind::kDict) || value.Is(Kind::kRange) || value.Is(Kind::kDictView);
}

Value LastFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "last", std::move(arguments), {}, 0);
  if (input.IsUndefined()) return in.Undefined("No last item, sequence was empty.");
  if (!IsReversible(input))
    return in.Fail(Concat("'", TypeName(input), "' object is not reversible"));
  const std::vector<Value> items = in.Collect(input);
  return items.empty() ? in.Undefined("No last item, sequence was empty.") : items.back();
}

Value ReverseFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "reverse", std::move(arguments), {}, 0);
  std::vector<Value> items = in.Collect(input);
  std::reverse(items.begin(), items.end());
  if (input.IsString()) {
    MarkedText out;
    for (const Value& item : items) out.Append(*item.text);
    return in.String(std::move(out));
  }
  const Value list = in.List(std::move(items));
  if (!IsReversible(input)) return list;
  return in.MakeIterator("list_reverseiterator", in.Iterate(list));
}

Value DefaultFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "default", std::move(arguments), {"default_value", "boolean"}, 0);
  const bool falsy = !given[1].IsMissing() && in.Truth(given[1]) && !in.Truth(input);
  if (!input.IsUndefined() && !falsy) return input;
  return given[0].IsMissing() ? Value::String("") : given[0];
}

Value ItemsFilter(Interpreter& in, const Value& input, Arguments arguments) {
  Bind(in, "items", std::move(arguments), {}, 0);
  if (input.IsUndefined()) return in.MakeIterator("generator", [](Value*) { return false; });
  // Python finds out when the generator is read.
  if (!input.Is(Kind::kDict)) {
    return in.MakeIterator("generator", [&in](Value*) {
      in.Fail("Can only get item pairs from a mapping.");
      return false;
    });
  }
  auto* view = in.heap().New<DictView>();
  view->part = DictView::kItems;
  view->dict = &AsDict(input);
  return in.MakeIterator("generator", in.Iterate(Value::Of(Kind::kDictView, view)));
}

std::function<Value(const Value&)> SortKey(Interpreter& in, const Value& attribute,
                                           const Value& case_sensitive) {
  const bool exact = !case_sensitive.IsMissing() && in.Truth(case_sensitive);
  return [&in, get = PathGetter(in, attribute), exact](const Value& item) {
    const Value key = get(item);
    return exact ? key : IgnoreCase(in, key);
  };
}

Value SortFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "sort", std::move(arguments), {"reverse", "case_sensitive", "attribute"}, 0);
  // "a,b" sorts by several attributes.
  std::vector<std::function<Value(const Value&)>> keys;
  if (given[2].IsString()) {
    const std::string_view comma = ",";
    for (MarkedText& part : Split(*given[2].text, &comma, -1, false))
      keys.push_back(SortKey(in, in.String(std::move(part)), given[1]));
  } else {
    keys.push_back(SortKey(in, given[2], given[1]));
  }
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : in.Collect(input)) {
    std::vector<Value> parts;
    for (const auto& key : keys) parts.push_back(key(item));
    keyed.emplace_back(in.List(std::move(parts)), item);
    if (in.failed()) return input;
  }
  in.Sort(&keyed, !given[0].IsMissing() && in.Truth(given[0]));
  std::vector<Value> out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return in.List(std::move(out));
}

Value DictSortFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "dictsort", std::move(arguments), {"case_sensitive", "by", "reverse"}, 0);
  const std::string_view by = given[1].IsString() ? given[1].bytes() : "key";
  if (by != "key" && by != "value")
    return in.Fail("You can only sort by either \"key\" or \"value\"");
  if (!input.Is(Kind::kDict)) {
    return in.Fail(input.IsUndefined()
                       ? std::string(input.bytes())
                       : Concat("'", TypeName(input), "' object has no attribute 'items'"));
  }
  const auto key_of = SortKey(in, Value(), given[0]);
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, value] : AsDict(input).entries()) {
    keyed.emplace_back(key_of(by == "key" ? key : value), in.List({key, value}, Kind::kTuple));
    if (in.failed()) return input;
  }
  in.Sort(&keyed, !given[2].IsMissing() && in.Truth(given[2]));
  std::vector<Value> out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return in.List(std::move(out));
}

template <bool largest>
Value ExtremeFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "min", std::move(arguments), {"case_sensitive", "attribute"}, 0);
  const auto key_of = SortKey(in, given[1], given[0]);
  Value best;
  Value best_key;
  const Next next = in.Iterate(input);
  for (Value item; !in.failed() && next(&item);) {
    const Value key = key_of(item);
    if (!best.IsMissing() && !in.Order(largest ? ">" : "<", key, best_key)) continue;
    best = item;
    best_key = key;
  }
  return best.IsMissing() ? in.Undefined("No aggregated item, sequence was empty.") : best;
}

Value UniqueFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "unique", std::move(arguments), {"case_sensitive", "attribute"}, 0);
  const Value seen = in.NewDict();
  return in.MakeIterator("generator", [&in, seen, key_of = SortKey(in, given[1], given[0]),
                                       next = in.Iterate(input)](Value* out) {
    while (!in.failed() && next(out)) {
      const Value key = key_of(*out);
      std::string hashed;
      if (!Dict::HashKey(key, &hashed)) {
        in.Fail(Concat("unhashable type: '", TypeName(key), "'"));
        return false;
      }
      if (AsDict(seen).Find(key) != nullptr) continue;
      in.DictSet(&AsDict(seen), key, Value::None());
      return true;
    }
    return false;
  });
}

Value GroupByFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "groupby", std::move(arguments), {"attribute", "default", "case_sensitive"}, 1);
  const auto get = PathGetter(in, given[0], given[1]);
  const bool exact = !given[2].IsMissing() && in.Truth(given[2]);
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : in.Collect(input)) {
    const Value key = get(item);
    keyed.emplace_back(exact ? key : IgnoreCase(in, key), item);
    if (in.failed()) return input;
  }
  if (!in.Sort(&keyed, false)) return input;
  std::vector<Value> groups;
  for (size_t begin = 0; begin < keyed.size() && !in.failed();) {
    std::vector<Value> items;
    size_t end = begin;
    for (; end < keyed.size() && in.Equal(keyed[end].first, keyed[begin].first); ++end)
      items.push_back(keyed[end].second);
    if (end == begin) break;  // NaN, or an error
    const Value first = get(items[0]);
    groups.push_back(in.List({first, in.List(std::move(items))}, Kind::kTuple));
    begin = end;
  }
  return in.List(std::move(groups));
}

Value BatchFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "batch", std::move(arguments), {"linecount", "fill_with"}, 1);
  const int64_t size = IntOr(in, given[0], 0);
  const bool fills = Given(given[1]);
  if (fills && size > 100'000) return in.Fail("batch of more than 100000 is not supported");
  std::vector<Value> batches;
  std::vector<Value> batch;
  for (const Value& item : in.Collect(input)) {
    if (static_cast<int64_t>(batch.size()) == size)
      batches.push_back(in.List(std::exchange(batch, {})));
    batch.push_back(item);
    if (!in.Step()) return input;
  }
  if (!batch.empty()) {
    while (fills && static_cast<int64_t>(batch.size()) < size) batch.push_back(given[1]);
    batches.push_back(in.List(std::move(batch)));
  }
  const Value list = in.List(std::move(batches));
  return in.MakeIterator("generator", in.Iterate(list));
}

Value SliceFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "slice", std::move(arguments), {"slices", "fill_with"}, 1);
  const int64_t slices = IntOr(in, given[0], 0);
  const std::vector<Value> items = in.Collect(input);
  if (in.failed()) return input;
  if (slices == 0) return in.Fail("integer division or modulo by zero");
  if (slices > 100'000) return in.Fail("slice into more than 100000 is not supported");
  std::vector<Value> out;
  const auto total = static_cast<int64_t>(items.size());
  const int64_t per_slice = slices > 0 ? total / slices : 0;
  const int64_t with_extra = slices > 0 ? total % slices : 0;
  int64_t at = 0;
  for (int64_t i = 0; i < slices && in.Step(); ++i) {
    const int64_t size = per_slice + (i < with_extra ? 1 : 0);
    std::vector<Value> part(items.begin() + at, items.begin() + at + size);
    at += size;
    if (Given(given[1]) && i >= with_extra) part.push_back(given[1]);
    out.push_back(in.List(std::move(part)));
  }
  const Value list = in.List(std::move(out));
  return in.MakeIterator("generator", in.Iterate(list));
}

Value AttrFilter(Interpreter& in, const Value& input, Arguments arguments) {
  const Value name = Bind(in, "attr", std::move(arguments), {"name"}, 1)[0];
  if (in.failed()) return input;
  if (!name.IsString()) return in.Fail("attr needs a name");
  // Attributes only, not items: a dict's items are passed over.
  if (input.Is(Kind::kDict)) {
    const Value empty = in.NewDict();
    const Value found = in.GetAttribute(empty, name.bytes());
    return found.IsUndefined() ? found : in.GetAttribute(input, name.bytes());
  }
  return in.GetAttribute(input, name.bytes());
}

Value MapFilter(Interpreter& in, const Value& input, Arguments arguments) {
  std::function<Value(const Value&)> map;
  if (arguments.positional.empty() && arguments.FindKeyword("attribute") != nullptr) {
    const Value attribute = arguments.TakeKeyword("attribute");
    const Value fallback = arguments.TakeKeyword("default");
    if (!arguments.keyword.empty()) {
      return in.Fail(Concat("Unexpected keyword argument '", arguments.keyword[0].first, "'"));
    }
    map = PathGetter(in, attribute, fallback);
  } else {
    if (arguments.positional.empty() || !arguments.positional[0].IsString()) {
      return in.Fail("map requires a filter argument");
    }
    const std::string name(arguments.positional[0].bytes());
    arguments.positional.erase(arguments.positional.begin());
    map = [&in, name, arguments](const Value& item) {
      return in.ApplyFilter(name, item, arguments);
    };
  }
  if (!in.Truth(input)) return in.MakeIterator("generator", [](Value*) { return false; });
  return in.MakeIterator("generator", [&in, map, next = in.Iterate(input)](Value* out) {
    Value item;
    if (in.failed() || !next(&item)) return false;
    *out = map(item);
    return !in.failed();
  });
}

// select, reject, selectattr, rejectattr
template <bool keep, bool by_attribute>
Value SelectFilter(Interpreter& in, const Value& input, Arguments arguments) {
  if (!in.Truth(input)) return in.MakeIterator("generator", [](Value*) { return false; });
  std::function<Value(const Value&)> get = [](const Value& item) { return item; };
  if (by_attribute) {
    if (arguments.positional.empty()) return in.Fail("Missing parameter for attribute name");
    get = PathGetter(in, arguments.positional[0]);
    arguments.positional.erase(arguments.positional.begin());
  }
  std::function<bool(const Value&)> test = [&in](const Value& item) { return in.Truth(item); };
  if (!arguments.positional.empty()) {
    if (!arguments.positional[0].IsString()) return in.Fail("the name of a test must be a string");
    const std::string name(arguments.positional[0].bytes());
    arguments.positional.erase(arguments.positional.begin());
    test = [&in, name, arguments](const Value& item) {
      return in.ApplyTest(name, item, arguments);
    };
  }
  return in.MakeIterator("generator", [&in, get, test, next = in.Iterate(input)](Value* out) {
    while (!in.failed() && next(out)) {
      if (test(get(*out)) == keep) return !in.failed();
    }
    return false;
  });
}

const std::unordered_map<std::string_view, Filter>& Filters() {
  static const auto* table = new std::unordered_map<std::string_view, Filter>{
      {"abs", AbsFilter},
      {"attr", AttrFilter},
      {"batch", BatchFilter},
      {"capitalize", CapitalizeFilter},
      {"center", CenterFilter},
      {"count", LengthFilter},
      {"d", DefaultFilter},
      {"default", DefaultFilter},
      {"dictsort", DictSortFilter},
      {"e", EscapeFilter},
      {"escape", EscapeFilter},
      {"first", FirstFilter},
      {"float", FloatFilter},
      {"forceescape", ForceEscapeFilter},
      {"format", FormatFilter},
      {"groupby", GroupByFilter},
      {"indent", IndentFilter},
      {"int", IntFilter},
      {"items", ItemsFilter},
      {"join", JoinFilter},
      {"last", LastFilter},
      {"length", LengthFilter},
      {"list", ListFilter},
      {"lower", CaseFilter<Case::kLower>},
      {"map", MapFilter},
      {"max", ExtremeFilter<true>},
      {"min", ExtremeFilter<false>},
      {"reject", SelectFilter<false, false>},
      {"rejectattr", SelectFilter<false, true>},
      {"replace", ReplaceFilter},
      {"reverse", ReverseFilter},
      {"round", RoundFilter},
      {"safe", SafeFilter},
      {"select", SelectFilter<true, false>},
      {"selectattr", SelectFilter<true, true>},
      {"slice", SliceFilter},
      {"sort", SortFilter},
      {"string", StringFilter},
      {"sum", SumFilter},
      {"title", TitleFilter},
      {"tojson", ToJson},
      {"trim", TrimFilter},
      {"truncate", TruncateFilter},
      {"unique", UniqueFilter},
      {"upper", CaseFilter<Case::kUpper>},
      {"urlencode", UrlEncodeFilter},
      {"wordcount", WordCountFilter},
  };
  return *table;
}

// ---- tests ----

using Test = bool (*)(Interpreter&, const Value& value, const Value& argument);
struct TestEntry {
  Test test;
  size_t arguments;
};

bool Modulo(Interpreter& in, const Value& value, const Value& by, int64_t rest) {
  const Value left = in.Arithmetic("%", value, by);
  return !in.failed() && in.Equal(left, Value::Int(rest));
}

bool IsSame(Interpreter& in, const Value& a, const Value& b) {
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
    case Kind::kInt:
    case Kind::kString:
      return in.Equal(a, b);  // of what Python may keep one copy
    case Kind::kFloat:
    case Kind::kUndefined:
      return false;
    default:
      return a.object == b.object;
  }
}

template <char op, bool or_equal>
bool OrderTest(Interpreter& in, const Value& a, const Value& b) {
  const char text[] = {op, or_equal ? '=' : '\0', '\0'};
  return in.Order(text, a, b);
}

bool IsEqualTest(Interpreter& in, const Value& a, const Value& b) { return in.Equal(a, b); }
bool IsUnequalTest(Interpreter& in, const Value& a, const Value& b) { return !in.Equal(a, b); }

template <bool upper>
bool CaseTest(Interpreter& in, const Value& value, const Value&) {
  return IsCaseOf(in.ToText(value)->bytes(), upper);
}

bool IsSequence(const Value& value) {
  switch (value.kind) {
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kRange:
      return true;
    default:
      return false;
  }
}

bool IsCallable(const Value& value) {
  return value.Is(Kind::kFunction) || value.Is(Kind::kUndefined) || value.Is(Kind::kLoop) ||
         value.Is(Kind::kJoiner);
}

const std::unordered_map<std::string_view, TestEntry>& Tests() {
  using I = Interpreter;
  using V = Value;
  static const auto* table = new std::unordered_map<std::string_view, TestEntry>{
      {"odd", {[](I& in, const V& v, const V&) { return Modulo(in, v, V::Int(2), 1); }, 0}},
      {"even", {[](I& in, const V& v, const V&) { return Modulo(in, v, V::Int(2), 0); }, 0}},
      {"divisibleby", {[](I& in, const V& v, const V& by) { return Modulo(in, v, by, 0); }, 1}},
      {"defined", {[](I&, const V& v, const V&) { return !v.IsUndefined(); }, 0}},
      {"undefined", {[](I&, const V& v, const V&) { return v.IsUndefined(); }, 0}},
      {"none", {[](I&, const V& v, const V&) { return v.Is(Kind::kNone); }, 0}},
      {"boolean", {[](I&, const V& v, const V&) { return v.Is(Kind::kBool); }, 0}},
      {"true", {[](I&, const V& v, const V&) { return v.Is(Kind::kBool) && v.boolean; }, 0}},
      {"false", {[](I&, const V& v, const V&) { return v.Is(Kind::kBool) && !v.boolean; }, 0}},
      {"integer", {[](I&, const V& v, const V&) { return v.Is(Kind::kInt); }, 0}},
      {"float", {[](I&, const V& v, const V&) { return v.Is(Kind::kFloat); }, 0}},
      {"number", {[](I&, const V& v, const V&) { return v.IsNumber(); }, 0}},
      {"string", {[](I&, const V& v, const V&) { return v.IsString(); }, 0}},
      {"mapping", {[](I&, const V& v, const V&) { return v.Is(Kind::kDict); }, 0}},
      {"sequence", {[](I&, const V& v, const V&) { return IsSequence(v); }, 0}},
      {"iterable", {[](I&, const V& v, const V&) { return I::IsIterable(v); }, 0}},
      {"callable", {[](I&, const V& v, const V&) { return IsCallable(v); }, 0}},
      {"escaped", {[](I&, const V& v, const V&) { return v.IsString() && v.markup; }, 0}},
      {"lower", {CaseTest<false>, 0}},
      {"upper", {CaseTest<true>, 0}},
      {"filter", {[](I&, const V& v, const V&) { return v.IsString() && IsFilter(v.bytes()); }, 0}},
      {"test", {[](I&, const V& v, const V&) { return v.IsString() && IsTest(v.bytes()); }, 0}},
      {"sameas", {IsSame, 1}},
      {"in", {[](I& in, const V& v, const V& all) { return in.Contains(all, v); }, 1}},
      {"==", {IsEqualTest, 1}},
      {"eq", {IsEqualTest, 1}},
      {"equalto", {IsEqualTest, 1}},
      {"!=", {IsUnequalTest, 1}},
      {"ne", {IsUnequalTest, 1}},
      {">", {OrderTest<'>', false>, 1}},
      {"gt", {OrderTest<'>', false>, 1}},
      {"greaterthan", {OrderTest<'>', false>, 1}},
      {">=", {OrderTest<'>', true>, 1}},
      {"ge", {OrderTest<'>', true>, 1}},
      {"<", {OrderTest<'<', false>, 1}},
      {"lt", {OrderTest<'<', false>, 1}},
      {"lessthan", {OrderTest<'<', false>, 1}},
      {"<=", {OrderTest<'<', true>, 1}},
      {"le", {OrderTest<'<', true>, 1}},
  };
  return *table;
}

}  // namespace

bool IsFilter(std::string_view name) { return Filters().contains(name); }
bool IsTest(std::string_view name) { return Tests().contains(name); }

Value Interpreter::ApplyFilter(std::string_view name, const Value& input, Arguments arguments) {
  const Depth depth(this);
  if (!depth.ok() || !Step()) return Undefined("");
  const auto found = Filters().find(name);
  if (found == Filters().end()) return Fail(Concat("no filter named '", name, "'"));
  return found->second(*this, input, std::move(arguments));
}

bool Interpreter::ApplyTest(std::string_view name, const Value& input, Arguments arguments) {
  if (!Step()) return false;
  const auto found = Tests().find(name);
  if (found == Tests().end()) {
    Fail(Concat("no test named '", name, "'"));
    return false;
  }
  const TestEntry& entry = found->second;
  const std::string of = Concat("the test '", name, "'");
  Value argument;
  if (entry.arguments == 0) {
    Bind(*this, of, std::move(arguments), {}, 0);
  } else {
    argument = Bind(*this, of, std::move(arguments), {"other"}, 1)[0];
  }
  return !failed() && entry.test(*this, input, argument);
}

}  // namespace winnow::engine::jinja
