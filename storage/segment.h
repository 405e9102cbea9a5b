// One segment file of a DiskStore, while the store is open.
#ifndef WINNOW_STORAGE_SEGMENT_H_
#define WINNOW_STORAGE_SEGMENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "storage/file_system.h"
#include "storage/page_memory.h"

namespace winnow::storage {

// The purpose of a segment's own I/O (not of one operation); the top byte of its tag.
enum class SegmentIo : uint8_t {
  kNone,  // an operation's
  kAllocate,
  kHeader,
  kCreateSync,
  kDirectorySync,
  kCommitSync,
  kFooter,
  kFooterSync,
  kReadSync,  // a read that its caller waits for
};

// Life: kCreating -> kOpen -> kSealing -> kSealed -> file deleted. A write or sync that fails on
// the way makes it `broken`: no more writes and no more syncs, for an fsync that failed once may
// lie the next time; blocks committed before stay readable, and every read is checked anyway.
// A write that was given up may still land whenever the kernel likes, and make the file longer: the
// file is cut or deleted only when the kernel has given every buffer back.
struct Segment {
  enum class State : uint8_t { kCreating, kOpen, kSealing, kSealed };

  uint64_t id = 0;
  std::string path;
  File file;
  State state = State::kCreating;
  bool broken = false;
  uint64_t file_bytes = 0;  // the file's length
  uint64_t end_offset = 0;  // where the next block goes
  uint64_t live_bytes = 0;  // of indexed blocks
  uint64_t live_blocks = 0;
  uint32_t block_count = 0;  // placed, for the footer
  uint64_t blocks_sum = 0;   //
  uint32_t users = 0;        // operations that read from or write to it
  uint32_t doubts = 0;       // blocks that the index may have here against the store's word
  uint32_t outstanding = 0;  // its own I/O: the kernel may have `page`
  uint32_t writing = 0;      // block writes that the kernel may still carry out
  uint32_t stuck = 0;        // I/O of any kind that was given up and is not back yet
  uint32_t unsynced = 0;     // placed blocks that are neither published nor failed
  bool syncing = false;
  bool footer_started = false;
  bool victim = false;            // it is being emptied: not deleted before that ends
  bool busy = false;              // on the log's list of segments that need attention
  std::vector<uint32_t> written;  // operations: written, not covered by a sync yet
  std::vector<uint32_t> covered;  // operations: the sync in flight covers them
  PageMemory page;                // header, then footer
};

// seg-<16 hex digits>.wseg
std::string SegmentName(uint64_t id);
std::optional<uint64_t> ParseSegmentName(std::string_view name);

constexpr uint64_t SegmentTag(SegmentIo purpose, uint64_t id) {
  return static_cast<uint64_t>(purpose) << 56 | id;
}

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_SEGMENT_H_
