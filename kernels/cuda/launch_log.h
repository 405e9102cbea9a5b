// Kernel launches of decode steps, which repeat themselves. A run is what is launched between two things
// that are no launch (a copy, the host that waits). A run's first launches go at once, to keep the device at work;
// the others, if they are a remembered run's, byte for byte, are held back until the last one and asked for as one
// graph. What no run has is launched as it always was, and remembered beside the others: a dense step and a draft
// of one row begin with the same launches, take turns, and have a graph each.
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
  // Of these, with the same turn and first launch: as many as two kinds of steps need while their contexts grow
  // by a split. Others, of prompts that differ from chunk to chunk, would take the places of all batches.
  static constexpr size_t kMostAlike = 4;

  explicit LaunchLog(LaunchDevice& device) : device_(device) {}
  LaunchLog(const LaunchLog&) = delete;
  LaunchLog& operator=(const LaunchLog&) = delete;

  // Asks for it, or holds it back until EndRun at most. False: the device has failed.
  [[nodiscard]] bool Launch(LaunchBytes launch);
  // Asks for what is held back: something follows that is no launch of this log.
  [[nodiscard]] bool EndRun();
  // EndRun was called, and the host is about to wait for the device, as it does where a pass ends: turns count from
  // here on. Makes graphs of the runs that have come twice, which takes up to a millisecond.
  void EndPass();
  // The device has done all that it was asked for.
  void Waited() { dropped_.clear(); }

  const LaunchCounts& counts() const { return counts_; }

 private:
  struct Run {
    std::vector<std::byte> bytes;        // of the launches, each from a multiple of 16 on
    std::vector<size_t> ends;            // of each, where its bytes end
    int64_t turn = 0;                    // of its pass, after how many others
    bool repeated = false;               // came twice
    bool refused = false;                // there is no graph of it
    int64_t used = 0;                    // when last, counted in runs
    std::unique_ptr<LaunchGraph> graph;  // of all but the first kAtOnce

    size_t size() const { return ends.size(); }
    LaunchBytes At(size_t i) const;
    void Append(LaunchBytes launch);
    // Its first `count` launches are the other's.
    bool BeginsAs(const Run& other, size_t count) const;
  };

  // The remembered run to follow if the current one goes on with `launch`; null: there is none. With a graph before
  // without one, for what is followed without one is launched, and no other's graph can be used any more. The
  // longest before its beginnings, whose graphs would be launched too early; one that ends early costs nothing.
  Run* RunThatGoesOnWith(LaunchBytes launch) const;
  // The remembered run of what came of the current one and no more.
  Run* RunThatEndsHere() const;
  // Nothing remembered is like the current run: follows none from now on, but writes it down.
  [[nodiscard]] bool WriteDown();
  // Keeps what was written down; the run that was used longest ago goes for it, if need be.
  void Remember();
  // Then only the first kAtOnce launches were asked for.
  bool UsesGraph() const { return run_ != nullptr && run_->graph != nullptr; }
  [[nodiscard]] bool LaunchTheGraph();
  [[nodiscard]] bool LaunchHeldBack();

  LaunchDevice& device_;
  std::vector<std::unique_ptr<Run>> runs_;
  // Of the current run:
  size_t at_ = 0;       // how many launches came; 0: there is none
  size_t asked_ = 0;    // and were asked for
  Run* run_ = nullptr;  // of `runs_`, which began so; null: none did
  Run written_;         // then, all that came, but for what is too long
  bool too_long_ = false;
  int64_t clock_ = 0, turn_ = 0;
  std::vector<std::unique_ptr<LaunchGraph>> dropped_;  // may still run
  LaunchCounts counts_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_LAUNCH_LOG_H_
