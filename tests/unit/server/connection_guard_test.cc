// The guard between a client's socket and a fake gRPC, with frames made by hand.
//
// Waits are for conditions: that bytes arrive, that an end is closed, that the guard says it made a connection wait.
#include "server/connection_guard.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

constexpr std::chrono::seconds kPatience{120};
constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum : uint8_t {
  kData,
  kHeaders,
  kPriority,
  kReset,
  kSettings,
  kPush,
  kPing,
  kGoAway,
  kWindow,
  kContinuation
};
constexpr uint8_t kEndStream = 1, kEndHeaders = 4;

bool Eventually(const std::function<bool()>& condition) {
  for (const auto end = std::chrono::steady_clock::now() + kPatience;
       std::chrono::steady_clock::now() < end;) {
    if (condition()) return true;
    std::this_thread::yield();  // to the guard's thread, which makes it true
  }
  return false;
}

// Zeros: a payload, and the error code of a reset that says nothing was wrong.
std::string Frame(uint8_t type, uint8_t flags, size_t length, char fill = 0) {
  std::string frame(9, '\0');
  frame[0] = static_cast<char>(length >> 16);
  frame[1] = static_cast<char>(length >> 8);
  frame[2] = static_cast<char>(length);
  frame[3] = static_cast<char>(type);
  frame[4] = static_cast<char>(flags);
  frame[8] = 1;
  return frame + std::string(length, fill);
}

std::string Times(int count, const std::string& text) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

// A descriptor, closed at the end.
class End {
 public:
  explicit End(int fd) : fd_(fd) {}
  ~End() { Close(); }
  End(End&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  End& operator=(End&&) = delete;

  int fd() const { return fd_; }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  void HalfClose() const { shutdown(fd_, SHUT_WR); }
  void Send(std::string_view bytes) const {
    while (!bytes.empty()) {
      pollfd end = {fd_, POLLOUT, 0};
      poll(&end, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count()));
      const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EAGAIN) continue;
      if (sent <= 0) return;  // the other end is closed
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }
  // Whether something can be read, or the other end is closed.
  bool Readable() const {
    pollfd end = {fd_, POLLIN, 0};
    return poll(&end, 1, 0) > 0;
  }
  // Waits for some bytes. "": the other end is closed.
  std::string ReadSome() const {
    pollfd end = {fd_, POLLIN, 0};
    if (poll(&end, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count())) != 1) {
      ADD_FAILURE() << "nothing came";
      return "";
    }
    std::string bytes(1 << 16, '\0');
    const ssize_t count = recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(count > 0 ? static_cast<size_t>(count) : 0);
    return bytes;
  }
  std::string Read(size_t count) const {
    std::string all;
    while (all.size() < count) {
      const std::string some = ReadSome();
      if (some.empty()) break;
      all += some;
    }
    return all;
  }
  std::string ReadToEnd() const { return Read(std::string::npos); }

 private:
  int fd_;
};

// Connected over loopback: the client's, and the server's.
std::pair<End, int> Connection() {
  const End listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(bind(listener.fd(), reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listener.fd(), 1), 0);
  EXPECT_EQ(getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  End client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(client.fd(), reinterpret_cast<sockaddr*>(&address), size), 0);
  return {std::move(client), accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC)};
}

// The rest when a connection has used up what it begins with: nothing comes back.
GuardOptions Poor(int64_t resets, int64_t control) {
  GuardOptions options;
  options.begins = options.most = {resets, control};
  options.each_second = options.shared_most = options.shared_each_second = {0, 0};
  return options;
}

// A guard, its clients, and gRPC's ends of their connections.
class Door {
 public:
  explicit Door(const GuardOptions& options, TlsFiles* tls = nullptr)
      : guard_(std::make_unique<ConnectionGuard>(options, tls, [this](int fd) {
          const std::lock_guard lock(mutex_);
          opened_.emplace_back(fd);
          changed_.notify_all();
        })) {}

  ConnectionGuard& guard() { return *guard_; }
  void CloseGuard() { guard_.reset(); }
  GuardStats stats() const { return guard_->stats(); }

