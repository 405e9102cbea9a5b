// KV in frames of pinned host memory (SharedKvShape: of_frames): where a layer's blocks lie is said anew in
// each of its operations, and the index has places of its own.
#include <algorithm>
#include <numeric>

#include "tests/cuda/backend_testing.h"
#include "tests/cuda/random_encoder.h"

namespace winnow::kernels::cuda {
namespace {

class CudaFramesTest : public CudaBackendFixture {};

TEST_F(CudaFramesTest, AnIndexTableSaysWhereTheIndexLies) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 6; ++round) {
    const KvLayout layout{2, AnyHeadDim(random_), 32, DType::kBF16};
    constexpr int32_t kLength = 150, kBlocks = 5;
    PagedKv kv(random_, layout, {kLength});
    const auto pool = UploadPool(kv);
    const std::vector<int32_t> places = {3, 0, 4, 2, 1};
    const auto expect_moved = [&](size_t block_bytes, auto&& index) {
      DeviceArray<std::byte> plain(kv.num_blocks() * block_bytes), moved(kBlocks * block_bytes);
      const KeySpan at_kv{kv.table(0), {0, kLength}}, at_places{kv.table(0), {0, kLength}, places};
      backend_->BeginPass();
      index(at_kv, plain.data());
      index(at_places, moved.data());
      ASSERT_TRUE(backend_->Synchronize());
      const auto of_plain = plain.Get(), of_moved = moved.Get();
      for (int32_t block = 0; block < kBlocks; ++block) {
        const auto* from = of_plain.data() + kv.table(0)[block] * block_bytes;
        const auto used =
            block == kBlocks - 1 ? size_t{16} : block_bytes;  // the rest is not written
        EXPECT_TRUE(std::equal(from, from + used, of_moved.data() + places[block] * block_bytes))
            << "block " << block;
      }
    };
    expect_moved(BoundBlockBytes(layout), [&](const KeySpan& span, std::byte* to) {
      backend_->BoundKeys({&span, 1}, pool.data(), layout, to);
    });
    expect_moved(Int4BlockBytes(layout), [&](const KeySpan& span, std::byte* to) {
      backend_->QuantizeKeys({&span, 1}, pool.data(), layout, to);
    });
    const CodeLayout code_layout{layout.kv_heads, layout.block_tokens, 64};
    RandomEncoder encoder(random_, 2, 1, {layout.head_dim, 64});
    const auto packed = backend_->PackEncoder(encoder.weights());
    ASSERT_NE(packed, nullptr);
    expect_moved(code_layout.BlockBytes(), [&](const KeySpan& span, std::byte* to) {
      backend_->EncodeKeys({&span, 1}, pool.data(), layout, *packed, to, code_layout);
    });
  }
}

