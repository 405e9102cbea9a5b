#include "engine/crossover.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <utility>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "engine/kv_planning.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/kv_row.h"

namespace winnow::engine {
namespace {

using kernels::Buffer;
using kernels::DType;
using kernels::Tensor;
using Kind = AttentionPolicy::Kind;

// Raise it when kernels become much faster, so that what was measured before is forgotten.
constexpr int kRevision = 1;

// At each length both sides run at least so often, and at least so long together.
constexpr int kRunsMin = 5;
constexpr Duration kTimeMin = std::chrono::milliseconds(20);
// Of the whole measurement; what has begun is finished.
constexpr Duration kBudget = std::chrono::milliseconds(1500);

// Finite values in [-1, 1), like what a model writes.
class Noise {
 public:
  float Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  uint64_t state_ = 1;
};

class BackendTimer final : public AttentionTimer {
 public:
  // What one decode step of one layer needs, and nothing else.
  static absl::StatusOr<std::unique_ptr<AttentionTimer>> Create(const ModelConfig& config,
                                                                const DecoderOptions& options,
                                                                const IndexSpec& index,
                                                                kernels::Backend& backend,
                                                                const Clock& clock) {
    auto timer = std::unique_ptr<BackendTimer>(new BackendTimer(config, options, backend, clock));
    const bool learned =
        options.retrieval.artifact != nullptr && options.retrieval.artifact->HasKind(index.kind);
    timer->layer_ = learned ? options.retrieval.artifact->layers(index.kind).front() : 0;
    ModelConfig layers = config;
    layers.layers.resize(timer->layer_ + 1);
    AttentionPolicy policy;
    policy.kind = index.kind;
    policy.bits = index.kind == Kind::kLsh ? index.bits : 0;
    policy.dense_layers = timer->layer_;
    policy.tail = index.kind != Kind::kPca;  // summaries have no place here
    policy.from = 0;
    const int32_t tokens = std::min(options.max_context, kCrossoverLast);
    const int32_t blocks = (tokens + options.block_tokens - 1) / options.block_tokens;
    RetrievalOptions retrieval;
    retrieval.artifact = options.retrieval.artifact;
    if (index.kind == Kind::kPca) retrieval.transform = options.retrieval.transform;
    retrieval.indexes = {index};
    retrieval.summaries = 0;
    // What spills lies in frames, where the host finds chosen rows. All have one here: nothing is put.
    const RowFetcherOptions rows = options.spills() ? options.rows : RowFetcherOptions();
    WINNOW_ASSIGN_OR_RETURN(
        timer->memory_, KvMemory::Create(backend, timer->PlanOf(config, options, blocks),
                                         {.store = options.spills() ? options.store : nullptr}));
    WINNOW_ASSIGN_OR_RETURN(
        timer->retrieval_,
        RetrievalAttention::Create(layers, *timer->memory_, tokens, backend, retrieval, rows));
    WINNOW_RETURN_IF_ERROR(timer->retrieval_->CheckPolicy(policy));
    WINNOW_ASSIGN_OR_RETURN(timer->state_, timer->retrieval_->NewState(policy));
    WINNOW_RETURN_IF_ERROR(timer->Allocate(blocks));
    return timer;
  }

  CrossoverSample Time(int32_t tokens) override {
    FillKv((tokens + layout_.block_tokens - 1) / layout_.block_tokens);
    const int32_t token = 0;
    const std::vector<SequenceChunk> chunks = {{.tokens = {&token, 1},
                                                .position = tokens - 1,
                                                .block_table = block_table_,
                                                .num_logits = 1,
                                                .retrieval = state_.get(),
                                                .retrieve_from = 0}};
    const std::vector<kernels::AttentionChunk> dense = {
        {.first_row = 0, .num_tokens = 1, .position = tokens - 1, .block_table = kv_.table}};
    const auto retrieve = [&] {
      backend_.BeginPass();
      memory_->BeginPass(chunks.size());
      retrieval_->Begin(chunks);
      retrieval_->Index(layer_);
      retrieval_->Attend(layer_, q_, /*logits_only=*/true, /*sinks=*/nullptr, out_);
      retrieval_->End();
    };
    retrieve();  // the keys before the last are indexed here, and not in a step
    CrossoverSample sample{tokens, kLongest, kLongest};
    Duration spent{};
    for (int run = 0; run < kRunsMin || spent < kTimeMin; ++run) {
      const TimePoint start = clock_.Now();
      backend_.Attend(q_, dense, kv_.pool, layout_, scale_, out_);
      static_cast<void>(backend_.Synchronize());  // a failed device fails what comes after, too
      const TimePoint middle = clock_.Now();
      retrieve();
      static_cast<void>(backend_.Synchronize());
      const TimePoint end = clock_.Now();
      sample.dense_seconds = std::min(sample.dense_seconds, Seconds(middle - start));
      sample.retrieval_seconds = std::min(sample.retrieval_seconds, Seconds(end - middle));
      spent += end - start;
    }
    return sample;
  }