  // Not begun: gRPC knows nothing of it.
  End Connect() {
    auto [client, server] = Connection();
    guard_->Add(server);
    return std::move(client);
  }
  // gRPC's end of the next connection that has begun.
  End Opened() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return !opened_.empty(); }));
    if (opened_.empty()) return End(-1);
    End end = std::move(opened_.front());
    opened_.pop_front();
    return end;
  }
  size_t unclaimed() {
    const std::lock_guard lock(mutex_);
    return opened_.size();
  }
  // A client that has sent the preface, and gRPC's end, which has read it.
  std::pair<End, End> Begun() {
    End client = Connect();
    client.Send(kPreface);
    End grpc = Opened();
    EXPECT_EQ(grpc.Read(24), kPreface);
    return {std::move(client), std::move(grpc)};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<End> opened_;
  std::unique_ptr<ConnectionGuard> guard_;
};

// Sends `frame` again and again, each when the one before is through, and returns how many came before the guard made
// the connection wait; at most `most`.
int CountUntilItWaits(const Door& door, const End& client, const End& grpc,
                      const std::string& frame, int most) {
  const uint64_t delayed = door.stats().delayed;
  for (int i = 0; i < most; ++i) {
    client.Send(frame);
    std::string came;
    EXPECT_TRUE(Eventually([&] {
      if (grpc.Readable()) came += grpc.ReadSome();
      return came.size() >= frame.size() || door.stats().delayed > delayed;
    }));
    if (door.stats().delayed > delayed) {
      // Nobody can act on a header without its last byte.
      if (grpc.Readable()) came += grpc.ReadSome();
      EXPECT_LE(came.size(), 8u);
      return i;
    }
    EXPECT_EQ(came, frame);
  }
  return most;
}

TEST(ConnectionGuardTest, CallsPassUnchangedAndFreeInBothDirections) {
  Door door(Poor(0, 0));
  auto [client, grpc] = door.Begun();
  // Requests with bodies, in frames of all sizes that calls have.
  std::mt19937 random(7);
  std::string up, down;
  for (int i = 0; i < 300; ++i) {
    up += Frame(kHeaders, kEndHeaders, 20 + random() % 900, 'h') +
          Frame(kData, 0, 32 + random() % 16000, 'd') +
          Frame(kData, kEndStream, random() % 32, 'e');
    down += Frame(kHeaders, kEndHeaders, 30, 'H') + Frame(kData, 0, random() % 16000, 'D') +
            Frame(kHeaders, kEndStream | kEndHeaders, 20, 'T');
  }
  std::thread sender([&] { client.Send(up); });
  std::thread answerer([&] { grpc.Send(down); });
  std::string down_read;
  std::thread reader([&] { down_read = client.Read(down.size()); });
  EXPECT_TRUE(grpc.Read(up.size()) == up);
  sender.join();
  answerer.join();
  reader.join();
  EXPECT_TRUE(down_read == down);
  EXPECT_EQ(door.stats().delayed, 0u);
  EXPECT_EQ(door.stats().broken, 0u);
}

TEST(ConnectionGuardTest, BytesOneByOneAreTheSame) {
  Door door(Poor(1, 1));
  const std::string text = kPreface + Frame(kSettings, 0, 0) +
                           Frame(kHeaders, kEndHeaders, 9, 'h') + Frame(kData, kEndStream, 3, 'd') +
                           Frame(kReset, 0, 4);
  const End client = door.Connect();
  const int yes = 1;
  setsockopt(client.fd(), IPPROTO_TCP, 1 /* TCP_NODELAY */, &yes, sizeof yes);
  for (const char byte : text) client.Send(std::string_view(&byte, 1));
  EXPECT_EQ(door.Opened().Read(text.size()), text);
}

