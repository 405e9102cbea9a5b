#include "bench/reclaim.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "storage/clock.h"
#include "storage/disk_store.h"
#include "storage/index.h"
#include "storage/ring.h"

namespace winnow::bench {
namespace {

using std::chrono::steady_clock;

// One page of payload and one of header.
constexpr uint64_t kBlockBytes = 2 * storage::kPageBytes;

double ThreadCpuUs() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

class Timer {
 public:
  explicit Timer(std::string call) : call_(std::move(call)) {}

  template <typename Call>
  void Time(const Call& call) {
    const auto wall = steady_clock::now();
    const double cpu = ThreadCpuUs();
    call();
    cpu_us_.push_back(static_cast<float>(ThreadCpuUs() - cpu));
    const std::chrono::duration<double, std::micro> took = steady_clock::now() - wall;
    wall_us_max_ = std::max(wall_us_max_, took.count());
  }

  CallTimes Take() {
    CallTimes out{.call = call_, .calls = cpu_us_.size(), .wall_us_max = wall_us_max_};
    if (!cpu_us_.empty()) {
      std::sort(cpu_us_.begin(), cpu_us_.end());
      out.cpu_us_mean = std::accumulate(cpu_us_.begin(), cpu_us_.end(), 0.0) /
                        static_cast<double>(cpu_us_.size());
      out.cpu_us_p999 = cpu_us_[cpu_us_.size() * 999 / 1000];
      out.cpu_us_max = cpu_us_.back();
    }
    cpu_us_.clear();
    wall_us_max_ = 0;
    return out;
  }

 private:
  const std::string call_;
  std::vector<float> cpu_us_;
  double wall_us_max_ = 0;
};

storage::BlockId IdOf(uint64_t number) {
  storage::BlockId id;
  std::array<uint8_t, 32> chain = {};
  std::mt19937_64 random(number);
  for (size_t i = 0; i < chain.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(chain.data() + i, &word, 8);
  }
  id.key = storage::BlockKey::Make(chain, /*kind=*/1, /*layer=*/0);
  id.token_block = number;
  return id;
}

// A disk that has synced as soon as it is asked, because its time is not measured here.
class SyncedEngine final : public storage::IoEngine {
 public:
  explicit SyncedEngine(std::unique_ptr<storage::IoEngine> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  std::string Describe() const override { return inner_->Describe(); }
  uint32_t depth() const override { return inner_->depth(); }
  void Push(const storage::IoRequest& request) override {
    if (request.kind == storage::IoKind::kDatasync || request.kind == storage::IoKind::kSync) {
      synced_.push_back({request.slot, 0});
    } else {
      inner_->Push(request);
    }
  }
  int Flush() override { return inner_->Flush(); }
  void Reap(std::chrono::nanoseconds wait, std::vector<storage::IoEvent>* events) override {
    events->insert(events->end(), synced_.begin(), synced_.end());
    inner_->Reap(synced_.empty() ? wait : std::chrono::nanoseconds(0), events);
    synced_.clear();
  }
  void RegisterBuffer(std::span<std::byte> buffer) override { inner_->RegisterBuffer(buffer); }
  void RegisterFile(int fd) override { inner_->RegisterFile(fd); }
  void UnregisterFile(int fd) override { inner_->UnregisterFile(fd); }

 private:
  std::unique_ptr<storage::IoEngine> inner_;
  std::vector<storage::IoEvent> synced_;
};

// Keeps nothing: the caller hands batches over to the index's thread, whatever becomes of them there.
class NoIndex final : public storage::IndexDb {
 public:
  absl::Status Load(const std::function<void(const storage::BlockKey&, std::string_view)>&,
                    std::string*) override {
    return absl::OkStatus();
  }
  absl::Status Write(const storage::IndexBatch&) override { return absl::OkStatus(); }
};

// The store's caller: makes the calls of the engine's thread, and times each.
class Caller {
 public:
  Caller(storage::BlockStore* store, uint32_t in_flight)
      : store_(store), in_flight_max_(in_flight), payload_(storage::kPageBytes) {}

