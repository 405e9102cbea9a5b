// KV that is more than the memory of a device and its host: frames in shared memory over a disk
// (DecoderOptions: spills), and the host that moves what a device may still be reading.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/kv_planning.h"
#include "engine/model_loader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/kv_tiers_testing.h"
#include "tests/unit/engine/pretended_device.h"

namespace winnow::engine {
namespace {

using kv_tiers::DamageAllOver;
using kv_tiers::FrameBytes;
using kv_tiers::kBlockTokens;
using kv_tiers::kContext;
using kv_tiers::kNeedle;
using kv_tiers::kRunning;
using kv_tiers::kStepTokens;
using kv_tiers::Load;
using kv_tiers::Options;

using kernels::AttentionChunk;
using kernels::KvLayout;
using kernels::Tensor;
using ::testing::HasSubstr;

// Reads what it is asked to read at any time until it is waited for: what it was told to read must be the
// same then. And it takes a block table for what it was when it saw it first.
class WatchfulDevice final : private std::unique_ptr<kernels::Backend>, public PretendedDevice {
 public:
  explicit WatchfulDevice(std::unique_ptr<kernels::Backend> cpu)
      : std::unique_ptr<kernels::Backend>(std::move(cpu)),
        PretendedDevice(*std::unique_ptr<kernels::Backend>::get()) {}
  size_t watched() const { return watched_; }
  int calls_by_address = 0;  // of AttendRows: the host found the rows

  bool Synchronize() override {
    for (const auto& [at, bytes] : reading_) {
      EXPECT_EQ(std::memcmp(at, bytes.data(), bytes.size()), 0) << "changed while it was read";
    }
    reading_.clear();
    return PretendedDevice::Synchronize();
  }
  void BeginPass() override {
    PretendedDevice::BeginPass();
    tables_.clear();
  }
  void ForgetTables() override { tables_.clear(); }
  void CopyToHost(const void* device, void* host, size_t size_bytes) override {
    static_cast<void>(Synchronize());
    PretendedDevice::CopyToHost(device, host, size_bytes);
  }
  void CopyToDevice(const void* host, void* device, size_t size_bytes) override {
    static_cast<void>(Synchronize());
    PretendedDevice::CopyToDevice(host, device, size_bytes);
  }

  void CopyAllToHost(std::span<const kernels::CopyPart> parts) override {
    static_cast<void>(Synchronize());
    PretendedDevice::CopyAllToHost(parts);
  }
  void CopyAllToDevice(std::span<const kernels::CopyPart> parts) override {
    static_cast<void>(Synchronize());
    PretendedDevice::CopyAllToDevice(parts);
  }

  void WriteKv(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks, void* pool,
               const KvLayout& layout) override {
    Writes(chunks, pool, layout);
    PretendedDevice::WriteKv(k, v, chunks, pool, layout);
  }
  void RopeAndWriteKv(const kernels::RopeAndWriteKvArgs& args) override {
    Writes(args.chunks, args.pool, args.layout);
    PretendedDevice::RopeAndWriteKv(args);
  }
  void Attend(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
              const KvLayout& layout, float scale, const Tensor& out) override {
    for (const AttentionChunk& chunk : chunks) {
      Reads(chunk.block_table, {0, chunk.position + chunk.num_tokens}, pool, layout);
    }
    PretendedDevice::Attend(q, chunks, pool, layout, scale, out);
  }
  void EncodeKeys(std::span<const kernels::KeySpan> spans, const void* pool, const KvLayout& layout,
                  const kernels::PackedEncoder& encoder, void* codes,
                  const kernels::CodeLayout& code_layout) override {
    ReadsSpans(spans, pool, layout);
    PretendedDevice::EncodeKeys(spans, pool, layout, encoder, codes, code_layout);
  }
  void BoundKeys(std::span<const kernels::KeySpan> spans, const void* pool, const KvLayout& layout,
                 void* bounds) override {
    ReadsSpans(spans, pool, layout);
    PretendedDevice::BoundKeys(spans, pool, layout, bounds);
  }
  void QuantizeKeys(std::span<const kernels::KeySpan> spans, const void* pool,
                    const KvLayout& layout, void* int4_keys) override {
    ReadsSpans(spans, pool, layout);
    PretendedDevice::QuantizeKeys(spans, pool, layout, int4_keys);
  }
  void ExtendSummaries(std::span<const kernels::SummaryExtension> extensions, const void* pool,
                       const KvLayout& layout, const kernels::PackedFeatureMap& key_map) override {
    for (const kernels::SummaryExtension& extension : extensions) {
      Reads(extension.block_table, {extension.summary->tokens.last, extension.last}, pool, layout);
    }
    PretendedDevice::ExtendSummaries(extensions, pool, layout, key_map);
  }
  void SelectByLogits(const Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                      const void* pool, const KvLayout& layout, float scale,
                      const kernels::Selection& chosen) override {
    for (const kernels::RetrievalQuery& query : queries) {
      Reads(query.block_table, {0, query.position + 1}, pool, layout);
    }
    PretendedDevice::SelectByLogits(q, queries, pool, layout, scale, chosen);
  }
  void AttendRows(const kernels::AttendRowsArgs& args) override {
    if (!args.rows.are_tokens()) ++calls_by_address;
    ReadsRows(args.rows.lists, args.rows.layout);
    PretendedDevice::AttendRows(args);
  }
  void CompleteStates(const kernels::CompleteStatesArgs& args) override {
    ReadsRows(args.rows.lists, args.rows.layout);
    PretendedDevice::CompleteStates(args);
  }

