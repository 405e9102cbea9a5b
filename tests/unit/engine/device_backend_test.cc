// What the engine owes a backend with memory of its own, shown with one that only pretends: what it
// writes for the host to read is there after Synchronize and not before, it finds chosen rows itself,
// and it can fail at any moment.
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv_planning.h"
#include "engine/model_loader.h"
#include "engine/model_retrieval.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/pretended_device.h"
#include "tests/unit/engine/sequence_runner.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using kernels::KvLayout;

const std::string kNeedle = SourcePath("models/needle-5m");

class DeviceBackendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto config = LoadModelConfig(kNeedle);
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *std::move(config);
    auto weights = LoadWeights(kNeedle, config_);
    ASSERT_TRUE(weights.ok()) << weights.status();
    weights_ = *std::move(weights);
    cpu_ = kernels::MakeCpuBackend("auto", 1);
    const uint64_t seed = testing::TestSeed();
    RecordProperty("WINNOW_TEST_SEED", std::to_string(seed));
    std::mt19937_64 random(seed);
    tokens_.resize(kTokens);
    for (int32_t& token : tokens_) token = static_cast<int32_t>(random() % config_.vocab_size);
  }
  // `shared_blocks`: of KV in shared memory; 0: all on the device.
  absl::StatusOr<std::unique_ptr<Decoder>> TryDecoder(kernels::Backend& backend,
                                                      int32_t shared_blocks) {
    ModelOptions flags;
    flags.max_context = kTokens;
    flags.retrieval.probe_interval = probe_interval_;
    flags.retrieval.index = "auto";
    auto options = ResolveDecoderOptions(config_, flags);
    EXPECT_TRUE(options.ok()) << options.status();
    auto retrieval = ResolveRetrieval(kNeedle, config_, weights_, flags.retrieval);
    EXPECT_TRUE(retrieval.ok()) << retrieval.status();
    options->retrieval = *std::move(retrieval);
    if (shared_blocks != 0) {
      const auto block_bytes = static_cast<int64_t>(
          KvLayout{config_.num_kv_heads, config_.head_dim, options->block_tokens, options->kv_dtype}
              .BlockBytes());
      const int32_t layers = config_.num_layers() - FirstSharedLayer();
      options->shared_kv_bytes = std::max<int64_t>(shared_blocks * layers * block_bytes, 1);
      options->kv_bytes = shared_blocks * FirstSharedLayer() * block_bytes;
    }
    return Decoder::Create(config_, weights_, backend, *options);
  }
  std::unique_ptr<Decoder> MakeDecoder(kernels::Backend& backend, int32_t shared_blocks = 0) {
    auto decoder = TryDecoder(backend, shared_blocks);
    EXPECT_TRUE(decoder.ok()) << decoder.status();
    return *std::move(decoder);
  }
  struct Answer {
    absl::Status status;
    std::vector<float> logits;
    RetrievalCounts counts;
    TierBytes bytes;  // of the last pass
  };
  // A prompt in two chunks, the second of which retrieves, and some tokens one by one.
  Answer Run(Decoder& decoder, const AttentionPolicy& policy) {
    Answer answer;
    auto state = decoder.NewRetrievalState(policy);
    EXPECT_TRUE(state.ok()) << state.status();
    std::vector<int32_t> blocks(kTokens / decoder.block_tokens());
    std::iota(blocks.begin(), blocks.end(), 0);
    std::vector<float> logits(decoder.vocab_size());
    for (int32_t at = 0; at < kTokens && answer.status.ok();) {
      const int32_t count = at == 0 ? 280 : at == 280 ? 30 : 1;
      const Batch batch{{{std::span(tokens_).subspan(at, count), at, blocks, at == 0 ? 0 : 1,
                          state->get(), 280}}};
      answer.status = decoder.Forward(batch, logits);
      if (at > 0) answer.logits.insert(answer.logits.end(), logits.begin(), logits.end());
      at += count;
    }
    answer.counts = (*state)->TakeCounts();
    answer.bytes = decoder.kv_memory()->chunk_bytes(0);
    return answer;
  }
  static AttentionPolicy Parse(const std::string& text) {
    auto policy = ParseAttentionPolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return *policy;
  }

  static constexpr int32_t kTokens = 320;
  ModelConfig config_;
  Weights weights_;
  std::unique_ptr<kernels::Backend> cpu_;
  std::vector<int32_t> tokens_;
  int32_t probe_interval_ = 7;
};

