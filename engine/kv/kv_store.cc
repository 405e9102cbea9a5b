#include "engine/kv/kv_store.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "engine/base/status_macros.h"
#include "fmt/format.h"
#include "storage/disk_store.h"
#include "storage/format.h"
#include "storage/host_store.h"
#include "storage/late_store.h"
#include "storage/tiered_store.h"

namespace winnow::engine {
namespace {

constexpr int64_t kSegmentBytes = int64_t{64} << 20;
constexpr int64_t kDiskBytesMin = 4 * (int64_t{1} << 20);
constexpr int64_t kHostBytesMin = int64_t{1} << 20;
// Of the disk's segments, for blocks: the rest is half empty, and waits to be compacted.
constexpr double kUsableShare = 0.75;
// And never these: one is kept free, for what is moved when room is made, and as much is dropped then.
constexpr int64_t kSegmentsKept = 2;
// Of host memory: the rest is for what indexes keep beside, and for gaps that its sizes leave.
constexpr double kUsableShareOfHost = 0.875;

// A store of few segments could not compact; a piece must fit into one.
int64_t SegmentBytes(int64_t disk_bytes) {
  return std::clamp(disk_bytes / 16 / 4096 * 4096, int64_t{1} << 20, kSegmentBytes);
}

// Not even room for what a store begins with, whichever of its steps said so.
bool IsFull(const std::string& directory) {
  std::error_code error;
  const auto space = std::filesystem::space(directory, error);
  return !error && space.available < uint64_t{1} << 20;
}

storage::DiskStoreOptions DiskOptionsOf(const TierFlags& flags) {
  storage::DiskStoreOptions disk;
  disk.directory = flags.store_dir;
  disk.capacity_bytes = static_cast<uint64_t>(flags.disk_bytes);
  disk.segment_bytes = static_cast<uint64_t>(SegmentBytes(flags.disk_bytes));
  if (flags.read_deadline.count() > 0) disk.read_deadline_ns = flags.read_deadline.count();
  disk.log = flags.log;
  disk.io.kind = flags.io == "uring"     ? storage::IoEngineKind::kUring
                 : flags.io == "threads" ? storage::IoEngineKind::kThreads
                                         : storage::IoEngineKind::kAuto;
  disk.warn = flags.warn;
  disk.strict = flags.strict_store;
  return disk;
}

// `description`, which may be null, gets a line about the store.
absl::StatusOr<std::unique_ptr<storage::BlockStore>> OpenDisk(
    const storage::DiskStoreOptions& options, size_t block_bytes, const storage::Clock* clock,
    std::string* description) {
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<storage::DiskStore> store,
                          storage::DiskStore::Open(options, clock));
  if (block_bytes > store->payload_bytes_max()) {
    return absl::InvalidArgumentError(
        fmt::format("disk_bytes is {}: a block of one layer, {} bytes, does not fit into a segment",
                    options.capacity_bytes, block_bytes));
  }
  if (description != nullptr) *description = store->Describe();
  return store;
}

// A store whose file system is full opens by itself later.
absl::StatusOr<std::unique_ptr<storage::BlockStore>> OpenDiskOrLate(const TierFlags& flags,
                                                                    size_t block_bytes,
                                                                    const storage::Clock* clock,
                                                                    std::string* description) {
  const storage::DiskStoreOptions disk = DiskOptionsOf(flags);
  absl::StatusOr<std::unique_ptr<storage::BlockStore>> first =
      OpenDisk(disk, block_bytes, clock, description);
  if (first.ok() || (!absl::IsResourceExhausted(first.status()) && !IsFull(flags.store_dir))) {
    return first;
  }
  *description = fmt::format("store {}: off, its file system is full", flags.store_dir);
  if (flags.warn) {
    flags.warn(fmt::format(
        "store {}: its file system is full, and {} bytes were to be stored: serving without it, "
        "until there is room ({})",
        flags.store_dir, flags.disk_bytes, std::string(first.status().message())));
  }
  storage::LateStoreOptions late;
  late.open = [disk, block_bytes, clock] { return OpenDisk(disk, block_bytes, clock, nullptr); };
  late.capacity_bytes = disk.capacity_bytes;
  late.log = [log = flags.log, directory = flags.store_dir](const std::string& line) {
    if (log) log(fmt::format("store {}: {}", directory, line));
  };
  return std::make_unique<storage::LateStore>(std::move(late));
}

}  // namespace

