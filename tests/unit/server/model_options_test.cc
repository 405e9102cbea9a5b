#include "server/model_options.h"

#include <gtest/gtest.h>

namespace winnow::server {
namespace {

TEST(ModelOptionsTest, AGpuTakesPromptsInLargerStepsWhereItsOwnMemoryHoldsThem) {
  ServeConfig config;
  config.device = "cpu";
  config.step_tokens = 300;
  EXPECT_EQ(PromptStepTokens(config), 300);
  config.device = "cuda";
  EXPECT_EQ(PromptStepTokens(config), 2048);
  EXPECT_EQ(ModelOptionsOf(config).max_batch_tokens, 2048);
  config.step_tokens = 4096;
  EXPECT_EQ(PromptStepTokens(config), 4096);
  config.step_tokens = 300;
  config.host_bytes = int64_t{1} << 30;
  EXPECT_EQ(PromptStepTokens(config), 300);
}

TEST(ModelOptionsTest, WhatIsSaidOfLargeStepsIsDone) {
  ServeConfig config;
  config.prompt_step_tokens = 777;
  for (const char* device : {"cpu", "cuda"}) {
    config.device = device;
    EXPECT_EQ(PromptStepTokens(config), 777) << device;
    EXPECT_EQ(ModelOptionsOf(config).max_batch_tokens, 777) << device;
  }
}

}  // namespace
}  // namespace winnow::server
