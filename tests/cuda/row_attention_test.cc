#include "kernels/cuda/row_attention.h"

#include <array>

#include "kernels/attention_state.h"
#include "kernels/cuda/row_gather.h"
#include "kernels/row_attention.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {
namespace {

// q and weights enter as 16 of their 24 bits.
constexpr double kTolerance = 3e-5;

using Rows = std::vector<int32_t>;  // tokens

class CudaRowAttentionTest : public CudaTest {
 protected:
  // The attention and the log-sum-exp of states are those of others.
  static void ExpectSame(const std::vector<float>& actual, const std::vector<float>& expected,
                         int32_t d, double tolerance) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t at = 0; at < actual.size(); at += d + 2) {
      const float *a = actual.data() + at, *e = expected.data() + at;
      if (e[d + 1] == 0) {
        ASSERT_EQ(std::memcmp(a, e, 4 * (d + 2)), 0) << "state " << at / (d + 2);
        continue;
      }
      const double lse = AttentionStateLogSumExp(e, d);
      ASSERT_NEAR(AttentionStateLogSumExp(a, d), lse, tolerance * std::max(1.0, std::abs(lse)))
          << "state " << at / (d + 2);
      for (int32_t c = 0; c < d; ++c) {
        ASSERT_NEAR(a[c] / a[d + 1], e[c] / e[d + 1], tolerance)
            << "state " << at / (d + 2) << " channel " << c;
      }
    }
  }
  Rows AnyTokens(const PagedKv& kv, int sequence, int64_t count) {
    Rows rows(count);
    for (auto& row : rows) row = static_cast<int32_t>(random_.Int(0, kv.length(sequence) - 1));
    return rows;
  }

  struct Call {
    const PagedKv& kv;
    Matrix& q;
    float scale;
    std::vector<RetrievalQuery> queries;
    std::vector<Rows> rows;  // [queries][Hkv], of sequence 0

    int32_t heads() const { return static_cast<int32_t>(q.cols() / kv.layout().head_dim); }
    size_t state_values() const {
      return queries.size() * heads() * AttentionStateFloats(kv.layout().head_dim);
    }
    RowAttentionShape shape(bool portable = false) const {
      return {static_cast<int32_t>(queries.size()), heads() / kv.layout().kv_heads, kv.layout(),
              portable};
    }
  };
  static std::vector<float> Reference(Call& call) {
    std::vector<std::vector<const std::byte*>> addresses;
    std::vector<RowList> lists;
    for (size_t i = 0; i < call.rows.size(); ++i) {
      auto& of_list = addresses.emplace_back();
      for (const int32_t token : call.rows[i]) {
        of_list.push_back(const_cast<PagedKv&>(call.kv).Row(
            0, static_cast<int32_t>(i) % call.kv.layout().kv_heads, token));
      }
      lists.push_back({of_list.data(), static_cast<int32_t>(of_list.size()), 0, 0});
    }
    std::vector<float> states(call.state_values());
    AttendRowsRef(call.q.tensor(), call.queries, lists, call.kv.layout(), call.scale,
                  states.data());
    return states;
  }
  // `pool` is where the device finds the rows. Calls of this device's kernel and of any device's, that know how long lists
  // are and that do not, give the same bits, and leave the workspace ready for another.
  static std::vector<float> States(Call& call, const std::byte* pool) {
    return States(call, pool, call.kv.layout());
  }
  // The same of a pool of another type.
  static std::vector<float> States(Call& call, const std::byte* pool, const KvLayout& layout) {
    const auto shape_of = [&](bool portable) {
      RowAttentionShape shape = call.shape(portable);
      shape.layout = layout;
      return shape;
    };
    std::vector<DeviceArray<const std::byte*>> addresses;
    std::vector<RowList> lists;
    for (size_t i = 0; i < call.rows.size(); ++i) {
      std::vector<const std::byte*> of_list;
      for (const int32_t token : call.rows[i]) {
        of_list.push_back(pool + layout.RowOffset(call.kv.table(0)[token / layout.block_tokens],
                                                  static_cast<int32_t>(i) % layout.kv_heads,
                                                  token % layout.block_tokens));
      }
      addresses.emplace_back(of_list);
      lists.push_back({addresses.back().data(), static_cast<int32_t>(call.rows[i].size()), 0, 0});
    }
    const DeviceArray<RowList> lists_on_device(lists);
    const DeviceQueries queries(call.queries);
    const auto q = Upload(call.q);
    Workspace workspace(RowAttentionWorkspaceBytes(shape_of(false)));
    std::vector<float> result;
    int32_t longest = 0;
    for (const RowList& list : lists) longest = std::max(longest, list.count);
    for (const int way : {0, 1, 2, 3, 1}) {
      const bool portable = way % 2 != 0;
      RowAttentionShape shape = shape_of(portable);
      if (way >= 2) shape.max_rows = longest;
      DeviceArray<float> states(call.state_values());
      WINNOW_CUDA_OK(AttendRows(shape, q.data(), call.q.tensor().stride, queries.data(),
                                lists_on_device.data(), call.scale, {.states = states.data()},
                                workspace.data(), nullptr));
      const std::vector<float> again = states.Get();
      if (result.empty()) result = again;
      EXPECT_EQ(std::memcmp(again.data(), result.data(), 4 * result.size()), 0)
          << (portable ? "any device's" : "this device's") << ", lists of up to " << shape.max_rows;
    }
    return result;
  }
  static std::vector<RetrievalQuery> Queries(int32_t count, int32_t first_row = 0) {
    std::vector<RetrievalQuery> queries(count);
    for (int32_t i = 0; i < count; ++i) queries[i].row = first_row + i;
    return queries;
  }
};

