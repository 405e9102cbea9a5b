// Operations, reads and the loop. Writing is in disk_write.cc, room in disk_reclaim.cc, opening in
// disk_recovery.cc.
#include "storage/disk_store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/check.h"

namespace winnow::storage {

using std::chrono::nanoseconds;

namespace {

// How much of the order of eviction is brought up to date in one go: some 0.1 ms.
constexpr size_t kOrderSteps = 128;

}  // namespace

absl::Status DiskStoreOptions::Validate() const {
  const auto refuse = [](const std::string& what) { return absl::InvalidArgumentError(what); };
  if (directory.empty()) return refuse("store directory is empty");
  if (segment_bytes % kPageBytes != 0 || segment_bytes < 16 * kPageBytes ||
      segment_bytes > uint64_t{4} << 30) {
    return refuse(absl::StrCat("segment_bytes ", segment_bytes,
                               " is not a multiple of 4096 between 64 KiB and 4 GiB"));
  }
  if (capacity_bytes < 4 * segment_bytes) {
    return refuse(absl::StrCat("store capacity ", capacity_bytes, " is less than four segments of ",
                               segment_bytes, " bytes"));
  }
  if (staging_bytes < uint64_t{1} << 20) return refuse("staging_bytes is less than 1 MiB");
  if (operations_max == 0 || operations_max > 1u << 20) {
    return refuse("operations_max is not between 1 and 1048576");
  }
  if (read_deadline_ns <= 0 || write_deadline_ns <= 0 || open_stall_ns <= 0 ||
      close_limit_ns <= 0) {
    return refuse("a deadline is not positive");
  }
  if (io.depth == 0 || io.depth > 4096) return refuse("I/O depth is not between 1 and 4096");
  if (io.threads == 0 || io.threads > 256) return refuse("I/O threads are not between 1 and 256");
  return absl::OkStatus();
}

// Never freed, but in sight of a debugger, and of leak checkers.
struct DiskStore::Remains {
  std::unique_ptr<Ring> ring;
  std::unique_ptr<IndexWriter> writer;
  std::unique_ptr<FileSystem> files;
  std::map<uint64_t, std::unique_ptr<Segment>> segments;
  std::map<uint64_t, PageMemory> stuck_reads;
  PageMemory staging;
  File directory;
  File lock;  // the kernel may still write: no other process may own the directory
  Remains* next = nullptr;
  static std::atomic<Remains*> all;
};
std::atomic<DiskStore::Remains*> DiskStore::Remains::all = nullptr;

DiskStore::DiskStore(DiskStoreOptions options, const Clock* clock, std::shared_ptr<Opening> opening)
    : options_(std::move(options)),
      clock_(clock),
      opening_(std::move(opening)),
      order_(options_.segment_bytes),
      health_(options_.health) {
  closer_.set_limit(nanoseconds(options_.close_limit_ns));
  room_bytes_ = options_.capacity_bytes;
  stats_.capacity_bytes = options_.capacity_bytes;
}

DiskStore::~DiskStore() {
  // Real time: a disk that hangs must not keep the process, whatever the clock given to us says.
  const nanoseconds limit(options_.close_limit_ns);
  if (writer_ != nullptr) {
    const auto end = std::chrono::steady_clock::now() + limit;
    std::vector<Completion> ignored;
    const auto settle = [&] {
      while ((in_flight() > 0 || !idle()) && std::chrono::steady_clock::now() < end) {
        ignored.clear();
        Poll(std::chrono::milliseconds(10), &ignored);
      }
    };
    settle();
    if (open_ != nullptr) {
      Seal(open_);
      open_ = nullptr;
      settle();
    }
    IndexBatch last;
    SubmitBatch(std::move(last), {});
  }
  // The kernel must give back every buffer before memory and files go.
  const bool drained = ring_ == nullptr || ring_->Drain(limit);
  const bool closed = writer_ == nullptr || writer_->Close(limit);
  if (drained && closed) return;
  Log(absl::StrCat("store ", options_.directory, ": closed while the disk hangs; ",
                   drained ? 0 : ring_->in_flight(), " requests and their buffers are left to it"));
  Remains* const remains =
      std::make_unique<Remains>().release();  // never freed: the disk may yet write into it
  remains->ring = std::move(ring_);
  remains->writer = std::move(writer_);
  remains->files = std::move(own_files_);
  remains->segments = std::move(segments_);
  remains->stuck_reads = std::move(stuck_reads_);
  remains->staging = std::move(staging_);
  remains->directory = std::move(directory_);
  remains->lock = std::move(lock_);
  remains->next = Remains::all.load();
  while (!Remains::all.compare_exchange_weak(remains->next, remains)) {
  }
}

void DiskStore::Log(const std::string& line) const {
  const MutexLock lock(opening_->mutex);
  if (options_.log && !opening_->abandoned) options_.log(line);
}

void DiskStore::Warn(const std::string& line) const {
  if (!options_.warn) return Log(line);
  const MutexLock lock(opening_->mutex);
  if (!opening_->abandoned) options_.warn(line);
}

std::string DiskStore::Describe() const {
  return absl::StrCat("store ", options_.directory, ": ", entries_.size(), " blocks, ",
                      used_bytes_ >> 20, " of ", options_.capacity_bytes >> 20, " MiB, ",
                      ring_->engine().Describe(), direct_ ? ", O_DIRECT" : ", buffered",
                      io_fallback_.empty() ? "" : "; ", io_fallback_);
}

uint64_t DiskStore::StoreSeconds() const {
  return base_s_ + static_cast<uint64_t>((clock_->NowNs() - base_ns_) / 1'000'000'000);
}

bool DiskStore::Expired(const Entry& entry) const {
  return entry.expires_at_s != 0 && StoreSeconds() >= entry.expires_at_s;
}

// ---- operations ----

uint32_t DiskStore::NewOp(Op::Kind kind, uint64_t tag, const BlockId& id) {
  if (free_ops_.empty()) {
    free_ops_.push_back(static_cast<uint32_t>(ops_.size()));
    ops_.emplace_back();
  }
  const uint32_t index = free_ops_.back();
  free_ops_.pop_back();
  ops_[index] = Op();
  ops_[index].kind = kind;
  ops_[index].tag = tag;
  ops_[index].id = id;
  return index;
}

void DiskStore::FreeOp(uint32_t index) {
  Op& op = ops_[index];
  WINNOW_CHECK(op.outstanding == 0 && op.kind != Op::Kind::kFree);
  if (op.stage_page) AllocatorOf(op).Free(*op.stage_page, op.stage_pages);
  if (op.segment != nullptr) {
    --op.segment->users;
    if (op.segment->live_blocks == 0 || op.segment->state != Segment::State::kSealed) {
      MarkBusy(op.segment);
    }
  }
  op = Op();
  free_ops_.push_back(index);
}

void DiskStore::Complete(uint64_t tag, Operation operation, Reason reason) {
  const Outcome outcome = reason == Reason::kNone ? Outcome::kOk : Outcome::kMiss;
  const bool read = operation == Operation::kGet || operation == Operation::kGetPages;
  done_.push_back({tag, operation, outcome, reason, read});
  if (operation == Operation::kPut) {
    ++stats_.puts;
    if (outcome == Outcome::kOk) ++stats_.puts_stored;
  } else if (operation != Operation::kErase) {
    ++stats_.gets;
    if (outcome == Outcome::kOk) {
      ++stats_.hits;
    } else {
      ++stats_.misses[static_cast<size_t>(reason)];
    }
  }
}

// The caller's answer; the operation itself may still have a buffer in the kernel.
void DiskStore::Answer(Op* op, Reason reason) {
  if (op->answered) return;
  op->answered = true;
  if (op->kind == Op::Kind::kMove) return;
  const Operation operation = op->kind == Op::Kind::kPut   ? Operation::kPut
                              : op->kind == Op::Kind::kGet ? Operation::kGet
                                                           : Operation::kGetPages;
  if (operation != Operation::kPut) CountLatency(*op);
  --in_flight_;
  Complete(op->tag, operation, reason);
  for (uint64_t tag : op->joined) {
    --in_flight_;
    Complete(tag, operation, reason);
  }
}

void DiskStore::CountLatency(const Op& op) {
  const int64_t latency_ns = clock_->NowNs() - op.start_ns;
  const auto bound =
      std::lower_bound(kReadLatencyBoundsSeconds.begin(), kReadLatencyBoundsSeconds.end(),
                       static_cast<double>(latency_ns) * 1e-9);
  ++stats_.read_latency[static_cast<size_t>(bound - kReadLatencyBoundsSeconds.begin())];
  stats_.read_latency_ns += static_cast<uint64_t>(latency_ns);
}

bool DiskStore::Stage(Op* op, size_t pages) {
  op->stage_page = AllocatorOf(*op).Allocate(pages);
  op->stage_pages = pages;
  return op->stage_page.has_value();
}

std::span<std::byte> DiskStore::Staged(const Op& op) const {
  const size_t base = op.kind == Op::Kind::kMove ? stage_->total_pages() : 0;
  return staging_.bytes().subspan((base + *op.stage_page) * kPageBytes,
                                  op.stage_pages * kPageBytes);
}

void DiskStore::Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
                    const PutOptions& options) {
  WINNOW_CHECK(!payload.empty());
  if (health_.Update(clock_->NowNs()) != TierState::kOk) {
    return Complete(tag, Operation::kPut, Reason::kOff);
  }
  const uint64_t expires_at_s = options.ttl_s == 0 ? 0 : StoreSeconds() + options.ttl_s;
  const uint8_t priority = std::min(options.priority, kPriorityMax);
  Reason reason;
  if (FindSound(id, &reason) != nullptr) {
    Entry& entry = entries_.find(id.key)->second;
    if (entry.record->payload_bytes == payload.size() &&
        (options.transient || !entry.record->transient)) {
      entry.priority = std::max(entry.priority, priority);
      entry.expires_at_s = expires_at_s;
      entry.in_use |= options.in_use;
      Reorder(entry);
      if (!options.pinned || entry.pinned || !SetPinned(id.key, true)) SaveEntry(id.key, &entry);
      return Complete(tag, Operation::kPut, Reason::kNone);
    }
  }
  if (payload.size() > payload_bytes_max_) return Complete(tag, Operation::kPut, Reason::kFull);
  if (const auto it = putting_.find(id.key); it != putting_.end()) {
    Op& op = ops_[it->second];
    const bool becomes_durable = op.options.transient && !options.transient;
    if (op.cancelled || op.answered || !(op.id == id) || op.payload_bytes != payload.size() ||
        (becomes_durable && op.placed)) {  // its header says otherwise
      return Complete(tag, Operation::kPut, Reason::kBusy);
    }
    op.joined.push_back(tag);
    op.options.in_use |= options.in_use;
    op.options.transient &= options.transient;
    ++in_flight_;
    return;
  }
  if (in_flight_ >= options_.operations_max) {
    return Complete(tag, Operation::kPut, Reason::kBusy);
  }
  const uint32_t index = NewOp(Op::Kind::kPut, tag, id);
  Op& op = ops_[index];
  if (!Stage(&op, BlockBytesFor(payload.size()) / kPageBytes)) {
    FreeOp(index);
    return Complete(tag, Operation::kPut, Reason::kBusy);
  }
  op.payload_bytes = static_cast<uint32_t>(payload.size());
  op.options = options;
  op.options.priority = priority;
  op.expires_at_s = expires_at_s;
  op.deadline_ns = WriteDeadline();
  std::memcpy(Staged(op).data() + HeaderPagesFor(payload.size()) * kPageBytes, payload.data(),
              payload.size());
  ++in_flight_;
  putting_[id.key] = index;
  waiting_puts_.push_back(index);
}

const DiskStore::Entry* DiskStore::FindSound(const BlockId& id, Reason* reason) {
  const auto it = entries_.find(id.key);
  if (it == entries_.end()) {
    *reason = Reason::kAbsent;
    return nullptr;
  }
  if (Expired(it->second)) {
    ++stats_.expired_blocks;
    Discard(id.key);
    *reason = Reason::kAbsent;
    return nullptr;
  }
  if (it->second.record->identity_sum != IdentitySum(id)) {
    *reason = Reason::kIdentity;
    return nullptr;
  }
  it->second.last_use = ++uses_;
  Reorder(it->second);
  *reason = Reason::kNone;
  return &it->second;
}

void DiskStore::StartGet(Op::Kind kind, uint64_t tag, const BlockId& id, std::span<std::byte> into,
                         std::span<const uint32_t> pages, int64_t deadline_ns) {
  const Operation operation = kind == Op::Kind::kGet ? Operation::kGet : Operation::kGetPages;
  if (health_.Update(clock_->NowNs()) == TierState::kOff) {
    return Complete(tag, operation, Reason::kOff);
  }
  Reason reason;
  const Entry* entry = FindSound(id, &reason);
  if (entry == nullptr) return Complete(tag, operation, reason);
  const BlockRecord& record = *entry->record;
  const bool fits = kind == Op::Kind::kGet ? record.payload_bytes == into.size()
                                           : pages.empty() || pages.back() < record.payload_pages();
  if (!fits) return Complete(tag, operation, Reason::kIdentity);
  if (into.empty()) return Complete(tag, operation, Reason::kNone);
  const size_t stage_pages = kind == Op::Kind::kGet ? record.payload_pages() : pages.size();
  // No wait would make room for a read larger than all of staging.
  if (in_flight_ >= options_.operations_max || stage_pages > stage_->total_pages()) {
    return Complete(tag, operation, Reason::kBusy);
  }
  const uint32_t index = NewOp(kind, tag, id);
  Op& op = ops_[index];
  op.record = entry->record;
  op.segment = segments_.at(record.segment_id).get();
  ++op.segment->users;
  op.into = into;
  op.pages.assign(pages.begin(), pages.end());
  op.start_ns = clock_->NowNs();
  op.deadline_ns = deadline_ns != 0 ? deadline_ns : op.start_ns + options_.read_deadline_ns;
  ++in_flight_;
  if (!waiting_reads_.empty() || !StartRead(index)) waiting_reads_.push_back(index);
}

void DiskStore::Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
                    int64_t deadline_ns) {
  StartGet(Op::Kind::kGet, tag, id, into, {}, deadline_ns);
}

