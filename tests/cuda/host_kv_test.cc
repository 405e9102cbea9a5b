// KV in pinned host memory gives the bits of KV on the device: two pools of the same backend, written
// and attended to by the same calls.
#include <cstring>
#include <numeric>

#include "kernels/attention_state.h"
#include "kernels/transform_code.h"
#include "tests/cuda/backend_testing.h"
#include "tests/cuda/random_encoder.h"
#include "tests/unit/kernels/random_transform.h"

namespace winnow::kernels::cuda {
namespace {

class CudaHostKvTest : public CudaBackendFixture {
 protected:
  // Layers in host memory, and the same ones on the device.
  struct Pools {
    Pools(CudaBackend& backend, const KvLayout& layout, int32_t num_blocks, int32_t max_context,
          int64_t cache_rows, int32_t layers = 2)
        : layer_bytes(num_blocks * layout.BlockBytes()),
          host(backend.AllocateShared(layers * layer_bytes)),
          device(backend.Allocate(layers * layer_bytes)) {
      std::vector<std::byte*> of_layers;
      for (int32_t layer = 0; layer < layers; ++layer) of_layers.push_back(Host(layer));
      const SharedKvShape shape{
          .layout = layout,
          .num_pools = layers,
          .num_blocks = num_blocks,
          .max_context = max_context,
          .max_batch_tokens = 64,
          .cache_bytes = static_cast<size_t>(
              layers * cache_rows * (SlotRowBytes(static_cast<int64_t>(layout.RowBytes())) + 8))};
      std::string why;
      kv = backend.ShareKv(shape, of_layers, &why);
      EXPECT_NE(kv, nullptr) << why;
      EXPECT_EQ(kv->sizes().cache_rows,
                layers * std::min<int64_t>(cache_rows,
                                           num_blocks * layout.kv_heads * layout.block_tokens));
      EXPECT_EQ(kv->sizes().total(), backend.SizeSharedKv(shape).total());
      reads = backend.AllocateShared(64 * sizeof(SharedKvReads));
    }
    std::byte* Host(int layer) const {
      return static_cast<std::byte*>(host.data()) + layer * layer_bytes;
    }
    std::byte* Device(int layer) const {
      return static_cast<std::byte*>(device.data()) + layer * layer_bytes;
    }
    SharedKvReads Read(CudaBackend& backend) const {
      const std::span of_rows(static_cast<SharedKvReads*>(reads.data()), 64);
      kv->TakeReads(of_rows);
      EXPECT_TRUE(backend.Synchronize());
      SharedKvReads sum;
      for (const SharedKvReads& row : of_rows) {
        sum.cached += row.cached;
        sum.fetched += row.fetched;
        sum.in_place += row.in_place;
      }
      return sum;
    }

