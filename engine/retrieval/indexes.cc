#include "engine/retrieval/indexes.h"

#include <algorithm>
#include <utility>

#include "engine/base/status_macros.h"
#include "engine/retrieval/lsh.h"
#include "engine/retrieval/scratch.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "kernels/transform_code.h"

namespace winnow::engine {

using kernels::Buffer;

namespace {

using Kind = AttentionPolicy::Kind;

constexpr char kResidual[] = "residual";

absl::Status Refuse(const AttentionPolicy& policy, std::string_view option,
                    const std::string& why) {
  return absl::InvalidArgumentError(
      fmt::format("policy '{}', {}: {}", ToString(policy), option, why));
}

}  // namespace

// ---- made once ----

absl::StatusOr<std::unique_ptr<Indexes>> Indexes::Create(const ModelConfig& config,
                                                         KvMemory& memory,
                                                         kernels::Backend& backend,
                                                         const RetrievalOptions& options) {
  std::unique_ptr<Indexes> indexes(new Indexes(config, memory, backend, options));
  WINNOW_RETURN_IF_ERROR(indexes->Allocate());
  return indexes;
}

absl::Status Indexes::Allocate() {
  const kernels::KvLayout& layout = shape_.layout;
  for (const IndexSpec& spec : options_.indexes) {
    if (spec.kind == Kind::kQuest) {
      WINNOW_RETURN_IF_ERROR(
          AllocateLayers(kernels::BoundBlockBytes(layout), "the index of quest", &bounds_));
    } else {
      WINNOW_RETURN_IF_ERROR(MakeCodes(spec));
    }
  }
  if (options_.four_bit_keys) {
    WINNOW_RETURN_IF_ERROR(
        AllocateLayers(kernels::Int4BlockBytes(layout), "four-bit keys", &int4_keys_));
  }
  if (options_.artifact != nullptr && options_.artifact->has_features()) {
    WINNOW_RETURN_IF_ERROR(MakeFeatureMaps());
  }
  const auto place_bytes = static_cast<size_t>(SummaryBytes(config_, options_));
  if (place_bytes == 0 || options_.summaries == 0) return absl::OkStatus();
  WINNOW_ASSIGN_OR_RETURN(summary_pool_,
                          AllocatePool(backend_, place_bytes * options_.summaries, "summaries"));
  for (int32_t i = 0; i < options_.summaries; ++i) {
    free_places_.push_back(static_cast<std::byte*>(summary_pool_.data()) + i * place_bytes);
  }
  return absl::OkStatus();
}

absl::Status Indexes::AllocateLayers(size_t block_bytes, const char* what,
                                     std::vector<Buffer>* out) {
  const auto blocks = static_cast<size_t>(memory_.blocks().num_blocks());
  for (const LayerSpec& layer : config_.layers) {
    Buffer& pool = out->emplace_back();
    if (!layer.SeesAll()) continue;
    WINNOW_ASSIGN_OR_RETURN(pool, AllocatePool(backend_, block_bytes * blocks, what));
    pool_bytes_ += pool.size_bytes();
  }
  return absl::OkStatus();
}

absl::Status Indexes::MakeCodes(const IndexSpec& spec) {
  auto codes = std::make_unique<Codes>();
  codes->spec = spec;
  codes->layout = {shape_.kv_heads, shape_.layout.block_tokens, spec.bits};
  codes->layers.resize(config_.num_layers());
  for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
    Codes::Layer& to = codes->layers[layer];
    const bool learned = spec.kind != Kind::kPca && spec.kind != Kind::kLsh;
    if (!config_.layers[layer].SeesAll() ||
        (learned && !options_.artifact->HasLayer(spec.kind, layer))) {
      continue;
    }
    WINNOW_RETURN_IF_ERROR(MakeCodesOfLayer(spec, layer, &to));
    WINNOW_ASSIGN_OR_RETURN(
        to.pool, AllocatePool(backend_, codes->layout.BlockBytes() * memory_.blocks().num_blocks(),
                              fmt::format("the codes of {}", ToString(spec))));
    pool_bytes_ += to.pool.size_bytes();
    if (spec.kind == Kind::kPca && options_.residual_codes) {
      WINNOW_RETURN_IF_ERROR(MakeResiduals(*codes, layer, &to));
    }
  }
  codes_.push_back(std::move(codes));
  return absl::OkStatus();
}

