// The row cache against what it must hold after any trace of calls: what addresses point to is the
// pool's row, and what it says of itself agrees.
#include "kernels/cuda/row_cache.h"

#include <map>
#include <set>

#include "kernels/cuda/pinned_memory.h"
#include "kernels/write_kv.h"
#include "tests/cuda/cached_pool.h"

namespace winnow::kernels::cuda {
namespace {

class CudaRowCacheTest : public CudaTest {
 protected:
  // Chosen tokens of each query and head; of a skewed distribution, so that some come again.
  std::vector<std::vector<int32_t>> Choose(const std::vector<RetrievalQuery>& queries,
                                           int32_t kv_heads) {
    std::vector<std::vector<int32_t>> chosen;
    for (const RetrievalQuery& query : queries) {
      for (int32_t head = 0; head < kv_heads; ++head) {
        std::set<int32_t> tokens;
        for (int32_t i = 0; i < query.k; ++i) {
          const auto most = random_.Int(0, 3) == 0 ? query.mid.size() : query.mid.size() / 4;
          tokens.insert(query.mid.first +
                        static_cast<int32_t>(random_.Int(0, std::max(most - 1, 0))));
        }
        chosen.emplace_back(tokens.begin(), tokens.end());
        if (query.mid.size() == 0) chosen.back().clear();
      }
    }
    return chosen;
  }
  // Fetches, and holds every list to its tokens and every address to its row.
  void FetchAndCheck(CachedPool& pool, const KvLayout& layout,
                     const std::vector<RetrievalQuery>& queries,
                     const std::vector<std::vector<int32_t>>& chosen) {
    const auto num_queries = static_cast<int32_t>(queries.size());
    int32_t most = 1, capacity = 1;
    for (const auto& list : chosen) most = std::max(most, static_cast<int32_t>(list.size()));
    std::vector<std::vector<int32_t>> expected;  // rows
    for (int32_t i = 0; i < num_queries; ++i) {
      const RetrievalQuery& query = queries[i];
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        auto& rows = expected.emplace_back();
        const auto add = [&](int32_t token) {
          rows.push_back(pool.RowOf(query.block_table, head, token));
        };
        for (int32_t t = 0; t < std::min(query.mid.first, query.position + 1); ++t) add(t);
        for (const int32_t t : chosen[i * layout.kv_heads + head]) add(t);
        for (int32_t t = query.mid.last; t <= query.position; ++t) add(t);
        capacity = std::max(capacity, static_cast<int32_t>(rows.size()));
      }
    }
    const DeviceQueries on_device(queries);
    DeviceSelection selection(num_queries, layout.kv_heads, most);
    selection.Set(chosen);
    DeviceArray<const std::byte*> rows(expected.size() * capacity);
    DeviceArray<RowList> lists(expected.size());
    pool.ForgetReads();
    WINNOW_CUDA_OK(FetchRows(on_device.data(), num_queries, selection.view(), pool.cache(), layout,
                             capacity, rows.data(), lists.data(), pool.reads(), nullptr));
    const auto got_lists = lists.Get();
    const auto got_rows = rows.Get();
    const auto cached = pool.CacheBytes();
    const std::vector<int32_t> map = pool.Map();
    int64_t counted = 0, wanted = 0, in_place = 0;
    for (size_t l = 0; l < expected.size(); ++l) {
      ASSERT_EQ(got_lists[l].count, static_cast<int32_t>(expected[l].size()));
      ASSERT_EQ(got_lists[l].rows, rows.data() + l * capacity);
      ASSERT_EQ(got_lists[l].chosen_last - got_lists[l].chosen_first,
                static_cast<int32_t>(chosen[l].size()));
      wanted += got_lists[l].count;
      for (size_t i = 0; i < expected[l].size(); ++i) {
        const int32_t row = expected[l][i];
        const std::byte* address = got_rows[l * capacity + i];
        ASSERT_NO_FATAL_FAILURE(pool.ExpectRow(cached, address, row));
        const bool is_in_place = address == pool.pool() + int64_t{row} * pool.cache().row_bytes;
        in_place += is_in_place;
        // What has an address in the cache stays there until the call is over.
        if (!is_in_place) {
          ASSERT_EQ(address, pool.InSlot(map[row], row));
        }
      }
    }
    for (const RetrievalQuery& query : queries) {
      const SharedKvReads reads = pool.Reads(query.row);
      counted += reads.cached + reads.fetched + reads.in_place;
      in_place -= reads.in_place;
    }
    ASSERT_EQ(counted, wanted);
    ASSERT_EQ(in_place, 0);
    ASSERT_NO_FATAL_FAILURE(pool.ExpectConsistent());
  }
  std::vector<int32_t> Table(int32_t num_blocks) {
    std::vector<int32_t> table(num_blocks);
    std::iota(table.begin(), table.end(), 0);
    random_.Shuffle(table);
    return table;
  }
};

TEST_F(CudaRowCacheTest, AnyTraceOfCallsAndWritesGivesTheRowsOfThePool) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 18; ++round) {
    const int32_t d = AnyHeadDim(random_);
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, 4)), d,
                          static_cast<int32_t>(16 * random_.Int(1, 5)), kCudaKvTypes[round / 6]};
    const auto n = static_cast<int32_t>(random_.Int(300, 1500));
    const int32_t blocks = (n + layout.block_tokens - 1) / layout.block_tokens;
    const int32_t all = 2 * blocks * layout.kv_heads * layout.block_tokens;
    // None, fewer than a call's rows, about as many, and all there are.
    const int32_t some[] = {0, 1, 100, all / 8, all / 2, all};
    const int32_t slots = some[round % 6];
    SCOPED_TRACE(testing::Message() << "round " << round << ", " << slots << " slots of " << all);
    CachedPool pool(random_, layout, 2 * blocks, slots);
    std::vector<int32_t> tables[2];  // two sequences, the first half of whose blocks is shared
    tables[0] = Table(2 * blocks);
    tables[1] = tables[0];
    std::copy_n(tables[0].begin() + blocks, blocks - blocks / 2, tables[1].begin() + blocks / 2);
    tables[0].resize(blocks);
    tables[1].resize(blocks);
    for (int call = 0; call < 12; ++call) {
      std::vector<RetrievalQuery> queries;
      const auto count = static_cast<int32_t>(random_.Int(1, 6));
      for (int32_t i = 0; i < count; ++i) {
        const auto position = static_cast<int32_t>(random_.Int(0, n - 1));
        const auto sink = static_cast<int32_t>(random_.Int(0, 20));
        const auto window = static_cast<int32_t>(random_.Int(1, 100));
        RetrievalQuery query{i,
                             tables[random_.Int(0, 1)],
                             position,
                             {sink, std::max(sink, position + 1 - window)},
                             0};
        query.k = std::min<int32_t>(query.mid.size(), static_cast<int32_t>(random_.Int(0, 200)));
        queries.push_back(query);
      }
      ASSERT_NO_FATAL_FAILURE(
          FetchAndCheck(pool, layout, queries, Choose(queries, layout.kv_heads)));
      // One sequence decodes, the other reads a prompt on; their writes touch what is cached.
      const auto tokens = static_cast<int32_t>(random_.Int(1, 80));
      const auto at = static_cast<int32_t>(random_.Int(blocks / 2 * layout.block_tokens, n - 1));
      const auto prompt =
          static_cast<int32_t>(random_.Int(blocks / 2 * layout.block_tokens, n - 1));
      const std::vector<AttentionChunk> chunks = {
          {0, 1, at, tables[0]}, {1, std::min(tokens, n - prompt), prompt, tables[1]}};
      const int64_t width = int64_t{layout.kv_heads} * d;
      Matrix k = Matrix::Normal(random_, 1 + tokens, width);
      Matrix v = Matrix::Normal(random_, 1 + tokens, width);
      std::vector<std::byte> expected(pool.pool(), pool.pool() + 2 * blocks * layout.BlockBytes());
      WriteKvRef(k.tensor(), v.tensor(), chunks, expected.data(), layout);
      const DeviceArray<int32_t> of_tables[2] = {DeviceArray<int32_t>(tables[0]),
                                                 DeviceArray<int32_t>(tables[1])};
      const DeviceArray<DeviceChunk> on_device(
          std::vector<DeviceChunk>{{of_tables[0].data(), 0, 1, at, 0},
                                   {of_tables[1].data(), 1, chunks[1].num_tokens, prompt, 0}});
      const auto of_k = Upload(k), of_v = Upload(v);
      const auto matrix = [](const DeviceArray<float>& values, Matrix& host) {
        return DeviceMatrix{values.data(), host.rows(), host.cols(), host.tensor().stride};
      };
      WINNOW_CUDA_OK(WriteKvThrough(matrix(of_k, k), matrix(of_v, v), on_device.data(), 2, tokens,
                                    pool.cache(), layout, nullptr));
      WINNOW_CUDA_OK(cudaDeviceSynchronize());
      ASSERT_EQ(std::memcmp(expected.data(), pool.pool(), expected.size()), 0);
      ASSERT_NO_FATAL_FAILURE(pool.ExpectConsistent());
      // The decoded token is there now, where the prompt's rows leave room.
      if (slots >= 400) {
        const auto map = pool.Map();
        for (int32_t head = 0; head < layout.kv_heads; ++head) {
          ASSERT_GE(map[pool.RowOf(tables[0], head, at)], 0);
        }
      }
    }
  }
}

