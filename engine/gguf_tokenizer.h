// The tokenizer of a GGUF file, said as tokenizer.json says it, so that there is one tokenizer.
//
// A file has the vocabulary (tokenizer.ggml.tokens, token_type, scores), the merges of byte-level BPE, and names for
// the rest, which the writers of such files agree on: "tokenizer.ggml.model" is "gpt2" (byte-level BPE) or "llama"
// (SentencePiece), and for "gpt2" "tokenizer.ggml.pre" names how text is cut into words
// (engine/text/pre_tokenizer_kinds.h). Other names are refused, and so is none: older writers left it out, or wrote
// "default", where they did not know.
//
// SentencePiece merges whatever gives the token with the best score. BPE does the same with one merge for each way to
// cut a token in two, best scores first (of equals, the longest left part, then the longest right part), which is how
// transformers converts such vocabularies.
//
// Text from users never becomes a control token: no merge gives one.
#ifndef WINNOW_ENGINE_GGUF_TOKENIZER_H_
#define WINNOW_ENGINE_GGUF_TOKENIZER_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/model/gguf.h"

namespace winnow::engine {

// A tokenizer.json. `name` stands for the file in errors. Unimplemented: a tokenizer model or way to cut text that
// winnow lacks, with the list of what it has. InvalidArgument names the key, and the token where it is one.
absl::StatusOr<std::string> GgufTokenizerJson(const GgufContents& contents, std::string_view name);

// Chat template of a file: its text, and the tokens that it may print, "" where the file names none.
struct GgufChatTemplate {
  std::string text, bos_token, eos_token;
};
// Absent: the file has no template. InvalidArgument: a key of a wrong type, or a template of more than 1 MiB.
absl::StatusOr<std::optional<GgufChatTemplate>> ReadGgufChatTemplate(const GgufContents& contents,
                                                                     std::string_view name);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_GGUF_TOKENIZER_H_
