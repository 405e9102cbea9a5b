#include "engine/text/jinja/interpreter.h"

#include <utility>

#include "engine/base/concat.h"

namespace winnow::engine::jinja {

Interpreter::Interpreter(const SyntaxTree& tree, const Limits& limits)
    : tree_(tree), limits_(limits), heap_(limits.memory_bytes_max), variables_(heap_.New<Dict>()) {}

void Interpreter::SetVariable(std::string_view name, Value value) {
  DictSet(variables_, Value::String(std::string(name)), std::move(value));
}

absl::StatusOr<MarkedText> Interpreter::Run() {
  deadline_ = std::chrono::steady_clock::now() + limits_.time_max;
  MarkedText out;
  out_ = &out;
  Step();
  Activation* root = NewActivation(tree_.function, nullptr);
  Enter(tree_.scope, root);
  Execute(tree_.body, root);
  out_ = nullptr;
  if (failed()) return error_;
  return out;
}

// ---- errors and limits ----

Value Interpreter::Undefined(std::string message) {
  Value out = Value::String(std::move(message));
  out.kind = Kind::kUndefined;
  return out;
}

Value Interpreter::Fail(std::string_view message) {
  if (!failed()) error_ = absl::InvalidArgumentError(Concat("line ", line_, ": ", message));
  return Undefined("");
}

Value Interpreter::FailLimit(std::string_view limit) {
  if (!failed()) {
    error_ = absl::ResourceExhaustedError(
        Concat("line ", line_, ": the limit of ", limit, " is reached"));
  }
  return Undefined("");
}

Value Interpreter::Raise(std::string message) {
  if (!failed()) {
    error_ = absl::InvalidArgumentError(message);
    raised_ = true;
  }
  return Undefined("");
}

void Interpreter::FailDepth() { FailLimit(Concat(limits_.depth_max, " levels of nesting")); }

bool Interpreter::Step(int64_t steps) {
  constexpr int64_t kStepsPerClock = 4096;
  const int64_t before = steps_;
  steps_ += steps;
  if (steps_ > limits_.steps_max) FailLimit(Concat(limits_.steps_max, " steps"));
  if (heap_.full()) FailLimit(Concat(heap_.bytes_max(), " bytes of memory"));
  if (before / kStepsPerClock != steps_ / kStepsPerClock && deadline_ &&
      std::chrono::steady_clock::now() > *deadline_) {
    FailLimit(Concat(limits_.time_max.count(), " ms of time"));
  }
  return !failed();
}

bool Interpreter::Reserve(size_t bytes, size_t held) {
  if (heap_.Exceeds(bytes + held)) FailLimit(Concat(heap_.bytes_max(), " bytes of memory"));
  return !failed() && Work(bytes);
}

// ---- values ----

Value Interpreter::String(MarkedText text, bool markup) {
  Value out = heap_.String(std::move(text));
  out.markup = markup;
  return out;
}

Value Interpreter::List(std::vector<Value> items, Kind kind) {
  auto* list = heap_.New<Sequence>();
  heap_.Charge(items.size() * sizeof(Value));
  list->items = std::move(items);
  return Value::Of(kind, list);
}

void Interpreter::DictSet(Dict* dict, const Value& key, Value value) {
  std::string hashed;
  if (!Dict::HashKey(key, &hashed)) {
    Fail(Concat("unhashable type: '", TypeName(key), "'"));
    return;
  }
  heap_.Charge(2 * sizeof(Value) + 2 * hashed.size() + 64);
  dict->Set(key, std::move(value));
}

Value Interpreter::MakeIterator(std::string type, Next next) {
  auto* iterator = heap_.New<Iterator>();
  iterator->type = std::move(type);
  iterator->next = std::move(next);
  heap_.Charge(128);
  return Value::Of(Kind::kIterator, iterator);
}

Value Interpreter::MakeFunction(std::string name,
                                std::function<Value(Interpreter&, Arguments)> call) {
  auto* function = heap_.New<Function>();
  function->name = std::move(name);
  function->call = std::move(call);
  heap_.Charge(128);
  return Value::Of(Kind::kFunction, function);
}

Value Interpreter::Capture::Take() {
  interpreter_->heap_.Release(text_.size());
  taken_ = true;
  return interpreter_->String(std::move(text_));
}

// ---- scopes ----

Interpreter::Activation* Interpreter::NewActivation(const FunctionInfo& info, Activation* parent) {
  auto* frame = heap_.New<Activation>();
  frame->parent = parent;
  frame->slots.resize(static_cast<size_t>(info.slots));
  heap_.Charge(frame->slots.size() * sizeof(Value));
  return frame;
}

Value* Interpreter::Slot(const VariableRef& ref, Activation* frame) {
  for (int hops = ref.hops; hops > 0; --hops) frame = frame->parent;
  return &frame->slots[static_cast<size_t>(ref.slot)];
}

void Interpreter::Enter(const Scope& scope, Activation* frame) {
  for (const ScopeLoad& load : scope.loads) {
    Value& slot = frame->slots[static_cast<size_t>(load.slot)];
    switch (load.action) {
      case ScopeLoad::kParameter:
        break;
      case ScopeLoad::kResolve:
        slot = Resolve(load.name);
        break;
      case ScopeLoad::kAlias:
        slot = *Slot(load.alias, frame);
        break;
      case ScopeLoad::kUndefined:
        slot = Value();
        break;
    }
  }
}

void Interpreter::Leave(const Scope& scope, Activation* frame) {
  for (const ScopeLoad& load : scope.loads) frame->slots[static_cast<size_t>(load.slot)] = Value();
}

// ---- statements ----

void Interpreter::Emit(const Value& value) {
  const size_t before = out_->size();
  AppendText(value, out_);
  const size_t added = out_->size() - before;
  heap_.Charge(added);
  if (out_->size() > limits_.output_bytes_max) {
    FailLimit(Concat(limits_.output_bytes_max, " bytes of output"));
  }
  Work(added);
}

Interpreter::Flow Interpreter::Execute(const Body& body, Activation* frame) {
  const Depth depth(this);
  for (const StatementPtr& statement : body) {
    if (!depth.ok()) break;
    const Flow flow = Execute(*statement, frame);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::Execute(const Statement& node, Activation* frame) {
  line_ = node.line;
  if (!Step()) return Flow::kNormal;
  switch (node.type) {
    case Statement::kOutput:
      for (const ExpressionPtr& expression : node.expressions) {
        Emit(Evaluate(*expression, frame));
        if (failed()) break;
      }
      return Flow::kNormal;
    case Statement::kIf:
      return ExecuteIf(node, frame);
    case Statement::kFor:
      return ExecuteFor(node, frame);
    case Statement::kSet:
      ExecuteSet(node, frame);
      return Flow::kNormal;
    case Statement::kMacro:
      *Slot(node.variable, frame) = MakeMacro(node, frame);
      return Flow::kNormal;
    case Statement::kCallBlock:
      ExecuteCallBlock(node, frame);
      return Flow::kNormal;
    case Statement::kGeneration:
      Emit(CallMacro(node, frame, "caller", {}));
      return Flow::kNormal;
    case Statement::kBreak:
      return Flow::kBreak;
    case Statement::kContinue:
      return Flow::kContinue;
    case Statement::kSetBlock:
    case Statement::kFilterBlock:
    case Statement::kWith: {
      Flow flow = Flow::kNormal;
      ExecuteScope(node, frame, &flow);
      return flow;
    }
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::ExecuteIf(const Statement& node, Activation* frame) {
  if (Truth(Evaluate(*node.expressions[0], frame)))
    return failed() ? Flow::kNormal : Execute(node.body, frame);
  for (const StatementPtr& elif : node.elifs) {
    if (failed()) return Flow::kNormal;
    line_ = elif->line;
    if (Truth(Evaluate(*elif->expressions[0], frame))) return Execute(elif->body, frame);
  }
  if (failed()) return Flow::kNormal;
  return Execute(node.otherwise, frame);
}

void Interpreter::ExecuteSet(const Statement& node, Activation* frame) {
  // Before the value, as in Jinja.
  const std::function<void(const Expression&)> check = [&](const Expression& target) {
    if (target.type == Expression::kAttribute &&
        !Slot(target.variable, frame)->Is(Kind::kNamespace)) {
      Fail("cannot assign attribute on non-namespace object");
    }
    for (const ExpressionPtr& child : target.children) check(*child);
  };
  check(*node.targets[0]);
  if (failed()) return;
  const Value value = Evaluate(*node.expressions[0], frame);
  if (!failed()) Assign(*node.targets[0], value, frame);
}

void Interpreter::Assign(const Expression& target, const Value& value, Activation* frame) {
  switch (target.type) {
    case Expression::kName:
      *Slot(target.variable, frame) = value;
      return;
    case Expression::kAttribute: {
      const Value object = *Slot(target.variable, frame);
      if (!object.Is(Kind::kNamespace)) {
        Fail("cannot assign attribute on non-namespace object");
      } else if (target.attribute.starts_with('_')) {
        Fail(Concat("a namespace cannot have the attribute '", target.attribute, "'"));
      } else {
        DictSet(static_cast<Namespace*>(object.object)->attributes, Value::String(target.attribute),
                value);
      }
      return;
    }
    default:
      break;
  }
  const std::vector<Value> items = Collect(value);
  if (failed()) return;
  if (items.size() != target.children.size()) {
    Fail(Concat(items.size() < target.children.size() ? "not enough" : "too many",
                " values to unpack (expected ", target.children.size(), ")"));
    return;
  }
  for (size_t i = 0; i < items.size(); ++i) Assign(*target.children[i], items[i], frame);
}

Interpreter::Flow Interpreter::ExecuteScope(const Statement& node, Activation* frame, Flow* flow) {
  std::vector<Value> values;
  for (const ExpressionPtr& expression : node.expressions)
    values.push_back(Evaluate(*expression, frame));
  Enter(node.scope, frame);
  if (node.type == Statement::kWith) {
    for (size_t i = 0; i < values.size() && !failed(); ++i)
      Assign(*node.targets[i], values[i], frame);
    *flow = Execute(node.body, frame);
  } else {
    Value text;
    {
      Capture capture(this);
      *flow = Execute(node.body, frame);
      if (*flow == Flow::kNormal) text = capture.Take();
    }
    if (*flow == Flow::kNormal && !failed()) {
      if (node.filter != nullptr) {
        const Value captured = std::exchange(block_text_, text);
        text = Evaluate(*node.filter, frame);
        block_text_ = captured;
      }
      if (node.type == Statement::kFilterBlock) {
        Emit(text);
      } else if (!failed()) {
        Assign(*node.targets[0], text, frame);
      }
    }
  }
  Leave(node.scope, frame);
  return *flow;
}

// ---- loops ----

Next Interpreter::LoopItems(const Statement& node, const Value& over, Activation* outer,
                            int64_t* length) {
  Next items = Iterate(over);
  *length = -1;
  if (failed()) return items;
  if (node.condition == nullptr) {
    *length = LengthOf(over);
    return items;
  }
  Activation* frame = NewActivation(node.condition_function, outer);
  bool entered = false;
  return [this, &node, frame, entered, items = std::move(items)](Value* out) mutable {
    if (!entered) Enter(node.condition_scope, frame);
    entered = true;
    Value item;
    while (!failed() && items(&item)) {
      Assign(*node.condition_targets[0], item, frame);
      if (failed() || !Truth(Evaluate(*node.condition, frame))) continue;
      *out = std::move(item);
      return !failed();
    }
    return false;
  };
}

Interpreter::Flow Interpreter::ExecuteFor(const Statement& node, Activation* frame) {
  const Value over = Evaluate(*node.expressions[0], frame);
  if (failed()) return Flow::kNormal;
  if (node.recursive) {
    Emit(RunRecursiveLoop(node, frame, over, 0));
    return Flow::kNormal;
  }
  auto* loop = heap_.New<Loop>();
  loop->next = LoopItems(node, over, frame, &loop->known_length);
  return failed() ? Flow::kNormal : RunLoop(node, frame, loop);
}

Value Interpreter::RunRecursiveLoop(const Statement& node, Activation* outer, const Value& over,
                                    int64_t depth0) {
  const Depth depth(this);
  if (!depth.ok()) return Undefined("");
  auto* loop = heap_.New<Loop>();
  loop->depth0 = depth0;
  loop->next = LoopItems(node, over, outer, &loop->known_length);
  if (failed()) return Undefined("");
  const Value recurse =
      MakeFunction("loop", [this, &node, outer, depth0](Interpreter&, Arguments arguments) {
        if (arguments.positional.size() != 1 || !arguments.keyword.empty()) {
          return Fail("loop() takes what to loop over");
        }
        return RunRecursiveLoop(node, outer, arguments.positional[0], depth0 + 1);
      });
  loop->recurse = static_cast<Function*>(recurse.object);
  Activation* frame = NewActivation(node.function, outer);
  Capture capture(this);
  RunLoop(node, frame, loop);
  return capture.Take();
}

bool Interpreter::TakeNext(Loop* loop, Value* item) {
  if (!loop->after.IsMissing()) {
    *item = std::exchange(loop->after, Value());
  } else if (loop->exhausted || !loop->next(item)) {
    loop->exhausted = true;
    return false;
  }
  ++loop->index0;
  loop->before = std::exchange(loop->current, *item);
  return !failed();
}

Interpreter::Flow Interpreter::RunLoop(const Statement& node, Activation* frame, Loop* loop) {
  bool completed_none = true;  // no pass came to its end
  Value item;
  while (!failed() && TakeNext(loop, &item)) {
    if (!Step()) break;
    Assign(*node.targets[0], item, frame);
    if (node.loop_slot >= 0)
      frame->slots[static_cast<size_t>(node.loop_slot)] = Value::Of(Kind::kLoop, loop);
    Enter(node.scope, frame);
    const Flow flow = failed() ? Flow::kBreak : Execute(node.body, frame);
    if (flow == Flow::kBreak) break;
    if (flow == Flow::kNormal) completed_none = false;
  }
  Leave(node.scope, frame);
  if (!completed_none || node.otherwise.empty() || failed()) return Flow::kNormal;
  // As in Jinja, this also runs when every pass was left early.
  Enter(node.else_scope, frame);
  const Flow flow = Execute(node.otherwise, frame);
  Leave(node.else_scope, frame);
  return flow;
}

// ---- macros ----

Value Interpreter::MakeMacro(const Statement& node, Activation* frame) {
  const std::string name = node.type == Statement::kMacro ? node.name : "caller";
  const Value macro =
      MakeFunction(name, [&node, frame, name](Interpreter& self, Arguments arguments) {
        return self.CallMacro(node, frame, name, std::move(arguments));
      });
  static_cast<Function*>(macro.object)->is_macro = true;
  return macro;
}

void Interpreter::ExecuteCallBlock(const Statement& node, Activation* frame) {
  const Expression& call = *node.expressions[0];
  const Value callee = Evaluate(*call.children[0], frame);
  Arguments arguments = EvaluateArguments(call, frame);
  if (failed()) return;
  if (arguments.FindKeyword("caller") != nullptr) {
    Fail("the argument 'caller' is given twice");
    return;
  }
  arguments.keyword.emplace_back("caller", MakeMacro(node, frame));
  Emit(Call(callee, std::move(arguments)));
}

bool Interpreter::BindMacro(const Statement& node, const std::string& name, Arguments* arguments,
                            Activation* frame) {
  const size_t count = node.targets.size();
  std::vector<Value>& given = arguments->positional;
  bool found_caller = false;
  for (size_t i = 0; i < count; ++i) {
    Value value = i < given.size() ? given[i] : arguments->TakeKeyword(node.targets[i]->name);
    if (i >= given.size() && node.targets[i]->name == "caller") found_caller = true;
    *Slot(node.targets[i]->variable, frame) = std::move(value);
  }
  if (given.size() >= count) found_caller = node.explicit_caller;
  if (node.uses_caller && !found_caller && node.explicit_caller) {
    Fail(
        Concat("macro '", name, "': 'caller' cannot be given by position before other parameters"));
  } else if (node.uses_caller && !found_caller) {
    Value caller = arguments->TakeKeyword("caller");
    if (caller.IsMissing() || caller.Is(Kind::kNone)) caller = Undefined("No caller defined");
    *Slot(node.caller, frame) = std::move(caller);
  }
  if (node.uses_kwargs) {
    const Value kwargs = NewDict();
    for (auto& [key, value] : arguments->keyword)
      DictSet(&AsDict(kwargs), Value::String(key), value);
    *Slot(node.kwargs, frame) = kwargs;
  } else if (!arguments->keyword.empty()) {
    Fail(arguments->FindKeyword("caller") != nullptr
             ? Concat("macro '", name,
                      "' was invoked with two values for the special caller argument")
             : Concat("macro '", name, "' takes no keyword argument '", arguments->keyword[0].first,
                      "'"));
  }
  if (node.uses_varargs) {
    std::vector<Value> rest;
    for (size_t i = count; i < given.size(); ++i) rest.push_back(given[i]);
    *Slot(node.varargs, frame) = List(std::move(rest), Kind::kTuple);
  } else if (given.size() > count) {
    Fail(Concat("macro '", name, "' takes not more than ", count, " argument(s)"));
  }
  return !failed();
}

Value Interpreter::CallMacro(const Statement& node, Activation* closure, const std::string& name,
                             Arguments arguments) {
  const Depth depth(this);
  if (!depth.ok()) return Undefined("");
  Activation* frame = NewActivation(node.function, closure);
  if (!BindMacro(node, name, &arguments, frame)) return Undefined("");
  const int line = line_;
  Enter(node.scope, frame);
  const size_t first_default = node.targets.size() - node.defaults.size();
  for (size_t i = 0; i < node.targets.size(); ++i) {
    Value* slot = Slot(node.targets[i]->variable, frame);
    if (!slot->IsMissing()) continue;
    if (i < first_default) {
      *slot = Undefined(Concat("parameter '", node.targets[i]->name, "' was not provided"));
    } else {
      const Value value = Evaluate(*node.defaults[i - first_default], frame);
      *Slot(node.targets[i]->variable, frame) = value;
    }
  }
  Capture capture(this);
  Execute(node.body, frame);
  line_ = line;
  return capture.Take();
}

}  // namespace winnow::engine::jinja
