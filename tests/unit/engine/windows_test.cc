// Models some of whose layers see a window: answers do not depend on where KV lies, policies choose in the other layers, and
// what is before a window is not read.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/model_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/kv_tiers_testing.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::kNeedle;
using kv_tiers::KvTiersTest;
using kv_tiers::Load;

using nlohmann::json;
using ::testing::HasSubstr;

constexpr int32_t kWindow = 70;

// needle-5m's weights under another configuration.
void WriteModel(const std::string& to, const json& changes) {
  std::filesystem::copy(kNeedle, to);
  std::filesystem::remove(to + "/winnow-artifact.safetensors");  // of the unchanged model
  json config = json::parse(ReadText(to + "/config.json"));
  config.update(changes);
  WriteText(to + "/config.json", config.dump());
}

// Six layers, of which the second, the fourth and the last see a window.
class WindowsTest : public KvTiersTest {
 protected:
  WindowsTest() {
    model_dir_ = directory_.File("model");
    index_ = "quest,lsh,pca,int4";
    WriteModel(model_dir_, {{"architectures", {"SmolLM3ForCausalLM"}},
                            {"model_type", "smollm3"},
                            {"no_rope_layers", {1, 1, 1, 1, 1, 1}},
                            {"use_sliding_window", true},
                            {"sliding_window", kWindow},
                            {"layer_types",
                             {"full_attention", "sliding_attention", "full_attention",
                              "sliding_attention", "full_attention", "sliding_attention"}}});
    std::vector<AttentionPolicy> policies;
    for (const AttentionPolicy& policy : kv_tiers::Policies()) {
      if (!policy.NeedsArtifact()) policies.push_back(policy);
    }
    for (size_t i = 0; i < requests_.size(); ++i) {
      requests_[i].policy = policies[i % policies.size()];
    }
  }
  ModelOptions InMemory() const {
    ModelOptions options = PlainOptions();
    options.kv_dtype = "bf16";
    options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
    return options;
  }
};

TEST_F(WindowsTest, TokensAreThoseOfKvInMemory) {
  for (const int64_t host_bytes : {int64_t{64} << 20, int64_t{1} << 20, int64_t{0}}) {
    SCOPED_TRACE(host_bytes);
    ModelOptions options = Tiered();
    options.tiers.host_bytes = host_bytes;
    if (host_bytes < 64 << 20) {
      options.tiers.disk_bytes = 64 << 20;
      options.tiers.store_dir = directory_.File(std::to_string(host_bytes));
    }
    const auto model = Load(options, model_dir_);
    ASSERT_NE(model, nullptr);
    const std::vector<Reply> replies = Answers(*model);
    ExpectNoLosses(*model);
    ExpectEqual(replies);
    EXPECT_GT(model->decoder->kv_memory()->stats().evicted_frames, 0u);
  }
}

TEST_F(WindowsTest, TokensAreTheSameHoweverPromptsAreCut) {
  step_tokens_ = 7;
  const auto model = Load(InMemory(), model_dir_);
  const std::vector<Reply> replies = Answers(*model, /*prefix_cache=*/true);
  step_tokens_ = kv_tiers::kStepTokens;
  ExpectEqual(replies);
}

TEST_F(WindowsTest, APrefixOutlivesTheProcessAndIsReadWhereItIsSeen) {
  constexpr int32_t kPrompt = 600;
  requests_.resize(1);
  requests_[0].prompt.resize(kPrompt, 5);
  requests_[0].stopping.max_tokens = 4;
  for (const char* policy : {"dense", "lsh:k=5,window=9,suffix=30", "pca:k=5,window=9,suffix=70"}) {
    SCOPED_TRACE(policy);
    expected_.clear();
    requests_[0].policy = *ParseAttentionPolicy(policy);
    ModelOptions options = Tiered();
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File(policy);
    options.tiers.row_cache_bytes = 0;
    options.kv_bytes *= 4;  // nothing is read twice
    ExpectEqual(Answers(*Load(options, model_dir_), true));
    const auto model = Load(options, model_dir_);
    const std::vector<Reply> replies = Answers(*model, true);
    ExpectEqual(replies);
    EXPECT_GE(cached_tokens_ + kBlockTokens + 100, static_cast<uint64_t>(kPrompt));
    if (requests_[0].policy.HasTail()) continue;  // tables of cells are larger than all of it
    // Blocks of the layers that see all, and of the others those of a window or two.
    const int64_t blocks = kPrompt / kBlockTokens + 1;
    const int64_t seen = 3 * blocks + 3 * ((kWindow + 64) / kBlockTokens + 4);
    EXPECT_LE(model->store.store->stats().payload_bytes_read,
              static_cast<uint64_t>(seen * LayerBlockBytes()));
  }
}

