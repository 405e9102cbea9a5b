#include "engine/kv/kv_memory.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "fmt/format.h"
#include "kernels/check.h"

namespace winnow::engine {

using storage::Completion;
using storage::Outcome;
using storage::TierState;

namespace {

constexpr uint32_t kKindKv = 0;
constexpr size_t kSavesAtOnce = 64;     // when a pass must wait for them
constexpr int32_t kFailuresInARow = 8;  // saves; then nothing more is tried in this pass
// Of all that is put. What running sequences need is told apart by its use, which is not written down:
// the rest, and after a restart all of it, leaves by recency, and an index not before its block.
constexpr uint8_t kPriority = storage::kPriorityMax;

}  // namespace

KvMemory::KvMemory(kernels::Backend& backend, const KvMemoryOptions& options)
    : backend_(backend), options_(options) {}

absl::StatusOr<std::unique_ptr<KvMemory>> KvMemory::Create(kernels::Backend& backend,
                                                           const KvMemoryOptions& options) {
  std::unique_ptr<KvMemory> memory(new KvMemory(backend, options));
  if (absl::Status status = memory->Allocate(); !status.ok()) return status;
  return memory;
}

int64_t KvMemory::LeastFrames(int32_t num_layers, int32_t block_tokens, int32_t max_context,
                              int32_t max_batch_tokens, int32_t max_sequences) {
  // A chunk writes into the block that it finds begun, whole ones, and one that it leaves begun.
  const int64_t written = max_batch_tokens / block_tokens + 2 * int64_t{max_sequences};
  const int64_t attended = (int64_t{max_context} + block_tokens - 1) / block_tokens;
  return num_layers * written + attended;
}

absl::Status KvMemory::Allocate() {
  const int64_t pieces = int64_t{options_.num_layers} * options_.num_blocks;
  WINNOW_CHECK(tiered() ? options_.num_frames <= std::numeric_limits<int32_t>::max()
                        : options_.num_frames == pieces);
  const int32_t device_layers = std::min(options_.num_layers, options_.shared.first_layer);
  const bool shares = device_layers < options_.num_layers;
  const int64_t frames =
      shares ? int64_t{device_layers} * options_.num_blocks : options_.num_frames;
  const size_t bytes = static_cast<size_t>(frames) * options_.layout.BlockBytes();
  arena_ = backend_.Allocate(bytes);
  if (arena_.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for the KV pool: {} bytes in {} layers", bytes, device_layers));
  }
  scarce_pool_ = arena();
  blocks_.resize(options_.num_blocks);
  if (has_store()) pieces_.resize(pieces);
  if (tiered() && shares) {
    own_layers_ = device_layers;
    own_frames_ = static_cast<int32_t>(frames);
    WINNOW_CHECK(options_.num_frames > own_frames_);
  }
  if (shares) {
    if (absl::Status status = AllocateShared(); !status.ok()) return status;
  }
  if (has_store() && (!tiered() || shares)) {
    if (absl::Status status = AllocateBounce(); !status.ok()) return status;
  }
  if (!tiered()) {
    if (has_store()) away_.resize(options_.num_layers);
    return absl::OkStatus();
  }
  frames_.resize(options_.num_frames);
  for (auto frame = static_cast<int32_t>(options_.num_frames) - 1; frame >= own_frames_; --frame) {
    free_frames_.push_back(frame);
  }
  return absl::OkStatus();
}

absl::Status KvMemory::AllocateShared() {
  const kernels::SharedKvShape& shape = options_.shared.shape;
  const int32_t layers = options_.num_layers - options_.shared.first_layer;
  WINNOW_CHECK(shape.of_frames == tiered() && shape.num_pools == (tiered() ? 1 : layers) &&
               shape.num_blocks ==
                   (tiered() ? options_.num_frames - own_frames_ : options_.num_blocks));
  const size_t bytes =
      static_cast<size_t>(shape.num_pools) * shape.num_blocks * options_.layout.BlockBytes();
  const int64_t begin = NowNs();
  shared_ = backend_.AllocateShared(bytes);
  if (shared_.data() == nullptr) {
    return absl::ResourceExhaustedError(fmt::format(
        "no memory of the host that the device can read, for the KV of {} layers: {} bytes", layers,
        bytes));
  }
  pin_seconds_ = static_cast<double>(NowNs() - begin) * 1e-9;
  std::vector<std::byte*> pools;
  if (tiered()) {
    // Frames of any layer, one pool: operations are told where a layer's blocks lie.
    scarce_pool_ = static_cast<std::byte*>(shared_.data());
    pools.push_back(scarce_pool_);
  } else {
    for (int32_t layer = options_.shared.first_layer; layer < options_.num_layers; ++layer) {
      pools.push_back(LayerPool(layer));
    }
  }
  std::string why;
  shared_kv_ = backend_.ShareKv(shape, pools, &why);
  if (shared_kv_ != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format("KV in the host's memory: {}", why));
}

int64_t KvMemory::NowNs() const {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

bool KvMemory::AcceptsSaves() const {
  return options_.store->state() == TierState::kOk && failed_saves_in_a_row_ < kFailuresInARow;
}

int32_t KvMemory::RoomForBlocks() const {
  if (!tiered()) return std::numeric_limits<int32_t>::max();
  const TierState state = options_.store->state();
  if (state == TierState::kOk) return std::numeric_limits<int32_t>::max();
  int64_t frames = static_cast<int64_t>(free_frames_.size());
  if (state == TierState::kDegraded) frames += clean_frames_;  // it still gives them back
  return static_cast<int32_t>(frames / (options_.num_layers - own_layers_));
}

bool KvMemory::HoldsFrames(int32_t block) const {
  if (!tiered()) return false;
  const bool gives_back = options_.store->state() != TierState::kOff;
  for (int32_t layer = own_layers_; layer < options_.num_layers; ++layer) {
    const Piece& piece = pieces_[PieceOf(layer, block)];
    if (piece.frame >= 0 && !(piece.saved && gives_back)) return true;
  }
  return false;
}

// ---- a pass ----

void KvMemory::BeginPass(size_t num_chunks) {
  chunks_.assign(num_chunks, {});
  if (!has_store()) return;
  ForgetAdopted();
  Unpin();
  ++pass_;
  unused_hand_ = 0;
  Poll(std::chrono::nanoseconds(0));
}

KvMemory::PinResult KvMemory::TryPin(int32_t chunk, int32_t layer, std::span<const int32_t> blocks,
                                     int32_t first, int32_t last, std::vector<int32_t>* frames,
                                     PinnedBlocks* pinned) {
  if (!tiered()) {
    *pinned = {LayerPool(layer), blocks};
    return away_in(layer) == 0 ? PinResult::kOk : PinOwn(chunk, layer, blocks, first, last);
  }
  frames->resize(last, -1);
  const int32_t first_frame = HasOwnFrames(layer) ? 0 : own_frames_;  // of the pool
  *pinned = {HasOwnFrames(layer) ? arena() : scarce_pool_, *frames};
  int32_t missing = 0;
  for (int32_t i = first; i < last; ++i) {
    const Piece& piece = pieces_[PieceOf(layer, blocks[i])];
    if (piece.lost) return PinResult::kLost;
    (*frames)[i] = piece.frame - first_frame;
    if (piece.frame >= 0) {
      frames_[piece.frame].pin_group = pin_group_;
      frames_[piece.frame].used_in = pass_;
    } else {
      ++missing;
    }
  }
  if (missing == 0) return PinResult::kOk;

  bool full = false, settled = false;
  std::vector<int64_t> to_own;
  for (int32_t i = first; i < last && !full; ++i) {
    const int64_t index = PieceOf(layer, blocks[i]);
    if (pieces_[index].frame >= 0) continue;
    const int32_t frame = TakeFrame(index);
    if (frame < 0) {
      full = true;
      break;
    }
    Piece& piece = pieces_[index];
    piece.frame = frame;
    (*frames)[i] = frame - first_frame;
    frames_[frame] = {.piece = index, .pin_group = pin_group_, .used_in = pass_};
    if (!piece.saved) continue;  // to be written for the first time
    if (HasOwnFrames(layer)) {
      to_own.push_back(index);
      continue;
    }
    ++clean_frames_;
    // What was asked of the device before may still read what the frame had.
    if (!settled && !backend_.Synchronize()) return PinResult::kLost;
    settled = true;
    const uint64_t tag = next_tag_++;
    loads_.emplace(tag, Loading{index, chunk, options_.layout.BlockBytes()});
    options_.store->Get(tag, StoreId(layer, blocks[i]),
                        {FrameBytes(frame), options_.layout.BlockBytes()}, 0);
    // A read's deadline runs from here: what waits behind too many others would be late, and lost.
    if (loads_.size() * options_.layout.BlockBytes() >= kLoadBytesInFlight) {
      const size_t half = loads_.size() / 2;
      Wait([&] { return loads_.size() <= half; },
           [this](const Completion& c) { foreign_.push_back(c); });
    }
  }
  if (!loads_.empty()) {
    Wait([this] { return loads_.empty(); }, [this](const Completion& c) { foreign_.push_back(c); });
  }
  if (!to_own.empty()) BringWhole(layer, to_own, chunk);
  if (full) return PinResult::kFull;
  for (int32_t i = first; i < last; ++i) {
    if (pieces_[PieceOf(layer, blocks[i])].lost) return PinResult::kLost;
  }
  return PinResult::kOk;
}

storage::BlockId KvMemory::StoreId(int32_t layer, int32_t block) const {
  return options_.names.Id(blocks_[block].name, kKindKv, layer);
}

void KvMemory::DropFrame(Piece* piece) {
  if (piece->frame < 0) return;
  frames_[piece->frame] = {};
  if (piece->frame >= own_frames_) {
    clean_frames_ -= piece->saved;
    free_frames_.push_back(piece->frame);
  }
  piece->frame = -1;
}

void KvMemory::MarkLost(int32_t layer, int32_t block) {
  Piece& piece = pieces_[PieceOf(layer, block)];
  if (piece.lost) return;
  DropFrame(&piece);  // own frames: there is none, and what is away stays so
  piece.saved = false;
  piece.lost = true;
  ++stats_.lost_pieces;
}

int32_t KvMemory::TakeFrame(int64_t piece) {
  if (HasOwnFrames(LayerOf(piece))) return static_cast<int32_t>(piece);
  while (free_frames_.empty()) {
    if (clean_frames_ > 0) {
      if (const int32_t frame = EvictFrame(LayerOf(piece)); frame >= 0) return frame;
    }
    if (!SaveSome()) return -1;
  }
  const int32_t frame = free_frames_.back();
  free_frames_.pop_back();
  return frame;
}

// For a piece of `layer`. What neither this pass nor the one before has used goes first. If everything is
// in use, frames are too few for what runs, and every pass goes through the same layers in turn: to take
// what was used longest ago would take what is needed soonest, and nothing would ever be found again. So
// what was used last goes, which is needed last: of this layer what is not pinned, then of those before it.
// The rest stays from pass to pass.
int32_t KvMemory::EvictFrame(int32_t layer) {
  const int32_t unused = EvictUnused();
  return unused >= 0 ? unused : EvictLatest(layer);
}

int32_t KvMemory::EvictUnused() {
  // What is used in a pass stays so: each frame is looked at once.
  const int64_t frames = options_.num_frames - own_frames_;
  for (; unused_hand_ < frames; ++unused_hand_) {
    const auto index = static_cast<int32_t>(own_frames_ + next_unused_);
    next_unused_ = (next_unused_ + 1) % frames;
    if (MayEvict(frames_[index]) && frames_[index].used_in + 1 < pass_) return Evict(index);
  }
  return -1;
}

int32_t KvMemory::EvictLatest(int32_t layer) {
  const int32_t layers = options_.num_layers - own_layers_;
  if (latest_from_ != layer) {
    latest_from_ = latest_layer_ = layer;
    latest_block_ = 0;
  }
  for (int32_t step = 0; step <= layers; ++step) {
    for (; latest_block_ < options_.num_blocks; ++latest_block_) {
      const int32_t frame = pieces_[PieceOf(latest_layer_, latest_block_)].frame;
      if (frame >= 0 && MayEvict(frames_[frame])) return Evict(frame);
    }
    latest_block_ = 0;
    latest_layer_ = latest_layer_ > own_layers_ ? latest_layer_ - 1 : options_.num_layers - 1;
  }
  return -1;
}

int32_t KvMemory::Evict(int32_t frame) {
  pieces_[frames_[frame].piece].frame = -1;
  frames_[frame] = {};
  --clean_frames_;
  ++stats_.evicted_frames;
  return frame;
}

// Makes more frames clean, waiting for it. False: nothing can be saved.
bool KvMemory::SaveSome() {
  while (saves_.size() < kSavesAtOnce && AcceptsSaves() &&
         (SaveNext(&wanted_) || SaveNext(&unsaved_))) {
  }
  if (saves_.empty()) return false;
  const uint64_t saved = stats_.saved_pieces;
  const size_t in_flight = saves_.size();
  Wait([&] { return stats_.saved_pieces > saved || saves_.size() < in_flight; },
       [this](const Completion& c) { foreign_.push_back(c); });
  return true;
}

// False: the queue is empty.
bool KvMemory::SaveNext(Queue* queue) {
  if (queue->empty()) return false;
  const auto [piece, generation] = queue->front();
  queue->pop_front();
  if (blocks_[BlockOf(piece)].generation == generation && MaySave(piece)) {
    StartSave(piece, FrameBytes(pieces_[piece].frame));
  }
  return true;
}

// ---- saving ----

bool KvMemory::MaySave(int64_t index) const {
  const Piece& piece = pieces_[index];
  const bool here = tiered() ? piece.frame >= 0 : !piece.away;
  return here && !piece.saved && !piece.saving && !piece.lost;
}

// The store copies `content` before it returns.
void KvMemory::StartSave(int64_t index, const std::byte* content) {
  Piece& piece = pieces_[index];
  const Block& block = blocks_[BlockOf(index)];
  const uint64_t tag = next_tag_++;
  const storage::BlockId id = StoreId(LayerOf(index), BlockOf(index));
  piece.saving = true;
  saves_.emplace(tag, Saving{index, block.generation, id, block.keep});
  options_.store->Put(tag, id, {content, options_.layout.BlockBytes()},
                      {.priority = kPriority,
                       .in_use = names_.at(block.name.chain).held > 0,
                       .transient = !block.keep});
}

void KvMemory::OnCompletion(const Completion& completion) {
  if ((completion.tag & kForeignTag) != 0) {
    foreign_.push_back(completion);
    return;
  }
  if (const auto load = loads_.find(completion.tag); load != loads_.end()) {
    const auto [piece, chunk, bytes] = load->second;
    loads_.erase(load);
    if (completion.outcome == Outcome::kOk) {
      CountRead(chunk, bytes, completion.from_disk);
      stats_.loaded_pieces += bytes == options_.layout.BlockBytes();
      stats_.loaded_bytes += bytes;
    } else {
      MarkLost(LayerOf(piece), BlockOf(piece));
    }
    return;
  }
  if (!asides_.empty() && completion.tag >= asides_.front().tag &&
      completion.tag <= asides_.back().tag) {
    asides_[completion.tag - asides_.front().tag].good = completion.outcome == Outcome::kOk;
    --asides_left_;
    return;
  }
  const auto save = saves_.find(completion.tag);
  // An erase: what it did not find is gone as well. Or something put aside.
  if (save == saves_.end()) return;
  const Saving saving = save->second;
  saves_.erase(save);
  const bool saved = completion.outcome == Outcome::kOk;
  failed_saves_in_a_row_ = saved ? 0 : failed_saves_in_a_row_ + 1;
  if (saved) {
    ++stats_.saved_pieces;
  } else {
    ++stats_.save_failures;
  }
  const Block& block = blocks_[BlockOf(saving.piece)];
  if (block.generation != saving.generation) {  // its block is gone
    Digest chain;
    std::copy_n(saving.id.key.bytes.begin(), chain.size(), chain.begin());
    if (saved && !saving.keep && !names_.contains(chain)) {
      options_.store->Erase(next_tag_++, saving.id.key);
    }
    return;
  }
  Piece& piece = pieces_[saving.piece];
  piece.saving = false;
  if (saved) {
    piece.saved = true;
    clean_frames_ += piece.frame >= own_frames_;
    CountKept(BlockOf(saving.piece), 1);
    TellSaved(BlockOf(saving.piece));
  } else {
    SaveQueue(saving.piece, block.keep).emplace_back(saving.piece, saving.generation);
  }
}

void KvMemory::TellSaved(int32_t index) {
  const Block& block = blocks_[index];
  if (events_ == nullptr || !block.keep) return;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    if (!pieces_[PieceOf(layer, index)].saved) return;
  }
  events_->Copied(store_tier_, block.name.chain);
}

// Where a piece waits that is to be saved.
KvMemory::Queue& KvMemory::SaveQueue(int64_t piece, bool keep) {
  if (!tiered() || HasOwnFrames(LayerOf(piece))) return to_copy_;
  return options_.write_through && keep ? wanted_ : unsaved_;
}

void KvMemory::Poll(std::chrono::nanoseconds wait) {
  completions_.clear();
  options_.store->Poll(wait, &completions_);
  for (const Completion& completion : completions_) OnCompletion(completion);
}

void KvMemory::EndPass() {
  if (!has_store()) return;
  failed_saves_in_a_row_ = 0;
  if (!to_copy_.empty() || !copied_.empty()) SaveByCopy();
  if (!tiered()) return;
  while (saves_.size() < kSavesInFlight && AcceptsSaves() && SaveNext(&wanted_)) {
  }
  // Half of the frames: a pass that has to wait for the disk costs more than writing early.
  const auto reserve = static_cast<size_t>((options_.num_frames - own_frames_) / 2);
  while (saves_.size() < kSavesInFlight && AcceptsSaves() &&
         free_frames_.size() + static_cast<size_t>(clean_frames_) + saves_.size() < reserve &&
         SaveNext(&unsaved_)) {
  }
}

void KvMemory::Idle() {
  if (!has_store()) return;
  if (!backend_.Synchronize()) return;  // the last pass may still be writing
  EndPass();
  Poll(std::chrono::nanoseconds(0));
}

void KvMemory::Flush(std::chrono::nanoseconds most) {
  if (!has_store()) return;
  const int64_t end = NowNs() + most.count();
  // The last pass may still be writing. Of a device that has failed nothing is saved any more.
  const bool saves = backend_.Synchronize();
  while (saves && has_work() && NowNs() < end && options_.store->state() == TierState::kOk) {
    EndPass();
    Poll(std::chrono::milliseconds(10));
  }
  const int64_t idle_end = NowNs() + most.count();
  while (!options_.store->idle() && NowNs() < idle_end) Poll(std::chrono::milliseconds(10));
}

void KvMemory::PutAside(const storage::BlockId& id, std::span<const std::byte> bytes) {
  if (!AcceptsSaves()) return;
  options_.store->Put(next_tag_++, id, bytes, {.priority = kPriority});
}

bool KvMemory::GetAside(const storage::BlockId& id, std::span<std::byte> into) {
  AsideRead read{.id = id, .bytes = into.size(), .into = into};
  GetAsides({&read, 1});
  return read.good;
}

void KvMemory::GetAsides(std::span<AsideRead> reads) {
  asides_ = reads;
  asides_left_ = reads.size();
  for (AsideRead& read : reads) {
    read.tag = next_tag_++;
    options_.store->Get(read.tag, read.id, read.into, 0);
  }
  Wait([this] { return asides_left_ == 0; },
       [this](const Completion& c) { foreign_.push_back(c); });
  asides_ = {};
}

// ---- lives of blocks ----

void KvMemory::Seal(int32_t index, const BlockName& name, bool keep) {
  Block& block = blocks_[index];
  WINNOW_CHECK(!block.sealed);
  block.name = name;
  block.sealed = true;
  block.keep = keep;
  if (!has_store()) return;
  ++names_[name.chain].blocks;
  SetHeld(index, true);
  if (keep) {
    block.unsaved = options_.num_layers;
    unsaved_kept_[name.tenant] += block.unsaved;
  }
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    // Nothing needs a piece saved that has a place of its own, but to outlive its sequence.
    if (!keep && (!tiered() || HasOwnFrames(layer))) continue;
    SaveQueue(PieceOf(layer, index), keep).emplace_back(PieceOf(layer, index), block.generation);
  }
  // Where frames never get scarce nobody takes from the queues, and blocks come and go.
  for (Queue* queue : {&wanted_, &unsaved_, &to_copy_}) {
    if (queue->size() <= 2 * pieces_.size()) continue;
    std::erase_if(*queue, [this](const auto& entry) {
      return blocks_[BlockOf(entry.first)].generation != entry.second;
    });
  }
}

