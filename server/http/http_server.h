// HTTP/1.1 on a port of its own: connections, limits, time-outs, TLS. What the requests mean is the
// handler's business (http_exchange.h).
//
// Everything a client can make grow is bounded: connections, a request's head and body, the bodies
// of all connections together, how long a request may take to arrive, how long a response may take
// to be read, and how much is read ahead of a response (pipelining). An open stream costs no thread,
// only its connection's state.
//
// When there are as many connections as may be, by their own limit or by descriptors (acceptor.h), the one that
// has been idle longest makes room for a new one; if none is idle, the new one gets 503 and is closed.
//
// Threads: `threads` I/O threads of its own; each connection stays on one of them. The methods may
// be called from any other thread.
#ifndef WINNOW_SERVER_HTTP_HTTP_SERVER_H_
#define WINNOW_SERVER_HTTP_HTTP_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "server/http/http_exchange.h"
#include "server/log.h"

namespace winnow::server {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0: any free one
  int threads = 1;
  size_t max_connections = 4096;
  size_t max_head_bytes = 8192;
  size_t max_body_bytes = 1 << 20;
  size_t max_receiving_bytes = size_t{256}
                               << 20;  // bodies being received, all connections together
  engine::Duration idle_timeout = std::chrono::seconds(75);  // between requests
  // For a request's head, and again for its body, which gets a second more for each 64 KiB.
  engine::Duration read_timeout = std::chrono::seconds(20);
  engine::Duration write_timeout = std::chrono::seconds(30);  // for each piece of a response
  engine::Duration ping_interval = std::chrono::seconds(15);
  // PEM files; empty: plaintext. `client_ca`: ask for a certificate that it signed.
  std::string tls_cert, tls_key, tls_client_ca;
};

struct HttpServerStats {
  int64_t connections = 0;  // now
  uint64_t accepted = 0;
  uint64_t refused = 0;  // 503 because all connections were busy
  uint64_t evicted = 0;  // idle connections that made room
  uint64_t timed_out =
      0;  // requests that did not arrive, and responses that were not read, in time
  uint64_t accept_errors = 0;
};

class HttpServer {
 public:
  // Serves from now on. All references must outlive the server.
  // `on_listener_failure`: nothing is accepted any more; from a thread of the server's, at most once.
  // InvalidArgument: the TLS files. Unavailable: the address is taken or cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const HttpServerOptions& options, HttpHandler& handler, Log& log, const engine::Clock& clock,
      std::function<void(const absl::Status&)> on_listener_failure = [](const absl::Status&) {});
  // Closes every connection.
  ~HttpServer();

  int port() const;
  HttpServerStats stats() const;

  // As GrpcServer's.
  absl::Status ReloadTls();

  // From now on each response ends its connection.
  void BeginDrain();

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_HTTP_SERVER_H_
