#include "kernels/hash_encode.h"

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/unit/kernels/golden_tensors.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/paged_kv.h"
#include "tests/unit/kernels/sha256.h"

namespace winnow::kernels {
namespace {

// Weights that own what EncoderWeights views.
class Encoder {
 public:
  Encoder(int32_t kv_heads, int32_t queries_per_input) {
    weights_.kv_heads = kv_heads;
    weights_.queries_per_input = queries_per_input;
  }
  void AddStage(int32_t in, int32_t out, std::vector<uint16_t> weight, std::vector<float> bias) {
    values_.push_back(std::move(weight));
    biases_.push_back(std::move(bias));
    weights_.stages.push_back({values_.back(), biases_.back(), in, out});
  }
  // widths: in, inner widths, out.
  static Encoder Random(Random& random, int32_t kv_heads, int32_t queries_per_input,
                        const std::vector<int32_t>& widths) {
    Encoder encoder(kv_heads, queries_per_input);
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      std::vector<uint16_t> weight(size_t{1} * kv_heads * widths[i] * widths[i + 1]);
      std::vector<float> bias(size_t{1} * kv_heads * widths[i + 1]);
      const float deviation = 1.5f / std::sqrt(static_cast<float>(widths[i]));
      for (uint16_t& value : weight) value = ToBF16(random.Normal(deviation)).bits;
      for (float& value : bias) value = random.Normal(0.2f);
      encoder.AddStage(widths[i], widths[i + 1], std::move(weight), std::move(bias));
    }
    return encoder;
  }
  const EncoderWeights& weights() const { return weights_; }