    size_t layer_bytes;
    Buffer host, device, reads;
    std::unique_ptr<SharedKv> kv;
  };
  void ExpectSame(OnDevice& a, Matrix& of_a, OnDevice& b, Matrix& of_b) {
    a.Fetch();
    b.Fetch();
    ASSERT_TRUE(SameBits(of_a, of_b));
  }
};

TEST_F(CudaHostKvTest, StepsHaveTheBitsOfKvOnTheDevice) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 15; ++round) {
    const int32_t d = AnyHeadDim(random_), kv_heads = static_cast<int32_t>(random_.Int(1, 4));
    const auto group = static_cast<int32_t>(random_.Int(1, 8));
    const KvLayout layout{kv_heads, d, 64, kCudaKvTypes[round / 5]};
    const int32_t max_context = 960;  // 15 blocks: chunks of two sequences do not fit together
    const int32_t num_blocks = 48;
    const int64_t cache_rows[] = {0, 3, 300, 2000, 1 << 20};
    const Pools pools(*backend_, layout, num_blocks, max_context, cache_rows[round % 5]);
    SCOPED_TRACE(testing::Message()
                 << "round " << round << ", rows cached " << cache_rows[round % 5]);
    ASSERT_NE(pools.kv, nullptr);
    std::vector<int32_t> blocks(num_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    random_.Shuffle(blocks);
    // Three sequences; the third shares the first five blocks of the first.
    std::vector<int32_t> tables[3];
    for (int s = 0; s < 3; ++s) {
      tables[s].assign(blocks.begin() + 15 * s, blocks.begin() + 15 * (s + 1));
    }
    std::copy_n(tables[0].begin(), 5, tables[2].begin());
    int32_t lengths[3] = {0, 0, 320};
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const int64_t width = int64_t{kv_heads} * d;
    bool retrieved = false;
    for (int pass = 0; pass < 14; ++pass) {
      // Prompts, then decoding, with a new sequence in the first one's blocks half-way.
      if (pass == 9) lengths[1] = 0;
      std::vector<AttentionChunk> chunks;
      int32_t rows = 0;
      for (int s = 0; s < 3; ++s) {
        if (s == 2 && pass < 3) continue;  // its prefix is not written yet
        const bool prompt = lengths[s] < 400;
        const auto count = prompt ? static_cast<int32_t>(random_.Int(100, 300)) : int32_t{1};
        if (lengths[s] + count > max_context) continue;
        chunks.push_back({rows, count, lengths[s], tables[s]});
        lengths[s] += count;
        rows += count;
      }
      Matrix k = Matrix::Normal(random_, rows, width), v = Matrix::Normal(random_, rows, width);
      Matrix q = Matrix::Normal(random_, rows, width * group);
      auto of_k = Put(k), of_v = Put(v), of_q = Put(q);
      backend_->BeginPass();
      for (int layer = 0; layer < 2; ++layer) {
        Matrix on_host(rows, width * group), on_device(rows, width * group);
        auto of_host = Put(on_host), of_device = Put(on_device);
        backend_->WriteKv(of_k.tensor, of_v.tensor, chunks, pools.Host(layer), layout);
        backend_->WriteKv(of_k.tensor, of_v.tensor, chunks, pools.Device(layer), layout);
        backend_->Attend(of_q.tensor, chunks, pools.Host(layer), layout, scale, of_host.tensor);
        backend_->Attend(of_q.tensor, chunks, pools.Device(layer), layout, scale, of_device.tensor);
        ASSERT_NO_FATAL_FAILURE(ExpectSame(of_host, on_host, of_device, on_device));

        std::vector<RetrievalQuery> queries;
        for (const AttentionChunk& chunk : chunks) {
          if (chunk.num_tokens > 1) continue;
          queries.push_back({chunk.first_row,
                             chunk.block_table,
                             chunk.position,
                             {16, std::max(16, chunk.position - 60)},
                             0});
        }
        if (queries.empty() || rows > 64) continue;
        retrieved = true;
        const int32_t capacity = 150;
        OwnedSelection chosen(queries.size(), kv_heads, capacity);
        int64_t wanted = 0;
        for (size_t i = 0; i < queries.size(); ++i) {
          const TokenRange mid = queries[i].mid;
          for (int32_t head = 0; head < kv_heads; ++head) {
            std::vector<int32_t> tokens(mid.size());
            std::iota(tokens.begin(), tokens.end(), mid.first);
            random_.Shuffle(tokens);
            tokens.resize(std::min<size_t>(tokens.size(), random_.Int(0, capacity)));
            std::sort(tokens.begin(), tokens.end());
            const auto place = static_cast<int64_t>(i);
            chosen.view().count(place, head) = static_cast<int32_t>(tokens.size());
            std::copy(tokens.begin(), tokens.end(), chosen.view().chosen(place, head));
            wanted += static_cast<int64_t>(tokens.size()) + queries[i].position + 1 - mid.size();
          }
        }
        Matrix of_host_rows(rows, width * group), of_device_rows(rows, width * group);
        auto from_host = Put(of_host_rows), from_device = Put(of_device_rows);
        static_cast<void>(pools.Read(*backend_));
        ASSERT_TRUE(backend_->FindsRows(pools.Host(layer)));
        ASSERT_TRUE(backend_->FindsRows(pools.Device(layer)));
        backend_->AttendRows(
            {.q = of_q.tensor,
             .queries = queries,
             .rows = {.layout = layout, .pool = pools.Host(layer), .chosen = chosen.view()},
             .scale = scale,
             .out = from_host.tensor});
        backend_->AttendRows(
            {.q = of_q.tensor,
             .queries = queries,
             .rows = {.layout = layout, .pool = pools.Device(layer), .chosen = chosen.view()},
             .scale = scale,
             .out = from_device.tensor});
        const SharedKvReads reads = pools.Read(*backend_);
        ASSERT_EQ(int64_t{reads.cached} + reads.fetched + reads.in_place, wanted);
        ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
        ASSERT_NO_FATAL_FAILURE(ExpectSame(from_host, of_host_rows, from_device, of_device_rows))
            << "pass " << pass;
      }
    }
    EXPECT_TRUE(retrieved);
  }
}

// A decode step by codes: rotation, KV write and encodings in one launch or, where something came in between, in several.
// Codes, attention over what was written, and the pool itself are those of KV on the device.
TEST_F(CudaHostKvTest, AStepByCodesHasTheBitsOfKvOnTheDeviceHoweverItCame) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const int32_t d = AnyHeadDim(random_), kv_heads = static_cast<int32_t>(random_.Int(1, 4));
    const auto group = static_cast<int32_t>(random_.Int(1, 8)), bits = 32 << random_.Int(0, 2);
    const KvLayout layout{kv_heads, d, static_cast<int32_t>(16 * random_.Int(1, 4)),
                          kCudaKvTypes[round / 4]};
    const CodeLayout code_layout{kv_heads, layout.block_tokens, bits};
    const int32_t sequences = 3, max_context = 480, each = 480 / layout.block_tokens;
    const int32_t num_blocks = sequences * each;
    const int64_t some[] = {0, 3, 300, 1 << 20};
    const int64_t cache_rows = some[round % 4];
    SCOPED_TRACE(testing::Message() << "round " << round << ", rows cached " << cache_rows);
    const Pools pools(*backend_, layout, num_blocks, max_context, cache_rows);
    ASSERT_NE(pools.kv, nullptr);
    std::vector<int32_t> blocks(num_blocks), tables[sequences];
    std::iota(blocks.begin(), blocks.end(), 0);
    random_.Shuffle(blocks);
    std::vector<std::byte> content(pools.layer_bytes);
    for (size_t at = 0; at < content.size(); at += 2) {
      const BF16 value = ToBF16(random_.Normal());
      std::memcpy(&content[at], &value, 2);
    }
    for (int layer = 0; layer < 2; ++layer) {
      backend_->CopyToDevice(content.data(), pools.Host(layer), content.size());
      backend_->CopyToDevice(content.data(), pools.Device(layer), content.size());
    }
    RandomEncoder of_keys(random_, kv_heads, 1, {d, bits}),
        of_queries(random_, kv_heads, 1, {d, bits});
    const auto keys = backend_->PackEncoder(of_keys.weights());
    const auto queries_encoder = backend_->PackEncoder(of_queries.weights());
    int32_t position[sequences];
    for (int s = 0; s < sequences; ++s) {
      tables[s].assign(&blocks[each * s], &blocks[each * s] + each);
      position[s] = static_cast<int32_t>(random_.Int(100, 400));
    }
    const int64_t q_width = int64_t{kv_heads} * group * d, kv_width = int64_t{kv_heads} * d;
    for (int step = 0; step < 10; ++step) {
      // Sequences begin again a few tokens earlier now and then: what they write has been cached.
      std::vector<AttentionChunk> chunks;
      std::vector<KeySpan> spans;
      std::vector<RetrievalQuery> queries;
      for (int s = 0; s < sequences; ++s) {
        position[s] += random_.Int(0, 3) == 0 ? -5 : 1;
        const auto row = static_cast<int32_t>(chunks.size());
        if (s > 0 && random_.Int(0, 3) == 0) continue;
        chunks.push_back({row, 1, position[s], tables[s]});
        spans.push_back({tables[s], {position[s], position[s] + 1}});
        queries.push_back({row, tables[s], position[s], {4, position[s] - 30}, 0});
      }
      const auto rows = static_cast<int32_t>(chunks.size());
      const Matrix qkv = Matrix::Normal(random_, rows, q_width + 2 * kv_width);
      Matrix table = Matrix::Normal(random_, rows, 2 * d);  // of q, then of k
      const int64_t between = random_.Int(0, 2);
      auto of_table = Put(table);
      backend_->BeginPass();
      for (int layer = 0; layer < 2; ++layer) {
        std::vector<uint8_t> codes[2], query_codes[2];
        Matrix values[2] = {qkv, qkv}, results[2] = {Matrix(rows, q_width), Matrix(rows, q_width)};
        for (const bool host : {false, true}) {
          std::byte* const pool = host ? pools.Host(layer) : pools.Device(layer);
          auto of_values = Put(values[host]), of_result = Put(results[host]);
          DeviceArray<uint8_t> made(num_blocks * code_layout.BlockBytes());
          DeviceArray<uint8_t> of_q(size_t{1} * rows * kv_heads * group * code_layout.CodeBytes());
          const Tensor q = of_values.tensor.ColRange(0, q_width);
          backend_->RopeAndWriteKv({.q = q,
                                    .k = of_values.tensor.ColRange(q_width, kv_width),
                                    .v = of_values.tensor.ColRange(q_width + kv_width, kv_width),
                                    .q_cos_sin = of_table.tensor.ColRange(0, d),
                                    .cos_sin = of_table.tensor.ColRange(d, d),
                                    .chunks = chunks,
                                    .pool = pool,
                                    .layout = layout});
          if (between == 1) {
            EXPECT_TRUE(backend_->Synchronize());
          }
          backend_->EncodeKeys(spans, pool, layout, *keys, made.data(), code_layout);
          if (between == 2) {
            EXPECT_TRUE(backend_->Synchronize());
          }
          backend_->EncodeQueries(q, queries, *queries_encoder, of_q.data());
          OwnedSelection nothing(queries.size(), kv_heads, 1);
          for (int32_t i = 0; i < rows * kv_heads; ++i) nothing.Set(i / kv_heads, i % kv_heads, {});
          static_cast<void>(pools.Read(*backend_));
          backend_->AttendRows({.q = q,
                                .queries = queries,
                                .rows = {.layout = layout, .pool = pool, .chosen = nothing.view()},
                                .scale = 0.1f,
                                .out = of_result.tensor});
          const SharedKvReads reads = pools.Read(*backend_);
          ASSERT_TRUE(backend_->Synchronize()) << backend_->failure();
          if (host) {
            ASSERT_EQ(int64_t{reads.cached} + reads.fetched + reads.in_place,
                      int64_t{35} * rows * kv_heads);
            // The token that was written is in the cache, where that has room for what a call reads.
            if (cache_rows >= 1000) {
              ASSERT_GE(reads.cached, static_cast<uint32_t>(rows * kv_heads));
            }
          }
          codes[host] = made.Get();
          query_codes[host] = of_q.Get();
          of_result.Fetch();
        }
        ASSERT_TRUE(SameBits(results[0], results[1])) << "step " << step << ", between " << between;
        ASSERT_EQ(codes[0], codes[1]);
        ASSERT_EQ(query_codes[0], query_codes[1]);
      }
    }
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<std::byte> on_device(pools.layer_bytes);
      WINNOW_CUDA_OK(cudaMemcpy(on_device.data(), pools.Device(layer), on_device.size(),
                                cudaMemcpyDeviceToHost));
      EXPECT_EQ(std::memcmp(on_device.data(), pools.Host(layer), on_device.size()), 0);
      EXPECT_NE(on_device, content);
    }
  }
}

