// The kernels of this folder on a CPU, for tests: `kernels/cuda/emulate.py` builds it.
#include "logit_gradient.h"
#include "mixer_backward.h"
#include "mixer_forward.h"

extern "C" void register_array(const void* begin, long long bytes) { arrays().push_back({(const char*)begin, bytes}); }
extern "C" void forget_arrays() {
  arrays().clear();
  faults() = Faults{};
}
extern "C" void get_faults(long long* counts) { memcpy(counts, &faults(), sizeof(Faults)); }

// A function for each kernel, named as `CudaKernel.name` reads without punctuation.
#define EMULATE(NAME, ARGS, ...)                                                           \
  extern "C" void NAME(const ARGS* args, int num_blocks, int num_batches, int backwards) { \
    emulate_kernel<__VA_ARGS__>(*args, num_blocks, num_batches, backwards);                \
  }                                                                                        \
  extern "C" int NAME##_memory_bytes() { return __VA_ARGS__::MEMORY_BYTES; }               \
  extern "C" int NAME##_num_threads() { return __VA_ARGS__::NUM_THREADS; }
#define EMULATE_ALL(LOCAL)                                                                             \
  EMULATE(MixerBackward_1_true_false_##LOCAL, MixerBackwardArgs, MixerBackward<1, true, false, LOCAL>) \
  EMULATE(MixerBackward_1_false_true_##LOCAL, MixerBackwardArgs, MixerBackward<1, false, true, LOCAL>) \
  EMULATE(MixerForward_1_16_##LOCAL, MixerForwardArgs, MixerForward<1, 16, LOCAL>)                     \
  EMULATE(MixerForward_1_32_##LOCAL, MixerForwardArgs, MixerForward<1, 32, LOCAL>)                     \
  EMULATE(LogitGradient_1_##LOCAL, LogitGradientArgs, LogitGradient<1, LOCAL>)
EMULATE_ALL(false)
EMULATE_ALL(true)
