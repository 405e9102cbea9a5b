#include "kernels/completion.h"

#include <numeric>

#include "kernels/attention_state.h"
#include "tests/unit/kernels/feature_map_testing.h"
#include "tests/unit/kernels/paged_kv.h"

namespace winnow::kernels {
namespace {

struct Shape {
  int32_t kv_heads = 2, group = 2, head_dim = 64, inner = 48, features = 64;
  int32_t block_tokens = 64;
  DType dtype = DType::kBF16;
  float spread = 3.0f;  // of log-features
};

// A sequence of `tokens` random keys and values, its maps, and queries to come.
class Scene {
 public:
  Scene(Random& random, Backend& backend, const Shape& shape, int32_t tokens)
      : random_(random),
        shape_(shape),
        layout_{shape.kv_heads, shape.head_dim, shape.block_tokens, shape.dtype},
        keys_(random, MapShape(), shape.spread),
        queries_(random, MapShape(), shape.spread),
        packed_keys_(backend.PackFeatureMap(keys_.weights())),
        packed_queries_(backend.PackFeatureMap(queries_.weights())) {
    const int32_t blocks = (tokens + shape.block_tokens - 1) / shape.block_tokens;
    table_.resize(blocks);
    std::iota(table_.begin(), table_.end(), 0);
    random_.Shuffle(table_);
    pool_.resize(blocks * layout_.BlockBytes());
    const int64_t width = int64_t{shape.kv_heads} * shape.head_dim;
    Matrix k = Matrix::Normal(random_, tokens, width), v = Matrix::Normal(random_, tokens, width);
    const AttentionChunk chunk{0, tokens, 0, table_};
    backend.WriteKv(k.tensor(), v.tensor(), {&chunk, 1}, pool_.data(), layout_);
  }

  const KvLayout& layout() const { return layout_; }
  const Shape& shape() const { return shape_; }
  int32_t heads() const { return shape_.kv_heads * shape_.group; }
  int64_t state_floats() const { return AttentionStateFloats(shape_.head_dim); }
  std::byte* pool() { return pool_.data(); }
  std::vector<int32_t>& table() { return table_; }
  std::byte* Row(int32_t token, int32_t head) {
    return pool_.data() + layout_.RowOffset(table_[token / layout_.block_tokens], head,
                                            token % layout_.block_tokens);
  }
  const FeatureMapWeights& key_map() const { return keys_.weights(); }
  const FeatureMapWeights& query_map() const { return queries_.weights(); }
  const PackedFeatureMap& packed_keys() const { return *packed_keys_; }
  const PackedFeatureMap& packed_queries() const { return *packed_queries_; }

 private:
  FeatureMapShape MapShape() const {
    return {shape_.kv_heads, shape_.head_dim, shape_.head_dim, shape_.inner, shape_.features};
  }

  Random& random_;
  const Shape shape_;
  const KvLayout layout_;
  const RandomFeatureMap keys_, queries_;
  const std::unique_ptr<PackedFeatureMap> packed_keys_, packed_queries_;
  std::vector<int32_t> table_;
  std::vector<std::byte> pool_;
};

// Queries over a scene, what they have chosen, and their states.
class Step {
 public:
  // A query for each mid, with random contents.
  Step(Random& random, Scene& scene, const std::vector<TokenRange>& mids)
      : scene_(scene),
        q_(Matrix::Normal(random, static_cast<int64_t>(mids.size()),
                          int64_t{scene.heads()} * scene.shape().head_dim)),
        chosen_(mids.size() * scene.shape().kv_heads) {
    for (size_t i = 0; i < mids.size(); ++i) {
      queries_.push_back({static_cast<int32_t>(i), scene.table(), mids[i].last + 5, mids[i], 0});
    }
    states_.resize(mids.size() * scene.heads() * scene.state_floats());
    for (size_t i = 0; i < mids.size() * scene.heads(); ++i) {
      float* state = states_.data() + i * scene.state_floats();
      for (int64_t c = 0; c < scene.shape().head_dim; ++c) state[c] = random.Normal();
      state[scene.shape().head_dim] = random.Normal(2.0f);
      state[scene.shape().head_dim + 1] = 1.0f;
    }
  }

