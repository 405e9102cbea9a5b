#include "kernels/row_attention.h"

#include "kernels/attention_state.h"
#include "tests/unit/kernels/retrieval_testing.h"

namespace winnow::kernels {
namespace {

using Rows = std::vector<const std::byte*>;

class RowAttentionTest : public EachIsa {
 protected:
  static std::vector<RowList> Lists(const std::vector<Rows>& rows) {
    std::vector<RowList> lists;
    for (const Rows& of_list : rows) {
      lists.push_back({of_list.data(), static_cast<int32_t>(of_list.size()), 0, 0});
    }
    return lists;
  }
  static std::vector<RetrievalQuery> Queries(int32_t count, int32_t first_row = 0) {
    std::vector<RetrievalQuery> queries(count);
    for (int32_t i = 0; i < count; ++i) queries[i].row = first_row + i;
    return queries;
  }
  // Any rows of a sequence's head, each as often as chance has it.
  Rows AnyRows(PagedKv& kv, int sequence, int32_t head, int64_t count) {
    Rows rows(count);
    for (auto& row : rows) {
      row = kv.Row(sequence, head, static_cast<int32_t>(random_.Int(0, kv.length(sequence) - 1)));
    }
    return rows;
  }
  std::vector<float> States(Backend& backend, Matrix& q, const KvLayout& layout, float scale,
                            const std::vector<RetrievalQuery>& queries,
                            const std::vector<Rows>& rows) {
    std::vector<float> states(
        queries.size() * (q.cols() / layout.head_dim) * AttentionStateFloats(layout.head_dim), NAN);
    backend.AttendRows({.q = q.tensor(),
                        .queries = queries,
                        .rows = {.layout = layout, .lists = Lists(rows)},
                        .scale = scale,
                        .states = states.data()});
    return states;
  }
  // The attention and the log-sum-exp of states are those of others.
  static void ExpectSame(const std::vector<float>& actual, const std::vector<float>& expected,
                         int32_t d, double tolerance) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t at = 0; at < actual.size(); at += d + 2) {
      const float *a = actual.data() + at, *e = expected.data() + at;
      if (e[d + 1] == 0) {
        ASSERT_EQ(a[d + 1], 0) << "state " << at / (d + 2);
        continue;
      }
      const double lse = AttentionStateLogSumExp(e, d);
      ASSERT_NEAR(AttentionStateLogSumExp(a, d), lse, tolerance * std::max(1.0, std::abs(lse)));
      for (int32_t c = 0; c < d; ++c) {
        ASSERT_NEAR(a[c] / a[d + 1], e[c] / e[d + 1], tolerance)
            << "state " << at / (d + 2) << " channel " << c;
      }
    }
  }
};
WINNOW_FOR_EACH_ISA(RowAttentionTest);

TEST_P(RowAttentionTest, EqualsTheReferenceForEveryHeadDimensionGroupAndType) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    for (const int32_t d : {16, 64, 80, 96, 112, 128}) {
      for (int32_t group = 1; group <= 9; ++group) {
        const KvLayout layout{static_cast<int32_t>(random_.Int(1, 3)), d, 32, dtype};
        PagedKv kv(random_, layout, {300});
        const auto queries = Queries(static_cast<int32_t>(random_.Int(1, 3)), 1);
        Matrix q = Matrix::Normal(random_, 5, int64_t{layout.kv_heads} * group * d);
        std::vector<Rows> rows;
        for (size_t i = 0; i < queries.size() * layout.kv_heads; ++i) {
          rows.push_back(AnyRows(kv, 0, static_cast<int32_t>(i) % layout.kv_heads,
                                 random_.Int(0, 3) == 0 ? 0 : random_.Int(1, 200)));
        }
        SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " d " << d << " G " << group);
        const float scale = 1.0f / std::sqrt(static_cast<float>(d));
        std::vector<float> expected(queries.size() * (q.cols() / d) * AttentionStateFloats(d));
        AttendRowsRef(q.tensor(), queries, Lists(rows), layout, scale, expected.data());
        ExpectSame(
            States(*Make(static_cast<int>(random_.Int(1, 3))), q, layout, scale, queries, rows),
            expected, d, 2e-6);
      }
    }
  }
}

