#include "engine/retrieval/read_counter.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "engine/base/status_macros.h"
#include "engine/retrieval/scratch.h"

namespace winnow::engine {

using kernels::RetrievalQuery;
using kernels::Selection;

absl::Status ReadCounter::Allocate() {
  pending_.reserve(size_t{kCallSlots} * kMaxCallQueries);
  if (memory_.places().shared_kv() == nullptr) return absl::OkStatus();
  const auto rows = static_cast<size_t>(memory_.places().shared_batch_tokens());
  WINNOW_ASSIGN_OR_RETURN(reads_, AllocatePool(backend_, rows * sizeof(kernels::SharedKvReads),
                                               "counts of rows", /*shared=*/true));
  return absl::OkStatus();
}

void ReadCounter::AddSelected(RetrievalCounts& tally, uint64_t kept, int32_t candidates) const {
  const uint64_t candidate_rows = uint64_t{1} * shape_.kv_heads * candidates;
  tally.selected_rows += kept;
  tally.candidate_rows += candidate_rows;
  // CountRows takes this row for a dense one.
  tally.rows_read -= candidate_rows - kept;
}

void ReadCounter::AddTails(RetrievalCounts& tally, const StateMasses& masses) const {
  for (int32_t head = 0; head < shape_.num_heads; ++head) {
    ++tally.tail_estimates;
    tally.tail_mass += -std::expm1(masses.before[head] - masses.after[head]);
  }
}

void ReadCounter::Defer(const QueryCall& call, const Selection& selected,
                        const StateMasses& masses) {
  for (size_t i = 0; i < call.size(); ++i) {
    const RetrievalQuery& query = call.queries[i];
    const auto row = static_cast<int64_t>(i);
    pending_.push_back(
        {&call.rows[i]->state(), query.position, query.mid.size(), &selected.count(row, 0)});
    if (masses.before != nullptr) pending_.back().masses = masses.From(row * shape_.num_heads);
  }
  if (++slot_ == kCallSlots) CountPending();
}

void ReadCounter::Count(const QueryCall& call, const Selection& selected,
                        std::span<const Fetcher::TierRows> tier_rows,
                        std::span<const Fetcher::TierRows> anchors, Fetcher::Entries entries) {
  for (size_t i = 0; i < call.size(); ++i) {
    Fetcher::TierRows rows = tier_rows[i];
    if (!anchors.empty() && entries == Fetcher::Entries::kChosen) {
      rows.cached += anchors[i].cached;
      rows.stored += anchors[i].stored;
      rows.in_frames += anchors[i].in_frames;
    } else if (!anchors.empty()) {
      // Entries of the anchors were read once, and found in the cache the second time.
      const uint64_t stored = std::min(anchors[i].stored, rows.cached);
      rows.cached -= stored;
      rows.stored += stored;
    }
    if (memory_.places().IsShared(call.layer)) {
      shared_reads_.in_place += rows.in_frames;
      memory_.CountRead(call.rows[i]->index, rows.in_frames * shape_.layout.RowBytes(),
                        /*from_disk=*/false);
    }
    RetrievalState& state = call.rows[i]->state();
    const RetrievalQuery& query = call.queries[i];
    if (query.position < state.counted()) continue;
    uint64_t kept = 0;
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      kept += selected.count(static_cast<int64_t>(i), head);
    }
    state.tally().rows_cached += rows.cached;
    state.tally().rows_stored += rows.stored;
    AddSelected(state.tally(), kept, query.mid.size());
  }
}

void ReadCounter::CountTails(const QueryCall& call, const StateMasses& masses) {
  for (size_t i = 0; i < call.size(); ++i) {
    RetrievalState& state = call.rows[i]->state();
    if (call.queries[i].position < state.counted()) continue;
    AddTails(state.tally(), masses.From(static_cast<int64_t>(i) * shape_.num_heads));
  }
}

void ReadCounter::CountPending() {
  // If the device has failed, so has the pass, and nobody asks what it read.
  const bool done = pending_.empty() || backend_.Synchronize();
  for (const Pending& pending : pending_) {
    RetrievalState& state = *pending.state;
    if (!done || pending.position < state.counted()) continue;
    uint64_t kept = 0;
    for (int32_t head = 0; head < shape_.kv_heads; ++head) kept += pending.counts[head];
    AddSelected(state.tally(), kept, pending.candidates);
    if (pending.masses.before != nullptr) AddTails(state.tally(), pending.masses);
  }
  pending_.clear();
  slot_ = 0;
}

void ReadCounter::CountSharedReads(std::span<const PassRows> pass) {
  const PassRows& last = pass.back();
  const std::span reads(static_cast<kernels::SharedKvReads*>(reads_.data()),
                        static_cast<size_t>(last.first_row) + last.size());
  memory_.places().shared_kv()->TakeReads(reads);
  if (!backend_.Synchronize()) return;
  for (const PassRows& rows : pass) {
    RetrievalState& state = rows.state();
    for (int32_t row = rows.first_retrieving; row < rows.last_retrieving; ++row) {
      const kernels::SharedKvReads& of_row = reads[rows.first_row + row];
      const uint64_t stored = uint64_t{of_row.fetched} + of_row.in_place;
      shared_reads_.cached += of_row.cached;
      shared_reads_.fetched += of_row.fetched;
      shared_reads_.in_place += of_row.in_place;
      memory_.CountRead(rows.index, stored * shape_.layout.RowBytes(), /*from_disk=*/false);
      if (rows.chunk->position + row < state.counted()) continue;
      state.tally().rows_cached += of_row.cached;
      state.tally().rows_stored += stored;
    }
  }
}

void ReadCounter::CountRows(const PassRows& rows) {
  const SequenceChunk& chunk = *rows.chunk;
  RetrievalState& state = rows.state();
  RetrievalCounts& tally = state.tally();
  const int32_t end = chunk.position + rows.size();
  for (int32_t position = std::max({chunk.position, chunk.retrieve_from, state.counted()});
       position < end; ++position) {
    // Nobody attends in the last layer but who wants logits.
    const bool has_logits = position >= end - chunk.num_logits;
    const std::span<const LayerSpec> layers(shape_.layers);
    const uint64_t seen = KvRowsSeen(has_logits ? layers : layers.first(layers.size() - 1),
                                     shape_.kv_heads, position);
    tally.rows_dense += seen;
    tally.rows_read += seen;
    const int32_t steps = rows.floor.Taken(position);
    tally.widened_tokens += steps == 1 || steps == 2 ? 1 : 0;
    tally.floor_dense_tokens += steps == 3 ? 1 : 0;
  }
  state.CountedUpTo(end);
}

void ReadCounter::EndPass(std::span<const PassRows> pass, bool any_retrieves) {
  if (memory_.places().shared_kv() != nullptr && any_retrieves) CountSharedReads(pass);
  CountPending();
  for (const PassRows& rows : pass) CountRows(rows);
}

}  // namespace winnow::engine
