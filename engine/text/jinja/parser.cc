#include "engine/text/jinja/parser.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <initializer_list>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/jinja/lexer.h"

namespace winnow::engine::jinja {
namespace {

using Type = Expression::Type;

// Recursive descent. The first error sticks: afterwards the parser only runs to its end, because
// every token that it then sees is the last one.
class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  absl::StatusOr<SyntaxTree> Run() {
    SyntaxTree tree;
    tree.body = ParseBody({});
    if (!error_.ok()) return error_;
    return tree;
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  // ---- tokens ----
  const Token& Current() const { return tokens_[at_]; }
  const Token& Look() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  bool failed() const { return !error_.ok(); }

  Token Next() {
    Token token = Current();
    if (at_ + 1 < tokens_.size()) ++at_;
    return token;
  }
  void Fail(int line, std::string_view message) {
    if (!failed()) error_ = absl::InvalidArgumentError(Concat("line ", line, ": ", message));
    at_ = tokens_.size() - 1;
  }
  static std::string Describe(const Token& token) {
    switch (token.type) {
      case TokenType::kData:
        return "template text";
      case TokenType::kVariableBegin:
        return "{{";
      case TokenType::kVariableEnd:
        return "}}";
      case TokenType::kBlockBegin:
        return "{%";
      case TokenType::kBlockEnd:
        return "%}";
      case TokenType::kEnd:
        return "the end of the template";
      case TokenType::kString:
        return "a string";
      default:
        return Concat("'", token.text, "'");
    }
  }
  void FailExpected(std::string_view what) {
    Fail(Current().line, Concat("expected ", what, ", got ", Describe(Current())));
  }
  bool At(TokenType type) const { return Current().type == type; }
  bool AtName(std::string_view name) const { return Current().IsName(name); }
  bool AtOperator(std::string_view op) const { return Current().IsOperator(op); }
  bool SkipName(std::string_view name) {
    if (!AtName(name)) return false;
    Next();
    return true;
  }
  bool SkipOperator(std::string_view op) {
    if (!AtOperator(op)) return false;
    Next();
    return true;
  }
  void ExpectOperator(std::string_view op) {
    if (!SkipOperator(op)) FailExpected(Concat("'", op, "'"));
  }
  void ExpectName(std::string_view name) {
    if (!SkipName(name)) FailExpected(Concat("'", name, "'"));
  }
  std::string AnyName() {
    if (!At(TokenType::kName)) {
      FailExpected("a name");
      return "";
    }
    return Next().text;
  }
  void Expect(TokenType type, std::string_view what) {
    if (At(type)) {
      Next();
    } else {
      FailExpected(what);
    }
  }

  // Counts the nesting of everything that recurses.
  class Nesting {
   public:
    explicit Nesting(Parser* parser) : parser_(parser) {
      if (++parser->depth_ > kParserDepthMax) {
        parser->Fail(parser->Current().line, Concat("nested deeper than ", kParserDepthMax));
      }
    }
    ~Nesting() { --parser_->depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    Parser* parser_;
  };

  ExpressionPtr Make(Type type, int line) const {
    auto node = std::make_unique<Expression>();
    node->type = type;
    node->line = line;
    return node;
  }
  ExpressionPtr Make(Type type, int line, ExpressionPtr a, ExpressionPtr b = nullptr) {
    ExpressionPtr node = Make(type, line);
    Adopt(node.get(), std::move(a));
    if (b != nullptr) Adopt(node.get(), std::move(b));
    return node;
  }
  void CountDepth(Expression* parent, const ExpressionPtr& child) {
    if (child == nullptr) return;
    parent->depth = std::max(parent->depth, child->depth + 1);
    if (parent->depth > kExpressionDepthMax) {
      Fail(parent->line, Concat("an expression deeper than ", kExpressionDepthMax));
    }
  }
  // `child` may be null: a part that is not there.
  void Adopt(Expression* parent, ExpressionPtr child) {
    CountDepth(parent, child);
    parent->children.push_back(std::move(child));
  }
  StatementPtr MakeStatement(Statement::Type type, int line) const {
    auto node = std::make_unique<Statement>();
    node->type = type;
    node->line = line;
    return node;
  }

