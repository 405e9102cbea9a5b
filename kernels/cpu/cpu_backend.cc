#include "kernels/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels/check.h"
#include "kernels/host_matrix.h"
#include "kernels/rope.h"

namespace winnow::kernels {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// There is but one memory: rows are read where they lie.
class CpuSharedKv final : public SharedKv {
 public:
  SharedKvSizes sizes() const override { return {}; }
  void TakeReads(std::span<SharedKvReads> of_rows) override {
    std::fill(of_rows.begin(), of_rows.end(), SharedKvReads());
  }
  void ForgetRows(std::span<const int32_t> /*blocks*/) override {}
  void ForgetStaged() override {}
};

}  // namespace

Buffer AllocateHostMemory(size_t size_bytes) {
  if (size_bytes < kHugePageBytes) {
    const size_t rounded = (std::max<size_t>(size_bytes, 1) + 63) / 64 * 64;
    void* data = std::aligned_alloc(64, rounded);
    if (data == nullptr) return {};
    std::memset(data, 0, rounded);
    return Buffer(data, size_bytes, [](void* p) { std::free(p); });
  }
  // Mapped with room to align, so that the first page is a huge one too.
  if (size_bytes > SIZE_MAX - 2 * kHugePageBytes) return {};
  const size_t rounded = (size_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const size_t mapped = rounded + kHugePageBytes;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return {};
  const size_t past = reinterpret_cast<uintptr_t>(base) % kHugePageBytes;
  std::byte* data = static_cast<std::byte*>(base) + (past == 0 ? 0 : kHugePageBytes - past);
  // Advice: without it everything works, at the speed of small pages. A huge page that is filled in part would cost a model of
  // many experts, whose matrices are a few MiB each, as much as a third of its memory again.
  const size_t whole = size_bytes / kHugePageBytes * kHugePageBytes;
  madvise(data, whole, MADV_HUGEPAGE);
  if (whole < rounded) madvise(data + whole, rounded - whole, MADV_NOHUGEPAGE);
  return Buffer(data, size_bytes, [base, mapped](void*) { munmap(base, mapped); });
}

void CheckKv(const KvLayout& layout) {
  WINNOW_CHECK(layout.dtype != DType::kF16);
  WINNOW_CHECK(layout.head_dim > 0 && layout.head_dim % 16 == 0);
  WINNOW_CHECK(layout.head_dim <= kMaxKvHeadDim);
  WINNOW_CHECK(layout.block_tokens > 0 && layout.block_tokens % 16 == 0);
}

std::byte* CpuBackend::Scratch::Get(size_t size_bytes) {
  if (size_bytes > buffer_.size_bytes()) {
    buffer_ = Buffer();
    buffer_ = AllocateHostMemory(std::max(size_bytes, size_bytes + size_bytes / 4));
    WINNOW_CHECK(buffer_.data() != nullptr);
  }
  return static_cast<std::byte*>(buffer_.data());
}

CpuBackend::CpuBackend(const CpuOps& ops, int num_threads) : ops_(ops), threads_(num_threads) {}

std::string CpuBackend::name() const {
  const std::string threads = std::to_string(num_threads());
  return std::string("cpu (") + ops_.name + ", " + threads +
         (num_threads() == 1 ? " thread)" : " threads)");
}

Buffer CpuBackend::Allocate(size_t size_bytes) { return AllocateHostMemory(size_bytes); }

std::unique_ptr<SharedKv> CpuBackend::ShareKv(const SharedKvShape& shape,
                                              std::span<std::byte* const> pools,
                                              std::string* /*why*/) {
  WINNOW_CHECK(static_cast<int32_t>(pools.size()) == shape.num_pools);
  return std::make_unique<CpuSharedKv>();
}

void CpuBackend::CopyToHost(const void* device, void* host, size_t size_bytes) {
  std::memcpy(host, device, size_bytes);
}

void CpuBackend::CopyToDevice(const void* host, void* device, size_t size_bytes) {
  std::memcpy(device, host, size_bytes);
}

void CpuBackend::EmbedRows(const HostMatrix& table, std::span<const int32_t> ids, float scale,
                           const Tensor& out) {
  WINNOW_CHECK(out.cols == table.cols && out.rows >= static_cast<int64_t>(ids.size()));
  for (const int32_t id : ids) WINNOW_CHECK(id >= 0 && id < table.rows);
  ForEachRow(static_cast<int64_t>(ids.size()), out.cols, [&](int64_t i) {
    ops_.widen_row(RowOf(table, ids[i]), table.dtype, table.cols, out.f32(i));
    if (scale == 1.0f) return;
    for (float& value : std::span(out.f32(i), out.cols)) value *= scale;
  });
}

void CpuBackend::RmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& out) {
  WINNOW_CHECK(out.rows >= x.rows && out.cols == x.cols);
  ForEachRow(x.rows, x.cols,
             [&](int64_t i) { ops_.rmsnorm_row(x.f32(i), x.cols, weight, eps, out.f32(i)); });
}

