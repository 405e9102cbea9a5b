// Any bytes as a safetensors file: the parser refuses them, or what it says lies within the file.
//
// Sources: engine/model/safetensors.cc engine/model/safetensors_header.cc engine/base/json_file.cc kernels/check.cc
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/model/safetensors.h"
#include "kernels/check.h"

using winnow::engine::SafetensorsEntry;
using winnow::engine::SafetensorsHeader;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto header = SafetensorsHeader::Parse(std::as_bytes(std::span(data, size)), size);
  if (!header.ok()) {
    WINNOW_CHECK(header.status().code() == absl::StatusCode::kInvalidArgument);
    return 0;
  }
  uint64_t covered = 0;
  for (size_t i = 0; i < header->num_tensors(); ++i) {
    const SafetensorsEntry entry = header->tensor(i);
    WINNOW_CHECK(entry.begin == covered && entry.begin <= entry.end);
    WINNOW_CHECK(header->Find(entry.name)->begin == entry.begin);
    covered = entry.end;
  }
  WINNOW_CHECK(header->data_offset() + covered == size);
  return 0;
}
