#include "server/signals.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "kernels/check.h"

namespace winnow::server {

Signals::Signals() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, number);
  WINNOW_CHECK(pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  WINNOW_CHECK(signal_fd_ >= 0 && event_fd_ >= 0);
}

Signals::~Signals() {
  close(signal_fd_);
  close(event_fd_);
}

Signals::Event Signals::Wait(std::optional<std::chrono::steady_clock::time_point> deadline) {
  using Clock = std::chrono::steady_clock;
  for (;;) {
    pollfd fds[] = {{signal_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
    timespec left{};
    if (deadline) {
      const auto rest =
          std::max<Clock::duration>(*deadline - Clock::now(), Clock::duration::zero());
      left.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(rest).count();
      left.tv_nsec = (rest % std::chrono::seconds(1)) / std::chrono::nanoseconds(1);
    }
    if (ppoll(fds, 2, deadline ? &left : nullptr, nullptr) < 0) {
      WINNOW_CHECK(errno == EINTR);
      continue;
    }
    Event event;
    if (fds[0].revents != 0) {
      signalfd_siginfo info;
      if (read(signal_fd_, &info, sizeof info) == sizeof info) {
        event.signal = static_cast<int>(info.ssi_signo);
      }
    }
    if (fds[1].revents != 0) {
      uint64_t count = 0;
      event.notified = read(event_fd_, &count, sizeof count) == sizeof count;
    }
    const bool late = deadline && Clock::now() >= *deadline;
    if (event.signal != 0 || event.notified || late) return event;
  }
}

void Signals::Notify() {
  const uint64_t one = 1;
  // Full only after 2^64 notifications that nobody waited for.
  WINNOW_CHECK(write(event_fd_, &one, sizeof one) == sizeof one);
}

}  // namespace winnow::server
