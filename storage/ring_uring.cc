// The io_uring engine: the one file that sees liburing.
//
// Flags are tried from the best set downwards; a kernel that knows none of them, or a container
// that forbids the system call, is ordinary: the caller then takes the thread pool. Tried and not
// taken: SQPOLL (a kernel thread that spins is a core the kernels could use) and IOPOLL (needs a
// queue that the device's driver must offer, and cannot sync).
#include <liburing.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "storage/check.h"
#include "storage/ring.h"

namespace winnow::storage {
namespace {

struct FlagSet {
  unsigned flags;
  const char* name;
};
constexpr FlagSet kFlagSets[] = {
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, "SINGLE_ISSUER|DEFER_TASKRUN"},
    {IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, "COOP_TASKRUN"},
    {0, "no flags"},
};
constexpr unsigned kFilesMax = 1024;
// The kernel takes at most this much in one registered buffer.
constexpr size_t kRegisteredBufferBytesMax = size_t{1} << 30;

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(uint32_t depth) : depth_(depth) {}

  ~UringEngine() override { Exit(); }

  int Init() {
    int error = ENOSYS;
    for (const FlagSet& set : kFlagSets) {
      error = -io_uring_queue_init(depth_, &ring_, set.flags);
      if (error == 0) {
        set_ = &set;
        thread_ = ::syscall(SYS_gettid);
        open_ = true;
        files_registered_ = io_uring_register_files_sparse(&ring_, kFilesMax) == 0;
        RegisterAgain();
        return 0;
      }
      // Refused as such: fewer flags will not help.
      if (error == EPERM || error == ENOSYS) break;
    }
    return error;
  }

  std::string name() const override { return "uring"; }

  std::string Describe() const override {
    return "io_uring: " + std::string(set_->name) + ", depth " + std::to_string(depth_) +
           (files_registered_ ? ", fixed files" : ", no fixed files") +
           (buffers_registered_ ? ", fixed buffers"
            : buffers_error_ != 0
                ? ", no fixed buffers (" + std::string(strerror(buffers_error_)) + ")"
                : "");
  }

  uint32_t depth() const override { return depth_; }

  void Push(const IoRequest& request) override {
    if (!EnterThread()) {
      ++in_flight_;  // never answered
      return;
    }
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    // The queue has depth_ entries (the kernel rounds up), so it can only be full of what Flush
    // could not submit; more than that is the caller's bug.
    WINNOW_CHECK(sqe != nullptr);
    int fd = request.fd;
    const int file = FileIndex(fd);
    if (file >= 0) fd = file;
    const auto bytes = static_cast<unsigned>(request.bytes);
    const int buffer = BufferIndex(request.data, request.bytes);
    switch (request.kind) {
      case IoKind::kRead:
        if (buffer >= 0) {
          io_uring_prep_read_fixed(sqe, fd, request.data, bytes, request.offset, buffer);
        } else {
          io_uring_prep_read(sqe, fd, request.data, bytes, request.offset);
        }
        break;
      case IoKind::kWrite:
        if (buffer >= 0) {
          io_uring_prep_write_fixed(sqe, fd, request.data, bytes, request.offset, buffer);
        } else {
          io_uring_prep_write(sqe, fd, request.data, bytes, request.offset);
        }
        break;
      case IoKind::kDatasync:
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
        break;
      case IoKind::kSync:
        io_uring_prep_fsync(sqe, fd, 0);
        break;
      case IoKind::kAllocate:
        io_uring_prep_fallocate(sqe, fd, 0, static_cast<off_t>(request.offset),
                                static_cast<off_t>(request.bytes));
        break;
    }
    if (file >= 0) sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(sqe, request.slot);
    ++in_flight_;
  }

  int Flush() override {
    if (!EnterThread()) return 0;
    if (io_uring_sq_ready(&ring_) == 0) return 0;
    const int submitted = io_uring_submit(&ring_);
    return submitted < 0 ? -submitted : 0;
  }

