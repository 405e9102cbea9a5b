#include "server/kv_event_publisher.h"

#include <zmq.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "server/kv_event_runs.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

constexpr int kHighWaterMark = 100'000;  // messages for one reader
constexpr int kLingerMs = 1000;          // at the end, for what is on its way
constexpr auto kLook = std::chrono::milliseconds(200);
constexpr size_t kBatchesAtOnce = 64;
constexpr size_t kSaltBytes = 16;
constexpr uint64_t kEndOfReplay = ~uint64_t{0};

// ---- msgpack: what is needed of it ----

class Packer {
 public:
  std::string Take() { return std::move(out_); }

  void Nil() { Byte(0xc0); }
  void Unsigned(uint64_t value) {
    if (value < 0x80) {
      Byte(static_cast<uint8_t>(value));
    } else if (value <= 0xff) {
      Sized(0xcc, value, 1);
    } else if (value <= 0xffff) {
      Sized(0xcd, value, 2);
    } else if (value <= 0xffffffff) {
      Sized(0xce, value, 4);
    } else {
      Sized(0xcf, value, 8);
    }
  }
  void Double(double value) { Sized(0xcb, std::bit_cast<uint64_t>(value), 8); }
  void Text(std::string_view text) {
    if (text.size() < 32) {
      Byte(static_cast<uint8_t>(0xa0 | text.size()));
    } else {
      Sized(0xda, text.size(), 2);
    }
    out_ += text;
  }
  void Array(size_t size) { Container(size, 0x90, 0xdc); }
  void Map(size_t size) { Container(size, 0x80, 0xde); }

 private:
  void Byte(uint8_t byte) { out_ += static_cast<char>(byte); }
  void Sized(uint8_t kind, uint64_t value, int bytes) {
    Byte(kind);
    for (int i = bytes - 1; i >= 0; --i) Byte(static_cast<uint8_t>(value >> (8 * i)));
  }
  void Container(size_t size, uint8_t small, uint8_t large) {
    if (size < 16) {
      Byte(static_cast<uint8_t>(small | size));
    } else if (size <= 0xffff) {
      Sized(large, size, 2);
    } else {
      Sized(large + 1, size, 4);
    }
  }

  std::string out_;
};

void PackHashes(const KvEventRun& run, Packer& out) {
  out.Text("block_hashes");
  out.Array(run.blocks.size());
  for (const engine::KvBlockContent* block : run.blocks) out.Unsigned(ShortHash(block->name.chain));
}

void PackStored(const KvEventRun& run, Packer& out) {
  static const engine::Digest kNobody = engine::Sha256("");
  const engine::KvBlockContent& first = *run.blocks.front();
  const bool salted = first.name.index == 0 && first.name.tenant != kNobody;
  out.Map(salted ? 11 : 10);
  out.Text("type");
  out.Text("BlockStored");
  PackHashes(run, out);
  out.Text("parent_block_hash");
  if (first.parent.has_value()) {
    out.Unsigned(ShortHash(*first.parent));
  } else {
    out.Nil();
  }
  out.Text("token_ids");
  out.Array(run.blocks.size() * first.tokens.size());
  for (const engine::KvBlockContent* block : run.blocks) {
    for (const int32_t token : block->tokens) out.Unsigned(static_cast<uint64_t>(token));
  }
  out.Text("block_size");
  out.Unsigned(first.tokens.size());
  out.Text("lora_id");
  out.Nil();
  out.Text("medium");
  out.Text(MediumOf(run.tier));
  out.Text("lora_name");
  out.Nil();
  if (salted) {
    out.Text("extra_keys");
    out.Array(run.blocks.size());
    out.Array(1);
    out.Text(absl::BytesToHexString(
        {reinterpret_cast<const char*>(first.name.tenant.data()), kSaltBytes}));
    for (size_t i = 1; i < run.blocks.size(); ++i) out.Nil();
  }
  out.Text("group_idx");
  out.Unsigned(0);
  out.Text("kv_cache_spec_kind");
  out.Text("full_attention");
}

