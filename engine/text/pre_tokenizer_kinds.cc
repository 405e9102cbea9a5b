#include "engine/text/pre_tokenizer_kinds.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "absl/strings/str_join.h"

namespace winnow::engine {
namespace {

// JSON texts below are written with R"j(...)j": backslashes are those of JSON.

constexpr std::string_view kNone = "null";
constexpr std::string_view kNfc = R"j({"type":"NFC"})j";

// GPT-2's words, found by the ByteLevel step itself.
constexpr std::string_view kGpt2 =
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})j";

// The same with each digit alone: StarCoder, Granite, SmolLM, Command R.
constexpr std::string_view kDigitsGpt2 =
    R"j({"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}]})j";

// Numbers in threes from the left: Llama 3, and GPT-4's vocabulary as Phi-4 and DBRX have it.
constexpr std::string_view kLlama3 =
    R"j({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":")j"
    R"j((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|)j"
    R"j( ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)j"
    R"j("},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]})j";

// As Llama 3, but each digit is a word.
constexpr std::string_view kQwen2 =
    R"j({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":")j"
    R"j((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|)j"
    R"j( ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)j"
    R"j("},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}]})j";

// Mistral's Tekken: a word ends where small letters are followed by capitals.
constexpr std::string_view kTekken =
    R"j({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":")j"
    R"j([^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|)j"
    R"j([^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|)j"
    R"j(\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)j"
    R"j("},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]})j";

// GPT-4o's vocabulary, as Phi-4-mini and Llama 4 have it: Tekken's words with contractions at their
// end, and numbers in threes.
constexpr std::string_view kGpt4o =
    R"j({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":")j"
    R"j([^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+)j"
    R"j((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)j"
    R"j([^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*)j"
    R"j((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)j"
    R"j(\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)j"
    R"j("},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]})j";

constexpr std::string_view kDeepSeekCoder =
    R"j({"type":"Sequence","pretokenizers":[)j"
    R"j({"type":"Split","pattern":{"Regex":"[\r\n]"},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":"\\s?\\p{L}+"},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":"\\s?\\p{P}+"},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"},)j"
    R"j("behavior":"Isolated","invert":false},)j"
    R"j({"type":"Digits","individual_digits":true},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]})j";

// Letters with case of all alphabets, then punctuation, then white space at the end of a line.
constexpr std::string_view kDeepSeekLlm =
    R"j({"type":"Sequence","pretokenizers":[)j"
    R"j({"type":"Split","pattern":{"Regex":"[\r\n]"},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":")j"
    R"j(\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293)j"
    R"j(\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c)j"
    R"j(\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5)j"
    R"j(\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77)j"
    R"j(\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57)j"
    R"j(\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4)j"
    R"j(\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc)j"
    R"j(\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d)j"
    R"j(\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b)j"
    R"j(\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f)j"
    R"j(\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a)j"
    R"j(\uff41-\uff5a\ud801\udc00-\ud801\udc4f\ud801\udcb0-\ud801\udcd3)j"
    R"j(\ud801\udcd8-\ud801\udcfb\ud803\udc80-\ud803\udcb2\ud803\udcc0-\ud803\udcf2)j"
    R"j(\ud806\udca0-\ud806\udcdf\ud83a\udd00-\ud83a\udd43]+)j"
    R"j("},)j"
    R"j("behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":)j"
    R"j("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"},)j"
    R"j("behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":"\\s+$"},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"},)j"
    R"j("behavior":"Isolated","invert":false},)j"
    R"j({"type":"Digits","individual_digits":true},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]})j";

// DeepSeek V3 and R1: numbers in threes, runs of Han and kana, and the rest.
constexpr std::string_view kDeepSeekV3 =
    R"j({"type":"Sequence","pretokenizers":[)j"
    R"j({"type":"Split","pattern":{"Regex":"\\p{N}{1,3}"},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"},)j"
    R"j("behavior":"Isolated","invert":false},)j"
    R"j({"type":"Split","pattern":{"Regex":")j"
    R"j([!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|)j"
    R"j([^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|)j"
    R"j(\\s*[\r\n]+|\\s+(?!\\S)|\\s+)j"
    R"j("},"behavior":"Isolated","invert":false},)j"
    R"j({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]})j";

