// The three kinds of residency, by random lives of blocks: whatever moves where, a block that is pinned holds
// what was written to it. Layers of several placements alternate in some of them.
#include "engine/kv/residency.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/kv/block_pool.h"
#include "engine/kv/kv_memory.h"
#include "gtest/gtest.h"
#include "storage/clock.h"
#include "storage/host_store.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

constexpr int32_t kLayers = 3, kBlocks = 12, kPagedFrames = 14;
constexpr kernels::KvLayout kLayout = {
    .kv_heads = 3, .head_dim = 64, .block_tokens = 16, .dtype = kernels::DType::kBF16};  // 3 pages

BlockName NameOf(int content) {
  BlockName name;
  std::memcpy(name.chain.data(), &content, sizeof content);
  return name;
}

std::byte ByteOf(int content, int32_t layer, size_t offset) {
  return static_cast<std::byte>((offset / 64 * 31 + offset) ^ (content * 7 + layer * 101));
}

struct ResidencyCase {
  const char* name = "";
  ResidencyKind kind = ResidencyKind::kInPlace;
  std::vector<KvPlacement> placements = {};  // [kLayers]
};

constexpr KvPlacement kFast = KvPlacement::kFast, kHost = KvPlacement::kHost,
                      kFrames = KvPlacement::kFastFrames, kHostFrames = KvPlacement::kHostFrames;

class ResidencyTest : public ::testing::TestWithParam<ResidencyCase> {
 protected:
  struct Held {
    int32_t block = 0;
    int content = 0;
  };

  ResidencyTest() : random_(testing::TestSeed()), backend_(kernels::MakeCpuBackend("auto", 1)) {
    storage::HostStoreOptions options;
    options.capacity_bytes = options.chunk_bytes = 64 << 20;
    store_ = std::make_unique<storage::FaultyStore>(
        std::make_unique<storage::HostStore>(options, &clock_), static_cast<uint32_t>(random_()));
    auto memory =
        KvMemory::Create(*backend_, Plan(), {.store = HasStore() ? store_.get() : nullptr});
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    pool_ = std::make_unique<BlockPool>(kBlocks, memory_.get());
  }
  ~ResidencyTest() override {
    for (const Held& held : held_) pool_->Give(held.block);
  }
  static KvPlan Plan() {
    KvPlan plan = PlanPools(GetParam().kind, kLayout, GetParam().placements, kBlocks,
                            GetParam().kind == ResidencyKind::kPaged ? kPagedFrames : 0);
    plan.shared.max_context = kBlocks * kLayout.block_tokens;
    plan.shared.max_batch_tokens = 1;
    return plan;
  }
  static bool HasStore() { return GetParam().kind != ResidencyKind::kInPlace; }

