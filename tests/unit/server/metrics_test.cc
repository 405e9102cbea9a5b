#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <regex>
#include <set>
#include <sstream>

#include "server/metrics_families.h"
#include "server/status.h"
#include "tests/unit/engine/engine_testing.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

class MetricsTest : public ::testing::Test {
 protected:
  engine::FakeClock clock_;
  Metrics metrics_{{"1.2.3",
                    "needle",
                    "bf16",
                    "f32",
                    "cpu (avx2)",
                    4096,
                    {{"lsh:128", 640}, {"int4", 99}},
                    2560,
                    64},
                   clock_};
};

TEST_F(MetricsTest, EverySeriesIsThereAtZeroFromTheStart) {
  const std::string text = metrics_.Text();
  for (const char* line : {"winnow_requests_total{outcome=\"ok\"} 0",
                           "winnow_requests_total{outcome=\"invalid\"} 0",
                           "winnow_requests_total{outcome=\"rejected\"} 0",
                           "winnow_requests_total{outcome=\"cancelled\"} 0",
                           "winnow_requests_total{outcome=\"deadline\"} 0",
                           "winnow_requests_total{outcome=\"unavailable\"} 0",
                           "winnow_requests_total{outcome=\"slow_reader\"} 0",
                           "winnow_requests_total{outcome=\"error\"} 0",
                           "winnow_requests_running 0",
                           "winnow_requests_waiting 0",
                           "winnow_requests_preempted 0",
                           "winnow_preemptions_total 0",
                           "winnow_prompt_tokens_total 0",
                           "winnow_cached_tokens_total 0",
                           "winnow_generated_tokens_total 0",
                           "winnow_kv_read_bytes_total{tier=\"fast\"} 0",
                           "winnow_kv_read_bytes_total{tier=\"host\"} 0",
                           "winnow_kv_read_bytes_total{tier=\"disk\"} 0",
                           "winnow_kv_read_rows_total{tier=\"fast\"} 0",
                           "winnow_kv_read_rows_total{tier=\"host\"} 0",
                           "winnow_kv_read_rows_total{tier=\"disk\"} 0",
                           "winnow_resume_seconds_sum 0",
                           "winnow_resume_seconds_count 0",
                           "winnow_resume_bytes_total 0",
                           "winnow_device_launches_total{how=\"alone\"} 0",
                           "winnow_device_launches_total{how=\"graph\"} 0",
                           "winnow_kv_dense_bytes_total 0",
                           "winnow_kv_attended_rows_total 0",
                           "winnow_step_attended_rows_count 0",
                           "winnow_retrieval_candidate_rows_total 0",
                           "winnow_retrieval_selected_rows_total 0",
                           "winnow_retrieval_widened_tokens_total 0",
                           "winnow_retrieval_floor_dense_tokens_total 0",
                           "winnow_retrieval_kept_ratio_count 0",
                           "winnow_retrieval_coverage_ratio_count 0",
                           "winnow_retrieval_coverage_ratio_sum 0",
                           "winnow_retrieval_iou_ratio_count 0",
                           "winnow_retrieval_tail_mass_ratio_count 0",
                           "winnow_retrieval_from_tokens 2560",
                           "winnow_index_bytes{index=\"lsh:128\"} 640",
                           "winnow_index_bytes{index=\"int4\"} 99",
                           "winnow_kv_blocks_used 0",
                           "winnow_kv_blocks_capacity 0",
                           "winnow_sequences_finished_total{reason=\"stop_string\"} 0",
                           "winnow_time_to_first_token_seconds_count 0",
                           "winnow_inter_token_seconds_count 0",
                           "winnow_request_duration_seconds_count 0",
                           "winnow_queue_seconds_count 0",
                           "winnow_engine_heartbeat_age_seconds 0",
                           "winnow_prefix_hit_tokens_total{from=\"pool\"} 0",
                           "winnow_prefix_hit_tokens_total{from=\"store\"} 0",
                           "winnow_kv_row_cache_hits_total 0",
                           "winnow_kv_row_cache_misses_total 0",
                           "winnow_kv_prefetch_rows_total 0",
                           "winnow_kv_prefetch_hits_total 0",
                           "winnow_kv_loaded_bytes_total 0",
                           "winnow_kv_fetches_open 0",
                           "winnow_kv_fetches_total 0",
                           "winnow_kv_fetches_given_up_total 0",
                           "winnow_kv_fetch_room_waits_total 0",
                           "winnow_kv_fetch_rests_total 0",
                           "winnow_kv_tier_wait_seconds_total 0",
                           "winnow_kv_read_seconds_count{tier=\"disk\"} 0",
                           "winnow_kv_read_seconds_bucket{tier=\"disk\",le=\"+Inf\"} 0",
                           "winnow_store_info{io=\"none\"} 1",
                           "winnow_store_state 0",
                           "winnow_store_queue_depth 0",
                           "winnow_store_corrupt_blocks_total 0",
                           "winnow_store_io_errors_total 0",
                           "winnow_tls_certificate_expiry_timestamp_seconds 0",
                           "vllm:prefix_cache_hits_total{model_name=\"needle\"} 0",
                           "vllm:time_to_first_token_seconds_count{model_name=\"needle\"} 0",
                           "vllm:request_queue_time_seconds_count{model_name=\"needle\"} 0",
                           "winnow_structured_requests_total{kind=\"json_schema\"} 0",
                           "winnow_structured_requests_total{kind=\"json_object\"} 0",
                           "winnow_structured_requests_total{kind=\"regex\"} 0",
                           "winnow_structured_requests_total{kind=\"choice\"} 0",
                           "winnow_structured_requests_total{kind=\"grammar\"} 0",
                           "winnow_structured_requests_total{kind=\"structural_tag\"} 0",
                           "winnow_structured_compile_seconds_count 0",
                           "winnow_serving 0"}) {
    EXPECT_THAT(text, HasSubstr(std::string("\n") + line)) << line;
  }
  EXPECT_THAT(text, HasSubstr("gen_ai_server_time_to_first_token_seconds_count{"));
  EXPECT_THAT(text, HasSubstr("gen_ai_server_time_per_output_token_seconds_count{"));
  EXPECT_THAT(text, HasSubstr("gen_ai_server_request_duration_seconds_count{"));
  EXPECT_THAT(text, HasSubstr("winnow_build_info{"));
  EXPECT_THAT(text, HasSubstr("backend=\"cpu (avx2)\""));
}

