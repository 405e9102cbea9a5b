#include "bench/runs.h"

#include <fstream>

#include "gtest/gtest.h"
#include "tests/unit/temp_dir.h"

namespace winnow::bench {
namespace {

constexpr char kShape[] = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300,
  "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu",
  "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"
})";

// What a case shows must not depend on those before it: --drift moves rows of the embedding.
TEST(BenchRuns, ACaseThatDriftsLeavesTheInputsAsTheyWere) {
  const TempDir dir;
  BenchModelFlags flags;
  flags.like = dir.File("config.json");
  std::ofstream(flags.like) << kShape;
  const auto policy = engine::ParseAttentionPolicy("dense");
  ASSERT_TRUE(policy.ok()) << policy.status();
  DecodeCase what;
  what.context = 100;
  what.batch = 3;
  what.steps = 2;
  const auto model = MakeBenchModel(flags, int64_t{3} * 128, {&*policy, 1});
  ASSERT_TRUE(model.ok()) << model.status();
  const kernels::HostMatrix table = (*model)->synthetic.weights.embedding.host();
  const auto bytes = [&] {
    const auto* first = static_cast<const std::byte*>(table.data);
    return std::vector<std::byte>(
        first, first + table.rows * table.cols * kernels::DTypeBytes(table.dtype));
  };
  const std::vector<std::byte> before = bytes();
  ASSERT_FALSE(before.empty());
  for (const double drift : {0.0, 0.3}) {
    what.drift = drift;
    const auto result = RunDecode(**model, what, *policy, 1);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_GT(result->seconds, 0);
    EXPECT_TRUE(bytes() == before) << "drift " << drift;
  }
}

}  // namespace
}  // namespace winnow::bench
