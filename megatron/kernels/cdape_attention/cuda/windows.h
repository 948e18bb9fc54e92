// Windows: layouts of a tile's words in shared memory, preceded by those of the 2p columns before the tile. A run reads
// them as A fragments: the words of rows (g, g + 8) and pairs (t, t + 4) at a column.
#pragma once
#include "geometry.h"

// Layout by rows, pairs and columns. An access reads adjacent columns.
template <class G>
struct PairWindow {
  static_assert(G::COLUMNS % 32 == 0, "strides are for tiles of 32 or 64 columns");
  // Pairs are 8 banks apart, rows 20, and the upper four pairs another 16. Accesses of 16 bytes by rows and pairs, and
  // of 4 bytes by columns and halves of the pairs, then have no bank conflicts.
  static constexpr int FIRST = 8;  // index of the tile's first column
  static constexpr int PAIR_STRIDE = G::COLUMNS + FIRST, UPPER_PAIRS = 16;
  static constexpr int ROW_STRIDE = G::PAIRS * PAIR_STRIDE + UPPER_PAIRS + 4;
  static constexpr int MEMORY_BYTES = G::ROWS * ROW_STRIDE * 4;
  static constexpr int LENGTH = 8 + 2 * G::PADDING;
  u32 column[LENGTH][4];

  // Byte offsets.
  template <class T>
  static KERNEL_CODE T pair_offset(T pair) {
    return (pair * PAIR_STRIDE + pair / 4 * UPPER_PAIRS) * 4;
  }
  template <class T>
  static KERNEL_CODE T row_offset(T row) {
    return row * (ROW_STRIDE * 4);
  }

