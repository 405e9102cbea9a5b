#include "kernels/bench.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "kernels/attention.h"
#include "kernels/attention_state.h"
#include "kernels/backend.h"
#include "kernels/bench_timing.h"
#include "kernels/completion.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/ops.h"
#include "kernels/embed_rows.h"
#include "kernels/experts.h"
#include "kernels/hamming_select.h"
#include "kernels/hash_encode.h"
#include "kernels/int4_keys.h"
#include "kernels/logit_select.h"
#include "kernels/matmul.h"
#include "kernels/page_bounds.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/row_attention.h"
#include "kernels/sample.h"
#include "kernels/silu_mul.h"
#include "kernels/thread_pool.h"
#include "kernels/top_p.h"
#include "kernels/transform_code.h"
#include "kernels/write_kv.h"

namespace winnow::kernels {
namespace {

std::string SizeText(double bytes) {
  char text[32];
  if (bytes >= 1 << 20) {
    std::snprintf(text, sizeof(text), "%.0f MiB", bytes / (1 << 20));
  } else {
    std::snprintf(text, sizeof(text), "%.0f KiB", bytes / (1 << 10));
  }
  return text;
}

// Float32 memory of the backend, filled with values of a fixed seed around zero.
struct Floats {
  Floats(Backend& backend, int64_t rows, int64_t cols, float deviation = 1.0f)
      : buffer(backend.Allocate(static_cast<size_t>(rows * cols) * 4)),
        tensor{buffer.data(), DType::kF32, rows, cols, cols} {
    std::minstd_rand random(1);
    float* values = tensor.f32();
    for (int64_t i = 0; i < rows * cols; ++i) {
      values[i] = deviation * (static_cast<float>(random() % 4096) / 1024.0f - 2.0f);
    }
  }
  Buffer buffer;
  Tensor tensor;
};

// One run of BenchKernels.
class Bench {
 public:
  Bench(const BenchOptions& options, const std::function<void(const BenchResult&)>& progress)
      : options_(options),
        progress_(progress),
        threads_(BenchThreads(options.num_threads)),
        backend_(MakeCpuBackend(options.isa, threads_)) {}

  std::vector<BenchResult> Run() {
    if (backend_ == nullptr) return {};
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      // Llama-3.2-1B: hidden 2048, inter 8192, 32 query and 8 KV heads of 64.
      for (const int64_t m : {1, 8, 64, 512}) {
        Matmul(m, 3072, 2048, dtype);   // q, k and v
        Matmul(m, 2048, 2048, dtype);   // o
        Matmul(m, 16384, 2048, dtype);  // gate and up
        Matmul(m, 2048, 8192, dtype);   // down
      }
      Matmul(1, 128256, 2048, dtype);  // logits
    }
    Matmul(1, 16384, 2048, DType::kF16);
    Matmul(512, 16384, 2048, DType::kF16);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      for (const int32_t context : {1024, 32768}) Attention(32, {8, 64, 64, dtype}, 1, context);
      Attention(32, {8, 64, 64, dtype}, 512, 2048);
    }
    Attention(32, {8, 64, 64, DType::kBF16}, 1, 131072);
    Attention(32, {8, 64, 64, DType::kBF16}, 512, 32768);
    Attention(32, {8, 128, 64, DType::kBF16}, 1, 32768);  // Llama-3.1-8B
    Attention(32, {8, 128, 64, DType::kBF16}, 512, 32768);
    for (const int32_t d : {64, 128}) Completion({8, d, 64, DType::kBF16}, 4, 32768, 655);
    Rows();
    for (const int32_t context : {8192, 131072, 524288}) Codes(context);
    for (const int32_t d : {64, 128}) {
      const KvLayout layout{8, d, 64, DType::kBF16};
      for (const int32_t rows : {512, 2048, 8192}) RowAttention(layout, rows);
      Indexes(layout);
      Selections(layout);
    }
    for (const int64_t rows : {1, 8}) Sampling(rows);
    return std::move(results_);
  }

 private:
  bool Wanted(const std::string& name) const {
    return options_.filter.empty() || name.find(options_.filter) != std::string::npos;
  }

  template <typename Body>
  double Time(Body body) const {
    return BestSeconds(options_.seconds_per_case, body);
  }

  void Add(BenchResult result) {
    if (progress_) progress_(result);
    results_.push_back(std::move(result));
  }

