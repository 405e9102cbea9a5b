#include "kernels/cuda/hash_encode.h"

#include <array>

#include "kernels/hamming_select.h"
#include "kernels/hash_encode.h"
#include "tests/cuda/backend_testing.h"
#include "tests/cuda/cached_pool.h"
#include "tests/cuda/random_encoder.h"

namespace winnow::kernels::cuda {
namespace {

struct PackedOnDevice {
  explicit PackedOnDevice(const EncoderWeights& weights) : memory(PackedEncoderBytes(weights)) {
    std::vector<std::byte> host(memory.size());
    encoder = PackEncoder(weights, host.data(), memory.data());
    memory.Set(host);
  }
  DeviceArray<std::byte> memory;
  DeviceEncoder encoder;
};

class CudaHashEncodeTest : public CudaTest {
 protected:
  std::vector<int32_t> AnyWidths(int32_t in, int32_t bits) {
    std::vector<int32_t> widths = {in};
    for (int64_t i = random_.Int(0, 2); i > 0; --i) {
      widths.push_back(static_cast<int32_t>(random_.Int(1, 140)));
    }
    widths.push_back(bits);
    return widths;
  }
  void ExpectKeyCodes(DType dtype, int32_t d, const std::vector<int32_t>& widths, int32_t length) {
    const KvLayout layout{2, d, static_cast<int32_t>(16 * random_.Int(1, 5)), dtype};
    const CodeLayout code_layout{2, layout.block_tokens, widths.back()};
    RandomEncoder encoder(random_, 2, 1, widths);
    const PackedOnDevice packed(encoder.weights());
    PagedKv kv(random_, layout, {length, 40});
    const auto pool = UploadPool(kv);
    DeviceArray<uint8_t> codes(kv.num_blocks() * code_layout.BlockBytes());
    const int32_t first = static_cast<int32_t>(random_.Int(0, length - 1));
    const DeviceSpans spans({{kv.table(0), {first, length}}, {kv.table(1), {3, 40}}});
    WINNOW_CUDA_OK(EncodeKeys(packed.encoder, spans.data(), 2, spans.max_tokens(), pool.data(),
                              layout, codes.data(), code_layout, nullptr));
    const std::vector<uint8_t> actual = codes.Get();
    std::vector<uint8_t> expected(actual.size(), 0xff);
    for (int sequence = 0; sequence < 2; ++sequence) {
      for (int32_t t = sequence == 0 ? first : 3; t < kv.length(sequence); ++t) {
        for (int32_t head = 0; head < 2; ++head) {
          std::vector<float> key(d);
          for (int32_t c = 0; c < d; ++c) key[c] = KeyAt(kv.Row(sequence, head, t), layout, c);
          HashEncodeRef(
              encoder.weights(), head, key.data(),
              &expected[kv.table(sequence)[t / layout.block_tokens] * code_layout.BlockBytes() +
                        head * code_layout.HeadBytes() +
                        t % layout.block_tokens * code_layout.CodeBytes()]);
        }
      }
    }
    ASSERT_EQ(actual, expected) << "d " << d << " stages " << widths.size() - 1 << " bits "
                                << widths.back() << " length " << length << " of "
                                << DTypeName(dtype);
  }
};

TEST_F(CudaHashEncodeTest, CodesOfKeysAreTheReferencesBits) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 15; ++round) {
    const int32_t d = kCudaHeadDims[round % 5];
    const DType dtype = CudaKvTypeOf(d, kCudaKvTypes[round / 5]);
    for (const int32_t bits : {32, 64, 128, 256}) {
      ExpectKeyCodes(dtype, d, AnyWidths(d, bits), static_cast<int32_t>(random_.Int(1, 8)));
      ExpectKeyCodes(dtype, d, AnyWidths(d, bits), static_cast<int32_t>(random_.Int(9, 300)));
    }
    ExpectKeyCodes(dtype, d, {d, 128}, 500);                // hata, lsh
    ExpectKeyCodes(dtype, d, {d, 128, 128}, 200);           // spotlight
    ExpectKeyCodes(dtype, d, {d, 128, 128, 128, 32}, 200);  // hashattention, and one stage more
    ExpectKeyCodes(dtype, d, {d, 600, 1024}, 20);           // wide
  }
}

