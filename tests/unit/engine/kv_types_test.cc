// KV in 8 bits, wherever it lies: within a type, every way to keep KV gives the tokens that KV in memory gives.
#include <algorithm>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/model_loader.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::kStepTokens;
using kv_tiers::KvTiersTest;
using kv_tiers::Load;
using kv_tiers::Options;
using kv_tiers::PrefixTest;

class KvTypesTest : public KvTiersTest, public ::testing::WithParamInterface<const char*> {
 protected:
  KvTypesTest() { kv_dtype_ = GetParam(); }

  ModelOptions InMemory(int64_t blocks) const {
    ModelOptions options = Options();
    options.kv_dtype = kv_dtype_;
    options.kv_bytes = LayerBlockBytes() * config_.num_layers() * blocks;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Types, KvTypesTest, ::testing::Values("int8", "fp8"));

class KvTypesPrefixTest : public PrefixTest, public ::testing::WithParamInterface<const char*> {
 protected:
  KvTypesPrefixTest() { kv_dtype_ = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Types, KvTypesPrefixTest, ::testing::Values("int8", "fp8"));

TEST_P(KvTypesTest, ARowIsItsCodesAndTwoScales) {
  const auto model = Load(InMemory(8 * (kContext / kBlockTokens)));
  const kernels::KvLayout& layout = model->decoder->kv_layout();
  EXPECT_EQ(layout.RowBytes(), size_t{2} * config_.head_dim + 4);
  EXPECT_EQ(model->decoder->kv_row_bytes(), 2 * config_.head_dim + 4);
  // It is no bf16 under another name: of a thousand tokens some differ.
  for (Request& request : requests_) {
    request.prompt.resize(std::min<size_t>(request.prompt.size(), 500));
    request.stopping.max_tokens = 60;
  }
  const std::vector<Reply> rounded = Expected();
  expected_.clear();
  kv_dtype_ = "bf16";
  const std::vector<Reply>& plain = Expected();
  int differ = 0;
  for (size_t i = 0; i < plain.size(); ++i) differ += plain[i].tokens != rounded[i].tokens ? 1 : 0;
  EXPECT_GT(differ, 0);
}

TEST_P(KvTypesTest, TokensAreThoseOfKvInMemoryFromHostAndDisk) {
  struct Case {
    const char* name;
    int64_t host_bytes, disk_bytes, row_cache_bytes;
    bool prefetch;
  };
  for (const Case& c : {Case{"host", 64 << 20, 0, 1 << 18, true},
                        Case{"disk, without row cache", 0, 64 << 20, 0, false},
                        Case{"host over disk", 1 << 20, 64 << 20, 1 << 18, true}}) {
    SCOPED_TRACE(c.name);
    ModelOptions options = Tiered();
    options.tiers.host_bytes = c.host_bytes;
    options.tiers.disk_bytes = c.disk_bytes;
    if (c.disk_bytes > 0) options.tiers.store_dir = directory_.File(c.name);
    options.tiers.row_cache_bytes = c.row_cache_bytes;
    options.tiers.prefetch = c.prefetch;
    const auto model = Load(options);
    const std::vector<Reply> replies = Answers(*model);
    ExpectNoLosses(*model);
    ExpectEqual(replies);
    ExpectAllWaysTaken(*model, c.row_cache_bytes > 0, c.prefetch);
    const RowFetcherStats& rows = model->decoder->row_fetcher().stats();
    EXPECT_EQ(rows.payload_bytes,
              (rows.store_rows + rows.asked_rows) * model->decoder->kv_layout().RowBytes());
  }
}

// A prompt's own chunk attends to rows as they are stored: where it is cut does not show.
TEST_P(KvTypesTest, TokensAreTheSameHoweverAPromptIsCut) {
  for (const int32_t step_tokens : {kStepTokens / 2, 7}) {
    const auto model = Load(InMemory(8 * (kContext / kBlockTokens)));
    step_tokens_ = step_tokens;
    const std::vector<Reply> replies = Answers(*model);
    step_tokens_ = kStepTokens;
    ExpectEqual(replies);
  }
}

TEST_P(KvTypesTest, TokensAreTheSameAfterPreemption) {
  // Answers grow beyond the memory that their prompts fit in.
  requests_.resize(8);
  for (Request& request : requests_) {
    request.prompt.resize(100 + random_() % 30);
    request.stopping.max_tokens = 150;
  }
  const auto model = Load(InMemory(kContext / kBlockTokens));
  const std::vector<Reply> replies = Answers(*model);
  ExpectEqual(replies);
  uint64_t preemptions = 0;
  for (const Reply& reply : replies) preemptions += reply.last.usage.preemptions;
  EXPECT_GT(preemptions, 0u);
}

TEST_P(KvTypesPrefixTest, APrefixOutlivesTheProcessAndGivesTheSameTokens) {
  for (const double eager_share : {0.0, 1.0}) {
    SCOPED_TRACE(eager_share);
    eager_share_ = eager_share;
    ModelOptions options = Tiered();
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File(eager_share == 0 ? "lazy" : "eager");
    {
      const auto model = Load(options);
      ExpectEqual(Answers(*model, true));
      ExpectNoLosses(*model);
    }
    const auto model = Load(options);
    const std::vector<Request> all = requests_;
    for (size_t i = 0; i < all.size(); i += 7) {
      requests_ = {all[i]};
      const Reply expected = Expected()[i];
      const std::vector<Reply> replies = Answers(*model, true);
      EXPECT_GE(cached_tokens_ + kBlockTokens + 100, all[i].prompt.size())
          << ToString(all[i].policy);
      EXPECT_EQ(replies[0].tokens, expected.tokens) << ToString(all[i].policy) << " seed " << seed_;
    }
    requests_ = all;
  }
}

// Blocks of int8 and fp8 have one size: only their names tell them apart.
TEST_P(KvTypesPrefixTest, AStoreOfTheOtherTypeHasNothing) {
  requests_.resize(1);
  requests_[0].policy = {};
  ModelOptions options = Tiered();
  options.retrieval.index = "quest,lsh";
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  ExpectEqual(Answers(*Load(options), true));
  Answers(*Load(options), true);
  EXPECT_GT(cached_tokens_, 0u);
  kv_dtype_ = kv_dtype_ == "int8" ? "fp8" : "int8";
  expected_.clear();
  options.kv_dtype = kv_dtype_;
  ExpectEqual(Answers(*Load(options), true));
  EXPECT_EQ(cached_tokens_, 0u);
}

}  // namespace
}  // namespace winnow::engine
