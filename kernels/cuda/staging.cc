#include "kernels/cuda/staging.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace winnow::kernels::cuda {

Staging::Staging(int32_t block_tokens, int32_t room, int32_t num_pools, int32_t num_blocks)
    : block_tokens_(block_tokens),
      num_pools_(num_pools),
      room_(static_cast<size_t>(room)),
      windows_(static_cast<size_t>(num_pools)),
      places_(static_cast<size_t>(num_blocks)) {}

bool Staging::Attend(StagingStreams& streams, int32_t pool,
                     std::span<const AttentionChunk> chunks) {
  if (!chunks.empty()) windows_[static_cast<size_t>(pool)] = chunks[0].window;
  for (size_t first = 0; first < chunks.size();) {
    PlanArea(pool, chunks, first, /*old_only=*/false, blocks_);
    std::swap(attended_, planned_);
    first += attended_.chunks.size();
    // What is on its way to this area may be for another call than this one.
    area_ = 1 - area_;
    if (!streams.WaitForAhead()) return false;
    PlanMoves(blocks_, ahead_pool_ == pool ? ahead_blocks_ : std::span<const int32_t>());
    if (!moves_.empty() && !streams.Bring(pool, moves_, area_)) return false;
    if (!BringAhead(streams, pool, chunks, first)) return false;
    if (!streams.Attend(attended_.chunks, area_)) return false;
  }
  return true;
}

bool Staging::BringAhead(StagingStreams& streams, int32_t pool,
                         std::span<const AttentionChunk> chunks, size_t next) {
  ahead_pool_ = kNobody;
  const bool same_pool = next < chunks.size();
  const int32_t of_next = same_pool ? pool : pool + 1;
  if (of_next == num_pools_) return true;
  PlanArea(of_next, chunks, same_pool ? next : 0, /*old_only=*/!same_pool, ahead_blocks_);
  PlanMoves(ahead_blocks_, {});
  if (!moves_.empty() && !streams.BringAhead(of_next, moves_, 1 - area_)) return false;
  ahead_pool_ = of_next;
  return true;
}

void Staging::Written(int32_t pool, std::span<const AttentionChunk> chunks) {
  if (ahead_pool_ != pool) return;
  written_.clear();
  for (const AttentionChunk& chunk : chunks) {
    const int32_t first = chunk.position / block_tokens_;
    const int32_t last = (chunk.position + chunk.num_tokens - 1) / block_tokens_;
    for (int32_t i = first; i <= last; ++i) written_.push_back(chunk.block_table[i]);
  }
  std::sort(written_.begin(), written_.end());
  for (int32_t& block : ahead_blocks_) {
    if (std::binary_search(written_.begin(), written_.end(), block)) block = -1;
  }
}

void Staging::PlanArea(int32_t pool, std::span<const AttentionChunk> chunks, size_t first,
                       bool old_only, std::vector<int32_t>& blocks) {
  const auto blocks_of = [this](const AttentionChunk& chunk) {
    const int64_t seen = int64_t{chunk.position} + chunk.num_tokens;
    return static_cast<size_t>((seen + block_tokens_ - 1) / block_tokens_);
  };
  blocks.clear();
  planned_.chunks.clear();
  ++plan_;
  size_t entries = 0;
  for (const AttentionChunk& chunk : chunks.subspan(first)) entries += blocks_of(chunk);
  planned_.tables.resize(entries);  // no table moves any more
  size_t next_table = 0;
  for (AttentionChunk chunk : chunks.subspan(first)) {
    const size_t count = blocks_of(chunk), taken = blocks.size();
    const auto old = static_cast<size_t>(chunk.position / block_tokens_);
    chunk.window = windows_[static_cast<size_t>(pool)];
    const auto first_seen = static_cast<size_t>(chunk.FirstRead() / block_tokens_);
    const std::span<int32_t> table = std::span(planned_.tables).subspan(next_table, count);
    WINNOW_CHECK(count <= room_);
    std::fill_n(table.begin(), first_seen, 0);  // nobody looks there
    for (size_t i = first_seen; i < count; ++i) {
      const int32_t block = chunk.block_table[i];
      WINNOW_CHECK(block >= 0 && static_cast<size_t>(block) < places_.size());
      Place& place = places_[static_cast<size_t>(block)];
      if (place.plan != plan_) {
        place = {plan_, static_cast<int32_t>(blocks.size())};
        blocks.push_back(block);
      }
      if (old_only && i >= old) blocks[static_cast<size_t>(place.in_area)] = -1;
      table[i] = place.in_area;
    }
    if (blocks.size() > room_) {
      blocks.resize(taken);
      break;
    }
    next_table += count;
    chunk.block_table = table;
    planned_.chunks.push_back(chunk);
  }
}

void Staging::PlanMoves(std::span<const int32_t> blocks, std::span<const int32_t> there) {
  moves_.clear();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i] >= 0 && (i >= there.size() || there[i] != blocks[i])) {
      moves_.push_back({blocks[i], static_cast<int32_t>(i)});
    }
  }
}

}  // namespace winnow::kernels::cuda
