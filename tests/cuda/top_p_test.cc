#include "kernels/cuda/top_p.h"

#include <array>
#include <cmath>

#include "kernels/cuda/int4_keys.h"
#include "kernels/int4_keys.h"
#include "kernels/top_p.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaTopPTest : public CudaTest {
 protected:
  static std::vector<std::byte> Quantize(const PagedKv& kv) {
    std::vector<std::byte> keys(kv.num_blocks() * Int4BlockBytes(kv.layout()), std::byte{0xff});
    const std::vector<KeySpan> spans = {{kv.table(0), {0, kv.length(0)}}};
    QuantizeKeysRef(spans, kv.pool(), kv.layout(), keys.data());
    return keys;
  }
  std::vector<int32_t> AnyOfMid(const RetrievalQuery& query, int64_t count) {
    std::vector<int32_t> tokens(query.mid.size());
    std::iota(tokens.begin(), tokens.end(), query.mid.first);
    random_.Shuffle(tokens);
    tokens.resize(std::min<size_t>(count, tokens.size()));
    std::sort(tokens.begin(), tokens.end());
    return tokens;
  }
  static std::vector<int32_t> AnchorsOf(const RetrievalQuery& query) {
    std::vector<int32_t> anchors;
    for (int32_t t = 0; t <= query.position; ++t) {
      if (t < query.mid.first || t >= query.mid.last) anchors.push_back(t);
    }
    return anchors;
  }
  struct Call {
    const PagedKv& kv;
    Matrix& q;
    float scale, p;
    std::vector<RetrievalQuery> queries;
    std::vector<std::vector<int32_t>> candidates;  // [queries][Hkv]
  };
  static std::vector<std::vector<int32_t>> Prune(Call& call, const std::vector<std::byte>& keys,
                                                 int32_t capacity, bool in_place) {
    const KvLayout& layout = call.kv.layout();
    TopPShape shape{static_cast<int32_t>(call.queries.size()),
                    static_cast<int32_t>(call.q.cols() / layout.head_dim / layout.kv_heads), layout,
                    0, capacity};
    for (const RetrievalQuery& query : call.queries) {
      shape.max_anchors =
          std::max(shape.max_anchors, static_cast<int32_t>(AnchorsOf(query).size()));
    }
    const DeviceArray<std::byte> keys_on_device(keys);
    const auto q = Upload(call.q);
    const DeviceQueries queries(call.queries);
    DeviceSelection candidates(call.queries.size(), layout.kv_heads, capacity);
    DeviceSelection kept(call.queries.size(), layout.kv_heads, capacity);
    Workspace workspace(TopPWorkspaceBytes(shape));
    std::vector<std::vector<int32_t>> first;
    for (int i = 0; i < 2; ++i) {
      candidates.Set(call.candidates);
      WINNOW_CUDA_OK(PruneSelection(shape, q.data(), call.q.tensor().stride, queries.data(),
                                    keys_on_device.data(), call.scale, call.p, candidates.view(),
                                    in_place && i == 1 ? candidates.view() : kept.view(),
                                    workspace.data(), nullptr));
      if (i == 0) {
        first = kept.Chosen();
      } else if (!in_place) {
        EXPECT_EQ(kept.Chosen(), first);
      } else {
        EXPECT_EQ(candidates.Counts(), kept.Counts());
      }
    }
    return first;
  }

  // What float32 may decide the other way: candidates whose weight is that of a head's cut to 1e-5, and
  // cuts whose sum is p to 1e-6; `rounding` times as much where logits are large.
  static void ExpectCut(const Call& call, const std::vector<std::byte>& keys,
                        const std::vector<std::vector<int32_t>>& kept, double rounding) {
    const KvLayout& layout = call.kv.layout();
    const int64_t group = call.q.cols() / layout.head_dim / layout.kv_heads;
    const double of_weight = 1e-5 * rounding, of_p = 1e-6 * rounding;
    for (size_t i = 0; i < call.queries.size(); ++i) {
      const std::vector<int32_t> anchors = AnchorsOf(call.queries[i]);
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        const auto& tokens = call.candidates[i * layout.kv_heads + head];
        const auto& result = kept[i * layout.kv_heads + head];
        std::vector<int32_t> all = anchors;
        all.insert(all.end(), tokens.begin(), tokens.end());
        ASSERT_TRUE(std::is_sorted(result.begin(), result.end()));
        ASSERT_TRUE(std::includes(tokens.begin(), tokens.end(), result.begin(), result.end()));
        std::vector<bool> must(tokens.size()), may(tokens.size());
        for (int64_t g = 0; g < group; ++g) {
          const auto weights = EstimatedWeightsRef(call.q.tensor(), call.queries[i], keys.data(),
                                                   layout, call.scale, head * group + g, all);
          const std::span<const double> of_all(weights);
          const auto of_anchors = of_all.first(anchors.size());
          const auto of_mid = of_all.subspan(anchors.size());
          const auto less = TopPRef(of_anchors, of_mid, call.p - of_p);
          const auto more = TopPRef(of_anchors, of_mid, std::min(call.p + of_p, 0.9999999));
          double cut = INFINITY, next = 0;  // least surely kept, most surely not
          for (size_t j = 0; j < tokens.size(); ++j) {
            if (less[j]) cut = std::min(cut, of_mid[j]);
            if (!more[j]) next = std::max(next, of_mid[j]);
          }
          for (size_t j = 0; j < tokens.size(); ++j) {
            if (less[j] && of_mid[j] > next * (1 + of_weight)) must[j] = true;
            if (more[j] || of_mid[j] >= cut * (1 - of_weight)) may[j] = true;
          }
        }
        for (size_t j = 0; j < tokens.size(); ++j) {
          const bool is_kept = std::binary_search(result.begin(), result.end(), tokens[j]);
          ASSERT_FALSE(must[j] && !is_kept) << "token " << tokens[j];
          ASSERT_FALSE(!may[j] && is_kept) << "token " << tokens[j];
        }
      }
    }
  }
};

