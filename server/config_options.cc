// The table of `serve`'s options.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "engine/base/device.h"
#include "engine/model/weight_storage.h"
#include "engine/model_retrieval.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/exactness.h"
#include "server/config.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kBytesMax = int64_t{1} << 50;

ServeOption Integer(std::string name, int64_t ServeConfig::*field, int64_t low, int64_t high,
                    std::string help) {
  return {std::move(name), "N", std::move(help),
          [=](ServeConfig& config, std::string_view text) -> absl::Status {
            int64_t value = 0;
            if (!absl::SimpleAtoi(ToAbsl(text), &value) || value < low || value > high) {
              return absl::InvalidArgumentError(
                  Concat("must be an integer in [", low, ", ", high, "]"));
            }
            config.*field = value;
            return absl::OkStatus();
          },
          [=](const ServeConfig& config) { return Concat(config.*field); }};
}

ServeOption Bytes(std::string name, int64_t ServeConfig::*field, int64_t high, std::string help) {
  return {std::move(name), "BYTES", std::move(help),
          [=](ServeConfig& config, std::string_view text) -> absl::Status {
            absl::StatusOr<int64_t> value = ParseBytes(text);
            if (!value.ok() || *value > high) {
              return absl::InvalidArgumentError(
                  Concat("must be a number of bytes up to ", high, ", like 4096, 64KiB or 1.5GiB"));
            }
            config.*field = *value;
            return absl::OkStatus();
          },
          [=](const ServeConfig& config) { return Concat(config.*field); }};
}

ServeOption Time(std::string name, absl::Duration ServeConfig::*field, absl::Duration low,
                 absl::Duration high, std::string help) {
  return {std::move(name), "TIME", std::move(help),
          [=](ServeConfig& config, std::string_view text) -> absl::Status {
            absl::Duration value;
            if (!absl::ParseDuration(ToAbsl(text), &value) || value < low || value > high) {
              return absl::InvalidArgumentError(
                  Concat("must be a time in [", absl::FormatDuration(low), ", ",
                         absl::FormatDuration(high), "], like 500ms, 30s or 2m"));
            }
            config.*field = value;
            return absl::OkStatus();
          },
          [=](const ServeConfig& config) { return absl::FormatDuration(config.*field); }};
}

ServeOption Text(std::string name, std::string value, std::string ServeConfig::*field,
                 std::string help) {
  return {std::move(name), std::move(value), std::move(help),
          [=](ServeConfig& config, std::string_view text) -> absl::Status {
            if (text.find('\0') != text.npos) {
              return absl::InvalidArgumentError("must not hold a NUL");
            }
            config.*field = std::string(text);
            return absl::OkStatus();
          },
          [=](const ServeConfig& config) { return config.*field; }};
}

ServeOption Choice(std::string name, std::string ServeConfig::*field,
                   const std::vector<std::string>& choices, std::string help) {
  std::string value = absl::StrJoin(choices, "|");
  return {std::move(name), value, std::move(help),
          [=](ServeConfig& config, std::string_view text) -> absl::Status {
            if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
              return absl::InvalidArgumentError(Concat("must be one of ", value));
            }
            config.*field = std::string(text);
            return absl::OkStatus();
          },
          [=](const ServeConfig& config) { return config.*field; }};
}

ServeOption Switch(std::string name, bool ServeConfig::*field, std::string help) {
  return {std::move(name), "", std::move(help),
          [=](ServeConfig& config, std::string_view text) -> absl::Status {
            if (text == "true" || text == "1") {
              config.*field = true;
            } else if (text == "false" || text == "0") {
              config.*field = false;
            } else {
              return absl::InvalidArgumentError("must be true or false");
            }
            return absl::OkStatus();
          },
          [=](const ServeConfig& config) { return config.*field ? "true" : "false"; }};
}

