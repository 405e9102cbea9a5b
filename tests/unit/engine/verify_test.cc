// Answers under verified policies are those of dense attention, bit for bit, whatever drafts them and
// wherever KV lies. engine_random_test.cc shows the same of what happens around it on a model of hashes.
#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "engine/grammar/grammar.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sample.h"
#include "tests/unit/engine/kv_tiers_testing.h"

namespace winnow::engine {
namespace {

using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::kFewer;
using kv_tiers::KvTiersTest;
using kv_tiers::Load;
using ::testing::HasSubstr;

// Which quarter of the vocabulary may come next depends on every token so far, so that a state that took one token more or
// less, or in another order, allows others. An end token may come now and then.
class HashGrammar final : public Grammar {
 public:
  static constexpr int32_t kEndToken = 1;
  explicit HashGrammar(int32_t vocab) : vocab_(vocab) {}
  std::unique_ptr<GrammarState> NewState() const override {
    return std::make_unique<State>(vocab_, 7);
  }
  size_t size_bytes() const override { return 1; }

 private:
  static uint64_t Mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  class State final : public GrammarState {
   public:
    State(int32_t vocab, uint64_t hash) : words_(kernels::AllowedWords(vocab)), hash_(hash) {}
    std::span<const uint32_t> AllowedTokens() override {
      for (size_t i = 0; i < words_.size(); ++i) {
        words_[i] = static_cast<uint32_t>(Mix(hash_ + i)) & static_cast<uint32_t>(Mix(hash_ - i));
      }
      words_[0] &= ~(1u << kEndToken);
      words_[0] |= static_cast<uint32_t>(hash_ % 8 == 0) << kEndToken;
      return words_;
    }
    bool Accept(int32_t token) override {
      if (!kernels::IsAllowed(AllowedTokens(), token)) return false;
      hash_ = Mix(hash_ * 31 + static_cast<uint64_t>(token) + 1);
      return true;
    }
    std::unique_ptr<GrammarState> Clone() const override { return std::make_unique<State>(*this); }

   private:
    std::vector<uint32_t> words_;
    uint64_t hash_;
  };
  const int32_t vocab_;
};

class VerifyTest : public KvTiersTest {
 protected:
  VerifyTest() {
    constexpr std::array<const char*, 11> kDrafts = {"window:sink=2,window=20",
                                                     "oracle:k=9,window=9",
                                                     "quest:k=16,window=9",
                                                     "lsh:k=9,window=9",
                                                     "lsh:k=9,p=0.9,window=9,dense_layers=0",
                                                     "hata:k=6,window=9",
                                                     "spotlight:k=50%,window=9",
                                                     "pca:k=5%,window=9",
                                                     "pca:k=3%,window=20,sink=3,tail=off",
                                                     "dense:lookup=on",
                                                     "pca:k=5%,window=9,lookup=on"};
    requests_.clear();
    for (size_t i = 0; i < 22 / kFewer; ++i) {
      std::vector<int32_t> prompt(100 + random_() % 400);
      for (int32_t& token : prompt) token = static_cast<int32_t>(random_() % config_.vocab_size);
      Request request = MakeRequest(i + 1, std::move(prompt), 1 + random_() % 60);
      request.tenant = i % 3 == 0 ? "a" : "b";
      const std::string draft = kDrafts[i % kDrafts.size()];
      constexpr std::array<const char*, 6> kLengths = {"1", "3", "8", "8", "64", "auto"};
      auto policy =
          ParseAttentionPolicy(draft + ",verify=" + kLengths[random_() % kLengths.size()]);
      EXPECT_TRUE(policy.ok()) << policy.status();
      request.policy = *policy;
      if (random_() % 3 != 0) {
        request.sampling.temperature = static_cast<float>(random_() % 12) / 10;
        request.sampling.seed = random_();
      }
      if (random_() % 3 == 0) request.sampling.repetition_penalty = 1.2f;
      if (random_() % 3 == 0) request.sampling.frequency_penalty = 0.3f;
      if (random_() % 2 == 0) request.top_logprobs = static_cast<int32_t>(random_() % 4);
      if (random_() % 3 == 0) {
        request.stopping.stop_token_ids = {static_cast<int32_t>(random_() % config_.vocab_size)};
        request.stopping.min_tokens = std::min(3, request.stopping.max_tokens);
      }
      if (random_() % 3 == 0) request.stopping.stop_strings = {"e", "7 "};
      const bool is_certain = i == 0 || i == 1 || i == 6;
      if (is_certain) {
        // Answers that surely are long enough, also where a sanitizer leaves few: one whose drafts are mostly wrong, because
        // a penalty keeps it from repeating what any draft foresees; one with a grammar; one whose drafts nearly all hold.
        request.policy = *ParseAttentionPolicy(draft + (i == 6 ? ",verify=1" : ",verify=8"));
        request.sampling = {};
        if (i == 0) request.sampling.frequency_penalty = 2;
        request.stopping = {};
        request.stopping.max_tokens = 60;
      }
      if (is_certain ? i == 1 : random_() % 3 == 0) {
        request.grammar = std::make_shared<HashGrammar>(config_.vocab_size);
        request.stopping.min_tokens = 0;
        request.stopping.stop_token_ids.push_back(HashGrammar::kEndToken);
      }
      requests_.push_back(std::move(request));
    }
  }

