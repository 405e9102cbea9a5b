#include "engine/text/jinja/resolver.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "engine/base/concat.h"
#include "engine/text/jinja/filters.h"

namespace winnow::engine::jinja {
namespace {

using Type = Expression::Type;

// One function of the compiled template: the root, a macro, ...
struct Function {
  Function* parent;
  FunctionInfo* info;
  std::map<std::pair<int, std::string>, int> slots;  // by level and name

  int Slot(int level, const std::string& name) {
    const auto [at, added] = slots.try_emplace({level, name}, info->slots);
    if (added) ++info->slots;
    return at->second;
  }
};

struct Place {
  Function* function;
  int slot;
};

VariableRef RefFrom(const Function* from, const Place& place) {
  VariableRef ref{0, place.slot};
  for (; from != place.function; from = from->parent) ++ref.hops;
  return ref;
}

// The names of one scope.
struct Symbols {
  struct Load {
    ScopeLoad::Action action;
    std::string name;
    std::optional<Place> alias;
  };

  Symbols(Symbols* parent_scope, Function* of)
      : parent(parent_scope),
        function(of),
        level(parent_scope == nullptr ? 0 : parent_scope->level + 1) {}

  Symbols* parent;
  Function* function;
  int level;
  std::map<std::string, Place> refs;
  std::vector<std::pair<int, Load>> loads;  // by slot, in order
  std::set<std::string> stores;

  const Place* Find(const std::string& name) const {
    for (const Symbols* scope = this; scope != nullptr; scope = scope->parent) {
      const auto found = scope->refs.find(name);
      if (found != scope->refs.end()) return &found->second;
    }
    return nullptr;
  }

  void SetLoad(int slot, Load load) {
    for (auto& [known, old] : loads) {
      if (known == slot) {
        old = std::move(load);
        return;
      }
    }
    loads.emplace_back(slot, std::move(load));
  }

  void Define(const std::string& name, Load load) {
    const Place place{function, function->Slot(level, name)};
    refs[name] = place;
    SetLoad(place.slot, std::move(load));
  }

  void Store(const std::string& name) {
    stores.insert(name);
    if (refs.contains(name)) return;
    const Place* outer = parent == nullptr ? nullptr : parent->Find(name);
    if (outer != nullptr) {
      Define(name, {ScopeLoad::kAlias, name, *outer});
    } else {
      Define(name, {ScopeLoad::kUndefined, name, {}});
    }
  }

  void DeclareParameter(const std::string& name) {
    stores.insert(name);
    Define(name, {ScopeLoad::kParameter, name, {}});
  }

  void LoadName(const std::string& name) {
    if (Find(name) == nullptr) Define(name, {ScopeLoad::kResolve, name, {}});
  }

  // Joins what the branches of an if have found out. A variable that only some of them set keeps
  // the value that it had.
  void Update(const std::vector<Symbols>& branches) {
    std::set<std::string> set;
    for (const Symbols& branch : branches) set.insert(branch.stores.begin(), branch.stores.end());
    for (const std::string& name : stores) set.erase(name);
    for (const Symbols& branch : branches) {
      for (const auto& [name, place] : branch.refs) refs[name] = place;
      for (const auto& [slot, load] : branch.loads) SetLoad(slot, load);
      stores.insert(branch.stores.begin(), branch.stores.end());
    }
    for (const std::string& name : set) {
      const Place* outer = parent == nullptr ? nullptr : parent->Find(name);
      const int slot = Find(name)->slot;
      if (outer != nullptr) {
        SetLoad(slot, {ScopeLoad::kAlias, name, *outer});
      } else {
        SetLoad(slot, {ScopeLoad::kResolve, name, {}});
      }
    }
  }

  Scope Export() const {
    Scope scope;
    for (const auto& [slot, load] : loads) {
      ScopeLoad out{load.action, slot, load.name, {}};
      if (load.alias) out.alias = RefFrom(function, *load.alias);
      scope.loads.push_back(std::move(out));
    }
    return scope;
  }
};

// ---- the names that a scope mentions ----

class NameVisitor {
 public:
  explicit NameVisitor(Symbols* symbols) : symbols_(symbols) {}

