// Logits of CDAPE's attention for a block's query rows: computes them (`logits.h`) and stores them, for sizes that
// `attention.h` does not support and for a map after the softmax.
#pragma once
#include "logits.h"

struct MixerForwardArgs {
  LogitInputs inputs;
  void* logits;                              // float32 [H, R, C], written where a row sees a column
  long long q_batch, k_batch, logits_batch;  // bytes from one sequence to the next
};

// Stores logits. A warp stores an equal share of a tile's rows; in tiles of 64 columns, twice that share and half of
// the columns. A lane stores 4 columns of a pair of heads, then those of the pair PAIRS_AT_ONCE further, and so on.
template <class G>
struct StoreLogits {
  typedef Logits<G, false> L;
  typedef typename L::R R;
  typedef typename L::Context Context;
  static constexpr int PARTS = G::COLUMNS == 64 ? 2 : 1, CHUNKS = G::COLUMNS / PARTS / 4, PAIRS_AT_ONCE = 32 / CHUNKS;
  static constexpr int HEADS_AT_ONCE = 2 * PAIRS_AT_ONCE, WARP_ROWS = G::WARP_ROWS * PARTS;
  static_assert(!G::GATED, "the bias is read by distance");
  void* map;
  Address logits[2];  // next tile, in the warp's first row, for both heads of the lane's pair

  static KERNEL_CODE i32 find_pair() {
    i32 place = lane_id() / CHUNKS;
    return CHUNKS == 8 ? place : place % 2 * 4 + place / 2;  // avoids bank conflicts
  }
  // First row of the warp, and index of the lane's four columns in a tile.
  static KERNEL_CODE int find_row(int warp) { return WARP_ROWS * (warp / PARTS); }
  static KERNEL_CODE i32 find_chunk(int warp) { return lane_id() % CHUNKS + CHUNKS * (warp % PARTS); }
  KERNEL_CODE void begin(const Context& c) {
    const long long row_bytes = (long long)c.in.scores.columns * 4, head_bytes = c.in.scores.rows * row_bytes;
    Address rows = advance(address(map, find_chunk(c.warp) * 16),
                           (c.first_row + find_row(c.warp)) * row_bytes + c.tiles.first * (G::COLUMNS * 4));
    UNROLL_FOR (int h = 0; h < 2; h++)
      logits[h] = advance(advance_heads(rows, find_pair() * 2, head_bytes), h * head_bytes);
  }

  template <bool MASKED>
  KERNEL_CODE void take(const Context& c, int first) {
    const int first_row = find_row(c.warp);
    const long long row_bytes = (long long)c.in.scores.columns * 4, head_bytes = c.in.scores.rows * row_bytes;
    i32 chunk = find_chunk(c.warp), pair = find_pair();
    // The bias begins 4 distances below that of the first row and the lane's first column.
    const int distance = c.position() + first_row - first - 4 + c.in.bias_front;
    Address biases = address(c.in.bias, pair * (8 * c.in.bias_stride) + chunk * -16);
    UNROLL_FOR (int turn = 0; turn < G::PAIRS / PAIRS_AT_ONCE; turn++) {
      f32 bias[2][WARP_ROWS + 4];
      Address to[2];
      UNROLL_FOR (int h = 0; h < 2; h++) {
        const long long entry = (long long)(HEADS_AT_ONCE * turn + h) * c.in.bias_stride + distance;
        Address from = advance(biases, entry * 4);
        UNROLL_FOR (int x = 0; x < WARP_ROWS + 4; x += 4) {
          Words<4> v = load_global<4>(from, x * 4);
          UNROLL_FOR (int y = 0; y < 4; y++) bias[h][x + y] = as_f32(v.x[y]);
        }
        to[h] = advance(logits[h], HEADS_AT_ONCE * turn * head_bytes);
      }
      UNROLL_FOR (int r = 0; r < WARP_ROWS; r++) {
        const int row = first_row + r;
        i32 at = pair * (R::PAIR_STRIDE * 4) + (R::row_offset(row) + PAIRS_AT_ONCE * turn * R::PAIR_STRIDE * 4);
        f32 sums[2][4];
        L::load(sums, c.sums, at, chunk);
        UNROLL_FOR (int h = 0; h < 2; h++) {
          Words<4> v;
          UNROLL_FOR (int y = 0; y < 4; y++) v.x[y] = as_u32(sums[h][y] + bias[h][4 + r - y]);
          pred is_stored = pair * 2 + (HEADS_AT_ONCE * turn + h) < c.in.scores.heads;
          if (MASKED)
            is_stored = is_stored && chunk * 4 + first <= c.position() + row && c.first_row + row < c.in.scores.rows;
          if (MASKED && G::LOCAL) is_stored = is_stored && chunk * 4 + first >= 0;
          store_global<4>(to[h], 0, v, is_stored);
          to[h] = advance(to[h], row_bytes);
        }
      }
    }
    UNROLL_FOR (int h = 0; h < 2; h++) logits[h] = advance(logits[h], G::COLUMNS * 4);
  }
};

template <class G>
struct MixerForward {
  typedef Logits<G, false> L;
  static constexpr int NUM_THREADS = L::NUM_THREADS, MEMORY_BYTES = L::MEMORY_BYTES;
  static constexpr int BLOCKS_PER_SM = 8 / G::WARPS;

  static KERNEL_CODE void run(MixerForwardArgs args, SharedMemory memory, int warp, int block, int, int batch) {
    ScoreInputs& scores = args.inputs.scores;
    scores.q = (const char*)scores.q + batch * args.q_batch;
    scores.k = (const char*)scores.k + batch * args.k_batch;
    args.inputs.select_sequence(batch);
    StoreLogits<G> last;
    last.map = (char*)args.logits + batch * args.logits_batch;
    L::go_over_tiles(args.inputs, memory, warp, block, last);
  }
};
