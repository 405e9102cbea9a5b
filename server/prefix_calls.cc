#include "server/prefix_calls.h"

#include <chrono>
#include <utility>

#include "kernels/check.h"
#include "server/status.h"
#include "server/strings.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

constexpr size_t kMaxPrefixNameBytes = 128;

bool IsPrefixName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxPrefixNameBytes &&
         name.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == name.npos;
}

void CheckName(std::string_view name, Violations& violations) {
  if (!IsPrefixName(name)) violations.Add("name", "must be 1 to 128 of [A-Za-z0-9._-]");
}

void CheckTtl(int64_t seconds, Violations& violations) {
  if (seconds < 0 || seconds > kMaxTtlSeconds) {
    violations.Add("ttl_seconds", "must be 0 to 31536000");
  }
}

v1::Prefix ToProto(const engine::PrefixInfo& info) {
  v1::Prefix out;
  out.set_name(info.name);
  out.set_tokens(info.tokens);
  out.set_blocks(info.blocks);
  if (info.swept) {
    out.set_fast_blocks(info.fast_blocks);
    out.set_stored_blocks(info.stored_blocks);
    out.set_pinned_blocks(info.pinned_blocks);
  }
  out.set_pinned(info.pinned);
  if (info.left.has_value()) {
    out.set_expires_in_seconds(std::chrono::duration<double>(*info.left).count());
  }
  return out;
}

// The table's answer in the words of prefix.proto.
absl::Status FromTable(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return PrefixNotFound();
    case absl::StatusCode::kFailedPrecondition:
      return ErrorWithReason(status.code(), "PREFIX_CACHE_OFF",
                             "the server keeps no prefixes: it runs with --prefix-cache off");
    case absl::StatusCode::kResourceExhausted:
      return ErrorWithReason(status.code(), "TOO_MANY_PREFIXES", ToStd(status.message()));
    case absl::StatusCode::kInvalidArgument:
      return InvalidField("prompt", ToStd(status.message()));
    default:
      return status;
  }
}

absl::Status Stopped() {
  return ErrorWithReason(absl::StatusCode::kUnavailable, "DRAINING", "the server has stopped");
}

}  // namespace

absl::Status PrefixNotFound() {
  return ErrorWithReason(absl::StatusCode::kNotFound, "PREFIX_NOT_FOUND", "no such prefix");
}

PrefixCalls::~PrefixCalls() {
  const engine::MutexLock lock(mutex_);
  while (puts_ > 0) gone_.Wait(mutex_);
}

absl::Status PrefixCalls::CheckCaller(const CallInfo& info) const {
  if (!engine_.prefix_model().has_value()) return FromTable(absl::FailedPreconditionError(""));
  if (generator_.SharesPrefixes(info)) return absl::OkStatus();
  return ErrorWithReason(
      absl::StatusCode::kPermissionDenied, "TENANT_REQUIRED",
      "a named prefix belongs to a tenant, and this call has none: show a key or a certificate, or "
      "send x-winnow-tenant (--anonymous-prefixes)");
}

void PrefixCalls::Ask(Order order, Done done, bool changes) {
  if (orders_.fetch_add(1) >= kMaxOrders) {
    --orders_;
    return done(generator_.Busy());
  }
  const bool posted =
      engine_.Post([this, order = std::move(order), done,
                    changes](engine::PrefixTable* table) -> engine::EngineMailbox::Answer {
        PrefixResult result = table == nullptr ? PrefixResult(Stopped()) : order(*table);
        std::optional<std::vector<engine::SavedPrefix>> all;
        if (result.ok() && changes && file_.has_value()) all = table->Save();
        return [this, result = std::move(result), all = std::move(all), done] {
          Finish(result, all, done);
        };
      });
  if (posted) return;
  --orders_;
  done(generator_.Busy());
}

void PrefixCalls::Finish(PrefixResult result, std::optional<std::vector<engine::SavedPrefix>> all,
                         const Done& done) {
  const bool posted = writer_.Post([this, result = std::move(result), all = std::move(all), done] {
    absl::Status status = result.status();
    if (all.has_value()) {
      if (!file_->Save(*all).ok()) {
        status = ErrorWithReason(absl::StatusCode::kUnavailable, "STORE_FAILED",
                                 "the prefix holds until the server ends; it could not be "
                                 "written beside the store");
      }
    } else {
      status = FromTable(status);
    }
    --orders_;
    done(status.ok() ? result : PrefixResult(status));
  });
  WINNOW_CHECK(posted);  // orders_ bounds them
}

