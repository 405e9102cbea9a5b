#include "server/http/api.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "engine/base/status_macros.h"
#include "server/grpc_callers.h"
#include "server/http/anthropic.h"
#include "server/http/generate_exchange.h"
#include "server/http/http_error.h"
#include "server/http/openai_answer.h"
#include "server/http/openai_request.h"
#include "server/http/posted_exchange.h"
#include "server/http/prefix_routes.h"
#include "server/http/responses.h"
#include "server/http/status_page.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/trace_context.h"
#include "server/version.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Larger bodies are read by a tokenising thread: about a millisecond's worth of JSON.
constexpr size_t kReadHereBytes = 32 << 10;
constexpr size_t kMaxRequestIdBytes = 128;
constexpr std::string_view kModelPrefix = "/v1/models/";
constexpr std::string_view kOnePrefix = "/v1/prefixes/NAME";

std::unique_ptr<HttpExchange> AnswerJson(const OrderedJson& json, int status = 200) {
  return Answered(Whole(status, "application/json", Dump(json)));
}

// The client's own id of a request goes into a header and into the log; anything odd is dropped.
std::string ClientRequestId(const HttpRequest& request) {
  const std::string* const id = request.Find("x-request-id");
  if (id == nullptr || id->empty() || id->size() > kMaxRequestIdBytes) return "";
  const bool plain = std::all_of(id->begin(), id->end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("._-:").find(c) != std::string_view::npos;
  });
  return plain ? *id : "";
}

// The key that the client shows, as OpenAI's or Anthropic's clients do; "" if it shows none.
std::string_view KeyOf(const HttpRequest& request) {
  if (const std::string* const key = request.Find("x-api-key")) return *key;
  const std::string* const value = request.Find("authorization");
  return value == nullptr ? "" : BearerKey(*value);
}

// The path as Routes() has it: a name in it is any name.
std::string_view RoutePath(std::string_view path) {
  if (path.starts_with(kModelPrefix)) return "/v1/models";
  if (path.starts_with(kPrefixesPath) && path.substr(kPrefixesPath.size()).starts_with("/")) {
    return kOnePrefix;
  }
  return path;
}

// In the shape of the route's API.
HttpPiece ErrorPiece(const HttpError& error, std::string_view path = "") {
  return ErrorResponse(
      error, path.starts_with("/v1/messages") ? AnthropicErrorBody(error) : OpenAiErrorBody(error));
}

std::unique_ptr<HttpExchange> AnswerError(const absl::Status& status, bool chat) {
  return Answered(ErrorPiece(
      ToHttpError(status, [chat](std::string_view field) { return OpenAiField(field, chat); })));
}

}  // namespace

HttpApi::HttpApi(Generator& generator, PrefixCalls& prefixes, v1::GetModelResponse model,
                 std::function<std::string()> metrics_page, std::shared_ptr<ApiKeys> keys,
                 ModelHabits habits)
    : generator_(generator),
      prefixes_(prefixes),
      model_(std::move(model)),
      metrics_page_(std::move(metrics_page)),
      keys_(std::move(keys)),
      habits_(habits),
      created_(std::time(nullptr)) {}

const std::vector<HttpApi::Route>& HttpApi::Routes() {
  static const std::vector<Route>& routes = *new std::vector<Route>{
      {"GET", "/health", &HttpApi::Health, kShort, true, true},
      {"GET", "/ping", &HttpApi::Health, kShort, true},
      {"GET", "/version", &HttpApi::Version, kShort, true},
      {"GET", "/metrics", &HttpApi::MetricsPage, kShort, true},
      {"GET", "/status", &HttpApi::Status, kShort, true, true},
      {"GET", "/v1/models", &HttpApi::Models},
      {"POST", "/v1/chat/completions", &HttpApi::Chat, kGenerates},
      {"POST", "/v1/completions", &HttpApi::Completion, kGenerates},
      {"POST", "/v1/messages", &HttpApi::Messages, kGenerates},
      {"POST", "/v1/messages/count_tokens", &HttpApi::CountTokens, kPosted},
      {"POST", "/v1/responses", &HttpApi::Responses, kGenerates},
      {"POST", "/v1/chat/completions/input_tokens", &HttpApi::CountChatTokens, kPosted},
      {"POST", "/v1/responses/input_tokens", &HttpApi::CountResponsesTokens, kPosted},
      {"POST", "/v1/chat/completions/render", &HttpApi::RenderChat, kPosted},
      {"POST", "/v1/completions/render", &HttpApi::RenderCompletion, kPosted},
      {"POST", "/tokenize", &HttpApi::Tokenize, kPosted},
      {"POST", "/detokenize", &HttpApi::Detokenize, kPosted},
      {"GET", "/tokenizer_info", &HttpApi::TokenizerInfo},
      {"GET", kPrefixesPath, &HttpApi::ListPrefixes},
      {"GET", kOnePrefix, &HttpApi::ListPrefixes},
      {"PUT", kOnePrefix, &HttpApi::PutPrefix, kGenerates},
      {"PATCH", kOnePrefix, &HttpApi::PinPrefix},
      {"DELETE", kOnePrefix, &HttpApi::DeletePrefix},
  };
  return routes;
}

