#include "engine/schedule/tenant_shares.h"

#include <string>

#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

int64_t ServedAtJoin(TenantShares& shares, const std::string& tenant) {
  const int32_t index = shares.Join(tenant);
  return shares.served()[index];
}

TEST(TenantSharesTest, ATenantKeepsItsIndexWhileItHasRequests) {
  TenantShares shares;
  const int32_t a = shares.Join("a");
  const int32_t b = shares.Join("");
  EXPECT_NE(a, b);
  EXPECT_EQ(shares.Join("a"), a);
  shares.Charge(a, 10);
  shares.Leave(a);
  EXPECT_EQ(shares.served()[a], 10);
}

TEST(TenantSharesTest, AWeightDividesWhatIsCharged) {
  TenantShares shares;
  const int32_t heavy = shares.Join("heavy", 4);
  const int32_t light = shares.Join("light", 0.5);
  shares.Charge(heavy, 100);
  shares.Charge(light, 100);
  EXPECT_EQ(shares.served()[heavy], 25);
  EXPECT_EQ(shares.served()[light], 200);
  shares.Join("heavy", 2);  // what came last counts
  shares.Charge(heavy, 100);
  EXPECT_EQ(shares.served()[heavy], 75);
  EXPECT_EQ(shares.weights()[heavy], 2);
}

TEST(TenantSharesTest, ANewcomerStartsAtTheLevel) {
  TenantShares shares;
  const int32_t a = shares.Join("a");
  shares.Charge(a, 100);
  shares.SetLevel(a);
  EXPECT_EQ(ServedAtJoin(shares, "b"), 100);
}

TEST(TenantSharesTest, WhoComesBackStartsAtTheLevelButKeepsWhatItHadBeyondIt) {
  TenantShares shares;
  const int32_t busy = shares.Join("busy");
  const int32_t little = shares.Join("little");
  const int32_t much = shares.Join("much");
  shares.Charge(little, 5);
  shares.Charge(much, 500);
  shares.Leave(little);
  shares.Leave(much);
  shares.Charge(busy, 100);
  shares.SetLevel(busy);
  EXPECT_EQ(ServedAtJoin(shares, "little"), 100);
  EXPECT_EQ(ServedAtJoin(shares, "much"), 500);
}

TEST(TenantSharesTest, NamesDoNotPileUp) {
  TenantShares shares;
  const int32_t busy = shares.Join("busy");
  for (int i = 0; i < 1000; ++i) {
    const int32_t passing = shares.Join("tenant " + std::to_string(i));
    shares.SetLevel(passing);
    shares.Charge(passing, 10);
    shares.Leave(passing);
    shares.Charge(busy, 20);
    shares.SetLevel(busy);
  }
  EXPECT_LE(shares.served().size(), 3u);
}

TEST(TenantSharesTest, WhenAllHaveLeftNobodyIsRemembered) {
  TenantShares shares;
  const int32_t a = shares.Join("a");
  shares.Charge(a, 100);
  shares.Leave(a);
  EXPECT_TRUE(shares.served().empty());
  EXPECT_EQ(ServedAtJoin(shares, "a"), 0);
}

}  // namespace
}  // namespace winnow::engine
