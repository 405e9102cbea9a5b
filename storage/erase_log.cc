#include "storage/erase_log.h"

#include <algorithm>
#include <vector>

#include "storage/check.h"

namespace winnow::storage {
namespace {

// A log that is longer was not written by us; nothing is allocated for its claims.
constexpr uint64_t kLogBytesMax = kPageBytes + 2 * EraseLog::kErasuresMax * kErasureBytes;

}  // namespace

EraseLog::EraseLog(FileSystem* files, const std::string& directory)
    : files_(files), directory_(directory), path_(directory + "/erased") {
  Load();
  if (found_ != Found::kSound) {
    info_ = {};
    erasures_.clear();
  }
}

void EraseLog::Load() {
  const absl::StatusOr<uint64_t> bytes = files_->FileBytes(path_);
  if (absl::IsNotFound(bytes.status())) return;
  found_ = Found::kDamaged;
  const absl::StatusOr<File> file = files_->Open(path_, {.read_only = true});
  if (!bytes.ok() || !file.ok() || *bytes < kPageBytes || *bytes > kLogBytesMax) return;
  std::vector<std::byte> all(*bytes);
  if (!files_->ReadAt(*file, 0, all).ok()) return;
  const auto info = DecodeEraseLogHeader(std::span(all).first(kPageBytes));
  if (!info) return;
  info_ = *info;
  // A power cut may leave the last appends, which nobody was promised, as zeros.
  bool ended = false;
  for (std::span<const std::byte> rest = std::span(all).subspan(kPageBytes); !rest.empty();
       rest = rest.subspan(kErasureBytes)) {
    if (rest.size() < kErasureBytes) return;
    const auto record = rest.first(kErasureBytes);
    if (std::all_of(record.begin(), record.end(), [](std::byte b) { return b == std::byte{0}; })) {
      ended = true;
      continue;
    }
    const auto erasure = DecodeErasure(record);
    if (!erasure || ended) return;
    erasures_[erasure->key] = {erasure->sequence, erasure->segment_id};
  }
  found_ = Found::kSound;
}

bool EraseLog::Lists(const BlockKey& key, uint64_t sequence) const {
  const auto it = erasures_.find(key);
  return it != erasures_.end() && sequence <= it->second.sequence;
}

bool EraseLog::Hides(const BlockKey& key, uint64_t sequence, uint64_t segment_id) const {
  return found_ != Found::kSound || segment_id < info_.hidden_below_segment || Lists(key, sequence);
}

absl::Status EraseLog::Start(uint64_t life, uint64_t oldest_segment, uint64_t next_segment) {
  if (found_ != Found::kSound) info_.hidden_below_segment = next_segment;
  found_ = Found::kSound;
  if (info_.hidden_below_segment <= oldest_segment) info_.hidden_below_segment = 0;
  info_.life = life;
  next_segment_ = next_segment;
  absl::erase_if(erasures_,
                 [&](const auto& item) { return item.second.segment_id <= oldest_segment; });
  return Rewrite();
}

absl::Status EraseLog::Append(std::span<const Erasure> erasures) {
  for (const Erasure& erasure : erasures) {
    erasures_[erasure.key] = {erasure.sequence, erasure.segment_id};
    next_segment_ = std::max(next_segment_, erasure.segment_id);
  }
  if (erasures_.size() > kErasuresMax) {
    erasures_.clear();
    info_.hidden_below_segment = next_segment_;
    file_.Close();
  }
  if (!file_.is_open() || records_ + erasures.size() > 2 * kErasuresMax) return Rewrite();
  std::vector<std::byte> bytes(erasures.size() * kErasureBytes);
  for (size_t i = 0; i < erasures.size(); ++i) {
    EncodeErasure(erasures[i], std::span(bytes).subspan(i * kErasureBytes, kErasureBytes));
  }
  absl::Status status = files_->WriteAt(file_, kPageBytes + records_ * kErasureBytes, bytes);
  if (status.ok()) status = files_->Datasync(file_);
  if (!status.ok()) {
    // The contents of the file are unknown now, and a sync that failed once is not asked again.
    file_.Close();
    return status;
  }
  records_ += erasures.size();
  return absl::OkStatus();
}

// A new file in the place of the old one.
absl::Status EraseLog::Rewrite() {
  file_.Close();
  // A life that was not written down may have been lived twice: its sequences prove nothing.
  if (!life_written_ && failed_) info_.hidden_below_segment = next_segment_;
  failed_ = true;
  std::vector<std::byte> all(kPageBytes + erasures_.size() * kErasureBytes);
  EncodeEraseLogHeader(info_, std::span(all).first(kPageBytes));
  size_t at = kPageBytes;
  for (const auto& [key, hidden] : erasures_) {
    EncodeErasure({key, hidden.sequence, hidden.segment_id},
                  std::span(all).subspan(at, kErasureBytes));
    at += kErasureBytes;
  }
  const std::string fresh = path_ + ".tmp";
  (void)files_->Unlink(fresh);
  absl::StatusOr<File> file = files_->Open(fresh, {.create = true});
  WINNOW_RETURN_IF_ERROR(file.status());
  WINNOW_RETURN_IF_ERROR(files_->WriteAt(*file, 0, all));
  WINNOW_RETURN_IF_ERROR(files_->Datasync(*file));
  WINNOW_RETURN_IF_ERROR(files_->Rename(fresh, path_));
  WINNOW_RETURN_IF_ERROR(files_->SyncDirectory(directory_));
  file_ = *std::move(file);
  records_ = erasures_.size();
  failed_ = false;
  life_written_ = true;
  return absl::OkStatus();
}

}  // namespace winnow::storage
