#include "bench/eval.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/eval_tasks.h"
#include "engine/model/synthetic_weights.h"
#include "engine/model_loader.h"
#include "engine/sequence_kv.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/engine/sequence_runner.h"
#include "tests/unit/test_paths.h"

namespace winnow::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// ---- task files ----

TEST(EvalTasks, LinesBecomeTasksAndEmptyLinesAreSkipped) {
  const auto tasks = ParseEvalTasks(
      R"({"id":"a-1","task":"a","target_tokens":2048,"intro":"I\n","document":"D","questions":[)"
      R"({"question":"Q?","answer":"A.","must_contain":["x","y"]},{"question":"R?","answer":"B."}]})"
      "\n \r\n"
      R"({"id":"b-1","task":"b","target_tokens":8,"intro":"","document":"","questions":[{"question":"","answer":"A","must_contain":[]}]})",
      "file");
  ASSERT_TRUE(tasks.ok()) << tasks.status();
  ASSERT_THAT(*tasks, SizeIs(2));
  const EvalTask& first = (*tasks)[0];
  EXPECT_EQ(first.id, "a-1");
  EXPECT_EQ(first.target_tokens, 2048);
  EXPECT_EQ(first.intro, "I\n");
  ASSERT_THAT(first.questions, SizeIs(2));
  EXPECT_THAT(first.questions[0].must_contain, ElementsAre("x", "y"));
  EXPECT_TRUE(first.questions[1].must_contain.empty());
  EXPECT_EQ((*tasks)[1].task, "b");
}

TEST(EvalTasks, ErrorsNameFileLineAndKey) {
  const auto expect_error = [](const std::string& text, const std::string& message_part) {
    const absl::Status status = ParseEvalTasks(text, "file.jsonl").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message_part)) << text;
  };
  const std::string head = R"({"id":"a","task":"t","target_tokens":1,"intro":"","document":"")";
  expect_error("", "file.jsonl: no task");
  expect_error("\n\n{", "file.jsonl:3");
  expect_error("[]", "file.jsonl:1");
  expect_error("{}", "file.jsonl:1: \"id\" must be a string");
  expect_error(head + "}", "file.jsonl:1: \"questions\" must be an array that is not empty");
  expect_error(head + R"(,"questions":[]})", "\"questions\" must be an array that is not empty");
  expect_error(head + R"(,"questions":[3]})", "file.jsonl:1: questions[0]: must be an object");
  expect_error(head + R"(,"questions":[{"question":"q","answer":""}]})",
               "questions[0]: \"answer\" must not be empty");
  expect_error(head + R"(,"questions":[{"question":"q","answer":"a","must_contain":"x"}]})",
               "\"must_contain\" must be an array");
  expect_error(head + R"(,"questions":[{"question":"q","answer":"a","must_contain":[""]}]})",
               "\"must_contain\" must hold strings");
  expect_error(
      R"({"id":"a","task":"t","target_tokens":-1,"intro":"","document":"","questions":[]})",
      "\"target_tokens\" must be a count");
}

// ---- one sequence ----

class SequenceKvTest : public ::testing::Test {
 protected:
  SequenceKvTest() {
    config_.hidden_size = 64;
    config_.intermediate_size = 96;
    config_.layers.resize(2);
    config_.num_heads = 2;
    config_.num_kv_heads = 1;
    config_.head_dim = 64;
    config_.vocab_size = 99;
    config_.max_position_embeddings = 256;
    config_.rms_norm_eps = 1e-5f;
    config_.ropes[0].theta = 10000;
    config_.dtype = kernels::DType::kF32;
    weights_ = *MakeSyntheticWeights(config_, 3);
    backend_ = kernels::MakeCpuBackend("auto", 2);
  }
  std::unique_ptr<engine::Decoder> MakeDecoder(int32_t max_batch_tokens, int32_t max_batch_logits) {
    return *engine::Decoder::Create(config_, weights_.weights, *backend_,
                                    {.compute = kernels::DType::kF32,
                                     .kv_dtype = kernels::DType::kF32,
                                     .block_tokens = 16,
                                     .kv_bytes = 1 << 20,
                                     .max_batch_tokens = max_batch_tokens,
                                     .max_batch_logits = max_batch_logits});
  }
  std::vector<int32_t> RandomTokens(size_t count) {
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random_() % 99);
    return tokens;
  }
  // Rows in the order of their numbers, each exactly once.
  static std::vector<float> Logits(engine::SequenceKv& sequence, std::span<const int32_t> tokens,
                                   int32_t num_logits) {
    std::vector<float> all;
    int32_t next = 0;
    const absl::Status status = sequence.Run(tokens, num_logits, engine::testing::kDense, 0,
                                             [&](int32_t row, std::span<const float> logits) {
                                               EXPECT_EQ(row, next++);
                                               all.insert(all.end(), logits.begin(), logits.end());
                                             });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(next, num_logits);
    return all;
  }

  engine::ModelConfig config_;
  engine::SyntheticWeights weights_;
  std::unique_ptr<kernels::Backend> backend_;
  std::mt19937_64 random_{11};
};

