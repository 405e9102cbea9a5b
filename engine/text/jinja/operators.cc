// Interpreter: Python's operators, comparisons, truth, iteration and text forms.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "engine/base/concat.h"
#include "engine/text/jinja/format.h"
#include "engine/text/jinja/interpreter.h"
#include "engine/text/jinja/unicode.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine::jinja {

// ---- truth, length, iteration ----

bool Interpreter::Truth(const Value& value) {
  switch (value.kind) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return value.boolean;
    case Kind::kInt:
      return value.integer != 0;
    case Kind::kFloat:
      return value.real != 0;
    case Kind::kString:
      return !value.text->empty();
    default: {
      const int64_t length = LengthOf(value);
      return length != 0;
    }
  }
}

int64_t Interpreter::LengthOf(const Value& value) {
  switch (value.kind) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      Work(value.text->size());
      return static_cast<int64_t>(Length(value.bytes()));
    case Kind::kList:
    case Kind::kTuple:
      return static_cast<int64_t>(Items(value).size());
    case Kind::kDict:
      return static_cast<int64_t>(AsDict(value).entries().size());
    case Kind::kRange:
      return static_cast<const Range*>(value.object)->size;
    case Kind::kDictView:
      return static_cast<int64_t>(
          static_cast<const DictView*>(value.object)->dict->entries().size());
    case Kind::kLoop:
      return LoopLength(static_cast<Loop*>(value.object));
    default:
      return -1;
  }
}

bool Interpreter::IsIterable(const Value& value) {
  switch (value.kind) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kRange:
    case Kind::kIterator:
    case Kind::kDictView:
    case Kind::kLoop:
      return true;
    default:
      return false;
  }
}

namespace {

Value ViewItem(Interpreter& self, const DictView& view, size_t index) {
  const auto& [key, value] = view.dict->entries()[index];
  switch (view.part) {
    case DictView::kKeys:
      return key;
    case DictView::kValues:
      return value;
    default:
      return self.List({key, value}, Kind::kTuple);
  }
}

}  // namespace

Next Interpreter::Iterate(const Value& value) {
  switch (value.kind) {
    case Kind::kUndefined:
      return [](Value*) { return false; };
    case Kind::kString:
      return [this, text = value.text, at = size_t{0}](Value* out) mutable {
        if (at >= text->size() || !Step()) return false;
        const size_t end = at + OffsetOf(text->bytes().substr(at), 1);
        *out = String(text->Slice(at, end));
        at = end;
        return true;
      };
    case Kind::kList:
    case Kind::kTuple:
      return [this, &items = Items(value), at = size_t{0}](Value* out) mutable {
        if (at >= items.size() || !Step()) return false;
        *out = items[at++];
        return true;
      };
    case Kind::kDict:
      return [this, &dict = AsDict(value), at = size_t{0}](Value* out) mutable {
        if (at >= dict.entries().size() || !Step()) return false;
        *out = dict.entries()[at++].first;
        return true;
      };
    case Kind::kRange:
      return [this, range = static_cast<const Range*>(value.object),
              at = int64_t{0}](Value* out) mutable {
        if (at >= range->size || !Step()) return false;
        *out = Value::Int(range->At(at++));
        return true;
      };
    case Kind::kIterator:
      return [this, iterator = static_cast<Iterator*>(value.object)](Value* out) {
        return Step() && iterator->next(out) && !failed();
      };
    case Kind::kDictView:
      return [this, view = static_cast<const DictView*>(value.object),
              at = size_t{0}](Value* out) mutable {
        if (at >= view->dict->entries().size() || !Step()) return false;
        *out = ViewItem(*this, *view, at++);
        return true;
      };
    default:
      if (value.IsUndefined()) Fail(value.bytes());
      Fail(Concat("'", TypeName(value), "' object is not iterable"));
      return [](Value*) { return false; };
  }
}

std::vector<Value> Interpreter::Collect(const Value& value) {
  std::vector<Value> items;
  const Next next = Iterate(value);
  for (Value item; !failed() && next(&item);) {
    items.push_back(item);
    if ((items.size() & 1023) == 0 && !Reserve(items.size() * sizeof(Value))) break;
  }
  return items;
}

// ---- comparisons ----

