#include "kernels/attention.h"

#include <algorithm>
#include <numeric>

#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/paged_kv.h"

namespace winnow::kernels {
namespace {

class AttentionTest : public EachIsa {
 protected:
  Matrix Attend(Backend& backend, const PagedKv& kv, Matrix& q,
                const std::vector<AttentionChunk>& chunks, float scale) {
    Matrix out(q.rows(), q.cols());
    backend.Attend(q.tensor(), chunks, kv.pool(), kv.layout(), scale, out.tensor());
    EXPECT_TRUE(out.GuardsIntact());
    return out;
  }
  Matrix Reference(const PagedKv& kv, Matrix& q, const std::vector<AttentionChunk>& chunks,
                   float scale) {
    Matrix out(q.rows(), q.cols());
    AttendRef(q.tensor(), chunks, kv.pool(), kv.layout(), scale, out.tensor());
    return out;
  }
  // f32 KV must be f32 throughout, and that of 8 bits is widened to f32 where there are no products of bf16, else to bf16. With those,
  // queries and weights may be bf16 too: a score of size s is wrong by up to s * 2^-9, and so is the weight's logarithm.
  DType ProductsOf(DType kv) const {
    if (!HasScales(kv)) return kv;
    return GetParam() == "avx512" || GetParam() == "amx" ? DType::kBF16 : DType::kF32;
  }
  double Tolerance(DType kv) const { return ProductsOf(kv) == DType::kBF16 ? 2e-2 : 1e-5; }
};
WINNOW_FOR_EACH_ISA(AttentionTest);

TEST_P(AttentionTest, EqualsTheReferenceForEveryHeadDimensionGroupAndBlockSize) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    for (const int32_t d : {64, 80, 96, 128, 256}) {
      for (int32_t group = 1; group <= 8; ++group) {
        const int32_t block_tokens = static_cast<int32_t>(16 * random_.Int(1, 16));
        const int32_t heads = static_cast<int32_t>(random_.Int(1, 2));
        const int32_t length = static_cast<int32_t>(random_.Int(1, 150));
        const int32_t tokens = static_cast<int32_t>(random_.Int(1, std::min(length, 20)));
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " d " << d << " G " << group << " Hkv " << heads
                     << " block " << block_tokens << " length " << length << " tokens " << tokens);
        const PagedKv kv(random_, {heads, d, block_tokens, dtype}, {length});
        Matrix q = Matrix::Normal(random_, tokens, int64_t{heads} * group * d);
        const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, tokens, length - tokens)};
        const float scale = 1.0f / std::sqrt(static_cast<float>(d));
        const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
        ExpectNear(Attend(*backend, kv, q, chunks, scale), Reference(kv, q, chunks, scale),
                   Tolerance(dtype), 0);
      }
    }
  }
}

TEST_P(AttentionTest, SinksTakeTheirShareOfTheDenominator) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    for (const int32_t d : {64, 80, 96, 128, 256}) {
      for (const int32_t group : {1, 8, static_cast<int32_t>(random_.Int(2, 7))}) {
        const auto block_tokens = static_cast<int32_t>(16 * random_.Int(1, 16));
        const auto heads = static_cast<int32_t>(random_.Int(1, 2));
        const auto length = static_cast<int32_t>(random_.Int(1, 700));
        const auto tokens = static_cast<int32_t>(random_.Int(1, std::min(length, 12)));
        const auto window = static_cast<int32_t>(random_.Int(0, 1) * random_.Int(1, 300));
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " d " << d << " G " << group << " Hkv " << heads
                     << " block " << block_tokens << " length " << length << " tokens " << tokens
                     << " window " << window);
        const PagedKv kv(random_, {heads, d, block_tokens, dtype}, {length});
        Matrix q = Matrix::Normal(random_, tokens, int64_t{heads} * group * d);
        // Sinks from ones that leave all to the keys to ones that leave nothing.
        Matrix sinks = Matrix::Normal(random_, 1, int64_t{heads} * group, 5.0f);
        sinks.row(0)[random_.Int(0, sinks.cols() - 1)] = random_.Int(0, 1) == 0 ? -1e4f : 1e4f;
        AttentionChunk chunk = kv.Chunk(0, 0, tokens, length - tokens);
        chunk.window = window;
        chunk.sinks = sinks.row(0);
        const float scale = 1.0f / std::sqrt(static_cast<float>(d));
        const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
        const Matrix whole = Attend(*backend, kv, q, {chunk}, scale);
        ExpectNear(whole, Reference(kv, q, {chunk}, scale), Tolerance(dtype), 0);
        // Decoding has the same bits, with other threads.
        const auto other = Make(static_cast<int>(random_.Int(1, 3)));
        const auto row = static_cast<int32_t>(random_.Int(0, tokens - 1));
        chunk.first_row = row;
        chunk.num_tokens = 1;
        chunk.position += row;
        EXPECT_TRUE(SameBits(Attend(*other, kv, q, {chunk}, scale), row, whole, row));
      }
    }
  }
}