bool KvMemory::SetPinned(const BlockName& name, bool pinned) {
  if (!has_store()) return false;
  bool all = true;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    all &= options_.store->SetPinned(options_.names.Id(name, kKindKv, layer).key, pinned);
  }
  return all;
}

std::vector<Digest> KvMemory::PinnedChains() const {
  absl::flat_hash_set<Digest> chains;
  if (!has_store()) return {};
  options_.store->ForEach([&](const storage::BlockKey& key, const storage::BlockInfo& info) {
    if (!info.pinned) return;
    Digest chain;
    std::copy_n(key.bytes.begin(), chain.size(), chain.begin());
    chains.insert(chain);
  });
  return {chains.begin(), chains.end()};
}

uint64_t KvMemory::KeptBytes(const Digest& tenant) const {
  if (!has_store()) return 0;
  const auto unsaved = unsaved_kept_.find(tenant);
  const int64_t pieces = unsaved == unsaved_kept_.end() ? 0 : unsaved->second;
  // Bytes that a piece takes on disk: whole pages, and one for its header.
  constexpr uint64_t kPage = 4096;
  const uint64_t piece_bytes = (options_.layout.BlockBytes() + kPage - 1) / kPage * kPage + kPage;
  return options_.store->TenantBytes(tenant) + static_cast<uint64_t>(pieces) * piece_bytes;
}

