// The one file that sees RocksDB. 7.8 as packaged has known faults, so it is asked for little: no
// DeleteRange, no atomic flush, no async I/O, two memtables, few background jobs, every batch
// synced. Entries carry checksums of ours besides.
#include <sys/stat.h>

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <cstring>

#include "storage/check.h"
#include "storage/index.h"

namespace winnow::storage {
namespace {

constexpr char kBlockPrefix = 'B';
constexpr std::string_view kMetaKey = "M";

absl::Status FromRocks(const rocksdb::Status& status, const char* what) {
  if (status.ok()) return absl::OkStatus();
  const std::string message = std::string("index ") + what + ": " + status.ToString();
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(message);
  if (status.IsCorruption()) return absl::DataLossError(message);
  return absl::UnavailableError(message);
}

std::string KeyOf(const BlockKey& key) {
  std::string out(1 + key.bytes.size(), kBlockPrefix);
  std::memcpy(out.data() + 1, key.bytes.data(), key.bytes.size());
  return out;
}

class RocksIndex final : public IndexDb {
 public:
  explicit RocksIndex(std::unique_ptr<rocksdb::DB> db) : db_(std::move(db)) {}

  absl::Status Load(const std::function<void(const BlockKey&, std::string_view)>& entry,
                    std::string* meta) override {
    rocksdb::ReadOptions options;
    options.verify_checksums = true;
    options.fill_cache = false;
    const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options));
    meta->clear();
    for (it->SeekToFirst(); it->Valid(); it->Next()) {
      const std::string_view key(it->key().data(), it->key().size());
      const std::string_view value(it->value().data(), it->value().size());
      if (key == kMetaKey) {
        meta->assign(value);
        continue;
      }
      BlockKey block;
      if (key.size() != 1 + block.bytes.size() || key[0] != kBlockPrefix) {
        return absl::DataLossError("index has a key of another kind");
      }
      std::memcpy(block.bytes.data(), key.data() + 1, block.bytes.size());
      entry(block, value);
    }
    return FromRocks(it->status(), "read");
  }

  absl::Status Write(const IndexBatch& batch) override {
    rocksdb::WriteBatch out;
    for (const BlockKey& key : batch.erases) out.Delete(KeyOf(key));
    for (const auto& [key, value] : batch.puts) out.Put(KeyOf(key), value);
    if (!batch.meta.empty()) out.Put(rocksdb::Slice(kMetaKey.data(), kMetaKey.size()), batch.meta);
    rocksdb::WriteOptions options;
    options.sync = true;
    absl::Status status = FromRocks(db_->Write(options, &out), "write");
    // After a background error RocksDB refuses writes until told that the cause may be gone (a disk
    // with room again); the caller's tier state decides how often that is tried.
    if (!status.ok()) (void)db_->Resume();
    return status;
  }

 private:
  std::unique_ptr<rocksdb::DB> db_;
};

// Its own log is a file in the index's directory. A second line after one that found no room on the disk
// fails an assertion of the packaged build, which ends the process; and who only reads would rotate it.
// Everything that matters comes back in statuses.
class NoLog final : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {}
};

rocksdb::Options OptionsOf() {
  rocksdb::Options options;
  options.paranoid_checks = true;
  options.max_write_buffer_number = 2;
  options.write_buffer_size = size_t{8} << 20;
  options.max_background_jobs = 2;
  options.compression = rocksdb::kNoCompression;  // checksums do not compress
  options.max_open_files = 64;
  options.stats_dump_period_sec = 0;
  options.info_log = std::make_shared<NoLog>();
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
  rocksdb::BlockBasedTableOptions table;
  table.checksum = rocksdb::kXXH3;
  table.no_block_cache = true;  // read once, at start
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<IndexDb>> OpenRocksIndex(const std::string& path) {
  rocksdb::Options options = OptionsOf();
  options.create_if_missing = true;
  // RocksDB makes its files readable by everybody: the directory keeps others out, whatever is above it.
  // Errors show when the index is opened.
  (void)::mkdir(path.c_str(), 0700);
  (void)::chmod(path.c_str(), 0700);
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(options, path, &db);
  if (!status.ok()) return FromRocks(status, "open");
  return std::make_unique<RocksIndex>(std::unique_ptr<rocksdb::DB>(db));
}

absl::StatusOr<std::unique_ptr<IndexDb>> OpenRocksIndexReadOnly(const std::string& path) {
  const rocksdb::Options options = OptionsOf();
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::OpenForReadOnly(options, path, &db);
  if (!status.ok()) return FromRocks(status, "open");
  return std::make_unique<RocksIndex>(std::unique_ptr<rocksdb::DB>(db));
}

}  // namespace winnow::storage
