#include "bench/resume.h"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"
#include "server/strings.h"
#include "storage/file_system.h"

namespace winnow::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int32_t Greedy(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Clean pages of the store's files leave the page cache. Where reads are direct there are none.
absl::Status DropPageCache(const std::string& directory) {
  storage::FileSystem files;
  WINNOW_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(directory));
  for (const std::string& name : names) {
    if (!name.ends_with(".wseg")) continue;
    WINNOW_ASSIGN_OR_RETURN(const storage::File file,
                            files.Open(server::Concat(directory, "/", name), {.read_only = true}));
    posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  }
  return absl::OkStatus();
}

class Resume {
 public:
  Resume(const ResumeFlags& flags, StoreBench& bench, std::span<const int32_t> tokens,
         int64_t document)
      : flags_(flags), bench_(bench), tokens_(tokens), document_(document) {}

  // The document's KV, its indexes and its summaries, from nothing, without the store's help; then,
  // if the model reads a text, the questions: a result for each policy and question.
  absl::StatusOr<std::vector<ResumeResult>> ComputeAndSave();
  // One question about the stored document.
  absl::StatusOr<ResumeResult> Ask(size_t policy, int64_t question, bool eager);
  // Without a question.
  absl::StatusOr<ResumeResult> EstimatePrefill();

 private:
  absl::Status Question(engine::RetrievalState* state, int64_t question) {
    const std::vector<int32_t> table = bench_.Table(DocumentBlocks());
    const int64_t most = bench_.decoder().max_batch_tokens();
    for (int64_t at = 0; at < question; at += most) {
      const int64_t count = std::min(most, question - at);
      WINNOW_RETURN_IF_ERROR(bench_.Forward(tokens_.subspan(document_ + at, count), document_ + at,
                                            table, state, document_, at + count == question));
    }
    return absl::OkStatus();
  }
  int32_t DocumentBlocks() const {
    return static_cast<int32_t>(document_ / bench_.decoder().block_tokens());
  }

  const ResumeFlags& flags_;
  StoreBench& bench_;
  const std::span<const int32_t> tokens_;
  const int64_t document_;
};

absl::StatusOr<std::vector<ResumeResult>> Resume::ComputeAndSave() {
  engine::Decoder& decoder = bench_.decoder();
  const std::vector<engine::BlockName> names = bench_.Names(tokens_);
  const std::vector<int32_t> table = bench_.Table(DocumentBlocks());
  const bool real = !flags_.store.text_path.empty();
  if (!real) WINNOW_RETURN_IF_ERROR(bench_.FillWithNoise(names));
  ResumeResult prefill{.way = "prefill"};
  std::vector<ResumeResult> results;
  std::vector<std::unique_ptr<engine::RetrievalState>> states;
  for (size_t i = 0; i < flags_.policies.size(); ++i) {
    WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<engine::RetrievalState> state,
                            decoder.NewRetrievalState(flags_.policies[i]));
    if (real && i == 0) {
      const Clock::time_point start = Clock::now();
      for (int64_t position = 0; position < document_;) {
        const int64_t count = std::min<int64_t>(decoder.max_batch_tokens(), document_ - position);
        WINNOW_RETURN_IF_ERROR(bench_.Forward(tokens_.subspan(position, count), position, table,
                                              state.get(), document_, false));
        position += count;
        ++prefill.measured_chunks;
      }
      prefill.seconds = SecondsSince(start);
    } else {
      // The last token alone: its pass makes the index of everything before it.
      WINNOW_RETURN_IF_ERROR(bench_.Forward(tokens_.subspan(document_ - 1, 1), document_ - 1, table,
                                            state.get(), document_, false));
    }
    bench_.store().NoteSummaries(true);
    decoder.SaveSummary(*state, names.back());
    bench_.store().NoteSummaries(false);
    for (const int64_t question : flags_.questions) {
      ResumeResult result = prefill;
      result.policy = i;
      result.question = question;
      if (real) {
        const Clock::time_point asked = Clock::now();
        state->Rewind(static_cast<int32_t>(document_));
        WINNOW_RETURN_IF_ERROR(Question(state.get(), question));
        result.question_seconds = SecondsSince(asked);
        result.first_token = Greedy(bench_.logits());
      }
      result.seconds += result.question_seconds;
      result.seconds_median = result.seconds;
      results.push_back(result);
    }
  }
  if (real) bench_.Seal(names, document_);
  WINNOW_RETURN_IF_ERROR(bench_.Save(names, /*with_index=*/true));
  return results;
}

