#include "engine/retrieval/attention_policy.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using Kind = AttentionPolicy::Kind;

absl::Status ErrorOf(std::string_view text) { return ParseAttentionPolicy(text).status(); }

void ExpectInvalid(std::string_view text, const std::string& message_part) {
  const absl::Status status = ErrorOf(text);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text << ": " << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message_part)) << text;
}

AttentionPolicy Parse(std::string_view text) {
  const auto policy = ParseAttentionPolicy(text);
  EXPECT_TRUE(policy.ok()) << text << ": " << policy.status();
  return policy.value_or(AttentionPolicy());
}

TEST(AttentionPolicy, ADefaultOneIsDense) {
  EXPECT_EQ(Parse("dense"), AttentionPolicy());
  EXPECT_EQ(ToString(AttentionPolicy{}), "dense");
  EXPECT_TRUE(AttentionPolicy().IsDense());
}

TEST(AttentionPolicy, ANameAloneHasTheDefaults) {
  const std::vector<std::pair<std::string, Kind>> names = {{"dense", Kind::kDense},
                                                           {"window", Kind::kWindow},
                                                           {"oracle", Kind::kOracle},
                                                           {"quest", Kind::kQuest},
                                                           {"lsh", Kind::kLsh},
                                                           {"pca", Kind::kPca},
                                                           {"hata", Kind::kHata},
                                                           {"spotlight", Kind::kSpotlight},
                                                           {"hashattention", Kind::kHashAttention}};
  for (const auto& [name, kind] : names) {
    const AttentionPolicy policy = Parse(name);
    EXPECT_EQ(policy, AttentionPolicy{.kind = kind}) << name;
    EXPECT_EQ(policy.sink, 16) << name;
    EXPECT_EQ(policy.window, 128) << name;
    EXPECT_EQ(policy.dense_layers, 2) << name;
    EXPECT_EQ(KindName(kind), name);
    const bool chooses = kind != Kind::kDense && kind != Kind::kWindow;
    EXPECT_EQ(ToString(policy), chooses ? name + ":k=2%" : name);
  }
}

TEST(AttentionPolicy, EveryOptionSetsItsField) {
  EXPECT_EQ(Parse("hata:k=256").k, (AttentionPolicy::Budget{.count = 256, .share = 0}));
  EXPECT_EQ(Parse("hata:k=7%").k, (AttentionPolicy::Budget{.count = 0, .share = 0.07}));
  EXPECT_EQ(Parse("quest:p=0.95").p, 0.95);
  EXPECT_EQ(Parse("pca:min_mass=0.0005").min_mass, 0.0005);
  EXPECT_TRUE(Parse("window:completion=on").completion);
  EXPECT_FALSE(Parse("window:completion=off").completion);
  EXPECT_EQ(Parse("oracle:sink=0").sink, 0);
  EXPECT_EQ(Parse("oracle:window=1").window, 1);
  EXPECT_EQ(Parse("oracle:dense_layers=0").dense_layers, 0);
  EXPECT_EQ(Parse("spotlight:bits=64").bits, 64);
  EXPECT_EQ(Parse("lsh:bits=1024").bits, 1024);
  EXPECT_EQ(Parse("lsh:suffix=512").suffix, 512);
  EXPECT_EQ(Parse("lsh:from=0").from, 0);
  EXPECT_EQ(Parse("lsh").from, std::nullopt);
  EXPECT_EQ(Parse("lsh:floor=0.9").floor, 0.9);
  EXPECT_EQ(Parse("lsh:from=268435456").from, AttentionPolicy::kCountMax);
}

