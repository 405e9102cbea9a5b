// winnow.v1.PrefixService without a transport: gRPC (prefix_service.h) and HTTP (http/prefix_routes.h) are thin over it, so
// that both have one set of rules. A prefix is computed as a request of one token, so that the tenant's quotas, its share
// of the queue and the call's deadline hold for it; then the engine thread gives it its name (prefix_table.h).
//
// Each change of names is written to a file before it is answered, on a thread of its own, in the order in which the engine
// thread did it.
//
// Threads: any may call; an answer comes on any, perhaps within the call, and once in any case.
#ifndef WINNOW_SERVER_PREFIX_CALLS_H_
#define WINNOW_SERVER_PREFIX_CALLS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/base/mutex.h"
#include "engine/schedule/engine.h"
#include "server/executor.h"
#include "server/generator.h"
#include "server/prefix_file.h"
#include "winnow/v1/prefix.pb.h"

namespace winnow::server {

// NOT_FOUND, as every front end says it.
absl::Status PrefixNotFound();

class PrefixCalls {
 public:
  template <typename Response>
  using Answer = std::function<void(absl::StatusOr<Response>)>;

  // Both must outlive the calls. Without a `file` names end with the process.
  PrefixCalls(Generator& generator, engine::Engine& engine, std::optional<PrefixFile> file)
      : generator_(generator), engine_(engine), file_(std::move(file)) {}
  // After the transports, and after the engine has stopped. Waits for what still computes.
  ~PrefixCalls();

  // A prefix on its way.
  class Put;
  // The caller must Close what it gets. `bytes`: of the request, on the wire. `info.refused`: the answer, if it is not OK.
  std::shared_ptr<Put> StartPut(v1::PutPrefixRequest request, CallInfo info, size_t bytes,
                                Answer<v1::PutPrefixResponse> answer);

  void List(const CallInfo& info, const v1::ListPrefixesRequest& request,
            Answer<v1::ListPrefixesResponse> answer);
  void Pin(const CallInfo& info, const v1::PinPrefixRequest& request,
           Answer<v1::PinPrefixResponse> answer);
  void Delete(const CallInfo& info, const v1::DeletePrefixRequest& request,
              Answer<v1::DeletePrefixResponse> answer);

  Generator& generator() { return generator_; }

 private:
  using PrefixResult = absl::StatusOr<engine::PrefixInfo>;
  using Order = std::function<PrefixResult(engine::PrefixTable&)>;
  using Done = std::function<void(PrefixResult)>;
  // Answers of the engine thread that are not written down yet, and orders on their way to it.
  static constexpr int kMaxOrders = 512;

  // FailedPrecondition: there is no prefix cache. PermissionDenied: an anonymous caller, whose KV nobody finds again.
  absl::Status CheckCaller(const CallInfo& info) const;
  // Lets the engine thread do it, writes down what there is then if it `changes` something, and says so.
  void Ask(Order order, Done done, bool changes);
  void Finish(PrefixResult result, std::optional<std::vector<engine::SavedPrefix>> all,
              const Done& done);

  Generator& generator_;
  engine::Engine& engine_;
  const std::optional<PrefixFile> file_;
  std::atomic<int> orders_ = 0;
  engine::Mutex mutex_;
  engine::CondVar gone_;
  int puts_ ABSL_GUARDED_BY(mutex_) = 0;  // that exist
  Executor writer_{1, kMaxOrders + 1};    // last: joined while the rest is there
};

class PrefixCalls::Put final : public std::enable_shared_from_this<PrefixCalls::Put> {
 public:
  Put(PrefixCalls& calls, v1::PutPrefixRequest request, CallInfo info,
      Answer<v1::PutPrefixResponse> answer);
  ~Put();

  // The client wants it no more; the answer says so, if it has not come.
  void Cancel();
  // Once: nobody waits any more, whether the answer has come or not.
  void Close();

 private:
  friend class PrefixCalls;

  absl::Status Begin(size_t bytes);
  void Generate();
  void Pump();
  void Name();
  void End(absl::StatusOr<v1::PutPrefixResponse> result);

  PrefixCalls& calls_;
  const std::string tenant_;
  v1::PutPrefixRequest request_;
  v1::Usage usage_;
  absl::Mutex mutex_;
  std::optional<CallInfo> info_;  // until the generation has it
  Answer<v1::PutPrefixResponse> answer_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Generation> generation_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_PREFIX_CALLS_H_
