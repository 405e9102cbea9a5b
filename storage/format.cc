#include "storage/format.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "storage/check.h"

namespace winnow::storage {
namespace {

// "WNWSEGM1", "WNWFOOT1", "WNWBLCK1", "WNWERAS1" as they stand in the file.
constexpr uint64_t kSegmentMagic = 0x314d474553574e57;
constexpr uint64_t kFooterMagic = 0x31544f4f46574e57;
constexpr uint64_t kBlockMagic = 0x314b434c42574e57;
constexpr uint64_t kEraseLogMagic = 0x3153415245574e57;

// The fixed part of an index value; the page sums and an XXH3-64 follow.
struct IndexValue {
  uint32_t version;
  uint32_t payload_bytes;
  uint64_t segment_id;
  uint64_t offset;
  uint64_t sequence;
  uint64_t expires_at_s;
  uint64_t written_at_s;
  uint64_t place_sum;
  uint64_t header_sum;
  uint64_t payload_sum_low;
  uint64_t payload_sum_high;
  uint64_t identity_sum_low;
  uint64_t identity_sum_high;
  uint8_t priority;
  uint8_t pinned;
  uint8_t zero[2];
  uint32_t tenant_tag;  // zero where an earlier version wrote it
};
static_assert(sizeof(IndexValue) == 104);

struct MetaValue {
  uint32_t version;
  uint32_t boot_id_bytes;
  uint64_t store_s;
  int64_t clock_ns;
  char boot_id[40];
  uint64_t checksum;
};
static_assert(sizeof(MetaValue) == 72);

uint64_t Sum64(std::span<const std::byte> bytes, uint64_t seed = 0) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

template <typename T>
std::span<const std::byte> BytesOf(const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>,
                "no padding may get into a file or a checksum");
  return std::as_bytes(std::span(&value, 1));
}

template <typename T>
T Load(std::span<const std::byte> bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  WINNOW_CHECK(bytes.size() >= sizeof(T));
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

template <size_t N>
bool AllZero(const uint8_t (&bytes)[N]) {
  return std::all_of(bytes, bytes + N, [](uint8_t b) { return b == 0; });
}

Checksum128 PayloadSum(const BlockHeader& header, std::span<const std::byte> payload_pages) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, &header, kBlockPrefixBytes);
  XXH3_128bits_update(&state, payload_pages.data(), payload_pages.size());
  const XXH128_hash_t sum = XXH3_128bits_digest(&state);
  return {sum.low64, sum.high64};
}

uint64_t PlaceSum(const BlockHeader& header) {
  return Sum64(BytesOf(header).first(kBlockPrefixBytes));
}

// Over all header pages with header_sum as zero: what stands before the field, then what follows
// it.
uint64_t HeaderSum(std::span<const std::byte> header_pages) {
  constexpr size_t at = offsetof(BlockHeader, header_sum);
  const uint64_t before = Sum64(header_pages.first(at));
  return Sum64(header_pages.subspan(at + sizeof(uint64_t)), before);
}

// The page is exactly T, with the checksum last.
template <typename T>
std::optional<T> DecodePage(std::span<const std::byte> page, uint64_t magic) {
  if (page.size() != kPageBytes) return std::nullopt;
  const T value = Load<T>(page);
  if (value.magic != magic || value.version != kFormatVersion || !AllZero(value.zero) ||
      value.checksum != Sum64(page.first(offsetof(T, checksum)))) {
    return std::nullopt;
  }
  return value;
}

template <typename T>
void EncodePage(T* value, std::span<std::byte> page) {
  WINNOW_CHECK(page.size() == kPageBytes);
  value->checksum = Sum64(BytesOf(*value).first(offsetof(T, checksum)));
  std::memcpy(page.data(), value, sizeof *value);
}

}  // namespace

