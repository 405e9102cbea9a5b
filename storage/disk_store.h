// The disk tier: blocks in append-only segment files, found through an index that is in memory and, durably, in RocksDB.
// README.md has the byte layout and the state that each crash point leaves behind.
//
// DiskStore takes callers' operations and carries each through its stages. The rest is done by its parts, each of which
// can be read, and is tested, alone:
//
//   SegmentLog   the files: places, syncs, sealing, deletion
//   EntryTable   the blocks that are there, and the order in which they leave
//   Committer    tells the durable index, and repairs it after a failure
//   Reclaimer    which blocks leave a full store, and which move
//   Recovery     opening, after whatever has happened
//
// A Put is done when its payload is written, the segment synced and the index batch synced, in that order, so the index
// never points at bytes that a power cut can take. Many Puts share one sync. A transient one is done when it is written: it
// has neither sync nor entry, and a crash leaves dead bytes of it.
// Bytes are bounded: when the next segment would not fit, the Reclaimer empties one, and its file is deleted.
//
// One process owns a directory (flock). One thread at a time uses the object and all its parts; it may be opened on one
// thread and used on another. Threads of its own, which touch no state of the store: the IndexWriter's, the FileCloser's and
// those of the I/O engine.
#ifndef WINNOW_STORAGE_DISK_STORE_H_
#define WINNOW_STORAGE_DISK_STORE_H_

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "storage/block_store.h"
#include "storage/clock.h"
#include "storage/committer.h"
#include "storage/disk_environment.h"
#include "storage/disk_operation.h"
#include "storage/disk_options.h"
#include "storage/entry_table.h"
#include "storage/eviction_order.h"
#include "storage/reclaimer.h"
#include "storage/recovery.h"
#include "storage/segment_log.h"
#include "storage/store_directory.h"
#include "storage/waiting_reader.h"

