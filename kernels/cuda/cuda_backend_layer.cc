#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/block_order.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/matmul_int8.h"
#include "kernels/host_matrix.h"

namespace winnow::kernels::cuda {

namespace {

// Weights on their way to be packed, and rows of the embedding on theirs.
constexpr size_t kPackBytes = size_t{64} << 20;
constexpr int64_t kEmbedRows = 512;
// Weights that are widened for a product of many rows, at a time: so few that memory for them is little, and so many that
// their product has work for the whole device.
constexpr size_t kWidenedBytes = size_t{128} << 20;
// Tokens of a chunk that are a dimension of a grid.
constexpr int32_t kMostGridTokens = 65535;
static_assert(kAttentionTileRows == kDenseTileRows);
static_assert(kAttentionTilesOfASet == kDenseTilesTogether);
static_assert(kWidenedKvBytes <= kWorkspaceBytes);

// Outputs that are widened at a time, where rows have `in` values.
int64_t OutputsAtOnce(int64_t out, int64_t in) {
  constexpr int64_t kUnit = 128;  // of the products' tiles
  const int64_t fit = static_cast<int64_t>(kWidenedBytes) / (2 * in) / kUnit * kUnit;
  // Pieces of about one size.
  const int64_t pieces = CeilDiv(out, std::max(fit, kUnit));
  return CeilDiv(CeilDiv(out, pieces), kUnit) * kUnit;
}
// Outputs whose integers of 4 bits become 8 at a time.
int64_t IntegersAtOnce(const DeviceWeights& w) {
  return 2 * OutputsAtOnce(CeilDiv(w.out, 2), w.in);
}
size_t WidenedBytes(int64_t out, int64_t in) {
  return PackedMatrixBytes(std::min(out, OutputsAtOnce(out, in)), in, DeviceWeights::Way::kTensor,
                           DType::kBF16);
}

}  // namespace

// ---- products and what lies around attention ----

std::unique_ptr<PackedMatrix> CudaBackend::Pack(std::span<const HostMatrix> parts, DType compute) {
  WINNOW_CHECK(!parts.empty());
  DeviceWeights weights;
  weights.in = parts[0].cols;
  bool same = true;
  for (const HostMatrix& part : parts) {
    WINNOW_CHECK(part.cols == weights.in);
    WINNOW_CHECK(compute != DType::kF16 || part.dtype == DType::kF16);
    weights.out += part.rows;
    same = same && part.dtype == parts[0].dtype;
  }
  if (compute != DType::kBF16) {
    // Widening is exact, so weights stay as short as they are.
    weights.way = DeviceWeights::Way::kExact;
    weights.storage = same ? parts[0].dtype : DType::kF32;
  }
  PackedPart packed = {0, weights, {}};
  if (!AllocatePart(packed)) return nullptr;
  int64_t row = 0;
  for (const HostMatrix& part : parts) {
    const auto row_bytes = static_cast<size_t>(part.cols) * DTypeBytes(part.dtype);
    const int64_t at_once = std::max<int64_t>(1, static_cast<int64_t>(kPackBytes / row_bytes));
    for (int64_t first = 0; first < part.rows; first += at_once) {
      const int64_t count = std::min(at_once, part.rows - first);
      if (!Grow(pack_, count * row_bytes, "weights on their way")) return nullptr;
      Good(cudaMemcpyAsync(pack_.data(), RowOf(part, first), count * row_bytes,
                           cudaMemcpyHostToDevice, stream()),
           "weights");
      Good(PackRows(pack_.data(), part.dtype, row, count, packed.weights, stream()), "weights");
      row += count;
    }
  }
  if (!Synchronize()) return nullptr;
  std::vector<PackedPart> all;
  all.push_back(std::move(packed));
  return std::make_unique<CudaPackedMatrix>(std::move(all));
}

bool CudaBackend::AllocatePart(PackedPart& part) {
  if (failed()) return false;
  const DeviceWeights& w = part.weights;
  part.memory = Allocate(w.way == DeviceWeights::Way::kBlocks ? BlockBytes(w.type, w.out, w.in)
                         : w.way == DeviceWeights::Way::kInt8
                             ? Int8WeightBytes(w.out, w.in, w.integer_bits)
                             : PackedMatrixBytes(w.out, w.in, w.way, w.storage));
  part.weights.data = part.memory.data();
  return part.memory.data() != nullptr;
}

std::unique_ptr<PackedMatrix> CudaBackend::PackStored(std::span<const StoredMatrix> parts,
                                                      DType compute) {
  WINNOW_CHECK(!parts.empty() && compute == DType::kBF16);
  // Neighbours of one type are one part: their products are one launch.
  std::vector<PackedPart> packed;
  std::vector<std::pair<WeightType, int32_t>> kinds;
  int64_t out = 0;
  for (const StoredMatrix& part : parts) {
    WINNOW_CHECK(part.cols == parts[0].cols && part.cols % BlockSizeOf(part.type).values == 0);
    const auto rows = static_cast<int64_t>(part.rows.size());
    const std::pair kind(part.type, part.integer_bits);
    if (kinds.empty() || kinds.back() != kind) {
      const bool plain = PlainType(part.type).has_value();
      DeviceWeights weights;
      weights.in = part.cols;
      weights.way = plain                              ? DeviceWeights::Way::kTensor
                    : part.type == WeightType::kI8x128 ? DeviceWeights::Way::kInt8
                                                       : DeviceWeights::Way::kBlocks;
      // 4-bit floats become 8-bit ones, which have the same values.
      if (!plain) weights.type = part.type == WeightType::kMxfp4 ? WeightType::kF8x32 : part.type;
      if (weights.way == DeviceWeights::Way::kInt8) weights.integer_bits = part.integer_bits;
      // Rounded rows and rows in order are not made for one product.
      WINNOW_CHECK(packed.empty() || (weights.way == DeviceWeights::Way::kInt8) ==
                                         (packed[0].weights.way == DeviceWeights::Way::kInt8));
      packed.push_back({out, weights, {}});
      kinds.push_back(kind);
    }
    packed.back().weights.out += rows;
    out += rows;
  }
  for (PackedPart& part : packed) {
    if (!AllocatePart(part)) return nullptr;
  }
  size_t at = 0;
  int64_t row = 0;
  std::vector<std::byte> gathered;
  for (const StoredMatrix& part : parts) {
    const auto rows = static_cast<int64_t>(part.rows.size());
    while (row >= packed[at].first_output + packed[at].weights.out) ++at;
    const DeviceWeights& weights = packed[at].weights;
    const bool converts = part.type == WeightType::kMxfp4;
    const auto row_bytes =
        static_cast<size_t>(WeightRowBytes(converts ? WeightType::kF8x32 : part.type, part.cols));
    const int64_t at_once = std::max<int64_t>(1, static_cast<int64_t>(kPackBytes / row_bytes));
    for (int64_t first = 0; first < rows; first += at_once) {
      const int64_t count = std::min(at_once, rows - first);
      if (!Grow(pack_, count * row_bytes, "weights on their way")) return nullptr;
      // Rows may lie anywhere; most often they follow each other.
      const std::byte* source = part.rows[first];
      bool together = !converts;
      for (int64_t i = 1; i < count && together; ++i) {
        together = part.rows[first + i] == source + i * row_bytes;
      }
      if (!together) {
        gathered.resize(count * row_bytes);
        for (int64_t i = 0; i < count; ++i) {
          std::byte* const to = gathered.data() + i * row_bytes;
          if (converts) {
            Mxfp4ToFloat8(part.rows[first + i], part.cols, to);
          } else {
            std::memcpy(to, part.rows[first + i], row_bytes);
          }
        }
        source = gathered.data();
      }
      Good(cudaMemcpyAsync(pack_.data(), source, count * row_bytes, cudaMemcpyHostToDevice,
                           stream()),
           "weights");
      const int64_t to = row - packed[at].first_output;
      Good(weights.way == DeviceWeights::Way::kBlocks
               ? PackBlocks(pack_.data(), to, count, weights, stream())
           : weights.way == DeviceWeights::Way::kInt8
               ? PackInt8(pack_.data(), to, count, weights, stream())
               : PackRows(pack_.data(), *PlainType(part.type), to, count, weights, stream()),
           "weights");
      // `gathered` is written again, and memory of the host may be copied when the call has returned.
      if (!Synchronize()) return nullptr;
      row += count;
    }
  }
  // Taken now, so that no step has to.
  for (const PackedPart& part : packed) {
    const DeviceWeights& weights = part.weights;
    constexpr int64_t kAnyRows = std::numeric_limits<int32_t>::max();
    const bool int4 = weights.way == DeviceWeights::Way::kInt8 && weights.integer_bits == 4;
    if (!int4 && (weights.way != DeviceWeights::Way::kBlocks || StreamsBlocks(kAnyRows, weights))) {
      continue;
    }
    const size_t bytes =
        int4 ? Int8WeightBytes(std::min(weights.out, IntegersAtOnce(weights)), weights.in)
             : WidenedBytes(weights.out, weights.in);
    if (bytes <= widened_.size_bytes()) continue;
    widened_ = Buffer();
    widened_ = Allocate(bytes);
    if (widened_.data() == nullptr) return nullptr;
  }
  if (!Synchronize()) return nullptr;
  return std::make_unique<CudaPackedMatrix>(std::move(packed));
}

void CudaBackend::Matmul(const Tensor& x, const PackedMatrix& w, const Tensor& y,
                         const MatmulEpilogue& epilogue) {
  const CudaPackedMatrix& packed = PackedOf(w);
  const DeviceWeights& first = packed.parts()[0].weights;
  WINNOW_CHECK(x.cols == first.in && y.cols == packed.out_features() && y.rows >= x.rows);
  if (packed.parts().size() == 1 &&
      (first.way != DeviceWeights::Way::kBlocks || StreamsBlocks(x.rows, first)) &&
      (first.way != DeviceWeights::Way::kInt8 || MultipliesAsItLies(x.rows, first))) {
    if (!Grow(matmul_, MatmulWorkspaceBytes(x.rows, first), "a matrix product")) return;
    Good(cuda::Matmul(
             {x.f32(), x.stride, x.rows, y.f32(), y.stride, epilogue.bias, epilogue.accumulate},
             first, matmul_.data(), stream()),
         "a matrix product");
    return;
  }
  static_cast<void>(MatmulOf(x.rows, w, y, epilogue, [&](void* to, bool rounded) {
    if (x.rows == 0) return cudaSuccess;
    return rounded ? RoundRows(MatrixOf(x), to, stream())
                   : OrderRows(x.f32(), x.stride, x.rows, x.cols, to, stream());
  }));
}

// Whether it did: products that are exact take no operand in order. order(to, rounded) makes it, or rounded rows.
template <typename Order>
bool CudaBackend::MatmulOf(int64_t m, const PackedMatrix& w, const Tensor& y,
                           const MatmulEpilogue& epilogue, Order order) {
  const CudaPackedMatrix& packed = PackedOf(w);
  if (packed.is_exact()) return false;
  WINNOW_CHECK(y.cols == packed.out_features() && y.rows >= m);
  const bool rounded = packed.is_int8();
  const int64_t in = packed.in_features();
  if (!Grow(matmul_, rounded ? RoundedBytes(m, in) : OrderedBytes(m, in), "a matrix product") ||
      !Good(order(matmul_.data(), rounded), "a product's operand")) {
    return true;
  }
  if (!rounded) {
    MultiplyOrdered(m, w, y, epilogue, matmul_.data());
    return true;
  }
  MultiplyRounded(m, w, y, epilogue, matmul_.data());
  return true;
}

void CudaBackend::MultiplyRounded(int64_t m, const PackedMatrix& w, const Tensor& y,
                                  const MatmulEpilogue& epilogue, const void* rounded) {
  const DeviceWeights& weights = PackedOf(w).parts()[0].weights;
  MatmulArgs args = {.m = m,
                     .y = y.f32(),
                     .y_stride = y.stride,
                     .bias = epilogue.bias,
                     .accumulate = epilogue.accumulate};
  if (MultipliesAsItLies(m, weights) || m == 0) {
    Good(MatmulRounded(args, weights, rounded, stream()), "a matrix product");
    return;
  }
  const int64_t at_once = IntegersAtOnce(weights);
  args.new_weights = true;
  for (int64_t first = 0; first < weights.out; first += at_once) {
    DeviceWeights widened = weights;
    widened.data = widened_.data();
    widened.out = std::min(at_once, weights.out - first);
    widened.integer_bits = 8;
    args.y = y.f32() + first;
    args.bias = epilogue.bias == nullptr ? nullptr : epilogue.bias + first;
    if (!Good(WidenInt4(weights, first, widened.out, widened_.data(), stream()),
              "widening weights") ||
        !Good(MatmulRounded(args, widened, rounded, stream()), "a matrix product")) {
      return;
    }
  }
}

void CudaBackend::MultiplyOrdered(int64_t m, const PackedMatrix& w, const Tensor& y,
                                  const MatmulEpilogue& epilogue, const void* ordered) {
  for (const PackedPart& part : PackedOf(w).parts()) {
    const auto multiply = [&](const DeviceWeights& weights, int64_t first_output, bool is_new) {
      MatmulArgs args;
      args.m = m;
      args.y = y.f32() + first_output;
      args.y_stride = y.stride;
      args.bias = epilogue.bias == nullptr ? nullptr : epilogue.bias + first_output;
      args.accumulate = epilogue.accumulate;
      args.new_weights = is_new;
      return Good(cuda::MatmulOrdered(args, weights, ordered, stream()), "a matrix product");
    };
    if (part.weights.way != DeviceWeights::Way::kBlocks || StreamsBlocks(m, part.weights)) {
      if (!multiply(part.weights, part.first_output, /*is_new=*/false)) return;
      continue;
    }
    const int64_t at_once = OutputsAtOnce(part.weights.out, part.weights.in);
    for (int64_t first = 0; first < part.weights.out && m > 0; first += at_once) {
      DeviceWeights widened;
      widened.data = widened_.data();
      widened.in = part.weights.in;
      widened.out = std::min(at_once, part.weights.out - first);
      if (!Good(WidenBlocks(part.weights, first, widened.out, widened_.data(), stream()),
                "widening weights") ||
          !multiply(widened, part.first_output + first, /*is_new=*/true)) {
        return;
      }
    }
  }
}

void CudaBackend::NormMatmul(const NormMatmulArgs& args) {
  WINNOW_CHECK(args.x.cols == args.w.in_features());
  if (!MatmulOf(args.x.rows, args.w, args.y, args.epilogue, [&](void* to, bool rounded) {
        const auto norm = rounded ? RmsNormRounded : RmsNormOrdered;
        return norm(MatrixOf(args.x), args.weight, args.eps, to, stream());
      })) {
    Backend::NormMatmul(args);
  }
}

void CudaBackend::SiluMatmul(const Tensor& gate_up, const PackedMatrix& w, const Tensor& activated,
                             const Tensor& y, const MatmulEpilogue& epilogue) {
  WINNOW_CHECK(gate_up.cols == 2 * w.in_features());
  if (!MatmulOf(gate_up.rows, w, y, epilogue, [&](void* to, bool rounded) {
        const auto gate = rounded ? SiluMulRounded : SiluMulOrdered;
        return gate(MatrixOf(gate_up), to, stream());
      })) {
    Backend::SiluMatmul(gate_up, w, activated, y, epilogue);
  }
}

// Many rows: gates and ups stay in registers, and what the second product reads lies where they would.
void CudaBackend::GatedMlp(const GatedMlpArgs& args) {
  const CudaPackedMatrix& packed = PackedOf(args.gate_up);
  const DeviceWeights& weights = packed.parts()[0].weights;
  const int64_t m = args.hidden.rows, width = args.down.in_features();
  const Tensor& rows = args.gate_rows;
  const bool rounded = packed.is_int8();
  WINNOW_CHECK(packed.out_features() == 2 * width && packed.in_features() == args.hidden.cols);
  WINNOW_CHECK(rows.rows >= m && rows.cols == 2 * width);
  const bool has_room = rows.stride == rows.cols &&
                        (rounded ? RoundedBytes(m, width) : OrderedBytes(m, width)) <=
                            static_cast<size_t>(m * rows.cols) * 4 &&
                        reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
  if (!has_room || packed.parts().size() > 1 || PackedOf(args.down).is_exact() ||
      PackedOf(args.down).is_int8() != rounded ||
      !(rounded ? GatesRounded(m, weights) : GatesProducts(m, weights))) {
    Backend::GatedMlp(args);
    return;
  }
  WINNOW_CHECK(args.down.out_features() == args.hidden.cols);
  MatmulArgs product;
  product.m = m;
  product.bias = args.gate_up_bias;
  const int64_t in = weights.in;
  const auto norm = rounded ? RmsNormRounded : RmsNormOrdered;
  const auto multiply = rounded ? MatmulRoundedGated : MatmulGated;
  if (!Grow(matmul_, rounded ? RoundedBytes(m, in) : OrderedBytes(m, in), "a matrix product") ||
      !Good(norm(MatrixOf(args.hidden), args.norm_weight, args.eps, matmul_.data(), stream()),
            "a norm") ||
      !Good(multiply(product, weights, matmul_.data(), rows.data, stream()),
            "a gated matrix product")) {
    return;
  }
  const MatmulEpilogue epilogue = {.bias = args.down_bias, .accumulate = true};
  if (rounded) {
    MultiplyRounded(m, args.down, args.hidden, epilogue, rows.data);
  } else {
    MultiplyOrdered(m, args.down, args.hidden, epilogue, rows.data);
  }
}

void CudaBackend::EmbedRows(const HostMatrix& table, std::span<const int32_t> ids, float scale,
                            const Tensor& out) {
  WINNOW_CHECK(out.cols == table.cols && out.rows >= static_cast<int64_t>(ids.size()));
  for (const int32_t id : ids) WINNOW_CHECK(id >= 0 && id < table.rows);
  // The table lies in the host's memory, at any address: its rows travel.
  const auto row_bytes = static_cast<size_t>(table.cols) * DTypeBytes(table.dtype);
  for (size_t first = 0; first < ids.size(); first += kEmbedRows) {
    const size_t count = std::min<size_t>(kEmbedRows, ids.size() - first);
    if (!BeginStaging(count * (AlignUp(row_bytes, 16) + 4) + 512)) return;
    const std::byte* rows = nullptr;
    numbers_.resize(count);
    // Rows one behind the other: none is padded but by its own width.
    staging_end_ = AlignUp(staging_end_, 16);
    rows = static_cast<std::byte*>(staged_.data()) + staging_end_;
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(static_cast<std::byte*>(pinned_.data()) + staging_end_,
                  RowOf(table, ids[first + i]), row_bytes);
      staging_end_ += row_bytes;
      numbers_[i] = static_cast<int32_t>(i);
    }
    const int32_t* numbers = Stage(std::span<const int32_t>(numbers_));
    if (!EndStaging()) return;
    Good(cuda::EmbedRows(
             rows, table.dtype, numbers, scale,
             MatrixOf(out.RowRange(static_cast<int64_t>(first), static_cast<int64_t>(count))),
             stream()),
         "embedding");
  }
}