  void Put(uint64_t number) {
    put_.Time([&] { store_->Put(number, IdOf(number), payload_, {}); });
  }
  void Use(uint64_t number) {
    const storage::BlockKey key = IdOf(number).key;
    use_.Time([&] { store_->SetInUse(key, number % 64 == 0); });
  }
  void Get(uint64_t number) {
    const storage::BlockId id = IdOf(number);
    get_.Time([&] { store_->Get(number, id, into_, 0); });
  }
  // Polls until fewer than the most are in flight; false: not within a minute.
  bool Poll(bool until_idle) {
    const auto limit = steady_clock::now() + std::chrono::minutes(1);
    do {
      completions_.clear();
      poll_.Time([&] { store_->Poll(std::chrono::nanoseconds(0), &completions_); });
      // Not a wait inside of Poll, whose time would be the disk's.
      if (completions_.empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (steady_clock::now() > limit) return false;
    } while (store_->in_flight() >= in_flight_max_ || (until_idle && !store_->idle()));
    return true;
  }
  std::vector<CallTimes> Take() {
    std::vector<CallTimes> out;
    for (Timer* timer : {&put_, &poll_, &use_, &get_}) {
      CallTimes times = timer->Take();
      if (times.calls > 0) out.push_back(std::move(times));
    }
    return out;
  }

 private:
  storage::BlockStore* const store_;
  const uint32_t in_flight_max_;
  const std::vector<std::byte> payload_;
  std::vector<std::byte> into_ = std::vector<std::byte>(storage::kPageBytes);
  std::vector<storage::Completion> completions_;
  Timer put_{"Put"}, poll_{"Poll"}, use_{"SetInUse"}, get_{"Get"};
};

}  // namespace

absl::StatusOr<ReclaimBenchReport> RunReclaimBench(const ReclaimBenchOptions& options) {
  const storage::SystemClock clock;
  storage::DiskStoreOptions store_options;
  store_options.directory = options.directory;
  store_options.segment_bytes = options.segment_bytes;
  const uint64_t per_segment = options.segment_bytes / kBlockBytes - 1;
  // One segment more is kept free for moves.
  store_options.capacity_bytes = (options.entries / per_segment + 2) * options.segment_bytes;
  store_options.seams.decorate_engine = [](std::unique_ptr<storage::IoEngine> engine) {
    return std::make_unique<SyncedEngine>(std::move(engine));
  };
  store_options.seams.open_index =
      [](const std::string&) -> absl::StatusOr<std::unique_ptr<storage::IndexDb>> {
    return std::make_unique<NoIndex>();
  };
  auto opened = storage::DiskStore::Open(store_options, &clock);
  if (!opened.ok()) return opened.status();
  std::unique_ptr<storage::DiskStore> store = *std::move(opened);
  Caller caller(store.get(), options.in_flight);
  ReclaimBenchReport report;
  const absl::Status slow = absl::DeadlineExceededError("the disk did not keep up");
  const auto put = [&](uint64_t from, uint64_t to, bool use) {
    std::mt19937_64 random(from);
    for (uint64_t number = from; number < to; ++number) {
      caller.Put(number);
      if (use && number % 4 == 0) caller.Use(random() % number);
      if (use && number % 16 == 0) caller.Get(random() % number);
      if (!caller.Poll(/*until_idle=*/false)) return false;
    }
    return caller.Poll(/*until_idle=*/true);
  };
  if (!put(0, options.entries, false)) return slow;
  report.entries = store->stats().blocks;
  report.fill = caller.Take();
  const storage::StoreStats before = store->stats();
  if (!put(options.entries, options.entries + options.segments * per_segment, true)) return slow;
  report.reclaim = caller.Take();
  report.evicted = store->stats().evicted_blocks - before.evicted_blocks;
  report.moved = store->stats().moved_blocks - before.moved_blocks;
  store.reset();
  std::error_code ignored;
  std::filesystem::remove_all(options.directory, ignored);
  return report;
}

}  // namespace winnow::bench
