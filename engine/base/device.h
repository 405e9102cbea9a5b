// The devices that a model runs on, by the name that --device has, and what each can do. Only this file knows their
// names: everything above asks for a capability.
#ifndef WINNOW_ENGINE_BASE_DEVICE_H_
#define WINNOW_ENGINE_BASE_DEVICE_H_

#include <string>
#include <string_view>
#include <vector>

namespace winnow::engine {

struct Device {
  std::string_view name;
  bool own_memory = false;        // weights and KV lie in memory of its own, beside the host's
  bool launches_kernels = false;  // singly or in graphs
  bool bfloat16_blocks =
      false;  // products with quantised weights are computed in bfloat16 there, and in nothing else
};

inline constexpr Device kDevices[] = {
    {.name = "cpu", .own_memory = false, .launches_kernels = false, .bfloat16_blocks = false},
    {.name = "cuda", .own_memory = true, .launches_kernels = true, .bfloat16_blocks = true},
};

// All of them, as options list them.
inline std::vector<std::string> DeviceNames() {
  std::vector<std::string> names;
  for (const Device& device : kDevices) names.emplace_back(device.name);
  return names;
}
// The processor's instruction sets, as --isa has them; "auto" is the best of those that it has.
inline std::vector<std::string> InstructionSetNames() {
  return {"auto", "amx", "avx512", "avx2", "scalar"};
}
// Null: there is none of that name.
constexpr const Device* FindDevice(std::string_view name) {
  for (const Device& device : kDevices) {
    if (device.name == name) return &device;
  }
  return nullptr;
}
// The device of that name; of another name one that can do nothing, which whoever checks names refuses.
constexpr Device DeviceOf(std::string_view name) {
  const Device* const device = FindDevice(name);
  return device == nullptr ? Device() : *device;
}

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_DEVICE_H_
