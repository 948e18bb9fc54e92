// How a thread block divides CDAPE's work, and where it keeps what its warps exchange.
//
// A block takes 32 query rows of a sequence and all heads, and goes over the key columns in tiles of 32, with 8 warps,
// or of 16, with 4. H ≤ 16 heads are padded to 16, the processor's width to 32, and p = k//2 columns are read to either
// side.
//
// Two ways to divide a tile alternate, with a barrier between them:
// - by heads: a warp computes the scores of 2 or 4 heads, in pairs, for all rows and columns;
// - by pixels: a warp mixes all heads of 16 rows (a row tile) and 8 columns (a run).
// A product of the mixer has M = 16 rows at one column, K = heads or width, N = width or heads, so that taps of a
// convolution are other registers, and the result of one product is an operand of the next.
//
// A tile that begins at column c computes logits of its columns. Its hidden values are p columns further right and its
// scores 2p, so that each is computed once; a prologue ("edge") makes the scores left of column 2p and the hidden
// values left of p.
#pragma once
#include "warp.h"

template <int PADDING_, int COLUMNS_>
struct Geometry {
  static constexpr int PADDING = PADDING_, TAPS = 2 * PADDING + 1, COLUMNS = COLUMNS_;
  static constexpr int ROW_TILES = 2, ROWS = 16 * ROW_TILES, RUNS = COLUMNS / 8, WARPS = ROW_TILES * RUNS;
  static constexpr int HEADS = 16, PAIRS = 8, WARP_PAIRS = PAIRS / WARPS, WIDTH = 32;
  static constexpr int HEAD_DIM = 64, ROW_BYTES = 2 * HEAD_DIM;
  static_assert(COLUMNS == 16 || COLUMNS == 32, "strides are for tiles of 16 or 32 columns");

  // A window holds a tile's words, each two heads of a row and a column: first the 2p columns before the tile's.
  // Strides leave no bank conflicts where lanes access 16 bytes, by rows and pairs or along a row; nor, in tiles of 32
  // columns, where they access 4 bytes by columns and halves of the pairs. Odd rows of tiles of 16 columns lie
  // ODD_ROWS words nearer to the row before.
  static constexpr int FIRST = COLUMNS / 4;  // where the tile's first column is
  static constexpr int PAIR_STRIDE = COLUMNS + FIRST, UPPER_PAIRS = COLUMNS == 32 ? 16 : 0;
  static constexpr int ROW_STRIDE = COLUMNS == 32 ? PAIRS * PAIR_STRIDE + UPPER_PAIRS + 4 : 178;
  static constexpr int ODD_ROWS = COLUMNS == 32 ? 0 : 2;
  static constexpr int WINDOW_BYTES = ROWS * ROW_STRIDE * 4;
  static constexpr int QUERY_BYTES = ROWS * HEADS * ROW_BYTES;

  // Byte offsets in a window.
  template <class T>
  static KERNEL_CODE T pair_offset(T pair) {
    return (pair * PAIR_STRIDE + pair / 4 * UPPER_PAIRS) * 4;
  }
  template <class T>
  static KERNEL_CODE T row_offset(T row) {
    return row * (ROW_STRIDE * 4) - row % 2 * (ODD_ROWS * 4);
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
        i32 from = offset + ((part % 2) * 8 * G::ROW_STRIDE * 4 +
                             (part / 2) * (4 * G::PAIR_STRIDE + G::UPPER_PAIRS) * 4 + x * 4);
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
