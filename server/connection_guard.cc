#include "server/connection_guard.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <list>
#include <optional>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/synchronization/mutex.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Pair = asio::local::stream_protocol;
using Time = std::chrono::steady_clock;

template <typename T = void>
using Task = asio::awaitable<T>;
constexpr auto kValues = asio::as_tuple(asio::use_awaitable);

constexpr size_t kReadBytes = 16 << 10;
// Buffers of each socket, in bytes: what a client that does not read makes the guard and the kernel hold.
constexpr int kBufferBytes = 128 << 10;
constexpr std::chrono::milliseconds kGiveEvery{10};
// All connections' own allowances of resets together, so that a thousand connections have no thousand times as
// much: saved up, and in a second.
constexpr int64_t kAllResetsMost = 8192, kAllResetsEachSecond = 1024;
constexpr std::chrono::milliseconds kCheckEvery{250};

// Grows with time up to a most.
class Bucket {
 public:
  Bucket(int64_t begins, int64_t most, int64_t each_second, Time::time_point now)
      : level_(static_cast<double>(begins)),
        most_(static_cast<double>(most)),
        each_second_(static_cast<double>(each_second)),
        at_(now) {}

  int64_t Level(Time::time_point now) {
    const double seconds = std::chrono::duration<double>(now - at_).count();
    level_ = std::min(most_, level_ + seconds * each_second_);
    at_ = now;
    return static_cast<int64_t>(level_);
  }
  // Lower ones than it was made with.
  void Bound(double most, double each_second) {
    most_ = most;
    each_second_ = each_second;
  }
  void Take(int64_t amount) { level_ -= static_cast<double>(amount); }

 private:
  double level_, most_, each_second_;
  Time::time_point at_;
};

struct Buckets {
  Bucket resets, control;
  Buckets(const Http2Credit& begins, const Http2Credit& most, const Http2Credit& each_second)
      : resets(begins.resets, most.resets, each_second.resets, Time::now()),
        control(begins.control, most.control, each_second.control, Time::now()) {}
};

enum Kind : uint8_t { kResets, kControl, kOpenings };

class Link;

// The thread's.
struct Shared {
  explicit Shared(const GuardOptions& options)
      : options(options),
        context(1),
        shared(options.shared_most, options.shared_most, options.shared_each_second),
        openings(options.connections_most, options.connections_most,
                 options.connections_each_second, Time::now()),
        ticker(context) {}

  const GuardOptions options;
  TlsFiles* tls = nullptr;
  std::function<void(int)> to_grpc;
  asio::io_context context;
  bool stopping = false;
  std::list<Link*> links;
  std::array<std::list<Link*>, 3> waiting;  // for credit, by its kind, longest first
  Buckets shared;
  Bucket openings;
  asio::steady_timer ticker;
  uint64_t next_id = 1;
  std::array<char, kReadBytes> up{}, down{};  // read into at once, never across a suspension

  std::atomic<int64_t> connections = 0;
  std::atomic<uint64_t> accepted = 0, broken = 0, delayed = 0;

  absl::Mutex mutex;
  absl::flat_hash_map<uint64_t, std::string> names ABSL_GUARDED_BY(mutex);  // of certificates
};

