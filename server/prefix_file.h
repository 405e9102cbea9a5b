// The file in which named prefixes outlive the process: beside the store, because the store has their KV.
//
// Written whole and put in place, with a checksum: after a crash it is the old or the new one. One that is damaged, or of
// another model, is put aside and nothing of it is used: a prefix is a cache.
//
// Threads: one at a time.
#ifndef WINNOW_SERVER_PREFIX_FILE_H_
#define WINNOW_SERVER_PREFIX_FILE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/schedule/prefix_table.h"

namespace winnow::server {

class PrefixFile {
 public:
  // `model`: names of other models and settings are of no use. `now`: the wall clock, by which times go on while no
  // process runs; a clock that was set back gives no prefix more time than it had.
  PrefixFile(std::string path, const engine::Digest& model,
             std::function<absl::Time()> now = absl::Now)
      : path_(std::move(path)), model_(model), now_(std::move(now)) {}

  // On disk when it returns OK. Unavailable: it could not be written, and the old file is as it was.
  absl::Status Save(const std::vector<engine::SavedPrefix>& prefixes) const;

  // Empty if there is no file. `problem` (may be empty): why a file that is there was put aside.
  std::vector<engine::SavedPrefix> Load(std::string* problem) const;

 private:
  const std::string path_;
  const engine::Digest model_;
  const std::function<absl::Time()> now_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_PREFIX_FILE_H_
