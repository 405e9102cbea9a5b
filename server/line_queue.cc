#include "server/line_queue.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "engine/base/mutex.h"

namespace winnow::server {
namespace {

// A pipe that poll calls writable takes so much without waiting (PIPE_BUF).
constexpr size_t kWriteBytes = 4096;
constexpr std::chrono::seconds kLastWords(1);

}  // namespace

struct LineQueue::State {
  State(int fd, size_t capacity, std::function<std::string(uint64_t)> make_dropped_line)
      : fd(fd), capacity_bytes(capacity), dropped_line(std::move(make_dropped_line)) {}

  const int fd;
  const size_t capacity_bytes;
  const std::function<std::string(uint64_t)> dropped_line;
  engine::Mutex mutex;
  engine::CondVar changed;
  std::deque<std::string> lines ABSL_GUARDED_BY(mutex);
  size_t bytes ABSL_GUARDED_BY(mutex) = 0;
  uint64_t dropped ABSL_GUARDED_BY(mutex) = 0;
  uint64_t told ABSL_GUARDED_BY(mutex) = 0;  // of them, by a line
  bool writing ABSL_GUARDED_BY(mutex) = false;
  bool ends ABSL_GUARDED_BY(mutex) = false;

  // False: nobody will read it (EPIPE, a closed terminal).
  bool Write(std::string_view text) const {
    while (!text.empty()) {
      pollfd ready = {fd, POLLOUT, 0};
      if (poll(&ready, 1, -1) < 0 && errno != EINTR) return false;
      if (ready.revents == 0) continue;
      const ssize_t written = write(fd, text.data(), std::min(text.size(), kWriteBytes));
      if (written < 0 && errno != EINTR && errno != EAGAIN) return false;
      if (written > 0) text.remove_prefix(static_cast<size_t>(written));
    }
    return true;
  }

  void Run() {
    const engine::MutexLock lock(mutex);
    while (true) {
      while (lines.empty() && told == dropped && !ends) changed.Wait(mutex);
      if (lines.empty() && told == dropped) return;
      std::string text;
      uint64_t missing = 0;
      if (!lines.empty()) {
        text = std::move(lines.front());
        lines.pop_front();
        bytes -= text.size();
      } else {  // behind the lines that were kept
        missing = dropped - told;
        told = dropped;
        text = dropped_line(missing) + "\n";
      }
      writing = true;
      mutex.Unlock();
      const bool written = Write(text);
      mutex.Lock();
      writing = false;
      if (!written) told = ++dropped;  // nobody to tell
      changed.NotifyAll();
    }
  }
};

LineQueue::LineQueue(int fd, size_t capacity_bytes,
                     std::function<std::string(uint64_t)> dropped_line)
    : state_(std::make_shared<State>(fd, capacity_bytes, std::move(dropped_line))) {
  std::thread([state = state_] {
    pthread_setname_np(pthread_self(), "log");
    state->Run();
  }).detach();
}

LineQueue::~LineQueue() {
  Flush(kLastWords);
  const engine::MutexLock lock(state_->mutex);
  state_->ends = true;
  state_->changed.NotifyAll();
}

void LineQueue::Push(std::string line) {
  const engine::MutexLock lock(state_->mutex);
  if (state_->bytes + line.size() > state_->capacity_bytes) {
    ++state_->dropped;
    return;
  }
  state_->bytes += line.size();
  state_->lines.push_back(std::move(line));
  state_->changed.NotifyAll();
}

void LineQueue::Flush(std::chrono::nanoseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  const engine::MutexLock lock(state_->mutex);
  while ((!state_->lines.empty() || state_->writing) &&
         state_->changed.WaitUntil(state_->mutex, until)) {
  }
}

uint64_t LineQueue::dropped() const {
  const engine::MutexLock lock(state_->mutex);
  return state_->dropped;
}

}  // namespace winnow::server