// A client's connection and gRPC's. Two coroutines: Up from the client, Down to it.
class Link final : public std::enable_shared_from_this<Link> {
 public:
  Link(Shared& shared, tcp::socket socket)
      : shared_(shared),
        id_(shared.next_id++),
        client_(std::move(socket)),
        inner_(shared.context),
        given_(shared.context, asio::steady_timer::time_point::max()),
        meter_(shared.options.http2),
        own_(shared.options.begins, shared.options.most, shared.options.each_second),
        in_list_(shared.links.insert(shared.links.end(), this)),
        in_waiting_(shared.waiting[0].end()) {
    ++shared_.connections;
    ++shared_.accepted;
  }
  ~Link() {
    shared_.links.erase(in_list_);
    StopWaiting();
    --shared_.connections;
    absl::MutexLock lock(&shared_.mutex);
    shared_.names.erase(id_);
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  Task<> Up();
  void Check(Time::time_point now) {
    // Nobody needs the unread rest of a client that is gone.
    if (now >= deadline_ || (waits_ && IsGone())) Abort();
  }
  // The client has closed its end, which nobody reads while the link waits.
  bool IsGone() {
    pollfd end = {client_.native_handle(), POLLRDHUP, 0};
    return poll(&end, 1, 0) > 0;
  }
  void Drop() {
    StopWaiting();
    Abort();
  }
  void Abort() {
    aborted_ = true;
    error_code ignored;
    client_.close(ignored);
    inner_.close(ignored);
    given_.cancel();
  }
  // Whether its own credit of the kind that it waits for has grown to what any frame costs, or to all that it can save.
  bool HasEarned(Time::time_point now) {
    const Http2Credit own = Own(now);
    const Http2Credit& most = shared_.options.most;
    if (waits_for_ == kResets) return own.resets >= 1;
    return own.control >= std::clamp<int64_t>(most.control, 1, Http2Meter::kMostCost);
  }
  // Credit of what all share, of the kind that it waits for.
  void Give(int64_t credit) {
    if (waits_for_ == kResets) drawn_.resets += credit;
    if (waits_for_ == kControl) drawn_.control += credit;
    StopWaiting();
    given_.cancel();
  }

 private:
  Task<> Down();
  // What it has of its own; below zero, where the server's resets took more.
  Http2Credit Own(Time::time_point now);
  Task<bool> Handshake();
  Task<bool> Forward(std::string_view bytes);
  Task<std::pair<error_code, std::string_view>> ReadClient();
  Task<bool> WaitForTurn();
  Task<bool> Open();
  bool Connect();
  Task<> WaitForCredit(Kind kind);
  void StopWaiting() {
    if (!waits_) return;
    shared_.waiting[waits_for_].erase(in_waiting_);
    waits_ = false;
  }

  Shared& shared_;
  const uint64_t id_;
  tcp::socket client_;
  std::unique_ptr<asio::ssl::stream<tcp::socket&>> tls_;
  std::string tls_up_;  // read into
  Pair::socket inner_;
  asio::steady_timer given_;
  Http2Meter meter_;
  Http2ResetCounter server_resets_;
  Buckets own_;
  Http2Credit drawn_;  // of what all share, not used yet
  std::string out_;    // to gRPC, being written
  std::string in_;     // to the client, being written
  bool aborted_ = false;
  bool had_turn_ = false;
  bool waits_ = false;
  Kind waits_for_ = kResets;
  Time::time_point deadline_ = Time::time_point::max();
  std::list<Link*>::iterator in_list_, in_waiting_;
};

Task<bool> Link::Handshake() {
  if (shared_.tls == nullptr) co_return true;
  const bool turn = co_await WaitForTurn();
  if (!turn) co_return false;
  const std::shared_ptr<SSL_CTX> context = shared_.tls->Context();
  SSL* const ssl = SSL_new(context.get());
  if (ssl == nullptr) co_return false;
  tls_ = std::make_unique<asio::ssl::stream<tcp::socket&>>(client_, ssl);  // takes it
  const auto [error] = co_await tls_->async_handshake(asio::ssl::stream_base::server, kValues);
  if (error) co_return false;
  const unsigned char* protocol = nullptr;
  unsigned length = 0;
  SSL_get0_alpn_selected(tls_->native_handle(), &protocol, &length);
  if (length == 0) co_return false;  // no gRPC client
  tls_up_.resize(kReadBytes);
  if (std::string name = ClientName(tls_->native_handle()); !name.empty()) {
    absl::MutexLock lock(&shared_.mutex);
    shared_.names.emplace(id_, std::move(name));
  }
  co_return true;
}

// The bytes are valid until the next suspension.
Task<std::pair<error_code, std::string_view>> Link::ReadClient() {
  error_code error;
  size_t count = 0;
  if (tls_ != nullptr) {
    std::tie(error, count) = co_await tls_->async_read_some(asio::buffer(tls_up_), kValues);
    co_return std::pair(error, std::string_view(tls_up_.data(), count));
  }
  // Waits first and reads then, so that a silent connection holds no buffer.
  std::tie(error) = co_await client_.async_wait(tcp::socket::wait_read, kValues);
  if (!error) count = client_.read_some(asio::buffer(shared_.up), error);
  if (error == asio::error::would_block || error == asio::error::try_again) error = {};
  co_return std::pair(error, std::string_view(shared_.up.data(), count));
}

// Gives gRPC its end. Its name for ours has the connection's id.
bool Link::Connect() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) return false;
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  const std::string text =
      Concat("winnow-", getpid(), "-", reinterpret_cast<uintptr_t>(&shared_), "-", id_);
  std::copy(text.begin(), text.end(), name.sun_path + 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  error_code error;
  if (bind(ends[0], reinterpret_cast<const sockaddr*>(&name), size) == 0) {
    inner_.assign(Pair(), ends[0], error);
  } else {
    error = asio::error::address_in_use;
  }
  if (error) {
    close(ends[0]);
    close(ends[1]);
    return false;
  }
  for (const int end : ends) {
    setsockopt(end, SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof kBufferBytes);
  }
  inner_.non_blocking(true, error);
  shared_.to_grpc(ends[1]);
  return true;
}