  // ---- statements ----

  // Until one of `ends`, which becomes the current token (after its {%); to the end without any.
  Body ParseBody(Names ends) {
    Body body;
    const Nesting nesting(this);
    while (!failed()) {
      const Token& token = Current();
      if (token.type == TokenType::kEnd) {
        if (ends.size() != 0) Fail(token.line, UnexpectedEnd(ends));
        break;
      }
      if (token.type == TokenType::kData) {
        ExpressionPtr text = Make(Type::kConstant, token.line);
        text->constant = Value::String(token.text);
        Next();
        AddOutput(&body, std::move(text));
      } else if (token.type == TokenType::kVariableBegin) {
        Next();
        ExpressionPtr value = ParseTuple();
        Expect(TokenType::kVariableEnd, "'}}'");
        if (!failed()) AddOutput(&body, std::move(value));
      } else {
        Next();  // {%
        for (std::string_view end : ends) {
          if (AtName(end)) return body;
        }
        StatementPtr statement = ParseStatement(ends);
        Expect(TokenType::kBlockEnd, "'%}'");
        if (statement != nullptr) body.push_back(std::move(statement));
      }
    }
    return body;
  }

  static std::string UnexpectedEnd(Names ends) {
    std::string text = "unexpected end of template, expected";
    for (std::string_view end : ends)
      text += Concat(text.ends_with("expected") ? " " : " or ", end);
    return text;
  }

  void AddOutput(Body* body, ExpressionPtr value) {
    if (body->empty() || body->back()->type != Statement::kOutput) {
      body->push_back(MakeStatement(Statement::kOutput, value->line));
    }
    body->back()->expressions.push_back(std::move(value));
  }

  // The body of a statement whose opening tag ends here.
  Body ParseStatements(Names ends, bool drop_needle = false) {
    SkipOperator(":");
    Expect(TokenType::kBlockEnd, "'%}'");
    Body body = ParseBody(ends);
    if (drop_needle) Next();
    return body;
  }

  StatementPtr ParseStatement(Names ends) {
    const Token token = Current();
    if (token.type != TokenType::kName) {
      FailExpected("a tag's name");
      return nullptr;
    }
    if (token.text == "for") return ParseFor();
    if (token.text == "if") return ParseIf();
    if (token.text == "set") return ParseSet();
    if (token.text == "macro") return ParseMacro();
    if (token.text == "call") return ParseCallBlock();
    if (token.text == "filter") return ParseFilterBlock();
    if (token.text == "with") return ParseWith();
    if (token.text == "print") return ParsePrint();
    if (token.text == "generation") return ParseGeneration();
    if (token.text == "break" || token.text == "continue") {
      Next();
      if (loops_ == 0) Fail(token.line, Concat("'", token.text, "' outside of a loop"));
      return MakeStatement(token.text == "break" ? Statement::kBreak : Statement::kContinue,
                           token.line);
    }
    for (const std::string_view refused :
         {"block", "extends", "include", "import", "from", "autoescape"}) {
      if (token.text == refused)
        Fail(token.line, Concat("the tag '", refused, "' is not supported"));
    }
    Fail(token.line, ends.size() == 0
                         ? Concat("unknown tag '", token.text, "'")
                         : Concat("unknown tag '", token.text, "', expected ", *ends.begin()));
    return nullptr;
  }

  StatementPtr ParseFor() {
    StatementPtr node = MakeStatement(Statement::kFor, Next().line);
    node->targets.push_back(ParseTarget(false, "in"));
    ExpectName("in");
    node->expressions.push_back(ParseTuple({.condition = false, .end_name = "recursive"}));
    if (SkipName("if")) node->condition = ParseExpression();
    node->recursive = SkipName("recursive");
    ++loops_;
    node->body = ParseStatements({"endfor", "else"});
    --loops_;
    if (Next().text == "else") node->otherwise = ParseStatements({"endfor"}, true);
    return node;
  }

