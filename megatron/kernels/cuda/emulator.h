// The language of warp.h on a CPU. A register holds the values of 32 lanes, and a thread block runs its warps one after
// another in every phase. `faults()` counts errors, so that tests detect them even if the result is correct.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define KERNEL_CODE inline
#define UNROLL_FOR for
#define NO_UNROLL_FOR for
#define EACH_LANE for (int lane = 0; lane < 32; lane++)

// Counts of errors, which tests assert to be zero, and of the clocks of shared memory accesses.
struct Faults {
  long long races = 0;       // words written by one warp and accessed by another without a barrier in between
  long long unwritten = 0;   // words of shared memory that are read before they are written
  long long outside = 0;     // accesses outside of shared memory and of the registered arrays
  long long misaligned = 0;  // addresses that are not a multiple of the access size
  long long stuck = 0;       // barriers at which some warps wait while others have ended
  long long accesses = 0;    // clocks of shared memory accesses without bank conflicts
  long long clocks = 0;      // clocks of the same accesses with bank conflicts
};
inline Faults& faults() {
  static Faults counted;
  return counted;
}

template <class T>
struct Lanes {
  T v[32];
  Lanes() {}
  Lanes(T x) {
    for (auto& y : v) y = x;
  }
  template <class S>
  explicit Lanes(const Lanes<S>& x) {
    EACH_LANE v[lane] = (T)x.v[lane];
  }
};
typedef Lanes<float> f32;
typedef Lanes<uint32_t> u32;
typedef Lanes<int> i32;
typedef Lanes<bool> pred;

#define OPERATOR(R, op)                                        \
  template <class T>                                           \
  Lanes<R> operator op(const Lanes<T>& a, const Lanes<T>& b) { \
    Lanes<R> r;                                                \
    EACH_LANE r.v[lane] = a.v[lane] op b.v[lane];              \
    return r;                                                  \
  }                                                            \
  template <class T>                                           \
  Lanes<R> operator op(const Lanes<T>& a, T b) {               \
    return a op Lanes<T>(b);                                   \
  }                                                            \
  template <class T>                                           \
  Lanes<R> operator op(T a, const Lanes<T>& b) {               \
    return Lanes<T>(a) op b;                                   \
  }
// clang-format off
OPERATOR(T, +) OPERATOR(T, -) OPERATOR(T, *) OPERATOR(T, /) OPERATOR(T, %)
OPERATOR(T, &) OPERATOR(T, |) OPERATOR(T, ^) OPERATOR(T, <<) OPERATOR(T, >>)
OPERATOR(bool, <) OPERATOR(bool, <=) OPERATOR(bool, >) OPERATOR(bool, >=) OPERATOR(bool, ==) OPERATOR(bool, !=)
OPERATOR(bool, &&) OPERATOR(bool, ||)
#undef OPERATOR
template <class T>
Lanes<T>& operator+=(Lanes<T>& a, const Lanes<T>& b) {
  return a = a + b;
}
// clang-format on

inline i32 lane_id() {
  i32 r;
  EACH_LANE r.v[lane] = lane;
  return r;
}
template <class T>
Lanes<T> select(const pred& p, const Lanes<T>& a, const Lanes<T>& b) {
  Lanes<T> r;
  EACH_LANE r.v[lane] = p.v[lane] ? a.v[lane] : b.v[lane];
  return r;
}
template <class T>
Lanes<T> maximum(const Lanes<T>& a, const Lanes<T>& b) {
  return select(a < b, b, a);
}
template <class T>
Lanes<T> minimum(const Lanes<T>& a, const Lanes<T>& b) {
  return select(b < a, b, a);
}

inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline f32 as_f32(const u32& a) {
  f32 r;
  EACH_LANE r.v[lane] = float_of_bits(a.v[lane]);
  return r;
}
inline u32 as_u32(const f32& a) {
  u32 r;
  EACH_LANE r.v[lane] = bits_of_float(a.v[lane]);
  return r;
}
inline f32 exponential2(const f32& a) {
  f32 r;
  EACH_LANE r.v[lane] = std::exp2(a.v[lane]);
  return r;
}
inline f32 logarithm2(const f32& a) {
  f32 r;
  EACH_LANE r.v[lane] = std::log2(a.v[lane]);
  return r;
}
inline f32 multiply_subtract(const f32& a, const f32& b, const f32& c) {
  f32 r;
  EACH_LANE r.v[lane] = std::fma(a.v[lane], b.v[lane], -c.v[lane]);
  return r;
}
inline f32 exchange_lanes(const f32& a, int mask) {
  f32 r;
  EACH_LANE r.v[lane] = a.v[lane ^ mask];
  return r;
}
inline bool any_lane(const pred& p) {
  bool any = false;
  EACH_LANE any = any || p.v[lane];
  return any;
}
inline u32 shift_left(const u32& a, const i32& bits) {
  u32 r;
  EACH_LANE r.v[lane] = bits.v[lane] >= 0 && bits.v[lane] < 32 ? a.v[lane] << bits.v[lane] : 0;
  return r;
}

