#include "server/http2_meter.h"

#include <algorithm>

#include "server/strings.h"

namespace winnow::server {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kHeaderBytes = 9;
// The size of frames that every receiver takes; only those with a message or metadata are larger.
constexpr size_t kSmallFrameBytes = 16384;
// A DATA frame smaller than this that does not end its stream costs more to handle than it carries.
constexpr size_t kTinyDataBytes = 32;

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kResetStream = 3,
  kPushPromise = 5,
  kContinuation = 9,
};
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;

size_t LengthOf(const uint8_t* header) {
  return size_t{header[0]} << 16 | size_t{header[1]} << 8 | header[2];
}

}  // namespace

Http2Credit Http2Meter::CostOf() const {
  const size_t length = LengthOf(header_.data());
  switch (header_[3]) {
    case kData:
      return {0, length < kTinyDataBytes && (header_[4] & kEndStream) == 0};
    case kHeaders:
      return {0, std::min(static_cast<int64_t>(length >> 10), kMostCost)};
    case kContinuation:
      return {0, std::min(static_cast<int64_t>(1 + (length >> 10)), kMostCost)};
    case kResetStream:
      return {1, 0};
    default:
      return {0, 1};
  }
}

absl::Status Http2Meter::CheckFrame() {
  const uint8_t type = header_[3];
  const size_t length = LengthOf(header_.data());
  if (in_block_ != (type == kContinuation)) {
    return absl::InvalidArgumentError("a header block that is not continued as it must be");
  }
  if (type == kPushPromise) return absl::InvalidArgumentError("a PUSH_PROMISE from a client");
  if (type != kHeaders && type != kContinuation) {
    if (type != kData && length > kSmallFrameBytes) {
      return absl::InvalidArgumentError("a control frame of more than 16 KiB");
    }
    return absl::OkStatus();
  }
  if (type == kHeaders) block_bytes_ = 0, block_frames_ = 0;
  block_bytes_ += length;
  ++block_frames_;
  in_block_ = (header_[4] & kEndHeaders) == 0;
  if (block_bytes_ > limits_.header_block_bytes || block_frames_ > limits_.header_block_frames) {
    return absl::ResourceExhaustedError("a header block without an end");
  }
  return absl::OkStatus();
}

Http2Meter::Passed Http2Meter::Pass(std::string_view bytes, Http2Credit& credit) {
  Passed passed;
  while (passed.bytes < bytes.size()) {
    const std::string_view rest = bytes.substr(passed.bytes);
    if (preface_left_ > 0) {
      const size_t size = std::min(rest.size(), preface_left_);
      if (rest.substr(0, size) != kPreface.substr(kPreface.size() - preface_left_, size)) {
        passed.status = absl::InvalidArgumentError("no HTTP/2");
        return passed;
      }
      preface_left_ -= size;
      passed.bytes += size;
      continue;
    }
    if (payload_left_ > 0) {
      const size_t size = std::min(rest.size(), payload_left_);
      payload_left_ -= size;
      passed.bytes += size;
      continue;
    }
    header_[header_size_] = static_cast<uint8_t>(rest.front());
    if (header_size_ + 1 == kHeaderBytes) {
      const Http2Credit cost = CostOf();
      passed.lacks_resets = cost.resets > 0 && credit.resets < cost.resets;
      if (passed.lacks_resets || (cost.control > 0 && credit.control < cost.control)) {
        return passed;  // without the header's last byte nobody can act on it
      }
      credit.resets -= cost.resets;
      credit.control -= cost.control;
      passed.status = CheckFrame();
      if (!passed.status.ok()) return passed;
      payload_left_ = LengthOf(header_.data());
      header_size_ = 0;
    } else {
      ++header_size_;
    }
    ++passed.bytes;
  }
  return passed;
}

int64_t Http2ResetCounter::Count(std::string_view bytes) {
  int64_t resets = 0;
  while (!bytes.empty()) {
    if (payload_left_ > 0) {
      const size_t size = std::min(bytes.size(), payload_left_);
      payload_left_ -= size;
      bytes.remove_prefix(size);
      continue;
    }
    frame_[size_++] = static_cast<uint8_t>(bytes.front());
    bytes.remove_prefix(1);
    const bool reset = size_ >= kHeaderBytes && frame_[3] == kResetStream;
    if (size_ < kHeaderBytes || (reset && size_ < frame_.size())) continue;
    // NO_ERROR: the stream was answered, and the rest of its request is of no interest.
    resets += reset && (frame_[9] | frame_[10] | frame_[11] | frame_[12]) != 0;
    const size_t length = LengthOf(frame_.data());
    const size_t read = size_ - kHeaderBytes;
    payload_left_ = length > read ? length - read : 0;
    size_ = 0;
  }
  return resets;
}

}  // namespace winnow::server