void DiskStore::GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                         std::span<std::byte> into, int64_t deadline_ns) {
  WINNOW_CHECK(into.size() == pages.size() * kPageBytes);
  WINNOW_CHECK(std::is_sorted(pages.begin(), pages.end(), std::less_equal<>()));
  StartGet(Op::Kind::kGetPages, tag, id, into, pages, deadline_ns);
}

void DiskStore::Erase(uint64_t tag, const BlockKey& key) {
  const auto put = putting_.find(key);
  const bool in_flight = put != putting_.end() && !ops_[put->second].cancelled;
  if (in_flight) ops_[put->second].cancelled = true;
  IndexBatch batch;
  const auto entry = entries_.find(key);
  const bool absent = !in_flight && entry == entries_.end();
  if (!absent && (!in_flight || ops_[put->second].options.transient) &&
      (entry == entries_.end() || entry->second.record->transient) && !doubts_.contains(key)) {
    RemoveEntry(key, &batch);
    return Complete(tag, Operation::kErase, Reason::kNone);
  }
  RemoveEntry(key, &batch);
  // Also where there is nothing to be found: a batch with this block may be on its way, or have failed
  // and be there all the same; and a rebuilt index could find an evicted block again.
  batch.erases.assign(1, key);
  batch.erasures.push_back({key, next_sequence_++, next_segment_});
  ++in_flight_;
  SubmitBatch(
      std::move(batch),
      {.puts = {}, .erases = {{tag, absent ? Reason::kAbsent : Reason::kNone}}, .repairs = {}});
  Passed("erase.submitted");
}

