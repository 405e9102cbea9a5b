#include "storage/maintenance.h"

#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "storage/check.h"
#include "storage/format.h"
#include "storage/segment.h"

namespace winnow::storage {
namespace {

constexpr uint64_t kFindingsMax = 100;
// Segments left for a read that hangs; then the disk is.
constexpr size_t kStuckMax = 8;

std::string LockPath(const MaintenanceOptions& options) { return options.directory + "/LOCK"; }

// NotFound unless this is a store: commands that look must not make one.
absl::Status CheckIsStore(const MaintenanceOptions& options) {
  FileSystem files;
  const auto names = files.List(options.directory);
  WINNOW_RETURN_IF_ERROR(names.status());
  const bool is_store = std::any_of(names->begin(), names->end(), [](const std::string& name) {
    return name == "LOCK" || ParseSegmentName(name).has_value();
  });
  if (is_store) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(options.directory, " holds no store"));
}

// Who holds the lock, by the kernel's list: trying the lock would get in a server's way.
std::string Owner(const MaintenanceOptions& options) {
  struct stat status;
  if (::stat(LockPath(options).c_str(), &status) != 0) return "";
  // "1: FLOCK  ADVISORY  WRITE 4711 fe:00:123456 0 EOF"
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, access, pid, file;
    words >> number >> kind >> advisory >> access >> pid >> file;
    const size_t inode = file.rfind(':');
    if (kind != "FLOCK" || inode == std::string::npos) continue;
    if (file.substr(inode + 1) != std::to_string(status.st_ino)) continue;
    std::ifstream text(LockPath(options));
    std::string owner;
    std::getline(text, owner);
    return owner.empty() ? "pid " + pid : owner;
  }
  return "";
}

void Find(StoreInspection* out, const std::string& finding) {
  if (++out->finding_count <= kFindingsMax) out->findings.push_back(finding);
}

struct SegmentFile {
  File file;
  uint64_t bytes = 0;
  bool stuck = false;  // a read of it does not come back
};

using Blocks = std::vector<std::pair<BlockKey, BlockRecord>>;

absl::StatusOr<File> OpenToRead(const std::string& path) {
  FileSystem files;
  // O_DIRECT, so that the medium is checked and not the page cache.
  auto file = files.Open(path, {.direct = true, .read_only = true});
  return file.ok() ? std::move(file) : files.Open(path, {.read_only = true});
}

absl::Status InspectSegments(const MaintenanceOptions& options, StoreInspection* out,
                             std::map<uint64_t, SegmentFile>* segments) {
  FileSystem files;
  const auto names = files.List(options.directory);
  WINNOW_RETURN_IF_ERROR(names.status());
  PageMemory page(kPageBytes);
  for (const std::string& name : *names) {
    const auto id = ParseSegmentName(name);
    if (!id) continue;
    const std::string path = options.directory + "/" + name;
    const auto bytes = files.FileBytes(path);
    if (absl::IsNotFound(bytes.status())) continue;  // of a store that is served
    ++out->segments;
    out->file_bytes += bytes.value_or(0);
    auto file = OpenToRead(path);
    absl::Status status = file.ok() ? files.ReadAt(*file, 0, page.bytes()) : file.status();
    const auto header = DecodeSegmentHeader(page.bytes());
    if (!status.ok() || !header || header->segment_id != *id) {
      ++out->unsound_segments;
      Find(out, absl::StrCat(name, ": no sound header",
                             status.ok() ? "" : ", " + std::string(status.message())));
      continue;
    }
    out->segment_bytes = std::max(out->segment_bytes, header->capacity_bytes);
    const uint64_t end = *bytes - kPageBytes;
    if (*bytes >= 2 * kPageBytes && *bytes % kPageBytes == 0 &&
        files.ReadAt(*file, end, page.bytes()).ok()) {
      const auto footer = DecodeSegmentFooter(page.bytes());
      out->sealed_segments += footer && footer->segment_id == *id && footer->end_offset == end;
    }
    (*segments)[*id] = {*std::move(file), *bytes, false};
  }
  return absl::OkStatus();
}

// Every entry that decodes.
absl::Status ReadIndex(const MaintenanceOptions& options, StoreInspection* out, Blocks* blocks) {
  auto index = OpenRocksIndexReadOnly(options.directory + "/index");
  WINNOW_RETURN_IF_ERROR(index.status());
  std::string meta;
  WINNOW_RETURN_IF_ERROR((*index)->Load(
      [&](const BlockKey& key, std::string_view value) {
        if (auto record = DecodeIndexValue(key, value)) {
          blocks->emplace_back(key, *std::move(record));
        } else {
          ++out->dangling_entries;
          Find(out, "index: an entry does not decode");
        }
      },
      &meta));
  if (DecodeStoreMeta(meta)) return absl::OkStatus();
  return absl::DataLossError("index: the store's own record is gone");
}

