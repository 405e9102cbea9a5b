// How a full store makes room, and the maintenance that an operator asks for.
//
// Room comes back a file at a time. The victim is the sealed segment with the most bytes that are
// dead or cold, cold being the blocks that come first by (expired, priority, last use) up to an
// eighth of the store. Its cold blocks are dropped, the rest is moved to the open segment, at most
// half a segment of it, so that each round frees at least half a file: writes are amplified by at
// most two.
//
// What is in use is never cold and always moved, as long as that frees a sixteenth of a file: where
// every segment is in use by more than half, what else is in the victim leaves, and a block in use is
// copied rather than lost. Only where there is not even that, blocks in use leave, too, in their
// turn: the store goes on, and who lost one computes it again.
//
// Tried on paper and not taken: holes punched for single blocks (lengths and extents of
// files then depend on the file system, and used bytes could not be told exactly).
#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "storage/check.h"
#include "storage/disk_store.h"

namespace winnow::storage {
namespace {

// Each keeps a buffer that the kernel has.
constexpr size_t kStuckReadsMax = 8;

// Blocks of a victim that are dealt with in one go: dropping one takes some 2 us.
constexpr int kEmptyingBlocks = 64;
// Moves at a time: they are committed and published together, some 5 us each.
constexpr size_t kMovesMax = 64;

}  // namespace

// True: room is on its way (a victim is being emptied, or a file is about to be deleted). False:
// all that is sealed is pinned, or there is nothing.
bool DiskStore::StartReclaim() {
  if (victim_ != nullptr) return true;
  bool soon = !order_.settled();
  std::vector<Segment*> dead;
  for (uint64_t id : dead_) dead.push_back(segments_.at(id).get());
  dead.insert(dead.end(), busy_.begin(), busy_.end());
  for (Segment* segment : dead) {
    // Nobody knows when what hangs comes back: others make room meanwhile.
    if (segment->stuck > 0) continue;
    if (segment->state == Segment::State::kSealing) soon = true;
    if (segment->state != Segment::State::kSealed || segment->live_blocks > 0) continue;
    // Dead, and not deleted yet: in use, or its deletion failed and is tried again.
    if (segment->users > 0 || segment->outstanding > 0 || segment->doubts > 0) {
      soon = true;
    } else if (DeleteSegment(segment)) {
      return true;
    }
  }
  if (soon) return true;
  const auto id =
      order_.Choose([this](uint64_t segment) { return segments_.at(segment)->stuck == 0; });
  if (!id) return false;
  Passed("reclaim.chosen");
  victim_ = segments_.at(*id).get();
  choosing_ = true;
  EmptyVictim();
  return true;
}

// Drops blocks of the victim, or arranges their move: a part of them, the rest with the next Poll.
void DiskStore::EmptyVictim() {
  if (!choosing_) return;
  IndexBatch batch;
  for (int i = 0; i < kEmptyingBlocks; ++i) {
    const auto verdict = order_.TakeNext();
    if (!verdict) {
      choosing_ = false;
      break;
    }
    const auto it = entries_.find(verdict->key);
    WINNOW_CHECK(it != entries_.end());
    it->second.order = EvictionOrder::kNone;
    if (verdict->keep) {
      move_keys_.push_back(verdict->key);
      continue;
    }
    RemoveEntry(verdict->key, &batch);
    ++(verdict->expired ? stats_.expired_blocks : stats_.evicted_blocks);
  }
  if (!batch.erases.empty()) SubmitBatch(std::move(batch), {});
  if (choosing_ || !move_keys_.empty()) return;
  MarkBusy(victim_);
  victim_ = nullptr;
}

void DiskStore::StartMoves() {
  if (choosing_) return;
  while (!move_keys_.empty() && moves_ < kMovesMax) {
    const BlockKey key = move_keys_.front();
    const auto it = entries_.find(key);
    if (it != entries_.end() && it->second.record->segment_id == victim_->id) {
      const Entry& entry = it->second;
      const uint32_t index = NewOp(Op::Kind::kMove, 0, {});
      Op& op = ops_[index];
      op.id.key = key;
      op.reading = true;
      op.record = op.source = entry.record;
      op.payload_bytes = entry.record->payload_bytes;
      op.options = {
          .priority = entry.priority, .pinned = entry.pinned, .transient = entry.record->transient};
      op.expires_at_s = entry.expires_at_s;
      op.deadline_ns = WriteDeadline();
      op.segment = victim_;
      ++victim_->users;
      if (!StartRead(index)) {  // its buffers are in use; the next round
        FreeOp(index);
        return;
      }
      ++moves_;
    }
    move_keys_.pop_front();
  }
  if (victim_ != nullptr && moves_ == 0 && move_keys_.empty()) {
    MarkBusy(victim_);
    victim_ = nullptr;
  }
}

// With `drop`, the block could not be moved and goes, unless it is pinned and still where it was.
void DiskStore::EndMove(uint32_t index, bool drop) {
  Op& op = ops_[index];
  Unplace(&op);
  const auto it = entries_.find(op.id.key);
  const bool unsound = op.reading;  // it could not even be read
  if (it != entries_.end() && it->second.record == op.source) {
    it->second.moving = false;
    if (drop && (unsound || !it->second.pinned)) {
      if (!unsound) ++stats_.evicted_blocks;
      Discard(op.id.key);
    } else {
      if (it->second.order == EvictionOrder::kNone) Order(op.id.key, &it->second);  // it stays
      SaveLater(op.id.key);
    }
  }
  if (!op.late) --moves_;
  FreeOp(index);
}

bool DiskStore::DeleteSegment(Segment* segment) {
  Passed("reclaim.before_unlink");
  const absl::Status status = files()->Unlink(segment->path);
  if (!status.ok() && !absl::IsNotFound(status)) {
    Log(std::string(status.message()));
    ++stats_.io_errors;
    dead_.insert(segment->id);
    return false;
  }
  used_bytes_ -= segment->file_bytes;
  ring_->engine().UnregisterFile(segment->file.fd());
  std::erase(busy_, segment);
  dead_.erase(segment->id);
  order_.DropSegment(segment->id);
  closer_.Close(std::move(segment->file));
  segments_.erase(segment->id);
  Passed("reclaim.unlinked");
  return true;
}

// ---- maintenance ----

VerifyReport DiskStore::VerifyAll(bool repair) {
  VerifyReport report;
  PageMemory memory(BlockBytesFor(payload_bytes_max_));
  // Waiting for a read moves other work along, which may change the entries: from a copy.
  std::vector<std::pair<BlockKey, std::shared_ptr<const BlockRecord>>> records;
  records.reserve(entries_.size());
  entries_.ForEach(
      [&](const BlockKey& key, const Entry& entry) { records.emplace_back(key, entry.record); });
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->segment_id, a.second->offset) <
           std::pair(b.second->segment_id, b.second->offset);
  });
  for (const auto& [key, record] : records) {
    const auto it = entries_.find(key);
    if (it == entries_.end() || it->second.record != record) continue;
    ++report.blocks;
    const Segment& segment = *segments_.at(record->segment_id);
    // One read that hangs is enough to leave a segment, and a few segments to leave the disk.
    if (segment.stuck > 0 || stuck_reads_.size() >= kStuckReadsMax) {
      ++report.unchecked_blocks;
      continue;
    }
    report.bytes += record->payload_bytes;
    const std::span<std::byte> block = memory.bytes().first(record->block_bytes());
    bool sound = false;
    const int error = ReadSync(segment, record->offset, block, WriteDeadline());
    if (segment.stuck > 0) {
      stuck_reads_[segment.id] =
          std::exchange(memory, PageMemory(BlockBytesFor(payload_bytes_max_)));
    }
    if (error == ETIMEDOUT) {
      ++report.unchecked_blocks;
      continue;
    }
    if (error != 0) {
      ++report.unreadable_blocks;
    } else {
      sound = BlockMatches(block, key, *record);
      if (!sound) ++report.corrupt_blocks;
    }
    if (sound || !repair) continue;
    ++report.removed_blocks;
    Discard(key);
  }
  return report;
}

