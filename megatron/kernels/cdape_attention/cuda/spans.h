// The columns that rows see, and the tiles in which a block finds them.
//
// Row r stands at column position + r, the last that it sees. The first is column 0, or, if a kernel is LOCAL, one of
// its own: where its document or its window begins. Columns before a row's document are outside, for both convolutions;
// those before its window have no scores, and hidden values as any other.
//
// A LOCAL kernel begins 2p columns or more before the first that one of its rows sees, and so has no prologue: nothing
// left of there reaches a logit. E holds wherever a document begins, within a tile.
#pragma once
#include "geometry.h"

// Tiles first … end - 1. Of those plain … masked - 1 every row sees all scores.
struct Tiles {
  int first, plain, masked, end;
};

struct RowSpans {
  const void* document_starts;  // int32 [rows], where the rows' documents begin; null: all at `origin`'s 0
  long long batch;              // bytes from one sequence to the next
  int rows, columns;            // rows of the chunk, and columns that its last row sees
  int position;                 // of the chunk's first row: row r sees columns … position + r
  int window, origin;           // LOCAL: columns that a row sees at most, and what column 0 is in `document_starts`
  int edge_position;            // LOCAL: E's first row is of this position in a document

  KERNEL_CODE void select_sequence(int index) {
    if (document_starts != nullptr) document_starts = (const char*)document_starts + index * batch;
  }

  // Where a row's document begins. Rows beyond the last are as the last.
  KERNEL_CODE int find_document(int row) const {
    return (document_starts == nullptr ? 0 : load_uniform(document_starts, row < rows ? row : rows - 1)) - origin;
  }
  KERNEL_CODE i32 find_lanes_document(i32 row) const {
    if (document_starts == nullptr) return i32(-origin);
    return i32(load_global<1>(address(document_starts, minimum(row, i32(rows - 1)) * 4), 0).x[0]) - origin;
  }
  // The first column that a row sees.
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

  // Goes over the tiles: step.take<MASKED>(tile).
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
