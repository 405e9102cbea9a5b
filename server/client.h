// The command line's side of the API: one connection to one server.
#ifndef WINNOW_SERVER_CLIENT_H_
#define WINNOW_SERVER_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/credentials.h"
#include "winnow/v1/inference.pb.h"

namespace CLI {
class App;
}

namespace winnow::server {

// How a call ended.
struct CallResult {
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string description;  // of an error, with its details, for people

  bool ok() const { return code == absl::StatusCode::kOk; }
  int exit_code() const;  // of server/commands.h
};

struct ClientOptions {
  std::string server;  // HOST:PORT
  ClientTls tls;
  std::string tenant;                                 // "": not sent
  std::string api_key_file;                           // its first line is sent; "": none
  absl::Duration timeout = absl::InfiniteDuration();  // of each call; includes connecting
};

// Declares --server, --tls..., --tenant, --api-key-file and --timeout on a command.
void AddClientFlags(CLI::App& command, ClientOptions* options);

// A request's cache options. Those that were not given stay unset, so that the server's defaults hold.
struct CacheFlags {
  bool no_use = false, no_store = false;
  std::optional<int32_t> priority;
  std::optional<int64_t> ttl_seconds;
  std::string salt;
};

// Declares --no-cache-use, --no-cache-store and --cache-... on a command.
void AddCacheFlags(CLI::App& command, CacheFlags* flags);
v1::CacheOptions ToProto(const CacheFlags& flags);

class Client {
 public:
  // InvalidArgument: the TLS files, the key's file, or the options contradict each other. Does not connect yet.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const ClientOptions& options);
  ~Client();

  // `on_message` gets each message as it comes; false ends the call.
  CallResult Generate(const v1::GenerateRequest& request,
                      const std::function<bool(const v1::GenerateResponse&)>& on_message);

  // Sets `serving` to whether the health service says SERVING for `service`.
  CallResult CheckHealth(const std::string& service, bool* serving);

 private:
  class Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_CLIENT_H_
