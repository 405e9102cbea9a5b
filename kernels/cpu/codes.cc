// Codes of the CPU backend: packs encoders and cuts inputs into tiles for EncodeRows.
#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/hash_encode.h"

namespace winnow::kernels {
namespace {

constexpr int32_t kPanel = 32;  // outputs of a panel of weights

class CpuEncoder final : public PackedEncoder {
 public:
  int32_t bits() const override { return bits_; }
  size_t size_bytes() const override { return size_bytes_; }
  int32_t kv_heads() const { return kv_heads_; }
  int32_t queries_per_input() const { return queries_per_input_; }
  int32_t in() const { return stages_.front().in; }
  size_t ScratchBytes() const {
    const size_t size_bytes = sizeof(float) * 2 * kEncodeTileRows * static_cast<size_t>(width_);
    return (size_bytes + 63) / 64 * 64;
  }
  EncodeCall Call() const {
    return {stages_.data(), static_cast<int32_t>(stages_.size()), SiluTable(), width_};
  }

  // Null if the memory cannot be had.
  static std::unique_ptr<CpuEncoder> Make(const EncoderWeights& weights) {
    WINNOW_CHECK(!weights.stages.empty() && weights.kv_heads > 0 && weights.queries_per_input > 0);
    std::unique_ptr<CpuEncoder> encoder(new CpuEncoder);
    encoder->kv_heads_ = weights.kv_heads;
    encoder->queries_per_input_ = weights.queries_per_input;
    const int32_t codes = weights.stages.back().out;
    WINNOW_CHECK(codes % (kPanel * weights.queries_per_input) == 0);
    encoder->bits_ = codes / weights.queries_per_input;
    int32_t in = weights.stages.front().in;
    for (const AffineStage& stage : weights.stages) {
      WINNOW_CHECK(stage.in == in && stage.in > 0 && stage.out > 0);
      if (!encoder->AddStage(stage)) return nullptr;
      in = stage.out;
    }
    return encoder;
  }

 private:
  bool AddStage(const AffineStage& stage) {
    const int64_t in = stage.in, out = stage.out;
    const int64_t padded = (out + kPanel - 1) / kPanel * kPanel;
    WINNOW_CHECK(static_cast<int64_t>(stage.weight.size()) == kv_heads_ * out * in);
    WINNOW_CHECK(static_cast<int64_t>(stage.bias.size()) == kv_heads_ * out);
    Buffer weights = AllocateHostMemory(kv_heads_ * padded * in * sizeof(uint16_t));
    Buffer bias = AllocateHostMemory(kv_heads_ * padded * sizeof(float));
    if (weights.data() == nullptr || bias.data() == nullptr) return false;
    uint32_t* words = static_cast<uint32_t*>(weights.data());
    float* biases = static_cast<float*>(bias.data());
    for (int64_t head = 0; head < kv_heads_; ++head) {
      for (int64_t o = 0; o < out; ++o) {
        biases[head * padded + o] = stage.bias[head * out + o];
        uint32_t* panel = words + (head * padded + o / kPanel * kPanel) * in / 2;
        const int64_t word = o % (kPanel / 2);
        const int shift = o % kPanel < kPanel / 2 ? 0 : 16;
        for (int64_t j = 0; j < in; ++j) {
          panel[j * kPanel / 2 + word] |=
              static_cast<uint32_t>(stage.weight[(head * out + o) * in + j]) << shift;
        }
      }
    }
    size_bytes_ += weights.size_bytes() + bias.size_bytes();
    stages_.push_back({words, biases, stage.in, static_cast<int32_t>(padded)});
    width_ = std::max({width_, stage.in, static_cast<int32_t>(padded)});
    buffers_.push_back(std::move(weights));
    buffers_.push_back(std::move(bias));
    return true;
  }