bool Interpreter::Equal(const Value& a, const Value& b) {
  const Depth depth(this);
  if (!depth.ok() || !Step()) return false;
  if (a.IsNumber() && b.IsNumber()) {
    if (a.IsIntLike() && b.IsIntLike()) return a.AsInt() == b.AsInt();
    return a.AsDouble() == b.AsDouble();
  }
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      Work(a.text->size());
      return a.bytes() == b.bytes();
    case Kind::kList:
    case Kind::kTuple: {
      const auto& left = Items(a);
      const auto& right = Items(b);
      if (left.size() != right.size()) return false;
      for (size_t i = 0; i < left.size(); ++i) {
        if (failed() || !Equal(left[i], right[i])) return false;
      }
      return true;
    }
    case Kind::kDict: {
      const Dict& left = AsDict(a);
      const Dict& right = AsDict(b);
      if (left.entries().size() != right.entries().size()) return false;
      for (const auto& [key, value] : left.entries()) {
        const Value* other = right.Find(key);
        if (failed() || other == nullptr || !Equal(value, *other)) return false;
      }
      return true;
    }
    case Kind::kRange: {
      const auto& left = *static_cast<const Range*>(a.object);
      const auto& right = *static_cast<const Range*>(b.object);
      if (left.size != right.size) return false;
      return left.size == 0 ||
             (left.start == right.start && (left.size == 1 || left.step == right.step));
    }
    default:
      return a.object == b.object;
  }
}

int Interpreter::CompareSequences(std::string_view op, const Value& a, const Value& b) {
  const auto& left = Items(a);
  const auto& right = Items(b);
  const size_t common = std::min(left.size(), right.size());
  for (size_t i = 0; i < common && !failed(); ++i) {
    if (Equal(left[i], right[i])) continue;
    return Order(op, left[i], right[i]) ? 1 : 0;
  }
  const auto holds = [&](auto compare) { return compare(left.size(), right.size()) ? 1 : 0; };
  if (op == "<") return holds(std::less<>());
  if (op == "<=") return holds(std::less_equal<>());
  if (op == ">") return holds(std::greater<>());
  return holds(std::greater_equal<>());
}

bool Interpreter::Order(std::string_view op, const Value& a, const Value& b) {
  const Depth depth(this);
  if (!depth.ok() || !Step()) return false;
  const auto compare = [op](const auto& left, const auto& right) {
    if (op == "<") return left < right;
    if (op == "<=") return left <= right;
    if (op == ">") return left > right;
    return left >= right;
  };
  if (a.IsNumber() && b.IsNumber()) {
    if (a.IsIntLike() && b.IsIntLike()) return compare(a.AsInt(), b.AsInt());
    return compare(a.AsDouble(), b.AsDouble());
  }
  if (a.IsString() && b.IsString()) {
    Work(a.text->size());
    return compare(a.bytes(), b.bytes());  // UTF-8 sorts as its code points do
  }
  if (a.kind == b.kind && (a.Is(Kind::kList) || a.Is(Kind::kTuple)))
    return CompareSequences(op, a, b) != 0;
  if (a.IsUndefined()) Fail(a.bytes());
  if (b.IsUndefined()) Fail(b.bytes());
  Fail(Concat("'", op, "' not supported between instances of '", TypeName(a), "' and '",
              TypeName(b), "'"));
  return false;
}

bool Interpreter::Contains(const Value& container, const Value& item) {
  if (container.IsString()) {
    if (!item.IsString()) {
      if (item.IsUndefined()) Fail(item.bytes());
      Fail(Concat("'in <string>' requires string as left operand, not ", TypeName(item)));
      return false;
    }
    Work(container.text->size());
    return container.bytes().find(item.bytes()) != std::string_view::npos;
  }
  if (container.Is(Kind::kDict)) {
    std::string hashed;
    if (!Dict::HashKey(item, &hashed)) {
      Fail(Concat("unhashable type: '", TypeName(item), "'"));
      return false;
    }
    return AsDict(container).Find(item) != nullptr;
  }
  if (!IsIterable(container)) {
    Fail(Concat("argument of type '", TypeName(container), "' is not iterable"));
    return false;
  }
  const Next next = Iterate(container);
  for (Value other; !failed() && next(&other);) {
    if (Equal(other, item)) return true;
  }
  return false;
}