absl::Status Indexes::MakeResiduals(const Codes& codes, int32_t layer, Codes::Layer* to) {
  WINNOW_CHECK(options_.transform->residuals.size() == codes.layers.size());
  to->residual = backend_.PackTransformCode(options_.transform->residuals[layer]);
  if (to->residual == nullptr) {
    return absl::ResourceExhaustedError("no memory for the transforms of residual codes");
  }
  WINNOW_ASSIGN_OR_RETURN(
      to->residual_pool,
      AllocatePool(backend_, codes.layout.BlockBytes() * memory_.blocks().num_blocks(),
                   "residual codes"));
  pool_bytes_ += to->residual_pool.size_bytes();
  return absl::OkStatus();
}

absl::Status Indexes::MakeCodesOfLayer(const IndexSpec& spec, int32_t layer, Codes::Layer* to) {
  const auto pack = [&](const kernels::EncoderWeights& weights,
                        std::unique_ptr<kernels::PackedEncoder>* out) -> absl::Status {
    *out = backend_.PackEncoder(weights);
    if (*out != nullptr) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        fmt::format("no memory for the hash functions of {}, or {} lacks their shape",
                    ToString(spec), backend_.name()));
  };
  if (spec.kind == Kind::kPca) {
    WINNOW_CHECK(options_.transform != nullptr && options_.transform->bits == spec.bits);
    to->transform = backend_.PackTransformCode(options_.transform->layers[layer]);
    if (to->transform != nullptr) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        fmt::format("no memory for the transforms of {}", ToString(spec)));
  }
  if (spec.kind == Kind::kLsh) {
    const LshEncoder lsh(layer, config_.num_kv_heads, config_.head_dim, spec.bits);
    WINNOW_RETURN_IF_ERROR(pack(lsh.weights(), &to->key));
    return pack(lsh.weights(), &to->query);
  }
  const Artifact& artifact = *options_.artifact;
  WINNOW_RETURN_IF_ERROR(pack(artifact.Encoder(spec.kind, layer, Artifact::Side::kKey), &to->key));
  return pack(artifact.Encoder(spec.kind, layer, Artifact::Side::kQuery), &to->query);
}

