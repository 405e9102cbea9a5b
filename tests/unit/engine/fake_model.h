// A model that shows every mistake with the KV cache in its text.
//
// Its KV of a token is a number made of the token, its position and the KV of the token before,
// read back through the block table. Its logits are made of all numbers read back from position 0
// on. So a block that is lost, stale, misplaced or shared by two sequences changes every token
// after it; and nothing else does: not the batch, not the sizes of chunks, not which blocks are
// used.
#ifndef WINNOW_TESTS_UNIT_ENGINE_FAKE_MODEL_H_
#define WINNOW_TESTS_UNIT_ENGINE_FAKE_MODEL_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "engine/model.h"
#include "gtest/gtest.h"

namespace winnow::engine {

struct FakeModelShape {
  int32_t vocab_size = 300;
  int32_t max_context = 400;
  int32_t block_tokens = 4;
  int32_t num_blocks = 200;
  int32_t max_batch_tokens = 512;
  int32_t max_batch_logits = 64;
};

class FakeModel final : public Model {
 public:
  explicit FakeModel(const FakeModelShape& shape = {})
      : shape_(shape),
        kv_(static_cast<size_t>(shape.num_blocks) * shape.block_tokens, 0xDEADBEEF) {}

  int32_t vocab_size() const override { return shape_.vocab_size; }
  int32_t max_context() const override { return shape_.max_context; }
  int32_t block_tokens() const override { return shape_.block_tokens; }
  int32_t num_blocks() const override { return shape_.num_blocks; }
  int32_t max_batch_tokens() const override { return shape_.max_batch_tokens; }
  int32_t max_batch_logits() const override { return shape_.max_batch_logits; }
  uint64_t KvRowsSeen(int32_t position, int32_t num_queries) const override {
    return 6 * (uint64_t{static_cast<uint32_t>(position)} + num_queries);  // 3 layers x 2 KV heads
  }
  int64_t kv_row_bytes() const override { return 256; }

  absl::Status CheckPolicy(const AttentionPolicy& policy) const override {
    if (policy.IsDense() && policy.IsVerified() && !policy.lookup && !draft_weights) {
      return absl::InvalidArgumentError("verify: dense drafts nothing");
    }
    return policy.completion ? absl::InvalidArgumentError("completion: no artifact")
                             : absl::OkStatus();
  }
  bool has_draft_weights() const override { return draft_weights; }
  absl::StatusOr<std::unique_ptr<RetrievalState>> NewRetrievalState(
      const AttentionPolicy& policy) override {
    return std::make_unique<RetrievalState>(policy, std::vector<bool>(3, true));
  }
  absl::Status ResumeRetrieval(RetrievalState&) override { return absl::OkStatus(); }

  absl::Status Forward(const Batch& batch, std::span<float> logits) override {
    EXPECT_LE(batch.num_logits(), shape_.max_batch_logits);
    return Compute(batch, logits);
  }

  absl::Status Sample(const Batch& batch, std::span<const kernels::SampleRow> rows,
                      std::span<kernels::SampledToken> sampled) override {
    const auto width = static_cast<size_t>(shape_.vocab_size);
    logits_.resize(static_cast<size_t>(batch.num_logits()) * width);
    EXPECT_EQ(rows.size(), static_cast<size_t>(batch.num_logits()));
    if (absl::Status status = Compute(batch, logits_); !status.ok()) return status;
    for (size_t i = 0; i < rows.size(); ++i) {
      kernels::CheckSampleRow(rows[i], shape_.vocab_size);
      sampled[i] = kernels::SampleRef(std::span(logits_).subspan(i * width, width), rows[i]);
    }
    return absl::OkStatus();
  }

  // Drafts (chunks whose KV is not settled and that retrieve, or have weights of their own): one position in so many gets other logits
  // than from dense attention. 0: none. Whatever this says, KV that a draft wrote is of no use to others.
  int32_t wrong_draft_every = 4;
  int64_t drafted = 0;
  // Drafts have weights of their own: they come in batches of their own, and from dense attention, too.
  bool draft_weights = false;
  int64_t draft_passes = 0;  // with these
  // From this Forward on (the first is 1), every one fails.
  std::optional<int64_t> fail_at_forward;
  // A row of logits after this token is NaN.
  std::optional<int32_t> nan_after_token;
  // What happens while the model computes: time passes, say.
  std::function<void()> on_forward;
  int64_t num_forwards = 0;