const HttpApi::Route* HttpApi::FindRoute(const HttpRequest& request, bool* path_known) {
  const std::string_view path = RoutePath(request.path);
  *path_known = false;
  for (const Route& route : Routes()) {
    if (route.path != path) continue;
    *path_known = true;
    if (route.method == request.method || (route.method == "GET" && request.method == "HEAD")) {
      return &route;
    }
  }
  return nullptr;
}

HttpPiece HttpApi::Refusal(int status, std::string_view message) {
  std::string_view code = "invalid_request";
  if (status == 413) code = "request_too_large";
  if (status == 431) code = "headers_too_large";
  if (status == 503) code = "overloaded";
  return ErrorPiece(ToHttpError(status, code, message));
}

std::optional<HttpPiece> HttpApi::Refuse(const HttpRequest& head) {
  bool path_known = false;
  const Route* const route = FindRoute(head, &path_known);
  // First, so that nobody without a key learns which routes there are.
  if (keys_ != nullptr && (route == nullptr || !route->without_key) &&
      !keys_->NameOf(KeyOf(head)).has_value()) {
    const absl::Status status = NoApiKey();
    if (route != nullptr && route->kind == kGenerates) generator_.CountUnstarted("http", status);
    return ErrorPiece(ToHttpError(status, {}), head.path);
  }
  if (route == nullptr && path_known) {
    HttpPiece piece = ErrorPiece(
        ToHttpError(405, "method_not_allowed", "this route has another method"), head.path);
    std::string allowed;
    for (const Route& known : Routes()) {
      if (known.path == RoutePath(head.path)) {
        Append(allowed, allowed.empty() ? "" : ", ", known.method);
      }
    }
    piece.head->headers.emplace_back("Allow", allowed);
    return piece;
  }
  if (route == nullptr) {
    return ErrorPiece(ToHttpError(404, "unknown_route", "there is no such route"));
  }
  if (draining_ && !route->while_draining) {
    constexpr std::string_view kWhy = "the server is going away: try another one";
    if (route->kind == kGenerates) {
      generator_.CountUnstarted("http",
                                ErrorWithReason(absl::StatusCode::kUnavailable, "DRAINING", kWhy));
    }
    return ErrorPiece(ToHttpError(503, "draining", kWhy), head.path);
  }
  return std::nullopt;
}

std::unique_ptr<HttpExchange> HttpApi::Handle(HttpRequest request, HttpWaker wake) {
  bool path_known = false;
  const Route* const route = FindRoute(request, &path_known);  // Refuse has seen that it is there
  if (route->kind != kPosted && request.body.size() <= kReadHereBytes) {
    return (this->*route->work)(request, wake);
  }
  const size_t bytes = request.body.size();
  // std::function must be copyable, so the request travels behind a pointer.
  auto held = std::make_shared<HttpRequest>(std::move(request));
  std::unique_ptr<HttpExchange> posted = PostExchange(
      generator_, bytes,
      [self = shared_from_this(), route, held, wake] {
        return (self.get()->*route->work)(*held, wake);
      },
      wake);
  if (posted != nullptr) return posted;
  return Answered(ErrorPiece(ToHttpError(generator_.Busy(), {}), route->path));
}

std::unique_ptr<HttpExchange> HttpApi::Health(HttpRequest&, const HttpWaker&) {
  const bool serving = serving_ && !draining_;
  OrderedJson json;
  json["status"] = serving ? "ok" : draining_ ? "draining" : "not serving";
  return AnswerJson(json, serving ? 200 : 503);
}

std::unique_ptr<HttpExchange> HttpApi::Version(HttpRequest&, const HttpWaker&) {
  return AnswerJson({{"version", kVersion}});
}

