#include "engine/schedule/scheduler.h"

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "engine/kv/kv_cache.h"
#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

constexpr int32_t kBlockTokens = 4;

// A pool and sequences for Plan, with the numbers that a test does not care about filled in.
struct Scene {
  int32_t step_tokens = 16;
  int32_t prompt_step_tokens = 0;
  int32_t step_logits = 0;  // 0: max_running
  int32_t max_running = 8;
  int32_t num_blocks = 100;
  std::vector<SequenceView> sequences = {};
  std::vector<double> served = {0, 0, 0};
  std::vector<double> weights = {1, 1, 1};

  void Running(int32_t known, int32_t computed, bool paused = false, bool yields = false) {
    sequences.push_back({.phase = Phase::kRunning,
                         .known_tokens = known,
                         .computed_tokens = computed,
                         .blocks = BlocksFor(computed, kBlockTokens),
                         .paused = paused,
                         .yields = yields});
  }
  void Preempted(int32_t known, bool paused = false) {
    sequences.push_back({.phase = Phase::kPreempted, .known_tokens = known, .paused = paused});
  }
  void Waiting(int32_t known, int32_t tenant = 0) {
    sequences.push_back({.phase = Phase::kWaiting, .known_tokens = known, .tenant = tenant});
  }
  int32_t free_blocks() const {
    int32_t held = 0;
    for (const SequenceView& view : sequences) held += view.blocks;
    return num_blocks - held;
  }
  bool scarce = false;
  StepPlan Plan() const {
    Scheduler scheduler;
    return scheduler.Plan({.step_tokens = step_tokens,
                           .prompt_step_tokens = prompt_step_tokens,
                           .step_logits = step_logits > 0 ? step_logits : max_running,
                           .max_running = max_running,
                           .block_tokens = kBlockTokens,
                           .free_blocks = scarce ? 0 : free_blocks(),
                           .scarce = scarce,
                           .sequences = sequences,
                           .served = served,
                           .weights = weights});
  }
};

int32_t TokensOf(const StepPlan& plan, int32_t sequence) {
  for (const PlannedChunk& chunk : plan.chunks) {
    if (chunk.sequence == sequence) return chunk.tokens;
  }
  return 0;
}

int32_t TotalTokens(const StepPlan& plan) {
  int32_t total = 0;
  for (const PlannedChunk& chunk : plan.chunks) total += chunk.tokens;
  return total;
}

TEST(SchedulerTest, NothingToDoIsAnEmptyPlan) {
  const StepPlan plan = Scene().Plan();
  EXPECT_TRUE(plan.chunks.empty());
  EXPECT_TRUE(plan.admit.empty());
}

TEST(SchedulerTest, ADraftIsVerifiedInOneStepAsFarAsRowsGo) {
  Scene scene{.step_tokens = 32, .step_logits = 8 + 10};
  for (int i = 0; i < 3; ++i) {
    scene.Running(27, 20);  // 6 drafted
    scene.sequences.back().verifies = true;
  }
  scene.Running(9, 8);
  scene.Running(200, 10);  // a prompt
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(TokensOf(plan, 0), 7);
  EXPECT_EQ(TokensOf(plan, 1), 5);  // what is left of the ten
  EXPECT_EQ(TokensOf(plan, 2), 1);
  EXPECT_EQ(TokensOf(plan, 3), 1);
  EXPECT_EQ(TokensOf(plan, 4), 32 - 14);
}

TEST(SchedulerTest, NobodyLosesBlocksForADraft) {
  Scene scene{.step_logits = 8 + 10, .num_blocks = 6};
  scene.Running(18, 12);  // 3 blocks; its last token needs one, its draft another
  scene.sequences.back().verifies = true;
  scene.Running(9, 8);
  const StepPlan plan = scene.Plan();
  EXPECT_TRUE(plan.preempt.empty());
  EXPECT_EQ(TokensOf(plan, 0), 1);
}