void CountBlock(const BlockRecord& record, StoreInspection* out) {
  ++out->blocks;
  out->live_bytes += record.block_bytes();
  out->payload_bytes += record.payload_bytes;
  ++out->blocks_by_priority[std::min(record.priority, kPriorityMax)];
  if (record.pinned) {
    ++out->pinned_blocks;
    out->pinned_bytes += record.block_bytes();
  }
  if (record.expires_at_s != 0) ++out->expiring_blocks;
}

absl::StatusOr<StoreInspection> Inspect(const MaintenanceOptions& options, Blocks* blocks,
                                        std::map<uint64_t, SegmentFile>* segments) {
  StoreInspection out;
  // The index first: of a store that is served, segments may appear meanwhile, entries not.
  Blocks entries;
  if (const absl::Status status = ReadIndex(options, &out, &entries); !status.ok()) {
    out.index_error = std::string(status.message());
    entries.clear();
  }
  WINNOW_RETURN_IF_ERROR(InspectSegments(options, &out, segments));
  if (out.segments == 0) out.index_error.clear();  // a store that nothing was put into yet
  if (!out.index_error.empty()) Find(&out, out.index_error);
  FileSystem files;
  const EraseLog erase_log(&files, options.directory);
  out.erase_log = erase_log.found();
  out.erasures = erase_log.erasures();
  if (out.segments > 0 && out.erase_log != EraseLog::Found::kSound) {
    Find(&out, out.erase_log == EraseLog::Found::kMissing
                   ? "erased: the list of erased blocks is gone"
                   : "erased: the list of erased blocks is damaged");
  }
  for (auto& [key, record] : entries) {
    if (erase_log.Lists(key, record.sequence)) continue;  // its erasure is carried out at a start
    const auto it = segments->find(record.segment_id);
    if (it == segments->end() || !PlaceFits(record, it->second.bytes)) {
      ++out.dangling_entries;
      Find(&out, absl::StrCat(SegmentName(record.segment_id), " at ", record.offset,
                              ": the index has a block that is not there"));
      continue;
    }
    CountBlock(record, &out);
    blocks->emplace_back(key, std::move(record));
  }
  return out;
}

// One read; nullopt: it does not come back, and the kernel has the buffer.
std::optional<int> ReadWithin(Ring* ring, int fd, uint64_t offset, std::span<std::byte> into,
                              int64_t deadline_ns, uint64_t tag) {
  ring->Submit({.kind = IoKind::kRead,
                .fd = fd,
                .offset = offset,
                .data = into,
                .deadline_ns = deadline_ns,
                .tag = tag});
  std::vector<IoResult> results;
  while (true) {
    results.clear();
    ring->Poll(std::chrono::milliseconds(100), &results);
    for (const IoResult& result : results) {
      if (result.tag != tag) continue;  // one that was given up is back
      if (result.late) return std::nullopt;
      return result.error;
    }
  }
}

void ReadBlocks(const MaintenanceOptions& options, const Clock* clock, Blocks blocks,
                std::map<uint64_t, SegmentFile>* segments, StoreInspection* out) {
  std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.segment_id, a.second.offset) <
           std::pair(b.second.segment_id, b.second.offset);
  });
  auto ring = std::make_unique<Ring>(MakeThreadsEngine(2 * kStuckMax, 2 * kStuckMax), clock);
  std::vector<PageMemory> stuck;
  PageMemory memory(BlockBytesFor(kPayloadBytesMax));
  uint64_t tag = 0;
  for (const auto& [key, record] : blocks) {
    SegmentFile& segment = segments->at(record.segment_id);
    if (segment.stuck || stuck.size() >= kStuckMax) {
      ++out->unchecked_blocks;
      continue;
    }
    const std::span<std::byte> block = memory.bytes().first(record.block_bytes());
    const auto error = ReadWithin(ring.get(), segment.file.fd(), record.offset, block,
                                  clock->NowNs() + options.read_deadline_ns, ++tag);
    const std::string place =
        absl::StrCat(SegmentName(record.segment_id), " at ", record.offset, ": ");
    if (!error) {
      segment.stuck = true;
      stuck.push_back(std::exchange(memory, PageMemory(BlockBytesFor(kPayloadBytesMax))));
      ++out->unchecked_blocks;
      Find(out, place + "reading does not come back");
    } else if (*error != 0) {
      ++out->unreadable_blocks;
      Find(out, place + std::strerror(*error));
    } else if (!BlockMatches(block, key, record)) {
      ++out->corrupt_blocks;
      Find(out, place + "not the block that was put");
    } else {
      ++out->checked_blocks;
    }
  }
  if (ring->Drain(std::chrono::seconds(1))) return;
  // A hung disk keeps its buffers; the process is about to end.
  (void)ring.release();
  (void)new std::vector<PageMemory>(std::move(stuck));
  (void)new std::map<uint64_t, SegmentFile>(std::move(*segments));
}

