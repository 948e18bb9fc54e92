// Division of CDAPE's work within a thread block.
//
// A block processes 32 query rows of a sequence with all heads, in tiles of 32 key columns with 8 warps, or of 16
// columns with 4 warps. If 32 rows of all heads do not fit in shared memory, or their output in registers, it processes
// 16 rows in tiles of 64 or 32 columns. Heads are padded to one or two groups of 16, and p = k//2 columns are read to
// either side.
//
// Registers hold the weights of a slice of the processor's width: 16 heads and 32 widths, 32 heads and 16 widths, or
// less with more taps. The width is padded to whole slices. The processor's contribution to the logits is a sum over
// its width, so a warp processes one slice after another, and each adds to the sums of the previous ones.
//
// Two divisions of a tile alternate, with a barrier between them:
// - by heads: a warp computes the scores of some head pairs for all rows, and for 16 columns (32 columns with 16 rows);
// - by pixels: a warp mixes all heads of 16 rows (row tile w / RUNS) and 8 columns (run w % RUNS).
// A product of the mixer has M = 16 rows at one column, K = heads or width, and N = width or heads. The taps of a
// convolution are therefore different registers, and the result of one product is an operand of the next.
//
// A tile that begins at column c computes the logits of its columns. Its hidden values are p columns further right, and
// its scores 2p columns, so that each is computed once. A prologue ("edge") computes the scores left of column 2p and
// the hidden values left of column p.
//
// Warps exchange words. A word contains the values of two heads, a pair, at a row and a column.
#pragma once
#include "elements.h"

template <int PADDING_, int COLUMNS_, int ROW_TILES_, int HEAD_DIM_, class Element_, bool LOCAL_, int HEADS_ = 16,
          int WIDTH_ = 32, bool GATED_ = false, bool LINEAR_ = false>
struct Geometry {
  typedef Element_ Element;                // type of queries, keys, values and gradients
  static constexpr bool LOCAL = LOCAL_;    // each row has its own first column, see spans.h
  static constexpr bool GATED = GATED_;    // the bias is a row term plus a column term, see gates.h
  static constexpr bool LINEAR = LINEAR_;  // no activation between both convolutions
  static constexpr bool HAS_PROLOGUE = !LOCAL && PADDING_ > 0;  // computes the values left of column 2p
  static constexpr bool HAS_EDGES = LOCAL || GATED;             // E may apply within tiles
  static constexpr int EDGE = GATED ? 4 * PADDING_ : PADDING_;  // columns of E
  static constexpr int FIRST_EDGE = GATED ? PADDING_ : 0;       // index among these of the first column that a row sees
  static constexpr int PADDING = PADDING_, TAPS = 2 * PADDING + 1, COLUMNS = COLUMNS_;
  static constexpr int ROW_TILES = ROW_TILES_, ROWS = 16 * ROW_TILES, RUNS = COLUMNS / 8, WARPS = ROW_TILES * RUNS;
  static constexpr int HEADS = HEADS_, PAIRS = HEADS / 2, WIDTH = WIDTH_;
  static constexpr int HEAD_DIM = HEAD_DIM_, ROW_BYTES = 2 * HEAD_DIM;
  // A product uses a group of 16 heads. Weights are stored by parts of the width: four n-tiles of 8 widths, or two with
  // 32 heads. Registers hold the weights of a slice, which is a part or, with seven taps, half of it.
  static constexpr int HEAD_GROUPS = HEADS / 16, PART_TILES = 4 / HEAD_GROUPS;
  static constexpr int N_TILES = TAPS > 5 ? PART_TILES / 2 : PART_TILES, SLICES = WIDTH / (8 * N_TILES);
  static constexpr int QUERY_BYTES = ROWS * HEADS * ROW_BYTES, WARP_ROWS = ROWS / WARPS;
  // With 16 rows, a warp computes scores for two groups of 16 columns at a time.
  static constexpr int GROUPS = 2 / ROW_TILES;
  static_assert(ROW_TILES == 1 || ROW_TILES == 2,
                "a warp computes scores of two row tiles, or of one with twice the columns");
  static_assert(COLUMNS == 16 || COLUMNS == 32 || COLUMNS == 64, "strides in shared memory are for these tiles");
  static_assert(WARPS == 4 || WARPS == 8, "heads are divided among 4 or 8 warps");
  static_assert(HEADS == 16 || HEADS == 32, "a part has as many weights with one group of heads as with two");
  static_assert(WIDTH % (8 * PART_TILES) == 0, "the width is a multiple of a part's");
  static_assert(!GATED || (HEADS == 16 && WIDTH == 32), "gates have terms of 32 widths of one group");
  static_assert(HEAD_DIM % 16 == 0, "a product takes 16 of a head's dimensions");

  // Loads a slice of a convolution's weights: COUNT B fragments of each tap, stored as [parts][taps][4][32 lanes][2].
  template <int COUNT>
  static KERNEL_CODE void load_weights(u32 (&weights)[TAPS][COUNT][2], const void* from, int slice) {
    static_assert(4 % COUNT == 0, "a slice does not cross parts");
    const int part = slice * COUNT / 4, first = slice * COUNT % 4;
    Address at = advance(address(from, lane_id() * 8), part * (TAPS * 1024) + first * 256);
    UNROLL_FOR (int tap = 0; tap < TAPS; tap++)
      UNROLL_FOR (int n = 0; n < COUNT; n++) {
        Words<2> words = load_global<2>(at, (tap * 4 + n) * 256);
        UNROLL_FOR (int x = 0; x < 2; x++) weights[tap][n][x] = words.x[x];
      }
  }
};
