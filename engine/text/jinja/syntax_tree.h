// A parsed template. Immutable once the parser and the resolver are done; any thread reads it.
#ifndef WINNOW_ENGINE_TEXT_JINJA_SYNTAX_TREE_H_
#define WINNOW_ENGINE_TEXT_JINJA_SYNTAX_TREE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/text/jinja/value.h"

namespace winnow::engine::jinja {

struct Expression;
struct Statement;
using ExpressionPtr = std::unique_ptr<Expression>;
using StatementPtr = std::unique_ptr<Statement>;
using Body = std::vector<StatementPtr>;

// Where a variable is: `hops` functions out, its number there.
struct VariableRef {
  int hops = 0;
  int slot = -1;
};

struct Expression {
  enum Type {
    kConstant,   // constant
    kName,       // name, variable
    kAttribute,  // of a namespace, as a target: name.attribute, variable
    kTuple,
    kList,
    kDict,       // children: key, value, key, value, ...
    kCondition,  // children: test, then, else (may be null)
    kOr,
    kAnd,
    kNot,
    kCompare,     // children: operands; operators between them
    kArithmetic,  // children: two; name is the operator
    kNegative,
    kPositive,
    kConcat,
    kGetAttribute,  // children: object; name
    kGetItem,       // children: object, index
    kSlice,         // children: object, start, stop, step (each of the three may be null)
    kCall,          // children: callee, then arguments
    kFilter,        // children: input (null: the block's output), then arguments; name
    kTest,          // the same
  };
  Type type;
  int line;
  int depth = 1;  // of the tree from here on
  std::string name;
  std::string attribute;
  Value constant;
  std::vector<ExpressionPtr> children;
  std::vector<std::string> operators;
  std::vector<std::pair<std::string, ExpressionPtr>> keywords;
  ExpressionPtr dynamic_arguments;  // *x
  ExpressionPtr dynamic_keywords;   // **x
  VariableRef variable;
  bool stores = false;  // a name that is a target
};

// What happens to the variables of a scope when it is entered.
struct ScopeLoad {
  enum Action { kParameter, kResolve, kAlias, kUndefined } action;
  int slot;
  std::string name;   // kResolve: in the context
  VariableRef alias;  // kAlias
};
struct Scope {
  std::vector<ScopeLoad> loads;
};

// A macro, the body of a call, or a loop that recurses: what has variables of its own.
struct FunctionInfo {
  int slots = 0;
};

struct Statement {
  enum Type {
    kOutput,  // expressions
    kIf,
    kFor,
    kSet,
    kSetBlock,
    kMacro,
    kCallBlock,
    kFilterBlock,
    kWith,
    kBreak,
    kContinue,
    kGeneration,
  };
  Type type;
  int line;
  std::vector<ExpressionPtr> expressions;  // output; test of if; value of set; values of with
  std::vector<ExpressionPtr> targets;      // of for, set, with; parameters of macros
  std::vector<ExpressionPtr> defaults;     // of the last parameters
  ExpressionPtr filter;                    // of a set block or a filter block
  ExpressionPtr condition;                 // of a for loop
  std::string name;                        // of a macro
  VariableRef variable;                    // of a macro
  Body body;
  Body elifs;      // of an if, each an if without elifs of its own
  Body otherwise;  // else
  bool recursive = false;

  Scope scope;                                   // of the body
  Scope else_scope;                              // of a loop's else
  Scope condition_scope;                         // of a loop's condition
  FunctionInfo function;                         // of a macro, a call block, a recursive loop
  FunctionInfo condition_function;               // of a loop's condition
  std::vector<ExpressionPtr> condition_targets;  // the loop's targets once more, in that function
  int loop_slot = -1;                            // of "loop", -1: not used
  bool uses_caller = false;  // macros: which of the hidden parameters their bodies read
  bool uses_kwargs = false;
  bool uses_varargs = false;
  bool explicit_caller = false;  // "caller" is among the parameters
  VariableRef caller, kwargs, varargs;
};

struct SyntaxTree {
  Body body;
  Scope scope;
  FunctionInfo function;
};

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_SYNTAX_TREE_H_