TEST(AttentionPolicy, CanonicalTextHasOneOrderAndNoDefaults) {
  EXPECT_EQ(ToString(Parse("spotlight:floor=0.5,from=0,suffix=512,bits=64,dense_layers=1,window=64,"
                           "sink=4,completion=on,p=0.95,k=256")),
            "spotlight:k=256,p=0.95,completion=on,sink=4,window=64,dense_layers=1,bits=64,"
            "suffix=512,from=0,floor=0.5");
  EXPECT_EQ(ToString(Parse("hata:k=2%,completion=off,sink=16,window=128,dense_layers=2,suffix=0")),
            "hata:k=2%");
  EXPECT_EQ(ToString(Parse("window:window=128,completion=on")), "window:completion=on");
  EXPECT_EQ(ToString(Parse("window:sink=0016")), "window");
  EXPECT_EQ(ToString(Parse("oracle:k=0.50%,p=1.0")), "oracle:k=0.5%,p=1");
  EXPECT_EQ(ToString(Parse("pca:tail=off,min_mass=0.00050,k=8%")),
            "pca:k=8%,min_mass=0.0005,tail=off");
  // 128 is what lsh means by no bits; for learned codes it is a demand on the artifact.
  EXPECT_EQ(Parse("lsh:bits=128"), Parse("lsh"));
  EXPECT_EQ(ToString(Parse("hata:bits=128")), "hata:k=2%,bits=128");
}

TEST(AttentionPolicy, SharesAreTheNearestDoublesAndPrintAsWritten) {
  // Where a percentage is divided by 100 the fraction is rounded twice, and 0.7% is not 0.007.
  const std::vector<std::pair<std::string, double>> shares = {
      {"2%", 0.02},       {"0.5%", 0.005}, {"0.7%", 0.007},         {"100%", 1.0},
      {"12.5%", 0.125},   {"0.1%", 0.001}, {"33.3%", 0.333},        {"7%", 0.07},
      {"99.99%", 0.9999}, {"10%", 0.1},    {"0.00001%", 0.0000001}, {"1.1%", 0.011}};
  for (const auto& [text, share] : shares) {
    const AttentionPolicy policy = Parse("lsh:k=" + text);
    EXPECT_EQ(policy.k.share, share) << text;
    EXPECT_EQ(policy.k.count, 0) << text;
    EXPECT_EQ(ToString(policy), "lsh:k=" + text);
  }
  EXPECT_EQ(Parse("lsh:k=.5%").k.share, 0.005);
}

TEST(AttentionPolicy, RandomPoliciesParseBack) {
  const uint64_t seed = testing::TestSeed();
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](int32_t end) {
    return std::uniform_int_distribution<int32_t>(0, end - 1)(random);
  };
  const auto share = [&] { return 1 - std::uniform_real_distribution<double>(0, 1)(random); };
  for (int i = 0; i < 2000; ++i) {
    AttentionPolicy policy{.kind = static_cast<Kind>(1 + below(8))};
    if (policy.HasBudget()) {
      if (below(2) == 0) {
        policy.k = {.count = 1 + below(AttentionPolicy::kCountMax), .share = 0};
      } else {
        policy.k = {.count = 0, .share = share() * std::pow(10.0, -below(12))};
      }
      if (below(2) == 0) policy.p = share();
    }
    policy.completion = below(2) == 0;
    if (below(2) == 0) policy.sink = below(1000);
    if (below(2) == 0) policy.window = 1 + below(1000);
    if (below(2) == 0) policy.dense_layers = below(8);
    const bool is_pca = policy.kind == Kind::kPca;
    if (policy.index_kind() == IndexKind::kCodes && below(2) == 0) {
      policy.bits = is_pca ? 64 * (1 + below(4)) : 32 << below(2);
    }
    if (is_pca) policy.tail = below(2) == 0;
    if (is_pca && !policy.p && below(2) == 0) policy.min_mass = share() / 2;
    if (is_pca && !policy.p) policy.rerank = below(2) == 0;
    if (below(2) == 0) policy.suffix = below(1000);
    if (below(2) == 0) policy.from = below(100000);
    if (below(2) == 0) policy.floor = share();
    const std::string text = ToString(policy);
    const auto parsed = ParseAttentionPolicy(text);
    ASSERT_TRUE(parsed.ok()) << text << ": " << parsed.status();
    ASSERT_EQ(*parsed, policy) << text;
    ASSERT_EQ(ToString(*parsed), text);
  }
}

TEST(AttentionPolicy, ASmallestShareStillHasAText) {
  AttentionPolicy policy{.kind = Kind::kOracle};
  policy.k.share = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(Parse(ToString(policy)), policy);
  ExpectInvalid("oracle:k=0." + std::string(400, '0') + "1%", "is not a share above 0%");
}

