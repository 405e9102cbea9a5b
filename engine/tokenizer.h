// Text to token ids and back, equal to the Hugging Face `tokenizers` library on any string, for the
// tokenizer.json of the supported families: byte-level BPE and SentencePiece-style BPE.
//
// Immutable after Load; every method may be called from any thread.
#ifndef WINNOW_ENGINE_TOKENIZER_H_
#define WINNOW_ENGINE_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::engine {

// A piece of a prompt. Special tokens are recognised only in segments that the server wrote itself
// (or whose author may write them): text from users never becomes a control token.
struct TextSegment {
  std::string_view text;  // valid UTF-8
  bool parse_special = false;
};

class Tokenizer {
 public:
  // Reads `model_dir`/tokenizer.json (and tokenizer_config.json where it matters). Errors name the
  // file and the JSON path: NotFound, InvalidArgument (malformed), Unimplemented (a kind not supported, by name).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);
  ~Tokenizer();

  // Neighbouring text of different segments is joined before it is split into words, so that a
  // template around a text gives the ids that the reference gives for the rendered whole.
  // `add_special_tokens`: apply the post-processor's template (a BOS, say).
  // InvalidArgument: text is not valid UTF-8 (with the byte offset).
  absl::StatusOr<std::vector<int32_t>> Encode(std::span<const TextSegment> segments, bool add_special_tokens) const;
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, bool add_special_tokens, bool parse_special) const;

  // Invalid byte sequences come out as U+FFFD, as in the reference. Ids out of range are skipped as the reference does.
  std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens) const;

  int32_t vocab_size() const;                               // highest id + 1
  std::optional<int32_t> TokenToId(std::string_view token) const;
  std::string IdToToken(int32_t id) const;                  // "" if there is none
  bool IsSpecial(int32_t id) const;

 private:
  friend class Detokenizer;
  class Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Incremental detokenisation of one sequence: the texts of all Add and the final Flush, joined, are
// Decode of all ids; what Add returns never ends inside a character.
class Detokenizer {
 public:
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens);
  std::string Add(int32_t id);  // the text that became certain
  std::string Flush();          // what was held back
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TOKENIZER_H_
