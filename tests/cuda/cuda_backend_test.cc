// The backend as the engine uses it: operations one after the other on one stream, descriptors of
// many sizes, selections and addresses in shared memory. What each kernel computes has its own test.
#include "kernels/cuda/cuda_backend.h"

#include <array>
#include <numeric>

#include "kernels/attention_state.h"
#include "kernels/embed_rows.h"
#include "kernels/hamming_select.h"
#include "kernels/int4_keys.h"
#include "kernels/row_attention.h"
#include "kernels/top_p.h"
#include "tests/cuda/backend_testing.h"
#include "tests/unit/kernels/sample_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaBackendTest : public CudaBackendFixture {};

TEST_F(CudaBackendTest, SaysWhatItIsAndWhatItRefuses) {
  EXPECT_EQ(backend_->name().rfind("cuda (", 0), 0) << backend_->name();
  EXPECT_GT(backend_->AvailableBytes(), 0);
  const KvLayout good{2, 64, 64, DType::kBF16};
  EXPECT_EQ(backend_->Refusal(good, 8), "");
  for (const DType dtype : kCudaKvTypes) EXPECT_EQ(backend_->Refusal({2, 64, 64, dtype}, 8), "");
  EXPECT_NE(backend_->Refusal({2, 64, 64, DType::kF32}, 8).find("float32"), std::string::npos);
  EXPECT_NE(backend_->Refusal({2, 64, 62, DType::kI8}, 8).find("62 tokens"), std::string::npos);
  EXPECT_NE(backend_->Refusal({2, 72, 64, DType::kBF16}, 8).find("72"), std::string::npos);
  EXPECT_EQ(backend_->Refusal({2, 256, 64, DType::kBF16}, 8), "");
  EXPECT_NE(backend_->Refusal({2, 256, 64, DType::kI8}, 8).find("int8"), std::string::npos);
  EXPECT_NE(backend_->Refusal(good, 66).find("33 query heads"), std::string::npos);
}

TEST_F(CudaBackendTest, MemoryIsZeroAndTooMuchIsRefused) {
  const Buffer memory = backend_->Allocate(100000);
  std::vector<std::byte> bytes(100000, std::byte{1});
  backend_->CopyToHost(memory.data(), bytes.data(), bytes.size());
  EXPECT_EQ(std::count(bytes.begin(), bytes.end(), std::byte{0}), 100000);
  EXPECT_EQ(backend_->Allocate(size_t{1} << 50).data(), nullptr);
  EXPECT_TRUE(backend_->Synchronize()) << "no memory is an answer, not a failure";
  const Buffer shared = backend_->AllocateShared(777);
  EXPECT_EQ(static_cast<const std::byte*>(shared.data())[776], std::byte{0});
}

TEST_F(CudaBackendTest, EmbedsRowsOfATableInTheHostsMemory) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const FileMatrix table(random_, 500, random_.Int(1, 300), dtype);
    std::vector<int32_t> ids(random_.Int(1, 1200));  // more than travel at a time
    for (int32_t& id : ids) id = static_cast<int32_t>(random_.Int(0, 499));
    Matrix out(static_cast<int64_t>(ids.size()), table.host().cols);
    Matrix expected = out;
    const float scale = dtype == DType::kF16 ? 1.0f : 54.545456f;
    EmbedRowsRef(table.host(), ids, scale, expected.tensor());
    auto on_device = Put(out);
    backend_->EmbedRows(table.host(), ids, scale, on_device.tensor);
    on_device.Fetch();
    ASSERT_TRUE(SameBits(out, expected));
    EXPECT_TRUE(out.GuardsIntact());
  }
}

