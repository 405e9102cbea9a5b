#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/attention_ways.h"

#include <array>

#include "kernels/attention.h"
#include "tests/cuda/backend_testing.h"

namespace winnow::kernels::cuda {
namespace {

// q and weights are rounded to bf16: 2^-9 of values of size 1, and of a score of some units.
constexpr double kTolerance = 0.03;

class CudaDenseAttentionTest : public CudaBackendFixture {
 protected:
  static float ScaleOf(int32_t d) { return 1.0f / std::sqrt(static_cast<float>(d)); }
  Matrix Run(const PagedKv& kv, const DeviceArray<std::byte>& pool, Matrix& q,
             const std::vector<AttentionChunk>& chunks) {
    Matrix out(q.rows(), q.cols());
    for (int64_t i = 0; i < out.rows(); ++i) {
      std::fill(out.row(i), out.row(i) + out.cols(), std::nanf(""));
    }
    auto on_device = Put(out);
    auto of_q = Put(q);
    backend_->BeginPass();
    backend_->Attend(of_q.tensor, chunks, pool.data(), kv.layout(), ScaleOf(kv.layout().head_dim),
                     on_device.tensor);
    on_device.Fetch();
    return out;
  }
  // The same by a shape of the caller's. Rows of no chunk keep the query.
  static Matrix RunShape(const DenseAttentionShape& shape, Matrix& q,
                         const DeviceArray<DeviceChunk>& chunks,
                         const DeviceArray<std::byte>& pool) {
    Matrix result = q;
    const auto of_q = Upload(q), out = Upload(result);
    const DeviceArray<std::byte> workspace(DenseAttentionWorkspaceBytes(shape));
    const int64_t stride = q.tensor().stride;
    WINNOW_CUDA_OK(AttendDense(shape, of_q.data(), stride, chunks.data(), pool.data(),
                               ScaleOf(shape.layout.head_dim), out.data(), stride, workspace.data(),
                               nullptr));
    Download(out, result);
    EXPECT_TRUE(result.GuardsIntact());
    return result;
  }
};

TEST_F(CudaDenseAttentionTest, EqualsTheReferenceForEveryHeadDimensionAndGroup) {
  SCOPED_TRACE(Seed());
  int round = 0;
  for (const int32_t d : kCudaHeadDims) {
    for (const int32_t group : {1, 2, 3, 4, 5, 7, 8, 16}) {
      const KvLayout layout{static_cast<int32_t>(random_.Int(1, 3)), d,
                            static_cast<int32_t>(16 * random_.Int(1, 9)),
                            CudaKvTypeOf(d, kCudaKvTypes[round++ % 3])};
      const auto prompt = static_cast<int32_t>(random_.Int(1, group > 4 ? 250 : 600));
      PagedKv kv(random_, layout, {prompt, 333});
      const auto pool = UploadPool(kv);
      const auto begin = static_cast<int32_t>(random_.Int(0, prompt - 1));
      const auto few = static_cast<int32_t>(random_.Int(1, 8));
      Matrix q =
          Matrix::Normal(random_, prompt - begin + few, int64_t{layout.kv_heads} * group * d);
      const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, prompt - begin, begin),
                                                  kv.Chunk(1, prompt - begin, few, 333 - few)};
      SCOPED_TRACE(testing::Message()
                   << "d " << d << " G " << group << " block " << layout.block_tokens << " from "
                   << begin << " of " << prompt);
      Matrix expected(q.rows(), q.cols());
      AttendRef(q.tensor(), chunks, kv.pool(), layout, ScaleOf(d), expected.tensor());
      ExpectNear(Run(kv, pool, q, chunks), expected, kTolerance, 0);
    }
  }
}

