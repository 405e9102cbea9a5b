#include "server/http/http_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/core/error.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/status.hpp>
#include <filesystem>
#include <list>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/check.h"
#include "server/acceptor.h"
#include "server/strings.h"
#include "server/tls_files.h"

namespace winnow::server {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

template <typename T = void>
using Task = asio::awaitable<T>;
// Errors come as values: a client that goes away is no exception.
constexpr auto kValues = asio::as_tuple(asio::use_awaitable);

// Bytes that are read ahead of what is being answered.
constexpr size_t kReadAheadBytes = 64 << 10;
// Each piece of a body extends its deadline: slower than this it runs out of time.
constexpr size_t kBodyBytesPerSecond = 64 << 10;
// Each socket's send buffer. The system's own choice grows to megabytes for a client that does not read.
constexpr int kSendBufferBytes = 128 << 10;
// A connection that is closed before its request was read gets this long to read the response.
constexpr std::chrono::seconds kLinger{1};

// A body whose memory follows what has arrived, not what was announced, and that counts against the
// budget of all connections.
struct CountedBody {
  struct value_type {
    std::string bytes;
    std::atomic<size_t>* total = nullptr;
    size_t total_max = 0;
  };
  class reader {
   public:
    template <bool is_request, class Fields>
    reader(http::header<is_request, Fields>&, value_type& body) : body_(body) {}
    void init(const boost::optional<uint64_t>&, error_code& error) { error = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, error_code& error) {
      const size_t size = boost::beast::buffer_bytes(buffers);
      if (body_.total->fetch_add(size) + size > body_.total_max) {
        body_.total->fetch_sub(size);
        error = http::error::buffer_overflow;
        return 0;
      }
      for (const asio::const_buffer buffer : boost::beast::buffers_range_ref(buffers)) {
        body_.bytes.append(static_cast<const char*>(buffer.data()), buffer.size());
      }
      error = {};
      return size;
    }
    void finish(error_code& error) { error = {}; }

   private:
    value_type& body_;
  };
};
using Parser = http::request_parser<CountedBody>;

// What all threads share.
struct Shared {
  HttpServerOptions options;
  HttpHandler* handler = nullptr;
  const engine::Clock* clock = nullptr;
  std::atomic<bool> draining = false;
  std::atomic<size_t> receiving_bytes = 0;
  std::atomic<int64_t> connections = 0;  // never more than may be
  std::atomic<uint64_t> accepted = 0, refused = 0, evicted = 0, timed_out = 0, accept_errors = 0;

  std::unique_ptr<TlsFiles> tls;  // null: plaintext

  // Counts one more connection, unless there are as many as may be.
  bool TakePlace() {
    int64_t now = connections;
    while (now < static_cast<int64_t>(options.max_connections)) {
      if (connections.compare_exchange_weak(now, now + 1)) return true;
    }
    return false;
  }
};

class Connection;

// One thread and its connections. Everything but `context`, which others post to, is its own.
struct IoThread {
  explicit IoThread(Shared& shared) : shared(shared), context(1) {}
  Shared& shared;
  asio::io_context context;
  std::list<Connection*> connections;  // each of them keeps itself alive while it runs
  std::list<Connection*> idle;         // those between requests, longest idle first
  bool stopping = false;
  std::array<char, 16 << 10> scratch;  // read into at once, never across a suspension
};

// Lets one coroutine wait until another says that something changed.
class Signal {
 public:
  explicit Signal(asio::io_context& context)
      : timer_(context, asio::steady_timer::time_point::max()) {}
  void Notify() {
    set_ = true;
    timer_.cancel();
  }
  Task<> Wait() {
    if (!set_) co_await timer_.async_wait(kValues);
    set_ = false;
  }

