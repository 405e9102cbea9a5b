// The attention policy: how candidates are selected, and what stands for the rest (docs/policies.md). Its text is the
// same in the API, on the command line and in results:
//
//   policy  := name [":" option {"," option}]
//   name    := dense | window | oracle | quest | lsh | pca | hata | spotlight | hashattention
//   option  := "k=" (count | share "%")      tokens to choose; 2% where absent
//            | "p=" number                   choose 4k, keep the fewest that have this share of
//                                            their attention (0 < p <= 1)
//            | "min_mass=" number            pca: choose none whose estimated share of the attention is
//                                            smaller, of k at most (0 < min_mass < 1); none
//            | "completion=" ("on" | "off")  the summary stands for what was not read; off
//            | "sink=" count                 first tokens that are always read; 16
//            | "window=" count               last tokens that are always read, at least 1; 128
//            | "dense_layers=" count         first layers that always read everything; 2
//            | "tail=" ("on" | "off")        pca: mean values stand for what was not read, at heads
//                                            where the fit found that they help; on
//            | "rerank=" ("on" | "off")      pca: choose 2k, keep the k best of them by a second, finer code; off
//            | "bits=" (32 | 64 | 128 | 256) of a code; the artifact's, 128 for lsh. lsh: 512, 1024;
//                                            pca: 64, 128, 192, 256, by the head dimension
//            | "suffix=" count               so many last prompt tokens retrieve, too, and those
//                                            before them in the same block of KV; 0
//            | "from=" count                 shorter contexts are dense; measured where absent
//            | "floor=" number               coverage below which a sequence reads more from its next
//                                            token on: twice k, then four times, then everything (0
//                                            < floor <= 1); none
//            | "verify=" (count | "auto")    exact answers: the policy drafts so many tokens at most, 1 to
//                                            64, and dense attention verifies them in one pass
//                                            (docs/exact.md); auto: as many as pay. none
//            | "lookup=" ("on" | "off")      drafts are first looked up in the sequence's own text; off.
//                                            On without verify: verify=auto
//   count   := digits, at most 268435456
//   share   := decimal number above 0, at most 100
//
// Each option once, in any order. `dense` takes none but lookup and verify, and verify alone only where drafts have weights of
// their own (Model::CheckPolicy); `window` chooses nothing, so neither k nor p;
// only policies with codes take bits. `min_mass` and `rerank` do not go with p. `verify` goes with neither completion nor suffix nor floor.
#ifndef WINNOW_ENGINE_RETRIEVAL_ATTENTION_POLICY_H_
#define WINNOW_ENGINE_RETRIEVAL_ATTENTION_POLICY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace winnow::engine {

// What is kept beside the keys to find the ones that matter.
enum class IndexKind {
  kNone,    // dense, window; oracle, which reads the keys themselves
  kBounds,  // quest: smallest and largest values of each page
  kCodes,   // a hash code of each key
};

// The data by which a policy finds the tokens that matter. The steps of a layer read this instead of the policy's name,
// so that a policy which selects like another is a line in attention_policy.cc's table.
enum class SelectBy {
  kNothing,  // dense, window
  kKeys,     // oracle: the logits of the keys themselves
  kBounds,   // quest: bounds of whole pages
  kCodes,    // lsh and the learned functions: the nearest codes
  kMasses,   // pca: the attention masses that transform codes estimate, beside those of the anchors
};

// Plain data. A default one is `dense`; one with only `kind` set is what the name alone parses to.
struct AttentionPolicy {
  enum class Kind {
    kDense,
    kWindow,
    kOracle,
    kQuest,
    kLsh,
    kPca,
    kHata,
    kSpotlight,
    kHashAttention
  };

  // Exactly one of the two is set; the other is 0. Policies that choose nothing ignore it.
  struct Budget {
    int32_t count = 0;
    double share = 0.02;  // of the visible tokens, not of mid
    bool operator==(const Budget&) const = default;
  };

  // Small enough that sums of a few, and 4k, are int32_t.
  static constexpr int32_t kCountMax = 1 << 28;
  static constexpr int32_t kLshBits = 128;
  static constexpr int32_t kVerifyMax = 64;
  static constexpr int32_t kVerifyAuto = -1;

  Kind kind = Kind::kDense;
  Budget k = {};
  std::optional<double> p = {};
  std::optional<double> min_mass = {};  // of pca; mean over the query heads of a KV head
  bool completion = false;
  bool tail = true;     // of pca; others have none
  bool rerank = false;  // of pca: the residual codes have the last word on 2k candidates
  int32_t sink = 16;
  int32_t window = 128;  // with the query's own token, so at least 1
  int32_t dense_layers = 2;
  int32_t bits = 0;  // 0: the artifact's; kLshBits for lsh, which is never written otherwise
  int32_t suffix = 0;
  std::optional<int32_t> from = {};  // absent: the device's measured crossover; 0: always retrieve
  std::optional<double> floor = {};
  // Tokens that are drafted before a verification, at most; kVerifyAuto; 0: what the policy chooses is
  // the answer.
  int32_t verify = 0;
  bool lookup = false;

  bool operator==(const AttentionPolicy&) const = default;

  bool IsDense() const { return kind == Kind::kDense; }
  // Whether queries retrieve in this layer, under a policy that is not dense. The one place that decides it.
  // Whether it may choose in this layer, if that sees all tokens (LayerSpec::SeesAll).
  bool RetrievesIn(int32_t layer) const { return layer >= dense_layers; }
  bool HasBudget() const { return kind != Kind::kDense && kind != Kind::kWindow; }
  bool IsLearned() const {
    return kind == Kind::kHata || kind == Kind::kSpotlight || kind == Kind::kHashAttention;
  }
  // The kind's functions, or the feature maps.
  bool NeedsArtifact() const { return IsLearned() || completion; }
  SelectBy select_by() const;
  IndexKind index_kind() const;
  // Whether its queries may have a tail, as far as the policy goes.
  bool HasTail() const { return select_by() == SelectBy::kMasses && tail; }
  // Whether dense attention has the last word on every token: answers and KV are those of `dense`.
  bool IsVerified() const { return verify != 0; }

  // Tokens that end up chosen where `visible` tokens are seen: the count, or at least 1 and the
  // share, rounded to the nearest (docs/calibration.md). 0 without a budget. May exceed mid: the
  // caller takes all of mid then.
  int32_t KFor(int32_t visible) const;
  // Tokens to select first: KFor, four times as many where p prunes them, twice where they are re-ranked.
  int32_t CandidatesFor(int32_t visible) const;
};

// The name alone: "hata". Also what an artifact calls it.
std::string_view KindName(AttentionPolicy::Kind kind);

// InvalidArgument names the policy or the option that is wrong.
absl::StatusOr<AttentionPolicy> ParseAttentionPolicy(std::string_view text);

// The canonical text: k, and what differs from the defaults. Parses back to an equal policy.
std::string ToString(const AttentionPolicy& policy);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_ATTENTION_POLICY_H_