TEST(ConnectionGuardTest, AConnectionPaysForEachKindOfFrame) {
  struct Case {
    const char* what;
    std::string frame;
    int each;  // that it costs
    bool reset = false;
  };
  for (const Case& c :
       {Case{"reset", Frame(kReset, 0, 4), 1, true},
        Case{"headers", Frame(kHeaders, kEndHeaders, 3 << 10), 3},
        Case{"continuation", Frame(kHeaders, 0, 10) + Frame(kContinuation, kEndHeaders, 10), 1},
        Case{"ping", Frame(kPing, 0, 8), 1}, Case{"settings", Frame(kSettings, 0, 6), 1},
        Case{"priority", Frame(kPriority, 0, 5), 1}, Case{"window", Frame(kWindow, 0, 4), 1},
        Case{"empty data", Frame(kData, 0, 0), 1}, Case{"unknown", Frame(77, 0, 1), 1}}) {
    SCOPED_TRACE(c.what);
    constexpr int kCredit = 12;
    Door door(c.reset ? Poor(kCredit, 0) : Poor(0, kCredit));
    auto [client, grpc] = door.Begun();
    auto [other, other_grpc] = door.Begun();
    if (c.frame.size() < 20 || c.each == 3) {
      EXPECT_EQ(CountUntilItWaits(door, client, grpc, c.frame, 3 * kCredit), kCredit / c.each);
    } else {
      // The header that is free comes through, and what continues it does not.
      for (int i = 0; i < kCredit; ++i) {
        client.Send(c.frame);
        EXPECT_EQ(grpc.Read(c.frame.size()), c.frame);
      }
      client.Send(c.frame);
      EXPECT_TRUE(Eventually([&] { return door.stats().delayed == 1; }));
      EXPECT_EQ(grpc.Read(19 + 8).size(), 19u + 8);
    }
    // It is nobody else's business, whose allowance is whole.
    const std::string call = c.reset ? Frame(kReset, 0, 4) : Frame(kPing, 0, 8);
    other.Send(Times(kCredit, call));
    EXPECT_EQ(other_grpc.Read(kCredit * call.size()), Times(kCredit, call));
    EXPECT_EQ(door.stats().delayed, 1u);
    EXPECT_EQ(door.stats().connections, 2);
    EXPECT_EQ(door.stats().broken, 0u) << "it waits; it is not closed";
  }
}

TEST(ConnectionGuardTest, WhoWaitsDoesNotKeepItsAnswersBack) {
  Door door(Poor(0, 0));
  auto [client, grpc] = door.Begun();
  client.Send(Frame(kPing, 0, 8));
  ASSERT_TRUE(Eventually([&] { return door.stats().delayed == 1; }));
  grpc.Send(Frame(kData, 0, 100, 'a'));
  EXPECT_EQ(client.Read(109), Frame(kData, 0, 100, 'a'));
}

TEST(ConnectionGuardTest, ItsOwnCreditComesBackWithTime) {
  GuardOptions options = Poor(2, 32);
  options.each_second = {20, 4000};
  Door door(options);
  auto [client, grpc] = door.Begun();
  const std::string resets = Times(8, Frame(kReset, 0, 4)), pings = Times(200, Frame(kPing, 0, 8));
  const auto began = std::chrono::steady_clock::now();
  client.Send(resets);
  EXPECT_EQ(grpc.Read(resets.size()), resets);
  // Six had to be earned, at 20 a second.
  EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(290));
  EXPECT_GE(door.stats().delayed, 1u);
  client.Send(pings);
  EXPECT_EQ(grpc.Read(pings.size()), pings);
}

TEST(ConnectionGuardTest, WhatIsSavedUpHasABound) {
  GuardOptions options = Poor(3, 100);
  options.each_second = {1000000, 0};  // as much as can be had, always
  options.most.resets = 3;
  Door door(options);
  auto [client, grpc] = door.Begun();
  client.Send(Times(4, Frame(kReset, 0, 4)));
  EXPECT_EQ(grpc.Read(4 * 13).size(), 4 * 13u);
  EXPECT_GE(door.stats().delayed, 1u) << "the fourth waited, however much there was in a second";
}

TEST(ConnectionGuardTest, WhatAllShareIsDrawnOnAndRunsOut) {
  GuardOptions options = Poor(2, 100);
  options.shared_most.resets = 5;
  Door door(options);
  auto [client, grpc] = door.Begun();
  const std::string resets = Times(2 + 5, Frame(kReset, 0, 4));
  client.Send(resets);
  EXPECT_EQ(grpc.Read(resets.size()), resets);
  const uint64_t delayed = door.stats().delayed;
  client.Send(Frame(kReset, 0, 4));
  EXPECT_TRUE(Eventually([&] { return door.stats().delayed > delayed; }));
  // It is used up for others, too, whose own is not.
  auto [other, other_grpc] = door.Begun();
  EXPECT_EQ(CountUntilItWaits(door, other, other_grpc, Frame(kReset, 0, 4), 10), 2);
}

