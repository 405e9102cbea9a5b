// How much each tenant was served, for the scheduler's fairness between those that wait.
//
// Tokens are charged: a prompt's when it is admitted, a generated one's when it is sampled. A
// tenant that had nothing to do is not owed for that time: when it comes back it starts from the
// level at which tenants are being admitted now (start-time fair queueing). Engine thread only.
#ifndef WINNOW_ENGINE_SCHEDULE_TENANT_SHARES_H_
#define WINNOW_ENGINE_SCHEDULE_TENANT_SHARES_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace winnow::engine {

class TenantShares {
 public:
  // A request of the tenant came, or ended. The index is the tenant's while it has requests.
  // `weight`: how much more of a share it has than one of weight 1; what came last counts.
  int32_t Join(const std::string& tenant, double weight = 1);
  void Leave(int32_t index);

  void Charge(int32_t index, int64_t tokens) {
    served_[index] += static_cast<double>(tokens) / weights_[index];
  }
  // Before the prompt of an admitted request is charged: its tenant's share is the level now.
  void SetLevel(int32_t index);

  // Tokens divided by the tenant's weight.
  std::span<const double> served() const { return served_; }
  std::span<const double> weights() const { return weights_; }

 private:
  struct Tenant {
    std::string name;
    int32_t requests = 0;
    bool known = false;
  };
  void Forget(int32_t index);

  std::vector<double> served_;   // by index
  std::vector<double> weights_;  // by index
  std::vector<Tenant> tenants_;  // by index
  std::vector<int32_t> unused_;  // indices
  absl::flat_hash_map<std::string, int32_t> index_;
  double level_ = 0;
  int64_t requests_ = 0;  // of all tenants
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_TENANT_SHARES_H_
