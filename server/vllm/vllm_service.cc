#include "server/vllm/vllm_service.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "server/grpc_call.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/version.h"
#include "server/vllm/load_meter.h"
#include "server/vllm/tokenizer_archive.h"
#include "server/vllm/vllm_generate.h"
#include "server/vllm/vllm_kv_events.h"
#include "vllm_engine.grpc.pb.h"

namespace winnow::server {
namespace {

namespace pb = vllm::grpc::engine;
namespace common = smg::grpc::common;

constexpr size_t kChunkBytes = size_t{1} << 20;  // of the tokenizer's archive
constexpr int kMaxAborts = 1024;                 // names of one call

absl::Status Lacks(std::string_view what) {
  return ErrorWithReason(absl::StatusCode::kUnimplemented, "UNIMPLEMENTED", what);
}

// Sends the archive piece by piece; the last one has the checksum.
class ArchiveReactor final : public grpc::ServerWriteReactor<common::GetTokenizerChunk> {
 public:
  ArchiveReactor(const absl::Status& caller, const absl::StatusOr<std::string>& archive)
      : archive_(archive) {
    if (!caller.ok()) {
      Finish(ToGrpcStatus(caller));
    } else if (!archive_.ok()) {
      Finish(ToGrpcStatus(archive_.status()));
    } else {
      Next();
    }
  }
  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::CANCELLED);
    } else if (sent_ == archive_->size()) {
      Finish(grpc::Status::OK);
    } else {
      Next();
    }
  }
  void OnDone() override { delete this; }

 private:
  void Next() {
    const size_t bytes = std::min(kChunkBytes, archive_->size() - sent_);
    chunk_.set_data(archive_->substr(sent_, bytes));
    sent_ += bytes;
    if (sent_ == archive_->size()) chunk_.set_sha256(Sha256Hex(*archive_));
    StartWrite(&chunk_);
  }

  const absl::StatusOr<std::string>& archive_;  // the service's
  size_t sent_ = 0;
  common::GetTokenizerChunk chunk_;
};

// The model's generation_config.json, in the names of requests; empty where it says
// nothing.
std::string DefaultSamplingJson(const v1::SamplingOptions& defaults) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (defaults.temperature() != 0) json["temperature"] = defaults.temperature();
  if (defaults.top_k() != 0) json["top_k"] = defaults.top_k();
  if (defaults.has_top_p() && defaults.top_p() != 1) json["top_p"] = defaults.top_p();
  if (defaults.min_p() != 0) json["min_p"] = defaults.min_p();
  if (defaults.has_repetition_penalty() && defaults.repetition_penalty() != 1) {
    json["repetition_penalty"] = defaults.repetition_penalty();
  }
  return json.empty() ? "" : json.dump();
}

using Base = pb::VllmEngine::WithRawCallbackMethod_Generate<
    pb::VllmEngine::WithCallbackMethod_Embed<pb::VllmEngine::WithCallbackMethod_HealthCheck<
        pb::VllmEngine::WithCallbackMethod_FlushCache<
            pb::VllmEngine::WithCallbackMethod_StartProfile<
                pb::VllmEngine::WithCallbackMethod_StopProfile<
                    pb::VllmEngine::WithRawCallbackMethod_Abort<
                        pb::VllmEngine::WithCallbackMethod_GetModelInfo<
                            pb::VllmEngine::WithCallbackMethod_GetServerInfo<
                                pb::VllmEngine::WithCallbackMethod_GetLoads<
                                    pb::VllmEngine::WithCallbackMethod_GetTokenizer<
                                        pb::VllmEngine::WithCallbackMethod_SubscribeKvEvents<
                                            pb::VllmEngine::Service>>>>>>>>>>>>;

class Service final : public Base {
 public:
  Service(VllmModel model, InferenceService& inference, Generator& generator,
          std::function<engine::EngineStats()> stats, const engine::KvEventLog* kv_events)
      : model_(std::move(model)),
        end_tokens_(model_.description.eos_token_ids().begin(),
                    model_.description.eos_token_ids().end()),
        inference_(inference),
        generator_(generator),
        load_(std::move(stats), generator.clock(), model_.block_tokens, model_.max_running),
        started_(generator.clock().Now()),
        archive_(TokenizerArchive(model_.path)) {
    if (kv_events != nullptr) {
      streams_.emplace(*kv_events, load_, generator.clock(),
                       generator.options().slow_reader_timeout);
    }
  }