TEST_P(RowAttentionTest, EveryLengthAroundThePartsBorders) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 16, AnyKvType(random_)};
  PagedKv kv(random_, layout, {100});
  Matrix q = Matrix::Normal(random_, 1, 3 * 64);
  for (int32_t count = 0; count <= 2 * kRowsPerPart + 5; ++count) {
    SCOPED_TRACE(count);
    const std::vector<Rows> rows = {AnyRows(kv, 0, 0, count)};
    std::vector<float> expected(3 * AttentionStateFloats(64));
    AttendRowsRef(q.tensor(), Queries(1), Lists(rows), layout, 0.125f, expected.data());
    ExpectSame(States(*Make(2), q, layout, 0.125f, Queries(1), rows), expected, 64, 2e-6);
  }
}

TEST_P(RowAttentionTest, AllTokensChosenIsDenseAttention) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 8; ++round) {
    const DType dtype = kKvTypes[round % 4];
    const KvLayout layout{2, AnyHeadDimTo256(random_), static_cast<int32_t>(16 * random_.Int(1, 6)),
                          dtype};
    const auto group = random_.Int(1, 8);
    const auto length = static_cast<int32_t>(random_.Int(1, 1500));
    PagedKv kv(random_, layout, {length});
    Matrix q = Matrix::Normal(random_, 1, 2 * group * layout.head_dim);
    Matrix dense(1, q.cols()), gathered(1, q.cols());
    const auto backend = Make(2);
    const float scale = 1.0f / std::sqrt(static_cast<float>(layout.head_dim));
    const std::vector<AttentionChunk> chunks = {{0, 1, length - 1, kv.table(0)}};
    backend->Attend(q.tensor(), chunks, kv.pool(), layout, scale, dense.tensor());
    std::vector<Rows> rows(2);
    for (int32_t head = 0; head < 2; ++head) {
      for (int32_t t = 0; t < length; ++t) rows[head].push_back(kv.Row(0, head, t));
    }
    const std::vector<float> states = States(*backend, q, layout, scale, Queries(1), rows);
    backend->FinishStates(Queries(1), states.data(), layout.head_dim, nullptr, gathered.tensor());
    // Attend rounds q and weights to bf16 where the processor multiplies bf16.
    const bool exact = dtype == DType::kF32 || (GetParam() != "avx512" && GetParam() != "amx");
    ExpectNear(gathered, dense, exact ? 1e-6 : 2e-2, exact ? 1e-5 : 0);

    // A sink multiplies what either gave without it by the keys' share of the denominator.
    const Matrix dense_alone = dense, gathered_alone = gathered;
    Matrix sinks = Matrix::Normal(random_, 1, 2 * group, 4.0f);
    std::vector<AttentionChunk> with_sinks = chunks;
    with_sinks[0].sinks = sinks.row(0);
    backend->Attend(q.tensor(), with_sinks, kv.pool(), layout, scale, dense.tensor());
    backend->FinishStates(Queries(1), states.data(), layout.head_dim, sinks.row(0),
                          gathered.tensor());
    for (int64_t c = 0; c < q.cols(); ++c) {
      const int64_t head = c / layout.head_dim;
      const double mass = AttentionStateLogSumExp(
          states.data() + head * AttentionStateFloats(layout.head_dim), layout.head_dim);
      const double share = 1 / (1 + std::exp(sinks.row(0)[head] - mass));
      const double tolerance = exact ? 1e-6 : 2e-2;
      ASSERT_NEAR(gathered.row(0)[c], share * gathered_alone.row(0)[c], 1e-6) << c;
      ASSERT_NEAR(dense.row(0)[c], share * dense_alone.row(0)[c], tolerance) << c;
    }
  }
}

TEST_P(RowAttentionTest, TheSameBitsOnAnyNumberOfThreadsAloneAndAmongOthers) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    const KvLayout layout{2, AnyHeadDimTo256(random_), 64, dtype};
    const auto group = random_.Int(1, 6);
    const int64_t state_floats = 2 * group * AttentionStateFloats(layout.head_dim);
    PagedKv kv(random_, layout, {500});
    Matrix q = Matrix::Normal(random_, 4, 2 * group * layout.head_dim);
    std::vector<Rows> rows;
    for (int i = 0; i < 4; ++i) {
      for (int32_t head = 0; head < 2; ++head) {
        // One long list among short ones, and an empty one.
        rows.push_back(AnyRows(kv, 0, head, i == 1 ? random_.Int(900, 3000) : i == 2 ? 0 : 100));
      }
    }
    const std::vector<float> together = States(*Make(1), q, layout, 0.125f, Queries(4), rows);
    for (int threads = 1; threads <= 4; ++threads) {
      const auto backend = Make(threads);
      const std::vector<float> again = States(*backend, q, layout, 0.125f, Queries(4), rows);
      ASSERT_EQ(std::memcmp(again.data(), together.data(), 4 * together.size()), 0)
          << threads << " threads";
      for (int32_t i = 0; i < 4; ++i) {
        const std::vector<float> alone =
            States(*backend, q, layout, 0.125f, Queries(1, i), {rows[2 * i], rows[2 * i + 1]});
        ASSERT_EQ(std::memcmp(alone.data(), together.data() + i * state_floats, 4 * state_floats),
                  0)
            << "query " << i << ", " << threads << " threads";
      }
    }
  }
}

