// Answers that are a sequence of messages, each a header and a text, which control tokens divide (OpenAI's Harmony
// format). Whoever takes such an answer apart needs to see the control tokens, and to tell them from text that reads like
// them.
#ifndef WINNOW_ENGINE_TEXT_MESSAGE_FORMAT_H_
#define WINNOW_ENGINE_TEXT_MESSAGE_FORMAT_H_

#include <cstdint>
#include <vector>

namespace winnow::engine {

// Bytes around a control token's text in such an answer. Neither occurs in UTF-8, so no text of the model has them.
inline constexpr char kControlBegin = '\xfe';
inline constexpr char kControlEnd = '\xff';

// An answer begins in a header.
struct MessageFormat {
  std::vector<int32_t> header_begins;  // ids of control tokens behind which a header goes on
  std::vector<int32_t> header_ends;    // ids of control tokens behind which a message's text begins
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_MESSAGE_FORMAT_H_
