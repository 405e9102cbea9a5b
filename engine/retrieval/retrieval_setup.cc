// What RetrievalAttention makes once: functions, pools, scratch. The part of retrieval_attention.h
// that no token passes through.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/retrieval/lsh.h"
#include "engine/retrieval/retrieval_attention.h"
#include "fmt/format.h"
#include "kernels/attention_state.h"
#include "kernels/check.h"
#include "kernels/transform_code.h"

namespace winnow::engine {

using kernels::Buffer;

namespace {

using Kind = AttentionPolicy::Kind;

// Tokens and rows of a call for many queries with small budgets.
constexpr int64_t kMinEntries = int64_t{1} << 18;

// Of the policy's codes; 0 if it has none, or the artifact does not.
int32_t CodeBits(const AttentionPolicy& policy, const Artifact* artifact,
                 const TransformFit* transform) {
  if (policy.index_kind() != IndexKind::kCodes) return 0;
  if (policy.bits != 0) return policy.bits;
  if (policy.kind == Kind::kLsh) return AttentionPolicy::kLshBits;
  if (policy.kind == Kind::kPca) return transform != nullptr ? transform->bits : 0;
  return artifact != nullptr && artifact->HasKind(policy.kind) ? artifact->bits(policy.kind) : 0;
}

// Tables of cells of one sequence, of every layer.
int64_t CellTableBytes(const ModelConfig& config, const RetrievalOptions& options) {
  const bool has = std::any_of(options.indexes.begin(), options.indexes.end(),
                               [](const IndexSpec& spec) { return spec.kind == Kind::kPca; });
  return has ? config.num_layers * kernels::CellTableFloats(config.num_kv_heads, config.head_dim) *
                   static_cast<int64_t>(sizeof(float))
             : 0;
}

}  // namespace

std::string ToString(const IndexSpec& spec) {
  const std::string name(KindName(spec.kind));
  return spec.bits == 0 ? name : fmt::format("{}:{}", name, spec.bits);
}

std::vector<IndexSpec> AllIndexes(const Artifact* artifact) {
  std::vector<IndexSpec> specs = {{Kind::kQuest, 0}, {Kind::kLsh, AttentionPolicy::kLshBits}};
  if (artifact == nullptr) return specs;
  for (const Kind kind : {Kind::kHata, Kind::kSpotlight, Kind::kHashAttention}) {
    if (artifact->HasKind(kind)) specs.push_back({kind, artifact->bits(kind)});
  }
  return specs;
}

RetrievalOptions OptionsFor(std::span<const AttentionPolicy> policies,
                            std::shared_ptr<const Artifact> artifact) {
  RetrievalOptions options;
  options.artifact = std::move(artifact);
  for (const AttentionPolicy& policy : policies) {
    options.four_bit_keys |= policy.p.has_value();
    if (policy.index_kind() == IndexKind::kNone) continue;
    if (policy.kind == Kind::kPca) continue;  // needs a fit: model_retrieval.h
    const IndexSpec spec{policy.kind, CodeBits(policy, options.artifact.get(), nullptr)};
    // Codes that the artifact does not have, or not so: CheckPolicy says so.
    const bool learned = policy.IsLearned();
    if (learned && (options.artifact == nullptr || !options.artifact->HasKind(policy.kind) ||
                    options.artifact->bits(policy.kind) != spec.bits)) {
      continue;
    }
    if (std::find(options.indexes.begin(), options.indexes.end(), spec) == options.indexes.end()) {
      options.indexes.push_back(spec);
    }
  }
  return options;
}

int64_t SummaryBytes(const ModelConfig& config, const RetrievalOptions& options) {
  const int64_t tables = CellTableBytes(config, options);
  if (options.artifact == nullptr) return tables;
  int64_t floats = 0;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (!options.artifact->HasFeatures(layer)) continue;
    const int32_t features = options.artifact->FeatureMap(layer, Artifact::Side::kKey).out.out;
    floats += config.num_kv_heads * kernels::SummaryFloats(features, config.head_dim);
  }
  return std::max(tables, floats * static_cast<int64_t>(sizeof(float)));
}

