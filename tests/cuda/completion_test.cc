#include "kernels/cuda/completion.h"

#include <array>

#include "kernels/attention_state.h"
#include "kernels/completion.h"
#include "tests/cuda/cuda_testing.h"
#include "tests/unit/kernels/random_feature_map.h"

namespace winnow::kernels::cuda {
namespace {

struct MapOnDevice {
  explicit MapOnDevice(const FeatureMapWeights& weights) : memory(PackedFeatureMapBytes(weights)) {
    std::vector<std::byte> host(memory.size());
    map = PackFeatureMap(weights, host.data(), memory.data());
    memory.Set(host);
  }
  DeviceArray<std::byte> memory;
  DeviceFeatureMap map;
};

class CudaCompletionTest : public CudaTest {
 protected:
  // A sequence, its maps and its summary.
  struct Scene {
    Scene(Random& random, int32_t d, int32_t group_size, int32_t tokens, float spread,
          int32_t num_features = 64, DType dtype = DType::kBF16)
        : features(num_features),
          layout{2, d, static_cast<int32_t>(16 * random.Int(1, 5)), dtype},
          group(group_size),
          kv(random, layout, {tokens}),
          key_map(random, {2, d, d, static_cast<int32_t>(random.Int(20, 128)), features}, spread),
          query_map(random, {2, d, 40, static_cast<int32_t>(random.Int(20, 128)), features},
                    spread),
          keys(key_map.weights()),
          queries(query_map.weights()),
          pool(UploadPool(kv)),
          table(kv.table(0)),
          summary(2 * SummaryFloats(features, d)) {}

    void Extend(TokenRange tokens, bool clear) {
      const DeviceArray<DeviceExtension> extension(
          std::vector<DeviceExtension>{{table.data(), summary.data(), tokens, clear ? 1 : 0, 0}});
      const int32_t spare = 7;
      DeviceArray<std::byte> workspace(
          ExtendSummariesWorkspaceBytes(1, tokens.size() + spare, keys.map));
      WINNOW_CUDA_OK(ExtendSummaries(extension.data(), 1, tokens.size() + spare, rows, layout,
                                     keys.map, workspace.data(), nullptr));
      WINNOW_CUDA_OK(cudaDeviceSynchronize());
    }

    int32_t features;
    KvLayout layout;
    int32_t group;
    PagedKv kv;
    RandomFeatureMap key_map, query_map;
    MapOnDevice keys, queries;
    DeviceArray<std::byte> pool;
    const std::byte* rows = pool.data();  // of `layout`
    DeviceArray<int32_t> table;
    DeviceArray<float> summary;
  };

