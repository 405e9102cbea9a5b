// Random workloads over a small model whose KV is in tiers, with a store that is slow, loses, damages, takes nothing for a
// while, and comes back. Every workload ends; every request that ends by itself has exactly what it has alone with all KV
// in memory; what is cut short is a beginning of it; and nothing is left over.
//
// A store has several lives of an engine, one after the other: what the first ones keep, later ones fetch.
//
// WINNOW_TEST_SEED=<first seed> WINNOW_TEST_WORKLOADS=<count> runs others than those of every day, as many as asked for.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/decoder.h"
#include "engine/kv/kv_memory.h"
#include "engine/kv_planning.h"
#include "engine/model/random_model.h"
#include "engine/model_loader.h"
#include "engine/transform_fit_run.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "storage/disk_options.h"
#include "tests/fault/faulty_store.h"
#include "tests/unit/engine/dice.h"
#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/engine/kv_tiers_testing.h"
#include "tests/unit/engine/model_files.h"
#include "tests/unit/engine/pretended_device.h"
#include "tests/unit/engine/tokenizer_testing.h"

namespace winnow::engine {
namespace {

using std::chrono::milliseconds;
using storage::TierState;

constexpr int32_t kBlock = 16, kLongest = 256, kMostRunning = 4, kMostStepTokens = 24;
constexpr int32_t kVocabulary = 512;

// A model of random weights, small enough for hundreds of workloads: attention is what these are about.
const std::string& ModelPath() {
  static const TempDir directory;
  static const std::string path = [] {
    nlohmann::json config = nlohmann::json::parse(ReadText(kv_tiers::kNeedle + "/config.json"));
    config["hidden_size"] = 64;
    config["intermediate_size"] = 64;
    config["num_hidden_layers"] = 4;
    config["num_attention_heads"] = 4;
    config["num_key_value_heads"] = 2;
    config["head_dim"] = 128;
    config["vocab_size"] = kVocabulary;
    config["max_position_embeddings"] = kLongest;  // transform codes are fitted for so many
    WriteText(directory.File("tokenizer.json"), ByteLevelJson().dump());  // it opens quickly
    WriteText(directory.File("config.json"), config.dump());
    RandomModelOptions options;
    options.config_path = directory.File("config.json");
    options.out_dir = directory.File("model");
    options.seed = 1;
    options.tokenizer_dir = directory.path();
    const auto report = WriteRandomModel(options);
    EXPECT_TRUE(report.ok()) << report.status();
    return directory.File("model");
  }();
  return path;
}

const ModelConfig& Config() {
  static const ModelConfig config = *LoadModelConfig(ModelPath());
  return config;
}

std::unique_ptr<kernels::Backend> MakeDevice() {
  return std::make_unique<PretendedDeviceOfItsOwn>(kernels::MakeCpuBackend("auto", 1));
}

kernels::DType TypeOf(const std::string& name) {
  return name == "int8"  ? kernels::DType::kI8
         : name == "fp8" ? kernels::DType::kF8
         : name == "f32" ? kernels::DType::kF32
                         : kernels::DType::kBF16;
}

// With room for the longest sequence in memory.
ModelOptions InMemory(const std::string& kv_dtype, bool on_device) {
  ModelOptions options;
  options.device = on_device ? "cuda" : "cpu";
  options.num_threads = on_device ? 0 : 1;
  options.kv_dtype = kv_dtype;
  options.block_tokens = kBlock;
  options.max_context = kLongest;
  options.max_batch_tokens = kMostStepTokens;
  options.max_sequences = kMostRunning;
  options.max_batch_logits = 2 * kMostRunning;
  options.retrieval.probe_interval = 5;
  options.retrieval.summaries = kMostRunning;
  // A fit of transform codes is a matter of seconds for each type; any will do.
  options.retrieval.index = kv_dtype == "bf16" ? "quest,lsh,pca,int4" : "quest,lsh,int4";
  options.retrieval.fit_text = TransformFitText().substr(0, 600);
  options.retrieval.crossover_cache = ::testing::TempDir() + "/winnow-tiers-random-fit/fit.json";
  return options;
}

// The request alone. A verified policy's answer is that of dense attention.
Reply AnswerAlone(Request request, const std::string& kv_dtype, bool on_device) {
  static std::map<std::pair<std::string, bool>, std::unique_ptr<LoadedModel>> models;
  std::unique_ptr<LoadedModel>& model = models[{kv_dtype, on_device}];
  if (model == nullptr) {
    model = kv_tiers::Load(InMemory(kv_dtype, on_device), ModelPath(),
                           on_device ? MakeDevice() : nullptr);
  }
  if (request.policy.IsVerified()) request.policy = {};
  request.deadline.reset();
  FakeClock clock;
  EngineOptions options;
  options.max_running = 1;
  options.step_tokens = kMostStepTokens;
  options.prefix_cache = false;
  const auto engine = MakeEngine(options, *model->decoder, clock);
  Client client;
  EXPECT_TRUE(engine->Submit(std::move(request), client.output).ok());
  StepUntilIdle(*engine);
  EXPECT_TRUE(client.Read().ended());
  return client.reply;
}

struct Totals {
  std::map<std::string, int> ways;
  std::map<FinishReason, int> finished;
  uint64_t preemptions = 0, losses = 0, lost_pieces = 0, cached_tokens = 0, evicted_frames = 0;
  uint64_t steps_with_paused = 0, steps_with_scarce = 0, cut_lives = 0;
  uint64_t accepted_drafts = 0;
  FetchCounts fetches;
  int32_t most_steps = 0;
};

// How a store with its model is laid out.
struct Layout {
  std::string way, kv_dtype = "bf16";
  bool on_device = false;
  ModelOptions options;
};

Layout RandomLayout(Dice& dice, const std::string& directory) {
  constexpr const char* kWays[] = {"host", "disk", "disk", "host over disk", "spill", "mirrored"};
  constexpr const char* kTypes[] = {"bf16", "bf16", "f32", "int8", "fp8"};
  Layout layout;
  layout.way = dice.Of(kWays);
  layout.on_device = layout.way == "spill" || layout.way == "mirrored";
  if (!layout.on_device) layout.kv_dtype = dice.Of(kTypes);
  const int64_t frame =
      kernels::KvLayout{Config().num_kv_heads, Config().head_dim, kBlock, TypeOf(layout.kv_dtype)}
          .BlockBytes();
  const int32_t layers = Config().num_layers();
  ModelOptions& options = layout.options = InMemory(layout.kv_dtype, layout.on_device);
  const auto least = [&](int32_t sharing_layers) {
    return LeastFrames(sharing_layers, kBlock, kLongest, kMostStepTokens, kMostRunning);
  };
  constexpr int64_t kMiB = 1 << 20;
  TierFlags& tiers = options.tiers;
  if (layout.way == "mirrored") {
    options.kv_bytes = frame * layers * dice.Pick(1, 4) * (kLongest / kBlock);
  } else if (layout.way == "spill") {
    tiers.spill = true;
    tiers.host_bytes = std::max(kMiB, frame * least(layers - FirstSharedLayer()));
    options.kv_bytes = frame * FirstSharedLayer() * dice.Pick(18, 80);
  } else {
    options.kv_bytes = frame * (least(layers) + (dice.OneIn(4) ? dice.Pick(1, 120) : 0));
    if (layout.way != "disk") tiers.host_bytes = kMiB * dice.Pick(1, 4);
    if (layout.way == "host")
      tiers.host_bytes += 2 * options.kv_bytes;  // it holds what frames hold, too
    tiers.prefetch = dice.OneIn(2);
  }
  if (layout.way != "host") {
    const bool small = layout.way != "spill" && dice.OneIn(2);
    tiers.disk_bytes = kMiB * (small ? 4 : 32);
    tiers.store_dir = directory;
    if (dice.OneIn(2)) tiers.io = "threads";
  }
  if (layout.way == "spill") tiers.prefetch = dice.OneIn(2);
  if (layout.way != "mirrored") tiers.row_cache_bytes = dice.OneIn(2) ? 0 : 1 << 16;
  tiers.keep_prefixes = layout.way == "mirrored" || !dice.OneIn(5);
  return layout;
}

class Workload {
 public:
  Workload(uint32_t seed, Totals& totals) : dice_(seed), totals_(totals), luck_(seed) {}

