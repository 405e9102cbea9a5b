// An index that says that a batch failed, and has it all the same: a restart finds what the store
// believed to be without. Whatever it finds are right bytes; what was promised is not lost by it,
// and what was erased does not come back.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <map>

#include "tests/fault/memory_index.h"
#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBytes = 20000;
constexpr uint64_t kNumbers = 40;

class StorageDenied : public DiskStoreTest {
 protected:
  DiskStoreOptions DeniedOptions(const std::string& directory) {
    DiskStoreOptions options = Options();
    options.directory = directory;
    options.segment_bytes = 128 * 1024;
    options.capacity_bytes = 6 * options.segment_bytes;
    options.health.errors_max = 1'000'000;  // it goes on as long as it can
    options.seams.open_index =
        [this](const std::string&) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
      return std::make_unique<MemoryIndex>(index_);
    };
    return options;
  }
  void Deny(std::function<bool(const IndexBatch&)> denies) {
    const MutexLock lock(index_->mutex);
    index_->denies = std::move(denies);
  }
  // Polls until nothing moves inside. An index that failed is asked again a second later, so the clock, which stands, is moved
  // when nothing else has moved for a while.
  void SettleInTime() {
    auto still_since = std::chrono::steady_clock::now();
    PollUntil([&] {
      const auto now = std::chrono::steady_clock::now();
      if (plan_->passed > 0 || commits_ > 0) still_since = now;
      if (now - still_since > std::chrono::milliseconds(50)) {
        clock_.AdvanceSeconds(1);
        still_since = now;
      }
      return store_->in_flight() == 0 && store_->idle();
    });
  }
  // What a process that is killed now leaves behind, opened by the next one.
  void Kill(const std::string& after) {
    auto left = std::make_shared<MemoryIndexData>();
    {
      const MutexLock lock(index_->mutex);
      left->entries = index_->entries;
      left->meta = index_->meta;
    }
    fs::copy(directory_, after);
    Deny(nullptr);
    SettleInTime();  // or closing waits for what only comes when the clock moves
    done_.clear();   // nobody hears of it
    Close();
    index_ = left;
    directory_ = after;
    Open(DeniedOptions(directory_));
  }
  void ExpectExact() {
    Settle();
    uint64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      if (ParseSegmentName(entry.path().filename().string())) bytes += entry.file_size();
    }
    EXPECT_EQ(store_->stats().used_bytes, bytes);
    EXPECT_LE(bytes, DeniedOptions(directory_).capacity_bytes);
  }
  bool IndexHas(const BlockId& id) {
    const MutexLock lock(index_->mutex);
    return index_->entries.contains(id.key.bytes);
  }

  std::string directory_ = dir_.path() + "/store";
  std::shared_ptr<MemoryIndexData> index_ = std::make_shared<MemoryIndexData>();
};

TEST_F(StorageDenied, APutThatFailedAndIsThereIsTakenBackOrHasTheRightBytes) {
  for (const bool at_once : {true, false}) {
    SCOPED_TRACE(at_once);
    directory_ = dir_.path() + (at_once ? "/at_once" : "/later");
    index_ = std::make_shared<MemoryIndexData>();
    Close();
    Open(DeniedOptions(directory_));
    std::shared_ptr<MemoryIndexData> left = std::make_shared<MemoryIndexData>();
    Deny([&](const IndexBatch& batch) {
      if (at_once && !batch.puts.empty()) left->entries = index_->entries;  // the mutex is held
      return !batch.puts.empty();
    });
    for (uint64_t i = 0; i < 8; ++i) {
      EXPECT_EQ(client_->Put(IdOf(i), kBytes), Reason::kIoError);
      EXPECT_EQ(client_->GetAndCheck(IdOf(i), kBytes), Reason::kAbsent);
    }
    Settle();
    for (uint64_t i = 0; i < 8; ++i) EXPECT_FALSE(IndexHas(IdOf(i))) << i;
    if (at_once) {
      const MutexLock lock(index_->mutex);
      ASSERT_TRUE(left->entries.contains(IdOf(7).key.bytes));
      index_->entries = left->entries;
    }
    Kill(directory_ + "+");
    for (uint64_t i = 0; i < 8; ++i) {
      const Reason reason = client_->GetAndCheck(IdOf(i), kBytes);
      EXPECT_TRUE(reason == Reason::kAbsent || (at_once && reason == Reason::kNone)) << i;
    }
    ExpectExact();
  }
}

