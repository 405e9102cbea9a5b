#include "storage/segment_log.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/check.h"

namespace winnow::storage {

SegmentLog::SegmentLog(DiskEnvironment& env, EvictionOrder& order, Listener& listener)
    : env_(env), order_(order), listener_(listener), room_bytes_(env.options().capacity_bytes) {
  closer_.set_limit(std::chrono::nanoseconds(env.options().close_limit_ns));
}

// ---- opening ----

Segment* SegmentLog::Add(std::unique_ptr<Segment> segment) {
  if (segment->file.is_open()) env_.ring().engine().RegisterFile(segment->file.fd());
  used_bytes_ += segment->file_bytes;
  SkipSegments(segment->id + 1);
  return (segments_[segment->id] = std::move(segment)).get();
}

void SegmentLog::SkipSegments(uint64_t next_segment) {
  next_segment_ = std::max(next_segment_, next_segment);
}

void SegmentLog::SkipSequences(uint64_t next_sequence) {
  next_sequence_ = std::max(next_sequence_, next_sequence);
}

// ---- appending ----

Segment* SegmentLog::SegmentFor(uint64_t bytes, uint64_t kept_bytes, bool for_move, bool* never) {
  *never = false;
  if (open_ != nullptr && !open_->broken &&
      open_->end_offset + bytes + kPageBytes <= open_->file_bytes) {
    const bool left = open_->end_offset + bytes + kept_bytes + kPageBytes <= open_->file_bytes;
    return left ? open_ : nullptr;
  }
  if (creating_ != nullptr) return nullptr;
  SealOpen();
  // One segment's room is kept for moves: emptying a victim must not wait for the room it makes.
  const uint64_t need_bytes = env_.options().segment_bytes;
  if (!for_move && used_bytes_ + 2 * need_bytes > room_bytes_ && listener_.MakeRoom()) {
    return nullptr;
  }
  if (used_bytes_ + need_bytes > room_bytes_ && !shrinking_) {
    *never = true;
    return nullptr;
  }
  // While a deleted file is being closed, a full file system has no room for a new one yet.
  if (closer_.pending() == 0) Create();
  return nullptr;
}

BlockPlace SegmentLog::NextPlace(const Segment& segment) {
  BlockPlace place;
  place.segment_id = segment.id;
  place.offset = segment.end_offset;
  place.sequence = next_sequence_++;
  place.written_at_s = env_.StoreSeconds();
  return place;
}

void SegmentLog::Append(Segment* segment, const BlockRecord& record, std::span<std::byte> block,
                        uint32_t operation) {
  WINNOW_CHECK(record.segment_id == segment->id && record.offset == segment->end_offset);
  Hold(segment);
  ++segment->unsynced;
  ++segment->writing;
  segment->end_offset += record.block_bytes();
  ++segment->block_count;
  segment->blocks_sum = AddToBlocksSum(segment->blocks_sum, record.header_sum);
  env_.stats.device_bytes_written += record.block_bytes();
  env_.Passed("put.placed");
  env_.ring().Submit({.kind = IoKind::kWrite,
                      .fd = segment->file.fd(),
                      .offset = record.offset,
                      .data = block,
                      .deadline_ns = env_.WriteDeadline(),
                      .tag = operation});
}

void SegmentLog::Written(Segment* segment, uint32_t operation) {
  segment->written.push_back(operation);
  MarkBusy(segment);
}

void SegmentLog::Settle(Segment* segment) {
  --segment->unsynced;
  MarkBusy(segment);
}

void SegmentLog::NoteWriteError(int error) {
  ++env_.stats.io_errors;
  if (error != ENOSPC && error != EDQUOT) {
    env_.health.WriteError(env_.NowNs());
    return;
  }
  // The present files are all that fit: the next segment must replace one.
  if (room_bytes_ > used_bytes_) {
    env_.Warn(absl::StrCat("store ", env_.options().directory,
                           ": no space left on its file system, ", used_bytes_, " of ",
                           env_.options().capacity_bytes,
                           " bytes used: from now on new blocks replace old ones"));
  }
  room_bytes_ = used_bytes_;
  env_.health.NoSpace(env_.NowNs());
}

void SegmentLog::Break(Segment* segment, int error) {
  if (!segment->broken) {
    env_.Warn(absl::StrCat("store ", env_.options().directory, ": segment ", segment->id,
                           " takes no more writes: ", std::strerror(error)));
  }
  segment->broken = true;
  MarkBusy(segment);
  if (segment->state == Segment::State::kCreating) {
    segment->state = Segment::State::kSealed;  // without blocks: it is deleted
    creating_ = nullptr;
    listener_.OnNoSegment();
  }
  for (uint32_t operation : std::exchange(segment->written, {})) listener_.OnLost(operation);
}

// ---- holding ----

void SegmentLog::Release(Segment* segment) {
  --segment->users;
  if (segment->live_blocks == 0 || segment->state != Segment::State::kSealed) MarkBusy(segment);
}

void SegmentLog::AddLive(uint64_t segment_id, uint64_t bytes) {
  Segment& segment = At(segment_id);
  segment.live_bytes += bytes;
  ++segment.live_blocks;
}

void SegmentLog::RemoveLive(uint64_t segment_id, uint64_t bytes) {
  Segment& segment = At(segment_id);
  segment.live_bytes -= bytes;
  --segment.live_blocks;
  if (segment.live_blocks == 0) MarkBusy(&segment);
}

void SegmentLog::RemoveDoubt(Segment* segment) {
  --segment->doubts;
  MarkBusy(segment);
}

void SegmentLog::SetVictim(Segment* segment, bool victim) {
  segment->victim = victim;
  if (!victim) MarkBusy(segment);
}

// ---- a segment's life ----

void SegmentLog::MarkBusy(Segment* segment) {
  if (segment->busy) return;
  segment->busy = true;
  busy_.push_back(segment);
}

void SegmentLog::SubmitIo(Segment* segment, SegmentIo purpose) {
  IoOp op;
  op.fd = segment->file.fd();
  op.deadline_ns = env_.WriteDeadline();
  op.tag = SegmentTag(purpose, segment->id);
  switch (purpose) {
    case SegmentIo::kAllocate:
      op.kind = IoKind::kAllocate;
      op.bytes = env_.options().segment_bytes;
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
  env_.ring().Submit(op);
}

void SegmentLog::Create() {
  auto segment = std::make_unique<Segment>();
  segment->id = next_segment_++;
  segment->path = env_.options().directory + "/" + SegmentName(segment->id);
  absl::StatusOr<File> file =
      env_.files()->Open(segment->path, {.create = true, .direct = env_.direct()});
  if (!file.ok()) {
    env_.Log(std::string(file.status().message()));
    NoteWriteError(absl::IsResourceExhausted(file.status()) ? ENOSPC : EIO);
    return listener_.OnNoSegment();
  }
  segment->file = *std::move(file);
  segment->page = PageMemory(kPageBytes);
  // Counted from here, when the file may have any length up to this.
  segment->file_bytes = env_.options().segment_bytes;
  creating_ = Add(std::move(segment));
  env_.Passed("segment.opened");
  SubmitIo(creating_, SegmentIo::kAllocate);
}

void SegmentLog::OnIo(SegmentIo purpose, uint64_t segment_id, const IoResult& result) {
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
      env_.Passed("segment.allocated");
      segment->end_offset = kPageBytes;
      EncodeSegmentHeader(segment->id, env_.options().segment_bytes, segment->page.bytes());
      SubmitIo(segment, SegmentIo::kHeader);
      break;
    case SegmentIo::kHeader:
      env_.Passed("segment.header_written");
      SubmitIo(segment, SegmentIo::kCreateSync);
      break;
    case SegmentIo::kCreateSync:
      SubmitIo(segment, SegmentIo::kDirectorySync);
      break;
    case SegmentIo::kDirectorySync:
      env_.Passed("segment.ready");
      segment->state = Segment::State::kOpen;
      creating_ = nullptr;
      open_ = segment;
      room_bytes_ = env_.options().capacity_bytes;
      break;
    case SegmentIo::kCommitSync:
      OnSynced(segment, 0);
      break;
    case SegmentIo::kFooter:
      env_.Passed("seal.footer_written");
      SubmitIo(segment, SegmentIo::kFooterSync);
      break;
    case SegmentIo::kFooterSync:
      env_.Passed("seal.synced");
      segment->end_offset += kPageBytes;
      Finish(segment);
      break;
    case SegmentIo::kNone:
    case SegmentIo::kReadSync:
      WINNOW_CHECK(false);
  }
}

void SegmentLog::Seal(Segment* segment) {
  segment->state = Segment::State::kSealing;
  MarkBusy(segment);
}

void SegmentLog::SealOpen() {
  if (open_ == nullptr) return;
  Seal(open_);
  open_ = nullptr;
}

absl::Status SegmentLog::Cut(Segment* segment) {
  absl::Status status = env_.files()->Truncate(segment->file, segment->end_offset);
  if (!status.ok()) return status;  // it keeps its length, and its length is counted
  used_bytes_ -= segment->file_bytes - segment->end_offset;
  segment->file_bytes = segment->end_offset;
  return status;
}

void SegmentLog::Finish(Segment* segment) {
  segment->state = Segment::State::kSealed;
  MarkBusy(segment);
  if (segment->live_blocks == 0) return;  // about to be deleted
  const absl::Status status = Cut(segment);
  order_.Seal(segment->id, segment->file_bytes);
  if (!status.ok()) {
    env_.Log(std::string(status.message()));
    return NoteWriteError(EIO);
  }
  env_.Passed("seal.truncated");
}

void SegmentLog::Advance() {
  // Advance may mark others busy; they are looked at in the next round.
  std::vector<Segment*> busy;
  busy.swap(busy_);
  for (Segment* segment : busy) segment->busy = false;
  for (Segment* segment : busy) {
    if (Advance(segment)) MarkBusy(segment);
  }
}

// One step, if one can be taken; false when the segment needs no more attention (or is no more).
bool SegmentLog::Advance(Segment* segment) {
  using State = Segment::State;
  if (!segment->written.empty() && !segment->syncing && !segment->broken) StartSync(segment);
  if (segment->broken && segment == open_) SealOpen();
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
      SubmitIo(segment, SegmentIo::kFooter);
    }
  }
  if (segment->state != State::kSealed) return true;
  if (segment->live_blocks > 0 || segment->victim) return false;
  if (segment->doubts > 0) {  // it is looked at again when they are gone
    dead_.insert(segment->id);
    return false;
  }
  if (!quiet || segment->users > 0) return true;
  (void)Delete(segment);  // tried again when room is needed
  return false;
}

