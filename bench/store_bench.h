// Common ground of `winnow bench tiers` and `winnow bench resume`: a decoder over a store on disk, a
// document whose KV is in that store, and the device's own speed.
//
// The KV is real (a text that the model reads) or noise under made-up names; either way it takes
// the way that a server's takes: written to frames, sealed, saved by KvMemory, and read back by it.
#ifndef WINNOW_BENCH_STORE_BENCH_H_
#define WINNOW_BENCH_STORE_BENCH_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "bench/runs.h"
#include "engine/decoder.h"
#include "engine/kv/block_name.h"
#include "engine/kv/kv_store.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/timed_backend.h"
#include "storage/block_store.h"
#include "storage/disk_store.h"

namespace winnow::bench {

// Counts the reads through it, by purpose. One thread at a time, as the store below.
class CountingStore final : public storage::BlockStore {
 public:
  enum Part {
    kDenseLayers,  // whole layer blocks of the layers that are always dense
    kLayerBlocks,  // whole layer blocks of other layers
    kRows,         // pages with chosen rows and anchors
    kIndex,        // what indexes keep of a block
    kSummary,      // of completion
    kParts
  };
  struct Counts {
    uint64_t operations = 0;
    uint64_t payload_bytes = 0;  // asked for
    uint64_t device_bytes = 0;   // read for it, in whole pages
  };

  CountingStore(std::unique_ptr<storage::BlockStore> inner, int32_t dense_layers)
      : inner_(std::move(inner)), dense_layers_(dense_layers) {}

  void ResetCounts() { counts_ = {}; }
  void set_dense_layers(int32_t layers) { dense_layers_ = layers; }
  const Counts& counts(Part part) const { return counts_[part]; }
  uint64_t failed_puts() const { return failed_puts_; }
  // Puts of this kind of key are summaries', and Gets of it from now on, too.
  void NoteSummaries(bool on) { noting_summaries_ = on; }
  const absl::flat_hash_set<uint32_t>& summary_kinds() const { return summary_kinds_; }
  void set_summary_kinds(const absl::flat_hash_set<uint32_t>& kinds) { summary_kinds_ = kinds; }

  void Put(uint64_t tag, const storage::BlockId& id, std::span<const std::byte> payload,
           const storage::PutOptions& options) override;
  void Get(uint64_t tag, const storage::BlockId& id, std::span<std::byte> into,
           int64_t deadline_ns) override;
  void GetPages(uint64_t tag, const storage::BlockId& id, std::span<const uint32_t> pages,
                std::span<std::byte> into, int64_t deadline_ns) override;
  void Erase(uint64_t tag, const storage::BlockKey& key) override { inner_->Erase(tag, key); }
  void Poll(std::chrono::nanoseconds wait, std::vector<storage::Completion>* completions) override;
  std::optional<storage::BlockInfo> Find(const storage::BlockId& id) const override {
    return inner_->Find(id);
  }
  bool Contains(const storage::BlockKey& key) const override { return inner_->Contains(key); }
  void ForEach(const Visit& visit) const override { inner_->ForEach(visit); }
  std::vector<storage::BlockKey> AsidesOf(const std::array<uint8_t, 32>& chain) const override {
    return inner_->AsidesOf(chain);
  }
  uint64_t TenantBytes(const std::array<uint8_t, 32>& tenant) const override {
    return inner_->TenantBytes(tenant);
  }
  bool SetPinned(const storage::BlockKey& key, bool pinned) override {
    return inner_->SetPinned(key, pinned);
  }
  void Raise(const storage::BlockKey& key, uint8_t priority, uint32_t ttl_s) override {
    inner_->Raise(key, priority, ttl_s);
  }
  void SetInUse(const storage::BlockKey& key, bool in_use) override {
    inner_->SetInUse(key, in_use);
  }
  size_t in_flight() const override { return inner_->in_flight(); }
  bool idle() const override { return inner_->idle(); }
  storage::StoreStats stats() const override { return inner_->stats(); }
  storage::TierState state() const override { return inner_->state(); }

 private:
  void Count(Part part, uint64_t payload_bytes, uint64_t device_bytes);

  const std::unique_ptr<storage::BlockStore> inner_;
  int32_t dense_layers_;
  std::array<Counts, kParts> counts_ = {};
  uint64_t failed_puts_ = 0;
  bool noting_summaries_ = false;
  absl::flat_hash_set<uint32_t> summary_kinds_;
};

// Remembers which tokens each layer chose, while it is asked to. For one sequence and one token a
// pass.
class RecordingBackend final : public engine::TimedBackend {
 public:
  using TimedBackend::TimedBackend;
  // Sorted tokens of one KV head.
  using Chosen = std::vector<int32_t>;

  void Record(bool on) { recording_ = on; }
  // [choices since][KV heads]; one choice for each layer that retrieves, in the layers' order.
  std::vector<std::vector<Chosen>> Take() { return std::exchange(choices_, {}); }

  void SelectByCodes(std::span<const kernels::RetrievalQuery> queries, const void* query_codes,
                     int32_t group, const void* codes, const kernels::CodeLayout& code_layout,
                     const kernels::Selection& chosen) override;
  void SelectByBounds(const kernels::Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                      const void* bounds, const kernels::KvLayout& layout, float scale,
                      const kernels::Selection& chosen) override;
  void SelectByLogits(const kernels::Tensor& q, std::span<const kernels::RetrievalQuery> queries,
                      const void* pool, const kernels::KvLayout& layout, float scale,
                      const kernels::Selection& chosen) override;
  void PruneSelection(const kernels::PruneSelectionArgs& args) override;
  void AttendRows(const kernels::AttendRowsArgs& args) override;
  // Since the start, in AttendRows: attention() without dense layers.
  double row_attention_seconds() const { return row_attention_seconds_; }

