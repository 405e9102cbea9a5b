// One accepted request inside the engine: plain state, owned and changed by the engine thread only.
// State that is derived from tokens alone (answer, history, scores) survives preemption; the KV cache does not.
#ifndef WINNOW_ENGINE_SCHEDULE_SEQUENCE_H_
#define WINNOW_ENGINE_SCHEDULE_SEQUENCE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/base/clock.h"
#include "engine/kv/block_name.h"
#include "engine/kv/kv_cache.h"
#include "engine/retrieval/retrieval_state.h"
#include "engine/schedule/answer.h"
#include "engine/schedule/draft.h"
#include "engine/schedule/draft_length.h"
#include "engine/schedule/output_queue.h"
#include "engine/schedule/prompt_lookup.h"
#include "engine/schedule/request.h"
#include "engine/schedule/request_queue.h"
#include "engine/schedule/sampler.h"
#include "engine/schedule/scheduler.h"

namespace winnow::engine {

struct Sequence {
  Sequence(Submission submission, const Tokenizer& tokenizer, BlockPool& pool, int32_t block_tokens)
      : request(std::move(submission.request)),
        output(std::move(submission.output)),
        tokens(request.prompt),
        cache(pool, block_tokens),
        block_tokens(block_tokens),
        answer(request, tokenizer),
        history(request.sampling, request.prompt),
        grammar(request.grammar == nullptr ? nullptr : request.grammar->NewState()),
        salt(request.salt.value_or(TenantSalt(request.tenant))) {
    usage.prompt_tokens = num_prompt_tokens();
  }
  Sequence(const Sequence&) = delete;  // answer refers to request
  Sequence& operator=(const Sequence&) = delete;

  int32_t num_prompt_tokens() const { return static_cast<int32_t>(request.prompt.size()); }
  // The first token that attends as the policy says: the first generated one, or `suffix` before it
  // and those before that in its block. So what is dense is whole blocks, which other questions
  // about the same text take over; a part of one would have to be computed, and read all KV for it.
  // A verified policy has none: only drafts attend as it says, and no KV that stays is theirs.
  int32_t retrieve_from() const {
    if (request.policy.IsVerified()) return std::numeric_limits<int32_t>::max();
    if (request.policy.suffix == 0) return num_prompt_tokens();
    const int32_t first = std::max(0, num_prompt_tokens() - request.policy.suffix);
    return first / block_tokens * block_tokens;
  }
  // The first token whose KV reads are counted, and the first whose query may have a tail.
  int32_t decode_from() const { return std::min(retrieve_from(), num_prompt_tokens()); }
  int32_t num_known_tokens() const { return static_cast<int32_t>(tokens.size()); }
  // The first token after which logits are wanted: the last one, which the next token comes from, or one of the
  // prompt's, where the token behind it has no score yet. From there on every token must be computed here.
  int32_t first_with_logits() const {
    const bool scores = request.prompt_logprobs >= 0 && num_scored < num_prompt_tokens() - 1;
    return scores ? num_scored : num_known_tokens() - 1;
  }
  // As the scheduler sees it: with the draft that it holds.
  int32_t planned_known_tokens() const {
    return draft.active() ? draft.known_tokens() : num_known_tokens();
  }
  int32_t planned_computed_tokens() const {
    return draft.active() ? draft.computed_tokens() : cache.num_tokens();
  }

  const Request request;
  const std::shared_ptr<OutputQueue> output;
  std::vector<int32_t> tokens;  // prompt and generated
  KvCache cache;                // of a prefix of tokens
  const int32_t block_tokens;
  int32_t named_blocks = 0;  // full blocks in `cache`, whose names the block table has
  // Names of its first blocks, in `cache` or not: they are made once, however often it is admitted.
  std::vector<BlockName> known_names;
  int32_t losses = 0;  // of KV, since the last token came
  int32_t losses_in_all = 0;
  std::unique_ptr<RetrievalState> retrieval;  // from admission on; null if the policy is dense
  int32_t num_scored = 0;           // tokens of the prompt, whose scores were made; never the first
  std::vector<ScoredToken> scores;  // of them, not yet told
  Answer answer;
  TokenHistory history;
  Draft draft;
  bool holds_verification = false;  // this step goes without it (Engine::HoldVerifications)
  DraftLength draft_length;
  DraftCostTable::Place draft_costs_place;  // whose costs draft_length shares
  int32_t draft_takes_in = 0;    // tokens that the index takes in with the draft's first step
  PromptLookup lookup;           // of policies that look up; else empty
  int32_t lookups_left_out = 0;  // since one was tried
  const std::unique_ptr<GrammarState> grammar;  // null: the answer may be anything
  const Digest salt;
  std::string grammar_fault;  // not empty: it ends for this
  Usage usage;

  Phase phase = Phase::kWaiting;
  uint64_t order = 0;  // by arrival while waiting, by first admission afterwards
  int32_t tenant = 0;  // index in TenantShares
  bool summary_saved = false;
  bool alone = false;  // lost KV too often: takes over nothing any more, and shares nothing
  bool ended = false;  // its last event is made; to be removed
  // Its KV on the way from a slower tier, and what has come of it since its last step (BlockFetcher). Paused ones have none: only
  // a step fills the output, and it ends the fetch.
  uint64_t fetch = 0;
  TimePoint fetch_begun{};
  bool awaits_room = false;  // others' fetches hold what its own needs: one of them has to end
  bool takes_over = false;   // a prefix, since its last step
  bool eager = false;        // all of the prefix is fetched, whatever the next step reads
  TimePoint rests_until{};   // its last step waited for reads: until then others step without it

  std::optional<TimePoint> paused_since;  // its output queue is full
  std::optional<TimePoint> first_planned;
  std::optional<TimePoint> last_token;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_SEQUENCE_H_