// One row a call leaves nothing to the order of threads: the same rows are cached as in a plain clock
// with a second chance.
TEST_F(CudaRowCacheTest, OneRowAtATimeItIsAClockWithASecondChance) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 16, AnyCudaKvType(random_)};
  const int32_t blocks = 8, n = blocks * 16;
  for (const int32_t slots : {1, 2, 7, 30}) {
    SCOPED_TRACE(testing::Message() << slots << " slots");
    CachedPool pool(random_, layout, blocks, slots);
    const std::vector<int32_t> table = Table(blocks);
    struct Slot {
      int32_t row = -1;
      bool used = false;
    };
    std::vector<Slot> clock(slots);
    int32_t hand = 0;
    for (int call = 0; call < 300; ++call) {
      const auto token =
          static_cast<int32_t>(random_.Int(0, 1) == 0 ? random_.Int(0, 9) : random_.Int(0, n - 1));
      const int32_t row = pool.RowOf(table, 0, token);
      const auto found = std::find_if(clock.begin(), clock.end(),
                                      [row](const Slot& slot) { return slot.row == row; });
      const bool is_hit = found != clock.end();
      if (is_hit) {
        found->used = true;
      } else {
        while (clock[hand].row >= 0 && clock[hand].used) {
          clock[hand].used = false;
          hand = (hand + 1) % slots;
        }
        clock[hand] = {row, false};
        hand = (hand + 1) % slots;
      }
      const std::vector<RetrievalQuery> queries = {{0, table, n - 1, {0, n}, 1}};
      ASSERT_NO_FATAL_FAILURE(FetchAndCheck(pool, layout, queries, {{token}}));
      const SharedKvReads reads = pool.Reads(0);
      ASSERT_EQ(reads.cached, is_hit ? 1u : 0u) << "call " << call;
      ASSERT_EQ(reads.fetched, is_hit ? 0u : 1u) << "call " << call;
      const auto map = pool.Map();
      for (const Slot& slot : clock) {
        if (slot.row >= 0) {
          ASSERT_EQ(map[slot.row], &slot - clock.data());
        }
      }
    }
  }
}