  int32_t kv_heads_ = 0, queries_per_input_ = 0, bits_ = 0, width_ = 0;
  size_t size_bytes_ = 0;
  std::vector<EncodeStage> stages_;
  std::vector<Buffer> buffers_;
};

// Calls EncodeRows for tiles of inputs, each for one head. `locate(input, head)` yields where input
// and code are; `scratch` has ScratchBytes for each thread.
template <typename Locate>
void EncodeTiles(const CpuOps& ops, ThreadPool& threads, const CpuEncoder& encoder, int64_t inputs,
                 DType dtype, std::byte* scratch, Locate locate) {
  const EncodeCall call = encoder.Call();
  const int64_t tiles = (inputs + kEncodeTileRows - 1) / kEncodeTileRows;
  threads.ParallelFor(tiles * encoder.kv_heads(), [&](int64_t item, int thread) {
    const int32_t head = static_cast<int32_t>(item / tiles);
    const int64_t first = item % tiles * kEncodeTileRows;
    const int64_t last = std::min(inputs, first + kEncodeTileRows);
    std::array<const void*, kEncodeTileRows> rows{};
    std::array<std::byte*, kEncodeTileRows> codes{};
    for (int64_t i = first; i < last; ++i) {
      std::tie(rows[i - first], codes[i - first]) = locate(i, head);
    }
    ops.encode_rows(call, head, rows.data(), dtype, static_cast<int32_t>(last - first),
                    codes.data(),
                    reinterpret_cast<float*>(scratch + encoder.ScratchBytes() * thread));
  });
}

}  // namespace

std::unique_ptr<PackedEncoder> CpuBackend::PackEncoder(const EncoderWeights& weights) {
  return CpuEncoder::Make(weights);
}

void CpuBackend::EncodeKeys(std::span<const KeySpan> spans, const void* pool,
                            const KvLayout& layout, const PackedEncoder& encoder, void* codes,
                            const CodeLayout& code_layout) {
  const CpuEncoder& packed = static_cast<const CpuEncoder&>(encoder);
  CheckKv(layout);
  WINNOW_CHECK(packed.kv_heads() == layout.kv_heads && packed.in() == layout.head_dim &&
               packed.queries_per_input() == 1);
  WINNOW_CHECK(code_layout.kv_heads == layout.kv_heads && code_layout.bits == packed.bits() &&
               code_layout.block_tokens == layout.block_tokens);
  std::vector<int64_t> ends;  // tokens of the spans up to and with each
  int64_t tokens = 0;
  for (const KeySpan& span : spans) {
    WINNOW_CHECK(span.tokens.first >= 0 && span.tokens.size() >= 0);
    WINNOW_CHECK(span.tokens.last <=
                 static_cast<int64_t>(span.block_table.size()) * layout.block_tokens);
    ends.push_back(tokens += span.tokens.size());
  }
  std::byte* scratch = codes_scratch_.Get(packed.ScratchBytes() * num_threads());
  EncodeTiles(ops_, threads_, packed, tokens, layout.dtype, scratch, [&](int64_t i, int32_t head) {
    const size_t at = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
    const KeySpan& span = spans[at];
    const int32_t token = static_cast<int32_t>(span.tokens.last - (ends[at] - i));
    const int32_t block = span.block_table[token / layout.block_tokens];
    const int32_t offset = token % layout.block_tokens;
    return std::pair<const void*, std::byte*>(
        static_cast<const std::byte*>(pool) + layout.RowOffset(block, head, offset),
        static_cast<std::byte*>(codes) +
            span.IndexBlock(token / layout.block_tokens) * code_layout.BlockBytes() +
            head * code_layout.HeadBytes() + offset * code_layout.CodeBytes());
  });
}

void CpuBackend::EncodeQueries(const Tensor& q, std::span<const RetrievalQuery> queries,
                               const PackedEncoder& encoder, void* codes) {
  const CpuEncoder& packed = static_cast<const CpuEncoder&>(encoder);
  const int64_t together = packed.queries_per_input();
  const int64_t d = packed.in() / together;
  WINNOW_CHECK(q.dtype == DType::kF32 && packed.in() % together == 0);
  WINNOW_CHECK(q.cols % (d * packed.kv_heads()) == 0);
  const int64_t group = q.cols / (d * packed.kv_heads());
  WINNOW_CHECK(together == 1 || together == group);
  for (const RetrievalQuery& query : queries) WINNOW_CHECK(query.row >= 0 && query.row < q.rows);
  const int64_t per_query = group / together;  // inputs of a query and KV head
  const int64_t code_bytes = packed.bits() / 8;
  const int64_t inputs = static_cast<int64_t>(queries.size()) * per_query;
  std::byte* scratch = codes_scratch_.Get(packed.ScratchBytes() * num_threads());
  EncodeTiles(ops_, threads_, packed, inputs, DType::kF32, scratch, [&](int64_t i, int32_t head) {
    const int64_t query = i / per_query;
    const int64_t query_head = head * group + i % per_query;
    return std::pair<const void*, std::byte*>(
        q.f32(queries[query].row) + query_head * d,
        static_cast<std::byte*>(codes) +
            (query * group * packed.kv_heads() + query_head) * code_bytes);
  });
}

}  // namespace winnow::kernels
