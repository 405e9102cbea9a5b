// Structured output: a grammar says which tokens may come next in an answer.
//
//   GrammarSource    what a client asks for: a JSON schema, a regular expression, an EBNF grammar, a structural tag
//   GrammarLibrary   a model's vocabulary, made ready once; compiles sources, and loads what was compiled
//   Grammar          compiled; immutable; shared by all answers that follow it
//   GrammarState     how far one answer has come
//
// xgrammar does the work; engine/grammar/xgrammar.cc alone sees it. A build without it has no_grammar.cc, and
// GrammarLibrary::Make says so.
//
// Compiling takes time and memory that the source decides about, so a server leaves it to a process of its own:
// engine/grammar/grammar_compiler.h. GrammarSource is checked before (engine/grammar/grammar_check.h).
#ifndef WINNOW_ENGINE_GRAMMAR_GRAMMAR_H_
#define WINNOW_ENGINE_GRAMMAR_GRAMMAR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::engine {

enum class GrammarKind : uint8_t { kJsonSchema, kRegex, kEbnf, kStructuralTag };

struct GrammarSource {
  GrammarKind kind = GrammarKind::kJsonSchema;
  std::string text;  // UTF-8
  // For a schema: objects and lists that do not say so hold only what the schema names.
  bool closed = true;
};

// The meaning of the ids of a row of logits.
struct GrammarVocabulary {
  std::vector<std::string> tokens;  // bytes by id; "": never drawn, but for end tokens
  std::vector<int32_t> end_tokens;  // allowed where the grammar may end
};

class GrammarState {
 public:
  virtual ~GrammarState() = default;
  // Token t may come next where bit t % 32 of word t / 32 is set. Valid until the next call.
  // REQUIRES: no end token was accepted.
  virtual std::span<const uint32_t> AllowedTokens() = 0;
  // False: it may not come next, and nothing has changed.
  virtual bool Accept(int32_t token) = 0;
  // A state of its own that is where this one is.
  virtual std::unique_ptr<GrammarState> Clone() const = 0;
};

class Grammar {
 public:
  virtual ~Grammar() = default;
  // At the beginning of an answer. The grammar is kept alive by it.
  virtual std::unique_ptr<GrammarState> NewState() const = 0;
  virtual size_t size_bytes() const = 0;
};

// Whether this build has grammars.
bool HasGrammars();

// Any thread.
class GrammarLibrary {
 public:
  // Unimplemented: a build without xgrammar.
  static absl::StatusOr<std::unique_ptr<GrammarLibrary>> Make(const GrammarVocabulary& vocabulary);
  virtual ~GrammarLibrary() = default;
  // Bytes for Load. InvalidArgument: what is wrong with the source, or that the library would ignore a part of it.
  virtual absl::StatusOr<std::string> Compile(const GrammarSource& source) const = 0;
  // InvalidArgument: `compiled` is not of Compile with the same vocabulary.
  virtual absl::StatusOr<std::shared_ptr<const Grammar>> Load(
      const std::string& compiled) const = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_GRAMMAR_GRAMMAR_H_
