// Pack and Matmul of the CPU backend: memory and the split over threads. The order of summation is
// in matmul_impl.h; nothing here can change it.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/panel.h"
#include "kernels/host_matrix.h"

namespace winnow::kernels {
namespace {

class CpuPackedMatrix final : public PackedMatrix {
 public:
  CpuPackedMatrix(int64_t out_features, int64_t in_features, DType compute)
      : out_features_(out_features),
        in_features_(in_features),
        compute_(compute),
        buffer_(AllocateHostMemory(static_cast<size_t>(NumPanels(out_features)) *
                                   PanelBytes(compute, in_features))) {}

  int64_t out_features() const override { return out_features_; }
  int64_t in_features() const override { return in_features_; }
  size_t size_bytes() const override { return buffer_.size_bytes(); }
  DType compute() const { return compute_; }
  std::byte* panels() const { return static_cast<std::byte*>(buffer_.data()); }

 private:
  const int64_t out_features_;
  const int64_t in_features_;
  const DType compute_;
  const Buffer buffer_;
};

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

}  // namespace

std::unique_ptr<PackedMatrix> CpuBackend::Pack(std::span<const HostMatrix> parts, DType compute) {
  WINNOW_CHECK(!parts.empty());
  const int64_t in = parts[0].cols;
  std::vector<std::pair<const std::byte*, DType>> rows;
  for (const HostMatrix& part : parts) {
    WINNOW_CHECK(part.cols == in);
    WINNOW_CHECK(compute != DType::kF16 || part.dtype == DType::kF16);
    for (int64_t row = 0; row < part.rows; ++row) rows.emplace_back(RowOf(part, row), part.dtype);
  }
  const int64_t out = static_cast<int64_t>(rows.size());
  auto packed = std::make_unique<CpuPackedMatrix>(out, in, compute);
  if (packed->panels() == nullptr) return nullptr;
  const size_t panel_bytes = PanelBytes(compute, in);
  threads_.ParallelFor(NumPanels(out), [&](int64_t panel, int) {
    const int64_t first = panel * kPanelOutputs;
    for (int64_t lane = 0; lane < std::min(kPanelOutputs, out - first); ++lane) {
      const auto& [row, dtype] = rows[first + lane];
      PackRow(row, dtype, compute, in, packed->panels() + static_cast<size_t>(panel) * panel_bytes,
              lane);
    }
  });
  return packed;
}

void CpuBackend::Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
                        const MatmulEpilogue& epilogue) {
  const auto& weights = static_cast<const CpuPackedMatrix&>(w);
  const int64_t m = x.rows;
  const int64_t in = weights.in_features();
  WINNOW_CHECK(x.cols == in && y.rows >= m && y.cols == weights.out_features());
  if (m == 0) return;
  MatmulCall call;
  call.compute = weights.compute();
  call.panels = weights.panels();
  call.in_features = in;
  call.out_features = weights.out_features();
  call.y = y.f32();
  call.y_stride = y.stride;
  call.bias = epilogue.bias;
  call.accumulate = epilogue.accumulate;
  if (call.compute == DType::kBF16) {
    // One cache line more than the row, so that rows of 2^k values do not fall into one set of the
    // cache.
    call.row_bytes =
        (static_cast<size_t>(in + in % 2) * ops_.prepared_bf16_value_bytes + 63) / 64 * 64 + 64;
    std::byte* prepared = rows_scratch_.Get(static_cast<size_t>(m) * call.row_bytes);
    ForEachRow(m, in, [&](int64_t i) {
      ops_.prepare_bf16_row(x.f32(i), in, prepared + i * call.row_bytes);
    });
    call.rows = prepared;
  } else {
    call.row_bytes = static_cast<size_t>(x.stride) * sizeof(float);
    call.rows = x.data;
  }

  // An item is a group of panels and a range of rows. Panels: as many as make it worth a hand-over;
  // rows: all, unless there are too few groups to keep the threads evenly busy.
  constexpr int64_t kPanelsPerGroup = 4;
  constexpr size_t kGroupBytes = 128 << 10;
  const int64_t panels = NumPanels(call.out_features);
  const size_t panel_bytes = PanelBytes(call.compute, in);
  const int64_t group =
      m == 1 ? std::max<int64_t>(8, kGroupBytes / panel_bytes / 8 * 8) : kPanelsPerGroup;
  const int64_t groups = (panels + group - 1) / group;
  constexpr int64_t kRowsPerItemMin = 48;  // a multiple of every kTileRows
  const int64_t wanted = 8 * num_threads();
  int64_t rows_per_item = m;
  if (groups < wanted) {
    rows_per_item =
        std::max<int64_t>(kRowsPerItemMin, m * groups / wanted / kRowsPerItemMin * kRowsPerItemMin);
  }
  const int64_t row_items = (m + rows_per_item - 1) / rows_per_item;
  threads_.ParallelFor(groups * row_items, [&](int64_t item, int) {
    const int64_t first_panel = item / row_items * group;
    const int64_t first_row = item % row_items * rows_per_item;
    ops_.matmul_tiles(call, first_row, std::min(m, first_row + rows_per_item), first_panel,
                      std::min(panels, first_panel + group));
  });
}

}  // namespace winnow::kernels
