// Where the KV of every block lies: in frames of fast memory, or in a store of slower tiers
// (DESIGN, section 4). The only part of the engine that moves KV.
//
//   block   block_tokens tokens of a sequence, in all layers; numbered by BlockPool
//   piece   a block in one layer: what a frame holds and what the store knows by name
//   frame   fast memory for one piece (kernels/kv_layout.h: one block)
//
//   written ─ full, named ─▶ saved to the store ─▶ frame taken for others ─▶ read back, or row by row
//
// Three ways:
//   - no store: a frame for every piece, at its own place, and nothing moves.
//   - a store below frames (tiered): blocks may be more than frames hold. Pieces of full blocks are
//     saved when frames get scarce, one that is saved is taken (EvictFrame), and a piece
//     comes back whole (Pin) or by rows (RowFetcher). The frames may lie in the backend's shared memory
//     (a GPU's host); then the first layers have theirs on the device, one for every piece.
//   - a store beside frames (own_frames, kv_memory_own.cc): every piece has its place all the same, and
//     the store keeps what outlives a sequence. Of a prefix that is adopted from it pieces come to
//     their places when they are needed, whole (Pin) or by pages (Want, BringWanted). For devices that
//     know a row by its place in a pool.
// Without a store below, too, the places of the later layers may lie in shared memory, from where
// operations read them.
//
// A piece that the store does not give back is lost, and so is the chunk that needed it: the pass
// goes on for the others, and the engine computes the sequence again. Never wrong, only slower.
//
// Threads: the engine thread only, but for construction.
#ifndef WINNOW_ENGINE_KV_KV_MEMORY_H_
#define WINNOW_ENGINE_KV_KV_MEMORY_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/kv/block_name.h"
#include "engine/kv/kv_event_log.h"
#include "kernels/backend.h"
#include "storage/block_store.h"

namespace winnow::engine {

struct KvMemoryOptions {
  kernels::KvLayout layout;
  int32_t num_layers = 0;
  int32_t num_blocks = 0;
  int64_t num_frames = 0;                // num_layers * num_blocks unless tiered
  storage::BlockStore* store = nullptr;  // outlives the memory; nobody else calls it
  bool own_frames = false;               // the store lies beside the frames, not below
  // Saves every block that is to be kept as soon as it is full, not only when frames get scarce.
  bool write_through = false;
  StoreNames names = {};
  // Layers [shared.first_layer, num_layers) lie in the backend's shared memory. Tiered, num_frames
  // counts a frame for each piece of the layers before, and then those that the others share.
  struct Shared {
    int32_t first_layer = std::numeric_limits<int32_t>::max();
    kernels::SharedKvShape shape = {};  // tiered, of_frames
  };
  Shared shared = {};
};

// Since the start.
struct KvMemoryStats {
  uint64_t saved_pieces = 0;
  uint64_t save_failures = 0;
  uint64_t loaded_pieces = 0;  // whole
  uint64_t loaded_bytes = 0;
  uint64_t evicted_frames = 0;
  uint64_t lost_pieces = 0;  // the store had them and gave them back no more
  uint64_t waits = 0;        // times that a pass waited for the store to take or give pieces
  uint64_t wait_ns = 0;
};

struct TierBytes {
  uint64_t host = 0, disk = 0;
};

// What a kernel is to read: `table` has a block of `pool` for every logical block that was pinned.
struct PinnedBlocks {
  std::byte* pool = nullptr;
  std::span<const int32_t> table;
};

class KvMemory {
 public:
  enum class PinResult : uint8_t {
    kOk,
    kFull,  // other pins hold the frames: unpin, and try again
    kLost,  // the store has lost one; or there are too few frames for this chunk alone
  };