TEST_F(CudaRowCacheTest, WithRoomForAllNothingIsReadInPlaceAndNothingTwice) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{8, 128, 64, AnyCudaKvType(random_)};
  const int32_t blocks = 64, n = blocks * 64;
  CachedPool pool(random_, layout, blocks, blocks * 64 * 8);
  const std::vector<int32_t> table = Table(blocks);
  // Queries of one sequence that all want much the same: one of them fetches each row.
  std::vector<RetrievalQuery> queries;
  for (int32_t i = 0; i < 32; ++i) queries.push_back({i, table, n - 1, {16, n - 128}, 512});
  std::vector<std::vector<int32_t>> chosen = Choose(queries, layout.kv_heads);
  std::set<int32_t> distinct;
  for (size_t l = 0; l < chosen.size(); ++l) {
    const auto head = static_cast<int32_t>(l % layout.kv_heads);
    for (const int32_t token : chosen[l]) distinct.insert(pool.RowOf(table, head, token));
    for (int32_t token = 0; token < 16; ++token) distinct.insert(pool.RowOf(table, head, token));
    for (int32_t token = n - 128; token < n; ++token) {
      distinct.insert(pool.RowOf(table, head, token));
    }
  }
  ASSERT_NO_FATAL_FAILURE(FetchAndCheck(pool, layout, queries, chosen));
  uint64_t fetched = 0;
  for (int32_t i = 0; i < 32; ++i) {
    fetched += pool.Reads(i).fetched;
    EXPECT_EQ(pool.Reads(i).in_place, 0u);
  }
  EXPECT_EQ(fetched, distinct.size());
  ASSERT_NO_FATAL_FAILURE(FetchAndCheck(pool, layout, queries, chosen));
  for (int32_t i = 0; i < 32; ++i) EXPECT_EQ(pool.Reads(i).fetched, 0u);
}

