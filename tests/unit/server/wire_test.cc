#include "server/wire.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <random>

#include "server/status.h"
#include "tests/unit/test_seed.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;

constexpr char kMark[] = "BADBYTE";

// The message's bytes with each kMark replaced by as many bytes that are not UTF-8: a message that
// Protobuf itself would not make.
std::string Spoil(const google::protobuf::Message& message) {
  std::string bytes = message.SerializeAsString();
  for (size_t at; (at = bytes.find(kMark)) != bytes.npos;) {
    bytes.replace(at, sizeof kMark - 1, sizeof kMark - 1, '\xff');
  }
  return bytes;
}

TEST(Wire, GoodMessagesParse) {
  v1::GenerateRequest in, out;
  in.mutable_text()->set_text(std::string("h\xc3\xa9llo"));
  in.mutable_stopping()->add_stop_strings(std::string("x"));
  ASSERT_TRUE(ParseMessage(in.SerializeAsString(), out).ok());
  EXPECT_EQ(out.SerializeAsString(), in.SerializeAsString());
  EXPECT_TRUE(ParseMessage("", out).ok());
}

TEST(Wire, BadStringIsInvalidArgumentWithItsPath) {
  google::protobuf::LogSilencer quiet;
  const auto expect = [](const v1::GenerateRequest& message, const std::string& path) {
    v1::GenerateRequest out;
    const absl::Status status = ParseMessage(Spoil(message), out);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "INVALID_FIELD");
    EXPECT_THAT(std::string(status.message()), HasSubstr(path + ": is not UTF-8 at byte "));
  };
  v1::GenerateRequest text;
  text.mutable_text()->set_text(std::string("abc") + kMark);
  expect(text, "text.text");

  v1::GenerateRequest chat;
  for (int i = 0; i < 4; ++i) {
    v1::ChatMessage& message = *chat.mutable_chat()->add_messages();
    message.set_role(std::string("user"));
    message.set_content(i == 2 ? kMark : "fine");
  }
  expect(chat, "chat.messages[2].content");

  v1::GenerateRequest stop;
  stop.mutable_stopping()->add_stop_strings(std::string("a"));
  stop.mutable_stopping()->add_stop_strings(std::string(kMark));
  (*stop.mutable_sampling()->mutable_logit_bias())[3] = 1;
  expect(stop, "stopping.stop_strings[1]");

  v1::GenerateRequest policy;
  policy.set_policy(std::string(kMark));
  expect(policy, "policy");
}

TEST(Wire, BytesThatAreNotProtobufSayWhatWasExpected) {
  v1::GenerateRequest out;
  for (const std::string& bytes :
       std::vector<std::string>{"\x0a\xff", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
                                "\x0a\x7f", "\x07", "\x0a\x05\x0a\x7f"}) {
    const absl::Status status = ParseMessage(bytes, out);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "INVALID_ENCODING");
    EXPECT_THAT(std::string(status.message()), HasSubstr("winnow.v1.GenerateRequest"));
  }
}

TEST(Wire, RandomBytesNeverCrash) {
  google::protobuf::LogSilencer quiet;
  TestRandom random;
  v1::GenerateRequest good;
  for (int i = 0; i < 5; ++i) {
    v1::ChatMessage& message = *good.mutable_chat()->add_messages();
    message.set_role(std::string("user"));
    message.set_content(std::string("content \xe2\x82\xac"));
  }
  good.mutable_stopping()->add_stop_strings(std::string("stop"));
  const std::string bytes = good.SerializeAsString();
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string mutated = bytes;
    for (int k = 0; k < 3; ++k) mutated[random() % mutated.size()] = static_cast<char>(random());
    mutated.resize(random() % (mutated.size() + 1));
    v1::GenerateRequest out;
    refused += !ParseMessage(mutated, out).ok();
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace winnow::server