TEST(AttentionPolicy, KIsTheCountOrTheRoundedShare) {
  EXPECT_EQ(Parse("hata:k=256").KFor(1), 256);
  EXPECT_EQ(Parse("hata:k=2%").KFor(1), 1);  // never none
  EXPECT_EQ(Parse("hata:k=2%").KFor(74), 1);
  EXPECT_EQ(Parse("hata:k=2%").KFor(75), 2);  // a half rounds up
  EXPECT_EQ(Parse("hata:k=2%").KFor(1000000), 20000);
  EXPECT_EQ(Parse("hata:k=100%").KFor(std::numeric_limits<int32_t>::max()),
            std::numeric_limits<int32_t>::max());
  EXPECT_EQ(Parse("window").KFor(1000), 0);
  EXPECT_EQ(Parse("dense").KFor(1000), 0);
}

TEST(AttentionPolicy, PruningBeginsWithFourTimesAsMany) {
  EXPECT_EQ(Parse("hata:k=100").CandidatesFor(1000), 100);
  EXPECT_EQ(Parse("hata:k=100,p=0.9").CandidatesFor(1000), 400);
  EXPECT_EQ(Parse("hata:k=1%,p=0.9").CandidatesFor(1000), 40);
  EXPECT_EQ(Parse("hata:k=100%,p=0.9").CandidatesFor(std::numeric_limits<int32_t>::max()),
            std::numeric_limits<int32_t>::max());
  EXPECT_EQ(Parse("window").CandidatesFor(1000), 0);
}

TEST(AttentionPolicy, TheTailIsPcasAndOnUnlessSaidOtherwise) {
  EXPECT_TRUE(Parse("pca").HasTail());
  EXPECT_EQ(Parse("pca:tail=on"), Parse("pca"));
  EXPECT_FALSE(Parse("pca:tail=off").HasTail());
  EXPECT_EQ(ToString(Parse("pca:k=2%,tail=off")), "pca:k=2%,tail=off");
  EXPECT_EQ(Parse(ToString(Parse("pca:tail=off,bits=192"))), Parse("pca:bits=192,tail=off"));
  EXPECT_FALSE(Parse("lsh").HasTail());
  ExpectInvalid("lsh:tail=on", "policy option 'tail' does not apply to 'lsh'");
  ExpectInvalid("pca:tail=maybe", "policy option 'tail': 'maybe' is not on or off");
  ExpectInvalid("pca:bits=32", "policy option 'bits': '32' is not one of 64, 128, 192, 256");
}

TEST(AttentionPolicy, ReRankingIsPcasAndChoosesTwiceAsManyFirst) {
  EXPECT_FALSE(Parse("pca").rerank);
  EXPECT_EQ(Parse("pca:rerank=off"), Parse("pca"));
  EXPECT_TRUE(Parse("pca:rerank=on").rerank);
  EXPECT_EQ(ToString(Parse("pca:rerank=on,tail=off,k=2%")), "pca:k=2%,tail=off,rerank=on");
  EXPECT_EQ(Parse("pca:k=100,rerank=on").CandidatesFor(1000), 200);
  EXPECT_EQ(Parse("pca:k=1%,rerank=on").CandidatesFor(1000), 20);
  EXPECT_EQ(Parse("pca:k=1%,rerank=on").KFor(1000), 10);
  EXPECT_EQ(Parse("pca:k=100%,rerank=on").CandidatesFor(std::numeric_limits<int32_t>::max()),
            std::numeric_limits<int32_t>::max());
  EXPECT_EQ(Parse("pca:k=8%,min_mass=0.001,rerank=on").min_mass, 0.001);
  ExpectInvalid("lsh:rerank=on", "policy option 'rerank' does not apply to 'lsh'");
  ExpectInvalid("pca:rerank=1", "policy option 'rerank': '1' is not on or off");
  ExpectInvalid("pca:p=0.9,rerank=on", "policy options 'p' and 'rerank' exclude each other: ");
}

