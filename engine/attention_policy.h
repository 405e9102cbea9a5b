// How mid tokens are chosen and what is done about the rest (DESIGN: "Policy"). The same text in
// the API, on the command line and in results:
//
//   policy  := name [":" option {"," option}]
//   name    := dense | window | oracle | quest | lsh | hata | spotlight | hashattention
//   option  := "k=" (count | share "%") | "p=" number | "completion=" ("on"|"off") | "sink=" count
//            | "window=" count | "dense_layers=" count
//
// This version runs `dense`. The other names parse, so that they are refused by name and not as
// typos.
#ifndef WINNOW_ENGINE_ATTENTION_POLICY_H_
#define WINNOW_ENGINE_ATTENTION_POLICY_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace winnow::engine {

struct AttentionPolicy {
  enum class Kind { kDense };
  Kind kind = Kind::kDense;

  bool operator==(const AttentionPolicy&) const = default;
};

// InvalidArgument names the option that is wrong; Unimplemented names a policy this version lacks.
absl::StatusOr<AttentionPolicy> ParseAttentionPolicy(std::string_view text);

// The canonical text: parses back to an equal policy.
std::string ToString(const AttentionPolicy& policy);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_ATTENTION_POLICY_H_