absl::StatusOr<ResumeResult> Resume::Ask(size_t policy, int64_t question, bool eager) {
  engine::Decoder& decoder = bench_.decoder();
  bench_.Drop();
  WINNOW_RETURN_IF_ERROR(bench_.Settle());
  WINNOW_RETURN_IF_ERROR(DropPageCache(flags_.store.store_dir));
  bench_.store().ResetCounts();
  bench_.store().set_dense_layers(flags_.policies[policy].dense_layers);
  const uint64_t reads_before = bench_.disk().io_counters().reads;
  const uint64_t device_before = bench_.disk().stats().device_bytes_read;
  const uint64_t rows_before = decoder.row_fetcher().stats().payload_bytes;

  ResumeResult result{.way = eager ? "eager" : "lazy", .policy = policy, .question = question};
  const Clock::time_point start = Clock::now();
  const std::vector<engine::BlockName> names = bench_.Names(tokens_);
  WINNOW_RETURN_IF_ERROR(bench_.Adopt(names));
  result.name_seconds = SecondsSince(start);
  const std::vector<int32_t> table = bench_.Table(DocumentBlocks());
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<engine::RetrievalState> state,
                          decoder.NewRetrievalState(flags_.policies[policy]));
  const std::span<const int32_t> blocks = std::span(table).first(names.size());
  bench_.memory().BeginPass(1);
  decoder.AdoptIndex(*state, blocks, names, static_cast<int32_t>(document_));
  result.index_seconds = SecondsSince(start) - result.name_seconds;
  if (eager) {
    for (int32_t layer = 0; layer < bench_.config().num_layers(); ++layer) {
      WINNOW_RETURN_IF_ERROR(bench_.MakeResident(layer, blocks));
    }
  }
  result.load_seconds = SecondsSince(start) - result.name_seconds - result.index_seconds;
  WINNOW_RETURN_IF_ERROR(Question(state.get(), question));
  result.first_token = Greedy(bench_.logits());
  result.seconds = result.seconds_median = SecondsSince(start);
  result.question_seconds =
      result.seconds - result.name_seconds - result.index_seconds - result.load_seconds;
  for (int part = 0; part < CountingStore::kParts; ++part) {
    result.parts[part] = bench_.store().counts(static_cast<CountingStore::Part>(part));
  }
  result.row_payload_bytes = decoder.row_fetcher().stats().payload_bytes - rows_before;
  result.device_bytes = bench_.disk().stats().device_bytes_read - device_before;
  result.reads = bench_.disk().io_counters().reads - reads_before;
  return result;
}

// REQUIRES: the document is resident. Its KV is written over, so this comes last.
absl::StatusOr<ResumeResult> Resume::EstimatePrefill() {
  const int64_t chunk = bench_.decoder().max_batch_tokens();
  const int64_t chunks = (document_ + chunk - 1) / chunk;
  const int64_t measured =
      flags_.prefill_chunks == 0 ? chunks : std::clamp<int64_t>(flags_.prefill_chunks, 2, chunks);
  const std::vector<int32_t> table = bench_.Table(DocumentBlocks());
  ResumeResult result{.way = "prefill"};
  result.estimated = measured < chunks;
  result.measured_chunks = static_cast<int32_t>(measured);
  int64_t last_index = 0;
  double last = 0;
  for (int64_t i = 0; i < measured; ++i) {
    const int64_t index = measured == 1 ? 0 : i * (chunks - 1) / (measured - 1);
    const int64_t position = index * chunk;
    const int64_t count = std::min(chunk, document_ - position);
    const Clock::time_point start = Clock::now();
    WINNOW_RETURN_IF_ERROR(bench_.Forward(tokens_.subspan(position, count), position, table,
                                          nullptr, document_, false));
    const double seconds = SecondsSince(start);
    // Between two that were measured, times lie on a line.
    const auto between = static_cast<double>(index - last_index - 1);
    if (i > 0) result.seconds += between * (last + seconds) / 2;
    result.seconds += seconds;
    last = seconds;
    last_index = index;
  }
  result.first_token = -1;  // of other KV than noise
  return result;
}

}  // namespace

