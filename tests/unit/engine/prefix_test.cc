// Prompts that begin alike: KV that is shared, kept, lost, damaged, or of another model.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/model_loader.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::DamageAllOver;
using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::kFewer;
using kv_tiers::kNeedle;
using kv_tiers::Load;
using kv_tiers::Options;
using kv_tiers::PrefixTest;

TEST_F(PrefixTest, SharedKvGivesTheTokensOfOnesOwn) {
  ModelOptions options = Options();
  options.kv_dtype = "bf16";
  // Not even room for the running ones: some are preempted, and find their own blocks again.
  for (const int64_t blocks : {3 * (kContext / kBlockTokens), 8 * (kContext / kBlockTokens)}) {
    options.kv_bytes = FrameBytes(config_) * config_.num_layers() * blocks;
    const auto model = Load(options);
    const std::vector<Reply> replies = Answers(*model, /*prefix_cache=*/true);
    EXPECT_GT(cached_tokens_, 300u / kFewer);
    ExpectEqual(replies);
  }
}

// One store under a model that was changed in place, or other settings: KV of the one is wrong for the
// other, however little they differ.
TEST_F(PrefixTest, AStoreOfAnotherModelOrOfOtherSettingsHasNothing) {
  requests_.resize(1);
  requests_[0].policy = {};
  requests_[0].prompt.resize(100);
  requests_[0].stopping.max_tokens = 8;
  const std::string model_dir = directory_.File("model");
  const auto copy_model = [&] {
    std::filesystem::remove_all(model_dir);
    std::filesystem::copy(kNeedle, model_dir);
    std::filesystem::remove(model_dir + "/winnow-artifact.safetensors");  // of the unchanged model
  };
  copy_model();
  ModelOptions options = Tiered();
  options.retrieval.index =
      "quest,lsh";        // the copies have no artifact, and pca would be fitted to each
  options.kv_bytes *= 4;  // enough for any of the settings below
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  ExpectEqual(Answers(*Load(options, model_dir), true));
  Answers(*Load(options, model_dir), true);
  EXPECT_GT(cached_tokens_, 0u);

  const auto change_config = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json config = nlohmann::json::parse(ReadText(model_dir + "/config.json"));
    config[key] = value;
    WriteText(model_dir + "/config.json", config.dump());
  };
  const auto change_weight = [&] {
    // The embedding of the prompt's last token among those of the first block, far behind 64 KiB.
    int32_t token = 0;
    for (int32_t i = 0; i < kBlockTokens; ++i) token = std::max(token, requests_[0].prompt[i]);
    ASSERT_GT(token, 200);
    std::string bytes = ReadText(model_dir + "/model.safetensors");
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    const auto header = nlohmann::json::parse(bytes.substr(8, length));
    const auto begin =
        header.at("model.embed_tokens.weight").at("data_offsets").at(0).get<uint64_t>();
    for (int64_t i = 0; i < config_.hidden_size; ++i) {
      bytes[8 + length + begin + 2 * (int64_t{token} * config_.hidden_size + i) + 1] ^= 0x80;
    }
    WriteText(model_dir + "/model.safetensors", bytes);
  };
  struct Change {
    const char* what;
    std::function<void(ModelOptions*)> make;
  };
  for (const Change& change :
       {Change{"eps", [&](ModelOptions*) { change_config("rms_norm_eps", 0.5); }},
        Change{"theta", [&](ModelOptions*) { change_config("rope_theta", 1000.0); }},
        Change{"rope scaling",
               [&](ModelOptions*) {
                 change_config("rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}});
               }},
        Change{"weight", [&](ModelOptions*) { change_weight(); }},
        Change{"KV type", [](ModelOptions* o) { o->kv_dtype = "f32"; }},
        Change{"KV in int8", [](ModelOptions* o) { o->kv_dtype = "int8"; }},
        Change{"KV in fp8, of the same size", [](ModelOptions* o) { o->kv_dtype = "fp8"; }},
        Change{"block", [](ModelOptions* o) { o->block_tokens = 32; }},
        Change{"instruction set", [](ModelOptions* o) { o->isa = "scalar"; }}}) {
    SCOPED_TRACE(change.what);
    if (change.what == std::string("instruction set") &&
        kernels::MakeCpuBackend("avx2", 1) == nullptr) {
      continue;  // there is but one here
    }
    copy_model();
    ModelOptions changed = options;
    change.make(&changed);
    ModelOptions alone = changed;
    alone.tiers = {};
    const std::vector<Reply> expected = Answers(*Load(alone, model_dir));
    const std::vector<Reply> replies = Answers(*Load(changed, model_dir), true);
    EXPECT_EQ(cached_tokens_, 0u);
    EXPECT_EQ(replies[0].tokens, expected[0].tokens);
  }
}