  void Visit(const ExpressionPtr& node, bool as_parameter = false) {
    if (node == nullptr) return;
    if (node->type == Type::kName) {
      if (as_parameter) {
        symbols_->DeclareParameter(node->name);
      } else if (node->stores) {
        symbols_->Store(node->name);
      } else {
        symbols_->LoadName(node->name);
      }
    } else if (node->type == Type::kAttribute) {
      symbols_->LoadName(node->name);
    }
    for (const ExpressionPtr& child : node->children) Visit(child, as_parameter);
    for (const auto& [name, value] : node->keywords) Visit(value, as_parameter);
    Visit(node->dynamic_arguments, as_parameter);
    Visit(node->dynamic_keywords, as_parameter);
  }
  void Visit(const std::vector<ExpressionPtr>& nodes, bool as_parameter = false) {
    for (const ExpressionPtr& node : nodes) Visit(node, as_parameter);
  }

  // Stops where a scope of its own begins, at what belongs to the outer one.
  void Visit(const Statement& node) {
    switch (node.type) {
      case Statement::kOutput:
      case Statement::kCallBlock:  // the call, not the body
      case Statement::kFor:        // what it loops over
      case Statement::kWith:       // the values
        Visit(node.expressions);
        return;
      case Statement::kSet:
        Visit(node.expressions);
        Visit(node.targets);
        return;
      case Statement::kSetBlock:
        Visit(node.targets);
        return;
      case Statement::kMacro:
        symbols_->Store(node.name);
        return;
      case Statement::kFilterBlock:
        Visit(node.filter);
        return;
      case Statement::kIf:
        VisitIf(node);
        return;
      case Statement::kBreak:
      case Statement::kContinue:
      case Statement::kGeneration:
        return;
    }
  }
  void Visit(const Body& body) {
    for (const StatementPtr& statement : body) Visit(*statement);
  }

 private:
  void VisitIf(const Statement& node) {
    Visit(node.expressions);
    Symbols* const outer = symbols_;
    std::vector<Symbols> branches;
    branches.reserve(3);
    for (const Body* body : {&node.body, &node.elifs, &node.otherwise}) {
      branches.push_back(*outer);
      symbols_ = &branches.back();
      Visit(*body);
    }
    symbols_ = outer;
    outer->Update(branches);
  }

  Symbols* symbols_;
};

// ---- names that a body reads and nothing in it sets before ----

class UndeclaredNames {
 public:
  explicit UndeclaredNames(std::set<std::string> names) : names_(std::move(names)) {}
  std::set<std::string> In(const Body& body) {
    Visit(body);
    return found_;
  }

 private:
  void Visit(const ExpressionPtr& node) {
    if (node == nullptr) return;
    if (node->type == Type::kName) {
      if (!node->stores && names_.contains(node->name)) {
        found_.insert(node->name);
      } else {
        names_.erase(node->name);
      }
    }
    for (const ExpressionPtr& child : node->children) Visit(child);
    for (const auto& [name, value] : node->keywords) Visit(value);
    Visit(node->dynamic_arguments);
    Visit(node->dynamic_keywords);
  }
  void Visit(const std::vector<ExpressionPtr>& nodes) {
    for (const ExpressionPtr& node : nodes) Visit(node);
  }
  void Visit(const Body& body) {
    for (const StatementPtr& statement : body) Visit(*statement);
  }
  // In the order of the fields of Jinja's nodes.
  void Visit(const Statement& node) {
    switch (node.type) {
      case Statement::kFor:
        Visit(node.targets);
        Visit(node.expressions);
        Visit(node.body);
        Visit(node.otherwise);
        Visit(node.condition);
        return;
      case Statement::kIf:
        Visit(node.expressions);
        Visit(node.body);
        Visit(node.elifs);
        Visit(node.otherwise);
        return;
      case Statement::kMacro:
        Visit(node.targets);
        Visit(node.defaults);
        Visit(node.body);
        return;
      case Statement::kCallBlock:
        Visit(node.expressions);
        Visit(node.targets);
        Visit(node.defaults);
        Visit(node.body);
        return;
      case Statement::kFilterBlock:
        Visit(node.body);
        Visit(node.filter);
        return;
      default:
        Visit(node.targets);
        Visit(node.filter);
        Visit(node.expressions);
        Visit(node.body);
        return;
    }
  }