  StatementPtr ParseIf() {
    StatementPtr node = MakeStatement(Statement::kIf, Next().line);
    node->expressions.push_back(ParseTuple({.condition = false}));
    node->body = ParseStatements({"elif", "else", "endif"});
    while (!failed()) {
      const Token token = Next();
      if (token.IsName("elif")) {
        StatementPtr elif = MakeStatement(Statement::kIf, token.line);
        elif->expressions.push_back(ParseTuple({.condition = false}));
        elif->body = ParseStatements({"elif", "else", "endif"});
        node->elifs.push_back(std::move(elif));
        continue;
      }
      if (token.IsName("else")) node->otherwise = ParseStatements({"endif"}, true);
      break;
    }
    return node;
  }

  StatementPtr ParseSet() {
    const int line = Next().line;
    ExpressionPtr target = ParseTarget(true, "");
    if (SkipOperator("=")) {
      StatementPtr node = MakeStatement(Statement::kSet, line);
      node->targets.push_back(std::move(target));
      node->expressions.push_back(ParseTuple());
      return node;
    }
    StatementPtr node = MakeStatement(Statement::kSetBlock, line);
    node->targets.push_back(std::move(target));
    node->filter = ParseFilters(nullptr, false);
    node->body = ParseStatements({"endset"}, true);
    return node;
  }

  // The body of what becomes a function, where the loops around it cannot be left.
  Body ParseFunctionBody(std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    Body body = ParseStatements({end}, true);
    loops_ = loops;
    return body;
  }

  StatementPtr ParseMacro() {
    StatementPtr node = MakeStatement(Statement::kMacro, Next().line);
    node->name = AnyName();
    ParseSignature(node.get());
    node->body = ParseFunctionBody("endmacro");
    return node;
  }

  StatementPtr ParseCallBlock() {
    StatementPtr node = MakeStatement(Statement::kCallBlock, Next().line);
    if (AtOperator("(")) ParseSignature(node.get());
    node->expressions.push_back(ParseExpression());
    if (!failed() && node->expressions[0]->type != Type::kCall) Fail(node->line, "expected a call");
    node->body = ParseFunctionBody("endcall");
    return node;
  }

  StatementPtr ParseGeneration() {
    StatementPtr node = MakeStatement(Statement::kGeneration, Next().line);
    node->body = ParseFunctionBody("endgeneration");
    return node;
  }

  StatementPtr ParseFilterBlock() {
    StatementPtr node = MakeStatement(Statement::kFilterBlock, Next().line);
    node->filter = ParseFilters(nullptr, true);
    node->body = ParseStatements({"endfilter"}, true);
    return node;
  }

  StatementPtr ParseWith() {
    StatementPtr node = MakeStatement(Statement::kWith, Next().line);
    while (!failed() && !At(TokenType::kBlockEnd)) {
      if (!node->targets.empty()) ExpectOperator(",");
      node->targets.push_back(ParseTarget(false, ""));
      ExpectOperator("=");
      node->expressions.push_back(ParseExpression());
    }
    node->body = ParseStatements({"endwith"}, true);
    return node;
  }

  StatementPtr ParsePrint() {
    StatementPtr node = MakeStatement(Statement::kOutput, Next().line);
    while (!failed() && !At(TokenType::kBlockEnd)) {
      if (!node->expressions.empty()) ExpectOperator(",");
      node->expressions.push_back(ParseExpression());
    }
    return node;
  }

  void ParseSignature(Statement* node) {
    ExpectOperator("(");
    while (!failed() && !AtOperator(")")) {
      if (!node->targets.empty()) ExpectOperator(",");
      ExpressionPtr parameter = Make(Type::kName, Current().line);
      parameter->name = AnyName();
      parameter->stores = true;
      CheckAssignable(*parameter);
      for (const ExpressionPtr& other : node->targets) {
        if (other->name == parameter->name) {
          Fail(parameter->line, Concat("duplicate parameter '", parameter->name, "'"));
        }
      }
      node->targets.push_back(std::move(parameter));
      if (SkipOperator("=")) {
        node->defaults.push_back(ParseExpression());
      } else if (!node->defaults.empty()) {
        Fail(Current().line, "a parameter without a default follows one with a default");
      }
    }
    ExpectOperator(")");
  }

