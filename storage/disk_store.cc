// Opening and closing, callers' operations, reads, and the loop. Writes are in disk_writes.cc.
#include "storage/disk_store.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "storage/check.h"
#include "storage/left_threads.h"

namespace winnow::storage {

using std::chrono::nanoseconds;

namespace {

// Steps of the order of eviction that are taken in one go: some 0.1 ms.
constexpr size_t kOrderSteps = 128;

constexpr uint64_t kMoveBytesMin = uint64_t{2} << 20;

}  // namespace

// ---- opening and closing ----

struct DiskStore::Opening : DiskEnvironment::Opening {
  CondVar changed;  // `done`
  bool done ABSL_GUARDED_BY(mutex) = false;
  absl::Status status ABSL_GUARDED_BY(mutex);
  std::unique_ptr<DiskStore> store ABSL_GUARDED_BY(mutex);
};

// Never freed, but in sight of a debugger, and of leak checkers.
struct DiskStore::Remains {
  std::unique_ptr<Ring> ring;
  std::unique_ptr<IndexWriter> writer;
  std::unique_ptr<FileSystem> files;
  std::map<uint64_t, std::unique_ptr<Segment>> segments;
  std::map<uint64_t, PageMemory> stuck_reads;
  PageMemory buffers;
  File segment_directory;
  StoreDirectory directory;  // the kernel may still write: no other process may own it
  Remains* next = nullptr;
  static std::atomic<Remains*> all;
};
std::atomic<DiskStore::Remains*> DiskStore::Remains::all = nullptr;

DiskStore::DiskStore(DiskStoreOptions options, const Clock* clock, std::shared_ptr<Opening> opening)
    : env_(std::move(options), clock, std::move(opening)),
      order_(env_.options().segment_bytes),
      log_(env_, order_, *this),
      table_(log_, order_, env_.options().capacity_bytes / 2),
      committer_(env_, log_, table_, *this),
      reclaimer_(env_, log_, table_, committer_, order_, *this),
      reader_(env_, log_, [this](const IoResult& result) { OnIo(result); }) {}

absl::StatusOr<std::unique_ptr<DiskStore>> DiskStore::Open(DiskStoreOptions options,
                                                           const Clock* clock) {
  WINNOW_RETURN_IF_ERROR(options.Validate());
  const std::string directory = options.directory;
  const nanoseconds stall(options.open_stall_ns);
  const auto steady_now = options.seams.steady_now;
  auto opening = std::make_shared<Opening>();
  std::unique_ptr<DiskStore> fresh(new DiskStore(std::move(options), clock, opening));
  std::thread thread([opening, store = std::move(fresh)]() mutable {
    absl::Status status = store->Start();
    if (!status.ok()) store.reset();
    {
      const MutexLock lock(opening->mutex);
      if (!opening->abandoned) opening->store = std::move(store);
      opening->status = std::move(status);
      opening->done = true;
    }
    opening->changed.NotifyOne();
    store.reset();  // abandoned
  });
  uint64_t steps = 0;
  auto last_step = steady_now();
  {
    const MutexLock lock(opening->mutex);
    while (!opening->done) {
      const auto until = std::chrono::steady_clock::now() +
                         std::min<nanoseconds>(stall / 4, std::chrono::milliseconds(100));
      while (!opening->done && opening->changed.WaitUntil(opening->mutex, until)) {
      }
      const auto now = steady_now();
      const uint64_t now_steps = opening->steps.load();
      if (now_steps != steps) last_step = now;
      steps = now_steps;
      if (opening->done || now - last_step < stall) continue;
      opening->abandoned = true;
      LeaveThread(std::move(thread));
      return absl::DeadlineExceededError(
          absl::StrCat("store ", directory, ": the disk answered nothing for ",
                       absl::FormatDuration(absl::FromChrono(stall)), " while it was opened"));
    }
  }
  thread.join();
  std::unique_ptr<DiskStore> store;
  {
    const MutexLock lock(opening->mutex);
    WINNOW_RETURN_IF_ERROR(opening->status);
    store = std::move(opening->store);
  }
  // Here and not there: a ring that changes threads is made anew, and the kernel takes its time to
  // give back the memory that the old one had locked.
  store->env_.ring().engine().RegisterBuffer(store->ops_.memory());
  store->env_.Log(store->Describe());
  return store;
}

absl::Status DiskStore::Start() {
  absl::StatusOr<StoreDirectory> directory = OwnStoreDirectory(env_);
  WINNOW_RETURN_IF_ERROR(directory.status());
  directory_.lock = std::move(directory->lock);
  log_.SetDirectory(std::move(directory->directory));
  WINNOW_RETURN_IF_ERROR(StartRing());
  Recovery recovery(env_, log_, table_, reader_, payload_bytes_max_);
  absl::StatusOr<Recovery::Opened> opened = recovery.Run();
  WINNOW_RETURN_IF_ERROR(opened.status());
  committer_.Start(std::move(opened->writer));
  committer_.Forget(std::move(opened->dropped));
  recovery.Trim();
  for (const auto& [id, segment] : log_.segments()) order_.Seal(id, segment->file_bytes);
  order_.Advance(env_.StoreSeconds(), SIZE_MAX);
  recovery_ = recovery.report();
  recovery_.blocks = table_.size();
  Shrink();
  // A ring changes threads only while nothing is in flight.
  std::vector<Completion> none;
  while (!idle()) Poll(std::chrono::milliseconds(10), &none);
  return absl::OkStatus();
}

// Chooses the engine of I/O, and allocates the buffers.
absl::Status DiskStore::StartRing() {
  const DiskStoreOptions& options = env_.options();
  absl::StatusOr<IoEngineChoice> choice = ChooseIoEngine(options.io, options.directory);
  WINNOW_RETURN_IF_ERROR(choice.status());
  io_fallback_ = choice->fallback_reason;
  if (!io_fallback_.empty()) env_.Log("store: " + io_fallback_);
  std::unique_ptr<IoEngine> engine = std::move(choice->engine);
  if (options.seams.decorate_engine) engine = options.seams.decorate_engine(std::move(engine));
  env_.SetRing(std::move(engine), choice->direct);
  // The largest payload whose block fits a segment between header and footer, and half of staging.
  const uint64_t block_bytes_max =
      std::min(options.segment_bytes - 2 * kPageBytes, options.staging_bytes / 2);
  payload_bytes_max_ = std::min<uint64_t>(kPayloadBytesMax, block_bytes_max);
  while (BlockBytesFor(payload_bytes_max_) > block_bytes_max) payload_bytes_max_ -= kPageBytes;
  ops_.AllocateBuffers(options.staging_bytes,
                       std::max<uint64_t>(kMoveBytesMin, 2 * BlockBytesFor(payload_bytes_max_)));
  return absl::OkStatus();
}

// Puts a capacity into force that was lowered. The blocks that stay are moved before files go, so for once there may be a
// segment more; a disk that cannot write stays as it is.
void DiskStore::Shrink() {
  std::vector<Completion> none;
  log_.set_shrinking(true);
  while (log_.used_bytes() > env_.options().capacity_bytes &&
         env_.health.state() == TierState::kOk && reclaimer_.Start()) {
    Poll(std::chrono::milliseconds(10), &none);
  }
  log_.set_shrinking(false);
}

// Until nothing is in flight, for at most `max` of real time, because a disk that hangs must not keep the process, whatever
// the clock given to us says.
void DiskStore::Settle(nanoseconds max) {
  const auto end = std::chrono::steady_clock::now() + max;
  std::vector<Completion> ignored;
  while ((in_flight() > 0 || !idle()) && std::chrono::steady_clock::now() < end) {
    ignored.clear();
    Poll(std::chrono::milliseconds(10), &ignored);
  }
}

DiskStore::~DiskStore() {
  const nanoseconds limit(env_.options().close_limit_ns);
  if (committer_.started()) {
    const auto end = std::chrono::steady_clock::now() + limit;
    Settle(limit);
    if (log_.has_open()) {
      log_.SealOpen();
      Settle(end - std::chrono::steady_clock::now());
    }
    committer_.SaveMeta();
  }
  // The kernel must give back every buffer before memory and files go.
  const bool drained = !env_.has_ring() || env_.ring().Drain(limit);
  const bool closed = committer_.Close(limit);
  if (drained && closed) return;
  env_.Log(absl::StrCat("store ", env_.options().directory, ": closed while the disk hangs; ",
                        drained ? 0 : env_.ring().in_flight(),
                        " requests and their buffers are left to it"));
  Remains* const remains =
      std::make_unique<Remains>().release();  // never freed: the disk may yet write into it
  remains->ring = env_.TakeRing();
  remains->writer = committer_.TakeWriter();
  remains->files = env_.TakeFiles();
  remains->segments = log_.TakeSegments();
  remains->stuck_reads = reader_.TakeStuck();
  remains->buffers = ops_.TakeMemory();
  remains->segment_directory = log_.TakeDirectory();
  remains->directory = std::move(directory_);
  remains->next = Remains::all.load();
  while (!Remains::all.compare_exchange_weak(remains->next, remains)) {
  }
}

std::string DiskStore::Describe() const {
  return absl::StrCat(
      "store ", env_.options().directory, ": ", table_.size(), " blocks, ", log_.used_bytes() >> 20,
      " of ", env_.options().capacity_bytes >> 20, " MiB, ", env_.ring().engine().Describe(),
      env_.direct() ? ", O_DIRECT" : ", buffered", io_fallback_.empty() ? "" : "; ", io_fallback_);
}

// ---- operations and their answers ----

void DiskStore::FreeOp(uint32_t index) {
  if (Segment* segment = ops_[index].segment) log_.Release(segment);
  ops_.Free(index);
}

void DiskStore::Complete(uint64_t tag, Operation operation, Reason reason) {
  const Outcome outcome = reason == Reason::kNone ? Outcome::kOk : Outcome::kMiss;
  const bool read = operation == Operation::kGet || operation == Operation::kGetPages;
  done_.push_back({tag, operation, outcome, reason, read});
  StoreStats& stats = env_.stats;
  if (operation == Operation::kPut) {
    ++stats.puts;
    if (outcome == Outcome::kOk) ++stats.puts_stored;
  } else if (read) {
    ++stats.gets;
    if (outcome == Outcome::kOk) {
      ++stats.hits;
    } else {
      ++stats.misses[static_cast<size_t>(reason)];
    }
  }
}

// The caller's answer; the operation itself may still have a buffer in the kernel.
void DiskStore::Answer(Op* op, Reason reason) {
  if (op->answered) return;
  op->answered = true;
  if (op->is_move()) return;
  if (op->answers() != Operation::kPut) CountLatency(*op);
  --in_flight_;
  Complete(op->tag, op->answers(), reason);
  for (uint64_t tag : op->joined) {
    --in_flight_;
    Complete(tag, op->answers(), reason);
  }
}

void DiskStore::CountLatency(const Op& op) {
  const int64_t latency_ns = env_.NowNs() - op.start_ns;
  const auto bound =
      std::lower_bound(kReadLatencyBoundsSeconds.begin(), kReadLatencyBoundsSeconds.end(),
                       static_cast<double>(latency_ns) * 1e-9);
  ++env_.stats.read_latency[static_cast<size_t>(bound - kReadLatencyBoundsSeconds.begin())];
  env_.stats.read_latency_ns += static_cast<uint64_t>(latency_ns);
}

bool DiskStore::Expired(const Entry& entry) const {
  return entry.expires_at_s != 0 && env_.StoreSeconds() >= entry.expires_at_s;
}

uint64_t DiskStore::ExpirySeconds(uint32_t ttl_s) const {
  return ttl_s == 0 ? 0 : env_.StoreSeconds() + ttl_s;
}

void DiskStore::Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
                    const PutOptions& options) {
  WINNOW_CHECK(!payload.empty());
  if (env_.health.Update(env_.NowNs()) != TierState::kOk) {
    return Complete(tag, Operation::kPut, Reason::kOff);
  }
  if (RefreshStored(id, payload.size(), options)) {
    return Complete(tag, Operation::kPut, Reason::kNone);
  }
  if (payload.size() > payload_bytes_max_) return Complete(tag, Operation::kPut, Reason::kFull);
  if (putting_.contains(id.key)) {
    if (!JoinPut(tag, id, payload.size(), options)) {
      Complete(tag, Operation::kPut, Reason::kBusy);
    }
    return;
  }
  if (in_flight_ >= env_.options().operations_max) {
    return Complete(tag, Operation::kPut, Reason::kBusy);
  }
  const uint32_t index = ops_.New(Op::Kind::kPut, tag, id);
  Op& op = ops_[index];
  if (!ops_.Stage(&op, BlockBytesFor(payload.size()) / kPageBytes)) {
    FreeOp(index);
    return Complete(tag, Operation::kPut, Reason::kBusy);
  }
  op.payload_bytes = static_cast<uint32_t>(payload.size());
  op.options = options;
  op.options.priority = std::min(options.priority, kPriorityMax);
  op.expires_at_s = ExpirySeconds(options.ttl_s);
  op.deadline_ns = env_.WriteDeadline();
  std::memcpy(ops_.Staged(op).data() + HeaderPagesFor(payload.size()) * kPageBytes, payload.data(),
              payload.size());
  ++in_flight_;
  putting_[id.key] = index;
  waiting_puts_.push_back(index);
}

