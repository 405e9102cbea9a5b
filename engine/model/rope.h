// Rotary position embedding: the frequencies of each kind of scaling (plain arithmetic; reading the
// keys is model_config's, rotating is the backend's).
#ifndef WINNOW_ENGINE_MODEL_ROPE_H_
#define WINNOW_ENGINE_MODEL_ROPE_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace winnow::engine {

struct RopeScaling {
  enum class Kind { kNone, kLinear, kLlama3, kYarn, kFactors, kLongRope };
  Kind kind = Kind::kNone;
  double factor = 1.0;
  // llama3
  double low_freq_factor = 1.0, high_freq_factor = 4.0;
  // llama3, yarn and longrope: length the model was first trained at
  double original_max_position_embeddings = 0;
  // yarn; longrope has attention_factor, too
  double beta_fast = 32, beta_slow = 1;
  std::optional<double> attention_factor = {}, mscale = {}, mscale_all_dim = {};
  bool truncate = true;
  // factors: what each frequency is divided by, [rotary_dim/2]. GGUF files have the outcome of llama3 so.
  std::vector<float> factors = {};
  // longrope: the same for contexts up to original_max_position_embeddings, and for longer ones.
  std::vector<float> short_factors = {}, long_factors = {};
  // longrope: the longest context that is served, which decides between them; 0: not known yet (WithServedContext). The
  // reference decides by the length of each sequence, but keys that were rotated one way cannot be read with the other.
  int32_t served_context = 0;

  bool UsesLongFactors() const {
    return kind == Kind::kLongRope && served_context > original_max_position_embeddings;
  }

  bool operator==(const RopeScaling&) const = default;
};

// Makes queries larger the farther they lie beyond the length that the model was first trained at (Ministral 3), by
// 1 + beta · ln(1 + floor(position / length)).
struct QueryScaling {
  double beta = 0;  // 0: by nothing
  double length = 0;

  // In float32, as the reference computes it.
  float Factor(int32_t position) const;

  bool operator==(const QueryScaling&) const = default;
};

// inv_freq [rotary_dim/2] and the factor on cos and sin, as transformers computes them (float32).
struct RopeParameters {
  std::vector<float> inv_freq;
  float attention_factor = 1.0f;
};

// `rotary_dim`: values of a head that rotate. REQUIRES: it is even and positive, theta > 1, scaling as LoadModelConfig lets it
// pass.
// Every step is rounded to float32 where the reference rounds. Its vectorised pow may differ from
// ours in the last bit (of 4,000 random scalings 0.9 % of the frequencies did): a few units of the
// last place after the reciprocal and the interpolations, nothing at the shapes of public models.
RopeParameters ComputeRope(int32_t rotary_dim, double theta, const RopeScaling& scaling);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_ROPE_H_
