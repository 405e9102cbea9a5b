#include "kernels/cuda/hamming_select.h"

#include <numeric>

#include "kernels/hamming_select.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {
namespace {

// One layer's code pool and the queries' codes, on the host and on the device.
class Codes {
 public:
  // `agreement`: each bit of a code is random with chance 2^-agreement, else that of a common code:
  // distances bunch up where it is large.
  Codes(Random& random, const CodeLayout& layout, int32_t num_blocks, int32_t group,
        int32_t num_queries, int agreement)
      : layout_(layout),
        group_(group),
        codes_(num_blocks * layout.BlockBytes()),
        query_codes_(static_cast<size_t>(num_queries) * layout.kv_heads * group *
                     layout.CodeBytes()),
        table_(num_blocks) {
    std::mt19937_64 engine(static_cast<uint64_t>(random.Int(0, INT64_MAX)));
    std::vector<uint32_t> common(layout.CodeBytes() / 4);
    for (uint32_t& word : common) word = static_cast<uint32_t>(engine());
    const auto fill = [&](std::vector<uint8_t>& bytes) {
      for (size_t at = 0; at < bytes.size(); at += 4) {
        auto noise = static_cast<uint32_t>(engine());
        for (int i = 0; i < agreement; ++i) noise &= static_cast<uint32_t>(engine());
        const uint32_t word = common[at / 4 % common.size()] ^ noise;
        std::memcpy(&bytes[at], &word, 4);
      }
    };
    fill(codes_);
    fill(query_codes_);
    std::iota(table_.begin(), table_.end(), 0);
    random.Shuffle(table_);
  }
  int32_t tokens() const { return static_cast<int32_t>(table_.size()) * layout_.block_tokens; }
  const std::vector<int32_t>& table() const { return table_; }
  std::vector<uint8_t>& query_codes() { return query_codes_; }
  uint8_t* CodeAt(int32_t token, int32_t head) {
    return codes_.data() + table_[token / layout_.block_tokens] * layout_.BlockBytes() +
           head * layout_.HeadBytes() + token % layout_.block_tokens * layout_.CodeBytes();
  }

  std::vector<std::vector<int32_t>> Reference(const std::vector<RetrievalQuery>& queries,
                                              int32_t capacity) const {
    OwnedSelection chosen(queries.size(), layout_.kv_heads, capacity);
    SelectByCodesRef(queries, query_codes_.data(), group_, codes_.data(), layout_, chosen.view());
    std::vector<std::vector<int32_t>> result;
    for (size_t i = 0; i < queries.size(); ++i) {
      for (int32_t head = 0; head < layout_.kv_heads; ++head) {
        result.push_back(chosen.Of(static_cast<int64_t>(i), head));
      }
    }
    return result;
  }

  // `max_mid_tokens` beyond what the queries need is what a captured graph has.
  std::vector<std::vector<int32_t>> Select(const std::vector<RetrievalQuery>& queries,
                                           int32_t capacity, int32_t spare = 0, int times = 1) {
    HammingSelectShape shape{static_cast<int32_t>(queries.size()), group_, layout_, 0};
    for (const RetrievalQuery& query : queries) {
      shape.max_mid_tokens = std::max(shape.max_mid_tokens, query.mid.size());
    }
    shape.max_mid_tokens += spare;
    const DeviceArray<uint8_t> codes(codes_), query_codes(query_codes_);
    const DeviceQueries on_device(queries);
    Workspace workspace(HammingSelectWorkspaceBytes(shape));
    std::vector<std::vector<int32_t>> chosen;
    for (int i = 0; i < std::max(times, 2); ++i) {  // the workspace is left ready for the next call
      shape.alone = i % 2 != 0;
      DeviceSelection selection(queries.size(), layout_.kv_heads, capacity);
      WINNOW_CUDA_OK(SelectByCodes(shape, on_device.data(), query_codes.data(), codes.data(),
                                   selection.view(), workspace.data(), nullptr));
      const auto again = selection.Chosen();
      if (i > 0) {
        EXPECT_EQ(again, chosen) << "call " << i;
      }
      chosen = again;
    }
    return chosen;
  }