TEST_F(SequenceKvTest, WhatIsReusedIsBitForBitWhatWouldBeComputed) {
  const auto shared_decoder = MakeDecoder(16, 3);
  engine::SequenceKv shared(*shared_decoder);
  const uint64_t seed = engine::testing::TestSeed();
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(seed));
  random_.seed(seed);
  std::vector<std::vector<int32_t>> earlier = {RandomTokens(120)};
  for (int i = 0; i < 12; ++i) {
    // Begins as any of the earlier ones, then something else, longer or shorter.
    std::vector<int32_t> tokens = earlier[random_() % earlier.size()];
    const size_t kept = random_() % tokens.size();
    tokens.resize(kept);
    const std::vector<int32_t> rest = RandomTokens(1 + random_() % (200 - kept));
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    const int32_t num_logits =
        1 + static_cast<int32_t>(random_() % std::min<size_t>(tokens.size(), 40));
    const auto fresh_decoder = MakeDecoder(64, 64);
    engine::SequenceKv fresh(*fresh_decoder);
    EXPECT_EQ(Logits(shared, tokens, num_logits), Logits(fresh, tokens, num_logits));
    earlier.push_back(tokens);
  }
}

TEST_F(SequenceKvTest, CommonBeginningsAreComputedOnce) {
  const auto decoder = MakeDecoder(32, 32);
  engine::SequenceKv sequence(*decoder);
  std::vector<int32_t> tokens = RandomTokens(100);
  Logits(sequence, tokens, 5);
  EXPECT_EQ(sequence.computed_tokens(), 100);
  tokens.push_back(7);
  Logits(sequence, tokens, 1);
  EXPECT_EQ(sequence.computed_tokens(), 101);
  Logits(sequence, tokens, 10);  // rows whose logits are wanted are computed again
  EXPECT_EQ(sequence.computed_tokens(), 111);
  tokens[50] = (tokens[50] + 1) % 99;
  Logits(sequence, tokens, 1);
  EXPECT_EQ(sequence.computed_tokens(), 111 + 51);
}

// ---- the trained model ----

class EvaluatorTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    engine::ModelOptions options;
    options.max_batch_tokens = options.max_batch_logits = 128;
    options.max_context = 4096;
    options.retrieval.probe_interval = 1;
    auto loaded = engine::LoadModel(SourcePath("models/needle-5m"), options);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    model_ = std::move(*loaded).release();
  }
  static void TearDownTestSuite() {
    delete model_;
    model_ = nullptr;
  }

  static Evaluator MakeEvaluator(EvalOptions options) {
    return Evaluator(*model_->decoder, *model_->tokenizer, model_->chat_template,
                     model_->config.eos_token_ids, std::move(options));
  }

  static absl::StatusOr<std::vector<EvalCell>> Run(
      EvalOptions options, std::span<const EvalTask> tasks,
      std::span<const engine::AttentionPolicy> policies) {
    return MakeEvaluator(options).RunTasks(*SourceOf(tasks, {}), policies, nullptr);
  }

  // A document with two facts, and a question that the model cannot answer as expected.
  static EvalTask Task(const std::string& name, int32_t target_tokens) {
    EvalTask task;
    task.id = name + "-0";
    task.task = name;
    task.target_tokens = target_tokens;
    task.intro = "Read the document below and answer the questions that follow.\n";
    for (int i = 0; i < 12; ++i) {
      task.document += "The file system is mounted when the kernel starts. ";
      if (i == 3) task.document += "The secret code for river-stone is 7319942. ";
      if (i == 8) task.document += "The secret code for oak-lantern is 5520816. ";
    }
    task.questions = {
        {"What is the secret code for river-stone?",
         "The secret code for river-stone is 7319942.",
         {"7319942"}},
        {"What is the secret code for oak-lantern?",
         "The secret code for oak-lantern is 5520816.",
         {"5520816"}},
        {"What is the secret code for river-stone?",
         "Wombats, as everybody knows, dig.",
         {"7319942", "wombat"}},
    };
    return task;
  }

  static engine::LoadedModel* model_;
};
engine::LoadedModel* EvaluatorTest::model_ = nullptr;