TEST_F(CudaBackendTest, SamplesRowsIntoSharedMemory) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 8; ++round) {
    const int64_t vocab = AnyVocab(random_, 20'000), count = random_.Int(1, 40);
    Matrix logits(count, vocab);
    std::vector<AnySampleRow> any;
    std::vector<SampleRow> rows;
    for (int64_t i = 0; i < count; ++i) {
      FillLogits(random_, {logits.row(i), static_cast<size_t>(vocab)});
      any.push_back(AnySampleRow::Any(random_, vocab));
    }
    for (const AnySampleRow& row : any) rows.push_back(row.row());
    const auto on_device = Put(logits);
    const Buffer shared = backend_->AllocateShared(count * sizeof(SampledToken));
    const auto* sampled = static_cast<SampledToken*>(shared.data());
    backend_->BeginPass();
    backend_->Sample(on_device.tensor, rows, static_cast<SampledToken*>(shared.data()));
    rows.clear();  // and what they point to has been copied
    ASSERT_TRUE(backend_->Synchronize());
    for (int64_t i = 0; i < count; ++i) {
      SCOPED_TRACE(testing::Message() << "row " << i << ", " << vocab << " tokens, " << any[i]);
      ASSERT_NO_FATAL_FAILURE(ExpectSampled(logits, i, any[i], sampled[i]));
    }
  }
}