absl::Status Indexes::MakeFeatureMaps() {
  const Artifact& artifact = *options_.artifact;
  feature_maps_.resize(config_.num_layers());
  for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
    if (!config_.layers[layer].SeesAll() || !artifact.HasFeatures(layer)) continue;
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

// ---- what is here ----

const Indexes::Codes* Indexes::CodesOf(const AttentionPolicy& policy) const {
  if (policy.index_kind() != IndexKind::kCodes) return nullptr;
  const int32_t bits = CodeBits(policy, options_.artifact.get(), options_.transform.get());
  for (const auto& codes : codes_) {
    if (codes->spec == IndexSpec{policy.kind, bits}) return codes.get();
  }
  return nullptr;
}

size_t Indexes::max_code_bytes() const {
  size_t bytes = 0;
  for (const auto& codes : codes_) bytes = std::max(bytes, codes->layout.CodeBytes());
  return bytes;
}

std::vector<Indexes::Part> Indexes::Parts() const {
  std::vector<Part> parts;
  for (const auto& codes : codes_) {
    Part part{
        ToString(codes->spec), codes->spec.kind == Kind::kPca, codes->layout.BlockBytes(), {}};
    for (const Codes::Layer& layer : codes->layers) {
      part.pools.push_back(static_cast<std::byte*>(layer.pool.data()));
    }
    parts.push_back(std::move(part));
    if (codes->spec.kind != Kind::kPca || !options_.residual_codes) continue;
    Part residual{kResidual, true, codes->layout.BlockBytes(), {}};
    for (const Codes::Layer& layer : codes->layers) {
      residual.pools.push_back(static_cast<std::byte*>(layer.residual_pool.data()));
    }
    parts.push_back(std::move(residual));
  }
  const auto add = [&](const char* title, size_t block_bytes, const std::vector<Buffer>& pools) {
    if (pools.empty()) return;
    Part part{title, false, block_bytes, {}};
    for (const Buffer& pool : pools) part.pools.push_back(static_cast<std::byte*>(pool.data()));
    parts.push_back(std::move(part));
  };
  add("quest", kernels::BoundBlockBytes(shape_.layout), bounds_);
  add("int4", kernels::Int4BlockBytes(shape_.layout), int4_keys_);
  return parts;
}

std::vector<std::string> Indexes::TitlesFor(const AttentionPolicy& policy) const {
  std::vector<std::string> titles;
  if (const Codes* codes = CodesOf(policy)) titles.push_back(ToString(codes->spec));
  if (policy.select_by() == SelectBy::kBounds) titles.push_back("quest");
  if (policy.rerank) titles.push_back(kResidual);
  if (policy.p.has_value()) titles.push_back("int4");
  return titles;
}

double Indexes::RowBytes(const AttentionPolicy& policy) const {
  const double key_bytes = static_cast<double>(shape_.layout.RowBytes()) / 2;
  switch (policy.index_kind()) {
    case IndexKind::kNone:
      return policy.select_by() == SelectBy::kKeys ? key_bytes : 0;
    case IndexKind::kBounds:
      return static_cast<double>(kernels::BoundPageBytes(shape_.layout)) /
             kernels::kBoundPageTokens;
    case IndexKind::kCodes:
      return static_cast<double>(CodesOf(policy)->layout.CodeBytes());
  }
  return 0;
}

// ---- what a policy may ask for ----

absl::Status Indexes::Check(const AttentionPolicy& policy) const {
  if (policy.kind == Kind::kDense) return absl::OkStatus();
  if (config_.NumFullLayers() == 0) {
    return Refuse(
        policy, "name",
        "every layer of this model reads a sliding window, and all of that: only dense is here");
  }
  if (policy.NeedsArtifact() && options_.artifact == nullptr) {
    return Refuse(policy, policy.completion ? "completion" : "name",
                  "needs learned functions, and this server has no artifact of them");
  }
  if (policy.IsLearned()) WINNOW_RETURN_IF_ERROR(CheckLearned(policy));
  if (policy.select_by() == SelectBy::kMasses) WINNOW_RETURN_IF_ERROR(CheckPca(policy));
  if (policy.index_kind() == IndexKind::kCodes && CodesOf(policy) == nullptr) {
    const int32_t bits = CodeBits(policy, options_.artifact.get(), nullptr);
    return Refuse(policy, "name",
                  fmt::format("there is no index {} here", ToString(IndexSpec{policy.kind, bits})));
  }
  if (policy.select_by() == SelectBy::kBounds && bounds_.empty()) {
    return Refuse(policy, "name", "there is no index quest here");
  }
  if (policy.p.has_value() && int4_keys_.empty()) {
    return Refuse(policy, "p", "there are no four-bit keys here");
  }
  if (policy.completion) WINNOW_RETURN_IF_ERROR(CheckCompletion(policy));
  if (policy.floor.has_value() && options_.probe_interval == 0) {
    return Refuse(policy, "floor", "needs probes, which are off here");
  }
  return absl::OkStatus();
}

absl::Status Indexes::CheckLearned(const AttentionPolicy& policy) const {
  const Artifact& artifact = *options_.artifact;
  const std::string name(KindName(policy.kind));
  if (!artifact.HasKind(policy.kind)) {
    return Refuse(policy, "name", fmt::format("the artifact has no {}", name));
  }
  if (policy.bits != 0 && policy.bits != artifact.bits(policy.kind)) {
    return Refuse(policy, "bits",
                  fmt::format("the artifact's {} has {}", name, artifact.bits(policy.kind)));
  }
  for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
    if (!MayRetrieveIn(policy, layer) || artifact.HasLayer(policy.kind, layer)) continue;
    return Refuse(policy, "dense_layers",
                  fmt::format("the artifact has no {} for layer {}", name, layer));
  }
  return absl::OkStatus();
}

absl::Status Indexes::CheckPca(const AttentionPolicy& policy) const {
  const TransformFit* fit = options_.transform.get();
  if (policy.completion) {
    return Refuse(policy, "completion", "pca has a tail of its own (tail=on)");
  }
  if (policy.bits != 0 && fit != nullptr && policy.bits != fit->bits) {
    return Refuse(policy, "bits", fmt::format("the codes here have {}", fit->bits));
  }
  if (CodesOf(policy) == nullptr) {
    return Refuse(
        policy, "name",
        options_.no_transform.empty() ? "there is no index pca here" : options_.no_transform);
  }
  if (policy.rerank && !options_.residual_codes) {
    return Refuse(policy, "rerank",
                  "there are no residual codes here; --index pca,residual keeps them");
  }
  if (policy.tail && options_.summaries == 0) {
    return Refuse(policy, "tail", "there is no room for tables of cells here; say tail=off");
  }
  return absl::OkStatus();
}

