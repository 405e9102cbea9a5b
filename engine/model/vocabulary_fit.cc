#include "engine/model/vocabulary_fit.h"

#include <algorithm>

#include "engine/base/concat.h"

namespace winnow::engine {

absl::Status CheckVocabularyFits(int32_t id_end, int32_t vocab_size, std::string_view name) {
  if (id_end > vocab_size) {
    return absl::InvalidArgumentError(Concat(name, ": has ids up to ", id_end - 1,
                                             ", but the model's embedding has ", vocab_size,
                                             " rows (vocab_size)"));
  }
  constexpr int32_t kIdleRowsMin = 1024;
  constexpr int32_t kIdleShare = 16;
  if (vocab_size - id_end > std::max(kIdleRowsMin, vocab_size / kIdleShare)) {
    return absl::InvalidArgumentError(Concat(
        name, ": has ids up to ", id_end - 1, " only, but the model's embedding has ", vocab_size,
        " rows (vocab_size): this is not the model's tokenizer, because no family "
        "pads its vocabulary by more than 1/",
        kIdleShare));
  }
  return absl::OkStatus();
}

}  // namespace winnow::engine
