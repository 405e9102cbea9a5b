// Bodies of /v1/prefixes to the messages of winnow.v1.PrefixService, and its answers to JSON. Types and names only: ranges are
// checked where gRPC's are (server/prefix_calls.h). Fields that are not known are refused by name.
#ifndef WINNOW_SERVER_HTTP_PREFIX_REQUEST_H_
#define WINNOW_SERVER_HTTP_PREFIX_REQUEST_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "server/http/model_habits.h"
#include "winnow/v1/prefix.pb.h"

namespace winnow::server {

struct PutPrefixBody {
  v1::PutPrefixRequest request;  // without its name
  std::string model;             // "": the server's
};

// InvalidArgument, with the paths of the fields as the client knows them.
absl::StatusOr<PutPrefixBody> ParsePutPrefixBody(std::string_view body,
                                                 const ModelHabits& habits = {});
absl::StatusOr<v1::PinPrefixRequest> ParsePinPrefixBody(std::string_view body);

// `null` where the message has a field unset.
nlohmann::ordered_json PrefixJson(const v1::Prefix& prefix);
nlohmann::ordered_json PutPrefixJson(const v1::PutPrefixResponse& response);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_PREFIX_REQUEST_H_
