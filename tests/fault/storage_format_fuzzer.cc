// libFuzzer on everything that decodes bytes of a segment or an index value: no crash, no read past
// the end, and what decodes encodes back to the same bytes.
//   clang++-19 -std=c++20 -I. -fsanitize=fuzzer,address,undefined
//   tests/fault/storage_format_fuzzer.cc storage/format.cc
//     -labsl_hash -labsl_city -labsl_raw_hash_set
#include <cstdlib>
#include <cstring>

#include "storage/format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace winnow::storage;  // NOLINT(google-build-using-namespace)
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  (void)PeekHeaderPages(bytes);
  (void)DecodeBlockHeader(bytes);
  (void)DecodeSegmentHeader(bytes);
  (void)DecodeSegmentFooter(bytes);
  (void)DecodeEraseLogHeader(bytes);
  if (const auto erasure = DecodeErasure(bytes)) {
    std::byte again[kErasureBytes];
    EncodeErasure(*erasure, again);
    if (std::memcmp(again, data, sizeof again) != 0) std::abort();
  }
  if (const auto block = DecodeBlock(bytes)) {
    std::vector<std::byte> again(bytes.begin(), bytes.end());
    EncodeBlock(block->id,
                {.segment_id = block->record.segment_id,
                 .offset = block->record.offset,
                 .sequence = block->record.sequence,
                 .expires_at_s = block->record.expires_at_s,
                 .priority = block->record.priority,
                 .pinned = block->record.pinned},
                block->record.payload_bytes, again);
    // A forger may choose page sums and padding as it likes under a right header sum; sizes may not
    // differ.
    if (again.size() != bytes.size()) std::abort();
  }
  BlockKey key;
  const std::string value(reinterpret_cast<const char*>(data), size);
  if (const auto record = DecodeIndexValue(key, value)) {
    if (EncodeIndexValue(key, *record) != value) std::abort();
  }
  return 0;
}
