// A client's bytes through the meter of the gRPC port, whole and in pieces with little credit at a time: the same
// bytes pass for the same cost, or the connection is closed at both; what the server would send is counted
// without reading past it.
//
// Sources: server/http2_meter.cc kernels/check.cc
#include "server/http2_meter.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/check.h"

using winnow::server::Http2Credit;
using winnow::server::Http2Meter;
using winnow::server::Http2ResetCounter;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const size_t piece = 1 + data[0] % 40;
  // Most inputs would not find the preface.
  const std::string bytes = (data[0] & 0x80 ? "" : "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") +
                            std::string(reinterpret_cast<const char*>(data + 1), size - 1);
  constexpr int64_t kPlenty = 1 << 30;
  Http2Meter whole({});
  Http2Credit left{kPlenty, kPlenty};
  const Http2Meter::Passed all = whole.Pass(bytes, left);
  WINNOW_CHECK(all.bytes <= bytes.size());
  WINNOW_CHECK(!all.status.ok() || all.bytes == bytes.size());
  Http2Meter pieces({});
  Http2Credit credit, given;
  bool broken = false;
  for (size_t at = 0; at < bytes.size() && !broken;) {
    const auto passed = pieces.Pass(std::string_view(bytes).substr(at, piece), credit);
    broken = !passed.status.ok();
    at += passed.bytes;
    if (passed.bytes > 0 || broken) continue;
    ++(passed.lacks_resets ? credit.resets : credit.control);
    ++(passed.lacks_resets ? given.resets : given.control);
  }
  WINNOW_CHECK(broken == !all.status.ok());
  if (!broken) {
    WINNOW_CHECK(given.resets - credit.resets == kPlenty - left.resets);
    WINNOW_CHECK(given.control - credit.control == kPlenty - left.control);
  }
  Http2ResetCounter counter, bytewise;
  int64_t count = 0;
  for (const char byte : bytes) count += bytewise.Count(std::string_view(&byte, 1));
  WINNOW_CHECK(counter.Count(bytes) == count);
  return 0;
}
