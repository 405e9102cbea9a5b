#include "bench/runs.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>

#include "absl/status/status.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/kv_planning.h"
#include "engine/retrieval/attention_policy.h"
#include "fmt/format.h"
#include "kernels/bench.h"
#include "kernels/host_matrix.h"

namespace winnow::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kConfigBytesMax = 16 << 20;
// A read loop over more than this is no slower, and its buffer would be no use.
constexpr double kReadLoopBytesMax = double{1 << 30};

struct Timed {
  double seconds = 0;
  double parts_seconds = 0;  // of the run that the parts are of
  engine::OpTotals matmul, attention, index, select, complete, other;
};

// Runs `body` once to warm up and `count` times more, each time after `prepare`, which is not timed. A
// device works on while the host goes ahead, so there the parts come from one more run, which waits after
// each call and is slower for it.
template <typename Prepare, typename Body>
absl::StatusOr<std::vector<Timed>> Repeat(engine::TimedBackend& timed, int32_t count,
                                          Prepare prepare, Body body) {
  std::vector<Timed> runs;
  timed.set_waits(!timed.on_device());
  for (int32_t i = 0; i <= count; ++i) {
    prepare(i);
    timed.Reset();
    const Clock::time_point start = Clock::now();
    WINNOW_RETURN_IF_ERROR(body());
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (i == 0) continue;
    runs.push_back({seconds, seconds, timed.matmul(), timed.attention(), timed.index(),
                    timed.select(), timed.complete(), timed.other()});
  }
  std::sort(runs.begin(), runs.end(),
            [](const Timed& a, const Timed& b) { return a.seconds < b.seconds; });
  if (timed.on_device()) {
    prepare(count + 1);
    timed.set_waits(true);
    timed.Reset();
    const Clock::time_point start = Clock::now();
    WINNOW_RETURN_IF_ERROR(body());
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    runs.front() = {runs.front().seconds, seconds,        timed.matmul(),   timed.attention(),
                    timed.index(),        timed.select(), timed.complete(), timed.other()};
  }
  return runs;
}

// The inputs of a step's tokens, changed a little from step to step: rows of the embedding, which are
// looked up where they lie. They are as before when it goes, or what a case shows would depend on those before it.
class DriftingInputs {
 public:
  DriftingInputs(BenchModel& model, std::span<const int32_t> tokens, double drift)
      : table_(model.synthetic.weights.embedding.host()),
        tokens_(tokens),
        drift_(static_cast<float>(drift)) {
    if (drift_ == 0) return;
    for (const int32_t token : tokens_) {
      before_.insert(before_.end(), RowOf(token), RowOf(token) + RowBytes());
    }
  }
  ~DriftingInputs() {
    for (size_t i = 0; i * RowBytes() < before_.size(); ++i) {
      std::memcpy(RowOf(tokens_[i]), &before_[i * RowBytes()], RowBytes());
    }
  }
  DriftingInputs(const DriftingInputs&) = delete;
  DriftingInputs& operator=(const DriftingInputs&) = delete;

  void Next() {
    if (drift_ == 0) return;
    const float keep = std::sqrt(1 - drift_ * drift_);
    const size_t value_bytes = kernels::DTypeBytes(table_.dtype);
    for (const int32_t token : tokens_) {
      std::byte* const row = RowOf(token);
      for (int64_t i = 0; i < table_.cols; ++i) {
        const float noise = (static_cast<float>(random_() >> 8) * 0x1p-23f - 1) * kDeviation;
        const float value = keep * kernels::ElementAt(row, table_.dtype, i) + drift_ * noise;
        if (table_.dtype == kernels::DType::kF32) {
          std::memcpy(row + i * value_bytes, &value, value_bytes);
        } else {
          const kernels::BF16 rounded = kernels::ToBF16(value);
          std::memcpy(row + i * value_bytes, &rounded.bits, value_bytes);
        }
      }
    }
  }

 private:
  // Scale of uniform noise of about the variance of random weights.
  static constexpr float kDeviation = 0.04f;
  size_t RowBytes() const { return table_.cols * kernels::DTypeBytes(table_.dtype); }
  // The noise of random weights is made writable by nobody else: all but this table is packed.
  std::byte* RowOf(int32_t token) const {
    return const_cast<std::byte*>(static_cast<const std::byte*>(table_.data)) + token * RowBytes();
  }

  const kernels::HostMatrix table_;
  const std::span<const int32_t> tokens_;
  std::vector<std::byte> before_;
  const float drift_;
  std::mt19937 random_{7};
};

