#include "engine/text/jinja/methods.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "engine/base/concat.h"
#include "engine/text/jinja/arguments.h"
#include "engine/text/jinja/format.h"
#include "engine/text/jinja/strings.h"

namespace winnow::engine::jinja {
namespace {

using Method = Value (*)(Interpreter&, const Value& self, Arguments);

// A string argument that must be there; nullptr after an error.
const MarkedText* StringArgument(Interpreter& in, const Value& value, std::string_view of) {
  if (value.IsString()) return value.text.get();
  if (value.IsUndefined()) in.Fail(value.bytes());
  in.Fail(Concat(of, " needs a str, not ", TypeName(value)));
  return nullptr;
}

// ---- str ----

template <Side side>
Value StripMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const Value characters = Bind(in, "strip()", std::move(arguments), {"chars"}, 0)[0];
  if (in.failed() || !in.Reserve(self.text->size())) return self;
  if (characters.IsMissing() || characters.Is(Kind::kNone)) {
    return in.String(Strip(*self.text, side, nullptr), self.markup);
  }
  const MarkedText* given = StringArgument(in, characters, "strip()");
  if (given == nullptr || !in.Work(self.text->size() * (given->size() / 64 + 1))) return self;
  const std::string_view bytes = given->bytes();
  return in.String(Strip(*self.text, side, &bytes), self.markup);
}

template <bool from_right>
Value SplitMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "split()", std::move(arguments), {"sep", "maxsplit"}, 0);
  const int64_t max = IntOr(in, given[1], -1);
  if (in.failed()) return self;
  std::string_view separator;
  const bool at_space = given[0].IsMissing() || given[0].Is(Kind::kNone);
  if (!at_space) {
    const MarkedText* text = StringArgument(in, given[0], "split()");
    if (text == nullptr) return self;
    if (text->empty()) return in.Fail("empty separator");
    separator = text->bytes();
  }
  // At most a part for every separator, or for every other byte.
  const int64_t parts = at_space ? static_cast<int64_t>(self.text->size() / 2) + 1
                                 : CountOf(self.bytes(), separator) + 1;
  const int64_t bound = max >= 0 ? std::min(parts, max == INT64_MAX ? max : max + 1) : parts;
  if (!in.Reserve(self.text->size() +
                  static_cast<size_t>(bound) * (sizeof(MarkedText) + sizeof(Value))))
    return self;
  std::vector<Value> out;
  for (MarkedText& part : Split(*self.text, at_space ? nullptr : &separator, max, from_right)) {
    out.push_back(in.String(std::move(part), self.markup));
  }
  return in.List(std::move(out));
}

Value SplitLinesMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const Value keep = Bind(in, "splitlines()", std::move(arguments), {"keepends"}, 0)[0];
  if (in.failed() || !in.Reserve(self.text->size() * 2)) return self;
  std::vector<Value> out;
  for (MarkedText& part : SplitLines(*self.text, !keep.IsMissing() && in.Truth(keep))) {
    if (!in.Step()) break;
    out.push_back(in.String(std::move(part), self.markup));
  }
  return in.List(std::move(out));
}

template <bool at_end>
Value StartsWithMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "startswith()", std::move(arguments), {"prefix", "start", "end"}, 1);
  if (in.failed() || !in.Work(self.text->size())) return self;
  std::string_view text = self.bytes();
  const auto length = static_cast<int64_t>(Length(text));
  const auto bound = [&](const Value& value, int64_t fallback) {
    const int64_t at = IntOr(in, value, fallback);
    return at < 0 ? std::max<int64_t>(at + length, 0) : at;
  };
  const int64_t start = bound(given[1], 0);
  const int64_t end = std::min(bound(given[2], length), length);
  const bool empty_range = start > end;
  if (!empty_range) {
    const size_t begin = OffsetOf(text, static_cast<size_t>(start));
    text = text.substr(begin, OffsetOf(text.substr(begin), static_cast<size_t>(end - start)));
  }
  const auto matches = [&](const Value& part) {
    if (!part.IsString()) {
      StringArgument(in, part, at_end ? "endswith()" : "startswith()");
      return false;
    }
    return !empty_range && (at_end ? text.ends_with(part.bytes()) : text.starts_with(part.bytes()));
  };
  if (!given[0].Is(Kind::kTuple)) return Value::Bool(matches(given[0]));
  for (const Value& part : Items(given[0])) {
    if (matches(part)) return Value::Bool(true);
    if (in.failed()) break;
  }
  return Value::Bool(false);
}