TEST_P(AttentionTest, SinksOfMinusInfinityChangeNoBit) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, 64, 64, kKvTypes[random_.Int(0, 3)]};
  const PagedKv kv(random_, layout, {900});
  Matrix q = Matrix::Normal(random_, 30, 8 * 64), sinks(1, 8);
  std::fill_n(sinks.row(0), 8, -INFINITY);
  std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, 30, 870)};
  const auto backend = Make(2);
  const Matrix without = Attend(*backend, kv, q, chunks, 0.125f);
  chunks[0].sinks = sinks.row(0);
  const Matrix with = Attend(*backend, kv, q, chunks, 0.125f);
  for (int64_t i = 0; i < 30; ++i) EXPECT_TRUE(SameBits(with, i, without, i));
}

TEST_P(AttentionTest, EightBitsHaveTheBitsOfAPoolThatHoldsTheirValues) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : {DType::kI8, DType::kF8}) {
    for (const int32_t d : {64, 80, 96, 128, 256}) {
      const auto group = static_cast<int32_t>(random_.Int(1, 8));
      const auto block_tokens = static_cast<int32_t>(16 * random_.Int(1, 8));
      const auto length = static_cast<int32_t>(random_.Int(1, 1200));
      // A decoded token, a draft and a part of a prompt go different ways.
      for (const int32_t most : {1, 9, 100}) {
        const int32_t tokens = std::min(length, most);
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " d " << d << " G " << group << " block "
                     << block_tokens << " length " << length << " tokens " << tokens);
        const PagedKv kv(random_, {2, d, block_tokens, dtype}, {length});
        const PagedKv wide = kv.As(ProductsOf(dtype));
        Matrix q = Matrix::Normal(random_, tokens, int64_t{2} * group * d);
        const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, tokens, length - tokens)};
        const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
        const Matrix narrow_out = Attend(*backend, kv, q, chunks, 0.1f),
                     wide_out = Attend(*backend, wide, q, chunks, 0.1f);
        for (int64_t i = 0; i < tokens; ++i) ASSERT_TRUE(SameBits(narrow_out, i, wide_out, i));
      }
    }
  }
}

TEST_P(AttentionTest, EqualsTheReferenceAroundTheBordersOfBlocksAndSplits) {
  SCOPED_TRACE(Seed());
  for (const int32_t block_tokens : {16, 48, 64, 128, 256}) {
    const KvLayout layout{1, 64, block_tokens, kKvTypes[random_.Int(0, 3)]};
    const int32_t split = AttentionSplitTokens(layout);
    const PagedKv kv(random_, layout, {2 * split + 2});
    const auto backend = Make(2);
    for (const int32_t border : {block_tokens, split, 2 * split}) {
      for (int32_t length = border - 1; length <= border + 2; ++length) {
        for (const int32_t tokens : {1, 2, std::min(length, 35)}) {
          SCOPED_TRACE(testing::Message()
                       << "block " << block_tokens << " length " << length << " tokens " << tokens);
          Matrix q = Matrix::Normal(random_, tokens, 2 * 64);
          const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, tokens, length - tokens)};
          ExpectNear(Attend(*backend, kv, q, chunks, 0.125f), Reference(kv, q, chunks, 0.125f),
                     Tolerance(layout.dtype), 0);
        }
      }
    }
  }
}

