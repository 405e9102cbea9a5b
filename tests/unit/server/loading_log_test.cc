#include "server/loading_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <fstream>
#include <sstream>

#include "nlohmann/json.hpp"
#include "tests/unit/test_paths.h"

namespace winnow::server {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

class ManualClock final : public engine::Clock {
 public:
  engine::TimePoint Now() const override { return now; }
  engine::TimePoint now;
};

std::string Needle() { return SourcePath("models/needle-5m"); }

// The lines of LogModel for needle-5m, with a change to the configuration and to the tokenizer.
std::string ModelLines(const std::vector<std::string>& unknown_keys, bool without_a_byte) {
  auto config = engine::LoadModelConfig(Needle());
  EXPECT_TRUE(config.ok()) << config.status();
  config->unknown_keys = unknown_keys;
  const auto weights = engine::LoadWeights(Needle(), *config);
  EXPECT_TRUE(weights.ok()) << weights.status();
  std::ifstream file(Needle() + "/tokenizer.json");
  json text = json::parse(file);
  if (without_a_byte) {
    text["model"]["vocab"].erase("\xC3\x80");  // stands for the byte C0 and is in no other token
    text["model"]["vocab"].erase("~");
    json kept = json::array();
    for (const json& merge : text["model"]["merges"]) {
      if (merge.dump().find('~') == std::string::npos) kept.push_back(merge);
    }
    text["model"]["merges"] = kept;
  }
  const auto tokenizer = engine::Tokenizer::Parse(text.dump(), "t");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  std::ostringstream out;
  Log log("info", "text", std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
  LogModel(log, *config, *weights, **tokenizer);
  return out.str();
}

TEST(LoadingLog, OneLineSaysWhatModelThisIs) {
  const std::string lines = ModelLines({}, false);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1) << lines;
  EXPECT_THAT(lines, AllOf(HasSubstr("event=model"), HasSubstr("family=LlamaForCausalLM"),
                           HasSubstr("parameters=5475584"), HasSubstr("context=32768"),
                           HasSubstr("bytes=10951168"), HasSubstr("dtype=BF16")));
}

TEST(LoadingLog, UnknownKeysAndMissingBytesAreNamed) {
  const std::string lines = ModelLines({"a_new_switch", "zoom_factor"}, true);
  EXPECT_THAT(lines, AllOf(HasSubstr("unknown_config_keys"), HasSubstr("a_new_switch, zoom_factor"),
                           HasSubstr("vocabulary_lacks_bytes bytes=1")));
}

TEST(LoadingLog, ProgressComesEveryFewSecondsAndOftenerOnATerminal) {
  for (const bool terminal : {false, true}) {
    SCOPED_TRACE(terminal);
    std::ostringstream out;
    Log log("info", "text", std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
    ManualClock clock;
    LoadingProgress progress(log, clock, terminal);
    for (size_t done = 0; done < 40; ++done) {
      progress.Update(done, 40);
      clock.now += std::chrono::milliseconds(500);
    }
    const std::string lines = out.str();
    EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), terminal ? 19 : 3) << lines;
    EXPECT_THAT(lines, HasSubstr("percent=75"));
    EXPECT_THAT(lines, Not(HasSubstr("percent=0 ")));
  }
}

}  // namespace
}  // namespace winnow::server
