// The file that remembers crossovers: the part of crossover.h that touches the disk.
#include <utility>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/replace_file.h"
#include "engine/base/status_macros.h"
#include "engine/crossover.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {
namespace {

using Json = nlohmann::json;

constexpr size_t kFileBytesMax = 1 << 20;
constexpr int kFormat = 1;

bool IsTokens(const Json& json) {
  return json.is_number_integer() && json >= 0 && json <= kNeverRetrieve;
}

// Nothing if it is not an entry.
std::optional<Crossover> ParseEntry(const Json& json) {
  if (!json.is_object() || !json.contains("from") || !json.contains("samples")) return std::nullopt;
  const Json& from = json.at("from");
  const Json& samples = json.at("samples");
  if (!(from.is_null() || IsTokens(from)) || !samples.is_array()) return std::nullopt;
  Crossover crossover;
  if (!from.is_null()) crossover.from = from.get<int32_t>();
  for (const Json& sample : samples) {
    if (!sample.is_array() || sample.size() != 3 || !IsTokens(sample[0]) ||
        !sample[1].is_number() || !sample[2].is_number()) {
      return std::nullopt;
    }
    crossover.samples.push_back(
        {sample[0].get<int32_t>(), sample[1].get<double>(), sample[2].get<double>()});
  }
  return crossover;
}

Json ToJson(const Crossover& crossover) {
  Json samples = Json::array();
  for (const CrossoverSample& sample : crossover.samples) {
    samples.push_back({sample.tokens, sample.dense_seconds, sample.retrieval_seconds});
  }
  Json from;
  if (crossover.from != kNeverRetrieve) from = crossover.from;
  return {{"from", from}, {"samples", samples}};
}

// The entries of the file; an empty object if there is no file.
absl::StatusOr<Json> ReadEntries(const std::string& path) {
  absl::StatusOr<Json> file = ReadJsonObject(path, kFileBytesMax);
  if (absl::IsNotFound(file.status())) return Json::object();
  WINNOW_RETURN_IF_ERROR(file.status());
  if (!file->contains("format") || file->at("format") != kFormat || !file->contains("entries") ||
      !file->at("entries").is_object()) {
    return absl::InvalidArgumentError(Concat(path, ": is not a file of crossovers"));
  }
  return std::move(file->at("entries"));
}

}  // namespace

std::string DefaultCrossoverPath(
    const std::function<std::optional<std::string>(const std::string&)>& environment) {
  // A relative path counts as not set, as the XDG specification says.
  const std::string cache = environment("XDG_CACHE_HOME").value_or("");
  if (!cache.empty() && cache[0] == '/') return cache + "/winnow/crossover.json";
  const std::string home = environment("HOME").value_or("");
  return !home.empty() && home[0] == '/' ? home + "/.cache/winnow/crossover.json" : "";
}

absl::StatusOr<std::optional<Crossover>> ReadCrossover(const std::string& path,
                                                       const std::string& key) {
  WINNOW_ASSIGN_OR_RETURN(const Json entries, ReadEntries(path));
  const auto found = entries.find(key);
  if (found == entries.end()) return std::nullopt;
  std::optional<Crossover> crossover = ParseEntry(*found);
  if (!crossover.has_value()) {
    return absl::InvalidArgumentError(Concat(path, ": an entry is not a crossover"));
  }
  return crossover;
}

absl::Status WriteCrossover(const std::string& path, const std::string& key,
                            const Crossover& crossover) {
  absl::StatusOr<Json> entries = ReadEntries(path);
  Json all = entries.ok() ? *std::move(entries) : Json::object();
  all[key] = ToJson(crossover);
  const std::string text = Json({{"format", kFormat}, {"entries", std::move(all)}}).dump(1) + "\n";
  return ReplaceFile(path, text, Sync::kNo);
}

}  // namespace winnow::engine