TEST_F(CudaTopPTest, FourBitKeysAreTheReferencesBits) {
  SCOPED_TRACE(Seed());
  int round = 0;
  for (const int32_t d : {64, 80, 96, 128, 128, 256}) {
    for (const float deviation : {1.0f, 1e-30f, 1e30f, 0.0f}) {
      const KvLayout layout{2, d, static_cast<int32_t>(16 * random_.Int(1, 5)),
                            CudaKvTypeOf(d, kCudaKvTypes[round++ % 3])};
      PagedKv kv(random_, layout, {333, 70}, deviation);
      kv.SetKey(0, 0, 5, 2, -0.0f);
      const std::vector<KeySpan> spans = {{kv.table(0), {17, 333}}, {kv.table(1), {0, 70}}};
      std::vector<std::byte> expected(kv.num_blocks() * Int4BlockBytes(layout), std::byte{0xff});
      QuantizeKeysRef(spans, kv.pool(), layout, expected.data());
      const auto pool = UploadPool(kv);
      const DeviceSpans on_device(spans);
      DeviceArray<std::byte> keys(expected.size());
      WINNOW_CUDA_OK(QuantizeKeys(on_device.data(), 2, on_device.max_tokens(), pool.data(), layout,
                                  keys.data(), nullptr));
      ASSERT_EQ(keys.Get(), expected) << "d " << d << " deviation " << deviation;
    }
  }
}

