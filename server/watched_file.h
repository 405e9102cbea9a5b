// A small text file of the operator's, read again when it changes, so that no restart is needed.
//
// The file is looked at once a second at most, by whoever asks, and at once by Reload. One that is not good leaves what
// there was; it is logged, or told to whoever reloads. Threads: any.
#ifndef WINNOW_SERVER_WATCHED_FILE_H_
#define WINNOW_SERVER_WATCHED_FILE_H_

#include <sys/stat.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/base/clock.h"
#include "engine/base/json_file.h"
#include "server/log.h"
#include "server/strings.h"

namespace winnow::server {

template <typename T>
class WatchedFile {
 public:
  // The file's text to what it says; InvalidArgument names the line.
  using Parse = std::function<absl::StatusOr<T>(const std::string& text)>;

  // `flag` names the file in errors: "--api-keys"; `event` is the log's word for it. `log` and `clock` must
  // outlive the object. InvalidArgument: cannot be read, or is not good.
  static absl::StatusOr<std::unique_ptr<WatchedFile>> Load(std::string flag, const char* event,
                                                           std::string path, Parse parse, Log& log,
                                                           const engine::Clock& clock) {
    std::unique_ptr<WatchedFile> file(
        new WatchedFile(std::move(flag), event, std::move(path), std::move(parse), log, clock));
    absl::MutexLock lock(&file->mutex_);
    file->stamp_ = file->Stamp();
    file->looked_ = clock.Now();
    absl::StatusOr<T> value = file->Read();
    if (!value.ok()) return value.status();
    file->value_ = std::make_shared<const T>(*std::move(value));
    return file;
  }

  std::shared_ptr<const T> Get() {
    absl::MutexLock lock(&mutex_);
    if (clock_.Now() - looked_ >= std::chrono::seconds(1)) LookAgain();
    return value_;
  }

  // Reads the file now, whether it looks changed or not. InvalidArgument as for Load.
  absl::Status Reload() {
    absl::MutexLock lock(&mutex_);
    looked_ = clock_.Now();
    stamp_ = Stamp();
    return ReadAgain();
  }

 private:
  static constexpr size_t kMaxBytes = 4 << 20;

  WatchedFile(std::string flag, const char* event, std::string path, Parse parse, Log& log,
              const engine::Clock& clock)
      : flag_(std::move(flag)),
        event_(event),
        path_(std::move(path)),
        parse_(std::move(parse)),
        log_(log),
        clock_(clock) {}

  absl::StatusOr<T> Read() const {
    absl::StatusOr<std::string> text = engine::ReadSmallFile(path_, kMaxBytes);
    if (!text.ok()) {
      return absl::InvalidArgumentError(Concat(flag_, ": ", ToStd(text.status().message())));
    }
    absl::StatusOr<T> value = parse_(*text);
    if (value.ok()) return value;
    return absl::InvalidArgumentError(Concat(flag_, " ", path_, ToStd(value.status().message())));
  }

  // Changes when the file does.
  std::string Stamp() const {
    struct stat info = {};
    if (stat(path_.c_str(), &info) != 0) return "";
    return Concat(info.st_ino, ".", info.st_size, ".", info.st_mtim.tv_sec, ".",
                  info.st_mtim.tv_nsec);
  }

  void LookAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    looked_ = clock_.Now();
    std::string stamp = Stamp();
    if (stamp == stamp_) return;
    stamp_ = std::move(stamp);
    const absl::Status status = ReadAgain();
    if (status.ok()) {
      log_.Event(LogLevel::kInfo, event_, {{"text", "read again"}});
    } else {
      log_.Event(LogLevel::kWarn, event_, {{"message", ToStd(status.message())}});
    }
  }

  absl::Status ReadAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    absl::StatusOr<T> value = Read();
    if (!value.ok()) return value.status();
    value_ = std::make_shared<const T>(*std::move(value));
    return absl::OkStatus();
  }

  const std::string flag_;
  const char* const event_;
  const std::string path_;
  const Parse parse_;
  Log& log_;
  const engine::Clock& clock_;
  absl::Mutex mutex_;
  std::shared_ptr<const T> value_ ABSL_GUARDED_BY(mutex_);
  std::string stamp_ ABSL_GUARDED_BY(mutex_);
  engine::TimePoint looked_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_WATCHED_FILE_H_