TEST_F(CudaHashEncodeTest, CodesOfQueriesAreTheReferencesBits) {
  SCOPED_TRACE(Seed());
  for (int32_t group = 1; group <= 9; ++group) {
    for (const bool together : {false, true}) {
      const int32_t d = AnyHeadDim(random_), bits = 32 << random_.Int(0, 3);
      const int32_t per_input = together ? group : 1;
      std::vector<int32_t> widths = AnyWidths(per_input * d, per_input * bits);
      RandomEncoder encoder(random_, 3, per_input, widths);
      const PackedOnDevice packed(encoder.weights());
      ASSERT_EQ(packed.encoder.bits(), bits);
      Matrix q = Matrix::Normal(random_, 7, int64_t{3} * group * d);
      const auto q_on_device = Upload(q);
      std::vector<RetrievalQuery> queries(4);
      for (auto& query : queries) query.row = static_cast<int32_t>(random_.Int(0, 6));
      const DeviceQueries on_device(queries);
      DeviceArray<uint8_t> codes(size_t{4} * 3 * group * bits / 8);
      WINNOW_CUDA_OK(EncodeQueries(packed.encoder, on_device.data(), 4, group, q_on_device.data(),
                                   q.tensor().stride, d, codes.data(), nullptr));
      std::vector<uint8_t> expected(codes.size());
      const int32_t inputs = group / per_input;
      for (int i = 0; i < 4; ++i) {
        for (int32_t head = 0; head < 3; ++head) {
          for (int32_t g = 0; g < inputs; ++g) {
            HashEncodeRef(encoder.weights(), head,
                          q.row(queries[i].row) + (head * inputs + g) * widths[0],
                          &expected[((i * 3 + head) * inputs + g) * widths.back() / 8]);
          }
        }
      }
      ASSERT_EQ(codes.Get(), expected) << "group " << group << " together " << together;
    }
  }
}

// Every bfloat16 goes through silu: an identity in front of it, and behind it a code whose bits
// compare with thresholds that only the right value passes: silu(x) - expected >= 0 and its
// negative.
TEST_F(CudaHashEncodeTest, SiluIsTheTablesForEveryBfloat16) {
  constexpr int32_t d = 64, kLength = 1024;
  const KvLayout layout{1, d, 64, DType::kBF16};
  const CodeLayout code_layout{1, 64, 128};
  PagedKv kv(random_, layout, {kLength});
  RandomEncoder identity(random_, 1, 1, {d, d, 2 * d});
  auto& stages = identity.weights().stages;
  std::vector<uint16_t> pass(d * d), both(2 * d * d);
  std::vector<float> none(d), thresholds(2 * d, 0.0f);
  for (int32_t c = 0; c < d; ++c) {
    pass[c * d + c] = 0x3f80;
    both[c * d + c] = 0x3f80;        // bit c: silu(x_c) - expected_c >= 0
    both[(d + c) * d + c] = 0xbf80;  // bit d + c: expected_c - silu(x_c) >= 0
  }
  stages[0] = {pass, none, d, d};
  stages[1] = {both, thresholds, d, 2 * d};
  // Thresholds belong to the encoder, so each set of 64 values takes a call.
  for (uint32_t first = 0; first < 65536; first += d) {
    if ((first & 0x7f80u) == 0x7f80u) continue;  // infinities and NaN
    std::vector<BF16> row(d);
    for (int32_t c = 0; c < d; ++c) {
      row[c] = {static_cast<uint16_t>(first + c)};
      const float expected = ToFloat(BF16{SiluTable()[first + c]});
      thresholds[c] = -expected;
      thresholds[d + c] = expected;
    }
    if (first % 4096 != 0 && first / 64 % 16 != 5) continue;  // a sixteenth of them, spread
    std::memcpy(kv.Row(0, 0, 0), row.data(), 2 * d);
    stages[1].bias = thresholds;
    const PackedOnDevice packed(identity.weights());
    const auto pool = UploadPool(kv);
    DeviceArray<uint8_t> codes(kv.num_blocks() * code_layout.BlockBytes());
    const DeviceSpans spans({{kv.table(0), {0, 1}}});
    WINNOW_CUDA_OK(EncodeKeys(packed.encoder, spans.data(), 1, 1, pool.data(), layout, codes.data(),
                              code_layout, nullptr));
    const std::vector<uint8_t> all = codes.Get();
    const uint8_t* code = &all[kv.table(0)[0] * code_layout.BlockBytes()];
    for (int i = 0; i < 16; ++i) {
      ASSERT_EQ(code[i], 0xff) << "bfloat16 bits from " << first << ", byte " << i;
    }
  }
}

