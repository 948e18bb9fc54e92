// Layouts of 16 rows and 16 widths of the hidden values at a column, as the accumulators hidden[n][x] of two products.
//
// By rows, n-tile n has 8 widths, and a lane has 4 widths in rows g and g + 8. By widths, which is transposed, n-tile n
// has rows 8n … 8n + 7, and a lane has 2 widths in 4 rows. By rows, the packed words are an A fragment, the operand of
// a product over widths. By widths, they are two B fragments of 8 widths, operands of a product over rows.
#pragma once
#include "geometry.h"

template <bool BY_WIDTHS>
struct HiddenLayout {
  static constexpr int ROWS = BY_WIDTHS ? 4 : 2;  // rows of a lane

  // Index of an accumulator's row and width among those of the lane.
  static constexpr KERNEL_CODE int row_index(int n, int x) { return BY_WIDTHS ? 2 * n + x % 2 : x / 2; }
  static constexpr KERNEL_CODE int width_index(int n, int x) { return BY_WIDTHS ? x / 2 : 2 * n + x % 2; }
  // The lane's y-th row of 16.
  static KERNEL_CODE i32 find_row(int y) {
    i32 lane = lane_id();
    return BY_WIDTHS ? lane % 4 * 2 + (y % 2 + y / 2 * 8) : lane / 4 + 8 * y;
  }
  // Offset of the lane's first width in float32 [16].
  static KERNEL_CODE i32 locate_widths() {
    i32 lane = lane_id();
    return BY_WIDTHS ? lane / 8 * 16 + lane / 4 % 2 * 4 : lane % 4 * 16;
  }
  // Loads the lane's widths of a row, which begin at an address.
  struct Widths {
    f32 of[4];
  };
  static KERNEL_CODE Widths load(Address at, int constant) {
    Widths widths;
    if constexpr (BY_WIDTHS) {
      UNROLL_FOR (int x = 0; x < 2; x++) widths.of[x] = as_f32(load_global<1>(at, constant + 8 * x).x[0]);
    } else {
      Words<4> v = load_global<4>(at, constant);
      UNROLL_FOR (int x = 0; x < 4; x++) widths.of[x] = as_f32(v.x[x]);
    }
    return widths;
  }
};