bool Interpreter::Sort(std::vector<std::pair<Value, Value>>* keyed, bool reverse) {
  // Merges runs of 1, 2, 4, ... items. std::stable_sort wants an order without exceptions; here a
  // comparison may be an error, after which the rest is no order at all.
  std::vector<std::pair<Value, Value>> other(keyed->size());
  if (!Reserve(2 * keyed->size() * sizeof(Value))) return false;
  const size_t size = keyed->size();
  // With `reverse`, equal items keep their order too.
  const auto before = [&](const Value& a, const Value& b) {
    return reverse ? Order("<", b, a) : Order("<", a, b);
  };
  for (size_t run = 1; run < size; run *= 2) {
    for (size_t begin = 0; begin < size; begin += 2 * run) {
      const size_t middle = std::min(begin + run, size);
      const size_t end = std::min(begin + 2 * run, size);
      size_t left = begin;
      size_t right = middle;
      for (size_t out = begin; out < end; ++out) {
        const bool take_right =
            right < end && (left >= middle || before((*keyed)[right].first, (*keyed)[left].first));
        if (failed()) return false;
        other[out] = std::move((*keyed)[take_right ? right++ : left++]);
      }
    }
    std::swap(*keyed, other);
  }
  return !failed();
}

// ---- arithmetic ----

Value Interpreter::FailOperands(std::string_view op, const Value& a, const Value& b) {
  return Fail(Concat("unsupported operand type(s) for ", op, ": '", TypeName(a), "' and '",
                     TypeName(b), "'"));
}

Value Interpreter::Arithmetic(std::string_view op, const Value& a, const Value& b) {
  if (a.IsUndefined()) return Fail(a.bytes());
  if (op == "%" && a.IsString()) return FormatPercent(*this, a, b);
  if (b.IsUndefined()) return Fail(b.bytes());
  if (a.IsNumber() && b.IsNumber()) {
    if (a.IsIntLike() && b.IsIntLike()) return IntArithmetic(op, a.AsInt(), b.AsInt());
    return FloatArithmetic(op, a.AsDouble(), b.AsDouble());
  }
  if (op == "+") return Add(a, b);
  if (op == "*") {
    if (b.IsIntLike()) return Repeat(a, b.AsInt());
    if (a.IsIntLike()) return Repeat(b, a.AsInt());
  }
  return FailOperands(op, a, b);
}

Value Interpreter::Add(const Value& a, const Value& b) {
  if (a.IsString() && b.IsString()) {
    const bool markup = a.markup || b.markup;
    const Value left = markup && !a.markup ? Escape(*this, a) : a;
    const Value right = markup && !b.markup ? Escape(*this, b) : b;
    if (!Reserve(left.text->size() + right.text->size())) return a;
    MarkedText text = *left.text;
    text.Append(*right.text);
    return String(std::move(text), markup);
  }
  if (a.kind == b.kind && (a.Is(Kind::kList) || a.Is(Kind::kTuple))) {
    std::vector<Value> items;
    if (!Reserve((Items(a).size() + Items(b).size()) * sizeof(Value))) return a;
    items = Items(a);
    items.insert(items.end(), Items(b).begin(), Items(b).end());
    return List(std::move(items), a.kind);
  }
  if (a.IsString()) {
    return Fail(Concat("can only concatenate str (not \"", TypeName(b), "\") to str"));
  }
  return FailOperands("+", a, b);
}

Value Interpreter::Repeat(const Value& sequence, int64_t times) {
  const auto count = static_cast<size_t>(std::max<int64_t>(times, 0));
  if (sequence.IsString()) {
    const size_t size = sequence.text->size();
    if (size > 0 && count > heap_.bytes_max() / size)
      FailLimit(Concat(heap_.bytes_max(), " bytes of memory"));
    if (failed() || !Reserve(size * count)) return sequence;
    MarkedText text;
    if (size > 0) {
      for (size_t i = 0; i < count; ++i) text.Append(*sequence.text);
    }
    return String(std::move(text), sequence.markup);
  }
  if (sequence.Is(Kind::kList) || sequence.Is(Kind::kTuple)) {
    const size_t size = Items(sequence).size() * sizeof(Value);
    if (size > 0 && count > heap_.bytes_max() / size)
      FailLimit(Concat(heap_.bytes_max(), " bytes of memory"));
    if (failed() || !Reserve(size * count)) return sequence;
    std::vector<Value> items;
    for (size_t i = 0; size > 0 && i < count; ++i) {
      items.insert(items.end(), Items(sequence).begin(), Items(sequence).end());
    }
    return List(std::move(items), sequence.kind);
  }
  return FailOperands("*", sequence, Value::Int(times));
}

