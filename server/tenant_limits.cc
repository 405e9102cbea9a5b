#include "server/tenant_limits.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "engine/base/status_macros.h"
#include "server/strings.h"
#include "server/suggest.h"
#include "server/validate.h"
#include "yaml-cpp/yaml.h"

namespace winnow::server {
namespace {

constexpr double kMinWeight = 0.01, kMaxWeight = 1000;
constexpr int64_t kMaxQuota = int64_t{1} << 50;
const std::string kFileKeys[] = {"default", "tenants"};
const std::string kLimitKeys[] = {"weight",         "requests",    "waiting_tokens",
                                  "running_tokens", "store_bytes", "trust_domain"};

// Messages continue what names the file: ":LINE: what is wrong".
absl::Status Invalid(const YAML::Mark& mark, std::string_view what) {
  if (mark.is_null()) return absl::InvalidArgumentError(Concat(": ", what));
  return absl::InvalidArgumentError(Concat(":", mark.line + 1, ": ", what));
}

absl::Status ReadLimit(const std::string& key, const YAML::Node& value, TenantLimits& limits) {
  const std::string text = value.IsScalar() ? value.Scalar() : "";
  if (key == "weight") {
    if (!absl::SimpleAtod(text, &limits.weight) || !(limits.weight >= kMinWeight) ||
        !(limits.weight <= kMaxWeight)) {
      return Invalid(value.Mark(), "weight: must be a number in [0.01, 1000]");
    }
    return absl::OkStatus();
  }
  if (key == "trust_domain") {
    if (!Validator::CheckTenant(text).ok()) {
      return Invalid(value.Mark(),
                     Concat("trust_domain: must be 1 to ", kMaxTenantBytes, " of [A-Za-z0-9._-]"));
    }
    limits.trust_domain = text;
    return absl::OkStatus();
  }
  int64_t* const quota = key == "requests"         ? &limits.requests
                         : key == "waiting_tokens" ? &limits.waiting_tokens
                         : key == "running_tokens" ? &limits.running_tokens
                         : key == "store_bytes"    ? &limits.store_bytes
                                                   : nullptr;
  if (quota == nullptr) {
    return Invalid(value.Mark(), Concat("unknown key ", key, DidYouMean(key, kLimitKeys)));
  }
  if (!absl::SimpleAtoi(text, quota) || *quota < 1 || *quota > kMaxQuota) {
    return Invalid(value.Mark(), Concat(key, ": must be an integer of at least 1"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TenantLimits> ReadLimits(const YAML::Node& node) {
  TenantLimits limits;
  if (!node.IsMap()) return Invalid(node.Mark(), "must be a map of limits");
  for (const auto& entry : node) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
    WINNOW_RETURN_IF_ERROR(ReadLimit(key, entry.second, limits));
  }
  return limits;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TenantTable>> TenantTable::Load(std::string path, Log& log,
                                                               const engine::Clock& clock) {
  auto file = WatchedFile<Limits>::Load("--tenants", "tenants", std::move(path), Parse, log, clock);
  if (!file.ok()) return file.status();
  return std::unique_ptr<TenantTable>(new TenantTable(*std::move(file)));
}

absl::StatusOr<TenantTable::Limits> TenantTable::Parse(const std::string& text) {
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    return Invalid(error.mark, error.msg);
  }
  Limits limits;
  std::map<std::string, std::pair<std::string, int64_t>>
      domains;  // to a member and its store_bytes
  if (root.IsNull()) return limits;
  if (!root.IsMap()) return Invalid(root.Mark(), "must be a map with default and tenants");
  for (const auto& entry : root) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
    if (key == "default") {
      WINNOW_ASSIGN_OR_RETURN(limits.others, ReadLimits(entry.second));
      // Anybody can be a tenant without a line: trust is said by name.
      if (!limits.others.trust_domain.empty()) {
        return Invalid(entry.second.Mark(), "trust_domain: only of a tenant that is named");
      }
      continue;
    }
    if (key != "tenants") {
      return Invalid(entry.first.Mark(), Concat("unknown key ", key, DidYouMean(key, kFileKeys)));
    }
    if (!entry.second.IsMap()) return Invalid(entry.second.Mark(), "tenants: must be a map");
    for (const auto& tenant : entry.second) {
      const std::string name = tenant.first.IsScalar() ? tenant.first.Scalar() : "";
      if (!Validator::CheckTenant(name).ok()) {
        return Invalid(tenant.first.Mark(), Concat("a tenant's name must be 1 to ", kMaxTenantBytes,
                                                   " of [A-Za-z0-9._-]"));
      }
      WINNOW_ASSIGN_OR_RETURN(TenantLimits own, ReadLimits(tenant.second));
      if (!limits.named.emplace(name, own).second) {
        return Invalid(tenant.first.Mark(), Concat(name, ": is there twice"));
      }
      if (own.trust_domain.empty()) continue;
      const auto domain =
          domains.try_emplace(own.trust_domain, name, own.store_bytes).first->second;
      if (domain.second != own.store_bytes) {
        return Invalid(tenant.first.Mark(),
                       Concat(name, ": store_bytes must be that of ", domain.first,
                              ", with whom it shares what the store keeps (trust_domain ",
                              own.trust_domain, ")"));
      }
    }
  }
  return limits;
}

TenantLimits TenantTable::Of(const std::string& tenant) const {
  const std::shared_ptr<const Limits> limits = file_->Get();
  const auto found = limits->named.find(tenant);
  return found == limits->named.end() ? limits->others : found->second;
}

}  // namespace winnow::server