std::optional<BlockInfo> DiskStore::Find(const BlockId& id) const {
  const auto it = entries_.find(id.key);
  if (it == entries_.end() || Expired(it->second)) return std::nullopt;
  const Entry& entry = it->second;
  if (entry.record->identity_sum != IdentitySum(id)) return std::nullopt;
  const uint64_t left_s = entry.expires_at_s == 0 ? 0 : entry.expires_at_s - StoreSeconds();
  return BlockInfo{entry.record->payload_bytes,   entry.priority, entry.pinned,
                   static_cast<uint32_t>(left_s), entry.in_use,   entry.record->transient};
}

bool DiskStore::SetPinned(const BlockKey& key, bool pinned) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return false;
  Entry& entry = it->second;
  if (entry.pinned == pinned) return true;
  const uint64_t bytes = entry.record->block_bytes();
  if (pinned && stats_.pinned_bytes + bytes > options_.capacity_bytes / 2) return false;
  entry.pinned = pinned;
  stats_.pinned_bytes = pinned ? stats_.pinned_bytes + bytes : stats_.pinned_bytes - bytes;
  Reorder(entry);
  SaveEntry(key, &entry);
  return true;
}

void DiskStore::SetInUse(const BlockKey& key, bool in_use) {
  if (const auto put = putting_.find(key); put != putting_.end()) {
    ops_[put->second].options.in_use = in_use;
  }
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  it->second.in_use = in_use;
  it->second.last_use = ++uses_;
  Reorder(it->second);
}