  // ResourceExhausted: no memory, with the bytes.
  static absl::StatusOr<std::unique_ptr<KvMemory>> Create(kernels::Backend& backend,
                                                          const KvMemoryOptions& options);
  // Frames that a pass may need at one time: what is being written, in every layer that shares them,
  // and all that one sequence attends to in one layer. Fewer cannot work.
  static int64_t LeastFrames(int32_t num_layers, int32_t block_tokens, int32_t max_context,
                             int32_t max_batch_tokens, int32_t max_sequences);

  bool has_store() const { return options_.store != nullptr; }
  bool tiered() const { return has_store() && !options_.own_frames; }
  const kernels::KvLayout& layout() const { return options_.layout; }
  size_t size_bytes() const { return arena_.size_bytes() + shared_.size_bytes(); }
  int32_t num_blocks() const { return options_.num_blocks; }
  // What so many blocks take of the frames that pieces share.
  double ShareOfFrames(int64_t blocks) const {
    return static_cast<double>(blocks * (options_.num_layers - own_layers_)) /
           static_cast<double>(options_.num_frames - own_frames_);
  }
  const KvMemoryStats& stats() const { return stats_; }
  const StoreNames& names() const { return options_.names; }
  storage::BlockStore* store() const { return options_.store; }

  // Blocks that can be begun now without losing anything; INT32_MAX while the store takes pieces.
  int32_t RoomForBlocks() const;
  // Whether blocks must fit into RoomForBlocks(), because the store is degraded or off.
  bool scarce() const { return tiered() && RoomForBlocks() != INT32_MAX; }
  // Whether the block has frames that are not in that room.
  bool HoldsFrames(int32_t block) const;

  // ---- a pass ----

  // Takes in what the store has finished since.
  void BeginPass(size_t num_chunks);
  // A chunk that needed a lost piece, or more frames than there are: left out of what comes.
  void LoseChunk(int32_t chunk) { chunks_[chunk].lost = true; }
  bool chunk_lost(int32_t chunk) const { return chunks_[chunk].lost; }
  // What was brought from slower tiers for the chunk: whole pieces, and rows.
  const TierBytes& chunk_bytes(int32_t chunk) const { return chunks_[chunk].bytes; }
  static constexpr int32_t kNoChunk = -1;  // what is read is for nobody in particular
  void CountRead(int32_t chunk, uint64_t bytes, bool from_disk) {
    if (chunk == kNoChunk) return;
    (from_disk ? chunks_[chunk].bytes.disk : chunks_[chunk].bytes.host) += bytes;
  }
  // Makes blocks [first, last) of the chunk's `blocks` resident in `layer`, for reading or, where
  // nothing has been written yet, for writing. They stay until Unpin. `frames` is memory for the
  // table. Where other pins are in the way, `flush` uses what they hold, and they go. False: the
  // chunk is lost.
  template <typename Flush>
  bool Pin(int32_t chunk, int32_t layer, std::span<const int32_t> blocks, int32_t first,
           int32_t last, std::vector<int32_t>* frames, PinnedBlocks* pinned, Flush flush) {
    if (chunk_lost(chunk)) return false;
    PinResult result = TryPin(chunk, layer, blocks, first, last, frames, pinned);
    if (result == PinResult::kFull) {
      flush();
      Unpin();
      result = TryPin(chunk, layer, blocks, first, last, frames, pinned);
    }
    if (result != PinResult::kOk) LoseChunk(chunk);
    return result == PinResult::kOk;
  }
  // The same without that way out.
  PinResult TryPin(int32_t chunk, int32_t layer, std::span<const int32_t> blocks, int32_t first,
                   int32_t last, std::vector<int32_t>* frames, PinnedBlocks* pinned);
  void Unpin() {
    ++pin_group_;
    latest_from_ = -1;
    if (tiered()) backend_.ForgetTables();  // their memory may get other frames now
  }
  // The layer's blocks, one behind the other. REQUIRES: all have their places there: !tiered(), or the
  // layer is before the shared ones.
  std::byte* LayerPool(int32_t layer) const {
    const bool shared = IsShared(layer);
    std::byte* first = shared ? static_cast<std::byte*>(shared_.data()) : arena();
    return first + static_cast<size_t>(layer - (shared ? options_.shared.first_layer : 0)) *
                       LayerPoolBytes();
  }
  size_t LayerPoolBytes() const { return options_.layout.BlockBytes() * options_.num_blocks; }
  // Whether the layer lies in shared memory. Reading it counts as reading the host's tier.
  bool IsShared(int32_t layer) const { return layer >= options_.shared.first_layer; }
  // Null: no layer does.
  kernels::SharedKv* shared_kv() const { return shared_kv_.get(); }
  // Of shared KV.
  int32_t max_batch_tokens() const { return options_.shared.shape.max_batch_tokens; }
  size_t shared_bytes() const { return shared_.size_bytes(); }
  double pin_seconds() const { return pin_seconds_; }  // that making it took
  // Address of a row, `offset` bytes into its piece, or null: not resident. Holds until the next Pin.
  const std::byte* Resident(int32_t layer, int32_t block, size_t offset) {
    if (!tiered()) {
      if (away_in(layer) > 0 && !IsHere(layer, block, offset)) return nullptr;
      return OwnFrame(layer, block) + offset;
    }
    const int32_t frame = pieces_[PieceOf(layer, block)].frame;
    if (frame < 0) return nullptr;
    frames_[frame].used_in = pass_;
    return FrameBytes(frame) + offset;
  }
  // All memory of frames: the device's, and what is shared.
  std::array<std::span<std::byte>, 2> pools() const {
    return {std::span(arena(), arena_.size_bytes()),
            std::span(static_cast<std::byte*>(shared_.data()), shared_.size_bytes())};
  }
  // All of the piece.
  bool IsResident(int32_t layer, int32_t block) const {
    if (tiered()) return pieces_[PieceOf(layer, block)].frame >= 0;
    return away_in(layer) == 0 || !pieces_[PieceOf(layer, block)].away;
  }
  bool lost(int32_t layer, int32_t block) const {
    return has_store() && pieces_[PieceOf(layer, block)].lost;
  }
  // Frames that can be had without waiting, and without taking more than a part of what others may
  // use again.
  int64_t SpareFrames() const {
    return static_cast<int64_t>(free_frames_.size()) + clean_frames_ / 4;
  }
  // ---- own frames: rows of pieces that are away ----

