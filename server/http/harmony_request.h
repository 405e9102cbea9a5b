// Requests for answers in OpenAI's Harmony format (gpt-oss), as they are put to the engine: grammars, as parts of xgrammar's
// structural tags, leave the model its headers and its thoughts, and hold for the text of one message.
#ifndef WINNOW_SERVER_HTTP_HARMONY_REQUEST_H_
#define WINNOW_SERVER_HTTP_HARMONY_REQUEST_H_

#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/http/json_fields.h"
#include "server/http/model_habits.h"
#include "server/parse/answer_parser.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

// A whole answer: any thoughts, with `preambles` any texts for the user between them, and then one of `last`.
nlohmann::ordered_json HarmonyAnswer(const HarmonyTokens& tokens, bool preambles,
                                     const std::vector<nlohmann::ordered_json>& last);
// A last message that calls `name` with `arguments`, wherever the model puts the recipient.
nlohmann::ordered_json HarmonyCall(const HarmonyTokens& tokens, const std::string& name,
                                   nlohmann::ordered_json arguments);
// A last message whose text is any.
nlohmann::ordered_json HarmonyText(const HarmonyTokens& tokens);

// Says how the answer to a chat is to be read, after ApplyTools has said it of tools. Where the model speaks Harmony, a
// form that the client asked for (under the name `structured_field`, "": none) becomes one of the final message, and
// tools that it had the template show by `builtin_tools` may be called, too.
void ApplyReasoning(const ModelHabits& habits, const std::string& structured_field,
                    JsonFields& fields, v1::GenerateRequest& generate, AnswerParserOptions& parser);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_HARMONY_REQUEST_H_