// A Put of a block that is there keeps its bytes, and takes the options. False: it is to be written.
bool DiskStore::RefreshStored(const BlockId& id, size_t payload_bytes, const PutOptions& options) {
  Reason reason;
  Entry* entry = FindSound(id, &reason);
  if (entry == nullptr || entry->record->payload_bytes != payload_bytes ||
      (!options.transient && entry->record->transient)) {
    return false;
  }
  entry->priority = std::max(entry->priority, std::min(options.priority, kPriorityMax));
  entry->expires_at_s = LaterExpiry(entry->expires_at_s, ExpirySeconds(options.ttl_s));
  entry->in_use |= options.in_use;
  table_.Reorder(*entry);
  if (!options.pinned || entry->pinned || !SetPinned(id.key, true)) committer_.Save(id.key, entry);
  return true;
}

// A Put of a block that is being put shares its fate. False: it cannot.
bool DiskStore::JoinPut(uint64_t tag, const BlockId& id, size_t payload_bytes,
                        const PutOptions& options) {
  Op& op = ops_[putting_.at(id.key)];
  const bool becomes_durable = op.options.transient && !options.transient;
  if (op.cancelled || op.answered || !(op.id == id) || op.payload_bytes != payload_bytes ||
      (becomes_durable && op.placed)) {  // its header says otherwise
    return false;
  }
  op.joined.push_back(tag);
  op.options.in_use |= options.in_use;
  op.options.transient &= options.transient;
  RaisePut(op, options.priority, options.ttl_s);
  ++in_flight_;
  return true;
}

