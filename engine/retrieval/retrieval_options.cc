#include "engine/retrieval/retrieval_options.h"

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "kernels/backend.h"
#include "kernels/transform_code.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

// Tables of cells of one sequence, of every layer that sees all tokens.
int64_t CellTableBytes(const ModelConfig& config, const RetrievalOptions& options) {
  const bool has = std::any_of(options.indexes.begin(), options.indexes.end(),
                               [](const IndexSpec& spec) { return spec.kind == Kind::kPca; });
  return has ? config.NumFullLayers() *
                   kernels::CellTableFloats(config.num_kv_heads, config.head_dim) *
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

int32_t CodeBits(const AttentionPolicy& policy, const Artifact* artifact,
                 const TransformFit* transform) {
  if (policy.index_kind() != IndexKind::kCodes) return 0;
  if (policy.bits != 0) return policy.bits;
  if (policy.kind == Kind::kLsh) return AttentionPolicy::kLshBits;
  if (policy.kind == Kind::kPca) return transform != nullptr ? transform->bits : 0;
  return artifact != nullptr && artifact->HasKind(policy.kind) ? artifact->bits(policy.kind) : 0;
}

RetrievalOptions OptionsFor(std::span<const AttentionPolicy> policies,
                            std::shared_ptr<const Artifact> artifact) {
  RetrievalOptions options;
  options.artifact = std::move(artifact);
  for (const AttentionPolicy& policy : policies) {
    options.four_bit_keys |= policy.p.has_value();
    options.residual_codes |= policy.rerank;
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
  for (int32_t layer = 0; layer < config.num_layers(); ++layer) {
    if (!config.layers[layer].SeesAll() || !options.artifact->HasFeatures(layer)) continue;
    const int32_t features = options.artifact->FeatureMap(layer, Artifact::Side::kKey).out.out;
    floats += config.num_kv_heads * kernels::SummaryFloats(features, config.head_dim);
  }
  return std::max(tables, floats * static_cast<int64_t>(sizeof(float)));
}

int64_t ResidualBlockBytes(const ModelConfig& config, const kernels::KvLayout& layout,
                           int32_t bits) {
  const kernels::CodeLayout codes{layout.kv_heads, layout.block_tokens, bits};
  return static_cast<int64_t>(codes.BlockBytes()) * config.NumFullLayers();
}

int64_t IndexBlockBytes(const ModelConfig& config, const kernels::KvLayout& layout,
                        const RetrievalOptions& options) {
  int64_t bytes = 0;
  for (const IndexSpec& spec : options.indexes) {
    if (spec.kind == Kind::kQuest) {
      bytes += static_cast<int64_t>(kernels::BoundBlockBytes(layout)) * config.NumFullLayers();
      continue;
    }
    const kernels::CodeLayout codes{layout.kv_heads, layout.block_tokens, spec.bits};
    const bool learned = spec.kind != Kind::kLsh && spec.kind != Kind::kPca;
    int64_t layers = 0;
    for (int32_t layer = 0; layer < config.num_layers(); ++layer) {
      layers += config.layers[layer].SeesAll() && (!learned || options.artifact == nullptr ||
                                                   options.artifact->HasLayer(spec.kind, layer));
    }
    bytes += static_cast<int64_t>(codes.BlockBytes()) * layers;
    if (spec.kind == Kind::kPca && options.residual_codes) {
      bytes += ResidualBlockBytes(config, layout, spec.bits);
    }
  }
  if (options.four_bit_keys) {
    bytes += static_cast<int64_t>(kernels::Int4BlockBytes(layout)) * config.NumFullLayers();
  }
  return bytes;
}

}  // namespace winnow::engine
