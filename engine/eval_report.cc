// The results of engine/eval.h as JSON and as a table.
#include <algorithm>
#include <cmath>

#include "engine/eval.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {
namespace {

double Rounded(double value) { return std::round(value * 1e6) / 1e6; }

}  // namespace

std::string EvalJson(std::span<const EvalCell> cells, std::span<const TextResult> texts,
                     const std::string& run) {
  using Json = nlohmann::ordered_json;
  Json json = {{"results", Json::array()}, {"text", Json::array()}};
  for (const EvalCell& cell : cells) {
    const auto measured = [&](double value) { return cell.n > 0 ? Json(Rounded(value)) : Json(); };
    json["results"].push_back({{"policy", cell.policy},
                               {"task", cell.task},
                               {"length", cell.length},
                               {"n", cell.n},
                               {"exact", measured(cell.exact)},
                               {"token_acc", measured(cell.token_acc)},
                               {"contains", cell.contains ? Json(Rounded(*cell.contains)) : Json()},
                               {"kept", measured(cell.kept)},
                               {"coverage", measured(cell.coverage)},
                               {"iou", measured(cell.iou)},
                               {"skipped", cell.skipped},
                               {"prompt_tokens", measured(cell.prompt_tokens)}});
  }
  for (const TextResult& text : texts) {
    json["text"].push_back({{"policy", text.policy},
                            {"perplexity", Rounded(text.perplexity)},
                            {"tokens", text.tokens},
                            {"retrieving_perplexity", Rounded(text.retrieving_perplexity)},
                            {"retrieving_tokens", text.retrieving_tokens},
                            {"kept", Rounded(text.kept)},
                            {"coverage", Rounded(text.coverage)},
                            {"iou", Rounded(text.iou)}});
  }
  json["run"] = Json::parse(run);
  return json.dump(1) + "\n";
}

std::string EvalTable(std::span<const EvalCell> cells, std::span<const TextResult> texts) {
  size_t policy_width = 6, task_width = 4;
  for (const EvalCell& cell : cells) {
    policy_width = std::max(policy_width, cell.policy.size());
    task_width = std::max(task_width, cell.task.size());
  }
  for (const TextResult& text : texts) policy_width = std::max(policy_width, text.policy.size());

  std::string table;
  if (!cells.empty()) {
    table += fmt::format("{:<{}}  {:<{}}  {:>7}  {:>4}  {:>6}  {:>9}  {:>8}  {:>6}  {:>8}  {:>6}\n",
                         "policy", policy_width, "task", task_width, "length", "n", "exact",
                         "token_acc", "contains", "kept", "coverage", "iou");
  }
  int skipped = 0;
  for (const EvalCell& cell : cells) {
    skipped += cell.skipped;
    const auto number = [&](double value, int digits) {
      return cell.n > 0 ? fmt::format("{:.{}f}", value, digits) : std::string("-");
    };
    table += fmt::format("{:<{}}  {:<{}}  {:>7}  {:>4}  {:>6}  {:>9}  {:>8}  {:>6}  {:>8}  {:>6}\n",
                         cell.policy, policy_width, cell.task, task_width, cell.length, cell.n,
                         number(cell.exact, 3), number(cell.token_acc, 4),
                         cell.contains ? fmt::format("{:.3f}", *cell.contains) : "-",
                         number(cell.kept, 3), number(cell.coverage, 3), number(cell.iou, 3));
  }
  if (skipped > 0) {
    table += fmt::format("{} questions do not fit into the context and were left out\n", skipped);
  }
  if (!texts.empty()) {
    table += fmt::format("{:<{}}  {:>10}  {:>8}  {:>11}  {:>8}  {:>6}  {:>8}  {:>6}\n", "policy",
                         policy_width, "perplexity", "tokens", "retrieving", "tokens", "kept",
                         "coverage", "iou");
  }
  for (const TextResult& text : texts) {
    table += fmt::format(
        "{:<{}}  {:>10.4f}  {:>8}  {:>11.4f}  {:>8}  {:>6.3f}  {:>8.3f}  {:>6.3f}\n", text.policy,
        policy_width, text.perplexity, text.tokens, text.retrieving_perplexity,
        text.retrieving_tokens, text.kept, text.coverage, text.iou);
  }
  return table;
}

}  // namespace winnow::engine