void CpuBackend::AddRmsNorm(const Tensor& x, const float* weight, float eps, const Tensor& y) {
  WINNOW_CHECK(y.rows >= x.rows && y.cols == x.cols);
  ForEachRow(x.rows, x.cols, [&](int64_t i) {
    ops_.rmsnorm_row(x.f32(i), x.cols, weight, eps, x.f32(i));
    for (int64_t j = 0; j < x.cols; ++j) y.f32(i)[j] += x.f32(i)[j];
  });
}

void CpuBackend::RmsNormHeads(const Tensor& x, int32_t head_dim, const float* weight, float eps) {
  WINNOW_CHECK(head_dim > 0 && x.cols % head_dim == 0);
  ForEachRow(x.rows, x.cols, [&](int64_t i) {
    for (int64_t first = 0; first < x.cols; first += head_dim) {
      ops_.rmsnorm_row(x.f32(i) + first, head_dim, weight, eps, x.f32(i) + first);
    }
  });
}

void CpuBackend::RopeTable(std::span<const int32_t> positions, std::span<const float> inv_freq,
                           float scale, std::span<const float> factors, const Tensor& cos_sin) {
  WINNOW_CHECK(factors.empty() || factors.size() == positions.size());
  WINNOW_CHECK(cos_sin.rows >= static_cast<int64_t>(positions.size()));
  WINNOW_CHECK(cos_sin.cols == 2 * static_cast<int64_t>(inv_freq.size()));
  constexpr int64_t kValuesPerSine = 16;  // a sine costs as much as this many values of other loops
  ForEachRow(static_cast<int64_t>(positions.size()), cos_sin.cols * kValuesPerSine, [&](int64_t i) {
    RopeTableRow(positions[i], inv_freq, scale, factors.empty() ? 1.0f : factors[i],
                 cos_sin.f32(i));
  });
}

void CpuBackend::Rope(const Tensor& x, int32_t head_dim, const Tensor& cos_sin) {
  WINNOW_CHECK(head_dim > 0 && head_dim % 2 == 0 && x.cols % head_dim == 0);
  WINNOW_CHECK(cos_sin.cols == head_dim && cos_sin.rows >= x.rows);
  ForEachRow(x.rows, x.cols, [&](int64_t i) {
    ops_.rope_row(x.f32(i), x.cols / head_dim, head_dim, cos_sin.f32(i));
  });
}

void CpuBackend::SiluMul(const Tensor& gate_up, const Tensor& out) {
  WINNOW_CHECK(gate_up.cols == 2 * out.cols && gate_up.rows <= out.rows);
  ForEachRow(gate_up.rows, gate_up.cols,
             [&](int64_t i) { ops_.silu_mul_row(gate_up.f32(i), out.cols, out.f32(i)); });
}

void CpuBackend::GeluTanhMul(const Tensor& gate_up, const Tensor& out) {
  WINNOW_CHECK(gate_up.cols == 2 * out.cols && gate_up.rows <= out.rows);
  ForEachRow(gate_up.rows, gate_up.cols,
             [&](int64_t i) { ops_.gelu_tanh_mul_row(gate_up.f32(i), out.cols, out.f32(i)); });
}

void CpuBackend::ClampedSwigluMul(const Tensor& gate_up, const ClampedSwiglu& by,
                                  const Tensor& out) {
  WINNOW_CHECK(gate_up.cols == 2 * out.cols && gate_up.rows <= out.rows);
  WINNOW_CHECK(by.alpha > 0 && by.limit > 0);
  ForEachRow(gate_up.rows, gate_up.cols, [&](int64_t i) {
    ops_.clamped_swiglu_mul_row(gate_up.f32(i), out.cols, by, out.f32(i));
  });
}

void CpuBackend::WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                         void* pool, const KvLayout& layout) {
  const int32_t d = layout.head_dim;
  CheckKv(layout);
  WINNOW_CHECK(k.cols == int64_t{layout.kv_heads} * d && v.cols == k.cols);
  for (const AttentionChunk& chunk : chunks) {
    WINNOW_CHECK(chunk.first_row + chunk.num_tokens <= k.rows &&
                 chunk.first_row + chunk.num_tokens <= v.rows);
    WINNOW_CHECK(chunk.position + chunk.num_tokens <=
                 static_cast<int64_t>(chunk.block_table.size()) * layout.block_tokens);
    ForEachRow(chunk.num_tokens, 2 * k.cols, [&](int64_t i) {
      const int32_t position = chunk.position + static_cast<int32_t>(i);
      const int32_t block = chunk.block_table[position / layout.block_tokens];
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        std::byte* row = static_cast<std::byte*>(pool) +
                         layout.RowOffset(block, head, position % layout.block_tokens);
        const int64_t from = int64_t{head} * d;
        ops_.write_kv_row(k.f32(chunk.first_row + i) + from, v.f32(chunk.first_row + i) + from, d,
                          layout.dtype, row);
      }
    });
  }
}

std::unique_ptr<Backend> MakeCpuBackend(const std::string& isa, int num_threads) {
  const CpuOps* ops = FindCpuOps(isa.c_str());
  if (ops == nullptr) return nullptr;
  WINNOW_CHECK(num_threads >= 0);
  return std::make_unique<CpuBackend>(*ops, num_threads == 0 ? UsableProcessors() : num_threads);
}

}  // namespace winnow::kernels
