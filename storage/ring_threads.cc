// The thread-pool engine: pread and pwrite where io_uring is refused. As many operations are really
// in flight as there are threads.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "storage/ring.h"

namespace winnow::storage {
namespace {

int64_t Execute(const IoRequest& request) {
  int64_t result = -1;
  const auto offset = static_cast<off_t>(request.offset);
  switch (request.kind) {
    case IoKind::kRead:
      result = ::pread(request.fd, request.data, request.bytes, offset);
      break;
    case IoKind::kWrite:
      result = ::pwrite(request.fd, request.data, request.bytes, offset);
      break;
    case IoKind::kDatasync:
      result = ::fdatasync(request.fd);
      break;
    case IoKind::kSync:
      result = ::fsync(request.fd);
      break;
    case IoKind::kAllocate:
      result = ::fallocate(request.fd, 0, offset, static_cast<off_t>(request.bytes));
      break;
  }
  return result < 0 ? -errno : result;
}

class ThreadsEngine final : public IoEngine {
 public:
  ThreadsEngine(uint32_t depth, uint32_t threads) : depth_(depth) {
    for (uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  }

  ~ThreadsEngine() override {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  std::string name() const override { return "threads"; }
  std::string Describe() const override {
    return "threads: " + std::to_string(threads_.size()) + " with pread and pwrite, depth " +
           std::to_string(depth_);
  }
  uint32_t depth() const override { return depth_; }

  void Push(const IoRequest& request) override { pushed_.push_back(request); }

  int Flush() override {
    if (pushed_.empty()) return 0;
    absl::MutexLock lock(&mutex_);
    queue_.insert(queue_.end(), pushed_.begin(), pushed_.end());
    pushed_.clear();
    return 0;
  }

  void Reap(std::chrono::nanoseconds wait, std::vector<IoEvent>* events) override {
    absl::MutexLock lock(&mutex_);
    if (done_.empty() && wait.count() > 0) {
      mutex_.AwaitWithTimeout(absl::Condition(this, &ThreadsEngine::HasDone),
                              absl::FromChrono(wait));
    }
    events->insert(events->end(), done_.begin(), done_.end());
    done_.clear();
  }

 private:
  bool HasDone() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !done_.empty(); }
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || !queue_.empty(); }

  void Work() {
    while (true) {
      IoRequest request;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &ThreadsEngine::HasWork));
        if (queue_.empty()) return;  // stopping, and nothing is left
        request = queue_.front();
        queue_.pop_front();
      }
      const int64_t result = Execute(request);
      absl::MutexLock lock(&mutex_);
      done_.push_back({request.slot, result});
    }
  }

  const uint32_t depth_;
  std::vector<IoRequest> pushed_;  // owner's thread only
  absl::Mutex mutex_;
  std::deque<IoRequest> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<IoEvent> done_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> MakeThreadsEngine(uint32_t depth, uint32_t threads) {
  return std::make_unique<ThreadsEngine>(depth, threads);
}

}  // namespace winnow::storage
