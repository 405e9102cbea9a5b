// Pack, PackStored and Matmul of the CPU backend: memory and the split over threads. The orders of summation are
// in matmul_impl.h, quantized_matmul_impl.h, int8_matmul_impl.h and float8_matmul_impl.h; nothing here can change them.
#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/float8_panel.h"
#include "kernels/cpu/int8_panel.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/quantized_panel.h"
#include "kernels/host_matrix.h"

namespace winnow::kernels {
namespace {

// One output's weights into its lane of a panel, which is zeroed.
void PackRow(const std::byte* row, DType from, DType compute, int64_t in, std::byte* panel,
             int64_t lane) {
  if (compute == DType::kF32) {
    float* to = reinterpret_cast<float*>(panel) + lane;
    for (int64_t i = 0; i < in; ++i) to[i * kPanelOutputs] = ElementAt(row, from, i);
    return;
  }
  const int64_t step = PanelStep(compute);
  uint16_t* to = reinterpret_cast<uint16_t*>(panel) + lane * step;
  int64_t i = 0;
  if (from == DType::kBF16 &&
      compute == DType::kBF16) {  // most of a model's start-up time: by pairs
    for (; i + 2 <= in; i += 2) std::memcpy(to + i * kPanelOutputs, row + 2 * i, 4);
  }
  for (; i < in; ++i) {
    uint16_t bits;
    if (from == compute) {
      std::memcpy(&bits, row + 2 * i, 2);
    } else {
      bits = ToBF16(ElementAt(row, from, i)).bits;
    }
    to[(i / step) * kPanelOutputs * step + i % step] = bits;
  }
}

// An output's weights: a row of the file, and its type.
struct PlainRow {
  const std::byte* data;
  DType dtype;
};

// Blocks of one output into its lane of a panel, which is zeroed.
void PackBlocks(WeightType type, const std::byte* row, int64_t in, std::byte* panel, int64_t lane) {
  const BlockShape shape = BlockShapeOf(type);
  const int64_t block_bytes = BlockSizeOf(type).bytes;
  const auto put_half = [lane](std::byte* halves, uint16_t bits) {
    std::memcpy(halves + 2 * lane, &bits, sizeof bits);
  };
  const uint16_t sign = shape.has_codes ? 0x8000 : 0;  // K types take their offsets away
  for (int64_t at = 0; at < in; at += shape.values, row += block_bytes) {
    BlockParts parts;
    SplitBlock(type, row, &parts);
    if (shape.has_codes) {
      put_half(panel, parts.scale);
      if (shape.has_offset) put_half(panel + 2 * kPanelOutputs, parts.offset ^ sign);
    }
    std::byte* group = panel + PanelHeadBytes(shape);
    for (int64_t g = 0; g < shape.groups(); ++g, group += PanelGroupBytes(shape)) {
      const uint8_t* q = parts.integers + g * shape.group;
      for (int64_t i = 0; i < shape.group; ++i) {
        const int64_t four = i / 4, step = shape.bits == 4 ? four / 2 : four;
        const int shift = shape.bits == 4 ? static_cast<int>(four % 2) * 4 : 0;
        group[step * kStepBytes + 4 * lane + i % 4] |= static_cast<std::byte>(q[i] << shift);
      }
      std::byte* own = group + GroupIntegerBytes(shape);
      if (shape.has_codes) {
        own[lane] = static_cast<std::byte>(parts.scale_codes[g]);
        if (shape.has_offset) own[kPanelOutputs + lane] = std::byte{parts.offset_codes[g]};
      } else {
        put_half(own, parts.scale);
        if (shape.has_offset) put_half(own + 2 * kPanelOutputs, parts.offset);
      }
    }
    panel = group;
  }
}

// A row of I8x128 into its lane of a panel, which is zeroed: blocks of 32 integers, four of which have one scale.
void PackInt8Row(int bits, const std::byte* row, int64_t in, std::byte* panel, int64_t lane) {
  const BlockSize block = BlockSizeOf(WeightType::kI8x128);
  for (int64_t at = 0; at < in; at += block.values, row += block.bytes) {
    std::byte* const group = panel + at / kInt8GroupValues * Int8GroupBytes(bits);
    const float scale = ElementAt(row, DType::kF16, 0);
    std::memcpy(group + Int8ScalesAt(bits) + lane * 4, &scale, sizeof scale);
    for (int64_t i = 0; i < block.values; i += kInt8StepInputs) {
      const int64_t step = (at % kInt8GroupValues + i) / kInt8StepInputs;
      if (bits == 8) {
        std::memcpy(group + step * kInt8StepBytes + lane * kInt8StepInputs, row + 2 + i,
                    kInt8StepInputs);
        continue;
      }
      std::byte* const to = group + step / 2 * kInt8StepBytes + lane * kInt8StepInputs;
      for (int64_t j = 0; j < kInt8StepInputs; ++j) {
        to[j] |= static_cast<std::byte>((static_cast<int8_t>(row[2 + i + j]) + kInt4Bias)
                                        << step % 2 * 4);
      }
    }
  }
}

// Blocks of 8-bit floats of one output into its lane of a panel, which is zeroed.
void PackFloat8Blocks(BlockSize block, const std::byte* row, int64_t in, std::byte* panel,
                      int64_t lane) {
  for (int64_t at = 0; at < in; at += block.values, row += block.bytes) {
    const float scale = 256 * ElementAt(row, DType::kF32, 0);
    std::memcpy(panel + 4 * lane, &scale, sizeof scale);
    std::byte* const steps = panel + kFloat8ScaleBytes + kFloat8StepInputs * lane;
    for (int64_t i = 0; i < block.values; ++i) {
      steps[i / kFloat8StepInputs * kFloat8StepBytes + i % kFloat8StepInputs] = row[4 + i];
    }
    panel += Float8BlockBytes(block.values);
  }
}

// Makes a part's panels; pack(output, panel, lane) writes an output's weights into its lane. False: no memory.
template <typename Pack>
bool FillPart(ThreadPool& threads, Pack pack, MatrixPart* part) {
  const int64_t panels = NumPanels(part->outputs);
  part->panels = AllocateHostMemory(static_cast<size_t>(panels) * part->panel_bytes);
  if (part->panels.data() == nullptr) return false;
  threads.ParallelFor(panels, [&](int64_t panel, int) {
    const int64_t first = panel * kPanelOutputs;
    for (int64_t lane = 0; lane < std::min(kPanelOutputs, part->outputs - first); ++lane) {
      pack(first + lane, part->panel(panel), lane);
    }
  });
  return true;
}

bool FillPlainPart(ThreadPool& threads, std::span<const PlainRow> rows, DType compute, int64_t in,
                   MatrixPart* part) {
  part->outputs = static_cast<int64_t>(rows.size());
  part->kind = PlainPanels{compute};
  part->panel_bytes = PanelBytes(compute, in);
  return FillPart(
      threads,
      [&](int64_t output, std::byte* panel, int64_t lane) {
        PackRow(rows[output].data, rows[output].dtype, compute, in, panel, lane);
      },
      part);
}

// The panels of a product of few rows as items that threads take one after the other: of `largest` panels, and towards the end
// of half as many, and half of those, down to one, about as many of each as there are threads. A thread that is slower than
// others, or began later, then keeps them waiting for a panel and not for an item.
class ShrinkingItems {
 public:
  ShrinkingItems(int64_t panels, int64_t largest, int num_threads) : panels_(panels) {
    int64_t first = 0;
    for (int64_t size = largest; size > 0 && first < panels; size /= 2) {
      // Smaller sizes take so many.
      const int64_t left = num_threads == 1 ? 0 : num_threads * (size - 1);
      const int64_t items = size == 1
                                ? panels - first
                                : (std::max<int64_t>(0, panels - first - left) + size - 1) / size;
      zones_[num_zones_++] = {count_, first, size};
      count_ += items;
      first += items * size;
    }
  }