 private:
  asio::steady_timer timer_;
  bool set_ = false;
};

// A connection is two coroutines on one thread: Receive reads what comes, so that a client that goes
// away is noticed at once; Serve parses, has the request answered and writes.
class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  // With a place that was taken for it.
  Connection(IoThread& io, const std::shared_ptr<IoThread>& owner, tcp::socket socket)
      : io_(io),
        owner_(owner),
        shared_(io.shared),
        socket_(std::move(socket)),
        news_(io.context),
        room_(io.context),
        in_list_(io_.connections.insert(io_.connections.end(), this)),
        in_idle_(io_.idle.end()) {}
  ~Connection() {
    io_.connections.erase(in_list_);
    if (has_place_) --shared_.connections;
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Task<> Serve();
  // The ticker's: closes what is overdue, and wakes who should ping.
  void Check(engine::TimePoint now);
  // Ends both coroutines soon.
  void Abort();
  // The same for one that waits for a request. It counts as idle no more, and its place is whose it
  // makes room for at once: a burst of connections comes before its coroutines have ended.
  void Evict() {
    SetIdle(false);
    has_place_ = false;
    Abort();
  }
  void Notify() { news_.Notify(); }

 private:
  // Counts a time-out once.
  void CountTimeOut();
  Task<> Receive();
  Task<bool> Handshake();
  Task<bool> ServeOne();
  Task<std::optional<HttpPiece>> ReadHead(Parser& parser, HttpRequest& request);
  Task<std::optional<HttpPiece>> ReadBody(Parser& parser);
  Task<bool> More();
  Task<bool> Respond(HttpExchange& exchange, bool head_only, bool keep_alive, bool http10);
  Task<bool> Write();
  Task<> Linger();
  void PutPiece(const HttpPiece& piece, bool head_only, bool close, bool http10);
  HttpPiece BadRequest(error_code error);
  void SetIdle(bool idle);
  void SetDeadline(engine::Duration after) { deadline_ = shared_.clock->Now() + after; }
  void NoDeadline() { deadline_ = engine::TimePoint::max(); }
  void Consume(size_t bytes) {
    in_.erase(0, bytes);
    room_.Notify();
  }
  HttpWaker Waker();

  IoThread& io_;
  // The thread's own handlers keep it, too; this is for wakers, which outlive both.
  const std::weak_ptr<IoThread> owner_;
  Shared& shared_;
  tcp::socket socket_;
  std::unique_ptr<asio::ssl::stream<tcp::socket&>> tls_;
  std::string certificate_name_;
  std::string in_;         // received and not yet parsed
  bool has_place_ = true;  // among those that `Shared` counts
  bool in_ended_ = false;  // nothing more comes
  bool discard_ = false;   // what comes is of no interest any more
  Signal news_;            // for Serve: bytes, the end of them, or the exchange's waker
  Signal room_;            // for Receive
  std::string out_;        // being written
  engine::TimePoint deadline_ = engine::TimePoint::max();
  engine::TimePoint ping_at_ = engine::TimePoint::max();
  bool timed_out_ = false;  // and not counted yet
  bool ping_due_ = false;
  std::list<Connection*>::iterator in_list_, in_idle_;
};

void Connection::CountTimeOut() {
  if (std::exchange(timed_out_, false)) ++shared_.timed_out;
}

void Connection::Check(engine::TimePoint now) {
  if (now >= deadline_) {
    NoDeadline();
    timed_out_ = true;
    Abort();
  }
  if (now >= ping_at_) {
    ping_at_ = engine::TimePoint::max();
    ping_due_ = true;
    Notify();
  }
}

void Connection::Abort() {
  error_code ignored;
  socket_.close(ignored);
  in_ended_ = true;
  news_.Notify();
  room_.Notify();
}

void Connection::SetIdle(bool idle) {
  if (idle == (in_idle_ != io_.idle.end())) return;
  if (idle) {
    in_idle_ = io_.idle.insert(io_.idle.end(), this);
  } else {
    io_.idle.erase(in_idle_);
    in_idle_ = io_.idle.end();
  }
}

HttpWaker Connection::Waker() {
  return [owner = owner_, self = weak_from_this()] {
    const std::shared_ptr<IoThread> io = owner.lock();
    if (io == nullptr) return;
    asio::post(io->context, [self] {
      if (const std::shared_ptr<Connection> connection = self.lock()) connection->Notify();
    });
  };
}

Task<> Connection::Receive() {
  const std::shared_ptr<Connection> self = shared_from_this();
  std::string chunk(tls_ == nullptr ? 0 : 4 << 10, '\0');
  while (!in_ended_) {
    if (in_.size() >= kReadAheadBytes) {
      co_await room_.Wait();
      continue;
    }
    error_code error;
    size_t count = 0;
    const char* data = nullptr;
    if (tls_ == nullptr) {
      // Waits first and reads then, so that a silent connection holds no buffer.
      std::tie(error) = co_await socket_.async_wait(tcp::socket::wait_read, kValues);
      if (!error) count = socket_.read_some(asio::buffer(io_.scratch), error);
      data = io_.scratch.data();
      if (error == asio::error::would_block || error == asio::error::try_again) continue;
    } else {
      std::tie(error, count) = co_await tls_->async_read_some(asio::buffer(chunk), kValues);
      data = chunk.data();
    }
    if (!discard_) in_.append(data, count);
    if (error) in_ended_ = true;
    news_.Notify();
  }
}

// Waits for bytes. False: none come any more.
Task<bool> Connection::More() {
  if (in_ended_) co_return false;
  co_await news_.Wait();
  co_return true;
}

Task<bool> Connection::Handshake() {
  if (shared_.tls == nullptr) co_return true;
  SSL* const ssl = SSL_new(shared_.tls->Context().get());
  if (ssl == nullptr) co_return false;
  tls_ = std::make_unique<asio::ssl::stream<tcp::socket&>>(socket_, ssl);  // takes it
  SetDeadline(shared_.options.read_timeout);
  const auto [error] = co_await tls_->async_handshake(asio::ssl::stream_base::server, kValues);
  if (error) co_return false;
  NoDeadline();
  certificate_name_ = ClientName(tls_->native_handle());
  co_return true;
}

Task<> Connection::Serve() {
  const std::shared_ptr<Connection> self = shared_from_this();
  error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
  socket_.set_option(asio::socket_base::send_buffer_size(kSendBufferBytes), ignored);
  socket_.non_blocking(true, ignored);
  SetIdle(true);  // who does not finish its handshake makes room, too
  const bool shaken = co_await Handshake();
  if (shaken) {
    asio::co_spawn(io_.context, Receive(), asio::detached);
    for (;;) {
      const bool again = co_await ServeOne();
      if (!again) break;
    }
  }
  SetIdle(false);
  CountTimeOut();
  Abort();
}

// One request and its response. False: the connection is done.
Task<bool> Connection::ServeOne() {
  SetIdle(true);
  SetDeadline(shared_.options.idle_timeout);
  while (in_.empty()) {
    const bool more = co_await More();
    if (!more) {
      timed_out_ = false;  // a connection that was idle is no loss
      co_return false;
    }
  }
  Parser parser;
  parser.header_limit(static_cast<uint32_t>(shared_.options.max_head_bytes));
  parser.body_limit(shared_.options.max_body_bytes);
  parser.get().body().total = &shared_.receiving_bytes;
  parser.get().body().total_max = shared_.options.max_receiving_bytes;
  HttpRequest request;
  std::optional<HttpPiece> refusal = co_await ReadHead(parser, request);
  // Until here: who sends a head byte by byte has no better claim than who sends nothing.
  SetIdle(false);
  if (!refusal.has_value()) refusal = co_await ReadBody(parser);
  shared_.receiving_bytes -= parser.get().body().bytes.size();
  request.body = std::move(parser.get().body().bytes);
  NoDeadline();
  if (in_ended_ && !refusal.has_value() && !parser.is_done()) co_return false;
  const bool http10 = parser.is_header_done() && parser.get().version() < 11;
  // Also where it is refused: a request without a body ends with its head.
  const bool complete = parser.is_done();
  const bool keep_alive = complete && parser.keep_alive();
  const bool head_only = request.method == "HEAD";
  std::unique_ptr<HttpExchange> exchange =
      refusal.has_value() ? Answered(*std::move(refusal))
                          : shared_.handler->Handle(std::move(request), Waker());
  const bool again = co_await Respond(*exchange, head_only, keep_alive, http10);
  CountTimeOut();  // before the exchange goes, and before Linger waits
  exchange.reset();
  if (!again && !complete) co_await Linger();
  co_return again;
}

HttpPiece Connection::BadRequest(error_code error) {
  if (error == http::error::header_limit) {
    return shared_.handler->Refusal(
        431, Concat("the request's head has more than ", shared_.options.max_head_bytes, " bytes"));
  }
  if (error == http::error::body_limit) {
    return shared_.handler->Refusal(
        413, Concat("the request's body has more than ", shared_.options.max_body_bytes, " bytes"));
  }
  if (error == http::error::buffer_overflow) {
    return shared_.handler->Refusal(503, "too many requests are being received: try again");
  }
  return shared_.handler->Refusal(400, Concat("not an HTTP request: ", error.message()));
}

// Nothing: the head is there (or the connection ended: in_ended_).
Task<std::optional<HttpPiece>> Connection::ReadHead(Parser& parser, HttpRequest& request) {
  SetDeadline(shared_.options.read_timeout);
  // The parser's limit is one of what it is given at once, and it takes whole lines as they come.
  size_t head_bytes = 0;
  while (!parser.is_header_done()) {
    error_code error;
    const size_t used = parser.put(asio::buffer(in_), error);
    Consume(used);
    head_bytes += used;
    const bool done = parser.is_header_done();
    if (!done && error && error != http::error::need_more) co_return BadRequest(error);
    if (head_bytes + (done ? 0 : in_.size()) > shared_.options.max_head_bytes) {
      co_return BadRequest(http::error::header_limit);
    }
    if (done) break;
    const bool more = co_await More();
    if (!more) co_return std::nullopt;
  }
  const auto& message = parser.get();
  request.method = std::string(message.method_string());
  const std::string_view target(message.target().data(), message.target().size());
  request.path = std::string(target.substr(0, target.find('?')));
  request.certificate_name = certificate_name_;
  for (const auto& field : message) {
    request.headers.emplace_back(
        absl::AsciiStrToLower({field.name_string().data(), field.name_string().size()}),
        std::string(field.value()));
  }
  if (parser.content_length().has_value() &&
      *parser.content_length() > shared_.options.max_body_bytes) {
    co_return BadRequest(http::error::body_limit);
  }
  std::optional<HttpPiece> refusal = shared_.handler->Refuse(request);
  if (refusal.has_value()) co_return refusal;
  const std::string* const expect = request.Find("expect");
  if (expect == nullptr || parser.is_done()) co_return std::nullopt;
  if (!absl::EqualsIgnoreCase(*expect, "100-continue")) {
    co_return shared_.handler->Refusal(417, "Expect: only 100-continue is known");
  }
  out_ = "HTTP/1.1 100 Continue\r\n\r\n";
  co_await Write();
  co_return std::nullopt;
}

Task<std::optional<HttpPiece>> Connection::ReadBody(Parser& parser) {
  if (!parser.is_header_done()) co_return std::nullopt;  // the connection ended
  parser.eager(true);
  const engine::TimePoint began = shared_.clock->Now();
  while (!parser.is_done()) {
    error_code error;
    const size_t used = in_.empty() ? 0 : parser.put(asio::buffer(in_), error);
    Consume(used);
    if (parser.is_done()) break;
    if (error && error != http::error::need_more) co_return BadRequest(error);
    deadline_ = began + shared_.options.read_timeout +
                std::chrono::seconds(parser.get().body().bytes.size() / kBodyBytesPerSecond);
    if (used > 0 && !in_.empty()) continue;
    const bool more = co_await More();
    if (!more) co_return std::nullopt;
  }
  co_return std::nullopt;
}

// Sends what the exchange gives. False: the connection must be closed.
Task<bool> Connection::Respond(HttpExchange& exchange, bool head_only, bool keep_alive,
                               bool http10) {
  ping_due_ = false;
  ping_at_ = shared_.clock->Now() + shared_.options.ping_interval;
  for (;;) {
    std::optional<HttpPiece> piece = exchange.Take();
    if (!piece.has_value() && ping_due_) {
      piece = exchange.Ping();
      ping_due_ = false;
      ping_at_ = shared_.clock->Now() + shared_.options.ping_interval;
    }
    if (!piece.has_value()) {
      const bool there = co_await More();
      if (there) continue;
      exchange.Cancel(/*slow=*/false);
      co_return false;
    }
    const bool close = !keep_alive || piece->close || shared_.draining;
    PutPiece(*piece, head_only, close, http10);
    SetDeadline(shared_.options.write_timeout);
    const bool written = co_await Write();
    NoDeadline();
    if (!written) {
      exchange.Cancel(timed_out_);
      co_return false;
    }
    if (piece->last) {
      ping_at_ = engine::TimePoint::max();
      co_return !close;
    }
    ping_at_ = shared_.clock->Now() + shared_.options.ping_interval;
  }
}

// Appends a piece to out_ as HTTP/1.1 frames it.
void Connection::PutPiece(const HttpPiece& piece, bool head_only, bool close, bool http10) {
  const bool streamed = piece.head.has_value() ? piece.head->streamed : true;
  if (piece.head.has_value()) {
    const auto reason = http::obsolete_reason(http::int_to_status(piece.head->status));
    Append(out_, "HTTP/1.1 ", piece.head->status, " ",
           std::string_view(reason.data(), reason.size()), "\r\n");
    for (const auto& [name, value] : piece.head->headers) Append(out_, name, ": ", value, "\r\n");
    Append(out_, "Date: ",
           absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", absl::Now(), absl::UTCTimeZone()), "\r\n");
    if (!streamed) {
      Append(out_, "Content-Length: ", piece.body.size(), "\r\n");
    } else if (!http10) {
      out_ += "Transfer-Encoding: chunked\r\n";
    }
    // HTTP/1.0 has no chunks: the end of the connection is the end of the body.
    Append(out_, close || http10 ? "Connection: close\r\n\r\n" : "Connection: keep-alive\r\n\r\n");
  }
  if (head_only) return;
  if (!streamed || http10) {
    out_ += piece.body;
    return;
  }
  if (!piece.body.empty()) {
    Append(out_, absl::StrFormat("%x\r\n", piece.body.size()), piece.body, "\r\n");
  }
  if (piece.last) out_ += "0\r\n\r\n";
}

Task<bool> Connection::Write() {
  error_code error;
  size_t count = 0;
  if (tls_ == nullptr) {
    std::tie(error, count) = co_await asio::async_write(socket_, asio::buffer(out_), kValues);
  } else {
    std::tie(error, count) = co_await asio::async_write(*tls_, asio::buffer(out_), kValues);
  }
  if (out_.capacity() > (64 << 10)) out_ = {};
  out_.clear();
  co_return !error;
}

// The client may still be sending what nobody reads. Closing at once would reset the connection and
// take the response away from it.
Task<> Connection::Linger() {
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  discard_ = true;
  in_.clear();
  room_.Notify();
  SetDeadline(kLinger);
  for (;;) {
    const bool more = co_await More();
    if (!more) break;
  }
  timed_out_ = false;
}

// `crowded`: there are too few descriptors for one more connection.
void StartConnection(const std::shared_ptr<IoThread>& io, tcp::socket socket, bool crowded) {
  if (io->stopping) return;
  Shared& shared = io->shared;
  ++shared.accepted;
  if (crowded || !shared.TakePlace()) {
    if (io->idle.empty()) {
      ++shared.refused;
      static constexpr std::string_view kBusy =
          "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
          "Connection: close\r\n\r\n";
      error_code ignored;
      socket.non_blocking(true, ignored);
      if (shared.tls == nullptr) socket.write_some(asio::buffer(kBusy), ignored);
      return;
    }
    ++shared.evicted;
    io->idle.front()->Evict();
  }
  auto connection = std::make_shared<Connection>(*io, io, std::move(socket));
  asio::co_spawn(io->context, connection->Serve(), asio::detached);
}

// Looks after time-outs of the thread's connections.
Task<> Tick(std::shared_ptr<IoThread> io) {
  const HttpServerOptions& options = io->shared.options;
  const engine::Duration shortest = std::min(
      {options.idle_timeout, options.read_timeout, options.write_timeout, options.ping_interval});
  const auto pause = std::clamp<engine::Duration>(shortest / 4, std::chrono::milliseconds(10),
                                                  std::chrono::milliseconds(250));
  asio::steady_timer timer(io->context);
  while (!io->stopping) {
    timer.expires_after(pause);
    co_await timer.async_wait(kValues);
    const engine::TimePoint now = io->shared.clock->Now();
    for (Connection* connection : io->connections) connection->Check(now);
  }
}

}  // namespace

class HttpServer::Impl {
 public:
  Impl(const HttpServerOptions& options, HttpHandler& handler, Log& log, const engine::Clock& clock,
       std::function<void(const absl::Status&)> on_listener_failure)
      : log_(log), on_listener_failure_(std::move(on_listener_failure)) {
    shared_.options = options;
    shared_.handler = &handler;
    shared_.clock = &clock;
    for (int i = 0; i < options.threads; ++i)
      threads_.push_back(std::make_shared<IoThread>(shared_));
  }
  ~Impl() { Shutdown(); }

