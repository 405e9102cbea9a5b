// Drafts that are computed with weights of their own: what a step makes of them, on a model of hashes, and how options ask for
// them. verify_test.cc has the same of a real decoder.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/model_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/test_paths.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Request Verified(RequestId id, int32_t verify, int32_t max_tokens) {
  Request request = MakeRequest(id, Prompt(20, static_cast<int32_t>(id)), max_tokens);
  request.policy.verify = verify;
  request.sampling.temperature = 0;
  return request;
}

class DraftWeightsTest : public ::testing::Test {
 protected:
  DraftWeightsTest() {
    model_.draft_weights = true;
    model_.wrong_draft_every = 0;
    engine_ = MakeEngine({.max_running = 8, .step_tokens = 200}, model_, clock_);
  }
  void Submit(const Request& request, Client& client) {
    ASSERT_TRUE(engine_->Submit(request, client.output).ok());
  }
  void ExpectAsAlone(Request request, Client& client) {
    request.policy = {};
    EXPECT_EQ(client.Read().tokens, RunAlone(request).tokens);
  }
  // Passes with the answers' weights.
  int64_t passes() const { return model_.num_forwards - model_.draft_passes; }

  FakeClock clock_;
  FakeModel model_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(DraftWeightsTest, DenseAttentionDraftsWithThemAndIsRefusedWithout) {
  Client client;
  const Request request = Verified(1, 4, 41);
  Submit(request, client);
  StepUntilIdle(*engine_);
  ExpectAsAlone(request, client);
  // The first token is the prompt's, then eight rounds of five.
  const DraftCounts& drafts = client.reply.last.usage.drafts;
  EXPECT_EQ(drafts.verifications, 8u);
  EXPECT_EQ(drafts.accepted, 32u);
  EXPECT_EQ(model_.draft_passes, 32);
  EXPECT_EQ(passes(), 9);
  // A draft of dense attention reads all that it sees.
  EXPECT_GT(drafts.draft_reads.fast, drafts.verify_reads.fast);

  model_.draft_weights = false;
  const absl::Status status = engine_->Submit(request, client.output);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(DraftWeightsTest, WrongDraftsChangeNoToken) {
  model_.wrong_draft_every = 2;
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Request> requests;
  for (int32_t i = 1; i <= 8; ++i) {
    requests.push_back(Verified(i, i, 50));
    if (i % 3 == 0) requests.back().policy = {};
    clients.push_back(std::make_unique<Client>());
    Submit(requests.back(), *clients.back());
    engine_->Step();
  }
  StepUntilIdle(*engine_);
  for (size_t i = 0; i < requests.size(); ++i) ExpectAsAlone(requests[i], *clients[i]);
  EXPECT_GT(engine_->stats().drafts.verified, engine_->stats().drafts.accepted + 20);
}

// Two sequences that begin at different steps are verified together; without the wait each would need passes of its own.
TEST_F(DraftWeightsTest, VerificationsWaitForDraftsOfOthers) {
  Client first, second;
  const Request one = Verified(1, 4, 101), other = Verified(2, 4, 101);
  Submit(one, first);
  for (int i = 0; i < 3; ++i) engine_->Step();
  Submit(other, second);
  StepUntilIdle(*engine_);
  ExpectAsAlone(one, first);
  ExpectAsAlone(other, second);
  // 20 rounds each, and two prompts.
  EXPECT_LE(passes(), 25);
}

TEST_F(DraftWeightsTest, NoVerificationWaitsLongerThanItDrafted) {
  Client fast, slow;
  Submit(Verified(1, 2, 60), fast);
  Submit(Verified(2, 64, 200), slow);
  int steps_without = 0;
  for (size_t tokens = 0; !fast.reply.ended(); tokens = fast.Read().tokens.size()) {
    ASSERT_TRUE(engine_->Step());
    steps_without = fast.Read().tokens.size() > tokens ? 0 : steps_without + 1;
    // Two that draft, two that wait, and the next one verifies.
    ASSERT_LE(steps_without, 4);
  }
  StepUntilIdle(*engine_);
  EXPECT_TRUE(slow.Read().ended());
}

// Dense decoding and prompts need a pass with the answers' weights in each step anyway, so verifications need not wait.
TEST_F(DraftWeightsTest, NothingWaitsWhereThePassIsNeededAnyway) {
  Client dense, first, second;
  Request plain = Verified(3, 0, 300);
  Submit(plain, dense);
  Submit(Verified(1, 4, 51), first);
  for (int i = 0; i < 3; ++i) engine_->Step();
  Submit(Verified(2, 4, 51), second);
  int steps = 0;
  while (!first.Read().ended()) {
    ASSERT_TRUE(engine_->Step());
    ++steps;
  }
  // Ten rounds of four steps that draft and one that verifies.
  EXPECT_LE(steps, 50);
  StepUntilIdle(*engine_);
}

// ---- options ----

TEST(DraftWeightsOptions, AreNamedAndRefusedByName) {
  EXPECT_THAT(DraftWeightNames(),
              ElementsAre("none", "stored", "int8", "int4", "fp8", "w8a8", "w4a8"));
  EXPECT_EQ(*ParseDraftWeights("none", WeightStorage::kWide), std::nullopt);
  EXPECT_EQ(*ParseDraftWeights("int4", WeightStorage::kInt8), WeightStorage::kInt4);
  EXPECT_THAT(std::string(ParseDraftWeights("wide", WeightStorage::kWide).status().message()),
              HasSubstr("draft_weights: 'wide' is not one of none, stored,"));
  EXPECT_THAT(std::string(ParseDraftWeights("int8", WeightStorage::kInt8).status().message()),
              HasSubstr("draft_weights is int8, which is what answers have"));
}

TEST(DraftWeightsOptions, TakeMemoryThatIsCountedBeforeItIsTaken) {
  const std::string needle = SourcePath("models/needle-5m");
  ModelOptions options;
  options.num_threads = 1;
  options.max_context = 512;
  const auto without = LoadModel(needle, options);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ((*without)->decoder->draft_weight_bytes(), 0u);
  for (const char* form : {"int8", "int4", "fp8"}) {
    SCOPED_TRACE(form);
    options.draft_weights = form;
    const auto model = LoadModel(needle, options);
    ASSERT_TRUE(model.ok()) << model.status();
    const Decoder& decoder = *(*model)->decoder;
    EXPECT_TRUE(decoder.has_draft_weights());
    EXPECT_EQ(decoder.weight_bytes(), (*without)->decoder->weight_bytes());
    const int64_t counted = KeptWeightBytes(options, (*model)->decoder_options, (*model)->weights) -
                            KeptWeightBytes({}, (*without)->decoder_options, (*without)->weights);
    EXPECT_GT(decoder.draft_weight_bytes(), 0.9 * static_cast<double>(counted));
    EXPECT_LE(decoder.draft_weight_bytes(), 1.1 * static_cast<double>(counted));
  }
  options.draft_weights = "stored";
  const auto stored = LoadModel(needle, options);
  EXPECT_EQ(stored.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(stored.status().message()),
              HasSubstr("draft_weights is stored: this model's file has no quantised weights"));
}

}  // namespace
}  // namespace winnow::engine
