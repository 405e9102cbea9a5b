#include "engine/synthetic_artifact.h"

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

ModelConfig Shape(int32_t layers, int32_t heads, int32_t kv_heads, int32_t head_dim) {
  ModelConfig config;
  config.layers.resize(layers);
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = head_dim;
  return config;
}

TEST(SyntheticArtifact, HasEveryKindAndTheFeatureMapsInEveryLayer) {
  for (const ModelConfig& config :
       {Shape(1, 1, 1, 64), Shape(3, 8, 2, 80), Shape(2, 6, 6, 96), Shape(2, 12, 3, 128)}) {
    const auto made = MakeSyntheticArtifact(config, 1);
    ASSERT_TRUE(made.ok()) << made.status();
    const Artifact& artifact = *made->artifact;
    EXPECT_EQ(artifact.bits(Kind::kHata), 128);
    EXPECT_EQ(artifact.bits(Kind::kSpotlight), 128);
    EXPECT_EQ(artifact.bits(Kind::kHashAttention), 32);
    for (int32_t layer = 0; layer < config.num_layers(); ++layer) {
      EXPECT_TRUE(artifact.HasLayer(Kind::kHata, layer));
      EXPECT_TRUE(artifact.HasLayer(Kind::kSpotlight, layer));
      EXPECT_TRUE(artifact.HasLayer(Kind::kHashAttention, layer));
      ASSERT_TRUE(artifact.HasFeatures(layer));
      EXPECT_EQ(artifact.FeatureMap(layer, Artifact::Side::kKey).out.out, 64);
    }
  }
}

TEST(SyntheticArtifact, TheSeedDecides) {
  const ModelConfig config = Shape(2, 4, 2, 64);
  const auto one = MakeSyntheticArtifact(config, 1), again = MakeSyntheticArtifact(config, 1),
             two = MakeSyntheticArtifact(config, 2);
  ASSERT_TRUE(one.ok() && again.ok() && two.ok());
  EXPECT_EQ(one->artifact->ContentId(), again->artifact->ContentId());
  EXPECT_NE(one->artifact->ContentId(), two->artifact->ContentId());
}

}  // namespace
}  // namespace winnow::engine
