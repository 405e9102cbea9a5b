// Attention over rows, and rows that come from pinned host memory.
#include <chrono>

#include "kernels/cuda/bench.h"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/cuda/row_cache.h"
#include "kernels/cuda/row_gather.h"
#include "kernels/row_attention.h"

namespace winnow::kernels::cuda {

void BenchAttention(Bench& bench) {
  if (!bench.Wants("attend")) return;
  struct Case {
    int32_t batch, n, rows, d;
    DType dtype = DType::kBF16;
  };
  for (const Case c : {Case{1, 131072, 656, 128},
                       {1, 131072, 2192, 128},
                       {1, 131072, 2192, 128, DType::kI8},
                       {1, 131072, 2192, 128, DType::kF8},
                       {1, 131072, 16528, 128},
                       {1, 131072, 2192, 64},
                       {1, 131072, 2192, 96},
                       {24, 32768, 656, 128},
                       {24, 32768, 2192, 128},
                       {24, 32768, 2192, 128, DType::kI8}}) {
    const std::string text = Text("batch %d, %d rows a head of %dK, d %d%s", c.batch, c.rows,
                                  c.n >> 10, c.d, KvText(c.dtype));
    if (!bench.WantsShape(text)) continue;
    const KvLayout kv{kKvHeads, c.d, kBlock, c.dtype};
    const Sequences sequences(c.batch, c.n, 0);
    const double bytes =
        AttendRowsBytes(int64_t{c.batch} * kKvHeads * c.rows, c.batch * kKvHeads * kGroup, kv);
    const int copies = Bench::Copies(bytes, 4);
    // The pool is far larger than L2; copies choose other rows of it.
    const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
    const std::vector<std::byte*> pools(std::max(copies, Bench::Copies(bytes, 32)), pool.data());
    const Lists lists(sequences, c.batch, c.n, c.rows, kv, pools);
    const auto q = RandomFloats(int64_t{c.batch} * kKvHeads * kGroup * c.d);
    Memory<float> states(int64_t{c.batch} * kKvHeads * kGroup * (c.d + 2));
    for (const bool portable : {false, true}) {
      const RowAttentionShape shape{c.batch, kGroup, kv, portable};
      Memory<std::byte> workspace(static_cast<int64_t>(RowAttentionWorkspaceBytes(shape)));
      const double seconds =
          bench.Seconds(static_cast<int>(pools.size()), 20, [&](int i, cudaStream_t stream) {
            return AttendRows(shape, q.data(), kKvHeads * kGroup * c.d, sequences.queries.data(),
                              lists.lists[i].data(), 0.1f, {.states = states.data()},
                              workspace.data(), stream);
          });
      bench.Report("attend: rows", text + (portable ? ", any device's kernel" : ""), seconds, bytes,
                   false, AttendRowsFlops(int64_t{c.batch} * kKvHeads * c.rows, kGroup, c.d));
    }
  }
  for (const Case c : {Case{1, 8192, 0, 128},
                       {1, 32768, 0, 128},
                       {1, 131072, 0, 128},
                       {1, 131072, 0, 128, DType::kI8},
                       {1, 131072, 0, 128, DType::kF8},
                       {1, 1 << 20, 0, 128},
                       {1, 1 << 20, 0, 128, DType::kI8},
                       {1, 131072, 0, 64},
                       {1, 131072, 0, 64, DType::kI8},
                       {1, 131072, 5, 128},  // drafts that are verified, of so many tokens less one
                       {1, 131072, 9, 128},
                       {1, 131072, 9, 128, DType::kI8},
                       {1, 131072, 16, 128},
                       {1, 131072, 33, 128},
                       {1, 8192, 9, 128},
                       {7, 32768, 9, 128},
                       {24, 8192, 9, 128},
                       {24, 32768, 9, 128},
                       {24, 32768, 9, 128, DType::kI8},
                       {64, 2048, 9, 128},
                       {64, 2048, 0, 128},
                       {256, 2048, 0, 128},
                       {24, 32768, 0, 128},
                       {24, 32768, 0, 128, DType::kI8}}) {
    const int32_t tokens = std::max(c.rows, 1);  // of each sequence
    std::string text = Text("batch %d, n %dK, d %d%s", c.batch, c.n >> 10, c.d, KvText(c.dtype));
    if (tokens > 1) text += Text(", %d tokens", tokens);
    if (!bench.WantsShape(text)) continue;
    const KvLayout kv{kKvHeads, c.d, kBlock, c.dtype};
    const Sequences sequences(c.batch, c.n, 0);
    const double bytes = static_cast<double>(sequences.num_blocks) * kv.BlockBytes();
    const int copies = Bench::Copies(bytes, 16);
    std::vector<Memory<std::byte>> pools;
    for (int i = 0; i < copies; ++i) pools.push_back(RandomBf16(static_cast<int64_t>(bytes), 1));
    const int64_t width = int64_t{kKvHeads} * kGroup * c.d, rows = int64_t{c.batch} * tokens;
    const auto q = RandomFloats(rows * width);
    DenseAttentionShape shape{c.batch, tokens, c.n, kGroup, kv, DenseWay::kSideBySide};
    std::vector<DeviceChunk> last;  // tokens of each sequence
    for (int32_t i = 0; i < c.batch; ++i) {
      last.push_back({sequences.table.data() + int64_t{i} * sequences.blocks_each, i * tokens,
                      tokens, c.n - tokens});
    }
    const Memory<DeviceChunk> chunks(last);
    Memory<std::byte> workspace(static_cast<int64_t>(DenseAttentionWorkspaceBytes(shape)));
    Memory<float> out(rows * width);
    for (const bool portable : {true, false}) {
      shape.portable = portable;
      const double seconds = bench.Seconds(copies, 10, [&](int i, cudaStream_t stream) {
        return AttendDense(shape, q.data(), width, chunks.data(), pools[i].data(), 0.1f, out.data(),
                           width, workspace.data(), stream);
      });
      bench.Report(portable ? "attend: dense, any device" : "attend: dense", text, seconds, bytes,
                   false, AttendRowsFlops(rows * kKvHeads * c.n, kGroup, c.d));
    }
  }
}

void BenchGather(Bench& bench) {
  if (!bench.Wants("gather")) return;
  constexpr int32_t n = 131072, d = 128;
  const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
  const Sequences sequences(1, n, 0);
  const size_t pool_bytes = sequences.num_blocks * kv.BlockBytes();  // 512 MiB
  std::byte* host = nullptr;
  CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(&host), pool_bytes));
  const auto pool = RandomBf16(static_cast<int64_t>(pool_bytes), 1);
  CHECK_CUDA(cudaMemcpy(host, pool.data(), pool_bytes, cudaMemcpyDefault));
  const auto q = RandomFloats(kKvHeads * kGroup * d);
  Memory<float> states(kKvHeads * kGroup * (d + 2));
  const int copies = 8;
  for (const int32_t each : {64, 256, 2048}) {  // rows of each of 8 heads: 512 to 16384 in all
    const Lists lists(sequences, 1, n, each, kv, std::vector<std::byte*>(copies, host));
    const Lists resident(sequences, 1, n, 2192, kv, std::vector<std::byte*>(copies, pool.data()));
    const int32_t rows = each * kKvHeads;
    Memory<std::byte> cache(int64_t{rows} * static_cast<int64_t>(kv.RowBytes()));
    std::vector<std::byte*> targets_host;
    for (int32_t i = 0; i < rows; ++i) {
      targets_host.push_back(cache.data() + i * static_cast<int64_t>(kv.RowBytes()));
    }
    const Memory<std::byte*> targets(targets_host);
    const Memory<int32_t> count(std::vector<int32_t>{rows});
    const double bytes = static_cast<double>(rows) * static_cast<double>(kv.RowBytes());
    const auto gather = [&](int blocks) {
      return [&, blocks](int i, cudaStream_t stream) {
        return GatherRows(lists.addresses[i].data(), targets.data(), count.data(),
                          static_cast<int32_t>(kv.RowBytes()), blocks, stream);
      };
    };
    double alone = 0;
    for (const int blocks : {4, 8, 16, 32, 132}) {
      const double seconds = bench.Seconds(copies, 16, gather(blocks));
      if (blocks == kGatherBlocks) alone = seconds;
      bench.Report("gather: copy", Text("%d rows of 512 B, %d blocks", rows, blocks), seconds,
                   bytes, true);
    }
    const RowAttentionShape shape{1, kGroup, kv};
    Memory<std::byte> workspace(static_cast<int64_t>(RowAttentionWorkspaceBytes(shape)));
    const double in_place = bench.Seconds(copies, 16, [&](int i, cudaStream_t stream) {
      return AttendRows(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                        lists.lists[i].data(), 0.1f, {.states = states.data()}, workspace.data(),
                        stream);
    });
    bench.Report("gather: attend", Text("%d rows of 512 B read from the host in place", rows),
                 in_place, bytes, true);
    // Attention over 2192 resident rows a head beside the gather, ten times to be as long.
    const int times = std::max(1, static_cast<int>(alone / 8e-6));
    const auto attend_many = [&](int i, cudaStream_t stream) {
      for (int t = 0; t < times; ++t) {
        const cudaError_t error =
            AttendRows(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                       resident.lists[(i + t) % copies].data(), 0.1f, {.states = states.data()},
                       workspace.data(), stream);
        if (error != cudaSuccess) return error;
      }
      return cudaSuccess;
    };
    const double attend = bench.Seconds(copies, 16, attend_many);
    cudaStream_t second;
    cudaEvent_t fork, join;
    CHECK_CUDA(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    const double together = bench.Seconds(copies, 16, [&](int i, cudaStream_t stream) {
      cudaEventRecord(fork, stream);
      cudaStreamWaitEvent(second, fork, 0);
      if (const auto error = gather(kGatherBlocks)(i, second); error != cudaSuccess) return error;
      cudaEventRecord(join, second);
      if (const auto error = attend_many(i, stream); error != cudaSuccess) return error;
      return cudaStreamWaitEvent(stream, join, 0);
    });
    std::printf(
        "                 gather alone %.1f us, %d attentions alone %.1f us, together %.1f us\n",
        alone * 1e6, times, attend * 1e6, together * 1e6);
    CHECK_CUDA(cudaEventDestroy(fork));
    CHECK_CUDA(cudaEventDestroy(join));
    CHECK_CUDA(cudaStreamDestroy(second));
  }
  CHECK_CUDA(cudaFreeHost(host));
}

