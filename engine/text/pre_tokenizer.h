// The `pre_tokenizer` of tokenizer.json: cuts a text into the words that BPE works on.
//
// Honoured: ByteLevel, Split, Sequence, Digits, Metaspace, Whitespace, WhitespaceSplit,
// CharDelimiterSplit. Every other kind is refused by name. Immutable after creation; any thread.
#ifndef WINNOW_ENGINE_TEXT_PRE_TOKENIZER_H_
#define WINNOW_ENGINE_TEXT_PRE_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer_json.h"
#include "engine/text/tokenizer_regex.h"

namespace winnow::engine {

inline constexpr int32_t kNoToken = -1;

// A text cut into pieces. A piece that is already a token is left alone by every later step.
struct PieceList {
  struct Piece {
    uint32_t begin;         // in `text`, in bytes
    uint32_t end;           // > begin unless it is a token
    int32_t token;          // kNoToken: still text
    uint32_t origin_bytes;  // how many of the first bytes come from the prompt's first character
  };
  std::string text;
  std::vector<Piece> pieces;

  std::string_view TextOf(const Piece& piece) const {
    return std::string_view(text).substr(piece.begin, piece.end - piece.begin);
  }
};

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual absl::Status Apply(PieceList* list, RegexScratch* scratch) const = 0;
};

absl::StatusOr<std::unique_ptr<PreTokenizer>> MakePreTokenizer(const JsonNode& json);

// Whether a step maps text to the byte alphabet.
bool UsesByteLevelPreTokenizer(const JsonNode& json);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_PRE_TOKENIZER_H_