void PackRun(const KvEventRun& run, Packer& out) {
  switch (run.kind) {
    case engine::KvEvent::Kind::kStored:
      PackStored(run, out);
      return;
    case engine::KvEvent::Kind::kRemoved:
      out.Map(4);
      out.Text("type");
      out.Text("BlockRemoved");
      PackHashes(run, out);
      out.Text("medium");
      out.Text(MediumOf(run.tier));
      out.Text("group_idx");
      out.Unsigned(0);
      return;
    case engine::KvEvent::Kind::kCleared:
      out.Map(1);
      out.Text("type");
      out.Text("AllBlocksCleared");
  }
}

// ---- ZMQ ----

std::string BigEndian(uint64_t value) {
  std::string out;
  for (int i = 7; i >= 0; --i) out += static_cast<char>(value >> (8 * i));
  return out;
}

struct CloseSocket {
  void operator()(void* socket) const { zmq_close(socket); }
};
using Socket = std::unique_ptr<void, CloseSocket>;

// All frames or, where ZMQ does not take the first, none.
bool Send(void* socket, std::span<const std::string_view> frames) {
  for (size_t i = 0; i < frames.size(); ++i) {
    const int flags = ZMQ_DONTWAIT | (i + 1 < frames.size() ? ZMQ_SNDMORE : 0);
    if (zmq_send(socket, frames[i].data(), frames[i].size(), flags) < 0) return false;
  }
  return true;
}

absl::StatusOr<Socket> Bind(void* context, int kind, const std::string& address, int* port) {
  Socket socket(zmq_socket(context, kind));
  if (socket == nullptr) return absl::InternalError(zmq_strerror(zmq_errno()));
  const int ipv6 = 1;
  zmq_setsockopt(socket.get(), ZMQ_SNDHWM, &kHighWaterMark, sizeof kHighWaterMark);
  zmq_setsockopt(socket.get(), ZMQ_LINGER, &kLingerMs, sizeof kLingerMs);
  zmq_setsockopt(socket.get(), ZMQ_IPV6, &ipv6, sizeof ipv6);
  if (zmq_bind(socket.get(), Concat("tcp://", address).c_str()) != 0) {
    return absl::UnavailableError(
        Concat("cannot listen on ", address, ": ", zmq_strerror(zmq_errno())));
  }
  char endpoint[256] = "";
  size_t size = sizeof endpoint;
  zmq_getsockopt(socket.get(), ZMQ_LAST_ENDPOINT, endpoint, &size);
  const std::string_view text(endpoint);
  *port = std::atoi(endpoint + text.rfind(':') + 1);
  return socket;
}

// The frames of a message that has come; longer ones than a number are cut, as nothing longer is
// asked for.
std::vector<std::string> Receive(void* socket) {
  std::vector<std::string> frames;
  int more = 1;
  while (more != 0) {
    std::array<char, 256> bytes;
    const int size = zmq_recv(socket, bytes.data(), bytes.size(), ZMQ_DONTWAIT);
    if (size < 0) break;
    if (frames.size() < 4) {
      frames.emplace_back(bytes.data(), std::min<size_t>(static_cast<size_t>(size), bytes.size()));
    }
    size_t length = sizeof more;
    zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &length);
  }
  return frames;
}

}  // namespace

std::string EncodeKvEventBatch(const engine::KvEventBatch& batch) {
  const std::vector<KvEventRun> runs = RunsOf(batch.events);
  Packer out;
  out.Array(3);
  out.Double(batch.unix_seconds);
  out.Array(runs.size());
  for (const KvEventRun& run : runs) PackRun(run, out);
  out.Unsigned(0);
  return out.Take();
}

class KvEventPublisher::Impl {
 public:
  Impl(const Options& options, const engine::KvEventLog& log)
      : log_(log), topic_(options.topic), context_(zmq_ctx_new()) {}
  ~Impl() {
    stopping_ = true;
    log_.Wake();
    if (publish_thread_.joinable()) publish_thread_.join();
    if (replay_thread_.joinable()) replay_thread_.join();
    publish_.reset();
    replay_.reset();
    zmq_ctx_term(context_);  // waits for what lingers
  }

