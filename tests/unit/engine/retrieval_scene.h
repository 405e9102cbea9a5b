// One layer's KV and queries, drawn at random, and the calls that retrieval's parts are handed: for tests of one part
// without the others, and without a model.
#ifndef WINNOW_TESTS_UNIT_ENGINE_RETRIEVAL_SCENE_H_
#define WINNOW_TESTS_UNIT_ENGINE_RETRIEVAL_SCENE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/kv/kv_memory.h"
#include "engine/retrieval/query_call.h"
#include "engine/retrieval/retrieval_options.h"
#include "engine/retrieval/transform_fit.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "storage/block_store.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {

struct RetrievalScene {
  static std::vector<bool> SeesAll() { return std::vector<bool>(kLayers, true); }
  static constexpr int32_t kLayers = 2, kHeads = 4, kKvHeads = 2, kDim = 64;
  static constexpr int32_t kBlockTokens = 16, kTokens = 320, kBlocks = 24;
  static constexpr int32_t kUsed = kTokens / kBlockTokens;

  // With a store: as many frames as say `frames`, or all of them.
  explicit RetrievalScene(uint64_t seed, storage::BlockStore* store = nullptr,
                          int64_t frames = kLayers * kBlocks)
      : random(seed), backend(kernels::MakeCpuBackend("auto", 2)) {
    config.layers.resize(kLayers);
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = kDim;
    const bool paged = store != nullptr;
    auto made = KvMemory::Create(
        *backend,
        PlanPools(paged ? ResidencyKind::kPaged : ResidencyKind::kInPlace, layout,
                  std::vector(kLayers, paged ? KvPlacement::kFastFrames : KvPlacement::kFast),
                  kBlocks, paged ? frames : 0),
        {.store = store});
    EXPECT_TRUE(made.ok()) << made.status();
    memory = *std::move(made);
    blocks.resize(kUsed);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random);
    k = Normal(kTokens * kKvHeads * kDim);
    v = Normal(kTokens * kKvHeads * kDim);
    q = Normal(kTokens * kHeads * kDim);
  }

  std::vector<float> Normal(size_t count) {
    std::normal_distribution<float> normal(0, 1.5f);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    return values;
  }
  static kernels::Tensor Rows(std::vector<float>& values, int64_t heads) {
    return {values.data(), kernels::DType::kF32,
            static_cast<int64_t>(values.size()) / (heads * kDim), heads * kDim, heads * kDim};
  }
  kernels::Tensor Queries() { return Rows(q, kHeads); }

  // Writes the KV of every layer, in a pass.
  void WriteKv() {
    memory->BeginPass(1);
    std::vector<int32_t> frames;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      PinnedBlocks pinned;
      ASSERT_TRUE(memory->Pin(0, layer, blocks, 0, kUsed, &frames, &pinned, [] {}));
      const kernels::AttentionChunk all{0, kTokens, 0, pinned.table};
      backend->WriteKv(Rows(k, kKvHeads), Rows(v, kKvHeads), {&all, 1}, pinned.pool, layout);
      memory->Unpin();
    }
    memory->EndPass();
  }

  static AttentionPolicy Policy(const std::string& text) {
    const auto policy = ParseAttentionPolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return *policy;
  }

  // Fitted to this scene's keys and queries.
  std::shared_ptr<const TransformFit> Fit() {
    auto fit = std::make_shared<TransformFit>();
    fit->bits = 128;
    fit->id = "of a scene";
    std::vector<kernels::TransformCodeHead> heads, residuals;
    for (int32_t kv_head = 0; kv_head < kKvHeads; ++kv_head) {
      TransformSample sample;
      for (int32_t t = 0; t < kTokens; ++t) {
        const float* key = &k[(t * kKvHeads + kv_head) * kDim];
        const float* query = &q[(t * kHeads + kv_head * kHeads / kKvHeads) * kDim];
        sample.keys.insert(sample.keys.end(), key, key + kDim);
        sample.key_positions.push_back(t);
        sample.queries.insert(sample.queries.end(), query, query + kDim);
        sample.query_positions.push_back(t);
      }
      TransformFitOptions options;
      options.head_dim = kDim;
      options.copies = 0;
      options.served_context = kTokens;
      options.inv_freq.assign(kDim / 2, 1.0f);
      auto head = FitTransformHead(sample, options);
      EXPECT_TRUE(head.ok()) << head.status();
      head->head.tail = true;
      heads.push_back(head->head);
      residuals.push_back(head->residual);
    }
    fit->layers.assign(kLayers, {kDim, 128, heads});
    fit->residuals.assign(kLayers, {kDim, 128, residuals});
    return fit;
  }

  std::mt19937_64 random;
  ModelConfig config;
  const kernels::KvLayout layout = {kKvHeads, kDim, kBlockTokens, kernels::DType::kF32};
  const RetrievalShape shape = RetrievalShape(Config(), layout);
  std::unique_ptr<kernels::Backend> backend;
  std::unique_ptr<KvMemory> memory;
  std::vector<int32_t> blocks;
  std::vector<float> k, v, q;

 private:
  static ModelConfig Config() {
    ModelConfig config;
    config.layers.resize(kLayers);
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = kDim;
    return config;
  }
};

// A chunk of the scene's sequence whose rows all retrieve, and their queries in one call. Stays where it is made.
struct SceneCall {
  SceneCall(RetrievalScene& scene, RetrievalState* state, int32_t first, int32_t last,
            int32_t layer = RetrievalScene::kLayers - 1)
      : tokens(last - first), policy(state->policy()) {
    chunk = {tokens, first, scene.blocks, last - first, state, 0};
    rows.chunk = &chunk;
    rows.first_row = first;
    rows.last_retrieving = rows.size();
    for (int32_t row = 0; row < rows.size(); ++row) {
      const QueryPlan plan = rows.Plan(row, 0);
      EXPECT_FALSE(plan.dense);
      queries.push_back({first + row, scene.blocks, first + row, plan.mid, plan.k});
      candidates.push_back(plan.candidates);
    }
    of_queries.assign(queries.size(), &rows);
    call = {layer, 0, &policy, queries, candidates, of_queries};
  }
  SceneCall(const SceneCall&) = delete;

  std::vector<int32_t> tokens;
  const AttentionPolicy policy;
  SequenceChunk chunk;
  PassRows rows;
  std::vector<kernels::RetrievalQuery> queries;
  std::vector<int32_t> candidates;
  std::vector<const PassRows*> of_queries;
  QueryCall call;
};

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_RETRIEVAL_SCENE_H_
