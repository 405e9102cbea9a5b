#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/matmul.h"

namespace winnow::kernels::cuda {
namespace {

// A layer's experts: the kind that all of their matrices are of, and what finds those of each, which are addresses, and maps where
// tiles of many rows need them.
class CudaExpertSet final : public ExpertSet {
 public:
  // Gates and ups, or down projections.
  struct Matrices {
    DeviceWeights kind;
    Buffer addresses;                // [experts]
    Buffer maps, addresses_of_maps;  // [experts]
    Buffer biases;                   // [experts] addresses, or empty
    const float* const* Biases() const { return static_cast<const float* const*>(biases.data()); }
    const void* const* Finders(int32_t tile_rows) const {
      const Buffer& from = NeedsTileMaps(kind.way, tile_rows) ? addresses_of_maps : addresses;
      return static_cast<const void* const*>(from.data());
    }
    bool is_int8() const { return kind.way == DeviceWeights::Way::kInt8; }
  };
  CudaExpertSet(int64_t count, Matrices gate_up, Matrices down)
      : count(count), gate_up(std::move(gate_up)), down(std::move(down)) {}
  // Says whether products may gate what they multiply: there are no biases between.
  bool gates_products() const { return gate_up.biases.data() == nullptr; }
  const int64_t count;
  const Matrices gate_up, down;
};

constexpr int32_t kPanelTileRows = 64;

// Places in the workspace of AddRoutedExperts for m rows, in bytes from its begin.
struct ExpertsWorkspace {
  ExpertsWorkspace(const RoutedExpertsArgs& args, const CudaExpertSet& set, int64_t m,
                   int32_t tile_rows) {
    const DeviceWeights &of_gates = set.gate_up.kind, &of_down = set.down.kind;
    const int64_t slots = m * args.per_token;
    gates = set.gates_products() && GatesTiles(of_gates, tile_rows);
    tiles = MostExpertTiles(slots, set.count, tile_rows);
    const int64_t places = tiles * tile_rows;
    count = Numbers(1);
    expert = Numbers(tiles);
    gate_up = Place(static_cast<size_t>(tiles) * sizeof(void*));
    down = Place(static_cast<size_t>(tiles) * sizeof(void*));
    row_of_place = Numbers(places);
    place_of_slot = Numbers(slots);
    ids = Numbers(slots);
    weights = Numbers(slots);
    x = Place(OrderedTilesBytes(tiles, tile_rows, of_gates));
    gated = Numbers(gates ? 0 : places * of_gates.out);
    activated = Place(OrderedTilesBytes(tiles, tile_rows, of_down));
  }
  int64_t tiles = 0;
  bool gates = false;  // the first product does
  size_t count, expert, gate_up, down, row_of_place, place_of_slot, ids, weights, x, gated,
      activated;
  size_t size_bytes = 0;

