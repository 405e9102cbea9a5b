// Verified policies in the step loop (docs/exact.md): a sequence drafts token by token under its policy, with draft weights where
// the model has them. Then dense attention computes the draft in one chunk, and of what it draws the sequence takes all up to the
// first token that was drafted wrong. Only what was taken is the sequence's: KV, block names and indexes end where it ends.
#include <algorithm>
#include <span>

#include "engine/kv/kv_memory.h"
#include "engine/schedule/engine.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

// Looked-up tokens come first, as they cost nothing but rows of a verification. Where they are mostly
// wrong and the policy drafts better, they are tried now and then only.
bool MayLookUp(Sequence& sequence, bool policy_drafts) {
  constexpr double kOftenRight = 0.5;
  constexpr int32_t kTryEvery = 16;
  if (!policy_drafts || sequence.draft_length.acceptance(DraftSource::kLookup) >= kOftenRight ||
      ++sequence.lookups_left_out >= kTryEvery) {
    sequence.lookups_left_out = 0;
    return true;
  }
  return false;
}

bool IsStopToken(const Request& request, int32_t token) {
  const std::vector<int32_t>& stops = request.stopping.stop_token_ids;
  return std::find(stops.begin(), stops.end(), token) != stops.end();
}

}  // namespace

// Before a plan is made: who has one token to go drafts, and who drafts may have to stop.
void Engine::PlanDrafts(int32_t free_blocks, TimePoint now) {
  const auto verifies = [](const Sequence& sequence) {
    return sequence.phase == Phase::kRunning && sequence.request.policy.IsVerified();
  };
  int32_t running = 0;
  int32_t verifying = 0;
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    running += sequence->phase == Phase::kRunning;
    verifying += verifies(*sequence);
  }
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    if (!verifies(*sequence)) continue;
    Draft& draft = sequence->draft;
    if (!draft.active()) {
      BeginDraft(*sequence, verifying);
    } else if (!draft.verifies() && free_blocks <= running &&
               BlocksFor(draft.known_tokens(), model_.block_tokens()) >
                   sequence->cache.num_blocks()) {
      // Nobody loses blocks for a guess: what has none left is not drafted on.
      draft.Cut(std::max(0, draft.num_drafted() - 1));
      draft.EndDrafting();
    }
  }
  if (model_.has_draft_weights()) HoldVerifications(now);
}

// Drafts that have weights of their own and whatever else there is are two passes of a step, and the one with the answers'
// weights costs many times as much. Where nobody needs it but verifications, they wait for drafts of others that are not done:
// one pass for all of them. None waits for more steps than it took to draft, so that short drafts do not stand still for long ones.
void Engine::HoldVerifications(TimePoint now) {
  bool others_draft = false, needs_pass = false;
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    sequence->holds_verification = false;
    if (sequence->phase != Phase::kRunning || sequence->paused_since.has_value() ||
        AwaitsKv(*sequence, now)) {
      continue;
    }
    const Draft& draft = sequence->draft;
    others_draft |= draft.drafting();
    needs_pass |= !draft.drafting() && !(draft.verifies() && draft.MayHold());
  }
  if (!others_draft || needs_pass) return;
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    if (sequence->phase != Phase::kRunning || !sequence->draft.verifies()) continue;
    sequence->holds_verification = true;
    sequence->draft.Hold();
  }
}

void Engine::BeginDraft(Sequence& sequence, int32_t verifying) {
  const int32_t known = sequence.num_known_tokens();
  // The first token comes out of the prompt's last chunk.
  if (sequence.answer.num_tokens() == 0 || sequence.cache.num_tokens() != known - 1) return;
  const AttentionPolicy& policy = sequence.request.policy;
  const bool is_auto = policy.verify == AttentionPolicy::kVerifyAuto;
  const int32_t most =
      DraftRoom{
          .answer_tokens = sequence.request.stopping.max_tokens - sequence.answer.num_tokens(),
          .rows = std::min(options_.step_tokens, model_.max_batch_logits()) - options_.max_running,
          .verifying = verifying,
          .position = known - 1,
          .block_tokens = model_.block_tokens(),
          .one_block_more = memory_ != nullptr && memory_->tiered()}
          .Length(is_auto ? AttentionPolicy::kVerifyMax : policy.verify);
  const auto wanted = [&](DraftSource source) {
    return is_auto ? sequence.draft_length.Next(source, most) : most;
  };
  const bool retrieves = sequence.retrieval != nullptr && model_.Retrieves(policy, known);
  const bool drafts = retrieves || model_.has_draft_weights();
  if (policy.lookup && MayLookUp(sequence, drafts)) {
    const std::vector<int32_t> found =
        sequence.lookup.Propose(sequence.tokens, wanted(DraftSource::kLookup));
    if (!found.empty()) {
      sequence.draft.BeginLookedUp(known - 1, sequence.tokens.back(), found);
      CutToGrammar(sequence);
      if (const int32_t drafted = sequence.draft.num_drafted(); drafted > 0) {
        CountDrafted(sequence, drafted);
        return;
      }
      sequence.draft.Drop();
    }
  }
  if (!drafts) return;
  if (const DraftCostTable::Place place = DraftCostTable::PlaceOf(known, verifying);
      is_auto && place != sequence.draft_costs_place) {
    sequence.draft_length.Share(draft_costs_.Of(ToString(policy), place));
    sequence.draft_costs_place = place;
  }
  if (const int32_t length = wanted(DraftSource::kPolicy); length > 0) {
    sequence.draft.Begin(known - 1, sequence.tokens.back(), length);
    sequence.draft_takes_in = retrieves ? sequence.retrieval->NotIndexed(known - 1) : 0;
    if (sequence.grammar != nullptr) sequence.draft.SetGrammar(sequence.grammar->Clone());
  }
}