Checksum128 IdentitySum(const BlockId& id) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, id.key.bytes.data(), id.key.bytes.size());
  XXH3_128bits_update(&state, id.model.data(), id.model.size());
  XXH3_128bits_update(&state, id.tenant.data(), id.tenant.size());
  XXH3_128bits_update(&state, &id.layer, sizeof id.layer);
  XXH3_128bits_update(&state, &id.token_block, sizeof id.token_block);
  const XXH128_hash_t sum = XXH3_128bits_digest(&state);
  return {sum.low64, sum.high64};
}

uint64_t PageSum(uint64_t place_sum, size_t page, std::span<const std::byte> bytes) {
  return Sum64(bytes, place_sum + page);
}

void EncodeSegmentHeader(uint64_t segment_id, uint64_t capacity_bytes, std::span<std::byte> page) {
  SegmentHeader header = {};
  header.magic = kSegmentMagic;
  header.version = kFormatVersion;
  header.page_bytes = kPageBytes;
  header.segment_id = segment_id;
  header.capacity_bytes = capacity_bytes;
  EncodePage(&header, page);
}

std::optional<SegmentInfo> DecodeSegmentHeader(std::span<const std::byte> page) {
  const auto header = DecodePage<SegmentHeader>(page, kSegmentMagic);
  if (!header || header->page_bytes != kPageBytes) return std::nullopt;
  return SegmentInfo{header->segment_id, header->capacity_bytes};
}

void EncodeSegmentFooter(const FooterInfo& info, std::span<std::byte> page) {
  SegmentFooter footer = {};
  footer.magic = kFooterMagic;
  footer.version = kFormatVersion;
  footer.block_count = info.block_count;
  footer.segment_id = info.segment_id;
  footer.end_offset = info.end_offset;
  footer.blocks_sum = info.blocks_sum;
  EncodePage(&footer, page);
}

std::optional<FooterInfo> DecodeSegmentFooter(std::span<const std::byte> page) {
  const auto footer = DecodePage<SegmentFooter>(page, kFooterMagic);
  if (!footer) return std::nullopt;
  return FooterInfo{footer->segment_id, footer->end_offset, footer->block_count,
                    footer->blocks_sum};
}

void EncodeEraseLogHeader(const EraseLogInfo& info, std::span<std::byte> page) {
  EraseLogHeader header = {};
  header.magic = kEraseLogMagic;
  header.version = kFormatVersion;
  header.record_bytes = kErasureBytes;
  header.life = info.life;
  header.hidden_below_segment = info.hidden_below_segment;
  EncodePage(&header, page);
}

std::optional<EraseLogInfo> DecodeEraseLogHeader(std::span<const std::byte> page) {
  const auto header = DecodePage<EraseLogHeader>(page, kEraseLogMagic);
  if (!header || header->record_bytes != kErasureBytes || header->life >> (64 - kLifeShift) != 0) {
    return std::nullopt;
  }
  return EraseLogInfo{header->life, header->hidden_below_segment};
}

void EncodeErasure(const Erasure& erasure, std::span<std::byte> record) {
  WINNOW_CHECK(record.size() == kErasureBytes);
  ErasureRecord out = {};
  std::memcpy(out.key, erasure.key.bytes.data(), sizeof out.key);
  out.sequence = erasure.sequence;
  out.segment_id = erasure.segment_id;
  out.checksum = Sum64(BytesOf(out).first(offsetof(ErasureRecord, checksum)));
  std::memcpy(record.data(), &out, sizeof out);
}

std::optional<Erasure> DecodeErasure(std::span<const std::byte> record) {
  if (record.size() != kErasureBytes) return std::nullopt;
  const auto in = Load<ErasureRecord>(record);
  if (in.checksum != Sum64(record.first(offsetof(ErasureRecord, checksum)))) return std::nullopt;
  Erasure erasure;
  std::memcpy(erasure.key.bytes.data(), in.key, sizeof in.key);
  erasure.sequence = in.sequence;
  erasure.segment_id = in.segment_id;
  return erasure;
}

