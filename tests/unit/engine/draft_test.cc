#include "engine/schedule/draft.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

using ::testing::ElementsAre;

std::vector<kernels::SampledToken> Drawn(std::initializer_list<int32_t> tokens) {
  std::vector<kernels::SampledToken> drawn;
  for (const int32_t token : tokens) {
    kernels::SampledToken& last = drawn.emplace_back();
    last.status = kernels::SampleStatus::kOk;
    last.token = token;
  }
  return drawn;
}

Draft Drafted(std::initializer_list<int32_t> tokens) {
  Draft draft;
  draft.Begin(10, 7, 64);
  for (const int32_t token : tokens) draft.Add(token);
  return draft;
}

TEST(DraftTest, DraftsOneByOneAndIsVerifiedTogether) {
  Draft draft;
  EXPECT_FALSE(draft.active());
  draft.Begin(10, 7, 2);
  const std::vector<int32_t> blocks = {3};
  for (const int32_t token : {20, 21}) {
    EXPECT_FALSE(draft.verifies());
    const SequenceChunk chunk = draft.Chunk(1, blocks, nullptr);
    EXPECT_EQ(chunk.position, 10 + draft.num_drafted());
    EXPECT_EQ(chunk.num_logits, 1);
    EXPECT_LE(chunk.retrieve_from, chunk.position);
    EXPECT_EQ(chunk.settled, 10);
    EXPECT_EQ(draft.known_tokens() - draft.computed_tokens(), 1);
    draft.Add(token);
  }
  ASSERT_TRUE(draft.verifies());
  EXPECT_EQ(draft.known_tokens() - draft.computed_tokens(), 3);
  const SequenceChunk chunk = draft.Chunk(3, blocks, nullptr);
  EXPECT_THAT(chunk.tokens, ElementsAre(7, 20, 21));
  EXPECT_EQ(chunk.position, 10);
  EXPECT_EQ(chunk.num_logits, 3);
  EXPECT_GT(chunk.retrieve_from, 13);
  EXPECT_EQ(chunk.settled, 10);
  draft.Drop();
  EXPECT_FALSE(draft.active());
  EXPECT_FALSE(draft.verifies());
}

TEST(DraftTest, AcceptsUpToTheFirstTokenThatWasDraftedWrong) {
  const Draft draft = Drafted({20, 21, 22});
  EXPECT_EQ(draft.NumAccepted(Drawn({20, 21, 22, 23})), 4);
  EXPECT_EQ(draft.NumAccepted(Drawn({20, 21, 5, 23})), 3);
  EXPECT_EQ(draft.NumAccepted(Drawn({5, 21, 22, 23})), 1);
  // A part of it was verified.
  EXPECT_EQ(draft.NumAccepted(Drawn({20, 21})), 2);
  EXPECT_EQ(draft.NumAccepted(Drawn({20})), 1);
  // Logits that nothing can be drawn from end the answer, if the tokens before them were right.
  std::vector<kernels::SampledToken> drawn = Drawn({20, 21, 22, 23});
  drawn[1].status = kernels::SampleStatus::kNan;
  EXPECT_EQ(draft.NumAccepted(drawn), 2);
}

TEST(DraftTest, RowsAreDrawnAsThoseOfTheirPlace) {
  Request request;
  request.sampling.temperature = 1;
  request.sampling.repetition_penalty = 1.5f;
  request.sampling.seed = 9;
  request.stopping.max_tokens = 20;
  request.stopping.min_tokens = 7;
  request.stopping.stop_token_ids = {2};
  request.top_logprobs = 3;
  const std::vector<int32_t> prompt = {7};
  TokenHistory history(request.sampling, prompt);
  Draft draft = Drafted({20, 20, 21});
  draft.EndDrafting();
  std::vector<kernels::SampleRow> rows;
  draft.AppendSampleRows(request, history, 5, 4, &rows);
  ASSERT_EQ(rows.size(), 4u);
  for (int32_t i = 0; i < 4; ++i) {
    if (i > 0) history.AddGenerated(draft.tokens()[i]);
    const kernels::SampleRow alone = MakeSampleRow(request, history, 5 + i);
    EXPECT_EQ(rows[i].noise, alone.noise);
    EXPECT_EQ(rows[i].masked.size(), i < 2 ? 1u : 0u);
    EXPECT_EQ(rows[i].masked.size(), alone.masked.size());
    EXPECT_EQ(rows[i].top_logprobs, 3);
    ASSERT_EQ(rows[i].edits.size(), alone.edits.size());
    for (size_t e = 0; e < alone.edits.size(); ++e) {
      EXPECT_EQ(rows[i].edits[e].token, alone.edits[e].token);
      EXPECT_EQ(rows[i].edits[e].generated, alone.edits[e].generated);
    }
  }
}

TEST(DraftTest, LengthIsBoundedByWhatThereIsRoomFor) {
  const DraftRoom room{.answer_tokens = 100, .rows = 64, .block_tokens = 16};
  EXPECT_EQ(room.Length(8), 8);
  EXPECT_EQ(room.Length(64), 64);
  DraftRoom last = room;
  last.answer_tokens = 1;
  EXPECT_EQ(last.Length(8), 0);
  last.answer_tokens = 4;
  EXPECT_EQ(last.Length(8), 3);
  DraftRoom shared = room;
  shared.verifying = 10;
  EXPECT_EQ(shared.Length(8), 6);
  // The last row of KV is that of the last drafted token: of block 1 at most.
  DraftRoom tiers = room;
  tiers.one_block_more = true;
  tiers.position = 15;
  EXPECT_EQ(tiers.Length(64), 16);
  tiers.position = 16;
  EXPECT_EQ(tiers.Length(64), 31);
}

TEST(DraftTest, CountsWhatWasVerified) {
  const Draft draft = Drafted({20, 21, 22});
  DraftCounts counts;
  for (const int32_t taken : {3, 1}) {
    for (int32_t i = 0; i < taken; ++i) counts += draft.CountsOf(4, i);
  }
  counts += draft.CountsOf(1, 0);  // there was no draft
  EXPECT_EQ(counts.verified, 6u);
  EXPECT_EQ(counts.accepted, 2u);
  EXPECT_EQ(counts.verifications, 2u);
  EXPECT_EQ(counts.verified_at[2], 2u);
  EXPECT_EQ(counts.accepted_at[0], 1u);
  EXPECT_EQ(counts.accepted_at[1], 1u);
  EXPECT_EQ(counts.accepted_at[2], 0u);
}

}  // namespace
}  // namespace winnow::engine
