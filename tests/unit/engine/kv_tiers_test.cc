// What the engine gives when its KV is in tiers: the tokens that it gives when all KV is in memory.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv_memory.h"
#include "engine/model_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;

const std::string kNeedle = std::string(WINNOW_SOURCE_DIR) + "/models/needle-5m";
constexpr int32_t kBlockTokens = 16;
constexpr int32_t kContext = 640;
constexpr int32_t kRunning = 4;
// Of the requests about shared texts, one in so many: a sanitizer makes the model's arithmetic
// twenty times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kFewer = 3;
#else
constexpr int kFewer = 1;
#endif
constexpr int32_t kStepTokens = 64;

std::vector<AttentionPolicy> Policies() {
  std::vector<AttentionPolicy> policies;
  for (const char* text :
       {"dense", "window:sink=2,window=20", "oracle:k=5,window=9", "quest:k=16,window=9,suffix=40",
        "lsh:k=5,window=9,suffix=30", "lsh:k=9,p=0.9,window=9,dense_layers=0", "hata:k=6,window=9",
        "spotlight:k=5%,window=9,completion=on,suffix=50", "spotlight:k=90%,window=9,suffix=99",
        "lsh:k=5,window=9,floor=0.5"}) {
    auto policy = ParseAttentionPolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    policies.push_back(*policy);
  }
  return policies;
}

ModelOptions Options() {
  ModelOptions options;
  options.num_threads = 2;
  options.block_tokens = kBlockTokens;
  options.max_context = kContext;
  options.max_batch_tokens = kStepTokens;
  options.max_batch_logits = kRunning;
  options.retrieval.probe_interval = 5;
  options.retrieval.summaries = kRunning;
  return options;
}

