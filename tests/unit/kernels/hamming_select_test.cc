#include "kernels/hamming_select.h"

#include <numeric>

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class HammingSelectTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(HammingSelectTest);

// One layer's code pool and the queries' codes.
struct CodePool {
  // `noise`: of 256, the chance that a bit differs from a common code: distances bunch up where it
  // is small.
  CodePool(Random& random, const CodeLayout& code_layout, int32_t num_blocks, int32_t group_size,
           int32_t num_queries, int64_t noise)
      : layout(code_layout), group(group_size), codes(num_blocks * layout.BlockBytes()) {
    const auto common = RandomBytes(random, layout.CodeBytes());
    auto draw = [&](uint8_t* code) {
      for (size_t i = 0; i < layout.CodeBytes(); ++i) {
        code[i] = common[i];
        for (int bit = 0; bit < 8; ++bit) code[i] ^= (random.Int(0, 255) < noise) << bit;
      }
    };
    for (size_t at = 0; at < codes.size(); at += layout.CodeBytes()) draw(&codes[at]);
    query_codes.resize(static_cast<size_t>(num_queries) * layout.kv_heads * group *
                       layout.CodeBytes());
    for (size_t at = 0; at < query_codes.size(); at += layout.CodeBytes()) draw(&query_codes[at]);
    table.resize(num_blocks);
    std::iota(table.begin(), table.end(), 0);
    random.Shuffle(table);
  }
  static std::vector<uint8_t> RandomBytes(Random& random, size_t count) {
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Int(0, 255));
    return bytes;
  }
  int32_t tokens() const { return static_cast<int32_t>(table.size()) * layout.block_tokens; }

  CodeLayout layout;
  int32_t group;
  std::vector<uint8_t> codes, query_codes;
  std::vector<int32_t> table;
};

// A selection that owns its memory, filled with a value that no token has.
struct Chosen {
  Chosen(size_t queries, int32_t heads, int32_t capacity)
      : counts(queries * heads, -7), tokens(queries * heads * capacity, -7) {
    view = {heads, capacity, counts.data(), tokens.data()};
  }
  bool operator==(const Chosen& other) const {
    return counts == other.counts && tokens == other.tokens;
  }
  std::vector<int32_t> counts, tokens;
  Selection view;
};

Chosen Select(Backend& backend, const CodePool& pool, const std::vector<RetrievalQuery>& queries,
              int32_t capacity) {
  Chosen chosen(queries.size(), pool.layout.kv_heads, capacity);
  backend.SelectByCodes(queries, pool.query_codes.data(), pool.group, pool.codes.data(),
                        pool.layout, chosen.view);
  return chosen;
}

Chosen Reference(const CodePool& pool, const std::vector<RetrievalQuery>& queries,
                 int32_t capacity) {
  Chosen chosen(queries.size(), pool.layout.kv_heads, capacity);
  SelectByCodesRef(queries, pool.query_codes.data(), pool.group, pool.codes.data(), pool.layout,
                   chosen.view);
  return chosen;
}

RetrievalQuery RandomQuery(Random& random, const CodePool& pool) {
  RetrievalQuery query;
  query.block_table = pool.table;
  query.mid.last = static_cast<int32_t>(random.Int(1, pool.tokens()));
  query.mid.first = static_cast<int32_t>(random.Int(0, query.mid.last));
  query.position = query.mid.last;
  query.k = static_cast<int32_t>(random.Int(0, query.mid.size()));
  if (random.Int(0, 1) == 0) query.k = std::min(query.k, 20);
  return query;
}