TEST_P(RowAttentionTest, PartsAreMergedFromLeftToRight) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, AnyHeadDimTo256(random_), 64, AnyKvType(random_)};
  const int64_t state_floats = AttentionStateFloats(layout.head_dim);
  PagedKv kv(random_, layout, {400});
  Matrix q = Matrix::Normal(random_, 1, 2 * layout.head_dim);
  const Rows rows = AnyRows(kv, 0, 0, 20 * kRowsPerPart + 3);
  for (const int threads : {1, 3}) {
    const auto backend = Make(threads);
    std::vector<float> merged(2 * state_floats);
    for (int g = 0; g < 2; ++g) {
      ResetAttentionState(merged.data() + g * state_floats, layout.head_dim);
    }
    for (size_t first = 0; first < rows.size(); first += kRowsPerPart) {
      const size_t last = std::min(rows.size(), first + kRowsPerPart);
      const std::vector<float> part = States(*backend, q, layout, 0.125f, Queries(1),
                                             {{rows.begin() + first, rows.begin() + last}});
      for (int g = 0; g < 2; ++g) {
        MergeAttentionState(merged.data() + g * state_floats, part.data() + g * state_floats,
                            layout.head_dim);
      }
    }
    const std::vector<float> whole = States(*backend, q, layout, 0.125f, Queries(1), {rows});
    EXPECT_EQ(std::memcmp(whole.data(), merged.data(), 4 * whole.size()), 0);
  }
}

// Each row in memory of its own, so that the address sanitizer sees a read beside one.
TEST_P(RowAttentionTest, RowsMayLieAnywhere) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    for (const int32_t d : {64, 80, 96, 128, 256}) {
      const KvLayout layout{1, d, 16, dtype};
      PagedKv kv(random_, layout, {150});
      Matrix q = Matrix::Normal(random_, 1, 4 * d);
      Rows paged, scattered;
      std::vector<std::unique_ptr<std::byte[]>> memory;
      for (int32_t t = 0; t < 150; ++t) {
        paged.push_back(kv.Row(0, 0, t));
        memory.push_back(std::make_unique<std::byte[]>(layout.RowBytes()));
        std::memcpy(memory.back().get(), paged.back(), layout.RowBytes());
        scattered.push_back(memory.back().get());
      }
      const auto backend = Make(1);
      const auto expected = States(*backend, q, layout, 0.125f, Queries(1), {paged});
      const auto actual = States(*backend, q, layout, 0.125f, Queries(1), {scattered});
      EXPECT_EQ(std::memcmp(actual.data(), expected.data(), 4 * actual.size()), 0);
    }
  }
}

TEST_P(RowAttentionTest, AnEmptyListIsTheStateOfNoKeysAndFinishesAsZeros) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, 64, 16, DType::kBF16};
  PagedKv kv(random_, layout, {50});
  Matrix q = Matrix::Normal(random_, 1, 4 * 64), out = Matrix::Normal(random_, 3, 4 * 64);
  const Matrix before = out;
  const auto backend = Make(2);
  const auto queries = Queries(1);
  std::vector<RetrievalQuery> to_row_1 = queries;
  to_row_1[0].row = 1;
  const auto states = States(*backend, q, layout, 0.125f, queries, {{}, AnyRows(kv, 0, 1, 70)});
  std::vector<float> empty(AttentionStateFloats(64));
  ResetAttentionState(empty.data(), 64);
  for (int g = 0; g < 2; ++g) {
    EXPECT_EQ(std::memcmp(states.data() + g * empty.size(), empty.data(), 4 * empty.size()), 0);
  }
  backend->FinishStates(to_row_1, states.data(), 64, nullptr, out.tensor());
  EXPECT_TRUE(SameBits(out, 0, before, 0));
  EXPECT_TRUE(SameBits(out, 2, before, 2));
  for (int32_t c = 0; c < 128; ++c) EXPECT_EQ(out.row(1)[c], 0.0f);
  for (int32_t c = 0; c < 128; ++c) {
    const float* state = states.data() + (2 + c / 64) * AttentionStateFloats(64);
    EXPECT_FLOAT_EQ(out.row(1)[128 + c], state[c % 64] / state[65]);
  }
}

