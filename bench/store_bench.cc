#include "bench/store_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/kv_planning.h"
#include "engine/model/vocabulary_fit.h"
#include "engine/model_loader.h"
#include "engine/model_retrieval.h"
#include "engine/model_text.h"
#include "engine/text/tokenizer.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "server/gzip_file.h"
#include "storage/file_system.h"
#include "storage/format.h"
#include "storage/page_memory.h"
#include "storage/ring.h"

namespace winnow::bench {
namespace {

using Clock = std::chrono::steady_clock;
using storage::kPageBytes;

constexpr size_t kConfigBytesMax = 16 << 20;
constexpr size_t kTextBytesMax = size_t{1} << 30;
// Time that the store may take to write: longer means that it never will.
constexpr std::chrono::seconds kSaveTime(120);
// Share of the disk's bytes that blocks may take (engine/kv/kv_store.cc): nothing of a run may be evicted.
constexpr double kUsableShare = 0.75;
constexpr int64_t kDiskSlackBytes = int64_t{320} << 20;
// Blocks written between two waits: layer blocks on their way have copies in the store's buffers.
constexpr int32_t kBlocksAtOnce = 16;

// A store gives up on reads after 2 s, and a server computes again. A bench waits for a slow disk, and
// says how slow it was.
constexpr int64_t kReadTimeNs = int64_t{60} * 1'000'000'000;

int64_t ReadDeadline(int64_t asked_ns) {
  return asked_ns != 0 ? asked_ns : storage::SystemClock().NowNs() + kReadTimeNs;
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

uint32_t KindOf(const storage::BlockKey& key) {
  uint32_t kind = 0;
  std::memcpy(&kind, key.bytes.data() + 32, sizeof kind);
  return kind;
}

// ResourceExhausted: the directory's file system has no room for the store, with the numbers.
absl::Status CheckStoreRoom(const std::string& store_dir, int64_t document_tokens,
                            int64_t disk_bytes) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(store_dir, error);
  if (error) {
    return absl::InvalidArgumentError(fmt::format("store_dir: {}: {}", store_dir, error.message()));
  }
  std::error_code count_error;
  int64_t there = 0;  // of an earlier part of the run
  for (const auto& entry : std::filesystem::directory_iterator(store_dir, count_error)) {
    if (entry.is_regular_file()) there += static_cast<int64_t>(entry.file_size());
  }
  if (static_cast<int64_t>(space.available) + there < disk_bytes) {
    return absl::ResourceExhaustedError(
        fmt::format("store_dir: {} bytes are free in {}, and the store of {} tokens may take {}",
                    space.available, store_dir, document_tokens, disk_bytes));
  }
  return absl::OkStatus();
}

// Capacity of a store that everything fits: layer blocks, the index's share of each block, and a summary or two.
int64_t StoreBytes(int64_t blocks, const engine::ModelConfig& config,
                   const kernels::KvLayout& layout, const engine::RetrievalOptions& retrieval) {
  const int64_t index_bytes = engine::IndexBlockBytes(config, layout, retrieval) + 64;
  const int64_t stored =
      blocks *
          (static_cast<int64_t>(storage::BlockBytesFor(layout.BlockBytes())) * config.num_layers() +
           static_cast<int64_t>(storage::BlockBytesFor(index_bytes)) + 2 * kPageBytes) +
      4 * engine::SummaryBytes(config, retrieval);
  const int64_t bytes =
      static_cast<int64_t>(static_cast<double>(stored) / kUsableShare) + kDiskSlackBytes;
  return bytes - bytes % (int64_t{1} << 20);
}

}  // namespace

// ---- counting ----

void CountingStore::Count(Part part, uint64_t payload_bytes, uint64_t device_bytes) {
  ++counts_[part].operations;
  counts_[part].payload_bytes += payload_bytes;
  counts_[part].device_bytes += device_bytes;
}

void CountingStore::Put(uint64_t tag, const storage::BlockId& id,
                        std::span<const std::byte> payload, const storage::PutOptions& options) {
  if (noting_summaries_) summary_kinds_.insert(KindOf(id.key));
  inner_->Put(tag, id, payload, options);
}

void CountingStore::Get(uint64_t tag, const storage::BlockId& id, std::span<std::byte> into,
                        int64_t deadline_ns) {
  const uint32_t kind = KindOf(id.key);
  const Part part =
      kind == 0 ? static_cast<int32_t>(id.layer) < dense_layers_ ? kDenseLayers : kLayerBlocks
      : summary_kinds_.contains(kind) ? kSummary
                                      : kIndex;
  Count(part, into.size(), storage::PageAlign(into.size()));
  inner_->Get(tag, id, into, ReadDeadline(deadline_ns));
}

void CountingStore::GetPages(uint64_t tag, const storage::BlockId& id,
                             std::span<const uint32_t> pages, std::span<std::byte> into,
                             int64_t deadline_ns) {
  Count(kRows, into.size(), into.size());
  inner_->GetPages(tag, id, pages, into, ReadDeadline(deadline_ns));
}

void CountingStore::Poll(std::chrono::nanoseconds wait,
                         std::vector<storage::Completion>* completions) {
  const size_t before = completions->size();
  inner_->Poll(wait, completions);
  for (size_t i = before; i < completions->size(); ++i) {
    const storage::Completion& completion = (*completions)[i];
    failed_puts_ += completion.operation == storage::Operation::kPut &&
                    completion.outcome != storage::Outcome::kOk;
  }
}

void RecordingBackend::Add(const kernels::Selection& chosen, bool replace) {
  if (!recording_) return;
  if (replace && !choices_.empty()) choices_.pop_back();
  std::vector<Chosen> heads(chosen.kv_heads);
  for (int32_t head = 0; head < chosen.kv_heads; ++head) {
    const int32_t* tokens = chosen.chosen(0, head);
    heads[head].assign(tokens, tokens + chosen.count(0, head));
    std::sort(heads[head].begin(), heads[head].end());
  }
  choices_.push_back(std::move(heads));
}

void RecordingBackend::SelectByCodes(std::span<const kernels::RetrievalQuery> queries,
                                     const void* query_codes, int32_t group, const void* codes,
                                     const kernels::CodeLayout& code_layout,
                                     const kernels::Selection& chosen) {
  TimedBackend::SelectByCodes(queries, query_codes, group, codes, code_layout, chosen);
  Add(chosen, /*replace=*/false);
}

void RecordingBackend::SelectByBounds(const kernels::Tensor& q,
                                      std::span<const kernels::RetrievalQuery> queries,
                                      const void* bounds, const kernels::KvLayout& layout,
                                      float scale, const kernels::Selection& chosen) {
  TimedBackend::SelectByBounds(q, queries, bounds, layout, scale, chosen);
  Add(chosen, /*replace=*/false);
}

void RecordingBackend::SelectByLogits(const kernels::Tensor& q,
                                      std::span<const kernels::RetrievalQuery> queries,
                                      const void* pool, const kernels::KvLayout& layout,
                                      float scale, const kernels::Selection& chosen) {
  TimedBackend::SelectByLogits(q, queries, pool, layout, scale, chosen);
  Add(chosen, /*replace=*/false);
}

void RecordingBackend::PruneSelection(const kernels::PruneSelectionArgs& args) {
  TimedBackend::PruneSelection(args);
  Add(args.kept, /*replace=*/true);
}

void RecordingBackend::AttendRows(const kernels::AttendRowsArgs& args) {
  const double before = attention().seconds;
  TimedBackend::AttendRows(args);
  row_attention_seconds_ += attention().seconds - before;
}

// ---- the store's directory ----

absl::StatusOr<std::unique_ptr<StoreDirectory>> StoreDirectory::Make(const std::string& path) {
  std::error_code error;
  const bool there = std::filesystem::exists(path, error);
  if (!error && there && !std::filesystem::is_empty(path, error) && !error) {
    return absl::InvalidArgumentError(
        fmt::format("store_dir: {} is not empty; this run makes a store and removes it", path));
  }
  if (!error && !there) std::filesystem::create_directory(path, error);
  if (error) {
    return absl::InvalidArgumentError(fmt::format("store_dir: {}: {}", path, error.message()));
  }
  return std::unique_ptr<StoreDirectory>(new StoreDirectory(path));
}

StoreDirectory::~StoreDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

// ---- making ----

// Opens the store, and counts the reads through it.
absl::Status StoreBench::OpenStore(const engine::TierFlags& tiers, const kernels::KvLayout& layout,
                                   int32_t dense_layers) {
  const Clock::time_point start = Clock::now();
  WINNOW_ASSIGN_OR_RETURN(kv_store_, engine::OpenKvStore(tiers, layout));
  open_seconds_ = SecondsSince(start);
  disk_ = dynamic_cast<storage::DiskStore*>(kv_store_.store.get());
  WINNOW_CHECK(disk_ != nullptr);
  auto counting = std::make_unique<CountingStore>(std::move(kv_store_.store), dense_layers);
  counting_ = counting.get();
  kv_store_.store = std::move(counting);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StoreBench>> StoreBench::Make(
    const StoreBenchFlags& flags, std::span<const engine::AttentionPolicy> policies,
    const Shape& shape) {
  std::unique_ptr<StoreBench> bench(new StoreBench());
  bench->policy_ = policies.front();
  engine::ModelConfig& config = bench->config_;
  const bool has_dir = !flags.model.model_dir.empty();
  if (has_dir) {
    WINNOW_ASSIGN_OR_RETURN(config, engine::LoadModelConfig(flags.model.model_dir));
    WINNOW_ASSIGN_OR_RETURN(bench->weights_, engine::LoadWeights(flags.model.model_dir, config));
  } else {
    WINNOW_ASSIGN_OR_RETURN(const std::string text,
                            engine::ReadSmallFile(flags.model.like, kConfigBytesMax));
    WINNOW_ASSIGN_OR_RETURN(config, engine::ParseModelConfig(text, flags.model.like, "", ""));
  }
  engine::ModelOptions options = flags.model.model;
  options.max_batch_tokens = shape.max_batch_tokens;
  options.max_batch_logits = 1;
  const int64_t block_tokens = options.block_tokens;
  WINNOW_CHECK(shape.document_tokens % block_tokens == 0);
  const int64_t document = shape.document_tokens / block_tokens;
  const int64_t more = (shape.more_tokens + block_tokens - 1) / block_tokens;
  const int64_t blocks = document + more;
  if (shape.document_tokens + shape.more_tokens > config.max_position_embeddings) {
    return absl::InvalidArgumentError(
        fmt::format("{} tokens and {} that follow are more than the model's context of {}",
                    shape.document_tokens, shape.more_tokens, config.max_position_embeddings));
  }
  options.max_context = static_cast<int32_t>(
      std::min<int64_t>(blocks * block_tokens, config.max_position_embeddings));
  bench->document_blocks_ = static_cast<int32_t>(document);
  bench->more_blocks_ = static_cast<int32_t>(more);

  WINNOW_ASSIGN_OR_RETURN(engine::DecoderOptions plain,
                          engine::ResolveDecoderOptions(config, options));
  const kernels::KvLayout layout{config.num_kv_heads, config.head_dim, plain.block_tokens,
                                 plain.kv_dtype};
  const auto block_bytes = static_cast<int64_t>(layout.BlockBytes());
  WINNOW_ASSIGN_OR_RETURN(
      const engine::RetrievalOptions retrieval,
      BenchRetrieval(flags.model, config, bench->weights_, policies, bench->synthetic_artifact_));

  options.tiers.disk_bytes = StoreBytes(document, config, layout, retrieval);
  options.tiers.store_dir = flags.store_dir;
  options.tiers.io = flags.io;
  options.tiers.row_cache_bytes = std::max<int64_t>(flags.row_cache_bytes, 0);
  // Dense layers whole, the share of the others, and what one pass needs beside. With a GPU frames lie in
  // the host's memory, and all KV of the first layers on the device.
  const bool on_device = engine::HasDeviceMemory(options);
  const int32_t own_layers =
      on_device ? std::min(config.num_layers(), engine::FirstSharedLayer()) : 0;
  int64_t dense = 0;
  for (const engine::AttentionPolicy& policy : policies) {
    dense = std::max<int64_t>(dense, std::min(policy.dense_layers, config.num_layers()));
  }
  const auto resident = static_cast<int64_t>(static_cast<double>(document) * shape.resident_share);
  const int64_t dense_in_frames = std::max<int64_t>(0, dense - own_layers);
  const int64_t frames =
      dense_in_frames * blocks +
      (config.num_layers() - own_layers - dense_in_frames) * std::min(resident + more + 8, blocks) +
      engine::LeastFrames(config.num_layers() - own_layers, plain.block_tokens, options.max_context,
                          options.max_batch_tokens, options.max_batch_logits);
  if (on_device) {
    options.tiers.spill = true;
    options.tiers.host_bytes = frames * block_bytes;
    options.kv_bytes = blocks * own_layers * block_bytes;
  }
  WINNOW_RETURN_IF_ERROR(
      CheckStoreRoom(flags.store_dir, shape.document_tokens, options.tiers.disk_bytes));

  WINNOW_ASSIGN_OR_RETURN(engine::DecoderOptions resolved,
                          engine::ResolveDecoderOptions(config, options));
  resolved.retrieval = retrieval;
  if (on_device) {
    options.tiers.host_bytes = 0;  // none below the frames
  } else {
    resolved.kv_bytes = frames * block_bytes;
    resolved.lower_blocks =
        static_cast<int32_t>(std::max<int64_t>(0, blocks - frames / config.num_layers()));
  }
  WINNOW_ASSIGN_OR_RETURN(bench->backend_, engine::MakeBackend(options));
  WINNOW_ASSIGN_OR_RETURN(const engine::KvPlan plan, engine::PlanKv(config, resolved));
  WINNOW_RETURN_IF_ERROR(engine::CheckMemory(config, resolved, plan, *bench->backend_));

  const engine::Weights* weights = &bench->weights_;
  if (!has_dir) {
    WINNOW_ASSIGN_OR_RETURN(bench->synthetic_, engine::MakeSyntheticWeights(config, 1));
    weights = &bench->synthetic_.weights;
  }
  bench->recorder_ = std::make_unique<RecordingBackend>(*bench->backend_, resolved.compute);
  bench->recorder_->set_waits(false);

  WINNOW_RETURN_IF_ERROR(bench->OpenStore(options.tiers, layout, static_cast<int32_t>(dense)));
  resolved.store = bench->counting_;
  resolved.write_through = true;
  resolved.names.model = engine::Sha256("winnow bench");
  bench->tenant_ = engine::Sha256("bench");
  WINNOW_ASSIGN_OR_RETURN(
      bench->decoder_,
      engine::Decoder::Create(config, *weights, *bench->recorder_, resolved, plan));
  for (const engine::AttentionPolicy& policy : policies) {
    WINNOW_RETURN_IF_ERROR(bench->decoder_->CheckPolicy(policy));
  }
  bench->logits_.resize(config.vocab_size);
  return bench;
}

std::vector<int32_t> StoreBench::Table(int32_t document) const {
  std::vector<int32_t> table(document + more_blocks_);
  std::iota(table.begin(), table.begin() + document, 0);
  std::iota(table.begin() + document, table.end(), document_blocks_);
  return table;
}

std::vector<engine::BlockName> StoreBench::Names(std::span<const int32_t> tokens) const {
  const size_t block_tokens = decoder_->block_tokens();
  std::vector<engine::BlockName> names;
  engine::Digest chain = engine::ChainRoot(decoder_->options().names.model, tenant_);
  for (int32_t i = 0; i < document_blocks_; ++i) {
    chain = engine::ChainNext(chain, tokens.subspan(i * block_tokens, block_tokens), "");
    names.push_back({chain, tenant_, i});
  }
  return names;
}

// ---- filling ----

namespace {

// Gives every row of a block the scales 1/128.
void SetScales(const kernels::KvLayout& layout, std::vector<uint64_t>& block) {
  const auto scale = kernels::ToBF16(1.0f / 128);
  auto* const bytes = reinterpret_cast<std::byte*>(block.data());
  for (size_t row = 0; row < layout.BlockBytes(); row += layout.RowBytes()) {
    for (size_t i = 0; i < 2; ++i) {
      std::memcpy(bytes + row + layout.ScaleOffsetInRow() + i * kernels::kKvScaleBytes, &scale,
                  sizeof(scale));
    }
  }
}

}  // namespace

absl::Status StoreBench::FillWithNoise(std::span<const engine::BlockName> names) {
  const kernels::KvLayout& layout = decoder_->kv_layout();
  std::vector<uint64_t> noise(layout.BlockBytes() / sizeof(uint64_t));
  uint64_t state = 88172645463325252u;
  // Random signs and fractions of values in [0.5, 1): finite, and no two rows alike. Codes of 8 bits are random but for
  // the highest of E4M3's exponent, which NaN needs.
  const bool is_f32 = layout.dtype == kernels::DType::kF32;
  const bool scaled = kernels::HasScales(layout.dtype);
  const uint64_t keep = is_f32   ? 0x807fffff807fffffu
                        : scaled ? 0xbfbfbfbfbfbfbfbfu
                                 : 0x807f807f807f807fu;
  const uint64_t exponent = is_f32 ? 0x3f0000003f000000u : scaled ? 0 : 0x3f003f003f003f00u;
  const std::vector<int32_t> table = Table(document_blocks_);
  memory().BeginPass(1);
  for (int32_t i = 0; i < static_cast<int32_t>(table.size()); ++i) {
    for (int32_t layer = 0; layer < config_.num_layers(); ++layer) {
      for (uint64_t& word : noise) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word = (state & keep) | exponent;
      }
      if (scaled) SetScales(layout, noise);
      engine::PinnedBlocks pinned;
      if (memory().TryPin(0, layer, table, i, i + 1, &frames_, &pinned) !=
          engine::KvMemory::PinResult::kOk) {
        return absl::UnavailableError("no frame for a block of noise: the store takes no more");
      }
      recorder_->CopyToDevice(noise.data(), pinned.pool + pinned.table[i] * layout.BlockBytes(),
                              layout.BlockBytes());
      memory().Unpin();
    }
    if (i >= document_blocks_) continue;
    memory().Seal(i, names[i], /*keep=*/true);
    if (i % kBlocksAtOnce == 0) memory().Flush(kSaveTime);
  }
  return Save(names, /*with_index=*/false);
}

void StoreBench::Seal(std::span<const engine::BlockName> names, int64_t end) {
  for (int32_t i = 0; i < document_blocks_ && (i + 1) * int64_t{decoder_->block_tokens()} <= end;
       ++i) {
    if (!memory().blocks()[i].sealed) memory().Seal(i, names[i], /*keep=*/true);
  }
}

absl::Status StoreBench::Settle() {
  memory().Flush(kSaveTime);
  if (counting_->in_flight() == 0 && !memory().residency().has_work()) return absl::OkStatus();
  return absl::UnavailableError(
      fmt::format("the store did not settle: {} operations in flight, {} errors",
                  counting_->in_flight(), counting_->stats().io_errors));
}

absl::Status StoreBench::Save(std::span<const engine::BlockName> names, bool with_index) {
  WINNOW_RETURN_IF_ERROR(Settle());
  for (const engine::BlockName& name : names) {
    if (memory().store().Stored(name)) continue;
    return absl::UnavailableError(
        fmt::format("the store did not take block {}: {} I/O errors, {} bytes used", name.index,
                    counting_->stats().io_errors, counting_->stats().used_bytes));
  }
  if (!with_index) return absl::OkStatus();
  const uint64_t failed = counting_->failed_puts();
  for (int32_t i = 0; i < document_blocks_; ++i) {
    decoder_->SaveIndex(i, names[i]);
    if (i % kBlocksAtOnce == 0) WINNOW_RETURN_IF_ERROR(Settle());
  }
  WINNOW_RETURN_IF_ERROR(Settle());
  if (counting_->failed_puts() == failed) return absl::OkStatus();
  return absl::UnavailableError(fmt::format("the store did not take {} parts of the index",
                                            counting_->failed_puts() - failed));
}

// ---- running ----

absl::Status StoreBench::Forward(std::span<const int32_t> tokens, int64_t position,
                                 std::span<const int32_t> table, engine::RetrievalState* state,
                                 int64_t retrieve_from, bool with_logits) {
  const engine::Batch batch{{{tokens, static_cast<int32_t>(position), table, with_logits ? 1 : 0,
                              state, static_cast<int32_t>(retrieve_from)}}};
  WINNOW_RETURN_IF_ERROR(decoder_->Forward(batch, logits_));
  if (!recorder_->Synchronize()) return absl::UnavailableError(recorder_->failure());
  if (!memory().chunk_lost(0)) return absl::OkStatus();
  const storage::StoreStats stats = counting_->stats();
  return absl::UnavailableError(fmt::format(
      "the store lost KV in the middle of a run: {} late, {} I/O errors, {} corrupt, {} busy; or "
      "fast memory is too small",
      stats.misses[static_cast<size_t>(storage::Reason::kLate)], stats.io_errors,
      stats.corrupt_blocks, stats.misses[static_cast<size_t>(storage::Reason::kBusy)]));
}

void StoreBench::Drop() {
  for (int32_t block = 0; block < document_blocks_ + more_blocks_; ++block) {
    memory().Forget(block);
  }
}

absl::Status StoreBench::Adopt(std::span<const engine::BlockName> names) {
  for (int32_t i = 0; i < document_blocks_; ++i) {
    if (!memory().store().Stored(names[i])) {
      return absl::NotFoundError(fmt::format("the store lacks block {}", i));
    }
    memory().Adopt(i, names[i]);
  }
  return absl::OkStatus();
}

absl::Status StoreBench::MakeResident(int32_t layer, std::span<const int32_t> blocks) {
  memory().BeginPass(1);
  engine::PinnedBlocks pinned;
  frames_.clear();
  const engine::KvMemory::PinResult result =
      memory().TryPin(0, layer, blocks, 0, static_cast<int32_t>(blocks.size()), &frames_, &pinned);
  memory().Unpin();
  if (result == engine::KvMemory::PinResult::kOk) return absl::OkStatus();
  return absl::UnavailableError(result == engine::KvMemory::PinResult::kFull
                                    ? "too few frames"
                                    : "the store lost KV while it was read into frames");
}

// ---- reading ----

absl::StatusOr<std::vector<int32_t>> BenchTokens(const StoreBenchFlags& flags, int64_t count,
                                                 int32_t vocab_size) {
  if (flags.text_path.empty()) {
    std::mt19937 random(1);
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab_size);
    return tokens;
  }
  if (flags.model.model_dir.empty()) {
    return absl::InvalidArgumentError("--text: needs --model, whose tokenizer reads it");
  }
  WINNOW_ASSIGN_OR_RETURN(const std::string text,
                          server::ReadMaybeGzipped(flags.text_path, kTextBytesMax));
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<engine::Tokenizer> tokenizer,
                          engine::LoadTokenizer(flags.model.model_dir));
  WINNOW_RETURN_IF_ERROR(engine::CheckVocabularyFits(tokenizer->vocab_size(), vocab_size,
                                                     engine::TokenizerFile(flags.model.model_dir)));
  WINNOW_ASSIGN_OR_RETURN(
      std::vector<int32_t> tokens,
      tokenizer->Encode(text, /*add_special_tokens=*/true, /*parse_special=*/false));
  if (static_cast<int64_t>(tokens.size()) < count) {
    return absl::InvalidArgumentError(fmt::format("--text: {} has {} tokens, and {} are needed",
                                                  flags.text_path, tokens.size(), count));
  }
  tokens.resize(count);
  return tokens;
}