// A decode step by masses: anchors, their masses, a selection, what was selected alone, and the states' end. Masses and
// merges may wait for what follows and go in one launch with it, or alone where the host waits in between.
TEST_F(CudaHostKvTest, AStepByMassHasTheBitsOfKvOnTheDeviceHoweverItCame) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const int32_t d = AnyHeadDim(random_), kv_heads = static_cast<int32_t>(random_.Int(1, 3));
    const auto group = static_cast<int32_t>(random_.Int(1, 8)), heads = kv_heads * group;
    const auto bits = static_cast<int32_t>(64 * random_.Int(1, d == 64 ? 2 : 4));
    const KvLayout layout{kv_heads, d, 64, kCudaKvTypes[round / 4]};
    const CodeLayout code_layout{kv_heads, 64, bits};
    const auto n = static_cast<int32_t>(random_.Int(700, 3000)), num_queries = round % 2 * 40 + 3;
    const int64_t some[] = {0, 3, 300, 1 << 20};
    const int64_t cache_rows = some[round % 4];
    SCOPED_TRACE(testing::Message() << "round " << round << ", rows cached " << cache_rows);
    PagedKv kv(random_, layout, {n});
    const Pools pools(*backend_, layout, kv.num_blocks(), n, cache_rows, 1);
    ASSERT_NE(pools.kv, nullptr);
    for (std::byte* pool : {pools.Host(0), pools.Device(0)}) {
      backend_->CopyToDevice(kv.pool(), pool, pools.layer_bytes);
    }
    TransformCodeWeights weights = RandomTransform(random_, d, kv_heads, bits, /*delta=*/true);
    for (TransformCodeHead& head : weights.heads) head.tail = random_.Int(0, 2) != 0;
    const auto transform = backend_->PackTransformCode(weights);
    std::vector<std::byte> codes(kv.num_blocks() * code_layout.BlockBytes());
    const std::vector<KeySpan> span = {{kv.table(0), {0, n}}};
    EncodeTransformKeysRef(span, kv.pool(), layout, weights, codes.data(), code_layout);
    const DeviceArray<std::byte> codes_on_device(codes);
    std::vector<float> table(CellTableFloats(kv_heads, d));
    for (float& value : table) value = random_.Normal(2.0f);
    std::fill(table.end() - int64_t{kv_heads} * (kTransformCells + 1), table.end(), 7.0f);
    const DeviceArray<float> table_on_device(table);
    const std::vector<const float*> tables(num_queries, table_on_device.data());
    std::vector<RetrievalQuery> queries, alone;
    int64_t anchors = 0;
    for (int32_t i = 0; i < num_queries; ++i) {
      queries.push_back(kv.Query(0, i, n - 1 - 7 * i, 4, 32, static_cast<int32_t>(90 - i)));
      anchors += queries.back().position + 1 - queries.back().mid.size();
      alone.push_back(queries.back());
      alone.back().mid = {0, queries.back().position + 1};
    }
    Matrix q = Matrix::Normal(random_, num_queries, int64_t{heads} * d);
    const auto of_q = Put(q);
    const auto num_states = int64_t{num_queries} * heads;
    const size_t state_floats = num_states * AttentionStateFloats(d);
    const Buffer masses = backend_->AllocateShared(num_states * 4);
    const Buffer counts = backend_->AllocateShared(int64_t{num_queries} * kv_heads * 4);
    const Buffer tokens = backend_->AllocateShared(int64_t{num_queries} * kv_heads * 90 * 4);
    const Selection chosen{kv_heads, 90, static_cast<int32_t*>(counts.data()),
                           static_cast<int32_t*>(tokens.data())};
    OwnedSelection nothing(num_queries, kv_heads, 1);
    for (int32_t i = 0; i < num_queries * kv_heads; ++i)
      nothing.Set(i / kv_heads, i % kv_heads, {});

    struct Results {
      std::vector<float> masses, states, out;
      std::vector<int32_t> counts;
      bool operator==(const Results&) const = default;
    };
    const bool has_tail = random_.Int(0, 3) != 0;
    // Bit i of `waits`: the host waits after step i. States are of use only up to the last step, so where the host waits
    // before it.
    const auto run = [&](bool host, int64_t waits) {
      const std::byte* const pool = host ? pools.Host(0) : pools.Device(0);
      const DeviceArray<float> states(state_floats), of_chosen(state_floats);
      const DeviceArray<float> references(num_states), deltas(num_states);
      const DeviceArray<int64_t> cells(num_states * kTransformCells);
      const TailMasses tail{heads, cells.data(), references.data(), deltas.data()};
      Matrix out(num_queries, int64_t{heads} * d);
      auto of_out = Put(out);
      const auto wait = [&](int step) {
        if ((waits >> step & 1) != 0) {
          EXPECT_TRUE(backend_->Synchronize());
        }
      };
      backend_->BeginPass();
      if (host) static_cast<void>(pools.Read(*backend_));
      backend_->AttendRows({.q = of_q.tensor,
                            .queries = queries,
                            .rows = {.layout = layout, .pool = pool, .chosen = nothing.view()},
                            .scale = 0.2f,
                            .states = states.data()});
      wait(0);
      backend_->StateMasses(states.data(), num_states, d, static_cast<float*>(masses.data()));
      wait(1);
      backend_->SelectByMass({.q = of_q.tensor,
                              .queries = queries,
                              .anchor_masses = static_cast<float*>(masses.data()),
                              .transform = *transform,
                              .codes = codes_on_device.data(),
                              .code_layout = code_layout,
                              .scale = 0.2f,
                              .chosen = chosen,
                              .tail = has_tail ? &tail : nullptr});
      wait(2);
      backend_->AttendRows({.q = of_q.tensor,
                            .queries = alone,
                            .rows = {.layout = layout, .pool = pool, .chosen = chosen},
                            .scale = 0.2f,
                            .states = of_chosen.data()});
      wait(3);
      backend_->MergeStates(of_chosen.data(), num_states, d, states.data());
      wait(4);
      if (has_tail) backend_->MergeTails(queries, tables, *transform, tail, d, states.data());
      wait(5);
      backend_->FinishStates(queries, states.data(), d, nullptr, of_out.tensor);
      int64_t read = 0;
      if (host) {
        const SharedKvReads reads = pools.Read(*backend_);
        read = int64_t{reads.cached} + reads.fetched + reads.in_place;
      }
      of_out.Fetch();
      const auto* of_masses = static_cast<const float*>(masses.data());
      Results results{{of_masses, of_masses + num_states},
                      (waits >> 5 & 1) != 0 ? states.Get() : std::vector<float>(),
                      {},
                      {chosen.counts, chosen.counts + int64_t{num_queries} * kv_heads}};
      for (int32_t row = 0; row < num_queries; ++row) {
        results.out.insert(results.out.end(), out.row(row), out.row(row) + int64_t{heads} * d);
      }
      if (host) {
        EXPECT_EQ(read, anchors * kv_heads + std::accumulate(results.counts.begin(),
                                                             results.counts.end(), int64_t{0}));
      }
      return results;
    };
    const Results expected = run(false, 0x3f);
    EXPECT_TRUE(std::ranges::all_of(expected.out, [](float x) { return std::isfinite(x); }));
    EXPECT_GT(std::accumulate(expected.counts.begin(), expected.counts.end(), 0), num_queries);
    // The selected rows are in the result.
    std::vector<float> of_masses(num_states);
    for (int64_t i = 0; i < num_states; ++i) {
      of_masses[i] = AttentionStateLogSumExp(&expected.states[i * AttentionStateFloats(d)], d);
      ASSERT_GT(of_masses[i], expected.masses[i] - 1e-4f);
    }
    EXPECT_NE(of_masses, expected.masses);
    Results without_states = expected;
    without_states.states.clear();
    for (const bool host : {false, true}) {
      for (const int64_t waits : {int64_t{0}, random_.Int(0, 0x3f), random_.Int(0, 0x3f)}) {
        ASSERT_EQ(run(host, waits), (waits >> 5 & 1) != 0 ? expected : without_states)
            << "in host memory " << host << ", waits " << waits;
      }
    }
  }
}

