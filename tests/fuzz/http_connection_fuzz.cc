// A client's bytes on a connection of the HTTP port: the real server, with a handler that gives back what it was handed.
// The first byte says in pieces of how many bytes they are sent. Whatever comes: the server answers with whole responses,
// hands on no request beyond its limits, closes once the client has finished, and serves the next client. Headers of
// requests that arrive are read as the API reads them (traceparent).
//
// Packages: protobuf grpc++
// Sources: server/http/http_server.cc server/http/http_exchange.cc server/acceptor.cc server/tls_files.cc server/log.cc server/line_queue.cc
// Sources: server/utf8.cc server/trace_context.cc engine/base/json_file.cc kernels/check.cc
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spdlog/sinks/null_sink.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "engine/base/clock.h"
#include "kernels/check.h"
#include "server/http/http_server.h"
#include "server/trace_context.h"

using namespace winnow::server;  // NOLINT(google-build-using-namespace): a main file

namespace {

constexpr size_t kHeadBytes = 512, kBodyBytes = 256;

class Echo final : public HttpHandler {
 public:
  std::optional<HttpPiece> Refuse(const HttpRequest& head) override {
    size_t bytes = head.method.size() + head.path.size();
    for (const auto& [name, value] : head.headers) {
      WINNOW_CHECK(name.find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ\r\n:") == std::string::npos);
      WINNOW_CHECK(value.find_first_of("\r\n") == std::string::npos);
      bytes += name.size() + value.size();
    }
    WINNOW_CHECK(bytes <= kHeadBytes && head.path.find('?') == std::string::npos);
    if (const std::string* const trace = head.Find("traceparent")) {
      const TraceContext context = ParseTraceParent(*trace);
      if (context.valid()) {
        WINNOW_CHECK(context.trace_id.size() == 32 && context.parent_id.size() == 16);
        WINNOW_CHECK(
            (context.trace_id.find_first_not_of("0123456789abcdef") == std::string_view::npos));
      }
    }
    if (head.path == "/no") return Whole(401, "", "no");
    return std::nullopt;
  }
  std::unique_ptr<HttpExchange> Handle(HttpRequest request, HttpWaker) override {
    WINNOW_CHECK(request.body.size() <= kBodyBytes);
    // The colon tells a body from the next response, where that was to HEAD and has none.
    return Answered(Whole(200, "text/plain", ":" + request.body));
  }
  HttpPiece Refusal(int status, std::string_view message) override {
    WINNOW_CHECK(status >= 400 && !message.empty());
    return Whole(status, "", std::string(message));
  }
};

int StartServer() {
  static auto& log = *new Log("error", "json", std::make_shared<spdlog::sinks::null_sink_mt>());
  static auto& handler = *new Echo;
  static auto& clock = *new winnow::engine::SteadyClock;
  HttpServerOptions options;
  options.max_head_bytes = kHeadBytes;
  options.max_body_bytes = kBodyBytes;
  auto server = HttpServer::Start(options, handler, log, clock);
  WINNOW_CHECK(server.ok());
  static const auto& serving = *server->release();  // until the process ends
  return serving.port();
}

int Connect(int port) {
  for (int attempt = 0;; ++attempt) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    WINNOW_CHECK(fd >= 0);
    // Without this the client's port would be kept for a minute: there are fewer than a minute's executions. The server's end
    // is kept where the server closes first, so every connection comes from another address of loopback.
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    static uint32_t connections = static_cast<uint32_t>(getpid()) << 10;
    address.sin_addr.s_addr = htonl(0x7f000001 + (++connections & 0xfffff));
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
    WINNOW_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
    // libFuzzer's alarm may interrupt it, and a machine may count all its connections' ports together: the next address may
    // have one. A server that is gone refuses.
    const bool again =
        errno == EINTR || errno == EADDRNOTAVAIL || errno == EADDRINUSE || errno == ENOBUFS;
    if (!again || attempt == 100) std::perror("connect");
    WINNOW_CHECK(again && attempt < 100);
    close(fd);
  }
}

// The answers until the server closes. `ends`: nothing more is sent; a client that says so may find that its request
// counts as given up.
std::string Exchange(int port, std::string_view bytes, size_t piece, bool ends) {
  const int fd = Connect(port);
  while (!bytes.empty()) {
    const ssize_t sent =
        TEMP_FAILURE_RETRY(send(fd, bytes.data(), std::min(piece, bytes.size()), MSG_NOSIGNAL));
    if (sent <= 0) break;  // the server has closed
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  if (ends) shutdown(fd, SHUT_WR);
  std::string got;
  char chunk[4096];
  ssize_t count;
  while ((count = TEMP_FAILURE_RETRY(recv(fd, chunk, sizeof(chunk), 0))) > 0)
    got.append(chunk, static_cast<size_t>(count));
  close(fd);
  return got;
}

// Whether `text` is responses one after the other, each whole. A connection that the server resets may cut the last one.
bool AreResponses(std::string_view text) {
  while (!text.empty()) {
    if (!text.starts_with("HTTP/1.1 ") && !text.starts_with("HTTP/1.0 ")) return false;
    const bool interim = text.substr(9, 3) == "100";
    const size_t end = text.find("\r\n\r\n");
    if (end == text.npos) return false;
    size_t length = 0;
    const std::string_view head = text.substr(0, end);
    if (const size_t at = head.find("Content-Length: "); at != head.npos) {
      length = std::stoul(std::string(head.substr(at + 16)));
    } else if (!interim) {
      return false;
    }
    text.remove_prefix(end + 4);
    // Beyond its length a response has nothing; one to HEAD may have less.
    if (text.substr(0, 5) == "HTTP/" && length > 0) continue;
    text.remove_prefix(std::min(length, text.size()));
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int port = StartServer();
  static uint64_t executions = 0;
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const size_t piece = data[0] < 0x80 ? bytes.size() : data[0] - 0x7f;
  WINNOW_CHECK(AreResponses(Exchange(port, bytes, piece, true)));
  if (++executions % 16 != 0) return 0;
  const std::string answer =
      Exchange(port, "GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 99, false);
  WINNOW_CHECK(answer.starts_with("HTTP/1.1 200 OK\r\n"));
  return 0;
}