// Rounding q and the weights is all that separates it from the reference: with values that bf16
// holds and one key that takes all the weight, nothing does.
TEST_F(CudaDenseAttentionTest, AKeyThatTakesAllTheWeightGivesItsValue) {
  SCOPED_TRACE(Seed());
  const int32_t d = 64, n = 1000;
  const KvLayout layout{1, d, 32, AnyCudaKvType(random_)};
  PagedKv kv(random_, layout, {n}, 0.01f);
  const auto chosen = static_cast<int32_t>(random_.Int(0, n - 1));
  for (int32_t c = 0; c < d; ++c) kv.SetKey(0, 0, chosen, c, 40.0f);
  const auto pool = UploadPool(kv);
  Matrix q(1, d);
  std::fill(q.row(0), q.row(0) + d, 1.0f);
  const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, 1, n - 1)};
  const Matrix out = Run(kv, pool, q, chunks);
  for (int32_t c = 0; c < d; ++c) {
    const BF16 expected = ToBF16(ValueAt(kv.Row(0, 0, chosen), layout, c));
    ASSERT_EQ(out.row(0)[c], ToFloat(expected)) << "channel " << c;
  }
}

// The promises of backend.h: a query has the same bits alone, in chunks of any size, and beside
// others, be its keys taken one after the other or side by side.
TEST_F(CudaDenseAttentionTest, AQueryHasTheSameBitsHoweverThePromptIsCut) {
  SCOPED_TRACE(Seed());
  for (int test = 0; test < 15; ++test) {
    const int32_t d = kCudaHeadDims[test % 5];
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const auto block = static_cast<int32_t>(test % 2 == 0 ? 64 : 16 * random_.Int(1, 6));
    const KvLayout layout{2, d, block, CudaKvTypeOf(d, kCudaKvTypes[test / 5])};
    const auto n = static_cast<int32_t>(random_.Int(600, 1500));
    PagedKv kv(random_, layout, {n, 400});
    const auto pool = UploadPool(kv);
    Matrix q = Matrix::Normal(random_, n + 1, int64_t{2} * group * d);
    SCOPED_TRACE(testing::Message() << "d " << d << " G " << group << " n " << n);
    const std::vector<AttentionChunk> at_once = {kv.Chunk(0, 0, n, 0)};
    const Matrix whole = Run(kv, pool, q, at_once);
    for (int round = 0; round < 3; ++round) {
      std::vector<AttentionChunk> cut;
      for (int32_t first = 0; first < n;) {
        const int32_t most = round == 0 ? 8 : round == 1 ? 60 : 500;
        const auto count = std::min<int32_t>(n - first, static_cast<int32_t>(random_.Int(1, most)));
        cut.push_back(kv.Chunk(0, first, count, first));
        first += count;
      }
      cut.push_back(kv.Chunk(1, n, 1, 399));
      const Matrix pieces = Run(kv, pool, q, cut);
      for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(SameBits(pieces, i, whole, i));
    }
  }
}

// Blocks before the first unit with a key that is seen are nowhere.
TEST_F(CudaDenseAttentionTest, AWindowHasTheLastKeysAndNoOthers) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 60; ++round) {
    const int32_t d = kCudaHeadDims[round % 5];
    const auto group = static_cast<int32_t>(random_.Int(1, 9));
    const KvLayout layout{
        static_cast<int32_t>(random_.Int(1, 3)), d,
        static_cast<int32_t>(round % 2 == 0 ? 64 * random_.Int(1, 2) : 16 * random_.Int(1, 6)),
        CudaKvTypeOf(d, kCudaKvTypes[round / 5 % 3])};
    const auto n = static_cast<int32_t>(random_.Int(1, 2500)),
               m = static_cast<int32_t>(random_.Int(1, 900));
    const auto first = static_cast<int32_t>(random_.Int(1, round % 3 == 0 ? std::min(n, 9) : n)),
               second = static_cast<int32_t>(random_.Int(1, std::min(m, 20)));
    const auto window = static_cast<int32_t>(
        round % 5 == 0 ? 64 * random_.Int(1, 20) : random_.Int(1, round % 5 == 1 ? 70 : 2500));
    SCOPED_TRACE(testing::Message()
                 << "d " << d << " G " << group << " block " << layout.block_tokens << ", " << first
                 << " of " << n << " and " << second << " of " << m << ", window " << window);
    PagedKv kv(random_, layout, {n, m});
    const auto pool = UploadPool(kv);
    Matrix q = Matrix::Normal(random_, first + second, int64_t{layout.kv_heads} * group * d);
    std::vector<int32_t> tables[2];
    const std::vector<AttentionChunk> chunks = {
        kv.WindowChunk(0, 0, first, n - first, window, &tables[0]),
        kv.WindowChunk(1, first, second, m - second, window, &tables[1])};
    Matrix expected(q.rows(), q.cols());
    AttendRef(q.tensor(), chunks, kv.pool(), layout, ScaleOf(d), expected.tensor());
    const Matrix out = Run(kv, pool, q, chunks);
    ExpectNear(out, expected, kTolerance, 0);
    if (window < std::max(n, m)) continue;
    ASSERT_TRUE(SameBits(
        out, Run(kv, pool, q,
                 {kv.Chunk(0, 0, first, n - first), kv.Chunk(1, first, second, m - second)})));
  }
}