// Against a plain sort and cut.
TEST_F(CudaTopPTest, KeepsWhatSortingAndCuttingKeeps) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 40; ++round) {
    const KvLayout layout{static_cast<int32_t>(random_.Int(1, 2)), AnyHeadDimTo256(random_),
                          static_cast<int32_t>(16 * random_.Int(1, 5)), DType::kBF16};
    const auto group = random_.Int(1, 9);
    PagedKv kv(random_, layout, {static_cast<int32_t>(random_.Int(200, 1300))});
    const auto keys = Quantize(kv);
    const float strength = random_.Int(0, 1) == 0 ? 1.0f : 4.0f;
    Matrix q = Matrix::Normal(random_, 3, layout.kv_heads * group * layout.head_dim, strength);
    const float p = static_cast<float>(random_.Int(0, 999)) / 1000.0f;
    SCOPED_TRACE(testing::Message() << "p " << p << " d " << layout.head_dim << " G " << group);
    const float scale = 1.0f / std::sqrt(static_cast<float>(layout.head_dim));
    Call call{kv, q, scale, p, {}, {}};
    for (int32_t i = 0; i < 3; ++i) {
      call.queries.push_back(kv.Query(
          0, i, static_cast<int32_t>(random_.Int(150, kv.length(0) - 1)),
          static_cast<int32_t>(random_.Int(0, 16)), static_cast<int32_t>(random_.Int(1, 64)), 0));
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        call.candidates.push_back(AnyOfMid(call.queries[i], random_.Int(0, 900)));
      }
    }
    // How many there may be decides about parts, and where they lie.
    const int32_t capacity = std::array{900, 30000, 70000, 150000}[random_.Int(0, 3)];
    const auto kept = Prune(call, keys, capacity, round % 2 == 0);
    ASSERT_NO_FATAL_FAILURE(ExpectCut(call, keys, kept, 1));
  }
}

// From weights that are all the same to a few that have not underflowed, with as many candidates as
// leave parts empty, or full but for one.
TEST_F(CudaTopPTest, AnySpreadAndAnyNumberIsCut) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, AnyHeadDimTo256(random_), 32, DType::kBF16};
  PagedKv kv(random_, layout, {4400});
  const auto keys = Quantize(kv);
  const float scale = 1.0f / std::sqrt(static_cast<float>(layout.head_dim));
  const std::array<int32_t, 13> counts{0, 1, 2, 31, 32, 33, 255, 257, 1023, 1024, 1025, 2047, 4097};
  for (const float strength : {1e-38f, 0.01f, 0.3f, 2.0f, 30.0f, 1000.0f}) {
    for (const float p : {1e-7f, 0.05f, 0.5f, 0.95f, 0.9999f}) {
      const auto group = random_.Int(1, 6);
      Matrix q = Matrix::Normal(random_, 2, group * layout.head_dim, strength);
      SCOPED_TRACE(testing::Message() << "strength " << strength << " p " << p << " G " << group);
      Call call{kv, q, scale, p, {}, {}};
      int32_t most = 1;
      for (int32_t i = 0; i < 2; ++i) {
        call.queries.push_back(kv.Query(0, i, 4399 - i, static_cast<int32_t>(random_.Int(0, 16)),
                                        static_cast<int32_t>(random_.Int(1, 200)), 0));
        const int32_t count = counts[random_.Int(0, counts.size() - 1)];
        call.candidates.push_back(AnyOfMid(call.queries[i], count));
        most = std::max(most, count);
      }
      const auto kept = Prune(call, keys, most, random_.Int(0, 1) == 0);
      // A logit of a thousand octaves has an error of 2^-14.
      ASSERT_NO_FATAL_FAILURE(ExpectCut(call, keys, kept, strength > 10 ? 200 : 1));
    }
  }
}