TEST(SchedulerTest, WhereBlocksAreScarceEvenTheOldestWaits) {
  Scene s;
  s.Running(kBlockTokens + 1, kBlockTokens, 1);
  s.scarce = true;
  EXPECT_TRUE(s.Plan().chunks.empty());
  EXPECT_TRUE(s.Plan().preempt.empty());
}

TEST(SchedulerTest, DecodesComeBeforePrompts) {
  Scene scene{.step_tokens = 8};
  scene.Running(100, 20);  // a long prompt, the oldest
  for (int i = 0; i < 5; ++i) scene.Running(10, 9);
  const StepPlan plan = scene.Plan();
  for (int32_t i = 1; i <= 5; ++i) EXPECT_EQ(TokensOf(plan, i), 1);
  EXPECT_EQ(TokensOf(plan, 0), 3);
}

TEST(SchedulerTest, TheLargerBudgetIsForStepsInWhichNobodyDecodes) {
  Scene scene{.step_tokens = 8, .prompt_step_tokens = 30};
  scene.Running(100, 20);
  scene.Waiting(100);
  EXPECT_EQ(TotalTokens(scene.Plan()), 30);
  scene.Running(10, 9, /*paused=*/true);  // it decodes another time
  EXPECT_EQ(TotalTokens(scene.Plan()), 30);
  scene.sequences.back().paused = false;
  EXPECT_EQ(TotalTokens(scene.Plan()), 8);
  scene.sequences.back().waits = true;
  EXPECT_EQ(TotalTokens(scene.Plan()), 30);
  scene.sequences.back() = scene.sequences.front();
  scene.sequences.back().verifies = true;
  EXPECT_EQ(TotalTokens(scene.Plan()), 8);
}

TEST(SchedulerTest, AShortPromptPassesALongOneWhichKeepsHalf) {
  Scene scene{.step_tokens = 16};
  scene.Running(200, 0);
  scene.Running(50, 0);
  scene.Running(5, 0);
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(TokensOf(plan, 2), 5);  // the shortest ends
  EXPECT_EQ(TokensOf(plan, 1), 3);  // what is left of the second half
  EXPECT_EQ(TokensOf(plan, 0), 8);
}

TEST(SchedulerTest, BudgetThatOthersDoNotNeedGoesToTheOldestPrompt) {
  Scene scene{.step_tokens = 16};
  scene.Running(200, 0);
  scene.Running(3, 0);
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(TokensOf(plan, 0), 13);
  EXPECT_EQ(TokensOf(plan, 1), 3);
}

TEST(SchedulerTest, AdmitsOnlyIntoFreeSlots) {
  Scene scene{.max_running = 2};
  scene.Running(10, 9);
  for (int i = 0; i < 4; ++i) scene.Waiting(4);
  EXPECT_EQ(scene.Plan().admit, std::vector<int32_t>{1});
}

TEST(SchedulerTest, AdmitsOnlyWhatAllRunningPromptsLeaveRoomFor) {
  Scene scene{.num_blocks = 12};
  scene.Running(36, 4);  // holds 1 block and needs 8 more
  scene.Waiting(8);      // needs 2, and 1 is kept spare for the one that runs
  EXPECT_EQ(scene.Plan().admit, std::vector<int32_t>{1});
  scene.num_blocks = 11;
  EXPECT_TRUE(scene.Plan().admit.empty());
}

TEST(SchedulerTest, WhoDoesNotFitIsNotOvertaken) {
  Scene scene{.num_blocks = 10};
  scene.Running(20, 19);
  scene.Waiting(24, 0);
  scene.Waiting(2, 0);
  scene.Waiting(2, 1);
  EXPECT_TRUE(scene.Plan().admit.empty());
}

TEST(SchedulerTest, PreemptedComeBackBeforeThoseThatWait) {
  Scene scene{.max_running = 2};
  scene.Preempted(8);
  scene.Preempted(8);
  scene.Waiting(4);
  EXPECT_EQ(scene.Plan().admit, (std::vector<int32_t>{0, 1}));
}