TEST_F(CudaRowAttentionTest, EqualsTheReferenceForEveryHeadDimensionAndGroup) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : kCudaHeadDims) {
    for (int32_t group = 1; group <= 17; group += group < 9 ? 1 : 4) {
      const KvLayout layout{static_cast<int32_t>(random_.Int(1, 3)), d, 32, DType::kBF16};
      PagedKv kv(random_, layout, {300});
      Matrix q = Matrix::Normal(random_, 5, int64_t{layout.kv_heads} * group * d);
      Call call{kv,
                q,
                1.0f / std::sqrt(static_cast<float>(d)),
                Queries(static_cast<int32_t>(random_.Int(1, 3)), 1),
                {}};
      for (size_t i = 0; i < call.queries.size() * layout.kv_heads; ++i) {
        call.rows.push_back(AnyTokens(kv, 0, random_.Int(0, 3) == 0 ? 0 : random_.Int(1, 700)));
      }
      SCOPED_TRACE(testing::Message() << "d " << d << " G " << group);
      const auto pool = UploadPool(kv);
      ExpectSame(States(call, pool.data()), Reference(call), d, kTolerance);
    }
  }
}

TEST_F(CudaRowAttentionTest, EveryLengthAroundTheBordersOfTilesAndRounds) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 16, DType::kBF16};
  PagedKv kv(random_, layout, {100});
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, 1, 3 * 64);
  std::vector<int32_t> counts = {1023, 1024, 1025, 1041, 2047, 2048, 2049, 3073, 8191, 8192, 8193};
  for (int32_t count = 0; count <= 133; ++count) counts.push_back(count);
  for (const int32_t count : counts) {
    SCOPED_TRACE(count);
    Call call{kv, q, 0.125f, Queries(1), {AnyTokens(kv, 0, count)}};
    ExpectSame(States(call, pool.data()), Reference(call), 64, kTolerance);
  }
}