std::unique_ptr<LoadedModel> Load(const ModelOptions& options, const std::string& dir = kNeedle) {
  auto model = LoadModel(dir, options);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

int64_t FrameBytes(const ModelConfig& config) {
  return int64_t{2} * 2 * config.head_dim * config.num_kv_heads * kBlockTokens;
}

class KvTiersTest : public ::testing::Test {
 protected:
  KvTiersTest() : seed_(testing::TestSeed()), random_(seed_) {
    auto config = LoadModelConfig(kNeedle);
    config_ = *std::move(config);
    for (int i = 0; i < 14; ++i) {
      const auto length =
          static_cast<int32_t>(random_() % 3 == 0 ? 1 + random_() % 60 : 200 + random_() % 400);
      std::vector<int32_t> prompt(length);
      for (int32_t& token : prompt) token = static_cast<int32_t>(random_() % config_.vocab_size);
      Request request = MakeRequest(i + 1, std::move(prompt), 1 + random_() % 30);
      request.tenant = i % 3 == 0 ? "a" : "b";
      request.policy = Policies()[i % Policies().size()];
      requests_.push_back(std::move(request));
    }
  }

  // As few frames as the options allow, and a store for everything else.
  ModelOptions Tiered() const {
    ModelOptions options = Options();
    options.kv_dtype = "bf16";
    options.kv_bytes = FrameBytes(config_) * KvMemory::LeastFrames(config_.num_layers, kBlockTokens,
                                                                   kContext, kStepTokens, kRunning);
    options.tiers.row_cache_bytes = 1 << 18;
    return options;
  }

  // With a store that fails as `*faulty` is told to.
  std::unique_ptr<LoadedModel> LoadOver(storage::FaultyStore** faulty, ModelOptions options) const {
    options.decorate_store = [&](std::unique_ptr<storage::BlockStore> store) {
      auto made =
          std::make_unique<storage::FaultyStore>(std::move(store), static_cast<uint32_t>(seed_));
      *faulty = made.get();
      return made;
    };
    return Load(options);
  }

  std::vector<Reply> Answers(LoadedModel& model, bool prefix_cache = false) {
    FakeClock clock;
    EngineOptions options;
    options.max_running = kRunning;
    options.step_tokens = step_tokens_;
    options.prefix_cache = prefix_cache;
    options.eager_share = eager_share_;
    const auto engine = MakeEngine(options, *model.decoder, clock);
    std::vector<Client> clients(requests_.size());
    for (size_t i = 0; i < requests_.size(); ++i) {
      const absl::Status status = engine->Submit(requests_[i], clients[i].output);
      EXPECT_TRUE(status.ok()) << status;
    }
    StepUntilIdle(*engine);
    losses_ = engine->stats().kv_losses;
    cached_tokens_ = engine->stats().cached_tokens;
    EXPECT_EQ(engine->stats().blocks_used, 0);
    std::vector<Reply> replies;
    for (Client& client : clients) replies.push_back(client.Read());
    return replies;
  }

  // Room for all KV in memory, one after the other: what every other way must give.
  const std::vector<Reply>& Expected() {
    if (!expected_.empty()) return expected_;
    ModelOptions options = Options();
    options.kv_dtype = "bf16";
    options.kv_bytes = FrameBytes(config_) * config_.num_layers * 8 * (kContext / kBlockTokens);
    expected_ = Answers(*Load(options));
    return expected_;
  }

  // Of a disk in order. A busy machine's may take longer than reads wait for.
  void ExpectNoLosses(const LoadedModel& model) {
    const auto late = static_cast<size_t>(storage::Reason::kLate);
    if (model.store.store->stats().misses[late] == 0) {
      EXPECT_EQ(losses_, 0u);
    }
  }

  void ExpectEqual(const std::vector<Reply>& replies) {
    for (size_t i = 0; i < replies.size(); ++i) {
      SCOPED_TRACE(ToString(requests_[i].policy) + ", prompt " +
                   std::to_string(requests_[i].prompt.size()) + ", seed " + std::to_string(seed_));
      EXPECT_EQ(replies[i].last.finish, Expected()[i].last.finish) << replies[i].last.error;
      EXPECT_EQ(replies[i].tokens, Expected()[i].tokens);
    }
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  ModelConfig config_;
  std::vector<Request> requests_;
  std::vector<Reply> expected_;
  uint64_t losses_ = 0, cached_tokens_ = 0;
  double eager_share_ = 0;  // of EngineOptions
  int32_t step_tokens_ = kStepTokens;
  TempDir directory_;
};

TEST_F(KvTiersTest, TokensAreThoseOfKvInMemory) {
  struct Case {
    const char* name;
    int64_t host_bytes, disk_bytes;
    const char* io;
    int64_t row_cache_bytes;
    bool prefetch;
  };
  for (const Case& c : {Case{"host", 64 << 20, 0, "auto", 1 << 18, true},
                        Case{"disk, threads", 0, 64 << 20, "threads", 1 << 18, false},
                        Case{"disk, auto, without row cache", 0, 64 << 20, "auto", 0, true},
                        Case{"host over disk", 1 << 20, 64 << 20, "auto", 1 << 18, true}}) {
    SCOPED_TRACE(c.name);
    ModelOptions options = Tiered();
    options.tiers.host_bytes = c.host_bytes;
    options.tiers.disk_bytes = c.disk_bytes;
    if (c.disk_bytes > 0) options.tiers.store_dir = directory_.File(c.name);
    options.tiers.io = c.io;
    options.tiers.row_cache_bytes = c.row_cache_bytes;
    options.tiers.prefetch = c.prefetch;
    const auto model = Load(options);
    ASSERT_NE(model, nullptr);
    const std::vector<Reply> replies = Answers(*model);
    ExpectNoLosses(*model);
    ExpectEqual(replies);
    const KvMemoryStats& stats = model->decoder->kv_memory()->stats();
    EXPECT_GT(stats.evicted_frames, 0u);  // else the test shows nothing
    EXPECT_GT(stats.loaded_pieces, 0u);
    const RowFetcherStats& rows = model->decoder->row_fetcher().stats();
    EXPECT_GT(rows.store_rows, 0u);
    EXPECT_EQ(rows.cache_rows > 0, c.row_cache_bytes > 0);
    EXPECT_EQ(rows.asked_rows > 0, c.prefetch);
    EXPECT_EQ(rows.asked_hits > 0, c.prefetch);
    EXPECT_EQ(rows.payload_bytes, (rows.store_rows + rows.asked_rows) *
                                      model->decoder->kv_memory()->layout().RowBytes());
    // Nothing of requests that have ended is left behind.
    std::vector<storage::Completion> done;
    while (model->store.store->in_flight() > 0) {
      model->store.store->Poll(std::chrono::milliseconds(10), &done);
    }
    EXPECT_EQ(model->store.store->stats().blocks, 0u);
  }
}

// Each block that may be taken has a place: a sequence that fills them all loses none, whatever is kept
// beside them.
TEST_F(KvTiersTest, HostMemoryHoldsAllTheBlocksThatItIsCountedFor) {
  for (const bool prefix_cache : {false, true}) {
    SCOPED_TRACE(prefix_cache);
    ModelOptions options = Tiered();
    options.tiers.host_bytes = prefix_cache ? 3 << 19 : 5 << 18;
    const auto model = Load(options);
    const int32_t tokens = std::min(kContext, model->decoder->num_blocks() * kBlockTokens);
    requests_.clear();
    for (const char* policy : {"hata:k=6,window=9,suffix=30", "quest:k=16,window=9", "dense"}) {
      std::vector<int32_t> prompt(tokens - 4);
      for (int32_t& token : prompt) token = static_cast<int32_t>(random_() % config_.vocab_size);
      Request request = MakeRequest(requests_.size() + 1, std::move(prompt), 4);
      request.policy = *ParseAttentionPolicy(policy);
      requests_.push_back(std::move(request));
    }
    expected_.clear();
    const std::vector<Reply> replies = Answers(*model, prefix_cache);
    EXPECT_EQ(losses_, 0u);
    ExpectEqual(replies);
  }
}

// A floor looks at what the prompt's own questions cover, however the prompt is cut: a sequence that is
// computed again, or beside others, gives the same tokens.
TEST_F(KvTiersTest, WhatAFloorDoesIsTheSameHoweverAPromptIsCut) {
  requests_.resize(5);
  for (Request& request : requests_) {
    request.policy = *ParseAttentionPolicy("lsh:k=3,window=9,suffix=90,from=0,floor=0.9");
  }
  for (const int32_t step_tokens : {kStepTokens / 2, 5}) {
    ModelOptions options = Options();
    options.kv_dtype = "bf16";
    options.kv_bytes = FrameBytes(config_) * config_.num_layers * 8 * (kContext / kBlockTokens);
    step_tokens_ = step_tokens;
    const std::vector<Reply> replies = Answers(*Load(options));
    step_tokens_ = kStepTokens;
    ExpectEqual(replies);
  }
}

TEST_F(KvTiersTest, FaultsOfTheStoreCostTimeAndNoToken) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  faulty->faults = {.miss_share = 0.0001, .lose_share = 0.002, .polls_max = 3, .reorder = true};
  const std::vector<Reply> replies = Answers(*model);
  EXPECT_GT(losses_, 0u);
  ExpectEqual(replies);
  EXPECT_GT(model->decoder->kv_memory()->stats().lost_pieces, 0u);
}

// What could not be read may be there all the same: it must not stay when nobody needs it any more.
TEST_F(KvTiersTest, NothingIsLeftOfWhatWasLost) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  faulty->faults = {.miss_share = 0.0005};
  Answers(*model);
  EXPECT_GT(model->decoder->kv_memory()->stats().lost_pieces, 0u);
  std::vector<storage::Completion> done;
  while (faulty->in_flight() > 0) faulty->Poll(std::chrono::milliseconds(10), &done);
  EXPECT_EQ(faulty->stats().blocks, 0u);
}

