#include "server/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>

#include "server/acceptor.h"
#include "server/connection_guard.h"
#include "server/credentials.h"
#include "server/strings.h"
#include "server/tls_files.h"

namespace winnow::server {
namespace {

class ReflectionSwitch final : public grpc::ServerBuilderOption {
 public:
  explicit ReflectionSwitch(bool on) : on_(on) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    const std::string name = grpc::reflection::ProtoServerReflectionPlugin().name();
    std::erase_if(*plugins, [&](const auto& plugin) { return plugin->name() == name; });
    if (on_) plugins->push_back(std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>());
  }

 private:
  const bool on_;
};

// Allowance of a client that cancels every call of a connection at once, and more than once.
GuardOptions GuardOptionsOf(const ServeConfig& config) {
  GuardOptions options;
  // gRPC refuses metadata over its limit by itself; this is about blocks that go on and on.
  options.http2.header_block_bytes =
      std::max<size_t>(64 << 10, static_cast<size_t>(config.max_metadata_bytes) * 2);
  options.most.resets = config.max_streams;
  // Next to nothing, because a new connection costs an attacker nothing either; beyond it there is what all share.
  options.begins.resets = 2;
  options.shared_most.resets =
      std::max<int64_t>(options.shared_most.resets, 2 * config.max_streams);
  options.write_timeout = absl::ToChronoNanoseconds(
      std::max(config.slow_reader_timeout, config.keepalive_time + config.keepalive_timeout));
  return options;
}

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(absl::ToInt64Milliseconds(duration));
}

}  // namespace

std::unique_ptr<grpc::ServerBuilderOption> ReflectionOption(bool on) {
  return std::make_unique<ReflectionSwitch>(on);
}

// Destroyed last to first: the acceptor hands to the guard, the guard to gRPC.
class GrpcServer::Impl {
 public:
  std::unique_ptr<TlsFiles> tls;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<ConnectionGuard> guard;
  std::unique_ptr<Acceptor> acceptor;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl, int port)
    : impl_(std::move(impl)), port_(port) {}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

absl::Status GrpcServer::ReloadTls() {
  return impl_->tls == nullptr ? absl::OkStatus() : impl_->tls->Reload();
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const ServeConfig& config,
                                                              int64_t max_message_bytes,
                                                              InferenceService& inference,
                                                              Events events,
                                                              std::vector<grpc::Service*> more) {
  if (absl::Status files = CheckTlsFiles(config); !files.ok()) return files;
  auto tls = TlsFiles::Load(
      {.cert = config.tls_cert, .key = config.tls_key, .client_ca = config.tls_client_ca},
      TlsFiles::Protocol::kHttp2, std::move(events.on_tls_problem));
  if (!tls.ok()) return tls.status();

  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  absl::StatusOr<HostPort> address = ParseHostPort(config.listen);
  if (!address.ok()) return address.status();
  auto impl = std::make_unique<Impl>();
  absl::StatusOr<std::unique_ptr<Acceptor>> acceptor = Acceptor::Listen(*address);
  if (!acceptor.ok()) {
    return absl::UnavailableError(
        Concat("cannot listen on ", config.listen, ": ", ToStd(acceptor.status().message())));
  }
  impl->acceptor = *std::move(acceptor);
  impl->tls = *std::move(tls);
  // Without TLS, because the guard has it.
  impl->connections = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      grpc::InsecureServerCredentials());
  builder.RegisterService(&inference.service());
  for (grpc::Service* service : more) builder.RegisterService(service);
  builder.SetOption(ReflectionOption(config.reflection));

  // gRPC inflates before it looks at the size: 1.5 MB become 1.5 GiB. Calls that say they are compressed
  // end with UNIMPLEMENTED before their message is looked at.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  builder.SetMaxSendMessageSize(-1);  // we bound what we send
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(config.max_streams));
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE,
                             static_cast<int>(config.max_metadata_bytes));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(config.keepalive_time));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(config.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             Milliseconds(config.min_ping_interval));
  // What requests in transit may take: gRPC slows down reading from clients that pass it.
  grpc::ResourceQuota quota("winnow");
  quota.Resize(static_cast<size_t>(max_message_bytes) * 16 + (size_t{256} << 20));
  builder.SetResourceQuota(quota);

  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return absl::InternalError("gRPC does not start");
  impl->guard = std::make_unique<ConnectionGuard>(
      GuardOptionsOf(config), impl->tls.get(), [connections = impl->connections.get()](int fd) {
        grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
        parameters.fd = fd;
        connections->HandleNewConnection(&parameters);
      });
  inference.callers().SetCertificateNames(
      [guard = impl->guard.get()](std::string_view peer) { return guard->ClientNameOf(peer); });
  const int port = impl->acceptor->port();
  std::unique_ptr<GrpcServer> server(new GrpcServer(std::move(impl), port));
  server->SetServing(true);
  server->impl_->acceptor->Start(
      ConnectionDescriptors(RaiseDescriptorLimit()),
      {.on_connection = [guard = server->impl_->guard.get()](int fd) { guard->Add(fd); },
       .on_refused = std::move(events.on_refused),
       .on_failure = std::move(events.on_listener_failure)});
  return server;
}

GuardStats GrpcServer::stats() const { return impl_->guard->stats(); }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = impl_->server->GetHealthCheckService();
  health->SetServingStatus("", serving);
  health->SetServingStatus(kInferenceServiceName, serving);
}

void GrpcServer::BeginDrain() { impl_->server->GetHealthCheckService()->Shutdown(); }

void GrpcServer::Shutdown(absl::Duration grace) {
  impl_->acceptor->Stop();
  impl_->server->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  impl_->server->Wait();
}

}  // namespace winnow::server