std::unique_ptr<HttpExchange> HttpApi::MetricsPage(HttpRequest&, const HttpWaker&) {
  return Answered(Whole(200, "text/plain; version=0.0.4; charset=utf-8", metrics_page_()));
}

std::unique_ptr<HttpExchange> HttpApi::Status(HttpRequest&, const HttpWaker&) {
  HttpPiece piece = Whole(200, "text/html; charset=utf-8", std::string(kStatusPage));
  piece.head->headers.emplace_back("Content-Security-Policy", std::string(kStatusPagePolicy));
  piece.head->headers.emplace_back("Cache-Control", "no-cache");
  piece.head->headers.emplace_back("X-Content-Type-Options", "nosniff");
  return Answered(std::move(piece));
}

std::unique_ptr<HttpExchange> HttpApi::Models(HttpRequest& request, const HttpWaker&) {
  OrderedJson model;
  model["id"] = model_.name();
  model["object"] = "model";
  model["created"] = created_;
  model["owned_by"] = "winnow";
  model["root"] = model_.name();
  model["parent"] = nullptr;
  model["max_model_len"] = model_.max_context();
  if (request.path.starts_with(kModelPrefix)) {
    const absl::Status found = CheckModel(request.path.substr(kModelPrefix.size()));
    if (!found.ok()) return Answered(ErrorPiece(ToHttpError(found, {})));
    return AnswerJson(model);
  }
  OrderedJson list;
  list["object"] = "list";
  list["data"] = OrderedJson::array({model});
  // Codex decodes this list, in place of `data`, and refuses the answer without it. Its entries have more than a dozen
  // required fields, the agent's instructions among them: an entry of a server that has none would take the
  // agent's own away. With no entry it keeps them.
  list["models"] = OrderedJson::array();
  return AnswerJson(list);
}

absl::Status HttpApi::CheckModel(std::string_view name) const {
  if (name.empty() || name == model_.name()) return absl::OkStatus();
  return ErrorWithReason(
      absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
      Concat("the model ", name.substr(0, 128), " is not here; this is ", model_.name()));
}

// Whom the request counts for: the name of its key or its certificate; without either, as over gRPC, a
// key of fairness that anyone may send.
absl::StatusOr<std::string> HttpApi::TenantOf(const HttpRequest& request) const {
  std::string claimed;
  for (const auto& [name, value] : request.headers) {
    if (name != "x-winnow-tenant") continue;
    if (absl::Status status = Validator::CheckTenant(value); !status.ok()) return status;
    if (!claimed.empty() && claimed != value) {
      return ErrorWithReason(absl::StatusCode::kInvalidArgument, "INVALID_METADATA",
                             "x-winnow-tenant is there twice");
    }
    claimed = value;
  }
  std::string identity = request.certificate_name;
  if (keys_ != nullptr) identity = keys_->NameOf(KeyOf(request)).value_or("");
  if (identity.empty()) return claimed;
  if (!claimed.empty() && claimed != identity) {
    return ErrorWithReason(absl::StatusCode::kPermissionDenied, "TENANT_MISMATCH",
                           "x-winnow-tenant is not the name of the key or the certificate");
  }
  return identity;
}

CallInfo HttpApi::InfoOf(const HttpRequest& request) const {
  CallInfo info;
  info.transport = "http";
  info.client_request_id = ClientRequestId(request);
  if (const std::string* const trace = request.Find("traceparent");
      trace != nullptr && ParseTraceParent(*trace).valid()) {
    info.traceparent = *trace;
  }
  absl::StatusOr<std::string> tenant = TenantOf(request);
  info.refused = tenant.status();
  if (tenant.ok()) info.tenant = *std::move(tenant);
  for (const char* const header : kProxyHeaders) {
    info.by_proxy |= request.Find(header) != nullptr;
  }
  return info;
}

CallInfo HttpApi::InfoOfGeneration(const HttpRequest& request) const {
  CallInfo info = InfoOf(request);
  if (info.refused.ok()) info.refused = generator_.CheckRoom(info.tenant);
  return info;
}

