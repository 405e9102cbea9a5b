// The `normalizer` of tokenizer.json: what happens to a text before it is split into words.
//
// Honoured: NFC, NFD, NFKC, NFKD, Sequence, Prepend, Replace, Strip, Nmt, ByteLevel. Every other
// kind is refused by name. Immutable after creation; any thread.
#ifndef WINNOW_ENGINE_TEXT_TOKENIZER_NORMALIZER_H_
#define WINNOW_ENGINE_TEXT_TOKENIZER_NORMALIZER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer_json.h"
#include "engine/text/tokenizer_regex.h"

namespace winnow::engine {

// A text on its way through the normalisers, and what later steps need to know of its origin.
struct NormalizedText {
  std::string bytes;
  // For each byte, '\1' if it comes only from text in which special tokens are recognised, else
  // '\0'. Empty if that is the same for the whole text.
  std::string trusted;
  // The first bytes that come from the first character of the whole prompt: Metaspace's "first"
  // asks.
  size_t origin_bytes = 0;
};

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  virtual absl::Status Apply(NormalizedText* text, RegexScratch* scratch) const = 0;
};

absl::StatusOr<std::unique_ptr<Normalizer>> MakeNormalizer(const JsonNode& json);

// Whether a normaliser turns text into the byte alphabet.
bool UsesByteLevelNormalizer(const JsonNode& json);

// The alphabet of byte-level BPE: one printable character for each byte.
char32_t ByteLevelCharacter(unsigned char byte);
// The byte that a character stands for, -1 if none.
int ByteLevelByte(char32_t character);

enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };
// As the reference normalises: code points that its Unicode data do not know stand alone.
std::string NormalizeUnicode(std::string_view text, UnicodeForm form);

// Reads the `pattern` member that Replace and Split share: {"String": …} or {"Regex": …}.
absl::StatusOr<SplitPattern> ReadPattern(const JsonNode& owner);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_TOKENIZER_NORMALIZER_H_