int64_t IndexBlockBytes(const ModelConfig& config, const kernels::KvLayout& layout,
                        const RetrievalOptions& options) {
  int64_t bytes = 0;
  for (const IndexSpec& spec : options.indexes) {
    if (spec.kind == Kind::kQuest) {
      bytes += static_cast<int64_t>(kernels::BoundBlockBytes(layout)) * config.num_layers;
      continue;
    }
    const kernels::CodeLayout codes{layout.kv_heads, layout.block_tokens, spec.bits};
    const int64_t layers =
        spec.kind == Kind::kLsh || spec.kind == Kind::kPca || options.artifact == nullptr
            ? config.num_layers
            : static_cast<int64_t>(options.artifact->layers(spec.kind).size());
    bytes += static_cast<int64_t>(codes.BlockBytes()) * layers;
  }
  if (options.four_bit_keys) {
    bytes += static_cast<int64_t>(kernels::Int4BlockBytes(layout)) * config.num_layers;
  }
  return bytes;
}

RetrievalAttention::RetrievalAttention(const ModelConfig& config, KvMemory& memory,
                                       int32_t max_context, kernels::Backend& backend,
                                       const RetrievalOptions& options)
    : config_(config),
      memory_(memory),
      layout_(memory.layout()),
      max_context_(max_context),
      group_(config.num_heads / config.num_kv_heads),
      scale_(1.0f / std::sqrt(static_cast<float>(config.head_dim))),
      backend_(backend),
      options_(options) {}

RetrievalAttention::~RetrievalAttention() = default;

absl::StatusOr<std::unique_ptr<RetrievalAttention>> RetrievalAttention::Create(
    const ModelConfig& config, KvMemory& memory, int32_t max_context, kernels::Backend& backend,
    const RetrievalOptions& options, const RowFetcherOptions& rows) {
  std::unique_ptr<RetrievalAttention> retrieval(
      new RetrievalAttention(config, memory, max_context, backend, options));
  WINNOW_RETURN_IF_ERROR(retrieval->Allocate(rows));
  return retrieval;
}

absl::StatusOr<Buffer> RetrievalAttention::Pool(size_t size_bytes, const std::string& what,
                                                bool shared) {
  Buffer buffer = shared ? backend_.AllocateShared(size_bytes) : backend_.Allocate(size_bytes);
  if (buffer.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for {}: {} bytes", what, size_bytes));
  }
  return buffer;
}

