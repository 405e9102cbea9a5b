// BlockStore: where KV blocks live when fast memory does not hold them. The only header that code
// above a store needs; HostStore, DiskStore and TieredStore implement it and pass one suite of
// tests.
//
// A store is a cache of content-addressed blocks. Any doubt is a miss: a caller that gets kOk holds
// exactly the bytes that were put under this identity, and a caller that gets anything else
// computes them again. No call fails a request.
//
// Life cycle   Submit calls (Put, Get, GetPages, Erase) start an operation and return; Poll hands
//              out one Completion for each, in any order. Destruction drops operations in flight: the
//              buffers of operations without completion are free when the destructor returns.
// Threads      One thread at a time, and every call is short: waits (disk, RocksDB) happen
//              elsewhere. The store calls nobody back from a thread of its own.
// Ownership    Put has copied the payload when it returns. `into` of a Get belongs to the store until
//              its completion, and is written only with verified bytes, only before an outcome of
//              kOk: a late or damaged read never touches it. That is one copy per read, on purpose.
// Rows         A block's payload is cut into pages of 4 KiB, each with a checksum of its own, so that
//              a decode step reads just the pages that its rows are on. Callers group rows by page.
#ifndef WINNOW_STORAGE_BLOCK_STORE_H_
#define WINNOW_STORAGE_BLOCK_STORE_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "storage/block_id.h"

namespace winnow::storage {

enum class Operation : uint8_t { kPut, kGet, kGetPages, kErase };

enum class Outcome : uint8_t {
  kOk,    // stored (on disk: durably, unless it is transient), read and verified, or erased
  kMiss,  // Put: not stored. Get: no bytes. Erase: there was nothing, or it may come back
          // (kIoError)
};

// Why an operation missed.
enum class Reason : uint8_t {
  kNone,      // it did not
  kAbsent,    // no such block, or it has expired
  kIdentity,  // the block found belongs to another model, tenant, layer, place or length
  kCorrupt,   // a checksum did not hold, twice; the block is gone now
  kIoError,   // the device or the index failed
  kLate,      // the deadline passed first
  kOff,       // the tier is degraded (Put) or off (any)
  kBusy,      // too much in flight
  kFull,      // no room: all blocks are pinned, or this one is larger than the store takes
};
inline constexpr size_t kReasons = 9;
std::string_view ReasonName(Reason reason);

inline constexpr uint8_t kPriorityMax = 6;  // 0 is evicted first

struct PutOptions {
  uint8_t priority = 1;  // 0 to kPriorityMax
  bool pinned = false;   // never evicted, only erased or expired
  uint32_t ttl_s = 0;    // 0: no expiry
  bool in_use = false;   // as SetInUse(true)
  // For this process only: neither durable nor in any index, so that it costs less to put and to
  // erase, and the next one does not find it.
  bool transient = false;
};

struct Completion {
  uint64_t tag = 0;
  Operation operation = Operation::kGet;
  Outcome outcome = Outcome::kMiss;
  Reason reason = Reason::kNone;
  bool from_disk = false;  // Get, GetPages: a disk was asked for the bytes
};

struct BlockInfo {
  uint32_t payload_bytes = 0;
  uint8_t priority = 0;
  bool pinned = false;
  uint32_t ttl_s = 0;  // the rest of it, rounded up; 0: no expiry
  bool in_use = false;
  bool transient = false;
};

// The later of two expiries. 0: never.
template <typename Time>
constexpr Time LaterExpiry(Time a, Time b) {
  return a == 0 || b == 0 ? 0 : std::max(a, b);
}

enum class TierState : uint8_t {
  kOk,
  kDegraded,  // reads only
  kOff,       // neither
};
std::string_view TierStateName(TierState state);

// Upper bounds of StoreStats::read_latency's buckets; the last bucket has what took longer.
inline constexpr std::array<double, 16> kReadLatencyBoundsSeconds = {
    .00005, .0001, .0002, .0004, .0008, .0016, .0032, .0064,
    .0128,  .0256, .0512, .1024, .25,   .5,    1,     2.5};

// Counters since the store was made, and levels. Pulled by whoever exports metrics.
struct StoreStats {
  TierState state = TierState::kOk;
  uint64_t blocks = 0;
  uint64_t used_bytes = 0;  // host: pages taken; disk: exactly the segment files' lengths
  uint64_t capacity_bytes = 0;
  uint64_t pinned_bytes = 0;
  uint64_t puts = 0;
  uint64_t puts_stored = 0;
  uint64_t gets = 0;  // Get and GetPages
  uint64_t hits = 0;
  std::array<uint64_t, kReasons> misses = {};  // of gets, by Reason
  uint64_t payload_bytes_read = 0;             // handed to callers
  uint64_t device_bytes_read = 0;              // read from the medium for them
  uint64_t device_bytes_written = 0;
  uint64_t evicted_blocks = 0;
  uint64_t expired_blocks = 0;
  uint64_t corrupt_blocks = 0;
  uint64_t io_errors = 0;
  uint64_t moved_blocks = 0;  // by compaction, promotion or demotion
  // Reads of a disk by the time from Get or GetPages to the answer, late ones included.
  std::array<uint64_t, kReadLatencyBoundsSeconds.size() + 1> read_latency = {};
  uint64_t read_latency_ns = 0;      // sum
  uint64_t in_flight = 0;            // now: reads and writes without an answer
  std::string_view io_backend = "";  // "uring" or "threads"; "": no disk
};

class BlockStore {
 public:
  virtual ~BlockStore() = default;