  std::set<std::string> names_;
  std::set<std::string> found_;
};

bool Stores(const ExpressionPtr& node, std::string_view name) {
  if (node == nullptr) return false;
  if (node->type == Type::kName && node->stores && node->name == name) return true;
  return std::any_of(node->children.begin(), node->children.end(),
                     [&](const ExpressionPtr& child) { return Stores(child, name); });
}

bool Stores(const Body& body, std::string_view name) {
  for (const StatementPtr& statement : body) {
    for (const ExpressionPtr& target : statement->targets) {
      if (Stores(target, name)) return true;
    }
    if (Stores(statement->body, name) || Stores(statement->elifs, name) ||
        Stores(statement->otherwise, name)) {
      return true;
    }
  }
  return false;
}

ExpressionPtr CloneTarget(const Expression& node) {
  auto out = std::make_unique<Expression>();
  out->type = node.type;
  out->line = node.line;
  out->name = node.name;
  out->attribute = node.attribute;
  out->stores = node.stores;
  for (const ExpressionPtr& child : node.children) out->children.push_back(CloneTarget(*child));
  return out;
}

// ---- the walk that fills everything in ----

class Resolver {
 public:
  absl::Status Run(SyntaxTree* tree) {
    Function root{nullptr, &tree->function, {}};
    Symbols symbols(nullptr, &root);
    NameVisitor(&symbols).Visit(tree->body);
    tree->scope = symbols.Export();
    Walk(tree->body, {&symbols, false});
    return error_;
  }

 private:
  // Where the walk is. `soft`: what may never run, so that an unknown filter is an error only there.
  struct Frame {
    Symbols* symbols;
    bool soft;
    Function* function() const { return symbols->function; }
    Frame Soft() const { return {symbols, true}; }
  };

  void Fail(int line, std::string_view message) {
    if (error_.ok()) error_ = absl::InvalidArgumentError(Concat("line ", line, ": ", message));
  }

  static VariableRef Ref(const std::string& name, const Frame& frame) {
    return RefFrom(frame.function(), *frame.symbols->Find(name));
  }

  void Walk(const ExpressionPtr& node, const Frame& frame) {
    if (node == nullptr) return;
    if (node->type == Type::kName || node->type == Type::kAttribute) {
      // Jinja forgets the names in the filter of a set block.
      if (frame.symbols->Find(node->name) == nullptr) frame.symbols->LoadName(node->name);
      node->variable = Ref(node->name, frame);
    }
    if (node->type == Type::kFilter && !frame.soft && !IsFilter(node->name)) {
      Fail(node->line, Concat("no filter named '", node->name, "'"));
    }
    if (node->type == Type::kTest && !frame.soft && !IsTest(node->name)) {
      Fail(node->line, Concat("no test named '", node->name, "'"));
    }
    const Frame inner = node->type == Type::kCondition ? frame.Soft() : frame;
    for (const ExpressionPtr& child : node->children) Walk(child, inner);
    for (const auto& [name, value] : node->keywords) Walk(value, inner);
    Walk(node->dynamic_arguments, inner);
    Walk(node->dynamic_keywords, inner);
  }
  void Walk(const std::vector<ExpressionPtr>& nodes, const Frame& frame) {
    for (const ExpressionPtr& node : nodes) Walk(node, frame);
  }
  void Walk(const Body& body, const Frame& frame) {
    for (const StatementPtr& statement : body) Walk(statement.get(), frame);
  }

  void Walk(Statement* node, const Frame& frame) {
    switch (node->type) {
      case Statement::kOutput:
      case Statement::kSet:
        Walk(node->expressions, frame);
        Walk(node->targets, frame);
        return;
      case Statement::kIf: {
        const Frame soft = frame.Soft();
        Walk(node->expressions, soft);
        Walk(node->body, soft);
        Walk(node->elifs, soft);
        Walk(node->otherwise, soft);
        return;
      }
      case Statement::kFor:
        WalkFor(node, frame);
        return;
      case Statement::kMacro:
        node->variable = Ref(node->name, frame);
        WalkFunction(node, frame);
        return;
      case Statement::kCallBlock:
        Walk(node->expressions, frame);
        WalkFunction(node, frame);
        return;
      case Statement::kGeneration:
        WalkFunction(node, frame);
        return;
      case Statement::kSetBlock: {
        Walk(node->targets, frame);
        Symbols symbols(frame.symbols, frame.function());
        NameVisitor visitor(&symbols);
        visitor.Visit(node->body);
        visitor.Visit(node->filter);
        WalkScope(node, &symbols);
        return;
      }
      case Statement::kFilterBlock: {
        Symbols symbols(frame.symbols, frame.function());
        NameVisitor visitor(&symbols);
        visitor.Visit(node->body);
        visitor.Visit(node->filter);
        WalkScope(node, &symbols);
        return;
      }
      case Statement::kWith: {
        Walk(node->expressions, frame);
        Symbols symbols(frame.symbols, frame.function());
        NameVisitor visitor(&symbols);
        visitor.Visit(node->targets, /*as_parameter=*/true);
        visitor.Visit(node->body);
        Walk(node->targets, {&symbols, false});
        WalkScope(node, &symbols);
        return;
      }
      case Statement::kBreak:
      case Statement::kContinue:
        return;
    }
  }