void PrefixCalls::List(const CallInfo& info, const v1::ListPrefixesRequest& request,
                       Answer<v1::ListPrefixesResponse> answer) {
  absl::Status status = CheckCaller(info);
  if (status.ok() && !request.name().empty()) {
    Violations violations;
    CheckName(request.name(), violations);
    status = violations.ToStatus();
  }
  if (!status.ok()) return answer(status);
  auto found = std::make_shared<std::vector<engine::PrefixInfo>>();
  Ask(
      [found, tenant = info.tenant](engine::PrefixTable& table) -> PrefixResult {
        *found = table.List(tenant);
        return engine::PrefixInfo();
      },
      [found, name = request.name(), answer = std::move(answer)](const PrefixResult& result) {
        if (!result.ok()) return answer(result.status());
        v1::ListPrefixesResponse out;
        for (const engine::PrefixInfo& info : *found) {
          if (name.empty() || name == info.name) *out.add_prefixes() = ToProto(info);
        }
        answer(std::move(out));
      },
      /*changes=*/false);
}

void PrefixCalls::Pin(const CallInfo& info, const v1::PinPrefixRequest& request,
                      Answer<v1::PinPrefixResponse> answer) {
  absl::Status status = CheckCaller(info);
  if (status.ok()) {
    Violations violations;
    CheckName(request.name(), violations);
    CheckTtl(request.ttl_seconds(), violations);
    status = violations.ToStatus();
  }
  if (!status.ok()) return answer(status);
  Ask(
      [request, tenant = info.tenant](engine::PrefixTable& table) {
        std::optional<bool> pinned;
        if (request.has_pinned()) pinned = request.pinned();
        std::optional<engine::Duration> ttl;
        if (request.has_ttl_seconds()) ttl = std::chrono::seconds(request.ttl_seconds());
        return table.Change(tenant, request.name(), pinned, ttl);
      },
      [answer = std::move(answer)](const PrefixResult& result) {
        if (!result.ok()) return answer(result.status());
        v1::PinPrefixResponse out;
        *out.mutable_prefix() = ToProto(*result);
        answer(std::move(out));
      },
      /*changes=*/true);
}

void PrefixCalls::Delete(const CallInfo& info, const v1::DeletePrefixRequest& request,
                         Answer<v1::DeletePrefixResponse> answer) {
  absl::Status status = CheckCaller(info);
  if (status.ok()) {
    Violations violations;
    CheckName(request.name(), violations);
    status = violations.ToStatus();
  }
  if (!status.ok()) return answer(status);
  Ask(
      [request, tenant = info.tenant](engine::PrefixTable& table) -> PrefixResult {
        const absl::Status deleted = table.Delete(tenant, request.name());
        return deleted.ok() ? PrefixResult(engine::PrefixInfo()) : PrefixResult(deleted);
      },
      [answer = std::move(answer)](const PrefixResult& result) {
        if (!result.ok()) return answer(result.status());
        answer(v1::DeletePrefixResponse());
      },
      /*changes=*/true);
}

// ---- a prefix on its way: ids, then a generation of one token, then the name ----

std::shared_ptr<PrefixCalls::Put> PrefixCalls::StartPut(v1::PutPrefixRequest request, CallInfo info,
                                                        size_t bytes,
                                                        Answer<v1::PutPrefixResponse> answer) {
  auto put = std::make_shared<Put>(*this, std::move(request), std::move(info), std::move(answer));
  if (absl::Status status = put->Begin(bytes); !status.ok()) put->End(status);
  return put;
}

PrefixCalls::Put::Put(PrefixCalls& calls, v1::PutPrefixRequest request, CallInfo info,
                      Answer<v1::PutPrefixResponse> answer)
    : calls_(calls),
      tenant_(info.tenant),
      request_(std::move(request)),
      info_(std::move(info)),
      answer_(std::move(answer)) {
  const engine::MutexLock lock(calls_.mutex_);
  ++calls_.puts_;
}

PrefixCalls::Put::~Put() {
  const engine::MutexLock lock(calls_.mutex_);
  if (--calls_.puts_ == 0) calls_.gone_.NotifyAll();
}

void PrefixCalls::Put::Cancel() {
  std::shared_ptr<Generation> generation;
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    generation = generation_;
  }
  if (generation != nullptr) generation->Cancel();
}

void PrefixCalls::Put::Close() {
  std::shared_ptr<Generation> generation;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    generation = std::move(generation_);
  }
  if (generation != nullptr) generation->Close();
}

