// winnow.v1.PrefixService over gRPC. A prefix is computed as a request of one token, so that the tenant's quotas, its
// share of the queue and the call's deadline hold for it; then the engine thread gives it its name (prefix_table.h).
//
// Each change of names is written to a file before it is answered, on a thread of the service's own, in the order in which
// the engine thread did it.
//
// Threads: gRPC's call it; the tokenising threads make ids; the engine thread is asked through its mailbox.
#ifndef WINNOW_SERVER_PREFIX_SERVICE_H_
#define WINNOW_SERVER_PREFIX_SERVICE_H_

#include <memory>
#include <optional>

#include "engine/schedule/engine.h"
#include "server/generator.h"
#include "server/grpc_callers.h"
#include "server/prefix_file.h"

namespace grpc {
class Service;
}

namespace winnow::server {

class PrefixService {
 public:
  // All must outlive the service. Without a `file` names end with the process.
  PrefixService(Generator& generator, engine::Engine& engine, const GrpcCallers& callers,
                std::optional<PrefixFile> file);
  // After the server, and after the engine has stopped.
  ~PrefixService();

  grpc::Service& service();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_PREFIX_SERVICE_H_
