// The options of the model that serve's configuration asks for. `winnow serve` loads with it and `winnow plan` sizes
// with it, so that the two cannot read an option differently.
#ifndef WINNOW_SERVER_MODEL_OPTIONS_H_
#define WINNOW_SERVER_MODEL_OPTIONS_H_

#include "engine/model_loader.h"
#include "server/config.h"

namespace winnow::server {

// REQUIRES: CheckConfig(config) is OK. The callbacks stay empty: nobody is told of progress.
engine::ModelOptions ModelOptionsOf(const ServeConfig& config);

// Tokens of a step in which nobody decodes: what --prompt-step-tokens says, or where it leaves the choice: a GPU takes
// prompts faster in larger steps (docs/tuning.md), and its own memory has room for them.
int64_t PromptStepTokens(const ServeConfig& config);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_MODEL_OPTIONS_H_
