// The bytes of a segment file and of an index value: the only place that encodes or decodes them.
// README.md draws the layout, with a worked example and what each crash point leaves behind.
//
// Files are hostile input: decoders take any bytes, check every length before they use it, and
// answer with nullopt for whatever is not exactly what an encoder wrote.
#ifndef WINNOW_STORAGE_FORMAT_H_
#define WINNOW_STORAGE_FORMAT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "storage/block_id.h"

namespace winnow::storage {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

// The unit of O_DIRECT on every device we target, and of checksums.
inline constexpr size_t kPageBytes = 4096;
inline constexpr uint32_t kFormatVersion = 1;
// 64 tokens of the widest layer we serve are 1 MiB; the limit bounds what a decoder believes.
inline constexpr size_t kPayloadBytesMax = size_t{16} << 20;

constexpr size_t PagesFor(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes; }
constexpr size_t PageAlign(size_t bytes) { return PagesFor(bytes) * kPageBytes; }

struct Checksum128 {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const Checksum128&, const Checksum128&) = default;
};

// ---- structures on disk: fixed-width fields, no padding the compiler chose ----

struct SegmentHeader {  // the first page of a segment
  uint64_t magic;
  uint32_t version;
  uint32_t page_bytes;
  uint64_t segment_id;
  uint64_t capacity_bytes;
  uint8_t zero[4056];
  uint64_t checksum;  // XXH3-64 of all that is above
};
static_assert(sizeof(SegmentHeader) == kPageBytes);

struct SegmentFooter {  // the page after the last block of a sealed segment
  uint64_t magic;
  uint32_t version;
  uint32_t block_count;
  uint64_t segment_id;
  uint64_t end_offset;  // where this page begins
  uint64_t blocks_sum;  // XXH3-64 chain over the blocks' header sums, in order
  uint8_t zero[4048];
  uint64_t checksum;
};
static_assert(sizeof(SegmentFooter) == kPageBytes);

struct EraseLogHeader {  // the first page of DIR/erased; records follow it
  uint64_t magic;
  uint32_t version;
  uint32_t record_bytes;
  uint64_t life;
  uint64_t hidden_below_segment;
  uint8_t zero[4056];
  uint64_t checksum;
};
static_assert(sizeof(EraseLogHeader) == kPageBytes);

struct ErasureRecord {  // divides a sector, so that none is torn
  uint8_t key[40];
  uint64_t sequence;
  uint64_t segment_id;
  uint64_t checksum;  // XXH3-64 of all that is above
};
static_assert(sizeof(ErasureRecord) == 64);
inline constexpr size_t kErasureBytes = sizeof(ErasureRecord);

struct BlockHeader {  // the first 256 bytes of a block; the page sums follow it
  uint64_t magic;
  uint32_t version;
  uint32_t header_pages;
  uint64_t segment_id;  // } the place: a block that is read from elsewhere is not this block
  uint64_t offset;      // }
  uint64_t sequence;    // order of writing over all segments: the last one of a key counts
  uint8_t key[40];
  uint8_t model[32];
  uint8_t tenant[32];
  uint32_t layer;
  uint32_t payload_bytes;
  uint64_t token_block;
  uint64_t expires_at_s;  // in the store's own time; 0: never
  uint64_t written_at_s;  // so that a rebuilt index knows how far that time had come
  uint8_t priority;
  uint8_t pinned;
  uint8_t transient;  // 1: for the run that wrote it; in no index, rebuilt or not
  uint8_t zero1[5];
  // ---- everything above is the prefix that seeds the sums of the payload ----
  uint64_t payload_sum_low;   // XXH3-128 of prefix and payload, padding included
  uint64_t payload_sum_high;  //
  uint8_t zero2[48];
  uint64_t header_sum;  // XXH3-64 of all header pages, this field as zero
};
static_assert(sizeof(BlockHeader) == 256);
inline constexpr size_t kBlockPrefixBytes = offsetof(BlockHeader, payload_sum_low);
static_assert(kBlockPrefixBytes == 184);

// The payload's page sums stand behind the fixed header; most blocks need one page for both.
constexpr size_t HeaderPagesFor(size_t payload_bytes) {
  return PagesFor(sizeof(BlockHeader) + PagesFor(payload_bytes) * sizeof(uint64_t));
}
constexpr size_t BlockBytesFor(size_t payload_bytes) {
  return (HeaderPagesFor(payload_bytes) + PagesFor(payload_bytes)) * kPageBytes;
}
// Between a segment's header and its footer.
constexpr uint64_t BlocksInSegment(uint64_t segment_bytes, size_t payload_bytes) {
  return (segment_bytes - 2 * kPageBytes) / BlockBytesFor(payload_bytes);
}

// ---- the same as the rest of storage works with it ----

// Where a block is and how to be sure of it: the index's value, and what a header says of itself.
struct BlockRecord {
  uint64_t segment_id = 0;
  uint64_t offset = 0;  // of the header page
  uint64_t sequence = 0;
  uint64_t expires_at_s = 0;
  uint64_t written_at_s = 0;
  uint32_t payload_bytes = 0;
  uint8_t priority = 0;
  bool pinned = false;
  bool transient = false;
  // Of the identity's tenant; 0 in an index that was written before it had any.
  uint32_t tenant_tag = 0;
  uint64_t place_sum = 0;    // XXH3-64 of the prefix: seeds the page sums
  uint64_t header_sum = 0;   // of the header pages
  Checksum128 payload_sum;   // of the payload, with identity and place
  Checksum128 identity_sum;  // of the BlockId
  std::vector<uint64_t> page_sums;

