// Checks before a grammar is compiled: sizes, nesting, and parts of a JSON schema that xgrammar would leave
// out without a word, so that an answer could break them. What it warns of, or cannot parse, it says itself
// (engine/grammar/xgrammar.cc); how much time and memory compiling may take is the compiler's
// (engine/grammar/grammar_compiler.h).
//
// Pure functions; any thread. Time is linear in the source.
#ifndef WINNOW_ENGINE_GRAMMAR_GRAMMAR_CHECK_H_
#define WINNOW_ENGINE_GRAMMAR_GRAMMAR_CHECK_H_

#include "absl/status/status.h"
#include "engine/grammar/grammar.h"

namespace winnow::engine {

inline constexpr size_t kMaxGrammarBytes = size_t{128} << 10;
inline constexpr size_t kMaxRegexBytes = size_t{16} << 10;
// White space between the parts of a JSON text: enough for indentation, and an answer of a model that likes line feeds
// ends.
inline constexpr int kMaxJsonWhitespace = 16;
inline constexpr int kMaxSchemaDepth = 64;  // of JSON values, in a schema and in a structural tag

// InvalidArgument: names what is wrong, of a schema with its path ("#/properties/name: ...").
absl::Status CheckGrammarSource(const GrammarSource& source);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_GRAMMAR_GRAMMAR_CHECK_H_