 private:
  void Watch(const std::byte* at, size_t bytes) {
    ++watched_;
    std::vector<std::byte>& content = reading_[at];
    if (content.size() < bytes) content.assign(at, at + bytes);
  }
  void ExpectTable(std::span<const int32_t> table, size_t blocks) {
    std::vector<int32_t>& seen = tables_[table.data()];
    for (size_t i = 0; i < std::min(seen.size(), blocks); ++i) EXPECT_EQ(seen[i], table[i]);
    if (seen.size() < blocks) seen.assign(table.begin(), table.begin() + blocks);
  }
  void Reads(std::span<const int32_t> table, kernels::TokenRange tokens, const void* pool,
             const KvLayout& layout) {
    const int32_t last = (tokens.last + layout.block_tokens - 1) / layout.block_tokens;
    ExpectTable(table, last);
    for (int32_t i = tokens.first / layout.block_tokens; i < last; ++i) {
      const int32_t visible = std::min(layout.block_tokens, tokens.last - i * layout.block_tokens);
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        Watch(static_cast<const std::byte*>(pool) + layout.RowOffset(table[i], head, 0),
              visible * layout.RowBytes());
      }
    }
  }
  void ReadsSpans(std::span<const kernels::KeySpan> spans, const void* pool,
                  const KvLayout& layout) {
    for (const kernels::KeySpan& span : spans) Reads(span.block_table, span.tokens, pool, layout);
  }
  void ReadsRows(std::span<const kernels::RowList> lists, const KvLayout& layout) {
    for (const kernels::RowList& list : lists) {
      for (int32_t i = 0; i < list.count; ++i) Watch(list.rows[i], layout.RowBytes());
    }
  }
  // After what was asked for before.
  void Writes(std::span<const AttentionChunk> chunks, void* pool, const KvLayout& layout) {
    for (const AttentionChunk& chunk : chunks) {
      const int32_t last = (chunk.position + chunk.num_tokens - 1) / layout.block_tokens;
      ExpectTable(chunk.block_table, last + 1);
      for (int32_t i = chunk.position / layout.block_tokens; i <= last; ++i) {
        const auto* begin =
            static_cast<const std::byte*>(pool) + chunk.block_table[i] * layout.BlockBytes();
        reading_.erase(reading_.lower_bound(begin),
                       reading_.lower_bound(begin + layout.BlockBytes()));
      }
    }
  }

