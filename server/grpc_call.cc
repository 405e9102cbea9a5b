#include "server/grpc_call.h"

#include <google/protobuf/message.h>

#include "server/status.h"
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

}  // namespace winnow::server