// As a step of the engine asks for it: nobody waits between layers, so that what is brought ahead, and for
// a layer that then is left out, is on its way while other areas are filled and read.
TEST_F(CudaHostKvTest, LayersWithoutAWaitBetweenThemHaveTheBitsOfKvOnTheDevice) {
  SCOPED_TRACE(Seed());
  const int32_t layers = 6, kv_heads = 8, d = 128, group = 4;
  const KvLayout layout{kv_heads, d, 64, AnyCudaKvType(random_)};
  const int32_t max_context = 6400, num_blocks = 201;  // areas of 26 MB: long to bring
  const Pools pools(*backend_, layout, num_blocks, max_context, 500, layers);
  ASSERT_NE(pools.kv, nullptr);
  std::vector<int32_t> blocks(num_blocks), tables[2];
  std::iota(blocks.begin(), blocks.end(), 0);
  random_.Shuffle(blocks);
  for (int s = 0; s < 2; ++s) tables[s].assign(&blocks[100 * s], &blocks[100 * (s + 1)]);
  // What both hold at first.
  std::vector<std::byte> content(pools.layer_bytes);
  for (int32_t layer = 0; layer < layers; ++layer) {
    for (size_t at = 0; at < content.size(); at += 2) {
      const BF16 value = ToBF16(static_cast<float>(random_.Int(-1000, 1000)) / 1000.0f);
      std::memcpy(&content[at], &value, 2);
    }
    backend_->CopyToDevice(content.data(), pools.Host(layer), content.size());
    backend_->CopyToDevice(content.data(), pools.Device(layer), content.size());
  }
  int32_t position = 5000;
  for (int pass = 0; pass < 20; ++pass) {
    // One decodes, or reads on; the other too, or is away.
    std::vector<AttentionChunk> chunks;
    const auto count = random_.Int(0, 1) == 0 ? 1 : static_cast<int32_t>(random_.Int(9, 60));
    int32_t rows = 0;
    for (int s = 0; s < 2; ++s) {
      if (s == 1 && random_.Int(0, 2) == 0) continue;
      chunks.push_back({rows, count, position, tables[s]});
      rows += count;
    }
    position += count;
    const int64_t width = int64_t{kv_heads} * d;
    Matrix k = Matrix::Normal(random_, rows, width), v = Matrix::Normal(random_, rows, width);
    Matrix q = Matrix::Normal(random_, rows, width * group);
    auto of_k = Put(k), of_v = Put(v), of_q = Put(q);
    std::vector<Matrix> on_host(layers, Matrix(rows, width * group)), on_device = on_host;
    std::vector<OnDevice> of_host, of_device;
    of_host.reserve(layers);
    of_device.reserve(layers);
    std::vector<bool> attends(layers);
    for (int32_t layer = 0; layer < layers; ++layer) {
      of_host.push_back(Put(on_host[layer]));
      of_device.push_back(Put(on_device[layer]));
      attends[layer] = random_.Int(0, 3) != 0;
    }
    backend_->BeginPass();
    for (int32_t layer = 0; layer < layers; ++layer) {
      backend_->WriteKv(of_k.tensor, of_v.tensor, chunks, pools.Host(layer), layout);
      if (!attends[layer]) continue;
      backend_->Attend(of_q.tensor, chunks, pools.Host(layer), layout, 0.1f, of_host[layer].tensor);
    }
    for (int32_t layer = 0; layer < layers; ++layer) {
      backend_->WriteKv(of_k.tensor, of_v.tensor, chunks, pools.Device(layer), layout);
      if (!attends[layer]) continue;
      backend_->Attend(of_q.tensor, chunks, pools.Device(layer), layout, 0.1f,
                       of_device[layer].tensor);
    }
    for (int32_t layer = 0; layer < layers; ++layer) {
      ASSERT_NO_FATAL_FAILURE(
          ExpectSame(of_host[layer], on_host[layer], of_device[layer], on_device[layer]))
          << "pass " << pass << ", layer " << layer;
    }
  }
}

