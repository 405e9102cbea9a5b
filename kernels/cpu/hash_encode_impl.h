// See kernels/hash_encode.h. Compiled by hash_encode_{scalar,avx2,avx512}.cc.
//
// Weights lie as the inner loop reads them: a panel of 32 outputs is [in] times 16 words, word i of
// outputs i (lower half) and i + 16 (upper half). A shift and a mask make of a register of words
// two registers of floats, and each serves every row of the tile.
#include "kernels/cpu/ops.h"
#include "kernels/cpu/row_pairs_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

using Reg = Vec::Reg;

constexpr int kPanelWords = 16;
constexpr int kVecsPerPanel = kPanelWords / Vec::kLanes;

// Nearest, ties to even; keeps subnormals, which the conversion of AVX-512 takes for zero.
inline uint32_t RoundedToBF16(float x) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, &x, 4);
  return (bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u;
}

template <DType kKv>
inline void LoadRow(const std::byte* row, int32_t n, float* x) {
  const float scale = KeyScale<kKv>(row, n);
  for (int32_t j = 0; j < n; j += Vec::kLanes) {
    Vec::Store(x + j, LoadScaled<kKv>(row + j * static_cast<int64_t>(DTypeBytes(kKv)), scale));
  }
  if constexpr (kKv != DType::kBF16) {
    uint32_t* bits = reinterpret_cast<uint32_t*>(x);
    for (int32_t j = 0; j < n; ++j) bits[j] = RoundedToBF16(x[j]);
  }
}

// Weights and biases of one head, and where rows of floats come from and go.
struct StageTask {
  const uint32_t* weights;
  const float* bias;
  int32_t in;
  int32_t vecs;  // of words
  const float* x;
  float* y;
  int64_t stride;  // distance of rows of x, and of y
};

// kRows rows times kVecs adjacent registers of words.
template <int kRows, int kVecs>
inline void Tile(const StageTask& task, int64_t first_row, int32_t first_vec) {
  const uint32_t* weights[kVecs];
  int64_t outputs[kVecs];
  Reg low[kRows][kVecs], high[kRows][kVecs];
  for (int v = 0; v < kVecs; ++v) {
    const int64_t panel = (first_vec + v) / kVecsPerPanel;
    const int64_t lane = (first_vec + v) % kVecsPerPanel * Vec::kLanes;
    weights[v] = task.weights + panel * task.in * kPanelWords + lane;
    outputs[v] = panel * 2 * kPanelWords + lane;
    for (int r = 0; r < kRows; ++r) {
      low[r][v] = Vec::Load(task.bias + outputs[v]);
      high[r][v] = Vec::Load(task.bias + outputs[v] + kPanelWords);
    }
  }
  const float* x = task.x + first_row * task.stride;
  for (int32_t j = 0; j < task.in; ++j) {
    for (int v = 0; v < kVecs; ++v) {
      Reg low_weights, high_weights;
      Bits::WidenPairs(weights[v] + int64_t{j} * kPanelWords, &low_weights, &high_weights);
      for (int r = 0; r < kRows; ++r) {
        const Reg value = Vec::Set1(x[r * task.stride + j]);
        low[r][v] = Vec::MulAdd(value, low_weights, low[r][v]);
        high[r][v] = Vec::MulAdd(value, high_weights, high[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* y = task.y + (first_row + r) * task.stride;
    for (int v = 0; v < kVecs; ++v) {
      Vec::Store(y + outputs[v], low[r][v]);
      Vec::Store(y + outputs[v] + kPanelWords, high[r][v]);
    }
  }
}

// As many times kRows rows as there are from `row`; the next row.
template <int kRows, int kVecs>
inline int32_t Rows(const StageTask& task, int32_t row, int32_t num_rows) {
  for (; row + kRows <= num_rows; row += kRows) {
    int32_t vec = 0;
    for (; vec + kVecs <= task.vecs; vec += kVecs) Tile<kRows, kVecs>(task, row, vec);
    for (; vec < task.vecs; ++vec) Tile<kRows, 1>(task, row, vec);
  }
  return row;
}

inline void SiluRow(const uint16_t* table, float* x, int32_t n) {
  uint32_t* bits = reinterpret_cast<uint32_t*>(x);
  for (int32_t j = 0; j < n; ++j) bits[j] = RoundedToBF16(x[j]) >> 16;
  for (int32_t j = 0; j < n; ++j) bits[j] = static_cast<uint32_t>(table[bits[j]]) << 16;
}

}  // namespace

void EncodeRows(const EncodeCall& call, int32_t head, const void* const* rows, DType dtype,
                int32_t num_rows, std::byte* const* codes, float* scratch) {
  float* x = scratch;
  float* y = scratch + int64_t{kEncodeTileRows} * call.width;
  ForKvType(dtype, [&]<DType kKv>(KvType<kKv>) {
    for (int32_t r = 0; r < num_rows; ++r) {
      LoadRow<kKv>(static_cast<const std::byte*>(rows[r]), call.stages[0].in,
                   x + int64_t{r} * call.width);
    }
  });
  for (int32_t i = 0; i < call.num_stages; ++i) {
    const EncodeStage& stage = call.stages[i];
    const StageTask task = {stage.weights + int64_t{head} * stage.out / 2 * stage.in,
                            stage.bias + int64_t{head} * stage.out,
                            stage.in,
                            stage.out / (2 * Vec::kLanes),
                            x,
                            y,
                            call.width};
    int32_t row = Rows<Bits::kTileRows, 1>(task, 0, num_rows);
    if constexpr (Bits::kTileRows > 4) row = Rows<4, 1>(task, row, num_rows);
    Rows<1, Bits::kRowVecs>(task, row, num_rows);
    for (int32_t r = 0; r < num_rows; ++r) {
      float* values = y + int64_t{r} * call.width;
      if (i + 1 < call.num_stages) {
        SiluRow(call.silu, values, stage.out);
        continue;
      }
      for (int32_t o = 0; o < stage.out; o += 32) {
        const uint32_t word = Bits::NonNegative32(values + o);
        __builtin_memcpy(codes[r] + o / 8, &word, 4);
      }
    }
    float* other = x;
    x = y;
    y = other;
  }
}

}  // namespace winnow::kernels::WINNOW_ISA
