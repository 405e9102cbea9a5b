#include "engine/text/bpe.h"

#include <algorithm>

#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {

std::optional<int32_t> BpeModel::IdOf(std::string_view token) const {
  auto it = ids_.find(token);
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

std::string_view BpeModel::TextOf(int32_t id) const {
  if (!HasId(id)) return {};
  const Text& text = texts_[static_cast<size_t>(id)];
  return std::string_view(pool_).substr(text.offset, text.size);
}

bool BpeModel::HasId(int32_t id) const {
  return id >= 0 && id < id_end() && texts_[static_cast<size_t>(id)].present;
}

int32_t BpeModel::IdOfCharacter(char32_t c) const {
  if (c < low_characters_.size()) return low_characters_[c];
  auto it = high_characters_.find(static_cast<uint32_t>(c));
  return it == high_characters_.end() ? -1 : it->second;
}

int32_t BpeModel::IdOfSpelled(std::string_view word, size_t at, size_t bytes,
                              std::string* spelled) const {
  spelled->clear();
  if (at > 0) *spelled += continuing_subword_prefix_;
  *spelled += word.substr(at, bytes);
  if (at + bytes == word.size()) *spelled += end_of_word_suffix_;
  return IdOf(*spelled).value_or(-1);
}

bool BpeModel::HasByteTokens(std::string_view text) const {
  if (!byte_fallback_) return false;
  for (const char byte : text) {
    if (byte_tokens_[static_cast<unsigned char>(byte)] < 0) return false;
  }
  return true;
}

void BpeModel::SplitIntoSymbols(std::string_view word,
                                std::vector<Scratch::Symbol>* symbols) const {
  symbols->clear();
  const auto add = [&](int32_t id, uint32_t bytes) {
    const int32_t position = static_cast<int32_t>(symbols->size());
    if (position > 0) symbols->back().next = position;
    symbols->push_back({id, position - 1, -1, bytes});
  };
  // An unknown character waits here, to be fused with the next one. The reference does not let it
  // out before byte tokens, so they overtake it; equal ids need the same.
  uint32_t unknown_bytes = 0;
  const int32_t unknown = unk_id_.value_or(-1);
  const bool affixes = !continuing_subword_prefix_.empty() || !end_of_word_suffix_.empty();
  std::string buffer;
  for (size_t at = 0; at < word.size();) {
    int length = 0;
    const char32_t c = DecodeCodePoint(word, at, &length);
    const uint32_t bytes = static_cast<uint32_t>(length);
    const int32_t id = affixes ? IdOfSpelled(word, at, bytes, &buffer) : IdOfCharacter(c);
    // What byte tokens would have to spell: in the reference the affixes, too.
    const std::string_view spelled = affixes ? std::string_view(buffer) : word.substr(at, bytes);
    if (id >= 0) {
      if (unknown_bytes > 0) add(unknown, unknown_bytes);
      unknown_bytes = 0;
      add(id, bytes);
    } else if (HasByteTokens(spelled)) {
      for (const char byte : spelled) add(byte_tokens_[static_cast<unsigned char>(byte)], 1);
    } else if (unknown >= 0) {
      if (unknown_bytes > 0 && !fuse_unk_) {
        add(unknown, unknown_bytes);
        unknown_bytes = 0;
      }
      unknown_bytes += bytes;
    }
    at += bytes;
  }
  if (unknown_bytes > 0) add(unknown, unknown_bytes);
}

void BpeModel::PushCandidate(const std::vector<Scratch::Symbol>& symbols, int32_t left,
                             std::vector<Scratch::Candidate>* heap) const {
  const Scratch::Symbol& symbol = symbols[static_cast<size_t>(left)];
  if (symbol.next < 0) return;
  auto merge = merges_.find(PairKey(symbol.id, symbols[static_cast<size_t>(symbol.next)].id));
  if (merge == merges_.end()) return;
  heap->push_back({merge->second.rank, left, merge->second.merged_id});
}

void BpeModel::Encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    if (const std::optional<int32_t> whole = IdOf(word)) {
      ids->push_back(*whole);
      return;
    }
  }
  std::vector<Scratch::Symbol>& symbols = scratch->symbols_;
  std::vector<Scratch::Candidate>& heap = scratch->heap_;
  SplitIntoSymbols(word, &symbols);
  heap.clear();
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    PushCandidate(symbols, static_cast<int32_t>(i), &heap);
  }
  std::make_heap(heap.begin(), heap.end());

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Scratch::Candidate best = heap.back();
    heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<size_t>(best.position)];
    if (left.bytes == 0 || left.next < 0) continue;
    Scratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    // The entry is stale if a neighbour has changed since. The reference compares the product only.
    auto merge = merges_.find(PairKey(left.id, right.id));
    if (merge == merges_.end() || merge->second.merged_id != best.merged_id) continue;

    left.id = best.merged_id;
    left.bytes += right.bytes;
    left.next = right.next;
    right.bytes = 0;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.position;
    for (int32_t candidate : {left.previous, best.position}) {
      if (candidate < 0) continue;
      const size_t before = heap.size();
      PushCandidate(symbols, candidate, &heap);
      if (heap.size() > before) std::push_heap(heap.begin(), heap.end());
    }
  }
  for (const Scratch::Symbol& symbol : symbols) {
    if (symbol.bytes > 0) ids->push_back(symbol.id);
  }
}

}  // namespace winnow::engine
