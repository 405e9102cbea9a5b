// What tests of Sample share: rows of every kind, options of every kind, and what a backend may answer.
#ifndef WINNOW_TESTS_UNIT_KERNELS_SAMPLE_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_SAMPLE_TESTING_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <set>
#include <span>
#include <vector>

#include "kernels/sample.h"
#include "kernels/token_noise.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {

// A SampleRow that owns what it points to.
struct AnySampleRow {
  std::vector<LogitEdit> edits;
  std::vector<int32_t> masked;
  std::vector<uint32_t> allowed;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1, min_p = 0;
  uint64_t noise = 0;
  int32_t top_logprobs = -1;
  int32_t given = -1;

  SampleRow row() const {
    return {edits,
            masked,
            allowed,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            temperature,
            top_k,
            top_p,
            min_p,
            noise,
            top_logprobs,
            given};
  }

  static AnySampleRow Any(Random& random, int64_t vocab) {
    AnySampleRow row;
    if (random.Int(0, 3) > 0) {
      constexpr float kTemperatures[] = {1e-30f, 0.1f, 0.7f, 0.8f, 1.0f, 1.5f, 3.0f, 100.0f};
      row.temperature = kTemperatures[random.Int(0, 7)];
    }
    if (random.Int(0, 1) == 0) {
      row.top_k = static_cast<int32_t>(random.Int(0, 2) == 0 ? random.Int(1, vocab + 2)
                                                             : random.Int(1, 60));
    }
    if (random.Int(0, 1) == 0) row.top_p = static_cast<float>(random.Int(1, 999)) / 1000.0f;
    if (random.Int(0, 3) == 0) row.min_p = static_cast<float>(random.Int(1, 200)) / 200.0f;
    row.noise = static_cast<uint64_t>(random.Int(INT64_MIN, INT64_MAX));
    if (random.Int(0, 2) > 0) {
      row.top_logprobs = static_cast<int32_t>(random.Int(0, kMaxTopLogprobs));
    }
    if (random.Int(0, 1) == 0) {
      row.repetition_penalty = static_cast<float>(random.Int(50, 200)) / 100.0f;
      row.presence_penalty = random.Normal();
      row.frequency_penalty = random.Normal(0.3f);
      std::set<int32_t> tokens;
      const int64_t most = random.Int(0, 4) == 0 ? 4000 : 30;
      for (int64_t i = random.Int(1, most); i > 0; --i) {
        tokens.insert(static_cast<int32_t>(random.Int(0, vocab - 1)));
      }
      for (const int32_t token : tokens) {
        row.edits.push_back({token, static_cast<int32_t>(random.Int(-1, 5)),
                             random.Int(0, 1) == 0 ? 0.0f : random.Normal(3.0f)});
      }
      random.Shuffle(row.edits);
    }
    if (random.Int(0, 3) == 0) {
      for (int64_t i = random.Int(1, 8); i > 0; --i) {
        row.masked.push_back(static_cast<int32_t>(random.Int(0, vocab - 1)));
      }
    }
    if (random.Int(0, 2) == 0) row.AllowSome(random, vocab);
    if (random.Int(0, 4) == 0) row.given = static_cast<int32_t>(random.Int(0, vocab - 1));
    return row;
  }

  // Few tokens, half of them, or nearly all.
  void AllowSome(Random& random, int64_t vocab) {
    allowed.assign(AllowedWords(vocab), 0);
    const int64_t of_16 = random.Int(0, 2) == 0 ? 1 : random.Int(0, 1) == 0 ? 8 : 15;
    for (int64_t token = 0; token < vocab; ++token) {
      if (random.Int(0, 15) < of_16) allowed[token / 32] |= 1u << (token % 32);
    }
  }
};

inline std::ostream& operator<<(std::ostream& out, const AnySampleRow& row) {
  return out << row.edits.size() << " edits, " << row.masked.size() << " masked, "
             << (row.allowed.empty() ? "all" : "some") << " allowed, temperature "
             << row.temperature << ", top_k " << row.top_k << ", top_p " << row.top_p << ", min_p "
             << row.min_p << ", noise " << row.noise << ", top_logprobs " << row.top_logprobs
             << ", given " << row.given;
}

inline int64_t AnyVocab(Random& random, int64_t most) {
  constexpr int64_t kSome[] = {1,    2,    3,     31,    32,     33,     1000,   1023,  1024,
                               1025, 4095, 32000, 32768, 100277, 128256, 151936, 152064};
  const int64_t some = kSome[random.Int(0, std::size(kSome) - 1)];
  return random.Int(0, 1) == 0 && some <= most ? some : random.Int(1, most);
}

