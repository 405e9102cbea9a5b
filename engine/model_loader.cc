#include "engine/model_loader.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/kv_planning.h"
#include "engine/model/model_fingerprint.h"
#include "engine/model/vocabulary_fit.h"
#include "engine/model_text.h"
#include "fmt/format.h"
#include "fmt/ranges.h"
#include "kernels/arithmetic_version.h"

namespace winnow::engine {

namespace {

// Whatever decides the bits of KV goes into its name: a store that was filled under other settings, or
// by kernels that may round differently (kernels/arithmetic_version.h), has nothing for this process.
// Where KV ends with the process there are no others.
absl::StatusOr<StoreNames> NamesOf(const ModelConfig& config, const Weights& weights,
                                   const kernels::Backend& backend, const DecoderOptions& options,
                                   bool outlives_process) {
  std::string fingerprint;
  if (outlives_process) {
    WINNOW_ASSIGN_OR_RETURN(fingerprint, KvFingerprint(config, weights));
  }
  const RetrievalOptions& retrieval = options.retrieval;
  StoreNames names;
  names.model = Sha256(
      fmt::format("{} weights {} compute {} kv {} block {} on {} version {} by {}", fingerprint,
                  WeightStorageName(options.weights), kernels::DTypeName(options.compute),
                  kernels::DTypeName(options.kv_dtype), options.block_tokens, backend.arithmetic(),
                  kernels::kArithmeticVersion, WINNOW_COMPILER));
  names.retrieval =
      fmt::format("from {} probes {} artifact {}", retrieval.from, retrieval.probe_interval,
                  retrieval.artifact == nullptr ? "none" : retrieval.artifact->ContentId());
  if (retrieval.transform != nullptr) names.retrieval += " transform " + retrieval.transform->id;
  return names;
}

// CheckMemory of a model's own weights. An error names the forms of the weights that would fit.
absl::Status CheckModelMemory(const ModelConfig& config, const ModelOptions& options,
                              const DecoderOptions& resolved, const Weights& weights,
                              const KvPlan& plan, const kernels::Backend& backend) {
  const int64_t copy_bytes = PackingCopyBytes(weights, resolved.compute);
  const absl::Status status = CheckMemory(config, resolved, plan, backend, copy_bytes,
                                          KeptWeightBytes(options, resolved, weights));
  if (status.ok()) return status;
  const auto fits = [&](int64_t weight_bytes) {
    return CheckMemory(config, resolved, plan, backend, copy_bytes, weight_bytes).ok();
  };
  const std::vector<std::string> forms = FormsThatFit(config, options, weights, fits);
  if (forms.empty()) return status;
  return {status.code(), fmt::format("{}; it fits with weights as {}",
                                     std::string(status.message()), fmt::join(forms, " or "))};
}

}  // namespace

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadModel(const std::string& model_path,
                                                       const ModelOptions& options,
                                                       std::unique_ptr<kernels::Backend> backend) {
  WINNOW_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(model_path));
  WINNOW_ASSIGN_OR_RETURN(DecoderOptions decoder_options, ResolveDecoderOptions(config, options));
  // For what is made of the model before its decoder, and for the names of stored KV.
  config = WithServedContext(std::move(config), ContextOf(config, decoder_options));
  WINNOW_ASSIGN_OR_RETURN(Weights weights, LoadWeights(model_path, config));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> tokenizer, LoadTokenizer(model_path));
  WINNOW_RETURN_IF_ERROR(
      CheckVocabularyFits(tokenizer->vocab_size(), config.vocab_size, TokenizerFile(model_path)));
  WINNOW_ASSIGN_OR_RETURN(ChatTemplate chat_template, LoadChatTemplate(model_path));
  if (options.on_opened) options.on_opened(config, weights, *tokenizer);
  WINNOW_RETURN_IF_ERROR(CheckWeightStorage(decoder_options.weights, weights));
  if (decoder_options.draft_weights.has_value()) {
    WINNOW_RETURN_IF_ERROR(CheckDraftWeights(*decoder_options.draft_weights, weights));
  }
  decoder_options.on_packing = options.on_packing;
  if (backend == nullptr) {
    WINNOW_ASSIGN_OR_RETURN(backend, MakeBackend(options));
  }
  WINNOW_ASSIGN_OR_RETURN(decoder_options.retrieval,
                          ResolveRetrieval(model_path, config, weights, options.retrieval));
  // Before memory is counted and taken: it adds an index, and needs a decoder of its own meanwhile.
  WINNOW_ASSIGN_OR_RETURN(
      TransformReport transform,
      ResolveTransform(config, weights, *tokenizer, options.retrieval, *backend, decoder_options));
  WINNOW_ASSIGN_OR_RETURN(const KvPlan plan, PlanKv(config, decoder_options));
  WINNOW_RETURN_IF_ERROR(
      CheckModelMemory(config, options, decoder_options, weights, plan, *backend));
  TierFlags tiers = options.tiers;
  if (plan.uses_host()) tiers.host_bytes = 0;  // a GPU reads that memory itself
  WINNOW_ASSIGN_OR_RETURN(KvStore store, OpenKvStore(tiers, plan.layout));
  if (store.store != nullptr) {
    if (options.decorate_store) store.store = options.decorate_store(std::move(store.store));
    decoder_options.store = store.store.get();
    decoder_options.write_through = options.tiers.keep_prefixes;
  }
  // Before the pools are made, because it needs some memory of its own and gives it back.
  WINNOW_ASSIGN_OR_RETURN(CrossoverReport crossover,
                          ResolveFrom(config, options.retrieval, *backend, decoder_options));
  WINNOW_ASSIGN_OR_RETURN(decoder_options.names,
                          NamesOf(config, weights, *backend, decoder_options,
                                  /*outlives_process=*/options.tiers.disk_bytes != 0));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Decoder> decoder,
                          Decoder::Create(config, weights, *backend, decoder_options, plan));
  // The packed copy is what runs; the mapped one need not stay in memory beside it.
  weights.ReleasePages();
  return std::unique_ptr<LoadedModel>(new LoadedModel{
      .model_path = model_path,
      .config = std::move(config),
      .weights = std::move(weights),
      .tokenizer = std::move(tokenizer),
      .chat_template = std::move(chat_template),
      .backend = std::move(backend),
      .decoder_options = std::move(decoder_options),
      .crossover = std::move(crossover),
      .transform = std::move(transform),
      .store = std::move(store),
      .decoder = std::move(decoder),
  });
}

}  // namespace winnow::engine
