// The tokenizer and the chat template of a model, be it a Hugging Face directory or a GGUF file.
#ifndef WINNOW_ENGINE_MODEL_TEXT_H_
#define WINNOW_ENGINE_MODEL_TEXT_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace winnow::engine {

// Tokenizer::Load of a directory; of a GGUF file, what GgufTokenizerJson makes of it. Errors are theirs.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& model_path);

// The file that its tokenizer is read from, for errors.
std::string TokenizerFile(const std::string& model_path);

// ChatTemplate::Load of a directory; of a GGUF file, its own template.
absl::StatusOr<ChatTemplate> LoadChatTemplate(const std::string& model_path);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_TEXT_H_
