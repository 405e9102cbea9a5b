#include "kernels/cuda/transform_code.h"

#include <array>
#include <numeric>

#include "kernels/attention_state.h"
#include "kernels/cuda/row_attention.h"
#include "kernels/transform_code.h"
#include "tests/cuda/cuda_testing.h"
#include "tests/unit/kernels/random_transform.h"

namespace winnow::kernels::cuda {
namespace {

// Sequences, a transform and the reference's codes of all their keys, on the host and on the device.
struct Scene {
  Scene(Random& random, int32_t d, int32_t kv_heads, int32_t group_size, int32_t bits,
        const std::vector<int32_t>& lengths, int32_t block_tokens = 64, DType dtype = DType::kBF16)
      : kv(random, {kv_heads, d, block_tokens, dtype}, lengths),
        weights(RandomTransform(random, d, kv_heads, bits, /*delta=*/true)),
        layout{kv_heads, block_tokens, bits},
        group(group_size),
        codes(kv.num_blocks() * layout.BlockBytes()),
        packed_memory(PackedTransformBytes(weights)) {
    for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
      spans.push_back({kv.table(s), {0, lengths[s]}});
    }
    EncodeTransformKeysRef(spans, kv.pool(), kv.layout(), weights, codes.data(), layout);
    std::vector<std::byte> host(packed_memory.size());
    transform = PackTransform(weights, host.data(), packed_memory.data());
    packed_memory.Set(host);
  }
  int32_t heads() const { return layout.kv_heads * group; }

  PagedKv kv;
  TransformCodeWeights weights;
  CodeLayout layout;
  int32_t group;
  std::vector<std::byte> codes;
  std::vector<KeySpan> spans;
  DeviceArray<std::byte> packed_memory;
  DeviceTransform transform;
};

// A residual code of a scene's keys, as Scene.
struct Residual {
  Residual(Random& random, const Scene& scene, int32_t bits)
      : weights(RandomResidual(random, scene.weights, bits)),
        layout{scene.layout.kv_heads, scene.layout.block_tokens, bits},
        codes(scene.kv.num_blocks() * layout.BlockBytes()),
        packed_memory(PackedTransformBytes(weights)) {
    EncodeResidualsRef(scene.spans, scene.kv.pool(), scene.kv.layout(), scene.weights,
                       scene.codes.data(), scene.layout, weights, codes.data(), layout);
    std::vector<std::byte> host(packed_memory.size());
    transform = PackTransform(weights, host.data(), packed_memory.data());
    packed_memory.Set(host);
  }
  TransformCodeWeights weights;
  CodeLayout layout;
  std::vector<std::byte> codes;
  DeviceArray<std::byte> packed_memory;
  DeviceTransform transform;
};

constexpr float kScale = 0.3f;

class CudaTransformCodeTest : public CudaTest {
 protected:
  RetrievalQuery AnyQuery(const Scene& scene, int sequence, int32_t row, int32_t tokens) {
    RetrievalQuery query;
    query.row = row;
    query.block_table = scene.kv.table(sequence);
    query.position = tokens - 1;
    query.mid.last = static_cast<int32_t>(random_.Int(0, tokens));
    query.mid.first = static_cast<int32_t>(random_.Int(0, query.mid.last));
    query.k = static_cast<int32_t>(random_.Int(0, query.mid.size()));
    if (random_.Int(0, 1) == 0) query.k = std::min(query.k, 20);
    if (random_.Int(0, 1) == 0) {
      query.least_key = LeastMassKey(std::exp2(-random_.Int(1, 16)), scene.group);
    }
    return query;
  }

  // The spans' codes on the device are the reference's.
  static void ExpectCodes(const Scene& scene, const DeviceArray<std::byte>& codes,
                          const std::vector<KeySpan>& spans) {
    const int32_t words = scene.layout.bits / 32;
    const std::vector<std::byte> made = codes.Get();
    for (const KeySpan& span : spans) {
      for (int32_t token = 0; token < span.tokens.last; ++token) {
        for (int32_t head = 0; head < scene.layout.kv_heads; ++head) {
          for (int32_t word = 0; word < words; ++word) {
            const size_t at = span.block_table[token / 64] * scene.layout.BlockBytes() +
                              head * scene.layout.HeadBytes() +
                              4 * TransformWordOffset(words, token % 64, word);
            ASSERT_EQ(std::memcmp(&made[at], &scene.codes[at], 4), 0)
                << words << " words, token " << token << " head " << head;
          }
        }
      }
    }
  }

