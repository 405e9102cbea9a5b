#include "bench/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "absl/status/status.h"
#include "engine/base/device.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/decoder.h"
#include "engine/kv_planning.h"
#include "engine/model_loader.h"
#include "engine/model_retrieval.h"
#include "engine/retrieval/exactness.h"
#include "engine/retrieval/retrieval_state.h"
#include "engine/synthetic_artifact.h"
#include "fmt/format.h"
#include "kernels/kv_layout.h"
#include "server/model_options.h"

namespace winnow::bench {
namespace {

using engine::AttentionPolicy;
using Kind = AttentionPolicy::Kind;

constexpr size_t kConfigBytesMax = size_t{1} << 20;
// A disk gives whole pages.
constexpr double kPageBytes = 4096;

// The model as far as sizes go.
struct PlannedModel {
  engine::ModelConfig config;
  engine::Weights weights;  // mapped and not read; empty for a shape alone
  engine::SyntheticArtifact synthetic;
  engine::DecoderOptions options;
  engine::KvPlan kv;
  AttentionPolicy policy;
  bool bfloat16_blocks = false;  // as its Device

  const kernels::KvLayout& layout() const { return kv.layout; }
};

// As ResolveRetrieval; a shape alone has the artifact that its policy needs, of the widths that calibrate chooses.
absl::StatusOr<engine::RetrievalOptions> PlannedRetrieval(const PlanRequest& request,
                                                          const engine::RetrievalFlags& flags,
                                                          PlannedModel& model) {
  if (request.like.empty()) {
    return engine::ResolveRetrieval(request.config.model, model.config, model.weights, flags);
  }
  if (!flags.artifact.empty() && flags.artifact != "none") {
    return absl::InvalidArgumentError("artifact: is of a model, and --like has none");
  }
  engine::RetrievalFlags without = flags;
  without.artifact = "none";
  WINNOW_ASSIGN_OR_RETURN(engine::RetrievalOptions options,
                          engine::ResolveRetrieval("", model.config, model.weights, without));
  if (flags.index == "auto" && model.policy.NeedsArtifact()) {
    WINNOW_ASSIGN_OR_RETURN(model.synthetic, engine::MakeSyntheticArtifact(model.config, 1));
    options.artifact = model.synthetic.artifact;
    options.indexes = engine::AllIndexes(options.artifact.get());
  }
  return options;
}

absl::StatusOr<std::unique_ptr<PlannedModel>> OpenModel(const PlanRequest& request) {
  auto model = std::make_unique<PlannedModel>();
  WINNOW_ASSIGN_OR_RETURN(model->policy, engine::ParseAttentionPolicy(request.config.policy));
  if (!request.config.exactness.empty()) {
    WINNOW_ASSIGN_OR_RETURN(const engine::Exactness exactness,
                            engine::ParseExactness(request.config.exactness));
    WINNOW_ASSIGN_OR_RETURN(
        model->policy, engine::WithExactness(model->policy, exactness, /*policy_yields=*/false));
  }
  if (request.like.empty()) {
    WINNOW_ASSIGN_OR_RETURN(model->config, engine::LoadModelConfig(request.config.model));
    WINNOW_ASSIGN_OR_RETURN(model->weights,
                            engine::LoadWeights(request.config.model, model->config));
  } else {
    WINNOW_ASSIGN_OR_RETURN(const std::string text,
                            engine::ReadSmallFile(request.like, kConfigBytesMax));
    WINNOW_ASSIGN_OR_RETURN(model->config, engine::ParseModelConfig(text, request.like, "", ""));
  }
  const engine::ModelOptions options = server::ModelOptionsOf(request.config);
  model->bfloat16_blocks = engine::DeviceOf(options.device).bfloat16_blocks;
  WINNOW_ASSIGN_OR_RETURN(model->options, engine::ResolveDecoderOptions(model->config, options));
  const int32_t context = engine::ContextOf(model->config, model->options);
  model->config = engine::WithServedContext(std::move(model->config), context);
  if (model->options.weights != engine::WeightStorage::kWide) {
    if (!request.like.empty()) {
      return absl::InvalidArgumentError(fmt::format(
          "weights is {}: a plan of it needs --model, as --like has no files", options.weights));
    }
    WINNOW_RETURN_IF_ERROR(engine::CheckWeightStorage(model->options.weights, model->weights));
  }
  if (const auto& drafts = model->options.draft_weights; drafts.has_value()) {
    if (!request.like.empty()) {
      return absl::InvalidArgumentError(
          fmt::format("draft_weights is {}: a plan of it needs --model, as --like has no files",
                      options.draft_weights));
    }
    WINNOW_RETURN_IF_ERROR(engine::CheckDraftWeights(*drafts, model->weights));
  }
  WINNOW_ASSIGN_OR_RETURN(model->options.retrieval,
                          PlannedRetrieval(request, options.retrieval, *model));
  WINNOW_ASSIGN_OR_RETURN(
      const int32_t bits,
      engine::WantedTransformBits(model->config, options.retrieval, model->options.retrieval));
  if (bits != 0) model->options.retrieval.indexes.push_back({Kind::kPca, bits});
  WINNOW_ASSIGN_OR_RETURN(model->kv, engine::PlanKv(model->config, model->options));
  return model;
}

PlannedMemory SizeMemory(const PlannedModel& model, const server::ServeConfig& config) {
  const engine::DecoderOptions& options = model.options;
  const engine::KvPlan& kv = model.kv;
  PlannedMemory memory;
  memory.weight_bytes = options.weights == engine::WeightStorage::kWide
                            ? engine::WeightBytes(model.config, options.compute)
                            : engine::StorageBytes(options.weights, model.weights, options.compute,
                                                   model.bfloat16_blocks);
  if (model.bfloat16_blocks) {
    memory.widening_bytes = engine::WideningBytes(options.weights, model.weights);
  }
  if (options.draft_weights.has_value()) {
    memory.draft_weight_bytes = engine::DraftWeightBytes(
        *options.draft_weights, model.weights, options.draft_compute, model.bfloat16_blocks);
    if (model.bfloat16_blocks) {
      memory.widening_bytes = std::max(
          memory.widening_bytes, engine::WideningBytes(*options.draft_weights, model.weights));
    }
  }
  memory.kv_pool_bytes = kv.pool_bytes();
  memory.kv_host_bytes = kv.host_bytes;
  for (const engine::IndexKvPlan& index : kv.indexes) {
    memory.indexes.push_back({index.name, index.title, index.bytes});
  }
  memory.summary_bytes = kv.summary_bytes;
  memory.row_cache_bytes = kv.row_cache_bytes;
  memory.staging_bytes = kv.staging_bytes;
  memory.host_bytes = kv.uses_host() ? 0 : config.host_bytes;
  memory.disk_bytes = config.disk_bytes;
  return memory;
}

// Bytes that `index` keeps of a token, per layer and KV head.
double IndexTokenBytes(const PlannedModel& model, const engine::RetrievalOptions& index) {
  return static_cast<double>(engine::IndexBlockBytes(model.config, model.layout(), index)) /
         model.options.block_tokens / model.config.NumFullLayers() / model.config.num_kv_heads;
}

// NotFound where the server keeps no index that the policy could choose by.
absl::StatusOr<double> ChoosingBytesPerToken(const PlannedModel& model) {
  const AttentionPolicy& policy = model.policy;
  if (policy.index_kind() == engine::IndexKind::kNone) {
    const bool reads_keys = policy.kind == Kind::kOracle;
    return reads_keys ? static_cast<double>(model.layout().RowBytes()) / 2 : 0.0;
  }
  for (const engine::IndexSpec& spec : model.options.retrieval.indexes) {
    const int32_t bits =
        policy.kind == Kind::kLsh && policy.bits == 0 ? AttentionPolicy::kLshBits : policy.bits;
    if (spec.kind != policy.kind || (bits != 0 && bits != spec.bits)) continue;
    engine::RetrievalOptions alone;
    alone.indexes = {spec};
    return IndexTokenBytes(model, alone);
  }
  return absl::InvalidArgumentError(fmt::format(
      "policy '{}': the server would keep no index of it (--index, --artifact)", ToString(policy)));
}

// The query of the token that is decoded: the last of `context`.
engine::QueryPlan QueryOf(const PlannedModel& model, const Plan& plan) {
  return engine::PlanQuery(model.policy, static_cast<int32_t>(plan.context) - 1,
                           model.options.retrieval.from);
}

// Where the batch's KV lies. Layer blocks that are not resident are spread evenly over sequences and layers, because
// nothing is known of which are used again.
struct Residency {
  double fast = 1, host = 0, disk = 0;  // shares of all layers but `fast_layers`
  int32_t fast_layers = 0;  // which are in fast memory: the first, that policies leave dense
};
Residency ResidencyOf(const PlannedModel& model, const Plan& plan,
                      const server::ServeConfig& config) {
  Residency out;
  const auto layer_block = static_cast<double>(model.layout().BlockBytes());
  if (model.kv.uses_host()) {
    out.fast_layers = model.kv.NumFastLayers();
    const double needed = static_cast<double>(plan.kv_blocks_needed) * layer_block *
                          (model.config.num_layers() - out.fast_layers);
    const double held = static_cast<double>(plan.memory.kv_host_bytes);
    out.fast = 0;
    out.host = model.kv.is_paged() ? std::min(1.0, held / needed) : 1;
    out.disk = 1 - out.host;
    return out;
  }
  if (!model.kv.is_paged()) return out;
  const double needed =
      static_cast<double>(plan.kv_blocks_needed) * layer_block * model.config.num_layers();
  out.fast = std::min(1.0, static_cast<double>(plan.memory.kv_pool_bytes) / needed);
  const double below = (1 - out.fast) * needed;
  if (below <= 0) return out;
  const double in_host =
      config.disk_bytes == 0 ? 1.0 : std::min(1.0, static_cast<double>(config.host_bytes) / below);
  out.host = (1 - out.fast) * in_host;
  out.disk = 1 - out.fast - out.host;
  return out;
}

// KV of a layer in which each KV head reads `rows` rows, of a batch. Single rows are read by pages of a disk, and what the
// row cache has is not read from below.
void AddKv(const PlannedModel& model, const Residency& where, double batch, double rows,
           bool single_rows, double cache_hits, StepReads* step) {
  const double row_bytes = static_cast<double>(model.layout().RowBytes());
  const double all = batch * model.config.num_kv_heads * rows;
  const double misses = single_rows ? 1 - cache_hits : 1;
  const double page = single_rows ? std::max(row_bytes, kPageBytes) : row_bytes;
  step->rows += std::llround(all);
  step->fast_kv_bytes += all * row_bytes * (where.fast + (where.host + where.disk) * (1 - misses));
  step->host_kv_bytes += all * row_bytes * where.host * misses;
  step->disk_kv_bytes += all * page * where.disk * misses;
}

// Bytes of experts that a step does not read: `batch` tokens go to experts as if each chose at random.
double UnreadExpertBytes(const PlannedModel& model, int64_t batch) {
  const engine::ExpertsConfig& experts = model.config.experts;
  if (experts.count == 0) return 0;
  const engine::DecoderOptions& options = model.options;
  const int64_t bytes = options.weights == engine::WeightStorage::kWide
                            ? engine::ExpertWeightBytes(model.config, options.compute)
                            : engine::ExpertStorageBytes(options.weights, model.weights,
                                                         options.compute, model.bfloat16_blocks);
  const double passed_by = 1 - static_cast<double>(experts.per_token) / experts.count;
  return static_cast<double>(bytes) * std::pow(passed_by, static_cast<double>(batch));
}

StepReads ReadsOf(const PlannedModel& model, const Plan& plan, const Residency& where,
                  double cache_hits, const engine::QueryPlan& query, double choosing_bytes) {
  StepReads step;
  // The embedding is looked up, not read, unless it is the output embedding as well. Weights in fewer bits do not count it.
  const int64_t looked_up =
      model.config.tie_word_embeddings || model.options.weights != engine::WeightStorage::kWide
          ? 0
          : int64_t{model.config.vocab_size} * model.config.hidden_size *
                static_cast<int64_t>(kernels::DTypeBytes(model.options.compute));
  step.weight_bytes = static_cast<double>(plan.memory.weight_bytes - looked_up) -
                      UnreadExpertBytes(model, plan.batch);
  const auto batch = static_cast<double>(plan.batch);
  const auto context = static_cast<double>(plan.context);
  const double kv_heads = model.config.num_kv_heads;
  // All but the candidates are anchors.
  const double read = context - query.mid.size() + query.k;
  double retrieving = 0;
  for (int32_t i = 0; i < model.config.num_layers(); ++i) {
    const engine::LayerSpec& layer = model.config.layers[i];
    // Layers that a GPU keeps are read from its memory.
    const Residency of_layer = i < where.fast_layers ? Residency() : where;
    if (!query.dense && model.policy.RetrievesIn(i) && layer.SeesAll()) {
      AddKv(model, of_layer, batch, read, true, cache_hits, &step);
      ++retrieving;
    } else {
      const double seen = layer.SeesAll() ? context : std::min<double>(context, layer.window);
      AddKv(model, of_layer, batch, seen, false, 0, &step);
    }
  }
  if (query.dense) return step;
  step.index_bytes = batch * retrieving * kv_heads * query.mid.size() * choosing_bytes;
  if (model.policy.p.has_value()) {
    engine::RetrievalOptions four_bit;
    four_bit.four_bit_keys = true;
    step.index_bytes +=
        batch * retrieving * kv_heads * query.candidates * IndexTokenBytes(model, four_bit);
  }
  if (model.policy.rerank) {
    // Both codes of the candidates.
    step.index_bytes += 2 * batch * retrieving * kv_heads * query.candidates * choosing_bytes;
  }
  if (model.policy.completion || model.policy.HasTail()) {
    step.summary_bytes =
        batch * static_cast<double>(engine::SummaryBytes(model.config, model.options.retrieval)) *
        retrieving / model.config.NumFullLayers();
  }
  return step;
}

absl::Status CheckRequest(const PlanRequest& request, const Plan& plan) {
  const auto fail = [](const std::string& text) { return absl::InvalidArgumentError(text); };
  if (plan.context > plan.max_context) {
    return fail(fmt::format("--context: {} is more than the server's --max-context of {}",
                            plan.context, plan.max_context));
  }
  if (request.batch > request.config.max_running) {
    return fail(fmt::format("--batch: {} is more than --max-running, {}", request.batch,
                            request.config.max_running));
  }
  return absl::OkStatus();
}

void AddNotes(const PlanRequest& request, const PlannedModel& model, Plan* plan) {
  plan->notes.push_back(
      "The time is what the bytes take at full bandwidth. Measured steps took 1.1 to 1.3 times as "
      "long (docs/benchmarks.md).");
  plan->notes.push_back(
      "Not counted: scratch of steps and the process itself (the line \"sizes\" of the server's "
      "log).");
  if (model.policy.p.has_value()) {
    plan->notes.push_back(
        "p keeps at most the entries that are counted here; how many depends on the text.");
  }
  if (!model.policy.IsDense() && !model.policy.from && request.config.retrieval_from == "auto") {
    plan->notes.push_back(
        "Whether a context of this length retrieves is measured at the first start "
        "(--retrieval-from); here it does.");
  }
  if (plan->step.host_kv_bytes + plan->step.disk_kv_bytes > 0) {
    plan->notes.push_back(
        fmt::format("{:.0f} % of the reads of slower tiers are saved by the row cache "
                    "(--row-cache-hits); docs/tiers.md has measured shares.",
                    100 * request.row_cache_hits));
  }
  if (model.kv.uses_host()) {
    plan->notes.push_back(
        "Not counted: the row cache's tables and staging on the GPU, which only a build for it "
        "knows (the log says).");
  }
}

}  // namespace

int64_t PlannedMemory::index_bytes() const {
  int64_t bytes = 0;
  for (const PlannedIndex& index : indexes) bytes += index.bytes;
  return bytes;
}

int64_t PlannedMemory::fast_bytes(bool on_host) const {
  const int64_t pool = kv_pool_bytes - kv_host_bytes;
  const int64_t rows = row_cache_bytes + (on_host ? staging_bytes + host_bytes : 0);
  return weight_bytes + draft_weight_bytes + widening_bytes + pool + index_bytes() + summary_bytes +
         rows;
}

double StepReads::Seconds(const TierSpeeds& speeds) const {
  const auto at = [](double bytes, double speed) { return bytes == 0 ? 0 : bytes / speed; };
  return at(fast_bytes(), speeds.fast) + at(host_kv_bytes, speeds.host) +
         at(disk_kv_bytes, speeds.disk);
}

bool Plan::memory_fits() const {
  return memory_bytes == 0 || memory.fast_bytes(on_host) <= memory_bytes;
}

absl::StatusOr<Plan> MakePlan(const PlanRequest& request, const TierSpeeds& speeds) {
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<PlannedModel> opened, OpenModel(request));
  const PlannedModel& model = *opened;
  const engine::DecoderOptions& options = model.options;
  Plan plan;
  plan.model = request.like.empty() ? request.config.model : request.like;
  plan.architecture = model.config.architecture;
  plan.device = request.config.device;
  plan.on_host = !engine::DeviceOf(plan.device).own_memory;
  plan.dtype = kernels::DTypeName(options.compute);
  plan.kv_dtype = kernels::DTypeName(options.kv_dtype);
  plan.policy = ToString(model.policy);
  plan.block_tokens = options.block_tokens;
  plan.kv_blocks = model.kv.num_blocks;
  plan.max_context = std::min<int64_t>(options.max_context, plan.kv_blocks * options.block_tokens);
  plan.context = request.context == 0 ? plan.max_context : request.context;
  plan.batch = request.batch;
  WINNOW_RETURN_IF_ERROR(CheckRequest(request, plan));
  plan.kv_token_bytes = int64_t{model.config.num_layers()} * model.config.num_kv_heads *
                        static_cast<int64_t>(model.layout().RowBytes());
  plan.kv_blocks_needed =
      plan.batch * ((plan.context + options.block_tokens - 1) / options.block_tokens);
  plan.memory_bytes = request.memory_bytes;
  plan.kv_layers = ToString(model.kv);
  plan.memory = SizeMemory(model, request.config);
  if (plan.memory_bytes > 0 && !model.kv.uses_host() && !model.kv.is_paged()) {
    // Indexes grow with the pool.
    const double beside = static_cast<double>(plan.memory.index_bytes()) /
                          static_cast<double>(plan.memory.kv_pool_bytes);
    const int64_t rest = plan.memory_bytes - plan.memory.fast_bytes(plan.on_host) +
                         plan.memory.kv_pool_bytes + plan.memory.index_bytes();
    plan.kv_bytes_that_fit =
        std::max<int64_t>(0, static_cast<int64_t>(static_cast<double>(rest) / (1 + beside)));
  }
  plan.speeds = speeds;
  const engine::QueryPlan query = QueryOf(model, plan);
  double choosing = 0;
  if (!query.dense) {
    WINNOW_ASSIGN_OR_RETURN(choosing, ChoosingBytesPerToken(model));
  }
  const Residency where = ResidencyOf(model, plan, request.config);
  plan.step = ReadsOf(model, plan, where, request.row_cache_hits, query, choosing);
  plan.dense = ReadsOf(model, plan, where, 0, engine::QueryPlan(), 0);
  AddNotes(request, model, &plan);
  return plan;
}

