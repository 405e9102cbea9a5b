// A build without xgrammar: whoever asks for a grammar is told so.
#include "engine/grammar/grammar.h"

namespace winnow::engine {

bool HasGrammars() { return false; }

absl::StatusOr<std::unique_ptr<GrammarLibrary>> GrammarLibrary::Make(const GrammarVocabulary&) {
  return absl::UnimplementedError("this build has no structured output (WINNOW_XGRAMMAR)");
}

}  // namespace winnow::engine
