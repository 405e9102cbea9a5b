#include "server/acceptor.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "kernels/check.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

// As gRPC's; the kernel has a lower bound of its own (net.core.somaxconn).
constexpr int kBacklog = 4096;
// Without descriptors, accepting is tried again after this.
constexpr int kPauseMs = 50;
// Beyond the limit, while others make room: half of the smallest reserve.
constexpr int64_t kCrowdedMost = 8;
constexpr int64_t kTellEveryNs = 1'000'000'000;

int64_t NowNs() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

absl::Status Failed(const char* what, int error) {
  return absl::UnavailableError(Concat(what, ": ", std::strerror(error)));
}

absl::StatusOr<int> Bind(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
  if (fd < 0) return Failed("socket", errno);
  absl::Cleanup close_it = [fd] { close(fd); };
  const int on = 1, off = 0;
  // Not SO_REUSEPORT: a second server on the same port would start, and the system split the clients.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.ai_family == AF_INET6) {
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  if (bind(fd, address.ai_addr, address.ai_addrlen) != 0) return Failed("bind", errno);
  if (listen(fd, kBacklog) != 0) return Failed("listen", errno);
  std::move(close_it).Cancel();
  return fd;
}

int PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  WINNOW_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 30));
}

int64_t ConnectionDescriptors(int64_t limit) {
  return limit - std::clamp<int64_t>(limit / 8, 16, 1024);
}

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const HostPort& address) {
  std::unique_ptr<Acceptor> acceptor(new Acceptor);
  acceptor->port_ = address.port;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.host.c_str(), "0", &hints, &found);
  if (error != 0) return absl::UnavailableError(Concat(address.host, ": ", gai_strerror(error)));
  const absl::Cleanup free_them = [found] { freeaddrinfo(found); };
  absl::Status last;
  for (addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const auto port = htons(static_cast<uint16_t>(acceptor->port_));
    if (each->ai_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(each->ai_addr)->sin6_port = port;
    } else {
      reinterpret_cast<sockaddr_in*>(each->ai_addr)->sin_port = port;
    }
    const absl::StatusOr<int> fd = Bind(*each);
    if (!fd.ok()) {
      last = fd.status();
      // A name may have an address that this machine lacks, as ::1 without IPv6. A port that is taken is
      // no such thing.
      if (absl::StrContains(last.message(), std::strerror(EADDRINUSE))) return last;
      continue;
    }
    acceptor->sockets_.push_back(*fd);
    acceptor->port_ = PortOf(*fd);
  }
  if (acceptor->sockets_.empty()) return last;
  acceptor->stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (acceptor->stop_fd_ < 0) return Failed("eventfd", errno);
  return acceptor;
}

Acceptor::~Acceptor() {
  Stop();
  if (stop_fd_ >= 0) close(stop_fd_);
}

void Acceptor::Start(int64_t descriptors, AcceptorEvents events) {
  descriptors_ = descriptors;
  events_ = std::move(events);
  thread_ = std::thread([this] { Run(); });
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    WINNOW_CHECK(write(stop_fd_, &one, sizeof one) == sizeof one);
    thread_.join();
  }
  for (const int fd : std::exchange(sockets_, {})) close(fd);
}

void Acceptor::Run() {
  std::vector<pollfd> fds = {{stop_fd_, POLLIN, 0}};
  for (const int fd : sockets_) fds.push_back({fd, POLLIN, 0});
  while (true) {
    if (poll(fds.data(), fds.size(), refused_ > 0 ? 1000 : -1) < 0 && errno != EINTR) {
      return events_.on_failure(Failed("poll", errno));
    }
    if (fds[0].revents != 0) return;
    for (size_t i = 1; i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      const absl::Status status = AcceptAll(fds[i].fd);
      if (!status.ok()) return events_.on_failure(status);
    }
    Refused();
  }
}

absl::Status Acceptor::AcceptAll(int socket) {
  while (true) {
    const int fd = accept4(socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      if (fd >= descriptors_) {
        if (events_.on_crowded && fd < descriptors_ + kCrowdedMost) {
          events_.on_crowded(fd);
          continue;
        }
        close(fd);
        ++refused_;
        Refused();
        continue;
      }
      const int on = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      events_.on_connection(fd);
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return absl::OkStatus();
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM: {
        // Whoever has them will give some back; what connects meanwhile waits in the kernel's list.
        ++refused_;
        pollfd stop = {stop_fd_, POLLIN, 0};
        poll(&stop, 1, kPauseMs);
        return absl::OkStatus();
      }
      case EBADF:
      case EINVAL:
      case ENOTSOCK:
      case EOPNOTSUPP:
        return Failed("accept", errno);
      default:
        continue;  // of that connection: it was reset, or a firewall's
    }
  }
}

void Acceptor::Refused() {
  if (refused_ == 0 || NowNs() - told_at_ns_ < kTellEveryNs) return;
  told_at_ns_ = NowNs();
  events_.on_refused(std::exchange(refused_, 0));
}

}  // namespace winnow::server