ServeOption Endpoint(std::string name, std::string ServeConfig::*field, bool may_be_off,
                     std::string help) {
  return {std::move(name), "HOST:PORT", std::move(help),
          [=](ServeConfig& config, std::string_view text) -> absl::Status {
            if (!(may_be_off && text == "off")) {
              if (absl::StatusOr<HostPort> parsed = ParseHostPort(text); !parsed.ok()) {
                return absl::InvalidArgumentError(
                    Concat(parsed.status().message(), may_be_off ? ", or off" : ""));
              }
            }
            config.*field = std::string(text);
            return absl::OkStatus();
          },
          [=](const ServeConfig& config) { return config.*field; }};
}

ServeOption Policy() {
  ServeOption option = Text("policy", "POLICY", &ServeConfig::policy,
                            "the attention policy of requests that name none");
  option.set = [](ServeConfig& config, std::string_view text) -> absl::Status {
    absl::StatusOr<engine::AttentionPolicy> policy = engine::ParseAttentionPolicy(text);
    if (!policy.ok()) return absl::InvalidArgumentError(policy.status().message());
    config.policy = engine::ToString(*policy);
    return absl::OkStatus();
  };
  return option;
}

ServeOption ExactnessOption() {
  ServeOption option = Text("exactness", "exact|floor:C|fast", &ServeConfig::exactness,
                            "how near to dense answers are that name none: exact: dense attention "
                            "verifies what the policy "
                            "drafts; floor:C: a measured coverage below C reads more; fast: as the "
                            "policy says. Empty: the "
                            "policy's options verify and floor decide");
  option.set = [](ServeConfig& config, std::string_view text) -> absl::Status {
    if (text.empty()) {
      config.exactness.clear();
      return absl::OkStatus();
    }
    absl::StatusOr<engine::Exactness> exactness = engine::ParseExactness(text);
    if (!exactness.ok()) return exactness.status();
    config.exactness = engine::ToString(*exactness);
    return absl::OkStatus();
  };
  return option;
}

ServeOption Index() {
  ServeOption option = Text(
      "index", "LIST", &ServeConfig::index,
      "indexes to keep beside the KV cache, as lsh:128,quest,spotlight,int4 (int4: for policies "
      "with p; residual, beside pca: for policies with rerank=on); auto: all that can be had, "
      "residual where --policy asks for it; none: dense, window and oracle only");
  option.set = [set = option.set](ServeConfig& config, std::string_view text) -> absl::Status {
    if (auto list = engine::ParseIndexList(text); !list.ok()) return list.status();
    return set(config, text);
  };
  return option;
}

ServeOption RetrievalFrom() {
  ServeOption option =
      Text("retrieval-from", "TOKENS", &ServeConfig::retrieval_from,
           "shortest context that retrieves, under policies that do not say from=; "
           "auto: from where it is faster, measured at start and remembered");
  option.set = [set = option.set](ServeConfig& config, std::string_view text) -> absl::Status {
    if (auto tokens = engine::ParseRetrievalFrom(text); !tokens.ok()) return tokens.status();
    return set(config, text);
  };
  return option;
}