  bool Pin(int32_t layer, std::span<const int32_t> blocks, PinnedBlocks* pinned) {
    return memory_->Pin(0, layer, blocks, 0, static_cast<int32_t>(blocks.size()), &frames_, pinned,
                        [] {});
  }
  void Write() {
    if (pool_->num_free() == 0) return;
    const Held made{pool_->Take(), next_content_++};
    memory_->BeginPass(1);
    bool good = true;
    for (int32_t layer = 0; layer < kLayers && good; ++layer) {
      PinnedBlocks pinned;
      memory_->Unpin();
      good = Pin(layer, {&made.block, 1}, &pinned);
      if (!good) break;
      std::byte* const place = pinned.pool + pinned.table[0] * kLayout.BlockBytes();
      for (size_t i = 0; i < kLayout.BlockBytes(); ++i) place[i] = ByteOf(made.content, layer, i);
    }
    memory_->EndPass();
    if (!good) {
      ++lost_;
      pool_->Give(made.block);
      return;
    }
    const bool keep = random_() % 2 == 0;
    memory_->Seal(made.block, NameOf(made.content), keep);
    if (keep) kept_.push_back(made.content);
    if (random_() % 4 != 0) pool_->Publish(made.block, NameOf(made.content).chain);
    held_.push_back(made);
  }
  void Read() {
    if (held_.empty()) return;
    std::vector<Held> some;
    std::sample(held_.begin(), held_.end(), std::back_inserter(some), 1 + random_() % 4, random_);
    std::vector<int32_t> blocks;
    for (const Held& held : some) blocks.push_back(held.block);
    const auto layer = static_cast<int32_t>(random_() % kLayers);
    memory_->BeginPass(1);
    if (GetParam().kind == ResidencyKind::kMirrored && random_() % 2 == 0) ReadEntries(layer, some);
    PinnedBlocks pinned;
    if (Pin(layer, blocks, &pinned)) {
      for (size_t i = 0; i < some.size(); ++i) {
        ExpectContent(pinned.pool + pinned.table[i] * kLayout.BlockBytes(), some[i].content, layer,
                      0, kLayout.BlockBytes());
        EXPECT_TRUE(memory_->residency().IsResident(layer, blocks[i]));
      }
      ++reads_;
    } else {
      ++lost_;
      for (const Held& held : some) Drop(held);
    }
    memory_->EndPass();
  }
  void ReadEntries(int32_t layer, const std::vector<Held>& some) {
    std::vector<size_t> offsets;
    for (const Held& held : some) {
      offsets.push_back(random_() % (kLayout.BlockBytes() / kLayout.RowBytes()) *
                        kLayout.RowBytes());
      memory_->residency().Want(0, layer, held.block, offsets.back());
    }
    memory_->residency().LoadWanted(layer);
    for (size_t i = 0; i < some.size(); ++i) {
      if (memory_->blocks().lost(layer, some[i].block)) continue;
      const std::byte* const entry =
          memory_->residency().Resident(layer, some[i].block, offsets[i]);
      ASSERT_NE(entry, nullptr);
      ExpectContent(entry, some[i].content, layer, offsets[i], kLayout.RowBytes());
    }
  }
  static void ExpectContent(const std::byte* bytes, int content, int32_t layer, size_t offset,
                            size_t size) {
    for (size_t i = 0; i < size; ++i) {
      ASSERT_EQ(bytes[i], ByteOf(content, layer, offset + i))
          << content << " in layer " << layer << " at " << offset + i;
    }
  }
  void Drop(const Held& held) {
    const auto at = std::find_if(held_.begin(), held_.end(),
                                 [&](const Held& other) { return other.block == held.block; });
    if (at == held_.end()) return;
    held_.erase(at);
    pool_->Withdraw(held.block);
    pool_->Give(held.block);
  }
  void Give() {
    if (held_.empty()) return;
    const size_t i = random_() % held_.size();
    pool_->Give(held_[i].block);
    held_.erase(held_.begin() + static_cast<ptrdiff_t>(i));
  }
  void Adopt() {
    if (kept_.empty() || pool_->num_free() == 0) return;
    const int content = kept_[random_() % kept_.size()];
    if (pool_->Find(NameOf(content).chain).has_value()) return;
    if (!memory_->store().Stored(NameOf(content))) return;
    const Held made{pool_->Take(), content};
    memory_->Adopt(made.block, NameOf(content));
    held_.push_back(made);
    ++adopted_;
  }
  // Some of what is held comes between passes, in one layer or all; others do what they like meanwhile.
  void BeginFetch() {
    std::vector<Held> some;
    std::sample(held_.begin(), held_.end(), std::back_inserter(some), 1 + random_() % 2, random_);
    std::vector<int32_t> blocks;
    for (const Held& held : some) blocks.push_back(held.block);
    const auto only = static_cast<int32_t>(random_() % (2 * kLayers));
    const size_t first = random_() % 3 == 0 ? random_() % (blocks.size() + 1) : 0;
    const uint64_t fetch = memory_->fetcher().Begin(blocks, [&](int32_t layer) {
      return only >= kLayers || layer == only ? first : blocks.size();
    });
    postponed_ += fetch == BlockFetcher::kLater;
    if (fetch != BlockFetcher::kNone && fetch != BlockFetcher::kLater) fetches_.push_back(fetch);
  }
  void Fetch() {
    memory_->fetcher().Pump();
    for (auto fetch = fetches_.begin(); fetch != fetches_.end();) {
      const bool done = memory_->fetcher().done(*fetch);
      if (!done && random_() % 8 != 0) {
        ++fetch;
        continue;
      }
      const TierBytes bytes = memory_->fetcher().End(*fetch);
      fetched_ += done && bytes.host > 0;
      fetch = fetches_.erase(fetch);
    }
  }
  void Live(int steps) {
    for (int i = 0; i < steps && !HasFatalFailure(); ++i) {
      switch (random_() % 12) {
        case 0:
        case 1:
          Write();
          break;
        case 2:
        case 3:
          Give();
          break;
        case 4:
        case 5:
          Adopt();
          break;
        case 6:
          memory_->Idle();
          break;
        case 7:
          BeginFetch();
          break;
        case 8:
          Fetch();
          break;
        default:
          Read();
      }
    }
  }

