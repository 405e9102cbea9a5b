// The contract of a backend: the operations from which engine/decoder.cc builds a forward pass, in groups that can be
// learned one at a time. Who needs one group alone takes that group:
//
//   DeviceOps     device_ops.h     memory, copies, and the order of work
//   ModelOps      model_ops.h      weights; rows of activations, each for itself
//   KvOps         kv_ops.h         rotation, KV blocks, attention over all of them
//   IndexOps      index_ops.h      what finds keys, made from KV        ┐
//   SelectionOps  selection_ops.h  which tokens a query reads           ├ retrieval.h has their data
//   RowOps        row_ops.h        attention over those, and estimates  ┘
//   SamplingOps   sampling_ops.h   the next token
//
// One Backend serves one process. Every call is made from the engine thread; a backend may use
// threads inside a call, never after it returns (the CPU) or orders work on its own stream (CUDA).
//
// Batch invariance. A row of a result depends on that row's inputs alone: not on how many other
// rows are in the call, nor on the number of threads, nor on how a prompt was cut into chunks. So
// a request yields the same tokens alone and among others. Each operation fixes its order of
// summation (said in its own header, X.h) and keeps it for every row count.
//
// Operations of more than six operands take them in a struct, XArgs, of named fields; it is read before the call returns.
#ifndef WINNOW_KERNELS_BACKEND_H_
#define WINNOW_KERNELS_BACKEND_H_

#include <memory>
#include <string>

#include "kernels/device_ops.h"
#include "kernels/index_ops.h"
#include "kernels/kv_ops.h"
#include "kernels/model_ops.h"
#include "kernels/row_ops.h"
#include "kernels/sampling_ops.h"
#include "kernels/selection_ops.h"

namespace winnow::kernels {

class Backend : public DeviceOps,
                public ModelOps,
                public KvOps,
                public IndexOps,
                public SelectionOps,
                public RowOps,
                public SamplingOps {
 public:
  virtual ~Backend() = default;
};

// The best CPU backend for this processor. `isa`: "auto", "amx", "avx512", "avx2", "scalar"; null if the
// processor lacks what was asked for. `num_threads` 0: as many as the processors this process may
// use.
std::unique_ptr<Backend> MakeCpuBackend(const std::string& isa, int num_threads);

// The first CUDA device (kernels/cuda/cuda_backend.h); null, and why in `why`, if there is none that
// can be used, or the program was built without CUDA.
// `graphs`: launches that repeat the last step's go as one CUDA graph (kernels/cuda/launch_log.h).
std::unique_ptr<Backend> MakeCudaBackend(bool graphs, std::string* why);

// Whether a CUDA kernel may be put on the device before the one ahead has ended (kernels/cuda/launch.cuh).
// At first it may. Of the whole process, for measuring what it gives: called while no backend works.
void LetCudaKernelsStartEarly(bool let);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_BACKEND_H_
