// See kernels/attention.h for the order of summation. Included by attention_{scalar,avx2,avx512,amx}.cc.
//
// A unit's keys and values are packed into panels (panel.h) in L1, once for all rows of the tile:
// keys with tokens as outputs, values with d as outputs. Scores and outputs then are the tile
// products of matmul, of at most kTileRows rows at a time, or those of matrix tiles (attention_tiles_impl.h).
#include "kernels/attention.h"
#include "kernels/attention_state.h"
#include "kernels/cpu/attention_direct_impl.h"
#include "kernels/cpu/attention_pack_impl.h"
#include "kernels/cpu/attention_scratch.h"
#include "kernels/cpu/attention_tiles_impl.h"
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/tile_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// Panels that meet rows in matrix tiles name the class of those.
template <typename Panels>
concept InMatrixTiles = requires {
  typename Panels::Tiles;
};

// One tile of queries at work on one split of KV of type kKv.
template <typename Panels, DType kKv>
struct Worker {
  using Row = typename Panels::Row;
  static constexpr int kLanes = Vec::kLanes;
  static constexpr bool kRoundWeights = Panels::kDType == DType::kBF16;
  // A unit's rows of 8 bits are made rows of bfloat16 first.
  static constexpr bool kWidens = kRoundWeights && HasScales(kKv);
  static constexpr DType kUnitType = kWidens ? DType::kBF16 : kKv;

  const AttentionCall& call;
  const AttentionTile& tile;
  const int64_t d;
  const int32_t head_rows;  // rows of one KV head
  const int32_t num_rows;
  const AttentionScratch scratch;
  // Row values of a query, and of a row of weights.
  const int64_t query_stride;
  // Whether scores are those of TokenScores, which wants no panels of keys.
  const bool from_tokens;
  mutable int32_t configured_rows = 0;  // of this thread's tiles
  static constexpr int64_t kWeightStride =
      kAttentionUnitTokens / PanelStep(Panels::kDType) * Panels::kRowPerStep;

  Worker(const AttentionCall& call, const AttentionTile& tile, std::byte* memory)
      : call(call),
        tile(tile),
        d(call.layout.head_dim),
        head_rows(call.group * tile.num_tokens),
        num_rows(head_rows * tile.num_kv_heads),
        scratch(memory, d, num_rows, tile.num_kv_heads),
        query_stride(d / PanelStep(Panels::kDType) * Panels::kRowPerStep),
        from_tokens(TakesTokens(head_rows, d)) {}

  static bool TakesTokens(int32_t rows, int64_t d) {
    if constexpr (InMatrixTiles<Panels>) {
      return AttentionTiles<typename Panels::Tiles>::TakesTokens(rows, d);
    }
    return false;
  }

  const Row* Query(int32_t row) const {
    return static_cast<const Row*>(scratch.queries) + row * query_stride;
  }
  float* Output(int32_t row) const { return scratch.outputs + row * d; }
  float* Sums(int32_t row) const { return scratch.sums + row * kPanelOutputs; }
  // How many tokens after the tile's first one the token of a head's row is.
  int32_t TokenOf(int32_t row) const { return row % head_rows / call.group; }

  void PrepareQueries() const {
    for (int32_t row = 0; row < num_rows; ++row) {
      const int64_t query_head = row / head_rows * call.group + row % call.group;
      const float* from = tile.q + TokenOf(row) * tile.q_stride + query_head * d;
      Row* to = static_cast<Row*>(scratch.queries) + row * query_stride;
      if constexpr (Panels::kDType == DType::kBF16) {
        for (int64_t i = 0; i < d; i += kLanes)
          Vec::StoreBF16(reinterpret_cast<uint16_t*>(to) + i, Vec::Load(from + i));
      } else {
        __builtin_memcpy(to, from, static_cast<size_t>(d) * sizeof(float));
      }
    }
    if constexpr (InMatrixTiles<Panels>) {
      if (from_tokens) PackQueries();
    }
  }

  // The first of a head's rows that sees `position`. REQUIRES: one of them does.
  int32_t FirstRowSeeing(int32_t position) const {
    return position <= tile.position ? 0 : (position - tile.position) * call.group;
  }

  // The end of a head's rows that see a unit which ends before `end`. REQUIRES: one of them does.
  int32_t LastRowSeeing(int32_t end) const {
    if (tile.window == 0) return head_rows;
    return static_cast<int32_t>(
        Min(int64_t{head_rows}, (int64_t{end} + tile.window - 1 - tile.position) * call.group));
  }

