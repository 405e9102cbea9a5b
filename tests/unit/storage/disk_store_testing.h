// A DiskStore over a temporary directory, small enough that every path is taken, with faults.
#ifndef WINNOW_TESTS_UNIT_STORAGE_DISK_STORE_TESTING_H_
#define WINNOW_TESTS_UNIT_STORAGE_DISK_STORE_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "storage/disk_store.h"
#include "tests/fault/faulty_ring.h"
#include "tests/unit/storage/store_client.h"

namespace winnow::storage {

// Lets writes fail or hang, and a real index below.
struct IndexFaults {
  std::atomic<bool> fail = false;
  std::atomic<bool> hang = false;

  void WaitWhileHung() const { hang.wait(true); }
  void Release() {
    hang = false;
    hang.notify_all();
  }
};

// Something to hand out copies of, and what is ready once the last of them is gone.
template <typename T>
struct Watched {
  std::shared_ptr<T> object;
  std::future<void> gone;
};
template <typename T>
Watched<T> MakeWatched() {
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> gone = promise->get_future();
  return {std::shared_ptr<T>(new T,
                             [promise](T* object) {
                               delete object;
                               promise->set_value();
                             }),
          std::move(gone)};
}

class FaultyIndex final : public IndexDb {
 public:
  FaultyIndex(std::unique_ptr<IndexDb> inner, std::shared_ptr<IndexFaults> faults)
      : faults_(std::move(faults)), inner_(std::move(inner)) {}
  absl::Status Load(const std::function<void(const BlockKey&, std::string_view)>& entry,
                    std::string* meta) override {
    return inner_->Load(entry, meta);
  }
  absl::Status Write(const IndexBatch& batch) override {
    faults_->WaitWhileHung();
    if (faults_->fail) return absl::UnavailableError("index: injected");
    return inner_->Write(batch);
  }

 private:
  std::shared_ptr<IndexFaults> faults_;  // goes last: once it is gone RocksDB is closed
  std::unique_ptr<IndexDb> inner_;
};

class DiskStoreTest : public testing::Test {
 protected:
  static constexpr size_t kSmall = 20000;  // a payload of five pages

  DiskStoreOptions Options() {
    DiskStoreOptions options;
    options.directory = dir_.path() + "/store";
    options.capacity_bytes = 8 * 256 * 1024;
    options.segment_bytes = 256 * 1024;
    options.staging_bytes = 1 << 20;
    options.io.kind = IoEngineKind::kThreads;
    options.io.threads = 2;
    options.io.depth = 32;
    options.close_limit_ns = 60'000'000'000;  // a store that is only slow keeps no lock
    options.log = [this](const std::string& line) { log_.push_back(line); };
    options.seams.files = &files_;
    options.seams.passed = [this](const char* point) {
      if (std::string_view(point) == "put.before_index") ++commits_;
      if (std::string_view(point) == "put.published") --commits_;
    };
    options.seams.decorate_engine = [this](std::unique_ptr<IoEngine> engine) {
      return std::make_unique<FaultyRing>(std::move(engine), plan_);
    };
    options.seams.open_index =
        [this](const std::string& path) -> absl::StatusOr<std::unique_ptr<IndexDb>> {
      auto index = OpenRocksIndex(path);
      if (!index.ok()) return index.status();
      return std::make_unique<FaultyIndex>(*std::move(index), index_faults_);
    };
    return options;
  }

  absl::Status OpenStatus(const DiskStoreOptions& options) {
    client_.reset();
    store_.reset();
    commits_ = 0;
    auto store = DiskStore::Open(options, &clock_);
    if (!store.ok()) return store.status();
    store_ = *std::move(store);
    client_ = std::make_unique<StoreClient>(store_.get());
    return absl::OkStatus();
  }
  void Open(const DiskStoreOptions& options) {
    const absl::Status status = OpenStatus(options);
    ASSERT_TRUE(status.ok()) << status;
  }
  void Open() { Open(Options()); }
  void Close() {
    client_.reset();
    store_.reset();
  }
  // Until nothing moves inside, however long a busy machine takes.
  void Settle() {
    std::vector<Completion> none;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    do {
      store_->Poll(std::chrono::milliseconds(5), &none);
      if (store_->idle()) return;
    } while (std::chrono::steady_clock::now() < limit);
    ADD_FAILURE() << "does not settle";
  }

  // Until `condition` holds, however long a busy machine takes.
  template <typename Condition>
  void PollUntil(Condition condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << "never happened";
      store_->Poll(std::chrono::milliseconds(1), &done_);
    }
  }
  // Until all is done that the plan does not hold: tests that move the clock must not move it while the
  // kernel, in its own time, is at work.
  void PollUntilQuiet() {
    int quiet = 0;  // polls in a row; one may lead to the next request
    PollUntil([&] {
      quiet = plan_->passed == 0 && commits_ == 0 ? quiet + 1 : 0;
      return quiet > 3;
    });
  }

  std::string StoreDir() const { return dir_.path() + "/store"; }
  std::vector<std::string> SegmentFiles() const {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(StoreDir())) {
      if (ParseSegmentName(entry.path().filename().string())) paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  }
  uint64_t SegmentFileBytes() const {
    uint64_t bytes = 0;
    for (const std::string& path : SegmentFiles()) bytes += std::filesystem::file_size(path);
    return bytes;
  }
  static std::string ReadFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  static void WriteFile(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  TempDir dir_;
  FakeClock clock_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(TestSeed(21));
  std::shared_ptr<IndexFaults> index_faults_ = std::make_shared<IndexFaults>();
  FaultyFileSystem files_{plan_};
  std::vector<std::string> log_;
  int commits_ = 0;  // of blocks, on their way to the index
  std::vector<Completion> done_;
  std::unique_ptr<DiskStore> store_;
  std::unique_ptr<StoreClient> client_;
};

}  // namespace winnow::storage

#endif  // WINNOW_TESTS_UNIT_STORAGE_DISK_STORE_TESTING_H_
