#include "server/loading_log.h"

#include <chrono>
#include <string>

#include "absl/strings/str_join.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

constexpr std::chrono::seconds kTerminalInterval(1);
constexpr std::chrono::seconds kLogInterval(5);

}  // namespace

void LogModel(Log& log, const engine::ModelConfig& config, const engine::Weights& weights,
              const engine::Tokenizer& tokenizer) {
  const engine::WeightsSummary summary = engine::Summarize(config, weights);
  log.Event(LogLevel::kInfo, "model",
            {{"family", config.architecture},
             {"parameters", summary.parameters},
             {"layers", int64_t{config.num_layers()}},
             {"context", int64_t{config.max_position_embeddings}},
             {"vocabulary", int64_t{config.vocab_size}},
             {"bytes", summary.bytes},
             {"dtype", summary.dtype}});
  if (!config.unknown_keys.empty()) {
    log.Event(LogLevel::kWarn, "unknown_config_keys",
              {{"keys", absl::StrJoin(config.unknown_keys, ", ")},
               {"text", "winnow does not know these keys of config.json and does not apply them"}});
  }
  if (tokenizer.missing_bytes() > 0) {
    log.Event(LogLevel::kInfo, "vocabulary_lacks_bytes",
              {{"bytes", int64_t{tokenizer.missing_bytes()}},
               {"text", tokenizer.has_unk() ? "they become the unknown token"
                                            : "they are dropped from prompts, as the model's own "
                                              "tokenizer does"}});
  }
}

LoadingProgress::LoadingProgress(Log& log, const engine::Clock& clock, bool on_terminal)
    : log_(log),
      clock_(clock),
      interval_(on_terminal ? kTerminalInterval : kLogInterval),
      start_(clock.Now()),
      last_(start_) {}

void LoadingProgress::Update(size_t done, size_t total) {
  const engine::TimePoint now = clock_.Now();
  if (total == 0 || now - last_ < interval_) return;
  last_ = now;
  log_.Event(LogLevel::kInfo, "reading_weights",
             {{"percent", static_cast<int64_t>(100 * done / total)},
              {"seconds", std::chrono::duration<double>(now - start_).count()}});
}

}  // namespace winnow::server
