#include "engine/grammar/grammar.h"

#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <set>

#include "engine/grammar/grammar_check.h"
#include "engine/grammar/grammar_worker.h"
#include "tests/unit/engine/grammar_testing.h"

namespace winnow::engine {
namespace {

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

TEST(GrammarCheckTest, SchemasThatCouldNotBeKeptAreRefusedByName) {
  const std::vector<std::pair<std::string, std::string>> kRefused = {
      {R"({"type": "string", "minLength": 3)", "is not JSON"},
      {R"(3)", "#: a schema is an object"},
      {R"({"properties": {"a": {"minLength": 3}}})", "#/properties/a: minLength needs a type"},
      {R"({"anyOf": [{"type": "string"}], "minLength": 2})", "#: minLength beside anyOf"},
      {R"({"$ref": "#/$defs/a", "type": "string"})", "#: type beside $ref"},
      {R"({"type": "string", "const": 5})", "#: const is not of the type"},
      {R"({"type": ["string", "null"], "enum": ["a", null, 2]})", "enum has a value"},
      {R"({"type": "object", "dependencies": {}})", "dependencies is not supported"},
      {R"({"type": "array", "uniqueItems": true})", "uniqueItems is not supported"},
      {R"({"properties": {"a": {"not": {"type": "string"}}}})", "#/properties/a: not is not"},
      {R"({"if": {}, "then": {}})", "if is not supported"},
      {R"({"type": "array", "contains": {"const": 1}})", "contains is not supported"},
      {R"({"type": "array", "items": {"type": "string", "format": "iri"}})",
       "#/items: the format iri"},
      {R"({"type": "string", "pattern": 4})", "pattern must be a string"},
      {R"({"type": "object", "required": [1]})", "required must be a list of strings"},
      {R"({"anyOf": {"type": "string"}})", "anyOf must be a list"},
      {R"({"$defs": {"a": {"prefixItems": [{"maxItems": 2}]}}})",
       "#/$defs/a/prefixItems/0: maxItems"},
      {std::string(200, '[') + std::string(200, ']'), "nested deeper than"},
      {"\"" + std::string(kMaxGrammarBytes, 'a') + "\"", "may have at most"},
      {"", "must not be empty"},
      {"\"\xff\"", "is not UTF-8"},
  };
  for (const auto& [schema, message] : kRefused) {
    const absl::Status status = CheckGrammarSource({GrammarKind::kJsonSchema, schema});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << schema;
    EXPECT_NE(MessageOf(status).find(message), std::string::npos) << schema << ": " << status;
  }
  const absl::Status tag = CheckGrammarSource(
      {GrammarKind::kStructuralTag,
       R"({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"minItems": 2}}})"});
  EXPECT_NE(MessageOf(tag).find("#/format/json_schema: minItems"), std::string::npos) << tag;
}

TEST(GrammarCheckTest, AnnotationsAndWhatSaysNothingAboutTheTypePass) {
  for (
      const char* const schema :
      {R"({"title": "T", "description": "d", "type": "integer", "minLength": 4, "default": 3, "x-own": {}})",
       R"({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": 1}}})",
       R"({"type": "string", "enum": ["a", "b"], "description": "one of two"})", "true"}) {
    EXPECT_TRUE(CheckGrammarSource({GrammarKind::kJsonSchema, schema}).ok()) << schema;
  }
}

TEST(GrammarTest, ABuildWithoutItSaysSo) {
  const auto library = GrammarLibrary::Make(TestVocabulary());
  EXPECT_EQ(library.ok(), HasGrammars());
  if (HasGrammars()) return;
  EXPECT_EQ(library.status().code(), absl::StatusCode::kUnimplemented);
}

