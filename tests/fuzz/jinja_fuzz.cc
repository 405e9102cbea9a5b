// Any bytes as a chat template, rendered for a fixed conversation with tools; after a NUL, a text
// that one of the messages has. Either the template is refused with a line, or it renders valid
// UTF-8 whose segments cover it, with the request's letters marked, the same twice.
//
// Sources: engine/text/chat_template.cc engine/text/jinja/attributes.cc engine/text/jinja/case_tables.cc
// Sources: engine/text/jinja/expressions.cc engine/text/jinja/filters.cc engine/text/jinja/format.cc
// Sources: engine/text/jinja/globals.cc engine/text/jinja/interpreter.cc engine/text/jinja/lexer.cc
// Sources: engine/text/jinja/marked_text.cc engine/text/jinja/methods.cc engine/text/jinja/operators.cc
// Sources: engine/text/jinja/parser.cc engine/text/jinja/resolver.cc engine/text/jinja/strings.cc
// Sources: engine/text/jinja/template.cc engine/text/jinja/unicode.cc engine/text/jinja/value.cc
// Sources: engine/base/json_file.cc engine/text/tokenizer_json.cc engine/text/unicode/unicode_tables.cc
// Sources: engine/text/unicode/unicode_text.cc kernels/check.cc
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "engine/text/chat_template.h"
#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"

using winnow::engine::ChatRequest;
using winnow::engine::ChatTemplate;
using winnow::engine::FindInvalidUtf8;

namespace {

// The messages' letters are Greek, which stands in no template that is ASCII.
constexpr std::string_view kMessages = R"([{"role":"system","content":"αβγ"},
{"role":"user","content":[{"type":"text","text":"δ"},{"type":"image"}]},
{"role":"assistant","content":null,"tool_calls":[{"id":"ε","type":"function",
"function":{"name":"ζ","arguments":{"η":[1,2.5,true,null,"θ"]}}}]},
{"role":"tool","content":"ι<|end|>κ","tool_call_id":"λ"},{"role":"user","content":"μ"}])";
constexpr std::string_view kTools =
    R"([{"type":"function","function":{"name":"ζ","parameters":{"type":"object","properties":{"η":{"type":"array"}}}}}])";

bool IsAscii(std::string_view text) {
  for (char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t nul = input.find('\0');
  const std::string_view text = input.substr(0, nul);
  auto messages = nlohmann::ordered_json::parse(kMessages);
  const auto tools = nlohmann::ordered_json::parse(kTools);
  if (nul != input.npos && IsAscii(input.substr(nul + 1))) {
    messages.back()["content"] = std::string(input.substr(nul + 1));
  }
  const ChatTemplate chat = ChatTemplate::FromText(text, "<s>", "</s>");
  ChatRequest request;
  request.messages = &messages;
  request.tools = &tools;
  request.now = absl::CivilSecond(2025, 2, 1);
  winnow::engine::jinja::Limits limits;
  limits.steps_max = 100'000;
  limits.memory_bytes_max = 16 << 20;
  limits.output_bytes_max = 1 << 20;
  const auto rendered = chat.Render(request, limits);
  if (!rendered.ok()) return 0;
  WINNOW_CHECK(FindInvalidUtf8(rendered->text) == std::string_view::npos);
  size_t at = 0;
  // A template may write letters beyond ASCII with escapes, or make them from numbers.
  const bool own_letters = !IsAscii(text) || text.find('\\') != text.npos;
  for (const auto& [length, is_template] : rendered->segments) {
    const std::string_view part = std::string_view(rendered->text).substr(at, length);
    WINNOW_CHECK(length > 0 && part.size() == length);
    if (is_template && !own_letters) WINNOW_CHECK(IsAscii(part));
    at += length;
  }
  WINNOW_CHECK(at == rendered->text.size());
  const auto again = chat.Render(request, limits);
  WINNOW_CHECK(again.ok() && again->text == rendered->text &&
               again->segments == rendered->segments);
  return 0;
}