// As large as it was made for, or larger, so that opening evicts and drops nothing.
absl::StatusOr<std::unique_ptr<DiskStore>> OpenWhole(const MaintenanceOptions& options,
                                                     const Clock* clock, uint64_t* file_bytes) {
  WINNOW_RETURN_IF_ERROR(CheckIsStore(options));
  StoreInspection seen;
  std::map<uint64_t, SegmentFile> segments;
  WINNOW_RETURN_IF_ERROR(InspectSegments(options, &seen, &segments));
  segments.clear();
  *file_bytes = seen.file_bytes;
  DiskStoreOptions open;
  open.directory = options.directory;
  open.log = options.log;
  if (seen.segment_bytes != 0) open.segment_bytes = seen.segment_bytes;
  open.capacity_bytes = 2 * seen.file_bytes + 8 * open.segment_bytes;
  return DiskStore::Open(std::move(open), clock);
}

// Until nothing moves inside; a disk that hangs is left after a minute.
void Settle(DiskStore* store) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::vector<Completion> none;
  do {
    store->Poll(std::chrono::milliseconds(10), &none);
  } while (!store->idle() && std::chrono::steady_clock::now() < limit);
}

// Length of the segment files, with the store closed, because closing seals and cuts the last one.
uint64_t FileBytesAfter(const MaintenanceOptions& options, std::unique_ptr<DiskStore> store) {
  store.reset();
  StoreInspection seen;
  std::map<uint64_t, SegmentFile> segments;
  (void)InspectSegments(options, &seen, &segments);
  return seen.file_bytes;
}

}  // namespace

absl::StatusOr<StoreInspection> StatStore(const MaintenanceOptions& options) {
  WINNOW_RETURN_IF_ERROR(CheckIsStore(options));
  Blocks blocks;
  std::map<uint64_t, SegmentFile> segments;
  auto out = Inspect(options, &blocks, &segments);
  if (out.ok()) out->owner = Owner(options);
  return out;
}

absl::StatusOr<StoreInspection> VerifyStore(const MaintenanceOptions& options, const Clock* clock) {
  WINNOW_RETURN_IF_ERROR(CheckIsStore(options));
  FileSystem files;
  const auto lock = files.Open(LockPath(options), {.read_only = true});
  if (!lock.ok() && !absl::IsNotFound(lock.status())) return lock.status();
  if (lock.ok() && ::flock(lock->fd(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "store ", options.directory, " is in use by another process (", Owner(options), ")"));
  }
  Blocks blocks;
  std::map<uint64_t, SegmentFile> segments;
  auto out = Inspect(options, &blocks, &segments);
  if (out.ok()) ReadBlocks(options, clock, std::move(blocks), &segments, &*out);
  return out;
}

absl::StatusOr<RepairReport> RepairStore(const MaintenanceOptions& options, const Clock* clock) {
  uint64_t before_bytes = 0;
  auto store = OpenWhole(options, clock, &before_bytes);
  WINNOW_RETURN_IF_ERROR(store.status());
  RepairReport report;
  report.recovery = (*store)->recovery();
  report.verify = (*store)->VerifyAll(/*repair=*/true);
  Settle(store->get());
  report.blocks = (*store)->stats().blocks;
  report.used_bytes = FileBytesAfter(options, *std::move(store));
  return report;
}

absl::StatusOr<CollectReport> CollectStore(const MaintenanceOptions& options, double live_min,
                                           const Clock* clock) {
  uint64_t before_bytes = 0;
  auto store = OpenWhole(options, clock, &before_bytes);
  WINNOW_RETURN_IF_ERROR(store.status());
  CollectReport report;
  report.recovery = (*store)->recovery();
  report.gc = (*store)->CollectGarbage(live_min);
  report.blocks = (*store)->stats().blocks;
  report.used_bytes = FileBytesAfter(options, *std::move(store));
  // Closed against closed: while it is open, a segment is as long as it may become.
  report.gc.freed_bytes = before_bytes - std::min(before_bytes, report.used_bytes);
  return report;
}

}  // namespace winnow::storage
