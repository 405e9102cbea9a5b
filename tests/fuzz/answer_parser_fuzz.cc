// Any bytes as a model's answer, to every parser, cut where the bytes themselves say. The pieces are the same as
// uncut; calls begin and end in turn; content that has no calls and no reasoning is the answer itself.
//
// Sources: server/parse/answer_parser.cc server/parse/json_call.cc kernels/check.cc
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/check.h"
#include "server/parse/answer_parser.h"

using winnow::server::AnswerParserOptions;
using winnow::server::AnswerPiece;
using winnow::server::MakeAnswerParser;
using winnow::server::ReasoningFormat;
using winnow::server::ToolFormat;
using Kind = AnswerPiece::Kind;

namespace {

std::vector<AnswerPiece> Joined(const std::vector<AnswerPiece>& pieces) {
  std::vector<AnswerPiece> joined;
  for (const AnswerPiece& piece : pieces) {
    const bool marks = piece.kind == Kind::kCallBegin || piece.kind == Kind::kCallEnd;
    if (!marks && !joined.empty() && joined.back().kind == piece.kind) {
      joined.back().text += piece.text;
    } else {
      joined.push_back(piece);
    }
  }
  return joined;
}

std::vector<AnswerPiece> Parse(const AnswerParserOptions& options, std::string_view text,
                               size_t step) {
  const auto parser = MakeAnswerParser(options);
  std::vector<AnswerPiece> all;
  for (size_t at = 0; at < text.size(); at += step) {
    std::vector<AnswerPiece> pieces;
    parser->Add(text.substr(at, step), pieces);
    all.insert(all.end(), pieces.begin(), pieces.end());
  }
  std::vector<AnswerPiece> pieces;
  parser->Finish(pieces);
  all.insert(all.end(), pieces.begin(), pieces.end());
  return Joined(all);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  AnswerParserOptions options;
  options.tools = static_cast<ToolFormat>(data[0] % 4);
  if ((data[0] & 4) != 0) options.reasoning = ReasoningFormat::kThink;
  options.in_reasoning = (data[0] & 8) != 0;
  options.one_call = (data[0] & 16) != 0;
  if ((data[0] & 32) != 0) {
    options.reasoning = ReasoningFormat::kHarmony;
    options.tools = (data[0] & 1) != 0 ? ToolFormat::kHarmony : ToolFormat::kNone;
    options.shows_control_tokens = (data[0] & 2) != 0;
  }
  options.names = {"f", "get_weather"};
  const size_t step = data[1] % 16 + 1;
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
  const auto whole = Parse(options, text, text.size() + 1);
  WINNOW_CHECK(whole == Parse(options, text, step));
  WINNOW_CHECK(whole == Parse(options, text, 1));
  bool in_call = false, plain = true;
  for (const AnswerPiece& piece : whole) {
    plain = plain && piece.kind == Kind::kContent;
    if (piece.kind == Kind::kCallBegin) {
      WINNOW_CHECK(!in_call && !piece.text.empty());
      in_call = true;
    } else if (piece.kind == Kind::kCallEnd) {
      WINNOW_CHECK(in_call);
      in_call = false;
    } else {
      WINNOW_CHECK(in_call == (piece.kind == Kind::kCallArguments) && !piece.text.empty());
    }
  }
  WINNOW_CHECK(!in_call);
  // A marker alone, an empty list of calls and an empty thought leave nothing behind.
  if (plain && whole.size() == 1 && options.tools == ToolFormat::kNone &&
      options.reasoning == ReasoningFormat::kNone) {
    WINNOW_CHECK(whole[0].text == text);
  }
  return 0;
}