TEST_F(CudaDenseAttentionTest, AQueryWithAWindowHasTheSameBitsHoweverThePromptIsCut) {
  SCOPED_TRACE(Seed());
  for (int test = 0; test < 15; ++test) {
    const int32_t d = kCudaHeadDims[test % 5];
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const auto block = static_cast<int32_t>(test % 2 == 0 ? 64 : 16 * random_.Int(1, 6));
    const KvLayout layout{2, d, block, CudaKvTypeOf(d, kCudaKvTypes[test / 5])};
    const auto n = static_cast<int32_t>(random_.Int(600, 3000));
    const auto window = static_cast<int32_t>(random_.Int(1, test % 3 == 0 ? 100 : 1200));
    PagedKv kv(random_, layout, {n});
    const auto pool = UploadPool(kv);
    Matrix q = Matrix::Normal(random_, n, int64_t{2} * group * d);
    SCOPED_TRACE(testing::Message()
                 << "d " << d << " G " << group << " n " << n << " window " << window);
    std::vector<int32_t> table;
    const Matrix whole = Run(kv, pool, q, {kv.WindowChunk(0, 0, n, 0, window, &table)});
    for (const int32_t most : {8, 60, 900}) {
      std::vector<AttentionChunk> cut;
      std::vector<std::vector<int32_t>> tables(n);
      for (int32_t first = 0; first < n;) {
        const auto count = std::min<int32_t>(n - first, static_cast<int32_t>(random_.Int(1, most)));
        cut.push_back(kv.WindowChunk(0, first, count, first, window, &tables[cut.size()]));
        first += count;
      }
      ASSERT_TRUE(SameBits(Run(kv, pool, q, cut), whole)) << "at most " << most;
    }
  }
}

// A sink takes its share of its head's rows alike in prompts, in drafts and decoded alone, with and without a window.
TEST_F(CudaDenseAttentionTest, SinksTakeTheirShareHoweverThePromptIsCut) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 40; ++round) {
    const int32_t d = kCudaHeadDims[round % 5];
    const auto group = static_cast<int32_t>(random_.Int(1, 9));
    const KvLayout layout{
        static_cast<int32_t>(random_.Int(1, 3)), d,
        static_cast<int32_t>(round % 2 == 0 ? 64 * random_.Int(1, 2) : 16 * random_.Int(1, 6)),
        CudaKvTypeOf(d, kCudaKvTypes[round / 5 % 3])};
    // Few splits, many, and more rows than are taken side by side.
    const auto n = static_cast<int32_t>(round % 3 == 0 ? random_.Int(3000, 5000)
                                                       : random_.Int(1, 900)),
               count = std::min(n, static_cast<int32_t>(round % 3 == 1 ? 900 : random_.Int(1, 30)));
    const int32_t window = round % 4 == 3 ? static_cast<int32_t>(random_.Int(1, 400)) : 0;
    SCOPED_TRACE(testing::Message()
                 << "d " << d << " G " << group << " block " << layout.block_tokens << ", " << count
                 << " of " << n << ", window " << window);
    PagedKv kv(random_, layout, {n});
    const auto pool = UploadPool(kv);
    const int64_t heads = int64_t{layout.kv_heads} * group;
    Matrix q = Matrix::Normal(random_, count, heads * d);
    std::vector<float> sinks(heads);
    for (float& sink : sinks) sink = random_.Normal(4.0f);
    sinks[random_.Int(0, heads - 1)] = 60.0f;  // takes all
    const DeviceArray<float> on_device(sinks);
    std::vector<int32_t> table;
    AttentionChunk chunk = kv.WindowChunk(0, 0, count, n - count, window, &table);
    const Matrix without = Run(kv, pool, q, {chunk});
    chunk.sinks = sinks.data();
    Matrix expected(q.rows(), q.cols());
    AttendRef(q.tensor(), {{chunk}}, kv.pool(), layout, ScaleOf(d), expected.tensor());
    chunk.sinks = on_device.data();
    const Matrix whole = Run(kv, pool, q, {chunk});
    ExpectNear(whole, expected, kTolerance, 0);
    ASSERT_FALSE(SameBits(whole, without));
    std::vector<AttentionChunk> alone;
    std::vector<std::vector<int32_t>> tables(count);
    for (int32_t i = std::max(0, count - 12); i < count; ++i) {
      alone.push_back(kv.WindowChunk(0, i, 1, n - count + i, window, &tables[i]));
      alone.back().sinks = on_device.data();
    }
    const Matrix decoded = Run(kv, pool, q, alone);
    for (const AttentionChunk& row : alone) {
      ASSERT_TRUE(SameBits(decoded, row.first_row, whole, row.first_row));
    }
    for (float& sink : sinks) sink = -INFINITY;
    const DeviceArray<float> none(sinks);
    chunk.sinks = none.data();
    ASSERT_TRUE(SameBits(Run(kv, pool, q, {chunk}), without));
  }
}

