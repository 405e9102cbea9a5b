#include "server/signals.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <initializer_list>

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

Signals::Event Signals::Wait() {
  for (;;) {
    pollfd fds[] = {{signal_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
    if (poll(fds, 2, -1) < 0) {
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
    if (event.signal != 0 || event.notified) return event;
  }
}

void Signals::Notify() {
  const uint64_t one = 1;
  // Full only after 2^64 notifications that nobody waited for.
  WINNOW_CHECK(write(event_fd_, &one, sizeof one) == sizeof one);
}

}  // namespace winnow::server