  // SelectByMass of `queries` twice, against the reference, to the bit.
  void ExpectSelects(const Scene& scene, const std::vector<RetrievalQuery>& queries, int32_t rows,
                     bool flat, bool fused = true) {
    const int32_t d = scene.weights.head_dim, heads = scene.heads();
    const size_t states = queries.size() * heads;
    // Queries of zeros have equal masses everywhere.
    Matrix q =
        flat ? Matrix(rows, int64_t{heads} * d) : Matrix::Normal(random_, rows, int64_t{heads} * d);
    // Logits that no step has: those of most tokens are held.
    for (int64_t i = 0; i < int64_t{heads} * d; ++i) q.row(rows - 1)[i] *= 300;
    std::vector<float> anchors(states);
    for (float& mass : anchors) mass = random_.Normal(3.0f);
    anchors[0] = -std::numeric_limits<float>::infinity();
    int32_t capacity = 1;
    for (const RetrievalQuery& query : queries) capacity = std::max(capacity, query.k);

    OwnedSelection expected(queries.size(), scene.layout.kv_heads, capacity);
    std::vector<int64_t> cells(states * kTransformCells, -1);
    std::vector<float> references(states), deltas(states);
    const TailMasses tail{heads, cells.data(), references.data(), deltas.data()};
    SelectByMassRef(q.tensor(), queries, anchors.data(), scene.weights, kScale, scene.codes.data(),
                    scene.layout, expected.view(), &tail);

    MassSelectShape shape{static_cast<int32_t>(queries.size()), scene.group, scene.layout, 0};
    for (const RetrievalQuery& query : queries) {
      shape.max_mid_tokens = std::max(shape.max_mid_tokens, query.mid.size());
    }
    shape.max_mid_tokens += static_cast<int32_t>(random_.Int(0, 5000));
    shape.fused = fused;
    const DeviceArray<float> on_device = Upload(q), masses(anchors);
    const DeviceArray<std::byte> codes(scene.codes);
    const DeviceQueries device_queries(queries);
    Workspace workspace(MassSelectWorkspaceBytes(shape));
    for (int call = 0; call < 3; ++call) {  // the workspace is left ready for the next call
      DeviceSelection selection(queries.size(), scene.layout.kv_heads, capacity);
      const DeviceArray<int64_t> device_cells(cells.size());
      const DeviceArray<float> device_references(states), device_deltas(states);
      TailMasses device_tail{heads, device_cells.data(), device_references.data(),
                             device_deltas.data()};
      if (call == 2) device_tail = {};
      WINNOW_CUDA_OK(SelectByMass(shape, scene.transform, on_device.data(), q.tensor().stride,
                                  device_queries.data(), masses.data(), kScale, codes.data(),
                                  selection.view(), device_tail, workspace.data(), nullptr));
      const auto chosen = selection.Chosen();
      for (size_t i = 0; i < queries.size(); ++i) {
        for (int32_t head = 0; head < scene.layout.kv_heads; ++head) {
          ASSERT_EQ(chosen[i * scene.layout.kv_heads + head],
                    expected.Of(static_cast<int64_t>(i), head))
              << "query " << i << " head " << head << " call " << call;
        }
      }
      if (call == 2) continue;
      ASSERT_EQ(device_cells.Get(), cells) << "call " << call;
      EXPECT_EQ(device_references.Get(), references);
      EXPECT_EQ(device_deltas.Get(), deltas);
    }
  }
};

TEST_F(CudaTransformCodeTest, CodesAreTheReferencesToTheBit) {
  SCOPED_TRACE(Seed());
  int round = 0;
  for (const int32_t d : {64, 80, 96, 128, 256}) {
    for (const int32_t bits : {64, 128, 192, 256}) {
      const DType dtype = d > 128 ? DType::kBF16 : kCudaKvTypes[round++ % 3];
      SCOPED_TRACE(DTypeName(dtype));
      const Scene scene(random_, d, 3, 1, bits, {70, 1, 333}, 64, dtype);
      const DeviceArray<std::byte> pool = UploadPool(scene.kv), codes(scene.codes.size());
      std::vector<KeySpan> spans = scene.spans;
      // In two parts, so that a span begins within a tile.
      std::vector<KeySpan> rest = {spans[2]};
      spans[2].tokens.last = rest[0].tokens.first = static_cast<int32_t>(random_.Int(1, 332));
      for (const auto& part : {spans, rest}) {
        const DeviceSpans on_device(part);
        WINNOW_CUDA_OK(EncodeTransformKeys(scene.transform, on_device.data(), on_device.size(),
                                           on_device.max_tokens(), pool.data(), scene.kv.layout(),
                                           codes.data(), scene.layout, nullptr));
      }
      ASSERT_NO_FATAL_FAILURE(ExpectCodes(scene, codes, scene.spans)) << "d " << d;
      // As decoding adds them: a token of one sequence, and of many at once.
      std::vector<KeySpan> tokens;
      for (int32_t t = 0; t < 70; ++t) tokens.push_back({scene.spans[0].block_table, {t, t + 1}});
      const size_t at_once[] = {1, tokens.size()};
      for (const size_t count : at_once) {
        const DeviceArray<std::byte> one_by_one(scene.codes.size());
        for (size_t begin = 0; begin < tokens.size(); begin += count) {
          const DeviceSpans on_device({tokens.begin() + begin, tokens.begin() + begin + count});
          WINNOW_CUDA_OK(EncodeTransformKeys(scene.transform, on_device.data(), on_device.size(), 1,
                                             pool.data(), scene.kv.layout(), one_by_one.data(),
                                             scene.layout, nullptr));
        }
        ASSERT_NO_FATAL_FAILURE(ExpectCodes(scene, one_by_one, {scene.spans[0]}))
            << "d " << d << ", " << count << " at once";
      }
    }
  }
}

TEST_F(CudaTransformCodeTest, SelectsTheReferencesTokensAndLeavesItsTail) {
  SCOPED_TRACE(Seed());
  for (const int32_t bits : {64, 128, 192, 256}) {
    for (const int32_t group : {1, 2, 3, 4, 7, 8, 16}) {
      const int32_t d = bits == 256 ? 128 : 64;
      const int32_t block_tokens = static_cast<int32_t>(16 * random_.Int(1, 5));
      const Scene scene(random_, d, 2, group, bits, {900, 2500}, block_tokens);
      for (const bool fused : {true, false}) {
        SCOPED_TRACE(::testing::Message() << bits << " bits, G " << group << ", fused " << fused);
        ExpectSelects(
            scene,
            {AnyQuery(scene, 0, 1, 900), AnyQuery(scene, 1, 0, 2500), AnyQuery(scene, 1, 2, 2400)},
            3, random_.Int(0, 3) == 0, fused);
        if (HasFailure()) return;
      }
    }
  }
}

// A part of what is selected is read; the rest of it stays in the tail.
TEST_F(CudaTransformCodeTest, TakesTheReferencesMassesFromTheTail) {
  SCOPED_TRACE(Seed());
  for (const int32_t group : {1, 3, 4, 8, 16}) {
    const auto bits = static_cast<int32_t>(64 * random_.Int(1, 4));
    const Scene scene(random_, 64, 2, group, bits, {900, 2500},
                      static_cast<int32_t>(16 * random_.Int(1, 5)));
    const std::vector<RetrievalQuery> queries = {
        AnyQuery(scene, 0, 1, 900), AnyQuery(scene, 1, 0, 2500), AnyQuery(scene, 1, 2, 2400)};
    Matrix q = Matrix::Normal(random_, 3, int64_t{scene.heads()} * 64);
    const size_t states = queries.size() * scene.heads();
    std::vector<float> anchors(states);
    for (float& mass : anchors) mass = random_.Normal(3.0f);
    int32_t capacity = 1;
    for (const RetrievalQuery& query : queries) capacity = std::max(capacity, query.k);
    OwnedSelection selected(queries.size(), 2, capacity), read(queries.size(), 2, capacity);
    std::vector<int64_t> cells(states * kTransformCells, -1);
    std::vector<float> references(states), deltas(states);
    const TailMasses tail{scene.heads(), cells.data(), references.data(), deltas.data(),
                          /*of_all=*/true};
    SelectByMassRef(q.tensor(), queries, anchors.data(), scene.weights, kScale, scene.codes.data(),
                    scene.layout, selected.view(), &tail);
    std::vector<int32_t> counts, tokens(queries.size() * 2 * capacity);
    for (size_t i = 0; i < queries.size(); ++i) {
      for (int32_t head = 0; head < 2; ++head) {
        std::vector<int32_t> some = selected.Of(static_cast<int64_t>(i), head);
        std::erase_if(some, [&](int32_t) { return random_.Int(0, 1) == 0; });
        read.Set(static_cast<int64_t>(i), head, some);
        counts.push_back(static_cast<int32_t>(some.size()));
        std::copy(some.begin(), some.end(), tokens.begin() + (i * 2 + head) * capacity);
      }
    }
    MassSelectShape shape{static_cast<int32_t>(queries.size()), group, scene.layout, 2500};
    const DeviceArray<float> on_device = Upload(q), masses(anchors);
    const DeviceArray<std::byte> codes(scene.codes);
    const DeviceQueries device_queries(queries);
    const DeviceArray<int32_t> device_counts(counts), device_tokens(tokens);
    const std::vector<int64_t> of_all = cells;
    TakeFromTailRef(q.tensor(), queries, scene.weights, kScale, scene.codes.data(), scene.layout,
                    read.view(), tail);
    for (const bool fused : {true, false}) {
      shape.fused = fused;
      DeviceSelection selection(queries.size(), 2, capacity);
      const DeviceArray<int64_t> device_cells(cells.size());
      const DeviceArray<float> device_references(states), device_deltas(states);
      const TailMasses device_tail{scene.heads(), device_cells.data(), device_references.data(),
                                   device_deltas.data(), /*of_all=*/true};
      Workspace workspace(MassSelectWorkspaceBytes(shape));
      WINNOW_CUDA_OK(SelectByMass(shape, scene.transform, on_device.data(), q.tensor().stride,
                                  device_queries.data(), masses.data(), kScale, codes.data(),
                                  selection.view(), device_tail, workspace.data(), nullptr));
      ASSERT_EQ(device_cells.Get(), of_all) << "G " << group << " fused " << fused;
      Workspace of_queries(TakeFromTailWorkspaceBytes(shape));
      WINNOW_CUDA_OK(TakeFromTail(
          shape, scene.transform, on_device.data(), q.tensor().stride, device_queries.data(),
          kScale, codes.data(), Selection{2, capacity, device_counts.data(), device_tokens.data()},
          device_tail, of_queries.data(), nullptr));
      ASSERT_EQ(device_cells.Get(), cells) << "G " << group << " fused " << fused;
    }
  }
}

TEST_F(CudaTransformCodeTest, ResidualCodesAreTheReferencesToTheBit) {
  SCOPED_TRACE(Seed());
  int round = 0;
  for (const int32_t d : {64, 80, 128, 256}) {
    for (const int32_t bits : {64, 128, 192, 256}) {
      const DType dtype = d > 128 ? DType::kBF16 : kCudaKvTypes[round++ % 3];
      const Scene scene(random_, d, 3, 1, static_cast<int32_t>(64 * random_.Int(1, 4)),
                        {70, 1, 333}, 64, dtype);
      const Residual residual(random_, scene, bits);
      const DeviceArray<std::byte> pool = UploadPool(scene.kv), first(scene.codes),
                                   codes(residual.codes.size());
      const FirstCodes of_first{scene.transform.heads, first.data(), scene.layout};
      const auto encode = [&](const std::vector<KeySpan>& spans) {
        const DeviceSpans on_device(spans);
        WINNOW_CUDA_OK(EncodeResiduals(residual.transform, of_first, on_device.data(),
                                       on_device.size(), on_device.max_tokens(), pool.data(),
                                       scene.kv.layout(), codes.data(), residual.layout, nullptr));
      };
      // In two parts, so that a span begins within a tile; and the first sequence token by token.
      std::vector<KeySpan> spans = scene.spans;
      std::vector<KeySpan> rest = {spans[2]};
      spans[2].tokens.last = rest[0].tokens.first = static_cast<int32_t>(random_.Int(1, 332));
      spans.erase(spans.begin());
      encode(spans);
      encode(rest);
      for (int32_t t = 0; t < 70; ++t) encode({{scene.spans[0].block_table, {t, t + 1}}});
      const std::vector<std::byte> made = codes.Get();
      const int32_t words = bits / 32;
      for (const KeySpan& span : scene.spans) {
        for (int32_t token = 0; token < span.tokens.last; ++token) {
          for (int32_t head = 0; head < 3; ++head) {
            for (int32_t word = 0; word < words; ++word) {
              const size_t at = span.block_table[token / 64] * residual.layout.BlockBytes() +
                                head * residual.layout.HeadBytes() +
                                4 * TransformWordOffset(words, token % 64, word);
              ASSERT_EQ(std::memcmp(&made[at], &residual.codes[at], 4), 0)
                  << "d " << d << ", " << bits << " bits, token " << token << " head " << head;
            }
          }
        }
      }
    }
  }
}

// The selection's denominators and what re-ranking keeps, to the bit: few candidates and many, of odd numbers, with ties,
// with a least key and where everything is a candidate.
TEST_F(CudaTransformCodeTest, KeepsTheReferencesCandidates) {
  SCOPED_TRACE(Seed());
  for (const int32_t group : {1, 2, 3, 4, 7, 8, 16}) {
    const auto bits = static_cast<int32_t>(64 * random_.Int(1, 4));
    Scene scene(random_, bits == 256 ? 128 : 64, 2, group, bits, {900, 6000},
                static_cast<int32_t>(16 * random_.Int(1, 5)));
    const Residual residual(random_, scene, static_cast<int32_t>(64 * random_.Int(1, 4)));
    const int32_t d = scene.weights.head_dim, heads = scene.heads();
    std::vector<RetrievalQuery> queries = {AnyQuery(scene, 0, 1, 900), AnyQuery(scene, 1, 0, 6000),
                                           AnyQuery(scene, 1, 2, 5800)};
    queries[1].mid = {16, 5872};  // more candidates than a block has threads
    queries[1].k = static_cast<int32_t>(random_.Int(600, 5000));
    std::vector<RetrievalQuery> wide = queries;
    int32_t capacity = 1;
    for (RetrievalQuery& query : wide) {
      query.k = std::min(2 * query.k, query.mid.size());
      query.least_key = 0;
      capacity = std::max(capacity, query.k);
    }
    for (const bool flat : {false, true}) {  // queries of zeros: all masses are equal
      Matrix q =
          flat ? Matrix(3, int64_t{heads} * d) : Matrix::Normal(random_, 3, int64_t{heads} * d);
      const size_t states = queries.size() * heads;
      std::vector<float> anchors(states);
      for (float& mass : anchors) mass = random_.Normal(3.0f);
      anchors[0] = -std::numeric_limits<float>::infinity();
      OwnedSelection selected(queries.size(), 2, capacity), kept(queries.size(), 2, capacity);
      std::vector<float> references(states), inverses(states);
      const MassScales scales{references.data(), inverses.data()};
      SelectByMassRef(q.tensor(), wide, anchors.data(), scene.weights, kScale, scene.codes.data(),
                      scene.layout, selected.view(), nullptr, &scales);
      RerankByMassRef({q.tensor(), queries, scene.weights, scene.codes.data(), scene.layout,
                       residual.weights, residual.codes.data(), residual.layout, kScale, scales,
                       selected.view(), kept.view()});
      MassSelectShape shape{3, group, scene.layout, 6000};
      const DeviceArray<float> on_device = Upload(q), masses(anchors);
      const DeviceArray<std::byte> codes(scene.codes), residual_codes(residual.codes);
      const DeviceQueries device_queries(queries), device_wide(wide);
      for (const bool fused : {true, false}) {
        shape.fused = fused;
        DeviceSelection selection(queries.size(), 2, capacity);
        const DeviceArray<float> device_references(states), device_inverses(states);
        const MassScales device_scales{device_references.data(), device_inverses.data()};
        Workspace workspace(MassSelectWorkspaceBytes(shape));
        WINNOW_CUDA_OK(SelectByMass(shape, scene.transform, on_device.data(), q.tensor().stride,
                                    device_wide.data(), masses.data(), kScale, codes.data(),
                                    selection.view(), {}, workspace.data(), nullptr,
                                    device_scales));
        const std::vector<float> made_references = device_references.Get();
        const std::vector<float> made_inverses = device_inverses.Get();
        for (size_t i = 0; i < states; ++i) {
          if (wide[i / heads].mid.size() == 0) continue;
          ASSERT_EQ(made_references[i], references[i]) << "G " << group << " fused " << fused;
          ASSERT_EQ(made_inverses[i], inverses[i]) << "G " << group << " fused " << fused;
        }
        Workspace of_candidates(RerankWorkspaceBytes(3, 2, group, capacity));
        WINNOW_CUDA_OK(RerankByMass(3, group, {&scene.transform, codes.data(), scene.layout},
                                    {&residual.transform, residual_codes.data(), residual.layout},
                                    on_device.data(), q.tensor().stride, device_queries.data(),
                                    kScale, device_scales, selection.view(), of_candidates.data(),
                                    nullptr));
        // In place: candidates that are not kept stay behind the end.
        const std::vector<int32_t> counts = selection.Counts();
        std::vector<int32_t> tokens(counts.size() * capacity);
        WINNOW_CUDA_OK(cudaMemcpy(tokens.data(), selection.view().tokens,
                                  tokens.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < queries.size(); ++i) {
          for (int32_t head = 0; head < 2; ++head) {
            const size_t list = i * 2 + head;
            ASSERT_GE(counts[list], 0);
            ASSERT_LE(counts[list], capacity);
            const auto first = tokens.begin() + static_cast<int64_t>(list) * capacity;
            ASSERT_EQ(std::vector<int32_t>(first, first + counts[list]),
                      kept.Of(static_cast<int64_t>(i), head))
                << "G " << group << " query " << i << " head " << head << " flat " << flat;
          }
        }
      }
    }
  }
}

TEST_F(CudaTransformCodeTest, LongRowsOfManyChunks) {
  SCOPED_TRACE(Seed());
  const Scene scene(random_, 128, 2, 4, 128, {30000});
  RetrievalQuery query;
  query.block_table = scene.kv.table(0);
  query.position = 29999;
  query.mid = {16, 29872};
  for (const int32_t k : {600, 1, 0, query.mid.size()}) {
    query.k = k;
    for (const double least : {0.0, 1e-4, 3e-3, 0.9}) {
      query.least_key = LeastMassKey(least, 4);
      for (const bool fused : {true, false}) ExpectSelects(scene, {query}, 1, false, fused);
    }
  }
}

// The fused kernel's chunks grow with the number of rows, until there is no room for all of them at once.
TEST_F(CudaTransformCodeTest, ManyRowsTakeLongerChunksOrPasses) {
  SCOPED_TRACE(Seed());
  for (const int32_t group : {2, 4, 8, 16}) {
    const int32_t bits = random_.Int(0, 1) == 0 ? 128 : 256;
    const Scene scene(random_, 64, 2, group, bits, {4000, 9000});
    for (const int32_t count : {9, 30, 60, 130, 300}) {
      SCOPED_TRACE(::testing::Message()
                   << bits << " bits, G " << group << ", " << count << " queries");
      std::vector<RetrievalQuery> queries;
      for (int32_t i = 0; i < count; ++i) {
        queries.push_back(AnyQuery(scene, i % 16 == 0 ? 1 : 0, i % 7, i % 16 == 0 ? 9000 : 700));
      }
      ExpectSelects(scene, queries, 7, false);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaTransformCodeTest, TablesAreTheReferencesToTheBit) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const int32_t d = std::array{64, 80, 128, 256}[round % 4];
    const DType dtype = d > 128 ? DType::kBF16 : kCudaKvTypes[round / 4];
    SCOPED_TRACE(DTypeName(dtype));
    const Scene scene(random_, d, 2, 1, 128, {900, 400}, 64, dtype);
    const DeviceArray<std::byte> pool = UploadPool(scene.kv), codes(scene.codes);
    const auto floats = static_cast<size_t>(CellTableFloats(2, d));
    std::vector<float> expected(floats);
    Summary table{expected.data(), {16, 16}};
    const DeviceArray<float> made(floats);
    int32_t first = 16;
    for (const int32_t last : {64, 128, 512, 832}) {  // token by token, and through shared memory
      const std::vector<CellTableExtension> extensions = {
          {&table, scene.kv.table(0), scene.kv.table(0), last}};
      ExtendCellTablesRef(extensions, scene.kv.pool(), scene.kv.layout(), scene.weights,
                          scene.codes.data(), scene.layout);
      const DeviceArray<int32_t> block_table(scene.kv.table(0));
      const std::vector<DeviceTableExtension> on_host = {{block_table.data(),
                                                          block_table.data(),
                                                          made.data(),
                                                          {first, last},
                                                          first == 16 ? 1 : 0,
                                                          0}};
      const DeviceArray<DeviceTableExtension> on_device(on_host);
      WINNOW_CUDA_OK(ExtendCellTables(scene.transform, on_device.data(), 1, last - first,
                                      pool.data(), scene.kv.layout(), codes.data(), scene.layout,
                                      nullptr));
      ASSERT_EQ(made.Get(), expected) << "d " << d << " up to " << last;
      first = last;
    }
  }
}

TEST_F(CudaTransformCodeTest, TailsAreMergedAsTheReferenceMergesThem) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 128}) {
    Scene scene(random_, d, 2, 3, 128, {100});
    // One launch, and several.
    const int32_t heads = scene.heads(), queries = d == 64 ? 3 : 70;
    const auto floats = static_cast<size_t>(CellTableFloats(2, d));
    std::vector<float> table(floats);
    for (float& value : table) value = random_.Normal(2.0f);
    for (size_t i = floats - 2 * (kTransformCells + 1); i < floats; ++i) {
      table[i] = static_cast<float>(random_.Int(0, 50));
    }
    const std::vector<const float*> tables(queries, table.data());
    const size_t states = static_cast<size_t>(queries) * heads;
    std::vector<int64_t> masses(states * kTransformCells);
    for (int64_t& mass : masses) mass = random_.Int(0, 2) == 0 ? random_.Int(0, 1 << 30) : 0;
    std::fill_n(masses.begin(), kTransformCells, 0);  // a head without a tail
    std::vector<float> references(states), deltas(states), expected;
    for (float& value : references) value = random_.Normal(10.0f);
    for (float& value : deltas) value = random_.Normal(0.1f);
    for (size_t i = 0; i < states * AttentionStateFloats(d); ++i) {
      expected.push_back(random_.Normal(1.0f));
    }
    for (size_t i = 0; i < states; ++i) {
      float* const state = &expected[i * AttentionStateFloats(d)];
      state[d + 1] = 1 + std::abs(state[d + 1]);
      if (i % 5 == 4) ResetAttentionState(state, d);  // nothing was read
    }
    const DeviceArray<float> on_device(expected), device_table(table),
        device_references(references), device_deltas(deltas);
    const DeviceArray<int64_t> device_masses(masses);
    const std::vector<const float*> device_tables(queries, device_table.data());
    const std::vector<RetrievalQuery> of_queries(queries);
    MergeTailsRef(of_queries, tables, scene.weights,
                  {heads, masses.data(), references.data(), deltas.data()}, d, expected.data());
    WINNOW_CUDA_OK(
        MergeTails(scene.transform, device_tables,
                   {heads, device_masses.data(), device_references.data(), device_deltas.data()},
                   on_device.data(), nullptr));
    const std::vector<float> merged = on_device.Get();
    for (size_t i = 0; i < merged.size(); ++i) {
      if (expected[i] == merged[i]) continue;  // infinities, too
      ASSERT_NEAR(merged[i], expected[i], 1e-4 * (1 + std::abs(expected[i])))
          << "d " << d << " " << i;
    }
  }
}

