#include "server/config.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "engine/base/device.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/kv/kv_store.h"
#include "server/strings.h"
#include "server/suggest.h"
#include "yaml-cpp/eventhandler.h"
#include "yaml-cpp/yaml.h"

namespace winnow::server {
namespace {

// All options with their longest values take a few KiB. The parser takes seconds for tens of MB.
constexpr size_t kConfigFileBytesMax = 1 << 20;

struct FileValue {
  std::string text;
  int line = 0;
};

// Where documents begin, of a text's first two. YAML::LoadAll asks for more until there are none, and at a comma that stands
// where no list is the parser has always one more.
class DocumentStarts final : public YAML::EventHandler {
 public:
  static std::vector<YAML::Mark> FirstTwo(const std::string& text) {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    DocumentStarts starts;
    while (starts.marks_.size() < 2 && parser.HandleNextDocument(starts)) continue;
    return std::move(starts.marks_);
  }

  void OnDocumentStart(const YAML::Mark& mark) override { marks_.push_back(mark); }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  std::vector<YAML::Mark> marks_;
};

// The file as option name -> value. Everything in it must be known and a scalar.
absl::StatusOr<std::map<std::string, FileValue>> ReadConfigFile(const std::string& path) {
  const auto fail = [&](const YAML::Mark& mark, std::string_view what) {
    return absl::InvalidArgumentError(
        mark.is_null() ? Concat(path, ": ", what) : Concat(path, ":", mark.line + 1, ": ", what));
  };
  const absl::StatusOr<std::string> text = engine::ReadSmallFile(path, kConfigFileBytesMax);
  if (absl::IsInvalidArgument(text.status())) return text.status();
  if (!text.ok()) return absl::InvalidArgumentError(Concat(path, ": cannot be read"));
  YAML::Node root;
  std::vector<YAML::Mark> documents;
  try {
    documents = DocumentStarts::FirstTwo(*text);
    root = YAML::Load(*text);
  } catch (const YAML::Exception& error) {
    return fail(error.mark, error.msg);
  }
  std::map<std::string, FileValue> values;
  if (documents.size() > 1) return fail(documents[1], "holds more than one document");
  if (root.IsNull()) return values;  // empty, or comments alone
  if (!root.IsMap()) return fail(root.Mark(), "must be a map of options");

  std::map<std::string, std::string> names;  // key in the file -> option name
  std::vector<std::string> keys;
  for (const ServeOption& option : ServeOptions()) {
    names[option.yaml()] = option.name;
    keys.push_back(option.yaml());
  }
  for (const auto& entry : root) {
    if (!entry.first.IsScalar()) return fail(entry.first.Mark(), "a key must be a name");
    const std::string key = entry.first.Scalar();
    const auto name = names.find(key);
    if (name == names.end()) {
      return fail(entry.first.Mark(), Concat("unknown option ", key, DidYouMean(key, keys)));
    }
    if (entry.second.IsNull()) {
      return fail(entry.first.Mark(), Concat(key, ": has no value; \"\" is an empty one"));
    }
    if (!entry.second.IsScalar()) {
      return fail(entry.second.Mark(), Concat(key, ": must be a single value"));
    }
    const FileValue value{entry.second.Scalar(), entry.first.Mark().line + 1};
    if (!values.emplace(name->second, value).second) {
      return fail(entry.first.Mark(), Concat(key, ": is there twice"));
    }
  }
  return values;
}

bool IsLoopback(const std::string& host) {
  if (host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace

absl::StatusOr<HostPort> ParseHostPort(std::string_view text) {
  const absl::Status bad =
      absl::InvalidArgumentError("must be HOST:PORT, like 127.0.0.1:50051 or [::1]:0");
  const size_t colon = text.rfind(':');
  if (colon == text.npos || colon == 0) return bad;
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  HostPort result;
  // SimpleAtoi takes signs and spaces; a port has neither.
  if (port.empty() || port.find_first_not_of("0123456789") != port.npos ||
      !absl::SimpleAtoi(ToAbsl(port), &result.port) || result.port > 65535) {
    return bad;
  }
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return bad;
    host = host.substr(1, host.size() - 2);
    in6_addr v6;
    if (inet_pton(AF_INET6, std::string(host).c_str(), &v6) != 1) return bad;
  } else if (host.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                    "0123456789.-") != host.npos) {
    return bad;
  }
  result.host = std::string(host);
  result.loopback = IsLoopback(result.host);
  return result;
}

absl::StatusOr<int64_t> ParseBytes(std::string_view text) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  double scale = 1;
  for (const auto& [unit, factor] : kUnits) {
    if (text.ends_with(unit)) {
      scale = factor;
      text.remove_suffix(unit.size());
      break;
    }
  }
  double value = 0;
  // Digits only: no sign, exponent, "inf" or "nan".
  if (text.empty() || text.find_first_not_of("0123456789.") != text.npos ||
      !absl::SimpleAtod(ToAbsl(text), &value) || value * scale > 0x1p60 ||
      std::floor(value * scale) != value * scale) {
    return absl::InvalidArgumentError("not a number of bytes");
  }
  return static_cast<int64_t>(value * scale);
}

std::vector<std::string> UnknownEnvironment(const char* const* environ) {
  constexpr std::string_view kPrefix = "WINNOW_";
  std::vector<std::string> known = {"WINNOW_CONFIG"};
  for (const ServeOption& option : ServeOptions()) known.push_back(option.env());
  std::vector<std::string> unknown;
  for (; *environ != nullptr; ++environ) {
    const std::string_view entry = *environ;
    const std::string name(entry.substr(0, entry.find('=')));
    const std::string_view value = entry.substr(std::min(entry.size(), name.size() + 1));
    if (!name.starts_with(kPrefix) || std::count(known.begin(), known.end(), name) > 0) continue;
    const bool of_kubernetes = name.find("_SERVICE_HOST") != name.npos ||
                               name.find("_SERVICE_PORT") != name.npos ||
                               name.find("_TCP") != name.npos || value.starts_with("tcp://");
    if (of_kubernetes) continue;
    unknown.push_back(Concat("environment variable ", absl::CHexEscape(name),
                             " is no option of winnow serve", DidYouMean(name, known)));
  }
  return unknown;
}

absl::StatusOr<ResolvedConfig> ResolveConfig(const std::map<std::string, std::string>& flags,
                                             const Environment& environment,
                                             const std::string& config_file) {
  std::map<std::string, FileValue> file;
  if (!config_file.empty()) {
    WINNOW_ASSIGN_OR_RETURN(file, ReadConfigFile(config_file));
  }
  ResolvedConfig resolved;
  for (const ServeOption& option : ServeOptions()) {
    std::string& origin = resolved.origin[option.name];
    std::string value;
    const std::optional<std::string> from_environment = environment(option.env());
    if (const auto flag = flags.find(option.name); flag != flags.end()) {
      origin = Concat("flag --", option.name);
      value = flag->second;
    } else if (from_environment.has_value() && !from_environment->empty()) {
      origin = Concat("environment ", option.env());
      value = *from_environment;
    } else if (const auto in_file = file.find(option.name); in_file != file.end()) {
      origin = Concat(config_file, ":", in_file->second.line);
      value = in_file->second.text;
    } else {
      origin = "default";
      continue;
    }
    if (absl::Status set = option.set(resolved.config, value); !set.ok()) {
      return absl::InvalidArgumentError(
          Concat(origin, ": \"", absl::CHexEscape(value), "\": ", set.message()));
    }
  }
  return resolved;
}

namespace {

absl::Status CheckKvEvents(const ServeConfig& config) {
  const auto fail = [](auto&&... parts) { return absl::InvalidArgumentError(Concat(parts...)); };
  const bool zmq = config.kv_events_zmq != "off";
  if (config.kv_events == "off" && zmq) return fail("--kv-events-zmq needs --kv-events on");
  if (config.kv_events == "on" && config.prefix_cache == "off") {
    return fail("--kv-events tell what the prefix cache has, and --prefix-cache is off");
  }
  if (!zmq && config.kv_events_replay != "off") {
    return fail("--kv-events-replay needs --kv-events-zmq");
  }
  if (!zmq && !config.kv_events_topic.empty()) {
    return fail("--kv-events-topic needs --kv-events-zmq");
  }
  for (const auto& [name, value] : {std::pair("--kv-events-zmq ", &config.kv_events_zmq),
                                    std::pair("--kv-events-replay ", &config.kv_events_replay)}) {
    if (*value == "off") continue;
    WINNOW_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(*value));
    if (!address.loopback && !config.insecure) {
      return fail(name, *value,
                  " can be reached from the network, tells the tokens of prompts and is never "
                  "encrypted: set --insecure if that is meant");
    }
    for (const std::string* other : {&config.listen, &config.http, &config.metrics}) {
      if (address.port != 0 && *other == *value) return fail(name, *value, " is taken by another");
    }
  }
  if (zmq && config.kv_events_zmq == config.kv_events_replay &&
      ParseHostPort(config.kv_events_zmq)->port != 0) {
    return fail("--kv-events-zmq and --kv-events-replay are both ", config.kv_events_zmq);
  }
  return absl::OkStatus();
}

}  // namespace

