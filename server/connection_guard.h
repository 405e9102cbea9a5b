// The door before gRPC (1.51), which makes a call of every HEADERS frame before it looks at any limit: 130 MB
// of resets took 15 GB and two minutes.
//
// A guard has the client's connection; gRPC gets one end of a socket pair when the client has sent HTTP/2's
// preface. Bytes go through, and what frames cost is paid for (http2_meter.h): each connection has an
// allowance that no well-behaved client uses up, and beyond it draws on what all connections share. Who asks
// for more than there is waits, because its bytes are not read; the others do not. Header blocks without an
// end and bytes that are no HTTP/2 close the connection.
//
//   client ══ TLS ══ guard ── frames counted ── socket pair ── gRPC
//
// TLS ends here, as the guard must see frames. What gRPC needs to know of a client is asked for by the name
// that its end of the pair has for the other (grpc::ServerContext::peer()).
//
// Threads: one of its own has all connections. Add, ClientNameOf and stats may be called from any thread.
#ifndef WINNOW_SERVER_CONNECTION_GUARD_H_
#define WINNOW_SERVER_CONNECTION_GUARD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "engine/base/clock.h"
#include "server/http2_meter.h"
#include "server/tls_files.h"

namespace winnow::server {

struct GuardOptions {
  Http2Limits http2;
  // Each connection's own: what it begins with (so that opening many gains nothing), the most it can save up,
  // and what it gets back in a second.
  Http2Credit begins = {.resets = 16, .control = 256};
  Http2Credit most = {.resets = 256, .control = 4096};
  Http2Credit each_second = {.resets = 32, .control = 1024};
  // The share of all connections together beyond that.
  Http2Credit shared_most = {.resets = 1024, .control = 16384};
  Http2Credit shared_each_second = {.resets = 256, .control = 8192};
  // Connections that may be handed to gRPC: what there is at once, and in a second.
  // Each costs gRPC about a millisecond.
  int64_t connections_most = 64, connections_each_second = 256;
  engine::Duration begin_timeout = std::chrono::seconds(20);  // TLS and preface
  engine::Duration write_timeout = std::chrono::seconds(60);  // a client that takes nothing
};

struct GuardStats {
  int64_t connections = 0;  // now
  uint64_t accepted = 0;
  uint64_t broken = 0;   // closed because of what they sent
  uint64_t delayed = 0;  // times that a connection had to wait for credit
};

class ConnectionGuard {
 public:
  // `to_grpc` takes a descriptor, on the guard's thread. `tls` may be null: plaintext. All must outlive the
  // guard.
  ConnectionGuard(const GuardOptions& options, TlsFiles* tls, std::function<void(int fd)> to_grpc);
  // Closes every connection.
  ~ConnectionGuard();

  // Takes a connected TCP socket.
  void Add(int fd);

  // The common name of the certificate that the client behind `peer` showed; "" if it showed none.
  std::string ClientNameOf(std::string_view peer) const;

  GuardStats stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_CONNECTION_GUARD_H_