  // ---- targets ----
  ExpressionPtr ParseTarget(bool with_namespace, std::string_view end_name) {
    ExpressionPtr target =
        ParseTuple({.simplified = true, .end_name = end_name, .with_namespace = with_namespace});
    if (target != nullptr) CheckAssignable(*target);
    return target;
  }

  void CheckAssignable(Expression& target) {
    switch (target.type) {
      case Type::kName:
        target.stores = true;
        for (const std::string_view reserved : {"true", "false", "none", "True", "False", "None"}) {
          if (target.name == reserved)
            Fail(target.line, Concat("can't assign to '", reserved, "'"));
        }
        return;
      case Type::kAttribute:
        return;
      case Type::kTuple:
        for (const ExpressionPtr& item : target.children) {
          if (item != nullptr) CheckAssignable(*item);
        }
        return;
      default:
        Fail(target.line, "can't assign to this expression");
    }
  }

  // ---- expressions ----
  struct TupleOptions {
    bool simplified = false;  // names and literals only
    bool condition = true;    // whether "a if b else c" may stand here
    std::string_view end_name = {};
    bool parentheses = false;
    bool with_namespace = false;
  };

  ExpressionPtr ParseTuple() { return ParseTuple(TupleOptions{}); }
  ExpressionPtr ParseTuple(TupleOptions options) {
    int line = Current().line;
    std::vector<ExpressionPtr> items;
    bool is_tuple = false;
    while (!failed()) {
      if (!items.empty()) ExpectOperator(",");
      if (At(TokenType::kVariableEnd) || At(TokenType::kBlockEnd) || AtOperator(")") ||
          (!options.end_name.empty() && AtName(options.end_name))) {
        break;
      }
      items.push_back(options.simplified ? ParsePrimary(options.with_namespace)
                                         : ParseExpression(options.condition));
      if (!AtOperator(",")) break;
      is_tuple = true;
      line = Current().line;
    }
    if (!is_tuple) {
      if (!items.empty()) return std::move(items[0]);
      if (!options.parentheses) FailExpected("an expression");
    }
    ExpressionPtr node = Make(Type::kTuple, line);
    for (ExpressionPtr& item : items) Adopt(node.get(), std::move(item));
    return node;
  }

  ExpressionPtr ParseExpression(bool condition = true) {
    const Nesting nesting(this);
    if (failed()) return Make(Type::kConstant, Current().line);
    return condition ? ParseCondition() : ParseOr();
  }

  ExpressionPtr ParseCondition() {
    int line = Current().line;
    ExpressionPtr value = ParseOr();
    while (SkipName("if")) {
      ExpressionPtr node = Make(Type::kCondition, line, ParseOr());
      Adopt(node.get(), std::move(value));
      Adopt(node.get(), SkipName("else") ? ParseExpression() : nullptr);
      value = std::move(node);
      line = Current().line;
    }
    return value;
  }

  ExpressionPtr ParseOr() {
    const int line = Current().line;
    ExpressionPtr left = ParseAnd();
    while (SkipName("or")) left = Make(Type::kOr, line, std::move(left), ParseAnd());
    return left;
  }

  ExpressionPtr ParseAnd() {
    const int line = Current().line;
    ExpressionPtr left = ParseNot();
    while (SkipName("and")) left = Make(Type::kAnd, line, std::move(left), ParseNot());
    return left;
  }

  ExpressionPtr ParseNot() {
    if (!AtName("not")) return ParseCompare();
    const Nesting nesting(this);
    const int line = Next().line;
    return Make(Type::kNot, line, ParseNot());
  }

  ExpressionPtr ParseCompare() {
    const int line = Current().line;
    ExpressionPtr first = ParseSum();
    ExpressionPtr node;
    while (!failed()) {
      std::string op;
      for (const std::string_view compare : {"==", "!=", "<", "<=", ">", ">="}) {
        if (AtOperator(compare)) op = compare;
      }
      if (!op.empty()) {
        Next();
      } else if (SkipName("in")) {
        op = "in";
      } else if (AtName("not") && Look().IsName("in")) {
        Next();
        Next();
        op = "not in";
      } else {
        break;
      }
      if (node == nullptr) node = Make(Type::kCompare, line, std::move(first));
      node->operators.push_back(std::move(op));
      Adopt(node.get(), ParseSum());
    }
    return node != nullptr ? std::move(node) : std::move(first);
  }

