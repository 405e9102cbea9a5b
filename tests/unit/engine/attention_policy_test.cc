#include "engine/attention_policy.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace winnow::engine {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

absl::Status ErrorOf(std::string_view text) { return ParseAttentionPolicy(text).status(); }

void ExpectInvalid(std::string_view text, const std::string& message_part) {
  const absl::Status status = ErrorOf(text);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text << ": " << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message_part)) << text;
}

TEST(AttentionPolicy, DenseParsesAndPrintsAsItself) {
  const auto policy = ParseAttentionPolicy("dense");
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->kind, AttentionPolicy::Kind::kDense);
  EXPECT_EQ(ToString(*policy), "dense");
  EXPECT_EQ(*ParseAttentionPolicy(ToString(*policy)), *policy);
}

TEST(AttentionPolicy, PoliciesOfLaterVersionsAreRefusedByName) {
  for (const std::string text :
       {"window", "oracle:k=256", "quest:k=256", "lsh", "hata:k=2%",
        "spotlight:k=2%,p=0.95,completion=on", "hashattention:sink=0,window=64,dense_layers=0"}) {
    const absl::Status status = ErrorOf(text);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << text << ": " << status;
    EXPECT_EQ(status.message(), "policy '" + text.substr(0, text.find(':')) +
                                    "' is not in this version: only dense is");
  }
}

TEST(AttentionPolicy, UnknownNamesGetASuggestionAndTheList) {
  ExpectInvalid(
      "dens",
      "policy 'dens' is not known (did you mean 'dense'?); policies: dense, window, oracle, quest, "
      "lsh, hata, spotlight, hashattention");
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

TEST(AttentionPolicy, DenseTakesNoOptions) {
  ExpectInvalid("dense:k=2", "policy option 'k' does not apply to 'dense', which takes none");
  ExpectInvalid("dense:completion=on", "does not apply to 'dense'");
  ExpectInvalid("dense:", "policy option '' is not known");
}

TEST(AttentionPolicy, OptionsAreCheckedBeforeThePolicyIsRefused) {
  ExpectInvalid("window:k=2", "policy option 'k' does not apply to 'window'");
  ExpectInvalid("hata:kk=2",
                "policy option 'kk' is not known (did you mean 'k'?); options: k, p, completion");
  ExpectInvalid("hata:complition=on", "did you mean 'completion'?");
  ExpectInvalid("hata:k=2,k=3", "policy option 'k' is given twice");
  ExpectInvalid("hata:k", "policy option 'k' has no value; write k=");
  ExpectInvalid("hata:k=2,", "policy option '' is not known");
}

TEST(AttentionPolicy, BadNumbersAreNamed) {
  const std::vector<std::string> bad_k = {"",     "0",   "-1",          "2.5", "0%", "101%",
                                          "nan%", "1e3", "99999999999", "%",   " 2", "+2"};
  for (const std::string& value : bad_k)
    ExpectInvalid("hata:k=" + value, "policy option 'k': '" + value + "' is not a ");
  for (const std::string value : {"", "0", "1.01", "nan", "inf", "-0.5", "1e-1", "0.9.5", "."}) {
    ExpectInvalid("hata:p=" + value,
                  "policy option 'p': '" + value + "' is not a number above 0 and up to 1");
  }
  for (const std::string value : {"", "true", "ON", "1"}) {
    ExpectInvalid("hata:completion=" + value,
                  "policy option 'completion': '" + value + "' is not on or off");
  }
  for (const std::string value : {"", "-1", "1.5", "4294967296"}) {
    ExpectInvalid("window:sink=" + value,
                  "policy option 'sink': '" + value + "' is not a count of at least 0");
  }
  const absl::Status status = ErrorOf("hata:k=0");
  EXPECT_THAT(std::string(status.message()),
              EndsWith("is not a count of at least 1 or a share such as 2%"));
}

}  // namespace
}  // namespace winnow::engine
