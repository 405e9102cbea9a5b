// BpeModel::Make: the model's JSON, checked.
#include "absl/strings/str_format.h"
#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/text/bpe.h"
#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

constexpr char32_t kLowCharacters = 0x3400;  // all alphabets; what lies above is Han and rarer
constexpr size_t kPoolBytesMax = size_t{1} << 30;
// An affix is written before or after each character that is looked up; the longest in use has 4.
constexpr size_t kAffixBytesMax = 64;

// The bytes that occur in UTF-8; the others are no part of any text.
bool OccursInUtf8(int byte) { return byte < 0xC0 || (byte >= 0xC2 && byte <= 0xF4); }

std::string Quote(std::string_view token) {
  // Errors are for a log line: short, without control characters.
  std::string out = "\"";
  for (char c : token.substr(0, 40)) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out += Concat(absl::StrFormat("\\x%02X", static_cast<unsigned char>(c)));
    } else {
      out += c;
    }
  }
  return out + (token.size() > 40 ? "...\"" : "\"");
}

}  // namespace

absl::StatusOr<std::unique_ptr<BpeModel>> BpeModel::Make(const JsonNode& json, bool byte_level) {
  WINNOW_RETURN_IF_ERROR(json.RequireObject());
  std::unique_ptr<BpeModel> model(new BpeModel);
  WINNOW_RETURN_IF_ERROR(model->ReadOptions(json));
  WINNOW_RETURN_IF_ERROR(model->ReadVocabulary(json));
  WINNOW_RETURN_IF_ERROR(model->ReadMerges(json));
  WINNOW_RETURN_IF_ERROR(model->CheckUnknown(json, byte_level));
  return model;
}

absl::Status BpeModel::ReadOptions(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> type_node, json.Optional("type"));
  if (type_node) {  // older files have none
    WINNOW_ASSIGN_OR_RETURN(const std::string type, type_node->String());
    if (type != "BPE") {
      return type_node->Unsupported(Concat("model ", Quote(type), " is not supported (BPE is)"));
    }
  }
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> dropout, json.Optional("dropout"));
  if (dropout && !(dropout->value().is_number() && dropout->value().get<double>() == 0)) {
    return dropout->Unsupported("dropout makes tokens random and is not supported");
  }
  const std::pair<const char*, std::string*> affixes[] = {
      {"continuing_subword_prefix", &continuing_subword_prefix_},
      {"end_of_word_suffix", &end_of_word_suffix_}};
  for (const auto& [name, affix] : affixes) {
    WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> node, json.Optional(name));
    if (!node) continue;
    WINNOW_ASSIGN_OR_RETURN(*affix, node->String());
    if (affix->size() > kAffixBytesMax) {
      return node->Error(Concat("is longer than ", kAffixBytesMax, " bytes"));
    }
  }
  WINNOW_ASSIGN_OR_RETURN(fuse_unk_, json.BoolOr("fuse_unk", false));
  WINNOW_ASSIGN_OR_RETURN(byte_fallback_, json.BoolOr("byte_fallback", false));
  WINNOW_ASSIGN_OR_RETURN(ignore_merges_, json.BoolOr("ignore_merges", false));
  return absl::OkStatus();
}