void CudaBackend::RmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& out) {
  if (failed()) return;
  Good(cuda::RmsNorm(MatrixOf(x), weight, eps, MatrixOf(out.RowRange(0, x.rows)), stream()),
       "a norm");
}

void CudaBackend::AddRmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& y) {
  if (failed()) return;
  Good(cuda::AddRmsNorm(MatrixOf(x), weight, eps, MatrixOf(y.RowRange(0, x.rows)), stream()),
       "a norm that is added");
}

void CudaBackend::RmsNormHeads(const Tensor& x, int32_t head_dim, const float* weight, float eps) {
  if (failed()) return;
  Good(cuda::RmsNormHeads(MatrixOf(x), head_dim, weight, eps, stream()), "a norm of heads");
}

void CudaBackend::RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq,
                            float scale, std::span<const float> factors, const Tensor& cos_sin) {
  const auto rows = static_cast<int64_t>(positions.size());
  WINNOW_CHECK(cos_sin.rows >= rows);
  WINNOW_CHECK(factors.empty() || factors.size() == positions.size());
  if (!BeginStaging(positions.size_bytes() + inv_freq.size_bytes() + factors.size_bytes() + 512)) {
    return;
  }
  const int32_t* of_positions = Stage(positions);
  const float* of_freq = Stage(inv_freq);
  const float* of_factors = factors.empty() ? nullptr : Stage(factors);
  if (!EndStaging()) return;
  Good(cuda::RopeTable(of_positions, of_freq, static_cast<int32_t>(inv_freq.size()), scale,
                       of_factors, MatrixOf(cos_sin.RowRange(0, rows)), stream()),
       "the rotation table");
}