// find, rfind, index, rindex: the code point's number, -1 for none.
int64_t FindIn(Interpreter& in, const Value& self, Arguments arguments, bool from_right) {
  const std::vector<Value> given =
      Bind(in, "find()", std::move(arguments), {"sub", "start", "end"}, 1);
  if (in.failed()) return -1;
  const MarkedText* part = StringArgument(in, given[0], "find()");
  if (part == nullptr || !in.Work(self.text->size())) return -1;
  const std::string_view text = self.bytes();
  const auto length = static_cast<int64_t>(Length(text));
  int64_t start = IntOr(in, given[1], 0);
  int64_t end = IntOr(in, given[2], length);
  if (start < 0) start = std::max<int64_t>(start + length, 0);
  if (end < 0) end = std::max<int64_t>(end + length, 0);
  end = std::min(end, length);
  if (start > end || start > length) return -1;
  const size_t begin = OffsetOf(text, static_cast<size_t>(start));
  const std::string_view window =
      text.substr(begin, OffsetOf(text.substr(begin), static_cast<size_t>(end - start)));
  const size_t found = from_right ? window.rfind(part->bytes()) : window.find(part->bytes());
  if (found == window.npos) return -1;
  return start + static_cast<int64_t>(Length(window.substr(0, found)));
}

template <bool from_right, bool must>
Value FindMethodOf(Interpreter& in, const Value& self, Arguments arguments) {
  const int64_t found = FindIn(in, self, std::move(arguments), from_right);
  if (must && found < 0) return in.Fail("substring not found");
  return Value::Int(found);
}

Value CountMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const Value part = Bind(in, "count()", std::move(arguments), {"sub"}, 1)[0];
  if (in.failed()) return self;
  const MarkedText* text = StringArgument(in, part, "count()");
  if (text == nullptr || !in.Work(self.text->size())) return self;
  return Value::Int(CountOf(self.bytes(), text->bytes()));
}

Value ReplaceMethod(Interpreter& in, const Value& self, Arguments arguments) {
  // Python takes these by position only.
  if (!arguments.keyword.empty()) return in.Fail("replace() takes no keyword arguments");
  const std::vector<Value> given =
      Bind(in, "replace()", std::move(arguments), {"old", "new", "count"}, 2);
  if (in.failed()) return self;
  if (given[2].Is(Kind::kNone)) return in.Fail("replace() needs an int for count");
  return ReplaceIn(in, self, given[0], given[1], IntOr(in, given[2], -1));
}

template <Case to>
Value CaseMethod(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "a case method", std::move(arguments), {}, 0);
  if (in.failed() || !in.Reserve(self.text->size() * 3)) return self;
  return in.String(ToCase(*self.text, to), self.markup);
}

template <MarkedText (*function)(const MarkedText&)>
Value MapMethod(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "a case method", std::move(arguments), {}, 0);
  if (in.failed() || !in.Reserve(self.text->size() * 3)) return self;
  return in.String(function(*self.text), self.markup);
}

template <bool (*is)(char32_t)>
Value ClassMethod(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "a class method", std::move(arguments), {}, 0);
  if (in.failed() || !in.Work(self.text->size())) return self;
  return Value::Bool(AllOf(self.bytes(), is));
}

bool IsAlnum(char32_t c) { return IsAlpha(c) || IsNumericChar(c); }
bool IsAsciiChar(char32_t c) { return c < 0x80; }

Value IsAsciiMethod(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "isascii()", std::move(arguments), {}, 0);
  return Value::Bool(self.text->empty() || AllOf(self.bytes(), IsAsciiChar));
}

template <bool upper>
Value IsCaseMethod(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "a case test", std::move(arguments), {}, 0);
  if (!in.Work(self.text->size())) return self;
  return Value::Bool(IsCaseOf(self.bytes(), upper));
}

Value JoinMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const Value list = Bind(in, "join()", std::move(arguments), {"iterable"}, 1)[0];
  if (in.failed()) return self;
  const std::vector<Value> items = in.Collect(list);
  MarkedText out;
  size_t total = 0;
  for (size_t i = 0; i < items.size() && !in.failed(); ++i) {
    if (!items[i].IsString()) {
      return in.Fail(
          Concat("sequence item ", i, ": expected str instance, ", TypeName(items[i]), " found"));
    }
    total += items[i].text->size() + self.text->size();
  }
  if (in.failed() || !in.Reserve(total)) return self;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.Append(*self.text);
    out.Append(*items[i].text);
  }
  return in.String(std::move(out), self.markup);
}

