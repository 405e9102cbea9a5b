// Errors on their way to a client: absl::Status with google.rpc details as payloads, and the one
// function that turns it into a gRPC status.
//
// Every status made here has an ErrorInfo payload; a status of elsewhere gets the reason that fits
// its code when it is turned. inference.proto lists codes and reasons.
#ifndef WINNOW_SERVER_STATUS_H_
#define WINNOW_SERVER_STATUS_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace google::rpc {
class BadRequest;
class ErrorInfo;
class RetryInfo;
class Status;
}  // namespace google::rpc
namespace grpc {
class Status;
}

namespace winnow::server {

// Reasons of what is wrong with a request.
inline constexpr std::string_view kInvalidField = "INVALID_FIELD";
inline constexpr std::string_view kContextLengthExceeded = "CONTEXT_LENGTH_EXCEEDED";

// Collects what is wrong with a request. Keeps the first 16 violations: a hostile request must not
// decide how long the answer is.
class Violations {
 public:
  void Add(std::string_view field, std::string_view description,
           std::string_view reason = kInvalidField);
  bool empty() const { return total_ == 0; }
  // OK if there are none, else InvalidArgument with all of them in message and details, and the first one's reason.
  absl::Status ToStatus() const;

 private:
  struct Violation {
    std::string field, description, reason;
  };
  std::vector<Violation> kept_;
  size_t total_ = 0;
};

absl::Status InvalidField(std::string_view field, std::string_view description,
                          std::string_view reason = kInvalidField);

// `reason` is UPPER_SNAKE_CASE, as in inference.proto.
absl::Status ErrorWithReason(absl::StatusCode code, std::string_view reason,
                             std::string_view message);

// The same status with RetryInfo.
absl::Status WithRetryAfter(absl::Status status, absl::Duration delay);

// The status as clients get it: message made valid UTF-8 and at most 4 KiB, because it travels in a
// header; details complete. REQUIRES: not OK.
google::rpc::Status ToRpcStatus(const absl::Status& status);

// The reason in the status's ErrorInfo, or the one that fits its code; "" if OK.
std::string ReasonOf(const absl::Status& status);

// The fields that are wrong, each with its description; empty where the status names none.
std::vector<std::pair<std::string, std::string>> ViolationsOf(const absl::Status& status);

// When to try again, where the status says so.
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

// OK turns into OK.
grpc::Status ToGrpcStatus(const absl::Status& status);

// A client's view of what a server said: "INVALID_ARGUMENT: message", then a line for each detail.
std::string DescribeGrpcStatus(const grpc::Status& status);

// "INVALID_ARGUMENT", for log lines and metrics.
std::string StatusCodeName(absl::StatusCode code);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_STATUS_H_