  // Random states become completed ones; `chosen` [Hkv].
  void ExpectCompletes(Scene& scene, TokenRange mid,
                       const std::vector<std::vector<int32_t>>& chosen, double tolerance) {
    const int32_t d = scene.layout.head_dim, heads = 2 * scene.group;
    Matrix q = Matrix::Normal(random_, 2, int64_t{heads} * d);
    const std::vector<RetrievalQuery> queries = {{1, scene.kv.table(0), mid.last + 3, mid, 0}};
    std::vector<float> states(heads * (d + 2));
    for (int i = 0; i < heads; ++i) {
      float* state = states.data() + i * (d + 2);
      for (int32_t c = 0; c < d; ++c) state[c] = random_.Normal();
      state[d] = random_.Normal(2.0f);
      state[d + 1] = 1.0f;
      if (i == 1) ResetAttentionState(state, d);
    }
    OwnedSelection selection(1, 2, mid.size() + 1);
    std::vector<DeviceArray<const std::byte*>> rows;
    std::vector<RowList> lists;
    int32_t most = 0;
    for (int32_t head = 0; head < 2; ++head) {
      selection.Set(0, head, chosen[head]);
      // An anchor before and one after the chosen: rows that must not be subtracted.
      std::vector<int32_t> tokens = chosen[head];
      tokens.insert(tokens.begin(), 0);
      tokens.push_back(1);
      std::vector<const std::byte*> addresses;
      for (const int32_t t : tokens) {
        addresses.push_back(scene.pool.data() + (scene.kv.Row(0, head, t) -
                                                 static_cast<const std::byte*>(scene.kv.pool())));
      }
      rows.emplace_back(addresses);
      const auto count = static_cast<int32_t>(tokens.size());
      lists.push_back({rows.back().data(), count, 1, count - 1});
      most = std::max(most, count - 2);
    }
    const DeviceArray<RowList> lists_on_device(lists);
    const DeviceArray<const float*> summaries(std::vector<const float*>{scene.summary.data()});
    const DeviceQueries on_device(queries);
    const auto q_on_device = Upload(q);
    const CompletionShape shape{1, scene.group, scene.layout,
                                most + static_cast<int32_t>(random_.Int(0, 100))};
    Workspace workspace(CompleteStatesWorkspaceBytes(shape, scene.keys.map));
    // By their addresses, and as tokens of the pool: the same bits.
    const Selection host = selection.view();
    const DeviceArray<int32_t> counts(std::vector<int32_t>(host.counts, host.counts + 2));
    const DeviceArray<int32_t> tokens(
        std::vector<int32_t>(host.tokens, host.tokens + 2 * host.capacity));
    const ChosenRows by_address{.lists = lists_on_device.data()};
    const ChosenRows by_token{.chosen = {2, host.capacity, counts.data(), tokens.data()},
                              .pool = scene.pool.data()};
    std::vector<float> actual;
    for (int i = 0; i < 3; ++i) {
      const DeviceArray<float> states_on_device(states);
      WINNOW_CUDA_OK(CompleteStates(shape, q_on_device.data(), q.tensor().stride, on_device.data(),
                                    i == 1 ? by_token : by_address, summaries.data(),
                                    scene.keys.map, scene.queries.map, states_on_device.data(),
                                    workspace.data(), nullptr));
      const auto again = states_on_device.Get();
      if (i > 0) {
        EXPECT_EQ(std::memcmp(again.data(), actual.data(), 4 * actual.size()), 0);
      }
      actual = again;
    }
    std::vector<float> expected = states;
    CompleteStatesRef(q.tensor(), queries, selection.view(), scene.kv.pool(), scene.layout,
                      scene.key_map.weights(), scene.query_map.weights(), expected.data());
    for (int i = 0; i < heads; ++i) {
      const float *a = actual.data() + i * (d + 2), *e = expected.data() + i * (d + 2);
      if (static_cast<int32_t>(chosen[i / scene.group].size()) == mid.size()) {
        ASSERT_EQ(std::memcmp(a, states.data() + i * (d + 2), 4 * (d + 2)), 0) << "head " << i;
        continue;
      }
      ASSERT_NEAR(AttentionStateLogSumExp(a, d), AttentionStateLogSumExp(e, d), tolerance)
          << "head " << i;
      for (int32_t c = 0; c < d; ++c) {
        ASSERT_NEAR(a[c] / a[d + 1], e[c] / e[d + 1], tolerance) << "head " << i << " c " << c;
      }
    }
  }
  std::vector<std::vector<int32_t>> Some(TokenRange mid, double share) {
    std::vector<std::vector<int32_t>> chosen(2);
    for (auto& of_head : chosen) {
      for (int32_t t = mid.first; t < mid.last; ++t) {
        if (random_.Int(0, 9999) < static_cast<int64_t>(10000 * share)) of_head.push_back(t);
      }
    }
    return chosen;
  }
};

TEST_F(CudaCompletionTest, EqualsTheReferenceForEveryHeadDimensionAndGroup) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 96, 128}) {
    for (int round = 0; round < 3; ++round) {
      const auto group = static_cast<int32_t>(random_.Int(1, 8));
      const auto tokens = static_cast<int32_t>(random_.Int(200, 900));
      SCOPED_TRACE(testing::Message() << "d " << d << " G " << group << " tokens " << tokens);
      Scene scene(random_, d, group, tokens, 2.0f);
      const TokenRange mid{static_cast<int32_t>(random_.Int(2, 70)), tokens - 10};
      scene.Extend(mid, true);
      ExpectCompletes(scene, mid, Some(mid, round == 0 ? 0.0 : 0.1 * round), 2e-3);
    }
  }
}

TEST_F(CudaCompletionTest, EqualsTheReferenceForAnyNumberOfFeaturesAndLargeGroups) {
  SCOPED_TRACE(Seed());
  for (const int32_t features : {4, 20, 64, 100, 128}) {
    for (const int32_t group : {9, 32}) {
      const int32_t d = AnyHeadDim(random_);
      SCOPED_TRACE(testing::Message() << "F " << features << " G " << group << " d " << d);
      Scene scene(random_, d, group, 400, 2.0f, features);
      const TokenRange mid{16, 380};
      scene.Extend(mid, true);
      ExpectCompletes(scene, mid, Some(mid, 0.2), 2e-3);
    }
  }
}