void CudaBackend::Rope(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) {
  if (failed()) return;
  Good(cuda::Rope(MatrixOf(x), head_dim, MatrixOf(cos_sin), stream()), "rotation");
}

void CudaBackend::Gate(const auto& gate, const Tensor& gate_up, const Tensor& out) {
  constexpr int64_t kRows = 32768;  // of a grid
  for (int64_t first = 0; first < gate_up.rows && !failed(); first += kRows) {
    const int64_t count = std::min(kRows, gate_up.rows - first);
    Good(gate(MatrixOf(gate_up.RowRange(first, count)), MatrixOf(out.RowRange(first, count)),
              stream()),
         "gates");
  }
}

void CudaBackend::SiluMul(const Tensor& gate_up, const Tensor& out) {
  Gate(cuda::SiluMul, gate_up, out);
}

void CudaBackend::GeluTanhMul(const Tensor& gate_up, const Tensor& out) {
  Gate(cuda::GeluTanhMul, gate_up, out);
}

void CudaBackend::ClampedSwigluMul(const Tensor& gate_up, const ClampedSwiglu& by,
                                   const Tensor& out) {
  Gate([&by](const DeviceMatrix& from, const DeviceMatrix& to,
             Stream stream) { return cuda::ClampedSwigluMul(from, by, to, std::move(stream)); },
       gate_up, out);
}

