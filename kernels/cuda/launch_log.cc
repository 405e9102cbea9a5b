#include "kernels/cuda/launch_log.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace winnow::kernels::cuda {
namespace {

constexpr size_t kAlignment = 16;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool Equal(LaunchBytes a, LaunchBytes b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

LaunchBytes LaunchLog::Run::At(size_t i) const {
  const size_t first = i == 0 ? 0 : Aligned(ends[i - 1]);
  return LaunchBytes(bytes).subspan(first, ends[i] - first);
}

void LaunchLog::Run::Append(LaunchBytes launch) {
  bytes.resize(Aligned(bytes.size()));
  bytes.insert(bytes.end(), launch.begin(), launch.end());
  ends.push_back(bytes.size());
}

bool LaunchLog::Run::BeginsAs(const Run& other, size_t count) const {
  if (size() < count || other.size() < count) return false;
  if (count == 0) return true;
  const size_t end = ends[count - 1];
  return std::equal(ends.begin(), ends.begin() + static_cast<ptrdiff_t>(count),
                    other.ends.begin()) &&
         std::memcmp(bytes.data(), other.bytes.data(), end) == 0;
}

LaunchLog::Run* LaunchLog::RunThatGoesOnWith(LaunchBytes launch) const {
  const Run& current = run_ != nullptr ? *run_ : written_;
  Run* best = nullptr;
  const auto before = [](const Run& a, const Run& b) {
    const bool has = a.graph != nullptr;
    return has != (b.graph != nullptr) ? has : a.size() > b.size();
  };
  for (const auto& run : runs_) {
    if (run->turn == turn_ && run->size() > at_ && (best == nullptr || before(*run, *best)) &&
        Equal(run->At(at_), launch) && run->BeginsAs(current, at_)) {
      best = run.get();
    }
  }
  return best;
}

LaunchLog::Run* LaunchLog::RunThatEndsHere() const {
  const auto found = std::find_if(runs_.begin(), runs_.end(), [this](const auto& run) {
    return run->turn == turn_ && run->size() == at_ && run->BeginsAs(*run_, at_);
  });
  return found == runs_.end() ? nullptr : found->get();
}

bool LaunchLog::WriteDown() {
  if (!LaunchHeldBack()) return false;
  const Run* const followed = std::exchange(run_, nullptr);
  for (size_t i = 0; i < at_; ++i) written_.Append(followed->At(i));
  return true;
}

void LaunchLog::Remember() {
  written_.turn = turn_;
  written_.used = ++clock_;
  const auto alike = [this](const auto& run) {
    return run->turn == turn_ && run->BeginsAs(written_, 1);
  };
  const bool too_many_alike =
      std::count_if(runs_.begin(), runs_.end(), alike) >= static_cast<ptrdiff_t>(kMostAlike);
  if (too_many_alike || runs_.size() == kMostRuns) {
    // Those that may go come first.
    const auto end =
        too_many_alike ? std::partition(runs_.begin(), runs_.end(), alike) : runs_.end();
    const auto oldest = std::min_element(
        runs_.begin(), end, [](const auto& a, const auto& b) { return a->used < b->used; });
    if ((*oldest)->graph != nullptr) dropped_.push_back(std::move((*oldest)->graph));
    runs_.erase(oldest);
  }
  runs_.push_back(std::make_unique<Run>(std::move(written_)));
}

bool LaunchLog::Launch(LaunchBytes launch) {
  if (too_long_) {
    ++counts_.alone;
    return device_.Launch(launch);
  }
  const bool follows = run_ != nullptr && at_ < run_->size() && Equal(run_->At(at_), launch);
  if (!follows && (at_ == 0 || run_ != nullptr)) {
    if (Run* const other = RunThatGoesOnWith(launch); other != nullptr) {
      run_ = other;
    } else if (run_ != nullptr && !WriteDown()) {
      return false;
    }
  }
  if (run_ == nullptr) {
    if (at_ == kMostLaunches) {
      too_long_ = true;
      return Launch(launch);
    }
    written_.Append(launch);
  }
  ++at_;
  if (!UsesGraph() || at_ <= kAtOnce) return LaunchHeldBack();
  return at_ < run_->size() || LaunchTheGraph();
}

bool LaunchLog::LaunchTheGraph() {
  counts_.in_graphs += static_cast<int64_t>(at_ - asked_);
  asked_ = at_;
  return run_->graph->Launch();
}

bool LaunchLog::LaunchHeldBack() {
  const Run& run = run_ != nullptr ? *run_ : written_;
  for (; asked_ < at_; ++asked_) {
    ++counts_.alone;
    if (!device_.Launch(run.At(asked_))) return false;
  }
  return true;
}

bool LaunchLog::EndRun() {
  if (at_ == 0) return true;
  bool good = true;
  if (run_ != nullptr && at_ < run_->size()) {
    if (Run* const shorter = RunThatEndsHere(); shorter != nullptr) {
      run_ = shorter;
      good = UsesGraph() ? LaunchTheGraph() : LaunchHeldBack();
    } else {
      good = WriteDown();
    }
  }
  if (run_ != nullptr) {
    run_->repeated = true;
    run_->used = ++clock_;
  } else if (!too_long_ && at_ >= kLeastLaunches) {
    Remember();
  }
  run_ = nullptr;
  written_ = Run();
  at_ = asked_ = 0;
  too_long_ = false;
  ++turn_;
  return good;
}

void LaunchLog::EndPass() {
  turn_ = 0;
  std::vector<LaunchBytes> launches;
  for (const auto& run : runs_) {
    if (!run->repeated || run->refused || run->graph != nullptr) continue;
    launches.clear();
    for (size_t i = kAtOnce; i < run->size(); ++i) launches.push_back(run->At(i));
    run->graph = device_.MakeGraph(launches);
    run->refused = run->graph == nullptr;
  }
}

}  // namespace winnow::kernels::cuda
