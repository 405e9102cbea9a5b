// A grammar of one answer: these tokens, and then anything. Log-probabilities of an answer are the model's own, whatever a
// grammar allows, so an answer that is forced tells how likely its tokens were.
#ifndef WINNOW_SERVER_TOKEN_FORCING_H_
#define WINNOW_SERVER_TOKEN_FORCING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/grammar/grammar.h"

namespace winnow::server {

// REQUIRES: 0 <= token < vocab_size, for each.
std::shared_ptr<const engine::Grammar> ForceTokens(std::vector<int32_t> tokens, int32_t vocab_size);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_TOKEN_FORCING_H_
