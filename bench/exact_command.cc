// `winnow bench exact`: flags, table and JSON around RunExact of bench/exact.h.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/exact.h"
#include "bench/output.h"
#include "fmt/format.h"

namespace winnow::bench {
namespace {

struct ExactFlags {
  std::string model, text_path, json_path;
  std::vector<std::string> policies;
  engine::ModelOptions options;
  ExactOptions run;
};

absl::StatusOr<std::vector<engine::AttentionPolicy>> ParsePolicies(const ExactFlags& flags) {
  std::vector<engine::AttentionPolicy> policies;
  for (const std::string& text : flags.policies) {
    const auto policy = engine::ParseAttentionPolicy(text);
    if (!policy.ok()) return policy.status();
    policies.push_back(*policy);
  }
  return policies;
}

// Rows to verify a draft of any length beside all that run.
void SizeModel(const ExactFlags& flags, std::span<const engine::AttentionPolicy> policies,
               engine::ModelOptions& options) {
  options.max_sequences = flags.run.concurrent;
  options.max_batch_logits = flags.run.concurrent + engine::AttentionPolicy::kVerifyMax;
  options.max_batch_tokens = std::max(options.max_batch_tokens, options.max_batch_logits);
  for (const engine::AttentionPolicy& policy : policies) {
    if (!policy.IsDense()) options.retrieval.policies.push_back(policy);
  }
  options.retrieval.summaries = flags.run.concurrent;
}

absl::StatusOr<std::vector<int32_t>> ReadText(const std::string& path,
                                              const engine::Tokenizer& tokenizer) {
  if (path.empty()) return std::vector<int32_t>();
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(fmt::format("--text: {} cannot be read", path));
  return tokenizer.Encode(text.str(), /*add_special_tokens=*/false, /*parse_special=*/false);
}

int Print(const ExactFlags& flags, const std::vector<ExactResult>& results) {
  FILE* const table = TableFile(flags.json_path);
  std::fprintf(table, "%9s %9s %9s %9s %9s %9s %8s %8s %8s  %s\n", "requests", "equal", "tokens",
               "ms/token", "drafted", "verified", "accepted", "passes", "a pass", "policy");
  Json json = {{"exact", Json::array()},
               {"run",
                {{"model", flags.model},
                 {"text", flags.text_path},
                 {"prompt_tokens", {flags.run.min_prompt, flags.run.max_prompt}},
                 {"max_tokens", flags.run.max_tokens},
                 {"concurrent", flags.run.concurrent},
                 {"plain", flags.run.plain},
                 {"seed", flags.run.seed}}}};
  bool all_equal = true;
  for (const ExactResult& r : results) {
    const engine::DraftCounts& drafts = r.drafts;
    const double ms = 1000 * r.decode_seconds / static_cast<double>(std::max<int64_t>(1, r.tokens));
    const double of_a_pass =
        drafts.verifications == 0
            ? 0
            : static_cast<double>(drafts.accepted) / static_cast<double>(drafts.verifications);
    const auto number = [](auto value) { return static_cast<unsigned long long>(value); };
    std::fprintf(table, "%9llu %9llu %9llu %9.2f %9llu %9llu %8llu %8llu %8.2f  %s\n",
                 number(r.requests), number(r.equal), number(r.tokens), ms, number(drafts.drafted),
                 number(drafts.verified), number(drafts.accepted), number(drafts.verifications),
                 of_a_pass, r.policy.c_str());
    const bool promised = r.policy == "dense" || r.policy.find("verify=") != std::string::npos;
    if (!r.difference.empty()) std::fprintf(table, "    %s\n", r.difference.c_str());
    all_equal &= r.equal == r.requests || !promised;
    Json by_place = Json::array();
    for (size_t i = 0; i < drafts.verified_at.size() && drafts.verified_at[i] > 0; ++i) {
      by_place.push_back(Round(static_cast<double>(drafts.accepted_at[i]) /
                               static_cast<double>(drafts.verified_at[i])));
    }
    json["exact"].push_back({{"policy", r.policy},
                             {"requests", r.requests},
                             {"equal", r.equal},
                             {"first_difference", r.difference},
                             {"tokens", r.tokens},
                             {"ms_per_token", Round(ms)},
                             {"drafted", drafts.drafted},
                             {"verified", drafts.verified},
                             {"accepted", drafts.accepted},
                             {"verifications", drafts.verifications},
                             {"accepted_of_a_pass", Round(of_a_pass)},
                             {"accepted_by_place", by_place}});
  }
  const int exit_code = FinishBench(flags.json_path, json);
  if (exit_code != server::kExitOk || all_equal) return exit_code;
  return server::ReportFailure("bench", absl::InternalError("answers differ from dense ones"));
}

int BenchExact(ExactFlags flags) {
  if (flags.run.min_prompt > flags.run.max_prompt) {
    return server::ReportInputError(
        "bench", absl::InvalidArgumentError("--min-prompt: is more than --max-prompt"));
  }
  const auto policies = ParsePolicies(flags);
  if (!policies.ok()) return server::ReportInputError("bench", policies.status());
  SizeModel(flags, *policies, flags.options);
  auto model = engine::LoadModel(flags.model, flags.options);
  if (!model.ok()) return server::ReportModelError("bench", model.status());
  for (const engine::AttentionPolicy& policy : *policies) {
    if (absl::Status status = (*model)->decoder->CheckPolicy(policy); !status.ok()) {
      return server::ReportInputError("bench", status);
    }
  }
  const auto text = ReadText(flags.text_path, *(*model)->tokenizer);
  if (!text.ok()) return server::ReportInputError("bench", text.status());
  const auto results =
      RunExact(**model, *text, *policies, flags.run, [&, last = int64_t{0}](int64_t done) mutable {
        if (done / 50 == last / 50) return;
        std::fprintf(stderr, "%lld of %d requests\n", static_cast<long long>(done),
                     flags.run.requests);
        last = done;
      });
  if (!results.ok()) return server::ReportFailure("bench", results.status());
  return Print(flags, *results);
}

}  // namespace

void AddExactBench(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<ExactFlags>();
  CLI::App* exact = bench.add_subcommand(
      "exact",
      "Answers under policies beside those of dense attention, bit for bit; what drafts are worth");
  exact->add_option("--model", flags->model, "A model directory or GGUF file")
      ->type_name("DIR|FILE.gguf")
      ->required();
  server::AddModelFlags(*exact, flags->options);
  server::AddDraftWeightsFlag(*exact, flags->options);
  server::AddArtifactFlag(*exact, flags->options);
  exact
      ->add_option("--policy", flags->policies,
                   "Attention policy, may be repeated; those with "
                   "verify must give the answers of dense attention")
      ->type_name("POLICY")
      ->required();
  exact
      ->add_option("--text", flags->text_path,
                   "UTF-8 that prompts are cut from; absent: random tokens")
      ->type_name("FILE");
  const auto count = [&](const char* name, int32_t& value, int32_t most, const char* help) {
    exact->add_option(name, value, help)->check(CLI::Range(1, most))->capture_default_str();
  };
  count("--requests", flags->run.requests, 1 << 30, "Requests");
  count("--min-prompt", flags->run.min_prompt, 1 << 28, "Tokens of the shortest prompt");
  count("--max-prompt", flags->run.max_prompt, 1 << 28, "Tokens of the longest");
  count("--max-tokens", flags->run.max_tokens, 1 << 20, "Tokens of the longest answer");
  count("--concurrent", flags->run.concurrent, 256,
        "Requests that run at a time. Above 1 ms/token is not fair to dense, which comes first "
        "and waits for the prompts of the others; the policies find their KV");
  exact->add_option("--seed", flags->run.seed, "Of everything that is drawn")
      ->capture_default_str();
  exact->add_flag("--plain", flags->run.plain,
                  "Greedy answers of --max-tokens; absent: sampling, penalties, stops and several "
                  "choices are drawn");
  exact->add_option("--block-tokens", flags->options.block_tokens, "Tokens of a KV block")
      ->capture_default_str();
  exact
      ->add_option("--kv-bytes", flags->options.kv_bytes,
                   "Of KV in fast memory; 0: for one sequence of the model's context")
      ->capture_default_str();
  exact->add_option("--host-bytes", flags->options.tiers.host_bytes, "Of a tier below it");
  exact->add_option("--disk-bytes", flags->options.tiers.disk_bytes, "Of the tier on disk");
  exact->add_option("--store-dir", flags->options.tiers.store_dir, "Of the tier on disk");
  exact
      ->add_option("--retrieval-from", flags->options.retrieval.from,
                   "Shortest context that retrieves: a count, or auto")
      ->capture_default_str();
  AddJsonFlag(*exact, flags->json_path);
  exact->callback([flags, exit_code] { *exit_code = BenchExact(*flags); });
}

}  // namespace winnow::bench
