// `winnow eval`: flags, files and progress around engine/eval.h.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/eval.h"
#include "bench/eval_longbench.h"
#include "bench/eval_prompt.h"
#include "bench/eval_ruler.h"
#include "bench/eval_tasks.h"
#include "engine/model_loader.h"
#include "engine/retrieval/attention_policy.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/commands.h"
#include "server/gzip_file.h"
#include "server/model_flags.h"

namespace winnow::bench {
namespace {

constexpr size_t kInputBytesMax = size_t{4} << 30;

struct EvalFlags {
  std::string model_dir, suite, tasks_path, text_path, haystack_path, json_path;
  std::string reference_path, save_reference_path;
  std::vector<std::string> policies;
  std::string beside;  // a policy
  std::string fit_path;
  std::string free_run = "on", prompt = "auto";
  std::vector<int32_t> lengths;
  std::vector<std::string> only;  // names of tasks
  std::optional<uint64_t> seed;
  std::optional<int32_t> score_from, probe_interval;
  EvalOptions options;
  engine::ModelOptions model;

  bool IsText() const { return !text_path.empty(); }
  bool IsRuler() const { return suite == "ruler"; }
  bool IsLongBench() const { return suite == "longbench"; }
  // Read whole before the model is, so that a typing error costs no time.
  const std::string& InputPath() const {
    return IsRuler() ? haystack_path : IsText() ? text_path : tasks_path;
  }
};

// A text of a million queries needs few of them measured, and an answer of ten tokens needs all.
constexpr int32_t kTextProbeInterval = 64;
constexpr int32_t kTaskProbeInterval = 1;
// RULER's own number is 500.
constexpr int32_t kRulerQuestions = 100;
constexpr uint64_t kRulerSeed = 1;

std::string Clock(double seconds) {
  const int64_t whole = std::llround(seconds);
  return whole < 3600 ? fmt::format("{}:{:02}", whole / 60, whole % 60)
                      : fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

// On stderr: a bar that redraws itself on a terminal, else a line for each tenth of the work.
class ProgressPrinter {
 public:
  void Update(double done, double total, const std::string& what) {
    const double share = total > 0 ? done / total : 1;
    const double elapsed =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double left = share > 0 ? elapsed / share - elapsed : 0;
    if (terminal_) {
      constexpr int kWidth = 30;
      const int filled = static_cast<int>(share * kWidth);
      std::fprintf(stderr, "\r[%s%s] %3.0f%%  %s left  %-40.40s", std::string(filled, '#').c_str(),
                   std::string(kWidth - filled, '.').c_str(), 100 * share, Clock(left).c_str(),
                   what.c_str());
      if (done >= total) std::fprintf(stderr, "\r%90s\r", "");
    } else if (const int tenth = static_cast<int>(share * 10); tenth > printed_tenth_) {
      printed_tenth_ = tenth;
      std::fprintf(stderr, "%3d%%  %s passed, %s left  %s\n", tenth * 10, Clock(elapsed).c_str(),
                   Clock(left).c_str(), what.c_str());
    }
    std::fflush(stderr);
  }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int printed_tenth_ = 0;
};

absl::StatusOr<std::vector<engine::AttentionPolicy>> ParsePolicies(
    const std::vector<std::string>& texts) {
  std::vector<engine::AttentionPolicy> policies;
  for (const std::string& text : texts) {
    absl::StatusOr<engine::AttentionPolicy> policy = engine::ParseAttentionPolicy(text);
    if (!policy.ok()) return policy.status();
    if (policy->IsVerified()) {
      return absl::InvalidArgumentError(fmt::format(
          "--policy {}: nothing is drafted here, and answers under verify are those of dense; "
          "bench exact measures acceptance",
          text));
    }
    if (std::find(policies.begin(), policies.end(), *policy) != policies.end()) {
      return absl::InvalidArgumentError(fmt::format("--policy {}: given twice", text));
    }
    policies.push_back(*policy);
  }
  return policies;
}

// Errors in combinations of flags that are each right alone.
absl::Status CheckFlags(const EvalFlags& flags) {
  const auto only_for = [](bool given, bool allowed, const char* flag, const char* what) {
    return given && !allowed ? absl::InvalidArgumentError(fmt::format("{}: is for {}", flag, what))
                             : absl::OkStatus();
  };
  const bool file_of_tasks = !flags.IsText() && !flags.IsRuler() && !flags.IsLongBench();
  absl::Status status;
  status.Update(only_for(flags.IsText() && !flags.suite.empty(), false, "--text", "no suite"));
  status.Update(only_for(flags.IsRuler() && !flags.tasks_path.empty(), false, "--tasks",
                         "longbench; --suite ruler makes its own (--only chooses)"));
  status.Update(only_for(!flags.lengths.empty(), file_of_tasks || flags.IsRuler(), "--lengths",
                         "--tasks and --suite ruler"));
  status.Update(only_for(!flags.only.empty(), flags.IsRuler(), "--only", "--suite ruler"));
  status.Update(only_for(flags.seed.has_value(), flags.IsRuler(), "--seed", "--suite ruler"));
  status.Update(
      only_for(!flags.haystack_path.empty(), flags.IsRuler(), "--haystack", "--suite ruler"));
  if (!status.ok()) return status;
  if (flags.IsLongBench() && flags.tasks_path.empty()) {
    return absl::InvalidArgumentError("--suite longbench: needs its file, as --tasks FILE.jsonl");
  }
  const bool has_dense = std::any_of(flags.policies.begin(), flags.policies.end(),
                                     [](const std::string& text) { return text == "dense"; });
  if (!flags.save_reference_path.empty() && !has_dense) {
    return absl::InvalidArgumentError("--save-reference: needs --policy dense");
  }
  if (flags.IsRuler() && flags.lengths.empty()) {
    return absl::InvalidArgumentError("--suite ruler: needs --lengths, as 4096,8192");
  }
  return status;
}

// The tasks of a file, or those that a suite makes for the loaded model.
struct EvalInput {
  std::vector<EvalTask> tasks;
  std::vector<std::string> sentences;
  std::string text;
  std::optional<TextReference> reference;
};

absl::StatusOr<EvalInput> ReadInput(const EvalFlags& flags) {
  EvalInput input;
  const std::string& path = flags.InputPath();
  if (path.empty()) return input;
  absl::StatusOr<std::string> content = server::ReadMaybeGzipped(path, kInputBytesMax);
  if (!content.ok()) return content.status();
  if (flags.IsText()) {
    input.text = *std::move(content);
    if (flags.reference_path.empty()) return input;
    absl::StatusOr<std::string> lines =
        server::ReadMaybeGzipped(flags.reference_path, kInputBytesMax);
    if (!lines.ok()) return lines.status();
    auto reference = ParseTextReference(*lines, flags.reference_path);
    if (!reference.ok()) return reference.status();
    input.reference = *std::move(reference);
    return input;
  }
  if (flags.IsRuler()) {
    input.sentences = SentencesOf(*content);
    if (input.sentences.empty()) {
      return absl::InvalidArgumentError(fmt::format("{}: has no sentence", path));
    }
    return input;
  }
  absl::StatusOr<std::vector<EvalTask>> tasks =
      flags.IsLongBench() ? ParseLongBench(*content, path) : ParseEvalTasks(*content, path);
  if (!tasks.ok()) return tasks.status();
  input.tasks = *std::move(tasks);
  return input;
}

absl::StatusOr<EvalTaskSource> MakeSource(const EvalFlags& flags, EvalInput& input,
                                          const engine::LoadedModel& loaded, int32_t max_tokens) {
  if (!flags.IsRuler()) return SourceOf(input.tasks, flags.lengths);
  for (const int32_t length : flags.lengths) {
    if (length > max_tokens) {
      return absl::InvalidArgumentError(fmt::format(
          "--lengths: {} is more than the {} tokens that the context and the KV pool hold", length,
          max_tokens));
    }
  }
  RulerOptions options{.lengths = flags.lengths,
                       .tasks = flags.only,
                       .questions = flags.options.limit,
                       .seed = flags.seed.value_or(kRulerSeed),
                       .sentences = std::move(input.sentences)};
  return RulerSource(std::move(options),
                     [&loaded, format = flags.options.prompt_format,
                      max_tokens](const EvalTask& task) -> absl::StatusOr<int32_t> {
                       const auto prompt =
                           EncodeEvalPrompt(*loaded.tokenizer, loaded.chat_template, format, task,
                                            task.questions.front(), max_tokens);
                       if (!prompt.ok()) return prompt.status();
                       return static_cast<int32_t>(prompt->size());
                     });
}

nlohmann::ordered_json RunJson(const EvalFlags& flags, const engine::LoadedModel& loaded) {
  nlohmann::ordered_json run = {
      {"model", flags.model_dir},
      {"suite", flags.suite},
      {"input", flags.InputPath()},
      {"backend", loaded.backend->name()},
      {"products", kernels::DTypeName(loaded.decoder_options.compute)},
      {"weights", flags.model.weights},
      {"kv", kernels::DTypeName(loaded.decoder_options.kv_dtype)},
      {"limit", flags.options.limit},
      {"probe_interval", flags.model.retrieval.probe_interval},
      {"fit_text", flags.fit_path},
  };
  if (flags.IsText()) {
    run["window_tokens"] = flags.options.window_tokens;
    run["retrieve_from"] = flags.options.retrieve_from;
    run["score_from"] = flags.options.score_from;
    run["reference"] = flags.reference_path;
    run["beside"] = flags.options.beside ? ToString(*flags.options.beside) : "";
  } else {
    run["prompt"] = flags.prompt;
    run["free_run"] = flags.options.free_run;
    run["suffix"] = flags.options.suffix;
  }
  if (flags.IsRuler()) {
    run["lengths"] = flags.lengths;
    run["seed"] = flags.seed.value_or(kRulerSeed);
  }
  return run;
}

struct EvalResults {
  std::vector<EvalCell> cells;
  std::vector<TextResult> texts;
};

absl::StatusOr<EvalResults> RunEval(const EvalFlags& flags, EvalInput& input,
                                    const std::vector<engine::AttentionPolicy>& policies,
                                    const engine::LoadedModel& loaded, Evaluator& evaluator) {
  ProgressPrinter printer;
  const auto progress = [&](double done, double total, const std::string& what) {
    printer.Update(done, total, what);
  };
  EvalResults results;
  if (flags.IsText()) {
    TextReference found;
    const bool save = !flags.save_reference_path.empty();
    auto texts = evaluator.RunText(input.text, policies, progress,
                                   input.reference.has_value() ? &*input.reference : nullptr,
                                   save ? &found : nullptr);
    if (!texts.ok()) return texts.status();
    if (save) {
      const absl::Status written =
          server::WriteTextFile(flags.save_reference_path, TextReferenceLines(found));
      if (!written.ok()) return written;
    }
    results.texts = *std::move(texts);
    return results;
  }
  const auto source = MakeSource(flags, input, loaded, evaluator.max_tokens());
  if (!source.ok()) return source.status();
  auto cells = evaluator.RunTasks(*source, policies, progress);
  if (!cells.ok()) return cells.status();
  results.cells = *std::move(cells);
  return results;
}

// Sets the defaults that depend on the suite and policies, after all flags are known.
void ResolveFlags(EvalFlags& flags, const std::vector<engine::AttentionPolicy>& policies) {
  flags.options.free_run = flags.free_run == "on";
  flags.options.mean_over_tasks = !flags.suite.empty();
  flags.options.score_from = flags.score_from.value_or(flags.options.retrieve_from);
  if (flags.IsRuler() && flags.options.limit == 0) flags.options.limit = kRulerQuestions;
  flags.model.max_batch_logits = flags.model.max_batch_tokens;
  // A policy retrieves wherever its text lets it.
  flags.model.retrieval.policies = policies;
  flags.model.retrieval.probe_interval =
      flags.probe_interval.value_or(flags.IsText() ? kTextProbeInterval : kTaskProbeInterval);
  flags.model.retrieval.summaries = static_cast<int32_t>(policies.size());
}

int Eval(EvalFlags flags) {
  if (const absl::Status status = CheckFlags(flags); !status.ok()) {
    return server::ReportInputError("eval", status);
  }
  const auto policies = ParsePolicies(flags.policies);
  if (!policies.ok()) return server::ReportInputError("eval", policies.status());
  if (!flags.beside.empty()) {
    const auto beside = engine::ParseAttentionPolicy(flags.beside);
    if (!beside.ok()) return server::ReportInputError("eval", beside.status());
    flags.options.beside = *beside;
  }
  if (!flags.fit_path.empty()) {
    absl::StatusOr<std::string> text = server::ReadMaybeGzipped(flags.fit_path, kInputBytesMax);
    if (text.ok() && text->empty()) {
      text = absl::InvalidArgumentError(fmt::format("{}: is empty", flags.fit_path));
    }
    if (!text.ok()) return server::ReportInputError("eval", text.status());
    flags.model.retrieval.fit_text = *std::move(text);
  }
  absl::StatusOr<EvalInput> input = ReadInput(flags);
  if (!input.ok()) return server::ReportInputError("eval", input.status());
  ResolveFlags(flags, *policies);

  // Flags that do not fit the model are the flags' fault, not the directory's.
  const auto config = engine::LoadModelConfig(flags.model_dir);
  if (!config.ok()) return server::ReportModelError("eval", config.status());
  if (auto resolved = engine::ResolveDecoderOptions(*config, flags.model); !resolved.ok()) {
    return server::ReportInputError("eval", resolved.status());
  }
  auto backend = engine::MakeBackend(flags.model);
  if (!backend.ok()) return server::ReportInputError("eval", backend.status());
  const auto model = engine::LoadModel(flags.model_dir, flags.model, *std::move(backend));
  if (!model.ok()) return server::ReportModelError("eval", model.status());
  engine::LoadedModel& loaded = **model;
  const PromptFormat best = BestPromptFormat(loaded.chat_template);
  flags.options.prompt_format = flags.prompt == "auto"   ? best
                                : flags.prompt == "chat" ? PromptFormat::kChat
                                                         : PromptFormat::kPlain;
  flags.prompt = flags.options.prompt_format == PromptFormat::kChat ? "chat" : "plain";
  std::fprintf(stderr, "%s: %s, products in %s, KV in %s, context %d%s%s\n",
               flags.model_dir.c_str(), loaded.backend->name().c_str(),
               kernels::DTypeName(loaded.decoder_options.compute),
               kernels::DTypeName(loaded.decoder_options.kv_dtype), loaded.decoder->max_context(),
               flags.IsText() ? "" : ", prompts: ", flags.IsText() ? "" : flags.prompt.c_str());

  Evaluator evaluator(*loaded.decoder, *loaded.tokenizer, loaded.chat_template,
                      loaded.config.eos_token_ids, flags.options);
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<EvalResults> results = RunEval(flags, *input, *policies, loaded, evaluator);
  if (!results.ok()) {
    const absl::Status& status = results.status();
    return absl::IsInternal(status) || absl::IsUnavailable(status)
               ? server::ReportFailure("eval", status)
               : server::ReportInputError("eval", status);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  FILE* const table = flags.json_path == "-" ? stderr : stdout;
  std::fprintf(table, "%s%lld tokens computed in %.1f s\n",
               EvalTable(results->cells, results->texts).c_str(),
               static_cast<long long>(evaluator.computed_tokens()), seconds);
  if (flags.json_path.empty()) return server::kExitOk;
  nlohmann::ordered_json run = RunJson(flags, loaded);
  run["computed_tokens"] = evaluator.computed_tokens();
  run["seconds"] = seconds;
  const absl::Status written =
      server::WriteTextFile(flags.json_path, EvalJson(results->cells, results->texts, run.dump()));
  return written.ok() ? server::kExitOk : server::ReportFailure("eval", written);
}

void AddInputFlags(CLI::App& command, EvalFlags& flags) {
  CLI::Option_group* input = command.add_option_group("input", "What to run: at least one of");
  input
      ->add_option("--suite", flags.suite,
                   "RULER's 13 tasks, made for --lengths, or LongBench's file, as --tasks")
      ->check(CLI::IsMember({"ruler", "longbench"}));
  CLI::Option* tasks =
      input->add_option("--tasks", flags.tasks_path, "Documents with questions, JSON lines")
          ->type_name("FILE.jsonl[.gz]");
  input->add_option("--text", flags.text_path, "Text for perplexity")
      ->type_name("FILE[.gz]")
      ->excludes(tasks);
  input->require_option(1, 2);
  command
      .add_option("--lengths", flags.lengths,
                  "Of --tasks only those made for these lengths; of --suite ruler all of them")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command.add_option("--only", flags.only, "Of --suite ruler only these tasks, as vt,cwe")
      ->delimiter(',')
      ->type_name("TASK");
  command
      .add_option("--haystack", flags.haystack_path,
                  "Text whose sentences are the prose of --suite ruler, in place of made ones")
      ->type_name("FILE[.gz]");
  command.add_option("--seed", flags.seed,
                     "Of --suite ruler: the same seed, the same questions; where absent 1");
  command
      .add_option("--limit", flags.options.limit,
                  "At most this many questions of each task and length, or windows of text; where "
                  "absent all, and of --suite ruler 100")
      ->check(CLI::PositiveNumber);
}

void AddTextFlags(CLI::App& command, EvalFlags& flags) {
  CLI::Option* const text = command.get_option("--text");
  command
      .add_option("--beside", flags.beside,
                  "One of the policies, with which the others are paired beside dense (beside%)")
      ->needs(text)
      ->type_name("POLICY");
  command
      .add_option("--window", flags.options.window_tokens,
                  "Tokens of a window of text, each begun afresh")
      ->check(CLI::Range(2, 1 << 30))
      ->needs(text)
      ->capture_default_str();
  command
      .add_option("--retrieve-from", flags.options.retrieve_from,
                  "Position in a window of text from which on all retrieve")
      ->check(CLI::Range(0, 1 << 28))
      ->needs(text)
      ->capture_default_str();
  command
      .add_option("--score-from", flags.score_from,
                  "Position in a window of text from which on predictions are scored; where absent "
                  "--retrieve-from, because what comes before is the same under every policy")
      ->check(CLI::Range(0, 1 << 28))
      ->needs(text);
  command
      .add_option("--save-reference", flags.save_reference_path,
                  "Write what dense finds at every scored token, for another run's --reference")
      ->check(server::WrongOutputFile)
      ->type_name("OUT")
      ->needs(text);
  command
      .add_option(
          "--reference", flags.reference_path,
          "Compare every policy with the run that wrote this, token by token: other weights or "
          "another file of the same model")
      ->type_name("FILE[.gz]")
      ->needs(text);
}

constexpr const char* kOutputHelp =
    "Means are printed as mean±standard error, from blocks of 64 tokens or of one question. If a "
    "policy "
    "is dense, the others are compared with it, token by token: of text, Δ% is per cent of "
    "perplexity, "
    "top1% the share of places with the same likeliest token, run the mean number of such places "
    "in a "
    "row; of tasks, Δ is the difference of the column's measure. probes is the number of (query, "
    "layer, "
    "KV head) that coverage and iou are means over. docs/evaluation.md explains every column and "
    "key.";

}  // namespace

void AddEvalCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = app.add_subcommand(
      "eval", "Measure answers on long documents, or perplexity on text, under attention policies");
  command->footer(kOutputHelp);
  command->add_option("--model", flags->model_dir, "Model directory or GGUF file")
      ->required()
      ->type_name("DIR|FILE.gguf");
  AddInputFlags(*command, *flags);
  command->add_option("--policy", flags->policies, "Attention policy; may be given several times")
      ->required()
      ->allow_extra_args(false)
      ->type_name("POLICY");
  command
      ->add_option("--free-run", flags->free_run,
                   "Let the model answer freely too, for `contains` and `score`")
      ->check(CLI::IsMember({"on", "off"}))
      ->excludes("--text")
      ->capture_default_str();
  command
      ->add_option("--prompt", flags->prompt,
                   "Ask in the model's chat format, or as plain text; auto: in the chat format if "
                   "there is one")
      ->check(CLI::IsMember({"auto", "chat", "plain"}))
      ->excludes("--text")
      ->capture_default_str();
  AddTextFlags(*command, *flags);
  command
      ->add_option("--suffix", flags->options.suffix,
                   "Last tokens of a prompt that retrieve, beside the answer's")
      ->check(CLI::Range(0, 1 << 28))
      ->excludes("--text")
      ->capture_default_str();
  command
      ->add_option("--probe-interval", flags->probe_interval,
                   "Measure coverage and iou of one (query, layer) in so many, which reads all its "
                   "keys; 0: of none. Where absent 64 of text, and 1 of tasks, where few retrieve")
      ->check(CLI::Range(0, 1 << 30));
  command
      ->add_option("--fit-text", flags->fit_path,
                   "Text that the transform codes of pca are fitted on, in place of the project's")
      ->type_name("FILE[.gz]");
  command->add_option("--json", flags->json_path, "Also write the results here; - is stdout")
      ->check(server::WrongOutputFile)
      ->type_name("OUT");
  server::AddModelFlags(*command, flags->model);
  server::AddArtifactFlag(*command, flags->model);
  command->callback([flags, exit_code] { *exit_code = Eval(*flags); });
}

}  // namespace winnow::bench
