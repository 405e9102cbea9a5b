#include "server/end_status.h"

#include "server/status.h"

namespace winnow::server {

absl::Status StatusOfEnd(const engine::OutputEvent& event, bool engine_failed) {
  switch (event.finish) {
    case engine::FinishReason::kDeadline:
      return ErrorWithReason(absl::StatusCode::kDeadlineExceeded, "DEADLINE",
                             "the call's deadline passed");
    case engine::FinishReason::kCancelled:
      if (event.error_code == absl::StatusCode::kOk) {
        return ErrorWithReason(absl::StatusCode::kCancelled, "CANCELLED", "cancelled");
      }
      if (event.error_code == absl::StatusCode::kUnavailable) {
        return ErrorWithReason(absl::StatusCode::kUnavailable, "DRAINING", event.error);
      }
      return ErrorWithReason(event.error_code, "SLOW_READER", event.error);
    default:
      if (event.error_code == absl::StatusCode::kUnavailable) {
        return ErrorWithReason(absl::StatusCode::kUnavailable,
                               engine_failed ? "ENGINE_FAILED" : "STORE_FAILED", event.error);
      }
      if (event.error_code == absl::StatusCode::kInvalidArgument) {
        return ErrorWithReason(event.error_code, "INVALID_FIELD", event.error);
      }
      return ErrorWithReason(event.error_code == absl::StatusCode::kOk ? absl::StatusCode::kInternal
                                                                       : event.error_code,
                             "INTERNAL", event.error);
  }
}

}  // namespace winnow::server