TEST(ConnectionGuardTest, SharedCreditIsGivenInEqualParts) {
  GuardOptions options = Poor(0, 100);
  options.shared_each_second.resets = 50;
  options.shared_most.resets = 50;
  Door door(options);
  auto [greedy, greedy_grpc] = door.Begun();
  greedy.Send(Times(2000, Frame(kReset, 0, 4)));
  ASSERT_TRUE(Eventually([&] { return greedy_grpc.Readable(); }));
  auto [modest, modest_grpc] = door.Begun();
  modest.Send(Times(5, Frame(kReset, 0, 4)));
  EXPECT_EQ(modest_grpc.Read(5 * 13).size(), 5 * 13u)
      << "before the other's 2000, which take 40 seconds";
}

TEST(ConnectionGuardTest, StreamsThatTheServerResetsArePaidForByTheClient) {
  Door door(Poor(3, 100));
  auto [client, grpc] = door.Begun();
  // With an error each, as gRPC answers a stream that broke a rule; then one without, which ends a call early.
  const std::string error = Frame(kReset, 0, 4, 1), done = Frame(kReset, 0, 4);
  grpc.Send(Times(2, error) + Times(50, done));
  EXPECT_EQ(client.Read(52 * 13).size(), 52 * 13u);
  EXPECT_EQ(CountUntilItWaits(door, client, grpc, Frame(kReset, 0, 4), 10), 1);
}

TEST(ConnectionGuardTest, WhatNoClientNeedsClosesThatConnectionAlone) {
  for (const std::string& bad :
       {std::string("GET / HTTP/1.1\r\n\r\n"), kPreface + Frame(kPush, kEndHeaders, 4),
        kPreface + Frame(kContinuation, kEndHeaders, 4),
        kPreface + Frame(kHeaders, 0, 4) + Frame(kData, 0, 100), kPreface + Frame(kPing, 0, 20000),
        // A block of headers without an end: by bytes, and by frames.
        kPreface + Frame(kHeaders, 0, 16000) + Times(4, Frame(kContinuation, 0, 16000)),
        kPreface + Frame(kHeaders, 0, 1) + Times(64, Frame(kContinuation, 0, 1))}) {
    Door door({});
    auto [good, good_grpc] = door.Begun();
    const End client = door.Connect();
    client.Send(bad);
    EXPECT_EQ(client.ReadToEnd(), "");
    EXPECT_EQ(door.stats().broken, 1u);
    EXPECT_TRUE(Eventually([&] { return door.stats().connections == 1; }));
    if (door.unclaimed() > 0) {
      const std::string came = door.Opened().ReadToEnd();  // and gRPC's end is closed
      EXPECT_TRUE(bad.starts_with(came));
      EXPECT_LT(came.size(), bad.size());
    }
    good.Send(Frame(kData, 0, 100, 'd'));
    EXPECT_EQ(good_grpc.Read(109), Frame(kData, 0, 100, 'd'));
  }
}

TEST(ConnectionGuardTest, GRpcIsToldNothingBeforeTheWholePreface) {
  GuardOptions options;
  options.begin_timeout = std::chrono::milliseconds(300);
  Door door(options);
  const End client = door.Connect();
  client.Send(std::string_view(kPreface, 23));
  EXPECT_EQ(client.ReadToEnd(), "") << "who does not begin is not waited for";
  EXPECT_TRUE(Eventually([&] { return door.stats().connections == 0; }));
  EXPECT_EQ(door.unclaimed(), 0u);
}

TEST(ConnectionGuardTest, ConnectionsHaveATurnEach) {
  GuardOptions options;
  options.connections_most = 2;
  options.connections_each_second = 0;
  Door door(options);
  auto [first, first_grpc] = door.Begun();
  auto [second, second_grpc] = door.Begun();
  End third = door.Connect();
  third.Send(kPreface);
  ASSERT_TRUE(Eventually([&] { return door.stats().delayed == 1; }));
  EXPECT_EQ(door.unclaimed(), 0u);
  third.Close();  // while it waits: it leaves no trace
  EXPECT_TRUE(Eventually([&] { return door.stats().connections == 2; }));
  EXPECT_EQ(door.unclaimed(), 0u);
}

