#include "server/acceptor.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace winnow::server {
namespace {

int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  return fd;
}

template <typename Condition>
void Eventually(Condition condition) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

std::unique_ptr<Acceptor> Listening(int port = 0) {
  auto acceptor = Acceptor::Listen({.host = "127.0.0.1", .port = port, .loopback = true});
  EXPECT_TRUE(acceptor.ok()) << acceptor.status();
  return *std::move(acceptor);
}

TEST(AcceptorTest, HandsOverConnections) {
  auto acceptor = Listening();
  std::atomic<int> accepted = -1;
  acceptor->Start(1 << 20, {.on_connection = [&](int fd) { accepted = fd; },
                            .on_refused = [](uint64_t) { ADD_FAILURE(); },
                            .on_failure = [](const absl::Status&) { ADD_FAILURE(); }});
  const int client = Connect(acceptor->port());
  Eventually([&] { return accepted >= 0; });
  EXPECT_EQ(write(client, "x", 1), 1);
  char byte = 0;
  Eventually([&] { return read(accepted, &byte, 1) == 1; });
  EXPECT_EQ(byte, 'x');
  close(client);
  close(accepted);
  acceptor->Stop();
}

TEST(AcceptorTest, BeyondTheLimitConnectionsAreClosedAndCounted) {
  auto acceptor = Listening();
  std::atomic<uint64_t> refused = 0;
  acceptor->Start(0, {.on_connection = [](int) { ADD_FAILURE(); },
                      .on_refused = [&](uint64_t count) { refused += count; },
                      .on_failure = [](const absl::Status&) { ADD_FAILURE(); }});
  for (int i = 0; i < 5; ++i) {
    const int client = Connect(acceptor->port());
    char byte = 0;
    EXPECT_LE(read(client, &byte, 1), 0) << "closed";
    close(client);
  }
  Eventually([&] { return refused == 5; });
}

TEST(AcceptorTest, APortThatIsTakenIsRefused) {
  auto acceptor = Listening();
  const auto other =
      Acceptor::Listen({.host = "127.0.0.1", .port = acceptor->port(), .loopback = true});
  EXPECT_EQ(other.status().code(), absl::StatusCode::kUnavailable);
  acceptor->Stop();
  Listening(acceptor->port());  // it is free again
}

TEST(AcceptorTest, DescriptorsAreKeptInReserve) {
  EXPECT_EQ(ConnectionDescriptors(1024), 896);
  EXPECT_EQ(ConnectionDescriptors(64), 48);
  EXPECT_EQ(ConnectionDescriptors(1 << 20), (1 << 20) - 1024);
}

}  // namespace
}  // namespace winnow::server
