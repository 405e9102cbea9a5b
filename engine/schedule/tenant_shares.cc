#include "engine/schedule/tenant_shares.h"

#include <algorithm>

#include "kernels/check.h"

namespace winnow::engine {

int32_t TenantShares::Join(const std::string& tenant, double weight) {
  WINNOW_CHECK(weight > 0);
  const auto [entry, is_new] = index_.try_emplace(tenant, 0);
  if (is_new) {
    if (unused_.empty()) {
      unused_.push_back(static_cast<int32_t>(tenants_.size()));
      tenants_.emplace_back();
      served_.push_back(0);
      weights_.push_back(1);
    }
    entry->second = unused_.back();
    unused_.pop_back();
    tenants_[entry->second] = {.name = tenant, .requests = 0, .known = true};
    served_[entry->second] = level_;
  }
  const int32_t index = entry->second;
  weights_[index] = weight;
  ++requests_;
  if (tenants_[index].requests++ == 0) served_[index] = std::max(served_[index], level_);
  return index;
}

void TenantShares::Leave(int32_t index) {
  WINNOW_CHECK(tenants_[index].requests > 0);
  if (--requests_ == 0) {
    // Nobody is owed anything: start afresh, so that names do not pile up.
    *this = TenantShares();
    return;
  }
  // A tenant that was served no more than the level would come back at the level anyway.
  if (--tenants_[index].requests == 0 && served_[index] <= level_) Forget(index);
}

void TenantShares::SetLevel(int32_t index) {
  if (served_[index] <= level_) return;
  level_ = served_[index];
  for (size_t i = 0; i < tenants_.size(); ++i) {
    if (tenants_[i].known && tenants_[i].requests == 0 && served_[i] <= level_) {
      Forget(static_cast<int32_t>(i));
    }
  }
}

void TenantShares::Forget(int32_t index) {
  index_.erase(tenants_[index].name);
  tenants_[index] = Tenant{};
  served_[index] = 0;
  unused_.push_back(index);
}

}  // namespace winnow::engine
