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
#include "engine/attention_policy.h"
#include "engine/eval.h"
#include "engine/eval_tasks.h"
#include "engine/model_loader.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/commands.h"
#include "server/gzip_file.h"
#include "server/model_flags.h"

namespace winnow::server {
namespace {

constexpr size_t kInputBytesMax = size_t{4} << 30;

struct EvalFlags {
  std::string model_dir, tasks_path, text_path, json_path;
  std::vector<std::string> policies;
  std::string free_run = "on", prompt = "chat";
  engine::EvalOptions options;
  engine::ModelOptions model;
};

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
    if (std::find(policies.begin(), policies.end(), *policy) != policies.end()) {
      return absl::InvalidArgumentError(fmt::format("--policy {}: given twice", text));
    }
    policies.push_back(*policy);
  }
  return policies;
}

int Eval(EvalFlags flags) {
  flags.options.free_run = flags.free_run == "on";
  flags.options.prompt_format =
      flags.prompt == "chat" ? engine::PromptFormat::kChat : engine::PromptFormat::kPlain;
  const auto policies = ParsePolicies(flags.policies);
  if (!policies.ok()) return ReportInputError("eval", policies.status());

  // The input is read before the model, so that a typing error costs no time.
  const std::string& path = flags.tasks_path.empty() ? flags.text_path : flags.tasks_path;
  const absl::StatusOr<std::string> input = ReadMaybeGzipped(path, kInputBytesMax);
  if (!input.ok()) return ReportInputError("eval", input.status());
  std::vector<engine::EvalTask> tasks;
  if (!flags.tasks_path.empty()) {
    absl::StatusOr<std::vector<engine::EvalTask>> parsed = engine::ParseEvalTasks(*input, path);
    if (!parsed.ok()) return ReportInputError("eval", parsed.status());
    tasks = *std::move(parsed);
  }

  flags.model.max_batch_logits = flags.model.max_batch_tokens;
  // Every query is measured, and a policy retrieves wherever its text lets it.
  flags.model.retrieval.policies = *policies;
  flags.model.retrieval.probe_interval = 1;
  flags.model.retrieval.summaries = static_cast<int32_t>(policies->size());
  // Flags that do not fit the model are the flags' fault, not the directory's.
  const auto config = engine::LoadModelConfig(flags.model_dir);
  if (!config.ok()) return ReportModelError("eval", config.status());
  if (auto resolved = engine::ResolveDecoderOptions(*config, flags.model); !resolved.ok()) {
    return ReportInputError("eval", resolved.status());
  }
  auto backend = engine::MakeBackend(flags.model);
  if (!backend.ok()) return ReportInputError("eval", backend.status());
  const auto model = engine::LoadModel(flags.model_dir, flags.model, *std::move(backend));
  if (!model.ok()) return ReportModelError("eval", model.status());
  engine::LoadedModel& loaded = **model;
  std::fprintf(stderr, "%s: %s, products in %s, KV in %s, context %d\n", flags.model_dir.c_str(),
               loaded.backend->name().c_str(), kernels::DTypeName(loaded.decoder_options.compute),
               kernels::DTypeName(loaded.decoder_options.kv_dtype), loaded.decoder->max_context());

  engine::Evaluator evaluator(*loaded.decoder, *loaded.tokenizer, loaded.chat_template,
                              loaded.config.eos_token_ids, flags.options);
  ProgressPrinter printer;
  const auto progress = [&](double done, double total, const std::string& what) {
    printer.Update(done, total, what);
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<engine::EvalCell> cells;
  std::vector<engine::TextResult> texts;
  absl::Status status;
  if (!tasks.empty()) {
    auto results = evaluator.RunTasks(tasks, *policies, progress);
    status = results.status();
    if (results.ok()) cells = *std::move(results);
  } else {
    auto results = evaluator.RunText(*input, *policies, progress);
    status = results.status();
    if (results.ok()) texts = *std::move(results);
  }
  if (!status.ok()) {
    return absl::IsInternal(status) || absl::IsUnavailable(status)
               ? ReportFailure("eval", status)
               : ReportInputError("eval", status);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  FILE* const table = flags.json_path == "-" ? stderr : stdout;
  std::fprintf(table, "%s%lld tokens computed in %.1f s\n", engine::EvalTable(cells, texts).c_str(),
               static_cast<long long>(evaluator.computed_tokens()), seconds);
  if (flags.json_path.empty()) return kExitOk;
  nlohmann::ordered_json run = {{"model", flags.model_dir},
                                {"input", path},
                                {"backend", loaded.backend->name()},
                                {"products", kernels::DTypeName(loaded.decoder_options.compute)},
                                {"kv", kernels::DTypeName(loaded.decoder_options.kv_dtype)},
                                {"prompt", flags.prompt},
                                {"free_run", flags.options.free_run},
                                {"computed_tokens", evaluator.computed_tokens()},
                                {"seconds", seconds}};
  if (tasks.empty()) {
    run["window_tokens"] = flags.options.window_tokens;
    run["retrieve_from"] = flags.options.retrieve_from;
  } else {
    run["suffix"] = flags.options.suffix;
  }
  const absl::Status written =
      WriteTextFile(flags.json_path, engine::EvalJson(cells, texts, run.dump()));
  return written.ok() ? kExitOk : ReportFailure("eval", written);
}

}  // namespace

void AddEvalCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = app.add_subcommand(
      "eval", "Measure answers on long documents, or perplexity on text, under attention policies");
  command->add_option("--model", flags->model_dir, "Model directory or GGUF file")
      ->required()
      ->type_name("DIR|FILE.gguf");
  CLI::Option_group* input = command->add_option_group("input", "What to run: one of");
  input->add_option("--tasks", flags->tasks_path, "Documents with questions, JSON lines")
      ->type_name("FILE.jsonl[.gz]");
  input->add_option("--text", flags->text_path, "Text for perplexity")->type_name("FILE[.gz]");
  input->require_option(1);
  command->add_option("--policy", flags->policies, "Attention policy; may be given several times")
      ->required()
      ->allow_extra_args(false)
      ->type_name("POLICY");
  command
      ->add_option("--lengths", flags->options.lengths,
                   "Only tasks made for these lengths, as 2048,8192")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->needs(command->get_option("--tasks"));
  command
      ->add_option("--limit", flags->options.limit,
                   "At most this many questions of each task and length, or windows of text")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--free-run", flags->free_run, "Let the model answer freely too, for `contains`")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  command
      ->add_option("--prompt", flags->prompt,
                   "Ask in the model's chat format, or as plain text (for models without one)")
      ->check(CLI::IsMember({"chat", "plain"}))
      ->capture_default_str();
  command
      ->add_option("--window", flags->options.window_tokens,
                   "Tokens of a window of text, each begun afresh")
      ->check(CLI::Range(2, 1 << 30))
      ->needs(command->get_option("--text"))
      ->capture_default_str();
  command
      ->add_option("--suffix", flags->options.suffix,
                   "Last tokens of a prompt that retrieve, beside the answer's")
      ->check(CLI::Range(0, 1 << 28))
      ->needs(command->get_option("--tasks"))
      ->capture_default_str();
  command
      ->add_option("--retrieve-from", flags->options.retrieve_from,
                   "Token of a window of text from which on all retrieve")
      ->check(CLI::Range(0, 1 << 28))
      ->needs(command->get_option("--text"))
      ->capture_default_str();
  command->add_option("--json", flags->json_path, "Also write the results here; - is stdout")
      ->check(WrongOutputFile)
      ->type_name("OUT");
  AddModelFlags(*command, flags->model);
  AddArtifactFlag(*command, flags->model);
  command->callback([flags, exit_code] { *exit_code = Eval(*flags); });
}

}  // namespace winnow::server
