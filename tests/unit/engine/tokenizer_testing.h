// What tests of tokenisation share: goldens, tiny tokenizers written in the test, random text.
#ifndef WINNOW_TESTS_UNIT_ENGINE_TOKENIZER_TESTING_H_
#define WINNOW_TESTS_UNIT_ENGINE_TOKENIZER_TESTING_H_

#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "engine/text/tokenizer.h"
#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/unicode/unicode_text.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {

// Data shared beside the project; tests that need it are skipped where it is missing.
inline std::string SharedPath(const std::string& path) {
  const char* dir = std::getenv("WINNOW_SHARED");
  return (dir != nullptr ? std::string(dir) : SourcePath("../shared")) + "/" + path;
}

inline nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in.good()) << path;
  return nlohmann::json::parse(in, nullptr, false);
}

inline std::unique_ptr<Tokenizer> MakeTokenizer(const nlohmann::json& json) {
  auto made = Tokenizer::Parse(json.dump(), "test");
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? *std::move(made) : nullptr;
}

inline std::vector<int32_t> Ids(const absl::StatusOr<std::vector<int32_t>>& ids) {
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : std::vector<int32_t>();
}

inline nlohmann::json AddedTokenJson(int id, const std::string& content, bool special = true) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

// Byte-level BPE of single bytes (ids 0 to 255) and a few merges, cut by `pre_tokenizer`.
inline nlohmann::json ByteLevelJson(nlohmann::json added = nlohmann::json::array(),
                                    nlohmann::json pre_tokenizer = {{"type", "ByteLevel"},
                                                                    {"add_prefix_space", false}}) {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string character;
    AppendCodePoint(ByteLevelCharacter(static_cast<unsigned char>(byte)), &character);
    vocab[character] = byte;
  }
  vocab["he"] = 256;
  vocab["ll"] = 257;
  vocab["hell"] = 258;
  using List = nlohmann::json::array_t;
  nlohmann::json merges = List{List{"h", "e"}, List{"l", "l"}, List{"he", "ll"}};
  return {{"version", "1.0"},
          {"added_tokens", std::move(added)},
          {"normalizer", nullptr},
          {"pre_tokenizer", std::move(pre_tokenizer)},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", std::move(vocab)}, {"merges", std::move(merges)}}}};
}

// Any text: characters of all planes, ASCII more often than others.
inline std::string RandomText(std::mt19937_64& random, size_t characters_max) {
  std::string text;
  for (size_t n = random() % (characters_max + 1); n > 0; --n) {
    char32_t c = static_cast<char32_t>(random() % 3 == 0 ? random() % 0x110000 : random() % 0x180);
    if (c >= 0xD800 && c < 0xE000) c = 0xFFFD;
    AppendCodePoint(c, &text);
  }
  return text;
}

// The generator of make_tokenizer_goldens.py.
class Lcg {
 public:
  explicit Lcg(uint64_t seed) : state_(seed) {}
  uint64_t Below(uint64_t n) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % n;
  }

 private:
  uint64_t state_;
};

inline uint64_t Fnv1a(const std::string& data) {
  uint64_t hash = 0xCBF29CE484222325;
  for (unsigned char byte : data) hash = (hash ^ byte) * 0x100000001B3;
  return hash;
}

inline const std::vector<std::string>& GoldenKinds() {
  static const std::vector<std::string> kinds = {
      "llama3",          "qwen2",           "gpt2_digits",     "metaspace",
      "metaspace_split", "prepend_replace", "legacy_specials", "odd",
      "smollm",          "gpt2_fused_unk",  "tekken",          "gpt4o",
      "deepseek_v3",     "deepseek_coder",  "command_r",       "affixes"};
  return kinds;
}

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_TOKENIZER_TESTING_H_
