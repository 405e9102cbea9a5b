#include "server/model_options.h"

#include <algorithm>

#include <cstdint>

#include "engine/retrieval/attention_policy.h"

namespace winnow::server {

engine::ModelOptions ModelOptionsOf(const ServeConfig& config) {
  engine::ModelOptions options;
  options.device = config.device;
  options.weights = config.weights;
  options.draft_weights = config.draft_weights;
  options.dtype = config.dtype;
  options.kv_dtype = config.kv_dtype;
  options.isa = config.isa;
  options.num_threads = static_cast<int>(config.threads);
  options.kv_bytes = config.kv_bytes;
  options.block_tokens = static_cast<int32_t>(config.block_tokens);
  options.max_batch_tokens = static_cast<int32_t>(PromptStepTokens(config));
  options.max_sequences = static_cast<int32_t>(config.max_running);
  // One draft of any length can be verified beside them.
  options.max_batch_logits = options.max_sequences + engine::AttentionPolicy::kVerifyMax;
  options.max_context = static_cast<int32_t>(config.max_context);
  options.tiers.host_bytes = config.host_bytes;
  options.tiers.disk_bytes = config.disk_bytes;
  options.tiers.store_dir = config.store_dir;
  options.tiers.io = config.io;
  options.cuda_graphs = config.cuda_graphs == "on";
  options.tiers.prefetch = config.prefetch == "on";
  options.tiers.spill = config.spill == "on";
  options.tiers.keep_prefixes = config.prefix_cache == "on";
  if (config.row_cache_bytes > 0) options.tiers.row_cache_bytes = config.row_cache_bytes;
  options.tiers.strict_store = config.strict_store;
  options.retrieval.artifact = config.artifact;
  options.retrieval.index = config.index;
  options.retrieval.from = config.retrieval_from;
  if (const auto policy = engine::ParseAttentionPolicy(config.policy); policy.ok()) {
    options.retrieval.residual_codes = policy->rerank;
  }
  options.retrieval.probe_interval = static_cast<int32_t>(config.probe_interval);
  options.retrieval.summaries = static_cast<int32_t>(config.max_running);
  options.retrieval.crossover_cache = config.crossover_cache;
  return options;
}

int64_t PromptStepTokens(const ServeConfig& config) {
  constexpr int64_t kOnDevice = 2048;
  if (config.prompt_step_tokens > 0) return config.prompt_step_tokens;
  const bool on_device = engine::DeviceOf(config.device).own_memory && config.host_bytes == 0;
  return on_device ? std::max(config.step_tokens, kOnDevice) : config.step_tokens;
}

}  // namespace winnow::server
