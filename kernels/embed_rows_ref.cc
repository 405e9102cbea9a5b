#include "kernels/embed_rows.h"
#include "kernels/host_matrix.h"

namespace winnow::kernels {

void EmbedRowsRef(const HostMatrix& table, std::span<const int32_t> ids, float scale,
                  const Tensor& out) {
  for (size_t i = 0; i < ids.size(); ++i) {
    for (int64_t j = 0; j < table.cols; ++j)
      out.f32(static_cast<int64_t>(i))[j] = ElementOf(table, ids[i], j) * scale;
  }
}

}  // namespace winnow::kernels
