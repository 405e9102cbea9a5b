#include "server/http/http_error.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "server/status.h"
#include "server/strings.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxMessageBytes = 2048;
constexpr double kRetrySeconds = 1;  // where the error does not say

int HttpStatusOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kCancelled:
      return 499;
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

const char* TypeOf(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

}  // namespace

HttpError ToHttpError(int status, std::string_view code, std::string_view message) {
  HttpError error;
  error.status = status;
  error.type = TypeOf(status);
  error.code = std::string(code);
  error.message = CleanUtf8(message, kMaxMessageBytes);
  if (status == 429 || status == 503) error.retry_seconds = kRetrySeconds;
  return error;
}

HttpError ToHttpError(const absl::Status& status, const FieldName& field_name) {
  WINNOW_CHECK(!status.ok());
  std::string message(ToStd(status.message()));
  std::string param;
  const auto violations = ViolationsOf(status);
  if (!violations.empty()) message.clear();
  for (const auto& [field, description] : violations) {
    const std::string name = field_name ? field_name(field) : field;
    if (param.empty()) param = name;
    Append(message, message.empty() ? "" : "; ", name, ": ", description);
  }
  HttpError error =
      ToHttpError(HttpStatusOf(status), absl::AsciiStrToLower(ReasonOf(status)), message);
  error.param = CleanUtf8(param, kMaxMessageBytes);
  if (const auto retry = RetryAfterOf(status)) {
    error.retry_seconds = std::max(absl::ToDoubleSeconds(*retry), 1e-3);
  }
  return error;
}

std::string OpenAiErrorBody(const HttpError& error) {
  nlohmann::ordered_json body;
  body["error"]["message"] = error.message;
  body["error"]["type"] = error.type;
  body["error"]["param"] = nullptr;
  if (!error.param.empty()) body["error"]["param"] = error.param;
  body["error"]["code"] = error.code;
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

HttpPiece ErrorResponse(const HttpError& error, std::string body) {
  HttpPiece piece = Whole(error.status, "application/json", std::move(body));
  if (error.retry_seconds > 0) {
    auto& headers = piece.head->headers;
    headers.emplace_back("Retry-After",
                         Concat(static_cast<int64_t>(std::ceil(error.retry_seconds))));
    headers.emplace_back("Retry-After-Ms",
                         Concat(static_cast<int64_t>(std::ceil(error.retry_seconds * 1000))));
  }
  if (error.status == 401) piece.head->headers.emplace_back("WWW-Authenticate", "Bearer");
  return piece;
}

}  // namespace winnow::server
