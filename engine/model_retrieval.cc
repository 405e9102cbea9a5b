#include "engine/model_retrieval.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/model_fingerprint.h"
#include "engine/retrieval/transform_fit_cache.h"
#include "engine/transform_fit_run.h"
#include "fmt/format.h"
#include "kernels/kv_layout.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

constexpr Kind kIndexKinds[] = {Kind::kQuest, Kind::kLsh,       Kind::kPca,
                                Kind::kHata,  Kind::kSpotlight, Kind::kHashAttention};
constexpr char kFourBitKeys[] = "int4";
constexpr char kResidualCodes[] = "residual";

std::string HexDigits(const Digest& digest) {
  std::string digits;
  for (const uint8_t byte : digest) digits += fmt::format("{:02x}", byte);
  return digits;
}

std::optional<int32_t> ParseNumber(std::string_view text) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < 0) {
    return std::nullopt;
  }
  return value;
}

absl::Status BadEntry(std::string_view entry, std::string_view why) {
  return absl::InvalidArgumentError(fmt::format(
      "index: '{}' {}; there are auto, none, or a list of quest, lsh, pca, hata, spotlight, "
      "hashattention (each but quest with bits, as lsh:128, or its own), residual (beside pca), "
      "int4",
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
  if (*kind == Kind::kPca) {
    if (!bits.has_value() || *bits < 64 || *bits > 256 || *bits % 64 != 0) {
      return BadEntry(entry, "has bits that are not 64, 128, 192 or 256");
    }
    spec.bits = *bits;
    return spec;
  }
  const bool wide = *kind == Kind::kLsh && bits.has_value() && (*bits == 512 || *bits == 1024);
  if (!wide &&
      (!bits.has_value() || !(*bits == 32 || *bits == 64 || *bits == 128 || *bits == 256))) {
    return BadEntry(entry, "has bits that are not 32, 64, 128 or 256 (512 and 1024 for lsh)");
  }
  spec.bits = *bits;
  return spec;
}

// The path, or "" for none. Several GGUF files may lie in one folder, so that each has its own artifact there.
absl::StatusOr<std::string> FindArtifact(const std::string& model_path, const std::string& flag) {
  if (flag == "none") return std::string();
  if (!flag.empty()) return flag;
  const std::string path =
      IsGgufPath(model_path)
          ? std::filesystem::path(model_path).replace_extension(kArtifactFile).string()
          : model_path + "/" + kArtifactFile;
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
    if (spec.kind == Kind::kPca) continue;  // joins them with its fit (UseTransform)
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

// Options of a model all of whose layers see a window, in which nothing is chosen.
absl::StatusOr<RetrievalOptions> WithoutRetrieval(const IndexList& list, int32_t from,
                                                  const RetrievalFlags& flags) {
  constexpr std::string_view kWhy =
      "every layer of this model reads a sliding window, and all of it";
  if (!list.automatic && (!list.specs.empty() || list.four_bit_keys || list.residual_codes)) {
    return absl::InvalidArgumentError(
        fmt::format("index: '{}': {}; say none", flags.index.substr(0, 64), kWhy));
  }
  for (const AttentionPolicy& policy : flags.policies) {
    if (policy.IsDense()) continue;
    return absl::InvalidArgumentError(fmt::format("policy '{}': {}", ToString(policy), kWhy));
  }
  RetrievalOptions options;
  options.from = std::max(from, 0);
  return options;
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
    if (entry == kResidualCodes) {
      if (list.residual_codes) return BadEntry(entry, "is there twice");
      list.residual_codes = true;
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
  const bool has_pca = std::any_of(list.specs.begin(), list.specs.end(),
                                   [](const IndexSpec& s) { return s.kind == Kind::kPca; });
  if (list.residual_codes && !has_pca) {
    return BadEntry(kResidualCodes, "refines the codes of pca, which is not in the list");
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

absl::StatusOr<RetrievalOptions> ResolveRetrieval(const std::string& model_path,
                                                  const ModelConfig& config, const Weights& weights,
                                                  const RetrievalFlags& flags) {
  WINNOW_ASSIGN_OR_RETURN(const IndexList list, ParseIndexList(flags.index));
  WINNOW_ASSIGN_OR_RETURN(const int32_t from, ParseRetrievalFrom(flags.from));
  if (config.NumFullLayers() == 0) return WithoutRetrieval(list, from, flags);
  WINNOW_ASSIGN_OR_RETURN(const std::string path, FindArtifact(model_path, flags.artifact));
  std::shared_ptr<const Artifact> artifact;
  if (!path.empty()) {
    WINNOW_ASSIGN_OR_RETURN(const std::string fingerprint, ModelFingerprint(config, weights));
    WINNOW_ASSIGN_OR_RETURN(artifact, Artifact::Load(path, config, fingerprint));
  }
  RetrievalOptions options;
  if (list.automatic && !flags.policies.empty()) {
    options = OptionsFor(flags.policies, artifact);
  } else {
    options.artifact = artifact;
    options.four_bit_keys = list.automatic || list.four_bit_keys;
    options.residual_codes = list.residual_codes || (list.automatic && flags.residual_codes);
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

absl::StatusOr<int32_t> WantedTransformBits(const ModelConfig& config, const RetrievalFlags& flags,
                                            const RetrievalOptions& options) {
  WINNOW_ASSIGN_OR_RETURN(const IndexList list, ParseIndexList(flags.index));
  if (config.NumFullLayers() == 0) return 0;
  const int32_t usual = DefaultTransformBits(config.head_dim);
  if (!list.automatic) {
    for (const IndexSpec& spec : list.specs) {
      if (spec.kind == Kind::kPca) return spec.bits == 0 ? usual : spec.bits;
    }
    return 0;
  }
  if (flags.policies.empty()) return options.artifact == nullptr ? usual : 0;
  int32_t wanted = 0;
  for (const AttentionPolicy& policy : flags.policies) {
    if (policy.kind != Kind::kPca) continue;
    const int32_t bits = policy.bits == 0 ? usual : policy.bits;
    if (wanted != 0 && wanted != bits) {
      return absl::InvalidArgumentError(fmt::format(
          "policies ask for transform codes of {} and of {} bits; there is one index pca", wanted,
          bits));
    }
    wanted = bits;
  }
  return wanted;
}

absl::StatusOr<TransformReport> ResolveTransform(const ModelConfig& config, const Weights& weights,
                                                 const Tokenizer& tokenizer,
                                                 const RetrievalFlags& flags,
                                                 kernels::Backend& backend,
                                                 DecoderOptions& options) {
  TransformReport report;
  WINNOW_ASSIGN_OR_RETURN(report.bits, WantedTransformBits(config, flags, options.retrieval));
  if (report.bits == 0) return report;
  // What was not asked for by name must not keep a server from starting.
  const bool by_name = flags.index != "auto" || !flags.policies.empty();
  const auto without = [&](absl::Status status) -> absl::StatusOr<TransformReport> {
    if (by_name) return status;
    options.retrieval.no_transform = std::string(status.message());
    report.bits = 0;
    report.problem = options.retrieval.no_transform;
    return report;
  };
  WINNOW_ASSIGN_OR_RETURN(const std::string fingerprint, ModelFingerprint(config, weights));
  const std::string_view text = flags.fit_text.empty() ? TransformFitText() : flags.fit_text;
  const std::string key =
      fmt::format("transform fit {} of {}, compute {}, kv {}, text {}, bits {}",
                  kTransformFitVersion, fingerprint, kernels::DTypeName(options.compute),
                  kernels::DTypeName(options.kv_dtype), HexDigits(Sha256(text)), report.bits);
  const std::string crossover = flags.crossover_cache == "auto" ? DefaultCrossoverPath(Environment)
                                : flags.crossover_cache == "none" ? ""
                                                                  : flags.crossover_cache;
  const std::string path = TransformFitPath(crossover, key);
  if (!path.empty()) {
    absl::StatusOr<std::optional<TransformFit>> found = ReadTransformFit(path, key, config);
    if (!found.ok()) {
      report.problem = std::string(found.status().message());
    } else if (found->has_value()) {
      options.retrieval.transform = std::make_shared<const TransformFit>(**std::move(found));
      report.cached = true;
    }
  }
  if (options.retrieval.transform == nullptr) {
    const SteadyClock clock;
    const TimePoint start = clock.Now();
    WINNOW_ASSIGN_OR_RETURN(
        std::vector<int32_t> tokens,
        tokenizer.Encode(text, /*add_special_tokens=*/false, /*parse_special=*/false));
    if (tokens.size() > static_cast<size_t>(kFitTokens)) tokens.resize(kFitTokens);
    absl::StatusOr<TransformFit> made =
        MakeTransformFit(config, weights, tokens, backend, options, report.bits, clock,
                         flags.fit_budget, flags.progress);
    if (!made.ok()) return without(made.status());
    options.retrieval.transform = std::make_shared<const TransformFit>(*std::move(made));
    report.seconds = std::chrono::duration<double>(clock.Now() - start).count();
    if (!path.empty()) {
      const absl::Status status = WriteTransformFit(path, key, *options.retrieval.transform);
      if (!status.ok()) report.problem = std::string(status.message());
    }
  }
  const TransformFit& fit = *options.retrieval.transform;
  report.sample_tokens = fit.sample_tokens;
  for (const kernels::TransformCodeWeights& layer : fit.layers) {
    for (const kernels::TransformCodeHead& head : layer.heads) {
      ++report.heads;
      report.heads_with_tail += head.tail ? 1 : 0;
    }
  }
  options.retrieval.indexes.push_back({Kind::kPca, report.bits});
  return report;
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

}  // namespace winnow::engine
