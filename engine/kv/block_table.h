// One record for each block: its hash, who holds it, whether it is to be kept, which layers are in which index, and for
// each layer where its KV is. Every other part of engine/kv reads and changes blocks here, so that a question about a
// block has one place to look.
//
//   empty ── Seal ───▶ sealed ── Forget ──▶ empty, with the next generation
//        └── Adopt ──────▲
//
// A sealed block is full and is not written again. Blocks with one hash share what the store has of it.
// Nothing here moves bytes. Threads: the engine thread only.
#ifndef WINNOW_ENGINE_KV_BLOCK_TABLE_H_
#define WINNOW_ENGINE_KV_BLOCK_TABLE_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/kv/block_name.h"
#include "engine/kv/retention.h"

namespace winnow::engine {

// A block in one layer.
struct LayerBlock {
  int32_t frame = -1;   // paged: the frame that holds it; -1: none
  bool saved = false;   // the store has it
  bool saving = false;  // the store has been asked to take it
  bool lost = false;    // the store had it, and did not give it back
  bool away = false;    // mirrored: its content is in the store, and not wholly in its place
};

struct BlockRecord {
  BlockName name = {};
  uint32_t generation = 0;  // moves on when the block is given to other content
  bool sealed = false;
  bool keep = false;    // the store has it for later requests, and leaves it there
  bool held = false;    // a sequence has it in its table
  int32_t unsaved = 0;  // layer blocks that are to be kept and not given to the store yet

  // The allocation, which BlockPool decides.
  int32_t holders = 0;  // sequences that have it in their tables
  bool cached = false;  // it can be found by its hash
  bool pinned = false;  // of those that are cached, it leaves last
  uint8_t priority =
      kPriorityNormal;  // of those that are cached and not pinned, lower ones leave first
  int32_t before = -1, after = -1;  // neighbours in its list of idle blocks
};

class BlockTable {
 public:
  BlockTable(int32_t num_layers, int32_t num_blocks);

  int32_t num_layers() const { return num_layers_; }
  int32_t num_blocks() const { return num_blocks_; }
  int64_t num_layer_blocks() const { return static_cast<int64_t>(layer_blocks_.size()); }
  int64_t IndexOf(int32_t layer, int32_t block) const {
    return int64_t{layer} * num_blocks_ + block;
  }
  int32_t LayerOf(int64_t index) const { return static_cast<int32_t>(index / num_blocks_); }
  int32_t BlockOf(int64_t index) const { return static_cast<int32_t>(index % num_blocks_); }

  const BlockRecord& operator[](int32_t block) const { return records_[block]; }
  const LayerBlock& at(int64_t index) const { return layer_blocks_[index]; }
  const LayerBlock& at(int32_t layer, int32_t block) const {
    return layer_blocks_[IndexOf(layer, block)];
  }
  bool lost(int32_t layer, int32_t block) const { return at(layer, block).lost; }
  // Whether a layer block of the block is lost.
  bool AnyLost(int32_t block) const;
  // Layer blocks of the layer that are away.
  int64_t num_away(int32_t layer) const { return away_[layer]; }

  // ---- lives ----

  // The block is full: it is held, and with `keep` the store is to have it for later requests. Blocks with its hash are
  // kept as Raise has it. REQUIRES: not sealed, and no collision.
  void Seal(int32_t block, const BlockName& name, bool keep, const Retention& retention = {});
  // The block's content is what the store has under the name. REQUIRES: not sealed.
  void Adopt(int32_t block, const BlockName& name, const Retention& retention = {});
  // Says whether a sequence has the block in its table. True: it is sealed, and with it the blocks of its
  // hash became held, or the last of them is held no more.
  bool SetHeld(int32_t block, bool held);
  // The store's copy of the block may be damaged: it is not kept when the block is forgotten.
  void Distrust(int32_t block);
  // The block is no longer one of those with its hash. True: it was the last of them, and nothing of it is
  // to be kept. REQUIRES: not held. Forget follows.
  bool Leave(int32_t block);
  // Empties the record, but for the next generation. REQUIRES: nothing is away and no frame held.
  void Forget(int32_t block);
  // Whether a block with this hash is sealed, and whether one is held.
  bool Knows(const Digest& chain) const { return hashes_.contains(chain); }
  bool InUse(const Digest& chain) const;
  // Whether what is sealed under the name's hash has another name.
  bool Collides(const BlockName& name) const;
  // Content that is cached under the hash is kept as long as this says, too. True: that is longer than before. False also where
  // no block with the hash is sealed.
  bool Raise(const Digest& chain, const Retention& retention);
  // Null: no block with the hash is sealed. Valid until the next change of the table.
  const Retention* RetentionOf(const Digest& chain) const;
  // Whether any block expires.
  bool any_expires() const { return num_expiring_ > 0; }
  // Layer blocks of the tenant that are to be kept and that the store does not have yet, those of forgotten blocks whose
  // save has no answer included.
  int64_t NumComing(const Digest& tenant) const;

  // ---- layer blocks ----

  void SetFrame(int64_t index, int32_t frame) { layer_blocks_[index].frame = frame; }
  // Whether its state changed.
  bool SetAway(int64_t index, bool away);
  // The store is asked to take it. EndSave follows, whatever becomes of the block.
  void BeginSave(int64_t index);
  // The store has answered. `kept`: the block was to be kept when it was asked, in the name of `tenant`. `current`: the
  // block has not been forgotten meanwhile.
  void EndSave(int64_t index, const Digest& tenant, bool kept, bool current, bool ok);
  // The store has it. True: it is to be kept, and so the store has all of its block.
  bool MarkSaved(int64_t index);
  // False: it was lost before.
  bool MarkLost(int64_t index);

  // ---- indexes ----

  // Numbers one more index beside the KV, which has nothing yet.
  int32_t AddIndex();
  // The first layer that has all of the block in this index, as have those after it; num_layers(): none has.
  int32_t IndexedFrom(int32_t index, int32_t block) const { return indexed_from_[index][block]; }
  // The index has all of the block from the layer on, until the block is forgotten.
  void SetIndexedFrom(int32_t index, int32_t block, int32_t layer) {
    indexed_from_[index][block] = layer;
  }

  // ---- allocation, for BlockPool ----

  BlockRecord& allocation(int32_t block) { return records_[block]; }
  // Gives a block that is not sealed a hash.
  void SetHash(int32_t block, const Digest& chain) { records_[block].name.chain = chain; }

 private:
  struct Hash {
    int32_t blocks = 0, held = 0;
    BlockName name;  // of them all
    Retention retention;
  };
  // The layer blocks of the block that the store was not given are no longer on their way to be kept.
  void DropUnsaved(int32_t block);
  void CountComing(const Digest& tenant, int64_t count);

  const int32_t num_layers_, num_blocks_;
  std::vector<BlockRecord> records_;
  std::vector<LayerBlock> layer_blocks_;            // [layers][blocks]
  std::vector<int64_t> away_;                       // [layers]
  std::vector<std::vector<int32_t>> indexed_from_;  // [indexes][blocks]
  absl::flat_hash_map<Digest, Hash> hashes_;
  int64_t num_expiring_ = 0;                     // of them
  absl::flat_hash_map<Digest, int64_t> coming_;  // layer blocks by tenant; none is zero
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_BLOCK_TABLE_H_