void CudaBackend::WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                          void* pool, const KvLayout& layout) {
  if (HostPool* host = HostPoolOf(pool)) {
    if (!host->kv->shape().of_frames) return WriteHostKv(*host, k, v, chunks, layout);
    host->kv->staging().Written(host->index, chunks);
  }
  int32_t most = 0;
  for (const AttentionChunk& chunk : chunks) most = std::max(most, chunk.num_tokens);
  const DeviceChunk* on_device = StageChunks(chunks, layout);
  if (on_device == nullptr) return;
  Good(cuda::WriteKv(MatrixOf(k), MatrixOf(v), on_device, static_cast<int32_t>(chunks.size()), most,
                     pool, layout, stream()),
       "writing KV");
}

void CudaBackend::RopeAndWriteKv(const RopeAndWriteKvArgs& args) {
  const std::span<const AttentionChunk> chunks = args.chunks;
  int32_t most = 0;
  for (const AttentionChunk& chunk : chunks) most = std::max(most, chunk.num_tokens);
  HostPool* const host = HostPoolOf(args.pool);
  const bool through = host != nullptr && !host->kv->shape().of_frames;  // a row cache
  if ((through && most > 1) || most > kMostGridTokens) {
    return Backend::RopeAndWriteKv(args);
  }
  if (host != nullptr) host->kv->staging().Written(host->index, chunks);
  if (through) host->used = true;
  const DeviceChunk* on_device = StageChunks(chunks, args.layout);
  if (on_device == nullptr) return;
  const auto count = static_cast<int32_t>(chunks.size());
  static_cast<void>(stream());  // nothing is held back twice
  held_tokens_ = {.q = MatrixOf(args.q),
                  .k = MatrixOf(args.k),
                  .v = MatrixOf(args.v),
                  .q_cos_sin = MatrixOf(args.q_cos_sin),
                  .cos_sin = MatrixOf(args.cos_sin),
                  .chunks = on_device,
                  .num_tokens = count,
                  .pool = args.pool,
                  .layout = args.layout,
                  .cache = through ? &host->cache : nullptr};
  held_rows_.clear();
  for (const AttentionChunk& chunk : chunks)
    held_rows_.push_back({chunk.first_row, chunk.position});
  held_most_ = most;
  held_back_ = HeldBack::kRotation;
  if (most > 1) ReleaseHeldBack();
}