  void Run() {
    layout_ = RandomLayout(dice_, directory_.File("store"));
    ++totals_.ways[layout_.way];
    SCOPED_TRACE(layout_.way + ", " + layout_.kv_dtype);
    for (int text = dice_.Pick(2, 4); text > 0; --text) {
      texts_.push_back(RandomTokens(dice_.OneIn(4) ? dice_.Pick(20, 220) : dice_.Pick(60, 120)));
    }
    Open();
    const int lives = dice_.Pick(2, 4);
    for (int life = 0; life < lives && !::testing::Test::HasFailure(); ++life) {
      SCOPED_TRACE(::testing::Message() << "life " << life);
      if (life > 0 && dice_.OneIn(4)) Reopen();
      Live(life == 0);
    }
  }

 private:
  struct Entry {
    Request request;
    std::unique_ptr<Client> client;
    int32_t arrives_at_step;
    int32_t cancelled_at_step;  // -1: never
    int32_t read_one_in;
    bool submitted = false;
    bool open() const { return submitted && !client->reply.ended(); }
  };

  void Open() {
    ModelOptions options = layout_.options;
    options.decorate_store = [this](std::unique_ptr<storage::BlockStore> store) {
      auto made = std::make_unique<storage::FaultyStore>(std::move(store), luck_++);
      faulty_ = made.get();
      return made;
    };
    model_ = kv_tiers::Load(options, ModelPath(), layout_.on_device ? MakeDevice() : nullptr);
    memory_ = model_->decoder->kv_memory();
  }
  // Another process, of which the store may find its files damaged.
  void Reopen() {
    model_.reset();
    if (layout_.way != "host" && dice_.OneIn(2)) {
      kv_tiers::DamageAllOver(layout_.options.tiers.store_dir);
    }
    Open();
  }

