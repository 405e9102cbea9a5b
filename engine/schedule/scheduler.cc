#include "engine/schedule/scheduler.h"

#include <algorithm>

#include "engine/kv/kv_cache.h"
#include "kernels/check.h"

namespace winnow::engine {

const StepPlan& Scheduler::Plan(const PlanInput& input) {
  WINNOW_CHECK(input.step_tokens >= input.max_running);
  WINNOW_CHECK(input.step_logits >= input.max_running);
  input_ = &input;
  plan_.preempt.clear();
  plan_.admit.clear();
  plan_.chunks.clear();
  states_.assign(input.sequences.size(), State{});
  served_.assign(input.served.begin(), input.served.end());
  free_ = input.free_blocks;
  num_running_ = 0;
  num_active_ = 0;
  for (size_t i = 0; i < states_.size(); ++i) {
    const SequenceView& view = input.sequences[i];
    WINNOW_CHECK(view.computed_tokens < view.known_tokens);
    states_[i] = {.held = view.blocks, .tokens = 0, .running = view.phase == Phase::kRunning};
    num_running_ += states_[i].running;
    num_active_ += IsActive(static_cast<int32_t>(i));
  }
  PlanDecodes();
  // A step that had to take blocks away gives none to newcomers.
  if (plan_.preempt.empty()) Admit();
  PlanPrompts();
  Write();
  return plan_;
}

bool Scheduler::IsActive(int32_t index) const {
  return states_[index].running && !input_->sequences[index].paused;
}

bool Scheduler::MayStep(int32_t index) const {
  return IsActive(index) && !input_->sequences[index].waits;
}

int32_t Scheduler::Pending(int32_t index) const {
  const SequenceView& view = input_->sequences[index];
  return view.known_tokens - view.computed_tokens;
}

bool Scheduler::Decodes(int32_t index) const {
  return Pending(index) == 1 || input_->sequences[index].verifies;
}

int32_t Scheduler::NeededBlocks(int32_t index, int32_t tokens) const {
  const int64_t end = int64_t{input_->sequences[index].computed_tokens} + tokens;
  return std::max(0, BlocksFor(end, input_->block_tokens) - states_[index].held);
}

void Scheduler::PlanDecodes() {
  const auto count = static_cast<int32_t>(states_.size());
  int32_t oldest = -1;
  int32_t decodes = 0;
  bool older_waits = false;  // than the oldest that may step: it keeps its blocks
  for (int32_t i = 0; i < count; ++i) {
    older_waits |= oldest < 0 && IsActive(i) && !MayStep(i);
    if (!MayStep(i)) continue;
    if (oldest < 0) oldest = i;
    decodes += Decodes(i);
  }
  // Beyond a token for each that decodes, and a row of logits for each that may run: any prompt may end.
  budget_ =
      decodes > 0 ? input_->step_tokens : std::max(input_->step_tokens, input_->prompt_step_tokens);
  int32_t spare = std::min(budget_ - decodes, input_->step_logits - input_->max_running);
  for (int32_t i = 0; i < count; ++i) {
    if (!MayStep(i)) continue;
    const bool decode = Decodes(i);
    if (!decode && i != oldest) continue;
    // The oldest may be inside its prompt: its blocks are secured here too, whatever its share of
    // the tokens will be.
    int32_t tokens =
        decode ? std::min(Pending(i), 1 + spare) : std::min(Pending(i), budget_ - decodes);
    if (decode && free_ < NeededBlocks(i, tokens)) tokens = 1;
    const int32_t blocks = NeededBlocks(i, tokens);
    while (free_ < blocks) {
      const int32_t victim = Victim(i);
      if (victim < 0) break;
      Preempt(victim);
    }
    if (free_ < blocks) {
      // It waits with what it holds: older ones will give blocks back when they end, or take these.
      WINNOW_CHECK(i != oldest || input_->scarce || older_waits);
      continue;
    }
    free_ -= blocks;
    states_[i].held += blocks;
    if (decode) {
      states_[i].tokens = tokens;
      spare -= tokens - 1;
    }
  }
}

int32_t Scheduler::Victim(int32_t for_index) const {
  const auto count = static_cast<int32_t>(states_.size());
  for (int32_t i = count - 1; i >= 0; --i) {
    if (states_[i].running && states_[i].held > 0 && input_->sequences[i].paused) return i;
  }
  for (int32_t i = count - 1; i > for_index; --i) {
    if (IsActive(i) && states_[i].held > 0) return i;
  }
  return -1;
}

void Scheduler::Preempt(int32_t index) {
  num_active_ -= IsActive(index);
  --num_running_;
  free_ += states_[index].held;
  states_[index] = State{};
  plan_.preempt.push_back(index);
}

void Scheduler::Admit() {
  reserved_ = 0;
  const auto count = static_cast<int32_t>(states_.size());
  for (int32_t i = 0; i < count; ++i) {
    if (states_[i].running) reserved_ += NeededBlocks(i, Pending(i));
  }
  int32_t next = 0;
  while (true) {
    while (next < count &&
           (input_->sequences[next].phase != Phase::kPreempted || input_->sequences[next].paused)) {
      ++next;
    }
    const int32_t candidate = next < count ? next++ : NextFresh();
    if (candidate < 0 || !MakeRoomFor(candidate)) return;
    states_[candidate].running = true;
    ++num_running_;
    ++num_active_;
    reserved_ += NeededBlocks(candidate, Pending(candidate));
    const SequenceView& view = input_->sequences[candidate];
    if (view.phase == Phase::kWaiting) {
      served_[view.tenant] += view.known_tokens / input_->weights[view.tenant];
    }
    plan_.admit.push_back(candidate);
  }
}

int32_t Scheduler::NextFresh() {
  tenant_seen_.assign(served_.size(), false);
  int32_t best = -1;
  const auto count = static_cast<int32_t>(states_.size());
  for (int32_t i = 0; i < count; ++i) {
    const SequenceView& view = input_->sequences[i];
    if (view.phase != Phase::kWaiting || states_[i].running || tenant_seen_[view.tenant]) continue;
    tenant_seen_[view.tenant] = true;
    if (best < 0 || served_[view.tenant] < served_[input_->sequences[best].tenant]) best = i;
  }
  return best;
}

bool Scheduler::Fits(int32_t index, int32_t extra_slots, int32_t extra_blocks) const {
  const int32_t running = num_running_ - extra_slots;
  const int32_t spare = num_active_ > 0 ? running : 0;
  return running < input_->max_running &&
         free_ + extra_blocks - reserved_ >= NeededBlocks(index, Pending(index)) + int64_t{spare};
}

bool Scheduler::MakeRoomFor(int32_t index) {
  if (Fits(index, 0, 0)) return true;
  // Paused ones are in the way. Take nothing unless it is enough.
  const auto may_take = [this](int32_t i) {
    const SequenceView& view = input_->sequences[i];
    return states_[i].running && view.paused && (view.yields || num_active_ == 0);
  };
  int32_t slots = 0;
  int32_t blocks = 0;
  const auto count = static_cast<int32_t>(states_.size());
  for (int32_t i = 0; i < count; ++i) {
    if (!may_take(i)) continue;
    ++slots;
    blocks += states_[i].held + NeededBlocks(i, Pending(i));
  }
  if (!Fits(index, slots, blocks)) return false;
  for (int32_t i = count - 1; !Fits(index, 0, 0); --i) {
    if (!may_take(i)) continue;
    reserved_ -= NeededBlocks(i, Pending(i));
    Preempt(i);
  }
  return true;
}

void Scheduler::PlanPrompts() {
  int32_t left = budget_;
  prompts_.clear();
  const auto count = static_cast<int32_t>(states_.size());
  for (int32_t i = 0; i < count; ++i) {
    left -= states_[i].tokens;
    if (MayStep(i) && states_[i].tokens == 0 && !input_->sequences[i].verifies)
      prompts_.push_back(i);
  }
  if (prompts_.empty()) return;
  const auto give = [this, &left](int32_t index, int32_t most) {
    State& state = states_[index];
    const int64_t room = int64_t{state.held + free_} * input_->block_tokens -
                         input_->sequences[index].computed_tokens - state.tokens;
    const auto tokens =
        static_cast<int32_t>(std::min<int64_t>({Pending(index) - state.tokens, most, left, room}));
    if (tokens <= 0) return;
    state.tokens += tokens;
    left -= tokens;
    const int32_t blocks = NeededBlocks(index, state.tokens);
    state.held += blocks;
    free_ -= blocks;
  };
  const int32_t oldest = prompts_.front();
  give(oldest, (left + 1) / 2);
  std::stable_sort(prompts_.begin() + 1, prompts_.end(),
                   [this](int32_t a, int32_t b) { return Pending(a) < Pending(b); });
  for (size_t i = 1; i < prompts_.size(); ++i) give(prompts_[i], left);
  give(oldest, left);
}

void Scheduler::Write() {
  for (size_t i = 0; i < states_.size(); ++i) {
    const int32_t new_blocks = states_[i].held - input_->sequences[i].blocks;
    if (states_[i].tokens == 0) {
      WINNOW_CHECK(new_blocks <= 0);
      continue;
    }
    plan_.chunks.push_back({.sequence = static_cast<int32_t>(i),
                            .tokens = states_[i].tokens,
                            .new_blocks = new_blocks});
  }
}

}  // namespace winnow::engine