// Where the device has kernels of its own, they give the bits of those that any device has: chunks of any length and
// place side by side, scores of any size, blocks of whole units and others, and nothing that can be called a number in
// rows that are not written yet.
TEST_F(CudaDenseAttentionTest, TheDevicesOwnKernelsGiveTheBitsOfThoseThatAnyHas) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 96; ++round) {
    const DenseWay way = round % 4 < 2 ? DenseWay::kInTurn : DenseWay::kSideBySide;
    const int32_t d = round % 2 == 0 ? 128 : 64;
    const auto group = static_cast<int32_t>(random_.Int(1, 9));
    const auto block = static_cast<int32_t>(random_.Int(0, 2) == 0 ? 16 * random_.Int(1, 6)
                                                                   : 64 * random_.Int(1, 3));
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, 3)), d, block,
                          kCudaKvTypes[round / 4 % 3]};
    const auto n = static_cast<int32_t>(random_.Int(1, 2000)),
               m = static_cast<int32_t>(random_.Int(1, 900));
    const int32_t most = way == DenseWay::kInTurn ? n : 20;
    const auto first = static_cast<int32_t>(random_.Int(1, std::min(most, n))),
               second = static_cast<int32_t>(random_.Int(1, std::min(most, m)));
    SCOPED_TRACE(testing::Message()
                 << "d " << d << " G " << group << " block " << block << ", " << first << " of "
                 << n << " and " << second << " of " << m << ", way " << static_cast<int>(way));
    PagedKv kv(random_, layout, {n, m}, round % 3 == 0 ? 8.0f : 1.0f);  // NaN behind its tokens
    const auto pool = UploadPool(kv);
    const DeviceArray<int32_t> first_table(kv.table(0)), second_table(kv.table(1));
    const DeviceArray<DeviceChunk> chunks(
        std::vector<DeviceChunk>{{first_table.data(), 0, first, n - first},
                                 {second_table.data(), first, second, m - second}});
    Matrix q = Matrix::Normal(random_, first + second, int64_t{layout.kv_heads} * group * d);
    const auto least_share = static_cast<int32_t>(4 * random_.Int(0, 1));
    const DeviceArray<float> sinks(
        std::vector<float>(int64_t{layout.kv_heads} * group, random_.Normal(3.0f)));
    const bool has_sinks = random_.Int(0, 1) == 1;
    Matrix results[2] = {q, q};
    for (const bool portable : {false, true}) {
      DenseAttentionShape shape{
          2, std::max(first, second), std::max(n, m), group, layout, way, portable, least_share};
      if (has_sinks) shape.sinks = sinks.data();
      results[portable] = RunShape(shape, q, chunks, pool);
    }
    for (int64_t i = 0; i < q.rows(); ++i) {
      for (int64_t c = 0; c < q.cols(); ++c) ASSERT_TRUE(std::isfinite(results[0].row(i)[c]));
    }
    ASSERT_TRUE(SameBits(results[0], results[1]));
    ASSERT_FALSE(SameBits(results[0], q));
  }
}

