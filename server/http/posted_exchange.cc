#include "server/http/posted_exchange.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace winnow::server {
namespace {

// What both threads see.
struct Handover {
  absl::Mutex mutex;
  std::unique_ptr<HttpExchange> exchange ABSL_GUARDED_BY(mutex);
  bool gone ABSL_GUARDED_BY(mutex) = false;  // nobody waits any more
};

class PostedExchange final : public HttpExchange {
 public:
  explicit PostedExchange(std::shared_ptr<Handover> handover) : handover_(std::move(handover)) {}
  ~PostedExchange() override {
    absl::MutexLock lock(&handover_->mutex);
    handover_->gone = true;
  }

  std::optional<HttpPiece> Take() override { return Ready() ? exchange_->Take() : std::nullopt; }
  std::optional<HttpPiece> Ping() override { return Ready() ? exchange_->Ping() : std::nullopt; }
  void Cancel(bool slow) override {
    if (Ready()) exchange_->Cancel(slow);
  }

 private:
  bool Ready() {
    if (exchange_ == nullptr) {
      absl::MutexLock lock(&handover_->mutex);
      exchange_ = std::move(handover_->exchange);
    }
    return exchange_ != nullptr;
  }

  const std::shared_ptr<Handover> handover_;
  std::unique_ptr<HttpExchange> exchange_;
};

}  // namespace

std::unique_ptr<HttpExchange> PostExchange(Generator& generator, size_t bytes,
                                           std::function<std::unique_ptr<HttpExchange>()> work,
                                           HttpWaker wake) {
  auto handover = std::make_shared<Handover>();
  auto task = [handover, work = std::move(work), wake = std::move(wake)] {
    {
      absl::MutexLock lock(&handover->mutex);
      if (handover->gone) return;
    }
    std::unique_ptr<HttpExchange> exchange = work();
    {
      absl::MutexLock lock(&handover->mutex);
      // If the client went meanwhile, the exchange ends below, without the lock.
      if (!handover->gone) handover->exchange.swap(exchange);
    }
    if (exchange == nullptr) {
      wake();
    } else {
      exchange->Cancel(/*slow=*/false);
    }
  };
  if (!generator.PostTokenizing(bytes, std::move(task))) return nullptr;
  return std::make_unique<PostedExchange>(std::move(handover));
}

}  // namespace winnow::server