absl::StatusOr<std::vector<int32_t>> HttpApi::TokensOf(v1::GenerateRequest& prompt) const {
  const Validator& validator = generator_.validator();
  if (prompt.has_tokens()) {
    v1::DetokenizeRequest ids;
    ids.mutable_ids()->Swap(prompt.mutable_tokens()->mutable_ids());
    WINNOW_RETURN_IF_ERROR(validator.CheckDetokenize(ids));
    return std::vector<int32_t>(ids.ids().begin(), ids.ids().end());
  }
  v1::TokenizeRequest request;
  if (prompt.has_chat()) {
    request.mutable_chat()->Swap(prompt.mutable_chat());
  } else {
    request.mutable_text()->Swap(prompt.mutable_text());
  }
  WINNOW_RETURN_IF_ERROR(validator.CheckTokenize(request));
  return validator.TokenizePrompt(request);
}

std::unique_ptr<HttpExchange> HttpApi::Tokenize(HttpRequest& request, const HttpWaker&) {
  absl::StatusOr<TokenizeBody> body = ParseTokenizeBody(request.body, habits_);
  absl::Status status = body.status();
  if (status.ok()) status = CheckModel(body->model);
  if (!status.ok()) return AnswerError(status, false);
  const bool chat = body->prompt.has_chat();
  const absl::StatusOr<std::vector<int32_t>> ids = TokensOf(body->prompt);
  if (!ids.ok()) return AnswerError(ids.status(), chat);
  OrderedJson answer;
  answer["count"] = ids->size();
  answer["max_model_len"] = model_.max_context();
  answer["tokens"] = *ids;
  answer["token_strs"] = nullptr;
  if (body->token_strs) {
    OrderedJson texts = OrderedJson::array();
    for (const int32_t id : *ids) texts.push_back(generator_.tokenizer().IdToToken(id));
    answer["token_strs"] = std::move(texts);
  }
  return AnswerJson(answer);
}

std::unique_ptr<HttpExchange> HttpApi::Detokenize(HttpRequest& request, const HttpWaker&) {
  absl::StatusOr<DetokenizeBody> body = ParseDetokenizeBody(request.body);
  absl::Status status = body.status();
  if (status.ok()) status = CheckModel(body->model);
  if (status.ok()) status = generator_.validator().CheckDetokenize(body->request);
  if (!status.ok()) {
    return Answered(ErrorPiece(ToHttpError(status, [](std::string_view field) {
      return field.starts_with("ids") ? Concat("tokens", field.substr(3)) : std::string(field);
    })));
  }
  const auto& ids = body->request.ids();
  OrderedJson answer;
  answer["prompt"] = generator_.tokenizer().Decode({ids.data(), static_cast<size_t>(ids.size())},
                                                   !body->request.show_special_tokens());
  return AnswerJson(answer);
}

std::unique_ptr<HttpExchange> HttpApi::TokenizerInfo(HttpRequest&, const HttpWaker&) {
  const engine::Tokenizer& tokenizer = generator_.tokenizer();
  const std::vector<int32_t>& ends = generator_.validator().limits().eos_token_ids;
  OrderedJson answer = {{"bos_token", nullptr}, {"eos_token", nullptr}};
  if (const auto ids = tokenizer.Encode("", /*add_special_tokens=*/true, /*parse_special=*/false);
      ids.ok() && !ids->empty()) {
    answer["bos_token"] = tokenizer.IdToToken(ids->front());
  }
  if (!ends.empty()) answer["eos_token"] = tokenizer.IdToToken(ends.front());
  answer["model_max_length"] = model_.max_context();
  return AnswerJson(answer);
}

absl::StatusOr<std::vector<int32_t>> HttpApi::TokensOfChat(const HttpRequest& request) const {
  absl::StatusOr<OpenAiRequest> body = ParseChatRequest(request.body, habits_);
  absl::Status status = body.status();
  if (status.ok()) status = CheckModel(body->model);
  if (!status.ok()) return status;
  return TokensOf(body->generate);
}

std::unique_ptr<HttpExchange> HttpApi::RenderChat(HttpRequest& request, const HttpWaker&) {
  const absl::StatusOr<std::vector<int32_t>> ids = TokensOfChat(request);
  if (!ids.ok()) return AnswerError(ids.status(), true);
  OrderedJson answer;
  answer["token_ids"] = *ids;
  answer["features"] = nullptr;
  return AnswerJson(answer);
}

std::unique_ptr<HttpExchange> HttpApi::CountChatTokens(HttpRequest& request, const HttpWaker&) {
  const absl::StatusOr<std::vector<int32_t>> ids = TokensOfChat(request);
  if (!ids.ok()) return AnswerError(ids.status(), true);
  return AnswerJson({{"input_tokens", ids->size()}});
}