Entry* DiskStore::FindSound(const BlockId& id, Reason* reason) {
  Entry* entry = table_.Find(id.key);
  if (entry == nullptr) {
    *reason = Reason::kAbsent;
    return nullptr;
  }
  if (Expired(*entry)) {
    ++env_.stats.expired_blocks;
    committer_.Discard(id.key);
    *reason = Reason::kAbsent;
    return nullptr;
  }
  if (entry->record->identity_sum != IdentitySum(id)) {
    *reason = Reason::kIdentity;
    return nullptr;
  }
  table_.Touch(entry);
  *reason = Reason::kNone;
  return entry;
}

void DiskStore::Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
                    int64_t deadline_ns) {
  StartGet(Op::Kind::kGet, tag, id, into, {}, deadline_ns);
}

void DiskStore::GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                         std::span<std::byte> into, int64_t deadline_ns) {
  WINNOW_CHECK(into.size() == pages.size() * kPageBytes);
  WINNOW_CHECK(std::is_sorted(pages.begin(), pages.end(), std::less_equal<>()));
  StartGet(Op::Kind::kGetPages, tag, id, into, pages, deadline_ns);
}

void DiskStore::Erase(uint64_t tag, const BlockKey& key) {
  const auto put = putting_.find(key);
  Op* const writing =
      put != putting_.end() && !ops_[put->second].cancelled ? &ops_[put->second] : nullptr;
  if (writing != nullptr) {
    writing->cancelled = true;
    committer_.Cancel(key);
  }
  const Entry* entry = table_.Find(key);
  const bool absent = writing == nullptr && entry == nullptr;
  // A block that the index never heard of, and never will: nothing has to be written down.
  const bool only_here = !absent && (writing == nullptr || writing->options.transient) &&
                         (entry == nullptr || entry->record->transient) && !committer_.InDoubt(key);
  std::vector<BlockKey> erased;  // Erase tells the index in any case
  committer_.Remove(key, &erased);
  if (only_here) return Complete(tag, Operation::kErase, Reason::kNone);
  // Also where there is nothing to be found: a batch with this block may be on its way, or have failed
  // and be there all the same; and a rebuilt index could find an evicted block again.
  ++in_flight_;
  committer_.Erase(tag, key, absent ? Reason::kAbsent : Reason::kNone);
}