  // Leaves the state of the split's keys in outputs, maxima and sums.
  void RunSplit(int32_t first_position, int32_t last_position) const {
    for (int32_t row = 0; row < num_rows; ++row) {
      for (int64_t i = 0; i < d; i += kLanes) Vec::Store(Output(row) + i, Vec::Zero());
      for (int64_t i = 0; i < kPanelOutputs; i += kLanes) Vec::Store(Sums(row) + i, Vec::Zero());
      scratch.maxima[row] = -__builtin_inff();
    }
    for (int32_t start = FirstUnit(first_position); start < last_position;) {
      const int32_t tokens = UnitTokens(start);
      for (int32_t head = 0; head < tile.num_kv_heads; ++head) {
        const bool last_head = head + 1 == tile.num_kv_heads;
        RunUnit(head, start, tokens, Min(tokens, last_position - start),
                last_head ? UnitAhead(0, start + tokens) : UnitAhead(head + 1, start));
      }
      start += tokens;
    }
  }

  // The first unit of the split that a row sees.
  int32_t FirstUnit(int32_t first_position) const {
    if (tile.first_key <= first_position) return first_position;
    const int32_t in_block = tile.first_key % call.layout.block_tokens;
    return tile.first_key - in_block % kAttentionUnitTokens;
  }
  int32_t UnitTokens(int32_t start) const {
    return Min(kAttentionUnitTokens, call.layout.block_tokens - start % call.layout.block_tokens);
  }
  const std::byte* UnitData(int32_t head, int32_t start) const {
    const KvLayout& layout = call.layout;
    return call.pool + layout.RowOffset(tile.block_table[start / layout.block_tokens],
                                        tile.first_kv_head + head, start % layout.block_tokens);
  }
  Prefetcher UnitAhead(int32_t head, int32_t start) const {
    if (start >= tile.position + tile.num_tokens) return {nullptr, nullptr};
    const std::byte* data = UnitData(head, start);
    return {data, data + static_cast<size_t>(UnitTokens(start)) * call.layout.RowBytes()};
  }

  // `tokens` keys of a head from position `start`, of which the first `valid` have been written.
  void RunUnit(int32_t head, int32_t start, int32_t tokens, int32_t valid, Prefetcher ahead) const {
    const std::byte* rows = UnitData(head, start);
    const std::byte* scales = rows + call.layout.ScaleOffsetInRow();
    UnitRows keys = {rows, scales, call.layout.RowBytes()};
    UnitRows values = {rows + call.layout.ValueOffsetInRow(), scales + kKvScaleBytes,
                       call.layout.RowBytes()};
#if defined(__AVX512BF16__)
    if constexpr (kWidens) {
      const size_t wide_bytes = static_cast<size_t>(4 * d);
      std::byte* const wide = scratch.wide_rows;
      WidenRows<kKv>(keys, values, valid, d, wide, ahead);
      keys = {wide, nullptr, wide_bytes};
      values = {wide + 2 * d, nullptr, wide_bytes};
    }
#endif
    const int32_t first_row = head * head_rows + FirstRowSeeing(start);
    const int32_t last_row = head * head_rows + LastRowSeeing(start + tokens);
#if defined(__AVX2__)
    constexpr int kMost = InMatrixTiles<Panels> ? 0 : kDirectRows<Panels>;
    if constexpr (kMost > 0) {
      if (last_row - first_row <= kMost && valid == tokens) {
        return RunDirect<kMost>(first_row, last_row, start, tokens, keys, values, ahead);
      }
    }
#endif
    if (!from_tokens) PackKeys<Panels, kUnitType>(keys, tokens, d, scratch.key_panels);
    // Few rows leave little else to do while the next unit comes.
    const int64_t lines = from_tokens ? ahead.LinesLeft() / tokens : 0;
    PackValues<Panels, kUnitType>(values, tokens, valid, d, scratch.value_panels, ahead,
                                  static_cast<int>(lines));
    if constexpr (InMatrixTiles<Panels>) {
      return RunMatrixTiles(head, first_row, last_row, start, tokens, keys, ahead);
    }
    const int64_t row_tiles = (last_row - first_row + kTileRows - 1) / kTileRows;
    RunRows<kTileRows>(first_row, last_row, start, tokens, ahead,
                       (ahead.LinesLeft() + row_tiles - 1) / row_tiles);
  }

