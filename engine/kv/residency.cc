#include "engine/kv/residency.h"

#include "engine/kv/in_place.h"
#include "engine/kv/mirrored.h"
#include "engine/kv/paged.h"

namespace winnow::engine {

std::unique_ptr<Residency> Residency::Make(ResidencyKind kind, bool write_through,
                                           const KvRooms& rooms) {
  switch (kind) {
    case ResidencyKind::kInPlace:
      return std::make_unique<InPlace>(rooms);
    case ResidencyKind::kMirrored:
      return std::make_unique<Mirrored>(rooms);
    case ResidencyKind::kPaged:
      return std::make_unique<Paged>(rooms, write_through);
  }
  return nullptr;
}

}  // namespace winnow::engine
