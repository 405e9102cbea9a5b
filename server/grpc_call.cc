#include "server/grpc_call.h"

#include <google/protobuf/message.h>
#include <grpc/support/time.h>
#include <grpcpp/server_context.h>

#include <iterator>
#include <string_view>

#include "server/status.h"
#include "server/trace_context.h"
#include "server/wire.h"

namespace winnow::server {

absl::Status ResetBeforeItsMessage() {
  return ErrorWithReason(absl::StatusCode::kCancelled, "CANCELLED",
                         "the call ended before its message came");
}

absl::Status ParseBuffer(const grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  if (!bytes.Valid()) return ResetBeforeItsMessage();
  grpc::Slice slice;
  if (!bytes.DumpToSingleSlice(&slice).ok()) {
    return ErrorWithReason(absl::StatusCode::kInvalidArgument, "INVALID_ENCODING",
                           "the message cannot be read");
  }
  return ParseMessage({reinterpret_cast<const char*>(slice.begin()), slice.size()}, message);
}

grpc::ByteBuffer SerializeBuffer(const google::protobuf::Message& message) {
  grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// gRPC's deadline is on its own clock; what is left of it counts, and the wall clock does not.
std::optional<engine::TimePoint> DeadlineOf(grpc::CallbackServerContext& context,
                                            const engine::Clock& clock) {
  const gpr_timespec deadline = gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_MONOTONIC);
  if (gpr_time_cmp(deadline, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0) return std::nullopt;
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
  // Far deadlines would overflow the sum, and mean none.
  if (left.tv_sec > int64_t{10} * 365 * 24 * 3600) return std::nullopt;
  return clock.Now() + std::chrono::seconds(left.tv_sec) + std::chrono::nanoseconds(left.tv_nsec);
}

std::string TraceParentOf(const grpc::CallbackServerContext& context) {
  const auto [begin, end] = context.client_metadata().equal_range("traceparent");
  // The specification has one; of several none can be meant.
  if (begin == end || std::next(begin) != end) return "";
  const std::string_view value(begin->second.data(), begin->second.size());
  return ParseTraceParent(value).valid() ? std::string(value) : "";
}

}  // namespace winnow::server
