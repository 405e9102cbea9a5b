#include "storage/page_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "storage/check.h"
#include "storage/format.h"

namespace winnow::storage {

PageMemory::PageMemory(size_t bytes) {
  std::optional<PageMemory> made = TryMake(bytes);
  WINNOW_CHECK(made.has_value());
  *this = *std::move(made);
}

std::optional<PageMemory> PageMemory::TryMake(size_t bytes) {
  const size_t length = PageAlign(bytes);
  void* memory =
      ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return std::nullopt;
  (void)::madvise(memory, length, MADV_HUGEPAGE);  // a hint
  PageMemory made;
  made.bytes_ = {static_cast<std::byte*>(memory), length};
  return made;
}

PageMemory::~PageMemory() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

std::optional<size_t> PageAllocator::Find(size_t begin, size_t end, size_t pages) const {
  size_t at = begin;
  while (at + pages <= end) {
    const auto* used = static_cast<const uint8_t*>(std::memchr(used_.data() + at, 1, pages));
    if (used == nullptr) return at;
    // The run is blocked here; the next free page behind it is the next candidate.
    const size_t blocked = static_cast<size_t>(used - used_.data());
    const auto* free =
        static_cast<const uint8_t*>(std::memchr(used_.data() + blocked, 0, end - blocked));
    if (free == nullptr) return std::nullopt;
    at = static_cast<size_t>(free - used_.data());
  }
  return std::nullopt;
}

std::optional<size_t> PageAllocator::Allocate(size_t pages) {
  WINNOW_CHECK(pages > 0);
  if (pages > free_pages_) return std::nullopt;
  std::optional<size_t> first = Find(cursor_, used_.size(), pages);
  if (!first) first = Find(0, std::min(used_.size(), cursor_ + pages - 1), pages);
  if (!first) return std::nullopt;
  std::memset(used_.data() + *first, 1, pages);
  free_pages_ -= pages;
  cursor_ = *first + pages == used_.size() ? 0 : *first + pages;
  return first;
}

void PageAllocator::Free(size_t first, size_t pages) {
  WINNOW_CHECK(first + pages <= used_.size());
  WINNOW_CHECK(std::memchr(used_.data() + first, 0, pages) == nullptr);
  std::memset(used_.data() + first, 0, pages);
  free_pages_ += pages;
}

}  // namespace winnow::storage
