// How a DiskStore's operations write: Puts, and the second half of moves. Each waits for a place, is written, is covered by
// a sync, is told to the index, and is published.
#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "storage/check.h"
#include "storage/disk_store.h"

namespace winnow::storage {

// ---- a place ----

void DiskStore::PlaceWrites() {
  // Room may never come (a device that hangs): Puts that wait for it are answered in time.
  while (!waiting_puts_.empty() && env_.NowNs() >= ops_[waiting_puts_.front()].deadline_ns) {
    FailPut(waiting_puts_.front(), Reason::kLate);
    waiting_puts_.pop_front();
  }
  // Moves first, because they free the room that Puts wait for.
  while (!waiting_moves_.empty() && PlaceWrite(waiting_moves_.front())) waiting_moves_.pop_front();
  if (!waiting_moves_.empty()) return;
  while (!waiting_puts_.empty() && PlaceWrite(waiting_puts_.front())) waiting_puts_.pop_front();
}

// The block was erased or replaced since the operation began: a copy with a later sequence would outlive the erasure.
bool DiskStore::IsGone(uint32_t index) {
  const Op& op = ops_[index];
  if (!op.is_move()) return op.cancelled;
  const Entry* entry = table_.Find(op.id.key);
  return entry == nullptr || entry->record != op.source;
}

// True when the operation no longer waits: its write is on its way, or it has failed.
bool DiskStore::PlaceWrite(uint32_t index) {
  const bool move = ops_[index].is_move();
  const auto fail = [&](Reason reason) {
    if (move) {
      EndMove(index, /*drop=*/reason == Reason::kFull);
    } else {
      FailPut(index, reason);
    }
    return true;
  };
  if (env_.health.state() != TierState::kOk) return fail(Reason::kOff);
  if (IsGone(index)) return fail(Reason::kNone);
  const uint64_t bytes = BlockBytesFor(ops_[index].payload_bytes);
  bool never = false;
  Segment* segment = log_.SegmentFor(bytes, move ? 0 : reclaimer_.bytes_to_place(), move, &never);
  if (segment == nullptr) return never && fail(Reason::kFull);
  Op& op = ops_[index];
  BlockPlace place = log_.NextPlace(*segment);
  place.expires_at_s = op.expires_at_s;
  place.priority = op.options.priority;
  place.pinned = op.options.pinned;
  place.transient = op.options.transient;
  const std::span<std::byte> staged = ops_.Staged(op);
  op.record =
      std::make_shared<const BlockRecord>(EncodeBlock(op.id, place, op.payload_bytes, staged));
  op.segment = segment;
  op.placed = true;
  op.error = 0;
  ++op.outstanding;
  if (move) reclaimer_.MovePlaced(bytes);
  log_.Append(segment, *op.record, staged, index);
  return true;
}

void DiskStore::OnNoSegment() {
  while (!waiting_puts_.empty()) {
    const uint32_t index = waiting_puts_.front();
    waiting_puts_.pop_front();
    FailPut(index, Reason::kIoError);
  }
  while (!waiting_moves_.empty()) {
    const uint32_t index = waiting_moves_.front();
    waiting_moves_.pop_front();
    EndMove(index, /*drop=*/false);
  }
}

// ---- written, synced ----

void DiskStore::OnWritten(uint32_t index) {
  Op& op = ops_[index];
  Segment* segment = op.segment;
  if (op.error == 0 && !segment->broken) {
    env_.Passed("put.written");
    if (!op.record->transient) return log_.Written(segment, index);
    env_.health.Success();  // nobody asks for it after a crash
    return op.cancelled ? FailPut(index, Reason::kNone) : Publish(index);
  }
  if (op.error != 0) {
    log_.NoteWriteError(op.error);
    log_.Break(segment, op.error);
  }
  FailPut(index, Reason::kIoError);
}

void DiskStore::OnSynced(std::span<const uint32_t> operations) {
  std::vector<Committer::Write> writes;
  for (uint32_t index : operations) {
    const Op& op = ops_[index];
    // Also where the key's newer block is about to replace it: the old place is as good as dead, so the copy is too.
    if (IsGone(index) || (op.is_move() && committer_.IsCommitting(op.id.key))) {
      FailPut(index, Reason::kNone);
      continue;
    }
    if (op.is_move()) table_.Find(op.id.key)->moving = true;
    writes.push_back({index, op.id.key, op.record.get(), op.segment, op.is_move()});
  }
  if (!writes.empty()) committer_.CommitBlocks(writes);
}

void DiskStore::OnCommitFailed(uint32_t operation) {
  const BlockKey key = ops_[operation].id.key;
  FailPut(operation, Reason::kIoError);
  committer_.SaveLater(key);
}

void DiskStore::Unplace(Op* op) {
  if (!op->placed) return;
  op->placed = false;
  if (op->is_move()) reclaimer_.MoveSettled(op->record->block_bytes());
  log_.Settle(op->segment);
}

// ---- done ----

// Durable, or as good as it gets: from now on it is found.
void DiskStore::Publish(uint32_t index) {
  Op& op = ops_[index];
  Unplace(&op);
  if (!IsGone(index)) {
    const Entry* old = table_.Find(op.id.key);
    Entry entry = old == nullptr ? Entry() : *old;
    entry.order = EvictionOrder::kNone;
    entry.record = op.record;
    entry.moving = entry.save_later = false;
    if (!op.is_move()) {
      entry.priority = op.options.priority;
      entry.expires_at_s = op.expires_at_s;
      entry.last_use = table_.NextUse();
      entry.pinned = op.options.pinned;
      entry.in_use |= op.options.in_use;
    }
    Entry* published = table_.Set(op.id.key, std::move(entry));
    // Pin, priority or expiry changed while the block moved, or a pin was not honoured: the batch had the old ones.
    if (published->pinned != op.record->pinned || published->priority != op.record->priority ||
        published->expires_at_s != op.record->expires_at_s) {
      committer_.Save(op.id.key, published);
    }
  }
  if (op.is_move()) {
    ++env_.stats.moved_blocks;
    env_.Passed("reclaim.moved");
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
  if (op.is_move()) {
    if (op.outstanding == 0) EndMove(index, /*drop=*/false);
    return;
  }
  const auto it = putting_.find(op.id.key);
  if (it != putting_.end() && it->second == index) putting_.erase(it);
  Answer(&op, reason);
  if (op.outstanding == 0) FreeOp(index);
}

// ---- moves ----

bool DiskStore::StartMove(const BlockKey& key, const Entry& entry, Segment* victim) {
  const uint32_t index = ops_.New(Op::Kind::kMove, 0, {});
  Op& op = ops_[index];
  op.id.key = key;
  op.reading = true;
  op.record = op.source = entry.record;
  op.payload_bytes = entry.record->payload_bytes;
  op.options = {
      .priority = entry.priority, .pinned = entry.pinned, .transient = entry.record->transient};
  op.expires_at_s = entry.expires_at_s;
  op.deadline_ns = env_.WriteDeadline();
  op.segment = victim;
  log_.Hold(victim);
  if (StartRead(index)) return true;
  FreeOp(index);
  return false;
}

// With `drop`, the block could not be moved and goes, unless it is pinned and still where it was.
void DiskStore::EndMove(uint32_t index, bool drop) {
  Op& op = ops_[index];
  Unplace(&op);
  const bool unsound = op.reading;  // it could not even be read
  Entry* entry = table_.Find(op.id.key);
  if (entry != nullptr && entry->record == op.source) {
    entry->moving = false;
    if (drop && (unsound || !entry->pinned)) {
      if (!unsound) ++env_.stats.evicted_blocks;
      committer_.Discard(op.id.key);
    } else {
      if (entry->order == EvictionOrder::kNone) table_.EnterOrder(op.id.key, entry);  // it stays
      committer_.SaveLater(op.id.key);
    }
  }
  if (!op.late) reclaimer_.EndMove();
  FreeOp(index);
}

}  // namespace winnow::storage
