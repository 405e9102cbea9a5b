// What the flags of retrieval mean for one model: its artifact, the indexes beside the KV pool, and
// the shortest context that retrieves. The part of model_loader.h that dense attention never needs.
#ifndef WINNOW_ENGINE_MODEL_RETRIEVAL_H_
#define WINNOW_ENGINE_MODEL_RETRIEVAL_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/crossover.h"
#include "engine/decoder.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "engine/retrieval/artifact.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/retrieval_attention.h"
#include "engine/text/tokenizer.h"
#include "kernels/backend.h"

namespace winnow::engine {

// The artifact's name in a model's directory, where it is taken if it is there and no other is named. Beside a GGUF
// file NAME.gguf it is NAME.winnow-artifact.safetensors.
inline constexpr char kArtifactFile[] = "winnow-artifact.safetensors";

struct RetrievalFlags {
  std::string artifact;  // "": kArtifactFile; "none"; or a path
  std::string index =
      "auto";  // "auto", "none", or as in "lsh:128,quest,spotlight,int4", "pca,residual"
  // With `index` "auto": if there are any, only what they need is made. Else everything that can
  // be.
  std::vector<AttentionPolicy> policies;
  // With `index` "auto" and without policies: pca's residual codes, too, which policies with rerank need.
  bool residual_codes = false;
  // Shortest context that retrieves, for policies that leave it open: "auto" is measured
  // (crossover.h), or a number of tokens. 0 by default, so that offline work never depends on the
  // machine.
  std::string from = "0";
  int32_t probe_interval = 0;  // RetrievalOptions::probe_interval
  int32_t summaries = 1;       // RetrievalOptions::summaries
  // Called while transform codes are fitted, with the share that is done; may be empty.
  std::function<void(double)> progress;
  // Where the measured crossover and, beside it, the fit of transform codes are remembered: "auto" (DefaultCrossoverPath), "none", or a file.
  std::string crossover_cache = "auto";
  std::string fit_text;  // that transform codes are fitted on; "": TransformFitText()
  // No window of that text is begun later than this; the first is run whatever it takes. Less text is another fit.
  Duration fit_budget = std::chrono::seconds(20);
};

// `index` as it is written. Bits of 0: the kind's own.
struct IndexList {
  bool automatic = false;
  std::vector<IndexSpec> specs;
  bool four_bit_keys = false;
  bool residual_codes = false;  // beside pca
};
// InvalidArgument names the entry that is wrong.
absl::StatusOr<IndexList> ParseIndexList(std::string_view text);

// The tokens, or -1 for "auto". InvalidArgument: it is neither.
absl::StatusOr<int32_t> ParseRetrievalFrom(std::string_view text);

// What can be said before a file is opened. InvalidArgument names the flag.
absl::Status CheckRetrievalFlags(const RetrievalFlags& flags);

// Opens the artifact, if there is one. Leaves `from` at 0 where it is to be measured.
// NotFound, InvalidArgument: an artifact that is named and cannot be used, or one in the model's
// directory that is damaged or of another model; an index whose functions it does not have.
absl::StatusOr<RetrievalOptions> ResolveRetrieval(const std::string& model_path,
                                                  const ModelConfig& config, const Weights& weights,
                                                  const RetrievalFlags& flags);

// What became of transform codes.
struct TransformReport {
  int32_t bits = 0;     // 0: there are none
  bool cached = false;  // fitted by an earlier start
  double seconds = 0;   // that the fit took
  int32_t sample_tokens = 0;
  int32_t heads = 0, heads_with_tail = 0;
  std::string
      problem;  // with the cache, or why there are none; it does not keep a server from starting
};
// Bits of the index pca that the flags ask for; 0: none. `auto` without policies takes it where there is no artifact.
// InvalidArgument: policies that ask for different ones.
absl::StatusOr<int32_t> WantedTransformBits(const ModelConfig& config, const RetrievalFlags& flags,
                                            const RetrievalOptions& options);
// Recalls or makes the fit, and adds the index pca to `options`. Unimplemented: the backend lacks it. InvalidArgument:
// the fit fails, with layer and KV head. Neither where pca was not asked for by name: the report says so then.
absl::StatusOr<TransformReport> ResolveTransform(const ModelConfig& config, const Weights& weights,
                                                 const Tokenizer& tokenizer,
                                                 const RetrievalFlags& flags,
                                                 kernels::Backend& backend,
                                                 DecoderOptions& options);

// Measures or recalls `options.retrieval.from` where the flags say so; else reports what they say.
absl::StatusOr<CrossoverReport> ResolveFrom(const ModelConfig& config, const RetrievalFlags& flags,
                                            kernels::Backend& backend, DecoderOptions& options);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_RETRIEVAL_H_
