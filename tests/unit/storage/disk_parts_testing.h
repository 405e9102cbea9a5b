// The parts of a DiskStore without a DiskStore: over a temporary directory, a clock that is moved by hand, a file system and an
// engine of I/O that fail when told to, and an index in memory. The test is the parts' listener.
#ifndef WINNOW_TESTS_UNIT_STORAGE_DISK_PARTS_TESTING_H_
#define WINNOW_TESTS_UNIT_STORAGE_DISK_PARTS_TESTING_H_

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "storage/committer.h"
#include "storage/disk_environment.h"
#include "storage/entry_table.h"
#include "storage/erase_log.h"
#include "storage/segment_log.h"
#include "storage/waiting_reader.h"
#include "tests/fault/faulty_ring.h"
#include "tests/fault/memory_index.h"
#include "tests/unit/storage/storage_testing.h"

namespace winnow::storage {

class DiskPartsTest : public testing::Test,
                      public SegmentLog::Listener,
                      public Committer::Listener {
 protected:
  static constexpr uint64_t kSegmentBytes = 64 * kPageBytes;
  static constexpr size_t kPayload = 3 * kPageBytes;  // a block of four pages

  void SetUp() override {
    directory_ = dir_.path() + "/store";
    std::filesystem::create_directory(directory_);
    Restart();
  }

  void TearDown() override { Drain(); }
  // The kernel gives back every buffer before memory and files go.
  void Drain() {
    if (env_ == nullptr) return;
    EXPECT_TRUE(env_->ring().Drain(std::chrono::seconds(30)));
  }

  // The parts anew over the same directory, as after a restart; the index stays.
  void Restart() {
    Drain();
    committer_.reset();
    reader_.reset();
    table_.reset();
    log_.reset();
    order_.reset();
    env_.reset();
    DiskStoreOptions options;
    options.directory = directory_;
    options.segment_bytes = kSegmentBytes;
    options.capacity_bytes = 6 * kSegmentBytes;
    options.log = [this](const std::string& line) { lines_.push_back(line); };
    options.seams.files = &files_;
    options.seams.open_index =
        [this](const std::string&) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
      return std::make_unique<MemoryIndex>(index_);
    };
    env_ = std::make_unique<DiskEnvironment>(options, &clock_,
                                             std::make_shared<DiskEnvironment::Opening>());
    env_->SetRing(std::make_unique<FaultyRing>(MakeThreadsEngine(32, 2), plan_), false);
    env_->SetStoreSeconds(0);
    order_ = std::make_unique<EvictionOrder>(kSegmentBytes);
    log_ = std::make_unique<SegmentLog>(*env_, *order_, *this);
    auto directory = files_.Open(directory_, {.directory = true});
    ASSERT_TRUE(directory.ok()) << directory.status();
    log_->SetDirectory(*std::move(directory));
    table_ = std::make_unique<EntryTable>(*log_, *order_, options.capacity_bytes / 2);
    committer_ = std::make_unique<Committer>(*env_, *log_, *table_, *this);
    reader_ = std::make_unique<WaitingReader>(*env_, *log_,
                                              [this](const IoResult& result) { OnIo(result); });
  }
  void StartIndex() {
    auto erase_log = std::make_unique<EraseLog>(&files_, directory_);
    ASSERT_TRUE(erase_log->Start(1, UINT64_MAX, 1).ok());
    committer_->Start(
        std::make_unique<IndexWriter>(std::make_unique<MemoryIndex>(index_), std::move(erase_log)));
  }