TEST(AttentionPolicy, SaysWhatItNeeds) {
  EXPECT_EQ(Parse("dense").select_by(), SelectBy::kNothing);
  EXPECT_EQ(Parse("window").select_by(), SelectBy::kNothing);
  EXPECT_EQ(Parse("oracle").select_by(), SelectBy::kKeys);
  EXPECT_EQ(Parse("quest").select_by(), SelectBy::kBounds);
  EXPECT_EQ(Parse("pca").select_by(), SelectBy::kMasses);
  for (const char* name : {"lsh", "hata", "spotlight", "hashattention"}) {
    EXPECT_EQ(Parse(name).select_by(), SelectBy::kCodes) << name;
  }
  EXPECT_EQ(Parse("dense").index_kind(), IndexKind::kNone);
  EXPECT_EQ(Parse("window").index_kind(), IndexKind::kNone);
  EXPECT_EQ(Parse("oracle").index_kind(), IndexKind::kNone);
  EXPECT_EQ(Parse("quest").index_kind(), IndexKind::kBounds);
  for (const char* name : {"lsh", "pca", "hata", "spotlight", "hashattention"})
    EXPECT_EQ(Parse(name).index_kind(), IndexKind::kCodes) << name;
  for (const char* name : {"dense", "window", "oracle", "quest", "lsh", "pca"})
    EXPECT_FALSE(Parse(name).NeedsArtifact()) << name;
  for (const char* name : {"hata", "spotlight", "hashattention", "window:completion=on",
                           "lsh:completion=on", "oracle:k=2%,completion=on"})
    EXPECT_TRUE(Parse(name).NeedsArtifact()) << name;
}

TEST(AttentionPolicy, UnknownNamesGetASuggestionAndTheList) {
  ExpectInvalid(
      "dens",
      "policy 'dens' is not known (did you mean 'dense'?); policies: dense, window, oracle, quest, "
      "lsh, pca, hata, spotlight, hashattention");
  ExpectInvalid("spotligth:k=2%", "did you mean 'spotlight'?");
  ExpectInvalid("Dense", "did you mean 'dense'?");
  ExpectInvalid("", "policy '' is not known; policies: ");
  ExpectInvalid("completely different", "policy 'completely different' is not known; policies: ");
  ExpectInvalid(" dense", "did you mean 'dense'?");
}

TEST(AttentionPolicy, LongTextIsNotRepeatedInFull) {
  const absl::Status status = ErrorOf(std::string(1 << 20, 'x'));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(status.message().size(), 256);
}

TEST(AttentionPolicy, OptionsThatDoNotApplyAreNamed) {
  ExpectInvalid("dense:k=2", "policy option 'k' does not apply to 'dense', which reads all");
  ExpectInvalid("dense:completion=on", "does not apply to 'dense'");
  ExpectInvalid("dense:from=0", "does not apply to 'dense'");
  ExpectInvalid("dense:", "policy option '' is not known; options: ");
  for (const char* option : {"k=2", "p=0.9", "bits=128"}) {
    ExpectInvalid(std::string("window:") + option,
                  "policy option '" + std::string(option).substr(0, std::string(option).find('=')) +
                      "' does not apply to 'window'");
  }
  ExpectInvalid("oracle:bits=128", "policy option 'bits' does not apply to 'oracle'");
  ExpectInvalid("quest:bits=128", "policy option 'bits' does not apply to 'quest'");
  ExpectInvalid("lsh:min_mass=0.001", "policy option 'min_mass' does not apply to 'lsh'");
  ExpectInvalid("pca:p=0.9,min_mass=0.001",
                "policy options 'p' and 'min_mass' exclude each other: ");
}

TEST(AttentionPolicy, VerifyAndLookupHaveOneText) {
  EXPECT_EQ(ToString(Parse("pca:verify=8,k=2%")), "pca:k=2%,verify=8");
  EXPECT_EQ(ToString(Parse("window:verify=auto")), "window:verify=auto");
  EXPECT_EQ(ToString(Parse("dense:lookup=on")), "dense:lookup=on,verify=auto");
  EXPECT_EQ(ToString(Parse("dense:verify=64,lookup=on")), "dense:lookup=on,verify=64");
  EXPECT_EQ(ToString(Parse("dense:lookup=off")), "dense");
  // The model's CheckPolicy says whether anything drafts there.
  EXPECT_EQ(ToString(Parse("dense:verify=8")), "dense:verify=8");
  EXPECT_EQ(Parse("lsh:verify=1").verify, 1);
  EXPECT_FALSE(Parse("lsh").IsVerified());
}