  void SetServing(bool serving) { serving_ = serving; }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override {
    last_receive_ = absl::ToUnixSeconds(absl::Now());
    return inference_.Generate(*context, *request, MakeVllmGenerateCodec(open_, end_tokens_));
  }

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override {
    pb::AbortRequest message;
    absl::Status status = ParseBuffer(*request, message);
    if (status.ok() && message.request_ids_size() > kMaxAborts) {
      status = InvalidField("request_ids", Concat("has ", message.request_ids_size(),
                                                  " names, may have at most ", kMaxAborts));
    }
    if (status.ok()) {
      const absl::StatusOr<std::string> tenant = inference_.callers().TenantOf(*context);
      status = tenant.status();
      // One that has ended meanwhile is no error.
      for (const std::string& name : message.request_ids()) {
        if (tenant.ok()) open_.Abort(*tenant, name);
      }
      *response = SerializeBuffer(pb::AbortResponse());
    }
    return Done(context, status);
  }

  grpc::ServerUnaryReactor* HealthCheck(grpc::CallbackServerContext* context,
                                        const pb::HealthCheckRequest*,
                                        pb::HealthCheckResponse* response) override {
    response->set_healthy(serving_);
    response->set_message(serving_ ? "serving" : "not serving");
    return Done(context);
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const pb::GetModelInfoRequest*,
                                         pb::GetModelInfoResponse* response) override {
    if (const absl::Status caller = CallerOf(*context); !caller.ok()) return Done(context, caller);
    const v1::GetModelResponse& model = model_.description;
    response->set_model_path(model.name());
    response->set_served_model_name(model.name());
    // No folder of the router's, and no name that it might look up elsewhere: it asks for the
    // tokenizer's files, and gets ours. Without any it has to know the model by its name.
    if (archive_.ok()) response->set_tokenizer_path(Concat("/dev/null/", model.name()));
    response->set_is_generation(true);
    response->set_max_context_length(static_cast<uint32_t>(model.max_context()));
    response->set_vocab_size(static_cast<uint32_t>(model.vocab_size()));
    response->set_model_type(model.architecture());
    response->add_architectures(model.architecture());
    *response->mutable_eos_token_ids() = model.eos_token_ids();
    response->set_pad_token_id(-1);
    response->set_bos_token_id(model_.bos_token_id);
    response->set_max_req_input_len(model.max_context() - 1);
    response->set_default_sampling_params_json(DefaultSamplingJson(model.default_sampling()));
    return Done(context);
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const pb::GetServerInfoRequest*,
                                          pb::GetServerInfoResponse* response) override {
    if (const absl::Status caller = CallerOf(*context); !caller.ok()) return Done(context, caller);
    response->set_active_requests(static_cast<uint32_t>(generator_.calls()));
    response->set_last_receive_timestamp(static_cast<double>(last_receive_.load()));
    response->set_uptime_seconds(
        std::chrono::duration<double>(generator_.clock().Now() - started_).count());
    response->set_server_type("winnow");
    response->set_data_parallel_size(1);
    response->set_kv_cache_dtype(model_.description.kv_dtype());
    response->set_model_dtype(model_.description.dtype());
    response->set_block_size(model_.block_tokens);
    response->set_max_num_seqs(model_.max_running);
    return Done(context);
  }

  grpc::ServerUnaryReactor* GetLoads(grpc::CallbackServerContext* context,
                                     const pb::GetLoadsRequest* request,
                                     pb::GetLoadsResponse* response) override {
    if (const absl::Status caller = CallerOf(*context); !caller.ok()) return Done(context, caller);
    response->set_timestamp(absl::FormatTime(absl::RFC3339_full, absl::Now(), absl::UTCTimeZone()));
    response->set_version(kVersion);
    response->set_dp_rank_count(1);
    if (request->has_dp_rank() && request->dp_rank() != 0) return Done(context);
    const Load load = load_.Now();
    pb::SchedulerLoad& out = *response->add_loads();
    out.set_num_running_reqs(load.running);
    out.set_num_waiting_reqs(load.waiting);
    out.set_num_total_reqs(load.running + load.waiting);
    out.set_num_used_tokens(static_cast<int32_t>(load.used_tokens));
    out.set_max_total_num_tokens(static_cast<int32_t>(load.total_tokens));
    out.set_token_usage(load.usage);
    out.set_gen_throughput(load.tokens_per_second);
    out.set_cache_hit_rate(load.hit_rate);
    out.set_utilization(load.utilization);
    out.set_max_running_requests(load.max_running);
    out.set_num_waiting_uncached_tokens(static_cast<int32_t>(load.waiting_tokens));
    return Done(context);
  }

