// An engine that keeps prefixes, in memory or on disk, and steps only when it is told to.
#ifndef WINNOW_TESTS_UNIT_ENGINE_PREFIX_ENGINE_TESTING_H_
#define WINNOW_TESTS_UNIT_ENGINE_PREFIX_ENGINE_TESTING_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "engine/kv/kv_memory.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine::kv_tiers {

class PrefixEngineTest : public KvTiersTest {
 protected:
  // Options of a model whose KV is in memory: so many blocks.
  ModelOptions InMemory(int64_t blocks) const {
    ModelOptions options = Options();
    options.kv_dtype = "bf16";
    options.retrieval.index = "lsh";
    options.kv_bytes = FrameBytes(config_) * config_.num_layers() * blocks;
    return options;
  }
  // The same with two contexts in memory, and a store on disk.
  ModelOptions OnDisk() const {
    ModelOptions options = InMemory(2 * (kContext / kBlockTokens));
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File("store");
    options.tiers.io = "threads";
    return options;
  }

  // Makes `engine_`, which ends when the returned object goes: that must be before the model does.
  [[nodiscard]] auto Run(LoadedModel& model) {
    EngineOptions options;
    options.max_running = kRunning;
    options.step_tokens = kStepTokens;
    options.kv_events = kv_events_;
    options.flush_time = options.slow_wait = kPatience;
    engine_ = MakeEngine(options, *model.decoder, clock_);
    memory_ = model.decoder->kv_memory();
    store_ = model.store.store.get();
    return absl::MakeCleanup([this] { engine_.reset(); });
  }

  // Steps until the request is answered.
  Reply Send(Request request) {
    Client client;
    EXPECT_TRUE(engine_->Submit(std::move(request), client.output).ok());
    StepUntilIdle(*engine_);
    return client.Read();
  }

  FakeClock clock_;
  std::unique_ptr<Engine> engine_;
  KvMemory* memory_ = nullptr;
  const storage::BlockStore* store_ = nullptr;
  RequestId id_ = 0;
};

}  // namespace winnow::engine::kv_tiers

#endif  // WINNOW_TESTS_UNIT_ENGINE_PREFIX_ENGINE_TESTING_H_