// SHA-256 does not collide; a function that has eight values does all the time, among tenants, policies, places in a text.
TEST_F(PrefixTest, BlocksWhoseHashesCollideAreNotTakenForEachOther) {
  chain_next_ = [](const Digest& parent, std::span<const int32_t> tokens, std::string_view how) {
    Digest few = {};
    few[0] = ChainNext(parent, tokens, how)[0] % 8;
    return few;
  };
  ModelOptions in_memory = Options();
  in_memory.kv_dtype = "bf16";
  in_memory.kv_bytes = FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
  ModelOptions on_disk = Tiered();
  on_disk.tiers.disk_bytes = 256 << 20;
  on_disk.tiers.store_dir = directory_.File("collisions");
  for (const ModelOptions& options : {in_memory, on_disk, on_disk}) {  // the last: after a restart
    ExpectEqual(Answers(*Load(options), /*prefix_cache=*/true));
  }
  // And some are still found: those of the first text that came.
  EXPECT_GT(cached_tokens_, 0u);
}

TEST_F(PrefixTest, WhatIsNotToBeKeptIsNotInTheStore) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("private");
  for (Request& request : requests_) {
    request.salt = CallSalt(1);
    request.keeps_prefix = false;
  }
  ExpectEqual(Answers(*Load(options), true));
  const auto model = Load(options);
  EXPECT_EQ(model->store.store->TenantBytes(CallSalt(1)), 0u);
  Answers(*model, true);
}

TEST_F(PrefixTest, APrefixOutlivesTheProcessAndGivesTheSameTokens) {
  for (const char* io : {"threads", "auto"}) {
    SCOPED_TRACE(io);
    eager_share_ = io == std::string("auto") ? 1 : 0;
    ModelOptions options = Tiered();
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File(io);
    options.tiers.io = io;
    {
      const auto model = Load(options);
      const std::vector<Reply> replies = Answers(*model, true);
      ExpectEqual(replies);
      ExpectNoLosses(*model);
    }
    const auto model = Load(options);
    // One request: all it takes over comes from the directory.
    const std::vector<Request> all = requests_;
    for (size_t i = 0; i < all.size(); i += 7) {
      requests_ = {all[i]};
      const Reply expected = Expected()[i];
      const std::vector<Reply> replies = Answers(*model, true);
      EXPECT_GE(cached_tokens_ + kBlockTokens + 100, all[i].prompt.size())
          << ToString(all[i].policy);
      EXPECT_EQ(replies[0].tokens, expected.tokens) << ToString(all[i].policy) << " seed " << seed_;
      ExpectNoLosses(*model);
    }
    requests_ = all;
  }
}

TEST_F(PrefixTest, ADamagedStoreCostsComputationAndNoToken) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 128 << 20;
  // Faults are drawn: once in a hundred times or so none of them costs anything.
  uint64_t lost_pieces = 0;
  for (int attempt = 0; attempt < 20 && lost_pieces == 0; ++attempt) {
    storage::FaultyStore* faulty = nullptr;
    const auto model = LoadOver(&faulty, options);
    for (int round = 0; round < 2; ++round) {
      faulty->faults = {.miss_share = 0.0001, .lose_share = 0.003, .polls_max = 2, .reorder = true};
      const std::vector<Reply> replies = Answers(*model, true);
      EXPECT_GT(cached_tokens_, 0u);
      ExpectEqual(replies);
    }
    lost_pieces = model->decoder->kv_memory()->stats().lost_pieces;
  }
  EXPECT_GT(lost_pieces, 0u);
}

