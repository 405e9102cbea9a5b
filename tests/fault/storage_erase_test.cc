// What was erased stays erased, also when the index is lost and rebuilt from segments that still
// hold the bytes. Where that cannot be known, blocks are missing, never back.
#include "storage/erase_log.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

namespace fs = std::filesystem;

class StorageErase : public DiskStoreTest {
 protected:
  static constexpr int kBlocks = 30;

  void PutAll() {
    for (int i = 0; i < kBlocks; ++i) ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
  }
  void LoseIndexAndOpen() {
    Close();
    fs::remove_all(StoreDir() + "/index");
    Open();
    ASSERT_TRUE(store_->recovery().index_rebuilt);
  }
  int Hits() {
    int hits = 0;
    for (int i = 0; i < kBlocks; ++i)
      hits += client_->GetAndCheck(IdOf(i), kSmall) == Reason::kNone;
    return hits;
  }
  std::string LogPath() const { return StoreDir() + "/erased"; }
};

TEST_F(StorageErase, ErasedBlocksStayErasedWhenTheIndexIsRebuilt) {
  Open();
  PutAll();
  for (int i = 0; i < kBlocks; i += 3) ASSERT_EQ(client_->Erase(IdOf(i).key), Reason::kNone);
  LoseIndexAndOpen();
  EXPECT_EQ(store_->recovery().hidden_blocks, kBlocks / 3);
  for (int i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), i % 3 == 0 ? Reason::kAbsent : Reason::kNone);
  }
  LoseIndexAndOpen();  // and a second time
  EXPECT_EQ(Hits(), kBlocks - kBlocks / 3);
}

TEST_F(StorageErase, ABlockThatWasPutAgainAfterItsErasureIsRebuilt) {
  Open();
  PutAll();
  ASSERT_EQ(client_->Erase(IdOf(3).key), Reason::kNone);
  ASSERT_EQ(client_->Put(IdOf(3), kSmall), Reason::kNone);
  ASSERT_EQ(client_->Erase(IdOf(4).key), Reason::kNone);
  Open();  // a new life: its sequences come after all others
  ASSERT_EQ(client_->Put(IdOf(4), kSmall), Reason::kNone);
  LoseIndexAndOpen();
  EXPECT_EQ(Hits(), kBlocks);
}

// The index has forgotten it, its bytes are still there: evicted, say, and its file not deleted.
TEST_F(StorageErase, ErasingWhatTheIndexDoesNotKnowHoldsForARebuiltOne) {
  Open();
  PutAll();
  Close();
  fs::copy(StoreDir(), dir_.path() + "/all", fs::copy_options::recursive);
  Open();
  for (int i = 0; i < 5; ++i) ASSERT_EQ(client_->Erase(IdOf(i).key), Reason::kNone);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(client_->Erase(IdOf(i).key), Reason::kAbsent);
  Close();
  // As if the erasures above had been an eviction, with the older log.
  fs::remove(LogPath());
  fs::copy(dir_.path() + "/all/erased", LogPath());
  Open();
  EXPECT_EQ(client_->Erase(IdOf(2).key), Reason::kAbsent);
  LoseIndexAndOpen();
  EXPECT_EQ(client_->GetAndCheck(IdOf(1), kSmall), Reason::kNone) << "evicted ones may come back";
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kAbsent);
}

// Killed between the list and the index: half an erasure is made a whole one. Otherwise the next
// Put would find the block in the index, promise it, and a rebuilt index would hide it.
TEST_F(StorageErase, AnErasureThatTheIndexMissedIsCarriedOutAtTheNextStart) {
  Open();
  PutAll();
  Close();
  fs::copy(StoreDir() + "/index", dir_.path() + "/before", fs::copy_options::recursive);
  Open();
  ASSERT_EQ(client_->Erase(IdOf(2).key), Reason::kNone);
  Close();
  fs::remove_all(StoreDir() + "/index");
  fs::copy(dir_.path() + "/before", StoreDir() + "/index", fs::copy_options::recursive);
  Open();
  EXPECT_FALSE(store_->recovery().index_rebuilt);
  EXPECT_EQ(client_->GetAndCheck(IdOf(2), kSmall), Reason::kAbsent);
  ASSERT_EQ(client_->Put(IdOf(2), kSmall), Reason::kNone);
  LoseIndexAndOpen();
  EXPECT_EQ(Hits(), kBlocks);
}

