#include "server/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/status.h"
#include "tests/unit/server/needle_model.h"
#include "tests/unit/test_seed.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<std::string> Fields(const absl::Status& status) {
  std::vector<std::string> fields;
  if (status.ok()) return fields;
  const google::rpc::Status rpc = ToRpcStatus(status);
  for (const auto& any : rpc.details()) {
    google::rpc::BadRequest bad;
    if (!any.UnpackTo(&bad)) continue;
    for (const auto& violation : bad.field_violations()) fields.push_back(violation.field());
  }
  return fields;
}

class ValidateTest : public ::testing::Test {
 protected:
  ValidateTest() : validator_(NeedleLimits(), *Needle().tokenizer, Needle().chat_template) {
    text_.mutable_text()->set_text(std::string("Hello"));
  }

  absl::Status Check(const v1::GenerateRequest& message) const {
    return validator_.CheckGenerate(message).status();
  }

  // Both steps, as the service does them.
  absl::StatusOr<CheckedGenerate> Validate(const v1::GenerateRequest& message) const {
    absl::StatusOr<CheckedGenerate> checked = validator_.CheckGenerate(message);
    if (!checked.ok()) return checked;
    if (absl::Status status = validator_.TokenizePrompt(message, *checked); !status.ok()) {
      return status;
    }
    return checked;
  }

  const Validator validator_;
  v1::GenerateRequest text_;  // a request that passes
};

TEST_F(ValidateTest, PlainRequestGetsTheDefaults) {
  const auto checked = Validate(text_);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(checked->n, 1);
  EXPECT_TRUE(checked->seed_unset);
  const engine::Request& request = checked->request;
  EXPECT_FALSE(request.prompt.empty());
  EXPECT_EQ(request.sampling.temperature, 0);
  EXPECT_EQ(request.sampling.top_p, 1);
  EXPECT_EQ(request.stopping.max_tokens, 64);
  EXPECT_EQ(request.stopping.stop_token_ids, Needle().config.eos_token_ids);
  EXPECT_EQ(request.top_logprobs, -1);
  EXPECT_EQ(request.prompt_logprobs, -1);
  EXPECT_TRUE(request.skip_special_tokens);
}

TEST_F(ValidateTest, EveryOptionReachesTheEngine) {
  v1::SamplingOptions& sampling = *text_.mutable_sampling();
  sampling.set_temperature(0.5f);
  sampling.set_top_k(7);
  sampling.set_top_p(0.9f);
  sampling.set_min_p(0.1f);
  sampling.set_repetition_penalty(1.1f);
  sampling.set_presence_penalty(0.2f);
  sampling.set_frequency_penalty(-0.3f);
  (*sampling.mutable_logit_bias())[9] = 2;
  (*sampling.mutable_logit_bias())[4] = -100;
  sampling.set_seed(12345678901234567890u);
  v1::StoppingOptions& stopping = *text_.mutable_stopping();
  stopping.set_max_tokens(20);
  stopping.set_min_tokens(3);
  stopping.add_stop_strings(std::string("\n\n"));
  stopping.add_stop_token_ids(17);
  stopping.set_ignore_eos(true);
  stopping.set_include_stop(true);
  text_.set_n(4);
  text_.set_top_logprobs(0);
  text_.set_prompt_logprobs(20);
  text_.set_policy(std::string("dense"));
  text_.set_show_special_tokens(true);
  const auto checked = Validate(text_);
  ASSERT_TRUE(checked.ok()) << checked.status();
  const engine::Request& request = checked->request;
  EXPECT_EQ(checked->n, 4);
  EXPECT_FALSE(checked->seed_unset);
  EXPECT_EQ(request.sampling.temperature, 0.5f);
  EXPECT_EQ(request.sampling.top_k, 7);
  EXPECT_EQ(request.sampling.top_p, 0.9f);
  EXPECT_EQ(request.sampling.min_p, 0.1f);
  EXPECT_EQ(request.sampling.repetition_penalty, 1.1f);
  EXPECT_EQ(request.sampling.presence_penalty, 0.2f);
  EXPECT_EQ(request.sampling.frequency_penalty, -0.3f);
  EXPECT_EQ(request.sampling.logit_bias,
            (std::vector<std::pair<int32_t, float>>{{4, -100.0f}, {9, 2.0f}}));
  EXPECT_EQ(request.sampling.seed, 12345678901234567890u);
  EXPECT_EQ(request.stopping.max_tokens, 20);
  EXPECT_EQ(request.stopping.min_tokens, 3);
  EXPECT_EQ(request.stopping.stop_strings, std::vector<std::string>{"\n\n"});
  EXPECT_EQ(request.stopping.stop_token_ids, std::vector<int32_t>{17});
  EXPECT_TRUE(request.stopping.include_stop);
  EXPECT_EQ(request.top_logprobs, 0);
  EXPECT_EQ(request.prompt_logprobs, 20);
  EXPECT_FALSE(request.skip_special_tokens);
}