// Decoding: few rows of each of many chunks, whose units the blocks share out.
TEST_F(CudaDenseAttentionTest, FewRowsOfManyChunksHaveTheBitsOfAnyDevicesKernels) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 24; ++round) {
    const bool is_long = round < 4;
    const int32_t d = round % 2 == 0 ? 128 : 64, tokens = round % 4 == 3 ? 2 : 1;
    const auto group = static_cast<int32_t>(random_.Int(1, 8 / tokens));
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, is_long ? 2 : 5)), d,
                          static_cast<int32_t>(64 * random_.Int(1, 3)), kCudaKvTypes[round % 3]};
    // One that is longer than where splits become longer, or many.
    const auto num_chunks = static_cast<int32_t>(is_long ? 1 : random_.Int(1, 70));
    std::vector<int32_t> lengths;
    for (int32_t i = 0; i < num_chunks; ++i) {
      lengths.push_back(
          static_cast<int32_t>(is_long ? random_.Int(33000, 40000) : random_.Int(2, 700)));
    }
    SCOPED_TRACE(testing::Message() << "d " << d << " G " << group << " heads " << layout.kv_heads
                                    << ", " << num_chunks << " chunks");
    PagedKv kv(random_, layout, lengths, round % 3 == 0 ? 8.0f : 1.0f);  // NaN behind its tokens
    const auto pool = UploadPool(kv);
    std::vector<DeviceArray<int32_t>> tables;
    std::vector<DeviceChunk> host_chunks;
    for (int32_t i = 0; i < num_chunks; ++i) {
      tables.emplace_back(kv.table(i));
      const auto of_chunk = static_cast<int32_t>(random_.Int(1, tokens));
      host_chunks.push_back({tables.back().data(), i * tokens, of_chunk, lengths[i] - of_chunk});
    }
    const DeviceArray<DeviceChunk> chunks(host_chunks);
    Matrix q =
        Matrix::Normal(random_, int64_t{num_chunks} * tokens, int64_t{layout.kv_heads} * group * d);
    Matrix results[3] = {q, q, q};
    for (int which = 0; which < 3; ++which) {  // any device's; shared out; as it is chosen
      DenseAttentionShape shape{
          num_chunks, tokens, *std::max_element(lengths.begin(), lengths.end()),
          group,      layout, DenseWay::kSideBySide};
      shape.portable = which == 0;
      if (which == 1) shape.least_share = 0;
      results[which] = RunShape(shape, q, chunks, pool);
    }
    for (int32_t i = 0; i < num_chunks; ++i) {
      for (int32_t t = 0; t < host_chunks[i].num_tokens; ++t) {
        const int64_t row = host_chunks[i].first_row + t;
        for (int64_t c = 0; c < q.cols(); ++c) ASSERT_TRUE(std::isfinite(results[0].row(row)[c]));
        ASSERT_FALSE(SameBits(results[0], row, q, row));
      }
    }
    ASSERT_TRUE(SameBits(results[0], results[1]));
    ASSERT_TRUE(SameBits(results[0], results[2]));
  }
}

// Chunks that lie on a split's border: of the last split their first rows see nothing. So many that blocks take several
// splits of a head.
TEST_F(CudaDenseAttentionTest, ARowBeforeASplitsBorderHasAllThatItSees) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const bool many_splits = round >= 6;  // they are merged by another kernel
    const int32_t d = round % 2 == 0 ? 128 : 64, num_chunks = many_splits ? 200 : 1000;
    const KvLayout layout{2, d, 64, kCudaKvTypes[round % 3]};
    const auto tokens = static_cast<int32_t>(random_.Int(2, 8)), group = 8 / tokens;
    const int32_t n = many_splits ? 6000 : 1500;
    PagedKv kv(random_, layout, {n});
    const auto pool = UploadPool(kv);
    const DeviceArray<int32_t> table(kv.table(0));
    std::vector<DeviceChunk> host_chunks;
    for (int32_t i = 0; i < num_chunks; ++i) {
      const auto border = static_cast<int32_t>(256 * random_.Int(many_splits ? 9 : 1, n / 256 - 1));
      const auto before = static_cast<int32_t>(random_.Int(1, tokens - 1));
      host_chunks.push_back({table.data(), i * tokens, tokens, border - before});
    }
    SCOPED_TRACE(testing::Message() << "d " << d << " G " << group << ", " << tokens << " tokens");
    const DeviceArray<DeviceChunk> chunks(host_chunks);
    Matrix q =
        Matrix::Normal(random_, int64_t{num_chunks} * tokens, int64_t{layout.kv_heads} * group * d);
    DenseAttentionShape shape{num_chunks, tokens, n, group, layout, DenseWay::kSideBySide};
    const Matrix here = RunShape(shape, q, chunks, pool);
    shape.portable = true;
    ASSERT_TRUE(SameBits(here, RunShape(shape, q, chunks, pool)));
  }
}

