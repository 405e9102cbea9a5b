// Limits of each tenant, from a YAML file that is read again when it changes:
//
//   default: {requests: 100}       # of tenants that are not named; optional
//   tenants:
//     alice: {weight: 4, requests: 64, waiting_tokens: 200000, running_tokens: 1000000}
//     batch: {weight: 0.5}
//     carol: {trust_domain: research}
//     david: {trust_domain: research, requests: 8}
//
//   weight          its share of the model against others that wait; 1 unless it is given
//   requests        calls that have not ended
//   waiting_tokens  prompt tokens of its requests that wait
//   running_tokens  prompt and max_tokens of its requests, waiting or running
//   store_bytes     of its KV that the store of slower tiers keeps; what comes beyond is not kept
//   trust_domain    tenants of the same domain share KV of prompts that begin alike, and the store's bytes with it: their
//                   store_bytes must be the same. Everything else is each tenant's own. Without one a tenant shares with nobody
//
// A quota that is not given does not bound. A tenant that is named has what its line says and nothing of the
// default's. Threads: any.
#ifndef WINNOW_SERVER_TENANT_LIMITS_H_
#define WINNOW_SERVER_TENANT_LIMITS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "server/log.h"
#include "server/watched_file.h"

namespace winnow::server {

struct TenantLimits {
  double weight = 1;
  int64_t requests = 0;  // 0: no bound, also below
  int64_t waiting_tokens = 0;
  int64_t running_tokens = 0;
  int64_t store_bytes = 0;
  std::string trust_domain;  // "": none
};

class TenantTable {
 public:
  // `log` and `clock` must outlive the table. InvalidArgument names the file and the line.
  static absl::StatusOr<std::unique_ptr<TenantTable>> Load(std::string path, Log& log,
                                                           const engine::Clock& clock);

  TenantLimits Of(const std::string& tenant) const;
  // Reads the file now. InvalidArgument leaves the limits as they were.
  absl::Status Reload() { return file_->Reload(); }

 private:
  struct Limits {
    TenantLimits others;
    absl::flat_hash_map<std::string, TenantLimits> named;
  };
  explicit TenantTable(std::unique_ptr<WatchedFile<Limits>> file) : file_(std::move(file)) {}
  static absl::StatusOr<Limits> Parse(const std::string& text);

  const std::unique_ptr<WatchedFile<Limits>> file_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_TENANT_LIMITS_H_
