// Interpreter: expressions.
#include <algorithm>
#include <utility>

#include "engine/base/concat.h"
#include "engine/text/jinja/interpreter.h"
#include "engine/text/jinja/unicode.h"

namespace winnow::engine::jinja {

Value Interpreter::Evaluate(const Expression& node, Activation* frame) {
  const Depth depth(this);
  if (!depth.ok() || !Step()) return Undefined("");
  return EvaluateInner(node, frame);
}

Value Interpreter::EvaluateInner(const Expression& node, Activation* frame) {
  switch (node.type) {
    case Expression::kConstant:
      return node.constant;
    case Expression::kName:
      return EvaluateName(node, frame);
    case Expression::kAttribute:
      return Fail("a namespace attribute is not a value here");
    case Expression::kTuple:
      return List(EvaluateItems(node, frame), Kind::kTuple);
    case Expression::kList:
      return List(EvaluateItems(node, frame));
    case Expression::kDict:
      return EvaluateDict(node, frame);
    case Expression::kCondition:
      if (Truth(Evaluate(*node.children[0], frame))) return Evaluate(*node.children[1], frame);
      if (node.children[2] != nullptr) return Evaluate(*node.children[2], frame);
      return Undefined(
          "the inline if-expression evaluated to false and no else section was defined");
    case Expression::kOr: {
      Value left = Evaluate(*node.children[0], frame);
      return Truth(left) ? left : Evaluate(*node.children[1], frame);
    }
    case Expression::kAnd: {
      Value left = Evaluate(*node.children[0], frame);
      return Truth(left) ? Evaluate(*node.children[1], frame) : left;
    }
    case Expression::kNot:
      return Value::Bool(!Truth(Evaluate(*node.children[0], frame)));
    case Expression::kCompare:
      return EvaluateCompare(node, frame);
    case Expression::kArithmetic: {
      const Value left = Evaluate(*node.children[0], frame);
      const Value right = Evaluate(*node.children[1], frame);
      line_ = node.line;
      return failed() ? Undefined("") : Arithmetic(node.name, left, right);
    }
    case Expression::kNegative:
    case Expression::kPositive:
      return EvaluateUnary(node, frame);
    case Expression::kConcat:
      return EvaluateConcat(node, frame);
    case Expression::kGetAttribute: {
      const Value object = Evaluate(*node.children[0], frame);
      line_ = node.line;
      return failed() ? Undefined("") : GetAttribute(object, node.name);
    }
    case Expression::kGetItem: {
      const Value object = Evaluate(*node.children[0], frame);
      const Value key = Evaluate(*node.children[1], frame);
      line_ = node.line;
      return failed() ? Undefined("") : GetItem(object, key);
    }
    case Expression::kSlice:
      return EvaluateSlice(node, frame);
    case Expression::kCall:
    case Expression::kFilter:
    case Expression::kTest:
      return EvaluateCall(node, frame);
  }
  return Value();
}

Value Interpreter::EvaluateName(const Expression& node, Activation* frame) {
  const Value& value = *Slot(node.variable, frame);
  return value.IsMissing() ? Undefined(Concat("'", node.name, "' is undefined")) : value;
}

std::vector<Value> Interpreter::EvaluateItems(const Expression& node, Activation* frame) {
  std::vector<Value> items;
  items.reserve(node.children.size());
  for (const ExpressionPtr& child : node.children) {
    items.push_back(Evaluate(*child, frame));
    if (failed()) break;
  }
  return items;
}

Value Interpreter::EvaluateDict(const Expression& node, Activation* frame) {
  const Value out = NewDict();
  for (size_t i = 0; i + 1 < node.children.size() && !failed(); i += 2) {
    const Value key = Evaluate(*node.children[i], frame);
    const Value value = Evaluate(*node.children[i + 1], frame);
    if (!failed()) DictSet(&AsDict(out), key, value);
  }
  return out;
}

Value Interpreter::EvaluateUnary(const Expression& node, Activation* frame) {
  const Value value = Evaluate(*node.children[0], frame);
  line_ = node.line;
  if (failed()) return value;
  const bool negative = node.type == Expression::kNegative;
  if (value.IsUndefined()) return Fail(value.bytes());
  if (value.Is(Kind::kFloat)) return negative ? Value::Float(-value.real) : value;
  if (value.IsIntLike())
    return negative ? Arithmetic("-", Value::Int(0), value) : Value::Int(value.AsInt());
  return Fail(
      Concat("bad operand type for unary ", negative ? "-" : "+", ": '", TypeName(value), "'"));
}

Value Interpreter::EvaluateCompare(const Expression& node, Activation* frame) {
  Value left = Evaluate(*node.children[0], frame);
  for (size_t i = 0; i < node.operators.size(); ++i) {
    Value right = Evaluate(*node.children[i + 1], frame);
    line_ = node.line;
    if (failed()) return left;
    const std::string& op = node.operators[i];
    bool holds = false;
    if (op == "==" || op == "!=") {
      holds = Equal(left, right) == (op == "==");
    } else if (op == "in" || op == "not in") {
      holds = Contains(right, left) == (op == "in");
    } else {
      holds = Order(op, left, right);
    }
    if (!holds) return Value::Bool(false);
    left = std::move(right);
  }
  return Value::Bool(true);
}

Value Interpreter::EvaluateConcat(const Expression& node, Activation* frame) {
  // All values first: printing one of them may be an error only after all are known.
  const std::vector<Value> values = EvaluateItems(node, frame);
  MarkedText text;
  for (const Value& value : values) {
    if (failed()) break;
    AppendText(value, &text);
  }
  return String(std::move(text));
}

Arguments Interpreter::EvaluateArguments(const Expression& node, Activation* frame) {
  Arguments arguments;
  for (size_t i = 1; i < node.children.size() && !failed(); ++i) {
    arguments.positional.push_back(Evaluate(*node.children[i], frame));
  }
  for (const auto& [name, value] : node.keywords) {
    if (failed()) break;
    arguments.keyword.emplace_back(name, Evaluate(*value, frame));
  }
  if (node.dynamic_arguments != nullptr && !failed()) {
    const Value more = Evaluate(*node.dynamic_arguments, frame);
    if (failed()) return arguments;
    for (Value& item : Collect(more)) arguments.positional.push_back(std::move(item));
  }
  if (node.dynamic_keywords != nullptr && !failed()) {
    const Value more = Evaluate(*node.dynamic_keywords, frame);
    if (failed()) return arguments;
    if (!more.Is(Kind::kDict)) {
      Fail("argument after ** must be a mapping");
      return arguments;
    }
    for (const auto& [key, value] : AsDict(more).entries()) {
      if (!key.IsString()) {
        Fail("keywords must be strings");
      } else if (arguments.FindKeyword(key.bytes()) != nullptr) {
        Fail(Concat("got multiple values for keyword argument '", key.bytes(), "'"));
      } else {
        arguments.keyword.emplace_back(std::string(key.bytes()), value);
      }
    }
  }
  return arguments;
}

Value Interpreter::EvaluateCall(const Expression& node, Activation* frame) {
  Value target = node.children[0] == nullptr ? block_text_ : Evaluate(*node.children[0], frame);
  if (failed()) return target;
  Arguments arguments = EvaluateArguments(node, frame);
  line_ = node.line;
  if (failed()) return target;
  switch (node.type) {
    case Expression::kFilter:
      return ApplyFilter(node.name, target, std::move(arguments));
    case Expression::kTest:
      return Value::Bool(ApplyTest(node.name, target, std::move(arguments)));
    default:
      return Call(target, std::move(arguments));
  }
}

Value Interpreter::EvaluateSlice(const Expression& node, Activation* frame) {
  const Value object = Evaluate(*node.children[0], frame);
  Value parts[3];
  for (size_t i = 0; i < 3 && !failed(); ++i) {
    const ExpressionPtr& part = node.children[i + 1];
    parts[i] = part == nullptr ? Value::None() : Evaluate(*part, frame);
  }
  line_ = node.line;
  return failed() ? object : SliceOf(object, parts[0], parts[1], parts[2]);
}

namespace {

// The positions that a slice of `size` items takes: `count` of them, from `start`, `step` apart.
struct Positions {
  int64_t start;
  int64_t step;
  int64_t count;
};

Positions ResolveSlice(int64_t size, const Value& start, const Value& stop, int64_t step) {
  const auto clamp = [&](const Value& value, int64_t fallback) {
    if (value.Is(Kind::kNone)) return fallback;
    int64_t at = value.AsInt();
    if (at < 0) at = at < -size ? -1 : at + size;
    if (value.AsInt() < 0 && at < 0) return step < 0 ? int64_t{-1} : int64_t{0};
    if (at >= size) return step < 0 ? size - 1 : size;
    return at;
  };
  const int64_t first = clamp(start, step < 0 ? size - 1 : 0);
  const int64_t end = clamp(stop, step < 0 ? -1 : size);
  int64_t count = 0;
  if (step > 0 && first < end) count = (end - first - 1) / step + 1;
  if (step < 0 && first > end) count = (first - end - 1) / -step + 1;
  return {first, step, count};
}

MarkedText SliceText(const MarkedText& text, const Positions& at) {
  if (at.count == 0) return {};
  const std::string_view bytes = text.bytes();
  if (at.step == 1) {
    const size_t begin = OffsetOf(bytes, static_cast<size_t>(at.start));
    return text.Slice(begin, begin + OffsetOf(bytes.substr(begin), static_cast<size_t>(at.count)));
  }
  std::vector<size_t> offsets;
  for (size_t offset = 0; offset < bytes.size(); offset += OffsetOf(bytes.substr(offset), 1)) {
    offsets.push_back(offset);
  }
  offsets.push_back(bytes.size());
  MarkedText out;
  for (int64_t i = 0; i < at.count; ++i) {
    const auto index = static_cast<size_t>(at.start + i * at.step);
    out.Append(text, offsets[index], offsets[index + 1]);
  }
  return out;
}

}  // namespace

Value Interpreter::SliceOf(const Value& object, const Value& start, const Value& stop,
                           const Value& step) {
  if (object.IsUndefined()) return Fail(object.bytes());
  for (const Value* part : {&start, &stop, &step}) {
    if (part->IsIntLike() || part->Is(Kind::kNone)) continue;
    return Fail("slice indices must be integers or None");
  }
  // Python's own bound on what a step can mean.
  const int64_t by = step.Is(Kind::kNone) ? 1 : std::max(step.AsInt(), -INT64_MAX);
  if (by == 0) return Fail("slice step cannot be zero");
  if (object.IsString()) {
    if (!Reserve(object.text->size())) return object;
    const auto size = static_cast<int64_t>(Length(object.bytes()));
    const Positions at = ResolveSlice(size, start, stop, by);
    if (by != 1 && !Reserve(static_cast<size_t>(size) * sizeof(size_t))) return object;
    return String(SliceText(*object.text, at), object.markup);
  }
  if (object.Is(Kind::kList) || object.Is(Kind::kTuple)) {
    const std::vector<Value>& items = Items(object);
    const Positions at = ResolveSlice(static_cast<int64_t>(items.size()), start, stop, by);
    if (!Reserve(static_cast<size_t>(at.count) * sizeof(Value))) return object;
    std::vector<Value> out;
    for (int64_t i = 0; i < at.count; ++i)
      out.push_back(items[static_cast<size_t>(at.start + i * at.step)]);
    return List(std::move(out), object.kind);
  }
  if (object.Is(Kind::kRange)) {
    const auto& range = *static_cast<const Range*>(object.object);
    const Positions at = ResolveSlice(range.size, start, stop, by);
    auto* out = heap_.New<Range>();
    out->start = range.At(at.start);
    // Bounded: a range has at most 100,000 items.
    out->step = at.count > 1 ? range.step * at.step : range.step;
    out->size = at.count;
    out->stop = out->start + out->step * at.count;
    return Value::Of(Kind::kRange, out);
  }
  return Fail(Concat("'", TypeName(object), "' object is not subscriptable by a slice"));
}

}  // namespace winnow::engine::jinja
