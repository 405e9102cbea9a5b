#include "server/prefix_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "engine/base/replace_file.h"
#include "nlohmann/json.hpp"
#include "server/strings.h"

namespace winnow::server {
namespace {

using nlohmann::json;

constexpr int kFileVersion = 1;

std::string Hex(const engine::Digest& digest) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

std::optional<engine::Digest> FromHex(const std::string& text) {
  engine::Digest digest;
  if (text.size() != 2 * digest.size() ||
      text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return std::nullopt;
  }
  const std::string bytes = absl::HexStringToBytes(text);
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

std::string SumLine(const std::string& text) {
  return "sha256 " + Hex(engine::Sha256(text)) + "\n";
}

// Throws what nlohmann does; nullopt: a value that cannot be.
std::optional<engine::SavedPrefix> Read(const json& entry, double now) {
  engine::SavedPrefix prefix;
  prefix.tenant = entry.at("tenant").get<std::string>();
  prefix.name = entry.at("name").get<std::string>();
  // Earlier versions wrote none: there were no trust domains.
  prefix.salt = engine::TenantSalt(prefix.tenant);
  if (entry.contains("salt")) {
    const auto salt = FromHex(entry.at("salt").get<std::string>());
    if (!salt.has_value()) return std::nullopt;
    prefix.salt = *salt;
  }
  const json& tokens = entry.at("tokens");
  // The conversion to int32_t would wrap integers, and is undefined for numbers beyond them.
  if (!tokens.is_number_integer() || tokens > std::numeric_limits<int32_t>::max() || tokens < 1) {
    return std::nullopt;
  }
  prefix.tokens = tokens.get<int32_t>();
  prefix.pinned = entry.at("pinned").get<bool>();
  std::vector<engine::Digest> blocks;
  for (const json& text : entry.at("blocks")) {
    const auto digest = FromHex(text.get<std::string>());
    if (!digest.has_value()) return std::nullopt;
    blocks.push_back(*digest);
  }
  if (blocks.empty()) return std::nullopt;
  prefix.blocks = std::make_shared<const std::vector<engine::Digest>>(std::move(blocks));
  if (entry.contains("expires")) {
    const double left =
        std::min(entry.at("expires").get<double>() - now, entry.at("left").get<double>());
    prefix.left = std::chrono::duration_cast<engine::Duration>(
        std::chrono::duration<double>(std::clamp(left, 0.0, 1e9)));
  }
  return prefix;
}

}  // namespace

absl::Status PrefixFile::Save(const std::vector<engine::SavedPrefix>& prefixes) const {
  const double now = absl::ToDoubleSeconds(now_() - absl::UnixEpoch());
  std::string text = json{{"version", kFileVersion}, {"model", Hex(model_)}}.dump() + "\n";
  for (const engine::SavedPrefix& prefix : prefixes) {
    json blocks = json::array();
    for (const engine::Digest& digest : *prefix.blocks) blocks.push_back(Hex(digest));
    json entry = {{"tenant", prefix.tenant},
                  {"name", prefix.name},
                  {"tokens", prefix.tokens},
                  {"pinned", prefix.pinned},
                  {"blocks", std::move(blocks)}};
    if (prefix.salt != engine::TenantSalt(prefix.tenant)) entry["salt"] = Hex(prefix.salt);
    if (prefix.left.has_value()) {
      const double left = std::chrono::duration<double>(*prefix.left).count();
      entry["left"] = left;
      entry["expires"] = now + left;
    }
    text += entry.dump() + "\n";
  }
  text += SumLine(text);
  return engine::ReplaceFile(path_, text, engine::Sync::kYes);
}

std::vector<engine::SavedPrefix> PrefixFile::Load(std::string* problem) const {
  problem->clear();
  std::ifstream file(path_, std::ios::binary);
  if (!file) return {};
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const double now = absl::ToDoubleSeconds(now_() - absl::UnixEpoch());
  std::vector<engine::SavedPrefix> prefixes;
  *problem = [&]() -> std::string {
    const size_t sum_bytes = SumLine("").size();
    if (text.size() < sum_bytes ||
        text.substr(text.size() - sum_bytes) != SumLine(text.substr(0, text.size() - sum_bytes))) {
      return "its checksum is not that of its text";
    }
    try {
      size_t from = 0;
      for (size_t line = 0; from < text.size() - sum_bytes; ++line) {
        const size_t end = text.find('\n', from);
        const json entry = json::parse(text.begin() + static_cast<std::ptrdiff_t>(from),
                                       text.begin() + static_cast<std::ptrdiff_t>(end));
        from = end + 1;
        if (line == 0) {
          if (entry.at("version").get<int>() != kFileVersion) return "it is of another version";
          if (entry.at("model").get<std::string>() != Hex(model_)) {
            return "it is of another model, or of other settings";
          }
          continue;
        }
        auto prefix = Read(entry, now);
        if (!prefix.has_value()) return Concat("line ", line + 1, " cannot be");
        prefixes.push_back(*std::move(prefix));
      }
    } catch (const json::exception& error) {
      return error.what();
    }
    return "";
  }();
  if (problem->empty()) return prefixes;
  std::error_code ignored;
  std::filesystem::rename(path_, path_ + ".aside", ignored);
  return {};
}

}  // namespace winnow::server