  void Reap(std::chrono::nanoseconds wait, std::vector<IoEvent>* events) override {
    if (!EnterThread()) {
      // What the other thread left in flight may still complete; nobody may enter the kernel for it
      // here, but the ring's own descriptor tells when it has.
      pollfd ready = {.fd = ring_.ring_fd, .events = POLLIN, .revents = 0};
      const timespec time = {.tv_sec = wait.count() / 1'000'000'000,
                             .tv_nsec = wait.count() % 1'000'000'000};
      (void)::ppoll(&ready, 1, &time, nullptr);
      TakeReady(events);
      return;
    }
    if (TakeReady(events) > 0) return;
    if (wait.count() > 0 && in_flight_ > 0) {
      __kernel_timespec time = {};
      time.tv_sec = wait.count() / 1'000'000'000;
      time.tv_nsec = wait.count() % 1'000'000'000;
      io_uring_cqe* first = nullptr;
      // ETIME and EINTR are answers like any other: nothing came. Waiting for a quarter of what is in
      // flight instead of the first was tried: as fast, within what runs differ.
      (void)io_uring_submit_and_wait_timeout(&ring_, &first, 1, &time, nullptr);
    } else {
      // With DEFER_TASKRUN completions appear only when the kernel is entered for them.
      (void)io_uring_get_events(&ring_);
    }
    TakeReady(events);
  }

  void RegisterBuffer(std::span<std::byte> buffer) override {
    EnterThread();
    for (size_t at = 0; at < buffer.size(); at += kRegisteredBufferBytesMax) {
      buffers_.push_back(
          buffer.subspan(at, std::min(kRegisteredBufferBytesMax, buffer.size() - at)));
    }
    RegisterBuffers();
  }

  void RegisterFile(int fd) override {
    if (fd >= static_cast<int>(files_.size())) files_.resize(fd + 1, -1);
    if (!files_registered_ || !EnterThread()) return;
    // Another thread's file with this number is still in the table only if Unregister was missed.
    WINNOW_CHECK(files_[fd] < 0);
    const auto free = std::find(file_slots_.begin(), file_slots_.end(), -1);
    if (free == file_slots_.end() && file_slots_.size() == kFilesMax) return;
    const int index = static_cast<int>(free - file_slots_.begin());
    if (free == file_slots_.end()) file_slots_.push_back(-1);
    if (io_uring_register_files_update(&ring_, index, &fd, 1) != 1) return;
    file_slots_[index] = fd;
    files_[fd] = index;
  }

  void UnregisterFile(int fd) override {
    const int index = FileIndex(fd);
    if (index < 0 || !EnterThread()) return;
    int none = -1;
    (void)io_uring_register_files_update(&ring_, index, &none, 1);
    file_slots_[index] = -1;
    files_[fd] = -1;
  }

 private:
  size_t TakeReady(std::vector<IoEvent>* events) {
    size_t count = 0;
    unsigned head = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      // The library marks its own timeouts (kernels without EXT_ARG) with this value.
      if (cqe->user_data != LIBURING_UDATA_TIMEOUT) {
        events->push_back({static_cast<uint32_t>(cqe->user_data), cqe->res});
        --in_flight_;
      }
      ++count;
    }
    io_uring_cq_advance(&ring_, static_cast<unsigned>(count));
    return count;
  }

  int FileIndex(int fd) const {
    return fd >= 0 && fd < static_cast<int>(files_.size()) ? files_[fd] : -1;
  }

  int BufferIndex(const std::byte* data, uint64_t bytes) const {
    if (!buffers_registered_ || data == nullptr) return -1;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (data >= buffers_[i].data() && data + bytes <= buffers_[i].data() + buffers_[i].size()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  void RegisterBuffers() {
    if (buffers_registered_) io_uring_unregister_buffers(&ring_);
    buffers_registered_ = false;
    if (buffers_.empty()) return;
    std::vector<iovec> vectors;
    for (std::span<std::byte> b : buffers_) vectors.push_back({b.data(), b.size()});
    buffers_error_ =
        -io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(vectors.size()));
    buffers_registered_ = buffers_error_ == 0;
  }

  // Forgets registrations with a ring that is no more.
  void RegisterAgain() {
    RegisterBuffers();
    const std::vector<int> before = std::move(file_slots_);
    file_slots_.clear();
    for (int fd : before) {
      if (fd < 0) continue;
      files_[fd] = -1;
      RegisterFile(fd);
    }
  }

  // SINGLE_ISSUER ties a ring to the thread that made it. A store is opened where a program is
  // wired and used by the engine's thread, so the first call from another thread makes a new ring.
  // False: the other thread left something in flight, which nobody else can get back. It is like a
  // disk that hangs: nothing is ever answered.
  bool EnterThread() {
    if (set_->flags == 0 || ::syscall(SYS_gettid) == thread_) return true;
    if (in_flight_ > 0) return false;
    Exit();
    // It worked a moment ago on another thread; a kernel that now refuses leaves no way to go on
    // that a caller could take, short of restarting with --io-engine=threads.
    WINNOW_CHECK(Init() == 0);
    return true;
  }

  void Exit() {
    if (open_) io_uring_queue_exit(&ring_);
    open_ = false;
    buffers_registered_ = false;
  }

  const uint32_t depth_;
  io_uring ring_ = {};
  const FlagSet* set_ = nullptr;
  long thread_ = 0;
  bool open_ = false;
  size_t in_flight_ = 0;
  std::vector<std::span<std::byte>> buffers_;
  bool buffers_registered_ = false;
  int buffers_error_ = 0;
  bool files_registered_ = false;
  std::vector<int> files_;       // by descriptor: place in the table, or -1
  std::vector<int> file_slots_;  // by place in the table: descriptor, or -1
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoEngine>> MakeUringEngine(uint32_t depth) {
  auto engine = std::make_unique<UringEngine>(depth);
  if (const int error = engine->Init(); error != 0) return ErrnoStatus(error, "io_uring_setup");
  return engine;
}

}  // namespace winnow::storage
