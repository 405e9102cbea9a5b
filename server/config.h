// What `winnow serve` is told: one plain struct, filled from four places.
//
// Precedence: flag, then environment (WINNOW_ and the flag's name in capitals), then the YAML file of
// --config (the flag's name with underscores), then the default. An unknown key of the file is an
// error; an empty environment variable counts as not set. Other WINNOW_ variables are none of our
// business: Kubernetes itself makes up names like WINNOW_SERVICE_HOST.
#ifndef WINNOW_SERVER_CONFIG_H_
#define WINNOW_SERVER_CONFIG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace winnow::server {

struct ServeConfig {
  // Model.
  std::string model;
  std::string model_name;  // "": the directory's name
  std::string device = "cpu";
  std::string cuda_graphs = "on";
  std::string weights = "wide";
  std::string draft_weights = "none";
  std::string dtype = "auto";
  std::string kv_dtype = "auto";
  std::string isa = "auto";
  int64_t threads = 0;     // 0: all processors
  int64_t kv_bytes = 0;    // of KV alone; 0: one sequence of max_context
  int64_t host_bytes = 0;  // of the tier below it; 0: none
  int64_t disk_bytes = 0;  // of the tier below that; 0: none
  std::string store_dir;   // of disk_bytes
  std::string io = "auto";
  int64_t row_cache_bytes = 0;  // 0: an eighth of the KV pool
  std::string prefix_cache = "on";
  std::string prefetch = "off";
  std::string spill = "off";
  std::string resume = "auto";
  int64_t max_context = 0;  // 0: the model's
  int64_t block_tokens = 64;

  // Retrieval (engine/model_retrieval.h).
  std::string artifact;                  // "": the model directory's, if there is one; "none"
  std::string index = "auto";            // or "none", or a list
  std::string retrieval_from = "auto";   // measured; or a number of tokens
  int64_t probe_interval = 64;           // 0: off
  std::string crossover_cache = "auto";  // or "none", or a file

  // Engine.
  int64_t max_running = 64;
  int64_t step_tokens = 512;
  int64_t prompt_step_tokens = 0;  // 0: PromptStepTokens() chooses
  int64_t queue_requests = 256;
  int64_t queue_tokens = 4 << 20;
  absl::Duration pause_grace = absl::Seconds(1);
  absl::Duration slow_reader_timeout = absl::Seconds(30);

  // Requests.
  std::string policy = "dense";
  std::string exactness;  // "": as the policy's own options say
  int64_t default_max_tokens = 512;
  int64_t max_prompt_bytes = 0;   // 0: 16 bytes for each token of the context, at least 64 KiB
  int64_t max_message_bytes = 0;  // 0: the largest valid request and 1 MiB
  int64_t tokenize_threads = 2;
  std::string tool_parser = "auto";
  std::string reasoning_parser = "auto";

  // Endpoints.
  std::string listen = "127.0.0.1:50051";
  std::string metrics = "127.0.0.1:9464";  // "off": none
  std::string http = "127.0.0.1:8000";     // "off": none
  std::string admin_listen = "off";        // AdminService; loopback only
  int64_t http_threads = 1;
  int64_t http_connections = 4096;
  absl::Duration http_idle_timeout = absl::Seconds(75);
  absl::Duration http_read_timeout = absl::Seconds(20);
  absl::Duration http_ping_interval = absl::Seconds(15);
  std::string api_keys;  // "": nobody is asked for one
  std::string tenants;   // "": no quotas
  std::string anonymous_prefixes = "auto";
  std::string port_file;  // "": none
  bool insecure = false;
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  bool reflection = false;
  // The prefix cache's contents, for routers.
  std::string kv_events = "off";         // "on": vllm.grpc.engine's SubscribeKvEvents
  std::string kv_events_zmq = "off";     // HOST:PORT of a ZMQ PUB socket; needs kv_events
  std::string kv_events_replay = "off";  // HOST:PORT of the ROUTER socket beside it
  std::string kv_events_topic;           // "": kv@<http>@<model name>
  bool strict_store = false;
  int64_t max_streams = 256;
  int64_t max_metadata_bytes = 8192;
  absl::Duration keepalive_time = absl::Minutes(2);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  absl::Duration min_ping_interval = absl::Seconds(30);

  // Process.
  absl::Duration drain_delay = absl::ZeroDuration();
  absl::Duration drain_grace = absl::Seconds(30);
  absl::Duration heartbeat_timeout = absl::Seconds(30);
  std::string log_level = "info";
  std::string log_format = "text";
};

// One option of ServeConfig. The table of them makes flags, environment, file keys, --help,
// --print-config and their checks, so that none can be forgotten.
struct ServeOption {
  std::string name;   // of the flag, without dashes: "kv-bytes"
  std::string value;  // what stands for its value in --help: "BYTES"; "" for a switch
  std::string help;
  std::function<absl::Status(ServeConfig&, std::string_view)>
      set;                                             // InvalidArgument: what it takes
  std::function<std::string(const ServeConfig&)> get;  // as `set` takes it

  bool is_switch() const { return value.empty(); }
  std::string env() const;   // "WINNOW_KV_BYTES"
  std::string yaml() const;  // "kv_bytes"
};

const std::vector<ServeOption>& ServeOptions();

// Environment variables that begin as ours do but are no option's, one sentence each, with the nearest
// name. Warnings and not errors, because others make such names too: Kubernetes gives every pod beside a
// service named winnow a WINNOW_SERVICE_HOST (names of that kind are left out). `environ`: NAME=VALUE.
std::vector<std::string> UnknownEnvironment(const char* const* environ);

struct ResolvedConfig {
  ServeConfig config;
  std::map<std::string, std::string>
      origin;  // option name -> "flag --x", "environment X", "FILE:LINE", "default"
};

using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// `flags` holds the flags that were given, by name. `config_file` may be empty.
// InvalidArgument says where the value came from, what is wrong, and what was probably meant.
absl::StatusOr<ResolvedConfig> ResolveConfig(const std::map<std::string, std::string>& flags,
                                             const Environment& environment,
                                             const std::string& config_file);

// What single values cannot show: half-configured TLS, a plaintext port that the network can reach,
// bounds that contradict each other. InvalidArgument names the flags. Touches no file.
absl::Status CheckConfig(const ServeConfig& config);

// Whether anything says that callers without a name are several: keys, client certificates or tenants, a router, or an
// address that the network reaches. --anonymous-prefixes auto asks.
bool MayHaveSeveralCallers(const ServeConfig& config);

// The lines of --print-config: a YAML file that gives the same configuration, with origins as
// comments.
std::string PrintConfig(const ResolvedConfig& resolved);

// "HOST:PORT", "[V6]:PORT", "localhost:PORT", PORT 0 to 65535.
struct HostPort {
  std::string host;  // without brackets
  int port = 0;
  bool loopback = false;  // nothing but this machine can reach it
};
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);

// "4096", "64KiB", "1.5GiB"; KiB, MiB, GiB, TiB.
absl::StatusOr<int64_t> ParseBytes(std::string_view text);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_CONFIG_H_