TEST_F(CudaBackendTest, WhatIsChosenIsPrunedAndAttendedTo) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 8; ++round) {
    const int32_t d = AnyHeadDim(random_), kv_heads = 2, num_queries = 3;
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const KvLayout layout{kv_heads, d, 64, DType::kBF16};
    const CodeLayout code_layout{kv_heads, 64, 128};
    const auto n = static_cast<int32_t>(random_.Int(300, 2000));
    PagedKv kv(random_, layout, {n});
    const auto pool = UploadPool(kv);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d)), p = 0.8f;
    std::vector<uint8_t> codes(kv.num_blocks() * code_layout.BlockBytes());
    for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
    std::vector<uint8_t> query_codes(num_queries * kv_heads * group * code_layout.CodeBytes());
    for (uint8_t& byte : query_codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
    const DeviceArray<uint8_t> codes_on_device(codes), query_codes_on_device(query_codes);
    Matrix q = Matrix::Normal(random_, num_queries, int64_t{kv_heads} * group * d);
    std::vector<RetrievalQuery> queries;
    for (int32_t i = 0; i < num_queries; ++i) {
      queries.push_back(kv.Query(0, i, n - 1 - 7 * i, 4, 32, 100));
    }
    // Four-bit keys, made on the device and by the reference.
    std::vector<std::byte> int4(kv.num_blocks() * Int4BlockBytes(layout), std::byte{0xff});
    const std::vector<KeySpan> span = {{kv.table(0), {0, n}}};
    QuantizeKeysRef(span, kv.pool(), layout, int4.data());
    DeviceArray<std::byte> int4_on_device(int4.size());
    backend_->BeginPass();
    backend_->QuantizeKeys(span, pool.data(), layout, int4_on_device.data());

    auto of_q = Put(q);
    const SharedSelection chosen(*backend_, num_queries, kv_heads, 110);
    backend_->SelectByCodes(queries, query_codes_on_device.data(), group, codes_on_device.data(),
                            code_layout, chosen.view());
    if (round % 2 == 1) {
      ASSERT_TRUE(backend_->Synchronize());  // the candidates travel back then
    }
    OwnedSelection expected(num_queries, kv_heads, 110);
    SelectByCodesRef(queries, query_codes.data(), group, codes.data(), code_layout,
                     expected.view());
    backend_->PruneSelection({.q = of_q.tensor,
                              .queries = queries,
                              .int4_keys = int4_on_device.data(),
                              .layout = layout,
                              .scale = scale,
                              .p = p,
                              .candidates = chosen.view(),
                              .kept = chosen.view()});
    ASSERT_TRUE(backend_->Synchronize());
    ASSERT_TRUE(int4_on_device.Get() == int4);
    PruneSelectionRef(q.tensor(), queries, int4.data(), layout, scale, p, expected.view(),
                      expected.view());
    // One token more or less where the cut is within rounding.
    std::vector<std::vector<const std::byte*>> rows_on_host;
    const Buffer shared = backend_->AllocateShared(size_t{num_queries} * kv_heads * 200 * 8);
    auto** address = static_cast<const std::byte**>(shared.data());
    std::vector<RowList> lists, lists_on_host;
    for (int32_t i = 0; i < num_queries; ++i) {
      for (int32_t head = 0; head < kv_heads; ++head) {
        const auto kept = chosen.Of(i, head), wanted = expected.Of(i, head);
        std::vector<int32_t> differ;
        std::set_symmetric_difference(kept.begin(), kept.end(), wanted.begin(), wanted.end(),
                                      std::back_inserter(differ));
        ASSERT_LE(differ.size(), 1u) << "round " << round;
        auto& on_host = rows_on_host.emplace_back();
        const auto first = address;
        for (const int32_t token : kept) {
          on_host.push_back(kv.Row(0, head, token));
          *address++ = pool.data() + (on_host.back() - static_cast<const std::byte*>(kv.pool()));
        }
        const auto count = static_cast<int32_t>(kept.size());
        lists.push_back({first, count, 0, count});
        lists_on_host.push_back({on_host.data(), count, 0, count});
      }
    }
    const int64_t num_states = int64_t{num_queries} * kv_heads * group;
    std::vector<float> states(num_states * AttentionStateFloats(d));
    AttendRowsRef(q.tensor(), queries, lists_on_host, layout, scale, states.data());
    const Buffer on_device = backend_->Allocate(4 * states.size());
    const Buffer masses = backend_->AllocateShared(4 * num_states);
    auto* states_on_device = static_cast<float*>(on_device.data());
    Matrix out(num_queries, q.cols());
    auto of_out = Put(out);
    backend_->AttendRows({.q = of_q.tensor,
                          .queries = queries,
                          .rows = {.layout = layout, .lists = lists},
                          .scale = scale,
                          .states = states_on_device});
    backend_->StateMasses(states_on_device, num_states, d, static_cast<float*>(masses.data()));
    if (round % 2 == 0) {  // the device finds the rows itself
      std::vector<RetrievalQuery> without_anchors = queries;
      for (RetrievalQuery& query : without_anchors) query.mid = {0, query.position + 1};
      backend_->AttendRows(
          {.q = of_q.tensor,
           .queries = without_anchors,
           .rows = {.layout = layout, .pool = pool.data(), .chosen = chosen.view()},
           .scale = scale,
           .out = of_out.tensor});
    } else {
      backend_->FinishStates(queries, states_on_device, d, nullptr, of_out.tensor);
    }
    of_out.Fetch();
    for (int64_t i = 0; i < num_states; ++i) {
      const float* state = states.data() + i * AttentionStateFloats(d);
      const float mass = static_cast<const float*>(masses.data())[i];
      const float* row = out.row(i / (kv_heads * group)) + i % (kv_heads * group) * d;
      if (state[d + 1] == 0) {
        ASSERT_EQ(mass, -INFINITY);
        ASSERT_EQ(row[0], 0.0f);
        continue;
      }
      ASSERT_NEAR(mass, AttentionStateLogSumExp(state, d), 1e-3);
      for (int32_t c = 0; c < d; ++c) ASSERT_NEAR(row[c], state[c] / state[d + 1], 1e-3);
    }
  }
}

