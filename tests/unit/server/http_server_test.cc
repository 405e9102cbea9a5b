#include "server/http/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <spdlog/sinks/null_sink.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "tests/unit/server/movable_clock.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::chrono::seconds kPatience{120};

bool Eventually(const std::function<bool()>& condition) {
  for (const auto end = std::chrono::steady_clock::now() + kPatience;
       std::chrono::steady_clock::now() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

// A client that sends and receives bytes.
class Socket {
 public:
  explicit Socket(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval patience{.tv_sec = kPatience.count(), .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    // A window of a few kilobytes, so that a client that does not read is soon noticed.
    const int bytes = 4096;
    setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void Send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // the server has closed
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }
  // Until `end` has come, or the server closes.
  std::string ReadUntil(std::string_view end) {
    std::string got;
    while (got.find(end) == got.npos) {
      char chunk[4096];
      const ssize_t count = recv(fd_, chunk, sizeof(chunk), 0);
      if (count <= 0) break;
      got.append(chunk, static_cast<size_t>(count));
    }
    return got;
  }
  // Whether the server says something, or closes, now or within a millisecond.
  bool CanRead() {
    pollfd waiting = {fd_, POLLIN, 0};
    return poll(&waiting, 1, 1) > 0;
  }
  std::string ReadAll() { return ReadUntil("\x01no such bytes"); }

 private:
  const int fd_;
};

// What the handler saw.
struct Seen {
  absl::Mutex mutex;
  std::vector<HttpRequest> requests ABSL_GUARDED_BY(mutex);
  HttpWaker waker ABSL_GUARDED_BY(mutex);
  std::atomic<int> gone = 0, slow = 0, destroyed = 0, taken = 0;
  std::atomic<bool> speak = false;  // "/silent" has its answer
  std::atomic<bool> waits = false;  // "/silent" was asked, and neither it nor a ping was there
};

class Scripted final : public HttpExchange {
 public:
  Scripted(std::string path, Seen& seen) : path_(std::move(path)), seen_(seen) {}
  ~Scripted() override { ++seen_.destroyed; }

  std::optional<HttpPiece> Take() override {
    if (path_ == "/silent" && !seen_.speak) {
      seen_.waits = true;
      return std::nullopt;
    }
    HttpPiece piece = Stream(path_ == "/endless" ? std::string(16 << 10, 'x') : "said");
    piece.last = path_ != "/endless";
    ++seen_.taken;
    return piece;
  }
  std::optional<HttpPiece> Ping() override {
    seen_.waits = false;
    return Stream("ping");
  }
  void Cancel(bool slow) override { ++(slow ? seen_.slow : seen_.gone); }

 private:
  HttpPiece Stream(std::string body) {
    HttpPiece piece;
    if (!begun_) {
      piece.head.emplace();
      piece.head->streamed = true;
    }
    begun_ = true;
    piece.body = std::move(body);
    return piece;
  }

  const std::string path_;
  Seen& seen_;
  bool begun_ = false;
};

class ScriptedHandler final : public HttpHandler {
 public:
  std::optional<HttpPiece> Refuse(const HttpRequest& head) override {
    if (head.path == "/refused") return Whole(401, "", "no");
    return std::nullopt;
  }
  std::unique_ptr<HttpExchange> Handle(HttpRequest request, HttpWaker wake) override {
    absl::MutexLock lock(&seen.mutex);
    seen.requests.push_back(request);
    seen.waker = std::move(wake);
    if (request.path == "/silent" || request.path == "/endless") {
      return std::make_unique<Scripted>(request.path, seen);
    }
    return Answered(Whole(200, "text/plain", request.body));
  }
  HttpPiece Refusal(int status, std::string_view message) override {
    return Whole(status, "", std::string(message));
  }

  Seen seen;
};

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    options_.max_head_bytes = 1024;
    options_.max_body_bytes = 10000;
    // Time-outs come when the test moves the clock, and not before.
    options_.idle_timeout = options_.read_timeout = options_.write_timeout =
        options_.ping_interval = std::chrono::hours(10);
  }
  void Start() {
    auto server = HttpServer::Start(options_, handler_, log_, clock_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  int port() const { return server_->port(); }
  Seen& seen() { return handler_.seen; }

  MovableClock clock_;
  Log log_{"debug", "json", std::make_shared<spdlog::sinks::null_sink_mt>()};
  HttpServerOptions options_;
  ScriptedHandler handler_;
  std::unique_ptr<HttpServer> server_;
};

std::string Post(std::string_view path, std::string_view body, std::string_view more = "") {
  return "POST " + std::string(path) +
         " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) + "\r\n" +
         std::string(more) + "\r\n" + std::string(body);
}

TEST_F(HttpServerTest, ARequestSentByteByByteIsAnswered) {
  Start();
  Socket client(port());
  for (const char c : Post("/echo?query=1", "hello", "X-Name: a value \r\n")) {
    client.Send({&c, 1});
  }
  const std::string answer = client.ReadUntil("hello");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Length: 5\r\n"));
  EXPECT_THAT(answer, HasSubstr("Connection: keep-alive\r\n"));
  absl::MutexLock lock(&seen().mutex);
  ASSERT_EQ(seen().requests.size(), 1);
  EXPECT_EQ(seen().requests[0].method, "POST");
  EXPECT_EQ(seen().requests[0].path, "/echo");
  ASSERT_NE(seen().requests[0].Find("x-name"), nullptr);
  EXPECT_EQ(*seen().requests[0].Find("x-name"), "a value");
}

// A parser that is given a line and the next one's first byte, again and again, has never much to look at.
TEST_F(HttpServerTest, AHeadInPiecesHasTheSameBound) {
  Start();
  Socket client(port());
  client.Send("GET / HTTP/1.1\r\nx");
  int32_t pieces = 1;
  for (; pieces < 200 && !client.CanRead(); ++pieces)
    client.Send("-name: a value of a header\r\nx");
  client.Send("-last: value\r\n\r\n");
  EXPECT_THAT(client.ReadAll(), StartsWith("HTTP/1.1 431 ")) << pieces << " pieces";
  absl::MutexLock lock(&seen().mutex);
  EXPECT_TRUE(seen().requests.empty());
}

TEST_F(HttpServerTest, ChunkedBodiesArePutTogether) {
  Start();
  Socket client(port());
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
      "3\r\nabc\r\n2;name=value\r\nde\r\n0\r\nTrailer: x\r\n\r\n");
  EXPECT_THAT(client.ReadUntil("abcde"), HasSubstr("Content-Length: 5\r\n"));
}

TEST_F(HttpServerTest, WhatIsTooLargeOrMalformedIsRefusedAndTheConnectionClosed) {
  Start();
  const std::string big(20000, 'x');
  const struct {
    std::string bytes, status;
  } cases[] = {
      {"GET / HTTP/1.1\r\nX: " + big + "\r\n\r\n", "431"},
      {"GET /" + big, "431"},
      {Post("/echo", big), "413"},
      {"POST /echo HTTP/1.1\r\nContent-Length: 1073741824\r\n\r\n", "413"},
      {"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4e20\r\n" + big, "413"},
      {"POST /echo HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", "400"},
      {"POST /echo HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
       "400"},
      {"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "400"},
      {"nonsense\r\n\r\n", "400"},
      {"GET / HTTP/9.9\r\n\r\n", "400"},
      {"GET / HTTP/1.1\r\nA b: c\r\n\r\n", "400"},
      {std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + "\r\n\r\n", "400"},
      {Post("/echo", "", "Expect: the-impossible\r\n"),
       "200"},  // its body is there: nothing to expect
      {Post("/refused", "body"), "401"},
  };
  for (const auto& one : cases) {
    Socket client(port());
    client.Send(one.bytes);
    const bool closes = one.status != "200";
    const std::string answer = closes ? client.ReadAll() : client.ReadUntil("\r\n\r\n");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 " + one.status)) << one.bytes.substr(0, 70);
    if (closes) {
      EXPECT_THAT(answer, HasSubstr("Connection: close\r\n"));
    }
  }
  Socket client(port());
  client.Send("POST /echo HTTP/1.1\r\nContent-Length: 9\r\nExpect: the-impossible\r\n\r\n");
  EXPECT_THAT(client.ReadAll(), StartsWith("HTTP/1.1 417"));
}

TEST_F(HttpServerTest, AClientThatExpectsItIsToldToContinue) {
  Start();
  Socket client(port());
  client.Send("POST /echo HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.Send("ok");
  EXPECT_THAT(client.ReadUntil("ok"), StartsWith("HTTP/1.1 200"));
  // Not who is refused anyway.
  Socket refused(port());
  refused.Send("POST /refused HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_THAT(refused.ReadAll(), StartsWith("HTTP/1.1 401"));
}

TEST_F(HttpServerTest, Http10ClientsGetNoChunks) {
  Start();
  Socket client(port());
  seen().speak = true;
  client.Send("GET /silent HTTP/1.0\r\n\r\n");
  const std::string answer = client.ReadAll();
  EXPECT_THAT(answer, ::testing::EndsWith("\r\n\r\nsaid"));
  EXPECT_EQ(answer.find("chunked"), answer.npos);
}

TEST_F(HttpServerTest, RequestsThatDoNotArriveRunOutOfTime) {
  options_.read_timeout = std::chrono::seconds(10);
  Start();
  Socket head(port()), body(port()), idle(port());
  head.Send("GET / HT");
  body.Send("POST /echo HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf");
  ASSERT_TRUE(Eventually([&] { return server_->stats().connections == 3; }));
  // A byte now and then does not help the head.
  clock_.Advance(std::chrono::seconds(6));
  head.Send("T");
  clock_.Advance(std::chrono::seconds(5));
  EXPECT_EQ(head.ReadAll(), "");
  EXPECT_EQ(body.ReadAll(), "");
  EXPECT_TRUE(Eventually([&] { return server_->stats().timed_out == 2; }));
  EXPECT_TRUE(Eventually([&] { return server_->stats().connections == 1; }));
  clock_.Advance(std::chrono::hours(11));
  EXPECT_EQ(idle.ReadAll(), "");
  EXPECT_EQ(server_->stats().timed_out, 2);
}

TEST_F(HttpServerTest, AClientThatGoesAwayCancels) {
  Start();
  {
    Socket client(port());
    client.Send("GET /silent HTTP/1.1\r\n\r\n");
    ASSERT_TRUE(Eventually([&] {
      absl::MutexLock lock(&seen().mutex);
      return seen().requests.size() == 1;
    }));
  }
  EXPECT_TRUE(Eventually([&] { return seen().destroyed == 1; }));
  EXPECT_EQ(seen().gone, 1);
  // The waker outlives it all.
  HttpWaker waker;
  {
    absl::MutexLock lock(&seen().mutex);
    waker = seen().waker;
  }
  waker();
  server_.reset();
  waker();
}

TEST_F(HttpServerTest, AClientThatDoesNotReadStopsTheTakingAndIsGivenUp) {
  options_.write_timeout = std::chrono::seconds(30);
  Start();
  Socket client(port());
  client.Send("GET /endless HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(Eventually([&] { return seen().taken > 4; }));
  // Socket buffers fill, and then nothing is taken any more.
  int before = -1;
  ASSERT_TRUE(Eventually([&] {
    const int now = seen().taken;
    const bool same = now == before;
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return same;
  }));
  EXPECT_LT(seen().taken, 200);  // 3.2 MB
  clock_.Advance(std::chrono::seconds(31));
  EXPECT_TRUE(Eventually([&] { return seen().destroyed == 1; }));
  EXPECT_EQ(seen().slow, 1);
  EXPECT_EQ(server_->stats().timed_out, 1);
}

TEST_F(HttpServerTest, AStreamWithNothingToSayIsPinged) {
  options_.ping_interval = std::chrono::seconds(15);
  clock_.Stand();  // a slow machine's own time would make pings, too
  Start();
  Socket client(port());
  client.Send("GET /silent HTTP/1.1\r\n\r\n");
  for (int i = 0; i < 2; ++i) {
    // The time until the next ping runs once the stream waits: one step of the clock makes one ping.
    ASSERT_TRUE(Eventually([&] { return seen().waits.load(); }));
    clock_.Advance(std::chrono::seconds(16));
    EXPECT_THAT(client.ReadUntil("ping\r\n"), HasSubstr("4\r\nping\r\n"));
  }
  seen().speak = true;
  {
    absl::MutexLock lock(&seen().mutex);
    seen().waker();
  }
  EXPECT_EQ(client.ReadUntil("0\r\n\r\n"), "4\r\nsaid\r\n0\r\n\r\n");
}

TEST_F(HttpServerTest, IdleConnectionsMakeRoomAndBusyOnesDoNot) {
  options_.max_connections = 4;
  Start();
  std::vector<std::unique_ptr<Socket>> busy;
  for (int i = 0; i < 3; ++i) {
    busy.push_back(std::make_unique<Socket>(port()));
    busy.back()->Send("GET /silent HTTP/1.1\r\n\r\n");
  }
  ASSERT_TRUE(Eventually([&] {
    absl::MutexLock lock(&seen().mutex);
    return seen().requests.size() == 3;
  }));
  Socket half(port());
  half.Send("GET / HTT");  // who has not finished its head has no better claim than who is idle
  ASSERT_TRUE(Eventually([&] { return server_->stats().connections == 4; }));
  Socket fresh(port());
  fresh.Send("GET /silent HTTP/1.1\r\n\r\n");
  EXPECT_EQ(half.ReadAll(), "");
  ASSERT_TRUE(Eventually([&] {
    absl::MutexLock lock(&seen().mutex);
    return seen().requests.size() == 4 && server_->stats().connections == 4;
  }));
  EXPECT_EQ(server_->stats().evicted, 1);
  Socket late(port());
  EXPECT_THAT(late.ReadAll(), StartsWith("HTTP/1.1 503"));
  EXPECT_EQ(server_->stats().refused, 1);
  busy.clear();
  ASSERT_TRUE(Eventually([&] { return server_->stats().connections == 1; }));
  Socket after(port());
  after.Send(Post("/echo", "served"));
  EXPECT_THAT(after.ReadUntil("served"), StartsWith("HTTP/1.1 200"));
}

// A burst of them is taken before the first that had to make room has ended.
TEST_F(HttpServerTest, NeverHoldsMoreConnectionsThanItMay) {
  options_.max_connections = 8;
  options_.threads = 3;
  Start();
  std::atomic<bool> done = false;
  std::thread opens([&] {
    std::vector<std::unique_ptr<Socket>> idle;
    for (int i = 0; i < 600; ++i) idle.push_back(std::make_unique<Socket>(port()));
    EXPECT_TRUE(Eventually([&] { return server_->stats().accepted == 600; }));
    done = true;
    EXPECT_TRUE(Eventually([&] { return server_->stats().connections == 8; }))
        << "who made room gave away one place, and one only";
  });
  int64_t most = 0;
  while (!done) most = std::max(most, server_->stats().connections);
  opens.join();
  EXPECT_LE(most, 8);
  // A connection is counted as accepted before it is known what becomes of it.
  EXPECT_TRUE(Eventually([&] {
    const HttpServerStats stats = server_->stats();
    return stats.evicted + stats.refused == 600 - 8;
  }));
  EXPECT_TRUE(Eventually([&] { return server_->stats().connections == 0; })) << "and all come back";
}

TEST_F(HttpServerTest, BodiesOfAllConnectionsHaveABoundTogether) {
  options_.max_receiving_bytes = 12000;
  Start();
  Socket first(port());
  first.Send("POST /echo HTTP/1.1\r\nContent-Length: 9000\r\n\r\n" + std::string(8000, 'a'));
  // Until the first has arrived, as far as it goes.
  std::string answer;
  ASSERT_TRUE(Eventually([&] {
    Socket second(port());
    second.Send("POST /echo HTTP/1.1\r\nContent-Length: 9000\r\n\r\n" + std::string(8000, 'b'));
    answer = second.ReadUntil("\r\n\r\n");
    return answer.starts_with("HTTP/1.1 503");
  })) << answer;
  first.Send(std::string(1000, 'a'));
  EXPECT_THAT(first.ReadUntil("aaaa"), StartsWith("HTTP/1.1 200"));
  Socket third(port());
  third.Send(Post("/echo", std::string(9000, 'c')));
  EXPECT_THAT(third.ReadUntil("cccc"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, ADrainingServerEndsConnectionsWithTheirResponses) {
  Start();
  Socket client(port());
  client.Send(Post("/echo", "one"));
  EXPECT_THAT(client.ReadUntil("one"), HasSubstr("Connection: keep-alive"));
  server_->BeginDrain();
  client.Send(Post("/echo", "two"));
  EXPECT_THAT(client.ReadAll(), HasSubstr("Connection: close"));
}

TEST_F(HttpServerTest, ATakenPortIsAnError) {
  Start();
  HttpServerOptions same = options_;
  same.port = port();
  const auto second = HttpServer::Start(same, handler_, log_, clock_);
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
}

TEST_F(HttpServerTest, SeveralThreadsShareTheConnections) {
  options_.threads = 3;
  Start();
  std::vector<std::unique_ptr<Socket>> clients;
  for (int i = 0; i < 12; ++i) {
    clients.push_back(std::make_unique<Socket>(port()));
    clients.back()->Send(Post("/echo", "served"));
  }
  for (const auto& client : clients) {
    EXPECT_THAT(client->ReadUntil("served"), StartsWith("HTTP/1.1 200"));
  }
  EXPECT_EQ(server_->stats().connections, 12);
}

}  // namespace
}  // namespace winnow::server
