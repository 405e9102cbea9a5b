// Runs one template once.
//
// The first error sticks: Fail keeps its message and line, everything evaluated afterwards gives
// values without meaning, and every loop ends at once. So functions here return plain values, and
// whoever loops asks failed().
//
// One thread; lives as long as one rendering. The syntax tree must outlive it.
#ifndef WINNOW_ENGINE_TEXT_JINJA_INTERPRETER_H_
#define WINNOW_ENGINE_TEXT_JINJA_INTERPRETER_H_

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/civil_time.h"
#include "engine/text/jinja/limits.h"
#include "engine/text/jinja/syntax_tree.h"
#include "engine/text/jinja/value.h"

namespace winnow::engine::jinja {

// Yields the items of something; false at the end or after an error.
using Next = std::function<bool(Value*)>;

class Interpreter {
 public:
  Interpreter(const SyntaxTree& tree, const Limits& limits);
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  Heap& heap() { return heap_; }
  // A variable of the template. Later ones replace earlier ones of the same name.
  void SetVariable(std::string_view name, Value value);
  // What strftime_now tells; without it the template does not have that function.
  void SetNow(absl::CivilSecond now) { now_ = now; }

  // The whole output. InvalidArgument: the template raised an exception, or what it did is an
  // error in Python. ResourceExhausted: a limit. Messages begin with "line N: ", but those that
  // the template raises itself stand alone.
  absl::StatusOr<MarkedText> Run();

  // ---- for filters, tests and methods ----
  bool failed() const { return !error_.ok(); }
  // Notes an error; returns an undefined value.
  Value Fail(std::string_view message);
  Value FailLimit(std::string_view limit);
  void FailDepth();
  // The template's raise_exception: its message alone.
  Value Raise(std::string message);
  bool raised() const { return raised_; }
  // Counts work: steps, and bytes that are read or written. False: failed.
  bool Step(int64_t steps = 1);
  bool Work(size_t bytes) { return Step(static_cast<int64_t>(bytes / 64) + 1); }
  // Counts the work on `bytes` that are about to be made, and refuses them if memory would not hold
  // them beside `held` bytes that no Heap counts yet.
  bool Reserve(size_t bytes, size_t held = 0);

  Value String(MarkedText text, bool markup = false);
  Value String(std::string_view bytes) { return String(MarkedText(std::string(bytes))); }
  Value List(std::vector<Value> items, Kind kind = Kind::kList);
  Value NewDict() { return Value::Of(Kind::kDict, heap_.New<Dict>()); }
  void DictSet(Dict* dict, const Value& key, Value value);
  Value MakeIterator(std::string type, Next next);
  Value MakeFunction(std::string name, std::function<Value(Interpreter&, Arguments)> call);
  Value Undefined(std::string message);
  Value UndefinedItem(const Value& object, const Value& name);

  bool Truth(const Value& value);
  Text ToText(const Value& value);  // str(); never null
  void AppendText(const Value& value, MarkedText* out);
  void AppendRepr(const Value& value, MarkedText* out);
  bool Equal(const Value& a, const Value& b);
  // "<", "<=", ">", ">="; an error if Python cannot order the two.
  bool Order(std::string_view op, const Value& a, const Value& b);
  bool Contains(const Value& container, const Value& item);
  // Python's len(); -1 without an error: has none.
  int64_t LengthOf(const Value& value);
  // Python's iter(). An error: not iterable.
  Next Iterate(const Value& value);
  static bool IsIterable(const Value& value);
  std::vector<Value> Collect(const Value& value);
  Value Arithmetic(std::string_view op, const Value& a, const Value& b);
  Value GetAttribute(const Value& object, std::string_view name);
  Value GetItem(const Value& object, const Value& key);
  Value Call(const Value& callee, Arguments arguments);
  Value ApplyFilter(std::string_view name, const Value& input, Arguments arguments);
  bool ApplyTest(std::string_view name, const Value& input, Arguments arguments);
  // Stable; false for an error in a comparison.
  bool Sort(std::vector<std::pair<Value, Value>>* keyed, bool reverse);

  // Guards what recurses: ok() is false, with the error noted, when it nests too deeply.
  class Depth {
   public:
    explicit Depth(Interpreter* interpreter) : interpreter_(interpreter) {
      if (++interpreter->depth_ > interpreter->limits_.depth_max) interpreter->FailDepth();
    }
    ~Depth() { --interpreter_->depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
    bool ok() const { return !interpreter_->failed(); }

   private:
    Interpreter* interpreter_;
  };