  std::vector<int32_t>& chosen(int64_t query, int32_t head) {
    return chosen_[query * scene_.shape().kv_heads + head];
  }
  void ChooseSome(Random& random, double share) {
    for (size_t i = 0; i < chosen_.size(); ++i) {
      const TokenRange mid = queries_[i / scene_.shape().kv_heads].mid;
      for (int32_t t = mid.first; t < mid.last; ++t) {
        if (random.Int(0, 9999) < static_cast<int64_t>(10000 * share)) chosen_[i].push_back(t);
      }
    }
  }

  // States after completion of the queries [first, last) as one group.
  std::vector<float> Run(Backend& backend, Summary& summary, int32_t first, int32_t last) {
    CompletionGroup group{0, last - first, &summary};
    return Run(backend, {&group, 1}, first, last);
  }
  std::vector<float> Run(Backend& backend, std::span<const CompletionGroup> groups, int32_t first,
                         int32_t last) {
    const int32_t kv_heads = scene_.shape().kv_heads;
    // An anchor before and one after the chosen: rows that must not be subtracted.
    std::vector<std::vector<const std::byte*>> rows;
    std::vector<RowList> lists;
    for (int32_t i = first * kv_heads; i < last * kv_heads; ++i) {
      auto& list = rows.emplace_back();
      list.push_back(scene_.Row(0, i % kv_heads));
      for (const int32_t token : chosen_[i]) list.push_back(scene_.Row(token, i % kv_heads));
      list.push_back(scene_.Row(1, i % kv_heads));
    }
    for (const auto& list : rows) {
      const int32_t count = static_cast<int32_t>(list.size());
      lists.push_back({list.data(), count, 1, count - 1});
    }
    const int64_t of_query = scene_.heads() * scene_.state_floats();
    std::vector<float> states(states_.begin() + first * of_query,
                              states_.begin() + last * of_query);
    backend.CompleteStates(
        {.q = q_.tensor(),
         .queries = std::span(queries_).subspan(first, last - first),
         .groups = groups,
         .rows = {.layout = scene_.layout(), .pool = scene_.pool(), .lists = lists},
         .key_map = scene_.packed_keys(),
         .query_map = scene_.packed_queries(),
         .states = states.data()});
    return states;
  }

  // As if nothing had been chosen.
  std::vector<float> ReferenceOfAll() {
    std::vector<std::vector<int32_t>> chosen(chosen_.size());
    chosen.swap(chosen_);
    std::vector<float> states = Reference();
    chosen.swap(chosen_);
    return states;
  }
  std::vector<float> Reference() {
    const int32_t kv_heads = scene_.shape().kv_heads;
    size_t capacity = 1;
    for (const auto& chosen : chosen_) capacity = std::max(capacity, chosen.size());
    std::vector<int32_t> counts, tokens(chosen_.size() * capacity);
    for (size_t i = 0; i < chosen_.size(); ++i) {
      counts.push_back(static_cast<int32_t>(chosen_[i].size()));
      std::copy(chosen_[i].begin(), chosen_[i].end(), tokens.begin() + i * capacity);
    }
    const Selection selection{kv_heads, static_cast<int32_t>(capacity), counts.data(),
                              tokens.data()};
    std::vector<float> states = states_;
    CompleteStatesRef(q_.tensor(), queries_, selection, scene_.pool(), scene_.layout(),
                      scene_.key_map(), scene_.query_map(), states.data());
    return states;
  }

  void ClearStates() {
    for (size_t i = 0; i < states_.size(); i += scene_.state_floats()) {
      ResetAttentionState(states_.data() + i, scene_.shape().head_dim);
    }
  }
  const std::vector<float>& states() const { return states_; }
  Matrix& q() { return q_; }