void DiskStore::OnErased(uint64_t tag, Reason reason) {
  --in_flight_;
  Complete(tag, Operation::kErase, reason);
}

std::optional<BlockInfo> DiskStore::Find(const BlockId& id) const {
  const Entry* entry = table_.Find(id.key);
  if (entry == nullptr || Expired(*entry)) return std::nullopt;
  if (entry->record->identity_sum != IdentitySum(id)) return std::nullopt;
  return InfoOf(*entry);
}

bool DiskStore::Contains(const BlockKey& key) const {
  const Entry* entry = table_.Find(key);
  return entry != nullptr && !Expired(*entry);
}

void DiskStore::ForEach(const Visit& visit) const {
  table_.ForEach([&](const BlockKey& key, const Entry& entry) {
    if (!Expired(entry)) visit(key, InfoOf(entry));
  });
}

BlockInfo DiskStore::InfoOf(const Entry& entry) const {
  const uint64_t left_s = entry.expires_at_s == 0 ? 0 : entry.expires_at_s - env_.StoreSeconds();
  return {entry.record->payload_bytes,   entry.priority, entry.pinned,
          static_cast<uint32_t>(left_s), entry.in_use,   entry.record->transient};
}

std::vector<BlockKey> DiskStore::AsidesOf(const std::array<uint8_t, 32>& chain) const {
  return table_.AsidesOf(chain);
}