TEST(GrammarTest, VocabulariesHaveTheBytesOfText) {
  const GrammarVocabulary vocabulary = TestVocabulary();
  EXPECT_EQ(vocabulary.tokens[kEndToken], "");
  EXPECT_EQ(vocabulary.tokens[0], "\xff<|begin_of_text|>") << "a control token";
  // Any text, half characters included.
  for (const std::string text :
       {"{\"name\": \"Zoë\", \"n\": [1, 2]}", "日本語 🙂\n\tx", "\x01\x7f"}) {
    std::string bytes;
    const auto ids = TestTokenizer().Encode(text, false, false);
    ASSERT_TRUE(ids.ok());
    for (const int32_t id : *ids) {
      bytes += vocabulary.tokens[static_cast<size_t>(id)];
    }
    EXPECT_EQ(bytes, text);
  }
}

// A grammar of the test's own: it takes its time, or allows nothing.
class FakeGrammar final : public Grammar {
 public:
  explicit FakeGrammar(std::function<uint32_t()> allowed) : allowed_(std::move(allowed)) {}
  std::unique_ptr<GrammarState> NewState() const override {
    return std::make_unique<State>(allowed_);
  }
  size_t size_bytes() const override { return 1; }

 private:
  class State final : public GrammarState {
   public:
    explicit State(const std::function<uint32_t()>& allowed) : allowed_(allowed) {}
    std::span<const uint32_t> AllowedTokens() override {
      words_.assign(kernels::AllowedWords(300), allowed_());
      return words_;
    }
    bool Accept(int32_t) override { return true; }
    std::unique_ptr<GrammarState> Clone() const override {
      return std::make_unique<State>(allowed_);
    }

   private:
    const std::function<uint32_t()> allowed_;
    std::vector<uint32_t> words_;
  };
  const std::function<uint32_t()> allowed_;
};

TEST(GrammarFaultTest, EndsItsOwnRequestAndNobodyElses) {
  FakeClock clock;
  FakeModel model;
  auto engine =
      Engine::Create({.max_running = 8, .step_tokens = 64}, model, TestTokenizer(), clock);
  ASSERT_TRUE(engine.ok());
  int steps = 0;
  const auto slow = std::make_shared<FakeGrammar>([&] {
    if (++steps == 3) clock.Advance(std::chrono::seconds(1));
    return ~0u;
  });
  const auto nothing = std::make_shared<FakeGrammar>([] { return 0u; });
  Client of_slow, of_nothing, of_none;
  Request request = MakeRequest(1, {5, 6}, 20);
  request.grammar = slow;
  ASSERT_TRUE((*engine)->Submit(request, of_slow.output).ok());
  request.id = 2;
  request.grammar = nothing;
  ASSERT_TRUE((*engine)->Submit(request, of_nothing.output).ok());
  ASSERT_TRUE((*engine)->Submit(MakeRequest(3, {5, 6}, 20), of_none.output).ok());
  while ((*engine)->Step()) {
  }
  EXPECT_EQ(of_slow.Read().last.finish, FinishReason::kError);
  EXPECT_EQ(of_slow.reply.last.error_code, absl::StatusCode::kInvalidArgument);
  EXPECT_NE(of_slow.reply.last.error.find("took 1s"), std::string::npos)
      << of_slow.reply.last.error;
  EXPECT_EQ(of_slow.reply.tokens.size(), 2u);
  EXPECT_EQ(of_nothing.Read().last.error_code, absl::StatusCode::kInvalidArgument);
  EXPECT_NE(of_nothing.reply.last.error.find("allows no token"), std::string::npos);
  EXPECT_EQ(of_none.Read().last.finish, FinishReason::kMaxTokens);
}

// An answer that is there has come in time, however late it is read; one that comes in parts is asked about.
TEST(GrammarWorkerTest, AFrameThatIsThereIsReadWithoutAsking) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  const auto too_late = [] { return absl::InvalidArgumentError("too late"); };
  ASSERT_TRUE(WriteGrammarFrame(sockets[0], 7, "an answer").ok());
  GrammarFrame frame;
  const absl::Status read = ReadGrammarFrame(sockets[1], 100, too_late, &frame);
  EXPECT_TRUE(read.ok()) << read;
  EXPECT_EQ(frame.bytes, "an answer");
  ASSERT_EQ(write(sockets[0], "\7\0", 2), 2);  // of a frame's head
  EXPECT_EQ(MessageOf(ReadGrammarFrame(sockets[1], 100, too_late, &frame)), "too late");
  close(sockets[0]);
  EXPECT_TRUE(absl::IsUnavailable(ReadGrammarFrame(sockets[1], 100, too_late, &frame)));
  close(sockets[1]);
}

