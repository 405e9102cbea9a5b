// What `serve` says while a model is loaded: which model it is, and how far its weights are.
//
// One thread at a time.
#ifndef WINNOW_SERVER_LOADING_LOG_H_
#define WINNOW_SERVER_LOADING_LOG_H_

#include <cstddef>

#include "engine/base/clock.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "engine/text/tokenizer.h"
#include "server/log.h"

namespace winnow::server {

// One line for the model: family, parameters, context, bytes, dtype. Warnings besides: keys of
// config.json that are not applied. A note if the vocabulary has no token for some bytes.
void LogModel(Log& log, const engine::ModelConfig& config, const engine::Weights& weights,
              const engine::Tokenizer& tokenizer);

// Lines with the share of the layers whose weights are read and packed. None within the first
// interval: small models are loaded before somebody wonders. On a terminal, where somebody waits,
// lines come more often.
class LoadingProgress {
 public:
  LoadingProgress(Log& log, const engine::Clock& clock, bool on_terminal);
  void Update(size_t done, size_t total);

 private:
  Log& log_;
  const engine::Clock& clock_;
  const engine::Duration interval_;
  const engine::TimePoint start_;
  engine::TimePoint last_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_LOADING_LOG_H_