uint64_t AddToBlocksSum(uint64_t blocks_sum, uint64_t header_sum) {
  return Sum64(BytesOf(header_sum), blocks_sum);
}

BlockRecord EncodeBlock(const BlockId& id, const BlockPlace& place, size_t payload_bytes,
                        std::span<std::byte> block) {
  WINNOW_CHECK(payload_bytes > 0 && payload_bytes <= kPayloadBytesMax);
  WINNOW_CHECK(block.size() == BlockBytesFor(payload_bytes));
  const size_t header_bytes = HeaderPagesFor(payload_bytes) * kPageBytes;
  const std::span<std::byte> pages = block.subspan(header_bytes);
  std::memset(block.data(), 0, header_bytes);
  std::memset(pages.data() + payload_bytes, 0, pages.size() - payload_bytes);

  BlockHeader header = {};
  header.magic = kBlockMagic;
  header.version = kFormatVersion;
  header.header_pages = static_cast<uint32_t>(header_bytes / kPageBytes);
  header.segment_id = place.segment_id;
  header.offset = place.offset;
  header.sequence = place.sequence;
  std::memcpy(header.key, id.key.bytes.data(), sizeof header.key);
  std::memcpy(header.model, id.model.data(), sizeof header.model);
  std::memcpy(header.tenant, id.tenant.data(), sizeof header.tenant);
  header.layer = id.layer;
  header.payload_bytes = static_cast<uint32_t>(payload_bytes);
  header.token_block = id.token_block;
  header.expires_at_s = place.expires_at_s;
  header.written_at_s = place.written_at_s;
  header.priority = place.priority;
  header.pinned = place.pinned ? 1 : 0;
  header.transient = place.transient ? 1 : 0;

  BlockRecord record;
  record.segment_id = place.segment_id;
  record.offset = place.offset;
  record.sequence = place.sequence;
  record.expires_at_s = place.expires_at_s;
  record.written_at_s = place.written_at_s;
  record.payload_bytes = header.payload_bytes;
  record.tenant_tag = TenantTag(id.tenant);
  record.priority = place.priority;
  record.pinned = place.pinned;
  record.transient = place.transient;
  record.identity_sum = IdentitySum(id);
  record.place_sum = PlaceSum(header);
  record.payload_sum = PayloadSum(header, pages);
  record.page_sums.resize(PagesFor(payload_bytes));
  for (size_t i = 0; i < record.page_sums.size(); ++i) {
    record.page_sums[i] = PageSum(record.place_sum, i, pages.subspan(i * kPageBytes, kPageBytes));
  }
  header.payload_sum_low = record.payload_sum.low;
  header.payload_sum_high = record.payload_sum.high;
  std::memcpy(block.data(), &header, sizeof header);
  std::memcpy(block.data() + sizeof header, record.page_sums.data(),
              record.page_sums.size() * sizeof(uint64_t));
  record.header_sum = HeaderSum(block.first(header_bytes));
  std::memcpy(block.data() + offsetof(BlockHeader, header_sum), &record.header_sum,
              sizeof record.header_sum);
  return record;
}

std::optional<size_t> PeekHeaderPages(std::span<const std::byte> page) {
  if (page.size() < sizeof(BlockHeader)) return std::nullopt;
  const auto header = Load<BlockHeader>(page);
  if (header.magic != kBlockMagic || header.version != kFormatVersion) return std::nullopt;
  if (header.payload_bytes == 0 || header.payload_bytes > kPayloadBytesMax) return std::nullopt;
  if (header.header_pages != HeaderPagesFor(header.payload_bytes)) return std::nullopt;
  return header.header_pages;
}