void DiskStore::Unlive(Entry* entry) {
  Segment* segment = segments_.at(entry->record->segment_id).get();
  segment->live_bytes -= entry->record->block_bytes();
  --segment->live_blocks;
  if (segment->live_blocks == 0) MarkBusy(segment);
  if (entry->pinned) stats_.pinned_bytes -= entry->record->block_bytes();
  order_.Remove(std::exchange(entry->order, EvictionOrder::kNone));
}

// Enters the block, at its present place, into the order of eviction.
void DiskStore::Order(const BlockKey& key, Entry* entry) {
  entry->order = order_.Add(key, entry->record->segment_id, entry->record->block_bytes(), {});
  Reorder(*entry);
}

void DiskStore::Reorder(const Entry& entry) {
  order_.Update(entry.order, {.last_use = entry.last_use,
                              .expires_at_s = entry.expires_at_s,
                              .priority = entry.priority,
                              .pinned = entry.pinned,
                              .in_use = entry.in_use});
}

void DiskStore::RemoveEntry(const BlockKey& key, IndexBatch* batch) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  const bool indexed = !it->second.record->transient;
  Unlive(&it->second);
  entries_.erase(it);
  if (IsCommitting(key)) return;  // it would be the newer block's
  if (indexed) batch->erases.push_back(key);
}

