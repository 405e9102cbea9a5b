// Threads with a bounded queue of work, for what must not run on gRPC's polling threads or on the
// engine's: tokenising (milliseconds for a long prompt) and writing to streams.
//
// Life cycle: threads start in the constructor. The destructor runs what was posted and joins.
// Threads: Post from any thread, also from inside a task.
#ifndef WINNOW_SERVER_EXECUTOR_H_
#define WINNOW_SERVER_EXECUTOR_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace winnow::server {

class Executor {
 public:
  // REQUIRES: num_threads >= 1, capacity >= 1.
  Executor(int num_threads, size_t capacity);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // False if `capacity` tasks wait already; the task is dropped then.
  [[nodiscard]] bool Post(std::function<void()> task);

 private:
  void Work();
  bool HasNews() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || !tasks_.empty(); }

  const size_t capacity_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_EXECUTOR_H_