// Tokens that go into a pinned pool through its cache are one call of that: none of them takes the slot of another.
TEST_F(CudaHashEncodeTest, TokensIntoACachedPoolAreOneCallOfItsCache) {
  SCOPED_TRACE(Seed());
  const int32_t d = 64, kv_heads = 2, group = 2, bits = 32, tokens = 6;
  const KvLayout layout{kv_heads, d, 16, AnyCudaKvType(random_)};
  RandomEncoder encoder(random_, kv_heads, 1, {d, bits});
  const PackedOnDevice packed(encoder.weights());
  for (const int32_t slots : {0, 5, 12, 1000}) {
    SCOPED_TRACE(testing::Message() << slots << " slots");
    CachedPool pool(random_, layout, tokens, slots);
    DeviceArray<int32_t> table(std::vector<int32_t>{0, 1, 2, 3, 4, 5});
    std::vector<DeviceChunk> chunks;
    for (int32_t i = 0; i < tokens; ++i) chunks.push_back({table.data(), i, 1, 16 * i + 3, 0});
    const DeviceArray<DeviceChunk> on_device(chunks);
    Matrix qkv = Matrix::Normal(random_, tokens, int64_t{kv_heads} * (group + 2) * d);
    Matrix rotation = Matrix::Normal(random_, tokens, d);
    const auto of_qkv = Upload(qkv), of_rotation = Upload(rotation);
    DeviceArray<uint8_t> codes(tokens * CodeLayout{kv_heads, 16, bits}.BlockBytes());
    DeviceArray<uint8_t> query_codes(tokens * kv_heads * group * bits / 8);
    const int64_t width = int64_t{kv_heads} * d, stride = qkv.tensor().stride;
    const TokenArgs args{{of_qkv.data(), tokens, group * width, stride},
                         {of_qkv.data() + group * width, tokens, width, stride},
                         {of_qkv.data() + (group + 1) * width, tokens, width, stride},
                         {of_rotation.data(), tokens, d, rotation.tensor().stride},
                         {of_rotation.data(), tokens, d, rotation.tensor().stride},
                         on_device.data(),
                         tokens,
                         pool.pool(),
                         layout,
                         codes.data(),
                         {kv_heads, 16, bits},
                         query_codes.data(),
                         &pool.cache()};
    for (uint32_t call = pool.State().call; call < 5; ++call) {
      ASSERT_EQ(pool.State().call, call);
      WINNOW_CUDA_OK(EncodeTokens(args, packed.encoder, packed.encoder, nullptr));
      WINNOW_CUDA_OK(cudaDeviceSynchronize());
      ASSERT_NO_FATAL_FAILURE(pool.ExpectConsistent());
    }
    int32_t cached = 0;
    for (const int32_t slot : pool.Map()) cached += slot >= 0;
    EXPECT_EQ(cached, std::min(slots, tokens * kv_heads));
  }
}

// A decode step's rotation, KV write and encodings: what they give must not depend on whether they
// came as one launch, nor on what came between them.
class CudaEncodeStepTest : public CudaBackendFixture {
 protected:
  struct Given {
    std::vector<float> q;
    std::vector<std::byte> pool;
    std::vector<uint8_t> codes, query_codes;
    bool operator==(const Given&) const = default;
  };
  struct Step {
    KvLayout layout;
    CodeLayout code_layout;
    PagedKv kv;
    int32_t group;
    Matrix qkv, table;  // of rotations: of q, then of k
    std::vector<AttentionChunk> chunks;
    std::vector<KeySpan> spans;
    std::vector<RetrievalQuery> queries;
  };
  enum class Between { kNothing, kAfterRotation, kAfterKeys, kQueriesInAnotherOrder };

