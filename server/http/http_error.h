// Errors as HTTP clients get them: absl::Status to a status line, headers and OpenAI's JSON.
#ifndef WINNOW_SERVER_HTTP_HTTP_ERROR_H_
#define WINNOW_SERVER_HTTP_HTTP_ERROR_H_

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/http/http_exchange.h"

namespace winnow::server {

// The client's name for a field that the validator names.
using FieldName = std::function<std::string(std::string_view)>;

// What a client is told, in no API's shape yet.
struct HttpError {
  int status = 500;
  std::string type;          // as OpenAI's servers have it: "invalid_request_error"
  std::string message;       // UTF-8
  std::string param;         // the first field that is wrong; "" if none is
  std::string code;          // winnow's reason in lower case: "invalid_field"
  double retry_seconds = 0;  // 0: the client is not told when
};

// REQUIRES: not OK. `field_name` may be empty: fields keep their names.
HttpError ToHttpError(const absl::Status& status, const FieldName& field_name);
HttpError ToHttpError(int status, std::string_view code, std::string_view message);

// {"error": {...}}, as OpenAI has it.
std::string OpenAiErrorBody(const HttpError& error);

// A whole response with `body`; Retry-After where the error says when.
HttpPiece ErrorResponse(const HttpError& error, std::string body);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_HTTP_ERROR_H_
