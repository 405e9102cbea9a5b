// `winnow bench verify`: flags, table and JSON around RunRound of bench/runs.h.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/model_commands.h"
#include "bench/output.h"
#include "bench/runs.h"
#include "fmt/format.h"
#include "server/model_flags.h"

namespace winnow::bench {
namespace {

struct VerifyFlags : ModelBenchFlags {
  std::vector<int64_t> contexts = {8192, 32768, 131072};
  int32_t batch = 1;
  int64_t shared = 0;
  int32_t steps = 10;
  double accepted = 0;

  DecodeCase At(int64_t context) const {
    return {.context = context, .batch = batch, .shared = shared, .steps = steps};
  }
};

// Policies that say how many tokens they draft. InvalidArgument: one that does not, or cannot have so many accepted.
absl::StatusOr<std::vector<engine::AttentionPolicy>> PoliciesOf(const VerifyFlags& flags) {
  std::vector<engine::AttentionPolicy> policies;
  for (const std::string& text : flags.policies) {
    const auto policy = engine::ParseAttentionPolicy(text);
    if (!policy.ok()) return policy.status();
    if (policy->verify <= 0) {
      return absl::InvalidArgumentError(fmt::format(
          "--policy: {}: say how many tokens are drafted, verify=N; bench exact runs verify=auto",
          text));
    }
    if (policy->lookup) {
      return absl::InvalidArgumentError(
          "--policy: lookup=on: noise repeats nothing; bench exact measures it");
    }
    if (flags.accepted > policy->verify) {
      return absl::InvalidArgumentError(fmt::format("--accepted: {} of {} drafted tokens ({})",
                                                    flags.accepted, policy->verify, text));
    }
    if (policy->verify >= *std::min_element(flags.contexts.begin(), flags.contexts.end())) {
      return absl::InvalidArgumentError(
          fmt::format("--contexts: {} drafted tokens fill the shortest one", policy->verify));
    }
    policies.push_back(*policy);
  }
  return policies;
}

// Seconds of one answer's token where so many of each draft are accepted: the verification's own token comes on top.
double SecondsPerToken(const RoundResult& r, double accepted) { return r.seconds / (accepted + 1); }

int Measure(const VerifyFlags& flags, std::span<const engine::AttentionPolicy> policies,
            BenchModel& model) {
  FILE* const table = TableFile(flags.json_path);
  PrintHeader(table, model);
  std::fprintf(table,
               "ms a token and tokens/s where %g tokens of each draft are accepted, as --accepted "
               "says; drafts with %s\n",
               flags.accepted,
               model.decoder->has_draft_weights()
                   ? fmt::format("weights as {}", flags.model.model.draft_weights).c_str()
                   : "the answers' weights");
  std::fprintf(table, "%9s %6s %7s %10s %10s %10s %10s %10s %10s  %s\n", "context", "batch",
               "drafted", "ms/draft", "ms/verify", "ms/round", "median", "ms/token", "tokens/s",
               "policy");
  Json json = {{"verify", Json::array()}, {"run", RunInfo(flags, model)}};
  json["run"]["accepted"] = flags.accepted;
  json["run"]["draft_weights"] = flags.model.model.draft_weights;
  for (const int64_t context : flags.contexts) {
    for (const engine::AttentionPolicy& policy : policies) {
      const absl::StatusOr<RoundResult> result = RunRound(model, flags.At(context), policy);
      if (!result.ok()) return server::ReportFailure("bench", result.status());
      const RoundResult& r = *result;
      const double token = SecondsPerToken(r, flags.accepted);
      std::fprintf(table, "%9lld %6d %7d %10.3f %10.3f %10.3f %10.3f %10.3f %10.1f  %s\n",
                   static_cast<long long>(r.context), r.batch, r.drafted,
                   r.draft_seconds / r.drafted / kMilli, r.verify_seconds / kMilli,
                   r.seconds / kMilli, r.seconds_median / kMilli, token / kMilli, r.batch / token,
                   r.policy.c_str());
      std::fflush(table);
      json["verify"].push_back({{"context", r.context},
                                {"policy", r.policy},
                                {"batch", r.batch},
                                {"drafted", r.drafted},
                                {"ms_per_draft_step", Round(r.draft_seconds / r.drafted / kMilli)},
                                {"ms_per_verification", Round(r.verify_seconds / kMilli)},
                                {"ms_per_round", Round(r.seconds / kMilli)},
                                {"ms_per_round_median", Round(r.seconds_median / kMilli)},
                                {"ms_per_token", Round(token / kMilli)},
                                {"tokens_per_s", Round(r.batch / token)}});
    }
  }
  return FinishBench(flags.json_path, json);
}

int BenchVerify(VerifyFlags flags) {
  engine::ModelOptions& options = flags.model.model;
  if (absl::Status status = SetHostKv(flags); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  const auto policies = PoliciesOf(flags);
  if (!policies.ok()) return server::ReportInputError("bench", policies.status());
  int32_t most = 0;
  for (const engine::AttentionPolicy& policy : *policies) most = std::max(most, policy.verify);
  options.max_sequences = flags.batch;
  options.max_batch_logits = flags.batch * (most + 1);
  options.max_batch_tokens = std::max(options.max_batch_tokens, options.max_batch_logits);
  int64_t kv_tokens = 0;
  for (const int64_t context : flags.contexts) {
    kv_tokens = std::max(
        kv_tokens, BlocksOfDecode(flags.At(context), options.block_tokens) * options.block_tokens);
  }
  const auto made = MakeBenchModel(flags.model, kv_tokens, *policies);
  if (!made.ok()) return ReportModelBenchError(flags, made.status());
  BenchModel& model = **made;
  if (absl::Status status = CheckLengths(model, flags.contexts, "--contexts"); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  if (absl::Status status = CheckPolicies(model, *policies); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  model.timed->set_waits(false);
  return Measure(flags, *policies, model);
}

}  // namespace

void AddVerifyBench(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* verify = bench.add_subcommand(
      "verify",
      "Rounds of drafts and the dense pass that verifies them, at long contexts (of noise)");
  AddModelBenchFlags(*verify, *flags);
  server::AddDraftWeightsFlag(*verify, flags->model.model);
  verify->add_option("--contexts,--context", flags->contexts, "Keys that each sequence attends to")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 30))
      ->capture_default_str();
  verify
      ->add_option("--policy", flags->policies,
                   "What drafts, with verify=N; may be repeated. dense drafts with --draft-weights")
      ->type_name("POLICY")
      ->required();
  verify
      ->add_option("--accepted", flags->accepted,
                   "Tokens of a draft that its verification accepts, in the mean; bench exact "
                   "measures it on a model and its text")
      ->check(CLI::Range(0.0, double{engine::AttentionPolicy::kVerifyMax}))
      ->required();
  verify->add_option("--batch", flags->batch, "Sequences in a round")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  verify
      ->add_option("--shared", flags->shared,
                   "All sequences begin with the same document of so many tokens, in whole blocks; "
                   "its KV is there once")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  verify->add_option("--steps", flags->steps, "Rounds that are timed")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  AddJsonFlag(*verify, flags->json_path);
  verify->callback([flags, exit_code] { *exit_code = BenchVerify(*flags); });
}

}  // namespace winnow::bench