void CudaBackend::ReleaseHeldBack() {
  const HeldBack held_back = std::exchange(held_back_, HeldBack::kNothing);
  if (failed()) return;
  if (held_back == HeldBack::kMasses) {
    const HeldMasses& held = held_masses_;
    Good(cuda::StateMasses(held.states, held.count, held.head_dim, held.masses, bare_stream()),
         "masses");
  } else if (held_back == HeldBack::kMerges) {
    Good(EndStates(held_merges_, bare_stream()), "merging states");
  } else {
    ReleaseHeldTokens(held_back);
  }
}

void CudaBackend::ReleaseHeldTokens(HeldBack held_back) {
  const TokenArgs& held = held_tokens_;
  if (held.cache != nullptr) {
    for (const auto& [x, table] :
         {std::pair(held.q, held.q_cos_sin), std::pair(held.k, held.cos_sin)}) {
      Good(cuda::Rope(x, held.layout.head_dim, table, bare_stream()), "rotation");
    }
    Good(WriteKvThrough(held.k, held.v, held.chunks, held.num_tokens, held_most_, *held.cache,
                        held.layout, bare_stream()),
         "writing KV to the host");
  } else {
    Good(cuda::RopeAndWriteKv(held.q, held.k, held.v, held.q_cos_sin, held.cos_sin, held.chunks,
                              held.num_tokens, held_most_, held.pool, held.layout, bare_stream()),
         "rotation and writing KV");
  }
  if (held_back == HeldBack::kRotation || failed()) return;
  Good(cuda::EncodeKeys(*held_encoder_, held_spans_, held.num_tokens, 1, held.pool, held.layout,
                        held.codes, held.code_layout, bare_stream()),
       "codes of keys");
}

