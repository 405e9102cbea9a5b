// Decide, then do: from plain facts about every sequence to what the next step does. No state, no
// clock, no model, no blocks by name: the same input gives the same plan.
//
// The rules, in the order they are applied:
//   1. Decoding first. Every running sequence that lacks one token gets it. When blocks run out, the
//      sequence admitted last gives its blocks up (paused ones before all others), never an older
//      one for a younger: so the oldest that can run always runs, and everything ends. A draft that is
//      to be verified counts as one token, too, and gets the rows that are left over for all of it, the
//      oldest first; where blocks are short it takes none for more than its first token. A sequence whose KV is on its
//      way from a slower tier, or whose verification waits for others' drafts, gets nothing, and is in nobody's way but
//      for what it holds.
//   2. Admission, while there are slots, blocks for all known tokens, and one spare block for each
//      running sequence to grow into: first those preempted, in order of admission; then those that
//      wait, the tenant that was served least first, each tenant's in order of arrival. Who does
//      not fit is waited for, not overtaken, or large prompts would starve.
//   3. Prompts share what is left of the token budget, which may be larger where nobody decodes: half
//      goes to the oldest, so that the longest prompt ends; the other half to those that are nearest
//      to their end, so that a short prompt does not wait for a long one.
#ifndef WINNOW_ENGINE_SCHEDULE_SCHEDULER_H_
#define WINNOW_ENGINE_SCHEDULE_SCHEDULER_H_

#include <cstdint>
#include <span>
#include <vector>

namespace winnow::engine {

enum class Phase : uint8_t { kRunning, kPreempted, kWaiting };

struct SequenceView {
  Phase phase = Phase::kWaiting;
  int32_t known_tokens = 0;  // prompt and generated. REQUIRES: blocks for them are in the pool
  int32_t computed_tokens =
      0;                  // of them, KV is in blocks; less than known_tokens; 0 unless running
  int32_t blocks = 0;     // held; 0 unless running
  int32_t tenant = 0;     // index into served
  bool verifies = false;  // what it lacks is its last token and a draft, wanted in one step
  bool paused = false;    // its reader is slow: must not run
  bool yields = false;    // paused for so long that it may lose its blocks to any that waits
  bool waits = false;  // for KV on its way, or others' drafts: no tokens, but it keeps its blocks
};

struct PlanInput {
  int32_t step_tokens = 0;         // budget. REQUIRES: >= max_running
  int32_t prompt_step_tokens = 0;  // the same where nobody decodes, if it is more
  int32_t step_logits = 0;         // rows of logits. REQUIRES: >= max_running
  int32_t max_running = 0;
  int32_t block_tokens = 0;
  int32_t free_blocks = 0;
  bool scarce = false;  // free_blocks are few for a while: even the oldest may have to wait
  // Running ones by admission, then preempted ones by admission, then waiting ones by arrival.
  std::span<const SequenceView> sequences;
  // By tenant: tokens divided by its weight, and the weight.
  std::span<const double> served;
  std::span<const double> weights;
};

struct PlannedChunk {
  int32_t sequence = 0;    // index into PlanInput::sequences
  int32_t tokens = 0;      // at least 1, from computed_tokens on
  int32_t new_blocks = 0;  // to take before it runs; may be 0
};

// To be done in this order.
struct StepPlan {
  std::vector<int32_t> preempt;  // running -> preempted: blocks back, nothing computed
  std::vector<int32_t> admit;    // preempted or waiting -> running
  std::vector<PlannedChunk> chunks;
};

class Scheduler {
 public:
  // A pure function of `input`. The plan is valid until the next call; members are scratch, so that
  // the step loop allocates nothing.
  const StepPlan& Plan(const PlanInput& input);

 private:
  struct State {
    int32_t held = 0;      // blocks, with those planned
    int32_t tokens = 0;    // planned
    bool running = false;  // after what is planned so far
  };

  void PlanDecodes();
  void Admit();
  void PlanPrompts();
  void Write();

  bool IsActive(int32_t index) const;  // runs and is not paused
  bool MayStep(int32_t index) const;   // is active, and its KV is there
  int32_t Pending(int32_t index) const;
  bool Decodes(int32_t index) const;  // lacks one token, and a draft after it at most
  int32_t NeededBlocks(int32_t index, int32_t tokens) const;  // beyond those held
  // The one to lose its blocks so that `for_index` can go on; -1: none.
  int32_t Victim(int32_t for_index) const;
  void Preempt(int32_t index);
  bool MakeRoomFor(int32_t index);
  bool Fits(int32_t index, int32_t extra_slots, int32_t extra_blocks) const;
  int32_t NextFresh();

  const PlanInput* input_ = nullptr;
  StepPlan plan_;
  std::vector<State> states_;
  std::vector<double> served_;
  std::vector<int32_t> prompts_;
  std::vector<bool> tenant_seen_;
  int32_t budget_ = 0;  // tokens of the step
  int32_t free_ = 0;
  int32_t num_running_ = 0;
  int32_t num_active_ = 0;
  int64_t reserved_ = 0;  // blocks that running sequences still need for the tokens they know
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_SCHEDULER_H_