absl::Status BpeModel::ReadVocabulary(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode vocab, json.Member("vocab"));
  WINNOW_RETURN_IF_ERROR(vocab.RequireObject());
  if (vocab.size() == 0) return vocab.Error("is empty");

  const auto& tokens = vocab.value().get_ref<const nlohmann::json::object_t&>();
  const auto at = [&](const std::string& token, const nlohmann::json& value) {
    return JsonNode(&value, Concat(vocab.path(), "[", Quote(token), "]"));
  };
  size_t pool_bytes = 0;
  int64_t id_max = 0;
  for (const auto& [token, value] : tokens) {
    pool_bytes += token.size();
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kTokenIdMax) {
      return at(token, value).Integer(0, kTokenIdMax).status();
    }
    id_max = std::max(id_max, value.get<int64_t>());
  }
  if (pool_bytes > kPoolBytesMax) return vocab.Error("is too large");
  // A table by id: gaps are allowed, but not so that a small file takes much memory.
  if (id_max > 4 * static_cast<int64_t>(tokens.size()) + 65536) {
    return vocab.Error(Concat("has the id ", id_max, " among ", tokens.size(), " tokens"));
  }

  pool_.reserve(pool_bytes);
  texts_.resize(static_cast<size_t>(id_max) + 1);
  ids_.reserve(tokens.size());
  low_characters_.assign(kLowCharacters, -1);
  for (const auto& [token, value] : tokens) {
    const int32_t id = value.get<int32_t>();
    Text& text = texts_[static_cast<size_t>(id)];
    if (text.present) {
      return at(token, value)
          .Error(Concat("has the id ", id, " of ",
                        Quote(std::string_view(pool_).substr(text.offset, text.size))));
    }
    text = {static_cast<uint32_t>(pool_.size()), static_cast<uint32_t>(token.size()), true};
    pool_ += token;
    const std::string_view stored = std::string_view(pool_).substr(text.offset, text.size);
    ids_.emplace(stored, id);
    if (stored.empty()) continue;
    int length = 0;
    const char32_t c = DecodeCodePoint(stored, 0, &length);
    if (stored.size() != static_cast<size_t>(length)) continue;
    if (c < kLowCharacters) {
      low_characters_[c] = id;
    } else {
      high_characters_.emplace(static_cast<uint32_t>(c), id);
    }
  }

  for (int byte = 0; byte < 256; ++byte) {
    byte_tokens_[static_cast<size_t>(byte)] = IdOf(absl::StrFormat("<0x%02X>", byte)).value_or(-1);
  }
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> unk, json.Optional("unk_token"));
  if (unk) {
    WINNOW_ASSIGN_OR_RETURN(unk_token_, unk->String());
    unk_id_ = IdOf(unk_token_);
  }
  return absl::OkStatus();
}

absl::Status BpeModel::ReadMerges(const JsonNode& json) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode list, json.Member("merges"));
  WINNOW_RETURN_IF_ERROR(list.RequireArray());
  merges_.reserve(list.size());
  uint32_t rank = 0;
  std::string product;
  const bool pairs = list.size() > 0 && list.value()[0].is_array();
  for (size_t i = 0; i < list.size(); ++i) {
    const nlohmann::json& item = list.value()[i];
    std::string_view left;
    std::string_view right;
    if (pairs) {
      if (!item.is_array() || item.size() != 2 || !item[0].is_string() || !item[1].is_string()) {
        return list.At(i).Error("must be a pair of tokens, as the first one is");
      }
      left = item[0].get_ref<const std::string&>();
      right = item[1].get_ref<const std::string&>();
    } else {
      if (!item.is_string())
        return list.At(i).Error("must be a string \"a b\" or a pair of tokens");
      const std::string_view line = item.get_ref<const std::string&>();
      if (line.starts_with("#version")) continue;
      const size_t space = line.find(' ');
      if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) {
        return list.At(i).Error("must be two tokens with one space between them");
      }
      left = line.substr(0, space);
      right = line.substr(space + 1);
    }
    // The prefix of the right token is inside the product, where it has no place.
    if (!right.starts_with(continuing_subword_prefix_)) {
      return list.At(i).Error(Concat(Quote(right), " does not begin with ",
                                     Quote(continuing_subword_prefix_),
                                     ", the continuing_subword_prefix"));
    }
    product.assign(left).append(right.substr(continuing_subword_prefix_.size()));
    const std::string_view tokens[] = {left, right, product};
    int32_t ids[3];
    for (int k = 0; k < 3; ++k) {
      ids[k] = IdOf(tokens[k]).value_or(-1);
      if (ids[k] < 0)
        return list.At(i).Error(Concat(Quote(tokens[k]), " is not in the vocabulary"));
    }
    // Of a pair that is listed twice, the reference keeps the last.
    merges_[PairKey(ids[0], ids[1])] = {rank++, ids[2]};
  }
  return absl::OkStatus();
}

absl::Status BpeModel::CheckUnknown(const JsonNode& json, bool byte_level) {
  bool all_byte_tokens = byte_fallback_;
  for (int byte = 0; byte < 256; ++byte) {
    if (!OccursInUtf8(byte)) continue;
    all_byte_tokens &= byte_tokens_[static_cast<size_t>(byte)] >= 0;
    if (byte_level && IdOfCharacter(ByteLevelCharacter(static_cast<unsigned char>(byte))) < 0) {
      ++missing_bytes_;
    }
  }
  // An unknown token that no text leads to needs no place in the vocabulary. Any other would make
  // the reference fail in the middle of a text.
  const bool unknown_is_reached = !all_byte_tokens && (!byte_level || missing_bytes_ > 0);
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> unk, json.Optional("unk_token"));
  if (unk && !unk_id_ && unknown_is_reached) {
    return unk->Error(Concat(Quote(unk_token_), " is not in the vocabulary"));
  }
  return absl::OkStatus();
}

}  // namespace winnow::engine