TEST_F(CudaBackendTest, RotatesAndWritesAsOneAfterTheOther) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 15; ++round) {
    const int32_t d = kCudaHeadDims[round % 5];
    const DType dtype = CudaKvTypeOf(d, kCudaKvTypes[round / 5]);
    const int32_t kv_heads = 3, group = static_cast<int32_t>(random_.Int(1, 5));
    const KvLayout layout{kv_heads, d, static_cast<int32_t>(16 * random_.Int(1, 5)), dtype};
    PagedKv kv(random_, layout, {300, 40, 100});
    // Rows 3, 4 and 59 belong to nobody.
    const std::vector<AttentionChunk> chunks = {kv.Chunk(2, 0, 3, 50), kv.Chunk(0, 5, 50, 201),
                                                kv.Chunk(1, 55, 4, 36)};
    const int64_t rows = 60;
    Matrix q = Matrix::Normal(random_, rows, int64_t{kv_heads} * group * d);
    Matrix k = Matrix::Normal(random_, rows, kv_heads * d), v = k;
    Matrix table = Matrix::Normal(random_, rows, 2 * d);  // of q, then of k
    const auto pool = UploadPool(kv), expected_pool = UploadPool(kv);
    Matrix expected_q = q, expected_k = k;
    auto of_q = Put(q), of_k = Put(k), of_v = Put(v), of_table = Put(table);
    auto of_expected_q = Put(expected_q), of_expected_k = Put(expected_k);
    backend_->BeginPass();
    backend_->RopeAndWriteKv({.q = of_q.tensor,
                              .k = of_k.tensor,
                              .v = of_v.tensor,
                              .q_cos_sin = of_table.tensor.ColRange(0, d),
                              .cos_sin = of_table.tensor.ColRange(d, d),
                              .chunks = chunks,
                              .pool = pool.data(),
                              .layout = layout});
    static_cast<Backend&>(*backend_).Backend::RopeAndWriteKv(
        {.q = of_expected_q.tensor,
         .k = of_expected_k.tensor,
         .v = of_v.tensor,
         .q_cos_sin = of_table.tensor.ColRange(0, d),
         .cos_sin = of_table.tensor.ColRange(d, d),
         .chunks = chunks,
         .pool = expected_pool.data(),
         .layout = layout});
    of_q.Fetch();
    of_expected_q.Fetch();
    EXPECT_TRUE(SameBits(q, expected_q));
    EXPECT_TRUE(q.GuardsIntact());
    EXPECT_EQ(pool.Get(), expected_pool.Get()) << "d " << d;
  }
}

