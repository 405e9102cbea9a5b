// Interpreter: attributes, items and calls; and the binding of arguments.
#include <utility>

#include "engine/base/concat.h"
#include "engine/text/jinja/arguments.h"
#include "engine/text/jinja/interpreter.h"
#include "engine/text/jinja/methods.h"
#include "engine/text/jinja/unicode.h"

namespace winnow::engine::jinja {
namespace {

// Names that every Python object has and the sandbox hides.
bool IsHidden(std::string_view name) {
  return name.size() > 4 && name.starts_with("__") && name.ends_with("__");
}

std::string ObjectName(const Value& value) {
  if (value.Is(Kind::kNone)) return "None";
  return Concat(TypeName(value), " object");
}

}  // namespace

Value Interpreter::UndefinedItem(const Value& object, const Value& name) {
  if (name.IsString())
    return Undefined(Concat("'", ObjectName(object), "' has no attribute '", name.bytes(), "'"));
  MarkedText text;
  AppendRepr(name, &text);
  return Undefined(Concat(ObjectName(object), " has no element ", text.bytes()));
}

int64_t Interpreter::LoopLength(Loop* loop) {
  if (loop->known_length >= 0) return loop->known_length;
  // The rest is read now, as Jinja does.
  std::vector<Value> rest;
  Value item;
  while (!failed() && !loop->exhausted && loop->next(&item)) {
    rest.push_back(item);
    if ((rest.size() & 1023) == 0 && !Reserve(rest.size() * sizeof(Value))) break;
  }
  loop->known_length =
      static_cast<int64_t>(rest.size()) + loop->index0 + 1 + (loop->after.IsMissing() ? 0 : 1);
  const Value list = List(std::move(rest));
  loop->next = Iterate(list);
  return loop->known_length;
}

bool Interpreter::LoopAttribute(const Value& loop_value, std::string_view name, Value* out) {
  auto* loop = static_cast<Loop*>(loop_value.object);
  const auto peek = [&] {
    if (!loop->after.IsMissing()) return true;
    if (loop->exhausted || !loop->next(&loop->after)) {
      loop->exhausted = true;
      loop->after = Value();
      return false;
    }
    return true;
  };
  if (name == "index") {
    *out = Value::Int(loop->index0 + 1);
  } else if (name == "index0") {
    *out = Value::Int(loop->index0);
  } else if (name == "first") {
    *out = Value::Bool(loop->index0 == 0);
  } else if (name == "last") {
    *out = Value::Bool(!peek());
  } else if (name == "length") {
    *out = Value::Int(LoopLength(loop));
  } else if (name == "revindex") {
    *out = Value::Int(LoopLength(loop) - loop->index0);
  } else if (name == "revindex0") {
    *out = Value::Int(LoopLength(loop) - loop->index0 - 1);
  } else if (name == "depth") {
    *out = Value::Int(loop->depth0 + 1);
  } else if (name == "depth0") {
    *out = Value::Int(loop->depth0);
  } else if (name == "previtem") {
    *out = loop->index0 == 0 ? Undefined("there is no previous item") : loop->before;
  } else if (name == "nextitem") {
    *out = peek() ? loop->after : Undefined("there is no next item");
  } else if (name == "cycle") {
    *out = MakeFunction("cycle", [loop](Interpreter& self, Arguments arguments) {
      if (arguments.positional.empty()) return self.Fail("no items for cycling given");
      return arguments.positional[static_cast<size_t>(loop->index0) % arguments.positional.size()];
    });
  } else if (name == "changed") {
    *out = MakeFunction("changed", [loop](Interpreter& self, Arguments arguments) {
      const Value now = self.List(arguments.positional, Kind::kTuple);
      const bool changed = loop->last_changed.IsMissing() || !self.Equal(loop->last_changed, now);
      loop->last_changed = now;
      return Value::Bool(changed);
    });
  } else {
    return false;
  }
  return true;
}

bool Interpreter::FindAttribute(const Value& object, std::string_view name, Value* out) {
  switch (object.kind) {
    case Kind::kNamespace: {
      const Value* found = static_cast<const Namespace*>(object.object)->attributes->Find(name);
      if (found != nullptr) *out = *found;
      return found != nullptr;
    }
    case Kind::kLoop:
      return LoopAttribute(object, name, out);
    case Kind::kCycler: {
      auto* cycler = static_cast<Cycler*>(object.object);
      if (name == "current") {
        *out = cycler->items[cycler->position];
        return true;
      }
      if (name != "next" && name != "reset") return false;
      const bool advance = name == "next";
      *out = MakeFunction(std::string(name), [cycler, advance](Interpreter&, const Arguments&) {
        if (!advance) {
          cycler->position = 0;
          return Value::None();
        }
        Value item = cycler->items[cycler->position];
        cycler->position = (cycler->position + 1) % cycler->items.size();
        return item;
      });
      return true;
    }
    case Kind::kFunction: {
      const auto* function = static_cast<const Function*>(object.object);
      if (!function->is_macro || name != "name") return false;
      *out = Value::String(function->name);
      return true;
    }
    default:
      return FindMethod(*this, object, name, out);
  }
}

Value Interpreter::GetAttribute(const Value& object, std::string_view name) {
  if (object.IsUndefined()) return Fail(object.bytes());
  Value out;
  if (FindAttribute(object, name, &out)) return out;
  if (object.Is(Kind::kDict)) {
    if (const Value* found = AsDict(object).Find(name)) return *found;
  }
  if (IsHidden(name)) {
    return Undefined(
        Concat("access to attribute '", name, "' of '", TypeName(object), "' object is unsafe."));
  }
  return UndefinedItem(object, Value::String(std::string(name)));
}

Value Interpreter::GetItem(const Value& object, const Value& key) {
  if (object.IsUndefined()) return Fail(object.bytes());
  if (object.Is(Kind::kDict)) {
    if (const Value* found = AsDict(object).Find(key)) return *found;
  } else if (key.IsIntLike()) {
    int64_t at = key.AsInt();
    const bool indexed = object.IsString() || object.Is(Kind::kList) || object.Is(Kind::kTuple) ||
                         object.Is(Kind::kRange);
    if (indexed) {
      const int64_t length = LengthOf(object);
      if (at < 0) at += length;
      if (at < 0 || at >= length) return UndefinedItem(object, key);
      if (object.Is(Kind::kRange))
        return Value::Int(static_cast<const Range*>(object.object)->At(at));
      if (!object.IsString()) return Items(object)[static_cast<size_t>(at)];
      const size_t begin = OffsetOf(object.bytes(), static_cast<size_t>(at));
      return String(object.text->Slice(begin, begin + OffsetOf(object.bytes().substr(begin), 1)),
                    object.markup);
    }
  }
  Value out;
  if (key.IsString()) {
    if (FindAttribute(object, key.bytes(), &out)) return out;
    if (IsHidden(key.bytes())) {
      return Undefined(Concat("access to attribute '", key.bytes(), "' of '", TypeName(object),
                              "' object is unsafe."));
    }
  }
  return UndefinedItem(object, key);
}

Value Interpreter::Call(const Value& callee, Arguments arguments) {
  const Depth depth(this);
  if (!depth.ok() || !Step()) return Undefined("");
  switch (callee.kind) {
    case Kind::kFunction:
      return static_cast<const Function*>(callee.object)->call(*this, std::move(arguments));
    case Kind::kLoop: {
      const auto* loop = static_cast<const Loop*>(callee.object);
      if (loop->recurse == nullptr) {
        return Fail("the loop must have the 'recursive' marker to be called recursively");
      }
      return loop->recurse->call(*this, std::move(arguments));
    }
    case Kind::kJoiner: {
      auto* joiner = static_cast<Joiner*>(callee.object);
      return std::exchange(joiner->used, true) ? joiner->separator : Value::String("");
    }
    case Kind::kUndefined:
      return Fail(callee.bytes());
    default:
      return Fail(Concat("'", TypeName(callee), "' object is not callable"));
  }
}

std::vector<Value> Bind(Interpreter& interpreter, std::string_view of, Arguments arguments,
                        std::initializer_list<std::string_view> names, size_t required) {
  std::vector<Value> values(names.size());
  if (arguments.positional.size() > names.size()) {
    interpreter.Fail(Concat(of, " takes at most ", names.size(), " argument(s), ",
                            arguments.positional.size(), " given"));
    return values;
  }
  size_t i = 0;
  for (std::string_view name : names) {
    Value keyword = arguments.TakeKeyword(name);
    if (i < arguments.positional.size()) {
      if (!keyword.IsMissing())
        interpreter.Fail(Concat(of, " got multiple values for argument '", name, "'"));
      values[i] = std::move(arguments.positional[i]);
    } else {
      values[i] = std::move(keyword);
    }
    if (values[i].IsMissing() && i < required)
      interpreter.Fail(Concat(of, " needs the argument '", name, "'"));
    ++i;
  }
  if (!arguments.keyword.empty()) {
    interpreter.Fail(
        Concat(of, " got an unexpected keyword argument '", arguments.keyword[0].first, "'"));
  }
  return values;
}

int64_t IntOr(Interpreter& interpreter, const Value& value, int64_t fallback) {
  if (value.IsMissing() || value.Is(Kind::kNone)) return fallback;
  if (value.IsIntLike()) return value.AsInt();
  if (value.IsUndefined()) interpreter.Fail(value.bytes());
  interpreter.Fail(Concat("'", TypeName(value), "' object cannot be interpreted as an integer"));
  return fallback;
}

}  // namespace winnow::engine::jinja