TEST_P(RowAttentionTest, ExtremeScoresNeitherOverflowNorVanish) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : kKvTypes) {
    const KvLayout layout{1, 64, 32, dtype};
    PagedKv kv(random_, layout, {600}, 400.0f);  // scores of both signs up to about 1e4
    Matrix q = Matrix::Normal(random_, 4, 64);
    std::vector<Rows> rows(4);
    for (Rows& of_query : rows) of_query = AnyRows(kv, 0, 0, 600);
    std::vector<float> expected(4 * AttentionStateFloats(64));
    AttendRowsRef(q.tensor(), Queries(4), Lists(rows), layout, 1.0f, expected.data());
    ExpectSame(States(*Make(2), q, layout, 1.0f, Queries(4), rows), expected, 64, 5e-2);
  }
}

TEST_P(RowAttentionTest, AMillionRowsKeepTheirPrecision) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, DType::kBF16};
  PagedKv kv(random_, layout, {64});
  Matrix q = Matrix::Normal(random_, 1, 64);
  // Each row as often as any other: the attention is that of the rows once, the log-sum-exp log
  // 2^14 more. Each of 2^14 merges may round by 2^-24.
  Rows once, many;
  for (int32_t t = 0; t < 64; ++t) once.push_back(kv.Row(0, 0, t));
  for (int i = 0; i < 1 << 14; ++i) many.insert(many.end(), once.begin(), once.end());
  std::vector<float> expected(AttentionStateFloats(64));
  AttendRowsRef(q.tensor(), Queries(1), Lists({once}), layout, 0.125f, expected.data());
  const auto one = States(*Make(1), q, layout, 0.125f, Queries(1), {many});
  const auto four = States(*Make(4), q, layout, 0.125f, Queries(1), {many});
  EXPECT_EQ(std::memcmp(one.data(), four.data(), 4 * one.size()), 0);
  for (int32_t c = 0; c < 64; ++c) {
    EXPECT_NEAR(one[c] / one[65], expected[c] / expected[65], 1e-3);
  }
  EXPECT_NEAR(AttentionStateLogSumExp(one.data(), 64),
              AttentionStateLogSumExp(expected.data(), 64) + 14 * std::log(2.0), 1e-3);
}

TEST_P(RowAttentionTest, NotANumberInOneQueryDisturbsNoOther) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, DType::kBF16};
  PagedKv kv(random_, layout, {200});
  Matrix q = Matrix::Normal(random_, 2, 3 * 64);
  const std::vector<Rows> rows = {AnyRows(kv, 0, 0, 150), AnyRows(kv, 0, 0, 150)};
  const auto backend = Make(2);
  const auto clean = States(*backend, q, layout, 0.125f, Queries(2), rows);
  q.row(0)[64 + 3] = NAN;  // the second head of the first query
  const auto dirty = States(*backend, q, layout, 0.125f, Queries(2), rows);
  for (int head = 0; head < 6; ++head) {
    const float *a = clean.data() + head * 66, *b = dirty.data() + head * 66;
    if (head == 1) {
      EXPECT_TRUE(std::isnan(b[0]));
      continue;
    }
    for (int i = 0; i < 66; ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i])) << "head " << head;
    }
  }
}

// A CPU is told where every row lies: nothing is gained by naming tokens to it.
TEST_P(RowAttentionTest, RowsHaveAddresses) {
  const KvLayout layout{1, 64, 32, DType::kBF16};
  PagedKv kv(random_, layout, {64});
  Matrix q = Matrix::Normal(random_, 1, 64);
  const auto backend = Make(1);
  EXPECT_FALSE(backend->FindsRows(kv.pool()));
  int32_t count = 0, token = 0;
  std::vector<float> states(66);
  const std::vector<RetrievalQuery> queries = Queries(1);
  EXPECT_DEATH(backend->AttendRows(
                   {.q = q.tensor(),
                    .queries = queries,
                    .rows = {.layout = layout, .pool = kv.pool(), .chosen = {1, 1, &count, &token}},
                    .scale = 1,
                    .states = states.data()}),
               "");
}

}  // namespace
}  // namespace winnow::kernels
