// Sums along diagonals: for each distance n = i - j, the sum over a block's pixels at that distance. The gradients of U
// (sums of hidden values' gradients, a channel per width) and of the bias table (sums of logits' gradients, a channel
// per head) are such sums.
//
// A warp sums its 16 rows × 8 columns by products with shifted identities, which move row r of a column to row r + 7 -
// jj: 23 distances in 3 groups of 8. A tile of 32 × 32 pixels has 63 distances in 8 groups; its lower four groups are
// the upper four of the next tile. A tile of 16 × 64 has 79 distances in 10 groups, and shares two. A warp therefore
// sums the warps' sums of a group in two tiles, first as a lower and then as an upper group, in the order of the warps,
// and stores them once.
#pragma once
#include "geometry.h"

template <class G>
struct Diagonals {
  typedef typename G::Element Element;
  static constexpr int CHANNELS = G::WIDTH + G::HEADS, DISTANCE_BYTES = CHANNELS * 4;
  static constexpr int GROUP_BYTES = 8 * DISTANCE_BYTES, WARP_BYTES = 3 * GROUP_BYTES;
  static constexpr int MEMORY_BYTES = G::WARPS * WARP_BYTES, GROUPS = 2 * G::ROW_TILES + G::RUNS;

  // Sums of a group of 8 distances, divided among the lanes in vectors of 4.
  static constexpr int VECTORS = CHANNELS / 16;
  struct Sums {
    f32 part[VECTORS][4];
  };
  static KERNEL_CODE void clear(Sums& sums) {
    UNROLL_FOR (int v = 0; v < VECTORS; v++)
      UNROLL_FOR (int x = 0; x < 4; x++) sums.part[v][x] = f32(0.0f);
  }

  // Matrices that move a column's 16 rows to the distances below 16, and its last 8 rows to the other distances, as A
  // fragments.
  struct Shift {
    u32 low[4], high[2];
  };
  static KERNEL_CODE void build_shift(Shift& shift, int jj) {
    i32 lane = lane_id(), bits = (lane / 4 - lane % 4 * 2 + (jj - 7)) * 16;  // from word t to the 1 of distance g
    // The compiler cannot tell that these operands are equal or zero. Otherwise it would copy them for every product.
    const u32 one = u32(Element::ONE), zero = shift_left(one, bits + 1024), same = one + zero;
    shift.low[0] = shift_left(one, bits);
    shift.low[1] = shift_left(one, bits + 128);
    shift.low[2] = zero;
    shift.low[3] = shift_left(same, bits);
    shift.high[0] = shift_left(same, bits + 128);
    shift.high[1] = shift_left(same, bits + 1024);
  }

  // Adds a column, a B fragment of rows × channels, to the sums of the distances below 16 and of the others.
  static KERNEL_CODE void add_shifted(f32 (&low)[4], f32 (&high)[4], const Shift& shift, u32 b0, u32 b1, int jj) {
    Element::multiply(low, shift.low, b0, b1);
    if (jj < 7) Element::multiply_k8(high, shift.high[0], shift.high[1], b1);
  }

  // Stores a warp's sums of a slice of the width, and with the first slice those of the logits. Row x of the sums
  // belongs to the distance of the warp's first row and last column, plus x.
  template <int N_TILES>
  static KERNEL_CODE void store(SharedMemory memory, int warp, const f32 (&du)[2][N_TILES][4], const f32 (&db)[2][2][4],
                                int slice) {
    i32 lane = lane_id(), to = lane / 4 * DISTANCE_BYTES + lane % 4 * 16;
    UNROLL_FOR (int group = 0; group < 3; group++) {
      const int m = group / 2, r = group % 2, at = warp * WARP_BYTES + group * GROUP_BYTES;
      Words<4> v;
      UNROLL_FOR (int step = 0; step < N_TILES / 2; step++) {
        UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(du[m][2 * step + x / 2][2 * r + x % 2]);
        store_shared<4>(memory, to + (at + (slice * (N_TILES / 2) + step) * 64), v);
      }
      if (slice > 0) continue;
      UNROLL_FOR (int x = 0; x < 4; x++) v.x[x] = as_u32(db[m][x / 2][2 * r + x % 2]);
      store_shared<4>(memory, to + (at + G::WIDTH * 4), v);
    }
  }

  // Adds the warps' sums of a tile to those of this warp's groups. Keeps the group that the next tile completes, and
  // stores the others. `first_row` is the row of `table` [programs, rows, D + 16] for the tile's first distance.
  static KERNEL_CODE void add(Sums& sums, SharedMemory memory, int warp, int tile, bool is_last, void* table,
                              long long program, int rows, int first_row) {
    i32 lane = lane_id();
    // A tile's group is group + RUNS of the next tile. WARPS is RUNS or 2·RUNS, so the index is never negative.
    const int highest = GROUPS - 1 - ((GROUPS - 1 - warp + G::RUNS * tile) & (G::WARPS - 1));
    UNROLL_FOR (int turn = 0; turn < (GROUPS + G::WARPS - 1) / G::WARPS; turn++) {
      const int group = highest - turn * G::WARPS;
      if (group < 0) continue;
      UNROLL_FOR (int row_tile = 0; row_tile < G::ROW_TILES; row_tile++)
        UNROLL_FOR (int part = 0; part < 3; part++) {
          const int run = G::RUNS - 1 - (group - part - 2 * row_tile);
          if (run >= 0 && run < G::RUNS)
            UNROLL_FOR (int v = 0; v < VECTORS; v++) {
              const int from = (row_tile * G::RUNS + run) * WARP_BYTES + part * GROUP_BYTES + v * 512;
              Words<4> x = load_shared<4>(memory, lane * 16 + from);
              UNROLL_FOR (int y = 0; y < 4; y++) sums.part[v][y] += as_f32(x.x[y]);
            }
        }
      if (group < GROUPS - G::RUNS && !is_last) continue;
      const int row = first_row + 8 * group;
      Address to = advance(address(table, lane * 16), (program * rows + row) * DISTANCE_BYTES);
      UNROLL_FOR (int v = 0; v < VECTORS; v++) {
        Words<4> x;
        UNROLL_FOR (int y = 0; y < 4; y++) x.x[y] = as_u32(sums.part[v][y]);
        i32 distance = (lane + v * 32) / (CHANNELS / 4) + row;
        store_global<4>(to, v * 512, x, distance >= 0 && distance < rows);
      }
      clear(sums);
    }
  }
};
