#include "storage/segment.h"

#include <cinttypes>
#include <cstdio>

namespace winnow::storage {

std::string SegmentName(uint64_t id) {
  char name[32];
  std::snprintf(name, sizeof name, "seg-%016" PRIx64 ".wseg", id);
  return name;
}

std::optional<uint64_t> ParseSegmentName(std::string_view name) {
  uint64_t id = 0;
  if (name.size() != 25) return std::nullopt;
  for (char c : name.substr(4, 16)) {
    const size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    id = id << 4 | digit;
  }
  // Ids share a tag with the purpose of an I/O.
  if (id == 0 || id >> 56 != 0 || name != SegmentName(id)) return std::nullopt;
  return id;
}

}  // namespace winnow::storage
