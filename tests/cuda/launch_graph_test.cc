// Steps whose launches go as graphs have the bits of steps whose launches go one by one: two backends, asked for the
// same forward passes of a small model, whose batches change and whose contexts grow.
#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>

#include "tests/cuda/backend_testing.h"
#include "tests/cuda/random_encoder.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int32_t kLayers = 20, kHidden = 256, kInner = 384, kHeadDim = 64, kKvHeads = 2,
                  kGroup = 2;
constexpr int32_t kBlockTokens = 16, kBlocksEach = 80, kSequences = 3, kBits = 64, kMostChosen = 24;
constexpr int32_t kQueryWidth = kKvHeads * kGroup * kHeadDim, kKvWidth = kKvHeads * kHeadDim;

std::vector<float> Normals(Random& random, int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = random.Normal();
  return values;
}

// What both backends are given.
struct Weights {
  explicit Weights(Random& random)
      : norm(Normals(random, kHidden)),
        keys(random, kKvHeads, 1, {kHeadDim, kBits}),
        queries(random, kKvHeads, 1, {kHeadDim, kBits}) {
    const auto add = [&](int64_t out, int64_t in) {
      matrices.emplace_back(random, out, in, DType::kBF16, 1 / std::sqrt(static_cast<float>(in)));
    };
    for (int layer = 0; layer < kLayers; ++layer) {
      add(kQueryWidth + 2 * kKvWidth, kHidden);
      add(kHidden, kQueryWidth);
      add(2 * kInner, kHidden);
      add(kHidden, kInner);
    }
  }

  std::vector<float> norm;
  RandomEncoder keys, queries;
  std::deque<FileMatrix> matrices;
};

// A step's batch: a row for each sequence.
struct Rows {
  std::vector<AttentionChunk> chunks;
  std::vector<KeySpan> spans;
  std::vector<RetrievalQuery> queries;
};

// The model on one of them.
class Model {
 public:
  static constexpr KvLayout kLayout{kKvHeads, kHeadDim, kBlockTokens, DType::kBF16};
  static constexpr CodeLayout kCodes{kKvHeads, kBlockTokens, kBits};
  static constexpr int64_t kNumBlocks = kSequences * kBlocksEach;

  Model(CudaBackend& backend, Weights& weights)
      : backend_(backend),
        norm_(weights.norm),
        keys_(backend.PackEncoder(weights.keys.weights())),
        queries_(backend.PackEncoder(weights.queries.weights())),
        counts_(backend.AllocateShared(kSequences * kKvHeads * 4)),
        tokens_(backend.AllocateShared(kSequences * kKvHeads * kMostChosen * 4)),
        chosen_{kKvHeads, kMostChosen, static_cast<int32_t*>(counts_.data()),
                static_cast<int32_t*>(tokens_.data())} {
    kv_.Zero();
    codes_.Zero();
    for (const FileMatrix& matrix : weights.matrices) {
      const HostMatrix host = matrix.host();
      matrices_.push_back(backend.Pack(std::span(&host, 1), DType::kBF16));
    }
  }