// center, ljust, rjust
template <Side side>
Value JustifyMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const std::vector<Value> given =
      Bind(in, "ljust()", std::move(arguments), {"width", "fillchar"}, 1);
  if (in.failed()) return self;
  const int64_t width = IntOr(in, given[0], 0);
  std::string_view fill = " ";
  bool user = false;
  if (!given[1].IsMissing()) {
    const MarkedText* text = StringArgument(in, given[1], "ljust()");
    if (text == nullptr) return self;
    if (Length(text->bytes()) != 1)
      return in.Fail("The fill character must be exactly one character long");
    fill = text->bytes();
    user = text->AnyUser();
  }
  const auto length = static_cast<int64_t>(Length(self.bytes()));
  if (in.failed() || width <= length) return self;
  const auto missing = static_cast<size_t>(width - length);
  if (missing > in.heap().bytes_max())
    return in.FailLimit(Concat(in.heap().bytes_max(), " bytes of memory"));
  if (!in.Reserve(self.text->size() + missing * fill.size())) return self;
  size_t before = side == Side::kLeft ? 0 : missing;
  if (side == Side::kBoth) before = missing / 2 + (missing & static_cast<size_t>(width) & 1);
  return in.String(Pad(*self.text, fill, user, before, missing - before), self.markup);
}

Value ZfillMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const int64_t width = IntOr(in, Bind(in, "zfill()", std::move(arguments), {"width"}, 1)[0], 0);
  const auto length = static_cast<int64_t>(Length(self.bytes()));
  if (in.failed() || width <= length) return self;
  const auto missing = static_cast<size_t>(width - length);
  if (missing > in.heap().bytes_max())
    return in.FailLimit(Concat(in.heap().bytes_max(), " bytes of memory"));
  if (!in.Reserve(self.text->size() + missing)) return self;
  const size_t sign = self.bytes().starts_with('-') || self.bytes().starts_with('+') ? 1 : 0;
  MarkedText out = self.text->Slice(0, sign);
  out.Append(std::string(missing, '0'), false);
  out.Append(*self.text, sign, self.text->size());
  return in.String(std::move(out), self.markup);
}

template <bool suffix>
Value RemoveAffixMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const Value affix = Bind(in, "removeprefix()", std::move(arguments), {"prefix"}, 1)[0];
  if (in.failed()) return self;
  const MarkedText* text = StringArgument(in, affix, "removeprefix()");
  if (text == nullptr || !in.Reserve(self.text->size())) return self;
  const size_t size = self.text->size();
  if (suffix) {
    const bool has = !text->empty() && self.bytes().ends_with(text->bytes());
    return in.String(self.text->Slice(0, has ? size - text->size() : size), self.markup);
  }
  return in.String(
      self.text->Slice(self.bytes().starts_with(text->bytes()) ? text->size() : 0, size),
      self.markup);
}

template <bool from_right>
Value PartitionMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const Value separator = Bind(in, "partition()", std::move(arguments), {"sep"}, 1)[0];
  if (in.failed()) return self;
  const MarkedText* text = StringArgument(in, separator, "partition()");
  if (text == nullptr || !in.Reserve(self.text->size())) return self;
  if (text->empty()) return in.Fail("empty separator");
  const size_t found =
      from_right ? self.bytes().rfind(text->bytes()) : self.bytes().find(text->bytes());
  if (found == std::string_view::npos) {
    if (from_right) return in.List({in.String(""), in.String(""), self}, Kind::kTuple);
    return in.List({self, in.String(""), in.String("")}, Kind::kTuple);
  }
  const size_t after = found + text->size();
  return in.List({in.String(self.text->Slice(0, found)), in.String(self.text->Slice(found, after)),
                  in.String(self.text->Slice(after, self.text->size()))},
                 Kind::kTuple);
}

