// Scores S = q·k of a block's rows, for all heads, into a window of exchange numbers.
#pragma once
#include "geometry.h"

struct ScoreInputs {
  const void* q;             // bfloat16 [H, …, 64], scaled: the chunk's first row
  const void* k;             // bfloat16 [H, …, 64]: column 0
  int q_stride, k_stride;    // bytes from one head to the next
  int heads, rows, columns;  // rows of the chunk, and columns that its last row sees
  int position;              // of the chunk's first row: row r sees columns 0 … position + r
};

template <class G>
struct Scores {
  // Keys of a head in the columns of N n-tiles, as B fragments of four products.
  template <int N>
  struct Keys {
    Words<4> part[N][2];
  };
  // Scores of a head: of both row tiles, in N n-tiles.
  template <int N>
  struct Sums {
    f32 tile[G::ROW_TILES][N][4];
  };

  // Brings the queries of the warp's heads into shared memory, as A fragments [head][row tile][k-step][lane][4 words].
  static KERNEL_CODE void load_queries(const ScoreInputs& in, SharedMemory queries, int warp, int first_row) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int h = 0; h < 2 * G::WARP_PAIRS; h++)
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++)
        UNROLL_FOR (int half = 0; half < 2; half++) {
          const int head = first_head(warp) + h;
          Words<4> rows[2];
          UNROLL_FOR (int r = 0; r < 2; r++) {
            i32 row = minimum(g + (first_row + 16 * tile + 8 * r), i32(in.rows - 1));
            rows[r] = load_global<4>(
                advance(address(in.q, row * G::ROW_BYTES + t * 16), head_offset(in, head, in.q_stride)), half * 64);
          }
          UNROLL_FOR (int step = 0; step < 2; step++) {
            Words<4> v;
            UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = rows[x % 2].x[2 * step + x / 2];
            store_shared<4>(queries, lane * 16 + query_offset(head, tile, half * 2 + step), v);
          }
        }
  }

  // Loads a head's keys of the n-tiles from `tile` on, of the columns from `first` on. MASKED: some do not exist.
  template <bool MASKED, int N>
  static KERNEL_CODE void load_keys(const ScoreInputs& in, Keys<N>& keys, int head, int first, int tile) {
    // Lane g of n-tile n holds column (g/2)·COLUMNS/4 + 2n + g%2, so that a lane's sums are of neighboring columns.
    i32 lane = lane_id(), g = lane / 4, t = lane % 4, lane_column = (g / 2) * (G::COLUMNS / 4) + g % 2;
    Address lane_keys = address(in.k, lane_column * G::ROW_BYTES + t * 16);
    UNROLL_FOR (int n = 0; n < N; n++) {
      const int group = (tile + n) * 2;
      if (MASKED) {
        i32 column = minimum(maximum(lane_column + (first + group), i32(0)), i32(in.columns - 1));
        Address at = advance(address(in.k, column * G::ROW_BYTES + t * 16), head_offset(in, head, in.k_stride));
        UNROLL_FOR (int z = 0; z < 2; z++) keys.part[n][z] = load_global<4>(at, 64 * z);
      } else {
        Address at = advance(lane_keys, head_offset(in, head, in.k_stride) + (long long)first * G::ROW_BYTES);
        UNROLL_FOR (int z = 0; z < 2; z++) keys.part[n][z] = load_global<4>(at, group * G::ROW_BYTES + 64 * z);
      }
    }
  }

  template <int N>
  static KERNEL_CODE void multiply(Sums<N>& sums, const Keys<N>& keys, SharedMemory queries, int head) {
    i32 lane = lane_id();
    UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++)
      UNROLL_FOR (int step = 0; step < 4; step++) {
        Words<4> q = load_shared<4>(queries, lane * 16 + query_offset(head, tile, step));
        UNROLL_FOR (int n = 0; n < N; n++) {
          u32 b0 = keys.part[n][step / 2].x[2 * (step % 2)], b1 = keys.part[n][step / 2].x[2 * (step % 2) + 1];
          if (step == 0) mma_bf16_from_zero(sums.tile[tile][n], q.x, b0, b1);
          else mma_bf16(sums.tile[tile][n], q.x, b0, b1);
        }
      }
  }

  // Stores the scores of a pair of heads in the n-tiles from `tile` on. MASKED: some row does not see some of the
  // columns, and its scores are zero.
  template <bool MASKED, int N>
  static KERNEL_CODE void store(const ScoreInputs& in, SharedMemory window, const Sums<N> (&sums)[2], int pair,
                                int first_row, int first, int tile) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int n = 0; n < N; n += 2)
      UNROLL_FOR (int row_tile = 0; row_tile < G::ROW_TILES; row_tile++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          const int column = 2 * (tile + n), row = 16 * row_tile + 8 * r;
          Words<4> v;
          UNROLL_FOR (int x = 0; x < 4; x++) {
            const int y = n + x / 2, z = 2 * r + x % 2;
            v.x[x] = pack_exchange(sums[0].tile[row_tile][y][z], sums[1].tile[row_tile][y][z]);
            if (MASKED) {
              i32 j = t * (G::COLUMNS / 4) + (first + column + x);
              v.x[x] = select(j <= g + (in.position + first_row + row) && j >= 0, v.x[x], u32(0u));
            }
          }
          store_shared<4>(
              window,
              G::row_offset(g) + t * G::COLUMNS + (G::row_offset(row) + G::pair_offset(pair) + (G::FIRST + column) * 4),
              v);
        }
  }

  // Computes the columns [first, first + COLUMNS) of the warp's heads, half of them at a time.
  template <bool MASKED>
  static KERNEL_CODE void compute(const ScoreInputs& in, SharedMemory queries, SharedMemory window, int warp,
                                  int first_row, int first) {
    UNROLL_FOR (int pair = 0; pair < G::WARP_PAIRS; pair++)
      UNROLL_FOR (int tile = 0; tile < G::COLUMNS / 8; tile += 2) {
        Sums<2> sums[2];
        const int head = first_head(warp) + 2 * pair;
        UNROLL_FOR (int h = 0; h < 2; h++) {
          Keys<2> keys;
          load_keys<MASKED>(in, keys, head + h, first, tile);
          multiply(sums[h], keys, queries, head + h);
        }
        store<MASKED>(in, window, sums, head / 2, first_row, first, tile);
      }
  }

  // Makes the last 2p columns of a window those before its first. A lane takes a row of each of the warp's pairs.
  static KERNEL_CODE void keep_last_columns(SharedMemory window, int warp) {
    UNROLL_FOR (int pair = 0; pair < G::WARP_PAIRS; pair++) {
      i32 at = G::row_offset(lane_id()) + G::pair_offset(first_head(warp) / 2 + pair);
      UNROLL_FOR (int x = 0; x < 2 * G::PADDING; x += 2) {
        Words<2> v = load_shared<2>(window, at + (G::COLUMNS + G::FIRST - 2 * G::PADDING + x) * 4);
        store_shared<2>(window, at + (G::FIRST - 2 * G::PADDING + x) * 4, v);
      }
    }
  }

  static KERNEL_CODE int first_head(int warp) { return 2 * G::WARP_PAIRS * warp; }

 private:
  static KERNEL_CODE long long head_offset(const ScoreInputs& in, int head, int stride) {
    return (long long)(head < in.heads ? head : in.heads - 1) * stride;  // the weights of those beyond are zero
  }
  static KERNEL_CODE int query_offset(int head, int tile, int step) {
    return ((head * G::ROW_TILES + tile) * 4 + step) * 512;
  }
};
