// KvMemory over a store, without a model: blocks are begun, filled, sealed and forgotten.
#include "engine/kv/kv_memory.h"

#include <memory>
#include <utility>
#include <vector>

#include "engine/kv/block_pool.h"
#include "gtest/gtest.h"
#include "storage/clock.h"
#include "storage/host_store.h"
#include "tests/fault/faulty_store.h"

namespace winnow::engine {
namespace {

constexpr int32_t kLayers = 2, kBlocks = 8;

storage::HostStoreOptions StoreOptions() {
  storage::HostStoreOptions options;
  options.capacity_bytes = options.chunk_bytes = 1 << 20;
  return options;
}

class KvMemoryTest : public ::testing::Test {
 protected:
  KvMemoryTest()
      : backend_(kernels::MakeCpuBackend("auto", 1)),
        store_(std::make_unique<storage::HostStore>(StoreOptions(), &clock_), /*seed=*/1) {
    memory_ = MakeMemory(/*shared_frames=*/kLayers * kBlocks);
  }

  std::unique_ptr<KvMemory> MakeMemory(int32_t shared_frames) {
    const kernels::KvLayout layout{
        .kv_heads = 1, .head_dim = 64, .block_tokens = 16, .dtype = kernels::DType::kBF16};
    auto memory = KvMemory::Create(
        *backend_,
        PlanPools(ResidencyKind::kPaged, layout, std::vector(kLayers, KvPlacement::kFastFrames),
                  kBlocks, shared_frames),
        {.store = &store_});
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }

  // A block that a pass filled, under a name of its own or the given one.
  int32_t MakeBlock(BlockPool& pool, int name_number = 0, bool keep = false) {
    const int32_t block = pool.Take();
    std::vector<int32_t> frames;
    memory_->BeginPass(1);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      PinnedBlocks pinned;
      EXPECT_TRUE(memory_->Pin(0, layer, {&block, 1}, 0, 1, &frames, &pinned, [] {}));
    }
    memory_->EndPass();
    if (name_number == 0) name_number = ++names_;
    BlockName name;
    name.chain[0] = static_cast<uint8_t>(name_number);
    name.chain[1] = static_cast<uint8_t>(name_number >> 8);
    memory_->Seal(block, name, keep);
    return block;
  }
  storage::BlockId IdOf(int32_t layer, int32_t block) const {
    return memory_->store().IdOf(memory_->blocks()[block].name, layer);
  }
  // Makes frames scarce, so that what was made before is saved.
  std::vector<int32_t> FillUp(BlockPool& pool) {
    std::vector<int32_t> held;
    while (pool.num_free() > 0) held.push_back(MakeBlock(pool));
    for (int i = 0; i < 10; ++i) memory_->Idle();
    return held;
  }

  storage::SystemClock clock_;
  std::unique_ptr<kernels::Backend> backend_;
  storage::FaultyStore store_;
  std::unique_ptr<KvMemory> memory_;
  int names_ = 0;
};

// Where frames never get scarce nothing is saved that is not to be kept, however long a server runs.
TEST_F(KvMemoryTest, TheQueueOfWhatIsToBeSavedDoesNotGrowWithBlocksThatAreGone) {
  BlockPool pool(kBlocks, memory_.get());
  const int32_t stays = MakeBlock(pool);
  for (int i = 0; i < 1000; ++i) {
    pool.Give(MakeBlock(pool));
    ASSERT_LE(memory_->residency().num_queued(), size_t{3} * kLayers * kBlocks);
  }
  EXPECT_EQ(memory_->stats().saved_pieces, 0u);
  // What is there still is in line.
  std::vector<int32_t> held;
  while (pool.num_free() > 0) held.push_back(MakeBlock(pool));
  for (int i = 0; i < 10; ++i) memory_->Idle();
  EXPECT_GT(memory_->stats().saved_pieces, 0u);
  for (const int32_t block : held) pool.Give(block);
  pool.Give(stays);
}

// Two sequences made the same block. One ends while the store is at both: what is stored then is the
// other's.
TEST_F(KvMemoryTest, ABlockThatEndsWhileItIsSavedLeavesWhatAnotherOfItsNameHasInTheStore) {
  BlockPool pool(kBlocks, memory_.get());
  constexpr int kName = 1000;
  store_.faults.hold = true;
  const int32_t ends = MakeBlock(pool, kName), stays = MakeBlock(pool, kName);
  std::vector<int32_t> held;  // so that frames are scarce
  while (pool.num_free() > 0) held.push_back(MakeBlock(pool));
  ASSERT_GE(store_.in_flight(), size_t{2} * kLayers);
  pool.Give(ends);
  store_.faults.hold = false;
  while (store_.in_flight() > 0) memory_->Idle();
  EXPECT_GT(memory_->stats().saved_pieces, 0u);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(store_.Find(IdOf(layer, stays)).has_value()) << layer;
  }
  for (const int32_t block : held) pool.Give(block);
  pool.Give(stays);
  while (store_.in_flight() > 0) memory_->Idle();
  EXPECT_EQ(store_.stats().blocks, 0u);
}

