// What Conv1 makes of the bias, with which hidden values begin: U by distance, E at the left edge.
#pragma once
#include "gates.h"
#include "scores.h"

template <class G>
struct Tables {
  static constexpr int STEPS = G::N_TILES / 2;  // of 16 widths, in a slice
  // Of a column of E, and of a row.
  static constexpr int COLUMN_BYTES = G::WIDTH * 4, EDGE_BYTES = G::EDGE * COLUMN_BYTES;

  // U as float32 [entries, 4 n-tiles, 4, 4], of rows g and g + 8 at a column: half of the width, as accumulators.
  static KERNEL_CODE void load_entries(f32 (&hidden)[2][4], const Address (&entries)[2], int column, int step) {
    // An entry has for each n-tile and t the widths of distances n and n + 8. n-tiles 2x and 2x + 1 of odd entries are
    // swapped, which spreads a warp's loads over banks.
    UNROLL_FOR (int n = 0; n < 2; n++) {
      Words<4> v = load_global<4>(entries[(n ^ column) & 1], step * 128 - column * 256);
      UNROLL_FOR (int x = 0; x < 4; x++) hidden[n][x] = as_f32(v.x[x]);
    }
  }

  // E, float32 [R, EDGE, D], of rows g and g + 8 of a row tile, which exist below `rows`: 16 widths.
  static KERNEL_CODE void load_edge(f32 (&hidden)[2][4], const void* edge, int rows, int first_row, int column,
                                    int step) {
    i32 lane = lane_id(), g = lane / 4, t = lane % 4;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      i32 row = minimum(g + (first_row + 8 * r), i32(rows - 1));
      Words<4> v = load_global<4>(address(edge, row * EDGE_BYTES + t * 16), column * COLUMN_BYTES + step * 64);
      UNROLL_FOR (int x = 0; x < 4; x++) hidden[x / 2][2 * r + x % 2] = as_f32(v.x[x]);
    }
  }

  // The same where rows have edges of their own: where the hidden values of a column of rows g and g + 8 stand in the
  // rows' documents and, with gates, around the columns that they see.
  struct Places {
    i32 of_row[2];    // the row's E
    i32 document[2];  // where its document begins
    i32 row[2];       // in the chunk
    i32 first[2];     // GATED: the columns that the row sees
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
  // Whether a hidden value of a run's 8 columns from `column` on, of 16 rows from `first_row` on, may be at an edge.
  static KERNEL_CODE bool has_edge(const ScoreInputs& in, int first_row, int column) {
    bool has_begin = false;
    if constexpr (G::LOCAL)
      has_begin = column < (G::GATED ? in.find_first(first_row + 15) : in.find_document(first_row + 15)) + G::PADDING;
    return has_begin || (G::GATED && column + 7 > in.position + first_row - G::PADDING);
  }
  // The offset of a lane's widths of a column, or of the nearest one of E, in an array [rows, EDGE, D] of E or its
  // gradient.
  static KERNEL_CODE i32 locate_edge(i32 row, const Places& places, int r, int column, int step) {
    i32 place = i32(column) - places.document[r];
    if constexpr (G::GATED)
      place = select(is_at_begin(places, r, column), i32(column + G::PADDING) - places.first[r],
                     i32(column + 3 * G::PADDING - 1) - places.last[r]);
    place = minimum(maximum(place, i32(0)), i32(G::EDGE - 1));
    return row * EDGE_BYTES + place * COLUMN_BYTES + lane_id() % 4 * 16 + step * 64;
  }
  // Replaces hidden values by E where it holds.
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

  // U of the 23 distances between a run's columns and a row tile's rows, as B fragments of exchange numbers. A product
  // with a shifted identity takes from them the rows' distances at a column, instead of 16 loads of what differs by one
  // distance from column to column.
  struct Distances {
    Words<4> near[STEPS], far[STEPS];  // by 16 of a slice's widths: two n-tiles' words of two groups of 8 distances
  };
  // The table is [groups, widths / 16, 32 lanes, 2 n-tiles, 2 groups], and `group` that of the distance of row 0 and
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
    i32 lane = lane_id(), bits = (lane / 4 - lane % 4 * 2 + (7 - column)) * 16;  // to row g's one, from word t
    // Operands that a compiler does not know to be equal or zero: it would copy them for every product.
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
