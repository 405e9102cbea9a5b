// What the gRPC services have in common: bytes to messages and back, and the tenant that a call
// counts for.
//
// Services register their methods raw and parse here, so that a string that is not UTF-8 is
// InvalidArgument with its path (server/wire.h) instead of gRPC's INTERNAL. Any thread.
#ifndef WINNOW_SERVER_GRPC_CALL_H_
#define WINNOW_SERVER_GRPC_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace google::protobuf {
class Message;
}
namespace grpc {
class CallbackServerContext;
}

namespace winnow::server {

// ParseMessage's errors; Cancelled: the call ended before its message came.
absl::Status ParseBuffer(const grpc::ByteBuffer& bytes, google::protobuf::Message& message);

grpc::ByteBuffer SerializeBuffer(const google::protobuf::Message& message);

// Whom the call counts for. A verified certificate is an identity; the metadata key is only a
// fairness key, and may not claim another tenant than the certificate. InvalidArgument: the key is
// malformed, or there twice. PermissionDenied: it claims another tenant.
absl::StatusOr<std::string> TenantOf(const grpc::CallbackServerContext& context);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_GRPC_CALL_H_