// The text format, line by line, and Prometheus' rules for names.
TEST_F(MetricsTest, TextIsWellFormed) {
  metrics_.OnFirstToken({}, std::chrono::milliseconds(3));
  std::istringstream lines(metrics_.Text());
  const std::regex comment(R"(# (HELP|TYPE) [a-z_:][a-z0-9_:]* .+)");
  const std::regex sample(
      R"re([a-z_:][a-z0-9_:]*(\{([a-z_][a-z0-9_]*="[^"\n]*",?)*\})? [-+0-9.eE]+(Inf|Nan)?)re");
  std::set<std::string> families;
  std::string line, type;
  while (std::getline(lines, line)) {
    if (line.empty()) continue;
    if (line[0] == '#') {
      EXPECT_TRUE(std::regex_match(line, comment)) << line;
      std::istringstream words(line);
      std::string hash, kind, name;
      words >> hash >> kind >> name;
      if (kind == "TYPE") {
        words >> type;
        EXPECT_TRUE(families.insert(name).second) << name << " is there twice";
        EXPECT_EQ(type == "counter", name.ends_with("_total")) << name;
      }
    } else {
      EXPECT_TRUE(std::regex_match(line, sample)) << line;
    }
  }
  EXPECT_GT(families.size(), 25u);
}

