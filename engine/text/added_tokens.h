// The `added_tokens` of tokenizer.json: strings that become one token wherever they stand in a
// text, before anything else looks at it.
//
// Immutable after creation; any thread.
#ifndef WINNOW_ENGINE_TEXT_ADDED_TOKENS_H_
#define WINNOW_ENGINE_TEXT_ADDED_TOKENS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/text/bpe.h"
#include "engine/text/tokenizer_json.h"
#include "engine/text/tokenizer_normalizer.h"

namespace winnow::engine {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  std::string
      normalized_content;  // what is looked for in normalised text; content if `normalized` is off
  bool single_word = false;  // only between characters that are not of words
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for after normalisation
  bool special = false;      // a control token
};

// Finds any of a set of strings: leftmost first, the longest of those that begin there.
class TokenTrie {
 public:
  // False: empty, or there already.
  bool Add(std::string_view text, int32_t value);
  // Calls visit(value, length) for each string that begins at `offset`, shortest first.
  template <typename Visit>
  void ForEachAt(std::string_view text, size_t offset, Visit visit) const;
  bool MayBegin(unsigned char byte) const { return first_bytes_[byte]; }
  bool empty() const { return values_.empty(); }

 private:
  int32_t Child(int32_t node, unsigned char byte) const {
    auto it = children_.find(static_cast<uint32_t>(node) << 8 | byte);
    return it == children_.end() ? -1 : it->second;
  }
  bool first_bytes_[256] = {};
  absl::flat_hash_map<uint32_t, int32_t> children_;  // (node, byte) -> node
  absl::flat_hash_map<int32_t, int32_t> values_;     // node -> value
  int32_t nodes_ = 1;
};

// Of a range of text: whether special tokens are recognised in it.
enum class Trust { kAll, kNone, kMixed };

// A stretch of a text: a token, or text between tokens.
struct TokenSpan {
  size_t begin;
  size_t end;
  int32_t token;  // kNoToken (-1): text
};

class AddedTokens {
 public:
  // `normalizer` may be null. Ids must be those that the reference would give: a token of the
  // vocabulary has the vocabulary's id, the others follow it one by one.
  static absl::StatusOr<AddedTokens> Make(const std::optional<JsonNode>& json,
                                          const BpeModel& model, const Normalizer* normalizer);

  enum class Stage { kRaw, kNormalized };
  bool HasAny(Stage stage) const { return !TrieOf(stage).empty(); }

  // Cuts `text` at the tokens of one stage; the spans cover it in order. Special tokens become
  // tokens only where trusted(begin, end) is Trust::kAll; elsewhere they are text, and nothing
  // inside them is looked for (as the reference, told to ignore special tokens).
  template <typename Trusted>
  std::vector<TokenSpan> Split(std::string_view text, Stage stage, Trusted trusted) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }  // in the file's order
  const AddedToken* Find(int32_t id) const;
  const AddedToken* Find(std::string_view content) const;

 private:
  struct Match {
    size_t end;
    int32_t index;  // in tokens_
  };
  const TokenTrie& TrieOf(Stage stage) const {
    return stage == Stage::kRaw ? raw_trie_ : normalized_trie_;
  }
  // Where a token with its flags begins and ends; nullopt if it may not stand here.
  std::optional<std::pair<size_t, size_t>> Extent(std::string_view text, const AddedToken& token,
                                                  size_t begin, size_t end, size_t covered) const;

  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<int32_t, size_t> by_id_;
  absl::flat_hash_map<std::string, size_t> by_content_;
  TokenTrie raw_trie_;
  TokenTrie normalized_trie_;
};

template <typename Visit>
void TokenTrie::ForEachAt(std::string_view text, size_t offset, Visit visit) const {
  int32_t node = 0;
  for (size_t at = offset; at < text.size(); ++at) {
    node = Child(node, static_cast<unsigned char>(text[at]));
    if (node < 0) return;
    if (auto it = values_.find(node); it != values_.end()) visit(it->second, at + 1 - offset);
  }
}

template <typename Trusted>
std::vector<TokenSpan> AddedTokens::Split(std::string_view text, Stage stage,
                                          Trusted trusted) const {
  const TokenTrie& trie = TrieOf(stage);
  std::vector<TokenSpan> spans;
  size_t covered = 0;
  for (size_t at = 0; at < text.size() && !trie.empty();) {
    if (!trie.MayBegin(static_cast<unsigned char>(text[at]))) {
      ++at;
      continue;
    }
    std::optional<Match> longest;
    trie.ForEachAt(text, at, [&](int32_t index, size_t length) {
      // A special token across the border between trusted text and other text is no token, nor does
      // it hide one.
      const bool special = tokens_[static_cast<size_t>(index)].special;
      if (special && trusted(at, at + length) == Trust::kMixed) return;
      longest = Match{at + length, index};
    });
    if (!longest) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(longest->index)];
    const size_t begin = at;
    at = longest->end;
    if (token.special && trusted(begin, longest->end) != Trust::kAll) continue;
    const auto extent = Extent(text, token, begin, longest->end, covered);
    if (!extent) continue;
    if (covered < extent->first) spans.push_back({covered, extent->first, -1});
    spans.push_back({extent->first, extent->second, token.id});
    covered = extent->second;
  }
  if (covered < text.size()) spans.push_back({covered, text.size(), -1});
  return spans;
}

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_ADDED_TOKENS_H_