TEST_F(EvaluatorTest, CellsEqualWhatStepByStepDecodingGives) {
  const EvalTask task = Task("facts", 512);
  const auto cells = Run({}, {&task, 1}, {&engine::testing::kDense, 1});
  ASSERT_TRUE(cells.ok()) << cells.status();
  ASSERT_THAT(*cells, SizeIs(1));

  // The same by hand: nothing shared, one token at a time.
  engine::Decoder& decoder = *model_->decoder;
  std::mt19937_64 random(1);
  const std::vector<int32_t> blocks = engine::testing::ShuffledBlocks(decoder, random);
  double exact = 0, right = 0, total = 0, contains = 0, prompt_tokens = 0;
  for (const EvalQuestion& question : task.questions) {
    const std::vector<int32_t> prompt =
        *model_->tokenizer->Encode("<|begin_of_text|><|user|>\n" + task.intro + task.document +
                                       "\n\n" + question.question + "<|end|>\n<|assistant|>\n",
                                   /*add_special_tokens=*/false, /*parse_special=*/true);
    const std::vector<int32_t> answer = *model_->tokenizer->Encode(question.answer, false, false);
    const int32_t length = static_cast<int32_t>(prompt.size());
    const std::vector<float> after_prompt =
        engine::testing::Run(decoder, prompt, 0, blocks, 1, 100);
    int32_t predicted = engine::testing::ArgMax(after_prompt);
    size_t agreed = 0;
    for (size_t i = 0; i < answer.size(); ++i) {
      agreed += predicted == answer[i] ? 1 : 0;
      predicted = engine::testing::ArgMax(engine::testing::Run(
          decoder, {&answer[i], 1}, length + static_cast<int32_t>(i), blocks, 1, 1));
    }
    right += static_cast<double>(agreed);
    total += static_cast<double>(answer.size());
    exact += agreed == answer.size() ? 1 : 0;
    prompt_tokens += length;
    std::vector<int32_t> free =
        engine::testing::Greedy(decoder, engine::testing::ArgMax(after_prompt), length, blocks,
                                answer.size() + kFreeRunExtraTokens);
    for (size_t i = 0; i < free.size(); ++i) {
      if (free[i] == 1 || free[i] == 2) free.resize(i);  // its end tokens
    }
    const std::string text = model_->tokenizer->Decode(free, true);
    double found = 0;
    for (const std::string& word : question.must_contain)
      found += text.find(word) != text.npos ? 1 : 0;
    contains += found / static_cast<double>(question.must_contain.size());
  }
  const EvalCell& cell = cells->front();
  EXPECT_EQ(cell.policy, "dense");
  EXPECT_EQ(cell.task, "facts");
  EXPECT_EQ(cell.length, 512);
  EXPECT_EQ(cell.n, 3);
  EXPECT_DOUBLE_EQ(cell.measures.exact.mean, exact / 3);
  EXPECT_DOUBLE_EQ(cell.measures.token_acc.mean, right / total);
  ASSERT_TRUE(cell.measures.contains.has_value());
  EXPECT_DOUBLE_EQ(cell.measures.contains->mean, contains / 3);
  EXPECT_FALSE(cell.measures.score.has_value());
  EXPECT_FALSE(cell.against_dense.has_value());  // it is the reference itself
  EXPECT_DOUBLE_EQ(cell.prompt_tokens, prompt_tokens / 3);
  EXPECT_EQ(cell.kept, 1);
  EXPECT_EQ(cell.coverage, 1);
  EXPECT_EQ(cell.iou, 1);
  // The test is about something: the facts are found, the nonsense is not said.
  EXPECT_GE(exact, 1);
  EXPECT_LT(exact, 3);
  EXPECT_GT(contains, 1);
  EXPECT_LT(contains, 3);
}

// The expected answer may be the beginning of what must be said.
TEST_F(EvaluatorTest, FreeAnswersGoOnAfterTheWholeExpectedAnswer) {
  EvalTask task = Task("facts", 512);
  task.questions.resize(1);
  task.questions[0].answer = "The secret code for";
  const auto cells = Run({}, {&task, 1}, {&engine::testing::kDense, 1});
  ASSERT_TRUE(cells.ok()) << cells.status();
  EXPECT_EQ(cells->front().measures.exact.mean, 1);
  EXPECT_EQ(cells->front().measures.contains->mean, 1);
}

