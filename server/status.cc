#include "server/status.h"

#include <grpcpp/support/status.h>

#include "absl/strings/cord.h"
#include "google/protobuf/util/time_util.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/check.h"
#include "server/strings.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxViolations = 16;
constexpr size_t kMaxViolationBytes = 512;
// Status message and details travel as headers, and gRPC's default for clients is 8 KiB of those.
constexpr size_t kMaxMessageBytes = 1024;
constexpr char kTypePrefix[] = "type.googleapis.com/";

template <typename Message>
void SetDetail(absl::Status& status, const Message& message) {
  status.SetPayload(Concat(kTypePrefix, Message::descriptor()->full_name()),
                    absl::Cord(message.SerializeAsString()));
}

template <typename Message>
bool GetDetail(const absl::Status& status, Message& message) {
  const auto payload = status.GetPayload(Concat(kTypePrefix, Message::descriptor()->full_name()));
  return payload.has_value() && message.ParseFromString(std::string(*payload));
}

const char* DefaultReason(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return "INVALID_FIELD";
    case absl::StatusCode::kUnimplemented:
      return "UNSUPPORTED";
    case absl::StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case absl::StatusCode::kNotFound:
      return "NOT_FOUND";
    case absl::StatusCode::kUnauthenticated:
      return "UNAUTHENTICATED";
    case absl::StatusCode::kResourceExhausted:
      return "QUEUE_FULL";
    case absl::StatusCode::kUnavailable:
      return "UNAVAILABLE";
    case absl::StatusCode::kDeadlineExceeded:
      return "DEADLINE";
    case absl::StatusCode::kCancelled:
      return "CANCELLED";
    default:
      return "INTERNAL";
  }
}

}  // namespace

void Violations::Add(std::string_view field, std::string_view description,
                     std::string_view reason) {
  ++total_;
  if (kept_.size() < kMaxViolations) {
    kept_.push_back(
        {std::string(field), CleanUtf8(description, kMaxViolationBytes), std::string(reason)});
  }
}

absl::Status Violations::ToStatus() const {
  if (empty()) return absl::OkStatus();
  std::string text = Concat(kept_[0].field, ": ", kept_[0].description);
  if (total_ > 1) Append(text, " (and ", total_ - 1, " more)");
  absl::Status status = ErrorWithReason(absl::StatusCode::kInvalidArgument, kept_[0].reason, text);
  google::rpc::BadRequest details;
  size_t bytes = 0;
  for (const Violation& violation : kept_) {
    bytes += violation.field.size() + violation.description.size();
    if (bytes > 2 * kMaxViolationBytes && details.field_violations_size() > 0) break;
    auto* out = details.add_field_violations();
    out->set_field(violation.field);
    out->set_description(violation.description);
  }
  SetDetail(status, details);
  return status;
}

absl::Status InvalidField(std::string_view field, std::string_view description,
                          std::string_view reason) {
  Violations violations;
  violations.Add(field, description, reason);
  return violations.ToStatus();
}

absl::Status ErrorWithReason(absl::StatusCode code, std::string_view reason,
                             std::string_view message) {
  WINNOW_CHECK(code != absl::StatusCode::kOk);
  absl::Status status(code, ToAbsl(message));
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain("winnow");
  SetDetail(status, info);
  return status;
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration delay) {
  google::rpc::RetryInfo info;
  *info.mutable_retry_delay() =
      google::protobuf::util::TimeUtil::MillisecondsToDuration(absl::ToInt64Milliseconds(delay));
  SetDetail(status, info);
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  if (status.ok()) return "";
  google::rpc::ErrorInfo info;
  return GetDetail(status, info) ? info.reason() : DefaultReason(status.code());
}

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  WINNOW_CHECK(!status.ok());
  google::rpc::Status out;
  out.set_code(static_cast<int>(status.code()));
  out.set_message(CleanUtf8(ToStd(status.message()), kMaxMessageBytes));
  google::rpc::ErrorInfo info;
  if (!GetDetail(status, info)) {
    info.set_reason(DefaultReason(status.code()));
    info.set_domain("winnow");
  }
  out.add_details()->PackFrom(info);
  if (google::rpc::BadRequest bad; GetDetail(status, bad)) out.add_details()->PackFrom(bad);
  if (google::rpc::RetryInfo retry; GetDetail(status, retry)) out.add_details()->PackFrom(retry);
  return out;
}

std::vector<std::pair<std::string, std::string>> ViolationsOf(const absl::Status& status) {
  std::vector<std::pair<std::string, std::string>> out;
  google::rpc::BadRequest bad;
  if (!GetDetail(status, bad)) return out;
  for (const auto& violation : bad.field_violations()) {
    out.emplace_back(violation.field(), violation.description());
  }
  return out;
}

std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  google::rpc::RetryInfo retry;
  if (!GetDetail(status, retry)) return std::nullopt;
  return absl::Milliseconds(
      google::protobuf::util::TimeUtil::DurationToMilliseconds(retry.retry_delay()));
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status rpc = ToRpcStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), rpc.message(),
                      rpc.SerializeAsString());
}

std::string DescribeGrpcStatus(const grpc::Status& status) {
  std::string out = Concat(StatusCodeName(static_cast<absl::StatusCode>(status.error_code())), ": ",
                           status.error_message());
  google::rpc::Status rpc;
  if (!rpc.ParseFromString(status.error_details())) return out;
  for (const auto& any : rpc.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&info)) {
      Append(out, "\n  reason: ", info.reason());
    } else if (any.UnpackTo(&bad)) {
      for (const auto& violation : bad.field_violations()) {
        Append(out, "\n  ", violation.field(), ": ", violation.description());
      }
    } else if (any.UnpackTo(&retry)) {
      Append(out, "\n  retry after ",
             google::protobuf::util::TimeUtil::ToString(retry.retry_delay()));
    }
  }
  return out;
}

std::string StatusCodeName(absl::StatusCode code) { return absl::StatusCodeToString(code); }

}  // namespace winnow::server
