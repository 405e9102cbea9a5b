// JSON whose objects keep the order of their members: tools and schemas, which models and grammars read from the
// first to the last.
//
// Such an object is searched from end to end for each member it gets, so their number is bounded.
#ifndef WINNOW_SERVER_ORDERED_JSON_H_
#define WINNOW_SERVER_ORDERED_JSON_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace winnow::server {

inline constexpr int kMaxOrderedMembers = 512;  // of one object
inline constexpr int kMaxOrderedDepth = 64;

// InvalidArgument: not JSON, an object with more members, nested deeper.
absl::StatusOr<nlohmann::ordered_json> ParseOrdered(std::string_view text);

// The text of a member of the object that `json` is; "" if it has none. Of several, the last.
// REQUIRES: `json` was parsed as an object without a fault.
std::string_view TextOfMember(std::string_view json, std::string_view name);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_ORDERED_JSON_H_
