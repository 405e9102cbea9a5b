// LongBench's files (Bai et al. 2024, "LongBench: A Bilingual, Multitask Benchmark for Long Context
// Understanding") as questions of `winnow eval`: one JSON object a line,
//
//   {"input", "context", "answers": [..], "length", "dataset", "language", "all_classes": [..] or null,
//    "_id"}
//
// Known datasets, with LongBench's scorers and answer lengths in tokens:
//
//   F1              narrativeqa 128, qasper 128, multifieldqa_en 64, hotpotqa 32, 2wikimqa 32,
//                   musique 32, triviaqa 32 (first line of the answer)
//   ROUGE-L         gov_report 512, qmsum 512, multi_news 512, samsum 128 (first line)
//   classification  trec 64, lsht 64 (both first line)
//   retrieval       passage_retrieval_en 32, passage_retrieval_zh 32
//   count           passage_count 32
//   code            lcc 64, repobench-p 64
//
// The variants of LongBench-E ("hotpotqa_e") are the same tasks. As LongBench does, trec, triviaqa,
// samsum, lsht, lcc and repobench-p are asked as plain text, the others in the model's chat format,
// and a prompt beyond the context loses its middle. The wording of prompts is ours, so figures are
// comparable between policies here, not with published ones.
//
// multifieldqa_zh, dureader and vcsum are refused, because their scores need words of Chinese text, which
// nothing here can split.
#ifndef WINNOW_BENCH_EVAL_LONGBENCH_H_
#define WINNOW_BENCH_EVAL_LONGBENCH_H_

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/eval_tasks.h"

namespace winnow::bench {

// Tasks in the order of lines; `task` is the dataset, target_tokens 0. Empty lines are skipped.
// InvalidArgument: "NAME:LINE: what is wrong", a dataset that is not known, or no task at all.
absl::StatusOr<std::vector<EvalTask>> ParseLongBench(std::string_view json_lines,
                                                     std::string_view name);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_LONGBENCH_H_