  std::vector<int32_t> RandomTokens(int32_t count) {
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens) token = dice_.Pick(8, kVocabulary - 1);
    return tokens;
  }

  AttentionPolicy RandomPolicy(bool may_verify) {
    constexpr const char* kPolicies[] = {"dense",
                                         "dense",
                                         "window:sink=2,window=20",
                                         "window:sink=2,window=9,dense_layers=1,suffix=40",
                                         "oracle:k=5,window=9",
                                         "quest:k=16,window=9,sink=4,suffix=40",
                                         "quest:k=16,window=9,dense_layers=0",
                                         "lsh:k=5,window=9,sink=2,suffix=30",
                                         "lsh:k=9,p=0.9,window=9,sink=2,dense_layers=0",
                                         "lsh:k=5,window=9,floor=0.5",
                                         "pca:k=5,window=9,sink=2,suffix=70",
                                         "pca:k=5,p=0.8,window=9,sink=2"};
    constexpr const char* kVerified[] = {
        "window:sink=2,window=9,verify=3",         "quest:k=16,window=9,sink=2,verify=auto",
        "lsh:k=5,window=9,sink=2,verify=8",        "pca:k=5,window=9,sink=2,verify=2,lookup=on",
        "window:sink=2,window=9,verify=1,from=30", "dense:lookup=on"};
    const bool verifies = may_verify && dice_.OneIn(3);
    auto policy = ParseAttentionPolicy(verifies ? dice_.Of(kVerified) : dice_.Of(kPolicies));
    EXPECT_TRUE(policy.ok()) << policy.status();
    // With spill the first layers have no indexes, and not every type has transform codes.
    return model_->decoder->CheckPolicy(*policy).ok() ? *policy : AttentionPolicy();
  }

  Request RandomRequest(bool may_verify) {
    const int32_t most = std::min(kLongest, model_->decoder->num_blocks() * kBlock);
    const int32_t max_tokens = dice_.Pick(1, dice_.OneIn(4) ? 30 : 8);
    std::vector<int32_t> prompt;
    if (!dice_.OneIn(8)) {
      prompt = texts_[dice_.Pick(0, static_cast<int32_t>(texts_.size()) - 1)];
      if (dice_.OneIn(4)) prompt.resize(dice_.Pick(1, static_cast<int32_t>(prompt.size())));
    }
    const std::vector<int32_t> question = RandomTokens(dice_.Pick(1, 20));
    prompt.resize(
        std::min(prompt.size(), static_cast<size_t>(most - max_tokens) - question.size()));
    prompt.insert(prompt.end(), question.begin(), question.end());
    Request request = MakeRequest(++last_id_, std::move(prompt), max_tokens);
    request.tenant = std::string(dice_.OneIn(4), 't');
    request.policy = RandomPolicy(may_verify);
    request.top_logprobs = 0;
    if (last_id_ % 6 == 0) request.prompt_logprobs = static_cast<int32_t>(last_id_ / 6 % 3);
    if (!dice_.OneIn(3)) {
      request.sampling.temperature = static_cast<float>(dice_.Pick(5, 15)) / 10;
      request.sampling.seed = static_cast<uint64_t>(dice_.Pick(0, 1 << 30));
    }
    if (dice_.OneIn(8)) request.stopping.stop_token_ids = RandomTokens(200);
    CacheOptions& cache = request.cache;
    cache.use = !dice_.OneIn(12);
    cache.store = !dice_.OneIn(12);
    if (dice_.OneIn(12)) cache.ttl = milliseconds(dice_.Pick(1, 3000));
    if (dice_.OneIn(15)) request.tenant_store_bytes = dice_.Pick(1, 40) << 16;
    request.keeps_prefix = !dice_.OneIn(12);
    return request;
  }

