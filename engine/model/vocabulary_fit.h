// Whether a tokenizer can be that of a model, by their sizes.
#ifndef WINNOW_ENGINE_MODEL_VOCABULARY_FIT_H_
#define WINNOW_ENGINE_MODEL_VOCABULARY_FIT_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace winnow::engine {

// InvalidArgument unless a tokenizer whose ids are below `id_end` fits an embedding of `vocab_size`
// rows. An id without a row never fits. Rows without an id are padding: families round their
// vocabularies up for their matrix products (Qwen2.5 by 0.3 %, Phi-2 by 1.8 %, DeepSeek LLM by
// 2.3 %). A sixteenth of the rows may be idle, or 1,024 of a small vocabulary; with more of them the
// tokenizer is another model's. `name`: the tokenizer's file.
absl::Status CheckVocabularyFits(int32_t id_end, int32_t vocab_size, std::string_view name);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_VOCABULARY_FIT_H_