// One launch for all steps has the bits of the steps.
TEST_F(CudaTransformCodeTest, StatesEndAsStepByStep) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 96, 128}) {
    Scene scene(random_, d, 3, static_cast<int32_t>(random_.Int(1, 5)), 128, {100});
    for (TransformCodeHead& head : scene.weights.heads) head.tail = random_.Int(0, 1) == 0;
    std::vector<std::byte> packed(scene.packed_memory.size());
    const DeviceTransform transform =
        PackTransform(scene.weights, packed.data(), scene.packed_memory.data());
    scene.packed_memory.Set(packed);
    const int32_t heads = scene.heads(), num_queries = d == 64 ? 70 : 3;  // several launches
    const auto states = static_cast<size_t>(num_queries) * heads;
    const auto any_states = [&] {
      std::vector<float> values;
      for (size_t i = 0; i < states * AttentionStateFloats(d); ++i) {
        values.push_back(random_.Normal(3.0f));
      }
      for (size_t i = 0; i < states; ++i) {
        float* const state = &values[i * AttentionStateFloats(d)];
        state[d + 1] = std::abs(state[d + 1]) + 0.1f;
        if (random_.Int(0, 4) == 0) ResetAttentionState(state, d);
      }
      return values;
    };
    const std::vector<float> before = any_states(), of_parts = any_states();
    std::vector<float> table(CellTableFloats(3, d));
    for (float& value : table) value = std::abs(random_.Normal(2.0f));
    std::vector<int64_t> masses(states * kTransformCells);
    for (int64_t& mass : masses) mass = random_.Int(0, 2) == 0 ? random_.Int(0, 1 << 30) : 0;
    std::fill_n(masses.begin(), kTransformCells, 0);  // of nothing
    std::vector<float> references(states), deltas(states);
    // Some lie above what a tail may be at most.
    for (float& value : references) value = random_.Normal(40.0f);
    for (float& value : deltas) value = random_.Normal(0.1f);
    std::vector<RetrievalQuery> of_queries(num_queries);
    for (int32_t i = 0; i < num_queries; ++i) of_queries[i].row = num_queries - 1 - i;
    const DeviceArray<float> parts(of_parts), device_table(table), device_references(references),
        device_deltas(deltas);
    const DeviceArray<int64_t> device_masses(masses);
    const DeviceQueries queries(of_queries);
    const std::vector<const float*> tables(num_queries, device_table.data());
    const TailMasses tail{heads, device_masses.data(), device_references.data(),
                          device_deltas.data()};
    const DeviceArray<float> sinks(std::vector<float>(heads, 1.5f));
    const int64_t stride = int64_t{heads} * d + 3;
    for (const bool merges : {false, true}) {
      for (const bool has_tail : {false, true}) {
        const DeviceArray<float> stepwise(before), at_once(before);
        const DeviceArray<float> out_stepwise(num_queries * stride),
            out_at_once(num_queries * stride);
        if (merges) {
          WINNOW_CUDA_OK(
              MergeStates(parts.data(), static_cast<int64_t>(states), d, stepwise.data(), nullptr));
        }
        if (has_tail) {
          WINNOW_CUDA_OK(MergeTails(transform, tables, tail, stepwise.data(), nullptr));
        }
        const float* const of_heads = merges == has_tail ? sinks.data() : nullptr;
        WINNOW_CUDA_OK(FinishStates(stepwise.data(), queries.data(), num_queries, heads, d,
                                    of_heads, out_stepwise.data(), stride, nullptr));
        StateEnd end{.states = at_once.data(),
                     .num_queries = num_queries,
                     .heads = heads,
                     .head_dim = d,
                     .queries = queries.data(),
                     .out = out_at_once.data(),
                     .out_stride = stride,
                     .sinks = of_heads};
        if (merges) end.parts = parts.data();
        if (has_tail) {
          end.transform = &transform;
          end.tables = tables;
          end.tail = tail;
        }
        WINNOW_CUDA_OK(EndStates(end, nullptr));
        const auto same = [](const DeviceArray<float>& a, const DeviceArray<float>& b) {
          const std::vector<float> of_a = a.Get(), of_b = b.Get();
          return std::memcmp(of_a.data(), of_b.data(), 4 * of_a.size()) == 0;
        };
        ASSERT_EQ(at_once.Get(), before) << "d " << d << " " << merges << has_tail;
        ASSERT_TRUE(same(out_at_once, out_stepwise)) << "d " << d << " " << merges << has_tail;
      }
    }
  }
}