// The tokens of a request do not depend on its neighbours, on how its prompt was cut, on whether a
// position came as prompt or as decode, nor on the number of threads.
TEST_P(AttentionTest, AQueryIsTheSameBitsInDecodeInAnyChunkAndAmongOthers) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 8; ++round) {
    const DType dtype = kKvTypes[round % 4];
    const int32_t d = std::vector<int32_t>{64, 80, 96, 128, 256}[random_.Int(0, 4)];
    const int32_t group = static_cast<int32_t>(random_.Int(1, 8));
    const int32_t block_tokens = static_cast<int32_t>(16 * random_.Int(1, 8));
    const KvLayout layout{2, d, block_tokens, dtype};
    const int32_t split = AttentionSplitTokens(layout);
    const int32_t length = static_cast<int32_t>(random_.Int(split, split + 150));
    SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " d " << d << " G " << group << " block "
                                    << block_tokens << " length " << length);
    const PagedKv kv(random_, layout, {length, 700, 3});
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    Matrix q = Matrix::Normal(random_, length, int64_t{2} * group * d);
    const auto one = Make(1);
    const Matrix whole = Attend(*one, kv, q, {kv.Chunk(0, 0, length, 0)}, scale);

    for (int threads = 1; threads <= 3; ++threads) {  // the prompt in chunks of random sizes
      const auto backend = Make(threads);
      for (int32_t position = 0; position < length;) {
        const int32_t tokens =
            std::min(static_cast<int32_t>(random_.Int(1, 200)), length - position);
        Matrix out(tokens, q.cols());
        const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, tokens, position)};
        backend->Attend(q.tensor().RowRange(position, tokens), chunks, kv.pool(), layout, scale,
                        out.tensor());
        for (int32_t i = 0; i < tokens; ++i) {
          ASSERT_TRUE(SameBits(out, i, whole, position + i))
              << threads << " threads, chunk at " << position;
        }
        position += tokens;
      }
    }
    for (int threads = 1; threads <= 3; ++threads) {  // decode, alone and between two others
      const auto backend = Make(threads);
      for (const int32_t position :
           {0, block_tokens - 1, block_tokens, split - 1, split, length - 1}) {
        if (position >= length) continue;
        Matrix alone_q(1, q.cols()), batch_q = Matrix::Normal(random_, 8, q.cols());
        std::copy_n(q.row(position), q.cols(), alone_q.row(0));
        std::copy_n(q.row(position), q.cols(), batch_q.row(5));
        const Matrix alone = Attend(*backend, kv, alone_q, {kv.Chunk(0, 0, 1, position)}, scale);
        const Matrix among = Attend(
            *backend, kv, batch_q,
            {kv.Chunk(1, 0, 5, 690), kv.Chunk(0, 5, 1, position), kv.Chunk(2, 6, 2, 1)}, scale);
        ASSERT_TRUE(SameBits(alone, 0, whole, position))
            << threads << " threads, position " << position;
        ASSERT_TRUE(SameBits(among, 5, whole, position))
            << threads << " threads, position " << position;
      }
    }
  }
}

