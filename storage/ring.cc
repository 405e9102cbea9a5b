#include "storage/ring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "storage/check.h"
#include "storage/format.h"
#include "storage/page_memory.h"

namespace winnow::storage {
namespace {

using std::chrono::nanoseconds;

// A device that keeps answering EAGAIN, or moves nothing, is a failing device.
constexpr uint32_t kTriesMax = 64;

bool MovesBytes(IoKind kind) { return kind == IoKind::kRead || kind == IoKind::kWrite; }

// One page written and read back through the engine, O_DIRECT if `direct`.
absl::Status Probe(IoEngine* engine, FileSystem* files, const std::string& path, bool direct) {
  (void)files->Unlink(path);  // of a probe that was killed
  absl::StatusOr<File> file = files->Open(path, {.create = true, .direct = direct});
  WINNOW_RETURN_IF_ERROR(file.status());
  PageMemory memory(2 * kPageBytes);
  const std::span<std::byte> out = memory.bytes().first(kPageBytes);
  const std::span<std::byte> in = memory.bytes().subspan(kPageBytes);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i * 7 + 1);
  const auto transfer = [&](IoKind kind, std::span<std::byte> data) -> absl::Status {
    engine->Push({0, kind, file->fd(), 0, data.data(), data.size()});
    std::vector<IoEvent> events;
    // As long as it takes, for the kernel has `memory`; whoever opens a store watches over it.
    for (int refused = 0; events.empty();) {
      if (const int error = engine->Flush(); error != 0) {
        if ((error != EAGAIN && error != EBUSY) || ++refused > 100) {
          return ErrnoStatus(error, "submit");
        }
      }
      engine->Reap(std::chrono::milliseconds(100), &events);
    }
    if (events[0].result < 0) return ErrnoStatus(static_cast<int>(-events[0].result), "probe");
    if (events[0].result != static_cast<int64_t>(data.size())) {
      return absl::DataLossError("short probe");
    }
    return absl::OkStatus();
  };
  absl::Status status = transfer(IoKind::kWrite, out);
  if (status.ok()) status = transfer(IoKind::kRead, in);
  if (status.ok() && std::memcmp(out.data(), in.data(), out.size()) != 0) {
    status = absl::DataLossError("the probe read other bytes than it wrote");
  }
  (void)files->Unlink(path);
  return status;
}

}  // namespace

absl::StatusOr<IoEngineChoice> ChooseIoEngine(const IoEngineOptions& options,
                                              const std::string& directory) {
  FileSystem files;
  const std::string path = directory + "/probe.tmp";
  IoEngineChoice choice;
  if (options.kind != IoEngineKind::kThreads) {
    absl::StatusOr<std::unique_ptr<IoEngine>> uring = MakeUringEngine(options.depth);
    absl::Status status = uring.status();
    if (status.ok()) {
      status = Probe(uring->get(), &files, path, /*direct=*/true);
      if (status.ok()) {
        choice.engine = *std::move(uring);
        choice.direct = true;
        return choice;
      }
      // The file system's fault, not the ring's? Then a buffered read works.
      if (Probe(uring->get(), &files, path, /*direct=*/false).ok()) {
        choice.engine = *std::move(uring);
        choice.fallback_reason = "no O_DIRECT: " + std::string(status.message());
        return choice;
      }
    }
    if (options.kind == IoEngineKind::kUring) {
      return absl::FailedPreconditionError("io_uring was asked for and does not work here: " +
                                           std::string(status.message()));
    }
    choice.fallback_reason = "no io_uring: " + std::string(status.message());
  }
  choice.engine = MakeThreadsEngine(options.depth, options.threads);
  absl::Status status = Probe(choice.engine.get(), &files, path, /*direct=*/true);
  choice.direct = status.ok();
  if (!status.ok()) {
    if (!choice.fallback_reason.empty()) choice.fallback_reason += "; ";
    choice.fallback_reason += "no O_DIRECT: " + std::string(status.message());
    WINNOW_RETURN_IF_ERROR(Probe(choice.engine.get(), &files, path, /*direct=*/false));
  }
  return choice;
}

Ring::Ring(std::unique_ptr<IoEngine> engine, const Clock* clock)
    : engine_(std::move(engine)), clock_(clock), slots_(engine_->depth()) {
  for (uint32_t i = engine_->depth(); i-- > 0;) free_slots_.push_back(i);
  events_.reserve(slots_.size());
}

Ring::~Ring() {
  while (!Drain(std::chrono::seconds(1))) {
  }
}

bool Ring::Drain(nanoseconds max) {
  // Real time: the clock given to us may stand still.
  const auto limit = std::chrono::steady_clock::now() + max;
  std::vector<IoResult> ignored;
  for (const IoOp& op : backlog_) with_deadline_ -= op.deadline_ns != 0;
  backlog_.clear();
  while (active_ > 0) {
    if (std::chrono::steady_clock::now() >= limit) return false;
    ignored.clear();
    Poll(std::chrono::milliseconds(10), &ignored);
  }
  return true;
}

void Ring::Submit(const IoOp& op) {
  backlog_.push_back(op);
  if (op.deadline_ns != 0) ++with_deadline_;
}

void Ring::Start(uint32_t index) {
  const Slot& slot = slots_[index];
  IoRequest request;
  request.slot = index;
  request.kind = slot.op.kind;
  request.fd = slot.op.fd;
  if (MovesBytes(slot.op.kind)) {
    request.offset = slot.op.offset + slot.done_bytes;
    request.data = slot.op.data.data() + slot.done_bytes;
    request.bytes = slot.op.data.size() - slot.done_bytes;
  } else {
    request.offset = slot.op.offset;
    request.bytes = slot.op.bytes;
  }
  engine_->Push(request);
}

