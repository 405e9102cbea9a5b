// The disk tier: blocks in append-only segment files, found through an index that is in memory and,
// durably, in RocksDB. README.md has the byte layout and what each crash point leaves behind.
//
// A Put is done when its payload is written, the segment synced and the index batch synced, in that
// order, so the index never points at bytes that a power cut can take. Many Puts share one sync.
// A transient one is done when it is written: it has neither sync nor entry, and what a crash leaves
// of it are dead bytes.
// Bytes are bounded: when the next segment would not fit, the coldest blocks of the segment that
// has most of them are dropped, the rest of it is moved, and its file is deleted.
//
// One process owns a directory (flock). One thread at a time uses the object; it may be opened on
// one thread and used on another.
#ifndef WINNOW_STORAGE_DISK_STORE_H_
#define WINNOW_STORAGE_DISK_STORE_H_

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/block_store.h"
#include "storage/clock.h"
#include "storage/eviction_order.h"
#include "storage/file_closer.h"
#include "storage/file_system.h"
#include "storage/format.h"
#include "storage/index.h"
#include "storage/mutex.h"
#include "storage/page_memory.h"
#include "storage/ring.h"
#include "storage/segment.h"
#include "storage/sharded_map.h"
#include "storage/tier_health.h"

namespace winnow::storage {

struct DiskStoreOptions {
  std::string directory;                        // created (0700) if missing, its parent must exist
  uint64_t capacity_bytes = uint64_t{8} << 30;  // of segment files; the index comes on top
  uint64_t segment_bytes = uint64_t{64} << 20;
  uint64_t staging_bytes = uint64_t{64} << 20;            // buffers for I/O, allocated at start
  uint32_t operations_max = 4096;                         // in flight; more are kBusy
  int64_t read_deadline_ns = int64_t{2} * 1'000'000'000;  // for Gets that bring none
  // Also how long maintenance waits for a read before it leaves that segment.
  int64_t write_deadline_ns = int64_t{30} * 1'000'000'000;
  // Real time, whatever the clock says. A disk that answers nothing for so long while it is opened
  // is given up; so are, after the second, requests in flight at destruction.
  int64_t open_stall_ns = int64_t{30} * 1'000'000'000;
  int64_t close_limit_ns = int64_t{5} * 1'000'000'000;
  TierHealthOptions health;
  IoEngineOptions io;
  std::function<void(const std::string&)> log;  // one line per event worth an operator's eye
  // The same for trouble, with directory, bytes and what follows; empty: `log` has it.
  std::function<void(const std::string&)> warn;
  // A directory that others may write, or that is another user's, is refused; otherwise it is a warning.
  bool strict = false;

  // What tests replace or watch; production leaves it alone.
  struct Seams {
    std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)> decorate_engine;
    std::function<absl::StatusOr<std::unique_ptr<IndexDb>>(const std::string&)> open_index;
    FileSystem* files = nullptr;                    // not owned
    std::function<void(const char* point)> passed;  // named points of the commit and reclaim order
    // By which a hung opening is told from a slow one; on the thread that calls Open.
    std::function<std::chrono::steady_clock::time_point()> steady_now =
        std::chrono::steady_clock::now;
  } seams;

  // InvalidArgument naming the field: capacity at least four segments; a segment 16 pages to 4 GiB,
  // in whole pages; staging at least 1 MiB; …
  absl::Status Validate() const;
};

// What opening found and did.
struct RecoveryReport {
  bool index_rebuilt = false;
  std::string quarantined;  // where a damaged index was moved to
  uint64_t blocks = 0;
  uint64_t hidden_blocks = 0;     // left out of a rebuilt index: erased, transient, or in doubt
  uint64_t dropped_entries = 0;   // index entries without a sound place
  uint64_t removed_segments = 0;  // files without a sound header or without live blocks
  uint64_t truncated_bytes = 0;
};

// What VerifyAll found: every live block read and checked.
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

