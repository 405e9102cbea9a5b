#include "server/http/awaited_exchange.h"

#include <utility>

namespace winnow::server {
namespace {

class AwaitedExchange final : public HttpExchange {
 public:
  AwaitedExchange(std::shared_ptr<AwaitedPiece> piece, std::function<void()> cancel,
                  std::function<void()> close)
      : piece_(std::move(piece)), cancel_(std::move(cancel)), close_(std::move(close)) {}
  ~AwaitedExchange() override {
    if (close_) close_();
  }

  std::optional<HttpPiece> Take() override { return piece_->Take(); }
  void Cancel(bool slow) override {
    if (cancel_) cancel_();
  }

 private:
  const std::shared_ptr<AwaitedPiece> piece_;
  const std::function<void()> cancel_, close_;
};

}  // namespace

void AwaitedPiece::Give(HttpPiece piece) {
  {
    absl::MutexLock lock(&mutex_);
    piece_ = std::move(piece);
  }
  wake_();
}

std::optional<HttpPiece> AwaitedPiece::Take() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(piece_, std::nullopt);
}

std::unique_ptr<HttpExchange> AwaitPiece(std::shared_ptr<AwaitedPiece> piece,
                                         std::function<void()> cancel,
                                         std::function<void()> close) {
  return std::make_unique<AwaitedExchange>(std::move(piece), std::move(cancel), std::move(close));
}

}  // namespace winnow::server
