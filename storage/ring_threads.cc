// The thread-pool engine: pread and pwrite where io_uring is refused. As many operations are really
// in flight as there are threads.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "storage/mutex.h"
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
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    work_.NotifyAll();
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
    const size_t count = pushed_.size();
    {
      const MutexLock lock(mutex_);
      queue_.insert(queue_.end(), pushed_.begin(), pushed_.end());
    }
    pushed_.clear();
    for (size_t i = 0; i < std::min(count, threads_.size()); ++i) work_.NotifyOne();
    return 0;
  }

  void Reap(std::chrono::nanoseconds wait, std::vector<IoEvent>* events) override {
    const auto until = std::chrono::steady_clock::now() + wait;
    const MutexLock lock(mutex_);
    while (events_.empty() && wait.count() > 0 && done_.WaitUntil(mutex_, until)) {
    }
    events->insert(events->end(), events_.begin(), events_.end());
    events_.clear();
  }

 private:
  void Work() {
    while (true) {
      IoRequest request;
      {
        const MutexLock lock(mutex_);
        while (!stopping_ && queue_.empty()) work_.Wait(mutex_);
        if (queue_.empty()) return;  // stopping, and nothing is left
        request = queue_.front();
        queue_.pop_front();
      }
      const int64_t result = Execute(request);
      {
        const MutexLock lock(mutex_);
        events_.push_back({request.slot, result});
      }
      done_.NotifyOne();
    }
  }

  const uint32_t depth_;
  std::vector<IoRequest> pushed_;  // owner's thread only
  Mutex mutex_;
  CondVar work_;  // for the threads
  CondVar done_;  // an event
  std::deque<IoRequest> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<IoEvent> events_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> MakeThreadsEngine(uint32_t depth, uint32_t threads) {
  return std::make_unique<ThreadsEngine>(depth, threads);
}

}  // namespace winnow::storage
