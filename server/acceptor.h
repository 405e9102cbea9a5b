// Accepts connections for the gRPC and the HTTP server. (gRPC's own listener, of 1.51, closes for good when the
// process runs out of descriptors once.)
//
// A connection whose descriptor is at or above the limit is closed at once, or takes an idle one's place where
// the server knows of one: the kernel hands out the lowest
// free one, so that number says how many the process has open. What lies between the limit and the
// process's own limit is for files, scrapes and health checks' answers.
//
// Threads: one of its own, which calls back.
#ifndef WINNOW_SERVER_ACCEPTOR_H_
#define WINNOW_SERVER_ACCEPTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/config.h"

namespace winnow::server {

// Raises the soft limit of descriptors to the hard one; returns the limit that there is then.
int64_t RaiseDescriptorLimit();
// Descriptors below this are for connections; `limit`: of the process.
int64_t ConnectionDescriptors(int64_t limit);

struct AcceptorEvents {
  std::function<void(int fd)> on_connection;  // takes the descriptor: non-blocking, close on exec
  // The same beyond the limit, for a few at a time: another connection must make room for it. May be empty.
  std::function<void(int fd)> on_crowded = {};
  // `refused` connections since the last call were closed, because too many are open; at most once a
  // second.
  std::function<void(uint64_t refused)> on_refused;
  // Nothing is accepted any more. At most once.
  std::function<void(const absl::Status&)> on_failure;
};

class Acceptor {
 public:
  // Binds and listens on every address of the host; connections wait until Start. Unavailable: cannot
  // bind.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const HostPort& address);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int port() const { return port_; }
  void Start(int64_t descriptors, AcceptorEvents events);
  // Closes the sockets; no event comes any more.
  void Stop();

 private:
  Acceptor() = default;
  void Run();
  absl::Status AcceptAll(int socket);
  void Refused();

  std::vector<int> sockets_;
  int port_ = 0;
  int stop_fd_ = -1;
  int64_t descriptors_ = 0;
  AcceptorEvents events_;
  uint64_t refused_ = 0;  // not told yet
  int64_t told_at_ns_ = 0;
  std::thread thread_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_ACCEPTOR_H_
