// Calls of the backend that are more than one launch may take, or more than a grid or a piece of memory
// holds: they give what smaller calls give.
#include <cstring>
#include <numeric>

#include "kernels/cuda/hamming_select.h"
#include "kernels/cuda/top_p.h"
#include "kernels/hamming_select.h"
#include "kernels/int4_keys.h"
#include "kernels/top_p.h"
#include "tests/cuda/backend_testing.h"
#include "tests/unit/kernels/random_feature_map.h"

namespace winnow::kernels::cuda {
namespace {

constexpr size_t kOneLaunch = size_t{256} << 20;  // of workspace

class CudaBackendLimitsTest : public CudaBackendFixture {};

TEST_F(CudaBackendLimitsTest, ManyQueriesOfALongContextChooseByCodesInSeveralLaunches) {
  SCOPED_TRACE(Seed());
  const CodeLayout code_layout{8, 64, 32};
  const int32_t blocks = 4200, n = blocks * 64, num_queries = 63, k = 50;
  ASSERT_GT(HammingSelectWorkspaceBytes({num_queries, 1, code_layout, n - 100}), kOneLaunch);
  std::vector<int32_t> table(blocks);
  std::iota(table.begin(), table.end(), 0);
  random_.Shuffle(table);
  std::mt19937 bits(static_cast<uint32_t>(random_.Int(0, INT32_MAX)));
  const auto random_bytes = [&bits](size_t count) {
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(bits());
    return bytes;
  };
  const std::vector<uint8_t> codes = random_bytes(blocks * code_layout.BlockBytes());
  const std::vector<uint8_t> query_codes =
      random_bytes(num_queries * code_layout.kv_heads * code_layout.CodeBytes());
  const DeviceArray<uint8_t> codes_on_device(codes), query_codes_on_device(query_codes);
  std::vector<RetrievalQuery> queries;
  for (int32_t i = 0; i < num_queries; ++i) {
    // Some are as long as can be, so that all have their room.
    const auto position =
        i % 20 == 5 ? n - 1 : static_cast<int32_t>(random_.Int(200, i % 3 == 0 ? n - 1 : 9000));
    queries.push_back({i, table, position, {16, position - 60}, k});
  }
  const SharedSelection chosen(*backend_, num_queries, code_layout.kv_heads, k);
  backend_->BeginPass();
  backend_->SelectByCodes(queries, query_codes_on_device.data(), 1, codes_on_device.data(),
                          code_layout, chosen.view());
  ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
  OwnedSelection expected(num_queries, code_layout.kv_heads, k);
  SelectByCodesRef(queries, query_codes.data(), 1, codes.data(), code_layout, expected.view());
  for (int32_t i = 0; i < num_queries; ++i) {
    for (int32_t head = 0; head < code_layout.kv_heads; ++head) {
      ASSERT_EQ(chosen.Of(i, head), expected.Of(i, head)) << "query " << i << " head " << head;
    }
  }
}

TEST_F(CudaBackendLimitsTest, ManyCandidatesArePrunedInSeveralLaunches) {
  SCOPED_TRACE(Seed());
  // More than lie in shared memory.
  const int32_t n = 152000, kv_heads = 1, group = 16, d = 64, num_queries = 112,
                candidates = 150000;
  const KvLayout layout{kv_heads, d, 64, DType::kBF16};
  ASSERT_GT(TopPWorkspaceBytes({num_queries, group, layout, 1024, candidates}), kOneLaunch);
  PagedKv kv(random_, layout, {n});
  const auto pool = UploadPool(kv);
  DeviceArray<std::byte> int4(kv.num_blocks() * Int4BlockBytes(layout));
  const std::vector<KeySpan> span = {{kv.table(0), {0, n}}};
  Matrix q = Matrix::Normal(random_, num_queries, int64_t{kv_heads} * group * d);
  auto of_q = Put(q);
  std::vector<RetrievalQuery> queries;
  OwnedSelection all(num_queries, kv_heads, candidates);
  for (int32_t i = 0; i < num_queries; ++i) {
    queries.push_back(kv.Query(0, i, n - 1 - i, 16, 128, candidates));
    std::vector<int32_t> tokens(random_.Int(candidates - 5000, candidates));
    std::iota(tokens.begin(), tokens.end(), 16 + i);
    all.Set(i, 0, tokens);
  }
  const SharedSelection together(*backend_, num_queries, kv_heads, candidates);
  const SharedSelection alone(*backend_, 1, kv_heads, candidates);
  backend_->BeginPass();
  backend_->QuantizeKeys(span, pool.data(), layout, int4.data());
  backend_->PruneSelection({.q = of_q.tensor,
                            .queries = queries,
                            .int4_keys = int4.data(),
                            .layout = layout,
                            .scale = 0.3f,
                            .p = 0.9f,
                            .candidates = all.view(),
                            .kept = together.view()});
  ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
  for (int32_t i = 0; i < num_queries; ++i) {
    backend_->PruneSelection({.q = of_q.tensor,
                              .queries = std::span(queries).subspan(i, 1),
                              .int4_keys = int4.data(),
                              .layout = layout,
                              .scale = 0.3f,
                              .p = 0.9f,
                              .candidates = all.view().From(i),
                              .kept = alone.view()});
    ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
    ASSERT_EQ(together.Of(i, 0), alone.Of(0, 0)) << "query " << i;
    EXPECT_FALSE(alone.Of(0, 0).empty());
  }
}

// What is kept may lie elsewhere than the candidates, which then stay what they were.
TEST_F(CudaBackendLimitsTest, CandidatesOutliveTheirPruning) {
  SCOPED_TRACE(Seed());
  const int32_t n = 2000, kv_heads = 2, group = 3, d = 64, num_queries = 3, capacity = 120;
  const KvLayout layout{kv_heads, d, 64, DType::kBF16};
  const CodeLayout code_layout{kv_heads, 64, 128};
  PagedKv kv(random_, layout, {n});
  std::vector<uint8_t> codes(kv.num_blocks() * code_layout.BlockBytes());
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
  std::vector<uint8_t> query_codes(num_queries * kv_heads * group * code_layout.CodeBytes());
  for (uint8_t& byte : query_codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
  const DeviceArray<uint8_t> codes_on_device(codes), query_codes_on_device(query_codes);
  std::vector<std::byte> int4(kv.num_blocks() * Int4BlockBytes(layout), std::byte{0});
  const std::vector<KeySpan> span = {{kv.table(0), {0, n}}};
  QuantizeKeysRef(span, kv.pool(), layout, int4.data());
  const DeviceArray<std::byte> int4_on_device(int4);
  Matrix q = Matrix::Normal(random_, num_queries, int64_t{kv_heads} * group * d);
  auto of_q = Put(q);
  std::vector<RetrievalQuery> queries;
  for (int32_t i = 0; i < num_queries; ++i) {
    queries.push_back(kv.Query(0, i, n - 1 - i, 4, 32, 100));
  }
  OwnedSelection candidates(num_queries, kv_heads, capacity);
  SelectByCodesRef(queries, query_codes.data(), group, codes.data(), code_layout,
                   candidates.view());
  const SharedSelection chosen(*backend_, num_queries, kv_heads, capacity);
  const SharedSelection kept(*backend_, num_queries, kv_heads, capacity);
  backend_->BeginPass();
  backend_->SelectByCodes(queries, query_codes_on_device.data(), group, codes_on_device.data(),
                          code_layout, chosen.view());
  backend_->PruneSelection({.q = of_q.tensor,
                            .queries = queries,
                            .int4_keys = int4_on_device.data(),
                            .layout = layout,
                            .scale = 0.5f,
                            .p = 0.8f,
                            .candidates = chosen.view(),
                            .kept = kept.view()});
  ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
  size_t fewer = 0;
  for (int32_t i = 0; i < num_queries; ++i) {
    for (int32_t head = 0; head < kv_heads; ++head) {
      const std::vector<int32_t> all = candidates.Of(i, head), some = kept.Of(i, head);
      ASSERT_EQ(chosen.Of(i, head), all);
      EXPECT_TRUE(std::includes(all.begin(), all.end(), some.begin(), some.end()));
      fewer += some.size() < all.size() ? 1 : 0;
    }
  }
  EXPECT_GT(fewer, 0u);
}

// One sequence is far behind, many go on by a token: room for all of them is that of the first, many
// times over.
TEST_F(CudaBackendLimitsTest, SummariesOfManySequencesEnterInPieces) {
  SCOPED_TRACE(Seed());
  const int32_t kv_heads = 8, d = 64, features = 64, count = 40, n = 8500;
  const KvLayout layout{kv_heads, d, 64, DType::kBF16};
  PagedKv kv(random_, layout, {n});
  const auto pool = UploadPool(kv);
  const RandomFeatureMap weights(random_, {kv_heads, d, d, 64, features}, 3.0f);
  const auto map = backend_->PackFeatureMap(weights.weights());
  ASSERT_NE(map, nullptr);
  ASSERT_GT(size_t{4} * count * kv_heads * 8192 * features, kOneLaunch);
  const int64_t floats = kv_heads * SummaryFloats(features, d);
  const Buffer together = backend_->Allocate(4 * count * floats);
  const Buffer alone = backend_->Allocate(4 * count * floats);
  // Each begins at a token of its own, in the same text.
  const auto run = [&](const Buffer& memory, bool at_once) {
    std::vector<Summary> summaries;
    for (int32_t i = 0; i < count; ++i) {
      summaries.push_back({static_cast<float*>(memory.data()) + i * floats, {16 + i, 16 + i}});
    }
    std::vector<SummaryExtension> extensions;
    for (int32_t i = 0; i < count; ++i) {
      extensions.push_back({&summaries[i], kv.table(0), i == 7 ? n : 17 + i});
    }
    backend_->BeginPass();
    if (at_once) {
      backend_->ExtendSummaries(extensions, pool.data(), layout, *map);
    } else {
      for (const SummaryExtension& extension : extensions) {
        backend_->ExtendSummaries({&extension, 1}, pool.data(), layout, *map);
      }
    }
    for (int32_t i = 0; i < count; ++i) EXPECT_EQ(summaries[i].tokens.last, extensions[i].last);
    std::vector<float> values(count * floats);
    backend_->CopyToHost(memory.data(), values.data(), 4 * values.size());
    return values;
  };
  const std::vector<float> of_all = run(together, true), of_each = run(alone, false);
  ASSERT_EQ(backend_->failure(), "");
  EXPECT_EQ(std::memcmp(of_all.data(), of_each.data(), 4 * of_all.size()), 0);
}

TEST_F(CudaBackendLimitsTest, MapsThatNoLaunchTakesAreRefused) {
  const RandomFeatureMap many(random_, {1, 64, 64, 64, 132}, 1.0f);
  const RandomFeatureMap odd(random_, {1, 64, 64, 64, 62}, 1.0f);
  const RandomFeatureMap wide(random_, {1, 64, 64, 200, 64}, 1.0f);
  for (const RandomFeatureMap* map : {&many, &odd, &wide}) {
    EXPECT_EQ(backend_->PackFeatureMap(map->weights()), nullptr);
  }
  EXPECT_TRUE(backend_->Synchronize()) << "a refusal is no failure";
}

TEST_F(CudaBackendLimitsTest, AChunkOfMoreTokensThanAGridHasIsRotatedAndWritten) {
  SCOPED_TRACE(Seed());
  const int32_t n = 65600, d = 64;
  const KvLayout layout{1, d, 64, DType::kBF16};
  PagedKv kv(random_, layout, {n});
  const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, n, 0)};
  Matrix q = Matrix::Normal(random_, n, d), k = Matrix::Normal(random_, n, d), v = k;
  Matrix table = Matrix::Normal(random_, n, 2 * d);  // of q, then of k
  const auto pool = UploadPool(kv), expected_pool = UploadPool(kv);
  Matrix expected_q = q, expected_k = k;
  auto of_q = Put(q), of_k = Put(k), of_v = Put(v), of_table = Put(table);
  auto of_expected_q = Put(expected_q), of_expected_k = Put(expected_k);
  backend_->BeginPass();
  backend_->RopeAndWriteKv({.q = of_q.tensor,
                            .k = of_k.tensor,
                            .v = of_v.tensor,
                            .q_cos_sin = of_table.tensor.ColRange(0, d),
                            .cos_sin = of_table.tensor.ColRange(d, d),
                            .chunks = chunks,
                            .pool = pool.data(),
                            .layout = layout});
  backend_->Rope(of_expected_q.tensor, d, of_table.tensor.ColRange(0, d));
  backend_->Rope(of_expected_k.tensor, d, of_table.tensor.ColRange(d, d));
  backend_->WriteKv(of_expected_k.tensor, of_v.tensor, chunks, expected_pool.data(), layout);
  of_q.Fetch();
  of_expected_q.Fetch();
  EXPECT_TRUE(SameBits(q, expected_q));
  EXPECT_TRUE(pool.Get() == expected_pool.Get());
}

// Large shared memory is registered in pieces, and a copy by the runtime must not span two.
TEST_F(CudaBackendLimitsTest, CopiesReachOverThePiecesOfLargeSharedMemory) {
  const size_t size = (size_t{1} << 30) + (size_t{1} << 20), bytes = size_t{300} << 20;
  const Buffer shared = backend_->AllocateShared(size);
  ASSERT_NE(shared.data(), nullptr);
  const Buffer device = backend_->Allocate(bytes);
  ASSERT_NE(device.data(), nullptr);
  std::vector<uint32_t> values(bytes / 4);
  std::iota(values.begin(), values.end(), 12345u);
  backend_->CopyToDevice(values.data(), device.data(), bytes);
  auto* data = static_cast<std::byte*>(shared.data());
  for (const size_t at : {size_t{0}, (size_t{200} << 20) + 4, size - bytes}) {
    backend_->CopyToHost(device.data(), data + at, bytes);
    ASSERT_EQ(backend_->failure(), "") << at;
    ASSERT_EQ(std::memcmp(data + at, values.data(), bytes), 0) << at;
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
