// Which blocks leave a full DiskStore, and which move so that a file can go.
//
// Room comes back a file at a time. The victim is the sealed segment with the most bytes that are dead or cold
// (eviction_order.h defines both). Its cold blocks are dropped, the rest moves to the open segment: at most half a segment
// of it, so that each round frees at least half a file and writes are amplified by at most two.
//
// A block in use is never cold and always moves, as long as that frees a sixteenth of a file: where every segment is in
// use by more than half, the victim's other blocks leave, and a block in use is copied rather than lost. Only where there
// is not even that, blocks in use leave, too, in their turn.
//
// Tried on paper and not taken: holes punched for single blocks (lengths and extents of files then depend on the file
// system, and used bytes could not be told exactly).
//
// Cost         Start and Advance deal with a few dozen blocks at a time, whatever the store holds.
// Threads      One at a time, the store's.
#ifndef WINNOW_STORAGE_RECLAIMER_H_
#define WINNOW_STORAGE_RECLAIMER_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "storage/committer.h"
#include "storage/disk_environment.h"
#include "storage/entry_table.h"
#include "storage/eviction_order.h"
#include "storage/segment_log.h"

namespace winnow::storage {

class Reclaimer {
 public:
  // Carries moves out.
  class Host {
   public:
    // Begins to move the block out of the victim. False: no buffer is free; it is asked again. True: EndMove follows.
    virtual bool StartMove(const BlockKey& key, const Entry& entry, Segment* victim) = 0;

   protected:
    ~Host() = default;
  };

  // All five outlive the reclaimer.
  Reclaimer(DiskEnvironment& env, SegmentLog& log, EntryTable& table, Committer& committer,
            EvictionOrder& order, Host& host)
      : env_(env), log_(log), table_(table), committer_(committer), order_(order), host_(host) {}
  Reclaimer(const Reclaimer&) = delete;
  Reclaimer& operator=(const Reclaimer&) = delete;

  // Makes room for a segment. True: it is on its way (a victim is being emptied, or a file is about to be deleted). False:
  // all that is sealed is pinned, or there is nothing.
  bool Start();
  // Empties this sealed segment: all its blocks move. False: another one is being emptied.
  bool Empty(Segment* segment);
  // Moves the work along.
  void Advance();

  // A move has its place, of so many bytes; and is done with it, for better or worse.
  void MovePlaced(uint64_t bytes) { placed_bytes_ += bytes; }
  void MoveSettled(uint64_t bytes) { placed_bytes_ -= bytes; }
  // A move is over, or is so late that its victim does not wait for it.
  void EndMove() { --moves_; }
  // Room that the victim's blocks still need; Puts leave it free, because there may be no other.
  uint64_t bytes_to_place() const;

  bool idle() const { return moves_ == 0 && !choosing_ && keys_.empty(); }

 private:
  void EmptyVictim();
  void StartMoves();
  void LeaveVictim();

  DiskEnvironment& env_;
  SegmentLog& log_;
  EntryTable& table_;
  Committer& committer_;
  EvictionOrder& order_;
  Host& host_;
  Segment* victim_ = nullptr;  // is being emptied
  bool choosing_ = false;      // which of its blocks stay
  std::deque<BlockKey> keys_;  // of its blocks that stay, not yet started
  size_t moves_ = 0;           // started, and not over or late
  uint64_t placed_bytes_ = 0;  // of moves that have a place and are not done
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_RECLAIMER_H_
