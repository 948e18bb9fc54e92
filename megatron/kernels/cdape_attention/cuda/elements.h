// The types of 16-bit numbers that kernels multiply and store: in pairs, a word, the first number in its low half.
#pragma once
#include "warp.h"

// Bfloat16, in models of that type.
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

// Float16, in models of that type. Numbers beyond its range become infinite, so that whoever scales the loss sees it.
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

// Float16 held within its range: what warps exchange.
struct Exchange {
  static KERNEL_CODE u32 pack(f32 low, f32 high) { return pack_exchange(low, high); }
};