TEST_F(CudaHostKvTest, WhatIsWrittenIntoBlocksThatCameAheadIsAttended) {
  SCOPED_TRACE(Seed());
  const int32_t kv_heads = 2, d = 64, tokens = 20 * 64;
  const KvLayout layout{kv_heads, d, 64, AnyCudaKvType(random_)};
  const Pools pools(*backend_, layout, 40, tokens, 100, 2);
  ASSERT_NE(pools.kv, nullptr);
  std::vector<int32_t> reader(40);
  std::iota(reader.begin(), reader.end(), 0);
  random_.Shuffle(reader);
  reader.resize(20);
  std::vector<std::byte> content(pools.layer_bytes);
  for (size_t at = 0; at < content.size(); at += 2) {
    const BF16 value = ToBF16(random_.Normal());
    std::memcpy(&content[at], &value, 2);
  }
  for (const int32_t layer : {0, 1}) {
    backend_->CopyToDevice(content.data(), pools.Host(layer), content.size());
    backend_->CopyToDevice(content.data(), pools.Device(layer), content.size());
  }
  const int64_t width = int64_t{kv_heads} * d;
  Matrix q = Matrix::Normal(random_, 1, 4 * width), of_host(1, q.cols()), of_device(1, q.cols());
  auto of_q = Put(q), from_host = Put(of_host), from_device = Put(of_device);
  const std::vector<AttentionChunk> reads = {{0, 1, tokens - 1, reader}};
  for (int round = 0; round < 8; ++round) {
    // Layer 0 is attended to, and layer 1's blocks come meanwhile. Then a block of them is given to another, who
    // writes it, and it is the reader's again.
    const std::vector<int32_t> writer = {reader[random_.Int(0, 18)]};
    const auto count = static_cast<int32_t>(random_.Int(1, 64));
    const std::vector<AttentionChunk> writes = {{0, count, 0, writer}};
    Matrix k = Matrix::Normal(random_, count, width), v = Matrix::Normal(random_, count, width);
    auto of_k = Put(k), of_v = Put(v);
    backend_->BeginPass();
    backend_->Attend(of_q.tensor, reads, pools.Host(0), layout, 0.1f, from_host.tensor);
    for (std::byte* pool : {pools.Host(1), pools.Device(1)}) {
      backend_->WriteKv(of_k.tensor, of_v.tensor, writes, pool, layout);
    }
    backend_->Attend(of_q.tensor, reads, pools.Host(1), layout, 0.1f, from_host.tensor);
    backend_->Attend(of_q.tensor, reads, pools.Device(1), layout, 0.1f, from_device.tensor);
    ASSERT_NO_FATAL_FAILURE(ExpectSame(from_host, of_host, from_device, of_device)) << round;
  }
}

