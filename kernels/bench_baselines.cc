// The baseline of reading speed (kernels/bench.h): a loop that only reads.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/backend.h"
#include "kernels/bench.h"
#include "kernels/bench_timing.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/ops.h"
#include "kernels/thread_pool.h"

namespace winnow::kernels {

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

}  // namespace winnow::kernels