  absl::Status Listen() {
    const HttpServerOptions& options = shared_.options;
    auto tls = TlsFiles::Load(
        {.cert = options.tls_cert, .key = options.tls_key, .client_ca = options.tls_client_ca},
        TlsFiles::Protocol::kHttp1, [this](const absl::Status& status) {
          log_.Event(LogLevel::kWarn, "http_tls", {{"message", ToStd(status.message())}});
        });
    if (!tls.ok()) return tls.status();
    shared_.tls = *std::move(tls);
    absl::StatusOr<std::unique_ptr<Acceptor>> acceptor =
        Acceptor::Listen({.host = options.host, .port = options.port});
    if (!acceptor.ok()) {
      return absl::UnavailableError(Concat("http: cannot listen on ", options.host, ":",
                                           options.port, ": ", ToStd(acceptor.status().message())));
    }
    acceptor_ = *std::move(acceptor);
    for (const std::shared_ptr<IoThread>& io : threads_) {
      asio::co_spawn(io->context, Tick(io), asio::detached);
      running_.emplace_back([io] { io->context.run(); });
    }
    acceptor_->Start(ConnectionDescriptors(RaiseDescriptorLimit()),
                     {.on_connection = [this](int fd) { HandOver(fd, /*crowded=*/false); },
                      .on_crowded = [this](int fd) { HandOver(fd, /*crowded=*/true); },
                      .on_refused = [this](uint64_t refused) { shared_.accept_errors += refused; },
                      .on_failure = on_listener_failure_});
    return absl::OkStatus();
  }