struct BadCase {
  const char* field;
  std::function<void(v1::GenerateRequest&)> spoil;
};

TEST_F(ValidateTest, EachBadFieldIsNamed) {
  using R = v1::GenerateRequest;
  const std::string bad_utf8 = "\xc3\x28";
  const std::vector<BadCase> cases = {
      {"prompt", [](R& r) { r.clear_text(); }},
      {"text.text", [](R& r) { r.mutable_text()->clear_text(); }},
      {"text.text", [](R& r) { r.mutable_text()->set_text(std::string(16385, 'a')); }},
      {"text.text", [&](R& r) { r.mutable_text()->set_text(bad_utf8); }},
      {"tokens.ids", [](R& r) { r.mutable_tokens(); }},
      {"tokens.ids",
       [](R& r) {
         for (int i = 0; i < kNeedleContext; ++i) r.mutable_tokens()->add_ids(5);
       }},
      {"tokens.ids[1]",
       [](R& r) {
         r.mutable_tokens()->add_ids(5);
         r.mutable_tokens()->add_ids(4096);
       }},
      {"tokens.ids[0]", [](R& r) { r.mutable_tokens()->add_ids(-1); }},
      {"chat.messages", [](R& r) { r.mutable_chat(); }},
      {"chat.messages",
       [](R& r) {
         for (int i = 0; i < 1025; ++i)
           r.mutable_chat()->add_messages()->set_role(std::string("user"));
       }},
      {"chat.messages",
       [](R& r) {
         for (int i = 0; i < 2; ++i) {
           v1::ChatMessage& message = *r.mutable_chat()->add_messages();
           message.set_role(std::string("user"));
           message.set_content(std::string(8193, 'a'));
         }
       }},
      {"chat.messages[0].role",
       [](R& r) { r.mutable_chat()->add_messages()->set_content(std::string("x")); }},
      {"chat.messages[0].role",
       [](R& r) { r.mutable_chat()->add_messages()->set_role(std::string("<|user|>")); }},
      {"chat.messages[0].content",
       [&](R& r) {
         v1::ChatMessage& message = *r.mutable_chat()->add_messages();
         message.set_role(std::string("user"));
         message.set_content(bad_utf8);
       }},
      {"sampling.temperature", [](R& r) { r.mutable_sampling()->set_temperature(-0.1f); }},
      {"sampling.temperature", [](R& r) { r.mutable_sampling()->set_temperature(100.5f); }},
      {"sampling.temperature", [](R& r) { r.mutable_sampling()->set_temperature(kNan); }},
      {"sampling.temperature", [](R& r) { r.mutable_sampling()->set_temperature(kInfinity); }},
      {"sampling.top_k", [](R& r) { r.mutable_sampling()->set_top_k(-1); }},
      {"sampling.top_k", [](R& r) { r.mutable_sampling()->set_top_k(1000001); }},
      {"sampling.top_p", [](R& r) { r.mutable_sampling()->set_top_p(0); }},
      {"sampling.top_p", [](R& r) { r.mutable_sampling()->set_top_p(1.01f); }},
      {"sampling.top_p", [](R& r) { r.mutable_sampling()->set_top_p(kNan); }},
      {"sampling.min_p", [](R& r) { r.mutable_sampling()->set_min_p(-0.01f); }},
      {"sampling.min_p", [](R& r) { r.mutable_sampling()->set_min_p(kNan); }},
      {"sampling.repetition_penalty",
       [](R& r) { r.mutable_sampling()->set_repetition_penalty(0); }},
      {"sampling.repetition_penalty",
       [](R& r) { r.mutable_sampling()->set_repetition_penalty(kNan); }},
      {"sampling.presence_penalty",
       [](R& r) { r.mutable_sampling()->set_presence_penalty(-kInfinity); }},
      {"sampling.frequency_penalty",
       [](R& r) { r.mutable_sampling()->set_frequency_penalty(101); }},
      {"sampling.logit_bias[4096]",
       [](R& r) { (*r.mutable_sampling()->mutable_logit_bias())[4096] = 1; }},
      {"sampling.logit_bias[-3]",
       [](R& r) { (*r.mutable_sampling()->mutable_logit_bias())[-3] = 1; }},
      {"sampling.logit_bias[3]",
       [](R& r) { (*r.mutable_sampling()->mutable_logit_bias())[3] = kNan; }},
      {"sampling.logit_bias",
       [](R& r) {
         for (int i = 0; i < 1025; ++i) (*r.mutable_sampling()->mutable_logit_bias())[i] = 1;
       }},
      {"stopping.max_tokens", [](R& r) { r.mutable_stopping()->set_max_tokens(0); }},
      {"stopping.max_tokens", [](R& r) { r.mutable_stopping()->set_max_tokens(-5); }},
      {"stopping.max_tokens", [](R& r) { r.mutable_stopping()->set_max_tokens(kNeedleContext); }},
      {"stopping.max_tokens",
       [](R& r) { r.mutable_stopping()->set_max_tokens(std::numeric_limits<int32_t>::max()); }},
      {"stopping.min_tokens", [](R& r) { r.mutable_stopping()->set_min_tokens(-1); }},
      {"stopping.min_tokens",
       [](R& r) {
         r.mutable_stopping()->set_max_tokens(5);
         r.mutable_stopping()->set_min_tokens(6);
       }},
      {"stopping.stop_strings",
       [](R& r) {
         for (int i = 0; i < 17; ++i) r.mutable_stopping()->add_stop_strings(std::string("x"));
       }},
      {"stopping.stop_strings[0]",
       [](R& r) { r.mutable_stopping()->add_stop_strings(std::string("")); }},
      {"stopping.stop_strings[1]",
       [](R& r) {
         r.mutable_stopping()->add_stop_strings(std::string("fine"));
         r.mutable_stopping()->add_stop_strings(std::string(257, 'x'));
       }},
      {"stopping.stop_strings[0]", [&](R& r) { r.mutable_stopping()->add_stop_strings(bad_utf8); }},
      {"stopping.stop_token_ids",
       [](R& r) {
         for (int i = 0; i < 65; ++i) r.mutable_stopping()->add_stop_token_ids(1);
       }},
      {"stopping.stop_token_ids[0]", [](R& r) { r.mutable_stopping()->add_stop_token_ids(4096); }},
      {"n", [](R& r) { r.set_n(0); }},
      {"n", [](R& r) { r.set_n(17); }},
      {"n", [](R& r) { r.set_n(std::numeric_limits<int32_t>::min()); }},
      {"top_logprobs", [](R& r) { r.set_top_logprobs(-1); }},
      {"top_logprobs", [](R& r) { r.set_top_logprobs(21); }},
      {"prompt_logprobs", [](R& r) { r.set_prompt_logprobs(-1); }},
      {"prompt_logprobs", [](R& r) { r.set_prompt_logprobs(21); }},
      {"policy", [](R& r) { r.set_policy(std::string("nonsense")); }},
      {"policy", [](R& r) { r.set_policy(std::string("quest:pages=3")); }},
      // These parse, and the model cannot honour them.
      {"policy", [](R& r) { r.set_policy(std::string("lsh:bits=64")); }},
      {"policy", [](R& r) { r.set_policy(std::string("quest:p=0.9")); }},
      {"policy", [](R& r) { r.set_policy(std::string(257, 'd')); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::GenerateRequest message = text_;
    cases[i].spoil(message);
    const absl::Status status = Check(message);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << i << " " << cases[i].field;
    EXPECT_THAT(Fields(status), ::testing::ElementsAre(cases[i].field)) << i;
  }
}

TEST_F(ValidateTest, PoliciesThatTheModelCanHonourReachTheEngine) {
  for (const char* text : {"dense", "window:window=64", "oracle:k=32", "quest:k=64,suffix=3",
                           "lsh:k=5%,from=0,floor=0.5"}) {
    text_.set_policy(std::string(text));
    const auto checked = Validate(text_);
    ASSERT_TRUE(checked.ok()) << text << ": " << checked.status();
    EXPECT_EQ(checked->request.policy, *engine::ParseAttentionPolicy(text)) << text;
  }
}

TEST_F(ValidateTest, ImpossiblePolicyNamesTheOption) {
  for (const auto& [text, option] : {std::pair{"quest:p=0.9", "p: "},
                                     {"lsh:bits=64", "lsh:64"},
                                     {"spotlight:k=2%", "spotlight"},
                                     {"window:completion=on", "completion"}}) {
    text_.set_policy(std::string(text));
    const google::rpc::Status rpc = ToRpcStatus(Check(text_));
    google::rpc::BadRequest bad;
    bool named = false;
    for (const auto& any : rpc.details()) {
      if (!any.UnpackTo(&bad)) continue;
      ASSERT_EQ(bad.field_violations_size(), 1);
      EXPECT_EQ(bad.field_violations(0).field(), "policy");
      EXPECT_THAT(bad.field_violations(0).description(), HasSubstr(option)) << text;
      named = true;
    }
    EXPECT_TRUE(named) << text;
  }
}

// The request's word and the server's together; "" where the request says nothing.
TEST_F(ValidateTest, ExactnessOfTheRequestOrTheServer) {
  struct Case {
    const char *server_policy, *server_exactness, *policy, *exactness;
    const char *applied, *bad_field;  // one of them
  };
  for (const Case& c : {
           Case{"dense", "", "", "", "dense", ""},
           {"lsh:k=5%", "", "", "", "lsh:k=5%", ""},
           {"lsh:k=5%", "", "", "exact", "lsh:k=5%,verify=auto", ""},
           {"lsh:k=5%", "exact", "", "", "lsh:k=5%,verify=auto", ""},
           {"lsh:k=5%", "exact", "", "fast", "lsh:k=5%", ""},
           {"lsh:k=5%", "exact", "", "floor:0.9", "lsh:k=5%,floor=0.9", ""},
           {"lsh:k=5%", "exact", "quest:k=64", "", "quest:k=64,verify=auto", ""},
           {"lsh:k=5%", "exact", "quest:k=64", "fast", "quest:k=64", ""},
           {"lsh:k=5%", "exact", "dense", "", "dense", ""},
           {"dense", "", "quest:k=64", "exact", "quest:k=64,verify=auto", ""},
           {"dense", "", "quest:k=64", "floor:0.5", "quest:k=64,floor=0.5", ""},
           {"dense", "exact", "dense", "fast", "dense", ""},
           // The server's own options yield to the request's word.
           {"lsh:k=5%,floor=0.5,suffix=4", "", "", "exact", "lsh:k=5%,verify=auto", ""},
           {"lsh:k=5%,verify=8", "", "", "fast", "lsh:k=5%", ""},
           {"lsh:k=5%,floor=0.5", "floor:0.5", "", "floor:0.9", "lsh:k=5%,floor=0.9", ""},
           // The request's options do not, neither to its own word nor to the server's.
           {"dense", "", "lsh:k=5%,floor=0.5", "exact", "", "exactness"},
           {"dense", "", "lsh:k=5%,verify=8", "fast", "", "exactness"},
           {"dense", "", "lsh:k=5%,verify=8", "floor:0.9", "", "exactness"},
           {"dense", "exact", "lsh:k=5%,floor=0.5", "", "", "policy"},
           {"dense", "fast", "lsh:k=5%,verify=8", "", "", "policy"},
           {"dense", "fast", "lsh:k=5%,verify=8", "exact", "lsh:k=5%,verify=8", ""},
           {"dense", "", "", "roughly", "", "exactness"},
           {"dense", "", "", "floor:2", "", "exactness"},
           {"dense", "", "lsh:bits=64", "exact", "", "policy"},
       }) {
    SCOPED_TRACE(std::string(c.server_policy) + " " + c.server_exactness + " | " + c.policy + " " +
                 c.exactness);
    RequestLimits limits = NeedleLimits();
    limits.default_policy = *engine::ParseAttentionPolicy(c.server_policy);
    if (*c.server_exactness != 0) {
      limits.default_exactness = *engine::ParseExactness(c.server_exactness);
    }
    const Validator validator(limits, *Needle().tokenizer, Needle().chat_template);
    text_.set_policy(std::string(c.policy));
    text_.set_exactness(std::string(c.exactness));
    const auto checked = validator.CheckGenerate(text_);
    if (*c.bad_field != 0) {
      EXPECT_THAT(Fields(checked.status()), ::testing::ElementsAre(c.bad_field));
      continue;
    }
    ASSERT_TRUE(checked.ok()) << checked.status();
    EXPECT_EQ(engine::ToString(checked->request.policy), c.applied);
  }
}

TEST_F(ValidateTest, CacheOptions) {
  EXPECT_TRUE(Validate(text_)->request.cache.use);
  EXPECT_TRUE(Validate(text_)->request.cache.store);
  EXPECT_EQ(Validate(text_)->request.cache.priority, engine::kPriorityNormal);
  EXPECT_EQ(Validate(text_)->request.cache.ttl, engine::Duration::zero());
  v1::CacheOptions& cache = *text_.mutable_cache();
  cache.set_use(false);
  cache.set_priority(6);
  cache.set_ttl_seconds(31536000);
  cache.set_salt(std::string(1024, 's'));
  const auto checked = Validate(text_);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_FALSE(checked->request.cache.use);
  EXPECT_EQ(checked->request.cache.priority, 6);
  EXPECT_EQ(checked->request.cache.ttl, std::chrono::hours(24 * 365));
  EXPECT_EQ(checked->request.cache.salt.size(), 1024u);
  using ::testing::ElementsAre;
  for (const int priority : {-1, 7, 256 + 3}) {
    cache.set_priority(priority);
    EXPECT_THAT(Fields(Check(text_)), ElementsAre("cache.priority")) << priority;
  }
  cache.set_priority(0);
  for (const int64_t seconds : {int64_t{-1}, int64_t{31536001}, int64_t{1} << 62}) {
    cache.set_ttl_seconds(seconds);
    EXPECT_THAT(Fields(Check(text_)), ElementsAre("cache.ttl_seconds")) << seconds;
  }
  cache.set_ttl_seconds(0);
  cache.set_salt(std::string(1025, 's'));
  EXPECT_THAT(Fields(Check(text_)), ElementsAre("cache.salt"));
  cache.clear_salt();
  cache.set_store(false);
  EXPECT_THAT(Fields(Check(text_)), ElementsAre("cache.store")) << "and a priority";
  cache.clear_priority();
  EXPECT_FALSE(Validate(text_)->request.cache.store);
  cache.set_ttl_seconds(1);
  EXPECT_THAT(Fields(Check(text_)), ElementsAre("cache.store")) << "and a time";
}

// The exactness asks of the policy what the model cannot do.
TEST_F(ValidateTest, AnExactnessThatTheModelCannotHonourIsRefused) {
  RequestLimits limits = NeedleLimits();
  limits.check_policy = [](const engine::AttentionPolicy& policy) {
    return policy.floor.has_value() ? absl::InvalidArgumentError("no probes here")
                                    : absl::OkStatus();
  };
  const Validator validator(limits, *Needle().tokenizer, Needle().chat_template);
  text_.set_policy(std::string("lsh:k=5%"));
  EXPECT_TRUE(validator.CheckGenerate(text_).ok());
  text_.set_exactness(std::string("floor:0.9"));
  const absl::Status status = validator.CheckGenerate(text_).status();
  EXPECT_THAT(Fields(status), ::testing::ElementsAre("exactness"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("no probes here"));
}

TEST_F(ValidateTest, BoundsThemselvesAreAllowed) {
  v1::SamplingOptions& sampling = *text_.mutable_sampling();
  sampling.set_temperature(100);
  sampling.set_top_k(1000000);
  sampling.set_top_p(1);
  sampling.set_min_p(1);
  sampling.set_repetition_penalty(100);
  sampling.set_presence_penalty(-100);
  sampling.set_frequency_penalty(100);
  for (int i = 0; i < 1024; ++i) (*sampling.mutable_logit_bias())[i] = -100;
  for (int i = 0; i < 16; ++i) {
    text_.mutable_stopping()->add_stop_strings(std::string(256, 'x'));
  }
  for (int i = 0; i < 64; ++i) text_.mutable_stopping()->add_stop_token_ids(4095);
  text_.set_n(16);
  text_.set_top_logprobs(20);
  EXPECT_TRUE(Check(text_).ok()) << Check(text_);
}

TEST_F(ValidateTest, AllBadFieldsAreNamedAtOnce) {
  text_.set_n(99);
  text_.set_policy(std::string("x"));
  text_.mutable_sampling()->set_top_p(2);
  EXPECT_EQ(Fields(Check(text_)).size(), 3u);
}

TEST_F(ValidateTest, PromptLongerThanTheContextIsRefused) {
  std::string words;
  while (words.size() < 16000) words += "a b ";
  text_.mutable_text()->set_text(words);
  const auto checked = Validate(text_);
  EXPECT_EQ(checked.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Fields(checked.status()), Contains("text.text"));
  EXPECT_THAT(std::string(checked.status().message()), HasSubstr("1024"));
  EXPECT_EQ(ReasonOf(checked.status()), "CONTEXT_LENGTH_EXCEEDED");
  // By its bytes, and by its tokens where the client counted them.
  text_.mutable_text()->set_text(std::string(20000, 'a'));
  EXPECT_EQ(ReasonOf(Check(text_)), "CONTEXT_LENGTH_EXCEEDED");
  v1::GenerateRequest chat;
  chat.mutable_chat()->add_messages()->set_role("user");
  chat.mutable_chat()->mutable_messages(0)->set_content(std::string(20000, 'a'));
  EXPECT_EQ(ReasonOf(Check(chat)), "CONTEXT_LENGTH_EXCEEDED");
  v1::GenerateRequest ids;
  for (int i = 0; i < kNeedleContext; ++i) ids.mutable_tokens()->add_ids(100);
  EXPECT_EQ(ReasonOf(Check(ids)), "CONTEXT_LENGTH_EXCEEDED");
  // Any other violation keeps the general reason.
  text_.mutable_text()->set_text("");
  EXPECT_EQ(ReasonOf(Check(text_)), "INVALID_FIELD");
}

TEST_F(ValidateTest, MaxTokensYieldWhereTheTransportSaysSo) {
  v1::GenerateRequest message;
  for (int i = 0; i < kNeedleContext - 10; ++i) message.mutable_tokens()->add_ids(100);
  const auto room = [&](int32_t max_tokens, int32_t min_tokens) {
    message.mutable_stopping()->set_max_tokens(max_tokens);
    message.mutable_stopping()->set_min_tokens(min_tokens);
    absl::StatusOr<CheckedGenerate> checked =
        validator_.CheckGenerate(message, /*max_tokens_yields=*/true);
    if (!checked.ok()) return -1;
    if (!validator_.TokenizePrompt(message, *checked).ok()) return -2;
    return checked->request.stopping.max_tokens;
  };
  EXPECT_EQ(room(3, 0), 3);
  EXPECT_EQ(room(10, 0), 10);
  for (const int32_t more : {11, kNeedleContext, std::numeric_limits<int32_t>::max()}) {
    EXPECT_EQ(room(more, 10), 10) << more;
    EXPECT_EQ(room(more, 11), -2) << more;
    EXPECT_FALSE(Validate(message).ok()) << more;
  }
  EXPECT_EQ(room(0, 0), -1);
}

TEST_F(ValidateTest, PromptThatFillsTheContextIsRefused) {
  std::string words = "a";
  size_t tokens = 0;
  while (tokens < static_cast<size_t>(kNeedleContext)) {
    words += " a";
    tokens = Needle().tokenizer->Encode(words, true, false)->size();
  }
  ASSERT_EQ(tokens, static_cast<size_t>(kNeedleContext));
  text_.mutable_text()->set_text(words);
  EXPECT_THAT(Fields(Validate(text_).status()), Contains("text.text"));
  text_.mutable_text()->set_text(words.substr(2));
  EXPECT_TRUE(Validate(text_).ok()) << Validate(text_).status();
}

TEST_F(ValidateTest, PromptMayLeaveRoomForOneToken) {
  v1::GenerateRequest message;
  for (int i = 0; i < kNeedleContext - 1; ++i) message.mutable_tokens()->add_ids(100);
  const auto checked = Validate(message);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(checked->request.stopping.max_tokens, 1);  // the default gives way
  message.mutable_stopping()->set_max_tokens(2);       // what the client says does not
  EXPECT_THAT(Fields(Validate(message).status()), Contains("stopping.max_tokens"));
}

TEST_F(ValidateTest, MinTokensThatTheContextCannotHoldIsRefused) {
  v1::GenerateRequest message;
  for (int i = 0; i < kNeedleContext - 10; ++i) message.mutable_tokens()->add_ids(100);
  message.mutable_stopping()->set_min_tokens(11);
  EXPECT_THAT(Fields(Validate(message).status()), Contains("stopping.min_tokens"));
}

TEST_F(ValidateTest, MinTokensRaisesTheDefaultOfMaxTokens) {
  text_.mutable_stopping()->set_min_tokens(100);
  const auto checked = Validate(text_);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(checked->request.stopping.max_tokens, 100);
}

TEST_F(ValidateTest, ControlTokensInTextStayText) {
  const engine::Tokenizer& tokenizer = *Needle().tokenizer;
  for (const char* control : {"<|end|>", "<|begin_of_text|>", "<|user|>", "<|end_of_text|>"}) {
    if (!tokenizer.TokenToId(control).has_value()) continue;
    text_.mutable_text()->set_text(std::string("a ") + control + " b");
    text_.mutable_text()->set_add_special_tokens(false);
    v1::GenerateRequest chat;
    v1::ChatMessage& message = *chat.mutable_chat()->add_messages();
    message.set_role(std::string("user"));
    message.set_content(text_.text().text());
    const auto as_text = Validate(text_);
    ASSERT_TRUE(as_text.ok()) << as_text.status();
    for (const int32_t id : as_text->request.prompt) EXPECT_FALSE(tokenizer.IsSpecial(id));

    chat.mutable_chat()->mutable_messages(0)->set_content(std::string("a b"));
    const auto plain = Validate(chat);
    chat.mutable_chat()->mutable_messages(0)->set_content(std::string("a ") + control + " b");
    const auto hostile = Validate(chat);
    ASSERT_TRUE(plain.ok() && hostile.ok());
    const auto specials = [&](const std::vector<int32_t>& ids) {
      std::vector<int32_t> found;
      for (const int32_t id : ids) {
        if (tokenizer.IsSpecial(id)) found.push_back(id);
      }
      return found;
    };
    EXPECT_EQ(specials(plain->request.prompt), specials(hostile->request.prompt)) << control;
  }
}

TEST_F(ValidateTest, TokenizeAndDetokenizeHaveTheSameBounds) {
  v1::TokenizeRequest tokenize;
  EXPECT_THAT(Fields(validator_.CheckTokenize(tokenize)), Contains("prompt"));
  tokenize.mutable_text()->set_text(std::string(16385, 'a'));
  EXPECT_THAT(Fields(validator_.CheckTokenize(tokenize)), Contains("text.text"));
  tokenize.mutable_text()->set_text(std::string("fine"));
  EXPECT_TRUE(validator_.CheckTokenize(tokenize).ok());

  v1::DetokenizeRequest detokenize;
  EXPECT_TRUE(validator_.CheckDetokenize(detokenize).ok());
  detokenize.add_ids(4096);
  EXPECT_THAT(Fields(validator_.CheckDetokenize(detokenize)), Contains("ids[0]"));
  detokenize.clear_ids();
  for (int i = 0; i <= 4 * kNeedleContext; ++i) detokenize.add_ids(1);
  EXPECT_THAT(Fields(validator_.CheckDetokenize(detokenize)), Contains("ids"));
}

TEST_F(ValidateTest, TenantIsShortAndPlain) {
  for (const char* good : {"a", "team-7", "A.b_C-0"}) {
    EXPECT_TRUE(Validator::CheckTenant(good).ok()) << good;
  }
  EXPECT_TRUE(Validator::CheckTenant(std::string(64, 'x')).ok());
  for (const std::string& bad :
       {std::string(), std::string(65, 'x'), std::string("a b"), std::string("../x"),
        std::string("a\nb"), std::string("\xc3\xa9"), std::string("a\0b", 3)}) {
    EXPECT_EQ(ReasonOf(Validator::CheckTenant(bad)), "INVALID_METADATA") << bad;
  }
}

TEST_F(ValidateTest, ChoicesHaveSeedsOfTheirOwn) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    EXPECT_EQ(SeedOfChoice(seed, 0), seed);
    for (int32_t choice = 0; choice < 16; ++choice) seeds.insert(SeedOfChoice(seed, choice));
  }
  EXPECT_EQ(seeds.size(), 1600u);
}

// Whatever numbers a request has: it is refused, or everything in the engine's request is in range.
TEST_F(ValidateTest, RandomRequestsAreRefusedOrInRange) {
  TestRandom random;
  const auto number = [&]() -> float {
    switch (random() % 6) {
      case 0:
        return kNan;
      case 1:
        return random() % 2 ? kInfinity : -kInfinity;
      case 2:
        return -1.0f * (random() % 200);
      default:
        return static_cast<float>(random() % 1000) / 500;
    }
  };
  const auto integer = [&]() -> int32_t {
    switch (random() % 4) {
      case 0:
        return static_cast<int32_t>(random());
      case 1:
        return -static_cast<int32_t>(random() % 5);
      default:
        return static_cast<int32_t>(random() % 30);
    }
  };
  const auto maybe = [&] { return random() % 3 == 0; };
  int passed = 0;
  for (int i = 0; i < 20000; ++i) {
    v1::GenerateRequest message = text_;
    v1::SamplingOptions& sampling = *message.mutable_sampling();
    v1::StoppingOptions& stopping = *message.mutable_stopping();
    if (maybe()) sampling.set_temperature(number());
    if (maybe()) sampling.set_top_k(integer());
    if (maybe()) sampling.set_top_p(number());
    if (maybe()) sampling.set_min_p(number());
    if (maybe()) sampling.set_repetition_penalty(number());
    if (maybe()) sampling.set_presence_penalty(number());
    if (maybe()) sampling.set_frequency_penalty(number());
    if (maybe()) (*sampling.mutable_logit_bias())[integer()] = number();
    if (maybe()) stopping.set_max_tokens(integer());
    if (maybe()) stopping.set_min_tokens(integer());
    if (maybe()) stopping.add_stop_token_ids(integer());
    if (maybe()) message.set_n(integer());
    if (maybe()) message.set_top_logprobs(integer());
    const auto checked = Validate(message);
    if (!checked.ok()) {
      EXPECT_EQ(checked.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_FALSE(Fields(checked.status()).empty());
      continue;
    }
    ++passed;
    const engine::SamplingOptions& out = checked->request.sampling;
    EXPECT_TRUE(out.temperature >= 0 && out.temperature <= 100);
    EXPECT_TRUE(out.top_k >= 0);
    EXPECT_TRUE(out.top_p > 0 && out.top_p <= 1);
    EXPECT_TRUE(out.min_p >= 0 && out.min_p <= 1);
    EXPECT_TRUE(out.repetition_penalty > 0 && std::isfinite(out.repetition_penalty));
    EXPECT_TRUE(std::isfinite(out.presence_penalty) && std::isfinite(out.frequency_penalty));
    for (const auto& [id, bias] : out.logit_bias) {
      EXPECT_TRUE(id >= 0 && id < 4096 && std::isfinite(bias));
    }
    const engine::StoppingOptions& stop = checked->request.stopping;
    EXPECT_TRUE(stop.max_tokens >= 1);
    EXPECT_TRUE(stop.min_tokens >= 0 && stop.min_tokens <= stop.max_tokens);
    EXPECT_LE(checked->request.prompt.size() + stop.max_tokens, size_t{kNeedleContext});
    EXPECT_TRUE(checked->n >= 1 && checked->n <= 16);
    EXPECT_TRUE(checked->request.top_logprobs >= -1 && checked->request.top_logprobs <= 20);
  }
  EXPECT_GT(passed, 200);
}

}  // namespace
}  // namespace winnow::server