  void WalkScope(Statement* node, Symbols* symbols) {
    const Frame frame{symbols, false};
    Walk(node->filter, frame);
    Walk(node->body, frame);
    node->scope = symbols->Export();
  }

  void WalkFunction(Statement* node, const Frame& frame) {
    Function function{frame.function(), &node->function, {}};
    Symbols symbols(frame.symbols, &function);
    NameVisitor visitor(&symbols);
    visitor.Visit(node->targets, /*as_parameter=*/true);
    visitor.Visit(node->defaults);
    visitor.Visit(node->body);
    std::set<std::string> parameters;
    for (const ExpressionPtr& target : node->targets) parameters.insert(target->name);
    node->explicit_caller = parameters.contains("caller");
    const std::set<std::string> hidden =
        UndeclaredNames({"caller", "kwargs", "varargs"}).In(node->body);
    const auto declare = [&](const char* name, VariableRef* ref) {
      if (!hidden.contains(name) || parameters.contains(name)) return false;
      symbols.DeclareParameter(name);
      *ref = RefFrom(&function, *symbols.Find(name));
      return true;
    };
    if (hidden.contains("caller") && node->explicit_caller && !HasDefault(*node, "caller")) {
      Fail(node->line, "the parameter 'caller' must be omitted or have a default");
    }
    node->uses_caller =
        declare("caller", &node->caller) || (hidden.contains("caller") && node->explicit_caller);
    node->uses_kwargs = declare("kwargs", &node->kwargs);
    node->uses_varargs = declare("varargs", &node->varargs);
    const Frame inner{&symbols, false};
    Walk(node->targets, inner);
    Walk(node->defaults, inner);
    Walk(node->body, inner);
    node->scope = symbols.Export();
  }

  static bool HasDefault(const Statement& node, std::string_view name) {
    const size_t first = node.targets.size() - node.defaults.size();
    for (size_t i = first; i < node.targets.size(); ++i) {
      if (node.targets[i]->name == name) return true;
    }
    return false;
  }

  void WalkFor(Statement* node, const Frame& frame) {
    Walk(node->expressions, frame);
    const auto stores_loop = [](const ExpressionPtr& target) { return Stores(target, "loop"); };
    if (std::any_of(node->targets.begin(), node->targets.end(), stores_loop) ||
        Stores(node->body, "loop") || Stores(node->otherwise, "loop")) {
      Fail(node->line, "can't assign to the special variable 'loop' in a for loop");
    }
    // A loop that calls itself is a function of its own.
    Function own{frame.function(), &node->function, {}};
    Function* const function = node->recursive ? &own : frame.function();
    Symbols symbols(frame.symbols, function);
    const bool extended = node->recursive || !UndeclaredNames({"loop"}).In(node->body).empty();
    if (extended) symbols.DeclareParameter("loop");
    NameVisitor visitor(&symbols);
    visitor.Visit(node->targets, /*as_parameter=*/true);
    visitor.Visit(node->body);
    if (extended) node->loop_slot = symbols.Find("loop")->slot;
    if (node->condition != nullptr) WalkCondition(node, frame);
    const Frame inner{&symbols, false};
    Walk(node->targets, inner);
    Walk(node->body, inner);
    node->scope = symbols.Export();
    Symbols else_symbols(frame.symbols, function);
    NameVisitor(&else_symbols).Visit(node->otherwise);
    Walk(node->otherwise, {&else_symbols, false});
    node->else_scope = else_symbols.Export();
  }

  // The condition runs in a generator with variables of its own.
  void WalkCondition(Statement* node, const Frame& frame) {
    Function function{frame.function(), &node->condition_function, {}};
    Symbols symbols(frame.symbols, &function);
    for (const ExpressionPtr& target : node->targets) {
      node->condition_targets.push_back(CloneTarget(*target));
    }
    NameVisitor visitor(&symbols);
    visitor.Visit(node->condition_targets, /*as_parameter=*/true);
    visitor.Visit(node->condition);
    const Frame inner{&symbols, false};
    Walk(node->condition_targets, inner);
    Walk(node->condition, inner);
    node->condition_scope = symbols.Export();
  }

  absl::Status error_;
};

}  // namespace

absl::Status Resolve(SyntaxTree* tree) { return Resolver().Run(tree); }

}  // namespace winnow::engine::jinja
