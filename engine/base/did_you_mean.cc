#include "engine/base/did_you_mean.h"

#include <algorithm>
#include <vector>

namespace winnow::engine {
namespace {

constexpr size_t kWordBytesMax = 64;

// Insertions, deletions and substitutions between two short words.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string_view NearestName(std::string_view word, std::span<const std::string_view> known) {
  if (word.size() > kWordBytesMax) return "";
  std::string_view best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string_view name : known) {
    const size_t distance = EditDistance(word, name);
    if (distance < best_distance) {
      best_distance = distance;
      best = name;
    }
  }
  return best;
}

}  // namespace winnow::engine