  void OnIo(const IoResult& result) {
    const auto purpose = static_cast<SegmentIo>(result.tag >> 56);
    const uint64_t id = result.tag & ((uint64_t{1} << 56) - 1);
    if (purpose == SegmentIo::kReadSync) return reader_->OnIo(id, result);
    if (purpose != SegmentIo::kNone) return log_->OnIo(purpose, id, result);
    Block& block = blocks_.at(static_cast<uint32_t>(id));
    --block.segment->writing;
    if (result.error == 0) {
      log_->Written(block.segment, static_cast<uint32_t>(id));
    } else {
      log_->Break(block.segment, result.error);
      OnLost(static_cast<uint32_t>(id));
    }
  }
  void Poll() {
    log_->Advance();
    std::vector<IoResult> results;
    env_->ring().Poll(std::chrono::milliseconds(1), &results);
    for (const IoResult& result : results) OnIo(result);
    if (committer_->started()) committer_->Poll();
  }
  // Until `condition` holds, however long a busy machine takes.
  template <typename Condition>
  void PollUntil(Condition condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << "never happened";
      Poll();
    }
  }

  // A block that is appended; `operation` is its number, and IdOf(number) its identity.
  struct Block {
    PageMemory memory{BlockBytesFor(kPayload)};
    std::shared_ptr<const BlockRecord> record;
    Segment* segment = nullptr;
  };
  // False: the log has no place for it, and never will.
  bool Append(uint32_t number, bool transient = false) {
    Segment* segment = nullptr;
    bool never = false;
    PollUntil([&] {
      segment = log_->SegmentFor(BlockBytesFor(kPayload), 0, false, &never);
      return segment != nullptr || never || no_segments_ > 0 || (room_comes_ && rooms_asked_ > 0);
    });
    if (segment == nullptr) return false;
    Block& block = blocks_[number];
    block.memory = PageMemory(BlockBytesFor(kPayload));
    const BlockId id = IdOf(number);
    const std::vector<std::byte> payload = BytesOf(id, kPayload);
    std::memcpy(block.memory.bytes().data() + kPageBytes, payload.data(), payload.size());
    BlockPlace place = log_->NextPlace(*segment);
    place.transient = transient;
    block.record =
        std::make_shared<const BlockRecord>(EncodeBlock(id, place, kPayload, block.memory.bytes()));
    block.segment = segment;
    log_->Append(segment, *block.record, block.memory.bytes(), number);
    return true;
  }
  // Appends it, waits for its sync, and enters it into the table.
  void Store(uint32_t number) {
    ASSERT_TRUE(Append(number));
    PollUntil([&] { return synced_.contains(number); });
    Enter(number);
  }
  Entry* Enter(uint32_t number) {
    const Block& block = blocks_.at(number);
    log_->Settle(block.segment);
    log_->Release(block.segment);
    Entry entry;
    entry.record = block.record;
    entry.last_use = table_->NextUse();
    return table_->Set(IdOf(number).key, entry);
  }
  // Tells the index of a block that Append has written.
  void Commit(uint32_t number, bool move = false) {
    const Block& block = blocks_.at(number);
    committer_->CommitBlocks({{number, IdOf(number).key, block.record.get(), block.segment, move}});
  }
  std::optional<BlockRecord> Indexed(uint32_t number) {
    const MutexLock lock(index_->mutex);
    const BlockKey key = IdOf(number).key;
    const auto it = index_->entries.find(key.bytes);
    if (it == index_->entries.end()) return std::nullopt;
    return DecodeIndexValue(key, it->second);
  }
  uint64_t FileBytes() const {
    uint64_t bytes = 0;
    for (const auto& file : std::filesystem::directory_iterator(directory_)) {
      if (ParseSegmentName(file.path().filename().string())) bytes += file.file_size();
    }
    return bytes;
  }

  // ---- what the parts say ----
  void OnSynced(std::span<const uint32_t> operations) override {
    ++syncs_;
    synced_.insert(operations.begin(), operations.end());
  }
  void OnLost(uint32_t operation) override { lost_.insert(operation); }
  void OnNoSegment() override { ++no_segments_; }
  bool MakeRoom() override {
    ++rooms_asked_;
    return room_comes_;
  }
  void OnCommitted(uint32_t operation) override { committed_.insert(operation); }
  void OnCommitFailed(uint32_t operation) override { commit_failed_.insert(operation); }
  void OnCommitLate(uint32_t operation) override { commit_late_.insert(operation); }
  void OnErased(uint64_t tag, Reason reason) override { erased_[tag] = reason; }

  TempDir dir_;
  std::string directory_;
  FakeClock clock_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(TestSeed(31));
  FaultyFileSystem files_{plan_};
  std::shared_ptr<MemoryIndexData> index_ = std::make_shared<MemoryIndexData>();
  std::vector<std::string> lines_;
  std::map<uint32_t, Block> blocks_;  // their memory outlives the ring
  std::set<uint32_t> synced_, lost_, committed_, commit_failed_, commit_late_;
  std::map<uint64_t, Reason> erased_;
  int syncs_ = 0, no_segments_ = 0, rooms_asked_ = 0;
  bool room_comes_ = false;

  std::unique_ptr<DiskEnvironment> env_;
  std::unique_ptr<EvictionOrder> order_;
  std::unique_ptr<SegmentLog> log_;
  std::unique_ptr<EntryTable> table_;
  std::unique_ptr<Committer> committer_;
  std::unique_ptr<WaitingReader> reader_;
};

}  // namespace winnow::storage

#endif  // WINNOW_TESTS_UNIT_STORAGE_DISK_PARTS_TESTING_H_