 private:
  static constexpr double kLongest = std::numeric_limits<double>::max();
  static double Seconds(Duration duration) {
    return std::chrono::duration<double>(duration).count();
  }

  BackendTimer(const ModelConfig& config, const DecoderOptions& options, kernels::Backend& backend,
               const Clock& clock)
      : layout_{config.num_kv_heads, config.head_dim, options.block_tokens, options.kv_dtype},
        width_(int64_t{config.num_heads} * config.head_dim),
        scale_(config.AttentionScale()),
        backend_(backend),
        clock_(clock) {}

  // The measured layer lies where the model's layers under a policy do, and has its share of the cache.
  KvPlan PlanOf(const ModelConfig& config, const DecoderOptions& options, int32_t blocks) const {
    std::vector<KvPlacement> placements(static_cast<size_t>(layer_) + 1, KvPlacement::kFast);
    if (options.shared_kv_bytes == 0) {
      return PlanPools(ResidencyKind::kInPlace, layout_, placements, blocks);
    }
    placements.back() = options.spills() ? KvPlacement::kHostFrames : KvPlacement::kHost;
    KvPlan plan = options.spills()
                      ? PlanPools(ResidencyKind::kPaged, layout_, placements, blocks, blocks)
                      : PlanPools(ResidencyKind::kInPlace, layout_, placements, blocks);
    const auto layers = static_cast<size_t>(config.num_layers() - FirstSharedLayer());
    plan.shared.max_context = std::min(options.max_context, kCrossoverLast);
    plan.shared.max_batch_tokens = 1;
    plan.shared.cache_bytes = options.spills() ? 0 : options.rows.cache_bytes / layers;
    return plan;
  }

  absl::Status Allocate(int32_t blocks) {
    const size_t row_bytes = static_cast<size_t>(width_) * sizeof(float);
    q_memory_ = backend_.Allocate(row_bytes);
    out_memory_ = backend_.Allocate(row_bytes);
    if (q_memory_.data() == nullptr || out_memory_.data() == nullptr) {
      return absl::ResourceExhaustedError(
          fmt::format("no memory to measure attention with: {} bytes", 2 * row_bytes));
    }
    q_ = {q_memory_.data(), DType::kF32, 1, width_, width_};
    out_ = {out_memory_.data(), DType::kF32, 1, width_, width_};
    block_table_.resize(blocks);
    std::iota(block_table_.begin(), block_table_.end(), 0);
    Noise noise;
    std::vector<float> q(width_);
    for (float& value : q) value = noise.Next();
    backend_.CopyToDevice(q.data(), q_memory_.data(), row_bytes);
    // One block of noise, repeated: every block has memory of its own, and that is what counts.
    block_noise_.resize(layout_.BlockBytes());
    kernels::FillKvRows(layout_, block_noise_.data(), block_noise_.size(),
                        [&] { return noise.Next(); });
    return absl::OkStatus();
  }

  // Makes kv_ the first `blocks` of the layer, with noise in them.
  void FillKv(int32_t blocks) {
    memory_->BeginPass(1);
    const auto pinned = memory_->TryPin(0, layer_, block_table_, 0, blocks, &frames_, &kv_);
    WINNOW_CHECK(pinned == KvMemory::PinResult::kOk);
    for (; filled_blocks_ < blocks; ++filled_blocks_) {
      backend_.CopyToDevice(block_noise_.data(),
                            kv_.pool + kv_.table[filled_blocks_] * block_noise_.size(),
                            block_noise_.size());
    }
    memory_->Unpin();  // they stay: nobody needs their frames
  }