// So many pieces of the block are no longer on their way to be kept.
void KvMemory::CountKept(int32_t index, int32_t pieces) {
  Block& block = blocks_[index];
  pieces = std::min(pieces, block.unsaved);
  if (pieces == 0) return;
  block.unsaved -= pieces;
  const auto tenant = unsaved_kept_.find(block.name.tenant);
  if ((tenant->second -= pieces) == 0) unsaved_kept_.erase(tenant);
}

void KvMemory::Erase(const BlockName& name) {
  if (!has_store()) return;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    options_.store->Erase(next_tag_++, options_.names.Id(name, kKindKv, layer).key);
  }
  if (events_ != nullptr) events_->Removed(store_tier_, name.chain);
}

bool KvMemory::Stored(const BlockName& name) const {
  if (!has_store()) return false;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    if (!options_.store->Find(options_.names.Id(name, kKindKv, layer)).has_value()) return false;
  }
  return true;
}

void KvMemory::Adopt(int32_t index, const BlockName& name) {
  WINNOW_CHECK(has_store());
  Block& block = blocks_[index];
  WINNOW_CHECK(!block.sealed);
  block.name = name;
  block.sealed = true;
  block.keep = true;
  ++names_[name.chain].blocks;
  SetHeld(index, true);
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    Piece& piece = pieces_[PieceOf(layer, index)];
    WINNOW_CHECK(piece.frame < 0 && !piece.away);
    piece.saved = true;
    if (!tiered()) SetAway(PieceOf(layer, index), true);
  }
  if (!tiered()) adopted_.push_back(index);
}