  grpc::ServerWriteReactor<common::GetTokenizerChunk>* GetTokenizer(
      grpc::CallbackServerContext* context, const common::GetTokenizerRequest*) override {
    return new ArchiveReactor(CallerOf(*context), archive_);
  }

  grpc::ServerWriteReactor<common::KvEventBatch>* SubscribeKvEvents(
      grpc::CallbackServerContext* context,
      const common::SubscribeKvEventsRequest* request) override {
    if (!streams_.has_value()) {
      return RefuseKvEvents(Lacks("SubscribeKvEvents: the server runs with --kv-events off"));
    }
    const absl::StatusOr<std::string> tenant = inference_.callers().TenantOf(*context);
    if (!tenant.ok()) return RefuseKvEvents(tenant.status());
    return streams_->Start(*context, generator_.SaltOf(*tenant), *request);
  }

  // ---- what winnow lacks ----

  grpc::ServerUnaryReactor* Embed(grpc::CallbackServerContext* context, const pb::EmbedRequest*,
                                  pb::EmbedResponse*) override {
    return Done(context, Lacks("Embed: winnow generates, and makes no embeddings"));
  }
  grpc::ServerUnaryReactor* FlushCache(grpc::CallbackServerContext* context,
                                       const common::FlushCacheRequest*,
                                       common::FlushCacheResponse*) override {
    return Done(context, Lacks("FlushCache: winnow's prefix store cannot be flushed"));
  }
  grpc::ServerUnaryReactor* StartProfile(grpc::CallbackServerContext* context,
                                         const common::StartProfileRequest*,
                                         common::ProfileResponse*) override {
    return Done(context, Lacks("StartProfile: winnow has no profiler"));
  }
  grpc::ServerUnaryReactor* StopProfile(grpc::CallbackServerContext* context,
                                        const common::StopProfileRequest*,
                                        common::ProfileResponse*) override {
    return Done(context, Lacks("StopProfile: winnow has no profiler"));
  }

 private:
  // Everybody may ask after the server's health; for all else a caller is known, or nobody has to be.
  absl::Status CallerOf(const grpc::CallbackServerContext& context) const {
    return inference_.callers().TenantOf(context).status();
  }

  static grpc::ServerUnaryReactor* Done(grpc::CallbackServerContext* context,
                                        const absl::Status& status = absl::OkStatus()) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  const VllmModel model_;
  const std::vector<int32_t> end_tokens_;
  InferenceService& inference_;
  Generator& generator_;
  LoadMeter load_;
  const engine::TimePoint started_;
  const absl::StatusOr<std::string> archive_;
  OpenRequests open_;
  std::optional<KvEventStreams> streams_;  // none: --kv-events off
  std::atomic<bool> serving_ = false;
  std::atomic<int64_t> last_receive_ = 0;  // Unix seconds; 0: none yet
};

class Impl final : public VllmService {
 public:
  template <typename... Args>
  explicit Impl(Args&&... args) : service_(std::forward<Args>(args)...) {}
  grpc::Service& service() override { return service_; }
  void SetServing(bool serving) override { service_.SetServing(serving); }

 private:
  Service service_;
};

}  // namespace

std::unique_ptr<VllmService> MakeVllmService(VllmModel model, InferenceService& inference,
                                             Generator& generator,
                                             std::function<engine::EngineStats()> stats,
                                             const engine::KvEventLog* kv_events) {
  return std::make_unique<Impl>(std::move(model), inference, generator, std::move(stats),
                                kv_events);
}

}  // namespace winnow::server
