// Text to token ids and back, equal to the Hugging Face `tokenizers` library on any string, for the
// tokenizer.json of the supported families: byte-level BPE and SentencePiece-style BPE.
//
// Immutable after Load; every method may be called from any thread.
#ifndef WINNOW_ENGINE_TEXT_TOKENIZER_H_
#define WINNOW_ENGINE_TEXT_TOKENIZER_H_

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
  // Reads `model_dir`/tokenizer.json, which says all that the reference library knows. Its
  // `truncation` and `padding` are not applied: they are a saved state of the program that wrote
  // the file, and transformers resets them at every call too. Errors name the file and the JSON
  // path: NotFound, InvalidArgument (malformed), Unimplemented (a kind not supported, by name).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);
  // The same from the file's text; `name` stands for the file in errors.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(std::string_view json,
                                                          const std::string& name);
  ~Tokenizer();

  // Neighbouring text of different segments is joined before it is split into words, so that a
  // template around a text gives the ids that the reference gives for the rendered whole.
  // Where `parse_special` is off, added tokens that are special (control tokens) are plain text,
  // also where text of two segments would form one together; added tokens that are not special are
  // recognised everywhere, as the reference does when told to ignore special tokens.
  // `add_special_tokens`: apply the post-processor's template (a BOS, say).
  // Time is n log n in the text at worst. InvalidArgument: text is not valid UTF-8 (with the byte
  // offset), or 1 GiB or more. ResourceExhausted: the tokenizer's regular expressions ran into
  // their limits.
  absl::StatusOr<std::vector<int32_t>> Encode(std::span<const TextSegment> segments,
                                              bool add_special_tokens) const;
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, bool add_special_tokens,
                                              bool parse_special) const;

  // Invalid byte sequences come out as U+FFFD, as in the reference. Ids without a token are
  // skipped, as there. `skip_special_tokens`: added tokens that are special give no text.
  std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens) const;

  int32_t vocab_size() const;  // highest id + 1
  std::optional<int32_t> TokenToId(std::string_view token) const;
  std::string IdToToken(int32_t id) const;  // "" if there is none
  bool IsSpecial(int32_t id) const;         // a control token: added, and marked special
  // The bytes that a token adds to a text that has begun: those of half a character, too. "": a
  // control token, or none.
  std::string BytesOf(int32_t id) const;
  // Of a byte-level vocabulary: bytes that occur in UTF-8 and have no token, as published models
  // have it. Such a byte becomes the unknown token or, where there is none, vanishes from the text.
  int missing_bytes() const;
  bool has_unk() const;

 private:
  friend class Detokenizer;
  class Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Incremental detokenisation of one sequence: the texts of all Add and the final Flush, joined, are
// Decode of all ids; what Add returns never ends inside a character. What later tokens can still
// change is held back: the first bytes of a character, and (SentencePiece vocabularies) a run of
// byte tokens until it ends.
//
// The tokenizer must outlive it. One thread at a time; independent of all others.
class Detokenizer {
 public:
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens);
  ~Detokenizer();
  Detokenizer(Detokenizer&&) noexcept;
  Detokenizer& operator=(Detokenizer&&) noexcept;

  std::string Add(int32_t id);  // the text that became certain
  std::string Flush();          // what was held back; afterwards only destruction

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_TOKENIZER_H_