  std::map<const std::byte*, std::vector<std::byte>> reading_;
  std::map<const int32_t*, std::vector<int32_t>> tables_;
  size_t watched_ = 0;
};

class SpillTest : public kv_tiers::PrefixTest {
 protected:
  SpillTest() {
    // Two long answers that choose rows and have some predicted, however few requests a sanitizer leaves.
    for (size_t i = 0; i < 2; ++i) {
      std::vector<int32_t>& prompt = requests_[i].prompt;
      prompt.resize(std::min<size_t>(prompt.size(), 350));
      while (prompt.size() < 400) {
        prompt.push_back(static_cast<int32_t>(random_() % config_.vocab_size));
      }
      requests_[i].policy = *ParseAttentionPolicy("quest:k=16,window=9,suffix=40");
      requests_[i].stopping.max_tokens = 40;
    }
  }
  // As few frames as can work.
  ModelOptions Spilling() const {
    ModelOptions options = Options();
    options.device = "cuda";
    options.kv_dtype = "bf16";
    options.num_threads = 0;
    options.tiers.spill = true;
    options.tiers.host_bytes = std::max<int64_t>(
        1 << 20, FrameBytes(config_) * LeastFrames(config_.num_layers() - FirstSharedLayer(),
                                                   kBlockTokens, kContext, kStepTokens, kRunning));
    options.tiers.disk_bytes = 256 << 20;
    options.tiers.store_dir = directory_.File("store");
    options.tiers.row_cache_bytes = 1 << 18;
    options.kv_bytes =
        FrameBytes(config_) * FirstSharedLayer() * 2 * kRunning * (kContext / kBlockTokens);
    return options;
  }
  static std::unique_ptr<kernels::Backend> MakeDevice() {
    return std::make_unique<WatchfulDevice>(kernels::MakeCpuBackend("auto", kv_tiers::kThreads));
  }
};

TEST_F(SpillTest, TokensAreThoseOfKvInMemory) {
  struct Case {
    const char* name;
    int64_t row_cache_bytes;
    bool prefetch, keeps;
  };
  for (const Case& c : {Case{"plain", 0, false, false}, Case{"cached, ahead", 1 << 16, true, false},
                        Case{"cached, kept", 1 << 18, false, true}}) {
    SCOPED_TRACE(c.name);
    ModelOptions options = Spilling();
    options.tiers.store_dir = directory_.File(c.name);
    options.tiers.row_cache_bytes = c.row_cache_bytes;
    options.tiers.prefetch = c.prefetch;
    options.tiers.keep_prefixes = c.keeps;
    const auto model = Load(options, kNeedle, MakeDevice());
    ASSERT_NE(model, nullptr);
    ExpectEqual(Answers(*model, c.keeps));
    ExpectNoLosses(*model);
    ExpectAllWaysTaken(*model, c.row_cache_bytes > 0, c.prefetch);
    EXPECT_GT(dynamic_cast<WatchfulDevice&>(*model->backend).watched(),
              100'000u / kv_tiers::kFewer);
  }
}

TEST_F(SpillTest, APrefixOutlivesTheProcess) {
  const ModelOptions options = Spilling();
  ExpectEqual(Answers(*Load(options, kNeedle, MakeDevice()), true));
  const uint64_t shared_tokens = cached_tokens_;  // by those that run, and not from the store
  for (const double eager : {0, 1}) {
    SCOPED_TRACE(eager);
    eager_share_ = eager;
    const auto model = Load(options, kNeedle, MakeDevice());
    ExpectEqual(Answers(*model, true));
    ExpectNoLosses(*model);
    EXPECT_GT(cached_tokens_, shared_tokens + 200);
  }
  // What the disk has is what a device without spill finds, too, and the other way round.
  ModelOptions whole = options;
  whole.tiers.spill = false;
  whole.kv_bytes = 0;
  whole.tiers.host_bytes *= 8;
  const auto model = Load(whole, kNeedle, MakeDevice());
  ExpectEqual(Answers(*model, true));
  EXPECT_GT(cached_tokens_, shared_tokens + 200);
}

TEST_F(SpillTest, ADamagedOrFailingStoreCostsComputationAndNoToken) {
  const ModelOptions options = Spilling();
  storage::FaultyStore* faulty = nullptr;
  uint64_t lost_pieces = 0;
  for (int attempt = 0; attempt < 20 && lost_pieces == 0; ++attempt) {
    const auto model = LoadOver(&faulty, options, MakeDevice());
    faulty->faults = {.miss_share = 0.0005, .lose_share = 0.002, .polls_max = 3, .reorder = true};
    ExpectEqual(Answers(*model, true));
    lost_pieces = model->decoder->kv_memory()->stats().lost_pieces;
  }
  EXPECT_GT(lost_pieces, 0u);
  EXPECT_GT(DamageAllOver(options.tiers.store_dir), 100);
  ExpectEqual(Answers(*Load(options, kNeedle, MakeDevice()), true));
}

TEST_F(SpillTest, WhatADeviceThatFailsHoldsIsNotSaved) {
  storage::FaultyStore* faulty = nullptr;
  const auto model = LoadOver(&faulty, Spilling(), MakeDevice());
  faulty->faults = {.polls_max = 30};
  const auto started = StartUntilBusy(*model, *faulty);
  const size_t put = faulty->put.size();
  dynamic_cast<PretendedDevice&>(*model->backend).fail_after_waits = 0;
  KvMemory& memory = *model->decoder->kv_memory();
  memory.Idle();
  memory.Flush(std::chrono::seconds(60));
  EXPECT_EQ(faulty->put.size(), put);
  EXPECT_TRUE(faulty->idle());
}

// From where on retrieval pays depends on who finds the chosen rows, the host or the device.
TEST_F(SpillTest, WhatIsMeasuredAtStartIsTheWayThatIsServed) {
  for (const bool spills : {true, false}) {
    SCOPED_TRACE(spills);
    ModelOptions options = Spilling();
    options.retrieval.from = "auto";
    options.retrieval.crossover_cache = "none";
    options.tiers.spill = spills;
    if (!spills) options.kv_bytes = 0;
    const auto model = Load(options, kNeedle, MakeDevice());
    ASSERT_NE(model, nullptr);
    EXPECT_FALSE(model->crossover.crossover.samples.empty());
    EXPECT_EQ(dynamic_cast<WatchfulDevice&>(*model->backend).calls_by_address > 0, spills);
  }
}

TEST_F(SpillTest, SizesThatCannotWorkAreRefusedByName) {
  const auto message = [&](auto set) {
    ModelOptions options = Spilling();
    set(options);
    const absl::Status status = LoadModel(kNeedle, options, MakeDevice()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  const int64_t first_layers = FrameBytes(config_) * FirstSharedLayer();
  EXPECT_THAT(message([](ModelOptions& o) { o.tiers.host_bytes = 0; }), HasSubstr("spill: "));
  EXPECT_THAT(message([](ModelOptions& o) {
                o.tiers.disk_bytes = 0;
                o.tiers.store_dir = "";
              }),
              HasSubstr("spill: "));
  EXPECT_THAT(message([](ModelOptions& o) {
                o.device = "cpu";
                o.num_threads = 2;
              }),
              HasSubstr("spill: is for --device cuda"));
  EXPECT_THAT(message([](ModelOptions& o) {
                o.tiers.host_bytes = 1 << 20;
                o.max_context = 32768;
              }),
              HasSubstr("host_bytes is 1048576: must be at least"));
  EXPECT_THAT(message([](ModelOptions& o) {
                o.kv_bytes = 0;
                o.block_tokens = 1024;
                o.tiers.disk_bytes = 4 << 20;
              }),
              HasSubstr("disk_bytes is 4194304: "));
  EXPECT_THAT(message([&](ModelOptions& o) { o.kv_bytes = first_layers - 1; }),
              HasSubstr("kv_bytes is " + std::to_string(first_layers - 1)));
  EXPECT_THAT(message([&](ModelOptions& o) { o.kv_bytes = int64_t{1} << 36; }),
              HasSubstr("disk_bytes has room"));

  // Without kv_bytes: enough for one sequence of the whole context, or what host_bytes hold alone.
  ModelOptions options = Spilling();
  options.kv_bytes = 0;
  EXPECT_EQ(NumKvBlocks(config_, *ResolveDecoderOptions(config_, options)),
            kContext / kBlockTokens);
  options.tiers.host_bytes = 8 *
                             (FrameBytes(config_) * (config_.num_layers() - FirstSharedLayer())) *
                             (kContext / kBlockTokens);
  EXPECT_EQ(NumKvBlocks(config_, *ResolveDecoderOptions(config_, options)),
            8 * (kContext / kBlockTokens));
}

}  // namespace
}  // namespace winnow::engine
