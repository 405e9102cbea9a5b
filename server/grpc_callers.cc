#include "server/grpc_callers.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "absl/strings/match.h"
#include "engine/base/status_macros.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

constexpr char kTenantKey[] = "x-winnow-tenant";

// The first value of a metadata key; "" if it is not there.
std::string_view First(const grpc::CallbackServerContext& context, const char* key) {
  const auto found = context.client_metadata().find(key);
  if (found == context.client_metadata().end()) return "";
  return {found->second.data(), found->second.size()};
}

}  // namespace

std::string_view BearerKey(std::string_view authorization) {
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() < kScheme.size() ||
      !absl::EqualsIgnoreCase(ToAbsl(authorization.substr(0, kScheme.size())), ToAbsl(kScheme))) {
    return "";
  }
  std::string_view key = authorization.substr(kScheme.size());
  while (key.starts_with(' ')) key.remove_prefix(1);
  return key;
}

absl::Status NoApiKey() {
  return ErrorWithReason(absl::StatusCode::kUnauthenticated, "INVALID_API_KEY",
                         "a key is needed: Authorization: Bearer KEY, or x-api-key");
}

absl::StatusOr<std::string> GrpcCallers::IdentityOf(
    const grpc::CallbackServerContext& context) const {
  if (keys_ == nullptr) return certificate_name_(context.peer());
  std::string_view key = First(context, "x-api-key");
  if (key.empty()) key = BearerKey(First(context, "authorization"));
  const std::optional<std::string> name = keys_->NameOf(key);
  if (!name.has_value()) return NoApiKey();
  return *name;
}

absl::StatusOr<std::string> GrpcCallers::TenantOf(
    const grpc::CallbackServerContext& context) const {
  WINNOW_ASSIGN_OR_RETURN(const std::string identity, IdentityOf(context));
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
  if (identity.empty()) return claimed;
  if (!claimed.empty() && claimed != identity) {
    return ErrorWithReason(absl::StatusCode::kPermissionDenied, "TENANT_MISMATCH",
                           "x-winnow-tenant is not the name of the key or the certificate");
  }
  return identity;
}

absl::Status GrpcCallers::Identify(const grpc::CallbackServerContext& context,
                                   CallInfo& info) const {
  WINNOW_ASSIGN_OR_RETURN(info.tenant, TenantOf(context));
  for (const char* const header : kProxyHeaders) {
    info.by_proxy |= context.client_metadata().contains(header);
  }
  return absl::OkStatus();
}

}  // namespace winnow::server
