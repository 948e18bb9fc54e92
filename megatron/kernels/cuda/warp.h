// The language in which CUDA kernels of this project are written: one source with two meanings.
//
// On a GPU a register is a value of one lane, and every function below is one instruction or two (device.h). Compiled
// by a C++ compiler for a CPU, a register holds the values of all 32 lanes of a warp, and the instructions are emulated
// (emulator.h), so that tests run the source that the GPU runs and find wrong results, reads of unwritten shared
// memory, accesses out of range, and missing barriers.
//
// Rules for code in this language:
// - Control flow is the same for all lanes of a warp. What differs between lanes goes through select() and predicates.
// - Arrays of registers are indexed by constants or by variables of unrolled loops.
// - A thread block is a sequence of phases, each a function of one warp, with a barrier between two of them.
//
// Registers: f32, u32 and i32 are 32-bit values, pred is a condition. Words<N> are N consecutive 32-bit words.
// A word can hold two 16-bit numbers, the first in its low half. "Exchange" numbers are float16: scores and hidden
// values, which warps exchange, have an error eight times smaller than in bfloat16; they are clamped to its range.
#pragma once

#ifdef __CUDACC__
#include "device.h"
#else
#include "emulator.h"
#endif

// Runs a kernel: a struct with NUM_THREADS, MEMORY_BYTES, BLOCKS_PER_SM (which bounds its registers) and
// run(args, memory, warp, block, num_blocks, batch). Blocks are counted from the last, which has the most columns to go
// over, and those of all sequences stand side by side in the grid's first dimension, so that the longest blocks of all
// sequences begin first.
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