  // Stores a payload. A block that is there already keeps its bytes (keys name content) and takes
  // the larger priority, the pin, the later expiry and the use; one in flight is joined. A transient one
  // that is put to stay is written again.
  // Misses: kOff, kBusy, kFull, kIoError, kLate. REQUIRES: payload not empty.
  virtual void Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
                   const PutOptions& options) = 0;

  // Reads the whole payload, whose length must be into.size().
  // `deadline_ns`: on the store's clock; 0 takes the store's default.
  // Misses: kAbsent, kIdentity, kCorrupt, kIoError, kLate, kOff, kBusy.
  virtual void Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
                   int64_t deadline_ns) = 0;

  // Reads pages of the payload, all or none; page i of `pages` to into[i * 4096]. The last page of
  // a payload is padded with zeros. Misses as Get; kIdentity also for a page past the end.
  // REQUIRES: pages ascend strictly, into.size() == pages.size() * 4096.
  virtual void GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                        std::span<std::byte> into, int64_t deadline_ns) = 0;

  // Forgets a block. A Get in flight may still be answered. Misses: kAbsent; kIoError: gone for
  // this process, but it may be found again after a restart. Of a transient block nothing is written
  // down: one that was put to stay under its key before, and was evicted, may be found again where the
  // index is lost.
  virtual void Erase(uint64_t tag, const BlockKey& key) = 0;

  // Moves work along and appends completions; waits for the first of them for at most `wait`.
  virtual void Poll(std::chrono::nanoseconds wait, std::vector<Completion>* completions) = 0;

  // Looks the block up in memory, without I/O. A block that is found may still turn out a miss.
  virtual std::optional<BlockInfo> Find(const BlockId& id) const = 0;

  // Whether there is a block under the key, whoever's it is; as Find.
  virtual bool Contains(const BlockKey& key) const = 0;

  // Every block that Find would find, once, in any order; without I/O, and in time linear in their number: for a start, not
  // for a step. `visit` must not call the store.
  using Visit = std::function<void(const BlockKey&, const BlockInfo&)>;
  virtual void ForEach(const Visit& visit) const = 0;

  // Bytes of the tenant's blocks that are here to stay, with what each takes beside its payload. Without I/O.
  virtual uint64_t TenantBytes(const std::array<uint8_t, 32>& tenant) const = 0;

  // False: no such block, or pins would take more than half of the store.
  virtual bool SetPinned(const BlockKey& key, bool pinned) = 0;

  // Gives the block the larger priority and the later expiry, as a Put of it would; also one whose Put is in flight.
  // Nothing happens if there is neither.
  virtual void Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) = 0;

  // Somebody works with the block, or nobody does any more: a block in use leaves only where nothing
  // else can make room, whatever the priorities. For this process alone: nothing is written down, and
  // after a restart no block is in use. Also of a block whose Put is in flight; where there is
  // neither, nothing happens. Counts as a use.
  virtual void SetInUse(const BlockKey& key, bool in_use) = 0;

  virtual size_t in_flight() const = 0;  // operations without completion
  virtual StoreStats stats() const = 0;
  // The same as stats().state, for callers that ask often.
  virtual TierState state() const { return stats().state; }
  // Nothing runs inside either, sealing or compaction: another thread may take the store over.
  virtual bool idle() const { return in_flight() == 0; }

  // The keys with this chain and a kind other than 0, without I/O; those whose Put is in flight may be missing.
  virtual std::vector<BlockKey> AsidesOf(const std::array<uint8_t, 32>& chain) const = 0;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_BLOCK_STORE_H_