class DiskStore final : public BlockStore {
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
  // Finishes what is in flight and seals the open segment; then the ring, then the index are
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
  bool SetPinned(const BlockKey& key, bool pinned) override;
  void SetInUse(const BlockKey& key, bool in_use) override;
  size_t in_flight() const override { return in_flight_ + done_.size(); }
  StoreStats stats() const override;
  TierState state() const override { return health_.state(); }

  const RecoveryReport& recovery() const { return recovery_; }
  std::string io_backend() const { return ring_->engine().name(); }  // "uring", "threads"
  std::string Describe() const;                                      // one line for the log
  const Ring::Counters& io_counters() const { return ring_->counters(); }
  size_t payload_bytes_max() const { return payload_bytes_max_; }
  size_t segments() const { return segments_.size(); }
  // Also nothing in flight inside: no sealing, no compaction. For tests and maintenance.
  bool idle() const override;

  // ---- maintenance: these wait for the disk, so not in a step loop ----

  // Reads and checks every block; with `repair`, forgets those that are not sound.
  VerifyReport VerifyAll(bool repair);
  // Drops expired blocks, and deletes or compacts segments until no sealed one is less than
  // `live_min` live.
  GcReport CollectGarbage(double live_min = 0.5);

 private:
  struct Entry {
    std::shared_ptr<const BlockRecord> record;
    uint64_t expires_at_s = 0;
    uint64_t last_use = 0;
    EvictionOrder::Handle order = EvictionOrder::kNone;  // none while its move is being arranged
    uint8_t priority = 0;
    bool pinned = false;
    bool in_use = false;
    bool moving = false;      // the index is being told of another place
    bool save_later = false;  // SaveEntry was asked meanwhile
  };

  // One operation in flight; lives in a slab, so that its index is the tag of its I/O.
  struct Op {
    enum class Kind : uint8_t { kFree, kPut, kMove, kGet, kGetPages };
    Kind kind = Kind::kFree;
    uint64_t tag = 0;
    std::vector<uint64_t> joined;  // tags of later Puts of the same block
    BlockId id;
    std::shared_ptr<const BlockRecord> record;  // read from, or written to
    std::shared_ptr<const BlockRecord> source;  // kMove: where it was
    Segment* segment = nullptr;                 // holds one of its `users`
    uint32_t payload_bytes = 0;
    PutOptions options;
    uint64_t expires_at_s = 0;
    int64_t start_ns = 0;  // of a Get
    int64_t deadline_ns = 0;
    std::optional<size_t> stage_page;
    size_t stage_pages = 0;
    std::span<std::byte> into;
    std::vector<uint32_t> pages;
    uint32_t outstanding = 0;  // buffers the kernel has
    int error = 0;
    bool late = false;
    bool reading = false;    // kMove: the first half
    bool retried = false;    // a failed checksum is read once more
    bool cancelled = false;  // erased before it was published
    bool answered = false;
    bool placed = false;      // counts in its segment's `unsynced`
    bool committing = false;  // with the index: what is written now stands behind it there
  };

  // What an index batch was for.
  struct Commit {
    int64_t deadline_ns = 0;
    bool late = false;  // counted as an error
    std::vector<uint32_t> puts;
    std::vector<std::pair<uint64_t, Reason>> erases;  // tags, and what they are answered
    std::vector<BlockKey> repairs;
  };

  // A batch that failed may be in the index, now or after a restart: nobody knows what that has under
  // the key. A later batch tells it again. Until then no place that it may have goes, or a restart
  // would find nothing where there is a block that was promised.
  struct Doubt {
    std::vector<Segment*> segments;  // of those places; counted in their `doubts`
    uint64_t repair = 0;             // the batch that tells it; 0: none yet
  };

  // Between Open and the thread that opens.
  struct Opening {
    Mutex mutex;
    CondVar changed;  // `done`
    bool done ABSL_GUARDED_BY(mutex) = false;
    bool abandoned ABSL_GUARDED_BY(mutex) = false;
    absl::Status status ABSL_GUARDED_BY(mutex);
    std::unique_ptr<DiskStore> store ABSL_GUARDED_BY(mutex);
    std::atomic<uint64_t> steps = 0;  // answers of the disk
  };
  // What a hung disk keeps when the store goes.
  struct Remains;