std::optional<DecodedHeader> DecodeBlockHeader(std::span<const std::byte> header_pages) {
  const auto pages = PeekHeaderPages(header_pages);
  if (!pages || header_pages.size() != *pages * kPageBytes) return std::nullopt;
  const auto header = Load<BlockHeader>(header_pages);
  if (header.header_sum != HeaderSum(header_pages)) return std::nullopt;
  // A right sum over wrong fields is a writer with other ideas of the format: not ours to guess.
  if (!AllZero(header.zero1) || !AllZero(header.zero2) || header.pinned > 1 ||
      header.transient > 1) {
    return std::nullopt;
  }

  DecodedHeader out;
  std::memcpy(out.id.key.bytes.data(), header.key, sizeof header.key);
  std::memcpy(out.id.model.data(), header.model, sizeof header.model);
  std::memcpy(out.id.tenant.data(), header.tenant, sizeof header.tenant);
  out.id.layer = header.layer;
  out.id.token_block = header.token_block;
  BlockRecord& record = out.record;
  record.segment_id = header.segment_id;
  record.offset = header.offset;
  record.sequence = header.sequence;
  record.expires_at_s = header.expires_at_s;
  record.written_at_s = header.written_at_s;
  record.payload_bytes = header.payload_bytes;
  record.priority = header.priority;
  record.pinned = header.pinned != 0;
  std::memcpy(&record.tenant_tag, header.tenant, sizeof record.tenant_tag);
  record.transient = header.transient != 0;
  record.place_sum = PlaceSum(header);
  record.header_sum = header.header_sum;
  record.payload_sum = {header.payload_sum_low, header.payload_sum_high};
  record.identity_sum = IdentitySum(out.id);
  record.page_sums.resize(record.payload_pages());
  std::memcpy(record.page_sums.data(), header_pages.data() + sizeof header,
              record.page_sums.size() * sizeof(uint64_t));
  return out;
}

std::optional<DecodedHeader> DecodeBlock(std::span<const std::byte> block) {
  const auto header_pages = PeekHeaderPages(block);
  if (!header_pages) return std::nullopt;
  const auto header = Load<BlockHeader>(block);
  if (block.size() != BlockBytesFor(header.payload_bytes)) return std::nullopt;
  auto decoded = DecodeBlockHeader(block.first(*header_pages * kPageBytes));
  if (!decoded) return std::nullopt;
  const auto payload = block.subspan(*header_pages * kPageBytes);
  if (PayloadSum(header, payload) != decoded->record.payload_sum) return std::nullopt;
  return decoded;
}

bool BlockMatches(std::span<const std::byte> block, const BlockKey& key,
                  const BlockRecord& record) {
  const auto decoded = DecodeBlock(block);
  return decoded && decoded->id.key == key && decoded->record.header_sum == record.header_sum &&
         decoded->record.payload_sum == record.payload_sum &&
         decoded->record.segment_id == record.segment_id &&
         decoded->record.offset == record.offset &&
         decoded->record.identity_sum == record.identity_sum;
}

bool PlaceFits(const BlockRecord& record, uint64_t file_bytes) {
  return record.offset >= kPageBytes && record.offset % kPageBytes == 0 &&
         record.offset <= file_bytes && record.block_bytes() <= file_bytes - record.offset;
}

std::string EncodeIndexValue(const BlockKey& key, const BlockRecord& record) {
  WINNOW_CHECK(record.page_sums.size() == record.payload_pages() && !record.transient);
  IndexValue fixed = {};
  fixed.version = kFormatVersion;
  fixed.payload_bytes = record.payload_bytes;
  fixed.segment_id = record.segment_id;
  fixed.offset = record.offset;
  fixed.sequence = record.sequence;
  fixed.expires_at_s = record.expires_at_s;
  fixed.written_at_s = record.written_at_s;
  fixed.place_sum = record.place_sum;
  fixed.header_sum = record.header_sum;
  fixed.payload_sum_low = record.payload_sum.low;
  fixed.payload_sum_high = record.payload_sum.high;
  fixed.identity_sum_low = record.identity_sum.low;
  fixed.identity_sum_high = record.identity_sum.high;
  fixed.priority = record.priority;
  fixed.pinned = record.pinned ? 1 : 0;
  fixed.tenant_tag = record.tenant_tag;
  const size_t sums_bytes = record.page_sums.size() * sizeof(uint64_t);
  std::string value(sizeof fixed + sums_bytes + sizeof(uint64_t), '\0');
  std::memcpy(value.data(), &fixed, sizeof fixed);
  std::memcpy(value.data() + sizeof fixed, record.page_sums.data(), sums_bytes);
  const auto covered = std::as_bytes(std::span(value)).first(sizeof fixed + sums_bytes);
  const uint64_t sum = Sum64(covered, Sum64(BytesOf(key.bytes)));
  std::memcpy(value.data() + sizeof fixed + sums_bytes, &sum, sizeof sum);
  return value;
}

