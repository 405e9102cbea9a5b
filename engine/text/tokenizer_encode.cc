// Tokenizer::Impl::Encode: segments -> text between added tokens -> normalised -> words -> ids.
#include <algorithm>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/tokenizer_impl.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

constexpr size_t kTextBytesMax = (size_t{1} << 30) - 1;
// Words that come back within one text are looked up instead of merged again. The table lives for
// one call: that needs no lock, and bounds it by the text.
constexpr size_t kCachedWordsMax = 1 << 16;
constexpr size_t kCachedWordBytesMax = 128;

}  // namespace

struct Tokenizer::Impl::Prompt {
  struct Region {
    size_t end;
    bool trusted;
  };
  std::string text;
  std::vector<Region> regions;  // neighbours differ in `trusted`

  Trust TrustOf(size_t begin, size_t end) const {
    auto region = std::upper_bound(regions.begin(), regions.end(), begin,
                                   [](size_t at, const Region& r) { return at < r.end; });
    if (region == regions.end()) return Trust::kNone;
    if (end > region->end) return Trust::kMixed;
    return region->trusted ? Trust::kAll : Trust::kNone;
  }
};

absl::StatusOr<std::vector<int32_t>> Tokenizer::Impl::Encode(std::span<const TextSegment> segments,
                                                             bool add_special_tokens) const {
  Prompt prompt;
  size_t bytes = 0;
  for (const TextSegment& segment : segments) bytes += segment.text.size();
  if (bytes > kTextBytesMax) {
    return absl::InvalidArgumentError(Concat("a text of ", bytes, " bytes is too long"));
  }
  prompt.text.reserve(bytes);
  for (const TextSegment& segment : segments) {
    if (segment.text.empty()) continue;
    if (const size_t bad = FindInvalidUtf8(segment.text); bad != std::string_view::npos) {
      return absl::InvalidArgumentError(
          Concat("text is not valid UTF-8 at byte ", prompt.text.size() + bad));
    }
    prompt.text += segment.text;
    if (!prompt.regions.empty() && prompt.regions.back().trusted == segment.parse_special) {
      prompt.regions.back().end = prompt.text.size();
    } else {
      prompt.regions.push_back({prompt.text.size(), segment.parse_special});
    }
  }

  RegexScratch scratch;
  PieceList list;
  WINNOW_RETURN_IF_ERROR(SplitAtTokens(prompt, &scratch, &list));
  if (pre_tokenizer_ != nullptr) {
    WINNOW_RETURN_IF_ERROR(pre_tokenizer_->Apply(&list, &scratch));
  }
  std::vector<int32_t> ids;
  EncodePieces(list, &ids);
  return post_processor_.Apply(std::move(ids), add_special_tokens);
}

absl::Status Tokenizer::Impl::SplitAtTokens(const Prompt& prompt, RegexScratch* scratch,
                                            PieceList* list) const {
  if (prompt.text.empty()) return absl::OkStatus();
  const std::vector<TokenSpan> spans =
      added_.Split(prompt.text, AddedTokens::Stage::kRaw,
                   [&](size_t begin, size_t end) { return prompt.TrustOf(begin, end); });
  list->text.reserve(prompt.text.size() + prompt.text.size() / 8);
  const uint32_t first_character_bytes =
      static_cast<uint32_t>(CodePointLength(static_cast<unsigned char>(prompt.text[0])));
  for (const TokenSpan& span : spans) {
    if (span.token != kNoToken) {
      const uint32_t at = static_cast<uint32_t>(list->text.size());
      list->pieces.push_back({at, at, span.token, 0});
      continue;
    }
    NormalizedText text;
    text.bytes = prompt.text.substr(span.begin, span.end - span.begin);
    text.origin_bytes = span.begin == 0 ? first_character_bytes : 0;
    const Trust trust = prompt.TrustOf(span.begin, span.end);
    // Only tokens that are looked for in normalised text need to know about each byte.
    if (trust == Trust::kMixed && added_.HasAny(AddedTokens::Stage::kNormalized)) {
      text.trusted.resize(text.bytes.size());
      size_t at = span.begin;
      while (at < span.end) {
        auto region =
            std::upper_bound(prompt.regions.begin(), prompt.regions.end(), at,
                             [](size_t offset, const Prompt::Region& r) { return offset < r.end; });
        const size_t end = std::min(region->end, span.end);
        std::fill(text.trusted.begin() + static_cast<ptrdiff_t>(at - span.begin),
                  text.trusted.begin() + static_cast<ptrdiff_t>(end - span.begin),
                  region->trusted ? '\1' : '\0');
        at = end;
      }
    }
    if (normalizer_ != nullptr) WINNOW_RETURN_IF_ERROR(normalizer_->Apply(&text, scratch));
    if (list->text.size() + text.bytes.size() > kTextBytesMax) {
      return absl::ResourceExhaustedError("the normalised text is too large");
    }
    WINNOW_RETURN_IF_ERROR(AddNormalized(std::move(text), trust, list));
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::Impl::AddNormalized(NormalizedText text, Trust trust,
                                            PieceList* list) const {
  const auto trust_of = [&](size_t begin, size_t end) {
    if (text.trusted.empty()) return trust;
    const std::string_view range = std::string_view(text.trusted).substr(begin, end - begin);
    if (range.find('\0') == std::string_view::npos) return Trust::kAll;
    return range.find('\1') == std::string_view::npos ? Trust::kNone : Trust::kMixed;
  };
  const uint32_t base = static_cast<uint32_t>(list->text.size());
  for (const TokenSpan& span :
       added_.Split(text.bytes, AddedTokens::Stage::kNormalized, trust_of)) {
    const size_t origin = std::min(text.origin_bytes, span.end);
    list->pieces.push_back({base + static_cast<uint32_t>(span.begin),
                            base + static_cast<uint32_t>(span.end), span.token,
                            static_cast<uint32_t>(origin > span.begin ? origin - span.begin : 0)});
  }
  list->text += text.bytes;
  return absl::OkStatus();
}

void Tokenizer::Impl::EncodePieces(const PieceList& list, std::vector<int32_t>* ids) const {
  BpeModel::Scratch scratch;
  struct Range {
    uint32_t begin;
    uint32_t size;
  };
  absl::flat_hash_map<std::string_view, Range> seen;
  const bool use_cache = list.pieces.size() > 64;
  ids->reserve(list.pieces.size() + list.pieces.size() / 2);
  for (const PieceList::Piece& piece : list.pieces) {
    if (piece.token != kNoToken) {
      ids->push_back(piece.token);
      continue;
    }
    const std::string_view word = list.TextOf(piece);
    const bool cacheable = use_cache && word.size() <= kCachedWordBytesMax;
    if (cacheable) {
      if (auto it = seen.find(word); it != seen.end()) {
        const Range range = it->second;
        for (uint32_t i = 0; i < range.size; ++i) {
          const int32_t id = (*ids)[range.begin + i];
          ids->push_back(id);
        }
        continue;
      }
    }
    const uint32_t begin = static_cast<uint32_t>(ids->size());
    model_->Encode(word, &scratch, ids);
    if (cacheable && seen.size() < kCachedWordsMax) {
      seen.emplace(word, Range{begin, static_cast<uint32_t>(ids->size()) - begin});
    }
  }
}

}  // namespace winnow::engine
