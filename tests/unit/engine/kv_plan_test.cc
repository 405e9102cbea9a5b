#include "engine/kv/kv_plan.h"

#include <algorithm>
#include <memory>
#include <string>

#include "engine/kv_planning.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::FrameBytes;

class KvPlanTest : public kv_tiers::KvTiersTest {
 protected:
  static void ExpectSizesOf(const LoadedModel& model) {
    const Decoder& decoder = *model.decoder;
    const KvPlan& plan = decoder.kv_plan();
    EXPECT_EQ(plan.num_blocks, decoder.num_blocks());
    EXPECT_EQ(plan.pool_bytes(), static_cast<int64_t>(decoder.kv_pool_bytes()));
    EXPECT_EQ(plan.host_bytes, static_cast<int64_t>(decoder.shared_kv_bytes()));
    EXPECT_EQ(plan.index_bytes, static_cast<int64_t>(decoder.index_bytes()));
    EXPECT_EQ(plan.summary_bytes, static_cast<int64_t>(decoder.summary_bytes()));
    EXPECT_EQ(plan.row_cache_bytes, static_cast<int64_t>(decoder.row_fetcher().cache_bytes()));
    EXPECT_EQ(plan.layout.BlockBytes(), decoder.kv_layout().BlockBytes());
    EXPECT_EQ(plan.layers.size(), static_cast<size_t>(model.config.num_layers));
  }
  // As a GPU's options are resolved; none is needed for that.
  KvPlan OnDevice(int64_t host_bytes, int64_t disk_bytes, bool spill) const {
    ModelOptions options = kv_tiers::Options();
    options.device = "cuda";
    options.kv_dtype = "bf16";
    options.num_threads = 0;
    options.tiers.host_bytes = host_bytes;
    options.tiers.disk_bytes = disk_bytes;
    options.tiers.store_dir = disk_bytes > 0 ? "/nowhere" : "";
    options.tiers.spill = spill;
    const auto resolved = ResolveDecoderOptions(config_, options);
    EXPECT_TRUE(resolved.ok()) << resolved.status();
    return Plan(*resolved);
  }
  KvPlan Plan(const DecoderOptions& options) const {
    auto plan = PlanKv(config_, options);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }
  int64_t Layers(const KvPlan& plan, KvPlacement placement) const {
    return std::count_if(plan.layers.begin(), plan.layers.end(),
                         [&](const LayerKvPlan& layer) { return layer.placement == placement; });
  }
};

TEST_F(KvPlanTest, SizesAreThoseThatAreAllocated) {
  ModelOptions options = kv_tiers::Options();
  options.kv_bytes =
      FrameBytes(config_) * config_.num_layers * static_cast<int64_t>(40 + random_() % 50);
  ExpectSizesOf(*kv_tiers::Load(options));
  options = Tiered();
  options.kv_bytes += FrameBytes(config_) * static_cast<int64_t>(random_() % 50);
  options.tiers.host_bytes = 64 << 20;
  ExpectSizesOf(*kv_tiers::Load(options));
}

TEST_F(KvPlanTest, ResidencyAndPlacementFollowTheFlags) {
  ModelOptions options = kv_tiers::Options();
  const auto in_place = ResolveDecoderOptions(config_, options);
  ASSERT_TRUE(in_place.ok());
  KvPlan plan = Plan(*in_place);
  EXPECT_EQ(plan.residency, ResidencyKind::kInPlace);
  EXPECT_EQ(Layers(plan, KvPlacement::kFast), config_.num_layers);

  options.tiers.host_bytes = 64 << 20;
  const auto paged = ResolveDecoderOptions(config_, options);
  ASSERT_TRUE(paged.ok()) << paged.status();
  plan = Plan(*paged);
  EXPECT_EQ(plan.residency, ResidencyKind::kPaged);
  EXPECT_EQ(Layers(plan, KvPlacement::kFastFrames), config_.num_layers);

  const int64_t shared = config_.num_layers - FirstSharedLayer();
  plan = OnDevice(0, 0, false);
  EXPECT_EQ(plan.residency, ResidencyKind::kInPlace);
  plan = OnDevice(0, 64 << 20, false);
  EXPECT_EQ(plan.residency, ResidencyKind::kMirrored);
  EXPECT_EQ(Layers(plan, KvPlacement::kFast), config_.num_layers);
  EXPECT_EQ(plan.host_bytes, 0);
  plan = OnDevice(64 << 20, 0, false);
  EXPECT_EQ(plan.residency, ResidencyKind::kInPlace);
  EXPECT_EQ(Layers(plan, KvPlacement::kHost), shared);
  EXPECT_EQ(plan.host_bytes, FrameBytes(config_) * shared * plan.num_blocks);
  EXPECT_EQ(plan.fast_bytes, FrameBytes(config_) * FirstSharedLayer() * plan.num_blocks);
  plan = OnDevice(64 << 20, 64 << 20, false);
  EXPECT_EQ(plan.residency, ResidencyKind::kMirrored);
  EXPECT_EQ(Layers(plan, KvPlacement::kHost), shared);
  plan = OnDevice(64 << 20, 256 << 20, true);
  EXPECT_EQ(plan.residency, ResidencyKind::kPaged);
  EXPECT_EQ(Layers(plan, KvPlacement::kHostFrames), shared);
  EXPECT_EQ(Layers(plan, KvPlacement::kFast), FirstSharedLayer());
  EXPECT_LE(plan.host_bytes, 64 << 20);
}

TEST_F(KvPlanTest, ALineSaysWhereLayersLieAndWhatTheyAre) {
  KvPlan plan;
  plan.residency = ResidencyKind::kMirrored;
  plan.layers.resize(6);
  for (int i = 2; i < 6; ++i) plan.layers[i].placement = KvPlacement::kHost;
  for (int i = 2; i < 6; ++i) plan.layers[i].indexes = {"lsh:128", "quest"};
  plan.layers[4].window = 4096;
  plan.layers[4].indexes.clear();
  EXPECT_EQ(
      ToString(plan),
      "mirrored; layers 0-1: fast, bfloat16, dense; layers 2-3: host, bfloat16, retrieves "
      "(lsh:128, "
      "quest); layer 4: host, bfloat16, window 4096, dense; layer 5: host, bfloat16, retrieves "
      "(lsh:128, quest)");
}

}  // namespace
}  // namespace winnow::engine