TEST_F(StorageErase, ABlockErasedWhileItMovesHasNoCopyThatOutlivesIt) {
  Open();
  int i = 0;
  for (; store_->stats().moved_blocks == 0; ++i) {
    ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
    for (int j = 0; j < i; j += 2) client_->GetAndCheck(IdOf(j), kSmall);
  }
  Settle();
  std::set<std::byte*> held;
  plan_->hold = [&held](const IoRequest& request) {
    if (request.kind == IoKind::kRead) held.insert(request.data);
    return request.kind == IoKind::kRead;
  };
  for (int puts = 0; held.empty() && puts < 50; ++puts) {
    store_->Put(puts, IdOf(1000 + puts), BytesOf(IdOf(1000 + puts), kSmall), {});
    PollUntil([&] { return !held.empty() || store_->in_flight() == 0; });
  }
  ASSERT_FALSE(held.empty()) << "nothing moves";
  for (int j = 0; j < i; ++j) store_->Erase(10'000 + j, IdOf(j).key);
  plan_->hold = nullptr;
  client_->Finish();
  Settle();
  LoseIndexAndOpen();
  for (int j = 0; j < i; ++j) EXPECT_FALSE(store_->Find(IdOf(j)).has_value()) << j;
}

// A copy that is written late must not get into the index behind what came after the block it is of:
// that would hide a promise, and bring back what was erased. Also where the index has not taken that
// yet.
TEST_F(StorageErase, ABlockErasedOrReplacedWhileItsCopyIsWrittenStaysSo) {
  for (const bool index_hangs : {false, true}) {
    SCOPED_TRACE(index_hangs);
    Close();
    fs::remove_all(StoreDir());
    Open();
    int i = 0;
    for (; store_->stats().moved_blocks == 0; ++i) {
      ASSERT_EQ(client_->Put(IdOf(i), kSmall), Reason::kNone);
      for (int j = 0; j < i; j += 2) client_->GetAndCheck(IdOf(j), kSmall);
    }
    Settle();
    // Of blocks that are stored already; whatever else is written is not held.
    std::map<std::byte*, int> held;
    bool moving = true;
    plan_->hold = [&](const IoRequest& request) {
      if (held.contains(request.data)) return true;
      if (!moving || request.kind != IoKind::kWrite) return false;
      for (int j = 0; j < i; ++j) {
        if (std::memcmp(request.data + 40, IdOf(j).key.bytes.data(), 40) != 0) continue;
        held[request.data] = j;
        return true;
      }
      return false;
    };
    for (int puts = 0; held.size() < 2 && puts < 50; ++puts) {
      store_->Put(puts, IdOf(1000 + puts), BytesOf(IdOf(1000 + puts), kSmall), {});
      PollUntil([&] { return held.size() >= 2 || store_->in_flight() == 0; });
    }
    ASSERT_GE(held.size(), 2u) << "nothing moves";
    moving = false;
    const int replaced = held.begin()->second, erased = held.rbegin()->second;
    PollUntil([&] { return store_->in_flight() == 0; });
    index_faults_->hang = index_hangs;
    store_->Put(1, IdOf(replaced), BytesOf(IdOf(replaced), kSmall / 2), {});
    store_->Erase(2, IdOf(erased).key);
    PollUntil([&] { return index_hangs ? commits_ > 0 : store_->in_flight() == 0; });
    plan_->hold = nullptr;
    int quiet = 0;
    PollUntil([&] { return (quiet = plan_->passed == 0 ? quiet + 1 : 0) > 5; });
    index_faults_->Release();
    Settle();
    Close();
    fs::remove(LogPath());  // the index alone is asked
    Open();
    ASSERT_FALSE(store_->recovery().index_rebuilt);
    EXPECT_EQ(client_->GetAndCheck(IdOf(replaced), kSmall / 2), Reason::kNone);
    EXPECT_EQ(client_->GetAndCheck(IdOf(erased), kSmall), Reason::kAbsent);
  }
}

TEST_F(StorageErase, ALostOrDamagedLogHidesWhatIsOlderAndNothingElse) {
  for (int kind = 0; kind < 4; ++kind) {
    SCOPED_TRACE(kind);
    Close();
    fs::remove_all(StoreDir());
    Open();
    PutAll();
    for (int i = 0; i < 5; ++i) ASSERT_EQ(client_->Erase(IdOf(i).key), Reason::kNone);
    Close();
    std::string bytes = ReadFile(LogPath());
    ASSERT_EQ(bytes.size(), kPageBytes + 5 * kErasureBytes);
    if (kind == 0) fs::remove(LogPath());
    if (kind == 1) WriteFile(LogPath(), bytes.substr(0, bytes.size() - 7));
    if (kind == 2) bytes[kPageBytes + kErasureBytes + 3] ^= 4;
    if (kind == 3) bytes[9] ^= 1;
    if (kind >= 2) WriteFile(LogPath(), bytes);
    // The index knows what is erased: nothing is lost with it.
    Open();
    EXPECT_EQ(Hits(), kBlocks - 5);
    // Without it, nobody knows; what is newer than the doubt is safe.
    const int fresh = 1000;
    for (int i = 0; i < 12; ++i) ASSERT_EQ(client_->Put(IdOf(fresh + i), kSmall), Reason::kNone);
    LoseIndexAndOpen();
    EXPECT_EQ(Hits(), 0);
    for (int i = 0; i < 12; ++i) {
      EXPECT_EQ(client_->GetAndCheck(IdOf(fresh + i), kSmall), Reason::kNone);
    }
    EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  }
}

TEST_F(StorageErase, LostTogetherWithTheIndexEverythingIsAMiss) {
  Open();
  PutAll();
  ASSERT_EQ(client_->Erase(IdOf(0).key), Reason::kNone);
  Close();
  fs::remove(LogPath());
  LoseIndexAndOpen();
  EXPECT_EQ(Hits(), 0);
  EXPECT_EQ(store_->stats().used_bytes, SegmentFileBytes());
  PutAll();
  LoseIndexAndOpen();
  EXPECT_EQ(Hits(), kBlocks);
}

TEST_F(StorageErase, AnErasureThatCouldNotBeWrittenDownSaysSoAndTheNextOneWritesBoth) {
  Open();
  PutAll();
  for (const Call call : {Call::kWrite, Call::kDatasync}) {
    plan_->FailAll(call, EIO);
    EXPECT_EQ(client_->Erase(IdOf(call == Call::kWrite).key), Reason::kIoError) << "may come back";
    plan_->Heal();
  }
  ASSERT_EQ(client_->Erase(IdOf(2).key), Reason::kNone);
  LoseIndexAndOpen();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client_->GetAndCheck(IdOf(i), kSmall), Reason::kAbsent);
  EXPECT_EQ(Hits(), kBlocks - 3);
}

