// Reads that their caller waits for: opening and maintenance, never a step loop. Other results that come meanwhile go where
// they belong, through `deliver`.
//
// A read that is given up leaves its buffer to the kernel: the reader keeps it until it is back, and the segment counts as
// stuck until then.
//
// Threads: one at a time, the store's.
#ifndef WINNOW_STORAGE_WAITING_READER_H_
#define WINNOW_STORAGE_WAITING_READER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "storage/disk_environment.h"
#include "storage/page_memory.h"
#include "storage/ring.h"
#include "storage/segment_log.h"

namespace winnow::storage {

class WaitingReader {
 public:
  // `deliver` gets every result of the ring while a read is waited for, this reader's too (which it passes to OnIo).
  WaitingReader(DiskEnvironment& env, SegmentLog& log, std::function<void(const IoResult&)> deliver)
      : env_(env), log_(log), deliver_(std::move(deliver)) {}

  // 0 or an errno. `deadline_ns`: 0 waits as long as it takes. After ETIMEDOUT with segment.stuck > 0 the kernel still has
  // `into`: the caller hands it to Keep and goes on with other memory.
  int Read(const Segment& segment, uint64_t offset, std::span<std::byte> into,
           int64_t deadline_ns = 0);
  void Keep(uint64_t segment_id, PageMemory memory);
  size_t stuck() const { return stuck_.size(); }

  // A result of kReadSync.
  void OnIo(uint64_t segment_id, const IoResult& result);

  // Buffers that a hung disk keeps when the store goes.
  std::map<uint64_t, PageMemory> TakeStuck() { return std::move(stuck_); }

 private:
  DiskEnvironment& env_;
  SegmentLog& log_;
  const std::function<void(const IoResult&)> deliver_;
  std::optional<int> result_;
  std::map<uint64_t, PageMemory> stuck_;  // by segment
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_WAITING_READER_H_
