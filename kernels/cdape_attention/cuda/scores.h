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
  // Brings the queries of the warp's heads into shared memory, as A fragments [head][row tile][k-step][lane][4 words].
  static KERNEL_CODE void load_queries(const ScoreInputs& in, SharedMemory queries, int warp, int first_row) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int h = 0; h < 2; h++)
      UNROLL_FOR (int tile = 0; tile < 2; tile++)
        UNROLL_FOR (int half = 0; half < 2; half++) {
          Words<4> rows[2];
          UNROLL_FOR (int r = 0; r < 2; r++) {
            i32 row = minimum(g + (first_row + 16 * tile + 8 * r), i32(in.rows - 1));
            rows[r] = load_global<4>(
                advance(address(in.q, row * G::ROW_BYTES + t * 16), head_offset(in, warp, h, in.q_stride)), half * 64);
          }
          UNROLL_FOR (int step = 0; step < 2; step++) {
            Words<4> v;
            UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = rows[x % 2].x[2 * step + x / 2];
            store_shared<4>(queries, lane * 16 + query_offset(warp, h, tile, half * 2 + step), v);
          }
        }
  }

  // Computes the columns [first, first + 32). MASKED: some row does not see some of them, and its scores are zero.
  template <bool MASKED>
  static KERNEL_CODE void compute(const ScoreInputs& in, SharedMemory queries, SharedMemory window, int warp,
                                  int first_row, int first) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    // Lane g of n-tile n holds column 8(g/2) + 2n + g%2, so that a lane's sums are of neighboring columns.
    i32 lane_column = (g / 2) * 8 + g % 2;
    Address lane_keys = address(in.k, lane_column * G::ROW_BYTES + t * 16);
    UNROLL_FOR (int half = 0; half < 2; half++) {
      f32 sum[2][2][2][4];  // head, row tile, n-tile
      UNROLL_FOR (int h = 0; h < 2; h++) {
        Words<4> keys[2][2];
        UNROLL_FOR (int n = 0; n < 2; n++) {
          const int group = (2 * half + n) * 2;
          if (MASKED) {
            i32 column = minimum(maximum(lane_column + (first + group), i32(0)), i32(in.columns - 1));
            Address at = advance(address(in.k, column * G::ROW_BYTES + t * 16), head_offset(in, warp, h, in.k_stride));
            UNROLL_FOR (int z = 0; z < 2; z++) keys[n][z] = load_global<4>(at, 64 * z);
          } else {
            Address at = advance(lane_keys, head_offset(in, warp, h, in.k_stride) + (long long)first * G::ROW_BYTES);
            UNROLL_FOR (int z = 0; z < 2; z++) keys[n][z] = load_global<4>(at, group * G::ROW_BYTES + 64 * z);
          }
        }
        UNROLL_FOR (int tile = 0; tile < 2; tile++)
          UNROLL_FOR (int step = 0; step < 4; step++) {
            Words<4> q = load_shared<4>(queries, lane * 16 + query_offset(warp, h, tile, step));
            UNROLL_FOR (int n = 0; n < 2; n++) {
              u32 b0 = keys[n][step / 2].x[2 * (step % 2)], b1 = keys[n][step / 2].x[2 * (step % 2) + 1];
              if (step == 0) mma_bf16_from_zero(sum[h][tile][n], q.x, b0, b1);
              else mma_bf16(sum[h][tile][n], q.x, b0, b1);
            }
          }
      }
      UNROLL_FOR (int tile = 0; tile < 2; tile++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          Words<4> v;
          UNROLL_FOR (int x = 0; x < 4; x++) {
            v.x[x] = pack_exchange(sum[0][tile][x / 2][2 * r + x % 2], sum[1][tile][x / 2][2 * r + x % 2]);
            if (MASKED) {
              i32 column = t * 8 + (first + half * 4 + x);
              v.x[x] =
                  select(column <= g + (in.position + first_row + 16 * tile + 8 * r) && column >= 0, v.x[x], u32(0u));
            }
          }
          store_shared<4>(
              window,
              G::row_offset(g + (16 * tile + 8 * r)) + t * 32 + (G::pair_offset(warp) + (G::FIRST + half * 4) * 4), v);
        }
    }
  }

  // Makes the last 2p columns of a window those before its first. A lane takes a row of the warp's pair.
  static KERNEL_CODE void keep_last_columns(SharedMemory window, int warp) {
    i32 at = G::row_offset(lane_id()) + G::pair_offset(warp);
    UNROLL_FOR (int x = 0; x < 2 * G::PADDING; x += 2) {
      Words<2> v = load_shared<2>(window, at + (G::COLUMNS + G::FIRST - 2 * G::PADDING + x) * 4);
      store_shared<2>(window, at + (G::FIRST - 2 * G::PADDING + x) * 4, v);
    }
  }

 private:
  static KERNEL_CODE long long head_offset(const ScoreInputs& in, int warp, int h, int stride) {
    int head = 2 * warp + h;  // those beyond the last repeat it: their weights are zero
    return (long long)(head < in.heads ? head : in.heads - 1) * stride;
  }
  static KERNEL_CODE int query_offset(int warp, int h, int tile, int step) {
    return (((2 * warp + h) * 2 + tile) * 4 + step) * 512;
  }
};