TEST_F(WindowsTest, VerifiedAnswersAreThoseOfDenseAttention) {
  for (Request& request : requests_) {
    request.policy = {};
    request.stopping.max_tokens = 24;
  }
  const std::vector<Reply> dense = Expected();
  const char* const policies[] = {"lsh:k=5,window=9,dense_layers=0,verify=3",
                                  "pca:k=5,window=20,verify=2",
                                  "window:sink=2,window=20,dense_layers=0,verify=5"};
  for (size_t i = 0; i < requests_.size(); ++i) {
    requests_[i].policy = *ParseAttentionPolicy(policies[i % 3]);
  }
  ModelOptions options = InMemory();
  options.max_batch_logits = kv_tiers::kRunning + 16;
  const auto model = Load(options, model_dir_);
  const std::vector<Reply> verified = Answers(*model);
  uint64_t drafted = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    EXPECT_EQ(verified[i].tokens, dense[i].tokens) << i << ", seed " << seed_;
    drafted += verified[i].last.usage.drafts.drafted;
  }
  EXPECT_GT(drafted, 0u);
}

TEST_F(WindowsTest, ReadsAreOfWhatIsSeen) {
  requests_.resize(1);
  requests_[0].policy = {};
  requests_[0].prompt.resize(300, 7);
  requests_[0].stopping.max_tokens = 3;
  const auto model = Load(InMemory(), model_dir_);
  const std::vector<Reply> replies = Answers(*model);
  // Two decoded tokens.
  const uint64_t rows = config_.num_kv_heads * uint64_t{3 * (301 + 302) + 3 * (kWindow + kWindow)};
  const Usage& usage = replies[0].last.usage;
  EXPECT_EQ(usage.kv_read_bytes_fast, rows * model->decoder->kv_row_bytes());
  EXPECT_EQ(usage.kv_dense_bytes, usage.kv_read_bytes_fast);
}

TEST_F(WindowsTest, IndexesAreOfLayersThatSeeAll) {
  ModelOptions options = InMemory();
  options.retrieval.index = "lsh";
  const auto some = Load(options, model_dir_), all = Load(options, kNeedle);
  EXPECT_EQ(2 * some->decoder->index_bytes(), all->decoder->index_bytes());
  EXPECT_EQ(some->decoder->kv_plan().index_bytes,
            static_cast<int64_t>(some->decoder->index_bytes()));
  for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
    EXPECT_EQ(some->decoder->kv_plan().layers[layer].retrieves(), layer == 2 || layer == 4);
  }
}

TEST_F(WindowsTest, WithoutLayersThatSeeAllOnlyDenseIsThere) {
  const std::string dir = directory_.File("all");
  WriteModel(dir, {{"architectures", {"MistralForCausalLM"}},
                   {"model_type", "mistral"},
                   {"sliding_window", kWindow}});
  ModelOptions options = InMemory();
  options.retrieval.index = "auto";
  const auto model = Load(options, dir);
  EXPECT_EQ(model->decoder->index_bytes(), 0u);
  for (const char* policy : {"pca:k=2%", "lsh:k=2%", "oracle:k=5", "window:window=9"}) {
    const absl::Status status = model->decoder->CheckPolicy(*ParseAttentionPolicy(policy));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("only dense"));
  }
  EXPECT_TRUE(model->decoder->CheckPolicy({}).ok());
  for (const char* index : {"pca", "lsh", "int4"}) {
    options.retrieval.index = index;
    const absl::Status status = LoadModel(dir, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("reads a sliding window"));
  }
  options.retrieval.index = "auto";
  // Served up to the window, it is a model without one.
  options.max_context = kWindow - 6;
  EXPECT_TRUE(Load(options, dir)->decoder->CheckPolicy(*ParseAttentionPolicy("pca:k=2%")).ok());
}

}  // namespace
}  // namespace winnow::engine