TEST_F(MetricsTest, WhatTheStoreAndPrefixesCountIsShown) {
  engine::EngineStats stats;
  stats.prefix_tokens_pool = 128;
  stats.prefix_tokens_store = 64;
  stats.prefetch = {10, 4};
  stats.fetches = {.open = 3, .begun = 9, .given_up = 1, .room_waits = 5, .rests = 6};
  stats.attended_rows = 7;
  stats.kv_read_bytes_host = 3 * 512;
  stats.kv_read_bytes_disk = 5 * 512;
  stats.launches = {.alone = 11, .in_graphs = 600};
  stats.resumes = 2;
  stats.resume_time = std::chrono::milliseconds(1500);
  stats.resume_bytes = 4096;
  stats.store.io_backend = "uring";
  stats.store.read_latency[0] = 2;  // at most 50 us
  stats.store.read_latency[3] = 1;  // at most 400 us
  stats.store.read_latency.back() = 1;
  stats.store.read_latency_ns = 3'000'000'000;
  std::vector<prometheus::MetricFamily> families = EngineFamilies(stats, clock_, 4096);
  for (auto more : {ReadFamilies(stats, 512), StoreFamilies(stats)}) {
    families.insert(families.end(), more.begin(), more.end());
  }
  const std::string text = prometheus::TextSerializer().Serialize(families);
  for (const char* line : {"winnow_prefix_hit_tokens_total{from=\"pool\"} 128",
                           "winnow_prefix_hit_tokens_total{from=\"store\"} 64",
                           "winnow_kv_prefetch_rows_total 10",
                           "winnow_kv_prefetch_hits_total 4",
                           "winnow_kv_fetches_open 3",
                           "winnow_kv_fetches_total 9",
                           "winnow_kv_fetches_given_up_total 1",
                           "winnow_kv_fetch_room_waits_total 5",
                           "winnow_kv_fetch_rests_total 6",
                           "winnow_store_info{io=\"uring\"} 1",
                           "winnow_kv_read_rows_total{tier=\"fast\"} 7",
                           "winnow_kv_read_rows_total{tier=\"host\"} 3",
                           "winnow_kv_read_rows_total{tier=\"disk\"} 5",
                           "winnow_device_launches_total{how=\"alone\"} 11",
                           "winnow_device_launches_total{how=\"graph\"} 600",
                           "winnow_resume_seconds_count 2",
                           "winnow_resume_seconds_sum 1.5",
                           "winnow_resume_bytes_total 4096",
                           "winnow_kv_read_seconds_count{tier=\"disk\"} 4",
                           "winnow_kv_read_seconds_sum{tier=\"disk\"} 3",
                           "winnow_kv_read_seconds_bucket{tier=\"disk\",le=\"5e-05\"} 2",
                           "winnow_kv_read_seconds_bucket{tier=\"disk\",le=\"0.0002\"} 2",
                           "winnow_kv_read_seconds_bucket{tier=\"disk\",le=\"0.0004\"} 3",
                           "winnow_kv_read_seconds_bucket{tier=\"disk\",le=\"2.5\"} 3",
                           "winnow_kv_read_seconds_bucket{tier=\"disk\",le=\"+Inf\"} 4"}) {
    EXPECT_THAT(text, HasSubstr(std::string("\n") + line)) << line;
  }
}

TEST_F(MetricsTest, TheCertificatesExpiryIsAskedForAtEachScrape) {
  int64_t expiry = 1'900'000'000;
  metrics_.SetCertificateExpiry([&] { return expiry; });
  EXPECT_THAT(metrics_.Text(),
              HasSubstr("\nwinnow_tls_certificate_expiry_timestamp_seconds 1900000000"));
  expiry = 2'000'000'000;
  EXPECT_THAT(metrics_.Text(),
              HasSubstr("\nwinnow_tls_certificate_expiry_timestamp_seconds 2000000000"));
}

TEST_F(MetricsTest, BucketsAreFineBelowTenMilliseconds) {
  metrics_.OnNextToken({}, std::chrono::microseconds(400));
  const std::string text = metrics_.Text();
  EXPECT_THAT(text, HasSubstr("winnow_inter_token_seconds_bucket{le=\"0.00025\"} 0"));
  EXPECT_THAT(text, HasSubstr("winnow_inter_token_seconds_bucket{le=\"0.0005\"} 1"));
  for (const char* bound : {"0.001", "0.002", "0.004", "0.006", "0.008", "0.01"}) {
    EXPECT_THAT(text, HasSubstr(std::string("winnow_inter_token_seconds_bucket{le=\"") + bound));
  }
}