TEST_F(KvTiersTest, AStoreThatTakesNothingLeavesWhatFastMemoryHolds) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  faulty->faults = {.miss_share = 1};
  for (size_t i = 0; const Reply& reply : Answers(*model)) {
    // Whoever fits is answered, and rightly; who does not is told so.
    if (reply.last.finish == FinishReason::kError) {
      EXPECT_EQ(reply.last.error_code, absl::StatusCode::kUnavailable);
    } else {
      EXPECT_EQ(reply.tokens, Expected()[i].tokens) << ToString(requests_[i].policy);
    }
    ++i;
  }
}

TEST_F(KvTiersTest, WhileTheStoreIsFullRequestsWaitAndAreToldInTheEnd) {
  for (const bool recovers : {true, false}) {
    for (const bool prefix_cache : {true, false}) {
      SCOPED_TRACE(recovers);
      ModelOptions options = Tiered();
      options.tiers.host_bytes = 64 << 20;
      storage::FaultyStore* faulty = nullptr;
      const auto model = LoadOver(&faulty, options);
      FakeClock clock;
      EngineOptions engine_options;
      engine_options.max_running = kRunning;
      engine_options.step_tokens = kStepTokens;
      engine_options.prefix_cache = prefix_cache;
      const auto engine = MakeEngine(engine_options, *model->decoder, clock);
      std::vector<Client> clients(requests_.size());
      for (size_t i = 0; i < requests_.size(); ++i) {
        ASSERT_TRUE(engine->Submit(requests_[i], clients[i].output).ok());
      }
      for (int i = 0; i < 20; ++i) engine->Step();
      faulty->faults.state = storage::TierState::kDegraded;
      StepUntilIdle(*engine);
      if (recovers) {
        faulty->faults.state.reset();
        StepUntilIdle(*engine);
      }
      // Everybody has an end, sooner or later.
      for (size_t i = 0; i < requests_.size(); ++i) {
        clock.Advance(std::chrono::seconds(31));
        StepUntilIdle(*engine);
      }
      EXPECT_EQ(engine->stats().blocks_used, 0);
      int told = 0;
      for (size_t i = 0; i < requests_.size(); ++i) {
        const Reply& reply = clients[i].Read();
        if (reply.last.finish == FinishReason::kError) {
          EXPECT_EQ(reply.last.error_code, absl::StatusCode::kUnavailable);
          ++told;
        } else {
          EXPECT_EQ(reply.last.finish, Expected()[i].last.finish);
          EXPECT_EQ(reply.tokens, Expected()[i].tokens) << ToString(requests_[i].policy);
        }
      }
      EXPECT_EQ(told > 0, !recovers);
    }
  }
}

