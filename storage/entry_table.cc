#include "storage/entry_table.h"

#include <utility>

namespace winnow::storage {

BlockRecord Entry::CurrentRecord() const {
  BlockRecord current = *record;
  current.priority = priority;
  current.pinned = pinned;
  current.expires_at_s = expires_at_s;
  return current;
}

Entry* EntryTable::Find(const BlockKey& key) {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

const Entry* EntryTable::Find(const BlockKey& key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

Entry* EntryTable::Set(const BlockKey& key, Entry entry) {
  if (Entry* old = Find(key)) Withdraw(old);
  const uint64_t bytes = entry.record->block_bytes();
  if (entry.pinned && pinned_bytes_ + bytes > pinned_bytes_max_) entry.pinned = false;
  if (entry.pinned) pinned_bytes_ += bytes;
  log_.AddLive(entry.record->segment_id, bytes);
  if (!entry.record->transient) tenant_bytes_[entry.record->tenant_tag] += bytes;
  asides_.Add(key);
  Entry& set = entries_[key] = std::move(entry);
  EnterOrder(key, &set);
  return &set;
}

bool EntryTable::Remove(const BlockKey& key, bool* indexed) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return false;
  if (indexed != nullptr) *indexed = !it->second.record->transient;
  Withdraw(&it->second);
  entries_.erase(it);
  asides_.Remove(key);
  return true;
}

void EntryTable::Touch(Entry* entry) {
  entry->last_use = ++uses_;
  Reorder(*entry);
}

void EntryTable::Reorder(const Entry& entry) {
  order_.Update(entry.order, {.last_use = entry.last_use,
                              .expires_at_s = entry.expires_at_s,
                              .priority = entry.priority,
                              .pinned = entry.pinned,
                              .in_use = entry.in_use});
}

bool EntryTable::SetPinned(Entry* entry, bool pinned) {
  if (entry->pinned == pinned) return true;
  const uint64_t bytes = entry->record->block_bytes();
  if (pinned && pinned_bytes_ + bytes > pinned_bytes_max_) return false;
  entry->pinned = pinned;
  pinned_bytes_ = pinned ? pinned_bytes_ + bytes : pinned_bytes_ - bytes;
  Reorder(*entry);
  return true;
}

void EntryTable::EnterOrder(const BlockKey& key, Entry* entry) {
  entry->order = order_.Add(key, entry->record->segment_id, entry->record->block_bytes(), {});
  Reorder(*entry);
}

// Out of its segment's counts, the pins and the order.
void EntryTable::Withdraw(Entry* entry) {
  const uint64_t bytes = entry->record->block_bytes();
  log_.RemoveLive(entry->record->segment_id, bytes);
  if (!entry->record->transient) {
    const auto tenant = tenant_bytes_.find(entry->record->tenant_tag);
    if ((tenant->second -= bytes) == 0) tenant_bytes_.erase(tenant);
  }
  if (entry->pinned) pinned_bytes_ -= bytes;
  order_.Remove(std::exchange(entry->order, EvictionOrder::kNone));
}

}  // namespace winnow::storage
