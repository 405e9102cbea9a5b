// Fault injection below storage: an IoEngine and a FileSystem that fail, shorten, delay, corrupt
// and reorder what the real ones do, by a plan and a seed. Both count the same operations, so that
// one sweep over N reaches every system call a workload makes.
#ifndef WINNOW_TESTS_FAULT_FAULTY_RING_H_
#define WINNOW_TESTS_FAULT_FAULTY_RING_H_

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "storage/file_system.h"
#include "storage/ring.h"

namespace winnow::storage {

enum class Call {
  kRead,
  kWrite,
  kDatasync,
  kSync,
  kAllocate,
  kOpen,
  kTruncate,
  kRename,
  kUnlink,
  kSyncDirectory,
  kList,
  kMakeDirectory
};

struct FaultPlan {
  explicit FaultPlan(uint32_t seed) : random(seed) {}

  // The Nth call from now (from 1) fails with `error`; with `persistent`, all later ones too.
  void FailNth(int64_t n, int error_code, bool persist) {
    const std::lock_guard lock(mutex);
    countdown = n;
    error = error_code;
    persistent = persist;
    tripped = false;
  }
  // Calls of this kind fail until called with 0.
  void FailAll(Call call, int error_code) {
    const std::lock_guard lock(mutex);
    failing[call] = error_code;
  }
  void Heal() {
    const std::lock_guard lock(mutex);
    countdown = 0;
    tripped = false;
    failing.clear();
    short_share = repeat_share = corrupt_share = 0;
    hold = nullptr;
  }

  // 0, or the errno this call fails with.
  int Next(Call call) {
    const std::lock_guard lock(mutex);
    ++calls;
    if (const auto it = failing.find(call); it != failing.end() && it->second != 0) {
      return it->second;
    }
    if (tripped && persistent) return error;
    if (countdown > 0 && --countdown == 0) {
      tripped = true;
      return error;
    }
    return 0;
  }
  bool Chance(double share) {
    return share > 0 && std::uniform_real_distribution<double>(0, 1)(random) < share;
  }

  std::mutex mutex;  // the index writer's thread makes calls, too
  std::mt19937 random;
  std::atomic<int64_t> calls = 0;
  int64_t countdown = 0;
  int error = EIO;
  bool persistent = false;
  std::atomic<bool> tripped = false;  // the Nth call was reached
  std::map<Call, int> failing;
  double short_share = 0;    // of reads and writes: less is moved
  double repeat_share = 0;   // EAGAIN or EINTR
  double corrupt_share = 0;  // of reads: one bit differs
  bool reorder = false;
  bool hold_reads = false;  // reads do not start until this is false again
  bool hold_writes = false;
  // Requests it is true for do not start until it no longer is.
  std::function<bool(const IoRequest&)> hold;
  bool track_writes = false;
  // Requests that the engine below has: the kernel answers them in its own time.
  std::atomic<int> passed = 0;

  struct Range {
    uint64_t offset;
    uint64_t bytes;
  };
  std::map<std::string, std::vector<Range>> unsynced;  // by path; written, not yet synced

  // What a power cut does to the files (or to copies of them in `to`): of every write that no
  // fdatasync covered, each sector is there or is not.
  void LosePower(const std::string& to) {
    for (const auto& [file, ranges] : unsynced) {
      const std::string path = to + file.substr(file.rfind('/'));
      const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
      if (fd < 0) continue;
      const char zeros[512] = {};
      for (const Range& range : ranges) {
        const bool all = Chance(0.3);
        for (uint64_t at = 0; at < range.bytes; at += sizeof zeros) {
          if (all || Chance(0.5)) {
            (void)!::pwrite(fd, zeros, sizeof zeros, static_cast<off_t>(range.offset + at));
          }
        }
      }
      ::close(fd);
    }
    unsynced.clear();
  }
};

class FaultyRing final : public IoEngine {
 public:
  FaultyRing(std::unique_ptr<IoEngine> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), requests_(inner_->depth()) {}

  std::string name() const override { return inner_->name(); }
  std::string Describe() const override { return "faulty " + inner_->Describe(); }
  uint32_t depth() const override { return inner_->depth(); }
  void RegisterBuffer(std::span<std::byte> buffer) override { inner_->RegisterBuffer(buffer); }
  void RegisterFile(int fd) override { inner_->RegisterFile(fd); }
  void UnregisterFile(int fd) override { inner_->UnregisterFile(fd); }

  void Push(const IoRequest& request) override {
    requests_[request.slot] = {request, PathOf(request.fd), 0};
    const bool moves = request.kind == IoKind::kRead || request.kind == IoKind::kWrite;
    if (moves && plan_->Chance(plan_->repeat_share)) {
      ready_.push_back({request.slot, plan_->Chance(0.5) ? -EAGAIN : -EINTR});
      return;
    }
    if (const int error = plan_->Next(static_cast<Call>(request.kind)); error != 0) {
      ready_.push_back({request.slot, -error});
      return;
    }
    if (Held(request)) {
      held_.push_back(request);
      return;
    }
    IoRequest passed = request;
    if (moves && request.bytes > 512 && plan_->Chance(plan_->short_share)) {
      passed.bytes = (1 + plan_->random() % (request.bytes / 512)) * 512;
    }
    if (request.kind == IoKind::kDatasync && plan_->track_writes) {
      requests_[request.slot].synced = plan_->unsynced[requests_[request.slot].path].size();
    }
    Pass(passed);
  }

