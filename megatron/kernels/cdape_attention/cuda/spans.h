// Columns that rows see, and the tiles that contain them.
//
// The last column that row r sees is position + r. The first is column 0, or, in a LOCAL kernel, the first column of
// the row's document or window. Columns before a row's document are padding for both convolutions. Columns before its
// window have no scores, but have hidden values.
//
// A LOCAL kernel begins at least 2p columns before the first column that any of its rows sees. No column further left
// affects a logit, so it has no prologue. E applies wherever a document begins within a tile.
#pragma once
#include "geometry.h"

// Tiles first … end - 1. In tiles plain … masked - 1, every row sees all scores.
struct Tiles {
  int first, plain, masked, end;
};

struct RowSpans {
  const void* document_starts;  // int32 [rows], positions at which the rows' documents begin; null if all are 0
  long long starts_batch;       // bytes from one sequence's document starts to the next
  int rows, columns;            // rows of the chunk, and columns that its last row sees
  int position;                 // column of the chunk's first row; row r sees columns up to position + r
  int window, origin;           // LOCAL: maximum number of columns that a row sees; position of column 0
  int edge_position;            // LOCAL: position in a document of E's first row

  KERNEL_CODE void select_sequence(int index) {
    if (document_starts != nullptr) document_starts = (const char*)document_starts + index * starts_batch;
  }

  // Column at which a row's document begins. For rows after the last, that of the last row.
  KERNEL_CODE int find_document(int row) const {
    return (document_starts == nullptr ? 0 : load_uniform(document_starts, row < rows ? row : rows - 1)) - origin;
  }
  KERNEL_CODE i32 find_lanes_document(i32 row) const {
    if (document_starts == nullptr) return i32(-origin);
    return i32(load_global<1>(address(document_starts, minimum(row, i32(rows - 1)) * 4), 0).x[0]) - origin;
  }
  // First column that a row sees.
  KERNEL_CODE int find_first(int row) const {
    const int document = find_document(row), in_window = position + row - window + 1;
    return document > in_window ? document : in_window;
  }
  KERNEL_CODE i32 find_lanes_first(i32 row) const {
    return maximum(find_lanes_document(row), row + (position - window + 1));
  }

  template <class G>
  KERNEL_CODE Tiles find_tiles(int first_row) const {
    constexpr int COLUMNS = G::COLUMNS, REACH = 2 * G::PADDING;
    const int first_position = position + first_row;
    const bool is_ragged = first_row + G::ROWS > rows;
    Tiles tiles;
    tiles.end = (first_position + G::ROWS + COLUMNS - 1) / COLUMNS;
    tiles.masked = is_ragged || first_position < REACH ? 0 : (first_position - REACH + 1) / COLUMNS;
    tiles.first = tiles.plain = 0;
    if constexpr (G::LOCAL) {
      tiles.first = (find_first(first_row) - REACH + COLUMNS) / COLUMNS - 1;
      const int plain = (find_first(first_row + G::ROWS - 1) + COLUMNS - 1) / COLUMNS;
      tiles.plain = plain > tiles.first ? plain : tiles.first + 1;  // the first tile is not plain
      if (tiles.plain >= tiles.masked) tiles.plain = tiles.masked = tiles.end;
    }
    return tiles;
  }

  // Calls step.take<MASKED>(tile) for each tile.
  template <class G, class Step>
  static KERNEL_CODE void go_over(const Tiles& tiles, Step& step) {
    if constexpr (G::LOCAL) {
      NO_UNROLL_FOR (int tile = tiles.first; tile < tiles.end; tile++) {
        if (tile == tiles.plain)
          NO_UNROLL_FOR (; tile < tiles.masked; tile++) step.template take<false>(tile);
        step.template take<true>(tile);
      }
    } else {
      NO_UNROLL_FOR (int tile = 0; tile < tiles.masked; tile++) step.template take<false>(tile);
      NO_UNROLL_FOR (int tile = tiles.masked; tile < tiles.end; tile++) step.template take<true>(tile);
    }
  }
};