 private:
  void Add(const kernels::Selection& chosen, bool replace);

  bool recording_ = false;
  double row_attention_seconds_ = 0;
  std::vector<std::vector<Chosen>> choices_;
};

struct StoreBenchFlags {
  BenchModelFlags model;
  std::string store_dir;  // made, and removed at the end; must not exist, or be empty
  std::string io = "auto";
  std::string text_path;         // the document; "": noise
  int64_t row_cache_bytes = -1;  // -1: the command's own default
};

// A store's directory: made by it, gone with it.
class StoreDirectory {
 public:
  // InvalidArgument: it exists and is not empty. Others: the system's.
  static absl::StatusOr<std::unique_ptr<StoreDirectory>> Make(const std::string& path);
  ~StoreDirectory();
  StoreDirectory(const StoreDirectory&) = delete;

 private:
  explicit StoreDirectory(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

// A decoder over a store, and the document in it. Blocks [0, document_blocks) of the pool are the
// document's; those after it are for tokens that follow. Members are destroyed last to first.
class StoreBench {
 public:
  struct Shape {
    int64_t document_tokens = 0;  // whole blocks
    int64_t more_tokens = 0;      // that follow it
    // Share of the document's layer blocks, in layers under the policy, that have a frame at a time.
    double resident_share = 1;
    int32_t max_batch_tokens = 512;
  };
  // REQUIRES: a policy. InvalidArgument: a policy or a length that the model cannot honour. ResourceExhausted: memory,
  // or room in the directory, with the numbers.
  static absl::StatusOr<std::unique_ptr<StoreBench>> Make(
      const StoreBenchFlags& flags, std::span<const engine::AttentionPolicy> policies,
      const Shape& shape);

  engine::Decoder& decoder() { return *decoder_; }
  engine::KvMemory& memory() { return *decoder_->kv_memory(); }
  RecordingBackend& recorder() { return *recorder_; }
  CountingStore& store() { return *counting_; }
  const storage::DiskStore& disk() const { return *disk_; }
  const engine::AttentionPolicy& policy() const { return policy_; }  // the first
  const engine::ModelConfig& config() const { return config_; }
  const kernels::Backend& backend() const { return *backend_; }
  double open_seconds() const { return open_seconds_; }  // of the store
  int32_t document_blocks() const { return document_blocks_; }
  // KV bytes of the document, in all layers.
  uint64_t document_kv_bytes() const {
    return static_cast<uint64_t>(document_blocks_) * decoder_->kv_layout().BlockBytes() *
           config_.num_layers();
  }
  // The first `document` blocks of the document, and those that follow it.
  std::vector<int32_t> Table(int32_t document) const;
  // Block hashes of a document of these tokens.
  std::vector<engine::BlockName> Names(std::span<const int32_t> tokens) const;

  // The document's KV: noise in every layer block, sealed under `names` and saved.
  absl::Status FillWithNoise(std::span<const engine::BlockName> names);
  // The same of blocks that have been computed: seals those before token `end` that are not, ...
  void Seal(std::span<const engine::BlockName> names, int64_t end);
  // ... and waits until the store has them all, also what indexes keep of them.
  absl::Status Save(std::span<const engine::BlockName> names, bool with_index);
  // One pass. Unavailable: the store lost KV that it needs.
  absl::Status Forward(std::span<const int32_t> tokens, int64_t position,
                       std::span<const int32_t> table, engine::RetrievalState* state,
                       int64_t retrieve_from, bool with_logits);
  std::span<const float> logits() const { return logits_; }
  // Nothing of the document is in fast memory, or in an index, any more; what follows it neither.
  void Drop();
  // The document's blocks come from the store, under these names. NotFound: it lacks some.
  absl::Status Adopt(std::span<const engine::BlockName> names);
  // Reads layer blocks of these blocks into frames.
  absl::Status MakeResident(int32_t layer, std::span<const int32_t> blocks);
  // Waits until nothing is on its way to the store.
  absl::Status Settle();

 private:
  StoreBench() = default;
  absl::Status OpenStore(const engine::TierFlags& tiers, const kernels::KvLayout& layout,
                         int32_t dense_layers);

  engine::AttentionPolicy policy_;
  engine::ModelConfig config_;
  engine::Weights weights_;
  engine::SyntheticWeights synthetic_;
  engine::SyntheticArtifact synthetic_artifact_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<RecordingBackend> recorder_;
  engine::KvStore kv_store_;
  CountingStore* counting_ = nullptr;
  storage::DiskStore* disk_ = nullptr;
  double open_seconds_ = 0;
  std::unique_ptr<engine::Decoder> decoder_;
  int32_t document_blocks_ = 0;
  int32_t more_blocks_ = 0;
  engine::Digest tenant_ = {};
  std::vector<int32_t> frames_;  // of a pinned table
  std::vector<float> logits_;
};

// `count` tokens: of the text, or, without one, of no meaning. InvalidArgument: the text is too
// short.
absl::StatusOr<std::vector<int32_t>> BenchTokens(const StoreBenchFlags& flags, int64_t count,
                                                 int32_t vocab_size);

struct DeviceRate {
  double reads_per_s = 0;
  uint32_t depth = 0;  // reads in flight
  std::string engine;
  bool direct = false;
};
// Random pages of 4 KiB of the segments in the directory, each read alone, as many in flight as a
// store's engine takes.
absl::StatusOr<DeviceRate> MeasureRandomReads(const StoreBenchFlags& flags, double seconds);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_STORE_BENCH_H_
