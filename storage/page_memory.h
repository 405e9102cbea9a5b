// Memory for pages: an mmap'd region, and a sub-allocator of runs of pages inside one.
#ifndef WINNOW_STORAGE_PAGE_MEMORY_H_
#define WINNOW_STORAGE_PAGE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace winnow::storage {

// Owns zeroed, page-aligned memory; transparent huge pages are asked for, ordinary ones will do.
class PageMemory {
 public:
  PageMemory() = default;
  // Aborts when the machine refuses; for memory that is sized from configuration, at start.
  explicit PageMemory(size_t bytes);
  // The same, but nullopt where the machine (a limit, a container) has no more to give.
  static std::optional<PageMemory> TryMake(size_t bytes);
  PageMemory(PageMemory&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  PageMemory& operator=(PageMemory&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PageMemory();
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

// First fit over a bitmap, starting behind the last allocation. Allocates no memory after
// construction. Not thread-safe.
class PageAllocator {
 public:
  explicit PageAllocator(size_t pages) : used_(pages, 0), free_pages_(pages) {}
  // First page of a run, or nullopt if no run is long enough. REQUIRES: pages > 0.
  std::optional<size_t> Allocate(size_t pages);
  void Free(size_t first, size_t pages);
  size_t free_pages() const { return free_pages_; }
  size_t total_pages() const { return used_.size(); }

 private:
  std::optional<size_t> Find(size_t begin, size_t end, size_t pages) const;

  std::vector<uint8_t> used_;
  size_t free_pages_;
  size_t cursor_ = 0;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_PAGE_MEMORY_H_