TEST_F(KvTiersTest, AnEngineThatEndsLeavesAnIdleStore) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 16 << 20;
  options.tiers.store_dir = directory_.File("store");
  const auto model = Load(options);
  FakeClock clock;
  EngineOptions engine_options;
  engine_options.max_running = kRunning;
  engine_options.step_tokens = kStepTokens;
  const auto engine = MakeEngine(engine_options, *model->decoder, clock);
  std::vector<Client> clients(requests_.size());
  for (size_t i = 0; i < requests_.size(); ++i) {
    ASSERT_TRUE(engine->Submit(requests_[i], clients[i].output).ok());
  }
  engine->BeginDrain();
  // On a thread of its own, as in the server: what it leaves in flight nobody can get back.
  std::thread([&] { engine->Run({}); }).join();
  EXPECT_TRUE(model->store.store->idle());
}

// ---- prefixes ----

// Questions about few texts, of two tenants.
class PrefixTest : public KvTiersTest {
 protected:
  PrefixTest() {
    requests_.clear();
    std::vector<std::vector<int32_t>> texts(3);
    for (auto& text : texts) {
      text.resize(150 + random_() % 350);
      for (int32_t& token : text) token = static_cast<int32_t>(random_() % config_.vocab_size);
    }
    const std::vector<AttentionPolicy> policies = Policies();
    for (int i = 0; i < 30 / kFewer; ++i) {
      std::vector<int32_t> prompt = texts[random_() % texts.size()];
      for (int32_t left = 5 + random_() % 40; left > 0; --left) {
        prompt.push_back(static_cast<int32_t>(random_() % config_.vocab_size));
      }
      Request request = MakeRequest(i + 1, std::move(prompt), 1 + random_() % 12);
      request.tenant = random_() % 4 == 0 ? "a" : "b";
      request.policy = policies[random_() % policies.size()];
      requests_.push_back(std::move(request));
    }
  }
};