std::unique_ptr<HttpExchange> HttpApi::RenderCompletion(HttpRequest& request, const HttpWaker&) {
  absl::StatusOr<RenderBody> body = ParseRenderBody(request.body);
  absl::Status status = body.status();
  if (status.ok()) status = CheckModel(body->model);
  if (!status.ok()) return AnswerError(status, false);
  OrderedJson answer = OrderedJson::array();
  for (v1::GenerateRequest& prompt : body->prompts) {
    const absl::StatusOr<std::vector<int32_t>> ids = TokensOf(prompt);
    if (!ids.ok()) return AnswerError(ids.status(), false);
    answer.push_back({{"token_ids", *ids}});
  }
  return AnswerJson(answer);
}

std::unique_ptr<HttpExchange> HttpApi::PutPrefix(HttpRequest& request, const HttpWaker& wake) {
  return PutPrefixRoute(
      prefixes_, request, InfoOf(request), habits_,
      [this](const std::string& model) { return CheckModel(model); }, wake);
}

std::unique_ptr<HttpExchange> HttpApi::ListPrefixes(HttpRequest& request, const HttpWaker& wake) {
  return ListPrefixesRoute(prefixes_, request, InfoOf(request), wake);
}

std::unique_ptr<HttpExchange> HttpApi::PinPrefix(HttpRequest& request, const HttpWaker& wake) {
  return PinPrefixRoute(prefixes_, request, InfoOf(request), wake);
}

std::unique_ptr<HttpExchange> HttpApi::DeletePrefix(HttpRequest& request, const HttpWaker& wake) {
  return DeletePrefixRoute(prefixes_, request, InfoOf(request), wake);
}

// A grammar is of the whole answer, and leaves no room to think.
void HttpApi::SetInReasoning(const v1::GenerateRequest& generate,
                             AnswerParserOptions& parser) const {
  if (parser.reasoning != ReasoningFormat::kThink || generate.has_structured_output()) return;
  parser.in_reasoning = generator_.validator().OpensReasoning(generate.chat());
}

std::unique_ptr<HttpExchange> HttpApi::Chat(HttpRequest& request, const HttpWaker& wake) {
  return Generate(request, wake, /*chat=*/true);
}

std::unique_ptr<HttpExchange> HttpApi::Completion(HttpRequest& request, const HttpWaker& wake) {
  return Generate(request, wake, /*chat=*/false);
}

std::unique_ptr<HttpExchange> HttpApi::Messages(HttpRequest& request, const HttpWaker& wake) {
  CallInfo info = InfoOfGeneration(request);
  absl::StatusOr<AnthropicRequest> parsed =
      info.refused.ok() ? ParseAnthropicRequest(request.body, /*counting=*/false, habits_)
                        : info.refused;
  info.refused = parsed.status();
  request.body = {};
  v1::GenerateRequest generate;
  AnthropicAnswerOptions options;
  options.model = model_.name();
  if (info.refused.ok()) {
    info.refused = CheckModel(parsed->model);
    options.stream = parsed->stream;
    options.paths = std::move(parsed->paths);
    options.parser = std::move(parsed->parser);
    SetInReasoning(parsed->generate, options.parser);
    options.shows_reasoning = parsed->shows_reasoning;
    options.structured_field = std::move(parsed->structured_field);
    options.max_tokens = parsed->generate.stopping().max_tokens();
    info.message_format = habits_.message_format;
    info.max_tokens_yields = true;  // Anthropic's clients ask for what the largest models can do
    generate = std::move(parsed->generate);
  }
  return StartGeneration(generator_, std::move(generate), std::move(info),
                         MakeAnthropicFormat(std::move(options)), wake);
}

std::unique_ptr<HttpExchange> HttpApi::CountTokens(HttpRequest& request, const HttpWaker&) {
  absl::StatusOr<AnthropicRequest> parsed =
      ParseAnthropicRequest(request.body, /*counting=*/true, habits_);
  absl::Status status = parsed.status();
  if (status.ok()) status = CheckModel(parsed->model);
  if (status.ok()) {
    const absl::StatusOr<std::vector<int32_t>> ids = TokensOf(parsed->generate);
    status = ids.status();
    if (ids.ok()) return AnswerJson({{"input_tokens", ids->size()}});
  }
  const std::vector<std::string> paths = parsed.ok() ? parsed->paths : std::vector<std::string>();
  return Answered(ErrorPiece(
      ToHttpError(status, [&](std::string_view field) { return AnthropicField(field, paths, ""); }),
      request.path));
}

