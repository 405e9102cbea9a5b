// Operations of a DiskStore in flight, and the buffers that their I/O uses.
//
// Ownership    A slab owns the operations; an operation's number is the tag of its I/O. Pointers hold until the next New.
// Threads      One at a time, the store's.
#ifndef WINNOW_STORAGE_DISK_OPERATION_H_
#define WINNOW_STORAGE_DISK_OPERATION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "storage/block_store.h"
#include "storage/format.h"
#include "storage/page_memory.h"
#include "storage/segment.h"

namespace winnow::storage {

struct DiskOperation {
  // kMove: a block of the victim is read, then written at another place.
  enum class Kind : uint8_t { kFree, kPut, kMove, kGet, kGetPages };
  Kind kind = Kind::kFree;
  uint64_t tag = 0;
  std::vector<uint64_t> joined;  // tags of later Puts of the same block
  BlockId id;
  std::shared_ptr<const BlockRecord> record;  // read from, or written to
  std::shared_ptr<const BlockRecord> source;  // kMove: where it was
  Segment* segment = nullptr;                 // held (SegmentLog::Hold)
  uint32_t payload_bytes = 0;
  PutOptions options;
  uint64_t expires_at_s = 0;
  int64_t start_ns = 0;  // of a Get
  int64_t deadline_ns = 0;
  std::optional<size_t> stage_page;  // its buffers
  size_t stage_pages = 0;
  std::span<std::byte> into;
  std::vector<uint32_t> pages;
  uint32_t outstanding = 0;  // buffers that the kernel has
  int error = 0;
  bool late = false;
  bool reading = false;    // kMove: the first half
  bool retried = false;    // a failed checksum is read once more
  bool cancelled = false;  // erased before it was published
  bool answered = false;
  bool placed = false;  // its segment waits for it

  bool is_move() const { return kind == Kind::kMove; }
  // The operation of the caller that this answers. REQUIRES: not a move.
  Operation answers() const;
};

class DiskOperations {
 public:
  // Buffers of `staging_bytes` for callers' operations, and of `move_bytes` for moves, which have their own because Puts
  // that wait for a move may hold all others.
  void AllocateBuffers(uint64_t staging_bytes, uint64_t move_bytes);

  uint32_t New(DiskOperation::Kind kind, uint64_t tag, const BlockId& id);
  // Gives back the buffers, too. REQUIRES: the kernel has none of them; the segment is released.
  void Free(uint32_t index);
  DiskOperation& operator[](uint32_t index) { return operations_[index]; }

  // Gives the operation `pages` of buffers; false: they are in use.
  bool Stage(DiskOperation* operation, size_t pages);
  std::span<std::byte> Staged(const DiskOperation& operation) const;
  size_t stage_pages() const { return stage_.total_pages(); }

  std::span<std::byte> memory() const { return memory_.bytes(); }
  // Memory that a hung disk keeps when the store goes.
  PageMemory TakeMemory() { return std::move(memory_); }

 private:
  PageAllocator& AllocatorOf(const DiskOperation& operation) {
    return operation.is_move() ? move_stage_ : stage_;
  }

  std::vector<DiskOperation> operations_;
  std::vector<uint32_t> free_;
  PageMemory memory_;
  PageAllocator stage_{0};
  PageAllocator move_stage_{0};
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_DISK_OPERATION_H_
