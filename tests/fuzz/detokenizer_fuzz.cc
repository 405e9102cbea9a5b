// Any sequence of ids through the incremental detokeniser of a byte-level and of a SentencePiece
// vocabulary: what it gives joins to what Decode gives, and never ends inside a character.
//
// Sources: engine/text/added_tokens.cc engine/text/bpe.cc engine/text/bpe_load.cc engine/text/detokenizer.cc
// Sources: engine/text/post_processor.cc engine/text/pre_tokenizer.cc engine/text/token_decoder.cc
// Sources: engine/text/tokenizer.cc engine/text/tokenizer_encode.cc engine/text/tokenizer_json.cc
// Sources: engine/text/tokenizer_normalizer.cc engine/text/tokenizer_regex.cc
// Sources: engine/text/tokenizer_regex_syntax.cc engine/text/unicode_normalize.cc engine/text/unicode/unicode_tables.cc
// Sources: engine/text/unicode/unicode_text.cc engine/base/json_file.cc kernels/check.cc
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/text/tokenizer.h"
#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"

using nlohmann::json;
using winnow::engine::Detokenizer;
using winnow::engine::FindInvalidUtf8;
using winnow::engine::Tokenizer;

namespace {

// Ids 0 to 255 are the bytes, then come some longer tokens.
std::unique_ptr<Tokenizer> Make(bool byte_level) {
  json vocab = json::object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string token;
    if (byte_level) {
      winnow::engine::AppendCodePoint(
          winnow::engine::ByteLevelCharacter(static_cast<unsigned char>(byte)), &token);
    } else {
      char name[8];
      std::snprintf(name, sizeof(name), "<0x%02X>", byte);
      token = name;
    }
    vocab[token] = byte;
  }
  int next = 256;
  for (const char* token :
       {"\u2581", "\u2581a", "ab", "\u4E2D", "\U0001F642", "<0xZZ>", "<unk>", "\u0120x"})
    vocab[token] = next++;
  json config = {{"model",
                  {{"type", "BPE"},
                   {"unk_token", "<unk>"},
                   {"byte_fallback", !byte_level},
                   {"vocab", vocab},
                   {"merges", json::array()}}},
                 {"pre_tokenizer", nullptr}};
  if (byte_level) {
    config["decoder"] = {{"type", "ByteLevel"}};
  } else {
    config["decoder"] = {
        {"type", "Sequence"},
        {"decoders",
         {{{"type", "Replace"}, {"pattern", {{"String", "\u2581"}}}, {"content", " "}},
          {{"type", "ByteFallback"}},
          {{"type", "Fuse"}},
          {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  }
  auto made = Tokenizer::Parse(config.dump(), "file");
  WINNOW_CHECK(made.ok());
  return *std::move(made);
}

void Check(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  Detokenizer detokenizer(tokenizer, false);
  std::string joined;
  for (int32_t id : ids) {
    const std::string piece = detokenizer.Add(id);
    WINNOW_CHECK(FindInvalidUtf8(piece) == std::string::npos);
    joined += piece;
  }
  joined += detokenizer.Flush();
  WINNOW_CHECK(joined == tokenizer.Decode(ids, false));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto& byte_level = *Make(true).release();
  static const auto& sentencepiece = *Make(false).release();
  std::vector<int32_t> ids;
  for (size_t i = 0; i < size; ++i) {
    // A byte 0xFF begins one of the longer tokens, or an id that does not exist.
    if (data[i] == 0xFF && i + 1 < size) {
      ids.push_back(256 + data[++i] % 16 - 1);
    } else {
      ids.push_back(data[i]);
    }
  }
  Check(byte_level, ids);
  Check(sentencepiece, ids);
  return 0;
}
