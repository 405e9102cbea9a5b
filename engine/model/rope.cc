#include "engine/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/check.h"

namespace winnow::engine {
namespace {

// theta^(2j/d), j < d/2, in float32. The power is taken in double and rounded once.
std::vector<float> PositionFrequencies(int32_t rotary_dim, double theta) {
  const float base = static_cast<float>(theta);
  std::vector<float> frequencies(rotary_dim / 2);
  for (int32_t j = 0; j < rotary_dim / 2; ++j) {
    const float exponent = static_cast<float>(2 * j) / static_cast<float>(rotary_dim);
    frequencies[j] =
        static_cast<float>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  return frequencies;
}

// Long wavelengths are divided by `factor`, short ones kept, those between interpolated.
float Llama3Frequency(float inv_freq, const RopeScaling& scaling) {
  const float factor = static_cast<float>(scaling.factor);
  const double old_length = scaling.original_max_position_embeddings;
  const float low_wavelength = static_cast<float>(old_length / scaling.low_freq_factor);
  const float high_wavelength = static_cast<float>(old_length / scaling.high_freq_factor);

  const float wavelength = (1.0f / inv_freq) * static_cast<float>(2 * std::numbers::pi);
  if (wavelength > low_wavelength) return inv_freq / factor;
  if (wavelength < high_wavelength) return inv_freq;
  const float turns = (1.0f / wavelength) * static_cast<float>(old_length);
  const float smooth = (turns - static_cast<float>(scaling.low_freq_factor)) /
                       static_cast<float>(scaling.high_freq_factor - scaling.low_freq_factor);
  const float scaled = (1.0f - smooth) * inv_freq / factor;
  return scaled + smooth * inv_freq;
}

double YarnMagnitude(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

// Zero counts as absent for mscale, mscale_all_dim and the betas, as in the reference.
double YarnAttentionFactor(const RopeScaling& scaling) {
  if (scaling.attention_factor) return *scaling.attention_factor;
  if (scaling.mscale.value_or(0) != 0 && scaling.mscale_all_dim.value_or(0) != 0) {
    return YarnMagnitude(scaling.factor, *scaling.mscale) /
           YarnMagnitude(scaling.factor, *scaling.mscale_all_dim);
  }
  return YarnMagnitude(scaling.factor, 1.0);
}

double LongRopeAttentionFactor(const RopeScaling& scaling) {
  if (scaling.attention_factor) return *scaling.attention_factor;
  if (scaling.factor <= 1) return 1;
  return std::sqrt(1 +
                   std::log(scaling.factor) / std::log(scaling.original_max_position_embeddings));
}

// The (fractional) pair of dimensions that turns `rotations` times over the original length.
double YarnCorrectionDim(double rotations, int32_t rotary_dim, double theta,
                         double original_length) {
  return rotary_dim * std::log(original_length / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(theta));
}

std::vector<float> YarnFrequencies(const std::vector<float>& frequencies, int32_t rotary_dim,
                                   double theta, const RopeScaling& scaling) {
  const double beta_fast = scaling.beta_fast != 0 ? scaling.beta_fast : 32;
  const double beta_slow = scaling.beta_slow != 0 ? scaling.beta_slow : 1;
  const double original_length = scaling.original_max_position_embeddings;
  double low = YarnCorrectionDim(beta_fast, rotary_dim, theta, original_length);
  double high = YarnCorrectionDim(beta_slow, rotary_dim, theta, original_length);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, rotary_dim - 1.0);
  if (low == high) high += 0.001;  // no division by zero

  const float factor = static_cast<float>(scaling.factor);
  std::vector<float> inv_freq(frequencies.size());
  for (size_t j = 0; j < frequencies.size(); ++j) {
    const float extrapolation = 1.0f / frequencies[j];
    const float interpolation = 1.0f / (factor * frequencies[j]);
    const float ramp =
        (static_cast<float>(j) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float keep = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
    inv_freq[j] = interpolation * (1.0f - keep) + extrapolation * keep;
  }
  return inv_freq;
}

}  // namespace

float QueryScaling::Factor(int32_t position) const {
  if (beta == 0) return 1.0f;
  const float lengths = std::floor(static_cast<float>(position) / static_cast<float>(length));
  return 1.0f + static_cast<float>(beta) * std::log(1.0f + lengths);
}

RopeParameters ComputeRope(int32_t rotary_dim, double theta, const RopeScaling& scaling) {
  WINNOW_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0);
  WINNOW_CHECK(theta > 1);
  const std::vector<float> frequencies = PositionFrequencies(rotary_dim, theta);
  RopeParameters rope;
  if (scaling.kind == RopeScaling::Kind::kYarn) {
    rope.inv_freq = YarnFrequencies(frequencies, rotary_dim, theta, scaling);
    rope.attention_factor = static_cast<float>(YarnAttentionFactor(scaling));
    return rope;
  }
  if (scaling.kind == RopeScaling::Kind::kLongRope) {
    rope.attention_factor = static_cast<float>(LongRopeAttentionFactor(scaling));
  }
  for (size_t j = 0; j < frequencies.size(); ++j) {
    const float inv_freq = 1.0f / frequencies[j];
    switch (scaling.kind) {
      case RopeScaling::Kind::kNone:
        rope.inv_freq.push_back(inv_freq);
        break;
      case RopeScaling::Kind::kLinear:
        rope.inv_freq.push_back(inv_freq / static_cast<float>(scaling.factor));
        break;
      case RopeScaling::Kind::kLlama3:
        rope.inv_freq.push_back(Llama3Frequency(inv_freq, scaling));
        break;
      case RopeScaling::Kind::kLongRope: {
        const std::vector<float>& factors =
            scaling.UsesLongFactors() ? scaling.long_factors : scaling.short_factors;
        WINNOW_CHECK(factors.size() == frequencies.size());
        rope.inv_freq.push_back(1.0f / (factors[j] * frequencies[j]));
        break;
      }
      case RopeScaling::Kind::kFactors:
        WINNOW_CHECK(scaling.factors.size() == frequencies.size());
        rope.inv_freq.push_back(inv_freq / scaling.factors[j]);
        break;
      case RopeScaling::Kind::kYarn:
        WINNOW_CHECK(false);
    }
  }
  return rope;
}

}  // namespace winnow::engine
