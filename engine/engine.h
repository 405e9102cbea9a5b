// The engine: requests in, tokens out. One thread calls Run (or, in tests, Step) and owns all
// state; any thread may Submit, Cancel, BeginDrain, Wake and read stats.
//
// Life of a request: Submit puts it into the bounded queue; a Step takes it over to the waiting;
// the scheduler admits it when a slot and KV blocks are there; its prompt is computed in chunks
// beside other sequences' decoding; tokens are sampled and pushed to its OutputQueue; it ends with
// exactly one event that has `finish` set, and its blocks are free when that event is visible. When
// blocks run out, the sequence admitted last loses its blocks and is computed again later, from its
// prompt and the tokens it has: the client sees a pause and the same tokens.
#ifndef WINNOW_ENGINE_ENGINE_H_
#define WINNOW_ENGINE_ENGINE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/clock.h"
#include "engine/engine_stats.h"
#include "engine/model.h"
#include "engine/output_queue.h"
#include "engine/request.h"
#include "engine/tokenizer.h"

namespace winnow::engine {

struct EngineOptions {
  int32_t max_running = 64;      // sequences; at most the model's max_batch_logits and step_tokens
  int32_t step_tokens = 512;     // tokens of one step; at most the model's max_batch_tokens
  int32_t queue_requests = 256;  // requests that wait, at most
  int64_t queue_tokens = 4 << 20;  // prompt tokens of requests that wait, at most
  // A sequence whose OutputQueue is full is paused. After `pause_grace` its blocks may be taken for
  // others that wait; after `slow_reader_timeout` it is cancelled.
  Duration pause_grace = std::chrono::seconds(1);
  Duration slow_reader_timeout = std::chrono::seconds(30);
};

class Engine {
 public:
  // `model`, `tokenizer`, `clock` and `observer` (may be null) must outlive the engine.
  // InvalidArgument: options that are out of range or that the model cannot honour, by name.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options, Model& model,
                                                        const Tokenizer& tokenizer,
                                                        const Clock& clock,
                                                        EngineObserver* observer = nullptr);
  // REQUIRES: no thread is in Run. Requests left end with kCancelled.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes the request into the queue. On OK the end will be told through `output`, exactly once; on
  // an error nothing is ever pushed. The request was validated by the service; what could break the
  // engine's memory or never fit is checked again here.
  //   InvalidArgument     no tokens, ids past the vocabulary; can never fit: prompt and max_tokens
  //                       exceed the context or the KV pool (with the numbers)
  //   ResourceExhausted   the queue is full, by requests or by tokens: retry after RetryAfter()
  //   Unavailable         draining, stopped, or the model failed
  absl::Status Submit(Request request, std::shared_ptr<OutputQueue> output);

  // Ends the request with kCancelled at the next Step, wherever it is. Unknown ids are ignored: the
  // request may have ended meanwhile.
  void Cancel(RequestId id);

  // From now on Submit refuses; what was accepted is finished. Run returns when nothing is left.
  void BeginDrain();

  // Makes an idle engine look again: an OutputQueue got room.
  void Wake();

  // How long a refused client should wait: the time that the waiting prompts take at the recent
  // pace, between 100 ms and 60 s.
  Duration RetryAfter() const;

  EngineStats stats() const;

  // Engine thread: steps until `stop` is requested, or until draining and nothing is left. Then
  // refuses new requests and ends those left with kCancelled.
  void Run(std::stop_token stop);

  // Engine thread: one step. True if it computed anything; false if there was nothing that could
  // run, so that the caller may wait.
  bool Step();

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_ENGINE_H_