void DiskStore::Discard(const BlockKey& key) {
  IndexBatch batch;
  RemoveEntry(key, &batch);
  if (!batch.erases.empty()) SubmitBatch(std::move(batch), {});
}

// ---- reads ----

bool DiskStore::StartRead(uint32_t index) {
  Op& op = ops_[index];
  const BlockRecord& record = *op.record;
  // A move writes the header again and needs it; others know from the index what it would tell.
  const size_t pages = op.kind == Op::Kind::kMove  ? record.block_bytes() / kPageBytes
                       : op.kind == Op::Kind::kGet ? record.payload_pages()
                                                   : op.pages.size();
  if (!op.stage_page && !Stage(&op, pages)) return false;
  const std::span<std::byte> staged = Staged(op);
  const auto read = [&](uint64_t offset, std::span<std::byte> data) {
    ++op.outstanding;
    stats_.device_bytes_read += data.size();
    ring_->Submit({.kind = IoKind::kRead,
                   .fd = op.segment->file.fd(),
                   .offset = offset,
                   .data = data,
                   .deadline_ns = op.deadline_ns,
                   .tag = index});
  };
  if (op.kind != Op::Kind::kGetPages) {
    read(op.kind == Op::Kind::kMove ? record.offset : record.payload_offset(), staged);
    return true;
  }
  // Neighbouring pages are one read.
  for (size_t begin = 0; begin < op.pages.size();) {
    size_t end = begin + 1;
    while (end < op.pages.size() && op.pages[end] == op.pages[end - 1] + 1) ++end;
    read(record.payload_offset() + op.pages[begin] * kPageBytes,
         staged.subspan(begin * kPageBytes, (end - begin) * kPageBytes));
    begin = end;
  }
  return true;
}