  static ModelOptions WithRowsToVerify(ModelOptions options) {
    options.max_sequences = kv_tiers::kRunning;
    options.max_batch_logits = kv_tiers::kRunning + 32;
    return options;
  }

  // KV in memory, and no policy.
  const std::vector<Reply>& Dense() {
    if (!dense_.empty()) return dense_;
    const std::vector<Request> verified = requests_;
    for (Request& request : requests_) request.policy = {};
    ModelOptions options = kv_tiers::Options();
    options.kv_dtype = "bf16";
    options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
    dense_ = Answers(*Load(options));
    requests_ = verified;
    return dense_;
  }

  void ExpectDense(const std::vector<Reply>& replies) {
    ASSERT_EQ(replies.size(), Dense().size());
    for (size_t i = 0; i < replies.size(); ++i) {
      SCOPED_TRACE(ToString(requests_[i].policy) + ", prompt " +
                   std::to_string(requests_[i].prompt.size()) + ", seed " + std::to_string(seed_));
      const Reply& reply = replies[i];
      const Reply& dense = Dense()[i];
      EXPECT_EQ(reply.last.finish, dense.last.finish) << reply.last.error;
      EXPECT_EQ(reply.tokens, dense.tokens);
      EXPECT_EQ(reply.text, dense.text);
      EXPECT_EQ(reply.last.stop_match, dense.last.stop_match);
      ASSERT_EQ(reply.details.size(), dense.details.size());
      for (size_t t = 0; t < reply.details.size(); ++t) {
        EXPECT_EQ(reply.details[t].logprob, dense.details[t].logprob);
        ASSERT_EQ(reply.details[t].top.size(), dense.details[t].top.size());
        for (size_t j = 0; j < reply.details[t].top.size(); ++j) {
          EXPECT_EQ(reply.details[t].top[j].token, dense.details[t].top[j].token);
          EXPECT_EQ(reply.details[t].top[j].logprob, dense.details[t].top[j].logprob);
        }
      }
      EXPECT_EQ(reply.last.usage.kv_dense_bytes, dense.last.usage.kv_dense_bytes);
      ExpectReads(reply.last.usage);
      drafts_ += reply.last.usage.drafts;
      if (requests_[i].grammar != nullptr) grammar_drafts_ += reply.last.usage.drafts;
    }
  }

  // Drafts and verifications have their share of every tier's reads, and nothing is read for none.
  static void ExpectReads(const Usage& usage) {
    const KvReads& drafts = usage.drafts.draft_reads;
    const KvReads& verifications = usage.drafts.verify_reads;
    EXPECT_LE(drafts.fast + verifications.fast, usage.kv_read_bytes_fast);
    EXPECT_LE(drafts.host + verifications.host, usage.kv_read_bytes_host);
    EXPECT_LE(drafts.disk + verifications.disk, usage.kv_read_bytes_disk);
    EXPECT_EQ(verifications.fast > 0, usage.drafts.verifications > 0);
    if (usage.drafts.drafted == 0) {
      EXPECT_EQ(drafts.fast, 0u);
    }
  }

  // Else equality shows nothing.
  void ExpectDraftsOfBothKinds() const {
    EXPECT_GT(drafts_.accepted, 60u / kFewer);
    EXPECT_GT(drafts_.verified, drafts_.accepted + 60u / kFewer);
    EXPECT_GT(drafts_.verifications, 60u / kFewer);
    EXPECT_GT(grammar_drafts_.verified, 0u);
  }

