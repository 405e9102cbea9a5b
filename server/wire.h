// Protobuf bytes to messages, with errors that a client can act on.
//
// Protobuf's own parser refuses a string that is not UTF-8 by failing as a whole, and gRPC turns
// that into INTERNAL. Here the bytes are parsed by us (the service registers its methods raw), and
// when that fails they are walked once more, by the message's descriptor, to find what was wrong.
#ifndef WINNOW_SERVER_WIRE_H_
#define WINNOW_SERVER_WIRE_H_

#include <string_view>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}

namespace winnow::server {

// InvalidArgument: INVALID_FIELD with the path of the first string that is not UTF-8, or
// INVALID_ENCODING if the bytes are not Protobuf.
absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message& message);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_WIRE_H_