  // Beside a read loop over as many bytes, for kernels that memory should bound.
  void AddBesideRead(BenchResult result) {
    const size_t size_bytes = std::max<size_t>(4096, static_cast<size_t>(result.bytes)) / 64 * 64;
    result.baseline = "read loop, " + SizeText(static_cast<double>(size_bytes));
    const double baseline = MeasureReadBytesPerSecond(size_bytes, threads_);
    if (baseline > 0) result.share = result.BytesPerSecond() / baseline;
    Add(std::move(result));
  }

  void Matmul(int64_t m, int64_t out, int64_t in, DType dtype) {
    BenchResult result;
    result.name = std::string("matmul ") + DTypeName(dtype);
    result.shape =
        "m " + std::to_string(m) + ", out " + std::to_string(out) + ", in " + std::to_string(in);
    if (!Wanted(result.name)) return;
    result.bytes = MatmulBytes(m, out, in, dtype);
    result.flops = MatmulFlops(m, out, in);
    {
      // Zeros would do for the speed of the product, but not for pages: they must be there.
      const std::vector<uint16_t> weights(static_cast<size_t>(out * in) * DTypeBytes(dtype) / 2,
                                          0x3c01);
      const HostMatrix host{weights.data(), dtype, out, in};
      const auto packed = backend_->Pack({&host, 1}, dtype);
      const Floats x(*backend_, m, in), y(*backend_, m, out);
      result.seconds = Time([&] { backend_->Matmul(x.tensor, *packed, y.tensor, {}); });
    }
    if (m <= 4) return AddBesideRead(std::move(result));
    const double baseline = options_.products == nullptr
                                ? 0
                                : options_.products->flops_per_s(m, out, in, dtype, threads_);
    if (baseline > 0) {
      result.baseline = options_.products->name + " " + DTypeName(dtype);
      result.share = result.FlopsPerSecond() / baseline;
    }
    Add(std::move(result));
  }

  void Attention(int32_t heads, const KvLayout& layout, int32_t tokens, int32_t context) {
    BenchResult result;
    result.name = std::string("attention ") + DTypeName(layout.dtype);
    result.shape = "tokens " + std::to_string(tokens) + ", context " + std::to_string(context) +
                   ", H " + std::to_string(heads) + ", Hkv " + std::to_string(layout.kv_heads) +
                   ", d " + std::to_string(layout.head_dim) + ", block " +
                   std::to_string(layout.block_tokens);
    if (!Wanted(result.name)) return;
    const AttentionChunk shape{.num_tokens = tokens, .position = context - tokens};
    result.bytes = AttentionBytes(shape, heads, layout);
    result.flops = AttentionFlops(shape, heads, layout.head_dim);
    {
      const int32_t num_blocks = (context + layout.block_tokens - 1) / layout.block_tokens;
      const Buffer pool = backend_->Allocate(num_blocks * layout.BlockBytes());
      if (pool.data() == nullptr) return;
      // Blocks lie anywhere in the pool.
      std::vector<int32_t> table(num_blocks);
      std::iota(table.begin(), table.end(), 0);
      std::shuffle(table.begin(), table.end(), std::minstd_rand(1));
      const int64_t width = int64_t{layout.kv_heads} * layout.head_dim;
      const Floats kv(*backend_, layout.block_tokens, width);
      for (int32_t block = 0; block < num_blocks; ++block) {
        const AttentionChunk chunk{0, layout.block_tokens, block * layout.block_tokens, table};
        backend_->WriteKv(kv.tensor, kv.tensor, {&chunk, 1}, pool.data(), layout);
      }
      const int64_t columns = int64_t{heads} * layout.head_dim;
      const Floats q(*backend_, tokens, columns), out(*backend_, tokens, columns);
      const AttentionChunk chunk{0, tokens, context - tokens, table};
      result.seconds = Time([&] {
        backend_->Attend(q.tensor, {&chunk, 1}, pool.data(), layout, 0.125f, out.tensor);
      });
    }
    if (tokens == 1) {
      AddBesideRead(std::move(result));
    } else {
      Add(std::move(result));
    }
  }

