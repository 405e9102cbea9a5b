#include "engine/model_retrieval.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "engine/concat.h"
#include "engine/json_file.h"
#include "engine/model/model_fingerprint.h"
#include "engine/status_macros.h"
#include "fmt/format.h"
#include "kernels/kv_layout.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

constexpr Kind kIndexKinds[] = {Kind::kQuest, Kind::kLsh, Kind::kHata, Kind::kSpotlight,
                                Kind::kHashAttention};
constexpr char kFourBitKeys[] = "int4";

std::optional<int32_t> ParseNumber(std::string_view text) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < 0) {
    return std::nullopt;
  }
  return value;
}

absl::Status BadEntry(std::string_view entry, std::string_view why) {
  return absl::InvalidArgumentError(
      fmt::format("index: '{}' {}; there are auto, none, or a list of quest, lsh, hata, spotlight, "
                  "hashattention (each but quest with bits, as lsh:128, or its own), int4",
                  entry.substr(0, 64), why));
}

absl::StatusOr<IndexSpec> ParseIndex(std::string_view entry) {
  const size_t colon = entry.find(':');
  const std::string_view name = entry.substr(0, colon);
  const auto kind = std::find_if(std::begin(kIndexKinds), std::end(kIndexKinds),
                                 [&](Kind k) { return KindName(k) == name; });
  if (kind == std::end(kIndexKinds)) return BadEntry(entry, "is not an index");
  IndexSpec spec{*kind, 0};
  if (colon == entry.npos) return spec;
  if (*kind == Kind::kQuest) return BadEntry(entry, "has bits, and quest has no codes");
  const std::optional<int32_t> bits = ParseNumber(entry.substr(colon + 1));
  const bool wide = *kind == Kind::kLsh && bits.has_value() && (*bits == 512 || *bits == 1024);
  if (!wide &&
      (!bits.has_value() || !(*bits == 32 || *bits == 64 || *bits == 128 || *bits == 256))) {
    return BadEntry(entry, "has bits that are not 32, 64, 128 or 256 (512 and 1024 for lsh)");
  }
  spec.bits = *bits;
  return spec;
}

// The path, or "" for none.
absl::StatusOr<std::string> FindArtifact(const std::string& model_dir, const std::string& flag) {
  if (flag == "none") return std::string();
  if (!flag.empty()) return flag;
  const std::string path = model_dir + "/" + kArtifactFile;
  WINNOW_RETURN_IF_ERROR(CheckLink(path));
  std::error_code error;
  const bool there = std::filesystem::exists(path, error);
  if (error) return absl::InvalidArgumentError(Concat(path, ": ", error.message()));
  return there ? path : std::string();
}

absl::StatusOr<std::vector<IndexSpec>> ResolveIndexes(const IndexList& list,
                                                      const Artifact* artifact) {
  std::vector<IndexSpec> specs;
  for (IndexSpec spec : list.specs) {
    if (spec.kind == Kind::kLsh && spec.bits == 0) spec.bits = AttentionPolicy::kLshBits;
    if (spec.kind != Kind::kLsh && spec.kind != Kind::kQuest) {
      const std::string name(KindName(spec.kind));
      if (artifact == nullptr) {
        return absl::InvalidArgumentError(
            Concat("index: ", name, " is learned, and there is no artifact"));
      }
      if (!artifact->HasKind(spec.kind)) {
        return absl::InvalidArgumentError(Concat("index: the artifact has no ", name));
      }
      const int32_t bits = artifact->bits(spec.kind);
      if (spec.bits != 0 && spec.bits != bits) {
        return absl::InvalidArgumentError(
            Concat("index: the artifact's ", name, " has ", bits, " bits, not ", spec.bits));
      }
      spec.bits = bits;
    }
    specs.push_back(spec);
  }
  return specs;
}

std::optional<std::string> Environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

absl::StatusOr<IndexList> ParseIndexList(std::string_view text) {
  IndexList list;
  if (text == "auto") {
    list.automatic = true;
    return list;
  }
  if (text == "none") return list;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view entry = text.substr(begin, end - begin);
    begin = end + 1;
    if (entry == kFourBitKeys) {
      if (list.four_bit_keys) return BadEntry(entry, "is there twice");
      list.four_bit_keys = true;
      continue;
    }
    WINNOW_ASSIGN_OR_RETURN(const IndexSpec spec, ParseIndex(entry));
    // lsh may be there with several numbers of bits: it costs nothing but memory to compare them.
    const bool twice = std::any_of(list.specs.begin(), list.specs.end(), [&](const IndexSpec& s) {
      return s.kind == spec.kind && (s.kind != Kind::kLsh || s.bits == spec.bits);
    });
    if (twice) return BadEntry(entry, "is there twice");
    list.specs.push_back(spec);
  }
  return list;
}