TEST_F(PrefixTest, SharedKvGivesTheTokensOfOnesOwn) {
  ModelOptions options = Options();
  options.kv_dtype = "bf16";
  // Not even room for the running ones: some are preempted, and find their own blocks again.
  for (const int64_t blocks : {3 * (kContext / kBlockTokens), 8 * (kContext / kBlockTokens)}) {
    options.kv_bytes = FrameBytes(config_) * config_.num_layers * blocks;
    const auto model = Load(options);
    const std::vector<Reply> replies = Answers(*model, /*prefix_cache=*/true);
    EXPECT_GT(cached_tokens_, 300u / kFewer);
    ExpectEqual(replies);
  }
}

// One store under a model that was changed in place, or other settings: KV of the one is wrong for the
// other, however little they differ.
TEST_F(PrefixTest, AStoreOfAnotherModelOrOfOtherSettingsHasNothing) {
  requests_.resize(1);
  requests_[0].policy = {};
  requests_[0].prompt.resize(100);
  requests_[0].stopping.max_tokens = 8;
  const std::string model_dir = directory_.File("model");
  const auto copy_model = [&] {
    std::filesystem::remove_all(model_dir);
    std::filesystem::copy(kNeedle, model_dir);
    std::filesystem::remove(model_dir + "/winnow-artifact.safetensors");  // of the unchanged model
  };
  copy_model();
  ModelOptions options = Tiered();
  options.kv_bytes *= 4;  // enough for any of the settings below
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  ExpectEqual(Answers(*Load(options, model_dir), true));
  Answers(*Load(options, model_dir), true);
  EXPECT_GT(cached_tokens_, 0u);

  const auto change_config = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(ReadText(model_dir + "/config.json"));
    config[key] = value;
    WriteText(model_dir + "/config.json", config.dump());
  };
  const auto change_weight = [&] {
    // The embedding of the prompt's last token among those of the first block, far behind 64 KiB.
    int32_t token = 0;
    for (int32_t i = 0; i < kBlockTokens; ++i) token = std::max(token, requests_[0].prompt[i]);
    ASSERT_GT(token, 200);
    std::string bytes = ReadText(model_dir + "/model.safetensors");
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    const auto header = nlohmann::json::parse(bytes.substr(8, length));
    const auto begin =
        header.at("model.embed_tokens.weight").at("data_offsets").at(0).get<uint64_t>();
    for (int64_t i = 0; i < config_.hidden_size; ++i) {
      bytes[8 + length + begin + 2 * (int64_t{token} * config_.hidden_size + i) + 1] ^= 0x80;
    }
    WriteText(model_dir + "/model.safetensors", bytes);
  };
  struct Change {
    const char* what;
    std::function<void(ModelOptions*)> make;
  };
  for (const Change& change :
       {Change{"eps", [&](ModelOptions*) { change_config("rms_norm_eps", 0.5); }},
        Change{"theta", [&](ModelOptions*) { change_config("rope_theta", 1000.0); }},
        Change{"rope scaling",
               [&](ModelOptions*) {
                 change_config("rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}});
               }},
        Change{"weight", [&](ModelOptions*) { change_weight(); }},
        Change{"KV type", [](ModelOptions* o) { o->kv_dtype = "f32"; }},
        Change{"block", [](ModelOptions* o) { o->block_tokens = 32; }},
        Change{"instruction set", [](ModelOptions* o) { o->isa = "scalar"; }}}) {
    SCOPED_TRACE(change.what);
    if (change.what == std::string("instruction set") &&
        kernels::MakeCpuBackend("avx2", 1) == nullptr) {
      continue;  // there is but one here
    }
    copy_model();
    ModelOptions changed = options;
    change.make(&changed);
    ModelOptions alone = changed;
    alone.tiers = {};
    const std::vector<Reply> expected = Answers(*Load(alone, model_dir));
    const std::vector<Reply> replies = Answers(*Load(changed, model_dir), true);
    EXPECT_EQ(cached_tokens_, 0u);
    EXPECT_EQ(replies[0].tokens, expected[0].tokens);
  }
}