absl::Status CheckTierFlags(const TierFlags& flags) {
  if (flags.disk_bytes != 0 && flags.store_dir.empty()) {
    return absl::InvalidArgumentError("disk_bytes: needs store_dir, the directory of the store");
  }
  if (flags.disk_bytes == 0 && !flags.store_dir.empty()) {
    return absl::InvalidArgumentError("store_dir: needs disk_bytes, the size of the store");
  }
  if (flags.disk_bytes != 0 && flags.disk_bytes < kDiskBytesMin) {
    return absl::InvalidArgumentError(
        fmt::format("disk_bytes is {}: must be 0 or at least {}", flags.disk_bytes, kDiskBytesMin));
  }
  if (flags.host_bytes != 0 && flags.host_bytes < kHostBytesMin) {
    return absl::InvalidArgumentError(
        fmt::format("host_bytes is {}: must be 0 or at least {}", flags.host_bytes, kHostBytesMin));
  }
  if (flags.io != "auto" && flags.io != "uring" && flags.io != "threads") {
    return absl::InvalidArgumentError(
        fmt::format("io: '{}' is not one of auto, uring, threads", flags.io));
  }
  return absl::OkStatus();
}

absl::StatusOr<KvStore> OpenKvStore(const TierFlags& flags, const kernels::KvLayout& layout) {
  WINNOW_RETURN_IF_ERROR(CheckTierFlags(flags));
  KvStore kv;
  if (!flags.any()) return kv;
  kv.clock = std::make_unique<storage::SystemClock>();
  storage::HostStoreOptions host;
  host.capacity_bytes = static_cast<uint64_t>(flags.host_bytes);
  host.chunk_bytes = std::min<uint64_t>(host.chunk_bytes, host.capacity_bytes);
  host.log = flags.log;
  if (flags.disk_bytes == 0) {
    kv.store = std::make_unique<storage::HostStore>(host, kv.clock.get());
    kv.description = fmt::format("host memory, {} bytes", flags.host_bytes);
    return kv;
  }
  WINNOW_ASSIGN_OR_RETURN(
      kv.store, OpenDiskOrLate(flags, layout.BlockBytes(), kv.clock.get(), &kv.description));
  if (flags.host_bytes == 0) return kv;
  storage::TieredStoreOptions tiered;
  tiered.host = host;
  kv.description = fmt::format("host memory, {} bytes, over {}", flags.host_bytes, kv.description);
  kv.store = std::make_unique<storage::TieredStore>(std::move(tiered), std::move(kv.store),
                                                    kv.clock.get());
  return kv;
}

int64_t LowerBlocks(const TierFlags& flags, const kernels::KvLayout& layout, int32_t num_layers,
                    int64_t kv_bytes) {
  int64_t held = 0;
  if (flags.disk_bytes != 0) {
    // With both tiers every block is on disk, and host memory is the cache of it.
    const int64_t segments = flags.disk_bytes / SegmentBytes(flags.disk_bytes);
    const double usable = std::min(kUsableShare * static_cast<double>(segments),
                                   static_cast<double>(segments - kSegmentsKept));
    const uint64_t in_segment =
        storage::BlocksInSegment(SegmentBytes(flags.disk_bytes), layout.BlockBytes());
    held = static_cast<int64_t>(usable * static_cast<double>(in_segment)) / num_layers;
  } else {
    held = static_cast<int64_t>(
        kUsableShareOfHost * static_cast<double>(flags.host_bytes) /
        static_cast<double>(storage::PageAlign(layout.BlockBytes()) * num_layers));
  }
  // What fast memory holds is there, too: it is saved ahead, so that its frames can be taken at once. A
  // block more would push out one that some sequence comes back to.
  const auto in_frames = kv_bytes / static_cast<int64_t>(layout.BlockBytes() * num_layers);
  return std::max<int64_t>(0, held - in_frames);
}

}  // namespace winnow::engine
