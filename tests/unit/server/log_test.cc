#include "server/log.h"

#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "nlohmann/json.hpp"

namespace winnow::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string LogLine(std::string_view format, std::string_view value) {
  std::ostringstream out;
  Log log("info", format, std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
  log.Event(LogLevel::kInfo, "test", {{"value", value}});
  return out.str();
}

const std::string kHostile[] = {
    "two\nlines",
    "quote\" and \\ backslash",
    "\x1b[31mred\x07",
    std::string("nul\0inside", 10),
    "\xc2\x9b"
    "31m",                        // C1 control sequence introducer
    "line\xe2\x80\xa8separator",  // U+2028
    "bad utf8 \xff\xc3",
    "level=error event=forged",
    "\x7f",
    "",
};

TEST(Log, JsonLinesAreJsonWhateverTheValue) {
  for (const std::string& value : kHostile) {
    const std::string line = LogLine("json", value);
    EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
    const auto json = nlohmann::json::parse(line, nullptr, false);
    ASSERT_TRUE(json.is_object()) << line;
    EXPECT_EQ(json.at("event"), "test");
    EXPECT_EQ(json.at("level"), "info");
    EXPECT_TRUE(json.contains("time"));
  }
  EXPECT_EQ(nlohmann::json::parse(LogLine("json", "a\nb\"c\\ \xc3\xa9")).at("value"),
            "a\nb\"c\\ \xc3\xa9");
}

TEST(Log, TextLinesCannotBeForged) {
  for (const std::string& value : kHostile) {
    const std::string line = LogLine("text", value);
    EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
    EXPECT_EQ(line.find_first_of(std::string("\x1b\x07\x7f\0", 4)), line.npos);
    EXPECT_THAT(line, Not(HasSubstr("\xc2\x9b")));
    EXPECT_THAT(line, Not(HasSubstr("\xe2\x80\xa8")));
    // What is quoted is one value, whatever it says.
    const std::string unquoted = std::regex_replace(line, std::regex(R"("([^"\\]|\\.)*")"), "");
    EXPECT_THAT(unquoted, Not(HasSubstr("event=forged")));
  }
  EXPECT_THAT(LogLine("text", "plain-value"), HasSubstr(" event=test value=plain-value\n"));
}

TEST(Log, LongValuesAreCut) { EXPECT_LT(LogLine("json", std::string(1 << 20, 'x')).size(), 4096u); }

TEST(Log, NumbersAndBooleansAreNotQuoted) {
  std::ostringstream out;
  Log log("info", "json", std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
  log.Event(LogLevel::kWarn, "e",
            {{"i", int64_t{-3}}, {"u", uint64_t{1} << 63}, {"d", 0.25}, {"b", true}});
  const auto json = nlohmann::json::parse(out.str());
  EXPECT_EQ(json.at("i"), -3);
  EXPECT_EQ(json.at("u"), uint64_t{1} << 63);
  EXPECT_EQ(json.at("d"), 0.25);
  EXPECT_EQ(json.at("b"), true);
}

TEST(Log, LevelsBelowTheConfiguredAreSilent) {
  std::ostringstream out;
  Log log("warn", "text", std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
  log.Event(LogLevel::kDebug, "no");
  log.Event(LogLevel::kInfo, "no");
  log.Event(LogLevel::kWarn, "yes");
  log.Event(LogLevel::kError, "yes");
  const std::string lines = out.str();
  EXPECT_THAT(lines, Not(HasSubstr("event=no")));
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 2);
}

// gRPC has a line for each message that it refuses. The second log is another server's: it has seen none of the first one's.
TEST(Log, AFloodOfGrpcsLinesIsNotWritten) {
  for (int i = 0; i < 2; ++i) {
    std::ostringstream out;
    {
      Log log("info", "json", std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
      log.TakeOverLibraries();
      gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);  // as grpc_init does in a server
      for (int line = 0; line < 20'000; ++line) gpr_log(GPR_ERROR, "message %d is refused", line);
    }
    const std::string lines = out.str();
    EXPECT_THAT(lines, HasSubstr("message 0 is refused"));
    EXPECT_LT(std::count(lines.begin(), lines.end(), '\n'), 200);
  }
}

TEST(Log, WhatLibrariesSayIsEscapedToo) {
  std::ostringstream out;
  {
    Log log("info", "json", std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
    log.TakeOverLibraries();
    spdlog::warn("from a library\nwith two lines");
  }
  const auto json = nlohmann::json::parse(out.str());
  EXPECT_EQ(json.at("text"), "from a library\nwith two lines");
  EXPECT_EQ(json.at("level"), "warn");
}

}  // namespace
}  // namespace winnow::server