TEST_F(EvaluatorTest, FreeAnswersEndAtAnEndToken) {
  EvalTask task = Task("facts", 512);
  task.questions.resize(1);
  EvalQuestion& question = task.questions[0];
  const std::vector<int32_t> prompt =
      *model_->tokenizer->Encode("<|begin_of_text|><|user|>\n" + task.intro + task.document +
                                     "\n\n" + question.question + "<|end|>\n<|assistant|>\n",
                                 false, true);
  std::mt19937_64 random(1);
  const std::vector<int32_t> blocks = engine::testing::ShuffledBlocks(*model_->decoder, random);
  const std::vector<int32_t> free = engine::testing::Greedy(
      *model_->decoder,
      engine::testing::ArgMax(engine::testing::Run(*model_->decoder, prompt, 0, blocks, 1, 100)),
      static_cast<int32_t>(prompt.size()), blocks, 40);
  const auto end =
      std::find_if(free.begin(), free.end(), [](int32_t t) { return t == 1 || t == 2; });
  ASSERT_LT(end - free.begin(), 35);
  const std::string before = model_->tokenizer->Decode({free.begin(), end}, true);
  const std::string all = model_->tokenizer->Decode(free, true);
  const std::string after = all.substr(before.size());
  ASSERT_GE(after.size(), 8);
  ASSERT_EQ(before.find(after), before.npos);
  question.must_contain = {after};  // what the model would say if it were not stopped
  const auto cells = Run({}, {&task, 1}, {&engine::testing::kDense, 1});
  ASSERT_TRUE(cells.ok()) << cells.status();
  EXPECT_EQ(cells->front().measures.contains->mean, 0);
}

// What is computed once for several policies is what each would compute alone.
TEST_F(EvaluatorTest, PoliciesTogetherGiveWhatEachGivesAlone) {
  const std::vector<EvalTask> tasks = {Task("facts", 1024), Task("facts", 2048)};
  std::vector<engine::AttentionPolicy> policies;
  for (const char* text :
       {"dense", "window:window=40", "oracle:k=30,window=40,suffix=9", "oracle:k=2%,window=40"}) {
    policies.push_back(*engine::ParseAttentionPolicy(text));
  }
  const auto together = Run({}, tasks, policies);
  ASSERT_TRUE(together.ok()) << together.status();
  ASSERT_EQ(together->size(), 8u);
  for (size_t i = 0; i < policies.size(); ++i) {
    const auto alone = Run({}, tasks, {&policies[i], 1});
    ASSERT_TRUE(alone.ok());
    for (size_t length = 0; length < 2; ++length) {
      const EvalCell& a = (*alone)[length];
      const EvalCell& b = (*together)[i * 2 + length];
      SCOPED_TRACE(b.policy);
      EXPECT_EQ(a.policy, b.policy);
      EXPECT_EQ(a.n, b.n);
      EXPECT_EQ(a.measures.exact.mean, b.measures.exact.mean);
      EXPECT_EQ(a.measures.token_acc.mean, b.measures.token_acc.mean);
      EXPECT_EQ(a.measures.contains->mean, b.measures.contains->mean);
      EXPECT_EQ(a.probes, b.probes);
      EXPECT_FALSE(a.against_dense.has_value());  // there is no dense policy to compare with
      EXPECT_EQ(b.against_dense.has_value(), i > 0);
      EXPECT_EQ(a.kept, b.kept);
      EXPECT_EQ(a.coverage, b.coverage);
      EXPECT_EQ(a.iou, b.iou);
    }
  }
  const EvalCell& dense = (*together)[1];
  const EvalCell& window = (*together)[3];
  const EvalCell& oracle = (*together)[7];
  EXPECT_EQ(dense.kept, 1);
  EXPECT_EQ(window.kept, 0);
  EXPECT_EQ(window.iou, 1);  // of nothing with nothing
  EXPECT_LT(window.coverage, oracle.coverage);
  EXPECT_EQ(oracle.iou, 1);
  EXPECT_NEAR(oracle.kept, 0.025, 0.015);
}

TEST_F(EvaluatorTest, LengthsLimitAndOrder) {
  const std::vector<EvalTask> tasks = {Task("b", 1024), Task("a", 512), Task("b", 512),
                                       Task("a", 2048)};
  EvalOptions options;
  const std::vector<int32_t> lengths = {512, 1024};
  options.limit = 2;
  options.free_run = false;
  double last_done = 0, last_total = 0;
  const auto cells =
      MakeEvaluator(options).RunTasks(*SourceOf(tasks, lengths), {&engine::testing::kDense, 1},
                                      [&](double done, double total, const std::string&) {
                                        EXPECT_GT(done, last_done);
                                        last_done = done;
                                        last_total = total;
                                      });
  ASSERT_TRUE(cells.ok()) << cells.status();
  EXPECT_DOUBLE_EQ(last_done, last_total);
  std::vector<std::string> order;
  for (const EvalCell& cell : *cells) {
    order.push_back(cell.task + std::to_string(cell.length));
    EXPECT_EQ(cell.n, 2);
    EXPECT_FALSE(cell.measures.contains.has_value());
  }
  EXPECT_THAT(order, ElementsAre("b512", "b1024", "a512"));

  const absl::Status none = SourceOf(tasks, std::vector<int32_t>{7}).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument) << none;
}

