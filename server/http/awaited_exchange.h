// An exchange whose whole answer comes later, from another thread: of calls that ask the engine and are no generation.
//
// Threads: Give and the exchange's calls may come from different ones.
#ifndef WINNOW_SERVER_HTTP_AWAITED_EXCHANGE_H_
#define WINNOW_SERVER_HTTP_AWAITED_EXCHANGE_H_

#include <functional>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/http/http_exchange.h"

namespace winnow::server {

// Shared by the exchange and by who has the answer.
class AwaitedPiece {
 public:
  explicit AwaitedPiece(HttpWaker wake) : wake_(std::move(wake)) {}
  // The whole response, once.
  void Give(HttpPiece piece);
  std::optional<HttpPiece> Take();

 private:
  const HttpWaker wake_;
  absl::Mutex mutex_;
  std::optional<HttpPiece> piece_ ABSL_GUARDED_BY(mutex_);
};

// `cancel`: the client is gone. `close`: the exchange is. Both may be empty.
std::unique_ptr<HttpExchange> AwaitPiece(std::shared_ptr<AwaitedPiece> piece,
                                         std::function<void()> cancel, std::function<void()> close);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_AWAITED_EXCHANGE_H_
