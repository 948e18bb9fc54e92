// How a thread block of 8 warps divides CDAPE's work, and where it keeps what its warps exchange.
//
// A block takes 32 query rows of a sequence and all heads, and goes over the key columns in tiles of 32. H ≤ 16 heads
// are padded to 16, the processor's width to 32, and p = k//2 columns are read to either side.
//
// Two ways to divide a tile alternate, with a barrier between them:
// - by heads: warp w computes the scores of heads 2w and 2w + 1 (a "pair") for all rows and columns;
// - by pixels: warp w mixes all heads of 16 rows (row tile w / 4) and a run of 8 columns (run w % 4).
// A product of the mixer has M = 16 rows at one column, K = heads or width, N = width or heads, so that taps of a
// convolution are other registers, and the result of one product is an operand of the next.
//
// Tile c computes logits of the columns [32c, 32c + 32). Its hidden values are p columns further right and its scores
// 2p, so that each is computed once; a prologue ("edge") makes the scores left of column 2p and the hidden values left
// of p.
#pragma once
#include "warp.h"

template <int PADDING_>
struct Geometry {
  static constexpr int PADDING = PADDING_, TAPS = 2 * PADDING + 1;
  static constexpr int WARPS = 8, ROWS = 32, COLUMNS = 32, RUNS = COLUMNS / 8, HEADS = 16, PAIRS = 8, WIDTH = 32;
  static constexpr int HEAD_DIM = 64, ROW_BYTES = 2 * HEAD_DIM;

  // A window holds a tile's words, each two heads of a row and a column: first the 2p columns before the tile's.
  // Pairs are 8 banks apart, rows 20 and the upper four pairs another 16, so that accesses of 16 bytes, by rows and
  // pairs, and of 4 bytes, by columns and halves of the pairs, have no bank conflicts.
  static constexpr int FIRST = 8;  // where the tile's first column is
  static constexpr int PAIR_STRIDE = COLUMNS + FIRST, ROW_STRIDE = PAIRS * PAIR_STRIDE + 16 + 4;
  static constexpr int WINDOW_BYTES = ROWS * ROW_STRIDE * 4;
  static constexpr int QUERY_BYTES = ROWS * HEADS * ROW_BYTES;

  // What the mixer returns for the tile's columns, in words of the same kind; behind them what each run has for the
  // first 2p columns of the next, which the reader adds.
  static constexpr int SUM_PAIR_STRIDE = (COLUMNS + 2 * PADDING * RUNS - 8 + 31) / 32 * 32 + 8;
  static constexpr int SUM_ROW_STRIDE = PAIRS * SUM_PAIR_STRIDE + 4;
  static constexpr int SUM_BYTES = ROWS * SUM_ROW_STRIDE * 4;

  // Byte offsets in a window.
  template <class T>
  static KERNEL_CODE T pair_offset(T pair) {
    return (pair * PAIR_STRIDE + pair / 4 * 16) * 4;
  }
  template <class T>
  static KERNEL_CODE T row_offset(T row) {
    return row * (ROW_STRIDE * 4);
  }
};

// A convolution's operands at a column: words of rows (g, g + 8) and pairs (t, t + 4), as an A fragment of a product.
template <class G>
struct Window {
  static constexpr int LENGTH = 8 + 2 * G::PADDING;
  u32 column[LENGTH][4];

  // The offset of the first column that a run reads, for the row and the pair of a lane.
  static KERNEL_CODE i32 locate(int row_tile, int run) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    return G::row_offset(g + 16 * row_tile) + G::pair_offset(t) + (8 * run + G::FIRST - 2 * G::PADDING) * 4;
  }

  // Loads columns FROM ... TO - 1.
  template <int FROM, int TO>
  KERNEL_CODE void load(SharedMemory window, i32 offset) {
    UNROLL_FOR (int x = FROM; x < TO;) {
      constexpr int SKEW = G::FIRST - 2 * G::PADDING;
      const bool is_wide = (SKEW + x) % 4 == 0 && x + 4 <= TO;
      UNROLL_FOR (int part = 0; part < 4; part++) {
        i32 from = offset + ((part % 2) * 8 * G::ROW_STRIDE * 4 + (part / 2) * (4 * G::PAIR_STRIDE + 16) * 4 + x * 4);
        if (is_wide) {
          Words<4> v = load_shared<4>(window, from);
          UNROLL_FOR (int y = 0; y < 4; y++) column[(x + y) % LENGTH][part] = settle(v.x[y]);
        } else {
          Words<2> v = load_shared<2>(window, from);
          UNROLL_FOR (int y = 0; y < 2; y++) column[(x + y) % LENGTH][part] = settle(v.x[y]);
        }
      }
      x += is_wide ? 4 : 2;
    }
  }
};
