#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "kernels/hamming_select.h"

namespace winnow::kernels {

void SelectByCodesRef(std::span<const RetrievalQuery> queries, const void* query_codes,
                      int32_t group, const void* codes, const CodeLayout& code_layout,
                      const Selection& chosen) {
  const int64_t code_bytes = static_cast<int64_t>(code_layout.CodeBytes());
  for (size_t i = 0; i < queries.size(); ++i) {
    const RetrievalQuery& query = queries[i];
    for (int32_t head = 0; head < code_layout.kv_heads; ++head) {
      const uint8_t* group_codes =
          static_cast<const uint8_t*>(query_codes) +
          (static_cast<int64_t>(i) * code_layout.kv_heads + head) * group * code_bytes;
      std::vector<std::pair<int64_t, int32_t>> scored;  // score, token
      for (int32_t token = query.mid.first; token < query.mid.last; ++token) {
        const uint8_t* code =
            static_cast<const uint8_t*>(codes) +
            query.block_table[token / code_layout.block_tokens] * code_layout.BlockBytes() +
            head * code_layout.HeadBytes() + token % code_layout.block_tokens * code_bytes;
        int64_t score = 0;
        for (int32_t g = 0; g < group; ++g) {
          score += code_layout.bits;
          for (int64_t byte = 0; byte < code_bytes; ++byte) {
            const uint8_t differing = code[byte] ^ group_codes[g * code_bytes + byte];
            score -= std::popcount(differing);
          }
        }
        scored.emplace_back(score, token);
      }
      std::sort(scored.rbegin(), scored.rend());  // the best first, of equals the later
      chosen.count(static_cast<int64_t>(i), head) = query.k;
      int32_t* tokens = chosen.chosen(static_cast<int64_t>(i), head);
      for (int32_t j = 0; j < query.k; ++j) tokens[j] = scored[j].second;
      std::sort(tokens, tokens + query.k);
    }
  }
}

}  // namespace winnow::kernels
