#include "storage/disk_operation.h"

#include <utility>

#include "storage/check.h"

namespace winnow::storage {

Operation DiskOperation::answers() const {
  WINNOW_CHECK(kind != Kind::kFree && kind != Kind::kMove);
  return kind == Kind::kPut   ? Operation::kPut
         : kind == Kind::kGet ? Operation::kGet
                              : Operation::kGetPages;
}

void DiskOperations::AllocateBuffers(uint64_t staging_bytes, uint64_t move_bytes) {
  memory_ = PageMemory(PageAlign(staging_bytes) + PageAlign(move_bytes));
  stage_ = PageAllocator(PagesFor(staging_bytes));
  move_stage_ = PageAllocator(PagesFor(move_bytes));
}

uint32_t DiskOperations::New(DiskOperation::Kind kind, uint64_t tag, const BlockId& id) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(operations_.size()));
    operations_.emplace_back();
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  operations_[index] = DiskOperation();
  operations_[index].kind = kind;
  operations_[index].tag = tag;
  operations_[index].id = id;
  return index;
}

void DiskOperations::Free(uint32_t index) {
  DiskOperation& operation = operations_[index];
  WINNOW_CHECK(operation.outstanding == 0 && operation.kind != DiskOperation::Kind::kFree);
  if (operation.stage_page) {
    AllocatorOf(operation).Free(*operation.stage_page, operation.stage_pages);
  }
  operation = DiskOperation();
  free_.push_back(index);
}

bool DiskOperations::Stage(DiskOperation* operation, size_t pages) {
  operation->stage_page = AllocatorOf(*operation).Allocate(pages);
  operation->stage_pages = pages;
  return operation->stage_page.has_value();
}

std::span<std::byte> DiskOperations::Staged(const DiskOperation& operation) const {
  const size_t base = operation.is_move() ? stage_.total_pages() : 0;
  return memory_.bytes().subspan((base + *operation.stage_page) * kPageBytes,
                                 operation.stage_pages * kPageBytes);
}

}  // namespace winnow::storage