// Blocks have as many warps as the longest list needs.
TEST_F(CudaRowAttentionTest, ManyShortListsAroundTheBordersOfBlocks) {
  SCOPED_TRACE(Seed());
  for (const int32_t longest : {1, 15, 128, 129, 144, 255, 256, 257, 511, 512, 513, 1024, 1025}) {
    SCOPED_TRACE(longest);
    const KvLayout layout{2, AnyHeadDim(random_), 16, AnyCudaKvType(random_)};
    PagedKv kv(random_, layout, {300});
    const auto pool = UploadPool(kv);
    Matrix q = Matrix::Normal(random_, 20, int64_t{2} * random_.Int(1, 9) * layout.head_dim);
    Call call{kv, q, 0.125f, Queries(20), {}};
    for (int32_t i = 0; i < 40; ++i) {
      call.rows.push_back(AnyTokens(kv, 0, i % 7 == 3 ? longest : random_.Int(0, longest)));
    }
    if (layout.dtype == DType::kBF16) {
      ExpectSame(States(call, pool.data()), Reference(call), layout.head_dim, kTolerance);
    } else {
      States(call, pool.data());
    }
  }
}

TEST_F(CudaRowAttentionTest, RowsInPinnedHostMemoryGiveTheSameBits) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : kCudaHeadDims) {
    const KvLayout layout{2, d, 64, CudaKvTypeOf(d, AnyCudaKvType(random_))};
    PagedKv kv(random_, layout, {2000});
    const size_t bytes = kv.num_blocks() * layout.BlockBytes();
    std::byte* pinned = nullptr;
    WINNOW_CUDA_OK(cudaMallocHost(reinterpret_cast<void**>(&pinned), bytes));
    std::memcpy(pinned, kv.pool(), bytes);
    Matrix q = Matrix::Normal(random_, 1, 8 * d);
    Call call{kv, q, 0.1f, Queries(1), {AnyTokens(kv, 0, 1500), AnyTokens(kv, 0, 5000)}};
    const auto pool = UploadPool(kv);
    const auto expected = States(call, pool.data()), actual = States(call, pinned);
    EXPECT_EQ(std::memcmp(actual.data(), expected.data(), 4 * actual.size()), 0) << "d " << d;
    WINNOW_CUDA_OK(cudaFreeHost(pinned));
  }
}

TEST_F(CudaRowAttentionTest, TheSameBitsAloneAndAmongSixtyFour) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, AnyHeadDim(random_), 64, AnyCudaKvType(random_)};
  const int32_t d = layout.head_dim;
  const auto group = random_.Int(1, 8);
  const int64_t state_floats = 2 * group * AttentionStateFloats(d);
  PagedKv kv(random_, layout, {500});
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, 64, 2 * group * d);
  Call together{kv, q, 0.125f, Queries(64), {}};
  for (int i = 0; i < 128; ++i) {
    together.rows.push_back(AnyTokens(kv, 0, i == 6 ? 9000 : random_.Int(0, 900)));
  }
  const auto all = States(together, pool.data());
  for (const int32_t i : {0, 3, 17, 63}) {
    Call alone{kv, q, 0.125f, Queries(1, i), {together.rows[2 * i], together.rows[2 * i + 1]}};
    const auto one = States(alone, pool.data());
    EXPECT_EQ(std::memcmp(one.data(), all.data() + i * state_floats, 4 * state_floats), 0) << i;
  }
}

TEST_F(CudaRowAttentionTest, ExtremeScoresNeitherOverflowNorVanish) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, DType::kBF16};
  PagedKv kv(random_, layout, {600}, 400.0f);  // scores of both signs up to about 1e4
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, 4, 64);
  for (const int32_t rows : {600, 9000}) {  // a tile for each chain, and several
    Call call{kv, q, 1.0f, Queries(4), {}};
    for (int i = 0; i < 4; ++i) call.rows.push_back(AnyTokens(kv, 0, rows));
    ASSERT_NO_FATAL_FAILURE(ExpectSame(States(call, pool.data()), Reference(call), 64, 0.2));
  }
}

