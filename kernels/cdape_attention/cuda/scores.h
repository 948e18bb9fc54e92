// Scores S = q·k of a block's rows, for all heads.
#pragma once
#include "geometry.h"

struct ScoreInputs {
  const void* q;             // bfloat16 [H, …, 64], scaled: the chunk's first row
  const void* k;             // bfloat16 [H, …, 64]: column 0
  int q_stride, k_stride;    // bytes from one head to the next
  int q_row;                 // bytes from one row of q to the next
  int heads, rows, columns;  // rows of the chunk, and columns that its last row sees
  int position;              // of the chunk's first row: row r sees columns 0 … position + r
};

// A warp computes a head's scores of 32 rows and 16 columns at a time: two n-tiles. Lane g of n-tile n holds the column
// (g/2)·LANE_COLUMNS + 2n + g%2, so that a lane's sums are of four neighboring columns, t·LANE_COLUMNS and after.
template <class G, int LANE_COLUMNS>
struct Scores {
  struct Keys {
    Words<4> part[2][2];
  };
  struct Sums {
    f32 tile[G::ROW_TILES][2][4];
  };

  // Brings an equal share of the queries into shared memory, as A fragments [head][row tile][k-step][lane][4 words].
  static KERNEL_CODE void load_queries(const ScoreInputs& in, SharedMemory queries, int warp, int first_row) {
    constexpr int SHARE = G::HEADS / G::WARPS;
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int h = 0; h < SHARE; h++)
      UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++)
        UNROLL_FOR (int half = 0; half < 2; half++) {
          const int head = SHARE * warp + h;
          Words<4> rows[2];
          UNROLL_FOR (int r = 0; r < 2; r++) {
            const int first = first_row + 16 * tile + 8 * r;
            rows[r] = load_global<4>(locate_row(in, in.q, first, g, t, head_offset(in, head, in.q_stride)), half * 64);
          }
          UNROLL_FOR (int step = 0; step < 2; step++) {
            Words<4> v;
            UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = rows[x % 2].x[2 * step + x / 2];
            store_shared<4>(queries, lane * 16 + query_offset(head, tile, half * 2 + step), v);
          }
        }
  }

  // A lane's 16 bytes of row `first` + g of queries, or of what has their strides, at or before the chunk's last row.
  static KERNEL_CODE Address locate_row(const ScoreInputs& in, const void* q, int first, i32 g, i32 t,
                                        long long head) {
    i32 row = minimum(g, i32(in.rows - 1 - first));  // 32 bits hold the bytes of a block's rows, not of all rows
    return advance(address(q, row * in.q_row + t * 16), head + (long long)first * in.q_row);
  }

  // Loads a head's keys of the lanes' columns from `first` on.
  static KERNEL_CODE void load_keys(Keys& keys, const ScoreInputs& in, int head, int first) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4, lane_column = (g / 2) * LANE_COLUMNS + g % 2;
    Address at = advance(address(in.k, lane_column * G::ROW_BYTES + t * 16),
                         head_offset(in, head, in.k_stride) + (long long)first * G::ROW_BYTES);
    UNROLL_FOR (int n = 0; n < 2; n++)
      UNROLL_FOR (int z = 0; z < 2; z++) keys.part[n][z] = load_global<4>(at, 2 * n * G::ROW_BYTES + 64 * z);
  }
  // The same of columns that may be outside of 0 … `last`: there the nearest inside. EARLY: before the next barrier.
  template <bool EARLY>
  static KERNEL_CODE void load_keys_inside(Keys& keys, const ScoreInputs& in, int head, int first, int last) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4, lane_column = (g / 2) * LANE_COLUMNS + g % 2;
    UNROLL_FOR (int n = 0; n < 2; n++) {
      i32 column = minimum(maximum(lane_column + (first + 2 * n), i32(0)), i32(last));
      Address at = advance(address(in.k, column * G::ROW_BYTES + t * 16), head_offset(in, head, in.k_stride));
      UNROLL_FOR (int z = 0; z < 2; z++)
        keys.part[n][z] = EARLY ? request_global(at, 64 * z) : load_global<4>(at, 64 * z);
    }
  }

  static KERNEL_CODE void multiply(Sums& sums, const Keys& keys, SharedMemory queries, int head) {
    i32 lane = lane_id();
    UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++)
      UNROLL_FOR (int step = 0; step < 4; step++) {
        Words<4> q = load_shared<4>(queries, lane * 16 + query_offset(head, tile, step));
        UNROLL_FOR (int n = 0; n < 2; n++) {
          u32 b0 = keys.part[n][step / 2].x[2 * (step % 2)], b1 = keys.part[n][step / 2].x[2 * (step % 2) + 1];
          if (step == 0) mma_bf16_from_zero(sums.tile[tile][n], q.x, b0, b1);
          else mma_bf16(sums.tile[tile][n], q.x, b0, b1);
        }
      }
  }

  // The words of a pair of heads: words[row tile][x][r] is of column `first` + x of the lane's, and row g + 8r. MASKED:
  // some row does not see some of the columns, and its scores are zero.
  template <bool MASKED>
  static KERNEL_CODE void pack(u32 (&words)[G::ROW_TILES][4][2], const Sums (&sums)[2], const ScoreInputs& in,
                               int first_row, int first) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int tile = 0; tile < G::ROW_TILES; tile++)
      UNROLL_FOR (int x = 0; x < 4; x++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          const int y = x / 2, z = 2 * r + x % 2;
          u32& word = words[tile][x][r];
          word = pack_exchange(sums[0].tile[tile][y][z], sums[1].tile[tile][y][z]);
          if (MASKED) {
            i32 column = t * LANE_COLUMNS + (first + x);
            word = select(column <= g + (in.position + first_row + 16 * tile + 8 * r) && column >= 0, word, u32(0u));
          }
        }
  }

 private:
  static KERNEL_CODE long long head_offset(const ScoreInputs& in, int head, int stride) {
    return (long long)(head < in.heads ? head : in.heads - 1) * stride;  // the weights of those beyond are zero
  }
  static KERNEL_CODE int query_offset(int head, int tile, int step) {
    return ((head * G::ROW_TILES + tile) * 4 + step) * 512;
  }
};
