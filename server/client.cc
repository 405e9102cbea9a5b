#include "server/client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <chrono>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "engine/base/json_file.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/commands.h"
#include "server/status.h"
#include "server/strings.h"
#include "winnow/v1/inference.grpc.pb.h"

namespace winnow::server {
namespace {

CallResult ToResult(const grpc::Status& status) {
  if (status.ok()) return {};
  return {static_cast<absl::StatusCode>(status.error_code()), DescribeGrpcStatus(status)};
}

}  // namespace

int CallResult::exit_code() const {
  switch (code) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kDeadlineExceeded:
      return kExitDeadline;
    default:
      return kExitFailure;
  }
}

void AddClientFlags(CLI::App& command, ClientOptions* options) {
  command.add_option("--server", options->server, "of the server")
      ->type_name("HOST:PORT")
      ->required();
  command.add_flag("--tls", options->tls.tls, "encrypt, trusting the system's authorities");
  command.add_option("--tls-ca", options->tls.ca, "encrypt, trusting these authorities, PEM")
      ->type_name("FILE");
  command.add_option("--tls-cert", options->tls.cert, "who we are, PEM; with --tls-key")
      ->type_name("FILE");
  command.add_option("--tls-key", options->tls.key, "its private key, PEM")->type_name("FILE");
  command.add_option("--tenant", options->tenant, "sent as x-winnow-tenant");
  // Not the key itself, which every user of the machine would see among the processes.
  command
      .add_option("--api-key-file", options->api_key_file,
                  "the key that the server asks for is the first line of this file")
      ->type_name("FILE");
  command
      .add_option_function<std::string>(
          "--timeout",
          [options](const std::string& text) {
            if (!absl::ParseDuration(text, &options->timeout) ||
                options->timeout <= absl::ZeroDuration()) {
              throw CLI::ValidationError("--timeout", "must be a time, like 500ms, 30s or 2m");
            }
          },
          "deadline of the call, connecting included")
      ->type_name("TIME");
}

void AddCacheFlags(CLI::App& command, CacheFlags* flags) {
  command.add_flag("--no-cache-use", flags->no_use, "compute all of the prompt");
  command.add_flag("--no-cache-store", flags->no_store, "leave nothing that later requests find");
  command.add_option("--cache-priority", flags->priority,
                     "0 to 6: lower ones are evicted first; 3 where nothing is said");
  command.add_option("--cache-ttl", flags->ttl_seconds, "seconds until its KV is dropped");
  command.add_option("--cache-salt", flags->salt,
                     "share KV only with requests that have the same salt");
}

v1::CacheOptions ToProto(const CacheFlags& flags) {
  v1::CacheOptions cache;
  if (flags.no_use) cache.set_use(false);
  if (flags.no_store) cache.set_store(false);
  if (flags.priority) cache.set_priority(*flags.priority);
  if (flags.ttl_seconds) cache.set_ttl_seconds(*flags.ttl_seconds);
  cache.set_salt(flags.salt);
  return cache;
}

class Client::Impl {
 public:
  Impl(const ClientOptions& options, std::string api_key,
       const std::shared_ptr<grpc::Channel>& channel)
      : options(options),
        api_key(std::move(api_key)),
        inference(v1::InferenceService::NewStub(channel)),
        health(grpc::health::v1::Health::NewStub(channel)) {}

  void Prepare(grpc::ClientContext& context) const {
    if (options.timeout < absl::InfiniteDuration()) {
      context.set_deadline(absl::ToChronoTime(absl::Now() + options.timeout));
    }
    if (!options.tenant.empty()) context.AddMetadata("x-winnow-tenant", options.tenant);
    if (!api_key.empty()) context.AddMetadata("authorization", Concat("Bearer ", api_key));
  }

  const ClientOptions options;
  const std::string api_key;
  const std::unique_ptr<v1::InferenceService::Stub> inference;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health;
};

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Create(const ClientOptions& options) {
  auto credentials = MakeChannelCredentials(options.tls);
  if (!credentials.ok()) return credentials.status();
  std::string api_key;
  if (!options.api_key_file.empty()) {
    absl::StatusOr<std::string> text = engine::ReadSmallFile(options.api_key_file, 1 << 10);
    if (!text.ok()) {
      return absl::InvalidArgumentError(Concat("--api-key-file: ", ToStd(text.status().message())));
    }
    api_key = text->substr(0, text->find_first_of("\r\n"));
    // gRPC ends the process at values that no metadata can hold.
    if (api_key.empty() ||
        !std::all_of(api_key.begin(), api_key.end(), [](char c) { return c > 0x20 && c < 0x7f; })) {
      return absl::InvalidArgumentError(
          Concat("--api-key-file: ", options.api_key_file, ": its first line is no key"));
    }
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetUserAgentPrefix("winnow-cli");
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(options.server, *credentials, arguments);
  return std::unique_ptr<Client>(
      new Client(std::make_unique<Impl>(options, std::move(api_key), std::move(channel))));
}

CallResult Client::Generate(const v1::GenerateRequest& request,
                            const std::function<bool(const v1::GenerateResponse&)>& on_message) {
  grpc::ClientContext context;
  impl_->Prepare(context);
  auto reader = impl_->inference->Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (on_message(response)) continue;
    context.TryCancel();
    break;
  }
  return ToResult(reader->Finish());
}

CallResult Client::CheckHealth(const std::string& service, bool* serving) {
  grpc::ClientContext context;
  impl_->Prepare(context);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  CallResult result = ToResult(impl_->health->Check(&context, request, &response));
  *serving = result.ok() && response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  return result;
}

}  // namespace winnow::server
