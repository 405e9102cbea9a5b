// W3C trace context: the header `traceparent`, by which a caller's traces and this server's log lines are
// found for each other. winnow makes no spans; it names the caller's in its log and in its answer.
#ifndef WINNOW_SERVER_TRACE_CONTEXT_H_
#define WINNOW_SERVER_TRACE_CONTEXT_H_

#include <string_view>

namespace winnow::server {

// Views of the header's text.
struct TraceContext {
  std::string_view trace_id;   // 32 hexadecimal digits, not all zero
  std::string_view parent_id;  // 16, not all zero: the caller's span
  bool valid() const { return !trace_id.empty(); }
};

// Reads a header as the specification has it: lower-case digits, version 00 to the byte, and later versions with
// whatever follows. Anything else is not valid, and to be treated as if it were not there.
TraceContext ParseTraceParent(std::string_view header);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_TRACE_CONTEXT_H_
