#include "storage/format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/unit/storage/storage_testing.h"

namespace winnow::storage {
namespace {

struct Encoded {
  BlockId id;
  BlockRecord record;
  std::vector<std::byte> bytes;
};

Encoded Encode(size_t payload_bytes, uint64_t number = 7, bool transient = false) {
  Encoded out;
  out.id = IdOf(number, 3);
  out.bytes.resize(BlockBytesFor(payload_bytes));
  const auto payload = BytesOf(out.id, payload_bytes);
  std::memcpy(out.bytes.data() + HeaderPagesFor(payload_bytes) * kPageBytes, payload.data(),
              payload_bytes);
  out.record = EncodeBlock(out.id,
                           {.segment_id = 5,
                            .offset = 12 * kPageBytes,
                            .sequence = 99,
                            .expires_at_s = 1000,
                            .priority = 2,
                            .pinned = true,
                            .transient = transient},
                           payload_bytes, out.bytes);
  return out;
}

void ExpectSame(const BlockRecord& a, const BlockRecord& b) {
  EXPECT_EQ(a.segment_id, b.segment_id);
  EXPECT_EQ(a.offset, b.offset);
  EXPECT_EQ(a.sequence, b.sequence);
  EXPECT_EQ(a.expires_at_s, b.expires_at_s);
  EXPECT_EQ(a.payload_bytes, b.payload_bytes);
  EXPECT_EQ(a.priority, b.priority);
  EXPECT_EQ(a.pinned, b.pinned);
  EXPECT_EQ(a.transient, b.transient);
  EXPECT_EQ(a.place_sum, b.place_sum);
  EXPECT_EQ(a.header_sum, b.header_sum);
  EXPECT_EQ(a.payload_sum, b.payload_sum);
  EXPECT_EQ(a.identity_sum, b.identity_sum);
  EXPECT_EQ(a.page_sums, b.page_sums);
}

TEST(Format, BlockDecodesToWhatWasEncoded) {
  // Around every boundary: one byte, a page, and where the page sums need a second header page.
  for (size_t bytes : {1ul, 4095ul, 4096ul, 4097ul, 480 * 4096ul, 480 * 4096 + 1ul, 262144ul}) {
    const Encoded block = Encode(bytes);
    const auto decoded = DecodeBlock(block.bytes);
    ASSERT_TRUE(decoded.has_value()) << bytes;
    EXPECT_EQ(decoded->id, block.id);
    ExpectSame(decoded->record, block.record);
    const size_t header_bytes = HeaderPagesFor(bytes) * kPageBytes;
    for (size_t i = 0; i < PagesFor(bytes); ++i) {
      const auto page = std::span(block.bytes).subspan(header_bytes + i * kPageBytes, kPageBytes);
      EXPECT_EQ(PageSum(block.record.place_sum, i, page), block.record.page_sums[i]);
    }
  }
  EXPECT_EQ(HeaderPagesFor(480 * 4096), 1u);
  EXPECT_EQ(HeaderPagesFor(480 * 4096 + 1), 2u);
}

// Written by a version that knows no transient blocks the byte is zero: they are found by either.
TEST(Format, ABlockSaysWhetherItIsTransient) {
  for (const bool transient : {false, true}) {
    Encoded block = Encode(5000, 7, transient);
    EXPECT_EQ(block.bytes[178], std::byte{transient});
    const auto decoded = DecodeBlock(block.bytes);
    ASSERT_TRUE(decoded.has_value());
    EXPECT_EQ(decoded->record.transient, transient);
    ExpectSame(decoded->record, block.record);
  }
}

TEST(Format, EveryFlippedBitOfABlockIsAMiss) {
  Encoded block = Encode(5000);
  for (size_t i = 0; i < block.bytes.size(); ++i) {
    const auto bit = static_cast<std::byte>(1 << (i % 8));
    block.bytes[i] ^= bit;
    ASSERT_FALSE(DecodeBlock(block.bytes).has_value()) << "byte " << i;
    block.bytes[i] ^= bit;
  }
  EXPECT_TRUE(DecodeBlock(block.bytes).has_value());
}

TEST(Format, EveryFlippedByteOfAPageIsAMiss) {
  const Encoded block = Encode(8192);
  std::vector<std::byte> page(block.bytes.begin() + 2 * kPageBytes, block.bytes.end());
  for (size_t i = 0; i < page.size(); ++i) {
    page[i] ^= std::byte{0x10};
    ASSERT_NE(PageSum(block.record.place_sum, 1, page), block.record.page_sums[1]);
    page[i] ^= std::byte{0x10};
  }
}

TEST(Format, EqualPagesOfABlockOrOfTwoPlacesHaveOtherSums) {
  const std::vector<std::byte> page(kPageBytes, std::byte{1});
  EXPECT_NE(PageSum(10, 0, page), PageSum(10, 1, page));
  EXPECT_NE(PageSum(10, 0, page), PageSum(12, 0, page));
}

TEST(Format, TruncatedBlockIsAMiss) {
  const Encoded block = Encode(9000);
  for (size_t bytes = 0; bytes < block.bytes.size(); bytes += 512) {
    EXPECT_FALSE(DecodeBlock(std::span(block.bytes).first(bytes)).has_value()) << bytes;
  }
}

TEST(Format, SegmentPagesDecodeToWhatWasEncodedAndNothingElse) {
  std::vector<std::byte> page(kPageBytes);
  EncodeSegmentHeader(42, 1 << 20, page);
  const auto header = DecodeSegmentHeader(page);
  ASSERT_TRUE(header.has_value());
  EXPECT_EQ(header->segment_id, 42u);
  EXPECT_EQ(header->capacity_bytes, 1u << 20);
  EXPECT_FALSE(DecodeSegmentFooter(page).has_value());
  for (size_t i = 0; i < kPageBytes; ++i) {
    page[i] ^= std::byte{1};
    ASSERT_FALSE(DecodeSegmentHeader(page).has_value()) << i;
    page[i] ^= std::byte{1};
  }
  EncodeSegmentFooter({.segment_id = 42, .end_offset = 8192, .block_count = 3, .blocks_sum = 9},
                      page);
  const auto footer = DecodeSegmentFooter(page);
  ASSERT_TRUE(footer.has_value());
  EXPECT_EQ(footer->end_offset, 8192u);
  EXPECT_EQ(footer->block_count, 3u);
  EXPECT_EQ(footer->blocks_sum, 9u);
  for (size_t i = 0; i < kPageBytes; ++i) {
    page[i] ^= std::byte{0x80};
    ASSERT_FALSE(DecodeSegmentFooter(page).has_value()) << i;
    page[i] ^= std::byte{0x80};
  }
}

TEST(Format, ErasuresDecodeToWhatWasEncodedAndNothingElse) {
  std::vector<std::byte> page(kPageBytes);
  EncodeEraseLogHeader({.life = 7, .hidden_below_segment = 9}, page);
  const auto header = DecodeEraseLogHeader(page);
  ASSERT_TRUE(header.has_value());
  EXPECT_EQ(header->life, 7u);
  EXPECT_EQ(header->hidden_below_segment, 9u);
  EXPECT_FALSE(DecodeEraseLogHeader(std::span(page).first(4095)).has_value());
  EXPECT_FALSE(DecodeSegmentHeader(page).has_value());
  Erasure erasure;
  erasure.key.bytes.fill(0x11);
  erasure.sequence = 3;
  erasure.segment_id = 4;
  std::vector<std::byte> record(kErasureBytes);
  EncodeErasure(erasure, record);
  const auto decoded = DecodeErasure(record);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->key, erasure.key);
  EXPECT_EQ(decoded->sequence, 3u);
  EXPECT_EQ(decoded->segment_id, 4u);
  EXPECT_FALSE(DecodeErasure(std::span(record).first(63)).has_value());
  for (std::vector<std::byte>* bytes : {&page, &record}) {
    for (std::byte& byte : *bytes) {
      byte ^= std::byte{0x20};
      ASSERT_FALSE(DecodeEraseLogHeader(page).has_value() && DecodeErasure(record).has_value());
      byte ^= std::byte{0x20};
    }
  }
}

TEST(Format, IndexValueIsRefusedWhenAnythingDiffers) {
  const Encoded block = Encode(20000);
  std::string value = EncodeIndexValue(block.id.key, block.record);
  const auto decoded = DecodeIndexValue(block.id.key, value);
  ASSERT_TRUE(decoded.has_value());
  ExpectSame(*decoded, block.record);
  EXPECT_FALSE(DecodeIndexValue(IdOf(8).key, value).has_value()) << "another's key";
  for (size_t i = 0; i < value.size(); ++i) {
    value[i] = static_cast<char>(value[i] ^ 4);
    ASSERT_FALSE(DecodeIndexValue(block.id.key, value).has_value()) << i;
    value[i] = static_cast<char>(value[i] ^ 4);
  }
  for (size_t bytes = 0; bytes < value.size(); ++bytes) {
    ASSERT_FALSE(DecodeIndexValue(block.id.key, value.substr(0, bytes)).has_value());
  }
  EXPECT_FALSE(DecodeIndexValue(block.id.key, value + '\0').has_value());
}

TEST(Format, EveryPartOfAnIdentityChangesItsSum) {
  const BlockId id = IdOf(1);
  std::vector<BlockId> others(5, id);
  others[0].key.bytes[39] ^= 1;
  others[1].model[0] ^= 1;
  others[2].tenant[31] ^= 1;
  others[3].layer += 1;
  others[4].token_block += 1;
  for (const BlockId& other : others) EXPECT_FALSE(IdentitySum(other) == IdentitySum(id));
}

// The bytes that README.md shows. A change here is a change of format and needs a new version.
TEST(Format, GoldenBytes) {
  BlockId id;
  for (size_t i = 0; i < 40; ++i) id.key.bytes[i] = static_cast<uint8_t>(i);
  id.model.fill(0xaa);
  id.tenant.fill(0xbb);
  id.layer = 3;
  id.token_block = 17;
  std::vector<std::byte> block(BlockBytesFor(6));
  ASSERT_EQ(block.size(), 2 * kPageBytes);
  std::memcpy(block.data() + kPageBytes, "winnow", 6);
  EncodeBlock(id, {.segment_id = 1, .offset = 4096, .sequence = 2, .priority = 1}, 6, block);
  const auto hex = [&](size_t at, size_t bytes) {
    std::string text;
    for (size_t i = 0; i < bytes; ++i) {
      char two[3];
      std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(block[at + i]));
      text += two;
    }
    return text;
  };
  EXPECT_EQ(hex(0, 16), "574e57424c434b310100000001000000");
  EXPECT_EQ(hex(16, 24), "010000000000000000100000000000000200000000000000");
  EXPECT_EQ(hex(144, 8), "0300000006000000");
  EXPECT_EQ(hex(152, 24), "110000000000000000000000000000000000000000000000");
  EXPECT_EQ(hex(176, 8), "0100000000000000");
  EXPECT_EQ(hex(184, 16), "dfd9ebeb0fd692c0e50dbc1503192903");
  EXPECT_EQ(hex(248, 8), "5ec3a6303d096f66");
  EXPECT_EQ(hex(256, 16), "a24e5201fd2b19cb0000000000000000");
}

TEST(Format, HostileBytesAreRefusedWithoutReadingPastThem) {
  std::mt19937 random(TestSeed(1));
  Encoded block = Encode(6000);
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(block.bytes.begin(), block.bytes.end());
    // Lengths and counts first: those are what a decoder might believe.
    const size_t at = round % 2 == 0 ? random() % 256 : random() % bytes.size();
    bytes[at] = static_cast<std::byte>(random());
    bytes[random() % 256] = static_cast<std::byte>(random());
    bytes.resize(random() % (bytes.size() + 1));
    if (bytes == block.bytes) continue;
    ASSERT_FALSE(DecodeBlock(bytes).has_value());
    PeekHeaderPages(bytes);
    DecodeBlockHeader(bytes);
    DecodeSegmentHeader(bytes);
    DecodeSegmentFooter(bytes);
    const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    ASSERT_FALSE(DecodeIndexValue(block.id.key, text).has_value());
  }
}

}  // namespace
}  // namespace winnow::storage
