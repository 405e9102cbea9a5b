// The families of /metrics about the engine, the store, the ports and the process: snapshots mapped to
// families, so that all of a scrape's numbers belong to one moment. Names, HELP texts and labels are
// here and in metrics.cc, nowhere else; docs/metrics.md is made of them.
//
// A HELP text says what the number is and what to do with it. Every family is there from the start,
// at zero, also where there is no store and no HTTP port.
//
// Threads: any; the functions keep nothing.
#ifndef WINNOW_SERVER_METRICS_FAMILIES_H_
#define WINNOW_SERVER_METRICS_FAMILIES_H_

#include <prometheus/metric_family.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/clock.h"
#include "engine/schedule/engine_stats.h"
#include "server/metrics.h"

namespace winnow::server {

using MetricFamilies = std::vector<prometheus::MetricFamily>;

double Seconds(engine::Duration duration);

// A family of one series without labels.
prometheus::MetricFamily Single(prometheus::MetricType type, std::string name, std::string help,
                                double value);

// Requests, steps, tokens and the KV pool. `kv_block_bytes`: of all layers.
MetricFamilies EngineFamilies(const engine::EngineStats& stats, const engine::Clock& clock,
                              int64_t kv_block_bytes);
// KV that attention read, KV that it would have read, and how good the choice was. `row_bytes`: of a KV entry.
MetricFamilies ReadFamilies(const engine::EngineStats& stats, int64_t row_bytes);
// Slower tiers: moves of KV, the store and its disk.
MetricFamilies StoreFamilies(const engine::EngineStats& stats);
// Families for routers and dashboards of vLLM's servers, by vLLM's names.
MetricFamilies VllmFamilies(const engine::EngineStats& stats, const MetricsInfo& info);
MetricFamilies HttpFamilies(const HttpCounts& counts);
MetricFamilies GuardFamilies(const GuardStats& stats);
// Memory, processor time and descriptors, by the names that Prometheus' client libraries use. Counting
// descriptors takes milliseconds when there are thousands.
MetricFamilies ProcessFamilies();

}  // namespace winnow::server

#endif  // WINNOW_SERVER_METRICS_FAMILIES_H_