void SegmentLog::StartSync(Segment* segment) {
  segment->covered = std::exchange(segment->written, {});
  segment->syncing = true;
  env_.Passed("put.before_sync");
  SubmitIo(segment, SegmentIo::kCommitSync);
}

void SegmentLog::OnSynced(Segment* segment, int error) {
  segment->syncing = false;
  const std::vector<uint32_t> covered = std::exchange(segment->covered, {});
  if (error != 0) {
    Break(segment, error);
    for (uint32_t operation : covered) listener_.OnLost(operation);
    return;
  }
  env_.health.Success();
  env_.Passed("put.synced");
  listener_.OnSynced(covered);
}

SegmentLog::Dead SegmentLog::DeleteDead() {
  Dead dead = Dead::kNone;
  std::vector<Segment*> candidates;
  for (uint64_t id : dead_) candidates.push_back(segments_.at(id).get());
  candidates.insert(candidates.end(), busy_.begin(), busy_.end());
  for (Segment* segment : candidates) {
    // Nobody knows when what hangs comes back: others make room meanwhile.
    if (segment->stuck > 0) continue;
    if (segment->state == Segment::State::kSealing) dead = Dead::kSoon;
    if (segment->state != Segment::State::kSealed || segment->live_blocks > 0) continue;
    // Dead, and not deleted yet: in use, or its deletion failed and is tried again.
    if (segment->users > 0 || segment->outstanding > 0 || segment->doubts > 0) {
      dead = Dead::kSoon;
    } else if (Delete(segment)) {
      return Dead::kDeleted;
    }
  }
  return dead;
}

bool SegmentLog::Delete(Segment* segment) {
  env_.Passed("reclaim.before_unlink");
  const absl::Status status = env_.files()->Unlink(segment->path);
  if (!status.ok() && !absl::IsNotFound(status)) {
    env_.Log(std::string(status.message()));
    ++env_.stats.io_errors;
    dead_.insert(segment->id);
    return false;
  }
  const uint64_t id = segment->id;
  used_bytes_ -= segment->file_bytes;
  if (segment->file.is_open()) env_.ring().engine().UnregisterFile(segment->file.fd());
  std::erase(busy_, segment);
  dead_.erase(id);
  order_.DropSegment(id);
  closer_.Close(std::move(segment->file));
  segments_.erase(id);
  env_.Passed("reclaim.unlinked");
  return true;
}

// ---- looking ----

Segment* SegmentLog::Find(uint64_t id) const {
  const auto it = segments_.find(id);
  return it == segments_.end() ? nullptr : it->second.get();
}

bool SegmentLog::idle() const {
  return std::all_of(busy_.begin(), busy_.end(), [this](const Segment* segment) {
    return segment == open_ && segment->written.empty() && !segment->syncing;
  });
}

}  // namespace winnow::storage