uint64_t DiskStore::TenantBytes(const std::array<uint8_t, 32>& tenant) const {
  return table_.TenantBytes(TenantTag(tenant));
}

bool DiskStore::SetPinned(const BlockKey& key, bool pinned) {
  Entry* entry = table_.Find(key);
  if (entry == nullptr) return false;
  if (entry->pinned == pinned) return true;
  if (!table_.SetPinned(entry, pinned)) return false;
  committer_.Save(key, entry);
  return true;
}

// Publish sees that a header on its way says otherwise.
void DiskStore::RaisePut(Op& op, uint8_t priority, uint32_t ttl_s) {
  op.options.priority = std::max(op.options.priority, std::min(priority, kPriorityMax));
  op.expires_at_s = LaterExpiry(op.expires_at_s, ExpirySeconds(ttl_s));
}

void DiskStore::Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) {
  if (const auto put = putting_.find(key); put != putting_.end()) {
    RaisePut(ops_[put->second], priority, ttl_s);
  }
  Entry* entry = table_.Find(key);
  if (entry == nullptr || Expired(*entry)) return;
  const uint8_t raised = std::max(entry->priority, std::min(priority, kPriorityMax));
  const uint64_t expires_at_s = LaterExpiry(entry->expires_at_s, ExpirySeconds(ttl_s));
  if (raised == entry->priority && expires_at_s == entry->expires_at_s) return;
  entry->priority = raised;
  entry->expires_at_s = expires_at_s;
  table_.Reorder(*entry);
  committer_.Save(key, entry);
}

