// Opening a store, whatever state it was left in. Damage costs blocks, never the start: what the
// index says is believed only where a sound segment holds the place; an index that cannot be read
// is put aside and rebuilt from the segments.
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "storage/check.h"
#include "storage/disk_store.h"

namespace winnow::storage {
namespace {

using std::chrono::nanoseconds;

constexpr size_t kMoveBytesMin = size_t{2} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<DiskStore>> DiskStore::Open(DiskStoreOptions options,
                                                           const Clock* clock) {
  WINNOW_RETURN_IF_ERROR(options.Validate());
  const std::string directory = options.directory;
  const nanoseconds stall(options.open_stall_ns);
  const auto steady_now = options.seams.steady_now;
  auto opening = std::make_shared<Opening>();
  std::unique_ptr<DiskStore> fresh(new DiskStore(std::move(options), clock, opening));
  std::thread thread([opening, store = std::move(fresh)]() mutable {
    absl::Status status = store->Start();
    if (!status.ok()) store.reset();
    {
      const MutexLock lock(opening->mutex);
      if (!opening->abandoned) opening->store = std::move(store);
      opening->status = std::move(status);
      opening->done = true;
    }
    opening->changed.NotifyOne();
    store.reset();  // abandoned
  });
  uint64_t steps = 0;
  auto last_step = steady_now();
  {
    const MutexLock lock(opening->mutex);
    while (!opening->done) {
      const auto until = std::chrono::steady_clock::now() +
                         std::min<nanoseconds>(stall / 4, std::chrono::milliseconds(100));
      while (!opening->done && opening->changed.WaitUntil(opening->mutex, until)) {
      }
      const auto now = steady_now();
      const uint64_t now_steps = opening->steps.load();
      if (now_steps != steps) last_step = now;
      steps = now_steps;
      if (opening->done || now - last_step < stall) continue;
      opening->abandoned = true;
      thread.detach();
      return absl::DeadlineExceededError(
          absl::StrCat("store ", directory, ": the disk answered nothing for ",
                       absl::FormatDuration(absl::FromChrono(stall)), " while it was opened"));
    }
  }
  thread.join();
  std::unique_ptr<DiskStore> store;
  {
    const MutexLock lock(opening->mutex);
    WINNOW_RETURN_IF_ERROR(opening->status);
    store = std::move(opening->store);
  }
  // Here and not there: a ring that changes threads is made anew, and the kernel takes its time to
  // give back the memory that the old one had locked.
  store->ring_->engine().RegisterBuffer(store->staging_.bytes());
  store->Log(store->Describe());
  return store;
}

absl::Status DiskStore::Start() {
  const std::string& directory = options_.directory;
  WINNOW_RETURN_IF_ERROR(files()->MakeDirectory(directory));
  WINNOW_RETURN_IF_ERROR(CheckDirectory());
  WINNOW_RETURN_IF_ERROR(Lock());
  absl::StatusOr<File> opened = files()->Open(directory, {.directory = true});
  WINNOW_RETURN_IF_ERROR(opened.status());
  directory_ = *std::move(opened);

  absl::StatusOr<IoEngineChoice> choice = ChooseIoEngine(options_.io, directory);
  WINNOW_RETURN_IF_ERROR(choice.status());
  direct_ = choice->direct;
  io_fallback_ = choice->fallback_reason;
  if (!io_fallback_.empty()) Log("store: " + io_fallback_);
  std::unique_ptr<IoEngine> engine = std::move(choice->engine);
  if (options_.seams.decorate_engine) {
    engine = options_.seams.decorate_engine(std::move(engine));
  }
  ring_ = std::make_unique<Ring>(std::move(engine), clock_);

  // The largest payload whose block fits a segment between header and footer, and half of staging.
  const uint64_t block_bytes_max =
      std::min(options_.segment_bytes - 2 * kPageBytes, options_.staging_bytes / 2);
  payload_bytes_max_ = std::min<uint64_t>(kPayloadBytesMax, block_bytes_max);
  while (BlockBytesFor(payload_bytes_max_) > block_bytes_max) payload_bytes_max_ -= kPageBytes;
  const size_t move_bytes = std::max(kMoveBytesMin, 2 * BlockBytesFor(payload_bytes_max_));
  staging_ = PageMemory(PageAlign(options_.staging_bytes) + PageAlign(move_bytes));
  stage_ = std::make_unique<PageAllocator>(PagesFor(options_.staging_bytes));
  move_stage_ = std::make_unique<PageAllocator>(PagesFor(move_bytes));

  WINNOW_RETURN_IF_ERROR(LoadSegments());
  CheckRoom();
  auto erase_log = std::make_unique<EraseLog>(files(), directory);
  // An id is never used twice, even where all files are gone.
  next_segment_ = std::max(next_segment_, erase_log->hidden_below_segment());
  IndexEntries entries;
  std::string meta_text;
  absl::StatusOr<std::unique_ptr<IndexDb>> db = OpenIndex(&entries, &meta_text);
  WINNOW_RETURN_IF_ERROR(db.status());
  const auto meta = DecodeStoreMeta(meta_text);
  // Every batch carries the store's own record: without it this is a new index, or one that lost
  // its beginning (RocksDB makes an empty one where CURRENT is missing).
  if (!meta && !segments_.empty()) recovery_.index_rebuilt = true;
  base_ns_ = clock_->NowNs();
  if (meta) {
    base_s_ = meta->store_s;
    // Time between two runs counts if both saw the same clock.
    if (meta->boot_id == clock_->BootId() && !meta->boot_id.empty() && base_ns_ > meta->clock_ns) {
      base_s_ += static_cast<uint64_t>((base_ns_ - meta->clock_ns) / 1'000'000'000);
    }
  }
  if (recovery_.index_rebuilt) {
    Log("store: rebuilding the index from " + absl::StrCat(segments_.size()) + " segments");
    WINNOW_RETURN_IF_ERROR(Rebuild(*erase_log, db->get()));
  }
  IndexBatch batch;
  if (!recovery_.index_rebuilt) AddEntries(entries, *erase_log, &batch);
  const uint64_t life = std::max(erase_log->life(), (next_sequence_ - 1) >> kLifeShift) + 1;
  next_sequence_ = life << kLifeShift;
  if (!segments_.empty() && erase_log->found() != EraseLog::Found::kSound) {
    Warn(
        "store: the list of erased blocks is damaged or gone: a rebuilt index will do without what "
        "is stored now");
  }
  const absl::Status started = erase_log->Start(
      life, segments_.empty() ? UINT64_MAX : segments_.begin()->first, next_segment_);
  if (!started.ok()) Log("store: " + std::string(started.message()));
  writer_ = std::make_unique<IndexWriter>(*std::move(db), std::move(erase_log));
  if (!batch.erases.empty()) SubmitBatch(std::move(batch), {});
  TrimSegments();
  for (const auto& [id, segment] : segments_) order_.Seal(id, segment->file_bytes);
  order_.Advance(StoreSeconds(), SIZE_MAX);
  recovery_.blocks = entries_.size();
  // A capacity that was lowered. What stays is moved before files go, so for once there may be a
  // segment more; a disk that cannot write stays as it is.
  std::vector<Completion> none;
  shrinking_ = true;
  while (used_bytes_ > options_.capacity_bytes && health_.state() == TierState::kOk &&
         StartReclaim()) {
    Poll(std::chrono::milliseconds(10), &none);
  }
  shrinking_ = false;
  // A ring changes threads only while nothing is in flight.
  while (!idle()) Poll(std::chrono::milliseconds(10), &none);
  return absl::OkStatus();
}

// Who can write the directory can forge blocks: a checksum is not a signature.
absl::Status DiskStore::CheckDirectory() const {
  struct stat info = {};
  if (::stat(options_.directory.c_str(), &info) != 0) {
    return ErrnoStatus(errno, "stat " + options_.directory);
  }
  std::string what;
  if (info.st_uid != ::geteuid()) {
    what = absl::StrCat("belongs to user ", info.st_uid, " and not to ", ::geteuid());
  } else if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    what = absl::StrFormat("has mode %04o", info.st_mode & 07777);
  } else {
    return absl::OkStatus();
  }
  const std::string line = absl::StrCat("store ", options_.directory, ": the directory ", what,
                                        ": others can put blocks into it");
  if (options_.strict) return absl::PermissionDeniedError(line);
  Warn(line);
  return absl::OkStatus();
}

void DiskStore::CheckRoom() const {
  std::error_code error;
  const auto space = std::filesystem::space(options_.directory, error);
  if (error || used_bytes_ + space.available >= options_.capacity_bytes) return;
  Warn(absl::StrCat("store ", options_.directory, ": may take ", options_.capacity_bytes,
                    " bytes, but its file system has room for ", used_bytes_ + space.available,
                    ": it will hold no more than that"));
}

absl::Status DiskStore::Lock() {
  const std::string path = options_.directory + "/LOCK";
  absl::StatusOr<File> file = files()->Open(path, {});
  if (absl::IsNotFound(file.status())) file = files()->Open(path, {.create = true});
  WINNOW_RETURN_IF_ERROR(file.status());
  char owner[128] = {};
  if (::flock(file->fd(), LOCK_EX | LOCK_NB) != 0) {
    const ssize_t length = ::pread(file->fd(), owner, sizeof owner - 1, 0);
    return absl::FailedPreconditionError(
        absl::StrCat("store ", options_.directory, " is in use by another process (",
                     std::string(owner, length > 0 ? length : 0), ")"));
  }
  char host[64] = {};
  (void)::gethostname(host, sizeof host - 1);
  const std::string text = absl::StrCat("pid ", ::getpid(), " on ", host);
  // For the message above only; the lock itself is the kernel's.
  if (::ftruncate(file->fd(), 0) == 0) (void)!::pwrite(file->fd(), text.data(), text.size(), 0);
  lock_ = *std::move(file);
  return absl::OkStatus();
}

int DiskStore::ReadSync(const Segment& segment, uint64_t offset, std::span<std::byte> into,
                        int64_t deadline_ns) {
  sync_result_.reset();
  ring_->Submit({.kind = IoKind::kRead,
                 .fd = segment.file.fd(),
                 .offset = offset,
                 .data = into,
                 .deadline_ns = deadline_ns,
                 .tag = SegmentTag(SegmentIo::kReadSync, segment.id)});
  std::vector<IoResult> results;
  while (!sync_result_) {
    results.clear();
    ring_->Poll(std::chrono::milliseconds(100), &results);
    for (const IoResult& result : results) OnIo(result);
  }
  return *sync_result_;
}

absl::Status DiskStore::LoadSegments() {
  absl::StatusOr<std::vector<std::string>> names = files()->List(options_.directory);
  WINNOW_RETURN_IF_ERROR(names.status());
  PageMemory page(kPageBytes);
  for (const std::string& name : *names) {
    const auto id = ParseSegmentName(name);
    if (!id) continue;
    opening_->steps.fetch_add(1, std::memory_order_relaxed);
    next_segment_ = std::max(next_segment_, *id + 1);  // an id is never used twice
    auto segment = std::make_unique<Segment>();
    segment->id = *id;
    segment->state = Segment::State::kSealed;
    segment->path = options_.directory + "/" + name;
    const absl::StatusOr<uint64_t> bytes = files()->FileBytes(segment->path);
    absl::StatusOr<File> file = files()->Open(segment->path, {.direct = direct_});
    bool sound = bytes.ok() && file.ok() && *bytes >= kPageBytes;
    if (sound) {
      segment->file = *std::move(file);
      segment->file_bytes = *bytes;
      sound = ReadSync(*segment, 0, page.bytes()) == 0;
      const auto header = DecodeSegmentHeader(page.bytes());
      sound = sound && header && header->segment_id == *id;
    }
    if (!sound) {
      Log("store: " + name + " has no sound header: removed");
      ++recovery_.removed_segments;
      // Should it not go, its bytes are counted, and it is tried again.
      if (files()->Unlink(segment->path).ok() || !bytes.ok()) continue;
      segment->file_bytes = *bytes;
    }
    if (segment->file.is_open()) ring_->engine().RegisterFile(segment->file.fd());
    used_bytes_ += segment->file_bytes;
    segments_[*id] = std::move(segment);
  }
  return absl::OkStatus();
}

// ---- the index ----

absl::StatusOr<std::unique_ptr<IndexDb>> DiskStore::LoadIndex(IndexEntries* entries,
                                                              std::string* meta) {
  entries->clear();
  meta->clear();
  const std::string path = options_.directory + "/index";
  absl::StatusOr<std::unique_ptr<IndexDb>> db =
      options_.seams.open_index ? options_.seams.open_index(path) : OpenRocksIndex(path);
  WINNOW_RETURN_IF_ERROR(db.status());
  WINNOW_RETURN_IF_ERROR((*db)->Load(
      [this, entries](const BlockKey& key, std::string_view value) {
        opening_->steps.fetch_add(1, std::memory_order_relaxed);
        entries->emplace_back(key, std::string(value));
      },
      meta));
  return db;
}

absl::StatusOr<std::unique_ptr<IndexDb>> DiskStore::OpenIndex(IndexEntries* entries,
                                                              std::string* meta) {
  absl::StatusOr<std::unique_ptr<IndexDb>> db = LoadIndex(entries, meta);
  if (db.ok()) return db;
  // No room says nothing about the index.
  if (absl::IsResourceExhausted(db.status())) return db;
  // One damaged index is kept to look at; an older one has been looked at by now.
  const std::string path = options_.directory + "/index";
  const std::string quarantine = options_.directory + "/quarantine";
  (void)files()->RemoveTree(quarantine);
  if (files()->Rename(path, quarantine).ok()) {
    recovery_.quarantined = quarantine;
  } else {
    WINNOW_RETURN_IF_ERROR(files()->RemoveTree(path));
  }
  Warn(absl::StrCat("store ", options_.directory,
                    ": damaged index put aside: ", std::string(db.status().message())));
  recovery_.index_rebuilt = true;
  return LoadIndex(entries, meta);
}

// From an index or a scan; the caller has checked that its segment is there.
void DiskStore::AddEntry(const BlockKey& key, BlockRecord record) {
  Segment* segment = segments_.at(record.segment_id).get();
  const uint64_t bytes = record.block_bytes();
  segment->live_bytes += bytes;
  ++segment->live_blocks;
  segment->end_offset = std::max(segment->end_offset, record.offset + bytes);
  next_sequence_ = std::max(next_sequence_, record.sequence + 1);
  Entry entry;
  entry.expires_at_s = record.expires_at_s;
  entry.priority = std::min(record.priority, kPriorityMax);
  entry.pinned = record.pinned && stats_.pinned_bytes + bytes <= options_.capacity_bytes / 2;
  if (entry.pinned) stats_.pinned_bytes += bytes;
  // Uses are not written down: after a restart, what was written last counts as used last.
  entry.last_use = record.sequence;
  uses_ = std::max(uses_, record.sequence);
  entry.record = std::make_shared<const BlockRecord>(std::move(record));
  Entry& added = entries_[key] = std::move(entry);
  Order(key, &added);
}

void DiskStore::AddEntries(const IndexEntries& entries, const EraseLog& erase_log,
                           IndexBatch* batch) {
  for (const auto& [key, value] : entries) {
    auto record = DecodeIndexValue(key, value);
    bool sound = record.has_value();
    if (sound) {
      const auto it = segments_.find(record->segment_id);
      sound = it != segments_.end() && it->second->file.is_open() &&
              PlaceFits(*record, it->second->file_bytes) &&
              record->payload_bytes <= payload_bytes_max_;
    }
    // Killed between list and index: an erasure that was begun is carried out, or what a later Put
    // finds here would be hidden from a rebuilt index.
    if (sound) sound = !erase_log.Lists(key, record->sequence);
    if (sound) {
      AddEntry(key, *std::move(record));
    } else {
      ++recovery_.dropped_entries;
      batch->erases.push_back(key);
    }
  }
}

bool DiskStore::HasFooter(const Segment& segment, FooterInfo* footer) {
  if (segment.file_bytes < 2 * kPageBytes || segment.file_bytes % kPageBytes != 0) return false;
  PageMemory page(kPageBytes);
  const uint64_t offset = segment.file_bytes - kPageBytes;
  if (ReadSync(segment, offset, page.bytes()) != 0) return false;
  const auto info = DecodeSegmentFooter(page.bytes());
  if (!info || info->segment_id != segment.id || info->end_offset != offset) return false;
  *footer = *info;
  return true;
}

// Every block of a segment. Where the footer stands all blocks were synced before it, so headers
// are enough (payloads are checked when read); elsewhere a payload may be torn, so all is read.
void DiskStore::ScanSegment(Segment* segment, std::vector<DecodedHeader>* found) {
  FooterInfo footer;
  const bool sealed = HasFooter(*segment, &footer);
  PageMemory memory(BlockBytesFor(payload_bytes_max_));
  for (bool whole : {!sealed, true}) {
    found->clear();
    uint64_t blocks_sum = 0;
    for (uint64_t offset = kPageBytes; offset + kPageBytes <= segment->file_bytes;) {
      const std::span<std::byte> first = memory.bytes().first(kPageBytes);
      std::optional<DecodedHeader> block;
      if (ReadSync(*segment, offset, first) == 0) {
        const auto header_pages = PeekHeaderPages(first);
        const size_t header_bytes = header_pages.value_or(0) * kPageBytes;
        if (header_pages && header_bytes <= memory.bytes().size() &&
            header_bytes <= segment->file_bytes - offset &&
            (header_bytes == kPageBytes ||
             ReadSync(*segment, offset, memory.bytes().first(header_bytes)) == 0)) {
          block = DecodeBlockHeader(memory.bytes().first(header_bytes));
        }
      }
      if (block) {
        const BlockRecord& record = block->record;
        const size_t bytes = record.block_bytes();
        if (record.segment_id != segment->id || record.offset != offset ||
            record.payload_bytes > payload_bytes_max_ || bytes > segment->file_bytes - offset) {
          block.reset();
        } else if (whole) {
          const std::span<std::byte> all = memory.bytes().first(bytes);
          if (ReadSync(*segment, offset, all) != 0 || !DecodeBlock(all)) block.reset();
        }
      }
      if (!block) {
        offset += kPageBytes;  // a hole that a failed write left, or the end
        continue;
      }
      offset += block->record.block_bytes();
      blocks_sum = AddToBlocksSum(blocks_sum, block->record.header_sum);
      found->push_back(*std::move(block));
    }
    if (whole || (found->size() == footer.block_count && blocks_sum == footer.blocks_sum)) return;
  }
}

absl::Status DiskStore::Rebuild(const EraseLog& erase_log, IndexDb* db) {
  absl::flat_hash_map<BlockKey, BlockRecord> newest;
  for (const auto& [id, segment] : segments_) {
    if (!segment->file.is_open()) continue;
    std::vector<DecodedHeader> found;
    ScanSegment(segment.get(), &found);
    for (DecodedHeader& block : found) {
      base_s_ = std::max(base_s_, block.record.written_at_s);
      if (block.record.transient || erase_log.Hides(block.id.key, block.record.sequence, id)) {
        ++recovery_.hidden_blocks;
        continue;
      }
      const auto [it, inserted] = newest.try_emplace(block.id.key, block.record);
      if (!inserted && it->second.sequence < block.record.sequence) it->second = block.record;
    }
  }
  IndexBatch batch;
  const auto write = [&]() -> absl::Status {
    batch.meta = EncodeStoreMeta({StoreSeconds(), clock_->NowNs(), clock_->BootId()});
    absl::Status status = db->Write(batch);
    batch = {};
    return status;
  };
  for (auto& [key, record] : newest) {
    batch.puts.emplace_back(key, EncodeIndexValue(key, record));
    AddEntry(key, std::move(record));
    if (batch.puts.size() == 1000) WINNOW_RETURN_IF_ERROR(write());
  }
  return write();
}

// Files without live blocks go; what lies behind the last live block of an unsealed one too.
void DiskStore::TrimSegments() {
  std::vector<Segment*> all;
  for (const auto& [id, segment] : segments_) all.push_back(segment.get());
  for (Segment* segment : all) {
    if (segment->live_blocks == 0) {
      if (DeleteSegment(segment)) ++recovery_.removed_segments;
      continue;
    }
    FooterInfo footer;
    if (segment->end_offset == segment->file_bytes || HasFooter(*segment, &footer)) continue;
    if (!files()->Truncate(segment->file, segment->end_offset).ok()) continue;
    recovery_.truncated_bytes += segment->file_bytes - segment->end_offset;
    used_bytes_ -= segment->file_bytes - segment->end_offset;
    segment->file_bytes = segment->end_offset;
  }
}

}  // namespace winnow::storage
