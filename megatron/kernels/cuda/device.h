// The language of warp.h on a GPU: PTX ISA 8.1, compute capability 8.0 and later. NVRTC needs no header.
#pragma once

#define KERNEL_CODE __device__ __forceinline__
#define UNROLL_FOR _Pragma("unroll") for
#define NO_UNROLL_FOR _Pragma("unroll 1") for

typedef unsigned int uint32_t;
typedef float f32;
typedef uint32_t u32;
typedef int i32;
typedef bool pred;

template <int N>
struct Words {
  u32 x[N];
};
template <int N>
struct VectorOf;
template <>
struct VectorOf<1> {
  typedef unsigned int type;
};
template <>
struct VectorOf<2> {
  typedef uint2 type;
};
template <>
struct VectorOf<4> {
  typedef uint4 type;
};

KERNEL_CODE i32 lane_id() { return threadIdx.x & 31; }
KERNEL_CODE f32 select(pred p, f32 a, f32 b) { return p ? a : b; }
KERNEL_CODE u32 select(pred p, u32 a, u32 b) { return p ? a : b; }
KERNEL_CODE i32 select(pred p, i32 a, i32 b) { return p ? a : b; }
KERNEL_CODE f32 maximum(f32 a, f32 b) { return fmaxf(a, b); }
KERNEL_CODE i32 maximum(i32 a, i32 b) { return a > b ? a : b; }
KERNEL_CODE i32 minimum(i32 a, i32 b) { return a < b ? a : b; }
KERNEL_CODE f32 as_f32(u32 a) { return __uint_as_float(a); }
KERNEL_CODE u32 as_u32(f32 a) { return __float_as_uint(a); }
KERNEL_CODE f32 exponential2(f32 a) {
  f32 value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
KERNEL_CODE f32 logarithm2(f32 a) {
  f32 value;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
// Returns a·b - c, rounded once.
KERNEL_CODE f32 multiply_subtract(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, -c); }
// Returns the value of the lane whose index differs in the bits of `mask`.
KERNEL_CODE f32 exchange_lanes(f32 a, int mask) { return __shfl_xor_sync(~0u, a, mask); }
// True if the condition holds for any lane; control flow may depend on it.
KERNEL_CODE bool any_lane(pred p) { return __any_sync(~0u, p); }
// Returns a · 2^bits, or 0 if `bits` is not in 0 … 31.
KERNEL_CODE u32 shift_left(u32 a, i32 bits) {
  u32 word;
  asm("shl.b32 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(bits));
  return word;
}

// Pairs of 16-bit numbers.
KERNEL_CODE u32 pack_bf16(f32 low, f32 high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
KERNEL_CODE f32 low_bf16(u32 word) { return __uint_as_float(word << 16); }
KERNEL_CODE f32 high_bf16(u32 word) { return __uint_as_float(word & 0xffff0000u); }
KERNEL_CODE u32 pack_float16(f32 low, f32 high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
KERNEL_CODE u32 pack_exchange(f32 low, f32 high) {
  u32 word;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
KERNEL_CODE u32 multiply_exchange(u32 a, u32 b) {
  u32 word;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}
KERNEL_CODE u32 maximum_exchange(u32 a, u32 b) {
  u32 word;
  asm("max.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}
KERNEL_CODE f32 low_exchange(u32 word) {
  f32 value;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(word));
  return value;
}
KERNEL_CODE f32 high_exchange(u32 word) {
  f32 value;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(word));
  return value;
}
KERNEL_CODE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
KERNEL_CODE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Matrix products of a warp, m16n8k16: d += a·b, or d = a·b. Layouts are those of mma.sync in the PTX manual.
#define MMA(NAME, TYPE)                                                                      \
  KERNEL_CODE void NAME(f32(&d)[4], const u32(&a)[4], u32 b0, u32 b1) {                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                      \
                 ".f32 "                                                                     \
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                     \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));            \
  }                                                                                          \
  KERNEL_CODE void NAME##_from_zero(f32(&d)[4], const u32(&a)[4], u32 b0, u32 b1) {          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                      \
                 ".f32 "                                                                     \
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"                 \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f)); \
  }
MMA(mma_bf16, "bf16")
MMA(mma_exchange, "f16")
#undef MMA
// Matrix products with K = 8.
#define MMA_K8(NAME, TYPE)                                             \
  KERNEL_CODE void NAME(f32(&d)[4], u32 a0, u32 a1, u32 b) {           \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE \
                 ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"   \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])      \
                 : "r"(a0), "r"(a1), "r"(b));                          \
  }
MMA_K8(mma_bf16_k8, "bf16")
MMA_K8(mma_exchange_k8, "f16")
#undef MMA_K8

// Copies a word by a separate instruction. The compiler copies a fragment whose words were loaded by different
// instructions to adjacent registers before every product that reads it; copies made here stay in adjacent registers.
// Grids have one block in their third dimension, which the compiler cannot know.
KERNEL_CODE u32 settle(u32 a) {
  u32 d;
  asm("or.b32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(blockIdx.z));
  return d;
}

// Transposes an 8 × 8 matrix of 16-bit numbers: lane 4g + t holds columns 2t and 2t + 1 of row g.
KERNEL_CODE u32 transpose_8x8(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// Shared memory: a base common to all lanes, and an offset of each lane in bytes, a multiple of the access size.
struct SharedMemory {
  char* base;
};
KERNEL_CODE void barrier(SharedMemory) { __syncthreads(); }
KERNEL_CODE SharedMemory advance(SharedMemory s, int bytes) { return SharedMemory{s.base + bytes}; }
template <int N>
KERNEL_CODE Words<N> load_shared(SharedMemory s, i32 offset) {
  typedef typename VectorOf<N>::type Vector;
  Words<N> v;
  *(Vector*)v.x = *(const Vector*)(s.base + offset);
  return v;
}
template <int N>
KERNEL_CODE void store_shared(SharedMemory s, i32 offset, Words<N> v) {
  typedef typename VectorOf<N>::type Vector;
  *(Vector*)(s.base + offset) = *(Vector*)v.x;
}

// Global memory: a lane's address, to which loads and stores add a constant. Loaded values must not change meanwhile.
struct Address {
  const char* p;
};
KERNEL_CODE Address address(const void* base, i32 offset) { return Address{(const char*)base + offset}; }
KERNEL_CODE Address advance(Address a, long long bytes) { return Address{a.p + bytes}; }
KERNEL_CODE Address advance_heads(Address a, i32 head, long long stride) { return Address{a.p + head * stride}; }
template <int N>
KERNEL_CODE Words<N> load_global(Address a, int constant) {
  typedef typename VectorOf<N>::type Vector;
  Words<N> v;
  *(Vector*)v.x = __ldg((const Vector*)(a.p + constant));
  return v;
}
// Copies words from global to shared memory without registers. The warp that copies them may read them after
// `wait_for_copies`, other warps after the next barrier.
template <int N>
KERNEL_CODE void copy_to_shared(SharedMemory s, i32 offset, Address a, int constant) {
  static_assert(N == 2, "other sizes have other instructions");
  const unsigned to = (unsigned)__cvta_generic_to_shared(s.base + offset);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(a.p + constant) : "memory");
}
KERNEL_CODE void wait_for_copies(SharedMemory) { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Loads a number for all lanes; control flow may depend on it.
KERNEL_CODE int load_uniform(const void* array, int index) { return __ldg((const int*)array + index); }
// Loads words that the multiprocessor does not read again, so that the L1 cache keeps others.
template <int N>
KERNEL_CODE Words<N> load_global_once(Address a, int constant) {
  Words<N> v;
  const char* from = a.p + constant;
  if constexpr (N == 1) asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(v.x[0]) : "l"(from));
  else if constexpr (N == 2)
    asm("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(v.x[0]), "=r"(v.x[1]) : "l"(from));
  else
    asm("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
        : "l"(from));
  return v;
}
// Loads such words without being moved past a barrier. If registers are scarce, the compiler would otherwise delay the
// load until just before its use.
template <int N>
KERNEL_CODE Words<N> request_global_once(Address a, int constant) {
  Words<N> v;
  const char* from = a.p + constant;
  if constexpr (N == 2)
    asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
                 : "=r"(v.x[0]), "=r"(v.x[1])
                 : "l"(from)
                 : "memory");
  else
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
                 : "l"(from)
                 : "memory");
  return v;
}
// Stores words that the multiprocessor does not read again.
template <int N>
KERNEL_CODE void store_global(Address a, int constant, Words<N> v, pred is_stored) {
  // In PTX, because the compiler would turn the condition into branches.
  const char* to = a.p + constant;
  if constexpr (N == 1)
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.L1::no_allocate.b32 [%0], %1;}" ::"l"(to),
                 "r"(v.x[0]), "r"((int)is_stored)
                 : "memory");
  else if constexpr (N == 2)
    asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p st.global.L1::no_allocate.v2.b32 [%0], {%1, %2};}" ::"l"(to),
                 "r"(v.x[0]), "r"(v.x[1]), "r"((int)is_stored)
                 : "memory");
  else
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
        "r"(v.x[0]), "r"(v.x[1]), "r"(v.x[2]), "r"(v.x[3]), "r"((int)is_stored)
        : "memory");
}
