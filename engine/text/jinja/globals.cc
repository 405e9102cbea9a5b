// Interpreter: the variables and functions that a template finds when it begins.
#include <ctime>
#include <utility>

#include "absl/time/time.h"
#include "engine/base/concat.h"
#include "engine/text/jinja/arguments.h"
#include "engine/text/jinja/interpreter.h"

namespace winnow::engine::jinja {
namespace {

Value MakeRange(Interpreter& in, Arguments arguments) {
  constexpr int64_t kItemsMax = 100'000;  // as in Jinja's sandbox
  if (!arguments.keyword.empty()) return in.Fail("range() takes no keyword arguments");
  const std::vector<Value>& given = arguments.positional;
  if (given.empty() || given.size() > 3) return in.Fail("range() takes one to three arguments");
  int64_t numbers[3] = {0, 0, 1};
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].Is(Kind::kNone))
      return in.Fail("'NoneType' object cannot be interpreted as an integer");
    numbers[given.size() == 1 ? 1 : i] = IntOr(in, given[i], 0);
  }
  if (in.failed()) return Value();
  const auto [start, stop, step] = numbers;
  if (step == 0) return in.Fail("range() arg 3 must not be zero");
  int64_t distance = 0;
  const bool too_far = step > 0 ? __builtin_sub_overflow(stop, start, &distance)
                                : __builtin_sub_overflow(start, stop, &distance);
  int64_t size = 0;
  if (!too_far && distance > 0) {
    const uint64_t by = step > 0 ? static_cast<uint64_t>(step) : ~static_cast<uint64_t>(step) + 1;
    size = static_cast<int64_t>((static_cast<uint64_t>(distance) - 1) / by + 1);
  }
  const bool empty = step > 0 ? stop <= start : stop >= start;
  if (!empty && (too_far || size > kItemsMax)) {
    return in.Fail(Concat("Range too big. The sandbox blocks ranges larger than ", kItemsMax, "."));
  }
  auto* range = in.heap().New<Range>();
  range->start = start;
  range->stop = stop;
  range->step = step;
  range->size = empty ? 0 : size;
  return Value::Of(Kind::kRange, range);
}

// dict(*args, **kwargs), as far as it makes plain dicts.
Value MakeDict(Interpreter& in, Arguments arguments) {
  const Value out = in.NewDict();
  if (arguments.positional.size() > 1) return in.Fail("dict expected at most 1 argument");
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional[0];
    if (from.Is(Kind::kDict)) {
      for (const auto& [key, value] : AsDict(from).entries()) {
        if (!in.Step()) break;
        in.DictSet(&AsDict(out), key, value);
      }
    } else {
      const Next next = in.Iterate(from);
      for (Value pair; !in.failed() && next(&pair);) {
        const std::vector<Value> items = in.Collect(pair);
        if (items.size() != 2)
          return in.Fail("dictionary update sequence elements must have length 2");
        in.DictSet(&AsDict(out), items[0], items[1]);
      }
    }
  }
  for (auto& [key, value] : arguments.keyword) in.DictSet(&AsDict(out), Value::String(key), value);
  return out;
}

Value MakeNamespace(Interpreter& in, Arguments arguments) {
  const Value attributes = MakeDict(in, std::move(arguments));
  if (in.failed()) return attributes;
  for (const auto& [key, value] : AsDict(attributes).entries()) {
    if (key.IsString() && key.bytes().starts_with('_')) {
      return in.Fail(Concat("a namespace cannot have the attribute '", key.bytes(), "'"));
    }
  }
  auto* space = in.heap().New<Namespace>();
  space->attributes = &AsDict(attributes);
  return Value::Of(Kind::kNamespace, space);
}

Value RaiseException(Interpreter& in, Arguments arguments) {
  const Value message = Bind(in, "raise_exception()", std::move(arguments), {"message"}, 1)[0];
  if (in.failed()) return message;
  return in.Raise(std::string(in.ToText(message)->bytes()));
}

// datetime.strftime of a time without a zone.
Value Strftime(Interpreter& in, const absl::CivilSecond& now, Arguments arguments) {
  const Value format = Bind(in, "strftime_now()", std::move(arguments), {"format"}, 1)[0];
  if (in.failed()) return format;
  if (!format.IsString()) return in.Fail("strftime_now() needs a str");
  constexpr size_t kFormatMax = 1000;
  if (format.text->size() > kFormatMax)
    return in.Fail(Concat("a time format beyond ", kFormatMax, " bytes is not supported"));
  std::string text;
  const std::string_view bytes = format.bytes();
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == '%' && i + 1 < bytes.size() &&
        std::string_view("fzZ").find(bytes[i + 1]) != std::string_view::npos) {
      if (bytes[++i] == 'f') text += "000000";
      continue;
    }
    text += bytes[i];
    if (bytes[i] == '%' && i + 1 < bytes.size()) text += bytes[++i];
  }
  std::tm parts = absl::ToTM(absl::FromCivil(now, absl::UTCTimeZone()), absl::UTCTimeZone());
  char buffer[8 * kFormatMax];
  // A character in front, because an empty result is not an error.
  const size_t size = std::strftime(buffer, sizeof(buffer), ("." + text).c_str(), &parts);
  if (size == 0) return in.Fail("the time does not fit");
  return in.String(MarkedText(std::string(buffer + 1, size - 1), format.text->AnyUser()));
}

Value MakeCycler(Interpreter& in, Arguments arguments) {
  if (!arguments.keyword.empty()) return in.Fail("cycler() takes no keyword arguments");
  if (arguments.positional.empty()) return in.Fail("at least one item has to be provided");
  auto* cycler = in.heap().New<Cycler>();
  cycler->items = std::move(arguments.positional);
  return Value::Of(Kind::kCycler, cycler);
}

Value MakeJoiner(Interpreter& in, Arguments arguments) {
  const Value separator = Bind(in, "joiner()", std::move(arguments), {"sep"}, 0)[0];
  auto* joiner = in.heap().New<Joiner>();
  joiner->separator = separator.IsMissing() ? Value::String(", ") : separator;
  return Value::Of(Kind::kJoiner, joiner);
}

}  // namespace

bool Interpreter::FindGlobal(std::string_view name, Value* out) {
  const std::string of(name);
  if (name == "range") {
    *out = MakeFunction(of, MakeRange);
  } else if (name == "dict") {
    *out = MakeFunction(of, MakeDict);
  } else if (name == "namespace") {
    *out = MakeFunction(of, MakeNamespace);
  } else if (name == "raise_exception") {
    *out = MakeFunction(of, RaiseException);
  } else if (name == "cycler") {
    *out = MakeFunction(of, MakeCycler);
  } else if (name == "joiner") {
    *out = MakeFunction(of, MakeJoiner);
  } else if (name == "self") {
    *out = Value(Kind::kTemplate);
  } else if (name == "strftime_now" && now_) {
    *out = MakeFunction(of, [now = *now_](Interpreter& in, Arguments arguments) {
      return Strftime(in, now, std::move(arguments));
    });
  } else {
    return false;
  }
  return true;
}

Value Interpreter::Resolve(const std::string& name) {
  if (const Value* found = variables_->Find(name)) return *found;
  Value out;
  FindGlobal(name, &out);
  return out;
}

}  // namespace winnow::engine::jinja