// By name, ascending.
constexpr std::array kKinds = {
    PreTokenizerKind{"command-r", kNfc, kDigitsGpt2, false, false},
    PreTokenizerKind{"dbrx", kNone, kLlama3, false, false},  // Phi-4 too
    PreTokenizerKind{"deepseek-coder", kNone, kDeepSeekCoder, false, false},
    PreTokenizerKind{"deepseek-llm", kNone, kDeepSeekLlm, false, false},
    PreTokenizerKind{"deepseek-r1-qwen", kNfc, kQwen2, false, false},
    PreTokenizerKind{"deepseek-v3", kNone, kDeepSeekV3, false, false},
    PreTokenizerKind{"exaone4", kNone, kGpt2, false, false},
    PreTokenizerKind{"glm4", kNone, kLlama3, false, false},
    PreTokenizerKind{"gpt-2", kNone, kGpt2, false, false},
    PreTokenizerKind{"gpt-4o", kNone, kGpt4o, false, false},
    PreTokenizerKind{"llama-bpe", kNone, kLlama3, true, true},
    PreTokenizerKind{"llama-v3", kNone, kLlama3, true, true},
    PreTokenizerKind{"llama3", kNone, kLlama3, true, true},
    PreTokenizerKind{"llama4", kNone, kGpt4o, false, false},
    PreTokenizerKind{"phi-2", kNone, kGpt2, false, false},
    PreTokenizerKind{"qwen2", kNfc, kQwen2, false, false},
    PreTokenizerKind{"refact", kNone, kDigitsGpt2, false, false},  // Granite too
    PreTokenizerKind{"smaug-bpe", kNone, kLlama3, false, false},
    PreTokenizerKind{"smollm", kNone, kDigitsGpt2, false, false},
    PreTokenizerKind{"starcoder", kNone, kDigitsGpt2, false, false},
    PreTokenizerKind{"tekken", kNone, kTekken, true, true},
};

}  // namespace

std::span<const PreTokenizerKind> PreTokenizerKinds() { return kKinds; }

const PreTokenizerKind* FindPreTokenizerKind(std::string_view name) {
  const auto* kind = std::find_if(kKinds.begin(), kKinds.end(),
                                  [name](const PreTokenizerKind& k) { return k.name == name; });
  return kind == kKinds.end() ? nullptr : kind;
}

std::string PreTokenizerKindNames() {
  return absl::StrJoin(
      kKinds, ", ", [](std::string* out, const PreTokenizerKind& kind) { out->append(kind.name); });
}

nlohmann::json ByteLevelTokenizerJson(const PreTokenizerKind& kind) {
  return {{"version", "1.0"},
          {"normalizer", nlohmann::json::parse(kind.normalizer)},
          {"pre_tokenizer", nlohmann::json::parse(kind.pre_tokenizer)},
          {"post_processor", nullptr},
          {"decoder", nlohmann::json::parse(kGpt2)}};
}

nlohmann::json SentencePieceTokenizerJson(bool add_space_prefix) {
  using nlohmann::json;
  const std::string space = "\xE2\x96\x81";  // U+2581 stands for a space
  json normalizers = json::array();
  if (add_space_prefix) normalizers.push_back({{"type", "Prepend"}, {"prepend", space}});
  normalizers.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", space}});
  json decoders = json::array({
      {{"type", "Replace"}, {"pattern", {{"String", space}}}, {"content", " "}},
      {{"type", "ByteFallback"}},
      {{"type", "Fuse"}},
  });
  if (add_space_prefix) {
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  return {{"version", "1.0"},
          {"normalizer", {{"type", "Sequence"}, {"normalizers", std::move(normalizers)}}},
          {"pre_tokenizer", nullptr},
          {"post_processor", nullptr},
          {"decoder", {{"type", "Sequence"}, {"decoders", std::move(decoders)}}}};
}

}  // namespace winnow::engine