TEST(ConnectionGuardTest, AClientThatGoesWhileItWaitsIsForgotten) {
  Door door(Poor(0, 0));
  auto [client, grpc] = door.Begun();
  client.Send(Times(1000, Frame(kPing, 0, 8)));
  ASSERT_TRUE(Eventually([&] { return door.stats().delayed == 1; }));
  client.Close();
  EXPECT_TRUE(Eventually([&] { return door.stats().connections == 0; }));
  EXPECT_LE(grpc.ReadToEnd().size(), 8u);
}

TEST(ConnectionGuardTest, AHalfClosedClientIsGoneAndItsBytesHaveCome) {
  Door door({});
  auto [client, grpc] = door.Begun();
  const std::string frame = Frame(kData, kEndStream, 50000, 'd');
  client.Send(frame);
  client.HalfClose();
  EXPECT_EQ(grpc.ReadToEnd(), frame);
  EXPECT_EQ(client.ReadToEnd(), "");
  EXPECT_TRUE(Eventually([&] { return door.stats().connections == 0; }));
}

TEST(ConnectionGuardTest, WhatGRpcSentBeforeItClosedComes) {
  for (const bool half : {false, true}) {
    Door door({});
    auto [client, grpc] = door.Begun();
    const std::string frame = Frame(kData, 0, 60000, 'd');
    std::thread sender([&, &grpc = grpc] {
      grpc.Send(frame);
      half ? grpc.HalfClose() : grpc.Close();
    });
    EXPECT_EQ(client.ReadToEnd(), frame);
    sender.join();
    EXPECT_TRUE(Eventually([&] { return door.stats().connections == 0; }));
  }
}

TEST(ConnectionGuardTest, AClientThatTakesNothingIsClosed) {
  GuardOptions options;
  options.write_timeout = std::chrono::milliseconds(300);
  Door door(options);
  auto [client, grpc] = door.Begun();
  auto [other, other_grpc] = door.Begun();
  // More than all buffers between have room for; ends when the guard has closed its end.
  std::thread sender([&, &grpc = grpc] { grpc.Send(std::string(32 << 20, 'x')); });
  EXPECT_TRUE(Eventually([&] { return door.stats().connections == 1; }));
  sender.join();
  other_grpc.Send("still here");
  EXPECT_EQ(other.Read(10), "still here");
}

TEST(ConnectionGuardTest, TheEndOfTheGuardClosesAll) {
  Door door(Poor(0, 0));
  auto [idle, idle_grpc] = door.Begun();
  auto [waits, waits_grpc] = door.Begun();
  waits.Send(Frame(kPing, 0, 8));
  ASSERT_TRUE(Eventually([&] { return door.stats().delayed == 1; }));
  const End silent = door.Connect();
  ASSERT_TRUE(Eventually([&] { return door.stats().accepted == 3; }));
  door.CloseGuard();
  for (const End* end : std::initializer_list<const End*>{&idle, &silent, &idle_grpc})
    EXPECT_EQ(end->ReadToEnd(), "");
}

// ---- TLS ----

using Key = std::shared_ptr<EVP_PKEY>;

// A certificate for `name`, signed with its own key, and both as PEM files.
struct Identity {
  // `shift`: seconds that its day of validity lies later.
  Identity(const std::filesystem::path& folder, const std::string& name, long shift = 0)
      : cert(folder / (name + ".crt")), key(folder / (name + ".key")) {
    const Key pair(EVP_EC_gen("P-256"), EVP_PKEY_free);
    const std::shared_ptr<X509> x509(X509_new(), X509_free);
    X509_set_version(x509.get(), 2);
    ASN1_INTEGER_set(X509_get_serialNumber(x509.get()), 1);
    X509_gmtime_adj(X509_getm_notBefore(x509.get()), shift - 3600);
    X509_gmtime_adj(X509_getm_notAfter(x509.get()), shift + 82800);
    X509_set_pubkey(x509.get(), pair.get());
    X509_NAME* const subject = X509_get_subject_name(x509.get());
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(x509.get(), subject);
    X509_sign(x509.get(), pair.get(), EVP_sha256());
    FILE* file = fopen(cert.c_str(), "w");
    PEM_write_X509(file, x509.get());
    fclose(file);
    file = fopen(key.c_str(), "w");
    PEM_write_PrivateKey(file, pair.get(), nullptr, nullptr, 0, nullptr, nullptr);
    fclose(file);
  }
  std::string cert, key;
};

