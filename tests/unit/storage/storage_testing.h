// What storage's tests share: a temporary directory, a clock that is moved by hand, and blocks
// whose bytes are a function of their identity, so that misplaced data shows.
#ifndef WINNOW_TESTS_UNIT_STORAGE_STORAGE_TESTING_H_
#define WINNOW_TESTS_UNIT_STORAGE_STORAGE_TESTING_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "storage/block_id.h"
#include "storage/clock.h"
#include "tests/unit/temp_dir.h"

namespace winnow::storage {

// Beside the build, not in /tmp, which may be a file system without O_DIRECT.
class TempDir : public winnow::TempDir {
 public:
  TempDir() : winnow::TempDir(std::filesystem::current_path()) {}
};

class FakeClock final : public Clock {
 public:
  int64_t NowNs() const override { return now_ns; }
  std::string BootId() const override { return boot_id; }
  void AdvanceSeconds(int64_t seconds) { now_ns += seconds * 1'000'000'000; }
  int64_t now_ns = 1'000'000'000'000;
  std::string boot_id = "boot-1";
};

inline BlockId IdOf(uint64_t number, uint32_t layer = 0) {
  BlockId id;
  std::array<uint8_t, 32> chain = {};
  std::mt19937_64 random(number * 1000 + layer);
  for (uint8_t& byte : chain) byte = static_cast<uint8_t>(random());
  id.key = BlockKey::Make(chain, /*kind=*/1, layer);
  id.model.fill(0x4d);
  id.tenant.fill(0x54);
  id.layer = layer;
  id.token_block = number;
  return id;
}

inline std::vector<std::byte> BytesOf(const BlockId& id, size_t bytes, uint64_t version = 0) {
  uint64_t seed;
  std::memcpy(&seed, id.key.bytes.data(), sizeof seed);
  std::mt19937_64 random(seed + version * 0x9e3779b97f4a7c15);
  std::vector<std::byte> data(bytes);
  size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(data.data() + at, &word, 8);
  }
  for (; at < bytes; ++at) data[at] = static_cast<std::byte>(random());
  return data;
}

// The seed of a randomised test: WINNOW_TEST_SEED, or the given one. Printed on failure.
inline uint32_t TestSeed(uint32_t otherwise) {
  const char* text = std::getenv("WINNOW_TEST_SEED");
  return text != nullptr ? static_cast<uint32_t>(std::strtoul(text, nullptr, 10)) : otherwise;
}

// How many rounds a randomised test runs: WINNOW_TEST_ROUNDS makes CI's short version a long one.
inline int TestRounds(int otherwise) {
  const char* text = std::getenv("WINNOW_TEST_ROUNDS");
  return text != nullptr ? std::atoi(text) : otherwise;
}

}  // namespace winnow::storage

#endif  // WINNOW_TESTS_UNIT_STORAGE_STORAGE_TESTING_H_
