// What gRPC's core hands from thread to thread, as ThreadSanitizer can see it. Linked into programs
// of the tsan preset only.
//
// A streaming call's operations are prepared by whichever thread writes, and finished by a thread of
// the core. Both halves are inline functions of gRPC's headers and so are instrumented, as part of
// our program; the core between them, which orders the two, is a packaged library and is not. Each
// operation then looks like a race between its start and its end. Here its start releases the
// operation's tag and its end acquires it: the order that the core's completion queue gives, and no
// other. (Without gRPC in the program none of this is called.)
#include <dlfcn.h>
#include <grpc/grpc.h>

// The function that runs when an operation of the callback API ends:
// grpc::internal::CallbackWithSuccessTag::StaticRun, which is private.
__attribute__((weak)) void RunSuccessTag(grpc_completion_queue_functor* tag, int ok) __asm__(
    "_ZN4grpc8internal22CallbackWithSuccessTag9StaticRunEP29grpc_completion_queue_functori");

extern "C" {

void __tsan_acquire(void* address);
void __tsan_release(void* address);

static void AcquireAndRun(grpc_completion_queue_functor* tag, int ok) {
  __tsan_acquire(tag);
  RunSuccessTag(tag, ok);
}

grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t count, void* tag,
                                      void* reserved) {
  using StartBatch = decltype(&grpc_call_start_batch);
  static const auto start = reinterpret_cast<StartBatch>(dlsym(RTLD_NEXT, "grpc_call_start_batch"));
  // Tags of other kinds are no functors: their first word is something else, and they stay as they are.
  auto* functor = static_cast<grpc_completion_queue_functor*>(tag);
  if (RunSuccessTag != nullptr && functor != nullptr && functor->functor_run == RunSuccessTag) {
    functor->functor_run = AcquireAndRun;
  }
  if (tag != nullptr) __tsan_release(tag);
  return start(call, ops, count, tag, reserved);
}

}  // extern "C"
