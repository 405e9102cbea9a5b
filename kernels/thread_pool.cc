#include "kernels/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

#include "kernels/check.h"

namespace winnow::kernels {
namespace {

constexpr uint32_t kOpen = 1u << 31;
// About 40 µs of pauses: longer than the gaps inside a decode step, shorter than anybody would
// miss.
constexpr int kSpins = 2000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

constexpr size_t kLineBytes = 64;
// Asked for at once: a thread that does so sees new work a fraction of a microsecond later.
constexpr size_t kAskBytes = 16 * kLineBytes;

// Quota over period of the cgroup, in processors; 0 when there is none.
double CgroupQuotaProcessors() {
  std::string quota;
  double period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> quota >> period) {
    return quota == "max" || period <= 0 ? 0 : std::stod(quota) / period;
  }
  double quota_us = 0;
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (v1_quota >> quota_us && v1_period >> period && quota_us > 0 && period > 0)
    return quota_us / period;
  return 0;
}

}  // namespace

void ThreadPool::Asking::Set(const Ahead& ahead) {
  if (ahead.from == of_.from && ahead.bytes == of_.bytes) return;
  of_ = ahead;
  asked_ = 0;
}

void ThreadPool::Asking::Next() {
  if (asked_ >= of_.bytes) return Pause();
  const size_t end = std::min(asked_ + kAskBytes, of_.bytes);
  for (; asked_ < end; asked_ += kLineBytes) {
    __builtin_prefetch(of_.from + asked_, /*rw=*/0, /*locality=*/2);  // into the second cache
  }
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), ahead_(num_threads) {
  WINNOW_CHECK(num_threads >= 1);
  workers_.reserve(num_threads - 1);
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { WorkerMain(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
}

void ThreadPool::Run(int64_t count, Trampoline call, void* context) {
  if (num_threads_ == 1 || count <= 1) {
    for (int64_t item = 0; item < count; ++item) call(context, item, 0);
    return;
  }
  call_ = call;
  context_ = context;
  count_ = count;
  if (!ahead_given_.empty()) std::copy_n(ahead_given_.begin(), num_threads_, ahead_.begin());
  owned_.store(0, std::memory_order_relaxed);
  next_item_.store(own_first_ ? std::min<int64_t>(count, num_threads_) : 0,
                   std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  WorkItems(0);
  // Every item is taken. Shut the gate, then wait for those inside to finish theirs.
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  asking_.Set(ahead_[0]);
  uint32_t inside = 0;
  for (int spins = 0; (inside = gate_.load(std::memory_order_acquire)) != 0; ++spins) {
    if (spins < kSpins) {
      asking_.Next();
    } else {
      // One of them has lost its processor: asleep, this thread leaves it its own.
      gate_.wait(inside, std::memory_order_acquire);
    }
  }
}

void ThreadPool::WorkItems(int thread) {
  const auto take_own = [&](int of) {
    const uint64_t bit = uint64_t{1} << of;
    if ((owned_.fetch_or(bit, std::memory_order_relaxed) & bit) == 0) call_(context_, of, thread);
  };
  const bool own_first = own_first_;
  if (own_first && thread < count_) take_own(thread);
  for (;;) {
    const int64_t item = next_item_.fetch_add(1, std::memory_order_relaxed);
    if (item >= count_) break;
    call_(context_, item, thread);
  }
  if (!own_first) return;
  // Items of threads that have not come.
  const int owners = static_cast<int>(std::min<int64_t>(count_, num_threads_));
  for (int of = 0; of < owners; ++of) {
    if ((owned_.load(std::memory_order_relaxed) >> of & 1) == 0) take_own(of);
  }
}

// Enters the loop if it is open. Whoever is inside holds the gate above zero, so the caller cannot
// change the loop's fields under it.
bool ThreadPool::TryJoin() {
  uint32_t gate = gate_.load(std::memory_order_acquire);
  while (gate & kOpen) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel,
                                    std::memory_order_acquire))
      return true;
  }
  return false;
}

void ThreadPool::WorkerMain(int thread) {
  uint32_t seen = 0;
  Asking asking;
  for (;;) {
    for (int spins = 0; spins < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spins)
      asking.Next();
    epoch_.wait(seen, std::memory_order_acquire);
    seen = epoch_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!TryJoin()) continue;
    WorkItems(thread);
    asking.Set(ahead_[thread]);
    // The caller waits for each change of a gate that is shut.
    if ((gate_.fetch_sub(1, std::memory_order_acq_rel) & kOpen) == 0) gate_.notify_one();
  }
}

int UsableProcessors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int processors = 1;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    processors = std::max(1, CPU_COUNT(&set));
  } else {
    processors = std::max(1u, std::thread::hardware_concurrency());  // more than 1024 processors
  }
  const double quota = CgroupQuotaProcessors();
  if (quota > 0) processors = std::clamp(static_cast<int>(std::ceil(quota)), 1, processors);
  return processors;
}

}  // namespace winnow::kernels