  // Offset of the first column that a run reads, for a lane's row and pair.
  static KERNEL_CODE i32 locate(int row_tile, int run) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    return row_offset(g + 16 * row_tile) + pair_offset(t) + (8 * run + FIRST - 2 * G::PADDING) * 4;
  }

  // Loads columns FROM ... TO - 1.
  template <int FROM, int TO>
  KERNEL_CODE void load(SharedMemory window, i32 offset) {
    UNROLL_FOR (int x = FROM; x < TO;) {
      constexpr int SKEW = FIRST - 2 * G::PADDING;
      const bool is_wide = (SKEW + x) % 4 == 0 && x + 4 <= TO;
      UNROLL_FOR (int part = 0; part < 4; part++) {
        i32 from =
            offset + ((part % 2) * 8 * ROW_STRIDE * 4 + (part / 2) * (4 * PAIR_STRIDE + UPPER_PAIRS) * 4 + x * 4);
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

  // Zeros a pair's last 2p columns, as if no row saw the tile before. With 16 rows, also those of pair + 4.
  static KERNEL_CODE void clear_last_columns(SharedMemory window, int pair) {
    UNROLL_FOR (int x = G::COLUMNS - 2 * G::PADDING; x < G::COLUMNS; x += 2)
      store_shared<2>(window, locate_columns(pair) + (FIRST + x) * 4, Words<2>{u32(0u), u32(0u)});
  }
  // Copies a pair's last 2p columns before its first column. With 16 rows, also those of pair + 4.
  static KERNEL_CODE void keep_last_columns(SharedMemory window, int pair) {
    i32 at = locate_columns(pair);
    UNROLL_FOR (int x = 0; x < 2 * G::PADDING; x += 2) {
      Words<2> v = load_shared<2>(window, at + (G::COLUMNS + FIRST - 2 * G::PADDING + x) * 4);
      store_shared<2>(window, at + (FIRST - 2 * G::PADDING + x) * 4, v);
    }
  }

 private:
  // Each lane copies a row.
  static KERNEL_CODE i32 locate_columns(int pair) {
    i32 lane = lane_id();
    return row_offset(lane % G::ROWS) + lane / G::ROWS * (pair_offset(4) - pair_offset(0)) + pair_offset(pair);
  }
};

// Layout by fragments. One access reads the four words of a column that a lane needs, into the registers of a product.
// The writing lane has both pairs.
template <class G>
struct FragmentWindow {
  // A fragment is a unit of 16 bytes. Units of adjacent rows are adjacent. Units of columns that are four apart, and of
  // pairs, are two banks of 16 bytes apart. Accesses by rows and pairs, and by rows and columns, have no bank
  // conflicts.
  static constexpr int FIRST = G::PADDING > 2 ? 8 : 4, QUADS = (G::COLUMNS + FIRST) / 4;
  static constexpr int QUAD_BYTES = 10 * 16, COLUMN_BYTES = QUADS * QUAD_BYTES, PAIR_BYTES = 4 * COLUMN_BYTES + 2 * 16;
  static constexpr int ROW_TILE_BYTES = 4 * PAIR_BYTES, GROUP_BYTES = G::ROW_TILES * ROW_TILE_BYTES;
  static constexpr int MEMORY_BYTES = G::HEAD_GROUPS * GROUP_BYTES;  // one window for each group of 16 heads

  // Offset of a column of the tile, -2p … COLUMNS - 1.
  static constexpr KERNEL_CODE int column_offset(int column) {
    return (column + FIRST) / 4 * QUAD_BYTES + (column + FIRST) % 4 * COLUMN_BYTES;
  }
  // Loads the x-th column that a run reads.
  static KERNEL_CODE void load(u32 (&fragment)[4], SharedMemory window, int row_tile, int run, int x) {
    i32 lane = lane_id();
    i32 at = lane / 4 * 16 + lane % 4 * PAIR_BYTES + (row_tile * ROW_TILE_BYTES + run * 2 * QUAD_BYTES);
    Words<4> v = load_shared<4>(window, at + column_offset(x - 2 * G::PADDING));
    UNROLL_FOR (int part = 0; part < 4; part++) fragment[part] = v.x[part];
  }

  // Stores the words of pairs `pair` and `pair` + 4 in the columns from `column` on. words[pair][block][x][r] belongs
  // to the lane's column 4t + x of a block (`Scores`), and to row g + 8r.
  static KERNEL_CODE void store(SharedMemory window, const u32 (&words)[2][2][4][2], int pair, int column) {
    i32 lane = lane_id();
    UNROLL_FOR (int block = 0; block < 2; block++)
      UNROLL_FOR (int x = 0; x < 4; x++) {
        Words<4> v;
        UNROLL_FOR (int part = 0; part < 4; part++) v.x[part] = words[part / 2][block][x][part % 2];
        const int of_block = G::ROW_TILES == 2 ? block * ROW_TILE_BYTES : block * 4 * QUAD_BYTES;
        i32 at = lane / 4 * 16 + lane % 4 * QUAD_BYTES + (of_block + pair * PAIR_BYTES);
        store_shared<4>(window, at + (column / 4 * QUAD_BYTES + column_offset(x)), v);
      }
  }

  // Zeros the last 2p columns of pairs `pair` and `pair` + 4, as if no row saw the tile before.
  static KERNEL_CODE void clear_last_columns(SharedMemory window, int pair) {
    UNROLL_FOR (int x = -2 * G::PADDING; x < 0; x += 2)
      store_shared<4>(window, locate_columns(pair) + column_offset(G::COLUMNS + x),
                      Words<4>{u32(0u), u32(0u), u32(0u), u32(0u)});
  }
  // Copies the last 2p columns of pairs `pair` and `pair` + 4 before the first. Each lane copies a row and a column.
  static KERNEL_CODE void keep_last_columns(SharedMemory window, int pair) {
    i32 at = locate_columns(pair);
    UNROLL_FOR (int x = -2 * G::PADDING; x < 0; x += 2) {
      Words<4> v = load_shared<4>(window, at + column_offset(G::COLUMNS + x));
      store_shared<4>(window, at + column_offset(x), v);
    }
  }

 private:
  static KERNEL_CODE i32 locate_columns(int pair) {
    i32 lane = lane_id();
    return lane % 8 * 16 + lane / 8 % G::ROW_TILES * ROW_TILE_BYTES + lane / 16 * COLUMN_BYTES + pair * PAIR_BYTES;
  }
};