absl::Status Indexes::CheckCompletion(const AttentionPolicy& policy) const {
  if (options_.summaries == 0) {
    return Refuse(policy, "completion", "there is no room for summaries here");
  }
  const Artifact& artifact = *options_.artifact;
  for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
    if (!MayRetrieveIn(policy, layer)) continue;
    if (!feature_maps_.empty() && feature_maps_[layer].key != nullptr) continue;
    return Refuse(policy, "completion",
                  artifact.header().features && !artifact.has_features()
                      ? "the artifact's feature maps have no verdict on whether they lower the "
                        "error at each head; `python -m calibrate.verdict` adds one"
                  : feature_maps_.empty()
                      ? "the artifact has no feature maps"
                      : fmt::format("the artifact has no feature maps for layer {}", layer));
  }
  return absl::OkStatus();
}

absl::Status Indexes::GivePlace(RetrievalState& state) {
  const bool tail = state.policy().HasTail();
  if (!(state.policy().completion || tail) || state.summaries().data() != nullptr) {
    return absl::OkStatus();
  }
  if (free_places_.empty()) {
    return absl::ResourceExhaustedError(
        fmt::format("{} sequences with completion or a tail run already", options_.summaries));
  }
  std::byte* place = free_places_.back();
  free_places_.pop_back();
  state.summaries() = Buffer(place, SummaryBytes(config_, options_), [this](void* given_back) {
    free_places_.push_back(static_cast<std::byte*>(given_back));
  });
  auto* data = reinterpret_cast<float*>(place);
  for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
    if (!config_.layers[layer].SeesAll()) continue;
    if (tail) {
      state.layer(layer).summary.data = data;
      data += kernels::CellTableFloats(shape_.kv_heads, config_.head_dim);
      continue;
    }
    const kernels::PackedFeatureMap* map = feature_maps_[layer].key.get();
    if (map == nullptr) continue;
    state.layer(layer).summary.data = data;
    data += shape_.kv_heads * kernels::SummaryFloats(map->features(), config_.head_dim);
  }
  return absl::OkStatus();
}

// ---- a pass ----

// Indexes are made as a prompt is read, and not when it first retrieves: 100,000 keys at once would
// hold up every other sequence of the batch.
// A decoded token waits for its block's end, or for the next query that needs it, and they are taken in together. Where the
// token is dense (below the policy's `from`, or verified without drafts) it waits for the end of kWaitingBlocks: a step that
// takes any in has launches of its own, and so no graph of them. (SmolLM2 on an H200, 0.76 ms a token dense: 0.81 under pca that
// never drafts, and 0.79 under lsh, while each block's end was waited for.) A query that selects by masses chooses among tokens
// before its window only, and the newest ones wait there; so do those of a verification, which took 0.9 of 5.2 ms for their codes
// (Llama-3.1-8B's shape on an H200, 5 rows at 8K). Codes of other kinds cost next to nothing beside the query's own, and pruning
// and completion read what is newest, too. In tiers keys are taken in while they are there.
bool Indexes::Waits(const PassRows& rows, int32_t indexed) const {
  const int32_t position = rows.chunk->position, block_tokens = shape_.layout.block_tokens;
  const AttentionPolicy& policy = rows.policy();
  const bool newest_wait = policy.select_by() == SelectBy::kMasses && !policy.p.has_value();
  const bool is_dense = rows.first_retrieving == rows.size();
  const bool verifies = is_dense && rows.chunk->settled <= position;
  if ((rows.size() != 1 && !(verifies && newest_wait)) || memory_.tiered()) return false;
  if (is_dense) {
    const int32_t border = kWaitingBlocks * block_tokens;
    return (position + rows.size()) / border == position / border;
  }
  if ((position + 1) % block_tokens == 0 || !newest_wait) return false;
  const int32_t candidates_end = rows.Plan(0, options_.from).mid.last,
                table_end = policy.HasTail() ? rows.TableEnd(position) : 0;
  return std::max(candidates_end, table_end) <= std::min(indexed, position);
}