  // The head's rows [first_row, end), in blocks of equal height where that is possible: each height needs a configuration.
  void RunMatrixTiles(int32_t head, int32_t first_row, int32_t end, int32_t start, int32_t tokens,
                      const UnitRows& keys, Prefetcher& ahead) const {
    using Tiles = AttentionTiles<typename Panels::Tiles>;
    const int32_t block_rows = BlockRows();
    const int32_t blocks = (head_rows + block_rows - 1) / block_rows;
    const int64_t lines = (ahead.LinesLeft() + head_rows - 1) / head_rows;
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t block_row = head * head_rows + block * block_rows;
      const int32_t last_row = Min(block_row + block_rows, end);
      const int32_t row = block_row > first_row ? block_row : first_row;
      if (row >= last_row) continue;
      const int32_t rows = last_row - row;
      if (rows != configured_rows) Tiles::Configure(configured_rows = rows);
      // The block's rows are the first ones in the scratch, whether they see the unit or not.
      const int32_t first = row - block_row;
      if (from_tokens) {
        Tiles::TokenScores(QueryPanel(head, block), last_row - block_row, keys, tokens, d,
                           scratch.turned_scores, scratch.scores);
      } else {
        Tiles::TileScores(reinterpret_cast<const std::byte*>(Query(row)),
                          query_stride * sizeof(Row), rows, scratch.key_panels, tokens, d,
                          scratch.scores + first * kAttentionUnitTokens);
      }
      for (int32_t r = first; r < first + rows; ++r) {
        for (int64_t i = 0; i < lines; ++i) ahead.Lines(1);
        const float old_max = scratch.maxima[block_row + r];
        Weigh<1>(block_row + r, start, tokens, r);
        if (scratch.maxima[block_row + r] == old_max) continue;
        const Vec::Reg rescale = Vec::Load(scratch.rescale + r * kPanelOutputs);
        float* output = Output(block_row + r);
        for (int64_t i = 0; i < d; i += kLanes) {
          Vec::Store(output + i, Vec::Mul(Vec::Load(output + i), rescale));
        }
      }
      Tiles::AddValues(static_cast<const std::byte*>(scratch.weights) +
                           first * kWeightStride * static_cast<int64_t>(sizeof(Row)),
                       kWeightStride * sizeof(Row), rows, scratch.value_panels, tokens, d,
                       Output(row));
    }
  }
  int32_t BlockRows() const {
    const int32_t blocks = (head_rows + kTileHeight - 1) / kTileHeight;
    return (head_rows + blocks - 1) / blocks;
  }
  // Queries of a block of a head's rows: [d / 2][16] pairs.
  std::byte* QueryPanel(int32_t head, int32_t block) const {
    const int64_t blocks = (head_rows + kTileHeight - 1) / kTileHeight;
    return scratch.query_panels +
           (head * blocks + block) * static_cast<int64_t>(PanelBytes(DType::kBF16, d));
  }
  void PackQueries() const {
    const int32_t block_rows = BlockRows();
    for (int32_t row = 0; row < num_rows; ++row) {
      const int32_t in_head = row % head_rows;
      std::byte* const column = QueryPanel(row / head_rows, in_head / block_rows) +
                                in_head % block_rows * static_cast<int64_t>(sizeof(Row));
      for (int64_t pair = 0; pair < d / 2; ++pair) {
        __builtin_memcpy(column + pair * kTileBytesPerRow, Query(row) + pair, sizeof(Row));
      }
    }
  }

#if defined(__AVX2__)
  template <int kRows>
  void RunDirect(int32_t row, int32_t last_row, int32_t start, int32_t tokens, const UnitRows& keys,
                 const UnitRows& values, Prefetcher& ahead) const {
    if (last_row - row == kRows) {
      DirectScores<kUnitType, kRows>(Query(row), query_stride, keys, tokens, d, scratch.scores,
                                     ahead);
      Weigh<kRows>(row, start, tokens);
      DirectValues<kUnitType, kRows>(static_cast<const Row*>(scratch.weights), kWeightStride,
                                     scratch.rescale, values, tokens, d, Output(row), ahead);
    } else if constexpr (kRows > 1) {
      RunDirect<kRows - 1>(row, last_row, start, tokens, keys, values, ahead);
    }
  }