// A turn to be opened, which is a handshake and gRPC's work. False: the connection is done.
Task<bool> Link::WaitForTurn() {
  if (std::exchange(had_turn_, true)) co_return true;
  if (shared_.waiting[kOpenings].empty() && shared_.openings.Level(Time::now()) >= 1) {
    shared_.openings.Take(1);
    co_return true;
  }
  co_await WaitForCredit(kOpenings);
  co_return !aborted_ && !IsGone();
}

Task<bool> Link::Open() {
  const bool turn = co_await WaitForTurn();
  if (!turn || !Connect()) co_return false;
  deadline_ = Time::time_point::max();
  asio::co_spawn(
      shared_.context, [self = shared_from_this()] { return self->Down(); }, asio::detached);
  co_return true;
}

Task<> Link::WaitForCredit(Kind kind) {
  if (aborted_) co_return;
  ++shared_.delayed;
  waits_ = true;
  waits_for_ = kind;
  in_waiting_ = shared_.waiting[kind].insert(shared_.waiting[kind].end(), this);
  if (shared_.waiting[kind].size() == 1) shared_.ticker.cancel();
  co_await given_.async_wait(kValues);
  given_.expires_at(asio::steady_timer::time_point::max());
  StopWaiting();
}

Http2Credit Link::Own(Time::time_point now) {
  const auto links = static_cast<double>(std::max<int64_t>(shared_.connections, 1));
  const GuardOptions& options = shared_.options;
  own_.resets.Bound(
      std::min(static_cast<double>(options.most.resets), kAllResetsMost / links),
      std::min(static_cast<double>(options.each_second.resets), kAllResetsEachSecond / links));
  return {own_.resets.Level(now), own_.control.Level(now)};
}

