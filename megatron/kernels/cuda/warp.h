// The language of this project's CUDA kernels: one source with two implementations.
//
// On a GPU a register is a value of one lane, and every function below is one or two instructions (device.h). On a CPU
// a register holds the values of all 32 lanes of a warp, and the instructions are emulated (emulator.h). Tests thus run
// the source that the GPU runs, and detect wrong results, reads of unwritten shared memory, accesses out of range, and
// missing barriers.
//
// Rules for code in this language:
// - Control flow is the same for all lanes of a warp. Lanes differ only by select() and predicates.
// - Arrays of registers are indexed by constants or by variables of unrolled loops.
// - A thread block runs a sequence of phases with barriers between them. Each phase is a function of one warp.
//
// Registers: f32, u32 and i32 are 32-bit values, pred is a condition. Words<N> are N consecutive 32-bit words. A word
// can contain two 16-bit numbers, the first in its low half. "Exchange" numbers, the scores and hidden values that
// warps exchange, are float16, clamped to its range. Their error is an eighth of that of bfloat16.
#pragma once

#ifdef __CUDACC__
#include "device.h"
#else
#include "emulator.h"
#endif

// Runs a kernel: a struct with NUM_THREADS, MEMORY_BYTES, BLOCKS_PER_SM (which bounds its registers) and run(args,
// memory, warp, block, num_blocks, batch). Blocks are numbered from the last, which has the most columns. In the grid's
// first dimension, equal blocks of all sequences are adjacent, so the longest blocks of all sequences start first.
#ifdef __CUDACC__
template <class Kernel, class Args>
__global__ void __launch_bounds__(Kernel::NUM_THREADS, Kernel::BLOCKS_PER_SM) launch_kernel(Args args) {
  extern __shared__ __align__(128) char memory[];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  Kernel::run(args, SharedMemory{memory}, warp, gridDim.y - 1 - blockIdx.y, gridDim.y, blockIdx.x);
}
#else
template <class Kernel, class Args>
void emulate_kernel(const Args& args, int num_blocks, int num_batches, bool backwards) {
  for (int batch = 0; batch < num_batches; batch++)
    for (int block = 0; block < num_blocks; block++) {
      Block memory(Kernel::MEMORY_BYTES);
      memory.run(
          Kernel::NUM_THREADS / 32,
          [&](int warp) { Kernel::run(args, SharedMemory{&memory, 0}, warp, block, num_blocks, batch); }, backwards);
    }
}
#endif
