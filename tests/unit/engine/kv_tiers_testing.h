// An engine over a small model with KV in tiers, and what it answers when all KV is in memory.
#ifndef WINNOW_TESTS_UNIT_ENGINE_KV_TIERS_TESTING_H_
#define WINNOW_TESTS_UNIT_ENGINE_KV_TIERS_TESTING_H_

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/model_loader.h"
#include "gtest/gtest.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/pretended_device.h"
#include "tests/unit/engine/sequence_runner.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine::kv_tiers {

inline const std::string kNeedle = SourcePath("models/needle-5m");
inline constexpr int32_t kBlockTokens = 16;
inline constexpr int32_t kContext = 640;
inline constexpr int32_t kRunning = 4;
// Of the requests about shared texts, one in so many: a sanitizer makes the model's arithmetic
// twenty times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kFewer = 3;
#else
inline constexpr int kFewer = 1;
#endif
inline constexpr int32_t kStepTokens = 64;
inline constexpr int kThreads = 2;
// For what takes real time whatever clock the engine has: a busy machine's disk must not change what a test sees.
inline constexpr std::chrono::seconds kPatience(60);

inline std::vector<AttentionPolicy> Policies() {
  std::vector<AttentionPolicy> policies;
  for (const char* text :
       {"dense", "window:sink=2,window=20", "oracle:k=5,window=9", "quest:k=16,window=9,suffix=40",
        "lsh:k=5,window=9,suffix=30", "lsh:k=9,p=0.9,window=9,dense_layers=0", "hata:k=6,window=9",
        "spotlight:k=5%,window=9,completion=on,suffix=50", "spotlight:k=90%,window=9,suffix=99",
        "lsh:k=5,window=9,floor=0.5", "pca:k=5,window=9,suffix=70",
        "pca:k=5,p=0.8,window=9,suffix=70", "pca:k=3%,window=20,sink=3,tail=off,suffix=40"}) {
    auto policy = ParseAttentionPolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    policies.push_back(*policy);
  }
  return policies;
}

inline ModelOptions Options() {
  ModelOptions options;
  options.num_threads = kThreads;
  options.block_tokens = kBlockTokens;
  options.max_context = kContext;
  options.max_batch_tokens = kStepTokens;
  options.max_batch_logits = kRunning;
  options.retrieval.probe_interval = 5;
  options.retrieval.summaries = kRunning;
  options.retrieval.index = "quest,lsh,pca,hata,spotlight,int4";
  // One fit for all tests of a run, whichever makes it, and however busy the machine is.
  options.retrieval.crossover_cache = ::testing::TempDir() + "/winnow-tiers-fit/crossover.json";
  options.retrieval.fit_budget = std::chrono::hours(24);
  options.tiers.read_deadline = kPatience;
  return options;
}