// Hands on what is paid for, and waits for what is not. False: the connection is done.
Task<bool> Link::Forward(std::string_view bytes) {
  std::string rest(bytes);
  size_t from = 0;
  while (from < rest.size() && !aborted_) {
    const Http2Credit own = Own(Time::now());
    Http2Credit credit = {std::max<int64_t>(own.resets, 0) + drawn_.resets,
                          std::max<int64_t>(own.control, 0) + drawn_.control};
    const Http2Credit before = credit;
    const Http2Meter::Passed passed = meter_.Pass(std::string_view(rest).substr(from), credit);
    if (!passed.status.ok()) {
      ++shared_.broken;
      co_return false;
    }
    // Drawn credit goes first: it was drawn because it was needed.
    const auto pay = [](int64_t cost, int64_t& drawn, Bucket& bucket) {
      const int64_t from_drawn = std::min(cost, drawn);
      drawn -= from_drawn;
      bucket.Take(cost - from_drawn);
    };
    pay(before.resets - credit.resets, drawn_.resets, own_.resets);
    pay(before.control - credit.control, drawn_.control, own_.control);
    if (meter_.begun() && !inner_.is_open()) {
      const bool open = co_await Open();
      if (!open) co_return false;
    }
    out_.append(rest, from, passed.bytes);
    from += passed.bytes;
    if (inner_.is_open() && !out_.empty()) {
      const auto [error, count] = co_await asio::async_write(inner_, asio::buffer(out_), kValues);
      if (error) co_return false;
      out_.clear();
    }
    if (from < rest.size()) co_await WaitForCredit(passed.lacks_resets ? kResets : kControl);
  }
  co_return !aborted_;
}

Task<> Link::Up() {
  const std::shared_ptr<Link> self = shared_from_this();
  error_code ignored;
  client_.non_blocking(true, ignored);
  client_.set_option(asio::socket_base::send_buffer_size(kBufferBytes), ignored);
  deadline_ = Time::now() + shared_.options.begin_timeout;
  bool going = co_await Handshake();
  while (going && !aborted_) {
    const auto [error, bytes] = co_await ReadClient();
    if (!bytes.empty()) going = co_await Forward(bytes);
    if (error) break;
  }
  Abort();
}

Task<> Link::Down() {
  const std::shared_ptr<Link> self = shared_from_this();
  while (!aborted_) {
    auto [error] = co_await inner_.async_wait(Pair::socket::wait_read, kValues);
    size_t count = 0;
    if (!error) count = inner_.read_some(asio::buffer(shared_.down), error);
    if (error == asio::error::would_block || error == asio::error::try_again) continue;
    if (error) break;
    in_.assign(shared_.down.data(), count);
    if (const int64_t resets = server_resets_.Count(in_); resets > 0) own_.resets.Take(resets);
    deadline_ = Time::now() + shared_.options.write_timeout;
    size_t written = 0;
    if (tls_ == nullptr) {
      std::tie(error, written) = co_await asio::async_write(client_, asio::buffer(in_), kValues);
    } else {
      std::tie(error, written) = co_await asio::async_write(*tls_, asio::buffer(in_), kValues);
    }
    deadline_ = Time::time_point::max();
    if (error) break;
  }
  // Written bytes are sent before the connection ends.
  error_code ignored;
  client_.shutdown(tcp::socket::shutdown_both, ignored);
  Abort();
}

// Gives what all share to those that wait for it, in turn and in equal parts of at least `least`.
void Share(std::list<Link*>& waiting, Bucket& bucket, int64_t least) {
  if (waiting.empty()) return;
  const Time::time_point now = Time::now();
  const int64_t part = std::max(bucket.Level(now) / static_cast<int64_t>(waiting.size()), least);
  while (!waiting.empty() && bucket.Level(now) >= part) {
    Link* const link = waiting.front();
    if (link->IsGone()) {
      link->Drop();
      continue;
    }
    bucket.Take(part);
    link->Give(part);
  }
}

// Turns to be opened, one each. The latest first, and none for who went away meanwhile: what a flood has left behind
// cannot always be told from clients (its end is behind bytes that nobody reads), and must not stand before those
// that come after it.
void ShareTurns(std::list<Link*>& waiting, Bucket& openings) {
  while (!waiting.empty()) {
    Link* const link = waiting.back();
    if (!link->IsGone()) {
      if (openings.Level(Time::now()) < 1) return;
      openings.Take(1);
    }
    link->Give(0);
  }
}

