#include "engine/retrieval/transform_fit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/counter_random.h"
#include "kernels/check.h"
#include "kernels/transform_code.h"

namespace winnow::engine {
namespace {

using kernels::TransformCodeHead;
using Doubles = std::vector<double>;

constexpr int32_t kWidthMax = 8;
constexpr int32_t kCellBits = 8;
constexpr double kRidge = 1e-4;  // of the queries' mean second moment

// Of a unit normal, by width: the step of the uniform quantiser of least squared error (Max, 1960), and that error.
constexpr std::array<double, kWidthMax + 1> kSteps = {0,      1.5958, 0.9957, 0.5860, 0.3352,
                                                      0.1881, 0.1041, 0.0569, 0.0308};
constexpr std::array<double, kWidthMax + 1> kErrors = {
    1, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000877};

// Rows of a sample at new positions: real numbers, one in each of as many equal parts of [first, context), in random
// order. Without this the slow pairs of RoPE, which a short sample hardly turns, drift out of the quantiser later.
class Spreader {
 public:
  explicit Spreader(const TransformFitOptions& options) : options_(options) {}

  template <typename Use>
  void ForEach(const std::vector<float>& rows, const std::vector<int32_t>& positions, int32_t first,
               Use use) {
    const int32_t d = options_.head_dim, half = d / 2;
    const size_t n = positions.size();
    const int32_t begin = std::min(first, options_.served_context / 2);
    Doubles row(d);
    std::vector<size_t> order(n);
    for (int32_t copy = 0; copy < std::max(1, options_.copies); ++copy) {
      std::iota(order.begin(), order.end(), size_t{0});
      for (size_t i = n; i > 1; --i) {
        std::swap(order[i - 1], order[static_cast<size_t>(Random() * static_cast<double>(i))]);
      }
      for (size_t i = 0; i < n; ++i) {
        const float* from = &rows[i * d];
        double shift = 0;
        if (options_.copies > 0) {
          shift = static_cast<double>(order[i]) / static_cast<double>(n) *
                      (options_.served_context - begin) +
                  begin - positions[i];
        }
        for (int32_t c = 0; c < half; ++c) {
          const double angle = shift * static_cast<double>(options_.inv_freq[c]);
          const double cos = std::cos(angle), sin = std::sin(angle);
          row[c] = from[c] * cos - from[c + half] * sin;
          row[c + half] = from[c + half] * cos + from[c] * sin;
        }
        use(row);
      }
    }
  }

 private:
  double Random() { return CounterRandom(options_.seed, index_++); }
  const TransformFitOptions& options_;
  uint64_t index_ = 0;
};

// matrix [n][n] += row rowᵀ, the upper triangle.
void AddOuter(const Doubles& row, Doubles& matrix) {
  const size_t n = row.size();
  for (size_t i = 0; i < n; ++i) {
    double* to = &matrix[i * n];
    for (size_t j = i; j < n; ++j) to[j] += row[i] * row[j];
  }
}
void Mirror(Doubles& matrix, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < i; ++j) matrix[i * n + j] = matrix[j * n + i];
  }
}

Doubles Multiply(const Doubles& a, const Doubles& b, size_t n) {
  Doubles c(n * n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t k = 0; k < n; ++k) {
      const double value = a[i * n + k];
      for (size_t j = 0; j < n; ++j) c[i * n + j] += value * b[k * n + j];
    }
  }
  return c;
}

// Widths of quads of dimensions of falling variance: four bits at a time to the quad whose error falls most.
std::vector<uint8_t> AllocateQuads(const Doubles& variance, int32_t bits) {
  const size_t quads = variance.size() / 4;
  std::vector<uint8_t> widths(quads);
  for (int32_t left = bits / 4; left > 0; --left) {
    size_t best = quads;
    double best_gain = -1;
    for (size_t quad = 0; quad < quads; ++quad) {
      const uint8_t width = widths[quad];
      if (width == kWidthMax) continue;
      const double sum = std::accumulate(&variance[4 * quad], &variance[4 * quad] + 4, 0.0);
      const double gain = sum * (kErrors[width] - kErrors[width + 1]);
      if (gain > best_gain) {
        best_gain = gain;
        best = quad;
      }
    }
    WINNOW_CHECK(best < quads);
    ++widths[best];
  }
  return widths;
}

