// Rates at which a multiprocessor issues single instructions from a number of warps. For GPUs only.
#pragma once

#include "warp.h"

enum Instruction { MATRIX_PRODUCT, TRANSPOSE, PACK, SHUFFLE, MULTIPLY_ADD, EXPONENTIAL, LOAD_4, LOAD_16 };

struct RateArgs {
  long long* clocks;  // clocks of each block
  float* sums;        // sums of each block, which use the results so that the compiler keeps the instructions
};

template <int WARPS_>
struct RateShape {
  static constexpr int WARPS = WARPS_, NUM_THREADS = 32 * WARPS, MEMORY_BYTES = 16384, BLOCKS_PER_SM = 1;
  static constexpr int CHAINS = 16, REPEATS = 256;  // number of independent instructions, and of repetitions of each
};

// COPIES: the loop contains each instruction so many times. Large loops do not fit the instruction caches.
template <Instruction KIND, int WARPS, int COPIES = 1>
struct InstructionRate : RateShape<WARPS> {
  using T = RateShape<WARPS>;

  static KERNEL_CODE void issue(f32 (&x)[4], f32 other, SharedMemory memory, i32 offset) {
    u32 word = as_u32(x[0]);
    if constexpr (KIND == MATRIX_PRODUCT) {
      const u32 a[4] = {as_u32(other), as_u32(other), as_u32(other), as_u32(other)};
      mma_bf16(x, a, as_u32(other), as_u32(other));
    } else if constexpr (KIND == TRANSPOSE) {
      x[0] = as_f32(transpose_8x8(word));
    } else if constexpr (KIND == PACK) {
      asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[0]), "f"(other));
      x[0] = as_f32(word);
    } else if constexpr (KIND == SHUFFLE) {
      asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, -1;" : "=r"(word) : "r"(word));
      x[0] = as_f32(word);
    } else if constexpr (KIND == MULTIPLY_ADD) {
      asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x[0]) : "f"(other));
    } else if constexpr (KIND == EXPONENTIAL) {
      asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[0]));
    } else {
      const u32 from = (u32)__cvta_generic_to_shared(memory.base) + offset;
      if constexpr (KIND == LOAD_4)
        asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=f"(x[0]) : "r"(from));
      else
        asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(from));
    }
  }

  static KERNEL_CODE void run(const RateArgs& args, SharedMemory memory, int warp, int, int, int block) {
    f32 x[T::CHAINS][4];
    const f32 other = lane_id() * 1e-3f;
    UNROLL_FOR(int chain = 0; chain < T::CHAINS; chain++) UNROLL_FOR(int i = 0; i < 4; i++) x[chain][i] = chain + other;
    const i32 offset = (32 * (warp % 8) + lane_id()) * 16;
    store_shared<4>(memory, offset, Words<4>{{1, 2, 3, 4}});
    barrier(memory);
    const long long start = clock64();
    NO_UNROLL_FOR(int repeat = 0; repeat < T::REPEATS; repeat += COPIES) {
      UNROLL_FOR(int copy = 0; copy < COPIES; copy++)
        UNROLL_FOR(int chain = 0; chain < T::CHAINS; chain++) issue(x[chain], other, memory, offset);
    }
    barrier(memory);
    const long long taken = clock64() - start;
    f32 sum = 0;
    UNROLL_FOR(int chain = 0; chain < T::CHAINS; chain++) UNROLL_FOR(int i = 0; i < 4; i++) sum += x[chain][i];
    if (threadIdx.x == 0) args.clocks[block] = taken;
    atomicAdd(args.sums + block, sum);
  }
};