void Indexes::Append(int32_t layer, const AttentionPolicy& policy,
                     std::span<PassRows* const> of_method) {
  memory_.Unpin();
  spans_.clear();
  extensions_.clear();
  table_extensions_.clear();
  tables_.resize(std::max(tables_.size(), of_method.size()));
  for (size_t at = 0; at < of_method.size(); ++at) {
    PassRows& rows = *of_method[at];
    const SequenceChunk& chunk = *rows.chunk;
    if (!rows.state().RetrievesIn(layer) || memory_.chunk_lost(rows.index)) continue;
    RetrievalState::Layer& of_layer = rows.state().layer(layer);
    const int32_t end = chunk.position + rows.size();
    if (Waits(rows, of_layer.indexed)) {
      of_layer.indexed = std::min(of_layer.indexed, chunk.position);  // it was written anew
      continue;
    }
    // Rows of this chunk were just written: what an index said of them is of other tokens.
    const int32_t begin = std::min(of_layer.indexed, chunk.position);
    int32_t first = begin;
    // As far as the next query to complete allows, be it in this chunk or after it.
    const kernels::TokenRange mid = rows.Plan(rows.first_retrieving, options_.from).mid;
    kernels::Summary& summary = of_layer.summary;
    bool extends = false;
    if (rows.policy().completion) {
      if (summary.tokens.size() == 0) summary.tokens = {mid.first, mid.first};
      extends = mid.last > summary.tokens.last;
      if (extends) first = std::min(first, summary.tokens.last);
    }
    int32_t table_end = 0;
    if (rows.policy().HasTail()) {
      if (summary.tokens.size() == 0) summary.tokens = {mid.first, mid.first};
      table_end = std::min(rows.TableEnd(chunk.position + rows.first_retrieving),
                           end / kernels::kCellRefreshTokens * kernels::kCellRefreshTokens);
      if (table_end > summary.tokens.last) first = std::min(first, summary.tokens.last);
    }
    PinnedBlocks pinned;
    // A page of bounds is read from its beginning: blocks are whole pages.
    if (!memory_.Pin(rows.index, layer, chunk.block_table, shape_.BlockOf(first),
                     shape_.BlocksOf(end), &tables_[at], &pinned,
                     [&] { AppendSpans(layer, policy); })) {
      continue;
    }
    spans_.push_back({pinned.table, {begin, end}, chunk.block_table});
    of_layer.indexed = end;
    rows.indexed_from = begin;
    if (extends) extensions_.push_back({&summary, pinned.table, mid.last});
    if (table_end > summary.tokens.last) {
      table_extensions_.push_back({&summary, pinned.table, chunk.block_table, table_end});
    }
    pool_ = pinned.pool;
  }
  AppendSpans(layer, policy);
}

void Indexes::AppendSpans(int32_t layer, const AttentionPolicy& policy) {
  if (spans_.empty()) return;
  const kernels::KvLayout& layout = shape_.layout;
  if (policy.select_by() == SelectBy::kBounds) {
    backend_.BoundKeys(spans_, pool_, layout, bounds_[layer].data());
  } else if (const Codes* codes = CodesOf(policy)) {
    const Codes::Layer& of_layer = codes->layers[layer];
    if (of_layer.transform != nullptr) {
      backend_.EncodeTransformKeys(spans_, pool_, layout, *of_layer.transform, of_layer.pool.data(),
                                   codes->layout);
      if (policy.rerank) {
        backend_.EncodeResiduals({.spans = spans_,
                                  .pool = pool_,
                                  .layout = layout,
                                  .transform = *of_layer.transform,
                                  .codes = of_layer.pool.data(),
                                  .code_layout = codes->layout,
                                  .residual = *of_layer.residual,
                                  .residual_codes = of_layer.residual_pool.data(),
                                  .residual_layout = codes->layout});
      }
      if (!table_extensions_.empty()) {
        backend_.ExtendCellTables(table_extensions_, pool_, layout, *of_layer.transform,
                                  of_layer.pool.data(), codes->layout);
      }
      table_extensions_.clear();
    } else {
      backend_.EncodeKeys(spans_, pool_, layout, *of_layer.key, of_layer.pool.data(),
                          codes->layout);
    }
  }
  if (policy.p.has_value()) {
    backend_.QuantizeKeys(spans_, pool_, layout, int4_keys_[layer].data());
  }
  if (!extensions_.empty()) {
    backend_.ExtendSummaries(extensions_, pool_, layout, *feature_maps_[layer].key);
  }
  spans_.clear();
  extensions_.clear();
}

}  // namespace winnow::engine
