// `winnow bench resume` measures this: a document was read once and is on disk; a question about it
// comes. Time and bytes until the first token of the answer, three ways in one run:
//
//   lazy     the store's index of the document, the summary and the dense layers are read; of the
//            rest the rows that the question's tokens choose
//   eager    all of the document's KV is read into frames first
//   prefill  without a store: the document is computed again
//
// All three run the same passes over the question, under the same policy. Nothing of the document is
// in memory before lazy and eager: blocks are forgotten, and the store's files are read with
// O_DIRECT or, where that is refused, after the page cache has been told to drop them.
#ifndef WINNOW_BENCH_RESUME_H_
#define WINNOW_BENCH_RESUME_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/store_bench.h"
#include "engine/retrieval/attention_policy.h"

namespace winnow::bench {

struct ResumeFlags {
  StoreBenchFlags store;
  std::vector<engine::AttentionPolicy> policies;  // at least one
  int64_t tokens = 30000;                         // of the document, cut to whole blocks
  std::vector<int64_t> questions = {32};          // of so many tokens, all of which retrieve
  int32_t repetitions = 3;                        // of lazy and eager, in turn
  // Chunks of the document that are computed again for `prefill`, evenly spread; 0: all, one after
  // the other. Fewer give an estimate: a chunk's time grows evenly with its position.
  int32_t prefill_chunks = 0;
};

struct ResumeResult {
  std::string way;       // "lazy", "eager", "prefill"
  size_t policy = 0;     // of ResumeFlags::policies
  int64_t question = 0;  // tokens
  double seconds = 0;    // to the first token; the best
  double seconds_median = 0;
  // Parts of the best run: names and tables; indexes and summary; layer blocks into frames (eager); the question.
  double name_seconds = 0, index_seconds = 0, load_seconds = 0, question_seconds = 0;
  std::array<CountingStore::Counts, CountingStore::kParts> parts = {};
  uint64_t row_payload_bytes = 0;  // of the rows among `parts`' pages
  uint64_t device_bytes = 0;       // as the store counts them: the sum of the parts
  uint64_t reads = 0;              // that the device was asked for
  int32_t first_token = 0;
  bool estimated = false;
  int32_t measured_chunks = 0;  // of prefill
};

struct ResumeRun {
  // Results of each policy and each of its questions: lazy, eager, prefill.
  std::vector<ResumeResult> results;
  int64_t document_tokens = 0;
  uint64_t kv_bytes = 0;              // of the document
  std::vector<uint64_t> dense_bytes;  // of them, by policy: of the dense layers
  double open_seconds = 0;            // of the store, with all of it inside
  double fill_seconds = 0;            // of making it
  uint64_t stored_bytes = 0;
  uint64_t row_cache_bytes = 0;
  bool direct = false;  // the store's reads pass the page cache by
  bool real = false;    // KV of a text that the model has read
  std::string backend, store, kv_dtype;
};

// `on_result` is called as soon as there is one. Errors: StoreBench's; Internal: the ways disagree
// about the first token.
absl::StatusOr<ResumeRun> RunResume(const ResumeFlags& flags,
                                    const std::function<void(const ResumeRun&)>& on_begin,
                                    const std::function<void(const ResumeResult&)>& on_result);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_RESUME_H_