  Given Run(Step& step, const PackedEncoder& keys, const PackedEncoder& of_queries,
            Between between) {
    const int64_t q_width = int64_t{step.layout.kv_heads} * step.group * step.layout.head_dim;
    const int64_t kv_width = int64_t{step.layout.kv_heads} * step.layout.head_dim;
    Matrix values = step.qkv;
    auto qkv = Put(values), table = Put(step.table);
    const auto pool = UploadPool(step.kv);
    DeviceArray<uint8_t> codes(step.kv.num_blocks() * step.code_layout.BlockBytes());
    DeviceArray<uint8_t> query_codes(step.queries.size() * step.layout.kv_heads * step.group *
                                     step.code_layout.CodeBytes());
    const Tensor q = qkv.tensor.ColRange(0, q_width);
    std::vector<RetrievalQuery> queries = step.queries;
    if (between == Between::kQueriesInAnotherOrder) std::reverse(queries.begin(), queries.end());
    backend_->BeginPass();
    for (int layer = 0; layer < 2; ++layer) {  // descriptors travel with the first
      if (layer == 1) {
        // As it was: a rotation must not be done twice.
        WINNOW_CUDA_OK(cudaMemcpy(qkv.values.data(), step.qkv.tensor().data, qkv.values.bytes(),
                                  cudaMemcpyHostToDevice));
        codes.Poison();
        query_codes.Poison();
      }
      backend_->RopeAndWriteKv(
          {.q = q,
           .k = qkv.tensor.ColRange(q_width, kv_width),
           .v = qkv.tensor.ColRange(q_width + kv_width, kv_width),
           .q_cos_sin = table.tensor.ColRange(0, step.layout.head_dim),
           .cos_sin = table.tensor.ColRange(step.layout.head_dim, step.layout.head_dim),
           .chunks = step.chunks,
           .pool = pool.data(),
           .layout = step.layout});
      if (between == Between::kAfterRotation) {
        EXPECT_TRUE(backend_->Synchronize());
      }
      backend_->EncodeKeys(step.spans, pool.data(), step.layout, keys, codes.data(),
                           step.code_layout);
      if (between == Between::kAfterKeys) {
        EXPECT_TRUE(backend_->Synchronize());
      }
      backend_->EncodeQueries(q, queries, of_queries, query_codes.data());
      EXPECT_TRUE(backend_->Synchronize());
    }
    qkv.Fetch();
    Given given{{}, pool.Get(), codes.Get(), query_codes.Get()};
    for (int64_t row = 0; row < values.rows(); ++row) {
      given.q.insert(given.q.end(), values.row(row), values.row(row) + q_width);
    }
    if (between == Between::kQueriesInAnotherOrder) {
      const size_t each = given.query_codes.size() / queries.size();
      std::vector<uint8_t> turned;
      for (size_t i = queries.size(); i-- > 0;) {
        turned.insert(turned.end(), given.query_codes.begin() + static_cast<int64_t>(i * each),
                      given.query_codes.begin() + static_cast<int64_t>((i + 1) * each));
      }
      given.query_codes = turned;
    }
    return given;
  }
};

TEST_F(CudaEncodeStepTest, OneLaunchGivesWhatThreeGive) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const int32_t d = AnyHeadDim(random_), kv_heads = static_cast<int32_t>(random_.Int(1, 3));
    const auto group = static_cast<int32_t>(random_.Int(1, 9)), bits = 32 << random_.Int(0, 2);
    const bool together = random_.Int(0, 2) == 0;
    const KvLayout layout{kv_heads, d, static_cast<int32_t>(16 * random_.Int(1, 5)),
                          kCudaKvTypes[round % 3]};
    std::vector<int32_t> lengths;
    for (int64_t i = random_.Int(1, 5); i > 0; --i) {
      lengths.push_back(static_cast<int32_t>(random_.Int(1, 300)));
    }
    const auto count = static_cast<int32_t>(lengths.size());
    Step step{layout,
              {kv_heads, layout.block_tokens, bits},
              PagedKv(random_, layout, lengths),
              group,
              Matrix::Normal(random_, count + 2, int64_t{kv_heads} * (group + 2) * d),
              Matrix::Normal(random_, count + 2, 2 * d),
              {},
              {},
              {}};
    for (int32_t i = 0; i < count; ++i) {
      const int32_t last = lengths[i] - 1;
      step.chunks.push_back(step.kv.Chunk(i, i + 1, 1, last));
      step.spans.push_back({step.kv.table(i), {last, last + 1}});
      step.queries.push_back(step.kv.Query(i, i + 1, last, 4, 32, 8));
    }
    std::vector<int32_t> key_widths = {d}, query_widths = {together ? group * d : d};
    for (int64_t i = random_.Int(0, 2); i > 0; --i) {
      key_widths.push_back(static_cast<int32_t>(random_.Int(1, 140)));
      query_widths.push_back(static_cast<int32_t>(random_.Int(1, 140)));
    }
    key_widths.push_back(bits);
    query_widths.push_back(together ? group * bits : bits);
    RandomEncoder key_encoder(random_, kv_heads, 1, key_widths);
    RandomEncoder query_encoder(random_, kv_heads, together ? group : 1, query_widths);
    const auto keys = backend_->PackEncoder(key_encoder.weights());
    const auto queries = backend_->PackEncoder(query_encoder.weights());
    ASSERT_NE(keys, nullptr);
    ASSERT_NE(queries, nullptr);
    const Given at_once = Run(step, *keys, *queries, Between::kNothing);
    for (const Between between :
         {Between::kAfterRotation, Between::kAfterKeys, Between::kQueriesInAnotherOrder}) {
      const Given given = Run(step, *keys, *queries, between);
      EXPECT_EQ(given.q, at_once.q) << "round " << round;
      EXPECT_TRUE(given.pool == at_once.pool) << "round " << round;
      EXPECT_EQ(given.codes, at_once.codes) << "round " << round;
      EXPECT_EQ(given.query_codes, at_once.query_codes)
          << "round " << round << ": G " << group << ", d " << d << ", together " << together;
    }
  }
}