TEST_F(CudaRowAttentionTest, AMillionRowsKeepTheirPrecision) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, DType::kBF16};
  PagedKv kv(random_, layout, {64});
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, 1, 64);
  Rows once(64), many(1 << 20);
  for (int32_t t = 0; t < 64; ++t) once[t] = t;
  for (int32_t t = 0; t < 1 << 20; ++t) many[t] = t % 64;
  Call of_once{kv, q, 0.125f, Queries(1), {once}}, of_many{kv, q, 0.125f, Queries(1), {many}};
  const auto expected = Reference(of_once);
  const auto actual = States(of_many, pool.data());
  for (int32_t c = 0; c < 64; ++c) {
    EXPECT_NEAR(actual[c] / actual[65], expected[c] / expected[65], 1e-3);
  }
  EXPECT_NEAR(AttentionStateLogSumExp(actual.data(), 64),
              AttentionStateLogSumExp(expected.data(), 64) + 14 * std::log(2.0), 1e-3);
}

TEST_F(CudaRowAttentionTest, NotANumberInOneQueryDisturbsNoOther) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 32, DType::kBF16};
  PagedKv kv(random_, layout, {200});
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, 2, 3 * 64);
  Call call{kv, q, 0.125f, Queries(2), {AnyTokens(kv, 0, 150), AnyTokens(kv, 0, 150)}};
  const auto clean = States(call, pool.data());
  q.row(0)[64 + 3] = NAN;  // the second head of the first query
  const auto dirty = States(call, pool.data());
  for (int head = 0; head < 6; ++head) {
    const float *a = clean.data() + head * 66, *b = dirty.data() + head * 66;
    if (head == 1) {
      EXPECT_TRUE(std::isnan(b[0]));
    } else {
      EXPECT_EQ(std::memcmp(a, b, 4 * 66), 0) << "head " << head;
    }
  }
}

// Whether finished or as a state; in rows that others stand between.
TEST_F(CudaRowAttentionTest, FinishedAttentionIsThatOfItsState) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : kCudaHeadDims) {
    const KvLayout layout{2, d, static_cast<int32_t>(16 * random_.Int(1, 6)), DType::kBF16};
    const auto group = random_.Int(1, 10);
    PagedKv kv(random_, layout, {2500});
    const auto pool = UploadPool(kv);
    Matrix q = Matrix::Normal(random_, 3, 2 * group * d), out(3, q.cols());
    // None, few and many rows; the last query's row is the first.
    Call call{kv, q, 0.125f, Queries(3), {}};
    std::swap(call.queries[0].row, call.queries[2].row);
    std::vector<std::vector<int32_t>> chosen;
    for (int i = 0; i < 3; ++i) {
      auto& query = call.queries[i];
      query = kv.Query(0, query.row, 2400, 0, 0, 0);
      for (int head = 0; head < 2; ++head) {
        auto& of_head = chosen.emplace_back();
        for (int32_t t = query.mid.first; t < query.mid.last; ++t) {
          if (random_.Int(0, 40) < head * (20 * i + 1)) of_head.push_back(t);
        }
        Rows& rows = call.rows.emplace_back();
        for (int32_t t = 0; t < query.mid.first; ++t) rows.push_back(t);
        rows.insert(rows.end(), of_head.begin(), of_head.end());
        for (int32_t t = query.mid.last; t <= query.position; ++t) rows.push_back(t);
      }
    }
    const std::vector<float> states = States(call, pool.data());
    DeviceSelection selection(3, 2, 2500);
    selection.Set(chosen);
    for (const bool portable : {false, true}) {
      SCOPED_TRACE(testing::Message() << "d " << d << ", G " << group << ", " << portable);
      Workspace workspace(RowAttentionWorkspaceBytes(call.shape()));
      const auto q_on_device = Upload(q);
      const auto out_on_device = Upload(out);
      const DeviceQueries on_device(call.queries);
      WINNOW_CUDA_OK(AttendChosen(call.shape(portable), q_on_device.data(), q.tensor().stride,
                                  on_device.data(), selection.view(), pool.data(), 0.125f,
                                  {.out = out_on_device.data(), .out_stride = out.tensor().stride},
                                  workspace.data(), nullptr));
      Download(out_on_device, out);
      EXPECT_TRUE(out.GuardsIntact());
      for (int64_t i = 0; i < 3 * 2 * group; ++i) {
        const float* state = states.data() + i * (d + 2);
        const float* row = out.row(call.queries[i / (2 * group)].row) + i % (2 * group) * d;
        for (int32_t c = 0; c < d; ++c) {
          ASSERT_EQ(row[c], state[d + 1] == 0 ? 0.0f : state[c] / state[d + 1]) << i << " " << c;
        }
      }
      const DeviceArray<float> sinks(std::vector<float>(2 * group, random_.Normal(2.0f)));
      WINNOW_CUDA_OK(AttendChosen(
          call.shape(portable), q_on_device.data(), q.tensor().stride, on_device.data(),
          selection.view(), pool.data(), 0.125f,
          {.out = out_on_device.data(), .out_stride = out.tensor().stride, .sinks = sinks.data()},
          workspace.data(), nullptr));
      Download(out_on_device, out);
      Matrix of_states = out;
      const DeviceArray<float> device_states(states);
      WINNOW_CUDA_OK(FinishStates(device_states.data(), on_device.data(), 3,
                                  static_cast<int32_t>(2 * group), d, sinks.data(),
                                  out_on_device.data(), out.tensor().stride, nullptr));
      Download(out_on_device, of_states);
      ASSERT_TRUE(SameBits(out, of_states));
    }
  }
}

