#include "storage/recovery.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <system_error>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "storage/check.h"
#include "storage/page_memory.h"

namespace winnow::storage {
namespace {

// Entries of a rebuilt index that are written at once.
constexpr size_t kRebuildBatch = 1000;

}  // namespace

absl::StatusOr<Recovery::Opened> Recovery::Run() {
  WINNOW_RETURN_IF_ERROR(LoadSegments());
  CheckRoom();
  auto erase_log = std::make_unique<EraseLog>(env_.files(), env_.options().directory);
  // An id is never used twice, even where all files are gone.
  log_.SkipSegments(erase_log->hidden_below_segment());
  IndexEntries entries;
  std::string meta;
  absl::StatusOr<std::unique_ptr<IndexDb>> db = OpenIndex(&entries, &meta);
  WINNOW_RETURN_IF_ERROR(db.status());
  SetTime(meta);
  Opened opened;
  const bool any_segments = !log_.segments().empty();
  if (report_.index_rebuilt) {
    env_.Log("store: rebuilding the index from " + absl::StrCat(log_.segments().size()) +
             " segments");
    WINNOW_RETURN_IF_ERROR(Rebuild(*erase_log, db->get()));
  } else {
    AddEntries(entries, *erase_log, &opened.dropped);
  }
  const uint64_t life = std::max(erase_log->life(), (log_.next_sequence() - 1) >> kLifeShift) + 1;
  log_.SkipSequences(life << kLifeShift);
  if (any_segments && erase_log->found() != EraseLog::Found::kSound) {
    env_.Warn(
        "store: the list of erased blocks is damaged or gone: a rebuilt index will do without what "
        "is stored now");
  }
  const absl::Status started = erase_log->Start(
      life, any_segments ? log_.segments().begin()->first : UINT64_MAX, log_.next_segment());
  if (!started.ok()) env_.Log("store: " + std::string(started.message()));
  opened.writer = std::make_unique<IndexWriter>(*std::move(db), std::move(erase_log));
  return opened;
}

// ---- segments ----

absl::Status Recovery::LoadSegments() {
  absl::StatusOr<std::vector<std::string>> names = env_.files()->List(env_.options().directory);
  WINNOW_RETURN_IF_ERROR(names.status());
  for (const std::string& name : *names) {
    const auto id = ParseSegmentName(name);
    if (!id) continue;
    env_.CountStep();
    log_.SkipSegments(*id + 1);  // an id is never used twice
    LoadSegment(name, *id);
  }
  return absl::OkStatus();
}

void Recovery::LoadSegment(const std::string& name, uint64_t id) {
  auto segment = std::make_unique<Segment>();
  segment->id = id;
  segment->state = Segment::State::kSealed;
  segment->path = env_.options().directory + "/" + name;
  const absl::StatusOr<uint64_t> bytes = env_.files()->FileBytes(segment->path);
  absl::StatusOr<File> file = env_.files()->Open(segment->path, {.direct = env_.direct()});
  bool sound = bytes.ok() && file.ok() && *bytes >= kPageBytes;
  if (sound) {
    PageMemory page(kPageBytes);
    segment->file = *std::move(file);
    segment->file_bytes = *bytes;
    sound = reader_.Read(*segment, 0, page.bytes()) == 0;
    const auto header = DecodeSegmentHeader(page.bytes());
    sound = sound && header && header->segment_id == id;
  }
  if (!sound) {
    env_.Log("store: " + name + " has no sound header: removed");
    ++report_.removed_segments;
    // Should it not go, its bytes are counted, and it is tried again.
    if (env_.files()->Unlink(segment->path).ok() || !bytes.ok()) return;
    segment->file_bytes = *bytes;
  }
  log_.Add(std::move(segment));
}

void Recovery::CheckRoom() const {
  const DiskStoreOptions& options = env_.options();
  std::error_code error;
  const auto space = std::filesystem::space(options.directory, error);
  if (error || log_.used_bytes() + space.available >= options.capacity_bytes) return;
  env_.Warn(absl::StrCat("store ", options.directory, ": may take ", options.capacity_bytes,
                         " bytes, but its file system has room for ",
                         log_.used_bytes() + space.available, ": it will hold no more than that"));
}

bool Recovery::HasFooter(const Segment& segment, FooterInfo* footer) {
  if (segment.file_bytes < 2 * kPageBytes || segment.file_bytes % kPageBytes != 0) return false;
  PageMemory page(kPageBytes);
  const uint64_t offset = segment.file_bytes - kPageBytes;
  if (reader_.Read(segment, offset, page.bytes()) != 0) return false;
  const auto info = DecodeSegmentFooter(page.bytes());
  if (!info || info->segment_id != segment.id || info->end_offset != offset) return false;
  *footer = *info;
  return true;
}

void Recovery::Trim() {
  std::vector<Segment*> all;
  for (const auto& [id, segment] : log_.segments()) all.push_back(segment.get());
  for (Segment* segment : all) {
    if (segment->live_blocks == 0) {
      if (log_.Delete(segment)) ++report_.removed_segments;
      continue;
    }
    FooterInfo footer;
    if (segment->end_offset == segment->file_bytes || HasFooter(*segment, &footer)) continue;
    const uint64_t dead_bytes = segment->file_bytes - segment->end_offset;
    if (log_.Cut(segment).ok()) report_.truncated_bytes += dead_bytes;
  }
}

// ---- the index ----

absl::StatusOr<std::unique_ptr<IndexDb>> Recovery::LoadIndex(IndexEntries* entries,
                                                             std::string* meta) {
  entries->clear();
  meta->clear();
  const std::string path = env_.options().directory + "/index";
  const auto& open = env_.options().seams.open_index;
  absl::StatusOr<std::unique_ptr<IndexDb>> db = open ? open(path) : OpenRocksIndex(path);
  WINNOW_RETURN_IF_ERROR(db.status());
  WINNOW_RETURN_IF_ERROR((*db)->Load(
      [this, entries](const BlockKey& key, std::string_view value) {
        env_.CountStep();
        entries->emplace_back(key, std::string(value));
      },
      meta));
  return db;
}

absl::StatusOr<std::unique_ptr<IndexDb>> Recovery::OpenIndex(IndexEntries* entries,
                                                             std::string* meta) {
  absl::StatusOr<std::unique_ptr<IndexDb>> db = LoadIndex(entries, meta);
  if (db.ok()) return db;
  // No room says nothing about the index.
  if (absl::IsResourceExhausted(db.status())) return db;
  // One damaged index is kept to look at; an older one has been looked at by now.
  const std::string& directory = env_.options().directory;
  const std::string path = directory + "/index";
  const std::string quarantine = directory + "/quarantine";
  (void)env_.files()->RemoveTree(quarantine);
  if (env_.files()->Rename(path, quarantine).ok()) {
    report_.quarantined = quarantine;
  } else {
    WINNOW_RETURN_IF_ERROR(env_.files()->RemoveTree(path));
  }
  env_.Warn(absl::StrCat("store ", directory,
                         ": damaged index put aside: ", std::string(db.status().message())));
  report_.index_rebuilt = true;
  return LoadIndex(entries, meta);
}

// The store's time goes on from its own record. Without the record this is a new index, or one that lost its beginning,
// because every batch carries it (RocksDB makes an empty index where CURRENT is missing).
void Recovery::SetTime(std::string_view meta_text) {
  const auto meta = DecodeStoreMeta(meta_text);
  uint64_t store_s = 0;
  if (meta) {
    store_s = meta->store_s;
    // Time between two runs counts if both saw the same clock.
    const int64_t now_ns = env_.NowNs();
    if (meta->boot_id == env_.clock().BootId() && !meta->boot_id.empty() &&
        now_ns > meta->clock_ns) {
      store_s += static_cast<uint64_t>((now_ns - meta->clock_ns) / 1'000'000'000);
    }
  } else if (!log_.segments().empty()) {
    report_.index_rebuilt = true;
  }
  env_.SetStoreSeconds(store_s);
}

// ---- blocks ----

// From an index or a scan; the caller has checked that its segment is there.
void Recovery::AddEntry(const BlockKey& key, BlockRecord record) {
  Segment& segment = log_.At(record.segment_id);
  segment.end_offset = std::max(segment.end_offset, record.offset + record.block_bytes());
  log_.SkipSequences(record.sequence + 1);
  Entry entry;
  entry.expires_at_s = record.expires_at_s;
  entry.priority = std::min(record.priority, kPriorityMax);
  entry.pinned = record.pinned;
  // Uses are not written down: after a restart, the block that was written last counts as used last.
  entry.last_use = record.sequence;
  table_.SkipUses(record.sequence);
  entry.record = std::make_shared<const BlockRecord>(std::move(record));
  table_.Set(key, std::move(entry));
}

void Recovery::AddEntries(const IndexEntries& entries, const EraseLog& erase_log,
                          std::vector<BlockKey>* dropped) {
  for (const auto& [key, value] : entries) {
    auto record = DecodeIndexValue(key, value);
    bool sound = record.has_value();
    if (sound) {
      const Segment* segment = log_.Find(record->segment_id);
      sound = segment != nullptr && segment->file.is_open() &&
              PlaceFits(*record, segment->file_bytes) &&
              record->payload_bytes <= payload_bytes_max_;
    }
    // Killed between list and index: an erasure that was begun is carried out, or a rebuilt index would hide a later Put
    // of the block that is found here.
    if (sound) sound = !erase_log.Lists(key, record->sequence);
    if (sound) {
      AddEntry(key, *std::move(record));
    } else {
      ++report_.dropped_entries;
      dropped->push_back(key);
    }
  }
}

// The block at this offset: its header, or with `whole` all of it, checked.
std::optional<DecodedHeader> Recovery::ReadBlockAt(const Segment& segment, uint64_t offset,
                                                   bool whole, std::span<std::byte> memory) {
  const uint64_t left_bytes = segment.file_bytes - offset;
  const std::span<std::byte> first = memory.first(kPageBytes);
  if (reader_.Read(segment, offset, first) != 0) return std::nullopt;
  const auto header_pages = PeekHeaderPages(first);
  const size_t header_bytes = header_pages.value_or(0) * kPageBytes;
  if (!header_pages || header_bytes > memory.size() || header_bytes > left_bytes) {
    return std::nullopt;
  }
  if (header_bytes > kPageBytes && reader_.Read(segment, offset, memory.first(header_bytes)) != 0) {
    return std::nullopt;
  }
  std::optional<DecodedHeader> block = DecodeBlockHeader(memory.first(header_bytes));
  if (!block) return std::nullopt;
  const BlockRecord& record = block->record;
  const size_t bytes = record.block_bytes();
  if (record.segment_id != segment.id || record.offset != offset ||
      record.payload_bytes > payload_bytes_max_ || bytes > left_bytes) {
    return std::nullopt;
  }
  if (!whole) return block;
  const std::span<std::byte> all = memory.first(bytes);
  if (reader_.Read(segment, offset, all) != 0 || !DecodeBlock(all)) return std::nullopt;
  return block;
}

// Every block of a segment. Where the footer stands all blocks were synced before it, so headers are enough (payloads are
// checked when they are read); elsewhere a payload may be torn, so all of it is read.
void Recovery::ScanSegment(const Segment& segment, std::vector<DecodedHeader>* found) {
  FooterInfo footer;
  const bool sealed = HasFooter(segment, &footer);
  PageMemory memory(BlockBytesFor(payload_bytes_max_));
  for (bool whole : {!sealed, true}) {
    found->clear();
    uint64_t blocks_sum = 0;
    for (uint64_t offset = kPageBytes; offset + kPageBytes <= segment.file_bytes;) {
      std::optional<DecodedHeader> block = ReadBlockAt(segment, offset, whole, memory.bytes());
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

absl::Status Recovery::Rebuild(const EraseLog& erase_log, IndexDb* db) {
  absl::flat_hash_map<BlockKey, BlockRecord> newest;
  for (const auto& [id, segment] : log_.segments()) {
    if (!segment->file.is_open()) continue;
    std::vector<DecodedHeader> found;
    ScanSegment(*segment, &found);
    for (DecodedHeader& block : found) {
      if (block.record.written_at_s > env_.StoreSeconds()) {
        env_.SetStoreSeconds(block.record.written_at_s);
      }
      if (block.record.transient || erase_log.Hides(block.id.key, block.record.sequence, id)) {
        ++report_.hidden_blocks;
        continue;
      }
      const auto [it, inserted] = newest.try_emplace(block.id.key, block.record);
      if (!inserted && it->second.sequence < block.record.sequence) it->second = block.record;
    }
  }
  IndexBatch batch;
  const auto write = [&]() -> absl::Status {
    batch.meta = EncodeStoreMeta({env_.StoreSeconds(), env_.NowNs(), env_.clock().BootId()});
    absl::Status status = db->Write(batch);
    batch = {};
    return status;
  };
  for (auto& [key, record] : newest) {
    batch.puts.emplace_back(key, EncodeIndexValue(key, record));
    AddEntry(key, std::move(record));
    if (batch.puts.size() == kRebuildBatch) WINNOW_RETURN_IF_ERROR(write());
  }
  return write();
}

}  // namespace winnow::storage
