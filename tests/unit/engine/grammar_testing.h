// Common to tests of grammars: the project's model's vocabulary, a compiler for it, and texts as tokens.
#ifndef WINNOW_TESTS_UNIT_ENGINE_GRAMMAR_TESTING_H_
#define WINNOW_TESTS_UNIT_ENGINE_GRAMMAR_TESTING_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/grammar/grammar_compiler.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {

inline constexpr int32_t kEndToken = 1;  // of models/needle-5m
inline constexpr int32_t kVocabulary = 4096;

inline GrammarCompilerOptions WorkerOptions() {
  GrammarCompilerOptions options;
  options.program = GrammarWorkerPath();
  options.arguments = {};
  return options;
}

inline GrammarVocabulary TestVocabulary() {
  return MakeGrammarVocabulary(TestTokenizer(), kVocabulary, {kEndToken});
}

// One for all tests: its process takes a moment to start.
inline GrammarCompiler& TestCompiler() {
  static GrammarCompiler compiler(WorkerOptions(), TestVocabulary());
  return compiler;
}

inline std::shared_ptr<const Grammar> Compiled(GrammarKind kind, const std::string& text,
                                               bool closed = true) {
  auto grammar = TestCompiler().Compile({kind, text, closed});
  EXPECT_TRUE(grammar.ok()) << text << ": " << grammar.status();
  return grammar.ok() ? *grammar : nullptr;
}

// Whether a grammar takes `text` as a whole, token by token as the tokenizer cuts it.
inline bool Takes(const Grammar& grammar, const std::string& text) {
  const auto ids =
      TestTokenizer().Encode(text, /*add_special_tokens=*/false, /*parse_special=*/false);
  EXPECT_TRUE(ids.ok());
  const std::unique_ptr<GrammarState> state = grammar.NewState();
  for (const int32_t id : *ids) {
    // Accept does as the mask says.
    const bool allowed = kernels::IsAllowed(state->AllowedTokens(), id);
    EXPECT_EQ(allowed, state->Accept(id)) << text << ", token " << id;
    if (!allowed) return false;
  }
  return kernels::IsAllowed(state->AllowedTokens(), kEndToken);
}

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_GRAMMAR_TESTING_H_
