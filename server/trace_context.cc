#include "server/trace_context.h"

#include <cstddef>

namespace winnow::server {
namespace {

constexpr size_t kTraceIdAt = 3, kTraceIdDigits = 32;
constexpr size_t kParentIdAt = kTraceIdAt + kTraceIdDigits + 1, kParentIdDigits = 16;
constexpr size_t kFlagsAt = kParentIdAt + kParentIdDigits + 1, kFlagsDigits = 2;
constexpr size_t kBytes = kFlagsAt + kFlagsDigits;

bool IsHexadecimal(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == text.npos;
}

bool IsZero(std::string_view text) { return text.find_first_not_of('0') == text.npos; }

}  // namespace

TraceContext ParseTraceParent(std::string_view header) {
  if (header.size() < kBytes) return {};
  const std::string_view version = header.substr(0, 2);
  if (!IsHexadecimal(version) || version == "ff") return {};
  if (header.size() > kBytes && (version == "00" || header[kBytes] != '-')) return {};
  if (header[kTraceIdAt - 1] != '-' || header[kParentIdAt - 1] != '-' ||
      header[kFlagsAt - 1] != '-') {
    return {};
  }
  const std::string_view trace_id = header.substr(kTraceIdAt, kTraceIdDigits);
  const std::string_view parent_id = header.substr(kParentIdAt, kParentIdDigits);
  if (!IsHexadecimal(trace_id) || !IsHexadecimal(parent_id) || IsZero(trace_id) ||
      IsZero(parent_id) || !IsHexadecimal(header.substr(kFlagsAt, kFlagsDigits))) {
    return {};
  }
  return {trace_id, parent_id};
}

}  // namespace winnow::server
