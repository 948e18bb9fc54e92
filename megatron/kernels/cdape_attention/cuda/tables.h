// Terms that Conv1 computes from the bias, the initial values of hidden values: U by distance, E at the left edge.
#pragma once
#include "gates.h"
#include "scores.h"

template <class G, bool BY_WIDTHS = false>
struct Tables {
  typedef HiddenLayout<BY_WIDTHS> Layout;
  static constexpr int STEPS = G::N_TILES / 2;  // steps of 16 widths in a slice
  // Bytes of a column and of a row of E.
  static constexpr int COLUMN_BYTES = G::WIDTH * 4, EDGE_BYTES = G::EDGE * COLUMN_BYTES;

  // Loads 16 widths of E, float32 [R, EDGE, D], of a row tile. Rows from `rows` on do not exist.
  static KERNEL_CODE void load_edge(f32 (&hidden)[2][4], const void* edge, int rows, int first_row, int column,
                                    int step) {
    UNROLL_FOR (int y = 0; y < Layout::ROWS; y++) {
      i32 row = minimum(Layout::find_row(y) + first_row, i32(rows - 1));
      typename Layout::Widths widths =
          Layout::load(address(edge, row * EDGE_BYTES + Layout::locate_widths()), column * COLUMN_BYTES + step * 64);
      UNROLL_FOR (int n = 0; n < 2; n++)
        UNROLL_FOR (int x = 0; x < 4; x++)
          if (Layout::row_index(n, x) == y) hidden[n][x] = widths.of[Layout::width_index(n, x)];
    }
  }

  // Positions of a lane's rows if each row has its own edges: relative to the rows' documents and, with gates, to the
  // columns that they see.
  struct Places {
    i32 of_row[Layout::ROWS];    // row of E
    i32 document[Layout::ROWS];  // column at which the row's document begins
    i32 row[Layout::ROWS];       // row of the chunk
    i32 first[Layout::ROWS];     // GATED: first and last column that the row sees
    i32 last[Layout::ROWS];
  };
  static KERNEL_CODE void find_places(Places& places, const ScoreInputs& in, int first_row) {
    UNROLL_FOR (int r = 0; r < Layout::ROWS; r++) {
      places.row[r] = Layout::find_row(r) + first_row;
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
    return row * EDGE_BYTES + place * COLUMN_BYTES + Layout::locate_widths() + step * 64;
  }
  // Replaces the hidden values at edges by those of E.
  static KERNEL_CODE void select_edge(f32 (&hidden)[2][4], const void* edge, const Places& places, int column,
                                      int step) {
    UNROLL_FOR (int r = 0; r < Layout::ROWS; r++) {
      typename Layout::Widths widths =
          Layout::load(address(edge, locate_edge(places.of_row[r], places, r, column, step)), 0);
      UNROLL_FOR (int n = 0; n < 2; n++)
        UNROLL_FOR (int x = 0; x < 4; x++)
          if (Layout::row_index(n, x) == r)
            hidden[n][x] = select(is_at_edge(places, r, column), widths.of[Layout::width_index(n, x)], hidden[n][x]);
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

  // U at the 23 distances between a run's columns and a row tile's rows, as operands of exchange numbers. A product
  // with a shifted identity selects the rows' distances at a column. It replaces 16 loads, whose distances differ by
  // one from column to column. By rows, the operands are B fragments of 16 and of 8 distances; by widths, A fragments
  // of the 15 distances of either half of the rows.
  template <int COUNT>
  struct Distances {
    u32 operand[COUNT][2][4];
  };
  // Loads COUNT steps of 16 widths. The table is [groups, widths / 16, 32 lanes, 2 n-tiles, 2 groups]; a lane has the
  // words of two n-tiles and two groups of 8 distances. `group` contains the distance of row 0 and column 7.
  template <int COUNT>
  static KERNEL_CODE void load_distances(Distances<COUNT>& u, const void* table, int group, int first_step) {
    constexpr int GROUP_BYTES = G::WIDTH * 32;
    Address at = advance(address(table, lane_id() * 16), (long long)group * GROUP_BYTES + first_step * 512);
    UNROLL_FOR (int step = 0; step < COUNT; step++)
      UNROLL_FOR (int part = 0; part < 2; part++) {
        Words<4> v = load_global<4>(at, (BY_WIDTHS ? part : 2 * part) * GROUP_BYTES + step * 512);
        UNROLL_FOR (int x = 0; x < 4; x++)
          u.operand[step][part][x] = BY_WIDTHS ? settle(v.x[x % 2 * 2 + x / 2]) : v.x[x];
      }
  }
  // Initializes the hidden values of all steps at a column of the run.
  template <int COUNT>
  static KERNEL_CODE void begin_hidden(f32 (*hidden)[4], const Distances<COUNT>& u, int column, int first_step = 0,
                                       int steps = COUNT) {
    i32 lane = lane_id(), bits = (lane / 4 - lane % 4 * 2 + (7 - column)) * 16;  // from word t to the 1 of row g
    // The compiler cannot tell that these operands are equal or zero. Otherwise it would copy them for every product.
    const u32 one = u32(0x3c00u), zero = shift_left(one, bits + 1024), same = one + zero;
    if constexpr (BY_WIDTHS) {
      const u32 near = shift_left(one, bits), far = shift_left(one, bits - 128);
      UNROLL_FOR (int n = 0; n < 2 * steps; n++)
        mma_exchange_from_zero(hidden[n], u.operand[first_step + n / 2][n % 2], near, far);
    } else {
      const u32 shift[4] = {shift_left(one, bits), zero, shift_left(one, bits - 128), shift_left(same, bits)};
      const u32 high = shift_left(same, bits - 128), none = shift_left(same, bits + 1024);
      UNROLL_FOR (int n = 0; n < 2 * steps; n++) {
        const u32(&near)[4] = u.operand[first_step + n / 2][0];
        mma_exchange_from_zero(hidden[n], shift, near[n % 2 * 2], near[n % 2 * 2 + 1]);
        if (column < 7) mma_exchange_k8(hidden[n], none, high, u.operand[first_step + n / 2][1][n % 2 * 2]);
      }
    }
  }
};