 private:
  EncoderWeights weights_;
  std::vector<std::vector<uint16_t>> values_;
  std::vector<std::vector<float>> biases_;
};

// Keys in a pool of either type, values beside them in NaN, blocks in shuffled order.
struct KeyPool {
  KeyPool(Random& random, const KvLayout& kv, int32_t num_blocks)
      : layout(kv), pool(num_blocks * kv.BlockBytes(), std::byte{0xff}), table(num_blocks) {
    for (int32_t i = 0; i < num_blocks; ++i) table[i] = i;
    random.Shuffle(table);
  }
  // `key` [d].
  void Set(int32_t token, int32_t head, const float* key) {
    const std::vector<float> values(layout.head_dim, NAN);
    PutKvRow(key, values.data(), layout,
             pool.data() + layout.RowOffset(table[token / layout.block_tokens], head,
                                            token % layout.block_tokens));
  }
  KvLayout layout;
  std::vector<std::byte> pool;
  std::vector<int32_t> table;
};

// Where the code of a token lies.
uint8_t* CodeAt(std::vector<uint8_t>& codes, const CodeLayout& layout,
                const std::vector<int32_t>& table, int32_t token, int32_t head) {
  return codes.data() + table[token / layout.block_tokens] * layout.BlockBytes() +
         head * layout.HeadBytes() + token % layout.block_tokens * layout.CodeBytes();
}

TEST(SiluTableTest, HasTheRecordedHash) {
  const nlohmann::json recorded = nlohmann::json::parse(ReadGolden("codes/silu.json"));
  const std::string text = "abc";
  ASSERT_EQ(Sha256Hex(text.data(), 3),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  std::vector<uint16_t> finite;
  for (uint32_t i = 0; i < 65536; ++i) {
    if ((i & 0x7f80) != 0x7f80) finite.push_back(SiluTable()[i]);
  }
  ASSERT_EQ(finite.size(), recorded["count"].get<size_t>());
  for (const auto& sample : recorded["samples"]) {
    EXPECT_EQ(SiluTable()[sample[0].get<int>()], sample[1].get<int>()) << sample;
  }
  EXPECT_EQ(Sha256Hex(finite.data(), finite.size() * 2), recorded["sha256"].get<std::string>());
}

class HashEncodeTest : public EachIsa {};
WINNOW_FOR_EACH_ISA(HashEncodeTest);

TEST_P(HashEncodeTest, ReproducesTheRecordedCodesOfEveryKind) {
  SCOPED_TRACE(Seed());
  for (const char* kind : {"hata", "spotlight", "hashattention"}) {
    const GoldenTensors golden("codes/" + std::string(kind) + ".safetensors");
    // The recorded head is the second of two; the first has other weights.
    Encoder encoder(2, 1);
    for (int i = 0; golden.has(std::to_string(i) + ".weight"); ++i) {
      const std::string name = std::to_string(i);
      const int32_t out = golden.shape(name + ".weight")[0], in = golden.shape(name + ".weight")[1];
      std::vector<uint16_t> weight(size_t{1} * out * in, 0x3f80);
      std::vector<float> bias(out, 1.0f);
      const auto recorded = golden.values<uint16_t>(name + ".weight");
      const auto recorded_bias = golden.values<float>(name + ".bias");
      weight.insert(weight.end(), recorded.begin(), recorded.end());
      bias.insert(bias.end(), recorded_bias.begin(), recorded_bias.end());
      encoder.AddStage(in, out, std::move(weight), std::move(bias));
    }
    const int32_t rows = golden.shape("input")[0], d = golden.shape("input")[1];
    const std::vector<float> input = golden.values<float>("input");
    const std::vector<uint8_t> expected = golden.values<uint8_t>("codes");
    const int32_t code_bytes = golden.shape("codes")[1];
    const auto backend = Make(2);
    const auto packed = backend->PackEncoder(encoder.weights());
    ASSERT_EQ(packed->bits(), code_bytes * 8);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      KeyPool keys(random_, {2, d, 16, dtype}, (rows + 15) / 16);
      for (int32_t t = 0; t < rows; ++t) {
        keys.Set(t, 1, &input[t * d]);
      }
      const CodeLayout layout{2, 16, code_bytes * 8};
      std::vector<uint8_t> codes(keys.table.size() * layout.BlockBytes());
      const KeySpan span{keys.table, {0, rows}};
      backend->EncodeKeys({&span, 1}, keys.pool.data(), keys.layout, *packed, codes.data(), layout);
      for (int32_t t = 0; t < rows; ++t) {
        ASSERT_EQ(std::memcmp(CodeAt(codes, layout, keys.table, t, 1), &expected[t * code_bytes],
                              code_bytes),
                  0)
            << kind << " " << DTypeName(dtype) << " row " << t;
      }
    }
    // As a query: of two heads, a group of one.
    Matrix q(rows, 2 * d);
    std::vector<RetrievalQuery> queries(rows);
    for (int32_t t = 0; t < rows; ++t) {
      std::copy_n(&input[t * d], d, q.row(t) + d);
      queries[t].row = t;
    }
    std::vector<uint8_t> codes(size_t{2} * rows * code_bytes);
    backend->EncodeQueries(q.tensor(), queries, *packed, codes.data());
    for (int32_t t = 0; t < rows; ++t) {
      ASSERT_EQ(
          std::memcmp(&codes[(2 * t + 1) * code_bytes], &expected[t * code_bytes], code_bytes), 0)
          << kind << " query " << t;
    }
  }
}

TEST_P(HashEncodeTest, KeysEqualTheReferenceAndNothingElseIsWritten) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 96, 128, 256}) {
    for (const DType dtype : kKvTypes) {
      const int32_t bits = 32 << random_.Int(0, 5);
      std::vector<int32_t> widths = {d};
      for (int64_t i = random_.Int(0, 2); i > 0; --i) {
        widths.push_back(static_cast<int32_t>(random_.Int(1, 140)));
      }
      widths.push_back(bits);
      const int32_t heads = static_cast<int32_t>(random_.Int(1, 3));
      const Encoder encoder = Encoder::Random(random_, heads, 1, widths);
      KeyPool keys(random_, {heads, d, static_cast<int32_t>(16 * random_.Int(1, 2)), dtype}, 4);
      const int32_t tokens = 4 * keys.layout.block_tokens;
      for (int32_t t = 0; t < tokens; ++t) {
        for (int32_t head = 0; head < heads; ++head) {
          std::vector<float> key(d);
          for (float& value : key) value = random_.Normal();
          keys.Set(t, head, key.data());
        }
      }
      const CodeLayout layout{heads, keys.layout.block_tokens, bits};
      std::vector<uint8_t> codes(4 * layout.BlockBytes(), 0xa5), expected = codes;
      // Spans of which one is empty, one a single token, and one crosses blocks.
      const int32_t middle = static_cast<int32_t>(random_.Int(2, tokens / 2));
      const std::vector<KeySpan> spans = {{keys.table, {tokens - 1, tokens}},
                                          {keys.table, {middle, middle}},
                                          {keys.table, {1, middle}},
                                          {keys.table, {middle + 1, tokens - 2}}};
      const auto backend = Make(3);
      const auto packed = backend->PackEncoder(encoder.weights());
      EXPECT_GE(packed->size_bytes(),
                size_t{2} * heads * widths.back() * widths[widths.size() - 2]);
      backend->EncodeKeys(spans, keys.pool.data(), keys.layout, *packed, codes.data(), layout);
      for (const KeySpan& span : spans) {
        for (int32_t t = span.tokens.first; t < span.tokens.last; ++t) {
          for (int32_t head = 0; head < heads; ++head) {
            const std::byte* row =
                keys.pool.data() + keys.layout.RowOffset(keys.table[t / layout.block_tokens], head,
                                                         t % layout.block_tokens);
            std::vector<float> x(d);
            for (int32_t j = 0; j < d; ++j) {
              x[j] = KeyAt(row, keys.layout, j);
            }
            HashEncodeRef(encoder.weights(), head, x.data(),
                          CodeAt(expected, layout, keys.table, t, head));
          }
        }
      }
      ASSERT_EQ(codes, expected) << "d " << d << " bits " << bits << " stages " << widths.size() - 1
                                 << " " << DTypeName(dtype);
    }
  }
}