// Leading bits of each dimension's index that name a cell: one at a time to the dimension with the most variance left,
// whose first bit leaves 1 / 2.75 of it and every later one a quarter.
std::vector<int32_t> AllocateCells(const Doubles& variance, const std::vector<uint8_t>& widths) {
  std::vector<int32_t> bits(variance.size());
  Doubles left = variance;
  for (int32_t i = 0; i < kCellBits; ++i) {
    const size_t at = std::max_element(left.begin(), left.end()) - left.begin();
    left[at] /= ++bits[at] == 1 ? 2.75 : 4;
  }
  for (size_t i = 0; i < bits.size(); ++i) {
    bits[i] = std::min<int32_t>(bits[i], i / 4 < widths.size() ? widths[i / 4] : 0);
  }
  return bits;
}

// The place in the code of bit `bit` of the index of dimension i.
uint8_t BitInCode(const TransformCodeHead& head, int32_t i, int32_t bit) {
  for (const kernels::CodeField& field : head.fields) {
    if (field.quad != i / 4 || bit < field.low || bit >= field.low + field.width) continue;
    return static_cast<uint8_t>(32 * field.word + 8 * (i % 4) + field.shift + bit - field.low);
  }
  WINNOW_CHECK(false);
  return 0;
}

std::vector<uint8_t> CellBits(const TransformCodeHead& head, const Doubles& variance) {
  const std::vector<int32_t> bits = AllocateCells(variance, head.widths);
  std::vector<uint8_t> places;
  for (int32_t i = 0; i < 4 * head.quads; ++i) {
    for (int32_t b = 0; b < bits[i]; ++b) {
      places.push_back(BitInCode(head, i, head.widths[i / 4] - 1 - b));
    }
  }
  return places;
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

// A = S V for keys and B = S⁻¹ V for queries, [d][d], with the variances of the coordinates, descending.
struct Transform {
  Doubles mean, a, b, variance;
};
absl::StatusOr<Transform> MakeTransform(const TransformSample& sample,
                                        const TransformFitOptions& options) {
  const int32_t d = options.head_dim;
  const auto size = static_cast<size_t>(d);
  Spreader spreader(options);
  Transform transform{Doubles(size), {}, {}, {}};
  Doubles of_keys(size * size), of_queries(size * size);
  double keys = 0, queries = 0;
  spreader.ForEach(sample.keys, sample.key_positions, options.first_key, [&](const Doubles& row) {
    for (int32_t c = 0; c < d; ++c) transform.mean[c] += row[c];
    AddOuter(row, of_keys);
    ++keys;
  });
  for (double& mean : transform.mean) mean /= keys;
  for (int32_t i = 0; i < d; ++i) {
    for (int32_t j = i; j < d; ++j) {
      double& value = of_keys[i * size + j];
      value = value / keys - transform.mean[i] * transform.mean[j];
    }
  }
  Mirror(of_keys, size);
  spreader.ForEach(sample.queries, sample.query_positions, options.first_query,
                   [&](const Doubles& row) {
                     AddOuter(row, of_queries);
                     ++queries;
                   });
  Mirror(of_queries, size);
  double trace = 0;
  for (double& value : of_queries) value /= queries;
  for (int32_t i = 0; i < d; ++i) trace += of_queries[i * size + i];
  if (!(trace > 0)) return absl::InvalidArgumentError("its queries are all zero");
  for (int32_t i = 0; i < d; ++i) of_queries[i * size + i] += kRidge * trace / d;

  Doubles w, u;
  if (!SymmetricEigen(of_queries, d, &w, &u)) {
    return absl::InvalidArgumentError("its queries have no eigenvectors");
  }
  Doubles root(size * size), inverse(size * size);  // S, S⁻¹
  for (int32_t i = 0; i < d; ++i) {
    for (int32_t k = 0; k < d; ++k) {
      const double s = std::sqrt(w[k]);
      for (int32_t j = 0; j < d; ++j) {
        root[i * size + j] += u[i * size + k] * s * u[j * size + k];
        inverse[i * size + j] += u[i * size + k] / s * u[j * size + k];
      }
    }
  }
  const Doubles covariance = Multiply(Multiply(root, of_keys, size), root, size);
  Doubles v;
  if (!SymmetricEigen(covariance, d, &transform.variance, &v)) {
    return absl::InvalidArgumentError("its keys have no eigenvectors");
  }
  for (double& variance : transform.variance) variance = std::max(variance, 0.0);
  if (!(transform.variance[0] > 1e-30)) return absl::InvalidArgumentError("its keys do not vary");
  transform.a = Multiply(root, v, size);
  transform.b = Multiply(inverse, v, size);
  return transform;
}

// The step of dimension i, of its width. A dimension without variance has steps of any size: its index is the middle one.
double StepOf(const Doubles& variance, const std::vector<uint8_t>& widths, size_t i, double least) {
  return kSteps[widths[i / 4]] * std::sqrt(std::max(variance[i], least));
}

// The second code, by the same rule: of the dimensions with the largest error first, in quads of like errors.
TransformCodeHead FitResidual(const Transform& transform, const TransformCodeHead& first,
                              const Doubles& distortion, int32_t bits) {
  const size_t size = distortion.size();
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return distortion[a] > distortion[b]; });
  Doubles errors;
  for (const size_t i : order) errors.push_back(distortion[i]);
  TransformCodeHead head;
  head.widths = AllocateQuads(errors, bits);
  while (!head.widths.empty() && head.widths.back() == 0) head.widths.pop_back();
  head.quads = static_cast<int32_t>(head.widths.size());
  head.fields = kernels::LayCodeFields(head.widths, bits / 32);
  head.mean.assign(size, 0);
  const auto n = size_t{4} * head.quads, of_first = size_t{4} * first.quads;
  const double least = 1e-12 * transform.variance[0];
  head.key_weight.resize(size * n);
  head.query_weight.resize(size * n);
  for (size_t i = 0; i < n; ++i) {
    const size_t dim = order[i];
    const double step = StepOf(errors, head.widths, i, least);
    double bias = std::ldexp(1.0, head.widths[i / 4] - 1);
    double steps = 0;
    if (dim < of_first) {
      // The first code's level: its index from the middle of its range, half a step on.
      steps = StepOf(transform.variance, first.widths, dim, least) / step;
      bias += steps * (std::ldexp(1.0, first.widths[dim / 4] - 1) - 0.5);
    }
    for (size_t c = 0; c < size; ++c) {
      const double a = transform.a[c * size + dim] / step;
      bias -= transform.mean[c] * a;
      head.key_weight[c * n + i] = static_cast<float>(a);
      head.query_weight[c * n + i] = static_cast<float>(transform.b[c * size + dim] * step);
    }
    head.key_bias.push_back(static_cast<float>(bias));
    head.first_dims.push_back(dim < of_first ? static_cast<int16_t>(dim) : int16_t{-1});
    head.first_steps.push_back(static_cast<float>(steps));
  }
  return head;
}

}  // namespace