TEST_F(CudaRowAttentionTest, StatesFinishAsTheirAttention) {
  SCOPED_TRACE(Seed());
  const int32_t d = AnyHeadDim(random_);
  std::vector<float> states(12 * (d + 2));
  for (float& value : states) value = random_.Normal();
  for (int i = 0; i < 12; ++i) {
    float* state = states.data() + i * (d + 2);
    state[d + 1] = std::abs(state[d + 1]) + 1;
    if (i % 4 == 1) ResetAttentionState(state, d);
  }
  const DeviceArray<float> on_device(states);
  std::vector<RetrievalQuery> queries = Queries(3);
  std::swap(queries[0].row, queries[2].row);
  const DeviceQueries queries_on_device(queries);
  const std::vector<float> sinks = {random_.Normal(), random_.Normal(), -INFINITY, 200.0f};
  const DeviceArray<float> sinks_on_device(sinks);
  for (const bool has_sinks : {false, true}) {
    Matrix out(3, 4 * d);
    const auto out_on_device = Upload(out);
    WINNOW_CUDA_OK(FinishStates(on_device.data(), queries_on_device.data(), 3, 4, d,
                                has_sinks ? sinks_on_device.data() : nullptr, out_on_device.data(),
                                out.tensor().stride, nullptr));
    Download(out_on_device, out);
    EXPECT_TRUE(out.GuardsIntact());
    for (int i = 0; i < 12; ++i) {
      const float* state = states.data() + i * (d + 2);
      std::vector<float> expected(d);
      if (state[d + 1] != 0) {
        FinishAttentionState(state, d,
                             has_sinks ? sinks[i % 4] * std::log2(std::exp(1.0f)) : -INFINITY,
                             expected.data());
      }
      for (int32_t c = 0; c < d; ++c) {
        ASSERT_NEAR(out.row(queries[i / 4].row)[i % 4 * d + c], expected[c], 1e-5) << i;
      }
    }
  }
}

