// The pools of KV: whatever placements alternate, each layer block's memory is its own, and lies where the plan says.
#include "engine/kv/kv_pools.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/pretended_device.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

constexpr int32_t kBlocks = 5;
constexpr kernels::KvLayout kLayout = {
    .kv_heads = 2, .head_dim = 64, .block_tokens = 16, .dtype = kernels::DType::kBF16};
constexpr KvPlacement kFast = KvPlacement::kFast, kHost = KvPlacement::kHost,
                      kFrames = KvPlacement::kFastFrames, kHostFrames = KvPlacement::kHostFrames;

// Remembers what it was asked for, and may have no memory of a kind.
class PoolBackend final : public PretendedDevice {
 public:
  using PretendedDevice::PretendedDevice;

  bool has_memory = true, has_shared_memory = true, shares = true;
  std::vector<std::byte*> pools;
  kernels::SharedKvShape shape;

  kernels::Buffer Allocate(size_t bytes) override {
    return has_memory ? PretendedDevice::Allocate(bytes) : kernels::Buffer();
  }
  kernels::Buffer AllocateShared(size_t bytes) override {
    return has_shared_memory ? PretendedDevice::AllocateShared(bytes) : kernels::Buffer();
  }
  std::unique_ptr<kernels::SharedKv> ShareKv(const kernels::SharedKvShape& of,
                                             std::span<std::byte* const> from,
                                             std::string* why) override {
    shape = of;
    pools.assign(from.begin(), from.end());
    if (shares) return PretendedDevice::ShareKv(of, from, why);
    *why = "no room for tables";
    return nullptr;
  }
};

class KvPoolsTest : public ::testing::Test {
 protected:
  KvPoolsTest()
      : random_(testing::TestSeed()), cpu_(kernels::MakeCpuBackend("auto", 1)), backend_(*cpu_) {}

  std::unique_ptr<KvPools> Make(ResidencyKind kind, const std::vector<KvPlacement>& placements,
                                int64_t shared_frames = 0) {
    auto pools =
        KvPools::Create(backend_, PlanPools(kind, kLayout, placements, kBlocks, shared_frames));
    EXPECT_TRUE(pools.ok()) << pools.status();
    return *std::move(pools);
  }
  static bool IsIn(std::span<std::byte> pool, const std::byte* at) {
    return at >= pool.data() && at + kLayout.BlockBytes() <= pool.data() + pool.size();
  }
  // Writes to all of them, and reads it back: each has its own bytes.
  static void ExpectApart(const std::vector<std::byte*>& layer_blocks) {
    for (size_t i = 0; i < layer_blocks.size(); ++i) {
      std::memset(layer_blocks[i], static_cast<int>(i + 1), kLayout.BlockBytes());
    }
    for (size_t i = 0; i < layer_blocks.size(); ++i) {
      for (size_t at = 0; at < kLayout.BlockBytes(); ++at) {
        ASSERT_EQ(layer_blocks[i][at], static_cast<std::byte>(i + 1)) << i << " at " << at;
      }
    }
  }

  std::mt19937_64 random_;
  std::unique_ptr<kernels::Backend> cpu_;
  PoolBackend backend_;
};

TEST_F(KvPoolsTest, PlacesAreApartAndInTheMemoryThatThePlanNames) {
  for (int round = 0; round < 8; ++round) {
    std::vector<KvPlacement> placements = {kFast};
    for (int i = 0; i < 5; ++i) placements.push_back(random_() % 2 == 0 ? kFast : kHost);
    std::shuffle(placements.begin(), placements.end(), random_);
    const auto host = static_cast<size_t>(std::count(placements.begin(), placements.end(), kHost));
    const auto kind = round % 2 == 0 ? ResidencyKind::kInPlace : ResidencyKind::kMirrored;
    const auto pools = Make(kind, placements);
    const auto [device, shared] = pools->all();
    EXPECT_EQ(device.size(), (placements.size() - host) * kBlocks * kLayout.BlockBytes());
    EXPECT_EQ(shared.size(), host * kBlocks * kLayout.BlockBytes());
    EXPECT_EQ(pools->size_bytes(), device.size() + shared.size());
    std::vector<std::byte*> places, shared_pools;
    for (int32_t layer = 0; layer < pools->num_layers(); ++layer) {
      EXPECT_TRUE(pools->HasPlaces(layer));
      EXPECT_EQ(pools->IsShared(layer), placements[layer] == kHost);
      if (pools->IsShared(layer)) shared_pools.push_back(pools->LayerPool(layer));
      for (int32_t block = 0; block < kBlocks; ++block) {
        places.push_back(pools->Place(layer, block));
        EXPECT_TRUE(IsIn(pools->IsShared(layer) ? shared : device, places.back()));
      }
    }
    ASSERT_NO_FATAL_FAILURE(ExpectApart(places));
    EXPECT_EQ(pools->shared_kv() != nullptr, host > 0);
    if (host > 0) {
      EXPECT_EQ(backend_.pools, shared_pools);
    }
    EXPECT_EQ(pools->incoming().empty(), kind == ResidencyKind::kInPlace);
    EXPECT_EQ(pools->outgoing().empty(), kind == ResidencyKind::kInPlace);
  }
}

