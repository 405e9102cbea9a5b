// winnow.v1.AdminService on a port of its own, which listens on loopback alone: who can reach it may end the server.
//
// Threads: the hooks are called from gRPC's, several at a time.
#ifndef WINNOW_SERVER_ADMIN_SERVER_H_
#define WINNOW_SERVER_ADMIN_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/api_keys.h"
#include "server/log.h"

namespace winnow::v1 {
class GetStateResponse;
}

namespace winnow::server {

// Where keys are asked for, the one whose name an operator's key has.
inline constexpr char kAdminKeyName[] = "admin";

struct AdminHooks {
  std::function<int64_t()> drain;                       // begins it; the calls that are open
  std::function<void(v1::GetStateResponse&)> describe;  // all but the log level
};

class AdminServer {
 public:
  // Listens and serves from now on. `keys` may be null: nobody is asked for one. `log` must outlive the server.
  // Unavailable: the address is taken.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const std::string& listen,
                                                            AdminHooks hooks,
                                                            std::shared_ptr<ApiKeys> keys,
                                                            Log& log);
  // Cuts what is still running.
  ~AdminServer();

  int port() const { return port_; }

 private:
  class Impl;
  explicit AdminServer(std::unique_ptr<Impl> impl, int port);
  std::unique_ptr<Impl> impl_;
  int port_ = 0;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_ADMIN_SERVER_H_