  void ChangeFaults() {
    using Faults = storage::FaultyStore::Faults;
    Faults faults = {};
    switch (dice_.Pick(0, 9)) {
      case 0:
      case 1:  // in order
        break;
      case 2:
      case 3:
        faults = {.polls_max = dice_.Pick(1, 40), .reorder = dice_.OneIn(2)};
        break;
      case 4:
      case 5:
        faults = {.hold = true, .hold_polls = dice_.Pick(5, 1500)};
        break;
      case 6:  // a step that waits for reads waits long
        faults = {.hold = true, .hold_polls = 1500, .stall_polls = 300'000};
        break;
      case 7:
        faults = {.miss_share = dice_.Pick(1, 40) / 2000.0,
                  .lose_share = dice_.Pick(0, 40) / 2000.0,
                  .polls_max = dice_.Pick(0, 5),
                  .reorder = true};
        troubled_ = true;
        break;
      case 8:
        faults.state = dice_.OneIn(2) ? TierState::kDegraded : TierState::kOff;
        troubled_ = true;
        break;
      case 9:  // blocks go that somebody counts on
        for (const auto& bytes : faulty_->put) {
          if (!dice_.OneIn(20)) continue;
          const storage::BlockKey key{bytes};
          if (dice_.OneIn(2)) {
            faulty_->inner().Erase(0, key);
          } else {
            faulty_->unreadable.insert(bytes);
          }
        }
        troubled_ = true;
        break;
    }
    faulty_->faults = faults;
    faults_until_ = step_ + dice_.Pick(1, faults.hold ? 200 : 60);
  }

  void MakeEntries(const EngineOptions& options) {
    entries_.clear();
    const bool may_verify = options.step_tokens > options.max_running;
    for (int32_t i = dice_.Pick(2, 10); i > 0; --i) {
      Entry entry;
      entry.request = RandomRequest(may_verify);
      entry.arrives_at_step = dice_.OneIn(2) ? 0 : dice_.Pick(0, 60);
      entry.cancelled_at_step = dice_.OneIn(8) ? entry.arrives_at_step + dice_.Pick(0, 60) : -1;
      const bool slow = dice_.OneIn(4);
      entry.client = std::make_unique<Client>(slow ? dice_.Pick(1, 3) : 1000);
      entry.read_one_in = slow ? dice_.Pick(2, 40) : 1;
      entries_.push_back(std::move(entry));
    }
  }

  // One engine, from its first step to its end.
  void Live(bool first) {
    EngineOptions options;
    options.max_running = dice_.OneIn(4) ? dice_.Pick(1, 2) : dice_.Pick(3, kMostRunning);
    options.step_tokens =
        dice_.OneIn(3) ? options.max_running : dice_.Pick(options.max_running, kMostStepTokens);
    options.pause_grace = milliseconds(dice_.Pick(0, 60));
    options.slow_reader_timeout = milliseconds(dice_.Pick(200, 2000));
    options.prefix_cache = !dice_.OneIn(6);
    constexpr double kShares[] = {0, 0.125, 1};
    options.eager_share = dice_.Of(kShares);
    // Nothing runs out of time where the clock stands still, so whatever goes on goes on by itself.
    const int32_t most_ms = dice_.OneIn(2) ? 0 : dice_.Pick(1, 20);
    const bool jumps = most_ms > 0 && dice_.OneIn(2);
    const int32_t cut_at = dice_.OneIn(6) ? dice_.Pick(1, 200) : -1;
    // The first life is to keep something that later ones fetch.
    const bool faulty = first ? dice_.OneIn(4) : !dice_.OneIn(4);
    troubled_ = false;
    const uint64_t lost_before = memory_->stats().lost_pieces;
    const uint64_t evicted_before = memory_->stats().evicted_frames;
    {
      engine_ = MakeEngine(options, *model_->decoder, clock_);
      MakeEntries(options);
      size_t ended = 0;
      faults_until_ = 0;
      for (step_ = 0; ended < entries_.size() && step_ != cut_at; ++step_) {
        ASSERT_LT(step_, kStepsMax) << "the workload does not end: " << Describe();
        if (faulty && step_ >= faults_until_) ChangeFaults();
        Arrive(most_ms > 0);
        StepOnce();
        if (::testing::Test::HasFailure()) return;
        if (most_ms > 0) clock_.Advance(milliseconds(dice_.Pick(1, most_ms)));
        if (jumps && dice_.OneIn(20)) clock_.Advance(milliseconds(dice_.OneIn(3) ? 40'000 : 4000));
        ended = 0;
        for (Entry& entry : entries_) {
          if (dice_.OneIn(entry.read_one_in)) entry.client->Read();
          ended += entry.client->reply.ended();
        }
      }
      totals_.most_steps = std::max(totals_.most_steps, step_);
      totals_.cut_lives += ended < entries_.size();
      if (ended == entries_.size()) ExpectNothingLeft();
      Count();
      engine_.reset();
    }
    totals_.lost_pieces += memory_->stats().lost_pieces - lost_before;
    totals_.evicted_frames += memory_->stats().evicted_frames - evicted_before;
    ExpectAllFree();
    CheckAnswers();
  }

  void Arrive(bool with_deadlines) {
    for (Entry& entry : entries_) {
      if (step_ == entry.arrives_at_step) {
        entry.request.arrival = clock_.Now();
        if (with_deadlines && dice_.OneIn(8)) {
          entry.request.deadline = clock_.Now() + milliseconds(dice_.Pick(0, 3000));
        }
        const absl::Status status = engine_->Submit(entry.request, entry.client->output);
        ASSERT_TRUE(status.ok()) << status;
        entry.submitted = true;
      }
      if (step_ == entry.cancelled_at_step) engine_->Cancel(entry.request.id);
    }
  }

  // A step that has nothing to do although somebody wants to go on is a defect.
  void StepOnce() {
    const bool in_order = faulty_->stats().state == TierState::kOk;
    const bool went_on = engine_->Step();
    const EngineStats stats = engine_->stats();
    totals_.steps_with_paused += stats.paused > 0;
    totals_.steps_with_scarce += memory_->residency().scarce();
    // One that is paused, or has lost its blocks, holds none of the memory of fetches.
    EXPECT_LE(stats.fetches.open + stats.paused, stats.running + stats.preempted) << Describe();
    if (went_on || !in_order) return;
    EXPECT_EQ(stats.running + stats.waiting, stats.paused)
        << "somebody has nothing to wait for: " << Describe();
  }

  std::string Describe() const {
    const EngineStats stats = engine_->stats();
    std::string text = absl::StrCat(
        "step ", step_, ", ", stats.running, " running, ", stats.paused, " paused, ", stats.waiting,
        " waiting, ", stats.preempted, " preempted, ", stats.blocks_used, " of ",
        stats.blocks_total, " blocks, ", stats.fetches.open, " fetches, ", faulty_->in_flight(),
        " in flight, state ", static_cast<int>(faulty_->stats().state));
    for (const Entry& entry : entries_) {
      if (!entry.open()) continue;
      absl::StrAppend(&text, "; ", ToString(entry.request.policy), " of ",
                      entry.request.prompt.size(), " tokens, ", entry.client->reply.tokens.size(),
                      " of ", entry.request.stopping.max_tokens, " read");
    }
    return text;
  }

  void ExpectNothingLeft() {
    faulty_->faults = {};
    faulty_->unreadable.clear();
    // By the clock: a disk may take as long for a write as the store waits for it, and nobody knows how many polls that is.
    const std::chrono::nanoseconds longest_write(storage::DiskStoreOptions().write_deadline_ns);
    const auto limit = std::chrono::steady_clock::now() + 2 * longest_write;
    while (engine_->Step() || !faulty_->idle()) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << Describe();
      memory_->store().Poll(milliseconds(1));
    }
    EXPECT_FALSE(engine_->Step());  // it takes in what came last
    const EngineStats stats = engine_->stats();
    EXPECT_EQ(stats.blocks_used, 0);
    EXPECT_EQ(stats.running, 0);
    EXPECT_EQ(stats.paused, 0);
    EXPECT_EQ(stats.waiting, 0);
    EXPECT_EQ(stats.waiting_tokens, 0);
    EXPECT_EQ(stats.preempted, 0);
    EXPECT_EQ(stats.fetches.open, 0);
    EXPECT_TRUE(memory_->fetcher().idle());
    const BlockTable& blocks = memory_->blocks();
    for (int32_t block = 0; block < blocks.num_blocks(); ++block) {
      EXPECT_EQ(blocks[block].holders, 0);
      EXPECT_FALSE(blocks[block].held);
    }
    ExpectFramesCounted();
  }

  // Each frame is free or of a layer block.
  void ExpectFramesCounted() {
    if (!memory_->tiered()) return;
    const BlockTable& blocks = memory_->blocks();
    const int32_t first = layout_.way == "spill" ? FirstSharedLayer() : 0;
    int64_t used = 0;
    for (int32_t layer = first; layer < blocks.num_layers(); ++layer) {
      for (int32_t block = 0; block < blocks.num_blocks(); ++block) {
        used += blocks.at(layer, block).frame >= 0;
      }
    }
    const int64_t frames =
        memory_->places().num_frames() - int64_t{first} * memory_->blocks().num_blocks();
    faulty_->faults.state = TierState::kOff;  // nothing but free frames is room
    EXPECT_EQ(memory_->residency().RoomForBlocks(),
              (frames - used) / (blocks.num_layers() - first));
    faulty_->faults.state = {};
  }

  // Without an engine nothing is in memory.
  void ExpectAllFree() {
    faulty_->faults = {};
    const BlockTable& blocks = memory_->blocks();
    for (int32_t block = 0; block < blocks.num_blocks(); ++block) {
      EXPECT_FALSE(blocks[block].sealed);
      for (int32_t layer = 0; layer < blocks.num_layers(); ++layer) {
        EXPECT_LT(blocks.at(layer, block).frame, 0);
        EXPECT_FALSE(blocks.at(layer, block).away);
      }
    }
    ExpectFramesCounted();
  }

  void Count() {
    const EngineStats stats = engine_->stats();
    totals_.preemptions += stats.preemptions;
    totals_.losses += stats.kv_losses;
    totals_.cached_tokens += stats.cached_tokens;
    totals_.accepted_drafts += stats.drafts.accepted;
    totals_.fetches.begun += stats.fetches.begun;
    totals_.fetches.given_up += stats.fetches.given_up;
    totals_.fetches.room_waits += stats.fetches.room_waits;
    totals_.fetches.rests += stats.fetches.rests;
  }

  void CheckAnswers() {
    for (const Entry& entry : entries_) {
      if (!entry.submitted) continue;
      SCOPED_TRACE(::testing::Message()
                   << "request " << entry.request.id << ", " << ToString(entry.request.policy)
                   << ", prompt " << entry.request.prompt.size());
      const Reply& reply = entry.client->Read();
      ASSERT_TRUE(reply.ended());
      ++totals_.finished[reply.last.finish];
      EXPECT_EQ(static_cast<int32_t>(reply.tokens.size()), reply.last.usage.generated_tokens);
      if (reply.last.finish == FinishReason::kError) {
        EXPECT_TRUE(troubled_) << reply.last.error;
        EXPECT_EQ(reply.last.error_code, absl::StatusCode::kUnavailable) << reply.last.error;
      }
      const Reply alone = AnswerAlone(entry.request, layout_.kv_dtype, layout_.on_device);
      const bool by_itself = reply.last.finish == FinishReason::kMaxTokens ||
                             reply.last.finish == FinishReason::kStopToken;
      if (by_itself) {
        EXPECT_EQ(reply.tokens, alone.tokens);
        EXPECT_EQ(reply.last.finish, alone.last.finish);
        EXPECT_EQ(reply.scores.size(), alone.scores.size());
      }
      ASSERT_LE(reply.scores.size(), alone.scores.size());
      for (size_t i = 0; i < reply.scores.size() && !::testing::Test::HasFailure(); ++i) {
        EXPECT_EQ(reply.scores[i].token.logprob, alone.scores[i].token.logprob) << i;
        EXPECT_EQ(reply.scores[i].rank, alone.scores[i].rank) << i;
      }
      ASSERT_LE(reply.tokens.size(), alone.tokens.size());
      for (size_t i = 0; i < reply.tokens.size(); ++i) {
        EXPECT_EQ(reply.tokens[i], alone.tokens[i]) << i;
        EXPECT_EQ(reply.details[i].logprob, alone.details[i].logprob) << i;
        if (::testing::Test::HasFailure()) break;
      }
    }
  }

  static constexpr int32_t kStepsMax = 20'000;
  Dice dice_;
  Totals& totals_;
  uint32_t luck_;
  TempDir directory_;
  Layout layout_;
  std::vector<std::vector<int32_t>> texts_;
  RequestId last_id_ = 0;
  FakeClock clock_;
  storage::FaultyStore* faulty_ = nullptr;
  std::unique_ptr<LoadedModel> model_;
  KvMemory* memory_ = nullptr;
  std::unique_ptr<Engine> engine_;
  std::vector<Entry> entries_;
  int32_t step_ = 0, faults_until_ = 0;
  bool troubled_ = false;  // in this life the store has lost something, or taken nothing
};

std::string Describe(const Totals& totals) {
  std::string text;
  for (const auto& [way, times] : totals.ways) absl::StrAppend(&text, way, " ", times, ", ");
  for (const auto& [reason, times] : totals.finished) {
    absl::StrAppend(&text, "end ", static_cast<int>(reason), " ", times, ", ");
  }
  absl::StrAppend(&text, "preemptions ", totals.preemptions, ", losses ", totals.losses,
                  ", lost pieces ", totals.lost_pieces, ", cached tokens ", totals.cached_tokens,
                  ", evicted frames ", totals.evicted_frames, ", steps with paused ",
                  totals.steps_with_paused, ", scarce ", totals.steps_with_scarce, ", cut lives ",
                  totals.cut_lives);
  absl::StrAppend(&text, ", accepted drafts ", totals.accepted_drafts, ", fetches ",
                  totals.fetches.begun, ", given up ", totals.fetches.given_up, ", room waits ",
                  totals.fetches.room_waits, ", rests ", totals.fetches.rests, ", most steps ",
                  totals.most_steps);
  return text;
}

uint32_t FromEnvironment(const char* name, uint32_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
}

TEST(TiersRandomTest, EveryRequestHasTheTokensThatItHasAloneInMemory) {
  constexpr uint32_t kEveryDay = 12, kMany = 60;
  const uint32_t first = FromEnvironment("WINNOW_TEST_SEED", 0);
  const uint32_t count = FromEnvironment("WINNOW_TEST_WORKLOADS", kEveryDay);
  Totals totals;
  for (uint32_t seed = first; seed - first < count; ++seed) {
    SCOPED_TRACE(::testing::Message() << "WINNOW_TEST_SEED=" << seed << " WINNOW_TEST_WORKLOADS=1");
    Workload(seed, totals).Run();
    if (HasFailure()) return;
  }
  if (std::getenv("WINNOW_TEST_WORKLOADS") != nullptr) printf("%s\n", Describe(totals).c_str());
  if (count < kEveryDay) return;
  // The workloads are only worth something if they meet everything.
  SCOPED_TRACE(Describe(totals));
  EXPECT_EQ(totals.ways.size(), 5u);
  EXPECT_GT(totals.fetches.begun, 10u);
  EXPECT_GT(totals.preemptions, 2u);
  EXPECT_GT(totals.losses, 0u);
  EXPECT_GT(totals.evicted_frames, 200u);
  EXPECT_GT(totals.steps_with_paused, 100u);
  EXPECT_GT(totals.steps_with_scarce, 10u);
  EXPECT_GT(totals.accepted_drafts, 10u);
  for (const FinishReason reason : {FinishReason::kStopToken, FinishReason::kMaxTokens,
                                    FinishReason::kCancelled, FinishReason::kDeadline}) {
    EXPECT_GT(totals.finished[reason], 0) << static_cast<int>(reason);
  }
  // How many of these there are depends on the disk, too.
  if (count < kMany) return;
  EXPECT_GT(totals.fetches.given_up, 0u);
  EXPECT_GT(totals.fetches.room_waits, 3u);
  EXPECT_GT(totals.fetches.rests, 0u);
  EXPECT_GT(totals.lost_pieces, 10u);
  EXPECT_GT(totals.cut_lives, 1u);
}

}  // namespace
}  // namespace winnow::engine
