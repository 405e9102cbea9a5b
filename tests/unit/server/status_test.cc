#include "server/status.h"

#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/end_status.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

google::rpc::Status Details(const grpc::Status& status) {
  google::rpc::Status rpc;
  EXPECT_TRUE(rpc.ParseFromString(status.error_details()));
  return rpc;
}

template <typename Message>
Message Detail(const google::rpc::Status& status) {
  Message message;
  int found = 0;
  for (const auto& any : status.details()) found += any.UnpackTo(&message) ? 1 : 0;
  EXPECT_EQ(found, 1) << message.GetTypeName();
  return message;
}

TEST(Status, OkTurnsIntoOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_EQ(ReasonOf(absl::OkStatus()), "");
}

TEST(Status, EveryCodeKeepsItsNumberAndHasAReason) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "text");
    const grpc::Status grpc = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(grpc.error_code()), code);
    EXPECT_EQ(grpc.error_message(), "text");
    const auto rpc = Details(grpc);
    EXPECT_EQ(rpc.code(), code);
    const auto info = Detail<google::rpc::ErrorInfo>(rpc);
    EXPECT_EQ(info.domain(), "winnow");
    EXPECT_THAT(info.reason(), ::testing::MatchesRegex("[A-Z][A-Z0-9_]+"));
  }
}

TEST(Status, ViolationsComeWithTheirPaths) {
  Violations violations;
  violations.Add("a.b[3]", "is bad");
  violations.Add("c", "is worse");
  const absl::Status status = violations.ToStatus();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "a.b[3]: is bad (and 1 more)");
  const auto bad = Detail<google::rpc::BadRequest>(Details(ToGrpcStatus(status)));
  ASSERT_EQ(bad.field_violations_size(), 2);
  EXPECT_EQ(bad.field_violations(0).field(), "a.b[3]");
  EXPECT_EQ(bad.field_violations(0).description(), "is bad");
  EXPECT_EQ(bad.field_violations(1).field(), "c");
}

TEST(Status, NoViolationsAreOk) { EXPECT_TRUE(Violations().ToStatus().ok()); }

TEST(Status, RetryInfoTravels) {
  const absl::Status status =
      WithRetryAfter(ErrorWithReason(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "full"),
                     absl::Milliseconds(1500));
  const auto retry = Detail<google::rpc::RetryInfo>(Details(ToGrpcStatus(status)));
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 500000000);
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");
}

// Status and details are headers, and a client's default limit for those is 8 KiB.
TEST(Status, HostileViolationsStayWithinAHeader) {
  Violations violations;
  for (int i = 0; i < 1000; ++i) {
    violations.Add("field" + std::to_string(i), std::string(10000, '\xff'));
  }
  const grpc::Status status = ToGrpcStatus(violations.ToStatus());
  EXPECT_LT(status.error_message().size() * 3 + status.error_details().size() * 4 / 3, 7000u);
  EXPECT_THAT(status.error_message(), HasSubstr("(and 999 more)"));
  EXPECT_EQ(InvalidUtf8At(status.error_message()), std::nullopt);
  EXPECT_EQ(InvalidUtf8At(
                Detail<google::rpc::BadRequest>(Details(status)).field_violations(0).description()),
            std::nullopt);
}

TEST(Status, DescriptionForPeopleHasAllDetails) {
  absl::Status status = InvalidField("n", "must be in [1, 16], is 0");
  const std::string text =
      DescribeGrpcStatus(ToGrpcStatus(WithRetryAfter(status, absl::Seconds(2))));
  EXPECT_THAT(text, HasSubstr("INVALID_ARGUMENT: n: must be"));
  EXPECT_THAT(text, HasSubstr("\n  reason: INVALID_FIELD"));
  EXPECT_THAT(text, HasSubstr("\n  n: must be in [1, 16], is 0"));
  EXPECT_THAT(text, HasSubstr("\n  retry after 2s"));
  EXPECT_EQ(DescribeGrpcStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone")),
            "UNAVAILABLE: gone");
}

TEST(Utf8, FindsTheFirstByteThatIsNotPartOfACharacter) {
  const std::pair<std::string, std::optional<size_t>> cases[] = {
      {"", std::nullopt},
      {"plain", std::nullopt},
      {std::string("nul\0", 4), std::nullopt},
      {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", std::nullopt},
      {"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf", std::nullopt},
      {"a\x80", 1},             // continuation alone
      {"ab\xc3", 2},            // cut
      {"\xe2\x82", 0},          // cut
      {"\xc0\xaf", 0},          // overlong
      {"\xc1\xbf", 0},          // overlong
      {"\xe0\x80\xaf", 0},      // overlong
      {"\xf0\x80\x80\xaf", 0},  // overlong
      {"x\xed\xa0\x80", 1},     // surrogate
      {"\xf4\x90\x80\x80", 0},  // past U+10FFFF
      {"\xf5\x80\x80\x80", 0},
      {"\xff", 0},
      {"\xe2\x28\xa1", 0},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(InvalidUtf8At(text), expected) << text;
}

TEST(Utf8, CleanNeverCutsACharacterAndIsAlwaysValid) {
  const std::string text = "a\xc3\xa9\xe2\x82\xac\xff\xf0\x9f\x98\x80z";
  for (size_t max = 0; max <= text.size(); ++max) {
    const std::string clean = CleanUtf8(text, max);
    EXPECT_LE(clean.size(), max);
    EXPECT_EQ(InvalidUtf8At(clean), std::nullopt);
  }
  EXPECT_EQ(CleanUtf8("\xff\xfe", 10), "??");
}

TEST(Status, ALostRequestIsNotALostEngine) {
  engine::OutputEvent event;
  event.finish = engine::FinishReason::kError;
  event.error = "the KV of this request was lost by its store repeatedly";
  event.error_code = absl::StatusCode::kUnavailable;
  const absl::Status lost = StatusOfEnd(event, /*engine_failed=*/false);
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(lost), "STORE_FAILED");
  EXPECT_EQ(ReasonOf(StatusOfEnd(event, /*engine_failed=*/true)), "ENGINE_FAILED");
  event.finish = engine::FinishReason::kCancelled;
  EXPECT_EQ(ReasonOf(StatusOfEnd(event, /*engine_failed=*/false)), "DRAINING");
}

}  // namespace
}  // namespace winnow::server