void KvMemory::Load(std::span<const int32_t> blocks) {
  if (!has_store()) return;
  ForgetAdopted();
  Unpin();
  std::vector<int32_t> frames;
  PinnedBlocks pinned;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    // What is lost is found out again by the pass that needs it.
    if (TryPin(kNoChunk, layer, blocks, 0, static_cast<int32_t>(blocks.size()), &frames, &pinned) ==
        PinResult::kFull) {
      return;
    }
  }
}

bool KvMemory::block_lost(int32_t block) const {
  if (!has_store()) return false;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    if (pieces_[PieceOf(layer, block)].lost) return true;
  }
  return false;
}

void KvMemory::SetHeld(int32_t index, bool held) {
  Block& block = blocks_[index];
  if (!has_store() || !block.sealed || block.held == held) return;
  block.held = held;
  int32_t& holders = names_.at(block.name.chain).held;
  const bool was_in_use = holders > 0;
  holders += held ? 1 : -1;
  if ((holders > 0) == was_in_use) return;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    options_.store->SetInUse(StoreId(layer, index).key, holders > 0);
  }
}

void KvMemory::Forget(int32_t index) {
  Block& block = blocks_[index];
  if (has_store()) {
    SetHeld(index, false);
    CountKept(index, block.unsaved);
    bool last_of_name = false;
    if (block.sealed) {
      const auto name = names_.find(block.name.chain);
      WINNOW_CHECK(name != names_.end());
      last_of_name = --name->second.blocks == 0;
      if (last_of_name) names_.erase(name);
    }
    for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
      Piece& piece = pieces_[PieceOf(layer, index)];
      // What is lost here may still be there: a read that was late, or that fails every time.
      if ((piece.saved || piece.lost) && last_of_name && !block.keep) {
        options_.store->Erase(next_tag_++, StoreId(layer, index).key);
        if (events_ != nullptr) events_->Removed(store_tier_, block.name.chain);
      }
      DropFrame(&piece);
      SetAway(PieceOf(layer, index), false);
      piece = {};
    }
  }
  const uint32_t generation = block.generation + 1;
  block = {};
  block.generation = generation;
}

}  // namespace winnow::engine