TEST_F(PrefixTest, ATenantFindsNothingOfAnothers) {
  requests_.resize(2);
  requests_[1].prompt = requests_[0].prompt;
  requests_[0].tenant = "a";
  requests_[1].tenant = "b";
  ModelOptions options = Options();
  options.kv_bytes = FrameBytes(config_) * config_.num_layers * 8 * (kContext / kBlockTokens);
  const auto model = Load(options);
  Answers(*model, true);
  EXPECT_EQ(cached_tokens_, 0u);
}

TEST_F(PrefixTest, APrefixOutlivesTheProcessAndGivesTheSameTokens) {
  for (const char* io : {"threads", "auto"}) {
    SCOPED_TRACE(io);
    eager_share_ = io == std::string("auto") ? 1 : 0;
    ModelOptions options = Tiered();
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File(io);
    options.tiers.io = io;
    {
      const auto model = Load(options);
      const std::vector<Reply> replies = Answers(*model, true);
      ExpectEqual(replies);
      ExpectNoLosses(*model);
    }
    const auto model = Load(options);
    // One request: all it takes over comes from the directory.
    const std::vector<Request> all = requests_;
    for (size_t i = 0; i < all.size(); i += 7) {
      requests_ = {all[i]};
      const Reply expected = Expected()[i];
      const std::vector<Reply> replies = Answers(*model, true);
      EXPECT_GE(cached_tokens_ + kBlockTokens + 100, all[i].prompt.size())
          << ToString(all[i].policy);
      EXPECT_EQ(replies[0].tokens, expected.tokens) << ToString(all[i].policy) << " seed " << seed_;
      ExpectNoLosses(*model);
    }
    requests_ = all;
  }
}

TEST_F(PrefixTest, ADamagedStoreCostsComputationAndNoToken) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 128 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  for (int round = 0; round < 2; ++round) {
    faulty->faults = {.miss_share = 0.0001, .lose_share = 0.003, .polls_max = 2, .reorder = true};
    const std::vector<Reply> replies = Answers(*model, true);
    EXPECT_GT(cached_tokens_, 0u);
    ExpectEqual(replies);
  }
  EXPECT_GT(model->decoder->kv_memory()->stats().lost_pieces, 0u);
}

// Flips a bit of every second page of every segment.
int DamageAllOver(const std::string& directory) {
  int damaged = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() != ".wseg") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(entry.path()));
    // Not the segment's own header: without it all blocks are gone at once.
    for (int64_t page = 2; page < bytes / 4096; page += 2) {
      file.seekg(page * 4096 + 77);
      const int byte = file.peek();
      file.seekp(page * 4096 + 77);
      file.put(static_cast<char>(byte ^ 4));
      ++damaged;
    }
  }
  return damaged;
}

// Every block of a prefix damaged, and each found only when it is read.
TEST_F(PrefixTest, ADirectoryDamagedAllOverCostsComputationAndNoToken) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  Answers(*Load(options), true);
  EXPECT_GT(DamageAllOver(options.tiers.store_dir), 100);
  const auto model = Load(options);
  const std::vector<Reply> replies = Answers(*model, true);
  EXPECT_GT(losses_, 8u / kFewer);
  ExpectEqual(replies);
}

// What a summary holds must not be attended to exactly as well: one that was kept under a narrow window
// reaches into a wide one, and one of single tokens into the page that quest reads with its window.
TEST_F(PrefixTest, ASummaryThatReachesIntoTheWindowIsMadeAnew) {
  std::vector<int32_t> text(400);
  for (int32_t& token : text) token = static_cast<int32_t>(random_() % config_.vocab_size);
  const auto ask = [&](const char* policy, int questions) {
    requests_.clear();
    for (int i = 0; i < questions; ++i) {
      std::vector<int32_t> prompt = text;
      for (int j = 0; j < 20; ++j) {
        prompt.push_back(static_cast<int32_t>(random_() % config_.vocab_size));
      }
      Request request = MakeRequest(i + 1, std::move(prompt), 12);
      request.policy = *ParseAttentionPolicy(policy);
      requests_.push_back(std::move(request));
    }
    expected_.clear();
  };
  for (const char* later : {"spotlight:k=2,window=150,completion=on,suffix=30",
                            "quest:k=16,window=12,completion=on,suffix=30"}) {
    SCOPED_TRACE(later);
    ModelOptions options = Tiered();
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File(later);
    ask("spotlight:k=2,window=9,completion=on,suffix=30", 1);
    ExpectEqual(Answers(*Load(options), true));
    const auto model = Load(options);
    ask(later, 4);
    const std::vector<Reply> replies = Answers(*model, true);
    EXPECT_GT(cached_tokens_, 300u);
    ExpectEqual(replies);
  }
}

