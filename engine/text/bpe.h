// The `model` of tokenizer.json: byte-pair encoding of one word.
//
// Honoured: vocab, merges (as "a b" or ["a","b"]), unk_token, fuse_unk, byte_fallback,
// ignore_merges, continuing_subword_prefix, end_of_word_suffix. Refused: dropout above 0 and every
// model that is not BPE. Immutable after creation; any thread, each with its own scratch.
//
// Characters without a token, as in the reference: with byte_fallback they become their byte
// tokens if the vocabulary has all of them; else the unknown token, if there is one (neighbours
// become one with fuse_unk); else nothing.
#ifndef WINNOW_ENGINE_TEXT_BPE_H_
#define WINNOW_ENGINE_TEXT_BPE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer_json.h"

namespace winnow::engine {

// Ids above this are no vocabulary's (the largest in use have 256K): tables are indexed by id.
inline constexpr int32_t kTokenIdMax = (1 << 22) - 1;

class BpeModel {
 public:
  // Working memory of one thread.
  class Scratch {
   private:
    friend class BpeModel;
    struct Symbol {
      int32_t id;
      int32_t previous;  // -1: none
      int32_t next;      // -1: none
      uint32_t bytes;    // 0: merged into the one before
    };
    struct Candidate {
      uint32_t rank;
      int32_t position;
      int32_t merged_id;
      // Of a heap whose top is the lowest rank, leftmost.
      bool operator<(const Candidate& other) const {
        return rank != other.rank ? rank > other.rank : position > other.position;
      }
    };
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
  };

  // `byte_level`: the text arrives in the byte alphabet and in nothing else.
  static absl::StatusOr<std::unique_ptr<BpeModel>> Make(const JsonNode& json, bool byte_level);

  // Appends the ids of `word` (valid UTF-8, below 2 GiB). Time n log n in its length.
  void Encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const;

  std::optional<int32_t> IdOf(std::string_view token) const;
  // Empty if no token has this id; so is the text of a token that is the empty string.
  std::string_view TextOf(int32_t id) const;
  bool HasId(int32_t id) const;
  int32_t token_count() const { return static_cast<int32_t>(ids_.size()); }
  // Bytes that occur in UTF-8 and that this vocabulary cannot spell: text with them loses them or
  // becomes unknown tokens. 0 if characters do not come as bytes.
  int missing_bytes() const { return missing_bytes_; }
  bool has_unk() const { return unk_id_.has_value(); }
  int32_t id_end() const { return static_cast<int32_t>(texts_.size()); }  // highest id + 1

 private:
  struct Merge {
    uint32_t rank;
    int32_t merged_id;
  };
  struct Text {
    uint32_t offset = 0;
    uint32_t size = 0;
    bool present = false;
  };

  BpeModel() = default;
  absl::Status ReadOptions(const JsonNode& json);
  absl::Status ReadVocabulary(const JsonNode& json);
  absl::Status ReadMerges(const JsonNode& json);
  absl::Status CheckUnknown(const JsonNode& json, bool byte_level);

  static uint64_t PairKey(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  int32_t IdOfCharacter(char32_t c) const;
  // The token of the character word[at, at + bytes), with the affixes that its place asks for.
  // `spelled` is set to the text that was looked up.
  int32_t IdOfSpelled(std::string_view word, size_t at, size_t bytes, std::string* spelled) const;
  // Whether byte_fallback is on and each byte of `text` has its token.
  bool HasByteTokens(std::string_view text) const;
  void SplitIntoSymbols(std::string_view word, std::vector<Scratch::Symbol>* symbols) const;
  void PushCandidate(const std::vector<Scratch::Symbol>& symbols, int32_t left,
                     std::vector<Scratch::Candidate>* heap) const;

  std::string pool_;                                    // all tokens' texts
  std::vector<Text> texts_;                             // by id
  absl::flat_hash_map<std::string_view, int32_t> ids_;  // keys point into pool_
  absl::flat_hash_map<uint64_t, Merge> merges_;

  // Tokens of a single character, by code point: a table for the low ones, a map for the rest.
  std::vector<int32_t> low_characters_;
  absl::flat_hash_map<uint32_t, int32_t> high_characters_;
  std::array<int32_t, 256> byte_tokens_{};  // <0x00>..<0xFF>; -1 if missing
  std::string continuing_subword_prefix_;   // before every character of a word but the first
  std::string end_of_word_suffix_;          // after the last character of a word
  int missing_bytes_ = 0;
  std::optional<int32_t> unk_id_;
  std::string unk_token_;
  bool fuse_unk_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_BPE_H_
