#include "engine/gguf_tokenizer.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/gguf_config.h"
#include "engine/model/gguf_keys.h"
#include "engine/text/bpe.h"
#include "engine/text/pre_tokenizer_kinds.h"
#include "engine/text/unicode/unicode_text.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {
namespace {

using nlohmann::json;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr size_t kTemplateBytesMax = 1 << 20;
// A token is at most this long where merges come of scores; the longest of real vocabularies have 64 characters.
constexpr size_t kScoredTokenBytesMax = 1024;
// Ways to cut a token in two, per token of the vocabulary: real ones have 2.
constexpr size_t kMergesPerTokenMax = 16;

constexpr std::string_view kTokens = "tokenizer.ggml.tokens";
constexpr std::string_view kScores = "tokenizer.ggml.scores";
constexpr std::string_view kTypes = "tokenizer.ggml.token_type";
constexpr std::string_view kMerges = "tokenizer.ggml.merges";
constexpr std::string_view kPre = "tokenizer.ggml.pre";
constexpr std::string_view kModel = "tokenizer.ggml.model";

// `text` as a JSON string. REQUIRES: valid UTF-8.
void AppendJson(std::string_view text, std::string* out) {
  *out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      *out += '\\';
      *out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      *out += Concat(absl::StrFormat("\\u%04x", static_cast<unsigned char>(c)));
    } else {
      *out += c;
    }
  }
  *out += '"';
}

using Pair = std::pair<std::string_view, std::string_view>;

// Reads a file's tokenizer, checks it and writes it as JSON.
class Converter {
 public:
  Converter(const GgufContents& contents, std::string_view name) : keys_(contents, name) {}
  absl::StatusOr<std::string> Convert();

 private:
  void Fail(absl::StatusCode code, std::string_view key, std::string_view what) {
    keys_.Fail(code, key, what);
  }
  bool ok() const { return keys_.status().ok(); }
  bool Is(size_t id, GgufTokenType type) const { return types_[id] == type; }
  std::string Shown(size_t id) const {
    return Concat("token ", id, ", ", ShortDump(std::string(tokens_[id])), ",");
  }

  void ReadVocabulary();
  void ReadTypes();
  std::optional<size_t> SpecialId(std::string_view key, std::optional<int64_t> absent);
  void ReadWords();
  std::vector<Pair> GivenMerges();
  std::vector<Pair> ScoredMerges();
  void AppendModel(const std::vector<Pair>& merges, std::string* out) const;
  void AppendAddedTokens(std::string* out) const;
  json PostProcessor();

  GgufKeys keys_;
  bool byte_level_ = false;
  const PreTokenizerKind* words_ = nullptr;  // of a byte-level vocabulary
  std::vector<std::string_view> tokens_;
  std::vector<GgufTokenType> types_;
  absl::flat_hash_map<std::string_view, size_t> ids_;  // of all but empty tokens
};

void Converter::ReadVocabulary() {
  const GgufValue* tokens = keys_.Find(kTokens);
  if (tokens == nullptr) return Fail(kInvalid, kTokens, "missing");
  if (!tokens->IsArrayOf(GgufValueType::kString))
    return Fail(kInvalid, kTokens, "must be an array of strings");
  if (tokens->count == 0 || tokens->count > static_cast<uint64_t>(kTokenIdMax) + 1) {
    return Fail(kInvalid, kTokens,
                Concat(tokens->count, " tokens; there must be 1 to ", kTokenIdMax + 1));
  }
  tokens_ = tokens->Strings();
  ids_.reserve(tokens_.size());
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (FindInvalidUtf8(tokens_[id]) != std::string_view::npos) {
      return Fail(kInvalid, kTokens, Concat(Shown(id), " is not valid UTF-8"));
    }
    if (tokens_[id].empty()) continue;
    const auto [there, added] = ids_.emplace(tokens_[id], id);
    if (!added)
      return Fail(kInvalid, kTokens,
                  Concat(Shown(id), " is there twice: as ", there->second, ", too"));
  }
}