  std::mt19937_64 random_;
  storage::SystemClock clock_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<storage::FaultyStore> store_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<BlockPool> pool_;
  std::vector<Held> held_;
  std::vector<int> kept_;
  std::vector<int32_t> frames_;
  std::vector<uint64_t> fetches_;
  int next_content_ = 1, adopted_ = 0, reads_ = 0, lost_ = 0, fetched_ = 0, postponed_ = 0;
};

TEST_P(ResidencyTest, APinnedBlockHoldsWhatWasWrittenToIt) {
  store_->faults.reorder = true;
  Live(3000);
  EXPECT_GT(reads_, 500);
  EXPECT_EQ(lost_, 0);
  EXPECT_EQ(memory_->stats().lost_pieces, 0u);
  if (!HasStore()) return;
  EXPECT_GT(adopted_, 50);
  EXPECT_GT(fetched_, 0);
  EXPECT_GT(memory_->stats().saved_pieces, 100u);
  EXPECT_GT(memory_->stats().loaded_pieces, 100u);
  if (GetParam().kind == ResidencyKind::kPaged) {
    EXPECT_GT(memory_->stats().evicted_frames, 100u);
    EXPECT_GT(postponed_, 0);
  }
  memory_->Flush(std::chrono::seconds(60));
  EXPECT_FALSE(memory_->residency().has_work());
}

class ResidencyWithStoreTest : public ResidencyTest {};

TEST_P(ResidencyWithStoreTest, WhatTheStoreLosesIsLostAndNeverWrong) {
  store_->faults = {.miss_share = 0.1, .lose_share = 0.1, .polls_max = 2, .reorder = true};
  Live(3000);
  EXPECT_GT(reads_, 200);
  EXPECT_GT(lost_, 10);
  EXPECT_GT(fetched_, 0);
}

std::string CaseName(const ::testing::TestParamInfo<ResidencyCase>& info) {
  return info.param.name;
}

const std::vector<ResidencyCase> kWithStore = {
    {"Mirrored", ResidencyKind::kMirrored, {kFast, kFast, kFast}},
    {"MirroredOnHostBetween", ResidencyKind::kMirrored, {kFast, kHost, kFast}},
    {"Paged", ResidencyKind::kPaged, {kFrames, kFrames, kFrames}},
    {"PagedBesidePlaces", ResidencyKind::kPaged, {kFrames, kFast, kFrames}},
    {"PagedOnHostBesidePlaces", ResidencyKind::kPaged, {kHostFrames, kFast, kHostFrames}},
};
const std::vector<ResidencyCase> kInPlace = {
    {"InPlace", ResidencyKind::kInPlace, {kFast, kFast, kFast}},
    {"InPlaceOnHostBetween", ResidencyKind::kInPlace, {kHost, kFast, kHost}},
};

INSTANTIATE_TEST_SUITE_P(InPlace, ResidencyTest, ::testing::ValuesIn(kInPlace), CaseName);
INSTANTIATE_TEST_SUITE_P(Store, ResidencyTest, ::testing::ValuesIn(kWithStore), CaseName);
INSTANTIATE_TEST_SUITE_P(Store, ResidencyWithStoreTest, ::testing::ValuesIn(kWithStore), CaseName);

}  // namespace
}  // namespace winnow::engine