#endif

  template <int kRows>
  void RunRows(int32_t row, int32_t last_row, int32_t start, int32_t tokens, Prefetcher& ahead,
               int64_t lines_per_tile) const {
    for (; row + kRows <= last_row; row += kRows) {
      for (int64_t i = 0; i < lines_per_tile; ++i) ahead.Lines(1);
      Scores<kRows>(row, tokens);
      Weigh<kRows>(row, start, tokens);
      AddValues<kRows>(row, tokens);
    }
    if constexpr (kRows > 1) {
      if (row < last_row) RunRows<kRows - 1>(row, last_row, start, tokens, ahead, lines_per_tile);
    }
  }

  template <int kRows, int kPanels = kTilePanels>
  void Scores(int32_t row, int32_t tokens, int32_t panel = 0) const {
    const size_t panel_bytes = PanelBytes(Panels::kDType, d);
    const int32_t panels = tokens / static_cast<int32_t>(kPanelOutputs);
    for (; panel + kPanels <= panels; panel += kPanels) {
      TileSums<kRows, kPanels> sums;
      for (auto& of_row : sums.reg) {
        for (Vec::Reg& sum : of_row) sum = Vec::Zero();
      }
      AccumulateTile<Panels, kRows, kPanels>(Query(row), query_stride,
                                             scratch.key_panels + panel * panel_bytes, panel_bytes,
                                             PanelSteps(Panels::kDType, d), sums);
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kPanels * kRegsPerPanel; ++i) {
          Vec::Store(scratch.scores + r * kAttentionUnitTokens + panel * kPanelOutputs + i * kLanes,
                     sums.reg[r][i]);
        }
      }
    }
    if constexpr (kPanels > 1) {
      if (panel < panels) Scores<kRows, kPanels / 2>(row, tokens, panel);
    }
  }

  // Scores become weights 2^(scale * score - max); rescale gets what the former outputs are to be
  // multiplied by. Those of `row` are the first-th in the scratch. REQUIRES: scale > 0.
  template <int kRows>
  void Weigh(int32_t row, int32_t start, int32_t tokens, int32_t first = 0) const {
    // Some row does not see the whole unit.
    const bool causal_border = start + tokens > tile.position + 1;
    const bool window_border =
        tile.window > 0 && start <= tile.position + tile.num_tokens - 1 - tile.window;
    for (int r = 0; r < kRows; ++r) {
      float* scores = scratch.scores + (first + r) * kAttentionUnitTokens;
      const int32_t seen = tile.position + TokenOf(row + r) - start + 1;
      if (causal_border) HideFuture(scores, seen, tokens);
      if (window_border) HidePast(scores, Min(seen - tile.window, tokens));
      Vec::Reg max = Vec::Load(scores);
      for (int32_t t = kLanes; t < tokens; t += kLanes) max = Vec::Max(max, Vec::Load(scores + t));
      const float old_max = scratch.maxima[row + r];
      const float unit_max = Vec::ReduceMax(max) * call.scale_log2;
      const float new_max = unit_max > old_max ? unit_max : old_max;
      Vec::Reg rescale = Vec::Set1(1.0f), sum = Vec::Load(Sums(row + r));
      if (new_max != old_max) {  // in most units they are the same, and 2^0 is exactly 1
        rescale = Exp2<kRoundWeights>(Vec::Set1(old_max - new_max));
        sum = Vec::Mul(sum, rescale);
      }
      Row* weights = static_cast<Row*>(scratch.weights) + (first + r) * kWeightStride;
      Vec::Store(scratch.rescale + (first + r) * kPanelOutputs, rescale);
      Vec::Store(Sums(row + r), StoreWeights(scores, tokens, new_max, sum, weights));
      scratch.maxima[row + r] = new_max;
    }
  }

  // Scores of tokens from the `seen`-th become minus infinity.
  static void HideFuture(float* scores, int32_t seen, int32_t tokens) {
    for (int32_t t = 0; t < tokens; t += kLanes) {
      Vec::Store(scores + t, Vec::KeepFirst(Vec::Load(scores + t), seen - t));
    }
  }

  // Scores of the first `hidden` tokens become minus infinity.
  static void HidePast(float* scores, int32_t hidden) {
    for (int32_t t = 0; t < hidden; ++t) scores[t] = -__builtin_inff();
  }

  // Stores a row's weights as panels want their rows; returns `sum` with them added as they were
  // stored.
  Vec::Reg StoreWeights(const float* scores, int32_t tokens, float max, Vec::Reg sum,
                        Row* weights) const {
    const Vec::Reg scale = Vec::Set1(call.scale_log2);
    const Vec::Reg minus_max = Vec::Set1(-max);
    auto weight = [&](int32_t t) __attribute__((always_inline)) {
      return Exp2<kRoundWeights>(Vec::MulAdd(Vec::Load(scores + t), scale, minus_max));
    };
#if defined(__AVX512BF16__)
    if constexpr (kRoundWeights) {
      const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
      for (int32_t t = 0; t < tokens; t += 2 * kLanes) {
        const Vec::Reg second = t + kLanes < tokens ? weight(t + kLanes) : Vec::Zero();
        const __m512bh rounded = _mm512_cvtne2ps_pbh(second, weight(t));
        _mm512_storeu_si512(weights + t / 2, (__m512i)rounded);
        sum = _mm512_dpbf16_ps(sum, rounded, ones);
      }
      return sum;
    }
#endif
    for (int32_t t = 0; t < tokens; t += kLanes) {
      const Vec::Reg exact = weight(t);
      Vec::Store(reinterpret_cast<float*>(weights) + t, exact);
      sum = Vec::Add(sum, exact);
    }
    return sum;
  }

  template <int kRows, int kPanels = kTilePanels>
  void AddValues(int32_t row, int32_t tokens, int64_t panel = 0) const {
    const size_t panel_bytes = PanelBytes(Panels::kDType, tokens);
    const int64_t panels = d / kPanelOutputs;
    for (; panel + kPanels <= panels; panel += kPanels) {
      TileSums<kRows, kPanels> sums;
      for (int r = 0; r < kRows; ++r) {
        const Vec::Reg rescale = Vec::Load(scratch.rescale + r * kPanelOutputs);
        for (int i = 0; i < kPanels * kRegsPerPanel; ++i) {
          sums.reg[r][i] =
              Vec::Mul(Vec::Load(Output(row + r) + panel * kPanelOutputs + i * kLanes), rescale);
        }
      }
      AccumulateTile<Panels, kRows, kPanels>(
          static_cast<const Row*>(scratch.weights), kWeightStride,
          scratch.value_panels + static_cast<size_t>(panel) * panel_bytes, panel_bytes,
          PanelSteps(Panels::kDType, tokens), sums);
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kPanels * kRegsPerPanel; ++i) {
          Vec::Store(Output(row + r) + panel * kPanelOutputs + i * kLanes, sums.reg[r][i]);
        }
      }
    }
    if constexpr (kPanels > 1) {
      if (panel < panels) AddValues<kRows, kPanels / 2>(row, tokens, panel);
    }
  }

  // Row `row`'s state of the split that was just run.
  void ReadState(int32_t row, float* state) const {
    __builtin_memcpy(state, Output(row), static_cast<size_t>(d) * sizeof(float));
    state[d] = scratch.maxima[row];
    state[d + 1] = Vec::ReduceAdd(Vec::Load(Sums(row)));
  }
};

