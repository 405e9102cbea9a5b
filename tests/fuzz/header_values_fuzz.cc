// One line of text to everything that reads such lines of a client: traceparent, a policy, an exactness, a name for the log.
// A line that is taken and written again reads back as the same; a traceparent has the form that the specification gives it.
//
// Sources: server/trace_context.cc server/utf8.cc engine/retrieval/attention_policy.cc engine/retrieval/exactness.cc
// Sources: engine/base/did_you_mean.cc engine/base/plain_number.cc kernels/check.cc
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/exactness.h"
#include "kernels/check.h"
#include "server/trace_context.h"
#include "server/utf8.h"

namespace engine = winnow::engine;
namespace server = winnow::server;

namespace {

// Written from the specification's grammar, apart from the parser: VERSION-TRACE-PARENT-FLAGS in lower case, of
// which only later versions may go on, after a dash.
bool IsTraceParent(std::string_view text) {
  if (text.size() < 55 || text.starts_with("ff")) return false;
  for (size_t i = 0; i < 55; ++i) {
    const bool dash = i == 2 || i == 35 || i == 52;
    const bool digit = (text[i] >= '0' && text[i] <= '9') || (text[i] >= 'a' && text[i] <= 'f');
    if (dash ? text[i] != '-' : !digit) return false;
  }
  if (text.substr(3, 32) == std::string(32, '0') || text.substr(36, 16) == std::string(16, '0'))
    return false;
  return text.size() == 55 || (!text.starts_with("00") && text[55] == '-');
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const server::TraceContext trace = server::ParseTraceParent(text);
  WINNOW_CHECK(trace.valid() == IsTraceParent(text));
  if (trace.valid()) {
    WINNOW_CHECK(trace.trace_id == text.substr(3, 32) && trace.parent_id == text.substr(36, 16));
  }
  if (const auto policy = engine::ParseAttentionPolicy(text); policy.ok()) {
    const auto again = engine::ParseAttentionPolicy(engine::ToString(*policy));
    WINNOW_CHECK(again.ok() && *again == *policy);
    WINNOW_CHECK(engine::WithExactness(*policy, engine::ExactnessOf(*policy), true).ok());
  } else {
    WINNOW_CHECK(absl::IsInvalidArgument(policy.status()));
  }
  if (const auto exactness = engine::ParseExactness(text); exactness.ok()) {
    const auto again = engine::ParseExactness(engine::ToString(*exactness));
    WINNOW_CHECK(again.ok() && *again == *exactness);
  } else {
    WINNOW_CHECK(absl::IsInvalidArgument(exactness.status()));
  }
  const auto invalid = server::InvalidUtf8At(text);
  const size_t most = size == 0 ? 0 : data[0] % (size + 1);
  for (const size_t bytes : {size, most}) {
    const std::string clean = server::CleanUtf8(text, bytes);
    WINNOW_CHECK(clean.size() <= bytes && !server::InvalidUtf8At(clean).has_value());
    if (!invalid.has_value()) WINNOW_CHECK(text.starts_with(clean) && bytes - clean.size() < 4);
  }
  return 0;
}
