// Runs a kernel of this folder on a CPU, for tests. `tests/support/cuda_emulator.py` builds it and defines
// KERNEL_HEADER, KERNEL and KERNEL_ARGUMENTS as the kernel's header, name and arguments.
#include KERNEL_HEADER

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void register_array(const void* begin, long long bytes) { arrays().push_back({(const char*)begin, bytes}); }
EXPORTED void forget_arrays() { arrays().clear(); }
EXPORTED void forget_counts() { faults() = Faults{}; }
EXPORTED void get_faults(long long* counts) { memcpy(counts, &faults(), sizeof(Faults)); }

typedef KERNEL Kernel;
EXPORTED void launch(const KERNEL_ARGUMENTS* args, int num_blocks, int num_batches, int backwards) {
  emulate_kernel<Kernel>(*args, num_blocks, num_batches, backwards);
}
EXPORTED int memory_bytes() { return Kernel::MEMORY_BYTES; }
EXPORTED int num_threads() { return Kernel::NUM_THREADS; }
