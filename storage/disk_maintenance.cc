// An operator's commands to an open DiskStore: checking every block, and collecting garbage. They wait for the disk.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "storage/disk_store.h"
#include "storage/page_memory.h"

namespace winnow::storage {
namespace {

// Reads that hang before the disk is left; each keeps a buffer that the kernel has.
constexpr size_t kStuckReadsMax = 8;

}  // namespace

VerifyReport DiskStore::VerifyAll(bool repair) {
  VerifyReport report;
  PageMemory memory(BlockBytesFor(payload_bytes_max_));
  // Waiting for a read moves other work along, which may change the entries: from a copy.
  std::vector<std::pair<BlockKey, std::shared_ptr<const BlockRecord>>> records;
  records.reserve(table_.size());
  table_.ForEach(
      [&](const BlockKey& key, const Entry& entry) { records.emplace_back(key, entry.record); });
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->segment_id, a.second->offset) <
           std::pair(b.second->segment_id, b.second->offset);
  });
  for (const auto& [key, record] : records) {
    const Entry* entry = table_.Find(key);
    if (entry == nullptr || entry->record != record) continue;
    ++report.blocks;
    const Segment& segment = log_.At(record->segment_id);
    // One read that hangs is enough to leave a segment, and a few segments to leave the disk.
    if (segment.stuck > 0 || reader_.stuck() >= kStuckReadsMax) {
      ++report.unchecked_blocks;
      continue;
    }
    report.bytes += record->payload_bytes;
    const std::span<std::byte> block = memory.bytes().first(record->block_bytes());
    bool sound = false;
    const int error = reader_.Read(segment, record->offset, block, env_.WriteDeadline());
    if (segment.stuck > 0) {
      reader_.Keep(segment.id,
                   std::exchange(memory, PageMemory(BlockBytesFor(payload_bytes_max_))));
    }
    if (error == ETIMEDOUT) {
      ++report.unchecked_blocks;
      continue;
    }
    if (error != 0) {
      ++report.unreadable_blocks;
    } else {
      sound = BlockMatches(block, key, *record);
      if (!sound) ++report.corrupt_blocks;
    }
    if (sound || !repair) continue;
    ++report.removed_blocks;
    committer_.Discard(key);
  }
  return report;
}

GcReport DiskStore::CollectGarbage(double live_min) {
  GcReport report;
  const uint64_t before_bytes = log_.used_bytes();
  std::vector<BlockKey> expired;
  table_.ForEach([&](const BlockKey& key, const Entry& entry) {
    if (Expired(entry)) expired.push_back(key);
  });
  std::vector<BlockKey> erased;
  for (const BlockKey& key : expired) committer_.Remove(key, &erased);
  committer_.Forget(std::move(erased));
  report.expired_blocks = expired.size();
  env_.stats.expired_blocks += expired.size();
  std::vector<Completion> completions;  // of others' operations, handed out by the next Poll
  const auto settle = [&] {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    do {
      Poll(std::chrono::milliseconds(10), &completions);
    } while (!idle() && std::chrono::steady_clock::now() < limit);
  };
  settle();
  // The living blocks of sparse segments move, and the files go.
  std::vector<uint64_t> sparse;
  for (const auto& [id, segment] : log_.segments()) {
    if (segment->state == Segment::State::kSealed && segment->live_blocks > 0 &&
        static_cast<double>(segment->live_bytes) <
            live_min * static_cast<double>(segment->file_bytes - 2 * kPageBytes)) {
      sparse.push_back(id);
    }
  }
  for (uint64_t id : sparse) {
    Segment* segment = log_.Find(id);
    if (segment == nullptr) continue;
    if (log_.used_bytes() + env_.options().segment_bytes > log_.room_bytes()) break;
    if (reclaimer_.Empty(segment)) settle();
  }
  done_.insert(done_.end(), completions.begin(), completions.end());
  report.freed_bytes = before_bytes > log_.used_bytes() ? before_bytes - log_.used_bytes() : 0;
  return report;
}

}  // namespace winnow::storage
