// The form that a request asks for: OpenAI's `response_format` (and the Responses' `text.format`), vLLM's
// `structured_outputs` and the older `guided_...`, as one v1::StructuredOutput.
#ifndef WINNOW_SERVER_HTTP_STRUCTURED_REQUEST_H_
#define WINNOW_SERVER_HTTP_STRUCTURED_REQUEST_H_

#include <string>
#include <string_view>

#include "server/http/json_fields.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

// `body` is the text that `fields` was parsed from: schemas keep the order of their members, which is the order of the
// answer's. Returns the client's name of the field that was taken; "" if there was none.
std::string TakeStructuredOutput(std::string_view body, JsonFields& fields,
                                 v1::GenerateRequest& out);

// The same from the Responses' `text`.
std::string TakeTextFormat(std::string_view body, JsonFields& fields, v1::GenerateRequest& out);

// The same from the Messages' `output_config.format`, or `output_format` as it was called before.
std::string TakeOutputFormat(std::string_view body, JsonFields& fields, v1::GenerateRequest& out);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_STRUCTURED_REQUEST_H_