void DiskStore::StartReads() {
  while (!waiting_reads_.empty()) {
    const uint32_t index = waiting_reads_.front();
    if (clock_->NowNs() >= ops_[index].deadline_ns) {
      waiting_reads_.pop_front();
      // Others have kept all buffers for so long: the device is as slow as if it had this read.
      ++stats_.io_errors;
      health_.ReadError(clock_->NowNs());
      Answer(&ops_[index], Reason::kLate);
      FreeOp(index);
      continue;
    }
    if (!StartRead(index)) return;
    waiting_reads_.pop_front();
  }
}

bool DiskStore::VerifyRead(const Op& op) const {
  const std::span<const std::byte> staged = Staged(op);
  const BlockRecord& record = *op.record;
  if (op.kind == Op::Kind::kMove) return BlockMatches(staged, op.id.key, record);
  for (size_t i = 0; i < staged.size() / kPageBytes; ++i) {
    const size_t page = op.kind == Op::Kind::kGet ? i : op.pages[i];
    if (PageSum(record.place_sum, page, staged.subspan(i * kPageBytes, kPageBytes)) !=
        record.page_sums[page]) {
      return false;
    }
  }
  return true;
}

// All parts of a read are back.
void DiskStore::OnRead(uint32_t index) {
  Op& op = ops_[index];
  const bool move = op.kind == Op::Kind::kMove;
  if (op.error != 0) {
    ++stats_.io_errors;
    health_.ReadError(clock_->NowNs());
    if (move) return EndMove(index, /*drop=*/true);
    Answer(&op, Reason::kIoError);
    return FreeOp(index);
  }
  if (!VerifyRead(op)) {
    if (!op.retried) {  // the path to memory may have failed, not the medium
      op.retried = true;
      StartRead(index);
      return;
    }
    ++stats_.corrupt_blocks;
    Log(absl::StrCat("corrupt block in segment ", op.record->segment_id, " at ", op.record->offset,
                     ": dropped"));
    const auto it = entries_.find(op.id.key);
    if (!move && it != entries_.end() && it->second.record == op.record) Discard(op.id.key);
    if (move) return EndMove(index, /*drop=*/true);
    Answer(&op, Reason::kCorrupt);
    return FreeOp(index);
  }
  health_.Success();
  if (move) {
    op.id = DecodeBlock(Staged(op))->id;
    op.reading = false;
    op.retried = false;
    --op.segment->users;
    op.segment = nullptr;
    waiting_moves_.push_back(index);
    return;
  }
  std::memcpy(op.into.data(), Staged(op).data(), op.into.size());
  stats_.payload_bytes_read += op.into.size();
  Answer(&op, Reason::kNone);
  FreeOp(index);
}

void DiskStore::OnOpIo(uint32_t index, const IoResult& result) {
  Op& op = ops_[index];
  const bool write = op.kind == Op::Kind::kPut || (op.kind == Op::Kind::kMove && !op.reading);
  if (result.late) {
    // The kernel still has the buffer: the operation is answered now and stays until it is back.
    op.error = ETIMEDOUT;
    if (op.late) return;
    op.late = true;
    ++op.segment->stuck;
    if (op.kind == Op::Kind::kMove) --moves_;  // its victim does not wait for it
    ++stats_.io_errors;
    if (write) {
      NoteWriteError(ETIMEDOUT);
      Break(op.segment, ETIMEDOUT);
      FailPut(index, Reason::kLate);
    } else {
      health_.ReadError(clock_->NowNs());
      Answer(&op, Reason::kLate);
    }
    return;
  }
  --op.outstanding;
  if (write) --op.segment->writing;
  if (op.error == 0) op.error = result.error;
  if (op.outstanding > 0) return;
  if (op.late) --op.segment->stuck;
  if (!op.late) {
    if (write) {
      OnWritten(index);
    } else {
      OnRead(index);
    }
  } else if (op.kind == Op::Kind::kMove) {
    EndMove(index, /*drop=*/false);
  } else {
    FreeOp(index);
  }
}