void Ring::Poll(nanoseconds wait, std::vector<IoResult>* results) {
  const size_t before = results->size();
  while (!backlog_.empty() && !free_slots_.empty()) {
    const uint32_t index = free_slots_.back();
    free_slots_.pop_back();
    slots_[index] = {.op = backlog_.front(), .used = true};
    backlog_.pop_front();
    ++active_;
    Start(index);
  }
  if (active_ == 0) return;
  // A failed flush leaves the requests queued in the engine; the next Poll tries again, and their
  // deadlines run.
  (void)engine_->Flush();
  if (with_deadline_ > 0) {
    // A request that is done is not late, however long nobody asked for it.
    Reap(nanoseconds(0), results);
    ReportLate(results);
  }
  if (results->size() != before) wait = nanoseconds(0);
  // Do not sleep past the first deadline.
  if (with_deadline_ > 0 && wait.count() > 0) {
    const int64_t now_ns = clock_->NowNs();
    const auto until = [&](int64_t deadline_ns) {
      wait = std::min(wait, nanoseconds(std::max<int64_t>(deadline_ns - now_ns, 0)));
    };
    for (const Slot& slot : slots_) {
      if (slot.used && slot.op.deadline_ns != 0 && !slot.reported_late) until(slot.op.deadline_ns);
    }
    for (const IoOp& op : backlog_) {
      if (op.deadline_ns != 0) until(op.deadline_ns);
    }
  }
  // Transfers that were begun again above are handed over before they are waited for.
  if (wait.count() > 0) (void)engine_->Flush();
  Reap(wait, results);
  if (with_deadline_ > 0) ReportLate(results);
}

void Ring::Reap(nanoseconds wait, std::vector<IoResult>* results) {
  events_.clear();
  engine_->Reap(wait, &events_);
  for (const IoEvent& event : events_) Handle(event, results);
}

void Ring::Handle(const IoEvent& event, std::vector<IoResult>* results) {
  WINNOW_CHECK(event.slot < slots_.size() && slots_[event.slot].used);
  Slot& slot = slots_[event.slot];
  const IoOp& op = slot.op;
  if (event.result == -EAGAIN || event.result == -EINTR) {
    ++counters_.repeats;
    if (++slot.tries > kTriesMax) return Finish(event.slot, EIO, results);
    return Start(event.slot);
  }
  if (event.result < 0) return Finish(event.slot, static_cast<int>(-event.result), results);
  if (!MovesBytes(op.kind)) return Finish(event.slot, 0, results);
  if (event.result == 0) return Finish(event.slot, EIO, results);  // the file ends here
  WINNOW_CHECK(static_cast<uint64_t>(event.result) <= op.data.size() - slot.done_bytes);
  const uint64_t done_bytes = slot.done_bytes + static_cast<uint64_t>(event.result);
  if (done_bytes == op.data.size()) return Finish(event.slot, 0, results);
  ++counters_.short_transfers;
  // O_DIRECT goes on only at a page, so what is left of a page is moved again.
  const uint64_t aligned_bytes = done_bytes / kPageBytes * kPageBytes;
  slot.tries = aligned_bytes > slot.done_bytes ? 0 : slot.tries + 1;
  if (slot.tries > kTriesMax) return Finish(event.slot, EIO, results);
  slot.done_bytes = aligned_bytes;
  Start(event.slot);
}

void Ring::Finish(uint32_t index, int error, std::vector<IoResult>* results) {
  Slot& slot = slots_[index];
  switch (slot.op.kind) {
    case IoKind::kRead:
      ++counters_.reads;
      counters_.read_bytes += slot.op.data.size();
      break;
    case IoKind::kWrite:
      ++counters_.writes;
      counters_.write_bytes += slot.op.data.size();
      break;
    case IoKind::kDatasync:
    case IoKind::kSync:
      ++counters_.syncs;
      break;
    case IoKind::kAllocate:
      break;
  }
  IoResult result;
  result.tag = slot.op.tag;
  if (slot.reported_late) {
    result.returned = true;
    result.error = ETIMEDOUT;
  } else {
    result.error = error;
    if (error != 0) ++counters_.errors;
    if (slot.op.deadline_ns != 0) --with_deadline_;
  }
  results->push_back(result);
  slot.used = false;
  free_slots_.push_back(index);
  --active_;
}

void Ring::ReportLate(std::vector<IoResult>* results) {
  const int64_t now_ns = clock_->NowNs();
  for (Slot& slot : slots_) {
    if (!slot.used || slot.op.deadline_ns == 0 || slot.reported_late) continue;
    if (now_ns < slot.op.deadline_ns) continue;
    slot.reported_late = true;
    --with_deadline_;
    ++counters_.late;
    results->push_back({.tag = slot.op.tag, .error = ETIMEDOUT, .late = true});
  }
  // What never reached the engine needs no return. It may wait behind calls that are late already,
  // and never come back: its deadline holds all the same.
  std::erase_if(backlog_, [&](const IoOp& op) {
    if (op.deadline_ns == 0 || now_ns < op.deadline_ns) return false;
    --with_deadline_;
    ++counters_.late;
    results->push_back({.tag = op.tag, .error = ETIMEDOUT, .late = true});
    results->push_back({.tag = op.tag, .error = ETIMEDOUT, .returned = true});
    return true;
  });
}

}  // namespace winnow::storage
