#include "engine/retrieval/query_call.h"

#include <algorithm>

namespace winnow::engine {

int32_t PassRows::TableEnd(int32_t position) const {
  const int32_t seen = std::min(position + 1, chunk->settled);
  const int32_t border = seen / kernels::kCellRefreshTokens * kernels::kCellRefreshTokens;
  return std::max(policy().sink, border);
}

}  // namespace winnow::engine
