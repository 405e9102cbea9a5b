#include "engine/transform_fit_run.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/retrieval/transform_fit_cache.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "kernels/kv_row.h"
#include "kernels/thread_pool.h"
#include "kernels/transform_code.h"

namespace winnow::engine {
namespace {

using kernels::Tensor;

constexpr int32_t kSink = 16;
constexpr int32_t kQueryStride = 4;
constexpr int32_t kServedContextMost = 131072;  // positions are spread up to here
constexpr int32_t kTokensLeast = 256;           // of a window
constexpr int32_t kJudgedQueries = 12;          // of each window, for the tail

// What the forward passes leave.
struct Capture {
  int32_t window = 0, windows = 0;
  // Queries of every fourth position: [layers][windows * window / kQueryStride][H * d].
  std::vector<std::vector<float>> queries;
};

class FitRun {
 public:
  FitRun(const ModelConfig& config, kernels::Backend& backend, const DecoderOptions& options)
      : config_(config), backend_(backend) {
    options_.compute = options.compute;
    options_.kv_dtype = options.kv_dtype;
    options_.block_tokens = options.block_tokens;
    options_.max_batch_tokens = std::min(options.max_batch_tokens, 512);
    options_.max_batch_logits = 1;
    // Of the model, and not of this start: one fit serves them all.
    served_context_ = std::min(config.max_position_embeddings, kServedContextMost);
    if (config.attention_multiplier) logit_divisor_ = 1 / *config.attention_multiplier;
  }

  absl::Status Run(const Weights& weights, std::span<const int32_t> tokens, const Clock& clock,
                   Duration budget, const std::function<void(double)>& progress) {
    const int32_t context = served_context_;
    capture_.window = std::min({kFitWindow, context, static_cast<int32_t>(tokens.size())}) /
                      options_.block_tokens * options_.block_tokens;
    if (capture_.window < kTokensLeast) {
      return absl::InvalidArgumentError(
          fmt::format("a window of {} tokens is too short to fit transform codes on; {} are needed",
                      capture_.window, kTokensLeast));
    }
    const auto whole = static_cast<int32_t>(std::min<size_t>(kFitTokens, tokens.size()) /
                                            static_cast<size_t>(capture_.window));
    const kernels::KvLayout layout{config_.num_kv_heads, config_.head_dim, options_.block_tokens,
                                   options_.kv_dtype};
    options_.max_context = capture_.window;
    options_.kv_bytes = int64_t{1} * whole * capture_.window / options_.block_tokens *
                        static_cast<int64_t>(layout.BlockBytes()) * config_.num_layers();
    WINNOW_ASSIGN_OR_RETURN(decoder_, Decoder::Create(config_, weights, backend_, options_));
    capture_.queries.resize(config_.num_layers());
    decoder_->ObserveQueries([this](int32_t layer, const Tensor& q) { Keep(layer, q); });
    const TimePoint start = clock.Now();
    for (; capture_.windows < whole; ++capture_.windows) {
      if (capture_.windows > 0 && clock.Now() - start > budget) break;
      WINNOW_RETURN_IF_ERROR(RunWindow(
          tokens.subspan(size_t{1} * capture_.windows * capture_.window, capture_.window)));
      if (progress) progress(0.7 * (capture_.windows + 1) / whole);
    }
    return absl::OkStatus();
  }