void DiskStore::SetInUse(const BlockKey& key, bool in_use) {
  if (const auto put = putting_.find(key); put != putting_.end()) {
    ops_[put->second].options.in_use = in_use;
  }
  Entry* entry = table_.Find(key);
  if (entry == nullptr) return;
  entry->in_use = in_use;
  table_.Touch(entry);
}

// ---- reads ----

void DiskStore::StartGet(Op::Kind kind, uint64_t tag, const BlockId& id, std::span<std::byte> into,
                         std::span<const uint32_t> pages, int64_t deadline_ns) {
  const Operation operation = kind == Op::Kind::kGet ? Operation::kGet : Operation::kGetPages;
  if (env_.health.Update(env_.NowNs()) == TierState::kOff) {
    return Complete(tag, operation, Reason::kOff);
  }
  Reason reason;
  const Entry* entry = FindSound(id, &reason);
  if (entry == nullptr) return Complete(tag, operation, reason);
  const BlockRecord& record = *entry->record;
  const bool fits = kind == Op::Kind::kGet ? record.payload_bytes == into.size()
                                           : pages.empty() || pages.back() < record.payload_pages();
  if (!fits) return Complete(tag, operation, Reason::kIdentity);
  if (into.empty()) return Complete(tag, operation, Reason::kNone);
  const size_t stage_pages = kind == Op::Kind::kGet ? record.payload_pages() : pages.size();
  // No wait would make room for a read larger than all of staging.
  if (in_flight_ >= env_.options().operations_max || stage_pages > ops_.stage_pages()) {
    return Complete(tag, operation, Reason::kBusy);
  }
  const uint32_t index = ops_.New(kind, tag, id);
  Op& op = ops_[index];
  op.record = entry->record;
  op.segment = &log_.At(record.segment_id);
  log_.Hold(op.segment);
  op.into = into;
  op.pages.assign(pages.begin(), pages.end());
  op.start_ns = env_.NowNs();
  op.deadline_ns = deadline_ns != 0 ? deadline_ns : op.start_ns + env_.options().read_deadline_ns;
  ++in_flight_;
  if (!waiting_reads_.empty() || !StartRead(index)) waiting_reads_.push_back(index);
}

bool DiskStore::StartRead(uint32_t index) {
  Op& op = ops_[index];
  const BlockRecord& record = *op.record;
  // A move writes the header again and needs it; others have its contents from the index.
  const size_t pages = op.is_move()                ? record.block_bytes() / kPageBytes
                       : op.kind == Op::Kind::kGet ? record.payload_pages()
                                                   : op.pages.size();
  if (!op.stage_page && !ops_.Stage(&op, pages)) return false;
  const std::span<std::byte> staged = ops_.Staged(op);
  const auto read = [&](uint64_t offset, std::span<std::byte> data) {
    ++op.outstanding;
    env_.stats.device_bytes_read += data.size();
    env_.ring().Submit({.kind = IoKind::kRead,
                        .fd = op.segment->file.fd(),
                        .offset = offset,
                        .data = data,
                        .deadline_ns = op.deadline_ns,
                        .tag = index});
  };
  if (op.kind != Op::Kind::kGetPages) {
    read(op.is_move() ? record.offset : record.payload_offset(), staged);
    return true;
  }
  // Neighbouring pages are one read.
  for (size_t begin = 0; begin < op.pages.size();) {
    size_t end = begin + 1;
    while (end < op.pages.size() && op.pages[end] == op.pages[end - 1] + 1) ++end;
    read(record.payload_offset() + op.pages[begin] * kPageBytes,
         staged.subspan(begin * kPageBytes, (end - begin) * kPageBytes));
    begin = end;
  }
  return true;
}