TEST_F(DeviceBackendTest, AnswersAndCountsAreThoseOfTheCpu) {
  PretendedDevice device(*cpu_);
  const auto on_cpu = MakeDecoder(*cpu_), on_device = MakeDecoder(device);
  for (const char* text :
       {"dense", "window:window=32,from=0", "oracle:k=20,window=32,from=0",
        "quest:k=32,window=32,from=0", "lsh:k=20,window=32,from=0",
        "hata:k=9,p=0.7,window=32,from=0", "spotlight:k=20,window=32,completion=on,from=0",
        "hashattention:k=20,window=32,from=0,floor=0.9"}) {
    SCOPED_TRACE(text);
    const Answer expected = Run(*on_cpu, Parse(text)), actual = Run(*on_device, Parse(text));
    ASSERT_TRUE(expected.status.ok() && actual.status.ok());
    ASSERT_EQ(actual.logits.size(), expected.logits.size());
    EXPECT_EQ(std::memcmp(actual.logits.data(), expected.logits.data(),
                          expected.logits.size() * sizeof(float)),
              0);
    EXPECT_EQ(actual.counts.rows_read, expected.counts.rows_read);
    EXPECT_EQ(actual.counts.rows_dense, expected.counts.rows_dense);
    EXPECT_EQ(actual.counts.candidate_rows, expected.counts.candidate_rows);
    EXPECT_EQ(actual.counts.selected_rows, expected.counts.selected_rows);
    EXPECT_EQ(actual.counts.probes, expected.counts.probes);
    EXPECT_EQ(actual.counts.coverage, expected.counts.coverage);
    EXPECT_EQ(actual.counts.tail_estimates, expected.counts.tail_estimates);
    EXPECT_EQ(actual.counts.tail_mass, expected.counts.tail_mass);
  }
  EXPECT_GT(device.passes, 0);
}

// A measurement asked the driver for its free memory in every product, and the host of a small model's steps was slower
// than a server's.
TEST_F(DeviceBackendTest, MeasuringAsksADeviceForNoMoreThanAServerDoes) {
  class Asked final : public PretendedDevice {
   public:
    using PretendedDevice::PretendedDevice;
    int64_t AvailableBytes() const override {
      ++asked;
      return PretendedDevice::AvailableBytes();
    }
    mutable int asked = 0;
  } device(*cpu_);
  TimedBackend timed(device, kernels::DType::kF32);
  const auto decoder = MakeDecoder(timed);
  timed.set_waits(false);
  timed.Reset();
  device.asked = 0;
  ASSERT_TRUE(Run(*decoder, Parse("lsh:k=20,window=32,from=0")).status.ok());
  EXPECT_EQ(device.asked, 0);
  EXPECT_GT(timed.matmul().bytes, 0);
  EXPECT_EQ(timed.matmul().seconds, 0) << "nothing is timed that is not waited for";
  timed.set_waits(true);
  ASSERT_TRUE(Run(*decoder, Parse("dense")).status.ok());
  EXPECT_GT(timed.matmul().seconds, 0);
}

TEST_F(DeviceBackendTest, TokensAreThoseOfTheLogitsOnAnyDevice) {
  PretendedDevice device(*cpu_);
  const auto on_cpu = MakeDecoder(*cpu_), on_device = MakeDecoder(device);
  // Two sequences that end in the batch and one that does not, in blocks of their own.
  std::vector<int32_t> blocks(on_cpu->num_blocks());
  std::iota(blocks.begin(), blocks.end(), 0);
  Batch batch;
  for (int32_t i = 0; i < 3; ++i) {
    batch.chunks.push_back({.tokens = std::span(tokens_).subspan(10 * i, 20),
                            .block_table = std::span(blocks).subspan(2 * i, 2),
                            .num_logits = i == 1 ? 0 : 1});
  }
  std::vector<float> logits(2 * on_cpu->vocab_size());
  ASSERT_TRUE(on_cpu->Forward(batch, logits).ok());
  std::vector<kernels::SampleRow> rows(2);
  rows[0].top_logprobs = 3;
  rows[1].temperature = 1;
  rows[1].noise = 6;
  rows[1].top_logprobs = 0;
  std::vector<kernels::SampledToken> of_cpu(2), of_device(2);
  ASSERT_TRUE(on_cpu->Sample(batch, rows, of_cpu).ok());
  ASSERT_TRUE(on_device->Sample(batch, rows, of_device).ok());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto width = static_cast<size_t>(on_cpu->vocab_size());
    const kernels::SampledToken expected =
        kernels::SampleRef(std::span(logits).subspan(i * width, width), rows[i]);
    for (const kernels::SampledToken& sampled : {of_cpu[i], of_device[i]}) {
      EXPECT_EQ(sampled.status, kernels::SampleStatus::kOk);
      EXPECT_EQ(sampled.token, expected.token);
      EXPECT_NEAR(sampled.logprob, expected.logprob, 1e-5);
      EXPECT_EQ(sampled.num_top, expected.num_top);
    }
  }
}

// What is chosen, attended to and completed stays on the device: a step of any policy waits as often as a dense
// one, for what its last layer gives, and once more where it counts what was chosen.
TEST_F(DeviceBackendTest, NoPolicyWaitsInALayer) {
  probe_interval_ = 0;  // what is probed is waited for
  PretendedDevice device(*cpu_);
  const auto decoder = MakeDecoder(device);
  ASSERT_TRUE(Run(*decoder, Parse("dense")).status.ok());
  const int of_dense = device.waits;
  for (const char* text :
       {"window:window=32,from=0", "lsh:k=20,window=32,from=0", "hata:k=9,p=0.7,window=32,from=0",
        "lsh:k=20,window=32,completion=on,from=0", "window:window=32,completion=on,from=0",
        "spotlight:k=20,p=0.7,window=32,completion=on,from=0"}) {
    SCOPED_TRACE(text);
    ASSERT_TRUE(Run(*decoder, Parse(text)).status.ok());
    EXPECT_LE(device.waits, of_dense + 1);
  }
}

