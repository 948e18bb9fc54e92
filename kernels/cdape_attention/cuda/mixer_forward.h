// Forward pass of CDAPE's processor: logits of 32 query rows, from queries and keys (`logits.h`), into memory.
#pragma once
#include "logits.h"

struct MixerForwardArgs {
  LogitInputs inputs;
  void* logits;                              // float32 [H, R, C], written where a row sees a column
  long long q_batch, k_batch, logits_batch;  // bytes from one sequence to the next
};

// Stores logits. A warp takes an equal share of a tile's rows, a lane 4 columns of a pair, and in tiles of 32 columns
// of pair + 4 after it.
template <int PADDING, int COLUMNS, bool LOCAL>
struct StoreLogits {
  typedef Logits<PADDING, COLUMNS, false, LOCAL> L;
  typedef typename L::G G;
  typedef typename L::R R;
  typedef typename L::Context Context;
  static constexpr int CHUNKS = COLUMNS / 4, PAIRS_AT_ONCE = 32 / CHUNKS, WARP_ROWS = G::ROWS / G::WARPS;
  void* map;
  Address logits[2];  // of the next tile, in the warp's first row and both heads of the lane's pair

  static KERNEL_CODE i32 find_pair() {
    i32 place = lane_id() / CHUNKS;
    return COLUMNS == 32 ? place : place % 2 * 4 + place / 2;  // has no bank conflicts
  }
  KERNEL_CODE void begin(const Context& c) {
    const long long row_bytes = (long long)c.in.scores.columns * 4, head_bytes = c.in.scores.rows * row_bytes;
    Address rows = advance(address(map, lane_id() % CHUNKS * 16),
                           (c.first_row + WARP_ROWS * c.warp) * row_bytes + c.tiles.first * (COLUMNS * 4));
    UNROLL_FOR (int h = 0; h < 2; h++)
      logits[h] = advance(advance_heads(rows, find_pair() * 2, head_bytes), h * head_bytes);
  }

  template <bool MASKED>
  KERNEL_CODE void take(const Context& c, int first) {
    const int first_row = WARP_ROWS * c.warp;
    const long long row_bytes = (long long)c.in.scores.columns * 4, head_bytes = c.in.scores.rows * row_bytes;
    i32 chunk = lane_id() % CHUNKS, pair = find_pair();
    // The bias of the distances from 4 below that of the first row and the lane's first column on.
    const int distance = c.position() + first_row - first - 4 + c.in.bias_front;
    Address biases = address(c.in.bias, pair * (8 * c.in.bias_stride) - chunk * 16);
    UNROLL_FOR (int upper = 0; upper < G::PAIRS / PAIRS_AT_ONCE; upper++) {
      f32 bias[2][WARP_ROWS + 4];
      Address to[2];
      UNROLL_FOR (int h = 0; h < 2; h++) {
        const long long entry = (long long)(8 * upper + h) * c.in.bias_stride + distance;
        Address from = advance(biases, entry * 4);
        UNROLL_FOR (int x = 0; x < WARP_ROWS + 4; x += 4) {
          Words<4> v = load_global<4>(from, x * 4);
          UNROLL_FOR (int y = 0; y < 4; y++) bias[h][x + y] = as_f32(v.x[y]);
        }
        to[h] = advance(logits[h], 8 * upper * head_bytes);
      }
      UNROLL_FOR (int r = 0; r < WARP_ROWS; r++) {
        const int row = first_row + r;
        i32 at = pair * (R::PAIR_STRIDE * 4) + (R::row_offset(row) + 4 * upper * R::PAIR_STRIDE * 4);
        f32 sums[2][4];
        L::load(sums, c.sums, at, chunk);
        UNROLL_FOR (int h = 0; h < 2; h++) {
          Words<4> v;
          UNROLL_FOR (int y = 0; y < 4; y++) v.x[y] = as_u32(sums[h][y] + bias[h][4 + r - y]);
          pred is_stored = pair * 2 + (8 * upper + h) < c.in.scores.heads;
          if (MASKED)
            is_stored = is_stored && chunk * 4 + first <= c.position() + row && c.first_row + row < c.in.scores.rows;
          if (MASKED && LOCAL) is_stored = is_stored && chunk * 4 + first >= 0;
          store_global<4>(to[h], 0, v, is_stored);
          to[h] = advance(to[h], row_bytes);
        }
      }
    }
    UNROLL_FOR (int h = 0; h < 2; h++) logits[h] = advance(logits[h], COLUMNS * 4);
  }
};

template <int PADDING, int COLUMNS, bool LOCAL>
struct MixerForward {
  typedef Logits<PADDING, COLUMNS, false, LOCAL> L;
  static constexpr int NUM_THREADS = L::NUM_THREADS, MEMORY_BYTES = L::MEMORY_BYTES;
  static constexpr int BLOCKS_PER_SM = COLUMNS == 16 ? 2 : 1;

  static KERNEL_CODE void run(MixerForwardArgs args, SharedMemory memory, int warp, int block, int, int batch) {
    ScoreInputs& scores = args.inputs.scores;
    scores.q = (const char*)scores.q + batch * args.q_batch;
    scores.k = (const char*)scores.k + batch * args.k_batch;
    scores.select_sequence(batch);
    StoreLogits<PADDING, COLUMNS, LOCAL> last;
    last.map = (char*)args.logits + batch * args.logits_batch;
    L::go_over_tiles(args.inputs, memory, warp, block, last);
  }
};