// Normal of some deviation, perhaps with many equals, a few that stand out, holes, large or tiny values.
inline void FillLogits(Random& random, std::span<float> row) {
  constexpr float kDeviations[] = {0.0f, 1e-3f, 0.3f, 1.0f, 2.0f, 4.0f, 20.0f};
  const float deviation = kDeviations[random.Int(0, 6)];
  const float mean = random.Int(0, 2) == 0 ? random.Normal(30.0f) : 0.0f;
  for (float& logit : row) logit = mean + random.Normal(deviation);
  const auto at = [&] { return random.Int(0, static_cast<int64_t>(row.size()) - 1); };
  switch (random.Int(0, 7)) {
    case 0:  // equals, of both zeros
      for (float& logit : row) logit = std::round(2 * logit) / 2;
      break;
    case 1:
      for (int i = 0; i < 5; ++i) row[at()] = mean + 8 * deviation + random.Normal();
      break;
    case 2:
      row[at()] = mean + 1e4f;
      break;
    case 3:
      for (float& logit : row) {
        if (random.Int(0, 1) == 0) logit = -std::numeric_limits<float>::infinity();
      }
      row[at()] = 1;
      break;
    case 4:
      for (float& logit : row) logit *= 1e30f;
      break;
    case 5:
      for (float& logit : row) logit *= 1e-30f;
      break;
    default:
      break;
  }
}

// Whether a backend may draw `token`, where rounding may decide: tokens within 1e-6 of the end of top-p or of what min_p leaves,
// and those that are as fast as the fastest but for the rounding of weights, on a GPU to multiples of 2^-40.
inline bool MayBeDrawn(std::span<const float> logits, const AnySampleRow& any, int32_t token) {
  constexpr double kNear = 1e-6;
  // What is surely drawn from, and what may be.
  AnySampleRow strict = any, permissive = any;
  if (any.top_p < 1) {
    strict.top_p = static_cast<float>(any.top_p * (1 - 2 * kNear));
    permissive.top_p = std::min(static_cast<float>(any.top_p * (1 + 2 * kNear)), 0.99999994f);
  }
  strict.min_p = static_cast<float>(any.min_p * (1 + 4 * kNear));
  permissive.min_p = static_cast<float>(any.min_p * (1 - 4 * kNear));
  std::set<int32_t> sure;
  for (const SampleCandidate& c : SampleCandidatesRef(logits, strict.row())) sure.insert(c.token);
  const std::vector<SampleCandidate> all = SampleCandidatesRef(logits, permissive.row());
  double largest = 0;
  for (const SampleCandidate& c : all) largest = std::max(largest, c.probability);
  double own = 0, least = 0;  // the token's speed at most, and the fastest one's at least
  for (const SampleCandidate& c : all) {
    const double speed =
        c.probability / DrawTime(DrawShare(any.noise, static_cast<uint32_t>(c.token)));
    const double rounding = 4 * kNear + 0x1p-40 * largest / c.probability;
    if (c.token == token) own = speed * (1 + rounding);
    if (sure.contains(c.token)) least = std::max(least, speed * (1 - rounding));
  }
  return own > 0 && own >= least;
}

inline void ExpectSampled(const Matrix& all, int64_t index, const AnySampleRow& any,
                          const SampledToken& sampled) {
  const std::span<const float> logits(all.row(index), static_cast<size_t>(all.cols()));
  const SampledToken expected = SampleRef(logits, any.row());
  ASSERT_EQ(static_cast<int>(sampled.status), static_cast<int>(expected.status));
  if (expected.status != SampleStatus::kOk) return;
  ASSERT_EQ(sampled.rank, expected.rank);
  if (sampled.token != expected.token) {
    ASSERT_TRUE(any.temperature > 0 && any.given < 0);
    ASSERT_TRUE(MayBeDrawn(logits, any, sampled.token))
        << "token " << sampled.token << ", not " << expected.token;
  }
  ASSERT_EQ(sampled.num_top, expected.num_top);
  const auto expect_near = [](float logprob, float wanted) {
    if (std::isinf(wanted)) {
      ASSERT_EQ(logprob, wanted);
    } else {
      ASSERT_NEAR(logprob, wanted, 2e-6 + 1e-6 * std::abs(wanted));
    }
  };
  for (int32_t i = 0; i < sampled.num_top; ++i) {
    ASSERT_EQ(sampled.top[i].token, expected.top[i].token) << "place " << i;
    ASSERT_NO_FATAL_FAILURE(expect_near(sampled.top[i].logprob, expected.top[i].logprob));
  }
  if (any.top_logprobs < 0) {
    ASSERT_EQ(sampled.logprob, 0.0f);
    return;
  }
  // The token that was drawn, whichever it is, has the log-probability that it would have if given.
  AnySampleRow same = any;
  same.given = sampled.token;
  ASSERT_NO_FATAL_FAILURE(expect_near(sampled.logprob, SampleRef(logits, same.row()).logprob));
}

inline bool SameSample(const SampledToken& a, const SampledToken& b) {
  if (a.status != b.status) return false;
  if (a.status != SampleStatus::kOk) return true;
  return a.token == b.token && a.rank == b.rank && std::memcmp(&a.logprob, &b.logprob, 4) == 0 &&
         a.num_top == b.num_top && std::memcmp(a.top, b.top, sizeof(a.top[0]) * a.num_top) == 0;
}

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_SAMPLE_TESTING_H_