// For 8-bit types: the bits of attention over their values, rounded to bfloat16, each way and by either kind of kernel.
TEST_F(CudaDenseAttentionTest, CodesGiveTheBitsOfTheirRoundedValues) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 96; ++round) {
    const DenseWay way = round >= 64      ? DenseWay::kWidened
                         : round % 2 == 0 ? DenseWay::kInTurn
                                          : DenseWay::kSideBySide;
    const int32_t d = std::array{64, 80, 96, 128}[round / 2 % 4];
    const DType dtype = round / 8 % 2 == 0 ? DType::kI8 : DType::kF8;
    const auto group = static_cast<int32_t>(random_.Int(1, 9));
    const auto block =
        static_cast<int32_t>(round / 16 % 2 == 0 ? 64 * random_.Int(1, 3) : 16 * random_.Int(1, 6));
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, 3)), d, block, dtype};
    const auto n = static_cast<int32_t>(random_.Int(1, 1500));
    const auto count =
        static_cast<int32_t>(random_.Int(1, way == DenseWay::kSideBySide ? std::min(n, 20) : n));
    SCOPED_TRACE(testing::Message()
                 << DTypeName(dtype) << ", d " << d << " G " << group << " block " << block << ", "
                 << count << " of " << n << ", way " << static_cast<int>(way));
    PagedKv kv(random_, layout, {n}, round % 3 == 0 ? 8.0f : 1.0f);
    KvLayout rounded_layout;
    const auto pool = UploadPool(kv), rounded = UploadRounded(kv, &rounded_layout);
    const DeviceArray<int32_t> table(kv.table(0));
    const DeviceArray<DeviceChunk> chunks(
        std::vector<DeviceChunk>{{table.data(), 0, count, n - count}});
    Matrix q = Matrix::Normal(random_, count, int64_t{layout.kv_heads} * group * d);
    const auto least_share = static_cast<int32_t>(4 * random_.Int(0, 1));
    const auto run = [&](const DeviceArray<std::byte>& of_pool, const KvLayout& of_layout,
                         bool portable) {
      const DenseWay of_way =
          way == DenseWay::kWidened && !HasScales(of_layout.dtype) ? DenseWay::kInTurn : way;
      const DenseAttentionShape shape{1, count, n, group, of_layout, of_way, portable, least_share};
      return RunShape(shape, q, chunks, of_pool);
    };
    const Matrix expected = run(rounded, rounded_layout, true);
    for (int64_t i = 0; i < q.rows(); ++i) {
      for (int64_t c = 0; c < q.cols(); ++c) ASSERT_TRUE(std::isfinite(expected.row(i)[c]));
    }
    ASSERT_TRUE(SameBits(run(pool, layout, true), expected)) << "any device's";
    ASSERT_TRUE(SameBits(run(pool, layout, false), expected)) << "this device's";
  }
}