absl::Status RetrievalAttention::Allocate(const RowFetcherOptions& rows) {
  const int32_t num_blocks = memory_.num_blocks();
  const size_t blocks = static_cast<size_t>(num_blocks);
  WINNOW_ASSIGN_OR_RETURN(fetcher_,
                          RowFetcher::Create(backend_, memory_, config_.num_layers, rows));
  const auto pools = [&](size_t block_bytes, const char* what,
                         std::vector<Buffer>* out) -> absl::Status {
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      WINNOW_ASSIGN_OR_RETURN(Buffer pool, Pool(block_bytes * blocks, what));
      index_bytes_ += pool.size_bytes();
      out->push_back(std::move(pool));
    }
    return absl::OkStatus();
  };
  for (const IndexSpec& spec : options_.indexes) {
    if (spec.kind == Kind::kQuest) {
      WINNOW_RETURN_IF_ERROR(
          pools(kernels::BoundBlockBytes(layout_), "the index of quest", &bounds_));
    } else {
      WINNOW_RETURN_IF_ERROR(MakeCodeIndex(spec, num_blocks));
    }
  }
  if (options_.four_bit_keys) {
    WINNOW_RETURN_IF_ERROR(pools(kernels::Int4BlockBytes(layout_), "four-bit keys", &int4_keys_));
  }
  if (options_.artifact != nullptr && options_.artifact->has_features()) {
    WINNOW_RETURN_IF_ERROR(MakeFeatureMaps());
  }
  if (const auto place_bytes = static_cast<size_t>(SummaryBytes(config_, options_));
      place_bytes > 0) {
    if (options_.summaries > 0) {
      WINNOW_ASSIGN_OR_RETURN(summary_pool_, Pool(place_bytes * options_.summaries, "summaries"));
    }
    for (int32_t i = 0; i < options_.summaries; ++i) {
      free_summaries_.push_back(static_cast<std::byte*>(summary_pool_.data()) + i * place_bytes);
    }
  }

  if (memory_.shared_kv() != nullptr) {
    WINNOW_ASSIGN_OR_RETURN(reads_, Pool(static_cast<size_t>(memory_.max_batch_tokens()) *
                                             sizeof(kernels::SharedKvReads),
                                         "counts of rows", /*shared=*/true));
  }
  // A query may choose all but one of the tokens it sees.
  const int64_t heads = layout_.kv_heads;
  max_entries_ = std::max(kMinEntries, heads * max_context_);
  size_t code_bytes = 0;
  for (const auto& index : code_indexes_) {
    code_bytes = std::max(code_bytes, index->layout.CodeBytes());
  }
  const auto scratch = [&](size_t size_bytes, const char* what, bool shared,
                           Buffer* out) -> absl::Status {
    WINNOW_ASSIGN_OR_RETURN(*out, Pool(std::max<size_t>(size_bytes, 64), what, shared));
    scratch_bytes_ += size_bytes;
    return absl::OkStatus();
  };
  const size_t num_states = size_t{kMaxQueries} * config_.num_heads;
  const size_t states =
      num_states * kernels::AttentionStateFloats(config_.head_dim) * sizeof(float);
  WINNOW_RETURN_IF_ERROR(scratch(size_t{kCountCalls} * kMaxQueries * heads * sizeof(int32_t),
                                 "counts of chosen tokens",
                                 /*shared=*/true, &counts_));
  WINNOW_RETURN_IF_ERROR(
      scratch(max_entries_ * sizeof(int32_t), "chosen tokens", /*shared=*/true, &tokens_));
  WINNOW_RETURN_IF_ERROR(scratch(max_entries_ * sizeof(const std::byte*), "addresses of rows",
                                 /*shared=*/true, &addresses_));
  const bool completes = options_.summaries > 0 && !feature_maps_.empty();
  WINNOW_RETURN_IF_ERROR(scratch(completes ? kCountCalls * 2 * num_states * sizeof(float) : 0,
                                 "masses of states",
                                 /*shared=*/true, &masses_));
  WINNOW_RETURN_IF_ERROR(
      scratch(num_states * code_bytes, "codes of queries", /*shared=*/false, &query_codes_));
  WINNOW_RETURN_IF_ERROR(scratch(states, "attention states", /*shared=*/false, &states_));
  if (options_.transform != nullptr) {
    WINNOW_RETURN_IF_ERROR(scratch(num_states * sizeof(float), "masses of anchors",
                                   /*shared=*/true, &anchor_masses_));
    WINNOW_RETURN_IF_ERROR(scratch(size_t{kMaxQueries} * heads * sizeof(int32_t), "no counts",
                                   /*shared=*/true, &no_counts_));
    WINNOW_RETURN_IF_ERROR(scratch(num_states * kernels::kTransformCells * sizeof(int64_t),
                                   "masses of cells", /*shared=*/false, &tail_masses_));
    WINNOW_RETURN_IF_ERROR(scratch(num_states * sizeof(float), "references of masses",
                                   /*shared=*/false, &tail_references_));
    WINNOW_RETURN_IF_ERROR(
        scratch(num_states * sizeof(float), "deltas", /*shared=*/false, &tail_deltas_));
  }
  pending_counts_.reserve(size_t{kCountCalls} * kMaxQueries);
  quality_.resize(heads);
  MakeKeepable();
  return absl::OkStatus();
}