absl::StatusOr<ResumeRun> RunResume(const ResumeFlags& asked,
                                    const std::function<void(const ResumeRun&)>& on_begin,
                                    const std::function<void(const ResumeResult&)>& on_result) {
  ResumeFlags flags = asked;
  const int64_t block_tokens = flags.store.model.model.block_tokens;
  const int64_t document = flags.tokens / block_tokens * block_tokens;
  for (const engine::AttentionPolicy& policy : flags.policies) {
    if (document >= block_tokens + policy.sink + policy.window) continue;
    return absl::InvalidArgumentError(
        fmt::format("--tokens: {} are no document of more than its anchors", flags.tokens));
  }
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<StoreDirectory> directory,
                          StoreDirectory::Make(flags.store.store_dir));
  const StoreBench::Shape shape{
      .document_tokens = document,
      .more_tokens = *std::max_element(flags.questions.begin(), flags.questions.end()),
      .max_batch_tokens = flags.store.model.model.max_batch_tokens};
  ResumeRun run;
  run.document_tokens = document;
  run.real = !flags.store.text_path.empty();
  std::vector<int32_t> tokens;
  std::vector<ResumeResult> prefills;
  absl::flat_hash_set<uint32_t> summary_kinds;
  {
    WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<StoreBench> bench,
                            StoreBench::Make(flags.store, flags.policies, shape));
    WINNOW_ASSIGN_OR_RETURN(tokens, BenchTokens(flags.store, document + shape.more_tokens,
                                                bench->decoder().vocab_size()));
    run.kv_bytes = bench->document_kv_bytes();
    const int32_t layers = bench->config().num_layers();
    for (const engine::AttentionPolicy& policy : flags.policies) {
      run.dense_bytes.push_back(run.kv_bytes / layers * std::min(policy.dense_layers, layers));
    }
    // As a server does: an eighth of the KV that there is memory for, here one document's.
    if (flags.store.row_cache_bytes < 0) {
      flags.store.row_cache_bytes = static_cast<int64_t>(run.kv_bytes / 8);
    }
    const Clock::time_point start = Clock::now();
    WINNOW_ASSIGN_OR_RETURN(prefills, Resume(flags, *bench, tokens, document).ComputeAndSave());
    run.fill_seconds = SecondsSince(start);
    summary_kinds = bench->store().summary_kinds();
  }
  // As after a restart.
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<StoreBench> bench,
                          StoreBench::Make(flags.store, flags.policies, shape));
  bench->store().set_summary_kinds(summary_kinds);
  run.open_seconds = bench->open_seconds();
  run.stored_bytes = bench->disk().stats().used_bytes;
  run.store = bench->disk().Describe();
  run.direct = run.store.find("O_DIRECT") != std::string::npos;
  run.backend = bench->backend().name();
  run.kv_dtype = kernels::DTypeName(bench->decoder().options().kv_dtype);
  run.row_cache_bytes = bench->decoder().row_fetcher().cache_bytes();
  on_begin(run);

  Resume resume(flags, *bench, tokens, document);
  std::vector<ResumeResult> ways[2];  // lazy, eager; in the order of `prefills`
  for (const ResumeResult& prefill : prefills) {
    std::vector<ResumeResult> repeated[2];
    for (int32_t i = 0; i < flags.repetitions; ++i) {
      for (const bool eager : {false, true}) {
        WINNOW_ASSIGN_OR_RETURN(ResumeResult result,
                                resume.Ask(prefill.policy, prefill.question, eager));
        repeated[eager].push_back(std::move(result));
      }
    }
    for (const bool eager : {false, true}) {
      std::vector<ResumeResult>& results = repeated[eager];
      std::sort(results.begin(), results.end(),
                [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
      ResumeResult best = results.front();
      best.seconds_median = results[results.size() / 2].seconds;
      ways[eager].push_back(best);
      on_result(best);
    }
  }
  if (!run.real) {
    WINNOW_ASSIGN_OR_RETURN(const ResumeResult document_only, resume.EstimatePrefill());
    for (size_t i = 0; i < prefills.size(); ++i) {
      ResumeResult& prefill = prefills[i];
      const ResumeResult asked = std::exchange(prefill, document_only);
      prefill.policy = asked.policy;
      prefill.question = asked.question;
      prefill.question_seconds = ways[1][i].question_seconds;
      prefill.seconds = prefill.seconds_median = prefill.seconds + prefill.question_seconds;
    }
  }
  for (size_t i = 0; i < prefills.size(); ++i) {
    const ResumeResult &lazy = ways[0][i], &eager = ways[1][i], &prefill = prefills[i];
    on_result(prefill);
    run.results.insert(run.results.end(), {lazy, eager, prefill});
    for (const ResumeResult* other : {&eager, &prefill}) {
      if (other->first_token == lazy.first_token || other->first_token < 0) continue;
      return absl::InternalError(
          fmt::format("a question of {} tokens: {} gives token {} first, and lazy gives {}",
                      lazy.question, other->way, other->first_token, lazy.first_token));
    }
  }
  return run;
}

}  // namespace winnow::bench