// Chunks of different lengths and places, some of their heads at a time, and nothing that can be called a number in rows that are
// not written yet, nor in the copy before it is made.
TEST_F(CudaDenseAttentionTest, CodesThatAreWidenedHeadByHeadHaveTheirBits) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 24; ++round) {
    const int32_t d = std::array{64, 128, 80, 96}[round % 4];
    const auto group = static_cast<int32_t>(random_.Int(1, 6)),
               num_chunks = static_cast<int32_t>(random_.Int(1, 5));
    const KvLayout layout{static_cast<int32_t>(random_.Int(2, 5)), d,
                          static_cast<int32_t>(4 * random_.Int(1, 40)),
                          round / 4 % 2 == 0 ? DType::kI8 : DType::kF8};
    std::vector<int32_t> lengths;
    for (int32_t i = 0; i < num_chunks; ++i) {
      lengths.push_back(static_cast<int32_t>(random_.Int(1, 1200)));
    }
    SCOPED_TRACE(testing::Message()
                 << "d " << d << " G " << group << " heads " << layout.kv_heads << " block "
                 << layout.block_tokens << ", " << num_chunks << " chunks");
    PagedKv kv(random_, layout, lengths, round % 3 == 0 ? 8.0f : 1.0f);
    const auto pool = UploadPool(kv);
    std::vector<DeviceArray<int32_t>> tables;
    std::vector<DeviceChunk> host_chunks;
    DenseAttentionShape shape{num_chunks, 0, 0, group, layout, DenseWay::kInTurn};
    int32_t rows = 0;
    for (int32_t i = 0; i < num_chunks; ++i) {
      tables.emplace_back(kv.table(i));
      const auto count = static_cast<int32_t>(random_.Int(1, lengths[i]));
      host_chunks.push_back({tables.back().data(), rows, count, lengths[i] - count});
      rows += count;
      shape.max_chunk_tokens = std::max(shape.max_chunk_tokens, count);
      shape.max_keys = std::max(shape.max_keys, lengths[i]);
    }
    const DeviceArray<DeviceChunk> chunks(host_chunks);
    Matrix q = Matrix::Normal(random_, rows, int64_t{layout.kv_heads} * group * d);
    shape.portable = true;
    const Matrix expected = RunShape(shape, q, chunks, pool);
    shape.way = DenseWay::kWidened;
    for (const bool portable : {false, true}) {
      shape.portable = portable;
      for (int32_t heads = 0; heads <= layout.kv_heads; ++heads) {
        shape.widened_bytes =
            size_t{4} * d * num_chunks * heads * ((shape.max_keys + 63) / 64 * 64);
        ASSERT_TRUE(SameBits(RunShape(shape, q, chunks, pool), expected))
            << heads << " heads at a time" << (portable ? ", any device's" : "");
      }
    }
  }
}

// A device that has no room for the copy attends as exactly without, and nothing fails.
TEST_F(CudaDenseAttentionTest, WithoutRoomForTheCopyCodesAreReadAsTheyAre) {
  SCOPED_TRACE(Seed());
  const int32_t d = 128, n = 32768, group = 4, count = 512;
  const KvLayout layout{8, d, 64, AnyCudaKvType(random_) == DType::kF8 ? DType::kF8 : DType::kI8};
  constexpr size_t kPiece = size_t{64} << 20;  // takes queries, outputs and code of kernels
  ASSERT_GE(ShapeOfWidened(layout, 1, n).bytes, 2 * kPiece);
  PagedKv kv(random_, layout, {n});
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, count, int64_t{8} * group * d);
  const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, count, n - count)};
  ASSERT_TRUE(PaysToWiden(chunks[0], group, layout));
  void* spare = nullptr;
  WINNOW_CUDA_OK(cudaMalloc(&spare, kPiece));
  std::vector<void*> held;
  for (size_t size = kPiece << 11; size >= kPiece;) {
    void* data = nullptr;
    if (cudaMalloc(&data, size) == cudaSuccess) {
      held.push_back(data);
    } else {
      cudaGetLastError();
      size /= 2;
    }
  }
  cudaFree(spare);
  const Matrix without = Run(kv, pool, q, chunks);
  size_t free = 0, total = 0;
  WINNOW_CUDA_OK(cudaMemGetInfo(&free, &total));
  EXPECT_LT(free, ShapeOfWidened(layout, 1, n).bytes);
  for (void* data : held) cudaFree(data);
  ASSERT_TRUE(SameBits(Run(kv, pool, q, chunks), without));  // it is not asked for again
  std::string why;
  backend_ = CudaBackend::Create(0, &why);
  ASSERT_NE(backend_, nullptr) << why;
  ASSERT_TRUE(SameBits(Run(kv, pool, q, chunks), without));
}

