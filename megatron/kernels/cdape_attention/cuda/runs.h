// Results of a tile's runs in shared memory, between the warps that mix pixels and the warps that store the results.
//
// A run's convolution extends into the first 2p columns of the next run. This contribution has separate words after the
// tile's columns, and the reader adds it. The last run keeps its contribution for the next tile.
#pragma once
#include "geometry.h"

// BY_ROWS: readers access words by rows and columns; otherwise by columns and pairs.
template <class G, class Type, bool BY_ROWS>
struct Runs {
  static constexpr int REACH = 2 * G::PADDING, CARRY = REACH > 0 ? REACH : 1;
  // Strides in words. An odd row is ODD_ROWS words nearer to the previous row. Neither writers (by rows and pairs) nor
  // readers have bank conflicts.
  static constexpr bool IS_WIDE = G::COLUMNS >= 32 && !BY_ROWS;
  // Smallest stride that fits a row's columns and its runs' contributions, and begins at a given one of 32 banks.
  static constexpr int NEEDED = G::COLUMNS + REACH * G::RUNS;
  static constexpr KERNEL_CODE int find_stride(int bank) { return (NEEDED - bank + 31) / 32 * 32 + bank; }
  static constexpr int NARROW_STRIDE = find_stride(12) < find_stride(20) ? find_stride(12) : find_stride(20);
  static constexpr int PAIR_STRIDE = IS_WIDE ? find_stride(8) : NARROW_STRIDE;
  static constexpr int ROW_STRIDE = G::PAIRS * PAIR_STRIDE + (IS_WIDE ? 4 : 18), ODD_ROWS = IS_WIDE ? 0 : 2;
  static constexpr int MEMORY_BYTES = G::ROWS * ROW_STRIDE * 4;

  // Words of a column's sums in rows g and g + 8: heads 2t and 2t + 1 (n-tile 0), 2t + 8 and 2t + 9 (n-tile 1), and so
  // on. The words of 16 heads are an A fragment.
  static constexpr int TILES = G::HEADS / 8, PARTS = 2 * TILES;
  struct Column {
    u32 part[PARTS];
  };
  static KERNEL_CODE Column pack(const f32 (&sum)[TILES][4]) {
    Column words;
    UNROLL_FOR (int q = 0; q < PARTS; q++)
      words.part[q] = Type::pack(sum[q / 2][2 * (q % 2)], sum[q / 2][2 * (q % 2) + 1]);
    return words;
  }

  template <class T>
  static KERNEL_CODE T row_offset(T row) {
    return row * (ROW_STRIDE * 4) - row % 2 * (ODD_ROWS * 4);
  }
  // Offset of a lane's row g and pair t.
  static KERNEL_CODE i32 locate(int row_tile) {
    i32 lane = lane_id();
    return row_offset(lane / 4 + 16 * row_tile) + lane % 4 * (PAIR_STRIDE * 4);
  }
  static KERNEL_CODE int part_offset(int part, int column) {
    return ((part % 2) * 8 * ROW_STRIDE + (part / 2) * 4 * PAIR_STRIDE + column) * 4;
  }

  // Stores four columns of a run, from `column` of the tile on.
  static KERNEL_CODE void store(SharedMemory memory, i32 lane_offset, const Column (&columns)[4], int column) {
    UNROLL_FOR (int q = 0; q < PARTS; q++) {
      Words<4> v;
      UNROLL_FOR (int y = 0; y < 4; y++) v.x[y] = columns[y].part[q];
      store_shared<4>(memory, lane_offset + part_offset(q, column), v);
    }
  }
  // Loads the words that the lane stored there.
  static KERNEL_CODE void load_stored(Column (&columns)[4], SharedMemory memory, i32 lane_offset, int column) {
    UNROLL_FOR (int q = 0; q < PARTS; q++) {
      Words<4> v = load_shared<4>(memory, lane_offset + part_offset(q, column));
      UNROLL_FOR (int y = 0; y < 4; y++) columns[y].part[q] = v.x[y];
    }
  }

  // Passes on the contributions to the next run's first 2p columns, which are columns 8 + y of this run: sums[(8 + y) %
  // TAPS].
  static KERNEL_CODE void pass_on(SharedMemory memory, i32 lane_offset, Column (&carry)[CARRY],
                                  const f32 (&sums)[G::TAPS][TILES][4], int run, bool is_edge) {
    const bool is_last = run == G::RUNS - 1;
    const int next = is_last ? 0 : run + 1;
    UNROLL_FOR (int y = 0; y < REACH; y += 2) {
      Column from[2];
      UNROLL_FOR (int z = 0; z < 2; z++) {
        Column part = pack(sums[(8 + y + z) % G::TAPS]);
        UNROLL_FOR (int q = 0; q < PARTS; q++) from[z].part[q] = is_last ? carry[y + z].part[q] : part.part[q];
        carry[y + z] = part;
      }
      if (!is_edge)
        UNROLL_FOR (int q = 0; q < PARTS; q++) {
          Words<2> v;
          UNROLL_FOR (int z = 0; z < 2; z++) v.x[z] = from[z].part[q];
          store_shared<2>(memory, lane_offset + part_offset(q, G::COLUMNS + REACH * next + y), v);
        }
    }
  }
  static KERNEL_CODE void clear(Column (&carry)[CARRY]) {
    UNROLL_FOR (int y = 0; y < CARRY; y++)
      UNROLL_FOR (int q = 0; q < PARTS; q++) carry[y].part[q] = u32(0u);
  }

  // Loads the words of four columns, the chunk-th of a tile, in the row and pair at `at`: those of the run, and the
  // previous run's contributions to the first min(2p, 4) columns, or zeros where there are none.
  static KERNEL_CODE void load(Words<4>& own, Words<4>& passed, SharedMemory memory, i32 at, i32 chunk) {
    own = load_shared<4>(memory, at + chunk * 16);
    if constexpr (REACH == 4) {  // in one access, without bank conflicts between the lanes of a pair
      passed = load_shared<4>(memory, at + (chunk / 2 * 4 + G::COLUMNS) * 4);
      UNROLL_FOR (int y = 0; y < 4; y++) passed.x[y] = select(chunk % 2 == 0, passed.x[y], u32(0u));
      return;
    }
    UNROLL_FOR (int y = 0; y < 4 && y < REACH; y += 2) {
      i32 column = (chunk % 2) * 4 + y;  // column in its run
      i32 from = (chunk / 2) * REACH + minimum(column, i32(REACH - 2)) + G::COLUMNS;
      Words<2> v = load_shared<2>(memory, at + from * 4);
      UNROLL_FOR (int z = 0; z < 2; z++) passed.x[y + z] = select(column < REACH, v.x[z], u32(0u));
    }
  }
};