TEST(SchedulerTest, APausedPreemptedOneDoesNotComeBackAndHoldsNobodyUp) {
  Scene scene;
  scene.Preempted(8, /*paused=*/true);
  scene.Waiting(4);
  EXPECT_EQ(scene.Plan().admit, std::vector<int32_t>{1});
}

TEST(SchedulerTest, TheTenantServedLeastIsAdmittedFirstInOrderOfArrival) {
  Scene scene{.max_running = 3};
  scene.served = {100, 20, 25};
  scene.Waiting(4, 0);
  scene.Waiting(10, 1);
  scene.Waiting(4, 1);
  scene.Waiting(4, 2);
  // Tenant 1 (20), which is then at 30; tenant 2 (25), then at 29 but with nothing left; tenant 1.
  EXPECT_EQ(scene.Plan().admit, (std::vector<int32_t>{1, 3, 2}));
}

TEST(SchedulerTest, AWeightMakesAnAdmissionCostLess) {
  Scene scene{.max_running = 4};
  scene.weights = {4, 1, 1};
  scene.Waiting(8, 0);
  scene.Waiting(8, 0);
  scene.Waiting(8, 0);
  scene.Waiting(5, 1);
  // Tenant 0 is at 2 after its first, tenant 1 at 5 after its only one; then tenant 0 again at 2 and 4.
  EXPECT_EQ(scene.Plan().admit, (std::vector<int32_t>{0, 3, 1, 2}));
  scene.weights = {1, 1, 1};
  scene.max_running = 3;
  scene.Waiting(5, 1);
  EXPECT_EQ(scene.Plan().admit, (std::vector<int32_t>{0, 3, 4}));
}

TEST(SchedulerTest, TheLastAdmittedGivesItsBlocksWhenTheyRunOut) {
  Scene scene{.num_blocks = 6};
  scene.Running(9, 8);  // 2 blocks, needs a third
  scene.Running(8, 7);  // has room in its second
  scene.Running(8, 7);
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(plan.preempt, std::vector<int32_t>{2});
  EXPECT_EQ(TokensOf(plan, 0), 1);
  EXPECT_EQ(TokensOf(plan, 1), 1);
  EXPECT_EQ(TokensOf(plan, 2), 0);
}

TEST(SchedulerTest, ThePausedGiveTheirBlocksBeforeThoseThatRun) {
  Scene scene{.num_blocks = 6};
  scene.Running(8, 7, /*paused=*/true);
  scene.Running(9, 8);
  scene.Running(8, 7);
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(plan.preempt, std::vector<int32_t>{0});
  EXPECT_EQ(TokensOf(plan, 1), 1);
  EXPECT_EQ(TokensOf(plan, 2), 1);
}

TEST(SchedulerTest, AYoungerOneWaitsForBlocksInsteadOfTakingThemFromAnOlder) {
  Scene scene{.num_blocks = 4};
  scene.Running(8, 7);
  scene.Running(9, 8);  // needs a block; nobody is younger
  const StepPlan plan = scene.Plan();
  EXPECT_TRUE(plan.preempt.empty());
  EXPECT_EQ(TokensOf(plan, 0), 1);
  EXPECT_EQ(TokensOf(plan, 1), 0);
}

TEST(SchedulerTest, WhoseKvIsOnItsWayGetsNothingAndKeepsItsBlocks) {
  Scene scene{.step_tokens = 16, .num_blocks = 12};
  scene.Running(30, 8);
  scene.Running(9, 8);   // decodes, and needs a block
  scene.Running(20, 4);  // a prompt
  scene.sequences[0].waits = true;
  const StepPlan plan = scene.Plan();
  EXPECT_TRUE(plan.preempt.empty());
  EXPECT_EQ(TokensOf(plan, 0), 0);
  EXPECT_EQ(TokensOf(plan, 1), 1);
  EXPECT_EQ(TokensOf(plan, 2), 15);
}

// Nobody is younger than the one that needs a block.
TEST(SchedulerTest, ForBlocksOfAnOlderOneWhoseKvIsOnItsWayAYoungerOneWaits) {
  Scene scene{.num_blocks = 4};
  scene.Running(9, 8);
  scene.Running(9, 8);
  scene.sequences[0].waits = true;
  const StepPlan plan = scene.Plan();
  EXPECT_TRUE(plan.preempt.empty());
  EXPECT_TRUE(plan.chunks.empty());
}