// Conversions to 16-bit numbers, rounded to nearest, ties to even.
inline uint32_t to_bf16(float x) {
  uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float of_bf16(uint32_t bits) { return float_of_bits(bits << 16); }
inline uint32_t to_float16(float x) {
  _Float16 half = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
// Saturates, but keeps NaN like cvt.satfinite, so that a value that was never written is found behind a zero weight.
inline uint32_t to_exchange(float x) {
  return x != x ? 0x7fff : to_float16(std::fmax(-65504.0f, std::fmin(65504.0f, x)));
}
// All float16 numbers as floats: without hardware support, a table is several times as fast as a conversion.
struct Float16Table {
  float v[1 << 16];
  Float16Table() {
    for (uint32_t bits = 0; bits < 1 << 16; bits++) {
      uint16_t narrow = (uint16_t)bits;
      _Float16 half;
      memcpy(&half, &narrow, 2);
      v[bits] = (float)half;
    }
  }
};
inline float of_exchange(uint32_t bits) {
  static const Float16Table table;
  return table.v[bits & 0xffff];
}
inline u32 pack_bf16(const f32& low, const f32& high) {
  u32 r;
  EACH_LANE r.v[lane] = to_bf16(low.v[lane]) | to_bf16(high.v[lane]) << 16;
  return r;
}
inline u32 pack_float16(const f32& low, const f32& high) {
  u32 r;
  EACH_LANE r.v[lane] = to_float16(low.v[lane]) | to_float16(high.v[lane]) << 16;
  return r;
}
inline u32 pack_exchange(const f32& low, const f32& high) {
  u32 r;
  EACH_LANE r.v[lane] = to_exchange(low.v[lane]) | to_exchange(high.v[lane]) << 16;
  return r;
}
inline f32 low_bf16(const u32& a) {
  f32 r;
  EACH_LANE r.v[lane] = of_bf16(a.v[lane] & 0xffff);
  return r;
}
inline f32 high_bf16(const u32& a) {
  f32 r;
  EACH_LANE r.v[lane] = of_bf16(a.v[lane] >> 16);
  return r;
}
inline f32 low_exchange(const u32& a) {
  f32 r;
  EACH_LANE r.v[lane] = of_exchange(a.v[lane] & 0xffff);
  return r;
}
inline f32 high_exchange(const u32& a) {
  f32 r;
  EACH_LANE r.v[lane] = of_exchange(a.v[lane] >> 16);
  return r;
}
inline u32 multiply_exchange(const u32& a, const u32& b) {
  return pack_exchange(low_exchange(a) * low_exchange(b), high_exchange(a) * high_exchange(b));
}
inline u32 maximum_exchange(const u32& a, const u32& b) {
  return pack_exchange(maximum(low_exchange(a), low_exchange(b)), maximum(high_exchange(a), high_exchange(b)));
}
inline u32 low_halves(const u32& a, const u32& b) {
  u32 r;
  EACH_LANE r.v[lane] = (a.v[lane] & 0xffff) | b.v[lane] << 16;
  return r;
}
inline u32 high_halves(const u32& a, const u32& b) {
  u32 r;
  EACH_LANE r.v[lane] = a.v[lane] >> 16 | (b.v[lane] & 0xffff0000u);
  return r;
}

// Adds the product of a [16, K] and b [K, 8] to d [16, 8]. Each sum is computed in double precision, in the order of k.
// The eight sums of a row are computed side by side, which is several times as fast as one after the other.
template <float (*CONVERT)(uint32_t), int K = 16>
__attribute__((noinline)) void multiply(f32 (&d)[4], const u32 (&a)[4], const u32& b0, const u32& b1) {
  typedef double Pair __attribute__((vector_size(16)));
  double left[16][K];
  Pair right[K][4];
  EACH_LANE {
    int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; half++) {
      auto number = [&](const u32& word) { return CONVERT(half ? word.v[lane] >> 16 : word.v[lane] & 0xffff); };
      for (int x = 0; x < K / 4; x++) left[g + 8 * (x % 2)][2 * t + 8 * (x / 2) + half] = number(a[x]);
      for (int x = 0; x < K / 8; x++) right[2 * t + 8 * x + half][g / 2][g % 2] = number(x ? b1 : b0);
    }
  }
  for (int i = 0; i < 16; i++) {
    float* sums[8];
    for (int j = 0; j < 8; j++) sums[j] = &d[2 * (i / 8) + j % 2].v[4 * (i % 8) + j / 2];
    Pair p = {*sums[0], *sums[1]}, q = {*sums[2], *sums[3]}, r = {*sums[4], *sums[5]}, s = {*sums[6], *sums[7]};
    for (int k = 0; k < K; k++) {
      Pair factor = {left[i][k], left[i][k]};
      p += factor * right[k][0];
      q += factor * right[k][1];
      r += factor * right[k][2];
      s += factor * right[k][3];
    }
    for (int x = 0; x < 2; x++) {
      *sums[x] = (float)p[x];
      *sums[2 + x] = (float)q[x];
      *sums[4 + x] = (float)r[x];
      *sums[6 + x] = (float)s[x];
    }
  }
}
inline void clear(f32 (&d)[4]) {
  for (auto& x : d) x = f32(0.0f);
}
inline void mma_bf16(f32 (&d)[4], const u32 (&a)[4], const u32& b0, const u32& b1) { multiply<of_bf16>(d, a, b0, b1); }
inline void mma_bf16_from_zero(f32 (&d)[4], const u32 (&a)[4], const u32& b0, const u32& b1) {
  clear(d);
  multiply<of_bf16>(d, a, b0, b1);
}
inline void mma_exchange(f32 (&d)[4], const u32 (&a)[4], const u32& b0, const u32& b1) {
  multiply<of_exchange>(d, a, b0, b1);
}
inline void mma_exchange_from_zero(f32 (&d)[4], const u32 (&a)[4], const u32& b0, const u32& b1) {
  clear(d);
  multiply<of_exchange>(d, a, b0, b1);
}
inline void mma_bf16_k8(f32 (&d)[4], const u32& a0, const u32& a1, const u32& b) {
  multiply<of_bf16, 8>(d, {a0, a1, u32(0u), u32(0u)}, b, u32(0u));
}
inline void mma_exchange_k8(f32 (&d)[4], const u32& a0, const u32& a1, const u32& b) {
  multiply<of_exchange, 8>(d, {a0, a1, u32(0u), u32(0u)}, b, u32(0u));
}
inline u32 settle(const u32& a) { return a; }
inline u32 transpose_8x8(const u32& a) {
  uint32_t matrix[8][8];
  EACH_LANE for (int half = 0; half < 2; half++) {
    matrix[lane / 4][2 * (lane % 4) + half] = half ? a.v[lane] >> 16 : a.v[lane] & 0xffff;
  }
  u32 r;
  EACH_LANE r.v[lane] = matrix[2 * (lane % 4)][lane / 4] | matrix[2 * (lane % 4) + 1][lane / 4] << 16;
  return r;
}

template <int N>
struct Words {
  u32 x[N];
};

// A thread block with its shared memory and its warps. Shared memory is initialized with NaN, and records which warps
// wrote and read each word since the last barrier. Each warp runs until it waits at a barrier.
class Block {
 public:
  explicit Block(size_t bytes)
      : words_(bytes / 4, 0x7fc07fc0u), writer_(bytes / 4, NEVER), reader_(bytes / 4, NOBODY) {}

  // Runs body(warp) for every warp, in the given order between two barriers.
  template <class Body>
  void run(int num_warps, const Body& body, bool backwards = false) {
    static std::vector<char*> stacks;  // shared by all blocks
    while ((int)stacks.size() < num_warps) stacks.push_back(new char[STACK_BYTES]);
    warps_.assign(num_warps, ucontext_t{});
    is_done_.assign(num_warps, false);
    copies_.assign(num_warps, {});
    current() = this;
    body_ = &body;
    run_body_ = [](const void* body, int warp) { (*(const Body*)body)(warp); };
    for (int i = 0; i < num_warps; i++) {
      getcontext(&warps_[i]);
      warps_[i].uc_stack.ss_sp = stacks[i];
      warps_[i].uc_stack.ss_size = STACK_BYTES;
      warps_[i].uc_link = &scheduler_;
      makecontext(&warps_[i], &Block::enter, 0);
    }
    for (int done = 0; done < num_warps;) {
      done = 0;
      int waiting = 0;
      for (int i = 0; i < num_warps; i++) {
        warp_ = backwards ? num_warps - 1 - i : i;
        if (!is_done_[warp_]) swapcontext(&scheduler_, &warps_[warp_]);
        done += is_done_[warp_];
        waiting += !is_done_[warp_];
      }
      faults().stuck += done > 0 && waiting > 0;
      for (int& writer : writer_)
        if (writer >= 0) writer = NOBODY;
      for (int& reader : reader_) reader = NOBODY;
    }
  }
  void wait() { swapcontext(&warps_[warp_], &scheduler_); }

  uint32_t read(int at) {
    if (!is_inside(at)) return 0;
    faults().unwritten += writer_[at] == NEVER;
    faults().races += writer_[at] >= 0 && writer_[at] != warp_;
    reader_[at] = reader_[at] == NOBODY || reader_[at] == warp_ ? warp_ : SEVERAL;
    return words_[at];
  }
  void write(int at, uint32_t word) {
    if (!is_inside(at)) return;
    faults().races += (writer_[at] >= 0 && writer_[at] != warp_) || (reader_[at] != NOBODY && reader_[at] != warp_);
    writer_[at] = warp_;
    words_[at] = word;
  }
  // Writes a word when the warp waits for its copies.
  void copy(int at, uint32_t word) { copies_[warp_].push_back({at, word}); }
  void finish_copies() {
    for (auto [at, word] : copies_[warp_]) write(at, word);
    copies_[warp_].clear();
  }
  // Lanes access memory in groups that request 32 words. A group takes as many clocks as its most requested bank has
  // distinct words.
  void count_clocks(const i32& offset, int num_words) {
    int lanes = 32 / num_words;
    for (int start = 0; start < 32; start += lanes) {
      int asked[32][32], num_asked[32] = {0}, most = 0;  // distinct words of each bank
      for (int lane = start; lane < start + lanes; lane++)
        for (int k = 0; k < num_words; k++) {
          int word = offset.v[lane] / 4 + k, bank = ((word % 32) + 32) % 32, known = 0;
          while (known < num_asked[bank] && asked[bank][known] != word) known++;
          if (known == num_asked[bank]) asked[bank][num_asked[bank]++] = word;
          if (num_asked[bank] > most) most = num_asked[bank];
        }
      faults().accesses++;
      faults().clocks += most;
    }
  }

 private:
  enum { NOBODY = -1, NEVER = -2, SEVERAL = -3, STACK_BYTES = 4 << 20 };
  static Block*& current() {
    static Block* block;
    return block;
  }
  static void enter() {
    Block* block = current();
    block->run_body_(block->body_, block->warp_);
    block->is_done_[block->warp_] = true;
  }
  bool is_inside(int at) {
    bool inside = at >= 0 && at < (int)words_.size();
    faults().outside += !inside;
    return inside;
  }
  std::vector<uint32_t> words_;
  std::vector<int> writer_, reader_;
  std::vector<ucontext_t> warps_;
  std::vector<bool> is_done_;
  std::vector<std::vector<std::pair<int, uint32_t>>> copies_;  // each warp's words on their way to shared memory
  ucontext_t scheduler_;
  const void* body_ = nullptr;
  void (*run_body_)(const void* body, int warp) = nullptr;
  int warp_ = 0;  // index of the running warp
};

struct SharedMemory {
  Block* block;
  int base;
};
inline void barrier(SharedMemory s) { s.block->wait(); }
inline SharedMemory advance(SharedMemory s, int bytes) { return SharedMemory{s.block, s.base + bytes}; }
template <int N>
Words<N> load_shared(SharedMemory s, i32 offset) {
  Words<N> v;
  EACH_LANE {
    offset.v[lane] += s.base;
    faults().misaligned += offset.v[lane] % (4 * N) != 0;
  }
  s.block->count_clocks(offset, N);
  for (int k = 0; k < N; k++) EACH_LANE v.x[k].v[lane] = s.block->read(offset.v[lane] / 4 + k);
  return v;
}
template <int N>
void store_shared(SharedMemory s, i32 offset, const Words<N>& v) {
  EACH_LANE {
    offset.v[lane] += s.base;
    faults().misaligned += offset.v[lane] % (4 * N) != 0;
  }
  s.block->count_clocks(offset, N);
  for (int k = 0; k < N; k++) EACH_LANE s.block->write(offset.v[lane] / 4 + k, v.x[k].v[lane]);
}

// Global memory: arrays that a test has registered. All other addresses are invalid.
struct Array {
  const char* begin;
  long long bytes;
};
inline std::vector<Array>& arrays() {
  static std::vector<Array> registered;
  return registered;
}
struct Address {
  const char* p;
  long long offset[32];
};
inline Address address(const void* base, const i32& offset) {
  Address a{(const char*)base, {}};
  EACH_LANE a.offset[lane] = offset.v[lane];
  return a;
}
inline Address advance(Address a, long long bytes) {
  EACH_LANE a.offset[lane] += bytes;
  return a;
}
inline Address advance_heads(Address a, const i32& head, long long stride) {
  EACH_LANE a.offset[lane] += head.v[lane] * stride;
  return a;
}
inline char* find_memory(const Address& a, int lane, int constant, int bytes) {
  const char* at = a.p + a.offset[lane] + constant;
  faults().misaligned += (uintptr_t)at % bytes != 0;
  for (const Array& array : arrays())
    if (at >= array.begin && at + bytes <= array.begin + array.bytes) return const_cast<char*>(at);
  faults().outside++;
  return nullptr;
}
template <int N>
Words<N> load_global(const Address& a, int constant) {
  Words<N> v;
  EACH_LANE {
    const char* at = find_memory(a, lane, constant, 4 * N);
    for (int k = 0; k < N; k++) {
      v.x[k].v[lane] = 0x7fc07fc0u;
      if (at != nullptr) memcpy(&v.x[k].v[lane], at + 4 * k, 4);
    }
  }
  return v;
}
template <int N>
void copy_to_shared(SharedMemory s, i32 offset, const Address& a, int constant) {
  Words<N> v = load_global<N>(a, constant);
  EACH_LANE {
    offset.v[lane] += s.base;
    faults().misaligned += offset.v[lane] % (4 * N) != 0;
  }
  s.block->count_clocks(offset, N);
  for (int k = 0; k < N; k++) EACH_LANE s.block->copy(offset.v[lane] / 4 + k, v.x[k].v[lane]);
}
inline void wait_for_copies(SharedMemory s) { s.block->finish_copies(); }
inline int load_uniform(const void* array, int index) {
  return (int)load_global<1>(address(array, i32(4 * index)), 0).x[0].v[0];
}
template <int N>
Words<N> load_global_once(const Address& a, int constant) {
  return load_global<N>(a, constant);
}
template <int N>
Words<N> request_global_once(const Address& a, int constant) {
  return load_global<N>(a, constant);
}
template <int N>
void store_global(const Address& a, int constant, const Words<N>& v, const pred& is_stored) {
  EACH_LANE if (is_stored.v[lane]) {
    char* at = find_memory(a, lane, constant, 4 * N);
    if (at != nullptr)
      for (int k = 0; k < N; k++) memcpy(at + 4 * k, &v.x[k].v[lane], 4);
  }
}
