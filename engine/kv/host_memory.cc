#include "engine/kv/host_memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

namespace winnow::engine {
namespace {

// A number after `key` in a file of "key number" lines, or alone in the file if `key` is empty.
std::optional<int64_t> ReadNumber(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (key.empty()) {
      int64_t value = 0;
      if (std::sscanf(word.c_str(), "%" SCNd64, &value) == 1) return value;
      return std::nullopt;  // "max": no limit
    }
    int64_t value = 0;
    if (word == key && file >> value) return value;
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> AvailableMemoryBytes() {
  std::optional<int64_t> available;
  if (const auto kib = ReadNumber("/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  const auto limit = ReadNumber("/sys/fs/cgroup/memory.max", "");
  const auto used = ReadNumber("/sys/fs/cgroup/memory.current", "");
  if (limit && used) {
    // Clean pages of files are counted as used, and given back when memory runs short.
    const int64_t cached = ReadNumber("/sys/fs/cgroup/memory.stat", "inactive_file").value_or(0);
    const int64_t left = std::max<int64_t>(0, *limit - *used + cached);
    available = std::min(available.value_or(left), left);
  }
  return available;
}

}  // namespace winnow::engine