TEST_F(StorageErase, TheLogForgetsWhatNoSegmentCanContradict) {
  Open();
  PutAll();
  for (int i = 0; i < 100; ++i) store_->Erase(i, IdOf(i).key);
  client_->Finish();
  EXPECT_EQ(fs::file_size(LogPath()), kPageBytes + 100 * kErasureBytes);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(client_->Put(IdOf(1000 + i), kSmall), Reason::kNone);
  Open();
  EXPECT_EQ(fs::file_size(LogPath()), kPageBytes);
}

// Too many to list one by one: all that was there when the list overflowed counts as erased.
TEST_F(StorageErase, ALogThatGrowsTooLongIsBoundedAndHidesAllOlderBlocks) {
  ASSERT_EQ(::mkdir(StoreDir().c_str(), 0700), 0);
  const auto key = [](uint64_t number) {
    BlockKey key;
    std::memcpy(key.bytes.data(), &number, sizeof number);
    return key;
  };
  FileSystem files;
  {
    EraseLog log(&files, StoreDir());
    ASSERT_TRUE(log.Start(1, 1, 5).ok());
    std::vector<Erasure> erasures;
    for (uint64_t i = 0; i < EraseLog::kErasuresMax; ++i) erasures.push_back({key(i), i, 6});
    ASSERT_TRUE(log.Append(erasures).ok());
    EXPECT_EQ(log.erasures(), EraseLog::kErasuresMax);
    EXPECT_FALSE(log.Hides(key(1 << 20), 1, 5));
    ASSERT_TRUE(log.Append(std::vector<Erasure>{{key(1 << 20), 1 << 20, 7}}).ok());
  }
  EraseLog log(&files, StoreDir());
  EXPECT_EQ(log.found(), EraseLog::Found::kSound);
  EXPECT_EQ(fs::file_size(LogPath()), kPageBytes);
  EXPECT_TRUE(log.Hides(key(3), 3, 5));
  EXPECT_TRUE(log.Hides(key(1 << 21), 1 << 21, 6)) << "never erased, but who knows";
  EXPECT_FALSE(log.Hides(key(3), 1 << 22, 7));
}

// A run that could not write its life down may share its sequences with the one after it.
TEST_F(StorageErase, ALifeThatWasNotWrittenDownHidesWhatItPut) {
  Open();
  PutAll();
  Close();
  plan_->FailAll(Call::kRename, EIO);
  Open();
  ASSERT_EQ(client_->Put(IdOf(100), kSmall), Reason::kNone);
  plan_->Heal();
  EXPECT_EQ(client_->Erase(IdOf(0).key), Reason::kNone);
  LoseIndexAndOpen();
  EXPECT_EQ(Hits(), 0);
  EXPECT_EQ(client_->GetAndCheck(IdOf(0), kSmall), Reason::kAbsent);
}

}  // namespace
}  // namespace winnow::storage