// A scan may read codes before the kernels ahead of it have ended, but none that this pass makes: the
// step's own token, whose key is the query, is chosen when mid has it.
TEST_F(CudaEncodeStepTest, AStepChoosesAmongCodesOfEarlierPassesAndItsOwn) {
  SCOPED_TRACE(Seed());
  const int32_t d = 64, kv_heads = 2, group = 4, k = 60, n = 3000, steps = 80;
  const KvLayout layout{kv_heads, d, 64, DType::kBF16};
  const CodeLayout code_layout{kv_heads, 64, 128};
  PagedKv kv(random_, layout, {n});
  const auto pool = UploadPool(kv);
  RandomEncoder encoder(random_, kv_heads, 1, {d, 128, 128});
  const auto packed = backend_->PackEncoder(encoder.weights());
  ASSERT_NE(packed, nullptr);
  DeviceArray<uint8_t> codes(kv.num_blocks() * code_layout.BlockBytes());
  DeviceArray<uint8_t> query_codes(kv_heads * group * code_layout.CodeBytes());
  const SharedSelection chosen(*backend_, 1, kv_heads, k);
  for (int32_t step = 0; step < steps; ++step) {
    const int32_t position = n - steps + step;
    Matrix q(1, int64_t{kv_heads} * group * d);
    for (int32_t head = 0; head < kv_heads; ++head) {
      for (int32_t c = 0; c < d; ++c) {
        BF16 value;
        std::memcpy(&value, kv.Row(0, head, position) + 2 * c, 2);
        for (int32_t g = 0; g < group; ++g) q.row(0)[(head * group + g) * d + c] = ToFloat(value);
      }
    }
    auto of_q = Put(q);
    const int32_t window = step % 2 == 0 ? 0 : 30;
    const std::vector<RetrievalQuery> queries = {
        {0, kv.table(0), position, {4, position + 1 - window}, k}};
    const std::vector<KeySpan> spans = {{kv.table(0), {step == 0 ? 0 : position, position + 1}}};
    backend_->BeginPass();
    for (int layer = 0; layer < 2; ++layer) {  // the second says nothing that the first did not say
      backend_->EncodeKeys(spans, pool.data(), layout, *packed, codes.data(), code_layout);
      backend_->EncodeQueries(of_q.tensor, queries, *packed, query_codes.data());
      backend_->SelectByCodes(queries, query_codes.data(), group, codes.data(), code_layout,
                              chosen.view());
    }
    ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
    OwnedSelection expected(1, kv_heads, k);
    const auto of_codes = codes.Get(), of_queries = query_codes.Get();
    SelectByCodesRef(queries, of_queries.data(), group, of_codes.data(), code_layout,
                     expected.view());
    for (int32_t head = 0; head < kv_heads; ++head) {
      const std::vector<int32_t> tokens = chosen.Of(0, head);
      ASSERT_EQ(tokens, expected.Of(0, head)) << "step " << step;
      EXPECT_EQ(tokens.back() == position, window == 0) << "step " << step;
    }
  }
}

// What no launch would take is refused where weights are packed, not in a step.
TEST_F(CudaEncodeStepTest, ShapesThatNoLaunchTakesAreRefused) {
  for (const std::vector<int32_t>& widths :
       {std::vector<int32_t>{64, 3000, 128}, {64, 48}, {64, 64, 64, 64, 64, 64}}) {
    RandomEncoder encoder(random_, 1, 1, widths);
    EXPECT_EQ(backend_->PackEncoder(encoder.weights()), nullptr) << widths[1];
  }
  RandomEncoder widest(random_, 1, 1, {64, 1536, 128});
  EXPECT_NE(backend_->PackEncoder(widest.weights()), nullptr);
  EXPECT_TRUE(backend_->Synchronize()) << "a refusal is no failure";
}

}  // namespace
}  // namespace winnow::kernels::cuda
