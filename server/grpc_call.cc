#include "server/grpc_call.h"

#include <google/protobuf/message.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/server_context.h>

#include <memory>
#include <string_view>
#include <vector>

#include "server/status.h"
#include "server/validate.h"
#include "server/wire.h"

namespace winnow::server {
namespace {

constexpr char kTenantKey[] = "x-winnow-tenant";

}  // namespace

absl::Status ParseBuffer(const grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  // Reset, or its connection gone, between the call's beginning and its message.
  if (!bytes.Valid()) {
    return ErrorWithReason(absl::StatusCode::kCancelled, "CANCELLED",
                           "the call ended before its message came");
  }
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

absl::StatusOr<std::string> TenantOf(const grpc::CallbackServerContext& context) {
  std::string claimed;
  const auto range = context.client_metadata().equal_range(kTenantKey);
  for (auto it = range.first; it != range.second; ++it) {
    const std::string_view value(it->second.data(), it->second.size());
    if (absl::Status status = Validator::CheckTenant(value); !status.ok()) return status;
    if (it != range.first && value != claimed) {
      return ErrorWithReason(absl::StatusCode::kInvalidArgument, "INVALID_METADATA",
                             "x-winnow-tenant is there twice");
    }
    claimed = std::string(value);
  }
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return claimed;
  std::vector<grpc::string_ref> names = auth->FindPropertyValues("x509_common_name");
  if (names.empty()) names = auth->GetPeerIdentity();
  if (names.empty()) return claimed;
  const std::string identity(names.front().data(), names.front().size());
  if (!claimed.empty() && claimed != identity) {
    return ErrorWithReason(absl::StatusCode::kPermissionDenied, "TENANT_MISMATCH",
                           "x-winnow-tenant is not the certificate's common name");
  }
  return identity;
}

}  // namespace winnow::server