// Blocks before the first key that a query sees are nowhere: whoever reads them ends the test.
TEST_P(AttentionTest, AWindowHasTheLastKeysAndNoOthers) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 60; ++round) {
    const DType dtype = kKvTypes[round % 4];
    const int32_t d = std::vector<int32_t>{64, 80, 96, 128, 256}[round / 4 % 5];
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const auto block_tokens = static_cast<int32_t>(16 * random_.Int(1, 10));
    const auto length = static_cast<int32_t>(random_.Int(1, 1600));
    // Mostly few: the reference's time goes with them.
    const auto tokens =
        static_cast<int32_t>(random_.Int(1, std::min(length, round % 7 == 0 ? 300 : 40)));
    const auto window = static_cast<int32_t>(
        round % 3 == 0 ? 64 * random_.Int(1, 20) : random_.Int(1, round % 3 == 1 ? 70 : 1800));
    SCOPED_TRACE(testing::Message()
                 << DTypeName(dtype) << " d " << d << " G " << group << " block " << block_tokens
                 << " length " << length << " tokens " << tokens << " window " << window);
    const PagedKv kv(random_, {2, d, block_tokens, dtype}, {length});
    Matrix q = Matrix::Normal(random_, tokens, int64_t{2} * group * d);
    std::vector<int32_t> table;
    const std::vector<AttentionChunk> chunks = {
        kv.WindowChunk(0, 0, tokens, length - tokens, window, &table)};
    const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const Matrix out = Attend(*backend, kv, q, chunks, scale);
    ExpectNear(out, Reference(kv, q, chunks, scale), Tolerance(dtype), 0);
    if (window < length) continue;
    const std::vector<AttentionChunk> all = {kv.Chunk(0, 0, tokens, length - tokens)};
    ASSERT_TRUE(SameBits(out, Attend(*backend, kv, q, all, scale)));
  }
}

TEST_P(AttentionTest, AQueryWithAWindowIsTheSameBitsInDecodeAndInAnyChunk) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const DType dtype = kKvTypes[round % 4];
    const int32_t d = std::vector<int32_t>{64, 80, 96, 128, 256}[random_.Int(0, 4)];
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const KvLayout layout{2, d, static_cast<int32_t>(16 * random_.Int(1, 8)), dtype};
    const auto length = static_cast<int32_t>(random_.Int(600, 1400));
    const auto window = static_cast<int32_t>(random_.Int(1, round % 2 == 0 ? 150 : 900));
    SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " d " << d << " G " << group << " block "
                                    << layout.block_tokens << " window " << window);
    const PagedKv kv(random_, layout, {length, 700});
    Matrix q = Matrix::Normal(random_, length, int64_t{2} * group * d);
    std::vector<int32_t> table, other_table;
    const Matrix whole =
        Attend(*Make(1), kv, q, {kv.WindowChunk(0, 0, length, 0, window, &table)}, 0.1f);
    for (int threads = 1; threads <= 3; ++threads) {
      const auto backend = Make(threads);
      for (int32_t position = 0; position < length;) {
        const auto most = static_cast<int32_t>(random_.Int(0, 1) == 0 ? 3 : 200);
        const auto tokens = std::min(static_cast<int32_t>(random_.Int(1, most)), length - position);
        Matrix part(tokens + 1, q.cols()), out(tokens + 1, q.cols());
        for (int32_t i = 0; i < tokens; ++i) {
          std::copy_n(q.row(position + i), q.cols(), part.row(i));
        }
        std::copy_n(q.row(0), q.cols(), part.row(tokens));
        const std::vector<AttentionChunk> chunks = {
            kv.WindowChunk(0, 0, tokens, position, window, &table),
            kv.WindowChunk(1, tokens, 1, 699, window, &other_table)};
        backend->Attend(part.tensor(), chunks, kv.pool(), layout, 0.1f, out.tensor());
        for (int32_t i = 0; i < tokens; ++i) {
          ASSERT_TRUE(SameBits(out, i, whole, position + i))
              << threads << " threads, chunk at " << position;
        }
        // Most decoded tokens are left out.
        position += threads == 1 ? tokens : tokens + static_cast<int32_t>(random_.Int(0, 90));
      }
    }
  }
}

TEST_P(AttentionTest, ManySplitsAreMergedInOneOrder) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, 64, 64, kKvTypes[random_.Int(0, 3)]};
  const int32_t length = static_cast<int32_t>(random_.Int(3000, 4000));
  const PagedKv kv(random_, layout, {length});
  for (const int32_t tokens : {1, 3}) {
    Matrix q = Matrix::Normal(random_, tokens, 4 * 64);
    const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, tokens, length - tokens)};
    const auto one = Make(1);
    const Matrix in_order = Attend(*one, kv, q, chunks, 0.125f);
    for (int threads = 2; threads <= 4; ++threads) {  // splits go to whichever thread is free
      const auto backend = Make(threads);
      ASSERT_TRUE(SameBits(Attend(*backend, kv, q, chunks, 0.125f), in_order))
          << threads << " threads";
    }
  }
}

