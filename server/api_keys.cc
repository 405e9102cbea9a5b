#include "server/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "engine/json_file.h"
#include "engine/status_macros.h"
#include "server/strings.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxFileBytes = 4 << 20;
constexpr engine::Duration kLookAgain = std::chrono::seconds(1);

}  // namespace

ApiKeys::ApiKeys(std::string path, Log& log, const engine::Clock& clock)
    : path_(std::move(path)), log_(log), clock_(clock) {}

absl::StatusOr<std::unique_ptr<ApiKeys>> ApiKeys::Load(std::string path, Log& log,
                                                       const engine::Clock& clock) {
  std::unique_ptr<ApiKeys> keys(new ApiKeys(std::move(path), log, clock));
  absl::MutexLock lock(&keys->mutex_);
  keys->stamp_ = keys->Stamp();
  keys->looked_ = clock.Now();
  WINNOW_ASSIGN_OR_RETURN(Entries entries, keys->Read());
  keys->entries_ = std::make_shared<const Entries>(std::move(entries));
  return keys;
}

absl::StatusOr<ApiKeys::Entries> ApiKeys::Read() const {
  absl::StatusOr<std::string> text = engine::ReadSmallFile(path_, kMaxFileBytes);
  if (!text.ok())
    return absl::InvalidArgumentError(Concat("--api-keys: ", text.status().message()));
  Entries entries;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    ++number;
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    const auto fail = [&](std::string_view what) {
      return absl::InvalidArgumentError(Concat("--api-keys ", path_, ":", number, ": ", what));
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
    return absl::InvalidArgumentError(Concat("--api-keys ", path_, ": holds no key"));
  }
  return entries;
}

std::string ApiKeys::Stamp() const {
  struct stat info = {};
  if (stat(path_.c_str(), &info) != 0) return "";
  return Concat(info.st_ino, ".", info.st_size, ".", info.st_mtim.tv_sec, ".",
                info.st_mtim.tv_nsec);
}

void ApiKeys::LookAgain() {
  looked_ = clock_.Now();
  std::string stamp = Stamp();
  if (stamp == stamp_) return;
  stamp_ = std::move(stamp);
  absl::StatusOr<Entries> entries = Read();
  if (entries.ok()) {
    entries_ = std::make_shared<const Entries>(*std::move(entries));
    log_.Event(LogLevel::kInfo, "api_keys", {{"keys", static_cast<uint64_t>(entries_->size())}});
  } else {
    log_.Event(LogLevel::kWarn, "api_keys", {{"message", ToStd(entries.status().message())}});
  }
}

std::optional<std::string> ApiKeys::NameOf(std::string_view key) {
  std::shared_ptr<const Entries> entries;
  {
    absl::MutexLock lock(&mutex_);
    if (clock_.Now() - looked_ >= kLookAgain) LookAgain();
    entries = entries_;
  }
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
