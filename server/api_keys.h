// Keys that clients must show, over HTTP and gRPC, from a file of their SHA-256 hashes: who reads the file cannot
// use them. Each key has a name, which is the tenant of whoever shows it.
//
//   # one line for each key: the name, and the hash as `printf %s "$KEY" | sha256sum` prints it
//   alice 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
//
// Several keys may have one name, so that one can be replaced by another without a gap. The file is
// read again when it changes; one that is not good leaves the keys as they were.
//
// Threads: any.
#ifndef WINNOW_SERVER_API_KEYS_H_
#define WINNOW_SERVER_API_KEYS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "server/log.h"
#include "server/watched_file.h"

namespace winnow::server {

class ApiKeys {
 public:
  // `log` and `clock` must outlive the keys. InvalidArgument names the file and the line.
  static absl::StatusOr<std::unique_ptr<ApiKeys>> Load(std::string path, Log& log,
                                                       const engine::Clock& clock);

  // The name of the key; nothing if it is none. How long it takes says nothing about the keys: all
  // of them are compared, each in constant time.
  std::optional<std::string> NameOf(std::string_view key);

  // Reads the file now. InvalidArgument leaves the keys as they were.
  absl::Status Reload() { return file_->Reload(); }

 private:
  struct Entry {
    std::string name;
    std::array<uint8_t, 32> hash;
  };
  using Entries = std::vector<Entry>;

  explicit ApiKeys(std::unique_ptr<WatchedFile<Entries>> file) : file_(std::move(file)) {}
  static absl::StatusOr<Entries> Parse(const std::string& text);

  const std::unique_ptr<WatchedFile<Entries>> file_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_API_KEYS_H_
