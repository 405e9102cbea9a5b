// The prefix cache's contents, told as they change, for routers that send a request to the server that
// has its prefix.
//
// The engine records three events of a block's dense KV: stored in a tier, removed from it, and
// everything cleared. A Step's events are one batch, and batches have consecutive numbers from 0;
// batch 0 is a clear, so that whoever knew an earlier process forgets what that one had. The latest
// batches are kept, bounded by number and by events; a reader that needs older ones takes a
// snapshot of what is stored now and goes on behind it.
//
// Tiers: kFast says that a sequence which begins so takes the block over without asking the store
// (its KV may have been moved below meanwhile, from where steps read it); kHost and kDisk that the
// store has a copy, which outlives the block's place. A block that is stored twice in a tier is
// told once.
//
// Threads: the engine thread records (Stored to Commit); any thread reads. The lock between them is
// held to append a batch, to copy pointers to a reader and, for a snapshot, to copy one pointer for
// each stored block: nobody who reads slowly holds the engine up, and what such a reader misses is
// dropped.
#ifndef WINNOW_ENGINE_KV_KV_EVENT_LOG_H_
#define WINNOW_ENGINE_KV_KV_EVENT_LOG_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "engine/base/mutex.h"
#include "engine/kv/block_name.h"

namespace winnow::engine {

enum class KvTier : uint8_t { kFast, kHost, kDisk };
inline constexpr size_t kKvTiers = 3;

// A full block of a sequence that attended densely.
struct KvBlockContent {
  BlockName name;
  std::optional<Digest> parent;  // absent: the first block
  std::vector<int32_t> tokens;   // block_tokens of them
};

struct KvEvent {
  enum class Kind : uint8_t { kStored, kRemoved, kCleared };
  Kind kind = Kind::kCleared;
  KvTier tier = KvTier::kFast;
  std::shared_ptr<const KvBlockContent> block;  // null: kCleared
};

struct KvEventBatch {
  uint64_t sequence = 0;
  double unix_seconds = 0;
  std::vector<KvEvent> events;
};

class KvEventLog {
 public:
  struct Options {
    size_t max_batches = 10'000;
    size_t max_events = 200'000;  // of all batches kept; a block's event takes about 400 bytes
    std::function<double()> unix_seconds;  // the wall clock. REQUIRES: set
  };
  explicit KvEventLog(Options options);

  // ---- the engine thread ----

  void Stored(KvTier tier, const BlockName& name, const std::optional<Digest>& parent,
              std::span<const int32_t> tokens);
  // A copy of a block that is stored in some tier. Of a block that is in none nothing is known, and
  // nothing is told.
  void Copied(KvTier tier, const Digest& name);
  void Removed(KvTier tier, const Digest& name);  // one that is not stored there: nothing
  void Cleared();
  // Makes a batch of all that was recorded since the last call, if there is anything.
  void Commit();
  // The block of the tier that was looked at longest ago, which counts as looked at now; null: the
  // tier is empty.
  std::shared_ptr<const KvBlockContent> NextOf(KvTier tier);
  size_t size(KvTier tier) const { return by_tier_[static_cast<size_t>(tier)].size(); }

  // ---- any thread ----

  // Numbers of the batches that are kept: [first, next).
  struct Range {
    uint64_t first = 0, next = 0;
  };
  Range range() const;
  // Up to `most` batches from number `from` on; none: there is no later one yet. Nullopt: `from` is
  // not kept any more, or was never given (a process that began anew).
  std::optional<std::vector<std::shared_ptr<const KvEventBatch>>> Read(uint64_t from,
                                                                       size_t most) const;
  // The stored blocks, each tier's copy by itself, parents before children, as it is after all batches
  // before `next`.
  struct Snapshot {
    uint64_t next = 0;
    std::vector<KvEvent> stored;
  };
  Snapshot Take() const;
  // Waits until batch `from` is there, or until `timeout` has passed, or until Wake.
  void WaitFor(uint64_t from, std::chrono::nanoseconds timeout) const;
  void Wake() const;

 private:
  // One block, in the tiers that `place` is set for.
  struct Live {
    std::shared_ptr<const KvBlockContent> block;
    std::array<std::optional<std::list<Digest>::iterator>, kKvTiers> place = {};
  };
  void Tell(KvEvent::Kind kind, KvTier tier, std::shared_ptr<const KvBlockContent> block);

  const Options options_;

  // The engine thread's; by_tier_ in the order of looking.
  std::array<std::list<Digest>, kKvTiers> by_tier_;
  absl::flat_hash_map<Digest, Live> live_;
  std::vector<KvEvent> pending_;

  mutable Mutex mutex_;
  mutable CondVar changed_;
  mutable uint64_t wakes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::shared_ptr<const KvEventBatch>> kept_ ABSL_GUARDED_BY(mutex_);
  size_t kept_events_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  // The state after batch next_ - 1, by tier, for snapshots.
  std::array<absl::flat_hash_map<Digest, std::shared_ptr<const KvBlockContent>>, kKvTiers> stored_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_EVENT_LOG_H_
