// Any bytes to everything that decodes a segment's pages, an erasure or an index value: no read past the end, and what
// decodes encodes back to the same bytes. The first byte chooses between the bytes as they are and a sound structure that
// the input's bytes are XORed into, with its checksum made right again: otherwise no input would get past the checksums.
//
// Sources: storage/format.cc kernels/check.cc
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/check.h"
#include "storage/format.h"

using namespace winnow::storage;  // NOLINT(google-build-using-namespace): a main file

namespace {

using Bytes = std::vector<std::byte>;

void CheckBlock(const DecodedHeader& block, std::span<const std::byte> bytes) {
  const BlockRecord& record = block.record;
  WINNOW_CHECK(record.payload_bytes > 0 && record.payload_bytes <= kPayloadBytesMax);
  WINNOW_CHECK(record.page_sums.size() == record.payload_pages());
  if (record.transient) return;
  const auto again = DecodeIndexValue(block.id.key, EncodeIndexValue(block.id.key, record));
  WINNOW_CHECK(again.has_value() && again->header_sum == record.header_sum);
  if (DecodeBlock(bytes)) WINNOW_CHECK(BlockMatches(bytes, block.id.key, *again));
}

void DecodeAll(std::span<const std::byte> bytes) {
  const auto header_pages = PeekHeaderPages(bytes);
  if (header_pages.has_value())
    WINNOW_CHECK(*header_pages >= 1 && *header_pages <= HeaderPagesFor(kPayloadBytesMax));
  if (const auto block = DecodeBlockHeader(bytes)) {
    WINNOW_CHECK(header_pages.has_value());
    CheckBlock(*block, bytes);
  }
  Bytes page(kPageBytes);
  if (const auto info = DecodeSegmentHeader(bytes)) {
    EncodeSegmentHeader(info->segment_id, info->capacity_bytes, page);
    WINNOW_CHECK(std::memcmp(page.data(), bytes.data(), kPageBytes) == 0);
  }
  if (const auto info = DecodeSegmentFooter(bytes)) {
    EncodeSegmentFooter(*info, page);
    WINNOW_CHECK(std::memcmp(page.data(), bytes.data(), kPageBytes) == 0);
  }
  if (const auto info = DecodeEraseLogHeader(bytes)) {
    EncodeEraseLogHeader(*info, page);
    WINNOW_CHECK(std::memcmp(page.data(), bytes.data(), kPageBytes) == 0);
  }
  if (const auto erasure = DecodeErasure(bytes)) {
    std::byte again[kErasureBytes];
    EncodeErasure(*erasure, again);
    WINNOW_CHECK(std::memcmp(again, bytes.data(), sizeof again) == 0);
  }
  if (const auto block = DecodeBlock(bytes)) {
    Bytes again(bytes.begin(), bytes.end());
    EncodeBlock(block->id,
                {.segment_id = block->record.segment_id,
                 .offset = block->record.offset,
                 .sequence = block->record.sequence,
                 .expires_at_s = block->record.expires_at_s,
                 .priority = block->record.priority,
                 .pinned = block->record.pinned},
                block->record.payload_bytes, again);
  }
  const std::string value(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const BlockKey key;
  if (const auto record = DecodeIndexValue(key, value))
    WINNOW_CHECK(EncodeIndexValue(key, *record) == value);
  if (const auto meta = DecodeStoreMeta(value)) {
    const auto again = DecodeStoreMeta(EncodeStoreMeta(*meta));
    WINNOW_CHECK(again.has_value() && again->store_s == meta->store_s &&
                 again->clock_ns == meta->clock_ns && again->boot_id == meta->boot_id);
  }
}

// XORs the input into `sound` from its first byte on, and puts the sum of all before it in the last eight bytes.
Bytes Altered(Bytes sound, std::span<const std::byte> input) {
  for (size_t i = 0; i < input.size() && i < sound.size(); ++i) sound[i] ^= input[i];
  const uint64_t sum = XXH3_64bits(sound.data(), sound.size() - sizeof(uint64_t));
  std::memcpy(sound.data() + sound.size() - sizeof sum, &sum, sizeof sum);
  return sound;
}

// The same for a block of one page of payload: its sum stands within the header.
Bytes AlteredBlock(std::span<const std::byte> input) {
  Bytes block(BlockBytesFor(1000));
  EncodeBlock({.layer = 3, .token_block = 5},
              {.segment_id = 7, .offset = kPageBytes, .sequence = 9}, 1000, block);
  for (size_t i = 0; i < input.size() && i < block.size(); ++i) block[i] ^= input[i];
  constexpr size_t kAt = offsetof(BlockHeader, header_sum);
  std::memset(block.data() + kAt, 0, sizeof(uint64_t));
  const uint64_t sum = XXH3_64bits(block.data(), HeaderPagesFor(1000) * kPageBytes);
  std::memcpy(block.data() + kAt, &sum, sizeof sum);
  return block;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::span<const std::byte> input(reinterpret_cast<const std::byte*>(data + 1), size - 1);
  Bytes page(kPageBytes);
  switch (data[0] % 6) {
    case 0:
      DecodeAll(input);
      break;
    case 1:
      EncodeSegmentHeader(7, 1 << 20, page);
      DecodeAll(Altered(page, input));
      break;
    case 2:
      EncodeSegmentFooter({.segment_id = 7, .end_offset = 8192, .block_count = 1, .blocks_sum = 3},
                          page);
      DecodeAll(Altered(page, input));
      break;
    case 3:
      EncodeEraseLogHeader({.life = 3, .hidden_below_segment = 2}, page);
      DecodeAll(Altered(page, input));
      break;
    case 4:
      page.resize(kErasureBytes);
      EncodeErasure({.sequence = 9, .segment_id = 7}, page);
      DecodeAll(Altered(page, input));
      break;
    default:
      DecodeAll(AlteredBlock(input));
  }
  return 0;
}
