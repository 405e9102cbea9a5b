#include "storage/waiting_reader.h"

#include <chrono>
#include <utility>
#include <vector>

namespace winnow::storage {

int WaitingReader::Read(const Segment& segment, uint64_t offset, std::span<std::byte> into,
                        int64_t deadline_ns) {
  result_.reset();
  env_.ring().Submit({.kind = IoKind::kRead,
                      .fd = segment.file.fd(),
                      .offset = offset,
                      .data = into,
                      .deadline_ns = deadline_ns,
                      .tag = SegmentTag(SegmentIo::kReadSync, segment.id)});
  std::vector<IoResult> results;
  while (!result_) {
    results.clear();
    env_.ring().Poll(std::chrono::milliseconds(100), &results);
    for (const IoResult& result : results) deliver_(result);
  }
  return *result_;
}

void WaitingReader::Keep(uint64_t segment_id, PageMemory memory) {
  stuck_[segment_id] = std::move(memory);
}

void WaitingReader::OnIo(uint64_t segment_id, const IoResult& result) {
  if (!result.returned) result_ = result.error;
  if (!result.late && !result.returned) return;
  Segment& segment = log_.At(segment_id);
  if (result.late) {
    log_.Hold(&segment);
    ++segment.stuck;
    return;
  }
  --segment.stuck;
  stuck_.erase(segment_id);
  log_.Release(&segment);
}

}  // namespace winnow::storage