// A store evicts KV that nobody runs on, and tells nobody. A name whose KV has gone finds nothing.
TEST_F(KvMemoryTest, ABlockThatTheStoreHasEvictedIsNotFound) {
  memory_ = MakeMemory(/*shared_frames=*/2 * kLayers);
  BlockPool pool(kBlocks, memory_.get());
  const auto name_of = [&](int32_t block) { return memory_->blocks()[block].name.chain; };
  const int32_t stored = MakeBlock(pool, 0, true), evicted = MakeBlock(pool, 0, true);
  std::vector<int32_t> held = FillUp(pool);  // in their frames
  const int32_t resident = held.back();
  held.pop_back();
  for (const int32_t block : {stored, evicted, resident}) {
    ASSERT_TRUE(pool.Publish(block, name_of(block)));
    ASSERT_EQ(memory_->residency().IsResident(1, block), block == resident);
    pool.Give(block);
    ASSERT_EQ(pool.FindWhole(name_of(block)), block);
  }
  const Digest gone = name_of(evicted);
  constexpr uint64_t kTag = 1 << 20;  // none of the client's
  for (const int32_t block : {evicted, resident}) store_.Erase(kTag, IdOf(1, block).key);
  memory_->Idle();
  EXPECT_EQ(pool.FindWhole(name_of(stored)), stored);
  EXPECT_EQ(pool.FindWhole(name_of(resident)), resident);
  pool.Share(evicted);
  EXPECT_EQ(pool.FindWhole(gone), evicted) << "a sequence runs on it";
  pool.Give(evicted);
  const int32_t free = pool.num_free(), idle = pool.num_idle();
  EXPECT_EQ(pool.FindWhole(gone), std::nullopt);
  EXPECT_EQ(pool.Find(gone), std::nullopt);
  EXPECT_EQ(pool.num_free(), free);
  EXPECT_EQ(pool.num_idle(), idle - 1);
  for (const int32_t block : held) pool.Give(block);
}

// What the store is told: who runs on a block, and whether it is for later processes.
TEST_F(KvMemoryTest, ABlockIsInUseAsLongAsOneOfItsNameIsHeld) {
  BlockPool pool(kBlocks, memory_.get());
  constexpr int kName = 1000, kOther = 1001;
  const int32_t one = MakeBlock(pool, kName, /*keep=*/true), two = MakeBlock(pool, kName, true);
  const int32_t other = MakeBlock(pool, kOther, /*keep=*/false);
  pool.Publish(one, memory_->blocks()[one].name.chain);
  const std::vector<int32_t> held = FillUp(pool);
  const auto expect = [&](int32_t block, bool in_use, bool transient) {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const auto info = store_.Find(IdOf(layer, block));
      ASSERT_TRUE(info.has_value()) << layer;
      EXPECT_EQ(info->in_use, in_use) << layer;
      EXPECT_EQ(info->transient, transient) << layer;
    }
  };
  expect(one, true, false);
  expect(other, true, true);
  pool.Give(one);  // idle; the other of its name is held
  expect(one, true, false);
  const storage::BlockId id = IdOf(0, two);
  pool.Give(two);
  expect(one, false, false);
  pool.Share(one);
  expect(one, true, false);
  pool.Share(one);
  pool.Give(one);
  expect(one, true, false);
  pool.Give(one);
  expect(one, false, false);
  // Forgotten, and taken back out of the store.
  for (const int32_t block : held) pool.Give(block);
  pool.Give(other);
  std::vector<int32_t> taken;
  while (pool.num_free() > 0) taken.push_back(pool.Take());
  EXPECT_FALSE(store_.Find(id)->in_use);
  pool.Give(taken.back());
  taken.pop_back();
  const int32_t adopted = pool.Take();
  BlockName name;
  name.chain[0] = static_cast<uint8_t>(kName);
  name.chain[1] = static_cast<uint8_t>(kName >> 8);
  memory_->Adopt(adopted, name);
  expect(adopted, true, false);
  pool.Give(adopted);  // nobody can find it: it is forgotten, and stays in the store
  ASSERT_TRUE(store_.Find(id).has_value());
  EXPECT_FALSE(store_.Find(id)->in_use);
  for (const int32_t block : taken) pool.Give(block);
}

// The last sequence goes while the store is still at it.
TEST_F(KvMemoryTest, ABlockThatNobodyHoldsWhenItIsSavedIsNotInUse) {
  BlockPool pool(kBlocks, memory_.get());
  store_.faults.hold = true;
  const int32_t block = MakeBlock(pool, 1000, /*keep=*/true);
  pool.Publish(block, memory_->blocks()[block].name.chain);
  const std::vector<int32_t> held = FillUp(pool);
  ASSERT_GT(store_.in_flight(), 0u);
  pool.Give(block);
  store_.faults.hold = false;
  while (store_.in_flight() > 0) memory_->Idle();
  const auto info = store_.Find(IdOf(0, block));
  ASSERT_TRUE(info.has_value());
  EXPECT_FALSE(info->in_use);
  for (const int32_t other : held) pool.Give(other);
}

}  // namespace
}  // namespace winnow::engine