bool MayHaveSeveralCallers(const ServeConfig& config) {
  const auto reached = [](const std::string& address) {
    if (address == "off") return false;
    const auto parsed = ParseHostPort(address);
    return !parsed.ok() || !parsed->loopback;
  };
  return !config.api_keys.empty() || !config.tenants.empty() || !config.tls_client_ca.empty() ||
         config.kv_events == "on" || reached(config.listen) || reached(config.http);
}

absl::Status CheckConfig(const ServeConfig& config) {
  const auto fail = [](auto&&... parts) { return absl::InvalidArgumentError(Concat(parts...)); };
  if (config.model.empty()) return fail("--model is required");
  if (config.tls_cert.empty() != config.tls_key.empty()) {
    return fail("--tls-cert and --tls-key come together; only --",
                config.tls_cert.empty() ? "tls-key" : "tls-cert", " is set");
  }
  const bool tls = !config.tls_cert.empty();
  if (!config.tls_client_ca.empty() && !tls) {
    return fail("--tls-client-ca needs --tls-cert and --tls-key");
  }
  WINNOW_ASSIGN_OR_RETURN(const HostPort listen, ParseHostPort(config.listen));
  if (!listen.loopback && !tls && !config.insecure) {
    return fail("--listen ", config.listen,
                " can be reached from the network and would not be encrypted: set --tls-cert and "
                "--tls-key, or --insecure if something in front of winnow protects it");
  }
  if (config.http != "off") {
    WINNOW_ASSIGN_OR_RETURN(const HostPort http, ParseHostPort(config.http));
    if (!http.loopback && !tls && !config.insecure) {
      return fail("--http ", config.http,
                  " can be reached from the network and would not be encrypted: set --tls-cert and "
                  "--tls-key, or --insecure if something in front of winnow protects it");
    }
    if (http.port != 0 && http.port == listen.port && http.host == listen.host) {
      return fail("--http and --listen are both ", config.listen);
    }
  }
  if (config.metrics != "off") {
    WINNOW_ASSIGN_OR_RETURN(const HostPort metrics, ParseHostPort(config.metrics));
    // Debian builds civetweb, which serves them, without it.
    if (metrics.host.find(':') != metrics.host.npos) {
      return fail("--metrics ", config.metrics, ": metrics are served over IPv4 only");
    }
    if (!metrics.loopback && !config.insecure) {
      return fail("--metrics ", config.metrics,
                  " can be reached from the network and is never encrypted: set --insecure if that "
                  "is meant");
    }
    if (metrics.port != 0 && metrics.port == listen.port && metrics.host == listen.host) {
      return fail("--metrics and --listen are both ", config.listen);
    }
    if (metrics.port != 0 && config.metrics == config.http) {
      return fail("--metrics and --http are both ", config.http);
    }
  }
  if (config.admin_listen != "off") {
    WINNOW_ASSIGN_OR_RETURN(const HostPort admin, ParseHostPort(config.admin_listen));
    if (!admin.loopback) {
      return fail("--admin-listen ", config.admin_listen,
                  ": who reaches it may end the server, so it must be a loopback address");
    }
    for (const std::string* other : {&config.listen, &config.http, &config.metrics}) {
      if (admin.port != 0 && *other == config.admin_listen) {
        return fail("--admin-listen ", config.admin_listen, " is taken by another");
      }
    }
  }
  WINNOW_RETURN_IF_ERROR(CheckKvEvents(config));
  const engine::Device device = engine::DeviceOf(config.device);
  if (config.cuda_graphs == "off" && !device.launches_kernels) {
    return fail("--cuda-graphs is for --device cuda");
  }
  const bool spills = config.spill == "on";
  if (spills && !device.own_memory) {
    return fail(
        "--spill is for --device cuda; with --device cpu KV always may be more than memory "
        "holds");
  }
  if (spills && (config.host_bytes == 0 || config.disk_bytes == 0)) {
    return fail(
        "--spill: KV goes from memory of the host to a disk: set --host-bytes and --disk-bytes");
  }
  if (device.own_memory && !spills && config.disk_bytes > 0 && config.prefix_cache == "off") {
    return fail(
        "--disk-bytes: with --device cuda and without --spill on a disk holds prefixes and nothing "
        "else, and --prefix-cache is off");
  }
  if (device.own_memory && !spills && config.prefetch == "on") {
    return fail("--prefetch: with --device cuda rows are read ahead with --spill on only");
  }
  if (device.own_memory && !spills && config.host_bytes > 0 && config.kv_bytes > 0) {
    return fail(
        "--kv-bytes: with --device cuda --host-bytes says how much KV there is, and the device "
        "holds the first layers of the same blocks: leave one of them out");
  }
  engine::TierFlags tiers;
  tiers.host_bytes = config.host_bytes;
  tiers.disk_bytes = config.disk_bytes;
  tiers.store_dir = config.store_dir;
  tiers.io = config.io;
  WINNOW_RETURN_IF_ERROR(engine::CheckTierFlags(tiers));
  // What would be left unused is refused, too.
  constexpr std::string_view kNoTier =
      ": there is no slower tier of KV: set --host-bytes or --disk-bytes";
  if (!tiers.any()) {
    if (config.row_cache_bytes > 0) return fail("--row-cache-bytes", kNoTier);
    if (config.prefetch == "on") return fail("--prefetch", kNoTier);
    if (config.resume != "auto") return fail("--resume", kNoTier);
  }
  if (config.disk_bytes == 0 && config.strict_store) {
    return fail("--strict-store: there is no directory: set --disk-bytes and --store-dir");
  }
  if (config.disk_bytes == 0 && config.io != "auto") {
    return fail("--io: there are no files to read: set --disk-bytes");
  }
  if (device.own_memory && config.disk_bytes == 0 && config.resume != "auto") {
    return fail("--resume: with --device cuda prefixes are stored on disk: set --disk-bytes");
  }
  if (device.own_memory && config.host_bytes == 0 && config.row_cache_bytes > 0) {
    return fail(
        "--row-cache-bytes: with --device cuda the row cache is of KV in the host's memory: set "
        "--host-bytes");
  }
  if (config.max_running > config.step_tokens) {
    return fail("--max-running ", config.max_running, " exceeds --step-tokens ", config.step_tokens,
                ": a step must hold one token of each running sequence");
  }
  if (config.prompt_step_tokens > 0 && config.prompt_step_tokens < config.step_tokens) {
    return fail("--prompt-step-tokens ", config.prompt_step_tokens, " is less than --step-tokens ",
                config.step_tokens);
  }
  if (config.max_context == 1) {
    return fail("--max-context 1 has no room for an answer: at least 2, or 0 for the model's own");
  }
  if ((config.block_tokens & (config.block_tokens - 1)) != 0) {
    return fail("--block-tokens ", config.block_tokens, " is not a power of two");
  }
  if (config.max_metadata_bytes < 1024) {
    return fail("--max-metadata-bytes ", config.max_metadata_bytes,
                " is less than the 1024 that gRPC itself needs");
  }
  return absl::OkStatus();
}

namespace {

// A double-quoted YAML scalar. Bytes past ASCII stay as they are: the file is UTF-8.
std::string QuoteYaml(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      Append(out, "\\", std::string_view(&c, 1));
    } else if (byte < 0x20 || byte == 0x7f) {
      Append(out, absl::StrFormat("\\x%02x", byte));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace

std::string PrintConfig(const ResolvedConfig& resolved) {
  std::string out;
  for (const ServeOption& option : ServeOptions()) {
    std::string value = option.get(resolved.config);
    // A dash alone begins a list.
    if (value.empty() || value == "-" || absl::EqualsIgnoreCase(value, "null") ||
        value.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "./_-") != value.npos) {
      value = QuoteYaml(value);
    }
    Append(out, absl::StrFormat("%-44s # %s\n", Concat(option.yaml(), ": ", value),
                                resolved.origin.at(option.name)));
  }
  return out;
}

}  // namespace winnow::server
