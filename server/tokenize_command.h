// The work of `winnow tokenize`: JSON lines in, JSON lines out. A line is one of
//   {"text":…, "add_special_tokens":true, "parse_special":true}   -> {"ids":[…]}
//   {"ids":[…], "skip_special_tokens":false}                      -> {"text":…}
//   {"messages":[{"role":…,"content":…}…], "add_generation_prompt":true}
//                                                                 -> {"text":…, "ids":[…]}
// with the defaults shown. Messages may have everything that the template reads; beside them
// "tools", "documents" and "chat_template_kwargs" go to the template, "now" (2025-02-01T12:30:00)
// is the time that it may print, and "segments":true adds to the answer which bytes of the text
// may hold control tokens, as [length, true or false] pairs. Empty lines are passed over.
#ifndef WINNOW_SERVER_TOKENIZE_COMMAND_H_
#define WINNOW_SERVER_TOKENIZE_COMMAND_H_

#include <istream>
#include <ostream>

#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace winnow::server {

// Answers every line of `in`. One that cannot be answered gives {"error":…} in its place and makes
// the result false; the others are answered all the same.
bool TokenizeLines(const engine::Tokenizer& tokenizer, const engine::ChatTemplate& chat,
                   std::istream& in, std::ostream& out);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_TOKENIZE_COMMAND_H_