// How many whole blocks of a sequence lie in the shared document, and how many are its own. The token that
// a step writes is in one of those.
struct BlocksOfSequence {
  BlocksOfSequence(const DecodeCase& what, int32_t block_tokens)
      : shared(std::min(what.shared, what.context - 1) / block_tokens),
        own((what.context + block_tokens - 1) / block_tokens - shared) {}
  int64_t all() const { return shared + own; }
  // [batch][all()]
  std::vector<int32_t> Tables(int32_t batch) const {
    std::vector<int32_t> tables;
    for (int32_t i = 0; i < batch; ++i) {
      for (int64_t block = 0; block < all(); ++block) {
        tables.push_back(static_cast<int32_t>(block < shared ? block : block + i * own));
      }
    }
    return tables;
  }

  int64_t shared, own;
};

std::vector<int32_t> RandomTokens(int64_t count, int32_t vocab_size) {
  std::mt19937 random(1);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab_size);
  return tokens;
}

}  // namespace

absl::StatusOr<engine::RetrievalOptions> BenchRetrieval(
    const BenchModelFlags& flags, const engine::ModelConfig& config, const engine::Weights& weights,
    std::span<const engine::AttentionPolicy> policies, engine::SyntheticArtifact& synthetic) {
  if (!flags.model_dir.empty()) {
    engine::RetrievalFlags retrieval = flags.model.retrieval;
    for (const engine::AttentionPolicy& policy : policies) {
      if (!policy.IsDense()) retrieval.policies.push_back(policy);
    }
    if (retrieval.policies.empty()) return engine::RetrievalOptions{};
    return engine::ResolveRetrieval(flags.model_dir, config, weights, retrieval);
  }
  if (!flags.model.retrieval.artifact.empty()) {
    return absl::InvalidArgumentError("artifact: is of a model, and --like has none");
  }
  const bool learned = std::any_of(policies.begin(), policies.end(),
                                   [](const auto& policy) { return policy.NeedsArtifact(); });
  if (learned) {
    WINNOW_ASSIGN_OR_RETURN(synthetic, engine::MakeSyntheticArtifact(config, 1));
  }
  return engine::OptionsFor(policies, synthetic.artifact);
}

absl::StatusOr<std::unique_ptr<BenchModel>> MakeBenchModel(
    const BenchModelFlags& flags, int64_t kv_tokens,
    std::span<const engine::AttentionPolicy> policies) {
  auto made = std::make_unique<BenchModel>();
  const engine::Weights* weights = &made->weights;
  if (!flags.model_dir.empty()) {
    WINNOW_ASSIGN_OR_RETURN(made->config, engine::LoadModelConfig(flags.model_dir));
    WINNOW_ASSIGN_OR_RETURN(made->weights, engine::LoadWeights(flags.model_dir, made->config));
  } else {
    WINNOW_ASSIGN_OR_RETURN(const std::string text,
                            engine::ReadSmallFile(flags.like, kConfigBytesMax));
    WINNOW_ASSIGN_OR_RETURN(made->config, engine::ParseModelConfig(text, flags.like, "", ""));
  }
  WINNOW_ASSIGN_OR_RETURN(engine::DecoderOptions options,
                          engine::ResolveDecoderOptions(made->config, flags.model));
  const kernels::KvLayout layout{made->config.num_kv_heads, made->config.head_dim,
                                 options.block_tokens, options.kv_dtype};
  const int64_t blocks = (kv_tokens + options.block_tokens - 1) / options.block_tokens;
  const auto block_bytes = static_cast<int64_t>(layout.BlockBytes());
  if (options.shared_kv_bytes > 0) {
    const int32_t own_layers = std::min(made->config.num_layers(), engine::FirstSharedLayer());
    const int64_t needed = blocks * block_bytes * (made->config.num_layers() - own_layers);
    if (needed > options.shared_kv_bytes) {
      return absl::InvalidArgumentError(fmt::format("host-bytes is {}: {} tokens of KV take {}",
                                                    options.shared_kv_bytes, kv_tokens, needed));
    }
    options.shared_kv_bytes = std::max<int64_t>(needed, 1);
    options.kv_bytes = blocks * block_bytes * own_layers;
  } else {
    options.kv_bytes = blocks * block_bytes * made->config.num_layers();
  }
  WINNOW_ASSIGN_OR_RETURN(options.retrieval, BenchRetrieval(flags, made->config, made->weights,
                                                            policies, made->synthetic_artifact));
  options.retrieval.summaries = options.max_batch_logits;  // each sequence of a step may complete
  for (const engine::AttentionPolicy& policy : policies) {
    if (policy.kind != engine::AttentionPolicy::Kind::kPca ||
        options.retrieval.transform != nullptr) {
      continue;
    }
    const int32_t bits =
        policy.bits != 0 ? policy.bits : engine::DefaultTransformBits(made->config.head_dim);
    WINNOW_ASSIGN_OR_RETURN(options.retrieval.transform,
                            engine::MakeSyntheticTransform(made->config, bits));
    options.retrieval.indexes.push_back({engine::AttentionPolicy::Kind::kPca, bits});
  }
  WINNOW_ASSIGN_OR_RETURN(made->backend, engine::MakeBackend(flags.model));
  made->available_bytes = made->backend->AvailableBytes();
  WINNOW_ASSIGN_OR_RETURN(const engine::KvPlan plan, engine::PlanKv(made->config, options));
  if (flags.model_dir.empty()) {
    WINNOW_ASSIGN_OR_RETURN(made->synthetic, engine::MakeSyntheticWeights(made->config, 1));
    weights = &made->synthetic.weights;
  }
  WINNOW_RETURN_IF_ERROR(engine::CheckWeightStorage(options.weights, *weights));
  if (options.draft_weights.has_value()) {
    WINNOW_RETURN_IF_ERROR(engine::CheckDraftWeights(*options.draft_weights, *weights));
  }
  WINNOW_RETURN_IF_ERROR(
      engine::CheckMemory(made->config, options, plan, *made->backend, /*copy_bytes=*/0,
                          engine::KeptWeightBytes(flags.model, options, *weights)));
  made->timed = std::make_unique<engine::TimedBackend>(*made->backend, options.compute);
  WINNOW_ASSIGN_OR_RETURN(
      made->decoder, engine::Decoder::Create(made->config, *weights, *made->timed, options, plan));
  made->decoder->FillKvWithNoise(1);
  return made;
}