  int64_t count() const { return count_; }
  // [first, last) of an item.
  std::pair<int64_t, int64_t> Panels(int64_t item) const {
    int zone = 0;
    while (zone + 1 < num_zones_ && item >= zones_[zone + 1].first_item) ++zone;
    const int64_t first =
        zones_[zone].first_panel + (item - zones_[zone].first_item) * zones_[zone].size;
    return {first, std::min(panels_, first + zones_[zone].size)};
  }

 private:
  struct Zone {
    int64_t first_item, first_panel, size;
  };
  int64_t panels_, count_ = 0;
  int num_zones_ = 0;
  Zone zones_[64];  // of halves of a size
};

// Items of a product of so many rows.
ShrinkingItems ItemsOf(int64_t rows, int64_t panels, size_t panel_bytes, const ProductSplit& split,
                       int num_threads) {
  const int64_t side_by_side = split.one_row_panels;
  const int64_t largest =
      rows == 1 ? std::max(side_by_side, static_cast<int64_t>(split.one_row_bytes / panel_bytes) /
                                             side_by_side * side_by_side)
                : split.panels;
  return {panels, largest, num_threads};
}

// Calls tiles(first_row, last_row, first_panel, last_panel) so that all rows meet all panels, on all threads. An item is
// a group of panels and a range of rows. Panels: as many as make it worth a hand-over; rows: few all together, and of more as
// many as `split` allows, unless there are too few groups to keep the threads evenly busy. `ahead`: of few rows, what threads
// will read first in the next product.
template <typename Tiles>
void ForEachItem(ThreadPool& threads, int64_t rows, int64_t panels, size_t panel_bytes,
                 const ProductSplit& split, int num_threads,
                 std::span<const ThreadPool::Ahead> ahead, Tiles tiles) {
  if (rows <= split.least_rows) {
    const ShrinkingItems items = ItemsOf(rows, panels, panel_bytes, split, num_threads);
    threads.ParallelForOwnFirst(items.count(), ahead, [&](int64_t item, int) {
      const auto [first, last] = items.Panels(item);
      tiles(0, rows, first, last);
    });
    return;
  }
  const int64_t groups = (panels + split.panels - 1) / split.panels;
  const int64_t wanted = int64_t{8} * num_threads;
  int64_t rows_per_item = rows;
  if (groups < wanted) {
    rows_per_item =
        std::max(split.least_rows, rows * groups / wanted / split.least_rows * split.least_rows);
  }
  if (split.most_rows > 0) rows_per_item = std::min(rows_per_item, split.most_rows);
  const int64_t row_items = (rows + rows_per_item - 1) / rows_per_item;
  threads.ParallelFor(groups * row_items, [&](int64_t item, int) {
    const int64_t first_panel = item / row_items * split.panels;
    const int64_t first_row = item % row_items * rows_per_item;
    tiles(first_row, std::min(rows, first_row + rows_per_item), first_panel,
          std::min(panels, first_panel + split.panels));
  });
}

// One cache line more than the row, so that rows of 2^k values do not fall into one set of the cache.
size_t PaddedRowBytes(size_t bytes) { return (bytes + 63) / 64 * 64 + 64; }

}  // namespace

std::unique_ptr<PackedMatrix> CpuBackend::Pack(std::span<const HostMatrix> parts, DType compute) {
  WINNOW_CHECK(!parts.empty());
  const int64_t in = parts[0].cols;
  std::vector<PlainRow> rows;
  for (const HostMatrix& part : parts) {
    WINNOW_CHECK(part.cols == in);
    WINNOW_CHECK(compute != DType::kF16 || part.dtype == DType::kF16);
    for (int64_t row = 0; row < part.rows; ++row) rows.push_back({RowOf(part, row), part.dtype});
  }
  auto packed = std::make_unique<CpuPackedMatrix>(in);
  MatrixPart part;
  if (!FillPlainPart(threads_, rows, compute, in, &part)) return nullptr;
  packed->Append(std::move(part));
  return packed;
}

std::unique_ptr<PackedMatrix> CpuBackend::PackStored(std::span<const StoredMatrix> parts,
                                                     DType compute) {
  WINNOW_CHECK(!parts.empty());
  const int64_t in = parts[0].cols;
  auto packed = std::make_unique<CpuPackedMatrix>(in);
  for (const StoredMatrix& stored : parts) {
    WINNOW_CHECK(stored.cols == in);
    MatrixPart part;
    part.first_output = packed->out_features();
    if (const std::optional<DType> plain = PlainType(stored.type)) {
      WINNOW_CHECK(compute != DType::kF16 || *plain == DType::kF16);
      std::vector<PlainRow> rows;
      for (const std::byte* row : stored.rows) rows.push_back({row, *plain});
      if (!FillPlainPart(threads_, rows, compute, in, &part)) return nullptr;
    } else {
      const BlockSize block = BlockSizeOf(stored.type);
      const bool float8 = IsFloat8(stored.type);
      WINNOW_CHECK(in % block.values == 0);
      part.outputs = static_cast<int64_t>(stored.rows.size());
      const bool int8 = stored.type == WeightType::kI8x128;
      if (float8) {
        part.kind = Float8Blocks{block.values};
        part.panel_bytes = static_cast<size_t>(Float8PanelBytes(block.values, in));
      } else if (int8) {
        part.kind = Int8Panels{stored.integer_bits};
        part.panel_bytes = static_cast<size_t>(Int8PanelBytes(stored.integer_bits, in));
      } else {
        const BlockShape shape = BlockShapeOf(stored.type);
        part.kind = shape;
        part.panel_bytes = static_cast<size_t>(QuantizedPanelBytes(shape, in));
      }
      const auto pack = [&](int64_t output, std::byte* panel, int64_t lane) {
        if (float8) return PackFloat8Blocks(block, stored.rows[output], in, panel, lane);
        if (int8) return PackInt8Row(stored.integer_bits, stored.rows[output], in, panel, lane);
        PackBlocks(stored.type, stored.rows[output], in, panel, lane);
      };
      if (!FillPart(threads_, pack, &part)) return nullptr;
    }
    packed->Append(std::move(part));
  }
  return packed;
}

// One part of a product: y and the epilogue are the part's.
struct PartProduct {
  const Tensor& x;
  const MatrixPart& part;
  const Tensor& y;
  const MatmulEpilogue& epilogue;
};

namespace {

template <typename Call>
Call CallOf(const PartProduct& product) {
  Call call;
  call.panels = product.part.panel(0);
  call.in_features = product.x.cols;
  call.out_features = product.part.outputs;
  call.y = product.y.f32();
  call.y_stride = product.y.stride;
  call.bias = product.epilogue.bias;
  call.accumulate = product.epilogue.accumulate;
  return call;
}

}  // namespace

std::span<const ThreadPool::Ahead> CpuBackend::AheadOf(const MatrixPart& part, int64_t rows,
                                                       const ProductSplit& split) {
  if (rows > split.least_rows || num_threads() == 1) return {};
  constexpr size_t kMostNext = size_t{1} << 16;  // matrices that come and go leave entries behind
  if (next_panels_.size() > kMostNext) next_panels_.clear();
  const std::byte* const panels = part.panel(0);
  if (last_panels_ != nullptr) {
    NextPanels& next = next_panels_[last_panels_];
    const bool again = next.panels == panels;
    next = {panels, part.panel_bytes, NumPanels(part.outputs), &split, again};
  }
  last_panels_ = panels;
  const auto found = next_panels_.find(panels);
  if (found == next_panels_.end() || !found->second.again) return {};
  const NextPanels& next = found->second;
  const ShrinkingItems items =
      ItemsOf(rows, next.count, next.panel_bytes, *next.split, num_threads());
  ahead_.assign(num_threads(), {});
  for (int64_t thread = 0; thread < std::min<int64_t>(num_threads(), items.count()); ++thread) {
    const auto [first, last] = items.Panels(thread);
    ahead_[thread] = {next.panels + first * next.panel_bytes,
                      static_cast<size_t>(last - first) * next.panel_bytes};
  }
  return ahead_;
}

template <typename Call>
void CpuBackend::RunTiles(const PartProduct& product, const Call& call, auto* tiles,
                          const ProductSplit& split) {
  const MatrixPart& part = product.part;
  ForEachItem(threads_, product.x.rows, NumPanels(part.outputs), part.panel_bytes, split,
              num_threads(), AheadOf(part, product.x.rows, split),
              [&](int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel) {
                tiles(call, first_row, last_row, first_panel, last_panel);
              });
}

std::byte* CpuBackend::PrepareRows(const Tensor& x, size_t row_bytes,
                                   void (*prepare)(const float*, int64_t, void*)) {
  std::byte* const prepared = rows_scratch_.Get(static_cast<size_t>(x.rows) * row_bytes);
  ForEachRow(x.rows, x.cols,
             [&](int64_t i) { prepare(x.f32(i), x.cols, prepared + i * row_bytes); });
  return prepared;
}

void CpuBackend::SetRows(const Tensor& x, bool bf16, MatmulOperands& operands) {
  if (bf16) {
    operands.row_bytes =
        PaddedRowBytes(static_cast<size_t>(x.cols + x.cols % 2) * ops_.prepared_bf16_value_bytes);
    operands.rows = PrepareRows(x, operands.row_bytes, ops_.prepare_bf16_row);
  } else {
    operands.row_bytes = static_cast<size_t>(x.stride) * sizeof(float);
    operands.rows = x.data;
  }
}

void CpuBackend::Multiply(const PartProduct& product, PlainPanels plain) {
  const Tensor& x = product.x;
  auto call = CallOf<MatmulCall>(product);
  call.compute = plain.compute;
  SetRows(x, plain.compute == DType::kBF16, call);
  RunTiles(product, call, ops_.matmul_tiles, ops_.product_split);
}

void CpuBackend::Multiply(const PartProduct& product, const BlockShape& shape) {
  auto call = CallOf<QuantizedMatmulCall>(product);
  call.shape = shape;
  call.row_bytes = PaddedRowBytes(static_cast<size_t>(PreparedRow::Bytes(product.x.cols)));
  call.rows = PrepareRows(product.x, call.row_bytes, ops_.prepare_rounded_row);
  RunTiles(product, call, ops_.quantized_matmul_tiles, ops_.quantized_split);
}

void CpuBackend::Multiply(const PartProduct& product, Int8Panels int8) {
  auto call = CallOf<Int8MatmulCall>(product);
  call.integer_bits = int8.integer_bits;
  call.row_bytes = PaddedRowBytes(static_cast<size_t>(PreparedInt8Row::Bytes(product.x.cols)));
  call.rows = PrepareRows(product.x, call.row_bytes, ops_.prepare_int8_row);
  RunTiles(product, call, ops_.int8_matmul_tiles, ops_.int8_split);
}

void CpuBackend::Multiply(const PartProduct& product, Float8Blocks float8) {
  auto call = CallOf<Float8MatmulCall>(product);
  call.block_values = float8.block_values;
  SetRows(product.x, ops_.float8_prepared, call);
  RunTiles(product, call, ops_.float8_matmul_tiles, ops_.float8_split);
}

void CpuBackend::Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
                        const MatmulEpilogue& epilogue) {
  const auto& weights = static_cast<const CpuPackedMatrix&>(w);
  const int64_t in = weights.in_features();
  WINNOW_CHECK(x.cols == in && y.rows >= x.rows && y.cols == weights.out_features());
  if (x.rows == 0) return;
  for (const MatrixPart& part : weights.parts()) {
    if (part.outputs == 0) continue;
    const Tensor to = y.ColRange(part.first_output, part.outputs);
    MatmulEpilogue of_part = epilogue;
    if (epilogue.bias != nullptr) of_part.bias += part.first_output;
    const PartProduct product{x, part, to, of_part};
    std::visit([&](const auto& kind) { Multiply(product, kind); }, part.kind);
  }
}

}  // namespace winnow::kernels