std::vector<ServeOption> MakeServeOptions() {
  using C = ServeConfig;
  return {
      Text("model", "DIR|FILE.gguf", &C::model,
           "Hugging Face model directory, or GGUF file (required)"),
      Text("model-name", "NAME", &C::model_name,
           "what clients see as the model's name; empty: the directory's or file's name"),
      Choice("device", &C::device, engine::DeviceNames(),
             "where the model runs; cuda: the first GPU, with all KV in its memory or in "
             "--host-bytes"),
      Choice("cuda-graphs", &C::cuda_graphs, {"on", "off"},
             "with --device cuda: launches of kernels that repeat the last step's go as one CUDA "
             "graph; the same bits either way"),
      Choice("weights", &C::weights, engine::WeightStorageNames(),
             "how matrices are kept: wide: as plain values; stored: a file's quantised weights as "
             "they are; int8, int4, fp8: rounded while loading; w8a8, w4a8: int8, int4, and what "
             "meets "
             "them is rounded to int8"),
      Choice(
          "draft-weights", &C::draft_weights, engine::DraftWeightNames(),
          "what drafts under verify= are computed with: none: the weights; else a second copy of "
          "the matrices in that form. Answers stay the same"),
      Choice("dtype", &C::dtype, {"auto", "bf16", "f16", "f32"},
             "of matrix products; auto: as config.json says"),
      Choice("kv-dtype", &C::kv_dtype, {"auto", "bf16", "f32", "int8", "fp8"},
             "of the KV cache; auto: f32 with --dtype f32, else bf16; int8, fp8: half of bf16's "
             "bytes"),
      Choice("isa", &C::isa, engine::InstructionSetNames(),
             "instruction set; auto: the best that the processor has"),
      Integer("threads", &C::threads, 0, 1024, "compute threads; 0: as many as processors"),
      Bytes(
          "kv-bytes", &C::kv_bytes, kBytesMax,
          "size of the KV pool, taken at start, indexes not counted; 0: one sequence of the whole "
          "context. With --spill on, of the first layers' KV on the GPU"),
      Bytes(
          "host-bytes", &C::host_bytes, kBytesMax,
          "host memory that KV moves to when the pool is full (without --disk-bytes a copy of all "
          "of it, so more than the pool), with --device cuda pinned memory that KV lies in but for "
          "its first layers; 0: none"),
      Bytes("disk-bytes", &C::disk_bytes, kBytesMax,
            "files in --store-dir that KV moves to, three quarters of them for a copy of all of "
            "it, read row by row where a policy chooses; with --device cuda they hold prefixes "
            "only, but for --spill on; 0: none"),
      Text("store-dir", "DIR", &C::store_dir,
           "directory of the files of --disk-bytes, of one process at a time"),
      Choice("io", &C::io, {"auto", "uring", "threads"},
             "how files are read and written; auto: io_uring, else threads"),
      Bytes("row-cache-bytes", &C::row_cache_bytes, kBytesMax,
            "memory for rows that were read from slower tiers, with --device cuda the GPU's, or "
            "the host's with --spill on; 0: an eighth of the KV pool, with --device cuda of "
            "--host-bytes"),
      Choice(
          "resume", &C::resume, {"auto", "lazy", "eager"},
          "a stored prefix's KV is read when it is chosen (lazy), or all at once before the first "
          "token (eager); auto: eager if it takes an eighth of the KV pool at most"),
      Choice("spill", &C::spill, {"on", "off"},
             "with --device cuda: KV may be more than --host-bytes hold, and the rest lies in the "
             "files of --disk-bytes; each layer then waits for the host"),
      Switch(
          "strict-store", &C::strict_store,
          "refuse a --store-dir that other users can write or own; without it that is a warning"),
      Choice("prefetch", &C::prefetch, {"on", "off"},
             "read rows that the next layer may choose from slower tiers while this one computes"),
      Choice("prefix-cache", &C::prefix_cache, {"on", "off"},
             "requests of a tenant, or of its trust domain, that begin alike share KV, with "
             "--disk-bytes after a restart too"),
      Integer("max-context", &C::max_context, 0, kInt32Max,
              "tokens of prompt and answer together; 0: the model's own limit"),
      Integer("block-tokens", &C::block_tokens, 16, 1024, "tokens of a KV block, a power of two"),

      Text("artifact", "FILE", &C::artifact,
           "learned functions for retrieval; empty: winnow-artifact.safetensors in the model's "
           "directory, if it is there; none: none"),
      Index(),
      RetrievalFrom(),
      Integer(
          "probe-interval", &C::probe_interval, 0, 1 << 30,
          "measure the quality of one choice in so many (a probe reads all keys of a layer); 0: "
          "none, and no policy may have a floor"),
      Text("crossover-cache", "FILE", &C::crossover_cache,
           "where --retrieval-from auto is remembered; auto: crossover.json in "
           "$XDG_CACHE_HOME/winnow or ~/.cache/winnow; none: measure at every start"),

      Integer("max-running", &C::max_running, 1, 4096, "sequences that run at once"),
      Integer("step-tokens", &C::step_tokens, 1, 65536, "tokens that one step computes, at most"),
      Integer(
          "prompt-step-tokens", &C::prompt_step_tokens, 0, 65536,
          "tokens of a step in which nobody decodes, at most; 0: with --device cuda and KV in its "
          "memory 2048, or --step-tokens if that is more; else --step-tokens"),
      Integer("queue-requests", &C::queue_requests, 1, 1 << 20, "requests that wait, at most"),
      Integer("queue-tokens", &C::queue_tokens, 1, int64_t{1} << 40,
              "prompt tokens that wait, at most"),
      Time("pause-grace", &C::pause_grace, absl::ZeroDuration(), absl::Hours(1),
           "how long a paused request of a slow reader keeps its KV while others wait"),
      Time("slow-reader-timeout", &C::slow_reader_timeout, absl::Milliseconds(100), absl::Hours(24),
           "a request whose reader takes nothing for this long is cancelled"),

      Policy(),
      ExactnessOption(),
      Integer("default-max-tokens", &C::default_max_tokens, 1, kInt32Max,
              "max_tokens of requests that set none, as far as the context has room"),
      Bytes("max-prompt-bytes", &C::max_prompt_bytes, 1 << 30,
            "longest prompt as text; 0: 16 for each token of the context, at least 64KiB"),
      Bytes("max-message-bytes", &C::max_message_bytes, 1 << 30,
            "largest gRPC message, and body of an HTTP request; 0: the largest valid request and "
            "1MiB"),
      Integer("tokenize-threads", &C::tokenize_threads, 1, 64,
              "threads that turn text into tokens"),
      Choice("tool-parser", &C::tool_parser,
             {"auto", "none", "hermes", "llama3_json", "mistral", "harmony"},
             "how the model writes calls of functions, over HTTP; auto: as its chat template "
             "shows; none: tools are "
             "refused"),
      Choice(
          "reasoning-parser", &C::reasoning_parser, {"auto", "none", "think", "harmony"},
          "how an answer tells reasoning, which HTTP gives apart: in <think> at its head, or in a "
          "channel of OpenAI's Harmony; auto: as chat template and vocabulary show"),

      Endpoint("listen", &C::listen, false, "gRPC; port 0: any free one"),
      Endpoint("metrics", &C::metrics, true,
               "Prometheus metrics under /metrics, IPv4; port 0: any free one; off: none"),
      Endpoint("http", &C::http, true,
               "HTTP: OpenAI's routes, /health, /metrics; port 0: any free one; off: none"),
      Endpoint("admin-listen", &C::admin_listen, true,
               "AdminService (drain, state, log level), on loopback only; port 0: any free one"),
      Integer("http-threads", &C::http_threads, 1, 64, "threads that read and write HTTP"),
      Integer("http-connections", &C::http_connections, 1, 1 << 20,
              "HTTP connections, at most; the one that is idle longest makes room for a new one"),
      Time("http-idle-timeout", &C::http_idle_timeout, absl::Milliseconds(100), absl::Hours(24),
           "an HTTP connection without a request for this long is closed"),
      Time("http-read-timeout", &C::http_read_timeout, absl::Milliseconds(100), absl::Hours(1),
           "how long the head of an HTTP request may take to arrive, and its body, which gets a "
           "second more for each 64KiB"),
      Time("http-ping-interval", &C::http_ping_interval, absl::Milliseconds(10), absl::Hours(1),
           "an HTTP stream that has nothing to say for this long gets a comment"),
      Text("api-keys", "FILE", &C::api_keys,
           "file of names and SHA-256 hashes of keys, one of which every request must show but for "
           "health; the key's name is the tenant"),
      Text("tenants", "FILE", &C::tenants,
           "YAML file of tenants' weights, quotas and trust domains, read again when it changes"),
      Choice("anonymous-prefixes", &C::anonymous_prefixes, {"auto", "shared", "none"},
             "whether requests without a key, a certificate or x-winnow-tenant share KV with each "
             "other; auto: only where no proxy forwards them, every address is of loopback, and "
             "--api-keys, --tenants, --tls-client-ca and --kv-events are not set"),
      Text("port-file", "FILE", &C::port_file, "write the gRPC port here once it listens"),
      Switch(
          "insecure", &C::insecure,
          "allow gRPC and HTTP without TLS, and metrics, on addresses that the network can reach"),
      Text("tls-cert", "FILE", &C::tls_cert, "certificate chain, PEM; with --tls-key"),
      Text("tls-key", "FILE", &C::tls_key, "private key, PEM; with --tls-cert"),
      Text("tls-client-ca", "FILE", &C::tls_client_ca,
           "ask clients for a certificate signed by one of these, PEM"),
      Choice("kv-events", &C::kv_events, {"on", "off"},
             "tell routers which prefixes are here (vllm.grpc.engine's SubscribeKvEvents): a "
             "subscriber reads the tokens of its tenant's prompts"),
      Endpoint("kv-events-zmq", &C::kv_events_zmq, true,
               "the same on a ZMQ PUB socket, of all tenants; needs --kv-events on; port 0: any "
               "free one"),
      Endpoint("kv-events-replay", &C::kv_events_replay, true,
               "ZMQ ROUTER socket that repeats batches of --kv-events-zmq"),
      Text("kv-events-topic", "TEXT", &C::kv_events_topic,
           "topic of --kv-events-zmq, as kv@POD_IP:PORT@MODEL; empty: kv@<--http>@<model's name>"),
      Switch("reflection", &C::reflection,
             "tell clients the API's schema (gRPC server reflection)"),
      Integer("max-streams", &C::max_streams, 1, kInt32Max, "concurrent calls of one connection"),
      Bytes("max-metadata-bytes", &C::max_metadata_bytes, 1 << 20,
            "metadata of one call, and head of an HTTP request"),
      Time("keepalive-time", &C::keepalive_time, absl::Seconds(1), absl::Hours(24),
           "ping a client that has been silent for this long"),
      Time("keepalive-timeout", &C::keepalive_timeout, absl::Milliseconds(100), absl::Hours(1),
           "and close its connection if it does not answer for this long"),
      Time("min-ping-interval", &C::min_ping_interval, absl::Milliseconds(100), absl::Hours(1),
           "clients that ping more often than this are sent away"),

      Time("drain-delay", &C::drain_delay, absl::ZeroDuration(), absl::Hours(1),
           "how long new requests are still served after SIGTERM, while health says NOT_SERVING: "
           "longer than a "
           "router takes to notice"),
      Time("drain-grace", &C::drain_grace, absl::ZeroDuration(), absl::Hours(24),
           "how long running requests may go on after SIGTERM"),
      Time("heartbeat-timeout", &C::heartbeat_timeout, absl::Milliseconds(100), absl::Hours(24),
           "the health service says NOT_SERVING when a step takes longer than this"),
      Choice("log-level", &C::log_level, {"debug", "info", "warn", "error"}, "what is logged"),
      Choice("log-format", &C::log_format, {"text", "json"},
             "lines of key=value, or lines of JSON; to standard error"),
  };
}

}  // namespace

std::string ServeOption::env() const { return Concat("WINNOW_", absl::AsciiStrToUpper(yaml())); }

std::string ServeOption::yaml() const { return absl::StrReplaceAll(name, {{"-", "_"}}); }

const std::vector<ServeOption>& ServeOptions() {
  static const std::vector<ServeOption>& options =
      *new std::vector<ServeOption>(MakeServeOptions());
  return options;
}

}  // namespace winnow::server
