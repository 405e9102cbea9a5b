// Tells the durable index: batches of changes, their answers, and the repairs after a batch that failed.
//
// Order        A batch with a block's new place is the last word about its key until it is answered: changes of priority,
//              pin and expiry wait behind it (Save), because with the old place they would take the new one back.
// Doubt        A batch that failed may be in the index all the same, now or after a restart. Each of its keys is told
//              again, with the next batch or by itself a second later, until that succeeds; until then no segment that the
//              index may point to is deleted.
// Errors       A failed or late batch fails its Puts and Erases and counts against the tier; nothing else.
// Threads      One at a time, the store's. Batches are written on the IndexWriter's thread, whose answers Poll hands out.
#ifndef WINNOW_STORAGE_COMMITTER_H_
#define WINNOW_STORAGE_COMMITTER_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "storage/block_store.h"
#include "storage/disk_environment.h"
#include "storage/entry_table.h"
#include "storage/index.h"
#include "storage/segment_log.h"

namespace winnow::storage {

class Committer {
 public:
  // Hears the outcome of batches. Called from Poll and AnswerLate.
  class Listener {
   public:
    virtual void OnCommitted(uint32_t operation) = 0;
    virtual void OnCommitFailed(uint32_t operation) = 0;
    // Its deadline has passed; one of the two above follows.
    virtual void OnCommitLate(uint32_t operation) = 0;
    virtual void OnErased(uint64_t tag, Reason reason) = 0;

   protected:
    ~Listener() = default;
  };

  // A block whose bytes are durable, and that the index is to point to.
  struct Write {
    uint32_t operation = 0;
    BlockKey key;
    const BlockRecord* record = nullptr;  // of this call only
    Segment* segment = nullptr;           // held until the answer
    bool move = false;                    // the block is known, and only its place is new
  };

  // All four outlive the committer.
  Committer(DiskEnvironment& env, SegmentLog& log, EntryTable& table, Listener& listener)
      : env_(env), log_(log), table_(table), listener_(listener) {}
  Committer(const Committer&) = delete;
  Committer& operator=(const Committer&) = delete;

  // Before anything else.
  void Start(std::unique_ptr<IndexWriter> writer) { writer_ = std::move(writer); }
  bool started() const { return writer_ != nullptr; }

  // One batch for all of them.
  void CommitBlocks(const std::vector<Write>& writes);
  // Erases the key in the index and, durably, in the list of erased blocks, whether the store knows the block or not.
  // `reason`: the answer when that has succeeded.
  void Erase(uint64_t tag, const BlockKey& key, Reason reason);
  // The block is not to be found any more. Where the index has to be told, the key is appended to `erased`, for Forget.
  void Remove(const BlockKey& key, std::vector<BlockKey>* erased);
  // Erases these in the index; nobody waits for it.
  void Forget(std::vector<BlockKey> keys);
  // Remove and Forget.
  void Discard(const BlockKey& key);
  // Writes the entry's priority, pin and expiry; nobody waits for it.
  void Save(const BlockKey& key, Entry* entry);
  // Writes what waited for a batch that failed.
  void SaveLater(const BlockKey& key);
  // Writes the store's own record.
  void SaveMeta() { Submit({}, {}); }

  // Whether the index is being told of a newer block of this key, which was not cancelled since.
  bool IsCommitting(const BlockKey& key) const { return committing_.contains(key); }
  // The block that is being committed was erased meanwhile.
  void Cancel(const BlockKey& key) { committing_.erase(key); }
  bool InDoubt(const BlockKey& key) const { return doubts_.contains(key); }

  // Hands out answers. Wait: until there is one, for at most `max`.
  void Poll();
  void Wait(std::chrono::nanoseconds max) { writer_->Wait(max); }
  size_t in_flight() const { return writer_->in_flight(); }
  // Tells those whose batch is late.
  void AnswerLate();
  // Clears up doubts where no other batch comes by that could do it.
  void RepairIfDue();

  // False: the index did not close in time; it must then never be freed.
  bool Close(std::chrono::nanoseconds max) { return writer_ == nullptr || writer_->Close(max); }
  std::unique_ptr<IndexWriter> TakeWriter() { return std::move(writer_); }

 private:
  struct Commit {
    struct Put {
      uint32_t operation = 0;
      BlockKey key;
      Segment* segment = nullptr;
      bool move = false;
    };
    int64_t deadline_ns = 0;
    bool late = false;  // counted as an error
    std::vector<Put> puts;
    std::vector<std::pair<uint64_t, Reason>> erases;  // tags, and their answers
    std::vector<BlockKey> repairs;
  };
  struct Doubt {
    std::vector<Segment*> segments;  // that the index may point to; counted in their `doubts`
    uint64_t repair = 0;             // the batch that clears it up; 0: none yet
  };

  void Submit(IndexBatch batch, Commit commit);
  void OnResult(const IndexResult& result);
  void AddDoubt(const Commit::Put& put);
  void AddRepairs(IndexBatch* batch, Commit* commit);
  void EndRepairs(const Commit& commit, uint64_t tag, bool ok);

  DiskEnvironment& env_;
  SegmentLog& log_;
  EntryTable& table_;
  Listener& listener_;
  std::unique_ptr<IndexWriter> writer_;
  std::map<uint64_t, Commit> commits_;  // by batch
  absl::flat_hash_set<BlockKey> committing_;
  absl::flat_hash_map<BlockKey, Doubt> doubts_;
  int64_t repair_at_ns_ = 0;  // not before
  uint64_t next_commit_ = 1;
  std::vector<IndexResult> results_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_COMMITTER_H_