absl::Status RetrievalAttention::MakeCodeIndex(const IndexSpec& spec, int32_t num_blocks) {
  auto index = std::make_unique<CodeIndex>();
  index->spec = spec;
  index->layout = {layout_.kv_heads, layout_.block_tokens, spec.bits};
  index->layers.resize(config_.num_layers);
  const auto pack = [&](const kernels::EncoderWeights& weights,
                        std::unique_ptr<kernels::PackedEncoder>* out) -> absl::Status {
    *out = backend_.PackEncoder(weights);
    if (*out == nullptr) {
      return absl::ResourceExhaustedError(
          fmt::format("no memory for the hash functions of {}, or {} lacks their shape",
                      ToString(spec), backend_.name()));
    }
    return absl::OkStatus();
  };
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    CodeIndex::Layer& to = index->layers[layer];
    if (spec.kind == Kind::kPca) {
      WINNOW_CHECK(options_.transform != nullptr && options_.transform->bits == spec.bits);
      if (!backend_.HasTransformCodes()) {
        return absl::UnimplementedError(
            fmt::format("index: {} has no transform codes ({})", backend_.name(), ToString(spec)));
      }
      to.transform = backend_.PackTransformCode(options_.transform->layers[layer]);
      if (to.transform == nullptr) {
        return absl::ResourceExhaustedError(
            fmt::format("no memory for the transforms of {}", ToString(spec)));
      }
    } else if (spec.kind == Kind::kLsh) {
      const LshEncoder lsh(layer, config_.num_kv_heads, config_.head_dim, spec.bits);
      WINNOW_RETURN_IF_ERROR(pack(lsh.weights(), &to.key));
      WINNOW_RETURN_IF_ERROR(pack(lsh.weights(), &to.query));
    } else {
      if (!options_.artifact->HasLayer(spec.kind, layer)) continue;
      WINNOW_RETURN_IF_ERROR(
          pack(options_.artifact->Encoder(spec.kind, layer, Artifact::Side::kKey), &to.key));
      WINNOW_RETURN_IF_ERROR(
          pack(options_.artifact->Encoder(spec.kind, layer, Artifact::Side::kQuery), &to.query));
    }
    WINNOW_ASSIGN_OR_RETURN(to.pool, Pool(index->layout.BlockBytes() * num_blocks,
                                          fmt::format("the codes of {}", ToString(spec))));
    index_bytes_ += to.pool.size_bytes();
  }
  code_indexes_.push_back(std::move(index));
  return absl::OkStatus();
}

absl::Status RetrievalAttention::MakeFeatureMaps() {
  const Artifact& artifact = *options_.artifact;
  feature_maps_.resize(config_.num_layers);
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    if (!artifact.HasFeatures(layer)) continue;
    FeatureMaps& maps = feature_maps_[layer];
    maps.key = backend_.PackFeatureMap(artifact.FeatureMap(layer, Artifact::Side::kKey));
    maps.query = backend_.PackFeatureMap(artifact.FeatureMap(layer, Artifact::Side::kQuery));
    if (maps.key == nullptr || maps.query == nullptr) {
      return absl::ResourceExhaustedError(
          fmt::format("no memory for the feature maps of completion, or {} lacks their shape",
                      backend_.name()));
    }
  }
  return absl::OkStatus();
}

const RetrievalAttention::CodeIndex* RetrievalAttention::FindCodes(
    const AttentionPolicy& policy) const {
  if (policy.index_kind() != IndexKind::kCodes) return nullptr;
  const int32_t bits = CodeBits(policy, options_.artifact.get(), options_.transform.get());
  for (const auto& index : code_indexes_) {
    if (index->spec == IndexSpec{policy.kind, bits}) return index.get();
  }
  return nullptr;
}

double RetrievalAttention::IndexRowBytes(const AttentionPolicy& policy) const {
  const double key_bytes = static_cast<double>(layout_.RowBytes()) / 2;
  switch (policy.index_kind()) {
    case IndexKind::kNone:
      return policy.kind == Kind::kOracle ? key_bytes : 0;
    case IndexKind::kBounds:
      return static_cast<double>(kernels::BoundPageBytes(layout_)) / kernels::kBoundPageTokens;
    case IndexKind::kCodes:
      return static_cast<double>(FindCodes(policy)->layout.CodeBytes());
  }
  return 0;
}