// Every block of a prefix damaged, and each found only when it is read.
TEST_F(PrefixTest, ADirectoryDamagedAllOverCostsComputationAndNoToken) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  Answers(*Load(options), true);
  EXPECT_GT(DamageAllOver(options.tiers.store_dir), 100);
  const auto model = Load(options);
  const std::vector<Reply> replies = Answers(*model, true);
  EXPECT_GT(losses_, 8u / kFewer);
  ExpectEqual(replies);
}

// What a summary holds must not be attended to exactly as well: one that was kept under a narrow window
// reaches into a wide one, and one of single tokens into the page that quest reads with its window.
TEST_F(PrefixTest, ASummaryThatReachesIntoTheWindowIsMadeAnew) {
  std::vector<int32_t> text(400);
  for (int32_t& token : text) token = static_cast<int32_t>(random_() % config_.vocab_size);
  const auto ask = [&](const char* policy, int questions) {
    requests_.clear();
    for (int i = 0; i < questions; ++i) {
      std::vector<int32_t> prompt = text;
      for (int j = 0; j < 20; ++j) {
        prompt.push_back(static_cast<int32_t>(random_() % config_.vocab_size));
      }
      Request request = MakeRequest(i + 1, std::move(prompt), 12);
      request.policy = *ParseAttentionPolicy(policy);
      requests_.push_back(std::move(request));
    }
    expected_.clear();
  };
  for (const char* later : {"spotlight:k=2,window=150,completion=on,suffix=30",
                            "quest:k=16,window=12,completion=on,suffix=30"}) {
    SCOPED_TRACE(later);
    ModelOptions options = Tiered();
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File(later);
    ask("spotlight:k=2,window=9,completion=on,suffix=30", 1);
    ExpectEqual(Answers(*Load(options), true));
    const auto model = Load(options);
    ask(later, 4);
    const std::vector<Reply> replies = Answers(*model, true);
    EXPECT_GT(cached_tokens_, 300u);
    ExpectEqual(replies);
  }
}

// A bad sector: reads of one block fail for ever. Whoever loses it twice has it written anew, or every
// request about this text would be computed in vain.
TEST_F(PrefixTest, ABlockThatCannotBeReadIsWrittenAnew) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 128 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  requests_.resize(1);
  requests_[0].policy = {};  // reads all that it takes over
  // All that is put is of the prompt, and taken over; it is more than there are frames.
  requests_[0].prompt = Prompt(kContext - 20, 1);
  requests_[0].stopping.max_tokens = 1;
  ExpectEqual(Answers(*model, true));
  ASSERT_FALSE(faulty->put.empty());
  for (const auto& key : faulty->put) {
    if (key[32] == 0 && key[36] == 3) faulty->unreadable = {key};  // KV of layer 3
  }
  ASSERT_EQ(faulty->unreadable.size(), 1u);
  ExpectEqual(Answers(*model, true));
  EXPECT_GT(losses_, 0u);
  EXPECT_TRUE(faulty->unreadable.empty());
  for (int again = 0; again < 2; ++again) {
    ExpectEqual(Answers(*model, true));
    EXPECT_EQ(losses_, 0u);
  }
  EXPECT_GT(cached_tokens_, 0u);
}