absl::StatusOr<int32_t> ParseRetrievalFrom(std::string_view text) {
  if (text == "auto") return -1;
  const std::optional<int32_t> tokens = ParseNumber(text);
  if (tokens.has_value() && *tokens <= AttentionPolicy::kCountMax) return *tokens;
  return absl::InvalidArgumentError(
      fmt::format("retrieval_from: '{}' is neither auto nor a number of tokens up to {}",
                  text.substr(0, 64), AttentionPolicy::kCountMax));
}

absl::Status CheckRetrievalFlags(const RetrievalFlags& flags) {
  WINNOW_RETURN_IF_ERROR(ParseIndexList(flags.index).status());
  WINNOW_RETURN_IF_ERROR(ParseRetrievalFrom(flags.from).status());
  if (flags.probe_interval < 0) {
    return absl::InvalidArgumentError(
        fmt::format("probe_interval: {} is negative", flags.probe_interval));
  }
  return absl::OkStatus();
}

absl::StatusOr<RetrievalOptions> ResolveRetrieval(const std::string& model_dir,
                                                  const ModelConfig& config, const Weights& weights,
                                                  const RetrievalFlags& flags) {
  WINNOW_ASSIGN_OR_RETURN(const IndexList list, ParseIndexList(flags.index));
  WINNOW_ASSIGN_OR_RETURN(const int32_t from, ParseRetrievalFrom(flags.from));
  WINNOW_ASSIGN_OR_RETURN(const std::string path, FindArtifact(model_dir, flags.artifact));
  std::shared_ptr<const Artifact> artifact;
  if (!path.empty()) {
    WINNOW_ASSIGN_OR_RETURN(const std::string fingerprint, ModelFingerprint(config, weights.files));
    WINNOW_ASSIGN_OR_RETURN(artifact, Artifact::Load(path, config, fingerprint));
  }
  RetrievalOptions options;
  if (list.automatic && !flags.policies.empty()) {
    options = OptionsFor(flags.policies, artifact);
  } else {
    options.artifact = artifact;
    options.four_bit_keys = list.automatic || list.four_bit_keys;
    if (list.automatic) {
      options.indexes = AllIndexes(artifact.get());
    } else {
      WINNOW_ASSIGN_OR_RETURN(options.indexes, ResolveIndexes(list, artifact.get()));
    }
  }
  options.from = std::max(from, 0);
  options.probe_interval = flags.probe_interval;
  options.summaries = flags.summaries;
  return options;
}

absl::StatusOr<CrossoverReport> ResolveFrom(const ModelConfig& config, const RetrievalFlags& flags,
                                            kernels::Backend& backend, DecoderOptions& options) {
  WINNOW_ASSIGN_OR_RETURN(const int32_t from, ParseRetrievalFrom(flags.from));
  CrossoverReport report;
  report.crossover.from = options.retrieval.from;
  const std::optional<IndexSpec> index = CheapestIndex(options.retrieval.indexes);
  // Without an index there are window, which reads next to nothing, and the oracle, which is a
  // yardstick: nothing to measure.
  if (from >= 0 || !index.has_value()) return report;
  const std::string path = flags.crossover_cache == "auto"   ? DefaultCrossoverPath(Environment)
                           : flags.crossover_cache == "none" ? ""
                                                             : flags.crossover_cache;
  const SteadyClock clock;
  WINNOW_ASSIGN_OR_RETURN(
      report, ResolveCrossover(
                  path, CrossoverKey(ProcessorName(), backend.name(), config, options, *index),
                  options.max_context, clock,
                  [&] { return MakeAttentionTimer(config, options, *index, backend, clock); }));
  report.index = ToString(*index);
  options.retrieval.from = report.crossover.from;
  return report;
}

std::vector<IndexPool> IndexPools(const ModelConfig& config, const DecoderOptions& options) {
  const kernels::KvLayout layout{config.num_kv_heads, config.head_dim, options.block_tokens,
                                 options.kv_dtype};
  const int64_t blocks = NumKvBlocks(config, options);
  std::vector<IndexPool> pools;
  const auto add = [&](IndexPool pool) {
    RetrievalOptions alone;
    alone.artifact = options.retrieval.artifact;
    alone.four_bit_keys = pool.four_bit_keys;
    if (!pool.four_bit_keys) alone.indexes = {pool.spec};
    pool.bytes = blocks * IndexBlockBytes(config, layout, alone);
    pools.push_back(pool);
  };
  for (const IndexSpec& spec : options.retrieval.indexes) add({.spec = spec});
  if (options.retrieval.four_bit_keys) add({.four_bit_keys = true});
  return pools;
}

int64_t IndexBytes(const ModelConfig& config, const DecoderOptions& options) {
  int64_t bytes = 0;
  for (const IndexPool& pool : IndexPools(config, options)) bytes += pool.bytes;
  return bytes;
}

}  // namespace winnow::engine
