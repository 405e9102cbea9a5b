// What a prompt needs: matrix products of many rows and dense attention of many queries.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/bench.h"
#include "kernels/cuda/block_order.h"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/matmul_int8.h"
#include "kernels/quantized.h"

namespace winnow::kernels::cuda {

void BenchProducts(Bench& bench) {
  if (!bench.Wants("products")) return;
  struct Case {
    int64_t out, in;
  };
  for (const Case c :
       {Case{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}}) {
    DeviceWeights w{nullptr, c.out, c.in, DeviceWeights::Way::kTensor, DType::kBF16};
    const auto bytes = static_cast<int64_t>(PackedMatrixBytes(c.out, c.in, w.way, w.storage));
    const int copies = Bench::Copies(static_cast<double>(bytes));
    const auto weights = RandomBf16(bytes * copies, 0.02f);
    w.data = weights.data();
    for (const int64_t m : {1, 8, 16, 24, 32, 33, 64, 96, 128, 192, 256, 512, 1024, 2048, 8192}) {
      if (c.out > 100000 && m > 512) continue;  // nobody asks for so many logits
      const auto x = RandomFloats(m * c.in);
      Memory<float> y(m * c.out);
      Memory<std::byte> workspace(static_cast<int64_t>(MatmulWorkspaceBytes(m, w)));
      MatmulArgs args{x.data(), c.in, m, y.data(), c.out};
      CHECK_CUDA(Matmul(args, w, workspace.data(), nullptr));  // puts x in order
      for (const bool portable : {false, true}) {
        const std::string text =
            Text("m %d, out %d, in %d%s", static_cast<int>(m), static_cast<int>(c.out),
                 static_cast<int>(c.in), portable ? ", any device's kernel" : "");
        if (!bench.WantsShape(text)) continue;
        args.portable = portable;
        const double seconds = bench.Seconds(copies, 10, [&](int i, cudaStream_t stream) {
          DeviceWeights copy = w;
          copy.data = weights.data() + i * bytes;
          return MatmulOrdered(args, copy, workspace.data(), stream);
        });
        const double read = 2.0 * static_cast<double>(c.out * c.in + m * c.in);
        bench.Report("product", text, seconds, read + 4.0 * static_cast<double>(m * c.out), false,
                     2.0 * static_cast<double>(m) * static_cast<double>(c.out * c.in));
      }
    }
  }
}

// Gate and up of a prompt's rows, and what becomes of them: in one kernel, and in two.
void BenchGated(Bench& bench) {
  if (!bench.Wants("gated")) return;
  constexpr int64_t kWidth = 14336, kIn = 4096;
  DeviceWeights w{nullptr, 2 * kWidth, kIn, DeviceWeights::Way::kTensor, DType::kBF16};
  const auto bytes = static_cast<int64_t>(PackedMatrixBytes(w.out, w.in, w.way, w.storage));
  const int copies = Bench::Copies(static_cast<double>(bytes));
  const auto weights = RandomBf16(bytes * copies, 0.02f);
  for (const int64_t m : {256, 512, 1024, 2048, 8192}) {
    const std::string text = Text("m %d, width %d, in %d", static_cast<int>(m),
                                  static_cast<int>(kWidth), static_cast<int>(kIn));
    if (!bench.WantsShape(text) || !GatesProducts(m, w)) continue;
    const auto x = RandomFloats(m * kIn);
    Memory<float> y(m * w.out);
    Memory<std::byte> ordered(static_cast<int64_t>(OrderedBytes(m, kIn)));
    Memory<std::byte> to(static_cast<int64_t>(OrderedBytes(m, kWidth)));
    CHECK_CUDA(OrderRows(x.data(), kIn, m, kIn, ordered.data(), nullptr));
    MatmulArgs args;
    args.m = m;
    args.y = y.data();
    args.y_stride = w.out;
    const double operands = 2.0 * static_cast<double>(w.out * kIn + m * kIn + m * kWidth);
    const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(w.out * kIn);
    for (const bool gated : {false, true}) {
      const double seconds = bench.Seconds(copies, 10, [&](int i, cudaStream_t stream) {
        DeviceWeights copy = w;
        copy.data = weights.data() + i * bytes;
        if (gated) return MatmulGated(args, copy, ordered.data(), to.data(), stream);
        const cudaError_t error = MatmulOrdered(args, copy, ordered.data(), stream);
        return error != cudaSuccess
                   ? error
                   : SiluMulOrdered({y.data(), m, w.out, w.out}, to.data(), stream);
      });
      const double between = gated ? 0.0 : 8.0 * static_cast<double>(m * w.out);
      bench.Report(gated ? "gated product" : "product, gate", text, seconds, operands + between,
                   false, flops);
    }
  }
}

// Products with quantised blocks, and widening for those of many rows.
void BenchBlocks(Bench& bench) {
  if (!bench.Wants("blocks")) return;
  struct Case {
    int64_t out, in;
  };
  for (const WeightType type :
       {WeightType::kF8x128, WeightType::kQ8_0, WeightType::kQ4_1, WeightType::kL4x32,
        WeightType::kQ4_0, WeightType::kI4x128, WeightType::kQ4K, WeightType::kQ6K}) {
    for (const Case c :
         {Case{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}}) {
      DeviceWeights w{nullptr, c.out, c.in, DeviceWeights::Way::kBlocks, DType::kBF16, type};
      const auto bytes = static_cast<int64_t>(BlockBytes(type, c.out, c.in));
      const int copies = Bench::Copies(static_cast<double>(bytes));
      const auto weights = RandomBytes(bytes * copies);
      const auto copy_of = [&](int i) {
        DeviceWeights copy = w;
        copy.data = weights.data() + i * bytes;
        return copy;
      };
      const std::string shape = Text("%s, out %d, in %d", WeightTypeName(type),
                                     static_cast<int>(c.out), static_cast<int>(c.in));
      for (const int64_t m : {1, 2, 4, 8, 16, 32, 33, 48, 64, 65, 96, 128, 256, 512, 1024, 2048}) {
        if (c.out > 100000 && m > 512) continue;  // nobody asks for so many logits
        const std::string text = Text("m %d, %s", static_cast<int>(m), shape.c_str());
        if (!bench.WantsShape(text) || !StreamsBlocks(m, w)) continue;
        const auto x = RandomFloats(m * c.in);
        Memory<float> y(m * c.out);
        Memory<std::byte> workspace(static_cast<int64_t>(MatmulWorkspaceBytes(m, w)));
        const MatmulArgs args{x.data(), c.in, m, y.data(), c.out};
        CHECK_CUDA(OrderRows(x.data(), c.in, m, c.in, workspace.data(), nullptr));
        const double seconds = bench.Seconds(copies, 10, [&](int i, cudaStream_t stream) {
          return MatmulOrdered(args, copy_of(i), workspace.data(), stream);
        });
        bench.Report("product", text, seconds,
                     static_cast<double>(bytes) + 2.0 * static_cast<double>(m * c.in) +
                         4.0 * static_cast<double>(m * c.out),
                     false, 2.0 * static_cast<double>(m) * static_cast<double>(c.out * c.in));
      }
      if (c.out > 100000 || !bench.WantsShape("widen " + shape)) continue;
      Memory<std::byte> plain(static_cast<int64_t>(
          PackedMatrixBytes(c.out, c.in, DeviceWeights::Way::kTensor, DType::kBF16)));
      const double seconds = bench.Seconds(copies, 10, [&](int i, cudaStream_t stream) {
        return WidenBlocks(copy_of(i), 0, c.out, plain.data(), stream);
      });
      bench.Report("widen", shape, seconds,
                   static_cast<double>(bytes) + static_cast<double>(plain.count()));
    }
  }
}

// Copies of a matrix for W8A8, or W4A8. They hold the same few rows again and again, as many as memory of the host is filled with fast.
class Int8Matrices {
 public:
  Int8Matrices(int64_t out, int64_t in, int copies, int32_t bits = 8)
      : w_{nullptr, out, in, DeviceWeights::Way::kInt8, DType::kBF16, WeightType::kI8x128, bits},
        bytes_(static_cast<int64_t>(Int8WeightBytes(out, in, bits))),
        memory_(bytes_ * copies) {
    constexpr int64_t kRows = 256;
    const int64_t row_bytes = WeightRowBytes(WeightType::kI8x128, in);
    std::vector<std::byte> rows(kRows * row_bytes);
    std::vector<float> values(in);
    uint32_t state = 1;
    for (int64_t i = 0; i < kRows; ++i) {
      for (float& value : values) {
        state = state * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-36f;
      }
      if (bits == 4) {
        QuantizeRowToFourBits(values.data(), in, rows.data() + i * row_bytes);
      } else {
        QuantizeRow(WeightType::kI8x128, values.data(), in, rows.data() + i * row_bytes);
      }
    }
    const Memory<std::byte> source(rows);
    for (int i = 0; i < copies; ++i) {
      for (int64_t first = 0; first < out; first += kRows) {
        CHECK_CUDA(PackInt8(source.data(), first, std::min(kRows, out - first), copy(i), nullptr));
      }
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  DeviceWeights copy(int i) const {
    DeviceWeights copy = w_;
    copy.data = memory_.data() + i * bytes_;
    return copy;
  }
  int64_t bytes() const { return bytes_; }

 private:
  DeviceWeights w_;
  int64_t bytes_;
  Memory<std::byte> memory_;
};

// Products of W8A8, and rounding their rows.
void BenchInt8(Bench& bench) {
  if (!bench.Wants("int8")) return;
  struct Case {
    int64_t out, in;
  };
  for (const Case c : {Case{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}) {
    const int copies = Bench::Copies(static_cast<double>(Int8WeightBytes(c.out, c.in)));
    const Int8Matrices w(c.out, c.in, copies);
    for (const int64_t m : {1, 2, 4, 8, 9, 16, 32, 33, 64, 65, 96, 128, 256, 512, 1024, 2048}) {
      const std::string text = Text("m %d, out %d, in %d", static_cast<int>(m),
                                    static_cast<int>(c.out), static_cast<int>(c.in));
      if (!bench.WantsShape(text)) continue;
      const auto x = RandomFloats(m * c.in);
      Memory<float> y(m * c.out);
      Memory<std::byte> rounded(static_cast<int64_t>(RoundedBytes(m, c.in)));
      const DeviceMatrix of_x = {x.data(), m, c.in, c.in};
      CHECK_CUDA(RoundRows(of_x, rounded.data(), nullptr));
      MatmulArgs args;
      args.m = m;
      args.y = y.data();
      args.y_stride = c.out;
      const double seconds = bench.Seconds(copies, 10, [&](int i, cudaStream_t stream) {
        return MatmulRounded(args, w.copy(i), rounded.data(), stream);
      });
      bench.Report("product, W8A8", text, seconds,
                   static_cast<double>(w.bytes() + m * c.in) + 4.0 * static_cast<double>(m * c.out),
                   false, 2.0 * static_cast<double>(m) * static_cast<double>(c.out * c.in));
      const double rounding = bench.Seconds(
          1, 10, [&](int, cudaStream_t stream) { return RoundRows(of_x, rounded.data(), stream); });
      bench.Report("rounding", text, rounding, 5.0 * static_cast<double>(m * c.in));
    }
  }
}

// A layer of W8A8 or W4A8 without attention: a product alone begins while the one before it still runs, and in a layer it waits for its rows.
void BenchLayerOf(Bench& bench, int32_t bits) {
  constexpr int64_t kHidden = 4096, kQkv = 6144, kWidth = 14336;
  constexpr int kCopies = 2;
  const Int8Matrices qkv(kQkv, kHidden, kCopies, bits), o(kHidden, kHidden, kCopies, bits),
      gate_up(2 * kWidth, kHidden, kCopies, bits), down(kHidden, kWidth, kCopies, bits);
  for (const int64_t m : {1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192}) {
    for (const bool gated : {false, true}) {
      const std::string text = Text("m %d%s", static_cast<int>(m), gated ? ", gated product" : "");
      if (!bench.WantsShape(text) || !MultipliesAsItLies(m, gate_up.copy(0)) ||
          (gated && !GatesRounded(m, gate_up.copy(0)))) {
        continue;
      }
      const auto hidden = RandomFloats(m * kHidden), norm = RandomFloats(kHidden);
      Memory<float> sums(m * 2 * kWidth);
      Memory<std::byte> rounded(static_cast<int64_t>(RoundedBytes(m, kWidth)));
      Memory<std::byte> activated(rounded.count());
      const DeviceMatrix of_hidden = {hidden.data(), m, kHidden, kHidden};
      const auto product = [&](const DeviceWeights& w, const void* x, bool to_hidden,
                               cudaStream_t stream) {
        MatmulArgs args;
        args.m = m;
        args.y = to_hidden ? hidden.data() : sums.data();
        args.y_stride = w.out;
        args.accumulate = to_hidden;
        CHECK_CUDA(MatmulRounded(args, w, x, stream));
      };
      const auto round_norm = [&](cudaStream_t stream) {
        CHECK_CUDA(RmsNormRounded(of_hidden, norm.data(), 1e-5f, rounded.data(), stream));
      };
      const double seconds = bench.Seconds(kCopies, 4, [&](int i, cudaStream_t stream) {
        round_norm(stream);
        product(qkv.copy(i), rounded.data(), false, stream);
        CHECK_CUDA(RoundRows({sums.data(), m, kHidden, kQkv}, rounded.data(), stream));
        product(o.copy(i), rounded.data(), true, stream);
        round_norm(stream);
        if (gated) {
          MatmulArgs args;
          args.m = m;
          CHECK_CUDA(
              MatmulRoundedGated(args, gate_up.copy(i), rounded.data(), activated.data(), stream));
        } else {
          product(gate_up.copy(i), rounded.data(), false, stream);
          CHECK_CUDA(
              SiluMulRounded({sums.data(), m, 2 * kWidth, 2 * kWidth}, activated.data(), stream));
        }
        product(down.copy(i), activated.data(), true, stream);
        return cudaSuccess;
      });
      bench.Report(bits == 4 ? "layer, W4A8" : "layer, W8A8", text, seconds,
                   static_cast<double>(qkv.bytes() + o.bytes() + gate_up.bytes() + down.bytes()),
                   false,
                   2.0 * static_cast<double>(m) *
                       static_cast<double>(kHidden * (kQkv + kHidden + 3 * kWidth)));
    }
  }
}
void BenchInt8Layer(Bench& bench) {
  if (!bench.Wants("layer")) return;
  for (const int32_t bits : {8, 4}) BenchLayerOf(bench, bits);
}

void BenchPrompt(Bench& bench) {
  if (!bench.Wants("prompt")) return;
  struct Case {
    int32_t n, chunk, d;
    DType dtype = DType::kBF16;
  };
  for (const Case c : {Case{512, 512, 128},
                       {8192, 512, 128},
                       {8192, 8192, 128},
                       {8192, 128, 128, DType::kI8},
                       {8192, 512, 128, DType::kI8},
                       {8192, 8192, 128, DType::kI8},
                       {8192, 8192, 128, DType::kF8},
                       {131072, 512, 128},
                       {131072, 2048, 128},
                       {131072, 128, 128, DType::kI8},
                       {131072, 512, 128, DType::kI8},
                       {131072, 2048, 128, DType::kI8},
                       {8192, 8192, 64},
                       {8192, 8192, 64, DType::kI8}}) {
    const KvLayout kv{kKvHeads, c.d, kBlock, c.dtype};
    const Sequences sequences(1, c.n, 0);
    const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
    const int64_t width = int64_t{kKvHeads} * kGroup * c.d;
    const auto q = RandomFloats(c.chunk * width);
    Memory<float> out(c.chunk * width);
    const Memory<DeviceChunk> chunks(
        std::vector<DeviceChunk>{{sequences.table.data(), 0, c.chunk, c.n - c.chunk}});
    for (const auto& [way, portable] :
         {std::pair(DenseWay::kInTurn, false), std::pair(DenseWay::kInTurn, true),
          std::pair(DenseWay::kWidened, false), std::pair(DenseWay::kWidened, true)}) {
      if (way == DenseWay::kWidened && !HasScales(c.dtype)) continue;
      const std::string text = Text("%d tokens before position %d, d %d%s%s%s", c.chunk, c.n, c.d,
                                    KvText(c.dtype), way == DenseWay::kWidened ? ", widened" : "",
                                    portable ? ", any device's kernel" : "");
      if (!bench.WantsShape(text)) continue;
      const DenseAttentionShape shape{1, c.chunk, c.n, kGroup, kv, way, portable};
      Memory<std::byte> workspace(
          static_cast<int64_t>(std::max<size_t>(DenseAttentionWorkspaceBytes(shape), 1)));
      const double seconds = bench.Seconds(1, 3, [&](int, cudaStream_t stream) {
        return AttendDense(shape, q.data(), width, chunks.data(), pool.data(), 0.0884f, out.data(),
                           width, workspace.data(), stream);
      });
      const double pairs = static_cast<double>(c.chunk) * (c.n - c.chunk) +
                           0.5 * c.chunk * (static_cast<double>(c.chunk) + 1);
      bench.Report("attend: prompt", text, seconds,
                   static_cast<double>(sequences.num_blocks * kv.BlockBytes()) +
                       8.0 * static_cast<double>(c.chunk * width),
                   false, 4.0 * pairs * static_cast<double>(width));
    }
  }
}

}  // namespace winnow::kernels::cuda