absl::StatusOr<DeviceRate> MeasureRandomReads(const StoreBenchFlags& flags, double seconds) {
  const storage::DiskStoreOptions defaults;  // the store's own are these
  storage::IoEngineOptions io = defaults.io;
  io.kind = flags.io == "uring"     ? storage::IoEngineKind::kUring
            : flags.io == "threads" ? storage::IoEngineKind::kThreads
                                    : storage::IoEngineKind::kAuto;
  WINNOW_ASSIGN_OR_RETURN(storage::IoEngineChoice choice,
                          storage::ChooseIoEngine(io, flags.store_dir));
  storage::FileSystem files;
  WINNOW_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(flags.store_dir));
  std::vector<storage::File> opened;
  std::vector<uint64_t> pages;  // before each file, and in all
  uint64_t total = 0;
  for (const std::string& name : names) {
    if (!name.ends_with(".wseg")) continue;
    const std::string path = flags.store_dir + "/" + name;
    WINNOW_ASSIGN_OR_RETURN(const uint64_t bytes, files.FileBytes(path));
    WINNOW_ASSIGN_OR_RETURN(storage::File file,
                            files.Open(path, {.direct = choice.direct, .read_only = true}));
    pages.push_back(total);
    total += bytes / kPageBytes;
    opened.push_back(std::move(file));
  }
  if (total == 0) return absl::FailedPreconditionError("the store has no segments");

  DeviceRate rate;
  rate.engine = choice.engine->name();
  rate.depth = choice.engine->depth();
  rate.direct = choice.direct;
  const storage::SystemClock clock;
  storage::PageMemory buffers(rate.depth * kPageBytes);
  choice.engine->RegisterBuffer(buffers.bytes());
  for (const storage::File& file : opened) choice.engine->RegisterFile(file.fd());
  storage::Ring ring(std::move(choice.engine), &clock);
  std::mt19937_64 random(1);
  const auto submit = [&](uint64_t slot) {
    const uint64_t page = random() % total;
    const size_t file = std::upper_bound(pages.begin(), pages.end(), page) - pages.begin() - 1;
    ring.Submit({.kind = storage::IoKind::kRead,
                 .fd = opened[file].fd(),
                 .offset = (page - pages[file]) * kPageBytes,
                 .data = buffers.bytes().subspan(slot * kPageBytes, kPageBytes),
                 .tag = slot});
  };
  const Clock::time_point start = Clock::now();
  for (uint32_t slot = 0; slot < rate.depth; ++slot) submit(slot);
  uint64_t done = 0;
  double elapsed = 0;
  std::vector<storage::IoResult> results;
  while (elapsed < seconds || done == 0) {  // a disk may stall for longer
    results.clear();
    ring.Poll(std::chrono::milliseconds(10), &results);
    for (const storage::IoResult& result : results) {
      if (result.error != 0) return storage::ErrnoStatus(result.error, "a random read");
      ++done;
      submit(result.tag);
    }
    elapsed = SecondsSince(start);
  }
  rate.reads_per_s = static_cast<double>(done) / elapsed;
  return rate;
}

}  // namespace winnow::bench
