// Runs one sequence through a Decoder by hand, as the engine would: its own blocks (in any order),
// any chunking, logits for every row that was asked for.
#ifndef WINNOW_TESTS_UNIT_ENGINE_SEQUENCE_RUNNER_H_
#define WINNOW_TESTS_UNIT_ENGINE_SEQUENCE_RUNNER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/decoder.h"
#include "gtest/gtest.h"
#include "kernels/check.h"
#include "tests/unit/test_seed.h"

namespace winnow::engine::testing {

inline const AttentionPolicy kDense;

// The instruction sets this processor has.
inline std::vector<std::string> Isas() {
  std::vector<std::string> isas;
  for (const char* isa : {"scalar", "avx2", "avx512", "amx"}) {
    if (kernels::MakeCpuBackend(isa, 1) != nullptr) isas.push_back(isa);
  }
  return isas;
}

using ::winnow::TestSeed;  // the test prints it when it fails

// All blocks of the pool in a random order, so that no test depends on neighbours being adjacent.
inline std::vector<int32_t> ShuffledBlocks(const Decoder& decoder, std::mt19937_64& random) {
  std::vector<int32_t> blocks(decoder.num_blocks());
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  return blocks;
}

// Logits of the last `num_logits` of `tokens`, which start at `position`. Cut into chunks of at
// most `chunk_tokens`. With a state, tokens from retrieve_from on retrieve.
inline std::vector<float> Run(Decoder& decoder, std::span<const int32_t> tokens, int32_t position,
                              std::span<const int32_t> blocks, int32_t num_logits,
                              int32_t chunk_tokens, RetrievalState* retrieval = nullptr,
                              int32_t retrieve_from = 0) {
  std::vector<float> all;
  const int32_t count = static_cast<int32_t>(tokens.size());
  for (int32_t done = 0; done < count;) {
    const int32_t size = std::min(chunk_tokens, count - done);
    const int32_t wanted = std::clamp(num_logits - (count - done - size), 0, size);
    Batch batch;
    batch.chunks.push_back(
        {tokens.subspan(done, size), position + done, blocks, wanted, retrieval, retrieve_from});
    std::vector<float> logits(static_cast<size_t>(wanted) * decoder.vocab_size());
    WINNOW_CHECK(decoder.Forward(batch, logits).ok());
    all.insert(all.end(), logits.begin(), logits.end());
    done += size;
  }
  return all;
}

inline int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// -log softmax(logits)[token], in double.
inline double NegativeLogLikelihood(std::span<const float> logits, int32_t token) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - max);
  return max + std::log(sum) - logits[token];
}

// Mean over all rows but the last of the loss on the token that follows.
inline double MeanNll(std::span<const float> logits, std::span<const int32_t> tokens,
                      int32_t vocab_size) {
  double sum = 0;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    sum += NegativeLogLikelihood(logits.subspan(i * vocab_size, vocab_size), tokens[i + 1]);
  }
  return sum / static_cast<double>(tokens.size() - 1);
}

// Greedy continuation of a sequence that has `position` tokens, the first new token given.
inline std::vector<int32_t> Greedy(Decoder& decoder, int32_t first, int32_t position,
                                   std::span<const int32_t> blocks, size_t count) {
  std::vector<int32_t> tokens = {first};
  while (tokens.size() < count) {
    const int32_t last = tokens.back();
    tokens.push_back(ArgMax(Run(decoder, {&last, 1}, position++, blocks, 1, 1)));
  }
  return tokens;
}

}  // namespace winnow::engine::testing

#endif  // WINNOW_TESTS_UNIT_ENGINE_SEQUENCE_RUNNER_H_
