// Any bytes as what the operator's files say: --config, --tenants, --api-keys, named prefixes; and as flags and variables of the
// environment. The first byte chooses. A configuration that is taken and printed is taken again, and is the same.
//
// Protos: winnow/v1/inference.proto google/rpc/status.proto google/rpc/error_details.proto
// Sources: server/config.cc server/config_options.cc server/tenant_limits.cc server/api_keys.cc server/prefix_file.cc server/suggest.cc
// Sources: server/log.cc server/line_queue.cc server/utf8.cc server/status.cc server/validate.cc server/wire.cc engine/model_retrieval.cc
// Sources: engine/retrieval/attention_policy.cc engine/retrieval/exactness.cc engine/kv/kv_store.cc engine/kv/block_name.cc
// Sources: engine/base/did_you_mean.cc engine/base/plain_number.cc engine/base/json_file.cc engine/text/unicode/unicode_text.cc engine/model/weight_storage.cc kernels/check.cc
#include <spdlog/sinks/null_sink.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/clock.h"
#include "engine/kv/block_name.h"
#include "kernels/check.h"
#include "server/api_keys.h"
#include "server/config.h"
#include "server/log.h"
#include "server/prefix_file.h"
#include "server/tenant_limits.h"

using namespace winnow::server;  // NOLINT(google-build-using-namespace): a main file
namespace engine = winnow::engine;

namespace {

// A file without a name, that readers open by its descriptor.
class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("settings", MFD_CLOEXEC)) { WINNOW_CHECK(fd_ >= 0); }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string Of(std::string_view text) const {
    WINNOW_CHECK(ftruncate(fd_, 0) == 0);
    WINNOW_CHECK(pwrite(fd_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
    return "/proc/self/fd/" + std::to_string(fd_);
  }

 private:
  const int fd_;
};

void CheckMessage(const absl::Status& status) {
  WINNOW_CHECK(absl::IsInvalidArgument(status) && !status.message().empty());
}

std::optional<std::string> NoEnvironment(const std::string&) { return std::nullopt; }

void CheckResolved(const ResolvedConfig& resolved, const MemoryFile& file) {
  if (const absl::Status status = CheckConfig(resolved.config); !status.ok()) CheckMessage(status);
  const auto again = ResolveConfig({}, NoEnvironment, file.Of(PrintConfig(resolved)));
  WINNOW_CHECK(again.ok());
  for (const ServeOption& option : ServeOptions())
    WINNOW_CHECK(option.get(again->config) == option.get(resolved.config));
}

void ConfigFile(std::string_view text, const MemoryFile& file) {
  const auto resolved = ResolveConfig({}, NoEnvironment, file.Of(text));
  resolved.ok() ? CheckResolved(*resolved, file) : CheckMessage(resolved.status());
}

// Lines whose first byte is an option's number, and the rest its value; every other goes by the environment.
void FlagsAndEnvironment(std::string_view text, const MemoryFile& file) {
  std::map<std::string, std::string> flags, environment;
  std::vector<std::string> entries;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    if (line.empty()) continue;
    const auto number = static_cast<unsigned char>(line[0]);
    const ServeOption& option = ServeOptions()[number % ServeOptions().size()];
    const std::string value(line.substr(1));
    if (number < 128) {
      flags[option.name] = value;
    } else {
      environment[option.env()] = value;
    }
    entries.push_back("WINNOW_" + value);
  }
  const auto resolved = ResolveConfig(
      flags,
      [&](const std::string& name) -> std::optional<std::string> {
        const auto found = environment.find(name);
        return found == environment.end() ? std::nullopt : std::optional(found->second);
      },
      "");
  if (!resolved.ok()) {
    CheckMessage(resolved.status());
  } else {
    if (const absl::Status status = CheckConfig(resolved->config); !status.ok())
      CheckMessage(status);
    WINNOW_CHECK(PrintConfig(*resolved).size() > ServeOptions().size());
  }
  std::vector<const char*> environ;
  for (const std::string& entry : entries) environ.push_back(entry.c_str());
  environ.push_back(nullptr);
  WINNOW_CHECK(UnknownEnvironment(environ.data()).size() <= entries.size());
}

void Tenants(std::string_view text, const MemoryFile& file, Log& log, const engine::Clock& clock) {
  const auto table = TenantTable::Load(file.Of(text), log, clock);
  if (!table.ok()) return CheckMessage(table.status());
  for (const char* name : {"a", "t0", "nobody"}) {
    const TenantLimits limits = (*table)->Of(name);
    WINNOW_CHECK(limits.weight >= 0.01 && limits.weight <= 1000);
    for (const int64_t quota :
         {limits.requests, limits.waiting_tokens, limits.running_tokens, limits.store_bytes})
      WINNOW_CHECK(quota >= 0);
  }
}

void Keys(std::string_view text, const MemoryFile& file, Log& log, const engine::Clock& clock) {
  const auto keys = ApiKeys::Load(file.Of(text), log, clock);
  if (!keys.ok()) return CheckMessage(keys.status());
  // The hash of no text, which a file may well have; no other text of this length is known to.
  const auto name = (*keys)->NameOf("");
  WINNOW_CHECK(!name.has_value() || (!name->empty() && text.find(*name) != text.npos));
}

// With the checksum that belongs to the text: otherwise no input would get past it.
void Prefixes(std::string_view text, const MemoryFile& file) {
  const engine::Digest model{};
  std::string whole = R"({"version":1,"model":")" + std::string(2 * model.size(), '0') + "\"}\n" +
                      std::string(text) + "\n";
  const engine::Digest sum = engine::Sha256(whole);
  whole += "sha256 ";
  for (const uint8_t byte : sum) {
    whole += "0123456789abcdef"[byte >> 4];
    whole += "0123456789abcdef"[byte & 15];
  }
  whole += "\n";
  const PrefixFile prefixes(file.Of(whole), model, [] { return absl::FromUnixSeconds(1000); });
  std::string problem;
  const std::vector<engine::SavedPrefix> found = prefixes.Load(&problem);
  WINNOW_CHECK(problem.empty() || found.empty());
  WINNOW_CHECK(!problem.ends_with("its checksum is not that of its text"));
  for (const engine::SavedPrefix& prefix : found) {
    WINNOW_CHECK(prefix.tokens >= 1 && !prefix.blocks->empty());
    if (prefix.left.has_value()) {
      const double left = std::chrono::duration<double>(*prefix.left).count();
      WINNOW_CHECK(left >= 0 && left <= 1e9);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto& file = *new MemoryFile;
  static auto& log = *new Log("error", "json", std::make_shared<spdlog::sinks::null_sink_mt>());
  static const auto& clock = *new engine::SteadyClock;
  if (size < 1) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 5) {
    case 0:
      ConfigFile(text, file);
      break;
    case 1:
      FlagsAndEnvironment(text, file);
      break;
    case 2:
      Tenants(text, file, log, clock);
      break;
    case 3:
      Keys(text, file, log, clock);
      break;
    default:
      Prefixes(text, file);
  }
  return 0;
}