 private:
  CodeLayout layout_;
  int32_t group_;
  std::vector<uint8_t> codes_, query_codes_;
  std::vector<int32_t> table_;
};

class CudaHammingSelectTest : public CudaTest {
 protected:
  RetrievalQuery AnyQuery(const Codes& codes) {
    RetrievalQuery query;
    query.block_table = codes.table();
    query.mid.last = static_cast<int32_t>(random_.Int(1, codes.tokens()));
    query.mid.first = static_cast<int32_t>(random_.Int(0, query.mid.last));
    query.position = query.mid.last;
    query.k = static_cast<int32_t>(random_.Int(0, query.mid.size()));
    if (random_.Int(0, 1) == 0) query.k = std::min(query.k, 20);
    return query;
  }
};

TEST_F(CudaHammingSelectTest, EveryGroupAndWidthEqualsScoresAndASort) {
  SCOPED_TRACE(Seed());
  for (int32_t group = 1; group <= 16; ++group) {
    for (const int32_t bits : {32, 64, 128, 256, 512, 1024}) {
      const CodeLayout layout{2, static_cast<int32_t>(16 * random_.Int(1, 5)), bits};
      Codes codes(random_, layout, static_cast<int32_t>(random_.Int(1, 90)), group, 3,
                  static_cast<int>(random_.Int(0, 5)));
      const std::vector<RetrievalQuery> queries = {AnyQuery(codes), AnyQuery(codes),
                                                   AnyQuery(codes)};
      ASSERT_EQ(codes.Select(queries, codes.tokens(), static_cast<int32_t>(random_.Int(0, 5000))),
                codes.Reference(queries, codes.tokens()))
          << "group " << group << " bits " << bits << " block " << layout.block_tokens;
    }
  }
}

TEST_F(CudaHammingSelectTest, ChoosesNoneAndAll) {
  SCOPED_TRACE(Seed());
  Codes codes(random_, {2, 32, 64}, 5, 4, 1, 1);
  for (const int32_t k : {0, 1, 99, 100}) {
    const RetrievalQuery query{0, codes.table(), 150, {17, 117}, k};
    ASSERT_EQ(codes.Select({query}, 100), codes.Reference({query}, 100)) << k;
  }
  const RetrievalQuery empty{0, codes.table(), 150, {17, 17}, 0};
  EXPECT_EQ(codes.Select({empty}, 3), (std::vector<std::vector<int32_t>>(2)));
}

TEST_F(CudaHammingSelectTest, OfEqualsTheLaterAreChosen) {
  SCOPED_TRACE(Seed());
  // All codes are the same but for one that is nearer.
  Codes codes(random_, {1, 64, 128}, 900, 4, 1, 0);
  for (int32_t t = 0; t < codes.tokens(); ++t) std::memset(codes.CodeAt(t, 0), 0x5b, 16);
  std::memset(codes.query_codes().data(), 0x5a, codes.query_codes().size());
  codes.CodeAt(37, 0)[3] = 0x5a;
  const RetrievalQuery query{0, codes.table(), 57599, {16, 57500}, 40000};
  const auto chosen = codes.Select({query}, 40000, 0, 3);
  ASSERT_EQ(chosen[0].size(), 40000u);
  EXPECT_EQ(chosen[0][0], 37);
  for (int32_t i = 1; i < 40000; ++i) ASSERT_EQ(chosen[0][i], 17500 + i);
}

TEST_F(CudaHammingSelectTest, EveryLengthAroundTheBordersOfChunks) {
  SCOPED_TRACE(Seed());
  Codes codes(random_, {1, 64, 128}, 70, 4, 1, 2);
  for (const int32_t first : {0, 1, 15, 16, 17, 63}) {
    for (const int32_t size : {1, 2, 15, 16, 17, 2047, 2048, 2049, 4095, 4096, 4097}) {
      RetrievalQuery query{0, codes.table(), first + size, {first, first + size}, 0};
      query.k = static_cast<int32_t>(random_.Int(1, size));
      ASSERT_EQ(codes.Select({query}, size), codes.Reference({query}, size))
          << first << " + " << size << " k " << query.k;
    }
  }
}

TEST_F(CudaHammingSelectTest, AMillionTokensEqualTheReference) {
  SCOPED_TRACE(Seed());
  for (const int32_t bits : {128, 32}) {
    Codes codes(random_, {2, 64, bits}, 1 << 14, static_cast<int32_t>(random_.Int(1, 8)), 1,
                static_cast<int>(random_.Int(0, 3)));
    for (const int32_t k : {1, 2048, 16384, 700000}) {
      const RetrievalQuery query{
          0, codes.table(), codes.tokens() - 1, {16, codes.tokens() - 128}, k};
      ASSERT_EQ(codes.Select({query}, k, 0, 2), codes.Reference({query}, k)) << bits << " k " << k;
    }
  }
}

TEST_F(CudaHammingSelectTest, ABatchOfSixtyFourGivesWhatEachGivesAlone) {
  SCOPED_TRACE(Seed());
  Codes codes(random_, {2, 64, 128}, 200, 4, 64, 1);
  std::vector<RetrievalQuery> queries;
  for (int i = 0; i < 64; ++i) queries.push_back(AnyQuery(codes));
  ASSERT_EQ(codes.Select(queries, codes.tokens(), 0, 2), codes.Reference(queries, codes.tokens()));
}

TEST_F(CudaHammingSelectTest, RefusesWhatItDoesNotHave) {
  const CodeLayout layout{1, 64, 128};
  const auto refuses = [&](HammingSelectShape shape) {
    return SelectByCodes(shape, nullptr, nullptr, nullptr, {}, nullptr, nullptr) ==
           cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refuses({1, 17, layout, 100}));
  EXPECT_TRUE(refuses({1, 0, layout, 100}));
  EXPECT_TRUE(refuses({1, 4, {1, 64, 48}, 100}));
  EXPECT_TRUE(refuses({1, 4, {1, 60, 128}, 100}));
}

}  // namespace
}  // namespace winnow::kernels::cuda