// The tests below need xgrammar. CMake says why it has none; these tests are not there then.
#ifdef WINNOW_HAS_XGRAMMAR

class GrammarOfXgrammarTest : public testing::Test {};

// A clone goes its own way from where it was made, to the end and beyond what the other takes.
TEST_F(GrammarOfXgrammarTest, ClonesGoOnAlone) {
  const auto grammar = Compiled(GrammarKind::kJsonSchema,
                                R"({"type": "object", "properties": {"a": {"type": "integer"}, "b":
                                {"type": "array", "items": {"enum": ["x", "yes"]}}}, "required": ["a", "b"]})");
  ASSERT_NE(grammar, nullptr);
  const auto ids = *TestTokenizer().Encode(R"({"a": 12, "b": ["yes", "x"]})", false, false);
  const auto allowed = [](GrammarState& state) {
    const std::span<const uint32_t> words = state.AllowedTokens();
    return std::vector<uint32_t>(words.begin(), words.end());
  };
  const std::unique_ptr<GrammarState> state = grammar->NewState();
  std::vector<std::vector<uint32_t>> masks;
  for (const int32_t id : ids) {
    masks.push_back(allowed(*state));
    ASSERT_TRUE(state->Accept(id));
  }
  for (size_t from = 0; from < ids.size(); ++from) {
    const std::unique_ptr<GrammarState> answer = grammar->NewState();
    for (size_t i = 0; i < from; ++i) ASSERT_TRUE(answer->Accept(ids[i]));
    {
      const std::unique_ptr<GrammarState> draft = answer->Clone();
      for (size_t i = from; i < ids.size(); ++i) {
        EXPECT_EQ(allowed(*draft), masks[i]) << from << " " << i;
        ASSERT_TRUE(draft->Accept(ids[i]));
      }
      EXPECT_TRUE(draft->Accept(kEndToken));
      EXPECT_EQ(allowed(*answer), masks[from]) << from;
    }
    EXPECT_EQ(allowed(*answer), masks[from]) << from;
    ASSERT_TRUE(answer->Accept(ids[from]));
  }
}

TEST_F(GrammarOfXgrammarTest, TakesWhatItShouldAndNothingElse) {
  const auto schema = Compiled(GrammarKind::kJsonSchema, R"({"type": "object", "properties":
      {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}, "required": ["name", "age"]})");
  ASSERT_NE(schema, nullptr);
  EXPECT_TRUE(Takes(*schema, R"({"name": "Zoë 🙂", "age": 12})"));
  EXPECT_TRUE(Takes(*schema, "{\n  \"name\": \"\",\n  \"age\": 0\n}"));
  EXPECT_FALSE(Takes(*schema, R"({"name": "Zoë")"));
  EXPECT_FALSE(Takes(*schema, R"({"name": "Zoë", "age": -1})"));
  EXPECT_FALSE(Takes(*schema, R"({"name": "Zoë", "age": 1, "more": 2})"));
  EXPECT_FALSE(Takes(*schema, R"({"name": "Zoë", "age": 1} )"));
  const auto open = Compiled(GrammarKind::kJsonSchema, R"({"type": "object"})", /*closed=*/false);
  EXPECT_TRUE(Takes(*open, R"({"any": {"thing": [1, null, "x"]}})"));
  EXPECT_FALSE(Takes(*open, "[1]"));
  const auto regex = Compiled(GrammarKind::kRegex, "[a-c]{2,4}(-[0-9]+)?");
  EXPECT_TRUE(Takes(*regex, "abca-17"));
  EXPECT_FALSE(Takes(*regex, "a"));
  EXPECT_FALSE(Takes(*regex, "abcabc"));
  const auto ebnf = Compiled(GrammarKind::kEbnf, "root ::= \"a\" root \"b\" | \"ab\"");
  EXPECT_TRUE(Takes(*ebnf, "aaabbb"));
  EXPECT_FALSE(Takes(*ebnf, "aabbb"));
  // Any text, and no control tokens.
  const auto anything = Compiled(GrammarKind::kRegex, "(.|\\n)*");
  EXPECT_TRUE(Takes(*anything, "Zoë 🙂\n<|begin_of_text|>"));
  const auto state = anything->NewState();
  for (int32_t id = 0; id < kVocabulary; ++id) {
    if (!TestTokenizer().IsSpecial(id) || id == kEndToken) continue;
    EXPECT_FALSE(kernels::IsAllowed(state->AllowedTokens(), id)) << id;
  }
  const auto control =
      Compiled(GrammarKind::kStructuralTag,
               R"({"type": "structural_tag", "format": {"type": "token", "token": 0}})");
  EXPECT_TRUE(control->NewState()->Accept(0)) << "asked for by id";
  const auto choice = Compiled(GrammarKind::kStructuralTag,
                               R"({"type": "structural_tag", "format": {"type": "or", "elements":
      [{"type": "const_string", "value": "yes, \"all\""}, {"type": "const_string", "value": "no"}]}})");
  EXPECT_TRUE(Takes(*choice, "yes, \"all\""));
  EXPECT_TRUE(Takes(*choice, "no"));
  EXPECT_FALSE(Takes(*choice, "n"));
}