  // Every head of every layer.
  absl::StatusOr<TransformFit> Fit(int32_t bits, const std::function<void(double)>& progress) {
    TransformFit fit;
    fit.bits = bits;
    fit.sample_tokens = capture_.windows * capture_.window;
    TransformFitOptions options;
    options.head_dim = config_.head_dim;
    options.bits = bits;
    options.served_context = served_context_;
    options.logit_divisor = logit_divisor_;
    const int32_t kv_heads = config_.num_kv_heads;
    std::vector<std::vector<TransformHeadFit>> fits;
    TailErrors all;
    kernels::ThreadPool threads(kernels::UsableProcessors());
    for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
      ReadLayer(layer);
      options.inv_freq = ComputeRope(config_, config_.layers[layer].rope).inv_freq;
      std::vector<absl::StatusOr<TransformHeadFit>> made(
          kv_heads, absl::StatusOr<TransformHeadFit>(absl::UnknownError("")));
      std::vector<TailErrors> errors(kv_heads);
      threads.ParallelFor(kv_heads, [&](int64_t head, int) {
        const auto kv_head = static_cast<int32_t>(head);
        TransformFitOptions of_head = options;
        of_head.seed = static_cast<uint64_t>(layer) << 32 | static_cast<uint64_t>(head);
        made[head] = FitTransformHead(SampleOf(layer, kv_head), of_head);
        if (!made[head].ok()) return;
        for (int32_t window = 0; window < capture_.windows; ++window) {
          errors[head] += MeasureTail(WindowOf(layer, kv_head, window), *made[head]);
        }
      });
      std::vector<TransformHeadFit>& of_layer = fits.emplace_back();
      for (int32_t head = 0; head < kv_heads; ++head) {
        if (!made[head].ok()) {
          return absl::InvalidArgumentError(
              fmt::format("transform codes cannot be fitted to layer {}, KV head {}: {}", layer,
                          head, std::string(made[head].status().message())));
        }
        of_layer.push_back(*std::move(made[head]));
        tails_.push_back(errors[head]);
        all += errors[head];
      }
      if (progress) progress(0.7 + 0.3 * (layer + 1) / config_.num_layers());
    }
    // Whether delta helps is the model's matter, whether a tail does each head's.
    const bool with_delta = all.delta < all.tail;
    for (size_t layer = 0; layer < fits.size(); ++layer) {
      kernels::TransformCodeWeights& weights = fit.layers.emplace_back();
      weights.head_dim = config_.head_dim;
      weights.bits = bits;
      kernels::TransformCodeWeights& residual = fit.residuals.emplace_back();
      residual.head_dim = config_.head_dim;
      residual.bits = bits;
      for (size_t head = 0; head < fits[layer].size(); ++head) {
        const TailErrors& errors = tails_[layer * kv_heads + head];
        TransformHeadFit& of_head = fits[layer][head];
        of_head.head.tail =
            errors.outputs > 0 && (with_delta ? errors.delta : errors.tail) < errors.none;
        if (with_delta) of_head.head.delta_weight = std::move(of_head.delta_weight);
        weights.heads.push_back(std::move(of_head.head));
        residual.heads.push_back(std::move(of_head.residual));
      }
      std::string wrong = kernels::CheckTransformCode(weights);
      if (wrong.empty()) wrong = kernels::CheckResidualCode(weights, residual);
      if (!wrong.empty()) {
        return absl::InvalidArgumentError(
            fmt::format("transform codes cannot be fitted to layer {}: the code {}", layer, wrong));
      }
    }
    fit.id = TransformFitId(fit);
    return fit;
  }

 private:
  absl::Status RunWindow(std::span<const int32_t> tokens) {
    std::vector<int32_t> table(capture_.window / options_.block_tokens);
    std::iota(table.begin(), table.end(), capture_.windows * static_cast<int32_t>(table.size()));
    for (int32_t first = 0; first < capture_.window;) {
      const int32_t count = std::min(options_.max_batch_tokens, capture_.window - first);
      position_ = first;
      Batch batch;
      batch.chunks = {
          {.tokens = tokens.subspan(first, count), .position = first, .block_table = table}};
      WINNOW_RETURN_IF_ERROR(decoder_->Forward(batch, {}));
      first += count;
    }
    return absl::OkStatus();
  }

  void Keep(int32_t layer, const Tensor& q) {
    std::vector<float>& kept = capture_.queries[layer];
    std::vector<float> rows(static_cast<size_t>(q.cols));
    for (int64_t row = 0; row < q.rows; ++row) {
      if ((position_ + row) % kQueryStride != 0) continue;
      backend_.CopyToHost(q.f32(row), rows.data(), rows.size() * sizeof(float));
      kept.insert(kept.end(), rows.begin(), rows.end());
    }
  }