  int Flush() override {
    std::vector<IoRequest> still;
    for (const IoRequest& request : held_) {
      if (Held(request)) {
        still.push_back(request);
      } else {
        Pass(request);
      }
    }
    held_ = std::move(still);
    return inner_->Flush();
  }

  void Reap(std::chrono::nanoseconds wait, std::vector<IoEvent>* events) override {
    const size_t before = events->size();
    if (!ready_.empty()) wait = std::chrono::nanoseconds(0);
    inner_->Reap(wait, events);
    plan_->passed -= static_cast<int>(events->size() - before);
    for (size_t i = before; i < events->size(); ++i) Done((*events)[i]);
    events->insert(events->end(), ready_.begin(), ready_.end());
    ready_.clear();
    if (plan_->reorder) std::shuffle(events->begin() + before, events->end(), plan_->random);
  }

 private:
  struct Seen {
    IoRequest request;
    std::string path;
    size_t synced = 0;
  };

  void Pass(const IoRequest& request) {
    ++plan_->passed;
    inner_->Push(request);
  }

  bool Held(const IoRequest& request) const {
    return (request.kind == IoKind::kRead && plan_->hold_reads) ||
           (request.kind == IoKind::kWrite && plan_->hold_writes) ||
           (plan_->hold && plan_->hold(request));
  }

  std::string PathOf(int fd) const {
    if (!plan_->track_writes) return "";
    char path[4096];
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = ::readlink(link.c_str(), path, sizeof path);
    return length > 0 ? std::string(path, length) : "";
  }

  void Done(const IoEvent& event) {
    const Seen& seen = requests_[event.slot];
    if (event.result < 0) return;
    if (seen.request.kind == IoKind::kRead && event.result > 0 &&
        plan_->Chance(plan_->corrupt_share)) {
      seen.request.data[plan_->random() % event.result] ^=
          static_cast<std::byte>(1 << (plan_->random() % 8));
    }
    if (!plan_->track_writes) return;
    auto& ranges = plan_->unsynced[seen.path];
    if (seen.request.kind == IoKind::kWrite) {
      ranges.push_back({seen.request.offset, static_cast<uint64_t>(event.result)});
    } else if (seen.request.kind == IoKind::kDatasync) {
      ranges.erase(ranges.begin(), ranges.begin() + std::min(seen.synced, ranges.size()));
    }
  }

  std::unique_ptr<IoEngine> inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::vector<Seen> requests_;
  std::vector<IoEvent> ready_;
  std::vector<IoRequest> held_;
};

class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(std::shared_ptr<FaultPlan> plan) : plan_(std::move(plan)) {}

  absl::StatusOr<File> Open(const std::string& path, const OpenOptions& options) override {
    if (int e = plan_->Next(Call::kOpen)) return ErrnoStatus(e, "open");
    return FileSystem::Open(path, options);
  }
  absl::Status Truncate(const File& file, uint64_t bytes) override {
    if (int e = plan_->Next(Call::kTruncate)) return ErrnoStatus(e, "ftruncate");
    return FileSystem::Truncate(file, bytes);
  }
  absl::Status ReadAt(const File& file, uint64_t offset, std::span<std::byte> into) override {
    if (int e = plan_->Next(Call::kRead)) return ErrnoStatus(e, "pread");
    return FileSystem::ReadAt(file, offset, into);
  }
  absl::Status WriteAt(const File& file, uint64_t offset,
                       std::span<const std::byte> bytes) override {
    if (int e = plan_->Next(Call::kWrite)) return ErrnoStatus(e, "pwrite");
    return FileSystem::WriteAt(file, offset, bytes);
  }
  absl::Status Datasync(const File& file) override {
    if (int e = plan_->Next(Call::kDatasync)) return ErrnoStatus(e, "fdatasync");
    return FileSystem::Datasync(file);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (int e = plan_->Next(Call::kRename)) return ErrnoStatus(e, "rename");
    return FileSystem::Rename(from, to);
  }
  absl::Status Unlink(const std::string& path) override {
    if (int e = plan_->Next(Call::kUnlink)) return ErrnoStatus(e, "unlink");
    return FileSystem::Unlink(path);
  }
  absl::Status MakeDirectory(const std::string& path) override {
    if (int e = plan_->Next(Call::kMakeDirectory)) return ErrnoStatus(e, "mkdir");
    return FileSystem::MakeDirectory(path);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    if (int e = plan_->Next(Call::kSyncDirectory)) return ErrnoStatus(e, "fsync directory");
    return FileSystem::SyncDirectory(path);
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    if (int e = plan_->Next(Call::kList)) return ErrnoStatus(e, "list");
    return FileSystem::List(path);
  }

 private:
  std::shared_ptr<FaultPlan> plan_;
};

}  // namespace winnow::storage

#endif  // WINNOW_TESTS_FAULT_FAULTY_RING_H_
