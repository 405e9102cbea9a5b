// What the index is told: batches, their answers, and what is set right after one that failed.
#include <cerrno>
#include <utility>

#include "storage/disk_store.h"

namespace winnow::storage {
namespace {

// An index that fails is not asked again at once: each error counts against the tier.
constexpr int64_t kRepairPauseNs = int64_t{1} * 1'000'000'000;

}  // namespace

void DiskStore::SubmitBatch(IndexBatch batch, Commit commit) {
  batch.tag = next_commit_++;
  AddRepairs(&batch, &commit);
  batch.meta = EncodeStoreMeta({StoreSeconds(), clock_->NowNs(), clock_->BootId()});
  commit.deadline_ns = WriteDeadline();
  commits_[batch.tag] = std::move(commit);
  writer_->Submit(std::move(batch));
}

void DiskStore::OnIndex(const IndexResult& result) {
  const Commit commit = std::move(commits_.at(result.tag));
  commits_.erase(result.tag);
  if (!result.status.ok()) {
    Log(std::string(result.status.message()));
    NoteWriteError(absl::IsResourceExhausted(result.status) ? ENOSPC : EIO);
  }
  EndRepairs(commit, result.tag, result.status.ok());
  for (uint32_t index : commit.puts) {
    if (result.status.ok()) {
      Publish(index);
    } else {
      AddDoubt(ops_[index]);
      FailPut(index, Reason::kIoError);
    }
  }
  if (!commit.puts.empty()) Passed("put.published");
  for (const auto& [tag, reason] : commit.erases) {
    --in_flight_;
    Complete(tag, Operation::kErase, result.status.ok() ? reason : Reason::kIoError);
  }
}

// The index hangs: who waits for it is told in time. What is answered here and committed later is
// found all the same (or stays erased).
void DiskStore::AnswerLateCommits() {
  const int64_t now_ns = clock_->NowNs();
  for (auto& [tag, commit] : commits_) {
    if (now_ns < commit.deadline_ns) return;
    if (!std::exchange(commit.late, true)) NoteWriteError(ETIMEDOUT);
    for (uint32_t index : commit.puts) Answer(&ops_[index], Reason::kLate);
    for (const auto& [erase_tag, reason] : std::exchange(commit.erases, {})) {
      --in_flight_;
      Complete(erase_tag, Operation::kErase, Reason::kIoError);
    }
  }
}

// ---- single entries ----

// Whether the index is being told of a newer block of this key.
bool DiskStore::IsCommitting(const BlockKey& key) const {
  const auto it = putting_.find(key);
  return it != putting_.end() && ops_[it->second].committing && !ops_[it->second].cancelled;
}

// Priority, pin and expiry as they are now; nobody waits for it.
void DiskStore::SaveEntry(const BlockKey& key, Entry* entry) {
  // The place that the entry has now must not get behind the one that the index is being told of.
  entry->save_later = entry->moving || IsCommitting(key);
  if (entry->save_later || entry->record->transient) return;
  IndexBatch batch;
  batch.puts.emplace_back(key, EncodeIndexValue(key, CurrentRecord(*entry)));
  SubmitBatch(std::move(batch), {});
}

BlockRecord DiskStore::CurrentRecord(const Entry& entry) const {
  BlockRecord record = *entry.record;
  record.priority = entry.priority;
  record.pinned = entry.pinned;
  record.expires_at_s = entry.expires_at_s;
  return record;
}

// What waited for a batch that failed.
void DiskStore::SaveLater(const BlockKey& key) {
  const auto it = entries_.find(key);
  if (it != entries_.end() && it->second.save_later) SaveEntry(key, &it->second);
}

// ---- after a failure ----

// The batch that was to tell the index of the operation's place has failed.
void DiskStore::AddDoubt(const Op& op) {
  Doubt& doubt = doubts_[op.id.key];
  doubt.segments.push_back(op.segment);
  doubt.repair = 0;
  ++op.segment->doubts;
}

void DiskStore::AddRepairs(IndexBatch* batch, Commit* commit) {
  for (auto& [key, doubt] : doubts_) {
    const auto it = entries_.find(key);
    const bool there = it != entries_.end();
    // What the index is being told of meanwhile must not get behind this.
    if (doubt.repair != 0 || IsCommitting(key) || (there && it->second.moving)) continue;
    if (there && !it->second.record->transient) {
      batch->puts.emplace_back(key, EncodeIndexValue(key, CurrentRecord(it->second)));
    } else {
      batch->erases.push_back(key);
    }
    doubt.repair = batch->tag;
    commit->repairs.push_back(key);
  }
}

void DiskStore::EndRepairs(const Commit& commit, uint64_t tag, bool ok) {
  for (const BlockKey& key : commit.repairs) {
    const auto it = doubts_.find(key);
    if (it == doubts_.end() || it->second.repair != tag) continue;  // in doubt again since
    it->second.repair = 0;
    if (!ok) {
      repair_at_ns_ = clock_->NowNs() + kRepairPauseNs;
      continue;
    }
    for (Segment* segment : it->second.segments) {
      --segment->doubts;
      MarkBusy(segment);
    }
    doubts_.erase(it);
  }
}

// Where no other batch comes by that could tell it.
void DiskStore::RepairIndex() {
  if (doubts_.empty() || writer_->in_flight() > 0 || health_.state() != TierState::kOk) return;
  if (clock_->NowNs() >= repair_at_ns_) SubmitBatch({}, {});
}

}  // namespace winnow::storage