 private:
  absl::Status Compute(const Batch& batch, std::span<float> logits) {
    ++num_forwards;
    if (on_forward) on_forward();
    if (fail_at_forward.has_value() && num_forwards >= *fail_at_forward) {
      return absl::InternalError("the device fell off the bus");
    }
    CheckBatch(batch, logits);
    draft_passes += batch.drafts ? 1 : 0;
    size_t row = 0;
    for (const SequenceChunk& chunk : batch.chunks) {
      EXPECT_EQ(batch.drafts, draft_weights && IsDraft(chunk));
      const auto count = static_cast<int32_t>(chunk.tokens.size());
      for (int32_t i = 0; i < count; ++i) {
        const int32_t position = chunk.position + i;
        const uint64_t before =
            position == 0 ? 1 : Kv(chunk, position - 1) ^ MarkAt(chunk, position - 1);
        Kv(chunk, position) = Mix(before ^ Mix(chunk.tokens[i]) ^ Mix(position + 1'000'000)) ^
                              MarkAt(chunk, position);
        if (i >= count - chunk.num_logits) {
          Fill(chunk, position, logits.subspan(row++ * shape_.vocab_size, shape_.vocab_size));
        }
      }
    }
    return absl::OkStatus();
  }

  static uint64_t Mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  bool IsDraft(const SequenceChunk& chunk) const {
    return (draft_weights || chunk.retrieval != nullptr) && chunk.retrieve_from <= chunk.position &&
           chunk.settled <= chunk.position;
  }
  // What a draft's KV is written and read with.
  uint64_t MarkAt(const SequenceChunk& chunk, int32_t position) const {
    return IsDraft(chunk) && position >= chunk.settled ? 0xD5A4'0000'0001 : 0;
  }

  uint64_t& Kv(const SequenceChunk& chunk, int32_t position) {
    const int32_t block = chunk.block_table[position / shape_.block_tokens];
    return kv_[static_cast<size_t>(block) * shape_.block_tokens + position % shape_.block_tokens];
  }

  void Fill(const SequenceChunk& chunk, int32_t position, std::span<float> row) {
    uint64_t all = 0;
    for (int32_t p = 0; p <= position; ++p) all = Mix(all ^ Kv(chunk, p) ^ MarkAt(chunk, p));
    if (IsDraft(chunk)) {
      ++drafted;
      if (wrong_draft_every > 0 && Mix(position) % wrong_draft_every == 0) all = Mix(all);
    }
    for (int32_t token = 0; token < shape_.vocab_size; ++token) {
      const uint64_t bits = Mix(all ^ static_cast<uint64_t>(token) << 40);
      row[token] = static_cast<float>(bits >> 40) * 0x1p-22f;  // 0 to 4
      // Mostly a few printable characters, so that stop strings and penalties meet something.
      if (token >= 8 && token < 24) row[token] += 3;
    }
    if (nan_after_token == chunk.tokens[position - chunk.position]) {
      row[static_cast<size_t>(all % row.size())] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  // What the engine promises of a batch.
  void CheckBatch(const Batch& batch, std::span<const float> logits) {
    EXPECT_LE(batch.num_tokens(), shape_.max_batch_tokens);
    EXPECT_GE(logits.size(), static_cast<size_t>(batch.num_logits() * shape_.vocab_size));
    std::set<int32_t> blocks;
    for (const SequenceChunk& chunk : batch.chunks) {
      EXPECT_FALSE(chunk.tokens.empty());
      const int64_t end = chunk.position + static_cast<int64_t>(chunk.tokens.size());
      EXPECT_GE(static_cast<int64_t>(chunk.block_table.size()) * shape_.block_tokens, end);
      EXPECT_LE(end, shape_.max_context);
      for (const int32_t block : chunk.block_table) {
        EXPECT_TRUE(blocks.insert(block).second) << "block " << block << " in two tables";
        EXPECT_GE(block, 0);
        EXPECT_LT(block, shape_.num_blocks);
      }
    }
  }

  const FakeModelShape shape_;
  std::vector<uint64_t> kv_;
  std::vector<float> logits_;
};

}  // namespace winnow::engine

#endif  // WINNOW_TESTS_UNIT_ENGINE_FAKE_MODEL_H_