std::optional<BlockRecord> DecodeIndexValue(const BlockKey& key, std::string_view value) {
  const auto bytes = std::as_bytes(std::span(value));
  if (bytes.size() < sizeof(IndexValue) + sizeof(uint64_t)) return std::nullopt;
  const auto fixed = Load<IndexValue>(bytes);
  if (fixed.version != kFormatVersion || fixed.payload_bytes == 0 ||
      fixed.payload_bytes > kPayloadBytesMax || fixed.pinned > 1 || !AllZero(fixed.zero)) {
    return std::nullopt;
  }
  const size_t sums_bytes = PagesFor(fixed.payload_bytes) * sizeof(uint64_t);
  if (bytes.size() != sizeof fixed + sums_bytes + sizeof(uint64_t)) return std::nullopt;
  const auto sum = Load<uint64_t>(bytes.subspan(sizeof fixed + sums_bytes));
  if (sum != Sum64(bytes.first(sizeof fixed + sums_bytes), Sum64(BytesOf(key.bytes)))) {
    return std::nullopt;
  }
  BlockRecord record;
  record.segment_id = fixed.segment_id;
  record.offset = fixed.offset;
  record.sequence = fixed.sequence;
  record.expires_at_s = fixed.expires_at_s;
  record.written_at_s = fixed.written_at_s;
  record.payload_bytes = fixed.payload_bytes;
  record.priority = fixed.priority;
  record.pinned = fixed.pinned != 0;
  record.tenant_tag = fixed.tenant_tag;
  record.place_sum = fixed.place_sum;
  record.header_sum = fixed.header_sum;
  record.payload_sum = {fixed.payload_sum_low, fixed.payload_sum_high};
  record.identity_sum = {fixed.identity_sum_low, fixed.identity_sum_high};
  record.page_sums.resize(sums_bytes / sizeof(uint64_t));
  std::memcpy(record.page_sums.data(), value.data() + sizeof fixed, sums_bytes);
  return record;
}

std::string EncodeStoreMeta(const StoreMeta& meta) {
  MetaValue value = {};
  value.version = kFormatVersion;
  value.boot_id_bytes = static_cast<uint32_t>(std::min(meta.boot_id.size(), sizeof value.boot_id));
  value.store_s = meta.store_s;
  value.clock_ns = meta.clock_ns;
  std::memcpy(value.boot_id, meta.boot_id.data(), value.boot_id_bytes);
  value.checksum = Sum64(BytesOf(value).first(offsetof(MetaValue, checksum)));
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

std::optional<StoreMeta> DecodeStoreMeta(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  if (bytes.size() != sizeof(MetaValue)) return std::nullopt;
  const auto value = Load<MetaValue>(bytes);
  if (value.version != kFormatVersion || value.boot_id_bytes > sizeof value.boot_id ||
      value.checksum != Sum64(bytes.first(offsetof(MetaValue, checksum)))) {
    return std::nullopt;
  }
  return StoreMeta{value.store_s, value.clock_ns, std::string(value.boot_id, value.boot_id_bytes)};
}

}  // namespace winnow::storage