GcReport DiskStore::CollectGarbage(double live_min) {
  GcReport report;
  const uint64_t before_bytes = used_bytes_;
  IndexBatch batch;
  std::vector<BlockKey> expired;
  entries_.ForEach([&](const BlockKey& key, const Entry& entry) {
    if (Expired(entry)) expired.push_back(key);
  });
  for (const BlockKey& key : expired) RemoveEntry(key, &batch);
  report.expired_blocks = expired.size();
  stats_.expired_blocks += expired.size();
  if (!expired.empty()) SubmitBatch(std::move(batch), {});
  std::vector<Completion> completions;  // of others' operations, handed out by the next Poll
  const auto settle = [&] {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    do {
      Poll(std::chrono::milliseconds(10), &completions);
    } while (!idle() && std::chrono::steady_clock::now() < limit);
  };
  settle();
  // What lives in sparse segments moves, and the file goes.
  std::vector<uint64_t> sparse;
  for (const auto& [id, segment] : segments_) {
    if (segment->state == Segment::State::kSealed && segment->live_blocks > 0 &&
        static_cast<double>(segment->live_bytes) <
            live_min * static_cast<double>(segment->file_bytes - 2 * kPageBytes)) {
      sparse.push_back(id);
    }
  }
  for (uint64_t id : sparse) {
    const auto it = segments_.find(id);
    if (it == segments_.end() || victim_ != nullptr) continue;
    if (used_bytes_ + options_.segment_bytes > room_bytes_) break;
    victim_ = it->second.get();
    entries_.ForEach([&](const BlockKey& key, const Entry& entry) {
      if (entry.record->segment_id == id) move_keys_.push_back(key);
    });
    settle();
  }
  done_.insert(done_.end(), completions.begin(), completions.end());
  report.freed_bytes = before_bytes > used_bytes_ ? before_bytes - used_bytes_ : 0;
  return report;
}

}  // namespace winnow::storage
