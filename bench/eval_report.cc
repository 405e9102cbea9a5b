// The results of engine/eval.h as JSON and as a table.
#include <algorithm>
#include <cmath>

#include "bench/eval.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace winnow::bench {
namespace {

using Json = nlohmann::ordered_json;

double Rounded(double value) { return std::round(value * 1e6) / 1e6; }

// "key" and "key_se", its standard error; null where there is none.
void Put(Json& object, const std::string& key, const std::optional<Estimate>& estimate) {
  object[key] = estimate ? Json(Rounded(estimate->mean)) : Json();
  object[key + "_se"] = estimate && estimate->error ? Json(Rounded(*estimate->error)) : Json();
}

void PutMeasures(Json& object, const std::optional<EvalMeasures>& measures) {
  using Optional = std::optional<Estimate>;
  Put(object, "exact", measures ? Optional(measures->exact) : Optional());
  Put(object, "token_acc", measures ? Optional(measures->token_acc) : Optional());
  Put(object, "contains", measures ? measures->contains : Optional());
  Put(object, "score", measures ? measures->score : Optional());
}

Json CellJson(const EvalCell& cell) {
  const bool asked = cell.n > 0;
  const auto measured = [&](double value) { return asked ? Json(Rounded(value)) : Json(); };
  Json json = {
      {"policy", cell.policy}, {"task", cell.task}, {"length", cell.length}, {"n", cell.n}};
  PutMeasures(json, asked ? std::optional(cell.measures) : std::nullopt);
  json["kept"] = measured(cell.kept);
  json["coverage"] = measured(cell.coverage);
  json["iou"] = measured(cell.iou);
  json["probes"] = cell.probes;
  json["skipped"] = cell.skipped;
  json["prompt_tokens"] = measured(cell.prompt_tokens);
  json["against_dense"] = Json();
  if (cell.against_dense) PutMeasures(json["against_dense"], cell.against_dense);
  return json;
}

Json TextJson(const TextResult& text) {
  Json json = {{"policy", text.policy}};
  Put(json, "perplexity", text.perplexity);
  json["tokens"] = text.tokens;
  json["kept"] = Rounded(text.kept);
  json["coverage"] = Rounded(text.coverage);
  json["iou"] = Rounded(text.iou);
  json["probes"] = text.probes;
  json["against_dense"] = Json();
  if (text.against_dense) {
    Put(json["against_dense"], "percent", text.against_dense->percent);
    Put(json["against_dense"], "top1", text.against_dense->top1);
    json["against_dense"]["run"] = Rounded(text.against_dense->run);
  }
  if (text.beside_percent) Put(json, "beside_percent", text.beside_percent);
  return json;
}

// ---- a table ----

// Rows of equally many texts, the first of which are the heads. The first `left` columns are aligned
// to the left, as they are names. Columns that hold nothing but "-" below their head are left out.
std::string Aligned(const std::vector<std::vector<std::string>>& rows, size_t left) {
  std::string table;
  const size_t columns = rows.front().size();
  std::vector<size_t> widths(columns, 0);
  std::vector<bool> used(columns, false);
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t column = 0; column < columns; ++column) {
      const std::string& text = rows[row][column];
      // Characters, not bytes: "±" is two bytes.
      const auto width = static_cast<size_t>(
          std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
      widths[column] = std::max(widths[column], width);
      if (row > 0 && text != "-") used[column] = true;
    }
  }
  for (const std::vector<std::string>& row : rows) {
    std::string line;
    for (size_t column = 0; column < columns; ++column) {
      if (!used[column]) continue;
      if (!line.empty()) line += "  ";
      line += column < left ? fmt::format("{:<{}}", row[column], widths[column])
                            : fmt::format("{:>{}}", row[column], widths[column]);
    }
    table += line + "\n";
  }
  return table;
}