TEST_F(GrammarOfXgrammarTest, WhatTheLibraryWouldLeaveOutIsRefused) {
  for (const auto& [schema, keyword] : std::vector<std::pair<std::string, std::string>>{
           {R"({"type": "number", "multipleOf": 0.1})", "multipleOf"},
           {R"({"type": "string", "pattern": "^a+$", "maxLength": 3})", "maxLength"},
           {R"({"allOf": [{"type": "string"}, {"type": "string"}]})", "allOf"},
           {R"({"$ref": "https://example.org/schema"})", "URI"},
           {R"({"type": "integer", "minimum": 3, "maximum": 2})", "range"}}) {
    const GrammarSource source{GrammarKind::kJsonSchema, schema};
    EXPECT_TRUE(CheckGrammarSource(source).ok()) << schema;
    const auto grammar = TestCompiler().Compile(source);
    EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument) << schema;
    EXPECT_NE(MessageOf(grammar.status()).find(keyword), std::string::npos) << grammar.status();
  }
  for (const char* const regex : {"(a", "a{3,2}", "(?=a)b", "\\1"}) {
    const auto grammar = TestCompiler().Compile({GrammarKind::kRegex, regex});
    EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument) << regex;
  }
  EXPECT_FALSE(TestCompiler().Compile({GrammarKind::kEbnf, "root ::= missing"}).ok());
}

