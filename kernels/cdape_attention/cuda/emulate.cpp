// The kernels of this folder on a CPU, for tests: `kernels/cuda/emulate.py` builds it.
#include "mixer_backward.h"

extern "C" void register_array(const void* begin, long long bytes) { arrays().push_back({(const char*)begin, bytes}); }
extern "C" void forget_arrays() {
  arrays().clear();
  faults() = Faults{};
}
extern "C" void get_faults(long long* counts) { memcpy(counts, &faults(), sizeof(Faults)); }
extern "C" void mixer_backward(const MixerBackwardArgs* args, int weights, int num_blocks, int num_batches,
                               int backwards) {
  if (weights) emulate_kernel<MixerBackward<1, false, true>>(*args, num_blocks, num_batches, backwards);
  else emulate_kernel<MixerBackward<1, true, false>>(*args, num_blocks, num_batches, backwards);
}
extern "C" int get_memory_bytes(int weights) {
  return weights ? MixerBackward<1, false, true>::MEMORY_BYTES : MixerBackward<1, true, false>::MEMORY_BYTES;
}
