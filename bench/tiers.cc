#include "bench/tiers.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "engine/base/status_macros.h"
#include "fmt/format.h"
#include "storage/format.h"

namespace winnow::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Which blocks of the document have frames.
absl::Status PlaceBlocks(StoreBench& bench, int32_t document, double share) {
  const int32_t block_tokens = bench.decoder().block_tokens();
  const engine::AttentionPolicy& policy = bench.policy();
  std::mt19937 random(7);
  std::vector<int32_t> all(document);
  std::iota(all.begin(), all.end(), 0);
  const int32_t last_sink = std::min(document, (policy.sink + block_tokens - 1) / block_tokens);
  const int32_t first_window =
      std::max(last_sink, (document * block_tokens - policy.window) / block_tokens);
  for (int32_t layer = 0; layer < bench.config().num_layers(); ++layer) {
    std::vector<int32_t> resident = all;
    if (policy.RetrievesIn(layer)) {
      std::vector<int32_t> mid(all.begin() + last_sink, all.begin() + first_window);
      std::shuffle(mid.begin(), mid.end(), random);
      mid.resize(std::lround(static_cast<double>(mid.size()) * share));
      resident.assign(all.begin(), all.begin() + last_sink);
      resident.insert(resident.end(), mid.begin(), mid.end());
      resident.insert(resident.end(), all.begin() + first_window, all.end());
    }
    WINNOW_RETURN_IF_ERROR(bench.MakeResident(layer, resident));
  }
  return absl::OkStatus();
}

struct Counters {
  engine::RowFetcherStats rows;
  engine::KvMemoryStats memory;
  uint64_t reads = 0, device_bytes = 0;
  double attend_seconds = 0;
};

Counters Read(StoreBench& bench) {
  return {bench.decoder().row_fetcher().stats(), bench.memory().stats(),
          bench.disk().io_counters().reads, bench.disk().stats().device_bytes_read,
          bench.recorder().row_attention_seconds()};
}

std::vector<OverlapResult> Overlaps(std::vector<std::vector<RecordingBackend::Chosen>> choices,
                                    const StoreBench& bench, const kernels::KvLayout& layout,
                                    int64_t context, int32_t steps) {
  std::vector<OverlapResult> results;
  const int32_t first_layer = bench.policy().dense_layers;
  const int32_t layers = bench.config().num_layers() - first_layer;
  const auto rows_per_page =
      static_cast<int32_t>(std::max<size_t>(1, storage::kPageBytes / layout.RowBytes()));
  // With prefetch a layer chooses twice: recording is for runs without it.
  if (static_cast<int64_t>(choices.size()) != int64_t{layers} * steps) return results;
  for (int32_t l = 0; l < layers; ++l) {
    OverlapResult result{.context = context, .layer = first_layer + l};
    double chosen = 0, again = 0, followers = 0, distinct = 0, pages = 0;
    const size_t heads = choices[l].size();
    for (size_t head = 0; head < heads; ++head) {
      RecordingBackend::Chosen all;
      for (int32_t step = 0; step < steps; ++step) {
        const RecordingBackend::Chosen& now = choices[step * layers + l][head];
        chosen += static_cast<double>(now.size());
        int32_t last_page = -1;
        for (const int32_t token : now) {
          pages += token / rows_per_page != last_page;
          last_page = token / rows_per_page;
        }
        all.insert(all.end(), now.begin(), now.end());
        if (step == 0) continue;
        RecordingBackend::Chosen both;
        const RecordingBackend::Chosen& before = choices[(step - 1) * layers + l][head];
        std::set_intersection(now.begin(), now.end(), before.begin(), before.end(),
                              std::back_inserter(both));
        again += static_cast<double>(both.size());
        followers += static_cast<double>(now.size());
      }
      std::sort(all.begin(), all.end());
      all.erase(std::unique(all.begin(), all.end()), all.end());
      distinct += static_cast<double>(all.size());
    }
    const double turns = static_cast<double>(heads) * steps;
    result.rows = chosen / turns;
    result.overlap = followers > 0 ? again / followers : 0;
    result.distinct = chosen > 0 ? distinct * steps / chosen : 0;
    result.pages = pages / turns;
    results.push_back(result);
  }
  return results;
}

