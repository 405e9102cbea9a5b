// The list of erased blocks: they stay erased when the index is lost.
//
// Segments are append-only, so an erased block's bytes stay in a file until that file goes. A sound
// index does not point at them; a rebuilt one would. DIR/erased lists the erasures that some
// segment may still contradict, and a rebuild leaves out the blocks that it hides. Where the list itself is in
// doubt (damaged, gone, could not be written, grown too long) it hides all that is older than the
// doubt: any doubt is a miss.
//
// Opened and asked on the opening thread; Append then belongs to the index writer's.
#ifndef WINNOW_STORAGE_ERASE_LOG_H_
#define WINNOW_STORAGE_ERASE_LOG_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "storage/file_system.h"
#include "storage/format.h"

namespace winnow::storage {

class EraseLog {
 public:
  // More erasures than this become one: of every segment that was there.
  static constexpr size_t kErasuresMax = 65536;

  enum class Found : uint8_t { kSound, kMissing, kDamaged };

  // Reads the list. Only `files` is used later; nothing is written before Start.
  EraseLog(FileSystem* files, const std::string& directory);

  Found found() const { return found_; }
  // Number of the last run that could write it down; 0: unknown.
  uint64_t life() const { return info_.life; }
  // True: the list has this block.
  bool Lists(const BlockKey& key, uint64_t sequence) const;
  // True: this block was erased, or nobody can say that it was not.
  bool Hides(const BlockKey& key, uint64_t sequence, uint64_t segment_id) const;
  uint64_t hidden_below_segment() const { return info_.hidden_below_segment; }
  size_t erasures() const { return erasures_.size(); }

  // Begins a run: from here on blocks get sequences of `life`, and segments ids from
  // `next_segment`. Forgets what no segment from `oldest_segment` on can contradict, and writes the
  // rest down. An error is not the end: Append tries again, with more hidden.
  absl::Status Start(uint64_t life, uint64_t oldest_segment, uint64_t next_segment);

  // Durable when it returns OK.
  absl::Status Append(std::span<const Erasure> erasures);

 private:
  struct Hidden {
    uint64_t sequence = 0;
    uint64_t segment_id = 0;
  };
  void Load();
  absl::Status Rewrite();

  FileSystem* files_;
  const std::string directory_;
  const std::string path_;
  Found found_ = Found::kMissing;
  EraseLogInfo info_;
  absl::flat_hash_map<BlockKey, Hidden> erasures_;
  File file_;                  // open while its end is known to be good
  uint64_t records_ = 0;       // in the file
  uint64_t next_segment_ = 0;  // the newest seen
  bool life_written_ = false;
  bool failed_ = false;  // the last Rewrite
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_ERASE_LOG_H_