 private:
  size_t Place(size_t part_bytes) {
    const size_t at = size_bytes;
    size_bytes += AlignUp(part_bytes, 256);
    return at;
  }
  size_t Numbers(int64_t numbers) { return Place(static_cast<size_t>(numbers) * 4); }
};

// Whether products with both are the same but for where W lies.
bool IsAlike(const DeviceWeights& a, const DeviceWeights& b) {
  return a.out == b.out && a.in == b.in && a.way == b.way && a.storage == b.storage &&
         a.type == b.type && a.integer_bits == b.integer_bits;
}

}  // namespace

void CudaBackend::RouteExperts(const Tensor& logits, const ExpertRouting& routing, int32_t* ids,
                               const Tensor& weights) {
  if (failed()) return;
  Good(cuda::RouteExperts(MatrixOf(logits), routing, ids, MatrixOf(weights), stream()),
       "routing to experts");
}

void CudaBackend::GatherExpertRows(const Tensor& x, std::span<const int32_t> rows,
                                   const Tensor& out) {
  const auto count = static_cast<int64_t>(rows.size());
  WINNOW_CHECK(out.cols == x.cols && out.rows >= count);
  for (const int32_t row : rows) WINNOW_CHECK(row >= 0 && row < x.rows);
  if (!BeginStaging(rows.size_bytes() + 256)) return;
  const int32_t* on_device = Stage(rows);
  if (!EndStaging()) return;
  Good(cuda::GatherExpertRows(MatrixOf(x), on_device, MatrixOf(out.RowRange(0, count)), stream()),
       "rows for experts");
}

void CudaBackend::AddExpertRows(const Tensor& x, std::span<const int32_t> places,
                                const Tensor& weights, const Tensor& y) {
  WINNOW_CHECK(static_cast<int64_t>(places.size()) == weights.rows * weights.cols);
  for (const int32_t place : places) WINNOW_CHECK(place >= 0 && place < x.rows);
  if (!BeginStaging(places.size_bytes() + 256)) return;
  const int32_t* on_device = Stage(places);
  if (!EndStaging()) return;
  Good(cuda::AddExpertRows(MatrixOf(x), on_device, MatrixOf(weights), MatrixOf(y), stream()),
       "adding what experts give");
}

std::unique_ptr<ExpertSet> CudaBackend::MakeExpertSet(std::span<const ExpertMatrices> experts) {
  if (experts.empty() || failed()) return nullptr;
  const bool has_biases = experts[0].gate_up_bias != nullptr;
  for (const ExpertMatrices& expert : experts) {
    WINNOW_CHECK((expert.gate_up_bias != nullptr) == has_biases &&
                 (expert.down_bias != nullptr) == has_biases);
  }
  const auto count = static_cast<int64_t>(experts.size());
  const auto upload = [&](const auto& values) {
    const size_t size_bytes = values.size() * sizeof(values[0]);
    Buffer buffer = Allocate(size_bytes);
    if (buffer.data() != nullptr) CopyToDevice(values.data(), buffer.data(), size_bytes);
    return buffer;
  };
  CudaExpertSet::Matrices matrices[2];
  for (int i = 0; i < 2; ++i) {
    CudaExpertSet::Matrices& made = matrices[i];
    std::vector<const void*> addresses;
    std::vector<const float*> biases;
    std::vector<std::byte> maps;
    for (const ExpertMatrices& expert : experts) {
      const std::span<const PackedPart> parts =
          PackedOf(*(i == 0 ? expert.gate_up : expert.down)).parts();
      const DeviceWeights& w = parts[0].weights;
      if (addresses.empty()) made.kind = w;
      if (parts.size() > 1 || !IsAlike(w, made.kind) || !MultipliesTiles(w, kMatmulTileRows)) {
        return nullptr;
      }
      addresses.push_back(w.data);
      biases.push_back(i == 0 ? expert.gate_up_bias : expert.down_bias);
      if (NeedsTileMaps(w.way, kPanelTileRows)) {
        maps.resize(maps.size() + kTileMapBytes);
        if (!MakeTileMap(w, i == 0 && !has_biases && GatesTiles(w, kPanelTileRows),
                         maps.data() + maps.size() - kTileMapBytes)) {
          return nullptr;
        }
      }
    }
    made.addresses = upload(addresses);
    if (made.addresses.data() == nullptr) return nullptr;
    if (has_biases) {
      made.biases = upload(biases);
      if (made.biases.data() == nullptr) return nullptr;
    }
    if (maps.empty()) continue;
    made.maps = upload(maps);
    for (int64_t e = 0; e < count; ++e) {
      addresses[e] = static_cast<const std::byte*>(made.maps.data()) + e * kTileMapBytes;
    }
    made.addresses_of_maps = upload(addresses);
    if (made.maps.data() == nullptr || made.addresses_of_maps.data() == nullptr) return nullptr;
  }
  const DeviceWeights &gate_up = matrices[0].kind, &down = matrices[1].kind;
  if (!Synchronize() || gate_up.out != 2 * down.in || gate_up.in != down.out) return nullptr;
  return std::make_unique<CudaExpertSet>(count, std::move(matrices[0]), std::move(matrices[1]));
}

int64_t CudaBackend::RoutedExpertRows(int64_t slots, int64_t experts) const {
  return MostExpertTiles(slots, experts, kPanelTileRows) * kPanelTileRows;
}

bool CudaBackend::AddRoutedExperts(const RoutedExpertsArgs& args) {
  const auto& set = static_cast<const CudaExpertSet&>(args.experts);
  if (args.clamped.has_value() && set.gates_products()) return false;  // products know silu alone
  const DeviceWeights &gate_up = set.gate_up.kind, &down = set.down.kind;
  const int64_t m = args.normed.rows;
  WINNOW_CHECK(args.logits.rows == m && args.logits.cols == set.count);
  WINNOW_CHECK(args.normed.cols == gate_up.in && args.hidden.cols == down.out &&
               args.hidden.rows >= m && args.rows.cols == down.out);
  const auto fits = [&](int64_t rows, int32_t tile_rows) {
    const ExpertsWorkspace at(args, set, rows, tile_rows);
    return at.size_bytes <= kWorkspaceBytes &&
           at.tiles * tile_rows <= std::min(args.rows.rows, kMostTiledRows);
  };
  const int64_t slots = m * args.per_token;
  int64_t at_once = m;
  int32_t tile_rows = kMatmulTileRows;
  if (slots > std::min(kRoutedTogether, set.count * kMatmulTileRows)) {
    // One expert after the other, where one keeps the device busy.
    if (gate_up.way != down.way || FillsDevice(gate_up)) return false;
    const bool blocks = gate_up.way == DeviceWeights::Way::kBlocks;
    tile_rows = blocks ? kMatmulFewRows : kPanelTileRows;
    while (at_once > 1 && !fits(at_once, tile_rows)) at_once = (at_once + 1) / 2;
    if (!blocks && at_once * args.per_token >= set.count * 4 * kPanelTileRows &&
        fits(at_once, 2 * kPanelTileRows) && MultipliesTiles(gate_up, 2 * kPanelTileRows) &&
        MultipliesTiles(down, 2 * kPanelTileRows)) {
      tile_rows = 2 * kPanelTileRows;
    }
  }
  if (!MultipliesTiles(gate_up, tile_rows) || !MultipliesTiles(down, tile_rows) ||
      !fits(at_once, tile_rows)) {
    return false;
  }
  for (int64_t first = 0; first < m; first += at_once) {
    const int64_t rows = std::min(at_once, m - first);
    AddExpertsOf(args, first, rows, tile_rows);
  }
  return true;
}

// Rows [first, first + m) of the call.
void CudaBackend::AddExpertsOf(const RoutedExpertsArgs& args, int64_t first, int64_t m,
                               int32_t tile_rows) {
  const auto& set = static_cast<const CudaExpertSet&>(args.experts);
  const DeviceWeights &gate_up = set.gate_up.kind, &down = set.down.kind;
  const ExpertsWorkspace at(args, set, m, tile_rows);
  if (!Prepare(experts_, at.size_bytes, {at.count, sizeof(int32_t)}, {1}, "experts")) return;
  std::byte* const base = experts_.data();
  const auto floats = [&](size_t offset) { return reinterpret_cast<float*>(base + offset); };
  const auto integers = [&](size_t offset) { return reinterpret_cast<int32_t*>(base + offset); };
  const auto addresses = [&](size_t offset) {
    return reinterpret_cast<const void**>(base + offset);
  };
  const ExpertTiles tiles = {integers(at.count),
                             integers(at.expert),
                             addresses(at.gate_up),
                             addresses(at.down),
                             integers(at.row_of_place),
                             integers(at.place_of_slot),
                             at.tiles,
                             tile_rows};
  const int64_t places = at.tiles * tile_rows;
  const DeviceMatrix weights = {floats(at.weights), m, args.per_token, args.per_token};
  const DeviceMatrix gated = {floats(at.gated), places, gate_up.out, gate_up.out};
  const DeviceMatrix given = MatrixOf(args.rows.RowRange(0, places));
  const ExpertGates gates = {set.gate_up.Biases(), args.clamped.has_value() ? 1 : 0,
                             args.clamped.value_or(ClampedSwiglu{})};
  const auto multiply = [&](size_t x, const DeviceMatrix& y, void* to, const void* const* w,
                            const DeviceWeights& kind) {
    return Good(MatmulTiles({.x = base + x,
                             .y = y.data,
                             .y_stride = y.stride,
                             .count = tiles.count,
                             .w = w,
                             .most = at.tiles,
                             .tile_rows = tile_rows,
                             .gated = to},
                            kind, stream()),
                "a product of experts");
  };
  static_cast<void>(
      Good(RouteToTiles(MatrixOf(args.logits.RowRange(first, m)), args.routing,
                        set.gate_up.Finders(tile_rows), set.down.Finders(tile_rows),
                        integers(at.ids), tiles, weights, stream()),
           "routing to experts") &&
      Good(OrderTiles(MatrixOf(args.normed.RowRange(first, m)), tiles, set.gate_up.is_int8(),
                      base + at.x, stream()),
           "rows for experts") &&
      multiply(at.x, gated, at.gates ? base + at.activated : nullptr, tiles.gate_up, gate_up) &&
      (at.gates ||
       Good(GateTiles(gated, tiles, gates, set.down.is_int8(), base + at.activated, stream()),
            "gates of experts")) &&
      multiply(at.activated, given, nullptr, tiles.down, down) &&
      Good(AddTiles(given, tiles, set.down.Biases(), weights,
                    MatrixOf(args.hidden.RowRange(first, m)), stream()),
           "adding what experts give"));
}

}  // namespace winnow::kernels::cuda