// Selection makes the anchors' masses where it is given their states: the bits of StateMasses, also where mid is empty.
TEST_F(CudaTransformCodeTest, MassesOfAnchorsAreMadeOfTheirStates) {
  SCOPED_TRACE(Seed());
  const int32_t d = 64, group = 4;
  const Scene scene(random_, d, 2, group, 128, {3000});
  std::vector<RetrievalQuery> queries;
  for (int32_t i = 0; i < 9; ++i) queries.push_back(AnyQuery(scene, 0, i, 3000 - i));
  queries[4].mid.last = queries[4].mid.first;
  queries[4].k = 0;
  int32_t capacity = 1;
  for (const RetrievalQuery& query : queries) capacity = std::max(capacity, query.k);
  const size_t states = queries.size() * scene.heads();
  std::vector<float> of_anchors;
  for (size_t i = 0; i < states * AttentionStateFloats(d); ++i) {
    of_anchors.push_back(random_.Normal(3.0f));
  }
  for (size_t i = 0; i < states; ++i) {
    float& sum = of_anchors[i * AttentionStateFloats(d) + d + 1];
    sum = std::abs(sum) + 0.1f;
    if (i == 5) ResetAttentionState(&of_anchors[i * AttentionStateFloats(d)], d);
  }
  Matrix q = Matrix::Normal(random_, 9, int64_t{scene.heads()} * d);
  const DeviceArray<float> on_device = Upload(q), anchor_states(of_anchors);
  const DeviceArray<std::byte> codes(scene.codes);
  const DeviceQueries device_queries(queries);
  const MassSelectShape shape{9, group, scene.layout, 3000};
  Workspace workspace(MassSelectWorkspaceBytes(shape));
  std::vector<float> expected_masses, expected_references;
  std::vector<std::vector<int32_t>> expected;
  for (const bool makes : {false, true}) {
    const DeviceArray<float> masses(states), references(states), deltas(states);
    const DeviceArray<int64_t> cells(states * kTransformCells);
    DeviceSelection selection(queries.size(), 2, capacity);
    AnchorMasses anchors(anchor_states.data(), masses.data());
    if (!makes) {
      WINNOW_CUDA_OK(StateMasses(anchor_states.data(), static_cast<int64_t>(states), d,
                                 masses.data(), nullptr));
      anchors = AnchorMasses(masses.data());
    }
    WINNOW_CUDA_OK(SelectByMass(shape, scene.transform, on_device.data(), q.tensor().stride,
                                device_queries.data(), anchors, kScale, codes.data(),
                                selection.view(),
                                {scene.heads(), cells.data(), references.data(), deltas.data()},
                                workspace.data(), nullptr));
    if (!makes) {
      expected_masses = masses.Get();
      expected_references = references.Get();
      expected = selection.Chosen();
      continue;
    }
    EXPECT_EQ(masses.Get(), expected_masses);
    EXPECT_EQ(references.Get(), expected_references);
    EXPECT_EQ(selection.Chosen(), expected);
  }
}

