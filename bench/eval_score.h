// Scores of free answers, from 0 to 1, as the suites define them: RULER (Hsieh et al. 2024) and
// LongBench (Bai et al. 2024). Of several references the best counts, but for kMatchAll.
//
//   kMatchAll        share of the references that occur in the answer, whatever the case (RULER)
//   kMatchAny        1 if one of them does (RULER's questions about passages)
//   kQaF1            F1 of the words that answer and reference share, as often as both have them;
//                    without case, ASCII punctuation and the articles a, an, the
//   kRougeL          F1 of ROUGE-L over sentences, which end at full stops: of each reference sentence
//                    the words that lie on a longest common subsequence with any sentence of the
//                    answer, over the different words of reference and answer. That is what the
//                    package does whose figures LongBench reports (rouge 1.0.1)
//   kClassification  1/m if the answer names the reference, one of m classes that it names (a class
//                    whose name is part of the reference's is not counted); else 0
//   kRetrieval       of the numbers in the answer, the share equal to the reference's paragraph number
//   kCount           of the numbers in the answer, the share equal to the reference
//   kCodeSimilarity  2·LCS/(both lengths), in characters and whole per cent, of the reference and the
//                    answer's first line that holds no `, # or //
//
// Pure functions; any thread. Texts may be any bytes; what is not UTF-8 matches nothing.
#ifndef WINNOW_BENCH_EVAL_SCORE_H_
#define WINNOW_BENCH_EVAL_SCORE_H_

#include <string>
#include <string_view>

#include "bench/eval_tasks.h"

namespace winnow::bench {

// REQUIRES: the question has a scorer and references.
double ScoreAnswer(const EvalQuestion& question, std::string_view answer);

// Whether the score can no longer change, however the answer goes on.
bool ScoreIsFinal(const EvalQuestion& question, std::string_view answer);

// The expected answer in lower case, where the case is not to matter.
std::string LowerCase(std::string_view text);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_SCORE_H_
