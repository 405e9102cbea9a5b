// How much memory there is to take.
#ifndef WINNOW_ENGINE_KV_HOST_MEMORY_H_
#define WINNOW_ENGINE_KV_HOST_MEMORY_H_

#include <cstdint>
#include <optional>

namespace winnow::engine {

// What this process may still allocate: the machine's memory, or its container's if that is less.
// Nothing where the system does not say.
std::optional<int64_t> AvailableMemoryBytes();

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_HOST_MEMORY_H_