Value ExpandTabsMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const int64_t size =
      IntOr(in, Bind(in, "expandtabs()", std::move(arguments), {"tabsize"}, 0)[0], 8);
  const auto tabs = static_cast<size_t>(CountOf(self.bytes(), "\t"));
  if (in.failed()) return self;
  if (size > 1000) return in.Fail("expandtabs() by more than 1000 is not supported");
  if (!in.Reserve(self.text->size() + tabs * static_cast<size_t>(std::max<int64_t>(size, 0))))
    return self;
  MarkedText out;
  int64_t column = 0;
  const std::string_view text = self.bytes();
  for (size_t at = 0; at < text.size();) {
    const size_t end = at + OffsetOf(text.substr(at), 1);
    if (text[at] == '\t') {
      const int64_t spaces = size > 0 ? size - column % size : 0;
      out.Append(std::string(static_cast<size_t>(spaces), ' '), self.text->IsUser(at));
      column += spaces;
    } else {
      out.Append(*self.text, at, end);
      column = text[at] == '\n' || text[at] == '\r' ? 0 : column + 1;
    }
    at = end;
  }
  return in.String(std::move(out), self.markup);
}

Value FormatMethod(Interpreter& in, const Value& self, Arguments arguments) {
  return FormatBraces(in, self, std::move(arguments));
}

Value FormatMapMethod(Interpreter& in, const Value& self, Arguments arguments) {
  const Value map = Bind(in, "format_map()", std::move(arguments), {"mapping"}, 1)[0];
  if (in.failed()) return self;
  if (!map.Is(Kind::kDict)) return in.Fail("format_map() needs a mapping");
  Arguments keywords;
  for (const auto& [key, value] : AsDict(map).entries()) {
    if (key.IsString()) keywords.keyword.emplace_back(std::string(key.bytes()), value);
  }
  return FormatBraces(in, self, std::move(keywords));
}

// ---- list and tuple ----

Value SequenceIndex(Interpreter& in, const Value& self, Arguments arguments) {
  const Value item = Bind(in, "index()", std::move(arguments), {"value"}, 1)[0];
  const auto& items = Items(self);
  for (size_t i = 0; i < items.size() && !in.failed(); ++i) {
    if (in.Equal(items[i], item)) return Value::Int(static_cast<int64_t>(i));
  }
  return in.Fail("the value is not in the list");
}

Value SequenceCount(Interpreter& in, const Value& self, Arguments arguments) {
  const Value item = Bind(in, "count()", std::move(arguments), {"value"}, 1)[0];
  int64_t count = 0;
  for (const Value& other : Items(self)) {
    if (in.failed()) break;
    count += in.Equal(other, item) ? 1 : 0;
  }
  return Value::Int(count);
}

Value ListCopy(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "copy()", std::move(arguments), {}, 0);
  if (in.failed() || !in.Reserve(Items(self).size() * sizeof(Value))) return self;
  return in.List(Items(self));
}

// ---- dict ----

template <DictView::Part part>
Value ViewMethod(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "a dict's view", std::move(arguments), {}, 0);
  auto* view = in.heap().New<DictView>();
  view->part = part;
  view->dict = &AsDict(self);
  return Value::Of(Kind::kDictView, view);
}

Value DictGet(Interpreter& in, const Value& self, Arguments arguments) {
  if (!arguments.keyword.empty()) return in.Fail("get() takes no keyword arguments");
  const std::vector<Value> given = Bind(in, "get()", std::move(arguments), {"key", "default"}, 1);
  if (in.failed()) return self;
  std::string hashed;
  if (!Dict::HashKey(given[0], &hashed))
    return in.Fail(Concat("unhashable type: '", TypeName(given[0]), "'"));
  if (const Value* found = AsDict(self).Find(given[0])) return *found;
  return given[1].IsMissing() ? Value::None() : given[1];
}

Value DictCopy(Interpreter& in, const Value& self, Arguments arguments) {
  Bind(in, "copy()", std::move(arguments), {}, 0);
  const Value out = in.NewDict();
  for (const auto& [key, value] : AsDict(self).entries()) {
    if (!in.Step()) break;
    in.DictSet(&AsDict(out), key, value);
  }
  return out;
}

using Table = std::unordered_map<std::string_view, Method>;