  DiskStore(DiskStoreOptions options, const Clock* clock, std::shared_ptr<Opening> opening);

  // ---- disk_recovery.cc ----
  using IndexEntries = std::vector<std::pair<BlockKey, std::string>>;
  absl::Status Start();
  absl::Status CheckDirectory() const;
  void CheckRoom() const;
  absl::Status Lock();
  absl::Status LoadSegments();
  absl::StatusOr<std::unique_ptr<IndexDb>> LoadIndex(IndexEntries* entries, std::string* meta);
  absl::StatusOr<std::unique_ptr<IndexDb>> OpenIndex(IndexEntries* entries, std::string* meta);
  void AddEntry(const BlockKey& key, BlockRecord record);
  void AddEntries(const IndexEntries& entries, const EraseLog& erase_log, IndexBatch* batch);
  absl::Status Rebuild(const EraseLog& erase_log, IndexDb* db);
  void ScanSegment(Segment* segment, std::vector<DecodedHeader>* found);
  bool HasFooter(const Segment& segment, FooterInfo* footer);
  void TrimSegments();
  // 0 or an errno. Waits for the disk until the deadline; 0: as long as it takes. After ETIMEDOUT
  // with segment.stuck > 0 the kernel still has `into`: it goes to stuck_reads_.
  int ReadSync(const Segment& segment, uint64_t offset, std::span<std::byte> into,
               int64_t deadline_ns = 0);

  // ---- disk_store.cc: operations, reads, the loop ----
  uint32_t NewOp(Op::Kind kind, uint64_t tag, const BlockId& id);
  void FreeOp(uint32_t index);
  void Answer(Op* op, Reason reason);
  void CountLatency(const Op& op);
  void Complete(uint64_t tag, Operation operation, Reason reason);
  const Entry* FindSound(const BlockId& id, Reason* reason);
  void StartGet(Op::Kind kind, uint64_t tag, const BlockId& id, std::span<std::byte> into,
                std::span<const uint32_t> pages, int64_t deadline_ns);
  bool StartRead(uint32_t index);
  void StartReads();
  void OnRead(uint32_t index);
  bool VerifyRead(const Op& op) const;
  PageAllocator& AllocatorOf(const Op& op) {
    return op.kind == Op::Kind::kMove ? *move_stage_ : *stage_;
  }
  bool Stage(Op* op, size_t pages);
  std::span<std::byte> Staged(const Op& op) const;
  void OnOpIo(uint32_t index, const IoResult& result);
  void OnIo(const IoResult& result);
  void Pump();
  void RemoveEntry(const BlockKey& key, IndexBatch* batch);
  void Unlive(Entry* entry);
  void Order(const BlockKey& key, Entry* entry);
  void Reorder(const Entry& entry);
  void Discard(const BlockKey& key);
  void NoteState();
  void Log(const std::string& line) const;
  void Warn(const std::string& line) const;
  void Passed(const char* point) const {
    if (options_.seams.passed) options_.seams.passed(point);
  }
  uint64_t StoreSeconds() const;
  bool Expired(const Entry& entry) const;
  int64_t WriteDeadline() const { return clock_->NowNs() + options_.write_deadline_ns; }
  FileSystem* files() { return options_.seams.files ? options_.seams.files : own_files_.get(); }

  // ---- disk_write.cc: placing, committing, segments' lives ----
  void PlaceWrites();
  bool PlaceWrite(uint32_t index);
  Segment* SegmentFor(size_t bytes, bool for_move, bool* never);
  void CreateSegment();
  void OnSegmentIo(SegmentIo purpose, uint64_t segment_id, const IoResult& result);
  void Break(Segment* segment, int error);
  void Seal(Segment* segment);
  void AdvanceSegments();
  bool Advance(Segment* segment);
  void MarkBusy(Segment* segment);
  void FailWaitingPuts(Reason reason);
  void SubmitSegmentIo(Segment* segment, SegmentIo purpose);
  void Finish(Segment* segment);
  void StartSync(Segment* segment);
  void OnSynced(Segment* segment, int error);
  void OnWritten(uint32_t index);
  void FailPut(uint32_t index, Reason reason);
  void Publish(uint32_t index);
  void Unplace(Op* op);
  void NoteWriteError(int error);