// ---- the loop ----

void DiskStore::OnIo(const IoResult& result) {
  const auto purpose = static_cast<SegmentIo>(result.tag >> 56);
  const uint64_t id = result.tag & ((uint64_t{1} << 56) - 1);
  opening_->steps.fetch_add(1, std::memory_order_relaxed);
  if (purpose == SegmentIo::kReadSync) {
    if (!result.returned) sync_result_ = result.error;
    if (!result.late && !result.returned) return;
    Segment* segment = segments_.at(id).get();
    if (result.late) {
      ++segment->users;
      ++segment->stuck;
      return;
    }
    --segment->users;
    --segment->stuck;
    stuck_reads_.erase(id);
    MarkBusy(segment);
  } else if (purpose == SegmentIo::kNone) {
    OnOpIo(static_cast<uint32_t>(id), result);
  } else {
    OnSegmentIo(purpose, id, result);
  }
}

void DiskStore::NoteState() {
  const TierState state = health_.Update(clock_->NowNs());
  if (state == known_state_) return;
  const std::string line =
      absl::StrCat("store ", options_.directory, ": ", std::string(TierStateName(known_state_)),
                   " -> ", std::string(TierStateName(state)), ", ", used_bytes_, " of ",
                   options_.capacity_bytes, " bytes used");
  switch (state) {
    case TierState::kOk:
      Log(line);
      break;
    case TierState::kDegraded:
      Warn(line +
           ": it is read and nothing is put into it, until it is tried again in some seconds");
      break;
    case TierState::kOff:
      Warn(line + ": KV that it holds is computed again, until it is tried again in some seconds");
  }
  known_state_ = state;
}

void DiskStore::Pump() {
  NoteState();
  AnswerLateCommits();
  StartReads();
  order_.Advance(StoreSeconds(), kOrderSteps);
  EmptyVictim();
  StartMoves();
  PlaceWrites();
  AdvanceSegments();
  RepairIndex();
}

void DiskStore::Poll(nanoseconds wait, std::vector<Completion>* completions) {
  Pump();
  if (!done_.empty()) wait = nanoseconds(0);
  // Two sources, one wait: while both have work, neither may be slept on for long.
  const bool io = ring_->in_flight() > 0;
  const bool index = writer_->in_flight() > 0;
  if (io) {
    io_results_.clear();
    ring_->Poll(index ? std::min<nanoseconds>(wait, std::chrono::microseconds(200)) : wait,
                &io_results_);
    for (const IoResult& result : io_results_) OnIo(result);
  } else if (index && wait.count() > 0) {
    writer_->Wait(wait);
  }
  index_results_.clear();
  writer_->Poll(&index_results_);
  for (const IndexResult& result : index_results_) OnIndex(result);
  Pump();
  // What Pump queued starts now, not with the caller's next step.
  io_results_.clear();
  ring_->Poll(nanoseconds(0), &io_results_);
  for (const IoResult& result : io_results_) OnIo(result);
  completions->insert(completions->end(), done_.begin(), done_.end());
  done_.clear();
}

bool DiskStore::idle() const {
  const bool settled = std::all_of(busy_.begin(), busy_.end(), [this](const Segment* segment) {
    return segment == open_ && segment->written.empty() && !segment->syncing;
  });
  return settled && ring_->in_flight() == 0 && writer_->in_flight() == 0 && moves_ == 0 &&
         !choosing_ && move_keys_.empty() && waiting_puts_.empty() && waiting_moves_.empty();
}

StoreStats DiskStore::stats() const {
  StoreStats stats = stats_;
  stats.state = health_.state();
  stats.blocks = entries_.size();
  stats.used_bytes = used_bytes_;
  stats.in_flight = in_flight_;
  stats.io_backend = ring_->engine().name() == "uring" ? "uring" : "threads";  // outlives the store
  return stats;
}

}  // namespace winnow::storage
