#include "engine/retrieval/query_call.h"

#include <algorithm>

namespace winnow::engine {

int32_t PassRows::TableEnd(int32_t position) const {
  const int32_t border = (position + 1) / kernels::kCellRefreshTokens * kernels::kCellRefreshTokens;
  return std::max(policy().sink, border);
}

}  // namespace winnow::engine