template <typename Panels, DType kKv>
void Attend(const AttentionCall& call, const AttentionTile& tile, int32_t first_split,
            int32_t last_split, bool merge, float* states, std::byte* memory) {
  const Worker<Panels, kKv> worker(call, tile, memory);
  const int64_t d = worker.d;
  const int64_t state_floats = AttentionStateFloats(d);
  const int64_t split_tokens = AttentionSplitTokens(call.layout);
  const int64_t end = int64_t{tile.position} + tile.num_tokens;
  worker.PrepareQueries();
  if (merge) {
    for (int32_t row = 0; row < worker.num_rows; ++row)
      ResetAttentionState(states + row * state_floats, d);
  }
  for (int32_t split = first_split; split < last_split; ++split) {
    const int64_t start = split * split_tokens;
    worker.RunSplit(static_cast<int32_t>(start),
                    static_cast<int32_t>(Min(start + split_tokens, end)));
    // A row whose query comes before the split has seen none of its keys: its state is empty.
    if (merge) {
      for (int32_t row = 0; row < worker.num_rows; ++row) {
        worker.ReadState(row, worker.scratch.part);
        MergeAttentionState(states + row * state_floats, worker.scratch.part, d);
      }
    } else {
      float* of_split = states + (split - first_split) * worker.num_rows * state_floats;
      for (int32_t row = 0; row < worker.num_rows; ++row)
        worker.ReadState(row, of_split + row * state_floats);
    }
  }
}

}  // namespace

}  // namespace winnow::kernels::WINNOW_ISA