// FetchRows at several shares of hits: lists of 8 copies have so many rows in common, and the cache holds
// three lists, so the other rows are gone when their copy's turn comes again.
void BenchFetch(Bench& bench) {
  if (!bench.Wants("fetch")) return;
  constexpr int32_t n = 524288, d = 128, kCopies = 8;
  const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
  const Sequences sequences(1, n, 0);
  const size_t pool_bytes = sequences.num_blocks * kv.BlockBytes();  // 2 GiB
  const Buffer host = AllocatePinned(0, pool_bytes);
  if (host.data() == nullptr) {
    std::printf("fetch: %zu bytes cannot be pinned\n", pool_bytes);
    return;
  }
  const int64_t pool_rows = int64_t{sequences.num_blocks} * kKvHeads * kBlock;
  for (const int32_t each : {64, 256, 2048}) {  // rows of each of 8 heads
    for (const int32_t hits : {0, 50, 90, 100}) {
      const int32_t common = each * hits / 100, slots = 3 * each * kKvHeads;
      std::vector<std::vector<int32_t>> shared_tokens;
      for (int head = 0; head < kKvHeads; ++head) {
        shared_tokens.push_back(SomeTokens(0, n, common));
      }
      std::vector<Memory<int32_t>> tokens;
      for (int copy = 0; copy < kCopies; ++copy) {
        std::vector<int32_t> of_copy;
        for (int head = 0; head < kKvHeads; ++head) {
          std::vector<int32_t> list = shared_tokens[head];
          const auto more = SomeTokens(0, n, each - common);
          list.insert(list.end(), more.begin(), more.end());
          std::sort(list.begin(), list.end());
          of_copy.insert(of_copy.end(), list.begin(), list.end());
        }
        tokens.emplace_back(of_copy);
      }
      const Memory<int32_t> counts(std::vector<int32_t>(kKvHeads, each));
      const Memory<DeviceQuery> query(
          std::vector<DeviceQuery>{{sequences.table.data(), 0, n - 1, {0, n}, each, 0}});
      Memory<std::byte> cached(slots * static_cast<int64_t>(kv.RowBytes()));
      Memory<int32_t> map(pool_rows);
      CHECK_CUDA(cudaMemset(map.data(), 0xff, pool_rows * 4));
      const Memory<RowCacheSlot> of_slots(std::vector<RowCacheSlot>(slots, kFreeSlot));
      const Memory<RowCacheState> state(std::vector<RowCacheState>(1));
      Memory<SharedKvReads> reads(1);
      Memory<const std::byte*> rows(int64_t{each} * kKvHeads);
      Memory<RowList> lists(kKvHeads);
      const DeviceRowCache cache{static_cast<std::byte*>(host.data()),
                                 cached.data(),
                                 map.data(),
                                 of_slots.data(),
                                 state.data(),
                                 slots,
                                 static_cast<int32_t>(kv.RowBytes())};
      const double seconds = bench.Seconds(kCopies, 16, [&](int i, cudaStream_t stream) {
        const Selection chosen{kKvHeads, each, counts.data(), tokens[i].data()};
        return FetchRows(query.data(), 1, chosen, cache, kv, each, rows.data(), lists.data(),
                         reads.data(), stream);
      });
      SharedKvReads read;
      CHECK_CUDA(cudaMemcpy(&read, reads.data(), sizeof read, cudaMemcpyDefault));
      const double all = static_cast<double>(read.cached) + read.fetched + read.in_place;
      const double missing = (read.fetched + read.in_place) / all;
      bench.Report("fetch: rows",
                   Text("%d rows of 512 B, %.0f%% cached", each * kKvHeads, 100 * (1 - missing)),
                   seconds, missing * each * kKvHeads * static_cast<double>(kv.RowBytes()), true);
    }
  }
}