  ExpressionPtr Arithmetic(ExpressionPtr left, std::string op, ExpressionPtr right, int line) {
    ExpressionPtr node = Make(Type::kArithmetic, line, std::move(left), std::move(right));
    node->name = std::move(op);
    return node;
  }

  ExpressionPtr ParseSum() {
    const int line = Current().line;
    ExpressionPtr left = ParseConcat();
    while (AtOperator("+") || AtOperator("-")) {
      std::string op = Next().text;
      left = Arithmetic(std::move(left), std::move(op), ParseConcat(), line);
    }
    return left;
  }

  ExpressionPtr ParseConcat() {
    const int line = Current().line;
    ExpressionPtr first = ParseProduct();
    if (!AtOperator("~")) return first;
    ExpressionPtr node = Make(Type::kConcat, line, std::move(first));
    while (SkipOperator("~")) Adopt(node.get(), ParseProduct());
    return node;
  }

  ExpressionPtr ParseProduct() {
    const int line = Current().line;
    ExpressionPtr left = ParsePower();
    while (AtOperator("*") || AtOperator("/") || AtOperator("//") || AtOperator("%")) {
      std::string op = Next().text;
      left = Arithmetic(std::move(left), std::move(op), ParsePower(), line);
    }
    return left;
  }

  ExpressionPtr ParsePower() {
    const int line = Current().line;
    ExpressionPtr left = ParseUnary(true);
    while (SkipOperator("**")) left = Arithmetic(std::move(left), "**", ParseUnary(true), line);
    return left;
  }

  ExpressionPtr ParseUnary(bool with_filter) {
    const int line = Current().line;
    ExpressionPtr node;
    if (AtOperator("-") || AtOperator("+")) {
      const Nesting nesting(this);
      const Type type = Next().text == "-" ? Type::kNegative : Type::kPositive;
      node = Make(type, line, ParseUnary(false));
    } else {
      node = ParsePrimary(false);
    }
    node = ParsePostfix(std::move(node));
    return with_filter ? ParseFilterExpression(std::move(node)) : std::move(node);
  }

  ExpressionPtr ParsePrimary(bool with_namespace) {
    const Token token = Current();
    switch (token.type) {
      case TokenType::kName:
        Next();
        return NameOrConstant(token, with_namespace);
      case TokenType::kString: {
        ExpressionPtr node = Make(Type::kConstant, token.line);
        std::string text;
        while (At(TokenType::kString)) text += Next().text;
        node->constant = Value::String(std::move(text));
        return node;
      }
      case TokenType::kInteger:
        Next();
        return Integer(token);
      case TokenType::kFloat: {
        Next();
        ExpressionPtr node = Make(Type::kConstant, token.line);
        node->constant = Value::Float(std::strtod(token.text.c_str(), nullptr));
        return node;
      }
      default:
        break;
    }
    if (AtOperator("(")) {
      const Nesting nesting(this);
      Next();
      ExpressionPtr node = ParseTuple({.parentheses = true});
      ExpectOperator(")");
      return node;
    }
    if (AtOperator("[")) return ParseList();
    if (AtOperator("{")) return ParseDict();
    FailExpected("an expression");
    return Make(Type::kConstant, token.line);
  }

  ExpressionPtr NameOrConstant(const Token& token, bool with_namespace) {
    ExpressionPtr node = Make(Type::kConstant, token.line);
    const std::string& name = token.text;
    if (name == "true" || name == "True") {
      node->constant = Value::Bool(true);
    } else if (name == "false" || name == "False") {
      node->constant = Value::Bool(false);
    } else if (name == "none" || name == "None") {
      node->constant = Value::None();
    } else {
      node->type = Type::kName;
      node->name = name;
      if (with_namespace && SkipOperator(".")) {
        node->type = Type::kAttribute;
        node->attribute = AnyName();
      }
    }
    return node;
  }