TEST_F(CudaRowCacheTest, BlocksAreBroughtInTheOrderOfTheTable) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{3, 80, 48, AnyCudaKvType(random_)};
  CachedPool pool(random_, layout, 40, 0);
  const auto block_bytes = static_cast<int64_t>(layout.BlockBytes());
  const std::vector<int32_t> table = Table(40);
  for (const int32_t count : {1, 7, 40}) {
    // To places that are apart.
    std::vector<BlockMove> moves;
    for (int32_t i = 0; i < count; ++i) moves.push_back({table[i], 2 * i});
    const DeviceArray<BlockMove> on_device(moves);
    DeviceArray<std::byte> staging(80 * block_bytes);
    WINNOW_CUDA_OK(BringBlocks(pool.pool(), on_device.data(), count, block_bytes, staging.data(),
                               count % 2 == 0 ? kBringBlocks : 3, nullptr));
    const auto got = staging.Get();
    for (int32_t i = 0; i < count; ++i) {
      ASSERT_EQ(
          std::memcmp(&got[2 * i * block_bytes], pool.pool() + table[i] * block_bytes, block_bytes),
          0);
      ASSERT_EQ(got[(2 * i + 1) * block_bytes], std::byte{0xff}) << "written past the end";
    }
  }
}

TEST_F(CudaRowCacheTest, PinnedPiecesAreOneMemoryThatKernelsReadAndWrite) {
  // Of odd size, in pieces of 4 MiB by more threads than one.
  const size_t bytes = (size_t{33} << 20) + 12345;
  const Buffer memory = AllocatePinned(0, bytes, 3, size_t{4} << 20);
  ASSERT_NE(memory.data(), nullptr);
  auto* data = static_cast<std::byte*>(memory.data());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % (2 << 20), 0u);
  EXPECT_EQ(std::count(data, data + bytes, std::byte{0}), static_cast<int64_t>(bytes));
  std::vector<std::byte> source(bytes);
  for (size_t i = 0; i < bytes; ++i) source[i] = static_cast<std::byte>(random_.Int(0, 255));
  CopyInParallel(data, source.data(), bytes);
  ASSERT_EQ(std::memcmp(data, source.data(), bytes), 0);
  // Blocks of 48 KiB, some of which lie on two pieces.
  const int64_t block_bytes = 48 << 10;
  const auto blocks = static_cast<int32_t>(bytes / block_bytes);
  const std::vector<int32_t> order = Table(blocks);
  std::vector<BlockMove> moves;
  for (int32_t i = 0; i < blocks; ++i) moves.push_back({order[i], i});
  const DeviceArray<BlockMove> on_device(moves);
  DeviceArray<std::byte> staging(blocks * block_bytes);
  WINNOW_CUDA_OK(BringBlocks(data, on_device.data(), blocks, block_bytes, staging.data(),
                             kBringBlocks, nullptr));
  const auto got = staging.Get();
  for (int32_t i = 0; i < blocks; ++i) {
    ASSERT_EQ(std::memcmp(&got[i * block_bytes], data + order[i] * block_bytes, block_bytes), 0);
  }
  EXPECT_EQ(AllocatePinned(0, size_t{1} << 46).data(), nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "no memory is an answer, not a failure";
}

TEST_F(CudaRowCacheTest, RefusesWhatItDoesNotHave) {
  const KvLayout layout{1, 64, 16, DType::kBF16};
  CachedPool pool(random_, layout, 2, 4);
  DeviceRowCache odd = pool.cache();
  odd.row_bytes = 100;
  EXPECT_EQ(FetchRows(nullptr, 1, {1, 1, nullptr, nullptr}, odd, layout, 1, nullptr, nullptr,
                      pool.reads(), nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(FetchRows(nullptr, 70000, {1, 1, nullptr, nullptr}, pool.cache(), layout, 1, nullptr,
                      nullptr, pool.reads(), nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(BringBlocks(pool.pool(), nullptr, 1, 24, nullptr, 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace winnow::kernels::cuda
