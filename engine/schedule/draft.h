// A draft: tokens that a policy proposes to go on with, until dense attention has verified them
// (docs/exact.md). Nothing of it is the sequence's: not its tokens, its KV, nor what was drawn for it.
//
//   idle ── Begin ──▶ drafting ── Add, Add, ... ──▶ verifying ── Drop ──▶ idle
//                        └────────── EndDrafting ─────▲
//
// tokens()[0] is the last known token, which has no KV yet; the drafted ones follow. While drafting
// they run one by one under the policy (or were looked up all at once, prompt_lookup.h); the verification runs them together, densely, over the same
// positions, so that every row of KV that a draft has left is written anew before it is read.
//
// Plain state, owned and changed by the engine thread only.
#ifndef WINNOW_ENGINE_SCHEDULE_DRAFT_H_
#define WINNOW_ENGINE_SCHEDULE_DRAFT_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/model.h"
#include "engine/schedule/draft_length.h"
#include "engine/schedule/request.h"
#include "engine/schedule/sampler.h"
#include "kernels/sample.h"

namespace winnow::engine {

class Draft {
 public:
  // `position` is that of `last_token`; at most `length` tokens are drafted. REQUIRES: idle,
  // length >= 1.
  void Begin(int32_t position, int32_t last_token, int32_t length);
  // The same of tokens that are there already: it is to be verified. REQUIRES: idle, some tokens.
  void BeginLookedUp(int32_t position, int32_t last_token, std::span<const int32_t> drafted);
  // Another drafted token. REQUIRES: drafting.
  void Add(int32_t token);
  // What there is goes to the verification. REQUIRES: active.
  void EndDrafting() { verifies_ = true; }
  // Drafted tokens that are left; those after them are not verified.
  void Cut(int32_t drafted);
  void Drop();
  // A verification may be held back (Engine::HoldVerifications) for as many steps as the draft has tokens; one that was looked up
  // may not. Hold counts such a step. REQUIRES: verifies.
  bool MayHold() const { return source_ == DraftSource::kPolicy && held_ < num_drafted(); }
  void Hold() { ++held_; }

  // Under a grammar a draft follows it with a state of its own, which has taken the drafted tokens; the answer's state
  // sees accepted ones only. What it allows after 0, 1, ... drafted tokens is kept for the verification's rows.
  // REQUIRES: nothing is drafted yet, or nothing of it was followed.
  void SetGrammar(std::unique_ptr<GrammarState> state) { grammar_ = std::move(state); }
  GrammarState* grammar() const { return grammar_.get(); }  // null: the answer may be anything
  int32_t num_allowed() const { return static_cast<int32_t>(allowed_.size()); }
  // Empty: all tokens.
  void AddAllowed(std::span<const uint32_t> words) {
    allowed_.emplace_back(words.begin(), words.end());
  }

  bool active() const { return !tokens_.empty(); }
  bool verifies() const { return verifies_; }
  bool drafting() const { return active() && !verifies_; }
  DraftSource source() const { return source_; }
  int32_t position() const { return position_; }  // of tokens()[0]
  int32_t num_drafted() const { return static_cast<int32_t>(tokens_.size()) - 1; }
  std::span<const int32_t> tokens() const { return tokens_; }
  // As a sequence that holds the draft looks to the scheduler.
  int32_t known_tokens() const { return position_ + static_cast<int32_t>(tokens_.size()); }
  int32_t computed_tokens() const { return verifies_ ? position_ : known_tokens() - 1; }

  // The next `tokens` of it as a share of a step: one under the policy, or those to be verified.
  // REQUIRES: active; `tokens` is 1 unless it verifies. Views into the draft and the arguments.
  SequenceChunk Chunk(int32_t tokens, std::span<const int32_t> block_table,
                      RetrievalState* retrieval) const;
  // How the rows of that chunk become tokens: those that follow `answered` tokens of the answer and the
  // drafted ones before them, with the noise, the penalties and the masks of that place. Equal
  // draws therefore mean that nobody can tell a drafted token from one that was decoded alone. Views
  // into the draft and the arguments. REQUIRES: with a grammar, AddAllowed was called for every row.
  void AppendSampleRows(const Request& request, const TokenHistory& history, int32_t answered,
                        int32_t rows, std::vector<kernels::SampleRow>* into);
  // Of what the verification drew for its rows: how many are the answer's next tokens. Every row whose
  // tokens before it were all drawn as drafted counts, so the first one always does.
  int32_t NumAccepted(std::span<const kernels::SampledToken> drawn) const;
  // Of a verification of so many rows: what token `index` of those that the answer takes adds.
  DraftCounts CountsOf(int32_t rows, int32_t index) const;

 private:
  const TokenHistory& HistoryAfter(const TokenHistory& history, int32_t drafted);

  std::vector<int32_t> tokens_;  // empty: idle
  int32_t position_ = 0;
  int32_t length_ = 0;
  bool verifies_ = false;
  DraftSource source_ = DraftSource::kPolicy;
  int32_t held_ = 0;  // steps
  // After 1, 2, ... drafted tokens; only of requests with penalties. Grows as it is asked for.
  std::vector<TokenHistory> histories_;
  std::unique_ptr<GrammarState> grammar_;
  std::vector<std::vector<uint32_t>> allowed_;
};

// The most tokens that may be drafted, by what a step and the request have room for.
struct DraftRoom {
  int32_t answer_tokens = 0;  // that the answer may still get; the last one needs no KV
  int32_t rows = 0;           // of a step beyond one for each sequence, for all that verify
  int32_t verifying = 1;      // sequences that share them
  int32_t position = 0;       // of the last known token
  int32_t block_tokens = 0;
  bool one_block_more = false;  // blocks lie in tiers: a sequence may begin one block, not several
  int32_t Length(int32_t wanted) const;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_DRAFT_H_