// A draft that was looked up ends before the first token that the grammar does not allow there, which no
// verification could accept, and after a stop token.
void Engine::CutToGrammar(Sequence& sequence) {
  if (sequence.grammar == nullptr) return;
  Draft& draft = sequence.draft;
  draft.SetGrammar(sequence.grammar->Clone());
  for (int32_t i = 0; i < draft.num_drafted(); ++i) {
    draft.AddAllowed(AllowedTokens(sequence, *draft.grammar()));
    const int32_t token = draft.tokens()[i + 1];
    if (IsStopToken(sequence.request, token)) return draft.Cut(i + 1);
    if (!draft.grammar()->Accept(token)) return draft.Cut(i);
  }
}

// After a stop token nothing is allowed or not: what is drawn there is no answer's, and the grammar has ended.
void Engine::AllowNextDrafted(Sequence& sequence) {
  Draft& draft = sequence.draft;
  if (draft.grammar() == nullptr || draft.num_allowed() > draft.num_drafted()) return;
  const bool ended =
      draft.num_drafted() > 0 && IsStopToken(sequence.request, draft.tokens().back());
  draft.AddAllowed(ended ? std::span<const uint32_t>() : AllowedTokens(sequence, *draft.grammar()));
}

void Engine::CountDrafted(Sequence& sequence, int32_t tokens) {
  sequence.usage.drafts.drafted += tokens;
  stats_.drafts.drafted += tokens;
}

// `rows`: of the sequence's chunk. A draft that was cut to nothing has one to verify, which is plain decoding.
void Engine::CountDraftReads(Sequence& sequence, int32_t rows, const KvReads& reads) {
  if (!sequence.draft.active() || (sequence.draft.verifies() && rows == 1)) return;
  for (DraftCounts* counts : {&sequence.usage.drafts, &stats_.drafts}) {
    (sequence.draft.verifies() ? counts->verify_reads : counts->draft_reads) += reads;
  }
}

// By what was drawn for the draft's chunk.
void Engine::AdvanceDraft(Sequence& sequence, std::span<const kernels::SampledToken> drawn,
                          TimePoint now) {
  Draft& draft = sequence.draft;
  RetrievalCounts counts;
  if (sequence.retrieval != nullptr) counts = sequence.retrieval->TakeCounts();
  counts.rows_dense = 0;  // without a draft nobody would have read for it
  const auto rows = static_cast<int32_t>(drawn.size());
  if (!draft.verifies()) {
    if (sequence.retrieval == nullptr) {
      counts.rows_read = model_.KvRowsSeen(draft.computed_tokens(), rows);
    }
    Count(sequence, counts);
    CountDraftReads(sequence, rows, {.fast = counts.rows_read * model_.kv_row_bytes()});
    const kernels::SampledToken& next = drawn.front();
    if (next.status != kernels::SampleStatus::kOk) {
      draft.EndDrafting();  // the verification finds out whether it is the model's fault
      return;
    }
    draft.Add(next.token);
    CountDrafted(sequence, 1);
    if (decode_seconds_.has_value()) {
      // More blocks are a prefix that was computed under another policy: work for a prompt, as its tokens are.
      const int32_t blocks = sequence.draft_takes_in / model_.block_tokens();
      if (blocks == 0) {
        sequence.draft_length.OnDraftStep(*decode_seconds_);
      } else if (blocks <= kWaitingBlocks) {
        sequence.draft_length.OnCatchUp(*decode_seconds_);
      }
    }
    sequence.draft_takes_in = 0;
    if (IsStopToken(sequence.request, next.token)) {
      draft.EndDrafting();
    } else if (draft.grammar() != nullptr && !draft.grammar()->Accept(next.token)) {
      // Its own mask allowed the token: without it the verification says what is wrong.
      draft.Cut(draft.num_drafted() - 1);
      draft.EndDrafting();
    }
    return;
  }
  // One pass reads what its rows see, once for all of them.
  counts.rows_read += model_.KvRowsSeen(draft.position(), rows);
  CountDraftReads(sequence, rows, {.fast = counts.rows_read * model_.kv_row_bytes()});
  const int32_t accepted = draft.NumAccepted(drawn);
  int32_t taken = 0;
  while (taken < accepted && !sequence.ended) {
    // Before it may end the answer, whose usage is told then.
    counts.rows_dense = model_.KvRowsSeen(draft.position() + taken, 1);
    Count(sequence, counts);
    const DraftCounts drafts = draft.CountsOf(rows, taken);
    sequence.usage.drafts += drafts;
    stats_.drafts += drafts;
    counts = {};
    Take(sequence, drawn[taken++], now);
  }
  if (rows > 1) {
    sequence.draft_length.OnVerification(draft.source(), rows - 1, taken - 1, decode_seconds_);
  } else if (decode_seconds_.has_value()) {
    sequence.draft_length.OnDense(*decode_seconds_);
  }
  sequence.cache.Append(taken);
  sequence.cache.Trim();
  if (memory_ != nullptr) NameBlocks(sequence);
  DropDraft(sequence);
}

void Engine::DropDraft(Sequence& sequence) {
  if (!sequence.draft.active()) return;
  sequence.draft.Drop();
  if (sequence.retrieval != nullptr) sequence.retrieval->Rewind(sequence.cache.num_tokens());
}

}  // namespace winnow::engine
