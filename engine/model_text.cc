#include "engine/model_text.h"

#include <optional>
#include <utility>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/gguf_tokenizer.h"
#include "engine/model/gguf.h"

namespace winnow::engine {

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& model_path) {
  if (!IsGgufPath(model_path)) return Tokenizer::Load(model_path);
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(model_path));
  WINNOW_ASSIGN_OR_RETURN(const std::string json, GgufTokenizerJson(file->contents(), model_path));
  return Tokenizer::Parse(json, Concat(model_path, ": as tokenizer.json"));
}

std::string TokenizerFile(const std::string& model_path) {
  return IsGgufPath(model_path) ? model_path : model_path + "/tokenizer.json";
}

absl::StatusOr<ChatTemplate> LoadChatTemplate(const std::string& model_path) {
  if (!IsGgufPath(model_path)) return ChatTemplate::Load(model_path);
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(model_path));
  WINNOW_ASSIGN_OR_RETURN(std::optional<GgufChatTemplate> chat,
                          ReadGgufChatTemplate(file->contents(), model_path));
  if (!chat) return ChatTemplate();
  return ChatTemplate::FromText(chat->text, std::move(chat->bos_token), std::move(chat->eos_token));
}

}  // namespace winnow::engine