TEST(AttentionPolicy, WhatCannotBeVerifiedIsRefusedWithBothNames) {
  ExpectInvalid("spotlight:completion=on,verify=8",
                "policy options 'verify' and 'completion' exclude each other: ");
  ExpectInvalid("pca:verify=8,suffix=1",
                "policy options 'verify' and 'suffix' exclude each other: ");
  ExpectInvalid("pca:floor=0.9,verify=8",
                "policy options 'verify' and 'floor' exclude each other: ");
  ExpectInvalid("spotlight:completion=on,lookup=on", "'verify' and 'completion'");
  for (const char* bad : {"0", "65", "-1", "8.0", "", "AUTO"}) {
    ExpectInvalid(std::string("pca:verify=") + bad, "is not auto or a count from 1 to 64");
  }
  ExpectInvalid("pca:lookup=8", "policy option 'lookup': '8' is not on or off");
}

TEST(AttentionPolicy, BadOptionsAreNamed) {
  ExpectInvalid(
      "hata:kk=2",
      "policy option 'kk' is not known (did you mean 'k'?); options: k, p, min_mass, completion, "
      "tail, rerank, sink, window, dense_layers, bits, suffix, from, floor, verify, lookup");
  ExpectInvalid("hata:complition=on", "did you mean 'completion'?");
  ExpectInvalid("hata:k=2,k=3", "policy option 'k' is given twice");
  ExpectInvalid("hata:from=2,from=2", "policy option 'from' is given twice");
  ExpectInvalid("hata:k", "policy option 'k' has no value; write k=");
  ExpectInvalid("hata:k=2,", "policy option '' is not known; options: ");
  ExpectInvalid("hata:k=2,,p=0.5", "policy option '' is not known; options: ");
}

TEST(AttentionPolicy, BadValuesAreNamed) {
  const auto expect = [](std::string_view policy, const std::string& option,
                         const std::string& value, const std::string& wanted) {
    ExpectInvalid(std::string(policy) + ":" + option + "=" + value,
                  "policy option '" + option + "': '" + value + "' is not " + wanted);
  };
  for (const std::string value :
       {"", "0", "-1", "2.5", "1e3", "99999999999", "268435457", " 2", "+2"})
    expect("hata", "k", value, "a count of at least 1 or a share such as 2%");
  for (const std::string value : {"0%", "101%", "100.1%", "nan%", "%", "-1%", "1e0%", ".%", "0.%"})
    expect("hata", "k", value, "a share above 0% and up to 100%");
  for (const char* option : {"p", "floor"}) {
    for (const std::string value : {"", "0", "1.01", "nan", "inf", "-0.5", "1e-1", "0.9.5", "."})
      expect("hata", option, value, "a number above 0 and up to 1");
  }
  for (const std::string value : {"", "0", "1", "1.5", "nan", "-0.5", "1e-4", "0.1%"})
    expect("pca", "min_mass", value, "a number above 0 and below 1");
  for (const std::string value : {"", "true", "ON", "1"})
    expect("hata", "completion", value, "on or off");
  for (const char* option : {"sink", "dense_layers", "suffix", "from"}) {
    for (const std::string value : {"", "-1", "1.5", "4294967296", "268435457", "2%"})
      expect("window", option, value, "a count of at least 0 and at most 268435456");
  }
  for (const std::string value : {"", "0", "268435457"})
    expect("window", "window", value, "a count of at least 1 and at most 268435456");
  for (const std::string value : {"", "0", "16", "127", "512", "1024"})
    expect("hata", "bits", value, "one of 32, 64, 128, 256");
  for (const std::string value : {"", "0", "16", "2048"})
    expect("lsh", "bits", value, "one of 32, 64, 128, 256, 512, 1024");
  EXPECT_THAT(std::string(ErrorOf("hata:bits=512").message()), EndsWith("32, 64, 128, 256"));
}

}  // namespace
}  // namespace winnow::engine