  // The layer's blocks in the host's memory.
  void ReadLayer(int32_t layer) {
    const size_t block_bytes = decoder_->kv_layout().BlockBytes();
    const size_t blocks = size_t{1} * capture_.windows * capture_.window / options_.block_tokens;
    layer_kv_.resize(blocks * block_bytes);
    backend_.CopyToHost(decoder_->kv_memory()->places().LayerPool(layer), layer_kv_.data(),
                        layer_kv_.size());
  }
  void AddRow(int32_t kv_head, int32_t window, int32_t token, bool value,
              std::vector<float>& to) const {
    const kernels::KvLayout& layout = decoder_->kv_layout();
    const int32_t at = window * capture_.window + token;
    const std::byte* row = layer_kv_.data() + layout.RowOffset(at / layout.block_tokens, kv_head,
                                                               at % layout.block_tokens);
    for (int32_t c = 0; c < layout.head_dim; ++c) {
      to.push_back(value ? kernels::ValueAt(row, layout, c) : kernels::KeyAt(row, layout, c));
    }
  }
  // Of query head `g` of the group at the sampled position `i` of a window.
  const float* Query(int32_t layer, int32_t kv_head, int32_t window, int32_t i, int32_t g) const {
    const int32_t group = config_.num_heads / config_.num_kv_heads;
    const int64_t row = int64_t{window} * (capture_.window / kQueryStride) + i;
    return &capture_.queries[layer][(row * config_.num_heads + int64_t{kv_head} * group + g) *
                                    config_.head_dim];
  }

  TransformSample SampleOf(int32_t layer, int32_t kv_head) const {
    TransformSample sample;
    const int32_t group = config_.num_heads / config_.num_kv_heads, d = config_.head_dim;
    for (int32_t window = 0; window < capture_.windows; ++window) {
      for (int32_t token = kSink; token < capture_.window; ++token) {
        AddRow(kv_head, window, token, /*value=*/false, sample.keys);
        sample.key_positions.push_back(token);
      }
      for (int32_t i = kSink / kQueryStride; i < capture_.window / kQueryStride; ++i) {
        for (int32_t g = 0; g < group; ++g) {
          const float* q = Query(layer, kv_head, window, i, g);
          sample.queries.insert(sample.queries.end(), q, q + d);
          sample.query_positions.push_back(i * kQueryStride);
        }
      }
    }
    return sample;
  }

  TransformWindow WindowOf(int32_t layer, int32_t kv_head, int32_t window) const {
    TransformWindow out;
    const int32_t d = config_.head_dim;
    out.tokens = capture_.window;
    out.group = config_.num_heads / config_.num_kv_heads;
    out.logit_divisor = logit_divisor_;
    for (int32_t token = 0; token < capture_.window; ++token) {
      AddRow(kv_head, window, token, /*value=*/false, out.keys);
      AddRow(kv_head, window, token, /*value=*/true, out.values);
    }
    const int32_t sampled = capture_.window / kQueryStride;
    for (int32_t j = 0; j < kJudgedQueries; ++j) {
      const int32_t i = sampled / 2 + (sampled / 2 - 1) * j / (kJudgedQueries - 1);
      out.query_positions.push_back(i * kQueryStride);
      for (int32_t g = 0; g < out.group; ++g) {
        const float* q = Query(layer, kv_head, window, i, g);
        out.queries.insert(out.queries.end(), q, q + d);
      }
    }
    return out;
  }

  const ModelConfig& config_;
  kernels::Backend& backend_;
  DecoderOptions options_;
  int32_t served_context_ = 0;
  double logit_divisor_ = 0;
  std::unique_ptr<Decoder> decoder_;
  Capture capture_;
  int32_t position_ = 0;  // of the first row of the pass
  std::vector<std::byte> layer_kv_;
  std::vector<TailErrors> tails_;  // [layers][Hkv]
};

}  // namespace

absl::StatusOr<TransformFit> MakeTransformFit(const ModelConfig& config, const Weights& weights,
                                              std::span<const int32_t> tokens,
                                              kernels::Backend& backend,
                                              const DecoderOptions& options, int32_t bits,
                                              const Clock& clock, Duration budget,
                                              const std::function<void(double)>& progress) {
  FitRun run(config, backend, options);
  WINNOW_RETURN_IF_ERROR(run.Run(weights, tokens, clock, budget, progress));
  return run.Fit(bits, progress);
}

}  // namespace winnow::engine