  // ---- disk_commit.cc: what the index is told ----
  void SubmitBatch(IndexBatch batch, Commit commit);
  void OnIndex(const IndexResult& result);
  void AnswerLateCommits();
  bool IsCommitting(const BlockKey& key) const;
  void SaveEntry(const BlockKey& key, Entry* entry);
  void SaveLater(const BlockKey& key);
  BlockRecord CurrentRecord(const Entry& entry) const;
  void AddDoubt(const Op& op);
  void AddRepairs(IndexBatch* batch, Commit* commit);
  void EndRepairs(const Commit& commit, uint64_t tag, bool ok);
  void RepairIndex();

  // ---- disk_reclaim.cc: which blocks leave ----
  bool StartReclaim();
  void EmptyVictim();
  void StartMoves();
  void EndMove(uint32_t index, bool drop);
  bool DeleteSegment(Segment* segment);

  const DiskStoreOptions options_;
  const Clock* clock_;
  const std::shared_ptr<Opening> opening_;
  std::unique_ptr<FileSystem> own_files_ = std::make_unique<FileSystem>();
  std::string io_fallback_;
  bool direct_ = false;
  size_t payload_bytes_max_ = 0;
  File lock_;
  File directory_;
  RecoveryReport recovery_;

  PageMemory staging_;
  std::unique_ptr<PageAllocator> stage_;
  // Compaction has buffers of its own: Puts that wait for it may hold all others.
  std::unique_ptr<PageAllocator> move_stage_;
  std::unique_ptr<Ring> ring_;
  std::unique_ptr<IndexWriter> writer_;

  ShardedMap<BlockKey, Entry> entries_;
  EvictionOrder order_;  // of entries_, but for those whose move is being arranged
  std::map<uint64_t, std::unique_ptr<Segment>> segments_;
  Segment* open_ = nullptr;         // takes blocks
  Segment* creating_ = nullptr;     // will
  Segment* victim_ = nullptr;       // is being emptied
  bool choosing_ = false;           // which of its blocks stay
  std::deque<BlockKey> move_keys_;  // of its blocks that stay, not yet started
  size_t moves_ = 0;                // started, not yet ended or late
  uint64_t moving_bytes_ = 0;       // of moves that have a place and are not done
  std::vector<Segment*> busy_;      // creating, open, sealing, or waiting for deletion
  // Sealed, without a live block, and not on that list: their deletion failed, or waits for doubts.
  std::set<uint64_t> dead_;

  std::vector<Op> ops_;
  std::vector<uint32_t> free_ops_;
  std::deque<uint32_t> waiting_reads_;  // for staging
  std::deque<uint32_t> waiting_puts_;   // for a place
  std::deque<uint32_t> waiting_moves_;  // for a place
  FileCloser closer_;                   // of deleted segments' files
  absl::flat_hash_map<BlockKey, uint32_t> putting_;
  std::map<uint64_t, Commit> commits_;
  absl::flat_hash_map<BlockKey, Doubt> doubts_;
  int64_t repair_at_ns_ = 0;  // not before
  std::vector<Completion> done_;
  size_t in_flight_ = 0;

  TierHealth health_;
  TierState known_state_ = TierState::kOk;
  StoreStats stats_;
  uint64_t used_bytes_ = 0;
  uint64_t room_bytes_ = 0;  // capacity, or less while the file system has no space
  bool shrinking_ = false;   // opening with a capacity that was lowered
  uint64_t next_segment_ = 1;
  uint64_t next_sequence_ = 1;
  uint64_t next_commit_ = 1;
  uint64_t uses_ = 0;
  uint64_t base_s_ = 0;
  int64_t base_ns_ = 0;
  std::vector<IoResult> io_results_;
  std::optional<int> sync_result_;              // of ReadSync
  std::map<uint64_t, PageMemory> stuck_reads_;  // by segment: of a ReadSync that was given up
  std::vector<IndexResult> index_results_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_DISK_STORE_H_