// A client's TLS over a connection's end.
class TlsClient {
 public:
  TlsClient(End end, const std::string& alpn, const Identity* identity)
      : end_(std::move(end)), context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free) {
    if (identity != nullptr) {
      EXPECT_EQ(SSL_CTX_use_certificate_chain_file(context_.get(), identity->cert.c_str()), 1);
      EXPECT_EQ(
          SSL_CTX_use_PrivateKey_file(context_.get(), identity->key.c_str(), SSL_FILETYPE_PEM), 1);
    }
    const timeval patience{.tv_sec = kPatience.count(), .tv_usec = 0};
    setsockopt(end_.fd(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssl_.reset(SSL_new(context_.get()), SSL_free);
    SSL_set_fd(ssl_.get(), end_.fd());
    if (!alpn.empty()) {
      const std::string offered = static_cast<char>(alpn.size()) + alpn;
      SSL_set_alpn_protos(ssl_.get(), reinterpret_cast<const unsigned char*>(offered.data()),
                          static_cast<unsigned>(offered.size()));
    }
  }
  bool Handshake() { return SSL_connect(ssl_.get()) == 1; }
  void Send(std::string_view bytes) {
    EXPECT_EQ(SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size())),
              static_cast<int>(bytes.size()));
  }
  // "": the connection is over.
  std::string Read(size_t count) {
    std::string all(count, '\0');
    size_t read = 0;
    while (read < count) {
      const int some = SSL_read(ssl_.get(), all.data() + read, static_cast<int>(count - read));
      if (some <= 0) break;
      read += static_cast<size_t>(some);
    }
    all.resize(read);
    return all;
  }

 private:
  End end_;
  std::shared_ptr<SSL_CTX> context_;
  std::shared_ptr<SSL> ssl_;
};