TEST_F(EvaluatorTest, TextRetrievesFromAPositionOn) {
  std::string text;
  for (int i = 0; i < 60; ++i) {
    text += "The mount point of volume " + std::to_string(i) + " is a directory. ";
  }
  EvalOptions options;
  options.window_tokens = 400;
  options.retrieve_from = options.score_from = 150;
  const std::vector<engine::AttentionPolicy> policies = {
      *engine::ParseAttentionPolicy("window:sink=2,window=20"), engine::AttentionPolicy()};
  const auto together = MakeEvaluator(options).RunText(text, policies, nullptr);
  const auto alone = MakeEvaluator(options).RunText(text, {policies.data(), 1}, nullptr);
  ASSERT_TRUE(together.ok() && alone.ok());
  const TextResult &window = (*together)[0], &dense = (*together)[1];
  EXPECT_EQ(dense.policy, "dense");
  EXPECT_NEAR(window.perplexity.mean, alone->front().perplexity.mean, 1e-9);
  EXPECT_EQ(window.tokens, dense.tokens);
  EXPECT_NE(window.perplexity.mean, dense.perplexity.mean);
  EXPECT_EQ(window.kept, 0);
  EXPECT_LT(window.coverage, 1);
  EXPECT_GT(window.probes, 0);
  // The second of two policies is the reference, since it is the dense one.
  EXPECT_FALSE(dense.against_dense.has_value());
  EXPECT_FALSE(alone->front().against_dense.has_value());
  ASSERT_TRUE(window.against_dense.has_value());
  EXPECT_NEAR(window.against_dense->percent.mean,
              100 * (window.perplexity.mean / dense.perplexity.mean - 1), 1e-6);
  EXPECT_LT(window.against_dense->top1.mean, 1);

  // What comes before is the same under both, so it thins the difference out and no more.
  options.score_from = 0;
  const auto all = MakeEvaluator(options).RunText(text, policies, nullptr);
  ASSERT_TRUE(all.ok());
  const TextResult &all_window = (*all)[0], &all_dense = (*all)[1];
  ASSERT_GT(all_window.tokens, window.tokens);
  const auto scored = [](const TextResult& of) { return static_cast<double>(of.tokens); };
  EXPECT_NEAR(std::log(all_window.perplexity.mean / all_dense.perplexity.mean) * scored(all_window),
              std::log(window.perplexity.mean / dense.perplexity.mean) * scored(window), 1e-6);
  const auto misses = [&](const TextResult& of) {
    return (1 - of.against_dense->top1.mean) * scored(of);
  };
  EXPECT_NEAR(misses(all_window), misses(window), 1e-6);

  options.score_from = 400;
  const absl::Status none = MakeEvaluator(options).RunText(text, policies, nullptr).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.message()), HasSubstr("--score-from"));
}

// The reference that a run kept of dense attention gives the differences that dense attention gives in the same run.
TEST_F(EvaluatorTest, ATextIsComparedWithAnotherRun) {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    text += "The mount point of volume " + std::to_string(i * 31 % 40) + " is a directory. ";
  }
  EvalOptions options;
  options.window_tokens = 200;
  options.retrieve_from = options.score_from = 80;
  const std::vector<engine::AttentionPolicy> policies = {
      *engine::ParseAttentionPolicy("window:sink=2,window=9"), engine::AttentionPolicy()};
  TextReference found;
  const auto together =
      MakeEvaluator(options).RunText(text, policies, nullptr, /*against=*/nullptr, &found);
  ASSERT_TRUE(together.ok()) << together.status();
  ASSERT_EQ(static_cast<int64_t>(found.tokens.size()), (*together)[1].tokens);
  const auto kept = ParseTextReference(TextReferenceLines(found), "kept");
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->tokens, found.tokens);
  EXPECT_EQ(kept->losses, found.losses);
  EXPECT_EQ(kept->likeliest, found.likeliest);

  const auto alone = MakeEvaluator(options).RunText(text, {policies.data(), 1}, nullptr, &*kept);
  ASSERT_TRUE(alone.ok()) << alone.status();
  const TextResult::AgainstDense& expected = *(*together)[0].against_dense;
  ASSERT_TRUE(alone->front().against_dense.has_value());
  EXPECT_EQ(alone->front().against_dense->percent.mean, expected.percent.mean);
  EXPECT_EQ(alone->front().against_dense->percent.error, expected.percent.error);
  EXPECT_EQ(alone->front().against_dense->top1.mean, expected.top1.mean);

  // Its own reference: no difference; a shifted one: one that a hand can add up.
  const std::span<const engine::AttentionPolicy> dense = std::span(policies).last(1);
  const auto same = MakeEvaluator(options).RunText(text, dense, nullptr, &*kept);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->front().against_dense->percent.mean, 0);
  EXPECT_EQ(same->front().against_dense->top1.mean, 1);
  TextReference other = found;
  for (double& loss : other.losses) loss += std::log(2.0);
  for (size_t i = 0; i < other.likeliest.size(); i += 2) ++other.likeliest[i];
  const auto halved = MakeEvaluator(options).RunText(text, dense, nullptr, &other);
  ASSERT_TRUE(halved.ok()) << halved.status();
  EXPECT_NEAR(halved->front().against_dense->percent.mean, -50, 1e-6);
  EXPECT_NEAR(
      halved->front().against_dense->top1.mean,
      static_cast<double>(other.likeliest.size() / 2) / static_cast<double>(other.likeliest.size()),
      1e-9);

  const auto refused = [&](const TextReference& reference) {
    const absl::Status status =
        MakeEvaluator(options).RunText(text, dense, nullptr, &reference).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("other tokens"));
  };
  other = found;
  ++other.tokens.back();
  refused(other);
  other = found;
  for (auto* list : {&other.tokens, &other.likeliest}) list->push_back(3);
  other.losses.push_back(1);
  refused(other);
  other.tokens.resize(other.tokens.size() / 2);
  refused(other);
}