int64_t BlocksOfDecode(const DecodeCase& what, int32_t block_tokens) {
  const BlocksOfSequence blocks(what, block_tokens);
  return blocks.shared + blocks.own * what.batch;
}

absl::StatusOr<DecodeResult> RunDecode(BenchModel& model, const DecodeCase& what,
                                       const engine::AttentionPolicy& policy, int num_threads) {
  engine::Decoder& decoder = *model.decoder;
  const auto [context, batch, shared, steps, drift, rows] = what;
  if (drift != 0 && model.config.dtype == kernels::DType::kF16) {
    return absl::InvalidArgumentError("--drift: is for inputs of bfloat16 or float32");
  }
  const BlocksOfSequence blocks(what, decoder.block_tokens());
  const std::vector<int32_t> tables = blocks.Tables(batch);
  const std::vector<int32_t> tokens = RandomTokens(int64_t{batch} * rows, decoder.vocab_size());
  const std::vector<kernels::SampleRow> greedy(int64_t{batch} * rows);
  std::vector<kernels::SampledToken> sampled(greedy.size());
  engine::Batch step;
  std::vector<std::unique_ptr<engine::RetrievalState>> states(batch);
  for (int32_t i = 0; i < batch; ++i) {
    if (!policy.IsDense()) {
      WINNOW_ASSIGN_OR_RETURN(states[i], decoder.NewRetrievalState(policy));
    }
    step.chunks.push_back(
        {std::span(tokens).subspan(i * rows, rows), static_cast<int32_t>(context - rows),
         std::span(tables).subspan(i * blocks.all(), blocks.all()), rows, states[i].get(), 0});
  }
  // The read loop runs before and after, so that a busy spell of the machine meets both.
  DecodeResult result;
  result.context = context;
  result.policy = engine::ToString(policy);
  result.batch = batch;
  result.rows = rows;
  result.shared = blocks.shared * decoder.block_tokens();
  const auto read_loop = [&](double bytes) {
    // It is the host's memory that it reads.
    if (model.timed->on_device()) return 0.0;
    return kernels::MeasureReadBytesPerSecond(
        static_cast<size_t>(std::clamp(bytes, double{1 << 20}, kReadLoopBytesMax)), num_threads);
  };
  model.timed->Reset();
  WINNOW_RETURN_IF_ERROR(decoder.Sample(step, greedy, sampled));
  if (policy.IsDense()) {
    result.kv_bytes = model.timed->attention().bytes;
  } else {
    for (const auto& state : states) {
      const engine::RetrievalCounts counts = state->TakeCounts();
      result.kv_bytes += static_cast<double>(counts.rows_read) * decoder.kv_row_bytes();
      result.index_bytes +=
          static_cast<double>(counts.candidate_rows) * decoder.IndexRowBytes(policy);
    }
  }
  result.bytes = model.timed->matmul().bytes + result.kv_bytes + result.index_bytes;
  result.read_loop_bytes_per_s = read_loop(result.bytes);
  DriftingInputs inputs(model, tokens, drift);
  engine::SharedReads before, after;
  kernels::LaunchCounts launches_before, launches_after;
  const auto prepare = [&](int32_t run) {
    inputs.Next();
    if (run == 1) {
      before = decoder.shared_reads();
      launches_before = model.backend->launches();
    }
    if (run == steps + 1) {
      after = decoder.shared_reads();
      launches_after = model.backend->launches();
    }
  };
  WINNOW_ASSIGN_OR_RETURN(const std::vector<Timed> runs, Repeat(*model.timed, steps, prepare, [&] {
                            return decoder.Sample(step, greedy, sampled);
                          }));
  const auto mean = [of_steps = static_cast<double>(steps)](auto last, auto first) {
    return static_cast<double>(last - first) / of_steps;
  };
  result.launches_alone = mean(launches_after.alone, launches_before.alone);
  result.launches_in_graphs = mean(launches_after.in_graphs, launches_before.in_graphs);
  if (after.cached + after.fetched + after.in_place > 0) {
    result.rows_cached = mean(after.cached, before.cached);
    result.rows_fetched = mean(after.fetched, before.fetched);
    result.rows_in_place = mean(after.in_place, before.in_place);
    result.row_bytes = static_cast<double>(decoder.kv_row_bytes());
  }
  result.read_loop_bytes_per_s = std::max(result.read_loop_bytes_per_s, read_loop(result.bytes));
  if (result.read_loop_bytes_per_s == 0 && !model.timed->on_device()) {
    return absl::ResourceExhaustedError("no memory for the read loop");
  }
  if (model.timed->on_device()) {
    result.device_bytes = model.available_bytes - model.backend->AvailableBytes();
  }
  result.seconds = runs.front().seconds;
  result.parts_seconds = runs.front().parts_seconds;
  result.seconds_median = runs[runs.size() / 2].seconds;
  result.matmul = runs.front().matmul;
  result.attention = runs.front().attention;
  result.index = runs.front().index;
  result.select = runs.front().select;
  result.complete = runs.front().complete;
  result.other = runs.front().other;
  return result;
}