absl::Status RetrievalAttention::CheckPolicy(const AttentionPolicy& policy) const {
  const auto refuse = [&](std::string_view option, const std::string& why) {
    return absl::InvalidArgumentError(
        fmt::format("policy '{}', {}: {}", ToString(policy), option, why));
  };
  if (policy.IsVerified() && memory_.shared_kv() != nullptr) {
    return refuse(
        "verify",
        "not with KV in host memory on a GPU (--host-bytes), where rows of a draft stay in "
        "the device's row cache");
  }
  if (policy.kind == Kind::kDense) return absl::OkStatus();
  const Artifact* artifact = options_.artifact.get();
  const int32_t first = std::min(policy.dense_layers, config_.num_layers);
  if (policy.NeedsArtifact() && artifact == nullptr) {
    return refuse(policy.completion ? "completion" : "name",
                  "needs learned functions, and this server has no artifact of them");
  }
  if (policy.index_kind() == IndexKind::kCodes) {
    const std::string name(KindName(policy.kind));
    if (policy.IsLearned()) {
      if (!artifact->HasKind(policy.kind)) {
        return refuse("name", fmt::format("the artifact has no {}", name));
      }
      if (policy.bits != 0 && policy.bits != artifact->bits(policy.kind)) {
        return refuse("bits",
                      fmt::format("the artifact's {} has {}", name, artifact->bits(policy.kind)));
      }
      for (int32_t layer = first; layer < config_.num_layers; ++layer) {
        if (artifact->HasLayer(policy.kind, layer)) continue;
        return refuse("dense_layers",
                      fmt::format("the artifact has no {} for layer {}", name, layer));
      }
    }
    if (policy.kind == Kind::kPca) {
      if (policy.completion) {
        return refuse("completion", "pca has a tail of its own (tail=on)");
      }
      if (policy.bits != 0 && options_.transform != nullptr &&
          policy.bits != options_.transform->bits) {
        return refuse("bits", fmt::format("the codes here have {}", options_.transform->bits));
      }
      if (FindCodes(policy) == nullptr) {
        return refuse("name", options_.no_transform.empty() ? "there is no index pca here"
                                                            : options_.no_transform);
      }
      if (policy.tail && options_.summaries == 0) {
        return refuse("tail", "there is no room for tables of cells here; say tail=off");
      }
    }
    if (FindCodes(policy) == nullptr) {
      return refuse(
          "name",
          fmt::format("there is no index {} here",
                      ToString(IndexSpec{policy.kind, CodeBits(policy, artifact, nullptr)})));
    }
  }
  if (policy.kind == Kind::kQuest && bounds_.empty()) {
    return refuse("name", "there is no index quest here");
  }
  if (policy.p.has_value() && int4_keys_.empty()) {
    return refuse("p", "there are no four-bit keys here");
  }
  if (policy.completion) {
    if (options_.summaries == 0) return refuse("completion", "there is no room for summaries here");
    for (int32_t layer = first; layer < config_.num_layers; ++layer) {
      if (!feature_maps_.empty() && feature_maps_[layer].key != nullptr) continue;
      return refuse("completion",
                    artifact->header().features && !artifact->has_features()
                        ? "the artifact's feature maps have no verdict on whether they lower the "
                          "error at each head; `python -m calibrate.verdict` adds one"
                    : feature_maps_.empty()
                        ? "the artifact has no feature maps"
                        : fmt::format("the artifact has no feature maps for layer {}", layer));
    }
  }
  if (policy.floor.has_value() && options_.probe_interval == 0) {
    return refuse("floor", "needs probes, which are off here");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RetrievalState>> RetrievalAttention::NewState(
    const AttentionPolicy& policy) {
  auto state = std::make_unique<RetrievalState>(policy, config_.num_layers);
  WINNOW_RETURN_IF_ERROR(Resume(*state));
  return state;
}

absl::Status RetrievalAttention::Resume(RetrievalState& state) {
  const bool tail = state.policy().HasTail();
  if (!(state.policy().completion || tail) || state.summaries_.data() != nullptr) {
    return absl::OkStatus();
  }
  if (free_summaries_.empty()) {
    return absl::ResourceExhaustedError(
        fmt::format("{} sequences with completion or a tail run already", options_.summaries));
  }
  std::byte* place = free_summaries_.back();
  free_summaries_.pop_back();
  state.summaries_ = kernels::Buffer(
      place, SummaryBytes(config_, options_),
      [this](void* given_back) { free_summaries_.push_back(static_cast<std::byte*>(given_back)); });
  auto* data = reinterpret_cast<float*>(place);
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    if (tail) {
      state.layers_[layer].summary.data = data;
      data += kernels::CellTableFloats(layout_.kv_heads, config_.head_dim);
      continue;
    }
    if (feature_maps_[layer].key == nullptr) continue;
    state.layers_[layer].summary.data = data;
    data += layout_.kv_heads *
            kernels::SummaryFloats(feature_maps_[layer].key->features(), config_.head_dim);
  }
  return absl::OkStatus();
}

}  // namespace winnow::engine