std::unique_ptr<HttpExchange> HttpApi::Responses(HttpRequest& request, const HttpWaker& wake) {
  CallInfo info = InfoOfGeneration(request);
  absl::StatusOr<ResponsesRequest> parsed =
      info.refused.ok() ? ParseResponsesRequest(request.body, habits_) : info.refused;
  info.refused = parsed.status();
  request.body = {};
  v1::GenerateRequest generate;
  ResponsesAnswerOptions options;
  options.model = model_.name();
  if (info.refused.ok()) {
    info.refused = CheckModel(parsed->model);
    options.stream = parsed->stream;
    options.echoed = std::move(parsed->echoed);
    options.parser = std::move(parsed->parser);
    SetInReasoning(parsed->generate, options.parser);
    options.structured_field = std::move(parsed->structured_field);
    info.message_format = habits_.message_format;
    generate = std::move(parsed->generate);
  }
  return StartGeneration(generator_, std::move(generate), std::move(info),
                         MakeResponsesFormat(std::move(options)), wake);
}

std::unique_ptr<HttpExchange> HttpApi::CountResponsesTokens(HttpRequest& request,
                                                            const HttpWaker&) {
  absl::StatusOr<ResponsesRequest> body = ParseResponsesRequest(request.body, habits_);
  absl::Status status = body.status();
  if (status.ok()) status = CheckModel(body->model);
  if (status.ok()) {
    const absl::StatusOr<std::vector<int32_t>> ids = TokensOf(body->generate);
    status = ids.status();
    if (ids.ok()) {
      return AnswerJson({{"object", "response.input_tokens"}, {"input_tokens", ids->size()}});
    }
  }
  return Answered(ErrorPiece(
      ToHttpError(status, [](std::string_view field) { return ResponsesField(field, ""); }),
      request.path));
}

std::string HttpApi::EchoOf(const v1::GenerateRequest& generate) const {
  if (generate.has_text()) return generate.text().text();
  const auto& ids = generate.tokens().ids();
  return generator_.tokenizer().Decode({ids.data(), static_cast<size_t>(ids.size())},
                                       /*skip_special_tokens=*/false);
}

std::unique_ptr<HttpExchange> HttpApi::Generate(HttpRequest& request, const HttpWaker& wake,
                                                bool chat) {
  CallInfo info = InfoOfGeneration(request);
  absl::StatusOr<OpenAiRequest> parsed = !info.refused.ok() ? info.refused
                                         : chat ? ParseChatRequest(request.body, habits_)
                                                : ParseCompletionRequest(request.body);
  info.refused = parsed.status();
  request.body = {};
  OpenAiAnswerOptions options;
  options.chat = chat;
  options.model = model_.name();
  options.eos_token_ids = generator_.validator().limits().eos_token_ids;
  std::vector<v1::GenerateRequest> prompts;
  if (info.refused.ok()) {
    info.refused = CheckModel(parsed->model);
    options.stream = parsed->stream;
    options.include_usage = parsed->include_usage;
    options.continuous_usage = parsed->continuous_usage;
    options.logprobs = parsed->generate.has_top_logprobs();
    // The validator has the say about n; until it has spoken, the format has room for what it allows.
    options.n = std::clamp(parsed->generate.has_n() ? parsed->generate.n() : 1, 1, kMaxChoices);
    options.parser = std::move(parsed->parser);
    SetInReasoning(parsed->generate, options.parser);
    options.structured_field = std::move(parsed->structured_field);
    options.echo_logprobs = parsed->echo_logprobs;
    options.prompt_logprobs = parsed->prompt_logprobs;
    options.drops_answer = parsed->drops_answer;
    if (chat) info.message_format = habits_.message_format;
    prompts = std::move(parsed->more_prompts);
    prompts.insert(prompts.begin(), std::move(parsed->generate));
    options.prompts = static_cast<int32_t>(prompts.size());
    // A chat has its prompt's once, beside its choices.
    info.prompt_scores_max = kMaxWholeLogprobs / (options.prompts * (chat ? 1 : options.n));
    for (size_t i = 0; parsed->echo && i < prompts.size(); ++i) {
      options.echo.push_back(EchoOf(prompts[i]));
    }
  }
  return StartGenerations(generator_, std::move(prompts), std::move(info),
                          MakeOpenAiFormat(std::move(options), generator_.tokenizer()), wake);
}

}  // namespace winnow::server
