#include "storage/block_store.h"

namespace winnow::storage {

std::string_view ReasonName(Reason reason) {
  static constexpr std::string_view kNames[kReasons] = {
      "none", "absent", "identity", "corrupt", "io_error", "late", "off", "busy", "full"};
  return kNames[static_cast<size_t>(reason)];
}

std::string_view TierStateName(TierState state) {
  switch (state) {
    case TierState::kOk:
      return "ok";
    case TierState::kDegraded:
      return "degraded";
    case TierState::kOff:
      return "off";
  }
  return "unknown";
}

}  // namespace winnow::storage