  // x [rows][hidden] after all layers.
  std::vector<float> Step(const std::vector<float>& x, const std::vector<float>& rotation,
                          const Rows& rows) {
    const auto count = static_cast<int64_t>(rows.chunks.size());
    const auto matrix = [count](const DeviceArray<float>& values, int64_t cols) {
      return Tensor{values.data(), DType::kF32, count, cols, cols};
    };
    const Tensor hidden = matrix(x_, kHidden), cos_sin = matrix(rotation_, kHeadDim),
                 qkv = matrix(qkv_, kQueryWidth + 2 * kKvWidth),
                 attended = matrix(attended_, kQueryWidth), gate_up = matrix(gate_up_, 2 * kInner),
                 scratch = matrix(scratch_, kHidden), inner = matrix(scratch_, kInner);
    const Tensor q = qkv.ColRange(0, kQueryWidth), k = qkv.ColRange(kQueryWidth, kKvWidth),
                 v = qkv.ColRange(kQueryWidth + kKvWidth, kKvWidth);
    backend_.BeginPass();
    backend_.CopyToDevice(x.data(), x_.data(), 4 * x.size());
    backend_.CopyToDevice(rotation.data(), rotation_.data(), 4 * rotation.size());
    for (int layer = 0; layer < kLayers; ++layer) {
      std::byte* const pool = kv_.data() + layer * kNumBlocks * kLayout.BlockBytes();
      std::byte* const codes = codes_.data() + layer * kNumBlocks * kCodes.BlockBytes();
      const auto of_layer = [&](int i) -> PackedMatrix& { return *matrices_[4 * layer + i]; };
      backend_.NormMatmul({.x = hidden,
                           .weight = norm_.data(),
                           .eps = 1e-5f,
                           .w = of_layer(0),
                           .normed = scratch,
                           .y = qkv});
      backend_.RopeAndWriteKv({.q = q,
                               .k = k,
                               .v = v,
                               .q_cos_sin = cos_sin,
                               .cos_sin = cos_sin,
                               .chunks = rows.chunks,
                               .pool = pool,
                               .layout = kLayout});
      if (layer == 0) {
        backend_.Attend(q, rows.chunks, pool, kLayout, 0.125f, attended);
      } else {
        backend_.EncodeKeys(rows.spans, pool, kLayout, *keys_, codes, kCodes);
        backend_.EncodeQueries(q, rows.queries, *queries_, query_codes_.data());
        backend_.SelectByCodes(rows.queries, query_codes_.data(), kGroup, codes, kCodes, chosen_);
        backend_.AttendRows({.q = q,
                             .queries = rows.queries,
                             .rows = {.layout = kLayout, .pool = pool, .chosen = chosen_},
                             .scale = 0.125f,
                             .out = attended});
      }
      backend_.Matmul(attended, of_layer(1), hidden, {.accumulate = true});
      backend_.NormMatmul({.x = hidden,
                           .weight = norm_.data(),
                           .eps = 1e-5f,
                           .w = of_layer(2),
                           .normed = scratch,
                           .y = gate_up});
      backend_.SiluMatmul(gate_up, of_layer(3), inner, hidden, {.accumulate = true});
    }
    std::vector<float> result(count * kHidden);
    backend_.CopyToHost(x_.data(), result.data(), 4 * result.size());
    EXPECT_EQ(backend_.failure(), "");
    return result;
  }

 private:
  CudaBackend& backend_;
  DeviceArray<float> norm_;
  std::vector<std::unique_ptr<PackedMatrix>> matrices_;
  std::unique_ptr<PackedEncoder> keys_, queries_;
  DeviceArray<std::byte> kv_{kLayers * kNumBlocks * kLayout.BlockBytes()};
  DeviceArray<std::byte> codes_{kLayers * kNumBlocks * kCodes.BlockBytes()};
  DeviceArray<std::byte> query_codes_{kSequences * kKvHeads * kGroup * kCodes.CodeBytes()};
  DeviceArray<float> x_{kSequences * kHidden}, rotation_{kSequences * kHeadDim};
  DeviceArray<float> qkv_{kSequences * (kQueryWidth + 2 * kKvWidth)};
  DeviceArray<float> attended_{kSequences * kQueryWidth}, gate_up_{kSequences * 2 * kInner};
  DeviceArray<float> scratch_{kSequences * std::max(kHidden, kInner)};
  Buffer counts_, tokens_;
  Selection chosen_;
};

class CudaLaunchGraphTest : public CudaBackendFixture {};

TEST_F(CudaLaunchGraphTest, StepsAsGraphsHaveTheBitsOfStepsWithout) {
  SCOPED_TRACE(Seed());
  std::string why;
  const auto plain = CudaBackend::Create(0, &why, /*graphs=*/false);
  ASSERT_NE(plain, nullptr) << why;
  Weights weights(random_);
  Model with(*backend_, weights), without(*plain, weights);
  std::vector<int32_t> blocks(Model::kNumBlocks), tables[kSequences];
  std::iota(blocks.begin(), blocks.end(), 0);
  random_.Shuffle(blocks);
  int32_t position[kSequences];
  for (int s = 0; s < kSequences; ++s) {
    tables[s].assign(&blocks[kBlocksEach * s], &blocks[kBlocksEach * s] + kBlocksEach);
    position[s] = static_cast<int32_t>(random_.Int(60, 600));
  }
  const LaunchCounts before = backend_->launches();
  std::vector<int> batch;
  for (int step = 0; step < 160; ++step) {
    // Somebody comes or goes now and then.
    if (step == 0 || random_.Int(0, 11) == 0) {
      batch.clear();
      for (int s = 0; s < kSequences; ++s) {
        if (random_.Int(0, 2) != 0) batch.push_back(s);
      }
      if (batch.empty()) batch.push_back(0);
    }
    Rows rows;
    for (const int s : batch) {
      const auto row = static_cast<int32_t>(rows.chunks.size());
      const int32_t at = position[s]++;
      rows.chunks.push_back({row, 1, at, tables[s]});
      rows.spans.push_back({tables[s], {at, at + 1}});
      const TokenRange mid{4, at - 30};
      rows.queries.push_back({row, tables[s], at, mid, std::min(kMostChosen, mid.size())});
    }
    const auto x = Normals(random_, static_cast<int64_t>(batch.size()) * kHidden);
    const auto rotation = Normals(random_, static_cast<int64_t>(batch.size()) * kHeadDim);
    const std::vector<float> a = with.Step(x, rotation, rows);
    const std::vector<float> b = without.Step(x, rotation, rows);
    ASSERT_EQ(std::memcmp(a.data(), b.data(), 4 * a.size()), 0) << "step " << step;
    ASSERT_NE(a, x);
  }
  const LaunchCounts after = backend_->launches();
  const int64_t in_graphs = after.in_graphs - before.in_graphs;
  EXPECT_GT(3 * in_graphs, after.alone - before.alone + in_graphs) << in_graphs;
  EXPECT_EQ(plain->launches().in_graphs, 0);
  EXPECT_TRUE(plain->Synchronize());
}