 private:
  // The variables of one call of a function of the template.
  struct Activation : Object {
    Activation* parent = nullptr;
    std::vector<Value> slots;
  };
  enum class Flow { kNormal, kBreak, kContinue };

  // Collects output apart from what is around it, until Take.
  class Capture {
   public:
    explicit Capture(Interpreter* interpreter)
        : interpreter_(interpreter), outer_(interpreter->out_) {
      interpreter->out_ = &text_;
    }
    ~Capture() {
      interpreter_->out_ = outer_;
      interpreter_->heap_.Release(charged());
    }
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    Value Take();

   private:
    size_t charged() const { return taken_ ? 0 : text_.size(); }
    Interpreter* interpreter_;
    MarkedText* outer_;
    MarkedText text_;
    bool taken_ = false;
  };

  // statements (interpreter.cc)
  Flow Execute(const Body& body, Activation* frame);
  Flow Execute(const Statement& node, Activation* frame);
  Flow ExecuteIf(const Statement& node, Activation* frame);
  Flow ExecuteFor(const Statement& node, Activation* frame);
  Flow RunLoop(const Statement& node, Activation* frame, Loop* loop);
  Value RunRecursiveLoop(const Statement& node, Activation* outer, const Value& over,
                         int64_t depth0);
  Next LoopItems(const Statement& node, const Value& over, Activation* outer, int64_t* length);
  bool TakeNext(Loop* loop, Value* item);
  Flow ExecuteScope(const Statement& node, Activation* frame, Flow* flow);
  void ExecuteSet(const Statement& node, Activation* frame);
  void ExecuteCallBlock(const Statement& node, Activation* frame);
  void Emit(const Value& value);
  void Enter(const Scope& scope, Activation* frame);
  void Leave(const Scope& scope, Activation* frame);
  void Assign(const Expression& target, const Value& value, Activation* frame);
  Activation* NewActivation(const FunctionInfo& info, Activation* parent);
  Value MakeMacro(const Statement& node, Activation* frame);
  Value CallMacro(const Statement& node, Activation* closure, const std::string& name,
                  Arguments arguments);
  bool BindMacro(const Statement& node, const std::string& name, Arguments* arguments,
                 Activation* frame);

  // expressions (expressions.cc)
  Value Evaluate(const Expression& node, Activation* frame);
  Value EvaluateInner(const Expression& node, Activation* frame);
  Value EvaluateName(const Expression& node, Activation* frame);
  Value EvaluateCompare(const Expression& node, Activation* frame);
  Value EvaluateConcat(const Expression& node, Activation* frame);
  Value EvaluateDict(const Expression& node, Activation* frame);
  Value EvaluateSlice(const Expression& node, Activation* frame);
  Value EvaluateCall(const Expression& node, Activation* frame);
  Value EvaluateUnary(const Expression& node, Activation* frame);
  std::vector<Value> EvaluateItems(const Expression& node, Activation* frame);
  Arguments EvaluateArguments(const Expression& node, Activation* frame);
  Value SliceOf(const Value& object, const Value& start, const Value& stop, const Value& step);
  Value* Slot(const VariableRef& ref, Activation* frame);

  // operators (operators.cc)
  Value IntArithmetic(std::string_view op, int64_t a, int64_t b);
  Value FloatArithmetic(std::string_view op, double a, double b);
  Value Repeat(const Value& sequence, int64_t times);
  Value Add(const Value& a, const Value& b);
  Value FailOperands(std::string_view op, const Value& a, const Value& b);
  void AppendSequenceRepr(const std::vector<Value>& items, const char* open, const char* close,
                          MarkedText* out);
  void AppendDictRepr(const Dict& dict, MarkedText* out);
  int CompareSequences(std::string_view op, const Value& a, const Value& b);

  // attributes (attributes.cc)
  bool FindAttribute(const Value& object, std::string_view name, Value* out);
  bool LoopAttribute(const Value& loop_value, std::string_view name, Value* out);
  int64_t LoopLength(Loop* loop);

  // globals (globals.cc)
  Value Resolve(const std::string& name);
  bool FindGlobal(std::string_view name, Value* out);

  const SyntaxTree& tree_;
  const Limits limits_;
  Heap heap_;
  Dict* variables_;
  std::optional<absl::CivilSecond> now_;
  MarkedText* out_ = nullptr;
  int line_ = 1;
  int depth_ = 0;
  int64_t steps_ = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  absl::Status error_;
  bool raised_ = false;
  Value block_text_;  // what the filter of a block is applied to
};

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_INTERPRETER_H_
