// Kernel launches of decode steps, which repeat themselves. A run is what is launched between two things
// that are no launch (a copy, the host that waits). A run's first launches go at once, to keep the device at work, and say
// which run it is; the others, if they are the last time's, byte for byte, are held back until the last one and asked for
// as one graph. What differs is launched as it always was. (Where a model's first layers have windows, a dense step and a
// draft of one row begin with the same launches for longer, and take turns in one run's place.)
// So a graph is never wrong, whatever changed since it was made: a batch of another size, a workspace
// that moved, a context with one split more. Device memory that descriptors pass through may change freely; it
// is no part of a launch.
//
// Plans, and touches no device: what it asks of one is LaunchDevice, so that tests can run it without a GPU.
// One object, used from one thread at a time.
#ifndef WINNOW_KERNELS_CUDA_LAUNCH_LOG_H_
#define WINNOW_KERNELS_CUDA_LAUNCH_LOG_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/device_ops.h"

namespace winnow::kernels::cuda {

// A launch: the kernel, its grid and its arguments, in bytes that are equal if and only if those are.
using LaunchBytes = std::span<const std::byte>;

class LaunchGraph {
 public:
  virtual ~LaunchGraph() = default;  // what it was launched for has ended
  // False: the device has failed.
  [[nodiscard]] virtual bool Launch() = 0;
};

// Does what it is asked for in turn. What it is given is copied.
class LaunchDevice {
 public:
  virtual ~LaunchDevice() = default;
  // False: the device has failed.
  [[nodiscard]] virtual bool Launch(LaunchBytes launch) = 0;
  // Of launches one after the other. Null: there is none, and these go alone as before.
  virtual std::unique_ptr<LaunchGraph> MakeGraph(std::span<const LaunchBytes> launches) = 0;
};

class LaunchLog {
 public:
  // Of a run, at once: as long as the device takes for these, the host has for the others. A step of
  // Qwen3-0.6B's shape on an H200, 341 launches: 1.30 ms without graphs, 1.22 with 0, 16 or 48 at once; of
  // Llama-3.1-8B's, dense at 128K, 8.96, and 8.99, 8.82, 8.82.
  static constexpr size_t kAtOnce = 16;
  // Shorter runs go alone: a graph of them gains less than finding it costs.
  static constexpr size_t kLeastLaunches = kAtOnce + 16;
  // Longer ones too: such a prompt comes once.
  static constexpr size_t kMostLaunches = 4096;
  // That are remembered, with their graphs; what was used last stays.
  static constexpr size_t kMostRuns = 64;
  // Runs among these with the same turn and first launch: dense steps and drafts of one row, while their contexts grow by a
  // split. The chunks of a long prompt, each of which comes once, would take all places.
  static constexpr size_t kMostAlike = 4;
  // Times that a run comes, without a change, before it has a graph: one takes what four runs gain by theirs, and runs of
  // verifications come a few times each.
  static constexpr int kTimesBeforeGraph = 4;

  explicit LaunchLog(LaunchDevice& device) : device_(device) {}
  LaunchLog(const LaunchLog&) = delete;
  LaunchLog& operator=(const LaunchLog&) = delete;

  // Asks for it, or holds it back until EndRun at most. False: the device has failed.
  [[nodiscard]] bool Launch(LaunchBytes launch);
  // Asks for what is held back: something follows that is no launch of this log.
  [[nodiscard]] bool EndRun();
  // The host is about to wait for the device, as it does where a pass ends: turns count from here on. Makes graphs of
  // the runs that have come often enough, which takes up to a millisecond.
  void EndPass();
  // The device has done all that it was asked for.
  void Waited() { dropped_.clear(); }

  const LaunchCounts& counts() const { return counts_; }

 private:
  struct Run {
    std::vector<std::byte> bytes;        // of the launches, each from a multiple of 16 on
    std::vector<size_t> ends;            // of each, where its bytes end
    int64_t turn = 0;                    // of its pass, after how many others
    int times = 0;                       // that it came as it is
    bool refused = false;                // there is no graph of it
    int64_t used = 0;                    // when last, counted in runs
    std::unique_ptr<LaunchGraph> graph;  // of all but the first kAtOnce

    size_t size() const { return ends.size(); }
    LaunchBytes At(size_t i) const;
    void Append(LaunchBytes launch);
    void Truncate(size_t size);
    // Its first `count` launches are the other's. REQUIRES: both have so many.
    bool BeginsAs(const Run& other, size_t count) const;
  };

  // The remembered run of this turn that begins as `first_` does, or a place for it, which has these launches alone.
  Run& RunThatBeginsSo();
  Run& PlaceForRun();
  void Clear(Run& run);
  // The current run is not what is remembered of it: `at_` launches are.
  [[nodiscard]] bool Differ();
  [[nodiscard]] bool LaunchHeldBack();

  LaunchDevice& device_;
  std::vector<std::unique_ptr<Run>> runs_;
  Run first_;           // launches of the current run, kAtOnce at most
  Run* run_ = nullptr;  // which one that is; null: it is not known yet
  size_t at_ = 0;       // of its launches, how many came
  size_t asked_ = 0;    // and were asked for
  bool differs_ = false, too_long_ = false;
  int64_t clock_ = 0, turn_ = 0;
  std::vector<std::unique_ptr<LaunchGraph>> dropped_;  // may still run
  LaunchCounts counts_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_LAUNCH_LOG_H_
