// The segment files of a DiskStore: where the next block goes, one sync for many, and each file's life from its creation
// to its deletion. It knows bytes, counts and operations' numbers, but no block's key and no index.
//
// Life cycle   Start, or Add for each file that is found there, before anything is appended. A file is created when a
//              block fits no other, sealed when it is full, cut to its length, and deleted when nothing in it is alive.
// Bytes        used_bytes() is always the sum of the files' lengths. One segment's room is kept for blocks that move, so
//              that emptying a victim never waits for the room that it makes.
// Errors       A failed write or sync breaks its segment: no more writes, no more syncs. ENOSPC keeps the log from growing
//              until a segment could be made again.
// Ownership    Owns the segments, their files and the directory's. Hands out pointers that hold until Delete.
// Threads      One at a time, the store's. Deleted files are closed on a thread of FileCloser's.
#ifndef WINNOW_STORAGE_SEGMENT_LOG_H_
#define WINNOW_STORAGE_SEGMENT_LOG_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "storage/block_store.h"
#include "storage/disk_environment.h"
#include "storage/eviction_order.h"
#include "storage/file_closer.h"
#include "storage/file_system.h"
#include "storage/format.h"
#include "storage/ring.h"
#include "storage/segment.h"

namespace winnow::storage {

class SegmentLog {
 public:
  // Hears from the log. Called from within its own calls; `operation` is as it was given to Append.
  class Listener {
   public:
    // A sync has covered these writes: their blocks survive a power cut.
    virtual void OnSynced(std::span<const uint32_t> operations) = 0;
    // This block was written and never will be durable.
    virtual void OnLost(uint32_t operation) = 0;
    // No segment could be made: whoever waits for a place fails.
    virtual void OnNoSegment() = 0;
    // The next segment does not fit. True: room is on its way.
    virtual bool MakeRoom() = 0;

   protected:
    ~Listener() = default;
  };

  // All three outlive the log.
  SegmentLog(DiskEnvironment& env, EvictionOrder& order, Listener& listener);
  SegmentLog(const SegmentLog&) = delete;
  SegmentLog& operator=(const SegmentLog&) = delete;

  // ---- opening ----

  // The store's directory, which new files are synced with.
  void SetDirectory(File directory) { directory_ = std::move(directory); }
  // A file that was found. Its id, and those before it, are never used again.
  Segment* Add(std::unique_ptr<Segment> segment);
  // The next segment's id is at least this; the next block's sequence, too.
  void SkipSegments(uint64_t next_segment);
  void SkipSequences(uint64_t next_sequence);
  // While a capacity that was lowered is put into force, there may be a segment more.
  void set_shrinking(bool shrinking) { shrinking_ = shrinking; }

  // ---- appending ----

  // The segment that takes a block of `bytes` now, and `kept_bytes` more for others; nullptr: one will be ready later, or
  // `never`. `for_move`: a block that moves, for which room is kept.
  Segment* SegmentFor(uint64_t bytes, uint64_t kept_bytes, bool for_move, bool* never);
  // The place of the next block in the segment, with a sequence of its own.
  BlockPlace NextPlace(const Segment& segment);
  // Writes a block that was encoded for NextPlace. The ring answers with `operation` as the tag. The segment is held for
  // the operation (Release), and waits for it (Settle).
  void Append(Segment* segment, const BlockRecord& record, std::span<std::byte> block,
              uint32_t operation);
  // The write has succeeded; the next sync covers it.
  void Written(Segment* segment, uint32_t operation);
  // The appended block is published or has failed: its segment does not wait for it any more.
  void Settle(Segment* segment);
  // A write or sync of the segment failed, or was given up.
  void Break(Segment* segment, int error);
  void NoteWriteError(int error);

  // ---- holding ----

  void Hold(Segment* segment) { ++segment->users; }
  void Release(Segment* segment);
  void AddLive(uint64_t segment_id, uint64_t bytes);
  void RemoveLive(uint64_t segment_id, uint64_t bytes);
  // The index may point here against the store's word: the file stays.
  void AddDoubt(Segment* segment) { ++segment->doubts; }
  void RemoveDoubt(Segment* segment);
  // While a segment is emptied, and afterwards: it is looked at for deletion.
  void SetVictim(Segment* segment, bool victim);

  // ---- a segment's life ----

  // A result of the segment's own I/O.
  void OnIo(SegmentIo purpose, uint64_t segment_id, const IoResult& result);
  // One step of each segment that needs attention.
  void Advance();
  void SealOpen();
  // Deletes one file without live blocks. kSoon: one will go by itself.
  enum class Dead : uint8_t { kNone, kSoon, kDeleted };
  Dead DeleteDead();
  bool Delete(Segment* segment);
  // Gives back the room behind the last block.
  absl::Status Cut(Segment* segment);

  // ---- looking ----

  Segment* Find(uint64_t id) const;
  Segment& At(uint64_t id) const { return *segments_.at(id); }
  const std::map<uint64_t, std::unique_ptr<Segment>>& segments() const { return segments_; }
  bool has_open() const { return open_ != nullptr; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t room_bytes() const { return room_bytes_; }  // capacity, or less on a full file system
  uint64_t next_segment() const { return next_segment_; }
  uint64_t next_sequence() const { return next_sequence_; }
  uint64_t TakeSequence() { return next_sequence_++; }
  // No segment is being created, synced, sealed or deleted.
  bool idle() const;
  // Files that a hung disk keeps when the store goes.
  std::map<uint64_t, std::unique_ptr<Segment>> TakeSegments() { return std::move(segments_); }
  File TakeDirectory() { return std::move(directory_); }

 private:
  void MarkBusy(Segment* segment);
  void SubmitIo(Segment* segment, SegmentIo purpose);
  void Create();
  void Seal(Segment* segment);
  void StartSync(Segment* segment);
  void OnSynced(Segment* segment, int error);
  void Finish(Segment* segment);
  bool Advance(Segment* segment);

  DiskEnvironment& env_;
  EvictionOrder& order_;
  Listener& listener_;
  File directory_;
  std::map<uint64_t, std::unique_ptr<Segment>> segments_;
  Segment* open_ = nullptr;      // takes blocks
  Segment* creating_ = nullptr;  // will
  std::vector<Segment*> busy_;   // creating, open, sealing, or waiting for deletion
  // Sealed, without a live block, and not busy: their deletion failed, or waits for doubts.
  std::set<uint64_t> dead_;
  FileCloser closer_;  // of deleted segments' files
  uint64_t used_bytes_ = 0;
  uint64_t room_bytes_ = 0;
  bool shrinking_ = false;
  uint64_t next_segment_ = 1;
  uint64_t next_sequence_ = 1;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_SEGMENT_LOG_H_