TEST(SchedulerTest, AYoungerOneWhoseKvIsOnItsWayLosesItsBlocksToAnOlder) {
  Scene scene{.num_blocks = 4};
  scene.Running(9, 8);
  scene.Running(9, 8);
  scene.sequences[1].waits = true;
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(plan.preempt, std::vector<int32_t>{1});
  EXPECT_EQ(TokensOf(plan, 0), 1);
}

TEST(SchedulerTest, TheOldestPromptTakesBlocksFromTheYounger) {
  Scene scene{.step_tokens = 16, .num_blocks = 6};
  scene.Running(20, 4);
  scene.Running(20, 19);
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(plan.preempt, std::vector<int32_t>{1});
  EXPECT_EQ(TokensOf(plan, 0), 16);
}

TEST(SchedulerTest, PausedAreNotPlanned) {
  Scene scene;
  scene.Running(10, 9, /*paused=*/true);
  scene.Running(10, 9);
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(TokensOf(plan, 0), 0);
  EXPECT_EQ(TokensOf(plan, 1), 1);
}

TEST(SchedulerTest, ABriefPauseIsNotUsedAgainstAnyoneWhileOthersRun) {
  Scene scene{.max_running = 2};
  scene.Running(10, 9);
  scene.Running(10, 9, /*paused=*/true);
  scene.Waiting(4);
  EXPECT_TRUE(scene.Plan().preempt.empty());
  scene.sequences[1].yields = true;
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(plan.preempt, std::vector<int32_t>{1});
  EXPECT_EQ(plan.admit, std::vector<int32_t>{2});
}

TEST(SchedulerTest, WhenAllThatRunArePausedTheyMakeRoomAtOnce) {
  Scene scene{.num_blocks = 6};
  scene.Running(12, 11, /*paused=*/true);
  scene.Running(12, 11, /*paused=*/true);
  scene.Waiting(8);
  const StepPlan plan = scene.Plan();
  EXPECT_EQ(plan.preempt, std::vector<int32_t>{1});
  EXPECT_EQ(plan.admit, std::vector<int32_t>{2});
  EXPECT_EQ(TokensOf(plan, 2), 8);
}

TEST(SchedulerTest, PausedOnesKeepTheirBlocksWhenThatWouldNotBeEnough) {
  Scene scene{.num_blocks = 10};
  scene.Running(28, 27);
  scene.Running(8, 7, /*paused=*/true, /*yields=*/true);
  scene.Waiting(20);
  EXPECT_TRUE(scene.Plan().preempt.empty());
}

TEST(SchedulerTest, TheSameInputGivesTheSamePlan) {
  Scene scene;
  scene.Running(50, 8);
  scene.Waiting(7, 1);
  const auto sequence_of = [](const StepPlan& plan) {
    std::vector<int32_t> all = plan.admit;
    for (const PlannedChunk& c : plan.chunks) {
      all.insert(all.end(), {c.sequence, c.tokens, c.new_blocks});
    }
    return all;
  };
  EXPECT_EQ(sequence_of(scene.Plan()), sequence_of(scene.Plan()));
}

