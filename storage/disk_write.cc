// How a block gets to disk: a place in the open segment, a write, one sync for many, an index
// batch.
#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/check.h"
#include "storage/disk_store.h"

namespace winnow::storage {

std::string SegmentName(uint64_t id) {
  char name[32];
  std::snprintf(name, sizeof name, "seg-%016" PRIx64 ".wseg", id);
  return name;
}

std::optional<uint64_t> ParseSegmentName(std::string_view name) {
  uint64_t id = 0;
  if (name.size() != 25) return std::nullopt;
  for (char c : name.substr(4, 16)) {
    const size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    id = id << 4 | digit;
  }
  // Ids share a tag with the purpose of an I/O.
  if (id == 0 || id >> 56 != 0 || name != SegmentName(id)) return std::nullopt;
  return id;
}

void DiskStore::NoteWriteError(int error) {
  ++stats_.io_errors;
  if (error == ENOSPC || error == EDQUOT) {
    // What is there is all that fits: the next segment must replace one.
    if (room_bytes_ > used_bytes_) {
      Warn(absl::StrCat("store ", options_.directory, ": no space left on its file system, ",
                        used_bytes_, " of ", options_.capacity_bytes,
                        " bytes used: from now on new blocks replace old ones"));
    }
    room_bytes_ = used_bytes_;
    health_.NoSpace(clock_->NowNs());
  } else {
    health_.WriteError(clock_->NowNs());
  }
}

void DiskStore::MarkBusy(Segment* segment) {
  if (segment->busy) return;
  segment->busy = true;
  busy_.push_back(segment);
}

// ---- placing ----

void DiskStore::PlaceWrites() {
  // Room may never come (a device that hangs): who waits for it is told in time.
  while (!waiting_puts_.empty() && clock_->NowNs() >= ops_[waiting_puts_.front()].deadline_ns) {
    FailPut(waiting_puts_.front(), Reason::kLate);
    waiting_puts_.pop_front();
  }
  // Moves first: they are what frees the room that Puts wait for.
  while (!waiting_moves_.empty() && PlaceWrite(waiting_moves_.front())) waiting_moves_.pop_front();
  if (!waiting_moves_.empty()) return;
  while (!waiting_puts_.empty() && PlaceWrite(waiting_puts_.front())) waiting_puts_.pop_front();
}

// True when the operation no longer waits: its write is on its way, or it has failed.
bool DiskStore::PlaceWrite(uint32_t index) {
  const bool move = ops_[index].kind == Op::Kind::kMove;
  if (health_.state() != TierState::kOk) {
    if (move) {
      EndMove(index, /*drop=*/false);
    } else {
      FailPut(index, Reason::kOff);
    }
    return true;
  }
  if (!move && ops_[index].cancelled) {
    FailPut(index, Reason::kNone);
    return true;
  }
  if (move) {
    // Erased or replaced meanwhile: a copy with a later sequence would outlive the erasure.
    const auto it = entries_.find(ops_[index].id.key);
    if (it == entries_.end() || it->second.record != ops_[index].source) {
      EndMove(index, /*drop=*/false);
      return true;
    }
  }
  const size_t bytes = BlockBytesFor(ops_[index].payload_bytes);
  bool never = false;
  Segment* segment = SegmentFor(bytes, move, &never);
  if (segment == nullptr) {
    if (!never) return false;
    if (move) {
      EndMove(index, /*drop=*/true);
    } else {
      FailPut(index, Reason::kFull);
    }
    return true;
  }
  Op& op = ops_[index];
  BlockPlace place;
  place.segment_id = segment->id;
  place.offset = segment->end_offset;
  place.sequence = next_sequence_++;
  place.expires_at_s = op.expires_at_s;
  place.written_at_s = StoreSeconds();
  place.priority = op.options.priority;
  place.pinned = op.options.pinned;
  place.transient = op.options.transient;
  op.record =
      std::make_shared<const BlockRecord>(EncodeBlock(op.id, place, op.payload_bytes, Staged(op)));
  op.segment = segment;
  ++segment->users;
  ++segment->unsynced;
  ++segment->writing;
  op.placed = true;
  if (move) moving_bytes_ += bytes;
  segment->end_offset += bytes;
  ++segment->block_count;
  segment->blocks_sum = AddToBlocksSum(segment->blocks_sum, op.record->header_sum);
  ++op.outstanding;
  op.error = 0;
  stats_.device_bytes_written += bytes;
  Passed("put.placed");
  ring_->Submit({.kind = IoKind::kWrite,
                 .fd = segment->file.fd(),
                 .offset = place.offset,
                 .data = Staged(op),
                 .deadline_ns = WriteDeadline(),
                 .tag = index});
  return true;
}

// The segment that takes `bytes` now, or nullptr: one will be ready later, or `never`.
Segment* DiskStore::SegmentFor(size_t bytes, bool for_move, bool* never) {
  if (open_ != nullptr && !open_->broken &&
      open_->end_offset + bytes + kPageBytes <= open_->file_bytes) {
    // What is moved may have no other place than this one. Puts wait until it has its own.
    const uint64_t victim_bytes = victim_ == nullptr ? 0 : victim_->live_bytes;
    const uint64_t moves_bytes =
        for_move ? 0 : victim_bytes - std::min(victim_bytes, moving_bytes_);
    const bool left = open_->end_offset + bytes + moves_bytes + kPageBytes <= open_->file_bytes;
    return left ? open_ : nullptr;
  }
  if (creating_ != nullptr) return nullptr;
  if (open_ != nullptr) {
    Seal(open_);
    open_ = nullptr;
  }
  // One segment's room is kept for moves: emptying a victim must not wait for the room it makes.
  const uint64_t need_bytes = options_.segment_bytes;
  if (!for_move && used_bytes_ + 2 * need_bytes > room_bytes_) {
    if (victim_ != nullptr || StartReclaim()) return nullptr;
  }
  if (used_bytes_ + need_bytes > room_bytes_ && !shrinking_) {
    *never = true;
    return nullptr;
  }
  // Otherwise a full file system has no room for it yet.
  if (closer_.pending() == 0) CreateSegment();
  return nullptr;
}

void DiskStore::FailWaitingPuts(Reason reason) {
  while (!waiting_puts_.empty()) {
    const uint32_t index = waiting_puts_.front();
    waiting_puts_.pop_front();
    FailPut(index, reason);
  }
  while (!waiting_moves_.empty()) {
    const uint32_t index = waiting_moves_.front();
    waiting_moves_.pop_front();
    EndMove(index, /*drop=*/false);
  }
}

// ---- a segment's life ----

void DiskStore::SubmitSegmentIo(Segment* segment, SegmentIo purpose) {
  IoOp op;
  op.fd = segment->file.fd();
  op.deadline_ns = WriteDeadline();
  op.tag = SegmentTag(purpose, segment->id);
  switch (purpose) {
    case SegmentIo::kAllocate:
      op.kind = IoKind::kAllocate;
      op.bytes = options_.segment_bytes;
      break;
    case SegmentIo::kHeader:
      op.kind = IoKind::kWrite;
      op.data = segment->page.bytes();
      break;
    case SegmentIo::kFooter:
      op.kind = IoKind::kWrite;
      op.offset = segment->end_offset;
      op.data = segment->page.bytes();
      break;
    case SegmentIo::kCreateSync:
      op.kind = IoKind::kSync;
      break;
    case SegmentIo::kDirectorySync:
      op.kind = IoKind::kSync;
      op.fd = directory_.fd();
      break;
    default:
      op.kind = IoKind::kDatasync;
  }
  ++segment->outstanding;
  MarkBusy(segment);
  ring_->Submit(op);
}

void DiskStore::CreateSegment() {
  auto segment = std::make_unique<Segment>();
  segment->id = next_segment_++;
  segment->path = options_.directory + "/" + SegmentName(segment->id);
  absl::StatusOr<File> file = files()->Open(segment->path, {.create = true, .direct = direct_});
  if (!file.ok()) {
    Log(std::string(file.status().message()));
    NoteWriteError(absl::IsResourceExhausted(file.status()) ? ENOSPC : EIO);
    return FailWaitingPuts(Reason::kIoError);
  }
  segment->file = *std::move(file);
  ring_->engine().RegisterFile(segment->file.fd());
  segment->page = PageMemory(kPageBytes);
  // Counted from here, when the file may have any length up to this.
  segment->file_bytes = options_.segment_bytes;
  used_bytes_ += segment->file_bytes;
  creating_ = segment.get();
  segments_[creating_->id] = std::move(segment);
  Passed("segment.opened");
  SubmitSegmentIo(creating_, SegmentIo::kAllocate);
}

// No more writes, no more syncs. Blocks that were not committed yet fail.
void DiskStore::Break(Segment* segment, int error) {
  if (!segment->broken) {
    Warn(absl::StrCat("store ", options_.directory, ": segment ", segment->id,
                      " takes no more writes: ", std::strerror(error)));
  }
  segment->broken = true;
  MarkBusy(segment);
  if (segment->state == Segment::State::kCreating) {
    segment->state = Segment::State::kSealed;  // without blocks: it is deleted
    creating_ = nullptr;
    FailWaitingPuts(Reason::kIoError);
  }
  for (uint32_t index : std::exchange(segment->written, {})) FailPut(index, Reason::kIoError);
}

void DiskStore::OnSegmentIo(SegmentIo purpose, uint64_t segment_id, const IoResult& result) {
  Segment* segment = segments_.at(segment_id).get();
  if (result.late) {
    ++segment->stuck;
  } else {
    --segment->outstanding;
  }
  MarkBusy(segment);
  if (result.returned) {  // dealt with when it was late
    --segment->stuck;
    return;
  }
  if (result.error != 0) {
    NoteWriteError(result.error);
    if (purpose == SegmentIo::kCommitSync) return OnSynced(segment, result.error);
    return Break(segment, result.error);  // Advance cuts off what may have been written
  }
  switch (purpose) {
    case SegmentIo::kAllocate:
      Passed("segment.allocated");
      segment->end_offset = kPageBytes;
      EncodeSegmentHeader(segment->id, options_.segment_bytes, segment->page.bytes());
      SubmitSegmentIo(segment, SegmentIo::kHeader);
      break;
    case SegmentIo::kHeader:
      Passed("segment.header_written");
      SubmitSegmentIo(segment, SegmentIo::kCreateSync);
      break;
    case SegmentIo::kCreateSync:
      SubmitSegmentIo(segment, SegmentIo::kDirectorySync);
      break;
    case SegmentIo::kDirectorySync:
      Passed("segment.ready");
      segment->state = Segment::State::kOpen;
      creating_ = nullptr;
      open_ = segment;
      room_bytes_ = options_.capacity_bytes;
      break;
    case SegmentIo::kCommitSync:
      OnSynced(segment, 0);
      break;
    case SegmentIo::kFooter:
      Passed("seal.footer_written");
      SubmitSegmentIo(segment, SegmentIo::kFooterSync);
      break;
    case SegmentIo::kFooterSync:
      Passed("seal.synced");
      segment->end_offset += kPageBytes;
      Finish(segment);
      break;
    case SegmentIo::kNone:
    case SegmentIo::kReadSync:
      WINNOW_CHECK(false);
  }
}

void DiskStore::Seal(Segment* segment) {
  segment->state = Segment::State::kSealing;
  MarkBusy(segment);
}

// Gives back the room behind the last block.
void DiskStore::Finish(Segment* segment) {
  segment->state = Segment::State::kSealed;
  MarkBusy(segment);
  if (segment->live_blocks == 0) return;  // about to be deleted
  const absl::Status status = files()->Truncate(segment->file, segment->end_offset);
  if (!status.ok()) {
    Log(std::string(status.message()));
    order_.Seal(segment->id, segment->file_bytes);
    return NoteWriteError(EIO);  // it keeps its length, and its length is counted
  }
  used_bytes_ -= segment->file_bytes - segment->end_offset;
  segment->file_bytes = segment->end_offset;
  order_.Seal(segment->id, segment->file_bytes);
  Passed("seal.truncated");
}

void DiskStore::AdvanceSegments() {
  // Advance may mark others busy; they are looked at in the next round.
  std::vector<Segment*> busy;
  busy.swap(busy_);
  for (Segment* segment : busy) segment->busy = false;
  for (Segment* segment : busy) {
    if (Advance(segment)) MarkBusy(segment);
  }
}

// One step, if one can be taken; false when the segment needs no more attention (or is no more).
bool DiskStore::Advance(Segment* segment) {
  using State = Segment::State;
  if (!segment->written.empty() && !segment->syncing && !segment->broken) StartSync(segment);
  if (segment->broken && segment == open_) {
    Seal(segment);
    open_ = nullptr;
  }
  const bool quiet = segment->unsynced == 0 && !segment->syncing && segment->outstanding == 0 &&
                     segment->writing == 0;
  if (segment->state == State::kSealing && quiet) {
    if (segment->broken || segment->footer_started || segment->block_count == 0) {
      Finish(segment);
    } else {
      segment->footer_started = true;
      EncodeSegmentFooter({.segment_id = segment->id,
                           .end_offset = segment->end_offset,
                           .block_count = segment->block_count,
                           .blocks_sum = segment->blocks_sum},
                          segment->page.bytes());
      SubmitSegmentIo(segment, SegmentIo::kFooter);
    }
  }
  if (segment->state != State::kSealed) return true;
  if (segment->live_blocks > 0 || segment == victim_) return false;
  if (segment->doubts > 0) {  // it is looked at again when they are gone
    dead_.insert(segment->id);
    return false;
  }
  if (!quiet || segment->users > 0) return true;
  (void)DeleteSegment(segment);  // tried again when room is needed
  return false;
}

// ---- committing ----

void DiskStore::StartSync(Segment* segment) {
  segment->covered = std::exchange(segment->written, {});
  segment->syncing = true;
  Passed("put.before_sync");
  SubmitSegmentIo(segment, SegmentIo::kCommitSync);
}

void DiskStore::OnWritten(uint32_t index) {
  Op& op = ops_[index];
  Segment* segment = op.segment;
  if (op.error == 0 && !segment->broken) {
    Passed("put.written");
    if (op.record->transient) {  // nobody asks for it after a crash
      health_.Success();
      return op.cancelled ? FailPut(index, Reason::kNone) : Publish(index);
    }
    segment->written.push_back(index);
    MarkBusy(segment);
    return;
  }
  if (op.error != 0) {
    NoteWriteError(op.error);
    Break(segment, op.error);
  }
  FailPut(index, Reason::kIoError);
}

void DiskStore::OnSynced(Segment* segment, int error) {
  segment->syncing = false;
  const std::vector<uint32_t> covered = std::exchange(segment->covered, {});
  if (error != 0) {
    Break(segment, error);
    for (uint32_t index : covered) FailPut(index, Reason::kIoError);
    return;
  }
  health_.Success();
  Passed("put.synced");
  IndexBatch batch;
  Commit commit;
  for (uint32_t index : covered) {
    Op& op = ops_[index];
    if (op.kind == Op::Kind::kMove) {
      // Erased or replaced since, or about to be: its old place is dead, so the copy is too.
      const auto it = entries_.find(op.id.key);
      if (it == entries_.end() || it->second.record != op.source || IsCommitting(op.id.key)) {
        EndMove(index, /*drop=*/false);
        continue;
      }
      it->second.moving = true;
    } else if (op.cancelled) {
      FailPut(index, Reason::kNone);
      continue;
    }
    op.committing = true;
    batch.puts.emplace_back(op.id.key, EncodeIndexValue(op.id.key, *op.record));
    commit.puts.push_back(index);
  }
  if (commit.puts.empty()) return;
  Passed("put.before_index");
  SubmitBatch(std::move(batch), std::move(commit));
  Passed("put.index_submitted");
}

void DiskStore::Unplace(Op* op) {
  if (!op->placed) return;
  op->placed = false;
  if (op->kind == Op::Kind::kMove) moving_bytes_ -= op->record->block_bytes();
  --op->segment->unsynced;
  MarkBusy(op->segment);
}

// Durable, or as good as it gets: from now on it is found.
void DiskStore::Publish(uint32_t index) {
  Op& op = ops_[index];
  const bool move = op.kind == Op::Kind::kMove;
  op.committing = false;
  Unplace(&op);
  const auto it = entries_.find(op.id.key);
  const bool current =
      move ? it != entries_.end() && it->second.record == op.source : !op.cancelled;
  if (current) {
    Entry entry;
    if (it != entries_.end()) {
      Unlive(&it->second);
      entry = it->second;
    }
    entry.record = op.record;
    if (!move) {
      entry.priority = op.options.priority;
      entry.expires_at_s = op.expires_at_s;
      entry.last_use = ++uses_;
      entry.pinned = op.options.pinned;
      entry.in_use |= op.options.in_use;
    }
    const uint64_t bytes = op.record->block_bytes();
    // More pins than the store can bear are not honoured; Find tells.
    if (!move && entry.pinned && stats_.pinned_bytes + bytes > options_.capacity_bytes / 2) {
      entry.pinned = false;
    }
    if (entry.pinned) stats_.pinned_bytes += bytes;
    op.segment->live_bytes += bytes;
    ++op.segment->live_blocks;
    entry.moving = entry.save_later = false;
    // Pin, priority or expiry changed while the block moved: the batch had the old ones.
    const bool stale = entry.pinned != op.record->pinned || entry.priority != op.record->priority ||
                       entry.expires_at_s != op.record->expires_at_s;
    Entry& published = entries_[op.id.key] = entry;
    Order(op.id.key, &published);
    if (stale) SaveEntry(op.id.key, &published);
  }
  if (move) {
    ++stats_.moved_blocks;
    Passed("reclaim.moved");
    return EndMove(index, /*drop=*/false);
  }
  putting_.erase(op.id.key);
  Answer(&op, Reason::kNone);
  FreeOp(index);
}

// The block is not stored (or, with kNone, was erased before it was).
void DiskStore::FailPut(uint32_t index, Reason reason) {
  Op& op = ops_[index];
  Unplace(&op);
  if (op.kind == Op::Kind::kMove) {
    if (op.outstanding == 0) EndMove(index, /*drop=*/false);
    return;
  }
  const auto it = putting_.find(op.id.key);
  if (it != putting_.end() && it->second == index) putting_.erase(it);
  if (op.committing) SaveLater(op.id.key);
  Answer(&op, reason);
  if (op.outstanding == 0) FreeOp(index);
}

}  // namespace winnow::storage
