#include "server/vllm/vllm_kv_events.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common.pb.h"
#include "engine/base/mutex.h"
#include "engine/kv/block_name.h"
#include "server/kv_event_runs.h"
#include "server/status.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

namespace pb = smg::grpc::common;

constexpr size_t kMaxStreams = 64;
constexpr size_t kSnapshotBlocks = 1000;  // of one chunk
constexpr engine::Duration kLook = std::chrono::milliseconds(250);
constexpr engine::Duration kHeartbeat = std::chrono::seconds(1);

pb::KvCacheTier TierOf(engine::KvTier tier) {
  switch (tier) {
    case engine::KvTier::kFast:
      return pb::KV_CACHE_TIER_DEVICE;
    case engine::KvTier::kHost:
      return pb::KV_CACHE_TIER_HOST;
    case engine::KvTier::kDisk:
      return pb::KV_CACHE_TIER_DISK;
  }
  return pb::KV_CACHE_TIER_UNSPECIFIED;
}

int64_t HashOf(const engine::Digest& digest) { return static_cast<int64_t>(ShortHash(digest)); }

void AddRun(const KvEventRun& run, uint64_t event_id, pb::KvEventBatch& out) {
  pb::KvCacheEvent& event = *out.add_events();
  event.set_event_id(event_id);
  if (run.kind == engine::KvEvent::Kind::kCleared) {
    event.mutable_cleared();
    return;
  }
  if (run.kind == engine::KvEvent::Kind::kRemoved) {
    pb::KvBlocksRemoved& removed = *event.mutable_removed();
    for (const engine::KvBlockContent* block : run.blocks) {
      removed.add_block_hashes(HashOf(block->name.chain));
    }
    removed.set_tier(TierOf(run.tier));
    removed.set_cache_level(static_cast<int32_t>(run.tier));
    removed.set_medium(MediumOf(run.tier));
    removed.set_group_idx(0);
    removed.set_locality(pb::KV_CACHE_LOCALITY_LOCAL);
    return;
  }
  pb::KvBlocksStored& stored = *event.mutable_stored();
  if (const auto& parent = run.blocks.front()->parent; parent.has_value()) {
    stored.set_parent_block_hash(HashOf(*parent));
  }
  for (const engine::KvBlockContent* block : run.blocks) {
    pb::KvBlock& to = *stored.add_blocks();
    to.set_block_hash(HashOf(block->name.chain));
    to.mutable_token_ids()->Add(block->tokens.begin(), block->tokens.end());
    to.set_block_size(static_cast<int32_t>(block->tokens.size()));
    to.set_cache_level(static_cast<int32_t>(run.tier));
  }
  stored.set_tier(TierOf(run.tier));
  stored.set_medium(MediumOf(run.tier));
  stored.set_group_idx(0);
  stored.set_kv_cache_spec_kind("full_attention");
  stored.set_locality(pb::KV_CACHE_LOCALITY_LOCAL);
}

int64_t Milliseconds(engine::Duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
}

void AddLoad(const Load& load, uint64_t sample, bool alone, pb::EngineLoad& out) {
  out.set_running_requests(static_cast<uint32_t>(load.running));
  out.set_waiting_requests(static_cast<uint32_t>(load.waiting));
  out.set_waiting_uncached_tokens(static_cast<uint32_t>(load.waiting_tokens));
  out.set_token_usage(load.usage);
  out.set_active_token_usage(load.usage);
  out.set_gen_throughput(load.tokens_per_second);
  out.set_max_running_requests(static_cast<uint32_t>(load.max_running));
  out.set_sample(sample);
  out.set_load_only(alone);
  if (load.silence.has_value()) {
    out.set_engine_silence_ms(static_cast<uint32_t>(Milliseconds(*load.silence)));
    out.set_prefill_pending_tokens(static_cast<uint32_t>(load.waiting_tokens));
  }
  out.set_engine_reports_steps(true);
  if (!alone) return;
  out.set_cache_hit_rate(load.hit_rate);
  out.set_num_used_tokens(static_cast<int32_t>(load.used_tokens));
  out.set_max_total_num_tokens(static_cast<int32_t>(load.total_tokens));
  out.mutable_queues()->set_waiting(load.waiting);
}

class EventStream;

}  // namespace

