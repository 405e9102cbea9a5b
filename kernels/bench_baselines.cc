// What speeds are shares of (kernels/bench.h): a loop that only reads, and oneDNN's products.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "kernels/backend.h"
#include "kernels/bench.h"
#include "kernels/bench_timing.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/ops.h"
#include "kernels/matmul.h"
#include "kernels/thread_pool.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace winnow::kernels {
namespace {

// A function of the OpenMP that oneDNN has loaded; null if there is none.
template <typename Function>
Function* OpenMp(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// Ends OpenMP's threads, which go on spinning for a moment: what is measured next shall not share with them.
void EndOpenMpThreads() {
  constexpr int kPauseHard = 2;  // omp_pause_hard
  if (auto* pause = OpenMp<int(int)>("omp_pause_resource_all")) pause(kPauseHard);
}

}  // namespace

double MeasureReadBytesPerSecond(size_t size_bytes, int num_threads) {
  const size_t bytes = std::max<size_t>(4096, size_bytes) / 64 * 64;
  const Buffer buffer = AllocateHostMemory(bytes);
  if (buffer.data() == nullptr) return 0;
  std::memset(buffer.data(), 1, bytes);  // pages that were never written are all one zero page
  const CpuOps& ops = *FindCpuOps("auto");
  ThreadPool pool(BenchThreads(num_threads));
  // Pieces as kernels take them: small enough to share evenly, large enough to stream.
  const size_t piece =
      std::clamp<size_t>(bytes / pool.num_threads() / 8 / 4096 * 4096, 4096, size_t{512} << 10);
  const int64_t pieces = static_cast<int64_t>((bytes + piece - 1) / piece);
  std::atomic<uint64_t> sum{0};
  auto read = [&] {
    pool.ParallelFor(pieces, [&](int64_t item, int) {
      const size_t first = static_cast<size_t>(item) * piece;
      sum.fetch_xor(ops.read_loop(static_cast<const std::byte*>(buffer.data()) + first,
                                  std::min(piece, bytes - first)),
                    std::memory_order_relaxed);
    });
  };
  const double budget = std::clamp(static_cast<double>(bytes) * 5e-9, 0.05, 1.0);
  return static_cast<double>(bytes) / BestSeconds(budget, read);
}

double MeasureOneDnnFlopsPerSecond(int64_t m, int64_t out, int64_t in, DType dtype,
                                   int num_threads) {
  using dnnl::memory;
  auto* set_threads = OpenMp<void(int)>("omp_set_num_threads");
  if (dtype == DType::kF16 || set_threads == nullptr) return 0;
  set_threads(BenchThreads(num_threads));
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const auto type = dtype == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
    const memory::desc x_desc({m, in}, type, memory::format_tag::ab);
    const memory::desc any_weights({in, out}, type, memory::format_tag::any);
    const memory::desc y_desc({m, out}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc primitive(dnnl::matmul::desc(x_desc, any_weights, y_desc),
                                                 engine);
    const dnnl::matmul product(primitive);
    memory x(x_desc, engine), weights(primitive.weights_desc(), engine), y(y_desc, engine);
    std::memset(x.get_data_handle(), 0x3c, x_desc.get_size());
    std::memset(weights.get_data_handle(), 0x3c, primitive.weights_desc().get_size());
    const double seconds = BestSeconds(0.5, [&] {
      product.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, y}});
      stream.wait();
    });
    EndOpenMpThreads();
    return MatmulFlops(m, out, in) / seconds;
  } catch (const dnnl::error&) {
    return 0;  // no such product on this processor
  }
}

std::string OneDnnVersion() {
  const dnnl_version_t* version = dnnl_version();
  return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch);
}

}  // namespace winnow::kernels
