#include "storage/committer.h"

#include <cerrno>
#include <string>

namespace winnow::storage {
namespace {

// An index that fails is not asked again at once, because each error counts against the tier.
constexpr int64_t kRepairPauseNs = int64_t{1} * 1'000'000'000;

}  // namespace

void Committer::Submit(IndexBatch batch, Commit commit) {
  batch.tag = next_commit_++;
  AddRepairs(&batch, &commit);
  batch.meta = EncodeStoreMeta({env_.StoreSeconds(), env_.NowNs(), env_.clock().BootId()});
  commit.deadline_ns = env_.WriteDeadline();
  commits_[batch.tag] = std::move(commit);
  writer_->Submit(std::move(batch));
}

void Committer::CommitBlocks(const std::vector<Write>& writes) {
  IndexBatch batch;
  Commit commit;
  for (const Write& write : writes) {
    batch.puts.emplace_back(write.key, EncodeIndexValue(write.key, *write.record));
    commit.puts.push_back({write.operation, write.key, write.segment, write.move});
    if (!write.move) committing_.insert(write.key);
  }
  env_.Passed("put.before_index");
  Submit(std::move(batch), std::move(commit));
  env_.Passed("put.index_submitted");
}

void Committer::Erase(uint64_t tag, const BlockKey& key, Reason reason) {
  IndexBatch batch;
  batch.erases.push_back(key);
  batch.erasures.push_back({key, log_.TakeSequence(), log_.next_segment()});
  Commit commit;
  commit.erases.emplace_back(tag, reason);
  Submit(std::move(batch), std::move(commit));
  env_.Passed("erase.submitted");
}

void Committer::Remove(const BlockKey& key, std::vector<BlockKey>* erased) {
  bool indexed = false;
  if (!table_.Remove(key, &indexed)) return;
  // While a newer block of the key is on its way, an erasure would be that one's.
  if (indexed && !IsCommitting(key)) erased->push_back(key);
}

void Committer::Forget(std::vector<BlockKey> keys) {
  if (keys.empty()) return;
  IndexBatch batch;
  batch.erases = std::move(keys);
  Submit(std::move(batch), {});
}

void Committer::Discard(const BlockKey& key) {
  std::vector<BlockKey> erased;
  Remove(key, &erased);
  Forget(std::move(erased));
}

void Committer::Save(const BlockKey& key, Entry* entry) {
  // The place that the entry has now must not get behind the one that the index is being told of.
  entry->save_later = entry->moving || IsCommitting(key);
  if (entry->save_later || entry->record->transient) return;
  IndexBatch batch;
  batch.puts.emplace_back(key, EncodeIndexValue(key, entry->CurrentRecord()));
  Submit(std::move(batch), {});
}

void Committer::SaveLater(const BlockKey& key) {
  Entry* entry = table_.Find(key);
  if (entry != nullptr && entry->save_later) Save(key, entry);
}

void Committer::Poll() {
  results_.clear();
  writer_->Poll(&results_);
  for (const IndexResult& result : results_) OnResult(result);
}

void Committer::OnResult(const IndexResult& result) {
  const Commit commit = std::move(commits_.at(result.tag));
  commits_.erase(result.tag);
  const bool ok = result.status.ok();
  if (!ok) {
    env_.Log(std::string(result.status.message()));
    log_.NoteWriteError(absl::IsResourceExhausted(result.status) ? ENOSPC : EIO);
  }
  EndRepairs(commit, result.tag, ok);
  for (const Commit::Put& put : commit.puts) {
    if (!put.move) committing_.erase(put.key);
    if (ok) {
      listener_.OnCommitted(put.operation);
    } else {
      AddDoubt(put);
      listener_.OnCommitFailed(put.operation);
    }
  }
  if (!commit.puts.empty()) env_.Passed("put.published");
  for (const auto& [tag, reason] : commit.erases) {
    listener_.OnErased(tag, ok ? reason : Reason::kIoError);
  }
}

// A block that is answered here and committed later is found all the same (or stays erased).
void Committer::AnswerLate() {
  const int64_t now_ns = env_.NowNs();
  for (auto& [tag, commit] : commits_) {
    if (now_ns < commit.deadline_ns) return;
    if (!std::exchange(commit.late, true)) log_.NoteWriteError(ETIMEDOUT);
    for (const Commit::Put& put : commit.puts) listener_.OnCommitLate(put.operation);
    for (const auto& [erase_tag, reason] : std::exchange(commit.erases, {})) {
      listener_.OnErased(erase_tag, Reason::kIoError);
    }
  }
}

// ---- after a failure ----

void Committer::AddDoubt(const Commit::Put& put) {
  Doubt& doubt = doubts_[put.key];
  doubt.segments.push_back(put.segment);
  doubt.repair = 0;
  log_.AddDoubt(put.segment);
}

void Committer::AddRepairs(IndexBatch* batch, Commit* commit) {
  for (auto& [key, doubt] : doubts_) {
    const Entry* entry = table_.Find(key);
    // A place that the index is being told of meanwhile must not get behind this.
    if (doubt.repair != 0 || IsCommitting(key) || (entry != nullptr && entry->moving)) continue;
    if (entry != nullptr && !entry->record->transient) {
      batch->puts.emplace_back(key, EncodeIndexValue(key, entry->CurrentRecord()));
    } else {
      batch->erases.push_back(key);
    }
    doubt.repair = batch->tag;
    commit->repairs.push_back(key);
  }
}

void Committer::EndRepairs(const Commit& commit, uint64_t tag, bool ok) {
  for (const BlockKey& key : commit.repairs) {
    const auto it = doubts_.find(key);
    if (it == doubts_.end() || it->second.repair != tag) continue;  // in doubt again since
    it->second.repair = 0;
    if (!ok) {
      repair_at_ns_ = env_.NowNs() + kRepairPauseNs;
      continue;
    }
    for (Segment* segment : it->second.segments) log_.RemoveDoubt(segment);
    doubts_.erase(it);
  }
}

void Committer::RepairIfDue() {
  if (doubts_.empty() || in_flight() > 0 || env_.health.state() != TierState::kOk) return;
  if (env_.NowNs() >= repair_at_ns_) Submit({}, {});
}

}  // namespace winnow::storage
