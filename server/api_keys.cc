#include "server/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/strings.h"
#include "server/validate.h"

namespace winnow::server {
absl::StatusOr<std::unique_ptr<ApiKeys>> ApiKeys::Load(std::string path, Log& log,
                                                       const engine::Clock& clock) {
  auto file =
      WatchedFile<Entries>::Load("--api-keys", "api_keys", std::move(path), Parse, log, clock);
  if (!file.ok()) return file.status();
  return std::unique_ptr<ApiKeys>(new ApiKeys(*std::move(file)));
}

absl::StatusOr<ApiKeys::Entries> ApiKeys::Parse(const std::string& text) {
  Entries entries;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    const auto fail = [&](std::string_view what) {
      return absl::InvalidArgumentError(Concat(":", number, ": ", what));
    };
    if (words.size() != 2) return fail("must be a name and a SHA-256 hash");
    if (!Validator::CheckTenant(words[0]).ok()) {
      return fail(Concat("the name must be 1 to ", kMaxTenantBytes, " of [A-Za-z0-9._-]"));
    }
    const bool hex = words[1].find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
    if (!hex || words[1].size() != 2 * SHA256_DIGEST_LENGTH) {
      return fail("the hash must be 64 hexadecimal digits, as sha256sum prints");
    }
    const std::string bytes = absl::HexStringToBytes(words[1]);
    Entry& entry = entries.emplace_back();
    entry.name = words[0];
    std::copy(bytes.begin(), bytes.end(), entry.hash.begin());
  }
  if (entries.empty()) {
    return absl::InvalidArgumentError(": holds no key");
  }
  return entries;
}

std::optional<std::string> ApiKeys::NameOf(std::string_view key) {
  const std::shared_ptr<const Entries> entries = file_->Get();
  std::array<uint8_t, SHA256_DIGEST_LENGTH> hash;
  SHA256(reinterpret_cast<const uint8_t*>(key.data()), key.size(), hash.data());
  const Entry* found = nullptr;
  for (const Entry& entry : *entries) {
    const bool same = CRYPTO_memcmp(entry.hash.data(), hash.data(), hash.size()) == 0;
    found = same ? &entry : found;
  }
  if (found == nullptr) return std::nullopt;
  return found->name;
}

}  // namespace winnow::server