  std::vector<Reply> dense_;
  DraftCounts drafts_, grammar_drafts_;
};

TEST_F(VerifyTest, AnswersAreThoseOfDenseAttention) {
  ModelOptions options = WithRowsToVerify(kv_tiers::Options());
  options.kv_dtype = "bf16";
  options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
  const auto model = Load(options);
  ExpectDense(Answers(*model));
  ExpectDraftsOfBothKinds();
}

// Draft weights leave answers as they are, with KV in memory and in tiers, also where drafts are often wrong.
TEST_F(VerifyTest, DraftWeightsDoNotShow) {
  for (const char* form : {"int8", "int4"}) {
    for (const bool tiered : {false, true}) {
      SCOPED_TRACE(std::string(form) + (tiered ? ", host" : ", memory"));
      ModelOptions options = WithRowsToVerify(tiered ? Tiered() : kv_tiers::Options());
      if (tiered) {
        options.tiers.host_bytes = 64 << 20;
      } else {
        options.kv_dtype = "bf16";
        options.kv_bytes =
            FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
      }
      options.draft_weights = form;
      const std::vector<Request> requests = requests_;
      for (Request& request : requests_) {
        // Dense attention drafts, too, where its drafts are cheaper.
        if (request.policy.IsDense()) request.policy.lookup = false;
      }
      const auto model = Load(options);
      const std::vector<Reply> replies = Answers(*model);
      ExpectDense(replies);
      for (size_t i = 0; i < replies.size(); ++i) {
        const Usage& usage = replies[i].last.usage;
        if (!requests_[i].policy.IsDense() || usage.generated_tokens < 10) continue;
        EXPECT_GT(usage.drafts.drafted, 0u) << ToString(requests_[i].policy);
      }
      requests_ = requests;
    }
  }
  ExpectDraftsOfBothKinds();
}

TEST_F(VerifyTest, TiersDoNotShow) {
  for (const bool disk : {false, true}) {
    SCOPED_TRACE(disk ? "disk" : "host");
    ModelOptions options = WithRowsToVerify(Tiered());
    (disk ? options.tiers.disk_bytes : options.tiers.host_bytes) = 64 << 20;
    if (disk) options.tiers.store_dir = directory_.File("store");
    {
      const auto model = Load(options);
      ExpectDense(Answers(*model, /*prefix_cache=*/true));
      ExpectNoLosses(*model);
      EXPECT_GT(model->decoder->kv_memory()->stats().evicted_frames, 0u);
    }
    if (!disk) continue;
    // What the store kept of verified answers is what dense attention would have left.
    const auto again = Load(options);
    ExpectDense(Answers(*again, /*prefix_cache=*/true));
    EXPECT_GT(cached_tokens_, 1000u / kFewer);
    ExpectNoLosses(*again);
  }
  ExpectDraftsOfBothKinds();
}

// Traces of a draft in codes, bounds and tables can change no token, but later drafts would be worse for
// it. After a draft of quite other tokens and its verification a query under the policy gets the
// logits that it gets where nothing was drafted.
TEST_F(VerifyTest, NothingOfADraftIsLeftInAnIndex) {
  ModelOptions options = WithRowsToVerify(kv_tiers::Options());
  options.kv_dtype = "bf16";
  options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 3 * (kContext / kBlockTokens);
  options.draft_weights = "int4";
  const auto model = Load(options);
  Decoder& decoder = *model->decoder;
  constexpr int32_t kDrafted = 30;
  // A draft from here on passes a border of the tables (64 tokens), two pages and a block.
  constexpr int32_t kPosition = 240;
  constexpr int32_t kEnd = 400;
  const auto random_tokens = [&](int32_t count) {
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random_() % config_.vocab_size);
    return tokens;
  };
  const std::vector<int32_t> tokens = random_tokens(kEnd + 1);
  const std::vector<int32_t> wrong = random_tokens(kDrafted);
  std::vector<int32_t> blocks(kContext / kBlockTokens);
  std::vector<float> logits(static_cast<size_t>(decoder.max_batch_logits()) * config_.vocab_size);
  for (const char* text :
       {"pca:k=4,window=4", "pca:k=1,sink=1,window=1,dense_layers=0", "pca:k=4,window=4,tail=off",
        "lsh:k=4,window=4", "quest:k=16,window=4", "lsh:k=4,p=0.8,window=4", "hata:k=4,window=4"}) {
    SCOPED_TRACE(std::string(text) + ", seed " + std::to_string(seed_));
    const AttentionPolicy policy = *ParseAttentionPolicy(text);
    const auto run = [&](bool drafts, bool draft_weights, int32_t first_block) {
      std::iota(blocks.begin(), blocks.end(), first_block);
      const std::unique_ptr<RetrievalState> state = *decoder.NewRetrievalState(policy);
      const auto forward = [&](std::span<const int32_t> some, int32_t position, int32_t from,
                               int32_t settled) {
        const Batch batch{.chunks = {{.tokens = some,
                                      .position = position,
                                      .block_table = blocks,
                                      .num_logits = 1,
                                      .retrieval = state.get(),
                                      .retrieve_from = from,
                                      .settled = settled}},
                          .drafts = draft_weights && from == position && settled < kEnd};
        EXPECT_TRUE(decoder.Forward(batch, logits).ok());
      };
      constexpr int32_t kNever = std::numeric_limits<int32_t>::max();
      for (int32_t at = 0; at < kEnd;) {
        if (drafts && at == kPosition) {
          for (int32_t i = 0; i < kDrafted; ++i) {
            forward(std::span(wrong).subspan(i, 1), at + i, at + i, at);
          }
          forward(std::span(tokens).subspan(at, kDrafted + 1), at, kNever, at);
          at += kDrafted + 1;
          state->Rewind(at);
          continue;
        }
        const int32_t end = at < kPosition ? kPosition : kEnd;
        const int32_t count = std::min(end - at, kv_tiers::kStepTokens);
        forward(std::span(tokens).subspan(at, count), at, kNever, kNever);
        at += count;
      }
      forward(std::span(tokens).subspan(kEnd, 1), kEnd, kEnd, kEnd);
      return std::vector<float>(logits.begin(), logits.begin() + config_.vocab_size);
    };
    const std::vector<float> alone = run(/*drafts=*/false, /*draft_weights=*/false, 0);
    EXPECT_EQ(run(/*drafts=*/true, /*draft_weights=*/false, kContext / kBlockTokens), alone);
    EXPECT_EQ(run(/*drafts=*/true, /*draft_weights=*/true, 2 * kContext / kBlockTokens), alone);
  }
}

// One request whose drafts all have their full length: every byte is of a draft, of its verification, or of a token that
// was decoded densely, and each can be counted by hand.
TEST_F(VerifyTest, ReadsOfDraftsAndVerificationsAddUp) {
  for (const bool tiered : {false, true}) {
    SCOPED_TRACE(tiered ? "host" : "memory");
    ModelOptions options = WithRowsToVerify(tiered ? Tiered() : kv_tiers::Options());
    if (tiered) {
      options.tiers.host_bytes = 64 << 20;
    } else {
      options.kv_dtype = "bf16";
      options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 8 * (kContext / kBlockTokens);
    }
    const auto model = Load(options);
    const uint64_t token_bytes =
        model->decoder->KvRowsSeen(0, 1) * static_cast<uint64_t>(model->decoder->kv_row_bytes());
    constexpr int32_t kPrompt = 300, kTokens = 41;
    Request request = MakeRequest(1, requests_[0].prompt, kTokens);
    request.prompt.resize(kPrompt, 7);
    request.policy =
        *ParseAttentionPolicy("window:sink=2,window=20,dense_layers=0,from=0,verify=3");
    requests_ = {request};
    const std::vector<Reply> replies = Answers(*model);
    const Usage& usage = replies[0].last.usage;
    const DraftCounts& drafts = usage.drafts;
    ASSERT_GT(drafts.verifications, 0u);
    // 22 tokens of every layer for a drafted one; a verification reads what its last row sees.
    EXPECT_EQ(drafts.draft_reads.fast, drafts.drafted * 22 * token_bytes);
    EXPECT_GE(drafts.verify_reads.fast, drafts.verifications * (kPrompt + 1) * token_bytes);
    EXPECT_LE(drafts.verify_reads.fast, drafts.verifications * (kPrompt + kTokens) * token_bytes);
    // Tokens that no verification brought are the last ones, where there is no room for a draft.
    const uint64_t decoded = kTokens - 1 - drafts.accepted - drafts.verifications;
    const uint64_t dense =
        usage.kv_read_bytes_fast - drafts.draft_reads.fast - drafts.verify_reads.fast;
    EXPECT_LE(decoded, 1u);
    EXPECT_EQ(dense > 0, decoded > 0);
    EXPECT_LE(dense, decoded * (kPrompt + kTokens) * token_bytes);
    const uint64_t below = drafts.draft_reads.host + drafts.verify_reads.host;
    EXPECT_LE(below, usage.kv_read_bytes_host);
    EXPECT_EQ(drafts.verify_reads.host > 0, tiered);
    EXPECT_EQ(usage.kv_read_bytes_disk, 0u);
  }
}

TEST_F(VerifyTest, WithoutRowsToVerifyItIsRefusedByName) {
  ModelOptions options = kv_tiers::Options();
  options.kv_bytes = FrameBytes(config_) * config_.num_layers() * 2 * (kContext / kBlockTokens);
  const auto model = Load(options);
  FakeClock clock;
  const auto engine =
      MakeEngine({.max_running = kv_tiers::kRunning, .step_tokens = kv_tiers::kStepTokens},
                 *model->decoder, clock);
  Client client;
  const absl::Status status = engine->Submit(requests_[0], client.output);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'verify' needs more rows in a step"));
}

}  // namespace
}  // namespace winnow::engine