absl::Status PrefixCalls::Put::Begin(size_t bytes) {
  if (!info_->refused.ok()) return info_->refused;
  if (absl::Status status = calls_.CheckCaller(*info_); !status.ok()) return status;
  Violations violations;
  CheckName(request_.name(), violations);
  CheckTtl(request_.ttl_seconds(), violations);
  if (request_.prompt_case() == v1::PutPrefixRequest::PROMPT_NOT_SET) {
    violations.Add("prompt", "one of text, tokens and chat must be set");
  }
  if (absl::Status status = violations.ToStatus(); !status.ok()) return status;
  if (request_.has_tokens()) {
    Generate();
    return absl::OkStatus();
  }
  v1::TokenizeRequest prompt;
  if (request_.has_text()) *prompt.mutable_text() = request_.text();
  if (request_.has_chat()) {
    *prompt.mutable_chat() = request_.chat();
    if (!prompt.chat().has_add_generation_prompt()) {
      prompt.mutable_chat()->set_add_generation_prompt(false);
    }
  }
  const Validator& validator = calls_.generator_.validator();
  if (absl::Status status = validator.CheckTokenize(prompt); !status.ok()) return status;
  auto work = std::make_shared<v1::TokenizeRequest>(std::move(prompt));
  const bool posted = calls_.generator_.PostTokenizing(
      bytes,
      [self = shared_from_this(), work, &validator] {
        absl::StatusOr<std::vector<int32_t>> ids = validator.TokenizePrompt(*work);
        if (!ids.ok()) return self->End(ids.status());
        self->request_.mutable_tokens()->mutable_ids()->Assign(ids->begin(), ids->end());
        self->Generate();
      },
      tenant_);
  return posted ? absl::OkStatus() : calls_.generator_.Busy();
}

// The request has its ids.
void PrefixCalls::Put::Generate() {
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
  }
  v1::GenerateRequest message;
  *message.mutable_tokens() = request_.tokens();
  message.mutable_stopping()->set_max_tokens(1);
  message.mutable_stopping()->set_ignore_eos(true);
  message.mutable_sampling()->set_temperature(0);
  message.set_policy("dense");
  auto generation = calls_.generator_.Start(std::move(message), *std::exchange(info_, {}),
                                            [self = shared_from_this()] { self->Pump(); });
  bool cancelled = false, closed = false;
  {
    absl::MutexLock lock(&mutex_);
    closed = closed_;
    cancelled = cancelled_;
    if (!closed) generation_ = generation;
  }
  if (closed || cancelled) generation->Cancel();
  if (closed) return generation->Close();
  Pump();
}

void PrefixCalls::Put::Pump() {
  std::optional<absl::Status> end;
  {
    absl::MutexLock lock(&mutex_);
    if (generation_ == nullptr || ended_) return;
    while (!end.has_value()) {
      Generation::Item item = generation_->Take();
      if (auto* message = std::get_if<v1::GenerateResponse>(&item)) {
        if (message->has_finish()) usage_ = message->finish().usage();
      } else if (auto* last = std::get_if<Generation::End>(&item)) {
        end = std::move(last->status);
      } else {
        return;
      }
    }
    ended_ = true;
  }
  if (!end->ok()) return End(*end);
  Name();
}

void PrefixCalls::Put::Name() {
  calls_.Ask(
      [self = shared_from_this()](engine::PrefixTable& table) {
        const v1::PutPrefixRequest& request = self->request_;
        const auto& ids = request.tokens().ids();
        return table.Put(
            self->tenant_, request.name(), {ids.data(), static_cast<size_t>(ids.size())},
            request.pinned(),
            request.ttl_seconds() == 0
                ? std::nullopt
                : std::optional<engine::Duration>(std::chrono::seconds(request.ttl_seconds())),
            self->calls_.generator_.SaltOf(self->tenant_));
      },
      [self = shared_from_this()](const PrefixResult& result) {
        if (!result.ok()) return self->End(result.status());
        v1::PutPrefixResponse answer;
        *answer.mutable_prefix() = ToProto(*result);
        *answer.mutable_usage() = self->usage_;
        self->End(std::move(answer));
      },
      /*changes=*/true);
}

void PrefixCalls::Put::End(absl::StatusOr<v1::PutPrefixResponse> result) {
  Answer<v1::PutPrefixResponse> answer;
  {
    absl::MutexLock lock(&mutex_);
    answer = std::exchange(answer_, nullptr);
  }
  if (answer) answer(std::move(result));
}

}  // namespace winnow::server
