#include "engine/retrieval/exactness.h"

#include "absl/status/status.h"
#include "engine/base/plain_number.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

using Kind = Exactness::Kind;

constexpr std::string_view kFloorPrefix = "floor:";

// An option of a policy as it can contradict an exactness.
struct Contradiction {
  std::string_view option;
  bool there;
  void (*remove)(AttentionPolicy& policy);
};

}  // namespace

absl::StatusOr<Exactness> ParseExactness(std::string_view text) {
  if (text == "exact") return Exactness{.kind = Kind::kExact};
  if (text == "fast") return Exactness{.kind = Kind::kFast};
  if (text.starts_with(kFloorPrefix)) {
    const double floor = ParsePlainNumber(text.substr(kFloorPrefix.size())).value_or(0);
    if (floor > 0 && floor <= 1) return Exactness{.kind = Kind::kFloor, .floor = floor};
  }
  return absl::InvalidArgumentError(
      "exactness must be exact, fast, or floor:C with C above 0 and up to 1");
}

std::string ToString(const Exactness& exactness) {
  switch (exactness.kind) {
    case Kind::kExact:
      return "exact";
    case Kind::kFloor:
      return fmt::format("{}{}", kFloorPrefix, PlainNumberText(exactness.floor));
    case Kind::kFast:
      break;
  }
  return "fast";
}

Exactness ExactnessOf(const AttentionPolicy& policy) {
  if (policy.IsDense() || policy.IsVerified()) return {.kind = Kind::kExact};
  if (policy.floor.has_value()) return {.kind = Kind::kFloor, .floor = *policy.floor};
  return {.kind = Kind::kFast};
}

absl::StatusOr<AttentionPolicy> WithExactness(const AttentionPolicy& policy,
                                              const Exactness& exactness, bool policy_yields) {
  if (policy.IsDense()) return policy;
  const bool exact = exactness.kind == Kind::kExact;
  const bool other_floor = policy.floor.has_value() && exactness.kind == Kind::kFloor &&
                           *policy.floor != exactness.floor;
  const Contradiction contradictions[] = {
      {"lookup", !exact && policy.lookup, [](AttentionPolicy& p) { p.lookup = false; }},
      {"verify", !exact && policy.IsVerified(), [](AttentionPolicy& p) { p.verify = 0; }},
      {"completion", exact && policy.completion, [](AttentionPolicy& p) { p.completion = false; }},
      {"suffix", exact && policy.suffix > 0, [](AttentionPolicy& p) { p.suffix = 0; }},
      {"floor", (exact && policy.floor.has_value()) || other_floor,
       [](AttentionPolicy& p) { p.floor.reset(); }},
  };
  AttentionPolicy out = policy;
  for (const Contradiction& contradiction : contradictions) {
    if (!contradiction.there) continue;
    if (!policy_yields) {
      return absl::InvalidArgumentError(
          fmt::format("exactness '{}' and policy option '{}' contradict each other",
                      ToString(exactness), contradiction.option));
    }
    contradiction.remove(out);
  }
  if (exact && !out.IsVerified()) out.verify = AttentionPolicy::kVerifyAuto;
  if (exactness.kind == Kind::kFloor) out.floor = exactness.floor;
  return out;
}

}  // namespace winnow::engine
