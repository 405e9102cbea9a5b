#include "server/suggest.h"

#include <vector>

#include "engine/base/did_you_mean.h"

namespace winnow::server {

std::string DidYouMean(std::string_view name, std::span<const std::string> known) {
  const std::vector<std::string_view> names(known.begin(), known.end());
  const std::string_view nearest = engine::NearestName(name, names);
  return nearest.empty() ? "" : ": did you mean " + std::string(nearest) + "?";
}

}  // namespace winnow::server