TEST(TextReferenceTest, DamagedLinesAreRefusedByName) {
  for (const auto& [lines, part] :
       {std::pair{"", "has no line"},
        {"{\"token\": 1, \"loss\": 2}\n", "likeliest"},
        {"{\"token\": -1, \"loss\": 2, \"likeliest\": 1}\n", "token"},
        {"{\"token\": 1, \"loss\": null, \"likeliest\": 1}\n", "loss"},
        {"{\"token\": 1, \"loss\": -2, \"likeliest\": 1}\n", "loss"},
        {"{\"token\": 1, \"loss\": 2, \"likeliest\": 1}\n[]\n", "here:2"}}) {
    const absl::Status status = ParseTextReference(lines, "here").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << lines;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part)) << lines;
  }
}

// Differences to a second reference: those of the two perplexities, wherever it stands in the list.
TEST_F(EvaluatorTest, TextIsPairedWithASecondReference) {
  std::string text;
  for (int i = 0; i < 60; ++i) {
    text += "The mount point of volume " + std::to_string(i) + " is a directory. ";
  }
  EvalOptions options;
  options.window_tokens = 300;
  options.retrieve_from = options.score_from = 100;
  options.beside = *engine::ParseAttentionPolicy("window:sink=2,window=9");
  for (const bool last : {false, true}) {
    std::vector<engine::AttentionPolicy> policies = {
        *options.beside, *engine::ParseAttentionPolicy("window:sink=2,window=40"),
        engine::AttentionPolicy()};
    if (last) std::swap(policies[0], policies[1]);
    const auto results = MakeEvaluator(options).RunText(text, policies, nullptr);
    ASSERT_TRUE(results.ok()) << results.status();
    const TextResult &second = (*results)[last ? 1 : 0], &other = (*results)[last ? 0 : 1];
    ASSERT_TRUE(other.beside_percent.has_value());
    EXPECT_NEAR(other.beside_percent->mean,
                100 * (other.perplexity.mean / second.perplexity.mean - 1), 1e-6);
    EXPECT_GT(other.beside_percent->error.value_or(0), 0);
    EXPECT_TRUE(other.against_dense.has_value() && second.against_dense.has_value());
    // Neither reference is compared with the second.
    EXPECT_FALSE(second.beside_percent.has_value());
    EXPECT_FALSE((*results)[2].beside_percent.has_value());
  }
  const engine::AttentionPolicy dense;
  const absl::Status none = MakeEvaluator(options).RunText(text, {&dense, 1}, nullptr).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.message()), HasSubstr("beside: window:sink=2,window=9 is not one"));
}

