// Common to the gRPC services: bytes to messages and back. A call's tenant: server/grpc_callers.h.
//
// Services register their methods raw and parse here, so that a string that is not UTF-8 is
// InvalidArgument with its path (server/wire.h) instead of gRPC's INTERNAL. Any thread.
#ifndef WINNOW_SERVER_GRPC_CALL_H_
#define WINNOW_SERVER_GRPC_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "engine/base/clock.h"

namespace google::protobuf {
class Message;
}

namespace grpc {
class CallbackServerContext;
}

namespace winnow::server {

// Cancelled: the call, or its connection, ended before its message came.
absl::Status ResetBeforeItsMessage();

// ParseMessage's errors; Cancelled: the call ended before its message came.
absl::Status ParseBuffer(const grpc::ByteBuffer& bytes, google::protobuf::Message& message);

// The call's deadline on the engine's clock; none where it is far away or absent.
std::optional<engine::TimePoint> DeadlineOf(grpc::CallbackServerContext& context,
                                            const engine::Clock& clock);

// The caller's trace context (trace_context.h) in the metadata `traceparent`; "" without a valid one.
std::string TraceParentOf(const grpc::CallbackServerContext& context);

grpc::ByteBuffer SerializeBuffer(const google::protobuf::Message& message);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_GRPC_CALL_H_