TEST_P(HashEncodeTest, QueriesOfHeadsAndOfGroupsEqualTheReference) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 6; ++round) {
    const int32_t group = static_cast<int32_t>(random_.Int(1, 8)), heads = 2, d = 64;
    const int32_t bits = 32 << random_.Int(0, 3);
    const int32_t together = round % 2 == 0 ? 1 : group;
    std::vector<int32_t> widths = {together * d};
    for (int i = 0; i < round / 2; ++i) widths.push_back(static_cast<int32_t>(random_.Int(5, 130)));
    widths.push_back(together * bits);
    const Encoder encoder = Encoder::Random(random_, heads, together, widths);
    Matrix q = Matrix::Normal(random_, 9, int64_t{heads} * group * d);
    std::vector<RetrievalQuery> queries(static_cast<size_t>(random_.Int(1, 20)));
    for (RetrievalQuery& query : queries) query.row = static_cast<int32_t>(random_.Int(0, 8));
    const size_t code_bytes = bits / 8;
    std::vector<uint8_t> codes(queries.size() * heads * group * code_bytes), expected = codes;
    const auto backend = Make(2);
    const auto packed = backend->PackEncoder(encoder.weights());
    ASSERT_EQ(packed->bits(), bits);
    backend->EncodeQueries(q.tensor(), queries, *packed, codes.data());
    for (size_t i = 0; i < queries.size(); ++i) {
      for (int32_t h = 0; h < heads * group; h += together) {
        HashEncodeRef(encoder.weights(), h / group, q.row(queries[i].row) + int64_t{h} * d,
                      &expected[(i * heads * group + h) * code_bytes]);
      }
    }
    ASSERT_EQ(codes, expected) << "group " << group << " together " << together;
  }
}

TEST_P(HashEncodeTest, SumsThatAreZeroAreSetBitsAndRoundingIsToEven) {
  // Output 0: 1 - x, with x just above and below the middle between two bfloat16; output 1: minus
  // zero; output 2: the order of the sum decides.
  Encoder encoder(1, 1);
  std::vector<uint16_t> weight(32 * 64);
  std::vector<float> bias(32, -1.0f);
  weight[0] = ToBF16(-1).bits;
  bias[0] = 1.0f;
  weight[64] = ToBF16(-1).bits;
  bias[1] = -0.0f;
  weight[2 * 64 + 2] = ToBF16(0x1p30f).bits;  // (-1 + 2^30) - 2^30 is 0, and -1 in another order
  weight[2 * 64 + 3] = ToBF16(-0x1p30f).bits;
  encoder.AddStage(64, 32, weight, bias);
  const auto backend = Make(1);
  const auto packed = backend->PackEncoder(encoder.weights());
  auto code = [&](float x) {
    Matrix q(1, 64);
    q.row(0)[0] = x;
    q.row(0)[2] = q.row(0)[3] = 1.0f;
    const std::vector<RetrievalQuery> queries(1);
    uint32_t bits = 0;
    backend->EncodeQueries(q.tensor(), queries, *packed, &bits);
    return bits;
  };
  EXPECT_EQ(code(1.0f) & 1, 1u);
  EXPECT_EQ(code(std::bit_cast<float>(0x3f808000u)) & 1, 1u);  // halfway: to 1
  EXPECT_EQ(code(std::bit_cast<float>(0x3f808001u)) & 1, 0u);
  EXPECT_EQ(code(0.0f) & 0b110, 0b110u);
  EXPECT_EQ(code(-0.0f) & 0b110, 0b110u);
  EXPECT_EQ(code(0.0f) & ~7u, 0u);
}

TEST_P(HashEncodeTest, ThreadsAndCompanyDoNotShow) {
  SCOPED_TRACE(Seed());
  const Encoder encoder = Encoder::Random(random_, 2, 1, {128, 96, 128});
  KeyPool keys(random_, {2, 128, 32, kKvTypes[random_.Int(0, 3)]}, 8);
  for (int32_t t = 0; t < 256; ++t) {
    std::vector<float> both(256);
    for (float& value : both) value = random_.Normal();
    for (int32_t head = 0; head < 2; ++head) keys.Set(t, head, &both[128 * head]);
  }
  const CodeLayout layout{2, 32, 128};
  std::vector<uint8_t> together(8 * layout.BlockBytes()), one_by_one = together;
  {
    const auto backend = Make(4);
    const auto packed = backend->PackEncoder(encoder.weights());
    const KeySpan span{keys.table, {0, 256}};
    backend->EncodeKeys({&span, 1}, keys.pool.data(), keys.layout, *packed, together.data(),
                        layout);
  }
  const auto backend = Make(1);
  const auto packed = backend->PackEncoder(encoder.weights());
  for (int32_t first = 0; first < 256;) {
    const int32_t last = std::min<int32_t>(256, first + static_cast<int32_t>(random_.Int(1, 9)));
    const KeySpan span{keys.table, {first, last}};
    backend->EncodeKeys({&span, 1}, keys.pool.data(), keys.layout, *packed, one_by_one.data(),
                        layout);
    first = last;
  }
  EXPECT_EQ(together, one_by_one);
}

}  // namespace
}  // namespace winnow::kernels
