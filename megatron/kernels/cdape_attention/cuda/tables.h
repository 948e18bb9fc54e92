// Terms that Conv1 computes from the bias, the initial values of hidden values: U by distance, E at the left edge.
#pragma once
#include "gates.h"
#include "scores.h"

template <class G>
struct Tables {
  static constexpr int STEPS = G::N_TILES / 2;  // steps of 16 widths in a slice
  // Bytes of a column and of a row of E.
  static constexpr int COLUMN_BYTES = G::WIDTH * 4, EDGE_BYTES = G::EDGE * COLUMN_BYTES;

  static constexpr int ENTRY_BYTES = G::WIDTH * 8;
  // Loads 16 widths of U, float32 [entries, D/8 n-tiles, 4, 4], at a column of rows g and g + 8, as accumulators.
  static KERNEL_CODE void load_entries(f32 (&hidden)[2][4], const Address (&entries)[2], int column, int step) {
    // For each n-tile and t, an entry has the widths of distances n and n + 8. In odd entries, n-tiles 2x and 2x + 1
    // are swapped, which spreads a warp's loads over the banks.
    UNROLL_FOR (int n = 0; n < 2; n++) {
      Words<4> v = load_global<4>(entries[(n ^ column) & 1], step * 128 - column * ENTRY_BYTES);
      UNROLL_FOR (int x = 0; x < 4; x++) hidden[n][x] = as_f32(v.x[x]);
    }
  }

