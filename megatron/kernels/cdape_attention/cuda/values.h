// Values as factors of a product with K = 16 columns, and rows of its result.
//
// A factor's word has two columns of one dimension. A lane therefore loads the same dimensions of four adjacent
// columns, those whose weights lane t has, and pairs them in its registers. A row is divided into spans of 64
// dimensions, followed by one of 32 and one of 16 if the dimensions require them. Lane g has 8, 4 or 2 adjacent
// dimensions of a span, one in each n-tile. Lane t of a result has the dimensions of lanes g = 2t and 2t + 1.
#pragma once
#include "geometry.h"

template <class G>
struct ValueSpans {
  static constexpr int WORDS = G::HEAD_DIM / 16;  // of each of the eight lanes
  static constexpr int WHOLE = G::HEAD_DIM / 64;
  static constexpr bool HAS_HALF = G::HEAD_DIM / 32 % 2 == 1, HAS_QUARTER = G::HEAD_DIM / 16 % 2 == 1;
  static constexpr int HALF = 4 * WHOLE, QUARTER = HALF + (HAS_HALF ? 2 : 0);  // first words
};

// A lane's dimensions of four adjacent columns.
template <class G>
struct ValueRows {
  typedef ValueSpans<G> Spans;
  u32 word[4][Spans::WORDS];

  // Loads the values of the group of columns that begins at `first`. MASKED: for columns outside of 0 … `last`, the
  // nearest values inside are loaded.
  template <bool MASKED>
  KERNEL_CODE void load(const void* values, long long head, int first, int last) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int y = 0; y < 4; y++) {
      i32 row = t * (4 * G::ROW_BYTES);
      long long begin = head + (long long)(first + y) * G::ROW_BYTES;
      if (MASKED) {
        row = minimum(maximum(t * 4 + (first + y), i32(0)), i32(last)) * G::ROW_BYTES;
        begin = head;
      }
      UNROLL_FOR (int z = 0; z < Spans::WHOLE; z++) read<4>(y, 4 * z, advance(address(values, row + g * 16), begin));
      if constexpr (Spans::HAS_HALF) read<2>(y, Spans::HALF, advance(address(values, row + g * 8), begin));
      if constexpr (Spans::HAS_QUARTER) read<1>(y, Spans::QUARTER, advance(address(values, row + g * 4), begin));
    }
  }

  // Returns a word of a factor: columns 0 and 1 (pair 0) or 2 and 3 (pair 1) in n-tile n.
  KERNEL_CODE u32 find(int n, int pair) const {
    const u32 &low = word[2 * pair][n / 2], &high = word[2 * pair + 1][n / 2];
    return n % 2 == 0 ? low_halves(low, high) : high_halves(low, high);
  }

 private:
  template <int N>
  KERNEL_CODE void read(int y, int first, Address lane_address) {
    Words<N> v = load_global_once<N>(lane_address, 32 * first);
    UNROLL_FOR (int x = 0; x < N; x++) word[y][first + x] = v.x[x];
  }
};

// A lane's dimensions of a row of the result, as words of n-tiles 2w and 2w + 1: those of lanes g = 2t
// (side 0) and 2t + 1 (side 1).
template <class G>
struct OutputRow {
  typedef ValueSpans<G> Spans;
  u32 word[2][Spans::WORDS];

  // Stores a row that begins `offset` bytes after `base` + `in_base`.
  KERNEL_CODE void store(void* base, long long in_base, i32 offset, pred is_stored) const {
    i32 t = lane_id() % 4;
    UNROLL_FOR (int z = 0; z < Spans::WHOLE; z++)
      UNROLL_FOR (int side = 0; side < 2; side++) {
        Words<4> v;
        UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = word[side][4 * z + x];
        store_global<4>(advance(address(base, offset + t * 32), in_base), 128 * z + 16 * side, v, is_stored);
      }
    if constexpr (Spans::HAS_HALF) {
      constexpr int W = Spans::HALF;
      Words<4> v{word[0][W], word[0][W + 1], word[1][W], word[1][W + 1]};
      store_global<4>(advance(address(base, offset + t * 16), in_base), 32 * W, v, is_stored);
    }
    if constexpr (Spans::HAS_QUARTER) {
      constexpr int W = Spans::QUARTER;
      Words<2> v{word[0][W], word[1][W]};
      store_global<2>(advance(address(base, offset + t * 8), in_base), 32 * W, v, is_stored);
    }
  }
};