  // Pieces of the layer that are in the store and not, or not wholly, in their places.
  int64_t away_in(int32_t layer) const { return away_.empty() ? 0 : away_[layer]; }
  // The chunk is to read the row at `offset` of the piece: BringWanted brings its page if it is not
  // there. REQUIRES: own frames, also of BringWanted.
  void Want(int32_t chunk, int32_t layer, int32_t block, size_t offset);
  // Waits until the pages that were wanted of the layer are in their places, of all pieces that are not
  // lost then. REQUIRES: the device has nothing to do that is about them.
  void BringWanted(int32_t layer);

  // REQUIRES: the block is sealed.
  storage::BlockId StoreId(int32_t layer, int32_t block) const;
  // RowFetcher's reads share the store's one queue of completions: their tags have this bit, and
  // whoever waits finds them through Wait's `foreign`.
  static constexpr uint64_t kForeignTag = uint64_t{1} << 63;
  // Waits until `done()`; hands foreign completions to `foreign`.
  template <typename Done, typename Foreign>
  void Wait(Done done, Foreign foreign);
  void MarkLost(int32_t layer, int32_t block);

  // ---- lives of blocks ----

  // The block is full and will not be written again. From now on its pieces can be saved; `keep`
  // leaves what the store has of them there when the block is forgotten.
  void Seal(int32_t block, const BlockName& name, bool keep);
  // Whether the store seems to have all pieces of a block of this name: known without I/O.
  bool Stored(const BlockName& name) const;
  // Pins what the store has of the block, in each layer, or gives it free. False: it has not all of it, or its pins are
  // used up.
  bool SetPinned(const BlockName& name, bool pinned);
  // The chains of blocks of which the store has pinned something. Looks at all that it has.
  std::vector<Digest> PinnedChains() const;
  // Takes KV of that name out of the store, whoever has a copy here.
  void Erase(const BlockName& name);
  // Makes what is stored of the blocks resident, as far as frames can be had; between passes.
  void Load(std::span<const int32_t> blocks);
  // Takes the block's content from the store, where it stays: nothing is resident.
  void Adopt(int32_t block, const BlockName& name);
  // Moves on when a block is given to other content.
  uint32_t generation(int32_t block) const { return blocks_[block].generation; }
  bool sealed(int32_t block) const { return blocks_[block].sealed; }
  const BlockName& name(int32_t block) const { return blocks_[block].name; }
  bool kept(int32_t block) const { return blocks_[block].keep; }
  // What the store has of the block may be damaged: it goes when the block is forgotten.
  void Distrust(int32_t block) {
    CountKept(block, blocks_[block].unsaved);
    blocks_[block].keep = false;
  }
  // Bytes of the tenant's blocks that the store keeps, or is going to.
  uint64_t KeptBytes(const Digest& tenant) const;
  uint64_t StoredBlockBytes() const {
    return uint64_t{options_.layout.BlockBytes()} * static_cast<uint64_t>(options_.num_layers);
  }
  // Whether a piece of the block is lost.
  bool block_lost(int32_t block) const;
  // Tells `events` of blocks that the store has all of, as copies in `tier`, and of those that it is told to erase.
  // Nobody tells the store's own evictions (Engine::TellEvictions). Null: nobody is told.
  void SetEvents(KvEventLog* events, KvTier tier) {
    events_ = events;
    store_tier_ = tier;
  }
  // Whether a sequence has the block in its table, as all have that are sealed or adopted until this
  // says otherwise: what the store has of it then leaves after all that nobody runs on.
  void SetHeld(int32_t block, bool held);
  // Nobody needs the block's content any more.
  void Forget(int32_t block);
  // Saves ahead, so that frames are there when the next pass needs them. Everything has been asked of
  // the backend that the pass asks of it; it need not be done.
  void EndPass();
  // Something is to be saved although no pass needs it: EndPass goes on with it.
  bool has_work() const {
    return !wanted_.empty() || !to_copy_.empty() || !saves_.empty() || !copied_.empty();
  }
  // Pieces in line to be saved, some of them of blocks that are gone.
  size_t queued_pieces() const { return wanted_.size() + unsaved_.size() + to_copy_.size(); }
  // Between passes, when there is nothing else to do: goes on saving.
  void Idle();
  // Waits until everything that is to be kept is saved, and then until the store is idle, so that
  // another thread may close it; each at most so long.
  void Flush(std::chrono::nanoseconds most);

