// Batched file I/O. Two parts:
//
//   IoEngine  what differs: io_uring (ring_uring.cc) or a pool of threads (ring_threads.cc). Takes
//             requests, returns raw results: short, EAGAIN, in any order. Tests decorate this, so
//             that faults are injected below the loop that must handle them.
//   Ring      the one completion loop over an engine: finishes short reads and writes, repeats
//             EAGAIN and EINTR, enforces deadlines.
//
// One thread at a time uses a Ring; it may move to another thread while nothing is in flight.
#ifndef WINNOW_STORAGE_RING_H_
#define WINNOW_STORAGE_RING_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/clock.h"
#include "storage/file_system.h"

namespace winnow::storage {

enum class IoKind : uint8_t {
  kRead,
  kWrite,
  kDatasync,  // fdatasync
  kSync,      // fsync; for directories
  kAllocate,  // fallocate mode 0: [offset, offset + bytes) exists and has blocks, or ENOSPC now
};

struct IoRequest {
  uint32_t slot = 0;  // returned with the result
  IoKind kind = IoKind::kRead;
  int fd = -1;
  uint64_t offset = 0;
  std::byte* data = nullptr;  // kRead, kWrite
  uint64_t bytes = 0;         // kRead, kWrite, kAllocate
};

struct IoEvent {
  uint32_t slot = 0;
  int64_t result = 0;  // bytes moved, or -errno
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  virtual std::string name() const = 0;  // "uring" or "threads": for the info metric
  // One line for the log: flags, what could be registered and what not.
  virtual std::string Describe() const = 0;
  virtual uint32_t depth() const = 0;  // requests that may be in flight

  // Takes a request. REQUIRES: fewer than depth() are in flight. Data stays valid and untouched
  // until its event was reaped.
  virtual void Push(const IoRequest& request) = 0;
  // Hands pushed requests to the kernel; returns 0 or an errno after which it will be tried again
  // by the next call.
  virtual int Flush() = 0;
  // Appends finished requests; waits for the first of them for at most `wait`.
  virtual void Reap(std::chrono::nanoseconds wait, std::vector<IoEvent>* events) = 0;

  // Memory and files that many requests will use. Hints: where the kernel refuses (memlock), I/O on
  // them works all the same, and Describe says so. Nothing is in flight during these calls, except
  // that files may come and go when none of their own requests are.
  virtual void RegisterBuffer(std::span<std::byte> buffer) {}
  virtual void RegisterFile(int fd) {}
  virtual void UnregisterFile(int fd) {}
};

enum class IoEngineKind { kAuto, kUring, kThreads };

struct IoEngineOptions {
  IoEngineKind kind = IoEngineKind::kAuto;
  uint32_t depth = 256;
  uint32_t threads = 8;  // of the thread pool: its real queue depth
};

struct IoEngineChoice {
  std::unique_ptr<IoEngine> engine;
  bool direct = false;  // O_DIRECT works in this directory
  // Why the first choice was not taken (io_uring refused, no O_DIRECT), one line; empty if it was.
  std::string fallback_reason;
};

// Chooses by trying: writes a page to a file in `directory` and reads it back through the engine
// with O_DIRECT. kAuto: io_uring, with fewer flags if the kernel refuses some, then threads. kUring
// is strict: FailedPrecondition where kAuto would fall back. Other errors: the directory cannot be
// written and read at all.
absl::StatusOr<IoEngineChoice> ChooseIoEngine(const IoEngineOptions& options,
                                              const std::string& directory);

// The two engines. io_uring's errno as Status where the kernel refuses (EPERM, ENOSYS, ENOMEM, …).
absl::StatusOr<std::unique_ptr<IoEngine>> MakeUringEngine(uint32_t depth);
std::unique_ptr<IoEngine> MakeThreadsEngine(uint32_t depth, uint32_t threads);

struct IoOp {
  IoKind kind = IoKind::kRead;
  int fd = -1;
  uint64_t offset = 0;
  std::span<std::byte> data = {};  // kRead, kWrite
  uint64_t bytes = 0;              // kAllocate
  int64_t deadline_ns = 0;         // on the Ring's clock; 0: none
  uint64_t tag = 0;                // returned with the result
};

struct IoResult {
  uint64_t tag = 0;
  int error = 0;  // 0: all bytes moved. EIO also for a file that ends early
  // The deadline passed first (error is ETIMEDOUT): the kernel still has the buffer. A second
  // result with the same tag and `returned` comes when it gives it back; until then it must not be
  // reused.
  bool late = false;
  bool returned = false;
};

class Ring {
 public:
  Ring(std::unique_ptr<IoEngine> engine, const Clock* clock);
  // Waits until the kernel has given back every buffer.
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Queues an operation; never blocks. What does not fit the engine's depth waits here, in order.
  void Submit(const IoOp& op);
  // Starts queued operations and appends results; waits for the first for at most `wait`.
  void Poll(std::chrono::nanoseconds wait, std::vector<IoResult>* results);

  // Drops operations that have not begun and waits for the rest, results unheard; false if `max` passed first.
  bool Drain(std::chrono::nanoseconds max);

  // Submitted and without result; late ones count until they are returned.
  size_t in_flight() const { return backlog_.size() + active_; }
  IoEngine& engine() { return *engine_; }

  struct Counters {
    uint64_t reads = 0;
    uint64_t read_bytes = 0;
    uint64_t writes = 0;
    uint64_t write_bytes = 0;
    uint64_t syncs = 0;
    uint64_t short_transfers = 0;  // continued
    uint64_t repeats = 0;          // EAGAIN, EINTR
    uint64_t errors = 0;
    uint64_t late = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  struct Slot {
    IoOp op;
    uint64_t done_bytes = 0;
    uint32_t tries = 0;  // repeats without progress
    bool used = false;
    bool reported_late = false;
  };
  void Start(uint32_t index);
  void Finish(uint32_t index, int error, std::vector<IoResult>* results);
  void Handle(const IoEvent& event, std::vector<IoResult>* results);
  void Reap(std::chrono::nanoseconds wait, std::vector<IoResult>* results);
  void ReportLate(std::vector<IoResult>* results);

  std::unique_ptr<IoEngine> engine_;
  const Clock* clock_;
  std::deque<IoOp> backlog_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<IoEvent> events_;
  size_t active_ = 0;
  size_t with_deadline_ = 0;  // submitted, not late yet; in a slot or in the backlog
  Counters counters_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_RING_H_
