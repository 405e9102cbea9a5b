// Choosing tokens to attend to, completing what was not chosen, and choosing the next token.
#include "kernels/completion.h"
#include "kernels/cuda/bench.h"
#include "kernels/cuda/completion.h"
#include "kernels/cuda/hamming_select.h"
#include "kernels/cuda/hash_encode.h"
#include "kernels/cuda/int4_keys.h"
#include "kernels/cuda/sample.h"
#include "kernels/cuda/top_p.h"
#include "kernels/cuda/transform_code.h"
#include "kernels/dtype.h"
#include "kernels/hamming_select.h"
#include "kernels/hash_encode.h"
#include "kernels/int4_keys.h"
#include "kernels/sample.h"
#include "kernels/top_p.h"
#include "kernels/transform_code.h"

namespace winnow::kernels::cuda {

void BenchCodes(Bench& bench) {
  if (!bench.Wants("codes")) return;
  struct Case {
    int32_t batch, n, k, bits;
  };
  for (const Case c : {Case{1, 8192, 512, 128},
                       {1, 32768, 512, 128},
                       {1, 131072, 2048, 128},
                       {1, 524288, 2048, 128},
                       {1, 1 << 20, 2048, 128},
                       {1, 1 << 20, 16384, 128},
                       {1, 131072, 2048, 32},
                       {1, 131072, 2048, 256},
                       {8, 32768, 512, 128},
                       {24, 122880, 2048, 128}}) {
    const std::string text =
        Text("batch %d, n %dK, k %d, %d bits", c.batch, c.n >> 10, c.k, c.bits);
    if (!bench.WantsShape(text)) continue;
    const Sequences sequences(c.batch, c.n, c.k);
    const CodeLayout layout{kKvHeads, kBlock, c.bits};
    const HammingSelectShape shape{c.batch, kGroup, layout, c.n};
    const double bytes = static_cast<double>(sequences.num_blocks) * layout.BlockBytes();
    const int copies = Bench::Copies(bytes);
    std::vector<Memory<std::byte>> codes;
    for (int i = 0; i < copies; ++i) codes.push_back(RandomBytes(static_cast<int64_t>(bytes)));
    const auto query_codes = RandomBytes(int64_t{c.batch} * kKvHeads * kGroup * c.bits / 8);
    Memory<std::byte> workspace(static_cast<int64_t>(HammingSelectWorkspaceBytes(shape)));
    Memory<int32_t> counts(c.batch * kKvHeads), tokens(int64_t{c.batch} * kKvHeads * c.k);
    const Selection chosen{kKvHeads, c.k, counts.data(), tokens.data()};
    const double seconds = bench.Seconds(copies, 20, [&](int i, cudaStream_t stream) {
      return SelectByCodes(shape, sequences.queries.data(), query_codes.data(), codes[i].data(),
                           chosen, workspace.data(), stream);
    });
    bench.Report("codes: select", text, seconds, bytes);
  }
}

namespace {

// Widths as a fit gives them: `bits` over quads of falling variance.
TransformCodeWeights BenchTransform(int32_t d, int32_t bits) {
  TransformCodeWeights weights;
  weights.head_dim = d;
  weights.bits = bits;
  TransformCodeHead head;
  for (int32_t left = bits / 4, quad = 0; left > 0; ++quad) {
    const int32_t width = std::min(left, std::max(1, 5 - quad / 2));
    head.widths.push_back(static_cast<uint8_t>(width));
    left -= width;
  }
  head.quads = static_cast<int32_t>(head.widths.size());
  head.fields = LayCodeFields(head.widths, bits / 32);
  const auto random = [](float deviation) {
    return deviation * (static_cast<float>(HostRandom() % 2001) / 1000.0f - 1.0f);
  };
  for (int32_t i = 0; i < 4 * head.quads * d; ++i) {
    const auto levels = static_cast<float>(1 << head.widths[i % (4 * head.quads) / 4]);
    head.key_weight.push_back(random(levels / 12.0f));
    head.query_weight.push_back(random(0.1f / levels));
  }
  for (int32_t i = 0; i < 4 * head.quads; ++i) {
    head.key_bias.push_back(static_cast<float>(1 << head.widths[i / 4]) / 2);
  }
  head.mean.assign(d, 0.01f);
  for (uint8_t bit = 0; bit < 8; ++bit) head.cell_bits.push_back(16 * bit);
  head.tail = true;
  weights.heads.assign(kKvHeads, head);
  return weights;
}

struct DeviceTransformMemory {
  explicit DeviceTransformMemory(const TransformCodeWeights& weights)
      : memory(static_cast<int64_t>(PackedTransformBytes(weights))) {
    std::vector<std::byte> host(PackedTransformBytes(weights));
    transform = PackTransform(weights, host.data(), memory.data());
    CHECK_CUDA(cudaMemcpy(memory.data(), host.data(), host.size(), cudaMemcpyDefault));
  }
  Memory<std::byte> memory;
  DeviceTransform transform;
};

// Twice as many candidates as are read, spread over the context. All are kept, so that every call finds as many; what
// re-ranking does for a candidate is the same.
void BenchRerank(Bench& bench) {
  constexpr int32_t d = 128, heads = kKvHeads * kGroup;
  struct Case {
    int32_t batch, n, k;
  };
  for (const Case c : {Case{1, 8192, 164},
                       {1, 131072, 2048},
                       {1, 131072, 2621},
                       {8, 32768, 512},
                       {24, 122880, 2048}}) {
    const std::string text = Text("batch %d, n %dK, k %d", c.batch, c.n >> 10, c.k);
    if (!bench.WantsShape(text)) continue;
    const DeviceTransformMemory transform(BenchTransform(d, 128)), residual(BenchTransform(d, 128));
    const int32_t candidates = 2 * c.k, rows = c.batch * kKvHeads;
    const Sequences sequences(c.batch, c.n, candidates);
    const CodeLayout layout{kKvHeads, kBlock, 128};
    const auto bytes = static_cast<int64_t>(sequences.num_blocks * layout.BlockBytes());
    const auto codes = RandomBytes(bytes), residual_codes = RandomBytes(bytes);
    const auto q = RandomFloats(int64_t{c.batch} * heads * d);
    const std::vector<int32_t> of_rows(rows, candidates);
    std::vector<int32_t> of_all;
    for (int32_t row = 0; row < rows; ++row) {
      for (int64_t j = 0; j < candidates; ++j) {
        of_all.push_back(static_cast<int32_t>(j * (c.n - 256) / candidates) + 16);
      }
    }
    Memory<int32_t> counts(of_rows), tokens(of_all);
    Memory<float> references(std::vector<float>(c.batch * heads, 8.0f)),
        inverses(std::vector<float>(c.batch * heads, 0.01f));
    Memory<std::byte> workspace(
        static_cast<int64_t>(RerankWorkspaceBytes(c.batch, kKvHeads, kGroup, candidates)));
    const double seconds = bench.Seconds(1, 20, [&](int, cudaStream_t stream) {
      return RerankByMass(
          c.batch, kGroup, {&transform.transform, codes.data(), layout},
          {&residual.transform, residual_codes.data(), layout}, q.data(), int64_t{heads} * d,
          sequences.queries.data(), 0.1f, {references.data(), inverses.data()},
          {kKvHeads, candidates, counts.data(), tokens.data()}, workspace.data(), stream);
    });
    bench.Report("masses: re-rank", text, seconds,
                 RerankByMassBytes(double{1} * rows * candidates, layout, layout));
  }
}

}  // namespace

void BenchMasses(Bench& bench) {
  if (!bench.Wants("masses")) return;
  constexpr int32_t d = 128, heads = kKvHeads * kGroup;
  struct Case {
    int32_t batch, n, k, bits;
    bool shared = false;  // all sequences have the first one's blocks
  };
  for (const Case c : {Case{1, 8192, 512, 128},
                       {1, 32768, 512, 128},
                       {1, 131072, 2048, 128},
                       {1, 131072, 2048, 192},
                       {1, 524288, 2048, 128},
                       {1, 1 << 20, 2048, 128},
                       {1, 131072, 2048, 256},
                       {8, 32768, 512, 128},
                       {24, 32768, 512, 128},
                       {24, 122880, 2048, 128},
                       {24, 122880, 2048, 128, true},
                       {24, 122880, 2048, 192, true},
                       {64, 2048, 41, 192}}) {
    const std::string text = Text("batch %d, n %dK, k %d, %d bits%s", c.batch, c.n >> 10, c.k,
                                  c.bits, c.shared ? ", shared" : "");
    if (!bench.WantsShape(text)) continue;
    const DeviceTransformMemory transform(BenchTransform(d, c.bits));
    const Sequences sequences(c.batch, c.n, c.k, c.shared);
    const CodeLayout layout{kKvHeads, kBlock, c.bits};
    MassSelectShape shape{c.batch, kGroup, layout, c.n};
    MassSelectShape in_passes = shape;
    in_passes.fused = false;
    const double bytes = static_cast<double>(sequences.num_blocks) * layout.BlockBytes();
    const int copies = Bench::Copies(bytes);
    std::vector<Memory<std::byte>> codes;
    for (int i = 0; i < copies; ++i) codes.push_back(RandomBytes(static_cast<int64_t>(bytes)));
    const auto q = RandomFloats(int64_t{c.batch} * heads * d);
    const Memory<float> anchors(std::vector<float>(c.batch * heads, 5.0f));
    Memory<std::byte> workspace(static_cast<int64_t>(
        std::max(MassSelectWorkspaceBytes(shape), MassSelectWorkspaceBytes(in_passes))));
    Memory<int32_t> counts(c.batch * kKvHeads), tokens(int64_t{c.batch} * kKvHeads * c.k);
    const Selection chosen{kKvHeads, c.k, counts.data(), tokens.data()};
    Memory<int64_t> masses(int64_t{c.batch} * heads * kTransformCells);
    Memory<float> references(c.batch * heads), deltas(c.batch * heads);
    for (const int way : {0, 1, 2, 3}) {
      const bool tail = way % 2 != 0;
      shape.fused = way < 2;
      const TailMasses of_tail =
          tail ? TailMasses{heads, masses.data(), references.data(), deltas.data()} : TailMasses{};
      const double seconds = bench.Seconds(copies, 20, [&](int i, cudaStream_t stream) {
        return SelectByMass(shape, transform.transform, q.data(), int64_t{heads} * d,
                            sequences.queries.data(), anchors.data(), 0.1f, codes[i].data(), chosen,
                            of_tail, workspace.data(), stream);
      });
      bench.Report(
          Text("masses: select%s%s", tail ? ", tail" : "", shape.fused ? "" : ", in passes"), text,
          seconds, bytes);
    }
  }
  BenchRerank(bench);
  const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
  const CodeLayout layout{kKvHeads, kBlock, 128};
  const DeviceTransformMemory transform(BenchTransform(d, 128));
  for (const int32_t tokens : {1, 512, 2048, 8192}) {
    const Sequences sequences(1, std::max(tokens, 1024), 0);
    const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
    Memory<std::byte> codes(static_cast<int64_t>(sequences.num_blocks * layout.BlockBytes()));
    const Memory<DeviceKeySpan> spans(
        std::vector<DeviceKeySpan>{{sequences.table.data(), {0, tokens}, sequences.table.data()}});
    const double seconds = bench.Seconds(2, 20, [&](int, cudaStream_t stream) {
      return EncodeTransformKeys(transform.transform, spans.data(), 1, tokens, pool.data(), kv,
                                 codes.data(), layout, stream);
    });
    const double flops = 2.0 * tokens * kKvHeads * d * 4 * transform.transform.quads;
    bench.Report("masses: codes of keys", Text("%d tokens", tokens), seconds,
                 2.0 * d * kKvHeads * tokens, false, flops);
    if (tokens < kCellRefreshTokens) continue;
    Memory<float> table(CellTableFloats(kKvHeads, d));
    const Memory<DeviceTableExtension> extension(std::vector<DeviceTableExtension>{
        {sequences.table.data(), sequences.table.data(), table.data(), {0, tokens}, 1, 0}});
    const double extend = bench.Seconds(2, 20, [&](int, cudaStream_t stream) {
      return ExtendCellTables(transform.transform, extension.data(), 1, tokens, pool.data(), kv,
                              codes.data(), layout, stream);
    });
    bench.Report("masses: cell tables", Text("%d tokens", tokens), extend,
                 2.0 * d * kKvHeads * tokens);
  }
}

void BenchEncode(Bench& bench) {
  if (!bench.Wants("encode")) return;
  constexpr int32_t d = 128;
  struct Kind {
    const char* name;
    std::vector<int32_t> widths;
  };
  for (const Kind& kind : {Kind{"hata", {d, 128}}, Kind{"spotlight", {d, 128, 128}},
                           Kind{"hashattention", {d, 128, 128, 32}}}) {
    EncoderWeights weights;
    weights.kv_heads = kKvHeads;
    std::vector<std::vector<uint16_t>> values;
    std::vector<std::vector<float>> biases;
    for (size_t i = 0; i + 1 < kind.widths.size(); ++i) {
      values.emplace_back(int64_t{kKvHeads} * kind.widths[i] * kind.widths[i + 1]);
      for (uint16_t& value : values.back()) {
        value = ToBF16(static_cast<float>(HostRandom() % 2001) / 1000.0f - 1.0f).bits;
      }
      biases.emplace_back(int64_t{kKvHeads} * kind.widths[i + 1], 0.1f);
    }
    for (size_t i = 0; i + 1 < kind.widths.size(); ++i) {
      weights.stages.push_back({values[i], biases[i], kind.widths[i], kind.widths[i + 1]});
    }
    std::vector<std::byte> packed(PackedEncoderBytes(weights));
    constexpr int kCopies = 64;  // layers: their weights come from HBM in their turn
    std::vector<Memory<std::byte>> memory;
    std::vector<DeviceEncoder> encoders;
    for (int i = 0; i < kCopies; ++i) {
      memory.emplace_back(static_cast<int64_t>(packed.size()));
      encoders.push_back(PackEncoder(weights, packed.data(), memory.back().data()));
      CHECK_CUDA(cudaMemcpy(memory.back().data(), packed.data(), packed.size(), cudaMemcpyDefault));
    }
    const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
    const CodeLayout layout{kKvHeads, kBlock, kind.widths.back()};
    const auto flush = RandomBytes(256 << 20);
    for (const int32_t batch : {1, 24}) {
      const Sequences sequences(batch, 1024, 0);
      const auto q = RandomFloats(int64_t{batch} * kKvHeads * kGroup * d);
      Memory<std::byte> codes(int64_t{batch} * kKvHeads * kGroup * kind.widths.back() / 8);
      const double seconds = bench.Seconds(kCopies, kCopies, [&](int i, cudaStream_t stream) {
        return EncodeQueries(encoders[i], sequences.queries.data(), batch, kGroup, q.data(),
                             kKvHeads * kGroup * d, d, codes.data(), stream);
      });
      bench.Report("encode: queries", Text("%s, batch %d", kind.name, batch), seconds,
                   EncodeBytes(int64_t{batch} * kGroup, 4.0 * d, weights), false,
                   EncodeFlops(int64_t{batch} * kGroup, weights));
    }
    for (const int32_t tokens : {1, 512, 2048, 8192}) {
      const Sequences sequences(1, std::max(tokens, 1024), 0);
      const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
      Memory<std::byte> codes(static_cast<int64_t>(sequences.num_blocks * layout.BlockBytes()));
      const Memory<DeviceKeySpan> spans(std::vector<DeviceKeySpan>{
          {sequences.table.data(), {0, tokens}, sequences.table.data()}});
      const double seconds = bench.Seconds(kCopies, kCopies, [&](int i, cudaStream_t stream) {
        return EncodeKeys(encoders[i], spans.data(), 1, tokens, pool.data(), kv, codes.data(),
                          layout, stream);
      });
      bench.Report("encode: keys", Text("%s, %d tokens", kind.name, tokens), seconds,
                   EncodeBytes(tokens, 2.0 * d, weights), false, EncodeFlops(tokens, weights));
    }
  }
}

void BenchTopP(Bench& bench) {
  if (!bench.Wants("top-p")) return;
  constexpr int32_t n = 131072;
  for (const int32_t d : {64, 128}) {
    const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
    const Sequences sequences(1, n, 0);
    const int64_t key_bytes = static_cast<int64_t>(sequences.num_blocks * Int4BlockBytes(kv));
    const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
    constexpr int kCopies = 6;
    std::vector<Memory<std::byte>> keys;
    for (int i = 0; i < kCopies; ++i) keys.emplace_back(key_bytes);
    const Memory<DeviceKeySpan> spans(
        std::vector<DeviceKeySpan>{{sequences.table.data(), {0, n}, sequences.table.data()}});
    const double quantize = bench.Seconds(kCopies, kCopies, [&](int i, cudaStream_t stream) {
      return QuantizeKeys(spans.data(), 1, n, pool.data(), kv, keys[i].data(), stream);
    });
    bench.Report("top-p: quantize", Text("%dK tokens, d %d", n >> 10, d), quantize,
                 QuantizeKeysBytes(n, kv), false);
    for (const int32_t candidates : {2048, 8192, 32768}) {
      std::vector<int32_t> counts_host(kKvHeads, candidates), tokens_host;
      for (int head = 0; head < kKvHeads; ++head) {
        const auto some = SomeTokens(16, n - 128, candidates);
        tokens_host.insert(tokens_host.end(), some.begin(), some.end());
      }
      const Memory<int32_t> counts(counts_host), tokens(tokens_host);
      Memory<int32_t> kept_counts(kKvHeads), kept_tokens(int64_t{kKvHeads} * candidates);
      const Selection from{kKvHeads, candidates, counts.data(), tokens.data()};
      const Selection kept{kKvHeads, candidates, kept_counts.data(), kept_tokens.data()};
      const auto q = RandomFloats(kKvHeads * kGroup * d, 4.0f);
      const TopPShape shape{1, kGroup, kv, 144, candidates};
      Memory<std::byte> workspace(static_cast<int64_t>(TopPWorkspaceBytes(shape)));
      const double seconds = bench.Seconds(kCopies, 18, [&](int i, cudaStream_t stream) {
        return PruneSelection(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                              keys[i].data(), 1.0f / 11, 0.9f, from, kept, workspace.data(),
                              stream);
      });
      std::vector<int32_t> left(kKvHeads);
      CHECK_CUDA(cudaMemcpy(left.data(), kept_counts.data(), 4 * kKvHeads, cudaMemcpyDefault));
      bench.Report("top-p: prune",
                   Text("%d candidates a head, d %d; head 0 keeps %d", candidates, d, left[0]),
                   seconds, PruneSelectionBytes(int64_t{kKvHeads} * (candidates + 144), kv));
    }
  }
}

void BenchCompletion(Bench& bench) {
  if (!bench.Wants("completion")) return;
  constexpr int32_t n = 131072, d = 128, kInner = 128, kFeatures = 64;
  const KvLayout kv{kKvHeads, d, kBlock, DType::kBF16};
  const Sequences sequences(1, n, 0);
  const auto pool = RandomBf16(static_cast<int64_t>(sequences.num_blocks * kv.BlockBytes()), 1);
  DeviceFeatureMap map{nullptr, nullptr, nullptr, nullptr, kKvHeads, d, kInner, kFeatures};
  const auto fragments = [](int64_t count) { return RandomBf16(count * 32 * 16, 0.05f); };
  const auto gate_up = fragments(int64_t{kKvHeads} * map.GateUpFragments());
  const auto out = fragments(int64_t{kKvHeads} * map.OutFragments());
  const auto bias = RandomFloats(kKvHeads * 2 * kInner, 0.1f);
  map.gate_up = reinterpret_cast<const uint4*>(gate_up.data());
  map.out = reinterpret_cast<const uint4*>(out.data());
  map.gate_up_bias = map.out_bias = bias.data();
  Memory<float> summary(kKvHeads * SummaryFloats(kFeatures, d));
  for (const int32_t tokens : {1, 512, 2048, 8192}) {
    const Memory<DeviceExtension> extension(std::vector<DeviceExtension>{
        {sequences.table.data(), summary.data(), {16, 16 + tokens}, 1, 0}});
    Memory<std::byte> workspace(
        static_cast<int64_t>(ExtendSummariesWorkspaceBytes(1, tokens, map)));
    const double seconds = bench.Seconds(1, 4, [&](int, cudaStream_t stream) {
      return ExtendSummaries(extension.data(), 1, tokens, pool.data(), kv, map, workspace.data(),
                             stream);
    });
    bench.Report("completion: enter", Text("%d tokens, d %d, F %d", tokens, d, kFeatures), seconds,
                 kKvHeads * CompletionBytes(tokens, kv, kInner, kFeatures), false,
                 kKvHeads * CompletionFlops(tokens, 0, d, kInner, kFeatures));
  }
  for (const int32_t chosen : {655, 2048}) {
    const Lists lists(sequences, 1, n, chosen, kv, {pool.data()});
    std::vector<RowList> host(kKvHeads);
    CHECK_CUDA(cudaMemcpy(host.data(), lists.lists[0].data(), kKvHeads * sizeof(RowList),
                          cudaMemcpyDefault));
    for (RowList& list : host) list.chosen_last = list.count;
    const Memory<RowList> all_chosen(host);
    const auto q = RandomFloats(kKvHeads * kGroup * d);
    const Memory<const float*> summaries(std::vector<const float*>{summary.data()});
    const CompletionShape shape{1, kGroup, kv, chosen};
    Memory<std::byte> workspace(static_cast<int64_t>(CompleteStatesWorkspaceBytes(shape, map)));
    auto states = RandomFloats(kKvHeads * kGroup * (d + 2));
    const double seconds = bench.Seconds(1, 8, [&](int, cudaStream_t stream) {
      return CompleteStates(shape, q.data(), kKvHeads * kGroup * d, sequences.queries.data(),
                            {.lists = all_chosen.data()}, summaries.data(), map, map, states.data(),
                            workspace.data(), stream);
    });
    bench.Report("completion: step", Text("%d chosen a head, d %d, F %d", chosen, d, kFeatures),
                 seconds, kKvHeads * CompletionBytes(chosen, kv, kInner, kFeatures), false,
                 kKvHeads * CompletionFlops(chosen, kGroup, d, kInner, kFeatures));
  }
}

void BenchSample(Bench& bench) {
  if (!bench.Wants("sample")) return;
  constexpr int32_t kVocab = 128256;
  struct Kind {
    const char* name;
    float temperature, top_p;
    int32_t top_k, top_logprobs;
  };
  for (const Kind& kind :
       {Kind{"greedy", 0, 1, 0, -1}, Kind{"T 1", 1, 1, 0, -1},
        Kind{"T 0.8, top-p 0.95", 0.8f, 0.95f, 0, -1}, Kind{"T 1, top-k 50", 1, 1, 50, -1},
        Kind{"T 1, top-k 50, top-p 0.95, 5 logprobs", 1, 0.95f, 50, 5}}) {
    for (const int32_t num_rows : {1, 8, 32}) {
      const std::string text = Text("%d rows, %s", num_rows, kind.name);
      if (!bench.WantsShape(text)) continue;
      // One copy: the product before leaves its logits in L2.
      const auto logits = RandomFloats(int64_t{num_rows} * kVocab, 2.0f);
      std::vector<DeviceSampleRow> rows_host(num_rows);
      for (DeviceSampleRow& row : rows_host) {
        row.temperature = kind.temperature;
        row.top_k = kind.top_k;
        row.top_p = kind.top_p;
        row.top_logprobs = kind.top_logprobs;
        row.noise = HostRandom();
      }
      const Memory<DeviceSampleRow> rows(rows_host);
      Memory<SampledToken> results(num_rows);
      const SampleShape shape{num_rows, kVocab};
      Memory<std::byte> workspace(static_cast<int64_t>(SampleWorkspaceBytes(shape)));
      const double seconds = bench.Seconds(1, 20, [&](int, cudaStream_t stream) {
        return Sample(shape, logits.data(), kVocab, rows.data(), results.data(), workspace.data(),
                      stream);
      });
      bench.Report("sample", text, seconds, SampleBytes(num_rows, kVocab));
    }
  }
}

}  // namespace winnow::kernels::cuda