  const kernels::KvLayout layout_;
  const int64_t width_;  // of q and out: H*d
  const float scale_;
  kernels::Backend& backend_;
  const Clock& clock_;
  int32_t layer_ = 0;                 // that has functions
  std::unique_ptr<KvMemory> memory_;  // only the pages of layer_ are ever touched
  std::unique_ptr<RetrievalAttention> retrieval_;
  std::unique_ptr<RetrievalState> state_;
  PinnedBlocks kv_;  // of layer_
  std::vector<int32_t> frames_;
  Buffer q_memory_, out_memory_;
  Tensor q_, out_;  // [1][H*d]
  std::vector<int32_t> block_table_;
  std::vector<std::byte> block_noise_;
  int32_t filled_blocks_ = 0;
};

}  // namespace

Crossover FindCrossover(AttentionTimer& timer, int32_t max_tokens, const Clock& clock,
                        Duration budget) {
  const TimePoint end = clock.Now() + budget;
  const int32_t last = std::min(max_tokens, kCrossoverLast);
  Crossover result;
  const auto wins = [&](int32_t tokens) {
    const CrossoverSample& sample = result.samples.emplace_back(timer.Time(tokens));
    return sample.retrieval_seconds < sample.dense_seconds;
  };
  int32_t lost = 0, won = 0;
  for (int32_t tokens = kCrossoverFirst; tokens <= last && won == 0; tokens *= 2) {
    if (tokens > kCrossoverFirst && clock.Now() >= end) return result;
    (wins(tokens) ? won : lost) = tokens;
  }
  if (won == 0) return result;
  for (int step = 0; step < 2 && lost > 0 && clock.Now() < end; ++step) {
    const int32_t middle = lost + (won - lost) / 2;
    (wins(middle) ? won : lost) = middle;
  }
  result.from = won;
  return result;
}

std::optional<IndexSpec> CheapestIndex(const std::vector<IndexSpec>& indexes) {
  const auto cost = [](const IndexSpec& spec) {
    return spec.kind == Kind::kQuest ? std::numeric_limits<int32_t>::max() : spec.bits;
  };
  const auto cheapest =
      std::min_element(indexes.begin(), indexes.end(),
                       [&](const IndexSpec& a, const IndexSpec& b) { return cost(a) < cost(b); });
  return cheapest == indexes.end() ? std::nullopt : std::optional(*cheapest);
}

absl::StatusOr<std::unique_ptr<AttentionTimer>> MakeAttentionTimer(const ModelConfig& config,
                                                                   const DecoderOptions& options,
                                                                   const IndexSpec& index,
                                                                   kernels::Backend& backend,
                                                                   const Clock& clock) {
  return BackendTimer::Create(config, options, index, backend, clock);
}

std::string CrossoverKey(const std::string& processor, const std::string& backend,
                         const ModelConfig& config, const DecoderOptions& options,
                         const IndexSpec& index) {
  return fmt::format("{} | {} | {} heads, {} KV heads of {}, {} KV in blocks of {}{} | {} | {}",
                     processor, backend, config.num_heads, config.num_kv_heads, config.head_dim,
                     kernels::DTypeName(options.kv_dtype), options.block_tokens,
                     options.shared_kv_bytes == 0 ? ""
                     : options.spills()           ? " in the host's memory and on disk"
                                                  : " in the host's memory",
                     ToString(index), kRevision);
}

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != line.npos) return line.substr(colon + 2);
  }
  return "";
}

absl::StatusOr<CrossoverReport> ResolveCrossover(
    const std::string& path, const std::string& key, int32_t max_tokens, const Clock& clock,
    const std::function<absl::StatusOr<std::unique_ptr<AttentionTimer>>()>& make_timer) {
  CrossoverReport report;
  if (!path.empty()) {
    absl::StatusOr<std::optional<Crossover>> found = ReadCrossover(path, key);
    if (!found.ok()) {
      report.problem = std::string(found.status().message());
    } else if (found->has_value()) {
      report.crossover = **std::move(found);
      report.cached = true;
      return report;
    }
  }
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionTimer> timer, make_timer());
  report.crossover = FindCrossover(*timer, max_tokens, clock, kBudget);
  if (path.empty()) return report;
  if (const absl::Status status = WriteCrossover(path, key, report.crossover); !status.ok()) {
    report.problem =
        Concat(report.problem, report.problem.empty() ? "" : "; ", std::string(status.message()));
  }
  return report;
}

}  // namespace winnow::engine
