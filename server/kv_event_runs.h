// KV events as routers take them: several blocks of a chain in one event, and blocks under 64-bit
// names.
#ifndef WINNOW_SERVER_KV_EVENT_RUNS_H_
#define WINNOW_SERVER_KV_EVENT_RUNS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/kv/kv_event_log.h"

namespace winnow::server {

struct KvEventRun {
  engine::KvEvent::Kind kind = engine::KvEvent::Kind::kCleared;
  engine::KvTier tier = engine::KvTier::kFast;
  // Stored: each is the parent of the next. As long as the events live. Cleared: none.
  std::vector<const engine::KvBlockContent*> blocks;
};

// The events in their order. `tenant`: only of its blocks; null: of all.
std::vector<KvEventRun> RunsOf(std::span<const engine::KvEvent> events,
                               const engine::Digest* tenant = nullptr);

// The last 8 bytes, big-endian: what consumers take of a longer hash, too.
uint64_t ShortHash(const engine::Digest& digest);

// vLLM's word for the tier: "GPU" (fast memory, whatever the device), "CPU", "STORAGE".
const char* MediumOf(engine::KvTier tier);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_KV_EVENT_RUNS_H_