// Prompts and steps of two sequences in three layers, nobody waiting between layers, with the tables of all
// layers in the same memory: as with a pool on the device for each layer, to the bit.
TEST_F(CudaFramesTest, LayersThatShareFramesHaveTheBitsOfLayersWithPlaces) {
  SCOPED_TRACE(Seed());
  constexpr int32_t kLayers = 3, kSequences = 2, kBlocks = 6, kTokens = 64;
  constexpr int32_t kPlaces = kSequences * kBlocks, kFrames = kLayers * kPlaces + 5;
  for (int round = 0; round < 6; ++round) {
    const int32_t d = AnyHeadDim(random_), kv_heads = static_cast<int32_t>(random_.Int(1, 3));
    const auto group = static_cast<int32_t>(random_.Int(1, 5));
    const KvLayout layout{kv_heads, d, kTokens, kCudaKvTypes[round % 3]};
    const CodeLayout code_layout{kv_heads, kTokens, 128};
    const int64_t q_width = int64_t{kv_heads} * group * d, kv_width = int64_t{kv_heads} * d;
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const Buffer frames = backend_->AllocateShared(kFrames * layout.BlockBytes());
    const Buffer places = backend_->Allocate(size_t{kLayers} * kPlaces * layout.BlockBytes());
    auto* const host_pool = static_cast<std::byte*>(frames.data());
    std::byte* const of_frames[] = {host_pool};
    std::string why;
    const SharedKvShape shape{.layout = layout,
                              .num_pools = 1,
                              .num_blocks = kFrames,
                              .max_context = kBlocks * kTokens,
                              .max_batch_tokens = 256,
                              .of_frames = true};
    const auto kv = backend_->ShareKv(shape, of_frames, &why);
    ASSERT_NE(kv, nullptr) << why;
    EXPECT_EQ(kv->sizes().cache_bytes + kv->sizes().table_bytes, 0u);
    EXPECT_EQ(kv->sizes().total(), backend_->SizeSharedKv(shape).total());
    const size_t code_bytes = size_t{kPlaces} * code_layout.BlockBytes();
    DeviceArray<uint8_t> frame_codes(kLayers * code_bytes), place_codes(kLayers * code_bytes);
    frame_codes.Poison();
    place_codes.Poison();
    RandomEncoder key_encoder(random_, kv_heads, 1, {d, 128});
    RandomEncoder query_encoder(random_, kv_heads, 1, {d, 128});
    const auto keys = backend_->PackEncoder(key_encoder.weights());
    const auto of_queries = backend_->PackEncoder(query_encoder.weights());
    ASSERT_TRUE(keys != nullptr && of_queries != nullptr);

    std::vector<int32_t> numbers(kFrames);
    std::iota(numbers.begin(), numbers.end(), 0);
    random_.Shuffle(numbers);
    const auto frame_of = [&](int32_t layer, int32_t block) {
      return numbers[layer * kPlaces + block];
    };
    std::vector<int32_t> blocks[kSequences], tables[kSequences];
    for (int32_t s = 0; s < kSequences; ++s) {
      for (int32_t i = 0; i < kBlocks; ++i) blocks[s].push_back(i * kSequences + s);
      tables[s].resize(kBlocks);
    }
    const size_t layer_addresses = size_t{kSequences} * kv_heads * kBlocks * kTokens;
    const Buffer addresses = backend_->AllocateShared(kLayers * layer_addresses * sizeof(void*));
    int32_t lengths[kSequences] = {};
    for (int pass = 0; pass < 6; ++pass) {
      const bool decodes = pass >= 2;
      std::vector<AttentionChunk> chunks;
      std::vector<RetrievalQuery> queries;
      int32_t rows = 0;
      for (int32_t s = 0; s < kSequences; ++s) {
        const auto count = decodes ? int32_t{1} : static_cast<int32_t>(random_.Int(60, 120));
        chunks.push_back({rows, count, lengths[s], blocks[s]});
        queries.push_back({rows, blocks[s], lengths[s] + count - 1, {0, 0}, 0});
        lengths[s] += count;
        rows += count;
      }
      Matrix qkv = Matrix::Normal(random_, rows, q_width + 2 * kv_width);
      Matrix cos_sin = Matrix::Normal(random_, rows, d);
      auto of_cos_sin = Put(cos_sin);
      // What each way gives of each layer.
      std::vector<Matrix> dense[2], chosen[2];
      std::vector<std::vector<uint8_t>> query_codes[2];
      for (const bool in_frames : {true, false}) {
        std::vector<Matrix> values(kLayers, qkv);
        std::vector<OnDevice> of_values, of_dense, of_chosen;
        std::vector<DeviceArray<uint8_t>> of_codes;
        dense[in_frames].assign(kLayers, Matrix(rows, q_width));
        chosen[in_frames].assign(kLayers, Matrix(rows, q_width));
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          of_values.push_back(Put(values[layer]));
          of_dense.push_back(Put(dense[in_frames][layer]));
          of_chosen.push_back(Put(chosen[in_frames][layer]));
          of_codes.emplace_back(queries.size() * kv_heads * group * code_layout.CodeBytes());
        }
        DeviceArray<float> states(queries.size() * kv_heads * group * (d + 2));
        backend_->BeginPass();
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          std::byte* const pool = in_frames ? host_pool
                                            : static_cast<std::byte*>(places.data()) +
                                                  size_t{kPlaces} * layer * layout.BlockBytes();
          backend_->ForgetTables();
          EXPECT_EQ(backend_->FindsRows(pool), !in_frames);
          std::vector<AttentionChunk> of_layer = chunks;
          std::vector<KeySpan> spans;
          for (int32_t s = 0; s < kSequences; ++s) {
            for (int32_t i = 0; i < kBlocks; ++i) {
              tables[s][i] = in_frames ? frame_of(layer, blocks[s][i]) : blocks[s][i];
            }
            of_layer[s].block_table = tables[s];
            spans.push_back({tables[s],
                             {chunks[s].position, chunks[s].position + chunks[s].num_tokens},
                             blocks[s]});
          }
          const Tensor& x = of_values[layer].tensor;
          const Tensor q = x.ColRange(0, q_width);
          backend_->RopeAndWriteKv({.q = q,
                                    .k = x.ColRange(q_width, kv_width),
                                    .v = x.ColRange(q_width + kv_width, kv_width),
                                    .q_cos_sin = of_cos_sin.tensor,
                                    .cos_sin = of_cos_sin.tensor,
                                    .chunks = of_layer,
                                    .pool = pool,
                                    .layout = layout});
          uint8_t* const codes =
              (in_frames ? frame_codes : place_codes).data() + layer * code_bytes;
          backend_->EncodeKeys(spans, pool, layout, *keys, codes, code_layout);
          backend_->EncodeQueries(q, queries, *of_queries, of_codes[layer].data());
          backend_->Attend(q, of_layer, pool, layout, scale, of_dense[layer].tensor);
          // Every third row.
          auto* row = static_cast<const std::byte**>(addresses.data()) + layer * layer_addresses;
          std::vector<RowList> lists;
          for (int32_t s = 0; s < kSequences; ++s) {
            for (int32_t head = 0; head < kv_heads; ++head) {
              RowList list{.rows = row};
              for (int32_t t = 0; t <= queries[s].position; t += 3) {
                *row++ = pool + layout.RowOffset(tables[s][t / kTokens], head, t % kTokens);
                ++list.count;
              }
              lists.push_back(list);
            }
          }
          backend_->AttendRows({.q = q,
                                .queries = queries,
                                .rows = {.layout = layout, .lists = lists},
                                .scale = scale,
                                .states = states.data()});
          backend_->FinishStates(queries, states.data(), d, nullptr, of_chosen[layer].tensor);
        }
        ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
        for (int32_t layer = 0; layer < kLayers; ++layer) {
          of_dense[layer].Fetch();
          of_chosen[layer].Fetch();
          query_codes[in_frames].push_back(of_codes[layer].Get());
        }
      }
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        SCOPED_TRACE(testing::Message() << "pass " << pass << ", layer " << layer);
        EXPECT_TRUE(SameBits(dense[0][layer], dense[1][layer]));
        EXPECT_TRUE(SameBits(chosen[0][layer], chosen[1][layer]));
        EXPECT_EQ(query_codes[0][layer], query_codes[1][layer]);
      }
      EXPECT_EQ(frame_codes.Get(), place_codes.Get()) << "pass " << pass;
    }
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