// Rows anywhere in an arena: beyond some GiB, looking up addresses costs more than the bus.
void GatherFar(Bench& bench, const std::string& text, int32_t num_blocks,
               const std::vector<std::vector<const std::byte*>>& rows_of_copies) {
  constexpr int32_t kRowBytes = 512;
  const auto copies = static_cast<int>(rows_of_copies.size());
  const auto rows = static_cast<int32_t>(rows_of_copies.front().size());
  std::vector<Memory<const std::byte*>> sources;
  for (const auto& of_copy : rows_of_copies) sources.emplace_back(of_copy);
  Memory<std::byte> target(int64_t{rows} * kRowBytes);
  std::vector<std::byte*> targets_host(rows);
  for (int32_t i = 0; i < rows; ++i) targets_host[i] = target.data() + int64_t{i} * kRowBytes;
  const Memory<std::byte*> targets(targets_host);
  const Memory<int32_t> count(std::vector<int32_t>{rows});
  const double seconds = bench.Seconds(copies, copies, [&](int i, cudaStream_t stream) {
    return GatherRows(sources[i].data(), targets.data(), count.data(), kRowBytes, num_blocks,
                      stream);
  });
  bench.Report("far: gather", text, seconds, static_cast<double>(rows) * kRowBytes, true);
}

