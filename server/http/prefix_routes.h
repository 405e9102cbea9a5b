// The routes of /v1/prefixes, over the calls that gRPC has (server/prefix_calls.h).
//
// Threads: any. `info`: who asks; what it refuses is the answer.
#ifndef WINNOW_SERVER_HTTP_PREFIX_ROUTES_H_
#define WINNOW_SERVER_HTTP_PREFIX_ROUTES_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/generator.h"
#include "server/http/http_exchange.h"
#include "server/http/model_habits.h"
#include "server/prefix_calls.h"

namespace winnow::server {

inline constexpr std::string_view kPrefixesPath = "/v1/prefixes";

// PUT /v1/prefixes/NAME. `check_model`: whether the model that the body names is here.
std::unique_ptr<HttpExchange> PutPrefixRoute(
    PrefixCalls& calls, const HttpRequest& request, CallInfo info, const ModelHabits& habits,
    const std::function<absl::Status(const std::string&)>& check_model, const HttpWaker& wake);
// GET /v1/prefixes and /v1/prefixes/NAME.
std::unique_ptr<HttpExchange> ListPrefixesRoute(PrefixCalls& calls, const HttpRequest& request,
                                                const CallInfo& info, const HttpWaker& wake);
// PATCH /v1/prefixes/NAME.
std::unique_ptr<HttpExchange> PinPrefixRoute(PrefixCalls& calls, const HttpRequest& request,
                                             const CallInfo& info, const HttpWaker& wake);
// DELETE /v1/prefixes/NAME.
std::unique_ptr<HttpExchange> DeletePrefixRoute(PrefixCalls& calls, const HttpRequest& request,
                                                const CallInfo& info, const HttpWaker& wake);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_PREFIX_ROUTES_H_