// ---- dense attention ----

void CudaBackend::Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
                         const KvLayout& layout, float scale, const Tensor& out) {
  if (const HostPool* host = HostPoolOf(pool)) {
    return AttendHost(*host, q, chunks, layout, scale, out);
  }
  AttendDevice(q, chunks, pool, layout, scale, out);
}

void CudaBackend::AttendDevice(const Tensor& q, std::span<const AttentionChunk> chunks,
                               const void* pool, const KvLayout& layout, float scale,
                               const Tensor& out) {
  ChooseWays(chunks, GroupOf(q, layout), layout, ways_);
  AttendSideBySide(q, ways_.few, pool, layout, scale, out);
  AttendSideBySide(q, ways_.several, pool, layout, scale, out);
  AttendChunks(q, ways_.many, DenseWay::kInTurn, pool, layout, scale, out);
  AttendChunks(q, ways_.widened, DenseWay::kWidened, pool, layout, scale, out);
}

void CudaBackend::AttendSideBySide(const Tensor& q, std::span<const AttentionChunk> chunks,
                                   const void* pool, const KvLayout& layout, float scale,
                                   const Tensor& out) {
  const int32_t group = GroupOf(q, layout);
  pieces_.clear();
  for (const AttentionChunk& chunk : chunks) {
    // At a long context the splits of a few queries take much memory: they go one after the other
    // then, down to what a tile of rows has room for.
    int32_t each = chunk.num_tokens;
    const auto workspace_bytes = [&] {
      return DenseAttentionWorkspaceBytes(
          {1, each, chunk.position + chunk.num_tokens, group, layout, DenseWay::kSideBySide});
    };
    while (each * group > kDenseTileRows && each > 1 && workspace_bytes() > kWorkspaceBytes) {
      each = (each + 1) / 2;
    }
    for (int32_t first = 0; first < chunk.num_tokens; first += each) {
      pieces_.push_back({chunk.first_row + first, std::min(each, chunk.num_tokens - first),
                         chunk.position + first, chunk.block_table, chunk.window, chunk.sinks});
    }
  }
  AttendChunks(q, pieces_, DenseWay::kSideBySide, pool, layout, scale, out);
}

