// SIGTERM, SIGINT and SIGHUP as events that one thread waits for, without polling; other parts of
// the process can wake the same wait. SIGPIPE is ignored: a client that goes away is an error code.
//
// Life: made before any other thread, because threads inherit the blocked signals. Destroying it
// leaves them blocked.
#ifndef WINNOW_SERVER_SIGNALS_H_
#define WINNOW_SERVER_SIGNALS_H_

#include <chrono>
#include <optional>

namespace winnow::server {

class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  struct Event {
    int signal = 0;         // SIGTERM, ...; 0 if it was not a signal
    bool notified = false;  // Notify was called since the last Wait
  };
  // The next signal or notification; empty (no signal, not notified) when neither came until `deadline`.
  Event Wait(std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt);

  // Any thread.
  void Notify();

 private:
  int signal_fd_ = -1;
  int event_fd_ = -1;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_SIGNALS_H_