// More splits than blocks run at once, and than are merged at a time.
TEST_F(CudaDenseAttentionTest, ALongContextHasTheSameBitsInTurnAndSideBySide) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 128}) {
    const KvLayout layout{1, d, 64, AnyCudaKvType(random_)};
    // The joined chunk has more than is split (attention_ways.h); its last queries are asked again one by one.
    const auto n = static_cast<int32_t>(random_.Int(270000, 280000)), count = 1100, last = 12;
    ASSERT_GT(AttentionSets(count, 4, 1), kSetsOfAWave);
    PagedKv kv(random_, layout, {n});
    const auto pool = UploadPool(kv);
    Matrix q = Matrix::Normal(random_, count, 4 * d, 2.0f);
    const std::vector<AttentionChunk> joined = {kv.Chunk(0, 0, count, n - count)};
    const Matrix in_turn = Run(kv, pool, q, joined);
    std::vector<AttentionChunk> chunks;
    for (int32_t i = count - last; i < count; ++i)
      chunks.push_back(kv.Chunk(0, i, 1, n - count + i));
    const Matrix side_by_side = Run(kv, pool, q, chunks);
    for (int32_t i = count - last; i < count; ++i) {
      ASSERT_TRUE(SameBits(side_by_side, i, in_turn, i)) << "d " << d << " n " << n << " row " << i;
    }
    // A draft's verification: more queries than few, fewer than fill the device.
    ASSERT_LE(AttentionSets(last, 4, 1), kSetsOfAWave);
    const std::vector<AttentionChunk> several = {kv.Chunk(0, count - last, last, n - last)};
    const Matrix verified = Run(kv, pool, q, several);
    for (int32_t i = count - last; i < count; ++i) {
      ASSERT_TRUE(SameBits(verified, i, in_turn, i)) << "d " << d << " n " << n << " row " << i;
    }
  }
}

TEST_F(CudaDenseAttentionTest, ALongContextInMoreLaunchesThanOne) {
  SCOPED_TRACE(Seed());
  // Forty chunks of as many rows as fewest launches have: their workspaces are more than one may take.
  const KvLayout layout{8, 64, 64, DType::kBF16};
  const int32_t n = 9000, chunk = 8, count = 40 * chunk, group = 16;
  ASSERT_GT(DenseAttentionWorkspaceBytes({40, chunk, n, group, layout, DenseWay::kSideBySide}),
            size_t{256} << 20);
  PagedKv kv(random_, layout, {n});
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, count, int64_t{8} * group * 64);
  std::vector<AttentionChunk> chunks;
  for (int32_t i = 0; i < count; i += chunk) {
    chunks.push_back(kv.Chunk(0, i, chunk, n - count + i));
  }
  const Matrix separate = Run(kv, pool, q, chunks);
  const std::vector<AttentionChunk> joined = {kv.Chunk(0, 0, count, n - count)};
  const Matrix together = Run(kv, pool, q, joined);
  ASSERT_TRUE(SameBits(separate, together));
}

// A single chunk of few queries whose workspace is more than one launch may take: its queries go in
// several. A million tokens of blocks that come again.
TEST_F(CudaDenseAttentionTest, FewQueriesOfAVeryLongContextInMoreLaunchesThanOne) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{4, 128, 64, AnyCudaKvType(random_)};
  const int32_t count = 272, few = 8, group = 16;
  ASSERT_GT(AttentionSets(count, group, layout.kv_heads),
            kSetsOfAWave);  // together they go in turn
  PagedKv kv(random_, layout, {4096});
  const auto pool = UploadPool(kv);
  std::vector<int32_t> table(16400);
  for (int32_t& block : table) block = kv.table(0)[random_.Int(0, 63)];
  const auto n = static_cast<int32_t>(table.size()) * layout.block_tokens;
  ASSERT_GT(DenseAttentionWorkspaceBytes({1, few, n, group, layout, DenseWay::kSideBySide}),
            size_t{256} << 20);
  Matrix q = Matrix::Normal(random_, count, int64_t{layout.kv_heads} * group * 128);
  const std::vector<AttentionChunk> in_turn = {{0, count, n - count, table}};
  std::vector<AttentionChunk> pieces;
  for (int32_t i = 0; i < count; i += few) pieces.push_back({i, few, n - count + i, table});
  ASSERT_TRUE(SameBits(Run(kv, pool, q, pieces), Run(kv, pool, q, in_turn)));
}

}  // namespace
}  // namespace winnow::kernels::cuda
