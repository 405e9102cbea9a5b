#include "server/suggest.h"

#include <algorithm>
#include <vector>

namespace winnow::server {
namespace {

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string DidYouMean(std::string_view name, std::span<const std::string> known) {
  // A hostile name must not cost quadratic time: no option is anywhere near this long.
  if (name.size() > 64) return "";
  size_t best_distance = std::max<size_t>(1, name.size() / 3) + 1;
  const std::string* best = nullptr;
  for (const std::string& candidate : known) {
    const size_t distance = EditDistance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = &candidate;
    }
  }
  return best == nullptr ? "" : ": did you mean " + *best + "?";
}

}  // namespace winnow::server