TEST_F(CudaLaunchGraphTest, MemoryGoesBehindWhatWasLaunchedForIt) {
  Matrix x = Matrix::Normal(random_, 8, 96);
  const auto on_device = Put(x);
  const DeviceArray<float> weight(Normals(random_, 96));
  constexpr auto kAtOnce = static_cast<int32_t>(LaunchLog::kAtOnce);
  const auto norm = [&](int32_t times) {
    for (int32_t i = 0; i < times; ++i) {
      backend_->RmsNorm(on_device.tensor, weight.data(), 0.1f, on_device.tensor);
    }
  };
  for (const bool shared : {false, true}) {
    for (int pass = 0; pass <= LaunchLog::kTimesBeforeGraph; ++pass) {
      backend_->BeginPass();
      norm(kAtOnce + 40);
    }
    backend_->BeginPass();
    Buffer memory = shared ? backend_->AllocateShared(1000) : backend_->Allocate(1000);
    const int64_t before = backend_->launches().alone;
    norm(kAtOnce + 30);
    EXPECT_EQ(backend_->launches().alone - before, kAtOnce);
    memory = Buffer();
    EXPECT_EQ(backend_->launches().alone - before, kAtOnce + 30);
  }
}

// Each launch reads what the one before it wrote, and copies lie between runs of them.
TEST_F(CudaLaunchGraphTest, CopiesFollowWhatWasLaunchedBefore) {
  SCOPED_TRACE(Seed());
  constexpr int64_t kRows = 8, kCols = 96, kSize = kRows * kCols;
  const DeviceArray<float> weight(Normals(random_, kCols));
  struct Side {
    explicit Side(bool graphs) { EXPECT_EQ(LoggedStream::Create(graphs, &stream), cudaSuccess); }
    void Run(const DeviceArray<float>& weight, const std::vector<int>& lengths) {
      const Stream launches(*stream);
      const auto matrix = [](const DeviceArray<float>& values) {
        return DeviceMatrix{values.data(), kRows, kCols, kCols};
      };
      for (const int length : lengths) {
        for (int i = 0; i < length; ++i) {
          WINNOW_CUDA_OK(RmsNorm(matrix(i % 2 == 0 ? x : y), weight.data(), 0.1f * (i % 7),
                                 matrix(i % 2 == 0 ? y : x), launches));
        }
        WINNOW_CUDA_OK(cudaMemcpyAsync(kept.data(), (length % 2 == 0 ? x : y).data(), kept.bytes(),
                                       cudaMemcpyDeviceToDevice, launches));
        WINNOW_CUDA_OK(
            cudaMemcpyAsync(x.data(), kept.data(), x.bytes(), cudaMemcpyDeviceToDevice, launches));
      }
      WINNOW_CUDA_OK(stream->Synchronize());
    }
    std::unique_ptr<LoggedStream> stream;
    DeviceArray<float> x{kSize}, y{kSize}, kept{kSize};
  };
  Side with(true), without(false);
  std::vector<int> lengths = {140, 5, 146};
  for (int round = 0; round < 80; ++round) {
    if (random_.Int(0, 9) == 0) {
      for (int& length : lengths) length = static_cast<int>(random_.Int(1, 250));
    }
    const std::vector<float> x = Normals(random_, kSize);
    for (Side* side : {&with, &without}) {
      side->x.Set(x);
      side->Run(weight, lengths);
    }
    ASSERT_EQ(with.x.Get(), without.x.Get()) << "round " << round;
  }
  EXPECT_GT(with.stream->counts().in_graphs, 0);
  EXPECT_EQ(without.stream->counts().in_graphs, 0);
}

}  // namespace
}  // namespace winnow::kernels::cuda