bool SymmetricEigen(std::vector<double> m, int32_t n, std::vector<double>* values,
                    std::vector<double>* vectors) {
  const auto at = [n](int32_t i, int32_t j) { return size_t{1} * i * n + j; };
  if (!std::all_of(m.begin(), m.end(), [](double x) { return std::isfinite(x); })) return false;
  Doubles v(m.size());
  for (int32_t i = 0; i < n; ++i) v[at(i, i)] = 1;
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off = 0, on = 0;
    for (int32_t i = 0; i < n; ++i) {
      on += m[at(i, i)] * m[at(i, i)];
      for (int32_t j = i + 1; j < n; ++j) off += m[at(i, j)] * m[at(i, j)];
    }
    if (off <= 1e-26 * on) break;
    for (int32_t p = 0; p < n; ++p) {
      for (int32_t q = p + 1; q < n; ++q) {
        const double apq = m[at(p, q)];
        if (apq == 0) continue;
        const double theta = (m[at(q, q)] - m[at(p, p)]) / (2 * apq);
        const double t =
            std::copysign(1.0, theta) / (std::fabs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        const auto turn = [c, s](double* x, double* y) {
          const double a = *x, b = *y;
          *x = c * a - s * b;
          *y = s * a + c * b;
        };
        // The matrix stays symmetric: rows, and then columns from rows by symmetry, would lose accuracy.
        for (int32_t k = 0; k < n; ++k) turn(&m[at(p, k)], &m[at(q, k)]);
        for (int32_t k = 0; k < n; ++k) turn(&m[at(k, p)], &m[at(k, q)]);
        for (int32_t k = 0; k < n; ++k) turn(&v[at(p, k)], &v[at(q, k)]);  // eigenvectors as rows
      }
    }
  }
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return m[at(a, a)] > m[at(b, b)]; });
  values->resize(n);
  vectors->resize(m.size());
  for (int32_t j = 0; j < n; ++j) {
    const double* row = &v[at(order[j], 0)];
    const double* largest = std::max_element(
        row, row + n, [](double a, double b) { return std::fabs(a) < std::fabs(b); });
    const double sign = *largest < 0 ? -1 : 1;
    (*values)[j] = m[at(order[j], order[j])];
    for (int32_t i = 0; i < n; ++i) (*vectors)[at(i, j)] = sign * row[i];
  }
  return true;
}