void BenchFar(Bench& bench) {
  if (!bench.Wants("far")) return;
  constexpr int32_t kRowBytes = 512;
  for (const size_t gib : {2, 60}) {
    const Buffer host = AllocatePinned(0, gib << 30);
    const auto* arena = static_cast<const std::byte*>(host.data());
    if (arena == nullptr) {
      std::printf("far: %zu GiB cannot be pinned\n", gib);
      continue;
    }
    const auto some_rows = [&](size_t first, size_t bytes, int32_t count) {
      std::vector<const std::byte*> rows(count);
      for (const std::byte*& row : rows) {
        row = arena + first + HostRandom() % (bytes / kRowBytes) * kRowBytes;
      }
      std::sort(rows.begin(), rows.end());
      return rows;
    };
    for (const int32_t rows : {2048, 16384, 131072}) {
      std::vector<std::vector<const std::byte*>> copies;
      for (int copy = 0; copy < 16; ++copy) copies.push_back(some_rows(0, gib << 30, rows));
      GatherFar(bench, Text("%d rows of %zu GiB", rows, gib), kGatherBlocks, copies);
    }
    // A step at 512K: 30 layers of 2 GiB, one after the other. In the order of addresses; of heads, each
    // in order, as lists are; in none.
    constexpr int32_t kRows = 8192, kHeads = 8;
    for (const size_t mib : {512, 2048}) {
      const size_t layers = std::min<size_t>(30, (gib << 10) / mib);
      std::vector<std::vector<const std::byte*>> sorted, by_head, shuffled;
      for (size_t layer = 0; layer < layers; ++layer) {
        sorted.push_back(some_rows(layer * mib << 20, mib << 20, kRows));
        by_head.emplace_back();
        for (int head = 0; head < kHeads; ++head) {
          for (int32_t i = head; i < kRows; i += kHeads) by_head.back().push_back(sorted.back()[i]);
        }
        shuffled.push_back(sorted.back());
        for (size_t i = kRows - 1; i > 0; --i) {
          std::swap(shuffled.back()[i], shuffled.back()[HostRandom() % (i + 1)]);
        }
      }
      for (const int32_t blocks : {8, 16, 32, 132}) {
        const auto text = [&](const char* order) {
          return Text("%zu layers of %zu MiB, %d blocks, %s", layers, mib, blocks, order);
        };
        GatherFar(bench, text("in order"), blocks, sorted);
        GatherFar(bench, text("by head"), blocks, by_head);
        GatherFar(bench, text("shuffled"), blocks, shuffled);
      }
    }
  }
}

