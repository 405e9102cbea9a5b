#include "server/kv_event_runs.h"

namespace winnow::server {

using engine::KvEvent;

std::vector<KvEventRun> RunsOf(std::span<const KvEvent> events, const engine::Digest* tenant) {
  std::vector<KvEventRun> runs;
  for (const KvEvent& event : events) {
    if (event.kind == KvEvent::Kind::kCleared) {
      runs.push_back({event.kind, event.tier, {}});
      continue;
    }
    if (tenant != nullptr && event.block->name.tenant != *tenant) continue;
    const bool follows = !runs.empty() && runs.back().kind == event.kind &&
                         runs.back().tier == event.tier &&
                         (event.kind == KvEvent::Kind::kRemoved ||
                          event.block->parent == runs.back().blocks.back()->name.chain);
    if (!follows) runs.push_back({event.kind, event.tier, {}});
    runs.back().blocks.push_back(event.block.get());
  }
  return runs;
}

uint64_t ShortHash(const engine::Digest& digest) {
  uint64_t hash = 0;
  for (size_t i = digest.size() - 8; i < digest.size(); ++i) hash = hash << 8 | digest[i];
  return hash;
}

const char* MediumOf(engine::KvTier tier) {
  switch (tier) {
    case engine::KvTier::kFast:
      return "GPU";
    case engine::KvTier::kHost:
      return "CPU";
    case engine::KvTier::kDisk:
      return "STORAGE";
  }
  return "";
}

}  // namespace winnow::server