TEST_F(CudaTransformCodeTest, StatesOfTwoPartsBecomeOne) {
  SCOPED_TRACE(Seed());
  const int32_t d = 80, count = 7;
  std::vector<float> states, parts;
  for (int i = 0; i < count * (d + 2); ++i) {
    states.push_back(random_.Normal(1.0f));
    parts.push_back(random_.Normal(1.0f));
  }
  for (int i = 0; i < count; ++i) {
    float &sum = states[i * (d + 2) + d + 1], &part_sum = parts[i * (d + 2) + d + 1];
    sum = 1 + std::abs(sum);
    part_sum = 1 + std::abs(part_sum);
  }
  ResetAttentionState(&states[2 * (d + 2)], d);
  ResetAttentionState(&parts[3 * (d + 2)], d);
  const DeviceArray<float> on_device(states), device_parts(parts);
  for (int i = 0; i < count; ++i) {
    MergeAttentionState(&states[i * (d + 2)], &parts[i * (d + 2)], d);
  }
  WINNOW_CUDA_OK(MergeStates(device_parts.data(), count, d, on_device.data(), nullptr));
  const std::vector<float> merged = on_device.Get();
  for (size_t i = 0; i < merged.size(); ++i) {
    if (states[i] == merged[i]) continue;
    ASSERT_NEAR(merged[i], states[i], 1e-5 * (1 + std::abs(states[i]))) << i;
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda
