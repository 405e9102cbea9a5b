#include "server/tenant_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/null_sink.h>

#include <fstream>

#include "tests/unit/engine/engine_testing.h"
#include "tests/unit/temp_dir.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

class TenantLimitsTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) const { std::ofstream(path_) << text; }
  absl::StatusOr<std::unique_ptr<TenantTable>> Load(const std::string& text) {
    Write(text);
    return TenantTable::Load(path_, log_, clock_);
  }
  void ExpectRefused(const std::string& text, const std::string& message) {
    const auto table = Load(text);
    EXPECT_EQ(table.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(table.status().message()), HasSubstr(path_ + message)) << text;
  }

  const TempDir dir_;
  const std::string path_ = dir_.File("tenants.yaml");
  Log log_{"debug", "json", std::make_shared<spdlog::sinks::null_sink_mt>()};
  engine::FakeClock clock_;
};

TEST_F(TenantLimitsTest, ATenantHasItsOwnLimitsAndOthersTheDefault) {
  const auto table = Load(
      "default: {weight: 0.5, requests: 8}\n"
      "tenants:\n"
      "  a: {weight: 2, waiting_tokens: 3, running_tokens: 4, store_bytes: 5}\n"
      "  b: {}\n");
  ASSERT_TRUE(table.ok()) << table.status();
  const TenantLimits a = (*table)->Of("a");
  EXPECT_EQ(a.weight, 2);
  EXPECT_EQ(a.requests, 0);  // the default's are not inherited
  EXPECT_EQ(a.waiting_tokens, 3);
  EXPECT_EQ(a.running_tokens, 4);
  EXPECT_EQ(a.store_bytes, 5);
  EXPECT_EQ((*table)->Of("b").weight, 1);
  EXPECT_EQ((*table)->Of("nobody").weight, 0.5);
  EXPECT_EQ((*table)->Of("nobody").requests, 8);
}

TEST_F(TenantLimitsTest, AnEmptyFileBoundsNobody) {
  for (const char* text : {"", "# nothing\n", "{}\n"}) {
    const auto table = Load(text);
    ASSERT_TRUE(table.ok()) << table.status();
    EXPECT_EQ((*table)->Of("a").weight, 1);
    EXPECT_EQ((*table)->Of("a").requests, 0);
  }
}

TEST_F(TenantLimitsTest, WhatIsWrongIsNamedWithItsLine) {
  ExpectRefused("- a\n", ":1: must be a map with default and tenants");
  ExpectRefused("\ntenents: {}\n", ":2: unknown key tenents: did you mean tenants?");
  ExpectRefused("[a]: {}\n", ":1: unknown key");
  ExpectRefused("tenants: [a]\n", ":1: tenants: must be a map");
  ExpectRefused("tenants:\n  a: 3\n", ":2: must be a map of limits");
  ExpectRefused("default: 3\n", ":1: must be a map of limits");
  ExpectRefused("tenants:\n  a/b: {}\n", ":2: a tenant's name must be");
  ExpectRefused("tenants:\n  a: {}\n  a: {}\n", ":3: a: is there twice");
  ExpectRefused("default: {reqests: 1}\n", ":1: unknown key reqests: did you mean requests?");
  for (const char* weight : {"0", "0.009", "1001", "-1", "nan", "inf", "x", "[1]"})
    ExpectRefused("default: {weight: " + std::string(weight) + "}\n", ":1: weight: must be");
  for (const char* quota : {"0", "-1", "1.5", "x", "9223372036854775807", "{}"})
    ExpectRefused("default: {store_bytes: " + std::string(quota) + "}\n", ":1: store_bytes: must");
  ExpectRefused("tenants: [", ":");
}

TEST_F(TenantLimitsTest, TrustIsSaidByNameAndSharesOneStoreQuota) {
  const auto table = Load(
      "tenants:\n"
      "  a: {trust_domain: team.1, store_bytes: 5, requests: 2}\n"
      "  b: {trust_domain: team.1, store_bytes: 5}\n"
      "  c: {trust_domain: other}\n"
      "  d: {}\n");
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ((*table)->Of("a").trust_domain, "team.1");
  EXPECT_EQ((*table)->Of("a").requests, 2);
  EXPECT_EQ((*table)->Of("b").trust_domain, "team.1");
  EXPECT_EQ((*table)->Of("b").requests, 0) << "quotas are each tenant's own";
  EXPECT_EQ((*table)->Of("c").trust_domain, "other");
  EXPECT_EQ((*table)->Of("d").trust_domain, "");
  EXPECT_EQ((*table)->Of("nobody").trust_domain, "");
  const std::string too_long(65, 'x');
  for (const std::string& name :
       {std::string("''"), std::string("a/b"), std::string("'a b'"), std::string("[a]"), too_long})
    ExpectRefused("tenants:\n  a: {trust_domain: " + name + "}\n", ":2: trust_domain: must be");
  ExpectRefused("tenants:\n  a: {trust_domian: x}\n", ":2: unknown key trust_domian: did you mean");
  ExpectRefused("default: {trust_domain: x}\n", ":1: trust_domain: only of a tenant that is named");
  ExpectRefused(
      "tenants:\n  a: {trust_domain: x, store_bytes: 5}\n  b: {trust_domain: x, store_bytes: 6}\n",
      ":3: b: store_bytes must be that of a");
  ExpectRefused("tenants:\n  a: {trust_domain: x}\n  b: {trust_domain: x, store_bytes: 6}\n",
                ":3: b: store_bytes must be that of a");
}

TEST_F(TenantLimitsTest, ReloadReadsAtOnceAndABadFileLeavesWhatThereWas) {
  const auto table = Load("tenants: {a: {requests: 1}}\n");
  ASSERT_TRUE(table.ok()) << table.status();
  Write("tenants: {a: {requests: 22}}\n");
  EXPECT_EQ((*table)->Of("a").requests, 1) << "the clock stands";
  EXPECT_TRUE((*table)->Reload().ok());
  EXPECT_EQ((*table)->Of("a").requests, 22);
  Write("tenants: {a: {requests: -33}}\n");
  const absl::Status status = (*table)->Reload();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path_ + ":1: requests: must be"));
  EXPECT_EQ((*table)->Of("a").requests, 22);
}

TEST_F(TenantLimitsTest, AChangedFileIsReadAgainAndABadOneLeavesWhatThereWas) {
  const auto table = Load("tenants: {a: {requests: 1}}\n");
  ASSERT_TRUE(table.ok()) << table.status();
  Write("tenants: {a: {requests: 22}}\n");
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_EQ((*table)->Of("a").requests, 22);
  Write("tenants: {a: {requests: -33}}\n");
  clock_.Advance(std::chrono::seconds(2));
  EXPECT_EQ((*table)->Of("a").requests, 22);
}

}  // namespace
}  // namespace winnow::server