namespace winnow::storage {

// Findings of VerifyAll: every live block read and checked.
struct VerifyReport {
  uint64_t blocks = 0;
  uint64_t bytes = 0;  // payload
  uint64_t corrupt_blocks = 0;
  uint64_t unreadable_blocks = 0;
  uint64_t unchecked_blocks = 0;  // in segments whose reads do not come back
  uint64_t removed_blocks = 0;    // with repair
};

struct GcReport {
  uint64_t expired_blocks = 0;
  uint64_t freed_bytes = 0;
};

class DiskStore final : public BlockStore,
                        private SegmentLog::Listener,
                        private Committer::Listener,
                        private Reclaimer::Host {
 public:
  // Opens or creates the store. Damage never fails an open: a damaged index is put aside and
  // rebuilt from the segments, unsound files are dropped. FailedPrecondition: another process owns
  // the directory; io_uring was demanded and is refused. InvalidArgument: options.
  // PermissionDenied: `strict`, and others may write the directory. ResourceExhausted: no room to begin.
  // DeadlineExceeded: the disk hangs (open_stall_ns). Others: the directory cannot be used at all.
  //
  // Opening happens on a thread of its own, since no system call on a hung disk can be taken back.
  // After DeadlineExceeded that thread waits on, holds the directory's lock until the disk answers,
  // and then cleans up; `clock` and the seams must outlive it, `log` is not called any more.
  // Otherwise `clock` outlives the store.
  static absl::StatusOr<std::unique_ptr<DiskStore>> Open(DiskStoreOptions options,
                                                         const Clock* clock);
  // Finishes operations in flight and seals the open segment; then the ring, then the index are
  // closed: each for at most close_limit_ns. What the kernel has not given back by then (buffers,
  // files, the lock) is left to it and never freed. On the thread that used the store, unless it is
  // idle.
  ~DiskStore() override;

  void Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
           const PutOptions& options) override;
  void Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
           int64_t deadline_ns) override;
  void GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                std::span<std::byte> into, int64_t deadline_ns) override;
  void Erase(uint64_t tag, const BlockKey& key) override;
  void Poll(std::chrono::nanoseconds wait, std::vector<Completion>* completions) override;
  std::optional<BlockInfo> Find(const BlockId& id) const override;
  bool Contains(const BlockKey& key) const override;
  void ForEach(const Visit& visit) const override;
  std::vector<BlockKey> AsidesOf(const std::array<uint8_t, 32>& chain) const override;
  uint64_t TenantBytes(const std::array<uint8_t, 32>& tenant) const override;
  bool SetPinned(const BlockKey& key, bool pinned) override;
  void Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) override;
  void SetInUse(const BlockKey& key, bool in_use) override;
  size_t in_flight() const override { return in_flight_ + done_.size(); }
  StoreStats stats() const override;
  TierState state() const override { return env_.health.state(); }

  const RecoveryReport& recovery() const { return recovery_; }
  std::string io_backend() const { return env_.ring().engine().name(); }  // "uring", "threads"
  std::string Describe() const;                                           // one line for the log
  const Ring::Counters& io_counters() const { return env_.ring().counters(); }
  size_t payload_bytes_max() const { return payload_bytes_max_; }
  size_t segments() const { return log_.segments().size(); }
  // Also nothing in flight inside: no sealing, no compaction. For tests and maintenance.
  bool idle() const override;

  // ---- maintenance: these wait for the disk, so not in a step loop ----

  // Reads and checks every block; with `repair`, forgets those that are not sound.
  VerifyReport VerifyAll(bool repair);
  // Drops expired blocks, and deletes or compacts segments until no sealed one is less than
  // `live_min` live.
  GcReport CollectGarbage(double live_min = 0.5);

 private:
  using Op = DiskOperation;
  struct Opening;  // between Open and the thread that opens
  struct Remains;  // what a hung disk keeps when the store goes

  DiskStore(DiskStoreOptions options, const Clock* clock, std::shared_ptr<Opening> opening);

  // ---- opening and closing ----
  absl::Status Start();
  absl::Status StartRing();
  void Shrink();
  void Settle(std::chrono::nanoseconds max);

  // ---- operations and their answers ----
  void Complete(uint64_t tag, Operation operation, Reason reason);
  void Answer(Op* op, Reason reason);
  void CountLatency(const Op& op);
  void FreeOp(uint32_t index);
  uint64_t ExpirySeconds(uint32_t ttl_s) const;  // in the store's time; 0: never
  void RaisePut(Op& op, uint8_t priority, uint32_t ttl_s);
  bool Expired(const Entry& entry) const;
  BlockInfo InfoOf(const Entry& entry) const;
  Entry* FindSound(const BlockId& id, Reason* reason);
  bool RefreshStored(const BlockId& id, size_t payload_bytes, const PutOptions& options);
  bool JoinPut(uint64_t tag, const BlockId& id, size_t payload_bytes, const PutOptions& options);

  // ---- reads ----
  void StartGet(Op::Kind kind, uint64_t tag, const BlockId& id, std::span<std::byte> into,
                std::span<const uint32_t> pages, int64_t deadline_ns);
  bool StartRead(uint32_t index);
  void StartReads();
  bool VerifyRead(const Op& op) const;
  void OnRead(uint32_t index);

  // ---- writes: Puts, and the second half of moves ----
  void PlaceWrites();
  bool PlaceWrite(uint32_t index);
  bool IsGone(uint32_t index);
  void OnWritten(uint32_t index);
  void Unplace(Op* op);
  void Publish(uint32_t index);
  void FailPut(uint32_t index, Reason reason);
  void EndMove(uint32_t index, bool drop);

  // ---- answers of the parts ----
  void OnSynced(std::span<const uint32_t> operations) override;
  void OnLost(uint32_t operation) override { FailPut(operation, Reason::kIoError); }
  void OnNoSegment() override;
  bool MakeRoom() override { return reclaimer_.Start(); }
  void OnCommitted(uint32_t operation) override { Publish(operation); }
  void OnCommitFailed(uint32_t operation) override;
  void OnCommitLate(uint32_t operation) override { Answer(&ops_[operation], Reason::kLate); }
  void OnErased(uint64_t tag, Reason reason) override;
  bool StartMove(const BlockKey& key, const Entry& entry, Segment* victim) override;

  // ---- the loop ----
  void OnIo(const IoResult& result);
  void OnOpIo(uint32_t index, const IoResult& result);
  void OnLateIo(uint32_t index, bool write);
  void PollRing(std::chrono::nanoseconds wait);
  void Pump();
  void NoteState();

  DiskEnvironment env_;
  EvictionOrder order_;  // of the table's blocks, but for those whose move is being arranged
  SegmentLog log_;
  EntryTable table_;
  Committer committer_;
  Reclaimer reclaimer_;
  WaitingReader reader_;
  DiskOperations ops_;
  StoreDirectory directory_;
  std::string io_fallback_;
  size_t payload_bytes_max_ = 0;
  RecoveryReport recovery_;

  std::deque<uint32_t> waiting_reads_;  // for buffers
  std::deque<uint32_t> waiting_puts_;   // for a place
  std::deque<uint32_t> waiting_moves_;  // for a place
  absl::flat_hash_map<BlockKey, uint32_t> putting_;
  std::vector<Completion> done_;
  size_t in_flight_ = 0;
  TierState known_state_ = TierState::kOk;
  std::vector<IoResult> io_results_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_DISK_STORE_H_
