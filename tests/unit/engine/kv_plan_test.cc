#include "engine/kv/kv_plan.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/kv_planning.h"
#include "gmock/gmock.h"
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
    EXPECT_EQ(plan.layers.size(), static_cast<size_t>(model.config.num_layers()));
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
      FrameBytes(config_) * config_.num_layers() * static_cast<int64_t>(40 + random_() % 50);
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
  EXPECT_EQ(Layers(plan, KvPlacement::kFast), config_.num_layers());

  options.tiers.host_bytes = 64 << 20;
  const auto paged = ResolveDecoderOptions(config_, options);
  ASSERT_TRUE(paged.ok()) << paged.status();
  plan = Plan(*paged);
  EXPECT_EQ(plan.residency, ResidencyKind::kPaged);
  EXPECT_EQ(Layers(plan, KvPlacement::kFastFrames), config_.num_layers());

  const int64_t shared = config_.num_layers() - FirstSharedLayer();
  plan = OnDevice(0, 0, false);
  EXPECT_EQ(plan.residency, ResidencyKind::kInPlace);
  plan = OnDevice(0, 64 << 20, false);
  EXPECT_EQ(plan.residency, ResidencyKind::kMirrored);
  EXPECT_EQ(Layers(plan, KvPlacement::kFast), config_.num_layers());
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

// As every second layer of a model with windows would be.
TEST(KvPools, ArePlannedForLayersInAnyOrder) {
  const kernels::KvLayout layout{2, 64, 16, kernels::DType::kBF16};
  const auto block_bytes = static_cast<int64_t>(layout.BlockBytes());
  constexpr KvPlacement kFast = KvPlacement::kFast, kHost = KvPlacement::kHost,
                        kHostFrames = KvPlacement::kHostFrames;
  const KvPlan places =
      PlanPools(ResidencyKind::kMirrored, layout, {kHost, kFast, kHost, kFast, kHost}, 7);
  EXPECT_EQ(places.NumFastLayers(), 2);
  EXPECT_EQ(places.num_frames, 5 * 7);
  EXPECT_EQ(places.fast_bytes, 2 * 7 * block_bytes);
  EXPECT_EQ(places.host_bytes, 3 * 7 * block_bytes);
  EXPECT_EQ(places.shared.num_pools, 3);
  EXPECT_EQ(places.shared.num_blocks, 7);
  EXPECT_FALSE(places.shared.of_frames);
  const KvPlan frames =
      PlanPools(ResidencyKind::kPaged, layout, {kHostFrames, kFast, kHostFrames}, 7, 9);
  EXPECT_EQ(frames.num_frames, 7 + 9);
  EXPECT_EQ(frames.fast_bytes, 7 * block_bytes);
  EXPECT_EQ(frames.host_bytes, 9 * block_bytes);
  EXPECT_EQ(frames.shared.num_pools, 1);
  EXPECT_EQ(frames.shared.num_blocks, 9);
  EXPECT_TRUE(frames.shared.of_frames);
  EXPECT_EQ(ToString(frames),
            "paged; layer 0: host frames, bfloat16, dense; layer 1: fast, bfloat16, dense; layer "
            "2: host frames, bfloat16, dense");
}

TEST_F(KvPlanTest, LayersUnderTheDefaultPolicyHaveTheIndexesThatAreMade) {
  ModelOptions flags = kv_tiers::Options();
  flags.max_context = 256;
  auto options = ResolveDecoderOptions(config_, flags);
  ASSERT_TRUE(options.ok()) << options.status();
  options->retrieval.indexes = {{AttentionPolicy::Kind::kLsh, 128},
                                {AttentionPolicy::Kind::kQuest, 0}};
  options->retrieval.four_bit_keys = true;
  const KvPlan plan = Plan(*options);
  ASSERT_EQ(plan.indexes.size(), 3u);
  int64_t bytes = 0;
  for (const IndexKvPlan& index : plan.indexes) {
    EXPECT_GT(index.bytes, 0) << index.title;
    EXPECT_FALSE(index.learned);
    bytes += index.bytes;
  }
  EXPECT_EQ(plan.index_bytes, bytes);
  for (int32_t i = 0; i < config_.num_layers(); ++i) {
    EXPECT_EQ(plan.layers[i].indexes, i < FirstSharedLayer()
                                          ? std::vector<std::string>()
                                          : std::vector<std::string>({"lsh:128", "quest", "int4"}));
  }
}

// Residual codes have the bytes of the codes that they refine.
TEST_F(KvPlanTest, ResidualCodesAreCountedBesidePcas) {
  ModelOptions flags = kv_tiers::Options();
  flags.max_context = 256;
  auto options = ResolveDecoderOptions(config_, flags);
  ASSERT_TRUE(options.ok()) << options.status();
  options->retrieval.indexes = {{AttentionPolicy::Kind::kPca, 128}};
  const int64_t without = Plan(*options).index_bytes;
  options->retrieval.residual_codes = true;
  const KvPlan plan = Plan(*options);
  ASSERT_EQ(plan.indexes.size(), 2u);
  EXPECT_EQ(plan.indexes[1].title, "residual");
  EXPECT_EQ(plan.indexes[0].bytes, plan.indexes[1].bytes);
  EXPECT_EQ(plan.index_bytes, 2 * without);
  EXPECT_EQ(IndexBlockBytes(config_, plan.layout, options->retrieval) * plan.num_blocks,
            plan.index_bytes);
}

// By the option's name, before anything is allocated.
TEST_F(KvPlanTest, TooLittleMemoryIsRefused) {
  ModelOptions flags = kv_tiers::Options();
  flags.max_context = 256;
  auto options = ResolveDecoderOptions(config_, flags);
  ASSERT_TRUE(options.ok()) << options.status();
  const int64_t block = FrameBytes(config_) * config_.num_layers();
  options->kv_bytes = block;
  EXPECT_EQ(Plan(*options).num_blocks, 1);
  options->kv_bytes = block - 1;
  EXPECT_THAT(std::string(PlanKv(config_, *options).status().message()),
              ::testing::HasSubstr("kv_bytes is"));
  options->residency = ResidencyKind::kPaged;
  const int64_t least =
      FrameBytes(config_) *
      LeastFrames(config_.num_layers(), options->block_tokens, 256, options->max_batch_tokens,
                  options->max_sequences > 0 ? options->max_sequences : options->max_batch_logits);
  options->kv_bytes = least;
  EXPECT_EQ(Plan(*options).num_frames, least / FrameBytes(config_));
  options->kv_bytes = least - 1;
  EXPECT_THAT(std::string(PlanKv(config_, *options).status().message()),
              ::testing::HasSubstr("with slower tiers"));
  options->block_tokens = 17;
  EXPECT_THAT(std::string(PlanKv(config_, *options).status().message()),
              ::testing::HasSubstr("block_tokens is 17"));
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