inline std::unique_ptr<LoadedModel> Load(const ModelOptions& options,
                                         const std::string& dir = kNeedle,
                                         std::unique_ptr<kernels::Backend> backend = nullptr) {
  auto model = LoadModel(dir, options, std::move(backend));
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

inline int64_t FrameBytes(const ModelConfig& config, kernels::DType dtype = kernels::DType::kBF16) {
  return static_cast<int64_t>(
      kernels::KvLayout{config.num_kv_heads, config.head_dim, kBlockTokens, dtype}.BlockBytes());
}

class KvTiersTest : public ::testing::Test {
 protected:
  KvTiersTest() : seed_(testing::TestSeed()), random_(seed_) {
    auto config = LoadModelConfig(kNeedle);
    config_ = *std::move(config);
    for (int i = 0; i < 16; ++i) {
      auto length =
          static_cast<int32_t>(random_() % 3 == 0 ? 1 + random_() % 60 : 200 + random_() % 400);
      auto most = static_cast<int32_t>(1 + random_() % 30);
      // One long answer under quest, so that rows are chosen and predicted in any case.
      if (i == 3) length = 400, most = 30;
      std::vector<int32_t> prompt(length);
      for (int32_t& token : prompt) token = static_cast<int32_t>(random_() % config_.vocab_size);
      Request request = MakeRequest(i + 1, std::move(prompt), most);
      request.tenant = i % 3 == 0 ? "a" : "b";
      request.policy = Policies()[i % Policies().size()];
      requests_.push_back(std::move(request));
    }
  }

  int64_t LayerBlockBytes() const {
    return kv_tiers::FrameBytes(config_, kv_dtype_ == "int8"  ? kernels::DType::kI8
                                         : kv_dtype_ == "fp8" ? kernels::DType::kF8
                                                              : kernels::DType::kBF16);
  }

  ModelOptions PlainOptions() const {
    ModelOptions options = Options();
    if (!index_.empty()) options.retrieval.index = index_;
    return options;
  }

  // As few frames as the options allow, and a store for everything else.
  ModelOptions Tiered() const {
    ModelOptions options = PlainOptions();
    options.kv_dtype = kv_dtype_;
    options.kv_bytes = LayerBlockBytes() * LeastFrames(config_.num_layers(), kBlockTokens, kContext,
                                                       kStepTokens, kRunning);
    options.tiers.row_cache_bytes = 1 << 18;
    return options;
  }

  // With a store that fails as `*faulty` is told to, each made with other luck.
  std::unique_ptr<LoadedModel> LoadOver(storage::FaultyStore** faulty, ModelOptions options,
                                        std::unique_ptr<kernels::Backend> backend = nullptr) const {
    options.decorate_store = [&](std::unique_ptr<storage::BlockStore> store) {
      auto made = std::make_unique<storage::FaultyStore>(
          std::move(store), static_cast<uint32_t>(seed_ + stores_made_++));
      *faulty = made.get();
      return made;
    };
    return Load(options, model_dir_, std::move(backend));
  }

  // An engine that has been given all requests, and no step yet.
  struct Started {
    FakeClock clock;
    std::vector<Client> clients;
    std::unique_ptr<Engine> engine;
  };
  std::unique_ptr<Started> Start(LoadedModel& model, bool prefix_cache,
                                 int32_t max_running = kRunning) {
    auto started = std::make_unique<Started>();
    EngineOptions options;
    options.max_running = max_running;
    options.step_tokens = step_tokens_;
    options.prefix_cache = prefix_cache;
    options.eager_share = eager_share_;
    options.flush_time = options.slow_wait = kPatience;
    options.kv_events = kv_events_;
    options.chain_next = chain_next_;
    started->engine = MakeEngine(options, *model.decoder, started->clock);
    started->clients = std::vector<Client>(requests_.size());
    for (size_t i = 0; i < requests_.size(); ++i) {
      const absl::Status status = started->engine->Submit(requests_[i], started->clients[i].output);
      EXPECT_TRUE(status.ok()) << status;
    }
    return started;
  }
  // The same, and the store has begun to take KV.
  std::unique_ptr<Started> StartUntilBusy(LoadedModel& model, const storage::BlockStore& store) {
    auto started = Start(model, /*prefix_cache=*/true);
    for (int i = 0; i < 100 && store.in_flight() == 0; ++i) started->engine->Step();
    EXPECT_GT(store.in_flight(), 0u);
    return started;
  }

  std::vector<Reply> Answers(LoadedModel& model, bool prefix_cache = false) {
    const auto started = Start(model, prefix_cache);
    const std::vector<Reply> replies = Finish(*started);
    const EngineStats stats = started->engine->stats();
    losses_ = stats.kv_losses;
    cached_tokens_ = stats.cached_tokens;
    answered_on_device_ = IsDevice(*model.backend);
    return replies;
  }

  // Room for all KV in memory, one after the other: what every other way must give. A device has sums of its own: it adds a
  // query's anchors and chosen rows in one list, and a CPU in two.
  const std::vector<Reply>& Expected(bool on_device = false) {
    std::vector<Reply>& expected = expected_[on_device];
    if (!expected.empty()) return expected;
    ModelOptions options = PlainOptions();
    options.kv_dtype = kv_dtype_;
    options.kv_bytes = LayerBlockBytes() * config_.num_layers() * 8 * (kContext / kBlockTokens);
    std::unique_ptr<kernels::Backend> backend;
    if (on_device) {
      options.device = "cuda";
      options.num_threads = 0;
      backend =
          std::make_unique<PretendedDeviceOfItsOwn>(kernels::MakeCpuBackend("auto", kThreads));
    }
    const auto model = Load(options, model_dir_, std::move(backend));
    EXPECT_EQ(IsDevice(*model->backend), on_device);
    expected = Finish(*Start(*model, /*prefix_cache=*/false));
    return expected;
  }

  // Else a test of tiers shows nothing.
  static void ExpectAllWaysTaken(const LoadedModel& model, bool row_cache, bool prefetch) {
    const KvMemoryStats& stats = model.decoder->kv_memory()->stats();
    EXPECT_GT(stats.evicted_frames, 0u);
    EXPECT_GT(stats.loaded_pieces, 0u);
    const RowFetcherStats& rows = model.decoder->row_fetcher().stats();
    EXPECT_GT(rows.store_rows, 0u);
    EXPECT_EQ(rows.cache_rows > 0, row_cache);
    EXPECT_EQ(rows.asked_rows > 0, prefetch);
    EXPECT_EQ(rows.asked_hits > 0, prefetch);
  }

  // Of a disk in order. A busy machine's may take longer than reads wait for.
  void ExpectNoLosses(const LoadedModel& model) {
    const auto late = static_cast<size_t>(storage::Reason::kLate);
    if (model.store.store->stats().misses[late] == 0) {
      EXPECT_EQ(losses_, 0u);
    }
  }

  // What Answers() gave last.
  void ExpectEqual(const std::vector<Reply>& replies) {
    const std::vector<Reply>& expected = Expected(answered_on_device_);
    for (size_t i = 0; i < replies.size(); ++i) {
      SCOPED_TRACE(ToString(requests_[i].policy) + ", prompt " +
                   std::to_string(requests_[i].prompt.size()) + ", seed " + std::to_string(seed_));
      EXPECT_EQ(replies[i].last.finish, expected[i].last.finish) << replies[i].last.error;
      EXPECT_EQ(replies[i].tokens, expected[i].tokens);
    }
  }

  const uint64_t seed_;
  mutable uint64_t stores_made_ = 0;
  std::mt19937_64 random_;
  ModelConfig config_;
  std::vector<Request> requests_;
  std::map<bool, std::vector<Reply>> expected_;  // of a device or not
  bool answered_on_device_ = false;
  uint64_t losses_ = 0, cached_tokens_ = 0;
  double eager_share_ = 0;  // of EngineOptions
  int32_t step_tokens_ = kStepTokens;
  std::string model_dir_ = kNeedle;
  std::string index_;  // of the model's policies; empty: those of Options()
  std::string kv_dtype_ = "bf16";
  KvEventLog* kv_events_ = nullptr;       // of EngineOptions
  ChainFunction chain_next_ = ChainNext;  // the same
  TempDir directory_;

 private:
  static bool IsDevice(const kernels::Backend& backend) { return backend.AvailableBytes() >= 0; }
  static std::vector<Reply> Finish(Started& started) {
    StepUntilIdle(*started.engine);
    EXPECT_EQ(started.engine->stats().blocks_used, 0);
    std::vector<Reply> replies;
    for (Client& client : started.clients) replies.push_back(client.Read());
    return replies;
  }
};

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

// Flips a bit of every second page of every segment.
inline int DamageAllOver(const std::string& directory) {
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

}  // namespace winnow::engine::kv_tiers

#endif  // WINNOW_TESTS_UNIT_ENGINE_KV_TIERS_TESTING_H_