absl::StatusOr<TransformHeadFit> FitTransformHead(const TransformSample& sample,
                                                  const TransformFitOptions& options) {
  const int32_t d = options.head_dim;
  const auto size = static_cast<size_t>(d);
  WINNOW_CHECK(d % 4 == 0 && options.inv_freq.size() == size / 2 && options.served_context > 0);
  WINNOW_CHECK(sample.keys.size() == sample.key_positions.size() * size &&
               sample.queries.size() == sample.query_positions.size() * size);
  if (sample.key_positions.size() < 64 || sample.query_positions.size() < 16) {
    return absl::InvalidArgumentError("its sample is too short");
  }
  if (!AllFinite(sample.keys)) return absl::InvalidArgumentError("a key is not finite");
  if (!AllFinite(sample.queries)) return absl::InvalidArgumentError("a query is not finite");
  absl::StatusOr<Transform> transform = MakeTransform(sample, options);
  if (!transform.ok()) return transform.status();

  TransformHeadFit fit;
  TransformCodeHead& head = fit.head;
  std::vector<uint8_t> widths = AllocateQuads(transform->variance, options.bits);
  while (!widths.empty() && widths.back() == 0) widths.pop_back();
  // Sums of variances fall, and with them the widths: no quad before the last kept one has none.
  WINNOW_CHECK(std::find(widths.begin(), widths.end(), 0) == widths.end());
  head.quads = static_cast<int32_t>(widths.size());
  head.widths = widths;
  head.fields = kernels::LayCodeFields(head.widths, options.bits / 32);
  const int32_t n = 4 * head.quads;
  const auto step_of = [&](int32_t i) {
    return StepOf(transform->variance, head.widths, i, 1e-12 * transform->variance[0]);
  };
  head.key_weight.resize(size * n);
  head.query_weight.resize(size * n);
  head.key_bias.resize(n);
  for (int32_t i = 0; i < n; ++i) {
    const double step = step_of(i);
    double bias = std::ldexp(1.0, head.widths[i / 4] - 1);
    for (int32_t c = 0; c < d; ++c) {
      const double a = transform->a[c * size + i] / step;
      bias -= transform->mean[c] * a;
      head.key_weight[size_t{1} * c * n + i] = static_cast<float>(a);
      head.query_weight[size_t{1} * c * n + i] =
          static_cast<float>(transform->b[c * size + i] * step);
    }
    head.key_bias[i] = static_cast<float>(bias);
  }
  head.mean.assign(transform->mean.begin(), transform->mean.end());
  head.cell_bits = CellBits(head, transform->variance);
  for (int32_t i = 0; i < d; ++i) {
    const int32_t width = i < n ? head.widths[i / 4] : 0;
    fit.distortion.push_back(transform->variance[i] * kErrors[width]);
  }
  fit.residual = FitResidual(*transform, head, fit.distortion, options.bits);
  // delta = 1/2 sum of (Bᵀq)_i² D_i / divisor nats, in base 2.
  const double divisor =
      options.logit_divisor == 0 ? d : options.logit_divisor * options.logit_divisor;
  for (int32_t i = 0; i < d; ++i) {
    const double root = std::sqrt(0.5 * fit.distortion[i] / divisor *
                                  static_cast<double>(kernels::kTransformLog2E));
    for (int32_t c = 0; c < d; ++c) {
      fit.delta_weight.push_back(static_cast<float>(transform->b[c * size + i] * root));
    }
  }
  for (const TransformCodeHead* made : {&fit.head, &fit.residual}) {
    if (!AllFinite(made->key_weight) || !AllFinite(made->query_weight) ||
        !AllFinite(made->key_bias)) {
      return absl::InvalidArgumentError("its transform is not finite");
    }
  }
  return fit;
}

// ---- whether a tail helps ----