TEST_F(CudaRowAttentionTest, GatherCopiesRowsFromPinnedMemory) {
  SCOPED_TRACE(Seed());
  for (const int32_t row_bytes : {16, 256, 320, 384, 512, 4096}) {
    const int32_t rows = static_cast<int32_t>(random_.Int(1, 5000));
    std::byte* pinned = nullptr;
    const size_t bytes = size_t{2} * rows * row_bytes;
    WINNOW_CUDA_OK(cudaMallocHost(reinterpret_cast<void**>(&pinned), bytes));
    for (size_t i = 0; i < bytes; ++i) pinned[i] = static_cast<std::byte>(random_.Int(0, 255));
    DeviceArray<std::byte> target(bytes);
    std::vector<int32_t> order(2 * rows);
    std::iota(order.begin(), order.end(), 0);
    random_.Shuffle(order);
    std::vector<const std::byte*> sources;
    std::vector<std::byte*> targets;
    for (int32_t i = 0; i < rows; ++i) {
      sources.push_back(pinned + int64_t{order[i]} * row_bytes);
      targets.push_back(target.data() + int64_t{2} * i * row_bytes);
    }
    const DeviceArray<const std::byte*> sources_on_device(sources);
    const DeviceArray<std::byte*> targets_on_device(targets);
    const DeviceArray<int32_t> count(std::vector<int32_t>{rows});
    WINNOW_CUDA_OK(GatherRows(sources_on_device.data(), targets_on_device.data(), count.data(),
                              row_bytes, kGatherBlocks, nullptr));
    const std::vector<std::byte> result = target.Get();
    for (int32_t i = 0; i < rows; ++i) {
      ASSERT_EQ(std::memcmp(&result[size_t{2} * i * row_bytes], sources[i], row_bytes), 0) << i;
      for (int32_t j = 0; j < row_bytes; ++j) {
        ASSERT_EQ(result[(size_t{2} * i + 1) * row_bytes + j], std::byte{0xff});
      }
    }
    WINNOW_CUDA_OK(cudaFreeHost(pinned));
  }
}

// Anchors and chosen tokens, found by the kernel itself, are the same rows in the same order.
TEST_F(CudaRowAttentionTest, ChosenTokensAreAttendedAsTheirRowsAre) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const int32_t d = AnyHeadDim(random_), kv_heads = static_cast<int32_t>(random_.Int(1, 3));
    const auto group = static_cast<int32_t>(random_.Int(1, 9));
    const KvLayout layout{kv_heads, d, static_cast<int32_t>(16 * random_.Int(1, 5)),
                          kCudaKvTypes[round % 3]};
    const auto n = static_cast<int32_t>(random_.Int(1, round < 6 ? 300 : 9000));
    PagedKv kv(random_, layout, {n});
    const auto pool = UploadPool(kv);
    const int32_t num_queries = static_cast<int32_t>(round % 2 == 0 ? random_.Int(1, 3) : 20);
    Matrix q = Matrix::Normal(random_, num_queries, int64_t{kv_heads} * group * d);
    Call call{kv, q, 1.0f / std::sqrt(static_cast<float>(d)), {}, {}};
    std::vector<std::vector<int32_t>> chosen;
    for (int32_t i = 0; i < num_queries; ++i) {
      // Mid may be empty, or begin past what the query sees.
      const auto position = static_cast<int32_t>(random_.Int(0, n - 1));
      call.queries.push_back(kv.Query(0, i, position, static_cast<int32_t>(random_.Int(0, 40)),
                                      static_cast<int32_t>(random_.Int(1, 200)), 0));
      const TokenRange mid = call.queries.back().mid;
      for (int32_t head = 0; head < kv_heads; ++head) {
        auto& of_head = chosen.emplace_back();
        Rows& rows = call.rows.emplace_back();
        for (int32_t t = 0; t < std::min(mid.first, position + 1); ++t) rows.push_back(t);
        for (int32_t t = mid.first; t < mid.last; ++t) {
          if (random_.Int(0, 2) == 0) of_head.push_back(t);
        }
        rows.insert(rows.end(), of_head.begin(), of_head.end());
        for (int32_t t = std::max(mid.last, std::min(mid.first, position + 1)); t <= position;
             ++t) {
          rows.push_back(t);
        }
      }
    }
    const std::vector<float> expected = States(call, pool.data());
    size_t most = 1, longest = 0;
    for (const auto& of_head : chosen) most = std::max(most, of_head.size());
    for (const Rows& rows : call.rows) longest = std::max(longest, rows.size());
    DeviceSelection selection(num_queries, kv_heads, static_cast<int32_t>(most));
    selection.Set(chosen);
    const DeviceQueries queries(call.queries);
    const auto of_q = Upload(q);
    Workspace workspace(RowAttentionWorkspaceBytes(call.shape()));
    for (const size_t max_rows : {size_t{0}, longest}) {
      RowAttentionShape shape = call.shape();
      shape.max_rows = static_cast<int32_t>(max_rows);
      DeviceArray<float> states(call.state_values());
      WINNOW_CUDA_OK(AttendChosen(shape, of_q.data(), q.tensor().stride, queries.data(),
                                  selection.view(), pool.data(), call.scale,
                                  {.states = states.data()}, workspace.data(), nullptr));
      const std::vector<float> actual = states.Get();
      ASSERT_EQ(std::memcmp(actual.data(), expected.data(), 4 * expected.size()), 0)
          << "round " << round << ": " << n << " tokens, d " << d << ", G " << group;
    }
  }
}

