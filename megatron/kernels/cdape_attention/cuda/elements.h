// Types of the 16-bit numbers that kernels multiply and store. A word contains two, the first in its low half.
#pragma once
#include "warp.h"

// Numbers of bfloat16 models.
struct Bfloat16 {
  static constexpr uint32_t ONE = 0x3f80;
  static KERNEL_CODE u32 pack(f32 low, f32 high) { return pack_bf16(low, high); }
  static KERNEL_CODE f32 low(u32 word) { return low_bf16(word); }
  static KERNEL_CODE f32 high(u32 word) { return high_bf16(word); }
  static KERNEL_CODE void multiply(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
  static KERNEL_CODE void multiply_from_zero(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_bf16_from_zero(d, a, b0, b1);
  }
  static KERNEL_CODE void multiply_k8(f32 (&d)[4], u32 a0, u32 a1, u32 b) { mma_bf16_k8(d, a0, a1, b); }
  static KERNEL_CODE u32 from_exchange(u32 word) { return pack_bf16(low_exchange(word), high_exchange(word)); }
};

// Numbers of float16 models. Values beyond the range become infinite, so that the loss scaler detects them.
struct Float16 {
  static constexpr uint32_t ONE = 0x3c00;
  static KERNEL_CODE u32 pack(f32 low, f32 high) { return pack_float16(low, high); }
  static KERNEL_CODE f32 low(u32 word) { return low_exchange(word); }
  static KERNEL_CODE f32 high(u32 word) { return high_exchange(word); }
  static KERNEL_CODE void multiply(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_exchange(d, a, b0, b1); }
  static KERNEL_CODE void multiply_from_zero(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_exchange_from_zero(d, a, b0, b1);
  }
  static KERNEL_CODE void multiply_k8(f32 (&d)[4], u32 a0, u32 a1, u32 b) { mma_exchange_k8(d, a0, a1, b); }
  static KERNEL_CODE u32 from_exchange(u32 word) { return word; }
};

// Numbers that warps exchange: float16, clamped to its range.
struct Exchange {
  static KERNEL_CODE u32 pack(f32 low, f32 high) { return pack_exchange(low, high); }
};