// Many selections before the host waits, as the layers of a step make them: their counts arrive
// each at its place, and tokens as the last selection of a place left them.
TEST_F(CudaBackendTest, SelectionsOfAStepArriveTogether) {
  SCOPED_TRACE(Seed());
  const int32_t kv_heads = 2, group = 3, capacity = 300, layers = 12;
  const CodeLayout code_layout{kv_heads, 64, 128};
  const KvLayout layout{kv_heads, 64, 64, DType::kBF16};
  PagedKv kv(random_, layout, {4000});
  std::vector<uint8_t> codes(kv.num_blocks() * code_layout.BlockBytes());
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
  const DeviceArray<uint8_t> codes_on_device(codes);
  const Buffer counts = backend_->AllocateShared(size_t{layers} * 2 * kv_heads * 4);
  const Buffer tokens = backend_->AllocateShared(size_t{2} * 2 * kv_heads * capacity * 4);
  struct Layer {
    std::vector<RetrievalQuery> queries;
    std::vector<uint8_t> query_codes;
    std::vector<DeviceArray<uint8_t>> on_device;
    Selection chosen;
  };
  std::vector<Layer> all(layers);
  backend_->BeginPass();
  for (int32_t i = 0; i < layers; ++i) {
    Layer& layer = all[i];
    const auto num_queries = random_.Int(1, 2);
    for (int64_t query = 0; query < num_queries; ++query) {
      layer.queries.push_back(kv.Query(0, 0, static_cast<int32_t>(random_.Int(700, 3999)), 4, 32,
                                       static_cast<int32_t>(random_.Int(1, capacity))));
    }
    layer.query_codes.resize(num_queries * kv_heads * group * code_layout.CodeBytes());
    for (uint8_t& byte : layer.query_codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
    layer.on_device.emplace_back(layer.query_codes);
    // Two places for tokens, in turn; the last of each is what is seen there.
    layer.chosen = {kv_heads, capacity, static_cast<int32_t*>(counts.data()) + i * 2 * kv_heads,
                    static_cast<int32_t*>(tokens.data()) + i % 2 * (2 * kv_heads * capacity)};
    backend_->SelectByCodes(layer.queries, layer.on_device[0].data(), group, codes_on_device.data(),
                            code_layout, layer.chosen);
  }
  ASSERT_TRUE(backend_->Synchronize());
  for (int32_t i = 0; i < layers; ++i) {
    const Layer& layer = all[i];
    OwnedSelection expected(layer.queries.size(), kv_heads, capacity);
    SelectByCodesRef(layer.queries, layer.query_codes.data(), group, codes.data(), code_layout,
                     expected.view());
    for (size_t query = 0; query < layer.queries.size(); ++query) {
      for (int32_t head = 0; head < kv_heads; ++head) {
        const int32_t count = layer.chosen.count(static_cast<int64_t>(query), head);
        const std::vector<int32_t> wanted = expected.Of(static_cast<int64_t>(query), head);
        ASSERT_EQ(count, static_cast<int32_t>(wanted.size())) << "layer " << i;
        if (i + 2 < layers) continue;
        const int32_t* chosen = layer.chosen.chosen(static_cast<int64_t>(query), head);
        ASSERT_EQ(std::vector<int32_t>(chosen, chosen + count), wanted) << "layer " << i;
      }
    }
  }
}

// What the host chose, as the window's policy does: of no head, of one, of both.
TEST_F(CudaBackendTest, ASelectionOfTheHostIsReadAsItIs) {
  SCOPED_TRACE(Seed());
  constexpr int32_t d = 64, group = 2, n = 400;
  const KvLayout layout{2, d, 16, DType::kBF16};
  PagedKv kv(random_, layout, {n});
  const auto pool = UploadPool(kv);
  Matrix q = Matrix::Normal(random_, 1, 2 * group * d);
  auto of_q = Put(q);
  const RetrievalQuery query = kv.Query(0, 0, n - 1, 16, 100, 5);
  const SharedSelection chosen(*backend_, 1, 2, 5);
  const auto attend = [&](int32_t first, int32_t second) {
    for (int32_t head = 0; head < 2; ++head) {
      chosen.view().count(0, head) = head == 0 ? first : second;
      for (int32_t i = 0; i < 5; ++i) chosen.view().chosen(0, head)[i] = 50 + 10 * i;
    }
    Matrix out(1, q.cols());
    auto of_out = Put(out);
    backend_->BeginPass();
    backend_->AttendRows({.q = of_q.tensor,
                          .queries = {&query, 1},
                          .rows = {.layout = layout, .pool = pool.data(), .chosen = chosen.view()},
                          .scale = 1.0f,
                          .out = of_out.tensor});
    of_out.Fetch();
    return out;
  };
  Matrix none = attend(0, 0), both = attend(5, 5), one = attend(0, 5);
  constexpr size_t kBytes = group * d * 4;
  EXPECT_EQ(std::memcmp(one.row(0), none.row(0), kBytes), 0);
  EXPECT_EQ(std::memcmp(one.row(0) + group * d, both.row(0) + group * d, kBytes), 0);
  EXPECT_NE(std::memcmp(none.row(0) + group * d, both.row(0) + group * d, kBytes), 0);
}

// Descriptors outgrow the memory that they pass through, in the middle of a pass.
TEST_F(CudaBackendTest, ManyDescriptorsInAPass) {
  SCOPED_TRACE(Seed());
  const CodeLayout code_layout{1, 16, 32};
  const int32_t n = 16 * 40000, blocks = 40000;
  std::vector<std::vector<int32_t>> tables(60);
  std::vector<RetrievalQuery> queries;
  std::vector<uint8_t> codes(blocks * code_layout.BlockBytes());
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
  const DeviceArray<uint8_t> codes_on_device(codes);
  for (size_t i = 0; i < tables.size(); ++i) {
    tables[i].resize(blocks);
    std::iota(tables[i].begin(), tables[i].end(), 0);
    random_.Shuffle(tables[i]);
  }
  backend_->BeginPass();
  for (size_t i = 0; i < tables.size(); ++i) {
    const RetrievalQuery query{0, tables[i], n - 1, {16, 16 + 640}, 20};
    std::vector<uint8_t> query_code(4);
    for (uint8_t& byte : query_code) byte = static_cast<uint8_t>(random_.Int(0, 255));
    const DeviceArray<uint8_t> on_device(query_code);
    const SharedSelection chosen(*backend_, 1, 1, 20);
    const std::vector<RetrievalQuery> one = {query};
    backend_->SelectByCodes(one, on_device.data(), 1, codes_on_device.data(), code_layout,
                            chosen.view());
    ASSERT_TRUE(backend_->Synchronize());
    OwnedSelection expected(1, 1, 20);
    SelectByCodesRef(one, query_code.data(), 1, codes.data(), code_layout, expected.view());
    ASSERT_EQ(chosen.Of(0, 0), expected.Of(0, 0)) << "table " << i;
  }
}

// The same between a selection and the attention to what was chosen: it is still known then.
TEST_F(CudaBackendTest, ManyDescriptorsBetweenASelectionAndAttentionToIt) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{1, 64, 16, DType::kBF16};
  const CodeLayout code_layout{1, 16, 32};
  const int32_t blocks = 40000, n = 16 * blocks, calls = 60, k = 20;
  PagedKv kv(random_, layout, {1024});
  const auto pool = UploadPool(kv);
  std::vector<uint8_t> codes(kv.num_blocks() * code_layout.BlockBytes());
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
  std::vector<uint8_t> query_codes(calls * code_layout.CodeBytes());
  for (uint8_t& byte : query_codes) byte = static_cast<uint8_t>(random_.Int(0, 255));
  const DeviceArray<uint8_t> codes_on_device(codes), query_codes_on_device(query_codes);
  std::vector<std::vector<int32_t>> tables(calls + 1, std::vector<int32_t>(blocks));
  for (auto& table : tables) {  // of blocks that come again
    for (int32_t& block : table) block = kv.table(0)[random_.Int(0, 63)];
  }
  Matrix q = Matrix::Normal(random_, calls, 64);
  auto of_q = Put(q);
  const SharedSelection chosen(*backend_, 1, 1, k);
  const auto run = [&](bool through_the_host) {
    Matrix out(calls, 64);
    auto of_out = Put(out);
    backend_->BeginPass();
    for (int32_t i = 0; i < calls; ++i) {
      RetrievalQuery query{i, tables[calls], n - 1, {16, n - 100}, k};
      backend_->SelectByCodes({&query, 1}, query_codes_on_device.data() + 4 * i, 1,
                              codes_on_device.data(), code_layout, chosen.view());
      if (through_the_host) {
        EXPECT_TRUE(backend_->Synchronize());
      }
      query.block_table = tables[i];
      backend_->AttendRows(
          {.q = of_q.tensor,
           .queries = {&query, 1},
           .rows = {.layout = layout, .pool = pool.data(), .chosen = chosen.view()},
           .scale = 0.1f,
           .out = of_out.tensor});
    }
    of_out.Fetch();
    return out;
  };
  const Matrix on_device = run(false), through_the_host = run(true);
  ASSERT_TRUE(SameBits(on_device, through_the_host));
  for (int32_t i = 1; i < calls; ++i) ASSERT_FALSE(SameBits(on_device, i, on_device, i - 1));
}

}  // namespace
}  // namespace winnow::kernels::cuda