absl::StatusOr<TierSpeeds> ParseSpeeds(std::string_view text, const TierSpeeds& defaults) {
  TierSpeeds speeds = defaults;
  std::vector<std::string_view> seen;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view entry = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = entry.find('=');
    const std::string_view tier = entry.substr(0, equals);
    double* const to = tier == "fast"   ? &speeds.fast
                       : tier == "host" ? &speeds.host
                       : tier == "disk" ? &speeds.disk
                                        : nullptr;
    const std::string number(equals == entry.npos ? "" : entry.substr(equals + 1));
    char* rest = nullptr;
    const double value = std::strtod(number.c_str(), &rest);
    if (to == nullptr || number.empty() || *rest != '\0' || !(value > 0) || !std::isfinite(value) ||
        std::find(seen.begin(), seen.end(), tier) != seen.end()) {
      return absl::InvalidArgumentError(
          fmt::format("--bandwidth: '{}' is not one of fast=, host=, disk= with GB a second, each "
                      "once",
                      entry));
    }
    seen.push_back(tier);
    *to = value * kGiga;
  }
  speeds.source = fmt::format("--bandwidth {}; the rest: {}", text, defaults.source);
  return speeds;
}

namespace {

Json ReadsJson(const StepReads& step, const TierSpeeds& speeds) {
  return {{"weight_bytes", std::llround(step.weight_bytes)},
          {"index_bytes", std::llround(step.index_bytes)},
          {"summary_bytes", std::llround(step.summary_bytes)},
          {"kv_bytes",
           {{"fast", std::llround(step.fast_kv_bytes)},
            {"host", std::llround(step.host_kv_bytes)},
            {"disk", std::llround(step.disk_kv_bytes)}}},
          {"kv_rows", step.rows},
          {"ms", Round(step.Seconds(speeds) / kMilli)}};
}

std::string Bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 2, kUnits[unit]);
}
std::string Bytes(int64_t bytes) { return Bytes(static_cast<double>(bytes)); }