// The bits that a query gets depend neither on others nor on how many candidates there might be,
// which decides about parts, and whether they lie in shared memory.
TEST_F(CudaTopPTest, AQueryAloneIsCutAsAmongOthers) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 6; ++round) {
    const KvLayout layout{2, AnyHeadDimTo256(random_), 16, DType::kBF16};
    PagedKv kv(random_, layout, {5000});
    const auto keys = Quantize(kv);
    const auto group = random_.Int(1, 6);
    Matrix q = Matrix::Normal(random_, 5, layout.kv_heads * group * layout.head_dim,
                              random_.Int(0, 1) == 0 ? 0.0f : 2.0f);
    const float p = static_cast<float>(random_.Int(1, 1000)) / 1000.0f;
    SCOPED_TRACE(testing::Message() << "p " << p << " d " << layout.head_dim << " G " << group);
    Call call{kv, q, 0.2f, p, {}, {}};
    for (int32_t i = 0; i < 5; ++i) {
      call.queries.push_back(kv.Query(0, i, static_cast<int32_t>(random_.Int(2000, 4999)), 4,
                                      static_cast<int32_t>(random_.Int(1, 300)), 0));
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        call.candidates.push_back(
            AnyOfMid(call.queries[i], random_.Int(0, i % 2 == 0 ? 1000 : 4000)));
      }
    }
    const auto kept = Prune(call, keys, 150000, false);
    EXPECT_EQ(Prune(call, keys, 4000, true), kept);
    for (int32_t i = 0; i < 5; ++i) {
      Call alone{kv, q, 0.2f, p, {call.queries[i]}, {}};
      int32_t most = 1;
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        alone.candidates.push_back(call.candidates[i * layout.kv_heads + head]);
        most = std::max(most, static_cast<int32_t>(alone.candidates.back().size()));
      }
      const auto of_query = Prune(alone, keys, most, false);
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        ASSERT_EQ(of_query[head], kept[i * layout.kv_heads + head]) << "query " << i;
      }
    }
  }
}

// Weights that are powers of two, so that every sum is exact and the cut is known.
TEST_F(CudaTopPTest, CutsExactlyWhereTheWeightIsReached) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, AnyHeadDimTo256(random_), 16, DType::kBF16};
  PagedKv kv(random_, layout, {64}, 0.0f);
  const auto logit = [&](int32_t token, int value) {
    kv.SetKey(0, 0, token, 3, static_cast<float>(value) * 15);
  };
  for (int32_t t = 0; t < 64; ++t) logit(t, -40);
  logit(0, -1);   // the anchor: 1/2
  logit(10, -2);  // candidates: 1/4,
  logit(30, -3);  // 1/8,
  logit(20, -4);  // 1/16, twice
  logit(40, -4);
  Matrix q(1, layout.head_dim);
  q.row(0)[3] = 1.0f;
  const auto keys = Quantize(kv);
  const float scale = std::log(2.0f) / 15.0f;
  const RetrievalQuery query{0, kv.table(0), 63, {1, 64}, 0};
  const auto kept = [&](float p) {
    Call call{kv, q, scale, p, {query}, {{10, 20, 30, 40}}};
    return Prune(call, keys, 8, false)[0];
  };
  EXPECT_EQ(kept(0.40f), (std::vector<int32_t>{}));
  EXPECT_EQ(kept(0.70f), (std::vector<int32_t>{10}));
  EXPECT_EQ(kept(0.80f), (std::vector<int32_t>{10, 30}));
  EXPECT_EQ(kept(0.90f), (std::vector<int32_t>{10, 30, 40}));  // of equals the later
  EXPECT_EQ(kept(0.97f), (std::vector<int32_t>{10, 20, 30, 40}));
  EXPECT_EQ(kept(1.0f), (std::vector<int32_t>{10, 20, 30, 40}));
}