  // What belongs to a block beside its KV: `bytes` under an id of another kind than KV. A put that
  // fails is forgotten; a get that fails gives false. REQUIRES: has_store().
  void PutAside(const storage::BlockId& id, std::span<const std::byte> bytes);
  bool GetAside(const storage::BlockId& id, std::span<std::byte> into);
  // Many at once; `good` of each says whether `into` is filled.
  struct AsideRead {
    storage::BlockId id;
    size_t bytes = 0;  // AsideBytes(id)
    std::span<std::byte> into = {};
    bool good = false;
    uint64_t tag = 0;  // the memory's own
  };
  void GetAsides(std::span<AsideRead> reads);
  // As the store knows without I/O; 0: it has none.
  size_t AsideBytes(const storage::BlockId& id) const {
    const std::optional<storage::BlockInfo> info = options_.store->Find(id);
    return info.has_value() ? info->payload_bytes : 0;
  }

 private:
  struct Piece {
    int32_t frame = -1;
    bool saved = false;
    bool saving = false;
    bool lost = false;
    bool away = false;  // own frames: its content is in the store and not wholly in its place
  };
  // Pages of a piece that is away: bits of a word each.
  struct Pages {
    std::vector<uint64_t> here, wanted;
    int32_t chunk = 0;  // that wanted the first of them
  };
  struct Block {
    BlockName name;
    uint32_t generation = 0;
    bool sealed = false;
    bool keep = false;
    bool held = false;
    int32_t unsaved = 0;  // pieces that are to be kept, until they are saved
  };
  struct Frame {
    int64_t piece = -1;
    uint32_t pin_group = 0;
    uint32_t used_in = 0;  // the last pass that did
  };
  using Queue = std::deque<std::pair<int64_t, uint32_t>>;  // pieces, generations of their blocks
  struct Chunk {
    bool lost = false;
    TierBytes bytes;
  };
  struct Saving {
    int64_t piece = 0;
    uint32_t generation = 0;  // of its block, when it began
    storage::BlockId id;
    bool keep = false;
  };