absl::StatusOr<RoundResult> RunRound(BenchModel& model, const DecodeCase& what,
                                     const engine::AttentionPolicy& policy) {
  engine::Decoder& decoder = *model.decoder;
  const int32_t batch = what.batch, drafted = policy.verify, rows = drafted + 1;
  const auto first = static_cast<int32_t>(what.context - rows);
  const BlocksOfSequence blocks(what, decoder.block_tokens());
  const std::vector<int32_t> tables = blocks.Tables(batch);
  const std::vector<int32_t> tokens = RandomTokens(int64_t{batch} * rows, decoder.vocab_size());
  const std::vector<kernels::SampleRow> greedy(int64_t{batch} * rows);
  std::vector<kernels::SampledToken> sampled(greedy.size());
  std::vector<std::unique_ptr<engine::RetrievalState>> states(batch);
  for (int32_t i = 0; i < batch && !policy.IsDense(); ++i) {
    WINNOW_ASSIGN_OR_RETURN(states[i], decoder.NewRetrievalState(policy));
  }
  // Tokens [from, from + count) of each draft, as engine/schedule/draft.h asks for them.
  const auto pass = [&](int32_t from, int32_t count, bool verifies) {
    engine::Batch made;
    made.drafts = !verifies && decoder.has_draft_weights();
    for (int32_t i = 0; i < batch; ++i) {
      made.chunks.push_back(
          {.tokens = std::span(tokens).subspan(i * rows + from, count),
           .position = first + from,
           .block_table = std::span(tables).subspan(i * blocks.all(), blocks.all()),
           .num_logits = count,
           .retrieval = states[i].get(),
           .retrieve_from = verifies ? std::numeric_limits<int32_t>::max() : first + from,
           .settled = first});
    }
    return made;
  };
  std::vector<engine::Batch> drafts;
  for (int32_t i = 0; i < drafted; ++i) drafts.push_back(pass(i, 1, /*verifies=*/false));
  const engine::Batch verification = pass(0, rows, /*verifies=*/true);

  std::vector<RoundResult> rounds;
  // Codes of the whole context are made in the first round, and a device's graphs of launches in the first few.
  constexpr int32_t kWarm = 6;
  for (int32_t run = 0; run < kWarm + what.steps; ++run) {
    const Clock::time_point begun = Clock::now();
    for (const engine::Batch& draft : drafts) {
      WINNOW_RETURN_IF_ERROR(
          decoder.Sample(draft, std::span(greedy).first(static_cast<size_t>(batch)), sampled));
    }
    const Clock::time_point between = Clock::now();
    WINNOW_RETURN_IF_ERROR(decoder.Sample(verification, greedy, sampled));
    const Clock::time_point done = Clock::now();
    for (const auto& state : states) {
      if (state != nullptr) state->Rewind(first);
    }
    if (run < kWarm) continue;
    const auto seconds = [](auto from, auto to) {
      return std::chrono::duration<double>(to - from).count();
    };
    RoundResult& round = rounds.emplace_back();
    round.seconds = seconds(begun, done);
    round.draft_seconds = seconds(begun, between);
    round.verify_seconds = seconds(between, done);
  }
  std::sort(rounds.begin(), rounds.end(),
            [](const RoundResult& a, const RoundResult& b) { return a.seconds < b.seconds; });
  RoundResult result = rounds.front();
  result.seconds_median = rounds[rounds.size() / 2].seconds;
  result.context = what.context;
  result.policy = engine::ToString(policy);
  result.batch = batch;
  result.drafted = drafted;
  return result;
}

