// Grammars by xgrammar. The only file that includes it.
//
// Its faults are exceptions, which end here. What it cannot express it leaves out with a warning; a client that asked
// for it would get something else, so a warning is an error here. The library is built with XGRAMMAR_LOG_CUSTOMIZE,
// and its log ends in LogMessageImpl and LogFatalImpl below.
#include <xgrammar/xgrammar.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/grammar/grammar_check.h"
#include "kernels/check.h"
#include "kernels/sample.h"

namespace xgrammar {

// The calling thread's, since it was last cleared: compiling takes one thread.
static std::string& FirstWarning() {
  thread_local std::string warning;
  return warning;
}

// Declared in xgrammar's cpp/support/logging.h.
void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 2;
  if (level >= kWarning && FirstWarning().empty()) FirstWarning() = message;
}
[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}

}  // namespace xgrammar

namespace winnow::engine {
namespace {

// Nesting of rules while xgrammar walks them, so that its stack is bounded.
constexpr int kMaxRecursion = 1000;
constexpr size_t kMaxShownBytes = 400;

std::string Shown(std::string_view message) {
  // "Check failed: (condition of xgrammar's source) is false: what a client wants to know"
  constexpr std::string_view kCondition = ") is false: ";
  if (const size_t at = message.find(kCondition); at != message.npos) {
    message.remove_prefix(at + kCondition.size());
  }
  return std::string(message.substr(0, kMaxShownBytes));
}

class XgrammarState final : public GrammarState {
 public:
  XgrammarState(xgrammar::GrammarMatcher matcher, int32_t vocab)
      : matcher_(std::move(matcher)), words_(kernels::AllowedWords(vocab)), vocab_(vocab) {}

  std::span<const uint32_t> AllowedTokens() override {
    WINNOW_CHECK(!matcher_.IsTerminated());
    auto shape = static_cast<int64_t>(words_.size());
    DLTensor tensor{words_.data(), {kDLCPU, 0}, 1, xgrammar::GetBitmaskDLType(),
                    &shape,        nullptr,     0};
    matcher_.FillNextTokenBitmask(&tensor);
    return words_;
  }

  bool Accept(int32_t token) override { return matcher_.AcceptToken(token); }

  // Not by the matcher's rollback, which forgets the budgets of a structural tag that were about to be enforced.
  std::unique_ptr<GrammarState> Clone() const override {
    return std::make_unique<XgrammarState>(matcher_.Fork(), vocab_);
  }

 private:
  xgrammar::GrammarMatcher matcher_;
  std::vector<uint32_t> words_;
  const int32_t vocab_;
};

class XgrammarGrammar final : public Grammar {
 public:
  XgrammarGrammar(xgrammar::CompiledGrammar compiled, int32_t vocab)
      : compiled_(std::move(compiled)), vocab_(vocab) {}
  std::unique_ptr<GrammarState> NewState() const override {
    return std::make_unique<XgrammarState>(xgrammar::GrammarMatcher(compiled_), vocab_);
  }
  size_t size_bytes() const override { return compiled_.MemorySizeBytes(); }

 private:
  const xgrammar::CompiledGrammar compiled_;
  const int32_t vocab_;
};

class XgrammarLibrary final : public GrammarLibrary {
 public:
  explicit XgrammarLibrary(const GrammarVocabulary& vocabulary)
      : info_(vocabulary.tokens, xgrammar::VocabType::RAW,
              static_cast<int>(vocabulary.tokens.size()), vocabulary.end_tokens),
        vocab_(static_cast<int32_t>(vocabulary.tokens.size())) {
    xgrammar::SetMaxRecursionDepth(kMaxRecursion);
  }

  absl::StatusOr<std::string> Compile(const GrammarSource& source) const override {
    xgrammar::FirstWarning().clear();
    try {
      xgrammar::GrammarCompiler compiler(info_, /*max_threads=*/1, /*cache_enabled=*/false);
      const xgrammar::CompiledGrammar compiled = CompileWith(compiler, source);
      if (!xgrammar::FirstWarning().empty()) {
        return absl::InvalidArgumentError(Shown(xgrammar::FirstWarning()));
      }
      return compiled.SerializeJSON();
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("takes too much memory");
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(Shown(error.what()));
    }
  }

  absl::StatusOr<std::shared_ptr<const Grammar>> Load(const std::string& compiled) const override {
    try {
      auto loaded = xgrammar::CompiledGrammar::DeserializeJSON(compiled, info_);
      if (auto* const good = std::get_if<xgrammar::CompiledGrammar>(&loaded)) {
        return std::make_shared<XgrammarGrammar>(std::move(*good), vocab_);
      }
      return absl::InvalidArgumentError("a grammar that was compiled otherwise");
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(Shown(error.what()));
    }
  }

 private:
  static xgrammar::CompiledGrammar CompileWith(xgrammar::GrammarCompiler& compiler,
                                               const GrammarSource& source) {
    switch (source.kind) {
      case GrammarKind::kJsonSchema:
        return compiler.CompileJSONSchema(source.text, /*any_whitespace=*/true,
                                          /*indent=*/std::nullopt, /*separators=*/std::nullopt,
                                          /*strict_mode=*/source.closed, kMaxJsonWhitespace);
      case GrammarKind::kRegex:
        return compiler.CompileRegex(source.text);
      case GrammarKind::kEbnf:
        return compiler.CompileGrammar(source.text);
      case GrammarKind::kStructuralTag:
        return compiler.CompileStructuralTag(source.text);
    }
    throw std::runtime_error("a kind of grammar that is not known");
  }

  const xgrammar::TokenizerInfo info_;
  const int32_t vocab_;
};

}  // namespace

bool HasGrammars() { return true; }

absl::StatusOr<std::unique_ptr<GrammarLibrary>> GrammarLibrary::Make(
    const GrammarVocabulary& vocabulary) {
  try {
    return std::make_unique<XgrammarLibrary>(vocabulary);
  } catch (const std::exception& error) {
    return absl::InternalError(Shown(error.what()));
  }
}

}  // namespace winnow::engine
