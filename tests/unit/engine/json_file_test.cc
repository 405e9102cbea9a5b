#include "engine/base/json_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/engine/model_files.h"

namespace winnow::engine {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(const std::string& text) {
  const auto json = ParseJsonObject(text, "x.json");
  EXPECT_EQ(json.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(json.status().message());
}

TEST(JsonFileTest, AnObjectIsParsed) {
  const auto json = ParseJsonObject(R"({"a": [1, 2]})", "x.json");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ((*json)["a"][1], 2);
}

TEST(JsonFileTest, ErrorsNameTheFileAndTheByte) {
  EXPECT_THAT(ErrorOf("{\"a\": }"), AllOf(HasSubstr("x.json: "), HasSubstr("column 7")));
  EXPECT_THAT(ErrorOf("[1]"), HasSubstr("x.json: not a JSON object"));
  EXPECT_THAT(ErrorOf(""), HasSubstr("x.json: "));
  EXPECT_THAT(ErrorOf("{\"\xff\": 1}"), HasSubstr("x.json: "));
}

TEST(JsonFileTest, WhatFollowsANulIsNotIgnored) {
  EXPECT_THAT(ErrorOf(std::string("{}\0{", 4)), HasSubstr("NUL byte at byte 2"));
}

TEST(JsonFileTest, DeepNestingIsRefusedWithoutRecursion) {
  EXPECT_THAT(ErrorOf("{\"a\": " + std::string(65, '[') + std::string(65, ']') + "}"),
              HasSubstr("nested deeper"));
  EXPECT_THAT(ErrorOf("{\"a\": " + std::string(1'000'000, '[')), HasSubstr("x.json: "));
  EXPECT_TRUE(
      ParseJsonObject("{\"a\": " + std::string(63, '[') + std::string(63, ']') + "}", "x").ok());
}

TEST(JsonFileTest, ALinkThatLeadsNowhereIsNotAnAbsentFile) {
  const TempDir dir;
  WriteText(dir.File("there"), "{}");
  ASSERT_EQ(symlink("there", dir.File("good").c_str()), 0);
  ASSERT_EQ(symlink("../gone/blob", dir.File("dangling").c_str()), 0);
  ASSERT_EQ(symlink("dangling", dir.File("chain").c_str()), 0);
  EXPECT_EQ(ReadSmallFile(dir.File("good"), 5).value(), "{}");
  EXPECT_TRUE(CheckLink(dir.File("good")).ok());
  EXPECT_TRUE(CheckLink(dir.File("there")).ok());
  EXPECT_TRUE(CheckLink(dir.File("absent")).ok());
  const absl::Status status = ReadSmallFile(dir.File("dangling"), 5).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(dir.File("dangling")), HasSubstr("../gone/blob")));
  EXPECT_THAT(std::string(ReadSmallFile(dir.File("chain"), 5).status().message()),
              HasSubstr("a link to dangling"));
}

TEST(JsonFileTest, OnlyRegularFilesWithinTheLimitAreRead) {
  const TempDir dir;
  WriteText(dir.File("a"), "12345");
  EXPECT_EQ(ReadSmallFile(dir.File("a"), 5).value(), "12345");
  EXPECT_THAT(std::string(ReadSmallFile(dir.File("a"), 4).status().message()),
              HasSubstr("5 bytes, more than the 4"));
  EXPECT_TRUE(absl::IsNotFound(ReadSmallFile(dir.File("b"), 5).status()));
  EXPECT_THAT(std::string(ReadSmallFile(dir.path(), 5).status().message()),
              HasSubstr("not a regular file"));
  ASSERT_EQ(mkfifo(dir.File("fifo").c_str(), 0600), 0);
  EXPECT_THAT(std::string(ReadSmallFile(dir.File("fifo"), 5).status().message()),
              HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace winnow::engine