void DiskStore::StartReads() {
  while (!waiting_reads_.empty()) {
    const uint32_t index = waiting_reads_.front();
    if (env_.NowNs() >= ops_[index].deadline_ns) {
      waiting_reads_.pop_front();
      // Others have kept all buffers for so long: the device is as slow as if it had this read.
      ++env_.stats.io_errors;
      env_.health.ReadError(env_.NowNs());
      Answer(&ops_[index], Reason::kLate);
      FreeOp(index);
      continue;
    }
    if (!StartRead(index)) return;
    waiting_reads_.pop_front();
  }
}

bool DiskStore::VerifyRead(const Op& op) const {
  const std::span<const std::byte> staged = ops_.Staged(op);
  const BlockRecord& record = *op.record;
  if (op.is_move()) return BlockMatches(staged, op.id.key, record);
  for (size_t i = 0; i < staged.size() / kPageBytes; ++i) {
    const size_t page = op.kind == Op::Kind::kGet ? i : op.pages[i];
    if (PageSum(record.place_sum, page, staged.subspan(i * kPageBytes, kPageBytes)) !=
        record.page_sums[page]) {
      return false;
    }
  }
  return true;
}

// All parts of a read are back.
void DiskStore::OnRead(uint32_t index) {
  Op& op = ops_[index];
  if (op.error != 0) {
    ++env_.stats.io_errors;
    env_.health.ReadError(env_.NowNs());
    if (op.is_move()) return EndMove(index, /*drop=*/true);
    Answer(&op, Reason::kIoError);
    return FreeOp(index);
  }
  if (!VerifyRead(op)) {
    if (!op.retried) {  // the path to memory may have failed, not the medium
      op.retried = true;
      StartRead(index);
      return;
    }
    ++env_.stats.corrupt_blocks;
    env_.Log(absl::StrCat("corrupt block in segment ", op.record->segment_id, " at ",
                          op.record->offset, ": dropped"));
    if (op.is_move()) return EndMove(index, /*drop=*/true);
    const Entry* entry = table_.Find(op.id.key);
    if (entry != nullptr && entry->record == op.record) committer_.Discard(op.id.key);
    Answer(&op, Reason::kCorrupt);
    return FreeOp(index);
  }
  env_.health.Success();
  if (op.is_move()) {
    op.id = DecodeBlock(ops_.Staged(op))->id;
    op.reading = false;
    op.retried = false;
    --std::exchange(op.segment, nullptr)->users;
    waiting_moves_.push_back(index);
    return;
  }
  std::memcpy(op.into.data(), ops_.Staged(op).data(), op.into.size());
  env_.stats.payload_bytes_read += op.into.size();
  Answer(&op, Reason::kNone);
  FreeOp(index);
}

// ---- the loop ----

void DiskStore::OnIo(const IoResult& result) {
  const auto purpose = static_cast<SegmentIo>(result.tag >> 56);
  const uint64_t id = result.tag & ((uint64_t{1} << 56) - 1);
  env_.CountStep();
  if (purpose == SegmentIo::kReadSync) {
    reader_.OnIo(id, result);
  } else if (purpose == SegmentIo::kNone) {
    OnOpIo(static_cast<uint32_t>(id), result);
  } else {
    log_.OnIo(purpose, id, result);
  }
}