TEST_F(MetricsTest, OutcomesAreCountedByWhatAnOperatorTreatsAlike) {
  metrics_.CountRequest(absl::OkStatus());
  metrics_.CountRequest(InvalidField("n", "bad"));
  metrics_.CountRequest(
      ErrorWithReason(absl::StatusCode::kFailedPrecondition, "NO_CHAT_TEMPLATE", ""));
  metrics_.CountRequest(ErrorWithReason(absl::StatusCode::kCancelled, "SLOW_READER", ""));
  metrics_.CountRequest(ErrorWithReason(absl::StatusCode::kCancelled, "CANCELLED", ""));
  metrics_.CountRequest(absl::InternalError("x"));
  const std::string text = metrics_.Text();
  for (const auto& [outcome, count] :
       {std::pair{"ok", 1}, {"invalid", 2}, {"slow_reader", 1}, {"cancelled", 1}, {"error", 1}}) {
    EXPECT_THAT(text, HasSubstr(std::string("winnow_requests_total{outcome=\"") + outcome + "\"} " +
                                std::to_string(count)));
  }
}

TEST_F(MetricsTest, SequencesAreCountedInVllmsWordsToo) {
  engine::EngineStats stats;
  for (int i = 1; i < engine::kNumFinishReasons; ++i) stats.finished[i] = uint64_t{1} << i;
  MetricsInfo info;
  info.model = "needle";
  const std::string text = prometheus::TextSerializer().Serialize(VllmFamilies(stats, info));
  using engine::FinishReason;
  const auto bit = [](FinishReason reason) { return 1 << static_cast<int>(reason); };
  for (const auto& [reason, count] :
       {std::pair{"stop", bit(FinishReason::kStopToken) + bit(FinishReason::kStopString)},
        {"length", bit(FinishReason::kMaxTokens)},
        {"abort", bit(FinishReason::kCancelled) + bit(FinishReason::kDeadline)},
        {"error", bit(FinishReason::kError)}}) {
    EXPECT_THAT(text, HasSubstr(std::string("\nvllm:request_success_total{finished_reason=\"") +
                                reason + "\",model_name=\"needle\"} " + std::to_string(count)));
  }
}

TEST_F(MetricsTest, ConstraintsAreCountedByKindWithTheTimeToCompileThem) {
  metrics_.CountConstraint(Constraint::kRegex, std::chrono::milliseconds(250));
  metrics_.CountConstraint(Constraint::kStructuralTag, {});
  metrics_.CountConstraint(Constraint::kStructuralTag, {});
  const std::string text = metrics_.Text();
  for (const auto& [kind, count] :
       {std::pair{"json_schema", 0}, {"regex", 1}, {"structural_tag", 2}}) {
    EXPECT_THAT(text, HasSubstr(std::string("\nwinnow_structured_requests_total{kind=\"") + kind +
                                "\"} " + std::to_string(count)));
  }
  EXPECT_THAT(text, HasSubstr("\nwinnow_structured_compile_seconds_count 3"));
  EXPECT_THAT(text, HasSubstr("\nwinnow_structured_compile_seconds_sum 0.25"));
}

TEST_F(MetricsTest, OnlyCompleteSequencesHaveADuration) {
  engine::Usage usage;
  usage.generated_tokens = 11;
  usage.time_to_first_token = std::chrono::milliseconds(100);
  usage.total_time = std::chrono::milliseconds(200);
  metrics_.OnFinished({}, engine::FinishReason::kCancelled, usage);
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_request_duration_seconds_count 0"));
  metrics_.OnFinished({}, engine::FinishReason::kStopToken, usage);
  const std::string text = metrics_.Text();
  EXPECT_THAT(text, HasSubstr("\nwinnow_request_duration_seconds_count 1"));
  EXPECT_THAT(text, HasSubstr("\nwinnow_queue_seconds_count 2"));
  EXPECT_THAT(text, HasSubstr("\nvllm:request_queue_time_seconds_count{model_name=\"needle\"} 2"));
  EXPECT_THAT(text, ::testing::ContainsRegex(
                        "gen_ai_server_time_per_output_token_seconds_sum\\{[^}]*\\} 0\\.01"));
}