TEST_P(HammingSelectTest, EveryGroupAndWidthEqualsScoresAndASort) {
  SCOPED_TRACE(Seed());
  for (int32_t group = 1; group <= 16; ++group) {
    for (const int32_t bits : {32, 64, 128, 256, 512, 1024}) {
      const CodeLayout layout{2, static_cast<int32_t>(16 * random_.Int(1, 5)), bits};
      const CodePool pool(random_, layout, 7, group, 3, random_.Int(0, 128));
      const std::vector<RetrievalQuery> queries = {
          RandomQuery(random_, pool), RandomQuery(random_, pool), RandomQuery(random_, pool)};
      ASSERT_EQ(Select(*Make(2), pool, queries, pool.tokens()),
                Reference(pool, queries, pool.tokens()))
          << "group " << group << " bits " << bits << " block " << layout.block_tokens;
    }
  }
}

TEST_P(HammingSelectTest, ChoosesNoneAndAll) {
  SCOPED_TRACE(Seed());
  const CodePool pool(random_, {2, 32, 64}, 5, 4, 1, 64);
  for (const int32_t k : {0, 1, 99, 100}) {
    RetrievalQuery query{0, pool.table, 150, {17, 117}, k};
    ASSERT_EQ(Select(*Make(1), pool, {query}, 100), Reference(pool, {query}, 100)) << k;
  }
  const RetrievalQuery empty{0, pool.table, 150, {17, 17}, 0};
  const Chosen chosen = Select(*Make(1), pool, {empty}, 3);
  EXPECT_EQ(chosen.counts, (std::vector<int32_t>{0, 0}));
  EXPECT_EQ(chosen.tokens, std::vector<int32_t>(6, -7));
}

TEST_P(HammingSelectTest, OfEqualsTheLaterAreChosen) {
  SCOPED_TRACE(Seed());
  // All codes are the same but for one that is nearer.
  CodePool pool(random_, {1, 64, 128}, 900, 4, 1, 0);
  const int32_t near = 37;
  uint8_t* code = &pool.codes[pool.table[0] * pool.layout.BlockBytes() + near * 16];
  std::memcpy(&pool.query_codes[0], code, 16);
  for (int g = 0; g < 4; ++g) std::memcpy(&pool.query_codes[g * 16], code, 16);
  for (size_t at = 0; at < pool.codes.size(); at += 16) {
    if (&pool.codes[at] != code) pool.codes[at] ^= 1;
  }
  const RetrievalQuery query{0, pool.table, 57599, {16, 57500}, 40000};
  const Chosen chosen = Select(*Make(3), pool, {query}, 40000);
  EXPECT_EQ(chosen.tokens[0], near);
  for (int32_t i = 1; i < 40000; ++i) ASSERT_EQ(chosen.tokens[i], 17500 + i);
}

TEST_P(HammingSelectTest, LongContextsEqualTheReferenceAtAnyNumberOfThreads) {
  SCOPED_TRACE(Seed());
  // More tokens than one range; the nearest lie at random, early, or late.
  for (const int where : {0, 1, 2}) {
    CodePool pool(random_, {2, 64, 32}, 1100, 3, 2, 96);
    for (int32_t token = 0; token < pool.tokens(); ++token) {
      const bool near = where == 1   ? token > 1000 && token < 30000
                        : where == 2 ? token > 60000
                                     : false;
      if (!near || random_.Int(0, 3) != 0) continue;
      uint8_t* code = &pool.codes[pool.table[token / 64] * pool.layout.BlockBytes() +
                                  token % 64 * pool.layout.CodeBytes()];
      std::memcpy(code, pool.query_codes.data(), 4);
    }
    std::vector<RetrievalQuery> queries(2);
    for (RetrievalQuery& query : queries) {
      query = {0, pool.table, pool.tokens() - 1, {16, pool.tokens() - 129}, 1408};
    }
    queries[1].mid = {static_cast<int32_t>(random_.Int(100, 20000)),
                      static_cast<int32_t>(random_.Int(30000, 70000))};
    queries[1].k = static_cast<int32_t>(random_.Int(1, 9000));
    const Chosen expected = Reference(pool, queries, 9000);
    ASSERT_EQ(Select(*Make(1), pool, queries, 9000), expected) << where;
    ASSERT_EQ(Select(*Make(4), pool, queries, 9000), expected) << where;
  }
}

