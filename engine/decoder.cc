#include "engine/decoder.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/kv_planning.h"
#include "engine/model/finite_weights.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/host_matrix.h"
#include "kernels/kv_row.h"

namespace winnow::engine {

using kernels::AttentionChunk;
using kernels::Buffer;
using kernels::DType;
using kernels::HostMatrix;
using kernels::PackedMatrix;
using kernels::SampledToken;
using kernels::SampleRow;
using kernels::Tensor;

// The vectors of one layer, which all weight sets share.
struct Decoder::Layer {
  Buffer attention_norm;          // [hidden], of what attention reads, or empty
  Buffer qkv_bias;                // [(H + 2*Hkv)*d], or empty
  Buffer q_norm, k_norm;          // [d]; [H*d] and [Hkv*d] where heads are normed as one; or empty
  Buffer o_bias;                  // [hidden], or empty
  Buffer sinks;                   // [H], or empty
  Buffer attention_out_norm;      // [hidden], of what attention gives, or empty
  Buffer mlp_norm, mlp_out_norm;  // the same of the MLP
  Buffer gate_up_bias;            // [2*intermediate], or empty
  Buffer down_bias;               // [hidden], or empty
};

// The matrices of one layer. Those that read the same input are stacked: one product, one pass.
struct Decoder::Products {
  std::unique_ptr<PackedMatrix> qkv;      // [(H + 2*Hkv)*d][hidden]: Q, then K, then V
  std::unique_ptr<PackedMatrix> o;        // [hidden][H*d]
  ExpertMlp::Layer experts;               // in place of the rest, in a layer of experts
  std::unique_ptr<PackedMatrix> gate_up;  // [2*intermediate][hidden]: gate, then up
  std::unique_ptr<PackedMatrix> down;     // [hidden][intermediate]
};

namespace {

// Rows of a step for which the next layer's queries are predicted, at most.
constexpr int64_t kPredictRows = 64;
// Of noise that differs.
constexpr size_t kNoiseBytes = size_t{64} << 20;

const float* Floats(const Buffer& buffer) { return static_cast<const float*>(buffer.data()); }

Tensor FirstRows(const Tensor& tensor, int64_t rows) { return tensor.RowRange(0, rows); }

}  // namespace

absl::Status Decoder::CheckPolicy(const AttentionPolicy& policy) const {
  if (policy.IsDense() && policy.IsVerified() && !policy.lookup && !has_draft_weights()) {
    return absl::InvalidArgumentError(
        "policy option 'verify' does not apply to 'dense', which drafts nothing; with lookup=on it "
        "does, and with draft weights (--draft-weights)");
  }
  return retrieval_->CheckPolicy(policy);
}

// ---- one forward pass ----

absl::Status Decoder::Forward(const Batch& batch, std::span<float> logits) {
  const auto values = static_cast<size_t>(batch.num_logits() * config_.vocab_size);
  WINNOW_CHECK(logits.size() >= values);
  WINNOW_CHECK(batch.num_logits() <= options_.max_batch_logits);
  Compute(batch);
  if (values > 0) ComputeLogits(0, batch.num_logits());
  memory_->EndPass();  // while the device works
  if (values > 0) backend_.CopyToHost(logits_.data, logits.data(), values * sizeof(float));
  // What was chosen is counted now, as the host must wait for it.
  retrieval_->End();
  return DeviceStatus();
}

absl::Status Decoder::Sample(const Batch& batch, std::span<const SampleRow> rows,
                             std::span<SampledToken> sampled) {
  const auto count = static_cast<size_t>(batch.num_logits());
  WINNOW_CHECK(rows.size() == count && sampled.size() >= count);
  Compute(batch);
  auto* const made = static_cast<SampledToken*>(sampled_.data());
  // A prompt that is scored wants more rows than there is room for: a group after the other takes it.
  const auto most = static_cast<size_t>(options_.max_batch_logits);
  for (size_t first = 0; first < count; first += most) {
    const size_t size = std::min(most, count - first);
    const Tensor logits = ComputeLogits(static_cast<int64_t>(first), static_cast<int64_t>(size));
    backend_.Sample(logits, rows.subspan(first, size), made + first);
  }
  memory_->EndPass();  // while the device works
  if (count > 0 && backend_.Synchronize()) std::copy_n(made, count, sampled.begin());
  retrieval_->End();
  return DeviceStatus();
}

void Decoder::Compute(const Batch& batch) {
  const int64_t m = batch.num_tokens();
  WINNOW_CHECK(m >= 1 && m <= options_.max_batch_tokens);
  WINNOW_CHECK(!batch.drafts || has_draft_weights());
  pass_ = batch.drafts ? &draft_weights_ : &weights_;
  PlanRows(batch);
  backend_.BeginPass();
  memory_->BeginPass(batch.chunks.size());
  retrieval_->Begin(batch.chunks);

  Embed(m);

  // Tables of each rotation, for all layers that have it
  for (const Rotation& rotation : rotations_) {
    const RopeParameters& rope = rotation.rope;
    backend_.RopeTable(positions_, rope.inv_freq, rope.attention_factor, {},
                       FirstRows(rotation.cos_sin, m));
    if (rotation.query_scaling.beta == 0) continue;
    query_factors_.clear();
    for (const int32_t position : positions_) {
      query_factors_.push_back(rotation.query_scaling.Factor(position));
    }
    backend_.RopeTable(positions_, rope.inv_freq, rope.attention_factor, query_factors_,
                       FirstRows(rotation.q_cos_sin, m));
  }

  const int32_t last_layer = config_.num_layers() - 1;
  for (int32_t i = 0; i <= last_layer; ++i) {
    ProjectAndWriteKv(i);
    if (i != last_layer) {
      Attend(i, chunks_, /*logits_only=*/false);
      AddAttended(i, {0, static_cast<int32_t>(m)});
      if (options_.rows.prefetch && retrieval_->predicts() && config_.layers[i + 1].SeesAll()) {
        PredictQueries(i + 1);
      }
      AddMlp(i, {0, static_cast<int32_t>(m)});
    } else {
      // Nothing reads the last layer's output but the logits: other rows need their KV written, no
      // more.
      Attend(i, logit_chunks_, /*logits_only=*/true);
      for (const RowRun& run : logit_runs_) {
        AddAttended(i, run);
        AddMlp(i, run);
      }
    }
  }
}

// hidden [m][hidden] = embedding[ids] · scale
void Decoder::Embed(int64_t m) {
  if (embedding_.IsPlain()) {
    backend_.EmbedRows(embedding_.host(), ids_, embedding_scale_, FirstRows(hidden_, m));
    return;
  }
  for (int64_t i = 0; i < m; ++i) {
    embedding_.WidenRow(ids_[i], embedded_rows_.data() + i * embedding_.cols);
  }
  const HostMatrix rows{embedded_rows_.data(), DType::kF32, m, embedding_.cols};
  backend_.EmbedRows(rows, std::span(row_numbers_).first(m), embedding_scale_,
                     FirstRows(hidden_, m));
}

// Makes the logits of `count` rows, from the `first` on of those whose logits are wanted. The result is a view into logits_.
Tensor Decoder::ComputeLogits(int64_t first, int64_t count) {
  const Tensor logits = FirstRows(logits_, count);
  int64_t before = 0;  // rows of earlier runs
  int64_t made = 0;
  for (const RowRun& run : logit_runs_) {
    const int64_t skipped = std::max<int64_t>(0, first - before);
    before += run.count;
    const int64_t rows = std::min<int64_t>(run.count - skipped, count - made);
    if (rows <= 0) continue;
    const Tensor hidden = hidden_.RowRange(run.first + skipped, rows);
    if (rows == count) {
      // logits [count][vocab] = norm(hidden) · lm_headᵀ
      backend_.NormMatmul({.x = hidden,
                           .weight = Floats(final_norm_),
                           .eps = hidden_eps_,
                           .w = *pass_->lm_head,
                           .normed = FirstRows(last_, count),
                           .y = logits});
      return logits;
    }
    // last [count][hidden] = norm(hidden)
    backend_.RmsNorm(hidden, Floats(final_norm_), hidden_eps_, last_.RowRange(made, rows));
    made += rows;
  }
  WINNOW_CHECK(made == count);
  // logits [count][vocab] = last · lm_headᵀ
  backend_.Matmul(FirstRows(last_, count), *pass_->lm_head, logits, {});
  return logits;
}

absl::Status Decoder::DeviceStatus() const {
  const std::string failure = backend_.failure();
  return failure.empty() ? absl::OkStatus() : absl::UnavailableError(failure);
}

// Flattens the batch: chunk after chunk, token after token, each its own row.
void Decoder::PlanRows(const Batch& batch) {
  ids_.clear();
  positions_.clear();
  chunks_.clear();
  logit_chunks_.clear();
  logit_runs_.clear();
  chunk_of_row_.clear();
  ++forward_count_;
  for (const SequenceChunk& chunk : batch.chunks) {
    const int32_t first_row = static_cast<int32_t>(ids_.size());
    const int32_t num_tokens = static_cast<int32_t>(chunk.tokens.size());
    WINNOW_CHECK(num_tokens >= 1);
    WINNOW_CHECK(chunk.num_logits >= 0 && chunk.num_logits <= num_tokens);
    WINNOW_CHECK(chunk.position >= 0 && chunk.position <= options_.max_context - num_tokens);
    CheckBlocks(chunk);
    for (int32_t i = 0; i < num_tokens; ++i) {
      const int32_t id = chunk.tokens[i];
      WINNOW_CHECK(id >= 0 && id < config_.vocab_size);
      ids_.push_back(id);
      positions_.push_back(chunk.position + i);
    }
    chunk_of_row_.resize(first_row + num_tokens, static_cast<int32_t>(chunks_.size()));
    chunks_.push_back({first_row, num_tokens, chunk.position, chunk.block_table});
    if (chunk.num_logits == 0) continue;
    const int32_t skipped = num_tokens - chunk.num_logits;
    logit_chunks_.push_back(
        {first_row + skipped, chunk.num_logits, chunk.position + skipped, chunk.block_table});
    if (!logit_runs_.empty() &&
        logit_runs_.back().first + logit_runs_.back().count == first_row + skipped) {
      logit_runs_.back().count += chunk.num_logits;
    } else {
      logit_runs_.push_back({first_row + skipped, chunk.num_logits});
    }
  }
}

// The blocks that a chunk reads are in the pool, and those that it writes are its own in this
// batch.
void Decoder::CheckBlocks(const SequenceChunk& chunk) {
  const int32_t last_position = chunk.position + static_cast<int32_t>(chunk.tokens.size()) - 1;
  const int32_t last_block = last_position / options_.block_tokens;
  WINNOW_CHECK(static_cast<size_t>(last_block) < chunk.block_table.size());
  for (int32_t i = 0; i <= last_block; ++i) {
    const int32_t block = chunk.block_table[i];
    WINNOW_CHECK(block >= 0 && block < plan_.num_blocks);
    if (i < chunk.position / options_.block_tokens) continue;
    WINNOW_CHECK(block_written_in_[block] != forward_count_);
    block_written_in_[block] = forward_count_;
  }
}

// hidden → normed → q, k, v of every row; k and v into the KV blocks, and what finds them beside.
void Decoder::ProjectAndWriteKv(int32_t index) {
  const Layer& layer = layers_[index];
  const int64_t m = static_cast<int64_t>(ids_.size());
  const int64_t q_width = int64_t{config_.num_heads} * config_.head_dim;
  const int64_t kv_width = int64_t{config_.num_kv_heads} * config_.head_dim;
  const Tensor hidden = FirstRows(hidden_, m);
  const Tensor normed = FirstRows(normed_, m);
  const Tensor qkv = FirstRows(qkv_, m);
  const Tensor q = qkv.ColRange(0, q_width);
  const Tensor k = qkv.ColRange(q_width, kv_width);
  const Tensor v = qkv.ColRange(q_width + kv_width, kv_width);

  // qkv [m][(H + 2*Hkv)*d]
  Project(hidden, layer.attention_norm, *pass_->layers[index].qkv, layer.qkv_bias, normed, qkv);

  // q and k, per head: norm, in layers that have it
  if (config_.layers[index].qk_norm) {
    NormHeads(index, q, layer.q_norm);
    NormHeads(index, k, layer.k_norm);
  }

  // q and k, per head: rotate by position
  RotateAndWriteKv(index, q, k, v);
  if (observe_queries_) observe_queries_(index, q);
  retrieval_->Index(index);
}

// Each head of x [m][heads*d], or all of a row as one, in layers that norm them so.
void Decoder::NormHeads(int32_t index, const Tensor& x, const Buffer& weight) {
  const bool whole = config_.layers[index].qk_norm_whole;
  backend_.RmsNormHeads(x, whole ? static_cast<int32_t>(x.cols) : config_.head_dim, Floats(weight),
                        config_.rms_norm_eps);
}

// y = norm(x) · Wᵀ + bias, or x · Wᵀ + bias where there is no norm. `normed` is scratch of x's shape.
void Decoder::Project(const Tensor& x, const Buffer& norm, const PackedMatrix& w,
                      const Buffer& bias, const Tensor& normed, const Tensor& y) {
  const kernels::MatmulEpilogue epilogue = {.bias = Floats(bias)};
  if (norm.data() == nullptr) {
    backend_.Matmul(x, w, y, epilogue);
    return;
  }
  backend_.NormMatmul({.x = x,
                       .weight = Floats(norm),
                       .eps = hidden_eps_,
                       .w = w,
                       .normed = normed,
                       .y = y,
                       .epilogue = epilogue});
}

// What the next layer's queries will be, about: its projection of what this layer has made of its
// input so far, all but the MLP's part (InfiniGen, section 4, projects the input itself). The rows of
// retrieval that they would choose are read while the MLP computes. Before attention there would be
// more time to read in, but of what was asked for then a seventh was used, now two thirds and more
// (docs/tiers.md).
void Decoder::PredictQueries(int32_t index) {
  const int64_t m = static_cast<int64_t>(ids_.size());
  const int64_t q_width = int64_t{config_.num_heads} * config_.head_dim;
  const int64_t qkv_width = q_width + 2 * int64_t{config_.num_kv_heads} * config_.head_dim;
  // A step that reads a prompt computes for long enough, and would predict for rows that need none.
  if (m > kPredictRows || qkv_width > gate_up_.cols) return;
  const Layer& layer = layers_[index];
  const Tensor normed = FirstRows(normed_, m);
  const Tensor qkv = FirstRows(gate_up_, m).ColRange(0, qkv_width);
  const Tensor q = qkv.ColRange(0, q_width);
  Project(FirstRows(hidden_, m), layer.attention_norm, *pass_->layers[index].qkv, layer.qkv_bias,
          normed, qkv);
  if (config_.layers[index].qk_norm) NormHeads(index, q, layer.q_norm);
  backend_.Rope(q, config_.head_dim, FirstRows(RotationOf(index).q_cos_sin, m));
  retrieval_->Predict(index, q);
}

// q and k rotated; k, v → the layer's blocks: of all chunks but those that are lost.
void Decoder::RotateAndWriteKv(int32_t index, const Tensor& q, const Tensor& k, const Tensor& v) {
  memory_->Unpin();
  pinned_chunks_.clear();
  void* pool = nullptr;
  const Rotation& rotation = RotationOf(index);
  const auto flush = [&] {
    if (!pinned_chunks_.empty()) {
      backend_.RopeAndWriteKv({.q = q,
                               .k = k,
                               .v = v,
                               .q_cos_sin = FirstRows(rotation.q_cos_sin, q.rows),
                               .cos_sin = FirstRows(rotation.cos_sin, q.rows),
                               .chunks = pinned_chunks_,
                               .pool = pool,
                               .layout = plan_.layout});
    }
    pinned_chunks_.clear();
  };
  for (size_t i = 0; i < chunks_.size(); ++i) {
    AttentionChunk chunk = chunks_[i];
    const auto c = static_cast<int32_t>(i);
    PinnedBlocks pinned;
    if (!memory_->Pin(c, index, chunk.block_table, chunk.position / plan_.layout.block_tokens,
                      (chunk.position + chunk.num_tokens - 1) / plan_.layout.block_tokens + 1,
                      &tables_[i], &pinned, flush)) {
      continue;
    }
    chunk.block_table = pinned.table;
    pool = pinned.pool;
    pinned_chunks_.push_back(chunk);
  }
  flush();
}

// attended [rows of `chunks`][H*d]: what each query takes from the keys before it. Rows that are
// under no policy, or that it leaves dense, read all keys that the layer lets them see; the others read what they choose.
void Decoder::Attend(int32_t index, std::span<const AttentionChunk> chunks, bool logits_only) {
  if (chunks.empty()) return;
  const Tensor q = qkv_.ColRange(0, int64_t{config_.num_heads} * config_.head_dim);
  const float scale = config_.AttentionScale();
  const float* const sinks = Floats(layers_[index].sinks);
  memory_->Unpin();
  pinned_chunks_.clear();
  const void* pool = nullptr;
  const auto flush = [&] {
    if (!pinned_chunks_.empty()) {
      backend_.Attend(q, pinned_chunks_, pool, plan_.layout, scale, attended_);
    }
    pinned_chunks_.clear();
  };
  const std::span<const AttentionChunk> dense =
      retrieval_->any_retrieves() ? retrieval_->DenseChunks(index, chunks) : chunks;
  for (size_t i = 0; i < dense.size(); ++i) {
    AttentionChunk chunk = dense[i];
    const int32_t c = chunk_of_row_[chunk.first_row];
    chunk.window = config_.layers[index].window;
    chunk.sinks = sinks;
    const int32_t first = chunk.FirstRead() / plan_.layout.block_tokens;
    const int32_t last = (chunk.position + chunk.num_tokens - 1) / plan_.layout.block_tokens + 1;
    PinnedBlocks pinned;
    if (!memory_->Pin(c, index, chunk.block_table, first, last, &tables_[i], &pinned, flush)) {
      continue;
    }
    if (memory_->places().IsShared(index)) {
      memory_->CountRead(c, (last - first) * plan_.layout.BlockBytes(), /*from_disk=*/false);
    }
    chunk.block_table = pinned.table;
    pool = pinned.pool;
    pinned_chunks_.push_back(chunk);
  }
  flush();
  if (retrieval_->any_retrieves()) retrieval_->Attend(index, q, logits_only, sinks, attended_);
}

// attended → hidden, then the mlp, for a run of rows.
// hidden += attended · Woᵀ + bias, or the norm of it
void Decoder::AddAttended(int32_t index, RowRun rows) {
  const Layer& layer = layers_[index];
  const PackedMatrix& o = *pass_->layers[index].o;
  const Tensor attended = attended_.RowRange(rows.first, rows.count),
               hidden = hidden_.RowRange(rows.first, rows.count);
  if (layer.attention_out_norm.data() == nullptr) {
    backend_.Matmul(attended, o, hidden, {.bias = Floats(layer.o_bias), .accumulate = true});
    return;
  }
  const Tensor given = normed_.RowRange(rows.first, rows.count);
  backend_.Matmul(attended, o, given, {.bias = Floats(layer.o_bias)});
  backend_.AddRmsNorm(given, Floats(layer.attention_out_norm), config_.rms_norm_eps, hidden);
}

void Decoder::AddMlp(int32_t index, RowRun rows) {
  const Layer& layer = layers_[index];
  const Products& products = pass_->layers[index];
  const bool has_experts = config_.layers[index].mlp == LayerSpec::Mlp::kExperts;
  const int64_t width =
      has_experts ? config_.experts.WidestIntermediate() : config_.intermediate_size;
  const Tensor hidden = hidden_.RowRange(rows.first, rows.count);
  const Tensor normed = normed_.RowRange(rows.first, rows.count);
  const Tensor gate_up = gate_up_.RowRange(rows.first, rows.count).ColRange(0, 2 * width);
  const Tensor activated = activated_.RowRange(rows.first, rows.count).ColRange(0, width);

  if (has_experts) {
    // hidden += the experts of norm(hidden)
    backend_.RmsNorm(hidden, Floats(layer.mlp_norm), hidden_eps_, normed);
    expert_mlp_->Add(products.experts, normed, gate_up, activated, hidden);
    return;
  }
  if (layer.mlp_out_norm.data() != nullptr) {
    // gate_up [rows][2*intermediate] = hidden · Wᵀ + bias, or norm(hidden) · Wᵀ + bias
    Project(hidden, layer.mlp_norm, *products.gate_up, layer.gate_up_bias, normed, gate_up);
    // hidden += norm((silu(gate) * up) · Wdownᵀ + bias), or of gelu
    const kernels::MatmulEpilogue epilogue = {.bias = Floats(layer.down_bias)};
    if (config_.layers[index].mlp == LayerSpec::Mlp::kGatedGelu) {
      backend_.GeluTanhMul(gate_up, activated);
      backend_.Matmul(activated, *products.down, normed, epilogue);
    } else {
      backend_.SiluMatmul(gate_up, *products.down, activated, normed, epilogue);
    }
    backend_.AddRmsNorm(normed, Floats(layer.mlp_out_norm), config_.rms_norm_eps, hidden);
    return;
  }
  // gate_up [rows][2*intermediate] = norm(hidden) · Wᵀ + bias
  // hidden += (silu(gate) * up) · Wdownᵀ + bias
  backend_.GatedMlp({.hidden = hidden,
                     .norm_weight = Floats(layer.mlp_norm),
                     .eps = hidden_eps_,
                     .gate_up = *products.gate_up,
                     .gate_up_bias = Floats(layer.gate_up_bias),
                     .down = *products.down,
                     .down_bias = Floats(layer.down_bias),
                     .normed = normed,
                     .gate_rows = gate_up,
                     .activated = activated});
}

// ---- set-up ----

Decoder::Decoder(const ModelConfig& config, kernels::Backend& backend,
                 const DecoderOptions& options, const KvPlan& plan)
    : config_(WithServedContext(config, ContextOf(config, options))),
      embedding_scale_(
          static_cast<float>(config.embedding_multiplier / config.residual_multiplier)),
      hidden_eps_(static_cast<float>(config.rms_norm_eps /
                                     (config.residual_multiplier * config.residual_multiplier))),
      backend_(backend),
      options_(options),
      plan_(plan) {
  for (int32_t set = 0; set < static_cast<int32_t>(config_.ropes.size()); ++set) {
    rotations_.push_back(
        {.rope = ComputeRope(config_, set), .query_scaling = config_.ropes[set].query_scaling});
  }
  // The last one turns nothing, for layers without RoPE: kernels need not know of them.
  if (std::any_of(config_.layers.begin(), config_.layers.end(),
                  [](const LayerSpec& layer) { return layer.rope == LayerSpec::kNoRope; })) {
    rotations_.push_back({.rope = ComputeRope(config_, LayerSpec::kNoRope)});
  }
  options_.max_context = ContextOf(config, options);
}

const Decoder::Rotation& Decoder::RotationOf(int32_t layer) const {
  const int32_t set = config_.layers[layer].rope;
  return set == LayerSpec::kNoRope ? rotations_.back() : rotations_[set];
}

Decoder::~Decoder() = default;

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(const ModelConfig& config,
                                                         const Weights& weights,
                                                         kernels::Backend& backend,
                                                         const DecoderOptions& options) {
  WINNOW_ASSIGN_OR_RETURN(const KvPlan plan, PlanKv(config, options));
  return Create(config, weights, backend, options, plan);
}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(const ModelConfig& config,
                                                         const Weights& weights,
                                                         kernels::Backend& backend,
                                                         const DecoderOptions& options,
                                                         const KvPlan& plan) {
  WINNOW_CHECK(plan.num_layers() == config.num_layers() && plan.residency == options.residency);
  WINNOW_RETURN_IF_ERROR(CheckLayers(config.layers, static_cast<int32_t>(config.ropes.size())));
  if (const std::string refusal = backend.Refusal(plan.layout, config.num_heads);
      !refusal.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("device: {} does not run {}; --device cpu does", backend.name(), refusal));
  }
  std::unique_ptr<Decoder> decoder(new Decoder(config, backend, options, plan));
  WINNOW_RETURN_IF_ERROR(decoder->PackWeights(weights));
  WINNOW_RETURN_IF_ERROR(decoder->AllocatePools());
  WINNOW_RETURN_IF_ERROR(decoder->DeviceStatus());
  // A device's operations take memory of their own. What lies beside it was checked before, but not
  // scratch; better refused here than found missing in a step.
  if (backend.AvailableBytes() == 0) {
    return absl::ResourceExhaustedError(fmt::format(
        "too little memory is left for what steps need on {}: the weights take {} bytes, KV "
        "(kv_bytes) {}, what KV in the host's memory needs there (row_cache_bytes) {}, the indexes "
        "beside it (index) {}, the summaries of completion (max_running) {}, and scratch "
        "(step_tokens, max_running) {}",
        backend.name(), decoder->weight_bytes() + decoder->draft_weight_bytes(),
        decoder->kv_pool_bytes() - decoder->shared_kv_bytes(), decoder->shared_kv_sizes().total(),
        decoder->index_bytes(), decoder->summary_bytes(), decoder->scratch_bytes()));
  }
  return decoder;
}

