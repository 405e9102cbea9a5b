// Opening a DiskStore's directory, whatever state it was left in. Damage costs blocks, never the start: an index entry is
// believed only where a sound segment holds its place, and an index that cannot be read is put aside and rebuilt from the
// segments.
//
// Life cycle   Made by the thread that opens, run once, and gone before the store is used: fills the segment log and the
//              entry table, and hands over the index.
// Threads      The opening thread alone. Every call waits for the disk, and counts its answers (CountStep).
#ifndef WINNOW_STORAGE_RECOVERY_H_
#define WINNOW_STORAGE_RECOVERY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/disk_environment.h"
#include "storage/entry_table.h"
#include "storage/erase_log.h"
#include "storage/format.h"
#include "storage/index.h"
#include "storage/segment_log.h"
#include "storage/waiting_reader.h"

namespace winnow::storage {

// Findings and repairs of opening.
struct RecoveryReport {
  bool index_rebuilt = false;
  std::string quarantined;  // where a damaged index was moved to
  uint64_t blocks = 0;
  uint64_t hidden_blocks = 0;     // left out of a rebuilt index: erased, transient, or in doubt
  uint64_t dropped_entries = 0;   // index entries without a sound place
  uint64_t removed_segments = 0;  // files without a sound header or without live blocks
  uint64_t truncated_bytes = 0;
};

class Recovery {
 public:
  struct Opened {
    std::unique_ptr<IndexWriter> writer;
    std::vector<BlockKey> dropped;  // index entries to erase
  };

  // All outlive the recovery. `payload_bytes_max`: larger blocks are not read back.
  Recovery(DiskEnvironment& env, SegmentLog& log, EntryTable& table, WaitingReader& reader,
           size_t payload_bytes_max)
      : env_(env),
        log_(log),
        table_(table),
        reader_(reader),
        payload_bytes_max_(payload_bytes_max) {}

  // Finds the segments, opens or rebuilds the index, enters the blocks, sets the store's time, and begins a new run in the
  // list of erased blocks. An error: the directory cannot be used at all.
  absl::StatusOr<Opened> Run();
  // Deletes files without live blocks, and cuts unsealed ones behind their last live block.
  void Trim();

  const RecoveryReport& report() const { return report_; }

 private:
  using IndexEntries = std::vector<std::pair<BlockKey, std::string>>;

  absl::Status LoadSegments();
  void LoadSegment(const std::string& name, uint64_t id);
  void CheckRoom() const;
  absl::StatusOr<std::unique_ptr<IndexDb>> LoadIndex(IndexEntries* entries, std::string* meta);
  absl::StatusOr<std::unique_ptr<IndexDb>> OpenIndex(IndexEntries* entries, std::string* meta);
  void SetTime(std::string_view meta_text);
  void AddEntry(const BlockKey& key, BlockRecord record);
  void AddEntries(const IndexEntries& entries, const EraseLog& erase_log,
                  std::vector<BlockKey>* dropped);
  absl::Status Rebuild(const EraseLog& erase_log, IndexDb* db);
  void ScanSegment(const Segment& segment, std::vector<DecodedHeader>* found);
  std::optional<DecodedHeader> ReadBlockAt(const Segment& segment, uint64_t offset, bool whole,
                                           std::span<std::byte> memory);
  bool HasFooter(const Segment& segment, FooterInfo* footer);

  DiskEnvironment& env_;
  SegmentLog& log_;
  EntryTable& table_;
  WaitingReader& reader_;
  const size_t payload_bytes_max_;
  RecoveryReport report_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_RECOVERY_H_
