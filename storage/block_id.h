// Whose bytes a block is: what a caller asks for and what a store must be sure of before it
// answers.
#ifndef WINNOW_STORAGE_BLOCK_ID_H_
#define WINNOW_STORAGE_BLOCK_ID_H_

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <utility>

namespace winnow::storage {

// The key that finds the bytes. Opaque to the stores: the caller puts in the SHA-256 of the chain of
// token blocks (which covers model, KV format, tenant salt, parent and token ids) and, since one
// token block has many values, which of them this is.
struct BlockKey {
  std::array<uint8_t, 40> bytes = {};

  static BlockKey Make(const std::array<uint8_t, 32>& chain, uint32_t kind, uint32_t layer) {
    BlockKey key;
    std::memcpy(key.bytes.data(), chain.data(), chain.size());
    std::memcpy(key.bytes.data() + 32, &kind, sizeof kind);
    std::memcpy(key.bytes.data() + 36, &layer, sizeof layer);
    return key;
  }
  std::array<uint8_t, 32> chain() const {
    std::array<uint8_t, 32> chain;
    std::copy_n(bytes.begin(), chain.size(), chain.begin());
    return chain;
  }
  uint32_t kind() const {
    uint32_t kind = 0;
    std::memcpy(&kind, bytes.data() + 32, sizeof kind);
    return kind;
  }

  friend bool operator==(const BlockKey&, const BlockKey&) = default;
  friend auto operator<=>(const BlockKey&, const BlockKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockKey& key) {
    return H::combine(std::move(h), key.bytes);
  }
};

// The key, and beside it every fact that must agree for the bytes to be used. All of it is inside
// the checksummed data: a block of another model, tenant, layer or place in the text is a miss even
// where its key collides.
struct BlockId {
  BlockKey key;
  std::array<uint8_t, 32> model = {};  // fingerprint: weights, dtype, KV layout, RoPE configuration
  std::array<uint8_t, 32> tenant = {};  // hash of the tenant's salt
  uint32_t layer = 0;
  // The token block's index in its text, and whatever else about its tokens the caller wants compared on a hit.
  uint64_t token_block = 0;

  friend bool operator==(const BlockId&, const BlockId&) = default;
};

// A tenant in short, for sums of bytes by tenant: two of a thousand tenants have the same one once in ten thousand
// stores, and share a sum then.
inline uint32_t TenantTag(const std::array<uint8_t, 32>& tenant) {
  uint32_t tag = 0;
  std::memcpy(&tag, tenant.data(), sizeof tag);
  return tag;
}

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_BLOCK_ID_H_