TEST_F(CudaHostKvTest, WhatIsCopiedIntoAPoolIsReadFromThenOn) {
  SCOPED_TRACE(Seed());
  const KvLayout layout{2, 64, 64, DType::kBF16};
  const Pools pools(*backend_, layout, 8, 512, 1 << 20);
  ASSERT_NE(pools.kv, nullptr);
  std::vector<int32_t> table(8);
  std::iota(table.begin(), table.end(), 0);
  Matrix q = Matrix::Normal(random_, 1, 2 * 4 * 64);
  auto of_q = Put(q);
  const std::vector<RetrievalQuery> queries = {{0, table, 511, {511, 511}, 0}};
  OwnedSelection chosen(1, 2, 1);
  chosen.view().count(0, 0) = chosen.view().count(0, 1) = 0;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::byte> content(pools.layer_bytes);
    for (size_t at = 0; at < content.size(); at += 2) {
      const BF16 value = ToBF16(random_.Normal());
      std::memcpy(&content[at], &value, 2);
    }
    backend_->CopyToDevice(content.data(), pools.Host(1), content.size());
    backend_->CopyToDevice(content.data(), pools.Device(1), content.size());
    Matrix of_host(1, q.cols()), of_device(1, q.cols());
    auto from_host = Put(of_host), from_device = Put(of_device);
    for (int again = 0; again < 2; ++again) {
      backend_->AttendRows(
          {.q = of_q.tensor,
           .queries = queries,
           .rows = {.layout = layout, .pool = pools.Host(1), .chosen = chosen.view()},
           .scale = 0.1f,
           .out = from_host.tensor});
    }
    backend_->AttendRows(
        {.q = of_q.tensor,
         .queries = queries,
         .rows = {.layout = layout, .pool = pools.Device(1), .chosen = chosen.view()},
         .scale = 0.1f,
         .out = from_device.tensor});
    ASSERT_NO_FATAL_FAILURE(ExpectSame(from_host, of_host, from_device, of_device));
    const SharedKvReads reads = pools.Read(*backend_);
    EXPECT_EQ(reads.fetched, 1024u);  // once
    EXPECT_EQ(reads.cached, 1024u);
  }
}

