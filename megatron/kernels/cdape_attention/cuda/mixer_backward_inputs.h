// Inputs of the mixer's backward pass (`mixer_backward.h`): its arguments, and the scores and dL of a tile in shared
// memory.
#pragma once
#include "gates.h"
#include "scores.h"
#include "windows.h"

struct MixerBackwardArgs {
  ScoreInputs scores;
  const void* dlogits;  // words [R, 8 pairs, C]; columns that a row does not see are not read
  const void* table;    // U, exchange numbers [groups of 8 distances, D/16, 32 lanes, 2, 2, 2], see Tables::Distances
  const void* edge;     // E, float32 [R, p, D]
  const void* w1;       // B fragments of W1, exchange numbers [parts][k][4 n-tiles][32 lanes][2]
  const void* w2;       // B fragments of W2ᵀ, numbers of the model's type, same layout
  const void* w1_back;  // B fragments of W1ᵀ, same type [parts][k][2 k-steps][2 n-tiles][32 lanes][2]
  void* dscores;        // [H, R, C], written in the columns that a row sees
  void* dtables;        // float32 [programs, N', D + 16], initially 0: row i has dU[i - p] (D widths), dbias[i] (heads)
  void* dedge;          // float32 [R, p, D]
  void* dweights;       // float32 [programs, 2, k, D/8 n-tiles, 32 lanes, 4]: gradients of W1 and W2
  int table_group;      // group of the distance of row 0 and column p + 7
  int dtable_rows;
  // Bytes from one sequence to the next; `map_batch` applies to dlogits.
  long long q_batch, k_batch, map_batch, edge_batch, dscores_batch;
  // GATED: terms that replace the table. E and its gradient are [R, 4p, 32]. Row j of `dtables` [programs, C, 48]
  // belongs to the hidden values of column j + p and the logits of column j, with the channels of `drows` (see
  // GateSums).
  GateInputs gates;
  void* drows;  // float32 [R, 48]
  long long drows_batch;
};

// Position of a warp in its block, and the block's shared memory.
struct MixerBackwardContext {
  MixerBackwardArgs args;
  SharedMemory queries, scores, dlogits, sums, diagonals;
  int warp, first_row, slice;
  long long program;
  Tiles tiles;
  KERNEL_CODE int position() const { return args.scores.position + first_row; }
};

template <class G>
struct MixerBackwardInputs {
  typedef Scores<G, 8, true> S;
  typedef PairWindow<G> W;
  typedef MixerBackwardContext Context;
  static constexpr int PADDING = G::PADDING;

  // Loads scores and dL of a tile's columns. dL is copied while the scores are computed.
  template <bool MASKED>
  static KERNEL_CODE void load_tile(Context& c, int first) {
    if (!MASKED) load_dlogits<false>(c, first);
    compute_scores<MASKED>(c, first);
    if (MASKED) load_dlogits<true>(c, first);
    else wait_for_copies(c.dlogits);
  }

  // A warp loads dL of an equal share of the rows, for all heads.
  template <bool MASKED>
  static KERNEL_CODE void load_dlogits(Context& c, int first) {
    const long long columns = c.args.scores.columns;
    constexpr int LANES = G::COLUMNS / 2;  // lanes per row of a pair
    i32 lane = lane_id(), pair = lane / LANES, column = lane % LANES * 2;
    UNROLL_FOR (int r = 0; r < G::WARP_ROWS; r++) {
      const int row = G::WARP_ROWS * c.warp + r, in_map = c.first_row + row;
      const int bounded = in_map < c.args.scores.rows ? in_map : c.args.scores.rows - 1;
      const int last = in_map < c.args.scores.rows ? c.position() + row : -1;
      const int begin = MASKED && G::LOCAL ? c.args.scores.find_first(in_map) : 0;
      UNROLL_FOR (int part = 0; part < G::PAIRS; part += 32 / LANES) {
        i32 to = column * 4 + pair * (W::PAIR_STRIDE * 4) + (W::row_offset(row) + W::pair_offset(part) + W::FIRST * 4);
        if (MASKED) {
          i32 j = column + first, inside = minimum(maximum(j, i32(0)), i32((int)columns - 2));
          Address from = advance_heads(address(c.args.dlogits, inside * 4), pair, columns * 4);
          Words<2> v = load_global<2>(advance(from, ((long long)bounded * G::PAIRS + part) * columns * 4), 0);
          UNROLL_FOR (int x = 0; x < 2; x++) v.x[x] = select(j >= 0 && j + x <= last, v.x[x], u32(0u));
          if (G::LOCAL)
            UNROLL_FOR (int x = 0; x < 2; x++) v.x[x] = select(j + x >= begin, v.x[x], u32(0u));
          store_shared<2>(c.dlogits, to, v);
        } else {
          Address from = advance_heads(address(c.args.dlogits, column * 4), pair, columns * 4);
          copy_to_shared<2>(c.dlogits, to, advance(from, (((long long)in_map * G::PAIRS + part) * columns + first) * 4),
                            0);
        }
      }
    }
  }

