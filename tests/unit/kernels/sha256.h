// SHA-256 (FIPS 180-4) for tests of tables that are recorded as a hash.
#ifndef WINNOW_TESTS_UNIT_KERNELS_SHA256_H_
#define WINNOW_TESTS_UNIT_KERNELS_SHA256_H_

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace winnow::kernels {

// The first 32 bits of the fraction of the square or cube root of the i-th prime.
inline std::vector<uint32_t> RootFractions(int count, bool cube) {
  std::vector<uint32_t> fractions;
  for (int n = 2; static_cast<int>(fractions.size()) < count; ++n) {
    bool prime = true;
    for (int divisor = 2; divisor * divisor <= n; ++divisor) prime = prime && n % divisor != 0;
    if (!prime) continue;
    const long double root =
        cube ? std::cbrt(static_cast<long double>(n)) : std::sqrt(static_cast<long double>(n));
    fractions.push_back(static_cast<uint32_t>((root - std::floor(root)) * 0x1p32L));
  }
  return fractions;
}

inline std::string Sha256Hex(const void* data, size_t size_bytes) {
  const std::vector<uint32_t> constants = RootFractions(64, true);
  std::vector<uint32_t> state = RootFractions(8, false);
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  std::vector<uint8_t> message(bytes, bytes + size_bytes);
  message.push_back(0x80);
  while (message.size() % 64 != 56) message.push_back(0);
  for (int shift = 56; shift >= 0; shift -= 8) {
    message.push_back(static_cast<uint8_t>(uint64_t{size_bytes} * 8 >> shift));
  }
  for (size_t at = 0; at < message.size(); at += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i) w[i / 4] |= uint32_t{message[at + i]} << (24 - i % 4 * 8);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    std::vector<uint32_t> s = state;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 = s[7] + (std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25)) +
                          ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants[i] + w[i];
      const uint32_t t2 = (std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22)) +
                          ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {t1 + t2, s[0], s[1], s[2], s[3] + t1, s[4], s[5], s[6]};
    }
    for (size_t i = 0; i < 8; ++i) state[i] += s[i];
  }
  std::string hex;
  for (const uint32_t word : state) {
    char text[9];
    std::snprintf(text, sizeof(text), "%08x", word);
    hex += text;
  }
  return hex;
}

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_SHA256_H_