bool CudaBackend::HasRoomToWiden(size_t size_bytes) {
  if (size_bytes >= widening_lacks_) return false;
  if (TryGrow(dense_, size_bytes)) return true;
  widening_lacks_ = size_bytes;
  return false;
}

void CudaBackend::AttendChunks(const Tensor& q, std::span<const AttentionChunk> chunks,
                               DenseWay way, const void* pool, const KvLayout& layout, float scale,
                               const Tensor& out) {
  const int32_t group = GroupOf(q, layout);
  for (size_t first = 0; first < chunks.size();) {
    DenseAttentionShape shape{0, 0, 0, group, layout, way};
    shape.windowed = chunks[first].window > 0;
    shape.sinks = chunks[first].sinks;
    while (first + shape.num_chunks < chunks.size() && shape.num_chunks < 1024) {
      const AttentionChunk& chunk = chunks[first + shape.num_chunks];
      DenseAttentionShape wider = shape;
      ++wider.num_chunks;
      wider.max_chunk_tokens = std::max(shape.max_chunk_tokens, chunk.num_tokens);
      wider.max_keys = std::max(shape.max_keys, chunk.position + chunk.num_tokens);
      if (shape.num_chunks > 0 && DenseAttentionWorkspaceBytes(wider) > kWorkspaceBytes) break;
      shape = wider;
    }
    const DeviceChunk* on_device = StageChunks(chunks.subspan(first, shape.num_chunks), layout);
    // The copy is for speed alone.
    if (way == DenseWay::kWidened && !HasRoomToWiden(DenseAttentionWorkspaceBytes(shape))) {
      shape.way = DenseWay::kInTurn;
    }
    if (on_device == nullptr || !Grow(dense_, DenseAttentionWorkspaceBytes(shape), "attention")) {
      return;
    }
    if (!Good(AttendDense(shape, q.f32(), q.stride, on_device, pool, scale, out.f32(), out.stride,
                          dense_.data(), stream()),
              "attention")) {
      return;
    }
    first += shape.num_chunks;
  }
}

}  // namespace winnow::kernels::cuda
