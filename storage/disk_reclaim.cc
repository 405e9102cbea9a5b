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

// Header and footer of a segment; a segment without footer has no dead block of one page.
constexpr uint64_t kEmptyBytes = 2 * kPageBytes;

// Copying what is in use is worth it down to this part of a file.
constexpr uint64_t kLeastGain = 16;

struct Candidate {
  bool expired;
  bool in_use;
  uint8_t priority;
  uint64_t last_use;
  bool pinned;
  uint64_t bytes;
  uint64_t segment_id;
  BlockKey key;
};

bool ColderThan(const Candidate& a, const Candidate& b) {
  if (a.pinned != b.pinned) return b.pinned;
  if (a.expired != b.expired) return a.expired;
  if (a.in_use != b.in_use) return b.in_use;
  if (a.priority != b.priority) return a.priority < b.priority;
  return a.last_use < b.last_use;
}

}  // namespace

// True: room is on its way (a victim is being emptied, or a file is about to be deleted). False:
// all that is sealed is pinned, or there is nothing.
bool DiskStore::StartReclaim() {
  if (victim_ != nullptr) return true;
  bool soon = false;
  for (const auto& [id, segment] : segments_) {
    // Nobody knows when what hangs comes back: others make room meanwhile.
    if (segment->stuck > 0) continue;
    if (segment->state == Segment::State::kSealing) soon = true;
    if (segment->state != Segment::State::kSealed || segment->live_blocks > 0) continue;
    // Dead, and not deleted yet: in use, or its deletion failed and is tried again.
    if (segment->users > 0 || segment->outstanding > 0 || segment->doubts > 0) {
      soon = true;
    } else if (DeleteSegment(segment.get())) {
      return true;
    }
  }
  if (soon) return true;

  std::vector<Candidate> candidates;
  candidates.reserve(entries_.size());
  uint64_t live_bytes = 0;
  for (const auto& [key, entry] : entries_) {
    const uint64_t segment_id = entry.record->segment_id;
    if (segments_.at(segment_id)->state != Segment::State::kSealed) continue;
    const uint64_t bytes = entry.record->block_bytes();
    live_bytes += bytes;
    const bool expired = Expired(entry);
    candidates.push_back({expired, entry.in_use && !expired, entry.priority, entry.last_use,
                          entry.pinned, bytes, segment_id, key});
  }
  std::sort(candidates.begin(), candidates.end(), ColderThan);
  const uint64_t cold_bytes = std::max(options_.segment_bytes, live_bytes / 8);
  const uint64_t keep_max = options_.segment_bytes / 2;
  size_t cold = 0;  // candidates that are
  Segment* victim = nullptr;
  bool spare = true;  // what is in use
  const auto held = [&](const Candidate& c) { return c.pinned || (spare && c.in_use); };
  const auto choose = [&] {
    absl::flat_hash_map<uint64_t, uint64_t> kept_bytes, held_bytes, pinned_bytes;  // by segment
    uint64_t seen_bytes = 0;
    cold = 0;
    for (const Candidate& candidate : candidates) {
      if (candidate.pinned) pinned_bytes[candidate.segment_id] += candidate.bytes;
      if (held(candidate)) held_bytes[candidate.segment_id] += candidate.bytes;
      if (!held(candidate) && seen_bytes < cold_bytes) {
        seen_bytes += candidate.bytes;
        ++cold;
      } else {
        kept_bytes[candidate.segment_id] += candidate.bytes;
      }
    }
    std::pair<bool, uint64_t> victim_gain;  // half a file can go; bytes
    for (const auto& [id, segment] : segments_) {
      if (segment->state != Segment::State::kSealed || segment->live_blocks == 0) continue;
      if (segment->stuck > 0) continue;
      const uint64_t half = std::min(keep_max, segment->file_bytes / 2);
      if (pinned_bytes[id] > half) continue;
      const bool light = held_bytes[id] <= half;
      const uint64_t kept = light ? kept_bytes[id] : held_bytes[id] + kEmptyBytes;
      const uint64_t gain = segment->file_bytes - std::min(kept, segment->file_bytes);
      if (!light && gain < segment->file_bytes / kLeastGain) continue;
      if (victim == nullptr || std::pair(light, gain) > victim_gain) {
        victim = segment.get();
        victim_gain = {light, gain};
      }
    }
  };
  choose();
  if (victim == nullptr) {
    spare = false;
    choose();
  }
  if (victim == nullptr) return false;
  Passed("reclaim.chosen");
  victim_ = victim;
  // Warmest first, so that what does not fit half a segment is the coldest of the rest.
  IndexBatch batch;
  uint64_t moved_bytes = 0;
  for (size_t i = candidates.size(); i-- > 0;) {
    const Candidate& candidate = candidates[i];
    if (candidate.segment_id != victim->id) continue;
    const bool keep = held(candidate) || (i >= cold && moved_bytes + candidate.bytes <= keep_max);
    if (keep) {
      moved_bytes += candidate.bytes;
      move_keys_.push_back(candidate.key);
    } else {
      RemoveEntry(candidate.key, &batch);
      if (candidate.expired) {
        ++stats_.expired_blocks;
      } else {
        ++stats_.evicted_blocks;
      }
    }
  }
  if (!batch.erases.empty()) SubmitBatch(std::move(batch), {});
  if (move_keys_.empty()) {
    MarkBusy(victim_);
    victim_ = nullptr;
  }
  return true;
}

void DiskStore::StartMoves() {
  while (!move_keys_.empty()) {
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
  if (victim_ != nullptr && moves_ == 0) {
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
    return false;
  }
  used_bytes_ -= segment->file_bytes;
  ring_->engine().UnregisterFile(segment->file.fd());
  std::erase(busy_, segment);
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
  for (const auto& [key, entry] : entries_) records.emplace_back(key, entry.record);
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
  for (const auto& [key, entry] : entries_) {
    if (Expired(entry)) expired.push_back(key);
  }
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
            live_min * static_cast<double>(segment->file_bytes - kEmptyBytes)) {
      sparse.push_back(id);
    }
  }
  for (uint64_t id : sparse) {
    const auto it = segments_.find(id);
    if (it == segments_.end() || victim_ != nullptr) continue;
    if (used_bytes_ + options_.segment_bytes > room_bytes_) break;
    victim_ = it->second.get();
    for (const auto& [key, entry] : entries_) {
      if (entry.record->segment_id == id) move_keys_.push_back(key);
    }
    settle();
  }
  done_.insert(done_.end(), completions.begin(), completions.end());
  report.freed_bytes = before_bytes > used_bytes_ ? before_bytes - used_bytes_ : 0;
  return report;
}

}  // namespace winnow::storage