void Converter::ReadTypes() {
  types_.assign(tokens_.size(), GgufTokenType::kNormal);
  if (const GgufValue* types = keys_.Find(kTypes)) {
    if (types->type != GgufValueType::kArray || types->element == GgufValueType::kString ||
        types->count != tokens_.size()) {
      return Fail(kInvalid, kTypes, Concat("must be an array of ", tokens_.size(), " integers"));
    }
    for (size_t id = 0; id < tokens_.size(); ++id) {
      const std::optional<int64_t> type = types->IntegerAt(id);
      if (!type || *type < 0 || *type > static_cast<int64_t>(GgufTokenType::kByte)) {
        return Fail(kInvalid, kTypes, Concat(Shown(id), " has no type from 0 to 6"));
      }
      // 0 is "undefined", which readers take as normal.
      if (*type != 0) types_[id] = static_cast<GgufTokenType>(*type);
    }
  }
  // Tokens that begin or end a text are control tokens, even in files without token types.
  for (const char* key : {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
                          "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (const std::optional<size_t> id = SpecialId(key, {})) types_[*id] = GgufTokenType::kControl;
  }
}

std::optional<size_t> Converter::SpecialId(std::string_view key, std::optional<int64_t> absent) {
  const auto last = static_cast<int64_t>(tokens_.size()) - 1;
  std::optional<int64_t> id = keys_.OptionalInt(key, 0, last);
  if (!id && absent && *absent <= last && keys_.Find(key) == nullptr) id = absent;
  return id ? std::optional<size_t>(*id) : std::nullopt;
}

void Converter::ReadWords() {
  const std::string name = keys_.String(kPre, {});
  if (!ok()) return;
  words_ = FindPreTokenizerKind(name);
  if (words_ != nullptr) return;
  Fail(kUnimplemented, kPre,
       Concat(ShortDump(name), " is not supported; winnow has ", PreTokenizerKindNames()));
}

std::vector<Pair> Converter::GivenMerges() {
  const GgufValue* value = keys_.Find(kMerges);
  std::vector<Pair> merges;
  if (!value->IsArrayOf(GgufValueType::kString)) {
    Fail(kInvalid, kMerges, "must be an array of strings");
    return merges;
  }
  merges.reserve(value->count);
  std::string product;
  for (const std::string_view merge : value->Strings()) {
    // The left part may itself begin with a space.
    const size_t space = merge.find(' ', 1);
    if (space == merge.npos || space + 1 == merge.size() ||
        FindInvalidUtf8(merge) != std::string_view::npos) {
      Fail(kInvalid, kMerges,
           Concat(ShortDump(std::string(merge)), " is not two tokens with a space between them"));
      return merges;
    }
    const Pair pair(merge.substr(0, space), merge.substr(space + 1));
    product.assign(pair.first).append(pair.second);
    const auto id = ids_.find(product);
    if (id != ids_.end() && Is(id->second, GgufTokenType::kControl)) continue;
    merges.push_back(pair);
  }
  return merges;
}

// A hash that is known for every part of a text once it is known for its beginnings.
class PartHashes {
 public:
  explicit PartHashes(std::string_view text)
      : prefix_(text.size() + 1), power_(text.size() + 1, 1) {
    for (size_t i = 0; i < text.size(); ++i) {
      prefix_[i + 1] = prefix_[i] * kBase + static_cast<unsigned char>(text[i]) + 1;
      power_[i + 1] = power_[i] * kBase;
    }
  }
  uint64_t Of(size_t begin, size_t end) const {
    return prefix_[end] - prefix_[begin] * power_[end - begin];
  }

 private:
  static constexpr uint64_t kBase = 0x9e3779b97f4a7c15;
  std::vector<uint64_t> prefix_, power_;
};

std::vector<Pair> Converter::ScoredMerges() {
  const GgufValue* scores = keys_.Find(kScores);
  if (scores == nullptr) {
    Fail(kInvalid, kScores, "missing");
    return {};
  }
  if (scores->type != GgufValueType::kArray || scores->element != GgufValueType::kFloat32 ||
      scores->count != tokens_.size()) {
    Fail(kInvalid, kScores, Concat("must be an array of ", tokens_.size(), " float32"));
    return {};
  }
  // Looks parts up by hash first, because few parts of tokens are tokens themselves.
  absl::flat_hash_map<uint64_t, size_t> by_hash;
  by_hash.reserve(tokens_.size());
  const auto mergeable = [&](size_t id) {
    return !tokens_[id].empty() &&
           (Is(id, GgufTokenType::kNormal) || Is(id, GgufTokenType::kUnused) ||
            Is(id, GgufTokenType::kUserDefined));
  };
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (!mergeable(id)) continue;
    if (tokens_[id].size() > kScoredTokenBytesMax) {
      Fail(kInvalid, kTokens,
           Concat("token ", id, " has ", tokens_[id].size(), " bytes; ", kScoredTokenBytesMax,
                  " are the most"));
      return {};
    }
    if (!by_hash.emplace(PartHashes(tokens_[id]).Of(0, tokens_[id].size()), id).second) {
      Fail(kInvalid, kTokens, Concat(Shown(id), " is made to look like another one"));
      return {};
    }
  }
  struct Merge {
    float score;
    uint32_t token, left, right;  // ids
    uint32_t left_characters, right_characters;
  };
  std::vector<Merge> merges;
  const auto find = [&](const PartHashes& hashes, std::string_view text, size_t begin,
                        size_t end) -> std::optional<uint32_t> {
    const auto found = by_hash.find(hashes.Of(begin, end));
    if (found == by_hash.end() || tokens_[found->second] != text.substr(begin, end - begin))
      return std::nullopt;
    return static_cast<uint32_t>(found->second);
  };
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (!mergeable(id)) continue;
    const auto score = static_cast<float>(*scores->FloatAt(id));
    if (std::isnan(score)) {
      Fail(kInvalid, kScores, Concat(Shown(id), " has no number as its score"));
      return {};
    }
    const std::string_view text = tokens_[id];
    const PartHashes hashes(text);
    uint32_t characters = 0;
    for (const char c : text) characters += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    const size_t first = merges.size();
    uint32_t left_characters = 0;
    for (size_t at = CodePointLength(text[0]); at < text.size(); at += CodePointLength(text[at])) {
      ++left_characters;
      const auto left = find(hashes, text, 0, at);
      if (!left) continue;
      const auto right = find(hashes, text, at, text.size());
      if (!right) continue;
      merges.push_back({score, static_cast<uint32_t>(id), *left, *right, left_characters,
                        characters - left_characters});
    }
    std::sort(merges.begin() + static_cast<ptrdiff_t>(first), merges.end(),
              [](const Merge& a, const Merge& b) {
                return std::pair(a.left, a.right) < std::pair(b.left, b.right);
              });
    if (merges.size() > kMergesPerTokenMax * tokens_.size() + 65536) {
      Fail(kInvalid, kTokens,
           Concat("tokens up to ", id, " can be cut in two in ", merges.size(), " ways, too many"));
      return {};
    }
  }
  std::stable_sort(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) {
    return std::tuple(b.score, b.left_characters, b.right_characters) <
           std::tuple(a.score, a.left_characters, a.right_characters);
  });
  std::vector<Pair> pairs;
  pairs.reserve(merges.size());
  for (const Merge& merge : merges) pairs.emplace_back(tokens_[merge.left], tokens_[merge.right]);
  return pairs;
}