  // Computes the scores of 32 columns and the one or two pairs of heads whose words the warp owns.
  static constexpr int PAIR_WARPS = G::WARPS / (G::COLUMNS / 32), OWNED_PAIRS = G::PAIRS / PAIR_WARPS;
  template <bool MASKED>
  static KERNEL_CODE void compute_scores(Context& c, int tile_first) {
    const ScoreInputs& in = c.args.scores;
    const int behind = c.warp / PAIR_WARPS * 32, first = tile_first + behind;
    UNROLL_FOR (int owned = 0; owned < OWNED_PAIRS; owned++) {
      const int pair = c.warp % PAIR_WARPS + owned * PAIR_WARPS;
      i32 lane = lane_id();
      i32 to = W::row_offset(lane / 4) + lane % 4 * 32 + (W::pair_offset(pair) + (W::FIRST + behind) * 4);
      typename S::Keys keys[2];
      UNROLL_FOR (int h = 0; h < 2; h++)
        if (MASKED) S::template load_keys_inside<ONCE>(keys[h], in, 2 * pair + h, first, in.columns - 1);
        else S::load_keys(keys[h], in, 2 * pair + h, first);
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++) {
        typename S::Sums sums[2];
        UNROLL_FOR (int h = 0; h < 2; h++) S::multiply(sums[h], keys[h], c.queries, 2 * pair + h, tile);
        u32 words[2][4][2];
        S::template pack<MASKED>(words, sums, in, c.first_row + 16 * tile, first);
        UNROLL_FOR (int block = 0; block < 2; block++)
          UNROLL_FOR (int r = 0; r < 2; r++) {
            Words<4> v;
            UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = words[block][x][r];
            store_shared<4>(c.scores, to + (W::row_offset(16 * tile + 8 * r) + S::block_column(block) * 4), v);
          }
      }
    }
  }

  // Copies the tile's last columns before the next tile: scores by pairs and dL by rows, as the warps own them.
  static KERNEL_CODE void keep_columns(Context& c) {
    if (owns_last_scores(c)) W::keep_last_columns(c.scores, c.warp % PAIR_WARPS);
    i32 at = locate_dlogits(c);
    UNROLL_FOR (int x = 0; x < 2 * PADDING; x += 2) {
      Words<2> v = load_shared<2>(c.dlogits, at + (G::COLUMNS + W::FIRST - 2 * PADDING + x) * 4);
      store_shared<2>(c.dlogits, at + (W::FIRST - 2 * PADDING + x) * 4, v);
    }
  }

  // Zeros the columns that `keep_columns` copies for the first tile.
  static KERNEL_CODE void clear_columns(Context& c) {
    if (owns_last_scores(c)) W::clear_last_columns(c.scores, c.warp % PAIR_WARPS);
    UNROLL_FOR (int x = G::COLUMNS - 2 * PADDING; x < G::COLUMNS; x += 2)
      store_shared<2>(c.dlogits, locate_dlogits(c) + (W::FIRST + x) * 4, Words<2>{u32(0u), u32(0u)});
  }
  static KERNEL_CODE bool owns_last_scores(const Context& c) { return c.warp / PAIR_WARPS == G::COLUMNS / 32 - 1; }
  // Offset of dL in the warp's rows. A lane has a row and a pair.
  static KERNEL_CODE i32 locate_dlogits(const Context& c) {
    i32 lane = lane_id();
    return W::row_offset(lane / 8 % G::WARP_ROWS + G::WARP_ROWS * c.warp) + W::pair_offset(lane % 8);
  }
};