  ExpressionPtr Integer(const Token& token) {
    ExpressionPtr node = Make(Type::kConstant, token.line);
    const char* digits = token.text.c_str();
    int base = 10;
    if (token.text.size() > 2 && token.text[0] == '0') {
      const char kind = token.text[1];
      base = kind == 'x' || kind == 'X'   ? 16
             : kind == 'o' || kind == 'O' ? 8
             : kind == 'b' || kind == 'B' ? 2
                                          : 10;
      if (base != 10) digits += 2;
    }
    errno = 0;
    node->constant = Value::Int(std::strtoll(digits, nullptr, base));
    if (errno != 0)
      Fail(token.line, Concat("the number ", token.text.substr(0, 40), " is too large"));
    return node;
  }

  ExpressionPtr ParseList() {
    ExpressionPtr node = Make(Type::kList, Next().line);
    while (!failed() && !AtOperator("]")) {
      if (!node->children.empty()) ExpectOperator(",");
      if (AtOperator("]")) break;
      Adopt(node.get(), ParseExpression());
    }
    ExpectOperator("]");
    return node;
  }

  ExpressionPtr ParseDict() {
    ExpressionPtr node = Make(Type::kDict, Next().line);
    while (!failed() && !AtOperator("}")) {
      if (!node->children.empty()) ExpectOperator(",");
      if (AtOperator("}")) break;
      Adopt(node.get(), ParseExpression());
      ExpectOperator(":");
      Adopt(node.get(), ParseExpression());
    }
    ExpectOperator("}");
    return node;
  }

  ExpressionPtr ParsePostfix(ExpressionPtr node) {
    while (!failed()) {
      if (AtOperator(".") || AtOperator("[")) {
        node = ParseSubscript(std::move(node));
      } else if (AtOperator("(")) {
        node = ParseCall(std::move(node));
      } else {
        break;
      }
    }
    return node;
  }

  ExpressionPtr ParseFilterExpression(ExpressionPtr node) {
    while (!failed()) {
      if (AtOperator("|")) {
        node = ParseFilters(std::move(node), false);
      } else if (AtName("is")) {
        node = ParseTest(std::move(node));
      } else if (AtOperator("(")) {
        node = ParseCall(std::move(node));
      } else {
        break;
      }
    }
    return node;
  }

  ExpressionPtr ParseSubscript(ExpressionPtr object) {
    const Token token = Next();
    if (token.text == ".") {
      const Token name = Next();
      if (name.type == TokenType::kName) {
        ExpressionPtr node = Make(Type::kGetAttribute, token.line, std::move(object));
        node->name = name.text;
        return node;
      }
      if (name.type != TokenType::kInteger)
        Fail(name.line, "expected a name or a number after '.'");
      return Make(Type::kGetItem, token.line, std::move(object), Integer(name));
    }
    if (IsSlice()) return ParseSlice(std::move(object), token.line);
    std::vector<ExpressionPtr> items;
    while (!failed() && !AtOperator("]")) {
      if (!items.empty()) ExpectOperator(",");
      ExpressionPtr item = ParseExpression();
      if (AtOperator(":")) {
        if (!items.empty()) Fail(token.line, "a slice among several indexes is not supported");
        return ParseSlice(std::move(object), token.line, std::move(item));
      }
      items.push_back(std::move(item));
    }
    ExpectOperator("]");
    if (items.size() == 1)
      return Make(Type::kGetItem, token.line, std::move(object), std::move(items[0]));
    ExpressionPtr tuple = Make(Type::kTuple, token.line);
    for (ExpressionPtr& item : items) Adopt(tuple.get(), std::move(item));
    return Make(Type::kGetItem, token.line, std::move(object), std::move(tuple));
  }

  bool IsSlice() const { return AtOperator(":"); }