void Converter::AppendModel(const std::vector<Pair>& merges, std::string* out) const {
  json options = {{"type", "BPE"},
                  {"dropout", nullptr},
                  {"unk_token", nullptr},
                  {"continuing_subword_prefix", nullptr},
                  {"end_of_word_suffix", nullptr},
                  {"fuse_unk", !byte_level_},
                  {"byte_fallback", !byte_level_},
                  {"ignore_merges", words_ != nullptr && words_->ignore_merges}};
  if (!byte_level_) {
    const auto unknown = std::find(types_.begin(), types_.end(), GgufTokenType::kUnknown);
    if (unknown != types_.end()) {
      options["unk_token"] = std::string(tokens_[static_cast<size_t>(unknown - types_.begin())]);
    }
  }
  std::string text = options.dump();
  text.pop_back();  // the closing brace
  *out += text;
  *out += ",\"vocab\":{";
  bool first = true;
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (tokens_[id].empty()) continue;
    if (!std::exchange(first, false)) *out += ',';
    AppendJson(tokens_[id], out);
    *out += ':';
    *out += std::to_string(id);
  }
  *out += "},\"merges\":[";
  first = true;
  for (const auto& [left, right] : merges) {
    if (!std::exchange(first, false)) *out += ',';
    *out += '[';
    AppendJson(left, out);
    *out += ',';
    AppendJson(right, out);
    *out += ']';
  }
  *out += "]}";
}

void Converter::AppendAddedTokens(std::string* out) const {
  *out += '[';
  bool first = true;
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const bool special = Is(id, GgufTokenType::kControl) || Is(id, GgufTokenType::kUnknown);
    if (tokens_[id].empty() || !(special || Is(id, GgufTokenType::kUserDefined))) continue;
    if (!std::exchange(first, false)) *out += ',';
    *out += "{\"id\":" + std::to_string(id) + ",\"content\":";
    AppendJson(tokens_[id], out);
    *out +=
        ",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,"
        "\"special\":";
    *out += special ? "true}" : "false}";
  }
  *out += ']';
}

