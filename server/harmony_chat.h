// Conversations for chat templates of OpenAI's Harmony format (gpt-oss), whose template takes less than clients send: it
// raises an exception, or leaves a part out without a word.
//
// Pure functions; any thread.
#ifndef WINNOW_SERVER_HARMONY_CHAT_H_
#define WINNOW_SERVER_HARMONY_CHAT_H_

#include "engine/text/chat_template.h"
#include "nlohmann/json.hpp"

namespace winnow::server {

// Whether a template writes Harmony's messages.
bool WritesHarmony(const engine::ChatTemplate& chat_template);

// `messages` as a template takes them in general ({"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}) to
// messages that a Harmony template writes whole:
//
//   several system messages at the beginning   one, in paragraphs: the template reads the first message alone
//   a system message later on                  a user's, at its place: the template passes over it
//   several calls in a message                 a message for each, with its result behind it: the template writes the
//                                              first call, and takes each result for that of the last call written
//   reasoning and content before a call        reasoning, in paragraphs: the template refuses both together
nlohmann::ordered_json FitHarmonyMessages(nlohmann::ordered_json messages);

// Tools ({"type": "function", "function": {...}}), each with a description, and the defaults of parameters with `enum` or
// `oneOf` as text: the template fails without.
nlohmann::ordered_json FitHarmonyTools(nlohmann::ordered_json tools);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HARMONY_CHAT_H_
