// The cost of a client's HTTP/2 frames to the server, before anything acts on them.
//
// gRPC 1.51 makes a stream and a call for every HEADERS frame, however soon it is reset, and reads header
// blocks for as long as they go on. A meter walks over the bytes of one connection and counts: resets, which
// cost most, and small control frames. Its owner decides what they may cost (connection_guard.h); what no
// client needs is an error.
//
// A meter looks at frames' headers alone and keeps 9 bytes. Threads: one at a time.
#ifndef WINNOW_SERVER_HTTP2_METER_H_
#define WINNOW_SERVER_HTTP2_METER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace winnow::server {

// Limits of that cost.
struct Http2Credit {
  int64_t resets = 0;   // streams that end before they are answered
  int64_t control = 0;  // frames that carry next to nothing, and KiB of headers
};

struct Http2Limits {
  size_t header_block_bytes = 64 << 10;  // of HEADERS and its CONTINUATION frames, as sent
  int32_t header_block_frames = 64;
};

// For the bytes that a client sends.
class Http2Meter {
 public:
  // A frame costs no more of either kind, so that there is a credit that every frame can wait for.
  static constexpr int64_t kMostCost = 32;

  explicit Http2Meter(const Http2Limits& limits) : limits_(limits) {}

  struct Passed {
    size_t bytes = 0;  // of those given; fewer than all: the next frame costs more than is left
    bool lacks_resets = false;  // then: of resets, or else of control
    absl::Status
        status;  // not OK: the connection must be closed, and nothing of `bytes` be passed on
  };
  // Takes what the frames cost from `credit`. Bytes that are not passed must be given again.
  Passed Pass(std::string_view bytes, Http2Credit& credit);

  // The client's preface was seen.
  bool begun() const { return preface_left_ == 0; }

 private:
  Http2Credit CostOf() const;
  absl::Status CheckFrame();

  const Http2Limits limits_;
  size_t preface_left_ = 24;
  std::array<uint8_t, 9> header_ = {};
  size_t header_size_ = 0;
  size_t payload_left_ = 0;
  bool in_block_ = false;  // a header block has begun and not ended
  size_t block_bytes_ = 0;
  int32_t block_frames_ = 0;
};

// For the bytes that the server sends: streams that it resets, because the client's frames make it.
class Http2ResetCounter {
 public:
  int64_t Count(std::string_view bytes);

 private:
  std::array<uint8_t, 13> frame_ = {};  // header, and a reset's error code
  size_t size_ = 0;
  size_t payload_left_ = 0;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP2_METER_H_