void AddLine(std::string& out, const std::string& what, const std::string& size,
             const std::string& where) {
  out += fmt::format("  {:<34} {:>12}  {}\n", what, size, where);
}

void AddStep(std::string& out, const std::string& what, const StepReads& step,
             const TierSpeeds& speeds, int64_t batch) {
  const double seconds = step.Seconds(speeds);
  out += fmt::format(
      "  {:<34} weights {}, indexes {}, summaries {}; KV fast {}, host {}, disk {}: {:.2f} ms, "
      "{:.1f} tokens/s\n",
      what, Bytes(step.weight_bytes), Bytes(step.index_bytes), Bytes(step.summary_bytes),
      Bytes(step.fast_kv_bytes), Bytes(step.host_kv_bytes), Bytes(step.disk_kv_bytes),
      seconds / kMilli, static_cast<double>(batch) / seconds);
}

}  // namespace

Json PlanJson(const Plan& plan) {
  Json indexes = Json::array();
  for (const PlannedIndex& index : plan.memory.indexes) {
    indexes.push_back({{"name", index.name}, {"title", index.title}, {"bytes", index.bytes}});
  }
  const PlannedMemory& memory = plan.memory;
  return {{"plan",
           {{"model", plan.model},
            {"architecture", plan.architecture},
            {"device", plan.device},
            {"dtype", plan.dtype},
            {"kv_dtype", plan.kv_dtype},
            {"policy", plan.policy},
            {"context", plan.context},
            {"batch", plan.batch},
            {"max_context", plan.max_context}}},
          {"memory",
           {{"weight_bytes", memory.weight_bytes},
            {"draft_weight_bytes", memory.draft_weight_bytes},
            {"kv_pool_bytes", memory.kv_pool_bytes},
            {"kv_host_bytes", memory.kv_host_bytes},
            {"indexes", indexes},
            {"index_bytes", memory.index_bytes()},
            {"widening_bytes", memory.widening_bytes},
            {"summary_bytes", memory.summary_bytes},
            {"row_cache_bytes", memory.row_cache_bytes},
            {"staging_bytes", memory.staging_bytes},
            {"host_bytes", memory.host_bytes},
            {"disk_bytes", memory.disk_bytes},
            {"fast_bytes", memory.fast_bytes(plan.on_host)},
            {"memory_bytes", plan.memory_bytes == 0 ? Json() : Json(plan.memory_bytes)},
            {"fits", plan.memory_fits()},
            {"kv_bytes_that_fit",
             plan.kv_bytes_that_fit == 0 ? Json() : Json(plan.kv_bytes_that_fit)}}},
          {"kv",
           {{"token_bytes", plan.kv_token_bytes},
            {"block_tokens", plan.block_tokens},
            {"blocks", plan.kv_blocks},
            {"layers", plan.kv_layers},
            {"blocks_needed", plan.kv_blocks_needed},
            {"fits", plan.sequences_fit()}}},
          {"step", ReadsJson(plan.step, plan.speeds)},
          {"dense_step", ReadsJson(plan.dense, plan.speeds)},
          {"speeds",
           {{"fast_gb_per_s", Round(plan.speeds.fast / kGiga)},
            {"host_gb_per_s", Round(plan.speeds.host / kGiga)},
            {"disk_gb_per_s", Round(plan.speeds.disk / kGiga)},
            {"source", plan.speeds.source}}},
          {"notes", plan.notes}};
}

