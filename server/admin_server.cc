#include "server/admin_server.h"

#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <utility>

#include "server/grpc_call.h"
#include "server/grpc_callers.h"
#include "server/grpc_server.h"
#include "server/status.h"
#include "server/strings.h"
#include "winnow/v1/admin.grpc.pb.h"

namespace winnow::server {
namespace {

using V1 = v1::AdminService;
using RawService = V1::WithRawCallbackMethod_Drain<
    V1::WithRawCallbackMethod_GetState<V1::WithRawCallbackMethod_SetLogLevel<V1::Service>>>;

// No request has more than a word.
constexpr int kMaxMessageBytes = 4096;

class Service final : public RawService {
 public:
  Service(AdminHooks hooks, std::shared_ptr<ApiKeys> keys, Log& log)
      : hooks_(std::move(hooks)), keys_(keys), callers_(std::move(keys)), log_(log) {}

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override {
    return Answer<v1::DrainRequest, v1::DrainResponse>(
        context, *request, response, [this](const v1::DrainRequest&, v1::DrainResponse& answer) {
          log_.Event(LogLevel::kInfo, "admin", {{"text", "drain"}});
          answer.set_calls(hooks_.drain());
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* GetState(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override {
    return Answer<v1::GetStateRequest, v1::GetStateResponse>(
        context, *request, response,
        [this](const v1::GetStateRequest&, v1::GetStateResponse& answer) {
          hooks_.describe(answer);
          answer.set_log_level(log_.level());
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* SetLogLevel(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override {
    return Answer<v1::SetLogLevelRequest, v1::SetLogLevelResponse>(
        context, *request, response,
        [this](const v1::SetLogLevelRequest& message, v1::SetLogLevelResponse& answer) {
          const std::optional<std::string> previous = log_.SetLevel(message.level());
          if (!previous.has_value()) {
            return InvalidField("level", "must be debug, info, warn or error");
          }
          log_.Event(LogLevel::kInfo, "admin", {{"text", "log level"}, {"level", message.level()}});
          answer.set_previous_level(*previous);
          return absl::OkStatus();
        });
  }

 private:
  absl::Status CheckCaller(const grpc::CallbackServerContext& context) const {
    if (keys_ == nullptr) return absl::OkStatus();
    const absl::StatusOr<std::string> name = callers_.TenantOf(context);
    if (!name.ok()) return name.status();
    if (*name == kAdminKeyName) return absl::OkStatus();
    return ErrorWithReason(absl::StatusCode::kPermissionDenied, "NOT_ADMIN",
                           "the key of the name admin is needed");
  }

  template <typename Request, typename Response, typename Work>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer& bytes, grpc::ByteBuffer* response,
                                   const Work& work) {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    Request request;
    Response answer;
    absl::Status status = CheckCaller(*context);
    if (status.ok()) status = ParseBuffer(bytes, request);
    if (status.ok()) status = work(request, answer);
    if (status.ok()) *response = SerializeBuffer(answer);
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  const AdminHooks hooks_;
  const std::shared_ptr<ApiKeys> keys_;
  const GrpcCallers callers_;
  Log& log_;
};

}  // namespace

class AdminServer::Impl {
 public:
  Impl(AdminHooks hooks, std::shared_ptr<ApiKeys> keys, Log& log)
      : service(std::move(hooks), std::move(keys), log) {}
  Service service;
  std::unique_ptr<grpc::Server> server;
};

absl::StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const std::string& listen,
                                                                AdminHooks hooks,
                                                                std::shared_ptr<ApiKeys> keys,
                                                                Log& log) {
  auto impl = std::make_unique<Impl>(std::move(hooks), std::move(keys), log);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&impl->service);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // Another server of the host must not take calls that are meant for this one.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetOption(ReflectionOption(false));
  // Health is told on the port that clients use.
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr || port == 0) {
    return absl::UnavailableError(Concat("cannot listen on ", listen, " (--admin-listen)"));
  }
  return std::unique_ptr<AdminServer>(new AdminServer(std::move(impl), port));
}

AdminServer::AdminServer(std::unique_ptr<Impl> impl, int port)
    : impl_(std::move(impl)), port_(port) {}

AdminServer::~AdminServer() {
  // The answer to Drain may be on its way.
  impl_->server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
  impl_->server->Wait();
}

}  // namespace winnow::server