const Table& StringMethods() {
  static const auto* table = new Table{
      {"strip", StripMethod<Side::kBoth>},
      {"lstrip", StripMethod<Side::kLeft>},
      {"rstrip", StripMethod<Side::kRight>},
      {"split", SplitMethod<false>},
      {"rsplit", SplitMethod<true>},
      {"splitlines", SplitLinesMethod},
      {"startswith", StartsWithMethod<false>},
      {"endswith", StartsWithMethod<true>},
      {"find", FindMethodOf<false, false>},
      {"rfind", FindMethodOf<true, false>},
      {"index", FindMethodOf<false, true>},
      {"rindex", FindMethodOf<true, true>},
      {"count", CountMethod},
      {"replace", ReplaceMethod},
      {"upper", CaseMethod<Case::kUpper>},
      {"lower", CaseMethod<Case::kLower>},
      {"title", MapMethod<TitleCase>},
      {"capitalize", MapMethod<Capitalize>},
      {"swapcase", MapMethod<SwapCase>},
      {"join", JoinMethod},
      {"center", JustifyMethod<Side::kBoth>},
      {"ljust", JustifyMethod<Side::kLeft>},
      {"rjust", JustifyMethod<Side::kRight>},
      {"zfill", ZfillMethod},
      {"removeprefix", RemoveAffixMethod<false>},
      {"removesuffix", RemoveAffixMethod<true>},
      {"partition", PartitionMethod<false>},
      {"rpartition", PartitionMethod<true>},
      {"expandtabs", ExpandTabsMethod},
      {"format", FormatMethod},
      {"format_map", FormatMapMethod},
      {"isspace", ClassMethod<IsPythonSpace>},
      {"isalpha", ClassMethod<IsAlpha>},
      {"isdigit", ClassMethod<IsDigit>},
      {"isdecimal", ClassMethod<IsDecimal>},
      {"isnumeric", ClassMethod<IsNumericChar>},
      {"isalnum", ClassMethod<IsAlnum>},
      {"isascii", IsAsciiMethod},
      {"isupper", IsCaseMethod<true>},
      {"islower", IsCaseMethod<false>},
      {"casefold", nullptr},
      {"encode", nullptr},
      {"isidentifier", nullptr},
      {"isprintable", nullptr},
      {"istitle", nullptr},
      {"maketrans", nullptr},
      {"translate", nullptr},
  };
  return *table;
}

const Table& ListMethods() {
  static const auto* table =
      new Table{{"index", SequenceIndex}, {"count", SequenceCount}, {"copy", ListCopy}};
  return *table;
}

const Table& TupleMethods() {
  static const auto* table = new Table{{"index", SequenceIndex}, {"count", SequenceCount}};
  return *table;
}

const Table& DictMethods() {
  static const auto* table = new Table{{"keys", ViewMethod<DictView::kKeys>},
                                       {"values", ViewMethod<DictView::kValues>},
                                       {"items", ViewMethod<DictView::kItems>},
                                       {"get", DictGet},
                                       {"copy", DictCopy},
                                       {"fromkeys", nullptr}};
  return *table;
}

bool Mutates(Kind kind, std::string_view name) {
  static constexpr std::string_view kList[] = {"append", "clear", "pop",    "reverse",
                                               "insert", "sort",  "extend", "remove"};
  static constexpr std::string_view kDict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  const auto has = [name](const auto& list) {
    return std::find(std::begin(list), std::end(list), name) != std::end(list);
  };
  return kind == Kind::kList ? has(kList) : kind == Kind::kDict && has(kDict);
}

}  // namespace

bool FindMethod(Interpreter& interpreter, const Value& self, std::string_view name, Value* out) {
  if (Mutates(self.kind, name)) {
    *out = interpreter.Undefined(
        Concat("access to attribute '", name, "' of '", TypeName(self), "' object is unsafe."));
    return true;
  }
  const Table* table = self.IsString()         ? &StringMethods()
                       : self.Is(Kind::kList)  ? &ListMethods()
                       : self.Is(Kind::kTuple) ? &TupleMethods()
                       : self.Is(Kind::kDict)  ? &DictMethods()
                                               : nullptr;
  if (table == nullptr) return false;
  const auto found = table->find(name);
  if (found == table->end()) return false;
  const Method method = found->second;
  *out = interpreter.MakeFunction(std::string(name), [method, self, name = std::string(name)](
                                                         Interpreter& in, Arguments arguments) {
    if (method == nullptr) return in.Fail(Concat("the method '", name, "' is not supported"));
    return method(in, self, std::move(arguments));
  });
  return true;
}

}  // namespace winnow::engine::jinja