// The host reads blocks from a disk to their places: before a pass, and in the middle of one, when what
// was brought ahead for the next layer has not seen them.
TEST_F(CudaHostKvTest, WhatTheHostReadsIntoBlocksIsAttendedFromThenOn) {
  SCOPED_TRACE(Seed());
  const int32_t layers = 3, kv_heads = 2, d = 64, tokens = 40 * 64;
  const KvLayout layout{kv_heads, d, 64, AnyCudaKvType(random_)};
  for (const int64_t cache_rows : {0, 500, 1 << 20}) {
    const Pools pools(*backend_, layout, 64, tokens, cache_rows, layers);
    ASSERT_NE(pools.kv, nullptr);
    std::vector<int32_t> table(64);
    std::iota(table.begin(), table.end(), 0);
    random_.Shuffle(table);
    table.resize(40);
    const auto load = [&](int32_t layer, std::span<const int32_t> blocks) {
      std::vector<std::byte> content(layout.BlockBytes());
      for (const int32_t block : blocks) {
        for (size_t at = 0; at < content.size(); at += 2) {
          const BF16 value = ToBF16(random_.Normal());
          std::memcpy(&content[at], &value, 2);
        }
        const size_t at = block * layout.BlockBytes();
        std::memcpy(pools.Host(layer) + at, content.data(), content.size());
        const CopyPart part{content.data(), pools.Device(layer) + at, content.size()};
        backend_->CopyAllToDevice({&part, 1});
      }
      pools.kv->ForgetStaged();
    };
    pools.kv->ForgetRows(table);
    for (int32_t layer = 0; layer < layers; ++layer) load(layer, table);
    Matrix q = Matrix::Normal(random_, 1, int64_t{kv_heads} * 4 * d);
    auto of_q = Put(q);
    const std::vector<RetrievalQuery> queries = {
        {0, table, tokens - 1, {tokens - 1, tokens - 1}, 0}};
    const std::vector<AttentionChunk> chunks = {{0, 1, tokens - 1, table}};
    OwnedSelection chosen(1, kv_heads, 1);
    for (int32_t head = 0; head < kv_heads; ++head) chosen.view().count(0, head) = 0;
    for (int round = 0; round < 6; ++round) {
      SCOPED_TRACE(testing::Message() << "round " << round << ", rows cached " << cache_rows);
      // Some blocks are given to other content, which comes now or when its layer is next.
      std::vector<int32_t> others;
      for (const int32_t block : table) {
        if (random_.Int(0, 3) == 0) others.push_back(block);
      }
      pools.kv->ForgetRows(others);
      const bool late = round % 2 == 1;
      if (!late) {
        for (int32_t layer = 0; layer < layers; ++layer) load(layer, others);
      }
      backend_->BeginPass();
      for (int32_t layer = 0; layer < layers; ++layer) {
        if (late) load(layer, others);
        Matrix of_host(1, q.cols()), of_device(1, q.cols());
        auto from_host = Put(of_host), from_device = Put(of_device);
        backend_->Attend(of_q.tensor, chunks, pools.Host(layer), layout, 0.1f, from_host.tensor);
        backend_->Attend(of_q.tensor, chunks, pools.Device(layer), layout, 0.1f,
                         from_device.tensor);
        ASSERT_NO_FATAL_FAILURE(ExpectSame(from_host, of_host, from_device, of_device));
        for (int again = 0; again < 2; ++again) {
          backend_->AttendRows(
              {.q = of_q.tensor,
               .queries = queries,
               .rows = {.layout = layout, .pool = pools.Host(layer), .chosen = chosen.view()},
               .scale = 0.1f,
               .out = from_host.tensor});
          backend_->AttendRows(
              {.q = of_q.tensor,
               .queries = queries,
               .rows = {.layout = layout, .pool = pools.Device(layer), .chosen = chosen.view()},
               .scale = 0.1f,
               .out = from_device.tensor});
          ASSERT_NO_FATAL_FAILURE(ExpectSame(from_host, of_host, from_device, of_device));
        }
      }
    }
  }
}

