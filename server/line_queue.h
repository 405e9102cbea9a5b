// Writes lines to a file descriptor on a thread of its own, so that whoever logs never waits for a reader.
// What does not fit the queue is dropped and counted; once there is room again, a line says how many.
#ifndef WINNOW_SERVER_LINE_QUEUE_H_
#define WINNOW_SERVER_LINE_QUEUE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace winnow::server {

class LineQueue {
 public:
  // `fd` must stay open as long as the process: a thread that waits for its reader is left alone at the
  // end. `dropped_line` makes the line that tells of dropped ones, without its end.
  LineQueue(int fd, size_t capacity_bytes, std::function<std::string(uint64_t)> dropped_line);
  // Writes what it can within a second.
  ~LineQueue();
  LineQueue(const LineQueue&) = delete;
  LineQueue& operator=(const LineQueue&) = delete;

  // Any thread; never waits. `line` has its end.
  void Push(std::string line);
  // Until everything pushed so far is written or dropped, or `limit` has passed.
  void Flush(std::chrono::nanoseconds limit);
  uint64_t dropped() const;  // lines, since the start

 private:
  struct State;
  const std::shared_ptr<State> state_;  // the thread's, too
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_LINE_QUEUE_H_
