// Memory that a kernel cannot read or write past without a fault, in every build: a sanitizer sees only code that was
// compiled for it.
#ifndef WINNOW_TESTS_UNIT_KERNELS_GUARDED_ARRAY_H_
#define WINNOW_TESTS_UNIT_KERNELS_GUARDED_ARRAY_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace winnow::kernels {

// `size` values of a trivial type between two pages that may not be touched. The last value ends where the page behind it
// begins, so that one read too far is a fault; in front of the first up to a page may lie unseen.
template <typename T>
class GuardedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  GuardedArray() = default;
  explicit GuardedArray(size_t size, T value = T{}) : size_(size) {
    if (size == 0) return;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (size * sizeof(T) + page - 1) / page * page;
    mapped_bytes_ = used + 2 * page;
    void* mapped =
        mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mapped_ = static_cast<std::byte*>(mapped);
    if (mprotect(mapped_ + page, used, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(mapped_ + page + used - size * sizeof(T));
    std::fill(data_, data_ + size, value);
  }
  GuardedArray(const GuardedArray& other) : GuardedArray(other.size_) {
    if (size_ > 0) std::memcpy(data_, other.data_, size_ * sizeof(T));
  }
  GuardedArray(GuardedArray&& other) noexcept { Swap(other); }
  GuardedArray& operator=(GuardedArray other) noexcept {
    Swap(other);
    return *this;
  }
  ~GuardedArray() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void Swap(GuardedArray& other) {
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  std::byte* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_GUARDED_ARRAY_H_
