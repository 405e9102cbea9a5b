// Prefixes that tenants have given names: which blocks they are, whether they are pinned, and until when.
//
// A name owns no KV. Its blocks are found by their chains, in fast memory or in the store, like those of any prompt; the
// table keeps them there. A pin holds in the store until it is taken back (at most half of the store: the store says no
// beyond that) and lets blocks leave fast memory last; it is made by Sweep, bit by bit, because the store has a block
// only when it was saved. A name that expires takes its pin with it, and its KV ages like any other.
//
// Engine thread only.
#ifndef WINNOW_ENGINE_SCHEDULE_PREFIX_TABLE_H_
#define WINNOW_ENGINE_SCHEDULE_PREFIX_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/kv/block_name.h"

namespace winnow::engine {

class BlockPool;
class KvMemory;

// A name as it is written down beside the store.
struct SavedPrefix {
  std::string tenant, name;
  Digest salt = {};    // of its blocks
  int32_t tokens = 0;  // of whole blocks
  std::shared_ptr<const std::vector<Digest>> blocks;
  bool pinned = false;
  std::optional<Duration> left;  // of its time; none: for good
};

// The answer of Describe. Counts of blocks are of the last sweep.
struct PrefixInfo {
  std::string name;
  int32_t tokens = 0;
  int32_t blocks = 0;
  int32_t fast_blocks = 0;    // in fast memory
  int32_t stored_blocks = 0;  // in the store
  int32_t pinned_blocks = 0;  // of those, pinned there
  bool pinned = false;
  bool swept = false;  // since it was made or changed: the counts say something
  std::optional<Duration> left;
};

class PrefixTable {
 public:
  static constexpr size_t kMaxPerTenant = 256;
  static constexpr size_t kMaxNames = 4096;              // of all tenants
  static constexpr size_t kMaxBlocks = size_t{1} << 20;  // of all names together: 32 MiB

  // All outlive the table. `memory` may be null: nothing can be named then.
  PrefixTable(KvMemory* memory, BlockPool& pool, int32_t block_tokens, const Clock& clock)
      : memory_(memory), pool_(pool), block_tokens_(block_tokens), clock_(clock) {}

  // Names the prompt's whole blocks, in place of what had the name. `ttl`: none is for good. `salt`: of the requests
  // that computed them; unset: the tenant's own.
  // InvalidArgument: not one whole block. ResourceExhausted: too many names. FailedPrecondition: no prefix cache.
  absl::StatusOr<PrefixInfo> Put(const std::string& tenant, const std::string& name,
                                 std::span<const int32_t> tokens, bool pinned,
                                 std::optional<Duration> ttl,
                                 std::optional<Digest> salt = std::nullopt);
  // A tenant's names in alphabetical order.
  std::vector<PrefixInfo> List(const std::string& tenant);
  // Changes what is given; a `ttl` counts from now, zero is for good. NotFound.
  absl::StatusOr<PrefixInfo> Change(const std::string& tenant, const std::string& name,
                                    std::optional<bool> pinned, std::optional<Duration> ttl);
  // Forgets the name and its KV, but for blocks that other names have, of the tenant or of whom it shares KV with. What
  // runs with it goes on.
  // NotFound.
  absl::Status Delete(const std::string& tenant, const std::string& name);

  // Everything, for a file, and back from it. Restore first, once: pins of the store that no name has are given free.
  std::vector<SavedPrefix> Save();
  void Restore(std::vector<SavedPrefix> saved);

  // Of one step: drops what has expired, and looks at `blocks` blocks in turn.
  void Sweep(size_t blocks);

  size_t size() const { return prefixes_.size(); }
  size_t pinned() const;
  // Model and settings that the blocks are of. REQUIRES: memory.
  const Digest& model() const;
  bool has_memory() const { return memory_ != nullptr; }

 private:
  struct Prefix {
    Digest salt = {};
    int32_t tokens = 0;
    std::shared_ptr<const std::vector<Digest>> blocks;  // shared with what Save gave
    bool pinned = false;
    std::optional<TimePoint> expires;
    PrefixInfo counts;
  };
  using Key = std::pair<std::string, std::string>;  // tenant, name
  using Prefixes = std::map<Key, Prefix>;

  PrefixInfo Describe(const Key& key, const Prefix& prefix) const;
  void DropExpired();
  // Takes the name away, and its pins where no other name has them.
  void Remove(Prefixes::iterator at);
  void Unpin(const Key& key, const Prefix& prefix);
  void StartSweep();
  void Look(Prefix& prefix, int32_t block);
  void EraseAgain(size_t most);

  KvMemory* const memory_;
  BlockPool& pool_;
  const int32_t block_tokens_;
  const Clock& clock_;
  Prefixes prefixes_;
  size_t blocks_ = 0;  // of all
  // The sweep: where it is, and when the next begins.
  std::optional<Key> at_;
  int32_t at_block_ = 0;
  PrefixInfo counting_;
  TimePoint next_sweep_{}, next_expiry_{};
  // Blocks that were deleted, and how often they are still to be looked for: a save may have been under way.
  struct Erased {
    BlockName name;
    int32_t looks = 0;
    TimePoint next{};
  };
  std::deque<Erased> erased_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_PREFIX_TABLE_H_