absl::Status Decoder::CheckFinite(const HostMatrix& values, const void* tensor, int64_t first_row) {
  const std::optional<int64_t> index = FindNonFinite(values);
  if (!index.has_value()) return absl::OkStatus();
  const int64_t row = *index / values.cols, col = *index % values.cols;
  return NonFiniteError(config_, *packing_, tensor, first_row + row, col,
                        kernels::ElementOf(values, row, col));
}

absl::Status Decoder::CheckFiniteRows(const WeightMatrix& matrix) {
  if (matrix.IsPlain()) return CheckFinite(matrix.host(), matrix.data, matrix.first_row);
  std::vector<float> row(matrix.cols);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    matrix.WidenRow(i, row.data());
    WINNOW_RETURN_IF_ERROR(
        CheckFinite({row.data(), DType::kF32, 1, matrix.cols}, matrix.data, matrix.first_row + i));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> Decoder::PackWide(
    const WeightSet& set, std::span<const WeightMatrix> parts) {
  // Copies live until their product's weights are packed: memory is bounded by the largest of these.
  std::vector<std::unique_ptr<std::byte[]>> copies(parts.size());
  std::vector<HostMatrix> matrices(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    WINNOW_ASSIGN_OR_RETURN(matrices[i], HostMatrixOf(parts[i], set.compute, &copies[i]));
    WINNOW_RETURN_IF_ERROR(CheckFinite(matrices[i], parts[i].data, parts[i].first_row));
  }
  return backend_.Pack(matrices, set.compute);
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> Decoder::PackStored(
    const WeightSet& set, std::span<const WeightMatrix> parts, bool is_output) {
  for (const WeightMatrix& part : parts) WINNOW_RETURN_IF_ERROR(CheckFiniteRows(part));
  WINNOW_ASSIGN_OR_RETURN(const StoredParts stored, StoredPartsOf(set.storage, parts, is_output));
  return backend_.PackStored(stored.parts, set.compute);
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> Decoder::Pack(WeightSet& set,
                                                            std::span<const WeightMatrix> parts,
                                                            const char* what, bool is_output) {
  WINNOW_ASSIGN_OR_RETURN(
      std::unique_ptr<PackedMatrix> packed,
      IsStored(set.storage, parts) ? PackStored(set, parts, is_output) : PackWide(set, parts));
  if (packed == nullptr) {
    int64_t values = 0;
    for (const WeightMatrix& part : parts) values += part.rows * part.cols;
    return absl::ResourceExhaustedError(
        fmt::format("no memory for {}: {} bytes", what,
                    values * static_cast<int64_t>(kernels::DTypeBytes(set.compute))));
  }
  set.bytes += packed->size_bytes();
  return packed;
}

absl::StatusOr<Buffer> Decoder::WidenNorm(const WeightMatrix& weight, float divisor) {
  return Widen({{weight}}, "a norm", config_.norms_add_one ? 1 : 0, divisor);
}

// One float32 vector on the device of the parts in turn, with `summand` added and then divided by `divisor`; empty if the parts
// are absent.
absl::StatusOr<Buffer> Decoder::Widen(std::span<const WeightMatrix> parts, const char* what,
                                      float summand, float divisor) {
  std::vector<float> values;
  for (const WeightMatrix& part : parts) {
    if (part.data == nullptr) continue;
    for (int64_t row = 0; row < part.rows; ++row) {
      values.resize(values.size() + part.cols);
      part.WidenRow(row, values.data() + values.size() - part.cols);
    }
    const int64_t count = part.rows * part.cols;
    const HostMatrix widened{values.data() + values.size() - count, DType::kF32, 1, count};
    WINNOW_RETURN_IF_ERROR(CheckFinite(widened, part.data));
  }
  if (values.empty()) return Buffer();
  for (float& value : values) value = (value + summand) / divisor;
  const size_t size_bytes = values.size() * sizeof(float);
  Buffer buffer = backend_.Allocate(size_bytes);
  if (buffer.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for {}: {} bytes", what, size_bytes));
  }
  backend_.CopyToDevice(values.data(), buffer.data(), size_bytes);
  weight_bytes_ += size_bytes;
  return buffer;
}

absl::Status Decoder::PackWeights(const Weights& weights) {
  WINNOW_CHECK(static_cast<int32_t>(weights.layers.size()) == config_.num_layers());
  packing_ = &weights;
  const absl::Cleanup done = [this] { packing_ = nullptr; };
  embedding_ = weights.embedding;
  if (!embedding_.IsPlain()) {
    embedded_rows_.resize(static_cast<size_t>(options_.max_batch_tokens) * embedding_.cols);
    row_numbers_.resize(options_.max_batch_tokens);
    std::iota(row_numbers_.begin(), row_numbers_.end(), 0);
    scratch_bytes_ += embedded_rows_.size() * sizeof(float);
  }
  // A tied one is checked where it is packed, as the output embedding.
  if (embedding_.data != weights.lm_head.data) WINNOW_RETURN_IF_ERROR(CheckFiniteRows(embedding_));

  weights_.storage = options_.weights;
  weights_.compute = options_.compute;
  std::vector<WeightSet*> sets = {&weights_};
  if (options_.draft_weights.has_value()) {
    draft_weights_.storage = *options_.draft_weights;
    draft_weights_.compute = options_.draft_compute;
    sets.push_back(&draft_weights_);
  }
  for (WeightSet* set : sets) set->layers.resize(weights.layers.size());
  layers_.resize(weights.layers.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (options_.on_packing) options_.on_packing(i, layers_.size());
    const LayerWeights& from = weights.layers[i];
    Layer& to = layers_[i];
    WINNOW_ASSIGN_OR_RETURN(to.attention_norm, WidenNorm(from.attention_norm));
    WINNOW_ASSIGN_OR_RETURN(to.qkv_bias,
                            Widen({{from.q_bias, from.k_bias, from.v_bias}}, "biases"));
    WINNOW_ASSIGN_OR_RETURN(to.q_norm, WidenNorm(from.q_norm));
    WINNOW_ASSIGN_OR_RETURN(to.k_norm, WidenNorm(from.k_norm));
    WINNOW_ASSIGN_OR_RETURN(to.o_bias, Widen({{from.o_bias}}, "biases"));
    WINNOW_ASSIGN_OR_RETURN(to.sinks, Widen({{from.sinks}}, "sinks"));
    WINNOW_ASSIGN_OR_RETURN(to.attention_out_norm, WidenNorm(from.attention_out_norm));
    WINNOW_ASSIGN_OR_RETURN(to.mlp_norm, WidenNorm(from.mlp_norm));
    WINNOW_ASSIGN_OR_RETURN(to.mlp_out_norm, WidenNorm(from.mlp_out_norm));
    if (config_.layers[i].mlp != LayerSpec::Mlp::kExperts) {
      WINNOW_ASSIGN_OR_RETURN(to.gate_up_bias, Widen({{from.gate_bias, from.up_bias}}, "biases"));
      WINNOW_ASSIGN_OR_RETURN(to.down_bias, Widen({{from.down_bias}}, "biases"));
    }
    for (WeightSet* set : sets) {
      WINNOW_RETURN_IF_ERROR(PackProducts(from, static_cast<int32_t>(i), *set));
    }
  }
  // Logits are linear in the final norm's weights, so these take their divisor.
  WINNOW_ASSIGN_OR_RETURN(
      final_norm_, WidenNorm(weights.final_norm, static_cast<float>(config_.logits_scaling)));
  for (WeightSet* set : sets) {
    WINNOW_ASSIGN_OR_RETURN(
        set->lm_head, Pack(*set, {{weights.lm_head}}, "the output embedding", /*is_output=*/true));
  }
  return absl::OkStatus();
}

absl::Status Decoder::PackProducts(const LayerWeights& from, int32_t index, WeightSet& to) {
  Products& products = to.layers[index];
  WINNOW_ASSIGN_OR_RETURN(products.qkv,
                          Pack(to, {{from.q, from.k, from.v}}, "the Q, K and V projections"));
  WINNOW_ASSIGN_OR_RETURN(products.o, Pack(to, {{from.o}}, "the output projection"));
  if (config_.layers[index].mlp == LayerSpec::Mlp::kExperts) {
    if (&to == &draft_weights_) {
      products.experts = ExpertMlp::LayerBeside(weights_.layers[index].experts);
    } else {
      WINNOW_RETURN_IF_ERROR(PackRouting(from, &products.experts));
    }
    WINNOW_RETURN_IF_ERROR(PackExperts(from, to, &products.experts));
    if (config_.experts.shared_intermediate_size == 0) return absl::OkStatus();
    ExpertMlp::Expert& shared = products.experts.shared;
    WINNOW_ASSIGN_OR_RETURN(shared.gate_up,
                            Pack(to, {{from.gate, from.up}}, "the shared expert's gate and up"));
    WINNOW_ASSIGN_OR_RETURN(shared.down,
                            Pack(to, {{from.down}}, "the shared expert's down projection"));
    return absl::OkStatus();
  }
  WINNOW_ASSIGN_OR_RETURN(products.gate_up,
                          Pack(to, {{from.gate, from.up}}, "the gate and up projections"));
  WINNOW_ASSIGN_OR_RETURN(products.down, Pack(to, {{from.down}}, "the down projection"));
  return absl::OkStatus();
}

// Router and biases.
absl::Status Decoder::PackRouting(const LayerWeights& from, ExpertMlp::Layer* to) {
  WINNOW_ASSIGN_OR_RETURN(to->router, PackRouter(from.router));
  WINNOW_ASSIGN_OR_RETURN(to->router_bias, Widen({{from.router_bias}}, "biases"));
  WINNOW_ASSIGN_OR_RETURN(to->correction, Widen({{from.correction}}, "biases"));
  if (from.shared_gating.data != nullptr) {
    WINNOW_ASSIGN_OR_RETURN(to->shared_gating, PackRouter(from.shared_gating));
  }
  const size_t before = weight_bytes_;
  std::vector<WeightMatrix> gate_up_biases, down_biases;
  for (const ExpertWeights& expert : from.experts) {
    gate_up_biases.push_back(expert.gate_bias);
    gate_up_biases.push_back(expert.up_bias);
    down_biases.push_back(expert.down_bias);
  }
  WINNOW_ASSIGN_OR_RETURN(to->gate_up_bias, Widen(gate_up_biases, "biases of experts"));
  WINNOW_ASSIGN_OR_RETURN(to->down_bias, Widen(down_biases, "biases of experts"));
  expert_weight_bytes_ += weight_bytes_ - before;
  return absl::OkStatus();
}

// REQUIRES: `to` has its router and biases.
absl::Status Decoder::PackExperts(const LayerWeights& from, WeightSet& set, ExpertMlp::Layer* to) {
  WINNOW_CHECK(static_cast<int32_t>(from.experts.size()) == config_.experts.count);
  const size_t before = set.bytes;
  for (const ExpertWeights& expert : from.experts) {
    ExpertMlp::Expert& packed = to->experts.emplace_back();
    WINNOW_ASSIGN_OR_RETURN(packed.gate_up,
                            Pack(set, {{expert.gate, expert.up}}, "an expert's gate and up"));
    WINNOW_ASSIGN_OR_RETURN(packed.down, Pack(set, {{expert.down}}, "an expert's down projection"));
  }
  std::vector<kernels::ExpertMatrices> matrices;
  for (int32_t expert = 0; expert < config_.experts.count; ++expert) {
    matrices.push_back(ExpertMlp::MatricesOf(*to, expert));
  }
  to->set = backend_.MakeExpertSet(matrices);
  if (&set == &weights_) expert_weight_bytes_ += set.bytes - before;
  return absl::OkStatus();
}

// Products of routers are exact in every form of weights: what they choose between may lie close together, and they are a
// thousandth of a model.
absl::StatusOr<std::unique_ptr<PackedMatrix>> Decoder::PackRouter(const WeightMatrix& router) {
  WINNOW_RETURN_IF_ERROR(CheckFiniteRows(router));
  std::unique_ptr<std::byte[]> copy;
  WINNOW_ASSIGN_OR_RETURN(const HostMatrix values, HostMatrixOf(router, DType::kF32, &copy));
  std::unique_ptr<PackedMatrix> packed = backend_.Pack({{values}}, DType::kF32);
  if (packed == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for a router: {} bytes", router.rows * router.cols * sizeof(float)));
  }
  weight_bytes_ += packed->size_bytes();
  return packed;
}

absl::StatusOr<Tensor> Decoder::AllocateScratch(int64_t rows, int64_t cols, const char* what) {
  const size_t size_bytes = static_cast<size_t>(rows) * cols * sizeof(float);
  Buffer buffer = backend_.Allocate(size_bytes);
  if (buffer.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for {}: {} bytes", what, size_bytes));
  }
  scratch_bytes_ += size_bytes;
  scratch_.push_back(std::move(buffer));
  return Tensor{scratch_.back().data(), DType::kF32, rows, cols, cols};
}

absl::Status Decoder::AllocatePools() {
  WINNOW_ASSIGN_OR_RETURN(memory_, KvMemory::Create(backend_, plan_,
                                                    {.store = options_.store,
                                                     .write_through = options_.write_through,
                                                     .names = options_.names}));
  WINNOW_ASSIGN_OR_RETURN(
      retrieval_, RetrievalAttention::Create(config_, *memory_, options_.max_context, backend_,
                                             options_.retrieval, options_.rows));
  scratch_bytes_ += retrieval_->scratch_bytes();

  const int64_t tokens = options_.max_batch_tokens;
  const int64_t d = config_.head_dim;
  const int64_t heads = config_.num_heads;
  const int64_t kv_heads = config_.num_kv_heads;
  const int64_t hidden = config_.hidden_size;
  const int64_t qkv_width = (heads + 2 * kv_heads) * d;
  int64_t intermediate = 0, gate_up_width = 0;
  if (config_.NumLayersOf(LayerSpec::Mlp::kExperts) < config_.num_layers()) {
    intermediate = config_.intermediate_size;
  }
  gate_up_width = 2 * intermediate;
  if (config_.NumLayersOf(LayerSpec::Mlp::kExperts) > 0) {
    intermediate = std::max<int64_t>(intermediate, config_.experts.WidestIntermediate());
    // Experts are narrow, and queries that are predicted must find room, too.
    gate_up_width = std::max(2 * intermediate, qkv_width);
    WINNOW_ASSIGN_OR_RETURN(expert_mlp_, ExpertMlp::Create(config_, backend_, tokens));
    scratch_bytes_ += expert_mlp_->scratch_bytes();
  }
  WINNOW_ASSIGN_OR_RETURN(hidden_, AllocateScratch(tokens, hidden, "hidden states"));
  WINNOW_ASSIGN_OR_RETURN(normed_, AllocateScratch(tokens, hidden, "normed states"));
  WINNOW_ASSIGN_OR_RETURN(qkv_, AllocateScratch(tokens, qkv_width, "q, k and v"));
  for (Rotation& rotation : rotations_) {
    WINNOW_ASSIGN_OR_RETURN(rotation.cos_sin, AllocateScratch(tokens, d, "the rotation table"));
    rotation.q_cos_sin = rotation.cos_sin;
    if (rotation.query_scaling.beta == 0) continue;
    WINNOW_ASSIGN_OR_RETURN(rotation.q_cos_sin,
                            AllocateScratch(tokens, d, "the rotation table of queries"));
  }
  WINNOW_ASSIGN_OR_RETURN(attended_, AllocateScratch(tokens, heads * d, "attention's output"));
  WINNOW_ASSIGN_OR_RETURN(gate_up_, AllocateScratch(tokens, gate_up_width, "gate and up"));
  WINNOW_ASSIGN_OR_RETURN(activated_, AllocateScratch(tokens, intermediate, "activations"));
  WINNOW_ASSIGN_OR_RETURN(last_, AllocateScratch(options_.max_batch_logits, hidden, "last states"));
  WINNOW_ASSIGN_OR_RETURN(logits_,
                          AllocateScratch(options_.max_batch_logits, config_.vocab_size, "logits"));
  sampled_ = backend_.AllocateShared(options_.max_batch_tokens * sizeof(SampledToken));
  if (sampled_.data() == nullptr) {
    return absl::ResourceExhaustedError("no memory for sampled tokens");
  }

  ids_.reserve(tokens);
  positions_.reserve(tokens);
  query_factors_.reserve(tokens);
  chunks_.reserve(tokens);
  logit_chunks_.reserve(tokens);
  logit_runs_.reserve(tokens);
  chunk_of_row_.reserve(tokens);
  pinned_chunks_.reserve(2 * tokens);
  tables_.resize(2 * tokens);  // a chunk's dense rows are at most two runs
  block_written_in_.assign(plan_.num_blocks, 0);
  return absl::OkStatus();
}

void Decoder::FillKvWithNoise(uint64_t seed) {
  // Values in [-1, 1): finite and not denormal, like what a model writes. Repeated only after so many
  // tokens of a layer that equal keys are no large part of what a policy chooses.
  const size_t row_bytes = plan_.layout.RowBytes();
  std::vector<std::byte> noise(std::min(kNoiseBytes, memory_->places().size_bytes()) / row_bytes *
                               row_bytes);
  uint64_t state = seed * 2862933555777941757u + 3037000493u;
  kernels::FillKvRows(plan_.layout, noise.data(), noise.size(), [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
  });
  const auto fill = [&](std::byte* pool, size_t bytes) {
    for (size_t offset = 0; offset < bytes; offset += noise.size()) {
      backend_.CopyToDevice(noise.data(), pool + offset, std::min(noise.size(), bytes - offset));
    }
  };
  if (memory_->tiered()) {
    for (const std::span<std::byte> pool : memory_->places().all()) fill(pool.data(), pool.size());
    return;
  }
  for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
    fill(memory_->places().LayerPool(layer), memory_->places().LayerPoolBytes());
  }
}

}  // namespace winnow::engine