absl::StatusOr<PrefillResult> RunPrefill(BenchModel& model, int64_t tokens,
                                         const engine::AttentionPolicy& policy, int32_t repetitions,
                                         int num_threads,
                                         const kernels::ProductBaseline* baseline) {
  engine::Decoder& decoder = *model.decoder;
  std::vector<int32_t> blocks((tokens + decoder.block_tokens() - 1) / decoder.block_tokens());
  std::iota(blocks.begin(), blocks.end(), 0);
  const std::vector<int32_t> prompt = RandomTokens(tokens, decoder.vocab_size());
  std::vector<float> logits(decoder.vocab_size());
  const auto prefill = [&]() -> absl::Status {
    std::unique_ptr<engine::RetrievalState> state;
    if (!policy.IsDense()) {
      WINNOW_ASSIGN_OR_RETURN(state, decoder.NewRetrievalState(policy));
    }
    for (int64_t position = 0; position < tokens;) {
      const int64_t count = std::min<int64_t>(decoder.max_batch_tokens(), tokens - position);
      const engine::Batch chunk{
          {{std::span(prompt).subspan(position, count), static_cast<int32_t>(position), blocks,
            position + count == tokens ? 1 : 0, state.get()}}};
      WINNOW_RETURN_IF_ERROR(decoder.Forward(chunk, logits));
      position += count;
    }
    return absl::OkStatus();
  };
  WINNOW_ASSIGN_OR_RETURN(const std::vector<Timed> runs,
                          Repeat(
                              *model.timed, repetitions, [](int32_t) {}, prefill));
  PrefillResult result;
  result.tokens = tokens;
  result.policy = engine::ToString(policy);
  result.seconds = runs.front().seconds;
  result.seconds_median = runs[runs.size() / 2].seconds;
  result.matmul = runs.front().matmul;
  result.attention = runs.front().attention;
  result.index = runs.front().index;
  result.other = runs.front().other;

  if (baseline == nullptr || model.timed->on_device()) return result;
  double baseline_seconds = 0;
  for (const engine::MatmulShape& shape : model.timed->matmul_shapes()) {
    const double flops_per_s =
        baseline->flops_per_s(shape.m, shape.out, shape.in, decoder.options().compute, num_threads);
    if (flops_per_s == 0) return result;
    baseline_seconds += static_cast<double>(shape.calls) * 2.0 * static_cast<double>(shape.m) *
                        static_cast<double>(shape.out) * static_cast<double>(shape.in) /
                        flops_per_s;
  }
  result.baseline_flops_per_s = result.matmul.flops / baseline_seconds;
  return result;
}

}  // namespace winnow::bench