// KV of the later layers lies in shared memory, of which the device keeps no rows: every row that was
// read there came from the host.
TEST_F(DeviceBackendTest, KvInSharedMemoryGivesTheSameAnswersAndIsCounted) {
  PretendedDevice device(*cpu_);
  const int32_t blocks = kTokens / 64;
  const auto own = MakeDecoder(*cpu_), shared = MakeDecoder(*cpu_, blocks);
  const auto on_device = MakeDecoder(device, blocks);
  EXPECT_EQ(shared->num_blocks(), blocks);
  EXPECT_EQ(shared->kv_pool_bytes(), own->kv_pool_bytes());
  const auto layers = static_cast<size_t>(config_.num_layers());
  EXPECT_EQ(shared->shared_kv_bytes(), own->kv_pool_bytes() / layers * (layers - 2));
  for (const char* text :
       {"dense", "window:window=32,from=0", "oracle:k=20,window=32,from=0",
        "quest:k=32,window=32,from=0", "lsh:k=20,window=32,from=0,dense_layers=0",
        "hata:k=9,p=0.7,window=32,from=0", "spotlight:k=20,window=32,completion=on,from=0",
        "hashattention:k=20,window=32,from=0,floor=0.9"}) {
    SCOPED_TRACE(text);
    const AttentionPolicy policy = Parse(text);
    const Answer expected = Run(*own, policy);
    ASSERT_TRUE(expected.status.ok());
    EXPECT_EQ(expected.bytes.host, 0u);
    for (Decoder* decoder : {shared.get(), on_device.get()}) {
      const Answer actual = Run(*decoder, policy);
      ASSERT_TRUE(actual.status.ok());
      ASSERT_EQ(actual.logits.size(), expected.logits.size());
      EXPECT_EQ(std::memcmp(actual.logits.data(), expected.logits.data(),
                            expected.logits.size() * sizeof(float)),
                0);
      EXPECT_EQ(actual.counts.rows_read, expected.counts.rows_read);
      EXPECT_GT(actual.bytes.host, 0u);
      EXPECT_EQ(actual.bytes.disk, 0u);
    }
    if (policy.IsDense() || policy.floor.has_value()) continue;
    // On the CPU rows have addresses in shared memory: those of the shared layers were all read there.
    const Answer counted = Run(*shared, policy);
    EXPECT_EQ(counted.counts.rows_cached, 0u);
    EXPECT_GT(counted.counts.rows_stored, 0u);
    EXPECT_LT(counted.counts.rows_stored, counted.counts.rows_read);
  }
}

TEST_F(DeviceBackendTest, SharedMemoryThatHoldsNoBlockIsRefused) {
  const absl::Status status = TryDecoder(*cpu_, -1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr("host_bytes is 1: must be at least"));
  config_.layers.resize(2);
  DecoderOptions options{.kv_bytes = 1 << 20, .max_context = kTokens};
  options.shared_kv_bytes = 1 << 20;
  EXPECT_THAT(std::string(Decoder::Create(config_, weights_, *cpu_, options).status().message()),
              ::testing::HasSubstr("host_bytes: KV of the first 2 layers lies on the device"));
}

// What operations need beside their operands is found missing at start, not in a step.
TEST_F(DeviceBackendTest, ADeviceWithNoRoomLeftForOperationsIsRefused) {
  PretendedDevice device(*cpu_);
  device.available = 1;
  EXPECT_TRUE(TryDecoder(device, 0).ok());
  device.available = 0;
  const absl::Status status = TryDecoder(device, 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(::testing::HasSubstr("left for what steps need on cpu"),
                               ::testing::HasSubstr("scratch (step_tokens, max_running) ")));
  // One that has failed has no memory to tell of.
  device.fail_after_waits = 0;
  EXPECT_FALSE(device.Synchronize());
  EXPECT_EQ(TryDecoder(device, 0).status(), absl::UnavailableError("pretended"));
}

TEST_F(DeviceBackendTest, ADeviceThatFailsAnywhereInAPassMakesItUnavailable) {
  for (const char* text :
       {"dense", "lsh:k=20,window=32,from=0", "spotlight:k=20,window=32,completion=on,from=0"}) {
    for (const int waits : {0, 1, 2, 3, 5, 9}) {
      SCOPED_TRACE(::testing::Message() << text << ", fails after " << waits << " waits of a pass");
      PretendedDevice device(*cpu_);
      const auto decoder = MakeDecoder(device);
      device.fail_after_waits = waits;
      const absl::Status status = Run(*decoder, Parse(text)).status;
      // A pass may wait less often than that.
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_EQ(status.message(), "pretended");
    }
  }
  PretendedDevice device(*cpu_);
  const auto decoder = MakeDecoder(device);
  device.fail_after_waits = 0;
  EXPECT_EQ(Run(*decoder, Parse("dense")).status.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace winnow::engine