namespace {

constexpr int32_t kSink = 16, kRecent = 128;

struct State {
  double lse = -std::numeric_limits<double>::infinity();
  Doubles out;
};

class TailMeter {
 public:
  TailMeter(const TransformWindow& window, const TransformHeadFit& fit)
      : window_(window),
        fit_(fit),
        d_(static_cast<int32_t>(fit.head.mean.size())),
        n_(4 * fit.head.quads),
        logit_divisor_(window.logit_divisor == 0 ? std::sqrt(static_cast<double>(d_))
                                                 : window.logit_divisor) {
    kernels::TransformCodeWeights weights{d_, 0, {fit.head}};
    for (int32_t t = 0; t < window.tokens; ++t) {
      indexes_.push_back(
          kernels::TransformIndexesRef(&window.keys[size_t{1} * t * d_], weights, 0));
      cells_.push_back(CellOf(indexes_.back()));
    }
  }

  TailErrors Measure(int32_t query) const {
    const int32_t visible = window_.query_positions[query] + 1, mid_last = visible - kRecent;
    const int32_t k = std::max(1, static_cast<int32_t>(std::floor(0.02 * visible + 0.5)));
    TailErrors errors;
    if (mid_last - kSink <= k) return errors;
    const int32_t mids = mid_last - kSink;
    std::vector<Doubles> exact(window_.group), estimates(window_.group);
    Doubles scores(mids);
    for (int32_t g = 0; g < window_.group; ++g) {
      const float* q = &window_.queries[(size_t{1} * query * window_.group + g) * d_];
      exact[g] = Logits(q, visible);
      estimates[g] = Estimates(q, mid_last);
      double anchors = 0, all = 0, top = *std::max_element(exact[g].begin(), exact[g].end());
      for (int32_t t = 0; t < visible; ++t) {
        if (t < kSink || t >= mid_last) anchors += std::exp(exact[g][t] - top);
      }
      for (const double logit : estimates[g]) all += std::exp(logit - top);
      for (int32_t j = 0; j < mids; ++j) {
        scores[j] += std::exp(estimates[g][j] - top) / (anchors + all);
      }
    }
    std::vector<int32_t> order(mids);
    std::iota(order.begin(), order.end(), 0);
    std::nth_element(order.begin(), order.begin() + (k - 1), order.end(),
                     [&](int32_t a, int32_t b) {
                       return scores[a] != scores[b] ? scores[a] > scores[b] : a > b;
                     });
    std::vector<bool> read(visible, false);
    for (int32_t t = 0; t < visible; ++t) read[t] = t < kSink || t >= mid_last;
    for (int32_t j = 0; j < k; ++j) read[kSink + order[j]] = true;
    const std::vector<Doubles> means =
        CellMeans(visible / kernels::kCellRefreshTokens * kernels::kCellRefreshTokens);
    for (int32_t g = 0; g < window_.group; ++g) {
      const float* q = &window_.queries[(size_t{1} * query * window_.group + g) * d_];
      AddErrors(exact[g], estimates[g], read, means, Delta(q), errors);
    }
    return errors;
  }