// A bad sector: reads of one block fail for ever. Whoever loses it twice has it written anew, or every
// request about this text would be computed in vain.
TEST_F(PrefixTest, ABlockThatCannotBeReadIsWrittenAnew) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 128 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  requests_.resize(1);
  requests_[0].policy = {};  // reads all that it takes over
  ExpectEqual(Answers(*model, true));
  ASSERT_FALSE(faulty->put.empty());
  for (const auto& key : faulty->put) {
    if (key[32] == 0 && key[36] == 3) faulty->unreadable = {key};  // KV of layer 3
  }
  ASSERT_EQ(faulty->unreadable.size(), 1u);
  ExpectEqual(Answers(*model, true));
  EXPECT_GT(losses_, 0u);
  EXPECT_TRUE(faulty->unreadable.empty());
  for (int again = 0; again < 2; ++again) {
    ExpectEqual(Answers(*model, true));
    EXPECT_EQ(losses_, 0u);
  }
  EXPECT_GT(cached_tokens_, 0u);
}

TEST_F(PrefixTest, TokensThatWereLostAndComputedAgainAreNotCachedOnes) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  for (Request& request : requests_) request.policy = {};  // dense: reads all that it takes over
  Answers(*Load(options), true);
  EXPECT_GT(DamageAllOver(options.tiers.store_dir), 100);
  const auto model = Load(options);
  requests_.resize(1);
  const std::vector<Reply> replies = Answers(*model, true);
  EXPECT_GT(losses_, 0u);
  EXPECT_GT(cached_tokens_, 0u) << "taken over at first";
  EXPECT_EQ(replies[0].last.usage.cached_tokens, 0);
}

TEST_F(KvTiersTest, FramesThatCannotWorkAreRefusedWithTheBytes) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 64 << 20;
  const int64_t least = options.kv_bytes;
  options.kv_bytes = least - 1;
  const absl::Status status = LoadModel(kNeedle, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv_bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(least)));
  // Nor is host memory that would hold no block more than the frames.
  ModelOptions host = options;
  host.kv_bytes = least;
  host.tiers.host_bytes = 1 << 20;
  EXPECT_THAT(std::string(LoadModel(kNeedle, host).status().message()),
              HasSubstr("host_bytes is 1048576"));
  // Also where not even a block would fit: who follows the message must not be refused again.
  options.kv_bytes = 1;
  EXPECT_THAT(std::string(LoadModel(kNeedle, options).status().message()),
              HasSubstr(std::to_string(least)));
}

TEST(TierFlagsTest, WhatCannotBeHonouredIsRefusedByName) {
  const auto message = [](const TierFlags& flags) {
    const absl::Status status = CheckTierFlags(flags);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message({.disk_bytes = 1 << 30}), HasSubstr("store_dir"));
  EXPECT_THAT(message({.store_dir = "x"}), HasSubstr("disk_bytes"));
  EXPECT_THAT(message({.disk_bytes = 1000, .store_dir = "x"}), HasSubstr("disk_bytes"));
  EXPECT_THAT(message({.host_bytes = 5}), HasSubstr("host_bytes"));
  EXPECT_THAT(message({.host_bytes = 1 << 20, .io = "aio"}), HasSubstr("io"));
  EXPECT_TRUE(CheckTierFlags({}).ok());
}

}  // namespace
}  // namespace winnow::engine
