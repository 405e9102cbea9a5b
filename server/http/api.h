// The routes of the HTTP port: which requests are answered, by whom, and who may ask.
//
//   GET  /health   /ping   /version   /metrics   /status   /v1/models   /v1/models/NAME
//   POST /v1/chat/completions          /v1/completions
//        /v1/chat/completions/render   /v1/completions/render
//        /v1/chat/completions/input_tokens   /v1/responses/input_tokens
//        /v1/messages   /v1/messages/count_tokens   /v1/responses
//        /tokenize   /detokenize
//   GET  /tokenizer_info
//   GET  /v1/prefixes   GET, PUT, PATCH, DELETE  /v1/prefixes/NAME
//
// docs/http.md describes them. Requests become winnow.v1 messages and go through the validator and
// the generator that gRPC has.
//
// Owned by shared pointers, because work on the generator's threads keeps it, too.
// Threads: any; nothing is changed after construction but the two switches.
#ifndef WINNOW_SERVER_HTTP_API_H_
#define WINNOW_SERVER_HTTP_API_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "server/api_keys.h"
#include "server/generator.h"
#include "server/http/http_exchange.h"
#include "server/http/model_habits.h"
#include "server/prefix_calls.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

class HttpApi final : public HttpHandler, public std::enable_shared_from_this<HttpApi> {
 public:
  // `generator` and `prefixes` must outlive the API. `metrics_page`: what /metrics answers; called on I/O threads.
  // `habits`: how the model calls functions and thinks. `keys`: without one of them only /health and the empty page
  // of /status are answered; null: nobody is asked for one.
  HttpApi(Generator& generator, PrefixCalls& prefixes, v1::GetModelResponse model,
          std::function<std::string()> metrics_page, std::shared_ptr<ApiKeys> keys = nullptr,
          ModelHabits habits = {});

  // What /health says. After BeginDrain always no.
  void SetServing(bool serving) { serving_ = serving; }
  // From now on only /health, /ping, /metrics, /status and /version are answered, the first with 503.
  void BeginDrain() { draining_ = true; }

  std::optional<HttpPiece> Refuse(const HttpRequest& head) override;
  std::unique_ptr<HttpExchange> Handle(HttpRequest request, HttpWaker wake) override;
  HttpPiece Refusal(int status, std::string_view message) override;

 private:
  using Work = std::unique_ptr<HttpExchange> (HttpApi::*)(HttpRequest&, const HttpWaker&);
  enum Kind {
    kShort,
    kPosted,     // to a tokenising thread, however small
    kGenerates,  // counts as a request also where it comes to nothing, as over gRPC
  };
  struct Route {
    std::string_view method;
    std::string_view path;
    Work work;
    Kind kind = kShort;
    bool while_draining = false;
    bool without_key = false;
  };
  static const std::vector<Route>& Routes();
  static const Route* FindRoute(const HttpRequest& request, bool* path_known);

  std::unique_ptr<HttpExchange> Health(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Version(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> MetricsPage(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Status(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Models(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Chat(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Completion(HttpRequest& request, const HttpWaker& wake);

  std::unique_ptr<HttpExchange> Messages(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> CountTokens(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Responses(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Tokenize(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> Detokenize(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> TokenizerInfo(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> PutPrefix(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> ListPrefixes(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> PinPrefix(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> DeletePrefix(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> CountChatTokens(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> CountResponsesTokens(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> RenderChat(HttpRequest& request, const HttpWaker& wake);
  std::unique_ptr<HttpExchange> RenderCompletion(HttpRequest& request, const HttpWaker& wake);

  // The ids of a message's prompt, checked.
  absl::StatusOr<std::vector<int32_t>> TokensOf(v1::GenerateRequest& prompt) const;
  // Checks a chat's body that is not run. The error is to be worded for chat.
  absl::StatusOr<std::vector<int32_t>> TokensOfChat(const HttpRequest& request) const;
  std::unique_ptr<HttpExchange> Generate(HttpRequest& request, const HttpWaker& wake, bool chat);
  // A prompt's text, as `echo` gives it back.
  std::string EchoOf(const v1::GenerateRequest& generate) const;
  absl::StatusOr<std::string> TenantOf(const HttpRequest& request) const;
  CallInfo InfoOf(const HttpRequest& request) const;
  // Of a generation: refused where the queue is full.
  CallInfo InfoOfGeneration(const HttpRequest& request) const;
  absl::Status CheckModel(std::string_view name) const;
  void SetInReasoning(const v1::GenerateRequest& generate, AnswerParserOptions& parser) const;

  Generator& generator_;
  PrefixCalls& prefixes_;
  const v1::GetModelResponse model_;
  const std::function<std::string()> metrics_page_;
  const std::shared_ptr<ApiKeys> keys_;
  const ModelHabits habits_;
  const int64_t created_;  // Unix seconds; what /v1/models says
  std::atomic<bool> serving_ = false;
  std::atomic<bool> draining_ = false;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_API_H_
