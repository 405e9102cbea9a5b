// From which context length retrieval is worth it on this machine: measured once, at start, and
// remembered in a file.
//
// What is compared is the attention of one decode step of one sequence in one layer: dense, and
// under the default budget (k=2%) of one index, on noise. One number serves all policies that do
// not say `from` themselves: it is that of the index with the fewest bytes for each key, so a
// dearer policy (quest, more bits, p, completion) is a little under its own crossover there. A
// policy that knows better says `from`.
//
// Noise is as good as real KV here, because neither side's work depends on the values. Times are
// the best of several: other work on the machine only adds to them.
#ifndef WINNOW_ENGINE_CROSSOVER_H_
#define WINNOW_ENGINE_CROSSOVER_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/decoder.h"
#include "engine/model/model_config.h"
#include "engine/retrieval/retrieval_attention.h"
#include "kernels/backend.h"

namespace winnow::engine {

// ---- the search ----

inline constexpr int32_t kCrossoverFirst = 512;      // the shortest context that is measured
inline constexpr int32_t kCrossoverLast = 32 << 10;  // and the longest: more would take memory
inline constexpr int32_t kNeverRetrieve = std::numeric_limits<int32_t>::max();

struct CrossoverSample {
  int32_t tokens = 0;
  double dense_seconds = 0, retrieval_seconds = 0;
  bool operator==(const CrossoverSample&) const = default;
};

class AttentionTimer {
 public:
  virtual ~AttentionTimer() = default;
  // One layer's attention of the token that makes a context of `tokens`.
  virtual CrossoverSample Time(int32_t tokens) = 0;
};

struct Crossover {
  int32_t from = kNeverRetrieve;         // the shortest context measured from which retrieval won
  std::vector<CrossoverSample> samples;  // in the order in which they were taken
  bool operator==(const Crossover&) const = default;
};

// Doubles the context from kCrossoverFirst until retrieval wins, then halves the gap between the
// last loss and the first win twice. Gives up, and never retrieves, where it has not won by
// min(max_tokens, kCrossoverLast), or before a measurement that begins later than `budget` after
// the first.
Crossover FindCrossover(AttentionTimer& timer, int32_t max_tokens, const Clock& clock,
                        Duration budget);

// ---- the measurement ----

// The index that is measured: of codes the one with the fewest bits (of equals the first), else
// quest; none of an empty list.
std::optional<IndexSpec> CheapestIndex(const std::vector<IndexSpec>& indexes);

// Times the backend's own operations through RetrievalAttention, with the shapes of one layer and
// pools of min(max_context, kCrossoverLast) tokens. KV lies where the model's will: with
// options.spills() in frames of options.store, all of it resident, so that the host finds the chosen
// rows as it will then. Backend and store must outlive it. ResourceExhausted: no memory for the pools.
absl::StatusOr<std::unique_ptr<AttentionTimer>> MakeAttentionTimer(const ModelConfig& config,
                                                                   const DecoderOptions& options,
                                                                   const IndexSpec& index,
                                                                   kernels::Backend& backend,
                                                                   const Clock& clock);

// ---- the cache ----
//
//   file  := {"format": 1, "entries": {key: {"from": tokens, "samples": [[tokens, s, s], ...]}}}
//
// "from" is null where retrieval never won. A file that is damaged counts as empty and is written
// anew.

// What the crossover depends on: processor, instruction set, threads, shapes, KV type and place, index.
std::string CrossoverKey(const std::string& processor, const std::string& backend,
                         const ModelConfig& config, const DecoderOptions& options,
                         const IndexSpec& index);
// As the system names it; "" if it does not.
std::string ProcessorName();

// $XDG_CACHE_HOME/winnow/crossover.json, or ~/.cache/winnow/crossover.json; "" without a home.
std::string DefaultCrossoverPath(
    const std::function<std::optional<std::string>(const std::string&)>& environment);

// Nothing if there is no file, or no entry. InvalidArgument, PermissionDenied, ...: the file cannot
// be used, and why.
absl::StatusOr<std::optional<Crossover>> ReadCrossover(const std::string& path,
                                                       const std::string& key);
// Adds the entry to those that are there; makes the directory. The file is replaced whole, so that
// a reader never sees half of it; of two writers at once the last one's entry is sure to stay.
absl::Status WriteCrossover(const std::string& path, const std::string& key,
                            const Crossover& crossover);

// ---- all of it ----

struct CrossoverReport {
  Crossover crossover;
  std::string index;    // that was measured: "lsh:128"
  bool cached = false;  // by an earlier start
  std::string problem;  // with the cache; it does not keep a server from starting
};

// From the cache at `path` ("": none), else measured with `timer`, which is made only then, and
// stored.
absl::StatusOr<CrossoverReport> ResolveCrossover(
    const std::string& path, const std::string& key, int32_t max_tokens, const Clock& clock,
    const std::function<absl::StatusOr<std::unique_ptr<AttentionTimer>>()>& make_timer);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_CROSSOVER_H_
