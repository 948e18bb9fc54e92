// What Conv1 makes of the bias, with which hidden values begin: U by distance, E at the left edge.
#pragma once
#include "geometry.h"

template <class G>
struct Tables {
  // U as float32 [entries, 4 n-tiles, 4, 4], of rows g and g + 8 at a column: half of the width, as accumulators.
  static KERNEL_CODE void load_entries(f32 (&hidden)[2][4], const Address (&entries)[2], int column, int step) {
    // An entry has for each n-tile and t the widths of distances n and n + 8. n-tiles 2x and 2x + 1 of odd entries are
    // swapped, which spreads a warp's loads over banks.
    UNROLL_FOR (int n = 0; n < 2; n++) {
      Words<4> v = load_global<4>(entries[(n ^ column) & 1], step * 128 - column * 256);
      UNROLL_FOR (int x = 0; x < 4; x++) hidden[n][x] = as_f32(v.x[x]);
    }
  }

  // E, float32 [R, p, 32], of rows g and g + 8 of a row tile, which exist below `rows`: half of the width.
  static KERNEL_CODE void load_edge(f32 (&hidden)[2][4], const void* edge, int rows, int first_row, int column,
                                    int step) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      i32 row = minimum(g + (first_row + 8 * r), i32(rows - 1));
      Words<4> v = load_global<4>(address(edge, row * (G::PADDING * 128) + t * 16), column * 128 + step * 64);
      UNROLL_FOR (int x = 0; x < 4; x++) hidden[x / 2][2 * r + x % 2] = as_f32(v.x[x]);
    }
  }

  // U of the 23 distances between a run's columns and a row tile's rows, as B fragments: exchange numbers, one word of
  // each n-tile for every 8 distances. A product with a shifted identity takes from them the rows' distances at a
  // column, instead of 16 loads of what differs by one distance from column to column.
  struct Distances {
    Words<4> group[3];
  };
  // `first` is the group of the distance of row 0 and column 7, in [groups, 32 lanes, 4 n-tiles].
  static KERNEL_CODE void load_distances(Distances& u, const void* table, int first) {
    Address at = advance(address(table, lane_id() * 16), (long long)first * 512);
    UNROLL_FOR (int x = 0; x < 3; x++) u.group[x] = load_global<4>(at, x * 512);
  }
  static KERNEL_CODE void begin_hidden(f32 (&hidden)[4][4], const Distances& u, int column) {
    constexpr int ONE = 0x3c00;
    i32 lane = lane_id(), place = lane / 4 - lane % 4 * 2 + (7 - column);  // of row g's one, relative to word t
    u32 low = shift_left(u32((unsigned)ONE), place * 16), high = shift_left(u32((unsigned)ONE), place * 16 - 128);
    const u32 shift[4] = {low, u32(0u), high, low};
    UNROLL_FOR (int n = 0; n < 4; n++) {
      mma_exchange_from_zero(hidden[n], shift, u.group[0].x[n], u.group[1].x[n]);
      if (column < 7) mma_exchange_k8(hidden[n], u32(0u), high, u.group[2].x[n]);
    }
  }
};