// The figures of a run, from logits made one policy and one window at a time.
TEST_F(EvaluatorTest, PairsAndErrorsAreThoseOfTheBlocksByHand) {
  std::string text;
  for (int i = 0; i < 50; ++i) {
    text += "The mount point of volume " + std::to_string(i * 37 % 50) + " is a directory. ";
  }
  EvalOptions options;
  options.window_tokens = 300;
  options.retrieve_from = options.score_from = 100;
  const std::vector<engine::AttentionPolicy> policies = {
      engine::AttentionPolicy(), *engine::ParseAttentionPolicy("window:sink=2,window=9")};
  const auto results = MakeEvaluator(options).RunText(text, policies, nullptr);
  ASSERT_TRUE(results.ok()) << results.status();

  const std::vector<int32_t> ids = *model_->tokenizer->Encode(text, false, false);
  const std::vector<int32_t> before = *model_->tokenizer->Encode("", true, false);
  const size_t stride = 300 - before.size();
  std::mt19937_64 random(1);
  const std::vector<int32_t> blocks = engine::testing::ShuffledBlocks(*model_->decoder, random);
  std::vector<BlockSum> loss, difference, agreement;
  for (size_t begin = 0; begin < ids.size(); begin += stride) {
    std::vector<int32_t> window = before;
    window.insert(window.end(), ids.begin() + begin,
                  ids.begin() + std::min(ids.size(), begin + stride));
    if (window.size() < 102) continue;
    std::vector<std::vector<float>> logits;
    for (const engine::AttentionPolicy& policy : policies) {
      std::unique_ptr<engine::RetrievalState> state;
      if (!policy.IsDense()) state = *model_->decoder->NewRetrievalState(policy);
      logits.push_back(engine::testing::Run(*model_->decoder, window, 0, blocks,
                                            static_cast<int32_t>(window.size()), 128, state.get(),
                                            100));
    }
    for (size_t row = 100, n = 0; row + 1 < window.size(); ++row, ++n) {
      if (n % 64 == 0) {
        for (auto* sums : {&loss, &difference, &agreement}) sums->emplace_back();
      }
      const auto row_of = [&](int policy) {
        return std::span(logits[policy]).subspan(row * 4096, 4096);
      };
      const double dense = engine::testing::NegativeLogLikelihood(row_of(0), window[row + 1]);
      const double other = engine::testing::NegativeLogLikelihood(row_of(1), window[row + 1]);
      const bool same = engine::testing::ArgMax(row_of(0)) == engine::testing::ArgMax(row_of(1));
      loss.back().value += other;
      difference.back().value += other - dense;
      agreement.back().value += same ? 1 : 0;
      for (auto* sums : {&loss, &difference, &agreement}) sums->back().weight += 1;
    }
  }
  ASSERT_GT(loss.size(), 6u);
  const TextResult& window = (*results)[1];
  const auto expect_near = [](const Estimate& got, const Estimate& expected) {
    EXPECT_NEAR(got.mean, expected.mean, 1e-5 * std::abs(expected.mean));
    ASSERT_TRUE(got.error && expected.error);
    EXPECT_GT(*got.error, 0);
    EXPECT_NEAR(*got.error, *expected.error, 1e-4 * *expected.error);
  };
  expect_near(window.perplexity, Perplexity(MeanOfBlocks(loss)));
  ASSERT_TRUE(window.against_dense.has_value());
  expect_near(window.against_dense->percent, PerplexityPercent(MeanOfBlocks(difference)));
  expect_near(window.against_dense->top1, MeanOfBlocks(agreement));
  const double share = window.against_dense->top1.mean;
  EXPECT_NEAR(window.against_dense->run, share / (1 - share), 1e-9);
}

TEST_F(EvaluatorTest, DocumentsBeyondTheContextAreSkippedAndCounted) {
  EvalTask task = Task("long", 512);
  while (task.document.size() < 40000) task.document += task.document;
  const auto cells = Run({}, {&task, 1}, {&engine::testing::kDense, 1});
  ASSERT_TRUE(cells.ok()) << cells.status();
  EXPECT_EQ(cells->front().n, 0);
  EXPECT_EQ(cells->front().skipped, 3);
  const nlohmann::json json = nlohmann::json::parse(EvalJson(*cells, {}, "{}"));
  EXPECT_TRUE(json["results"][0]["token_acc"].is_null());
  EXPECT_THAT(EvalTable(*cells, {}), HasSubstr("3 questions do not fit into the context"));
}

TEST_F(EvaluatorTest, PerplexityIsThatOfTheWindowsOneByOne) {
  std::string text;
  for (int i = 0; i < 40; ++i)
    text += "The mount point of volume " + std::to_string(i) + " is a directory. ";
  EvalOptions options;
  options.window_tokens = 100;
  options.score_from = 0;
  const auto results = MakeEvaluator(options).RunText(text, {&engine::testing::kDense, 1}, nullptr);
  ASSERT_TRUE(results.ok()) << results.status();

  const std::vector<int32_t> ids = *model_->tokenizer->Encode(text, false, false);
  const std::vector<int32_t> before = *model_->tokenizer->Encode("", true, false);
  const size_t stride = 100 - before.size();
  double loss = 0;
  int64_t tokens = 0;
  std::mt19937_64 random(1);
  const std::vector<int32_t> blocks = engine::testing::ShuffledBlocks(*model_->decoder, random);
  for (size_t begin = 0; begin < ids.size(); begin += stride) {
    std::vector<int32_t> window = before;
    window.insert(window.end(), ids.begin() + begin,
                  ids.begin() + std::min(ids.size(), begin + stride));
    const std::vector<float> logits = engine::testing::Run(
        *model_->decoder, window, 0, blocks, static_cast<int32_t>(window.size()), 128);
    const size_t predicted = before.empty() ? window.size() - 1 : window.size() - before.size();
    for (size_t i = window.size() - predicted; i < window.size(); ++i) {
      loss += engine::testing::NegativeLogLikelihood(
          std::span(logits).subspan((i - 1) * 4096, 4096), window[i]);
    }
    tokens += static_cast<int64_t>(predicted);
  }
  EXPECT_EQ(results->front().tokens, tokens);
  EXPECT_NEAR(results->front().perplexity.mean, std::exp(loss / static_cast<double>(tokens)), 1e-4);
  EXPECT_GT(tokens, 300);
}

