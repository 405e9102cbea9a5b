// TLS of a listening port, from PEM files that may be renewed while it is served.
//
// Threads: any.
#ifndef WINNOW_SERVER_TLS_FILES_H_
#define WINNOW_SERVER_TLS_FILES_H_

#include <openssl/ssl.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace winnow::server {

struct TlsPaths {
  std::string cert, key;  // empty: plaintext
  std::string client_ca;  // empty: clients are not asked for a certificate
};

class TlsFiles {
 public:
  enum class Protocol { kHttp1, kHttp2 };  // kHttp2: clients must ask for it (ALPN), as gRPC's do

  // Files that are not good any more, when they are read again.
  using Problem = std::function<void(const absl::Status&)>;

  // InvalidArgument: the files cannot be used, do not belong together, or hold a certificate that is not valid now. Null
  // where there are none. `read_again`: how long a connection may find files that have changed since.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Load(
      TlsPaths paths, Protocol protocol, Problem on_problem,
      std::chrono::nanoseconds read_again = std::chrono::minutes(1));

  // For a new connection. The files are read again after `read_again`; files that are not good leave what there
  // was, and are told.
  std::shared_ptr<SSL_CTX> Context();

  // Reads the files now. InvalidArgument leaves what there was.
  absl::Status Reload();

 private:
  TlsFiles(TlsPaths paths, Protocol protocol, Problem on_problem,
           std::chrono::nanoseconds read_again);
  absl::StatusOr<std::shared_ptr<SSL_CTX>> Read() const;

  const TlsPaths paths_;
  const Protocol protocol_;
  const Problem on_problem_;
  const std::chrono::nanoseconds read_again_;
  absl::Mutex mutex_;
  std::shared_ptr<SSL_CTX> context_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point read_at_ ABSL_GUARDED_BY(mutex_);
};

// The name in the client's verified certificate: its common name, else the first of
// its other names; "" if it showed none.
std::string ClientName(SSL* tls);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_TLS_FILES_H_