// The driver guesses a bound from tokens of every second block here; where those are all near and
// the others far, fewer than k lie within it.
TEST_P(HammingSelectTest, ASampleThatMisleadsDoesNotShow) {
  SCOPED_TRACE(Seed());
  CodePool pool(random_, {1, 64, 64}, 256, 2, 1, 128);
  std::memcpy(&pool.query_codes[8], &pool.query_codes[0], 8);
  for (int32_t token = 0; token < pool.tokens(); ++token) {
    if (token / 64 % 2 != 0) continue;
    std::memcpy(&pool.codes[pool.table[token / 64] * pool.layout.BlockBytes() + token % 64 * 8],
                pool.query_codes.data(), 8);
  }
  const RetrievalQuery query{0, pool.table, pool.tokens() - 1, {0, pool.tokens()}, 9830};
  ASSERT_EQ(Select(*Make(2), pool, {query}, 9830), Reference(pool, {query}, 9830));
}

TEST_P(HammingSelectTest, ManyQueriesInOneCallEqualOneAtATime) {
  SCOPED_TRACE(Seed());
  const auto backend = Make(3);
  const CodePool pool(random_, {3, 48, 128}, 12, 4, 9, 40);
  std::vector<RetrievalQuery> queries(9);
  for (RetrievalQuery& query : queries) query = RandomQuery(random_, pool);
  const int32_t capacity = pool.tokens();
  const Chosen together = Select(*backend, pool, queries, capacity);
  CodePool alone = pool;
  const size_t query_bytes = pool.query_codes.size() / queries.size();
  for (size_t i = 0; i < queries.size(); ++i) {
    alone.query_codes.assign(
        pool.query_codes.begin() + static_cast<int64_t>(i * query_bytes),
        pool.query_codes.begin() + static_cast<int64_t>((i + 1) * query_bytes));
    const Chosen one = Select(*backend, alone, {queries[i]}, capacity);
    for (int32_t head = 0; head < 3; ++head) {
      ASSERT_EQ(one.counts[head], together.view.count(static_cast<int64_t>(i), head));
      ASSERT_TRUE(std::equal(one.view.chosen(0, head), one.view.chosen(0, head) + capacity,
                             together.view.chosen(static_cast<int64_t>(i), head)))
          << "query " << i << " head " << head;
    }
  }
}

// Distances of all G, where the plain sum over the queries is at hand.
TEST(CodePatternTest, DistanceAndScoreAddUp) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int32_t group = 1; group <= 16; ++group) {
    const int32_t bits = 32 << random.Int(0, 5), bytes = bits / 8;
    const auto queries = CodePool::RandomBytes(random, size_t{1} * group * bytes);
    CodePattern pattern;
    MakeCodePattern(queries.data(), group, bits, &pattern);
    int64_t base = -1;
    for (int round = 0; round < 20; ++round) {
      const auto key = CodePool::RandomBytes(random, bytes);
      int64_t hamming = 0, distance = 0;
      for (int32_t i = 0; i < bytes; ++i) {
        for (int32_t g = 0; g < group; ++g) {
          hamming += std::popcount(static_cast<uint8_t>(key[i] ^ queries[g * bytes + i]));
        }
        for (int32_t p = 0; p < CodePlanes(group); ++p) {
          const uint8_t differing = key[i] ^ pattern.majority[i];
          distance += int64_t{std::popcount(static_cast<uint8_t>(differing & pattern.planes[p][i]))}
                      << p;
        }
      }
      EXPECT_LE(distance, MaxCodeDistance(group, bits));
      const int64_t rest = hamming - distance * (group % 2 == 0 ? 2 : 1);
      if (base < 0) base = rest;
      EXPECT_EQ(rest, base) << "group " << group;
    }
    for (int32_t i = bytes; i < kMaxCodeBits / 8; ++i) {
      EXPECT_EQ(pattern.majority[i], pattern.majority[i - bytes]);
    }
  }
}

}  // namespace
}  // namespace winnow::kernels