  int port() const { return acceptor_->port(); }
  Shared& shared() { return shared_; }

 private:
  // To the I/O threads in turn.
  void HandOver(int fd, bool crowded) {
    const std::shared_ptr<IoThread> io = threads_[next_++ % threads_.size()];
    asio::post(io->context, [io, fd, crowded] {
      sockaddr_storage address = {};
      socklen_t size = sizeof address;
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
      tcp::socket socket(io->context);
      error_code error;
      socket.assign(address.ss_family == AF_INET6 ? tcp::v6() : tcp::v4(), fd, error);
      if (error) {
        close(fd);
        return;
      }
      StartConnection(io, std::move(socket), crowded);
    });
  }

  void Shutdown() {
    if (running_.empty()) return;
    acceptor_->Stop();
    for (const std::shared_ptr<IoThread>& io : threads_) {
      asio::post(io->context, [this, io] {
        io->stopping = true;
        for (Connection* connection : io->connections) connection->Abort();
      });
    }
    // Each returns when its last coroutine has ended.
    for (std::thread& thread : running_) thread.join();
    running_.clear();
  }

  Log& log_;
  const std::function<void(const absl::Status&)> on_listener_failure_;
  Shared shared_;
  std::vector<std::shared_ptr<IoThread>> threads_;
  std::unique_ptr<Acceptor> acceptor_;
  size_t next_ = 0;  // thread, for a connection; the acceptor's thread
  std::vector<std::thread> running_;
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const HttpServerOptions& options, HttpHandler& handler, Log& log, const engine::Clock& clock,
    std::function<void(const absl::Status&)> on_listener_failure) {
  WINNOW_CHECK(options.threads >= 1);
  auto impl = std::make_unique<Impl>(options, handler, log, clock, std::move(on_listener_failure));
  if (absl::Status status = impl->Listen(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

absl::Status HttpServer::ReloadTls() {
  TlsFiles* const tls = impl_->shared().tls.get();
  return tls == nullptr ? absl::OkStatus() : tls->Reload();
}

int HttpServer::port() const { return impl_->port(); }

HttpServerStats HttpServer::stats() const {
  const Shared& shared = impl_->shared();
  HttpServerStats stats;
  stats.connections = shared.connections;
  stats.accepted = shared.accepted;
  stats.refused = shared.refused;
  stats.evicted = shared.evicted;
  stats.timed_out = shared.timed_out;
  stats.accept_errors = shared.accept_errors;
  return stats;
}

void HttpServer::BeginDrain() { impl_->shared().draining = true; }

}  // namespace winnow::server