void DiskStore::OnOpIo(uint32_t index, const IoResult& result) {
  Op& op = ops_[index];
  const bool write = op.kind == Op::Kind::kPut || (op.is_move() && !op.reading);
  if (result.late) return OnLateIo(index, write);
  --op.outstanding;
  if (write) --op.segment->writing;
  if (op.error == 0) op.error = result.error;
  if (op.outstanding > 0) return;
  if (op.late) {  // it was answered then
    --op.segment->stuck;
    return op.is_move() ? EndMove(index, /*drop=*/false) : FreeOp(index);
  }
  return write ? OnWritten(index) : OnRead(index);
}

// The kernel still has the buffer: the operation is answered now and stays until it is back.
void DiskStore::OnLateIo(uint32_t index, bool write) {
  Op& op = ops_[index];
  op.error = ETIMEDOUT;
  if (op.late) return;
  op.late = true;
  ++op.segment->stuck;
  if (op.is_move()) reclaimer_.EndMove();
  ++env_.stats.io_errors;
  if (write) {
    log_.NoteWriteError(ETIMEDOUT);
    log_.Break(op.segment, ETIMEDOUT);
    FailPut(index, Reason::kLate);
  } else {
    env_.health.ReadError(env_.NowNs());
    Answer(&op, Reason::kLate);
  }
}

void DiskStore::NoteState() {
  const TierState state = env_.health.Update(env_.NowNs());
  if (state == known_state_) return;
  const std::string line = absl::StrCat("store ", env_.options().directory, ": ",
                                        std::string(TierStateName(known_state_)), " -> ",
                                        std::string(TierStateName(state)), ", ", log_.used_bytes(),
                                        " of ", env_.options().capacity_bytes, " bytes used");
  switch (state) {
    case TierState::kOk:
      env_.Log(line);
      break;
    case TierState::kDegraded:
      env_.Warn(line +
                ": it is read and nothing is put into it, until it is tried again in some seconds");
      break;
    case TierState::kOff:
      env_.Warn(line +
                ": KV that it holds is computed again, until it is tried again in some seconds");
  }
  known_state_ = state;
}

void DiskStore::Pump() {
  NoteState();
  committer_.AnswerLate();
  StartReads();
  order_.Advance(env_.StoreSeconds(), kOrderSteps);
  reclaimer_.Advance();
  PlaceWrites();
  log_.Advance();
  committer_.RepairIfDue();
}

void DiskStore::PollRing(nanoseconds wait) {
  io_results_.clear();
  env_.ring().Poll(wait, &io_results_);
  for (const IoResult& result : io_results_) OnIo(result);
}

void DiskStore::Poll(nanoseconds wait, std::vector<Completion>* completions) {
  Pump();
  if (!done_.empty()) wait = nanoseconds(0);
  // Two sources, one wait: while both have work, neither may be slept on for long.
  const bool io = env_.ring().in_flight() > 0;
  const bool index = committer_.in_flight() > 0;
  if (io) {
    PollRing(index ? std::min<nanoseconds>(wait, std::chrono::microseconds(200)) : wait);
  } else if (index && wait.count() > 0) {
    committer_.Wait(wait);
  }
  committer_.Poll();
  Pump();
  PollRing(
      nanoseconds(0));  // the work that Pump queued starts now, not with the caller's next step
  completions->insert(completions->end(), done_.begin(), done_.end());
  done_.clear();
}

bool DiskStore::idle() const {
  return log_.idle() && env_.ring().in_flight() == 0 && committer_.in_flight() == 0 &&
         reclaimer_.idle() && waiting_puts_.empty() && waiting_moves_.empty();
}

StoreStats DiskStore::stats() const {
  StoreStats stats = env_.stats;
  stats.state = env_.health.state();
  stats.blocks = table_.size();
  stats.pinned_bytes = table_.pinned_bytes();
  stats.used_bytes = log_.used_bytes();
  stats.in_flight = in_flight_;
  stats.io_backend =
      env_.ring().engine().name() == "uring" ? "uring" : "threads";  // outlives the store
  return stats;
}

}  // namespace winnow::storage
