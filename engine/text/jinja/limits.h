// What one template may cost. Each limit is an error that names itself and the template's line.
#ifndef WINNOW_ENGINE_TEXT_JINJA_LIMITS_H_
#define WINNOW_ENGINE_TEXT_JINJA_LIMITS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace winnow::engine::jinja {

struct Limits {
  size_t template_bytes_max = 1 << 20;
  // A step is an expression or a statement that is evaluated, or 64 bytes of text that are worked
  // on. Published templates take about 100 steps for each message.
  int64_t steps_max = 20'000'000;
  // Nesting of expressions, statements, macros and values together.
  int depth_max = 1000;
  size_t output_bytes_max = size_t{64} << 20;
  // Strings and values that live at the same time, the request's among them.
  size_t memory_bytes_max = size_t{256} << 20;
  std::chrono::milliseconds time_max{1000};
};

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_LIMITS_H_
