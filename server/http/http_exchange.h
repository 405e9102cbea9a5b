// The seam between HTTP's bytes and what they mean: the transport (http_server.h) reads requests and
// writes responses; a handler (api.h) decides what to answer. Neither knows the other's library.
//
// Life of an exchange:
//   1. The transport has read a request's head and asks Refuse: whoever must not or cannot be
//      answered is refused before the body is read.
//   2. It has read the body and calls Handle, which starts the work and returns the exchange.
//   3. It calls Take until there is nothing, and again after each call of the waker. At most one
//      piece is being written: while it is, nothing is taken. That is the back-pressure.
//   4. After the last piece is written, or the client is gone, it destroys the exchange.
//
// Threads: one I/O thread makes all calls for one connection. The waker may be called from any
// thread, also after the exchange is gone.
#ifndef WINNOW_SERVER_HTTP_HTTP_EXCHANGE_H_
#define WINNOW_SERVER_HTTP_HTTP_EXCHANGE_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace winnow::server {

struct HttpRequest {
  std::string method;                                        // as sent: "GET"
  std::string path;                                          // the target without its query
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case, in their order
  std::string certificate_name;  // common name of the client's verified certificate; "" without one
  std::string body;

  // The first header of that name, or nullptr. `name` is in lower case.
  const std::string* Find(std::string_view name) const;
};

struct HttpHead {
  int status = 200;
  std::vector<std::pair<std::string, std::string>> headers;  // beside length, date and connection
  bool streamed = false;  // false: the first piece has the whole body, and its length is announced
};

struct HttpPiece {
  std::optional<HttpHead> head;  // in the first piece, and only there
  std::string body;
  bool last = false;
  bool close = false;  // with `last`: the connection must not be used again
};

using HttpWaker = std::function<void()>;

class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  // What to send next, or nothing yet: the waker is called when there may be something.
  virtual std::optional<HttpPiece> Take() = 0;

  // Nothing was sent for the ping interval: what to send so that proxies keep the connection open.
  // Nothing if the response has no place for it.
  virtual std::optional<HttpPiece> Ping() { return std::nullopt; }

  // The client is gone; `slow`: it did not read for too long. The exchange is destroyed next.
  virtual void Cancel(bool slow) {}
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;

  // The response to a request whose body (of the announced length, if it announced one) is not
  // read yet; nothing: read on.
  virtual std::optional<HttpPiece> Refuse(const HttpRequest& head) = 0;

  // Never null.
  virtual std::unique_ptr<HttpExchange> Handle(HttpRequest request, HttpWaker wake) = 0;

  // The response to what the transport itself refuses: 400, 408, 413, 417, 431, 503.
  virtual HttpPiece Refusal(int status, std::string_view message) = 0;
};

// An exchange that has its whole answer.
std::unique_ptr<HttpExchange> Answered(HttpPiece piece);

// A whole response.
HttpPiece Whole(int status, std::string content_type, std::string body);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_HTTP_EXCHANGE_H_