  // Loads 16 widths of E, float32 [R, EDGE, D], of rows g and g + 8 of a row tile. Rows from `rows` on do not exist.
  static KERNEL_CODE void load_edge(f32 (&hidden)[2][4], const void* edge, int rows, int first_row, int column,
                                    int step) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      i32 row = minimum(g + (first_row + 8 * r), i32(rows - 1));
      Words<4> v = load_global<4>(address(edge, row * EDGE_BYTES + t * 16), column * COLUMN_BYTES + step * 64);
      UNROLL_FOR (int x = 0; x < 4; x++) hidden[x / 2][2 * r + x % 2] = as_f32(v.x[x]);
    }
  }

  // Positions of rows g and g + 8 if each row has its own edges: relative to the rows' documents and, with gates, to
  // the columns that they see.
  struct Places {
    i32 of_row[2];    // row of E
    i32 document[2];  // column at which the row's document begins
    i32 row[2];       // row of the chunk
    i32 first[2];     // GATED: first and last column that the row sees
    i32 last[2];
  };
  static KERNEL_CODE void find_places(Places& places, const ScoreInputs& in, int first_row) {
    i32 g = lane_id() / 4;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      places.row[r] = g + (first_row + 8 * r);
      i32 row = minimum(places.row[r], i32(in.rows - 1));
      places.document[r] = in.find_lanes_document(row);
      if constexpr (G::GATED) {
        places.of_row[r] = row;
        places.first[r] = places.document[r];
        if constexpr (G::LOCAL) places.first[r] = in.find_lanes_first(places.row[r]);
        places.last[r] = places.row[r] + in.position;
      } else {
        places.of_row[r] = row - places.document[r] + (in.position - in.edge_position);
      }
    }
  }
  static KERNEL_CODE pred is_inside(const Places& places, int r, int column) {
    return places.document[r] <= i32(column);
  }
  static KERNEL_CODE pred is_at_begin(const Places& places, int r, int column) {
    if constexpr (G::GATED)
      return places.first[r] <= i32(column + G::PADDING) && places.first[r] > i32(column - G::PADDING);
    return is_inside(places, r, column) && places.document[r] > i32(column - G::PADDING);
  }
  static KERNEL_CODE pred is_at_edge(const Places& places, int r, int column) {
    if constexpr (!G::GATED) return is_at_begin(places, r, column);
    pred is_at_end = places.last[r] < i32(column + G::PADDING) && places.last[r] >= i32(column - G::PADDING);
    return (is_at_begin(places, r, column) || is_at_end) && is_inside(places, r, column);
  }
  // True if a hidden value of 16 rows from `first_row` on, in a run's 8 columns from `column` on, may be at an edge.
  static KERNEL_CODE bool has_edge(const ScoreInputs& in, int first_row, int column) {
    bool has_begin = false;
    if constexpr (G::LOCAL)
      has_begin = column < (G::GATED ? in.find_first(first_row + 15) : in.find_document(first_row + 15)) + G::PADDING;
    return has_begin || (G::GATED && column + 7 > in.position + first_row - G::PADDING);
  }
  // Offset of a lane's widths of a column, or of the nearest column that E has, in an array [rows, EDGE, D]: E or its
  // gradient.
  static KERNEL_CODE i32 locate_edge(i32 row, const Places& places, int r, int column, int step) {
    i32 place = i32(column) - places.document[r];
    if constexpr (G::GATED)
      place = select(is_at_begin(places, r, column), i32(column + G::PADDING) - places.first[r],
                     i32(column + 3 * G::PADDING - 1) - places.last[r]);
    place = minimum(maximum(place, i32(0)), i32(G::EDGE - 1));
    return row * EDGE_BYTES + place * COLUMN_BYTES + lane_id() % 4 * 16 + step * 64;
  }
  // Replaces the hidden values at edges by those of E.
  static KERNEL_CODE void select_edge(f32 (&hidden)[2][4], const void* edge, const Places& places, int column,
                                      int step) {
    UNROLL_FOR (int r = 0; r < 2; r++) {
      Words<4> v = load_global<4>(address(edge, locate_edge(places.of_row[r], places, r, column, step)), 0);
      UNROLL_FOR (int x = 0; x < 4; x++) {
        f32& value = hidden[x / 2][2 * r + x % 2];
        value = select(is_at_edge(places, r, column), as_f32(v.x[x]), value);
      }
    }
  }

  static KERNEL_CODE void select_edges(f32 (&hidden)[G::N_TILES][4], const void* edge, const Places& places, int column,
                                       int slice) {
    UNROLL_FOR (int step = 0; step < STEPS; step++) {
      f32 half[2][4];
      UNROLL_FOR (int x = 0; x < 8; x++) half[x / 4][x % 4] = hidden[2 * step + x / 4][x % 4];
      select_edge(half, edge, places, column, slice * STEPS + step);
      UNROLL_FOR (int x = 0; x < 8; x++) hidden[2 * step + x / 4][x % 4] = half[x / 4][x % 4];
    }
  }

  // U at the 23 distances between a run's columns and a row tile's rows, as B fragments of exchange numbers. A product
  // with a shifted identity selects the rows' distances at a column. It replaces 16 loads, whose distances differ by
  // one from column to column.
  struct Distances {
    Words<4> near[STEPS], far[STEPS];  // per 16 widths of a slice: words of two n-tiles and two groups of 8 distances
  };
  // The table is [groups, widths / 16, 32 lanes, 2 n-tiles, 2 groups]. `group` contains the distance of row 0 and
  // column 7.
  static KERNEL_CODE void load_distances(Distances& u, const void* table, int group, int slice) {
    constexpr int GROUP_BYTES = G::WIDTH * 32;
    Address at = advance(address(table, lane_id() * 16), (long long)group * GROUP_BYTES);
    UNROLL_FOR (int step = 0; step < STEPS; step++) {
      u.near[step] = load_global<4>(at, (slice * STEPS + step) * 512);
      u.far[step] = load_global<4>(at, 2 * GROUP_BYTES + (slice * STEPS + step) * 512);
    }
  }
  static KERNEL_CODE void begin_hidden(f32 (&hidden)[G::N_TILES][4], const Distances& u, int column) {
    i32 lane = lane_id(), bits = (lane / 4 - lane % 4 * 2 + (7 - column)) * 16;  // from word t to the 1 of row g
    // The compiler cannot tell that these operands are equal or zero. Otherwise it would copy them for every product.
    const u32 one = u32(0x3c00u), zero = shift_left(one, bits + 1024), same = one + zero;
    const u32 shift[4] = {shift_left(one, bits), zero, shift_left(one, bits - 128), shift_left(same, bits)};
    const u32 high = shift_left(same, bits - 128);
    UNROLL_FOR (int n = 0; n < G::N_TILES; n++) {
      const int first = n % 2 * 2;
      mma_exchange_from_zero(hidden[n], shift, u.near[n / 2].x[first], u.near[n / 2].x[first + 1]);
      if (column < 7) mma_exchange_k8(hidden[n], zero, high, u.far[n / 2].x[first]);
    }
  }
};