 private:
  int32_t CellOf(const std::vector<uint8_t>& index) const {
    int32_t cell = 0;
    for (const uint8_t bit : fit_.head.cell_bits) {
      for (const kernels::CodeField& field : fit_.head.fields) {
        const int32_t in_byte = bit % 8;
        if (field.word != bit / 32 || in_byte < field.shift ||
            in_byte >= field.shift + field.width) {
          continue;
        }
        cell = cell << 1 |
               (index[4 * field.quad + bit % 32 / 8] >> (field.low + in_byte - field.shift) & 1);
      }
    }
    return cell;
  }
  Doubles Logits(const float* q, int32_t visible) const {
    Doubles logits(visible);
    for (int32_t t = 0; t < visible; ++t) {
      double dot = 0;
      for (int32_t c = 0; c < d_; ++c) dot += double{q[c]} * window_.keys[size_t{1} * t * d_ + c];
      logits[t] = dot / logit_divisor_;
    }
    return logits;
  }
  Doubles Estimates(const float* q, int32_t mid_last) const {
    Doubles coef(n_);
    double centre = 0;
    for (int32_t c = 0; c < d_; ++c) {
      centre += double{q[c]} * fit_.head.mean[c];
      for (int32_t i = 0; i < n_; ++i) {
        coef[i] += double{q[c]} * fit_.head.query_weight[size_t{1} * c * n_ + i];
      }
    }
    for (int32_t i = 0; i < n_; ++i) {
      centre -= coef[i] * ((1 << fit_.head.widths[i / 4]) - 1) / 2.0;
    }
    Doubles logits;
    for (int32_t t = kSink; t < mid_last; ++t) {
      double dot = centre;
      for (int32_t i = 0; i < n_; ++i) dot += coef[i] * indexes_[t][i];
      logits.push_back(dot / logit_divisor_);
    }
    return logits;
  }
  double Delta(const float* q) const {  // nats
    double sum = 0;
    for (int32_t i = 0; i < d_; ++i) {
      double along = 0;
      for (int32_t c = 0; c < d_; ++c)
        along += double{q[c]} * fit_.delta_weight[size_t{1} * i * d_ + c];
      sum += along * along;
    }
    return sum / static_cast<double>(kernels::kTransformLog2E);
  }
  std::vector<Doubles> CellMeans(int32_t last) const {
    std::vector<Doubles> sums(kernels::kTransformCells, Doubles(d_));
    Doubles counts(kernels::kTransformCells), all(d_);
    for (int32_t t = kSink; t < last; ++t) {
      ++counts[cells_[t]];
      for (int32_t c = 0; c < d_; ++c) {
        const double value = window_.values[size_t{1} * t * d_ + c];
        sums[cells_[t]][c] += value;
        all[c] += value / std::max(1, last - kSink);
      }
    }
    for (int32_t cell = 0; cell < kernels::kTransformCells; ++cell) {
      for (int32_t c = 0; c < d_; ++c)
        sums[cell][c] = (sums[cell][c] + all[c]) / (counts[cell] + 1);
    }
    return sums;
  }
  void AddErrors(const Doubles& exact, const Doubles& estimates, const std::vector<bool>& read,
                 const std::vector<Doubles>& means, double delta, TailErrors& errors) const {
    const auto visible = static_cast<int32_t>(exact.size());
    const double top = *std::max_element(exact.begin(), exact.end());
    Doubles truth(d_), of_read(d_), of_tail(d_);
    double truth_sum = 0, read_sum = 0, tail_sum = 0;
    for (int32_t t = 0; t < visible; ++t) {
      const double weight = std::exp(exact[t] - top);
      truth_sum += weight;
      if (read[t]) read_sum += weight;
      for (int32_t c = 0; c < d_; ++c) {
        const double value = weight * window_.values[size_t{1} * t * d_ + c];
        truth[c] += value;
        if (read[t]) of_read[c] += value;
      }
      if (read[t]) continue;
      const double estimate = std::exp(std::min(estimates[t - kSink] - top, 20.0));
      tail_sum += estimate;
      for (int32_t c = 0; c < d_; ++c) of_tail[c] += estimate * means[cells_[t]][c];
    }
    double norm = 0, none = 0, tail = 0, with_delta = 0;
    for (int32_t c = 0; c < d_; ++c) {
      const double out = truth[c] / truth_sum, grown = std::exp(delta);
      const auto square = [](double x) { return x * x; };
      norm += square(out);
      none += square(of_read[c] / read_sum - out);
      tail += square((of_read[c] + of_tail[c]) / (read_sum + tail_sum) - out);
      with_delta += square((of_read[c] + grown * of_tail[c]) / (read_sum + grown * tail_sum) - out);
    }
    norm = std::max(norm, 1e-30);
    errors += {std::sqrt(none / norm), std::sqrt(tail / norm), std::sqrt(with_delta / norm), 1};
  }

  const TransformWindow& window_;
  const TransformHeadFit& fit_;
  const int32_t d_, n_;
  const double logit_divisor_;
  std::vector<std::vector<uint8_t>> indexes_;
  std::vector<int32_t> cells_;
};

}  // namespace

TailErrors& TailErrors::operator+=(const TailErrors& other) {
  none += other.none;
  tail += other.tail;
  delta += other.delta;
  outputs += other.outputs;
  return *this;
}

TailErrors MeasureTail(const TransformWindow& window, const TransformHeadFit& fit) {
  const TailMeter meter(window, fit);
  TailErrors errors;
  for (int32_t i = 0; i < static_cast<int32_t>(window.query_positions.size()); ++i) {
    errors += meter.Measure(i);
  }
  return errors;
}

}  // namespace winnow::engine
