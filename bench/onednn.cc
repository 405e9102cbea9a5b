#include "bench/onednn.h"

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "kernels/bench_timing.h"
#include "kernels/matmul.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace winnow::bench {
namespace {

// A function of the OpenMP that oneDNN has loaded; null if there is none.
template <typename Function>
Function* OpenMp(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// Ends OpenMP's threads, because they spin on for a moment, and the next measurement must not share processors with them.
void EndOpenMpThreads() {
  constexpr int kPauseHard = 2;  // omp_pause_hard
  if (auto* pause = OpenMp<int(int)>("omp_pause_resource_all")) pause(kPauseHard);
}

double FlopsPerSecond(int64_t m, int64_t out, int64_t in, kernels::DType dtype, int num_threads) {
  using dnnl::memory;
  using kernels::DType;
  auto* set_threads = OpenMp<void(int)>("omp_set_num_threads");
  if (dtype == DType::kF16 || set_threads == nullptr) return 0;
  set_threads(kernels::BenchThreads(num_threads));
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const auto type = dtype == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
    const memory::desc x_desc({m, in}, type, memory::format_tag::ab);
    const memory::desc any_weights({in, out}, type, memory::format_tag::any);
    const memory::desc y_desc({m, out}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc primitive(dnnl::matmul::desc(x_desc, any_weights, y_desc),
                                                 engine);
    const dnnl::matmul product(primitive);
    memory x(x_desc, engine), weights(primitive.weights_desc(), engine), y(y_desc, engine);
    std::memset(x.get_data_handle(), 0x3c, x_desc.get_size());
    std::memset(weights.get_data_handle(), 0x3c, primitive.weights_desc().get_size());
    const double seconds = kernels::BestSeconds(0.5, [&] {
      product.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, y}});
      stream.wait();
    });
    EndOpenMpThreads();
    return kernels::MatmulFlops(m, out, in) / seconds;
  } catch (const dnnl::error&) {
    return 0;  // no such product on this processor
  }
}

std::string Version() {
  const dnnl_version_t* version = dnnl_version();
  return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch);
}

}  // namespace

kernels::ProductBaseline OneDnnBaseline() { return {Version(), FlopsPerSecond}; }

}  // namespace winnow::bench