 private:
  Scene& scene_;
  Matrix q_;
  std::vector<RetrievalQuery> queries_;
  std::vector<std::vector<int32_t>> chosen_;  // [queries][Hkv]
  std::vector<float> states_;
};

struct OwnedSummary {
  std::vector<float> data;
  Summary summary;
  explicit OwnedSummary(const Shape& shape)
      : data(shape.kv_heads * SummaryFloats(shape.features, shape.head_dim), NAN),
        summary{data.data(), {}} {}
};

// The same mass and the same sum of values, but for `tolerance` of the mass in `whole`, which
// nothing was subtracted from: no less can be asked of a difference.
void ExpectStatesNear(const std::vector<float>& actual, const std::vector<float>& expected,
                      const std::vector<float>& whole, int64_t head_dim, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  const int64_t floats = AttentionStateFloats(head_dim);
  for (size_t i = 0; i < actual.size() / floats; ++i) {
    const float* a = actual.data() + i * floats;
    const float* e = expected.data() + i * floats;
    const double shift = whole[i * floats + head_dim];
    const double a_scale = std::exp2(a[head_dim] - shift);
    const double e_scale = std::exp2(e[head_dim] - shift);
    const double mass = whole[i * floats + head_dim + 1];
    for (int64_t c = 0; c < floats; ++c) {
      if (c == head_dim) continue;  // values, then the sum
      ASSERT_NEAR(a[c] * a_scale / mass, e[c] * e_scale / mass, tolerance)
          << "state " << i << " value " << c;
    }
  }
}

class CompletionTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(CompletionTest);

TEST_P(CompletionTest, EqualsTheReferenceForAnyShape) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 96, 128, 256}) {
    Shape shape;
    shape.head_dim = d;
    shape.group = static_cast<int32_t>(random_.Int(1, 7));
    shape.inner = static_cast<int32_t>(random_.Int(1, 80));
    shape.features = static_cast<int32_t>(random_.Int(16, 130));
    shape.block_tokens = random_.Int(0, 1) == 0 ? 64 : 16;
    shape.dtype = kKvTypes[random_.Int(0, 3)];
    const auto backend = Make(2);
    Scene scene(random_, *backend, shape, 400);
    // Three queries; the second sees some more tokens, the third none that are new.
    const int32_t first = static_cast<int32_t>(random_.Int(0, 70));
    const int32_t last = static_cast<int32_t>(random_.Int(150, 300));
    Step step(random_, scene, {{first, last}, {first, last + 77}, {first, last + 77}});
    step.ChooseSome(random_, 0.1);
    OwnedSummary summary(shape);
    ExpectStatesNear(step.Run(*backend, summary.summary, 0, 3), step.Reference(),
                     step.ReferenceOfAll(), d, 3e-4);
    EXPECT_EQ(summary.summary.tokens, (TokenRange{first, last + 77}));
  }
}