// Those that wait while there is nothing to share go on with what they earn themselves.
void WakeEarners(std::list<Link*>& waiting) {
  const Time::time_point now = Time::now();
  for (auto next = waiting.begin(); next != waiting.end();) {
    Link* const link = *next++;
    if (link->HasEarned(now)) link->Give(0);
  }
}

Task<> Tick(Shared& shared) {
  Time::time_point check_at = Time::now();
  while (!shared.stopping) {
    const bool wait = std::any_of(shared.waiting.begin(), shared.waiting.end(),
                                  [](const auto& list) { return !list.empty(); });
    shared.ticker.expires_after(wait ? kGiveEvery : kCheckEvery);
    co_await shared.ticker.async_wait(kValues);
    WakeEarners(shared.waiting[kResets]);
    WakeEarners(shared.waiting[kControl]);
    Share(shared.waiting[kResets], shared.shared.resets, 1);
    Share(shared.waiting[kControl], shared.shared.control, 32);
    ShareTurns(shared.waiting[kOpenings], shared.openings);
    if (Time::now() < check_at) continue;
    check_at = Time::now() + kCheckEvery;
    for (Link* link : shared.links) link->Check(Time::now());
  }
}

}  // namespace

class ConnectionGuard::Impl {
 public:
  Impl(const GuardOptions& options, TlsFiles* tls, std::function<void(int)> to_grpc)
      : shared_(options) {
    shared_.tls = tls;
    shared_.to_grpc = std::move(to_grpc);
    asio::co_spawn(shared_.context, Tick(shared_), asio::detached);
    thread_ = std::thread([this] { shared_.context.run(); });
  }
  ~Impl() {
    asio::post(shared_.context, [this] {
      shared_.stopping = true;
      shared_.ticker.cancel();
      for (Link* link : shared_.links) link->Abort();
    });
    thread_.join();  // when the last coroutine has ended
  }

  void Add(int fd) {
    asio::post(shared_.context, [this, fd] {
      tcp::socket socket(shared_.context);
      error_code error;
      sockaddr_storage address = {};
      socklen_t size = sizeof address;
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
      socket.assign(address.ss_family == AF_INET6 ? tcp::v6() : tcp::v4(), fd, error);
      if (error || shared_.stopping) {
        if (error) close(fd);
        return;
      }
      auto link = std::make_shared<Link>(shared_, std::move(socket));
      asio::co_spawn(
          shared_.context, [link] { return link->Up(); }, asio::detached);
    });
  }

  std::string ClientNameOf(std::string_view peer) {
    uint64_t id = 0;
    const size_t dash = peer.rfind('-');
    if (dash == peer.npos || !absl::SimpleAtoi(ToAbsl(peer.substr(dash + 1)), &id)) return "";
    absl::MutexLock lock(&shared_.mutex);
    const auto name = shared_.names.find(id);
    return name == shared_.names.end() ? "" : name->second;
  }

  GuardStats stats() const {
    return {.connections = shared_.connections,
            .accepted = shared_.accepted,
            .broken = shared_.broken,
            .delayed = shared_.delayed};
  }

 private:
  Shared shared_;
  std::thread thread_;
};

ConnectionGuard::ConnectionGuard(const GuardOptions& options, TlsFiles* tls,
                                 std::function<void(int fd)> to_grpc)
    : impl_(std::make_unique<Impl>(options, tls, std::move(to_grpc))) {}
ConnectionGuard::~ConnectionGuard() = default;

void ConnectionGuard::Add(int fd) { impl_->Add(fd); }

std::string ConnectionGuard::ClientNameOf(std::string_view peer) const {
  return impl_->ClientNameOf(peer);
}

GuardStats ConnectionGuard::stats() const { return impl_->stats(); }

}  // namespace winnow::server
