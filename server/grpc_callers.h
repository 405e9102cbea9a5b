// The tenant of a gRPC call, whose quotas it takes and with whom it shares KV.
//
// With a key file every call shows a key (metadata `authorization: Bearer KEY` or `x-api-key: KEY`), and its name
// is the tenant. Without one the common name of the client's certificate is, and without either the metadata
// `x-winnow-tenant`, which anyone may send: a key of fairness and no identity.
//
// Threads: any, once the certificates' names are set.
#ifndef WINNOW_SERVER_GRPC_CALLERS_H_
#define WINNOW_SERVER_GRPC_CALLERS_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/api_keys.h"
#include "server/generator.h"

namespace grpc {
class CallbackServerContext;
}

namespace winnow::server {

// The key in the value of an `authorization` header; "" if it is of another scheme.
std::string_view BearerKey(std::string_view authorization);

// UNAUTHENTICATED, as both front ends say it.
absl::Status NoApiKey();

// Headers that proxies add, in lower case: the client is not the one that connected.
inline constexpr const char* kProxyHeaders[] = {"forwarded", "x-forwarded-for", "x-real-ip", "via"};

class GrpcCallers {
 public:
  // `keys` may be null: nobody is asked for one.
  explicit GrpcCallers(std::shared_ptr<ApiKeys> keys) : keys_(std::move(keys)) {}

  // By the peer of a call, the common name of its certificate or "". Before the first call.
  void SetCertificateNames(std::function<std::string(std::string_view peer)> name_of) {
    certificate_name_ = std::move(name_of);
  }

  // Unauthenticated: no key that is known. InvalidArgument: metadata that cannot be a tenant.
  // PermissionDenied: the metadata names another tenant than the key or the certificate.
  absl::StatusOr<std::string> TenantOf(const grpc::CallbackServerContext& context) const;
  // The same into a call's description, with whether it came through a proxy.
  absl::Status Identify(const grpc::CallbackServerContext& context, CallInfo& info) const;

 private:
  absl::StatusOr<std::string> IdentityOf(const grpc::CallbackServerContext& context) const;

  const std::shared_ptr<ApiKeys> keys_;
  std::function<std::string(std::string_view)> certificate_name_ = [](std::string_view) {
    return std::string();
  };
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_GRPC_CALLERS_H_