std::string PlanText(const Plan& plan) {
  const PlannedMemory& memory = plan.memory;
  const bool on_host = plan.on_host;
  const std::string fast = on_host ? "memory" : "the GPU's memory";
  std::string out =
      fmt::format("{} ({}), weights {}, KV {}, --device {}\n\nWhat lies where\n", plan.model,
                  plan.architecture, plan.dtype, plan.kv_dtype, plan.device);
  AddLine(out, "weights", Bytes(memory.weight_bytes), fast);
  if (memory.draft_weight_bytes > 0)
    AddLine(out, "draft weights", Bytes(memory.draft_weight_bytes), fast);
  if (memory.widening_bytes > 0)
    AddLine(out, "widened weights", Bytes(memory.widening_bytes), fast);
  AddLine(out, "KV pool", Bytes(memory.kv_pool_bytes - memory.kv_host_bytes), fast);
  for (const PlannedIndex& index : memory.indexes) {
    AddLine(out, "index " + index.title, Bytes(index.bytes), fast);
  }
  AddLine(out, "summaries", Bytes(memory.summary_bytes), fast);
  if (memory.row_cache_bytes > 0) AddLine(out, "row cache", Bytes(memory.row_cache_bytes), fast);
  if (on_host && memory.staging_bytes > 0) {
    AddLine(out, "staging", Bytes(memory.staging_bytes), fast);
  }
  if (memory.kv_host_bytes > 0) {
    AddLine(out, "KV pool", Bytes(memory.kv_host_bytes), "the host's memory, pinned");
  }
  if (memory.host_bytes > 0) {
    AddLine(out, "store", Bytes(memory.host_bytes), "the host's memory, as it fills");
  }
  if (memory.disk_bytes > 0) AddLine(out, "store", Bytes(memory.disk_bytes), "disk, as it fills");
  AddLine(out, "together", Bytes(memory.fast_bytes(on_host)), fast);
  if (plan.memory_bytes > 0) {
    out += fmt::format(
        "  {} of {}",
        plan.memory_fits() ? "fits into --memory" : "DOES NOT FIT: --memory is too small,",
        Bytes(plan.memory_bytes));
    if (plan.kv_bytes_that_fit > 0) {
      out += fmt::format("; --kv-bytes up to {} would fit", plan.kv_bytes_that_fit);
    }
    out += "\n";
  }
  out += fmt::format(
      "\nKV: {} a token; {} sequences of {} tokens need {} blocks of {} tokens, the server holds "
      "{}{}\n",
      Bytes(plan.kv_token_bytes), plan.batch, plan.context, plan.kv_blocks_needed,
      plan.block_tokens, plan.kv_blocks,
      plan.sequences_fit() ? "" : ": THEY DO NOT FIT, the rest waits");
  out += fmt::format("  {}\n", plan.kv_layers);
  out += "\nWhat a decode step reads\n";
  AddStep(out, plan.policy, plan.step, plan.speeds, plan.batch);
  if (plan.policy != "dense") AddStep(out, "dense", plan.dense, plan.speeds, plan.batch);
  out += fmt::format("  at {:.1f}, {:.1f} and {:.2f} GB/s of fast, host and disk ({})\n",
                     plan.speeds.fast / kGiga, plan.speeds.host / kGiga, plan.speeds.disk / kGiga,
                     plan.speeds.source);
  for (const std::string& note : plan.notes) out += "\n" + note;
  return out + "\n";
}

}  // namespace winnow::bench