// Every plan for a random scene keeps the rules that the engine and the clients rely on.
void CheckPlan(const Scene& scene, const StepPlan& plan) {
  const auto count = static_cast<int32_t>(scene.sequences.size());
  int32_t free = scene.free_blocks();
  std::set<int32_t> running;
  for (int32_t i = 0; i < count; ++i) {
    if (scene.sequences[i].phase == Phase::kRunning) running.insert(i);
  }
  int32_t oldest = -1;
  for (const int32_t i : running) {
    if (!scene.sequences[i].paused && oldest < 0) oldest = i;
  }
  int32_t first_active_victim = count;
  for (const int32_t i : plan.preempt) {
    ASSERT_EQ(running.erase(i), 1u) << "preempted twice, or was not running";
    free += scene.sequences[i].blocks;
    if (!scene.sequences[i].paused) first_active_victim = std::min(first_active_victim, i);
  }
  for (const int32_t i : running) {
    if (!scene.sequences[i].paused && scene.sequences[i].blocks > 0) {
      EXPECT_LT(i, first_active_victim) << "an older one lost its blocks, a younger kept them";
    }
  }
  if (first_active_victim < count) {
    EXPECT_TRUE(plan.admit.empty()) << "took blocks from one that runs for a newcomer";
  }
  bool fresh_seen = false;
  for (const int32_t i : plan.admit) {
    ASSERT_NE(scene.sequences[i].phase, Phase::kRunning);
    ASSERT_TRUE(running.insert(i).second);
    EXPECT_FALSE(scene.sequences[i].paused);
    if (scene.sequences[i].phase == Phase::kWaiting) fresh_seen = true;
    if (scene.sequences[i].phase == Phase::kPreempted) {
      EXPECT_FALSE(fresh_seen);
    }
  }
  EXPECT_LE(static_cast<int32_t>(running.size()), scene.max_running);
  std::set<int32_t> chunked;
  for (const PlannedChunk& chunk : plan.chunks) {
    const SequenceView& view = scene.sequences[chunk.sequence];
    EXPECT_TRUE(running.count(chunk.sequence));
    EXPECT_TRUE(chunked.insert(chunk.sequence).second);
    EXPECT_FALSE(view.paused);
    EXPECT_GE(chunk.tokens, 1);
    EXPECT_LE(view.computed_tokens + chunk.tokens, view.known_tokens);
    EXPECT_GE(chunk.new_blocks, 0);
    EXPECT_GE((view.blocks + chunk.new_blocks) * kBlockTokens, view.computed_tokens + chunk.tokens);
    free -= chunk.new_blocks;
  }
  EXPECT_GE(free, 0);
  EXPECT_LE(TotalTokens(plan), scene.step_tokens);
  if (oldest >= 0) {
    EXPECT_GE(TokensOf(plan, oldest), 1) << "the oldest does not progress";
  }
  const bool somebody_could_run =
      std::any_of(scene.sequences.begin(), scene.sequences.end(),
                  [](const SequenceView& view) { return !view.paused; });
  if (somebody_could_run) {
    EXPECT_FALSE(plan.chunks.empty()) << "idle beside work";
  }
}

TEST(SchedulerTest, RandomScenesKeepEveryRule) {
  for (uint32_t seed = 0; seed < 20'000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&random](int32_t low, int32_t high) {
      return std::uniform_int_distribution<int32_t>(low, high)(random);
    };
    Scene scene;
    scene.max_running = pick(1, 8);
    scene.step_tokens = pick(scene.max_running, 40);
    scene.num_blocks = pick(1, 40);
    const int32_t running = pick(0, scene.max_running);
    int32_t free = scene.num_blocks;
    for (int32_t i = 0; i < running; ++i) {
      const int32_t known = pick(1, scene.num_blocks * kBlockTokens);
      const int32_t computed =
          std::min({pick(0, 3) == 0 ? pick(0, known - 1) : known - 1, free * kBlockTokens});
      const bool paused = pick(0, 4) == 0;
      scene.Running(known, computed, paused, paused && pick(0, 1) == 0);
      // Sometimes a block is held ahead of its use.
      SequenceView& view = scene.sequences.back();
      free -= view.blocks;
      if (free > 0 && pick(0, 3) == 0) ++view.blocks, --free;
    }
    for (int32_t i = pick(0, 3); i > 0; --i) {
      scene.Preempted(pick(1, scene.num_blocks * kBlockTokens), pick(0, 4) == 0);
    }
    for (int32_t i = pick(0, 6); i > 0; --i) {
      scene.Waiting(pick(1, scene.num_blocks * kBlockTokens), pick(0, 2));
    }
    for (double& served : scene.served) served = pick(0, 100);
    CheckPlan(scene, scene.Plan());
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace winnow::engine
