#include "server/http/prefix_routes.h"

#include <utility>

#include "server/http/awaited_exchange.h"
#include "server/http/http_error.h"
#include "server/http/openai_answer.h"
#include "server/http/openai_request.h"
#include "server/http/prefix_request.h"
#include "server/status.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// "": the path names none, or an empty one.
std::string NameOf(const HttpRequest& request) {
  const std::string_view rest = std::string_view(request.path).substr(kPrefixesPath.size());
  return std::string(rest.substr(rest.empty() ? 0 : 1));
}

HttpPiece ErrorPiece(const absl::Status& status, bool chat = false) {
  const HttpError error = ToHttpError(status, [chat](std::string_view field) {
    // A chat's ids are the prompt of what computes it.
    const std::string name = OpenAiField(field, chat);
    return chat && name.starts_with("prompt") ? std::string("messages") : name;
  });
  return ErrorResponse(error, OpenAiErrorBody(error));
}

HttpPiece JsonPiece(const OrderedJson& json) { return Whole(200, "application/json", Dump(json)); }

}  // namespace

std::unique_ptr<HttpExchange> PutPrefixRoute(
    PrefixCalls& calls, const HttpRequest& request, CallInfo info, const ModelHabits& habits,
    const std::function<absl::Status(const std::string&)>& check_model, const HttpWaker& wake) {
  absl::StatusOr<PutPrefixBody> body = ParsePutPrefixBody(request.body, habits);
  if (info.refused.ok()) info.refused = body.status();
  if (info.refused.ok()) info.refused = check_model(body->model);
  v1::PutPrefixRequest message;
  if (body.ok()) message = std::move(body->request);
  message.set_name(NameOf(request));
  const bool chat = message.has_chat();
  const auto piece = std::make_shared<AwaitedPiece>(wake);
  const std::shared_ptr<PrefixCalls::Put> put =
      calls.StartPut(std::move(message), std::move(info), request.body.size(),
                     [piece, chat](const absl::StatusOr<v1::PutPrefixResponse>& result) {
                       piece->Give(result.ok() ? JsonPiece(PutPrefixJson(*result))
                                               : ErrorPiece(result.status(), chat));
                     });
  return AwaitPiece(
      piece, [put] { put->Cancel(); }, [put] { put->Close(); });
}

std::unique_ptr<HttpExchange> ListPrefixesRoute(PrefixCalls& calls, const HttpRequest& request,
                                                const CallInfo& info, const HttpWaker& wake) {
  if (!info.refused.ok()) return Answered(ErrorPiece(info.refused));
  const bool all = request.path == kPrefixesPath;
  v1::ListPrefixesRequest message;
  message.set_name(NameOf(request));
  if (!all && message.name().empty()) return Answered(ErrorPiece(PrefixNotFound()));
  const auto piece = std::make_shared<AwaitedPiece>(wake);
  calls.List(info, message, [piece, all](const absl::StatusOr<v1::ListPrefixesResponse>& result) {
    if (!result.ok()) return piece->Give(ErrorPiece(result.status()));
    if (!all && result->prefixes().empty()) {
      return piece->Give(ErrorPiece(PrefixNotFound()));
    }
    if (!all) return piece->Give(JsonPiece(PrefixJson(result->prefixes(0))));
    OrderedJson list;
    list["object"] = "list";
    list["data"] = OrderedJson::array();
    for (const v1::Prefix& prefix : result->prefixes()) {
      list["data"].push_back(PrefixJson(prefix));
    }
    piece->Give(JsonPiece(list));
  });
  return AwaitPiece(piece, nullptr, nullptr);
}

std::unique_ptr<HttpExchange> PinPrefixRoute(PrefixCalls& calls, const HttpRequest& request,
                                             const CallInfo& info, const HttpWaker& wake) {
  absl::StatusOr<v1::PinPrefixRequest> message = ParsePinPrefixBody(request.body);
  const absl::Status& refused = info.refused.ok() ? message.status() : info.refused;
  if (!refused.ok()) return Answered(ErrorPiece(refused));
  message->set_name(NameOf(request));
  const auto piece = std::make_shared<AwaitedPiece>(wake);
  calls.Pin(info, *message, [piece](const absl::StatusOr<v1::PinPrefixResponse>& result) {
    piece->Give(result.ok() ? JsonPiece(PrefixJson(result->prefix()))
                            : ErrorPiece(result.status()));
  });
  return AwaitPiece(piece, nullptr, nullptr);
}

std::unique_ptr<HttpExchange> DeletePrefixRoute(PrefixCalls& calls, const HttpRequest& request,
                                                const CallInfo& info, const HttpWaker& wake) {
  if (!info.refused.ok()) return Answered(ErrorPiece(info.refused));
  v1::DeletePrefixRequest message;
  message.set_name(NameOf(request));
  const auto piece = std::make_shared<AwaitedPiece>(wake);
  calls.Delete(
      info, message,
      [piece, name = message.name()](const absl::StatusOr<v1::DeletePrefixResponse>& result) {
        piece->Give(
            result.ok()
                ? JsonPiece({{"object", "prefix.deleted"}, {"name", name}, {"deleted", true}})
                : ErrorPiece(result.status()));
      });
  return AwaitPiece(piece, nullptr, nullptr);
}

}  // namespace winnow::server
