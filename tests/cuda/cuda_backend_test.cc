// The backend as the engine uses it: operations one after the other on one stream, descriptors of
// many sizes, selections and addresses in shared memory. What each kernel computes has its own test.
#include "kernels/cuda/cuda_backend.h"

#include <numeric>

#include "kernels/attention_state.h"
#include "kernels/embed_rows.h"
#include "kernels/hamming_select.h"
#include "kernels/int4_keys.h"
#include "kernels/row_attention.h"
#include "kernels/top_p.h"
#include "tests/cuda/backend_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaBackendTest : public CudaBackendFixture {};

TEST_F(CudaBackendTest, SaysWhatItIsAndWhatItRefuses) {
  EXPECT_EQ(backend_->name().rfind("cuda (", 0), 0) << backend_->name();
  EXPECT_GT(backend_->AvailableBytes(), 0);
  const KvLayout good{2, 64, 64, DType::kBF16};
  EXPECT_EQ(backend_->Refusal(good, 8), "");
  EXPECT_NE(backend_->Refusal({2, 64, 64, DType::kF32}, 8).find("float32"), std::string::npos);
  EXPECT_NE(backend_->Refusal({2, 72, 64, DType::kBF16}, 8).find("72"), std::string::npos);
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
    EmbedRowsRef(table.host(), ids, expected.tensor());
    auto on_device = Put(out);
    backend_->EmbedRows(table.host(), ids, on_device.tensor);
    on_device.Fetch();
    ASSERT_TRUE(SameBits(out, expected));
    EXPECT_TRUE(out.GuardsIntact());
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
    backend_->PruneSelection(of_q.tensor, queries, int4_on_device.data(), layout, scale, p,
                             chosen.view(), chosen.view());
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
    backend_->AttendRows(of_q.tensor, queries, lists, layout, scale, states_on_device);
    if (round % 2 == 0) {  // the device finds the rows itself
      std::vector<RetrievalQuery> without_anchors = queries;
      for (RetrievalQuery& query : without_anchors) query.mid = {0, query.position + 1};
      ASSERT_TRUE(backend_->AttendChosen(of_q.tensor, without_anchors, chosen.view(), pool.data(),
                                         layout, scale, states_on_device));
    }
    backend_->StateMasses(states_on_device, num_states, d, static_cast<float*>(masses.data()));
    backend_->FinishStates(queries, states_on_device, d, of_out.tensor);
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

}  // namespace
}  // namespace winnow::kernels::cuda