// Of two sequences, with summaries and chosen tokens of their own.
TEST_F(CudaCompletionTest, AQueryAloneIsCompletedAsAmongOthers) {
  SCOPED_TRACE(Seed());
  const int32_t d = AnyHeadDim(random_), group = static_cast<int32_t>(random_.Int(1, 8));
  Scene scene(random_, d, group, 900, 2.0f);
  constexpr int kQueries = 3;
  const int32_t heads = 2 * group, capacity = 600;
  Matrix q = Matrix::Normal(random_, kQueries, int64_t{heads} * d);
  const auto q_on_device = Upload(q);
  const TokenRange mids[] = {{16, 890}, {5, 300}, {64, 700}};
  std::vector<DeviceArray<float>> summaries;
  std::vector<const float*> places;
  std::vector<RetrievalQuery> queries;
  OwnedSelection chosen(kQueries, 2, capacity);
  for (int i = 0; i < kQueries; ++i) {
    scene.Extend(mids[i], true);
    summaries.emplace_back(scene.summary.Get());
    places.push_back(summaries.back().data());
    queries.push_back({i, scene.kv.table(0), mids[i].last + 3, mids[i], 0});
    const auto some = Some(mids[i], i == 0 ? 0.6 : 0.1);
    for (int32_t head = 0; head < 2; ++head) chosen.Set(i, head, some[head]);
  }
  const Selection host = chosen.view();
  const DeviceArray<int32_t> counts(std::vector<int32_t>(host.counts, host.counts + 2 * kQueries));
  const DeviceArray<int32_t> tokens(
      std::vector<int32_t>(host.tokens, host.tokens + 2 * kQueries * capacity));
  const Selection on_device{2, capacity, counts.data(), tokens.data()};
  const DeviceQueries of_queries(queries);
  const DeviceArray<const float*> of_summaries(places);
  const int64_t state_floats = int64_t{heads} * (d + 2);
  std::vector<float> states(kQueries * state_floats);
  for (float& value : states) value = std::abs(random_.Normal()) + 0.1f;
  const auto complete = [&](int first, int count) {
    const DeviceArray<float> of_states(std::vector<float>(
        states.begin() + first * state_floats, states.begin() + (first + count) * state_floats));
    const CompletionShape shape{count, group, scene.layout, capacity};
    Workspace workspace(CompleteStatesWorkspaceBytes(shape, scene.keys.map));
    WINNOW_CUDA_OK(CompleteStates(
        shape, q_on_device.data(), q.tensor().stride, of_queries.data() + first,
        {.chosen = on_device.From(first), .pool = scene.pool.data()}, of_summaries.data() + first,
        scene.keys.map, scene.queries.map, of_states.data(), workspace.data(), nullptr));
    return of_states.Get();
  };
  const std::vector<float> together = complete(0, kQueries);
  for (int i = 0; i < kQueries; ++i) {
    const std::vector<float> alone = complete(i, 1);
    EXPECT_EQ(std::memcmp(alone.data(), together.data() + i * state_floats, 4 * state_floats), 0)
        << i;
  }
}

TEST_F(CudaCompletionTest, ManyChosenTokensInSplitsOfSeveralTiles) {
  SCOPED_TRACE(Seed());
  Scene scene(random_, 128, 4, 3000, 2.0f);
  const TokenRange mid{16, 2900};
  scene.Extend(mid, true);
  ExpectCompletes(scene, mid, Some(mid, 0.5), 5e-3);
}

// What is chosen is subtracted: its weights must be those that entered, to the last bits.
TEST_F(CudaCompletionTest, WhatAlmostAllOfMidLeavesIsRight) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 4; ++round) {
    Scene scene(random_, AnyHeadDim(random_), 4, 120, 0.5f);
    const TokenRange mid{5, 100};
    scene.Extend(mid, true);
    auto chosen = Some(mid, 1.0);
    for (auto& of_head : chosen) of_head.erase(of_head.begin() + random_.Int(0, 94));
    ExpectCompletes(scene, mid, chosen, 1e-3);
  }
}

