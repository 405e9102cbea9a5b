// winnow.v1.PrefixService over gRPC: bytes in and out, everything else is PrefixCalls'.
//
// Threads: gRPC's.
#ifndef WINNOW_SERVER_PREFIX_SERVICE_H_
#define WINNOW_SERVER_PREFIX_SERVICE_H_

#include <memory>

#include "server/grpc_callers.h"
#include "server/prefix_calls.h"

namespace grpc {
class Service;
}

namespace winnow::server {

class PrefixService {
 public:
  // Both must outlive the service.
  PrefixService(PrefixCalls& calls, const GrpcCallers& callers);
  // After the server.
  ~PrefixService();

  grpc::Service& service();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_PREFIX_SERVICE_H_