// Whoever loses a block takes it from those who would find it: what is lost for one is lost for all.
TEST_F(PrefixTest, ABlockThatWasLostIsNotFoundByThoseWhoComeLater) {
  ModelOptions options = Tiered();
  options.tiers.host_bytes = 128 << 20;
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, options);
  FakeClock clock;
  EngineOptions engine_options;
  engine_options.max_running = kv_tiers::kRunning;
  engine_options.step_tokens = kv_tiers::kStepTokens;
  engine_options.eager_share = 0;
  const auto engine = MakeEngine(engine_options, *model->decoder, clock);
  // Dense, about text 1 or 2: a text alone has more pieces than there are frames.
  RequestId id = 0;
  const auto ask = [&](int text) {
    Client client;
    EXPECT_TRUE(
        engine->Submit(MakeRequest(++id, Prompt(kContext - 20, text), 4), client.output).ok());
    StepUntilIdle(*engine);
    return client.Read();
  };
  const Reply expected = ask(1);
  ask(2);  // takes the frames of text 1
  for (const auto& key : faulty->put) {
    if (key[32] == 0 && key[36] == 3) faulty->unreadable.insert(key);  // KV of layer 3
  }
  ASSERT_FALSE(faulty->unreadable.empty());
  EXPECT_EQ(ask(1).tokens, expected.tokens);
  const uint64_t losses = engine->stats().kv_losses;
  EXPECT_GT(losses, 0u);
  for (int again = 0; again < 2; ++again) {
    const uint64_t cached = engine->stats().cached_tokens;
    EXPECT_EQ(ask(1).tokens, expected.tokens);
    EXPECT_EQ(engine->stats().kv_losses, losses);
    EXPECT_EQ(engine->stats().cached_tokens > cached, again > 0);
  }
}

// A block that is given to other content has nothing of an index of what it held before.
TEST_F(PrefixTest, AnIndexOfWhatABlockHeldBeforeIsNotUsed) {
  requests_.clear();
  // Room for one at a time, of full blocks alone: each takes those of the ones before.
  const int32_t length = kContext - kBlockTokens;
  const char* const lsh = "lsh:k=9,window=9,dense_layers=0,suffix=60,from=0";
  for (const auto& [text, policy, tokens] :
       {std::tuple(1, lsh, 1), std::tuple(2, lsh, 1), std::tuple(3, lsh, 1), std::tuple(4, lsh, 1),
        std::tuple(5, "dense", 1), std::tuple(5, lsh, 16)}) {
    std::mt19937 random(text);
    std::vector<int32_t> prompt(length);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % config_.vocab_size);
    Request request = MakeRequest(requests_.size() + 1, std::move(prompt), tokens);
    request.policy = *ParseAttentionPolicy(policy);
    request.top_logprobs = 0;
    requests_.push_back(std::move(request));
  }
  ModelOptions options = Options();
  options.kv_dtype = "bf16";
  options.kv_bytes = FrameBytes(config_) * config_.num_layers() * (kContext / kBlockTokens);
  const std::vector<Reply> replies = Answers(*Load(options), /*prefix_cache=*/true);
  EXPECT_GT(cached_tokens_, length / 2) << "the last takes over what the one before computed";
  ExpectEqual(replies);
  // Tokens of noise may be the same with other rows chosen; their probabilities are not.
  const std::vector<OutputToken>& got = replies.back().details;
  const std::vector<OutputToken>& want = Expected().back().details;
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].logprob, want[i].logprob) << i;
}

TEST_F(PrefixTest, TokensThatWereLostAndComputedAgainAreNotCachedOnes) {
  ModelOptions options = Tiered();
  options.tiers.disk_bytes = 256 << 20;
  options.tiers.store_dir = directory_.File("store");
  for (Request& request : requests_) request.policy = {};  // dense: reads all that it takes over
  Answers(*Load(options), true);
  EXPECT_GT(DamageAllOver(options.tiers.store_dir), 100);
  const auto model = Load(options);
  requests_.resize(1);
  const std::vector<Reply> replies = Answers(*model, true);
  EXPECT_GT(losses_, 0u);
  EXPECT_GT(cached_tokens_, 0u) << "taken over at first";
  EXPECT_EQ(replies[0].last.usage.cached_tokens, 0);
}

}  // namespace
}  // namespace winnow::engine
