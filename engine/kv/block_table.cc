#include "engine/kv/block_table.h"

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

void BlockTable::Seal(int32_t block, const BlockName& name, bool keep, const Retention& retention) {
  BlockRecord& record = records_[block];
  WINNOW_CHECK(!record.sealed);
  record.name = name;
  record.sealed = true;
  record.keep = keep;
  const auto [hash, is_new] = hashes_.try_emplace(name.chain);
  if (is_new) {
    hash->second.retention = retention;
    hash->second.name = name;
    num_expiring_ += retention.expires.has_value();
  } else {
    WINNOW_CHECK(hash->second.name == name);
    Raise(name.chain, retention);
  }
  ++hash->second.blocks;
  if (!keep) return;
  record.unsaved = num_layers_;
  CountComing(name.tenant, record.unsaved);
}

void BlockTable::Adopt(int32_t block, const BlockName& name, const Retention& retention) {
  Seal(block, name, /*keep=*/true, retention);
  DropUnsaved(block);
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
  DropUnsaved(block);
  records_[block].keep = false;
}

bool BlockTable::Leave(int32_t block) {
  const BlockRecord& record = records_[block];
  WINNOW_CHECK(!record.held);
  DropUnsaved(block);
  if (!record.sealed) return false;
  const auto hash = hashes_.find(record.name.chain);
  WINNOW_CHECK(hash != hashes_.end());
  if (--hash->second.blocks > 0) return false;
  num_expiring_ -= hash->second.retention.expires.has_value();
  hashes_.erase(hash);
  return !record.keep;
}

void BlockTable::Forget(int32_t block) {
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    LayerBlock& layer_block = layer_blocks_[IndexOf(layer, block)];
    WINNOW_CHECK(layer_block.frame < 0 && !layer_block.away);
    layer_block = {};
  }
  for (std::vector<int32_t>& of_index : indexed_from_) of_index[block] = num_layers_;
  const uint32_t generation = records_[block].generation + 1;
  records_[block] = {};
  records_[block].generation = generation;
}

bool BlockTable::InUse(const Digest& chain) const {
  const auto hash = hashes_.find(chain);
  return hash != hashes_.end() && hash->second.held > 0;
}

bool BlockTable::Collides(const BlockName& name) const {
  const auto hash = hashes_.find(name.chain);
  return hash != hashes_.end() && hash->second.name != name;
}

bool BlockTable::Raise(const Digest& chain, const Retention& retention) {
  const auto hash = hashes_.find(chain);
  if (hash == hashes_.end()) return false;
  Retention& current = hash->second.retention;
  num_expiring_ -= current.expires.has_value();
  const bool changed = current.Raise(retention);
  num_expiring_ += current.expires.has_value();
  return changed;
}

const Retention* BlockTable::RetentionOf(const Digest& chain) const {
  const auto hash = hashes_.find(chain);
  return hash == hashes_.end() ? nullptr : &hash->second.retention;
}

int64_t BlockTable::NumComing(const Digest& tenant) const {
  const auto coming = coming_.find(tenant);
  return coming == coming_.end() ? 0 : coming->second;
}

void BlockTable::DropUnsaved(int32_t block) {
  BlockRecord& record = records_[block];
  CountComing(record.name.tenant, -record.unsaved);
  record.unsaved = 0;
}

void BlockTable::CountComing(const Digest& tenant, int64_t count) {
  if (count == 0) return;
  const auto coming = coming_.try_emplace(tenant).first;
  coming->second += count;
  WINNOW_CHECK(coming->second >= 0);
  if (coming->second == 0) coming_.erase(coming);
}

int32_t BlockTable::AddIndex() {
  indexed_from_.emplace_back(num_blocks_, num_layers_);
  return static_cast<int32_t>(indexed_from_.size()) - 1;
}

// ---- layer blocks ----

bool BlockTable::SetAway(int64_t index, bool away) {
  LayerBlock& layer_block = layer_blocks_[index];
  if (layer_block.away == away) return false;
  layer_block.away = away;
  away_[LayerOf(index)] += away ? 1 : -1;
  return true;
}

void BlockTable::BeginSave(int64_t index) {
  layer_blocks_[index].saving = true;
  BlockRecord& record = records_[BlockOf(index)];
  if (!record.keep) return;
  // It counts as coming until EndSave.
  WINNOW_CHECK(record.unsaved > 0);
  --record.unsaved;
}

void BlockTable::EndSave(int64_t index, const Digest& tenant, bool kept, bool current, bool ok) {
  if (current) layer_blocks_[index].saving = false;
  if (!kept) return;
  BlockRecord& record = records_[BlockOf(index)];
  if (current && record.keep && !ok) {
    ++record.unsaved;  // it is tried again
  } else {
    CountComing(tenant, -1);
  }
}

bool BlockTable::MarkSaved(int64_t index) {
  layer_blocks_[index].saved = true;
  const int32_t block = BlockOf(index);
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
