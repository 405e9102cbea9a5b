// What a GGUF file says about its tokenizer by a name only: how each family of models normalises
// text and splits it into words.
//
// `tokenizer.ggml.pre` is the name of a family ("llama-bpe", "qwen2", ...). Each entry here is what
// that family's own tokenizer.json has, so that a tokenizer made from a GGUF file gives the ids that
// the reference library gives with the original files. A name without an entry has no default:
// another family's words would give wrong ids that nothing reports.
#ifndef WINNOW_ENGINE_TEXT_PRE_TOKENIZER_KINDS_H_
#define WINNOW_ENGINE_TEXT_PRE_TOKENIZER_KINDS_H_

#include <span>
#include <string>
#include <string_view>

#include "nlohmann/json_fwd.hpp"

namespace winnow::engine {

struct PreTokenizerKind {
  std::string_view name;           // tokenizer.ggml.pre
  std::string_view normalizer;     // JSON; "null": none
  std::string_view pre_tokenizer;  // JSON
  bool ignore_merges;              // model.ignore_merges
  bool add_bos;  // whether a BOS begins a text where tokenizer.ggml.add_bos_token is absent
};

// Every kind, by name in ascending order. Static; any thread.
std::span<const PreTokenizerKind> PreTokenizerKinds();

// Null: no such kind. PreTokenizerKindNames() says which there are.
const PreTokenizerKind* FindPreTokenizerKind(std::string_view name);

std::string PreTokenizerKindNames();  // "command-r, dbrx, ..."

// The members of tokenizer.json that surround the `model` of a byte-level vocabulary of this kind
// (tokenizer.ggml.model "gpt2"): "version", "normalizer", "pre_tokenizer", "decoder", and
// "post_processor" null. Missing: "model" and "added_tokens".
nlohmann::json ByteLevelTokenizerJson(const PreTokenizerKind& kind);

// The same for SentencePiece vocabularies (tokenizer.ggml.model "llama"), whose model has
// byte_fallback and fuse_unk on. `add_space_prefix`: tokenizer.ggml.add_space_prefix, true where it
// is absent; a space is put before each text between control tokens, and decoding drops the first.
nlohmann::json SentencePieceTokenizerJson(bool add_space_prefix);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_PRE_TOKENIZER_KINDS_H_
