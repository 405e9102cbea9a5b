#include "engine/text/tokenizer.h"

#include <algorithm>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/tokenizer_impl.h"
#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {

absl::StatusOr<std::unique_ptr<Tokenizer::Impl>> Tokenizer::Impl::Make(const JsonNode& root) {
  WINNOW_RETURN_IF_ERROR(root.RequireObject());
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> version, root.Optional("version"));
  if (version) {
    WINNOW_ASSIGN_OR_RETURN(const std::string number, version->String());
    if (number != "1.0")
      return version->Unsupported("only version \"1.0\" of the format is supported");
  }
  auto impl = std::make_unique<Impl>();
  bool byte_level = false;
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> normalizer, root.Optional("normalizer"));
  if (normalizer) {
    WINNOW_ASSIGN_OR_RETURN(impl->normalizer_, MakeNormalizer(*normalizer));
    byte_level |= UsesByteLevelNormalizer(*normalizer);
  }
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> pre, root.Optional("pre_tokenizer"));
  if (pre) {
    WINNOW_ASSIGN_OR_RETURN(impl->pre_tokenizer_, MakePreTokenizer(*pre));
    byte_level |= UsesByteLevelPreTokenizer(*pre);
  }
  WINNOW_ASSIGN_OR_RETURN(const JsonNode model, root.Member("model"));
  WINNOW_ASSIGN_OR_RETURN(impl->model_, BpeModel::Make(model, byte_level));
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> added, root.Optional("added_tokens"));
  WINNOW_ASSIGN_OR_RETURN(impl->added_,
                          AddedTokens::Make(added, *impl->model_, impl->normalizer_.get()));
  impl->id_end_ = impl->model_->id_end();
  for (const AddedToken& token : impl->added_.tokens()) {
    impl->id_end_ = std::max(impl->id_end_, token.id + 1);
  }
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> post, root.Optional("post_processor"));
  WINNOW_ASSIGN_OR_RETURN(impl->post_processor_, PostProcessor::Make(post, impl->id_end_));
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> decoder, root.Optional("decoder"));
  WINNOW_ASSIGN_OR_RETURN(TokenDecoder made, TokenDecoder::Make(decoder));
  impl->decoder_ = std::make_unique<TokenDecoder>(std::move(made));
  return impl;
}

std::optional<std::string_view> Tokenizer::Impl::DecoderText(int32_t id,
                                                             bool skip_special_tokens) const {
  if (const AddedToken* token = added_.Find(id)) {
    // The reference asks whether the text it is about to decode is that of a special token, so one
    // that normalisation changes is not skipped.
    if (skip_special_tokens) {
      const AddedToken* same = added_.Find(token->normalized_content);
      if (same != nullptr && same->special) return std::nullopt;
    }
    return token->normalized_content;
  }
  if (!model_->HasId(id)) return std::nullopt;
  return model_->TextOf(id);
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& model_dir) {
  WINNOW_ASSIGN_OR_RETURN(const JsonDocument document,
                          JsonDocument::ReadFile(Concat(model_dir, "/tokenizer.json")));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl, Impl::Make(document.root()));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Parse(std::string_view json,
                                                            const std::string& name) {
  WINNOW_ASSIGN_OR_RETURN(const JsonDocument document, JsonDocument::Parse(json, name));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl, Impl::Make(document.root()));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(impl)));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::span<const TextSegment> segments,
                                                       bool add_special_tokens) const {
  return impl_->Encode(segments, add_special_tokens);
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                                       bool add_special_tokens,
                                                       bool parse_special) const {
  const TextSegment segment{text, parse_special};
  return impl_->Encode(std::span(&segment, 1), add_special_tokens);
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  TokenDecoder::Stream stream = impl_->decoder().NewStream();
  for (int32_t id : ids) {
    if (const auto text = impl_->DecoderText(id, skip_special_tokens)) stream.Add(*text);
  }
  stream.Finish();
  return stream.Take();
}

int32_t Tokenizer::vocab_size() const { return impl_->id_end(); }

std::optional<int32_t> Tokenizer::TokenToId(std::string_view token) const {
  if (const AddedToken* added = impl_->added().Find(token)) return added->id;
  return impl_->model().IdOf(token);
}

std::string Tokenizer::IdToToken(int32_t id) const {
  if (const AddedToken* added = impl_->added().Find(id)) return added->content;
  return std::string(impl_->model().TextOf(id));
}

int Tokenizer::missing_bytes() const { return impl_->model().missing_bytes(); }

bool Tokenizer::has_unk() const { return impl_->model().has_unk(); }

bool Tokenizer::IsSpecial(int32_t id) const {
  const AddedToken* added = impl_->added().Find(id);
  return added != nullptr && added->special;
}

std::string Tokenizer::BytesOf(int32_t id) const {
  const auto token = impl_->DecoderText(id, /*skip_special_tokens=*/true);
  if (!token || token->empty() || IsSpecial(id)) return "";
  // Not at the beginning, where some decoders take a space away.
  constexpr std::string_view kBefore = "x";
  const auto decoded = [&](std::string_view text) {
    TokenDecoder::Stream stream = impl_->decoder().NewStream();
    stream.Add(kBefore);
    stream.Add(text);
    stream.Finish();
    std::string out = stream.Take();
    return out.starts_with(kBefore) ? out.substr(kBefore.size()) : out;
  };
  std::string text = decoded(*token);
  if (text.find(kReplacementCharacter) == text.npos) return text;
  // Not a whole character: as the byte alphabet, or as the name of one byte, has it.
  if (token->size() == 6 && token->starts_with("<0x")) {
    return std::string(1,
                       static_cast<char>(std::stoi(std::string(token->substr(3, 2)), nullptr, 16)));
  }
  std::string bytes;
  for (size_t at = 0; at < token->size();) {
    int length = 0;
    const int byte = ByteLevelByte(DecodeCodePoint(*token, at, &length));
    if (byte < 0) return text;
    bytes.push_back(static_cast<char>(byte));
    at += static_cast<size_t>(length);
  }
  return bytes;
}

}  // namespace winnow::engine