  static constexpr size_t kSavesInFlight = 256;  // pieces; the store has copied them: bounds memory
  // Of whole pieces: enough to keep a disk busy, and little enough for one read's deadline.
  static constexpr size_t kLoadBytesInFlight = size_t{32} << 20;

  KvMemory(kernels::Backend& backend, const KvMemoryOptions& options);
  absl::Status Allocate();
  absl::Status AllocateShared();
  int64_t PieceOf(int32_t layer, int32_t block) const {
    return int64_t{layer} * options_.num_blocks + block;
  }
  int32_t LayerOf(int64_t piece) const { return static_cast<int32_t>(piece / options_.num_blocks); }
  int32_t BlockOf(int64_t piece) const { return static_cast<int32_t>(piece % options_.num_blocks); }
  std::byte* arena() const { return static_cast<std::byte*>(arena_.data()); }
  std::byte* FrameBytes(int32_t frame) const {
    return frame < own_frames_ ? arena() + static_cast<size_t>(frame) * options_.layout.BlockBytes()
                               : scarce_pool_ + static_cast<size_t>(frame - own_frames_) *
                                                    options_.layout.BlockBytes();
  }
  // Tiered: whether the layer's pieces have a frame each, which is never taken for others.
  bool HasOwnFrames(int32_t layer) const { return layer < own_layers_; }
  // Where the piece lies unless frames are taken from a pool.
  std::byte* OwnFrame(int32_t layer, int32_t block) const {
    return LayerPool(layer) + block * options_.layout.BlockBytes();
  }
  // For the piece; -1: none can be had while the pins hold.
  int32_t TakeFrame(int64_t piece);
  int32_t EvictFrame(int32_t layer);
  int32_t EvictUnused();
  int32_t EvictLatest(int32_t layer);
  bool MayEvict(const Frame& frame) const {
    return frame.piece >= 0 && frame.pin_group != pin_group_ && pieces_[frame.piece].saved;
  }
  int32_t Evict(int32_t frame);
  bool SaveSome();
  void TellSaved(int32_t block);
  void CountKept(int32_t block, int32_t pieces);
  bool MaySave(int64_t piece) const;
  void StartSave(int64_t piece, const std::byte* content);
  void OnCompletion(const storage::Completion& completion);
  bool AcceptsSaves() const;
  void DropFrame(Piece* piece);
  bool SaveNext(Queue* queue);
  Queue& SaveQueue(int64_t piece, bool keep);
  void Poll(std::chrono::nanoseconds wait);
  int64_t NowNs() const;
  // kv_memory_own.cc
  absl::Status AllocateBounce();
  PinResult PinOwn(int32_t chunk, int32_t layer, std::span<const int32_t> blocks, int32_t first,
                   int32_t last);
  // REQUIRES: pieces with places of their own.
  void BringWhole(int32_t layer, std::span<const int64_t> pieces, int32_t chunk);
  bool IsHere(int32_t layer, int32_t block, size_t offset) const;
  void SetAway(int64_t piece, bool away);
  void ForgetAdopted();
  void SaveByCopy();