TEST_F(CudaCompletionTest, WhereAllOfMidIsChosenStatesKeepTheirBits) {
  SCOPED_TRACE(Seed());
  Scene scene(random_, 64, 2, 300, 2.0f);
  const TokenRange mid{16, 200};
  scene.Extend(mid, true);
  auto chosen = Some(mid, 0.3);
  chosen[1] = Some(mid, 1.0)[0];
  ExpectCompletes(scene, mid, chosen, 2e-3);
}

TEST_F(CudaCompletionTest, ASummaryHasTheSameBitsHoweverTokensEntered) {
  SCOPED_TRACE(Seed());
  // Tokens are mapped 16, 32 or 64 at a time, by how many there are.
  for (int round = 0; round < 6; ++round) {
    const int32_t end = round % 2 == 0 ? 650 : 4600;
    const DType dtype = kCudaKvTypes[round / 2];
    SCOPED_TRACE(testing::Message() << end << " of " << DTypeName(dtype));
    Scene scene(random_, AnyHeadDim(random_), 1, end + 50, 3.0f, 64, dtype);
    scene.Extend({5, end}, true);
    const auto at_once = scene.summary.Get();
    for (const float value : at_once) ASSERT_FALSE(std::isnan(value));
    scene.summary.Poison();
    for (int32_t first = 5; first < end;) {
      const int32_t last = std::min(end, first + static_cast<int32_t>(random_.Int(1, 150)));
      scene.Extend({first, last}, first == 5);
      first = last;
    }
    const auto in_pieces = scene.summary.Get();
    EXPECT_EQ(std::memcmp(at_once.data(), in_pieces.data(), 4 * at_once.size()), 0);
  }
}

// For 8-bit types: the bits of summaries and estimates of their values, rounded to bfloat16, so that what is subtracted is what
// entered.
TEST_F(CudaCompletionTest, CodesGiveTheBitsOfTheirRoundedValues) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 8; ++round) {
    const int32_t d = std::array{64, 80, 96, 128}[round % 4];
    const DType dtype = round < 4 ? DType::kI8 : DType::kF8;
    const auto group = static_cast<int32_t>(random_.Int(1, 8)), heads = 2 * group;
    Scene scene(random_, d, group, static_cast<int32_t>(random_.Int(300, 900)), 2.0f, 64, dtype);
    SCOPED_TRACE(testing::Message() << DTypeName(dtype) << ", d " << d << ", G " << group);
    const int32_t end = scene.kv.length(0) - 10, first = static_cast<int32_t>(random_.Int(2, 70));
    const TokenRange mid{first, end};
    Matrix q = Matrix::Normal(random_, 1, int64_t{heads} * d);
    const auto q_on_device = Upload(q);
    const DeviceQueries queries({{0, scene.kv.table(0), end + 3, mid, 0}});
    DeviceSelection chosen(1, 2, mid.size());
    const auto some = Some(mid, 0.2);
    chosen.Set(some);
    const auto most = static_cast<int32_t>(std::max(some[0].size(), some[1].size()));
    std::vector<float> states(heads * (d + 2));
    for (float& value : states) value = std::abs(random_.Normal()) + 0.1f;
    const DeviceArray<const float*> summaries(std::vector<const float*>{scene.summary.data()});
    const auto run = [&] {
      scene.summary.Poison();
      scene.Extend({first, first + 30}, true);  // token by token, and blocks side by side
      scene.Extend({first + 30, end}, false);
      const CompletionShape shape{1, group, scene.layout, most};
      Workspace workspace(CompleteStatesWorkspaceBytes(shape, scene.keys.map));
      const DeviceArray<float> on_device(states);
      WINNOW_CUDA_OK(CompleteStates(shape, q_on_device.data(), q.tensor().stride, queries.data(),
                                    {.chosen = chosen.view(), .pool = scene.rows}, summaries.data(),
                                    scene.keys.map, scene.queries.map, on_device.data(),
                                    workspace.data(), nullptr));
      std::vector<float> result = on_device.Get();
      const std::vector<float> summary = scene.summary.Get();
      result.insert(result.end(), summary.begin(), summary.end());
      return result;
    };
    const std::vector<float> actual = run();
    const auto rounded = UploadRounded(scene.kv, &scene.layout);
    scene.rows = rounded.data();
    const std::vector<float> expected = run();
    ASSERT_EQ(std::memcmp(actual.data(), expected.data(), 4 * expected.size()), 0);
    ASSERT_NE(std::memcmp(actual.data(), states.data(), 4 * states.size()), 0);
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