TEST_P(AttentionTest, ExtremeScoresNeitherOverflowNorVanish) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    const KvLayout layout{1, 64, 32, dtype};
    // Scores of both signs up to about 1e4: the softmax is nearly a choice of one key.
    const PagedKv kv(random_, layout, {600}, 400.0f);
    Matrix q = Matrix::Normal(random_, 4, 64, 1.0f);
    const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, 4, 596)};
    const auto backend = Make(2);
    const Matrix out = Attend(*backend, kv, q, chunks, 1.0f);
    if (ProductsOf(dtype) != DType::kBF16) {
      ExpectNear(out, Reference(kv, q, chunks, 1.0f), 5e-2, 0);
    } else {
      // Which key wins may hang on q's rounding; the result must still be an average of values.
      for (int64_t i = 0; i < out.rows(); ++i) {
        for (int64_t j = 0; j < out.cols(); ++j) ASSERT_LT(std::abs(out.row(i)[j]), 6.0f);
      }
    }
  }
}

TEST_P(AttentionTest, EqualKeysGiveTheMeanOfTheValuesHoweverLargeTheScore) {
  const KvLayout layout{1, 64, 64, DType::kBF16};
  std::vector<std::byte> pool(20 * layout.BlockBytes());
  std::vector<int32_t> table(20);
  std::iota(table.begin(), table.end(), 0);
  const int32_t length = 1237;
  Matrix k(length, 64), v(length, 64);
  for (int32_t t = 0; t < length; ++t) {
    for (int32_t j = 0; j < 64; ++j) {
      k.row(t)[j] = 12.5f;
      v.row(t)[j] = static_cast<float>(t % 2);
    }
  }
  const std::vector<AttentionChunk> chunk = {{0, length, 0, table}};
  WriteKvRef(k.tensor(), v.tensor(), chunk, pool.data(), layout);
  for (const float sign : {1.0f, -1.0f}) {
    Matrix q(1, 64), out(1, 64);
    for (int32_t j = 0; j < 64; ++j) q.row(0)[j] = sign * 12.5f;  // score 1e4
    const std::vector<AttentionChunk> last = {{0, 1, length - 1, table}};
    Make(2)->Attend(q.tensor(), last, pool.data(), layout, 1.0f, out.tensor());
    for (int32_t j = 0; j < 64; ++j) EXPECT_NEAR(out.row(0)[j], 618.0 / 1237.0, 1e-4);
  }
}

TEST_P(AttentionTest, LongContextsKeepTheirPrecision) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    const PagedKv kv(random_, {1, 64, 64, dtype}, {20000});
    Matrix q = Matrix::Normal(random_, 1, 4 * 64);
    const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, 1, 19999)};
    const auto backend = Make(3);
    ExpectNear(Attend(*backend, kv, q, chunks, 0.125f), Reference(kv, q, chunks, 0.125f),
               ProductsOf(dtype) == DType::kBF16 ? 1e-3 : 1e-6, 0);
  }
}

TEST_P(AttentionTest, NotANumberInOneSequenceDisturbsNoOther) {
  SCOPED_TRACE(Seed());
  const PagedKv kv(random_, {1, 64, 64, DType::kBF16}, {100, 90});
  const auto backend = Make(2);
  Matrix q = Matrix::Normal(random_, 8, 128);
  const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 0, 4, 96), kv.Chunk(1, 4, 4, 86)};
  const Matrix clean = Attend(*backend, kv, q, chunks, 0.125f);
  q.row(2)[3] = NAN;
  const Matrix dirty = Attend(*backend, kv, q, chunks, 0.125f);
  for (int64_t i = 0; i < 8; ++i) {
    if (i == 2) {
      EXPECT_TRUE(std::isnan(dirty.row(i)[0]));
    } else {
      EXPECT_TRUE(SameBits(dirty, i, clean, i));
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