TEST_F(GrammarOfXgrammarTest, HostileSourcesCostNoMoreThanTheirBounds) {
  GrammarCompilerOptions options = WorkerOptions();
  options.compile_time = std::chrono::milliseconds(1500);
  options.start_time = std::chrono::milliseconds(30'000);
  options.worker_bytes = size_t{256} << 20;
  GrammarCompiler compiler(options, TestVocabulary());
  ASSERT_TRUE(compiler.Compile({GrammarKind::kRegex, "a"}).ok());  // starts the process
  int refused = 0;
  std::string nested;
  for (int i = 0; i < 4000; ++i) nested += "(";
  nested += "a";
  for (int i = 0; i < 4000; ++i) nested += ")";
  std::string wide = "root ::= \"x\"";
  for (int i = 0; i < 8000; ++i) wide += " | \"" + std::to_string(i * 7919) + "\" root";
  for (const GrammarSource& source :
       {GrammarSource{GrammarKind::kRegex, "((((a{1,500}){1,500}){1,500}){1,500}){1,500}"},
        GrammarSource{GrammarKind::kRegex, "(((a|b|c)*[d-z]{1,1000}){1,1000}x){1,1000}"},
        GrammarSource{GrammarKind::kRegex, nested}, GrammarSource{GrammarKind::kEbnf, wide},
        GrammarSource{GrammarKind::kJsonSchema, R"({"$ref": "#"})"},
        GrammarSource{GrammarKind::kJsonSchema,
                      R"({"type": "string", "minLength": 2000000000, "maxLength": 2000000000})"}}) {
    const auto begun = std::chrono::steady_clock::now();
    const auto grammar = compiler.Compile(source);
    const auto taken = std::chrono::steady_clock::now() - begun;
    EXPECT_LT(taken, std::chrono::seconds(60)) << source.text.substr(0, 60);
    // Either it is cheap after all, or it is refused with the cause.
    refused += grammar.ok() ? 0 : 1;
    if (!grammar.ok()) {
      EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument) << grammar.status();
      EXPECT_NE(MessageOf(grammar.status()), "");
    }
    // And the next one is served.
    EXPECT_TRUE(compiler.Compile({GrammarKind::kRegex, "b"}).ok());
  }
  EXPECT_GE(refused, 2);
}

TEST_F(GrammarOfXgrammarTest, AWorkerThatIsTooSlowOrBreaksIsReplaced) {
  GrammarCompilerOptions options;
  options.program = "/bin/sleep";
  options.arguments = {"1000"};
  options.compile_time = std::chrono::milliseconds(50);
  options.start_time = std::chrono::milliseconds(50);
  GrammarCompiler asleep(options, TestVocabulary());
  const auto slow = asleep.Compile({GrammarKind::kRegex, "a"});
  EXPECT_EQ(slow.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(MessageOf(slow.status()).find("takes longer than"), std::string::npos) << slow.status();

  // Neither may be taken for slow, however long it takes until somebody looks.
  options = {};
  options.program = "/bin/false";
  options.arguments = {};
  GrammarCompiler broken(options, TestVocabulary());
  EXPECT_EQ(broken.Compile({GrammarKind::kRegex, "a"}).status().code(),
            absl::StatusCode::kUnavailable);
  options.program = "/nowhere/winnow";
  GrammarCompiler missing(options, TestVocabulary());
  EXPECT_EQ(missing.Compile({GrammarKind::kRegex, "a"}).status().code(),
            absl::StatusCode::kUnavailable);

  options = WorkerOptions();
  options.worker_bytes = 1;
  GrammarCompiler small(options, TestVocabulary());
  ASSERT_FALSE(small.Compile({GrammarKind::kRegex, "a"}).ok())
      << "its first grammar counts the whole process";
}

TEST_F(GrammarOfXgrammarTest, TheCacheForgetsWhatWasUsedLongestAgo) {
  GrammarCompilerOptions options = WorkerOptions();
  options.cache_bytes = 0;
  {
    GrammarCompiler none(options, TestVocabulary());
    const auto first = none.Compile({GrammarKind::kRegex, "a"});
    ASSERT_TRUE(first.ok());
    EXPECT_EQ(none.cached_bytes(), 0u);
    EXPECT_NE(*none.Compile({GrammarKind::kRegex, "a"}), *first) << "compiled again";
    // Room for two such grammars and a half.
    options.cache_bytes = (*first)->size_bytes() * 5 / 2;
  }
  GrammarCompiler compiler(options, TestVocabulary());
  const auto a = compiler.Compile({GrammarKind::kRegex, "a"});
  const auto b = compiler.Compile({GrammarKind::kRegex, "b"});
  EXPECT_EQ(*compiler.Compile({GrammarKind::kRegex, "a"}), *a);
  const auto c = compiler.Compile({GrammarKind::kRegex, "c"});
  ASSERT_TRUE(c.ok());
  EXPECT_LE(compiler.cached_bytes(), options.cache_bytes);
  EXPECT_EQ(*compiler.Compile({GrammarKind::kRegex, "a"}), *a) << "used more lately than b";
  EXPECT_NE(*compiler.Compile({GrammarKind::kRegex, "b"}), *b);
}

// ---- answers of the engine ----

class GrammarEngineTest : public GrammarOfXgrammarTest {
 protected:
  GrammarEngineTest() : model_({.vocab_size = kVocabulary}) {
    auto engine =
        Engine::Create({.max_running = 8, .step_tokens = 64}, model_, TestTokenizer(), clock_);
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  Request RequestFor(RequestId id, std::shared_ptr<const Grammar> grammar) {
    Request request = MakeRequest(id, {5, 6, static_cast<int32_t>(7 + id)}, 200);
    request.stopping.stop_token_ids = {kEndToken};
    request.grammar = std::move(grammar);
    return request;
  }

  FakeClock clock_;
  FakeModel model_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(GrammarEngineTest, EveryAnswerIsOfItsGrammarWhateverTheModelLikes) {
  // Without recursion, so that each answer ends.
  const std::string pattern = "(red|green|blue)-[0-9]{1,3}( [a-z]{2,5}){0,4}\\.";
  const auto grammar = Compiled(GrammarKind::kRegex, pattern);
  std::set<std::string> texts;
  for (RequestId id = 1; id <= 24; ++id) {
    Client client;
    Request request = RequestFor(id, grammar);
    request.sampling.temperature = id % 2 == 0 ? 1.0f : 0.0f;
    request.sampling.seed = id;
    if (id % 3 == 0) request.top_logprobs = 2;
    ASSERT_TRUE(engine_->Submit(request, client.output).ok());
    while (engine_->Step()) {
    }
    const Reply& reply = client.Read();
    ASSERT_TRUE(reply.ended());
    EXPECT_EQ(reply.last.finish, FinishReason::kStopToken) << reply.text;
    EXPECT_TRUE(Takes(*grammar, reply.text)) << reply.text;
    EXPECT_EQ(reply.tokens.back(), kEndToken);
    texts.insert(reply.text);
    if (request.top_logprobs >= 0) {
      // The model's, which would have said something else.
      bool other = false;
      for (const OutputToken& token : reply.details)
        other |= token.top.front().token != token.token;
      EXPECT_TRUE(other);
    }
  }
  EXPECT_GT(texts.size(), 10u);
}

TEST_F(GrammarEngineTest, ItsStateSurvivesPreemptionAndStopStringsStillEndAnAnswer) {
  const auto grammar = Compiled(GrammarKind::kRegex, "([a-z]{3} ){20}end");
  const auto run = [&](int32_t num_blocks, int clients) {
    FakeModel model({.vocab_size = kVocabulary, .num_blocks = num_blocks});
    auto engine =
        Engine::Create({.max_running = 8, .step_tokens = 64}, model, TestTokenizer(), clock_);
    std::vector<std::unique_ptr<Client>> all;
    for (int i = 0; i < clients; ++i) {
      all.push_back(std::make_unique<Client>());
      Request request = RequestFor(static_cast<RequestId>(i + 1), grammar);
      request.stopping.max_tokens = 100;
      EXPECT_TRUE((*engine)->Submit(std::move(request), all.back()->output).ok());
    }
    while ((*engine)->Step()) {
    }
    std::vector<std::string> texts;
    int preemptions = 0;
    for (const auto& client : all) {
      texts.push_back(client->Read().text);
      preemptions += client->reply.last.usage.preemptions;
      EXPECT_TRUE(Takes(*grammar, texts.back())) << texts.back();
    }
    return std::pair(texts, preemptions);
  };
  const auto [alone, none] = run(400, 4);
  const auto [crowded, some] = run(30, 4);
  EXPECT_EQ(none, 0);
  EXPECT_GT(some, 0) << "nothing was preempted: the test says nothing";
  EXPECT_EQ(alone, crowded);

  Client client;
  Request request = RequestFor(9, grammar);
  request.stopping.stop_strings = {" "};
  ASSERT_TRUE(engine_->Submit(request, client.output).ok());
  while (engine_->Step()) {
  }
  EXPECT_EQ(client.Read().last.finish, FinishReason::kStopString);
  EXPECT_EQ(client.reply.text.size(), 3u) << client.reply.text;
}

#endif  // WINNOW_HAS_XGRAMMAR

}  // namespace
}  // namespace winnow::engine
