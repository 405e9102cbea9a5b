// An answer's text, taken apart while it is made: what the model thought, what it says, and the functions that it
// calls. How a model writes the last two is a habit of its family.
//
//   ReasoningParser   <think> what it thought </think> what it says
//   HermesParser      <tool_call> {"name": ..., "arguments": {...}} </tool_call>      (Hermes, Qwen)
//   Llama3Parser      {"name": ..., "parameters": {...}}, as the whole answer         (Llama 3.1 and later)
//   MistralParser     [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}
//   HarmonyParser     <|channel|>analysis<|message|> what it thought <|end|><|start|>assistant<|channel|>final<|message|>
//                     what it says, or <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}  (gpt-oss)
//
// HarmonyParser alone reads text whose control tokens are marked (kMarkerBegin): a model that writes about its own format
// writes the same characters, and those are text.
//
// Pieces do not depend on how the text was cut, but for how texts of one kind are cut. Text that looks like a call and
// turns out to be none is content. What a model leaves unfinished is given as far as it came.
//
// Pure: no input or output, no clock. One thread at a time. Memory is bounded by the text before a call's name; of
// HarmonyParser by a constant.
#ifndef WINNOW_SERVER_PARSE_ANSWER_PARSER_H_
#define WINNOW_SERVER_PARSE_ANSWER_PARSER_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace winnow::server {

// Bytes around a control token's text in an answer for HarmonyParser (the engine's kControlBegin and kControlEnd). Neither
// occurs in UTF-8.
inline constexpr char kMarkerBegin = '\xfe';
inline constexpr char kMarkerEnd = '\xff';

struct AnswerPiece {
  enum class Kind {
    kContent,
    kReasoning,
    kCallBegin,      // text: the function's name
    kCallArguments,  // text: more of a JSON object
    kCallEnd,
  };
  Kind kind = Kind::kContent;
  std::string text;

  bool operator==(const AnswerPiece&) const = default;
};

class AnswerParser {
 public:
  virtual ~AnswerParser() = default;
  // Appends what has become certain.
  virtual void Add(std::string_view text, std::vector<AnswerPiece>& out) = 0;
  // The answer has ended: what was held back.
  virtual void Finish(std::vector<AnswerPiece>& out) = 0;
};

enum class ToolFormat { kNone, kHermes, kLlama3, kMistral, kHarmony };
// How an answer tells its reasoning from what it says.
enum class ReasoningFormat { kNone, kThink, kHarmony };

struct AnswerParserOptions {
  ToolFormat tools = ToolFormat::kNone;
  // Functions that may be called. Llama3Parser takes nothing else for a call, because any JSON object looks like one.
  std::vector<std::string> names = {};
  // Leaves out all that follows the first call.
  bool one_call = false;
  // kHarmony says how the whole answer is written, calls included: `tools` is then kHarmony, or kNone where no call may be
  // told to the client.
  ReasoningFormat reasoning = ReasoningFormat::kNone;
  // The prompt has opened the reasoning already. For kThink.
  bool in_reasoning = false;
  // Control tokens inside a message's text that are none of the format's are part of it, else left out. For kHarmony.
  bool shows_control_tokens = false;
};

// Content passes through it where there is nothing to look for.
std::unique_ptr<AnswerParser> MakeAnswerParser(const AnswerParserOptions& options);

// ToolFormat's name on the command line: "none", "hermes", "llama3_json", "mistral", "harmony".
std::string_view ToolFormatName(ToolFormat format);
std::optional<ToolFormat> ToolFormatOf(std::string_view name);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_PARSE_ANSWER_PARSER_H_