// Means over the steps whose times are `seconds`, between two readings of the counters.
void SetMeans(const Counters& start, const Counters& end, const engine::RetrievalCounts& counts,
              std::vector<double> seconds, bool on_device, TiersResult* result) {
  const auto steps = static_cast<double>(seconds.size());
  const auto mean = [&](uint64_t to, uint64_t from) {
    return static_cast<double>(to - from) / steps;
  };
  result->seconds_mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / steps;
  std::sort(seconds.begin(), seconds.end());
  result->seconds_min = seconds.front();
  result->seconds_median = seconds[seconds.size() / 2];
  result->wait_seconds = mean(end.memory.wait_ns, start.memory.wait_ns) * 1e-9;
  result->attend_seconds = on_device ? std::nan("")  // there calls return before they are done
                                     : (end.attend_seconds - start.attend_seconds) / steps;
  result->selected_rows = mean(counts.selected_rows, 0);
  result->stored_rows = mean(end.rows.store_rows + end.rows.asked_hits,
                             start.rows.store_rows + start.rows.asked_hits);
  result->cached_rows = mean(end.rows.cache_rows, start.rows.cache_rows);
  result->share_measured = 1 - result->stored_rows / result->selected_rows;
  result->payload_bytes = mean(end.rows.payload_bytes, start.rows.payload_bytes);
  result->page_bytes = mean(end.rows.page_bytes, start.rows.page_bytes);
  result->pages = mean(end.rows.pages, start.rows.pages);
  result->used_rows = mean(end.rows.asked_hits, start.rows.asked_hits);
  result->asked_rows = mean(end.rows.asked_rows, start.rows.asked_rows);
  result->reads = mean(end.reads, start.reads);
  result->device_bytes = mean(end.device_bytes, start.device_bytes);
}

// The document's KV, computed from its first `length` tokens and saved.
absl::Status ReadDocument(StoreBench& bench, std::span<const int32_t> tokens,
                          std::span<const engine::BlockName> names, int64_t length) {
  const std::vector<int32_t> table = bench.Table(static_cast<int32_t>(names.size()));
  for (int64_t position = 0; position < length;) {
    const int64_t count = std::min<int64_t>(bench.decoder().max_batch_tokens(), length - position);
    WINNOW_RETURN_IF_ERROR(
        bench.Forward(tokens.subspan(position, count), position, table, nullptr, length, false));
    position += count;
    bench.Seal(names, position);
  }
  return bench.Save(names, /*with_index=*/false);
}

// Tokens of each context's document, in whole blocks. InvalidArgument: a context is too short.
absl::StatusOr<std::vector<int64_t>> Documents(const TiersFlags& flags) {
  const int64_t block_tokens = flags.store.model.model.block_tokens;
  std::vector<int64_t> documents;
  for (const int64_t context : flags.contexts) {
    documents.push_back((context - flags.steps) / block_tokens * block_tokens);
    if (documents.back() < block_tokens + flags.policy.sink + flags.policy.window) {
      return absl::InvalidArgumentError(fmt::format(
          "--contexts: {} leaves no room for {} steps behind a document of more than its anchors",
          context, flags.steps));
    }
  }
  return documents;
}

}  // namespace