// The streams, and the thread that wakes them.
class KvEventStreams::Impl {
 public:
  Impl(const engine::KvEventLog& log, LoadMeter& load, const engine::Clock& clock,
       engine::Duration slow_reader_timeout)
      : log(log), load(load), clock(clock), timeout_(slow_reader_timeout), thread_([this] {
          Run();
        }) {}
  ~Impl() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    log.Wake();
    thread_.join();
  }

  // False: too many are open.
  bool Add(const std::shared_ptr<EventStream>& stream) {
    absl::MutexLock lock(&mutex_);
    if (streams_.size() >= kMaxStreams) return false;
    streams_.insert(stream);
    return true;
  }
  void Remove(const std::shared_ptr<EventStream>& stream) {
    absl::MutexLock lock(&mutex_);
    streams_.erase(stream);
  }

  const engine::KvEventLog& log;
  LoadMeter& load;
  const engine::Clock& clock;

 private:
  void Run();

  const engine::Duration timeout_;
  absl::Mutex mutex_;
  std::set<std::shared_ptr<EventStream>> streams_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

namespace {

class Refusal final : public ::grpc::ServerWriteReactor<pb::KvEventBatch> {
 public:
  explicit Refusal(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

// One subscriber.
class EventStream final : public ::grpc::ServerWriteReactor<pb::KvEventBatch>,
                          public std::enable_shared_from_this<EventStream> {
 public:
  EventStream(KvEventStreams::Impl& owner, ::grpc::CallbackServerContext& context,
              const engine::Digest& salt)
      : owner_(owner), context_(context), salt_(salt) {}

  // False: `from` is not kept. 0: from a snapshot on.
  bool Begin(uint64_t from) {
    absl::MutexLock lock(&mutex_);
    if (from == 0) {
      AddSnapshot();
      return true;
    }
    next_ = from;
    return owner_.log.Read(from, 0).has_value();
  }

  // Writes what there is, if the last write is done.
  void Pump() {
    std::optional<::grpc::Status> end;
    {
      absl::MutexLock lock(&mutex_);
      if (writing_ || finished_) return;
      if (cancelled_) {
        end = ::grpc::Status::CANCELLED;
      } else if (outgoing_.empty() && !Fill()) {
        end = ToGrpcStatus(ErrorWithReason(absl::StatusCode::kDataLoss, "TOO_SLOW",
                                           "batches that were not sent are not kept any more"));
      }
      if (end.has_value()) {
        finished_ = true;
      } else if (outgoing_.empty()) {
        return;
      } else {
        message_ = std::move(outgoing_.front());
        outgoing_.pop_front();
        writing_ = true;
        write_began_ = owner_.clock.Now();
      }
    }
    // Without the lock, because gRPC may answer before these return.
    if (end.has_value()) {
      Finish(*end);
    } else {
      StartWrite(&message_);
    }
  }

  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      cancelled_ |= !ok;
    }
    Pump();
  }
  void OnCancel() override {
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
    }
    Pump();
  }
  void OnDone() override {
    const std::shared_ptr<EventStream> self = shared_from_this();
    {
      absl::MutexLock lock(&mutex_);
      done_ = true;
    }
    owner_.Remove(self);
  }

  void CancelIfStuck(engine::TimePoint now, engine::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    // The context lives until OnDone has returned, which waits for this lock.
    if (writing_ && !done_ && now - write_began_ >= timeout) context_.TryCancel();
  }

 private:
  void AddSnapshot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    engine::KvEventLog::Snapshot snapshot = owner_.log.Take();
    std::erase_if(snapshot.stored, [this](const engine::KvEvent& event) {
      return event.block->name.tenant != salt_;
    });
    const size_t blocks = snapshot.stored.size();
    // Chunks take the numbers up to the state's, so there are no more of them than batches.
    const size_t chunks =
        std::clamp<size_t>((blocks + kSnapshotBlocks - 1) / kSnapshotBlocks, 1, snapshot.next);
    for (size_t i = 0; i < chunks; ++i) {
      pb::KvEventBatch& out = outgoing_.emplace_back();
      out.set_sequence_number(snapshot.next - chunks + i);
      out.set_timestamp(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
      out.set_dp_rank(0);
      out.mutable_snapshot()->set_index(static_cast<uint32_t>(i));
      out.mutable_snapshot()->set_count(static_cast<uint32_t>(chunks));
      out.mutable_snapshot()->set_blocks(blocks);
      if (i == 0) AddRun({}, 0, out);
      const size_t begin = blocks * i / chunks;
      const std::span<const engine::KvEvent> part =
          std::span(snapshot.stored).subspan(begin, blocks * (i + 1) / chunks - begin);
      for (const KvEventRun& run : RunsOf(part)) AddRun(run, 0, out);
    }
    AddLoadTo(outgoing_.back(), /*alone=*/false);
    next_ = snapshot.next;
  }

