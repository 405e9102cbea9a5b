#include "engine/kv/block_table.h"

#include <algorithm>

#include "kernels/check.h"

namespace winnow::engine {

BlockTable::BlockTable(int32_t num_layers, int32_t num_blocks)
    : num_layers_(num_layers),
      num_blocks_(num_blocks),
      records_(num_blocks),
      layer_blocks_(int64_t{num_layers} * num_blocks),
      away_(num_layers) {}

bool BlockTable::AnyLost(int32_t block) const {
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    if (lost(layer, block)) return true;
  }
  return false;
}

// ---- lives ----

void BlockTable::Seal(int32_t block, const BlockName& name, bool keep) {
  BlockRecord& record = records_[block];
  WINNOW_CHECK(!record.sealed);
  record.name = name;
  record.sealed = true;
  record.keep = keep;
  ++hashes_[name.chain].blocks;
  if (!keep) return;
  record.unsaved = num_layers_;
  unsaved_[name.tenant] += record.unsaved;
}

void BlockTable::Adopt(int32_t block, const BlockName& name) {
  Seal(block, name, /*keep=*/true);
  CountKept(block, num_layers_);
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    LayerBlock& layer_block = layer_blocks_[IndexOf(layer, block)];
    WINNOW_CHECK(layer_block.frame < 0 && !layer_block.away);
    layer_block.saved = true;
  }
}

bool BlockTable::SetHeld(int32_t block, bool held) {
  BlockRecord& record = records_[block];
  if (!record.sealed || record.held == held) return false;
  record.held = held;
  int32_t& holders = hashes_.at(record.name.chain).held;
  const bool was_in_use = holders > 0;
  holders += held ? 1 : -1;
  return (holders > 0) != was_in_use;
}

void BlockTable::Distrust(int32_t block) {
  CountKept(block, records_[block].unsaved);
  records_[block].keep = false;
}

bool BlockTable::Leave(int32_t block) {
  const BlockRecord& record = records_[block];
  WINNOW_CHECK(!record.held);
  CountKept(block, record.unsaved);
  if (!record.sealed) return false;
  const auto hash = hashes_.find(record.name.chain);
  WINNOW_CHECK(hash != hashes_.end());
  if (--hash->second.blocks > 0) return false;
  hashes_.erase(hash);
  return !record.keep;
}

void BlockTable::Forget(int32_t block) {
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    LayerBlock& layer_block = layer_blocks_[IndexOf(layer, block)];
    WINNOW_CHECK(layer_block.frame < 0 && !layer_block.away);
    layer_block = {};
  }
  const uint32_t generation = records_[block].generation + 1;
  records_[block] = {};
  records_[block].generation = generation;
}

bool BlockTable::InUse(const Digest& chain) const {
  const auto hash = hashes_.find(chain);
  return hash != hashes_.end() && hash->second.held > 0;
}

int64_t BlockTable::NumUnsaved(const Digest& tenant) const {
  const auto unsaved = unsaved_.find(tenant);
  return unsaved == unsaved_.end() ? 0 : unsaved->second;
}

void BlockTable::CountKept(int32_t block, int32_t count) {
  BlockRecord& record = records_[block];
  count = std::min(count, record.unsaved);
  if (count == 0) return;
  record.unsaved -= count;
  const auto tenant = unsaved_.find(record.name.tenant);
  if ((tenant->second -= count) == 0) unsaved_.erase(tenant);
}

// ---- layer blocks ----

bool BlockTable::SetAway(int64_t index, bool away) {
  LayerBlock& layer_block = layer_blocks_[index];
  if (layer_block.away == away) return false;
  layer_block.away = away;
  away_[LayerOf(index)] += away ? 1 : -1;
  return true;
}

bool BlockTable::MarkSaved(int64_t index) {
  LayerBlock& layer_block = layer_blocks_[index];
  layer_block.saving = false;
  layer_block.saved = true;
  const int32_t block = BlockOf(index);
  CountKept(block, 1);
  if (!records_[block].keep) return false;
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    if (!at(layer, block).saved) return false;
  }
  return true;
}

bool BlockTable::MarkLost(int64_t index) {
  LayerBlock& layer_block = layer_blocks_[index];
  if (layer_block.lost) return false;
  layer_block.saved = false;
  layer_block.lost = true;
  return true;
}

}  // namespace winnow::engine
