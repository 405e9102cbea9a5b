// The name of a block's content: a SHA-256 chain over everything that decides its bytes
// (docs/tiers.md). Two blocks with one name have the same KV, bit for bit, in any process of the same
// model, settings, kernels and instruction set.
#ifndef WINNOW_ENGINE_KV_BLOCK_NAME_H_
#define WINNOW_ENGINE_KV_BLOCK_NAME_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "storage/block_id.h"

namespace winnow::engine {

using Digest = std::array<uint8_t, 32>;

struct BlockName {
  Digest chain = {};   // of the block and all before it
  Digest tenant = {};  // the salt of those who share it
  int32_t index = 0;   // of the block in its sequence
  // Sum of the same tokens and `how` as the chain, by another function: what is found under a chain is used only where
  // this agrees, too.
  uint32_t check = 0;

  friend bool operator==(const BlockName&, const BlockName&) = default;
};

// The next link of a chain: ChainNext, but in tests that want collisions.
using ChainFunction = Digest (*)(const Digest& parent, std::span<const int32_t> tokens,
                                 std::string_view how);

// What all blocks of a process have in common.
struct StoreNames {
  // Of weights, KV format, compute type, kernels, instruction set: whatever decides the bits of dense
  // KV.
  Digest model = {};
  // What decides, beside a policy, the bits of KV that was made under it.
  std::string retrieval;

  // `kind` 0: KV. Others: what belongs to the block beside it (engine/retrieval/index_keeper.h).
  storage::BlockId Id(const BlockName& name, uint32_t kind, int32_t layer) const {
    return {.key = storage::BlockKey::Make(name.chain, kind, static_cast<uint32_t>(layer)),
            .model = model,
            .tenant = name.tenant,
            .layer = static_cast<uint32_t>(layer),
            .token_block = static_cast<uint64_t>(name.index) | uint64_t{name.check} << 32};
  }
};

Digest Sha256(std::string_view bytes);

// Salts: requests of the same one share KV. A tenant's name, whatever its bytes, gives no other kind's salt, because
// the three are made by different functions or of different words.
Digest TenantSalt(std::string_view tenant);
Digest DomainSalt(std::string_view domain);  // of a trust domain's tenants
Digest CallSalt(uint64_t call);              // of the choices of one call, and of nobody else

// Beginning of a chain: model and salt.
Digest ChainRoot(const Digest& model, const Digest& salt);
// One block more. `how` is empty where all of the block's tokens attended densely, as those of the
// blocks before; else it says how they attended (policy, from which position).
Digest ChainNext(const Digest& parent, std::span<const int32_t> tokens, std::string_view how);

// BlockName::check of a block whose parent has `parent`, or 0 where there is none.
uint32_t CheckNext(uint32_t parent, std::span<const int32_t> tokens, std::string_view how);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_BLOCK_NAME_H_