TEST_P(CompletionTest, EqualsWhatCalibrateComputes) {
  RecordedCompletion recorded;
  const auto shape = recorded.shape("queries");  // [heads][G][d]
  const int32_t kv_heads = shape[0], group = shape[1], d = shape[2];
  const int32_t tokens = recorded.shape("keys")[1], count = recorded.shape("chosen")[1];
  const auto keys = recorded.values<uint16_t>("keys");
  const auto values = recorded.values<uint16_t>("values");
  const auto chosen = recorded.values<int32_t>("chosen");
  const KvLayout layout{kv_heads, d, 16, DType::kBF16};
  const std::vector<int32_t> table = {3, 0, 5, 1, 4, 2};
  std::vector<std::byte> pool(6 * layout.BlockBytes());
  const auto row = [&](int32_t token, int32_t head) {
    return pool.data() + layout.RowOffset(table[token / 16], head, token % 16);
  };
  for (int32_t head = 0; head < kv_heads; ++head) {
    for (int32_t t = 0; t < tokens; ++t) {
      const size_t from = size_t(head * tokens + t) * d;
      std::memcpy(row(t, head), &keys[from], size_t{2} * d);
      std::memcpy(row(t, head) + layout.ValueOffsetInRow(), &values[from], size_t{2} * d);
    }
  }
  std::vector<std::vector<const std::byte*>> rows(kv_heads);
  std::vector<RowList> lists;
  for (int32_t head = 0; head < kv_heads; ++head) {
    for (int32_t i = 0; i < count; ++i) rows[head].push_back(row(chosen[head * count + i], head));
    lists.push_back({rows[head].data(), count, 0, count});
  }
  auto queries = recorded.values<float>("queries");
  const Tensor q{queries.data(), DType::kF32, 1, int64_t{kv_heads} * group * d, 0};
  const RetrievalQuery query{0, table, tokens, {0, tokens}, count};
  const FeatureMapWeights key_map = recorded.Map("key"), query_map = recorded.Map("query");
  std::vector<float> data(kv_heads * SummaryFloats(key_map.out.out, d));
  Summary summary{data.data(), {}};
  const CompletionGroup one{0, 1, &summary};
  const int64_t floats = AttentionStateFloats(d);
  std::vector<float> states(kv_heads * group * floats);
  for (int32_t i = 0; i < kv_heads * group; ++i) ResetAttentionState(&states[i * floats], d);
  const auto backend = Make(2);
  backend->CompleteStates({.q = q,
                           .queries = {&query, 1},
                           .groups = {&one, 1},
                           .rows = {.layout = layout, .pool = pool.data(), .lists = lists},
                           .key_map = *backend->PackFeatureMap(key_map),
                           .query_map = *backend->PackFeatureMap(query_map),
                           .states = states.data()});
  const auto lse = recorded.values<float>("lse"), out = recorded.values<float>("out");
  std::vector<float> actual(d);
  for (int32_t i = 0; i < kv_heads * group; ++i) {
    EXPECT_NEAR(AttentionStateLogSumExp(&states[i * floats], d), lse[i], 5e-4);
    FinishAttentionState(&states[i * floats], d, actual.data());
    for (int32_t c = 0; c < d; ++c) EXPECT_NEAR(actual[c], out[i * d + c], 1e-3);
  }
}

TEST_P(CompletionTest, SummaryAndResultsDoNotDependOnHowTokensEntered) {
  SCOPED_TRACE(Seed());
  Shape shape;
  shape.features = 37;
  shape.spread = 10.0f;  // m is raised often
  const auto backend = Make(3);
  Scene scene(random_, *backend, shape, 400);
  std::vector<TokenRange> mids;
  for (int32_t last = 17; last < 333; last += static_cast<int32_t>(random_.Int(0, 20))) {
    mids.push_back({16, last});
  }
  const int32_t count = static_cast<int32_t>(mids.size());
  Step step(random_, scene, mids);
  step.ChooseSome(random_, 0.05);
  OwnedSummary together(shape), one_by_one(shape), at_once(shape);
  const std::vector<float> states = step.Run(*backend, together.summary, 0, count);
  std::vector<float> single;
  for (int32_t i = 0; i < count; ++i) {
    const auto of_query = step.Run(*backend, one_by_one.summary, i, i + 1);
    single.insert(single.end(), of_query.begin(), of_query.end());
  }
  EXPECT_EQ(states, single);
  const auto last = step.Run(*backend, at_once.summary, count - 1, count);
  EXPECT_TRUE(std::equal(last.begin(), last.end(), states.end() - last.size()));
  EXPECT_EQ(together.data, one_by_one.data);
  EXPECT_EQ(together.data, at_once.data);
}

TEST_P(CompletionTest, SummariesExtendedWithoutAQueryAreTheSame) {
  SCOPED_TRACE(Seed());
  const Shape shape;
  const auto backend = Make(3);
  Scene scene(random_, *backend, shape, 300);
  Step step(random_, scene, {{16, 280}});
  OwnedSummary by_query(shape), extended(shape), other(shape);
  step.Run(*backend, by_query.summary, 0, 1);
  extended.summary.tokens = other.summary.tokens = {16, 16};
  for (int32_t last = 16; last < 280;) {
    last = std::min<int32_t>(280, last + static_cast<int32_t>(random_.Int(0, 100)));
    const SummaryExtension both[] = {{&extended.summary, scene.table(), last},
                                     {&other.summary, scene.table(), (16 + last) / 2}};
    backend->ExtendSummaries(both, scene.pool(), scene.layout(), scene.packed_keys());
    EXPECT_EQ(extended.summary.tokens, (TokenRange{16, last}));
  }
  EXPECT_EQ(extended.data, by_query.data);
  EXPECT_NE(other.data, by_query.data);
}

