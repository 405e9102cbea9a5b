// KV events on ZMQ, byte for byte, and as a reader with a SUB and a DEALER socket sees them.
#include "server/kv_event_publisher.h"

#include <gtest/gtest.h>
#include <zmq.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "nlohmann/json.hpp"
#include "server/kv_event_runs.h"

namespace winnow::server {
namespace {

using engine::BlockName;
using engine::Digest;
using engine::KvEventLog;
using engine::KvTier;
using nlohmann::json;

KvEventLog::Options Small(size_t batches = 1000) {
  return {
      .max_batches = batches, .max_events = 100'000, .unix_seconds = [] { return 1789095808.83; }};
}

// Tenant "" unless another is said. Its last 8 bytes are `hash`.
BlockName Name(uint64_t hash, int32_t index, const std::string& tenant = "") {
  BlockName name;
  name.chain.fill(0xee);
  for (size_t i = 0; i < 8; ++i) name.chain[31 - i] = static_cast<uint8_t>(hash >> (8 * i));
  name.tenant = engine::Sha256(tenant);
  name.index = index;
  return name;
}

json Decoded(const std::string& bytes) { return json::from_msgpack(bytes); }

// The log's last batch.
json Last(const KvEventLog& log) {
  return Decoded(EncodeKvEventBatch(*log.Read(log.range().next - 1, 1)->at(0)));
}

TEST(KvEventPublisher, ABatchIsTheseBytes) {
  KvEventLog log(Small());
  const std::string cleared = EncodeKvEventBatch(*log.Read(0, 1)->at(0));
  // [float64, [{"type": "AllBlocksCleared"}], 0]
  const std::string expected = std::string("\x93\xcb\x41\xda\xa8\xdb\xe0\x35\x1e\xb8", 10) +
                               "\x91\x81\xa4type\xb0"
                               "AllBlocksCleared" +
                               std::string("\x00", 1);
  EXPECT_EQ(cleared, expected);
}

TEST(KvEventPublisher, BlocksOfAChainAreOneEvent) {
  KvEventLog log(Small());
  const BlockName first = Name(0xdab6000000000001, 0), second = Name(2, 1), other = Name(3, 0);
  log.Stored(KvTier::kFast, first, std::nullopt, std::vector<int32_t>{1, 200});
  log.Stored(KvTier::kFast, second, first.chain, std::vector<int32_t>{70000, 4});
  log.Stored(KvTier::kFast, other, std::nullopt, std::vector<int32_t>{5, 6});
  log.Copied(KvTier::kDisk, second.chain);
  log.Removed(KvTier::kFast, first.chain);
  log.Removed(KvTier::kFast, second.chain);
  log.Copied(KvTier::kHost, other.chain);
  log.Commit();
  const json batch = Last(log);
  ASSERT_EQ(batch.size(), 3u);
  EXPECT_EQ(batch[2], 0);
  const json& events = batch[1];
  const json expected = json::parse(R"([
    {"type": "BlockStored", "block_hashes": [15759783946029629441, 2], "parent_block_hash": null,
     "token_ids": [1, 200, 70000, 4], "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null,
     "group_idx": 0, "kv_cache_spec_kind": "full_attention"},
    {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": null, "token_ids": [5, 6], "block_size": 2,
     "lora_id": null, "medium": "GPU", "lora_name": null, "group_idx": 0, "kv_cache_spec_kind": "full_attention"},
    {"type": "BlockStored", "block_hashes": [2], "parent_block_hash": 15759783946029629441, "token_ids": [70000, 4],
     "block_size": 2, "lora_id": null, "medium": "STORAGE", "lora_name": null, "group_idx": 0,
     "kv_cache_spec_kind": "full_attention"},
    {"type": "BlockRemoved", "block_hashes": [15759783946029629441, 2], "medium": "GPU", "group_idx": 0},
    {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": null, "token_ids": [5, 6], "block_size": 2,
     "lora_id": null, "medium": "CPU", "lora_name": null, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}])");
  EXPECT_EQ(events, expected);
}

TEST(KvEventPublisher, ATenantsChainsBeginWithASaltThatIsNotItsName) {
  KvEventLog log(Small());
  const BlockName first = Name(1, 0, "alice"), second = Name(2, 1, "alice");
  log.Stored(KvTier::kFast, first, std::nullopt, std::vector<int32_t>{1});
  log.Stored(KvTier::kFast, second, first.chain, std::vector<int32_t>{2});
  log.Commit();
  log.Stored(KvTier::kFast, Name(3, 2, "alice"), second.chain, std::vector<int32_t>{3});
  log.Commit();
  const json begin = Decoded(EncodeKvEventBatch(*log.Read(1, 1)->at(0)))[1][0];
  ASSERT_EQ(begin.at("extra_keys").size(), 2u);
  const std::string salt = begin["extra_keys"][0][0];
  EXPECT_EQ(salt.size(), 32u);
  EXPECT_EQ(salt.find("alice"), salt.npos);
  EXPECT_TRUE(begin["extra_keys"][1].is_null());
  EXPECT_FALSE(Last(log)[1][0].contains("extra_keys"));  // block 0 alone has it
}

TEST(KvEventPublisher, ManyTokensAndHashesHaveLongHeaders) {
  KvEventLog log(Small());
  std::optional<Digest> parent;
  std::vector<int32_t> tokens(700);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 150);
  for (int i = 0; i < 100; ++i) {
    const BlockName name = Name(1000 + i, i);
    log.Stored(KvTier::kFast, name, parent, tokens);
    parent = name.chain;
  }
  log.Commit();
  const json event = Last(log)[1][0];
  EXPECT_EQ(event["block_hashes"].size(), 100u);
  ASSERT_EQ(event["token_ids"].size(), 70'000u);
  EXPECT_EQ(event["token_ids"][69'999], 699 * 150);
}

// ---- sockets ----

struct CloseSocket {
  void operator()(void* socket) const { zmq_close(socket); }
};

class Reader {
 public:
  Reader(void* context, int kind, int port) : socket_(zmq_socket(context, kind)) {
    const int patience = 60'000, none = 0;
    zmq_setsockopt(socket_.get(), ZMQ_RCVTIMEO, &patience, sizeof patience);
    zmq_setsockopt(socket_.get(), ZMQ_LINGER, &none, sizeof none);
    if (kind == ZMQ_SUB) zmq_setsockopt(socket_.get(), ZMQ_SUBSCRIBE, "kv@", 3);
    EXPECT_EQ(zmq_connect(socket_.get(), ("tcp://127.0.0.1:" + std::to_string(port)).c_str()), 0);
  }

  std::vector<std::string> Receive() {
    std::vector<std::string> frames;
    int more = 1;
    while (more != 0) {
      zmq_msg_t message;
      zmq_msg_init(&message);
      if (zmq_msg_recv(&message, socket_.get(), 0) < 0) {
        ADD_FAILURE() << zmq_strerror(zmq_errno());
        return {};
      }
      frames.emplace_back(static_cast<char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
      more = zmq_msg_more(&message);
      zmq_msg_close(&message);
    }
    return frames;
  }
  void Ask(uint64_t from) {
    std::string number;
    for (int i = 7; i >= 0; --i) number += static_cast<char>(from >> (8 * i));
    zmq_send(socket_.get(), "", 0, ZMQ_SNDMORE);
    zmq_send(socket_.get(), number.data(), number.size(), 0);
  }
  void AskNonsense() { zmq_send(socket_.get(), "nonsense", 8, 0); }

 private:
  std::unique_ptr<void, CloseSocket> socket_;
};

uint64_t Number(const std::string& bytes) {
  uint64_t number = 0;
  for (const char c : bytes) number = number << 8 | static_cast<uint8_t>(c);
  return number;
}

class KvEventSockets : public ::testing::Test {
 protected:
  KvEventSockets() : context_(zmq_ctx_new()) {}
  ~KvEventSockets() override { zmq_ctx_term(context_); }

  void StoreOne(KvEventLog& log) {
    log.Stored(KvTier::kFast, Name(100 + stored_, 0), std::nullopt, std::vector<int32_t>{stored_});
    ++stored_;
    log.Commit();
  }
  // Batch 0 says that nothing is stored, batch N > 0 tells of the token N - 1.
  static void ExpectBatch(uint64_t number, const std::string& payload) {
    const json event = Decoded(payload)[1][0];
    if (number == 0) {
      EXPECT_EQ(event["type"], "AllBlocksCleared");
    } else {
      EXPECT_EQ(event["token_ids"][0], number - 1);
    }
  }
  static std::unique_ptr<KvEventPublisher> Start(const KvEventLog& log, bool replay = true) {
    auto publisher = KvEventPublisher::Start({.address = "127.0.0.1:0",
                                              .replay = replay ? "127.0.0.1:0" : "",
                                              .topic = "kv@1.2.3.4:8000@needle"},
                                             log);
    EXPECT_TRUE(publisher.ok()) << publisher.status();
    return *std::move(publisher);
  }

  void* const context_;
  int32_t stored_ = 0;
};

TEST_F(KvEventSockets, AReaderGetsWhatComesAndAsksForWhatItMissed) {
  KvEventLog log(Small(1'000'000));  // keeps them all, however long the reader takes
  for (int i = 0; i < 5; ++i) StoreOne(log);
  const auto publisher = Start(log);
  Reader reader(context_, ZMQ_SUB, publisher->port());
  // Nobody can tell when a subscription has arrived, not even whether it is there before the
  // publisher's thread sends the batch 0: batches come until one is read.
  std::atomic<bool> over = false;
  std::thread writer([&] {
    while (!over) {
      StoreOne(log);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  std::vector<std::string> frames = reader.Receive();
  over = true;
  writer.join();
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_EQ(frames[0], "kv@1.2.3.4:8000@needle");
  ASSERT_EQ(frames[1].size(), 8u);
  uint64_t next = Number(frames[1]);
  ExpectBatch(next, frames[2]);
  while (++next < log.range().next) {
    frames = reader.Receive();
    ASSERT_EQ(frames.size(), 3u);
    EXPECT_EQ(Number(frames[1]), next);  // no gaps
    ExpectBatch(next, frames[2]);
  }

  Reader asker(context_, ZMQ_DEALER, publisher->replay_port());
  asker.AskNonsense();  // is not answered, and does no harm
  asker.Ask(0);
  for (uint64_t expected = 0;; ++expected) {
    frames = asker.Receive();
    ASSERT_EQ(frames.size(), 4u);
    EXPECT_EQ(frames[0], "");
    if (frames[3].empty()) {
      EXPECT_EQ(Number(frames[2]), ~uint64_t{0});
      EXPECT_EQ(expected, log.range().next);
      break;
    }
    EXPECT_EQ(frames[1], "kv@1.2.3.4:8000@needle");
    EXPECT_EQ(Number(frames[2]), expected);
    ExpectBatch(expected, frames[3]);
  }
  EXPECT_EQ(publisher->missed(), 0u);
}

TEST_F(KvEventSockets, ReplayBeginsWithWhatIsKept) {
  KvEventLog log(Small(3));
  for (int i = 0; i < 10; ++i) StoreOne(log);
  const auto publisher = Start(log);
  Reader asker(context_, ZMQ_DEALER, publisher->replay_port());
  asker.Ask(0);
  std::vector<uint64_t> numbers;
  for (auto frames = asker.Receive(); frames.size() == 4 && !frames[3].empty();
       frames = asker.Receive()) {
    numbers.push_back(Number(frames[2]));
  }
  EXPECT_EQ(numbers, (std::vector<uint64_t>{8, 9, 10}));
  asker.Ask(1000);  // there is nothing, and the answer says so
  EXPECT_EQ(Number(asker.Receive().at(2)), ~uint64_t{0});
}

TEST_F(KvEventSockets, AReaderThatReadsNothingHoldsNobodyUp) {
  KvEventLog log(Small(100));
  const auto publisher = Start(log, /*replay=*/false);
  Reader reader(context_, ZMQ_SUB, publisher->port());
  for (int i = 0; i < 20'000; ++i) StoreOne(log);
  EXPECT_EQ(log.range().next, 20'001u);
  EXPECT_EQ(publisher->replay_port(), 0);
}

TEST_F(KvEventSockets, AnAddressThatIsTakenIsRefused) {
  KvEventLog log(Small());
  const auto publisher = Start(log);
  const auto second = KvEventPublisher::Start(
      {.address = "127.0.0.1:" + std::to_string(publisher->port()), .replay = "", .topic = "t"},
      log);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace winnow::server