TEST_F(MetricsTest, SharesAreOfSequencesThatRetrievedAndRowsOfStepsThatDecoded) {
  metrics_.OnFinished({}, engine::FinishReason::kMaxTokens, {});
  metrics_.OnStep({.sequences = 1, .tokens = 512});
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_retrieval_kept_ratio_count 0"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_step_attended_rows_count 0"));
  engine::Usage usage;
  usage.retrieval.candidate_rows = 1000;
  usage.retrieval.selected_rows = 25;
  metrics_.OnFinished({}, engine::FinishReason::kMaxTokens, usage);
  metrics_.OnStep({.sequences = 1, .tokens = 1, .attended_rows = 5000});
  const std::string text = metrics_.Text();
  EXPECT_THAT(text, HasSubstr("\nwinnow_retrieval_kept_ratio_sum 0.025"));
  EXPECT_THAT(text, HasSubstr("\nwinnow_step_attended_rows_sum 5000"));
}

TEST_F(MetricsTest, SaysHowManyLinesTheLogDropped) {
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_log_dropped_lines_total 0\n"));
  metrics_.SetDroppedLines([] { return uint64_t{7}; });
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_log_dropped_lines_total 7\n"));
}

TEST_F(MetricsTest, SaysHowManyKvEventsWereMissed) {
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_kv_event_batches_missed_total 0\n"));
  metrics_.SetMissedKvEvents([] { return uint64_t{3}; });
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_kv_event_batches_missed_total 3\n"));
  metrics_.SetMissedKvEvents({});
  EXPECT_THAT(metrics_.Text(), HasSubstr("\nwinnow_kv_event_batches_missed_total 0\n"));
}

TEST_F(MetricsTest, ListensOnAFreePortAndRefusesATakenOne) {
  const auto port = metrics_.Listen("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  EXPECT_GT(*port, 0);
  Metrics other({}, clock_);
  EXPECT_EQ(other.Listen("127.0.0.1:" + std::to_string(*port)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(MetricsTest, RoutersFindTheirNames) {
  const std::string text = metrics_.Text();
  for (const char* line : {"vllm:num_requests_waiting{model_name=\"needle\"} 0",
                           "vllm:num_requests_running{model_name=\"needle\"} 0",
                           "vllm:kv_cache_usage_perc{model_name=\"needle\"} 0",
                           "vllm:cache_config_info{block_size=\"64\",num_gpu_blocks=\"0\"} 1",
                           "vllm:lora_requests_info{max_lora=\"0\""}) {
    EXPECT_THAT(text, HasSubstr(std::string("\n") + line)) << line;
  }
}

TEST_F(MetricsTest, ThePageHasTheSameSeriesAndOldHistograms) {
  const auto names = [](const std::string& text) {
    std::set<std::string> out;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with('#')) out.insert(line.substr(0, line.rfind(' ')));
    }
    return out;
  };
  HttpCounts counts;
  metrics_.SetHttp([&counts] { return counts; });
  const std::string before = metrics_.Page();
  EXPECT_EQ(names(before), names(metrics_.Text()));
  metrics_.OnFirstToken({}, std::chrono::milliseconds(3));
  counts.connections = 7;
  EXPECT_THAT(metrics_.Page(), HasSubstr("winnow_time_to_first_token_seconds_count 0"));
  EXPECT_THAT(metrics_.Page(), HasSubstr("winnow_http_connections 7"));
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_THAT(metrics_.Page(), HasSubstr("winnow_time_to_first_token_seconds_count 1"));
}

}  // namespace
}  // namespace winnow::server