  size_t payload_pages() const { return PagesFor(payload_bytes); }
  size_t block_bytes() const { return BlockBytesFor(payload_bytes); }
  uint64_t payload_offset() const { return offset + HeaderPagesFor(payload_bytes) * kPageBytes; }
};

Checksum128 IdentitySum(const BlockId& id);

// The sum of one payload page, as kept in headers and index. It covers the page, which block and
// place it belongs to (place_sum) and which page of the block it is.
uint64_t PageSum(uint64_t place_sum, size_t page, std::span<const std::byte> bytes);

void EncodeSegmentHeader(uint64_t segment_id, uint64_t capacity_bytes, std::span<std::byte> page);
struct SegmentInfo {
  uint64_t segment_id = 0;
  uint64_t capacity_bytes = 0;
};
std::optional<SegmentInfo> DecodeSegmentHeader(std::span<const std::byte> page);

struct FooterInfo {
  uint64_t segment_id = 0;
  uint64_t end_offset = 0;
  uint32_t block_count = 0;
  uint64_t blocks_sum = 0;
};
void EncodeSegmentFooter(const FooterInfo& footer, std::span<std::byte> page);
std::optional<FooterInfo> DecodeSegmentFooter(std::span<const std::byte> page);
struct EraseLogInfo {
  uint64_t life = 0;                  // of the run that wrote it
  uint64_t hidden_below_segment = 0;  // every block in a segment before this one counts as erased
};
void EncodeEraseLogHeader(const EraseLogInfo& info, std::span<std::byte> page);
std::optional<EraseLogInfo> DecodeEraseLogHeader(std::span<const std::byte> page);

// Blocks of this key with a sequence up to this one are erased. They are in segments before
// `segment_id`.
struct Erasure {
  BlockKey key;
  uint64_t sequence = 0;
  uint64_t segment_id = 0;
};
void EncodeErasure(const Erasure& erasure, std::span<std::byte> record);
std::optional<Erasure> DecodeErasure(std::span<const std::byte> record);

// A block's sequence: the life of the store (each opening is one) above, a count below. So what an
// earlier run wrote is older, whether this one knows of it or not.
inline constexpr unsigned kLifeShift = 40;

// Continues FooterInfo::blocks_sum, which starts at 0, by one block.
uint64_t AddToBlocksSum(uint64_t blocks_sum, uint64_t header_sum);

// The part of a record that the caller of EncodeBlock decides; the rest of the record is computed.
struct BlockPlace {
  uint64_t segment_id = 0;
  uint64_t offset = 0;
  uint64_t sequence = 0;
  uint64_t expires_at_s = 0;
  uint64_t written_at_s = 0;
  uint8_t priority = 0;
  bool pinned = false;
  bool transient = false;
};
// Completes a block in place: `block` is BlockBytesFor(payload_bytes) long and already holds the
// payload behind its header pages; header and padding are written here. Returns its record.
// REQUIRES: 0 < payload_bytes <= kPayloadBytesMax.
BlockRecord EncodeBlock(const BlockId& id, const BlockPlace& place, size_t payload_bytes,
                        std::span<std::byte> block);

struct DecodedHeader {
  BlockId id;
  BlockRecord record;
};
// From the first page of a block: how many header pages it has, 1 to HeaderPagesFor(max), or
// nullopt if no block begins here. Nothing but the magic, version and lengths is checked.
std::optional<size_t> PeekHeaderPages(std::span<const std::byte> page);
// From all header pages of a block. The payload is not looked at.
std::optional<DecodedHeader> DecodeBlockHeader(std::span<const std::byte> header_pages);
// From the whole block: header, payload and padding are exactly what EncodeBlock wrote.
std::optional<DecodedHeader> DecodeBlock(std::span<const std::byte> block);

// This is exactly the block that the index knows under this key, in its place: sound in itself is
// not enough.
bool BlockMatches(std::span<const std::byte> block, const BlockKey& key, const BlockRecord& record);
// The record's place can be in a segment file of this length.
bool PlaceFits(const BlockRecord& record, uint64_t file_bytes);

// An index value; its checksum covers the key too, so a value under another's key is refused.
// REQUIRES: the block is not transient.
std::string EncodeIndexValue(const BlockKey& key, const BlockRecord& record);
std::optional<BlockRecord> DecodeIndexValue(const BlockKey& key, std::string_view value);

// The store's own record: how far its time has come, and what that was on the machine's clock, so
// that a restart within one boot also counts the time between.
struct StoreMeta {
  uint64_t store_s = 0;
  int64_t clock_ns = 0;
  std::string boot_id;  // at most 40 bytes are kept
};
std::string EncodeStoreMeta(const StoreMeta& meta);
std::optional<StoreMeta> DecodeStoreMeta(std::string_view value);

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_FORMAT_H_