// As a prompt is read, in pieces of any size, and on from where the last piece ended.
TEST_P(CompletionTest, ExtendingFirstGivesTheSameBits) {
  SCOPED_TRACE(Seed());
  Shape shape;
  shape.features = 37;
  shape.spread = 10.0f;
  const auto backend = Make(3);
  Scene scene(random_, *backend, shape, 400);
  Step step(random_, scene, {{16, 333}});
  step.ChooseSome(random_, 0.05);
  OwnedSummary at_once(shape), extended(shape);
  const std::vector<float> expected = step.Run(*backend, at_once.summary, 0, 1);
  extended.summary.tokens = {16, 16};
  for (int32_t last = 16; last < 333;) {
    last = std::min(333, last + static_cast<int32_t>(random_.Int(0, 90)));
    const SummaryExtension extension{&extended.summary, scene.table(), last};
    backend->ExtendSummaries({&extension, 1}, scene.pool(), scene.layout(), scene.packed_keys());
    ASSERT_EQ(extended.summary.tokens, (TokenRange{16, last}));
  }
  EXPECT_EQ(extended.data, at_once.data);
  EXPECT_EQ(step.Run(*backend, extended.summary, 0, 1), expected);
}

TEST_P(CompletionTest, AQueryYieldsTheSameBitsAloneAndAmongOthers) {
  SCOPED_TRACE(Seed());
  Shape shape;
  shape.group = 3;
  Scene scene(random_, *Make(1), shape, 300);
  // Sequences of their own as far as this call can tell: each has its summary.
  std::vector<TokenRange> mids;
  for (int i = 0; i < 6; ++i) mids.push_back({3, static_cast<int32_t>(random_.Int(10, 280))});
  Step step(random_, scene, mids);
  step.ChooseSome(random_, 0.1);
  std::vector<OwnedSummary> summaries(mids.size(), OwnedSummary(shape));
  std::vector<CompletionGroup> groups;
  for (size_t i = 0; i < mids.size(); ++i) {
    summaries[i].summary.data = summaries[i].data.data();
    groups.push_back({static_cast<int32_t>(i), 1, &summaries[i].summary});
  }
  const auto many = step.Run(*Make(4), groups, 0, static_cast<int32_t>(mids.size()));
  const auto backend = Make(1);
  for (int32_t i = 0; i < 6; ++i) {
    OwnedSummary own(shape);
    const auto alone = step.Run(*backend, own.summary, i, i + 1);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), many.begin() + i * alone.size()));
    EXPECT_EQ(own.data, summaries[i].data);
  }
}

TEST_P(CompletionTest, NothingIsAddedWhereAllOfMidWasChosen) {
  SCOPED_TRACE(Seed());
  const Shape shape;
  const auto backend = Make(1);
  Scene scene(random_, *backend, shape, 300);
  Step step(random_, scene, {{16, 16}, {16, 150}});
  for (int32_t head = 0; head < shape.kv_heads; ++head) {
    step.chosen(1, head).resize(134);
    std::iota(step.chosen(1, head).begin(), step.chosen(1, head).end(), 16);
  }
  OwnedSummary summary(shape);
  EXPECT_EQ(step.Run(*backend, summary.summary, 0, 2), step.states());
  EXPECT_EQ(summary.summary.tokens, (TokenRange{16, 150}));  // entered all the same
}

// The added mass, as a share of the state's, of every head of every query.
std::vector<double> AddedShares(const std::vector<float>& before, const std::vector<float>& after,
                                int64_t head_dim) {
  const int64_t floats = AttentionStateFloats(head_dim);
  std::vector<double> shares;
  for (size_t i = 0; i < before.size() / floats; ++i) {
    const double a = AttentionStateLogSumExp(before.data() + i * floats, head_dim);
    const double b = AttentionStateLogSumExp(after.data() + i * floats, head_dim);
    shares.push_back(std::exp(b - a) - 1);
  }
  return shares;
}

