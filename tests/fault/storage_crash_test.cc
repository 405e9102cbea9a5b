// kill -9 and power cuts, at named points of the commit and reclaim order and at random times.
//
// The child is this test binary again, running one test that does nothing unless its environment
// names a store. It writes down, in a file of its own, what it was promised; the parent opens the
// store afterwards and holds it to that.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <set>
#include <sstream>
#include <thread>

#include "tests/fault/memory_index.h"
#include "tests/unit/storage/disk_store_testing.h"

namespace winnow::storage {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBytes = 20000;
constexpr int kNumbers = 60;
// Every name that DiskStore passes.
constexpr const char* kPoints[] = {
    "segment.opened",   "segment.allocated",     "segment.header_written", "segment.ready",
    "put.placed",       "put.written",           "put.before_sync",        "put.synced",
    "put.before_index", "put.index_submitted",   "put.published",          "seal.footer_written",
    "seal.synced",      "seal.truncated",        "erase.submitted",        "reclaim.chosen",
    "reclaim.moved",    "reclaim.before_unlink", "reclaim.unlinked"};

DiskStoreOptions CrashOptions(const std::string& directory, bool evicts = true) {
  DiskStoreOptions options;
  options.directory = directory;
  options.segment_bytes = 128 * 1024;
  // Either about half of what is put fits, or all of it and every promise can be claimed.
  options.capacity_bytes = evicts ? 6 * 128 * 1024 : 64 << 20;
  options.staging_bytes = 1 << 20;
  options.io.threads = 2;
  options.io.depth = 32;
  return options;
}

// Of those nothing is left, whatever was promised.
bool IsTransient(uint64_t number) { return number % 5 == 2; }

// "p 3 17": operation 17, a Put of 3, was begun; "P 3 17": it was promised. "e", "E": an Erase.
void Note(int fd, char what, uint64_t number, uint64_t tag) {
  const std::string line =
      std::string(1, what) + " " + std::to_string(number) + " " + std::to_string(tag) + "\n";
  (void)!::write(fd, line.data(), line.size());
}

TEST(StorageCrashChild, RunsOnlyWhenAskedTo) {
  const char* directory = std::getenv("WINNOW_STORAGE_CRASH_DIR");
  if (directory == nullptr) GTEST_SKIP() << "the child of the tests below";
  const std::string point = std::getenv("WINNOW_STORAGE_CRASH_POINT");
  int countdown = std::atoi(std::getenv("WINNOW_STORAGE_CRASH_COUNT"));
  std::mt19937 random(static_cast<uint32_t>(std::atoi(std::getenv("WINNOW_STORAGE_CRASH_SEED"))));
  const int notes = ::open(std::getenv("WINNOW_STORAGE_CRASH_NOTES"),
                           O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  SystemClock clock;
  DiskStoreOptions options =
      CrashOptions(directory, std::getenv("WINNOW_STORAGE_CRASH_EVICTS")[0] == '1');
  options.io.kind = random() % 2 == 0 ? IoEngineKind::kAuto : IoEngineKind::kThreads;
  options.seams.passed = [&](const char* passed) {
    if ((point == passed || point == "any") && --countdown == 0) ::kill(::getpid(), SIGKILL);
  };
  // Wherever any thread is by then, RocksDB's included: while it opens, or later.
  const auto kill_later = [](uint32_t microseconds) {
    std::thread([microseconds] {
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
      ::kill(::getpid(), SIGKILL);
    }).detach();
  };
  const bool while_opening = point == "time" && random() % 4 == 0;
  if (while_opening) kill_later(random() % 60'000);
  auto store = DiskStore::Open(options, &clock);
  ASSERT_TRUE(store.ok()) << store.status();
  if (point == "time" && !while_opening) kill_later(random() % 120'000);
  std::map<uint64_t, std::pair<char, uint64_t>> running;
  std::vector<Completion> done;
  // Tags go on where the life before ended, so that the order of all lives is known.
  uint64_t tag = static_cast<uint64_t>(std::atoll(std::getenv("WINNOW_STORAGE_CRASH_TAG")));
  for (int step = 0; step < 400; ++step) {
    const uint64_t number = random() % kNumbers;
    const BlockId id = IdOf(number);
    ++tag;
    if (random() % 6 == 0) {
      Note(notes, 'e', number, tag);
      running[tag] = {'E', number};
      (*store)->Erase(tag, id.key);
    } else {
      Note(notes, 'p', number, tag);
      running[tag] = {'P', number};
      (*store)->Put(
          tag, id, BytesOf(id, kBytes),
          {.priority = static_cast<uint8_t>(number % 4), .transient = IsTransient(number)});
    }
    done.clear();
    (*store)->Poll(std::chrono::microseconds(random() % 500), &done);
    for (const Completion& completion : done) {
      if (completion.outcome != Outcome::kOk) continue;
      const auto [what, which] = running.at(completion.tag);
      Note(notes, what, which, completion.tag);
    }
  }
  ::kill(::getpid(), SIGKILL);  // the point was not reached often enough: a kill at the end
}

// Runs the child until it dies. Returns how: its wait status.
int RunChild(const std::string& directory, const std::string& notes, const std::string& point,
             int count, uint32_t seed, bool evicts, uint64_t tag) {
  std::vector<std::string> environment = {"WINNOW_STORAGE_CRASH_DIR=" + directory,
                                          "WINNOW_STORAGE_CRASH_NOTES=" + notes,
                                          "WINNOW_STORAGE_CRASH_POINT=" + point,
                                          "WINNOW_STORAGE_CRASH_COUNT=" + std::to_string(count),
                                          "WINNOW_STORAGE_CRASH_SEED=" + std::to_string(seed),
                                          "WINNOW_STORAGE_CRASH_EVICTS=" + std::to_string(evicts),
                                          "WINNOW_STORAGE_CRASH_TAG=" + std::to_string(tag)};
  for (char** e = environ; *e != nullptr; ++e) environment.emplace_back(*e);
  std::vector<char*> envp;
  for (std::string& e : environment) envp.push_back(e.data());
  envp.push_back(nullptr);
  std::string program = "/proc/self/exe";
  std::string filter = "--gtest_filter=StorageCrashChild.*";
  std::string brief = "--gtest_brief=1";
  char* argv[] = {program.data(), filter.data(), brief.data(), nullptr};
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::execve(program.c_str(), argv, envp.data());
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

class StorageCrash : public testing::Test {
 protected:
  // One life: killed somewhere, opened again, held to its promises.
  void Round(const std::string& point, int count, uint32_t seed) {
    SCOPED_TRACE(testing::Message() << point << " x" << count << " seed " << seed);
    const bool evicts = point.starts_with("reclaim") || seed % 2 == 0;
    const std::string directory = dir_.path() + (evicts ? "/evicts" : "/holds");
    const std::string notes = directory + ".notes";
    const int status = RunChild(directory, notes, point, count, seed, evicts, tag_);
    tag_ += 1000;
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    // The last operation on each number over all lives so far, and whether it was promised.
    struct Last {
      char what = 0;
      uint64_t tag = 0;
      bool promised = false;
    };
    std::map<uint64_t, Last> last;
    std::istringstream lines(NotesIn(notes));
    char what;
    uint64_t number;
    uint64_t tag;
    while (lines >> what >> number >> tag) {
      Last& l = last[number];
      if (what == 'p' || what == 'e') {
        l = {what, tag, false};
      } else if (l.tag == tag) {
        l.promised = true;
      }
    }
    // What is promised and what is erased holds for a rebuilt index, too.
    if (seed % 5 == 0) fs::remove_all(directory + "/index");
    DiskStoreOptions options = CrashOptions(directory, evicts);
    // A machine that is slow must neither miss a block, nor keep the next child out.
    options.read_deadline_ns = options.close_limit_ns = 60'000'000'000;
    auto store = DiskStore::Open(options, &clock_);
    ASSERT_TRUE(store.ok()) << store.status();
    StoreClient client(store->get());
    for (uint64_t i = 0; i < kNumbers; ++i) {
      const Reason reason = client.GetAndCheck(IdOf(i), kBytes);
      ASSERT_TRUE(reason == Reason::kNone || reason == Reason::kAbsent) << ReasonName(reason);
      found_ += reason == Reason::kNone;
      if (IsTransient(i)) {
        ASSERT_EQ(reason, Reason::kAbsent) << "transient block " << i;
        continue;
      }
      if (!last.count(i) || !last[i].promised) continue;
      if (last[i].what == 'e') {
        ASSERT_EQ(reason, Reason::kAbsent) << "erased block " << i;
      } else if (!evicts) {
        ASSERT_EQ(reason, Reason::kNone) << "promised block " << i;
      }
      ++claims_;
    }
    std::vector<Completion> none;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!(*store)->idle()) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << "does not settle";
      (*store)->Poll(std::chrono::milliseconds(5), &none);
    }
    uint64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(directory)) {
      if (ParseSegmentName(entry.path().filename().string())) bytes += entry.file_size();
    }
    EXPECT_EQ((*store)->stats().used_bytes, bytes);
    EXPECT_LE(bytes, options.capacity_bytes);
  }
  // Runs `rounds` lives, and more while too little was found: on a busy machine a child does not get far before it is killed.
  void Rounds(int rounds, const std::function<void()>& round) {
    const auto enough = [this] { return found_ > 100 && claims_ > 100; };
    for (int i = 0; i < rounds || (!enough() && i < 10 * rounds); ++i) {
      round();
      if (HasFailure()) return;
    }
    EXPECT_GT(found_, 100);
    EXPECT_GT(claims_, 100);
  }
  static std::string NotesIn(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  TempDir dir_;
  SystemClock clock_;
  uint64_t tag_ = 1;
  int found_ = 0;
  int claims_ = 0;
};

TEST_F(StorageCrash, KilledAtEveryNamedPointTheStoreOpensAndHoldsNothingWrong) {
  uint32_t seed = TestSeed(500);
  for (const char* point : kPoints) {
    Round(point, 1 + static_cast<int>(seed % 3), seed);
    Round(point, 3, seed + 1);
    seed += 1;
    if (HasFailure()) return;
  }
  EXPECT_GT(found_, 100);
  EXPECT_GT(claims_, 100);
}

TEST_F(StorageCrash, KilledAnywhereTheStoreOpensAndHoldsNothingWrong) {
  std::mt19937 random(TestSeed(900));
  Rounds(TestRounds(30), [&] {
    const int count = 1 + static_cast<int>(random() % 900);
    Round("any", count, static_cast<uint32_t>(random()));
  });
}

TEST_F(StorageCrash, KilledAtAnyTimeTheStoreOpensAndHoldsNothingWrong) {
  std::mt19937 random(TestSeed(1700));
  Rounds(TestRounds(32), [&] { Round("time", 0, static_cast<uint32_t>(random())); });
}

// A power cut also takes what was written and not synced: any sector of it may be missing. What was
// promised before must be there; the rest is a miss.
TEST(StoragePowerCut, WhatWasPromisedIsThereWhatWasNotIsAMiss) {
  const uint32_t first_seed = TestSeed(1300);
  for (int round = 0; round < TestRounds(30); ++round) {
    const uint32_t seed = first_seed + static_cast<uint32_t>(round);
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    TempDir dir;
    FakeClock clock;
    auto plan = std::make_shared<FaultPlan>(seed);
    plan->track_writes = true;
    plan->reorder = true;
    auto index = std::make_shared<MemoryIndexData>();
    DiskStoreOptions options = CrashOptions(dir.path() + "/store");
    options.capacity_bytes = 64 << 20;  // nothing is evicted here
    options.io.kind = IoEngineKind::kThreads;
    options.seams.decorate_engine = [&](std::unique_ptr<IoEngine> engine) {
      return std::make_unique<FaultyRing>(std::move(engine), plan);
    };
    options.seams.open_index = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
      return std::make_unique<MemoryIndex>(index);
    };
    std::set<uint64_t> promised;
    const std::string after = dir.path() + "/after";
    auto index_after = std::make_shared<MemoryIndexData>();
    {
      auto store = DiskStore::Open(options, &clock);
      ASSERT_TRUE(store.ok()) << store.status();
      std::vector<Completion> done;
      const int steps = 1 + static_cast<int>(random() % 60);
      for (int i = 0; i < steps; ++i) {
        (*store)->Put(i, IdOf(i), BytesOf(IdOf(i), kBytes), {});
        (*store)->Poll(std::chrono::microseconds(random() % 300), &done);
      }
      for (const Completion& completion : done) {
        if (completion.outcome == Outcome::kOk) promised.insert(completion.tag);
      }
      // The cut: the index as it is now (it is synced), the files without what was not.
      {
        const MutexLock lock(index->mutex);
        index_after->entries = index->entries;
        index_after->meta = index->meta;
      }
      fs::copy(options.directory, after);
      plan->LosePower(after);
      plan->track_writes = false;
    }
    const bool lose_index = random() % 3 == 0;
    options.directory = after;
    options.seams.decorate_engine = nullptr;
    options.seams.open_index = [&](const std::string&) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
      return std::make_unique<MemoryIndex>(lose_index ? std::make_shared<MemoryIndexData>()
                                                      : index_after);
    };
    auto store = DiskStore::Open(options, &clock);
    ASSERT_TRUE(store.ok()) << store.status();
    StoreClient client(store->get());
    for (uint64_t i = 0; i < 60; ++i) {
      const Reason reason = client.GetAndCheck(IdOf(i), kBytes);
      if (promised.count(i)) {
        ASSERT_EQ(reason, Reason::kNone) << "promised block " << i;
      } else {
        ASSERT_TRUE(reason == Reason::kNone || reason == Reason::kAbsent) << ReasonName(reason);
      }
    }
  }
}

}  // namespace
}  // namespace winnow::storage