  absl::Status Start(const Options& options) {
    auto publish = Bind(context_, ZMQ_PUB, options.address, &port);
    if (!publish.ok()) return publish.status();
    publish_ = *std::move(publish);
    if (!options.replay.empty()) {
      auto replay = Bind(context_, ZMQ_ROUTER, options.replay, &replay_port);
      if (!replay.ok()) return replay.status();
      replay_ = *std::move(replay);
      replay_thread_ = std::thread([this] { Replay(); });
    }
    publish_thread_ = std::thread([this] { Publish(); });
    return absl::OkStatus();
  }

  int port = 0, replay_port = 0;
  std::atomic<uint64_t> missed = 0;

 private:
  void Publish() {
    uint64_t next = log_.range().first;
    while (true) {
      const bool last = stopping_;  // before the log is read: what is in it goes out
      const auto batches = log_.Read(next, kBatchesAtOnce);
      if (!batches.has_value()) {
        const uint64_t first = log_.range().first;
        missed += first - next;
        next = first;
        continue;
      }
      for (const auto& batch : *batches) {
        const std::string number = BigEndian(batch->sequence), payload = EncodeKvEventBatch(*batch);
        Send(publish_.get(), std::array<std::string_view, 3>{topic_, number, payload});
        next = batch->sequence + 1;
      }
      if (!batches->empty()) continue;
      if (last) return;
      log_.WaitFor(next, kLook);
    }
  }

  void Replay() {
    while (!stopping_) {
      zmq_pollitem_t item{replay_.get(), 0, ZMQ_POLLIN, 0};
      if (zmq_poll(&item, 1, kLook.count()) <= 0) continue;
      const std::vector<std::string> frames = Receive(replay_.get());
      // [reader, "", number]
      if (frames.size() != 3 || !frames[1].empty() || frames[2].size() != 8) continue;
      uint64_t from = 0;
      for (const char c : frames[2]) from = from << 8 | static_cast<uint8_t>(c);
      Answer(frames[0], from);
    }
  }

  void Answer(const std::string& reader, uint64_t from) {
    uint64_t next = std::max(from, log_.range().first);
    while (!stopping_) {
      const auto batches = log_.Read(next, kBatchesAtOnce);
      // None: all are told, or the reader asks for what was never there; what is not kept is its
      // gap to see.
      if (!batches.has_value() || batches->empty()) break;
      for (const auto& batch : *batches) {
        const std::string number = BigEndian(batch->sequence), payload = EncodeKvEventBatch(*batch);
        Send(replay_.get(), std::array<std::string_view, 5>{reader, "", topic_, number, payload});
        next = batch->sequence + 1;
      }
    }
    Send(replay_.get(),
         std::array<std::string_view, 5>{reader, "", "", BigEndian(kEndOfReplay), ""});
  }

  const engine::KvEventLog& log_;
  const std::string topic_;
  void* const context_;
  Socket publish_, replay_;
  std::atomic<bool> stopping_ = false;
  std::thread publish_thread_, replay_thread_;
};

absl::StatusOr<std::unique_ptr<KvEventPublisher>> KvEventPublisher::Start(
    const Options& options, const engine::KvEventLog& log) {
  auto impl = std::make_unique<Impl>(options, log);
  if (absl::Status status = impl->Start(options); !status.ok()) return status;
  return std::unique_ptr<KvEventPublisher>(new KvEventPublisher(std::move(impl)));
}

KvEventPublisher::KvEventPublisher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvEventPublisher::~KvEventPublisher() = default;

int KvEventPublisher::port() const { return impl_->port; }
int KvEventPublisher::replay_port() const { return impl_->replay_port; }
uint64_t KvEventPublisher::missed() const { return impl_->missed; }

}  // namespace winnow::server
