// Attend of the CPU backend: cuts chunks into tiles of queries and, where one tile alone would keep
// the threads waiting, tiles into splits of keys. kernels/attention.h fixes what a split is, and
// states are merged from left to right either way, so neither cut shows in the result.
#include "kernels/attention.h"

#include <algorithm>

#include "kernels/attention_state.h"
#include "kernels/check.h"
#include "kernels/cpu/attention_scratch.h"
#include "kernels/cpu/cpu_backend.h"

namespace winnow::kernels {
namespace {

// Rows (queries x heads of a group) of a tile. More rows share the packing of a unit (which costs
// as much as 20 rows) and fewer stay in the L2 cache with their outputs.
constexpr int32_t kTileQueryRows = 192;

// So many pieces of work for each thread, where heads can be dealt out singly: the last ones to end keep the others waiting.
constexpr int64_t kItemsPerThread = 16;

constexpr double kLog2E = 1.4426950408889634;

constexpr size_t RoundUp64(size_t size_bytes) { return (size_bytes + 63) / 64 * 64; }

}  // namespace

void CpuBackend::PlanAttention(const Tensor& q, std::span<const AttentionChunk> chunks,
                               const KvLayout& layout, int32_t group, const Tensor& out) {
  attention_work_.clear();
  attention_items_.clear();
  const int32_t split_tokens = AttentionSplitTokens(layout);
  // Tiles take all KV heads of a token, unless there are then too few pieces to go round.
  int64_t num_splits = 0;
  for (const AttentionChunk& chunk : chunks) {
    num_splits += (int64_t{chunk.position} + chunk.num_tokens + split_tokens - 1) / split_tokens -
                  chunk.FirstKey() / split_tokens;
  }
  const int64_t pieces_per_split =
      (kItemsPerThread * num_threads() + num_splits) / (num_splits + 1);
  const int32_t heads_per_tile_max = std::max<int32_t>(
      1, num_threads() == 1 ? layout.kv_heads
                            : static_cast<int32_t>(layout.kv_heads / pieces_per_split));
  double total_cost = 0;
  for (const AttentionChunk& chunk : chunks) {
    const int64_t end = int64_t{chunk.position} + chunk.num_tokens;
    WINNOW_CHECK(chunk.first_row + chunk.num_tokens <= q.rows &&
                 chunk.first_row + chunk.num_tokens <= out.rows);
    WINNOW_CHECK(end <= static_cast<int64_t>(chunk.block_table.size()) * layout.block_tokens);
    if (chunk.num_tokens == 0) continue;
    const int32_t tile_tokens = std::clamp(kTileQueryRows / group, 1, chunk.num_tokens);
    const int32_t tile_heads =
        std::clamp(kTileQueryRows / (tile_tokens * group), 1, heads_per_tile_max);
    // Tiles of the same KV heads follow each other: they read the same blocks.
    for (int32_t head = 0; head < layout.kv_heads; head += tile_heads) {
      for (int32_t first = 0; first < chunk.num_tokens; first += tile_tokens) {
        AttentionWork work;
        const int64_t column = int64_t{head} * group * layout.head_dim;
        work.tile.q = q.f32(chunk.first_row + first) + column;
        work.tile.q_stride = q.stride;
        work.tile.block_table = chunk.block_table.data();
        work.tile.first_kv_head = head;
        work.tile.num_kv_heads = std::min(tile_heads, layout.kv_heads - head);
        work.tile.position = chunk.position + first;
        work.tile.num_tokens = std::min(tile_tokens, chunk.num_tokens - first);
        work.tile.window = chunk.window;
        work.tile.first_key =
            AttentionChunk{.position = work.tile.position, .window = chunk.window}.FirstKey();
        work.out = out.f32(chunk.first_row + first) + column;
        if (chunk.sinks != nullptr) work.sinks = chunk.sinks + int64_t{head} * group;
        work.first_split = work.tile.first_key / split_tokens;
        work.num_splits =
            (work.tile.position + work.tile.num_tokens + split_tokens - 1) / split_tokens -
            work.first_split;
        total_cost += Cost(work);
        attention_work_.push_back(work);
      }
    }
  }
  // A tile that is more than a quarter of one thread's share is run split by split; those of a chunk take turns, so that threads
  // at work on the same tokens of other heads read memory that lies together.
  const double large = total_cost / num_threads() / 4;
  for (size_t begin = 0; begin < attention_work_.size();) {
    const int32_t* const chunk = attention_work_[begin].tile.block_table;
    size_t end = begin;
    int32_t most_splits = 1;
    for (; end < attention_work_.size() && attention_work_[end].tile.block_table == chunk; ++end) {
      AttentionWork& work = attention_work_[end];
      work.split = num_threads() > 1 && work.num_splits > 1 && Cost(work) > large;
      if (work.split) most_splits = std::max(most_splits, work.num_splits);
    }
    for (int32_t split = 0; split < most_splits; ++split) {
      for (size_t i = begin; i < end; ++i) {
        if (split < (attention_work_[i].split ? attention_work_[i].num_splits : 1)) {
          attention_items_.push_back({static_cast<int32_t>(i), split});
        }
      }
    }
    begin = end;
  }
}

// Packing a unit costs about as much as the rows of a few tokens.
double CpuBackend::Cost(const AttentionWork& work) {
  constexpr double kPackTokens = 4;
  return static_cast<double>(work.num_splits) * work.tile.num_kv_heads *
         (work.tile.num_tokens + kPackTokens);
}

void CpuBackend::Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                        const KvLayout& layout, float scale, const Tensor& out) {
  const int32_t d = layout.head_dim;
  CheckKv(layout);
  static_assert(AttentionScratch::kMaxHeadDim == kMaxKvHeadDim);
  WINNOW_CHECK(scale > 0);
  WINNOW_CHECK(q.cols % (int64_t{layout.kv_heads} * d) == 0 && out.cols == q.cols);
  AttentionCall call;
  call.layout = layout;
  call.pool = static_cast<const std::byte*>(pool);
  call.group = static_cast<int32_t>(q.cols / d / layout.kv_heads);
  call.scale_log2 = static_cast<float>(scale * kLog2E);
  PlanAttention(q, chunks, layout, call.group, out);

  const size_t state_floats = static_cast<size_t>(AttentionStateFloats(d));
  auto rows_of = [&](const AttentionWork& work) {
    return static_cast<size_t>(work.tile.num_tokens) * call.group * work.tile.num_kv_heads;
  };
  size_t max_rows = 0;
  size_t leaf_bytes = 0;
  size_t split_state_floats = 0;
  for (AttentionWork& work : attention_work_) {
    const size_t rows = rows_of(work);
    max_rows = std::max(max_rows, rows);
    const AttentionScratch leaf(nullptr, d, static_cast<int64_t>(rows), work.tile.num_kv_heads);
    leaf_bytes = std::max(leaf_bytes, RoundUp64(leaf.size_bytes));
    work.states_offset = split_state_floats;
    if (work.split) split_state_floats += rows * work.num_splits * state_floats;
  }
  // Of a thread: the leaf's scratch, then the states of a tile that is run whole.
  const size_t thread_bytes = leaf_bytes + RoundUp64(max_rows * state_floats * sizeof(float));
  std::byte* thread_scratch = attention_scratch_.Get(thread_bytes * num_threads());
  float* split_states =
      reinterpret_cast<float*>(states_scratch_.Get(split_state_floats * sizeof(float)));

  auto finish = [&](const AttentionWork& work, const float* states) {
    const int64_t columns = int64_t{call.group} * d;  // of a KV head
    for (int32_t head = 0; head < work.tile.num_kv_heads; ++head) {
      for (int32_t token = 0; token < work.tile.num_tokens; ++token) {
        for (int32_t g = 0; g < call.group; ++g, states += state_floats) {
          float* const to = work.out + token * out.stride + head * columns + int64_t{g} * d;
          if (work.sinks == nullptr) {
            FinishAttentionState(states, d, to);
          } else {
            const float sink = work.sinks[int64_t{head} * call.group + g];
            FinishAttentionState(states, d, static_cast<float>(sink * kLog2E), to);
          }
        }
      }
    }
  };
  threads_.ParallelFor(
      static_cast<int64_t>(attention_items_.size()), [&](int64_t item, int thread) {
        const AttentionWork& work = attention_work_[attention_items_[item].work];
        std::byte* scratch = thread_scratch + thread * thread_bytes;
        if (work.split) {
          const int32_t split = attention_items_[item].split;
          const size_t rows = rows_of(work);
          ops_.attend_splits(
              call, work.tile, work.first_split + split, work.first_split + split + 1, false,
              split_states + work.states_offset + split * rows * state_floats, scratch);
        } else {
          float* states = reinterpret_cast<float*>(scratch + leaf_bytes);
          ops_.attend_splits(call, work.tile, work.first_split, work.first_split + work.num_splits,
                             true, states, scratch);
          finish(work, states);
        }
      });
  if (split_state_floats == 0) return;
  threads_.ParallelFor(static_cast<int64_t>(attention_work_.size()), [&](int64_t item, int) {
    const AttentionWork& work = attention_work_[item];
    if (!work.split) return;
    const size_t rows = rows_of(work);
    float* states = split_states + work.states_offset;
    for (int32_t split = 1; split < work.num_splits; ++split) {
      for (size_t row = 0; row < rows; ++row) {
        MergeAttentionState(states + row * state_floats,
                            states + (split * rows + row) * state_floats, d);
      }
    }
    finish(work, states);
  });
}

}  // namespace winnow::kernels
