// Plain data that crosses from the service to the engine and back. No behaviour here.
#ifndef WINNOW_ENGINE_SCHEDULE_REQUEST_H_
#define WINNOW_ENGINE_SCHEDULE_REQUEST_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "engine/grammar/grammar.h"
#include "engine/kv/block_name.h"
#include "engine/kv/retention.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/retrieval_state.h"
#include "engine/text/message_format.h"

namespace winnow::engine {

using RequestId =
    uint64_t;  // given by the engine's owner, never by a client; unique in the process

struct SamplingOptions {
  float temperature = 0.0f;         // 0: greedy
  int32_t top_k = 0;                // 0: off
  float top_p = 1.0f;               // (0, 1]
  float min_p = 0.0f;               // [0, 1]
  float repetition_penalty = 1.0f;  // > 0; over prompt and generated tokens, as in transformers
  float presence_penalty = 0.0f;    // over generated tokens
  float frequency_penalty = 0.0f;   // over generated tokens
  std::vector<std::pair<int32_t, float>> logit_bias;  // (token id, added to its logit)
  uint64_t seed = 0;  // the same seed gives the same tokens, whatever else runs
};

struct StoppingOptions {
  int32_t max_tokens = 0;  // REQUIRES: >= 1
  int32_t min_tokens = 0;  // no stop token or string counts before this many
  std::vector<int32_t>
      stop_token_ids;  // the model's own end tokens included by the caller unless ignore_eos
  std::vector<std::string>
      stop_strings;  // UTF-8; the text ends before the match unless include_stop
  bool include_stop = false;
};

// How a request uses what is cached of prompts, and what becomes of its own.
struct CacheOptions {
  bool use = true;                     // false: everything is computed
  bool store = true;                   // false: nobody finds its KV, and the store keeps none of it
  uint8_t priority = kPriorityNormal;  // Retention::priority of its KV
  Duration ttl{};  // from each block's last use by such a request; zero: for good
  // Requests of the same salt alone share KV, among those of the tenant. "": one of its own.
  std::string salt = {};
};

struct Request {
  RequestId id = 0;
  std::string tenant;        // for fairness; "" is a tenant like any other
  double tenant_weight = 1;  // its share against other tenants'. REQUIRES: > 0
  // The most prompt tokens of its tenant that may wait, with this request's; 0: no bound but the queue's.
  int64_t tenant_waiting_tokens = 0;
  // The most bytes that the store may keep of KV under its salt; what this request adds beyond is not kept. 0: no bound.
  int64_t tenant_store_bytes = 0;
  // With whom it shares KV: requests of the same salt. Unset: with its tenant's.
  std::optional<Digest> salt;
  // False: nothing outside its call is to find its KV. The store does not keep it, and no router is told.
  bool keeps_prefix = true;
  CacheOptions cache;
  std::vector<int32_t> prompt;  // token ids, at least one, validated
  SamplingOptions sampling;
  StoppingOptions stopping;
  int32_t top_logprobs =
      -1;  // -1: no log-probabilities; else this many alternatives (0: the chosen token's only)
  // The same of the prompt's tokens but the first, each after those before it. Rows of logits that they come from are
  // computed, never taken from the prefix cache.
  int32_t prompt_logprobs = -1;
  bool skip_special_tokens = true;  // in the text; ids always come
  // Null: none. Else every control token shows in the text, between kControlBegin and kControlEnd, whatever
  // skip_special_tokens says; and stop strings are looked for in the texts of messages, not in headers, which the client
  // never sees.
  std::shared_ptr<const MessageFormat> message_format;
  AttentionPolicy policy;
  // The grammar of the answer; null: none. Its end tokens are among the stop tokens, and min_tokens is 0.
  std::shared_ptr<const Grammar> grammar;
  TimePoint arrival{};
  std::optional<TimePoint> deadline;
};

enum class FinishReason {
  kNone,
  kStopToken,
  kStopString,
  kMaxTokens,
  kCancelled,
  kDeadline,
  kError
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

struct OutputToken {
  int32_t token = 0;
  float logprob = 0;              // of the unmodified distribution; 0 unless asked for
  std::vector<TokenLogprob> top;  // most likely first
};

// A token of the prompt, rated.
struct ScoredToken {
  OutputToken token;
  int32_t rank = 0;  // among all tokens: 1 is the most likely
};

// KV bytes that were read: by attention, and brought from slower tiers for it.
struct KvReads {
  uint64_t fast = 0, host = 0, disk = 0;
  KvReads& operator+=(const KvReads& other);
};

// Counts of drafts and their worth. A verification brings a token more than it accepts of its draft.
struct DraftCounts {
  uint64_t drafted = 0;   // tokens, verified or not
  uint64_t verified = 0;  // of them, in a verification
  uint64_t accepted = 0;  // of those, part of the answer
  uint64_t verifications = 0;
  // By position in the draft: of drafts that were verified so far, and of them accepted.
  std::array<uint64_t, AttentionPolicy::kVerifyMax> verified_at = {}, accepted_at = {};
  // Both are also among all reads. What is left of those is of tokens that were decoded without a draft.
  KvReads draft_reads, verify_reads;
  DraftCounts& operator+=(const DraftCounts& other);
};

struct Usage {
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // of the prompt, not computed again
  int32_t generated_tokens = 0;
  int32_t preemptions = 0;
  // The KV counts below are of decode steps: every generated token but the first, which comes out
  // of the prompt's prefill; and of the prompt's last `suffix` tokens where a policy retrieves for
  // them. Tokens that are computed again after a preemption count once.
  uint64_t kv_read_bytes_fast = 0;  // KV rows that attention read while decoding
  // KV that was brought from slower tiers for the same steps: chosen rows, and whole blocks where
  // attention was dense. What attention read of it is in kv_read_bytes_fast as well.
  uint64_t kv_read_bytes_host = 0;
  uint64_t kv_read_bytes_disk = 0;
  uint64_t kv_dense_bytes = 0;     // what dense attention would have read for the same steps
  uint64_t attended_rows = 0;      // rows that were attended, over layers and KV heads
  RetrievalCounts retrieval;       // the same and more, in rows
  DraftCounts drafts;              // of policies with verify
  Duration queue_time{};           // arrival until first planned
  Duration time_to_first_token{};  // arrival until the first token was sampled
  Duration total_time{};           // arrival until the end
};

// News of a request, from the engine. Scores, text and tokens are what is new since the last event.
//
// Scores come before everything else, as the prompt is computed: those of its second token to its last, in order, each
// once.
//
// Text and tokens correspond: a token comes in the event that brings the last of the text it made
// certain (half a character: none), so after any event the texts so far belong to the tokens so
// far. While text is held back as the beginning of a stop string, its tokens are, too. The last event
// brings every remaining token, also those whose text a stop string cut away and the stop token
// itself; the number of tokens over all events is usage.generated_tokens.
struct OutputEvent {
  std::vector<ScoredToken> scores;  // under prompt_logprobs
  std::string text;                 // whole characters only
  std::vector<OutputToken> tokens;
  FinishReason finish = FinishReason::kNone;  // not kNone: this is the last event
  std::string stop_match;                     // the stop string that ended it
  // With kError, and with kCancelled when it was the engine that cancelled (a reader too slow, a
  // shutdown): what went wrong, fit for a client, and the code it should be told.
  std::string error;
  absl::StatusCode error_code = absl::StatusCode::kOk;
  Usage usage;  // complete in the last event
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_REQUEST_H_