absl::StatusOr<TiersRun> RunTiers(const TiersFlags& flags,
                                  const std::function<void(const TiersResult&)>& on_result) {
  const int64_t block_tokens = flags.store.model.model.block_tokens;
  WINNOW_ASSIGN_OR_RETURN(const std::vector<int64_t> documents, Documents(flags));
  const int64_t longest = *std::max_element(documents.begin(), documents.end());
  const double most = *std::max_element(flags.shares.begin(), flags.shares.end()) / 100;
  const bool reads_text = !flags.store.text_path.empty();
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<StoreDirectory> directory,
                          StoreDirectory::Make(flags.store.store_dir));
  WINNOW_ASSIGN_OR_RETURN(
      const std::unique_ptr<StoreBench> made,
      StoreBench::Make(flags.store, std::span(&flags.policy, 1),
                       {.document_tokens = longest,
                        .more_tokens = flags.steps,
                        .resident_share = most,
                        .max_batch_tokens = flags.store.model.model.max_batch_tokens}));
  StoreBench& bench = *made;
  engine::Decoder& decoder = bench.decoder();
  WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          BenchTokens(flags.store, longest + flags.steps, decoder.vocab_size()));
  const std::vector<engine::BlockName> names = bench.Names(tokens);

  // The longest document contains the others.
  if (reads_text) {
    WINNOW_RETURN_IF_ERROR(ReadDocument(bench, tokens, names, longest));
  } else {
    WINNOW_RETURN_IF_ERROR(bench.FillWithNoise(names));
  }

  TiersRun run;
  run.backend = bench.backend().name();
  run.store = bench.disk().Describe();
  run.kv_dtype = kernels::DTypeName(decoder.options().kv_dtype);
  run.kv_bytes = bench.document_kv_bytes();
  run.frame_bytes = decoder.kv_pool_bytes();
  run.row_cache_bytes = decoder.row_fetcher().cache_bytes();
  run.stored_bytes = bench.disk().stats().used_bytes;
  for (size_t i = 0; i < documents.size(); ++i) {
    const auto document = static_cast<int32_t>(documents[i] / block_tokens);
    const std::vector<int32_t> table = bench.Table(document);
    WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<engine::RetrievalState> state,
                            decoder.NewRetrievalState(flags.policy));
    const auto step = [&](int32_t s) {
      const int64_t position = documents[i] + s;
      return bench.Forward(std::span(tokens).subspan(position, 1), position, table, state.get(),
                           documents[i], true);
    };
    // The index of the document, which nothing has made yet.
    WINNOW_RETURN_IF_ERROR(step(0));
    WINNOW_RETURN_IF_ERROR(bench.Settle());
    for (size_t at = 0; at < flags.shares.size(); ++at) {
      bench.Drop();
      WINNOW_RETURN_IF_ERROR(bench.Adopt(names));
      WINNOW_RETURN_IF_ERROR(PlaceBlocks(bench, document, flags.shares[at] / 100));
      TiersResult result;
      result.context = documents[i] + flags.steps;
      result.share_asked = flags.shares[at] / 100;
      WINNOW_ASSIGN_OR_RETURN(const DeviceRate before,
                              MeasureRandomReads(flags.store, flags.device_seconds));
      // The row cache, if there is one, takes in a first step; the buffers are touched.
      state->Rewind(static_cast<int32_t>(documents[i]));
      WINNOW_RETURN_IF_ERROR(step(0));
      state->Rewind(static_cast<int32_t>(documents[i]));
      state->TakeCounts();
      const Counters start = Read(bench);
      std::vector<double> seconds;
      for (int32_t s = 0; s < flags.steps; ++s) {
        const Clock::time_point begin = Clock::now();
        WINNOW_RETURN_IF_ERROR(step(s));
        seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      }
      const Counters end = Read(bench);
      const engine::RetrievalCounts counts = state->TakeCounts();
      WINNOW_ASSIGN_OR_RETURN(const DeviceRate after,
                              MeasureRandomReads(flags.store, flags.device_seconds));
      run.device = after;
      result.device_before = before.reads_per_s;
      result.device_after = after.reads_per_s;
      SetMeans(start, end, counts, std::move(seconds), bench.recorder().on_device(), &result);
      run.results.push_back(result);
      on_result(result);
      // Which rows are chosen does not depend on where they lie: once is enough, and untimed.
      if (!reads_text || at + 1 < flags.shares.size()) continue;
      state->Rewind(static_cast<int32_t>(documents[i]));
      bench.recorder().Record(true);
      for (int32_t s = 0; s < flags.steps; ++s) WINNOW_RETURN_IF_ERROR(step(s));
      bench.recorder().Record(false);
      for (const OverlapResult& overlap : Overlaps(
               bench.recorder().Take(), bench, decoder.kv_layout(), result.context, flags.steps)) {
        run.overlaps.push_back(overlap);
      }
    }
  }
  return run;
}

}  // namespace winnow::bench