std::string NameOf(const End& grpc) {
  sockaddr_un name = {};
  socklen_t size = sizeof name;
  EXPECT_EQ(getpeername(grpc.fd(), reinterpret_cast<sockaddr*>(&name), &size), 0);
  return std::string(name.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
}

class GuardTlsTest : public ::testing::Test {
 protected:
  std::unique_ptr<TlsFiles> Load(const std::string& client_ca) {
    auto files = TlsFiles::Load({server_.cert, server_.key, client_ca}, TlsFiles::Protocol::kHttp2,
                                [](const absl::Status&) {});
    EXPECT_TRUE(files.ok());
    return *std::move(files);
  }
  TempDir folder_;
  Identity server_{folder_.path(), "server"}, client_{folder_.path(), "alice"};
};

TEST_F(GuardTlsTest, TlsEndsInTheGuardAndGRpcSeesPlainFrames) {
  const auto files = Load("");
  Door door(Poor(3, 0), files.get());
  TlsClient client(door.Connect(), "h2", nullptr);
  ASSERT_TRUE(client.Handshake());
  const std::string call =
      Frame(kHeaders, kEndHeaders, 20, 'h') + Frame(kData, kEndStream, 40000, 'd');
  client.Send(kPreface + call);
  const End grpc = door.Opened();
  EXPECT_EQ(grpc.Read(24 + call.size()), kPreface + call);
  grpc.Send(Frame(kData, 0, 60000, 'a'));
  EXPECT_EQ(client.Read(60009), Frame(kData, 0, 60000, 'a'));
  EXPECT_EQ(door.guard().ClientNameOf(NameOf(grpc)), "");
  // Frames are counted here as well.
  client.Send(Times(4, Frame(kReset, 0, 4)));
  EXPECT_EQ(grpc.Read(3 * 13 + 8).size(), 3 * 13u + 8);
  EXPECT_TRUE(Eventually([&] { return door.stats().delayed == 1; }));
}

std::string ServedName(TlsFiles& files) {
  std::array<char, 64> name{};
  X509_NAME_get_text_by_NID(X509_get_subject_name(SSL_CTX_get0_certificate(files.Context().get())),
                            NID_commonName, name.data(), static_cast<int>(name.size()));
  return name.data();
}

TEST_F(GuardTlsTest, ChangedFilesAreServedAfterTheIntervalOrAtOnceWhenAsked) {
  for (const auto read_again :
       {std::chrono::nanoseconds(0), std::chrono::nanoseconds(std::chrono::hours(1))}) {
    SCOPED_TRACE(read_again.count());
    const Identity live(folder_.path(), "live");
    std::vector<std::string> problems;
    auto files = TlsFiles::Load(
        {live.cert, live.key, ""}, TlsFiles::Protocol::kHttp2,
        [&](const absl::Status& status) { problems.push_back(std::string(status.message())); },
        read_again);
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(ServedName(**files), "live");
    const auto put = [&](const Identity& cert, const Identity& key) {
      std::filesystem::copy_file(cert.cert, live.cert,
                                 std::filesystem::copy_options::overwrite_existing);
      std::filesystem::copy_file(key.key, live.key,
                                 std::filesystem::copy_options::overwrite_existing);
    };
    const bool waits = read_again.count() > 0;
    put(client_, client_);
    EXPECT_EQ(ServedName(**files), waits ? "live" : "alice");
    EXPECT_TRUE((*files)->Reload().ok());
    EXPECT_EQ(ServedName(**files), "alice");
    // Neither files that do not belong together nor times that are over replace what is good.
    put(server_, client_);
    EXPECT_EQ(ServedName(**files), "alice");
    EXPECT_EQ((*files)->Reload().code(), absl::StatusCode::kInvalidArgument);
    const Identity expired(folder_.path(), "expired", -86400), early(folder_.path(), "early", 7200);
    for (const Identity* const untimely : {&expired, &early}) {
      put(*untimely, *untimely);
      EXPECT_EQ(ServedName(**files), "alice");
      const absl::Status status = (*files)->Reload();
      EXPECT_THAT(std::string(status.message()),
                  ::testing::HasSubstr(untimely == &expired ? "has expired" : "not valid yet"));
      EXPECT_EQ(ServedName(**files), "alice");
    }
    EXPECT_EQ(problems.size(), waits ? 0u : 5u);
    put(server_, server_);
    EXPECT_TRUE((*files)->Reload().ok());
    EXPECT_EQ(ServedName(**files), "server");
  }
}

TEST_F(GuardTlsTest, AnAuthorityThatHasExpiredIsRefused) {
  const Identity old(folder_.path(), "old", -86400);
  const auto files = TlsFiles::Load({server_.cert, server_.key, old.cert},
                                    TlsFiles::Protocol::kHttp2, [](const absl::Status&) {});
  EXPECT_THAT(std::string(files.status().message()),
              ::testing::HasSubstr("--tls-client-ca " + old.cert + ": a certificate has expired"));
}

TEST_F(GuardTlsTest, TheCertificateNamesTheClientForAsLongAsItIsThere) {
  const auto files = Load(client_.cert);
  Door door({}, files.get());
  std::string peer;
  {
    TlsClient client(door.Connect(), "h2", &client_);
    ASSERT_TRUE(client.Handshake());
    client.Send(kPreface);
    const End grpc = door.Opened();
    peer = NameOf(grpc);
    EXPECT_EQ(door.guard().ClientNameOf(peer), "alice");
    EXPECT_EQ(door.guard().ClientNameOf(peer + "9"), "") << "another connection";
  }
  EXPECT_TRUE(Eventually([&] { return door.guard().ClientNameOf(peer).empty(); }));
}

TEST_F(GuardTlsTest, WithoutHttp2OrACertificateGRpcIsNotAsked) {
  const auto files = Load(client_.cert);
  Door door({}, files.get());
  TlsClient http1(door.Connect(), "http/1.1", &client_);
  EXPECT_FALSE(http1.Handshake());
  TlsClient none(door.Connect(), "", &client_);
  none.Handshake();
  EXPECT_EQ(none.Read(1), "");
  TlsClient nameless(door.Connect(), "h2", nullptr);
  nameless.Handshake();  // in TLS 1.3 a client learns of the refusal as it reads
  EXPECT_EQ(nameless.Read(1), "");
  const Identity stranger(folder_.path(), "mallory");
  TlsClient unknown(door.Connect(), "h2", &stranger);
  unknown.Handshake();
  EXPECT_EQ(unknown.Read(1), "");
  const End plain = door.Connect();
  plain.Send(kPreface);
  plain.ReadToEnd();
  EXPECT_TRUE(Eventually([&] { return door.stats().connections == 0; }));
  EXPECT_EQ(door.unclaimed(), 0u);
}

}  // namespace
}  // namespace winnow::server