  ExpressionPtr ParseSlice(ExpressionPtr object, int line, ExpressionPtr start = nullptr) {
    ExpressionPtr node = Make(Type::kSlice, line, std::move(object));
    Adopt(node.get(), std::move(start));
    ExpectOperator(":");
    const auto part = [&]() -> ExpressionPtr {
      return AtOperator(":") || AtOperator("]") || AtOperator(",") ? nullptr : ParseExpression();
    };
    Adopt(node.get(), part());
    Adopt(node.get(), SkipOperator(":") ? part() : nullptr);
    if (AtOperator(",")) Fail(line, "a slice among several indexes is not supported");
    ExpectOperator("]");
    return node;
  }

  void ParseArguments(Expression* node) {
    const int line = Current().line;
    const Nesting nesting(this);
    ExpectOperator("(");
    const auto ensure = [&](bool sound) {
      if (!sound) Fail(line, "invalid syntax for a function call");
    };
    bool first = true;
    while (!failed() && !AtOperator(")")) {
      if (!first) {
        ExpectOperator(",");
        if (AtOperator(")")) break;
      }
      first = false;
      if (SkipOperator("*")) {
        ensure(node->dynamic_arguments == nullptr && node->dynamic_keywords == nullptr);
        node->dynamic_arguments = ParseExpression();
        CountDepth(node, node->dynamic_arguments);
      } else if (SkipOperator("**")) {
        ensure(node->dynamic_keywords == nullptr);
        node->dynamic_keywords = ParseExpression();
        CountDepth(node, node->dynamic_keywords);
      } else if (At(TokenType::kName) && Look().IsOperator("=")) {
        ensure(node->dynamic_keywords == nullptr);
        std::string name = Next().text;
        Next();
        for (const auto& [other, value] : node->keywords) {
          if (other == name) Fail(line, Concat("the argument '", name, "' is given twice"));
        }
        node->keywords.emplace_back(std::move(name), ParseExpression());
        CountDepth(node, node->keywords.back().second);
      } else {
        ensure(node->dynamic_arguments == nullptr && node->dynamic_keywords == nullptr &&
               node->keywords.empty());
        Adopt(node, ParseExpression());
      }
    }
    ExpectOperator(")");
  }

  ExpressionPtr ParseCall(ExpressionPtr callee) {
    ExpressionPtr node = Make(Type::kCall, Current().line, std::move(callee));
    ParseArguments(node.get());
    return node;
  }

  // "| a | b(c)", or with `inline_start` "a | b(c)".
  ExpressionPtr ParseFilters(ExpressionPtr input, bool inline_start) {
    while (!failed() && (inline_start || AtOperator("|"))) {
      if (!inline_start) Next();
      inline_start = false;
      const int line = Current().line;
      std::string name = AnyName();
      while (SkipOperator(".")) name.append(1, '.').append(AnyName());
      ExpressionPtr node = Make(Type::kFilter, line);
      Adopt(node.get(), std::move(input));
      node->name = std::move(name);
      if (AtOperator("(")) ParseArguments(node.get());
      input = std::move(node);
    }
    return input;
  }

  ExpressionPtr ParseTest(ExpressionPtr value) {
    const int line = Next().line;
    const bool negated = SkipName("not");
    ExpressionPtr node = Make(Type::kTest, line, std::move(value));
    node->name = AnyName();
    while (SkipOperator(".")) node->name += "." + AnyName();
    const TokenType type = Current().type;
    if (AtOperator("(")) {
      ParseArguments(node.get());
    } else if ((type == TokenType::kName || type == TokenType::kString ||
                type == TokenType::kInteger || type == TokenType::kFloat || AtOperator("[") ||
                AtOperator("{")) &&
               !AtName("else") && !AtName("or") && !AtName("and")) {
      if (AtName("is")) Fail(line, "tests with 'is' cannot be chained");
      Adopt(node.get(), ParsePostfix(ParsePrimary(false)));
    }
    return negated ? Make(Type::kNot, line, std::move(node)) : std::move(node);
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;  // around the current place, in the same function
  absl::Status error_;
};

}  // namespace

absl::StatusOr<SyntaxTree> Parse(std::string_view source) {
  WINNOW_ASSIGN_OR_RETURN(std::vector<Token> tokens, Tokenize(source));
  return Parser(std::move(tokens)).Run();
}

}  // namespace winnow::engine::jinja