// For 8-bit types: the bits of attention over their values, rounded to bfloat16; few lists and many.
TEST_F(CudaRowAttentionTest, CodesGiveTheBitsOfTheirRoundedValues) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 24; ++round) {
    const int32_t d = std::array{64, 80, 96, 128}[round % 4], kv_heads = 2;
    const DType dtype = round / 4 % 2 == 0 ? DType::kI8 : DType::kF8;
    const auto group = static_cast<int32_t>(random_.Int(1, 17));
    const KvLayout layout{kv_heads, d, static_cast<int32_t>(16 * random_.Int(1, 5)), dtype};
    PagedKv kv(random_, layout, {static_cast<int32_t>(random_.Int(50, 900))},
               round % 3 == 0 ? 20.0f : 1.0f);
    const auto num_queries = static_cast<int32_t>(round % 2 == 0 ? random_.Int(1, 4) : 40);
    Matrix q = Matrix::Normal(random_, num_queries, int64_t{kv_heads} * group * d);
    Call call{kv, q, 1.0f / std::sqrt(static_cast<float>(d)), Queries(num_queries), {}};
    for (int32_t i = 0; i < num_queries * kv_heads; ++i) {
      call.rows.push_back(AnyTokens(kv, 0, random_.Int(0, i == 0 ? 5000 : 300)));
    }
    SCOPED_TRACE(testing::Message() << DTypeName(dtype) << ", d " << d << ", G " << group);
    KvLayout rounded_layout;
    const auto pool = UploadPool(kv), rounded = UploadRounded(kv, &rounded_layout);
    const auto actual = States(call, pool.data());
    const auto expected = States(call, rounded.data(), rounded_layout);
    ASSERT_EQ(std::memcmp(actual.data(), expected.data(), 4 * expected.size()), 0);
  }
}

TEST_F(CudaRowAttentionTest, RefusesWhatItDoesNotHave) {
  const auto refuses = [](int32_t d, DType dtype, int32_t block_tokens = 64) {
    const RowAttentionShape shape{1, 4, {1, d, block_tokens, dtype}};
    float out;
    return AttendRows(shape, nullptr, 0, nullptr, nullptr, 1.0f, {.states = &out}, nullptr,
                      nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refuses(72, DType::kBF16));
  EXPECT_TRUE(refuses(128, DType::kF32));
  EXPECT_TRUE(refuses(256, DType::kI8));
  EXPECT_TRUE(refuses(128, DType::kI8, 62));
}

}  // namespace
}  // namespace winnow::kernels::cuda
