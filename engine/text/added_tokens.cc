#include "engine/text/added_tokens.h"

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

// Longer "tokens" do not exist; a bound keeps the search linear in the text.
constexpr size_t kTokenBytesMax = 4096;

// Start of the last character of a non-empty text.
size_t LastCharacter(std::string_view text) {
  size_t at = text.size() - 1;
  while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool BeginsWithWord(std::string_view text) {
  int length = 0;
  return !text.empty() && IsWord(DecodeCodePoint(text, 0, &length));
}

bool EndsWithWord(std::string_view text) {
  int length = 0;
  return !text.empty() && IsWord(DecodeCodePoint(text, LastCharacter(text), &length));
}

absl::StatusOr<AddedToken> ReadToken(const JsonNode& json) {
  AddedToken token;
  WINNOW_ASSIGN_OR_RETURN(const JsonNode id, json.Member("id"));
  WINNOW_ASSIGN_OR_RETURN(const int64_t number, id.Integer(0, kTokenIdMax));
  token.id = static_cast<int32_t>(number);
  WINNOW_ASSIGN_OR_RETURN(const JsonNode content, json.Member("content"));
  WINNOW_ASSIGN_OR_RETURN(token.content, content.String());
  if (token.content.size() > kTokenBytesMax) {
    return content.Error(Concat("is longer than ", kTokenBytesMax, " bytes"));
  }
  const std::pair<const char*, bool*> flags[] = {{"single_word", &token.single_word},
                                                 {"lstrip", &token.lstrip},
                                                 {"rstrip", &token.rstrip},
                                                 {"normalized", &token.normalized},
                                                 {"special", &token.special}};
  for (const auto& [name, flag] : flags) {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode node, json.Member(name));
    WINNOW_ASSIGN_OR_RETURN(*flag, node.Bool());
  }
  return token;
}

}  // namespace

bool TokenTrie::Add(std::string_view text, int32_t value) {
  if (text.empty()) return false;
  int32_t node = 0;
  for (char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    auto [it, added] = children_.try_emplace(static_cast<uint32_t>(node) << 8 | byte, nodes_);
    if (added) ++nodes_;
    node = it->second;
  }
  first_bytes_[static_cast<unsigned char>(text[0])] = true;
  return values_.emplace(node, value).second;
}

absl::StatusOr<AddedTokens> AddedTokens::Make(const std::optional<JsonNode>& json,
                                              const BpeModel& model, const Normalizer* normalizer) {
  AddedTokens added;
  if (!json) return added;
  WINNOW_RETURN_IF_ERROR(json->RequireArray());
  // A trie node's number and a byte share 32 bits.
  if (json->size() > (1 << 16)) return json->Error("more than 65536 added tokens");
  int32_t next_id = model.token_count();
  size_t bytes = 0;
  RegexScratch scratch;
  for (size_t i = 0; i < json->size(); ++i) {
    const JsonNode node = json->At(i);
    WINNOW_ASSIGN_OR_RETURN(AddedToken token, ReadToken(node));
    if (token.content.empty()) continue;  // as the reference
    bytes += token.content.size();
    if (bytes > (1 << 22)) return json->Error("more than 4 MiB of added tokens");
    auto known = added.by_content_.find(token.content);
    int32_t id = 0;
    if (known != added.by_content_.end()) {
      id = added.tokens_[known->second].id;
    } else if (const std::optional<int32_t> in_vocabulary = model.IdOf(token.content)) {
      id = *in_vocabulary;
    } else {
      id = next_id++;
    }
    if (id != token.id) {
      // The reference warns and uses its own number; a model would then see a wrong token.
      return node.Error(Concat("has id ", token.id, ", but by the vocabulary it is ", id));
    }
    if (known == added.by_content_.end() && model.HasId(id) && model.TextOf(id) != token.content) {
      return node.Error(Concat("has id ", id, ", which is another token of the vocabulary"));
    }
    token.normalized_content = token.content;
    if (token.normalized && normalizer != nullptr) {
      NormalizedText text{token.content, "", 0};
      WINNOW_RETURN_IF_ERROR(normalizer->Apply(&text, &scratch));
      token.normalized_content = std::move(text.bytes);
    }
    if (known != added.by_content_.end()) {
      // Listed twice: the last one's flags hold, but special it stays.
      token.special |= added.tokens_[known->second].special;
      added.tokens_[known->second] = std::move(token);
      continue;
    }
    added.by_content_.emplace(token.content, added.tokens_.size());
    added.by_id_.emplace(id, added.tokens_.size());
    added.tokens_.push_back(std::move(token));
  }
  for (size_t i = 0; i < added.tokens_.size(); ++i) {
    const AddedToken& token = added.tokens_[i];
    TokenTrie& trie = token.normalized ? added.normalized_trie_ : added.raw_trie_;
    if (!trie.Add(token.normalized_content, static_cast<int32_t>(i))) {
      return json->Error(Concat("the token with id ", token.id,
                                " is, after normalisation, empty or equal to another one"));
    }
  }
  return added;
}

const AddedToken* AddedTokens::Find(int32_t id) const {
  auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : &tokens_[it->second];
}

const AddedToken* AddedTokens::Find(std::string_view content) const {
  auto it = by_content_.find(std::string(content));
  return it == by_content_.end() ? nullptr : &tokens_[it->second];
}

std::optional<std::pair<size_t, size_t>> AddedTokens::Extent(std::string_view text,
                                                             const AddedToken& token, size_t begin,
                                                             size_t end, size_t covered) const {
  if (token.single_word &&
      (EndsWithWord(text.substr(0, begin)) || BeginsWithWord(text.substr(end)))) {
    return std::nullopt;
  }
  if (token.lstrip) {
    size_t stripped = begin;
    while (stripped > 0) {
      const size_t last = LastCharacter(text.substr(0, stripped));
      int length = 0;
      if (!IsWhiteSpace(DecodeCodePoint(text, last, &length))) break;
      stripped = last;
    }
    // White space that the token before has taken is gone.
    begin = std::max(stripped, covered);
  }
  if (token.rstrip) {
    while (end < text.size()) {
      int length = 0;
      if (!IsWhiteSpace(DecodeCodePoint(text, end, &length))) break;
      end += static_cast<size_t>(length);
    }
  }
  return std::pair(begin, end);
}

}  // namespace winnow::engine