Value Interpreter::IntArithmetic(std::string_view op, int64_t a, int64_t b) {
  constexpr std::string_view kOverflow = "integers beyond 64 bits are not supported";
  int64_t out = 0;
  if (op == "+") return __builtin_add_overflow(a, b, &out) ? Fail(kOverflow) : Value::Int(out);
  if (op == "-") return __builtin_sub_overflow(a, b, &out) ? Fail(kOverflow) : Value::Int(out);
  if (op == "*") return __builtin_mul_overflow(a, b, &out) ? Fail(kOverflow) : Value::Int(out);
  if (op == "**") {
    if (b < 0) {
      if (a == 0) return Fail("0.0 cannot be raised to a negative power");
      return Value::Float(std::pow(static_cast<double>(a), static_cast<double>(b)));
    }
    out = 1;
    if (a == 1 || a == 0) return Value::Int(b == 0 ? 1 : a);
    if (a == -1) return Value::Int(b % 2 == 0 ? 1 : -1);
    for (int64_t i = 0; i < b; ++i) {
      if (__builtin_mul_overflow(out, a, &out)) return Fail(kOverflow);
    }
    return Value::Int(out);
  }
  if (b == 0) return Fail(op == "/" ? "division by zero" : "integer division or modulo by zero");
  if (op == "/") return Value::Float(static_cast<double>(a) / static_cast<double>(b));
  if (a == INT64_MIN && b == -1) return op == "%" ? Value::Int(0) : Fail(kOverflow);
  int64_t quotient = a / b;
  int64_t rest = a % b;
  if (rest != 0 && (rest < 0) != (b < 0)) {
    --quotient;
    rest += b;
  }
  return Value::Int(op == "//" ? quotient : rest);
}

Value Interpreter::FloatArithmetic(std::string_view op, double a, double b) {
  if (op == "+") return Value::Float(a + b);
  if (op == "-") return Value::Float(a - b);
  if (op == "*") return Value::Float(a * b);
  if (op == "**") {
    if (a == 0 && b < 0) return Fail("0.0 cannot be raised to a negative power");
    if (a < 0 && b != std::floor(b) && std::isfinite(b))
      return Fail("complex numbers are not supported");
    const double out = std::pow(a, b);
    if (std::isinf(out) && std::isfinite(a) && std::isfinite(b))
      return Fail("numerical result out of range");
    return Value::Float(out);
  }
  if (b == 0)
    return Fail(op == "/"   ? "float division by zero"
                : op == "%" ? "float modulo"
                            : "float floor division by zero");
  if (op == "/") return Value::Float(a / b);
  double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0) {
    if ((rest < 0) != (b < 0)) {
      rest += b;
      quotient -= 1;
    }
  } else {
    rest = std::copysign(0.0, b);
  }
  if (op == "%") return Value::Float(rest);
  if (quotient == 0) return Value::Float(std::copysign(0.0, a / b));
  double floor = std::floor(quotient);
  if (quotient - floor > 0.5) floor += 1;
  return Value::Float(floor);
}

// ---- text ----