// From 1 to what is zero beside it.
TEST_F(CudaTopPTest, WhatUnderflowsIsNeverKept) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, AnyHeadDimTo256(random_), 16, DType::kBF16};
  PagedKv kv(random_, layout, {64}, 0.0f);
  for (int32_t t = 0; t < 64; ++t) kv.SetKey(0, 0, t, 3, -128 * 15);
  kv.SetKey(0, 0, 30, 3, 0);
  kv.SetKey(0, 0, 20, 3, -20 * 15);
  kv.SetKey(0, 0, 40, 3, -120 * 15);
  Matrix q(1, layout.head_dim);
  q.row(0)[3] = 1.0f;
  const auto keys = Quantize(kv);
  const RetrievalQuery query{0, kv.table(0), 63, {1, 64}, 0};
  const auto kept = [&](float p) {
    Call call{kv, q, std::log(2.0f) / 15.0f, p, {query}, {{10, 20, 30, 40}}};
    return Prune(call, keys, 8, false)[0];
  };
  EXPECT_EQ(kept(-1.0f), (std::vector<int32_t>{}));
  EXPECT_EQ(kept(0.0f), (std::vector<int32_t>{}));
  EXPECT_EQ(kept(1e-30f), (std::vector<int32_t>{30}));
  EXPECT_EQ(kept(0.999f), (std::vector<int32_t>{30}));
  EXPECT_EQ(kept(std::nextafter(1.0f, 0.0f)), (std::vector<int32_t>{20, 30}));
  EXPECT_EQ(kept(1.0f), (std::vector<int32_t>{20, 30, 40}));
  EXPECT_EQ(kept(2.0f), (std::vector<int32_t>{20, 30, 40}));
}

TEST_F(CudaTopPTest, OfAnyNumberOfEqualsTheLaterAreKept) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 32, 64, DType::kBF16};
  PagedKv kv(random_, layout, {6000}, 0.0f);  // all logits are zero
  const auto keys = Quantize(kv);
  for (int round = 0; round < 20; ++round) {
    const auto group = random_.Int(1, 5);
    Matrix q = Matrix::Normal(random_, 1, group * layout.head_dim);
    const auto anchors = static_cast<int32_t>(random_.Int(1, 50));
    const RetrievalQuery query{0, kv.table(0), 5999, {0, 6000 - anchors}, 0};
    const std::vector<int32_t> tokens = AnyOfMid(query, random_.Int(1, 5000));
    const auto count = static_cast<int32_t>(tokens.size());
    const float p = static_cast<float>(random_.Int(1, 1023)) / 1024.0f;
    Call call{kv, q, 1.0f, p, {query}, {tokens}};
    const auto needed =
        static_cast<int32_t>(std::ceil(static_cast<double>(p) * (count + anchors) - anchors));
    const int32_t expected = std::clamp(needed, 0, count);
    EXPECT_EQ(Prune(call, keys, count, false)[0],
              std::vector<int32_t>(tokens.end() - expected, tokens.end()))
        << count << " candidates, " << anchors << " anchors, p " << p;
  }
}

TEST_F(CudaTopPTest, ManyEqualCandidatesAreCutInTheMiddle) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 64, DType::kBF16};
  PagedKv kv(random_, layout, {70000}, 0.0f);  // all logits are zero
  const auto keys = Quantize(kv);
  Matrix q = Matrix::Normal(random_, 1, 2 * 64);
  const RetrievalQuery query{0, kv.table(0), 69999, {0, 69999}, 0};  // one anchor
  struct Case {
    int32_t count, capacity;
  };
  // Of one part, of several, and of more than fit shared memory.
  for (const auto [count, capacity] :
       {Case{1000, 1000}, {30000, 30000}, {69999, 69999}, {69999, 120000}}) {
    std::vector<int32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), 69999 - count);
    Call call{kv, q, 1.0f, 0.5f, {query}, {tokens}};
    const auto kept = Prune(call, keys, capacity, false)[0];
    // Needed are 0.5 (count + 1) - 1 of them.
    const auto expected = static_cast<int32_t>(std::ceil(0.5 * (count + 1) - 1));
    ASSERT_EQ(static_cast<int32_t>(kept.size()), expected);
    for (int32_t i = 0; i < expected; ++i) ASSERT_EQ(kept[i], 69999 - expected + i);
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