// The index was told of a block's new place, said no, and has it. The file of that place has no
// block that lives, for all that the store knows, and would go: with the only place that a restart
// finds the block by.
TEST_F(StorageDenied, ABlockWhoseMoveFailedIsThereAfterARestart) {
  DiskStoreOptions options = DeniedOptions(directory_);
  options.health = {};
  Open(options);
  const auto put = [this](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      ASSERT_EQ(client_->Put(IdOf(i), kBytes), Reason::kNone) << i;
    }
  };
  const auto erase = [this](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      ASSERT_EQ(client_->Erase(IdOf(i).key), Reason::kNone) << i;
    }
  };
  put(0, 6);  // five fill a segment
  erase(2, 5);
  Deny([](const IndexBatch& batch) {
    return std::any_of(batch.puts.begin(), batch.puts.end(), [](const auto& put) {
      return put.first == IdOf(0).key || put.first == IdOf(1).key;
    });
  });
  store_->CollectGarbage(0.9);
  ASSERT_GT(store_->stats().io_errors, 0u) << "nothing was moved";
  Deny(nullptr);
  clock_.AdvanceSeconds(10);  // so many errors stopped the writing
  const size_t segments = store_->segments();
  put(6, 16);
  erase(5, 16);
  Settle();
  ASSERT_LE(store_->segments(), segments) << "the file of the new place is still there";
  Kill(dir_.path() + "/1");
  for (uint64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(client_->GetAndCheck(IdOf(i), kBytes), Reason::kNone) << i;
  }
  ExpectExact();
}

TEST_F(StorageDenied, OverManyLivesNothingIsWrongNothingPromisedIsLostAndAllBytesAreCounted) {
  const uint32_t first_seed = TestSeed(2300);
  int found = 0, claims = 0;
  uint64_t denied = 0;
  for (int round = 0; round < TestRounds(12); ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << first_seed + static_cast<uint32_t>(round));
    std::mt19937 random(first_seed + static_cast<uint32_t>(round));
    Close();
    directory_ = dir_.path() + "/" + std::to_string(round);
    index_ = std::make_shared<MemoryIndexData>();
    Open(DeniedOptions(directory_));
    struct Last {
      Operation operation = Operation::kErase;
      bool transient = false;
      uint64_t tag = 0;
      bool promised = false;
    };
    std::map<uint64_t, Last> last;  // by number
    uint64_t tag = 1;
    for (int life = 0; life < 4; ++life) {
      std::map<uint64_t, uint64_t> numbers;  // by tag
      std::mt19937 of_index(random());
      const auto share = static_cast<uint32_t>(random() % 60);
      Deny([&denied, of_index, share](const IndexBatch&) mutable {
        const bool denies = of_index() % 100 < share;
        denied += denies;
        return denies;
      });
      const auto hear = [&] {
        for (const Completion& completion : done_) {
          Last& l = last[numbers.at(completion.tag)];
          if (l.tag == completion.tag) l.promised = completion.outcome == Outcome::kOk;
        }
        done_.clear();
      };
      for (int step = 0; step < 120; ++step) {
        const uint64_t number = random() % kNumbers;
        const BlockId id = IdOf(number);
        const bool transient = random() % 4 == 0;
        numbers[++tag] = number;
        if (random() % 6 == 0) {
          last[number] = {Operation::kErase, false, tag};
          store_->Erase(tag, id.key);
        } else {
          last[number] = {Operation::kPut, transient, tag};
          store_->Put(tag, id, BytesOf(id, kBytes),
                      {.priority = static_cast<uint8_t>(random() % 4), .transient = transient});
        }
        store_->SetInUse(IdOf(random() % kNumbers).key, random() % 2 == 0);
        store_->Poll(std::chrono::microseconds(random() % 500), &done_);
        hear();
      }
      // Every second process is killed when all is answered, so that even of a disk that has hardly moved
      // until then there is something to be found.
      if (life % 2 == 1) {
        SettleInTime();
        hear();
      }
      std::map<uint64_t, bool> held;  // now: not evicted
      for (uint64_t i = 0; i < kNumbers; ++i) held[i] = store_->Find(IdOf(i)).has_value();
      Kill(directory_ + "+");
      for (uint64_t i = 0; i < kNumbers; ++i) {
        const Reason reason = client_->GetAndCheck(IdOf(i), kBytes);
        found += reason == Reason::kNone;
        const Last& l = last[i];
        if (!l.promised) continue;
        ++claims;
        if (l.operation == Operation::kErase) {
          ASSERT_NE(reason, Reason::kNone) << "erased block " << i;
        } else if (!l.transient && held[i]) {
          ASSERT_EQ(reason, Reason::kNone) << "promised block " << i;
        }
      }
      ExpectExact();
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(found, 100);
  EXPECT_GT(claims, 100);
  EXPECT_GT(denied, 100u);
}

}  // namespace
}  // namespace winnow::storage
