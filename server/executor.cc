#include "server/executor.h"

#include <utility>

#include "kernels/check.h"

namespace winnow::server {

Executor::Executor(int num_threads, size_t capacity) : capacity_(capacity) {
  WINNOW_CHECK(num_threads >= 1);
  WINNOW_CHECK(capacity >= 1);
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

Executor::~Executor() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

bool Executor::Post(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  if (tasks_.size() >= capacity_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void Executor::Work() {
  for (;;) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &Executor::HasNews));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace winnow::server
