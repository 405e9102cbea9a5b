// How near answers are to those of dense attention, in one word beside the policy (docs/exact.md). The same text in the
// API, on the command line and in results:
//
//   exactness := exact | fast | "floor:" number    0 < number <= 1
//
// `dense` is exact by itself and stays as it is under each of them. Another policy becomes
//   exact    a draft: verify=auto, unless it verifies already
//   floor:C  one with floor=C
//   fast     itself
// and contradicts it with these options:
//   exact    completion, suffix, floor: what verify excludes
//   floor:C  verify, lookup, a floor other than C
//   fast     verify, lookup
#ifndef WINNOW_ENGINE_RETRIEVAL_EXACTNESS_H_
#define WINNOW_ENGINE_RETRIEVAL_EXACTNESS_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/retrieval/attention_policy.h"

namespace winnow::engine {

// Plain data.
struct Exactness {
  enum class Kind { kExact, kFloor, kFast };
  Kind kind = Kind::kFast;
  double floor = 0;  // coverage; with kFloor
  bool operator==(const Exactness&) const = default;
};

// InvalidArgument says what it may be.
absl::StatusOr<Exactness> ParseExactness(std::string_view text);
std::string ToString(const Exactness& exactness);

// The exactness of answers under `policy`, wherever it came from.
Exactness ExactnessOf(const AttentionPolicy& policy);

// `policy` with `exactness`. Where the policy's options contradict it they go if `policy_yields`; else InvalidArgument
// names both.
absl::StatusOr<AttentionPolicy> WithExactness(const AttentionPolicy& policy,
                                              const Exactness& exactness, bool policy_yields);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_EXACTNESS_H_