// "0.938±0.061"; without an error "0.938".
std::string Number(const Estimate& estimate, int digits, bool sign = false) {
  std::string text = sign ? fmt::format("{:+.{}f}", estimate.mean, digits)
                          : fmt::format("{:.{}f}", estimate.mean, digits);
  if (estimate.error) text += fmt::format("±{:.{}f}", *estimate.error, digits);
  return text;
}

std::string Number(const std::optional<Estimate>& estimate, int digits, bool sign = false) {
  return estimate ? Number(*estimate, digits, sign) : "-";
}

std::vector<std::string> CellRow(const EvalCell& cell) {
  if (cell.n == 0) {
    std::vector<std::string> row(15, "-");
    row[0] = cell.policy;
    row[1] = cell.task;
    if (cell.length > 0) row[2] = fmt::format("{}", cell.length);
    row[3] = "0";
    return row;
  }
  const std::optional<EvalMeasures>& pair = cell.against_dense;
  return {cell.policy,
          cell.task,
          cell.length > 0 ? fmt::format("{}", cell.length) : "-",
          fmt::format("{}", cell.n),
          Number(cell.measures.exact, 3),
          Number(cell.measures.token_acc, 4),
          Number(cell.measures.contains, 3),
          Number(cell.measures.score, 3),
          pair ? Number(pair->token_acc, 4, true) : "-",
          pair ? Number(pair->contains, 3, true) : "-",
          pair ? Number(pair->score, 3, true) : "-",
          fmt::format("{:.3f}", cell.kept),
          fmt::format("{:.3f}", cell.coverage),
          fmt::format("{:.3f}", cell.iou),
          fmt::format("{}", cell.probes)};
}

std::vector<std::string> TextRow(const TextResult& text) {
  const auto& pair = text.against_dense;
  return {text.policy,
          Number(text.perplexity, 4),
          fmt::format("{}", text.tokens),
          pair ? Number(pair->percent, 2, true) : "-",
          Number(text.beside_percent, 2, true),
          pair ? Number(Estimate{100 * pair->top1.mean, pair->top1.error
                                                            ? std::optional(100 * *pair->top1.error)
                                                            : std::nullopt},
                        2)
               : "-",
          pair ? fmt::format("{:.1f}", pair->run) : "-",
          fmt::format("{:.3f}", text.kept),
          fmt::format("{:.3f}", text.coverage),
          fmt::format("{:.3f}", text.iou),
          fmt::format("{}", text.probes)};
}

}  // namespace

std::string EvalJson(std::span<const EvalCell> cells, std::span<const TextResult> texts,
                     const std::string& run) {
  Json json = {{"results", Json::array()}, {"text", Json::array()}};
  for (const EvalCell& cell : cells) json["results"].push_back(CellJson(cell));
  for (const TextResult& text : texts) json["text"].push_back(TextJson(text));
  json["run"] = Json::parse(run);
  return json.dump(1) + "\n";
}

std::string EvalTable(std::span<const EvalCell> cells, std::span<const TextResult> texts) {
  std::string table;
  if (!cells.empty()) {
    std::vector<std::vector<std::string>> rows = {
        {"policy", "task", "length", "n", "exact", "token_acc", "contains", "score", "Δtoken_acc",
         "Δcontains", "Δscore", "kept", "coverage", "iou", "probes"}};
    int skipped = 0;
    for (const EvalCell& cell : cells) {
      rows.push_back(CellRow(cell));
      if (cell.task != kMeanTask) skipped += cell.skipped;
    }
    table += Aligned(rows, 2);
    if (skipped > 0) {
      table += fmt::format("{} questions do not fit into the context and were left out\n", skipped);
    }
  }
  if (!texts.empty()) {
    std::vector<std::vector<std::string>> rows = {{"policy", "perplexity", "tokens", "Δ%",
                                                   "beside%", "top1%", "run", "kept", "coverage",
                                                   "iou", "probes"}};
    for (const TextResult& text : texts) rows.push_back(TextRow(text));
    table += Aligned(rows, 1);
  }
  return table;
}

}  // namespace winnow::bench