TEST_P(CompletionTest, WhatSubtractionLeavesOfFeaturesThatTheChosenCarryIsNothing) {
  SCOPED_TRACE(Seed());
  // Two keys alone have log-features near 100; those of all others are near -100. With both
  // chosen, the difference of sums is rounding, of either sign.
  Shape shape;
  shape.kv_heads = 1;
  shape.group = 4;
  shape.spread = 1.0f;
  const auto backend = Make(1);
  Scene scene(random_, *backend, shape, 600);
  // A direction in which all log-features grow: found by trial from random keys would be slow, so
  // the map is made for it: x_0 alone decides.
  FeatureMapWeights map = scene.key_map();
  std::vector<uint16_t> stem(64 * 64, 0), down(64 * 48, 0), out(64 * 64, 0);
  std::vector<float> zeros(64, 0.0f);
  for (int i = 0; i < 64; ++i) {
    stem[i * 64 + i] = ToBF16(1.0f).bits;
    out[i * 64] = ToBF16(static_cast<float>(25 + random_.Int(0, 5) * 0.125)).bits;
    out[i * 64 + 1] = ToBF16(random_.Normal(0.5f)).bits;  // and a little x_1, to vary
  }
  map.stem.weight = stem;
  map.stem.bias = zeros;
  map.down.weight = down;
  map.down.bias = zeros;
  map.out.weight = out;
  map.out.bias = zeros;
  const auto packed = backend->PackFeatureMap(map);
  const auto set_x0 = [&](int32_t token, float value) {
    const BF16 bits = ToBF16(value);
    std::memcpy(scene.Row(token, 0), &bits, 2);
  };
  for (int32_t token = 0; token < 600; ++token) set_x0(token, -4.0f);
  set_x0(100, 4.0f);
  set_x0(333, 4.0f);
  Step step(random_, scene, {{16, 500}});
  step.chosen(0, 0) = {100, 333};

  OwnedSummary summary(shape);
  const CompletionGroup group{0, 1, &summary.summary};
  const std::vector<const std::byte*> rows = {scene.Row(100, 0), scene.Row(333, 0)};
  const RowList list{rows.data(), 2, 0, 2};
  const RetrievalQuery query{0, scene.table(), 505, {16, 500}, 2};
  std::vector<float> states = step.states();
  // Log-features of +-100 and more on both sides: sums of exponentials up to e^250.
  backend->CompleteStates(
      {.q = step.q().tensor(),
       .queries = {&query, 1},
       .groups = {&group, 1},
       .rows = {.layout = scene.layout(), .pool = scene.pool(), .lists = {&list, 1}},
       .key_map = *packed,
       .query_map = scene.packed_queries(),
       .states = states.data()});
  EXPECT_EQ(states, step.states());  // every feature is dropped
  for (const float value : summary.data) EXPECT_TRUE(std::isfinite(value));

  // With only one of the two chosen, the other's mass comes back in full: e^(100 + b).
  const RowList one{rows.data(), 1, 0, 1};
  OwnedSummary again(shape);
  const CompletionGroup second{0, 1, &again.summary};
  states = step.states();
  backend->CompleteStates(
      {.q = step.q().tensor(),
       .queries = {&query, 1},
       .groups = {&second, 1},
       .rows = {.layout = scene.layout(), .pool = scene.pool(), .lists = {&one, 1}},
       .key_map = *packed,
       .query_map = scene.packed_queries(),
       .states = states.data()});
  std::vector<double> a(64), b(64);
  std::vector<float> key(64);
  for (int i = 0; i < 64; ++i) {
    BF16 bits;
    std::memcpy(&bits, scene.Row(333, 0) + 2 * i, 2);
    key[i] = ToFloat(bits);
  }
  FeatureMapRef(map, 0, key.data(), a.data());
  for (int32_t g = 0; g < shape.group; ++g) {
    FeatureMapRef(scene.query_map(), 0, step.q().row(0) + g * 64, b.data());
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < 64; ++j) max = std::max(max, a[j] + b[j]);
    for (int j = 0; j < 64; ++j) sum += std::exp(a[j] + b[j] - max);
    EXPECT_NEAR(AttentionStateLogSumExp(states.data() + g * AttentionStateFloats(64), 64),
                max + std::log(sum), 1e-3);
  }
}

