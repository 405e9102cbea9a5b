// TLS for the gRPC port. The files are checked at start, so that a server never comes up plaintext,
// or with a certificate that every client will refuse.
#ifndef WINNOW_SERVER_CREDENTIALS_H_
#define WINNOW_SERVER_CREDENTIALS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/config.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace winnow::server {

// InvalidArgument names the file of --tls-...: cannot be read, not PEM, key and certificate do not
// belong together, expired, not valid yet. OK where there is none.
absl::Status CheckTlsFiles(const ServeConfig& config);

// When the first certificate of the PEM file expires, in Unix seconds. InvalidArgument: cannot be read, or
// holds none.
absl::StatusOr<int64_t> CertificateExpiry(const std::string& path);

// A client's side. All empty: plaintext. `ca`: whom to trust; `cert` and `key`: who we are.
struct ClientTls {
  bool tls = false;  // without `ca`: the system's authorities
  std::string ca, cert, key;
};
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const ClientTls& tls);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_CREDENTIALS_H_