json Converter::PostProcessor() {
  json single = json::array(), specials = json::object();
  const auto add = [&](std::string_view flag, std::string_view key, bool absent,
                       std::optional<int64_t> id_absent) {
    const std::optional<bool> said = keys_.OptionalBool(flag);
    if (!said.value_or(absent)) return;
    const std::optional<size_t> id = SpecialId(key, id_absent);
    if (!id || tokens_[*id].empty()) {
      Fail(kInvalid, said ? flag : key, Concat("there is no ", key, " to add to a text"));
      return;
    }
    const std::string token(tokens_[*id]);
    single.push_back({{"SpecialToken", {{"id", token}, {"type_id", 0}}}});
    specials[token] = {{"id", token}, {"ids", {*id}}, {"tokens", {token}}};
  };
  const auto sentencepiece = [&](int64_t id) {
    return byte_level_ ? std::optional<int64_t>() : id;
  };
  add("tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id",
      !byte_level_ || words_->add_bos, sentencepiece(1));
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  add("tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", false, sentencepiece(2));
  if (specials.empty()) return nullptr;
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", json::array()},
          {"special_tokens", specials}};
}

absl::StatusOr<std::string> Converter::Convert() {
  const std::string model = keys_.String(kModel, {});
  WINNOW_RETURN_IF_ERROR(keys_.status());
  if (model != "gpt2" && model != "llama") {
    Fail(kUnimplemented, kModel,
         Concat(ShortDump(model), " is not supported; winnow has gpt2, llama"));
    return keys_.status();
  }
  byte_level_ = model == "gpt2";
  ReadVocabulary();
  if (ok()) ReadTypes();
  if (ok() && byte_level_) ReadWords();
  WINNOW_RETURN_IF_ERROR(keys_.status());
  const bool space_prefix =
      keys_.OptionalBool("tokenizer.ggml.add_space_prefix").value_or(!byte_level_);
  if (byte_level_ && space_prefix) {
    Fail(kUnimplemented, "tokenizer.ggml.add_space_prefix",
         "true is not supported for byte-level vocabularies");
  }
  if (!byte_level_) {
    if (keys_.OptionalBool("tokenizer.ggml.remove_extra_whitespaces") == true) {
      Fail(kUnimplemented, "tokenizer.ggml.remove_extra_whitespaces", "true is not supported");
    }
  }
  if (ok() && byte_level_ && keys_.Find(kMerges) == nullptr) Fail(kInvalid, kMerges, "missing");
  WINNOW_RETURN_IF_ERROR(keys_.status());
  const std::vector<Pair> merges = keys_.Find(kMerges) != nullptr ? GivenMerges() : ScoredMerges();
  json frame =
      byte_level_ ? ByteLevelTokenizerJson(*words_) : SentencePieceTokenizerJson(space_prefix);
  frame["post_processor"] = PostProcessor();
  WINNOW_RETURN_IF_ERROR(keys_.status());

  std::string out = frame.dump();
  out.pop_back();  // the closing brace
  out += ",\"added_tokens\":";
  AppendAddedTokens(&out);
  out += ",\"model\":";
  AppendModel(merges, &out);
  out += '}';
  return out;
}

}  // namespace

absl::StatusOr<std::string> GgufTokenizerJson(const GgufContents& contents, std::string_view name) {
  return Converter(contents, name).Convert();
}

absl::StatusOr<std::optional<GgufChatTemplate>> ReadGgufChatTemplate(const GgufContents& contents,
                                                                     std::string_view name) {
  constexpr std::string_view kTemplate = "tokenizer.chat_template";
  GgufKeys keys(contents, name);
  if (keys.Find(kTemplate) == nullptr) return std::nullopt;
  GgufChatTemplate chat;
  chat.text = keys.String(kTemplate, {});
  if (chat.text.size() > kTemplateBytesMax) {
    keys.Fail(kInvalid, kTemplate,
              Concat(chat.text.size(), " bytes; ", kTemplateBytesMax, " are the most"));
  }
  const GgufValue* tokens = keys.Find(kTokens);
  if (tokens != nullptr && tokens->IsArrayOf(GgufValueType::kString) && tokens->count > 0) {
    const std::vector<std::string_view> texts = tokens->Strings();
    const auto text_of = [&](std::string_view key) -> std::string {
      const auto id = keys.OptionalInt(key, 0, static_cast<int64_t>(texts.size()) - 1);
      return id ? std::string(texts[*id]) : "";
    };
    chat.bos_token = text_of("tokenizer.ggml.bos_token_id");
    chat.eos_token = text_of("tokenizer.ggml.eos_token_id");
  }
  WINNOW_RETURN_IF_ERROR(keys.status());
  return chat;
}

}  // namespace winnow::engine
