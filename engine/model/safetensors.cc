#include "engine/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "kernels/check.h"

namespace winnow::engine {

std::string SafetensorsHead(std::string header_json) {
  header_json.resize((header_json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header_json.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header_json;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not hang the start.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  const absl::Cleanup closer = [fd] { close(fd); };  // the mapping outlives it

  struct stat info = {};
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, path);
  if (!S_ISREG(info.st_mode))
    return absl::InvalidArgumentError(Concat(path, ": not a regular file"));
  if (info.st_size == 0) return absl::InvalidArgumentError(Concat(path, ": empty"));
  const uint64_t size_bytes = info.st_size;
  void* map = mmap(nullptr, size_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (map == MAP_FAILED)
    return absl::ErrnoToStatus(errno, Concat(path, ": mmap of ", size_bytes, " bytes"));

  const auto* bytes = static_cast<const std::byte*>(map);
  absl::StatusOr<SafetensorsHeader> header =
      SafetensorsHeader::Parse({bytes, size_bytes}, size_bytes);
  if (!header.ok()) {
    munmap(map, size_bytes);
    return absl::Status(header.status().code(), Concat(path, ": ", header.status().message()));
  }
  return std::unique_ptr<SafetensorsFile>(
      new SafetensorsFile(path, *std::move(header), bytes, size_bytes));
}

SafetensorsFile::SafetensorsFile(std::string path, SafetensorsHeader header, const std::byte* map,
                                 uint64_t size_bytes)
    : path_(std::move(path)), header_(std::move(header)), map_(map), size_bytes_(size_bytes) {}

SafetensorsFile::~SafetensorsFile() { munmap(const_cast<std::byte*>(map_), size_bytes_); }

std::span<const std::byte> SafetensorsFile::Data(const SafetensorsEntry& entry) const {
  WINNOW_CHECK(entry.begin <= entry.end && entry.end <= size_bytes_ - header_.data_offset());
  return {map_ + header_.data_offset() + entry.begin, entry.end - entry.begin};
}

void SafetensorsFile::ReleasePages() const {
  // The mapping is private and never written, so nothing can be lost; a refusal costs memory only.
  (void)madvise(const_cast<std::byte*>(map_), size_bytes_, MADV_DONTNEED);
}

std::string TensorPlace(const SafetensorsFile& file, const SafetensorsEntry& entry) {
  return Concat(file.path(), ": tensor ", ShortDump(entry.name), " at byte ",
                file.header().data_offset() + entry.begin, ": ");
}

}  // namespace winnow::engine