TEST_F(CudaHostKvTest, ManyCopiesAreEachTheirOwn) {
  SCOPED_TRACE(Seed());
  const size_t bytes = 1 << 20;
  const Buffer device = backend_->Allocate(bytes), host = backend_->AllocateShared(bytes);
  std::vector<std::byte> from(bytes), to(bytes);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random_.Int(0, 255));
  std::vector<CopyPart> parts;
  for (size_t at = 0; at < bytes;) {
    const auto size = std::min<size_t>(bytes - at, random_.Int(1, 30'000));
    std::byte* const in_pinned = static_cast<std::byte*>(host.data()) + at;
    std::memcpy(in_pinned, &from[at], size);
    parts.push_back({random_.Int(0, 1) == 0 ? in_pinned : &from[at],
                     static_cast<std::byte*>(device.data()) + at, size});
    at += size;
  }
  random_.Shuffle(parts);
  backend_->CopyAllToDevice(parts);
  backend_->CopyToHost(device.data(), to.data(), bytes);
  EXPECT_EQ(std::memcmp(from.data(), to.data(), bytes), 0);
  std::memset(host.data(), 0, bytes);
  std::vector<CopyPart> back = parts;
  for (CopyPart& part : back) {
    part.host = static_cast<std::byte*>(host.data()) +
                (part.device - static_cast<std::byte*>(device.data()));
  }
  backend_->CopyAllToHost(back);
  EXPECT_EQ(std::memcmp(from.data(), host.data(), bytes), 0);
}

// Many small parts of shared memory go by one launch: of any sizes that have a unit in common.
TEST_F(CudaHostKvTest, CopiesInOneLaunchAreEachTheirOwn) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const size_t unit = size_t{64} << random_.Int(0, 8);  // below 256 bytes it is no launch
    const size_t most = static_cast<size_t>(random_.Int(1, 40));
    const auto count = static_cast<size_t>(random_.Int(1, 60));
    const size_t bytes = (count + 2) * most * unit;
    const Buffer device = backend_->Allocate(bytes), host = backend_->AllocateShared(bytes);
    auto* const of_host = static_cast<std::byte*>(host.data());
    std::vector<std::byte> content(bytes);
    for (std::byte& byte : content) byte = static_cast<std::byte>(random_.Int(0, 255));
    // Parts in one order there and in another here, with gaps that nobody may touch.
    std::vector<size_t> places(count);
    std::iota(places.begin(), places.end(), 0);
    random_.Shuffle(places);
    std::vector<CopyPart> parts;
    for (size_t i = 0; i < count; ++i) {
      parts.push_back({of_host + i * most * unit,
                       static_cast<std::byte*>(device.data()) + places[i] * most * unit,
                       static_cast<size_t>(random_.Int(1, static_cast<int64_t>(most))) * unit});
    }
    std::copy(content.begin(), content.end(), of_host);
    backend_->CopyAllToDevice(parts);
    std::vector<std::byte> expected(bytes), got(bytes);
    for (const CopyPart& part : parts) {
      std::copy_n(part.host, part.size_bytes,
                  expected.data() + (part.device - static_cast<std::byte*>(device.data())));
    }
    backend_->CopyToHost(device.data(), got.data(), bytes);
    EXPECT_TRUE(got == expected) << "round " << round;
    std::fill_n(of_host, bytes, std::byte{7});
    backend_->CopyAllToHost(parts);
    std::vector<std::byte> back(bytes, std::byte{7});
    for (size_t i = 0; i < count; ++i) {
      std::copy_n(content.data() + i * most * unit, parts[i].size_bytes,
                  back.data() + i * most * unit);
    }
    EXPECT_TRUE(std::equal(back.begin(), back.end(), of_host)) << "round " << round;
  }
}

TEST_F(CudaHostKvTest, WhatDoesNotFitIsRefusedWithTheBytes) {
  const KvLayout layout{2, 64, 64, DType::kBF16};
  const Buffer host = backend_->AllocateShared(2 * layout.BlockBytes());
  const std::vector<std::byte*> pools = {static_cast<std::byte*>(host.data())};
  SharedKvShape shape{.layout = layout,
                      .num_pools = 1,
                      .num_blocks = 2,
                      .max_context = 128,
                      .max_batch_tokens = 4,
                      .cache_bytes = 1 << 20};
  std::string why;
  EXPECT_NE(backend_->ShareKv(shape, pools, &why), nullptr) << why;
  shape.num_blocks = 1 << 26;
  EXPECT_EQ(backend_->ShareKv(shape, pools, &why), nullptr);
  EXPECT_NE(why.find("rows in a layer"), std::string::npos) << why;
  shape.num_blocks = 1 << 23;
  shape.max_context = 1 << 29;
  EXPECT_EQ(backend_->ShareKv(shape, pools, &why), nullptr);
  EXPECT_NE(why.find("bytes for the row cache"), std::string::npos) << why;
  EXPECT_TRUE(backend_->Synchronize()) << "no memory is an answer, not a failure";
}

}  // namespace
}  // namespace winnow::kernels::cuda