// What pinning host memory takes, by threads and pieces.
void BenchPin(Bench& bench) {
  if (!bench.Wants("pin")) return;
  const size_t bytes = size_t{8} << 30;
  const auto report = [&](const std::string& shape, auto make) {
    const auto begin = std::chrono::steady_clock::now();
    const bool made = make();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    bench.Report(made ? "pin" : "pin: refused", shape, seconds.count(), static_cast<double>(bytes),
                 true);
  };
  Buffer memory;
  // The first one also takes the pages from the system.
  for (const int threads : {16, 1, 4, 16}) {
    for (const size_t piece : {size_t{64} << 20, size_t{256} << 20, size_t{1} << 30}) {
      if (threads < 16 && piece != size_t{256} << 20) continue;
      report(Text("8 GiB, %d threads, pieces of %zu MiB", threads, piece >> 20), [&] {
        memory = AllocatePinned(0, bytes, threads, piece);
        return memory.data() != nullptr;
      });
      report(Text("8 GiB, %d threads, pieces of %zu MiB, undone", threads, piece >> 20), [&] {
        memory = Buffer();
        return true;
      });
    }
  }
  void* host = nullptr;
  report("8 GiB, cudaHostAlloc",
         [&] { return cudaHostAlloc(&host, bytes, cudaHostAllocDefault) == cudaSuccess; });
  CHECK_CUDA(cudaFreeHost(host));
}

}  // namespace winnow::kernels::cuda