  // The summary of a context, and a decode step's completion after `chosen` of its tokens were
  // read.
  void Completion(const KvLayout& layout, int32_t group, int32_t context, int32_t chosen) {
    const std::string shape = ", Hkv " + std::to_string(layout.kv_heads) + ", G " +
                              std::to_string(group) + ", d " + std::to_string(layout.head_dim) +
                              ", F 64";
    BenchResult extend, complete;
    extend.name = "extend summaries";
    extend.shape = "tokens " + std::to_string(context) + shape;
    complete.name = "complete states";
    complete.shape = "chosen " + std::to_string(chosen) + shape;
    if (!Wanted(extend.name) && !Wanted(complete.name)) return;
    constexpr int32_t kFeatures = 64;
    const int32_t d = layout.head_dim, inner = d;
    const double heads = layout.kv_heads;
    extend.flops = heads * CompletionFlops(context, 0, d, inner, kFeatures);
    extend.bytes = heads * CompletionBytes(context, layout, inner, kFeatures);
    complete.flops = heads * CompletionFlops(chosen, group, d, inner, kFeatures);
    complete.bytes = heads * CompletionBytes(chosen, layout, inner, kFeatures);

    const int32_t num_blocks = context / layout.block_tokens;
    const Buffer pool = backend_->Allocate(num_blocks * layout.BlockBytes());
    if (pool.data() == nullptr) return;
    std::vector<int32_t> table(num_blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::minstd_rand(1));
    const int64_t width = int64_t{layout.kv_heads} * d;
    const Floats kv(*backend_, layout.block_tokens, width);
    for (int32_t block = 0; block < num_blocks; ++block) {
      const AttentionChunk chunk{0, layout.block_tokens, block * layout.block_tokens, table};
      backend_->WriteKv(kv.tensor, kv.tensor, {&chunk, 1}, pool.data(), layout);
    }
    // Weights of one small value: what they are does not show in the time.
    const std::vector<uint16_t> weight(size_t(width) * d, ToBF16(0.01f).bits);
    const std::vector<float> bias(width, 0.5f);
    const auto stage = [&](int32_t in, int32_t out) {
      return AffineStage{{weight.data(), size_t(layout.kv_heads) * in * out},
                         {bias.data(), size_t(layout.kv_heads) * out},
                         in,
                         out};
    };
    const auto map =
        backend_->PackFeatureMap({layout.kv_heads, stage(d, d), stage(d, inner), stage(d, inner),
                                  stage(inner, d), stage(d, kFeatures)});
    std::vector<float> data(layout.kv_heads * SummaryFloats(kFeatures, d));
    Summary summary{data.data(), {}};
    extend.seconds = Time([&] {
      summary.tokens = {};
      const SummaryExtension extension{&summary, table, context};
      backend_->ExtendSummaries({&extension, 1}, pool.data(), layout, *map);
    });
    if (Wanted(extend.name)) Add(std::move(extend));
    if (!Wanted(complete.name)) return;

    const Floats q(*backend_, 1, width * group);
    const RetrievalQuery query{0, table, context, {0, context}, chosen};
    std::vector<const std::byte*> rows;
    std::vector<RowList> lists;
    lists.reserve(layout.kv_heads);
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      for (int32_t i = 0; i < chosen; ++i) {
        const int32_t token = static_cast<int32_t>(int64_t{i} * context / chosen);
        rows.push_back(static_cast<const std::byte*>(pool.data()) +
                       layout.RowOffset(table[token / layout.block_tokens], head,
                                        token % layout.block_tokens));
      }
    }
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      lists.push_back({rows.data() + int64_t{head} * chosen, chosen, 0, chosen});
    }
    std::vector<float> states(layout.kv_heads * group * AttentionStateFloats(d));
    const CompletionGroup one{0, 1, &summary};
    complete.seconds = Time([&] {
      backend_->CompleteStates({.q = q.tensor,
                                .queries = {&query, 1},
                                .groups = {&one, 1},
                                .rows = {.layout = layout, .pool = pool.data(), .lists = lists},
                                .key_map = *map,
                                .query_map = *map,
                                .states = states.data()});
    });
    Add(std::move(complete));
  }

  // The kernels that go row by row; what bounds them is memory.
  static constexpr int32_t kContext = 131072, kHeads = 32;  // of the retrieval kernels

  static std::string RetrievalShape(const KvLayout& layout) {
    return "context 131072, H 32, Hkv 8, d " + std::to_string(layout.head_dim);
  }
  // A layer's pool of kContext tokens, in order: which rows are read is what scatters them.
  Buffer FilledPool(const KvLayout& layout, std::vector<int32_t>& table) const {
    table.resize(kContext / layout.block_tokens);
    std::iota(table.begin(), table.end(), 0);
    Buffer pool = backend_->Allocate(table.size() * layout.BlockBytes());
    const Floats kv(*backend_, layout.block_tokens, int64_t{layout.kv_heads} * layout.head_dim);
    for (size_t block = 0; block < table.size() && pool.data() != nullptr; ++block) {
      const AttentionChunk chunk{0, layout.block_tokens,
                                 static_cast<int32_t>(block) * layout.block_tokens, table};
      backend_->WriteKv(kv.tensor, kv.tensor, {&chunk, 1}, pool.data(), layout);
    }
    return pool;
  }
  // Of every head `count` tokens at random, ascending.
  static std::vector<int32_t> RandomTokens(int32_t count, int32_t seed) {
    std::minstd_rand random(seed);
    std::vector<int32_t> tokens(kContext), chosen;
    std::iota(tokens.begin(), tokens.end(), 0);
    std::sample(tokens.begin(), tokens.end(), std::back_inserter(chosen), count, random);
    return chosen;
  }

  void RowAttention(const KvLayout& layout, int32_t rows) {
    if (!Wanted("attend_rows")) return;
    std::vector<int32_t> table;
    const Buffer pool = FilledPool(layout, table);
    if (pool.data() == nullptr) return;
    std::vector<std::vector<const std::byte*>> addresses(layout.kv_heads);
    std::vector<RowList> lists;
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      for (const int32_t t : RandomTokens(rows, head + 1)) {
        addresses[head].push_back(
            static_cast<const std::byte*>(pool.data()) +
            layout.RowOffset(t / layout.block_tokens, head, t % layout.block_tokens));
      }
      lists.push_back({addresses[head].data(), rows, 0, rows});
    }
    const Floats q(*backend_, 1, int64_t{kHeads} * layout.head_dim),
        states(*backend_, kHeads, layout.head_dim + 2);
    const RetrievalQuery query{0, table, kContext - 1, {}, 0};
    const double seconds = Time([&] {
      backend_->AttendRows({.q = q.tensor,
                            .queries = {&query, 1},
                            .rows = {.layout = layout, .lists = lists},
                            .scale = 0.125f,
                            .states = states.tensor.f32()});
    });
    const int64_t all = int64_t{rows} * layout.kv_heads;
    AddBesideRead({"attend_rows", "rows " + std::to_string(rows) + ", " + RetrievalShape(layout),
                   seconds, AttendRowsBytes(all, kHeads, layout),
                   AttendRowsFlops(all, kHeads / layout.kv_heads, layout.head_dim), "", 0});
  }

  // Of a chunk of a prompt.
  void Indexes(const KvLayout& layout) {
    constexpr int32_t kTokens = 2048;
    const std::string shape = "tokens 2048, Hkv 8, d " + std::to_string(layout.head_dim);
    if (!Wanted("bound_keys") && !Wanted("quantize_keys")) return;
    std::vector<int32_t> table;
    const Buffer pool = FilledPool(layout, table);
    const Buffer index = backend_->Allocate(table.size() * Int4BlockBytes(layout));
    if (pool.data() == nullptr || index.data() == nullptr) return;
    const KeySpan span{table, {0, kTokens}};
    if (Wanted("bound_keys")) {
      const double seconds = Time([&] {
        backend_->BoundKeys({&span, 1}, pool.data(), layout, index.data());
      });
      AddBesideRead({"bound_keys", shape, seconds, BoundKeysBytes(kTokens, layout), 0, "", 0});
    }
    if (Wanted("quantize_keys")) {
      const double seconds = Time([&] {
        backend_->QuantizeKeys({&span, 1}, pool.data(), layout, index.data());
      });
      AddBesideRead({"quantize_keys", shape, seconds, QuantizeKeysBytes(kTokens, layout),
                     QuantizeKeysFlops(kTokens, layout), "", 0});
    }
  }

  // One query: the oracle, Quest, and pruning of 8 % of the tokens.
  void Selections(const KvLayout& layout) {
    constexpr int32_t kChosen = kContext / 50, kCandidates = 4 * kChosen;
    if (!Wanted("select_by_logits") && !Wanted("select_by_bounds") && !Wanted("prune_selection"))
      return;
    const int64_t group = kHeads / layout.kv_heads;
    std::vector<int32_t> table;
    const Buffer pool = FilledPool(layout, table);
    const Buffer index = backend_->Allocate(table.size() * Int4BlockBytes(layout));
    if (pool.data() == nullptr || index.data() == nullptr) return;
    const Floats q(*backend_, 1, int64_t{kHeads} * layout.head_dim);
    const RetrievalQuery query{0, table, kContext - 1, {16, kContext - 128}, kChosen};
    std::vector<int32_t> counts(layout.kv_heads), tokens(layout.kv_heads * kCandidates);
    const Selection chosen{layout.kv_heads, kCandidates, counts.data(), tokens.data()};
    const KeySpan all{table, {0, kContext}};
    if (Wanted("select_by_logits")) {
      const double seconds = Time([&] {
        backend_->SelectByLogits(q.tensor, {&query, 1}, pool.data(), layout, 0.125f, chosen);
      });
      AddBesideRead({"select_by_logits", RetrievalShape(layout), seconds,
                     SelectByLogitsBytes(kContext, layout),
                     SelectByLogitsFlops(kContext, kHeads, layout.head_dim), "", 0});
    }
    if (Wanted("select_by_bounds")) {
      backend_->BoundKeys({&all, 1}, pool.data(), layout, index.data());
      const double seconds = Time([&] {
        backend_->SelectByBounds(q.tensor, {&query, 1}, index.data(), layout, 0.125f, chosen);
      });
      AddBesideRead({"select_by_bounds", RetrievalShape(layout), seconds,
                     SelectByBoundsBytes(query.mid.size(), layout),
                     SelectByBoundsFlops(query.mid.size(), layout), "", 0});
    }
    if (Wanted("prune_selection")) {
      backend_->QuantizeKeys({&all, 1}, pool.data(), layout, index.data());
      std::vector<int32_t> kept_counts(layout.kv_heads), kept_tokens(tokens.size());
      const Selection kept{layout.kv_heads, kCandidates, kept_counts.data(), kept_tokens.data()};
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        const std::vector<int32_t> of_head = RandomTokens(kCandidates, head + 1);
        counts[head] = 0;
        for (const int32_t t : of_head) {
          if (t >= query.mid.first && t < query.mid.last) {
            chosen.chosen(0, head)[counts[head]++] = t;
          }
        }
      }
      const double seconds = Time([&] {
        backend_->PruneSelection({.q = q.tensor,
                                  .queries = {&query, 1},
                                  .int4_keys = index.data(),
                                  .layout = layout,
                                  .scale = 0.125f,
                                  .p = 0.9f,
                                  .candidates = chosen,
                                  .kept = kept});
      });
      const int64_t keys = int64_t{kCandidates} * layout.kv_heads;
      AddBesideRead({"prune_selection", "candidates 10484, " + RetrievalShape(layout), seconds,
                     PruneSelectionBytes(keys, layout),
                     PruneSelectionFlops(keys, group, layout.head_dim), "", 0});
    }
  }

  void Rows() {
    constexpr int32_t kHeads = 32, kHeadDim = 64, kHidden = 2048, kInter = 8192;
    for (const int64_t m : {1, 512}) {
      const std::string rows = "m " + std::to_string(m);
      if (Wanted("rmsnorm")) {
        const Floats x(*backend_, m, kHidden), weight(*backend_, 1, kHidden),
            out(*backend_, m, kHidden);
        const double seconds =
            Time([&] { backend_->RmsNorm(x.tensor, weight.tensor.f32(), 1e-5f, out.tensor); });
        AddBesideRead({"rmsnorm", rows + ", n 2048", seconds, RmsNormBytes(m, kHidden),
                       RmsNormFlops(m, kHidden), "", 0});
      }
      if (Wanted("rope")) {
        const Floats x(*backend_, m, kHeads * kHeadDim), table(*backend_, m, kHeadDim, 0.5f);
        const double seconds = Time([&] { backend_->Rope(x.tensor, kHeadDim, table.tensor); });
        AddBesideRead({"rope", rows + ", H 32, d 64", seconds, RopeBytes(m, kHeads, kHeadDim),
                       RopeFlops(m, kHeads, kHeadDim), "", 0});
      }
      if (Wanted("silu_mul")) {
        const Floats gate_up(*backend_, m, 2 * kInter), out(*backend_, m, kInter);
        const double seconds = Time([&] { backend_->SiluMul(gate_up.tensor, out.tensor); });
        AddBesideRead({"silu_mul", rows + ", n 8192", seconds, SiluMulBytes(m, kInter),
                       SiluMulFlops(m, kInter), "", 0});
      }
      if (Wanted("experts")) {
        constexpr int64_t kExperts = 128, kPerToken = 8;
        const std::string shape = rows + ", 8 of 128";
        const Floats logits(*backend_, m, kExperts), weights(*backend_, m, kPerToken);
        const Floats x(*backend_, m, kHidden), gathered(*backend_, m * kPerToken, kHidden);
        std::vector<int32_t> ids(m * kPerToken), of_rows(m * kPerToken), places(m * kPerToken);
        for (size_t i = 0; i < places.size(); ++i) {
          of_rows[i] = static_cast<int32_t>(i / kPerToken);
          places[i] = static_cast<int32_t>(i * 7919 % places.size());
        }
        AddBesideRead({"experts route", shape, Time([&] {
                         backend_->RouteExperts(logits.tensor, {.normalized = true}, ids.data(),
                                                weights.tensor);
                       }),
                       RouteExpertsBytes(m, kExperts, kPerToken), 0, "", 0});
        AddBesideRead({"experts gather", shape + ", n 2048", Time([&] {
                         backend_->GatherExpertRows(x.tensor, of_rows, gathered.tensor);
                       }),
                       GatherExpertRowsBytes(m * kPerToken, kHidden), 0, "", 0});
        AddBesideRead({"experts add", shape + ", n 2048", Time([&] {
                         backend_->AddExpertRows(gathered.tensor, places, weights.tensor, x.tensor);
                       }),
                       AddExpertRowsBytes(m, kHidden, kPerToken), 0, "", 0});
      }
      if (Wanted("embed_rows")) {
        const std::vector<uint16_t> values(static_cast<size_t>(4096) * kHidden, 0x3c01);
        const HostMatrix table{values.data(), DType::kBF16, 4096, kHidden};
        std::vector<int32_t> ids(m);
        for (int64_t i = 0; i < m; ++i) ids[i] = static_cast<int32_t>(i * 7919 % 4096);
        const Floats out(*backend_, m, kHidden);
        const double seconds = Time([&] { backend_->EmbedRows(table, ids, 1.0f, out.tensor); });
        AddBesideRead({"embed_rows", rows + ", n 2048", seconds,
                       EmbedRowsBytes(m, kHidden, DType::kBF16), EmbedRowsFlops(m, kHidden), "",
                       0});
      }
      if (Wanted("write_kv")) {
        const KvLayout layout{8, kHeadDim, 64, DType::kBF16};
        std::vector<int32_t> blocks(8);
        std::iota(blocks.begin(), blocks.end(), 0);
        const Buffer pool = backend_->Allocate(blocks.size() * layout.BlockBytes());
        const Floats k(*backend_, m, 8 * kHeadDim);
        const AttentionChunk chunk{0, static_cast<int32_t>(m), 0, blocks};
        const double seconds = Time([&] {
          backend_->WriteKv(k.tensor, k.tensor, {&chunk, 1}, pool.data(), layout);
        });
        AddBesideRead({"write_kv", rows + ", Hkv 8, d 64, bfloat16", seconds,
                       WriteKvBytes(m, layout), WriteKvFlops(m, layout), "", 0});
      }
    }
  }

  // Encoding of a context and of one step's queries, the scan of its codes alone, and the whole
  // selection of 2 %: H 32, Hkv 8, d 64, 128 bits.
  void Codes(int32_t context) {
    constexpr int32_t kGroup = 4, kBits = 128;
    const KvLayout kv{8, 64, 64, DType::kBF16};
    const CodeLayout layout{kv.kv_heads, kv.block_tokens, kBits};
    const std::string shape =
        "context " + std::to_string(context) + ", H 32, Hkv 8, d 64, bits 128, block 64";
    if (!Wanted("encode keys") && !Wanted("encode queries") && !Wanted("scan codes") &&
        !Wanted("select by codes") && !Wanted("select by masses") && !Wanted("re-rank by masses")) {
      return;
    }
    const int32_t num_blocks = context / kv.block_tokens;
    const Buffer pool = backend_->Allocate(num_blocks * kv.BlockBytes());
    const Buffer codes = backend_->Allocate(num_blocks * layout.BlockBytes());
    if (pool.data() == nullptr || codes.data() == nullptr) return;
    std::minstd_rand random(1);
    uint16_t* values = static_cast<uint16_t*>(pool.data());
    for (size_t i = 0; i < pool.size_bytes() / 2; ++i) {
      values[i] = static_cast<uint16_t>(0x3f80 | (random() % 2 << 15) | (random() % 128));
    }
    std::vector<int32_t> table(num_blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);

    std::vector<uint16_t> weight(size_t{8} * kBits * kv.head_dim);
    for (uint16_t& value : weight) value = static_cast<uint16_t>(0x3e00 | (random() % 2 << 15));
    const std::vector<float> bias(size_t{8} * kBits, 0.0f);
    EncoderWeights weights;
    weights.kv_heads = kv.kv_heads;
    weights.stages.push_back({weight, bias, kv.head_dim, kBits});
    const auto encoder = backend_->PackEncoder(weights);
    const KeySpan span{table, {0, context}};
    auto encode = [&] {
      backend_->EncodeKeys({&span, 1}, pool.data(), kv, *encoder, codes.data(), layout);
    };
    encode();
    if (Wanted("encode keys")) {
      AddBesideRead({"encode keys", shape + ", 1 stage", Time(encode),
                     EncodeBytes(context, 2.0 * kv.head_dim, weights),
                     EncodeFlops(context, weights), "", 0});
    }
    const Floats q(*backend_, 1, int64_t{8} * kGroup * kv.head_dim);
    RetrievalQuery query;
    query.block_table = table;
    query.position = context - 1;
    query.mid = {16, context - 128};
    query.k = context / 50;
    const std::span<const RetrievalQuery> queries(&query, 1);
    std::vector<std::byte> query_codes(size_t{8} * kGroup * kBits / 8);
    const double encode_seconds =
        Time([&] { backend_->EncodeQueries(q.tensor, queries, *encoder, query_codes.data()); });
    if (Wanted("encode queries")) {
      AddBesideRead({"encode queries", shape + ", 1 stage", encode_seconds,
                     EncodeBytes(kGroup, 4.0 * kv.head_dim, weights), EncodeFlops(kGroup, weights),
                     "", 0});
    }
    const double bytes = SelectByCodesBytes(queries, layout);
    if (Wanted("scan codes")) {
      const CpuOps& ops = *FindCpuOps(options_.isa.c_str());
      ThreadPool threads(threads_);
      std::vector<uint16_t> distances(size_t{8} * context);
      CodePattern pattern;
      MakeCodePattern(query_codes.data(), kGroup, kBits, &pattern);
      constexpr int32_t kPiece = 4096;
      const double seconds = Time([&] {
        threads.ParallelFor(int64_t{8} * context / kPiece, [&](int64_t item, int) {
          const int32_t head = static_cast<int32_t>(item * kPiece / context);
          const int32_t first = static_cast<int32_t>(item * kPiece % context);
          const ScanCall call{codes.data(), layout, CodePlanes(kGroup), head, table.data()};
          ops.scan_codes(call, pattern, first, first + kPiece,
                         distances.data() + int64_t{head} * context + first);
        });
      });
      AddBesideRead({"scan codes", shape, seconds, bytes, 0, "", 0});
    }
    if (Wanted("select by codes")) {
      std::vector<int32_t> counts(8), tokens(size_t{8} * query.k);
      const Selection chosen{8, query.k, counts.data(), tokens.data()};
      const double seconds = Time([&] {
        backend_->SelectByCodes(queries, query_codes.data(), kGroup, codes.data(), layout, chosen);
      });
      AddBesideRead({"select by codes", shape + ", k 2 %", seconds, bytes, 0, "", 0});
    }
    if (Wanted("select by masses") || Wanted("re-rank by masses")) {
      SelectByMasses(q.tensor, kGroup, query, codes.data(), layout, shape);
    }
  }

  // The same bytes read as transform codes, with the widths that a layer of a real model got.
  void SelectByMasses(const Tensor& q, int32_t group, const RetrievalQuery& query,
                      const void* codes, const CodeLayout& layout, const std::string& shape) {
    const auto d = static_cast<int32_t>(q.cols / 8 / group);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    TransformCodeHead head;
    head.widths = {7, 4, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1};
    head.quads = 13;
    head.fields = LayCodeFields(head.widths, layout.bits / 32);
    const size_t n = size_t{4} * head.quads;
    head.key_weight.assign(n * d, 0.1f);
    for (size_t i = 0; i < n * d; ++i) head.query_weight.push_back(0.03f * normal(random));
    head.key_bias.assign(n, 1);
    head.mean.assign(d, 0.1f);
    head.cell_bits = {0, 9, 17, 33, 40, 70, 80, 100};
    head.tail = true;
    const TransformCodeWeights weights{d, layout.bits, std::vector<TransformCodeHead>(8, head)};
    const auto transform = backend_->PackTransformCode(weights);
    const std::vector<float> anchors(size_t{8} * group, 3.0f);
    std::vector<int64_t> masses(anchors.size() * kTransformCells);
    std::vector<float> references(anchors.size()), deltas(anchors.size());
    const TailMasses tail{8 * group, masses.data(), references.data(), deltas.data()};
    std::vector<int32_t> counts(8), tokens(size_t{8} * query.k);
    const Selection chosen{8, query.k, counts.data(), tokens.data()};
    const double bytes = SelectByMassBytes({&query, 1}, layout);
    const double flops = SelectByMassFlops(8.0 * query.mid.size(), group, head.quads);
    for (const bool with_tail : {false, true}) {
      const double seconds = Time([&] {
        backend_->SelectByMass({.q = q,
                                .queries = {&query, 1},
                                .anchor_masses = anchors.data(),
                                .transform = *transform,
                                .codes = codes,
                                .code_layout = layout,
                                .scale = 0.1f,
                                .chosen = chosen,
                                .tail = with_tail ? &tail : nullptr});
      });
      AddBesideRead({"select by masses", shape + ", k 2 %" + (with_tail ? ", tail" : ""), seconds,
                     bytes, flops, "", 0});
    }
    RerankMasses(q, group, query, *transform, weights, codes, layout, shape);
  }

  // The better half of twice as many candidates. The residual code has the first one's bytes and widths.
  void RerankMasses(const Tensor& q, int32_t group, const RetrievalQuery& query,
                    const PackedTransformCode& transform, TransformCodeWeights weights,
                    const void* codes, const CodeLayout& layout, const std::string& shape) {
    for (TransformCodeHead& head : weights.heads) {
      head.mean.assign(weights.head_dim, 0);
      head.cell_bits.clear();
      head.tail = false;
      head.first_dims.assign(size_t{4} * head.quads, -1);
      head.first_steps.assign(size_t{4} * head.quads, 0);
    }
    const auto residual = backend_->PackTransformCode(weights);
    const std::vector<float> anchors(size_t{8} * group, 3.0f);
    std::vector<float> references(anchors.size()), inverses(anchors.size());
    const MassScales scales{references.data(), inverses.data()};
    RetrievalQuery wide = query;
    wide.k = std::min(2 * query.k, query.mid.size());
    std::vector<int32_t> counts(8), kept_counts(8), tokens(size_t{8} * wide.k), kept(tokens.size());
    const Selection candidates{8, wide.k, counts.data(), tokens.data()};
    backend_->SelectByMass({.q = q,
                            .queries = {&wide, 1},
                            .anchor_masses = anchors.data(),
                            .transform = transform,
                            .codes = codes,
                            .code_layout = layout,
                            .scale = 0.1f,
                            .chosen = candidates,
                            .scales = &scales});
    const double seconds = Time([&] {
      backend_->RerankByMass({.q = q,
                              .queries = {&query, 1},
                              .transform = transform,
                              .codes = codes,
                              .code_layout = layout,
                              .residual = *residual,
                              .residual_codes = codes,
                              .residual_layout = layout,
                              .scale = 0.1f,
                              .scales = scales,
                              .candidates = candidates,
                              .kept = {8, wide.k, kept_counts.data(), kept.data()}});
    });
    AddBesideRead({"re-rank by masses", shape + ", 4 % to 2 %", seconds,
                   RerankByMassBytes(8.0 * wide.k, layout, layout),
                   SelectByMassFlops(8.0 * wide.k, group, 2 * weights.heads[0].quads), "", 0});
  }

  // Llama 3's vocabulary, nearly normal logits of deviation 2: flatter than what models give.
  void Sampling(int64_t num_rows) {
    if (!Wanted("sample")) return;
    const int64_t vocab = 128256;
    Floats logits(*backend_, num_rows, vocab);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 2);
    for (int64_t i = 0; i < num_rows * vocab; ++i) logits.tensor.f32()[i] = normal(random);
    struct Kind {
      const char* name;
      float temperature, top_p;
      int32_t top_k, top_logprobs;
    };
    for (const Kind& kind :
         {Kind{"greedy", 0, 1, 0, -1}, Kind{"greedy, 5 logprobs", 0, 1, 0, 5},
          Kind{"T 1", 1, 1, 0, -1}, Kind{"T 0.8, top-p 0.95", 0.8f, 0.95f, 0, -1},
          Kind{"T 1, top-k 50", 1, 1, 50, -1}}) {
      std::vector<SampleRow> rows(num_rows);
      for (SampleRow& row : rows) {
        row.temperature = kind.temperature;
        row.top_p = kind.top_p;
        row.top_k = kind.top_k;
        row.top_logprobs = kind.top_logprobs;
        row.noise = random();
      }
      std::vector<SampledToken> sampled(num_rows);
      const double seconds = Time([&] { backend_->Sample(logits.tensor, rows, sampled.data()); });
      AddBesideRead({"sample", "rows " + std::to_string(num_rows) + ", " + kind.name, seconds,
                     SampleBytes(num_rows, vocab), 0, "", 0});
    }
  }

  const BenchOptions options_;
  const std::function<void(const BenchResult&)>& progress_;
  const int threads_;
  const std::unique_ptr<Backend> backend_;
  std::vector<BenchResult> results_;
};

}  // namespace

std::vector<BenchResult> BenchKernels(const BenchOptions& options,
                                      const std::function<void(const BenchResult&)>& progress) {
  return Bench(options, progress).Run();
}

}  // namespace winnow::kernels