TEST_F(EvaluatorTest, TextErrorsAreNamed) {
  EvalOptions options;
  options.window_tokens = 1 << 20;
  const auto wide = MakeEvaluator(options).RunText("a b c", {&engine::testing::kDense, 1}, nullptr);
  EXPECT_EQ(wide.status().code(), absl::StatusCode::kInvalidArgument);
  const auto empty = MakeEvaluator({}).RunText("", {&engine::testing::kDense, 1}, nullptr);
  EXPECT_EQ(empty.status().code(), absl::StatusCode::kInvalidArgument);
  const auto invalid = MakeEvaluator({}).RunText("a\xff", {&engine::testing::kDense, 1}, nullptr);
  EXPECT_EQ(invalid.status().code(), absl::StatusCode::kInvalidArgument);
}

// ---- reports ----

TEST(EvalReport, JsonHasTheSchemaOfTheCommand) {
  EvalCell cell;
  cell.policy = "lsh:k=2%";
  cell.task = "niah";
  cell.length = 2048;
  cell.n = 16;
  cell.measures.exact = {0.9375, 0.0625};
  cell.measures.token_acc = {2.0 / 3, std::nullopt};
  cell.against_dense = EvalMeasures{
      .exact = {-0.0625, 0.0625}, .token_acc = {-0.01, 0.02}, .contains = {}, .score = {}};
  cell.coverage = 0.75;
  cell.probes = 96;
  TextResult text{"dense", 1000, {5.5, 0.25}, {}, {}};
  TextResult other{"window", 1000, {6.5, 0.25}, {}, {}};
  other.against_dense = {{.mean = 18.2, .error = 1.5}, {.mean = 0.875, .error = 0.01}, 7};
  const nlohmann::json json = nlohmann::json::parse(
      EvalJson({&cell, 1}, std::vector<TextResult>{text, other}, R"({"model":"m"})"));
  const nlohmann::json& result = json["results"][0];
  for (const char* key :
       {"policy", "task", "length", "n", "exact", "exact_se", "token_acc", "token_acc_se",
        "contains", "contains_se", "score", "score_se", "kept", "coverage", "iou", "probes",
        "skipped", "prompt_tokens", "against_dense"}) {
    EXPECT_TRUE(result.contains(key)) << key;
  }
  EXPECT_EQ(result["exact_se"], 0.0625);
  EXPECT_EQ(result["token_acc"], 0.666667);
  EXPECT_TRUE(result["token_acc_se"].is_null());
  EXPECT_TRUE(result["contains"].is_null());
  EXPECT_EQ(result["against_dense"]["exact"], -0.0625);
  EXPECT_EQ(result["against_dense"]["token_acc_se"], 0.02);
  EXPECT_EQ(json["text"][0]["policy"], "dense");
  EXPECT_EQ(json["text"][0]["perplexity"], 5.5);
  EXPECT_EQ(json["text"][0]["perplexity_se"], 0.25);
  EXPECT_EQ(json["text"][0]["tokens"], 1000);
  EXPECT_TRUE(json["text"][0]["against_dense"].is_null());
  EXPECT_EQ(json["text"][1]["against_dense"]["percent"], 18.2);
  EXPECT_EQ(json["text"][1]["against_dense"]["percent_se"], 1.5);
  EXPECT_EQ(json["text"][1]["against_dense"]["top1"], 0.875);
  EXPECT_EQ(json["text"][1]["against_dense"]["run"], 7);
  EXPECT_EQ(json["run"]["model"], "m");

  EXPECT_EQ(
      EvalTable({&cell, 1}, {}),
      "policy    task  length   n        exact  token_acc      Δtoken_acc   kept  coverage    iou  "
      "probes\n"
      "lsh:k=2%  niah    2048  16  0.938±0.062     0.6667  -0.0100±0.0200  1.000     0.750  1.000  "
      "    96\n");
  EXPECT_EQ(EvalTable({}, std::vector<TextResult>{text, other}),
            "policy     perplexity  tokens           Δ%       top1%  run   kept  coverage    iou  "
            "probes\n"
            "dense   5.5000±0.2500    1000            -           -    -  1.000     1.000  1.000  "
            "     0\n"
            "window  6.5000±0.2500    1000  +18.20±1.50  87.50±1.00  7.0  1.000     1.000  1.000  "
            "     0\n");
}

}  // namespace
}  // namespace winnow::bench
