// What a Tokenizer is made of; for tokenizer.cc and detokenizer.cc only.
#ifndef WINNOW_ENGINE_TEXT_TOKENIZER_IMPL_H_
#define WINNOW_ENGINE_TEXT_TOKENIZER_IMPL_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/added_tokens.h"
#include "engine/text/bpe.h"
#include "engine/text/post_processor.h"
#include "engine/text/pre_tokenizer.h"
#include "engine/text/token_decoder.h"
#include "engine/text/tokenizer.h"
#include "engine/text/tokenizer_normalizer.h"

namespace winnow::engine {

class Tokenizer::Impl {
 public:
  static absl::StatusOr<std::unique_ptr<Impl>> Make(const JsonNode& root);

  absl::StatusOr<std::vector<int32_t>> Encode(std::span<const TextSegment> segments,
                                              bool add_special_tokens) const;

  // The text that the decoder is given for an id; nullopt if there is none, or if it is skipped.
  std::optional<std::string_view> DecoderText(int32_t id, bool skip_special_tokens) const;

  const BpeModel& model() const { return *model_; }
  const AddedTokens& added() const { return added_; }
  const TokenDecoder& decoder() const { return *decoder_; }
  int32_t id_end() const { return id_end_; }

 private:
  // The segments joined, and for each byte whether special tokens are recognised there.
  struct Prompt;

  absl::Status SplitAtTokens(const Prompt& prompt, RegexScratch* scratch, PieceList* list) const;
  absl::Status AddNormalized(NormalizedText text, Trust trust, PieceList* list) const;
  void EncodePieces(const PieceList& list, std::vector<int32_t>* ids) const;

  std::unique_ptr<Normalizer> normalizer_;       // null: none
  std::unique_ptr<PreTokenizer> pre_tokenizer_;  // null: none
  std::unique_ptr<BpeModel> model_;
  AddedTokens added_;
  PostProcessor post_processor_;
  std::unique_ptr<TokenDecoder> decoder_;
  int32_t id_end_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_TOKENIZER_IMPL_H_
