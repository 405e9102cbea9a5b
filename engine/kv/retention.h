// How dear a cached block is, and until when. Those that ask for one block add up: it stays as long as the one that
// asked for most.
#ifndef WINNOW_ENGINE_KV_RETENTION_H_
#define WINNOW_ENGINE_KV_RETENTION_H_

#include <algorithm>
#include <cstdint>
#include <optional>

#include "engine/base/clock.h"
#include "storage/block_store.h"

namespace winnow::engine {

inline constexpr uint8_t kPriorityMax = storage::kPriorityMax;
inline constexpr uint8_t kPriorityNormal = 3;
static_assert(kPriorityNormal <= kPriorityMax);

struct Retention {
  uint8_t priority = kPriorityNormal;               // up to kPriorityMax; lower ones leave first
  std::optional<TimePoint> expires = std::nullopt;  // unset: never

  bool Expired(TimePoint now) const { return expires.has_value() && *expires <= now; }
  // Takes the larger priority and the later expiry. True: either changed.
  bool Raise(const Retention& other) {
    const Retention before = *this;
    priority = std::max(priority, other.priority);
    if (!other.expires.has_value()) expires.reset();
    if (expires.has_value()) expires = std::max(*expires, *other.expires);
    return priority != before.priority || expires != before.expires;
  }
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_RETENTION_H_