  // False: the next batch is not kept any more.
  bool Fill() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto batches = owner_.log.Read(next_, 1);
    if (!batches.has_value()) return false;
    if (!batches->empty()) {
      const engine::KvEventBatch& batch = *batches->front();
      pb::KvEventBatch& out = outgoing_.emplace_back();
      out.set_sequence_number(batch.sequence);
      out.set_timestamp(batch.unix_seconds);
      out.set_dp_rank(0);
      uint64_t event_id = batch.sequence << 20;
      for (const KvEventRun& run : RunsOf(batch.events, &salt_)) AddRun(run, ++event_id, out);
      AddLoadTo(out, /*alone=*/false);
      next_ = batch.sequence + 1;
      return true;
    }
    const Load load = owner_.load.Now();
    const bool changed = std::pair(load.running, load.waiting) != told_load_;
    if (!changed && owner_.clock.Now() - load_told_ < kHeartbeat) return true;
    pb::KvEventBatch& out = outgoing_.emplace_back();
    out.set_sequence_number(next_ - 1);  // the one before; next_ is never 0
    out.set_timestamp(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
    out.set_dp_rank(0);
    AddLoadTo(out, /*alone=*/true);
    return true;
  }

  void AddLoadTo(pb::KvEventBatch& out, bool alone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Load load = owner_.load.Now();
    AddLoad(load, ++samples_, alone, *out.mutable_load());
    told_load_ = {load.running, load.waiting};
    load_told_ = owner_.clock.Now();
  }

  KvEventStreams::Impl& owner_;
  ::grpc::CallbackServerContext& context_;
  const engine::Digest salt_;
  absl::Mutex mutex_;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;  // batch
  uint64_t samples_ ABSL_GUARDED_BY(mutex_) = 0;
  std::pair<int32_t, int32_t> told_load_ ABSL_GUARDED_BY(mutex_) = {-1, -1};  // running, waiting
  engine::TimePoint load_told_ ABSL_GUARDED_BY(mutex_);
  std::deque<pb::KvEventBatch> outgoing_ ABSL_GUARDED_BY(mutex_);
  engine::TimePoint write_began_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  pb::KvEventBatch message_;  // of the write in flight
};

}  // namespace

void KvEventStreams::Impl::Run() {
  while (true) {
    std::vector<std::shared_ptr<EventStream>> streams;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      streams.assign(streams_.begin(), streams_.end());
    }
    // Before the streams look: what comes from here on ends the wait.
    const uint64_t next = log.range().next;
    for (const auto& stream : streams) {
      stream->Pump();
      stream->CancelIfStuck(clock.Now(), timeout_);
    }
    streams.clear();
    log.WaitFor(next, kLook);
  }
}

KvEventStreams::KvEventStreams(const engine::KvEventLog& log, LoadMeter& load,
                               const engine::Clock& clock, engine::Duration slow_reader_timeout)
    : impl_(std::make_unique<Impl>(log, load, clock, slow_reader_timeout)) {}
KvEventStreams::~KvEventStreams() = default;

::grpc::ServerWriteReactor<pb::KvEventBatch>* RefuseKvEvents(const absl::Status& status) {
  return new Refusal(status);
}

::grpc::ServerWriteReactor<pb::KvEventBatch>* KvEventStreams::Start(
    ::grpc::CallbackServerContext& context, const engine::Digest& salt,
    const pb::SubscribeKvEventsRequest& request) {
  auto stream = std::make_shared<EventStream>(*impl_, context, salt);
  if (!stream->Begin(request.start_sequence_number())) {
    return RefuseKvEvents(ErrorWithReason(absl::StatusCode::kOutOfRange, "NOT_KEPT",
                                          "batches from start_sequence_number on are not kept: "
                                          "subscribe from 0, which begins with a snapshot"));
  }
  if (!impl_->Add(stream)) {
    return RefuseKvEvents(
        ErrorWithReason(absl::StatusCode::kResourceExhausted, "TOO_MANY_SUBSCRIBERS",
                        Concat("there are ", kMaxStreams, " subscribers already")));
  }
  stream->Pump();
  return stream.get();
}

}  // namespace winnow::server
