// The gRPC server around the services: address, credentials, limits, health, reflection.
#ifndef WINNOW_SERVER_GRPC_SERVER_H_
#define WINNOW_SERVER_GRPC_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/config.h"
#include "server/connection_guard.h"
#include "server/inference_service.h"

namespace grpc {
class ServerBuilderOption;
class Service;
}  // namespace grpc

namespace winnow::server {

inline constexpr char kInferenceServiceName[] = "winnow.v1.InferenceService";

// Reflection of a server, on or off. Linking gRPC's reflection library is enough to turn it on for every server of the
// process, so off has to be said, too.
std::unique_ptr<grpc::ServerBuilderOption> ReflectionOption(bool on);

class GrpcServer {
 public:
  // What an operator should know of connections; from a thread of the server's.
  struct Events {
    std::function<void(uint64_t refused)> on_refused = [](uint64_t) {};  // acceptor.h
    std::function<void(const absl::Status&)> on_listener_failure = [](const absl::Status&) {};
    std::function<void(const absl::Status&)> on_tls_problem = [](const absl::Status&) {
    };  // tls_files.h
  };

  // Listens and serves from now on; health says SERVING. `inference` must outlive the server, and so must `more`: other
  // services on the same port.
  // InvalidArgument: the TLS files. Unavailable: the address is taken or cannot be bound.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const ServeConfig& config,
                                                           int64_t max_message_bytes,
                                                           InferenceService& inference,
                                                           Events events,
                                                           std::vector<grpc::Service*> more = {});
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const ServeConfig& config,
                                                           int64_t max_message_bytes,
                                                           InferenceService& inference) {
    return Start(config, max_message_bytes, inference, Events());
  }
  // Cuts what is still running.
  ~GrpcServer();

  int port() const { return port_; }
  GuardStats stats() const;

  // Reads the TLS files now, for connections that come from now on. InvalidArgument leaves what there was; OK where there
  // are none.
  absl::Status ReloadTls();

  // What the health service says for "" and the inference service; after BeginDrain always
  // NOT_SERVING.
  void SetServing(bool serving);
  void BeginDrain();

  // Takes no new calls, lets running ones end until `grace` has passed, and cuts the rest. Blocks.
  void Shutdown(absl::Duration grace);

 private:
  class Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl, int port);
  std::unique_ptr<Impl> impl_;
  int port_ = 0;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_GRPC_SERVER_H_