TEST_F(KvPoolsTest, FramesAreApartAndBehindThePlaces) {
  constexpr int64_t kShared = 7;
  for (const KvPlacement frames : {kFrames, kHostFrames}) {
    const auto pools = Make(ResidencyKind::kPaged, {frames, kFast, frames, frames, kFast}, kShared);
    EXPECT_THAT(std::vector<int32_t>(pools->layers_with_places().begin(),
                                     pools->layers_with_places().end()),
                ::testing::ElementsAre(1, 4));
    EXPECT_EQ(pools->own_frames(), 2 * kBlocks);
    EXPECT_EQ(pools->num_frames(), 2 * kBlocks + kShared);
    const auto [device, shared] = pools->all();
    std::vector<std::byte*> all;
    for (int32_t frame = 0; frame < pools->num_frames(); ++frame) {
      all.push_back(pools->Frame(frame));
      const bool on_host = frames == kHostFrames && frame >= pools->own_frames();
      EXPECT_TRUE(IsIn(on_host ? shared : device, all.back())) << frame;
    }
    EXPECT_EQ(pools->Frame(pools->own_frames()), pools->frame_pool());
    ASSERT_NO_FATAL_FAILURE(ExpectApart(all));
    // The first frames are the places, layer by layer.
    for (int32_t block = 0; block < kBlocks; ++block) {
      EXPECT_EQ(pools->Place(1, block), pools->Frame(block));
      EXPECT_EQ(pools->Place(4, block), pools->Frame(kBlocks + block));
    }
    EXPECT_FALSE(pools->HasPlaces(0) || pools->HasPlaces(2) || pools->HasPlaces(3));
    EXPECT_FALSE(pools->incoming().empty());  // for the layers with places
    if (frames == kFrames) continue;
    EXPECT_THAT(backend_.pools, ::testing::ElementsAre(pools->frame_pool()));
    EXPECT_TRUE(backend_.shape.of_frames);
    EXPECT_EQ(backend_.shape.num_blocks, kShared);
  }
}

// The store reads and writes frames where they lie.
TEST_F(KvPoolsTest, FramesOfAllLayersNeedNoTransit) {
  const auto pools = Make(ResidencyKind::kPaged, {kFrames, kFrames}, 3);
  EXPECT_EQ(pools->own_frames(), 0);
  EXPECT_TRUE(pools->incoming().empty() && pools->outgoing().empty());
  EXPECT_EQ(pools->shared_kv(), nullptr);
}

TEST_F(KvPoolsTest, MemoryThatIsMissingIsRefusedWithItsBytes) {
  const KvPlan plan = PlanPools(ResidencyKind::kInPlace, kLayout, {kFast, kHost}, kBlocks);
  const std::string bytes = std::to_string(kBlocks * kLayout.BlockBytes());
  const auto refusal = [&] {
    const absl::Status status = KvPools::Create(backend_, plan).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    return std::string(status.message());
  };
  backend_.shares = false;
  EXPECT_THAT(refusal(), ::testing::HasSubstr("no room for tables"));
  backend_.has_shared_memory = false;
  EXPECT_THAT(refusal(), ::testing::AllOf(::testing::HasSubstr("of 1 layers"),
                                          ::testing::HasSubstr(bytes + " bytes")));
  backend_.has_memory = false;
  EXPECT_THAT(refusal(), ::testing::HasSubstr("the KV pool: " + bytes + " bytes in 1 layers"));
}

}  // namespace
}  // namespace winnow::engine