void AppendFloatRepr(double value, std::string* out) {
  if (std::isnan(value)) {
    *out += "nan";
    return;
  }
  if (std::isinf(value)) {
    *out += value < 0 ? "-inf" : "inf";
    return;
  }
  // The shortest digits that read back as the same number, laid out as Python does.
  char buffer[40];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  if (text.starts_with('-')) {
    *out += '-';
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  int exponent = 0;
  const std::string_view exponent_text = text.substr(e + (text[e + 1] == '+' ? 2 : 1));
  std::from_chars(exponent_text.data(), exponent_text.data() + exponent_text.size(), exponent);
  std::string digits(text.substr(0, e));
  std::erase(digits, '.');
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    *out += digits[0];
    if (count > 1) *out += "." + digits.substr(1);
    *out += absl::StrFormat("e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
  } else if (exponent < 0) {
    *out += "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else if (count <= exponent + 1) {
    *out += digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  } else {
    *out += digits.substr(0, static_cast<size_t>(exponent) + 1) + "." +
            digits.substr(static_cast<size_t>(exponent) + 1);
  }
}

namespace {

// repr() of a string: each character with its mark, what is escaped too.
void AppendStringRepr(const MarkedText& text, MarkedText* out) {
  const std::string_view bytes = text.bytes();
  const bool has_single = bytes.find('\'') != bytes.npos;
  const char quote = has_single && bytes.find('"') == bytes.npos ? '"' : '\'';
  out->Append(std::string(1, quote), false);
  for (size_t at = 0; at < bytes.size();) {
    int length = 0;
    const char32_t c = DecodeCodePoint(bytes, at, &length);
    const size_t end = at + static_cast<size_t>(length);
    const auto code = static_cast<unsigned>(c);
    std::string escaped;
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      escaped = std::string("\\") + static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      escaped = c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (!IsPrintable(c)) {
      escaped = code < 0x100     ? absl::StrFormat("\\x%02x", code)
                : code < 0x10000 ? absl::StrFormat("\\u%04x", code)
                                 : absl::StrFormat("\\U%08x", code);
    }
    if (escaped.empty()) {
      out->Append(text, at, end);
    } else {
      out->Append(escaped, text.IsUser(at));
    }
    at = end;
  }
  out->Append(std::string(1, quote), false);
}

}  // namespace

void Interpreter::AppendSequenceRepr(const std::vector<Value>& items, const char* open,
                                     const char* close, MarkedText* out) {
  out->Append(open, false);
  for (size_t i = 0; i < items.size() && !failed(); ++i) {
    if (i > 0) out->Append(", ", false);
    AppendRepr(items[i], out);
  }
  out->Append(close, false);
}

void Interpreter::AppendDictRepr(const Dict& dict, MarkedText* out) {
  out->Append("{", false);
  bool first = true;
  for (const auto& [key, value] : dict.entries()) {
    if (failed()) break;
    if (!first) out->Append(", ", false);
    first = false;
    AppendRepr(key, out);
    out->Append(": ", false);
    AppendRepr(value, out);
  }
  out->Append("}", false);
}

void Interpreter::AppendRepr(const Value& value, MarkedText* out) {
  const Depth depth(this);
  if (!depth.ok() || !Reserve(1, out->size())) return;
  switch (value.kind) {
    case Kind::kUndefined:
      out->Append("Undefined", false);
      return;
    case Kind::kString: {
      if (!Reserve(value.text->size() * 4, out->size())) return;
      if (value.markup) out->Append("Markup(", false);
      AppendStringRepr(*value.text, out);
      if (value.markup) out->Append(")", false);
      return;
    }
    case Kind::kList:
      AppendSequenceRepr(Items(value), "[", "]", out);
      return;
    case Kind::kTuple:
      AppendSequenceRepr(Items(value), "(", Items(value).size() == 1 ? ",)" : ")", out);
      return;
    case Kind::kDict:
      AppendDictRepr(AsDict(value), out);
      return;
    case Kind::kNamespace:
      out->Append("<Namespace ", false);
      AppendDictRepr(*static_cast<const Namespace*>(value.object)->attributes, out);
      out->Append(">", false);
      return;
    case Kind::kDictView: {
      out->Append(Concat(TypeName(value), "("), false);
      AppendSequenceRepr(Collect(value), "[", "])", out);
      return;
    }
    default:
      AppendText(value, out);
  }
}

void Interpreter::AppendText(const Value& value, MarkedText* out) {
  switch (value.kind) {
    case Kind::kMissing:
    case Kind::kUndefined:
      return;
    case Kind::kNone:
      out->Append("None", false);
      return;
    case Kind::kBool:
      out->Append(value.boolean ? "True" : "False", false);
      return;
    case Kind::kInt:
      out->Append(Concat(value.integer), false);
      return;
    case Kind::kFloat: {
      std::string text;
      AppendFloatRepr(value.real, &text);
      out->Append(text, false);
      return;
    }
    case Kind::kString:
      if (Reserve(value.text->size(), out->size())) out->Append(*value.text);
      return;
    case Kind::kRange: {
      const auto& range = *static_cast<const Range*>(value.object);
      out->Append(range.step == 1
                      ? Concat("range(", range.start, ", ", range.stop, ")")
                      : Concat("range(", range.start, ", ", range.stop, ", ", range.step, ")"),
                  false);
      return;
    }
    case Kind::kLoop: {
      auto* loop = static_cast<Loop*>(value.object);
      out->Append(Concat("<LoopContext ", loop->index0 + 1, "/", LoopLength(loop), ">"), false);
      return;
    }
    case Kind::kFunction: {
      const auto& function = *static_cast<const Function*>(value.object);
      if (function.is_macro) {
        out->Append(Concat("<Macro '", function.name, "'>"), false);
        return;
      }
      break;
    }
    case Kind::kTemplate:
      out->Append("<TemplateReference None>", false);
      return;
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kDictView:
    case Kind::kNamespace:
      AppendRepr(value, out);
      return;
    default:
      break;
  }
  // Python prints an address.
  Fail(Concat("a ", TypeName(value), " cannot be printed"));
}

Text Interpreter::ToText(const Value& value) {
  if (value.IsString()) return value.text;
  MarkedText text;
  AppendText(value, &text);
  return String(std::move(text)).text;
}

}  // namespace winnow::engine::jinja
