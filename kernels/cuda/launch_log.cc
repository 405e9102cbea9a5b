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

void LaunchLog::Run::Truncate(size_t size) {
  ends.resize(size);
  bytes.resize(size == 0 ? 0 : ends.back());
}

bool LaunchLog::Run::BeginsAs(const Run& other, size_t count) const {
  const auto end = static_cast<ptrdiff_t>(count);
  return std::equal(ends.begin(), ends.begin() + end, other.ends.begin()) &&
         std::memcmp(bytes.data(), other.bytes.data(), ends[count - 1]) == 0;
}

LaunchLog::Run& LaunchLog::RunThatBeginsSo() {
  for (const auto& run : runs_) {
    if (run->turn == turn_ && run->size() > 0 && run->BeginsAs(first_, kAtOnce)) return *run;
  }
  Run& place = PlaceForRun();
  place = Run();
  place.turn = turn_;
  place.bytes = first_.bytes;
  place.ends = first_.ends;
  return place;
}

LaunchLog::Run& LaunchLog::PlaceForRun() {
  Run* oldest = nullptr;
  Run* oldest_alike = nullptr;
  size_t alike = 0;
  const auto older = [](const Run* run, const Run& other) {
    return run == nullptr || other.used < run->used;
  };
  for (const auto& run : runs_) {
    if (run->size() == 0) return *run;
    if (older(oldest, *run)) oldest = run.get();
    if (run->turn != turn_ || !run->BeginsAs(first_, 1)) continue;
    ++alike;
    if (older(oldest_alike, *run)) oldest_alike = run.get();
  }
  if (alike < kMostAlike && runs_.size() < kMostRuns) {
    return *runs_.emplace_back(std::make_unique<Run>());
  }
  Run& place = alike < kMostAlike ? *oldest : *oldest_alike;
  Clear(place);
  return place;
}

void LaunchLog::Clear(Run& run) {
  if (run.graph != nullptr) dropped_.push_back(std::move(run.graph));
  run = Run();
}

bool LaunchLog::Launch(LaunchBytes launch) {
  if (run_ == nullptr) {
    first_.Append(launch);
    ++counts_.alone;
    if (first_.size() == kAtOnce) {
      run_ = &RunThatBeginsSo();
      run_->used = ++clock_;
      at_ = asked_ = kAtOnce;
      differs_ = too_long_ = false;
    }
    return device_.Launch(launch);
  }
  if (at_ < run_->size() && Equal(run_->At(at_), launch)) {
    ++at_;
    if (run_->graph == nullptr) return LaunchHeldBack();
    if (at_ < run_->size()) return true;
    counts_.in_graphs += static_cast<int64_t>(at_ - asked_);
    asked_ = at_;
    return run_->graph->Launch();
  }
  if (!Differ()) return false;
  if (at_ < kMostLaunches) {
    run_->Append(launch);
    ++at_;
    return LaunchHeldBack();
  }
  too_long_ = true;
  ++counts_.alone;
  return device_.Launch(launch);
}

bool LaunchLog::Differ() {
  if (!LaunchHeldBack()) return false;
  differs_ = true;
  if (run_->graph != nullptr) dropped_.push_back(std::move(run_->graph));
  run_->Truncate(at_);
  return true;
}

bool LaunchLog::LaunchHeldBack() {
  for (; asked_ < at_; ++asked_) {
    ++counts_.alone;
    if (!device_.Launch(run_->At(asked_))) return false;
  }
  return true;
}

bool LaunchLog::EndRun() {
  if (first_.size() == 0) return true;
  first_.Truncate(0);
  ++turn_;
  if (run_ == nullptr) return true;
  // Cut off before the end that is remembered, it is another run from now on.
  const bool good = at_ == run_->size() || Differ();
  Run& run = *std::exchange(run_, nullptr);
  if (differs_) {
    run.times = 0;
    run.refused = false;
  }
  ++run.times;
  if (too_long_ || run.size() < kLeastLaunches) Clear(run);
  return good;
}

void LaunchLog::EndPass() {
  turn_ = 0;
  std::vector<LaunchBytes> launches;
  for (const auto& run : runs_) {
    if (run.get() == run_ || run->times < kTimesBeforeGraph || run->refused ||
        run->graph != nullptr) {
      continue;
    }
    launches.clear();
    for (size_t i = kAtOnce; i < run->size(); ++i) launches.push_back(run->At(i));
    run->graph = device_.MakeGraph(launches);
    run->refused = run->graph == nullptr;
  }
}

}  // namespace winnow::kernels::cuda