TEST_P(CompletionTest, MassIsNeverNegativeAndNegligibleWhereNearlyAllWasChosen) {
  SCOPED_TRACE(Seed());
  // The one key that was not chosen is of ordinary size, or far below all others.
  for (const bool far_below : {false, true}) {
    Shape shape;
    shape.spread = far_below ? 25.0f : 1.0f;
    shape.inner = 16;
    shape.features = 20;
    const auto backend = Make(1);
    Scene scene(random_, *backend, shape, 200);
    Step step(random_, scene, std::vector<TokenRange>(8, {16, 180}));
    for (int32_t query = 0; query < 8; ++query) {
      const int32_t left_out = static_cast<int32_t>(random_.Int(16, 179));
      for (int32_t head = 0; head < shape.kv_heads; ++head) {
        for (int32_t t = 16; t < 180; ++t) {
          if (t != left_out) step.chosen(query, head).push_back(t);
        }
      }
    }
    OwnedSummary summary(shape);
    const auto states = step.Run(*backend, summary.summary, 0, 8);
    const auto shares = AddedShares(step.states(), states, shape.head_dim);
    const auto expected = AddedShares(step.states(), step.Reference(), shape.head_dim);
    // The mass of all of mid: what the chosen tokens would have given, had the maps been right.
    const auto whole = AddedShares(step.states(), step.ReferenceOfAll(), shape.head_dim);
    for (size_t i = 0; i < shares.size(); ++i) {
      EXPECT_GE(shares[i], -1e-5);
      // A log-feature of 170 is known to some units of 2^-17 in float32, and its exponential so exactly.
      const double rounding = 8 * 0x1p-24 * std::abs(std::log(std::max(whole[i], 1.0)));
      EXPECT_LE(std::abs(shares[i] - expected[i]),
                (1.01 * kCompletionFloor + rounding) * whole[i] + 1e-5)
          << i << " of " << whole[i];
    }
  }
}

TEST_P(CompletionTest, AMillionTokensAreSummedUpAsWell) {
  SCOPED_TRACE(Seed());
  Shape shape;
  shape.kv_heads = 1;
  shape.group = 1;
  shape.inner = 8;
  shape.features = 16;
  shape.spread = 0.5f;  // terms of a size: the kind that a single float would round to one side
  const auto backend = Make(2);
  Scene scene(random_, *backend, shape, 256);
  // Four blocks again and again: the sums are known from one round.
  const int32_t rounds = GetParam() == "scalar" ? 1 << 9 : 1 << 12;  // scalar takes its time
  std::vector<int32_t> once = scene.table();
  scene.table().clear();
  for (int32_t i = 0; i < rounds; ++i) {
    scene.table().insert(scene.table().end(), once.begin(), once.end());
  }
  // Both states are empty before: what they get is completion alone.
  Step step(random_, scene, {{0, 256}, {0, 256 * rounds}});
  step.ClearStates();
  std::copy(step.q().row(0), step.q().row(0) + 64, step.q().row(1));
  OwnedSummary summary(shape);
  const auto states = step.Run(*backend, summary.summary, 0, 2);
  Step round(random_, scene, {{0, 256}});
  round.ClearStates();
  std::copy(step.q().row(0), step.q().row(0) + 64, round.q().row(0));
  std::vector<float> expected = round.Reference();
  expected[shape.head_dim + 1] *= rounds;
  for (int64_t c = 0; c < shape.head_dim; ++c) expected[c] *= rounds;
  const std::vector<float> million(states.begin() + scene.state_floats(), states.end());
  ExpectStatesNear(million, expected, expected, shape.head_dim,
                   5e-4);  // 2^14 blocks, each rounded once
}

}  // namespace
}  // namespace winnow::kernels
