// Any bytes as tokenizer.json, alone and as a patch of a small sound one; after a NUL, a text.
// Either the file is refused with a place, or it encodes, decodes and streams without breaking a
// promise.
//
// Sources: engine/text/added_tokens.cc engine/text/bpe.cc engine/text/bpe_load.cc engine/text/detokenizer.cc
// Sources: engine/text/post_processor.cc engine/text/pre_tokenizer.cc engine/text/token_decoder.cc
// Sources: engine/text/tokenizer.cc engine/text/tokenizer_encode.cc engine/text/tokenizer_json.cc
// Sources: engine/text/tokenizer_normalizer.cc engine/text/tokenizer_regex.cc
// Sources: engine/text/tokenizer_regex_syntax.cc engine/text/unicode_normalize.cc engine/text/unicode/unicode_tables.cc
// Sources: engine/text/unicode/unicode_text.cc engine/base/json_file.cc kernels/check.cc
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "engine/text/tokenizer.h"
#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"

using winnow::engine::Detokenizer;
using winnow::engine::FindInvalidUtf8;
using winnow::engine::TextSegment;
using winnow::engine::Tokenizer;

namespace {

constexpr std::string_view kSound =
    R"({"version":"1.0","added_tokens":[{"id":6,"content":"<s>","single_word":false,
"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"NFC"},"pre_tokenizer":
{"type":"Metaspace","replacement":"_","prepend_scheme":"first"},"post_processor":null,"decoder":{"type":"Fuse"},
"model":{"type":"BPE","unk_token":"?","vocab":{"?":0,"_":1,"a":2,"b":3,"ab":4,"_a":5},"merges":[["a","b"],["_","a"]]}})";

void Use(std::string_view json, std::string_view text) {
  const auto tokenizer = Tokenizer::Parse(json, "file");
  if (!tokenizer.ok()) {
    WINNOW_CHECK(std::string_view(tokenizer.status().message().data(), 5) == "file:");
    return;
  }
  const size_t half = text.size() / 2;
  const TextSegment segments[] = {{text.substr(0, half), true}, {text.substr(half), false}};
  const auto ids = (*tokenizer)->Encode(segments, true);
  if (!ids.ok()) return;
  const std::string whole = (*tokenizer)->Decode(*ids, false);
  WINNOW_CHECK(FindInvalidUtf8(whole) == std::string_view::npos);
  Detokenizer detokenizer(**tokenizer, false);
  std::string joined;
  for (int32_t id : *ids) {
    WINNOW_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
    joined += detokenizer.Add(id);
    WINNOW_CHECK(FindInvalidUtf8(joined) == std::string_view::npos);
  }
  WINNOW_CHECK(joined + detokenizer.Flush() == whole);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t nul = input.find('\0');
  const std::string_view json = input.substr(0, nul);
  const std::string_view text = nul == input.npos ? "<s>ab a" : input.substr(nul + 1);
  Use(json, text);
  const auto patch = nlohmann::json::parse(json.begin(), json.end(), nullptr, false);
  if (!patch.is_object()) return 0;
  auto patched = nlohmann::json::parse(kSound);
  patched.merge_patch(patch);
  Use(patched.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), text);
  return 0;
}
