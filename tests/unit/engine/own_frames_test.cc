// KV whose every piece has its own place, with a store beside (ResidencyKind::kMirrored): prefixes that come
// back from it whole or by pages, on a device that keeps what it has read.
#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/kv_planning.h"
#include "engine/model_loader.h"
#include "gtest/gtest.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/kv_tiers_testing.h"
#include "tests/unit/engine/pretended_device.h"

namespace winnow::engine {
namespace {

using kv_tiers::DamageAllOver;
using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::kFewer;
using kv_tiers::kNeedle;
using kv_tiers::Load;
using kv_tiers::Options;

class OwnFramesTest : public kv_tiers::PrefixTest {
 protected:
  // `shared`: KV of all layers but the first two lies in memory that host and device share.
  ModelOptions OnDevice(bool shared) const {
    ModelOptions options = Options();
    options.device = "cuda";
    options.kv_dtype = "bf16";
    options.num_threads = 0;
    const int64_t blocks = 8 * (kContext / kBlockTokens);
    if (shared) {
      options.tiers.host_bytes =
          FrameBytes(config_) * (config_.num_layers() - FirstSharedLayer()) * blocks;
    } else {
      options.kv_bytes = FrameBytes(config_) * config_.num_layers() * blocks;
    }
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File(shared ? "shared" : "own");
    return options;
  }
  static std::unique_ptr<kernels::Backend> MakeDevice() {
    return std::make_unique<PretendedDeviceOfItsOwn>(
        kernels::MakeCpuBackend("auto", kv_tiers::kThreads));
  }
  static std::unique_ptr<LoadedModel> LoadOnDevice(const ModelOptions& options,
                                                   bool finds_rows = true) {
    return Load(options, kNeedle,
                finds_rows ? MakeDevice() : kernels::MakeCpuBackend("auto", kv_tiers::kThreads));
  }
};

TEST_F(OwnFramesTest, APrefixOutlivesTheProcessAndGivesTheSameTokens) {
  for (const bool shared : {false, true}) {
    for (const bool finds_rows : {true, false}) {
      if (kFewer > 1 && shared != finds_rows) continue;
      SCOPED_TRACE(::testing::Message() << (shared ? "shared" : "own") << " memory, "
                                        << (finds_rows ? "finds rows" : "wants addresses"));
      ModelOptions options = OnDevice(shared);
      options.tiers.store_dir += finds_rows ? "1" : "2";
      {
        const auto model = LoadOnDevice(options, finds_rows);
        ExpectEqual(Answers(*model, true));
        EXPECT_GT(model->decoder->kv_memory()->stats().saved_pieces, 0u);
        ExpectNoLosses(*model);
      }
      for (const double eager : {0, 1}) {
        eager_share_ = eager;
        const auto model = LoadOnDevice(options, finds_rows);
        const std::vector<Reply> replies = Answers(*model, true);
        ExpectEqual(replies);
        EXPECT_GT(cached_tokens_, 300u / kFewer);
        EXPECT_GT(model->store.store->stats().payload_bytes_read, 0u);
        ExpectNoLosses(*model);
      }
    }
  }
}

// What a question reads of a stored text is its dense layers and the pages of what it chooses.
TEST_F(OwnFramesTest, AQuestionAboutAStoredTextReadsLittleOfIt) {
  requests_.resize(1);
  requests_[0].prompt.resize(kContext - 2 * kBlockTokens);  // all but the suffix is kept
  for (int32_t& token : requests_[0].prompt) {
    token = static_cast<int32_t>(random_() % config_.vocab_size);
  }
  requests_[0].policy = *ParseAttentionPolicy("lsh:k=1,window=9,sink=4,suffix=16");
  requests_[0].stopping.max_tokens = 3;
  ModelOptions options = OnDevice(true);
  options.retrieval.probe_interval = 0;  // a measurement reads all keys
  ExpectEqual(Answers(*LoadOnDevice(options), true));
  uint64_t bytes[2] = {};
  for (const bool eager : {false, true}) {
    eager_share_ = eager ? 1 : 0;
    const auto model = LoadOnDevice(options);
    const std::vector<Reply> replies = Answers(*model, true);
    ExpectEqual(replies);
    EXPECT_GT(cached_tokens_, 560u);
    bytes[eager] = model->store.store->stats().payload_bytes_read;
    if (!eager) {
      EXPECT_GT(replies[0].last.usage.kv_read_bytes_disk, 0u);
    }
  }
  // Two of its layers are dense, and 19 queries choose 19 of some 600 tokens of a head at most.
  EXPECT_LT(bytes[0], bytes[1] * 3 / 4);
  EXPECT_GT(bytes[0], bytes[1] * 2 / (static_cast<uint64_t>(config_.num_layers()) + 1));
}

TEST_F(OwnFramesTest, ADamagedStoreCostsComputationAndNoToken) {
  for (const bool shared : {false, true}) {
    if (kFewer > 1 && !shared) continue;
    SCOPED_TRACE(shared ? "shared memory" : "own memory");
    const ModelOptions options = OnDevice(shared);
    storage::FaultyStore* faulty = nullptr;
    std::set<std::array<uint8_t, 40>>
        of_layers;  // KV of a layer on the device, and of one that may not be
    {
      const auto model = LoadOver(&faulty, options, MakeDevice());
      ExpectEqual(Answers(*model, true));
      for (const auto& key : faulty->put) {
        if (key[32] == 0 && (key[36] == 1 || key[36] == 3) && key[0] % 4 == 0)
          of_layers.insert(key);
      }
      ASSERT_FALSE(of_layers.empty());
    }
    {
      const auto model = LoadOver(&faulty, options, MakeDevice());
      faulty->unreadable = of_layers;
      faulty->faults = {.miss_share = 0.003, .polls_max = 2, .reorder = true};
      ExpectEqual(Answers(*model, true));
      EXPECT_GT(model->decoder->kv_memory()->stats().lost_pieces, 0u);
    }
    EXPECT_GT(DamageAllOver(options.tiers.store_dir), 100);
    ExpectEqual(Answers(*LoadOnDevice(options), true));
    EXPECT_GT(losses_, 0u);
    // What was lost has been written anew.
    const auto model = LoadOnDevice(options);
    ExpectEqual(Answers(*model, true));
    EXPECT_GT(cached_tokens_, 300u / kFewer);
  }
}

// A chunk that has lost a block in one call of a layer is in the next one, too: what it would read there
// has not come, and must not be what the device keeps for others.
TEST_F(OwnFramesTest, WhoHasLostABlockLeavesNothingBehindForOthers) {
  constexpr int32_t kSuffix = 7 * kBlockTokens;  // more queries than a call takes
  std::vector<int32_t> text(30 * kBlockTokens);
  for (int32_t& token : text) token = static_cast<int32_t>(random_() % config_.vocab_size);
  const auto about = [&](int32_t id, int32_t blocks) {
    std::vector<int32_t> prompt(text.begin(), text.begin() + blocks * kBlockTokens);
    for (int32_t i = 0; i < kSuffix; ++i) {
      prompt.push_back(static_cast<int32_t>(random_() % config_.vocab_size));
    }
    Request request = MakeRequest(id, std::move(prompt), 8);
    request.policy = *ParseAttentionPolicy("lsh:k=1,sink=2,window=8,suffix=112");
    return request;
  };
  const Request half = about(1, 20), whole = about(2, 30);
  ModelOptions options = OnDevice(true);
  options.retrieval.probe_interval = 0;
  requests_ = {whole, half};
  Expected(/*on_device=*/true);
  options.max_batch_tokens = step_tokens_ = 2 * kSuffix;
  storage::FaultyStore* faulty = nullptr;
  std::set<std::array<uint8_t, 40>> of_the_rest;  // KV of layer 3, of blocks that `half` has not
  {
    const auto model = LoadOver(&faulty, options, MakeDevice());
    requests_ = {half};
    Answers(*model, true);
    const auto of_half = faulty->put;
    requests_ = {whole};
    Answers(*model, true);
    for (const auto& key : faulty->put) {
      if (key[32] == 0 && key[36] == 3 && !of_half.contains(key)) of_the_rest.insert(key);
    }
    ASSERT_EQ(of_the_rest.size(), 10u);
  }
  requests_ = {whole, half};
  const auto model = LoadOver(&faulty, options, MakeDevice());
  faulty->unreadable = of_the_rest;
  FakeClock clock;
  EngineOptions engine_options;
  engine_options.max_running = kv_tiers::kRunning;
  engine_options.step_tokens = step_tokens_;
  engine_options.eager_share = 0;
  const auto engine = MakeEngine(engine_options, *model->decoder, clock);
  Client of_whole, of_half;
  ASSERT_TRUE(engine->Submit(whole, of_whole.output).ok());
  for (int i = 0; engine->stats().kv_losses == 0; ++i) {
    ASSERT_LT(i, 100);
    engine->Step();
  }
  ASSERT_TRUE(engine->Submit(half, of_half.output).ok());
  StepUntilIdle(*engine);
  EXPECT_GT(engine->stats().cached_tokens, 300u);
  ExpectEqual({of_whole.Read(), of_half.Read()});
}

// Another thread may close the store then: nothing may be under way in it, also when the device has failed
// and what it holds is not saved any more.
TEST_F(OwnFramesTest, AfterADeviceHasFailedTheStoreIsLeftIdle) {
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, OnDevice(true), MakeDevice());
  faulty->faults = {.polls_max = 30};
  const auto started = StartUntilBusy(*model, *faulty);
  dynamic_cast<PretendedDevice&>(*model->backend).fail_after_waits = 0;
  model->decoder->kv_memory()->Flush(std::chrono::seconds(60));
  EXPECT_EQ(faulty->in_flight(), 0u);
  EXPECT_TRUE(faulty->idle());
}

// A disk that takes nothing: requests go on, and nothing is kept.
TEST_F(OwnFramesTest, ADiskThatTakesNothingChangesNoToken) {
  storage::FaultyStore* faulty = nullptr;
  const ModelOptions options = OnDevice(true);
  {
    const auto model = LoadOver(&faulty, options, MakeDevice());
    for (const storage::TierState state :
         {storage::TierState::kDegraded, storage::TierState::kOff}) {
      faulty->faults.state = state;
      ExpectEqual(Answers(*model, true));
    }
    EXPECT_EQ(model->decoder->kv_memory()->stats().saved_pieces, 0u);
  }
  Answers(*LoadOnDevice(options), false);
  EXPECT_EQ(cached_tokens_, 0u);
}

}  // namespace
}  // namespace winnow::engine
