// What the engine needs of a model: run a planned batch, give the next tokens or logits.
// engine/decoder.h is the real one; tests/unit/engine/fake_model.h derives tokens from the bytes it reads
// back from KV blocks.
#ifndef WINNOW_ENGINE_MODEL_H_
#define WINNOW_ENGINE_MODEL_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/block_name.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/retrieval_state.h"
#include "kernels/device_ops.h"
#include "kernels/sample.h"

namespace winnow::engine {

// One sequence's share of a step: `tokens` run at positions position, position+1, ...
// The spans belong to the engine and live until Forward returns.
struct SequenceChunk {
  std::span<const int32_t> tokens;       // at least one
  int32_t position = 0;                  // of tokens[0]
  std::span<const int32_t> block_table;  // logical block -> block of the KV pool; covers every
                                         // position up to the last token's
  int32_t num_logits =
      0;  // rows of logits made, for the last num_logits tokens: 0 inside a prompt, 1 to sample,
          // more to verify a draft or to score a prompt
  // Of the sequence, if its policy is not dense: tokens at positions from retrieve_from on attend
  // as the policy says, those before densely. Null: all do.
  RetrievalState* retrieval = nullptr;
  int32_t retrieve_from = std::numeric_limits<int32_t>::max();
  // Tokens at positions from here on are a draft's: others may be written in their place. What cannot
  // give tokens back (tables of means) does not take them in.
  int32_t settled = std::numeric_limits<int32_t>::max();
};

struct Batch {
  std::vector<SequenceChunk> chunks;
  // Computed with the model's draft weights. REQUIRES: Model::has_draft_weights; every chunk is a draft's, so that what they
  // write is written anew before anyone trusts it.
  bool drafts = false;

  int64_t num_tokens() const {
    int64_t sum = 0;
    for (const SequenceChunk& chunk : chunks) sum += static_cast<int64_t>(chunk.tokens.size());
    return sum;
  }
  int64_t num_logits() const {
    int64_t sum = 0;
    for (const SequenceChunk& chunk : chunks) sum += chunk.num_logits;
    return sum;
  }
};

class KvMemory;

class Model {
 public:
  virtual ~Model() = default;

  virtual int32_t vocab_size() const = 0;        // width of a logits row
  virtual int32_t max_context() const = 0;       // tokens a sequence may hold
  virtual int32_t block_tokens() const = 0;      // tokens of a KV block
  virtual int32_t num_blocks() const = 0;        // KV blocks in the pool, shared by all sequences
  virtual int32_t max_batch_tokens() const = 0;  // tokens of one Forward, fixed at start
  virtual int32_t max_batch_logits() const = 0;  // logits rows there are at once, fixed at start
  virtual int64_t kv_row_bytes() const = 0;      // K and V of one token for one layer and KV head
  // Rows of KV that queries at `position` and the next ones see together, over layers and KV heads.
  virtual uint64_t KvRowsSeen(int32_t position, int32_t num_queries) const = 0;

  // The first token whose KV dense attention reads in the layer, for queries from `position` on: of all layers but those with a
  // window it is 0.
  virtual int32_t FirstRead(int32_t /*layer*/, int32_t /*position*/) const { return 0; }

  // Whether the model can attend so. InvalidArgument names the option that it cannot honour. Any
  // thread.
  virtual absl::Status CheckPolicy(const AttentionPolicy& policy) const = 0;
  // Whether a query at `position` reads less than all under the policy: else a draft saves nothing.
  virtual bool Retrieves(const AttentionPolicy& policy, int32_t position) const {
    return !PlanQuery(policy, position, /*from=*/0).dense;
  }
  // Whether drafts are computed with weights of their own, in fewer bits: then they pay where a policy reads all, too.
  virtual bool has_draft_weights() const { return false; }
  // For a sequence under a policy that is not dense. REQUIRES: CheckPolicy is OK; the state goes
  // before the model does. ResourceExhausted: as ResumeRetrieval. Engine thread only, as are all
  // calls on the state.
  virtual absl::StatusOr<std::unique_ptr<RetrievalState>> NewRetrievalState(
      const AttentionPolicy& policy) = 0;
  // After RetrievalState::Suspend. ResourceExhausted: as many sequences as there is room for have
  // summaries already; max_running of them always fit in a server.
  virtual absl::Status ResumeRetrieval(RetrievalState& state) = 0;

  // Where KV lies, and which chunks of the last Forward lost what they need: their logits mean
  // nothing, and their sequences must be computed again. Null: KV never moves and is never lost.
  virtual KvMemory* kv_memory() { return nullptr; }
  // KV entries that were read from slower tiers before a policy chose them, since the start.
  virtual PrefetchCounts prefetch_counts() const { return {}; }
  // Kernels that the device was asked for, since the start; zeros on a CPU.
  virtual kernels::LaunchCounts launches() const { return {}; }

  // The block is full and sealed: what was made beside its KV may be kept for others.
  virtual void SaveIndex(int32_t block, const BlockName& name) {}
  // The same of the summaries of a sequence, when `name` is the last block that others can share.
  virtual void SaveSummary(const RetrievalState& state, const BlockName& name) {}
  // The sequence begins with these full blocks, which it did not compute: what there is beside their
  // KV need not be made again.
  virtual void AdoptIndex(RetrievalState& state, std::span<const int32_t> blocks,
                          std::span<const BlockName> names, int32_t retrieve_from) {}

  // Both write the KV of the batch's tokens into their blocks. Engine thread only. They return an error when
  // the device failed: nothing of the batch can be trusted then.
  //
  // Logits [batch.num_logits()][vocab_size], float32, any memory of the host, chunk after chunk.
  // REQUIRES: max_batch_logits rows at most.
  virtual absl::Status Forward(const Batch& batch, std::span<float> logits) = 0;
  // Of each of those rows the next token instead, chosen where they are as `rows` say: both spans are
  // [batch.num_logits()], any memory of the host. What a lost chunk gets means nothing. Rows may be as
  // many as the batch has tokens: max_batch_logits of them at a time are made and looked at.
  virtual absl::Status Sample(const Batch& batch, std::span<const kernels::SampleRow> rows,
                              std::span<kernels::SampledToken> sampled) = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_H_