  kernels::Backend& backend_;
  const KvMemoryOptions options_;
  kernels::Buffer arena_;
  kernels::Buffer shared_;  // of the layers from options_.shared.first_layer on
  std::unique_ptr<kernels::SharedKv> shared_kv_;
  double pin_seconds_ = 0;
  std::vector<Piece> pieces_;  // [layers][blocks]; empty without a store
  std::vector<Block> blocks_;
  std::vector<Frame> frames_;
  std::vector<int32_t> free_frames_;
  uint32_t pass_ = 2;        // number of the pass; frames that nobody has used yet say 0
  int64_t unused_hand_ = 0;  // frames that EvictUnused has looked at in this pass
  int64_t next_unused_ = 0;  // where it goes on
  // Where EvictLatest goes on for a piece of layer latest_from_; -1: it begins anew.
  int32_t latest_from_ = -1, latest_layer_ = 0, latest_block_ = 0;
  int64_t clean_frames_ = 0;  // resident and saved, of those that may be taken
  int32_t own_layers_ = 0;    // tiered: whose pieces have frames of their own, [0, own_frames_)
  int32_t own_frames_ = 0;
  std::byte* scarce_pool_ = nullptr;  // of frame own_frames_
  uint32_t pin_group_ = 1;
  Queue unsaved_;                // of sealed blocks, to be saved when frames get scarce
  Queue wanted_;                 // to be saved in any case
  Queue to_copy_;                // the same, of pieces at places of their own (kv_memory_own.cc)
  std::span<AsideRead> asides_;  // of the GetAsides that waits, with ascending tags
  size_t asides_left_ = 0;
  absl::flat_hash_map<uint64_t, Saving> saves_;
  struct Loading {
    int64_t piece = 0;
    int32_t chunk = 0;
    uint64_t bytes = 0;
  };
  absl::flat_hash_map<uint64_t, Loading> loads_;
  // Of own_frames.
  std::vector<int64_t> away_;  // [layers] pieces; empty unless own_frames
  absl::flat_hash_map<int64_t, Pages>
      partial_;                         // by piece: of those of which a page is here or wanted
  std::vector<int64_t> wanted_pieces_;  // of one layer
  kernels::Buffer bounce_, outgoing_;   // shared memory, for what the host cannot reach: in, out
  struct Copied {
    int64_t piece = 0;
    uint32_t generation = 0;
    const std::byte* content = nullptr;  // in outgoing_
  };
  std::vector<Copied> copied_;  // to be saved
  std::vector<int32_t>
      adopted_;  // blocks, since the device last forgot what it kept of their places
  // Blocks with the same name in this memory: what the store has is theirs together.
  struct Named {
    int32_t blocks = 0;
    int32_t held = 0;
  };
  absl::flat_hash_map<std::array<uint8_t, 32>, Named> names_;
  absl::flat_hash_map<Digest, int64_t> unsaved_kept_;  // by tenant, pieces; none is zero
  KvEventLog* events_ = nullptr;
  KvTier store_tier_ = KvTier::kDisk;
  uint64_t next_tag_ = 1;
  int32_t failed_saves_in_a_row_ = 0;
  std::vector<Chunk> chunks_;  // of the pass
  std::vector<storage::Completion> completions_;
  std::vector<storage::Completion> foreign_, handed_;
  KvMemoryStats stats_;
};

template <typename Done, typename Foreign>
void KvMemory::Wait(Done done, Foreign foreign) {
  const int64_t begin = NowNs();
  while (true) {
    handed_.swap(foreign_);  // `foreign` may put some back
    for (const storage::Completion& completion : handed_) foreign(completion);
    handed_.clear();
    if (done()) break;
    // Reads and writes end by their deadlines, so this does.
    Poll(std::chrono::milliseconds(100));
  }
  ++stats_.waits;
  stats_.wait_ns += NowNs() - begin;
}

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_MEMORY_H_
